"""When to try again. Pure: time and chance are arguments.

A transient failure of the broker is tried again with exponential back-off and jitter, as long as
the operation's timeout allows. ServerBusy closes a gate for everything on that namespace.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from twinbus.clock import to_us
from twinbus.errors import Fault, InvalidArgumentError, MessagingError, ServerBusyError
from twinbus.limits import (
    MAX_BACKOFF,
    MIN_BACKOFF,
    OPERATION_TIMEOUT,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often an operation is tried."""

    operation_timeout: timedelta = OPERATION_TIMEOUT  # of all tries together
    min_backoff: timedelta = MIN_BACKOFF  # before the second try; doubles each time
    max_backoff: timedelta = MAX_BACKOFF
    max_tries: int | None = None  # None: as many as the timeout allows

    def __post_init__(self) -> None:
        for name in ("operation_timeout", "min_backoff", "max_backoff"):
            span = getattr(self, name)
            if not isinstance(span, timedelta) or span <= timedelta(0):
                raise InvalidArgumentError(f"{name} is {span!r}; it must be a timedelta above zero")
        if self.min_backoff > self.max_backoff:
            raise InvalidArgumentError("min_backoff must not be longer than max_backoff")
        if self.max_tries is not None and (type(self.max_tries) is not int or self.max_tries < 1):
            raise InvalidArgumentError("max_tries must be a whole number above zero, or None")

    @classmethod
    def once(cls, operation_timeout: timedelta = OPERATION_TIMEOUT) -> Self:
        """Return a policy that never tries again."""
        return cls(operation_timeout=operation_timeout, max_tries=1)

    def backoff_us(self, failures: int, chance: float) -> int:
        """Return how long to wait after so many failures; chance is from 0 to 1."""
        doubled = to_us(self.min_backoff) << min(failures - 1, 40)
        longest = min(doubled, to_us(self.max_backoff))
        return int(longest * (0.5 + chance / 2))


def is_worth_a_retry(error: MessagingError) -> bool:
    """Whether trying the same again by itself may help: what callers hold others up with is not."""
    return error.is_transient and error.fault is Fault.BROKER


class BusyGate:
    """Closed for a while after ServerBusy: nothing goes to that namespace meanwhile."""

    def __init__(self) -> None:
        self.closed_until = 0
        self._reason: ServerBusyError | None = None

    def note(self, error: MessagingError, now: int) -> None:
        """Close when the namespace said that it is busy."""
        if isinstance(error, ServerBusyError):
            self._reason = error
            self.closed_until = now + SERVER_BUSY_RETRY_S * SECOND_US

    def reason(self, now: int) -> ServerBusyError | None:
        """Return why it is closed, or None when it is open.

        It never closes for longer than ServerBusy does: what lies further ahead is of a time
        before the clock was set back.
        """
        self.closed_until = min(self.closed_until, now + SERVER_BUSY_RETRY_S * SECOND_US)
        return self._reason if now < self.closed_until else None


def exhausted(history: list[MessagingError], seconds: float) -> MessagingError:
    """Return the last error, with all that went before it."""
    last, text = history[-1], history[-1].text
    if len(history) > 1:
        text = f"{text} (tried {len(history)} times in {seconds:.3g} s)"
    error = type(last)(text, **{**last.facts, "history": tuple(history)})
    error.__cause__ = last
    return error
