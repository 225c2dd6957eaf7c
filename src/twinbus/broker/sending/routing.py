"""Routing: decides which queues get the rows of a batch that was sent to an entity.

A topic gives copies to its subscriptions; an entity with `forward_to` forwards everything. Rows
that their forward target cannot accept are parked in the forwarding queue and retried. Dead letters
that are forwarded are parked in their dead-letter queue until the end of the turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.rules import failed_rows
from twinbus.broker.entities.topic import Copy, Rule, Subscription, Topic, shown_error
from twinbus.broker.lifecycle import Cause, State
from twinbus.broker.queue.dead_letter import (
    RULE_FAILED,
    SESSION_ID_MISSING,
    TOO_MANY_FORWARDS,
    Death,
)
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.shared import QueueContext
from twinbus.broker.queue.staging import note_staged, stage
from twinbus.broker.queue.waiting import Indices, Rows
from twinbus.broker.store.commit import BatchTarget, Commit, Effect
from twinbus.entities import SubscriptionDescription
from twinbus.limits import (
    FORWARD_RETRY_US,
    MAX_BATCH_BYTES,
    MAX_FORWARD_HOPS,
    MAX_ID_CHARACTERS,
    NEVER_US,
)
from twinbus.message import BOUNDED_TEXTS, LAST_MOMENT_US, Int64s, sizes

Numbers = npt.NDArray[np.int32]


class Placement(NamedTuple):
    """Rows of the outbound batch for a queue."""

    queue: Queue
    rows: Numbers
    cause: Cause
    time_to_live: Int64s
    death: Death | None = None


@dataclass(slots=True)
class Outbound:
    """A batch to be routed: sent rows, copies changed by actions, and the queues of each row."""

    pieces: list[pa.RecordBatch]
    sizes: list[Int64s]  # of the messages of each piece
    placements: list[Placement] = field(default_factory=list)
    # By row: the number of the dead-letter reason that the message already has, or -1. None: no
    # message has one.
    deaths: Numbers | None = None

    def batch(self) -> pa.RecordBatch:
        """Return all rows as one batch."""
        return self.pieces[0] if len(self.pieces) == 1 else pa.concat_batches(self.pieces)

    def add(self, changed: pa.RecordBatch, rows: Numbers) -> Numbers:
        """Add copies of `rows` that an action changed; return the row numbers of the copies."""
        first = sum(piece.num_rows for piece in self.pieces)
        self.pieces.append(changed)
        self.sizes.append(sizes(changed))
        if self.deaths is not None:
            self.deaths = np.concatenate([self.deaths, self.deaths[rows]])
        return np.arange(first, first + changed.num_rows, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _SentOn(Effect):
    """Due or parked messages that a topic or queue has sent to other queues."""

    queue: Queue
    at: Indices
    cause: Cause
    now: int

    def durable(self) -> None:
        """Remove the messages: they are in other queues now."""
        self.queue.settle_gone(self.at, self.cause)

    def refused(self) -> None:
        """Try again a little later."""
        self.queue.try_again(self.at, self.cause, self.now)


class Router:
    """Decides which queues get rows, and stages them there."""

    def __init__(self, directory: Directory, shared: QueueContext, max_message_bytes: int) -> None:
        self._directory = directory
        self._shared = shared
        self.max_message_bytes = max_message_bytes

    def find(self, path: str) -> Entity | None:
        """Return the entity of a path, or None."""
        return self._directory.find(path)

    def _room(self, path: str | None) -> int:
        """Return the free bytes of a forward target; a negative value: it accepts nothing."""
        target = self._directory.find(path or "")
        if target is None or not target.description.status.allows_send:
            return -1
        return target.room

    def route(
        self, entity: Entity, rows: Numbers, time_to_live: Int64s, outbound: Outbound, hops: int = 0
    ) -> None:
        """Add the placements of rows that reach an entity; `hops` counts past forwardings."""
        queue = entity.queue
        longest = queue.settings.time_to_live_us
        life = time_to_live if longest == NEVER_US else np.minimum(time_to_live, longest)
        if isinstance(entity, Topic):
            self._fan_out(entity, rows, life, outbound, hops)
        elif entity.forward_to is None:
            self._arrive(queue, rows, life, outbound)
        elif hops >= MAX_FORWARD_HOPS:
            text = f"the message would be forwarded more than {MAX_FORWARD_HOPS} times"
            death = Death(TOO_MANY_FORWARDS, text, queue.path)
            outbound.placements.append(_dead(queue, rows, life, death))
        elif self._can_forward(entity, rows, outbound):
            target = self._directory.entity(entity.forward_to)
            self.route(target, rows, life, outbound, hops + 1)
        else:
            outbound.placements.append(Placement(queue, rows, Cause.PARKED, life))

    def _can_forward(self, entity: Entity, rows: Numbers, outbound: Outbound) -> bool:
        """Return whether rows can be forwarded now: none is parked, and the target has room."""
        if entity.queue.waiting.count(State.TRANSFERRING):
            return False
        size = np.concatenate(outbound.sizes)[rows]
        return int(size.sum()) <= self._room(entity.forward_to)

    def _fan_out(
        self, topic: Topic, rows: Numbers, life: Int64s, outbound: Outbound, hops: int
    ) -> None:
        batch = outbound.batch()
        if len(rows) != batch.num_rows:
            batch = batch.take(pa.array(rows))
        for subscription in topic.subscriptions.values():
            if not subscription.description.status.allows_send:
                continue
            for copy in subscription.copies(batch):
                for copied, at in self._changed(subscription, copy, batch, rows, outbound):
                    self.route(subscription, copied, life[at], outbound, hops)

    def _changed(
        self,
        subscription: Subscription,
        copy: Copy,
        batch: pa.RecordBatch,
        rows: Numbers,
        outbound: Outbound,
    ) -> Iterator[tuple[Numbers, Indices]]:
        """Yield the rows of a copy, changed by its action, and their positions in the batch.

        If the rule fails for a message or makes it too large, dead-letter the message unchanged, or
        drop it (`_bury`).
        """
        if copy.rule is None:
            yield rows[copy.rows], copy.rows
            return
        why = copy.failure or _too_much(outbound)
        if why:
            self._bury(subscription, copy.rule, rows[copy.rows], why, outbound)
            return
        try:
            changed = _applied(copy.rule, batch.take(pa.array(copy.rows)))
        except Exception as error:  # noqa: BLE001 - an error of an action affects its messages only
            for part in self._left(subscription, copy, error, rows, outbound):
                yield from self._changed(subscription, part, batch, rows, outbound)
            return
        fits = sizes(changed) <= self.max_message_bytes
        for name in BOUNDED_TEXTS:
            lengths = pc.utf8_length(changed.column(name)).fill_null(0)
            fits &= lengths.to_numpy() <= MAX_ID_CHARACTERS
        if not fits.all():
            why = (
                f"its action makes the message larger than {self.max_message_bytes} bytes, or an "
                f"id longer than {MAX_ID_CHARACTERS} characters"
            )
            self._bury(subscription, copy.rule, rows[copy.rows[~fits]], why, outbound)
        if fits.any():
            at = copy.rows[fits]
            yield outbound.add(changed.filter(pa.array(fits)), rows[at]), at

    def _left(
        self,
        subscription: Subscription,
        copy: Copy,
        error: Exception,
        rows: Numbers,
        outbound: Outbound,
    ) -> list[Copy]:
        """Dead-letter the rows for which an action failed; return the rows to be tried again.

        If the error does not say which rows failed, return the rows as two halves: bisection finds
        the failed ones.
        """
        assert copy.rule is not None
        count = len(copy.rows)
        failed = np.ones(1, bool) if count == 1 else failed_rows(error, count)
        if failed is None:
            halves = copy.rows[: count // 2], copy.rows[count // 2 :]
            return [Copy(half, copy.rule) for half in halves]
        self._bury(subscription, copy.rule, rows[copy.rows[failed]], shown_error(error), outbound)
        good = copy.rows[~failed]
        return [Copy(good, copy.rule)] if len(good) else []

    def _bury(
        self, subscription: Subscription, rule: Rule, rows: Numbers, why: str, outbound: Outbound
    ) -> None:
        """Dead-letter messages for which a rule failed, or drop them, as the subscription says."""
        failures, name = self._shared.rule_failures, rule.description.name
        described = subscription.description
        failures.note(described.path, name, len(rows), why)
        assert isinstance(described, SubscriptionDescription)
        if not described.enable_dead_lettering_on_filter_evaluation_exceptions:
            return
        queue = subscription.queue
        death = Death(RULE_FAILED, f"rule {rule.description.name}: {why}", queue.path)
        life = np.full(len(rows), NEVER_US)
        outbound.placements.append(_dead(queue, rows, life, death))

    def _arrive(self, queue: Queue, rows: Numbers, life: Int64s, outbound: Outbound) -> None:
        """Place rows in a queue; dead-letter rows without the session id that it requires."""
        if queue.settings.requires_session:
            sessions = outbound.batch().column("session_id").take(pa.array(rows))
            missing = sessions.is_null().to_numpy(zero_copy_only=False)
            if missing.any():
                death = Death(SESSION_ID_MISSING, "the queue requires a session_id", queue.path)
                outbound.placements.append(_dead(queue, rows[missing], life[missing], death))
                rows, life = rows[~missing], life[~missing]
        if len(rows):
            outbound.placements.append(Placement(queue, rows, Cause.ENQUEUED, life))

    # -- staging -------------------------------------------------------------------------------

    def stage(
        self, outbound: Outbound, due: Int64s | None, now: int, commit: Commit
    ) -> list[Int64s]:
        """Stage every placement; return the sequence numbers of each placement.

        `due` is when each row of the batch is due; None: no row is scheduled.
        """
        if not outbound.placements:
            return []
        batch = outbound.batch()
        size = outbound.sizes[0] if len(outbound.sizes) == 1 else np.concatenate(outbound.sizes)
        rows = [self._rows(placement, size, due, now, commit) for placement in outbound.placements]
        target = None
        if outbound.deaths is not None:
            rows = _with_deaths(outbound.placements, rows, outbound.deaths)
        elif len(rows) == 1:
            target = _only_target(outbound.placements[0], rows[0], batch.num_rows)
        commit.add_batch(batch, target)
        for placement, staged in zip(outbound.placements, rows, strict=True):
            queue = placement.queue
            sessions = None
            if queue.settings.requires_session:
                names = batch.column("session_id").take(pa.array(placement.rows))
                sessions = names.to_pylist()
            stage(queue, staged, placement.cause, sessions, commit)
            if target is None:
                note_staged(queue, staged.sequence, placement.cause, commit)
            if placement.cause is Cause.PARKED:
                queue.retry_at = now + FORWARD_RETRY_US
                if queue.dead_letter is None:
                    self._shared.parked[queue.entity] = queue
        return [staged.sequence for staged in rows]

    def _rows(
        self, placement: Placement, size: Int64s, due: Int64s | None, now: int, commit: Commit
    ) -> Rows:
        queue = placement.queue
        begins: Any = now
        if placement.cause is Cause.SCHEDULED:
            assert due is not None
            begins = due[placement.rows]
        expires: Any = NEVER_US
        if queue.dead_letter is not None or placement.cause is Cause.SCHEDULED:
            life = placement.time_to_live
            if life.min() != NEVER_US:
                expires = begins + np.minimum(life, NEVER_US - begins)
                expires[expires > LAST_MOMENT_US] = NEVER_US  # beyond the range of datetime
        death = -1
        if placement.death is not None:
            death = self._shared.deaths.number(placement.death, commit.kept)
        return Rows(
            sequence=queue.allocate(len(placement.rows)),
            enqueued=begins,
            size=size[placement.rows],
            batch=commit.next_batch,
            row=placement.rows,
            expires=expires,
            due=begins if placement.cause is Cause.SCHEDULED else NEVER_US,
            death=death,
        )

    def resend(self, entity: Entity, at: Indices, cause: Cause, now: int, commit: Commit) -> None:
        """Send due or parked messages of a topic or queue to the queues where they belong."""
        queue = entity.queue
        if cause is not Cause.FORWARDED:
            self._send_on(queue, at, cause, entity.description.path, now, commit)
            return
        fits = self._fits(queue, at, entity.forward_to)
        queue.retry_at = NEVER_US if fits.all() else now + FORWARD_RETRY_US
        self._send_on(queue, at[fits], cause, entity.forward_to or "", now, commit)

    def resend_dead_letters(
        self, entity: Entity, at: Indices, cause: Cause, now: int, commit: Commit
    ) -> None:
        """Forward dead letters; those that the target does not accept stay in their queue."""
        queue, target = entity.queue.dead_letter, entity.forward_dead_letters_to
        assert queue is not None
        fits = self._fits(queue, at, target)
        queue.retry_at = NEVER_US
        queue.keep_parked(at[~fits], commit)
        self._send_on(queue, at[fits], cause, target or "", now, commit)

    def _fits(self, queue: Queue, at: Indices, target: str | None) -> npt.NDArray[np.bool_]:
        """Return which messages the forward target accepts, in order, until it is full."""
        total = np.cumsum(queue.waiting.get("size", at), dtype=np.int64)
        fits: npt.NDArray[np.bool_] = total <= self._room(target)
        return fits

    def _send_on(
        self, queue: Queue, at: Indices, cause: Cause, path: str, now: int, commit: Commit
    ) -> None:
        """Send messages of a queue to the entity of a path, as many as one batch may have."""
        if not len(at):
            return
        get = queue.waiting.get
        total = np.cumsum(get("size", at), dtype=np.int64)
        step = max(1, int(np.searchsorted(total, MAX_BATCH_BYTES)))
        if step < len(at):
            at = at[:step]
            queue.look_again(cause, now)
        batch = self._shared.bodies.fetch(get("batch", at), get("row", at))
        outbound = Outbound([batch], [get("size", at).astype(np.int64)])
        deaths = get("death", at)
        if deaths.max() >= 0:
            outbound.deaths = deaths
        left = get("expires", at)
        life = np.where(left == NEVER_US, NEVER_US, np.maximum(left - now, 0))
        rows = np.arange(len(at), dtype=np.int32)
        hops = 1 if cause is Cause.FORWARDED else 0
        self.route(self._directory.entity(path), rows, life, outbound, hops)
        self.stage(outbound, None, now, commit)
        commit.must_sync = True
        commit.tentative.gone(queue.entity, get("sequence", at), cause)
        commit.effects.append(_SentOn(queue, at, cause, now))


def _dead(queue: Queue, rows: Numbers, life: Int64s, death: Death) -> Placement:
    """Return the placement of rows that are dead-lettered instead of entering a queue."""
    dead_letter = queue.dead_letter
    assert dead_letter is not None
    cause = Cause.ENQUEUED if dead_letter.resend is None else Cause.PARKED
    return Placement(dead_letter, rows, cause, life, death)


def _with_deaths(
    placements: Sequence[Placement], staged: Sequence[Rows], deaths: Numbers
) -> list[Rows]:
    """Return staged rows with the dead-letter reasons that their messages already have.

    Rows that are dead-lettered now keep the new reason.
    """
    return [
        rows if placement.death is not None else rows._replace(death=deaths[placement.rows])
        for placement, rows in zip(placements, staged, strict=True)
    ]


def _too_much(outbound: Outbound) -> str:
    """Return why no more changed copies of this batch are created, or an empty text."""
    created = sum(int(size.sum()) for size in outbound.sizes[1:])
    if created <= MAX_BATCH_BYTES:
        return ""
    return f"the actions of rules created more than {MAX_BATCH_BYTES} bytes of copies of one batch"


def _applied(rule: Rule, batch: pa.RecordBatch) -> pa.RecordBatch:
    assert rule.change is not None
    return rule.change(batch)


def _only_target(placement: Placement, rows: Rows, count: int) -> BatchTarget | None:
    """Return the target of a batch if one queue gets all its rows; otherwise None.

    Return None also if the rows are not active, or if they expire.
    """
    plain = placement.cause is Cause.ENQUEUED and placement.death is None
    if not plain or len(rows.sequence) != count or rows.expires is not NEVER_US:
        return None  # no row occurs twice, so the batch is complete if the counts are equal
    return BatchTarget(placement.queue.entity, int(rows.sequence[0]), rows.enqueued)
