"""Reads a log when its directory is opened, and decides what is torn, damaged or missing.

Each record is synced before the next is written, so only the last record can be torn. A torn tail
is cut off and its bytes are kept in `cut/`. A bad record followed by good ones is damage. Because
of the salt, a message body that is a copy of some log cannot look like a good record.

A missing segment is always detected. A segment is sealed when the next one is on the disk. So if
the last segment is sealed, its successors are missing. The header of the newest segment records
which segment is the oldest needed.

Damage and missing segments raise `LogDamagedError`. If the operator accepts the damage, a record
without parts replaces the lost records, so that the next start finds a good log. Only log.py uses
this, once, before the first record is appended.
"""

import mmap
import os
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import xxhash

from twinbus.broker.store.log_format import (
    ALIGNMENT,
    CHECKED_HEADER,
    CHECKSUM,
    FORMAT_VERSION,
    PART_HEADER,
    RECORD_HEADER,
    RECORD_MAGIC,
    SEAL,
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    Part,
    PartKind,
    PartPosition,
    Record,
    Segment,
    Sent,
    first_record_of,
    header_of,
    is_torn,
    oldest_needed,
    padded,
    read_part,
    record_end,
    sealed_for,
)
from twinbus.broker.store.storage import Storage
from twinbus.errors import LogDamagedError, NewerFormatError
from twinbus.files import create_private, make_private

_NAME = re.compile(r"\d{20}\.log")


class LogReader:
    """Reads the segments of a log, oldest first."""

    def __init__(self, directory: Path, storage: Storage, *, accept_damage: bool) -> None:
        self._directory = directory
        self._storage = storage
        self._accept_damage = accept_damage
        self.segments: dict[int, Segment] = {}  # oldest first; as far as they were read
        self.next_record = 1  # the number after the last record
        self.cut_bytes = 0  # size of the torn tail

    def records(self) -> Iterator[Record]:
        """Yield every record in order; cut off a torn tail."""
        paths = sorted(path for path in self._directory.iterdir() if _NAME.fullmatch(path.name))
        paths = self._needed(paths)
        for path, following in zip_longest(paths, paths[1:]):
            segment = Segment(int(path.stem), path, path.stat().st_size)
            last = following is None
            if last and segment.size < ALIGNMENT:
                self._check_newest()
                self._cut(segment, 0)
                self._storage.remove(path)
                break
            self.segments[segment.number] = segment
            before = None if following is None else first_record_of(following)
            yield from self._read_segment(segment, before, last=last)
        self._check_newest()
        if self.segments and self._accept_damage:
            newest = next(reversed(self.segments.values()))
            newest.oldest = min(self.segments)
            overwrite(self._storage, newest, 0, header_of(newest))

    def _needed(self, paths: list[Path]) -> list[Path]:
        """Return the segments that the newest one needs; raise if the oldest of them are missing.

        Remove older segments: the broker ended before it could remove them.
        """
        oldest = max((oldest_needed(path) for path in paths[-1:]), default=0)
        for path in [path for path in paths if int(path.stem) < oldest]:
            self._storage.remove(path)
        paths = [path for path in paths if int(path.stem) >= oldest]
        if paths and oldest and int(paths[0].stem) > oldest and not self._accept_damage:
            raise LogDamagedError(
                f"segments {oldest} to {int(paths[0].stem) - 1} of the log in {self._directory} "
                "are missing, but the newest segment needs them. Restore them from a "
                f"backup, or run `twinbus restored --accept-damage {self._directory.parent}` and "
                "lose their content",
                path=str(self._directory / f"{oldest:020d}.log"),
                segment=oldest,
            )
        return paths

    def _check_newest(self) -> None:
        """Raise if the newest segment is sealed: then its successor is missing."""
        newest = next(reversed(self.segments.values()), None)
        if newest and newest.successor and self._accept_damage:
            overwrite(self._storage, newest, newest.size, bytes(SEAL.size))
        elif newest and newest.successor:
            raise LogDamagedError(
                f"segment {newest.successor} of the log in {self._directory} is missing, and all "
                f"after it: segment {newest.number} is sealed, so its successor was on the disk. "
                "Restore it from a backup, or run "
                f"`twinbus restored --accept-damage {self._directory.parent}` and lose its content",
                path=str(self._directory / f"{newest.successor:020d}.log"),
                segment=newest.successor,
            )

    def _read_segment(
        self, segment: Segment, before: int | None, *, last: bool
    ) -> Iterator[Record]:
        """Yield the records of a segment with lower numbers than `before`.

        `before` is the number of the first record of the next segment. A record whose sync failed
        was removed, and the next segment begins with its number. If the disk failed to remove it
        from this segment, it is ignored.
        """
        content = segment.mapped(segment.size)
        view = memoryview(content)
        self._check_segment_header(segment, view)
        offset = ALIGNMENT
        while offset < len(view) and (before is None or self.next_record < before):
            end = record_end(view, offset, segment.salt, self.next_record)
            if end is not None:
                segment.last = offset
                record = _parse(segment, pa.py_buffer(content), offset)
                if record.parts:  # a record without parts replaces lost ones
                    yield record
                self.next_record = record.number + 1
                if record.parts and segment.head == ALIGNMENT:
                    segment.head = end
                offset = end
                continue
            following = self._find_record(segment, content, offset + ALIGNMENT)
            if following is None:
                break
            offset = self._skip_damage(segment, offset, following)
        segment.successor = sealed_for(view, offset, segment.salt)
        if last and not segment.successor and is_torn(view, offset, self.next_record):
            self._cut(segment, offset)
        segment.size = offset

    def _find_record(self, segment: Segment, content: mmap.mmap, offset: int) -> int | None:
        """Return the offset of the next good record after a bad one; None if there is none.

        A later good record proves that the bad one is damage, and not a torn tail.

        The search ends one byte early: some Pythons (3.11.2) read the byte after the searched
        range. After the end of a mapping, this may kill the process.
        """
        view = memoryview(content)
        end = len(view) - 1
        start = content.find(RECORD_MAGIC, offset, end)
        while start >= 0:
            if start % ALIGNMENT == 0 and start + RECORD_HEADER.size <= len(view):
                number = RECORD_HEADER.unpack_from(view, start)[3]
                later = number > self.next_record
                if later and record_end(view, start, segment.salt, number) is not None:
                    return start
            start = content.find(RECORD_MAGIC, start + 1, end)
        return None

    def _check_segment_header(self, segment: Segment, view: memoryview) -> None:
        magic, version, _, number, first, segment.salt = SEGMENT_HEADER.unpack_from(view, 0)
        segment.first_record, segment.version = int(first), version
        if magic == SEGMENT_MAGIC and version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{segment.path} was written in format {version}; this Twinbus reads up to "
                f"{FORMAT_VERSION}. Nothing was changed: start the broker with the newer Twinbus",
                path=str(segment.path),
                version=version,
            )
        (checksum,) = CHECKSUM.unpack_from(view, SEGMENT_HEADER.size)
        good = checksum == xxhash.xxh3_64_intdigest(view[: SEGMENT_HEADER.size])
        if magic != SEGMENT_MAGIC or not good or number != segment.number:
            raise LogDamagedError(
                f"{segment.path} does not have the header of segment {segment.number} of a log; "
                "restore the file from a backup",
                path=str(segment.path),
                offset=0,
            )
        missing = len(self.segments) > 1 and first != self.next_record
        if missing and not self._accept_damage:
            raise LogDamagedError(
                f"{segment.path} begins with record {first}, but record {self.next_record} was "
                "expected: the end of the previous segment, or a complete segment, is missing. "
                "Restore it from a backup, or run `twinbus restored --accept-damage "
                f"{self._directory.parent}` and lose its content",
                path=str(segment.path),
                offset=0,
                record=self.next_record,
            )
        if missing:
            before = self.segments[sorted(self.segments)[-2]]
            end = before.size + RECORD_HEADER.size
            fill_gap(self._storage, before, before.size, end, int(first) - 1)
            before.size = end
        self.next_record = int(first)

    def _skip_damage(self, segment: Segment, offset: int, end: int) -> int:
        """Replace damaged bytes by a record without parts, or raise; return where they end."""
        if not self._accept_damage:
            raise LogDamagedError(
                f"{segment.path}: record {self.next_record} at byte {offset} fails its checksum "
                "and later records are intact, so this is damage, not an interrupted write. "
                "Restore the file from a backup, or run `twinbus restored --accept-damage "
                f"{self._directory.parent}`: it keeps the damaged bytes in cut/, and their content "
                "is lost",
                path=str(segment.path),
                offset=offset,
                record=self.next_record,
            )
        self._keep_aside(segment, offset, end)
        following: int = RECORD_HEADER.unpack_from(segment.mapped(end), end)[3]
        fill_gap(self._storage, segment, offset, end, following - 1)
        self.next_record = following
        return end

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
        """Copy bytes to `cut/` for the operator; return how many, without zeros at the end."""
        aside = self._directory / "cut"
        make_private(aside)
        with segment.path.open("rb") as file:
            file.seek(start)
            content = file.read(end - start).rstrip(b"\0")
        with create_private(aside / f"{segment.path.stem}-{start}.bytes") as kept:
            kept.write(content)
        return len(content)


def fill_gap(storage: Storage, segment: Segment, offset: int, end: int, number: int) -> None:
    """Write a record without parts in place of lost records: the next start finds no damage.

    `number` is the number of the last lost record.
    """
    payload = bytes(end - offset - RECORD_HEADER.size)
    checked = CHECKED_HEADER.pack(0, len(payload), number)
    digest = xxhash.xxh3_64(checked, seed=segment.salt)
    digest.update(payload)
    header = RECORD_MAGIC + checked + CHECKSUM.pack(digest.intdigest())
    overwrite(storage, segment, offset, header.ljust(RECORD_HEADER.size, b"\0") + payload)


def overwrite(storage: Storage, segment: Segment, offset: int, content: bytes) -> None:
    """Overwrite a part of a segment, durably."""
    descriptor = storage.create(segment.path)
    try:
        storage.write(descriptor, offset, [memoryview(content)])
        storage.sync(descriptor)
    finally:
        os.close(descriptor)


def _parse(segment: Segment, content: pa.Buffer, offset: int) -> Record:
    _, count, _, number, _ = RECORD_HEADER.unpack_from(content, offset)
    table = offset + RECORD_HEADER.size
    at = table + count * PART_HEADER.size
    parts = []
    for index in range(count):
        header = PART_HEADER.unpack_from(content, table + index * PART_HEADER.size)
        kind, entity, batch_number, length, first_sequence, time, *numbers = header
        place = PartPosition(segment.number, at, length)
        columns = read_part(content.slice(at, length), PartKind(kind), segment.version)
        sent = Sent(*numbers) if numbers[0] else None
        part = Part(PartKind(kind), columns, batch_number, entity, first_sequence, time, sent)
        parts.append((part, place))
        at += padded(length)
    return Record(number, tuple(parts))
