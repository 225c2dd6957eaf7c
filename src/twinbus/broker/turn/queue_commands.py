"""Queue commands: what clients ask of the messages of one queue.

Each method executes one command: it finds the queue, checks that the queue and its entity allow the
command, and calls the queue (queue/queue.py), which decides. The names of the methods are in
protocol/table.py. A request that finds no messages or no session may wait: it is added to the
waiters of the queue, and gets its reply in a later turn.

The namespace calls this in a turn, each command isolated from the others (isolation.py).
"""

from typing import Any

import pyarrow as pa

from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.queue.answers import no_session
from twinbus.broker.queue.dead_letter import Death
from twinbus.broker.queue.delivery import NOTHING
from twinbus.broker.queue.leasing import (
    end_lease,
    first_locked_or_leased,
    lease_range,
    read_range,
    renew_range,
    settle_range,
)
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.waiters import Waiter
from twinbus.broker.store.commit import Commit
from twinbus.broker.turn.overload import OverloadGuard
from twinbus.clock import from_us, moment_us, to_us
from twinbus.entities import SubscriptionDescription
from twinbus.errors import InvalidOperationError, QuotaExceededError
from twinbus.limits import MAX_RECEIVE_MESSAGES
from twinbus.protocol import commands as c
from twinbus.protocol.meter import Metered, load_of_settled
from twinbus.protocol.requests import Request
from twinbus.values import check_whole

PARKED = object()  # returned instead of a reply: the request waits


class QueueCommands:
    """Executes commands for messages, sessions and ranges of a queue."""

    def __init__(self, directory: Directory, overload: OverloadGuard) -> None:
        self._directory = directory
        self._overload = overload

    # -- receiving -----------------------------------------------------------------------------

    def _queue(self, path: str, now: int) -> Queue:
        """Return the queue of a path, and record that it is used in this turn."""
        entity, queue = self._directory.queue(path)
        entity.note_use(now)
        queue.touch()
        return queue

    def _receivable(self, path: str, session: c.SessionLock | None, now: int) -> Queue:
        """Return the queue of a path; raise if it does not allow this receive."""
        entity, queue = self._directory.queue(path)
        if queue is entity.queue:
            entity.check_receive()
        if queue.settings.requires_session and session is None:
            raise InvalidOperationError(
                f"the entity {path} requires sessions. Accept a session and receive from it",
                path=path,
            )
        if session is not None and not queue.settings.requires_session:
            raise InvalidOperationError(
                f"{path} has no sessions: it is a dead-letter queue, or was created without "
                "requires_session. Receive without a session",
                path=path,
            )
        return self._queue(path, now)

    def receive(self, command: c.Receive, request: Request, now: int, commit: Commit) -> Any:
        """Deliver messages, or let the request wait."""
        wait = to_us(command.wait)
        queue = self._receivable(command.path, command.session, now)
        must_wait = queue.waiters.has_receives and command.session is None  # earlier requests first
        delivery = None if must_wait else queue.receive(command, now, commit)
        if delivery is not None:
            return delivery
        return self._park(queue, Waiter(request, command, now + wait)) if wait else NOTHING

    def _park(self, queue: Queue, waiter: Waiter) -> object:
        self._overload.check_receives(queue.path, waiter.request.principal)
        queue.waiters.add(waiter)
        return PARKED

    def receive_deferred(
        self, command: c.ReceiveDeferred, _: Request, now: int, commit: Commit
    ) -> Metered:
        """Deliver deferred messages by number."""
        check_whole(
            "the count of sequence_numbers", len(command.sequence_numbers), 1, MAX_RECEIVE_MESSAGES
        )
        queue = self._receivable(command.path, command.session, now)
        return queue.receive_deferred(command, now, commit)

    def peek(self, command: c.Peek, _: Request, now: int, __: Commit) -> pa.RecordBatch:
        """Return messages without locking them."""
        if command.session_id is not None:
            self._with_sessions(command.path)
        entity, queue = self._directory.browsed(command.path)
        entity.note_use(now)
        queue.touch()
        return queue.peek(command)

    def delete_messages(
        self, command: c.DeleteMessages, _: Request, now: int, commit: Commit
    ) -> Metered:
        """Delete deliverable messages."""
        return self._receivable(command.path, command.session, now).delete(command, commit)

    def settle(self, command: c.Settle, _: Request, now: int, commit: Commit) -> Any:
        """Complete, abandon, defer, dead-letter or release locked messages."""
        queue = self._queue(command.path, now)
        death = None
        if command.disposition is c.Disposition.DEAD_LETTER:
            death = Death(command.reason, command.description, queue.path)
            self._check_reason_room(command.path, death.size * len(command.lock_tokens))
        queue.settle(command.lock_tokens, command.disposition, death, commit)
        return Metered(None, load_of_settled(len(command.lock_tokens)))

    def _check_reason_room(self, path: str, size: int) -> None:
        """Raise if dead-letter reasons exceed the quota: each message counts its own reason."""
        entity, _ = self._directory.queue(path)
        if size > max(self._quota(entity).room, 0):
            raise QuotaExceededError(
                f"{path} has no room for dead-letter reasons of {size} bytes; complete messages of "
                "its dead-letter queue, or give a shorter reason",
                path=path,
            )

    def _quota(self, entity: Entity) -> Entity:
        """Return the entity with the quota: for a subscription, its topic."""
        description = entity.description
        if isinstance(description, SubscriptionDescription):
            return self._directory.entity(description.topic_path)
        return entity

    def renew_locks(self, command: c.RenewLocks, _: Request, now: int, __: Commit) -> Any:
        """Lock messages for another lock duration."""
        until = self._queue(command.path, now).renew(command.lock_tokens, now)
        return Metered(from_us(until), load_of_settled(len(command.lock_tokens)))

    # -- sessions ------------------------------------------------------------------------------

    def accept_session(
        self, command: c.AcceptSession, request: Request, now: int, _: Commit
    ) -> Any:
        """Lock a session, or let the request wait for one."""
        wait = to_us(command.wait)
        entity, queue = self._with_sessions(command.path)
        entity.check_receive()
        self._queue(command.path, now)
        grant = queue.accept(command.session_id, now)
        if grant is not None:
            return grant
        if not wait:
            raise no_session(queue, command.session_id, has_waited=False)
        return self._park(queue, Waiter(request, command, now + wait))

    def renew_session(self, command: c.RenewSession, _: Request, now: int, __: Commit) -> Any:
        """Lock a session for another lock duration."""
        return from_us(self._queue(command.path, now).renew_session(command.session, now))

    def release_session(self, command: c.ReleaseSession, _: Request, now: int, __: Commit) -> None:
        """Release a session."""
        self._queue(command.path, now).release_session(command.session)

    def get_session_state(
        self, command: c.GetSessionState, _: Request, now: int, __: Commit
    ) -> bytes | None:
        """Return the state of a session."""
        return self._queue(command.path, now).session_state(command.session)

    def set_session_state(
        self, command: c.SetSessionState, __: Request, now: int, commit: Commit
    ) -> None:
        """Store the state of a session."""
        queue = self._queue(command.path, now)
        name = command.session.session_id
        grows = len(command.state or b"") - len(queue.sessions.states.get(name, b""))
        entity, _ = self._directory.queue(command.path)
        if grows > max(self._quota(entity).room, 0):
            raise QuotaExceededError(
                f"{command.path} has no room for a session state of {len(command.state or b'')} "
                "bytes; receive messages, remove states, or raise max_size_in_megabytes",
                path=command.path,
            )
        queue.set_session_state(command.session, command.state, now, commit)

    def list_sessions(self, command: c.ListSessions, _: Request, now: int, __: Commit) -> list[str]:
        """Return a page of the sessions that have messages or a state.

        With `state_updated_after_utc`, return the sessions whose state changed since that time.
        """
        queue = self._with_sessions(command.path)[1]
        self._queue(command.path, now)
        after = command.state_updated_after_utc
        if after is None:
            return queue.sessions.listed(queue.waiting, command.skip, command.max_sessions)
        names = queue.sessions.updated_after(moment_us(after))
        return names[command.skip : command.skip + command.max_sessions]

    def _with_sessions(self, path: str) -> tuple[Entity, Queue]:
        """Return the entity and queue of a path; raise if the queue has no sessions."""
        entity, queue = self._directory.queue(path)
        if not queue.settings.requires_session:
            raise InvalidOperationError(
                f"{path} has no sessions: it is a dead-letter queue, or was created without "
                "requires_session. Receive or peek without a session",
                path=path,
            )
        return entity, queue

    # -- ranges --------------------------------------------------------------------------------

    def lease_range(self, command: c.LeaseRange, request: Request, now: int, commit: Commit) -> Any:
        """Lease messages, or let the request wait."""
        wait = to_us(command.wait)
        queue = self._receivable(command.path, None, now)
        lease = lease_range(queue, command, now, commit)
        if lease is not None or not wait:
            return lease
        _, owner = first_locked_or_leased(queue, () if command.past is None else command.past)
        return self._park(queue, Waiter(request, command, now + wait, owner))

    def renew_range(self, command: c.RenewRange, _: Request, now: int, commit: Commit) -> Any:
        """Renew a lease."""
        until = now + to_us(command.duration)
        return from_us(renew_range(self._queue(command.path, now), command.epoch, until, commit))

    def read_range(self, command: c.ReadRange, _: Request, now: int, __: Commit) -> Any:
        """Return leased messages."""
        return read_range(self._queue(command.path, now), command)

    def settle_range(self, command: c.SettleRange, _: Request, now: int, commit: Commit) -> Any:
        """Complete and dead-letter messages of a lease."""
        queue = self._queue(command.path, now)
        size = sum(
            Death(part.reason, part.description, "").size * len(part.sequence_numbers)
            for part in command.dead_lettered
        )
        if size:
            self._check_reason_room(command.path, size)
        return Metered(None, load_of_settled(settle_range(queue, command, commit)))

    def release_range(self, command: c.ReleaseRange, _: Request, now: int, commit: Commit) -> None:
        """Release a lease."""
        queue = self._queue(command.path, now)
        queue.leases.get(command.epoch)
        end_lease(queue, command.epoch, commit)
