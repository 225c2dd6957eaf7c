"""The syphon's book: which ranges are at hand, and what the next batch carries. Pure.

A range comes in when it is leased and goes when nothing of it is left. Ranges of which a
destination keeps messages stay at hand, in order, and are carried again when it may be tried; what
came to the queue after them is carried meanwhile, so that no destination holds up another. A queue
goes to one task of a batch, with its ranges in order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from twinbus.limits import CROWDED_RANGES, HELD_RANGES, MAX_LEASE_MESSAGES
from twinbus.protocol.commands import RangeLease
from twinbus.syphon.carrier import Carried, Range, canonical
from twinbus.syphon.destinations import Destinations, Trouble

_STALE = "StaleEpoch"


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker carries: ranges of a queue, in order."""

    queue: str
    ranges: tuple[Range, ...]
    held_back: tuple[str, ...] = ()  # destinations to pass over
    on_trial: Mapping[str, int] = field(default_factory=dict)  # destination -> epoch to try it in

    def to_json(self) -> list[Any]:
        """Return it as offsets and the desk keep it."""
        ranges = [[one.epoch, one.first, one.last, one.origin] for one in self.ranges]
        return [self.queue, ranges, list(self.held_back), dict(self.on_trial)]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Task":
        """Return a task that was kept."""
        queue, ranges, held_back, on_trial = value
        return cls(queue, tuple(Range(*one) for one in ranges), tuple(held_back), on_trial)


@dataclass(slots=True)
class _Held:
    range: Range
    count: int  # messages when it was leased
    oldest_us: int
    kept: Mapping[str, int] = field(default_factory=dict)  # destination -> messages it keeps here
    retry_at: int = 0  # where it was not read or not settled

    @property
    def left(self) -> int:
        """How many messages are left in it, as far as is known."""
        return sum(self.kept.values()) if self.kept else self.count

    @property
    def is_fresh(self) -> bool:
        """Whether it was never carried."""
        return not self.kept and not self.retry_at


@dataclass(slots=True)
class _Queue:
    ranges: list[_Held] = field(default_factory=list)
    behind: int = 0  # messages that lay behind the last range


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What a batch came to."""

    new_troubles: Sequence[Trouble]
    ended_troubles: Sequence[str]
    surplus: Sequence[tuple[str, int]]  # leases of no use any more


class Book:
    """Of one syphon."""

    def __init__(
        self, queues: Iterable[str], destinations: Destinations, retry_us: int, rival_memory_us: int
    ) -> None:
        self._queues = {path: _Queue() for path in queues}
        self._destinations = destinations
        self._retry_us = retry_us
        self._rival_memory_us = rival_memory_us
        self._turn = 0
        self._rivals: dict[str, int] = {}  # other syphons, and until when they are reckoned with

    @property
    def queues(self) -> list[str]:
        """The backlog queues."""
        return list(self._queues)

    def add_queues(self, paths: Iterable[str]) -> None:
        """Plan for these backlog queues, too."""
        for path in paths:
            self._queues.setdefault(path, _Queue())

    # -- ranges come -------------------------------------------------------------------------------

    def epochs(self, queue: str) -> list[int]:
        """Return the leases at hand, which the next one may pass over."""
        return [held.range.epoch for held in self._queues[queue].ranges]

    def has_room(self, queue: str) -> bool:
        """Whether another range of a queue can be used."""
        return len(self._queues[queue].ranges) < HELD_RANGES

    def meet(self, rival: str | None, now: int) -> None:
        """Note another syphon: somebody whose lease was in the way."""
        if rival is not None:
            self._rivals[rival] = now + self._rival_memory_us

    def grant(self, queue: str, lease: RangeLease, oldest_us: int) -> None:
        """Take in a range."""
        leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
        held = self._queues[queue]
        held.ranges.append(_Held(leased, lease.message_count, oldest_us))
        held.behind = lease.left_behind

    def give_up_surplus(self, now: int) -> list[tuple[str, int]]:
        """Return what is to be released so that other syphons have their share, and forget it."""
        self._rivals = {rival: until for rival, until in self._rivals.items() if until > now}
        share = -(-len(self._queues) // (1 + len(self._rivals)))
        busy = {path: queue for path, queue in self._queues.items() if queue.ranges}
        fresh = [p for p, queue in busy.items() if not any(held.kept for held in queue.ranges)]
        keep = max(share - (len(busy) - len(fresh)), 0)
        self._turn += 1  # so that it is not always the same ones that are given away
        at = self._turn % len(fresh) if fresh else 0
        surplus = [*fresh[at:], *fresh[:at]][keep:]
        return [(path, epoch) for path in surplus for epoch in self.clear(path)]

    # -- batches -----------------------------------------------------------------------------------

    def tasks(self, now: int, *, split: bool = False, fresh_only: bool = False) -> list[Task]:
        """Return what there is to carry now: a task for each queue, or `split` for each range."""
        waiting, on_trial = self._destinations.waiting(now), self._destinations.on_trial(now)
        tasks = []
        for path, queue in self._queues.items():
            tried_here = self._tried_here(queue, on_trial)
            held_back = tuple(sorted(waiting | (on_trial - tried_here)))
            trials = _trials(queue.ranges, tried_here)
            ready = list(_ready(queue.ranges, set(held_back), trials, now))
            ranges = [held.range for held in ready if held.is_fresh or not fresh_only]
            if ranges:
                on_trial -= tried_here
                waiting |= tried_here  # by this queue alone
                parts = [(one,) for one in ranges] if split else [tuple(ranges)]
                tasks += [Task(path, part, held_back, trials) for part in parts]
        return tasks

    def _tried_here(self, queue: _Queue, on_trial: set[str]) -> set[str]:
        """Return the destinations on trial that this queue tries: those it keeps messages of."""
        kept = {name for held in queue.ranges for name in held.kept}
        if any(not held.kept for held in queue.ranges):  # who knows what is in it
            kept |= on_trial - set(self.kept())
        return on_trial & kept

    def kept(self) -> Counter[str]:
        """Return how many messages at hand each destination keeps waiting."""
        kept: Counter[str] = Counter()
        for held in self._held():
            kept.update(held.kept)
        return kept

    def _held(self) -> Iterator[_Held]:
        return (held for queue in self._queues.values() for held in queue.ranges)

    def next_due(self, now: int) -> int | None:
        """Return when a destination or a range is to be tried again; None: nothing waits for that.

        A destination of which nothing is at hand is nobody's business.
        """
        kept = self.kept()
        due = [t.due for t in self._destinations.troubles() if canonical(t.destination) in kept]
        due += [held.retry_at for held in self._held() if held.retry_at > now]
        return min(due, default=None)

    def absorb(self, outcomes: Iterable[Carried], now: int) -> Absorbed:
        """Learn what became of ranges."""
        surplus: list[tuple[str, int]] = []
        new: list[Trouble] = []
        ended: list[str] = []
        for carried in outcomes:
            flowed = {name for name in carried.moved if self._destinations.flows(name)}
            ended += sorted(flowed - set(carried.failures))
            for destination, failure in carried.failures.items():
                trouble = self._destinations.failed(destination, failure, now)
                if trouble.failures == 1 and destination not in flowed:
                    new.append(trouble)
            surplus += self._put_back(carried, now)
        return Absorbed(new, ended, surplus)

    def _put_back(self, carried: Carried, now: int) -> list[tuple[str, int]]:
        """Keep what is left of a range at hand, or let it go; return leases of no use any more."""
        queue = self._queues.get(carried.queue)
        held = next((h for h in queue.ranges if h.range == carried.range), None) if queue else None
        if queue is None or held is None:
            return []
        if carried.unread is not None:
            if carried.unread.code == _STALE:
                return self.lose(carried.queue, carried.range.epoch)
            held.retry_at = now + self._retry_us
        elif carried.kept:
            held.kept = {canonical(name): count for name, count in carried.kept.items()}
            held.retry_at = 0
        else:
            queue.ranges.remove(held)
        return []

    def crowded(self) -> list[tuple[str, list[Range]]]:
        """Return queues with many small ranges that wait, and the ranges: to be made one.

        Else a destination that stays down would cost a lease for every few messages.
        """
        found = []
        for path, queue in self._queues.items():
            group: list[Range] = []
            size = 0
            for held in takewhile(lambda held: held.kept and not held.retry_at, queue.ranges):
                is_other = bool(group) and held.range.origin != group[0].origin
                if is_other or size + held.count > MAX_LEASE_MESSAGES:
                    group, size = [], 0
                group.append(held.range)
                size += held.count
            if len(group) >= CROWDED_RANGES:
                found.append((path, group))
        return found

    def merge(self, queue: str, ranges: Sequence[Range], lease: RangeLease) -> bool:
        """Put one range in the place of several; False: they were lost meanwhile."""
        held = self._queues[queue].ranges
        old = [one for one in held if one.range in ranges]
        if len(old) != len(ranges):
            return False
        kept: Counter[str] = Counter()
        for one in old:
            kept.update(one.kept)
        leased = Range(lease.epoch, lease.first, lease.last, lease.origin)
        oldest = min(one.oldest_us for one in old)
        merged = _Held(leased, lease.message_count, oldest, dict(kept))
        at = held.index(old[0])
        held[at : at + len(old)] = [merged]
        return True

    def leases(self) -> list[tuple[str, int]]:
        """Return every lease at hand."""
        return [(path, epoch) for path in self._queues for epoch in self.epochs(path)]

    def lose(self, queue: str, epoch: int) -> list[tuple[str, int]]:
        """Forget a lease that is over; return those behind it, which another may not wait for.

        Whoever leases it next is to find what comes after it, too, or it would be overtaken.
        """
        epochs = self.epochs(queue)
        if epoch not in epochs:
            return []
        at = epochs.index(epoch)
        del self._queues[queue].ranges[at:]
        return [(queue, later) for later in epochs[at + 1 :]]

    def clear(self, queue: str) -> list[int]:
        """Forget the leases of a queue, and return them."""
        epochs = self.epochs(queue)
        self._queues[queue].ranges.clear()
        return epochs

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many messages wait, as far as is known: those at hand and those behind them."""
        return sum(
            sum(held.left for held in queue.ranges) + queue.behind
            for queue in self._queues.values()
        )

    def see_behind(self, queue: str, count: int) -> None:
        """Note that a queue has at least so many messages besides those at hand."""
        held = self._queues[queue]
        held.behind = max(count - sum(one.left for one in held.ranges), 0)

    @property
    def oldest_us(self) -> int | None:
        """When the oldest message at hand was diverted."""
        return min((held.oldest_us for held in self._held()), default=None)


def _trials(ranges: Iterable[_Held], on_trial: set[str]) -> dict[str, int]:
    """Return in which range each destination is tried: the first of those that wait for it.

    One of which nothing waits here is tried wherever it comes up.
    """
    trials: dict[str, int] = {}
    for held in ranges:
        for name in on_trial & set(held.kept):
            trials.setdefault(name, held.range.epoch)
    return trials


def _ready(
    ranges: Iterable[_Held], held_back: set[str], trials: Mapping[str, int], now: int
) -> Iterator[_Held]:
    """Give the ranges of a queue of which something may move, in order.

    A destination on trial is tried in one range, not in all that wait for it. What could not be
    read is not overtaken.
    """
    for held in ranges:
        if held.retry_at > now:
            return
        flowing = set(held.kept) - held_back - set(trials)
        if not held.kept or flowing or held.range.epoch in trials.values():
            yield held
