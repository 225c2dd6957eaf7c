"""The properties of a message as bytes, read and written without pika's objects.

pika builds an object with fourteen fields for the properties of each message, and looks at every
value with a chain of comparisons. A batch has hundreds of messages, so this module reads their
properties with one loop. Properties that are to be published are kept as bytes, in three pieces.

    properties   flags (2 bytes), then each property whose flag is set, in the order of _PROPERTIES
    short text   length (1 byte), UTF-8
    table        length (4), then of each header: short text (name), type (1), value
    value        S, x: length (4), bytes. t: 1 byte. T: seconds (8). V: nothing. Numbers: _NUMBERS
                 F: a table. A: length (4), of each value: type (1), value. D: scale (1), number (4)

The lowest two flags stand for no property. AMQP reserves the lowest one for a second word of flags;
RabbitMQ reads no second word, and passes the flag of a publisher on. So it means nothing here.

pika does not read every value that another program may send: it fails at NaN, at a time after the
year 9999 and at deep nesting, and cuts fractions off. So this module reads all values itself.
"""

import struct
from collections.abc import Callable, Container, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from struct import Struct
from typing import Any

from pika import exceptions

from twinbus.limits import RABBITMQ_NESTED, SECOND_US
from twinbus.message import LAST_MOMENT_US

Headers = dict[str, Any]
_Read = Callable[[bytes, int], tuple[Any, int]]  # bytes, start -> value, end
_FLAGS = Struct(">H")
_LENGTH = Struct(">L")
_SECONDS = Struct(">Q")
_LAST_SECOND = LAST_MOMENT_US // SECOND_US
_PROPERTIES = (  # from the highest flag down; RabbitMQ has no others
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
FLAG_OF: Mapping[str, int] = {name: 0x8000 >> at for at, name in enumerate(_PROPERTIES)}
_BYTES = ("delivery_mode", "priority")  # of one byte
_NUMBERS = {  # type of a header -> how its number is packed
    ord(kind): Struct(form)
    for kind, form in {
        "b": ">b",
        "B": ">B",
        "U": ">h",
        "s": ">h",
        "u": ">H",
        "I": ">i",
        "i": ">I",
        "l": ">q",
        "L": ">q",
        "f": ">f",
        "d": ">d",
    }.items()
}
_TEXT, _BINARY, _BOOL, _MOMENT, _NOTHING, _DECIMAL, _TABLE, _LIST = b"SxtTVDFA"
_SCALED = Struct(">Bi")  # a decimal number: its scale, its digits
_SIZES = {_BOOL: 1, _MOMENT: 8, _NOTHING: 0, _DECIMAL: _SCALED.size} | {
    kind: number.size for kind, number in _NUMBERS.items()
}


# -- reading ---------------------------------------------------------------------------------------


def read_properties(encoded: bytes) -> Mapping[str, Any]:
    """Return the properties that are set; the headers are a dictionary.

    Raise an error of pika if the bytes are malformed: later bytes cannot be trusted then.
    """
    try:
        (flags,) = _FLAGS.unpack_from(encoded)
        at = 2
        found: dict[str, Any] = {}
        for name, read in _layout(flags):
            found[name], at = read(encoded, at)
    except _MALFORMED as error:
        raise exceptions.InvalidFrameError(
            f"the properties of a message cannot be read: {error}"
        ) from error
    if at != len(encoded):
        raise exceptions.InvalidFrameError(
            f"the properties of a message have {len(encoded)} bytes, but their flags announce {at}"
        )
    return found


_MALFORMED = (LookupError, struct.error)


@lru_cache(maxsize=256)
def _layout(flags: int) -> tuple[tuple[str, _Read], ...]:
    """Return the properties that flags announce, each with the function that reads it."""
    readers: dict[str, _Read] = {"headers": _read_table, "timestamp": _read_seconds}
    readers |= dict.fromkeys(_BYTES, _read_byte)
    return tuple(
        (name, readers.get(name, _read_short)) for name in _PROPERTIES if flags & FLAG_OF[name]
    )


def _read_short(encoded: bytes, at: int) -> tuple[str | bytes, int]:
    end = at + 1 + encoded[at]
    return _text(encoded[at + 1 : end]), end


def _read_byte(encoded: bytes, at: int) -> tuple[int, int]:
    return encoded[at], at + 1


def _read_seconds(encoded: bytes, at: int) -> tuple[int, int]:
    return _SECONDS.unpack_from(encoded, at)[0], at + 8


def _text(encoded: bytes) -> str | bytes:
    """Return a text; bytes that are no text stay as they are."""
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return encoded


def _read_table(encoded: bytes, at: int, depth: int = 0) -> tuple[Headers, int]:
    end = at + 4 + _LENGTH.unpack_from(encoded, at)[0]
    at += 4
    headers: Headers = {}
    value: Any
    while at < end:
        after = at + 1 + encoded[at]
        name = encoded[at + 1 : after].decode(errors="replace")
        kind = encoded[after]
        at = after + 1
        if kind == _TEXT:
            after = at + 4 + _LENGTH.unpack_from(encoded, at)[0]
            value = _text(encoded[at + 4 : after])
            at = after
        elif kind in _NUMBERS:
            number = _NUMBERS[kind]
            (value,) = number.unpack_from(encoded, at)
            at += number.size
        else:
            value, at = _read_value(kind, encoded, at, depth)
        headers[name] = value
    if at != end:
        raise exceptions.InvalidFrameError(
            f"a header ends {at - end} bytes after the end of its table"
        )
    return headers, at


def _read_list(encoded: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    end = at + 4 + _LENGTH.unpack_from(encoded, at)[0]
    at += 4
    values = []
    while at < end:
        value, at = _read_value(encoded[at], encoded, at + 1, depth)
        values.append(value)
    if at != end:
        raise exceptions.InvalidFrameError(
            f"a value ends {at - end} bytes after the end of its list"
        )
    return values, at


def _read_value(kind: int, encoded: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Return the value of a header, or of a value inside it, and where it ends.

    The value is None if nothing can hold it: a time after the year 9999, or a table that is nested
    too deeply.
    """
    end = _end_of(kind, encoded, at)
    value: Any = None
    if kind in (_TEXT, _BINARY):
        value = encoded[at + 4 : end]
        value = _text(value) if kind == _TEXT else value
    elif kind in _NUMBERS:
        (value,) = _NUMBERS[kind].unpack_from(encoded, at)
    elif kind == _BOOL:
        value = encoded[at] != 0
    elif kind == _MOMENT:
        value = moment(_SECONDS.unpack_from(encoded, at)[0])
    elif kind == _DECIMAL:
        scale, digits = _SCALED.unpack_from(encoded, at)
        value = Decimal(f"{digits}E-{scale}")
    elif kind in (_TABLE, _LIST) and depth < RABBITMQ_NESTED:
        read = _read_table if kind == _TABLE else _read_list
        return read(encoded, at, depth + 1)
    return value, end


def _end_of(kind: int, encoded: bytes, at: int) -> int:
    """Return where a value ends."""
    if kind in (_TEXT, _BINARY, _TABLE, _LIST):
        return int(at + 4 + _LENGTH.unpack_from(encoded, at)[0])
    if kind not in _SIZES:
        raise exceptions.InvalidFieldTypeException(f"a header has the unknown type {kind:#04x}")
    return at + _SIZES[kind]


def moment(seconds: int) -> datetime | None:
    """Return the time of a property or header; None if no datetime can hold it."""
    return datetime.fromtimestamp(seconds, UTC) if 0 <= seconds <= _LAST_SECOND else None


# -- a copy with other headers ---------------------------------------------------------------------


def without(
    encoded: bytes, properties: Container[str], headers: Container[bytes]
) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of properties that were read before, without some of them.

    There are three pieces. The first has the flags and the properties before the headers, the
    second has the headers without the size of their table, and the third has the properties after
    the headers. The flags announce headers, even if there are none. All values that are left keep
    their types and their bytes.
    """
    (flags,) = _FLAGS.unpack_from(encoded)
    at = 2
    kept, table = FLAG_OF["headers"], b""
    before: list[bytes] = []
    after: list[bytes] = []
    for name, read in _layout(flags):
        start = at
        if name == "headers":
            at += 4 + _LENGTH.unpack_from(encoded, at)[0]
            table = _other_headers(encoded, start + 4, at, headers)
            continue
        at = read(encoded, at)[1]
        if name not in properties:
            kept |= FLAG_OF[name]
            piece = before if FLAG_OF[name] > FLAG_OF["headers"] else after
            piece.append(encoded[start:at])
    return _FLAGS.pack(kept) + b"".join(before), table, b"".join(after)


def _other_headers(encoded: bytes, at: int, end: int, left_out: Container[bytes]) -> bytes:
    """Return the headers of a table without those of some names."""
    found = []
    while at < end:
        after = at + 1 + encoded[at]
        start, name = at, encoded[at + 1 : after]
        at = _end_of(encoded[after], encoded, after + 1)
        if name not in left_out:
            found.append(encoded[start:at])
    return b"".join(found)
