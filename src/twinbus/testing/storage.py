"""A disk with troubles: slow, full, refusing to sync, or losing power in the middle of a write.

disk = FaultyStorage(clock)
namespace = EmbeddedNamespace(folder, clock, Storages(log=disk))
disk.full = True                # writes fail with ENOSPC
disk.delay_us = 2_000_000       # each sync takes two seconds of the clock
disk.tear_after(100)            # the power fails after 100 more bytes
"""

import errno
import os
from collections.abc import Sequence

from twinbus.broker.storage import DiskStorage
from twinbus.clock import Clock


class PowerFailure(BaseException):
    """The machine is gone: nothing after this write happened."""


class FaultyStorage:
    """The operating system's files, with troubles on demand."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._disk = DiskStorage()
        self._tear_in: int | None = None
        self.full = False
        self.fails_sync = False
        self.delay_us = 0
        self.syncs = 0

    def tear_after(self, count: int) -> None:
        """Lose power after this many more bytes."""
        self._tear_in = count

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes, or what the trouble lets through."""
        if self.full:
            # A real disk takes what fits: leave half of it behind.
            whole = b"".join(buffers)
            self._disk.write(descriptor, offset, [memoryview(whole[: len(whole) // 2])])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._tear_in is not None:
            whole = b"".join(buffers)
            if len(whole) > self._tear_in:
                self._disk.write(descriptor, offset, [memoryview(whole[: self._tear_in])])
                self._tear_in = 0
                raise PowerFailure
            self._tear_in -= len(whole)
        self._disk.write(descriptor, offset, buffers)

    def sync(self, descriptor: int) -> None:
        """Sync, after the delay."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._tear_in == 0:
            raise PowerFailure
        if self.fails_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.delay_us:
            self._clock.sleep_us(self.delay_us)
        self.syncs += 1
        self._disk.sync(descriptor)
