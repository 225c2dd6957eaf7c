"""Self-healing: how often a broker may restart from its log, and when it stops. Pure.

A broker restarts when its own state is inconsistent. The first restart for a cause is immediate;
each further restart for the same cause waits twice as long. After MAX_HEALS within HEAL_WINDOW_US
the broker stops: probably the content of the log causes the failure. For a while after a restart,
commands run one at a time, so that a command that causes the failure is found and refused.

The engine calls this.
"""

from collections import deque

from twinbus.backoff import Backoff
from twinbus.limits import CAREFUL_US, HEAL_BACKOFF_US, HEAL_WINDOW_US, MAX_HEALS

_BACKOFF = Backoff(HEAL_BACKOFF_US, HEAL_WINDOW_US)


class Healing:
    """The history of a broker's restarts."""

    def __init__(self) -> None:
        self.restarts = 0
        self.careful_until = 0
        self._heals: dict[str, deque[int]] = {}  # by cause: times of restarts

    def begin(self, cause: str, now: int) -> int | None:
        """Record a failure; return how long to wait before the restart, or None to stop."""
        heals = self._heals.setdefault(cause, deque())
        while heals and heals[0] <= now - HEAL_WINDOW_US:
            heals.popleft()
        if len(heals) >= MAX_HEALS:
            return None
        pause = _BACKOFF.pause_us(len(heals))
        heals.append(now)
        self.restarts += 1
        self.careful_until = now + pause + CAREFUL_US
        return pause

    def shift(self, by: int) -> None:
        """Move the times, because the wall clock was set."""
        self.careful_until += by
        for heals in self._heals.values():
            for at, moment in enumerate(heals):
                heals[at] = moment + by
