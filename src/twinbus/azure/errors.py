"""Translates errors of Twinbus to the exceptions that code written for the SDK catches."""

from collections.abc import Mapping
from typing import Any, Final

from azure.servicebus import exceptions as sdk

from twinbus import errors as e

_TABLE: Final[Mapping[type[e.MessagingError], type[Any]]] = {  # the first match is used
    e.MessageSizeExceededError: sdk.MessageSizeExceededError,
    e.QuotaExceededError: sdk.ServiceBusQuotaExceededError,
    e.UnauthorizedError: sdk.ServiceBusAuthorizationError,
    e.EntityNotFoundError: sdk.MessagingEntityNotFoundError,
    e.EntityDisabledError: sdk.MessagingEntityDisabledError,
    e.MessageNotFoundError: sdk.MessageNotFoundError,
    e.ServerBusyError: sdk.ServiceBusServerBusyError,
    e.OperationTimeoutError: sdk.OperationTimeoutError,
    e.CommunicationError: sdk.ServiceBusConnectionError,
    e.BacklogUnavailableError: sdk.ServiceBusConnectionError,
}


def to_sdk_error(error: e.MessagingError) -> Exception:
    """Return an error as the SDK would raise it; the caller sets the Twinbus error as its cause."""
    if isinstance(error, e.NamespaceClosedError | e.FactoryFaultedError):
        return ValueError(str(error))  # the SDK raises it for a closed client, too
    for kind, found in _TABLE.items():
        if isinstance(error, kind):
            made: Exception = found(message=error.text)
            return made
    return sdk.ServiceBusError(error.text)
