r"""The format of the log: segments, records and their parts.

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
    A record without parts stands for lost records up to its number, which accept_damage skipped.

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
    A part is one Arrow IPC record batch of its kind's schema, or rows: of a few messages
    (message_rows.py), or of a few places or ids (entry_rows.py). In format version 2 only messages
    are rows. In version 1 all parts are columns, and messages have no column `amqp`.

    A MESSAGES part with an entity went to this entity completely and in order, each message active
    and without expiry: this common case needs no PLACES, which describe all other cases. A MESSAGES
    part with a sender says that these numbers of the sender were accepted. FACTS contain all other
    accepted numbers.

log.py writes the log; log_reading.py reads and repairs it at a start.
"""

import mmap
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from twinbus.broker.store.entry_rows import entry_rows_in
from twinbus.broker.store.message_rows import rows_in
from twinbus.message import MESSAGE_SCHEMA, conform

FORMAT_VERSION = 3
ALIGNMENT = 64
SEGMENT_MAGIC = b"TWINBUS\n"
RECORD_MAGIC = b"TBR1"
SEGMENT_HEADER = struct.Struct("<8sIIQQQ")
RECORD_HEADER = struct.Struct("<4sIQQQ32x")
CHECKED_HEADER = struct.Struct("<IQQ")
PART_HEADER = struct.Struct("<IIQQQQQqQ")
CHECKSUM = struct.Struct("<Q")
_OLDEST = struct.Struct("<QQ")  # at byte 48 of a segment
SEAL_MAGIC = b"TBSL"
SEAL = struct.Struct("<4sIQQQ32x")
CHECKED_SEAL = struct.Struct("<IQQ")
ZEROS = bytes(ALIGNMENT)


class PartKind(IntEnum):
    """The kinds of parts of a record."""

    FACTS = 1  # keyed values, of which the last is valid: entities, session states, leases ...
    MESSAGES = 2  # message columns, referred to by batch number and row
    PLACES = 3  # which entity has which message under which number, in which state
    CHANGES = 4  # new states of messages that have a place
    HISTORY = 5  # message ids for duplicate detection


SCHEMAS = {
    PartKind.FACTS: pa.schema(
        [("kind", pa.string()), ("key", pa.string()), ("value", pa.binary())]  # null: deleted
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
    columns: Any  # a pa.RecordBatch; MessageRows, EntryRows or ChangeRows for a few messages
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


NOT_SENT = Sent(0, 0, 0)


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
    last: int = ALIGNMENT  # beginning of the last record that was read from it
    is_own: bool = False  # whether the open log began it: then `_maps` has all mappings of it
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
        """Return whether views of its bytes exist: then the file must not be overwritten."""
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


def read_part(content: pa.Buffer, kind: PartKind, version: int) -> Any:
    """Return the content of a part."""
    if kind is PartKind.MESSAGES:
        if version == 1:
            return conform(pa.ipc.read_record_batch(content, _MESSAGE_SCHEMA_1))
        rows = rows_in(content)
        if rows is not None:
            return rows
    elif kind in (PartKind.PLACES, PartKind.HISTORY):
        entries = entry_rows_in(content)
        if entries is not None:
            return entries
    return pa.ipc.read_record_batch(content, SCHEMAS[kind])


def padded(length: int) -> int:
    """Return a length with its padding."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def header_of(segment: Segment) -> bytes:
    """Return the header of a segment file."""
    fields = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, segment.version, 0, segment.number, segment.first_record, segment.salt
    )
    checksum = CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return (
        fields + checksum + _OLDEST.pack(segment.oldest, _oldest_checksum(fields, segment.oldest))
    )


def _oldest_checksum(fields: bytes, oldest: int) -> int:
    return xxhash.xxh3_64_intdigest(fields + CHECKSUM.pack(oldest))


def oldest_needed(path: Path) -> int:
    """Return the oldest needed segment from a segment's header; 0 if it is not recorded."""
    with path.open("rb") as file:
        header = file.read(ALIGNMENT)
    if len(header) < ALIGNMENT:
        return 0
    oldest, checksum = _OLDEST.unpack_from(header, ALIGNMENT - _OLDEST.size)
    good = checksum == _oldest_checksum(header[: SEGMENT_HEADER.size], oldest)
    return int(oldest) if good else 0


def first_record_of(path: Path) -> int | None:
    """Return the number of a segment's first record from its header; None if it is damaged."""
    with path.open("rb") as file:
        header = file.read(ALIGNMENT)
    if len(header) < ALIGNMENT:
        return None
    (checksum,) = CHECKSUM.unpack_from(header, SEGMENT_HEADER.size)
    if checksum != xxhash.xxh3_64_intdigest(header[: SEGMENT_HEADER.size]):
        return None
    first: int = SEGMENT_HEADER.unpack_from(header)[4]
    return first


def sealed_for(view: memoryview, offset: int, salt: int) -> int:
    """Return the number of the next segment from a seal at this offset; 0 if there is no seal."""
    if len(view) - offset < SEAL.size:
        return 0
    magic, zero, successor, record, checksum = SEAL.unpack_from(view, offset)
    checked = CHECKED_SEAL.pack(zero, successor, record)
    good = magic == SEAL_MAGIC and checksum == xxhash.xxh3_64_intdigest(checked, seed=salt)
    return int(successor) if good else 0


def is_torn(view: memoryview, offset: int, number: int) -> bool:
    """Return whether a write of this record, which is not complete, began at this offset."""
    if len(view) - offset < RECORD_HEADER.size:
        return offset < len(view)
    found: int = RECORD_HEADER.unpack_from(view, offset)[3]
    return found == number


def record_end(view: memoryview, offset: int, salt: int, number: int) -> int | None:
    """Return the end of the record with this number; None if it is not complete and valid."""
    if len(view) - offset < RECORD_HEADER.size:
        return None
    magic, parts, payload, found, checksum = RECORD_HEADER.unpack_from(view, offset)
    end: int = offset + RECORD_HEADER.size + payload
    expected = found == number or (parts == 0 and found > number)  # or: an accepted gap
    if magic != RECORD_MAGIC or not expected or end > len(view):
        return None
    digest = xxhash.xxh3_64(CHECKED_HEADER.pack(parts, payload, found), seed=salt)
    digest.update(view[offset + RECORD_HEADER.size : end])
    return end if digest.intdigest() == checksum else None
