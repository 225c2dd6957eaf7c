"""Decides when the syphon retries a destination that failed. Pure: `now` is an argument.

    flowing --failure--> waiting until `due` --due time reached--> on trial --success--> flowing
                            ^                                         |
                            +----------- failure: a longer pause -----+

While a destination is on trial, one backlog queue sends to it and the other queues skip it.
`carrier.Trial` says how much a trial sends. The planner calls this under its lock.
"""

from dataclasses import dataclass

from twinbus.backoff import Backoff
from twinbus.limits import RETRY_GROWTH, SECOND_US, SERVER_BUSY_RETRY_S
from twinbus.syphon.carrier import Failure, canonical

_BUSY = "ServerBusy"  # a busy namespace must not be asked again for 10 seconds


@dataclass(frozen=True, slots=True)
class Trouble:
    """A destination that failed."""

    destination: str
    failure: Failure  # the last failure
    since: int  # when the first failure happened
    failures: int  # in a row
    due: int  # when it may be retried


class Destinations:
    """The destinations of one syphon; keeps only those that failed."""

    def __init__(self, retry_us: int, max_retry_us: int) -> None:
        longest_us = max(min(retry_us * RETRY_GROWTH, max_retry_us), retry_us)
        self._backoff = Backoff(retry_us, longest_us)
        self._troubles: dict[str, Trouble] = {}

    def failed(self, destination: str, failure: Failure, now: int) -> Trouble:
        """Record a failure; return the trouble with the time of the next try."""
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
        """Record a success; return whether the destination had failed before."""
        return self._troubles.pop(canonical(destination), None) is not None

    def waiting(self, now: int) -> set[str]:
        """Return the destinations that must not be tried yet."""
        return {name for name, trouble in self._troubles.items() if trouble.due > now}

    def on_trial(self, now: int) -> set[str]:
        """Return the destinations that failed and may be tried again."""
        return {name for name, trouble in self._troubles.items() if trouble.due <= now}

    def failures(self, name: str) -> int:
        """Return how often a destination has failed in a row, by its canonical name."""
        return self._troubles[name].failures

    def troubles(self) -> list[Trouble]:
        """Return all destinations that failed and have not succeeded since."""
        return list(self._troubles.values())
