r"""The door of a server: one event loop, one port, and the protocols behind it.

The first bytes of a connection select its protocol:

    TWINBUS\n       the native protocol (native.py)
    AMQP            AMQP 1.0 as the SDKs of Azure Service Bus speak it (amqp.py)
    0x16            TLS; the first bytes inside select one of the other protocols
    an HTTP verb    health, readiness and metrics (web.py), administration (administration.py),
                    AMQP in websockets (websocket.py)

The loop runs in a thread of its own and executes the turns of the broker (turns.py). A connection
without a verified token is a stranger: their number and their time are limited. Each key and each
address has a maximum share of the connections. Some connections are reserved for keys that manage
the namespace.

A private door (private.py) listens on a Unix socket, accepts only its own keys, and speaks only the
native protocol, so it does not need the packages for HTTP.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinbus.clock import Clock
from twinbus.connection import Token
from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    MessagingError,
    NamespaceClosedError,
    UnauthorizedError,
)
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import (
    ACCEPTS_PER_ROUND,
    AUTHENTICATION_US,
    DOOR_TICK_S,
    GRACE_S,
    LISTEN_BACKLOG,
    LOG_INTERVAL_US,
    LOGGED_KEY_NAMES,
    MAX_CONNECTIONS,
    MAX_READERS,
    MAX_STRANGERS,
    RESERVED_DESCRIPTORS,
    SECOND_US,
    SERVER_READ_BYTES,
)
from twinbus.loglines import LineRate, facts
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.access import AccessKeys, Admission
from twinbus.protocol.frames import MAGIC
from twinbus.protocol.keys import EMULATOR_SECRET, is_key_name
from twinbus.server.addresses import is_loopback
from twinbus.server.amqp import AMQP_MAGIC, ServiceBusConnection
from twinbus.server.attendance import Attendance
from twinbus.server.client_connection import ClientConnection, now_us
from twinbus.server.latencies import Latencies
from twinbus.server.memory import FreeMemory
from twinbus.server.native import NativeConnection
from twinbus.server.turns import CountingSelector, Turns

if TYPE_CHECKING:
    from twinbus.server.web import Web

_log = logging.getLogger("twinbus.server")
_TLS_RECORD = 0x16
WEBSOCKET = b"GET /$servicebus/websocket"
_HTTP_VERBS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ")
_LOCAL = "local"  # the address of every client of a Unix socket


@dataclass(frozen=True, slots=True)
class PrivateEntrance:
    """Where a private door listens, and which keys it accepts."""

    socket: Path  # the permissions of its folder decide who can connect
    keys: AccessKeys  # replace the keys of the namespace


class Door(Closable):
    """Serves a namespace at an address until it is closed."""

    def __init__(  # noqa: PLR0913 - an address and options; all have defaults
        self,
        namespace: EmbeddedNamespace,
        clock: Clock,
        *,
        name: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        admin: tuple[str, int] | None = None,  # a second address, for HTTP only
        tls: ssl.SSLContext | None = None,
        local_may_be_plain: bool = False,  # whether loopback clients may connect without TLS
        private: PrivateEntrance | None = None,  # replaces host, port, admin and tls
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.namespace = namespace
        self.keys = namespace.keys if private is None else private.keys
        self._speaks_amqp = private is None
        self.clock = clock
        self.latencies = Latencies()
        self.accepted = 0  # number of connections since the start
        self.refused = 0
        self.is_stopping = False
        self.turns: Turns
        self._tls = tls
        self._local_may_be_plain = local_may_be_plain
        self._refused_keys = LineRate(LOG_INTERVAL_US, LOGGED_KEY_NAMES)
        self._refused_connections = LineRate(LOG_INTERVAL_US)
        self.attendance = Attendance(max_connections, self._note_refused_connection)
        # Tasks that look for TLS, oldest first; with the socket until the task runs.
        self._arriving: dict[asyncio.Task[None], socket.socket | None] = {}
        self._replying: set[ClientConnection] = set()
        self._waking: set[str] = set()  # keys whose crowded connections are flushed soon
        self._keys_version = self.keys.version
        self._web = _web(namespace, self, name) if private is None else None
        listener = _listener(host, port) if private is None else _local_listener(private.socket)
        self._listeners = [listener]
        self.port: int = listener.getsockname()[1] if private is None else 0
        self.admin_port = self.port
        if admin is not None:
            try:
                self._listeners.append(_listener(*admin))
            except BaseException:
                self._listeners[0].close()
                raise
            self.admin_port = self._listeners[1].getsockname()[1]
        self._most_descriptors = max_connections  # a private door must not raise the process limit
        if private is None:
            self.limit_connections(max_connections)
        self.read_buffer = memoryview(bytearray(SERVER_READ_BYTES))  # shared by all connections
        self.moved_bytes = 0  # read and written since the last tick
        self._selector = CountingSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._stopped = asyncio.Event()
        self._all_disconnected = asyncio.Event()  # set when the last connection has ended
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[started], name="twinbus-door", daemon=True
        )
        self._thread.start()
        started.wait()
        self._stop_listening = clock.on_advance(self._on_advance)
        on_fork(self._after_fork)

    # -- the loop ------------------------------------------------------------------------------

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(started))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self.turns = Turns(self.namespace, self._selector, self._after_turn)
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)
        started.set()
        free_memory = FreeMemory(now_us())
        while not self.is_stopping:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), DOOR_TICK_S)
            self._tick()
            moved, self.moved_bytes = self.moved_bytes, 0
            free_memory.tick(now_us(), moved)
        await self._stop()

    def _on_advance(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        """Check connections for timeouts and expired tokens."""
        strangers = [
            stranger
            for stranger in self.attendance.strangers
            if isinstance(stranger, ClientConnection)
        ]
        for connection in [*self.attendance.clients, *strangers]:
            self.isolated(connection, connection.tick)

    def _after_turn(self) -> None:
        """Write the replies of a turn."""
        if self.keys.version != self._keys_version:
            self._keys_version = self.keys.version
            for connection in [*self.attendance.clients]:
                self.isolated(connection, connection.tick)
        replying, self._replying = self._replying, set()
        for connection in replying:
            self.isolated(connection, connection.flush)

    def isolated(self, connection: ClientConnection, work: Callable[[], object]) -> None:
        """Call `work` for a connection; if it raises, only this connection ends."""
        try:
            work()
        except Exception:  # noqa: BLE001 - an error in one connection must not stop the others
            _log.exception("A connection failed because of an internal error and is closed")
            connection.abort()

    @property
    def has_public_key(self) -> bool:
        """Whether a key has the secret of the official emulator, which is publicly known."""
        return any(EMULATOR_SECRET in (key.primary, key.secondary) for key in self.keys.all())

    def has_replies(self, connection: ClientConnection) -> None:
        """Note that a connection has replies to write after the turn."""
        self._replying.add(connection)

    def wake_crowded(self, key: str) -> None:
        """Flush connections of a key that wait until others have released bytes."""
        if key in self.attendance.crowded and key not in self._waking:
            self._waking.add(key)
            self._loop.call_soon(self._wake_crowded, key)

    def _wake_crowded(self, key: str) -> None:
        self._waking.discard(key)
        for connection in self.attendance.crowded_of(key):
            self.isolated(connection, connection.flush)

    # -- accepting -----------------------------------------------------------------------------

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
        """Pause accepting for a second, because the process has no file descriptors left."""
        self._note_refused_connection("the process has no file descriptors left")
        self._loop.remove_reader(listener)

        def resume() -> None:
            if not self.is_stopping:
                self._loop.add_reader(listener, self._accept, listener)

        self._loop.call_later(DOOR_TICK_S, resume)

    def _admit_socket(self, accepted: socket.socket, address: str, *, is_admin: bool) -> None:
        if len(self.attendance) >= self._most_descriptors:
            accepted.close()
            self._note_refused_connection("the process has few file descriptors left")
            return
        with suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        task = self._loop.create_task(self._begin(accepted, address, is_admin=is_admin))
        self._arriving[task] = accepted
        task.add_done_callback(self._arrived)
        self.attendance.note_arrival(task, address)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self.attendance.forget(task)
        never_begun = self._arriving.pop(task)
        if never_begun is not None:
            never_begun.close()

    async def _begin(self, accepted: socket.socket, address: str, *, is_admin: bool) -> None:
        """Detect TLS, and create the protocol that detects the rest."""
        task = asyncio.current_task()
        assert task is not None
        self._arriving[task] = None
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
        needs_tls = not is_tls and not self.may_be_plain(address)
        with suppress(OSError, ssl.SSLError):  # the client has disconnected
            await self._loop.connect_accepted_socket(
                lambda: _Sniffer(self, task, address, is_admin=is_admin, needs_tls=needs_tls),
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

    def may_be_plain(self, address: str) -> bool:
        """Return whether a client at this address may connect without TLS."""
        return self._tls is None or (self._local_may_be_plain and is_loopback(address))

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
            return NativeConnection(self, address, refusal=refusal)
        if self._speaks_amqp and first.startswith(AMQP_MAGIC) and not is_admin:
            return ServiceBusConnection(self, address, refusal=refusal)
        return None

    def may_become_known(self, first: bytes) -> bool:
        """Return whether the first bytes may be the beginning of a known protocol."""
        spoken = (MAGIC, AMQP_MAGIC, *_HTTP_VERBS, WEBSOCKET) if self._speaks_amqp else (MAGIC,)
        return any(known.startswith(first) for known in spoken)

    # -- connections ---------------------------------------------------------------------------

    def connection_ends(self, connection: ClientConnection) -> None:
        """Forget a connection of a client that has ended."""
        self.attendance.leave(connection)
        self._replying.discard(connection)
        if self.is_stopping and not self.attendance.clients:
            self._all_disconnected.set()

    def enter(self, connection: ClientConnection, admission: Admission) -> None:
        """Register a connection with a verified token, or raise why it is refused."""
        if self.is_stopping:
            raise _stopping()
        self.attendance.enter(connection, admission)
        self.accepted += 1
        _log.debug("A connection of key %s was opened", admission.key.name)

    def limit_connections(self, wanted: int) -> None:
        """Set the maximum of connections, as far as the process may open files for them.

        The files of strangers, readers, the log and the ledgers must fit as well.
        """
        visitors = MAX_STRANGERS + MAX_READERS
        files = _raise_descriptor_limit(wanted + visitors + RESERVED_DESCRIPTORS)
        self._most_descriptors = files - RESERVED_DESCRIPTORS
        possible = max(self._most_descriptors - visitors, 1)
        self.attendance.max_connections = min(wanted, possible)
        if wanted > possible:
            _log.warning(
                "max_connections is %d, but the process may open %d files only: the server admits "
                "%d clients. Raise the limit of open files to %d (LimitNOFILE, ulimit -n)",
                wanted,
                files,
                possible,
                wanted + visitors + RESERVED_DESCRIPTORS,
                extra=facts(
                    event="few_descriptors", wanted=wanted, admitted=possible, open_files=files
                ),
            )

    @property
    def clients(self) -> list[ClientConnection]:
        """The connections with a verified token; to be read in the loop's thread."""
        return [*self.attendance.clients]

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self.attendance.clients)

    # -- access --------------------------------------------------------------------------------

    def admit(self, token: str) -> Admission:
        """Verify a token."""
        try:
            return self.keys.admit(token, self.clock.wall_us())
        except UnauthorizedError as error:
            self.note_refused_key(_presented_name(token), error.text)
            raise

    def recheck(self, admission: Admission) -> Admission:
        """Verify that the key of an admission still exists and grants it."""
        return self.keys.recheck(admission, self.clock.wall_us())

    def note_refusal(self, admission: Admission | None, error: MessagingError) -> None:
        """Log the refusal of a connection or a request."""
        if admission is not None and isinstance(error, UnauthorizedError):
            self.note_refused_key(admission.key.name, error.text)
            return
        self.refused += 1
        if not isinstance(error, UnauthorizedError):
            self._note_refused_connection(error.text)

    def note_refused_key(self, name: str, reason: str) -> None:
        """Log the refusal of a key or token; at most one line per name and LOG_INTERVAL_US."""
        suppressed = self._refused_keys.admit(name, self.clock.now_us())
        if suppressed is not None:
            _log.warning(
                "A request with key %s was refused: %s. %d earlier refusals of this key were not "
                "logged",
                name,
                reason,
                suppressed,
                extra=facts(event="refused_key", key=name, reason=reason, suppressed=suppressed),
            )

    def _note_refused_connection(self, reason: str) -> None:
        suppressed = self._refused_connections.admit("", self.clock.now_us())
        if suppressed is not None:
            _log.warning(
                "A connection was refused: %s. %d earlier refusals were not logged",
                reason,
                suppressed,
                extra=facts(event="refused_connection", reason=reason, suppressed=suppressed),
            )

    def presentable(self, value: Any) -> Any:
        """Return a reply for clients: an error about the closed namespace becomes transient."""
        return _stopping() if isinstance(value, NamespaceClosedError) else value

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop accepting, notify every client, and stop; the namespace stays open."""
        if self.is_stopping:
            self._thread.join(2 * GRACE_S)
            return
        self.is_stopping = True
        self._stop_listening()
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._begin_to_stop)
        self._thread.join(2 * GRACE_S)

    def _begin_to_stop(self) -> None:
        self.is_stopping = True
        self._stopped.set()

    async def _stop(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for connection in [*self.attendance.clients]:
            connection.end(_stopping())
        for task in [*self._arriving]:
            task.cancel()
        for transport in self.attendance.transports():
            transport.abort()
        with suppress(TimeoutError):
            await asyncio.wait_for(
                self._all_disconnected.wait(), GRACE_S if self.attendance.clients else 0
            )
        for connection in [*self.attendance.clients]:
            connection.abort()
        if self._web is not None:
            await self._web.close()
        await asyncio.sleep(0)

    def _after_fork(self) -> None:
        """Detach from every socket in a forked process, because the parent still serves them.

        A harmless descriptor replaces each socket, so that closing it later has no effect.
        """
        self.is_stopping = True
        transports = self.attendance.transports()
        transports += [client.transport for client in self.attendance.clients]
        sockets: list[Any] = [*self._listeners, *filter(None, self._arriving.values())]
        sockets += [transport.get_extra_info("socket") for transport in transports]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for endpoint in sockets:
            if endpoint is not None and endpoint.fileno() >= 0:
                os.dup2(nothing, endpoint.fileno(), inheritable=False)
        os.close(nothing)


class _Sniffer(asyncio.Protocol):
    """Reads the first bytes of a connection and hands it to the protocol that they select."""

    def __init__(
        self,
        door: Door,
        arrival: "asyncio.Task[None]",
        address: str,
        *,
        is_admin: bool,
        needs_tls: bool,
    ) -> None:
        self._door = door
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
        self._door.attendance.forget(self._arrival)
        self._door.attendance.note_stranger(self, transport, self._address)
        seconds = AUTHENTICATION_US / SECOND_US
        self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Hand the connection over as soon as its protocol is known."""
        self._first += data
        protocol = self._door.protocol_for(
            self._first, self._address, is_admin=self._is_admin, needs_tls=self._needs_tls
        )
        if protocol is None:
            if not self._door.may_become_known(self._first):
                self._transport.abort()
            return
        self._leave()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if isinstance(protocol, ClientConnection):
            protocol.take(self._first)
        elif isinstance(protocol, asyncio.Protocol):
            protocol.data_received(self._first)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Unregister the connection."""
        self._leave()

    def _leave(self) -> None:
        self._door.attendance.forget(self)
        if self._timer is not None:
            self._timer.cancel()


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _local_listener(path: Path) -> socket.socket:
    """Return a Unix socket that listens at a path, which only this user may connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # must happen before it listens
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _web(namespace: EmbeddedNamespace, door: Door, name: str) -> "Web":
    """Return the HTTP application of a server."""
    from twinbus.server.web import Web  # noqa: PLC0415 - a private door must not need its packages

    return Web(namespace, door, name)


def _raise_descriptor_limit(wanted: int) -> int:
    """Raise the limit of open files as far as wanted and permitted; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return soft


def _presented_name(token: str) -> str:
    """Return the key name of a refused token for the log.

    A text that cannot be a key name is not logged, because it may be a secret in the wrong place.
    """
    try:
        name = Token.parse(token).key_name
    except UnauthorizedError:
        return "(malformed token)"
    return name if is_key_name(name) else "(not a key name)"


def _needs_tls() -> InvalidArgumentError:
    return InvalidArgumentError("this server requires TLS; use Endpoint=twinbus+tls://")


def _stopping() -> CommunicationError:
    return CommunicationError("the server is stopping; try again when it has restarted")
