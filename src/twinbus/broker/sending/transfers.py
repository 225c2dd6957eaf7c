"""The memory of transfers: which messages of which origin were taken, in little space.

An origin (see origins.py) numbers its messages. What was taken is kept as intervals, which stay few
because origins hand over in order. Queues whose messages are brought home, and spill stores, are
remembered for ever. Senders and sinks come and go: each belongs to the access key that used it
first, and each key has a share of the memory, so that no key can make the broker forget the
senders of another. What is forgotten can be taken twice, but is never lost.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from twinbus.intervals import Intervals
from twinbus.limits import (
    KNOWN_GAPS,
    KNOWN_INTERVALS,
    KNOWN_SENDERS,
    KNOWN_SENDERS_IN_ALL,
    TRANSFER_INTERVALS,
    TRANSFER_ORIGINS,
)
from twinbus.message import Int64s
from twinbus.protocol.origins import OriginKind, origin_kind

_SENDER, _SINK = OriginKind.SENDER, OriginKind.SINK
ANYBODY = "*"  # owns what was brought home: its sender and the syphon have different keys


class _Pool:
    """Origins that belong to access keys; each key has a share."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # origin -> its owner
        self._held: dict[str, dict[str, Intervals]] = {}  # owner -> origins, latest used last
        self._intervals: dict[str, int] = {}  # owner -> how many, over all its origins

    def owner(self, origin: str) -> str | None:
        """Return whom an origin belongs to; None: it is not known."""
        return self._owners.get(origin)

    def get(self, origin: str) -> Intervals | None:
        """Return what was taken of an origin."""
        owner = self._owners.get(origin)
        return None if owner is None else self._held[owner][origin]

    def goes_on(self, origin: str, number: int, user: str) -> bool:
        """Whether an origin is known, belongs to this key, and all its numbers are lower."""
        if self._owners.get(origin) != user:
            return False
        return self._held[user][origin].ends_before(number)

    def take(self, origin: str, owner: str, intervals: Iterable[Sequence[int]]) -> None:
        """Remember numbers of an origin, and forget what is beyond the owner's share."""
        owner = self._owners.setdefault(origin, owner)
        known = self._held.setdefault(owner, {})
        before = known.pop(origin, None)
        held = known[origin] = Intervals() if before is None else before
        growth = 0
        for first, last in intervals:
            growth += held.add(first, last)
        if before is not None and not growth:
            return  # nearly always: a known sender goes on where it was
        count = len(held)
        held.keep_latest(KNOWN_GAPS)
        self._intervals[owner] = self._intervals.get(owner, 0) + growth + len(held) - count
        while len(known) > 1 and (
            len(known) > KNOWN_SENDERS or self._intervals[owner] > KNOWN_INTERVALS
        ):
            self._forget_oldest(owner)
        if len(self._owners) > KNOWN_SENDERS_IN_ALL:
            self._forget_oldest(max(self._held, key=lambda one: len(self._held[one])))

    def _forget_oldest(self, owner: str) -> None:
        origin = next(iter(self._held[owner]))
        self._intervals[owner] -= len(self._held[owner].pop(origin))
        del self._owners[origin]

    def __iter__(self) -> Iterator[tuple[str, str, Intervals]]:
        for owner, known in self._held.items():
            for origin, intervals in known.items():
                yield origin, owner, intervals


class Transfers:
    """What was taken from each origin."""

    def __init__(self) -> None:
        self._taken: dict[str, Intervals] = {}  # for ever
        self._namers: dict[str, str] = {}  # of those: origin -> the key of one entity that named it
        self._named_origins: Counter[str] = Counter()  # by that key
        self._named_intervals: Counter[str] = Counter()
        self._senders, self._sinks = _Pool(), _Pool()

    def _pool(self, origin: str) -> _Pool | None:
        kind = origin_kind(origin)
        if kind is _SENDER:
            return self._senders
        return self._sinks if kind is _SINK else None

    def _held(self, origin: str) -> Intervals | None:
        pool = self._pool(origin)
        return self._taken.get(origin) if pool is None else pool.get(origin)

    def owner(self, origin: str) -> str | None:
        """Return the key a sender or sink belongs to; None: it is new, or belongs to nobody."""
        pool = self._pool(origin)
        return None if pool is None else pool.owner(origin)

    def goes_on(self, sender: str, number: int, user: str) -> bool:
        """Whether a sender is known, belongs to this key, and all its numbers so far are lower."""
        return self._senders.goes_on(sender, number, user)

    def end_before(self, origin: str, number: int) -> bool:
        """Whether no number of an origin from this one on was taken."""
        held = self._held(origin)
        return held is None or held.ends_before(number)

    def taken(self, origin: str, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of an origin's numbers were taken before."""
        held = self._held(origin)
        return np.zeros(len(numbers), bool) if held is None else held.contains(numbers)

    def take(self, origin: str, intervals: Iterable[Sequence[int]], owner: str = "") -> None:
        """Remember that these were taken; a new sender or sink belongs to the owner."""
        pool = self._pool(origin)
        if pool is not None:
            pool.take(origin, owner, intervals)
            return
        held = self._taken.get(origin)
        if held is None:
            held = self._taken[origin] = Intervals()
            if owner:
                self._namers[origin] = owner
                self._named_origins[owner] += 1
        before = len(held)
        for first, last in intervals:
            held.add(first, last)
        if origin in self._namers:
            self._named_intervals[self._namers[origin]] += len(held) - before

    def knows(self, origin: str) -> bool:
        """Whether anything was taken from a queue."""
        return origin in self._taken

    def has_room(self, key: str, new_origins: int, intervals: int) -> bool:
        """Whether a key of one entity may make the memory of queues grow by so much.

        What was taken from a queue is never forgotten, so what a key may add has a bound.
        """
        return (
            self._named_origins[key] + new_origins <= TRANSFER_ORIGINS
            and self._named_intervals[key] + intervals <= TRANSFER_INTERVALS
        )

    def forget(self, origin: str) -> None:
        """Forget an origin that can hand nothing over again."""
        self._taken.pop(origin, None)

    def origins(self) -> Iterable[tuple[str, str, list[tuple[int, int]]]]:
        """Give each origin with its owner and its intervals, the latest used last."""
        for origin, intervals in self._taken.items():
            yield origin, self._namers.get(origin, ""), list(intervals)
        for pool in (self._senders, self._sinks):
            for origin, owner, intervals in pool:
                yield origin, owner, list(intervals)
