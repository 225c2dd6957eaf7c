"""A future that creates its lock only when a caller waits.

A future of the standard library creates a lock in its constructor. That takes longer than the rest
of a pipelined send, and most futures are done before a caller waits for them. This future creates
the lock when the first caller waits for it or adds a callback.
"""

import threading
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, TypeVar

T = TypeVar("T")

_UNUSED = threading.Condition()  # of futures that were done before a caller waited


class RunningFuture(Future[T]):
    """The future of work that was handed over: it cannot be cancelled."""

    def __init__(self) -> None:  # without the base class, which makes a lock
        self._state = RUNNING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Create the lock at its first use; all threads get the same lock."""
        if name != "_condition":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.__dict__.setdefault("_condition", threading.Condition())

    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> T:
        """Wait until the work is done; return its result or raise its error."""
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[no-any-return]
        return super().result(timeout)

    def set_result(self, result: T) -> None:
        """Finish with a result."""
        if "_condition" in self.__dict__ or self._state == FINISHED:
            super().set_result(result)
        else:
            self._result = result
            self._finish()

    def set_exception(self, exception: BaseException | None) -> None:
        """Finish with an error."""
        if "_condition" in self.__dict__ or self._state == FINISHED:
            super().set_exception(exception)
        else:
            self._exception = exception
            self._finish()

    def _finish(self) -> None:
        """Mark the work as done, and wake threads that began to wait in the meantime."""
        self._state = FINISHED
        condition = self.__dict__.setdefault("_condition", _UNUSED)
        if condition is _UNUSED:
            return
        with condition:
            for waiter in self._waiters:
                if self._exception is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            condition.notify_all()
        self._invoke_callbacks()
