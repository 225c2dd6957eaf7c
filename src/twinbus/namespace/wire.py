"""What travels between a client and a server: frames on one Flight exchange, many in flight.

A frame is an Arrow batch, or none, with metadata:

    4 bytes   length of the head, little-endian
    head      JSON; of a client    {"asks": [[number, command, rows], ...], "token", "bye"}
                    of a server    {"replies": [[number, value or error, rows], ...]}
    blobs     bytes the head points to as {"$": "numbers" | "tokens" | "blob" | "batch",
              "at": offset, "size": bytes}; {"$": "run", "first", "count"} are consecutive numbers

The batch holds the messages of all commands or replies of the frame end to end; `rows` says how
many are whose. Clients send batches of MESSAGE_SCHEMA, servers of DELIVERY_SCHEMA. A reply has the
number of its ask; it comes when it is ready, in any order. A frame that asks nothing is answered by
one that replies nothing: the server is there. After "bye" the server answers what it has and ends
the exchange. A reply with number 0 says why it hangs up by itself.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa

from twinbus.broker import commands as c
from twinbus.broker.access import Claim, SharedAccessKey
from twinbus.entities import DESCRIPTIONS
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    error_of,
)
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_FRAME_ASKS,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    WIRE_VERSION,
)
from twinbus.message import DELIVERY_SCHEMA, LOCK_TOKEN, MESSAGE_SCHEMA, conform, to_batch
from twinbus.plain import Kinds, Plain

COMMANDS: tuple[type[c.Command[Any]], ...] = (
    c.Send,
    c.CancelScheduled,
    c.Receive,
    c.ReceiveDeferred,
    c.Peek,
    c.Settle,
    c.RenewLocks,
    c.AcceptSession,
    c.RenewSession,
    c.ReleaseSession,
    c.GetSessionState,
    c.SetSessionState,
    c.LeaseRange,
    c.RenewRange,
    c.ReadRange,
    c.SettleRange,
    c.ReleaseRange,
    *c.MANAGING,
)
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
PROTOCOL = f"twinbus/{WIRE_VERSION}".encode()  # what the exchange is opened for
NAMESPACE_ID = "x-twinbus-namespace"  # header of the call: which namespace the client means
HANG_UP = 0  # the number of the reply that ends the connection
_KINDS = Kinds((*COMMANDS, *_VALUES, *DESCRIPTIONS))
_LENGTH = struct.Struct("<I")
_HEAD_PARTS = {"asks", "replies", "token", "bye"}
_FEW_NUMBERS = 16  # written as JSON; more are cheaper as a blob
_NO_DELIVERIES = pa.RecordBatch.from_pylist([], DELIVERY_SCHEMA)


@dataclass(frozen=True, slots=True)
class Frame:
    """What is written at once."""

    metadata: bytes
    batch: pa.RecordBatch | None

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        return len(self.metadata) + (self.batch.nbytes if self.batch is not None else 0)


@dataclass(frozen=True, slots=True)
class Ask:
    """A command with the number its reply will have."""

    number: int
    command: c.Command[Any] | MessagingError  # an error: what arrived is no command


@dataclass(frozen=True, slots=True)
class Asks:
    """What a client's frame says."""

    asks: Sequence[Ask]
    token: Any  # a new one, unchecked; None: the old one goes on
    bye: bool  # no more will come


@dataclass(frozen=True, slots=True)
class Reply:
    """A value, or an error to be raised."""

    number: int
    value: Any


class _Writing(Plain):
    """Turns values into a head and the blobs beside it."""

    def __init__(self) -> None:
        super().__init__(_KINDS)
        self._blobs: list[bytes] = []
        self._written = 0

    def dump(self, value: Any) -> Any:
        """Return a value as JSON can hold it; long ones are put beside."""
        kind = type(value)
        if kind is range and value.step == 1:
            return {"$": "run", "first": value.start, "count": len(value)}
        if kind in (range, np.ndarray) or (
            kind in (list, tuple)
            and len(value) > _FEW_NUMBERS
            and all(type(one) is int for one in value)
        ):
            return self._put("numbers", np.asarray(value, np.int64).tobytes())
        if kind is bytes:
            return self._put("blob", value)
        if isinstance(value, pa.FixedSizeBinaryArray):
            return self._put("tokens", b"".join(value.to_pylist()))
        if isinstance(value, pa.RecordBatch):
            return self._put("batch", _to_ipc(value))
        return super().dump(value)

    def _put(self, kind: str, blob: bytes) -> dict[str, Any]:
        at = self._written
        self._blobs.append(blob)
        self._written += len(blob)
        return {"$": kind, "at": at, "size": len(blob)}

    def frame(self, head: Mapping[str, Any], batches: list[pa.RecordBatch]) -> Frame:
        """Return the frame of a head that was dumped here."""
        text = json.dumps(head, separators=(",", ":")).encode()
        batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches) if batches else None
        return Frame(b"".join((_LENGTH.pack(len(text)), text, *self._blobs)), batch)


class _Reading(Plain):
    """Turns a head and the blobs beside it into values."""

    def __init__(self, metadata: pa.Buffer | None, *, may_hold_batches: bool = True) -> None:
        super().__init__(_KINDS)
        self._may_hold_batches = may_hold_batches
        held = memoryview(metadata) if metadata is not None else memoryview(b"")
        if len(held) < _LENGTH.size:
            raise InvalidArgumentError("a frame has no head")
        (length,) = _LENGTH.unpack(held[: _LENGTH.size])
        end = _LENGTH.size + length
        if not length <= MAX_HEAD_BYTES or end > len(held):
            raise InvalidArgumentError(f"a head of {length} bytes does not fit its frame")
        try:
            self.head = json.loads(bytes(held[_LENGTH.size : end]))
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"a frame's head is not JSON: {error}") from error
        if not isinstance(self.head, dict) or set(self.head) - _HEAD_PARTS:
            raise InvalidArgumentError("a frame's head is not an object with the parts it may have")
        self._blobs = held[end:]

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
        if kind not in ("numbers", "tokens", "blob", "batch"):
            return super()._load_scalar(kind, plain)
        return self._load_blob(kind, plain)

    def _load_blob(self, kind: str, plain: dict[str, Any]) -> Any:
        if kind == "batch" and not self._may_hold_batches:
            raise InvalidArgumentError("no command holds a batch in its head")
        at, size = plain["at"], plain["size"]
        if not 0 <= at <= at + size <= len(self._blobs):
            raise InvalidArgumentError("a value points outside of its frame")
        blob = bytes(self._blobs[at : at + size])
        if kind == "blob":
            return blob
        if kind == "batch":
            return _from_ipc(blob)
        if kind == "numbers":
            return np.frombuffer(blob, np.int64)
        count, rest = divmod(size, LOCK_TOKEN.byte_width)
        if rest:
            raise InvalidArgumentError("a frame cuts a lock token")
        return pa.Array.from_buffers(LOCK_TOKEN, count, [None, pa.py_buffer(blob)])

    def items(self, name: str) -> list[tuple[int, Any, int]]:
        """Return the items of a list in the head: number, what it says, rows."""
        items = self.head.get(name, [])
        if not isinstance(items, list) or not all(map(_is_item, items)):
            raise InvalidArgumentError(f"{name} of a frame is not a list of triples")
        if len(items) > MAX_FRAME_ASKS:
            raise InvalidArgumentError(
                f"a frame has {len(items)} {name}; the limit is {MAX_FRAME_ASKS}"
            )
        return items


def _is_item(item: Any) -> bool:
    return (
        isinstance(item, list)
        and len(item) == 3
        and type(item[0]) is int
        and type(item[2]) is int
        and item[2] >= 0
    )


def _to_ipc(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return cast("bytes", sink.getvalue().to_pybytes())


def _from_ipc(blob: bytes) -> pa.RecordBatch:
    try:
        return pa.ipc.open_stream(blob).read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise InvalidArgumentError(f"a frame holds a damaged batch: {error}") from error


# -- from client to server -------------------------------------------------------------------------


def with_columns(command: c.Command[Any]) -> c.Command[Any]:
    """Return a command as it travels: messages as a batch; what cannot travel is refused here."""
    if not isinstance(command, COMMANDS):
        raise InvalidArgumentError(f"a namespace does not know the command {command!r:.100}")
    if not isinstance(command, c.Send):
        return command
    messages = command.messages
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
    return replace(command, messages=batch)


def encode_asks(
    asks: Sequence[tuple[int, c.Command[Any]]], token: str | None = None, *, bye: bool = False
) -> Frame:
    """Return the frame of commands that went through `with_columns`."""
    writing = _Writing()
    batches: list[pa.RecordBatch] = []
    items = []
    for number, command in asks:
        rows = 0
        if isinstance(command, c.Send):
            assert isinstance(command.messages, pa.RecordBatch)
            batches.append(command.messages)
            rows = command.messages.num_rows
            origin = command.origin and writing.dump(command.origin)
            items.append((number, {"$": "Send", "path": command.path, "origin": origin}, rows))
        else:
            items.append((number, writing.dump(command), rows))
    head: dict[str, Any] = {"asks": items}
    if token is not None:
        head["token"] = token
    if bye:
        head["bye"] = True
    return writing.frame(head, batches)


def decode_asks(metadata: pa.Buffer | None, batch: pa.RecordBatch | None) -> Asks:
    """Return what a client's frame says."""
    reading = _Reading(metadata, may_hold_batches=False)
    asks = []
    first = 0
    for number, plain, rows in reading.items("asks"):
        try:
            if isinstance(plain, dict) and plain.get("$") == "Send":
                messages = _slice(batch, first, rows)
                origin = reading.load(plain["origin"]) if "origin" in plain else None
                command: Any = c.Send(cast("str", plain.get("path")), messages, origin)
            else:
                command = reading.load(plain)
                if not isinstance(command, c.Command):
                    raise InvalidArgumentError("a frame asks for something that is no command")
        except MessagingError as error:
            command = error
        first += rows
        asks.append(Ask(number, command))
    return Asks(asks, reading.head.get("token"), reading.head.get("bye") is True)


def _slice(batch: pa.RecordBatch | None, first: int, rows: int) -> pa.RecordBatch:
    if batch is None or first + rows > batch.num_rows:
        if rows:
            raise InvalidArgumentError("a frame holds fewer messages than it says")
        return pa.RecordBatch.from_pylist([], MESSAGE_SCHEMA)
    return batch if rows == batch.num_rows else batch.slice(first, rows)


# -- from server to client -------------------------------------------------------------------------


def encode_replies(replies: Sequence[Reply]) -> Frame:
    """Return the frame of replies."""
    writing = _Writing()
    batches: list[pa.RecordBatch] = []
    items = []
    for reply in replies:
        value, rows = reply.value, 0
        plain: Any
        if isinstance(value, MessagingError):
            facts = {name: _told(writing, fact) for name, fact in value.facts.items()}
            plain = {"$": "error", "code": value.code, "text": value.text, "facts": facts}
        elif isinstance(value, pa.RecordBatch) and value.schema == DELIVERY_SCHEMA:
            plain, rows = {"$": "deliveries"}, value.num_rows
            if rows:
                batches.append(value)
        elif isinstance(value, c.SendReceipt) and len(value.sequence_numbers) > _FEW_NUMBERS:
            numbers = np.array(value.sequence_numbers, np.int64)  # no need to look at each
            plain = {"$": "SendReceipt", "sequence_numbers": writing.dump(numbers)}
        else:
            plain = writing.dump(list(value) if isinstance(value, tuple) else value)
        items.append((reply.number, plain, rows))
    return writing.frame({"replies": items}, batches)


def _told(writing: Plain, fact: object) -> Any:
    """Return a fact of an error; one that cannot travel is told in words."""
    try:
        return writing.dump(fact)
    except InvalidArgumentError:
        return str(fact)


def decode_replies(metadata: pa.Buffer | None, batch: pa.RecordBatch | None) -> list[Reply]:
    """Return the replies of a frame."""
    reading = _Reading(metadata)
    replies = []
    first = 0
    for number, plain, rows in reading.items("replies"):
        try:
            replies.append(Reply(number, _reply(reading, plain, _rows(batch, first, rows))))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidArgumentError(f"a reply lacks a part: {error!r:.200}") from error
        first += rows
    return replies


def _rows(batch: pa.RecordBatch | None, first: int, rows: int) -> pa.RecordBatch:
    return batch.slice(first, rows) if batch is not None and rows else _NO_DELIVERIES


def _reply(reading: _Reading, plain: Any, deliveries: pa.RecordBatch) -> Any:
    kind = plain.get("$") if isinstance(plain, dict) else None
    if kind == "deliveries":
        return deliveries
    if kind == "error":
        facts = {name: reading.load(fact) for name, fact in plain["facts"].items()}
        code, text = plain["code"], plain["text"]
        if not isinstance(code, str) or not isinstance(text, str):
            raise TypeError("an error's code and text")
        return error_of(code, text, facts)
    value = reading.load(plain)
    if isinstance(value, c.SendReceipt) and not _are_few(value.sequence_numbers):
        return c.SendReceipt(np.asarray(value.sequence_numbers, np.int64).tolist())
    return value


def _are_few(numbers: Any) -> bool:
    """Whether numbers came as JSON, and are what they should be."""
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)
