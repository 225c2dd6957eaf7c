"""The row path of sends: stages a few message objects without creating Arrow columns.

Nearly every send takes the row path. It needs an entity that does not forward, and numbers that
continue those of the sender. The messages of all sends of a turn are checked one by one and written
together. Messages that are deliverable at once and go to a plain queue (no sessions, no duplicate
detection, no time to live) are staged together. Other messages are staged one by one, each in its
queues (placing.py).

A single send of columns to a plain queue has a short cut here, too: after the checks of intake.py
the batch goes to the log unchanged, because no row is removed and all rows go to the same queue.

All other sends, and all sends that must be refused, take the column path (intake.py, routing.py).
Where both paths are possible, they lead to the same messages, replies and counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from twinbus.broker.entities.entity import Entity
from twinbus.broker.lifecycle import Cause
from twinbus.broker.queue.staging import PlannedPlace, stage, stage_one
from twinbus.broker.queue.waiting import Rows
from twinbus.broker.sending.placing import places_of, stage_places
from twinbus.broker.sending.repeats import Repeats, fresh_ids
from twinbus.broker.store.commit import BatchTarget, Commit, Transferred
from twinbus.broker.store.message_rows import MessageRows
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MIN_QUOTA_BYTES,
    PING_CONTENT_TYPE,
    PLACED_MESSAGES,
    ROWS_AS_ROWS,
    ROWS_IN_LOG,
)
from twinbus.message import BrokeredMessage, Int64s, to_batch
from twinbus.protocol.commands import Origin, SendReceipt
from twinbus.protocol.meter import SEND, load_of_sizes, units_of
from twinbus.protocol.operations import UNIT_BYTES, Load, Operation, Purpose
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.protocol.requests import Request

_MOST_MESSAGES = 1024
_ROWS = np.arange(_MOST_MESSAGES, dtype=np.int32)
_BACKLOG, _APPLICATION = Purpose.BACKLOG, Purpose.APPLICATION


# Columns that decide when or whether a message becomes deliverable.
_DECIDING = frozenset(("time_to_live", "scheduled_enqueue_time_utc", "content_type"))


@dataclass(frozen=True, slots=True)
class Incoming:
    """The messages of one or more sends, with their sizes."""

    batch: pa.RecordBatch
    columns: Mapping[str, pa.Array]  # the columns with values
    size: Int64s
    are_objects: bool  # created from message objects, whose constructor checked the values


class RowIntake:
    """Stages the sends of a turn to one entity, if the row path can; `Intake` calls it first."""

    def __init__(self, repeats: Repeats, max_message_bytes: int) -> None:
        self._repeats = repeats
        self.max_message_bytes = max_message_bytes

    def take(self, entity: Entity, sends: Sequence[Request], now: int, commit: Commit) -> bool:
        """Stage the sends and return True, or do nothing and return False."""
        if entity.forward_to is not None:
            return False
        messages: list[BrokeredMessage] = []
        taken: dict[str, Transferred] = {}
        for send in sends:
            added = send.command.messages
            if type(added) not in (tuple, list) or not 0 < len(added) <= ROWS_AS_ROWS:
                return False
            origin = send.command.origin
            if origin is not None and not self._continues(origin, send, taken, commit):
                return False
            messages += added
        if entity.is_plain and all(map(_is_plain, messages)):
            staged = self._stage(entity, messages, now, commit)
        else:
            staged = self._place(entity, messages, now, commit)
        if staged is None:
            return False
        for numbers in taken.values():
            self._repeats.note(numbers, commit)
        self._answer(entity, sends, staged, commit)
        return True

    def take_columns(
        self, entity: Entity, send: Request, incoming: Incoming, now: int, commit: Commit
    ) -> bool:
        """Stage a send with checked columns and return True, or do nothing and return False."""
        if not entity.is_plain or not _DECIDING.isdisjoint(incoming.columns):
            return False
        origin, taken = send.command.origin, None
        if origin is not None:
            if origin.also is not None:
                return False
            taken = self._repeats.continued(origin, send.principal.id, commit)
            if taken is None:
                return False
        if counted(incoming.size) > entity.room:
            return False
        queue, count = entity.queue, len(incoming.size)
        rows = Rows(
            sequence=queue.allocate(count),
            enqueued=now,
            size=incoming.size,
            batch=commit.next_batch,
            row=np.arange(count, dtype=np.int32),
        )
        first_sequence = queue.next_sequence - count
        commit.add_batch(incoming.batch, BatchTarget(queue.entity, first_sequence, now))
        stage(queue, rows, Cause.ENQUEUED, None, commit)
        if taken is not None:
            self._repeats.note(taken, commit)
        numbers = range(first_sequence, first_sequence + count)
        staged = _AcceptedRows(numbers, load_of_sizes(incoming.size))
        self._answer(entity, (send,), staged, commit)
        return True

    def _continues(
        self, origin: Origin, send: Request, taken: dict[str, Transferred], commit: Commit
    ) -> bool:
        """Return whether the numbers of a send continue those of its sender; add them to `taken`.

        `taken` contains, by source, the numbers of the sends of this turn.
        """
        source, numbers, user = origin.source, origin.numbers, send.principal.id
        if type(numbers) is not range or numbers.step != 1 or origin.also is not None:
            return False
        if len(numbers) != len(send.command.messages):
            return False
        before = taken.get(source)
        if before is not None:  # by an earlier send of this turn
            ((first, last),) = before.intervals
            if last + 1 != numbers.start or before.owner != user:
                return False
            taken[source] = before._replace(intervals=[(first, numbers.stop - 1)])
            return True
        known = self._repeats.continued(origin, user, commit)
        if known is not None:
            taken[source] = known
            return True
        if origin_kind(source) is not OriginKind.SENDER:
            return False
        if not self._repeats.is_ahead(origin, commit):
            return False
        if not self._repeats.may_use(origin, user, commit):
            return False
        taken[source] = self._repeats.taken(origin, user, commit)
        return True

    def _fit(self, sizes: Sequence[int], total: int, room: int) -> bool:
        """Return whether messages are within the limits of size and number."""
        if max(sizes) > self.max_message_bytes or total > MAX_BATCH_BYTES:
            return False
        return total + MIN_QUOTA_BYTES * len(sizes) <= room or (
            sum(max(size, MIN_QUOTA_BYTES) for size in sizes) <= room
        )

    def _stage_single(
        self, entity: Entity, messages: Sequence[BrokeredMessage], now: int, commit: Commit
    ) -> "_AcceptedRows | None":
        """Stage one message in a plain queue; return None if it exceeds a limit."""
        size = messages[0].size
        if size > self.max_message_bytes or max(size, MIN_QUOTA_BYTES) > entity.room:
            return None
        content = MessageRows(messages)
        queue = entity.queue
        number = stage_one(queue, now, size, commit)
        commit.add_batch(content, BatchTarget(queue.entity, number, now))
        return _AcceptedRows((number,), Load(1, size, -(-size // UNIT_BYTES) or 1))

    def _stage(
        self, entity: Entity, messages: Sequence[BrokeredMessage], now: int, commit: Commit
    ) -> "_AcceptedRows | None":
        """Stage messages in a plain queue; return None if they exceed a limit."""
        if len(messages) == 1:
            return self._stage_single(entity, messages, now, commit)
        if len(messages) > _MOST_MESSAGES:
            return None
        sizes = [message.size for message in messages]
        total = sum(sizes)
        if not self._fit(sizes, total, entity.room):
            return None
        queue, count = entity.queue, len(messages)
        rows = Rows(
            sequence=queue.allocate(count),
            enqueued=now,
            size=sizes,
            batch=commit.next_batch,
            row=_ROWS[:count],
        )
        first_sequence = queue.next_sequence - count
        content = MessageRows(messages) if count <= ROWS_IN_LOG else to_batch(messages)
        commit.add_batch(content, BatchTarget(queue.entity, first_sequence, now))
        stage(queue, rows, Cause.ENQUEUED, None, commit)
        numbers = range(first_sequence, first_sequence + count)
        return _AcceptedRows(numbers, Load(count, total, units_of(sizes)))

    def _place(
        self, entity: Entity, messages: Sequence[BrokeredMessage], now: int, commit: Commit
    ) -> "_AcceptedRows | None":
        """Stage a few messages one by one; return None if the column path must decide."""
        history = entity.history
        if len(messages) > PLACED_MESSAGES or (
            history is not None and len(messages) > history.room
        ):
            return None
        sizes = [message.size for message in messages]
        total = sum(sizes)
        if not self._fit(sizes, total, entity.room):
            return None
        places: list[Sequence[PlannedPlace]] = []
        for message, size in zip(messages, sizes, strict=True):
            found = places_of(entity, message, size, now)
            if found is None:
                return None
            places.append(found)
        if history is not None:
            ids = [message.message_id for message in messages]
            are_new = fresh_ids(entity, ids, now, commit)
            places = [
                found if is_new else () for found, is_new in zip(places, are_new, strict=True)
            ]
        of_each = stage_places(messages, places, commit)
        numbers = [
            own[0] if own and found[0].queue is entity.queue else 0
            for own, found in zip(of_each, places, strict=True)
        ]
        return _AcceptedRows(numbers, Load(len(messages), total, units_of(sizes)))

    def _answer(
        self, entity: Entity, sends: Sequence[Request], accepted: "_AcceptedRows", commit: Commit
    ) -> None:
        first = 0
        for send in sends:
            last = first + len(send.command.messages)
            commit.reply(send, SendReceipt(list(accepted.numbers[first:last])))
            first = last
        purpose = _BACKLOG if entity.is_backlog else _APPLICATION
        path = entity.description.path
        commit.operations.append(Operation(path, SEND, purpose, "ok", accepted.load, len(sends)))


class _AcceptedRows(NamedTuple):
    """The staged messages of sends."""

    # Sequence numbers for the replies; 0: a duplicate, or not in the queue of the entity.
    numbers: Sequence[int]
    load: Load


def counted(size: Int64s) -> int:
    """Return the size of messages for quotas; each counts as MIN_QUOTA_BYTES or more."""
    if len(size) == 1:
        return max(int(size[0]), MIN_QUOTA_BYTES)
    return int(np.maximum(size, MIN_QUOTA_BYTES).sum())


def _is_plain(message: BrokeredMessage) -> bool:
    """Return whether a message is deliverable at once and needs no further check."""
    return (
        message.time_to_live is None
        and message.scheduled_enqueue_time_utc is None
        and message.content_type != PING_CONTENT_TYPE
        and (message.session_id is None or message.partition_key is None)
    )
