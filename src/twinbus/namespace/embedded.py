"""A namespace in this process, on a directory."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from twinbus.broker.accounts.ledgers import Lineage
from twinbus.broker.turn.engine import EngineSettings, Flushes, Recovery, Snapshot, Storages, Vitals
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.broker.turn.writer import InlineWriter, ThreadedWriter, Writer
from twinbus.clock import Clock, SystemClock
from twinbus.entities import EntityDescription
from twinbus.errors import NamespaceClosedError
from twinbus.ledger import LedgerSettings
from twinbus.lifetimes import Closable
from twinbus.protocol.access import AccessKeys
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import Request

__all__ = ["EmbeddedNamespace", "EngineSettings", "Lineage"]  # what those who open one need

R = TypeVar("R")


class EmbeddedNamespace(Closable):
    """Opens a directory as a namespace; one process at a time may.

    `EmbeddedNamespace("/var/lib/orders")` is all it takes. Settings, a clock, storages and
    `threaded=False` are for tests and for those who tune.
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
        self._before_close: list[Callable[[], None]] | None = []  # None: it is closing
        self._closing = threading.Lock()

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything."""
        return EVERY_CAPABILITY

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; never blocks on the disk, never raises."""
        return self._writer.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        return self._writer.ask(command, timeout_s)

    def hand_over(self, requests: Sequence[Request], *, in_own_thread: bool = True) -> None:
        """Take requests whose callers do not wait here; see `Writer.hand_over`. For servers."""
        self._writer.hand_over(requests, in_own_thread=in_own_thread)

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Let requests that wait go unanswered: those who asked are gone."""
        self._writer.withdraw(requests)

    @property
    def flushes(self) -> Flushes:
        """How often the log was flushed, and how long the last time took."""
        return self._writer.flushes

    def snapshot(self) -> Snapshot:
        """Return what there is to see from outside; costs no operation. For metrics."""
        return self._writer.snapshot()

    def vitals(self) -> Vitals:
        """Return whether it works; never waits. For health checks."""
        return self._writer.vitals()

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self._writer.engine.settings.directory

    @property
    def spill_directory(self) -> Path:
        """Where its spill store is; it may lie outside of the directory."""
        return self._writer.engine.spill_folder

    @property
    def settings(self) -> EngineSettings:
        """The settings in effect."""
        return self._writer.engine.settings

    def reconfigure(self, namespace: NamespaceSettings, ledger: LedgerSettings) -> None:
        """Change the limits and the ledger settings while the namespace runs.

        Whether a ledger is written at all, and how finely it counts, stays until the next start.
        """
        self._writer.reconfigure(namespace, ledger)

    @property
    def max_message_bytes(self) -> int:
        """The largest message that it takes."""
        return self._writer.engine.settings.namespace.max_message_bytes

    def describe(self, path: str) -> EntityDescription | None:
        """Return the description of an entity, if there is one: a look, and no operation."""
        engine = self._writer.engine
        if engine.is_healing:
            return None
        entity = engine.namespace.directory.find(path)
        return None if entity is None else entity.description

    @property
    def keys(self) -> AccessKeys:
        """The keys that open this namespace to others."""
        return self._writer.engine.keys

    @property
    def lineage(self) -> Lineage:
        """Which log this is, and how much of it was found to be lost when it was opened."""
        return self._writer.engine.lineage

    @property
    def recovery(self) -> Recovery:
        """What the broker read from its log when it opened the directory."""
        return self._writer.engine.recovery

    @property
    def id(self) -> str:
        """The unique id that the namespace has from its birth."""
        return self._writer.engine.id

    def before_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once when the namespace closes, while it still works; return how to stop."""
        with self._closing:
            if self._before_close is None:
                raise NamespaceClosedError("the namespace was closed")
            self._before_close.append(callback)
        return lambda: self._forget(callback)

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._closing:
            if self._before_close is not None and callback in self._before_close:
                self._before_close.remove(callback)

    def close(self) -> None:
        """Finish what was handed over and let go of the directory."""
        with self._closing:
            callbacks, self._before_close = self._before_close or [], None
        for callback in callbacks:
            callback()
        self._writer.close()
