"""Watches the log and the spill store: logs when storage trouble begins and ends, and slow flushes.

The thread with the turn calls `look` at the end of a turn. Trouble that lasts for hours causes two
log lines, however often the broker retries. If a send is in the spill store for longer than
SPILL_BOUND_US, the namespace is degraded until no send waits that long. Other threads may read the
attributes at any time.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from twinbus.broker.store.spill import Spill, StoreHealth
from twinbus.clock import from_us
from twinbus.limits import LOG_INTERVAL_US, NEVER_US, SECOND_US, SLOW_FLUSH_US, SPILL_BOUND_US
from twinbus.loglines import LineRate, facts

_log = logging.getLogger("twinbus.broker")


@dataclass(frozen=True, slots=True)
class Degradation:
    """Why a namespace is degraded, and since when."""

    since: int
    reason: str


class StoreWatch:
    """Logs the state of the log and the spill store; survives self-healing restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._trouble_since: int | None = None  # None: no trouble, or its end was logged
        self._slow_flushes = LineRate(LOG_INTERVAL_US)
        self.degradation: Degradation | None = None
        # When the oldest waiting send makes the namespace degraded; NEVER_US: no send waits, or the
        # namespace is degraded.
        self.degrades_at = NEVER_US
        self.refusal = ""  # why the log accepts no records; empty: it accepts them

    @property
    def has_news(self) -> bool:
        """Whether `look` must be called, so that it notices the end of a trouble."""
        return self._trouble_since is not None or self.degradation is not None or self.refusal != ""

    def look(self, health: StoreHealth, spill: Spill, now: int) -> None:
        """Compare the store with what was logged last, and log the changes."""
        self.refusal = health.reason if health.is_refusing else ""
        if health.spilling and self._trouble_since is None:
            self._begin_trouble(health, spill)
        elif not health.spilling and self._trouble_since is not None:
            self._end_trouble(now)
        oldest_at = spill.oldest_at
        self.degrades_at = NEVER_US if oldest_at is None else oldest_at + SPILL_BOUND_US
        if now > self.degrades_at:
            self._begin_degradation(health, spill)
            self.degrades_at = NEVER_US
        elif self.degradation is not None:
            self._end_degradation(now)

    def flushed(self, duration: int, now: int) -> None:
        """Log a slow flush."""
        if duration < SLOW_FLUSH_US:
            return
        suppressed = self._slow_flushes.admit("", now)
        if suppressed is not None:
            seconds = duration / SECOND_US
            _log.warning(
                "A flush of the log in %s took %.2f s. The disk is slow or overloaded. "
                "%d earlier slow flushes were not logged",
                self._directory,
                seconds,
                suppressed,
                extra=facts(
                    event="slow_flush",
                    directory=str(self._directory),
                    seconds=seconds,
                    suppressed=suppressed,
                ),
            )

    def shift(self, by: int) -> None:
        """Move the times, because the wall clock was set."""
        if self._trouble_since is not None:
            self._trouble_since += by
        if self.degradation is not None:
            moved = Degradation(self.degradation.since + by, self.degradation.reason)
            self.degradation = moved

    def _begin_trouble(self, health: StoreHealth, spill: Spill) -> None:
        self._trouble_since = health.since
        reason = health.reason or f"{len(spill)} sends of an earlier start wait in the spill store"
        _log.warning(
            "Storage trouble begins in %s: %s. Sends are accepted into the spill store and become "
            "visible when the log accepts records. If the disk of the log is full, free space; if "
            "it is slow or broken, replace it",
            self._directory,
            reason,
            extra=facts(event="storage_trouble", directory=str(self._directory), reason=reason),
        )

    def _end_trouble(self, now: int) -> None:
        assert self._trouble_since is not None
        seconds = (now - self._trouble_since) / SECOND_US
        self._trouble_since = None
        _log.warning(
            "Storage trouble ends in %s after %.1f s: the log accepts records, and no send waits "
            "in the spill store",
            self._directory,
            seconds,
            extra=facts(
                event="storage_trouble_ended", directory=str(self._directory), seconds=seconds
            ),
        )

    def _begin_degradation(self, health: StoreHealth, spill: Spill) -> None:
        cause = health.reason or "the broker cannot move them into the log"
        minutes = SPILL_BOUND_US // (60 * SECOND_US)
        reason = (
            f"{len(spill)} sends wait in the spill store, the oldest for more than {minutes} "
            f"minutes: {cause}"
        )
        if self.degradation is not None:
            self.degradation = Degradation(self.degradation.since, reason)
            return
        self.degradation = Degradation(self.degrades_at, reason)
        _log.warning(
            "The namespace in %s is degraded: %s. These sends are durable, but cannot be received "
            "yet. If the log cannot be written, free space on its disk or replace the disk",
            self._directory,
            reason,
            extra=facts(
                event="degraded",
                directory=str(self._directory),
                reason=reason,
                since=from_us(self.degradation.since).isoformat(),
            ),
        )

    def _end_degradation(self, now: int) -> None:
        assert self.degradation is not None
        seconds = (now - self.degradation.since) / SECOND_US
        self.degradation = None
        _log.warning(
            "The namespace in %s is no longer degraded after %.1f s: the sends that waited too "
            "long in the spill store are visible",
            self._directory,
            seconds,
            extra=facts(event="degraded_ended", directory=str(self._directory), seconds=seconds),
        )
