"""The lock of a namespace directory: one process at a time writes it.

The file LOCK contains the id of the process, and the number of a durable record of the log (log.py
says which). The kernel releases the lock when the process ends.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from twinbus.errors import NamespaceInUseError, StoreUnavailableError
from twinbus.files import sync_directory


def lock_directory(directory: Path) -> tuple[int, int]:
    """Become the only writer of a directory, or raise.

    Return the file descriptor of LOCK, and the record number in it (0 if there is none).
    """
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in missing:
            sync_directory(made.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / "LOCK", flags, 0o600)
        found = os.fstat(descriptor)
    except OSError as error:
        raise StoreUnavailableError(
            f"{directory} cannot be used as a namespace directory ({error.strerror}); it must be "
            "a directory this user can write to, and its LOCK must not be a symbolic link",
            directory=str(directory),
            errno=error.errno,
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise StoreUnavailableError(
            f"{directory / 'LOCK'} is a link or a device, not a regular file; remove it",
            directory=str(directory),
        )
    holder, _, seen = os.pread(descriptor, 64, 0).decode(errors="replace").partition(" ")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise NamespaceInUseError(
            f"{directory} is in use by process {holder}; only one process at a time may write a "
            "namespace. Stop that process, or connect to it as a server",
            directory=str(directory),
            pid=int(holder) if holder.isdigit() else None,
        ) from None
    seen_record = int(seen) if seen.isdigit() and len(seen) < 20 else 0
    write_lock(descriptor, seen_record)
    return descriptor, seen_record


def write_lock(descriptor: int, record: int) -> None:
    """Write our process id and the number of a durable record to LOCK."""
    content = f"{os.getpid()} {record}".encode()
    with suppress(OSError):  # the disk may be full; this process has the lock anyway
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
