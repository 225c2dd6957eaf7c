"""Maps each error of the SDK of Azure Service Bus to an error of Twinbus.

TABLE has one row per kind of failure, and `tests/interop/test_azure_errors.py` one test per row.
`is_stale` says that an idle link may be the cause: the link is reopened once before the failure is
reported. If an error has an AMQP condition, the condition decides, not the class of the exception.
`is_silent` says that the service did not answer in time: the link may be dead and is closed. A
timeout that the service itself reports has a condition, and the link stays in use.

The kind of error decides who is at fault, whether a retry helps and whether it counts for failover:
see errors.py and pairing/failures.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from http import HTTPStatus
from typing import Any, Final

from azure.core import exceptions as core
from azure.servicebus import exceptions as sdk
from azure.servicebus._pyamqp.error import AMQPException

from twinbus import errors as e
from twinbus.limits import SERVER_BUSY_RETRY_S


@dataclass(frozen=True, slots=True)
class MappedFailure:
    """How a failure of the SDK is mapped."""

    kind: type[e.MessagingError]
    is_stale: bool = False  # an idle link may be the cause
    is_silent: bool = False  # the service did not answer on the link


_LOST: Final = MappedFailure(e.CommunicationError, is_stale=True)
_DENIED: Final = MappedFailure(e.UnauthorizedError, is_stale=True)  # its token may have expired
_SILENT: Final = MappedFailure(e.OperationTimeoutError, is_silent=True)
_WRONG: Final = MappedFailure(e.InvalidOperationError)
_PASSING: Final = MappedFailure(e.TransientError, is_stale=True)

CONDITIONS: Final[Mapping[str, MappedFailure]] = {
    "amqp:link:message-size-exceeded": MappedFailure(e.MessageSizeExceededError),
    "amqp:resource-limit-exceeded": MappedFailure(e.QuotaExceededError),
    "amqp:unauthorized-access": _DENIED,
    "amqp:not-found": MappedFailure(e.EntityNotFoundError),
    "amqp:not-allowed": _WRONG,
    "amqp:not-implemented": _WRONG,
    "amqp:precondition-failed": _WRONG,
    "amqp:resource-deleted": MappedFailure(e.EntityNotFoundError),
    "amqp:illegal-state": MappedFailure(e.CommandFailedError),
    "amqp:decode-error": MappedFailure(e.InvalidArgumentError),
    "amqp:internal-error": _PASSING,
    "amqp:link:detach-forced": _LOST,
    "amqp:connection:forced": _LOST,
    "com.microsoft:container-close": _LOST,
    "com.microsoft:server-busy": MappedFailure(e.ServerBusyError),
    "com.microsoft:timeout": MappedFailure(e.OperationTimeoutError),
    "com.microsoft:operation-cancelled": _PASSING,
    "com.microsoft:store-lock-lost": _PASSING,
    "com.microsoft:entity-disabled": MappedFailure(e.EntityDisabledError),
    "com.microsoft:entity-already-exists": MappedFailure(e.EntityAlreadyExistsError),
    "com.microsoft:message-lock-lost": MappedFailure(e.MessageLockLostError),
    "com.microsoft:message-not-found": MappedFailure(e.MessageNotFoundError),
    "com.microsoft:session-lock-lost": MappedFailure(e.SessionLockLostError),
    "com.microsoft:session-cannot-be-locked": MappedFailure(e.SessionCannotBeLockedError),
    "com.microsoft:auth-failed": _DENIED,
    "com.microsoft:argument-error": MappedFailure(e.InvalidArgumentError),
    "com.microsoft:argument-out-of-range": MappedFailure(e.InvalidArgumentError),
    "com.microsoft:precondition-failed": _WRONG,
}
TABLE: Final[Mapping[type[BaseException], MappedFailure]] = {  # the first matching row is used
    sdk.MessageSizeExceededError: MappedFailure(e.MessageSizeExceededError),
    sdk.ServiceBusQuotaExceededError: MappedFailure(e.QuotaExceededError),
    sdk.ServiceBusAuthenticationError: _DENIED,
    sdk.ServiceBusAuthorizationError: _DENIED,
    sdk.MessagingEntityNotFoundError: MappedFailure(e.EntityNotFoundError),
    sdk.MessagingEntityDisabledError: MappedFailure(e.EntityDisabledError),
    sdk.MessagingEntityAlreadyExistsError: MappedFailure(e.EntityAlreadyExistsError),
    sdk.MessageLockLostError: MappedFailure(e.MessageLockLostError),
    sdk.MessageNotFoundError: MappedFailure(e.MessageNotFoundError),
    sdk.SessionLockLostError: MappedFailure(e.SessionLockLostError),
    sdk.SessionCannotBeLockedError: MappedFailure(e.SessionCannotBeLockedError),
    sdk.ServiceBusServerBusyError: MappedFailure(e.ServerBusyError),
    sdk.OperationTimeoutError: _SILENT,
    sdk.ServiceBusConnectionError: _LOST,
    sdk.ServiceBusCommunicationError: _LOST,
    sdk.MessageAlreadySettled: MappedFailure(e.MessageLockLostError),
    sdk.ServiceBusError: _LOST,  # without a condition: a race in the SDK while a link ends
    AMQPException: _LOST,
    core.ClientAuthenticationError: MappedFailure(e.UnauthorizedError),
    core.ResourceNotFoundError: MappedFailure(e.EntityNotFoundError),
    core.ResourceExistsError: MappedFailure(e.EntityAlreadyExistsError),
    core.ServiceResponseTimeoutError: MappedFailure(e.OperationTimeoutError),
    core.ServiceRequestTimeoutError: MappedFailure(e.OperationTimeoutError),
    core.ServiceRequestError: MappedFailure(e.CommunicationError),
    core.ServiceResponseError: MappedFailure(e.CommunicationError),
    TimeoutError: _SILENT,
    OSError: _LOST,
    AttributeError: _LOST,  # a race in the SDK while a link ends: an attribute of None
    TypeError: _LOST,
    ValueError: _LOST,  # the SDK raises it for a closed link
    KeyError: _LOST,
}
STATUSES: Final[Mapping[int, MappedFailure]] = {  # of the administration API
    400: MappedFailure(e.InvalidArgumentError),
    401: MappedFailure(e.UnauthorizedError),
    403: MappedFailure(e.QuotaExceededError),
    404: MappedFailure(e.EntityNotFoundError),
    408: MappedFailure(e.OperationTimeoutError),
    409: MappedFailure(e.EntityAlreadyExistsError),  # of a creation
    410: MappedFailure(e.EntityNotFoundError),
    429: MappedFailure(e.ServerBusyError),
    500: MappedFailure(e.TransientError),
    502: MappedFailure(e.TransientError),
    503: MappedFailure(e.ServerBusyError),
    504: MappedFailure(e.OperationTimeoutError),
}
_CONFLICT: Final = MappedFailure(e.TransientError)  # with another operation on the same entity
SUB_CODES: Final[Mapping[str, MappedFailure]] = {  # in the text of an answer
    "SubCode=40301": _WRONG,
    "SubCode=40901": _CONFLICT,
}
_OWN: Final[Mapping[type[BaseException], MappedFailure]] = {  # what Twinbus raises on a link
    e.OperationTimeoutError: _SILENT,
    e.CommunicationError: _LOST,
}
_UNKNOWN: Final = MappedFailure(e.MessagingError)
_UNFIT: Final = MappedFailure(e.TransientError)  # a condition that is not in the table


def mapped(error: BaseException) -> MappedFailure:
    """Return the row of a failure."""
    if isinstance(error, e.MessagingError):
        return _OWN.get(type(error), _UNKNOWN)
    condition = condition_of(error)
    if condition in CONDITIONS and not _lost_connection(error):
        return CONDITIONS[condition]
    status: Any = getattr(error, "status_code", None)
    if isinstance(error, core.HttpResponseError) and status in STATUSES:
        return _of_answer(error)
    if type(error) is sdk.ServiceBusError and condition:
        return _LOST if condition in _OF_CLIENT else _UNFIT
    for kind, row in TABLE.items():
        if isinstance(error, kind):
            return row
    return _UNKNOWN


def _of_answer(error: core.HttpResponseError) -> MappedFailure:
    """Return the row of an answer of the administration API, as the SDKs of Azure decide it."""
    for sub_code, row in SUB_CODES.items():
        if sub_code in str(error):
            return row
    request: Any = getattr(error.response, "request", None)
    is_creation = request is None or (request.method == "PUT" and "If-Match" not in request.headers)
    if error.status_code == HTTPStatus.CONFLICT and not is_creation:
        return _CONFLICT
    return STATUSES[error.status_code or 0]


_OF_CLIENT: Final = frozenset(("amqp:client-error", "amqp:unknown-error", "amqp:socket-error"))


def _lost_connection(error: BaseException) -> bool:
    """Return whether the connection was lost, even if the condition says something else."""
    return isinstance(error, sdk.ServiceBusConnectionError | sdk.ServiceBusCommunicationError)


def condition_of(error: BaseException) -> str:
    """Return the AMQP condition of a failure; empty if it has none."""
    if isinstance(error, sdk.OperationTimeoutError) and error.__cause__ is not None:
        error = error.__cause__  # the SDK wraps a timeout in an error without condition
    condition: Any = getattr(error, "_condition", None) or getattr(error, "condition", None)
    condition = getattr(condition, "value", condition)
    if isinstance(condition, bytes):
        return condition.decode(errors="replace")
    return condition if isinstance(condition, str) else ""


_ADVICE = (  # for texts of the SDK and the service that name no next step
    (e.UnauthorizedError, "check the key or token, and its claims"),
    (e.ServerBusyError, f"wait {SERVER_BUSY_RETRY_S} s before the next request"),
    (
        e.OperationTimeoutError,
        "the command may or may not have been carried out; check its effect before you repeat it",
    ),
    (e.CommunicationError, "check that the service can be reached and the Endpoint is correct"),
)


def to_messaging_error(error: BaseException, path: str) -> e.MessagingError:
    """Return a failure of the SDK as an error of Twinbus; Twinbus's errors stay as they are."""
    if isinstance(error, e.MessagingError):
        return error
    kind, text = mapped(error).kind, _text_of(error)
    facts: dict[str, object] = {"path": path} if path else {}
    if issubclass(kind, e.ServerBusyError):
        facts |= {"scope": busy_scope(text, path), "retry_after_s": SERVER_BUSY_RETRY_S}
    about = f"{path}: " if path and path not in text else ""
    advice = next((f" ({words})" for known, words in _ADVICE if issubclass(kind, known)), "")
    made = kind(f"{about}{text}{advice}", **facts)
    made.__cause__ = error
    return made


def busy_scope(text: str, path: str) -> str:
    """Return the scope that is busy: the path of an entity, or an empty text for the namespace.

    Service Bus usually throttles a namespace. Only the error text names the throttled scope.
    """
    if path and re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])", text, re.IGNORECASE):
        return path
    return "" if "namespace" in text.lower() else path


def _text_of(error: BaseException) -> str:
    """Return the text of a failure without the SDK's additions; it never contains secrets."""
    detail = re.search(r"<Detail>(.*?)</Detail>", str(error), re.DOTALL)
    if isinstance(error, core.HttpResponseError) and detail:
        return unescape(detail[1]).strip()
    text = str(getattr(error, "message", "") or error) or type(error).__name__
    text = re.sub(r" (Error condition: \S+|Status Code: \d+)\.?", "", text).strip()
    return re.sub(r"\bb(['\"])(.*)\1\.?$", r"\2", text)  # the SDK prints the bytes it received
