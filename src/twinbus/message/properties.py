"""Application properties: their types, and how a dict of each message becomes one column.

A value is a struct with one child per type, named after it, and exactly one child is set:

    properties: map<string, struct<str, int, float, bool, bytes, datetime, timedelta, uuid>>

Text must be valid UTF-8, integers must fit 64 bits, and times must be aware and within the years
that a datetime has. Messages (brokered.py) check their properties with `property_child`.
"""

import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.clock import MICROSECOND, from_us, moment_us
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_PROPERTY_NAME_CHARACTERS
from twinbus.message.schema import (
    FIXED_PROPERTY_BYTES,
    PROPERTIES_TYPE,
    PROPERTY_TYPES,
    PropertyValue,
)
from twinbus.values import check_utf8, shown

_NO_PROPERTIES = (pa.nulls(0, pa.string()), pa.nulls(0, PROPERTIES_TYPE.item_type))


def check_moment(name: str, moment: object) -> None:
    """Raise unless a value is an aware datetime that can be converted to UTC."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidArgumentError(
            f"{name} is {shown(moment)}; it must be a datetime with a time zone, such as "
            "datetime.now(UTC)"
        )
    try:
        from_us(moment_us(moment))
    except OverflowError as error:
        raise InvalidArgumentError(
            f"{name} = {moment} is beyond the years 1 to 9999 in UTC. Use a time within them"
        ) from error


def property_child(name: str, value: object) -> str:
    """Return the child of the property struct for a value; raise if name or value is invalid."""
    if type(name) is not str or not 0 < len(name) <= MAX_PROPERTY_NAME_CHARACTERS:
        raise InvalidArgumentError(
            f"the property name {shown(name)} must be text of 1 to "
            f"{MAX_PROPERTY_NAME_CHARACTERS} characters"
        )
    check_utf8("a property's name", name)
    child = _CHILD_OF_TYPE.get(type(value))
    if child is None:
        raise InvalidArgumentError(
            f"property {name!r} is a {type(value).__name__}; use one of "
            "str, int, float, bool, bytes, datetime, timedelta, UUID"
        )
    if child == "str":
        check_utf8(f"property {name!r}", value)  # type: ignore[arg-type]
    if child == "int" and not -(2**63) <= value < 2**63:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"property {name!r} = {shown(value)} does not fit 64 bits. Send it as text"
        )
    if child == "timedelta" and abs(value // MICROSECOND) >= 2**63:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"property {name!r} = {value} does not fit 64 bits of µs. Send it as text"
        )
    if child == "datetime":
        check_moment(f"property {name!r}", value)
    return child


_CHILD_OF_TYPE: Mapping[type, str] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    bytes: "bytes",
    datetime: "datetime",
    timedelta: "timedelta",
    UUID: "uuid",
}


def stored_property(child: str, value: Any) -> Any:
    """Return a property value as its Arrow child stores it."""
    if child == "datetime":
        return moment_us(value)
    if child == "timedelta":
        return value // MICROSECOND
    return value.bytes if child == "uuid" else value


def text_bytes(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def property_bytes(value: PropertyValue) -> int:
    """Return the bytes of a property value that count against limits."""
    child = _CHILD_OF_TYPE[type(value)]
    if child in FIXED_PROPERTY_BYTES:
        return FIXED_PROPERTY_BYTES[child]
    return len(value) if isinstance(value, bytes) else text_bytes(str(value))


def no_properties(count: int) -> pa.Array:
    """Return the column of messages without properties."""
    offsets = pa.array(np.zeros(count + 1, np.int32))
    return pa.MapArray.from_arrays(offsets, *_NO_PROPERTIES, type=PROPERTIES_TYPE)


def to_properties_column(bags: Sequence[Mapping[str, PropertyValue]]) -> pa.Array:
    """Return the properties of all messages as one column."""
    if not any(bags):
        return no_properties(len(bags))
    offsets = np.zeros(len(bags) + 1, np.int32)
    names: list[str] = []
    values: dict[str, list[Any]] = {}
    for at, bag in enumerate(bags):
        for name, value in bag.items():
            child = property_child(name, value)
            column = values.setdefault(child, [])
            column.extend([None] * (len(names) - len(column)))
            column.append(stored_property(child, value))
            names.append(name)
        offsets[at + 1] = len(names)
    count = len(names)
    children = []
    for child, kind in PROPERTY_TYPES.items():
        content = values.get(child)
        if content is None:
            children.append(pa.nulls(count, kind))
        else:
            children.append(pa.array(content + [None] * (count - len(content)), kind))
    structs = pa.StructArray.from_arrays(children, fields=list(PROPERTIES_TYPE.item_type))
    keys = pa.array(names, pa.string())
    return pa.MapArray.from_arrays(pa.array(offsets), keys, structs, type=PROPERTIES_TYPE)


def properties_of(column: pa.Array) -> list[Mapping[str, PropertyValue]]:
    """Return the properties of each row as a dict; values have the types that the sender used."""
    count = len(column)
    if not count:
        return []
    offsets = map_offsets(column)
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return [{} for _ in range(count)]
    names = column.keys.slice(first, last - first).to_pylist()
    items = column.items.slice(first, last - first)
    values: list[Any] = [None] * len(names)
    for child in PROPERTY_TYPES:
        content = items.field(child)
        if content.null_count == len(names):
            continue
        at = np.flatnonzero(content.is_valid().to_numpy(zero_copy_only=False))
        for index, value in zip(at.tolist(), property_values(child, content.take(at)), strict=True):
            values[index] = value
    bounds = (offsets - first).tolist()
    return [
        dict(zip(names[start:end], values[start:end], strict=True))
        for start, end in itertools.pairwise(bounds)
    ]


def property_values(child: str, column: pa.Array) -> list[Any]:
    """Return the values of one child, none of them null, as they were sent."""
    if child == "datetime":
        return [from_us(us) for us in column.cast(pa.int64()).to_pylist()]
    if child == "timedelta":
        return [timedelta(microseconds=us) for us in column.cast(pa.int64()).to_pylist()]
    values: list[Any] = column.to_pylist()
    return [UUID(bytes=value) for value in values] if child == "uuid" else values


def map_offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    """Return where each row's properties begin, and where the last one's end."""
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def property_entries(column: pa.Array, offsets: npt.NDArray[np.int32]) -> tuple[pa.Array, pa.Array]:
    """Return the names and values of all rows end to end."""
    first, last = int(offsets[0]), int(offsets[-1])
    names, values = column.keys, column.items
    if first or last != len(names):
        names, values = names.slice(first, last - first), values.slice(first, last - first)
    return names, values
