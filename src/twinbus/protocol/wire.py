"""The frames between a client and a server: one TCP connection, many requests in flight.

A client begins with the 8 bytes of MAGIC, which distinguish this protocol from others on the same
port. After that both sides send frames:

    4 bytes   length of the head, little-endian
    4 bytes   length of the body, little-endian
    head      MessagePack: [kind, ...], see FrameKind
    padding   zeros up to a multiple of 8 bytes from the beginning of the frame
    body      bytes to which values in the head refer

    HELLO     [kind, first version, last version, token, namespace id]          client
    WELCOME   [kind, version, namespace id]                                     server
    ASK       [kind, request id, name of the command, fields...]                client
    REPLY     [kind, request id, value]                                         server
    REFUSAL   [kind, request id, code, text, facts]                             server
    TOKEN     [kind, token]                           a new token               client
    WITHDRAW  [kind, request id]                      no reply is needed        client
    PING      [kind]                                  is answered with a PONG   both
    PONG      [kind]                                                            both
    GOODBYE   [kind, code, text, facts]               the last frame            both

Values of the head are those of plain.py, and in addition: {"$": "numbers" | "pairs" | "tokens" |
"blob" | "batch", "at": offset, "size": bytes} refers to bytes in the body; {"$": "run", "first",
"count"} is a run of consecutive numbers; {"$": "span", "days", "seconds", "us"} is a length of
time. A send has its messages as rows (rows.py) or as an Arrow record batch of MESSAGE_SCHEMA; a
reply has them as rows with the broker's facts, or as a batch of DELIVERY_SCHEMA. Compressed Arrow
batches are refused, because a few bytes could decompress to gigabytes.

The size of a client's head is limited (MAX_HEAD_BYTES), because decoding needs a multiple of it.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.entities import DESCRIPTIONS
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    error_of,
)
from twinbus.intervals import PACKED_BYTES, pack, unpack
from twinbus.limits import (
    FRAME_GROWTH,
    LARGE_FRAME_BYTES,
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    MAX_ID_CHARACTERS,
    MAX_REPLY_HEAD_BYTES,
    ROWS_AS_ROWS,
)
from twinbus.message import (
    DELIVERY_SCHEMA,
    LOCK_TOKEN,
    MESSAGE_SCHEMA,
    TEXT_COLUMNS,
    BrokeredMessage,
    application_values,
    as_batch,
)
from twinbus.plain import Kinds, Plain
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.rows import (
    DeliveryRows,
    decode_deliveries,
    decode_rows,
    encode_deliveries,
    encode_rows,
)
from twinbus.protocol.table import ROWS, unknown_command

MAGIC = b"TWINBUS\n"
Buffers = list[bytes | memoryview | pa.Buffer]  # a frame in pieces, in order
Frame = tuple[list[Any], memoryview]  # a decoded frame: its head and its body


class FrameKind(IntEnum):
    """The kind of a frame; see the module docstring."""

    HELLO = 1
    WELCOME = 2
    ASK = 3
    REPLY = 4
    REFUSAL = 5
    TOKEN = 6
    WITHDRAW = 7
    PING = 8
    PONG = 9
    GOODBYE = 10


_ASK, _REPLY = int(FrameKind.ASK), int(FrameKind.REPLY)  # plain ints: used for nearly every frame
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
_COMMANDS: Mapping[str, type[c.Command[Any]]] = {row.kind: row.command for row in ROWS}
_FIELDS: Mapping[type, tuple[str, ...]] = {
    row.command: tuple(field.name for field in fields(cast("Any", row.command))) for row in ROWS
}
_KINDS = Kinds((*_VALUES, *DESCRIPTIONS))
_LENGTHS = struct.Struct("<II")
_PADDING = tuple(bytes(-length % 8) for length in range(8))  # by the length of the head
_FEW_NUMBERS = 16  # encoded in the head; for more, a blob is cheaper
_NO_DELIVERIES = pa.RecordBatch.from_pylist([], DELIVERY_SCHEMA)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


# -- frames ----------------------------------------------------------------------------------------


def frame(head: Sequence[Any], body: Iterable[Any] = (), size: int = 0) -> Buffers:
    """Return a frame in pieces; `size` is the length of the body."""
    packed = _pack(head)
    length = len(packed)
    start = _LENGTHS.pack(length, size) + packed + _PADDING[length % 8]
    return [start, *body] if size else [start]


def _pack(head: Sequence[Any]) -> bytes:
    try:
        return _encode(head)
    except (TypeError, ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"a value cannot be encoded: {error!s:.200}. Use plain values of Python"
        ) from error


class FrameReader:
    """Divides a stream of bytes into frames, however the bytes arrive.

    The bytes of a large frame can be read directly into its buffer: see `room`.
    """

    def __init__(
        self, max_head_bytes: int = MAX_REPLY_HEAD_BYTES, max_body_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.max_head_bytes = max_head_bytes
        self.max_body_bytes = max_body_bytes
        self._pieces: list[bytes] = []  # the beginning of the next frame, if it is small
        self.own: memoryview | None = None  # the buffer of a large frame, filled up to `filled`
        self.filled = 0  # number of bytes of the incomplete frame that have arrived
        self._size = 0  # of the next frame, when its lengths have arrived
        self._head_size = 0
        self.frame_bytes = 0  # size of the last complete frame

    def discard(self) -> None:
        """Drop the bytes of a frame that will never be complete."""
        self._pieces, self.own, self.filled, self._size = [], None, 0, 0

    def room(self) -> memoryview:
        """Return the buffer for the next bytes of a large frame; call it only if there is one.

        The caller passes the number of bytes that it wrote there to `filled_in`.
        """
        assert self.own is not None
        if self.filled == len(self.own):
            self._make_room()
        return self.own[self.filled :]

    def filled_in(self, count: int) -> Iterator[Frame]:
        """Yield the frame if the bytes written to `room` have completed it."""
        self.filled += count
        if self.filled == self._size:
            yield self._finish()

    def single_frame(self, data: bytes) -> Frame | None:
        """Return the frame if these bytes are exactly one frame; otherwise None: call `feed`.

        A caller that waits for each reply sends one frame at a time, and nearly always it arrives
        complete. The body is a view of the data, which must start at a multiple of 8 in memory.
        """
        size = len(data)
        if self.filled or size < _LENGTHS.size:
            return None
        head_size, body_size = _LENGTHS.unpack_from(data)
        start = (head_size + _LENGTHS.size + 7) & ~7
        if start + body_size != size or not 0 < head_size <= self.max_head_bytes:
            return None
        if body_size > self.max_body_bytes:
            return None
        self.frame_bytes = size
        view = memoryview(data)
        return _head_in(view, head_size), view[start:]

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now, each as head and body."""
        at = 0
        end = len(data)
        while at < end:
            if not self.filled and end - at >= _LENGTHS.size:  # nearly always: complete frames
                head_size, size = self._lengths(data, at)
                if end - at >= size:
                    # Only in a buffer of its own does a body start at a multiple of 8.
                    content = memoryview(data)[at : at + size]
                    at += size
                    self.frame_bytes = size
                    yield _split(content, head_size, is_own=False)
                    continue
                self._begin(head_size, size)
            at = self._fill(data, at)
            if self._size and self.filled == self._size:
                yield self._finish()

    def _finish(self) -> Frame:
        """Return the frame that is complete now."""
        own = self.own
        content = memoryview(b"".join(self._pieces)) if own is None else own
        head_size, self.frame_bytes = self._head_size, self._size
        self.discard()
        return _split(content, head_size, is_own=True)

    def _lengths(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the length of the head and of the frame; refuse a frame that is too long."""
        head_size, body_size = _LENGTHS.unpack_from(data, at)
        if not 0 < head_size <= self.max_head_bytes:
            raise InvalidArgumentError(
                f"a frame has a head of {head_size} bytes; it must have 1 to {self.max_head_bytes}"
            )
        if body_size > self.max_body_bytes:
            raise InvalidArgumentError(
                f"a frame has a body of {body_size} bytes; the limit is {self.max_body_bytes}"
            )
        return head_size, _body_start(head_size) + body_size

    def _begin(self, head_size: int, size: int) -> None:
        self._head_size, self._size = head_size, size

    def _make_room(self) -> None:
        """Enlarge the buffer of a large frame: as needed, but at most to a multiple of its bytes.

        The operating system provides the unused part of the buffer only when it is written.
        """
        before = b"".join(self._pieces) if self.own is None else self.own
        size = min(FRAME_GROWTH * self.filled, self._size)
        self.own = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        self.own[: self.filled] = before
        self._pieces = []

    def _fill(self, data: bytes, at: int) -> int:
        """Keep bytes of an incomplete frame; return the offset of the remaining data.

        Memory grows with the bytes that arrive, not with the length that a peer announces.
        """
        if self.own is not None:
            room = self.room()
            take = min(len(room), len(data) - at)
            room[:take] = memoryview(data)[at : at + take]
            self.filled += take
            return at + take
        take = min((self._size or _LENGTHS.size) - self.filled, len(data) - at)
        self._pieces.append(data[at : at + take])
        self.filled += take
        if not self._size and self.filled == _LENGTHS.size:
            self._begin(*self._lengths(b"".join(self._pieces), 0))
        elif LARGE_FRAME_BYTES <= self.filled < self._size:
            self._make_room()
        return at + take


def _body_start(head_size: int) -> int:
    start = _LENGTHS.size + head_size
    return start + -start % 8


def _split(content: memoryview, head_size: int, *, is_own: bool) -> Frame:
    """Return the head and the body of a frame; with `is_own`, the body is not copied."""
    head = _head_in(content, head_size)
    body = content[_body_start(head_size) :]
    return head, body if is_own or not body else memoryview(bytes(body))


def _head_in(content: memoryview, head_size: int) -> list[Any]:
    """Return the head of a frame."""
    try:
        head = _decode(content[_LENGTHS.size : _LENGTHS.size + head_size])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"the head of a frame is not MessagePack: {error}") from error
    if type(head) is not list or not head or type(head[0]) is not int:
        raise InvalidArgumentError("the head of a frame is not a list that begins with its kind")
    return head


# -- values ----------------------------------------------------------------------------------------


class _Writing(Plain):
    """Encodes values into a head and a body."""

    def __init__(self) -> None:
        super().__init__(_KINDS)
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
            and len(value) > _FEW_NUMBERS
            and all(type(number) is int for number in value)
        ):
            return self.put("numbers", np.asarray(value, np.int64).tobytes())
        if kind in (list, tuple) and len(value) > _FEW_NUMBERS and all(map(_is_pair, value)):
            return self.put("pairs", pack(value))
        if kind is bytes:
            return self.put("blob", value)
        if isinstance(value, pa.FixedSizeBinaryArray):
            return self.put("tokens", b"".join(value.to_pylist()))
        if isinstance(value, pa.RecordBatch):
            return self.put("batch", _to_ipc(value))
        return super().dump(value)

    def _dump_scalar(self, value: Any) -> Any:
        if type(value) is timedelta:  # in microseconds the longest would not fit 64 bits
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
        """Return the frame with a head that was encoded here."""
        return frame(head, self.body, self.size)


def _is_pair(value: Any) -> bool:
    """Return whether a value is an interval: two integers."""
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and type(value[0]) is int
        and type(value[1]) is int
    )


class _Reading(Plain):
    """Decodes values from a head and a body."""

    def __init__(self, body: memoryview, *, may_have_batches: bool) -> None:
        super().__init__(_KINDS)
        self._body = body
        self._may_have_batches = may_have_batches

    def _load_scalar(self, kind: Any, plain: dict[str, Any]) -> Any:
        if kind == "run":
            first, count = plain["first"], plain["count"]
            if type(first) is not int or type(count) is not int:
                raise InvalidArgumentError("a run needs a first number and a count")
            if not 0 <= count <= MAX_BATCH_MESSAGES:  # a huge run must never be expanded
                raise InvalidArgumentError(
                    f"a run of {count} numbers; the limit is {MAX_BATCH_MESSAGES}"
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
            raise InvalidArgumentError("a value refers to bytes outside of its frame")
        return self._body[at : at + size]

    def _load_blob(self, kind: str, blob: memoryview) -> Any:
        if kind == "blob":
            return bytes(blob)
        if kind == "batch":
            if not self._may_have_batches:
                raise InvalidArgumentError("a batch is not allowed in a field of a command")
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
            raise InvalidArgumentError("a frame has an incomplete lock token")
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


def _read_columns(blob: memoryview, schema: pa.Schema) -> pa.RecordBatch:
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


# -- from client to server -------------------------------------------------------------------------


def with_columns(send: c.Send) -> c.Send:
    """Return a send of many messages with an Arrow batch; refuse one that cannot be sent."""
    batch = as_batch(send.messages)
    if batch.get_total_buffer_size() > MAX_FRAME_BYTES:
        batch = pa.concat_batches([batch])  # a slice would encode the buffers of the complete batch
    size = batch.get_total_buffer_size()
    if size > MAX_FRAME_BYTES:
        raise MessageSizeExceededError(
            f"the batch has {size} bytes; the limit is {MAX_BATCH_BYTES}. Send it in parts",
            size=size,
            limit=MAX_BATCH_BYTES,
        )
    return c.Send(send.path, batch, send.origin)


def encode_ask(number: int, command: c.Command[Any]) -> Buffers:
    """Return the ASK frame of a command."""
    if type(command) is c.Send:
        return _encode_single(number, command) or _encode_send(number, command)
    names = _FIELDS.get(type(command))
    if names is None:
        raise unknown_command(command)
    writing = _Writing()
    values = [writing.dump(getattr(command, name)) for name in names]
    return _bounded(writing.frame([FrameKind.ASK, number, type(command).__name__, *values]))


def _encode_single(number: int, send: c.Send) -> Buffers | None:
    """Return the frame of a send of one plain message of a numbered sender; None for other sends.

    The frame is equal to that of `_encode_send`.
    """
    messages, origin = send.messages, send.origin
    if type(messages) is not list or len(messages) != 1 or origin is None:
        return None
    message, numbers = messages[0], origin.numbers
    body, *values = application_values(message)
    if values[0] is None or values[1:] != _ONLY_AN_ID:
        return None
    if type(numbers) is not range or origin.also is not None:
        return None
    size = len(body)
    if not size or size + MAX_ID_CHARACTERS > MAX_FRAME_BYTES:
        return None
    plain_origin = [origin.source, numbers.start, len(numbers)]
    head = [_ASK, number, "Send", send.path, [[size, values[0]]], plain_origin]
    padding = -size % 8
    return frame(head, (body, bytes(padding)) if padding else (body,), size + padding)


_ONLY_AN_ID: list[Any] = [
    *(None for _ in TEXT_COLUMNS[1:]),
    None,
    None,
    {},
    None,
]  # fields of a message


def _encode_send(number: int, send: c.Send) -> Buffers:
    writing = _Writing()
    messages = send.messages
    plain: Any
    if isinstance(messages, pa.RecordBatch) or not _fit_as_rows(messages):
        batch = with_columns(send).messages
        assert isinstance(batch, pa.RecordBatch)
        plain = writing.put("columns", batch.serialize())
    else:
        plain, bodies = encode_rows(messages)
        writing.put_bodies(bodies)
    origin = _plain_origin(send.origin, writing)
    return _bounded(writing.frame([FrameKind.ASK, number, "Send", send.path, plain, origin]))


def _fit_as_rows(messages: Sequence[BrokeredMessage]) -> bool:
    """Return whether messages are few, and their other fields fit into a head."""
    if len(messages) > ROWS_AS_ROWS:
        return False
    return sum(message.size - len(message.body) for message in messages) <= MAX_HEAD_BYTES // 4


def _plain_origin(origin: c.Origin | None, writing: _Writing) -> Any:
    """Return an encoded origin; nearly every send has consecutive numbers of one sender."""
    if origin is None:
        return None
    numbers = origin.numbers
    if origin.also is None and type(numbers) is range and numbers.step == 1:
        return [origin.source, numbers.start, len(numbers)]
    return writing.dump(origin)


def _origin_of(plain: Any, body: memoryview) -> c.Origin | None:
    if plain is None:
        return None
    if type(plain) is not list:
        return _Reading(body, may_have_batches=False).load(plain)  # type: ignore[no-any-return]
    source, first, count = plain  # consecutive numbers, as in nearly every send
    if type(first) is not int or type(count) is not int:
        raise InvalidArgumentError("the first number of an origin must be an integer")
    return c.Origin(source, range(first, first + count))


def _bounded(pieces: Buffers) -> Buffers:
    """Refuse a command that is too large for every server."""
    head_size, body_size = _LENGTHS.unpack_from(pieces[0])
    if head_size > MAX_HEAD_BYTES or body_size > MAX_FRAME_BYTES:
        raise InvalidArgumentError(
            f"the command has {head_size + body_size} bytes, {head_size} of them without messages "
            f"and numbers; the limits are {MAX_FRAME_BYTES} and {MAX_HEAD_BYTES}. Use several "
            "parts"
        )
    return pieces


def decode_command(head: Sequence[Any], body: memoryview) -> c.Command[Any]:
    """Return the command in an ASK frame, or raise why it is not valid."""
    name, values = head[2] if len(head) > 2 else None, head[3:]
    if name == "Send":
        return _decode_send(values, body)
    kind = _COMMANDS.get(name) if type(name) is str else None
    if kind is None:
        raise unknown_command(name)
    if len(values) > len(_FIELDS[kind]):
        raise InvalidArgumentError(f"{name} has {len(values)} fields, which are too many")
    reading = _Reading(body, may_have_batches=False)
    try:
        command = kind(*map(reading.load, values))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"the fields of {name} are not valid: {error!s:.200}") from error
    return command


def _decode_send(values: Sequence[Any], body: memoryview) -> c.Send:
    if len(values) != 3:
        raise InvalidArgumentError("a Send must have a path, messages and an origin")
    path, plain, origin = values
    try:
        if type(plain) is list:
            messages: Any = decode_rows(plain, body)
        else:
            blob = _Reading(body, may_have_batches=False).blob(plain)
            messages = _read_columns(blob, MESSAGE_SCHEMA)
        return c.Send(path, messages, _origin_of(origin, body))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"the fields of Send are not valid: {error!s:.200}") from error


# -- from server to client -------------------------------------------------------------------------


def encode_reply(number: int, value: Any) -> Buffers:
    """Return the frame of a reply; an error becomes a REFUSAL."""
    if type(value) is c.SendReceipt and len(value.sequence_numbers) <= _FEW_NUMBERS:
        return frame([_REPLY, number, {"$": "receipt", "numbers": value.sequence_numbers}])
    if isinstance(value, MessagingError):
        return frame([FrameKind.REFUSAL, number, *plain_error(value)])
    writing = _Writing()
    plain: Any
    if isinstance(value, pa.RecordBatch) and value.schema == DELIVERY_SCHEMA:
        if value.num_rows:
            plain = writing.put("deliveries", value.serialize())
        else:
            plain = {"$": "deliveries"}
    elif isinstance(value, DeliveryRows):
        pairs, bodies = encode_deliveries(value)
        plain = {"$": "rows", "rows": pairs}
        writing.put_bodies(bodies)
    elif isinstance(value, c.SendReceipt):
        plain = {"$": "receipt", "numbers": writing.dump(_compact(value.sequence_numbers))}
    else:
        plain = writing.dump(list(value) if isinstance(value, tuple) else value)
    return writing.frame([FrameKind.REPLY, number, plain])


def _compact(numbers: Sequence[int]) -> range | npt.NDArray[np.int64]:
    """Return numbers in their smallest form: nearly always they are consecutive."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return run if list(run) == numbers else np.array(numbers, np.int64)


def plain_error(error: MessagingError) -> list[Any]:
    """Return code, text and facts of an error; facts that cannot be encoded become text."""
    writing = Plain(_KINDS)  # all facts are in the head, because an error has no body
    facts = {}
    for name, fact in error.facts.items():
        try:
            facts[name] = writing.dump(fact)
            _pack([facts[name]])
        except InvalidArgumentError:
            facts[name] = str(fact)
    text = error.text.encode(errors="replace").decode()
    return [error.code, text, facts]


def decode_error(plain: Sequence[Any]) -> MessagingError:
    """Return the error of a REFUSAL or a GOODBYE."""
    if len(plain) != 3 or type(plain[0]) is not str or type(plain[1]) is not str:
        raise InvalidArgumentError("an error must have a code, a text and facts")
    code, text, facts = plain
    if type(facts) is not dict or not all(type(name) is str for name in facts):
        raise InvalidArgumentError("the facts of an error must be a map of names to values")
    reading = _Reading(memoryview(b""), may_have_batches=False)
    return error_of(code, text, {name: reading.load(fact) for name, fact in facts.items()})


def decode_value(plain: Any, body: memoryview) -> Any:
    """Return the value of a REPLY."""
    kind = plain.get("$") if type(plain) is dict else None
    if kind == "receipt":
        numbers = plain.get("numbers")
        if type(numbers) is list and len(numbers) == 1 and type(numbers[0]) is int:
            return c.SendReceipt(numbers)
    reading = _Reading(body, may_have_batches=True)
    try:
        if kind == "deliveries":
            if "at" not in plain:
                return _NO_DELIVERIES
            return _read_columns(reading.blob(plain), DELIVERY_SCHEMA)
        if kind == "rows":
            return decode_deliveries(plain["rows"], body)
        if kind == "receipt":
            numbers = reading.load(plain["numbers"])
            if isinstance(numbers, np.ndarray):
                numbers = numbers.tolist()
            return c.SendReceipt(list(numbers))
        return reading.load(plain)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"a reply lacks a field: {error!r:.200}") from error
