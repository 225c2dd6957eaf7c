"""Receiving: peek-lock, receive-and-delete, long poll, competing consumers, browsing."""

from datetime import timedelta
from uuid import UUID

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    abandon,
    bodies,
    complete,
    later,
    message,
    outcome,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    settle,
    start,
    take,
    topic,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessagingError,
)
from twinbus.limits import MAX_RECEIVE_MESSAGES, MAX_WAIT
from twinbus.message import MessageState, to_messages
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    DeleteEntity,
    Disposition,
    Peek,
    Receive,
    ReceiveMode,
    Send,
)

HOUR = timedelta(hours=1)
KILOBYTE = "x" * 1024


# -- peek-lock ---------------------------------------------------------------------------------


def test_a_locked_message_is_delivered_to_no_one_else(world: World) -> None:
    queue(world)
    send(world, "a")
    receive_one(world)
    assert receive(world) == []


def test_a_first_delivery_has_no_failed_delivery_before_it(world: World) -> None:
    queue(world)
    send(world, "a")
    assert receive_one(world).delivery_count == 0


def test_a_lock_lasts_for_the_lock_duration(world: World) -> None:
    world.need(Capability.LOCK_DURATION)
    queue(world, lock_duration=timedelta(seconds=30))
    send(world, "a")
    assert receive_one(world).locked_until_utc == later(world, seconds=30)
    world.wait(seconds=29)
    assert receive(world) == []


def test_a_lapsed_lock_returns_the_message_to_the_queue(world: World) -> None:
    queue(world, lock_duration=timedelta(seconds=30))
    send(world, "a")
    first = receive_one(world)
    world.wait(seconds=31)
    again = receive_one(world)
    assert again.body == b"a"
    assert again.sequence_number == first.sequence_number
    assert again.lock_token != first.lock_token


def test_a_lapsed_lock_counts_as_a_failed_delivery(world: World) -> None:
    queue(world, lock_duration=timedelta(seconds=30))
    send(world, "a")
    receive_one(world)
    world.wait(seconds=31)
    assert receive_one(world).delivery_count == 1


def test_each_locked_message_has_its_own_token(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    locked = {m.lock_token for m in receive(world)}
    assert len(locked) == 3
    assert all(isinstance(token, UUID) for token in locked)


def test_competing_consumers_never_get_the_same_message(world: World) -> None:
    queue(world)
    send(world, *"abcdef")
    shares = [bodies(receive(world, count=2)) for _ in range(4)]
    assert shares == [["a", "b"], ["c", "d"], ["e", "f"], []]


def test_a_returned_message_comes_before_younger_ones(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    abandon(world, receive_one(world))
    assert bodies(receive(world)) == ["a", "b", "c"]


# -- receive and delete ------------------------------------------------------------------------


def test_a_message_received_and_deleted_is_gone(world: World) -> None:
    queue(world)
    send(world, "a")
    assert take(world) == ["a"]
    world.wait(hours=1)
    assert receive(world) == []
    assert runtime(world).active_message_count == 0


def test_a_message_received_and_deleted_has_no_lock(world: World) -> None:
    queue(world)
    send(world, "a")
    batch = world.ask(Receive(QUEUE, mode=ReceiveMode.RECEIVE_AND_DELETE))
    (received,) = to_messages(batch)
    assert received.lock_token is None
    assert received.locked_until_utc is None


# -- how many, how much ------------------------------------------------------------------------


def test_a_receive_takes_no_more_than_it_asked_for(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    assert bodies(receive(world, count=2)) == ["a", "b"]


def test_a_receive_takes_what_is_there_if_it_asked_for_more(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    assert bodies(receive(world, count=10)) == ["a", "b"]


def test_a_receive_takes_no_more_bytes_than_it_asked_for(world: World) -> None:
    queue(world)
    send(world, *[KILOBYTE] * 10)
    batch = world.ask(Receive(QUEUE, 10, max_bytes=3500))
    assert batch.num_rows == 3
    assert len(receive(world)) == 7


def test_a_receive_takes_at_least_one_message_whatever_its_size(world: World) -> None:
    queue(world)
    send(world, KILOBYTE, KILOBYTE)
    assert world.ask(Receive(QUEUE, 10, max_bytes=1)).num_rows == 1


@pytest.mark.parametrize("count", [0, -1, MAX_RECEIVE_MESSAGES + 1])
def test_a_receive_of_an_impossible_number_is_refused(world: World, count: int) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Receive(QUEUE, count))


@pytest.mark.parametrize("wait", [timedelta(seconds=-1), MAX_WAIT + timedelta(seconds=1)])
def test_a_receive_with_an_impossible_wait_is_refused(world: World, wait: timedelta) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Receive(QUEUE, wait=wait))


def test_nothing_can_be_received_from_an_unknown_entity(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        receive(world, "nowhere")


def test_nothing_can_be_received_from_a_topic(world: World) -> None:
    topic(world)
    with pytest.raises(MessagingError):
        receive(world, "news")


# -- long poll ---------------------------------------------------------------------------------


def test_a_receive_that_does_not_wait_returns_empty_at_once(world: World) -> None:
    queue(world)
    assert receive(world) == []


def test_a_waiting_receive_ends_when_a_message_arrives(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    assert not waiting.done()
    send(world, "a")
    assert outcome(waiting) == ["a"]


def test_a_waiting_receive_returns_empty_when_its_wait_is_over(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    world.wait(minutes=61)
    assert outcome(waiting) == []


def test_a_receive_may_wait_for_hours(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=24)))
    world.wait(hours=23)
    send(world, "at last")
    assert outcome(waiting) == ["at last"]


def test_a_message_that_a_waiting_receive_got_is_locked(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    world.wait(minutes=30)
    send(world, "a")
    (received,) = to_messages(waiting.result(timeout=10))
    assert received.locked_until_utc == later(world, seconds=60)
    complete(world, received)


def test_a_receive_whose_wait_is_over_takes_nothing_later(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(seconds=5)))
    world.wait(seconds=6)
    send(world, "a")
    assert outcome(waiting) == []
    assert take(world) == ["a"]


def test_waiting_receives_get_different_messages(world: World) -> None:
    queue(world)
    waiting = [start(world, Receive(QUEUE, wait=HOUR)) for _ in range(3)]
    send(world, "a", "b", "c")
    assert sorted(body for item in waiting for body in outcome(item)) == ["a", "b", "c"]


def test_the_receive_that_waited_longest_is_served_first(world: World) -> None:
    queue(world)
    first = start(world, Receive(QUEUE, wait=HOUR))
    second = start(world, Receive(QUEUE, wait=HOUR))
    send(world, "a")
    assert outcome(first) == ["a"]
    assert not second.done()
    send(world, "b")
    assert outcome(second) == ["b"]


def test_a_waiting_receive_gets_an_abandoned_message(world: World) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    abandon(world, locked)
    assert outcome(waiting) == ["a"]


def test_a_waiting_receive_gets_a_message_whose_lock_lapsed(world: World) -> None:
    queue(world)
    send(world, "a")
    receive_one(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    world.wait(seconds=61)
    assert outcome(waiting) == ["a"]


def test_a_waiting_receive_gets_a_scheduled_message_when_it_is_due(world: World) -> None:
    queue(world)
    send(world, message("a", scheduled_enqueue_time_utc=later(world, minutes=5)))
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    assert not waiting.done()
    world.wait(minutes=5)
    assert outcome(waiting) == ["a"]


def test_a_receive_waiting_on_a_dead_letter_queue_gets_what_dies(world: World) -> None:
    queue(world)
    send(world, "a")
    waiting = start(world, Receive(DEAD, wait=HOUR))
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    assert outcome(waiting) == ["a"]


def test_a_waiting_receive_and_delete_leaves_nothing_behind(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR, mode=ReceiveMode.RECEIVE_AND_DELETE))
    send(world, "a")
    assert outcome(waiting) == ["a"]
    assert peek(world) == []


def test_a_waiting_receive_fails_when_its_entity_is_deleted(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=HOUR))
    world.ask(DeleteEntity(QUEUE))
    with pytest.raises(EntityNotFoundError):
        waiting.result(timeout=10)


def test_a_waiting_receive_does_not_hold_up_other_commands(world: World) -> None:
    queue(world, "slow")
    queue(world, "busy")
    waiting = start(world, Receive("slow", wait=HOUR))
    send(world, "a", path="busy")
    assert take(world, "busy") == ["a"]
    assert not waiting.done()


# -- browsing ----------------------------------------------------------------------------------


def test_peeking_changes_nothing(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    assert bodies(peek(world)) == ["a", "b"]
    assert bodies(peek(world)) == ["a", "b"]
    assert [m.delivery_count for m in receive(world)] == [0, 0]


def test_a_browsed_message_has_no_lock(world: World) -> None:
    queue(world)
    send(world, "a")
    assert peek(world)[0].lock_token is None


def test_peeking_starts_at_a_sequence_number(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    assert bodies(peek(world, start=numbers[1])) == ["b", "c"]
    assert bodies(peek(world, start=numbers[2] + 1)) == []


def test_peeking_pages_through_a_queue(world: World) -> None:
    queue(world)
    send(world, *"abcde")
    seen, number = [], 0
    while page := to_messages(world.ask(Peek(QUEUE, number, 2))):
        seen += bodies(page)
        number = (page[-1].sequence_number or 0) + 1
    assert seen == list("abcde")


def test_peeking_takes_no_more_bytes_than_it_asked_for(world: World) -> None:
    queue(world)
    send(world, *[KILOBYTE] * 10)
    assert world.ask(Peek(QUEUE, 0, 10, max_bytes=3500)).num_rows == 3
    assert world.ask(Peek(QUEUE, 0, 10, max_bytes=1)).num_rows == 1


def test_locked_deferred_and_scheduled_messages_can_be_browsed(world: World) -> None:
    queue(world)
    send(world, "deferred", "locked", "active")
    send(world, message("scheduled", scheduled_enqueue_time_utc=later(world, hours=1)))
    deferred, _locked = receive(world, count=2)
    settle(world, Disposition.DEFER, deferred)
    assert {m.body.decode(): m.state for m in peek(world)} == {
        "deferred": MessageState.DEFERRED,
        "locked": MessageState.ACTIVE,
        "active": MessageState.ACTIVE,
        "scheduled": MessageState.SCHEDULED,
    }


def test_settled_messages_cannot_be_browsed(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    complete(world, receive_one(world))
    assert bodies(peek(world)) == ["b"]


def test_a_dead_letter_queue_can_be_browsed(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    assert bodies(peek(world, DEAD)) == ["a"]


def test_an_empty_dead_letter_queue_can_be_read(world: World) -> None:
    queue(world)
    assert receive(world, DEAD) == []
    assert peek(world, DEAD) == []


def test_peeking_an_unknown_entity_is_refused(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        peek(world, "nowhere")


@pytest.mark.parametrize("count", [0, -1])
def test_peeking_an_impossible_number_is_refused(world: World, count: int) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Peek(QUEUE, 0, count))


def test_many_commands_in_flight_deliver_each_message_once(world: World) -> None:
    queue(world)
    sends = [world.namespace.submit(Send(QUEUE, [message(str(n))])) for n in range(50)]
    polls = [world.namespace.submit(Receive(QUEUE, wait=HOUR)) for _ in range(50)]
    assert all(len(item.result(timeout=10).sequence_numbers) == 1 for item in sends)
    assert sorted(int(body) for poll in polls for body in outcome(poll)) == list(range(50))
