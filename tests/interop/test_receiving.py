"""The unmodified SDK receives, settles and browses."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.interop.bus import (
    CLOCK_SLACK_S,
    Bus,
    await_moment,
    bodies,
    body,
    in_seconds,
    take,
    take_one,
)
from tests.waiting import PATIENCE_S, until
from twinbus import BrokeredMessage

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import (
    ServiceBusMessage,
    ServiceBusMessageState,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import MessageLockLostError, MessageNotFoundError, ServiceBusError


@pytest.fixture
def path(bus: Bus) -> str:
    return bus.queue()


def send(bus: Bus, path: str, *texts: str) -> None:
    """Send natively: a sender of the SDK takes half a second to connect."""
    messages = [BrokeredMessage(text.encode()) for text in texts]
    bus.factory.create_message_sender(path).send_batch(messages)


def test_many_are_received_at_once_and_completed(bus: Bus, path: str) -> None:
    send(bus, path, *"abcdefgh")
    receiver = bus.receiver(path)
    found = receiver.receive_messages(8, max_wait_time=5)
    assert b"".join(bodies(found)) == b"abcdefgh"
    assert {message.delivery_count for message in found} == {0}
    for item in found:
        receiver.complete_message(item)
    assert bus.active(path) == 0


def test_an_empty_queue_gives_nothing_in_time(bus: Bus, path: str) -> None:
    receiver = bus.receiver(path)
    receiver.peek_messages()  # the SDK attaches when it is first used, which takes time, too
    began = time.monotonic()
    assert receiver.receive_messages(max_wait_time=0.5) == []
    assert 0.4 < time.monotonic() - began < PATIENCE_S


def test_a_waiting_receiver_gets_what_is_sent_meanwhile(bus: Bus, path: str) -> None:
    receiver = bus.receiver(path, max_wait_time=5)
    sender = bus.sender(path)
    sender.send_messages(ServiceBusMessage("first"))
    found = []
    for message in receiver:
        found.append(body(message))
        receiver.complete_message(message)
        if len(found) == 3:
            break
        sender.send_messages(ServiceBusMessage(f"after {len(found)}"))
    assert found == [b"first", b"after 1", b"after 2"]


def test_a_message_that_was_received_and_deleted_is_gone(bus: Bus, path: str) -> None:
    send(bus, path, "a", "b")
    receiver = bus.receiver(path, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE)
    found = take(receiver, 2)
    assert bodies(found) == [b"a", b"b"]
    assert found[0].lock_token is None
    assert found[0].locked_until_utc is None
    assert bus.active(path) == 0


def test_a_receiver_fetches_ahead(bus: Bus, path: str) -> None:
    send(bus, path, *(f"{n}" for n in range(30)))
    receiver = bus.receiver(path, prefetch_count=10)
    found: list[bytes] = []
    while len(found) < 30:
        for message in receiver.receive_messages(5, max_wait_time=5):
            receiver.complete_message(message)
            found.append(body(message))
    assert found == [str(n).encode() for n in range(30)]
    assert bus.active(path) == 0


def test_an_abandoned_message_comes_again_and_is_counted(bus: Bus, path: str) -> None:
    send(bus, path, "a")
    receiver = bus.receiver(path)
    for count in range(3):
        message = take_one(receiver)
        assert message.delivery_count == count
        receiver.abandon_message(message)


def test_a_message_abandoned_too_often_is_dead_lettered(bus: Bus) -> None:
    path = bus.queue(max_delivery_count=2)
    send(bus, path, "poison")
    receiver = bus.receiver(path)
    for _ in range(2):
        receiver.abandon_message(take_one(receiver))
    dead = take_one(bus.receiver(path, sub_queue=ServiceBusSubQueue.DEAD_LETTER))
    assert dead.dead_letter_reason == "MaxDeliveryCountExceeded"


def test_a_deferred_message_is_received_by_its_number(bus: Bus, path: str) -> None:
    send(bus, path, "later", "now")
    receiver = bus.receiver(path)
    later = take_one(receiver)
    receiver.defer_message(later)
    now = take_one(receiver)
    assert body(now) == b"now"
    receiver.complete_message(now)
    assert later.sequence_number is not None
    [found] = receiver.receive_deferred_messages([later.sequence_number])
    assert body(found) == b"later"
    assert found.state is ServiceBusMessageState.DEFERRED
    receiver.complete_message(found)
    assert bus.active(path) == 0


@pytest.mark.parametrize("how", ["abandon", "dead-letter", "defer"])
def test_a_deferred_message_can_be_settled_in_every_way(bus: Bus, path: str, how: str) -> None:
    send(bus, path, "later")
    receiver = bus.receiver(path)
    message = take_one(receiver)
    receiver.defer_message(message)
    assert message.sequence_number is not None
    [found] = receiver.receive_deferred_messages(message.sequence_number)
    if how == "abandon":
        receiver.abandon_message(found)
    elif how == "defer":
        receiver.defer_message(found)
    else:
        receiver.dead_letter_message(found, reason="late", error_description="too late")
        dead = take_one(bus.receiver(path, sub_queue=ServiceBusSubQueue.DEAD_LETTER))
        assert (dead.dead_letter_reason, dead.dead_letter_error_description) == ("late", "too late")
        return
    [again] = receiver.receive_deferred_messages(message.sequence_number)
    assert body(again) == b"later"


def test_a_number_that_is_not_deferred_is_not_found(bus: Bus, path: str) -> None:
    receiver = bus.receiver(path, bus.hasty)
    with pytest.raises(MessageNotFoundError):
        receiver.receive_deferred_messages([12345])


def test_a_dead_letter_says_why(bus: Bus, path: str) -> None:
    send(bus, path, "bad")
    receiver = bus.receiver(path)
    receiver.dead_letter_message(
        take_one(receiver), reason="no address", error_description="line 3 is empty"
    )
    graveyard = bus.receiver(path, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    dead = take_one(graveyard)
    assert body(dead) == b"bad"
    assert dead.dead_letter_reason == "no address"
    assert dead.dead_letter_error_description == "line 3 is empty"
    graveyard.complete_message(dead)
    assert bus.manager.get_runtime_properties(path).dead_letter_message_count == 0


def test_a_renewed_lock_lasts_longer(bus: Bus) -> None:
    path = bus.queue(lock_duration=timedelta(seconds=2))
    send(bus, path, "a")
    receiver = bus.receiver(path)
    message = take_one(receiver)
    first = message.locked_until_utc
    assert first is not None
    assert timedelta(0) < first - datetime.now(UTC) <= timedelta(seconds=2 + CLOCK_SLACK_S)
    until(lambda: receiver.renew_message_lock(message) > first)
    renewed = receiver.renew_message_lock(message)
    assert renewed > first
    assert message.locked_until_utc == renewed
    receiver.complete_message(message)
    assert bus.active(path) == 0


def test_a_message_whose_lock_expired_comes_again_and_is_counted(bus: Bus) -> None:
    path = bus.queue(lock_duration=timedelta(seconds=1))
    send(bus, path, "a")
    receiver = bus.receiver(path)
    message = take_one(receiver)
    again = take_one(receiver)
    assert again.delivery_count == 1
    with pytest.raises(MessageLockLostError):
        receiver.complete_message(message)
    receiver.complete_message(again)
    assert bus.active(path) == 0


def test_the_server_itself_refuses_a_lock_that_was_lost(bus: Bus) -> None:
    path = bus.queue(lock_duration=timedelta(seconds=1))
    send(bus, path, "a")
    receiver = bus.receiver(path)
    message = take_one(receiver)
    locked_until = message.locked_until_utc
    assert locked_until is not None
    message._raw_amqp_message.annotations[b"x-opt-locked-until"] = (  # a client whose clock is late
        int(in_seconds(60).timestamp() * 1000)
    )
    await_moment(locked_until)
    with pytest.raises(MessageLockLostError):
        receiver.complete_message(message)
    with pytest.raises(MessageLockLostError):
        receiver.renew_message_lock(message)


def test_browsing_locks_nothing_and_shows_every_state(bus: Bus, path: str) -> None:
    send(bus, path, "deferred", "locked", "active")
    sender = bus.sender(path)
    sender.schedule_messages(ServiceBusMessage("scheduled"), in_seconds(600))
    receiver = bus.receiver(path)
    receiver.defer_message(take_one(receiver))
    assert body(take_one(receiver)) == b"locked"
    found = bus.receiver(path).peek_messages(10)
    assert {body(item): item.state for item in found} == {
        b"deferred": ServiceBusMessageState.DEFERRED,
        b"locked": ServiceBusMessageState.ACTIVE,
        b"active": ServiceBusMessageState.ACTIVE,
        b"scheduled": ServiceBusMessageState.SCHEDULED,
    }


def test_browsing_goes_on_from_a_number(bus: Bus, path: str) -> None:
    receiver = bus.receiver(path)
    assert receiver.peek_messages() == []
    send(bus, path, "a", "b", "c")
    first, second = receiver.peek_messages(2)
    assert bodies([first, second]) == [b"a", b"b"]
    assert bodies(receiver.peek_messages(10)) == [b"c"]
    assert second.sequence_number is not None
    found = receiver.peek_messages(10, sequence_number=second.sequence_number)
    assert bodies(found) == [b"b", b"c"]


def test_browsing_large_messages_gives_as_many_as_fit(bus: Bus, path: str) -> None:
    sender = bus.factory.create_message_sender(path)
    for number in range(30):
        sender.send(BrokeredMessage(bytes(200_000), message_id=str(number)))
    receiver = bus.receiver(path)
    found: list[str | None] = []
    first = 1
    while page := receiver.peek_messages(30, sequence_number=first):
        found += [message.message_id for message in page]
        assert page[-1].sequence_number is not None
        first = page[-1].sequence_number + 1
    assert found == [str(number) for number in range(30)]


def test_two_receivers_share_the_messages_of_a_queue(bus: Bus, path: str) -> None:
    send(bus, path, *(f"{n}" for n in range(40)))
    pair = [bus.receiver(path) for _ in range(2)]
    found: list[bytes] = []
    taken: dict[ServiceBusReceiver, list[ServiceBusReceivedMessage]] = {item: [] for item in pair}
    for _ in range(4):
        for receiver in pair:
            taken[receiver] += take(receiver, 5)
    for receiver, messages in taken.items():
        for message in messages:
            receiver.complete_message(message)
            found.append(body(message))
    assert sorted(found) == sorted(str(n).encode() for n in range(40))
    assert bus.active(path) == 0


def test_a_closed_receiver_gives_back_what_nobody_has_seen(bus: Bus, path: str) -> None:
    send(bus, path, "a", "b", "c")
    with bus.sdk.get_queue_receiver(path) as receiver:
        receiver.complete_message(take_one(receiver))
    found = take(bus.receiver(path), 2)
    assert bodies(found) == [b"b", b"c"]
    assert {message.delivery_count for message in found} == {0}


def test_a_message_is_settled_on_a_link_of_its_own_after_the_receiver_came_back(
    bus: Bus, path: str
) -> None:
    send(bus, path, "a")
    receiver = bus.receiver(path)
    message = take_one(receiver)
    receiver._close_handler()  # type: ignore[no-untyped-call] # as after a lost connection
    receiver._open()
    receiver.complete_message(message)
    assert bus.active(path) == 0


def test_a_message_is_settled_once(bus: Bus, path: str) -> None:
    send(bus, path, "a")
    receiver = bus.receiver(path)
    message = take_one(receiver)
    receiver.complete_message(message)
    with pytest.raises((ValueError, ServiceBusError)):
        receiver.complete_message(message)
