"""An embedded namespace that several factories and managers of one process use.

A directory has one writer, so the process opens it once. Each user has a `SharedNamespace`: closing
it withdraws the receives of this user only.
"""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from twinbus.clock import Clock
from twinbus.errors import NamespaceClosedError
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest
from twinbus.protocol.table import waits

R = TypeVar("R")


class SharedNamespace:
    """One of several users of an embedded namespace; the last one to close it closes it."""

    _opened: dict[Path, tuple[EmbeddedNamespace, int]] = {}  # noqa: RUF012 - the process's, on purpose
    _lock = threading.Lock()

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._closed = False
        self._requests: set[BlockingRequest] = set()
        with self._lock:
            held = self._opened.get(directory)
            namespace, users = held or (EmbeddedNamespace(directory, clock), 0)
            self._opened[directory] = (namespace, users + 1)
        self._namespace = namespace

    @classmethod
    def find(cls, directory: Path) -> EmbeddedNamespace | None:
        """Return what the users of a directory share."""
        with cls._lock:
            held = cls._opened.get(directory)
        return None if held is None else held[0]

    @property
    def id(self) -> str:
        """The unique id that the namespace has from its birth."""
        return self._namespace.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything."""
        return EVERY_CAPABILITY

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; never blocks on the disk, never raises."""
        if self._closed:
            refused: Future[R] = Future()
            refused.set_exception(NamespaceClosedError("the namespace was closed"))
            return refused
        return self._namespace.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        request = BlockingRequest(command)
        self._requests.add(request)
        if self._closed:
            raise NamespaceClosedError("the namespace was closed")
        try:
            self._namespace.hand_over([request])
            return request.result(timeout_s)  # type: ignore[no-any-return]
        finally:
            self._requests.discard(request)

    def close(self) -> None:
        """Let go; the last one closes the namespace."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _, users = self._opened[self._directory]
            if users > 1:
                self._opened[self._directory] = (self._namespace, users - 1)
                waiting = [request for request in self._requests if waits(request.command)]
                self._namespace.withdraw(waiting)
                for request in waiting:
                    request.fail(NamespaceClosedError("the namespace was closed"))
                return
            del self._opened[self._directory]
            self._namespace.close()
