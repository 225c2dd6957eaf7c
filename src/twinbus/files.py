"""Atomic file writes, durable renames, and private files.

A file that others read while it is written, or that must survive a power cut, is written with
`write_whole`: a draft beside it, a sync, a rename, and a sync of the folder. The log uses
broker/store/storage.py instead, because tests inject faults between the log and the disk.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_PRIVATE, _BY_UMASK = 0o600, 0o666


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make created, renamed and removed files of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tree_bytes(folder: str | os.PathLike[str], *, leave_out: str = "") -> int:
    """Return the size of all files under a folder, except for one of its subfolders.

    A file or folder that disappears meanwhile does not count.
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
    return _create(path, _PRIVATE)


def _create(path: Path, mode: int) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, mode), "wb")


def write_whole(
    path: Path, content: bytes, *, is_private: bool = True, is_durable: bool = True
) -> None:
    """Write a file atomically: on an error, the old file stays unchanged."""
    write_all_whole(
        {path: lambda file: file.write(content)}, is_private=is_private, is_durable=is_durable
    )


def write_all_whole(
    writers: Mapping[Path, Callable[[BinaryIO], object]],
    *,
    is_private: bool = True,
    is_durable: bool = True,
) -> None:
    """Write files atomically; on an error, write none and raise.

    Each writer gets the draft of its file, whose name begins with a dot. When this returns, durable
    files are on the disk.
    """
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}.draft") for path in writers}
    is_written = False
    try:
        for path, write in writers.items():
            with _create(drafts[path], _PRIVATE if is_private else _BY_UMASK) as file:
                write(file)
                file.flush()
                if is_durable:
                    os.fsync(file.fileno())
        is_written = True
        for path, draft in drafts.items():
            draft.replace(path)
    except BaseException:
        for path, draft in drafts.items():
            with suppress(OSError):
                if draft.exists():
                    draft.unlink()
                elif is_written:  # the draft was renamed to `path`
                    path.unlink()
        raise
    if is_durable:
        with suppress(OSError):  # the rename is done; only a power cut could lose it
            for folder in {path.parent for path in writers}:
                sync_directory(folder)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process or thread is in this block with the same folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # unlocks


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can open; if it exists, remove the rights of others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
