"""Forwarding of dead letters: an entity sends them to another entity instead of keeping them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    abandon,
    bodies,
    message,
    outcome,
    peek,
    queue,
    receive_one,
    runtime,
    send,
    start,
    subscription,
    take,
    tokens,
    topic,
)
from twinbus.entities import (
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlAction,
    TrueFilter,
    dead_letter_path,
)
from twinbus.errors import EntityNotFoundError, MessagingError
from twinbus.limits import MAX_FORWARD_HOPS, MEGABYTE
from twinbus.message import BrokeredMessage
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Disposition,
    GetEntity,
    Receive,
    Settle,
    UpdateEntity,
)

NEEDS = Capability.FORWARDING  # of nearly every test here
GRAVES = "graves"


def dying(world: World, **settings: Any) -> QueueDescription:
    """Create a queue that forwards its dead letters, and their target."""
    queue(world, GRAVES)
    return queue(world, forward_dead_lettered_messages_to=GRAVES, **settings)


def kill(world: World, path: str = QUEUE) -> None:
    """Dead-letter the next message of a queue."""
    got = receive_one(world, path)
    world.ask(Settle(path, tokens(got), Disposition.DEAD_LETTER, "broken", "no such table"))


def why(dead: BrokeredMessage) -> tuple[str | None, str | None, str | None]:
    return dead.dead_letter_reason, dead.dead_letter_error_description, dead.dead_letter_source


# -- the ways to die ---------------------------------------------------------------------------


def test_a_message_that_the_application_dead_letters_goes_to_the_target(world: World) -> None:
    dying(world)
    send(world, message("a", subject="s", application_properties={"n": 1}))
    kill(world)
    assert peek(world, DEAD) == []
    got = receive_one(world, GRAVES)
    assert (got.body, got.subject, got.application_properties) == (b"a", "s", {"n": 1})
    assert why(got) == ("broken", "no such table", QUEUE)
    assert runtime(world).dead_letter_message_count == 0


def test_a_message_with_too_many_failed_deliveries_goes_to_the_target(world: World) -> None:
    dying(world, max_delivery_count=1)
    send(world, "a")
    abandon(world, receive_one(world))
    (got,) = peek(world, GRAVES)
    assert (got.dead_letter_reason, got.dead_letter_source) == ("MaxDeliveryCountExceeded", QUEUE)


def test_an_expired_message_goes_to_the_target_and_does_not_expire_again(world: World) -> None:
    dying(
        world,
        enable_dead_lettering_on_message_expiration=True,
        default_message_time_to_live=timedelta(seconds=10),
    )
    send(world, "a")
    world.wait(seconds=11)
    runtime(world)
    world.wait(seconds=60)
    (got,) = peek(world, GRAVES)
    assert (got.dead_letter_reason, got.dead_letter_source) == ("TTLExpiredException", QUEUE)


def test_a_message_whose_lock_lapses_too_often_goes_to_the_target(world: World) -> None:
    dying(world, max_delivery_count=1, lock_duration=timedelta(seconds=5))
    send(world, "a")
    receive_one(world)
    world.wait(seconds=6)
    runtime(world)
    assert bodies(peek(world, GRAVES)) == ["a"]


DOUBLING = SqlAction("SET a = a + a;" * 16)  # makes a message too large
LONG_ID = SqlAction(f"SET sys.MessageId = '{'x' * 500}'")


@pytest.mark.parametrize("action", [DOUBLING, LONG_ID], ids=["size", "id"])
def test_a_message_for_which_a_rule_fails_goes_to_the_target(
    world: World, action: SqlAction
) -> None:
    queue(world, GRAVES)
    topic(world)
    rule = RuleDescription("bad", TrueFilter(), action)
    sport = subscription(world, "sport", rule, forward_dead_lettered_messages_to=GRAVES)
    send(world, message("a", application_properties={"a": "x" * 200}), path=TOPIC)
    assert peek(world, dead_letter_path(sport)) == []
    (got,) = peek(world, GRAVES)
    assert (got.body, got.dead_letter_reason, got.dead_letter_source) == (b"a", "RuleFailed", sport)


def test_a_message_without_a_session_that_is_forwarded_to_sessions_goes_to_the_target(
    world: World,
) -> None:
    dying(world, requires_session=True)
    queue(world, "door", forward_to=QUEUE)
    send(world, "a", path="door")
    (got,) = peek(world, GRAVES)
    assert (got.dead_letter_reason, got.dead_letter_source) == ("SessionIdIsMissing", QUEUE)


# -- the target --------------------------------------------------------------------------------


def test_a_forwarded_dead_letter_wakes_a_waiting_receive(world: World) -> None:
    dying(world)
    waiting = start(world, Receive(GRAVES, wait=timedelta(hours=1)))
    send(world, "a")
    kill(world)
    assert outcome(waiting) == ["a"]


def test_deliveries_at_the_target_are_counted_anew(world: World) -> None:
    dying(world, max_delivery_count=2)
    send(world, "a")
    for _ in range(2):
        abandon(world, receive_one(world))
    abandon(world, receive_one(world, GRAVES), path=GRAVES)
    assert take(world, GRAVES) == ["a"]


def test_a_dead_letter_that_dies_at_the_target_gets_the_reason_of_that_death(world: World) -> None:
    queue(world, GRAVES)
    queue(world, "next", forward_dead_lettered_messages_to=GRAVES)
    queue(world, max_delivery_count=1, forward_dead_lettered_messages_to="next")
    send(world, "a")
    abandon(world, receive_one(world))
    kill(world, "next")
    (got,) = peek(world, GRAVES)
    assert why(got) == ("broken", "no such table", "next")


def test_dead_letters_are_forwarded_to_a_topic_whose_rules_may_change_them(world: World) -> None:
    topic(world)
    rule = RuleDescription("mark", TrueFilter(), SqlAction("SET seen = 1"))
    marked = subscription(world, "marked", rule)
    plain = subscription(world, "plain")
    queue(world, forward_dead_lettered_messages_to=TOPIC)
    send(world, "a")
    kill(world)
    for path, properties in ((marked, {"seen": 1}), (plain, {})):
        got = receive_one(world, path)
        assert why(got) == ("broken", "no such table", QUEUE)
        assert got.application_properties == properties


def test_dead_letters_go_on_through_a_forwarding_queue_even_if_they_wait_there(
    world: World,
) -> None:
    home = queue(world, "home", status=EntityStatus.DISABLED)
    queue(world, "door", forward_to="home")
    queue(world, forward_dead_lettered_messages_to="door")
    send(world, "a")
    kill(world)
    world.ask(UpdateEntity(replace(home, status=EntityStatus.ACTIVE)))
    world.wait(seconds=2)
    runtime(world, "door")
    assert why(receive_one(world, "home")) == ("broken", "no such table", QUEUE)


def test_many_dead_letters_stay_in_order(world: World) -> None:
    dying(world)
    names = [str(number) for number in range(50)]
    send(world, *names)
    for _ in names:
        kill(world)
    assert take(world, GRAVES) == names


# -- a target that accepts nothing -------------------------------------------------------------


@pytest.mark.parametrize("status", [EntityStatus.DISABLED, EntityStatus.SEND_DISABLED])
def test_dead_letters_stay_while_the_target_is_disabled(world: World, status: EntityStatus) -> None:
    dying(world)
    target = world.ask(GetEntity(GRAVES))
    world.ask(UpdateEntity(replace(target, status=status)))
    send(world, "a", "b")
    kill(world)
    assert why(receive_one(world, DEAD)) == ("broken", "no such table", QUEUE)
    world.ask(UpdateEntity(target))
    kill(world)
    assert take(world, GRAVES) == ["b"]
    assert runtime(world).dead_letter_message_count == 1


def test_dead_letters_stay_when_the_target_was_deleted(world: World) -> None:
    dying(world)
    world.ask(DeleteEntity(GRAVES))
    send(world, "a")
    kill(world)
    assert take(world, DEAD) == ["a"]


def test_dead_letters_stay_while_the_target_is_full(world: World) -> None:
    queue(world, GRAVES, max_size_in_megabytes=1)
    queue(world, forward_dead_lettered_messages_to=GRAVES)
    large = "x" * (MEGABYTE // 5)
    while runtime(world, GRAVES).size_in_bytes < MEGABYTE - len(large):
        send(world, large, path=GRAVES)
    send(world, large)
    kill(world)
    assert take(world, DEAD) == [large]


def test_dead_letters_from_before_the_setting_stay(world: World) -> None:
    queue(world, GRAVES)
    made = queue(world)
    send(world, "before", "after")
    kill(world)
    world.ask(UpdateEntity(replace(made, forward_dead_lettered_messages_to=GRAVES)))
    kill(world)
    assert take(world, DEAD) == ["before"]
    assert take(world, GRAVES) == ["after"]


# -- the setting -------------------------------------------------------------------------------


def test_the_setting_is_stored_and_can_be_removed(world: World) -> None:
    made = dying(world)
    assert world.ask(GetEntity(QUEUE)).forward_dead_lettered_messages_to == GRAVES
    world.ask(UpdateEntity(replace(made, forward_dead_lettered_messages_to=None)))
    assert world.ask(GetEntity(QUEUE)).forward_dead_lettered_messages_to is None
    send(world, "a")
    kill(world)
    assert take(world, DEAD) == ["a"]


def test_the_target_of_dead_letters_must_exist(world: World) -> None:
    description = QueueDescription(path=QUEUE, forward_dead_lettered_messages_to="nowhere")
    with pytest.raises(EntityNotFoundError):
        world.ask(CreateEntity(description))
    made = queue(world)
    with pytest.raises(EntityNotFoundError):
        world.ask(UpdateEntity(replace(made, forward_dead_lettered_messages_to="nowhere")))


def test_a_queue_cannot_forward_dead_letters_to_itself(world: World) -> None:
    made = queue(world)
    with pytest.raises(MessagingError, match="cycle"):
        world.ask(UpdateEntity(replace(made, forward_dead_lettered_messages_to=QUEUE.upper())))


@pytest.mark.parametrize("way_back", ["forward_to", "forward_dead_lettered_messages_to"])
@pytest.mark.parametrize("way", ["forward_to", "forward_dead_lettered_messages_to"])
def test_a_cycle_of_any_forwarding_is_refused(world: World, way: str, way_back: str) -> None:
    queue(world, "first")
    queue(world, "second", **{way: "first"})
    back: dict[str, Any] = {way_back: "second"}
    with pytest.raises(MessagingError, match="cycle"):
        world.ask(UpdateEntity(QueueDescription(path="first", **back)))


def test_a_cycle_through_a_topic_is_refused(world: World) -> None:
    topic(world)
    queue(world, forward_dead_lettered_messages_to=TOPIC)
    with pytest.raises(MessagingError, match="cycle"):
        subscription(world, "sport", forward_dead_lettered_messages_to=QUEUE)


def test_a_chain_of_dead_letters_has_a_longest_length(world: World) -> None:
    queue(world, "q0")
    for hop in range(1, MAX_FORWARD_HOPS + 1):
        queue(world, f"q{hop}", forward_dead_lettered_messages_to=f"q{hop - 1}")
    with pytest.raises(MessagingError, match="hops"):
        queue(world, "beyond", forward_to=f"q{MAX_FORWARD_HOPS}")


def test_a_queue_may_forward_messages_and_dead_letters_to_different_targets(world: World) -> None:
    queue(world, "home")
    dying(world, forward_to="home", enable_dead_lettering_on_message_expiration=True)
    home = world.ask(GetEntity("home"))
    send(world, "a")
    world.ask(UpdateEntity(replace(home, status=EntityStatus.DISABLED)))
    send(world, message("b", time_to_live=timedelta(seconds=5)))
    world.wait(seconds=6)
    runtime(world)
    assert bodies(peek(world, "home")) == ["a"]
    assert bodies(peek(world, GRAVES)) == ["b"]
