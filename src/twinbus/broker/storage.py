"""The few calls through which the log touches the disk: the seam where tests inject trouble."""

import os
from collections.abc import Sequence
from typing import Protocol

_MOST_BUFFERS = 1024  # IOV_MAX on Linux


class Storage(Protocol):
    """Writes and syncs an open file."""

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes from an offset on, or raise OSError after any part of them."""
        ...

    def sync(self, descriptor: int) -> None:
        """Return when everything written is on the disk."""
        ...


class DiskStorage:
    """The operating system's files."""

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes from an offset on, or raise OSError after any part of them."""
        left = list(buffers)
        while left:
            written = os.pwritev(descriptor, left[:_MOST_BUFFERS], offset)
            offset += written
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]

    def sync(self, descriptor: int) -> None:
        """Return when everything written is on the disk."""
        os.fdatasync(descriptor)
