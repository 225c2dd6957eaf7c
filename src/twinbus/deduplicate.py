"""Drops repeated messages on the side of a consumer, by the origin that each message carries.

A primary that does not remember which messages were brought home (RabbitMQ, Azure Service Bus) may
enqueue a message twice. This happens if the reply to a send was lost and the message was sent
again, directly or from the backlog, or if a syphon was killed between a send and the settlement.
Copies of a message that was brought home carry the same origin in the property `x-twinbus-origin`:
the sender or the backlog queue, and a number. On RabbitMQ, messages that were sent directly carry
it as well. Each subscription of a topic has its own copy, so a message is remembered together with
the entity from which it was received.

    with OriginMemory.in_file(Path("seen.db")) as memory:
        for message in deduplicate(receiver, memory):
            handle(message)
            message.complete()

A message is remembered after it was completed, when the loop asks for the next message or ends,
even by `break` or by an error. While an origin is remembered, its copies are dropped, for all
consumers that share the memory. These are not dropped:

- messages without the property;
- the copy of a message whose consumer died after it handled the message and before the memory
  stored its origin (the file is written for each message);
- copies that two consumers with separate memories receive;
- copies that two loops with one memory handle at the same time: an origin is remembered afterwards.
"""

import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Protocol, Self

from twinbus.client.receiver import ReceivedMessage
from twinbus.errors import InvalidArgumentError
from twinbus.lifetimes import Closable
from twinbus.limits import MAX_REMEMBERED_ORIGINS, REMEMBERED_ORIGINS
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Disposition
from twinbus.protocol.origins import ORIGIN_PROPERTY
from twinbus.values import check_whole


def origin_of(message: BrokeredMessage) -> str | None:
    """Return the origin in the properties of a message, or None."""
    origin = message.application_properties.get(ORIGIN_PROPERTY)
    return origin if isinstance(origin, str) and origin else None


def _key_of(message: BrokeredMessage) -> str | None:
    """Return the key under which a message is remembered; None if it has no origin."""
    origin = origin_of(message)
    receiver = message.receiver if isinstance(message, ReceivedMessage) else None
    path = receiver.path.lower() if receiver is not None else ""
    return None if origin is None else f"{path} {origin}"


class _Origins(Protocol):
    """A bounded set of origins: the oldest ones are forgotten first."""

    def __contains__(self, origin: object) -> bool: ...

    def add(self, origin: str) -> None: ...

    def close(self) -> None: ...


class OriginMemory(Closable):
    """Remembers the origins of messages that were handled. Any thread may use it."""

    def __init__(self, capacity: int = REMEMBERED_ORIGINS) -> None:
        check_whole("capacity", capacity, 1, MAX_REMEMBERED_ORIGINS)
        self._origins: _Origins = _InMemory(capacity)
        self._lock = Lock()

    @classmethod
    def in_file(cls, path: Path, capacity: int = REMEMBERED_ORIGINS) -> Self:
        """Return a memory that survives the process; one process at a time may use the file."""
        memory = cls(capacity)
        memory._origins = _InFile(path, capacity)
        return memory

    def is_repeat(self, message: BrokeredMessage) -> bool:
        """Whether a copy of a message was remembered; a message without an origin never is."""
        key = _key_of(message)
        with self._lock:
            return key is not None and key in self._origins

    def remember(self, message: BrokeredMessage) -> None:
        """Remember a message; if the memory has a file, the origin is durable on return."""
        key = _key_of(message)
        if key is not None:
            with self._lock:
                self._origins.add(key)

    def close(self) -> None:
        """Close the file, if there is one."""
        with self._lock:
            self._origins.close()


def deduplicate(
    messages: Iterable[ReceivedMessage], memory: OriginMemory
) -> Iterator[ReceivedMessage]:
    """Yield messages that were not handled before; complete and drop repeats.

    A message is remembered after the caller completed it, when the caller asks for the next one or
    stops. A message that was abandoned or dead-lettered is not remembered.
    """
    for message in messages:
        if memory.is_repeat(message):
            message.complete()
            continue
        try:
            yield message
        finally:  # also when the caller's loop ends here
            if message._settled_as is Disposition.COMPLETE:  # noqa: SLF001 - of our own client
                memory.remember(message)


class _InMemory:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._origins: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, origin: object) -> bool:
        return origin in self._origins

    def add(self, origin: str) -> None:
        self._origins[origin] = None
        self._origins.move_to_end(origin)
        if len(self._origins) > self._capacity:
            self._origins.popitem(last=False)

    def close(self) -> None:
        self._origins.clear()


class _InFile:
    """A table of SQLite: `at` grows by one with each origin, so the oldest have the lowest."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._capacity = capacity
        try:
            self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS origins (at INTEGER PRIMARY KEY AUTOINCREMENT, "
                "origin TEXT NOT NULL UNIQUE)"
            )
        except sqlite3.Error as error:
            raise InvalidArgumentError(
                f"the file {path} cannot be used as a memory of origins: {error}. Give a file that "
                "no other process uses, in a directory that this one may write"
            ) from error

    def __contains__(self, origin: object) -> bool:
        found = self._file.execute("SELECT 1 FROM origins WHERE origin = ?", (origin,))
        return found.fetchone() is not None

    def add(self, origin: str) -> None:
        self._file.execute("INSERT OR REPLACE INTO origins (origin) VALUES (?)", (origin,))
        self._file.execute(
            "DELETE FROM origins WHERE at <= (SELECT MAX(at) FROM origins) - ?", (self._capacity,)
        )

    def close(self) -> None:
        self._file.close()
