"""The same API for asyncio: a thin facade that runs the blocking objects in threads.

    async with aio.MessagingFactory.from_connection_string(text) as factory:
        async with factory.create_queue_client("orders") as queue:
            await queue.send(BrokeredMessage(b"two coffees"))
            async for message in queue:
                await message.complete()

Each method behaves like the method of the same name in the blocking class. If a receive is
cancelled, the messages that it would have returned are released.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from inspect import signature
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

import pyarrow as pa

from twinbus.client import clients, factory, manager, pipelined, sender
from twinbus.client import receiver as receivers
from twinbus.client.receiver import ReceiveOptions
from twinbus.client.retry import RetryPolicy
from twinbus.client.state import FactoryState
from twinbus.clock import Clock
from twinbus.errors import MessagingError
from twinbus.limits import DEFAULT_WAIT, WAITING_AIO_THREADS, WORKING_AIO_THREADS
from twinbus.message import BrokeredMessage, tokens_of
from twinbus.protocol.commands import Disposition
from twinbus.tracing import in_context

__all__ = [
    "MessageReceiver",
    "MessageSender",
    "MessageSession",
    "MessagingFactory",
    "NamespaceManager",
    "PipelinedSender",
    "QueueClient",
    "ReceivedMessage",
    "SubscriptionClient",
    "TopicClient",
]


class _Closable(Protocol):
    def close(self) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
B_co = TypeVar("B_co", bound=_Closable, covariant=True)
_MESSAGE_FIELDS = tuple(f.name for f in fields(BrokeredMessage))


class _Threads:
    """The thread pools of a factory.

    Receives that wait for messages have their own pool, so they cannot block other operations.
    """

    def __init__(self) -> None:
        self.for_work = ThreadPoolExecutor(WORKING_AIO_THREADS, "twinbus-aio")
        self.for_waiting = ThreadPoolExecutor(WAITING_AIO_THREADS, "twinbus-aio-waiting")

    def close(self) -> None:
        self.for_work.shutdown(wait=False)
        self.for_waiting.shutdown(wait=False)


class _Facade(Generic[B_co]):
    """A blocking object, and the threads its methods run in."""

    def __init__(self, blocking: B_co, threads: "_Threads") -> None:
        self._blocking = blocking
        self._threads = threads

    async def _run(
        self,
        work: Callable[[], R],
        undo: Callable[[R], None] | None = None,
        *,
        waits: bool = False,
    ) -> R:
        """Run blocking work in a thread; if the task was cancelled, call `undo` with the result."""
        try:
            threads = self._threads.for_waiting if waits else self._threads.for_work
            future = threads.submit(in_context(work))
        except RuntimeError:  # the pool is shut down, and a closed object raises at once
            return work()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(lambda done: _undo(done, undo))
            raise

    async def close(self) -> None:
        """Close the blocking object."""
        await self._run(self._blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _undo(done: "Future[R]", undo: Callable[[R], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        with suppress(MessagingError):
            undo(done.result())


def _awaited(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Return a coroutine function for a method of the blocking class, with its parameters."""

    async def call(facade: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        blocking = facade._blocking  # noqa: SLF001 - it becomes a method of the facade
        return await facade._run(lambda: method(blocking, *args, **kwargs))  # type: ignore[no-any-return]  # noqa: SLF001

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    call.__signature__ = signature(method)  # type: ignore[attr-defined]
    return call


class PipelinedSender(_Facade[pipelined.PipelinedSender]):
    """Keeps many single sends in flight; start each as a task of its own."""

    async def send(self, message: BrokeredMessage) -> None:
        """Send a message; return when it is durable."""
        await asyncio.wrap_future(self._blocking.send(message))

    flush = _awaited(pipelined.PipelinedSender.flush)


class MessageSender(_Facade[sender.MessageSender]):
    """Sends to a queue or topic."""

    send = _awaited(sender.MessageSender.send)
    send_batch = _awaited(sender.MessageSender.send_batch)
    schedule = _awaited(sender.MessageSender.schedule)
    cancel_scheduled = _awaited(sender.MessageSender.cancel_scheduled)

    @property
    def path(self) -> str:
        """The path of the entity to which it sends."""
        return self._blocking.path

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._blocking.is_closed

    def pipelined(self) -> PipelinedSender:
        """Return a sender that keeps many single sends in flight."""
        return PipelinedSender(self._blocking.pipelined(), self._threads)


class TopicClient(MessageSender):
    """Sends to a topic."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage(BrokeredMessage):
    """A received message. Its methods settle it through its receiver."""

    receiver: "MessageReceiver | None" = field(default=None, repr=False, compare=False)

    async def complete(self) -> None:
        """Complete the message: it will not be delivered again."""
        await self._settle(receivers.MessageReceiver.complete)

    async def abandon(self) -> None:
        """Release the message for redelivery; this delivery counts as failed."""
        await self._settle(receivers.MessageReceiver.abandon)

    async def defer(self) -> None:
        """Set the message aside; only `receive_deferred` with its sequence number returns it."""
        await self._settle(receivers.MessageReceiver.defer)

    async def dead_letter(self, reason: str | None = None, description: str | None = None) -> None:
        """Move the message to the dead-letter queue."""
        await self._settle(
            lambda blocking, messages: blocking.dead_letter(messages, reason, description)
        )

    async def renew_lock(self) -> datetime:
        """Renew the lock; return the new expiry time."""
        return await self._settle(receivers.MessageReceiver.renew_locks)

    async def _settle(
        self, settle: Callable[[receivers.MessageReceiver, Sequence[BrokeredMessage]], R]
    ) -> R:
        receiver = self.receiver
        assert receiver is not None  # only receivers create received messages
        return await receiver._run(lambda: settle(receiver._blocking, [self]))  # noqa: SLF001


class MessageReceiver(_Facade[receivers.MessageReceiver]):
    """Receives from a queue, a subscription or a dead-letter queue."""

    complete = _awaited(receivers.MessageReceiver.complete)
    abandon = _awaited(receivers.MessageReceiver.abandon)
    defer = _awaited(receivers.MessageReceiver.defer)
    dead_letter = _awaited(receivers.MessageReceiver.dead_letter)
    renew_locks = _awaited(receivers.MessageReceiver.renew_locks)
    release = _awaited(receivers.MessageReceiver.release)
    peek = _awaited(receivers.MessageReceiver.peek)
    delete_messages = _awaited(receivers.MessageReceiver.delete_messages)
    settle_columns = _awaited(receivers.MessageReceiver.settle_columns)

    def __init__(self, blocking: receivers.MessageReceiver, threads: _Threads) -> None:
        super().__init__(blocking, threads)
        self._closing = asyncio.Event()

    @property
    def path(self) -> str:
        """The path of the entity from which it receives."""
        return self._blocking.path

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._blocking.is_closed

    async def close(self) -> None:
        """Release prefetched messages, and end a waiting iteration."""
        self._closing.set()
        await super().close()

    async def receive(self, wait: timedelta = DEFAULT_WAIT) -> ReceivedMessage | None:
        """Return the next message, or None if none arrived within `wait`."""
        return next(iter(await self.receive_batch(1, wait)), None)

    async def receive_batch(
        self, max_messages: int, wait: timedelta = DEFAULT_WAIT
    ) -> list[ReceivedMessage]:
        """Return up to `max_messages` messages. Waits for the first one only."""
        return self._received(
            await self._run(
                lambda: self._blocking.receive_batch(max_messages, wait),
                self._release,
                waits=True,
            )
        )

    async def receive_columns(
        self, max_messages: int, wait: timedelta = DEFAULT_WAIT
    ) -> pa.RecordBatch:
        """Receive as an Arrow batch of DELIVERY_SCHEMA; settle by its `lock_token` column."""
        return await self._run(
            lambda: self._blocking.receive_columns(max_messages, wait),
            lambda batch: self._blocking.settle_columns(
                batch.column("lock_token"), Disposition.RELEASE
            ),
            waits=True,
        )

    async def receive_deferred(
        self, sequence_numbers: int | Sequence[int]
    ) -> list[ReceivedMessage]:
        """Receive deferred messages by number, all or none."""
        return self._received(
            await self._run(
                lambda: self._blocking.receive_deferred(sequence_numbers), self._release
            )
        )

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages as they arrive, until the receiver is closed."""
        while not self.is_closed and not self._closing.is_set():
            receiving = asyncio.ensure_future(self.receive_batch(1))
            closing = asyncio.ensure_future(self._closing.wait())
            try:
                await asyncio.wait({receiving, closing}, return_when=asyncio.FIRST_COMPLETED)
                messages = receiving.result() if receiving.done() else []
            finally:
                closing.cancel()
                receiving.cancel()
            for message in messages:
                yield message

    def _received(self, messages: Sequence[BrokeredMessage]) -> list[ReceivedMessage]:
        return [
            ReceivedMessage(**{name: getattr(m, name) for name in _MESSAGE_FIELDS}, receiver=self)
            for m in messages
        ]

    def _release(self, messages: Sequence[BrokeredMessage]) -> None:
        tokens = [m.lock_token for m in messages if m.lock_token is not None]
        if tokens:
            self._blocking.settle_columns(tokens_of(tokens), Disposition.RELEASE)


class MessageSession(MessageReceiver):
    """A session under an exclusive lock: receives its messages in order, and has its state."""

    _blocking: receivers.MessageSession

    get_state = _awaited(receivers.MessageSession.get_state)
    set_state = _awaited(receivers.MessageSession.set_state)
    renew_lock = _awaited(receivers.MessageSession.renew_lock)

    @property
    def session_id(self) -> str:
        """The id of the session."""
        return self._blocking.session_id

    @property
    def locked_until_utc(self) -> datetime:
        """When the lock expires, as of the last renewal."""
        return self._blocking.locked_until_utc


class _SessionfulReceiver(MessageReceiver):
    """A receiver whose entity may have sessions."""

    _blocking: clients.SessionfulReceiver

    list_sessions = _awaited(clients.SessionfulReceiver.list_sessions)

    async def accept_message_session(
        self, session_id: str | None = None, wait: timedelta = DEFAULT_WAIT
    ) -> MessageSession:
        """Lock a session: the named one, or the next that has messages."""
        blocking = await self._run(
            lambda: self._blocking.accept_message_session(session_id, wait),
            receivers.MessageSession.close,
            waits=True,
        )
        return MessageSession(blocking, self._threads)


class SubscriptionClient(_SessionfulReceiver):
    """Receives from a subscription, and manages its rules."""

    _blocking: clients.SubscriptionClient

    @property
    def topic_path(self) -> str:
        """The path of its topic."""
        return self._blocking.topic_path

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self._blocking.name

    add_rule = _awaited(clients.SubscriptionClient.add_rule)
    remove_rule = _awaited(clients.SubscriptionClient.remove_rule)
    get_rules = _awaited(clients.SubscriptionClient.get_rules)


class QueueClient(_SessionfulReceiver, MessageSender):
    """Sends to a queue and receives from it."""

    _blocking: clients.QueueClient


class _NamespaceUser(_Facade[B_co]):
    """A factory or a manager: owns the threads, which end when it is closed."""

    def __init__(self, blocking: B_co) -> None:
        super().__init__(blocking, _Threads())

    async def close(self) -> None:
        """Wait for operations in flight, then close the namespace and the threads."""
        await super().close()
        self._threads.close()


class MessagingFactory(_NamespaceUser[factory.MessagingFactory]):
    """Creates clients of one namespace."""

    @classmethod
    def from_connection_string(
        cls, text: str, *, retry_policy: RetryPolicy | None = None, clock: Clock | None = None
    ) -> Self:
        """Return a factory for the namespace a connection string names."""
        return cls(
            factory.MessagingFactory.from_connection_string(
                text, retry_policy=retry_policy, clock=clock
            )
        )

    def create_queue_client(self, path: str, options: ReceiveOptions | None = None) -> QueueClient:
        """Return a client that sends to and receives from a queue."""
        return QueueClient(self._blocking.create_queue_client(path, options), self._threads)

    def create_topic_client(self, path: str) -> TopicClient:
        """Return a client that sends to a topic."""
        return TopicClient(self._blocking.create_topic_client(path), self._threads)

    def create_subscription_client(
        self, topic_path: str, name: str, options: ReceiveOptions | None = None
    ) -> SubscriptionClient:
        """Return a client that receives from a subscription."""
        blocking = self._blocking.create_subscription_client(topic_path, name, options)
        return SubscriptionClient(blocking, self._threads)

    def create_message_sender(self, path: str) -> MessageSender:
        """Return a sender to a queue or topic."""
        return MessageSender(self._blocking.create_message_sender(path), self._threads)

    def create_message_receiver(
        self, path: str, options: ReceiveOptions | None = None
    ) -> MessageReceiver:
        """Return a receiver from a queue, a subscription or a dead-letter queue."""
        return MessageReceiver(self._blocking.create_message_receiver(path, options), self._threads)

    async def accept_message_session(
        self,
        path: str,
        session_id: str | None = None,
        wait: timedelta = DEFAULT_WAIT,
        options: ReceiveOptions | None = None,
    ) -> MessageSession:
        """Lock a session of a queue or subscription: the named one, or the next with messages."""
        blocking = await self._run(
            lambda: self._blocking.accept_message_session(path, session_id, wait, options),
            receivers.MessageSession.close,
            waits=True,
        )
        return MessageSession(blocking, self._threads)

    @property
    def name(self) -> str:
        """The name of the namespace."""
        return self._blocking.name

    @property
    def state(self) -> FactoryState:
        """The state of the factory."""
        return self._blocking.state

    def on_state_change(self, watcher: Callable[[FactoryState], None]) -> Callable[[], None]:
        """Call `watcher`, in any thread, at each change of state; return a function to stop it."""
        return self._blocking.on_state_change(watcher)

    fault = _awaited(factory.MessagingFactory.fault)
    pair_namespace = _awaited(factory.MessagingFactory.pair_namespace)


class NamespaceManager(_NamespaceUser[manager.NamespaceManager]):
    """Creates, describes, lists, changes and deletes entities, rules and keys of a namespace."""

    @classmethod
    def from_connection_string(
        cls, text: str, *, retry_policy: RetryPolicy | None = None, clock: Clock | None = None
    ) -> Self:
        """Return a manager of the namespace a connection string names."""
        return cls(
            manager.NamespaceManager.from_connection_string(
                text, retry_policy=retry_policy, clock=clock
            )
        )

    create_queue = _awaited(manager.NamespaceManager.create_queue)
    get_queue = _awaited(manager.NamespaceManager.get_queue)
    update_queue = _awaited(manager.NamespaceManager.update_queue)
    delete_queue = _awaited(manager.NamespaceManager.delete_queue)
    queue_exists = _awaited(manager.NamespaceManager.queue_exists)
    list_queues = _awaited(manager.NamespaceManager.list_queues)
    create_topic = _awaited(manager.NamespaceManager.create_topic)
    get_topic = _awaited(manager.NamespaceManager.get_topic)
    update_topic = _awaited(manager.NamespaceManager.update_topic)
    delete_topic = _awaited(manager.NamespaceManager.delete_topic)
    topic_exists = _awaited(manager.NamespaceManager.topic_exists)
    list_topics = _awaited(manager.NamespaceManager.list_topics)
    create_subscription = _awaited(manager.NamespaceManager.create_subscription)
    get_subscription = _awaited(manager.NamespaceManager.get_subscription)
    update_subscription = _awaited(manager.NamespaceManager.update_subscription)
    delete_subscription = _awaited(manager.NamespaceManager.delete_subscription)
    subscription_exists = _awaited(manager.NamespaceManager.subscription_exists)
    list_subscriptions = _awaited(manager.NamespaceManager.list_subscriptions)
    create_rule = _awaited(manager.NamespaceManager.create_rule)
    update_rule = _awaited(manager.NamespaceManager.update_rule)
    get_rule = _awaited(manager.NamespaceManager.get_rule)
    delete_rule = _awaited(manager.NamespaceManager.delete_rule)
    rule_exists = _awaited(manager.NamespaceManager.rule_exists)
    list_rules = _awaited(manager.NamespaceManager.list_rules)
    get_runtime_properties = _awaited(manager.NamespaceManager.get_runtime_properties)
    read_meter = _awaited(manager.NamespaceManager.read_meter)
    create_key = _awaited(manager.NamespaceManager.create_key)
    get_key = _awaited(manager.NamespaceManager.get_key)
    list_keys = _awaited(manager.NamespaceManager.list_keys)
    regenerate_key = _awaited(manager.NamespaceManager.regenerate_key)
    delete_key = _awaited(manager.NamespaceManager.delete_key)
