"""Threads that carry out commands of a namespace whose SDK blocks.

Threads are started when there is work and nobody is free, up to a bound, and end when they have had
none for a while. They are daemons: a receive that waits for hours must not keep a process from
ending.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from twinbus.limits import AZURE_THREAD_IDLE_S

_log = logging.getLogger("twinbus.azure")
Work = Callable[[], None]


class Crew:
    """Carries out work in order, as much of it side by side as it has threads."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._changed = threading.Condition()
        self._work: deque[Work] = deque()
        self._threads = 0
        self._free = 0

    def submit(self, work: Work) -> None:
        """Have work done; it must not raise."""
        with self._changed:
            self._work.append(work)
            if self._free >= len(self._work):
                self._changed.notify()
                return
            if self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._next()
            if work is None:
                return
            try:
                work()
            except Exception:  # noqa: BLE001 - the thread goes on with other work
                _log.exception("work for a Service Bus failed in a way that nobody expected")

    def _next(self) -> Work | None:
        with self._changed:
            self._free += 1
            try:
                if self._changed.wait_for(lambda: bool(self._work), AZURE_THREAD_IDLE_S):
                    return self._work.popleft()
                self._threads -= 1
                return None
            finally:
                self._free -= 1
