"""Counts the connections of a door, and limits strangers, keys and addresses.

A connection without a verified token is a stranger; an HTTP connection with one is a reader; any
other connection with one is a client. Strangers and readers each have a maximum number. Beyond it
the door closes a connection of the address (strangers) or of the key (readers) that has the most
connections. Readers whose key does not manage the namespace are closed first. A new client is
refused if there is the maximum number of clients, or if its key or its address has its maximum
share of them. A part of the clients is reserved for keys that manage the namespace; shares do not
limit these keys.

The bytes of requests and replies that the server keeps for clients are counted by key as well. A
connection asks for room before it submits a request with a large reply. A connection without room
is crowded: its requests wait. When another connection of its key has released bytes, the door
flushes the crowded connections of this key, the oldest first. Everything here runs in the loop of
the door.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from twinbus.errors import ServerBusyError
from twinbus.limits import (
    CONNECTION_SHARE,
    MANAGE_RESERVE,
    MAX_INCOMPLETE_BYTES,
    MAX_KEY_REPLY_BYTES,
    MAX_KEY_REQUEST_BYTES,
    MAX_READERS,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    MAX_STRANGER_BYTES,
    MAX_STRANGERS,
    SERVER_BUSY_RETRY_S,
)
from twinbus.protocol.access import Admission
from twinbus.protocol.keys import Claim
from twinbus.server.client_connection import ClientConnection


@dataclass(frozen=True, slots=True)
class Visitor:
    """A stranger or a reader."""

    address: str
    close: Callable[[], object]  # closes the connection at once
    arrival: int  # counts up: the lowest number is the oldest connection
    transport: asyncio.Transport | None = None  # None until the connection has a protocol
    admission: Admission | None = None  # of a reader

    @property
    def is_manager(self) -> bool:
        """Whether it is a reader with a key that manages the namespace."""
        return self.admission is not None and self.admission.may(Claim.MANAGE, None)

    @property
    def key(self) -> str:
        """The identity of a reader's key."""
        return "" if self.admission is None else self.admission.id


class ByteShares:
    """Counts bytes that the server keeps for connections, and bounds them by key and in total.

    A key without any bytes gets room for its first request, so that no key can block another one.
    """

    def __init__(self, most_of_key: int, most: int) -> None:
        self._most_of_key = most_of_key
        self._most = most
        self._most_without_reserve = int(most * (1 - MANAGE_RESERVE))
        self.by_key: Counter[str] = Counter()
        self.total = 0

    def note(self, admission: Admission, change: int) -> None:
        """Count bytes more or less."""
        _add(self.by_key, admission.id, change)
        self.total += change

    def has_room(self, admission: Admission, noted: int, used: int, more: int) -> bool:
        """Return whether a connection may use more bytes.

        The connection uses `used` bytes now; `noted` bytes of them were counted already.
        """
        of_key = self.by_key[admission.id] - noted + used
        if not of_key:
            return True
        if of_key + more > self._most_of_key:
            return False
        total = self.total - noted + used + more
        return total <= self._most_without_reserve or (
            total <= self._most and admission.may(Claim.MANAGE, None)
        )


class Attendance:
    """The connections of a door."""

    def __init__(self, max_connections: int, on_refused: Callable[[str], None]) -> None:
        self.max_connections = max_connections
        self.clients: set[ClientConnection] = set()  # with a verified token
        self.strangers: dict[object, Visitor] = {}  # by task or protocol
        self._arrivals = itertools.count()
        self.readers: dict[object, Visitor] = {}  # HTTP connections that have shown a valid token
        self.by_key: Counter[str] = Counter()  # connections
        self.by_address: Counter[str] = Counter()
        self.incomplete: Counter[str] = Counter()  # bytes of unfinished frames, by key
        self.replies = ByteShares(MAX_KEY_REPLY_BYTES, MAX_REPLY_BYTES)  # expected and unread
        self.requests = ByteShares(MAX_KEY_REQUEST_BYTES, MAX_REQUEST_BYTES)  # unanswered
        self.crowded: dict[str, dict[ClientConnection, None]] = {}  # by key, oldest first
        self.stranger_bytes = 0  # of unfinished frames of all strangers
        self._bytes_of: dict[ClientConnection, int] = {}  # the longest unchanged first
        self._on_refused = on_refused  # called with the reason when a connection is closed

    def __len__(self) -> int:
        """Return the number of all connections."""
        return len(self.clients) + len(self.readers) + len(self.strangers)

    def transports(self) -> list[asyncio.Transport]:
        """Return the transports of everyone who is not a client."""
        visitors = [*self.strangers.values(), *self.readers.values()]
        return [visitor.transport for visitor in visitors if visitor.transport is not None]

    # -- strangers and readers -----------------------------------------------------------------

    def note_arrival(self, task: "asyncio.Task[None]", address: str) -> None:
        """Count a connection that has no protocol yet; cancelling its task closes it."""
        self._note_stranger(task, Visitor(address, task.cancel, next(self._arrivals)))

    def note_protocol(
        self,
        task: "asyncio.Task[None]",
        stranger: asyncio.BaseProtocol,
        transport: asyncio.Transport,
    ) -> None:
        """Count a connection under its first protocol, or close it if its task was cancelled."""
        visitor = self.strangers.pop(task, None)
        if visitor is None:
            transport.abort()
            return
        self.strangers[stranger] = replace(visitor, close=transport.abort, transport=transport)

    def note_stranger(
        self, stranger: asyncio.BaseProtocol, transport: asyncio.Transport, address: str
    ) -> None:
        """Count a connection without a token."""
        known = self.strangers.get(stranger)
        arrival = next(self._arrivals) if known is None else known.arrival
        self._note_stranger(stranger, Visitor(address, transport.abort, arrival, transport))

    def hand_over(self, stranger: asyncio.BaseProtocol, successor: asyncio.BaseProtocol) -> None:
        """Count a stranger under its next protocol object; its age stays the same."""
        visitor = self.strangers.pop(stranger, None)
        if visitor is not None:
            self.strangers[successor] = visitor

    def _note_stranger(self, stranger: object, visitor: Visitor) -> None:
        self.strangers[stranger] = visitor
        if len(self.strangers) > MAX_STRANGERS:
            names = ((stranger, visitor.address) for stranger, visitor in self.strangers.items())
            self._close(self.strangers, names, "too many connections have shown no token")

    def note_stranger_bytes(self, stranger: ClientConnection, size: int) -> None:
        """Record the bytes of a stranger's unfinished frames.

        While all strangers have too many, the stranger whose bytes grew longest ago is closed.
        """
        self.stranger_bytes += size - self._bytes_of.pop(stranger, 0)
        if size:
            self._bytes_of[stranger] = size
        while self.stranger_bytes > MAX_STRANGER_BYTES:
            oldest = next(iter(self._bytes_of))
            self.stranger_bytes -= self._bytes_of.pop(oldest)
            oldest.abort()
            self._on_refused("requests of connections without a token use too much memory")

    def note_reader(self, reader: asyncio.BaseProtocol, admission: Admission) -> None:
        """Count an HTTP connection under the key of its token; strangers cannot displace it."""
        visitor = self.strangers.pop(reader, None) or self.readers.get(reader)
        if visitor is None:  # closed
            return
        self.readers[reader] = replace(visitor, admission=admission)
        if len(self.readers) > MAX_READERS:
            readers = self.readers.items()
            ordinary = [
                (reader, visitor.key) for reader, visitor in readers if not visitor.is_manager
            ]
            names = ordinary or [(reader, visitor.key) for reader, visitor in readers]
            self._close(self.readers, names, "too many connections over HTTP")

    def _close(
        self, visitors: dict[object, Visitor], names: Iterable[tuple[object, str]], reason: str
    ) -> None:
        """Close the oldest visitor among those with the most frequent name."""
        by_name: dict[str, list[object]] = {}
        for visitor, name in names:
            by_name.setdefault(name, []).append(visitor)
        crowd = max(by_name.values(), key=len)
        oldest = min(crowd, key=lambda visitor: visitors[visitor].arrival)
        visitors.pop(oldest).close()
        self._on_refused(reason)

    def forget(self, connection: object) -> None:
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
        self._forget_crowded(connection, admission.id)

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

    # -- the memory of clients -----------------------------------------------------------------

    def note_incomplete(self, admission: Admission, change: int) -> None:
        """Count bytes of unfinished frames; raise if a key has too many of them in memory."""
        _add(self.incomplete, admission.id, change)
        if change > 0 and self.incomplete[admission.id] > MAX_INCOMPLETE_BYTES:
            raise _too_many(
                f"unfinished requests of key {admission.key.name} already use "
                f"{MAX_INCOMPLETE_BYTES} bytes of memory, the maximum"
            )

    def note_crowded(self, connection: ClientConnection, admission: Admission) -> None:
        """Let a connection wait until another connection of its key releases bytes."""
        self.crowded.setdefault(admission.id, {})[connection] = None

    def crowded_of(self, key: str) -> Iterator[ClientConnection]:
        """Yield crowded connections of a key to be flushed, until one stays crowded."""
        while key in self.crowded:
            connection = next(iter(self.crowded[key]))
            connection.is_crowded = False
            yield connection
            if connection.is_crowded:
                return
            self._forget_crowded(connection, key)

    def _forget_crowded(self, connection: ClientConnection, key: str) -> None:
        waiting = self.crowded.get(key)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self.crowded[key]


def _add(counter: Counter[str], name: str, change: int) -> None:
    counter[name] += change
    if not counter[name]:
        del counter[name]


def _too_many(reason: str) -> ServerBusyError:
    return ServerBusyError(
        f"{reason}; try again after {SERVER_BUSY_RETRY_S} s", retry_after_s=SERVER_BUSY_RETRY_S
    )
