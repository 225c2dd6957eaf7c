"""Compaction: releases the space of settled messages while the broker runs.

Compaction works on the oldest segment. Its live messages are written again at the end of the log, a
few per turn, with the same sequence numbers and in their current state. When nothing needs the
segment any more, the log drops it. Facts (keyed values, see store/commit.py) need not be moved,
because every segment begins with all of them.

The engine calls this in a turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.lifecycle import DURABLE, State
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.waiting import NO_ROWS, Indices
from twinbus.broker.store.commit import Commit, Effect
from twinbus.broker.store.log import Log
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.limits import (
    CARRIED_ID_BYTES,
    COMPACTION_GARBAGE_RATIO,
    COMPACTION_STEP_BYTES,
    COMPACTION_STEP_QUEUES,
    FIRST_STEP_DIVISOR,
    MOVED_PLACE_BYTES,
)

_DURABLE = np.array([DURABLE.get(state, state) for state in State], np.uint8)


@dataclass(frozen=True, slots=True)
class _Moved(Effect):
    """Messages whose bodies are in the record of this commit, copied from an older batch."""

    queue: Queue
    at: Indices
    rows: npt.NDArray[np.int32]  # in the new batch
    batch: int  # number of the new batch

    def durable(self) -> None:
        """Make the messages refer to the new batch."""
        waiting, bodies = self.queue.waiting, self.queue.shared.bodies
        # Messages that were settled in the same commit are gone now.
        stays = waiting.get("state", self.at) != State.GONE.value
        at, rows = self.at[stays], self.rows[stays]
        bodies.release(waiting.get("batch", at))
        waiting.put("batch", at, self.batch)
        waiting.put("row", at, rows)
        bodies.retain(waiting.get("batch", at))


@dataclass(frozen=True, slots=True)
class _Emptied(Effect):
    """A segment that is not needed once the record is durable."""

    compaction: "Compaction"
    segment: int

    def durable(self) -> None:
        """Remove the segment."""
        self.compaction.drop(self.segment)


@dataclass(frozen=True, slots=True)
class _HistoryCarried(Effect):
    """Ids for duplicate detection that this commit copies from the oldest segment."""

    compaction: "Compaction"
    segment: int
    span: tuple[int, int]

    def refused(self) -> None:
        """Record that the old segment is still needed for these ids."""
        self.compaction.note_history(self.segment, *self.span)


class Compaction:
    """Moves live messages out of the oldest segment, step by step."""

    def __init__(
        self, log: Log, namespace: BrokerNamespace, may_forget: Callable[[int], bool]
    ) -> None:
        self._log = log
        self._namespace = namespace
        self._may_forget = may_forget  # whether records up to a number may be dropped
        self._bodies = namespace.shared.bodies
        # How many places were released, and how many segments existed, when `has_work` last
        # returned False because little space was wasted.
        self._looked_at: tuple[int, int] | None = None
        self._unsearched: list[int] = []  # numbers of the queues that the next steps search
        # The oldest segment, and the number of the last record when this segment was first found to
        # have no messages.
        self._emptied: tuple[int, int] | None = None
        self._history: dict[int, tuple[int, int]] = {}  # by segment: first, last time of its ids
        # A segment, and by which factor its messages grew when the last step with a bound copied
        # some of them: as columns, small messages take up to twenty times the space of rows.
        self._growth: tuple[int, float] | None = None

    def note_history(self, segment: int, first: int, last: int) -> None:
        """Record that a segment has message ids with times from `first` to `last`."""
        low, high = self._history.get(segment, (first, last))
        self._history[segment] = (min(low, first), max(high, last))

    def shift(self, by: int) -> None:
        """Move the times of message ids, because the wall clock was set."""
        self._history = {
            segment: (first + by, last + by) for segment, (first, last) in self._history.items()
        }

    @property
    def _oldest(self) -> int:
        return next(iter(self._log.segments))

    @property
    def has_work(self) -> bool:
        """Whether a step is worthwhile now."""
        if len(self._log.segments) < 2 or self._log.begins_segment:
            return False  # the new segment does not have the facts of the old ones yet
        seen = (self._bodies.released, len(self._log.segments))
        if seen == self._looked_at:
            return False  # nothing has changed since the last check
        size = self._log.size_without_heads
        wasted = self._bodies.live_bytes < size * (1 - COMPACTION_GARBAGE_RATIO)
        is_empty = self._bodies.live_in(self._oldest) == 0
        self._looked_at = None if wasted or is_empty else seen
        return self._may_drop_oldest() if is_empty else wasted

    def _may_drop_oldest(self) -> bool:
        """Return whether the ledger no longer needs the empty oldest segment.

        The ledger must have the trail of all records up to the time when the segment became empty.
        """
        if self._emptied is None or self._emptied[0] != self._oldest:
            self._emptied = self._oldest, self._log.last_record
        return self._may_forget(self._emptied[1])

    def drop_empty(self) -> None:
        """Remove the oldest segments that nothing needs; this needs no space on the disk."""
        while len(self._log.segments) > 1 and self._log.has_head:
            oldest = self._oldest
            if self._bodies.live_in(oldest) or oldest in self._history:
                return
            if not self._may_drop_oldest():
                return
            self.drop(oldest)

    def may_empty_oldest(self, room: int) -> bool:
        """Return whether the remaining content of the oldest segment fits into half of `room`.

        The other half is for settlements. `room` is the number of bytes left in the reserve.
        """
        if len(self._log.segments) < 2 or not self._log.has_head:
            return False
        oldest = self._oldest
        places = self._bodies.live_in(oldest)
        if places:
            growth = self._growth_of(oldest) or 1.0
            needed = growth * self._bodies.live_bytes_in(oldest) + MOVED_PLACE_BYTES * places
        elif self._may_drop_oldest():
            remembered = self._remembered_in(oldest)
            needed = CARRIED_ID_BYTES * sum(len(ids) for ids in remembered.values())
        else:
            return False
        return needed <= room / 2

    def _growth_of(self, segment: int) -> float | None:
        return None if self._growth is None or self._growth[0] != segment else self._growth[1]

    def stage(self, commit: Commit, room: int | None = None) -> None:
        """Add one step to the commit.

        With `room`, the step writes at most this number of bytes of messages, or one message.
        """
        oldest = self._oldest
        if self._bodies.live_in(oldest):
            if room is not None and self._growth_of(oldest) is None:
                room //= FIRST_STEP_DIVISOR  # until it is known how much the messages grow
            self._move(oldest, commit, room)
        elif not self._carry_history(oldest, commit):
            commit.effects.append(_Emptied(self, oldest))

    def drop(self, segment: int) -> None:
        """Remove a segment that nothing needs."""
        self._bodies.forget(segment)
        self._log.drop(segment)
        self._history.pop(segment, None)

    def _carry_history(self, segment: int, commit: Commit) -> bool:
        """Write ids of a segment again that duplicate detection still needs.

        Return whether there were any.
        """
        remembered = self._remembered_in(segment)
        span = self._history.pop(segment, None)
        if span is None or not remembered:
            return False
        for entity, kept in remembered.items():
            ids, times = zip(*kept, strict=True)
            commit.history.append((entity, ids, np.array(times, np.int64)))
        commit.must_sync = True
        commit.effects.append(_HistoryCarried(self, segment, span))
        return True

    def _remembered_in(self, segment: int) -> dict[int, list[tuple[str, int]]]:
        """Return the ids in a segment that duplicate detection still needs, by entity number."""
        span = self._history.get(segment)
        if span is None:
            return {}
        kept = {
            entity.number: list(entity.history.within(*span))
            for entity in self._namespace.directory
            if entity.history is not None
        }
        return {number: ids for number, ids in kept.items() if ids}

    def _move(self, segment: int, commit: Commit, room: int | None) -> None:
        budget = COMPACTION_STEP_BYTES if room is None else min(room, COMPACTION_STEP_BYTES)
        chosen = self._choose(*self._bodies.numbers_in(segment), budget)
        if not chosen:
            return  # the next step searches the next queues
        batch, rows = self._gathered(chosen)
        if room is not None:
            while len(rows) > 1 and batch.nbytes + MOVED_PLACE_BYTES * len(rows) > room:
                chosen = _first_half(chosen)
                batch, rows = self._gathered(chosen)
            stored = self._bodies.stored_bytes(np.unique(_keys_of(chosen)) >> 32)
            self._growth = segment, batch.nbytes / max(stored, 1.0)
        number = commit.add_batch(batch)
        start = 0
        for queue, at in chosen:
            moved = _Moved(queue, at, rows[start : start + len(at)].astype(np.int32), number)
            start += len(at)
            self._rewrite(moved, commit)

    def _gathered(
        self, chosen: list[tuple[Queue, Indices]]
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.intp]]:
        """Return the content of messages as one batch, and the row of each message in it."""
        unique, rows = np.unique(_keys_of(chosen), return_inverse=True)
        batch = self._bodies.fetch(unique >> 32, (unique & 0xFFFFFFFF).astype(np.int32))
        return batch, rows

    def _choose(self, first: int, last: int, budget: int) -> list[tuple[Queue, Indices]]:
        """Return messages of these batches for one step.

        A step searches a limited number of queues, and the next step continues with the others.
        After the last queue, the search begins again, because messages move between queues.
        """
        directory = self._namespace.directory
        if not self._unsearched:
            self._unsearched = [queue.entity for queue in directory.queues()]
        chosen: list[tuple[Queue, Indices]] = []
        for _ in range(min(COMPACTION_STEP_QUEUES, len(self._unsearched))):
            queue = directory.queue_numbered(self._unsearched[-1])
            at = NO_ROWS if queue is None else queue.waiting.in_batches(first, last)
            if queue is not None and len(at):
                total = np.cumsum(queue.waiting.get("size", at), dtype=np.int64)
                part = at[: max(1, int(np.searchsorted(total, budget)))]
                chosen.append((queue, part))
                budget -= int(total[len(part) - 1])
                if budget <= 0:
                    break  # this queue may have more such messages, so it stays in the list
            self._unsearched.pop()
        return chosen

    def _rewrite(self, moved: _Moved, commit: Commit) -> None:
        get = moved.queue.waiting.get
        names = ("sequence", "failures", "enqueued", "expires", "due", "size", "death")
        columns: dict[str, Any] = {name: get(name, moved.at) for name in names}
        states = _DURABLE[get("state", moved.at)]
        due = np.where(states == State.SCHEDULED, columns["due"], np.iinfo(np.int64).max)
        columns |= {"state": states, "due": due, "batch": moved.batch, "row": moved.rows}
        commit.tentative.places.append({"entity": moved.queue.entity, **columns})
        commit.effects.append(moved)


def _keys(queue: Queue, at: Indices) -> npt.NDArray[np.int64]:
    """Return batch and row of each message as one number, which copies of a message share."""
    keys: npt.NDArray[np.int64] = (queue.waiting.get("batch", at) << 32) | queue.waiting.get(
        "row", at
    )
    return keys


def _keys_of(chosen: list[tuple[Queue, Indices]]) -> npt.NDArray[np.int64]:
    return np.concatenate([_keys(queue, at) for queue, at in chosen])


def _first_half(chosen: list[tuple[Queue, Indices]]) -> list[tuple[Queue, Indices]]:
    """Return about half of these messages, at least one."""
    if len(chosen) > 1:
        return chosen[: len(chosen) // 2]
    [(queue, at)] = chosen
    return [(queue, at[: max(1, len(at) // 2)])]
