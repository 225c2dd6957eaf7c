"""Self-healing: how often a broker may restart from its log, and when it gives up. Pure.

A broker restarts when its own state does not add up. The first restart for a cause is immediate;
each further one for the same cause waits twice as long. After MAX_HEALS within HEAL_WINDOW_US the
broker stops, because the log itself leads to the failure. For a while after a restart commands run
one at a time, so that a command that is the cause is found, and refused for good.
"""

from collections import deque

from twinbus.backoff import Backoff
from twinbus.limits import CAREFUL_US, HEAL_BACKOFF_US, HEAL_WINDOW_US, MAX_HEALS

_BACKOFF = Backoff(HEAL_BACKOFF_US, HEAL_WINDOW_US)


class Healing:
    """What a broker remembers of its restarts."""

    def __init__(self) -> None:
        self.restarts = 0
        self.careful_until = 0
        self._heals: dict[str, deque[int]] = {}  # cause -> when

    def begin(self, cause: str, now: int) -> int | None:
        """Note a failure; return how long to wait before the restart, None: give up."""
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
        """Move its times: the wall clock was set by so much."""
        self.careful_until += by
        for heals in self._heals.values():
            for at, moment in enumerate(heals):
                heals[at] = moment + by
