"""What attackers use: exchanges that can write anything, frames by hand, a proxy that spoils."""

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from pyarrow import flight

from tests.soak.server_process import Footprint, ServerProcess
from twinbus import MessagingFactory, NamespaceManager, RetryPolicy
from twinbus.connection import ConnectionString, sign_token, token_for
from twinbus.errors import MessagingError
from twinbus.message import MESSAGE_SCHEMA, BrokeredMessage, to_batch
from twinbus.namespace.wire import HANG_UP, PROTOCOL, decode_replies

ONCE = RetryPolicy.once(timedelta(seconds=30))
DEADLINE_S = 30.0  # what never answers is found out by this
QUEUE, POISON, LARGE = "orders", "poison", "large"
SEND = {"$": "Send", "path": QUEUE, "origin": None}
BROKEN = (pa.ArrowException, OSError, StopIteration)


def good_token(connection: ConnectionString) -> str:
    return token_for(connection, int(time.time()) + 600)


def signed(connection: ConnectionString, path: str = "", *, expires_in_s: int = 600) -> str:
    """Return a token under the root key for any resource."""
    when = int(time.time()) + expires_in_s
    return sign_token(path, connection.key_name, connection.key, when)


def metadata(head: Any, blobs: bytes = b"") -> bytes:
    """Return the metadata of a frame; a head that is bytes goes as it is."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + blobs


def ask(plain: Any, rows: int = 0, number: int = 1) -> dict[str, Any]:
    """Return the head of one ask."""
    return {"asks": [[number, plain, rows]]}


def batch_of(count: int, size: int = 10) -> pa.RecordBatch:
    return to_batch([BrokeredMessage(bytes(size)) for _ in range(count)])


class Exchange:
    """One exchange with a server, without the client's manners."""

    def __init__(
        self,
        port: int,
        token: str | None,
        *,
        descriptor: flight.FlightDescriptor | None = None,
        schema: pa.Schema | None = MESSAGE_SCHEMA,
        compression: str | None = None,
    ) -> None:
        self.client = flight.FlightClient(
            f"grpc+tcp://127.0.0.1:{port}",
            generic_options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)],
        )
        headers = [] if token is None else [(b"authorization", token.encode())]
        self.writer, self.reader = self.client.do_exchange(
            descriptor or flight.FlightDescriptor.for_command(PROTOCOL),
            flight.FlightCallOptions(
                timeout=DEADLINE_S,
                headers=headers,
                write_options=pa.ipc.IpcWriteOptions(compression=compression),
            ),
        )
        if schema is not None:
            with contextlib.suppress(pa.ArrowException, OSError):  # the reading tells why
                self.writer.begin(schema)

    def write(self, about: bytes | None, batch: pa.RecordBatch | None = None) -> None:
        """Write a frame; the server may have hung up already, which the reading then tells."""
        with contextlib.suppress(pa.ArrowException, OSError):
            if batch is None:
                self.writer.write_metadata(about)
            elif about is None:
                self.writer.write_batch(batch)
            else:
                self.writer.write_with_metadata(batch, about)

    def replies(self) -> list[tuple[int, Any]]:
        """Return the replies of the next frame, or why the server ended the call."""
        try:
            chunk = self.reader.read_chunk()
            found = decode_replies(chunk.app_metadata, chunk.data)
        except flight.FlightError as error:
            if not error.extra_info:
                raise
            found = decode_replies(pa.py_buffer(error.extra_info), None)
        return [(reply.number, reply.value) for reply in found]

    def all_replies(self, count: int) -> list[tuple[int, Any]]:
        """Return so many replies, or those until the server hangs up."""
        found: list[tuple[int, Any]] = []
        while len(found) < count:
            found += self.replies()
            if any(number == HANG_UP for number, _ in found):
                break
        return found

    def answer(self, about: bytes | None, batch: pa.RecordBatch | None = None) -> tuple[int, Any]:
        """Write a frame and return its first reply."""
        self.write(about, batch)
        return self.all_replies(1)[0]

    def cancel(self) -> None:
        with contextlib.suppress(pa.ArrowException, OSError):
            self.reader.cancel()
        with contextlib.suppress(pa.ArrowException, OSError):
            self.writer.close()
        with contextlib.suppress(pa.ArrowException, OSError):
            self.client.close()

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
    held: list[Callable[[], None]] = field(default_factory=list)  # lets go of what stays open
    tokens: dict[str, str] = field(default_factory=dict)  # of keys with fewer claims
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
        about: bytes | None,
        batch: pa.RecordBatch | None = None,
        *,
        what: str,
        **options: Any,
    ) -> None:
        """Write one frame on a new exchange: the server must answer with this kind of error."""
        with self.exchange(**options) as exchange:
            try:
                _, value = exchange.answer(about, batch)
            except (pa.ArrowException, OSError, StopIteration) as error:
                self.find(f"{what}: expected {kind.__name__}, got {short(error)}")
                return
            if not isinstance(value, kind):
                self.find(f"{what}: expected {kind.__name__}, got {value!r:.150}")

    def standing(self) -> Exchange:
        """Return an exchange that is used for many asks."""
        if self._standing is None:
            self._standing = self.exchange()
        return self._standing

    def let_go(self) -> Footprint:
        """Let go of everything; measure the server when it has noticed."""
        self.stand_anew()
        while self.held:
            self.held.pop()()
        before = self.server.footprint()
        for _ in range(50):
            time.sleep(0.2)
            now = self.server.footprint()
            if now.descriptors >= before.descriptors and now.threads >= before.threads:
                return now
            before = now
        return before

    def stand_anew(self) -> None:
        """Leave the standing exchange."""
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
    text = str(error).partition(". gRPC client debug context")[0].partition("; a report is")[0]
    text = text.partition(" Detail: Python exception")[0]
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
                said = 0
                while chunk := client.recv(65536):
                    spoilt = spoil(chunk, said)
                    said += len(chunk)
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
