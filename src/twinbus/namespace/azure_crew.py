"""A thread pool that executes the commands of a namespace whose SDK blocks.

A thread starts when there is work and no idle thread, up to a bound. It ends when it has been idle
for a while. The threads are daemons: a receive that waits for hours must not keep the process from
exiting.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from twinbus.limits import AZURE_THREAD_IDLE_S

_log = logging.getLogger("twinbus.azure")
Work = Callable[[], None]


class Crew:
    """Executes work in order, with a limited number of threads in parallel."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._changed = threading.Condition()
        self._work: deque[Work] = deque()
        self._threads = 0
        self._free = 0

    def submit(self, work: Work) -> None:
        """Queue work for a thread; the work must not raise."""
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
            except Exception:  # noqa: BLE001 - the thread continues with other work
                _log.exception(
                    "A task for a Service Bus failed because of an internal error; a command may "
                    "get no reply until its timeout. Report the error as a defect of Twinbus"
                )

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
