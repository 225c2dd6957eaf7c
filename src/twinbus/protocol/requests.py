"""A request: a command under way, who asks it, and how its reply goes back.

Everyone who waits for a reply is one of these, in a client, in a server and in the broker. The side
that carries a command out answers each request once: with a value or with an error. It does so
while it holds the turn or a lock, so `answer` and `fail` must neither block nor ask back.
"""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from twinbus.errors import MessagingError, OperationTimeoutError
from twinbus.protocol.access import OWNER, Principal
from twinbus.protocol.commands import Command


class Request:
    """A request nobody waits for: the reply is dropped. Others say what happens to it."""

    __slots__ = ("command", "principal")

    def __init__(self, command: Command[Any], principal: Principal = OWNER) -> None:
        self.command: Any = command  # typed by its reader: a request may hold any command
        self.principal = principal  # whose rights the request has

    def answer(self, value: Any) -> None:
        """Give the reply."""

    def fail(self, error: MessagingError) -> None:
        """Say why there is none."""


class BlockingRequest(Request):
    """A request whose caller blocks: a future with nothing but what blocking needs."""

    __slots__ = ("_answered", "_error", "_value", "done")

    def __init__(self, command: Command[Any]) -> None:
        self.command, self.principal = command, OWNER  # as Request does, without the call
        self.done = False
        self._value: Any = None
        self._error: MessagingError | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def answer(self, value: Any) -> None:
        """Give the caller its reply."""
        if not self.done:
            self._value, self.done = value, True
            self._answered.release()

    def fail(self, error: MessagingError) -> None:
        """Give the caller an error to raise."""
        if not self.done:
            self._error, self.done = error, True
            self._answered.release()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the reply; return it, or raise the error."""
        if not self._answered.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise unanswered(timeout_s or 0)
        if self._error is not None:
            raise self._error.with_traceback(None)  # others may be raising it too
        return self._value


class FutureRequest(Request):
    """A request whose reply goes to a future, once nobody holds the turn or the lock.

    The thread that completes a future runs its callbacks, and a callback may submit commands. So
    an answered request waits in `answered` until its owner calls `complete`.
    """

    __slots__ = ("_answered", "_done", "_error", "_value", "future")

    def __init__(self, command: Command[Any], answered: "deque[FutureRequest]") -> None:
        super().__init__(command)
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # what was handed over cannot be taken back
        self._answered = answered
        self._done = False
        self._value: Any = None
        self._error: MessagingError | None = None

    def answer(self, value: Any) -> None:
        """Keep the reply for the future."""
        if not self._done:
            self._done, self._value = True, value
            self._answered.append(self)

    def fail(self, error: MessagingError) -> None:
        """Keep the error for the future."""
        if not self._done:
            self._done, self._error = True, error
            self._answered.append(self)

    def complete(self) -> None:
        """Give the future its outcome."""
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)


def complete_all(answered: "deque[FutureRequest]") -> None:
    """Complete the futures of answered requests; their callbacks may answer more."""
    while answered:
        try:
            request = answered.popleft()
        except IndexError:  # another thread took the last one
            return
        request.complete()


def unanswered(seconds: float) -> OperationTimeoutError:
    """Return the error of a request that was not answered in time."""
    return OperationTimeoutError(
        f"no answer within {seconds:.3g} s; whether the work was done is unknown"
    )
