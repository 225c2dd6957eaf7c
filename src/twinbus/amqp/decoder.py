"""Decodes the values of types.py from bytes.

Functions take bytes or a memoryview of bytes, and an offset. They return the value and the offset
after it. Bytes that end too early raise TruncatedError, other invalid bytes AmqpError. A table
selects the reader by the constructor byte.

Depth and counts are bounded (limits.py). Every item takes at least one byte, except for elements of
arrays of nulls and other types without content. Such an array may have only few elements. So the
decoded values need at most about 60 times the memory of the bytes.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from twinbus.amqp.conditions import AmqpError, TruncatedError
from twinbus.amqp.types import (
    Array,
    Byte,
    Char,
    Described,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)
from twinbus.limits import MAX_AMQP_DEPTH, MAX_AMQP_ITEMS, MAX_AMQP_WIDTHLESS_ITEMS

Buffer = bytes | memoryview
Reader = Callable[[Buffer, int], tuple[Any, int]]  # gets the offset after the constructor


def decode(data: Buffer, at: int = 0) -> tuple[Any, int]:
    """Decode the value at an offset; return it and the offset after it."""
    try:
        return read_value(data, at, MAX_AMQP_DEPTH)
    except (IndexError, struct.error) as error:
        raise truncated() from error
    except UnicodeDecodeError as error:
        raise AmqpError(f"a text is not valid {error.encoding}") from error


def decode_only(data: Buffer) -> Any:
    """Decode bytes that contain exactly one value."""
    value, end = decode(data)
    if end != len(data):
        raise AmqpError(f"{len(data) - end} unexpected bytes follow a value")
    return value


def truncated() -> TruncatedError:
    """Return the error for bytes that end too early."""
    return TruncatedError("the bytes end in the middle of a value")


def read_value(data: Buffer, at: int, depth: int) -> tuple[Any, int]:
    """Decode a value; the caller handles IndexError, struct.error and UnicodeDecodeError."""
    code = data[at]
    if 0x40 <= code < 0xC0:
        reader = READERS.get(code)
        if reader is None:
            raise unknown_constructor(code)
        return reader(data, at + 1)
    return _read_compound(code, data, at + 1, depth)


def unknown_constructor(code: int) -> AmqpError:
    """Return the error for an unknown or unsupported constructor."""
    if code in {0x74, 0x84, 0x94}:
        return AmqpError(
            "decimal numbers are not supported; send a double, a long or a string instead"
        )
    return AmqpError(f"no type has the constructor 0x{code:02x}")


def _fixed_reader(layout: str, kind: Callable[[Any], Any] | None = None) -> Reader:
    unpack_from, size = struct.Struct(f">{layout}").unpack_from, struct.calcsize(f">{layout}")

    def read_plain(data: Buffer, at: int) -> tuple[Any, int]:
        return unpack_from(data, at)[0], at + size

    def read(data: Buffer, at: int) -> tuple[Any, int]:
        assert kind is not None
        return kind(unpack_from(data, at)[0]), at + size

    return read_plain if kind is None else read


def _constant_reader(value: object) -> Reader:
    return lambda _, at: (value, at)


def _read_empty_list(_: Buffer, at: int) -> tuple[list[Any], int]:
    return [], at


def _read_boolean(data: Buffer, at: int) -> tuple[bool, int]:
    code = data[at]
    if code > 1:
        raise AmqpError(f"a boolean must be 0 or 1, not {code}")
    return code == 1, at + 1


def _char(code: int) -> Char:
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise AmqpError(f"there is no character 0x{code:x}")
    return Char(chr(code))


def _read_uuid(data: Buffer, at: int) -> tuple[UUID, int]:
    if at + 16 > len(data):
        raise truncated()
    return UUID(bytes=bytes(data[at : at + 16])), at + 16


def _byte_reader(kind: Callable[[int], Any]) -> Reader:
    return lambda data, at: (kind(data[at]), at + 1)


def read_small(data: Buffer, at: int) -> tuple[int, int]:
    """Read one byte as a number."""
    return data[at], at + 1


def _short_reader(from_bytes: Callable[[Any], Any]) -> Reader:
    """Return a reader of bytes that follow their length, which is encoded in one byte."""

    def read(data: Buffer, at: int) -> tuple[Any, int]:
        end = at + 1 + data[at]
        if end > len(data):
            raise truncated()
        return from_bytes(data[at + 1 : end]), end

    return read


def _long_reader(from_bytes: Callable[[Any], Any]) -> Reader:
    """Return a reader of bytes that follow their length, which is encoded in four bytes."""

    def read(data: Buffer, at: int) -> tuple[Any, int]:
        end = at + 4 + _unpack_size(data, at)[0]
        if end > len(data):
            raise truncated()
        return from_bytes(data[at + 4 : end]), end

    return read


_unpack_size = struct.Struct(">I").unpack_from


def _text(data: Buffer) -> str:
    return str(data, "utf-8")


def _symbol(data: Buffer) -> Symbol:
    return Symbol(data, "ascii")


def _plain_symbol(data: Buffer) -> str:
    return str(data, "ascii")


READERS: Final[Mapping[int, Reader]] = {
    0x40: _constant_reader(None),
    0x41: _constant_reader(True),
    0x42: _constant_reader(False),
    0x43: _constant_reader(UInt(0)),
    0x44: _constant_reader(ULong(0)),
    0x45: _read_empty_list,
    0x50: _byte_reader(UByte),
    0x51: _fixed_reader("b", Byte),
    0x52: _byte_reader(UInt),
    0x53: _byte_reader(ULong),
    0x54: _fixed_reader("b", Int),
    0x55: _fixed_reader("b"),
    0x56: _read_boolean,
    0x60: _fixed_reader("H", UShort),
    0x61: _fixed_reader("h", Short),
    0x70: _fixed_reader("I", UInt),
    0x71: _fixed_reader("i", Int),
    0x72: _fixed_reader("f", Float),
    0x73: _fixed_reader("I", _char),
    0x80: _fixed_reader("Q", ULong),
    0x81: _fixed_reader("q"),
    0x82: _fixed_reader("d"),
    0x83: _fixed_reader("q", Timestamp),
    0x98: _read_uuid,
    0xA0: _short_reader(bytes),
    0xA1: _short_reader(_text),
    0xA3: _short_reader(_symbol),
    0xB0: _long_reader(bytes),
    0xB1: _long_reader(_text),
    0xB3: _long_reader(_symbol),
}


def _read_compound(code: int, data: Buffer, at: int, depth: int) -> tuple[Any, int]:
    if not depth:
        raise AmqpError(f"values are nested deeper than {MAX_AMQP_DEPTH}")
    if code == 0x00:
        descriptor, at = read_descriptor(data, at)
        value, at = read_value(data, at, depth - 1)
        return Described(descriptor, value), at
    read = _COMPOUND_READERS.get(code)
    if read is None:
        raise unknown_constructor(code)
    at, end, count = read_extent(code, data, at)
    try:
        return read(data, at, end, count, depth - 1), end
    except (IndexError, struct.error, TruncatedError) as error:  # the compound itself is complete
        raise _overrun() from error


def _overrun() -> AmqpError:
    return AmqpError("a value extends beyond the end of its list, map or array")


def read_descriptor(data: Buffer, at: int) -> tuple[ULong | Symbol, int]:
    """Read a descriptor; the offset is that of its constructor."""
    code = data[at]
    if code not in _DESCRIPTOR_CODES:
        raise AmqpError(
            f"a descriptor must be a ulong or a symbol, but its constructor is 0x{code:02x}"
        )
    descriptor: ULong | Symbol
    descriptor, at = READERS[code](data, at + 1)
    return descriptor, at


_DESCRIPTOR_CODES: Final = frozenset((0x44, 0x53, 0x80, 0xA3, 0xB3))


def read_extent(code: int, data: Buffer, at: int) -> tuple[int, int, int]:
    """Read size and count of a list, map or array; return begin and end of its items, and count."""
    if code & 0x10:
        size = _unpack_size(data, at)[0]
        begin, end = at + 8, at + 4 + size
    else:
        size = data[at]
        begin, end = at + 2, at + 1 + size
    if begin > end:
        raise AmqpError(f"a list, map or array has the size {size}, too small for its count")
    if end > len(data):
        raise truncated()
    count = _unpack_size(data, at + 4)[0] if code & 0x10 else data[at + 1]
    if count > MAX_AMQP_ITEMS:
        raise AmqpError(
            f"a list, map or array has {count} items; at most {MAX_AMQP_ITEMS} are allowed"
        )
    return begin, end, count


def _read_list(data: Buffer, at: int, end: int, count: int, depth: int) -> list[Any]:
    items = []
    for _ in range(count):
        value, at = read_value(data, at, depth)
        items.append(value)
    if at != end:
        raise _misfit(at, end)
    return items


def _misfit(at: int, end: int) -> AmqpError:
    return AmqpError("a list, map or array is longer than its items") if at < end else _overrun()


def _read_map(data: Buffer, at: int, end: int, count: int, depth: int) -> dict[Any, Any]:
    items = _read_list(data, at, end, count, depth)
    if count % 2:
        raise AmqpError("the last key of a map has no value")
    try:
        found = dict(zip(items[::2], items[1::2], strict=True))
    except TypeError as error:
        raise AmqpError("a list, map or array as a key of a map is not supported") from error
    if len(found) * 2 != count:
        raise AmqpError("a map has two equal keys")
    return found


def _read_array(data: Buffer, at: int, end: int, count: int, depth: int) -> Array:
    descriptor = None
    code = data[at]
    at += 1
    if code == 0x00:
        descriptor, at = read_descriptor(data, at)
        code = data[at]
        at += 1
    element = _ELEMENTS.get(code)
    if element is None:
        raise unknown_constructor(code)
    if code < 0x50 and count > MAX_AMQP_WIDTHLESS_ITEMS:
        raise AmqpError(
            f"an array has {count} elements without content; at most {MAX_AMQP_WIDTHLESS_ITEMS} "
            "are allowed"
        )
    items = []
    reader = READERS.get(code)
    for _ in range(count):
        if reader is not None:
            value, at = reader(data, at)
        else:
            value, at = _read_compound(code, data, at, depth)
        items.append(value)
    if at != end:
        raise _misfit(at, end)
    return Array(element, tuple(items), descriptor)


_COMPOUND_READERS: Mapping[int, Callable[[Buffer, int, int, int, int], Any]] = {
    0xC0: _read_list,
    0xD0: _read_list,
    0xC1: _read_map,
    0xD1: _read_map,
    0xE0: _read_array,
    0xF0: _read_array,
}


def _codes(element: type, *codes: int) -> dict[int, type]:
    return dict.fromkeys(codes, element)


_ELEMENTS: Final[Mapping[int, type]] = {
    **_codes(type(None), 0x40),
    **_codes(bool, 0x41, 0x42, 0x56),
    **_codes(UByte, 0x50),
    **_codes(UShort, 0x60),
    **_codes(UInt, 0x43, 0x52, 0x70),
    **_codes(ULong, 0x44, 0x53, 0x80),
    **_codes(Byte, 0x51),
    **_codes(Short, 0x61),
    **_codes(Int, 0x54, 0x71),
    **_codes(int, 0x55, 0x81),
    **_codes(Float, 0x72),
    **_codes(float, 0x82),
    **_codes(Char, 0x73),
    **_codes(Timestamp, 0x83),
    **_codes(UUID, 0x98),
    **_codes(bytes, 0xA0, 0xB0),
    **_codes(str, 0xA1, 0xB1),
    **_codes(Symbol, 0xA3, 0xB3),
    **_codes(list, 0x45, 0xC0, 0xD0),
    **_codes(dict, 0xC1, 0xD1),
    **_codes(Array, 0xE0, 0xF0),
}


# -- skipping --------------------------------------------------------------------------------------

_WIDTHS: Final = {0x40: 0, 0x50: 1, 0x60: 2, 0x70: 4, 0x80: 8, 0x90: 16}


def skip(data: Buffer, at: int) -> int:
    """Return the offset after the value at an offset, without decoding it."""
    try:
        code = data[at]
        while code == 0x00:
            _, at = read_descriptor(data, at + 1)
            code = data[at]
        kind = code & 0xF0
        if kind in _WIDTHS:
            end = at + 1 + _WIDTHS[kind]
        elif kind in {0xA0, 0xC0, 0xE0}:
            end = at + 2 + data[at + 1]
        elif kind in {0xB0, 0xD0, 0xF0}:
            end = at + 5 + _unpack_size(data, at + 1)[0]
        else:
            raise unknown_constructor(code)
    except (IndexError, struct.error) as error:
        raise truncated() from error
    except UnicodeDecodeError as error:
        raise AmqpError("a descriptor is not ASCII") from error
    if end > len(data):
        raise truncated()
    return end


# -- values of a known type ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WireType:
    """How to decode a value of a known type to a plain Python value: readers by constructor."""

    name: str
    readers: Mapping[int, Reader]


def _compound_reader(code: int) -> Reader:
    return lambda data, at: _read_compound(code, data, at, MAX_AMQP_DEPTH)


_MAPS: Final = {code: _compound_reader(code) for code in (0xC1, 0xD1)}
_LISTS: Final = {0x45: _read_empty_list} | {code: _compound_reader(code) for code in (0xC0, 0xD0)}
_ARRAYS: Final = {code: _compound_reader(code) for code in (0xE0, 0xF0)}
_ZERO: Final = _constant_reader(0)

BOOLEAN: Final = WireType("boolean", {code: READERS[code] for code in (0x41, 0x42, 0x56)})
UBYTE: Final = WireType("ubyte", {0x50: read_small})
USHORT: Final = WireType("ushort", {0x60: _fixed_reader("H")})
UINT: Final = WireType("uint", {0x43: _ZERO, 0x52: read_small, 0x70: _fixed_reader("I")})
ULONG: Final = WireType("ulong", {0x44: _ZERO, 0x53: read_small, 0x80: _fixed_reader("Q")})
TIMESTAMP: Final = WireType("timestamp", {0x83: _fixed_reader("q")})
BINARY: Final = WireType("binary", {code: READERS[code] for code in (0xA0, 0xB0)})
STRING: Final = WireType("string", {code: READERS[code] for code in (0xA1, 0xB1)})
SYMBOL: Final = WireType(
    "symbol", {0xA3: _short_reader(_plain_symbol), 0xB3: _long_reader(_plain_symbol)}
)
MAP: Final = WireType("map", _MAPS)
LIST: Final = WireType("list", _LISTS)
MESSAGE_ID: Final = WireType(
    "message-id",
    {code: READERS[code] for code in (0x44, 0x53, 0x80, 0x98, 0xA0, 0xB0, 0xA1, 0xB1)},
)
ARRAY: Final = WireType("array", _ARRAYS)


def read_typed(wire_type: WireType, data: Buffer, at: int) -> tuple[Any, int]:
    """Read a value of a known type; the offset is that of its constructor."""
    reader = wire_type.readers.get(data[at])
    if reader is None:
        raise AmqpError(f"expected a {wire_type.name}, found the constructor 0x{data[at]:02x}")
    return reader(data, at + 1)
