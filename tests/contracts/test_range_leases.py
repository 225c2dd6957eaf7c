"""Leases of ranges: which messages a syphon gets, for how long, and how it waits for them."""

from concurrent.futures import Future
from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.range_words import lease, read, settle_all
from tests.contracts.words import (
    DEAD,
    MANY,
    QUEUE,
    abandon,
    bodies,
    complete,
    later,
    message,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    settle,
    start,
    subscription,
    topic,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessageNotFoundError,
    MessagingError,
    StaleEpochError,
)
from twinbus.limits import MAX_LEASE_DURATION, MAX_LEASE_MESSAGES
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    Disposition,
    LeaseRange,
    RangeLease,
    ReadMeter,
    ReceiveDeferred,
    RenewRange,
    SettleRange,
)

NEEDS = Capability.RANGES  # of every test here
MINUTE = timedelta(minutes=1)


# -- leasing ---------------------------------------------------------------------------------------


def test_a_lease_holds_the_next_messages(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world, count=2)
    assert (leased.first, leased.last, leased.message_count) == (numbers[0], numbers[1], 2)
    assert read(world, leased) == ["a", "b"]


def test_a_lease_has_its_owner_size_and_end(world: World) -> None:
    queue(world)
    sent = [message("a"), message("bb")]
    send(world, *sent)
    leased = lease(world, "me")
    assert leased.owner == "me"
    assert leased.size_in_bytes == sum(m.size for m in sent)
    assert leased.leased_until_utc == later(world, minutes=1)


def test_a_lease_lasts_as_long_as_asked(world: World) -> None:
    queue(world)
    send(world, "a")
    leased = world.ask(LeaseRange(QUEUE, "me", 1, duration=timedelta(minutes=10)))
    assert leased.leased_until_utc == later(world, minutes=10)
    world.wait(minutes=9)
    assert receive(world) == []


def test_an_empty_queue_has_nothing_to_lease(world: World) -> None:
    queue(world)
    assert world.ask(LeaseRange(QUEUE, "me", 10)) is None


def test_leased_messages_are_delivered_to_no_one(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    lease(world, count=2)
    assert bodies(receive(world)) == ["c"]


def test_leased_messages_can_be_browsed(world: World) -> None:
    queue(world)
    send(world, "a")
    lease(world)
    assert bodies(peek(world)) == ["a"]


def test_leased_messages_count_as_active(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    lease(world, count=1)
    assert runtime(world).active_message_count == 2


def test_owners_lease_different_messages(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c", "d")
    mine, yours = lease(world, "me", 2), lease(world, "you", 2)
    assert read(world, mine) == ["a", "b"]
    assert read(world, yours) == ["c", "d"]
    assert world.ask(LeaseRange(QUEUE, "them", 2)) is None


def test_one_owner_holds_several_leases(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    first, second = lease(world, count=1), lease(world, count=1)
    assert read(world, first) == ["a"]
    assert read(world, second) == ["b"]


def test_each_lease_has_a_later_epoch(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    epochs = [lease(world, count=1).epoch for _ in range(3)]
    assert epochs == sorted(set(epochs))


def test_a_lease_leaves_locked_and_deferred_messages_alone(world: World) -> None:
    queue(world)
    send(world, "deferred", "locked", "free")
    deferred, _locked = receive(world, count=2)
    settle(world, Disposition.DEFER, deferred)
    leased = lease(world)
    assert leased.message_count == 1
    assert read(world, leased) == ["free"]


def test_a_lease_leaves_scheduled_messages_alone(world: World) -> None:
    queue(world)
    send(world, message("later", scheduled_enqueue_time_utc=later(world, hours=1)))
    assert world.ask(LeaseRange(QUEUE, "me", 10)) is None


def test_a_lease_leaves_expired_messages_alone(world: World) -> None:
    queue(world)
    send(world, message("dead", time_to_live=timedelta(seconds=5)), "alive")
    world.wait(seconds=6)
    assert read(world, lease(world)) == ["alive"]


def test_a_locked_message_inside_the_range_keeps_its_lock(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    first, second = receive(world, count=2)
    settle(world, Disposition.RELEASE, first)
    leased = lease(world)
    assert read(world, leased) == ["a", "c"]
    settle_all(world, leased)
    complete(world, second)


# -- waiting for a lease ---------------------------------------------------------------------------


def wait_for_lease(world: World, owner: str = "syphon") -> "Future[RangeLease | None]":
    return start(world, LeaseRange(QUEUE, owner, MANY, wait=15 * MINUTE, past=()))


def leases_metered(world: World) -> int:
    return sum(r["count"] for r in world.ask(ReadMeter()).to_pylist() if "Lease" in r["operation"])


def test_a_lease_waits_for_the_first_message_and_costs_one_operation(world: World) -> None:
    queue(world)
    waiting = wait_for_lease(world)
    world.wait(minutes=14)
    assert not waiting.done()
    send(world, "a")
    leased = waiting.result(timeout=10)
    assert leased is not None
    assert (leased.message_count, leased.waited_for) == (1, None)
    assert leases_metered(world) == 1


def test_a_lease_nobody_could_fill_ends_with_nothing(world: World) -> None:
    queue(world)
    waiting = wait_for_lease(world)
    world.wait(minutes=15)
    assert waiting.result(timeout=10) is None
    assert leases_metered(world) == 1


def test_in_order_nothing_behind_the_messages_of_another_is_leased(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    found = lease(world, "one", count=1)
    assert world.ask(LeaseRange(QUEUE, "two", MANY, past=())) is None
    waiting = wait_for_lease(world, "two")
    assert not waiting.done()
    settle_all(world, found)
    leased = waiting.result(timeout=10)
    assert leased is not None
    assert (leased.message_count, leased.waited_for) == (2, "one")


def test_in_order_only_leases_that_are_named_are_passed_over(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    known = lease(world, "one", count=1)
    assert world.ask(LeaseRange(QUEUE, "one", MANY, past=())) is None
    leased = world.ask(LeaseRange(QUEUE, "one", MANY, past=[known.epoch]))
    assert leased is not None
    assert read(world, leased) == ["b"]


def test_in_order_a_lease_ends_before_what_a_receiver_has(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    found = receive_one(world)
    assert world.ask(LeaseRange(QUEUE, "one", MANY, past=())) is None
    abandon(world, found)
    leased = world.ask(LeaseRange(QUEUE, "one", MANY, past=()))
    assert leased is not None
    assert read(world, leased) == ["a", "b"]


def test_a_lease_that_waits_behind_another_holds_up_no_receiver(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    lease(world, "one", count=1)
    waiting = wait_for_lease(world, "two")
    assert bodies(receive(world)) == ["b"]
    assert not waiting.done()


def test_settling_can_give_the_lease_back_in_the_same_step(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b")
    leased = lease(world)
    done = [(numbers[0], numbers[0])]
    world.ask(SettleRange(QUEUE, leased.epoch, done, release=True))
    assert bodies(receive(world)) == ["b"]
    with pytest.raises(StaleEpochError):
        world.ask(SettleRange(QUEUE, leased.epoch, done, release=True))


def test_a_given_range_is_not_waited_for(world: World) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError, match="not for a given range"):
        world.ask(LeaseRange(QUEUE, "me", 1, 1, 2, wait=MINUTE))


# -- states and entities that cannot be leased -----------------------------------------------------


def test_an_abandoned_message_can_be_leased(world: World) -> None:
    queue(world)
    send(world, "a")
    abandon(world, receive_one(world))
    assert read(world, lease(world)) == ["a"]


def test_a_leased_message_is_not_deferred(world: World) -> None:
    queue(world)
    numbers = send(world, "a")
    lease(world)
    with pytest.raises(MessageNotFoundError):
        world.ask(ReceiveDeferred(QUEUE, numbers))


def test_a_subscription_can_be_leased_from(world: World) -> None:
    topic(world)
    path = subscription(world, "sport")
    send(world, "a", path="news")
    assert world.ask(LeaseRange(path, "me", 10)).message_count == 1


def test_a_dead_letter_queue_can_be_leased_from(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    leased = world.ask(LeaseRange(DEAD, "me", 10))
    world.ask(SettleRange(DEAD, leased.epoch, [(leased.first, leased.last)]))
    assert peek(world, DEAD) == []


def test_a_topic_cannot_be_leased_from(world: World) -> None:
    topic(world)
    with pytest.raises(MessagingError):
        world.ask(LeaseRange("news", "me", 10))


def test_an_unknown_entity_cannot_be_leased_from(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        world.ask(LeaseRange("nowhere", "me", 10))


@pytest.mark.parametrize("count", [0, -1, MAX_LEASE_MESSAGES + 1])
def test_a_lease_of_an_impossible_number_is_refused(world: World, count: int) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(LeaseRange(QUEUE, "me", count))


@pytest.mark.parametrize("duration", [timedelta(0), -MINUTE, MAX_LEASE_DURATION + MINUTE])
def test_a_lease_of_an_impossible_duration_is_refused(world: World, duration: timedelta) -> None:
    queue(world)
    send(world, "a")
    with pytest.raises(InvalidArgumentError):
        world.ask(LeaseRange(QUEUE, "me", 1, duration=duration))
    epoch = lease(world).epoch
    with pytest.raises(InvalidArgumentError):
        world.ask(RenewRange(QUEUE, epoch, duration))


@pytest.mark.parametrize(("first", "last"), [(1, None), (None, 1)])
def test_a_range_must_have_both_ends(world: World, first: int | None, last: int | None) -> None:
    queue(world)
    send(world, "a", "b")
    with pytest.raises(InvalidArgumentError):
        world.ask(LeaseRange(QUEUE, "me", 10, first, last))
