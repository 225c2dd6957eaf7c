"""Decides when a client retries an operation. Pure: time and chance are arguments.

A client retries a transient failure of the broker with exponential back-off and jitter, until the
operation times out. Each try has its own timeout, so that a server that does not answer costs one
try and not the whole operation. ServerBusy closes a gate for its scope, an entity or the namespace:
for 10 seconds the client sends nothing in that scope.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, Self

from twinbus.backoff import Backoff
from twinbus.clock import to_us
from twinbus.errors import FaultOwner, InvalidArgumentError, MessagingError, ServerBusyError
from twinbus.limits import (
    MAX_BACKOFF,
    MAX_POLICY_SPAN,
    MIN_BACKOFF,
    MIN_POLICY_SPAN,
    NEVER_US,
    OPERATION_TIMEOUT,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
    TRY_TIMEOUT,
)
from twinbus.protocol.remainder import ACCEPTED
from twinbus.values import check_span


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often an operation is tried."""

    operation_timeout: timedelta = OPERATION_TIMEOUT  # for all tries together
    try_timeout: timedelta = TRY_TIMEOUT  # for one try; the operation timeout caps it
    min_backoff: timedelta = MIN_BACKOFF  # before the second try; doubles each time
    max_backoff: timedelta = MAX_BACKOFF
    max_tries: int | None = None  # None: as many as the timeout allows

    def __post_init__(self) -> None:
        for name in ("operation_timeout", "try_timeout", "min_backoff", "max_backoff"):
            check_span(name, getattr(self, name), MIN_POLICY_SPAN, MAX_POLICY_SPAN)
        if self.min_backoff > self.max_backoff:
            raise InvalidArgumentError(
                f"min_backoff ({self.min_backoff}) must not be longer than max_backoff "
                f"({self.max_backoff})"
            )
        if self.max_tries is not None and (type(self.max_tries) is not int or self.max_tries < 1):
            raise InvalidArgumentError(
                f"max_tries is {self.max_tries!r:.60}; it must be a whole number above 0, or None"
            )

    @classmethod
    def once(cls, operation_timeout: timedelta = OPERATION_TIMEOUT) -> Self:
        """Return a policy without retries."""
        return cls(operation_timeout=operation_timeout, max_tries=1)

    def backoff_us(self, failures: int, chance: float) -> int:
        """Return the pause after this number of failures; `chance` is a random number in [0, 1)."""
        backoff = Backoff(to_us(self.min_backoff), to_us(self.max_backoff))
        return backoff.jittered_us(failures, chance)


def is_worth_a_retry(error: MessagingError) -> bool:
    """Whether the client retries after this error.

    A session or range that another caller has locked is a transient error as well. It is not
    retried, because only that caller can release the lock.
    """
    return error.is_transient and error.fault is FaultOwner.BROKER


class Tries(Protocol):
    """Watches the tries of one operation for its caller, and may end them early."""

    def end_at(self) -> int:
        """Return when the tries must end, even if the operation has time left."""
        ...

    def failed(self, error: MessagingError) -> None:
        """Record that one try failed."""
        ...


class UnlimitedTries:
    """Tries until the policy is exhausted."""

    def end_at(self) -> int:
        """Return never."""
        return NEVER_US

    def failed(self, error: MessagingError) -> None:
        """Do nothing."""


class SingleTry(UnlimitedTries):
    """Tries once."""

    def end_at(self) -> int:
        """Return a time that has passed."""
        return 0


class BusyGate:
    """Delays requests after a ServerBusyError: those to its entity, or to the whole namespace.

    A scope is a path in lower case; the empty scope is the namespace.
    """

    def __init__(self) -> None:
        self._closed: dict[str, tuple[int, ServerBusyError]] = {}  # scope -> until when, and why
        self.may_be_closed = False  # False: the gate has never been closed for any scope

    def note(self, error: MessagingError, now: int) -> None:
        """Close the gate for the scope of a ServerBusyError; ignore other errors."""
        if isinstance(error, ServerBusyError):
            self._closed = {s: busy for s, busy in self._closed.items() if busy[0] > now}
            until = now + SERVER_BUSY_RETRY_S * SECOND_US
            self._closed[str(error.facts.get("scope", "")).lower()] = (until, error)
            self.may_be_closed = True

    def check(self, path: str, now: int) -> tuple[int, ServerBusyError | None]:
        """Return when the gate opens for an entity, and why it is closed; `now` if it is open.

        The path is empty for requests about the namespace.
        """
        if not self._closed:
            return now, None
        until, reason = now, None
        for scope in {"", path.lower()}:
            closed_until, error = self._closed.get(scope, (0, None))
            if closed_until > until:
                until, reason = closed_until, error
        return until, reason


def exhausted(
    history: list[MessagingError], seconds: float, reason: MessagingError | None = None
) -> MessagingError:
    """Return the error of an operation whose tries all failed: the last error, with its history.

    `reason` is the error that ended the operation if that was not a try.
    """
    last = reason or history[-1]
    tries = len(history)
    text = last.text
    if tries > 1 or reason is not None:
        times = {0: "not tried", 1: "tried once"}.get(tries, f"tried {tries} times")
        text = f"{text} ({times} in {seconds:.3g} s)" if tries else f"{text} ({times})"
    if reason is not None and reason not in history:
        history = [*history, reason]
    facts = {**last.facts, "history": tuple(history)}
    if tries and ACCEPTED in history[tries - 1].facts:  # `reason` lacks that fact
        facts[ACCEPTED] = history[tries - 1].facts[ACCEPTED]
    error = type(last)(text, **facts)
    error.__cause__ = last
    return error
