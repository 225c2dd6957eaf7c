"""The spill store: where sends go while the log refuses writes or is slow for a while.

It is a small log of its own, best on another disk. A send in it is durable and acknowledged, but
not yet visible; it is moved into the main log, as a transfer from this spill, when that works.
The memory of transfers makes the move exactly-once even if a crash comes before the clearing.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from twinbus.broker.commands import Origin, Send
from twinbus.broker.commit import Commit, Fact
from twinbus.broker.log import Log, PartKind, Place
from twinbus.broker.storage import Storage
from twinbus.limits import SLOW_COMMIT_US, SLOW_COMMITS_TO_SPILL, SPILL_RETRY_US

_SPILL = "spill/"  # what the names of spill origins begin with


@dataclass(slots=True)
class StoreHealth:
    """Decides from commit times and failures whether sends should be spilled. Pure."""

    spilling: bool = False
    retry_at: int = 0
    slow: int = 0  # slow commits in a row

    def succeeded(self, duration: int, now: int) -> None:
        """Note a commit that worked, and how long it took."""
        self.slow = self.slow + 1 if duration >= SLOW_COMMIT_US else 0
        if self.slow >= SLOW_COMMITS_TO_SPILL and not self.spilling:
            self.refused(now)

    def refused(self, now: int) -> None:
        """Note a commit that failed."""
        self.spilling = True
        self.retry_at = now + SPILL_RETRY_US

    def recovered(self) -> None:
        """Note that everything spilled has been moved."""
        self.spilling = False
        self.slow = 0


class Spill:
    """Durable sends that are not visible yet, oldest first."""

    def __init__(self, directory: Path, storage: Storage | None) -> None:
        self._log = Log(directory, storage)
        self._source = f"{_SPILL}{os.urandom(16).hex()}"
        self._next = 1  # number of the next row it takes
        self._sources: set[str] = set()  # of what was moved
        self._waiting: list[tuple[Fact, Place]] = []
        self.paths: Counter[str] = Counter()  # of the entities whose sends wait here
        for record in self._log.replay():
            facts = next(part for part, _ in record.parts if part.kind is PartKind.FACTS)
            place = next(place for part, place in record.parts if part.kind is PartKind.MESSAGES)
            kind, key, value = (column[0].as_py() for column in facts.columns.columns)
            self._waiting.append((Fact(kind, key, value), place))
            self.paths[key] += 1

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, path: str, batch: pa.RecordBatch, origin: Origin | None) -> None:
        """Make a send durable here."""
        if origin is None:
            numbers = range(self._next, self._next + batch.num_rows)
            origin = Origin(self._source, numbers)
            self._next += batch.num_rows
        fact = Fact.of("spilled", path, _plain(origin))
        commit = Commit(1)
        commit.tentative.facts.append(fact)
        commit.add_batch(batch)
        places = self._log.append(commit.parts(0))
        self._waiting.append((fact, places[1]))
        self.paths[path] += 1

    def sends(self) -> Iterator[Send]:
        """Yield what waits, oldest first, as transfers."""
        for fact, place in self._waiting:
            yield Send(fact.key, self._log.read(place), _origin(fact))

    def moved(self, count: int) -> set[str]:
        """Note that the oldest are in the main log.

        When all are, the files go; returns the spills whose transfers need no remembering then.
        """
        for fact, _ in self._waiting[:count]:
            self._sources.add(_origin(fact).source)
            self.paths -= Counter([fact.key])
        del self._waiting[:count]
        if self._waiting:
            return set()
        for number in list(self._log.segments):
            self._log.drop(number)
        done = {source for source in self._sources if source.startswith(_SPILL)}
        self._sources.clear()
        return done

    def close(self) -> None:
        """Let go of the files."""
        self._log.close()


def _origin(fact: Fact) -> Origin:
    assert fact.value is not None
    origin: Origin | None = None
    for source, numbers in reversed(json.loads(fact.value)):
        origin = Origin(source, numbers, origin)
    assert origin is not None
    return origin


def _plain(origin: Origin | None) -> list[tuple[str, list[int]]]:
    """Return an origin and the others after it as JSON can hold them."""
    if origin is None:
        return []
    return [(origin.source, [int(n) for n in origin.numbers]), *_plain(origin.also)]
