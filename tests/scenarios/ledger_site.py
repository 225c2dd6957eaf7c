"""What the tests of ledgers have in common: sites that keep them, and how to read them."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.contracts.words import (
    DEAD,
    QUEUE,
    abandon,
    complete,
    peek,
    queue,
    receive,
    send,
    settle,
    take,
)
from tests.inside import is_ledger_failing
from tests.scenarios.site import Site
from twinbus import ledger
from twinbus.errors import CommandFailedError, EntityNotFoundError, InvalidArgumentError
from twinbus.ledger import LedgerKind, LedgerSettings
from twinbus.protocol.commands import Disposition, Receive

LEDGER = LedgerSettings()
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
class Trail:
    """The content of all files of a trail."""

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


def read_trail(site: Site) -> Trail:
    """Read the trail; inventories come in the order of their files."""
    found = Trail()
    rows = rows_of(site, MESSAGES)
    for row in rows:
        found.note(row)
    for row in rows:
        if row["event"] == ledger.DELETED:
            for place in found.standing:
                if place[0] == row["number"]:
                    found.ended[place] = ledger.DELETED
    return found


def closed(site: Site) -> Trail:
    """Close, and read the trail."""
    site.embedded.close()
    return read_trail(site)


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
    return not is_ledger_failing(site.engine)


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


def heal(site: Site) -> None:
    """Let the broker find a mistake in itself and start again from the log."""

    def fail(*_: object) -> None:
        raise RuntimeError("a mistake in the broker")

    site.wait(hours=1)  # a restart for the same cause within minutes would wait
    site.engine.namespace.serve = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(CommandFailedError):
        peek(site)


def let_pass(site: Site, rounds: int = 15) -> None:
    """Send and complete so much that every older segment is given up."""
    last = max(site.engine.log.segments)
    for _ in range(rounds):
        send(site, *[PADDING] * 10, path=PASSING)
        complete(site, *receive(site, PASSING), path=PASSING)
        site.wait(milliseconds=1)
    assert min(site.engine.log.segments) > last
