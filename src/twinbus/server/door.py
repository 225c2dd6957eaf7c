r"""The door of a server: one event loop, one port, and the protocols behind it.

The first bytes of a connection say what it speaks:

    TWINBUS\n       the native protocol (native.py)
    AMQP            AMQP 1.0 as SDKs of Azure Service Bus speak it (amqp.py)
    0x16            TLS, and then one of the others inside
    an HTTP verb    health, readiness and metrics (web.py), administration (administration.py),
                    AMQP in websockets (websocket.py)

The loop runs in a thread of its own and owns the turn of the broker (turns.py). Strangers, those
who have not shown a token yet, are few and must hurry; keys and addresses have a share of the
connections, and keys that manage the namespace have a reserve.

A private door (private.py) listens on a socket in the file system, knows keys of its own only, and
speaks the native protocol alone: it needs none of the packages that web pages need.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import threading
from collections import Counter
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
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import (
    ACCEPTS_PER_ROUND,
    AUTHENTICATION_US,
    CONNECTION_SHARE,
    DOOR_TICK_S,
    GRACE_S,
    LISTEN_BACKLOG,
    LOG_INTERVAL_US,
    LOGGED_KEY_NAMES,
    MANAGE_RESERVE,
    MAX_CONNECTIONS,
    MAX_INCOMPLETE_BYTES,
    MAX_STRANGERS,
    RESERVED_DESCRIPTORS,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
    SERVER_READ_BYTES,
)
from twinbus.loglines import LineRate, facts
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.access import AccessKeys, Admission
from twinbus.protocol.keys import EMULATOR_SECRET, Claim, is_key_name
from twinbus.protocol.wire import MAGIC
from twinbus.server.addresses import is_loopback
from twinbus.server.amqp import AMQP_MAGIC, ServiceBusConnection
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
_LOCAL = "local"  # the address of every client of a socket in the file system


@dataclass(frozen=True, slots=True)
class PrivateEntrance:
    """What makes a door private."""

    socket: Path  # where it listens; its folder decides who gets there
    keys: AccessKeys  # in place of those of the namespace


class Door(Closable):
    """Serves a namespace at an address until it is closed."""

    def __init__(  # noqa: PLR0913 - an address, and what may come in; all have defaults
        self,
        namespace: EmbeddedNamespace,
        clock: Clock,
        *,
        name: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        admin: tuple[str, int] | None = None,  # another address for HTTP alone
        tls: ssl.SSLContext | None = None,
        local_may_be_plain: bool = False,  # whether clients of this machine may do without TLS
        private: PrivateEntrance | None = None,  # in place of host, port, admin and tls
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.namespace = namespace
        self.keys = namespace.keys if private is None else private.keys
        self._speaks_amqp = private is None
        self.clock = clock
        self.max_connections = max_connections
        self.latencies = Latencies()
        self.accepted = 0  # connections since the start
        self.refused = 0
        self.is_stopping = False
        self.turns: Turns
        self._tls = tls
        self._local_may_be_plain = local_may_be_plain
        self._refused_keys = LineRate(LOG_INTERVAL_US, LOGGED_KEY_NAMES)
        self._refused_connections = LineRate(LOG_INTERVAL_US)
        self._connections: set[ClientConnection] = set()  # that showed a good token
        self._strangers: dict[asyncio.BaseProtocol, asyncio.Transport] = {}  # oldest first
        # Not yet strangers, oldest first; with the socket while the task has not begun.
        self._arriving: dict[asyncio.Task[None], socket.socket | None] = {}
        self._by_key: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()
        self._incomplete: Counter[str] = Counter()  # bytes of unfinished frames, by key
        self._replying: set[ClientConnection] = set()
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
        self._most_descriptors = max_connections  # the limit of the process is the application's
        if private is None:
            self._most_descriptors = _raise_descriptor_limit() - RESERVED_DESCRIPTORS
        self.read_buffer = memoryview(bytearray(SERVER_READ_BYTES))  # of the connection being read
        self.moved_bytes = 0  # read and written since the last tick
        self._selector = CountingSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._stopped = asyncio.Event()
        self._deserted = asyncio.Event()  # the last connection has gone
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
        """Look for silent connections and for tokens that expired."""
        strangers = [one for one in self._strangers if isinstance(one, ClientConnection)]
        for connection in [*self._connections, *strangers]:
            try:
                connection.tick()
            except Exception:  # noqa: BLE001 - one connection must not stop the others
                _log.exception("a connection failed, and is ended")
                connection.abort()

    def _after_turn(self) -> None:
        """Write the replies of a turn."""
        if self.keys.version != self._keys_version:
            self._keys_version = self.keys.version
            for connection in [*self._connections]:
                self._alone(connection, connection.tick)
        replying, self._replying = self._replying, set()
        for connection in replying:
            self._alone(connection, connection.flush)

    def _alone(self, connection: ClientConnection, work: Callable[[], object]) -> None:
        """Do something for one connection; if it raises, only this connection ends."""
        try:
            work()
        except Exception:  # noqa: BLE001 - whatever it is, the others go on
            _log.exception("a connection failed and is closed")
            connection.abort()

    @property
    def has_public_key(self) -> bool:
        """Whether a key has the secret of the official emulator, which everybody knows."""
        return any(EMULATOR_SECRET in (key.primary, key.secondary) for key in self.keys.all())

    def has_replies(self, connection: ClientConnection) -> None:
        """Note that a connection has something to write when the turn is over."""
        self._replying.add(connection)

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
                self._rest(listener)
                return
            accepted.setblocking(False)
            address = str(peer[0]) if peer else _LOCAL
            self._admit_socket(accepted, address, is_admin=listener is not self._listeners[0])

    def _rest(self, listener: socket.socket) -> None:
        """Accept nothing for a second: the process has no descriptors left."""
        self._note_refused_connection("the process has no file descriptors left")
        self._loop.remove_reader(listener)

        def resume() -> None:
            if not self.is_stopping:
                self._loop.add_reader(listener, self._accept, listener)

        self._loop.call_later(DOOR_TICK_S, resume)

    def _admit_socket(self, accepted: socket.socket, address: str, *, is_admin: bool) -> None:
        if len(self._connections) + len(self._strangers) >= self._most_descriptors:
            accepted.close()
            self._note_refused_connection("the process has few file descriptors left")
            return
        with suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        task = self._loop.create_task(self._begin(accepted, address, is_admin=is_admin))
        self._arriving[task] = accepted
        task.add_done_callback(self._arrived)
        if len(self._arriving) > MAX_STRANGERS:
            next(iter(self._arriving)).cancel()
            self._note_refused_connection("too many connections have not said what they speak")

    def _arrived(self, task: asyncio.Task[None]) -> None:
        never_begun = self._arriving.pop(task)
        if never_begun is not None:
            never_begun.close()

    async def _begin(self, accepted: socket.socket, address: str, *, is_admin: bool) -> None:
        """Find out whether a connection speaks TLS, and give it a protocol that looks further."""
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
        with suppress(OSError, ssl.SSLError):  # the client is gone
            await self._loop.connect_accepted_socket(
                lambda: _Sniffer(self, address, is_admin=is_admin, needs_tls=needs_tls),
                accepted,
                **options,
            )

    async def _begins_with_tls(self, accepted: socket.socket) -> bool:
        """Look at the first byte of a connection, and leave it there."""
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
        """Whether a client at this address may do without TLS."""
        return self._tls is None or (self._local_may_be_plain and is_loopback(address))

    def protocol_for(
        self, first: bytes, address: str, *, is_admin: bool, needs_tls: bool
    ) -> asyncio.BaseProtocol | None:
        """Return the protocol that speaks what a connection begins with; None: nobody does."""
        refusal = _needs_tls() if needs_tls else None
        if self._web is not None and any(first.startswith(verb) for verb in _HTTP_VERBS):
            if WEBSOCKET.startswith(first):
                return None  # a websocket, or something else: the rest of the path will tell
            if first.startswith(WEBSOCKET) and not is_admin:
                return self._web.websocket(address, refusal)
            return self._web.protocol(self._loop)
        if first.startswith(MAGIC) and not is_admin:
            return NativeConnection(self, address, refusal=refusal)
        if self._speaks_amqp and first.startswith(AMQP_MAGIC) and not is_admin:
            return ServiceBusConnection(self, address, refusal=refusal)
        return None

    def begins_like_one(self, first: bytes) -> bool:
        """Whether a connection may still turn out to speak one of the protocols."""
        spoken = (MAGIC, AMQP_MAGIC, *_HTTP_VERBS, WEBSOCKET) if self._speaks_amqp else (MAGIC,)
        return any(known.startswith(first) for known in spoken)

    # -- connections ---------------------------------------------------------------------------

    def note_stranger(self, stranger: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        """Count a connection that has shown no token; the oldest goes when there are too many."""
        self._strangers[stranger] = transport
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).abort()
            self._note_refused_connection("too many connections have shown no token")

    def forget_stranger(self, stranger: asyncio.BaseProtocol) -> None:
        """Stop counting a connection that has shown a token, or is gone."""
        self._strangers.pop(stranger, None)

    def connection_begins(self, connection: ClientConnection) -> None:
        """Note a connection of the native protocol."""
        self.note_stranger(connection, connection.transport)

    def connection_ends(self, connection: ClientConnection) -> None:
        """Forget a connection."""
        self.forget_stranger(connection)
        self._replying.discard(connection)
        if connection in self._connections:
            self._connections.discard(connection)
            if self.is_stopping and not self._connections:
                self._deserted.set()
            admission = connection.admitted
            assert admission is not None  # it was let in
            self._count(self._by_key, admission.id, -1)
            self._count(self._by_address, connection.address, -1)

    def _count(self, counter: Counter[str], name: str, change: int) -> None:
        counter[name] += change
        if not counter[name]:
            del counter[name]

    def enter(self, connection: ClientConnection, admission: Admission) -> None:
        """Let a connection in that showed a good token, or raise why not."""
        self._check_room(connection, admission)
        self.forget_stranger(connection)
        self._connections.add(connection)
        self._by_key[admission.id] += 1
        self._by_address[connection.address] += 1
        self.accepted += 1
        _log.debug("a connection of key %s begins", admission.key.name)

    def _check_room(self, connection: ClientConnection, admission: Admission) -> None:
        if self.is_stopping:
            raise _stopping()
        most = self.max_connections
        if admission.may(Claim.MANAGE, None):
            if len(self._connections) >= most:
                raise _too_many(f"the server has {most} connections and takes no more")
            return
        share = max(int(most * CONNECTION_SHARE), 1)
        if len(self._connections) >= max(int(most * (1 - MANAGE_RESERVE)), 1):
            raise _too_many(
                f"the server has {len(self._connections)} connections, and the rest of {most} is "
                "reserved for keys that manage it"
            )
        if self._by_key[admission.id] >= share:
            raise _too_many(f"key {admission.key.name} has {share} connections, its share")
        if self._by_address[connection.address] >= share:
            raise _too_many(f"the address {connection.address} has {share} connections, its share")

    def note_incomplete(self, admission: Admission, change: int) -> None:
        """Count bytes of unfinished frames; raise when a key has too many of them in memory."""
        self._count(self._incomplete, admission.id, change)
        if change > 0 and self._incomplete[admission.id] > MAX_INCOMPLETE_BYTES:
            raise _too_many(
                f"connections of key {admission.key.name} hold {MAX_INCOMPLETE_BYTES} bytes of "
                "requests that are not complete"
            )

    @property
    def clients(self) -> list[ClientConnection]:
        """The connections of clients that showed a good token; for the loop's thread."""
        return [*self._connections]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    # -- who may ------------------------------------------------------------------------------

    def admit(self, token: str) -> Admission:
        """Check a token."""
        try:
            return self.keys.admit(token, self.clock.wall_us())
        except UnauthorizedError as error:
            self.note_refused_key(_presented_name(token), error.text)
            raise

    def recheck(self, admission: Admission) -> Admission:
        """Check that an admission still holds."""
        return self.keys.recheck(admission, self.clock.wall_us())

    def note_refusal(self, admission: Admission | None, error: MessagingError) -> None:
        """Log that a connection or a request was refused."""
        if admission is not None and isinstance(error, UnauthorizedError):
            self.note_refused_key(admission.key.name, error.text)
            return
        self.refused += 1
        if not isinstance(error, UnauthorizedError):
            self._note_refused_connection(error.text)

    def note_refused_key(self, name: str, reason: str) -> None:
        """Log that a key or token was refused; one line per name and LOG_INTERVAL_US."""
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
        """Return a reply as clients shall see it: that this server stops is not their fault."""
        return _stopping() if isinstance(value, NamespaceClosedError) else value

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more, let every client know, and stop; the namespace stays open."""
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
        for connection in [*self._connections]:
            connection.end(_stopping())
        for task in [*self._arriving]:
            task.cancel()
        for transport in [*self._strangers.values()]:
            transport.abort()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._deserted.wait(), GRACE_S if self._connections else 0)
        for connection in [*self._connections]:
            connection.abort()
        if self._web is not None:
            await self._web.close()
        await asyncio.sleep(0)

    def _after_fork(self) -> None:
        """Let go of every socket in a forked process: the parent has the loop that serves them.

        Something harmless takes the place of each, so that to close it later does no harm either.
        """
        self.is_stopping = True
        transports = [*self._strangers.values(), *(one.transport for one in self._connections)]
        sockets: list[Any] = [*self._listeners, *filter(None, self._arriving.values())]
        sockets += [transport.get_extra_info("socket") for transport in transports]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for one in sockets:
            if one is not None and one.fileno() >= 0:
                os.dup2(nothing, one.fileno(), inheritable=False)
        os.close(nothing)


class _Sniffer(asyncio.Protocol):
    """Reads the first bytes of a connection and gives it to the protocol they belong to."""

    def __init__(self, door: Door, address: str, *, is_admin: bool, needs_tls: bool) -> None:
        self._door = door
        self._address = address
        self._is_admin = is_admin
        self._needs_tls = needs_tls
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first bytes."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._door.note_stranger(self, transport)
        seconds = AUTHENTICATION_US / SECOND_US
        self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Hand the connection over as soon as it is clear to whom."""
        self._first += data
        protocol = self._door.protocol_for(
            self._first, self._address, is_admin=self._is_admin, needs_tls=self._needs_tls
        )
        if protocol is None:
            if not self._door.begins_like_one(self._first):
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
        """Forget the connection."""
        self._leave()

    def _leave(self) -> None:
        self._door.forget_stranger(self)
        if self._timer is not None:
            self._timer.cancel()


def _listener(host: str, port: int) -> socket.socket:
    """Listen at an address."""
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
    """Listen at a socket in the file system that only this user may connect to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # before it listens
        listener.listen(LISTEN_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _web(namespace: EmbeddedNamespace, door: Door, name: str) -> "Web":
    """Return the web pages of a server."""
    from twinbus.server.web import Web  # noqa: PLC0415 - a private door does without its packages

    return Web(namespace, door, name)


def _raise_descriptor_limit() -> int:
    """Let the process open as many files as it may; return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 2 * RESERVED_DESCRIPTORS
    if soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return soft


def _presented_name(token: str) -> str:
    """Return the key name of a refused token for the log.

    A text that cannot be the name of a key is not shown: it may be a secret in the wrong place.
    """
    try:
        name = Token.parse(token).key_name
    except UnauthorizedError:
        return "(malformed token)"
    return name if is_key_name(name) else "(not a key name)"


def _needs_tls() -> InvalidArgumentError:
    return InvalidArgumentError("this server speaks TLS; use Endpoint=twinbus+tls://")


def _too_many(reason: str) -> ServerBusyError:
    return ServerBusyError(
        f"{reason}; wait {SERVER_BUSY_RETRY_S} s", retry_after_s=SERVER_BUSY_RETRY_S
    )


def _stopping() -> CommunicationError:
    return CommunicationError("the server is stopping; try again when it is back")
