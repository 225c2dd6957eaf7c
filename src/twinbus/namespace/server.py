"""A namespace on a Twinbus server, over one connection that all callers share.

The connection is opened when it is first needed, and again after it has failed: a link
(server_link.py) that has ended is replaced by a new one. Any thread may call this. A forked process
leaves the connection to its parent and opens its own.
"""

import threading
from concurrent.futures import Future
from typing import TypeVar

from twinbus.clock import Clock, SystemClock
from twinbus.connection import ConnectionString
from twinbus.errors import NAMESPACE_CLOSED, MessagingError, NamespaceClosedError
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.namespace.server_link import ServerLink
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import Command

R = TypeVar("R")


class ServerNamespace(Closable):
    """Connects to a Twinbus server; opens nothing before the first command.

    A forked process gets its own connection when it first uses the namespace.
    """

    def __init__(self, connection: ConnectionString, clock: Clock | None = None) -> None:
        self._connection = connection
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._link: ServerLink | None = None
        self._closed = False
        on_fork(self._after_fork)

    @property
    def id(self) -> str:
        """The unique id of the namespace, if the connection string has it."""
        return self._connection.namespace_id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Every capability."""
        return EVERY_CAPABILITY

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; never blocks, never raises."""
        try:
            return self._current().submit(command)
        except MessagingError as error:
            refused: Future[R] = Future()
            refused.set_exception(error)
            return refused

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        return self._current().ask(command, timeout_s)  # type: ignore[no-any-return]

    def _current(self) -> ServerLink:
        link = self._link
        if link is not None and link.is_usable():
            return link
        with self._lock:
            if self._closed:
                raise NamespaceClosedError(NAMESPACE_CLOSED)
            if self._link is None or self._link.ended is not None:
                self._link = ServerLink(self._connection, self._clock)
            return self._link

    def close(self) -> None:
        """Finish the commands in progress and close the connection."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _after_fork(self) -> None:
        """Leave the connection to the parent process."""
        self._lock = threading.Lock()
        link, self._link = self._link, None
        if link is not None:
            link.forget()
