r"""The log: append-only segments of commit records, one checksum and one sync per record.

    segment file   NNNNNNNNNNNNNNNNNNNN.log, numbered in order
    +0   8  magic "TWINBUS\n"           +24  8  number of its first record
    +8   4  format version             +32  8  salt, random: seeds the checksums of its records
    +12  4  zero                       +40  8  xxh3 of bytes 0..40
    +16  8  segment number             +48  8  number of the oldest segment the log needs
                                       +56  8  xxh3 of bytes 0..40 and 48..56

    record         starts at a multiple of 64; a commit is one record, so it is complete or absent
    +0   4  magic "TBR1"               +16  8  record number, one more than the last
    +4   4  number of parts            +24  8  salted xxh3 of bytes 4..24 and the payload
    +8   8  payload length             +32     zeros to +64, then the payload
    A record without parts replaces lost ones: those that accept_damage skipped, up to its number.

    seal           follows the last record of a segment that is full
    +0   4  magic "TBSL"               +16  8  number of the last record
    +4   4  zero                       +24  8  salted xxh3 of bytes 4..24
    +8   8  number of the next segment

    payload        one header of 64 bytes per part, then the parts, each padded to 64
    +0   4  kind                       +24  8  first sequence number, of MESSAGES, else 0
    +4   4  entity                     +32  8  time of the commit; of MESSAGES of their arrival
    +8   8  batch number (MESSAGES)    +40  8  sender             \
    +16  8  length                     +48  8  its first number    | of MESSAGES, else 0
                                       +56  8  how many numbers   /
    A part is one Arrow IPC record batch of its kind's schema, or a few messages as rows
    (message_rows.py). In format version 1 all are columns, and messages have no column `amqp`.

    A MESSAGES part with an entity went to this entity completely and in order, each message active
    and without expiry: this common case needs no columns. PLACES describe all other cases. A part
    with a sender says that these numbers of it were accepted; FACTS contain other transfers.

A segment's space is reserved when it begins, and the files of dropped segments are overwritten: a
sync that does not extend the file takes half the time. The bytes after the last record are zeros or
old records, whose checksums do not match the new salt. A segment is renamed to its name when its
header is on the disk.

Each record is synced before the next is written, so only the last record can be torn. A torn tail
is cut off and its bytes are kept in `cut/`. A bad record followed by good ones is damage. Because
of the salt, a message body that is a copy of some log cannot look like a good record.

A missing segment is always detected. A segment is sealed when the next one is on the disk, so a
sealed last segment has lost its successors. Before the oldest segment is removed, the newest
records it in its header. LOCK contains the number of the record that was durable when the newest
segment began: if all segments are missing, the engine refuses to start.

`reserve` is a file of reserved space: when the disk is full, records that free space go there.
"""

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from twinbus.broker.store.message_rows import StoredRows, rows_in
from twinbus.broker.store.storage import DiskStorage, Storage
from twinbus.errors import (
    LogDamagedError,
    NamespaceInUseError,
    NewerFormatError,
    StoreUnavailableError,
)
from twinbus.files import create_private, make_private, sync_directory
from twinbus.limits import RESERVE_BYTES, SEGMENT_BYTES, SPARE_SEGMENTS, ZERO_AHEAD_BYTES
from twinbus.message import MESSAGE_SCHEMA, conform

FORMAT_VERSION = 2
ALIGNMENT = 64
_SEGMENT_MAGIC = b"TWINBUS\n"
_RECORD_MAGIC = b"TBR1"
_SEGMENT_HEADER = struct.Struct("<8sIIQQQ")
_RECORD_HEADER = struct.Struct("<4sIQQQ32x")
_CHECKED_HEADER = struct.Struct("<IQQ")
_PART_HEADER = struct.Struct("<IIQQQQQqQ")
_CHECKSUM = struct.Struct("<Q")
_OLDEST = struct.Struct("<QQ")  # at byte 48 of a segment
_SEAL_MAGIC = b"TBSL"
_SEAL = struct.Struct("<4sIQQQ32x")
_CHECKED_SEAL = struct.Struct("<IQQ")
_NEW = "new.spare"  # the name of a segment before it gets its own
_ZEROS = bytes(ALIGNMENT)
_NAME = re.compile(r"\d{20}\.log")


class PartKind(IntEnum):
    """The kinds of parts of a record."""

    FACTS = 1  # keyed values, of which the last is valid: entities, session states, leases ...
    MESSAGES = 2  # message columns, referred to by batch number and row
    PLACES = 3  # which entity holds which message under which number, in which state
    CHANGES = 4  # new states of messages that have a place
    HISTORY = 5  # message ids for duplicate detection


SCHEMAS = {
    PartKind.FACTS: pa.schema(
        [("kind", pa.string()), ("key", pa.string()), ("value", pa.binary())]  # null: forget it
    ),
    PartKind.MESSAGES: MESSAGE_SCHEMA,
    PartKind.PLACES: pa.schema(
        [
            ("entity", pa.int32()),
            ("sequence", pa.int64()),
            ("state", pa.uint8()),
            ("failures", pa.int32()),
            ("enqueued", pa.int64()),
            ("expires", pa.int64()),
            ("due", pa.int64()),
            ("size", pa.int32()),
            ("death", pa.int32()),
            ("batch", pa.int64()),
            ("row", pa.int32()),
        ]
    ),
    PartKind.CHANGES: pa.schema(
        [
            ("entity", pa.int32()),
            ("sequence", pa.int64()),
            ("state", pa.uint8()),
            ("failures", pa.int32()),  # for a message that is gone: the cause
        ]
    ),
    PartKind.HISTORY: pa.schema(
        [("entity", pa.int32()), ("message_id", pa.string()), ("time", pa.int64())]
    ),
}


_MESSAGE_SCHEMA_1 = pa.schema([field for field in MESSAGE_SCHEMA if field.name != "amqp"])


class Part(NamedTuple):
    """A part of a record, to be written or just read."""

    kind: PartKind
    columns: Any  # a pa.RecordBatch, or MessageRows for a few messages
    number: int = 0  # of the message batch
    entity: int = 0  # of all its messages; 0: see PLACES
    first_sequence: int = 0
    time: int = 0
    sent: "Sent | None" = None


class Sent(NamedTuple):
    """Consecutive numbers of a sender that were accepted."""

    sender: int  # 0: none
    first: int
    amount: int


_NOT_SENT = Sent(0, 0, 0)


class PartPosition(NamedTuple):
    """The position of a part in the log."""

    segment: int
    offset: int
    length: int


@dataclass(slots=True)
class Segment:
    """One file of the log."""

    number: int
    path: Path
    size: int  # up to the end of its last record; reserved space follows
    salt: int = 0
    version: int = FORMAT_VERSION
    head: int = ALIGNMENT  # end of its first record, which contains every fact
    ours: bool = False  # begun by this object, which therefore knows all its readers
    first_record: int = 0
    successor: int = 0  # the next segment in its seal; 0: it is not sealed
    oldest: int = 0  # the oldest needed segment, from its header; 0: not recorded
    _maps: list[mmap.mmap] = field(default_factory=list, repr=False)  # the last is the largest

    def mapped(self, size: int) -> mmap.mmap:
        """Return a mapping of the file with at least this size."""
        if not self._maps or len(self._maps[-1]) < size:
            with self.path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[-1]

    def is_viewed(self) -> bool:
        """Return whether views of its bytes exist, so that they must not change."""
        try:
            while self._maps:
                self._maps[-1].close()
                self._maps.pop()
        except BufferError:
            return True
        return False

    def buffer(self, place: PartPosition) -> pa.Buffer:
        """Return the bytes of a part as a view of the mapped file."""
        content = pa.py_buffer(self.mapped(place.offset + place.length))
        return content.slice(place.offset, place.length)


class Record(NamedTuple):
    """A commit as replay reads it: its parts and their positions."""

    number: int
    parts: tuple[tuple[Part, PartPosition], ...]


class Log:
    """The writer's log. Open it, replay it, then append; one process at a time."""

    def __init__(
        self,
        directory: Path,
        storage: Storage | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        accept_damage: bool = False,
        keeps_reserve: bool = False,
    ) -> None:
        self.directory = directory
        self._storage: Storage = storage or DiskStorage()
        self._segment_bytes = segment_bytes
        self._accept_damage = accept_damage
        self._reserve = directory / "reserve" if keeps_reserve else None
        self.is_on_reserve = False  # the active segment uses the reserve: the disk is full
        self._lock, self.seen_record = _lock_directory(directory)
        self.segments: dict[int, Segment] = {}  # oldest first
        self.cut_bytes = 0  # size of the torn tail found at the start
        self._next_record = 1
        self._descriptor = -1
        self._soiled = False  # bytes of a failed append may follow the last good record
        self._written_to = 0  # of the active segment: the space after it was never written

    # -- reading -------------------------------------------------------------------------------

    def replay(self) -> Iterator[Record]:
        """Yield every record in order; cut off a torn tail. Must be exhausted before `append`."""
        paths = sorted(path for path in self.directory.iterdir() if _NAME.fullmatch(path.name))
        paths = self._needed(paths)
        for path in paths:
            segment = Segment(int(path.stem), path, path.stat().st_size)
            last = path == paths[-1]
            if last and segment.size < ALIGNMENT:
                self._check_newest()
                self._cut(segment, 0)
                self._storage.remove(path)
                break
            self.segments[segment.number] = segment
            yield from self._read_segment(segment, last=last)
        self._check_newest()
        if self.segments and self._accept_damage:
            newest = self._active()
            newest.oldest = min(self.segments)
            self._mend(newest, 0, _header_of(newest))
        if self.segments:
            self._descriptor = self._storage.create(self._active().path)
        self._keep_reserve()

    def _needed(self, paths: list[Path]) -> list[Path]:
        """Return the segments that the newest one needs; refuse if the oldest are missing.

        Older segments were about to be removed when the broker ended.
        """
        oldest = max((_oldest_needed(path) for path in paths[-1:]), default=0)
        for path in [path for path in paths if int(path.stem) < oldest]:
            self._storage.remove(path)
        paths = [path for path in paths if int(path.stem) >= oldest]
        if paths and oldest and int(paths[0].stem) > oldest and not self._accept_damage:
            raise LogDamagedError(
                f"segments {oldest} to {int(paths[0].stem) - 1} of the log in {self.directory} are "
                "missing, but the newest segment needs them. Restore them from a "
                f"backup, or run `twinbus restored --accept-damage {self.directory.parent}` and "
                "lose their content",
                path=str(self.directory / f"{oldest:020d}.log"),
                segment=oldest,
            )
        return paths

    def _check_newest(self) -> None:
        """Refuse a log whose newest segment has a successor that is missing."""
        newest = self._active() if self.segments else None
        if newest and newest.successor and self._accept_damage:
            self._mend(newest, newest.size, bytes(_SEAL.size))
        elif newest and newest.successor:
            raise LogDamagedError(
                f"segment {newest.successor} of the log in {self.directory} is missing, and all "
                f"after it: segment {newest.number} is sealed, so its successor was on the disk. "
                "Restore it from a backup, or run "
                f"`twinbus restored --accept-damage {self.directory.parent}` and lose its content",
                path=str(self.directory / f"{newest.successor:020d}.log"),
                segment=newest.successor,
            )

    def _read_segment(self, segment: Segment, *, last: bool) -> Iterator[Record]:
        content = segment.mapped(segment.size)
        view = memoryview(content)
        self._check_segment_header(segment, view)
        offset = ALIGNMENT
        while offset < len(view):
            end = _record_end(view, offset, segment.salt, self._next_record)
            if end is not None:
                record = self._parse(segment, pa.py_buffer(content), offset)
                if record.parts:  # a record without parts replaces lost ones
                    yield record
                self._next_record = record.number + 1
                if record.parts and segment.head == ALIGNMENT:
                    segment.head = end
                offset = end
                continue
            following = self._find_record(segment, content, offset + ALIGNMENT)
            if following is None:
                break
            offset = self._skip_damage(segment, offset, following)
        segment.successor = _sealed_for(view, offset, segment.salt)
        if last and not segment.successor and _is_torn(view, offset, self._next_record):
            self._cut(segment, offset)
        segment.size = offset

    def _find_record(self, segment: Segment, content: mmap.mmap, offset: int) -> int | None:
        """Return the next good record after a bad one: it proves that the bad one is damage.

        The search ends a byte early: some Pythons (3.11.2) read the byte after the searched range,
        and after the end of a mapping there may be none, which ends the process.
        """
        view = memoryview(content)
        end = len(view) - 1
        start = content.find(_RECORD_MAGIC, offset, end)
        while start >= 0:
            if start % ALIGNMENT == 0 and start + _RECORD_HEADER.size <= len(view):
                number = _RECORD_HEADER.unpack_from(view, start)[3]
                later = number > self._next_record
                if later and _record_end(view, start, segment.salt, number) is not None:
                    return start
            start = content.find(_RECORD_MAGIC, start + 1, end)
        return None

    def _check_segment_header(self, segment: Segment, view: memoryview) -> None:
        magic, version, _, number, first, segment.salt = _SEGMENT_HEADER.unpack_from(view, 0)
        segment.first_record, segment.version = int(first), version
        if magic == _SEGMENT_MAGIC and version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{segment.path} was written in format {version}; this Twinbus reads up to "
                f"{FORMAT_VERSION}. Nothing was changed: start it with the newer Twinbus",
                path=str(segment.path),
                version=version,
            )
        (checksum,) = _CHECKSUM.unpack_from(view, _SEGMENT_HEADER.size)
        good = checksum == xxhash.xxh3_64_intdigest(view[: _SEGMENT_HEADER.size])
        if magic != _SEGMENT_MAGIC or not good or number != segment.number:
            raise LogDamagedError(
                f"{segment.path} does not have the header of segment {segment.number} of a log; "
                "restore the file from a backup",
                path=str(segment.path),
                offset=0,
            )
        missing = len(self.segments) > 1 and first != self._next_record
        if missing and not self._accept_damage:
            raise LogDamagedError(
                f"{segment.path} begins with record {first}, but record {self._next_record} was "
                "expected: the end of the previous segment, or a complete segment, is missing. "
                "Restore it from a backup, or open the namespace once with accept_damage=True "
                "and lose its content",
                path=str(segment.path),
                offset=0,
                record=self._next_record,
            )
        if missing:
            before = self.segments[sorted(self.segments)[-2]]
            end = before.size + _RECORD_HEADER.size
            self._fill_gap(before, before.size, end, int(first) - 1)
            before.size = end
        self._next_record = int(first)

    def _skip_damage(self, segment: Segment, offset: int, end: int) -> int:
        if not self._accept_damage:
            raise LogDamagedError(
                f"{segment.path}: record {self._next_record} at byte {offset} fails its checksum "
                "and later records are intact, so this is damage, not an interrupted write. "
                "Restore the file from a backup, or open the namespace once with "
                "accept_damage=True: the damaged bytes are then kept in cut/ and their content "
                "is lost",
                path=str(segment.path),
                offset=offset,
                record=self._next_record,
            )
        self._keep_aside(segment, offset, end)
        following: int = _RECORD_HEADER.unpack_from(segment.mapped(end), end)[3]
        self._fill_gap(segment, offset, end, following - 1)
        self._next_record = following
        return end

    def _fill_gap(self, segment: Segment, offset: int, end: int, number: int) -> None:
        """Write a record without parts for lost records, so that the loss is accepted once."""
        payload = bytes(end - offset - _RECORD_HEADER.size)
        checked = _CHECKED_HEADER.pack(0, len(payload), number)
        digest = xxhash.xxh3_64(checked, seed=segment.salt)
        digest.update(payload)
        header = _RECORD_MAGIC + checked + _CHECKSUM.pack(digest.intdigest())
        self._mend(segment, offset, header.ljust(_RECORD_HEADER.size, b"\0") + payload)

    def _mend(self, segment: Segment, offset: int, content: bytes) -> None:
        """Overwrite a part of a segment, durably."""
        descriptor = self._storage.create(segment.path)
        try:
            self._storage.write(descriptor, offset, [memoryview(content)])
            self._storage.sync(descriptor)
        finally:
            os.close(descriptor)

    def _cut(self, segment: Segment, offset: int) -> None:
        """Cut the torn tail off the last segment; its bytes were never acknowledged."""
        self.cut_bytes = self._keep_aside(segment, offset, segment.size)
        descriptor = self._storage.create(segment.path)
        try:
            self._storage.truncate(descriptor, offset)
            self._storage.sync(descriptor)
        finally:
            os.close(descriptor)

    def _keep_aside(self, segment: Segment, start: int, end: int) -> int:
        """Keep bytes for an operator to inspect; return how many precede the zeros."""
        aside = self.directory / "cut"
        make_private(aside)
        with segment.path.open("rb") as file:
            file.seek(start)
            content = file.read(end - start).rstrip(b"\0")
        with create_private(aside / f"{segment.path.stem}-{start}.bytes") as kept:
            kept.write(content)
        return len(content)

    def _parse(self, segment: Segment, content: pa.Buffer, offset: int) -> Record:
        _, count, _, number, _ = _RECORD_HEADER.unpack_from(content, offset)
        table = offset + _RECORD_HEADER.size
        at = table + count * _PART_HEADER.size
        parts = []
        for index in range(count):
            header = _PART_HEADER.unpack_from(content, table + index * _PART_HEADER.size)
            kind, entity, batch_number, length, first_sequence, time, *numbers = header
            place = PartPosition(segment.number, at, length)
            columns = _read(content.slice(at, length), PartKind(kind), segment.version)
            sent = Sent(*numbers) if numbers[0] else None
            part = Part(PartKind(kind), columns, batch_number, entity, first_sequence, time, sent)
            parts.append((part, place))
            at += _padded(length)
        return Record(number, tuple(parts))

    def read(self, place: PartPosition) -> pa.RecordBatch:
        """Return the messages at a position as columns."""
        stored = self.read_stored(place)
        return stored.batch() if isinstance(stored, StoredRows) else stored

    def read_stored(self, place: PartPosition) -> pa.RecordBatch | StoredRows:
        """Return the messages at a position as they are stored: a view of the file."""
        segment = self.segments[place.segment]
        content: pa.RecordBatch | StoredRows = _read(
            segment.buffer(place), PartKind.MESSAGES, segment.version
        )
        return content

    # -- writing -------------------------------------------------------------------------------

    @property
    def begins_segment(self) -> bool:
        """Whether the next record is the first of a segment and must contain every fact."""
        return self._wants_new_segment or self._active().head == ALIGNMENT

    def needs_facts(self, *, frees_space: bool) -> bool:
        """Return whether the next record is the first of its segment and must contain every fact.

        A record that does not free space leaves the reserve and begins a new segment.
        """
        return self.begins_segment or (self.is_on_reserve and not frees_space)

    @property
    def has_head(self) -> bool:
        """Whether the active segment contains every fact."""
        return bool(self.segments) and self._active().head > ALIGNMENT

    @property
    def first_record(self) -> int:
        """The number of the oldest record that the log may still have."""
        return next(iter(self.segments.values())).first_record if self.segments else 0

    @property
    def _wants_new_segment(self) -> bool:
        if not self.segments or self._soiled:
            return True
        active = self._active()
        is_old = active.version < FORMAT_VERSION  # its readers cannot read what we write
        return is_old or active.size - active.head >= self._segment_bytes

    @property
    def last_record(self) -> int:
        """The number of the last record."""
        return self._next_record - 1

    @property
    def size_in_bytes(self) -> int:
        """The size of all segments in bytes."""
        return sum([segment.size for segment in self.segments.values()])

    @property
    def size_without_heads(self) -> int:
        """The size of all segments in bytes, without the facts at their beginning."""
        return sum(segment.size - segment.head for segment in self.segments.values())

    def append(self, parts: Sequence[Part], *, frees_space: bool = False) -> list[PartPosition]:
        """Write a record and sync it; return the positions of its parts.

        If it fails, nothing of it remains, and StoreUnavailableError has the reason. The next
        append goes to a new segment; on a full disk, a record that frees space goes to the reserve.
        """
        try:
            if self._soiled or self.is_on_reserve or self._wants_new_segment:
                self._prepare(frees_space=frees_space)
            return self._append(self._active(), parts)
        except OSError as error:
            self._soiled = True
            self._take_back()
            raise StoreUnavailableError(
                f"the log in {self.directory} cannot be written ({error.strerror}); nothing new "
                "was accepted. Free space or repair the disk; the broker then continues by itself",
                directory=str(self.directory),
                errno=error.errno,
            ) from error

    def _prepare(self, *, frees_space: bool) -> None:
        """Ensure that the active segment can accept a record.

        After a failed append, the log continues in a new segment: after a failed sync the content
        of the page cache is unknown, so the file is not used any more. The reserve is for records
        that free space; any other record needs a new segment.
        """
        if self._soiled:
            self._take_back()
        leaves_reserve = self.is_on_reserve and not frees_space
        if not (self._soiled or leaves_reserve or self._wants_new_segment):
            return
        try:
            self._begin_segment(must_reserve=leaves_reserve)
            self.is_on_reserve = False
        except OSError as error:
            if error.errno != errno.ENOSPC or not frees_space or not self.has_reserve:
                raise
            self._begin_segment(self._reserve)
            self.is_on_reserve = True
        self._soiled = False
        self._keep_reserve()

    @property
    def has_reserve(self) -> bool:
        """Whether the reserve exists."""
        return self._reserve is not None and self._reserve.exists()

    def _keep_reserve(self) -> None:
        """Create the reserve again if it was used and the disk has space; failing is no error."""
        if self._reserve is None or self._reserve.exists() or self.is_on_reserve:
            return
        draft = self._reserve.with_suffix(".draft")
        size = min(RESERVE_BYTES, self._segment_bytes)
        with suppress(OSError):
            descriptor = self._storage.create(draft, size)
            try:
                _check_space(descriptor, size)
            except OSError:
                self._storage.remove(draft)
                raise
            finally:
                os.close(descriptor)
            self._storage.rename(draft, self._reserve)

    def _append(self, segment: Segment, parts: Sequence[Part]) -> list[PartPosition]:
        offset = segment.size + _RECORD_HEADER.size + len(parts) * _PART_HEADER.size
        places: list[PartPosition] = []
        table: list[bytes] = []
        buffers: list[Any] = []
        for part in parts:
            body = part.columns.serialize()
            length = len(body)
            padding = -length % ALIGNMENT
            sent = part.sent or _NOT_SENT
            numbers = (part.number, length, part.first_sequence, part.time, *sent)
            table.append(_PART_HEADER.pack(part.kind, part.entity, *numbers))
            places.append(PartPosition(segment.number, offset, length))
            buffers += (body, _ZEROS[:padding])
            offset += length + padding
        payload = offset - segment.size - _RECORD_HEADER.size
        head = b"".join(table)
        if payload < ZERO_AHEAD_BYTES:  # small: one buffer is cheaper to checksum and write
            head, buffers = b"".join((head, *buffers)), []
        checked = _CHECKED_HEADER.pack(len(parts), payload, self._next_record)
        digest = xxhash.xxh3_64(checked + head, seed=segment.salt)
        for buffer in buffers:
            digest.update(buffer)
        header = _RECORD_HEADER.pack(
            _RECORD_MAGIC, len(parts), payload, self._next_record, digest.intdigest()
        )
        if offset > self._written_to and payload < ZERO_AHEAD_BYTES:
            self._zero_ahead(offset)
        content = [memoryview(header + head), *[memoryview(buffer) for buffer in buffers]]
        self._storage.write(self._descriptor, segment.size, content)
        self._storage.sync(self._descriptor)
        is_first = segment.head == ALIGNMENT
        if is_first:
            segment.head = offset
        segment.size = offset
        self._next_record += 1
        if is_first:
            _write_lock(self._lock, self.last_record)
        return places

    def _zero_ahead(self, offset: int) -> None:
        """Write zeros at the position of the next small records.

        The file system marks reserved space that was never written. Each sync of a record in it
        must also change this mark, which takes 50 % longer.
        """
        end = min(offset + ZERO_AHEAD_BYTES, self._segment_bytes)
        if offset < end:
            with suppress(OSError):  # this only saves time
                self._storage.write(self._descriptor, offset, [memoryview(bytes(end - offset))])
        self._written_to = end

    def _begin_segment(self, spare: Path | None = None, *, must_reserve: bool = False) -> None:
        """Begin a segment, in a spare file or in a new one."""
        number = max(self.segments, default=0) + 1
        path = self.directory / f"{number:020d}.log"
        spare = spare or next(iter(self._spares()), self.directory / _NEW)
        is_reserve = spare == self._reserve
        is_old = spare.suffix == ".spare" and spare.name != _NEW and spare.exists()
        written = spare.stat().st_size if is_old else 0
        descriptor = self._storage.create(spare, 0 if is_reserve else self._segment_bytes)
        try:
            if must_reserve:
                _check_space(descriptor, min(self._segment_bytes, RESERVE_BYTES))
            salt = int.from_bytes(os.urandom(8), "little")
            segment = Segment(
                number, path, ALIGNMENT, salt, ours=True, first_record=self._next_record
            )
            segment.oldest = min(self.segments, default=number)
            self._storage.write(descriptor, 0, [memoryview(_header_of(segment))])
            self._storage.sync(descriptor)
            self._storage.rename(spare, path)
            self._storage.sync_directory(self.directory)
        except OSError:
            os.close(descriptor)
            raise
        self._end_segment(successor=number)
        self._descriptor = descriptor
        self._written_to = written
        self.segments[number] = segment

    def _spares(self) -> list[Path]:
        """Return the files of dropped segments that can be overwritten."""
        return sorted(path for path in self.directory.glob("*.spare") if path.name != _NEW)

    def _end_segment(self, successor: int = 0) -> None:
        """Release the reserved space of a segment; seal it if another one follows."""
        if self._descriptor < 0:
            return
        active, end = self._active(), self._active().size
        with suppress(OSError):  # the bytes after the last record are not needed
            if successor:
                checked = _CHECKED_SEAL.pack(0, successor, self.last_record)
                digest = xxhash.xxh3_64_intdigest(checked, seed=active.salt)
                seal = (_SEAL_MAGIC + checked + _CHECKSUM.pack(digest)).ljust(_SEAL.size, b"\0")
                self._storage.write(self._descriptor, end, [memoryview(seal)])
                end += _SEAL.size
            self._storage.truncate(self._descriptor, end)
            if successor:
                self._storage.sync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def _take_back(self) -> None:
        """Remove the bytes of a failed append, so that no restart reads them."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._storage.truncate(self._descriptor, self._active().size)
                self._storage.sync(self._descriptor)

    def skip_to(self, record: int) -> None:
        """Skip record numbers that the ledger has already used.

        A lost copy of this log has written records with these numbers.
        """
        if record < self._next_record:
            return
        if self.segments:
            active = self._active()
            end = active.size + _RECORD_HEADER.size
            self._fill_gap(active, active.size, end, record)
            active.size = end
        self._next_record = record + 1

    def drop(self, number: int) -> None:
        """Drop a segment whose messages are all gone or moved; views of it stay valid."""
        if self._descriptor >= 0 and number == self._active().number:
            self._end_segment()
        segment = self.segments.pop(number)
        with suppress(OSError):  # a file that remains is read again at the next start
            if self._descriptor >= 0:
                self._remove_unfinished()
                active = self._active()
                active.oldest = min(self.segments)
                self._storage.write(self._descriptor, 0, [memoryview(_header_of(active))])
                self._storage.sync(self._descriptor)
            is_free = segment.ours and not segment.is_viewed()
            if is_free and len(self._spares()) < SPARE_SEGMENTS:
                self._storage.rename(segment.path, segment.path.with_suffix(".spare"))
            else:
                self._storage.remove(segment.path)
            self._storage.sync_directory(self.directory)
        self._keep_reserve()

    def _remove_unfinished(self) -> None:
        """Remove a named segment that was not used, because its header needs the oldest one."""
        path = self.directory / f"{self._active().number + 1:020d}.log"
        if path.exists():
            self._storage.remove(path)
            self._storage.sync_directory(self.directory)

    def _active(self) -> Segment:
        return next(reversed(self.segments.values()))

    def close(self) -> None:
        """Release the files and the directory."""
        self._end_segment()
        if self._lock >= 0:
            if self.segments:  # after a refused start, these may be only some of the segments
                _write_lock(self._lock, max(self.last_record, self.seen_record))
            os.close(self._lock)
            self._lock = -1

    def crash(self) -> None:
        """Close the files as the system does for a killed process: nothing is written."""
        for descriptor in (self._descriptor, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._lock = -1


def _read(content: pa.Buffer, kind: PartKind, version: int) -> Any:
    """Return the content of a part."""
    if kind is PartKind.MESSAGES:
        if version == 1:
            return conform(pa.ipc.read_record_batch(content, _MESSAGE_SCHEMA_1))
        rows = rows_in(content)
        if rows is not None:
            return rows
    return pa.ipc.read_record_batch(content, SCHEMAS[kind])


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _header_of(segment: Segment) -> bytes:
    fields = _SEGMENT_HEADER.pack(
        _SEGMENT_MAGIC, segment.version, 0, segment.number, segment.first_record, segment.salt
    )
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return (
        fields + checksum + _OLDEST.pack(segment.oldest, _oldest_checksum(fields, segment.oldest))
    )


def _check_space(descriptor: int, size: int) -> None:
    """Raise OSError if a file has less space than this on the disk."""
    if os.fstat(descriptor).st_blocks * 512 < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _oldest_checksum(fields: bytes, oldest: int) -> int:
    return xxhash.xxh3_64_intdigest(fields + _CHECKSUM.pack(oldest))


def _oldest_needed(path: Path) -> int:
    """Return the oldest needed segment from a segment's header; 0 if it is not recorded."""
    with path.open("rb") as file:
        header = file.read(ALIGNMENT)
    if len(header) < ALIGNMENT:
        return 0
    oldest, checksum = _OLDEST.unpack_from(header, ALIGNMENT - _OLDEST.size)
    good = checksum == _oldest_checksum(header[: _SEGMENT_HEADER.size], oldest)
    return int(oldest) if good else 0


def _sealed_for(view: memoryview, offset: int, salt: int) -> int:
    """Return the successor in a seal at this position; 0 if there is no seal."""
    if len(view) - offset < _SEAL.size:
        return 0
    magic, zero, successor, record, checksum = _SEAL.unpack_from(view, offset)
    checked = _CHECKED_SEAL.pack(zero, successor, record)
    good = magic == _SEAL_MAGIC and checksum == xxhash.xxh3_64_intdigest(checked, seed=salt)
    return int(successor) if good else 0


def _is_torn(view: memoryview, offset: int, number: int) -> bool:
    """Return whether this record was begun here; otherwise the space is unused."""
    if len(view) - offset < _RECORD_HEADER.size:
        return offset < len(view)
    found: int = _RECORD_HEADER.unpack_from(view, offset)[3]
    return found == number


def _record_end(view: memoryview, offset: int, salt: int, number: int) -> int | None:
    """Return the end of the record with this number; None if it is not complete and valid."""
    if len(view) - offset < _RECORD_HEADER.size:
        return None
    magic, parts, payload, found, checksum = _RECORD_HEADER.unpack_from(view, offset)
    end: int = offset + _RECORD_HEADER.size + payload
    expected = found == number or (parts == 0 and found > number)  # or: an accepted gap
    if magic != _RECORD_MAGIC or not expected or end > len(view):
        return None
    digest = xxhash.xxh3_64(_CHECKED_HEADER.pack(parts, payload, found), seed=salt)
    digest.update(view[offset + _RECORD_HEADER.size : end])
    return end if digest.intdigest() == checksum else None


def _lock_directory(directory: Path) -> tuple[int, int]:
    """Become the only writer of a directory, or raise; return its descriptor and last record."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / "LOCK", flags, 0o600)
        found = os.fstat(descriptor)
    except OSError as error:
        raise StoreUnavailableError(
            f"{directory} cannot be used as a namespace directory ({error.strerror}); it must be "
            "a directory this user can write to, and its LOCK must not be a symbolic link",
            directory=str(directory),
            errno=error.errno,
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise StoreUnavailableError(
            f"{directory / 'LOCK'} is a link or a device, not a regular file; remove it",
            directory=str(directory),
        )
    holder, _, seen = os.pread(descriptor, 64, 0).decode(errors="replace").partition(" ")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise NamespaceInUseError(
            f"{directory} is in use by process {holder}; only one process at a time may write a "
            "namespace. Stop that process, or connect to it as a server",
            directory=str(directory),
            pid=int(holder) if holder.isdigit() else None,
        ) from None
    seen_record = int(seen) if seen.isdigit() and len(seen) < 20 else 0
    _write_lock(descriptor, seen_record)
    return descriptor, seen_record


def _write_lock(descriptor: int, record: int) -> None:
    """Write our process id and the last record to LOCK."""
    content = f"{os.getpid()} {record}".encode()
    with suppress(OSError):  # such as a full disk; we hold the lock anyway
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
