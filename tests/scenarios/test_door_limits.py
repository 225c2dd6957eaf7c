"""The limits of a door: strangers, shares of connections, slow and greedy clients, who may read.

Each limit keeps one kind of client from taking what the others need. An honest client is served
while the limit is reached.
"""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from tests.contracts.keys import ROOT
from tests.scenarios.server_process import ORDERS, Server
from tests.soak.bad_bytes_tools import Exchange, asking, framed, frames_of, hello
from twinbus import BrokeredMessage, Claim, QueueDescription, SharedAccessKey
from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString, Place, sign_token
from twinbus.errors import MessagingError, ServerBusyError, UnauthorizedError
from twinbus.ledger import NO_LEDGER
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_OPEN_REQUESTS,
    MAX_RECEIVE_BYTES,
    MAX_UNREAD_BYTES,
    RESERVED_DESCRIPTORS,
    SECOND_US,
)
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol import server_conversation
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteKey,
    GetRuntimeProperties,
    Peek,
    PutKey,
    Receive,
    ReceiveMode,
    Send,
)
from twinbus.protocol.frames import MAGIC, FrameKind
from twinbus.protocol.wire import decode_error
from twinbus.server import attendance, client_connection, web
from twinbus.server import door as door_module
from twinbus.server.door import Door
from twinbus.server.native import NativeConnection

pytestmark = pytest.mark.timeout(60)
QUEUE, LARGE = "orders", "large"
LONG = timedelta(hours=1)
POLL = Receive(QUEUE, wait=LONG)
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
        where = ConnectionString(
            place=Place.SERVER,
            host="127.0.0.1",
            port=self.door.port,
            key_name=ROOT.name,
            key=ROOT.primary,
        )
        return self.opened.enter_context(ServerNamespace(where, self.clock))

    def assert_serves(self) -> None:
        """An honest client that connects now is served soon."""
        with self.client() as client:
            began = time.monotonic()
            client.ask(Send(QUEUE, [BrokeredMessage(b"honest")]), 5)
            assert time.monotonic() - began < 5

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
            settings = EngineSettings(directory=tmp_path / "namespace", ledger=NO_LEDGER)
            namespace = stack.enter_context(EmbeddedNamespace(settings, clock))
            namespace.ask(PutKey(ROOT))
            for path in (QUEUE, LARGE):
                namespace.ask(CreateEntity(QueueDescription(path=path)))
            door = stack.enter_context(closing(Door(namespace, clock, name="shop", **options)))
            return Entrance(namespace, door, clock, stack.enter_context(ExitStack()))

        yield make


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def is_let_go(line: socket.socket) -> bool:
    """Whether the server hangs up."""
    with suppress(ConnectionResetError):
        while line.recv(65536):
            pass
    return True


# -- strangers -------------------------------------------------------------------------------------

HALVES = {
    "nothing": b"",
    "a piece of the first bytes": MAGIC[:3],
    "the first bytes": MAGIC,
    "half a HELLO": hello("x" * 100)[:60],
    "a piece of HTTP": b"GE",
    "half a request of HTTP": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "a body that does not come": b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
}


@pytest.mark.parametrize("opening", HALVES.values(), ids=HALVES)
def test_a_stranger_is_let_go_when_its_time_is_over(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    for module in (door_module, server_conversation, web):
        monkeypatch.setattr(module, "AUTHENTICATION_US", SECOND_US // 5)
    entrance = enter()
    line = entrance.say(opening)
    entrance.assert_serves()
    assert is_let_go(line)
    eventually(lambda: not entrance.door.attendance.strangers)


@pytest.mark.parametrize("opening", HALVES.values(), ids=HALVES)
def test_strangers_are_bounded_in_number_while_others_are_served(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    for module in (attendance, door_module):
        monkeypatch.setattr(module, "MAX_STRANGERS", 8)
    entrance = enter()
    lines = [entrance.say(opening) for _ in range(40)]
    entrance.assert_serves()
    assert all(map(is_let_go, lines[:30]))  # the oldest go first
    assert len(entrance.door.attendance.strangers) <= 8


@pytest.mark.parametrize(
    "opening",
    [hello("x" * 1000)[:900], b"AMQP\3\1\0\0" + (500).to_bytes(4) + b"\2\1\0\0" + bytes(400)],
    ids=["native", "amqp"],
)
def test_unfinished_requests_of_strangers_are_bounded_together(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    entrance = enter()
    monkeypatch.setattr(attendance, "MAX_STRANGER_BYTES", 5 * len(opening))
    lines = [entrance.say(opening) for _ in range(12)]
    assert all(map(is_let_go, lines[:6]))  # the oldest go first
    entrance.assert_serves()
    assert 0 < entrance.door.attendance.stranger_bytes <= 5 * len(opening)
    for line in lines:
        line.close()
    eventually(lambda: entrance.door.attendance.stranger_bytes == 0)


@pytest.mark.parametrize("page", ["/metrics", "/$Resources/queues?api-version=2021-05"])
def test_strangers_do_not_push_out_a_reader_with_a_token(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    for module in (attendance, door_module):
        monkeypatch.setattr(module, "MAX_STRANGERS", 8)
    entrance = enter()
    connection = http.client.HTTPConnection("127.0.0.1", entrance.door.port, timeout=SECONDS)
    with closing(connection):
        for _ in range(2):
            connection.request("GET", page, headers={"Authorization": entrance.token()})
            assert connection.getresponse().read()
            line = connection.sock
            for _ in range(40):
                entrance.say(b"")
            entrance.assert_serves()
        assert connection.sock is line  # the same connection answered twice


def test_readers_with_a_token_are_bounded_in_number(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "MAX_READERS", 8)
    entrance = enter()
    asked = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: {entrance.token()}\r\n\r\n"
    lines = []
    for _ in range(20):
        lines.append(entrance.say(asked.encode()))
        assert lines[-1].recv(15) == b"HTTP/1.1 200 OK"
    assert all(map(is_let_go, lines[:12]))
    assert len(entrance.door.attendance.readers) == 8


@pytest.mark.parametrize("page", ["/health", "/$Resources/queues?api-version=2021-05"])
def test_readers_of_another_key_do_not_push_out_a_manager(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setattr(attendance, "MAX_READERS", 8)
    entrance = enter()
    tenants = [
        entrance.key(name, Claim.SEND, Claim.LISTEN, path=QUEUE) for name in ("one", "two", "six")
    ]

    def read(key: SharedAccessKey) -> socket.socket:
        asked = f"GET {page} HTTP/1.1\r\nHost: x\r\nAuthorization: {entrance.token(key)}\r\n\r\n"
        line = entrance.say(asked.encode())
        assert line.recv(9) == b"HTTP/1.1 "
        return line

    lines = [read(key) for key in (ROOT, *tenants[:2])]
    greedy = [read(tenants[2]) for _ in range(20)]
    assert all(map(is_let_go, greedy[:15]))  # the key with the most readers loses them
    visitors = entrance.door.attendance.readers.values()
    assert [visitor.key for visitor in visitors][:3] == [ROOT.id, tenants[0].id, tenants[1].id]
    assert len(lines) == 3


def test_the_address_with_the_most_strangers_loses_them(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "MAX_STRANGERS", 8)
    entrance = enter()
    quiet = [entrance.say(MAGIC, source=source(number)) for number in range(3)]
    eventually(lambda: len(entrance.door.attendance.strangers) == 3)
    flood = [entrance.say(b"", source="127.0.0.9") for _ in range(40)]
    assert all(map(is_let_go, flood[:35]))
    addresses = [visitor.address for visitor in entrance.door.attendance.strangers.values()]
    assert addresses[:3] == [source(number) for number in range(3)]
    for line in quiet:
        line.sendall(hello(entrance.token())[len(MAGIC) :])
        assert line.recv(1)


def test_the_files_that_a_process_may_open_bound_its_clients(
    enter: Callable[..., Entrance],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("MAX_STRANGERS", "MAX_READERS"):
        for module in (attendance, door_module):
            monkeypatch.setattr(module, name, 8)
    files = RESERVED_DESCRIPTORS + 8 + 8 + 10
    monkeypatch.setattr(door_module, "_raise_descriptor_limit", lambda _: files)
    entrance = enter()
    assert entrance.door.attendance.max_connections == 10
    [line] = [
        record.getMessage() for record in caplog.records if "max_connections" in record.getMessage()
    ]
    assert f"may open {files} files only: the server admits 10 clients" in line
    key = entrance.key("greedy", Claim.SEND)
    refusals = [entrance.greet(key, source=source(number)) for number in range(12)]
    assert refusals[:8] == [None] * 8
    assert all(isinstance(error, ServerBusyError) for error in refusals[8:])
    assert entrance.greet(ROOT) is None


# -- shares ----------------------------------------------------------------------------------------


def source(number: int) -> str:
    """Return one of the addresses of this machine."""
    return f"127.0.0.{number % 5 + 2}"


def test_a_key_has_no_more_connections_than_its_share(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    greedy, second = entrance.key("greedy", Claim.SEND), entrance.key("other", Claim.SEND)
    for number in range(8):
        assert entrance.greet(greedy, source=source(number)) is None
    error = entrance.greet(greedy, source=source(9))
    assert isinstance(error, ServerBusyError)
    assert "key greedy has 8 connections" in error.text
    assert entrance.greet(second, source=source(9)) is None


def test_an_address_has_no_more_connections_than_its_share(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    keys = [entrance.key(f"key{number}", Claim.SEND) for number in range(9)]
    for key in keys[:8]:
        assert entrance.greet(key, source=source(0)) is None
    error = entrance.greet(keys[8], source=source(0))
    assert isinstance(error, ServerBusyError)
    assert f"the address {source(0)} has 8 connections" in error.text
    assert entrance.greet(keys[8], source=source(1)) is None


def test_keys_that_manage_the_namespace_have_a_reserve(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    keys = [entrance.key(f"key{number}", Claim.SEND) for number in range(5)]
    local = entrance.key("local", Claim.MANAGE, path=QUEUE)
    for number in range(9):
        assert entrance.greet(keys[number % 4], source=source(number)) is None
    for key in (keys[4], local):
        error = entrance.greet(key, source=source(0))
        assert isinstance(error, ServerBusyError)
        assert "reserved" in error.text
    assert entrance.greet(ROOT) is None
    assert isinstance(entrance.greet(ROOT), ServerBusyError)


def test_a_connection_that_ends_gives_its_place_back(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=2)
    key = entrance.key("key", Claim.SEND)
    for _ in range(5):
        exchange = entrance.connect(key)
        assert exchange.frame()[0][0] == FrameKind.WELCOME
        assert isinstance(entrance.greet(key), ServerBusyError)
        exchange.cancel()
        eventually(lambda: entrance.door.connections == 0)


def test_a_connection_keeps_the_key_that_it_came_with(enter: Callable[..., Entrance]) -> None:
    entrance = enter(max_connections=10)
    first, second = entrance.key("first", Claim.LISTEN), entrance.key("second", Claim.LISTEN)
    for _ in range(3):
        exchange = entrance.connect(first)
        exchange.write(framed([FrameKind.TOKEN, entrance.token(second)]))
        assert isinstance(exchange.reply()[1], UnauthorizedError)
        exchange.cancel()
        eventually(lambda: entrance.door.connections == 0)
    assert not entrance.door.attendance.by_key
    assert not entrance.door.attendance.by_address


# -- slow and greedy clients -----------------------------------------------------------------------


def conversation_of(entrance: Entrance, key: SharedAccessKey) -> Any:
    [found] = [
        client.conversation
        for client in list(entrance.door.attendance.clients)
        if isinstance(client, NativeConnection) and client.admitted and client.admitted.id == key.id
    ]
    return found


def unread_of(entrance: Entrance, key: SharedAccessKey) -> list[int]:
    """Return how many bytes of replies the connections of a key have not read."""
    return [
        client.conversation.unread_bytes
        for client in list(entrance.door.attendance.clients)
        if isinstance(client, NativeConnection) and client.admitted and client.admitted.id == key.id
    ]


def write_until_full(line: socket.socket, frames: Iterator[bytes]) -> int:
    """Write frames until the server reads no further; return how many bytes it took."""
    line.settimeout(1)
    taken = 0
    for frame in frames:
        view = memoryview(frame)
        try:
            while view:
                sent = line.send(view)
                taken += sent
                view = view[sent:]
        except TimeoutError:
            return taken
        except OSError:
            return taken
    return taken


def fill(entrance: Entrance) -> None:
    """Put 12 MB into a queue."""
    for _ in range(4):
        entrance.namespace.ask(Send(LARGE, [BrokeredMessage(bytes(250_000))] * 12))


def test_replies_that_a_client_does_not_read_are_bounded(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    lazy = entrance.key("lazy", Claim.LISTEN)
    fill(entrance)
    exchange = entrance.connect(lazy)
    assert exchange.frame()[0][0] == FrameKind.WELCOME
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 200))
    eventually(lambda: conversation_of(entrance, lazy).unread_bytes > 1_000_000)
    for _ in range(5):
        entrance.assert_serves()
        assert conversation_of(entrance, lazy).unread_bytes <= MAX_UNREAD_BYTES
    assert len(exchange.all_replies(200)) == 200  # when it reads, it gets them all


@pytest.mark.parametrize("opening", [b"", framed([FrameKind.GOODBYE, "", "", {}]), framed([99])])
def test_a_client_that_never_reads_is_let_go(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch, opening: bytes
) -> None:
    for module in (server_conversation, client_connection):
        monkeypatch.setattr(module, "QUIET_US", SECOND_US // 5)
    entrance = enter()
    fill(entrance)
    exchange = entrance.connect(entrance.key("lazy", Claim.LISTEN))
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 5), opening)
    entrance.assert_serves()
    eventually(lambda: entrance.door.connections == 0)


def test_replies_that_connections_of_one_key_do_not_read_share_a_bound(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 3 * MAX_RECEIVE_BYTES
    monkeypatch.setattr(attendance, "MAX_KEY_REPLY_BYTES", bound)
    monkeypatch.setattr(door_module, "DOOR_TICK_S", 60)  # no tick helps a connection that waits
    entrance = enter()
    lazy, second = entrance.key("lazy", Claim.LISTEN), entrance.key("other", Claim.LISTEN)
    fill(entrance)
    exchanges = [entrance.connect(lazy) for _ in range(8)]
    for exchange in exchanges:
        exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 3))
    replies = entrance.door.attendance.replies
    eventually(lambda: len(entrance.door.attendance.crowded.get(lazy.id, ())) > 2)
    for _ in range(3):
        entrance.assert_serves()
        with entrance.connect(second) as served:
            assert served.answer(frames_of(Peek(LARGE, 0, 1000)))[1].num_rows == 48
        assert replies.by_key[lazy.id] <= bound
        assert sum(unread_of(entrance, lazy)) <= bound
    for exchange in exchanges:  # when they read, they get them all
        assert [number for number, _ in exchange.all_replies(3)] == [1, 2, 3]
        exchange.cancel()
    eventually(lambda: not replies.total)
    assert not entrance.door.attendance.crowded


def test_a_client_that_reads_a_little_now_and_then_is_let_go(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "QUIET_US", SECOND_US // 2)
    monkeypatch.setattr(client_connection, "MIN_READ_BYTES", 2**40)
    entrance = enter()
    fill(entrance)
    exchange = entrance.connect(entrance.key("lazy", Claim.LISTEN))
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 30))
    with suppress(ConnectionResetError):
        while exchange.line.recv(65_536):
            time.sleep(0.01)  # 6 MB a second: far from all of it
    eventually(lambda: entrance.door.connections == 0)


def test_a_flood_of_requests_leaves_others_served(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    greedy = entrance.key("greedy", Claim.LISTEN)
    exchange = entrance.connect(greedy)
    poll = {"$": "Receive", "path": QUEUE, "wait": {"$": "timedelta", "us": 10**9}}
    exchange.write(*(asking(poll, number=number) for number in range(1, MAX_OPEN_REQUESTS + 5000)))
    for _ in range(3):
        entrance.assert_serves()
    conversation = conversation_of(entrance, greedy)
    assert len(conversation._open) + len(conversation._deferred) <= 2 * MAX_OPEN_REQUESTS


def test_a_flood_of_long_requests_is_read_no_further_than_its_bound(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_conversation, "MAX_UNANSWERED_BYTES", 4_000_000)
    entrance = enter()
    greedy = entrance.key("greedy", Claim.LISTEN)
    fill(entrance)
    exchange = entrance.connect(greedy)
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 10))  # which it does not read
    long = {"$": "numbers", "at": 0, "size": 8 * MAX_BATCH_MESSAGES}
    plain = {"$": "ReceiveDeferred", "path": LARGE, "sequence_numbers": long}
    blob = bytes(8 * MAX_BATCH_MESSAGES)
    frames = (asking(plain, number=number, blobs=blob) for number in range(11, 211))
    assert write_until_full(exchange.line, frames) < 40_000_000  # of 160 MB; sockets hold some
    entrance.assert_serves()


def test_connections_of_one_key_that_send_much_are_read_no_further_than_their_bound(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "MAX_KEY_REQUEST_BYTES", 4_000_000)
    entrance = enter()
    greedy = entrance.key("greedy", Claim.LISTEN)
    fill(entrance)
    long = {"$": "numbers", "at": 0, "size": 8 * MAX_BATCH_MESSAGES}
    plain = {"$": "ReceiveDeferred", "path": LARGE, "sequence_numbers": long}
    blob = bytes(8 * MAX_BATCH_MESSAGES)
    exchanges = [entrance.connect(greedy) for _ in range(4)]
    for exchange in exchanges:
        exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 10))  # which it does not read
        frames = (asking(plain, number=number, blobs=blob) for number in range(11, 61))
        write_until_full(exchange.line, frames)
    requests = entrance.door.attendance.requests
    assert requests.by_key[greedy.id] <= 4_000_000 + len(exchanges) * len(blob) * 2
    entrance.assert_serves()
    for exchange in exchanges:
        exchange.cancel()
    eventually(lambda: not requests.total)


# -- keys and tokens of those who wait -------------------------------------------------------------


def parked(entrance: Entrance, key: SharedAccessKey, **options: Any) -> Exchange:
    """Return a connection whose receive waits at the broker."""
    exchange = entrance.connect(key, **options)
    exchange.write(frames_of(POLL))
    eventually(lambda: entrance.namespace.snapshot().open_receives == 1)
    return exchange


def test_a_parked_receive_ends_when_its_key_is_deleted(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    exchange = parked(entrance, entrance.key("key", Claim.LISTEN))
    with entrance.client() as client:
        client.ask(DeleteKey("key"))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)
    assert entrance.namespace.snapshot().open_receives == 0


def test_a_parked_receive_ends_when_its_secret_is_replaced(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    exchange = parked(entrance, key)
    entrance.namespace.ask(PutKey(replace(key, primary="another secret for those who know")))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)


def test_a_parked_receive_ends_when_its_claim_is_taken_away(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN, Claim.SEND)
    exchange = parked(entrance, key)
    entrance.namespace.ask(PutKey(replace(key, claims=(Claim.SEND,))))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)


def test_a_parked_receive_ends_when_its_token_expires(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_conversation, "TOKEN_GRACE_US", SECOND_US // 10)
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    exchange = parked(entrance, key, token=entrance.token(key, lives_s=60))
    entrance.clock.advance(timedelta(seconds=61))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)
    assert entrance.namespace.snapshot().open_receives == 0


def test_a_parked_receive_goes_on_when_its_token_is_renewed(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_conversation, "TOKEN_GRACE_US", SECOND_US // 10)
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    exchange = parked(entrance, key, token=entrance.token(key, lives_s=60))
    exchange.write(framed([FrameKind.TOKEN, entrance.token(key)]), framed([FrameKind.PING]))
    while exchange.frame()[0][0] != FrameKind.PONG:
        pass
    entrance.clock.advance(timedelta(seconds=61))
    time.sleep(0.3)  # several ticks, and longer than the grace
    entrance.namespace.ask(Send(QUEUE, [BrokeredMessage(b"tea")]))
    number, batch = exchange.reply()
    assert (number, batch.num_rows) == (1, 1)


def test_requests_that_wait_for_credit_do_nothing_after_their_key_was_deleted(
    enter: Callable[..., Entrance],
) -> None:
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    fill(entrance)
    exchange = entrance.connect(key)
    assert exchange.frame()[0][0] == FrameKind.WELCOME
    take = Receive(LARGE, 1, mode=ReceiveMode.RECEIVE_AND_DELETE)
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 20, *[take] * 5))
    eventually(lambda: 25 in conversation_of(entrance, key)._deferred)
    entrance.namespace.ask(DeleteKey("key"))
    replies = dict(exchange.all_replies(25))
    assert {type(replies[number]) for number in range(20, 26)} == {UnauthorizedError}
    assert entrance.namespace.ask(GetRuntimeProperties(LARGE)).active_message_count == 48


# -- health and metrics ----------------------------------------------------------------------------


def test_metrics_are_for_readers_on_this_machine_that_name_it(
    enter: Callable[..., Entrance],
) -> None:
    entrance = enter()
    assert entrance.get("/metrics")[0] == 200
    for host in ("localhost", "localhost:80", "127.0.0.1", "[::1]:99", "127.8.9.1"):
        assert entrance.get("/metrics", Host=host)[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "["):
        status, text = entrance.get("/metrics", Host=host)
        assert status == 401, host
        assert QUEUE not in text


def test_metrics_need_a_token_that_manages_the_namespace(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    sender = entrance.key("sender", Claim.SEND)
    local = entrance.key("local", Claim.MANAGE, path=QUEUE)
    evil = "evil.example"
    good = entrance.token(ROOT)
    assert entrance.get("/metrics", Host=evil, Authorization=good)[0] == 200
    for token in (entrance.token(sender), entrance.token(local), "nonsense", good[:-3]):
        assert entrance.get("/metrics", Host=evil, Authorization=token)[0] == 401
        assert entrance.get("/metrics", Authorization=token)[0] == 401


def test_a_reader_of_another_machine_is_not_trusted_for_its_host_header(
    enter: Callable[..., Entrance],
) -> None:
    pages = enter().door._web
    assert pages is not None

    def asked_from(address: str) -> Request:
        headers = [(b"host", b"localhost")]
        return Request({"type": "http", "headers": headers, "client": (address, 1)})

    assert pages._is_trusted(asked_from("127.0.0.1"))
    for address in ("10.0.0.1", "192.168.1.7", "::ffff:10.0.0.1"):
        assert not pages._is_trusted(asked_from(address))


def test_others_hear_whether_the_server_works_and_not_why(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    status, text = entrance.get("/health", Host="evil.example")
    assert (status, json.loads(text)) == (200, {"status": "ok", "name": "shop"})
    assert json.loads(entrance.get("/health")[1])["restarts"] == 0
    status, text = entrance.get("/ready", Host="evil.example")
    assert (status, json.loads(text)) == (200, {"ready": True, "name": "shop"})


@pytest.mark.parametrize("page", ["/health", "/ready", "/metrics"])
def test_head_answers_like_get_without_a_body(enter: Callable[..., Entrance], page: str) -> None:
    entrance = enter()
    assert entrance.get(page, "HEAD") == (200, "")


def test_another_address_serves_health_and_metrics_alone(enter: Callable[..., Entrance]) -> None:
    entrance = enter(admin=("127.0.0.1", 0))
    port = entrance.door.admin_port
    assert port != entrance.door.port
    for page in ("/health", "/ready", "/metrics"):
        assert entrance.get(page, port=port)[0] == 200
        assert entrance.get(page)[0] == 200
    with Exchange(port, entrance.token()) as exchange:
        assert is_let_go(exchange.line)
    entrance.assert_serves()


def test_the_command_line_names_the_other_address(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start(ORDERS, "--admin-host", "127.0.0.3")
    try:
        connection = http.client.HTTPConnection("127.0.0.3", server.admin_port, timeout=10)
        with closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
    finally:
        server.stop()
