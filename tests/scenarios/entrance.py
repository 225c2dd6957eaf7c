"""A namespace behind a door in this process, and the clients that press on its limits.

Each limit keeps one kind of client from taking what the others need. An honest client is served
while the limit is reached.
"""

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import ROOT, address_of, door_of, embedded
from tests.soak.bad_bytes_tools import Exchange
from twinbus import BrokeredMessage, Claim, QueueDescription, SharedAccessKey
from twinbus.clock import ManualClock
from twinbus.connection import sign_token
from twinbus.errors import MessagingError
from twinbus.limits import SECOND_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, PutKey, Send
from twinbus.protocol.frames import FrameKind
from twinbus.protocol.wire import decode_error
from twinbus.server import door as door_module
from twinbus.server.door import Door
from twinbus.server.native import NativeConnection

QUEUE, LARGE = "orders", "large"
SECONDS = 10.0  # what has not happened by then never does


@dataclass
class Entrance:
    """A namespace behind a door in this process."""

    namespace: EmbeddedNamespace
    door: Door
    clock: ManualClock
    opened: ExitStack

    def key(self, name: str, *claims: Claim, path: str | None = None) -> SharedAccessKey:
        key = SharedAccessKey(
            name=name, claims=claims, primary=name * 20, secondary=name * 30, entity_path=path
        )
        self.namespace.ask(PutKey(key))
        return key

    def token(self, key: SharedAccessKey = ROOT, lives_s: int = 600) -> str:
        expires_s = self.clock.now_us() // SECOND_US + lives_s
        resource = f"twinbus://127.0.0.1/{key.entity_path or ''}"
        return sign_token(resource, key.name, key.primary, expires_s)

    def connect(self, key: SharedAccessKey = ROOT, **options: Any) -> Exchange:
        """Open a connection that shows a token of a key."""
        token = options.pop("token", None) or self.token(key)
        return self.opened.enter_context(Exchange(self.door.port, token, **options))

    def greet(self, key: SharedAccessKey = ROOT, **options: Any) -> MessagingError | None:
        """Open a connection; return why it is refused, or None."""
        head, _ = (exchange := self.connect(key, **options)).frame()
        if head[0] == FrameKind.WELCOME:
            return None
        exchange.cancel()
        assert head[0] == FrameKind.GOODBYE
        return decode_error(head[1:])

    def say(self, text: bytes, source: str = "127.0.0.1") -> socket.socket:
        """Open a connection that says something and then nothing more."""
        where = ("127.0.0.1", self.door.port)
        line = socket.create_connection(where, timeout=SECONDS, source_address=(source, 0))
        self.opened.enter_context(closing(line))
        line.sendall(text)
        return line

    def client(self) -> ServerNamespace:
        """Return an honest client."""
        return self.opened.enter_context(ServerNamespace(address_of(self.door), self.clock))

    def assert_serves(self) -> None:
        """An honest client that connects now is served soon."""
        with self.client() as client:
            client.ask(Send(QUEUE, [BrokeredMessage(b"honest")]), 5)

    def get(self, path: str, method: str = "GET", port: int = 0, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.door.port, timeout=10)
        with closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Entrance]]:
    monkeypatch.setattr(door_module, "DOOR_TICK_S", 0.05)
    with ExitStack() as stack:

        def make(**options: Any) -> Entrance:
            clock = ManualClock()
            namespace = stack.enter_context(embedded(tmp_path / "namespace", clock))
            for path in (QUEUE, LARGE):
                namespace.ask(CreateEntity(QueueDescription(path=path)))
            door = stack.enter_context(door_of(namespace, clock, name="shop", **options))
            return Entrance(namespace, door, clock, stack.enter_context(ExitStack()))

        yield make


def is_let_go(line: socket.socket) -> bool:
    """Whether the server hangs up."""
    with suppress(ConnectionResetError):
        while line.recv(65536):
            pass
    return True


def source(number: int) -> str:
    """Return one of the addresses of this machine."""
    return f"127.0.0.{number % 5 + 2}"


def conversation_of(entrance: Entrance, key: SharedAccessKey) -> Any:
    [found] = [
        client.conversation
        for client in list(entrance.door.attendance.clients)
        if isinstance(client, NativeConnection) and client.admitted and client.admitted.id == key.id
    ]
    return found


def fill(entrance: Entrance) -> None:
    """Put 12 MB into a queue."""
    for _ in range(4):
        entrance.namespace.ask(Send(LARGE, [BrokeredMessage(bytes(250_000))] * 12))
