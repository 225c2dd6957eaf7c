"""What the frames between a client and a server mean: commands, replies and errors.

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

The docstring of frames.py shows the layout of a frame, that of frame_values.py the values. A send
has its messages as rows (rows.py) or as an Arrow record batch of MESSAGE_SCHEMA; a reply has them
as rows with the broker's facts, or as a batch of DELIVERY_SCHEMA.

The conversations of both ends call this: client_conversation.py encodes commands and decodes
replies, and server_conversation.py does the reverse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    error_of,
)
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    MAX_ID_CHARACTERS,
    ROWS_AS_ROWS,
)
from twinbus.message import (
    DELIVERY_SCHEMA,
    MESSAGE_SCHEMA,
    TEXT_COLUMNS,
    BrokeredMessage,
    application_values,
    as_batch,
)
from twinbus.plain import Plain
from twinbus.protocol import commands as c
from twinbus.protocol.frame_values import (
    FEW_NUMBERS,
    KINDS,
    ValueDecoder,
    ValueEncoder,
    read_columns,
)
from twinbus.protocol.frames import LENGTHS, Buffers, FrameKind, frame, pack_head
from twinbus.protocol.rows import (
    DeliveryRows,
    decode_deliveries,
    decode_rows,
    encode_deliveries,
    encode_rows,
)
from twinbus.protocol.table import ROWS, unknown_command
from twinbus.values import shown

_ASK, _REPLY = int(FrameKind.ASK), int(FrameKind.REPLY)  # plain ints: used for nearly every frame
_COMMANDS: Mapping[str, type[c.Command[Any]]] = {row.kind: row.command for row in ROWS}
_FIELDS: Mapping[type, tuple[str, ...]] = {
    row.command: tuple(field.name for field in fields(cast("Any", row.command))) for row in ROWS
}
_NO_DELIVERIES = pa.RecordBatch.from_pylist([], DELIVERY_SCHEMA)


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
    writing = ValueEncoder()
    values = [writing.dump(getattr(command, name)) for name in names]
    return _bounded(writing.frame([FrameKind.ASK, number, type(command).__name__, *values]))


def _encode_single(number: int, send: c.Send) -> Buffers | None:
    """Return the frame of a send of one message with only a body, an id and a plain origin.

    For other sends, return None. This is a short way: the frame is equal to that of `_encode_send`.
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
]  # the further fields of a message that has only a body and an id


def _encode_send(number: int, send: c.Send) -> Buffers:
    writing = ValueEncoder()
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
    """Return whether messages are few, and their fields without the bodies fit into a head."""
    if len(messages) > ROWS_AS_ROWS:
        return False
    return sum(message.size - len(message.body) for message in messages) <= MAX_HEAD_BYTES // 4


def _plain_origin(origin: c.Origin | None, writing: ValueEncoder) -> Any:
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
        return ValueDecoder(body, may_have_batches=False).load(plain)  # type: ignore[no-any-return]
    source, first, count = plain  # consecutive numbers, as in nearly every send
    if type(first) is not int or type(count) is not int:
        raise InvalidArgumentError(
            f"an origin has the first number {shown(first)} and the count {shown(count)}; both "
            "must be integers"
        )
    return c.Origin(source, range(first, first + count))


def _bounded(pieces: Buffers) -> Buffers:
    """Refuse a command that is larger than any server accepts."""
    head_size, body_size = LENGTHS.unpack_from(pieces[0])
    if head_size > MAX_HEAD_BYTES or body_size > MAX_FRAME_BYTES:
        raise InvalidArgumentError(
            f"the command has {body_size} bytes of messages and numbers, and {head_size} other "
            f"bytes; the limits are {MAX_FRAME_BYTES} and {MAX_HEAD_BYTES}. Use several commands"
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
        raise InvalidArgumentError(
            f"{name} has {len(values)} fields; this server knows {len(_FIELDS[kind])}. If a newer "
            "client sent the command, update the server"
        )
    reading = ValueDecoder(body, may_have_batches=False)
    try:
        command = kind(*map(reading.load, values))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"the fields of {name} are not valid: {error!s:.200}") from error
    return command


def _decode_send(values: Sequence[Any], body: memoryview) -> c.Send:
    if len(values) != 3:
        raise InvalidArgumentError(
            f"a Send has {len(values)} fields; it must have a path, messages and an origin"
        )
    path, plain, origin = values
    try:
        if type(plain) is list:
            messages: Any = decode_rows(plain, body)
        else:
            blob = ValueDecoder(body, may_have_batches=False).blob(plain)
            messages = read_columns(blob, MESSAGE_SCHEMA)
        return c.Send(path, messages, _origin_of(origin, body))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(f"the fields of Send are not valid: {error!s:.200}") from error


# -- from server to client -------------------------------------------------------------------------


def encode_reply(number: int, value: Any) -> Buffers:
    """Return the frame of a reply; an error becomes a REFUSAL."""
    if type(value) is c.SendReceipt and len(value.sequence_numbers) <= FEW_NUMBERS:
        return frame([_REPLY, number, {"$": "receipt", "numbers": value.sequence_numbers}])
    if isinstance(value, MessagingError):
        return frame([FrameKind.REFUSAL, number, *plain_error(value)])
    writing = ValueEncoder()
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
    writing = Plain(KINDS)  # all facts are in the head, because an error has no body
    facts = {}
    for name, fact in error.facts.items():
        try:
            facts[name] = writing.dump(fact)
            pack_head([facts[name]])
        except InvalidArgumentError:
            facts[name] = str(fact)
    text = error.text.encode(errors="replace").decode()
    return [error.code, text, facts]


def decode_error(plain: Sequence[Any]) -> MessagingError:
    """Return the error of a REFUSAL or a GOODBYE."""
    if len(plain) != 3 or type(plain[0]) is not str or type(plain[1]) is not str:
        raise InvalidArgumentError(
            f"an error from the peer is {shown(plain)}; it must have a code, a text and facts"
        )
    code, text, facts = plain
    if type(facts) is not dict or not all(type(name) is str for name in facts):
        raise InvalidArgumentError(
            f"the facts of an error are {shown(facts)}; they must be a map of names to values"
        )
    reading = ValueDecoder(memoryview(b""), may_have_batches=False)
    return error_of(code, text, {name: reading.load(fact) for name, fact in facts.items()})


def decode_value(plain: Any, body: memoryview) -> Any:
    """Return the value of a REPLY."""
    kind = plain.get("$") if type(plain) is dict else None
    if kind == "receipt":
        numbers = plain.get("numbers")
        if type(numbers) is list and len(numbers) == 1 and type(numbers[0]) is int:
            return c.SendReceipt(numbers)
    reading = ValueDecoder(body, may_have_batches=True)
    try:
        if kind == "deliveries":
            if "at" not in plain:
                return _NO_DELIVERIES
            return read_columns(reading.blob(plain), DELIVERY_SCHEMA)
        if kind == "rows":
            return decode_deliveries(plain["rows"], body)
        if kind == "receipt":
            numbers = reading.load(plain["numbers"])
            if isinstance(numbers, np.ndarray):
                numbers = numbers.tolist()
            return c.SendReceipt(list(numbers))
        return reading.load(plain)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgumentError(
            f"a reply has a missing or invalid field: {error!r:.200}"
        ) from error
