"""Which backlog queues the next batch visits, where messages are received under lock. Pure.

    idle --a message arrived--> ready --planned--> visited --queue is empty--> idle
                                  ^                   |
                                  +---- more waits ---+
                                  |                   v failed, killed, or destinations fail
                                  +-- time is up -- paused

A queue that only holds messages of failing destinations is visited again after a pause: longer and
longer, because each visit receives those messages in vain, but at once when such a destination is
due. A queue has one visitor at a time, or messages would overtake each other.
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
    """Where a backlog queue stands."""

    IDLE = "idle"  # empty, as far as is known
    READY = "ready"
    VISITED = "visited"  # by the batch under way
    PAUSED = "paused"


@dataclass(slots=True)
class _VisitedQueue:
    state: VisitState = VisitState.IDLE
    ready_at: int = 0  # where it is paused
    pauses: int = 0  # in a row
    kept: Counter[str] = field(default_factory=Counter)  # destination -> messages seen to wait
    waiting: int = 0  # messages, as far as is known
    oldest_us: int | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """A queue to be visited, and the destinations to pass over there."""

    queue: str
    held_back: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VisitsLearned:
    """Which destinations began and ceased to fail in a batch."""

    new_troubles: Sequence[Trouble]
    ended_troubles: Sequence[str]


class Visits:
    """The backlog queues of one syphon."""

    def __init__(self, queues: Iterable[str], destinations: Destinations, retry_us: int) -> None:
        self._queues = {path: _VisitedQueue() for path in queues}
        self._destinations = destinations
        self._backoff = Backoff(retry_us, max(retry_us, to_us(MAX_VISIT_PAUSE)))

    def add_queues(self, paths: Iterable[str]) -> None:
        """Visit these backlog queues, too."""
        for path in paths:
            self._queues.setdefault(path, _VisitedQueue())

    @property
    def idle(self) -> list[str]:
        """The queues that nobody visits until a message arrives."""
        return [path for path, one in self._queues.items() if one.state is VisitState.IDLE]

    def ready(self, path: str) -> None:
        """Note that an idle queue has a message."""
        queue = self._queues[path]
        if queue.state is VisitState.IDLE:
            queue.state = VisitState.READY

    def ready_all(self) -> None:
        """Have every idle queue visited, whether it has messages or not."""
        for path in self._queues:
            self.ready(path)

    def see(self, path: str, waiting: int) -> None:
        """Note how many messages a queue has."""
        self._queues[path].waiting = waiting

    def fail(self, path: str, now: int) -> None:
        """Pause a queue that cannot be read."""
        self._pause(self._queues[path], now)

    def interrupt(self, path: str, locked_until: int) -> None:
        """Leave a queue alone until the locks of a visit that was killed have expired."""
        queue = self._queues.setdefault(path, _VisitedQueue())
        queue.state, queue.ready_at = VisitState.PAUSED, locked_until

    # -- batches -----------------------------------------------------------------------------------

    def wake(self, now: int, only: Container[str] | None = None) -> None:
        """Let queues whose pause is over be visited: all, or those that are named."""
        for path, queue in self._queues.items():
            is_meant = only is None or path in only
            if is_meant and queue.state is VisitState.PAUSED and queue.ready_at <= now:
                queue.state = VisitState.READY

    def next_due(self) -> int | None:
        """Return when the next pause ends; None: no queue is paused."""
        paused = [q.ready_at for q in self._queues.values() if q.state is VisitState.PAUSED]
        return min(paused, default=None)

    @property
    def ready_queues(self) -> list[str]:
        """The queues that the next batch may visit."""
        return [path for path, one in self._queues.items() if one.state is VisitState.READY]

    def plan(self, paths: Iterable[str], now: int) -> list[Visit]:
        """Return how these ready queues are visited; a destination on trial is tried in one."""
        waiting, on_trial = self._destinations.waiting(now), self._destinations.on_trial(now)
        visits = []
        for path in paths:
            queue = self._queues[path]
            queue.state = VisitState.VISITED
            kept_somewhere = {name for one in self._queues.values() for name in one.kept}
            tried_here = {n for n in on_trial if n in queue.kept or n not in kept_somewhere}
            held_back = waiting | (on_trial - tried_here)
            on_trial -= tried_here
            waiting |= tried_here  # by this queue alone
            visits.append(Visit(path, tuple(sorted(held_back))))
        return visits

    def absorb(self, outcomes: Iterable[Carried], now: int) -> VisitsLearned:
        """Learn what became of the visits of a batch."""
        new: list[Trouble] = []
        ended: list[str] = []
        for carried in outcomes:
            flowed = {name for name in carried.moved if self._destinations.flows(name)}
            ended += sorted(flowed - set(carried.failures))
            for destination, failure in carried.failures.items():
                trouble = self._destinations.failed(destination, failure, now)
                if trouble.failures == 1 and destination not in flowed:
                    new.append(trouble)
            queue = self._queues.get(carried.queue)
            if queue is not None and queue.state is VisitState.VISITED:
                self._leave(queue, carried, now)
        return VisitsLearned(new, ended)

    def _leave(self, queue: _VisitedQueue, carried: Carried, now: int) -> None:
        moved = sum(messages for messages, _ in carried.moved.values())
        queue.kept = Counter({canonical(name): count for name, count in carried.kept.items()})
        queue.waiting = max(queue.waiting - moved - len(carried.poison), queue.kept.total())
        queue.oldest_us = carried.oldest_us
        is_stuck = queue.kept and (carried.is_drained or not moved)
        if carried.unread is not None or is_stuck:
            self._pause(queue, now)
        elif carried.is_drained:
            queue.state, queue.pauses = VisitState.IDLE, 0
            queue.waiting, queue.oldest_us = 0, None
        else:
            queue.state, queue.pauses = VisitState.READY, 0

    def _pause(self, queue: _VisitedQueue, now: int) -> None:
        """Pause a queue; not longer than until a destination it keeps messages of is due."""
        queue.pauses += 1
        troubles = self._destinations.troubles()
        due = [one.due for one in troubles if canonical(one.destination) in queue.kept]
        queue.state = VisitState.PAUSED
        queue.ready_at = min([now + self._backoff.pause_us(queue.pauses), *due])

    # -- numbers -----------------------------------------------------------------------------------

    def kept(self) -> Counter[str]:
        """Return how many messages each failing destination was seen to keep waiting."""
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
        """What waits was diverted at this time or later."""
        times = [q.oldest_us for q in self._queues.values() if q.oldest_us is not None]
        return min(times, default=None)
