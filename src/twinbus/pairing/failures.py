"""Which errors of a send count as failures of its entity. Pure functions."""

from twinbus.errors import (
    CommunicationError,
    FaultOwner,
    MessagingError,
    OperationTimeoutError,
    ServerBusyError,
    UnauthorizedError,
)


def says_unavailable(error: MessagingError) -> bool:
    """Whether an error means that the entity is unavailable.

    Errors of the caller or its configuration do not, and a broker that is busy is available.
    """
    if error.fault is FaultOwner.CALLER:
        return False
    return not isinstance(error, UnauthorizedError | ServerBusyError)


def counts_at_once(error: MessagingError) -> bool:
    """Whether the failure of a single try counts: a timeout, or a server that cannot be reached.

    Any other transient failure counts only when the retry policy is exhausted.
    """
    return isinstance(error, OperationTimeoutError | CommunicationError)
