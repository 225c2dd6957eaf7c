"""Sends that end early: every caller is told, and told once."""

import asyncio

import pytest

pytest.importorskip("pika")

from twinbus.connection import ConnectionString
from twinbus.errors import MessagingError, QuotaExceededError, ServerBusyError
from twinbus.namespace.rabbitmq.connections import BrokerConnection
from twinbus.namespace.rabbitmq.messages import Publication
from twinbus.namespace.rabbitmq.publishing import Dispatch, Publisher, _PublishingRoute

BUSY = ServerBusyError("busy", scope="")


def route() -> _PublishingRoute:
    connection = BrokerConnection(ConnectionString.parse("Endpoint=amqp://nobody.example"), "test")
    return _PublishingRoute("orders", Publisher(connection), connection)


def dispatch(told: list[MessagingError | None], *, published: int, unconfirmed: int) -> Dispatch:
    def encode(_to_topic: bool) -> list[Publication]:
        return []

    made = Dispatch("orders", 3, encode, told.append)
    made.next, made.unconfirmed = published, unconfirmed
    return made


@pytest.mark.parametrize("published", [0, 2])
def test_a_send_that_has_nothing_to_wait_for_ends_at_once(published: int) -> None:
    async def story() -> list[MessagingError | None]:
        told: list[MessagingError | None] = []
        one = route()
        one._waiting.append(dispatch(told, published=published, unconfirmed=0))
        one.fail_waiting(BUSY)
        return told

    assert asyncio.run(story()) == [BUSY]


def test_a_send_with_messages_on_their_way_ends_with_the_last_confirm() -> None:
    async def story() -> tuple[list[MessagingError | None], list[MessagingError | None]]:
        told: list[MessagingError | None] = []
        one = route()
        one._waiting.append(dispatch(told, published=2, unconfirmed=1))
        one.fail_waiting(BUSY)
        before = list(told)
        one.fail_unconfirmed(QuotaExceededError("full"))  # of others
        return before, told

    before, after = asyncio.run(story())
    assert before == after == []


def test_a_caller_is_told_once() -> None:
    told: list[MessagingError | None] = []
    one = dispatch(told, published=3, unconfirmed=0)
    one.finish(None)
    one.finish(BUSY)
    assert told == [None]
