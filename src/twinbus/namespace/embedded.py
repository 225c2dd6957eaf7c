"""A namespace in this process, on a directory."""

from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from twinbus.broker.commands import Command
from twinbus.broker.engine import EngineSettings, Storages
from twinbus.broker.writer import Writer
from twinbus.clock import Clock, SystemClock

R = TypeVar("R")


class EmbeddedNamespace:
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
        self._writer = Writer(directory, clock or SystemClock(), storages, threaded=threaded)

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; never blocks on the disk, never raises."""
        return self._writer.submit(command)

    def ask(self, command: Command[R]) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        return self._writer.ask(command)

    def close(self) -> None:
        """Finish what was handed over and let go of the directory."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
