"""Shares an embedded namespace among the factories and managers of a process.

A directory has one writer, so a process opens it once. Each user has a `SharedNamespace`; closing
it withdraws the receives of this user, and the last user closes the namespace.
"""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from twinbus.clock import Clock
from twinbus.errors import (
    NAMESPACE_CLOSED,
    NamespaceClosedError,
)
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest
from twinbus.protocol.table import waits

R = TypeVar("R")


class SharedNamespace:
    """A user of an embedded namespace; the last user to close it closes the namespace."""

    _opened: dict[Path, tuple[EmbeddedNamespace, int]] = {}  # noqa: RUF012 - shared by the process
    _lock = threading.Lock()

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._closed = False
        self._requests: set[BlockingRequest] = set()
        with self._lock:
            opened = self._opened.get(directory)
            namespace, users = opened or (EmbeddedNamespace(directory, clock), 0)
            self._opened[directory] = (namespace, users + 1)
        self._namespace = namespace

    @classmethod
    def find(cls, directory: Path) -> EmbeddedNamespace | None:
        """Return the namespace that is open in a directory, or None."""
        with cls._lock:
            opened = cls._opened.get(directory)
        return None if opened is None else opened[0]

    @property
    def id(self) -> str:
        """The unique id of the namespace, created with it."""
        return self._namespace.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Every capability."""
        return EVERY_CAPABILITY

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; never blocks on the disk, never raises."""
        if self._closed:
            refused: Future[R] = Future()
            refused.set_exception(NamespaceClosedError(NAMESPACE_CLOSED))
            return refused
        return self._namespace.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        request = BlockingRequest(command)
        self._requests.add(request)
        if self._closed:
            raise NamespaceClosedError(NAMESPACE_CLOSED)
        try:
            self._namespace.hand_over([request])
            return request.result(timeout_s)  # type: ignore[no-any-return]
        finally:
            self._requests.discard(request)

    def close(self) -> None:
        """Withdraw this user's receives; the last user closes the namespace."""
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
                    request.fail(NamespaceClosedError(NAMESPACE_CLOSED))
                return
            del self._opened[self._directory]
            self._namespace.close()
