"""Staging: messages get their rows in a queue before the log has them.

The intake of sends calls these functions. Staged rows are PENDING: receivers do not see them. When
the commit is durable, its effect makes them visible. If the log refuses the commit, the effect
drops them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twinbus.broker.lifecycle import TABLE, Cause, State
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.waiting import Rows
from twinbus.broker.store.commit import Commit, Effect
from twinbus.limits import NEVER_US
from twinbus.message import Int64s


class PlannedPlace(NamedTuple):
    """The queue that gets a message of a small send, and the values of its row there."""

    queue: Queue
    cause: Cause
    enqueued: int  # for a scheduled message: when it is due
    expires: int
    size: int
    session_id: str  # empty: the message has none, and the queue needs none


@dataclass(slots=True)  # not frozen, which would take four times as long: one is made per send
class _Staged(Effect):
    """Messages that a queue has staged in consecutive rows."""

    queue: Queue
    first: int  # the first row
    count: int
    batch: int
    cause: Cause
    sessions: list[int] | None = None
    sequence: Int64s | None = None  # only with sessions

    def durable(self) -> None:
        """Make the messages visible."""
        queue = self.queue
        queue.waiting.admit(self.first, self.count, self.cause)
        queue.shared.bodies.retain_rows(self.batch, self.count)
        if self.sessions is not None and self.sequence is not None:
            queue.sessions.expect(self.sessions, -1)
            queue.sessions.add(self.sessions, self.sequence)
        if queue.waiters.line:
            queue.touch()

    def refused(self) -> None:
        """Drop the messages."""
        rows = np.arange(self.first, self.first + self.count)
        self.queue.waiting.step(rows, Cause.REFUSED)
        if self.sessions is not None:
            self.queue.sessions.expect(self.sessions, -1)
            self.queue.sessions.forget_idle(self.sessions)


def stage(
    queue: Queue, rows: Rows, cause: Cause, session_ids: Sequence[str] | None, commit: Commit
) -> None:
    """Add rows as PENDING; they become visible when the commit is durable."""
    ids = None
    if session_ids is not None:
        ids = [queue.sessions.number_of(name) for name in session_ids]
        queue.sessions.expect(ids, 1)
        rows = rows._replace(session=np.array(ids, np.int32))
    first = queue.waiting.add(rows)
    queue.touch()
    count = len(rows.sequence)
    commit.effects.append(_Staged(queue, first, count, rows.batch, cause, ids, rows.sequence))


def stage_one(queue: Queue, enqueued: int, size: int, commit: Commit) -> int:
    """Add the only message of the next batch, as `stage` does; return its sequence number."""
    number = queue.next_sequence
    queue.next_sequence = number + 1
    batch = commit.next_batch
    first = queue.waiting.add_one(number, enqueued, size, batch)
    queue.shared.changed_queues[queue.entity] = queue
    commit.effects.append(_Staged(queue, first, 1, batch, Cause.ENQUEUED))
    return number


def stage_row(queue: Queue, placed: PlannedPlace, batch: int, row: int, commit: Commit) -> int:
    """Add one message of a batch, as `stage` does; return its sequence number."""
    number = queue.next_sequence
    queue.next_sequence = number + 1
    more: dict[str, int] = {}
    if placed.expires != NEVER_US:
        more["expires"] = placed.expires
    if placed.cause is Cause.SCHEDULED:
        more["due"] = placed.enqueued
    ids = sequence = None
    if queue.settings.requires_session:
        ids, sequence = [queue.sessions.number_of(placed.session_id)], np.array([number])
        queue.sessions.expect(ids, 1)
        more["session"] = ids[0]
    first = queue.waiting.add_one(number, placed.enqueued, placed.size, batch, row, **more)
    queue.shared.changed_queues[queue.entity] = queue
    commit.effects.append(_Staged(queue, first, 1, batch, placed.cause, ids, sequence))
    return number


def note_staged(queue: Queue, sequence: Int64s, cause: Cause, commit: Commit) -> None:
    """Add the places of staged rows to the commit.

    The caller omits this if the queue gets all rows of a batch: the batch's header says so.
    """
    at = queue.waiting.find(sequence)
    queue.note_places(commit.tentative, at, TABLE[State.PENDING, cause])
