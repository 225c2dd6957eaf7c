"""What a syphon tells of the messages it moved: a line for each in the ledger of transfers.

A worker writes its lines before its batch is settled, so every message that left the backlog has
one. A message that was carried twice, because somebody was killed, has two that say the same.

Batches may be small and many, and files of a ledger should be neither. So lines first go to a
journal in the folder, which all workers share, and which survives them; when it is a minute old, or
large, whoever comes next makes a file of it.

    journal   8 bytes: when it was begun; then for each write its length (8 bytes) and an Arrow
              IPC stream. A torn end is left out: its batch was not settled.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa

from twinbus.broker.transfers import Intervals
from twinbus.clock import Clock, SystemClock, to_us
from twinbus.ledger import SCHEMAS, Ledger, LedgerKind
from twinbus.limits import LEDGER_JOURNAL_BYTES, LEDGER_RETENTION, LEDGER_ROLL_INTERVAL
from twinbus.message import Int64s, sizes
from twinbus.pairing.backlog import Restored

if TYPE_CHECKING:
    from twinbus.pipeline.carrier import Carried

_JOURNAL = ".journal"
_NUMBER = struct.Struct("<Q")
MOVED, DEAD_LETTERED = "moved", "dead_lettered"
_SCHEMA = SCHEMAS[LedgerKind.TRANSFERS]


@dataclass(frozen=True, slots=True)
class Passed:
    """Messages of a backlog queue that somebody tried to bring home."""

    numbers: Int64s
    accepted: pa.Array  # when the queue took each
    ids: pa.Array
    paths: pa.Array
    sizes: Int64s

    @classmethod
    def of(cls, batch: pa.RecordBatch, found: Restored) -> "Passed":
        """Return messages as the backlog queue delivered them."""
        numbers, accepted = batch.column("sequence_number"), batch.column("enqueued_time_utc")
        ids = batch.column("message_id")
        return cls(numbers.to_numpy(), accepted, ids, found.paths, sizes(found.batch))


class TransferLedger:
    """Gathers lines and writes them; used by one thread. Without a folder it does nothing."""

    def __init__(self, folder: Path | None, clock: Clock | None = None) -> None:
        self._ledger: Ledger | None = None
        if folder is not None:
            self._ledger = Ledger(folder, LedgerKind.TRANSFERS, LEDGER_RETENTION)
        self._clock = clock or SystemClock()
        self._tables: list[pa.Table] = []

    def note(self, carried: "Carried", passed: Passed) -> None:
        """Note those messages that are home or put aside by now."""
        if self._ledger is None:
            return
        reasons = dict(carried.poison)
        is_home = Intervals(sorted(carried.completed)).contains(passed.numbers)
        is_dead = np.isin(passed.numbers, list(reasons))
        at = np.flatnonzero(is_home | is_dead)
        if not len(at):
            return
        rows = pa.array(at)
        dead = is_dead[at]
        numbers = passed.numbers[at]
        columns = [
            pa.array(np.full(len(at), self._clock.now_us()), _SCHEMA.field("moved").type),
            passed.accepted.take(rows).cast(_SCHEMA.field("accepted").type),
            passed.ids.take(rows),
            passed.paths.take(rows),
            pa.repeat(pa.scalar(carried.queue, pa.string()), len(at)),
            pa.repeat(pa.scalar(carried.range.origin, pa.string()), len(at)),
            pa.array(numbers),
            pa.array(passed.sizes[at].astype(np.int64)),
            pa.array(np.where(dead, DEAD_LETTERED, MOVED), pa.string()),
            pa.array([reasons[n] if d else None for n, d in zip(numbers, dead, strict=True)])
            if dead.any()
            else pa.nulls(len(at), pa.string()),
        ]
        self._tables.append(pa.table(columns, schema=_SCHEMA))

    def write(self) -> None:
        """Put what was noted where no kill of this process can take it."""
        if self._ledger is None or not self._tables:
            return
        content = pa.BufferOutputStream()
        with pa.ipc.new_stream(content, _SCHEMA) as stream:
            for table in self._tables:
                stream.write_table(table)
        self._tables = []
        with self._journal(self._ledger) as journal:
            _append(journal, content.getvalue(), self._clock.now_us())
            self._roll(journal, self._ledger, at_once=False)

    def roll(self, *, at_once: bool = False) -> None:
        """Make a file of the journal if it is time for that."""
        if self._ledger is not None and (self._ledger.folder / _JOURNAL).exists():
            with self._journal(self._ledger) as journal:
                self._roll(journal, self._ledger, at_once=at_once)

    @staticmethod
    @contextmanager
    def _journal(ledger: Ledger) -> Iterator[BinaryIO]:
        """Have the journal alone."""
        ledger.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(ledger.folder / _JOURNAL, flags, 0o600), "r+b", 0) as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            yield journal

    def _roll(self, journal: BinaryIO, ledger: Ledger, *, at_once: bool) -> None:
        journal.seek(0)
        head, size = journal.read(_NUMBER.size), os.fstat(journal.fileno()).st_size
        if size <= _NUMBER.size:
            return
        is_old = self._clock.now_us() - _NUMBER.unpack(head)[0] >= to_us(LEDGER_ROLL_INTERVAL)
        if at_once or is_old or size >= LEDGER_JOURNAL_BYTES:
            tables = list(_entries(journal.read(size)))
            if tables:
                ledger.write(pa.concat_tables(tables), self._clock.now_us())
            journal.truncate(0)


def _append(journal: BinaryIO, content: pa.Buffer, now: int) -> None:
    if not journal.seek(0, os.SEEK_END):
        journal.write(_NUMBER.pack(now))
    journal.write(_NUMBER.pack(content.size) + content.to_pybytes())


def _entries(content: bytes) -> Iterator[pa.Table]:
    """Give what was written to a journal after its head, up to a torn end."""
    at = 0
    while at + _NUMBER.size <= len(content):
        (length,) = _NUMBER.unpack_from(content, at)
        at += _NUMBER.size
        if at + length > len(content):
            return
        yield pa.ipc.open_stream(pa.py_buffer(content).slice(at, length)).read_all()
        at += length
