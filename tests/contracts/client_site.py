"""What the tests of the client have in common: a namespace with a factory and a manager."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.namespaces import address_of, door_of, embedded
from twinbus import (
    BrokeredMessage,
    MessageReceiver,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    ReceivedMessage,
    ReceiveMode,
    RetryPolicy,
)
from twinbus.client.receiver import ReceiveOptions
from twinbus.client.state import FactoryState
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString, Place
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command

R = TypeVar("R")
ORDERS, NEWS, SESSIONS = "orders", "news", "sessions"
NOW = timedelta(0)
DELETE = ReceiveOptions(mode=ReceiveMode.RECEIVE_AND_DELETE)
RENEWED = ReceiveOptions(auto_renew_for=timedelta(minutes=10))


class Observed:
    """A namespace that remembers which requests were answered."""

    def __init__(self, inner: Namespace) -> None:
        self.inner = inner
        self._answered: Counter[type] = Counter()
        self._changed = threading.Condition()

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        return self.inner.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        reply = self.inner.ask(command, timeout_s)
        with self._changed:
            self._answered[type(command)] += 1
            self._changed.notify_all()
        return reply

    def close(self) -> None:
        self.inner.close()

    def wait_for(self, kind: type, count: int) -> None:
        """Return when so many requests of a kind have been answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._answered[kind] >= count, timeout=20)

    def count(self, kind: type) -> int:
        with self._changed:
            return self._answered[kind]


@dataclass
class Site:
    """A namespace, a factory and a manager of it, and the clock they live by."""

    clock: ManualClock
    connect: Callable[[], Namespace]
    factory: MessagingFactory = field(init=False)
    manager: NamespaceManager = field(init=False)
    observed: Observed = field(init=False)

    def __post_init__(self) -> None:
        self.observed = Observed(self.connect())
        self.factory = MessagingFactory(
            self.observed, name="contoso", clock=self.clock, retry_policy=RetryPolicy()
        )
        self.manager = NamespaceManager(
            self.connect(), clock=self.clock, retry_policy=RetryPolicy()
        )

    def pass_time(self, **span: float) -> None:
        self.clock.advance(timedelta(**span))

    def send(self, *texts: str, path: str = ORDERS, **fields: Any) -> None:
        sender = self.factory.create_message_sender(path)
        sender.send_batch([message(text, **fields) for text in texts])

    def take(self, path: str = ORDERS) -> list[str]:
        """Receive and delete what is there now, as another client; return the bodies."""
        with MessagingFactory(self.connect(), clock=self.clock) as second:
            return bodies(second.create_message_receiver(path, DELETE).receive_batch(1000, NOW))

    def receiver(self, options: ReceiveOptions | None = None) -> MessageReceiver:
        return self.factory.create_message_receiver(ORDERS, options)

    def watch(self) -> list[FactoryState]:
        seen: list[FactoryState] = []
        self.factory.on_state_change(seen.append)
        return seen


@pytest.fixture(params=["embedded", "server"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    clock = ManualClock()
    with ExitStack() as stack:
        if request.param == "embedded":
            where = ConnectionString(place=Place.EMBEDDED, directory=tmp_path / "namespace")
        else:
            inner = stack.enter_context(embedded(tmp_path / "namespace", clock))
            where = address_of(stack.enter_context(door_of(inner, clock)))
        site = Site(clock, lambda: open_namespace(where, clock))
        stack.enter_context(site.manager)
        stack.enter_context(site.factory)
        site.manager.create_queue(ORDERS)
        site.manager.create_queue(QueueDescription(path=SESSIONS, requires_session=True))
        site.manager.create_topic(NEWS)
        site.manager.create_subscription(NEWS, "eu")
        yield site


def message(text: str = "order", **fields: Any) -> BrokeredMessage:
    return BrokeredMessage(body=text.encode(), **fields)


def bodies(messages: Any) -> list[str]:
    return [item.body.decode() for item in messages]


def got(received: ReceivedMessage | None) -> ReceivedMessage:
    assert received is not None
    return received
