"""Scheduling: a message that waits for its time, and can be called back until then."""

from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    bodies,
    later,
    message,
    outcome,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    start,
    subscription,
    take,
    topic,
)
from twinbus.errors import EntityNotFoundError, MessageNotFoundError
from twinbus.message import BrokeredMessage, MessageState
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import CancelScheduled, Receive, ReceiveDeferred

NEEDS = Capability.SCHEDULING  # of nearly every test here


def in_minutes(world: World, minutes: float, body: str = "a", **more: object) -> BrokeredMessage:
    return message(body, scheduled_enqueue_time_utc=later(world, minutes=minutes), **more)


def test_a_scheduled_message_is_not_delivered_before_its_time(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 10))
    world.wait(minutes=9)
    assert receive(world) == []


def test_a_scheduled_message_is_delivered_when_its_time_has_come(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 10))
    world.wait(minutes=10)
    assert take(world) == ["a"]


def test_a_message_scheduled_for_the_past_is_delivered_at_once(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, -10))
    assert take(world) == ["a"]


def test_a_scheduled_message_keeps_its_schedule_to_look_at(world: World) -> None:
    queue(world)
    sent = in_minutes(world, 10)
    send(world, sent)
    world.wait(minutes=11)
    assert receive_one(world).scheduled_enqueue_time_utc == sent.scheduled_enqueue_time_utc


def test_scheduled_messages_come_in_the_order_of_their_times(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 3, "late"), in_minutes(world, 1, "early"))
    send(world, in_minutes(world, 2, "middle"), "now")
    world.wait(minutes=5)
    assert take(world) == ["now", "early", "middle", "late"]


def test_messages_scheduled_for_one_moment_come_in_the_order_sent(world: World) -> None:
    queue(world)
    send(world, *(in_minutes(world, 1, body) for body in "abcde"))
    world.wait(minutes=1)
    assert take(world) == list("abcde")


def test_a_scheduled_message_comes_after_those_sent_before_its_time(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 10, "scheduled"))
    world.wait(minutes=5)
    send(world, "sent meanwhile")
    world.wait(minutes=5)
    assert take(world) == ["sent meanwhile", "scheduled"]


def test_a_scheduled_message_gets_a_new_number_when_its_time_comes(world: World) -> None:
    queue(world)
    (scheduled,) = send(world, in_minutes(world, 10))
    (meanwhile,) = send(world, "meanwhile")
    world.wait(minutes=11)
    _, activated = receive(world)
    assert scheduled < meanwhile < (activated.sequence_number or 0)


def test_a_scheduled_message_is_stamped_when_its_time_comes(world: World) -> None:
    queue(world)
    sent = in_minutes(world, 10)
    send(world, sent)
    world.wait(minutes=10)
    assert receive_one(world).enqueued_time_utc == sent.scheduled_enqueue_time_utc


def test_the_time_to_live_of_a_scheduled_message_starts_at_its_time(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 10, time_to_live=timedelta(minutes=1)))
    world.wait(minutes=10, seconds=30)
    assert receive_one(world).body == b"a"


def test_a_scheduled_message_expires_after_its_time(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 10, time_to_live=timedelta(minutes=1)))
    world.wait(minutes=10)
    world.wait(minutes=2)
    assert receive(world) == []


def test_a_scheduled_message_is_counted_as_scheduled(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 10), "now")
    assert runtime(world).scheduled_message_count == 1
    assert runtime(world).active_message_count == 1
    world.wait(minutes=10)
    assert runtime(world).scheduled_message_count == 0
    assert runtime(world).active_message_count == 2


def test_a_scheduled_message_is_browsed_under_the_number_of_its_receipt(world: World) -> None:
    queue(world)
    numbers = send(world, in_minutes(world, 10))
    (browsed,) = peek(world)
    assert [browsed.sequence_number] == numbers
    assert browsed.state is MessageState.SCHEDULED


def test_scheduled_and_other_messages_share_a_batch(world: World) -> None:
    queue(world)
    numbers = send(world, "a", in_minutes(world, 1, "b"), "c")
    assert all(numbers)
    assert take(world) == ["a", "c"]
    world.wait(minutes=1)
    assert take(world) == ["b"]


# -- cancelling --------------------------------------------------------------------------------


def test_a_cancelled_message_never_comes(world: World) -> None:
    queue(world)
    numbers = send(world, in_minutes(world, 10))
    world.ask(CancelScheduled(QUEUE, numbers))
    assert peek(world) == []
    world.wait(minutes=11)
    assert receive(world) == []


def test_only_the_named_messages_are_cancelled(world: World) -> None:
    queue(world)
    numbers = send(world, *(in_minutes(world, 1, body) for body in "abc"))
    world.ask(CancelScheduled(QUEUE, [numbers[1]]))
    world.wait(minutes=1)
    assert take(world) == ["a", "c"]


def test_a_cancelled_message_frees_its_space(world: World) -> None:
    queue(world)
    world.ask(CancelScheduled(QUEUE, send(world, in_minutes(world, 10))))
    assert runtime(world).scheduled_message_count == 0
    assert runtime(world).size_in_bytes == 0


def test_cancelling_is_all_or_nothing(world: World) -> None:
    queue(world)
    numbers = send(world, in_minutes(world, 10))
    with pytest.raises(MessageNotFoundError):
        world.ask(CancelScheduled(QUEUE, [*numbers, 999]))
    world.wait(minutes=10)
    assert take(world) == ["a"]


def test_a_message_is_cancelled_only_once(world: World) -> None:
    queue(world)
    numbers = send(world, in_minutes(world, 10))
    world.ask(CancelScheduled(QUEUE, numbers))
    with pytest.raises(MessageNotFoundError):
        world.ask(CancelScheduled(QUEUE, numbers))


def test_a_message_whose_time_has_come_cannot_be_cancelled(world: World) -> None:
    queue(world)
    numbers = send(world, in_minutes(world, 10))
    world.wait(minutes=10)
    with pytest.raises(MessageNotFoundError):
        world.ask(CancelScheduled(QUEUE, numbers))
    assert take(world) == ["a"]


def test_a_message_that_was_not_scheduled_cannot_be_cancelled(world: World) -> None:
    queue(world)
    numbers = send(world, "a")
    with pytest.raises(MessageNotFoundError):
        world.ask(CancelScheduled(QUEUE, numbers))
    assert take(world) == ["a"]


def test_cancelling_in_an_unknown_entity_is_refused(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        world.ask(CancelScheduled("nowhere", [1]))


def test_a_scheduled_message_cannot_be_received_as_deferred(world: World) -> None:
    queue(world)
    numbers = send(world, in_minutes(world, 10))
    with pytest.raises(MessageNotFoundError):
        world.ask(ReceiveDeferred(QUEUE, numbers))


# -- elsewhere ---------------------------------------------------------------------------------


def test_a_message_scheduled_on_a_topic_reaches_subscriptions_in_time(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, in_minutes(world, 10), path="news")
    world.wait(minutes=9)
    assert receive(world, sport) == []
    world.wait(minutes=1)
    assert take(world, sport) == ["a"]


def test_the_scheduled_messages_of_a_topic_can_be_browsed(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, in_minutes(world, 10, "later"), "now", path="news")
    (found,) = peek(world, "news")
    assert (found.body, found.state) == (b"later", MessageState.SCHEDULED)
    world.wait(minutes=10)
    assert (peek(world, "news"), take(world, sport)) == ([], ["now", "later"])


def test_a_message_scheduled_on_a_topic_can_be_cancelled(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    numbers = send(world, in_minutes(world, 10), path="news")
    world.ask(CancelScheduled("news", numbers))
    world.wait(minutes=11)
    assert receive(world, sport) == []
    assert receive(world, sport) == []


def test_each_waiting_receive_gets_a_scheduled_message_in_its_time(world: World) -> None:
    queue(world)
    send(world, in_minutes(world, 0.1, "a"), in_minutes(world, 0.2, "b"))
    first = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    second = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    world.wait(seconds=6)
    assert outcome(first) == ["a"]
    assert not second.done()
    world.wait(seconds=6)
    assert outcome(second) == ["b"]


def test_a_scheduled_message_of_a_session_waits_too(world: World) -> None:
    queue(world, requires_session=True)
    send(world, in_minutes(world, 10, session_id="s"))
    world.wait(minutes=10)
    assert bodies(peek(world)) == ["a"]
    assert peek(world)[0].state is MessageState.ACTIVE
