"""A few new states of messages as a part of a record, without Arrow.

Nearly every settlement is about one message, and nearly every turn with settlements has few of
them. To build columns of one row and to serialize them takes 35 microseconds. So this module keeps
the bytes of an Arrow batch as a template for each number of rows, and writes the values into a
copy. The part in the log has the same bytes as with Arrow.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from twinbus.broker.store.log_format import SCHEMAS, PartKind
from twinbus.message import column_of

_SCHEMA = SCHEMAS[PartKind.CHANGES]
_LAYOUTS = ("i", "q", "B", "i")  # of the columns, for struct
_MOST_ROWS = 16


class ChangeRow(NamedTuple):
    """The new state of a message."""

    entity: int
    sequence: int
    state: int
    failures: int  # for a message that is gone: the cause


class ChangeRows:
    """The new states of a few messages, for the log."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[ChangeRow]) -> None:
        self.rows = rows

    @property
    def num_rows(self) -> int:
        """The number of messages."""
        return len(self.rows)

    def batch(self) -> pa.RecordBatch:
        """Return the new states as columns."""
        return _batch_of(self.rows)

    def serialize(self) -> bytes | pa.Buffer:
        """Return the bytes that Arrow would write for these columns."""
        rows = self.rows
        if len(rows) > _MOST_ROWS:
            return self.batch().serialize()
        template, columns = _template(len(rows))
        content = bytearray(template)
        for (packed, offset), values in zip(columns, zip(*rows, strict=True), strict=True):
            packed.pack_into(content, offset, *values)
        return bytes(content)


def _batch_of(rows: Sequence[ChangeRow]) -> pa.RecordBatch:
    columns = [
        column_of(field.type, np.array(values, field.type.to_pandas_dtype()))
        for field, values in zip(_SCHEMA, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


@lru_cache(maxsize=_MOST_ROWS)
def _template(rows: int) -> tuple[bytes, list[tuple[struct.Struct, int]]]:
    """Return the serialized columns of a number of rows, and the layout and offset of each column.

    The offsets are found by marker values: no two values of the marked rows are equal.
    """
    numbers = count(0x41)
    marked = [ChangeRow(*(next(numbers) for _ in _LAYOUTS)) for _ in range(rows)]
    content = _batch_of(marked).serialize().to_pybytes()
    columns, at = [], len(content) - _body_bytes(rows)
    for layout, values in zip(_LAYOUTS, zip(*marked, strict=True), strict=True):
        packed = struct.Struct(f"<{rows}{layout}")
        at = content.index(packed.pack(*values), at)
        columns.append((packed, at))
    return content, columns


def _body_bytes(rows: int) -> int:
    """Return the size of the columns in a serialized batch: each is padded to 8 bytes."""
    return sum(-(-rows * struct.calcsize(f"<{layout}") // 8) * 8 for layout in _LAYOUTS)
