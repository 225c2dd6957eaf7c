"""A relay that cuts, silences or delays connections.

It cuts a connection at the first word of a client after the server has sent much. It silences
connections as a firewall or a NAT does: both ends stay connected, and nothing passes any more. It
delays the flow frame with which a server ends a drain. It may also play a proxy for HTTP.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_EMPTY_FRAME = bytes((0, 0, 0, 8, 2, 0, 0, 0))  # of AMQP
_FLOW = b"\0\x53\x13"  # the descriptor of a flow
_DELAY_S = 0.5  # for a client that waits for the flow


class CuttingRelay:
    """Passes bytes on between clients and a server on this machine, one pair of threads each."""

    def __init__(self, server_port: int, *, is_proxy: bool = False) -> None:
        self._server_port = server_port
        self._is_proxy = is_proxy  # clients ask it first to connect them
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._left: int | None = None  # bytes of the server until the next word is the last
        self.cuts = 0
        self.first_words: list[bytes] = []  # of clients, one for each connection
        self.keep_alives = 0  # empty frames of the server that came alone
        self.swallowed = threading.Event()  # a silenced connection has lost bytes
        self._delays_flow = False
        self._has_spoken = threading.Event()  # a client, since a flow was delayed
        self._silenced: set[socket.socket] = set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size: int) -> None:
        """Cut the connection at a client's first word after so many bytes of the server, once."""
        self._left = size

    def silence(self) -> None:
        """Swallow what either end of a connection that exists now sends; serve new connections."""
        self.swallowed.clear()
        self._silenced = set(self._sockets)

    def delay_flow(self) -> None:
        """Keep back the server's next flow until a client speaks, or for half a second."""
        self._delays_flow = True

    def close(self) -> None:
        for item in (self._listener, *self._sockets):
            item.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += client, server
                for source, target in ((client, server), (server, client)):
                    whence = (source, target, source is server)
                    threading.Thread(target=self._pass_on, args=whence, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_server: bool) -> None:
        is_first = not is_server
        with suppress(OSError):
            while data := source.recv(65_536):
                if is_first:
                    self.first_words.append(data)
                    is_first = False
                    if self._is_proxy:
                        source.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        continue
                self.keep_alives += is_server and data == _EMPTY_FRAME
                if source in self._silenced:
                    self.swallowed.set()
                    continue
                if self._left is not None and is_server:
                    self._left -= len(data)
                elif self._left is not None and self._left <= 0:
                    self._left = None
                    self.cuts += 1
                    break
                if is_server and self._delays_flow and _FLOW in data:
                    self._delays_flow = False
                    at = data.index(_FLOW) - 8  # its frame begins with a header
                    target.sendall(data[:at])
                    self._has_spoken.clear()
                    self._has_spoken.wait(_DELAY_S)
                    data = data[at:]
                target.sendall(data)
                if not is_server:
                    self._has_spoken.set()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_relay(server_port: int, *, is_proxy: bool = False) -> Iterator[CuttingRelay]:
    relay = CuttingRelay(server_port, is_proxy=is_proxy)
    try:
        yield relay
    finally:
        relay.close()
