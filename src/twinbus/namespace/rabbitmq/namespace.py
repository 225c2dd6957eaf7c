"""Implements the contract of namespaces for a RabbitMQ broker or cluster.

An event loop owns the connections; it starts with the first command (driving.py). A caller that
waits for its reply runs the loop itself when nobody else does. Other commands are queued, and the
thread that runs the loop is woken once for all of them.
"""

import logging
import threading
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
from twinbus.limits import GRACE_S, TRY_TIMEOUT
from twinbus.namespace.rabbitmq.driving import SharedLoop
from twinbus.namespace.rabbitmq.runner import CAPABILITIES, RabbitJob
from twinbus.namespace.rabbitmq.topology import NAME
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest, Request
from twinbus.protocol.table import check_supported

R = TypeVar("R")
_PIKA_LOG = logging.getLogger("pika")
if _PIKA_LOG.level == logging.NOTSET:  # pika logs errors that we raise anyway
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
        self._loop: SharedLoop | None = None
        self._left: list[SharedLoop] = []  # loops of the parent process, after a fork
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
            self._shared_loop().hand_over(RabbitJob(request), timeout.total_seconds())
        except MessagingError as error:
            request.fail(error)
        return request.future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        check_supported(command, NAME, CAPABILITIES)
        request = BlockingRequest(command)
        job = RabbitJob(request)
        loop = self._shared_loop()
        try:
            return loop.answer(job, request, timeout_s)  # type: ignore[no-any-return]
        except OperationTimeoutError as error:
            if job.dispatch is not None and job.dispatch.is_accepted:
                return request.result(GRACE_S)  # type: ignore[no-any-return]
            loop.withdraw(job)
            raise job.with_accepted(error) from None
        except BaseException:
            loop.withdraw(job)  # the caller was interrupted
            raise

    def _shared_loop(self) -> SharedLoop:
        loop = self._loop
        if loop is not None and not self._closed:
            return loop
        with self._lock:
            if self._closed:
                raise NamespaceClosedError(NAMESPACE_CLOSED)
            if self._loop is None:
                self._loop = SharedLoop(self._connection, self._clock)
            return self._loop

    def close(self) -> None:
        """Finish the commands in progress and close the connections."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _after_fork(self) -> None:
        """Leave the connections to the parent process."""
        self._lock = threading.Lock()
        if self._loop is not None:
            self._left.append(self._loop)  # must not be closed: the parent shares its sockets
            self._loop = None
