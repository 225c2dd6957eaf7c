"""What files need beyond Python's own: durability of names, and privacy."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make created, renamed and removed files of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tree_bytes(folder: str | os.PathLike[str], *, leave_out: str = "") -> int:
    """Return the size of all files under a folder, but for one of its subfolders.

    A file or folder that disappears meanwhile counts nothing.
    """
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
                    elif entry.name != leave_out:
                        total += tree_bytes(entry.path)
    except OSError:
        return total
    return total


def create_private(path: Path) -> BinaryIO:
    """Open a new file that only its owner can read; a symbolic link in its place is refused."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can open, and close one that others could."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
