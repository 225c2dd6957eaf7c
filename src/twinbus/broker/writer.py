"""The one writer: whoever holds the turn decides, commits and answers; nobody else touches state.

A caller that finds nobody at work takes the turn itself and saves two thread switches. What comes
during a turn waits, and a thread of the writer takes all of it together in the next: that is group
commit. Callers that were answered together tend to come back together, so the thread gives them a
moment before it goes on. The same thread does what only time brings. With `threaded=False` there is
no thread and time passes when the clock is moved: for simulations.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from twinbus.broker.commands import Command
from twinbus.broker.engine import Engine, EngineSettings, Storages
from twinbus.broker.management import CHANGES_DIRECTORY
from twinbus.clock import Clock
from twinbus.errors import MessagingError, NamespaceClosedError
from twinbus.limits import GATHER_S, NEVER_US

R = TypeVar("R")
_log = logging.getLogger("twinbus.broker")


class _Promise:
    """A command whose reply goes to a future."""

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


class _Call:
    """A command whose caller blocks: a future with nothing but what blocking needs."""

    __slots__ = ("_answered", "_error", "_value", "command", "done")

    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.done = False
        self._value: Any = None
        self._error: MessagingError | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def answer(self, value: Any) -> None:
        if not self.done:
            self._value, self.done = value, True
            self._answered.release()

    def fail(self, error: MessagingError) -> None:
        if not self.done:
            self._error, self.done = error, True
            self._answered.release()

    def result(self) -> Any:
        self._answered.acquire()
        if self._error is not None:
            raise self._error
        return self._value


_Asker = _Promise | _Call


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
        self._arrivals: deque[_Asker] = deque()
        self._turn_lock = threading.Lock()
        self._signals: SimpleQueue[None] = SimpleQueue()  # wakes the thread
        self._sleeps_until = NEVER_US
        self._expected = 0  # callers the thread waits for; 0: it does not
        self._gathered = threading.Event()
        self._end: MessagingError | None = None  # why no more commands are taken
        self._thread: threading.Thread | None = None
        self._stop_listening = clock.on_advance(self._on_advance)
        if threaded:
            self._thread = threading.Thread(target=self._run, name="twinbus-writer", daemon=True)
            self._thread.start()

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; the future holds its reply or its error."""
        promise = _Promise(command)
        self._arrive(promise)
        if self._thread is None:
            self._take_turns()
        else:
            self._signals.put(None)
        return promise.future

    def ask(self, command: Command[R]) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        call = _Call(command)
        self._arrive(call)
        self._take_turns()
        return call.result()  # type: ignore[no-any-return]

    def _arrive(self, asker: _Asker) -> None:
        if self._end is not None:
            asker.fail(self._end)
            return
        self._arrivals.append(asker)
        if self._expected and len(self._arrivals) >= self._expected:
            self._gathered.set()

    def _on_advance(self) -> None:
        if self._thread is None:
            self._take_turns()
        else:
            self._signals.put(None)

    # -- turns ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._end is None:
            if not self._arrivals:
                self._sleeps_until = self.engine.next_event
                with suppress(Empty):
                    self._signals.get(timeout=self._clock.seconds_until(self._sleeps_until))
                self._sleeps_until = 0
            with self._turn_lock:
                self._turn_while_due(gather=True)

    def _take_turns(self) -> None:
        """Do what waits, unless somebody is at it; what comes meanwhile is the thread's."""
        if not self._turn_lock.acquire(blocking=False):
            return
        try:
            if self._thread is None:
                self._turn_while_due()
            else:
                self._turn()
        finally:
            self._turn_lock.release()
        if self._thread is not None and (
            self._arrivals or self.engine.next_event < self._sleeps_until
        ):
            self._signals.put(None)

    def _turn_while_due(self, *, gather: bool = False) -> None:
        while self._end is None and (
            self._arrivals or self.engine.next_event <= self._clock.now_us()
        ):
            callers = self._turn() + len(self._arrivals)
            if gather and callers > 1:
                self._gather(callers)

    def _gather(self, expected: int) -> None:
        """Let the callers just answered join those that wait, so that they share the next turn."""
        self._gathered.clear()
        self._expected = expected
        if len(self._arrivals) < expected:
            self._gathered.wait(GATHER_S)
        self._expected = 0

    def _turn(self) -> int:
        """Run one turn; return how many commands it had."""
        group = self._next_group()
        try:
            self.engine.turn(group)
        except BaseException as error:  # noqa: BLE001 - healing failed: no more can be promised
            _log.exception("the namespace stops")
            stopped = MessagingError(f"the namespace stopped and must be opened anew: {error!r}")
            stopped.__cause__ = error
            self._stop(stopped, group)
            self.engine.abandon()
        return len(group)

    def _stop(self, reason: MessagingError, unanswered: Sequence[_Asker] = ()) -> None:
        """Take no more commands, and tell everyone who still waits."""
        self._end = reason
        self._stop_listening()
        waiting = self.engine.namespace.waiting_tickets()
        for ticket in (*unanswered, *self._arrivals, *waiting):
            ticket.fail(reason)
        self._arrivals.clear()

    def _next_group(self) -> list[_Asker]:
        """Return what goes into one turn; a change of the directory gets one of its own."""
        arrivals = self._arrivals
        if arrivals and isinstance(arrivals[0].command, CHANGES_DIRECTORY):
            return [arrivals.popleft()]
        group = []
        while arrivals and not isinstance(arrivals[0].command, CHANGES_DIRECTORY):
            group.append(arrivals.popleft())
        return group

    # -- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what was handed over, refuse what comes later, let go of the directory."""
        with self._turn_lock:
            while self._arrivals and self._end is None:
                self._turn()
            if self._end is None:
                self._stop(NamespaceClosedError("the namespace was closed"))
                self.engine.close()
        if self._thread is not None:
            self._signals.put(None)
            self._thread.join()
