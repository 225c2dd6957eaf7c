"""How errors travel to SDKs of Service Bus: a condition on links, and a status for requests.

The SDKs choose the exception they raise, and whether they try again, by the condition. All three
fields of an error are always there: some SDKs wait for ever when one is missing.
"""

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
_MOST_CHARACTERS: Final = 1000  # of a description; a frame of the peer must hold it


class Mapped(NamedTuple):
    """How one kind of error travels."""

    condition: str
    status: int


_INTERNAL = Mapped(Condition.INTERNAL_ERROR, 500)
_TABLE: Final[dict[type[MessagingError], Mapped]] = {  # the first that fits counts
    MessageSizeExceededError: Mapped(Condition.MESSAGE_SIZE_EXCEEDED, 400),
    QuotaExceededError: Mapped(Condition.RESOURCE_LIMIT_EXCEEDED, 403),
    UnauthorizedError: Mapped(Condition.UNAUTHORIZED_ACCESS, 401),
    EntityNotFoundError: Mapped(Condition.NOT_FOUND, 404),
    EntityAlreadyExistsError: Mapped(f"{MICROSOFT}entity-already-exists", 409),
    EntityDisabledError: Mapped(f"{MICROSOFT}entity-disabled", 403),
    MessageNotFoundError: Mapped(f"{MICROSOFT}message-not-found", 404),
    MessageLockLostError: Mapped(f"{MICROSOFT}message-lock-lost", 410),
    SessionLockLostError: Mapped(f"{MICROSOFT}session-lock-lost", 410),
    SessionCannotBeLockedError: Mapped(f"{MICROSOFT}session-cannot-be-locked", 409),
    ServerBusyError: Mapped(f"{MICROSOFT}server-busy", 503),
    OperationTimeoutError: Mapped(f"{MICROSOFT}timeout", 408),
    InvalidArgumentError: Mapped(f"{MICROSOFT}argument-error", 400),
    InvalidOperationError: Mapped(Condition.NOT_ALLOWED, 400),
    CommandFailedError: Mapped(Condition.ILLEGAL_STATE, 500),
    NamespaceClosedError: Mapped(Condition.CONNECTION_FORCED, 503),
}


def mapped(error: MessagingError) -> Mapped:
    """Return how an error travels."""
    if isinstance(error, AmqpError):
        return Mapped(error.condition, 400)
    for kind, found in _TABLE.items():
        if isinstance(error, kind):
            return found
    return _INTERNAL


def text_of(error: MessagingError) -> str:
    """Return what an error says; JavaScript's SDK knows a missing entity by the words."""
    text = error.text
    if isinstance(error, EntityNotFoundError):
        text = f"The messaging entity {error.facts.get('path', '')} could not be found: {text}"
    return text[:_MOST_CHARACTERS]


def condition_of(error: MessagingError) -> ErrorCondition:
    """Return an error as a link carries it."""
    condition = Symbol(mapped(error).condition)
    return ErrorCondition(condition=condition, description=text_of(error), info={})


NO_TRANSACTIONS: Final = ErrorCondition(
    condition=Symbol(Condition.NOT_IMPLEMENTED),
    description="transactions are not supported; a batch is atomic: send messages together in one",
    info={},
)
