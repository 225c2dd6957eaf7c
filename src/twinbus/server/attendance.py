"""Who is connected to a door, and how many connections strangers, keys and addresses may have.

A connection without a verified token is a stranger. When there are too many strangers, or too many
HTTP connections with a token, the oldest of them is closed. Clients are refused beyond the maximum
of the door, the share of their key, and the share of their address; a part of the connections is
reserved for keys that manage the namespace. Everything here runs in the loop of the door.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from twinbus.errors import ServerBusyError
from twinbus.limits import (
    CONNECTION_SHARE,
    MANAGE_RESERVE,
    MAX_INCOMPLETE_BYTES,
    MAX_READERS,
    MAX_STRANGER_BYTES,
    MAX_STRANGERS,
    SERVER_BUSY_RETRY_S,
)
from twinbus.protocol.access import Admission
from twinbus.protocol.keys import Claim
from twinbus.server.client_connection import ClientConnection

Transports = dict[asyncio.BaseProtocol, asyncio.Transport]  # oldest first


class Attendance:
    """The connections of a door."""

    def __init__(self, max_connections: int, on_refused: Callable[[str], None]) -> None:
        self.max_connections = max_connections
        self.clients: set[ClientConnection] = set()  # with a verified token
        self.strangers: Transports = {}
        self.readers: Transports = {}  # HTTP connections that have shown a valid token
        self.by_key: Counter[str] = Counter()  # connections
        self.by_address: Counter[str] = Counter()
        self.incomplete: Counter[str] = Counter()  # bytes of unfinished frames, by key
        self.stranger_bytes = 0  # of unfinished frames of all strangers
        self._bytes_of: dict[ClientConnection, int] = {}  # oldest growth first
        self._on_refused = on_refused  # called with the reason when a connection is closed

    def __len__(self) -> int:
        """Return the number of all connections."""
        return len(self.clients) + len(self.readers) + len(self.strangers)

    def transports(self) -> list[asyncio.Transport]:
        """Return the transports of everyone who is not a client."""
        return [*self.strangers.values(), *self.readers.values()]

    # -- strangers and readers -----------------------------------------------------------------

    def note_stranger(self, stranger: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        """Count a connection without a token; the oldest is closed when there are too many."""
        self.strangers[stranger] = transport
        if len(self.strangers) > MAX_STRANGERS:
            self._close_oldest(self.strangers, "too many connections have shown no token")

    def note_stranger_bytes(self, stranger: ClientConnection, size: int) -> None:
        """Record the bytes of a stranger's unfinished frames; too many close the oldest of them."""
        self.stranger_bytes += size - self._bytes_of.pop(stranger, 0)
        if size:
            self._bytes_of[stranger] = size
        while self.stranger_bytes > MAX_STRANGER_BYTES:
            oldest = next(iter(self._bytes_of))
            self.stranger_bytes -= self._bytes_of.pop(oldest)
            oldest.abort()
            self._on_refused("requests of connections without a token use too much memory")

    def note_reader(self, reader: asyncio.BaseProtocol) -> None:
        """Count an HTTP connection with a verified token; strangers cannot displace it."""
        transport = self.strangers.pop(reader, None)
        if transport is None:  # counted already, or closed
            return
        self.readers[reader] = transport
        if len(self.readers) > MAX_READERS:
            self._close_oldest(self.readers, "too many connections over HTTP")

    def _close_oldest(self, transports: Transports, reason: str) -> None:
        transports.pop(next(iter(transports))).abort()
        self._on_refused(reason)

    def forget(self, connection: asyncio.BaseProtocol) -> None:
        """Stop counting a stranger or reader: it has become a client, or has ended."""
        self.strangers.pop(connection, None)
        self.readers.pop(connection, None)

    # -- clients -------------------------------------------------------------------------------

    def enter(self, connection: ClientConnection, admission: Admission) -> None:
        """Count a stranger with a verified token as a client, or raise why it is refused."""
        self._check_room(connection.address, admission)
        self.forget(connection)
        self.clients.add(connection)
        self.by_key[admission.id] += 1
        self.by_address[connection.address] += 1

    def leave(self, connection: ClientConnection) -> None:
        """Stop counting a connection that has ended, whatever it was."""
        self.forget(connection)
        if connection not in self.clients:
            return
        self.clients.discard(connection)
        admission = connection.admitted
        assert admission is not None  # every client has shown a token
        _add(self.by_key, admission.id, -1)
        _add(self.by_address, connection.address, -1)

    def _check_room(self, address: str, admission: Admission) -> None:
        count, most = len(self.clients), self.max_connections
        if admission.may(Claim.MANAGE, None):
            if count >= most:
                raise _too_many(f"the server has {most} connections, its maximum")
            return
        if count >= max(int(most * (1 - MANAGE_RESERVE)), 1):
            raise _too_many(
                f"the server has {count} connections; the rest of {most} is reserved for keys "
                "that manage the namespace"
            )
        share = max(int(most * CONNECTION_SHARE), 1)
        if self.by_key[admission.id] >= share:
            raise _too_many(f"key {admission.key.name} has {share} connections, its maximum")
        if self.by_address[address] >= share:
            raise _too_many(f"the address {address} has {share} connections, its maximum")

    def note_incomplete(self, admission: Admission, change: int) -> None:
        """Count bytes of unfinished frames; raise if a key has too many of them in memory."""
        _add(self.incomplete, admission.id, change)
        if change > 0 and self.incomplete[admission.id] > MAX_INCOMPLETE_BYTES:
            raise _too_many(
                f"unfinished requests of key {admission.key.name} already use "
                f"{MAX_INCOMPLETE_BYTES} bytes of memory, the maximum"
            )


def _add(counter: Counter[str], name: str, change: int) -> None:
    counter[name] += change
    if not counter[name]:
        del counter[name]


def _too_many(reason: str) -> ServerBusyError:
    return ServerBusyError(
        f"{reason}; try again after {SERVER_BUSY_RETRY_S} s", retry_after_s=SERVER_BUSY_RETRY_S
    )
