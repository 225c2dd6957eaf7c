"""Sends that end early: every caller gets its outcome once."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pika")

from twinbus import BrokeredMessage
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString
from twinbus.errors import (
    MessagingError,
    OperationTimeoutError,
    QuotaExceededError,
    ServerBusyError,
)
from twinbus.namespace.rabbitmq.connections import BrokerConnection
from twinbus.namespace.rabbitmq.messages import Publication
from twinbus.namespace.rabbitmq.publishing import (
    Dispatch,
    Publisher,
    _PublishingRoute,
    _Unconfirmed,
)
from twinbus.namespace.rabbitmq.runner import CommandRunner, RabbitJob
from twinbus.protocol.commands import Send
from twinbus.protocol.requests import BlockingRequest

WHERE = ConnectionString.parse("Endpoint=amqp://nobody.example")
BUSY = ServerBusyError("busy", scope="")


def route() -> _PublishingRoute:
    connection = BrokerConnection(WHERE, "test")
    return _PublishingRoute("orders", Publisher(connection), connection)


def dispatch(
    outcomes: list[MessagingError | None], *, published: int, unconfirmed: int
) -> Dispatch:
    def encode(_to_topic: bool) -> list[Publication]:
        return []

    made = Dispatch("orders", range(3), encode, outcomes.append)
    made.next, made.unconfirmed = published, unconfirmed
    return made


@pytest.mark.parametrize("published", [0, 2])
def test_a_send_that_has_nothing_to_wait_for_ends_at_once(published: int) -> None:
    async def story() -> list[MessagingError | None]:
        outcomes: list[MessagingError | None] = []
        publisher = route()
        publisher._waiting.append(dispatch(outcomes, published=published, unconfirmed=0))
        publisher.fail_waiting(BUSY)
        return outcomes

    assert asyncio.run(story()) == [BUSY]


def test_a_send_with_messages_on_their_way_ends_with_the_last_confirm() -> None:
    async def story() -> tuple[list[MessagingError | None], list[MessagingError | None]]:
        outcomes: list[MessagingError | None] = []
        publisher = route()
        publisher._waiting.append(dispatch(outcomes, published=2, unconfirmed=1))
        publisher.fail_waiting(BUSY)
        before = list(outcomes)
        publisher.fail_unconfirmed(QuotaExceededError("full"))  # of others
        return before, outcomes

    before, after = asyncio.run(story())
    assert before == after == []


def test_a_caller_gets_one_outcome() -> None:
    outcomes: list[MessagingError | None] = []
    send = dispatch(outcomes, published=3, unconfirmed=0)
    send.finish(None)
    send.finish(BUSY)
    assert outcomes == [None]


def test_a_send_without_a_reply_in_time_names_the_rows_that_were_accepted() -> None:
    async def story() -> None:
        runner = CommandRunner(WHERE, ManualClock())
        job = RabbitJob(request)
        job.dispatch = dispatch([], published=3, unconfirmed=2)
        job.dispatch.accept(1)
        runner._time_out(job, 5.0)

    request = BlockingRequest(Send("orders", []))
    asyncio.run(story())
    with pytest.raises(OperationTimeoutError) as raised:
        request.result(0)
    assert raised.value.facts["accepted"] == {1: 0}


def test_a_frame_of_an_old_connection_does_not_block_the_new_one() -> None:
    async def story() -> BrokerConnection:
        connection = BrokerConnection(WHERE, "test")
        old, connection._connection = object(), object()
        frame = SimpleNamespace(method=SimpleNamespace(reason="low on memory"))
        connection._blocked(old, frame)
        assert connection.blocked_since is None
        connection._blocked(connection._connection, frame)
        connection._unblocked(old, frame)
        return connection

    assert asyncio.run(story()).blocked_since is not None


def test_after_a_refusal_the_next_message_goes_over_a_new_channel() -> None:
    results: list[MessagingError | None] = []
    closed: list[bool] = []

    async def story() -> tuple[_PublishingRoute, _PublishingRoute]:
        connection = BrokerConnection(WHERE, "test")
        publisher = Publisher(connection)
        old = publisher._routes["orders"] = _PublishingRoute("orders", publisher, connection)
        channel: Any = SimpleNamespace(is_open=True, close=lambda: closed.append(True))
        old._channel = channel
        send = Dispatch("orders", range(1), lambda _to_topic: [], results.append)
        send.next, send.unconfirmed = 1, 1
        old._unconfirmed[1] = _Unconfirmed(send, 3, 0)
        old._confirmed(1, False, False)
        return old, publisher._routes["orders"]

    old, new = asyncio.run(story())
    assert new is not old
    assert closed
    assert [type(result) for result in results] == [QuotaExceededError]


def test_the_messages_of_a_finished_send_do_not_wait_for_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Dispatch] = []
    runner = CommandRunner(WHERE, ManualClock())
    monkeypatch.setattr(runner._publisher, "begin", begun.append)
    runner.begin(RabbitJob(BlockingRequest(Send("orders", [BrokeredMessage(b"x")]))), None)
    holder = weakref.ref(begun[0].encode)  # it refers to the messages
    gc.disable()
    try:
        begun.pop().finish(None)
        assert holder() is None
    finally:
        gc.enable()
