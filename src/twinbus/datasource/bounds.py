"""Derives which messages a query can need from the conditions that Spark passes to a reader.

Spark evaluates every condition itself as well; bounds only avoid reading messages that cannot
match. Conditions on other columns, and other kinds of conditions, have no effect here.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from twinbus.limits import MAX_INT64
from twinbus.message import TIMESTAMP

_NUMBER, _TIME = ("sequence_number",), ("enqueued_time_utc",)
_EQUAL = EqualTo | EqualNullSafe | In


@dataclass(frozen=True, slots=True)
class Bounds:
    """Ranges of sequence numbers and times, both ends included."""

    first: int = 0
    last: int = MAX_INT64
    since: datetime | None = None
    until: datetime | None = None

    @classmethod
    def of(cls, filters: list[Filter]) -> "Bounds":
        """Return the bounds of conditions that must all be true."""
        bounds = cls()
        for condition in filters:
            bounds = bounds._narrowed(condition)
        return bounds

    def _narrowed(self, condition: Any) -> "Bounds":
        column, value = getattr(condition, "attribute", None), getattr(condition, "value", None)
        values: list[Any] = [*condition.value] if isinstance(condition, In) else [value]
        is_low = isinstance(condition, _EQUAL | GreaterThan | GreaterThanOrEqual)
        is_high = isinstance(condition, _EQUAL | LessThan | LessThanOrEqual)
        if column == _NUMBER and all(type(number) is int for number in values):
            low = min(values) + isinstance(condition, GreaterThan) if is_low else self.first
            high = max(values) - isinstance(condition, LessThan) if is_high else self.last
            return replace(self, first=max(self.first, low), last=min(self.last, high))
        if column == _TIME and all(isinstance(time, datetime) and time.tzinfo for time in values):
            since, until = self.since, self.until
            return replace(
                self,
                since=max(since or min(values), min(values)) if is_low else since,
                until=min(until or max(values), max(values)) if is_high else until,
            )
        return self

    def inside(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages whose enqueued time is within the bounds."""
        times = batch.column("enqueued_time_utc")
        if self.since is not None:
            batch = batch.filter(pc.greater_equal(times, pa.scalar(self.since, TIMESTAMP)))
            times = batch.column("enqueued_time_utc")
        if self.until is not None:
            batch = batch.filter(pc.less_equal(times, pa.scalar(self.until, TIMESTAMP)))
        return batch
