"""Properties with the same layout, read together.

Most messages of a batch differ in the values of their properties, and not in the names, types and
lengths of them: each value is at the same place. Such properties are the rows of a matrix of bytes,
and a value is a slice of columns, which becomes an Arrow column without a look at each message.
What every row must have in common are the bytes that are not values (the structure).
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.message import Int64s
from twinbus.namespace.rabbitmq.properties import FLAG_OF

Bytes = npt.NDArray[np.uint8]
_LENGTH = struct.Struct(">L")
_FIXED = {ord("I"): ">i4", ord("l"): ">i8", ord("L"): ">i8", ord("t"): "u1"}
_TEXT, _BINARY, _BOOL = b"Sxt"


class Value(NamedTuple):
    """Where a value is in the properties of each message."""

    name: str  # of the property, or of the header
    is_header: bool
    kind: int  # type of a header; a property has the type of a text or a number
    start: int
    end: int


class Layout:
    """The places of the values in encoded properties, and the bytes between them."""

    def __init__(self, encoded: bytes, values: Sequence[Value]) -> None:
        self.values = values
        is_value = np.zeros(len(encoded), bool)
        for value in values:
            is_value[value.start : value.end] = True
        self._structure = np.flatnonzero(~is_value)
        self._expected = np.frombuffer(encoded, np.uint8)[self._structure]

    def rows_of(self, matrix: Bytes) -> Int64s:
        """Return the rows of encoded properties that have this layout."""
        same = (matrix[:, self._structure] == self._expected).all(axis=1)
        return np.flatnonzero(same)


def column_of(value: Value, matrix: Bytes) -> pa.Array:
    """Return the values at a place; raise an error of Arrow if a text is not valid UTF-8."""
    content = np.ascontiguousarray(matrix[:, value.start : value.end])
    form = _FIXED.get(value.kind)
    if form is not None:
        numbers = content.reshape(-1).view(form)
        return pa.array(numbers != 0 if value.kind == _BOOL else numbers.astype(np.int64))
    offsets = np.arange(len(matrix) + 1, dtype=np.int32) * (value.end - value.start)
    kind = pa.string() if value.kind == _TEXT else pa.binary()
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    column = pa.Array.from_buffers(kind, len(matrix), buffers)
    column.validate(full=True)
    return column


def layout_of(encoded: bytes) -> Layout | None:
    """Return the layout of properties; None if they must be read one by one."""
    try:
        values = _values_of(encoded)
    except (IndexError, struct.error):
        return None  # malformed: `properties.py` reports it
    names = [(value.name, value.is_header) for value in values or ()]
    return None if values is None or len(set(names)) < len(names) else Layout(encoded, values)


def _values_of(encoded: bytes) -> list[Value] | None:
    (flags,) = struct.unpack_from(">H", encoded)
    at = 2
    values: list[Value] = []
    for name, flag in FLAG_OF.items():
        if not flags & flag:
            continue
        if name == "headers":
            end = at + 4 + _LENGTH.unpack_from(encoded, at)[0]
            headers = _headers_of(encoded, at + 4, end)
            if headers is None:
                return None
            values += headers
            at = end
            continue
        size = {"timestamp": 8, "delivery_mode": 1, "priority": 1}.get(name)
        if size is None:
            size, at = encoded[at], at + 1
        kind = ord("l") if name == "timestamp" else _TEXT
        values.append(Value(name, is_header=False, kind=kind, start=at, end=at + size))
        at += size
    return values if at == len(encoded) else None


def _headers_of(encoded: bytes, at: int, end: int) -> list[Value] | None:
    values: list[Value] = []
    while at < end:
        after = at + 1 + encoded[at]
        try:
            name = encoded[at + 1 : after].decode()
        except UnicodeDecodeError:
            return None
        kind = encoded[after]
        at = after + 1
        if kind in (_TEXT, _BINARY):
            size, at = _LENGTH.unpack_from(encoded, at)[0], at + 4
        elif kind in _FIXED:
            size = np.dtype(_FIXED[kind]).itemsize
        else:
            return None
        values.append(Value(name, is_header=True, kind=kind, start=at, end=at + size))
        at += size
    return values if at == end else None
