"""Answers that wait for a slow log: their settlements are written with a later record.

While the log is slow, the engine does not write commits that only settle messages. It keeps their
entries and their answers. The answers are sent after the next record that the log accepts. If the
log refuses that record, the requests get its error.
"""

from dataclasses import dataclass, field
from typing import Any

from twinbus.broker.store.commit import Commit
from twinbus.broker.turn.isolation import has_settled
from twinbus.errors import MessagingError
from twinbus.protocol.operations import Operation
from twinbus.protocol.requests import Request


@dataclass(slots=True)
class DelayedAnswers:
    """The replies, refusals and metered operations of commits that are not written yet."""

    _replies: list[tuple[Request, Any]] = field(default_factory=list)
    # Their commands have settled some of their messages.
    _refusals: list[tuple[Request, MessagingError]] = field(default_factory=list)
    _operations: list[Operation] = field(default_factory=list)  # the operations of the replies

    def requests(self) -> list[Request]:
        """Return the requests whose answers wait."""
        return [request for request, _ in (*self._replies, *self._refusals)]

    def delay(self, commit: Commit) -> None:
        """Let the replies of a commit wait.

        Refusals wait, too, if their command has settled some of its messages.
        """
        self._replies += commit.replies
        self._refusals += [
            (request, error) for request, error in commit.refusals if has_settled(error)
        ]
        self._operations += commit.operations
        commit.replies.clear()
        commit.refusals[:] = [
            (request, error) for request, error in commit.refusals if not has_settled(error)
        ]
        commit.operations.clear()

    def add_to(self, commit: Commit) -> None:
        """Add the answers that wait to those of this commit, whose record has their entries."""
        if self._replies or self._refusals:
            commit.replies += self._replies
            commit.refusals += self._refusals
            commit.operations += self._operations
            self.forget()

    def forget(self) -> None:
        """Forget all answers, because the engine restarts from its log."""
        self._replies, self._refusals, self._operations = [], [], []
