"""The spill store: where sends go while the log refuses writes or is slow for a while.

It is a small log of its own, best on another disk. A send in it is durable and acknowledged, but
not yet visible; it is moved into the main log, as a transfer from this spill, when that works.
The memory of transfers makes the move exactly-once even if a crash comes before the clearing.
"""

import json
import os
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from twinbus.broker.store.commit import Commit, Fact
from twinbus.broker.store.log import Log, PartKind, Place, Record
from twinbus.broker.store.storage import Storage
from twinbus.limits import SECOND_US, SLOW_COMMIT_US, SLOW_COMMITS_TO_SPILL, SPILL_RETRY_US
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import OriginKind, origin_kind, spill_source


@dataclass(slots=True)
class StoreHealth:
    """Decides from commit times and failures whether sends should be spilled. Pure."""

    spilling: bool = False
    retry_at: int = 0
    slow: int = 0  # slow commits in a row
    since: int = 0  # when it began to spill
    is_refusing: bool = False  # the store refused a record, and has not taken an ordinary one since
    reason: str = ""  # why it began to spill

    def succeeded(self, duration: int, now: int, *, used_reserve: bool = False) -> None:
        """Note a commit that worked, and how long it took.

        A record in the reserved space does not prove that the store takes new messages.
        """
        if not used_reserve:
            self.is_refusing = False
        self.slow = self.slow + 1 if duration >= SLOW_COMMIT_US else 0
        if self.slow >= SLOW_COMMITS_TO_SPILL and not self.spilling:
            seconds = SLOW_COMMIT_US // SECOND_US
            self._begin(now, f"{self.slow} commits in a row took {seconds} s or longer")

    @property
    def is_well(self) -> bool:
        """Whether the last commits were quick, nothing waits to be moved, and nothing was refused.

        One more quick commit changes nothing about it then.
        """
        return not (self.spilling or self.slow or self.is_refusing)

    @property
    def is_slow(self) -> bool:
        """Whether the store takes records, but takes too long for them."""
        return self.spilling and self.slow >= SLOW_COMMITS_TO_SPILL

    def refused(self, now: int, reason: str = "") -> None:
        """Note a commit that failed, and why."""
        self.is_refusing = True
        self._begin(now, reason)
        self.reason = reason  # of this refusal: a start with spilled sends has none yet

    def _begin(self, now: int, reason: str) -> None:
        if not self.spilling:
            self.since, self.reason = now, reason
        self.spilling = True
        self.retry_at = now + SPILL_RETRY_US

    def shift(self, by: int) -> None:
        """Move its times: the wall clock was set by so much."""
        self.retry_at += by
        self.since += by

    def recovered(self) -> None:
        """Note that everything spilled has been moved."""
        self.spilling = self.is_refusing = False
        self.slow = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A send that waits: its path, origin and owner, its messages, and when it was spilled."""

    fact: Fact
    place: Place
    spilled_at: int


@dataclass(frozen=True, slots=True)
class SpilledSend:
    """A send that waits in the spill store."""

    position: int  # among those that wait
    send: Send  # as a transfer
    owner: str  # of its sender


class Spill:
    """Durable sends that are not visible yet, oldest first."""

    def __init__(self, directory: Path, storage: Storage | None, now: int = 0) -> None:
        self._opened_at = now
        self._log = Log(directory, storage)
        self._source = spill_source(os.urandom(16).hex())
        self._next = 1  # number of the next row it takes
        self._sources: set[str] = set()  # of what was moved
        self._waiting: list[_Waiting] = []
        self.paths: Counter[str] = Counter()  # of the entities whose sends wait here
        self.bytes: Counter[str] = Counter()  # that each of them has here, as quotas count
        try:
            for record in self._log.replay():
                self._read(record)
        except BaseException:
            self._log.close()
            raise

    def _read(self, record: Record) -> None:
        facts = next(part for part, _ in record.parts if part.kind is PartKind.FACTS)
        # An earlier version did not write the time.
        spilled_at = min(facts.time, self._opened_at) if facts.time else self._opened_at
        place = next(place for part, place in record.parts if part.kind is PartKind.MESSAGES)
        kind, key, value = (column[0].as_py() for column in facts.columns.columns)
        self._waiting.append(_Waiting(Fact(kind, key, value), place, spilled_at))
        self.paths[key] += 1
        self.bytes[key.lower()] += place.length

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def size_in_bytes(self) -> int:
        """How much waits here."""
        return self._log.size_in_bytes

    @property
    def oldest_at(self) -> int | None:
        """When the send was spilled that has waited longest; None: no send waits."""
        return self._waiting[0].spilled_at if self._waiting else None

    def shift(self, by: int) -> None:
        """Move the times of all sends that wait: the wall clock was set by so much."""
        self._waiting = [
            replace(spilled, spilled_at=spilled.spilled_at + by) for spilled in self._waiting
        ]

    def append(
        self, path: str, batch: pa.RecordBatch, origin: Origin | None, owner: str = "", now: int = 0
    ) -> None:
        """Make a send durable here; its sender belongs to the owner."""
        if origin is None:
            numbers = range(self._next, self._next + batch.num_rows)
            origin = Origin(self._source, numbers)
            self._next += batch.num_rows
        fact = Fact.of("spilled", path, [_plain(origin), owner])
        commit = Commit(1)
        commit.tentative.facts.append(fact)
        commit.add_batch(batch)
        places = self._log.append(commit.parts(now))
        self._waiting.append(_Waiting(fact, places[1], now))
        self.paths[path] += 1
        self.bytes[path.lower()] += places[1].length

    def sends(self, paused: Container[str] = ()) -> Iterator[SpilledSend]:
        """Yield what waits, oldest first, but for the paused entities."""
        for position, waiting in enumerate(self._waiting):
            path = waiting.fact.key
            if path.lower() not in paused:
                origin, owner = _origin(waiting.fact)
                yield SpilledSend(
                    position, Send(path, self._log.read(waiting.place), origin), owner
                )

    def moved(self, positions: Sequence[int]) -> set[str]:
        """Note that the sends at these positions, in rising order, are in the main log.

        When all are, the files go; returns the spills whose transfers need no remembering then.
        """
        for position in reversed(positions):
            waiting = self._waiting.pop(position)
            fact, place = waiting.fact, waiting.place
            self._sources.add(_origin(fact)[0].source)
            self.paths -= Counter([fact.key])
            self.bytes -= Counter({fact.key.lower(): place.length})
        if self._waiting:
            return set()
        for number in list(self._log.segments):
            self._log.drop(number)
        done = {s for s in self._sources if origin_kind(s) is OriginKind.SPILL}
        self._sources.clear()
        return done

    def close(self) -> None:
        """Let go of the files."""
        self._log.close()


def _origin(fact: Fact) -> tuple[Origin, str]:
    assert fact.value is not None
    origin: Origin | None = None
    sources, owner = json.loads(fact.value)
    for source, numbers in reversed(sources):
        origin = Origin(source, numbers, origin)
    assert origin is not None
    return origin, owner


def _plain(origin: Origin | None) -> list[tuple[str, list[int]]]:
    """Return an origin and the others after it as JSON can hold them."""
    if origin is None:
        return []
    return [(origin.source, [int(n) for n in origin.numbers]), *_plain(origin.also)]
