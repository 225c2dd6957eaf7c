"""Expiry: messages die when their time to live is over, into the dead-letter queue or not."""

from dataclasses import replace
from datetime import timedelta

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
    subscription,
    take,
    topic,
)
from twinbus.entities import dead_letter_path
from twinbus.errors import MessageNotFoundError
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Disposition, Receive, ReceiveDeferred, UpdateEntity

TEN_SECONDS = timedelta(seconds=10)
LONG_LOCK = timedelta(minutes=5)


def mortal(body: str = "a", **fields: object) -> BrokeredMessage:
    return message(body, time_to_live=TEN_SECONDS, **fields)


def test_a_message_is_delivered_while_it_lives(world: World) -> None:
    queue(world)
    send(world, mortal())
    world.wait(seconds=9)
    assert take(world) == ["a"]


def test_an_expired_message_is_not_delivered(world: World) -> None:
    queue(world)
    send(world, mortal())
    world.wait(seconds=11)
    assert receive(world) == []


def test_an_expired_message_is_dropped_by_default(world: World) -> None:
    queue(world)
    send(world, mortal())
    world.wait(seconds=11)
    assert runtime(world).active_message_count == 0
    assert runtime(world).dead_letter_message_count == 0
    assert receive(world, DEAD) == []


def test_an_expired_message_is_dead_lettered_when_the_queue_says_so(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    send(world, mortal())
    world.wait(seconds=11)
    assert receive(world) == []
    dead = receive_one(world, DEAD)
    assert dead.body == b"a"
    assert dead.dead_letter_reason == "TTLExpiredException"
    assert dead.dead_letter_source == QUEUE


def test_dying_needs_no_receiver(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    send(world, mortal())
    waiting = start(world, Receive(DEAD, wait=timedelta(hours=1)))
    world.wait(seconds=11)
    assert outcome(waiting) == ["a"]


def test_a_message_says_when_it_expires(world: World) -> None:
    queue(world)
    send(world, mortal())
    expected = later(world, seconds=10)
    world.wait(seconds=5)
    assert receive_one(world).expires_at_utc == expected


def test_a_message_without_its_own_time_to_live_gets_the_default(world: World) -> None:
    queue(world, default_message_time_to_live=TEN_SECONDS)
    send(world, "a")
    world.wait(seconds=9)
    if world.broker is None:  # Service Bus does not say when the default ends a message
        assert peek(world)[0].expires_at_utc == later(world, seconds=1)
    world.wait(seconds=2)
    assert receive(world) == []


def test_the_default_is_an_upper_bound_for_each_message(world: World) -> None:
    queue(world, default_message_time_to_live=TEN_SECONDS)
    send(world, message("a", time_to_live=timedelta(hours=1)))
    world.wait(seconds=11)
    assert receive(world) == []


def test_a_message_may_live_shorter_than_the_default(world: World) -> None:
    queue(world, default_message_time_to_live=timedelta(hours=1))
    send(world, mortal("short"), "long")
    world.wait(seconds=11)
    assert take(world) == ["long"]


def test_messages_expire_each_in_its_own_time(world: World) -> None:
    queue(world)
    lives = {"a": 30, "b": 10, "c": 20}
    send(world, *(message(b, time_to_live=timedelta(seconds=s)) for b, s in lives.items()))
    world.wait(seconds=15)
    assert bodies(peek(world)) == ["a", "c"]
    world.wait(seconds=10)
    assert bodies(peek(world)) == ["a"]


def test_a_locked_message_can_be_completed_after_its_time(world: World) -> None:
    queue(world, lock_duration=LONG_LOCK)
    send(world, mortal())
    locked = receive_one(world)
    world.wait(seconds=60)
    complete(world, locked)
    assert runtime(world).active_message_count == 0


def test_an_overdue_message_expires_when_it_is_abandoned(world: World) -> None:
    queue(world, lock_duration=LONG_LOCK, enable_dead_lettering_on_message_expiration=True)
    send(world, mortal())
    locked = receive_one(world)
    world.wait(seconds=60)
    abandon(world, locked)
    assert receive(world) == []
    assert take(world, DEAD) == ["a"]


def test_an_overdue_message_expires_when_its_lock_lapses(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    send(world, mortal())
    receive_one(world)
    world.wait(seconds=61)
    assert receive(world) == []
    assert take(world, DEAD) == ["a"]


def test_a_deferred_message_expires(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    (number,) = send(world, mortal())
    settle(world, Disposition.DEFER, receive_one(world))
    world.wait(seconds=11)
    with pytest.raises(MessageNotFoundError):
        world.ask(ReceiveDeferred(QUEUE, [number]))
    assert take(world, DEAD) == ["a"]


def test_an_expired_message_frees_its_space(world: World) -> None:
    queue(world)
    send(world, mortal())
    world.wait(seconds=11)
    assert runtime(world).size_in_bytes == 0


def test_a_subscription_has_its_own_time_to_live(world: World) -> None:
    topic(world)
    short = subscription(world, "short", default_message_time_to_live=TEN_SECONDS)
    long = subscription(world, "long")
    send(world, "a", path="news")
    world.wait(seconds=11)
    assert receive(world, short) == []
    assert take(world, long) == ["a"]


def test_the_time_to_live_of_a_topic_bounds_its_subscriptions(world: World) -> None:
    topic(world, default_message_time_to_live=TEN_SECONDS)
    sport = subscription(world, "sport")
    send(world, "a", path="news")
    world.wait(seconds=11)
    assert receive(world, sport) == []


def test_a_subscription_dead_letters_what_expires_in_it(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport", enable_dead_lettering_on_message_expiration=True)
    send(world, mortal(), path="news")
    world.wait(seconds=11)
    dead = receive_one(world, dead_letter_path(sport))
    assert dead.body == b"a"
    assert dead.dead_letter_source == sport


def test_an_expired_message_of_a_session_is_dead_lettered(world: World) -> None:
    queue(world, requires_session=True, enable_dead_lettering_on_message_expiration=True)
    send(world, mortal(session_id="s"))
    world.wait(seconds=11)
    assert take(world, DEAD) == ["a"]


def test_a_new_default_holds_for_messages_sent_later(world: World) -> None:
    made = queue(world)
    send(world, "before")
    world.ask(UpdateEntity(replace(made, default_message_time_to_live=TEN_SECONDS)))
    send(world, "after")
    world.wait(seconds=11)
    assert take(world) == ["before"]
