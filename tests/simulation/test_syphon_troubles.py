"""Failures of a syphon that were found once, each with its rule, on a simulated clock."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.simulation.syphon_words import QUEUES, World
from twinbus.entities import QueueDescription
from twinbus.limits import (
    CARRY_TIMEOUT,
    MAX_BATCH_MESSAGES,
    MAX_LEASE_MESSAGES,
    MAX_LEASED_RANGES,
    SYPHON_LEASE,
)
from twinbus.pairing.backlog import NUMBER, PATH, SENDER
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    DeleteEntity,
    Disposition,
    LeaseRange,
    Receive,
    Settle,
)
from twinbus.syphon import carrier as carrying
from twinbus.syphon.carrier import Carrier
from twinbus.testing import Fault, FaultyNamespace

pytestmark = pytest.mark.usefixtures("answered_at_once")
R = TypeVar("R")
LEASE_S = int(SYPHON_LEASE.total_seconds())


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world with one syphon, which takes up to five messages of a queue at a time."""
    return World(0, tmp_path, range_messages=5, syphons=1)


class Hung(FaultyNamespace):
    """Accepts every command and never replies. A wait for a reply moves a manual clock."""

    now_s = 0.0

    def submit(self, command: Command[R]) -> "Future[R]":
        assert command
        return NoReply(self)


class NoReply(Future[Any]):
    def __init__(self, namespace: Hung) -> None:
        super().__init__()
        self._namespace = namespace

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        self._namespace.now_s += timeout
        raise TimeoutError


class Meanwhile(FaultyNamespace):
    """Calls functions in turn: one before and one after each request for a range of a queue."""

    calls: Sequence[Callable[[], object]] = ()

    def submit(self, command: Command[R]) -> "Future[R]":
        is_request = isinstance(command, LeaseRange) and command.path == QUEUES[0]
        if not self.calls or not is_request:
            return super().submit(command)
        before, after, *self.calls = self.calls
        before()
        reply = super().submit(command)
        after()
        return reply


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


# -- numbers that come again -----------------------------------------------------------------------


def test_a_backlog_queue_that_is_made_anew_brings_everything_home(world: World) -> None:
    sent = world.divert_ids(numbered("before", 4))
    world.run(3)
    world.secondary.ask(DeleteEntity(QUEUES[0]))
    world.secondary.ask(CreateEntity(describe_backlog_queue(PrimaryIdentity("contoso"), 0)))
    sent += world.divert_ids(numbered("after", 9))
    world.run(3, world.new_syphon())
    assert world.home("orders") == sent
    assert not world.left()
    assert not world.dead()


def test_a_new_secondary_brings_everything_home(world: World) -> None:
    sent = world.divert_ids(numbered("before", 4))
    world.run(3)
    world.secondary = world.new_secondary("another")
    sent += world.divert_ids(numbered("after", 9))
    world.run(3, world.new_syphon())
    assert world.home("orders") == sent
    assert not world.left()
    assert not world.dead()


def test_another_spelling_of_a_backlog_queue_doubles_nothing(world: World) -> None:
    sent = world.divert_ids(["a", "b"])
    killed = world.syphons[0]
    killed.plan()
    [task] = killed.under_way
    killed.carrier.carry(task.queue, task.ranges)  # and neither settles nor gives anything back
    world.clock.advance(SYPHON_LEASE)
    world.run(2, world.new_syphon(queues=tuple(queue.upper() for queue in QUEUES)))
    assert world.home("orders") == sent
    assert not world.left()


# -- poison ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({SENDER: "sender/00000000000000aa"}, "belong together"),
        ({NUMBER: 5}, "belong together"),
        ({SENDER: "", NUMBER: 5}, "is not a valid sender"),
        ({SENDER: "somebody", NUMBER: 5}, "is not a valid sender"),
    ],
    ids=["sender without number", "number without sender", "empty sender", "no sender"],
)
def test_a_sender_that_is_none_is_put_aside_and_holds_up_nobody(
    world: World, properties: dict[str, Any], why: str
) -> None:
    sent = world.divert_ids(["before"])
    world.put_in("odd", {PATH: "orders"} | properties)
    sent += world.divert_ids(["after"])
    bills = world.divert_ids(numbered("bill", 6), "bills")
    world.run(4)
    assert (world.home("orders"), world.home("bills")) == (sent, bills)
    assert list(world.dead()) == ["odd"]
    assert why in world.dead()["odd"]
    assert not world.left()


def test_poison_of_a_destination_on_trial_lets_no_later_message_overtake(tmp_path: Path) -> None:
    world = World(0, tmp_path, range_messages=1, syphons=1)
    world.primary.ask(CreateEntity(QueueDescription(path="sessions", requires_session=True)))
    recover = world.way_home.inject(Fault.UNAVAILABLE, "sessions")
    world.divert_ids(["poison"], "sessions")
    world.run(1)
    sent = world.divert_ids(["first"], "sessions", session_id="s")
    world.run(1)
    recover()
    sent += world.divert_ids(["second"], "sessions", session_id="s")
    world.clock.advance(timedelta(seconds=20))
    world.run(10)
    assert world.browse("sessions") == sent
    assert list(world.dead()) == ["poison"]


# -- nobody is held up -----------------------------------------------------------------------------


def test_a_destination_that_is_down_for_long_holds_up_no_other_and_keeps_its_order(
    world: World,
) -> None:
    recover = world.way_home.inject(Fault.UNAVAILABLE, "orders")
    sent, flowing = [], []
    for second in range(MAX_LEASED_RANGES + 10):
        sent += world.divert_ids([f"order.{second}"])
        flowing += world.divert_ids([f"bill.{second}"], "bills")
        world.run(1)
    assert world.home("bills") == flowing
    recover()
    world.run(60)
    assert world.home("orders") == sent
    assert not world.left()


def test_a_throttled_destination_is_left_alone_for_ten_seconds_and_holds_up_no_other(
    world: World,
) -> None:
    world.way_home.inject(Fault.SERVER_BUSY, "orders", times=1)
    sent = world.divert_ids(["a", "b"])
    bills = world.divert_ids(["c"], "bills")
    world.run(8)
    assert (world.home("orders"), world.home("bills")) == ([], bills)
    assert world.way_home.failed == 1  # it was not asked again
    world.run(4)
    assert world.home("orders") == sent


def test_a_lost_reply_to_a_lease_makes_no_rival_and_no_queue_starves(world: World) -> None:
    world.syphons[0].secondary.inject(Fault.REPLY_LOST, QUEUES[0], times=1)
    for queue in range(len(QUEUES)):
        world.divert_ids(numbered(f"{queue}", 300), queue=queue)
    batches = world.run(LEASE_S + 20)
    assert batches[:LEASE_S] == [{QUEUES[1], QUEUES[2]}] * LEASE_S  # until that lease lapses
    assert batches[LEASE_S + 1 :] == [set(QUEUES)] * 19


def test_a_message_that_a_receiver_gave_back_makes_no_rival_and_no_queue_starves(
    world: World,
) -> None:
    for queue in range(len(QUEUES)):
        world.divert_ids(numbered(f"{queue}", 300), queue=queue)
    locked = world.secondary.ask(Receive(QUEUES[0], 1))
    assert world.run(1) == [{QUEUES[1], QUEUES[2]}]  # what is behind it waits for it
    world.secondary.ask(Settle(QUEUES[0], locked.column("lock_token"), Disposition.ABANDON))
    assert world.run(20)[1:] == [set(QUEUES)] * 19


def test_destinations_that_hang_are_waited_for_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = Hung(world.primary)
    monkeypatch.setattr(carrying, "_monotonic_s", lambda: primary.now_s)
    syphon = world.syphons[0]
    syphon.carrier = Carrier(primary, world.secondary)
    for path in numbered("of", 5):
        world.divert_ids(["m"], path)
    assert syphon.batch_of() == {QUEUES[0]}
    assert primary.now_s == CARRY_TIMEOUT.total_seconds()  # not five times as long


# -- nothing overtakes -----------------------------------------------------------------------------


def test_a_range_behind_a_lost_one_is_released_although_its_request_was_under_way(
    world: World,
) -> None:
    link = Meanwhile(world.secondary)
    syphon = world.new_syphon(link=link)
    sent = world.divert_ids(numbered("before", 5))
    syphon.plan()
    recover = link.inject(Fault.UNAVAILABLE, QUEUES[0])
    world.clock.advance(SYPHON_LEASE)  # the lease expires, and the secondary is down
    syphon.carry()
    recover()
    link.calls = (
        lambda: None,  # the first request gets the same messages, which must wait a second
        lambda: None,
        lambda: sent.extend(world.divert_ids(["after"])),  # the second request gets this message
        syphon.planner.keep_leases,  # and then the planner finds out that the lease has expired
    )
    syphon.under_way = syphon.planner.next_tasks(5.0)
    assert not link.calls
    while syphon.under_way:
        syphon.carry()
    world.run(5, syphon)
    assert world.browse("orders") == sent


# -- once ------------------------------------------------------------------------------------------


def test_once_ends_although_a_client_goes_on_diverting(world: World) -> None:
    sent = world.divert_ids(numbered("there", 12))
    batches = 0
    while world.syphons[0].batch_of(once=True):
        batches += 1
        assert batches < 10
        world.divert_ids(numbered(f"late.{batches}", 5))
    assert batches == 3
    assert world.home("orders")[:12] == sent
    assert world.syphons[0].desk.progress()[0].waiting > 0


def test_once_asks_a_busy_queue_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        world.clock.advance(timedelta(seconds=seconds))

    monkeypatch.setattr(time, "sleep", sleep)
    sent = world.divert_ids(["a", "b"])
    syphon = world.syphons[0]
    syphon.secondary.inject(Fault.SERVER_BUSY, QUEUES[0], times=1)
    while syphon.batch_of(once=True):
        pass
    assert world.home("orders") == sent
    assert syphon.desk.progress()[0].waiting == 0


def test_once_reports_messages_that_others_hold(world: World) -> None:
    world.divert_ids(["a", "b"])
    world.syphons[0].plan()  # and is killed
    second = world.new_syphon()
    assert not second.batch_of(once=True)
    assert second.desk.progress()[0].waiting > 0


# -- a new planner ---------------------------------------------------------------------------------


def test_notes_and_counts_go_on_after_a_new_planner(world: World) -> None:
    desk = world.syphons[0].desk
    for _ in range(2):
        life = world.new_syphon(folder=desk.folder)
        world.way_home.inject(Fault.UNAVAILABLE, "orders", times=1)
        world.divert_ids(["order"])
        world.divert_ids(numbered("bill", 3), "bills")
        world.run(10, life)
        life.planner.close()
    progress, notes = desk.progress()
    moved = {destination.path: destination.moved for destination in progress.destinations}
    assert (progress.moved, moved) == (8, {"bills": 6, "orders": 2})
    assert [note.number for note in notes] == [1, 2, 3, 4]  # twice: in trouble, and out of it


@pytest.mark.parametrize("path", ["orders", "nowhere"])
def test_a_range_of_more_messages_than_a_send_carries_comes_home_or_is_put_aside(
    tmp_path: Path, path: str
) -> None:
    world = World(0, tmp_path, range_messages=MAX_LEASE_MESSAGES, syphons=1)
    sent = world.divert_ids(numbered("a", MAX_BATCH_MESSAGES), path)
    sent += world.divert_ids(numbered("b", 5), path)
    world.run(1)
    assert world.home("orders") == (sent if path == "orders" else [])
    assert not world.left()


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [True, False])
def test_a_syphon_that_ends_leaves_what_it_kept_to_others_at_once(world: World, once: bool) -> None:
    world.way_home.inject(Fault.UNAVAILABLE, "orders")
    world.divert_ids(["stays"])
    syphon = world.syphons[0]
    syphon.plan()
    syphon.carry()
    if not once:
        syphon.desk.ask_to_stop()
    assert syphon.planner.next_tasks(0.0, once=once) == []
    assert world.secondary.ask(LeaseRange(QUEUES[0], "another", 10, past=())) is not None
