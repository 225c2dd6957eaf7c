"""The factory: one connection to one namespace, from which all clients come."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Generic, Self, TypeVar

from twinbus.client.clients import QueueClient, SubscriptionClient, TopicClient, accept_session
from twinbus.client.courier import NamespaceUser
from twinbus.client.receiver import MessageReceiver, MessageSession, ReceiveOptions
from twinbus.client.retry import RetryPolicy
from twinbus.client.sender import MessageSender
from twinbus.client.state import FactoryState
from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.limits import DEFAULT_FAILOVER_INTERVAL, DEFAULT_WAIT, MAX_FAILOVER_INTERVAL
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.values import check_span

P = TypeVar("P")


class PairedNamespaceOptions(ABC, Generic[P]):
    """How a factory is paired with another namespace; each subclass is a way to pair."""

    def __init__(self, failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL) -> None:
        check_span("failover_interval", failover_interval, timedelta(0), MAX_FAILOVER_INTERVAL)
        self._failover_interval = failover_interval

    @property
    def failover_interval(self) -> timedelta:
        """How long failures of an entity are tolerated before its sends are diverted."""
        return self._failover_interval

    @abstractmethod
    def pair(self, primary: "MessagingFactory") -> P:
        """Set everything up and return the pairing; called once, by `pair_namespace`."""


class MessagingFactory(NamespaceUser):
    """Makes clients of one namespace. Safe to share between threads; close it when done.

    `MessagingFactory.from_connection_string(...)` is how to get one; the constructor takes a
    namespace, a clock and a name for tests and for those who bring their own.
    """

    def __init__(  # noqa: PLR0913 - what a factory is made of
        self,
        namespace: Namespace,
        *,
        name: str = "",
        address: str = "",
        connection: ConnectionString | None = None,
        retry_policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        self.name = name  # of the namespace
        self.connection = connection  # for other processes of the application; None: nobody knows
        super().__init__(namespace, retry_policy, clock, address=address, random=random)
        self._pairing: object | None = None
        self._pairing_begins = threading.Lock()

    @classmethod
    def from_connection_string(
        cls, text: str, *, retry_policy: RetryPolicy | None = None, clock: Clock | None = None
    ) -> Self:
        """Return a factory for the namespace a connection string names."""
        connection = ConnectionString.parse(text)
        namespace = open_namespace(connection, clock)
        return cls(
            namespace,
            name=connection.name,
            address=connection.address,
            connection=connection,
            retry_policy=retry_policy,
            clock=clock,
        )

    # -- clients -------------------------------------------------------------------------------

    def create_queue_client(self, path: str, options: ReceiveOptions | None = None) -> QueueClient:
        """Return a client that sends to and receives from a queue."""
        self._life.check()
        return QueueClient(self._courier, path, options)

    def create_topic_client(self, path: str) -> TopicClient:
        """Return a client that sends to a topic."""
        self._life.check()
        return TopicClient(self._courier, path)

    def create_subscription_client(
        self, topic_path: str, name: str, options: ReceiveOptions | None = None
    ) -> SubscriptionClient:
        """Return a client that receives from a subscription."""
        self._life.check()
        return SubscriptionClient(self._courier, topic_path, name, options)

    def create_message_sender(self, path: str) -> MessageSender:
        """Return a sender to a queue or topic."""
        self._life.check()
        return MessageSender(self._courier, path)

    def create_message_receiver(
        self, path: str, options: ReceiveOptions | None = None
    ) -> MessageReceiver:
        """Return a receiver from a queue, a subscription or a dead-letter queue."""
        self._life.check()
        return MessageReceiver(self._courier, path, options)

    def accept_message_session(
        self,
        path: str,
        session_id: str | None = None,
        wait: timedelta = DEFAULT_WAIT,
        options: ReceiveOptions | None = None,
    ) -> MessageSession:
        """Hold a session of a queue or subscription: the named one, or the next with messages."""
        return accept_session(self._courier, path, session_id, wait, options)

    # -- pairing -------------------------------------------------------------------------------

    def pair_namespace(self, options: PairedNamespaceOptions[P]) -> P:
        """Pair this namespace with another; when it returns, everything is set up.

        Clients that exist already take part. If it fails, nothing is paired and it may be tried
        again.
        """
        if not isinstance(options, PairedNamespaceOptions):
            raise InvalidArgumentError(
                "pair_namespace takes options, such as SendAvailabilityPairedNamespaceOptions"
            )
        self._life.check()
        if not self._pairing_begins.acquire(blocking=False):
            raise InvalidOperationError(f"{self.name} is being paired by another thread")
        try:
            if self._pairing is not None:
                raise InvalidOperationError(
                    f"{self.name} is paired already; a factory is paired at most once"
                )
            pairing = options.pair(self)
            self._pairing = pairing
        finally:
            self._pairing_begins.release()
        return pairing

    # -- its life ------------------------------------------------------------------------------

    @property
    def state(self) -> FactoryState:
        """What it is at."""
        return self._life.state

    def on_state_change(self, watcher: Callable[[FactoryState], None]) -> Callable[[], None]:
        """Call back at each change of state; return how to stop."""
        return self._life.watch(watcher)

    def fault(self, cause: str) -> None:
        """Give up for good: from now on every call is refused with this cause."""
        if self._life.enter(FactoryState.FAULTED, cause):
            self._namespace.close()
