"""How a composite type (a described list with named fields) is declared, encoded and decoded.

Each class of performatives.py is a row of the table: its descriptor, and its fields in the order of
the wire. `composite` makes it a frozen dataclass whose fields are plain Python values:

    @composite(0x1B, "amqp:example:list")
    class Example(Composite):
        name: str = string()                    no default: the field is mandatory
        size: int = uint(default=0)             null on the wire means the default
        tags: tuple[str, ...] = symbols(default=())   multiple: one value, or an array of them

Trailing fields with their default value are not encoded, unless the class is `explicit`.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform
from uuid import UUID

from twinbus.amqp import decoder, encoder
from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.decoder import Buffer, Reader, WireType
from twinbus.amqp.encoder import Writer
from twinbus.amqp.types import Array, Described, Symbol, ULong
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_DEPTH, MAX_AMQP_TAG_BYTES

Plan = tuple[
    Callable[[object, Any], None],  # sets the field
    Mapping[int, Reader],
    Any,  # the default
    "FieldType",
]


@dataclass(frozen=True, slots=True)
class FieldType:
    """How a field is encoded and decoded."""

    name: str
    type_name: str
    readers: Mapping[int, Reader]
    writer: Writer
    is_mandatory: bool
    default: Any


class Composite:
    """A value with a descriptor and named fields."""

    __slots__ = ()

    NAME: ClassVar[str]
    CODE: ClassVar[int]
    FIELDS: ClassVar[tuple[FieldType, ...]] = ()
    PLAN: ClassVar[tuple[Plan, ...]]
    IS_EXPLICIT: ClassVar[bool]
    GETTER: ClassVar["staticmethod[[Any], tuple[Any, ...]]"]  # returns the values of the fields

    def encode(self) -> bytes:
        """Return the encoded described list."""
        pieces = []
        used = 0
        for value, field_type in zip(self.GETTER(self), self.FIELDS, strict=True):
            if value is None or (value == field_type.default and not self.IS_EXPLICIT):
                if field_type.is_mandatory:
                    raise InvalidArgumentError(
                        f"{field_type.name} of {self.NAME} is mandatory; set it"
                    )
                pieces.append(b"\x40")
                continue
            try:
                pieces.append(field_type.writer(value))
            except (struct.error, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise InvalidArgumentError(
                    f"{field_type.name} of {self.NAME} cannot be {value!r:.80}: {error!s:.200}"
                ) from error
            used = len(pieces)
        count = len(pieces) if self.IS_EXPLICIT else used
        head = bytes((0x00, 0x53, self.CODE))
        if not count:
            return head + b"\x45"
        return head + encoder.write_compound(0xC0, count, b"".join(pieces[:count]))

    @classmethod
    def read_fields(cls, data: Buffer, at: int) -> tuple[Self, int]:
        """Read the list after the descriptor; the caller handles IndexError and struct.error."""
        code = data[at]
        if code == 0x45:
            at, end, count = at + 1, at + 1, 0
        elif code in {0xC0, 0xD0}:
            at, end, count = decoder.read_extent(code, data, at + 1)
        else:
            raise AmqpError(f"{cls.NAME} must be a list, but its constructor is 0x{code:02x}")
        value = object.__new__(cls)
        left = count
        for put, readers, default, field_type in cls.PLAN:
            if left:
                left -= 1
                code = data[at]
                if code != 0x40:
                    reader = readers.get(code)
                    if reader is None:
                        raise _wrong_type(cls.NAME, field_type, code)
                    found, at = reader(data, at + 1)
                    put(value, found)
                    continue
                at += 1
            if field_type.is_mandatory:
                raise AmqpError(
                    f"{cls.NAME} lacks the mandatory field {field_type.name}",
                    Condition.INVALID_FIELD,
                )
            put(value, default)
        if left:
            raise AmqpError(f"{cls.NAME} has {count} fields; at most {len(cls.PLAN)} are allowed")
        if at != end:
            raise AmqpError(f"the fields of {cls.NAME} do not end where the list ends")
        return value, at


def _wrong_type(name: str, field_type: FieldType, code: int) -> AmqpError:
    if code in decoder.READERS or code in {0x00, 0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0}:
        return AmqpError(
            f"{field_type.name} of {name} must be a {field_type.type_name}, but its constructor is "
            f"0x{code:02x}"
        )
    return decoder.unknown_constructor(code)


def count_values(value: object) -> int:
    """Return the number of values in a value, nested ones too."""
    parts: Iterable[object] = ()
    if isinstance(value, Composite):
        parts = value.GETTER(value)
    elif isinstance(value, Mapping):
        parts = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, Array):
        parts = value.items
    elif isinstance(value, Described):
        parts = (value.value,)
    return 1 + sum(map(count_values, parts))


BY_CODE: dict[int, type[Composite]] = {}
BY_NAME: dict[str, type[Composite]] = {}


def composite_class(descriptor: int | str) -> type[Composite] | None:
    """Return the class with a descriptor; None if there is none."""
    return BY_NAME.get(descriptor) if isinstance(descriptor, str) else BY_CODE.get(descriptor)


def read_composite(data: Buffer, at: int) -> tuple[Composite, int]:
    """Read a composite that begins with 0x00 at the offset; refuse unknown descriptors."""
    try:
        if data[at] == 0x00 and data[at + 1] == 0x53:
            kind = BY_CODE.get(data[at + 2])
            if kind is not None:
                return kind.read_fields(data, at + 3)
        if data[at] != 0x00:
            raise AmqpError(f"expected a described list, found the constructor 0x{data[at]:02x}")
        descriptor, at = decoder.read_descriptor(data, at + 1)
        kind = composite_class(descriptor)
        if kind is None:
            raise AmqpError(
                f"there is no performative with the descriptor {descriptor!r:.60}",
                Condition.NOT_IMPLEMENTED,
            )
        return kind.read_fields(data, at)
    except (IndexError, struct.error) as error:
        raise decoder.truncated() from error
    except UnicodeDecodeError as error:
        raise AmqpError(f"a text is not valid {error.encoding}") from error


# -- the types of fields ---------------------------------------------------------------------------


def _field(type_name: str, readers: Mapping[int, Reader], writer: Writer, default: Any) -> Any:
    wire = {"type_name": type_name, "readers": readers, "writer": writer}
    if default is MISSING:
        return field(metadata=wire)
    return field(default=default, metadata=wire)


def _typed(wire_type: WireType, writer: Writer, default: Any) -> Any:
    return _field(wire_type.name, wire_type.readers, writer, default)


def boolean(*, default: Any = MISSING) -> Any:
    """Declare a boolean."""
    return _typed(decoder.BOOLEAN, encoder.write_boolean, default)


def ubyte(*, default: Any = MISSING) -> Any:
    """Declare an unsigned byte."""
    return _typed(decoder.UBYTE, lambda value: bytes((0x50, value)), default)


def ushort(*, default: Any = MISSING) -> Any:
    """Declare an unsigned number of 16 bits."""
    return _typed(decoder.USHORT, lambda value: b"\x60" + value.to_bytes(2), default)


def uint(*, default: Any = MISSING) -> Any:
    """Declare an unsigned number of 32 bits."""
    return _typed(decoder.UINT, encoder.write_uint, default)


def ulong(*, default: Any = MISSING) -> Any:
    """Declare an unsigned number of 64 bits."""
    return _typed(decoder.ULONG, encoder.write_ulong, default)


def timestamp(*, default: Any = MISSING) -> Any:
    """Declare milliseconds since 1970."""
    return _typed(decoder.TIMESTAMP, encoder.write_timestamp, default)


def binary(*, default: Any = MISSING) -> Any:
    """Declare bytes."""
    return _typed(decoder.BINARY, encoder.write_binary, default)


def tag(*, default: Any = MISSING) -> Any:
    """Declare a delivery tag: bytes of a limited length."""

    def write(value: bytes) -> bytes:
        if len(value) > MAX_AMQP_TAG_BYTES:
            raise ValueError(f"a delivery tag has at most {MAX_AMQP_TAG_BYTES} bytes")
        return encoder.write_binary(value)

    def bounded(reader: Reader) -> Reader:
        def read(data: Buffer, at: int) -> tuple[bytes, int]:
            found, at = reader(data, at)
            if len(found) > MAX_AMQP_TAG_BYTES:
                raise AmqpError(
                    f"a delivery tag has {len(found)} bytes; at most {MAX_AMQP_TAG_BYTES} are "
                    "allowed",
                    Condition.INVALID_FIELD,
                )
            return found, at

        return read

    readers = {code: bounded(reader) for code, reader in decoder.BINARY.readers.items()}
    return _field("delivery tag", readers, write, default)


def string(*, default: Any = MISSING) -> Any:
    """Declare text."""
    return _typed(decoder.STRING, encoder.write_string, default)


def symbol(*, default: Any = MISSING) -> Any:
    """Declare an ASCII name."""
    return _typed(decoder.SYMBOL, encoder.write_symbol, default)


def symbols(*, default: Any = MISSING) -> Any:
    """Declare any number of ASCII names: one symbol, or an array of them."""

    def write(names: Iterable[str]) -> bytes:
        return encoder.encode(Array(Symbol, tuple(Symbol(name) for name in names)))

    def single(reader: Reader) -> Reader:
        def read(data: Buffer, at: int) -> tuple[tuple[str, ...], int]:
            name, at = reader(data, at)
            return (name,), at

        return read

    def many(reader: Reader) -> Reader:
        def read(data: Buffer, at: int) -> tuple[tuple[str, ...], int]:
            array, at = reader(data, at)
            if array.element is not Symbol or array.descriptor is not None:
                found = "an array" if array.descriptor is None else "a described array"
                raise AmqpError(
                    f"expected an array of symbols, found {found} of {array.element.__name__}",
                    Condition.INVALID_FIELD,
                )
            return tuple(str(name) for name in array.items), at

        return read

    readers = {code: single(reader) for code, reader in decoder.SYMBOL.readers.items()}
    readers |= {code: many(reader) for code, reader in decoder.ARRAY.readers.items()}
    return _field("symbol or array of symbols", readers, write, default)


def mapping(*, default: Any = MISSING) -> Any:
    """Declare a map with symbols as keys; keys that are plain text are encoded as symbols."""

    def write(values: Mapping[Any, Any]) -> bytes:
        named = {Symbol(key) if type(key) is str else key: v for key, v in values.items()}
        return encoder.encode(named)

    return _typed(decoder.MAP, write, default)


def any_id(*, default: Any = MISSING) -> Any:
    """Declare a message id: ULong, UUID, bytes or str."""

    def write(value: object) -> bytes:
        if not isinstance(value, ULong | UUID | bytes | str):
            raise TypeError("it must be a ULong, UUID, bytes or str")
        return encoder.encode(value)

    return _typed(decoder.MESSAGE_ID, write, default)


def choice(kind: type[Enum], *, default: Any = MISSING) -> Any:
    """Declare an enumeration: an IntEnum is encoded as a ubyte, a StrEnum as a symbol."""
    is_number = issubclass(kind, int)
    wire_type = decoder.UBYTE if is_number else decoder.SYMBOL

    def write(value: Any) -> bytes:
        chosen = kind(value).value
        return bytes((0x50, chosen)) if is_number else encoder.write_symbol(chosen)

    def chooser(reader: Reader) -> Reader:
        def read(data: Buffer, at: int) -> tuple[Any, int]:
            value, at = reader(data, at)
            try:
                return kind(value), at
            except ValueError as error:
                allowed = ", ".join(str(each.value) for each in kind)
                raise AmqpError(
                    f"{value!r:.40} is not a {kind.__name__}; send one of {allowed}",
                    Condition.INVALID_FIELD,
                ) from error

        return read

    readers = {code: chooser(reader) for code, reader in wire_type.readers.items()}
    return _field(wire_type.name, readers, write, default)


def nested(kind: type[Composite], *, default: Any = MISSING) -> Any:
    """Declare a composite of a given class."""
    return _composite_field((kind,), default, is_open=False)


def any_of(*kinds: type[Composite], default: Any = MISSING) -> Any:
    """Declare a composite of one of some classes; an unknown descriptor becomes a Described."""
    return _composite_field(kinds, default, is_open=True)


def _composite_field(kinds: tuple[type[Composite], ...], default: Any, *, is_open: bool) -> Any:
    def write(value: Composite | Described) -> bytes:
        if is_open and isinstance(value, Described):
            return encoder.encode(value)
        if not isinstance(value, kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"it must be one of: {names}")
        return value.encode()

    def read(data: Buffer, at: int) -> tuple[Composite | Described, int]:
        descriptor, behind = decoder.read_descriptor(data, at)
        kind = composite_class(descriptor)
        if kind is None and is_open:
            return cast("tuple[Described, int]", decoder.read_value(data, at - 1, MAX_AMQP_DEPTH))
        if kind not in kinds:
            name = f"{descriptor!r:.60}" if kind is None else kind.NAME
            allowed = ", ".join(each.NAME for each in kinds)
            raise AmqpError(
                f"{name} is not allowed in this field; send one of {allowed}",
                Condition.INVALID_FIELD,
            )
        assert kind is not None
        return kind.read_fields(data, behind)

    return _field("described list", {0x00: read}, write, default)


Declared = TypeVar("Declared", bound=type[Composite])


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(
        any_id,
        binary,
        boolean,
        choice,
        mapping,
        nested,
        any_of,
        string,
        symbol,
        symbols,
        tag,
        timestamp,
        ubyte,
        uint,
        ulong,
        ushort,
    ),
)
def composite(code: int, name: str, *, explicit: bool = False) -> Callable[[Declared], Declared]:
    """Turn a class into a composite type with this descriptor; see the module docstring."""

    def declare(kind: Declared) -> Declared:
        made: Any = dataclass(frozen=True, slots=True, kw_only=True)(kind)
        made.CODE, made.NAME, made.IS_EXPLICIT = code, name.split(":")[1], explicit
        made.FIELDS = tuple(_field_type(field_type) for field_type in fields(made))
        made.PLAN = tuple(
            (made.__dict__[field_type.name].__set__, wire.readers, wire.default, wire)
            for field_type, wire in zip(fields(made), made.FIELDS, strict=True)
        )
        made.GETTER = staticmethod(_values_of([field_type.name for field_type in fields(made)]))
        BY_CODE[code] = BY_NAME[name] = made
        encoder.register_writer(made, made.encode)
        return cast("Declared", made)

    return declare


def _field_type(field_type: Any) -> FieldType:
    return FieldType(
        name=field_type.name.replace("_", "-"),
        is_mandatory=field_type.default is MISSING,
        default=None if field_type.default is MISSING else field_type.default,
        **field_type.metadata,
    )


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of these attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
