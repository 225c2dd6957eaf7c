"""Twinbus keeps applications sending when their message broker is down.

This is the public face: what is listed here, and in `twinbus.aio` and `twinbus.testing`, is what
applications rely on.
"""

from twinbus.broker.access import Claim, SharedAccessKey
from twinbus.broker.commands import Disposition, ReceiveMode
from twinbus.client.clients import QueueClient, SubscriptionClient, TopicClient
from twinbus.client.factory import MessagingFactory
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
    BrokerRestartingError,
    CommunicationError,
    EntityAlreadyExistsError,
    EntityDisabledError,
    EntityNotFoundError,
    FactoryFaultedError,
    Fault,
    InvalidArgumentError,
    InvalidOperationError,
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

__all__ = [
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
    "FalseFilter",
    "Fault",
    "InvalidArgumentError",
    "InvalidOperationError",
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
    "PipelinedSender",
    "QueueClient",
    "QueueDescription",
    "QuotaExceededError",
    "RangeUnavailableError",
    "ReceiveMode",
    "ReceiveOptions",
    "ReceivedMessage",
    "RetryPolicy",
    "RuleDescription",
    "RuntimeProperties",
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
    "TopicClient",
    "TopicDescription",
    "TransientError",
    "TrueFilter",
    "UnauthorizedError",
    "dead_letter_path",
    "subscription_path",
]
