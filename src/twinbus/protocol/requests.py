"""A request: a command in progress, its caller, and how the caller gets the reply.

Clients, the server and the broker all use this class. The side that executes a command answers each
request once, with a value or an error. It does so during a turn of the broker or under a lock, so
`answer` and `fail` must neither block nor submit further commands.
"""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from twinbus.errors import MessagingError, OperationTimeoutError
from twinbus.futures import RunningFuture
from twinbus.protocol.access import OWNER, Principal
from twinbus.protocol.commands import Command


class Request:
    """A request without a waiting caller: its reply is dropped. Subclasses deliver the reply."""

    __slots__ = ("command", "principal")

    def __init__(self, command: Command[Any], principal: Principal = OWNER) -> None:
        self.command: Any = command  # Any: a request may contain any command
        self.principal = principal  # the rights of the request are those of its principal

    def answer(self, value: Any) -> None:
        """Set the reply."""

    def fail(self, error: MessagingError) -> None:
        """Set the error as the reply."""


class BlockingRequest(Request):
    """A request whose caller blocks: a minimal future."""

    __slots__ = ("_answered", "_error", "_value", "done")

    def __init__(self, command: Command[Any]) -> None:
        self.command, self.principal = command, OWNER  # inlined from Request.__init__
        self.done = False
        self._value: Any = None
        self._error: MessagingError | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def answer(self, value: Any) -> None:
        """Set the reply and wake the caller."""
        if not self.done:
            self._value, self.done = value, True
            self._answered.release()

    def fail(self, error: MessagingError) -> None:
        """Set the error and wake the caller."""
        if not self.done:
            self._error, self.done = error, True
            self._answered.release()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the reply; return it, or raise the error."""
        if not self._answered.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise unanswered(timeout_s or 0, self.command)
        if self._error is not None:
            raise self._error.with_traceback(None)  # several callers may raise this error object
        return self._value


class FutureRequest(Request):
    """A request with a future, which is completed after the turn, without locks.

    The thread that completes a future runs its callbacks, and a callback may submit commands. So
    an answered request waits in `answered` until the owner of this queue calls `complete_all`.
    """

    __slots__ = ("_answered", "_done", "_error", "_value", "future")

    def __init__(self, command: Command[Any], answered: "deque[FutureRequest]") -> None:
        super().__init__(command)
        self.future: Future[Any] = RunningFuture()
        self._answered = answered
        self._done = False
        self._value: Any = None
        self._error: MessagingError | None = None

    def answer(self, value: Any) -> None:
        """Keep the reply until `complete`."""
        if not self._done:
            self._done, self._value = True, value
            self._answered.append(self)

    def fail(self, error: MessagingError) -> None:
        """Keep the error until `complete`."""
        if not self._done:
            self._done, self._error = True, error
            self._answered.append(self)

    def complete(self) -> None:
        """Complete the future."""
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)


def complete_all(answered: "deque[FutureRequest]") -> None:
    """Complete the futures of answered requests; their callbacks may cause further answers."""
    while answered:
        try:
            request = answered.popleft()
        except IndexError:  # another thread has taken the last one
            return
        request.complete()


def unanswered(
    seconds: float, command: Command[Any] | None = None, *, peer: str = ""
) -> OperationTimeoutError:
    """Return the error of a request without a reply in time; name what is known about it."""
    asked = "" if command is None else f" to {type(command).__name__}{_target_of(command)}"
    source = f" from {peer}" if peer else ""
    return OperationTimeoutError(
        f"no reply{asked}{source} within {seconds:.3g} s, so the command may or may not have been "
        "carried out. Check its effect before you repeat it"
    )


def _target_of(command: Command[Any]) -> str:
    """Return which entity a command is for; an empty text if it names none."""
    for named in (command, getattr(command, "description", None)):
        path = getattr(named, "path", None)
        if isinstance(path, str):
            return f" for {path}"
    return ""
