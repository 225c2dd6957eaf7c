"""What attackers use: connections that can write anything, frames by hand, a proxy that spoils."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from tests.soak.server_process import Footprint, ServerProcess
from twinbus import MessagingFactory, NamespaceManager, RetryPolicy
from twinbus.connection import ConnectionString, sign_token, token_for
from twinbus.errors import MessagingError
from twinbus.limits import FIRST_WIRE_VERSION, WIRE_VERSION
from twinbus.message import BrokeredMessage, to_batch
from twinbus.protocol import frame_values, frames
from twinbus.protocol.commands import Command
from twinbus.protocol.frames import MAGIC, FrameKind, FrameReader
from twinbus.protocol.table import ROWS
from twinbus.protocol.wire import decode_error, decode_value, encode_ask

ONCE = RetryPolicy.once(timedelta(seconds=30))
DEADLINE_S = 30.0  # a server that never answers is detected after this time
QUEUE, POISON, LARGE = "orders", "poison", "large"
SEND = {"$": "Send", "path": QUEUE, "origin": None}
HANG_UP = 0  # stands for the request id of a goodbye, which has none
BROKEN = (OSError,)
_CALM_KB = 1024  # a server that gives back less is done with it
_CALM_LOOKS = 15  # in a row, 0.2 s apart
_COMMANDS = {row.kind: row.command for row in ROWS}


def good_token(connection: ConnectionString) -> str:
    return token_for(connection, int(time.time()) + 600)


def signed(connection: ConnectionString, path: str = "", *, expires_in_s: int = 600) -> str:
    """Return a token under the root key for any resource."""
    when = int(time.time()) + expires_in_s
    return sign_token(path, connection.key_name, connection.key, when)


# -- frames by hand --------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    """Return a value as MessagePack; a text may have halves of characters."""
    if isinstance(value, str):
        text = value.encode(errors="surrogatepass")
        return b"\xdb" + struct.pack(">I", len(text)) + text
    if isinstance(value, list | tuple):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
    if isinstance(value, dict):
        items = [packed(part) for item in value.items() for part in item]
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(items)
    return frames.pack_head(value)


def framed(head: Any, body: bytes = b"") -> bytes:
    """Return a frame; a head that is bytes goes as it is."""
    text = head if isinstance(head, bytes) else packed(head)
    start = struct.pack("<II", len(text), len(body)) + text
    return start + bytes(-len(start) % 8) + body


def hello(
    token: Any, namespace_id: Any = "", first: Any = FIRST_WIRE_VERSION, last: Any = WIRE_VERSION
) -> bytes:
    """Return what a client says first."""
    return MAGIC + framed([FrameKind.HELLO, first, last, token, namespace_id])


def head_of(plain: Any, number: Any = 1) -> list[Any]:
    """Return the head that asks for a command, given as a mapping of its fields."""
    if not isinstance(plain, dict) or "$" not in plain:
        return [FrameKind.ASK, number, plain]
    name = plain["$"]
    given = {field: value for field, value in plain.items() if field != "$"}
    if not isinstance(name, str) or name not in _COMMANDS:
        return [FrameKind.ASK, number, name, *given.values()]
    values = []
    for field_ in fields(_COMMANDS[name]):  # type: ignore[arg-type]
        if field_.name in given:
            values.append(given.pop(field_.name))
        elif field_.default is MISSING:
            break
        else:
            values.append(frame_values.ValueEncoder().dump(field_.default))
    return [FrameKind.ASK, number, name, *values, *given.values()]


def asking(
    plain: Any, batch: pa.RecordBatch | None = None, *, number: Any = 1, blobs: bytes = b""
) -> bytes:
    """Return the frame that asks for a command; the messages of a send travel as columns."""
    if batch is not None:
        blobs = bytes(batch.serialize())
        plain = {**plain, "messages": {"$": "columns", "at": 0, "size": len(blobs)}}
    return framed(head_of(plain, number), blobs)


def frames_of(*commands: Command[Any]) -> bytes:
    """Return the frames of whole commands, numbered from 1."""
    pieces = [piece for at, command in enumerate(commands, 1) for piece in encode_ask(at, command)]
    return b"".join(map(bytes, pieces))


def batch_of(count: int, size: int = 10) -> pa.RecordBatch:
    return to_batch([BrokeredMessage(bytes(size)) for _ in range(count)])


class Exchange:
    """One connection to a server, without the client's manners."""

    def __init__(
        self, port: int, token: Any, *, greeting: bytes | None = None, source: str = "127.0.0.1"
    ) -> None:
        self.line = socket.create_connection(
            ("127.0.0.1", port), timeout=DEADLINE_S, source_address=(source, 0)
        )
        self._reader = FrameReader()
        self._arrived: list[tuple[list[Any], memoryview]] = []
        self.asked = 0  # the request id of the last ask
        self.write(hello(token) if greeting is None else greeting)

    def write(self, *sent: bytes) -> None:
        """Write; the server may have hung up already, which the next read then shows."""
        with contextlib.suppress(OSError):
            self.line.sendall(b"".join(sent))

    def frame(self) -> tuple[list[Any], memoryview]:
        """Return the next frame; raise OSError when the server hangs up."""
        while not self._arrived:
            data = self.line.recv(262_144)
            if not data:
                raise ConnectionResetError("the server hung up")
            self._arrived += self._reader.feed(data)
        return self._arrived.pop(0)

    def reply(self) -> tuple[int, Any]:
        """Return the next reply, or why the server ended the connection."""
        while True:
            head, body = self.frame()
            if head[0] == FrameKind.REPLY:
                return head[1], decode_value(head[2], body)
            if head[0] == FrameKind.REFUSAL:
                return head[1], decode_error(head[2:])
            if head[0] == FrameKind.GOODBYE:
                return HANG_UP, decode_error(head[1:])
            if head[0] == FrameKind.PING:
                self.write(framed([FrameKind.PONG]))

    def all_replies(self, count: int) -> list[tuple[int, Any]]:
        """Return so many replies, or those until the server hangs up."""
        found: list[tuple[int, Any]] = []
        while len(found) < count and HANG_UP not in dict(found[-1:]):
            found.append(self.reply())
        return found

    def answer(self, *sent: bytes) -> tuple[int, Any]:
        """Write and return the first reply."""
        self.write(*sent)
        return self.reply()

    def ask(self, plain: Any, batch: pa.RecordBatch | None = None, *, blobs: bytes = b"") -> Any:
        """Ask for one command and return its reply; the server must not hang up."""
        self.asked += 1
        number, value = self.answer(asking(plain, batch, number=self.asked, blobs=blobs))
        if number != self.asked:
            raise ConnectionAbortedError(f"request {self.asked} got {number}: {value!r:.200}")
        return value

    def cancel(self) -> None:
        """Hang up without a word."""
        self.line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


@dataclass
class Target:
    """A server under attack, and what it did wrong."""

    server: ServerProcess
    connection: ConnectionString
    generator: random.Random
    attack: str = ""
    findings: list[str] = field(default_factory=list)
    releases: list[Callable[[], None]] = field(default_factory=list)  # lets go of what stays open
    tokens: dict[str, str] = field(default_factory=dict)  # of keys with fewer claims
    asks: int = 0  # on the connection that stands
    _standing: "Exchange | None" = None

    def exchange(self, **options: Any) -> Exchange:
        port = options.pop("port", self.connection.port)
        token = options.pop("token", good_token(self.connection))
        return Exchange(port, token, **options)

    def find(self, what: str) -> None:
        """Note something wrong, once."""
        finding = f"{self.attack}: {what}"
        if finding not in self.findings:
            self.findings.append(finding)
            print(f"FOUND {finding}", flush=True)

    def expect(
        self,
        kind: type[MessagingError],
        text: bytes,
        *,
        what: str,
        **options: Any,
    ) -> None:
        """Write on a new connection: the server must answer with this kind of error."""
        with self.exchange(**options) as exchange:
            try:
                _, value = exchange.answer(text)
            except BROKEN as error:
                self.find(f"{what}: expected {kind.__name__}, got {short(error)}")
                return
            if not isinstance(value, kind):
                self.find(f"{what}: expected {kind.__name__}, got {value!r:.150}")

    def stand(self) -> Exchange:
        """Return a connection that is used for many asks; `asks` counts them."""
        if self._standing is None:
            self._standing, self.asks = self.exchange(), 0
        self.asks += 1
        return self._standing

    def let_go(self) -> Footprint:
        """Let go of everything; measure the server when it has noticed.

        A second without large requests passes before it returns free memory: wait for three.
        """
        self.stand_anew()
        while self.releases:
            self.releases.pop()()
        before, calm = self.server.footprint(), 0
        for _ in range(100):
            time.sleep(0.2)
            now = self.server.footprint()
            calm += 1
            if (
                now.descriptors < before.descriptors
                or now.threads < before.threads
                or now.memory_kb < before.memory_kb - _CALM_KB
            ):
                calm = 0
            before = now
            if calm == _CALM_LOOKS:
                break
        return before

    def stand_anew(self) -> None:
        """Leave the connection that stands."""
        if self._standing is not None:
            self._standing.cancel()
            self._standing = None

    def drain(self, path: str, what: str) -> None:
        """Browse, receive and complete what a queue holds, as any application would."""
        text = self.connection.to_text()
        with MessagingFactory.from_connection_string(text, retry_policy=ONCE) as factory:
            try:
                client = factory.create_queue_client(path)
                client.peek(0, 1000)
                while messages := client.receive_batch(1000, timedelta(0)):
                    client.complete(messages)
            except Exception as error:  # noqa: BLE001 - whatever an application would meet
                self.find(f"{what}: whoever receives from {path} meets {short(error)}")
                self.renew(path.partition("/")[0])

    def renew(self, *paths: str) -> None:
        """Make queues anew: what an attack left in them is not the next one's trouble."""
        text = self.connection.to_text()
        manager = NamespaceManager.from_connection_string(text, retry_policy=ONCE)
        with manager:
            for path in paths:
                if manager.queue_exists(path):
                    manager.delete_queue(path)
                manager.create_queue(path)


def short(error: BaseException) -> str:
    text = str(error).partition("; a report is")[0]
    return f"{type(error).__name__}({text:.120})"


@contextlib.contextmanager
def spoiling_proxy(port: int, spoil: Callable[[bytes, int], bytes | None]) -> Iterator[int]:
    """Stand between a client and a server; `spoil` gets what the client says and how much it said.

    It gives back what goes on to the server; None cuts the line.
    """
    lines: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_relay, args=(listener, port, spoil, lines), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            _cut(listener, *lines)
            thread.join()


def _cut(*lines: socket.socket) -> None:
    for line in lines:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


def _relay(
    listener: socket.socket,
    port: int,
    spoil: Callable[[bytes, int], bytes | None],
    lines: list[socket.socket],
) -> None:
    with contextlib.suppress(OSError):
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            lines += [client, server]
            back = threading.Thread(target=_copy_back, args=(server, client), daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                output = 0
                while chunk := client.recv(65536):
                    spoilt = spoil(chunk, output)
                    output += len(chunk)
                    if spoilt is None:
                        break
                    server.sendall(spoilt)
            _cut(client, server)
            back.join()


def _copy_back(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := server.recv(65536):
            client.sendall(chunk)
    _cut(client)
