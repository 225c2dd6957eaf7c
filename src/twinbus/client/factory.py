"""The factory: one connection to one namespace; it creates all clients of that namespace.

A factory is thread-safe. It can be paired once; pairing replaces the route of its courier.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from twinbus.tracing import TracedPeer
from twinbus.values import check_span

P = TypeVar("P")


class PairedNamespaceOptions(ABC, Generic[P]):
    """Base class for the options of a pairing; each subclass is one kind of pairing."""

    def __init__(self, failover_interval: timedelta = DEFAULT_FAILOVER_INTERVAL) -> None:
        check_span("failover_interval", failover_interval, timedelta(0), MAX_FAILOVER_INTERVAL)
        self._failover_interval = failover_interval

    @property
    def failover_interval(self) -> timedelta:
        """How long failures of an entity are tolerated before its sends are diverted."""
        return self._failover_interval

    @abstractmethod
    def pair(self, primary: "MessagingFactory") -> P:
        """Set the pairing up and return it; `pair_namespace` calls this once."""


class MessagingFactory(NamespaceUser):
    """Creates clients of one namespace. Thread-safe. Close it when done.

    Applications call `MessagingFactory.from_connection_string(...)`. The constructor takes an open
    namespace, a clock and a name; it is for tests and for other implementations of a namespace.
    """

    def __init__(  # noqa: PLR0913 - keyword-only parts, all but one optional
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
        self.connection = connection  # other processes of the application use it; None: unknown
        super().__init__(namespace, retry_policy, clock, address=address, random=random)
        if connection is not None:
            self._courier.peer = TracedPeer.of(connection)
        self._is_paired = False
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
        """Lock a session of a queue or subscription: the named one, or the next with messages."""
        return accept_session(self._courier, path, session_id, wait, options)

    # -- pairing -------------------------------------------------------------------------------

    def pair_namespace(self, options: PairedNamespaceOptions[P]) -> P:
        """Pair this namespace with another; return when the pairing is set up.

        The pairing also applies to clients that already exist. If it raises, nothing is paired, and
        you may call it again.
        """
        if not isinstance(options, PairedNamespaceOptions):
            raise InvalidArgumentError(
                "pair_namespace takes options, such as SendAvailabilityPairedNamespaceOptions, not "
                f"{type(options).__name__}"
            )
        self._life.check()
        with self.joining_a_pairing():
            return options.pair(self)

    @contextmanager
    def joining_a_pairing(self) -> Iterator[None]:
        """Let the factory join its only pairing, as primary or secondary, unless the block raises.

        A factory of two pairings would be closed or faulted by one while the other needs it.
        """
        if not self._pairing_begins.acquire(blocking=False):
            raise InvalidOperationError(
                f"another thread is pairing the factory of {self.name}. Wait for it: a factory can "
                "be paired only once"
            )
        try:
            if self._is_paired:
                raise InvalidOperationError(
                    f"the factory of {self.name} is already paired, and a factory can be paired at "
                    "most once, as the primary or as the secondary. Create a new factory for "
                    "another pairing"
                )
            yield
            self._is_paired = True
        finally:
            self._pairing_begins.release()

    # -- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> FactoryState:
        """The state of the factory."""
        return self._life.state

    def on_state_change(self, watcher: Callable[[FactoryState], None]) -> Callable[[], None]:
        """Call `watcher` at each change of state; return a function that removes the watcher."""
        return self._life.watch(watcher)

    def fault(self, cause: str) -> None:
        """Fault the factory: it refuses every further call with an error that names this cause."""
        if self._life.enter(FactoryState.FAULTED, cause):
            self._namespace.close()
