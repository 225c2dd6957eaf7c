"""Decides which backlog queues the next batch visits, for a secondary without ranges. Pure.

    idle --a message arrived--> ready --planned--> visited --queue is empty--> idle
                                  ^                   |
                                  +-- more messages --+
                                  |                   v failed, killed, or destinations fail
                                  +-- pause ends -- paused

A secondary without ranges (Azure Service Bus, RabbitMQ) cannot lease a range of messages. It locks
each received message, so a batch visits a queue: it receives messages and sends them home.

If a queue contains only messages of failing destinations, a visit brings none of them home. So the
pause before the next visit grows, but ends when one of these destinations may be retried. Only
one batch visits a queue at a time: with two, messages would overtake each other. A batch has
several tasks for a queue only if the syphon was told not to keep the order. The planner calls this
under its lock.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from twinbus.backoff import Backoff
from twinbus.clock import to_us
from twinbus.limits import MAX_VISIT_PAUSE
from twinbus.syphon.carrier import Carried, canonical
from twinbus.syphon.destinations import Destinations, Trouble


class VisitState(Enum):
    """The state of a backlog queue."""

    IDLE = "idle"  # empty, as far as is known
    READY = "ready"  # the next batch may visit it
    VISITED = "visited"  # the current batch visits it
    PAUSED = "paused"  # not to be visited before its time


@dataclass(slots=True)
class _VisitedQueue:
    state: VisitState = VisitState.IDLE
    ready_at: int = 0  # when the pause ends, if PAUSED
    pauses: int = 0  # in a row
    kept: Counter[str] = field(default_factory=Counter)  # failing destination -> its messages
    waiting: int = 0  # messages, as far as is known
    oldest_us: int | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """A queue to visit, and the destinations to skip there."""

    queue: str
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VisitsLearned:
    """The destinations that began to fail or recovered in a batch."""

    new_troubles: Sequence[Trouble]
    ended_troubles: Sequence[str]


class Visits:
    """The backlog queues of one syphon."""

    def __init__(self, queues: Iterable[str], destinations: Destinations, retry_us: int) -> None:
        self._queues = {path: _VisitedQueue() for path in queues}
        self._destinations = destinations
        self._backoff = Backoff(retry_us, max(retry_us, to_us(MAX_VISIT_PAUSE)))

    def add_queues(self, paths: Iterable[str]) -> None:
        """Add backlog queues."""
        for path in paths:
            self._queues.setdefault(path, _VisitedQueue())

    @property
    def idle(self) -> list[str]:
        """The queues that are not visited until a message arrives."""
        return [path for path, queue in self._queues.items() if queue.state is VisitState.IDLE]

    def ready(self, path: str) -> None:
        """Record that an idle queue has a message."""
        queue = self._queues[path]
        if queue.state is VisitState.IDLE:
            queue.state = VisitState.READY

    def ready_all(self) -> None:
        """Make every idle queue ready, whether it has messages or not."""
        for path in self._queues:
            self.ready(path)

    def see(self, path: str, waiting: int) -> None:
        """Record how many messages a queue has."""
        self._queues[path].waiting = waiting

    def fail(self, path: str, now: int) -> None:
        """Pause a queue that cannot be read."""
        self._pause(self._queues[path], now)

    def interrupt(self, path: str, locked_until: int) -> None:
        """Pause a queue until the locks of a killed visit have expired."""
        queue = self._queues.setdefault(path, _VisitedQueue())
        queue.state, queue.ready_at = VisitState.PAUSED, locked_until

    # -- batches -----------------------------------------------------------------------------------

    def wake(self, now: int, only: Container[str] | None = None) -> None:
        """Make queues ready whose pause is over: all of them, or only those in `only`."""
        for path, queue in self._queues.items():
            is_selected = only is None or path in only
            if is_selected and queue.state is VisitState.PAUSED and queue.ready_at <= now:
                queue.state = VisitState.READY

    def next_due(self) -> int | None:
        """Return when the next pause ends; None if no queue is paused."""
        paused = [q.ready_at for q in self._queues.values() if q.state is VisitState.PAUSED]
        return min(paused, default=None)

    @property
    def ready_queues(self) -> list[str]:
        """The queues that the next batch may visit."""
        return [path for path, queue in self._queues.items() if queue.state is VisitState.READY]

    def plan(self, paths: Iterable[str], now: int) -> list[Visit]:
        """Return visits to these ready queues.

        A destination that failed and may be retried is on trial: only one visit tries it.
        """
        waiting, on_trial = self._destinations.waiting(now), self._destinations.on_trial(now)
        visits = []
        for path in paths:
            queue = self._queues[path]
            queue.state = VisitState.VISITED
            kept = {name for known in self._queues.values() for name in known.kept}
            tried_here = {name for name in on_trial if name in queue.kept or name not in kept}
            skipped = waiting | (on_trial - tried_here)
            on_trial -= tried_here
            waiting |= tried_here  # only this queue tries them
            visits.append(Visit(path, tuple(sorted(skipped))))
        return visits

    def absorb(self, outcomes: Iterable[Carried], now: int) -> VisitsLearned:
        """Update queues and destinations with the outcomes of a batch."""
        new: list[Trouble] = []
        ended: list[str] = []
        visits: dict[str, list[Carried]] = {}  # by queue; several tasks may visit one queue
        for carried in outcomes:
            flowed = {name for name in carried.moved if self._destinations.flows(name)}
            ended += sorted(flowed - set(carried.failures))
            for destination, failure in carried.failures.items():
                trouble = self._destinations.failed(destination, failure, now)
                if trouble.failures == 1 and destination not in flowed:
                    new.append(trouble)
            visits.setdefault(carried.queue, []).append(carried)
        for path, found in visits.items():
            queue = self._queues.get(path)
            if queue is not None and queue.state is VisitState.VISITED:
                self._leave(queue, found, now)
        return VisitsLearned(new, ended)

    def _leave(self, queue: _VisitedQueue, visits: Sequence[Carried], now: int) -> None:
        """Decide what follows the visits of one batch to a queue.

        A task finds the queue empty while another task has locked its messages. So the queue is
        empty only if all tasks found it empty.
        """
        moved = sum(messages for visit in visits for messages, _ in visit.moved.values())
        poison = sum(len(visit.poison) for visit in visits)
        queue.kept = Counter()
        for visit in visits:  # two tasks may have kept the same message: take the larger count
            queue.kept |= Counter({canonical(name): n for name, n in visit.kept.items()})
        queue.waiting = max(queue.waiting - moved - poison, queue.kept.total())
        oldest = [visit.oldest_us for visit in visits if visit.oldest_us is not None]
        queue.oldest_us = min(oldest, default=None)
        is_drained = all(visit.is_drained for visit in visits)
        is_stuck = queue.kept and (is_drained or not moved)
        if is_stuck or any(visit.unread is not None for visit in visits):
            self._pause(queue, now)
        elif is_drained:
            queue.state, queue.pauses = VisitState.IDLE, 0
            queue.waiting, queue.oldest_us = 0, None
        else:
            queue.state, queue.pauses = VisitState.READY, 0

    def _pause(self, queue: _VisitedQueue, now: int) -> None:
        """Pause a queue, but no longer than until one of its failing destinations is due."""
        queue.pauses += 1
        troubles = self._destinations.troubles()
        due = [t.due for t in troubles if canonical(t.destination) in queue.kept]
        queue.state = VisitState.PAUSED
        queue.ready_at = min([now + self._backoff.pause_us(queue.pauses), *due])

    # -- numbers -----------------------------------------------------------------------------------

    def kept(self) -> Counter[str]:
        """Return how many messages wait, by failing destination, as seen by the last visits."""
        kept: Counter[str] = Counter()
        for queue in self._queues.values():
            kept.update(queue.kept)
        return kept

    @property
    def waiting(self) -> int:
        """How many messages wait, as far as is known."""
        return sum(queue.waiting for queue in self._queues.values())

    @property
    def oldest_us(self) -> int | None:
        """The waiting messages were diverted at this time or later."""
        times = [q.oldest_us for q in self._queues.values() if q.oldest_us is not None]
        return min(times, default=None)
