"""The type system of AMQP 1.0 as Python values that round-trip with their exact type.

    AMQP                        Python          AMQP        Python
    null                        None            char        Char(str)
    boolean                     bool            timestamp   Timestamp(int), ms since 1970
    ubyte ushort uint ulong     UByte ...(int)  uuid        uuid.UUID
    byte short int              Byte ...(int)   binary      bytes
    long                        int             string      str
    float                       Float(float)    symbol      Symbol(str)
    double                      float           list        list (tuples are encoded, too)
    decimal32/64/128            refused         map         dict
    described value             Described       array       Array

A plain int is a long, because a long can represent most integers of Python programs. Encoders
choose the smallest form. The decoder refuses a map with two keys that are equal in Python (1 and
true, "a" and the symbol a), because a dict would lose one of the entries.

encoder.py writes these values and checks their ranges; decoder.py reads them.
"""

from dataclasses import dataclass
from typing import Any


class UByte(int):
    """An unsigned byte."""

    __slots__ = ()


class UShort(int):
    """An unsigned number of 16 bits."""

    __slots__ = ()


class UInt(int):
    """An unsigned number of 32 bits."""

    __slots__ = ()


class ULong(int):
    """An unsigned number of 64 bits."""

    __slots__ = ()


class Byte(int):
    """A signed byte."""

    __slots__ = ()


class Short(int):
    """A signed number of 16 bits."""

    __slots__ = ()


class Int(int):
    """A signed number of 32 bits."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since 1970 (UTC)."""

    __slots__ = ()


class Float(float):
    """A floating-point number of 32 bits."""

    __slots__ = ()


class Char(str):
    """One Unicode character."""

    __slots__ = ()


class Symbol(str):
    """An ASCII name. It equals the str with the same text, so a str finds it as a key of a map."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A value with a descriptor of its meaning."""

    descriptor: ULong | Symbol
    value: Any


@dataclass(frozen=True, slots=True)
class Array:
    """Values of the same type; a descriptor, if any, applies to each of them."""

    element: type  # the Python type of the elements, as in the module docstring
    items: tuple[Any, ...]
    descriptor: ULong | Symbol | None = None
