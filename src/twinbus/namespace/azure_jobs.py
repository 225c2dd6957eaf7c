"""Jobs: commands in progress at Azure Service Bus, and the order of sends.

The caller of a command waits for the future of its job, in its own thread; a thread of a crew
executes the job. The caller may stop waiting at any moment: either the job is abandoned, and what
it did is undone, or its reply has just arrived. Sends to one entity are executed one after another,
in the order of their calls.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from twinbus.errors import MessagingError
from twinbus.namespace.azure_links import AzureLink
from twinbus.protocol import commands as c


class AzureJob:
    """A command in progress, and the future of its caller."""

    def __init__(self, command: c.Command[Any], timeout_s: float) -> None:
        self.command: Any = command
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # a submitted command cannot be cancelled
        self.link: AzureLink | None = None  # the link that it uses now
        self.is_abandoned = False
        self._deadline = time.monotonic() + timeout_s
        self._end_lock = threading.Lock()  # decides between `abandon` and `answer`
        self._is_answered = False  # the future has a result, or gets it now

    @property
    def left_s(self) -> float:
        """How much time the command has left."""
        return max(self._deadline - time.monotonic(), 0.0)

    def abandon(self) -> bool:
        """Stop waiting for the reply; return False if the reply has just arrived."""
        with self._end_lock:
            if self._is_answered:
                return False
            self.is_abandoned = True
        link = self.link
        if link is not None:
            link.abort()
        return True

    def answer(self, value: Any, error: MessagingError | None = None) -> bool:
        """Complete the future; return False if nobody waits for it any more."""
        with self._end_lock:
            if self.is_abandoned:
                return False
            self._is_answered = True
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)
        return True


class SendLanes:
    """The sends that wait for an earlier send, by path. Callers must hold the namespace's lock."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[AzureJob]] = {}

    def queue(self, job: AzureJob) -> bool:
        """Queue a send behind the others to its entity; return False if it is the first."""
        waiting = self._lanes.get(job.command.path)
        if waiting is not None:
            waiting.append(job)
            return True
        self._lanes[job.command.path] = deque()
        return False

    def next(self, path: str) -> AzureJob | None:
        """Return the next send to an entity, after one was executed."""
        waiting = self._lanes[path]
        if waiting:
            return waiting.popleft()
        del self._lanes[path]
        return None
