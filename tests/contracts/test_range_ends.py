"""The end of a lease: released, lapsed, or taken again by its owner or another."""

from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.range_words import lease, read, settle_all
from tests.contracts.words import (
    MANY,
    QUEUE,
    bodies,
    later,
    outcome,
    queue,
    receive,
    send,
    start,
    take,
)
from twinbus.errors import RangeUnavailableError, StaleEpochError
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    LeaseRange,
    ReadRange,
    Receive,
    ReleaseRange,
    RenewRange,
    SettleRange,
)

NEEDS = Capability.RANGES  # of every test here


# -- the end of a lease ----------------------------------------------------------------------------


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


def test_only_unsettled_messages_come_back(world: World) -> None:
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


# -- taking a range again --------------------------------------------------------------------------


def test_an_owner_takes_its_range_again_after_a_crash(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    old = lease(world, count=2)
    new = lease(world, again=old)
    assert (new.first, new.last, new.message_count) == (old.first, old.last, 2)
    assert new.epoch > old.epoch
    assert read(world, new) == ["a", "b"]


def test_a_range_taken_again_has_only_unsettled_messages(world: World) -> None:
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
