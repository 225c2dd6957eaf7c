"""Ledgers: records of operations, messages, transitions and transfers, in Parquet files.

    <folder>/ledger/
      operations/day=2026-11-16/20261116T101500-4f2a9c1e-7.parquet    what a namespace metered
      messages/day=2026-11-16/20261116T101500-4f2a9c1e-8.parquet      what became of each message
      transitions/day=...                                             of a pairing
      transfers/day=...                                               of a syphon

A file appears under its name when it is on the disk, and is never changed, so a reader of the
folder sees only complete files, even while others are written. The small files of a finished day
are merged into one (`ledger_merge`). Each day has its own folder, so a reader can skip days, and
whole days are deleted when they are older than the retention. When the ledgers of a namespace
exceed their size bound, its broker deletes the oldest files first. The metadata of each file names
its ledger and the version of its format.

`read_footer` checks whether a file is a ledger file. It opens the footer only.
"""

import io
import itertools
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from twinbus import ledger_merge as merging
from twinbus.clock import from_us, moment_us
from twinbus.errors import InvalidArgumentError
from twinbus.files import sync_directory, tree_bytes, write_all_whole, write_whole
from twinbus.limits import (
    DAY_US,
    LEDGER_BUCKET,
    LEDGER_BYTES,
    LEDGER_FILE_ROWS,
    LEDGER_RETENTION,
    LEDGER_ROLL_INTERVAL,
    LEDGER_TRIM_RATIO,
    MERGED_DAYS,
    MIN_LEDGER_BYTES,
)
from twinbus.values import check_whole

FOLDER = "ledger"
VERSION = 1
_KIND_KEY, _VERSION_KEY = "twinbus.ledger", "twinbus.ledger.version"
_MARK = ".covered"
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]+-\d+\.parquet")
_MOMENT = pa.timestamp("us", "UTC")

# Events of the messages ledger; broker/accounts/trail.py says what each means.
ACCEPTED, DELETED, STANDING, INVENTORY = "accepted", "deleted", "standing", "inventory"
GAP, BEGUN, EXISTS, RESTORED = "gap", "begun", "exists", "restored"
ENDED = "ended"  # a log of an earlier version does not say why
ENDINGS = ("completed", "dead_lettered", "expired", "activated", "cancelled", "forwarded")
# Results of the ledger of transfers, and the suffix of the journals in which its rows wait.
MOVED, DEAD_LETTERED = "moved", "dead_lettered"
JOURNAL = ".journal"


class LedgerKind(Enum):
    """The kinds of ledgers. The first column of each is the time of the row."""

    OPERATIONS = "operations"
    MESSAGES = "messages"
    TRANSITIONS = "transitions"
    TRANSFERS = "transfers"


SCHEMAS: Mapping[LedgerKind, pa.Schema] = {
    LedgerKind.OPERATIONS: pa.schema(
        [
            ("bucket", _MOMENT),  # when the period of the counts began
            ("path", pa.string()),  # of the entity; empty if there is none
            ("operation", pa.string()),
            ("purpose", pa.string()),  # see protocol.operations.Purpose
            ("outcome", pa.string()),  # ok, Withdrawn, or the code of an error
            ("count", pa.int64()),  # requests
            ("messages", pa.int64()),
            ("bytes", pa.int64()),
            ("units", pa.int64()),  # of 64 KB, per message; a request without messages counts one
        ]
    ),
    LedgerKind.MESSAGES: pa.schema(
        [
            ("at", _MOMENT),
            ("event", pa.string()),  # see above
            ("path", pa.string()),
            ("number", pa.int32()),  # of the entity; a new entity with this path has a new number
            ("first", pa.int64()),  # sequence numbers, both included
            ("last", pa.int64()),
            ("message_id", pa.string()),  # if the row is about one message
            ("record", pa.int64()),  # of the log, that made it durable
        ]
    ),
    LedgerKind.TRANSITIONS: pa.schema(
        [
            ("at", _MOMENT),
            ("primary", pa.string()),  # name of the namespace
            ("process", pa.string()),  # host, process id, and a random part for the pairing
            ("event", pa.string()),  # FailedOver, Returned, BacklogQueuePulled, BacklogQueueBack
            ("path", pa.string()),  # of the entity, or of the backlog queue
            ("since", _MOMENT),  # failed over: its first failure; returned: when it failed over
            ("cause", pa.string()),  # returned: by a ping or by hand
            ("diverted", pa.int64()),  # returned: messages, since it failed over
        ]
    ),
    LedgerKind.TRANSFERS: pa.schema(
        [
            ("moved", _MOMENT),
            ("accepted", _MOMENT),  # by the backlog queue
            ("message_id", pa.string()),
            ("path", pa.string()),  # where it belongs on the primary
            ("queue", pa.string()),  # of the backlog
            ("origin", pa.string()),  # of the queue; a new queue with this path has a new origin
            ("sequence_number", pa.int64()),  # in the queue
            ("bytes", pa.int64()),
            ("result", pa.string()),  # moved, or dead_lettered
            ("reason", pa.string()),  # of a dead-lettered one
        ]
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """How a ledger is written and kept."""

    is_on: bool = True
    messages: bool = True  # also write what happened to each message, for reconciliation
    bucket: timedelta = LEDGER_BUCKET  # operations within this time are counted together
    roll_interval: timedelta = LEDGER_ROLL_INTERVAL  # how often a file is written
    retention: timedelta = LEDGER_RETENTION  # days older than this are deleted
    max_bytes: int = LEDGER_BYTES  # of all files; above it, the oldest are deleted

    def __post_init__(self) -> None:
        second, day = timedelta(seconds=1), timedelta(days=1)
        for name, span, low, high in (
            ("bucket", self.bucket, second, day),
            ("roll_interval", self.roll_interval, second, day),
            ("retention", self.retention, day, timedelta(days=36500)),
        ):
            if not isinstance(span, timedelta) or not low <= span <= high:
                raise InvalidArgumentError(f"ledger {name} is {span}; it must be {low} to {high}")
        check_whole("ledger max_bytes", self.max_bytes, MIN_LEDGER_BYTES, 2**63 - 1)
        if day % self.bucket:
            raise InvalidArgumentError(
                f"ledger bucket is {self.bucket}; a day must be a whole number of buckets"
            )


NO_LEDGER = LedgerSettings(is_on=False)


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """A complete file of a ledger."""

    path: Path
    size: int

    @property
    def until(self) -> str:
        """The moment of its newest row, in whole seconds, as its name says."""
        digits = self.path.stem.partition("-")[0]
        return datetime.strptime(digits, "%Y%m%dT%H%M%S").replace(tzinfo=UTC).isoformat()

    @property
    def order(self) -> tuple[str, int]:
        """The key that sorts files by time: the moment in the name, then the writer's number."""
        moment, _, number = self.path.stem.split("-")
        return moment, int(number)


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """The newest row of files: its time, and the record of the log that it belongs to."""

    at: int  # microseconds since 1970
    record: int


class Ledger:
    """One kind of ledger in one folder; any number of processes may write there."""

    def __init__(self, folder: Path, kind: LedgerKind, retention: timedelta) -> None:
        self.kind = kind
        self.folder = folder / FOLDER / kind.value
        self.retention = retention
        self.deleted: LedgerEnd | None = None  # the newest row that retention has deleted
        self._writer = secrets.token_hex(4)  # part of the names, so that no two writers share one
        self._files = itertools.count(1)
        self._cleared: date | None = None
        self._metadata = {_KIND_KEY: kind.value, _VERSION_KEY: str(VERSION)}
        self._layout = _layout(SCHEMAS[kind])

    def write(self, rows: pa.Table, now_us: int) -> list[Path]:
        """Write rows, one file per day. On an error nothing is written.

        The rows are on the disk when this returns.
        """
        moments = rows.column(0).cast(pa.int64()).to_numpy()
        days_of = moments // DAY_US
        parts: dict[Path, pa.Table] = {}
        for day in np.unique(days_of):
            of_day = days_of == day
            path = self._new_path(from_us(int(moments[of_day].max())))
            parts[path] = rows if of_day.all() else rows.filter(pa.array(of_day))
        write_all_whole({path: partial(self._write_rows, part) for path, part in parts.items()})
        self._delete_old_days(from_us(now_us))
        return list(parts)

    def _new_path(self, latest: datetime) -> Path:
        folder = self.folder / f"day={latest:%Y-%m-%d}"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_directory(self.folder)
        return folder / f"{latest:%Y%m%dT%H%M%S}-{self._writer}-{next(self._files)}.parquet"

    def _write_rows(self, rows: pa.Table, file: BinaryIO) -> None:
        with pq.ParquetWriter(file, rows.schema, **self._layout) as writer:
            writer.add_key_value_metadata(self._metadata)
            writer.write_table(rows, LEDGER_FILE_ROWS)

    def put_mark(self, number: int, log: str = "") -> None:
        """Store how far the writer has read in a log, and the id of that log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / _MARK, f"{number} {log}".encode())

    def read_mark(self) -> int:
        """Return how far the writer has read in its log; 0: unknown."""
        try:
            return int(self._mark()[0])
        except ValueError:
            return 0

    def read_log(self) -> str:
        """Return the id of the log that the mark is about; empty: unknown."""
        return self._mark()[2]

    def _mark(self) -> tuple[str, str, str]:
        try:
            return (self.folder / _MARK).read_text(encoding="ascii").partition(" ")
        except (OSError, ValueError):
            return "", "", ""

    def _delete_old_days(self, now: datetime) -> None:
        """Delete the days that are too old and merge the files of finished ones, once a day.

        Files that cannot be deleted or merged are left in place.
        """
        if self._cleared == now.date():
            return
        self._cleared = now.date()
        merged = now.date() - MERGED_DAYS
        for day, folder in days(self.folder):
            if merged <= day < now.date():
                with suppress(OSError, ValueError, pa.ArrowException):
                    self._merge(folder)
            if day < (now - self.retention).date():
                files = _files_in(folder)
                end = newest_row(files[-1].path) if files else None
                if end is not None and (self.deleted is None or self.deleted.record < end.record):
                    self.deleted = end
                shutil.rmtree(folder, ignore_errors=True)

    def _merge(self, folder: Path) -> None:
        """Merge the small files of a day into one."""
        with merging.alone_in(folder) as is_alone:
            found = [file.path for file in _files_in(folder)] if is_alone else []
            if len(found) < 2:
                return
            for path in merging.leftovers(found):
                path.unlink()
                found.remove(path)
            small = merging.small_files(found)
            if not small:
                return
            moment = small[-1].name.partition("-")[0]
            merged = folder / f"{moment}-{self._writer}-{next(self._files)}.parquet"
            schema, layout, metadata = SCHEMAS[self.kind], self._layout, self._metadata
            write_all_whole(
                {merged: partial(merging.write_merged, small, schema, layout, metadata)}
            )
            for path in small:
                path.unlink()

    def files(self) -> "list[LedgerFile]":
        """Return the complete files of the ledger, oldest first."""
        found = [file for _, folder in days(self.folder) for file in _files_in(folder)]
        return sorted(found, key=lambda file: file.order)


def _files_in(folder: Path) -> list[LedgerFile]:
    """Return the complete files of a day, oldest first; files of other names are not ours."""
    found = []
    for path in folder.glob("*.parquet"):
        with suppress(OSError):
            if _NAME.fullmatch(path.name):
                found.append(LedgerFile(path, path.stat().st_size))
    return sorted(found, key=lambda file: file.order)


def beyond_bound(ledgers: Sequence[Sequence[LedgerFile]], max_bytes: int) -> list[LedgerFile]:
    """Return the files to delete, oldest first, so that ledgers of one folder fit a bound.

    Nothing is deleted within the bound. The newest file of each ledger stays.
    """
    size = sum(file.size for files in ledgers for file in files)
    if size <= max_bytes:
        return []
    chosen = []
    for file in sorted((f for files in ledgers for f in files[:-1]), key=lambda f: f.order):
        if size <= max_bytes * LEDGER_TRIM_RATIO:
            break
        chosen.append(file)
        size -= file.size
    return chosen


def newest_row(path: Path) -> LedgerEnd | None:
    """Return the latest moment and the highest record of a file of messages.

    None: the file cannot be read, or is of another kind.
    """
    try:
        found = pq.read_metadata(path)
        names = found.schema.to_arrow_schema().names
        at, record = (
            max(
                found.row_group(group).column(names.index(name)).statistics.max
                for group in range(found.num_row_groups)
            )
            for name in ("at", "record")
        )
        return LedgerEnd(moment_us(at), int(record))
    except (OSError, ValueError, AttributeError, TypeError, pa.ArrowException):
        return None  # names without `record`, no row group, no statistics


class LedgerSize:
    """Measures the ledgers of a directory; reads a day again only if its folder has changed.

    Files never change, so the size of a day changes only with its folder.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._lock = threading.Lock()
        self._days: dict[Path, tuple[int, int]] = {}  # when the folder was changed, its size

    def total(self) -> int:
        """Return the size of all files."""
        with self._lock:
            before, self._days = self._days, {}
            try:
                kinds = [path for path in self._folder.iterdir() if path.is_dir()]
            except OSError:
                return 0
            return sum(self._kind(kind, before) for kind in kinds)

    def _kind(self, kind: Path, before: dict[Path, tuple[int, int]]) -> int:
        folders = [folder for _, folder in days(kind)]
        with suppress(OSError):
            for folder in folders:
                changed = folder.stat().st_mtime_ns
                known = before.get(folder, (0, 0))
                is_known = known[0] == changed and folder != folders[-1]
                size = known[1] if is_known else tree_bytes(folder)
                self._days[folder] = (changed, size)
        marks = [path for path in kind.iterdir() if path.is_file()]
        return sum(path.stat().st_size for path in marks) + sum(
            self._days.get(folder, (0, 0))[1] for folder in folders
        )


def _layout(schema: pa.Schema) -> dict[str, Any]:
    """Return how columns are written; message ids are unique, so they are not compressed."""
    names = [name for name in schema.names if name != "message_id"]
    integers = [column.name for column in schema if pa.types.is_integer(column.type)]
    return {
        "compression": {name: "zstd" if name in names else "none" for name in schema.names},
        "use_dictionary": [name for name in names if schema.field(name).type == pa.string()],
        "column_encoding": dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
        "write_statistics": names,
        "write_page_checksum": True,  # so that damage is noticed where the footer is whole
        "store_schema": False,  # read dictionary columns back as plain strings
    }


class DayFolders(Protocol):
    """The methods of a folder that `days` needs, on any file system."""

    @property
    def name(self) -> str:
        """The last part of its path."""

    def glob(self, pattern: str, /) -> "Iterator[Self]":
        """Yield the entries that match a pattern."""

    def __lt__(self, other: Self, /) -> bool: ...


F = TypeVar("F", bound=DayFolders)


def days(folder: F) -> Iterator[tuple[date, F]]:
    """Yield the days of a ledger of one kind, each with its folder, in order."""
    for path in sorted(folder.glob("day=*/")):
        with suppress(ValueError):
            yield date.fromisoformat(path.name.removeprefix("day=")), path


@dataclass(frozen=True, slots=True)
class Footer:
    """The metadata of a ledger file."""

    kind: str
    version: int
    rows: int
    replaces: frozenset[str] = frozenset()  # names of files whose rows this file contains as well
    groups: tuple[int, ...] = field(default=(), compare=False)  # rows of each row group


def read_footer(path: Path) -> Footer | str:
    """Return the metadata of a ledger file, or the reason why it is not a ledger file."""
    return footer_of(path, path.stat().st_size if path.exists() else 0)


def footer_of(file: Path | io.RawIOBase, size: int) -> Footer | str:
    """Return the same as `read_footer`, for a file that may be open already."""
    try:
        found = pq.read_metadata(file)
        columns = found.schema.to_arrow_schema().remove_metadata()
    except (OSError, ValueError, pa.ArrowException) as error:  # also for names that are not text
        return f"damaged: no whole Parquet file ({size} bytes; {str(error).splitlines()[0]})"
    metadata = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (found.metadata or {}).items()
    }
    if _KIND_KEY not in metadata:
        return "foreign: a Parquet file, but not of a Twinbus ledger"
    kind = metadata[_KIND_KEY]
    try:
        version = int(metadata[_VERSION_KEY])
        schema = SCHEMAS[LedgerKind(kind)]
    except (KeyError, ValueError):
        return f"foreign: its kind is {kind!r}, which this version of Twinbus does not have"
    if version > VERSION:
        return f"newer: written in version {version}; this Twinbus reads up to {VERSION}"
    if columns != schema:
        return f"damaged: its columns are not those of {kind} in version {version}"
    groups = tuple(found.row_group(group).num_rows for group in range(found.num_row_groups))
    return Footer(kind, version, found.num_rows, merging.replaced_by(metadata), groups)
