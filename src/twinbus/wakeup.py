"""Waking a thread that sleeps for a bounded time.

`queue.SimpleQueue.get(timeout=...)` is not used for that: in CPython 3.11 it waits for ever when
its deadline passes between its first try and the wait, which a short timeout and a busy machine
make likely.
"""

import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Wakeup:
    """Wakes one sleeper; sent while nobody sleeps, it ends the next sleep at once."""

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def send(self) -> None:
        """Wake the sleeper."""
        with suppress(RuntimeError):  # it was sent already
            self._asleep.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until woken; say whether that was so, or the time was over."""
        return self._asleep.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Inbox(Generic[T]):
    """Things for one thread, in order."""

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._wakeup = Wakeup()

    def put(self, thing: T) -> None:
        """Leave something."""
        self._things.append(thing)
        self._wakeup.send()

    def get(self, timeout_s: float) -> T | None:
        """Take the next thing, or None when none came in time."""
        while not self._things:
            if not self._wakeup.wait(timeout_s):
                return None
        return self._things.popleft()
