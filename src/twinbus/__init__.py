"""Twinbus keeps applications sending when their message broker is down.

The names listed here, and in `twinbus.aio` and `twinbus.testing`, are the public API.

Python imports the module of a name when the name is first used: `import twinbus` itself is quick,
and a program that needs one class does not wait for the rest. Type checkers read the imports under
`TYPE_CHECKING`; `tests/unit/test_public_face.py` checks that all three lists agree.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from twinbus.client.clients import QueueClient, SubscriptionClient, TopicClient
    from twinbus.client.factory import MessagingFactory, PairedNamespaceOptions
    from twinbus.client.manager import NamespaceManager
    from twinbus.client.pipelined import PipelinedSender
    from twinbus.client.receiver import (
        MessageReceiver,
        MessageSession,
        ReceivedMessage,
        ReceiveOptions,
    )
    from twinbus.client.retry import RetryPolicy
    from twinbus.client.sender import MessageSender
    from twinbus.client.state import FactoryState
    from twinbus.entities import (
        CorrelationFilter,
        EntityStatus,
        FalseFilter,
        QueueDescription,
        RuleDescription,
        RuntimeProperties,
        SqlAction,
        SqlFilter,
        SubscriptionDescription,
        TopicDescription,
        TrueFilter,
        dead_letter_path,
        subscription_path,
    )
    from twinbus.errors import (
        BacklogUnavailableError,
        BrokerRestartingError,
        CommandFailedError,
        CommunicationError,
        EntityAlreadyExistsError,
        EntityDisabledError,
        EntityNotFoundError,
        FactoryFaultedError,
        Fault,
        InvalidArgumentError,
        InvalidOperationError,
        LedgerDamagedError,
        LogDamagedError,
        MessageLockLostError,
        MessageNotFoundError,
        MessageSizeExceededError,
        MessagingError,
        MissingExtraError,
        NamespaceClosedError,
        NamespaceInUseError,
        NewerFormatError,
        OperationTimeoutError,
        QuotaExceededError,
        RangeUnavailableError,
        ServerBusyError,
        SessionCannotBeLockedError,
        SessionLockLostError,
        StaleEpochError,
        StoreUnavailableError,
        TransientError,
        UnauthorizedError,
        UnsupportedCapabilityError,
    )
    from twinbus.message import BrokeredMessage, MessageState
    from twinbus.pairing.board import BacklogQueueStatus, PathStatus
    from twinbus.pairing.events import (
        BacklogQueueBack,
        BacklogQueuePulled,
        FailedOver,
        PairingEvent,
        Returned,
    )
    from twinbus.pairing.health import HealthState
    from twinbus.pairing.metrics import PairingCollector
    from twinbus.pairing.options import SendAvailabilityPairedNamespaceOptions
    from twinbus.pairing.pairing import SendAvailabilityPairing, Syphon
    from twinbus.protocol.commands import Disposition, ReceiveMode
    from twinbus.protocol.keys import Claim, SharedAccessKey

__version__ = "0.1.0"  # the only place that says it: pyproject.toml reads it from here

__all__ = [
    "BacklogQueueBack",
    "BacklogQueuePulled",
    "BacklogQueueStatus",
    "BacklogUnavailableError",
    "BrokerRestartingError",
    "BrokeredMessage",
    "Claim",
    "CommandFailedError",
    "CommunicationError",
    "CorrelationFilter",
    "Disposition",
    "EntityAlreadyExistsError",
    "EntityDisabledError",
    "EntityNotFoundError",
    "EntityStatus",
    "FactoryFaultedError",
    "FactoryState",
    "FailedOver",
    "FalseFilter",
    "Fault",
    "HealthState",
    "InvalidArgumentError",
    "InvalidOperationError",
    "LedgerDamagedError",
    "LogDamagedError",
    "MessageLockLostError",
    "MessageNotFoundError",
    "MessageReceiver",
    "MessageSender",
    "MessageSession",
    "MessageSizeExceededError",
    "MessageState",
    "MessagingError",
    "MessagingFactory",
    "MissingExtraError",
    "NamespaceClosedError",
    "NamespaceInUseError",
    "NamespaceManager",
    "NewerFormatError",
    "OperationTimeoutError",
    "PairedNamespaceOptions",
    "PairingCollector",
    "PairingEvent",
    "PathStatus",
    "PipelinedSender",
    "QueueClient",
    "QueueDescription",
    "QuotaExceededError",
    "RangeUnavailableError",
    "ReceiveMode",
    "ReceiveOptions",
    "ReceivedMessage",
    "RetryPolicy",
    "Returned",
    "RuleDescription",
    "RuntimeProperties",
    "SendAvailabilityPairedNamespaceOptions",
    "SendAvailabilityPairing",
    "ServerBusyError",
    "SessionCannotBeLockedError",
    "SessionLockLostError",
    "SharedAccessKey",
    "SqlAction",
    "SqlFilter",
    "StaleEpochError",
    "StoreUnavailableError",
    "SubscriptionClient",
    "SubscriptionDescription",
    "Syphon",
    "TopicClient",
    "TopicDescription",
    "TransientError",
    "TrueFilter",
    "UnauthorizedError",
    "UnsupportedCapabilityError",
    "dead_letter_path",
    "subscription_path",
]

_NAMES_BY_MODULE = {
    "protocol.keys": ("Claim", "SharedAccessKey"),
    "protocol.commands": ("Disposition", "ReceiveMode"),
    "client.clients": ("QueueClient", "SubscriptionClient", "TopicClient"),
    "client.factory": ("MessagingFactory", "PairedNamespaceOptions"),
    "client.manager": ("NamespaceManager",),
    "client.pipelined": ("PipelinedSender",),
    "client.receiver": ("MessageReceiver", "MessageSession", "ReceivedMessage", "ReceiveOptions"),
    "client.retry": ("RetryPolicy",),
    "client.sender": ("MessageSender",),
    "client.state": ("FactoryState",),
    "entities": (
        "CorrelationFilter",
        "EntityStatus",
        "FalseFilter",
        "QueueDescription",
        "RuleDescription",
        "RuntimeProperties",
        "SqlAction",
        "SqlFilter",
        "SubscriptionDescription",
        "TopicDescription",
        "TrueFilter",
        "dead_letter_path",
        "subscription_path",
    ),
    "errors": (
        "BacklogUnavailableError",
        "BrokerRestartingError",
        "CommandFailedError",
        "CommunicationError",
        "EntityAlreadyExistsError",
        "EntityDisabledError",
        "EntityNotFoundError",
        "FactoryFaultedError",
        "Fault",
        "InvalidArgumentError",
        "InvalidOperationError",
        "LedgerDamagedError",
        "LogDamagedError",
        "MessageLockLostError",
        "MessageNotFoundError",
        "MessageSizeExceededError",
        "MessagingError",
        "MissingExtraError",
        "NamespaceClosedError",
        "NamespaceInUseError",
        "NewerFormatError",
        "OperationTimeoutError",
        "QuotaExceededError",
        "RangeUnavailableError",
        "ServerBusyError",
        "SessionCannotBeLockedError",
        "SessionLockLostError",
        "StaleEpochError",
        "StoreUnavailableError",
        "TransientError",
        "UnauthorizedError",
        "UnsupportedCapabilityError",
    ),
    "message": ("BrokeredMessage", "MessageState"),
    "pairing.board": ("BacklogQueueStatus", "PathStatus"),
    "pairing.events": (
        "BacklogQueueBack",
        "BacklogQueuePulled",
        "FailedOver",
        "PairingEvent",
        "Returned",
    ),
    "pairing.health": ("HealthState",),
    "pairing.metrics": ("PairingCollector",),
    "pairing.options": ("SendAvailabilityPairedNamespaceOptions",),
    "pairing.pairing": ("SendAvailabilityPairing", "Syphon"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


if not typing.TYPE_CHECKING:  # else a type checker would accept every name of this module

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used."""
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        globals()[name] = value  # the next use finds it without this function
        return value


def __dir__() -> list[str]:
    """Return the public names, whether or not they are imported yet."""
    return sorted({*globals(), *__all__})
