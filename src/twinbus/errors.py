"""Every error Twinbus raises, who is at fault, and whether trying again can help.

    MessagingError                   fault     transient
    ├── InvalidArgumentError         caller    no    a value breaks a rule: the text names it
    │   └── MessageSizeExceededError caller    no
    ├── InvalidOperationError        caller    no    the entity or its state does not allow it
    │   └── UnsupportedCapabilityError caller  no    the namespace's engine cannot do it
    ├── MissingExtraError            operator  no    install the extra that the text names; also an
    │                                                ImportError
    ├── EntityNotFoundError          caller    no
    ├── EntityAlreadyExistsError     caller    no
    ├── MessageNotFoundError         caller    no
    ├── MessageLockLostError         caller    no    the lock has expired, or never existed
    ├── SessionLockLostError         caller    no
    ├── SessionCannotBeLockedError   caller    yes   another receiver has locked it
    ├── RangeUnavailableError        caller    yes   another syphon or a receiver locks it
    ├── StaleEpochError              caller    no    the lease has expired or was replaced
    ├── EntityDisabledError          operator  no
    ├── QuotaExceededError           operator  no    an entity, or what the text names, is full
    ├── NamespaceInUseError          operator  no    another process writes this directory
    ├── LogDamagedError              operator  no
    ├── NewerFormatError             operator  no
    ├── LedgerDamagedError           operator  no    the text names the files
    ├── NamespaceClosedError         caller    no
    ├── FactoryFaultedError          caller    no    it or its pair failed; create new ones
    ├── UnauthorizedError            operator  no    no token, a bad one, or a claim is missing;
    │                                                also a PermissionError
    ├── ServerBusyError              broker    yes   wait 10 s
    ├── OperationTimeoutError        broker    yes   the outcome is unknown; also a TimeoutError
    ├── CommunicationError           broker    yes   not reached, or the outcome is unknown
    ├── StoreUnavailableError        broker    yes   the disk refuses writes; nothing was accepted
    ├── BacklogUnavailableError      broker    yes   primary and backlog queues failed: see causes
    ├── CommandFailedError           broker    no    an internal error; nothing was changed
    └── BrokerRestartingError        broker    yes   the broker restarts from its log

An error's facts are attributes; `code` names its class on the wire.
"""

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

NAMESPACE_CLOSED = (
    "the namespace was closed and accepts no more commands. Create a new factory or manager"
)


class FaultOwner(Enum):
    """Who has to act so that the error goes away."""

    CALLER = "caller"
    OPERATOR = "operator"
    BROKER = "broker"


class MessagingError(Exception):
    """The root of the tree; raised itself only for failures that no subclass describes."""

    is_transient: ClassVar[bool] = False
    fault: ClassVar[FaultOwner] = FaultOwner.BROKER

    def __init__(self, text: str, **facts: object) -> None:
        super().__init__(text)
        self.text = text
        self.facts: Mapping[str, object] = facts

    def __getattr__(self, name: str) -> object:
        """Facts read as attributes: `error.path`, `error.limit`."""
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} carries no fact named {name!r}")

    @property
    def code(self) -> str:
        """The name of the error class on the wire; it does not change between versions."""
        return type(self).__name__.removesuffix("Error")


class TransientError(MessagingError):
    """A transient failure without a more specific class."""

    is_transient = True


class InvalidArgumentError(MessagingError):
    """A value breaks a rule; the text names the value and the rule."""

    fault = FaultOwner.CALLER


class MessageSizeExceededError(InvalidArgumentError):
    """A message is larger than the namespace accepts."""


class InvalidOperationError(MessagingError):
    """The operation does not fit the entity or its state."""

    fault = FaultOwner.CALLER


class UnsupportedCapabilityError(InvalidOperationError):
    """The engine behind a namespace lacks a capability; `capability` names it."""


class MissingExtraError(MessagingError, ImportError):
    """An optional part of Twinbus is not installed; the text has the command that installs it."""

    fault = FaultOwner.OPERATOR


class EntityNotFoundError(MessagingError):
    """There is no entity with that path."""

    fault = FaultOwner.CALLER


class EntityAlreadyExistsError(MessagingError):
    """An entity or rule with that name exists already."""

    fault = FaultOwner.CALLER


class MessageNotFoundError(MessagingError):
    """There is no such message in the state that the operation needs."""

    fault = FaultOwner.CALLER


class MessageLockLostError(MessagingError):
    """A lock token is unknown, or its lock has expired; an unsettled message is delivered again."""

    fault = FaultOwner.CALLER


class SessionLockLostError(MessagingError):
    """The session lock has expired, was released, or never existed."""

    fault = FaultOwner.CALLER


class SessionCannotBeLockedError(MessagingError):
    """Another receiver has locked the session, or no session became free in time."""

    fault = FaultOwner.CALLER
    is_transient = True


class RangeUnavailableError(MessagingError):
    """Part of the range is leased to another owner, or locked by a receiver."""

    fault = FaultOwner.CALLER
    is_transient = True


class StaleEpochError(MessagingError):
    """The lease of this epoch has expired, was released, or was taken over."""

    fault = FaultOwner.CALLER


class EntityDisabledError(MessagingError):
    """The entity's status does not allow the operation."""

    fault = FaultOwner.OPERATOR


class QuotaExceededError(MessagingError):
    """The entity is full, or another quota that the text names is used up."""

    fault = FaultOwner.OPERATOR


class NamespaceInUseError(MessagingError):
    """Another process is the writer of this directory."""

    fault = FaultOwner.OPERATOR


class LogDamagedError(MessagingError):
    """A record of the log fails its checksum, or files of the log are missing."""

    fault = FaultOwner.OPERATOR


class LedgerDamagedError(MessagingError):
    """Files of a ledger cannot be read."""

    fault = FaultOwner.OPERATOR


class NewerFormatError(MessagingError):
    """The directory was written by a newer version of Twinbus."""

    fault = FaultOwner.OPERATOR


class NamespaceClosedError(MessagingError):
    """The namespace was closed."""

    fault = FaultOwner.CALLER


class FactoryFaultedError(MessagingError):
    """The factory was faulted; the text names the cause."""

    fault = FaultOwner.CALLER


class UnauthorizedError(MessagingError, PermissionError):
    """The token is missing, forged or expired, or its key lacks the claim."""

    fault = FaultOwner.OPERATOR


class ServerBusyError(TransientError):
    """A threshold of the namespace is exceeded; wait before the next request."""


class OperationTimeoutError(TransientError, TimeoutError):
    """There was no reply in time; the request may or may not have been executed."""


class CommunicationError(TransientError):
    """The server cannot be reached, or the connection broke before the reply arrived."""


class StoreUnavailableError(TransientError):
    """The disk refuses writes; nothing of the request was accepted."""


class BacklogUnavailableError(TransientError):
    """An entity failed, and no backlog queue accepted its messages; the facts have both causes."""


class CommandFailedError(MessagingError):
    """The broker failed to execute this command, which changed nothing; others are unaffected."""


class BrokerRestartingError(TransientError):
    """The broker found itself inconsistent and restarts from its log."""


def error_of(code: str, text: str, facts: Mapping[str, object]) -> MessagingError:
    """Return the error for a code of the wire; a MessagingError for an unknown code."""
    error = _KINDS.get(code, MessagingError)(text)
    error.facts = facts
    return error


def _kinds(root: type[MessagingError]) -> dict[str, type[MessagingError]]:
    found = {root.__name__.removesuffix("Error"): root}
    for kind in root.__subclasses__():
        found |= _kinds(kind)
    return found


_KINDS = _kinds(MessagingError)
