"""The ledger of transfers: a syphon writes a row for each message that it moved.

A worker writes its rows before its batch is settled, so every message that left the backlog has
one. A message that was carried twice because of a kill has two equal rows.

There may be many small batches, but there should not be many small ledger files. So rows are first
written to a journal, which survives its process. Each process has its own journal and only appends
to it, without reading or locking. When a journal is a minute old, or large, it is turned into a
ledger file, by its own or any other process that shares the folder. That process first renames the
journal and then reads it. After each append, a process checks whether its journal still has its
name. If not, its rows may have been appended too late for the other process, and are written again
into a new journal.

    journal   8 bytes: time of its beginning; then per write its length and its xxh3 (8 bytes
              each), and an Arrow IPC stream. An incomplete end is ignored: its batch was
              not settled.

If workers cannot reach the file system of the ledger, the rows are sent to the driver with the
other reports of a task (`take`, `add`).
"""

import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
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
_TAKEN = f".taken{JOURNAL}"  # suffix of a journal that is being turned into a file
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


@dataclass(frozen=True, slots=True)
class Passed:
    """Messages of a backlog queue that a carrier tried to bring home."""

    numbers: Int64s
    accepted: pa.Array  # when the queue accepted each message
    ids: pa.Array
    paths: pa.Array
    sizes: Int64s

    @classmethod
    def of(cls, batch: pa.RecordBatch, found: Restored) -> "Passed":
        """Return messages in the form in which the backlog queue delivered them."""
        numbers, accepted = batch.column("sequence_number"), batch.column("enqueued_time_utc")
        ids = batch.column("message_id")
        return cls(numbers.to_numpy(), accepted, ids, found.paths, sizes(found.batch))


class TransferLedger:
    """Collects rows and writes them; used by one thread. Without a folder it does nothing.

    With `by_commit`, it keeps the rows until they are sent to the driver.
    """

    def __init__(
        self, folder: Path | None, clock: Clock | None = None, *, by_commit: bool = False
    ) -> None:
        self._ledger: Ledger | None = None
        if folder is not None:
            self._ledger = Ledger(folder, LedgerKind.TRANSFERS, LEDGER_RETENTION)
        self._is_on = folder is not None or by_commit
        self._clock = clock or SystemClock()
        self._tables: list[pa.Table] = []
        self._journal: _Journal | None = None

    def note(self, carried: "Carried", passed: Passed) -> None:
        """Add rows for the messages that are home or dead-lettered by now."""
        if not self._is_on:
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

    def take(self) -> bytes:
        """Return and remove the rows that are not written yet; another process writes them."""
        if not self._tables:
            return b""
        content, self._tables = _content(self._tables), []
        return content

    def add(self, content: bytes) -> None:
        """Add rows of another process."""
        if content:
            self._tables.append(pa.ipc.open_stream(content).read_all())

    def write(self) -> None:
        """Write the collected rows durably, so that a kill of this process cannot lose them."""
        if self._ledger is None or not self._tables:
            return
        self._append(self._ledger, _content(self._tables))
        self._tables = []
        if self._journal is not None and self._journal.is_due(self._clock.wall_us()):
            self._make_file(self._ledger, [self._journal.path])

    def _append(self, ledger: Ledger, content: bytes) -> None:
        is_kept = False
        while not is_kept:
            if self._journal is None:
                self._journal = _Journal.begin(ledger.folder, self._clock.wall_us())
            self._journal.append(content)
            is_kept = self._journal.has_its_name()
            if not is_kept:  # a file was made from it meanwhile, perhaps without these rows
                self._journal.close()
                self._journal = None

    def roll(self, *, at_once: bool = False) -> None:
        """Turn the journals that are due into one ledger file, whichever process wrote them."""
        if self._ledger is None or not self._ledger.folder.is_dir():
            return
        now = self._clock.wall_us()
        due = [
            path
            for path in sorted(self._ledger.folder.glob(f"*{JOURNAL}"))
            if _is_due(path, now, at_once=at_once)
        ]
        if due:
            self._make_file(self._ledger, due)

    def _make_file(self, ledger: Ledger, journals: list[Path]) -> None:
        """Take journals over, and write a file with their rows."""
        taken = [renamed for path in journals if (renamed := _take_over(path)) is not None]
        tables = [
            pa.ipc.open_stream(entry).read_all()
            for path in taken
            for entry in _entries(path.read_bytes())
        ]
        if tables:
            ledger.write(pa.concat_tables(tables), self._clock.wall_us())
        for path in taken:
            path.unlink(missing_ok=True)  # missing: another process treated it as left behind


@lru_cache(maxsize=16)
def transfers_of(folder: Path) -> TransferLedger:
    """Return the ledger of a folder, with one journal for all tasks of this process."""
    return TransferLedger(folder)


class _Journal:
    """The journal of this process."""

    def __init__(self, path: Path, descriptor: int, begun_us: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._begun_us = begun_us
        self._size = 0

    @classmethod
    def begin(cls, folder: Path, now: int) -> "_Journal":
        """Create a new journal."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{os.getpid()}-{secrets.token_hex(6)}{JOURNAL}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        journal = cls(path, os.open(path, flags, 0o600), now)
        journal._write(_BEGUN.pack(now))
        return journal

    def append(self, content: bytes) -> None:
        """Append an entry; on an error, leave the journal unchanged."""
        self._write(_ENTRY.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content)

    def _write(self, content: bytes) -> None:
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += written

    def has_its_name(self) -> bool:
        """Return whether the journal still has its name: no process has taken it over."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def is_due(self, now: int) -> bool:
        """Return whether it is time to turn the journal into a file."""
        return abs(now - self._begun_us) >= _ROLL_US or self._size >= LEDGER_JOURNAL_BYTES

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _is_due(path: Path, now: int, *, at_once: bool) -> bool:
    """Return whether it is time to turn a journal of any process into a file.

    This uses wall time, because processes share the folder. After the clock was set back, a journal
    counts as old.
    """
    try:
        if path.name.endswith(_TAKEN):  # in use, or left behind by a killed process
            return abs(now - path.stat().st_ctime_ns // 1000) >= _ROLL_US
        with path.open("rb") as file:
            begun = file.read(_BEGUN.size)
    except OSError:
        return False
    if len(begun) < _BEGUN.size:
        return at_once
    return at_once or abs(now - _BEGUN.unpack(begun)[0]) >= _ROLL_US


def _take_over(path: Path) -> Path | None:
    """Rename a journal to a name that its process does not use; None if it was renamed before."""
    renamed = path.with_name(f".{os.getpid()}-{secrets.token_hex(6)}{_TAKEN}")
    with suppress(FileNotFoundError):
        return path.rename(renamed)
    return None


def _content(tables: list[pa.Table]) -> bytes:
    content = pa.BufferOutputStream()
    with pa.ipc.new_stream(content, _SCHEMA, options=_COMPRESSED) as stream:
        for table in tables:
            stream.write_table(table)
    return bytes(content.getvalue().to_pybytes())


def _entries(content: bytes) -> Iterator[pa.Buffer]:
    """Yield the complete entries of a journal, up to the first incomplete one."""
    at = _BEGUN.size
    while at + _ENTRY.size <= len(content):
        length, checksum = _ENTRY.unpack_from(content, at)
        begin, at = at + _ENTRY.size, at + _ENTRY.size + length
        if at > len(content) or xxhash.xxh3_64_intdigest(content[begin:at]) != checksum:
            return
        yield pa.py_buffer(content).slice(begin, length)
