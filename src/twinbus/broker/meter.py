"""What was asked of the namespace: operations, messages, bytes and 64 KB units, per entity."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from twinbus.message import DELIVERY_SCHEMA, Int64s, sizes

UNIT_BYTES = 64 * 1024  # what one billed operation may carry
METER_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("operation", pa.string()),
        ("outcome", pa.string()),
        ("count", pa.int64()),
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("units", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Load:
    """What one operation carried."""

    messages: int = 0
    size: int = 0
    units: int = 1  # an operation that carries nothing is still one


def load_of(value: object) -> Load:
    """Return what a reply carried."""
    if not isinstance(value, pa.RecordBatch) or value.schema != DELIVERY_SCHEMA:
        return Load()
    return load_of_sizes(sizes(value))


def load_of_sizes(size: Int64s) -> Load:
    """Return the load of messages of these sizes."""
    units, total = len(size), int(size.sum())
    if total > UNIT_BYTES and int(size.max()) > UNIT_BYTES:
        units = int(np.maximum(-(-size // UNIT_BYTES), 1).sum())
    return Load(len(size), total, max(units, 1))


class Meter:
    """Running totals; the writer is the only one to touch them."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str, str], list[int]] = {}

    def record(self, path: str, operation: str, outcome: str, load: Load, count: int = 1) -> None:
        """Count operations and what they carried together."""
        totals = self._totals.setdefault((path, operation, outcome), [0, 0, 0, 0])
        totals[0] += count
        totals[1] += load.messages
        totals[2] += load.size
        totals[3] += load.units

    def table(self) -> pa.RecordBatch:
        """Return the totals, one row per entity, operation and outcome."""
        rows = [(*key, *totals) for key, totals in sorted(self._totals.items())]
        columns: Iterable[Sequence[object]] = zip(*rows, strict=True) if rows else [()] * 7
        return pa.RecordBatch.from_arrays(
            [
                pa.array(column, kind.type)
                for column, kind in zip(columns, METER_SCHEMA, strict=True)
            ],
            schema=METER_SCHEMA,
        )
