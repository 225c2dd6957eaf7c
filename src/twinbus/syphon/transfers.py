"""What a syphon tells of the messages it moved: a line for each in the ledger of transfers.

A worker writes its lines before its batch is settled, so every message that left the backlog has
one. A message that was carried twice, because somebody was killed, has two that say the same.

Batches may be small and many, and files of a ledger should be neither. So lines first go to a
journal in the folder, which all workers share, and which survives them; when it is a minute old, or
large, whoever comes next makes a file of it.

    journal   8 bytes: when it was begun; then for each write its length and its xxh3 (8 bytes
              each), and an Arrow IPC stream. A torn end is cut off: its batch was not settled.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from twinbus.clock import Clock, SystemClock, to_us
from twinbus.intervals import Intervals
from twinbus.ledger import DEAD_LETTERED, JOURNAL, MOVED, SCHEMAS, Ledger, LedgerKind
from twinbus.limits import LEDGER_JOURNAL_BYTES, LEDGER_RETENTION, LEDGER_ROLL_INTERVAL
from twinbus.message import Int64s, sizes
from twinbus.pairing.backlog import Restored

if TYPE_CHECKING:
    from twinbus.syphon.carrier import Carried

_BEGUN = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQ")
_ROLL_US = to_us(LEDGER_ROLL_INTERVAL)
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
            pa.array(np.full(len(at), self._clock.wall_us()), _SCHEMA.field("moved").type),
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
        with self._journal(self._ledger) as journal:
            _append(journal, content.getvalue().to_pybytes(), self._clock.wall_us())
            self._tables = []
            self._roll(journal, self._ledger, at_once=False)

    def roll(self, *, at_once: bool = False) -> None:
        """Make a file of the journal if it is time for that."""
        if self._ledger is not None and (self._ledger.folder / JOURNAL).exists():
            with self._journal(self._ledger) as journal:
                self._roll(journal, self._ledger, at_once=at_once)

    @staticmethod
    @contextmanager
    def _journal(ledger: Ledger) -> Iterator[int]:
        """Have the journal alone."""
        ledger.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        journal = os.open(ledger.folder / JOURNAL, flags, 0o600)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX)
            yield journal
        finally:
            os.close(journal)

    def _roll(self, journal: int, ledger: Ledger, *, at_once: bool) -> None:
        content = os.pread(journal, os.fstat(journal).st_size, 0)
        if len(content) <= _BEGUN.size:
            return
        # Wall time, because processes share the journal; a clock that was set back makes it old.
        is_old = abs(self._clock.wall_us() - _BEGUN.unpack_from(content)[0]) >= _ROLL_US
        if at_once or is_old or len(content) >= LEDGER_JOURNAL_BYTES:
            tables = [pa.ipc.open_stream(entry).read_all() for entry, _ in _entries(content)]
            if tables:
                ledger.write(pa.concat_tables(tables), self._clock.wall_us())
            os.ftruncate(journal, 0)


def _append(journal: int, content: bytes, now: int) -> None:
    """Write an entry behind the last whole one, or leave everything as it was."""
    held = os.pread(journal, os.fstat(journal).st_size, 0)
    whole = max((end for _, end in _entries(held)), default=0)
    head = b"" if whole else _BEGUN.pack(now)
    entry = head + _ENTRY.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content
    try:
        os.ftruncate(journal, whole)
        written = 0
        while written < len(entry):
            written += os.pwrite(journal, entry[written:], whole + written)
    except OSError:
        os.ftruncate(journal, whole)
        raise


def _entries(content: bytes) -> Iterator[tuple[pa.Buffer, int]]:
    """Give the whole entries of a journal and where each ends; what is torn ends it."""
    at = _BEGUN.size
    while at + _ENTRY.size <= len(content):
        length, checksum = _ENTRY.unpack_from(content, at)
        begin, at = at + _ENTRY.size, at + _ENTRY.size + length
        if at > len(content) or xxhash.xxh3_64_intdigest(content[begin:at]) != checksum:
            return
        yield pa.py_buffer(content).slice(begin, length), at
