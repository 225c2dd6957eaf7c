"""A namespace on disks that can fail, and the ways it can go down and come back."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.contracts.conftest import World
from tests.namespaces import embedded
from twinbus.broker.queue.queue import Queue
from twinbus.broker.turn.engine import Engine, Storages
from twinbus.clock import ManualClock
from twinbus.testing import FaultyStorage

A_MOMENT = timedelta(milliseconds=1)


class Site(World):
    """A world that can be closed, lose its power, and be opened again."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.settings = settings
        self.clock = ManualClock()
        self.open()

    def open(self, **settings: Any) -> None:
        """Open the directory on healthy disks."""
        self.disk = FaultyStorage(self.clock)
        self.spill_disk = FaultyStorage(self.clock)
        self.embedded = embedded(
            self.directory,
            self.clock,
            Storages(self.disk, self.spill_disk),
            threaded=False,
            **self.settings | settings,
        )
        self.namespace = self.embedded

    @property
    def engine(self) -> Engine:
        return self.embedded.engine

    def queue_of(self, path: str) -> Queue:
        return self.engine.namespace.directory.queue(path)[1]

    def reopen(self, **settings: Any) -> None:
        """Close in good order and open again; everything that was due happens."""
        self.embedded.close()
        self.clock.advance(A_MOMENT)
        self.open(**settings)
        self.clock.advance(A_MOMENT)

    def expect_power_failure(self) -> None:
        """From now on the broker cannot tidy up when it stops."""
        setattr(self.engine, "abandon", lambda: None)  # noqa: B010 - a method

    def tear_after(self, count: int) -> None:
        """Lose power after so many more bytes in the log."""
        self.expect_power_failure()
        self.disk.tear_after(count)

    def crash(self, **settings: Any) -> None:
        """End without a word, as a killed process does, and open again."""
        self.embedded.crash()
        self.clock.advance(A_MOMENT)
        self.open(**settings)
        self.clock.advance(A_MOMENT)

    @property
    def log_bytes(self) -> int:
        """Size of the log directory."""
        files = (path for path in self.directory.glob("log/*") if path.name != "reserve")
        return sum(path.stat().st_size for path in files)

    @property
    def last_segment(self) -> Path:
        return max(self.directory.glob("log/*.log"))
