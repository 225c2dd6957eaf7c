"""The door of a server: its event loop, its listening sockets and its connections.

The loop runs in a thread of its own and executes the turns of the broker (turns.py). The entrance
(entrance.py) accepts connections and finds their protocol. A connection without a verified token
is a stranger; the number of strangers and the time of each are limited. Each key and each address
has a maximum share of the connections. Some connections are reserved for keys that manage the
namespace.

A private door (private.py) listens on a Unix socket, accepts only its own keys, and speaks only the
native protocol, so it does not need the packages for HTTP.
"""

import asyncio
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinbus.clock import Clock
from twinbus.errors import (
    CommunicationError,
    MessagingError,
    NamespaceClosedError,
    UnauthorizedError,
)
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import (
    DOOR_TICK_S,
    GRACE_S,
    MAX_CONNECTIONS,
    MAX_READERS,
    MAX_STRANGERS,
    RESERVED_DESCRIPTORS,
    SERVER_READ_BYTES,
)
from twinbus.loglines import facts
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.access import AccessKeys, Admission
from twinbus.protocol.keys import EMULATOR_SECRET
from twinbus.server.addresses import is_loopback
from twinbus.server.attendance import Attendance
from twinbus.server.client_connection import ClientConnection, now_us
from twinbus.server.entrance import Entrance
from twinbus.server.latencies import Latencies
from twinbus.server.listening import listener_at, local_listener_at, raise_descriptor_limit
from twinbus.server.memory import FreeMemory
from twinbus.server.pacing import Pacer
from twinbus.server.refusals import RefusalLog, presented_name
from twinbus.server.turns import CountingSelector, Turns

if TYPE_CHECKING:
    from twinbus.server.web import Web

_log = logging.getLogger("twinbus.server")


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
        self.clock = clock
        self.latencies = Latencies()
        self.accepted = 0  # number of connections since the start
        self.refused = 0
        self.is_stopping = False
        self.turns: Turns
        self._tls = tls
        self._local_may_be_plain = local_may_be_plain
        self.refusals = RefusalLog(clock)
        self.attendance = Attendance(max_connections, self.refusals.note_connection)
        self._replying: set[ClientConnection] = set()
        self._waking: set[str] = set()  # keys whose crowded connections are flushed soon
        self._keys_version = self.keys.version
        self._web = _web(namespace, self, name) if private is None else None
        listener = listener_at(host, port) if private is None else local_listener_at(private.socket)
        listeners = [listener]
        self.port: int = listener.getsockname()[1] if private is None else 0
        self.admin_port = self.port
        if admin is not None:
            try:
                listeners.append(listener_at(*admin))
            except BaseException:
                listener.close()
                raise
            self.admin_port = listeners[1].getsockname()[1]
        # A private door must not change how many files the application may open.
        self._entrance = Entrance(self, listeners, tls, self._web, max_connections)
        if private is None:
            self.limit_connections(max_connections)
        self.read_buffer = memoryview(bytearray(SERVER_READ_BYTES))  # shared by all connections
        self.moved_bytes = 0  # read and written since the last tick
        self._selector = CountingSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self.pacer = Pacer(
            lambda: self._selector.rounds, self._loop.call_soon, self.isolated, time.perf_counter
        )
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
        self._entrance.open(self._loop)
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
        """Flush the crowded connections of a key soon, because the key has released bytes."""
        if key in self.attendance.crowded and key not in self._waking:
            self._waking.add(key)
            self._loop.call_soon(self._wake_crowded, key)

    def _wake_crowded(self, key: str) -> None:
        self._waking.discard(key)
        for connection in self.attendance.crowded_of(key):
            self.isolated(connection, connection.flush)

    def may_be_plain(self, address: str) -> bool:
        """Return whether a client at this address may connect without TLS."""
        return self._tls is None or (self._local_may_be_plain and is_loopback(address))

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
        """Set the maximum number of clients, or fewer if the process may not open enough files.

        The files of strangers, readers, the log and the ledgers must fit as well.
        """
        visitors = MAX_STRANGERS + MAX_READERS
        files = raise_descriptor_limit(wanted + visitors + RESERVED_DESCRIPTORS)
        self._entrance.max_sockets = files - RESERVED_DESCRIPTORS
        possible = max(self._entrance.max_sockets - visitors, 1)
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
            self.refusals.note_key(presented_name(token), error.text)
            raise

    def recheck(self, admission: Admission) -> Admission:
        """Verify that an admission is still valid: its token may expire, its key may change."""
        return self.keys.recheck(admission, self.clock.wall_us())

    def note_refusal(self, admission: Admission | None, error: MessagingError) -> None:
        """Log the refusal of a connection or a request."""
        if admission is not None and isinstance(error, UnauthorizedError):
            self.refusals.note_key(admission.key.name, error.text)
            return
        self.refused += 1
        if not isinstance(error, UnauthorizedError):
            self.refusals.note_connection(error.text)

    def presentable(self, value: Any) -> Any:
        """Return a reply for clients: NamespaceClosedError becomes an error that they may retry."""
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
        self._entrance.close()
        for connection in [*self.attendance.clients]:
            connection.end(_stopping())
        self._entrance.drop_arriving()
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
        sockets: list[Any] = [*self._entrance.sockets()]
        sockets += [transport.get_extra_info("socket") for transport in transports]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for endpoint in sockets:
            if endpoint is not None and endpoint.fileno() >= 0:
                os.dup2(nothing, endpoint.fileno(), inheritable=False)
        os.close(nothing)


def _web(namespace: EmbeddedNamespace, door: Door, name: str) -> "Web":
    """Return the HTTP application of a server."""
    from twinbus.server.web import Web  # noqa: PLC0415 - a private door must not need its packages

    return Web(namespace, door, name)


def _stopping() -> CommunicationError:
    return CommunicationError("the server is stopping; try again when it has restarted")
