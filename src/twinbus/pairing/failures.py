"""Which failures say that an entity is unavailable."""

from twinbus.errors import Fault, MessagingError, ServerBusyError, UnauthorizedError


def says_unavailable(error: MessagingError) -> bool:
    """Whether a failed send says something about the entity's availability.

    It does not where the caller or its configuration is wrong, and a busy broker is there.
    """
    if error.fault is Fault.CALLER:
        return False
    return not isinstance(error, UnauthorizedError | ServerBusyError)
