"""A namespace in this process, in a directory."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from twinbus.broker.accounts.ledgers import Lineage
from twinbus.broker.turn.engine import Engine, EngineSettings, Storages
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.broker.turn.vitals import Flushes, Recovery, Snapshot, Vitals
from twinbus.broker.turn.writer import InlineWriter, ThreadedWriter, Writer
from twinbus.clock import Clock, SystemClock
from twinbus.entities import EntityDescription
from twinbus.errors import (
    NAMESPACE_CLOSED,
    NamespaceClosedError,
)
from twinbus.ledger import LedgerSettings
from twinbus.lifetimes import Closable
from twinbus.protocol.access import AccessKeys
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import Request

__all__ = ["EmbeddedNamespace", "EngineSettings", "Lineage"]  # for code that opens a directory

R = TypeVar("R")


class EmbeddedNamespace(Closable):
    """Opens a directory as a namespace; only one process at a time can have it open.

    `EmbeddedNamespace("/var/lib/orders")` is enough. Settings, a clock, storages and
    `threaded=False` are for tests and for tuning.
    """

    def __init__(
        self,
        directory: str | Path | EngineSettings,
        clock: Clock | None = None,
        storages: Storages | None = None,
        *,
        threaded: bool = True,
    ) -> None:
        if not isinstance(directory, EngineSettings):
            directory = EngineSettings(directory=Path(directory))
        kind: type[Writer] = ThreadedWriter if threaded else InlineWriter
        self._writer = kind(directory, clock or SystemClock(), storages)
        self._before_close: list[Callable[[], None]] | None = []  # None: the namespace is closing
        self._closing = threading.Lock()

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Every capability."""
        return EVERY_CAPABILITY

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; never blocks on the disk, never raises."""
        return self._writer.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        return self._writer.ask(command, timeout_s)

    def hand_over(self, requests: Sequence[Request], *, in_own_thread: bool = True) -> None:
        """Execute requests whose callers do not wait here; see `Writer.hand_over`. For servers."""
        self._writer.hand_over(requests, in_own_thread=in_own_thread)

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Withdraw waiting requests whose callers do not wait any more; they get no reply."""
        self._writer.withdraw(requests)

    @property
    def flushes(self) -> Flushes:
        """How many times the log was flushed, and how long the last flush took."""
        return self._writer.flushes

    def snapshot(self) -> Snapshot:
        """Return counts and sizes for metrics; not metered as an operation."""
        return self._writer.snapshot()

    def vitals(self) -> Vitals:
        """Return whether the namespace works, for health checks; never waits."""
        return self._writer.vitals()

    @property
    def engine(self) -> Engine:
        """The broker behind the namespace, for tests and simulations that examine it."""
        return self._writer.engine

    @property
    def directory(self) -> Path:
        """The directory with its files."""
        return self._writer.engine.settings.directory

    @property
    def spill_directory(self) -> Path:
        """The directory of its spill store, which may be outside of the namespace's directory."""
        return self._writer.engine.spill_folder

    @property
    def settings(self) -> EngineSettings:
        """The settings in effect."""
        return self._writer.engine.settings

    def reconfigure(self, namespace: NamespaceSettings, ledger: LedgerSettings) -> None:
        """Change the limits and the ledger settings while the namespace runs.

        Whether the ledger is written, and its level of detail, change only at the next start.
        """
        self._writer.reconfigure(namespace, ledger)

    @property
    def max_message_bytes(self) -> int:
        """The size of the largest message that it accepts."""
        return self._writer.engine.settings.namespace.max_message_bytes

    def describe(self, path: str) -> EntityDescription | None:
        """Return the description of an entity, or None; not metered as an operation."""
        engine = self._writer.engine
        if engine.is_healing:
            return None
        entity = engine.namespace.directory.find(path)
        return None if entity is None else entity.description

    @property
    def keys(self) -> AccessKeys:
        """The access keys of this namespace."""
        return self._writer.engine.keys

    @property
    def lineage(self) -> Lineage:
        """The identity of the log, and how much of it was missing when it was opened."""
        return self._writer.engine.lineage

    @property
    def recovery(self) -> Recovery:
        """What the broker recovered from its log when it opened the directory."""
        return self._writer.engine.recovery

    @property
    def id(self) -> str:
        """The unique id of the namespace, created with it."""
        return self._writer.engine.id

    def before_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback for when closing begins; return a function that unregisters it."""
        with self._closing:
            if self._before_close is None:
                raise NamespaceClosedError(NAMESPACE_CLOSED)
            self._before_close.append(callback)
        return lambda: self._forget(callback)

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._closing:
            if self._before_close is not None and callback in self._before_close:
                self._before_close.remove(callback)

    def close(self) -> None:
        """Finish the commands in progress and release the directory."""
        with self._closing:
            callbacks, self._before_close = self._before_close or [], None
        for callback in callbacks:
            callback()
        self._writer.close()

    def crash(self) -> None:
        """End like a killed process: write nothing, and answer no caller. For tests."""
        self._writer.crash()
