"""The memory of transfers: which messages of which origin were accepted, in little space.

An origin (see origins.py) numbers its messages. The accepted numbers are stored as intervals, which
stay few because origins send in order. Queues whose messages are brought home, and spill stores,
are remembered forever. The number of remembered senders and sinks is limited: each belongs to the
access key that used it first, and each key has a share of the memory, so that no key can make the
broker forget the senders of another. A message whose number was forgotten may be accepted twice,
but is never lost.
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
ANY_KEY = "*"  # owns the senders of messages brought home: a syphon has another key than the sender


class _Pool:
    """Origins that belong to access keys; each key has a share."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # origin -> its owner
        self._origins: dict[str, dict[str, Intervals]] = {}  # by owner: origins, latest used last
        self._intervals: dict[str, int] = {}  # by owner: number of intervals of all its origins

    def owner(self, origin: str) -> str | None:
        """Return the owner of an origin; None if it is unknown."""
        return self._owners.get(origin)

    def get(self, origin: str) -> Intervals | None:
        """Return the accepted numbers of an origin."""
        owner = self._owners.get(origin)
        return None if owner is None else self._origins[owner][origin]

    def goes_on(self, origin: str, number: int, user: str) -> bool:
        """Whether an origin belongs to the key `user` and has only accepted lower numbers."""
        if self._owners.get(origin) != user:
            return False
        return self._origins[user][origin].ends_before(number)

    def take(self, origin: str, owner: str, intervals: Iterable[Sequence[int]]) -> None:
        """Remember numbers of an origin; forget the owner's oldest origins beyond its share."""
        owner = self._owners.setdefault(origin, owner)
        known = self._origins.setdefault(owner, {})
        before = known.pop(origin, None)
        taken = known[origin] = Intervals() if before is None else before
        growth = 0
        for first, last in intervals:
            growth += taken.add(first, last)
        if before is not None and not growth:
            return  # nearly always: the numbers continue those of a known sender
        count = len(taken)
        taken.keep_latest(KNOWN_GAPS)
        self._intervals[owner] = self._intervals.get(owner, 0) + growth + len(taken) - count
        while len(known) > 1 and (
            len(known) > KNOWN_SENDERS or self._intervals[owner] > KNOWN_INTERVALS
        ):
            self._forget_oldest(owner)
        if len(self._owners) > KNOWN_SENDERS_IN_ALL:
            self._forget_oldest(max(self._origins, key=lambda user: len(self._origins[user])))

    def _forget_oldest(self, owner: str) -> None:
        origin = next(iter(self._origins[owner]))
        self._intervals[owner] -= len(self._origins[owner].pop(origin))
        del self._owners[origin]

    def __iter__(self) -> Iterator[tuple[str, str, Intervals]]:
        for owner, known in self._origins.items():
            for origin, intervals in known.items():
                yield origin, owner, intervals


class Transfers:
    """The accepted numbers of each origin."""

    def __init__(self) -> None:
        self._taken: dict[str, Intervals] = {}  # origins that are remembered forever
        # A bounded key may add only a limited number of queues and intervals to `_taken`. For each
        # origin that a bounded key was the first to use: that key.
        self._first_users: dict[str, str] = {}
        self._origin_counts: Counter[str] = Counter()  # by bounded key: number of its origins
        self._interval_counts: Counter[str] = Counter()  # by bounded key: number of intervals
        self._senders, self._sinks = _Pool(), _Pool()

    def _pool(self, origin: str) -> _Pool | None:
        kind = origin_kind(origin)
        if kind is _SENDER:
            return self._senders
        return self._sinks if kind is _SINK else None

    def _intervals_of(self, origin: str) -> Intervals | None:
        pool = self._pool(origin)
        return self._taken.get(origin) if pool is None else pool.get(origin)

    def owner(self, origin: str) -> str | None:
        """Return the key that owns a sender or sink; None if it is new or has no owner."""
        pool = self._pool(origin)
        return None if pool is None else pool.owner(origin)

    def goes_on(self, sender: str, number: int, user: str) -> bool:
        """Whether a sender belongs to the key `user` and has only accepted lower numbers."""
        return self._senders.goes_on(sender, number, user)

    def end_before(self, origin: str, number: int) -> bool:
        """Return whether all accepted numbers of an origin are lower than this."""
        taken = self._intervals_of(origin)
        return taken is None or taken.ends_before(number)

    def taken(self, origin: str, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Return which numbers of an origin were accepted before."""
        taken = self._intervals_of(origin)
        return np.zeros(len(numbers), bool) if taken is None else taken.contains(numbers)

    def take(self, origin: str, intervals: Iterable[Sequence[int]], owner: str = "") -> None:
        """Remember accepted numbers; a new sender or sink belongs to `owner`."""
        pool = self._pool(origin)
        if pool is not None:
            pool.take(origin, owner, intervals)
            return
        taken = self._taken.get(origin)
        if taken is None:
            taken = self._taken[origin] = Intervals()
            if owner:
                self._first_users[origin] = owner
                self._origin_counts[owner] += 1
        before = len(taken)
        for first, last in intervals:
            taken.add(first, last)
        if origin in self._first_users:
            self._interval_counts[self._first_users[origin]] += len(taken) - before

    def knows(self, origin: str) -> bool:
        """Return whether any message of this origin, which is a queue, was accepted."""
        return origin in self._taken

    def has_room(self, key: str, new_origins: int, intervals: int) -> bool:
        """Return whether a bounded key may add this many queues and intervals.

        A key without the claim Transfer on the whole namespace is bounded, because the broker
        never forgets the numbers of a queue.
        """
        return (
            self._origin_counts[key] + new_origins <= TRANSFER_ORIGINS
            and self._interval_counts[key] + intervals <= TRANSFER_INTERVALS
        )

    def forget(self, origin: str) -> None:
        """Forget an origin that will not be used again."""
        self._taken.pop(origin, None)

    def origins(self) -> Iterable[tuple[str, str, list[tuple[int, int]]]]:
        """Yield each origin with its owner and its intervals, the latest used last."""
        for origin, intervals in self._taken.items():
            yield origin, self._first_users.get(origin, ""), list(intervals)
        for pool in (self._senders, self._sinks):
            for origin, owner, intervals in pool:
                yield origin, owner, list(intervals)
