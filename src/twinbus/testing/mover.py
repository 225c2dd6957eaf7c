"""A small syphon for tests: brings diverted messages home, one range of a backlog queue at a time.

    lease a range -> read it -> send each message to its entity -> settle what is there

Killed anywhere in between it loses and doubles nothing: what was read is still leased, and the
primary recognises what it took before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import pyarrow as pa

from twinbus.broker.commands import (
    DeadLetterPart,
    LeaseRange,
    Origin,
    Peek,
    RangeLease,
    ReadRange,
    ReleaseRange,
    Send,
    SettleRange,
)
from twinbus.broker.transfers import runs
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessagingError,
    RangeUnavailableError,
)
from twinbus.message import Int64s
from twinbus.namespace.contract import Namespace
from twinbus.pairing.backlog import Restored, restored

_MOST = 1000  # messages of one range


@dataclass(frozen=True, slots=True)
class _Run:
    """Messages of one entity that can go in one send."""

    rows: list[int]
    origin: Origin

    def one_by_one(self) -> "Iterator[_Run]":
        """Give each message as a run of its own."""
        for at, row in enumerate(self.rows):
            origin, also = self.origin, self.origin.also
            tried = Origin(also.source, also.numbers[at : at + 1]) if also else None
            yield _Run([row], Origin(origin.source, origin.numbers[at : at + 1], tried))


@dataclass(slots=True)
class Mover:
    """Moves what it finds; call `move` as often as you like."""

    primary: Namespace
    secondary: Namespace
    owner: str = "mover"
    moved: int = field(default=0, init=False)
    dead_lettered: int = field(default=0, init=False)

    def move(self, queue: str) -> int:
        """Bring a range of a backlog queue home; return how many messages left the queue.

        A destination that fails keeps its messages in the backlog and holds up no other.
        """
        try:
            lease: RangeLease | None = self.secondary.ask(LeaseRange(queue, self.owner, _MOST))
        except RangeUnavailableError:
            return 0
        if lease is None:
            return 0
        if not self._is_first(queue, lease):
            self.secondary.ask(ReleaseRange(queue, lease.epoch))
            return 0
        gone = 0
        first = lease.first
        while first <= lease.last:
            batch = self.secondary.ask(ReadRange(queue, lease.epoch, first, lease.last))
            if not batch.num_rows:
                break
            gone += self._move_batch(queue, lease, batch)
            first = int(batch.column("sequence_number")[-1].as_py()) + 1
        self.secondary.ask(ReleaseRange(queue, lease.epoch))
        return gone

    def _is_first(self, queue: str, lease: RangeLease) -> bool:
        """Whether nothing lies before the range: what another holds is to go home first."""
        before = self.secondary.ask(Peek(queue))
        first = before.column("sequence_number").to_pylist()
        return not first or first[0] >= lease.first

    def _move_batch(self, queue: str, lease: RangeLease, batch: pa.RecordBatch) -> int:
        numbers: Int64s = batch.column("sequence_number").to_numpy()
        found = restored(batch)
        faults = dict(found.faults)
        home: list[int] = []
        for path, rows in _by_path(found).items():
            for run in _runs_of(found, rows, queue, numbers):
                try:
                    home += self._send_home(path, found, run, faults)
                except MessagingError:
                    break  # in order or not at all: the rest waits, too
        poison = [
            DeadLetterPart([int(numbers[row])], "cannot be brought home", why)
            for row, why in sorted(faults.items())
        ]
        completed = runs(np.sort(numbers[np.array(home, np.int64)]))
        self.secondary.ask(SettleRange(queue, lease.epoch, completed, poison))
        self.moved += len(home)
        self.dead_lettered += len(poison)
        return len(home) + len(poison)

    def _send_home(
        self, path: str, found: Restored, run: "_Run", faults: dict[int, str]
    ) -> list[int]:
        """Send a run; where its entity refuses it for good, find out which messages it means."""
        try:
            self.primary.ask(Send(path, found.batch.take(pa.array(run.rows)), run.origin))
        except (EntityNotFoundError, InvalidArgumentError) as error:
            if len(run.rows) > 1:
                return [
                    row
                    for one in run.one_by_one()
                    for row in self._send_home(path, found, one, faults)
                ]
            faults[run.rows[0]] = f"{path} refused it: {error.text}"
            return []
        return run.rows


def _by_path(found: Restored) -> dict[str, list[int]]:
    """Return the rows of each entity, in order."""
    rows: dict[str, list[int]] = {}
    names: dict[str, str] = {}  # paths are the same in any case
    for row, path in enumerate(found.paths.to_pylist()):
        if row not in found.faults:
            rows.setdefault(names.setdefault(path.lower(), path), []).append(row)
    return rows


def _runs_of(found: Restored, rows: list[int], queue: str, numbers: Int64s) -> Iterator[_Run]:
    """Give the rows of an entity in order, in runs of one origin."""
    senders, sent = found.senders.to_pylist(), found.numbers.to_pylist()
    for sender, group in groupby(rows, key=lambda row: senders[row]):
        held = list(group)
        tried = Origin(sender, [sent[row] for row in held]) if sender is not None else None
        yield _Run(held, Origin(queue, [int(numbers[row]) for row in held], tried))
