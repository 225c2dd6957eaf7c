"""The log: append-only segments of commit records, one checksum and one sync per record.

The docstring of log_format.py shows the layout of segments and records. The thread with the turn
appends.

A segment's space is reserved when it begins, and the files of dropped segments are overwritten: a
sync that does not extend the file takes half the time. The bytes after the last record are zeros or
old records, whose checksums do not match the new salt. A segment is renamed to its name when its
header is on the disk.

Each record is synced before the next is written, so only the last record can be torn. A segment is
sealed when the next one is on the disk. Before the oldest segment is removed, the header of the
newest one records which segment is the oldest needed. log_reading.py reads the log at a start; the
seals and headers show it which segments are missing.

LOCK contains the number of a durable record: the first of the newest segment, or the last one after
the log was closed. So the engine notices if all segments are missing, and refuses to start. If LOCK
contains the last record, a start need not write this record again to a disk that may be full.

`reserve` is a file of reserved space: when the disk is full, records that free space go there.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from twinbus.broker.store.directory_lock import lock_directory, write_lock
from twinbus.broker.store.log_format import (
    ALIGNMENT,
    CHECKED_HEADER,
    CHECKED_SEAL,
    CHECKSUM,
    FORMAT_VERSION,
    NOT_SENT,
    PART_HEADER,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEAL,
    SEAL_MAGIC,
    ZEROS,
    Part,
    PartKind,
    PartPosition,
    Record,
    Segment,
    header_of,
    read_part,
)
from twinbus.broker.store.log_reading import LogReader, fill_gap
from twinbus.broker.store.message_rows import StoredRows
from twinbus.broker.store.storage import DiskStorage, Storage
from twinbus.errors import (
    StoreUnavailableError,
)
from twinbus.limits import RESERVE_BYTES, SEGMENT_BYTES, SPARE_SEGMENTS, ZERO_AHEAD_BYTES

_NEW = "new.spare"  # the name of a segment before it gets its own


class Log:
    """The log of a directory. Open it, replay it, then append; one process at a time."""

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
        self.is_on_reserve = False  # whether the active segment uses the reserve: the disk is full
        # Whether the disk had no space for the last record that does not free space.
        self.is_full = False
        self._lock, self.seen_record = lock_directory(directory)
        self.segments: dict[int, Segment] = {}  # oldest first
        self._newest: Segment | None = None  # the active segment, to which records are appended
        self._older_bytes = 0  # size of all other segments
        self.cut_bytes = 0  # size of the torn tail found at the start
        self._next_record = 1
        self._descriptor = -1
        # Whether bytes of a failed append may follow the last good record.
        self._has_leftovers = False
        self._written_to = 0  # offset in the active segment from which space was never written
        self._is_replayed = False  # whether every record was read, and the last one is durable

    # -- reading -------------------------------------------------------------------------------

    def replay(self) -> Iterator[Record]:
        """Yield every record in order; cut off a torn tail. Must be exhausted before `append`."""
        reader = LogReader(self.directory, self._storage, accept_damage=self._accept_damage)
        self.segments = reader.segments
        yield from reader.records()
        self._next_record, self.cut_bytes = reader.next_record, reader.cut_bytes
        self._note_segments()
        if self.segments:
            self._descriptor = self._storage.create(self._active().path)
            self._make_durable(self._active())
        self._is_replayed = True
        self._keep_reserve()
        if self._reserve is not None and self.segments:
            # The reserve is missing if it was used and the disk is still full.
            self.is_on_reserve = not self.has_reserve

    def _make_durable(self, newest: Segment) -> None:
        """Write the last record again and sync it, and sync the names of the segments.

        The previous process may have died between the write and the sync, or the sync may have
        failed. Then the record can be read until the power fails, but no later sync writes it. A
        record whose number is in LOCK is durable.
        """
        record = newest.mapped(newest.size)[newest.last : newest.size]
        try:
            if self.last_record != self.seen_record:
                self._storage.write(self._descriptor, newest.last, [memoryview(record)])
                self._storage.sync(self._descriptor)
            self._storage.sync_directory(self.directory)
        except OSError as error:
            raise StoreUnavailableError(
                f"the last record of the log in {self.directory} cannot be written to the disk "
                f"({error.strerror}), so a power cut could lose it. Nothing was changed: free "
                "space or repair the disk, and start again",
                directory=str(self.directory),
                errno=error.errno,
            ) from error

    def read(self, place: PartPosition) -> pa.RecordBatch:
        """Return the messages at a position as columns."""
        stored = self.read_stored(place)
        return stored.batch() if isinstance(stored, StoredRows) else stored

    def read_stored(self, place: PartPosition) -> pa.RecordBatch | StoredRows:
        """Return the messages at a position as they are stored: a view of the file."""
        segment = self.segments[place.segment]
        content: pa.RecordBatch | StoredRows = read_part(
            segment.buffer(place), PartKind.MESSAGES, segment.version
        )
        return content

    # -- writing -------------------------------------------------------------------------------

    @property
    def begins_segment(self) -> bool:
        """Whether the next record is the first of its segment."""
        return self._wants_new_segment or self._active().head == ALIGNMENT

    def needs_facts(self, *, frees_space: bool) -> bool:
        """Return whether the next record is the first of its segment and must contain every fact.

        A record that does not free space cannot use the reserve, so it also begins a new segment.
        """
        return self.begins_segment or (self.is_on_reserve and not frees_space)

    @property
    def has_head(self) -> bool:
        """Whether the active segment has its first record, which contains every fact."""
        return bool(self.segments) and self._active().head > ALIGNMENT

    @property
    def first_record(self) -> int:
        """The number of the oldest record that the log may still have."""
        return next(iter(self.segments.values())).first_record if self.segments else 0

    @property
    def _wants_new_segment(self) -> bool:
        active = self._newest
        if active is None or self._has_leftovers:
            return True
        is_old = active.version < FORMAT_VERSION  # readers of that version cannot read new records
        return is_old or active.size - active.head >= self._segment_bytes

    @property
    def last_record(self) -> int:
        """The number of the last record."""
        return self._next_record - 1

    @property
    def size_in_bytes(self) -> int:
        """The size of all segments in bytes."""
        return self._older_bytes + (0 if self._newest is None else self._newest.size)

    @property
    def size_without_heads(self) -> int:
        """The size of all segments in bytes, without their first records, which contain facts."""
        return sum(segment.size - segment.head for segment in self.segments.values())

    def append(self, parts: Sequence[Part], *, frees_space: bool = False) -> list[PartPosition]:
        """Write a record and sync it; return the positions of its parts.

        If this fails, nothing of the record remains, and StoreUnavailableError has the reason. The
        next append goes to a new segment. On a full disk, a record that frees space goes to the
        reserve. If the failure came before the log could leave the reserve, nothing was written,
        and the reserve stays in use.
        """
        is_reserve_intact = self.is_on_reserve and not self._has_leftovers
        try:
            if self._has_leftovers or self.is_on_reserve or self._wants_new_segment:
                self._prepare(frees_space=frees_space)
            is_reserve_intact = False
            places = self._append(self._active(), parts)
        except OSError as error:
            self.is_full = error.errno == errno.ENOSPC
            if not (is_reserve_intact and self._has_removed_unfinished()):
                self._has_leftovers = True
                self._remove_leftovers()
            raise StoreUnavailableError(
                f"the log in {self.directory} cannot be written ({error.strerror}); nothing new "
                "was accepted. Free space or repair the disk; the broker then continues by itself",
                directory=str(self.directory),
                errno=error.errno,
            ) from error
        self.is_full = self.is_full and frees_space
        return places

    def _prepare(self, *, frees_space: bool) -> None:
        """Ensure that the active segment can accept a record.

        After a failed append, the log continues in a new segment: after a failed sync the content
        of the page cache is unknown, so the file is not used any more.

        The reserve is only for records that free space. Any other record needs a new segment, and
        the reserve must exist again before that: otherwise nothing could be settled when the disk
        is full again.
        """
        if self._has_leftovers:
            self._remove_leftovers()
        leaves_reserve = self.is_on_reserve and not frees_space
        if not (self._has_leftovers or leaves_reserve or self._wants_new_segment):
            return
        try:
            if leaves_reserve and self._reserve is not None:
                self._make_reserve(self._reserve)
            self._begin_segment(must_reserve=leaves_reserve)
            self.is_on_reserve = False
        except OSError as error:
            if error.errno != errno.ENOSPC or not frees_space or not self.has_reserve:
                raise
            self._begin_segment(self._reserve)
            self.is_on_reserve = True
        self._has_leftovers = False
        self._keep_reserve()

    @property
    def has_reserve(self) -> bool:
        """Whether the reserve exists."""
        return self._reserve is not None and self._reserve.exists()

    @property
    def reserve_left(self) -> int:
        """How many bytes of the reserve are left for records."""
        if self.is_on_reserve:
            return max(0, self._reserve_bytes - self._active().size)
        return self._reserve_bytes if self.has_reserve else 0

    @property
    def _reserve_bytes(self) -> int:
        return min(RESERVE_BYTES, self._segment_bytes)

    def _keep_reserve(self) -> None:
        """Create the reserve again if it was used and the disk has space; ignore failures."""
        if self._reserve is not None and not self.is_on_reserve:
            with suppress(OSError):
                self._make_reserve(self._reserve)

    def _make_reserve(self, reserve: Path) -> None:
        """Create the reserve if it is missing; raise OSError if the disk has no space for it."""
        if reserve.exists():
            return
        draft = reserve.with_suffix(".draft")
        spare = next(iter(self._spares()), None)
        if self.is_on_reserve and spare is not None:
            self._storage.rename(spare, draft)  # a full disk may have no other space
        descriptor = self._storage.create(draft, self._reserve_bytes)
        try:
            _check_space(descriptor, self._reserve_bytes)
            self._storage.truncate(descriptor, self._reserve_bytes)
        except OSError:
            self._storage.remove(draft)
            raise
        finally:
            os.close(descriptor)
        self._storage.rename(draft, reserve)

    def _append(self, segment: Segment, parts: Sequence[Part]) -> list[PartPosition]:
        offset = segment.size + RECORD_HEADER.size + len(parts) * PART_HEADER.size
        places: list[PartPosition] = []
        table: list[bytes] = []
        buffers: list[Any] = []
        for part in parts:
            body = part.columns.serialize()
            length = len(body)
            padding = -length % ALIGNMENT
            sent = part.sent or NOT_SENT
            numbers = (part.number, length, part.first_sequence, part.time, *sent)
            table.append(PART_HEADER.pack(part.kind, part.entity, *numbers))
            places.append(PartPosition(segment.number, offset, length))
            buffers += (body, ZEROS[:padding])
            offset += length + padding
        payload = offset - segment.size - RECORD_HEADER.size
        head = b"".join(table)
        if payload < ZERO_AHEAD_BYTES:  # small: one buffer is cheaper to checksum and write
            head, buffers = b"".join((head, *buffers)), []
        checked = CHECKED_HEADER.pack(len(parts), payload, self._next_record)
        digest = xxhash.xxh3_64(checked + head, seed=segment.salt)
        for buffer in buffers:
            digest.update(buffer)
        header = RECORD_HEADER.pack(
            RECORD_MAGIC, len(parts), payload, self._next_record, digest.intdigest()
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
            write_lock(self._lock, self.last_record)
        return places

    def _zero_ahead(self, offset: int) -> None:
        """Write zeros at the position of the next small records.

        The file system marks reserved space that was never written. A sync of a record in such
        space must also change this mark, and takes 50 % longer.
        """
        end = min(offset + ZERO_AHEAD_BYTES, self._segment_bytes)
        if offset < end:
            with suppress(OSError):  # the zeros only save time
                self._storage.write(self._descriptor, offset, [memoryview(bytes(end - offset))])
        self._written_to = end

    def _begin_segment(self, spare: Path | None = None, *, must_reserve: bool = False) -> None:
        """Begin a segment in `spare`, in the file of a dropped segment, or in a new file.

        With `must_reserve`, raise OSError if the disk has no space for the segment.
        """
        number = max(self.segments, default=0) + 1
        path = self.directory / f"{number:020d}.log"
        spare = spare or next(iter(self._spares()), self.directory / _NEW)
        is_reserve = spare == self._reserve
        is_old = spare.suffix == ".spare" and spare.name != _NEW and spare.exists()
        written = spare.stat().st_size if is_old else 0
        size = self._reserve_bytes if must_reserve else self._segment_bytes
        descriptor = self._storage.create(spare, 0 if is_reserve else size)
        try:
            if must_reserve:
                _check_space(descriptor, size)
            salt = int.from_bytes(os.urandom(8), "little")
            segment = Segment(
                number, path, ALIGNMENT, salt, is_own=True, first_record=self._next_record
            )
            segment.oldest = min(self.segments, default=number)
            self._storage.write(descriptor, 0, [memoryview(header_of(segment))])
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
        self._note_segments()

    def _spares(self) -> list[Path]:
        """Return the files of dropped segments that can be overwritten."""
        return sorted(path for path in self.directory.glob("*.spare") if path.name != _NEW)

    def _end_segment(self, successor: int = 0) -> None:
        """Release the unused space of the active segment; seal it if `successor` is not 0."""
        if self._descriptor < 0:
            return
        active, end = self._active(), self._active().size
        with suppress(OSError):  # the bytes after the last record are not needed
            if successor:
                checked = CHECKED_SEAL.pack(0, successor, self.last_record)
                digest = xxhash.xxh3_64_intdigest(checked, seed=active.salt)
                seal = (SEAL_MAGIC + checked + CHECKSUM.pack(digest)).ljust(SEAL.size, b"\0")
                self._storage.write(self._descriptor, end, [memoryview(seal)])
                end += SEAL.size
            self._storage.truncate(self._descriptor, end)
            if successor:
                self._storage.sync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1

    def _remove_leftovers(self) -> None:
        """Remove the bytes of a failed append, so that no restart reads them."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._storage.truncate(self._descriptor, self._active().size)
                self._storage.sync(self._descriptor)

    def skip_to(self, record: int) -> None:
        """Continue after this record number, because the records up to it are lost.

        Their numbers are not used again: the ledger may have rows of these records. If the log has
        this record, do nothing.
        """
        if record < self._next_record:
            return
        if self.segments:
            active = self._active()
            end = active.size + RECORD_HEADER.size
            fill_gap(self._storage, active, active.size, end, record)
            active.size = end
        self._next_record = record + 1

    def drop(self, number: int) -> None:
        """Drop a segment whose messages are all gone or moved; views of its bytes stay valid."""
        if self._descriptor >= 0 and number == self._active().number:
            self._end_segment()
        segment = self.segments.pop(number)
        self._note_segments()
        with suppress(OSError):  # a file that remains is read again at the next start
            if self._descriptor >= 0:
                self._remove_unfinished()
                active = self._active()
                active.oldest = min(self.segments)
                self._storage.write(self._descriptor, 0, [memoryview(header_of(active))])
                self._storage.sync(self._descriptor)
            is_free = segment.is_own and not segment.is_viewed()
            if is_free and len(self._spares()) < SPARE_SEGMENTS:
                self._storage.rename(segment.path, segment.path.with_suffix(".spare"))
            else:
                self._storage.remove(segment.path)
            self._storage.sync_directory(self.directory)
        self._keep_reserve()

    def _has_removed_unfinished(self) -> bool:
        """Remove the file of a segment that could not be finished; return whether it is gone."""
        try:
            self._remove_unfinished()
        except OSError:
            return False
        return True

    def _remove_unfinished(self) -> None:
        """Remove the file of a segment that `_begin_segment` could not finish.

        The header of this file says that the log needs the oldest segment, and which record is the
        first that is not in the active one. Both become wrong: the oldest segment is about to be
        dropped, or further records go to the active one.
        """
        path = self.directory / f"{self._active().number + 1:020d}.log"
        if path.exists():
            self._storage.remove(path)
            self._storage.sync_directory(self.directory)

    def _active(self) -> Segment:
        assert self._newest is not None
        return self._newest

    def _note_segments(self) -> None:
        """Take note that a segment was added or removed."""
        segments = list(self.segments.values())
        self._newest = segments.pop() if segments else None
        self._older_bytes = sum(segment.size for segment in segments)

    def close(self) -> None:
        """Release the files and the directory."""
        self._end_segment()
        if self._lock >= 0:
            if self.segments and self._is_replayed:  # a refused start leaves LOCK as it was
                write_lock(self._lock, max(self.last_record, self.seen_record))
            os.close(self._lock)
            self._lock = -1

    def crash(self) -> None:
        """Close the files as the system does for a killed process: nothing is written."""
        for descriptor in (self._descriptor, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._lock = -1


def _check_space(descriptor: int, size: int) -> None:
    """Raise OSError if a file has less space than this on the disk, and the disk has no more.

    A file system that compresses, or that cannot reserve space, gives an empty file no blocks.
    """
    system = os.fstatvfs(descriptor)
    if max(os.fstat(descriptor).st_blocks * 512, system.f_bavail * system.f_frsize) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
