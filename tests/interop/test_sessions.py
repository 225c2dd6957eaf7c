"""The unmodified SDK works with sessions."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, await_moment, bodies, body, take, take_one
from tests.waiting import PATIENCE_S, until
from twinbus import BrokeredMessage

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusMessage,
    ServiceBusReceiver,
    ServiceBusSession,
)
from azure.servicebus._pyamqp.constants import LinkState
from azure.servicebus._pyamqp.error import AMQPException
from azure.servicebus.exceptions import (
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)


@pytest.fixture
def path(bus: Bus) -> str:
    return bus.queue(requires_session=True)


def send(bus: Bus, path: str, *pairs: tuple[str, str]) -> None:
    bus.sender(path).send_messages(
        [ServiceBusMessage(text, session_id=name) for name, text in pairs]
    )


def accept(bus: Bus, path: str, session_id: Any, **options: Any) -> ServiceBusReceiver:
    return bus.receiver(path, bus.hasty, session_id=session_id, **options)


def session_of(receiver: ServiceBusReceiver) -> ServiceBusSession:
    assert isinstance(receiver.session, ServiceBusSession)
    return receiver.session


def test_a_session_gives_its_own_messages_in_order(bus: Bus, path: str) -> None:
    send(bus, path, ("a", "1"), ("b", "2"), ("a", "3"))
    receiver = accept(bus, path, "a")
    found = take(receiver, 2)
    assert bodies(found) == [b"1", b"3"]
    assert [message.session_id for message in found] == ["a", "a"]
    for item in found:
        receiver.complete_message(item)
    assert bus.active(path) == 1


def test_the_next_session_with_messages_is_accepted(bus: Bus, path: str) -> None:
    send(bus, path, ("a", "1"), ("b", "2"))
    first, second = (accept(bus, path, NEXT_AVAILABLE_SESSION) for _ in range(2))
    assert {body(take_one(first)), body(take_one(second))} == {b"1", b"2"}
    assert {session_of(first).session_id, session_of(second).session_id} == {"a", "b"}


def test_waiting_for_a_session_ends_in_time(bus: Bus, path: str) -> None:
    began = time.monotonic()
    with pytest.raises(OperationTimeoutError):
        accept(bus, path, NEXT_AVAILABLE_SESSION, max_wait_time=1).receive_messages()
    assert time.monotonic() - began < PATIENCE_S


def test_a_session_keeps_its_state(bus: Bus, path: str) -> None:
    session = session_of(accept(bus, path, "a"))
    assert session.get_state() is None
    session.set_state("step 2")
    assert session.get_state() == b"step 2"
    session.set_state(None)
    assert session.get_state() is None


def test_a_session_lock_is_renewed(bus: Bus) -> None:
    path = bus.queue(requires_session=True, lock_duration=timedelta(seconds=2))
    session = session_of(accept(bus, path, "a"))
    session.get_state()  # the SDK attaches when it is first used
    first = session.locked_until_utc
    assert first is not None
    assert timedelta(0) < first - datetime.now(UTC) <= timedelta(seconds=2)
    until(lambda: session.renew_lock() > first)
    renewed = session.renew_lock()
    assert renewed > first
    assert session.locked_until_utc == renewed


def test_a_session_that_another_holds_is_refused_and_free_after_close(bus: Bus, path: str) -> None:
    send(bus, path, ("a", "1"), ("a", "2"))
    holder = bus.hasty.get_queue_receiver(path, session_id="a")
    with holder:
        assert body(take_one(holder)) == b"1"
        with pytest.raises(SessionCannotBeLockedError):
            accept(bus, path, "a").receive_messages(max_wait_time=10)
    found = take(accept(bus, path, "a"), 2)
    assert bodies(found) == [b"1", b"2"]


def test_a_session_whose_lock_expired_is_lost(bus: Bus) -> None:
    path = bus.queue(requires_session=True, lock_duration=timedelta(seconds=1))
    send(bus, path, ("a", "1"))
    receiver = accept(bus, path, "a")
    message = take_one(receiver)
    locked_until = session_of(receiver).locked_until_utc
    assert locked_until is not None
    await_moment(locked_until)
    with pytest.raises(SessionLockLostError):
        receiver.complete_message(message)
    again = take_one(accept(bus, path, "a"))
    assert (body(again), again.delivery_count) == (b"1", 1)


def ended(receiver: ServiceBusReceiver) -> Any:
    """Read what the server says to an idle receiver; return why its link has ended, if it has."""
    handler: Any = receiver._handler
    try:
        handler._connection.listen(wait=False)
        assert handler._link.get_state() is LinkState.ATTACHED
    except AMQPException as error:
        return error.condition
    return None


def test_an_idle_receiver_loses_its_link_when_the_lock_of_its_session_lapses(bus: Bus) -> None:
    path = bus.queue(requires_session=True, lock_duration=timedelta(seconds=5))
    lost, renewed = (accept(bus, path, name) for name in "ab")
    for receiver in (lost, renewed):
        session_of(receiver).get_state()  # the SDK attaches when it is first used
    conditions = []

    def is_lost() -> bool:
        session_of(renewed).renew_lock()
        conditions.append(ended(lost))
        return conditions[-1] is not None

    until(is_lost)
    assert conditions[-1] == b"com.microsoft:session-lock-lost"
    assert ended(renewed) is None
    assert session_of(accept(bus, path, "a")).get_state() is None


def test_a_receiver_that_waits_loses_its_link_when_the_lock_of_its_session_lapses(
    bus: Bus,
) -> None:
    path = bus.queue(requires_session=True, lock_duration=timedelta(seconds=1))
    receiver = accept(bus, path, "a")
    with pytest.raises(SessionLockLostError):
        receiver.receive_messages(max_wait_time=30)


def test_a_session_can_have_an_empty_name(bus: Bus, path: str) -> None:
    send(bus, path, ("", "1"), ("other", "2"))
    receiver = accept(bus, path, "")
    message = take_one(receiver)
    assert (body(message), message.session_id) == (b"1", "")
    receiver.complete_message(message)


def test_a_message_without_a_session_is_refused(bus: Bus, path: str) -> None:
    with pytest.raises(ServiceBusError, match="session"):
        bus.sender(path).send_messages(ServiceBusMessage("a"))


def test_a_batch_with_one_message_without_a_session_is_refused_as_a_whole(
    bus: Bus, path: str
) -> None:
    batch = [ServiceBusMessage("a", session_id="s"), ServiceBusMessage("b")]
    with pytest.raises(ServiceBusError, match="session"):
        bus.sender(path).send_messages(batch)
    assert bus.active(path) == 0


def test_a_queue_with_sessions_needs_a_session_and_one_without_takes_none(
    bus: Bus, path: str
) -> None:
    with pytest.raises(ServiceBusError, match="requires sessions"):
        bus.receiver(path).receive_messages(max_wait_time=10)
    with pytest.raises(ServiceBusError, match="has no sessions"):
        accept(bus, bus.queue(), "a").receive_messages(max_wait_time=10)


def test_settling_and_browsing_within_a_session(bus: Bus, path: str) -> None:
    send(bus, path, ("a", "1"), ("b", "x"), ("a", "2"), ("a", "3"))
    receiver = accept(bus, path, "a")
    assert bodies(receiver.peek_messages(10)) == [b"1", b"2", b"3"]
    later = take_one(receiver)
    receiver.defer_message(later)
    receiver.abandon_message(take_one(receiver))
    assert later.sequence_number is not None
    [deferred] = receiver.receive_deferred_messages(later.sequence_number)
    receiver.complete_message(deferred)
    again = take_one(receiver)
    assert (body(again), again.delivery_count) == (b"2", 1)
    receiver.complete_message(again)
    receiver.dead_letter_message(take_one(receiver), reason="no")
    properties = bus.manager.get_runtime_properties(path)
    assert (properties.active_message_count, properties.dead_letter_message_count) == (1, 1)


def test_sessions_are_listed(bus: Bus, path: str) -> None:
    names = [f"session {number}" for number in range(120)]  # more than a page of the SDK
    send(bus, path, *((name, "x") for name in names))
    session_of(accept(bus, path, "with a state")).set_state("x")
    assert sorted(bus.sdk.list_queue_sessions(path)) == sorted([*names, "with a state"])
    since = datetime.now(UTC) - timedelta(minutes=1)
    assert list(bus.sdk.list_queue_sessions(path, state_updated_after=since)) == ["with a state"]
    later = datetime.now(UTC) + timedelta(minutes=1)
    assert list(bus.sdk.list_queue_sessions(path, state_updated_after=later)) == []
    assert list(bus.sdk.list_queue_sessions(bus.queue(requires_session=True))) == []


def test_browsing_a_session_passes_over_the_messages_of_others(bus: Bus, path: str) -> None:
    for name, count in (("many", 1500), ("few", 3), ("many", 1500)):
        messages = [BrokeredMessage(b"%d" % number, session_id=name) for number in range(count)]
        bus.factory.create_message_sender(path).send_batch(messages)
    found = accept(bus, path, "few").peek_messages(10)
    assert bodies(found) == [b"0", b"1", b"2"]
