"""Time comes in through one door: nothing below the edges reads it by itself.

A clock tells the time in microseconds since 1970 (UTC). The manual clock only moves when a test
moves it, and then tells those who asked to be told.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from twinbus.limits import NEVER_US, SECOND_US

MICROSECOND = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_WAIT_S = 3600.0  # real time may be set; look again at least this often


def to_us(span: timedelta) -> int:
    """Return a span in microseconds; a span too long for a column means never."""
    return min(span // MICROSECOND, NEVER_US)


def from_us(us: int) -> datetime:
    """Return the moment that many microseconds after 1970."""
    return EPOCH + timedelta(microseconds=us)


def moment_us(moment: datetime) -> int:
    """Return an aware moment in microseconds since 1970, exactly."""
    return (moment - EPOCH) // MICROSECOND


class Clock(Protocol):
    """Tells the time."""

    def now_us(self) -> int:
        """Return microseconds since 1970 (UTC)."""
        ...

    def seconds_until(self, moment: int) -> float | None:
        """Return how long to wait for that moment; None: until `on_advance` calls."""
        ...

    def sleep_us(self, duration: int) -> None:
        """Let that much time pass."""
        ...

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever time jumps; return how to stop. Real time never jumps."""
        ...


def passes_by_itself(clock: Clock) -> bool:
    """Whether time goes on without being told to."""
    return clock.seconds_until(NEVER_US) is not None


class SystemClock:
    """The machine's clock."""

    def now_us(self) -> int:
        """Return microseconds since 1970 (UTC)."""
        return time.time_ns() // 1000

    def seconds_until(self, moment: int) -> float | None:
        """Return how long to wait for that moment."""
        return min(max(0.0, (moment - self.now_us()) / SECOND_US), _LONGEST_WAIT_S)

    def sleep_us(self, duration: int) -> None:
        """Let that much time pass."""
        time.sleep(duration / SECOND_US)

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Real time never jumps: nothing to call."""
        return lambda: None


class SteadyClock(SystemClock):
    """The machine's clock as it was at the beginning: it goes on when that one is set."""

    def __init__(self) -> None:
        self._ahead_us = super().now_us() - time.monotonic_ns() // 1000

    def now_us(self) -> int:
        """Return microseconds since 1970 (UTC)."""
        return self._ahead_us + time.monotonic_ns() // 1000


class ManualClock:
    """A clock that stands still until it is told to move; for tests and simulations."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now_us = moment_us(start or datetime(2030, 1, 1, tzinfo=UTC))
        self._callbacks: list[Callable[[], None]] = []

    def now_us(self) -> int:
        """Return microseconds since 1970 (UTC)."""
        return self._now_us

    def now(self) -> datetime:
        """Return the moment it shows."""
        return from_us(self._now_us)

    def seconds_until(self, moment: int) -> float | None:
        """Wait until told."""
        return 0.0 if moment <= self._now_us else None

    def sleep_us(self, duration: int) -> None:
        """Sleep by moving the clock: whoever sleeps on a manual clock drives it."""
        self.advance(timedelta(microseconds=duration))

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each move; return how to stop."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def advance(self, span: timedelta) -> None:
        """Move the clock; everything due by then happens."""
        self._now_us += span // MICROSECOND
        for callback in list(self._callbacks):
            callback()
