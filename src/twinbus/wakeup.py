"""Waking a thread that sleeps for a bounded time.

`queue.SimpleQueue.get(timeout=...)` is not used for that. In CPython 3.11 it waits forever if its
deadline passes between its first try and the wait, which is likely with a short timeout on a busy
machine.
"""

import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Wakeup:
    """Wakes one waiting thread. If no thread waits, the next wait returns at once."""

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def send(self) -> None:
        """Wake the waiting thread."""
        with suppress(RuntimeError):  # it was sent already
            self._asleep.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until woken or until the timeout; return whether it was woken."""
        return self._asleep.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Inbox(Generic[T]):
    """A queue with one consumer thread."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wakeup = Wakeup()

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._wakeup.send()

    def get(self, timeout_s: float) -> T | None:
        """Return the next item; None after the timeout."""
        while not self._items:
            if not self._wakeup.wait(timeout_s):
                return None
        return self._items.popleft()
