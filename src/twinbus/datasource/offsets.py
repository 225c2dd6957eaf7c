"""Offsets of a stream: which messages a batch has, and how many tasks read them.

Spark stores an offset as JSON in its checkpoint, before it runs the batch that ends there:

    batch       number of the batch; 0 is before the first
    owner       owner of the leases
    path        the entity that was read
    origin      unique name of the queue: a later queue with this path has another name
    epoch       the lease of the batch
    partitions  number of tasks
    runs        the messages: first number, count, gap, count, gap, count ...

A batch that is repeated after a restart thus has the same messages in the same tasks, and a lease
that has expired can be taken again for exactly these messages. An earlier version of Twinbus
wrote offsets without path and origin; they have `first`, `last` and `count` instead of `runs`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinbus.protocol.commands import RangeLease

Pairs = tuple[tuple[int, int], ...]  # sequence numbers, both ends included


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """The end of a batch."""

    batch: int
    owner: str
    path: str = ""
    origin: str = ""
    epoch: int = 0
    partitions: int = 0
    intervals: Pairs = ()  # empty before the first batch

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "StreamOffset":
        """Return the offset that Spark stored."""
        if "first" in value:  # of an earlier version
            intervals: Pairs = ((value["first"], value["last"]),)
        else:
            intervals = _unpacked(value.get("runs", ()))
        return cls(
            batch=value["batch"],
            owner=value["owner"],
            path=value.get("path", ""),
            origin=value.get("origin", ""),
            epoch=value.get("epoch", 0),
            partitions=value.get("partitions", 0),
            intervals=intervals,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the offset as Spark stores it."""
        if not self.intervals:
            return {"batch": self.batch, "owner": self.owner}
        return {
            "batch": self.batch,
            "owner": self.owner,
            "path": self.path,
            "origin": self.origin,
            "epoch": self.epoch,
            "partitions": self.partitions,
            "runs": _packed(self.intervals),
        }

    def next(self, lease: RangeLease, path: str, partitions: int) -> "StreamOffset":
        """Return the end of the next batch, which has the messages of a lease."""
        return StreamOffset(
            batch=self.batch + 1,
            owner=lease.owner,
            path=path,
            origin=lease.origin,
            epoch=lease.epoch,
            partitions=partitions,
            intervals=tuple(lease.intervals),
        )


def _packed(intervals: Pairs) -> list[int]:
    """Return intervals as one list of small numbers: a batch may have thousands of them."""
    packed = [intervals[0][0], intervals[0][1] - intervals[0][0] + 1]
    for (_, before), (first, last) in itertools.pairwise(intervals):
        packed += [first - before - 1, last - first + 1]
    return packed


def _unpacked(packed: Sequence[int]) -> Pairs:
    intervals, at = [], 0
    for gap, count in zip(packed[::2], packed[1::2], strict=True):
        first = at + gap
        intervals.append((first, first + count - 1))
        at = first + count
    return tuple(intervals)


def count_of(intervals: Pairs) -> int:
    """Return how many numbers there are in intervals."""
    return sum(last - first + 1 for first, last in intervals)


def shares(intervals: Pairs, parts: int) -> list[Pairs]:
    """Divide intervals into parts with about the same number of messages."""
    count = count_of(intervals)
    parts = min(parts, count)
    cuts = [count * part // parts for part in range(1, parts + 1)]
    divided: list[list[tuple[int, int]]] = [[]]
    seen = 0
    for first, last in intervals:
        at = first
        while at <= last:
            end = min(last, at + cuts[len(divided) - 1] - seen - 1)
            divided[-1].append((at, end))
            seen += end - at + 1
            at = end + 1
            if seen == cuts[len(divided) - 1] and seen < count:
                divided.append([])
    return [tuple(part) for part in divided]
