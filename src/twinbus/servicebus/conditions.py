"""How errors are reported to SDKs of Service Bus: a condition on links, a status on requests.

An SDK decides by the condition which exception it raises and whether it retries. Every error on a
link has a condition, a description and an info field, because some SDKs wait for ever when one is
missing.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.performatives import ErrorCondition
from twinbus.amqp.types import Symbol
from twinbus.errors import (
    CommandFailedError,
    EntityAlreadyExistsError,
    EntityDisabledError,
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessageLockLostError,
    MessageNotFoundError,
    MessageSizeExceededError,
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
    QuotaExceededError,
    ServerBusyError,
    SessionCannotBeLockedError,
    SessionLockLostError,
    UnauthorizedError,
)

MICROSOFT: Final = "com.microsoft:"
_MOST_CHARACTERS: Final = 1000  # of a description; it must fit into a frame of the peer


class ReportedAs(NamedTuple):
    """The condition and the status of a kind of error."""

    condition: str
    status: int


_INTERNAL = ReportedAs(Condition.INTERNAL_ERROR, 500)
_TABLE: Final[dict[type[MessagingError], ReportedAs]] = {  # the first matching row is used
    MessageSizeExceededError: ReportedAs(Condition.MESSAGE_SIZE_EXCEEDED, 400),
    QuotaExceededError: ReportedAs(Condition.RESOURCE_LIMIT_EXCEEDED, 403),
    UnauthorizedError: ReportedAs(Condition.UNAUTHORIZED_ACCESS, 401),
    EntityNotFoundError: ReportedAs(Condition.NOT_FOUND, 404),
    EntityAlreadyExistsError: ReportedAs(f"{MICROSOFT}entity-already-exists", 409),
    EntityDisabledError: ReportedAs(f"{MICROSOFT}entity-disabled", 403),
    MessageNotFoundError: ReportedAs(f"{MICROSOFT}message-not-found", 404),
    MessageLockLostError: ReportedAs(f"{MICROSOFT}message-lock-lost", 410),
    SessionLockLostError: ReportedAs(f"{MICROSOFT}session-lock-lost", 410),
    SessionCannotBeLockedError: ReportedAs(f"{MICROSOFT}session-cannot-be-locked", 409),
    ServerBusyError: ReportedAs(f"{MICROSOFT}server-busy", 503),
    OperationTimeoutError: ReportedAs(f"{MICROSOFT}timeout", 408),
    InvalidArgumentError: ReportedAs(f"{MICROSOFT}argument-error", 400),
    InvalidOperationError: ReportedAs(Condition.NOT_ALLOWED, 400),
    CommandFailedError: ReportedAs(Condition.ILLEGAL_STATE, 500),
    NamespaceClosedError: ReportedAs(Condition.CONNECTION_FORCED, 503),
}


def mapped(error: MessagingError) -> ReportedAs:
    """Return the condition and the status of an error."""
    if isinstance(error, AmqpError):
        return ReportedAs(error.condition, 400)
    for kind, found in _TABLE.items():
        if isinstance(error, kind):
            return found
    return _INTERNAL


def text_of(error: MessagingError) -> str:
    """Return the text of an error; JavaScript's SDK detects a missing entity by these words."""
    text = error.text
    if isinstance(error, EntityNotFoundError):
        text = f"The messaging entity {error.facts.get('path', '')} could not be found: {text}"
    return text[:_MOST_CHARACTERS]


def condition_of(error: MessagingError) -> ErrorCondition:
    """Return an error in the form that links use."""
    condition = Symbol(mapped(error).condition)
    return ErrorCondition(condition=condition, description=text_of(error), info={})


def no_modification(names: Iterable[object]) -> AmqpError:
    """Return the error for a settlement that asks to change properties of its message."""
    shown = ", ".join(sorted(map(str, names)))
    return AmqpError(
        f"a settlement cannot change properties of the message: {shown:.200}. Settle it without "
        "them, or send a changed copy and complete the message",
        Condition.NOT_IMPLEMENTED,
    )


NO_TRANSACTIONS: Final = ErrorCondition(
    condition=Symbol(Condition.NOT_IMPLEMENTED),
    description="transactions are not supported; send the messages in one batch, which is atomic",
    info={},
)
