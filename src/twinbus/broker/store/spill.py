"""The spill store: accepts sends while the log refuses writes or is slow.

It is a small separate log, best on another disk. A send in it is durable and acknowledged, but not
yet visible. When the main log works again, the send is moved there as a transfer whose origin is
the spill store. Because the broker remembers transfers, each send is moved once, even if a crash
comes before its removal from the spill store.
"""

import json
import os
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from twinbus.broker.store.commit import Commit, Fact
from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import PartKind, PartPosition, Record
from twinbus.broker.store.storage import Storage
from twinbus.limits import SECOND_US, SLOW_COMMIT_US, SLOW_COMMITS_TO_SPILL, SPILL_RETRY_US
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import OriginKind, origin_kind, spill_source


@dataclass(slots=True)
class StoreHealth:
    """Decides from commit times and failures whether sends are spilled; it reads no clock."""

    spilling: bool = False
    retry_at: int = 0
    slow: int = 0  # slow commits in a row
    since: int = 0  # when spilling began
    # Whether the store refused a record and has not accepted one since.
    is_refusing: bool = False
    reason: str = ""  # why spilling began

    def succeeded(self, duration: int, now: int, *, used_reserve: bool = False) -> None:
        """Record a successful commit and its duration.

        A record in the reserve does not prove that the store accepts new messages.
        """
        if not used_reserve:
            self.is_refusing = False
        self.slow = self.slow + 1 if duration >= SLOW_COMMIT_US else 0
        if self.slow >= SLOW_COMMITS_TO_SPILL and not self.spilling:
            seconds = SLOW_COMMIT_US // SECOND_US
            self._begin(now, f"{self.slow} commits in a row took {seconds} s or longer")

    @property
    def is_well(self) -> bool:
        """Whether nothing is spilled, the last commit was quick, and no record is refused.

        Then another quick commit changes nothing here.
        """
        return not (self.spilling or self.slow or self.is_refusing)

    @property
    def is_slow(self) -> bool:
        """Whether the store accepts records, but too slowly."""
        return self.spilling and self.slow >= SLOW_COMMITS_TO_SPILL

    def refused(self, now: int, reason: str = "") -> None:
        """Record a failed commit and its reason."""
        self.is_refusing = True
        self._begin(now, reason)
        self.reason = reason  # also if spilling began for another reason

    def _begin(self, now: int, reason: str) -> None:
        if not self.spilling:
            self.since, self.reason = now, reason
        self.spilling = True
        self.retry_at = now + SPILL_RETRY_US

    def shift(self, by: int) -> None:
        """Move the times, because the wall clock was set."""
        self.retry_at += by
        self.since += by

    def recovered(self) -> None:
        """Record that all spilled sends have been moved."""
        self.spilling = self.is_refusing = False
        self.slow = 0


@dataclass(frozen=True, slots=True)
class _WaitingSend:
    """A waiting send, as it is stored."""

    fact: Fact  # its path, origins and owner
    place: PartPosition  # of its messages in the spill store
    spilled_at: int


@dataclass(frozen=True, slots=True)
class SpilledSend:
    """A send that waits in the spill store."""

    position: int  # index among the waiting sends
    send: Send  # as a transfer
    owner: str  # the id of the key that sent it


class Spill:
    """Durable sends that are not visible yet, oldest first."""

    def __init__(self, directory: Path, storage: Storage | None, now: int = 0) -> None:
        self._opened_at = now
        self._log = Log(directory, storage)
        self._source = spill_source(os.urandom(16).hex())
        self._next = 1  # number of the next message without an origin
        self._sources: set[str] = set()  # origins of the sends that were moved
        self._waiting: list[_WaitingSend] = []
        self.paths: Counter[str] = Counter()  # by path: number of waiting sends
        self.bytes: Counter[str] = Counter()  # by lower-case path: size of waiting sends
        try:
            for record in self._log.replay():
                self._read(record)
        except BaseException:
            self._log.close()
            raise

    def _read(self, record: Record) -> None:
        facts = next(part for part, _ in record.parts if part.kind is PartKind.FACTS)
        # An earlier version did not record the time.
        spilled_at = min(facts.time, self._opened_at) if facts.time else self._opened_at
        place = next(place for part, place in record.parts if part.kind is PartKind.MESSAGES)
        kind, key, value = (column[0].as_py() for column in facts.columns.columns)
        self._waiting.append(_WaitingSend(Fact(kind, key, value), place, spilled_at))
        self.paths[key] += 1
        self.bytes[key.lower()] += place.length

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def size_in_bytes(self) -> int:
        """The size of the files in bytes."""
        return self._log.size_in_bytes

    @property
    def oldest_at(self) -> int | None:
        """When the oldest waiting send was spilled; None if there is none."""
        return self._waiting[0].spilled_at if self._waiting else None

    def shift(self, by: int) -> None:
        """Move the times of all waiting sends, because the wall clock was set."""
        self._waiting = [
            replace(spilled, spilled_at=spilled.spilled_at + by) for spilled in self._waiting
        ]

    def append(
        self, path: str, batch: pa.RecordBatch, origin: Origin | None, owner: str = "", now: int = 0
    ) -> None:
        """Store a send durably; `owner` is the id of the key that sent it."""
        if origin is None:
            numbers = range(self._next, self._next + batch.num_rows)
            origin = Origin(self._source, numbers)
            self._next += batch.num_rows
        fact = Fact.of("spilled", path, [_plain(origin), owner])
        commit = Commit(1)
        commit.tentative.facts.append(fact)
        commit.add_batch(batch)
        places = self._log.append(commit.parts(now))
        self._waiting.append(_WaitingSend(fact, places[1], now))
        self.paths[path] += 1
        self.bytes[path.lower()] += places[1].length

    def sends(self, paused: Container[str] = ()) -> Iterator[SpilledSend]:
        """Yield the waiting sends, oldest first, except those to paused (lower-case) paths."""
        for position, waiting in enumerate(self._waiting):
            path = waiting.fact.key
            if path.lower() not in paused:
                origin, owner = _origin(waiting.fact)
                yield SpilledSend(
                    position, Send(path, self._log.read(waiting.place), origin), owner
                )

    def moved(self, positions: Sequence[int]) -> set[str]:
        """Record that the sends at these positions, in ascending order, are in the main log.

        If no send waits any more, delete the files and return the origins of kind SPILL: their
        accepted numbers can be forgotten. Otherwise return an empty set.
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
        """Close the files."""
        self._log.close()

    def crash(self) -> None:
        """Close the files as the system does for a killed process."""
        self._log.crash()


def _origin(fact: Fact) -> tuple[Origin, str]:
    assert fact.value is not None
    origin: Origin | None = None
    sources, owner = json.loads(fact.value)
    for source, numbers in reversed(sources):
        origin = Origin(source, numbers, origin)
    assert origin is not None
    return origin, owner


def _plain(origin: Origin | None) -> list[tuple[str, list[int]]]:
    """Return an origin and its further origins in JSON form."""
    if origin is None:
        return []
    return [(origin.source, [int(n) for n in origin.numbers]), *_plain(origin.also)]
