"""Twinbus keeps applications sending when their message broker is down.

This is the public face: what is listed here, and in `twinbus.aio` and `twinbus.testing`, is what
applications rely on.
"""

from twinbus.broker.access import Claim, SharedAccessKey
from twinbus.broker.commands import Disposition, ReceiveMode
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

__all__ = [
    "BacklogQueueBack",
    "BacklogQueuePulled",
    "BacklogQueueStatus",
    "BacklogUnavailableError",
    "BrokerRestartingError",
    "BrokeredMessage",
    "Claim",
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
    "dead_letter_path",
    "subscription_path",
]
