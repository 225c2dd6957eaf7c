r"""The log: append-only segments of commit records, one checksum and one sync per record.

    segment file   NNNNNNNNNNNNNNNNNNNN.log, numbered in order
    +0   8  magic "TWINBUS\n"           +24  8  number of its first record
    +8   4  format version             +32  8  salt, random: seeds the checksums of its records
    +12  4  zero                       +40  8  xxh3 of bytes 0..40
    +16  8  segment number             +48     zeros to +64

    record         starts at a multiple of 64; a commit is one record, so it is there whole or not
    +0   4  magic "TBR1"               +16  8  record number, one more than the last
    +4   4  number of parts            +24  8  salted xxh3 of bytes 4..24 and the payload
    +8   8  payload length             +32     zeros to +64, then the payload
    A record without parts stands for lost ones: what accept_damage left out, up to its number.

    payload        one header of 64 bytes per part, then the parts, each padded to 64
    +0   4  kind                       +24  8  first sequence number, of MESSAGES, else 0
    +4   4  entity                     +32  8  time of the commit; of MESSAGES of their arrival
    +8   8  batch number (MESSAGES)    +40  8  sender             \
    +16  8  length                     +48  8  its first number    | of MESSAGES, else 0
                                       +56  8  how many numbers   /
    A part is one Arrow IPC record batch of its kind's schema.

    A MESSAGES part with an entity went there whole and in order at that time, each message active
    and without expiry: the common case costs no columns. Everything else is told by PLACES. A part
    with a sender says that these numbers of it were taken; FACTS tell of other transfers.

A segment's space is reserved when it begins, and the files of dropped segments are written over:
a sync that need not grow the file takes half the time. What lies behind the last record is zeros or
old records, which fail the new salt. A segment gets its name when its header is on the disk.

Each record is synced before the next is written, so only the last can be torn. A torn tail is
cut off and its bytes are kept in `cut/`. A bad record with good ones after it is damage; the salt
keeps a message whose body is a copy of some log from passing for one of them.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import pyarrow as pa
import xxhash

from twinbus.broker.storage import DiskStorage, Storage
from twinbus.errors import (
    LogDamagedError,
    NamespaceInUseError,
    NewerFormatError,
    StoreUnavailableError,
)
from twinbus.files import sync_directory
from twinbus.limits import SEGMENT_BYTES, SPARE_SEGMENTS, ZERO_AHEAD_BYTES
from twinbus.message import MESSAGE_SCHEMA

FORMAT_VERSION = 1
ALIGNMENT = 64
_SEGMENT_MAGIC = b"TWINBUS\n"
_RECORD_MAGIC = b"TBR1"
_SEGMENT_HEADER = struct.Struct("<8sIIQQQ")
_RECORD_HEADER = struct.Struct("<4sIQQQ32x")
_CHECKED_HEADER = struct.Struct("<IQQ")
_PART_HEADER = struct.Struct("<IIQQQQQqQ")
_CHECKSUM = struct.Struct("<Q")


class PartKind(IntEnum):
    """What a part of a record holds."""

    FACTS = 1  # keyed values, the last one wins: entities, session states, leases ...
    MESSAGES = 2  # message columns, referred to by batch number and row
    PLACES = 3  # which entity holds which message under which number, in which state
    CHANGES = 4  # new states of messages already placed
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
            ("failures", pa.int32()),  # of one that is gone: the cause
        ]
    ),
    PartKind.HISTORY: pa.schema(
        [("entity", pa.int32()), ("message_id", pa.string()), ("time", pa.int64())]
    ),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a record, to be written or just read."""

    kind: PartKind
    columns: pa.RecordBatch
    number: int = 0  # of the message batch
    entity: int = 0  # that all its messages went to; 0: see PLACES
    first_sequence: int = 0
    time: int = 0
    sent: "Sent | None" = None


@dataclass(frozen=True, slots=True)
class Sent:
    """Consecutive numbers of one sender that were taken."""

    sender: int  # 0: none
    first: int
    count: int


_NOT_SENT = Sent(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part lies."""

    segment: int
    offset: int
    length: int


@dataclass(slots=True)
class Segment:
    """One file of the log."""

    number: int
    path: Path
    size: int  # up to the end of its last record; space is reserved behind
    salt: int = 0
    head: int = ALIGNMENT  # end of its first record, which holds every fact
    ours: bool = False  # begun by this object, so that it knows everyone who looks at it
    _maps: list[mmap.mmap] = field(default_factory=list, repr=False)  # the last is the largest

    def mapped(self, size: int) -> mmap.mmap:
        """Return the file in memory, at least this much of it."""
        if not self._maps or len(self._maps[-1]) < size:
            with self.path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[-1]

    def is_viewed(self) -> bool:
        """Whether somebody still looks at its bytes, so that they must not change."""
        try:
            while self._maps:
                self._maps[-1].close()
                self._maps.pop()
        except BufferError:
            return True
        return False

    def buffer(self, place: Place) -> pa.Buffer:
        """Return a part's bytes as a view of the mapped file."""
        content = pa.py_buffer(self.mapped(place.offset + place.length))
        return content.slice(place.offset, place.length)


@dataclass(frozen=True, slots=True)
class Record:
    """One commit as replay sees it: its parts and where each lies."""

    number: int
    parts: tuple[tuple[Part, Place], ...]


class Log:
    """The writer's log. Open it, replay it, then append; one process at a time."""

    def __init__(
        self,
        directory: Path,
        storage: Storage | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        accept_damage: bool = False,
    ) -> None:
        self.directory = directory
        self._storage: Storage = storage or DiskStorage()
        self._segment_bytes = segment_bytes
        self._accept_damage = accept_damage
        self._lock = _lock_directory(directory)
        self.segments: dict[int, Segment] = {}  # oldest first
        self.cut_bytes = 0  # of the torn tail found at start
        self._next_record = 1
        self._descriptor = -1
        self._soiled = False  # bytes of a failed append may lie behind the last good record
        self._written_to = 0  # of the active segment: from here on space was at most reserved

    # -- reading -------------------------------------------------------------------------------

    def replay(self) -> Iterator[Record]:
        """Yield every record in order; cut a torn tail; must be exhausted before `append`."""
        paths = sorted(self.directory.glob("*.log"))
        for path in paths:
            segment = Segment(int(path.stem), path, path.stat().st_size)
            last = path == paths[-1]
            if last and segment.size < ALIGNMENT:
                self._cut(segment, 0)
                path.unlink()
                break
            self.segments[segment.number] = segment
            yield from self._read_segment(segment, last=last)
        if self.segments:
            self._descriptor = os.open(self._active().path, os.O_WRONLY | os.O_CLOEXEC)

    def _read_segment(self, segment: Segment, *, last: bool) -> Iterator[Record]:
        content = segment.mapped(segment.size)
        view = memoryview(content)
        self._check_segment_header(segment, view)
        offset = ALIGNMENT
        while offset < len(view):
            end = _record_end(view, offset, segment.salt, self._next_record)
            if end is not None:
                record = self._parse(segment, pa.py_buffer(content), offset)
                if record.parts:  # else it stands for what was lost
                    yield record
                self._next_record = record.number + 1
                if offset == ALIGNMENT:
                    segment.head = end
                offset = end
                continue
            following = self._find_record(segment, content, offset + ALIGNMENT)
            if following is None:
                break
            offset = self._skip_damage(segment, offset, following)
        if last and _is_torn(view, offset, self._next_record):
            self._cut(segment, offset)
        segment.size = offset

    def _find_record(self, segment: Segment, content: mmap.mmap, offset: int) -> int | None:
        """Return the next good record after a bad one: proof that the bad one is damage.

        The search ends a byte early: some Pythons (3.11.2) look at the byte behind what they
        search, and behind a whole mapping there may be none, which ends the process.
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
                f"{segment.path} does not begin like segment {segment.number} of a Twinbus log; "
                "restore the file from a backup",
                path=str(segment.path),
                offset=0,
            )
        missing = len(self.segments) > 1 and first != self._next_record
        if missing and not self._accept_damage:
            raise LogDamagedError(
                f"{segment.path} begins with record {first}, but record {self._next_record} was "
                "to come: the end of the segment before it, or a whole segment, is missing. "
                "Restore it from a backup, or open the namespace once with accept_damage=True "
                "and lose what it held",
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
                "accept_damage=True: the damaged bytes are then kept in cut/ and what they held "
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
        """Write a record without parts in place of what is lost, so that it is accepted once."""
        payload = bytes(end - offset - _RECORD_HEADER.size)
        checked = _CHECKED_HEADER.pack(0, len(payload), number)
        digest = xxhash.xxh3_64(checked, seed=segment.salt)
        digest.update(payload)
        header = _RECORD_MAGIC + checked + _CHECKSUM.pack(digest.intdigest())
        descriptor = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, header.ljust(_RECORD_HEADER.size, b"\0") + payload, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _cut(self, segment: Segment, offset: int) -> None:
        """Take the torn tail off the last segment; its bytes were never acknowledged."""
        self.cut_bytes = self._keep_aside(segment, offset, segment.size)
        os.truncate(segment.path, offset)

    def _keep_aside(self, segment: Segment, start: int, end: int) -> int:
        """Keep bytes for whoever wants to look; return how many there were before the zeros."""
        aside = self.directory / "cut"
        aside.mkdir(exist_ok=True)
        with segment.path.open("rb") as file:
            file.seek(start)
            content = file.read(end - start).rstrip(b"\0")
        (aside / f"{segment.path.stem}-{start}.bytes").write_bytes(content)
        return len(content)

    def _parse(self, segment: Segment, content: pa.Buffer, offset: int) -> Record:
        _, count, _, number, _ = _RECORD_HEADER.unpack_from(content, offset)
        table = offset + _RECORD_HEADER.size
        at = table + count * _PART_HEADER.size
        parts = []
        for index in range(count):
            header = _PART_HEADER.unpack_from(content, table + index * _PART_HEADER.size)
            kind, entity, batch_number, length, first_sequence, time, *numbers = header
            place = Place(segment.number, at, length)
            columns = pa.ipc.read_record_batch(content.slice(at, length), SCHEMAS[PartKind(kind)])
            sent = Sent(*numbers) if numbers[0] else None
            part = Part(PartKind(kind), columns, batch_number, entity, first_sequence, time, sent)
            parts.append((part, place))
            at += _padded(length)
        return Record(number, tuple(parts))

    def read(self, place: Place) -> pa.RecordBatch:
        """Return the message batch at this place as a view of the file."""
        return pa.ipc.read_record_batch(self.segments[place.segment].buffer(place), MESSAGE_SCHEMA)

    # -- writing -------------------------------------------------------------------------------

    @property
    def begins_segment(self) -> bool:
        """Whether the next record is the first of a segment: it must hold every fact."""
        return self._wants_new_segment or self._active().size == ALIGNMENT

    @property
    def _wants_new_segment(self) -> bool:
        if not self.segments or self._soiled:
            return True
        active = self._active()
        return active.size - active.head >= self._segment_bytes

    @property
    def last_record(self) -> int:
        """The number of the record written last."""
        return self._next_record - 1

    @property
    def size_in_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments.values())

    @property
    def size_without_heads(self) -> int:
        """Bytes of all segments but for the facts they begin with."""
        return sum(segment.size - segment.head for segment in self.segments.values())

    def append(self, parts: Sequence[Part]) -> list[Place]:
        """Write one record and sync it; return where its parts lie.

        On failure nothing of it remains, and StoreUnavailableError says why.
        """
        try:
            if self._soiled:
                self._clean()
            if self._wants_new_segment:
                self._begin_segment()
            return self._append(self._active(), parts)
        except OSError as error:
            self._soiled = True
            self._take_back()
            raise StoreUnavailableError(
                f"the log in {self.directory} cannot be written ({error.strerror}); nothing new "
                "was accepted. Free space or mend the disk: the broker tries again by itself",
                directory=str(self.directory),
                errno=error.errno,
            ) from error

    def _append(self, segment: Segment, parts: Sequence[Part]) -> list[Place]:
        table = bytearray(len(parts) * _PART_HEADER.size)
        offset = segment.size + _RECORD_HEADER.size + len(table)
        places: list[Place] = []
        buffers: list[memoryview] = []
        for index, part in enumerate(parts):
            body = memoryview(part.columns.serialize())
            numbers = (part.number, body.nbytes, part.first_sequence, part.time)
            sent = part.sent or _NOT_SENT
            at = index * _PART_HEADER.size
            _PART_HEADER.pack_into(
                table, at, part.kind, part.entity, *numbers, sent.sender, sent.first, sent.count
            )
            places.append(Place(segment.number, offset, body.nbytes))
            padding = _padded(body.nbytes) - body.nbytes
            buffers += [body, memoryview(bytes(padding))]
            offset += body.nbytes + padding
        payload = offset - segment.size - _RECORD_HEADER.size
        checked = _CHECKED_HEADER.pack(len(parts), payload, self._next_record)
        digest = xxhash.xxh3_64(checked, seed=segment.salt)
        digest.update(table)
        for buffer in buffers:
            digest.update(buffer)
        checksum = _CHECKSUM.pack(digest.intdigest())
        header = (_RECORD_MAGIC + checked + checksum).ljust(_RECORD_HEADER.size, b"\0")
        if offset > self._written_to and payload < ZERO_AHEAD_BYTES:
            self._zero_ahead(offset)
        self._storage.write(
            self._descriptor, segment.size, [memoryview(header), memoryview(table), *buffers]
        )
        self._storage.sync(self._descriptor)
        if segment.size == ALIGNMENT:
            segment.head = offset
        segment.size = offset
        self._next_record += 1
        return places

    def _zero_ahead(self, offset: int) -> None:
        """Write zeros where the next small records will go.

        Reserved space that was never written is marked so, and each sync of a record in it has to
        change that mark as well: it takes half as long again.
        """
        end = min(offset + ZERO_AHEAD_BYTES, self._segment_bytes)
        if offset < end:
            with suppress(OSError):  # it only saves time
                os.pwrite(self._descriptor, bytes(end - offset), offset)
        self._written_to = end

    def _begin_segment(self) -> None:
        number = max(self.segments, default=0) + 1
        path = self.directory / f"{number:020d}.log"
        spare = next(iter(self._spares()), self.directory / "new.spare")
        descriptor = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            written = os.fstat(descriptor).st_size  # of a spare: all of it
            salt = int.from_bytes(os.urandom(8), "little")
            fields = _SEGMENT_HEADER.pack(
                _SEGMENT_MAGIC, FORMAT_VERSION, 0, number, self._next_record, salt
            )
            header = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
            self._storage.write(descriptor, 0, [memoryview(header.ljust(ALIGNMENT, b"\0"))])
            with suppress(OSError):  # a disk that cannot reserve may still take what comes
                os.posix_fallocate(descriptor, 0, self._segment_bytes)
            self._storage.sync(descriptor)
            spare.rename(path)
            sync_directory(self.directory)
        except OSError:
            os.close(descriptor)
            raise
        self._end_segment()
        self._descriptor = descriptor
        self._written_to = written
        self.segments[number] = Segment(number, path, ALIGNMENT, salt, ours=True)

    def _spares(self) -> list[Path]:
        """Return files of dropped segments that wait to be written over."""
        return sorted(self.directory.glob("*.spare"))

    def _end_segment(self) -> None:
        """Give back the space that was reserved and not written."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._active().size)
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_back(self) -> None:
        """Remove the bytes of a failed append, so that no restart finds them."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._active().size)
                os.fsync(self._descriptor)

    def _clean(self) -> None:
        """After a failed append: go on in a new segment.

        A failed sync leaves the kernel's view of the pages unknown, so the file is not trusted
        with more.
        """
        self._take_back()
        self._begin_segment()
        self._soiled = False

    def drop(self, number: int) -> None:
        """Give up a segment whose messages are all gone or moved; views of it stay valid."""
        if self._descriptor >= 0 and number == self._active().number:
            self._end_segment()
        segment = self.segments.pop(number)
        spare = segment.ours and len(self._spares()) < SPARE_SEGMENTS and not segment.is_viewed()
        if spare:
            segment.path.rename(segment.path.with_suffix(".spare"))
        else:
            segment.path.unlink()
        sync_directory(self.directory)

    def _active(self) -> Segment:
        return next(reversed(self.segments.values()))

    def close(self) -> None:
        """Let go of the files and the directory."""
        self._end_segment()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _is_torn(view: memoryview, offset: int, number: int) -> bool:
    """Whether the record of this number was begun here; else it is space not yet written."""
    if len(view) - offset < _RECORD_HEADER.size:
        return offset < len(view)
    found: int = _RECORD_HEADER.unpack_from(view, offset)[3]
    return found == number


def _record_end(view: memoryview, offset: int, salt: int, number: int) -> int | None:
    """Return where the record of this number ends, or None if it is not there whole and good."""
    if len(view) - offset < _RECORD_HEADER.size:
        return None
    magic, parts, payload, found, checksum = _RECORD_HEADER.unpack_from(view, offset)
    end: int = offset + _RECORD_HEADER.size + payload
    expected = found == number or (parts == 0 and found > number)  # a gap that was accepted
    if magic != _RECORD_MAGIC or not expected or end > len(view):
        return None
    digest = xxhash.xxh3_64(_CHECKED_HEADER.pack(parts, payload, found), seed=salt)
    digest.update(view[offset + _RECORD_HEADER.size : end])
    return end if digest.intdigest() == checksum else None


def _lock_directory(directory: Path) -> int:
    """Become the one writer of a directory, or say who is."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)
        descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailableError(
            f"{directory} cannot be used as a namespace directory ({error.strerror}); it must be "
            "a directory this user can write to",
            directory=str(directory),
            errno=error.errno,
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise NamespaceInUseError(
            f"{directory} is in use by process {holder}; one process at a time may write a "
            "namespace. Stop it, or connect to it as a server",
            directory=str(directory),
            pid=int(holder) if holder.isdigit() else None,
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor
