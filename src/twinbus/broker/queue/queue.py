"""A queue: delivers, settles, dead-letters and expires the waiting messages of an entity.

Subscriptions, dead-letter queues and the scheduled messages of a topic are queues, too. Sends add
messages with staging.py, leases of ranges are in leasing.py, and answers.py answers the requests
that wait for messages. Methods decide, change memory, and add to the commit what must be written to
the log. Methods that depend on the time get `now`. At the start of a turn, `tick` applies the
timers up to that time. Afterwards no lock has expired, no message has expired, and no scheduled
message is due. If more than MAX_BATCH_MESSAGES messages have expired or are due, the rest follows
in the next turn.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from twinbus.broker.accounts.throttle import busy_entity
from twinbus.broker.lifecycle import Cause, State
from twinbus.broker.queue.answers import dismiss, refuse_waiting
from twinbus.broker.queue.dead_letter import MAX_DELIVERY_COUNT_EXCEEDED, TTL_EXPIRED, Death
from twinbus.broker.queue.delivery import NOTHING, DeliveryLock, delivered, delivered_rows
from twinbus.broker.queue.leasing import end_leases
from twinbus.broker.queue.ranges import Leases
from twinbus.broker.queue.session import GrantedLock, Sessions
from twinbus.broker.queue.shared import QueueContext
from twinbus.broker.queue.tokens import token_columns, token_numbers, token_of
from twinbus.broker.queue.waiters import Waiters
from twinbus.broker.queue.waiting import Indices, Rows, Waiting, once
from twinbus.broker.store.commit import Commit, Effect, Entries, Fact
from twinbus.clock import from_us, moment_us
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessageLockLostError,
    MessageNotFoundError,
    SessionLockLostError,
)
from twinbus.limits import (
    FORWARD_RETRY_US,
    MAX_BATCH_MESSAGES,
    MAX_LOCKED_SESSIONS,
    MAX_RECEIVE_BYTES,
    MIN_QUOTA_BYTES,
    NEVER_US,
    ROWS_AS_ROWS,
    SESSION_QUOTA_BYTES,
    SHOWN_LOST,
)
from twinbus.message import Int64s
from twinbus.protocol.commands import (
    DeleteMessages,
    Disposition,
    Peek,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    SessionGrant,
    SessionLock,
)
from twinbus.protocol.meter import Metered, load_of_settled, load_of_sizes
from twinbus.protocol.rows import Deliveries

_DELETING = -1  # the lock number of messages that are being deleted: no token has it
_CAUSES = {
    Disposition.DEFER: Cause.DEFERRED,
    Disposition.RELEASE: Cause.LAPSED,
}


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings on which a queue's behaviour depends; times are in microseconds."""

    lock_us: int
    time_to_live_us: int
    max_delivery_count: int
    dead_letter_on_expiration: bool
    requires_session: bool


Resend = Callable[[Indices, Cause, int, Commit], None]


@dataclass(frozen=True, slots=True)
class _Deleted(Effect):
    """Messages that are deleted when they are delivered, or by DeleteMessages."""

    queue: "Queue"
    at: Indices

    def durable(self) -> None:
        """Remove the messages."""
        self.queue.settle_gone(self.at, Cause.COMPLETED)

    def refused(self) -> None:
        """Make the messages deliverable again, because the log refused the record."""
        self.queue.undo_delete(self.at)


@dataclass(frozen=True, slots=True)
class _StateSet(Effect):
    """The new state of a session."""

    sessions: Sessions
    name: str
    state: bytes | None
    updated: int

    def durable(self) -> None:
        """Apply the state."""
        self.sessions.keep_state(self.name, self.state, self.updated)


class Queue:
    """The waiting messages of an entity, and the requests that wait for them."""

    def __init__(
        self, entity: int, path: str, settings: QueueSettings, shared: QueueContext
    ) -> None:
        self.entity = entity  # the queue's number in the log
        self.path = path
        self.settings = settings
        self.shared = shared
        self.dead_letter: Queue | None = None  # None: for a dead-letter queue and a topic's queue
        # Routes due or parked messages to other queues; None: they stay in this queue.
        self.resend: Resend | None = None
        self.waiting = Waiting(shared.undo, shared.resources)
        self.sessions = Sessions(shared.undo)
        self.leases = Leases(shared.undo)
        self.waiters = Waiters(entity, shared)
        self.next_sequence = 1
        # The names of this queue as an origin, each with the first sequence number it applies to.
        self.origins = [(0, "")]
        self.pause = 0  # how long its timers are paused after a failure; 0: they work
        self.retry_at = NEVER_US  # when messages parked for forwarding are retried
        self.idle_at = NEVER_US  # when its entity is deleted if it stays unused

    @property
    def used_bytes(self) -> int:
        """The bytes of its messages, sessions and session states that count for quotas."""
        waiting, sessions = self.waiting, self.sessions
        message_bytes = max(waiting.size_in_bytes, MIN_QUOTA_BYTES * waiting.live)
        if not self.settings.requires_session:
            return message_bytes
        return message_bytes + sessions.state_bytes + SESSION_QUOTA_BYTES * len(sessions)

    def origin_at(self, at: Indices) -> tuple[str, Indices]:
        """Return the origin name of the first row, and the rows with the same name."""
        numbers = self.waiting.get("sequence", at)
        firsts = [first for first, _ in self.origins]
        index = bisect_right(firsts, int(numbers[0])) - 1
        if index + 1 < len(firsts):
            at = at[numbers < firsts[index + 1]]
        return self.origins[index][1], at

    def touch(self) -> None:
        """Record that the namespace must serve the waiting requests and set the alarm."""
        self.shared.changed_queues[self.entity] = self

    # -- staging -------------------------------------------------------------------------------

    def allocate(self, count: int) -> Int64s:
        """Return the next sequence numbers."""
        first = self.next_sequence
        self.next_sequence += count
        return np.arange(first, first + count, dtype=np.int64)

    def note_places(self, entries: Entries, at: Indices, state: State) -> None:
        """Add the places of these rows to the entries of a commit."""
        get = self.waiting.get
        names = (
            "sequence",
            "failures",
            "enqueued",
            "expires",
            "due",
            "size",
            "death",
            "batch",
            "row",
        )
        columns: dict[str, Any] = {name: get(name, at) for name in names}
        entries.places.append({"entity": self.entity, "state": state, **columns})

    # -- delivering ----------------------------------------------------------------------------

    def receive(self, command: Receive, now: int, commit: Commit) -> Metered | None:
        """Deliver available messages; None if there are none."""
        lock, until = self._lock_for(command.session, now)
        if command.session is None:
            at = self.waiting.deliverable(command.max_messages)
        else:
            at = self.sessions.deliverable(
                command.session.session_id, command.max_messages, self.waiting
            )
        if not len(at):
            return None
        at = self.within(at, min(command.max_bytes, MAX_RECEIVE_BYTES))
        are_rows = command.takes_rows and (
            len(at) <= ROWS_AS_ROWS
            # Messages that were sent one by one are stored as rows, so no columns must be created.
            or self.shared.bodies.are_single(self.waiting.get("batch", at))
        )
        form = delivered_rows if are_rows else delivered
        return self._deliver(at, command.mode, DeliveryLock(lock, until), commit, form)

    def receive_deferred(self, command: ReceiveDeferred, now: int, commit: Commit) -> Metered:
        """Deliver deferred messages by sequence number, all or none."""
        lock, until = self._lock_for(command.session, now)
        numbers = np.asarray(command.sequence_numbers, np.int64)
        session = -1
        if command.session is not None:
            session = self.sessions.number_of(command.session.session_id)
        at = self._find_in(numbers, State.DEFERRED, "deferred", session)
        size = int(self.waiting.get("size", at).sum(dtype=np.int64))
        if size > MAX_RECEIVE_BYTES and len(at) > 1:
            raise InvalidArgumentError(
                f"the deferred messages have {size} bytes; a reply may have {MAX_RECEIVE_BYTES}. "
                "Receive them in parts"
            )
        return self._deliver(at, command.mode, DeliveryLock(lock, until), commit)

    def _lock_for(self, session: SessionLock | None, now: int) -> tuple[int, int]:
        """Return the number of the lock for messages to be delivered, and when the lock expires.

        With a session, its lock is also the lock of its messages.
        """
        if session is None:
            return self.shared.locks.next(), now + self.settings.lock_us
        lock = self._lock_of(session)
        return lock.number, lock.until

    def _find_in(self, numbers: Int64s, state: State, word: str, session: int = -1) -> Indices:
        """Return the rows of messages in a state; raise if one of them is missing.

        `word` names the state in the error. -1: the messages may have any session.
        """
        at = self.waiting.find(numbers)
        found = (at >= 0) & (self.waiting.get("state", at) == state.value)
        if session >= 0:
            found &= self.waiting.get("session", at) == session
        if not found.all():
            missing = numbers[~found].tolist()
            raise MessageNotFoundError(
                f"{self.path} has no {word} message {', '.join(map(str, missing[:10]))}: it was "
                "settled, has expired, is locked, or never existed. Peek to see which messages are "
                f"{word}",
                path=self.path,
                sequence_numbers=missing[:SHOWN_LOST],
            )
        return once(at)

    def _deliver(
        self,
        at: Indices,
        mode: ReceiveMode,
        lock: DeliveryLock,
        commit: Commit,
        form: Callable[..., Deliveries] = delivered,
    ) -> Metered:
        is_locked = mode is ReceiveMode.PEEK_LOCK
        deliveries = form(  # first, because a read may fail
            self.waiting, at, self.shared, lock if is_locked else None
        )
        self.waiting.step(at, Cause.RECEIVED)
        if not is_locked:
            self._delete(at, commit)
        else:
            self.waiting.put("lock", at, lock.lock)
            if self.settings.requires_session:
                self.waiting.put("due", at, NEVER_US)  # the lock of the session applies
            else:
                self.waiting.set_due(at, lock.until)
        return Metered(deliveries, load_of_sizes(self.waiting.get("size", at)))

    def delete(self, command: DeleteMessages, commit: Commit) -> Metered:
        """Delete deliverable messages of a queue, or of a session that the caller has locked."""
        before = NEVER_US
        if command.enqueued_before_utc is not None:
            before = moment_us(command.enqueued_before_utc)
        if command.session is None:
            at = self.waiting.enqueued_before(before, command.max_messages)
        else:
            self._lock_of(command.session)
            at = self.sessions.messages(command.session.session_id, self.waiting)
            at = self.waiting.in_state(at, State.ACTIVE)
            at = at[self.waiting.get("enqueued", at) < before][: command.max_messages]
        if len(at):
            self.waiting.step(at, Cause.RECEIVED)
            self._delete(at, commit)
        return Metered(len(at), load_of_settled(len(at)))

    def _delete(self, at: Indices, commit: Commit) -> None:
        """Delete locked messages when the commit is durable.

        Until then no lock token matches them, and they do not become deliverable when a timer fires
        or their session is released.
        """
        self.waiting.put("lock", at, _DELETING)
        self.waiting.put("due", at, NEVER_US)
        commit.must_sync = True
        commit.tentative.gone(self.entity, self.waiting.get("sequence", at), Cause.COMPLETED)
        commit.effects.append(_Deleted(self, at))

    def undo_delete(self, at: Indices) -> None:
        """Make messages deliverable again, because the log refused to delete them."""
        self.waiting.step(at, Cause.LAPSED)
        self._note_deliverable(at)
        self.touch()

    def within(self, at: Indices, max_bytes: int) -> Indices:
        """Return as many rows as fit into `max_bytes`, at least one."""
        total = np.cumsum(self.waiting.get("size", at), dtype=np.int64)
        return at[: max(1, int(np.searchsorted(total, max_bytes, side="right")))]

    def peek(self, command: Peek) -> pa.RecordBatch:
        """Return visible messages without changing them."""
        first, limit = command.from_sequence_number, command.max_messages
        if command.session_id is None:
            at = self.waiting.from_number(first, limit)
        else:
            at = self.sessions.visible(command.session_id, first, limit, self.waiting)
        return self.browse(at, command.max_bytes)

    def browse(self, at: Indices, max_bytes: int) -> pa.RecordBatch:
        """Return these messages, up to `max_bytes`, without changing them."""
        return (
            delivered(self.waiting, self.within(at, min(max_bytes, MAX_RECEIVE_BYTES)), self.shared)
            if len(at)
            else NOTHING
        )

    # -- settling ------------------------------------------------------------------------------

    def settle(
        self, tokens: pa.Array, disposition: Disposition, death: Death | None, commit: Commit
    ) -> None:
        """Settle the messages that these tokens lock; then raise if any token has no lock."""
        if disposition is Disposition.COMPLETE and len(tokens) == 1:
            self._complete_one(*token_numbers(tokens), commit)
            return
        at, lost = self.locked_rows(tokens)
        if disposition is Disposition.DEAD_LETTER:
            assert death is not None
            self.bury(at, Cause.DEAD_LETTERED, death, commit, counted=True)
        elif disposition is Disposition.ABANDON:
            self._return_failed(at, Cause.ABANDONED, commit)
        elif disposition is Disposition.COMPLETE:
            commit.kept.gone(self.entity, self.waiting.get("sequence", at), Cause.COMPLETED)
            self.settle_gone(at, Cause.COMPLETED)
        else:
            self.waiting.step(at, _CAUSES[disposition])
            if disposition is Disposition.DEFER:
                self._note_states(at, commit)
            self._note_deliverable(at)
        if lost:
            raise self._lock_lost(lost, len(at))

    def _complete_one(self, lock: int, number: int, commit: Commit) -> None:
        """Complete one message. Nearly every settlement does this, so it avoids arrays."""
        row = self.waiting.locked_row(number, lock)
        if row is None:
            raise self._lock_lost([token_of(lock, number)], 0)
        commit.kept.completed_one(self.entity, number)
        self.shared.bodies.release_one(self.waiting.complete(row))

    def renew(self, tokens: pa.Array, now: int) -> int:
        """Lock messages for another lock duration; return when the locks expire."""
        if self.settings.requires_session:
            raise InvalidOperationError(
                f"messages of {self.path} are locked by their session; renew the session instead",
                path=self.path,
            )
        at, lost = self.locked_rows(tokens)
        until = now + self.settings.lock_us
        self.waiting.set_due(at, until)
        if lost:
            raise self._lock_lost(lost, len(at))
        return until

    def locked_rows(self, tokens: pa.Array) -> tuple[Indices, list[Any]]:
        """Return the rows that these tokens still lock, and the tokens without a lock."""
        if len(tokens) == 1:  # as in most settlements; numpy is slow with few numbers
            lock, number = token_numbers(tokens)
            at = self.waiting.locked(number, lock)
            return at, [] if len(at) else [token_of(lock, number)]
        locks, numbers = token_columns(tokens)
        at = self.waiting.find(numbers)
        states = self.waiting.get("state", at)
        good = (at >= 0) & (locks > 0) & (self.waiting.get("lock", at) == locks)
        good &= (states == State.LOCKED) | (states == State.DEFERRED_LOCKED)
        if good.all():
            return once(at), []
        lost = [token_of(*pair) for pair in zip(locks[~good], numbers[~good], strict=True)]
        return once(at[good]), lost

    def _lock_lost(
        self, lost: list[Any], settled: int
    ) -> MessageLockLostError | SessionLockLostError:
        kind = SessionLockLostError if self.settings.requires_session else MessageLockLostError
        others = f"The request was executed for its {settled} other message(s)"
        remark = f". {others}" if settled else ""
        return kind(
            f"{len(lost)} lock token(s) of {self.path} are unknown, settled or expired. Messages "
            f"whose lock has expired are delivered again{remark}",
            path=self.path,
            lock_tokens=lost[:SHOWN_LOST],
            settled=settled,
        )

    def settle_gone(self, at: Indices, cause: Cause) -> None:
        """Remove messages, and release their space."""
        batches = self.waiting.get("batch", at)
        self.waiting.step(at, cause)
        self.shared.bodies.release(batches)

    def _return_failed(self, at: Indices, cause: Cause, commit: Commit) -> None:
        """Count a failed delivery; dead-letter messages that failed too often, return the others.

        `cause` is the lifecycle step of the messages that return.
        """
        failures = self.waiting.get("failures", at) + 1
        self.waiting.put("failures", at, failures)
        dead = failures >= self.settings.max_delivery_count
        if dead.any() and self.dead_letter is not None:
            text = f"delivered {self.settings.max_delivery_count} times without being completed"
            self.bury(
                at[dead],
                Cause.DEAD_LETTERED,
                Death(MAX_DELIVERY_COUNT_EXCEEDED, text, self.path),
                commit,
            )
            at = at[~dead]
        self.waiting.step(at, cause)
        self._note_states(at, commit)
        self._note_deliverable(at)

    def _note_states(self, at: Indices, commit: Commit) -> None:
        get = self.waiting.get
        commit.kept.change(self.entity, get("sequence", at), get("state", at), get("failures", at))

    def bury(
        self, at: Indices, cause: Cause, death: Death, commit: Commit, *, counted: bool = False
    ) -> None:
        """Move messages to the dead-letter queue.

        `counted`: a client chose the texts of `death`, so their size counts for the quota.

        If the dead-letter queue forwards, the messages are parked there, and forwarded in another
        record at the end of the turn. If the log refuses that record, they are still dead-lettered.
        """
        if not len(at):
            return
        if self.dead_letter is None:
            raise InvalidOperationError(
                f"{self.path} has no dead-letter queue of its own; complete the message instead",
                path=self.path,
            )
        changes: dict[str, Any] = {"death": self.shared.deaths.number(death, commit.kept)}
        if counted:
            changes["size"] = self.waiting.get("size", at) + death.size
        if self.dead_letter.resend is not None:
            changes["state"] = State.TRANSFERRING
            self.shared.parked[self.dead_letter.entity] = self.dead_letter
        self._move(at, cause, self.dead_letter, changes, commit)

    def _move(
        self, at: Indices, cause: Cause, target: "Queue", changes: dict[str, Any], commit: Commit
    ) -> None:
        """Move messages in one commit: they get new numbers in `target`, which may be this queue.

        `changes` contains the columns that get new values.
        """
        get = self.waiting.get
        names = ("enqueued", "size", "batch", "row", "failures")
        columns: dict[str, Any] = {name: get(name, at) for name in names}
        sessions = get("session", at) if target is self else -1
        columns |= {"session": sessions, "state": State.ACTIVE, **changes}
        commit.must_sync = True  # the new number must not be visible before it is durable
        commit.kept.gone(self.entity, get("sequence", at), cause)
        self.waiting.step(at, cause)
        sequence = target.allocate(len(at))
        rows = Rows(sequence=sequence, **columns)
        first = target.waiting.add(rows)
        moved = np.arange(first, first + len(at))
        target.note_places(commit.kept, moved, columns["state"])
        target.touch()
        if target.settings.requires_session:
            target.sessions.add(target.waiting.get("session", moved).tolist(), sequence)

    # -- sessions ------------------------------------------------------------------------------

    def accept(self, session_id: str | None, now: int) -> SessionGrant | None:
        """Lock a session and return the grant; None if the session is not available now.

        Without a session id, any session with deliverable messages is locked.
        """
        name = session_id if session_id is not None else self.sessions.available(self.waiting)
        if name is None or self.sessions.lock_of(name) is not None:
            return None
        if self.sessions.locked >= MAX_LOCKED_SESSIONS:
            raise busy_entity(self.path, "locked sessions", MAX_LOCKED_SESSIONS)
        lock, until = self.shared.locks.next(), now + self.settings.lock_us
        self.sessions.grant(name, lock, until)
        return SessionGrant(SessionLock(name, token_of(lock, 0)), from_us(until))

    def _lock_of(self, session: SessionLock) -> GrantedLock:
        """Return the lock of a session; raise unless the caller's token belongs to this lock."""
        lock = self.sessions.lock_of(session.session_id)
        if lock is None or token_of(lock.number, 0) != session.lock_token:
            raise SessionLockLostError(
                f"the lock of session {session.session_id!r} of {self.path} has expired or was "
                "released; accept the session again",
                path=self.path,
                session_id=session.session_id,
            )
        return lock

    def renew_session(self, session: SessionLock, now: int) -> int:
        """Lock a session for another lock duration; return when the lock expires."""
        until = now + self.settings.lock_us
        self.sessions.renew(self._lock_of(session), until)
        return until

    def release_session(self, session: SessionLock) -> None:
        """Release a session; its locked messages return without counting a failed delivery."""
        lock = self._lock_of(session)
        at = self._locked_in(session.session_id, lock.number)
        self.waiting.step(at, Cause.LAPSED)
        self.sessions.release(session.session_id, self.waiting)

    def _locked_in(self, session_id: str, lock: int) -> Indices:
        """Return the messages of a session that have the lock with this number."""
        at = self.sessions.messages(session_id, self.waiting)
        at = self.waiting.in_state(at, State.LOCKED, State.DEFERRED_LOCKED)
        return self.waiting.locked_by(at, lock)

    def session_state(self, session: SessionLock) -> bytes | None:
        """Return a session's state; None if it has none."""
        self._lock_of(session)
        return self.sessions.states.get(session.session_id)

    def set_session_state(
        self, session: SessionLock, state: bytes | None, now: int, commit: Commit
    ) -> None:
        """Store a session's state durably; None removes it."""
        self._lock_of(session)
        name = session.session_id
        commit.must_sync = True
        commit.tentative.facts += self.state_facts(name, state, now)
        commit.effects.append(_StateSet(self.sessions, name, state, now))

    def state_facts(self, name: str, state: bytes | None, updated: int) -> list[Fact]:
        """Return the facts of a session's state for the log."""
        key = f"{self.entity}/{name}"
        if state is None:
            return [Fact("session", key, None), Fact("session updated", key, None)]
        return [Fact("session", key, state), Fact.of("session updated", key, updated)]

    # -- scheduled -----------------------------------------------------------------------------

    def cancel(self, numbers: Int64s, commit: Commit) -> None:
        """Cancel scheduled messages, all or none."""
        at = self._find_in(numbers, State.SCHEDULED, "scheduled")
        commit.must_sync = True
        commit.kept.gone(self.entity, self.waiting.get("sequence", at), Cause.CANCELLED)
        self.settle_gone(at, Cause.CANCELLED)

    # -- time ----------------------------------------------------------------------------------

    @property
    def next_event(self) -> int:
        """The time at which `tick` has something to do."""
        return min(
            self.waiting.next_due,
            self.waiting.next_expiry,
            self.sessions.next_due,
            self.leases.next_due,
            self.retry_at,
            self.idle_at,
            self.waiters.next_deadline,
        )

    def shift(self, by: int, now: int) -> None:
        """Move all deadlines that are durations, because the wall clock was set to `now`."""
        self.waiting.shift(by, now)
        for timed in (self.sessions, self.leases, self.waiters):
            timed.shift(by)
        for name in ("retry_at", "idle_at"):
            moment = getattr(self, name)
            setattr(self, name, moment if moment == NEVER_US else moment + by)

    def forget_bounds(self) -> None:
        """Let the next tick check every deadline, because a failed tick may have missed some."""
        self.waiting.forget_bounds()
        self.sessions.next_due = self.waiters.next_deadline = 0

    def tick(self, now: int, commit: Commit) -> None:
        """Apply the timers up to this time."""
        for name in self.sessions.expired(now):
            lock = self.sessions.lock_of(name)
            assert lock is not None
            self._return_failed(self._locked_in(name, lock.number), Cause.LAPSED, commit)
            self.sessions.release(name, self.waiting)
        end_leases(self, [lease.epoch for lease in self.leases if lease.until <= now], commit)
        due = self.waiting.due(now)
        if len(due):
            scheduled = self.waiting.get("state", due) == State.SCHEDULED
            self._return_failed(due[~scheduled], Cause.LAPSED, commit)
            self._activate(due[scheduled], now, commit)
        expired = self.waiting.expired(now)
        if len(expired) > MAX_BATCH_MESSAGES:  # the rest follows in the next turn
            expired = expired[:MAX_BATCH_MESSAGES]
            self.waiting.next_expiry = now
        self._expire(expired, commit)
        if now >= self.retry_at:
            self.retry_at = NEVER_US
            self.resend_parked(now, commit)
        dismiss(self, now, commit)

    def _activate(self, at: Indices, now: int, commit: Commit) -> None:
        if not len(at):
            return
        at = at[np.argsort(self.waiting.get("due", at), kind="stable")]
        if len(at) > MAX_BATCH_MESSAGES:  # the rest follows in the next turn
            at = at[:MAX_BATCH_MESSAGES]
            self.look_again(Cause.ACTIVATED, now)
        if self.resend is not None:
            self.resend(at, Cause.ACTIVATED, now, commit)
            return
        get = self.waiting.get
        columns = {"enqueued": get("due", at), "expires": get("expires", at)}
        self._move(at, Cause.ACTIVATED, self, columns, commit)

    def resend_parked(self, now: int, commit: Commit) -> None:
        """Forward the parked messages; if this queue no longer forwards, make them deliverable."""
        if self.resend is not None:
            self.resend(self.parked(), Cause.FORWARDED, now, commit)
        else:
            self.keep_parked(self.parked(), commit)

    def parked(self) -> Indices:
        """Return the parked messages."""
        return self.waiting.in_state(self.waiting.all(), State.TRANSFERRING)

    def keep_parked(self, at: Indices, commit: Commit) -> None:
        """Make parked messages deliverable in this queue."""
        self.waiting.step(at, Cause.ENQUEUED)
        self._note_states(at, commit)
        self._note_deliverable(at)

    def look_again(self, cause: Cause, now: int) -> None:
        """Let the next turn continue with the other parked or due messages.

        `cause` is FORWARDED for parked messages, and ACTIVATED for scheduled ones.
        """
        if cause is Cause.FORWARDED:
            self.retry_at = now
        else:
            self.waiting.next_due = min(self.waiting.next_due, now)

    def try_again(self, at: Indices, cause: Cause, now: int) -> None:
        """Try again a little later to forward or activate messages: the log refused the commit."""
        if cause is Cause.FORWARDED:
            self.retry_at = now + FORWARD_RETRY_US
        else:
            self.waiting.set_due(at, now + FORWARD_RETRY_US)
        self.touch()  # sets the alarm

    def _expire(self, at: Indices, commit: Commit) -> None:
        if not len(at):
            return
        if self.settings.dead_letter_on_expiration and self.dead_letter is not None:
            death = Death(TTL_EXPIRED, "the message exceeded its time to live", self.path)
            self.bury(at, Cause.EXPIRED, death, commit)
        else:
            commit.kept.gone(self.entity, self.waiting.get("sequence", at), Cause.EXPIRED)
            self.settle_gone(at, Cause.EXPIRED)

    def _note_deliverable(self, at: Indices) -> None:
        if self.settings.requires_session and len(at):
            self.sessions.note_deliverable(np.unique(self.waiting.get("session", at)).tolist())

    def dissolve(self, commit: Commit) -> None:
        """Drop the messages and refuse waiting requests, because the entity is deleted."""
        self.shared.bodies.release(self.waiting.get("batch", self.waiting.all()))
        self.waiting.clear()
        self.shared.changed_queues.pop(self.entity, None)
        error = EntityNotFoundError(f"{self.path} was deleted. Create it again", path=self.path)
        refuse_waiting(self, error, commit)
