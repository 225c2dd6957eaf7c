"""The memory of transfers: which messages of which origin were taken, for ever, in little space.

An origin is a backlog queue, a sender, a sink of Spark or a spill store; it numbers its messages.
What was taken is kept as intervals, which stay few because origins hand over in order. Senders and
sinks come and go: those heard of last are kept, of each kind so many, and of one with many gaps the
latest numbers. What is forgotten can be taken twice, but is never lost.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from twinbus.limits import KNOWN_GAPS, KNOWN_SENDERS, KNOWN_SINKS
from twinbus.message import Int64s

_SENDER = "sender/"  # what the names of senders begin with
_SINK = "//sink/"  # and those of Spark's writers; no path begins so


def sender_source(number: int) -> str:
    """Return the name of a sender as an origin; its number has 64 bits."""
    return f"{_SENDER}{number:016x}"


def sink_source(name: str) -> str:
    """Return the name of a sink as an origin."""
    return f"{_SINK}{name}"


@lru_cache(maxsize=KNOWN_SENDERS)  # asked for with every send
def sender_number(source: str) -> int | None:
    """Return the number of a sender; None: the origin is none."""
    if not source.startswith(_SENDER):
        return None
    try:
        number = int(source.removeprefix(_SENDER), 16)
    except ValueError:
        return None
    return number if sender_source(number) == source else None


def queue_source(path: str, number: int, created_us: int) -> str:
    """Return the name of a queue as an origin; one made anew under its path has another."""
    return f"{path.lower()}#{number}.{created_us}"


def is_of_a_queue(source: str) -> bool:
    """Whether an origin is a queue, whose messages are being brought home."""
    return "#" in source  # no path has one, nor any other origin


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
        """Forget the lowest intervals when there are more than so many."""
        del self._first[:-count], self._last[:-count]

    def add(self, first: int, last: int) -> None:
        """Add the numbers first to last, both included."""
        if self._last and first == self._last[-1] + 1:  # nearly always
            self._last[-1] = last
            return
        start = bisect_right(self._first, first)
        if start and self._last[start - 1] >= first - 1:
            start -= 1
        end = bisect_right(self._first, last + 1)
        if start < end:
            first = min(first, self._first[start])
            last = max(last, self._last[end - 1])
        self._first[start:end] = [first]
        self._last[start:end] = [last]

    def contains(self, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of these numbers are in the set."""
        if not self._first:
            return np.zeros(len(numbers), bool)
        at = np.searchsorted(np.asarray(self._first), numbers, side="right") - 1
        return (at >= 0) & (numbers <= np.asarray(self._last)[at])


def runs(numbers: Int64s) -> list[tuple[int, int]]:
    """Return ascending numbers as intervals."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    first = numbers[np.concatenate([[0], cuts + 1])]
    last = numbers[np.concatenate([cuts, [len(numbers) - 1]])]
    return list(zip(first.tolist(), last.tolist(), strict=True))


class Transfers:
    """What was taken from each origin."""

    def __init__(self) -> None:
        self._taken: dict[str, Intervals] = {}
        self._senders: dict[str, Intervals] = {}  # the one heard of last comes last
        self._sinks: dict[str, Intervals] = {}  # as well

    def _held(self, origin: str) -> Intervals | None:
        return self._kind(origin)[0].get(origin)

    def _kind(self, origin: str) -> tuple[dict[str, Intervals], int | None]:
        """Return where an origin is remembered, and how many are there; None: all, for ever."""
        if sender_number(origin) is not None:
            return self._senders, KNOWN_SENDERS
        if origin.startswith(_SINK):
            return self._sinks, KNOWN_SINKS
        return self._taken, None

    def end_before(self, origin: str, number: int) -> bool:
        """Whether no number of an origin from this one on was taken."""
        held = self._held(origin)
        return held is None or held.ends_before(number)

    def taken(self, origin: str, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of an origin's numbers were taken before."""
        held = self._held(origin)
        return np.zeros(len(numbers), bool) if held is None else held.contains(numbers)

    def take(self, origin: str, intervals: Iterable[Sequence[int]]) -> None:
        """Remember that these were taken."""
        known, most = self._kind(origin)
        held = known.pop(origin) if origin in known else Intervals()
        known[origin] = held
        for first, last in intervals:
            held.add(first, last)
        if most is not None:
            held.keep_latest(KNOWN_GAPS)
            if len(known) > most:
                del known[next(iter(known))]

    def forget(self, origin: str) -> None:
        """Forget an origin that can hand nothing over again."""
        self._taken.pop(origin, None)

    def origins(self) -> Iterable[tuple[str, list[tuple[int, int]]]]:
        """Yield each origin with its intervals."""
        for held in (self._taken, self._senders, self._sinks):
            for origin, intervals in held.items():
                yield origin, list(intervals)
