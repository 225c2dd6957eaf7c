"""What the tasks of a reconciliation pass to each other: packed Arrow tables, by kind and bucket.

Spark only moves bytes between the tasks: a row of a shuffle is a table. The buckets of a stage
divide its rows by a hash, so that a bucket has about REPORT_PARTITION_ROWS rows in its arrays.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.cost.pieces import packed, unpacked
from twinbus.limits import DELAY_STEPS, FLOW_STEPS
from twinbus.message import Int64s

Hashes = npt.NDArray[np.uint64]
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


class Kind(IntEnum):
    """The kinds of tables; a bucket gets them in this order."""

    TALLY = 0  # not a table: what was counted
    SUSPECT = 1  # messages that are not accounted for
    TRANSFER = 2  # transfers of messages
    ACCEPTED = 3  # messages that were accepted, by place
    INTERVAL = 4  # messages that ended, or are present
    MESSAGE = 5  # messages by id, with the roles of each
    DELIVERY = 6  # transfers, by destination
    DIVERTED = 7  # messages that an entity accepted after a detour
    DIRECT = 8  # messages that an entity accepted directly from their sender


SCHEMAS: Mapping[Kind, pa.Schema] = {
    Kind.SUSPECT: pa.schema(
        [
            ("ledger", pa.int32()),
            ("path", pa.int32()),
            ("sequence_number", pa.int64()),
            ("message_id", pa.string()),
            ("status", pa.int8()),
            ("accepted", pa.int64()),
        ]
    ),
    Kind.TRANSFER: pa.schema(
        [
            ("ledger", pa.int32()),
            ("queue", pa.int32()),  # codes of paths; queue in lower case
            ("path", pa.int32()),
            ("origin", pa.string()),
            ("sequence_number", pa.int64()),
            ("message_id", pa.string()),
            ("accepted", pa.int64()),
            ("moved", pa.int64()),
            ("bytes", pa.int64()),
            ("result", pa.int8()),  # DEAD or HOME; -1: another result
        ]
    ),
    Kind.ACCEPTED: pa.schema(
        [
            ("queue", pa.int64()),
            ("sequence_number", pa.int64()),
            ("record", pa.int64()),
            ("at", pa.int64()),
            ("path", pa.int32()),
            ("message_id", pa.string()),
        ]
    ),
    Kind.INTERVAL: pa.schema(
        [
            ("queue", pa.int64()),
            ("first", pa.int64()),
            ("last", pa.int64()),
            ("ending", pa.int8()),  # a code, or PRESENT
            ("at", pa.int64()),
            ("record", pa.int64()),
        ]
    ),
    Kind.MESSAGE: pa.schema(
        [
            ("roles", pa.uint8()),
            ("queue", pa.int64()),
            ("sequence_number", pa.int64()),
            ("record", pa.int64()),
            ("at", pa.int64()),
            ("path", pa.int32()),
            ("message_id", pa.string()),
        ]
    ),
    Kind.DELIVERY: pa.schema(
        [("path", pa.int32()), ("bytes", pa.int64()), ("result", pa.int8()), ("delay", pa.int64())]
    ),
    Kind.DIVERTED: pa.schema(
        [
            ("at", pa.int64()),
            ("first", pa.int64()),
            ("sent", pa.int64()),
            ("backlog_number", pa.int64()),
        ]
    ),
    Kind.DIRECT: pa.schema([("at", pa.int64()), ("first", pa.int64())]),
}
DEAD, HOME = 0, 1  # results of a transfer


@dataclass(slots=True)
class Counts:
    """What tasks have counted; small enough for the driver."""

    statuses: Counter[tuple[int, int]] = field(default_factory=Counter)  # by queue and status
    diverted: Int64s = field(default_factory=lambda: np.zeros(FLOW_STEPS, np.int64))
    moved: Int64s = field(default_factory=lambda: np.zeros(FLOW_STEPS, np.int64))
    delays: Int64s = field(default_factory=lambda: np.zeros(DELAY_STEPS, np.int64))
    drained: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))  # time by outage, or -1

    def add(self, other: "Counts") -> None:
        """Add what another task has counted."""
        self.statuses.update(other.statuses)
        self.diverted += other.diverted
        self.moved += other.moved
        self.delays += other.delays
        if len(other.drained):
            own = self.drained if len(self.drained) else other.drained
            self.drained = np.maximum(own, other.drained)


Content = tuple[int, bytes | Counts]  # a kind, and a packed table of it
Item = tuple[int, Content]  # with its bucket


class TaskTables:
    """The tables that a task got, by kind."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._found: dict[int, list[bytes | Counts]] = {}
        for _, (kind, content) in items:
            self._found.setdefault(kind, []).append(content)

    def take(self, kind: Kind) -> pa.Table:
        """Remove and return all rows of a kind, in one chunk."""
        return tables_of(self._found.pop(kind, []), kind)

    def passed_on(self) -> Iterator[Content]:
        """Yield the tables that were not taken: the next task gets them."""
        for kind, contents in self._found.items():
            for content in contents:
                yield kind, content


def tables_of(contents: Iterable[bytes | Counts], kind: Kind) -> pa.Table:
    """Return packed tables of a kind as one."""
    return unpacked([content for content in contents if isinstance(content, bytes)], SCHEMAS[kind])


def by_bucket(kind: Kind, table: pa.Table, buckets: npt.NDArray[np.int64]) -> Iterator[Item]:
    """Divide a table by the bucket of each row."""
    if not len(buckets):
        return
    if buckets[0] == buckets[-1] and (buckets == buckets[0]).all():
        yield int(buckets[0]), (kind, packed(table))
        return
    order = np.argsort(buckets.astype(np.int32), kind="stable")
    ordered = table.take(pa.array(order))
    bounds = np.flatnonzero(np.diff(buckets[order], prepend=-1))
    for start, end in zip(bounds, [*bounds[1:], len(order)], strict=True):
        yield int(buckets[order[start]]), (kind, packed(ordered.slice(start, end - start)))


def mixed(numbers: Int64s | Hashes) -> Hashes:
    """Return a hash of each number; each bit of the number affects all bits of the hash."""
    found: Hashes = numbers.astype(np.uint64) * _FACTORS[0]
    for factor in _FACTORS[1:]:
        found = (found ^ (found >> np.uint64(31))) * factor
    return found ^ (found >> np.uint64(32))


def text_hashes(texts: pa.Array) -> Hashes:
    """Return a hash of each text, computed from eight bytes at a time; for null, any number."""
    if not len(texts):
        return np.zeros(0, np.uint64)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    content = np.concatenate([content[ends[0] : ends[-1]], np.zeros(8, np.uint8)])
    words = np.lib.stride_tricks.as_strided(
        content[:8].view("<u8"), (len(content) - 7,), (1,), writeable=False
    )
    starts, lengths = (ends[:-1] - ends[0]).astype(np.int64), np.diff(ends).astype(np.int64)
    found = mixed(lengths)
    for position in range(0, int(lengths.max()), 8):
        is_longer = lengths > position
        everywhere = bool(is_longer.all())
        which = slice(None) if everywhere else np.flatnonzero(is_longer)
        left = lengths[which] - position
        word = words[starts[which] + position]
        spare = np.clip(8 - left, 0, 7).astype(np.uint64) * np.uint64(8)
        word = word << spare >> spare
        found[which] = (found[which] ^ word) * _FACTORS[0]
        found[which] ^= found[which] >> np.uint64(29)
    return mixed(found)
