"""Clocks: each component gets the time from a `Clock` that its caller passes in.

Nothing else reads the system clock. A clock has two readings, in microseconds since 1970 (UTC):

    now_us    for durations. It runs at the pace of the machine's monotonic clock and begins at the
              wall time of the clock's construction. It does not change when the machine's clock is
              set.
    wall_us   for stamps, schedules and tokens. It is the machine's clock, and may be set in either
              direction at any moment.

The manual clock only moves when a test moves it, and then calls the registered callbacks.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from twinbus.limits import CLOCK_CONFIRM_US, CLOCK_STEP_US, MAX_SLEEP_S, NEVER_US, SECOND_US

MICROSECOND = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_us(span: timedelta) -> int:
    """Return a span in microseconds; NEVER_US for a span that is too long for a column."""
    return min(span // MICROSECOND, NEVER_US)


def from_us(us: int) -> datetime:
    """Return the moment with this number of microseconds since 1970."""
    return EPOCH + timedelta(microseconds=us)


def moment_us(moment: datetime) -> int:
    """Return an aware moment in microseconds since 1970, exactly."""
    return (moment - EPOCH) // MICROSECOND


class Clock(Protocol):
    """Reads the time, and sleeps."""

    def now_us(self) -> int:
        """Return the time by which durations are measured; it never goes back."""
        ...

    def wall_us(self) -> int:
        """Return the wall time; it may be set in either direction."""
        ...

    def seconds_until(self, moment: int) -> float | None:
        """Return the seconds until `now_us` reaches a moment; None: wait for `on_advance`."""
        ...

    def sleep_us(self, duration: int) -> None:
        """Sleep for this time."""
        ...

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback for jumps of the clock; return a function that removes it.

        Only a manual clock jumps.
        """
        ...


def passes_by_itself(clock: Clock) -> bool:
    """Whether the time of a clock passes without calls of `advance`."""
    return clock.seconds_until(NEVER_US) is not None


def stamp_of(clock: Clock, moment: int) -> datetime:
    """Return the wall time of a moment of `now_us`, by the present reading of the wall clock."""
    return from_us(moment + clock.wall_us() - clock.now_us())


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        self._ahead_us = self.wall_us() - time.monotonic_ns() // 1000

    def now_us(self) -> int:
        """Return the time by which durations are measured."""
        return self._ahead_us + time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        """Return the wall time."""
        return time.time_ns() // 1000

    def seconds_until(self, moment: int) -> float | None:
        """Return how long to wait for that moment, at most MAX_SLEEP_S."""
        return min(max(0.0, (moment - self.now_us()) / SECOND_US), MAX_SLEEP_S)

    def sleep_us(self, duration: int) -> None:
        """Sleep for this time."""
        time.sleep(duration / SECOND_US)

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Register nothing: this clock never jumps."""
        return lambda: None


class ManualClock:
    """A clock that only moves when a test moves it; for tests and simulations."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now_us = moment_us(start or datetime(2030, 1, 1, tzinfo=UTC))
        self._wall_ahead_us = 0
        self._callbacks: list[Callable[[], None]] = []

    def now_us(self) -> int:
        """Return the time by which durations are measured."""
        return self._now_us

    def wall_us(self) -> int:
        """Return the wall time."""
        return self._now_us + self._wall_ahead_us

    def now(self) -> datetime:
        """Return the wall time of the clock."""
        return from_us(self.wall_us())

    def seconds_until(self, moment: int) -> float | None:
        """Return 0 for a moment that has come, otherwise None: wait for `on_advance`."""
        return 0.0 if moment <= self._now_us else None

    def sleep_us(self, duration: int) -> None:
        """Advance the clock by the time to sleep."""
        self.advance(timedelta(microseconds=duration))

    def on_advance(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback for each move; return a function that removes it."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def advance(self, span: timedelta) -> None:
        """Move the clock forward, and call the callbacks."""
        self._now_us += span // MICROSECOND
        self._call_back()

    def skip(self, span: timedelta) -> None:
        """Advance the clock without calling callbacks."""
        self._now_us += span // MICROSECOND

    @property
    def listeners(self) -> int:
        """How many callbacks are registered."""
        return len(self._callbacks)

    def set_wall(self, by: timedelta) -> None:
        """Set the wall clock forward, or back by a negative span; no time passes."""
        self._wall_ahead_us += by // MICROSECOND
        self._call_back()

    def _call_back(self) -> None:
        for callback in list(self._callbacks):
            callback()


class BrokerTime:
    """The one timeline of a broker: wall time by which durations can be measured.

    `now_us` follows a slow drift of the wall clock. If the wall clock is set, the timeline ignores
    the step at first. If the step is still there after CLOCK_CONFIRM_US, `look` moves the timeline
    and returns the step, and the broker moves every deadline that is a duration by that step. A
    step that is corrected within that time has no effect.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_us = clock.wall_us() - clock.now_us()
        self._doubtful_since: int | None = None  # when the wall clock was first seen to be set
        self.seen_us = clock.now_us() + self._ahead_us  # the moment of the last look

    def now_us(self) -> int:
        """Return the present moment."""
        return self._clock.now_us() + self._ahead_us

    def clock_moment(self, moment: int) -> int:
        """Return the `now_us` of the clock at a moment of this timeline."""
        return moment if moment == NEVER_US else moment - self._ahead_us

    def deadline(self, moment: int) -> int:
        """Return the `now_us` at a moment, or earlier when `look` decides about a clock step."""
        due = moment if moment == NEVER_US else moment - self._ahead_us
        return due if self._doubtful_since is None else min(due, self.looks_again_at)

    def look(self) -> int:
        """Read the wall clock; return the step that the timeline has just made: nearly always 0.

        The timeline follows a drift at once, but never goes backwards.
        """
        now = self._clock.now_us()
        off = self._clock.wall_us() - now - self._ahead_us
        step = 0
        if -CLOCK_STEP_US < off < CLOCK_STEP_US:
            self._doubtful_since = None
            if off > 0:
                self._ahead_us += off
        elif self._doubtful_since is None:
            self._doubtful_since = now
        elif now - self._doubtful_since >= CLOCK_CONFIRM_US:
            self._doubtful_since = None
            self._ahead_us += off
            step = off
        self.seen_us = now + self._ahead_us
        return step

    @property
    def is_off(self) -> bool:
        """Whether the wall clock differs from the timeline by more than a drift could."""
        off = self._clock.wall_us() - self._clock.now_us() - self._ahead_us
        return abs(off) >= CLOCK_STEP_US

    @property
    def looks_again_at(self) -> int:
        """When `look` decides about an unconfirmed step; NEVER_US if there is none."""
        if self._doubtful_since is None:
            return NEVER_US
        return self._doubtful_since + CLOCK_CONFIRM_US
