"""Sets of whole numbers as intervals: sequence numbers that were taken, moved or settled.

Wherever intervals are kept or sent as bytes (the log, its facts, the wire) they are packed:

    8 bytes   first number, signed, little-endian     for each interval
    8 bytes   last number, included
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from twinbus.message import Int64s

PACKED_BYTES = 16  # of one interval
_PACKED = np.dtype("<i8")
_PAIR = struct.Struct("<qq")


class Intervals:
    """A set of whole numbers, kept as disjoint intervals with gaps between them."""

    def __init__(self, intervals: Iterable[Sequence[int]] = ()) -> None:
        self._first: list[int] = []
        self._last: list[int] = []
        for first, last in intervals:
            self.add(first, last)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._first, self._last, strict=True))

    def __len__(self) -> int:
        """How many intervals, not how many numbers."""
        return len(self._first)

    def ends_before(self, number: int) -> bool:
        """Whether all its numbers are lower."""
        return not self._last or self._last[-1] < number

    def keep_latest(self, count: int) -> None:
        """Keep the `count` highest intervals, and drop the others."""
        del self._first[:-count], self._last[:-count]

    def add(self, first: int, last: int) -> int:
        """Add the numbers first to last, both included.

        Return the change of the number of intervals; negative if intervals were merged.
        """
        if self._last and first == self._last[-1] + 1:  # nearly always
            self._last[-1] = last
            return 0
        start = bisect_right(self._first, first)
        if start and self._last[start - 1] >= first - 1:
            start -= 1
        end = bisect_right(self._first, last + 1)
        if start < end:
            first = min(first, self._first[start])
            last = max(last, self._last[end - 1])
        self._first[start:end] = [first]
        self._last[start:end] = [last]
        return 1 - max(end - start, 0)

    def contains(self, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Return for each of these numbers whether it is in the set."""
        if not self._first:
            return np.zeros(len(numbers), bool)
        at = np.searchsorted(np.asarray(self._first), numbers, side="right") - 1
        return (at >= 0) & (numbers <= np.asarray(self._last)[at])


def pack(intervals: Iterable[Sequence[int]]) -> bytes:
    """Return intervals as bytes."""
    pairs = [*intervals]
    if len(pairs) == 1:  # as nearly all are, and numpy is slow with few numbers
        return _PAIR.pack(*pairs[0])
    return np.array(pairs, _PACKED).tobytes()


def unpack(packed: bytes | memoryview) -> list[tuple[int, int]]:
    """Return the intervals that were packed."""
    pairs: list[list[int]] = np.frombuffer(packed, _PACKED).reshape(-1, 2).tolist()
    return [(first, last) for first, last in pairs]


def runs(numbers: Int64s) -> list[tuple[int, int]]:
    """Return ascending numbers as intervals."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    first = numbers[np.concatenate([[0], cuts + 1])]
    last = numbers[np.concatenate([cuts, [len(numbers) - 1]])]
    return list(zip(first.tolist(), last.tolist(), strict=True))
