"""Real sockets on the loopback interface around the machine, for peers that bring their own."""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import Event
from twinbus.amqp.options import ConnectionOptions
from twinbus.amqp.sasl import SaslClient, SaslServer

PATIENCE_S = 20.0


def now_us() -> int:
    return time.monotonic_ns() // 1000


def free_port() -> int:
    """Return a port on which nobody listens just now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


class LoopbackServer:
    """Serves AMQP in a thread: `act` is called with every event."""

    def __init__(
        self, act: Callable[[Event], None], mechanisms: Sequence[str], **options: Any
    ) -> None:
        self._act = act
        self._mechanisms = mechanisms
        self._options = ConnectionOptions("server", **options)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.failures: list[BaseException] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_stopping = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_stopping or len(selector.get_map()) > 1:  # clients hang up first
                for key, _ in selector.select(0.02):
                    if key.fileobj is self._listener:
                        accepted, _ = self._listener.accept()
                        sasl = SaslServer(self._mechanisms, lambda _: True)
                        connection = AmqpConnection(self._options, now_us(), sasl=sasl)
                        selector.register(accepted, selectors.EVENT_READ, connection)
                    else:
                        self._serve(selector, key.fileobj, key.data)

    def _serve(
        self, selector: selectors.BaseSelector, stream: Any, connection: AmqpConnection
    ) -> None:
        try:
            data = stream.recv(65536)
            for event in connection.receive(data, now_us()):
                self._act(event)
            stream.sendall(b"".join(connection.take_outgoing(now_us())))
        except OSError:
            self._lose(connection)
        except Exception as error:  # noqa: BLE001 - the test fails with it
            self.failures.append(error)
            self._lose(connection)
        if connection.is_done:
            selector.unregister(stream)
            stream.close()

    def _lose(self, connection: AmqpConnection) -> None:
        for event in connection.lose():
            self._act(event)


class LoopbackClient:
    """A client of ours on a blocking socket."""

    def __init__(self, port: int, sasl: SaslClient | None, **options: Any) -> None:
        made = ConnectionOptions("client", hostname="localhost", **options)
        self.connection = AmqpConnection(made, now_us(), sasl=sasl, is_client=True)
        self.events: list[Event] = []
        self._stream = socket.create_connection(("127.0.0.1", port), PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Write and read until something is reached."""
        self._stream.sendall(b"".join(self.connection.take_outgoing(now_us())))
        while not is_reached():
            self.events += self.connection.receive(self._stream.recv(65536), now_us())
            self._stream.sendall(b"".join(self.connection.take_outgoing(now_us())))
