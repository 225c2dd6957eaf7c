"""Status: what an entity lets happen."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    complete,
    later,
    message,
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
from twinbus.entities import EntityStatus
from twinbus.errors import EntityDisabledError, InvalidOperationError
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    AcceptSession,
    GetEntity,
    LeaseRange,
    Receive,
    ReceiveDeferred,
    UpdateEntity,
)

NEEDS = Capability.DISABLING  # of nearly every test here

NO_SEND = [EntityStatus.DISABLED, EntityStatus.SEND_DISABLED]
SEND = [EntityStatus.ACTIVE, EntityStatus.RECEIVE_DISABLED]
NO_RECEIVE = [EntityStatus.DISABLED, EntityStatus.RECEIVE_DISABLED]
RECEIVE = [EntityStatus.ACTIVE, EntityStatus.SEND_DISABLED]


def becomes(world: World, status: EntityStatus, path: str = QUEUE) -> None:
    world.ask(UpdateEntity(replace(world.ask(GetEntity(path)), status=status)))


@pytest.mark.parametrize("status", NO_SEND)
def test_a_disabled_queue_takes_no_messages(world: World, status: EntityStatus) -> None:
    queue(world, status=status)
    with pytest.raises(EntityDisabledError):
        send(world, "a")
    assert runtime(world).active_message_count == 0


@pytest.mark.parametrize("status", SEND)
def test_a_queue_that_allows_sends_takes_messages(world: World, status: EntityStatus) -> None:
    queue(world, status=status)
    send(world, "a")
    assert runtime(world).active_message_count == 1


@pytest.mark.parametrize("status", NO_RECEIVE)
def test_a_disabled_queue_delivers_nothing(world: World, status: EntityStatus) -> None:
    queue(world)
    send(world, "a")
    becomes(world, status)
    with pytest.raises(EntityDisabledError):
        receive(world)
    assert runtime(world).active_message_count == 1


@pytest.mark.parametrize("status", RECEIVE)
def test_a_queue_that_allows_receives_delivers(world: World, status: EntityStatus) -> None:
    queue(world)
    send(world, "a")
    becomes(world, status)
    complete(world, receive_one(world))
    assert runtime(world).active_message_count == 0


@pytest.mark.parametrize("status", NO_RECEIVE)
def test_a_disabled_queue_gives_no_lease_session_or_deferred_message(
    world: World, status: EntityStatus
) -> None:
    queue(world, status=status)
    queue(world, "sessions", requires_session=True, status=status)
    with pytest.raises(EntityDisabledError):
        world.ask(LeaseRange(QUEUE, "syphon", 1))
    with pytest.raises(EntityDisabledError):
        world.ask(ReceiveDeferred(QUEUE, [1]))
    with pytest.raises(EntityDisabledError):
        world.ask(AcceptSession("sessions", "s"))


def test_a_queue_works_again_when_it_is_active_again(world: World) -> None:
    queue(world)
    send(world, "a")
    becomes(world, EntityStatus.DISABLED)
    becomes(world, EntityStatus.ACTIVE)
    send(world, "b")
    assert take(world) == ["a", "b"]


@pytest.mark.parametrize("status", NO_RECEIVE)
def test_whoever_waits_at_a_queue_that_is_disabled_is_turned_away(
    world: World, status: EntityStatus
) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    dead = start(world, Receive(DEAD, wait=timedelta(hours=1)))
    becomes(world, status)
    with pytest.raises(EntityDisabledError):
        waiting.result(timeout=10)
    becomes(world, EntityStatus.ACTIVE)
    send(world, "a")
    assert take(world) == ["a"]
    assert not dead.done()


def test_whoever_waits_at_a_queue_that_begins_to_forward_is_turned_away(world: World) -> None:
    queue(world, "home")
    made = queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    world.ask(UpdateEntity(replace(made, forward_to="home")))
    with pytest.raises(InvalidOperationError, match="forwards to home"):
        waiting.result(timeout=10)


@pytest.mark.parametrize("status", EntityStatus)
def test_a_queue_of_any_status_can_be_managed(world: World, status: EntityStatus) -> None:
    made = queue(world, status=status)
    assert world.ask(GetEntity(QUEUE)) == made
    assert runtime(world).path == QUEUE


@pytest.mark.parametrize("status", EntityStatus)
def test_messages_expire_whatever_the_status(world: World, status: EntityStatus) -> None:
    queue(world)
    send(world, message("a", time_to_live=timedelta(seconds=5)))
    becomes(world, status)
    world.wait(seconds=6)
    assert runtime(world).active_message_count == 0


def test_a_scheduled_message_of_a_queue_disabled_meanwhile_is_not_lost(world: World) -> None:
    queue(world)
    send(world, message("a", scheduled_enqueue_time_utc=later(world, minutes=1)))
    becomes(world, EntityStatus.DISABLED)
    world.wait(minutes=2)
    becomes(world, EntityStatus.ACTIVE)
    assert take(world) == ["a"]


@pytest.mark.parametrize("status", NO_SEND)
def test_a_disabled_topic_takes_no_messages(world: World, status: EntityStatus) -> None:
    topic(world, status=status)
    sport = subscription(world, "sport")
    with pytest.raises(EntityDisabledError):
        send(world, "a", path=TOPIC)
    assert peek(world, sport) == []


def test_a_subscription_that_delivers_nothing_keeps_what_it_gets(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport", status=EntityStatus.RECEIVE_DISABLED)
    send(world, "a", path=TOPIC)
    with pytest.raises(EntityDisabledError):
        receive(world, sport)
    becomes(world, EntityStatus.ACTIVE, sport)
    assert take(world, sport) == ["a"]


def test_a_disabled_subscription_does_not_stop_the_others(world: World) -> None:
    topic(world)
    subscription(world, "off", status=EntityStatus.DISABLED)
    on = subscription(world, "on")
    send(world, "a", path=TOPIC)
    assert take(world, on) == ["a"]
