"""What each error of the SDK of Azure Service Bus is in Twinbus.

TABLE has one row per kind of failure, and `tests/interop/test_azure_errors.py` one test per row.
`is_stale` says that an idle link may be the cause: it is opened again, once, before the failure
counts. The condition of an AMQP error decides before the class of the SDK's exception does.

Whose fault a failure is, whether trying again helps and whether it counts for failover follow from
the kind of error: see errors.py and pairing/failures.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any, Final

from azure.core import exceptions as core
from azure.servicebus import exceptions as sdk
from azure.servicebus._pyamqp.error import AMQPException

from twinbus import errors as e
from twinbus.limits import SERVER_BUSY_RETRY_S


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a failure of the SDK is in Twinbus."""

    kind: type[e.MessagingError]
    is_stale: bool = False  # an idle link may be the cause


_LOST: Final = Mapped(e.CommunicationError, is_stale=True)
_DENIED: Final = Mapped(e.UnauthorizedError, is_stale=True)  # its token may have expired
_WRONG: Final = Mapped(e.InvalidOperationError)
_PASSING: Final = Mapped(e.TransientError, is_stale=True)

CONDITIONS: Final[Mapping[str, Mapped]] = {
    "amqp:link:message-size-exceeded": Mapped(e.MessageSizeExceededError),
    "amqp:resource-limit-exceeded": Mapped(e.QuotaExceededError),
    "amqp:unauthorized-access": _DENIED,
    "amqp:not-found": Mapped(e.EntityNotFoundError),
    "amqp:not-allowed": _WRONG,
    "amqp:not-implemented": _WRONG,
    "amqp:precondition-failed": _WRONG,
    "amqp:resource-deleted": Mapped(e.EntityNotFoundError),
    "amqp:illegal-state": Mapped(e.CommandFailedError),
    "amqp:decode-error": Mapped(e.InvalidArgumentError),
    "amqp:internal-error": _PASSING,
    "amqp:link:detach-forced": _LOST,
    "amqp:connection:forced": _LOST,
    "com.microsoft:container-close": _LOST,
    "com.microsoft:server-busy": Mapped(e.ServerBusyError),
    "com.microsoft:timeout": Mapped(e.OperationTimeoutError),
    "com.microsoft:operation-cancelled": _PASSING,
    "com.microsoft:store-lock-lost": _PASSING,
    "com.microsoft:entity-disabled": Mapped(e.EntityDisabledError),
    "com.microsoft:entity-already-exists": Mapped(e.EntityAlreadyExistsError),
    "com.microsoft:message-lock-lost": Mapped(e.MessageLockLostError),
    "com.microsoft:message-not-found": Mapped(e.MessageNotFoundError),
    "com.microsoft:session-lock-lost": Mapped(e.SessionLockLostError),
    "com.microsoft:session-cannot-be-locked": Mapped(e.SessionCannotBeLockedError),
    "com.microsoft:auth-failed": _DENIED,
    "com.microsoft:argument-error": Mapped(e.InvalidArgumentError),
    "com.microsoft:argument-out-of-range": Mapped(e.InvalidArgumentError),
    "com.microsoft:precondition-failed": _WRONG,
}
TABLE: Final[Mapping[type[BaseException], Mapped]] = {  # the first that fits counts
    sdk.MessageSizeExceededError: Mapped(e.MessageSizeExceededError),
    sdk.ServiceBusQuotaExceededError: Mapped(e.QuotaExceededError),
    sdk.ServiceBusAuthenticationError: _DENIED,
    sdk.ServiceBusAuthorizationError: _DENIED,
    sdk.MessagingEntityNotFoundError: Mapped(e.EntityNotFoundError),
    sdk.MessagingEntityDisabledError: Mapped(e.EntityDisabledError),
    sdk.MessagingEntityAlreadyExistsError: Mapped(e.EntityAlreadyExistsError),
    sdk.MessageLockLostError: Mapped(e.MessageLockLostError),
    sdk.MessageNotFoundError: Mapped(e.MessageNotFoundError),
    sdk.SessionLockLostError: Mapped(e.SessionLockLostError),
    sdk.SessionCannotBeLockedError: Mapped(e.SessionCannotBeLockedError),
    sdk.ServiceBusServerBusyError: Mapped(e.ServerBusyError),
    sdk.OperationTimeoutError: Mapped(e.OperationTimeoutError),
    sdk.ServiceBusConnectionError: _LOST,
    sdk.ServiceBusCommunicationError: _LOST,
    sdk.MessageAlreadySettled: Mapped(e.MessageLockLostError),
    sdk.ServiceBusError: _LOST,  # of no condition: a race inside the SDK while a link ends
    AMQPException: _LOST,
    core.ClientAuthenticationError: Mapped(e.UnauthorizedError),
    core.ResourceNotFoundError: Mapped(e.EntityNotFoundError),
    core.ResourceExistsError: Mapped(e.EntityAlreadyExistsError),
    core.ServiceResponseTimeoutError: Mapped(e.OperationTimeoutError),
    core.ServiceRequestTimeoutError: Mapped(e.OperationTimeoutError),
    core.ServiceRequestError: Mapped(e.CommunicationError),
    core.ServiceResponseError: Mapped(e.CommunicationError),
    TimeoutError: Mapped(e.OperationTimeoutError),
    OSError: _LOST,
    AttributeError: _LOST,  # `NoneType` races inside the SDK while a link ends
    TypeError: _LOST,
    ValueError: _LOST,  # the SDK's word for a link that was closed
    KeyError: _LOST,
}
STATUSES: Final[Mapping[int, Mapped]] = {  # of the administration API
    400: Mapped(e.InvalidArgumentError),
    401: Mapped(e.UnauthorizedError),
    403: Mapped(e.UnauthorizedError),
    404: Mapped(e.EntityNotFoundError),
    408: Mapped(e.OperationTimeoutError),
    409: Mapped(e.EntityAlreadyExistsError),
    410: Mapped(e.EntityNotFoundError),
    429: Mapped(e.ServerBusyError),
    500: Mapped(e.TransientError),
    502: Mapped(e.TransientError),
    503: Mapped(e.ServerBusyError),
    504: Mapped(e.OperationTimeoutError),
}
_UNKNOWN: Final = Mapped(e.MessagingError)
_UNFIT: Final = Mapped(e.TransientError)  # a condition that this version does not know


def mapped(error: BaseException) -> Mapped:
    """Return the row of a failure."""
    condition = condition_of(error)
    if condition in CONDITIONS and not _lost_connection(error):
        return CONDITIONS[condition]
    status: Any = getattr(error, "status_code", None)
    if isinstance(error, core.HttpResponseError) and status in STATUSES:
        return STATUSES[status]
    if type(error) is sdk.ServiceBusError and condition.startswith(("amqp:", "com.microsoft:")):
        return _LOST if condition in _OF_CLIENT else _UNFIT
    for kind, row in TABLE.items():
        if isinstance(error, kind):
            return row
    return _UNKNOWN


_OF_CLIENT: Final = frozenset(("amqp:client-error", "amqp:unknown-error", "amqp:socket-error"))


def _lost_connection(error: BaseException) -> bool:
    """Whether the connection ended, whatever the condition: a lost server is no missing entity."""
    return isinstance(error, sdk.ServiceBusConnectionError | sdk.ServiceBusCommunicationError)


def condition_of(error: BaseException) -> str:
    """Return the AMQP condition of a failure; empty: it has none."""
    condition: Any = getattr(error, "_condition", None) or getattr(error, "condition", None)
    condition = getattr(condition, "value", condition)
    if isinstance(condition, bytes):
        return condition.decode(errors="replace")
    return condition if isinstance(condition, str) else ""


def to_messaging_error(error: BaseException, path: str) -> e.MessagingError:
    """Return a failure of the SDK as an error of Twinbus; those pass through."""
    if isinstance(error, e.MessagingError):
        return error
    kind, text = mapped(error).kind, _text_of(error)
    facts: dict[str, object] = {"path": path} if path else {}
    if issubclass(kind, e.ServerBusyError):
        facts |= {"scope": busy_scope(text, path), "retry_after_s": SERVER_BUSY_RETRY_S}
    about = f"{path}: " if path and path not in text else ""
    made = kind(f"{about}{text}", **facts)
    made.__cause__ = error
    return made


def busy_scope(text: str, path: str) -> str:
    """Return what is busy: an entity by its path, or the namespace (empty).

    Service Bus throttles namespaces, and names what it throttles in the text alone.
    """
    if path and re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])", text, re.IGNORECASE):
        return path
    return "" if "namespace" in text.lower() else path


def _text_of(error: BaseException) -> str:
    """Return the text of a failure without the SDK's additions; secrets are never part of it."""
    detail = re.search(r"<Detail>(.*?)</Detail>", str(error), re.DOTALL)
    if isinstance(error, core.HttpResponseError) and detail:
        return unescape(detail[1]).strip()
    text = str(getattr(error, "message", "") or error) or type(error).__name__
    return re.sub(r" (Error condition: \S+|Status Code: \d+)\.?", "", text).strip()
