"""The one writer: a thread that takes what waits and gives it to the engine, turn after turn.

Commands that come during a sync wait together and share the next one: that is group commit. With
`threaded=False` turns run inside `submit` and when the clock is moved: for simulations.
"""

import logging
import threading
from collections import deque
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from twinbus.broker.commands import Command, DeleteEntity
from twinbus.broker.engine import Engine, EngineSettings, Storages
from twinbus.broker.management import CHANGES_DIRECTORY
from twinbus.clock import Clock
from twinbus.errors import MessagingError, NamespaceClosedError

R = TypeVar("R")
_log = logging.getLogger("twinbus.broker")


class _Asker:
    """A caller waiting for a future."""

    __slots__ = ("command", "future")

    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.future: Future[Any] = Future()

    def answer(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: MessagingError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Writer:
    """Feeds an engine from many threads."""

    def __init__(
        self,
        settings: EngineSettings,
        clock: Clock,
        storages: Storages | None = None,
        *,
        threaded: bool = True,
    ) -> None:
        self.engine = Engine(settings, clock, storages or Storages())
        self._clock = clock
        self._arrivals: SimpleQueue[_Asker | None] = SimpleQueue()  # None: look at the time
        self._waiting: deque[_Asker] = deque()  # arrived, not in a turn yet
        self._turning = threading.Lock()
        self._end: MessagingError | None = None  # why no more commands are taken
        self._thread: threading.Thread | None = None
        self._stop_listening = clock.on_advance(self._wake)
        if threaded:
            self._thread = threading.Thread(target=self._run, name="twinbus-writer", daemon=True)
            self._thread.start()

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; the future holds its reply or its error."""
        asker = _Asker(command)
        if self._end is not None:
            asker.fail(self._end)
        else:
            self._arrivals.put(asker)
            if self._thread is None:
                self._pump()
        return asker.future

    def _wake(self) -> None:
        if self._thread is None:
            self._pump()
        else:
            self._arrivals.put(None)

    # -- turns ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._end is None:
            self._take_arrivals(self._clock.seconds_until(self._next_event()))
            self._turn()
        self._finish()

    def _pump(self) -> None:
        """Run turns until nothing is left to do at this time."""
        if not self._turning.acquire(blocking=False):
            return  # a turn is running further up this thread and will see what arrived
        try:
            self._take_arrivals(0)
            while self._waiting or self._next_event() <= self._clock.now_us():
                self._turn()
                self._take_arrivals(0)
        finally:
            self._turning.release()

    def _next_event(self) -> int:
        return 0 if self._waiting else self.engine.next_event

    def _take_arrivals(self, timeout: float | None) -> None:
        try:
            asker = (
                self._arrivals.get(timeout=timeout) if timeout != 0 else self._arrivals.get_nowait()
            )
            while True:
                if asker is not None:
                    self._waiting.append(asker)
                asker = self._arrivals.get_nowait()
        except Empty:
            return

    def _turn(self) -> None:
        try:
            self.engine.turn(self._next_group())
            for path in self.engine.namespace.take_idle():
                self.engine.turn([_Asker(DeleteEntity(path))])
        except BaseException as error:  # healing itself failed: nothing more can be promised
            _log.exception("the namespace stops")
            self._end = MessagingError(f"the namespace stopped: {error!r}")
            self._end.__cause__ = error

    def _next_group(self) -> list[_Asker]:
        """Return what goes into one turn; a change of the directory gets one of its own."""
        if self._waiting and isinstance(self._waiting[0].command, CHANGES_DIRECTORY):
            return [self._waiting.popleft()]
        group = []
        while self._waiting and not isinstance(self._waiting[0].command, CHANGES_DIRECTORY):
            group.append(self._waiting.popleft())
        return group

    # -- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what was handed over, refuse what comes later, let go of the directory."""
        closing = NamespaceClosedError("the namespace was closed")
        if self._thread is None:
            if self._end is None:
                self._end = closing
                self._finish()
        else:
            self._end = self._end or closing
            self._wake()
            self._thread.join()

    def _finish(self) -> None:
        self._stop_listening()
        self._take_arrivals(0)
        while self._waiting and isinstance(self._end, NamespaceClosedError):
            self._turn()
        for asker in self._waiting:
            assert self._end is not None
            asker.fail(self._end)
        for ticket in self.engine.namespace.waiting_tickets():
            assert self._end is not None
            ticket.fail(self._end)
        self.engine.close()
