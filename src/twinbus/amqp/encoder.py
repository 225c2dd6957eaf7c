"""Encodes the values of types.py, each in its smallest form.

A value that does not fit its type raises InvalidArgumentError, because it is a mistake of the
program. `write_uint` and similar functions encode a plain Python value as the type in their name.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

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
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_DEPTH, MAX_AMQP_ITEMS

Writer = Callable[[Any], bytes]
_DEPTH: Final = 2 * MAX_AMQP_DEPTH  # more than is ever decoded: decoded values can be sent back


def encode(value: object) -> bytes:
    """Encode a value in its smallest form."""
    try:
        return _encoded(value, _DEPTH)
    except (struct.error, UnicodeEncodeError, OverflowError) as error:
        raise unencodable(value, error) from error


def unencodable(value: object, cause: object) -> InvalidArgumentError:
    """Return the error for a value that does not fit its AMQP type."""
    kind = type(value).__name__
    return InvalidArgumentError(f"a {kind} cannot be sent by AMQP: {cause!s:.200}")


def _encoded(value: object, depth: int) -> bytes:
    kind = type(value)
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value)
    compound = _COMPOUND_WRITERS.get(kind)
    if compound is not None:
        if not depth:
            raise InvalidArgumentError(
                f"lists and maps are nested deeper than {_DEPTH}, which AMQP peers refuse"
            )
        return compound(value, depth - 1)
    for ancestor in kind.__mro__:  # such as str for a StrEnum
        if ancestor in _WRITERS:
            return _WRITERS[ancestor](value)
    raise InvalidArgumentError(
        f"a {kind.__name__} has no AMQP type; see the table in twinbus.amqp.types"
    )


def _small(code: int) -> list[bytes]:
    return [bytes((code, number)) for number in range(256)]


_UINTS: Final = [b"\x43", *_small(0x52)[1:]]
_ULONGS: Final = [b"\x44", *_small(0x53)[1:]]
_pack_uint = struct.Struct(">BI").pack
_pack_ulong = struct.Struct(">BQ").pack
_pack_small = struct.Struct(">Bb").pack
_pack_int = struct.Struct(">Bi").pack
_pack_long = struct.Struct(">Bq").pack


def write_uint(value: int) -> bytes:
    """Encode a uint."""
    return _UINTS[value] if 0 <= value < 256 else _pack_uint(0x70, value)


def write_ulong(value: int) -> bytes:
    """Encode a ulong."""
    return _ULONGS[value] if 0 <= value < 256 else _pack_ulong(0x80, value)


def _write_int(value: int) -> bytes:
    return _pack_small(0x54, value) if -128 <= value < 128 else _pack_int(0x71, value)


def write_long(value: int) -> bytes:
    """Encode a long."""
    return _pack_small(0x55, value) if -128 <= value < 128 else _pack_long(0x81, value)


def write_boolean(value: bool) -> bytes:  # noqa: FBT001 - the value, not a flag
    """Encode a boolean."""
    return b"\x41" if value else b"\x42"


def _fixed_writer(code: int, layout: str) -> Writer:
    pack = struct.Struct(f">B{layout}").pack
    return lambda value: pack(code, value)


write_timestamp = _fixed_writer(0x83, "q")


def _write_char(value: str) -> bytes:
    if len(value) != 1 or 0xD800 <= ord(value) < 0xE000:
        raise InvalidArgumentError(f"{value!r:.20} is not one character")
    return _pack_uint(0x73, ord(value))


def _write_uuid(value: UUID) -> bytes:
    return b"\x98" + value.bytes


def _sized(code: int, content: bytes) -> bytes:
    size = len(content)
    return bytes((code, size)) + content if size < 256 else _pack_uint(code + 0x10, size) + content


def write_binary(value: bytes | bytearray | memoryview) -> bytes:
    """Encode bytes as a binary."""
    return _sized(0xA0, bytes(value))


def write_string(value: str) -> bytes:
    """Encode text as a string."""
    return _sized(0xA1, value.encode())


def write_symbol(value: str) -> bytes:
    """Encode ASCII text as a symbol."""
    return _sized(0xA3, value.encode("ascii"))


def _write_null(_: None) -> bytes:
    return b"\x40"


def write_compound(code: int, count: int, content: bytes) -> bytes:
    """Add the head of a list (0xC0), map (0xC1) or array (0xE0) to its content."""
    size = len(content)
    if size < 255 and count < 256:
        return bytes((code, size + 1, count)) + content
    if count > MAX_AMQP_ITEMS:
        raise InvalidArgumentError(
            f"a list, map or array has {count} values; at most {MAX_AMQP_ITEMS} are allowed"
        )
    return _COMPOUND_HEAD.pack(code + 0x10, size + 4, count) + content


_COMPOUND_HEAD: Final = struct.Struct(">BII")


def _write_list(values: Sequence[object], depth: int) -> bytes:
    if not values:
        return b"\x45"
    return write_compound(0xC0, len(values), b"".join([_encoded(v, depth) for v in values]))


def _write_map(values: Mapping[object, object], depth: int) -> bytes:
    pieces = [_encoded(part, depth) for pair in values.items() for part in pair]
    return write_compound(0xC1, len(pieces), b"".join(pieces))


def _write_described(described: Described, depth: int) -> bytes:
    return _descriptor(described.descriptor) + _encoded(described.value, depth)


def _descriptor(descriptor: object) -> bytes:
    if isinstance(descriptor, ULong):
        return b"\x00" + write_ulong(descriptor)
    if isinstance(descriptor, Symbol):
        return b"\x00" + write_symbol(descriptor)
    raise InvalidArgumentError(f"a descriptor must be a ULong or Symbol, not {descriptor!r:.40}")


def _write_array(array: Array, depth: int) -> bytes:
    element, items = array.element, array.items
    for item in items:
        if type(item) is not element:
            raise InvalidArgumentError(
                f"an array of {element.__name__} cannot contain a {type(item).__name__}"
            )
    if element in _FIXED_ELEMENTS:
        code, content = _fixed_elements(items, *_FIXED_ELEMENTS[element])
    elif element in _VARIABLE_ELEMENTS:
        code, content = _variable_elements(items, *_VARIABLE_ELEMENTS[element])
    elif element in _COMPOUND_ELEMENTS:
        code, content = _compound_elements(items, element, depth)
    else:
        raise InvalidArgumentError(f"there is no array of {element.__name__} in AMQP")
    head = b"" if array.descriptor is None else _descriptor(array.descriptor)
    return write_compound(0xE0, len(items), head + bytes((code,)) + content)


def _fixed_elements(items: Sequence[Any], code: int, layout: str, small: int) -> tuple[int, bytes]:
    """Encode numbers; if there is a `small` code and all of them fit, in one byte each."""
    if small:
        low, high = (0, 255) if small in {0x52, 0x53} else (-128, 127)
        if all(low <= item <= high for item in items):
            code, layout = small, "b" if low else "B"
    if layout == "I" and code == 0x73:
        items = [ord(item) for item in items]
    return code, struct.pack(f">{len(items)}{layout}", *items)


def _variable_elements(
    items: Sequence[Any], code: int, to_bytes: Callable[[Any], bytes]
) -> tuple[int, bytes]:
    contents = [to_bytes(item) for item in items]
    if code in {0x40, 0x98}:  # these types have only one width
        return code, b"".join(contents)
    if all(len(content) < 256 for content in contents):
        return code, b"".join([bytes((len(c),)) + c for c in contents])
    return code + 0x10, b"".join([len(c).to_bytes(4) + c for c in contents])


def _compound_elements(items: Sequence[Any], element: type, depth: int) -> tuple[int, bytes]:
    if items and not depth:
        raise InvalidArgumentError(f"arrays are nested deeper than {_DEPTH}")
    encoded = [_encoded(item, depth - 1) for item in items]
    code = _COMPOUND_ELEMENTS[element]
    if any(piece[0] == code + 0x10 for piece in encoded):
        return code + 0x10, b"".join([_widened(piece, code) for piece in encoded])
    return code, b"".join([b"\x01\x00" if piece == b"\x45" else piece[1:] for piece in encoded])


def _widened(encoded: bytes, code: int) -> bytes:
    """Return a list, map or array without its constructor, with size and count of four bytes."""
    if encoded == b"\x45":
        return _COMPOUND_HEAD.pack(0, 4, 0)[1:]
    if encoded[0] == code:
        return _COMPOUND_HEAD.pack(0, encoded[1] + 3, encoded[2])[1:] + encoded[3:]
    return encoded[1:]


_WRITERS: dict[type, Writer] = {
    type(None): _write_null,
    bool: write_boolean,
    UByte: _fixed_writer(0x50, "B"),
    UShort: _fixed_writer(0x60, "H"),
    UInt: write_uint,
    ULong: write_ulong,
    Byte: _fixed_writer(0x51, "b"),
    Short: _fixed_writer(0x61, "h"),
    Int: _write_int,
    int: write_long,
    Float: _fixed_writer(0x72, "f"),
    float: _fixed_writer(0x82, "d"),
    Char: _write_char,
    Timestamp: write_timestamp,
    UUID: _write_uuid,
    bytes: write_binary,
    bytearray: write_binary,
    memoryview: write_binary,
    str: write_string,
    Symbol: write_symbol,
}
_COMPOUND_WRITERS: Mapping[type, Callable[[Any, int], bytes]] = {
    list: _write_list,
    tuple: _write_list,
    dict: _write_map,
    Described: _write_described,
    Array: _write_array,
}
_FIXED_ELEMENTS: Final = {  # constructor, layout, constructor of the small form
    bool: (0x56, "?", 0),
    UByte: (0x50, "B", 0),
    UShort: (0x60, "H", 0),
    UInt: (0x70, "I", 0x52),
    ULong: (0x80, "Q", 0x53),
    Byte: (0x51, "b", 0),
    Short: (0x61, "h", 0),
    Int: (0x71, "i", 0x54),
    int: (0x81, "q", 0x55),
    Float: (0x72, "f", 0),
    float: (0x82, "d", 0),
    Char: (0x73, "I", 0),
    Timestamp: (0x83, "q", 0),
}
_VARIABLE_ELEMENTS: Final[Mapping[type, tuple[int, Callable[[Any], bytes]]]] = {
    type(None): (0x40, lambda _: b""),
    UUID: (0x98, lambda value: value.bytes),
    bytes: (0xA0, bytes),
    str: (0xA1, str.encode),
    Symbol: (0xA3, lambda value: value.encode("ascii")),
}
_COMPOUND_ELEMENTS: Final[Mapping[type, int]] = {list: 0xC0, dict: 0xC1, Array: 0xE0}


def register_writer(kind: type, writer: Writer) -> None:
    """Register an encoder for values of a type."""
    _WRITERS[kind] = writer
