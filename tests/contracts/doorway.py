"""A namespace with a door, and the clients that come to it."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import ROOT, address_of, door_of, embedded
from twinbus import BrokeredMessage, Claim, MessagingError, QueueDescription, SharedAccessKey
from twinbus.clock import Clock, ManualClock
from twinbus.connection import ConnectionString, sign_token
from twinbus.limits import SECOND_US
from twinbus.message import to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    EntityKind,
    ListEntities,
    Peek,
    PutKey,
    ReadMeter,
    Receive,
    ReceiveMode,
    Send,
)
from twinbus.server.door import Door

ORDERS, PAYMENTS, SESSIONS = "orders", "payments", "sessions"
ORDER = BrokeredMessage(body=b"order")
LONG = timedelta(hours=20)
LIST = ListEntities(EntityKind.QUEUE)


@dataclass
class Server:
    """A namespace with a door, and the clock it lives by."""

    namespace: EmbeddedNamespace
    clock: Clock
    door: Door
    clients: ExitStack = field(default_factory=ExitStack)

    def connection(self, key: SharedAccessKey | None = ROOT, /, **parts: Any) -> ConnectionString:
        return address_of(self.door, key, **parts)

    def client(self, key: SharedAccessKey | None = ROOT, /, **parts: Any) -> ServerNamespace:
        made = ServerNamespace(self.connection(key, **parts), self.clock)
        return self.clients.enter_context(made)

    def token(self, lives: timedelta, key: SharedAccessKey = ROOT) -> str:
        expires_s = (self.clock.now_us() // SECOND_US) + int(lives.total_seconds())
        return sign_token("twinbus://127.0.0.1/", key.name, key.primary, expires_s)

    def put(self, *claims: Claim, name: str = "key", path: str | None = None) -> SharedAccessKey:
        key = SharedAccessKey(
            name=name,
            claims=claims,
            primary=f"{name} one " * 4,
            secondary=f"{name} two " * 4,
            entity_path=path,
        )
        self.namespace.ask(PutKey(key))
        return key

    def take(self, path: str = ORDERS) -> list[bytes]:
        """Receive and delete what is there now, without the door."""
        command = Receive(path, 1000, mode=ReceiveMode.RECEIVE_AND_DELETE)
        return [message.body for message in to_messages(self.namespace.ask(command))]

    def receive_all(self, path: str = ORDERS) -> list[BrokeredMessage]:
        """Lock what is there now, without the door; one reply holds only so many bytes."""
        found: list[BrokeredMessage] = []
        while batch := to_messages(self.namespace.ask(Receive(path, 1000))):
            found += batch
        return found

    def operations(self, kind: str) -> int:
        """Return how many operations of a kind were metered."""
        rows = self.namespace.ask(ReadMeter()).to_pylist()
        return sum(row["count"] for row in rows if row["operation"] == kind)


def opened(stack: ExitStack, directory: Path, clock: Clock, **settings: Any) -> Server:
    namespace = stack.enter_context(embedded(directory, clock))
    for path in (ORDERS, PAYMENTS):
        namespace.ask(CreateEntity(QueueDescription(path=path)))
    namespace.ask(CreateEntity(QueueDescription(path=SESSIONS, requires_session=True)))
    door = stack.enter_context(door_of(namespace, clock, **settings))
    server = Server(namespace, clock, door)
    stack.enter_context(server.clients)
    return server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def server(tmp_path: Path, clock: ManualClock) -> Iterator[Server]:
    with ExitStack() as stack:
        yield opened(stack, tmp_path / "namespace", clock)


def refused(client: ServerNamespace, command: Command[Any] = LIST) -> MessagingError:
    """Return why a command is refused."""
    with pytest.raises(MessagingError) as caught:
        client.ask(command, 20)
    return caught.value


SENDING, LISTENING, MANAGING = Send(ORDERS, [ORDER]), Peek(ORDERS), LIST
