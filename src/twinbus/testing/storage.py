"""A disk with faults: slow, full, failing to sync, or losing power in the middle of a write.

disk = FaultyStorage(clock)
namespace = EmbeddedNamespace(folder, clock, Storages(log=disk))
disk.full = True                # writes fail with ENOSPC
disk.delay_us = 2_000_000       # each sync takes two seconds of the clock
disk.tear_after(100)            # the power fails after 100 more bytes
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from twinbus.broker.store.storage import DiskStorage
from twinbus.clock import Clock


class PowerFailure(BaseException):
    """The simulated machine has lost power: no later operation has an effect."""


class FaultyStorage(DiskStorage):
    """The operating system's files, with faults on demand."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reserved: set[int] = set()  # descriptors of files whose space was reserved
        self._tear_in: int | None = None
        self.full = False
        self.fails_sync = False
        self.delay_us = 0
        self.syncs = 0

    def tear_after(self, count: int) -> None:
        """Lose power after this many more bytes."""
        self._tear_in = count

    def create(self, path: Path, size: int = 0) -> int:
        """Open a file for writing; a full disk has only the space that was reserved before."""
        descriptor = super().create(path, 0 if self.full else size)
        self._reserved.discard(descriptor)
        if path.name == "reserve" and not size:
            self._reserved.add(descriptor)
        return descriptor

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes, or as many as the fault permits."""
        if self.full and descriptor not in self._reserved:
            # A real disk writes the part that fits: write one half.
            content = b"".join(buffers)
            super().write(descriptor, offset, [memoryview(content[: len(content) // 2])])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._tear_in is not None:
            content = b"".join(buffers)
            if len(content) > self._tear_in:
                super().write(descriptor, offset, [memoryview(content[: self._tear_in])])
                self._tear_in = 0
                raise PowerFailure
            self._tear_in -= len(content)
        super().write(descriptor, offset, buffers)

    def sync(self, descriptor: int) -> None:
        """Sync, after the delay."""
        if self.full and descriptor not in self._reserved:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._tear_in == 0:
            raise PowerFailure
        if self.fails_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.delay_us:
            self._clock.sleep_us(self.delay_us)
        self.syncs += 1
        super().sync(descriptor)
