"""Intake: checks the sends of a turn to an entity, and stages their messages as rows.

All sends of a turn to an entity are processed as one batch. Each send is accepted or refused as a
whole. Pings, duplicates and messages that were transferred before are acknowledged, but not stored.

The row path (row_intake.py) is tried first. This module has the column path, which can stage or
refuse every send. turn/sends.py calls it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from twinbus.broker.accounts.throttle import busy_entity
from twinbus.broker.entities.entity import Entity
from twinbus.broker.lifecycle import Cause
from twinbus.broker.sending.repeats import (
    Mask,
    Repeats,
    bounded_key,
    fresh_ids,
    has_many_gaps,
    is_brought_home,
    origins_of,
    run_count,
)
from twinbus.broker.sending.routing import Outbound, Placement, Router
from twinbus.broker.sending.row_intake import Incoming, RowIntake, counted
from twinbus.broker.sending.transfers import Transfers
from twinbus.broker.store.commit import Commit
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    QuotaExceededError,
)
from twinbus.limits import (
    KNOWN_GAPS,
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    MAX_ID_CHARACTERS,
    MAX_REMEMBERED_IDS,
    NEVER_US,
    PING_ROOM_SHARE,
    TRANSFER_INTERVALS,
    TRANSFER_ORIGINS,
)
from twinbus.message import (
    BOUNDED_TEXTS,
    BrokeredMessage,
    Int64s,
    byte_lengths,
    check_values,
    columns_in_use,
    conform,
    first_row,
    ping_rows,
    sizes_of,
    to_batch,
    to_columns,
    too_long,
)
from twinbus.protocol.commands import Send, SendReceipt
from twinbus.protocol.meter import SEND, load_of_sizes, purpose_of_send, purposes_of_sends
from twinbus.protocol.operations import Load, Operation, Purpose
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.protocol.requests import Request

SendRequest = Request  # its command is a Send


class Intake:
    """Checks and stages sends."""

    def __init__(self, router: Router, transfers: Transfers, max_message_bytes: int) -> None:
        self._router = router
        self._transfers = transfers
        self.repeats = Repeats(transfers)
        self._max_message_bytes = max_message_bytes
        self._row_intake = RowIntake(self.repeats, max_message_bytes)
        # By access key: how many queues and intervals this turn adds to the memory of transfers.
        self._growth: dict[str, tuple[int, int]] = {}
        self._growing: Commit | None = None  # the commit of the turn that `_growth` is about

    def reconfigure(self, max_message_bytes: int) -> None:
        """Set another maximum message size; it applies to sends from now on."""
        self._max_message_bytes = self._row_intake.max_message_bytes = max_message_bytes

    def refuse(self, send: SendRequest, error: MessagingError, commit: Commit) -> None:
        """Refuse a send, and meter the refusal."""
        entity = self._router.find(send.command.path)
        path = entity.description.path if entity else ""
        purpose = purpose_of_send(send.command)
        commit.refuse(send, error, Operation(path, SEND, purpose, error.code, Load()))

    def check(self, entity: Entity, command: Send) -> pa.RecordBatch:
        """Return the messages of a send as a batch; raise if the send must be refused."""
        return self._checked(entity, [command]).batch

    def take_acknowledged(
        self, entity: Entity, send: SendRequest, now: int, commit: Commit
    ) -> None:
        """Stage a send that was checked, metered and acknowledged before: no limit applies."""
        self._take(entity, [send], _merged([send.command]), None, now, commit)

    def take(self, entity: Entity, sends: Sequence[SendRequest], now: int, commit: Commit) -> None:
        """Stage the valid sends to an entity; refuse the others."""
        if self._row_intake.take(entity, sends, now, commit):
            return
        # If sends may contain the same message, or may exceed the number of remembered ids, each
        # must be accepted or refused before the next one.
        may_exceed = _may_exceed_ids(entity, sends)
        if len(sends) > 1 and (may_exceed or _may_repeat(sends)):
            for send in sends:
                self.take(entity, [send], now, commit)
            return
        try:  # nearly always all sends are valid, and checking them together is cheaper
            incoming = self._checked(entity, [send.command for send in sends])
        except MessagingError as error:
            if len(sends) == 1:
                self.refuse(sends[0], error, commit)
                return
            sends = [send for send in sends if self._is_valid(entity, send, commit)]
            if not sends:
                return
            incoming = _merged([send.command for send in sends])
        if may_exceed and not self._fits_history(entity, sends[0], incoming, now, commit):
            return
        if len(sends) == 1 and self._row_intake.take_columns(
            entity, sends[0], incoming, now, commit
        ):
            return
        self._take_column_path(entity, sends, incoming, now, commit)

    def _take_column_path(
        self,
        entity: Entity,
        sends: Sequence[SendRequest],
        incoming: Incoming,
        now: int,
        commit: Commit,
    ) -> None:
        """Stage checked sends with columns.

        Refuse transfers that exceed their key's share of the memory of transfers.
        """
        if any(is_brought_home(send.command.origin) for send in sends):
            fitting = [send for send in sends if self._fits_memory(send, commit)]
            if not fitting:
                return
            if len(fitting) < len(sends):
                sends, incoming = fitting, _merged([send.command for send in fitting])
        self._take(entity, sends, incoming, entity.room, now, commit)

    def _fits_history(
        self, entity: Entity, send: SendRequest, incoming: Incoming, now: int, commit: Commit
    ) -> bool:
        """Return whether duplicate detection can remember the ids of a send; refuse it if not."""
        assert entity.history is not None
        ids = incoming.batch.column("message_id").to_pylist()
        if entity.history.has_room_for(ids, now):
            return True
        path = entity.description.path
        error = busy_entity(path, "ids of duplicate detection", MAX_REMEMBERED_IDS)
        self.refuse(send, error, commit)
        return False

    def _fits_memory(self, send: SendRequest, commit: Commit) -> bool:
        """Return whether a send may add its origins to the memory of transfers; refuse it if not.

        Only access keys without the claim Transfer on the whole namespace have a bound.
        """
        key = bounded_key(send)
        if not key:
            return True
        if self._growing is not commit:
            self._growing, self._growth = commit, {}
        added, gaps = self._growth.get(key, (0, 0))
        for origin in origins_of(send.command.origin):
            if origin_kind(origin.source) is OriginKind.TRANSFER:
                added += not self._transfers.knows(origin.source)
                gaps += run_count(origin)
        if not self._transfers.has_room(key, added, gaps) and any(
            self.repeats.untaken(origin, commit).any() for origin in origins_of(send.command.origin)
        ):
            error = QuotaExceededError(
                f"this access key has used {TRANSFER_ORIGINS} queues as origins of messages, or "
                f"{TRANSFER_INTERVALS} intervals of their numbers. The broker remembers these "
                "forever, so it accepts no more from this key. Use a key with the claim transfer "
                "on the whole namespace",
                path=send.command.path,
            )
            self.refuse(send, error, commit)
            return False
        self._growth[key] = added, gaps
        return True

    def _is_valid(self, entity: Entity, send: SendRequest, commit: Commit) -> bool:
        """Return whether a send is valid on its own; refuse it if not."""
        try:
            self._checked(entity, [send.command])
        except MessagingError as error:
            self.refuse(send, error, commit)
            return False
        return True

    def _checked(self, entity: Entity, commands: Sequence[Send]) -> Incoming:
        """Return the messages of sends as one batch; raise if one of them is invalid."""
        for command in commands:
            count, origin = len(command.messages), command.origin
            if not 0 < count <= MAX_BATCH_MESSAGES:
                raise InvalidArgumentError(
                    f"a send must have 1 to {MAX_BATCH_MESSAGES} messages, not {count}"
                )
            for source in origins_of(origin):
                if len(source.numbers) != count:
                    raise InvalidArgumentError(
                        f"an origin has {len(source.numbers)} numbers for {count} messages. Give "
                        "each message one number"
                    )
            if not is_brought_home(origin) and any(map(has_many_gaps, origins_of(origin))):
                raise InvalidArgumentError(
                    f"the numbers of a sender have more than {KNOWN_GAPS} gaps in one send; number "
                    "messages in order"
                )
        incoming = _merged(commands)
        self._check(entity, incoming)
        return incoming

    def _take(
        self,
        entity: Entity,
        sends: Sequence[SendRequest],
        incoming: Incoming,
        room: int | None,  # None: the send was acknowledged and metered before
        now: int,
        commit: Commit,
    ) -> None:
        """Stage the wanted messages of checked sends, and reply.

        Not wanted are pings, repeated messages, and sends that exceed the quota, which are refused.
        """
        wanted = np.ones(incoming.batch.num_rows, bool)
        pings = ping_rows(incoming.columns)
        if pings is not None:
            wanted &= ~pings
            commit.must_sync = True  # a ping must prove that the entity can store messages
        bounds = accumulate((len(send.command.messages) for send in sends), initial=0)
        rows = [slice(first, last) for first, last in pairwise(bounds)]
        accepted = list(zip(sends, rows, strict=True))
        origins = {id(send): self.repeats.own_origins(send, commit) for send in sends}
        for send, of_send in accepted:
            self.repeats.leave_out(origins[id(send)], wanted[of_send], commit)
        if room is not None and (pings is not None or counted(incoming.size[wanted]) > room):
            accepted = self._fitting(entity, accepted, incoming, wanted, room, commit)
        for send, _ in accepted:
            for origin in origins[id(send)]:
                self.repeats.note_send(origin, send, commit)
        self._drop_duplicates(entity, incoming.batch, wanted, now, commit)
        numbers = self._stage(entity, incoming, wanted, now, commit).tolist()
        for send, of_send in accepted:
            commit.reply(send, SendReceipt(numbers[of_send]))
        if accepted and room is not None:
            self._meter_accepted(entity, accepted, incoming.size, pings, commit)

    def _meter_accepted(
        self,
        entity: Entity,
        accepted: Sequence[tuple[SendRequest, slice]],
        size: Int64s,
        pings: Mask | None,
        commit: Commit,
    ) -> None:
        """Let the meter count sends, grouped by purpose."""
        path = entity.description.path
        origins = [send.command.origin for send, _ in accepted]
        purposes = purposes_of_sends(path, origins)
        if pings is not None:
            for at, (_, rows) in enumerate(accepted):
                if pings[rows].all():
                    purposes[at] = Purpose.PING
        for purpose in set(purposes):
            sends = [
                rows
                for (_, rows), found in zip(accepted, purposes, strict=True)
                if found is purpose
            ]
            are_all = sum(rows.stop - rows.start for rows in sends) == len(size)
            sent = size if are_all else np.concatenate([size[rows] for rows in sends])
            load = load_of_sizes(sent)
            commit.operations.append(Operation(path, SEND, purpose, "ok", load, len(sends)))

    def _fitting(
        self,
        entity: Entity,
        sends: list[tuple[SendRequest, slice]],
        incoming: Incoming,
        wanted: Mask,
        room: int,
        commit: Commit,
    ) -> list[tuple[SendRequest, slice]]:
        """Return the sends that fit into the quota, in order; refuse the others."""
        accepted = []
        pings = ping_rows(incoming.columns)
        for send, rows in sends:
            need = counted(incoming.size[rows][wanted[rows]])
            has_ping = pings is not None and pings[rows].any()
            if room < max(need, self._room_of_ping(entity) if has_ping else 0):
                self.refuse(send, full(entity), commit)
                wanted[rows] = False
            else:
                room -= need
                accepted.append((send, rows))
        return accepted

    def _room_of_ping(self, entity: Entity) -> int:
        """Return the room that an entity needs for a ping.

        A ping finds out whether the entity accepts messages again. One that has room for a ping
        only would refuse the messages that follow.
        """
        return min(self._max_message_bytes, entity.max_bytes // PING_ROOM_SHARE)

    def _check(self, entity: Entity, incoming: Incoming) -> None:
        """Raise if a message is too large, or has a value that the entity does not accept."""
        columns, size = incoming.columns, incoming.size
        total = int(size.sum())
        largest = int(size.max()) if total > self._max_message_bytes else total
        if largest > self._max_message_bytes:
            raise MessageSizeExceededError(
                f"message {int(size.argmax())} has {largest} bytes; the limit is "
                f"{self._max_message_bytes}, with all properties. Store large content elsewhere "
                "and send a reference",
                size=largest,
                limit=self._max_message_bytes,
            )
        if total > MAX_BATCH_BYTES:
            raise MessageSizeExceededError(
                f"the batch has {total} bytes; the limit is {MAX_BATCH_BYTES}. Send it in parts",
                size=total,
                limit=MAX_BATCH_BYTES,
            )
        sessions = columns.get("session_id")
        if entity.queue.settings.requires_session and (sessions is None or sessions.null_count):
            row = 0 if sessions is None else first_row(sessions.is_null())
            raise InvalidArgumentError(
                f"{entity.description.path} requires a session_id on every message, and message "
                f"{row} has none. Set it",
                path=entity.description.path,
            )
        if not incoming.are_objects:
            _check_columns(columns)
        if sessions is not None and "partition_key" in columns:
            _check_partition_key(columns["partition_key"], sessions)

    def _drop_duplicates(
        self, entity: Entity, batch: pa.RecordBatch, wanted: Mask, now: int, commit: Commit
    ) -> None:
        """Clear the rows in `wanted` whose message id was accepted before."""
        if entity.history is None or not wanted.any():
            return
        at = np.flatnonzero(wanted)
        ids = batch.column("message_id").take(pa.array(at)).to_pylist()
        wanted[at] = fresh_ids(entity, ids, now, commit)

    def _stage(
        self, entity: Entity, incoming: Incoming, wanted: Mask, now: int, commit: Commit
    ) -> Int64s:
        """Route and stage the wanted rows; return the sequence number of each row.

        It is 0 for rows that are not wanted or go to other entities.
        """
        batch = incoming.batch
        numbers = np.zeros(batch.num_rows, np.int64)
        if not wanted.any():
            return numbers
        outbound = Outbound([batch], [incoming.size])
        lives = incoming.columns.get("time_to_live")
        life = np.full(batch.num_rows, NEVER_US) if lives is None else _micros(lives, NEVER_US)
        due = None
        now_rows = np.flatnonzero(wanted).astype(np.int32)
        schedule = incoming.columns.get("scheduled_enqueue_time_utc")
        if schedule is not None:
            due = _micros(schedule, 0)
            later = now_rows[due[now_rows] > now]
            now_rows = now_rows[due[now_rows] <= now]
            if len(later):
                bounded = np.minimum(life[later], entity.queue.settings.time_to_live_us)
                outbound.placements.append(Placement(entity.queue, later, Cause.SCHEDULED, bounded))
        if len(now_rows):
            self._router.route(entity, now_rows, life[now_rows], outbound)
        staged = self._router.stage(outbound, due, now, commit)
        for placement, sequence in zip(outbound.placements, staged, strict=True):
            if placement.queue is entity.queue:
                numbers[placement.rows] = sequence
        return numbers


def _may_exceed_ids(entity: Entity, sends: Sequence[SendRequest]) -> bool:
    """Return whether duplicate detection may have no room for the ids of these sends."""
    if entity.history is None:
        return False
    return sum(len(send.command.messages) for send in sends) > entity.history.room


def _may_repeat(sends: Sequence[SendRequest]) -> bool:
    """Return whether these sends may contain the same message of an origin twice."""
    numbers_of: dict[str, list[Any]] = {}
    for send in sends:
        for origin in origins_of(send.command.origin):
            numbers_of.setdefault(origin.source, []).append(origin.numbers)
    for pieces in numbers_of.values():
        if len(pieces) == 1:
            continue
        if not all(isinstance(numbers, range) for numbers in pieces):
            return True
        ordered = sorted((numbers.start, numbers.stop) for numbers in pieces)
        if any(later[0] < earlier[1] for earlier, later in pairwise(ordered)):
            return True
    return False


def _merged(commands: Sequence[Send]) -> Incoming:
    """Return the messages of several sends as one batch; objects are converted together."""
    if all(type(command.messages) is not pa.RecordBatch for command in commands):
        return _of_objects([message for command in commands for message in command.messages])
    pieces: list[pa.RecordBatch] = []
    objects: list[BrokeredMessage] = []
    for command in commands:
        messages = command.messages
        if isinstance(messages, pa.RecordBatch):
            if objects:
                pieces.append(to_batch(objects))
                objects = []
            pieces.append(conform(messages))
        else:
            objects.extend(messages)
    if objects:
        pieces.append(to_batch(objects))
    batch = pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
    columns = columns_in_use(batch)
    return Incoming(batch, columns, sizes_of(columns, batch.num_rows), are_objects=False)


def _check_columns(columns: Mapping[str, pa.Array]) -> None:
    """Raise for values that the constructor of a message object refuses."""
    for name in BOUNDED_TEXTS:
        texts = columns.get(name)
        if texts is None or byte_lengths(texts).max() <= MAX_ID_CHARACTERS:
            continue  # a text never has more characters than bytes
        longest = pc.max(pc.utf8_length(texts)).as_py()
        if longest > MAX_ID_CHARACTERS:
            raise too_long(name, longest)
    check_values(columns)
    lives = columns.get("time_to_live")
    if lives is not None:
        micros = _micros(lives, 1)
        if micros.min() <= 0:
            row = int(micros.argmin())
            raise InvalidArgumentError(
                f"message {row} has the time_to_live {micros[row]} µs. It must be above zero, or "
                "None for no limit"
            )


def _of_objects(messages: Sequence[BrokeredMessage]) -> Incoming:
    """Return message objects as columns; the sizes of a few are computed one by one."""
    batch, columns = to_columns(messages)
    if len(messages) <= _FEW_MESSAGES:
        size = np.array([message.size for message in messages], np.int64)
    else:
        size = sizes_of(columns, len(messages))
    return Incoming(batch, columns, size, are_objects=True)


_FEW_MESSAGES = 64


def _micros(column: pa.Array, missing: int) -> Int64s:
    values: Int64s = column.cast(pa.int64()).fill_null(missing).to_numpy()
    return values


def _check_partition_key(keys: pa.Array, sessions: pa.Array) -> None:
    for key, session in zip(keys.to_pylist(), sessions.to_pylist(), strict=True):
        if key is not None and session is not None and key != session:
            raise InvalidArgumentError(
                f"partition_key {key!r} and session_id {session!r} differ; if both are set, "
                "they must be equal"
            )


def full(entity: Entity) -> QuotaExceededError:
    """Return the error of an entity whose quota is exhausted."""
    return QuotaExceededError(
        f"the request does not fit into {entity.description.path}, which uses "
        f"{entity.max_bytes - entity.room} of {entity.max_bytes} bytes, including dead letters and "
        "session states; receive messages or raise max_size_in_megabytes",
        path=entity.description.path,
        size_in_bytes=entity.size_in_bytes,
        max_bytes=entity.max_bytes,
    )
