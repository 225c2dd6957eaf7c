"""Arbitrary AMQP values, and what it means that two of them are the same."""

from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from twinbus.amqp.composites import Composite
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

UNICODE = st.characters(exclude_categories=["Cs"])
ASCII = st.characters(max_codepoint=127)


def _integers(kind: type, bits: int, *, signed: bool) -> st.SearchStrategy[Any]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    near = st.sampled_from([low, high, 0, 1, 127, 255]).filter(lambda n: low <= n <= high)
    return st.one_of(st.integers(low, high), near).map(kind)


PRIMITIVES: dict[type, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    bool: st.booleans(),
    UByte: _integers(UByte, 8, signed=False),
    UShort: _integers(UShort, 16, signed=False),
    UInt: _integers(UInt, 32, signed=False),
    ULong: _integers(ULong, 64, signed=False),
    Byte: _integers(Byte, 8, signed=True),
    Short: _integers(Short, 16, signed=True),
    Int: _integers(Int, 32, signed=True),
    int: _integers(int, 64, signed=True),
    Float: st.floats(width=32, allow_nan=False).map(Float),
    float: st.floats(allow_nan=False),
    Char: UNICODE.map(Char),
    Timestamp: _integers(Timestamp, 64, signed=True),
    UUID: st.uuids(),
    bytes: st.binary(max_size=300),
    str: st.text(UNICODE, max_size=300),
    Symbol: st.text(ASCII, max_size=300).map(Symbol),
}
DESCRIPTORS = st.one_of(PRIMITIVES[ULong], PRIMITIVES[Symbol])
SCALARS = st.one_of(*PRIMITIVES.values())


def arrays(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Array]:
    """Return arrays of every element type."""
    elements = PRIMITIVES | {
        list: st.lists(children, max_size=4),
        dict: maps(children),
        Array: st.lists(PRIMITIVES[int], max_size=3).map(lambda items: Array(int, tuple(items))),
    }
    return st.sampled_from(list(elements)).flatmap(
        lambda element: st.builds(
            Array,
            st.just(element),
            st.lists(elements[element], max_size=5).map(tuple),
            st.one_of(st.none(), DESCRIPTORS),
        )
    )


def maps(children: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Return maps with keys that are different for Python."""
    return st.dictionaries(st.one_of(PRIMITIVES[Symbol], PRIMITIVES[int]), children, max_size=4)


VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        st.lists(children, max_size=6),
        maps(children),
        arrays(children),
        st.builds(Described, DESCRIPTORS, children),
    ),
    max_leaves=12,
)


def are_same(first: Any, second: Any) -> bool:
    """Whether two values are equal, and of the same types all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(are_same, first, second))
    if isinstance(first, dict):
        return are_same(list(first.items()), list(second.items()))
    if isinstance(first, Described):
        return are_same([first.descriptor, first.value], [second.descriptor, second.value])
    if isinstance(first, Array):
        return first.element is second.element and are_same(
            [first.items, first.descriptor], [second.items, second.descriptor]
        )
    if isinstance(first, Composite):
        return are_same(first.GETTER(first), second.GETTER(second))
    return bool(first == second)
