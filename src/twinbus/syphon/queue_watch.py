"""Finds backlog queues that a pairing creates after a syphon has started.

A syphon that starts before or during the first pairing finds only some of the backlog queues. While
some are missing, the syphon lists the queues of the secondary again: soon at first, later as often
as an idle queue is polled. When all queues are known, it stops listing. The caller passes the time
in, and calls from one thread.
"""

from collections.abc import Callable, Iterable

from twinbus.backoff import Backoff
from twinbus.clock import to_us
from twinbus.limits import QUEUE_LOOK_PAUSE, SECOND_US, SYPHON_POLL

_BACKOFF = Backoff(to_us(QUEUE_LOOK_PAUSE), to_us(SYPHON_POLL))


class QueueWatch:
    """Decides when to list the backlog queues again, and which of them are new."""

    def __init__(
        self, known: Iterable[str], wanted: int, find: Callable[[], Iterable[str]]
    ) -> None:
        self._known = {path.lower() for path in known}
        self._wanted = wanted
        self._find = find
        self._fruitless_looks = 0
        self._due_s: float | None = None  # the first call sets it

    @property
    def is_complete(self) -> bool:
        """Whether every queue that a pairing asked for is known."""
        return len(self._known) >= self._wanted

    def new_queues(self, now_s: float) -> list[str]:
        """Return backlog queues that appeared since the last look; empty if no look is due."""
        if self._due_s is None:
            self._due_s = now_s + self._pause_s()
        if self.is_complete or now_s < self._due_s:
            return []
        self._fruitless_looks += 1
        self._due_s = now_s + self._pause_s()  # also when the secondary cannot be reached
        found = [path for path in self._find() if path.lower() not in self._known]
        if found:
            self._known.update(path.lower() for path in found)
            self._fruitless_looks = 0
            self._due_s = now_s + self._pause_s()
        return found

    def _pause_s(self) -> float:
        return _BACKOFF.pause_us(self._fruitless_looks + 1) / SECOND_US
