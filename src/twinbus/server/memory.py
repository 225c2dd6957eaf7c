"""Returns free memory to the operating system when a burst of large requests is over.

Python and the buffers of connections use malloc; Arrow's columns use Arrow's memory pool. Both keep
freed memory for later requests: after a burst of large requests that is hundreds of megabytes, for
as long as the process lives. So the door counts the bytes that it reads and writes. When it has
moved many bytes, and then few during a tick, both allocators return their free pages. That takes
less than a millisecond per megabyte. A server that is never idle, or that has deleted a large
queue, returns free pages once per RELEASE_INTERVAL_US.

Everything runs in the loop's thread, because Arrow's pool returns what the calling thread freed.
"""

import ctypes
from collections.abc import Callable

import pyarrow as pa

from twinbus.limits import BURST_BYTES, QUIET_TICK_BYTES, RELEASE_INTERVAL_US

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None: not glibc's malloc


def release() -> None:
    """Make the allocators return their free pages to the operating system."""
    pa.default_memory_pool().release_unused()
    if _malloc_trim is not None:
        _malloc_trim(0)


class FreeMemory:
    """Decides when to release free memory."""

    def __init__(self, now: int, release: Callable[[], None] = release) -> None:
        self._release = release
        self._released_at = now
        self._moved = 0  # bytes since the last release

    def tick(self, now: int, moved: int) -> None:
        """Add the bytes moved since the last tick; release free memory if it is time."""
        self._moved += moved
        is_over = self._moved >= BURST_BYTES and moved < QUIET_TICK_BYTES
        if is_over or now - self._released_at >= RELEASE_INTERVAL_US:
            self._release()
            self._moved, self._released_at = 0, now
