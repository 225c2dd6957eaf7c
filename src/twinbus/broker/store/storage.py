"""The calls through which a log changes the disk; tests inject failures here.

A write is durable after `sync` of its file; a new, renamed or removed name after `sync_directory`.
A log relies on nothing else, in particular not on any order of unsynced changes.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from twinbus.files import sync_directory
from twinbus.limits import MAX_WRITE_BUFFERS


class Storage(Protocol):
    """Changes files. Each call raises OSError if the disk refuses."""

    def create(self, path: Path, size: int = 0) -> int:
        """Open a file for writing, creating it if it is missing, and reserve space up to a size."""
        ...

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes at an offset, or raise OSError after writing any part of them."""
        ...

    def sync(self, descriptor: int) -> None:
        """Return when everything written to the file is on the disk."""
        ...

    def truncate(self, descriptor: int, size: int) -> None:
        """Truncate a file to a size."""
        ...

    def rename(self, path: Path, name: Path) -> None:
        """Rename a file."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the disk."""
        ...


class DiskStorage:
    """The operating system's files."""

    def create(self, path: Path, size: int = 0) -> int:
        """Open a file for writing, creating it if it is missing, and reserve space up to a size."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        if size:
            with suppress(OSError):  # a disk that cannot reserve space may still accept writes
                os.posix_fallocate(descriptor, 0, size)
        return descriptor

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes at an offset, or raise OSError after writing any part of them."""
        left = list(buffers)
        if len(left) == 1 and os.pwritev(descriptor, left, offset) == left[0].nbytes:
            return  # nearly always; otherwise all of it is written again
        while left:
            written = os.pwritev(descriptor, left[:MAX_WRITE_BUFFERS], offset)
            offset += written
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]

    def sync(self, descriptor: int) -> None:
        """Return when everything written to the file is on the disk."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        """Truncate a file to a size."""
        os.ftruncate(descriptor, size)

    def rename(self, path: Path, name: Path) -> None:
        """Rename a file."""
        path.rename(name)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the disk."""
        sync_directory(path)
