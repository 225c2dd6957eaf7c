"""Values in frames: a Python value becomes a part of the head, or bytes of the body.

Values of the head are those of plain.py, and in addition:

    {"$": "numbers", "at", "size"}      64-bit integers              bytes of the body
    {"$": "pairs", "at", "size"}        intervals, packed            bytes of the body
    {"$": "tokens", "at", "size"}       lock tokens                  bytes of the body
    {"$": "blob", "at", "size"}         bytes                        bytes of the body
    {"$": "batch", "at", "size"}        an Arrow stream              bytes of the body
    {"$": "run", "first", "count"}      consecutive numbers
    {"$": "span", "days", "seconds", "us"}    a length of time

`at` is the offset in the body and `size` the number of bytes. Compressed batches of messages are
refused, because a few bytes could decompress to gigabytes. A peer may send anything: bytes that
cannot be decoded raise `InvalidArgumentError`. wire.py uses this for each frame.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from twinbus.entities import DESCRIPTIONS
from twinbus.errors import InvalidArgumentError
from twinbus.intervals import PACKED_BYTES, pack, unpack
from twinbus.limits import MAX_BATCH_MESSAGES
from twinbus.message import LOCK_TOKEN
from twinbus.plain import Kinds, Plain
from twinbus.protocol import commands as c
from twinbus.protocol.frames import Buffers, frame
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.values import shown

_VALUES = (
    c.Origin,
    c.SendReceipt,
    c.SessionLock,
    c.SessionGrant,
    c.RangeLease,
    c.DeadLetterPart,
    c.ReceiveMode,
    c.Disposition,
    c.EntityKind,
    SharedAccessKey,
    Claim,
)
KINDS = Kinds((*_VALUES, *DESCRIPTIONS))
FEW_NUMBERS = 16  # encoded in the head; for more, a blob is cheaper


class ValueEncoder(Plain):
    """Encodes values into the head and the body of a frame."""

    def __init__(self) -> None:
        super().__init__(KINDS)
        self.body: list[Any] = []
        self.size = 0

    def dump(self, value: Any) -> Any:
        """Return a value for the head; long values are put into the body."""
        kind = type(value)
        if value is None or kind is str or kind is int or kind is bool:
            return value
        if kind is range and value.step == 1:
            return {"$": "run", "first": value.start, "count": len(value)}
        if kind in (range, np.ndarray) or (
            kind in (list, tuple)
            and len(value) > FEW_NUMBERS
            and all(type(number) is int for number in value)
        ):
            return self.put("numbers", np.asarray(value, np.int64).tobytes())
        if kind in (list, tuple) and len(value) > FEW_NUMBERS and all(map(_is_pair, value)):
            return self.put("pairs", pack(value))
        if kind is bytes:
            return self.put("blob", value)
        if isinstance(value, pa.FixedSizeBinaryArray):
            return self.put("tokens", b"".join(value.to_pylist()))
        if isinstance(value, pa.RecordBatch):
            return self.put("batch", _to_ipc(value))
        return super().dump(value)

    def _dump_scalar(self, value: Any) -> Any:
        if type(value) is timedelta:  # the longest one, in microseconds, exceeds 64 bits
            days, seconds, us = value.days, value.seconds, value.microseconds
            return {"$": "span", "days": days, "seconds": seconds, "us": us}
        return super()._dump_scalar(value)

    def put(self, kind: str, blob: Any) -> dict[str, Any]:
        """Put bytes into the body; return a reference to them."""
        at, size = self.size, len(blob)
        padding = -size % 8  # aligns the next blob, as Arrow requires
        self.body.append(blob)
        if padding:
            self.body.append(b"\0" * padding)
        self.size += size + padding
        return {"$": kind, "at": at, "size": size}

    def put_bodies(self, bodies: Iterable[bytes | memoryview]) -> None:
        """Put the bodies of rows into the body, one directly after the other."""
        for body in bodies:
            self.body.append(body)
            self.size += len(body)
        padding = -self.size % 8
        if padding:
            self.body.append(b"\0" * padding)
            self.size += padding

    def frame(self, head: Sequence[Any]) -> Buffers:
        """Return the frame of a head whose values this encoder has encoded."""
        return frame(head, self.body, self.size)


def _is_pair(value: Any) -> bool:
    """Return whether a value is an interval: two integers."""
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and type(value[0]) is int
        and type(value[1]) is int
    )


class ValueDecoder(Plain):
    """Decodes values from the head and the body of a frame."""

    def __init__(self, body: memoryview, *, may_have_batches: bool) -> None:
        super().__init__(KINDS)
        self._body = body
        self._may_have_batches = may_have_batches

    def _load_scalar(self, kind: Any, plain: dict[str, Any]) -> Any:
        if kind == "run":
            first, count = plain["first"], plain["count"]
            if type(first) is not int or type(count) is not int:
                raise InvalidArgumentError(
                    f"a run of numbers in a frame has first {shown(first)} and count "
                    f"{shown(count)}; both must be integers"
                )
            if not 0 <= count <= MAX_BATCH_MESSAGES:  # a huge run must never be expanded
                raise InvalidArgumentError(
                    f"a frame has a run of {count} numbers; it must have 0 to {MAX_BATCH_MESSAGES}"
                )
            return range(first, first + count)
        if kind == "span":
            return timedelta(plain["days"], plain["seconds"], plain["us"])
        if kind not in ("numbers", "pairs", "tokens", "blob", "batch"):
            return super()._load_scalar(kind, plain)
        return self._load_blob(kind, self.blob(plain))

    def blob(self, plain: Mapping[str, Any]) -> memoryview:
        """Return the bytes to which a value refers."""
        at, size = plain["at"], plain["size"]
        if not 0 <= at <= at + size <= len(self._body):
            raise InvalidArgumentError(
                f"a value refers to {size} bytes at {at} of its frame, whose body has only "
                f"{len(self._body)} bytes"
            )
        return self._body[at : at + size]

    def _load_blob(self, kind: str, blob: memoryview) -> Any:
        if kind == "blob":
            return bytes(blob)
        if kind == "batch":
            if not self._may_have_batches:
                raise InvalidArgumentError(
                    "a field of a command is an Arrow batch; only the messages of a Send may be one"
                )
            return _from_ipc(blob)
        if kind == "numbers":
            return np.frombuffer(blob, np.int64)
        if kind == "pairs":
            if len(blob) > MAX_BATCH_MESSAGES * PACKED_BYTES:
                count = len(blob) // PACKED_BYTES
                raise InvalidArgumentError(
                    f"a frame has {count} intervals; the limit is {MAX_BATCH_MESSAGES}"
                )
            return unpack(blob)
        count, rest = divmod(len(blob), LOCK_TOKEN.byte_width)
        if rest:
            raise InvalidArgumentError(
                f"a frame has {len(blob)} bytes of lock tokens; each token has "
                f"{LOCK_TOKEN.byte_width} bytes"
            )
        return pa.Array.from_buffers(LOCK_TOKEN, count, [None, pa.py_buffer(bytes(blob))])


def _to_ipc(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _from_ipc(blob: memoryview) -> pa.RecordBatch:
    try:
        return pa.ipc.open_stream(pa.py_buffer(blob)).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise InvalidArgumentError(f"a frame has a damaged batch: {error}") from error


def read_columns(blob: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with a schema that both sides know; raise for invalid bytes."""
    try:
        message = pa.ipc.read_message(pa.py_buffer(blob))
        if _is_compressed(message.metadata):
            raise InvalidArgumentError("a frame has a compressed batch; send it uncompressed")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, struct.error, EOFError) as error:
        raise InvalidArgumentError(f"a frame has a damaged batch: {error}") from error
    return batch


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Return whether the metadata of a record batch, a flatbuffer, specify a compression.

    The root is the table Message, whose field 2 is the table RecordBatch, whose field 3 is the
    compression. A table begins with the distance back to its vtable, which has the offset of each
    field, 0 for a missing one.
    """
    view = memoryview(metadata)

    def place_of(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", view, table)[0]
        slot = 4 + 2 * number
        if slot >= struct.unpack_from("<H", view, vtable)[0]:
            return 0
        offset: int = struct.unpack_from("<H", view, vtable + slot)[0]
        return table + offset if offset else 0

    message = struct.unpack_from("<I", view, 0)[0]
    place = place_of(message, 2)
    if not place:
        return False
    return place_of(place + struct.unpack_from("<I", view, place)[0], 3) != 0
