"""The syphon's book: which ranges the syphon has leased, and what the next batch carries. Pure.

The planner adds a range when the secondary grants its lease. The book drops the range when none of
its messages is left. If a destination fails, its messages stay in their range, and later batches
carry that range again when the destination may be retried. Batches meanwhile carry the ranges
behind it, so that a failing destination does not delay the others. One task of a batch carries all
ranges of a queue, in order. The planner calls the book under its lock.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import takewhile
from typing import Any

from twinbus.limits import CROWDED_RANGES, MAX_LEASE_MESSAGES, MAX_LEASED_RANGES
from twinbus.protocol.commands import RangeLease
from twinbus.syphon.carrier import Carried, Range, Trial, canonical
from twinbus.syphon.destinations import Destinations, Trouble

_STALE = "StaleEpoch"


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """How much a task carries, as known when it was planned; for Spark's metrics only."""

    messages: int
    bytes: int  # of these messages; estimated for a range of which only a part is left
    waiting: int  # messages of the queue that no task of this batch carries
    oldest_us: int  # when the oldest message was diverted


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one worker in a batch: ranges of a queue, in order."""

    queue: str
    ranges: tuple[Range, ...]
    skipped: tuple[str, ...] = ()  # destinations to skip
    on_trial: Mapping[str, Trial] = field(default_factory=dict)  # by destination
    load: TaskLoad | None = None  # None: not known before the worker has received the messages

    def to_json(self) -> list[Any]:
        """Return the task in the form that Spark's offsets and the desk store."""
        ranges = [list(astuple(leased)) for leased in self.ranges]
        load = astuple(self.load) if self.load is not None else None
        return [self.queue, ranges, list(self.skipped), dict(self.on_trial), load]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Task":
        """Return a task from its stored form."""
        queue, ranges, skipped, on_trial, load = value
        of_task = tuple(Range(*fields) for fields in ranges)
        trials = {name: Trial(*trial) for name, trial in on_trial.items()}
        return cls(queue, of_task, tuple(skipped), trials, load and TaskLoad(*load))


@dataclass(slots=True)
class _LeasedRange:
    range: Range
    count: int  # messages when it was leased
    bytes: int  # of these messages
    oldest_us: int
    kept: Mapping[str, int] = field(default_factory=dict)  # messages left, by failing destination
    retry_at: int = 0  # when to retry a range that could not be read or settled

    @property
    def left(self) -> int:
        """How many messages are left in the range, as far as is known."""
        return sum(self.kept.values()) if self.kept else self.count

    @property
    def is_fresh(self) -> bool:
        """Whether no batch has carried the range yet."""
        return not self.kept and not self.retry_at


@dataclass(slots=True)
class _QueueLeases:
    ranges: list[_LeasedRange] = field(default_factory=list)
    behind: int = 0  # messages behind the last range, when it was leased
    losses: int = 0  # how often leases ended before all their messages were carried

    @property
    def left(self) -> int:
        """How many messages wait, as far as is known: in the leased ranges and behind them."""
        return sum(leased.left for leased in self.ranges) + self.behind

    @property
    def kept(self) -> set[str]:
        """The failing destinations whose messages wait in these ranges."""
        return {name for leased in self.ranges for name in leased.kept}


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What the planner must report and release after a batch."""

    new_troubles: Sequence[Trouble]
    ended_troubles: Sequence[str]
    surplus: Sequence[tuple[str, int]]  # leases to release: (queue, epoch)


class Book:
    """The leased ranges of one syphon."""

    def __init__(
        self, queues: Iterable[str], destinations: Destinations, retry_us: int, rival_memory_us: int
    ) -> None:
        self._queues = {path: _QueueLeases() for path in queues}
        self._destinations = destinations
        self._retry_us = retry_us
        self._rival_memory_us = rival_memory_us
        self._turn = 0
        self._rivals: dict[str, int] = {}  # other syphons, and when each is forgotten

    @property
    def queues(self) -> list[str]:
        """The backlog queues."""
        return list(self._queues)

    def add_queues(self, paths: Iterable[str]) -> None:
        """Add backlog queues."""
        for path in paths:
            self._queues.setdefault(path, _QueueLeases())

    # -- leasing -----------------------------------------------------------------------------------

    def epochs(self, queue: str) -> list[int]:
        """Return the epochs of the leases of a queue; the next lease may skip their ranges."""
        return [leased.range.epoch for leased in self._queues[queue].ranges]

    def losses(self, queue: str) -> int:
        """Return how often leases of a queue ended before all their messages were carried.

        A lease that was requested before such a loss may lie behind the lost messages. It must be
        released, because its messages would overtake them.
        """
        return self._queues[queue].losses

    def has_room(self, queue: str) -> bool:
        """Whether the syphon may lease another range of a queue."""
        return len(self._queues[queue].ranges) < MAX_LEASED_RANGES

    def meet(self, rival: str | None, now: int) -> None:
        """Record another syphon: the owner of a lease that delayed one of ours."""
        if rival is not None:
            self._rivals[rival] = now + self._rival_memory_us

    def grant(self, queue: str, lease: RangeLease, oldest_us: int) -> None:
        """Add a leased range."""
        new = Range(lease.epoch, lease.first, lease.last, lease.origin)
        known = self._queues[queue]
        known.ranges.append(_LeasedRange(new, lease.message_count, lease.size_in_bytes, oldest_us))
        known.behind = lease.left_behind

    def give_up_surplus(self, now: int) -> list[tuple[str, int]]:
        """Remove the leases beyond this syphon's share of the queues; return them for release."""
        self._rivals = {rival: until for rival, until in self._rivals.items() if until > now}
        share = -(-len(self._queues) // (1 + len(self._rivals)))
        busy = {path: queue for path, queue in self._queues.items() if queue.ranges}
        fresh = [p for p, queue in busy.items() if not any(leased.kept for leased in queue.ranges)]
        keep = max(share - (len(busy) - len(fresh)), 0)
        self._turn += 1  # the next call starts with another queue
        at = self._turn % len(fresh) if fresh else 0
        surplus = [*fresh[at:], *fresh[:at]][keep:]
        return [(path, epoch) for path in surplus for epoch in self.clear(path)]

    # -- batches -----------------------------------------------------------------------------------

    def tasks(self, now: int, *, split: bool = False, fresh_only: bool = False) -> list[Task]:
        """Return the tasks of a batch: one for each queue, or with `split` one for each range.

        With `fresh_only`, the tasks contain only ranges that no batch has carried yet, and none of
        their messages overtakes one that stays in an earlier range.
        """
        waiting, on_trial = self._destinations.waiting(now), self._destinations.on_trial(now)
        tasks = []
        for path, queue in self._queues.items():
            stays = queue.kept if fresh_only else set()
            if fresh_only and any(leased.retry_at for leased in queue.ranges):
                continue  # a range was not read completely, so its destinations are not known
            tried_here = self._tried_here(queue, on_trial) - stays
            skipped = tuple(sorted(waiting | stays | (on_trial - tried_here)))
            epochs = _trial_epochs(queue.ranges, tried_here)
            trials = {
                name: Trial(epoch, self._destinations.failures(name))
                for name, epoch in epochs.items()
            }
            ready = list(_ready(queue.ranges, set(skipped), epochs, now))
            chosen = [leased for leased in ready if leased.is_fresh or not fresh_only]
            if chosen:
                on_trial -= tried_here
                waiting |= tried_here  # only this queue tries them
                left = queue.left - sum(leased.left for leased in chosen)
                for part in [[single] for single in chosen] if split else [chosen]:
                    ranges = tuple(leased.range for leased in part)
                    tasks.append(Task(path, ranges, skipped, trials, _load(part, left)))
                    left = 0  # counted in one task of the queue
        return tasks

    def _tried_here(self, queue: _QueueLeases, on_trial: set[str]) -> set[str]:
        """Return the destinations on trial whose messages wait in this queue."""
        kept = queue.kept
        if any(not leased.kept for leased in queue.ranges):  # its destinations are not known yet
            kept |= on_trial - set(self.kept())
        return on_trial & kept

    def kept(self) -> Counter[str]:
        """Return how many messages wait in the leased ranges, by failing destination."""
        kept: Counter[str] = Counter()
        for leased in self._leased_ranges():
            kept.update(leased.kept)
        return kept

    def _leased_ranges(self) -> Iterator[_LeasedRange]:
        return (leased for queue in self._queues.values() for leased in queue.ranges)

    def next_due(self, now: int) -> int | None:
        """Return when the next destination or range may be retried; None if nothing waits.

        Destinations without messages in a leased range do not count.
        """
        kept = self.kept()
        due = [t.due for t in self._destinations.troubles() if canonical(t.destination) in kept]
        due += [leased.retry_at for leased in self._leased_ranges() if leased.retry_at > now]
        return min(due, default=None)

    def absorb(self, outcomes: Iterable[Carried], now: int) -> Absorbed:
        """Update ranges and destinations with the outcomes of a batch."""
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
        """Update a range after a batch, or drop it if it is empty; return leases to release."""
        queue = self._queues.get(carried.queue)
        ranges = queue.ranges if queue else []
        leased = next((known for known in ranges if known.range == carried.range), None)
        if queue is None or leased is None:
            return []
        if carried.unread is not None:
            if carried.unread.code == _STALE:
                return self.lose(carried.queue, carried.range.epoch)
            leased.retry_at = now + self._retry_us
        elif carried.kept:
            leased.kept = {canonical(name): count for name, count in carried.kept.items()}
            leased.retry_at = 0
        else:
            queue.ranges.remove(leased)
        return []

    def crowded(self) -> list[tuple[str, list[Range]]]:
        """Return queues with many small waiting ranges, and the ranges that can be merged.

        Without merging, a destination that stays down costs a lease for every few messages.
        """
        found = []
        for path, queue in self._queues.items():
            group: list[Range] = []
            size = 0
            for leased in takewhile(lambda known: known.kept and not known.retry_at, queue.ranges):
                is_other = bool(group) and leased.range.origin != group[0].origin
                if is_other or size + leased.count > MAX_LEASE_MESSAGES:
                    group, size = [], 0
                group.append(leased.range)
                size += leased.count
            if len(group) >= CROWDED_RANGES:
                found.append((path, group))
        return found

    def merge(self, queue: str, ranges: Sequence[Range], lease: RangeLease) -> bool:
        """Replace several ranges by one; return False if a lease of them was lost meanwhile."""
        known = self._queues[queue].ranges
        old = [leased for leased in known if leased.range in ranges]
        if len(old) != len(ranges):
            return False
        kept: Counter[str] = Counter()
        for leased in old:
            kept.update(leased.kept)
        new = Range(lease.epoch, lease.first, lease.last, lease.origin)
        oldest = min(leased.oldest_us for leased in old)
        size = lease.size_in_bytes
        merged = _LeasedRange(new, lease.message_count, size, oldest, dict(kept))
        at = known.index(old[0])
        known[at : at + len(old)] = [merged]
        return True

    def leases(self) -> list[tuple[str, int]]:
        """Return every lease as (queue, epoch)."""
        return [(path, epoch) for path in self._queues for epoch in self.epochs(path)]

    def lose(self, queue: str, epoch: int) -> list[tuple[str, int]]:
        """Remove a lease that has expired, and those behind it; return the latter for release.

        The next owner of the expired range must also get the ranges behind it. Otherwise their
        messages would overtake those of the expired range.
        """
        epochs = self.epochs(queue)
        if epoch not in epochs:
            return []
        at = epochs.index(epoch)
        del self._queues[queue].ranges[at:]
        self._queues[queue].losses += 1
        return [(queue, later) for later in epochs[at + 1 :]]

    def clear(self, queue: str) -> list[int]:
        """Remove the leases of a queue, and return their epochs."""
        epochs = self.epochs(queue)
        self._queues[queue].ranges.clear()
        self._queues[queue].losses += 1
        return epochs

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many messages wait, as far as is known: in the leased ranges and behind them."""
        return sum(queue.left for queue in self._queues.values())

    def see_behind(self, queue: str, count: int) -> None:
        """Record that a queue has at least `count` messages, leased ones included."""
        known = self._queues[queue]
        known.behind = max(count - sum(leased.left for leased in known.ranges), 0)

    @property
    def oldest_us(self) -> int | None:
        """When the oldest message of the leased ranges was diverted."""
        return min((leased.oldest_us for leased in self._leased_ranges()), default=None)


def _load(ranges: Sequence[_LeasedRange], waiting: int) -> TaskLoad:
    """Return the load of a task that carries these ranges."""
    return TaskLoad(
        messages=sum(leased.left for leased in ranges),
        bytes=sum(leased.bytes * leased.left // max(leased.count, 1) for leased in ranges),
        waiting=waiting,
        oldest_us=min(leased.oldest_us for leased in ranges),
    )


def _trial_epochs(ranges: Iterable[_LeasedRange], on_trial: set[str]) -> dict[str, int]:
    """Return, for each destination to try, the epoch of the first range that may have its messages.

    The destinations of a range that was not carried completely are not known.
    """
    epochs: dict[str, int] = {}
    for leased in ranges:
        for name in on_trial & set(leased.kept) if leased.kept else on_trial:
            epochs.setdefault(name, leased.range.epoch)
    return epochs


def _ready(
    ranges: Iterable[_LeasedRange], skipped: set[str], epochs: Mapping[str, int], now: int
) -> Iterator[_LeasedRange]:
    """Yield the ranges of a queue with messages that may be sent now, in order.

    A destination on trial is tried in one range only. A range that could not be read ends the
    sequence, so that no later range overtakes it.
    """
    for leased in ranges:
        if leased.retry_at > now:
            return
        flowing = set(leased.kept) - skipped - set(epochs)
        if not leased.kept or flowing or leased.range.epoch in epochs.values():
            yield leased
