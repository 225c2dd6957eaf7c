"""An event loop that is run by the callers, or by its own thread.

The thread that has the turn runs the loop. A caller takes the turn if nobody has it, and runs the
loop until its own command is complete: a single caller writes its frames and reads the reply, and
no thread is woken. Other callers put commands into a queue and wait. When the caller has its reply
while other commands are in progress, the loop's own thread takes the turn until none is left. It
also takes the turn when no caller has run the loop for a short time, so that heartbeats and
notifications of the broker are read.

A caller may be interrupted (Ctrl-C) while it runs the loop. An interrupted wait for the sockets
loses nothing. After an interrupted callback the state of a connection is unknown, so the
connections are closed and opened again; the callers of commands in progress get the error of a lost
connection, at the latest when their time is over.
"""

import asyncio
import selectors
import threading
import time
from collections import deque
from contextlib import suppress
from contextvars import Context
from typing import Any

from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.errors import NAMESPACE_CLOSED, NamespaceClosedError
from twinbus.limits import GRACE_S, MAX_CLOSE_WAIT, RABBITMQ_UNATTENDED_S
from twinbus.namespace.rabbitmq.runner import CommandRunner, RabbitJob
from twinbus.protocol.requests import BlockingRequest, unanswered


class _Selector(selectors.DefaultSelector):
    """Records whether an exception interrupted the wait for the sockets, or a callback."""

    is_waiting = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets."""
        self.is_waiting = True
        ready = super().select(timeout)
        self.is_waiting = False  # not reached if the wait was interrupted
        return ready


class SharedLoop:
    """An event loop with its thread, the queue of its commands, and the turn to run it."""

    def __init__(self, connection: ConnectionString, clock: Clock) -> None:
        self._selector = _Selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._runner = CommandRunner(connection, clock)
        self._context = Context()  # tasks and callbacks must not keep a caller's context
        self._arrivals: deque[tuple[RabbitJob, float | None]] = deque()
        self._is_woken = False
        self._turn = threading.Lock()
        self._turn_of = 0  # id of the thread that has the turn
        self._driven: RabbitJob | None = None  # the command of the caller that has the turn
        self._in_progress: set[RabbitJob] = set()
        self._needed = threading.Event()  # the loop's own thread must take the turn
        self._was_driven = False  # a caller has had the turn recently
        self._lock = threading.Lock()  # ensures that no command is queued after the end
        self._is_closing = False
        self._is_over = False
        self._closing: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="twinbus-rabbitmq", daemon=True)
        self._thread.start()

    # -- called by any thread ------------------------------------------------------------------

    def hand_over(self, job: RabbitJob, timeout_s: float | None) -> None:
        """Queue a command for the thread that has the turn."""
        self._arrivals.append((job, timeout_s))
        if not self._turn.locked():
            self._needed.set()  # the loop's own thread takes the arrivals
        elif not self._is_woken:
            self._is_woken = True
            self._call(self._take)
        if self._is_closing:
            self._refuse_arrivals()

    def answer(self, job: RabbitJob, request: BlockingRequest, timeout_s: float | None) -> Any:
        """Execute a command and return its reply; run the loop meanwhile if nobody does."""
        is_nested = asyncio._get_running_loop() is not None  # noqa: SLF001 - the documented fast way
        if is_nested or not self._turn.acquire(blocking=False):
            self.hand_over(job, None)
            return request.result(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._drive(job, timeout_s)
        if request.done or deadline is None:
            return request.result()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise unanswered(timeout_s or 0, job.request.command)
        return request.result(left_s)  # the loop was closed, and fails every command

    def withdraw(self, job: RabbitJob) -> None:
        """Ask the loop to stop a command."""
        self._call(self._withdraw, job)

    def _call(self, method: Any, *arguments: Any) -> None:
        with self._lock:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(method, *arguments, context=self._context)
                if not self._turn.locked():
                    self._needed.set()
                return
        self._refuse_arrivals()

    def _refuse_arrivals(self) -> None:
        with suppress(IndexError):  # the list is empty, perhaps because another thread emptied it
            while True:
                job, _ = self._arrivals.popleft()
                job.request.fail(NamespaceClosedError(NAMESPACE_CLOSED))

    # -- the turn ------------------------------------------------------------------------------

    def _drive(self, job: RabbitJob, timeout_s: float | None) -> None:
        """Run the loop until a command is complete or its time is over; releases the turn."""
        loop = self._loop
        timer = None
        try:
            if self._is_closing:
                job.request.fail(NamespaceClosedError(NAMESPACE_CLOSED))
                return
            self._turn_of, self._driven, self._was_driven = threading.get_ident(), job, True
            self._arrivals.append((job, None))
            self._selector.is_waiting = False  # it stays true after an interrupted wait
            self._take_at_once()
            if timeout_s is not None:
                timer = loop.call_later(timeout_s, loop.stop, context=self._context)
            loop.run_forever()
        except BaseException:
            if not self._selector.is_waiting:
                loop.call_soon(self._runner.cut, context=self._context)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._driven = None
            self._leave()

    def _take_at_once(self) -> None:
        """Start the commands, so that the loop does not poll its sockets first (a system call)."""
        asyncio._set_running_loop(self._loop)  # noqa: SLF001 - for code that runs a loop
        try:
            self._context.run(self._take)
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def _leave(self) -> None:
        """Release the turn; the loop's own thread takes it if there is something to do."""
        self._runner.write()  # the loop was stopped before it wrote the last frames
        self._turn_of = 0
        self._turn.release()
        if self._in_progress or self._arrivals or self._is_closing:
            self._needed.set()

    def _run(self) -> None:
        """Run the loop when it is needed, and when no caller has run it for a while."""
        asyncio.set_event_loop(self._loop)
        while not self._is_over:
            if not self._needed.wait(RABBITMQ_UNATTENDED_S) and self._was_driven:
                self._was_driven = False
                continue
            self._needed.clear()
            if not self._turn.acquire(blocking=False):
                continue  # the caller that has the turn reports whether this thread is needed
            self._turn_of = threading.get_ident()
            try:
                self._loop.call_soon(self._take, context=self._context)
                self._loop.run_forever()
            finally:
                self._leave()
        with self._turn:
            self._loop.close()

    # -- on the loop ---------------------------------------------------------------------------

    def _take(self) -> None:
        self._is_woken = False
        self._runner.gather()
        while self._arrivals:
            job, timeout_s = self._arrivals.popleft()
            self._in_progress.add(job)
            job.on_end = self._ended
            self._runner.begin(job, timeout_s)
        self._runner.write()

    def _ended(self, job: RabbitJob) -> None:
        """Stop the loop when the caller that runs it has its reply, or when nothing is left."""
        self._in_progress.discard(job)
        if job is self._driven or not (self._driven or self._in_progress or self._closing):
            self._loop.stop()

    def _withdraw(self, job: RabbitJob) -> None:
        self._take()
        self._runner.withdraw(job)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the commands in progress, then end the thread."""
        with self._lock:
            if self._is_closing:
                return
            self._loop.call_soon_threadsafe(self._begin_close)
            self._is_closing = True
        self._needed.set()
        if threading.get_ident() not in (self._thread.ident, self._turn_of):
            self._thread.join(MAX_CLOSE_WAIT.total_seconds() + GRACE_S)
        self._refuse_arrivals()

    def _begin_close(self) -> None:
        self._take()
        self._closing = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        try:
            await self._runner.close()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._is_over = True
            self._loop.stop()
