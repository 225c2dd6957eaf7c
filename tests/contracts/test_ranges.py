"""Ranges: a syphon leases messages in bulk, reads them again and again, settles them once."""

from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    MANY,
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
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessageNotFoundError,
    MessagingError,
    RangeUnavailableError,
    StaleEpochError,
)
from twinbus.limits import MAX_LEASE_DURATION, MAX_LEASE_MESSAGES
from twinbus.message import DELIVERY_SCHEMA, to_messages
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    DeadLetterPart,
    Disposition,
    LeaseRange,
    RangeLease,
    ReadMeter,
    ReadRange,
    Receive,
    ReceiveDeferred,
    ReleaseRange,
    RenewRange,
    SettleRange,
)

NEEDS = Capability.RANGES  # of every test here

MINUTE = timedelta(minutes=1)


def lease(
    world: World, owner: str = "syphon", count: int = MANY, again: RangeLease | None = None
) -> RangeLease:
    """Lease the next messages, or the range of an earlier lease again."""
    first, last = (again.first, again.last) if again else (None, None)
    leased: RangeLease | None = world.ask(LeaseRange(QUEUE, owner, count, first, last))
    assert leased is not None
    return leased


def read(world: World, leased: RangeLease) -> list[str]:
    batch = world.ask(ReadRange(QUEUE, leased.epoch, leased.first, leased.last))
    return bodies(to_messages(batch))


def settle_all(world: World, leased: RangeLease) -> None:
    world.ask(SettleRange(QUEUE, leased.epoch, [(leased.first, leased.last)]))


# -- leasing -----------------------------------------------------------------------------------


def test_a_lease_holds_the_next_messages(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world, count=2)
    assert (leased.first, leased.last, leased.message_count) == (numbers[0], numbers[1], 2)
    assert read(world, leased) == ["a", "b"]


def test_a_lease_tells_owner_size_and_end(world: World) -> None:
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


# -- reading -----------------------------------------------------------------------------------


def test_a_range_reads_the_same_every_time(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    leased = lease(world)
    command = ReadRange(QUEUE, leased.epoch, leased.first, leased.last)
    first = world.ask(command)
    send(world, "d")
    assert world.ask(command).equals(first)
    assert first.schema == DELIVERY_SCHEMA


def test_part_of_a_range_can_be_read(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    batch = world.ask(ReadRange(QUEUE, leased.epoch, numbers[1], numbers[2]))
    assert bodies(to_messages(batch)) == ["b", "c"]


def test_reading_a_range_takes_no_more_bytes_than_asked(world: World) -> None:
    queue(world)
    send(world, *["x" * 1024] * 10)
    leased = lease(world)
    part = ReadRange(QUEUE, leased.epoch, leased.first, leased.last, max_bytes=3500)
    assert world.ask(part).num_rows == 3
    item = ReadRange(QUEUE, leased.epoch, leased.first, leased.last, max_bytes=1)
    assert world.ask(item).num_rows == 1


def test_settled_messages_are_not_read(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    world.ask(SettleRange(QUEUE, leased.epoch, [(numbers[0], numbers[1])]))
    assert read(world, leased) == ["c"]


def test_an_unknown_epoch_reads_nothing(world: World) -> None:
    queue(world)
    send(world, "a")
    leased = lease(world)
    with pytest.raises(StaleEpochError):
        world.ask(ReadRange(QUEUE, leased.epoch + 1, leased.first, leased.last))


# -- settling ----------------------------------------------------------------------------------


def test_a_completed_range_is_gone(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    settle_all(world, lease(world))
    assert peek(world) == []
    assert runtime(world).active_message_count == 0
    assert runtime(world).size_in_bytes == 0


def test_intervals_of_a_range_are_completed(world: World) -> None:
    queue(world)
    n = send(world, *"abcdef")
    leased = lease(world)
    world.ask(SettleRange(QUEUE, leased.epoch, [(n[0], n[1]), (n[4], n[4])]))
    assert read(world, leased) == ["c", "d", "f"]


def test_part_of_a_range_is_put_aside_with_a_reason(world: World) -> None:
    queue(world)
    numbers = send(world, "good", "bad", "good")
    leased = lease(world)
    parts = [DeadLetterPart([numbers[1]], "NoPath", "x-ms-path is missing")]
    intervals = [(numbers[0], numbers[0]), (numbers[2], numbers[2])]
    world.ask(SettleRange(QUEUE, leased.epoch, intervals, parts))
    dead = receive_one(world, DEAD)
    assert (dead.body, dead.dead_letter_reason) == (b"bad", "NoPath")
    assert dead.dead_letter_error_description == "x-ms-path is missing"
    assert dead.dead_letter_source == QUEUE
    assert peek(world) == []


def test_each_part_put_aside_has_its_own_reason(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    parts = [DeadLetterPart([numbers[0], numbers[2]], "one"), DeadLetterPart([numbers[1]], "two")]
    world.ask(SettleRange(QUEUE, leased.epoch, dead_lettered=parts))
    reasons = {m.body.decode(): m.dead_letter_reason for m in receive(world, DEAD)}
    assert reasons == {"a": "one", "b": "two", "c": "one"}


def test_settling_a_range_again_is_harmless(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c", "d")
    leased = lease(world)
    parts = [DeadLetterPart([numbers[1]], "bad")]
    command = SettleRange(QUEUE, leased.epoch, [(numbers[0], numbers[0])], parts)
    for _ in range(3):
        world.ask(command)
    assert read(world, leased) == ["c", "d"]
    assert bodies(peek(world, DEAD)) == ["b"]


def test_settling_the_last_of_a_range_again_is_harmless(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    leased = lease(world)
    settle_all(world, leased)
    settle_all(world, leased)
    assert peek(world) == []


def test_nothing_outside_the_range_is_settled(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world, count=2)
    with suppress(InvalidArgumentError):
        world.ask(SettleRange(QUEUE, leased.epoch, [(numbers[0], numbers[2])]))
    assert bodies(receive(world)) == ["c"]


def test_a_message_of_a_range_is_completed_past_its_time_to_live(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    send(world, message("a", time_to_live=timedelta(seconds=5)))
    leased = lease(world)
    world.wait(seconds=10)
    assert read(world, leased) == ["a"]
    settle_all(world, leased)
    assert peek(world, DEAD) == []


# -- the end of a lease ------------------------------------------------------------------------


def test_a_released_range_is_deliverable(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    world.ask(ReleaseRange(QUEUE, lease(world).epoch))
    assert [(m.body, m.delivery_count) for m in receive(world)] == [(b"a", 0), (b"b", 0)]


def test_a_released_range_wakes_a_waiting_receive(world: World) -> None:
    queue(world)
    send(world, "a")
    leased = lease(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    assert not waiting.done()
    world.ask(ReleaseRange(QUEUE, leased.epoch))
    assert outcome(waiting) == ["a"]


def test_only_what_is_not_settled_comes_back(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    world.ask(SettleRange(QUEUE, leased.epoch, [(numbers[1], numbers[1])]))
    world.ask(ReleaseRange(QUEUE, leased.epoch))
    assert take(world) == ["a", "c"]


def test_a_lapsed_lease_returns_the_messages_to_the_queue(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    lease(world)
    world.wait(seconds=61)
    assert take(world) == ["a", "b"]


def test_a_lapsed_lease_wakes_a_waiting_receive(world: World) -> None:
    queue(world)
    send(world, "a")
    lease(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    world.wait(seconds=61)
    assert outcome(waiting) == ["a"]


def test_a_lapsed_lease_can_be_leased_by_another_owner(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    lease(world, "me")
    world.wait(seconds=61)
    assert read(world, lease(world, "you")) == ["a", "b"]


def test_a_renewed_lease_lasts_another_duration_from_now(world: World) -> None:
    queue(world)
    send(world, "a")
    leased = lease(world)
    world.wait(seconds=40)
    until = world.ask(RenewRange(QUEUE, leased.epoch, timedelta(minutes=2)))
    assert until == later(world, minutes=2)
    world.wait(seconds=110)
    assert read(world, leased) == ["a"]


STALE = [
    lambda lease: RenewRange(QUEUE, lease.epoch),
    lambda lease: ReadRange(QUEUE, lease.epoch, lease.first, lease.last),
    lambda lease: SettleRange(QUEUE, lease.epoch, [(lease.first, lease.last)]),
    lambda lease: ReleaseRange(QUEUE, lease.epoch),
]
STALE_NAMES = ["renew", "read", "settle", "release"]


@pytest.mark.parametrize("command", STALE, ids=STALE_NAMES)
def test_a_lapsed_lease_is_stale(world: World, command: object) -> None:
    assert callable(command)
    queue(world)
    send(world, "a")
    leased = lease(world)
    world.wait(seconds=61)
    with pytest.raises(StaleEpochError):
        world.ask(command(leased))
    assert bodies(receive(world)) == ["a"]


@pytest.mark.parametrize("command", STALE, ids=STALE_NAMES)
def test_a_released_lease_is_stale(world: World, command: object) -> None:
    assert callable(command)
    queue(world)
    send(world, "a")
    leased = lease(world)
    world.ask(ReleaseRange(QUEUE, leased.epoch))
    with pytest.raises(StaleEpochError):
        world.ask(command(leased))
    assert bodies(receive(world)) == ["a"]


@pytest.mark.parametrize("command", STALE, ids=STALE_NAMES)
def test_a_lease_that_was_taken_over_is_stale(world: World, command: object) -> None:
    assert callable(command)
    queue(world)
    send(world, "a")
    old = lease(world)
    new = lease(world, again=old)
    with pytest.raises(StaleEpochError):
        world.ask(command(old))
    assert read(world, new) == ["a"]


# -- taking a range again ----------------------------------------------------------------------


def test_an_owner_takes_its_range_again_after_a_crash(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    old = lease(world, count=2)
    new = lease(world, again=old)
    assert (new.first, new.last, new.message_count) == (old.first, old.last, 2)
    assert new.epoch > old.epoch
    assert read(world, new) == ["a", "b"]


def test_a_range_taken_again_holds_only_what_is_not_settled(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    old = lease(world)
    world.ask(SettleRange(QUEUE, old.epoch, [(old.first, old.first)]))
    new = lease(world, again=old)
    assert new.message_count == 2
    assert read(world, new) == ["b", "c"]


def test_a_range_that_is_settled_whole_has_nothing_to_lease(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    old = lease(world)
    settle_all(world, old)
    assert world.ask(LeaseRange(QUEUE, "syphon", MANY, old.first, old.last)) is None


def test_a_range_of_another_owner_is_unavailable(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    mine = lease(world, "me")
    with pytest.raises(RangeUnavailableError):
        lease(world, "you", again=mine)
    assert read(world, mine) == ["a", "b"]


def test_the_error_of_a_range_names_its_owner(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    mine = lease(world, "me", count=1)
    unnamed = lease(world, "", count=1)
    with pytest.raises(RangeUnavailableError, match="leased by me; try again"):
        lease(world, "you", again=mine)
    with pytest.raises(RangeUnavailableError, match="leased by another client; try again"):
        lease(world, "you", again=unnamed)


def test_a_range_that_overlaps_one_of_another_owner_is_unavailable(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    lease(world, "me", count=2)
    with pytest.raises(RangeUnavailableError):
        world.ask(LeaseRange(QUEUE, "you", MANY, numbers[1], numbers[2]))


def test_a_range_of_another_owner_is_available_when_it_lapsed(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    mine = lease(world, "me")
    world.wait(seconds=61)
    yours = lease(world, "you", again=mine)
    assert read(world, yours) == ["a", "b"]
    with pytest.raises(StaleEpochError):
        settle_all(world, mine)


def test_a_range_of_another_owner_is_available_when_it_was_released(world: World) -> None:
    queue(world)
    send(world, "a")
    mine = lease(world, "me")
    world.ask(ReleaseRange(QUEUE, mine.epoch))
    assert read(world, lease(world, "you", again=mine)) == ["a"]


def test_a_given_range_can_be_leased_the_first_time(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = world.ask(LeaseRange(QUEUE, "me", MANY, numbers[1], numbers[2]))
    assert read(world, leased) == ["b", "c"]
    assert bodies(receive(world)) == ["a"]


# -- what does not go together -----------------------------------------------------------------


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


# -- waiting for a lease -----------------------------------------------------------------------


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
