"""Which failures say that an entity is unavailable."""

from twinbus.errors import (
    CommunicationError,
    Fault,
    MessagingError,
    OperationTimeoutError,
    ServerBusyError,
    UnauthorizedError,
)


def says_unavailable(error: MessagingError) -> bool:
    """Whether a failed send says something about the entity's availability.

    It does not where the caller or its configuration is wrong, and a busy broker is there.
    """
    if error.fault is Fault.CALLER:
        return False
    return not isinstance(error, UnauthorizedError | ServerBusyError)


def counts_at_once(error: MessagingError) -> bool:
    """Whether the failure of a single try counts: it timed out, or nobody could be reached.

    Any other transient failure counts when it has outlived the retry policy.
    """
    return isinstance(error, OperationTimeoutError | CommunicationError)
