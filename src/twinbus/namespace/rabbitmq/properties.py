"""The properties of a message as bytes, read and written without pika's objects.

pika builds an object with fourteen fields for the properties of each message, and looks at every
value with a chain of comparisons. A batch has hundreds of messages, so this module reads their
properties with one loop, and keeps those that are to be published as three pieces of bytes.

    properties   flags (2 bytes), then each property whose flag is set, in the order of _PROPERTIES
    short text   length (1 byte), UTF-8
    table        length (4), then of each header: short text (name), type (1), value
    value        S, x: length (4), bytes. t: 1 byte. T: seconds (8). V: nothing. Numbers: _NUMBERS
"""

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from struct import Struct
from typing import Any

from pika import data, exceptions

from twinbus.limits import SECOND_US
from twinbus.message import LAST_MOMENT_US

Headers = dict[str, Any]
_FLAGS = Struct(">H")
_LENGTH = Struct(">L")
_SECONDS = Struct(">Q")
_LAST_SECOND = LAST_MOMENT_US // SECOND_US
_MORE_FLAGS = 1  # another 2 bytes of flags follow
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
_TEXT, _BINARY, _BOOL, _MOMENT, _NOTHING = b"SxtTV"


# -- reading ---------------------------------------------------------------------------------------


def read_properties(encoded: bytes) -> Mapping[str, Any]:
    """Return the properties that are set; the headers are a dictionary.

    Raise an error of pika if the bytes are malformed: then nothing behind them can be trusted.
    """
    try:
        (flags,) = more = _FLAGS.unpack_from(encoded)
        at = 2
        while more[0] & _MORE_FLAGS:
            more = _FLAGS.unpack_from(encoded, at)
            at += 2
        found: dict[str, Any] = {}
        for name, read in _layout(flags):
            found[name], at = read(encoded, at)
    except _MALFORMED as error:
        raise exceptions.InvalidFrameError(
            f"the properties of a message cannot be read: {error}"
        ) from error
    if at != len(encoded):
        raise exceptions.InvalidFrameError(
            f"the properties of a message have {len(encoded)} bytes, and their flags stand for {at}"
        )
    return found


_MALFORMED = (ArithmeticError, LookupError, RecursionError, ValueError, struct.error)


@lru_cache(maxsize=256)
def _layout(flags: int) -> tuple[tuple[str, Callable[[bytes, int], tuple[Any, int]]], ...]:
    """Return the properties that flags announce, each with the function that reads it."""
    readers = {"headers": _read_table, "timestamp": _read_seconds} | dict.fromkeys(
        _BYTES, _read_byte
    )
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


def _read_table(encoded: bytes, at: int) -> tuple[Headers, int]:
    end = at + 4 + _LENGTH.unpack_from(encoded, at)[0]
    at += 4
    headers: Headers = {}
    value: Any
    while at < end:
        after = at + 1 + encoded[at]
        name = encoded[at + 1 : after].decode(errors="replace")
        kind = encoded[after]
        at = after + 1
        if kind in (_TEXT, _BINARY):
            after = at + 4 + _LENGTH.unpack_from(encoded, at)[0]
            value = encoded[at + 4 : after]
            if kind == _TEXT:
                value = _text(value)
            at = after
        elif kind in _NUMBERS:
            number = _NUMBERS[kind]
            (value,) = number.unpack_from(encoded, at)
            at += number.size
        elif kind == _BOOL:
            value = encoded[at] != 0
            at += 1
        elif kind == _MOMENT:
            value = moment(_SECONDS.unpack_from(encoded, at)[0])
            at += 8
        elif kind == _NOTHING:
            value = None
        else:  # a list, a table or a decimal number, which Twinbus never writes
            value, at = data.decode_value(encoded, at - 1)
        headers[name] = value
    if at != end:
        raise exceptions.InvalidFrameError(f"a header ends {at - end} bytes behind its table")
    return headers, at


def moment(seconds: int) -> datetime | None:
    """Return the time of a property or header; None if no datetime can hold it."""
    return datetime.fromtimestamp(seconds, UTC) if 0 <= seconds <= _LAST_SECOND else None
