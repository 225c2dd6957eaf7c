"""The self-check: compares the counts of queues with their messages while the broker runs.

With a wrong count, a queue would accept too many messages or fail to deliver some. The thread with
the turn checks one queue each SELF_CHECK_INTERVAL_US. If the counts of a queue are wrong, the check
raises, and the engine restarts from its log (healing.py).
"""

from twinbus.broker.entities.directory import Directory
from twinbus.broker.lifecycle import BrokenInvariantError
from twinbus.limits import SELF_CHECK_INTERVAL_US


class InvariantError(BrokenInvariantError):
    """The counts of a queue do not match its messages."""


class SelfCheck:
    """Checks all queues of a namespace, one after the other."""

    def __init__(self, directory: Directory, now: int) -> None:
        self._directory = directory
        self._unchecked: list[int] = []  # numbers of queues
        self.due = now + SELF_CHECK_INTERVAL_US  # when the next queue is checked

    def shift(self, by: int) -> None:
        """Move the time of the next check, because the wall clock was set."""
        self.due += by

    def check_next(self, now: int) -> None:
        """Check the counts of the next queue; raise if they are wrong."""
        self.due = now + SELF_CHECK_INTERVAL_US
        if not self._unchecked:
            self._unchecked = [queue.entity for queue in self._directory.queues()]
        queue = self._directory.queue_numbered(self._unchecked.pop()) if self._unchecked else None
        faults = queue.waiting.faults() if queue is not None else []
        if queue is not None and faults:
            raise InvariantError(f"{queue.path}: {'; '.join(faults)}", path=queue.path)
