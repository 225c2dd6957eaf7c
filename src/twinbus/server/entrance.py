r"""The entrance: accepts connections, and finds out by their first bytes which protocol they speak.

    TWINBUS\n       the native protocol (native.py)
    AMQP            AMQP 1.0 as the SDKs of Azure Service Bus speak it (amqp.py)
    0x16            TLS; the first bytes inside select one of the other protocols
    an HTTP verb    health, readiness and metrics (web.py), administration (administration.py),
                    AMQP in websockets (websocket.py)

A new connection is a stranger (attendance.py): the number of strangers is limited, and so is the
time until the protocol of a stranger is known. When the process has no file descriptors left, the
entrance accepts no connections for a second. The loop of the server runs all of this; `Door` opens
and closes it.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from twinbus.errors import InvalidArgumentError
from twinbus.limits import ACCEPTS_PER_ROUND, AUTHENTICATION_US, DOOR_TICK_S, SECOND_US
from twinbus.protocol.frames import MAGIC
from twinbus.server.amqp import AMQP_MAGIC, ServiceBusConnection
from twinbus.server.attendance import Attendance
from twinbus.server.client_connection import ClientConnection
from twinbus.server.native import NativeConnection

if TYPE_CHECKING:
    from twinbus.server.door import Door
    from twinbus.server.web import Web

_TLS_RECORD = 0x16
WEBSOCKET = b"GET /$servicebus/websocket"
_HTTP_VERBS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ")
_LOCAL = "local"  # the address of every client of a Unix socket


class Entrance:
    """Accepts the connections of a door, and creates their protocols."""

    def __init__(
        self,
        door: "Door",
        listeners: Sequence[socket.socket],  # the first is for all protocols, others for HTTP only
        tls: ssl.SSLContext | None,
        web: "Web | None",  # None: a private door, which speaks only the native protocol
        max_sockets: int,
    ) -> None:
        self._door = door
        self._listeners = listeners
        self._tls = tls
        self._web = web
        self.max_sockets = max_sockets  # how many connections of any kind may be open
        self._loop: asyncio.AbstractEventLoop
        self._arriving: dict[asyncio.Task[None], socket.socket] = {}  # tasks that detect TLS
        self._not_begun: set[asyncio.Task[None]] = set()  # which do not own their sockets yet

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to accept connections, in the thread of the loop."""
        self._loop = loop
        for listener in self._listeners:
            loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()

    def drop_arriving(self) -> None:
        """Cancel the tasks that detect TLS, which drops their connections."""
        for task in [*self._arriving]:
            task.cancel()

    def sockets(self) -> list[socket.socket]:
        """Return the listening sockets, and those of connections that are detecting TLS."""
        return [*self._listeners, *self._arriving.values()]

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._pause_accepting(listener)
                return
            accepted.setblocking(False)
            address = str(peer[0]) if peer else _LOCAL
            self._admit_socket(accepted, address, is_admin=listener is not self._listeners[0])

    def _pause_accepting(self, listener: socket.socket) -> None:
        """Pause accepting for a second: the system has no descriptor or no memory for a socket."""
        self._door.refusals.note_connection(
            "no file descriptor or memory is left for another socket. If this continues, raise the "
            "limit of open files (LimitNOFILE, ulimit -n)"
        )
        self._loop.remove_reader(listener)

        def resume() -> None:
            if not self._door.is_stopping:
                self._loop.add_reader(listener, self._accept, listener)

        self._loop.call_later(DOOR_TICK_S, resume)

    def _admit_socket(self, accepted: socket.socket, address: str, *, is_admin: bool) -> None:
        if len(self._door.attendance) >= self.max_sockets:
            accepted.close()
            self._door.refusals.note_connection(
                f"{self.max_sockets} connections are open, the maximum of this process. On a "
                "server, raise the limit of open files (LimitNOFILE, ulimit -n)"
            )
            return
        with suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        task = self._loop.create_task(self._begin(accepted, address, is_admin=is_admin))
        self._arriving[task] = accepted
        self._not_begun.add(task)
        task.add_done_callback(self._arrived)
        self._door.attendance.note_arrival(task, address)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._door.attendance.forget(task)
        accepted = self._arriving.pop(task)
        if task in self._not_begun:  # it was cancelled before it ran
            self._not_begun.remove(task)
            accepted.close()

    async def _begin(self, accepted: socket.socket, address: str, *, is_admin: bool) -> None:
        """Detect TLS, and create the protocol that detects the rest."""
        task = asyncio.current_task()
        assert task is not None
        self._not_begun.remove(task)
        is_tls = False
        try:
            if self._tls is not None:
                patience_s = AUTHENTICATION_US / SECOND_US
                is_tls = await asyncio.wait_for(self._begins_with_tls(accepted), patience_s)
        except BaseException as error:
            accepted.close()
            if isinstance(error, OSError | TimeoutError):
                return
            raise
        options: dict[str, Any] = {}
        if is_tls:
            options = {"ssl": self._tls, "ssl_handshake_timeout": AUTHENTICATION_US / SECOND_US}
        needs_tls = not is_tls and not self._door.may_be_plain(address)
        with suppress(OSError, ssl.SSLError):  # the client has disconnected
            await self._loop.connect_accepted_socket(
                lambda: _FirstBytes(
                    self,
                    self._door.attendance,
                    task,
                    address,
                    is_admin=is_admin,
                    needs_tls=needs_tls,
                ),
                accepted,
                **options,
            )

    async def _begins_with_tls(self, accepted: socket.socket) -> bool:
        """Peek at the first byte of a connection without consuming it."""
        readable = asyncio.Event()
        descriptor = accepted.fileno()
        self._loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(descriptor)
        first = accepted.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionResetError
        return first[0] == _TLS_RECORD

    def protocol_for(
        self, first: bytes, address: str, *, is_admin: bool, needs_tls: bool
    ) -> asyncio.BaseProtocol | None:
        """Return the protocol for the first bytes; None if they match none, or not yet."""
        refusal = _needs_tls() if needs_tls else None
        if self._web is not None and any(first.startswith(verb) for verb in _HTTP_VERBS):
            if WEBSOCKET.startswith(first):
                return None  # the rest of the path decides between a websocket and other requests
            if first.startswith(WEBSOCKET) and not is_admin:
                return self._web.websocket(address, refusal)
            return self._web.protocol(self._loop, address)
        if first.startswith(MAGIC) and not is_admin:
            return NativeConnection(self._door, address, refusal=refusal)
        if self._web is not None and first.startswith(AMQP_MAGIC) and not is_admin:
            return ServiceBusConnection(self._door, address, refusal=refusal)
        return None

    def may_become_known(self, first: bytes) -> bool:
        """Return whether the first bytes may be the beginning of a known protocol."""
        spoken = (MAGIC, AMQP_MAGIC, *_HTTP_VERBS, WEBSOCKET) if self._web is not None else (MAGIC,)
        return any(known.startswith(first) for known in spoken)


class _FirstBytes(asyncio.Protocol):
    """Reads the first bytes of a connection and hands it to the protocol that they select."""

    def __init__(
        self,
        entrance: Entrance,
        attendance: Attendance,
        arrival: "asyncio.Task[None]",
        address: str,
        *,
        is_admin: bool,
        needs_tls: bool,
    ) -> None:
        self._entrance = entrance
        self._attendance = attendance
        self._arrival = arrival
        self._address = address
        self._is_admin = is_admin
        self._needs_tls = needs_tls
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout for the first bytes."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._attendance.note_protocol(self._arrival, self, transport)
        seconds = AUTHENTICATION_US / SECOND_US
        self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Hand the connection over as soon as its protocol is known."""
        self._first += data
        protocol = self._entrance.protocol_for(
            self._first, self._address, is_admin=self._is_admin, needs_tls=self._needs_tls
        )
        if protocol is None:
            if not self._entrance.may_become_known(self._first):
                self._transport.abort()
            return
        self._attendance.hand_over(self, protocol)
        self._stop_timer()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if isinstance(protocol, ClientConnection):
            protocol.take(self._first)
        elif isinstance(protocol, asyncio.Protocol):
            protocol.data_received(self._first)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Unregister the connection."""
        self._attendance.forget(self)
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _needs_tls() -> InvalidArgumentError:
    return InvalidArgumentError(
        "this server requires TLS; use Endpoint=twinbus+tls://, or with an SDK of Service Bus a "
        "connection string without UseDevelopmentEmulator=true"
    )
