"""When to try again. Pure: time and chance are arguments.

A transient failure of the broker is tried again with exponential back-off and jitter, as long as
the operation's timeout allows. Each try has a timeout of its own, so that a silent server costs one
try and not the whole operation. ServerBusy closes a gate for its scope: an entity or the namespace.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, Self

from twinbus.backoff import Backoff
from twinbus.clock import to_us
from twinbus.errors import Fault, InvalidArgumentError, MessagingError, ServerBusyError
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
from twinbus.values import check_span


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long and how often an operation is tried."""

    operation_timeout: timedelta = OPERATION_TIMEOUT  # of all tries together
    try_timeout: timedelta = TRY_TIMEOUT  # of one try; at most the operation's
    min_backoff: timedelta = MIN_BACKOFF  # before the second try; doubles each time
    max_backoff: timedelta = MAX_BACKOFF
    max_tries: int | None = None  # None: as many as the timeout allows

    def __post_init__(self) -> None:
        for name in ("operation_timeout", "try_timeout", "min_backoff", "max_backoff"):
            check_span(name, getattr(self, name), MIN_POLICY_SPAN, MAX_POLICY_SPAN)
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
        backoff = Backoff(to_us(self.min_backoff), to_us(self.max_backoff))
        return backoff.jittered_us(failures, chance)


def is_worth_a_retry(error: MessagingError) -> bool:
    """Whether the client tries the same again by itself.

    A session or range that another caller has locked is transient, too, but only that caller can
    release it.
    """
    return error.is_transient and error.fault is Fault.BROKER


class Tries(Protocol):
    """What the caller of an operation knows about its tries: it may end them early."""

    def end_at(self) -> int:
        """Return when tries end, however much time the operation has left."""
        ...

    def failed(self, error: MessagingError) -> None:
        """Take in the failure of one try."""
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
    """Holds requests back after ServerBusy: those of the entity, or of the namespace, it is about.

    Scopes are paths in lower case; the empty one is the namespace.
    """

    def __init__(self) -> None:
        self._closed: dict[str, tuple[int, ServerBusyError]] = {}  # scope -> until when, and why
        self.may_be_closed = False  # for somebody; it never was if not

    def note(self, error: MessagingError, now: int) -> None:
        """Close for the scope of a ServerBusy."""
        if isinstance(error, ServerBusyError):
            self._closed = {s: held for s, held in self._closed.items() if held[0] > now}
            until = now + SERVER_BUSY_RETRY_S * SECOND_US
            self._closed[str(error.facts.get("scope", "")).lower()] = (until, error)
            self.may_be_closed = True

    def check(self, path: str, now: int) -> tuple[int, ServerBusyError | None]:
        """Return until when requests about an entity are held back, and why; now if they are not.

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
    """Return the error of an operation whose tries failed: the last one, with all before it.

    `reason` is given where something else than a try ended the operation.
    """
    last = reason or history[-1]
    tries = len(history)
    text = last.text
    if tries > 1 or reason is not None:
        times = {0: "not tried", 1: "tried once"}.get(tries, f"tried {tries} times")
        text = f"{text} ({times} in {seconds:.3g} s)" if tries else f"{text} ({times})"
    if reason is not None and reason not in history:
        history = [*history, reason]
    error = type(last)(text, **{**last.facts, "history": tuple(history)})
    error.__cause__ = last
    return error
