"""Which destinations of the primary are tried, and when those that failed are tried again.

    flowing --failure--> waiting until `due` --its time comes--> on trial --success--> flowing
                            ^                                       |
                            +---------- failure: a longer pause ----+

One queue tries for all while a destination is on trial; the others pass it over.
"""

from dataclasses import dataclass

from twinbus.backoff import Backoff
from twinbus.limits import RETRY_GROWTH, SECOND_US, SERVER_BUSY_RETRY_S
from twinbus.syphon.carrier import Failure, canonical

_BUSY = "ServerBusy"  # it said itself how long to wait


@dataclass(frozen=True, slots=True)
class Trouble:
    """A destination that failed."""

    destination: str
    failure: Failure  # the last one
    since: int
    failures: int
    due: int  # when it is tried again


class Destinations:
    """The destinations that are not flowing; the others need no memory."""

    def __init__(self, retry_us: int, max_retry_us: int) -> None:
        longest_us = max(min(retry_us * RETRY_GROWTH, max_retry_us), retry_us)
        self._backoff = Backoff(retry_us, longest_us)
        self._troubles: dict[str, Trouble] = {}

    def failed(self, destination: str, failure: Failure, now: int) -> Trouble:
        """Note a failure; return until when the destination is left alone."""
        before = self._troubles.get(canonical(destination))
        failures = before.failures + 1 if before else 1
        pause = self._backoff.pause_us(failures)
        if failure.code == _BUSY:
            pause = max(pause, SERVER_BUSY_RETRY_S * SECOND_US)
        since = before.since if before else now
        trouble = Trouble(destination, failure, since, failures, now + pause)
        self._troubles[canonical(destination)] = trouble
        return trouble

    def flows(self, destination: str) -> bool:
        """Note a success; return whether it ended a trouble."""
        return self._troubles.pop(canonical(destination), None) is not None

    def waiting(self, now: int) -> set[str]:
        """Return those that are left alone for now."""
        return {name for name, trouble in self._troubles.items() if trouble.due > now}

    def on_trial(self, now: int) -> set[str]:
        """Return those that failed and may be tried again."""
        return {name for name, trouble in self._troubles.items() if trouble.due <= now}

    def troubles(self) -> list[Trouble]:
        """Return those that are not flowing."""
        return list(self._troubles.values())
