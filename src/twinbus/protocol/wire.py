"""What travels between a client and a server: frames on one TCP connection, many in flight.

A client begins with the 8 bytes of MAGIC, which tell this protocol from others on the same port.
After that both sides send frames:

    4 bytes   length of the head, little-endian
    4 bytes   length of the body, little-endian
    head      MessagePack: [kind, ...], see FrameKind
    padding   zeros up to a multiple of 8 bytes from the beginning of the frame
    body      bytes that values of the head point to

    HELLO     [kind, first version, last version, token, namespace id]          client
    WELCOME   [kind, version, namespace id]                                     server
    ASK       [kind, request id, name of the command, fields...]                client
    REPLY     [kind, request id, value]                                         server
    REFUSAL   [kind, request id, code, text, facts]                             server
    TOKEN     [kind, token]                           a new token               client
    WITHDRAW  [kind, request id]                      nobody waits any more     client
    PING      [kind]                                  is answered with a PONG   both
    PONG      [kind]                                                            both
    GOODBYE   [kind, code, text, facts]               no more will come         both

Values of the head are those of plain.py, and besides: {"$": "numbers" | "pairs" | "tokens" |
"blob" | "batch", "at": offset, "size": bytes} points into the body; {"$": "run", "first", "count"}
stands for consecutive numbers, {"$": "span", "days", "seconds", "us"} for a length of time. A send
brings its messages as rows (rows.py) or as one Arrow record batch of MESSAGE_SCHEMA; a reply brings
them as one batch of DELIVERY_SCHEMA. Arrow's own compression is refused: a few bytes could ask for
gigabytes.

The head of a client is small (MAX_HEAD_BYTES), because decoding takes a multiple of its size.
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
    conform,
    to_batch,
)
from twinbus.plain import Kinds, Plain
from twinbus.protocol import commands as c
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.rows import decode_rows, encode_rows
from twinbus.protocol.table import ROWS, unknown_command

MAGIC = b"TWINBUS\n"
Buffers = list[bytes | memoryview | pa.Buffer]  # a frame in pieces, in order
Frame = tuple[list[Any], memoryview]  # a frame that was read: its head, and its body


class FrameKind(IntEnum):
    """What a frame is about; see the module docstring."""

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


_ASK, _REPLY = int(FrameKind.ASK), int(FrameKind.REPLY)  # as numbers: of nearly every frame
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
_PADDING = tuple(bytes(-length % 8) for length in range(8))  # by the length of a head
_FEW_NUMBERS = 16  # written into the head; more are cheaper as a blob
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
        raise InvalidArgumentError(f"a value cannot be sent: {error!s:.200}") from error


class FrameReader:
    """Cuts a stream of bytes into frames, however the bytes arrive.

    Bytes of a large frame can be read straight to where the frame is put together: see `room`.
    """

    def __init__(
        self, max_head_bytes: int = MAX_REPLY_HEAD_BYTES, max_body_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.max_head_bytes = max_head_bytes
        self.max_body_bytes = max_body_bytes
        self._pieces: list[bytes] = []  # what is there of the next frame, if it is small
        self.own: memoryview | None = None  # the same of a large frame: its first `filled` bytes
        self.filled = 0  # bytes of it that have arrived: of a frame that is not whole
        self._size = 0  # of the next frame, once its lengths are known
        self._head_size = 0
        self.frame_bytes = 0  # of the frame that `feed` gave last

    def discard(self) -> None:
        """Give up the bytes of a frame that will never be whole."""
        self._pieces, self.own, self.filled, self._size = [], None, 0, 0

    def room(self) -> memoryview:
        """Return where the next bytes of a large frame belong; only where there is one.

        Who writes there hands the number of bytes to `filled_in`.
        """
        assert self.own is not None
        if self.filled == len(self.own):
            self._make_room()
        return self.own[self.filled :]

    def filled_in(self, count: int) -> Iterator[Frame]:
        """Give the frame if these bytes, which lie in its room already, have made it whole."""
        self.filled += count
        if self.filled == self._size:
            yield self._finish()

    def whole(self, data: bytes) -> Frame | None:
        """Return the frame that these bytes are; None: they are not just one frame, see `feed`.

        A caller that waits for each reply sends one frame at a time, and nearly always it arrives
        as a whole. The body is a view of the data, which begins at a multiple of 8 in memory.
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
        """Give the frames that are whole now: head and body of each."""
        at = 0
        end = len(data)
        while at < end:
            if not self.filled and end - at >= _LENGTHS.size:  # nearly always: whole frames
                head_size, size = self._lengths(data, at)
                if end - at >= size:
                    # Bodies begin at a multiple of 8 only in a buffer of their own.
                    whole = memoryview(data)[at : at + size]
                    at += size
                    self.frame_bytes = size
                    yield _split(whole, head_size, is_own=False)
                    continue
                self._begin(head_size, size)
            at = self._fill(data, at)
            if self._size and self.filled == self._size:
                yield self._finish()

    def _finish(self) -> Frame:
        """Return the frame that is whole now."""
        own = self.own
        whole = memoryview(b"".join(self._pieces)) if own is None else own
        head_size, self.frame_bytes = self._head_size, self._size
        self.discard()
        return _split(whole, head_size, is_own=True)

    def _lengths(self, data: bytes, at: int) -> tuple[int, int]:
        """Return the length of the head and of the whole frame; what is too long is refused."""
        head_size, body_size = _LENGTHS.unpack_from(data, at)
        if not 0 < head_size <= self.max_head_bytes:
            raise InvalidArgumentError(
                f"a frame has a head of {head_size} bytes; it may have 1 to {self.max_head_bytes}"
            )
        if body_size > self.max_body_bytes:
            raise InvalidArgumentError(
                f"a frame has a body of {body_size} bytes; the limit is {self.max_body_bytes}"
            )
        return head_size, _body_start(head_size) + body_size

    def _begin(self, head_size: int, size: int) -> None:
        self._head_size, self._size = head_size, size

    def _make_room(self) -> None:
        """Give a large frame more memory: what it needs, but no more than a multiple of its bytes.

        The rest of that memory is not touched before bytes arrive for it.
        """
        before = b"".join(self._pieces) if self.own is None else self.own
        size = min(FRAME_GROWTH * self.filled, self._size)
        self.own = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        self.own[: self.filled] = before
        self._pieces = []

    def _fill(self, data: bytes, at: int) -> int:
        """Keep bytes of a frame that is not whole yet; return where the rest of the data is.

        Memory grows with what arrives, not with what a peer promises.
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


def _split(whole: memoryview, head_size: int, *, is_own: bool) -> Frame:
    """Return the head and the body of a frame; a body that is kept is a copy of its own."""
    head = _head_in(whole, head_size)
    body = whole[_body_start(head_size) :]
    return head, body if is_own or not body else memoryview(bytes(body))


def _head_in(whole: memoryview, head_size: int) -> list[Any]:
    """Return the head of a frame."""
    try:
        head = _decode(whole[_LENGTHS.size : _LENGTHS.size + head_size])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"the head of a frame is not MessagePack: {error}") from error
    if type(head) is not list or not head or type(head[0]) is not int:
        raise InvalidArgumentError("the head of a frame is not a list that begins with its kind")
    return head


# -- values ----------------------------------------------------------------------------------------


class _Writing(Plain):
    """Turns values into a head and the body beside it."""

    def __init__(self) -> None:
        super().__init__(_KINDS)
        self.body: list[Any] = []
        self.size = 0

    def dump(self, value: Any) -> Any:
        """Return a value as the head can hold it; long ones are put into the body."""
        kind = type(value)
        if value is None or kind is str or kind is int or kind is bool:
            return value
        if kind is range and value.step == 1:
            return {"$": "run", "first": value.start, "count": len(value)}
        if kind in (range, np.ndarray) or (
            kind in (list, tuple)
            and len(value) > _FEW_NUMBERS
            and all(type(one) is int for one in value)
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
        if type(value) is timedelta:  # in microseconds, the longest do not fit 64 bits
            days, seconds, us = value.days, value.seconds, value.microseconds
            return {"$": "span", "days": days, "seconds": seconds, "us": us}
        return super()._dump_scalar(value)

    def put(self, kind: str, blob: Any) -> dict[str, Any]:
        """Put bytes into the body; return what points to them."""
        at, size = self.size, len(blob)
        padding = -size % 8  # so that the next blob begins aligned, as Arrow wants it
        self.body.append(blob)
        if padding:
            self.body.append(b"\0" * padding)
        self.size += size + padding
        return {"$": kind, "at": at, "size": size}

    def frame(self, head: Sequence[Any]) -> Buffers:
        """Return the frame of a head that was dumped here."""
        return frame(head, self.body, self.size)


def _is_pair(value: Any) -> bool:
    """Whether a value is an interval: two whole numbers."""
    return (
        type(value) in (list, tuple)
        and len(value) == 2
        and type(value[0]) is int
        and type(value[1]) is int
    )


class _Reading(Plain):
    """Turns a head and the body beside it into values."""

    def __init__(self, body: memoryview, *, may_hold_batches: bool) -> None:
        super().__init__(_KINDS)
        self._body = body
        self._may_hold_batches = may_hold_batches

    def _load_scalar(self, kind: Any, plain: dict[str, Any]) -> Any:
        if kind == "run":
            first, count = plain["first"], plain["count"]
            if type(first) is not int or type(count) is not int:
                raise InvalidArgumentError("a run needs a first number and a count")
            if not 0 <= count <= MAX_BATCH_MESSAGES:  # whatever it stands for, nobody walks it
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
        """Return the bytes that a value points to."""
        at, size = plain["at"], plain["size"]
        if not 0 <= at <= at + size <= len(self._body):
            raise InvalidArgumentError("a value points outside of its frame")
        return self._body[at : at + size]

    def _load_blob(self, kind: str, blob: memoryview) -> Any:
        if kind == "blob":
            return bytes(blob)
        if kind == "batch":
            if not self._may_hold_batches:
                raise InvalidArgumentError("no command has a field that is a batch")
            return _from_ipc(blob)
        if kind == "numbers":
            return np.frombuffer(blob, np.int64)
        if kind == "pairs":
            if len(blob) > MAX_BATCH_MESSAGES * PACKED_BYTES:
                count = len(blob) // PACKED_BYTES
                raise InvalidArgumentError(
                    f"a frame holds {count} intervals; the limit is {MAX_BATCH_MESSAGES}"
                )
            return unpack(blob)
        count, rest = divmod(len(blob), LOCK_TOKEN.byte_width)
        if rest:
            raise InvalidArgumentError("a frame cuts a lock token")
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
        raise InvalidArgumentError(f"a frame holds a damaged batch: {error}") from error


def _read_columns(blob: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch of a schema that both sides know; bytes that only look like one raise."""
    try:
        message = pa.ipc.read_message(pa.py_buffer(blob))
        if _is_compressed(message.metadata):
            raise InvalidArgumentError("a frame holds a compressed batch; send it uncompressed")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, struct.error, EOFError) as error:
        raise InvalidArgumentError(f"a frame holds a damaged batch: {error}") from error
    return batch


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether the metadata of a record batch, a flatbuffer, name a compression of its body.

    The root is the table Message, whose field 2 is the table RecordBatch, whose field 3 is the
    compression. A table begins with the distance back to its vtable, which gives the place of each
    field, 0 for one that is not there.
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
    """Return a send of many messages as it travels: as a batch. What cannot travel is refused."""
    messages = send.messages
    batch = conform(messages) if isinstance(messages, pa.RecordBatch) else to_batch(messages)
    if batch.get_total_buffer_size() > MAX_FRAME_BYTES:
        batch = pa.concat_batches([batch])  # a slice brings the whole it was cut from
    size = batch.get_total_buffer_size()
    if size > MAX_FRAME_BYTES:
        raise MessageSizeExceededError(
            f"the batch has {size} bytes; the limit is {MAX_BATCH_BYTES}. Send it in parts",
            size=size,
            limit=MAX_BATCH_BYTES,
        )
    return c.Send(send.path, batch, send.origin)


def encode_ask(number: int, command: c.Command[Any]) -> Buffers:
    """Return the frame that asks for a command."""
    if type(command) is c.Send:
        return _encode_one(number, command) or _encode_send(number, command)
    names = _FIELDS.get(type(command))
    if names is None:
        raise unknown_command(command)
    writing = _Writing()
    values = [writing.dump(getattr(command, name)) for name in names]
    return _bounded(writing.frame([FrameKind.ASK, number, type(command).__name__, *values]))


def _encode_one(number: int, send: c.Send) -> Buffers | None:
    """Return the frame of a send of one plain message of a numbered sender; None: it is another.

    It is the same frame that `_encode_send` returns.
    """
    messages, origin = send.messages, send.origin
    if type(messages) is not list or len(messages) != 1 or origin is None:
        return None
    message, numbers = messages[0], origin.numbers
    body, *others = application_values(message)
    if others[0] is None or others[1:] != _ONLY_AN_ID:
        return None
    if type(numbers) is not range or origin.also is not None:
        return None
    size = len(body)
    if not size or size + MAX_ID_CHARACTERS > MAX_FRAME_BYTES:
        return None
    plain_origin = [origin.source, numbers.start, len(numbers)]
    head = [_ASK, number, "Send", send.path, [[size, others[0]]], plain_origin]
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
        for body in bodies:
            writing.body.append(body)
            writing.size += len(body)
        padding = -writing.size % 8
        if padding:
            writing.body.append(b"\0" * padding)
            writing.size += padding
    origin = _plain_origin(send.origin, writing)
    return _bounded(writing.frame([FrameKind.ASK, number, "Send", send.path, plain, origin]))


def _fit_as_rows(messages: Sequence[BrokeredMessage]) -> bool:
    """Whether messages are few, and what they hold beside their bodies has room in a head."""
    if len(messages) > ROWS_AS_ROWS:
        return False
    return sum(message.size - len(message.body) for message in messages) <= MAX_HEAD_BYTES // 4


def _plain_origin(origin: c.Origin | None, writing: _Writing) -> Any:
    """Return an origin as it travels; nearly every send has consecutive numbers of one sender."""
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
        return _Reading(body, may_hold_batches=False).load(plain)  # type: ignore[no-any-return]
    source, first, count = plain  # of consecutive numbers, as those of nearly every send are
    if type(first) is not int or type(count) is not int:
        raise InvalidArgumentError("the numbers of an origin begin at a whole number")
    return c.Origin(source, range(first, first + count))


def _bounded(pieces: Buffers) -> Buffers:
    """Refuse a command that no server would read."""
    head_size, body_size = _LENGTHS.unpack_from(pieces[0])
    if head_size > MAX_HEAD_BYTES or body_size > MAX_FRAME_BYTES:
        raise InvalidArgumentError(
            f"the command takes {head_size + body_size} bytes to send, {head_size} of them beside "
            f"messages and numbers; the limits are {MAX_FRAME_BYTES} and {MAX_HEAD_BYTES}. Ask in "
            "parts"
        )
    return pieces


def decode_command(head: Sequence[Any], body: memoryview) -> c.Command[Any]:
    """Return the command that an ASK frame holds, or raise what is wrong with it."""
    name, values = head[2] if len(head) > 2 else None, head[3:]
    if name == "Send":
        return _decode_send(values, body)
    kind = _COMMANDS.get(name) if type(name) is str else None
    if kind is None:
        raise unknown_command(name)
    if len(values) > len(_FIELDS[kind]):
        raise InvalidArgumentError(f"{name} has {len(values)} fields; it may have fewer")
    reading = _Reading(body, may_hold_batches=False)
    try:
        command = kind(*map(reading.load, values))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"{name} does not have the fields it should: {error!s:.200}"
        ) from error
    return command


def _decode_send(values: Sequence[Any], body: memoryview) -> c.Send:
    if len(values) != 3:
        raise InvalidArgumentError("a Send has a path, messages and an origin")
    path, plain, origin = values
    try:
        if type(plain) is list:
            messages: Any = decode_rows(plain, body)
        else:
            blob = _Reading(body, may_hold_batches=False).blob(plain)
            messages = _read_columns(blob, MESSAGE_SCHEMA)
        return c.Send(path, messages, _origin_of(origin, body))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"Send does not have the fields it should: {error!s:.200}"
        ) from error


# -- from server to client -------------------------------------------------------------------------


def encode_reply(number: int, value: Any) -> Buffers:
    """Return the frame of a reply; an error becomes a refusal."""
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
    elif isinstance(value, c.SendReceipt):
        plain = {"$": "receipt", "numbers": writing.dump(_compact(value.sequence_numbers))}
    else:
        plain = writing.dump(list(value) if isinstance(value, tuple) else value)
    return writing.frame([FrameKind.REPLY, number, plain])


def _compact(numbers: Sequence[int]) -> range | npt.NDArray[np.int64]:
    """Return numbers in the form that travels best: nearly always they are consecutive."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return run if list(run) == numbers else np.array(numbers, np.int64)


def plain_error(error: MessagingError) -> list[Any]:
    """Return an error as it travels: code, text and facts; a fact that cannot travel as text."""
    writing = Plain(_KINDS)  # facts lie in the head: an error has no body beside it
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
    """Return the error of a refusal or a goodbye."""
    if len(plain) != 3 or type(plain[0]) is not str or type(plain[1]) is not str:
        raise InvalidArgumentError("an error has a code, a text and facts")
    code, text, facts = plain
    if type(facts) is not dict or not all(type(name) is str for name in facts):
        raise InvalidArgumentError("the facts of an error are not a map of names to values")
    reading = _Reading(memoryview(b""), may_hold_batches=False)
    return error_of(code, text, {name: reading.load(fact) for name, fact in facts.items()})


def decode_value(plain: Any, body: memoryview) -> Any:
    """Return the value of a reply."""
    kind = plain.get("$") if type(plain) is dict else None
    if kind == "receipt":
        numbers = plain.get("numbers")
        if type(numbers) is list and len(numbers) == 1 and type(numbers[0]) is int:
            return c.SendReceipt(numbers)
    reading = _Reading(body, may_hold_batches=True)
    try:
        if kind == "deliveries":
            if "at" not in plain:
                return _NO_DELIVERIES
            return _read_columns(reading.blob(plain), DELIVERY_SCHEMA)
        if kind == "receipt":
            numbers = reading.load(plain["numbers"])
            if isinstance(numbers, np.ndarray):
                numbers = numbers.tolist()
            return c.SendReceipt(list(numbers))
        return reading.load(plain)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"a reply lacks a part: {error!r:.200}") from error
