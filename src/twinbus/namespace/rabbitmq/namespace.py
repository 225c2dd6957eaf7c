"""Implements the contract of namespaces for a RabbitMQ broker or cluster.

A thread of this namespace runs an event loop that owns the connections; it starts with the first
command. Callers put commands into a queue and wake the loop, once for all waiting commands.
"""

import asyncio
import logging
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

from twinbus.clock import Clock, SystemClock
from twinbus.connection import ConnectionString
from twinbus.errors import (
    NAMESPACE_CLOSED,
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
)
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import GRACE_S, MAX_CLOSE_WAIT, TRY_TIMEOUT
from twinbus.namespace.rabbitmq.runner import CAPABILITIES, CommandRunner, RabbitJob
from twinbus.namespace.rabbitmq.topology import NAME
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest, Request
from twinbus.protocol.table import check_supported

R = TypeVar("R")
_PIKA_LOG = logging.getLogger("pika")
if _PIKA_LOG.level == logging.NOTSET:  # we raise what pika logs as errors
    _PIKA_LOG.setLevel(logging.CRITICAL)


class _LoopRequest(Request):
    """A request with a future for its reply; only the loop completes it."""

    __slots__ = ("future",)

    def __init__(self, command: Command[Any]) -> None:
        super().__init__(command)
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # a submitted command cannot be cancelled

    def answer(self, value: Any) -> None:
        """Complete the future with the reply."""
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: MessagingError) -> None:
        """Complete the future with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class RabbitNamespace(Closable):
    """Connects to a RabbitMQ; opens nothing before the first command.

    A forked process gets its own connections when it first uses the namespace.
    """

    def __init__(self, connection: ConnectionString, clock: Clock | None = None) -> None:
        self._connection = connection
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._left: list[_LoopThread] = []  # those of the parent process, after a fork
        self._closed = False
        on_fork(self._after_fork)

    @property
    def id(self) -> str:
        """The id from the connection string: RabbitMQ has none that clients can read."""
        return self._connection.namespace_id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of RabbitMQ."""
        return CAPABILITIES

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; never blocks, never raises.

        The command is withdrawn after the default try timeout plus the wait of a receive.
        """
        request = _LoopRequest(command)
        try:
            check_supported(command, NAME, CAPABILITIES)
            wait = getattr(command, "wait", None)
            timeout = TRY_TIMEOUT if wait is None else TRY_TIMEOUT + wait
            self._loop_thread().hand_over(RabbitJob(request), timeout.total_seconds())
        except MessagingError as error:
            request.fail(error)
        return request.future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        check_supported(command, NAME, CAPABILITIES)
        request = BlockingRequest(command)
        job = RabbitJob(request)
        thread = self._loop_thread()
        thread.hand_over(job, None)
        try:
            return request.result(timeout_s)  # type: ignore[no-any-return]
        except OperationTimeoutError as error:
            if job.dispatch is not None and job.dispatch.is_accepted:
                return request.result(GRACE_S)  # type: ignore[no-any-return]
            thread.withdraw(job)
            raise job.with_accepted(error) from None
        except BaseException:
            thread.withdraw(job)  # the caller was interrupted
            raise

    def _loop_thread(self) -> "_LoopThread":
        thread = self._thread
        if thread is not None and not self._closed:
            return thread
        with self._lock:
            if self._closed:
                raise NamespaceClosedError(NAMESPACE_CLOSED)
            if self._thread is None:
                self._thread = _LoopThread(self._connection, self._clock)
            return self._thread

    def close(self) -> None:
        """Finish the commands in progress and close the connections."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _after_fork(self) -> None:
        """Leave the connections to the parent process."""
        self._lock = threading.Lock()
        if self._thread is not None:
            self._left.append(self._thread)  # must not be closed: the parent shares its sockets
            self._thread = None


class _LoopThread:
    """A thread with an event loop, and the queue of its commands."""

    def __init__(self, connection: ConnectionString, clock: Clock) -> None:
        self._loop = asyncio.new_event_loop()
        self._runner: CommandRunner | None = None
        self._arrivals: deque[tuple[RabbitJob, float | None]] = deque()
        self._is_woken = False
        self._lock = threading.Lock()  # ensures that no command is queued after the end
        self._is_closing = False
        self._settings = (connection, clock)
        self._thread = threading.Thread(target=self._run, name="twinbus-rabbitmq", daemon=True)
        self._thread.start()

    def hand_over(self, job: RabbitJob, timeout_s: float | None) -> None:
        """Queue a command for the loop."""
        self._arrivals.append((job, timeout_s))
        if not self._is_woken:
            self._is_woken = True
            self._call(self._take)

    def withdraw(self, job: RabbitJob) -> None:
        """Ask the loop to stop a command."""
        self._call(self._withdraw, job)

    def _call(self, method: Any, *arguments: Any) -> None:
        with self._lock:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(method, *arguments)
                return
        self._refuse_arrivals()

    def _refuse_arrivals(self) -> None:
        while self._arrivals:
            job, _ = self._arrivals.popleft()
            job.request.fail(NamespaceClosedError(NAMESPACE_CLOSED))

    # -- on the loop ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._runner = CommandRunner(*self._settings)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _take(self) -> None:
        assert self._runner is not None
        self._is_woken = False
        while self._arrivals:
            job, timeout_s = self._arrivals.popleft()
            self._runner.begin(job, timeout_s)

    def _withdraw(self, job: RabbitJob) -> None:
        assert self._runner is not None
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
        if self._thread is not threading.current_thread():
            self._thread.join(MAX_CLOSE_WAIT.total_seconds() + GRACE_S)
        self._refuse_arrivals()

    def _begin_close(self) -> None:
        self._take()
        self._closing = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        assert self._runner is not None
        try:
            await self._runner.close()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()
