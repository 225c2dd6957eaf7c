"""Forwarding: a queue or subscription hands every message on to another entity."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    TOPIC,
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
from twinbus.entities import (
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    dead_letter_path,
)
from twinbus.errors import EntityNotFoundError, MessagingError
from twinbus.limits import MAX_FORWARD_HOPS
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import CreateEntity, Receive, UpdateEntity

NEEDS = Capability.FORWARDING  # of nearly every test here


def test_a_forwarding_queue_hands_its_messages_on(world: World) -> None:
    queue(world, "home")
    queue(world, "door", forward_to="home")
    assert send(world, "a", "b", path="door") == [0, 0]
    assert peek(world, "door") == []
    assert take(world, "home") == ["a", "b"]


def test_a_forwarded_message_keeps_all_it_was_sent_with(world: World) -> None:
    queue(world, "home")
    queue(world, "door", forward_to="home")
    sent = message("a", subject="s", session_id="x", application_properties={"n": 1})
    send(world, sent, path="door")
    got = receive_one(world, "home")
    assert (got.body, got.message_id, got.subject) == (sent.body, sent.message_id, "s")
    assert (got.session_id, got.application_properties) == ("x", {"n": 1})


def test_forwarding_goes_on_through_a_chain(world: World) -> None:
    queue(world, "third")
    queue(world, "second", forward_to="third")
    queue(world, "first", forward_to="second")
    send(world, "a", path="first")
    assert take(world, "third") == ["a"]


def test_a_forwarded_message_wakes_a_waiting_receive(world: World) -> None:
    queue(world, "home")
    queue(world, "door", forward_to="home")
    waiting = start(world, Receive("home", wait=timedelta(hours=1)))
    send(world, "a", path="door")
    assert outcome(waiting) == ["a"]


def test_a_queue_forwards_to_a_topic(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    queue(world, "door", forward_to=TOPIC)
    send(world, "a", path="door")
    assert take(world, sport) == ["a"]


def test_a_subscription_forwards_what_its_rules_select(world: World) -> None:
    queue(world, "home")
    topic(world)
    red = RuleDescription("red", SqlFilter("color = 'red'"))
    subscription(world, "sport", red, forward_to="home")
    for color in ("red", "blue"):
        send(world, message(color, application_properties={"color": color}), path=TOPIC)
    assert take(world, "home") == ["red"]


def test_many_subscriptions_forward_to_one_queue(world: World) -> None:
    queue(world, "home")
    topic(world)
    subscription(world, "sport", forward_to="home")
    subscription(world, "weather", forward_to="home")
    send(world, "a", path=TOPIC)
    assert take(world, "home") == ["a", "a"]


def test_a_scheduled_message_is_forwarded_in_its_time(world: World) -> None:
    queue(world, "home")
    queue(world, "door", forward_to="home")
    send(world, message("a", scheduled_enqueue_time_utc=later(world, minutes=1)), path="door")
    assert receive(world, "home") == []
    world.wait(minutes=1)
    runtime(world, "door")
    assert take(world, "home") == ["a"]


def test_the_time_to_live_of_the_first_queue_holds_at_home(world: World) -> None:
    queue(world, "home")
    queue(world, "door", forward_to="home", default_message_time_to_live=timedelta(seconds=10))
    send(world, "a", path="door")
    world.wait(seconds=11)
    assert receive(world, "home") == []


# -- parking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [EntityStatus.DISABLED, EntityStatus.SEND_DISABLED])
def test_messages_are_parked_while_the_target_is_disabled(
    world: World, status: EntityStatus
) -> None:
    queue(world, "home", status=status)
    queue(world, "door", forward_to="home")
    send(world, "a", "b", path="door")
    assert runtime(world, "door").transfer_message_count == 2
    assert runtime(world, "home").active_message_count == 0


def test_parked_messages_go_on_when_the_target_is_back(world: World) -> None:
    home = queue(world, "home", status=EntityStatus.DISABLED)
    queue(world, "door", forward_to="home")
    send(world, "a", "b", path="door")
    world.ask(UpdateEntity(replace(home, status=EntityStatus.ACTIVE)))
    world.wait(seconds=2)
    assert runtime(world, "door").transfer_message_count == 0
    assert take(world, "home") == ["a", "b"]


def test_parked_messages_wake_a_waiting_receive_when_they_go_on(world: World) -> None:
    home = queue(world, "home", status=EntityStatus.SEND_DISABLED)
    queue(world, "door", forward_to="home")
    send(world, "a", path="door")
    waiting = start(world, Receive("home", wait=timedelta(hours=1)))
    world.ask(UpdateEntity(replace(home, status=EntityStatus.ACTIVE)))
    world.wait(seconds=2)
    assert outcome(waiting) == ["a"]


def test_messages_sent_while_others_are_parked_stay_behind_them(world: World) -> None:
    home = queue(world, "home", status=EntityStatus.DISABLED)
    queue(world, "door", forward_to="home")
    send(world, "a", path="door")
    world.ask(UpdateEntity(replace(home, status=EntityStatus.ACTIVE)))
    send(world, "b", path="door")
    world.wait(seconds=2)
    runtime(world, "door")
    assert take(world, "home") == ["a", "b"]


def test_messages_are_parked_while_the_target_is_full(world: World) -> None:
    queue(world, "home", max_size_in_megabytes=1)
    queue(world, "door", forward_to="home")
    large = message("x" * 250 * 1024)
    send(world, *[large] * 4, path="door")
    send(world, large, path="door")
    assert runtime(world, "door").transfer_message_count == 1
    take(world, "home")
    world.wait(seconds=2)
    assert runtime(world, "door").transfer_message_count == 0
    assert len(take(world, "home")) == 1


def test_the_first_queue_keeps_its_own_quota(world: World) -> None:
    queue(world, "home", status=EntityStatus.DISABLED)
    queue(world, "door", forward_to="home", max_size_in_megabytes=1)
    large = message("x" * 250 * 1024)
    send(world, *[large] * 4, path="door")
    with pytest.raises(MessagingError):
        send(world, large, path="door")
    assert runtime(world, "door").transfer_message_count == 4


def test_a_message_no_one_can_take_is_not_lost(world: World) -> None:
    queue(world, "home", requires_session=True)
    queue(world, "door", forward_to="home")
    try:
        send(world, "no session", path="door")
    except MessagingError:
        return  # refused at the door: the sender knows
    kept = bodies(peek(world, dead_letter_path("door")))
    kept += bodies(peek(world, dead_letter_path("home")))
    assert kept == ["no session"] or runtime(world, "door").transfer_message_count == 1


# -- chains ------------------------------------------------------------------------------------


def test_a_queue_cannot_forward_to_itself(world: World) -> None:
    made = queue(world, "home")
    with pytest.raises(MessagingError):
        world.ask(UpdateEntity(replace(made, forward_to="HOME")))


def test_a_loop_of_two_is_refused(world: World) -> None:
    first = queue(world, "first")
    queue(world, "second", forward_to="first")
    with pytest.raises(MessagingError):
        world.ask(UpdateEntity(replace(first, forward_to="second")))
    send(world, "a", path="second")
    assert take(world, "first") == ["a"]


def test_a_loop_of_three_is_refused(world: World) -> None:
    first = queue(world, "first")
    queue(world, "second", forward_to="first")
    queue(world, "third", forward_to="second")
    with pytest.raises(MessagingError):
        world.ask(UpdateEntity(replace(first, forward_to="third")))


def test_a_message_caught_in_a_loop_through_a_topic_is_put_aside(world: World) -> None:
    topic(world)
    queue(world, "door", forward_to=TOPIC)
    try:
        loop = subscription(world, "sport", forward_to="door")
    except MessagingError:
        return  # refused at once is as good
    send(world, "a", path="door")
    dead = [dead_letter_path(path) for path in ("door", loop)]
    assert [body for path in dead for body in take(world, path)] == ["a"]


def test_a_chain_has_a_longest_length(world: World) -> None:
    queue(world, "q0")
    for hop in range(1, MAX_FORWARD_HOPS + 1):
        queue(world, f"q{hop}", forward_to=f"q{hop - 1}")
    send(world, "a", path=f"q{MAX_FORWARD_HOPS}")
    assert take(world, "q0") == ["a"]
    with pytest.raises(MessagingError):
        queue(world, "one-too-many", forward_to=f"q{MAX_FORWARD_HOPS}")


def test_a_message_of_a_chain_that_grew_too_long_is_put_aside(world: World) -> None:
    last = queue(world, "q0")
    for hop in range(1, MAX_FORWARD_HOPS + 1):
        queue(world, f"q{hop}", forward_to=f"q{hop - 1}")
    queue(world, "beyond")
    try:
        world.ask(UpdateEntity(replace(last, forward_to="beyond")))
    except MessagingError:
        return  # refused at once is as good
    send(world, "a", path=f"q{MAX_FORWARD_HOPS}")
    dead = [dead_letter_path(path) for path in ("beyond", "q0")]
    assert [body for path in dead for body in take(world, path)] == ["a"]


def test_the_target_must_exist(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        world.ask(CreateEntity(QueueDescription(path="door", forward_to="nowhere")))
    with pytest.raises(EntityNotFoundError):
        runtime(world, "door")


def test_forwarding_can_be_switched_on_and_off(world: World) -> None:
    queue(world, "home")
    door = queue(world, "door")
    world.ask(UpdateEntity(replace(door, forward_to="home")))
    send(world, "on", path="door")
    world.ask(UpdateEntity(door))
    send(world, "off", path="door")
    assert take(world, "home") == ["on"]
    assert take(world, "door") == ["off"]


def test_a_forwarding_queue_ignores_duplicates(world: World) -> None:
    queue(world, "home")
    queue(world, "door", forward_to="home", requires_duplicate_detection=True)
    sent = message("a", message_id="m")
    send(world, sent, path="door")
    send(world, sent, path="door")
    assert take(world, "home") == ["a"]
