"""The ledgers of a namespace: counts that add up exactly, and a trail of every message."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.words import (
    DEAD,
    MANY,
    QUEUE,
    TOPIC,
    abandon,
    accept,
    bodies,
    complete,
    later,
    message,
    outcome,
    peek,
    queue,
    receive,
    receive_one,
    send,
    settle,
    start,
    subscription,
    take,
    topic,
)
from tests.scenarios.site import Site
from tests.unit.properties import replayed
from twinbus import ledger
from twinbus.clock import ManualClock
from twinbus.entities import EntityStatus, backlog_queue_path
from twinbus.errors import (
    CommandFailedError,
    EntityDisabledError,
    EntityNotFoundError,
    InvalidArgumentError,
    StoreUnavailableError,
)
from twinbus.ledger import NO_LEDGER, LedgerKind, LedgerSettings
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    CancelScheduled,
    DeleteEntity,
    Disposition,
    LeaseRange,
    Origin,
    ReadMeter,
    ReadRange,
    Receive,
    ReleaseRange,
    ReleaseSession,
    RenewRange,
    Send,
    SetSessionState,
    SettleRange,
    UpdateEntity,
)
from twinbus.protocol.requests import BlockingRequest

LEDGER = LedgerSettings()
BACKLOG = backlog_queue_path("home", 0)
OPERATIONS, MESSAGES = LedgerKind.OPERATIONS, LedgerKind.MESSAGES
COUNTED = ("count", "messages", "bytes", "units")
KEY = ("path", "operation", "purpose", "outcome")
SEGMENT_BYTES = 20_000
PADDING = "x" * 1000
PASSING = "passing"
EVERYTHING = 2**63 - 1
Row = dict[str, Any]
Place = tuple[int, int]  # number of a queue, sequence number
MakeSite = Callable[..., Site]


@pytest.fixture
def noted(make_site: MakeSite) -> Site:
    """Return a site that keeps ledgers."""
    return make_site(ledger=LEDGER)


@pytest.fixture
def small(make_site: MakeSite) -> Site:
    """Return a site that keeps ledgers, of small segments, with two queues."""
    site = make_site(ledger=LEDGER, segment_bytes=SEGMENT_BYTES)
    queue(site)
    queue(site, PASSING)
    return site


# -- reading -----------------------------------------------------------------------------------


def files(site: Site, kind: LedgerKind) -> list[Path]:
    """Return what a reader sees, in the order it was written."""
    found = site.directory.glob(f"ledger/{kind.value}/day=*/[!.]*.parquet")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def rows_of(site: Site, kind: LedgerKind) -> list[Row]:
    rows: list[Row] = []
    for path in files(site, kind):
        found = pq.ParquetFile(path).read().to_pylist()
        moment = "bucket" if kind is OPERATIONS else "at"
        assert {f"day={row[moment]:%Y-%m-%d}" for row in found} == {path.parent.name}
        rows += found
    return rows


def added_up(rows: Iterable[Row]) -> Counter[tuple[str, ...]]:
    """Return each sum that is not 0 by what it is of."""
    total: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        for name in COUNTED:
            total[*(row[key] for key in KEY), name] += row[name]
    return +total


def metered(site: Site) -> Counter[tuple[str, ...]]:
    """Return what the meter of this run says; costs nothing."""
    return added_up(site.engine.namespace.meter.table().to_pylist())


def counts(site: Site, *, path: str | None = None) -> dict[tuple[str, str, str], int]:
    """Close; return the requests of the ledger by operation, purpose and outcome."""
    site.embedded.close()
    found: Counter[tuple[str, str, str]] = Counter()
    for row in rows_of(site, OPERATIONS):
        if path is None or row["path"] == path:
            found[row["operation"], row["purpose"], row["outcome"]] += row["count"]
    return dict(found)


@dataclass
class Told:
    """What a trail tells when it is read whole."""

    accepted: dict[Place, str] = field(default_factory=dict)
    ended: dict[Place, str] = field(default_factory=dict)
    paths: dict[int, set[str]] = field(default_factory=dict)
    inventories: list[set[Place]] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)  # records
    begun: int = 0  # logs that came after another
    tellings: Counter[tuple[str, Place]] = field(default_factory=Counter)

    @property
    def standing(self) -> set[Place]:
        return set(self.accepted) - set(self.ended)

    def by(self, event: str) -> set[Place]:
        return {place for place, ended in self.ended.items() if ended == event}

    def note(self, row: Row) -> None:
        event, number = row["event"], row["number"]
        if event == ledger.GAP:
            self.gaps.append(row["record"])
        elif event == ledger.INVENTORY:
            self.inventories.append(set())
        if event == ledger.BEGUN:
            self.begun += 1
            for old in (self.accepted, self.ended, self.paths, self.inventories, self.tellings):
                old.clear()
        if event in (ledger.GAP, ledger.INVENTORY, ledger.BEGUN, ledger.EXISTS):
            return
        self.paths.setdefault(number, set()).add(row["path"])
        if event == ledger.DELETED:
            assert (row["first"], row["last"]) == (0, EVERYTHING)
            return
        assert 1 <= row["first"] <= row["last"]
        for place in ((number, at) for at in range(row["first"], row["last"] + 1)):
            self.tellings[event, place] += 1
            if event == ledger.STANDING:
                self.inventories[-1].add(place)
            elif event == ledger.ACCEPTED:
                assert row["first"] == row["last"]
                assert self.accepted.setdefault(place, row["message_id"]) == row["message_id"]
            else:
                assert row["message_id"] is None
                assert self.ended.setdefault(place, event) == event


def told(site: Site) -> Told:
    """Read the trail; inventories come in the order of their files."""
    found = Told()
    rows = rows_of(site, MESSAGES)
    for row in rows:
        found.note(row)
    for row in rows:
        if row["event"] == ledger.DELETED:
            for place in found.standing:
                if place[0] == row["number"]:
                    found.ended[place] = ledger.DELETED
    return found


def closed(site: Site) -> Told:
    """Close, and read the trail."""
    site.embedded.close()
    return told(site)


def number_of(site: Site, path: str = QUEUE) -> int:
    return site.queue_of(path).entity


def places(site: Site, numbers: Iterable[int], path: str = QUEUE) -> set[Place]:
    return {(number_of(site, path), number) for number in numbers}


def peeked(site: Site, *paths: str) -> dict[Place, str]:
    """Return what peek shows, by number and sequence number."""
    return {
        (number_of(site, path), m.sequence_number or 0): m.message_id or ""
        for path in paths or (QUEUE, DEAD)
        for m in peek(site, path)
    }


def roll(site: Site) -> None:
    site.wait(minutes=1)


def dead_letter(site: Site, count: int = 1, path: str = QUEUE) -> None:
    settle(site, Disposition.DEAD_LETTER, *receive(site, path, count), path=path)


def is_well(site: Site) -> bool:
    return not site.engine._ledgers._is_sick


# -- exactness ---------------------------------------------------------------------------------


def work(site: Site) -> None:
    """Do a little of everything, some of it wrong."""
    send(site, "a", "b", "c" * 100_000)
    first, second, third = receive(site)
    complete(site, first, third)
    abandon(site, second)
    peek(site)
    take(site)
    take(site)
    with pytest.raises(EntityNotFoundError):
        receive(site, "nowhere")
    with pytest.raises(InvalidArgumentError):
        site.ask(Receive(QUEUE, 0))


def test_the_files_add_up_to_the_meter_over_rolls_days_and_restarts(noted: Site) -> None:
    queue(noted)
    expected: Counter[tuple[str, ...]] = Counter()
    for _ in range(3):
        for span in ({"seconds": 20}, {"minutes": 3}, {"hours": 13}, {"days": 2}):
            work(noted)
            noted.wait(**span)
        noted.embedded.close()
        expected += metered(noted)
        noted.clock.advance(timedelta(seconds=1))
        noted.open()
    noted.embedded.close()
    assert added_up(rows_of(noted, OPERATIONS)) == expected + metered(noted)
    assert len({path.parent for path in files(noted, OPERATIONS)}) >= 4


def test_the_files_say_what_read_meter_says(noted: Site) -> None:
    queue(noted)
    work(noted)
    roll(noted)
    work(noted)
    said = added_up(noted.ask(ReadMeter()).to_pylist())
    noted.embedded.close()
    reading = ("", "ReadMeter", "management", "ok")
    said += Counter({(*reading, "count"): 1, (*reading, "units"): 1})
    assert added_up(rows_of(noted, OPERATIONS)) == said


def test_the_meter_counts_on_whatever_was_written(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    roll(noted)
    send(noted, "b")
    noted.wait(days=1)
    send(noted, "c")
    [sent] = [row for row in noted.ask(ReadMeter()).to_pylist() if row["operation"] == "Send"]
    assert (sent["count"], sent["messages"]) == (3, 3)


def test_a_request_that_waited_is_counted_once(noted: Site) -> None:
    queue(noted)
    served = start(noted, Receive(QUEUE, wait=timedelta(hours=2)))
    noted.wait(hours=1)
    send(noted, "a")
    assert outcome(served) == ["a"]
    assert counts(noted, path=QUEUE) == {
        ("Receive", "application", "ok"): 1,
        ("Send", "application", "ok"): 1,
    }


def test_what_the_spill_store_took_is_counted_once(noted: Site) -> None:
    queue(noted)
    noted.disk.full = True
    send(noted, "a")
    send(noted, "b")
    noted.disk.full = False
    noted.wait(seconds=5)
    assert bodies(peek(noted)) == ["a", "b"]
    assert counts(noted, path=QUEUE)["Send", "application", "ok"] == 2
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def test_the_counts_go_on_after_the_broker_healed_itself(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    heal(noted)
    send(noted, "b")
    assert counts(noted, path=QUEUE)["Send", "application", "ok"] == 2
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def sends_by_bucket(site: Site) -> dict[datetime, int]:
    site.embedded.close()
    found: Counter[datetime] = Counter()
    for row in rows_of(site, OPERATIONS):
        if row["operation"] == "Send":
            found[row["bucket"]] += row["count"]
    return dict(found)


def test_operations_stand_under_the_beginning_of_their_bucket(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(bucket=timedelta(minutes=5)))
    began = site.clock.now()
    queue(site)
    for _ in range(14):
        send(site, "a")
        roll(site)
    five = timedelta(minutes=5)
    assert sends_by_bucket(site) == {began: 5, began + five: 5, began + 2 * five: 4}


def test_a_bucket_never_reaches_over_midnight(noted: Site) -> None:
    noted.wait(hours=23, minutes=59, seconds=30)
    queue(noted)
    send(noted, "a")
    noted.wait(seconds=30)
    noted.wait(seconds=30)
    send(noted, "b")
    midnight = noted.clock.now().replace(hour=0, minute=0, second=0)
    assert sends_by_bucket(noted) == {midnight - timedelta(minutes=1): 1, midnight: 1}


@pytest.mark.parametrize(
    "settings",
    [{"bucket": timedelta(seconds=1)}, {"roll_interval": timedelta(hours=1)}],
    ids=["small buckets", "the default bucket"],
)
def test_the_first_operation_after_a_pause_stands_in_its_own_bucket(
    make_site: MakeSite, settings: dict[str, Any]
) -> None:
    site = make_site(ledger=LedgerSettings(**settings))
    site.wait(seconds=30)
    site.reopen()
    queue(site)
    send(site, "a")
    before = site.clock.now()
    site.wait(seconds=45)
    send(site, "b")
    [first, second] = sends_by_bucket(site)
    assert first <= before < second <= site.clock.now()


# -- purposes ----------------------------------------------------------------------------------


def test_what_an_application_asks_for_is_the_applications(noted: Site) -> None:
    queue(noted)
    work(noted)
    found = counts(noted)
    asked = {kind: purpose for kind, purpose, _ in found if kind != "CreateEntity"}
    assert asked == dict.fromkeys(("Send", "Receive", "Settle", "Peek"), "application")


def test_managing_is_counted_as_management(noted: Site) -> None:
    made = queue(noted)
    noted.ask(UpdateEntity(made))
    noted.ask(ReadMeter())
    noted.ask(DeleteEntity(QUEUE))
    with pytest.raises(EntityNotFoundError):
        noted.ask(DeleteEntity(QUEUE))
    queue(noted, BACKLOG)
    assert {purpose for _, purpose, _ in counts(noted)} == {"management"}


def test_a_send_to_a_backlog_queue_was_diverted(noted: Site) -> None:
    queue(noted, BACKLOG)
    send(noted, "a", path=BACKLOG.upper())
    with pytest.raises(InvalidArgumentError):
        noted.ask(Send(BACKLOG, []))
    assert counts(noted, path=BACKLOG) == {
        ("Send", "backlog", "ok"): 1,
        ("Send", "backlog", "InvalidArgument"): 1,
    }


@pytest.mark.parametrize("path", [QUEUE, BACKLOG])
def test_a_ping_is_a_ping_wherever_it_goes(noted: Site, path: str) -> None:
    queue(noted, path)
    send(noted, message("", content_type=PING_CONTENT_TYPE), path=path)
    assert counts(noted, path=path) == {("Send", "ping", "ok"): 1}


def test_a_refused_ping_is_a_ping(noted: Site) -> None:
    made = queue(noted)
    noted.ask(UpdateEntity(replace(made, status=EntityStatus.SEND_DISABLED)))
    with pytest.raises(EntityDisabledError):
        send(noted, message("", content_type=PING_CONTENT_TYPE))
    assert counts(noted, path=QUEUE)["Send", "ping", "EntityDisabled"] == 1


def test_a_send_with_a_ping_among_others_is_no_ping(noted: Site) -> None:
    queue(noted)
    send(noted, message("", content_type=PING_CONTENT_TYPE), "a")
    assert counts(noted, path=QUEUE) == {("Send", "application", "ok"): 1}


def test_pings_that_the_spill_store_took_are_pings(noted: Site) -> None:
    queue(noted)
    noted.disk.full = True
    send(noted, "a")
    send(noted, message("", content_type=PING_CONTENT_TYPE))
    noted.disk.full = False
    noted.wait(seconds=5)
    assert counts(noted, path=QUEUE)["Send", "ping", "ok"] == 1


def test_a_look_into_an_empty_backlog_queue_is_an_idle_poll(noted: Site) -> None:
    queue(noted, BACKLOG)
    assert noted.ask(LeaseRange(BACKLOG, "syphon", 10)) is None
    take(noted, BACKLOG)
    assert counts(noted, path=BACKLOG) == {
        ("LeaseRange", "idle_poll", "Empty"): 1,
        ("Receive", "idle_poll", "Empty"): 1,
    }


@pytest.mark.parametrize("kind", ["LeaseRange", "Receive"])
def test_waiting_at_a_backlog_queue_in_vain_is_an_idle_poll(noted: Site, kind: str) -> None:
    queue(noted, BACKLOG)
    wait = timedelta(seconds=30)
    command: Any = Receive(BACKLOG, wait=wait)
    if kind == "LeaseRange":
        command = LeaseRange(BACKLOG, "syphon", 10, wait=wait)
    ran_out = start(noted, command)
    noted.wait(seconds=30)
    assert ran_out.done()
    gone = BlockingRequest(command)
    noted.embedded.hand_over([gone])
    noted.embedded.withdraw([gone])
    found = counts(noted, path=BACKLOG)
    assert found == {(kind, "idle_poll", "Empty"): 1, (kind, "idle_poll", "Withdrawn"): 1}


def test_waiting_at_another_queue_in_vain_is_the_applications(noted: Site) -> None:
    queue(noted)
    start(noted, Receive(QUEUE, wait=timedelta(seconds=30)))
    noted.wait(seconds=30)
    gone = BlockingRequest(Receive(QUEUE, wait=timedelta(seconds=30)))
    noted.embedded.hand_over([gone])
    noted.embedded.withdraw([gone])
    assert counts(noted, path=QUEUE) == {
        ("Receive", "application", "Empty"): 1,
        ("Receive", "application", "Withdrawn"): 1,
    }


def test_emptying_a_backlog_queue_is_the_syphons(noted: Site) -> None:
    queue(noted, BACKLOG)
    waiting = start(noted, LeaseRange(BACKLOG, "syphon", 10, wait=timedelta(seconds=30)))
    send(noted, "a", "b", path=BACKLOG)
    lease: Any = waiting.result(timeout=10)
    noted.ask(ReadRange(BACKLOG, lease.epoch, lease.first, lease.last))
    noted.ask(RenewRange(BACKLOG, lease.epoch))
    noted.ask(SettleRange(BACKLOG, lease.epoch, [(lease.first, lease.first)]))
    noted.ask(ReleaseRange(BACKLOG, lease.epoch))
    take(noted, BACKLOG)
    found = counts(noted, path=BACKLOG)
    del found["Send", "backlog", "ok"]
    kinds = ("LeaseRange", "ReadRange", "RenewRange", "SettleRange", "ReleaseRange", "Receive")
    assert found == {(kind, "syphon", "ok"): 1 for kind in kinds}


def test_sending_home_what_a_range_held_is_the_syphons(noted: Site) -> None:
    queue(noted, BACKLOG)
    queue(noted)
    send(noted, "a", path=BACKLOG)
    lease = noted.ask(LeaseRange(BACKLOG, "syphon", 10))
    for _ in range(2):  # the second time nothing is taken, and it costs as much
        noted.ask(Send(QUEUE, [message("a")], Origin(lease.origin, [lease.first])))
    noted.ask(Send(QUEUE, [message("a")], Origin("sender/0000000000000001", [1])))
    noted.ask(Send(QUEUE, [message("a")], Origin("//sink/of-spark", [1])))
    assert counts(noted, path=QUEUE) == {
        ("Send", "syphon", "ok"): 2,
        ("Send", "application", "ok"): 2,
    }


def test_ranges_of_other_queues_are_the_applications(noted: Site) -> None:
    queue(noted)
    assert noted.ask(LeaseRange(QUEUE, "me", 10)) is None
    assert counts(noted, path=QUEUE) == {("LeaseRange", "application", "Empty"): 1}


# -- the trail ---------------------------------------------------------------------------------


def test_every_message_taken_is_told_once_with_its_id(noted: Site) -> None:
    queue(noted)
    sent = [message("a", message_id=f"id {n}") for n in range(9)]
    numbers = send(noted, *sent[:4]) + send(noted, *sent[4:])
    roll(noted)
    found = closed(noted)
    one = number_of(noted)
    assert found.accepted == {(one, n): m.message_id for n, m in zip(numbers, sent, strict=True)}
    assert found.paths[one] == {QUEUE}
    assert all(count == 1 for (event, _), count in found.tellings.items() if event == "accepted")
    assert found.gaps == []


def test_what_was_refused_or_known_or_a_ping_is_not_told(noted: Site) -> None:
    queue(noted, requires_duplicate_detection=True)
    send(noted, message("a", message_id="1"), message("again", message_id="1"))
    send(noted, message("again", message_id="1"), message("", content_type=PING_CONTENT_TYPE))
    with pytest.raises(InvalidArgumentError):
        noted.ask(Send(QUEUE, []))
    assert list(closed(noted).accepted.values()) == ["1"]


def test_completed_messages_are_told_by_their_numbers(noted: Site) -> None:
    queue(noted)
    numbers = send(noted, *"abcdefgh")
    received = receive(noted)
    complete(noted, *received[:3], received[6])
    abandon(noted, received[4])
    found = closed(noted)
    assert found.by("completed") == places(noted, [*numbers[:3], numbers[6]])
    assert found.standing == places(noted, [*numbers[3:6], numbers[7]])


def test_receiving_and_deleting_completes(noted: Site) -> None:
    queue(noted)
    numbers = send(noted, "a", "b")
    take(noted)
    assert closed(noted).by("completed") == places(noted, numbers)


def test_a_dead_lettered_message_is_accepted_by_the_dead_letter_queue(noted: Site) -> None:
    queue(noted)
    send(noted, message("a", message_id="A"), message("b", message_id="B"))
    dead_letter(noted, 2)
    roll(noted)
    complete(noted, receive_one(noted, DEAD), path=DEAD)
    here, there = number_of(noted), number_of(noted, DEAD)
    found = closed(noted)
    assert found.by("dead_lettered") == {(here, 1), (here, 2)}
    assert found.accepted == {(here, 1): "A", (here, 2): "B", (there, 1): "A", (there, 2): "B"}
    assert found.by("completed") == {(there, 1)}
    assert found.standing == {(there, 2)}
    assert found.paths == {here: {QUEUE}, there: {DEAD}}


def test_too_many_deliveries_dead_letter(noted: Site) -> None:
    queue(noted, max_delivery_count=2)
    send(noted, "a")
    for _ in range(2):
        abandon(noted, receive_one(noted))
    assert closed(noted).by("dead_lettered") == places(noted, [1])


@pytest.mark.parametrize("dead_letters", [False, True])
def test_expired_messages_are_told(noted: Site, dead_letters: bool) -> None:
    queue(noted, enable_dead_lettering_on_message_expiration=dead_letters)
    send(noted, message("a", message_id="A", time_to_live=timedelta(seconds=10)), "stays")
    noted.wait(seconds=11)
    here, there = number_of(noted), number_of(noted, DEAD)
    found = closed(noted)
    assert found.by("expired") == {(here, 1)}
    assert found.standing == ({(here, 2), (there, 1)} if dead_letters else {(here, 2)})
    if dead_letters:
        assert found.accepted[there, 1] == "A"


def test_a_scheduled_message_is_accepted_then_activated_under_a_new_number(noted: Site) -> None:
    queue(noted)
    when = later(noted, hours=1)
    send(noted, message("a", message_id="A", scheduled_enqueue_time_utc=when))
    noted.wait(hours=1)
    here = number_of(noted)
    assert take(noted) == ["a"]
    found = closed(noted)
    assert found.ended == {(here, 1): "activated", (here, 2): "completed"}
    assert found.accepted == {(here, 1): "A", (here, 2): "A"}


def test_a_cancelled_message_is_told(noted: Site) -> None:
    queue(noted)
    when = later(noted, hours=1)
    numbers = send(noted, *[message(t, scheduled_enqueue_time_utc=when) for t in "ab"])
    noted.ask(CancelScheduled(QUEUE, numbers[:1]))
    found = closed(noted)
    assert found.by("cancelled") == places(noted, numbers[:1])
    assert found.standing == places(noted, numbers[1:])


def test_a_scheduled_message_was_accepted_when_it_came(noted: Site) -> None:
    queue(noted)
    send(noted, message("a", scheduled_enqueue_time_utc=later(noted, days=2)))
    now = noted.clock.now()
    noted.embedded.close()
    [row] = [row for row in rows_of(noted, MESSAGES) if row["event"] == ledger.ACCEPTED]
    assert row["at"] == now


def test_a_message_scheduled_far_ahead_removes_nothing(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(retention=timedelta(days=7)))
    queue(site)
    send(site, "a", "b", "c")
    roll(site)
    before = closed(site).accepted
    assert len(before) == 3
    site.open()
    send(site, message("a", scheduled_enqueue_time_utc=later(site, days=30)))
    assert before.items() <= closed(site).accepted.items()


def test_a_message_activated_long_after_it_was_due_is_told(noted: Site) -> None:
    queue(noted)
    send(noted, message("a", scheduled_enqueue_time_utc=later(noted, hours=1)))
    noted.embedded.close()
    noted.clock.advance(timedelta(days=3))
    noted.open()
    noted.wait(seconds=1)
    assert bodies(peek(noted)) == ["a"]
    found = closed(noted)
    assert found.by("activated") == places(noted, [1])
    assert found.standing == places(noted, [2])


def test_forwarding_is_told_from_queue_to_queue(noted: Site) -> None:
    queue(noted, "target", max_size_in_megabytes=1)
    queue(noted, forward_to="target")
    send(noted, message("a", message_id="A"))
    there = number_of(noted, "target")
    found = closed(noted)
    assert found.accepted == {(there, 1): "A"}
    assert found.standing == {(there, 1)}


def test_a_parked_message_is_forwarded_when_there_is_room(noted: Site) -> None:
    queue(noted, "target", max_size_in_megabytes=1)
    queue(noted, forward_to="target")
    send(noted, *["x" * 200_000] * 5, path="target")
    sent = [message("y" * 200_000, message_id=f"{n}") for n in range(3)]
    for one in sent:
        send(noted, one)
    parked = {place for place in peeked(noted, QUEUE) if place[0] == number_of(noted)}
    take(noted, "target")
    noted.wait(minutes=5)
    found = closed(noted)
    here, there = number_of(noted), number_of(noted, "target")
    assert parked
    assert found.by("forwarded") == parked
    arrived = [i for place, i in found.accepted.items() if place[0] == there and place[1] > 5]
    assert sorted(arrived) == ["0", "1", "2"]
    assert not [place for place in found.standing if place[0] == here]


def test_each_copy_of_a_topic_is_told_where_it_went(noted: Site) -> None:
    topic(noted)
    paths = [subscription(noted, name) for name in ("one", "two")]
    send(noted, message("a", message_id="A"), message("b", message_id="B"), path=TOPIC)
    complete(noted, receive_one(noted, paths[0]), path=paths[0])
    one, two = (number_of(noted, path) for path in paths)
    found = closed(noted)
    assert found.accepted == {(one, 1): "A", (one, 2): "B", (two, 1): "A", (two, 2): "B"}
    assert found.ended == {(one, 1): "completed"}
    assert found.paths == {one: {paths[0]}, two: {paths[1]}}


def test_what_is_deleted_with_its_queue_is_told(noted: Site) -> None:
    queue(noted)
    send(noted, "a", "b", "c")
    complete(noted, receive_one(noted))
    dead_letter(noted)
    here, there = number_of(noted), number_of(noted, DEAD)
    noted.ask(DeleteEntity(QUEUE))
    queue(noted)
    send(noted, "new")
    found = closed(noted)
    assert found.by("deleted") == {(here, 3), (there, 1)}
    assert found.standing == {(number_of(noted), 1)}
    assert number_of(noted) not in (here, there)
    assert found.paths[here] == {QUEUE}


def test_what_is_deleted_with_its_topic_is_told(noted: Site) -> None:
    topic(noted)
    path = subscription(noted, "one")
    send(noted, "a", path=TOPIC)
    one = number_of(noted, path)
    noted.ask(DeleteEntity(TOPIC))
    found = closed(noted)
    assert found.by("deleted") == {(one, 1)}
    assert found.paths[one] == {path}


def test_a_queue_deleted_for_being_idle_is_told(noted: Site) -> None:
    queue(noted, auto_delete_on_idle=timedelta(minutes=10))
    send(noted, "a")
    here = number_of(noted)
    noted.wait(minutes=11)
    assert closed(noted).by("deleted") == {(here, 1)}


def test_the_trail_of_a_deleted_queue_has_its_path_after_a_crash(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    here = number_of(noted)
    noted.ask(DeleteEntity(QUEUE))
    noted.crash()
    found = closed(noted)
    assert found.by("deleted") == {(here, 1)}
    assert found.paths[here] == {QUEUE}


def test_ranges_are_told(noted: Site) -> None:
    queue(noted)
    numbers = send(noted, *"abcdef")
    lease = noted.ask(LeaseRange(QUEUE, "syphon", 5))
    noted.ask(SettleRange(QUEUE, lease.epoch, [(numbers[0], numbers[2])]))
    found = closed(noted)
    assert found.by("completed") == places(noted, numbers[:3])
    assert found.standing == places(noted, numbers[3:])


def test_inventories_at_the_beginning_and_the_end_say_what_peek_shows(noted: Site) -> None:
    queue(noted)
    send(noted, *"abcdefghij")
    send(noted, message("k", scheduled_enqueue_time_utc=later(noted, hours=1)))
    one, two, three, four, *_ = receive(noted, count=6)
    complete(noted, one)
    abandon(noted, two)
    settle(noted, Disposition.DEFER, three)
    settle(noted, Disposition.DEAD_LETTER, four)
    shown = set(peeked(noted))
    assert len(shown) == 10
    noted.embedded.close()
    assert told(noted).inventories == [set(), shown]
    noted.open()
    noted.embedded.close()
    assert told(noted).inventories == [set(), shown, shown, shown]


def test_an_inventory_is_taken_every_hour(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    for _ in range(181):
        noted.wait(minutes=1)
    assert len(told(noted).inventories) == 4


def test_abandoning_and_deferring_alone_do_not_trouble_the_ledger(
    noted: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(noted)
    send(noted, "a", "b")
    roll(noted)
    one, two = receive(noted)
    abandon(noted, one)
    settle(noted, Disposition.DEFER, two)
    roll(noted)
    assert is_well(noted)
    assert caplog.records == []


def heal(site: Site) -> None:
    """Let the broker find a mistake in itself and start again from the log."""

    def fail(*_: object) -> None:
        raise RuntimeError("a mistake in the broker")

    site.wait(hours=1)  # a restart for the same cause within minutes would wait
    site.engine.namespace.serve = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(CommandFailedError):
        peek(site)


def test_the_trail_goes_on_after_the_broker_healed_itself(noted: Site) -> None:
    queue(noted)
    send(noted, "a", "b")
    roll(noted)
    complete(noted, receive_one(noted))
    send(noted, "c")
    heal(noted)
    send(noted, "d")
    dead_letter(noted)
    shown = peeked(noted)
    found = closed(noted)
    assert found.by("completed") == places(noted, [1])
    assert found.by("dead_lettered") == places(noted, [2])
    assert found.standing == set(shown)
    assert found.gaps == []


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_storage_trouble_leaves_a_complete_trail(noted: Site, trouble: str) -> None:
    queue(noted)
    send(noted, "a", "b")
    held = receive(noted)
    setattr(noted.disk, trouble, True)
    send(noted, message("c", message_id="C"))
    with suppress(StoreUnavailableError):  # a full disk has a reserve for it, a dead one has none
        complete(noted, held[0])
    with pytest.raises(StoreUnavailableError):
        send(noted, message("d", scheduled_enqueue_time_utc=later(noted, hours=1)))
    setattr(noted.disk, trouble, False)
    noted.wait(seconds=5)
    shown = peeked(noted)
    found = closed(noted)
    assert found.by("completed") == places(noted, [1])
    assert {place: found.accepted[place] for place in found.standing} == shown
    assert "C" in shown.values()


def test_a_crash_does_not_change_when_a_message_was_completed(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    noted.wait(seconds=10)
    complete(noted, receive_one(noted))
    when = noted.clock.now()
    noted.clock._now_us += 3 * 86_400_000_000  # nobody is there to see it pass
    noted.crash()
    noted.embedded.close()
    [row] = [row for row in rows_of(noted, MESSAGES) if row["event"] == "completed"]
    assert row["at"] == when


def test_records_lost_by_damage_leave_a_gap(noted: Site) -> None:
    queue(noted)
    roll(noted)
    for number in range(4):
        send(noted, f"m{number}" + PADDING)
    noted.crash()  # before they are told
    noted.embedded._writer._stop_listening()
    site_log = noted.last_segment
    for log in (noted.engine.log, noted.engine.spill._log):
        log.close()
    damaged = bytearray(site_log.read_bytes())
    damaged[damaged.index(b"m1xxx")] ^= 0xFF
    site_log.write_bytes(damaged)
    noted.open(accept_damage=True)
    found = closed(noted)
    assert len(found.accepted) == 3
    assert found.gaps


# -- a model -----------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *["send", "complete"] * 2,
                "dead",
                "take dead",
                "defer",
                "abandon",
                "schedule",
                "short",
                "wait",
                "roll",
                "reopen",
                "crash",
                "heal",
            ]
        ),
        st.integers(1, 4),
    ),
    max_size=30,
)


def step(site: Site, what: str, count: int, body: str) -> None:  # noqa: C901, PLR0912 - one line per step
    if what == "send":
        send(site, *[body] * count)
    elif what == "schedule":
        send(site, message("s", scheduled_enqueue_time_utc=later(site, seconds=count * 20)))
    elif what == "short":
        send(site, message("t", time_to_live=timedelta(seconds=count * 10)))
    elif what == "complete":
        complete(site, *receive(site, count=count))
    elif what == "dead":
        dead_letter(site, count)
    elif what == "take dead":
        complete(site, *receive(site, DEAD, count), path=DEAD)
    elif what == "defer":
        settle(site, Disposition.DEFER, *receive(site, count=count))
    elif what == "abandon":
        abandon(site, *receive(site, count=count))
    elif what == "wait":
        site.wait(seconds=count * 7)
    elif what == "roll":
        send(site, "so that there is something to tell")
        roll(site)
    elif what == "reopen":
        site.reopen()
    elif what == "crash":
        site.crash()
    elif what == "heal":
        heal(site)


# With 1500 examples of large messages, for which there is compaction, it finds what fails in
# test_a_crash_after_compaction_of_what_was_dead_lettered_leaves_a_complete_trail, and nothing else.
@pytest.mark.parametrize("body", ["small", "large" * 80])
@replayed
@given(steps=STEPS)
def test_what_was_accepted_and_has_not_ended_stands(
    body: str, steps: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "namespace", ledger=LEDGER, segment_bytes=4000)
        queue(site, enable_dead_lettering_on_message_expiration=True, max_delivery_count=3)
        for what, count in steps:
            step(site, what, count, body)
        shown = peeked(site)
        found = closed(site)
        assert {place: found.accepted[place] for place in found.standing} == shown
        assert set(found.ended) <= set(found.accepted)
        assert found.inventories[-1] == set(shown)
        assert found.gaps == []


# -- a real kill -------------------------------------------------------------------------------

WORKER = textwrap.dedent("""
    import sys
    from datetime import timedelta
    from pathlib import Path

    from twinbus.protocol.commands import CreateEntity, Disposition, Receive, Send, Settle
    from twinbus.broker.turn.engine import EngineSettings
    from twinbus.entities import QueueDescription
    from twinbus.ledger import LedgerSettings
    from twinbus.message import BrokeredMessage
    from twinbus.namespace.embedded import EmbeddedNamespace

    ledger = LedgerSettings(roll_interval=timedelta(seconds=int(sys.argv[2])))
    namespace = EmbeddedNamespace(EngineSettings(directory=Path(sys.argv[1]), ledger=ledger))
    namespace.ask(CreateEntity(QueueDescription(path="orders")))
    for turn in range(10**9):
        ids = [f"{turn}-{row}" for row in range(3)]
        print("sending", *ids, flush=True)
        batch = [BrokeredMessage(body=b"a", message_id=one) for one in ids]
        print("sent", *namespace.ask(Send("orders", batch)).sequence_numbers, flush=True)
        got = namespace.ask(Receive("orders", 2))
        numbers = got.column("sequence_number").to_pylist()
        print("completing", *numbers, flush=True)
        namespace.ask(Settle("orders", got.column("lock_token"), Disposition.COMPLETE))
        print("completed", *numbers, flush=True)
""")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("roll_s", "least_s"), [(60, 0), (1, 2.5)], ids=["untold", "half told"])
def test_after_a_real_kill_the_trail_tells_every_acknowledged_message(
    tmp_path: Path, roll_s: int, least_s: float
) -> None:
    directory = tmp_path / "namespace"
    lines: list[list[str]] = []
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, str(directory), str(roll_s)],
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            lines.append(line.split())
            if len(lines) >= 1500 and time.monotonic() > began + least_s:
                os.kill(worker.pid, signal.SIGKILL)
    assert any(directory.glob("ledger/messages/day=*/[!.]*")) == (roll_s == 1)
    site = Site.__new__(Site)
    site.directory, site.settings = directory, {"ledger": LEDGER}
    site.clock = ManualClock(datetime.now(UTC))
    site.open()
    shown = {place: i for place, i in all_peeked(site).items() if place[0] == number_of(site)}
    found = closed(site)
    sending = [one for what, *ids in lines if what == "sending" for one in ids]
    sent = [int(one) for what, *numbers in lines if what == "sent" for one in numbers]
    completing = [int(one) for what, *numbers in lines if what == "completing" for one in numbers]
    done = [[int(one) for one in numbers] for what, *numbers in lines if what == "completed"]
    surely = {one for numbers in done[:-1] for one in numbers}  # the last may miss its sync
    assert len(sent) > 500
    assert places(site, sent) <= set(found.accepted)
    assert [found.accepted[number_of(site), n] for n in sent] == sending[: len(sent)]
    assert set(found.accepted.values()) <= set(sending)
    assert len(set(found.accepted.values())) == len(found.accepted)
    assert places(site, surely) <= found.by("completed") <= places(site, completing)
    assert {place: found.accepted[place] for place in found.standing} == shown
    assert found.gaps == []


def all_peeked(site: Site) -> dict[Place, str]:
    """Return what peek shows, page by page."""
    found: dict[Place, str] = {}
    while page := peek(site, QUEUE, max((n for _, n in found), default=0) + 1):
        found |= {
            (number_of(site), m.sequence_number or 0): m.message_id or "" for m in page[:MANY]
        }
    return found


def test_a_kill_between_the_file_and_its_mark_tells_nothing_else(
    noted: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(noted)
    send(noted, "a", "b")
    complete(noted, receive_one(noted))

    def fail(_: int) -> None:
        raise OSError(5, "killed here")

    monkeypatch.setattr(noted.engine._ledgers._messages, "put_mark", fail)
    roll(noted)
    before = told(noted)
    noted.crash()
    after = closed(noted)
    assert before.standing == places(noted, [2])
    assert (after.accepted, after.ended) == (before.accepted, before.ended)


def test_a_crash_loses_of_the_counts_only_what_was_not_written(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    roll(noted)
    send(noted, "b")
    noted.crash()
    send(noted, "c")
    assert counts(noted, path=QUEUE) == {("Send", "application", "ok"): 2}


# -- files -------------------------------------------------------------------------------------


def test_a_reader_meets_whole_files_only_while_the_broker_rolls(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(roll_interval=timedelta(seconds=1)))
    queue(site)
    stop = threading.Event()
    troubles: list[Exception] = []
    seen: set[Path] = set()

    def read_all() -> None:
        while not stop.is_set():
            for path in site.directory.glob("ledger/*/day=*/*.parquet"):
                if path.name.startswith("."):  # as Spark, DuckDB and pyarrow do
                    continue
                try:
                    assert pq.ParquetFile(path).read().num_rows
                except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                    troubles.append(error)
                seen.add(path)

    reader = threading.Thread(target=read_all)
    reader.start()
    for _ in range(60):
        send(site, *["a"] * 50)
        complete(site, *receive(site))
        site.wait(seconds=1)
    stop.set()
    reader.join()
    assert troubles == []
    assert len(seen) > 50


def test_a_real_writer_thread_tells_everything(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": LedgerSettings(roll_interval=timedelta(seconds=1))}
    site = Site.__new__(Site)
    site.directory, site.settings, site.clock = tmp_path / "namespace", settings, ManualClock()
    Site.open(site)
    site.embedded.close()
    site.namespace = site.embedded = EmbeddedNamespace(
        site.embedded._writer.engine.settings, site.clock
    )
    queue(site)
    for _ in range(20):
        send(site, "a", "b")
        complete(site, receive_one(site))
        site.wait(seconds=1)
    shown = peeked(site)
    site.embedded.close()
    found = told(site)
    assert found.standing == set(shown)
    assert len(found.by("completed")) == 20
    assert added_up(rows_of(site, OPERATIONS)) == metered(site)


def test_all_files_of_the_ledgers_are_their_owners_only(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    noted.embedded.close()
    found = [path for path in (noted.directory / "ledger").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert len(found) == 3  # operations, messages and the mark
    assert [path.name for path in found if path.name.startswith(".")] == [".covered"]


def test_old_days_go_whole_and_the_others_stay(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(retention=timedelta(days=2)))
    queue(site)
    for _ in range(6):
        send(site, "a")
        send(site, "b")
        site.wait(minutes=1)
        site.wait(days=1)
    for kind in (OPERATIONS, MESSAGES):
        kept = sorted({date.fromisoformat(path.parent.name[4:]) for path in files(site, kind)})
        assert kept[-1] >= date(2030, 1, 6)
        assert kept == [kept[-1] - timedelta(days=ago) for ago in (2, 1, 0)]


def ledger_bytes(site: Site) -> int:
    return sum(path.stat().st_size for path in files(site, OPERATIONS) + files(site, MESSAGES))


def fill(site: Site, rolls: int) -> None:
    """Send and receive messages with long ids, and write a file after each batch."""
    for _ in range(rolls):
        send(site, *(message("a", message_id=os.urandom(60).hex()) for _ in range(100)))
        take(site)
        roll(site)


def test_the_oldest_files_are_deleted_when_the_ledgers_exceed_their_bound(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(ledger=LedgerSettings(max_bytes=200_000))
    queue(site)
    send(site, "stays")
    assert receive(site)  # locked: it stands when its row is gone
    fill(site, 30)
    assert 100_000 < ledger_bytes(site) <= 200_000
    lines = [line.facts for line in caplog.records if hasattr(line, "facts")]
    assert {line["event"] for line in lines} == {"ledger_deleted"}
    assert 0 < len(lines) < 30
    assert sum(line["files"] for line in lines) > 0
    assert "Reports will not cover that time" in caplog.text
    kept = files(site, OPERATIONS) + files(site, MESSAGES)
    until = datetime.fromisoformat(lines[-1]["until"])
    assert min(path.name for path in kept) >= f"{until:%Y%m%dT%H%M%S}"
    found = closed(site)
    assert found.gaps == [max(found.gaps)]
    told_records = [row["record"] for row in rows_of(site, MESSAGES) if row["event"] == "accepted"]
    assert min(told_records) > max(found.gaps)


def test_files_within_the_bound_stay(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(ledger=LedgerSettings(max_bytes=2_000_000))
    queue(site)
    fill(site, 10)
    assert len(files(site, MESSAGES)) >= 10
    assert caplog.records == []


def test_a_day_that_retention_deletes_leaves_a_gap_in_the_trail(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(retention=timedelta(days=2)))
    queue(site)
    for _ in range(5):
        send(site, "a")
        take(site)
        roll(site)
        site.wait(days=1)
    found = closed(site)
    assert found.gaps
    first = min(row["record"] for row in rows_of(site, MESSAGES) if row["event"] == "accepted")
    assert max(found.gaps) < first


def test_a_ledger_that_cannot_be_written_is_logged_once_and_when_it_is_mended(
    blocked: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(blocked)
    for _ in range(5):
        work(blocked)
        roll(blocked)
    unblock(blocked)
    roll(blocked)
    lines = [getattr(line, "facts", {}).get("event") for line in caplog.records]
    assert [line for line in lines if line] == ["ledger_trouble", "ledger_trouble_ended"]


def test_an_idle_broker_writes_next_to_nothing(noted: Site) -> None:
    queue(noted)
    roll(noted)
    before = len(files(noted, OPERATIONS) + files(noted, MESSAGES))
    for _ in range(59):
        roll(noted)
    assert len(files(noted, OPERATIONS) + files(noted, MESSAGES)) <= before + 1


# -- a folder that cannot be written -----------------------------------------------------------


@pytest.fixture
def blocked(make_site: MakeSite, tmp_path: Path) -> Site:
    """Return a site with a file in place of its ledger folder."""
    (tmp_path / "namespace-0").mkdir()
    (tmp_path / "namespace-0" / "ledger").write_text("in the way")
    return make_site(ledger=LEDGER)


def unblock(site: Site) -> None:
    (site.directory / "ledger").unlink()


def test_a_ledger_that_cannot_be_written_never_disturbs_the_broker(
    blocked: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(blocked)
    for _ in range(3):
        work(blocked)
        roll(blocked)
    assert "cannot be written and is tried again" in caplog.text
    assert blocked.engine.restarts == 0
    blocked.reopen()
    work(blocked)
    blocked.embedded.close()
    assert (blocked.directory / "ledger").read_text() == "in the way"


def test_what_was_held_is_written_when_the_folder_is_mended(blocked: Site) -> None:
    queue(blocked)
    for _ in range(3):
        work(blocked)
        roll(blocked)
    unblock(blocked)
    roll(blocked)
    work(blocked)
    shown = peeked(blocked)
    found = closed(blocked)
    assert found.standing == set(shown)
    assert len(found.accepted) == 12
    assert found.gaps == []
    assert is_well(blocked)
    assert added_up(rows_of(blocked, OPERATIONS)) == metered(blocked)


def test_a_trail_that_could_not_be_written_is_told_after_a_crash(blocked: Site) -> None:
    queue(blocked)
    work(blocked)
    roll(blocked)
    blocked.crash()
    unblock(blocked)
    found = closed(blocked)
    assert len(found.accepted) == 3
    assert len(found.ended) == 3


def test_a_folder_that_breaks_and_is_mended_counts_nothing_twice(noted: Site) -> None:
    queue(noted)
    work(noted)
    roll(noted)
    aside = noted.directory / "aside"
    (noted.directory / "ledger").rename(aside)
    (noted.directory / "ledger").write_text("in the way")
    for _ in range(3):
        work(noted)
        roll(noted)
    unblock(noted)
    aside.rename(noted.directory / "ledger")
    found = closed(noted)
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)
    assert len(found.ended) == len(found.accepted) == 12
    assert all(count == 1 for (event, _), count in found.tellings.items() if event != "standing")


def test_a_day_that_is_written_is_not_written_again_for_another_that_is_not(noted: Site) -> None:
    noted.wait(hours=23, minutes=59, seconds=30)
    queue(noted)
    send(noted, "a")
    in_the_way = noted.directory / "ledger/operations/day=2030-01-02"
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("in the way")
    noted.engine._ledgers._next_roll += 3_600_000_000  # so that one roll has both days
    noted.wait(seconds=40)
    send(noted, "b")
    send(noted, "c")
    noted.wait(hours=2)
    roll(noted)
    in_the_way.unlink()
    roll(noted)
    noted.embedded.close()
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def test_an_old_day_that_cannot_be_removed_makes_nothing_count_twice(noted: Site) -> None:
    queue(noted)
    roll(noted)
    (noted.directory / "ledger/operations/day=2020-01-01/somebody's").mkdir(parents=True)
    noted.wait(days=1)
    send(noted, "a")
    roll(noted)
    noted.embedded.close()
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def test_what_a_sick_ledger_let_the_log_forget_leaves_a_gap_after_a_crash(small: Site) -> None:
    send(small, "stays")
    roll(small)
    aside = small.directory / "aside"
    (small.directory / "ledger").rename(aside)
    (small.directory / "ledger").write_text("in the way")
    let_pass(small)
    unblock(small)
    aside.rename(small.directory / "ledger")
    small.crash()
    shown = set(peeked(small))
    found = closed(small)
    assert found.gaps
    assert found.inventories[-1] == shown


def test_what_memory_cannot_hold_is_given_up_with_a_gap(
    blocked: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.broker.accounts.ledgers.LEDGER_HELD_ROWS", 10)
    queue(blocked)
    for _ in range(6):
        send(blocked, *"abcd")
        roll(blocked)
    unblock(blocked)
    roll(blocked)
    found = closed(blocked)
    assert found.gaps
    assert 4 <= len(found.accepted) <= 12
    assert found.inventories[-1] == places(blocked, range(1, 25))
    assert added_up(rows_of(blocked, OPERATIONS)) == metered(blocked)


# -- compaction --------------------------------------------------------------------------------


def let_pass(site: Site, rounds: int = 15) -> None:
    """Send and complete so much that every older segment is given up."""
    last = max(site.engine.log.segments)
    for _ in range(rounds):
        send(site, *[PADDING] * 10, path=PASSING)
        complete(site, *receive(site, PASSING), path=PASSING)
        site.wait(milliseconds=1)
    assert min(site.engine.log.segments) > last


def test_the_log_of_a_busy_queue_stays_within_a_few_segments_with_a_ledger(small: Site) -> None:
    send(small, "stays")
    largest = 0
    for _ in range(100):
        send(small, *[PADDING] * 10, path=PASSING)
        complete(small, *receive(small, PASSING), path=PASSING)
        largest = max(largest, small.log_bytes)
    assert largest < 8 * SEGMENT_BYTES


def test_space_comes_back_with_a_ledger_that_cannot_be_written(
    make_site: MakeSite, tmp_path: Path
) -> None:
    (tmp_path / "namespace-0").mkdir()
    (tmp_path / "namespace-0" / "ledger").write_text("in the way")
    site = make_site(ledger=LEDGER, segment_bytes=SEGMENT_BYTES)
    queue(site, PASSING)
    for _ in range(60):
        send(site, *[PADDING] * 10, path=PASSING)
        complete(site, *receive(site, PASSING), path=PASSING)
    assert site.log_bytes < 10 * SEGMENT_BYTES


def test_space_comes_back_where_no_message_moves(small: Site) -> None:
    queue(small, "talks", requires_session=True)
    for _ in range(100):
        lock = accept(small, "s", "talks")
        small.ask(SetSessionState("talks", lock, b"x" * 5000))
        small.ask(ReleaseSession("talks", lock))
        small.wait(milliseconds=1)
    roll(small)
    assert small.log_bytes < 10 * SEGMENT_BYTES


@pytest.mark.parametrize("end", ["close", "crash"])
def test_the_trail_is_complete_after_compaction(small: Site, end: str) -> None:
    numbers = send(small, *"abcd")
    complete(small, receive_one(small))
    dead_letter(small)
    let_pass(small)
    if end == "crash":
        small.crash()
    let_pass(small)
    if end == "crash":
        small.crash()
    shown = peeked(small, QUEUE, DEAD, PASSING)
    found = closed(small)
    assert found.by("completed") >= places(small, numbers[:1])
    assert found.by("dead_lettered") == places(small, numbers[1:2])
    assert {place: found.accepted[place] for place in found.standing} == shown
    assert len(found.by("completed")) == 301
    assert found.gaps == []


def test_a_crash_after_compaction_of_what_was_dead_lettered_leaves_a_complete_trail(
    small: Site,
) -> None:
    numbers = send(small, *[PADDING] * 18)
    for _ in range(2):
        send(small, *[PADDING] * 5, path=PASSING)
    roll(small)
    dead_letter(small, MANY)
    complete(small, *receive(small, DEAD), path=DEAD)
    small.wait(milliseconds=1)
    assert min(small.engine.log.segments) > 1
    small.crash()
    found = closed(small)
    assert found.by("dead_lettered") == places(small, numbers)
    assert found.gaps == []


def test_a_crash_after_compaction_gives_no_message_the_id_of_another(small: Site) -> None:
    for number in range(18):
        send(small, message("x" * 500, message_id=f"mine {number}"))
    for number in range(55):
        send(small, message("y" * 100, message_id=f"other {number}"), path=PASSING)
    roll(small)
    there = number_of(small, DEAD)
    dead_letter(small, MANY)
    complete(small, *receive(small, DEAD), path=DEAD)
    small.wait(milliseconds=1)
    assert min(small.engine.log.segments) > 1
    small.crash()
    found = {place: i for place, i in closed(small).accepted.items() if place[0] == there}
    assert found == {(there, number + 1): f"mine {number}" for number in range(18)}


# -- switched off ------------------------------------------------------------------------------


def test_without_a_ledger_nothing_is_written(make_site: MakeSite) -> None:
    site = make_site(ledger=NO_LEDGER)
    queue(site)
    for _ in range(3):
        work(site)
        site.wait(hours=2)
    site.reopen()
    site.crash()
    site.embedded.close()
    assert not (site.directory / "ledger").exists()


def test_without_a_ledger_the_meter_counts_all_the_same(make_site: MakeSite) -> None:
    site = make_site(ledger=NO_LEDGER)
    queue(site)
    for _ in range(3):
        send(site, "a")
        site.wait(hours=2)
    [sent] = [row for row in site.ask(ReadMeter()).to_pylist() if row["operation"] == "Send"]
    assert sent["count"] == 3


def test_a_ledger_of_operations_alone_has_no_trail(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(messages=False))
    queue(site)
    work(site)
    site.embedded.close()
    assert added_up(rows_of(site, OPERATIONS)) == metered(site)
    assert not (site.directory / "ledger/messages").exists()


def test_what_the_log_still_knows_is_told_when_the_ledger_is_switched_on_again(
    noted: Site,
) -> None:
    queue(noted)
    send(noted, "a", "b")
    noted.reopen(ledger=NO_LEDGER)
    complete(noted, receive_one(noted))
    send(noted, "c")
    noted.reopen()
    found = closed(noted)
    assert found.by("completed") == places(noted, [1])
    assert found.standing == places(noted, [2, 3])
    assert found.gaps == []


def test_what_the_log_has_forgotten_meanwhile_leaves_a_gap(small: Site) -> None:
    send(small, "stays")
    small.reopen(ledger=NO_LEDGER)
    covered = small.engine._ledgers.covered
    let_pass(small)
    small.reopen()
    shown = set(peeked(small))
    found = closed(small)
    [forgotten] = found.gaps
    assert forgotten > covered
    assert found.inventories[-1] == shown


@pytest.mark.parametrize("mark", ["never written", "damaged"])
def test_a_trail_that_begins_in_the_middle_of_the_log_says_so(small: Site, mark: str) -> None:
    small.reopen(ledger=NO_LEDGER)
    let_pass(small)
    send(small, PADDING, path=PASSING)
    small.embedded.close()
    covered = small.directory / "ledger/messages/.covered"
    if mark == "damaged":
        covered.write_text("")
    else:
        for path in sorted((small.directory / "ledger").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    small.open()
    found = closed(small)
    assert found.gaps


def test_the_mark_of_another_log_hides_nothing(noted: Site) -> None:
    queue(noted)
    for _ in range(9):
        send(noted, "a")
    noted.embedded.close()
    other = Site(noted.directory.with_name("other"))
    queue(other)
    other.embedded.close()
    shutil.rmtree(noted.directory / "log")
    shutil.move(other.directory / "log", noted.directory / "log")
    noted.open()
    send(noted, message("b", message_id="B"))
    noted.crash()
    found = closed(noted)
    assert "B" in found.accepted.values()
    assert found.begun == 1
