"""The namespace in memory: the directory of entities, and the execution of commands.

`BrokerNamespace` is pure: it gets commands, `now` and a commit, changes memory, and adds to the
commit what must be written to the log. It does not read a clock or write to a disk; it only reads
message bodies. The engine (engine.py) calls it: tick, execute, serve, commit.
"""

import heapq
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from twinbus.backoff import Backoff
from twinbus.broker.accounts.throttle import Thresholds, Throttle, Usage
from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.management import Management, key_fact
from twinbus.broker.entities.topic import Subscription, Topic
from twinbus.broker.lifecycle import BrokenInvariantError, State
from twinbus.broker.queue.dead_letter import Death
from twinbus.broker.queue.delivery import NOTHING
from twinbus.broker.queue.leasing import (
    first_held,
    lease_range,
    read_range,
    renew_range,
    settle_range,
)
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.shared import Shared
from twinbus.broker.queue.waiters import Waiter
from twinbus.broker.sending.intake import Intake, SendRequest
from twinbus.broker.sending.routing import Router
from twinbus.broker.sending.transfers import Transfers
from twinbus.broker.store.commit import Commit, Effect, Fact, owner_fact, transferred_fact
from twinbus.broker.turn.starts import Starts
from twinbus.clock import from_us, moment_us, to_us
from twinbus.entities import DEAD_LETTER_SUFFIX, SubscriptionDescription, dead_letter_path
from twinbus.errors import (
    CommandFailedError,
    InvalidOperationError,
    MessageLockLostError,
    MessagingError,
    QuotaExceededError,
    ServerBusyError,
    SessionLockLostError,
)
from twinbus.limits import (
    FORGET_INTERVAL_US,
    MAX_MESSAGE_BYTES,
    MAX_PAUSE_US,
    MAX_RECEIVE_MESSAGES,
    NEVER_US,
    SECOND_US,
    TURN_WORK,
    WORK_OPERATORS,
    WORK_ROWS,
    WORK_RULE_BYTES,
)
from twinbus.message import Int64s, sizes
from twinbus.protocol import commands as c
from twinbus.protocol.access import OWNER, AccessKeys, Principal
from twinbus.protocol.keys import Claim
from twinbus.protocol.meter import (
    SEND,
    Metered,
    found_nothing,
    load_of,
    load_of_settled,
    load_of_sizes,
    purpose_of,
    purpose_of_send,
)
from twinbus.protocol.operations import EMPTY, Load, Operation
from twinbus.protocol.origins import queue_source
from twinbus.protocol.requests import Request
from twinbus.protocol.table import (
    ROWS,
    Codec,
    is_small,
    row_of,
    size_of,
    unknown_command,
    work_of,
    work_of_load,
)
from twinbus.values import check_whole

_log = logging.getLogger("twinbus.broker")

_TIMER_BACKOFF = Backoff(SECOND_US, MAX_PAUSE_US)
PARKED = object()  # the reply follows later
_Handler = Callable[[Any, Request, int, Commit], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSettings:
    """The limits of a namespace."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True, slots=True)
class _DeletedIdle(Effect):
    """An entity that is deleted because it was not used."""

    namespace: "BrokerNamespace"
    entity: Entity
    now: int

    def refused(self) -> None:
        """Keep it for another idle period."""
        self.namespace.accessed(self.entity, self.now)


class BrokerNamespace:
    """The entities, and the commands for them."""

    def __init__(self, shared: Shared, settings: NamespaceSettings) -> None:
        self.shared = shared
        self.directory = Directory(shared)
        self.transfers = Transfers()
        self.meter = shared.meter
        self.storage_bytes = 0  # size of the log, set by the engine
        router = Router(self.directory, shared, settings.max_message_bytes)
        self._router = router
        self._intake = Intake(router, self.transfers, settings.max_message_bytes)
        self._throttle = Throttle(settings.thresholds)
        self.keys = AccessKeys()
        self.starts = Starts()
        self._management = Management(
            self.directory, self.keys, self.meter, self.adopt, shared.nonce
        )
        self.failures: Counter[str] = Counter()  # of commands and timers, by cause
        self._alarms: list[tuple[int, int]] = []  # (time, queue number), a heap
        self._armed: dict[int, int] = {}  # by queue number: its earliest alarm
        self._changed: dict[int, Queue] = {}  # queues changed in this turn
        self._forgets_at = 0  # when old ids may be searched for again
        self._work = 0  # of this turn, in ordinary commands
        self._unserved: dict[int, Queue] = {}  # with waiting requests to be served in the next turn
        self._handlers: dict[type, _Handler] = {
            row.command: getattr(self._management if row.is_managing else self, row.handler)
            for row in ROWS
            if row.codec is Codec.FIELDS  # sends are executed together, see `send`
        }

    def reconfigure(self, settings: NamespaceSettings) -> None:
        """Apply new limits to the following commands."""
        self._router.max_message_bytes = settings.max_message_bytes
        self._intake.reconfigure(settings.max_message_bytes)
        self._throttle.reconfigure(settings.thresholds)

    # -- a turn --------------------------------------------------------------------------------

    def tick(self, now: int, commit: Commit) -> None:
        """Run the timers up to this time.

        A queue whose timers fail is paused, longer each time; the other queues are not affected.
        """
        while self._alarms and self._alarms[0][0] <= now:
            when, number = heapq.heappop(self._alarms)
            if self._armed.get(number) == when:
                del self._armed[number]
            queue = self.directory.queue_numbered(number)
            if queue is None:
                continue
            retry_at, idle_at = queue.retry_at, queue.idle_at
            failure = self._alone(partial(self._tick_one, queue, now, commit), commit)
            if failure is None:
                queue.pause = 0
                continue
            self._note_failure(failure, f"the timers of {queue.path}")
            queue.retry_at, queue.idle_at = retry_at, idle_at
            queue.forget_bounds()
            queue.pause = _TIMER_BACKOFF.longer_us(queue.pause)
            self._arm(queue, now + queue.pause)

    def _tick_one(self, queue: Queue, now: int, commit: Commit) -> None:
        queue.tick(now, commit)
        queue.touch()
        if queue.idle_at <= now:
            self._delete_idle(queue, now, commit)

    def alone(self, work: Callable[[], None], commit: Commit, what: str) -> MessagingError | None:
        """Run `work`; if it fails, undo it and return the error to answer with."""
        failure = self._alone(work, commit)
        return None if failure is None else self._note_failure(failure, what)

    def _alone(self, work: Callable[[], None], commit: Commit) -> Exception | None:
        """Run `work`; if it raises, undo all of it and return what it raised.

        Lost locks are not a failure of a command: it has settled the other messages.
        """
        undo, savepoint = self.shared.undo, commit.savepoint()
        undo.begin()
        try:
            work()
        except (MessageLockLostError, SessionLockLostError) as error:
            undo.end()
            return error
        except Exception as error:  # noqa: BLE001 - any error affects only this command
            undo.roll_back()
            commit.roll_back(savepoint)
            return error
        undo.end()
        return None

    def _note_failure(self, error: Exception, what: str) -> MessagingError:
        """Return the answer to a command that raised; log an internal error of the broker."""
        if isinstance(error, MessagingError) and not isinstance(error, BrokenInvariantError):
            drop_frames(error)
            return error
        cause = cause_of(error)
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            _log.error("%s failed and was undone", what, exc_info=error)
        drop_frames(error)
        return CommandFailedError(
            f"the broker failed to execute {what} ({type(error).__name__}); it changed nothing, "
            "and a retry will not help. The log of the broker has the traceback"
        )

    def execute(self, requests: Sequence[Request], now: int, commit: Commit) -> Sequence[Request]:
        """Execute commands; sends are executed last, together. Replies are put into the commit.

        Return the requests for which the turn has no time: large ones, when the work of the turn is
        done, and all later ones of the same principals.
        """
        self._work = 0
        if self._unserved:  # the queue that took the time of the last turn is last
            self.shared.touched.update(reversed(self._unserved.items()))
            self._unserved = {}
        if len(requests) == 1 and type(requests[0].command) is c.Send:
            self.send([requests[0]], now, commit)
            return ()
        sends: dict[str, list[SendRequest]] = {}
        left: Sequence[Request] = ()
        done = self._execute_others(requests, sends, now, commit)
        if done < len(requests):
            last, left = _late(requests, done)
            self._execute_others(last, sends, now, commit, most=NEVER_US)
        for group in sends.values():
            self.send(group, now, commit)
        return left

    def _execute_others(
        self,
        requests: Sequence[Request],
        sends: dict[str, list[SendRequest]],
        now: int,
        commit: Commit,
        *,
        most: int = TURN_WORK,
    ) -> int:
        """Execute commands until the work of the turn is `most`, and gather the sends by entity.

        Return the number of requests that were executed or gathered.
        """
        has_topics = self.directory.topics > 0
        for position, request in enumerate(requests):
            if self._work >= most:
                return position
            command = request.command
            if isinstance(command, c.Send):
                together = sends.setdefault(command.path.lower(), [])
                together.append(request)
                if has_topics:
                    self._count_rules(command, is_first=len(together) == 1)
            else:
                self._execute_one(request, now, commit)
        return len(requests)

    def _count_rules(self, command: c.Send, *, is_first: bool) -> None:
        """Count the work of rules for a send; the sends of a turn to one topic share some of it."""
        entity = self.directory.find(command.path)
        if isinstance(entity, Topic):
            operators = entity.operators
            self._work += operators // WORK_OPERATORS if is_first else 0
            self._work += operators * size_of(command) // WORK_RULE_BYTES

    def _execute_one(self, request: Request, now: int, commit: Commit) -> None:
        command = request.command
        if type(command) not in self._handlers:
            commit.refuse(request, unknown_command(command))
            return
        path = getattr(command, "path", "")
        looked_at = self.shared.resources.looked_at
        work = partial(self._carry_out, request, command, path, now, commit)
        failure = self._alone(work, commit)
        self._work += work_of(command) + (self.shared.resources.looked_at - looked_at) // WORK_ROWS
        if failure is not None:
            kind = row_of(command).kind
            error = self._note_failure(failure, kind)
            purpose = purpose_of(command, path)
            operation = Operation(self._metered(path), kind, purpose, error.code, Load())
            commit.refuse(request, error, operation)

    def _carry_out(
        self, request: Request, command: c.Command[Any], path: str, now: int, commit: Commit
    ) -> None:
        self._check_rate(path, request.principal, now)
        value = self._handlers[type(command)](command, request, now, commit)
        if value is PARKED:
            return  # it is metered when it is answered or withdrawn
        if isinstance(value, Metered):
            value, load = value
        else:
            load = load_of(value)
        self._work += work_of_load(load)
        is_idle = found_nothing(command, value)
        purpose = purpose_of(command, path, is_idle=is_idle)
        outcome = EMPTY if is_idle else "ok"
        operation = Operation(self._metered(path), row_of(command).kind, purpose, outcome, load)
        commit.reply(request, value, operation)

    def _metered(self, path: str) -> str:
        """Return the path under which operations are metered; unknown paths share one."""
        name = path.lower()
        entity = self.directory.find(name.removesuffix(DEAD_LETTER_SUFFIX.lower()))
        if entity is None:
            return ""
        known = entity.description.path
        return dead_letter_path(known) if name.endswith(DEAD_LETTER_SUFFIX.lower()) else known

    def serve(self, now: int, commit: Commit) -> None:
        """Serve waiting requests with deliverable messages, and set the alarms.

        When the work of the turn is done, the other requests are served in the next turn.
        """
        touched, self.shared.touched = self.shared.touched, {}
        self._changed.update(touched)
        for queue in touched.values():
            if queue.waiters.line:
                queue.serve(partial(self._serve_one, queue, now, commit))
            self._arm(queue)

    def _serve_one(self, queue: Queue, now: int, commit: Commit, waiter: Waiter) -> bool:
        if self._work >= TURN_WORK:
            self._unserved[queue.entity] = queue
            return False
        served: list[bool] = []

        def work() -> None:
            served.append(queue.serve_one(waiter, lease_range, now, commit))

        looked_at, replies = self.shared.resources.looked_at, len(commit.operations)
        failure = self._alone(work, commit)
        self._work += (self.shared.resources.looked_at - looked_at) // WORK_ROWS
        for operation in commit.operations[replies:]:
            self._work += 1 + work_of_load(operation.load)
        if failure is None:
            return served[0]
        error = self._note_failure(failure, row_of(waiter.command).kind)
        commit.refuse(waiter.request, error, queue.operation(waiter.command, Load(), error.code))
        return True

    def forward_dead_letters(self, now: int, commit: Commit) -> None:
        """Forward the dead letters that were parked in this turn.

        If that fails, they stay in their dead-letter queue.
        """
        parked, self.shared.parked = self.shared.parked, {}
        for queue in parked.values():
            if self.directory.queue_numbered(queue.entity) is not queue:
                continue  # its entity was deleted in this turn
            failure = self._alone(partial(queue.resend_parked, now, commit), commit)
            if failure is not None:
                self._note_failure(failure, f"forwarding messages of {queue.path}")
                queue.keep_parked(queue.parked(), commit)
            queue.touch()

    def count_memory(self) -> None:
        """Count the memory of all queues, after they were read from the log."""
        for queue in self.directory.queues():
            queue.waiting.reclaim()

    def reclaim(self) -> None:
        """Release the rows of messages that are gone, and count the memory; between turns."""
        for queue in self._changed.values():
            queue.waiting.reclaim()
        self._changed.clear()

    @property
    def next_event(self) -> int:
        """The time at which the next turn has something to do, apart from commands."""
        if self._unserved:
            return 0
        return self._alarms[0][0] if self._alarms else NEVER_US

    def shift(self, by: int) -> None:
        """Move all deadlines that are durations, because the wall clock was set."""
        for queue in self.directory.queues():
            queue.shift(by)
            queue.pause = 0
        for entity in self.directory:
            if entity.history is not None:
                entity.history.shift(by)
        self._throttle.shift(by)
        self._forgets_at = 0
        self._alarms.clear()
        self._armed.clear()
        for queue in self.directory.queues():
            self._arm(queue)

    def _arm(self, queue: Queue, not_before: int = 0) -> None:
        when = max(queue.next_event, not_before)
        if queue.pause and not not_before:
            return  # its timers failed, and an alarm for the next try is set
        if when < self._armed.get(queue.entity, NEVER_US):
            self._armed[queue.entity] = when
            heapq.heappush(self._alarms, (when, queue.entity))

    def adopt(self, entity: Entity) -> None:
        """Register an entity that is new or has new settings."""
        entity.queue.resend = None
        if isinstance(entity, Topic) or entity.forward_to is not None:
            entity.queue.resend = partial(self._router.resend, entity)
        if entity.queue.dead_letter is not None:
            forwards = entity.forward_dead_letters_to is not None
            resend = partial(self._router.resend_dead_letters, entity) if forwards else None
            entity.queue.dead_letter.resend = resend
        self.accessed(entity, max(entity.accessed_us, entity.updated_us))
        for queue in entity.queues:
            if queue.waiting.count(State.TRANSFERRING):
                queue.retry_at = entity.accessed_us
            self.name_origins(queue, entity.birth)
            queue.touch()
            self._arm(queue)

    def name_origins(self, queue: Queue, birth: str) -> None:
        """Set the names of a queue as a source of transfers."""
        starts = [(0, ""), *self.starts.of(queue.entity)]
        queue.origins = [
            (first, queue_source(queue.path, queue.entity, birth, start)) for first, start in starts
        ]

    def accessed(self, entity: Entity, now: int) -> None:
        """Record the use of an entity."""
        entity.accessed_us = now
        entity.queue.idle_at = min(now + entity.idle_us, NEVER_US)

    def _delete_idle(self, queue: Queue, now: int, commit: Commit) -> None:
        entity = self.directory.entity(queue.path)
        if any(queue.waiters for queue in entity.queues):
            self.accessed(entity, now)  # a waiting request is a use
        else:
            queue.idle_at = NEVER_US
            self._management.delete(entity, commit)
            commit.effects.append(_DeletedIdle(self, entity, now))

    # -- throttling ----------------------------------------------------------------------------

    def _check_rate(self, path: str, principal: Principal, now: int) -> None:
        if not self._throttle.limits_rates:
            return
        entity = self.directory.find(path) if path else None
        key = None if principal.may(Claim.MANAGE, None) else principal.id
        self._throttle.check_rate(path, entity.stores if entity else 0, now, key)

    def usage(self, principal: Principal = OWNER) -> Usage:
        """Return the use of the throttled facets; memory is that of the end of the last turn."""
        own = self.shared.waits[principal.id]
        memory_bytes = self.shared.resources.memory_bytes
        return Usage(memory_bytes, self.storage_bytes, self.shared.open_receives, own)

    # -- sending -------------------------------------------------------------------------------

    def send(self, asked: list[SendRequest], now: int, commit: Commit) -> None:
        """Execute the sends of a turn to one entity."""
        path = asked[0].command.path
        try:
            entity = self.sendable(path)
            self._check_room(now)
        except Exception as error:  # noqa: BLE001 - an error must not affect the rest of the turn
            refusal = self._note_failure(error, f"a send to {path}")
            for one in asked:
                self._intake.refuse(one, refusal, commit)
            return
        if self._throttle.limits_rates:
            asked = [one for one in asked if self._within_rate(one, now, commit)]
        if asked:
            self.accessed(entity, now)
            self._take(entity, asked, now, commit)

    def _check_room(self, now: int) -> None:
        """Refuse messages while memory or storage is full.

        Old ids of duplicate detection are forgotten with the next send to their entity. While
        memory is full there is none, so they are searched for here.
        """
        try:
            self._throttle.check_room(self.shared.resources.memory_bytes, self.storage_bytes)
        except ServerBusyError:
            if now < self._forgets_at:
                raise
            self._forgets_at = now + FORGET_INTERVAL_US
            for entity in self.directory:
                if entity.history is not None:
                    entity.history.forget_before(now)
            self._throttle.check_room(self.shared.resources.memory_bytes, self.storage_bytes)

    def _take(self, entity: Entity, asked: list[SendRequest], now: int, commit: Commit) -> None:
        """Execute sends together; if that fails because of one of them, one by one."""
        failure = self._alone(partial(self._intake.take, entity, asked, now, commit), commit)
        if failure is None:
            return
        if len(asked) == 1:
            error = self._note_failure(failure, f"a send to {entity.description.path}")
            self._intake.refuse(asked[0], error, commit)
            return
        drop_frames(failure)
        for one in asked:
            self._take(entity, [one], now, commit)

    def _within_rate(self, one: SendRequest, now: int, commit: Commit) -> bool:
        try:
            self._check_rate(one.command.path, one.principal, now)
        except ServerBusyError as error:
            self._intake.refuse(one, error, commit)
            return False
        return True

    def sendable(self, path: str) -> Entity:
        """Return the entity of a path if it accepts messages."""
        entity = self.directory.entity(path)
        if entity.lets_in:
            return entity
        if isinstance(entity, Subscription):
            raise InvalidOperationError(
                f"{path} cannot be sent to directly; send to the topic", path=path
            )
        entity.check_send()
        return entity

    def check_send(self, command: c.Send) -> pa.RecordBatch:
        """Return the batch of a send, or raise why it is refused."""
        return self._intake.check(self.sendable(command.path), command)

    def keep_alive(self, path: str, now: int) -> None:
        """Record the use of a path's entity, if it exists."""
        entity = self.directory.find(path)
        if entity is not None:
            self.accessed(entity, now)

    def meter_refused(self, send: c.Send, error: MessagingError) -> None:
        """Meter a send that neither the log nor the spill store accepted."""
        purpose = purpose_of_send(send)
        self.meter.count(Operation(self._metered(send.path), SEND, purpose, error.code, Load()))

    def meter_spilled(self, send: c.Send, batch: pa.RecordBatch) -> None:
        """Meter a send that the spill store accepted."""
        path, load = self._metered(send.path), load_of_sizes(sizes(batch))
        self.meter.count(Operation(path, SEND, purpose_of_send(send), "ok", load))

    def take_spilled(self, command: c.Send, owner: str, now: int, commit: Commit) -> None:
        """Execute a send that was acknowledged before: neither throttling nor quota applies."""
        entity = self.directory.find(command.path)
        if entity is not None:  # otherwise it was deleted, with its messages
            self.accessed(entity, now)
            asked = Request(command, _Sender(owner))
            self._intake.take_acknowledged(entity, asked, now, commit)

    def cancel_scheduled(
        self, command: c.CancelScheduled, request: Request, now: int, commit: Commit
    ) -> Any:
        """Cancel scheduled messages; a repeated cancel succeeds."""
        entity = self.directory.entity(command.path)
        self.accessed(entity, now)
        if not self._intake.repeats.was_done_before(command.origin, request, commit):
            entity.queue.cancel(_numbers(command.sequence_numbers), commit)
            self._intake.repeats.note_done(command.origin, request, commit)
        return Metered(None, load_of_settled(len(command.sequence_numbers)))

    # -- receiving -----------------------------------------------------------------------------

    def _queue(self, path: str, now: int) -> Queue:
        """Return a queue for any use."""
        entity, queue = self.directory.queue(path)
        self.accessed(entity, now)
        queue.touch()
        return queue

    def _receivable(self, path: str, session: c.SessionLock | None, now: int) -> Queue:
        """Return a queue that allows receives."""
        entity, queue = self.directory.queue(path)
        if queue is entity.queue:
            entity.check_receive()
        if queue.settings.requires_session and session is None:
            raise InvalidOperationError(
                f"the entity {path} requires sessions. Accept a session and receive from it",
                path=path,
            )
        if session is not None and not queue.settings.requires_session:
            raise InvalidOperationError(f"{path} has no sessions; receive without one", path=path)
        return self._queue(path, now)

    def receive(self, command: c.Receive, request: Request, now: int, commit: Commit) -> Any:
        """Deliver messages, or let the request wait."""
        wait = to_us(command.wait)
        queue = self._receivable(command.path, command.session, now)
        queued = queue.waiters.has_receives and command.session is None
        delivery = None if queued else queue.receive(command, now, commit)
        if delivery is not None:
            return delivery
        return self._park(queue, Waiter(request, command, now + wait)) if wait else NOTHING

    def _park(self, queue: Queue, waiter: Waiter) -> object:
        principal = waiter.request.principal
        is_manager = principal.may(Claim.MANAGE, None)
        usage = self.usage(principal)
        self._throttle.check_receives(queue.path, usage, is_manager=is_manager)
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
            self._sessionful(command.path)
        return self._queue(command.path, now).peek(command)

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
        """Refuse dead-letter reasons that exceed the quota, because each message stores its own."""
        entity, _ = self.directory.queue(path)
        if size > max(self._quota(entity).room, 0):
            raise QuotaExceededError(
                f"{path} has no room for dead-letter reasons of {size} bytes; complete messages of "
                "its dead-letter queue, or give a shorter reason",
                path=path,
            )

    def _quota(self, entity: Entity) -> Entity:
        """Return the entity with the quota: subscriptions share that of their topic."""
        description = entity.description
        if isinstance(description, SubscriptionDescription):
            return self.directory.entity(description.topic_path)
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
        entity, queue = self._sessionful(command.path)
        entity.check_receive()
        self._queue(command.path, now)
        grant = queue.accept(command.session_id, now)
        if grant is not None:
            return grant
        if not wait:
            raise queue.no_session(command.session_id, has_waited=False)
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
        entity, _ = self.directory.queue(command.path)
        if grows > max(self._quota(entity).room, 0):
            raise QuotaExceededError(
                f"{command.path} has no room for a session state of {len(command.state or b'')} "
                "bytes; receive messages, remove states, or raise max_size_in_megabytes",
                path=command.path,
            )
        queue.set_session_state(command.session, command.state, now, commit)

    def list_sessions(self, command: c.ListSessions, _: Request, now: int, __: Commit) -> list[str]:
        """Return a page of the sessions that have messages or a state."""
        queue = self._sessionful(command.path)[1]
        self._queue(command.path, now)
        after = command.state_updated_after_utc
        if after is None:
            return queue.sessions.listed(queue.waiting, command.skip, command.max_sessions)
        names = queue.sessions.updated_after(moment_us(after))
        return names[command.skip : command.skip + command.max_sessions]

    def _sessionful(self, path: str) -> tuple[Entity, Queue]:
        """Return an entity with sessions, and its queue."""
        entity, queue = self.directory.queue(path)
        if not queue.settings.requires_session:
            raise InvalidOperationError(f"{path} has no sessions; omit the session", path=path)
        return entity, queue

    # -- ranges --------------------------------------------------------------------------------

    def lease_range(self, command: c.LeaseRange, request: Request, now: int, commit: Commit) -> Any:
        """Lease messages, or let the request wait."""
        wait = to_us(command.wait)
        queue = self._receivable(command.path, None, now)
        lease = lease_range(queue, command, now, commit)
        if lease is not None or not wait:
            return lease
        _, holder = first_held(queue, () if command.past is None else command.past)
        return self._park(queue, Waiter(request, command, now + wait, holder))

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
        queue.end_lease(command.epoch, commit)

    # -- for the engine ------------------------------------------------------------------------

    def snapshot(self) -> list[Fact]:
        """Return all facts, so that a segment does not depend on earlier ones."""
        queues = self.directory.queues()
        self.shared.deaths.keep(set().union(*(queue.waiting.deaths() for queue in queues)))
        facts = [
            Fact.of("next", "entity", self.directory.next_number),
            Fact.of("next", "batch", self.shared.bodies.next_number),
            Fact.of("next", "lock", self.shared.locks.last),
        ]
        facts += [Fact("entity", str(e.number), e.to_fact()) for e in self.directory]
        for queue in queues:
            number = queue.entity
            facts.append(Fact.of("sequence", number, queue.next_sequence))
            for name, state in queue.sessions.states.items():
                facts += queue.state_facts(name, state, queue.sessions.updated[name])
            for lease in queue.leases:
                facts.append(Fact("lease", f"{number}/{lease.epoch}", lease.to_fact()))
                facts.append(Fact("leased until", f"{number}/{lease.epoch}", lease.renewal()))
        facts += self.shared.deaths.facts()
        facts += [key_fact(key) for key in self.keys.all()]
        for origin, owner, intervals in self.transfers.origins():
            facts += [owner_fact(origin, owner)] if owner else []
            facts.append(transferred_fact(origin, intervals))
        return facts + self.starts.facts(queues)

    def standing(self) -> Iterable[tuple[int, Int64s]]:
        """Yield the numbers of the durable messages of each queue that stores messages."""
        for queue in self.directory.queues():
            at = queue.waiting.all()
            at = at[queue.waiting.get("state", at) != State.PENDING.value]
            if len(at) or not isinstance(self.directory.find(queue.path), Topic):
                yield queue.entity, queue.waiting.get("sequence", at)

    def waiting_requests(self) -> list[Request]:
        """Return all waiting requests."""
        return [waiter.request for queue in self.directory.queues() for waiter in queue.waiters]

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Remove waiting requests, whose callers have gone; they get no reply."""
        for request in requests:
            queue = self.directory.queue_numbered(self.shared.waits_at.get(id(request), 0))
            if queue is not None:
                waiter = queue.waiters.withdraw(request)
                self.meter.count(queue.operation(waiter.command, Load(), "Withdrawn", is_idle=True))

    def meter_waiting(self) -> None:
        """Meter the waiting requests, which end because the namespace closes."""
        for queue in self.directory.queues():
            for waiter in queue.waiters:
                self.meter.count(queue.operation(waiter.command, Load(), "Withdrawn", is_idle=True))

    def faults(self) -> list[str]:
        """Return all inconsistencies between counters and columns."""
        queues = self.directory.queues()
        found = [f"{q.path}: {fault}" for q in queues for fault in q.waiting.faults()]
        standing = sum(len(q.waiting) - q.waiting.count(State.PENDING) for q in queues)
        if standing != self.shared.bodies.places:
            found.append(f"{standing} messages exist, but {self.shared.bodies.places} are counted")
        return found


@dataclass(frozen=True, slots=True)
class _Sender:
    """The principal of a spilled send: it has its key's identity, but no rights."""

    id: str

    def may(self, claim: Claim, path: str | None) -> bool:  # noqa: ARG002
        """Return False."""
        return False


def _late(requests: Sequence[Request], first: int) -> tuple[list[Request], list[Request]]:
    """Return which requests, from `first` on, a turn still executes after its work is done.

    These are the small ones of principals that have none in this turn yet. Return also the others,
    beginning with those of principals that have none in this turn.
    """
    executed = {request.principal.id for request in requests[:first]}
    waits: set[str] = set()
    last: list[Request] = []
    left: list[Request] = []
    for request in requests[first:]:
        principal = request.principal.id
        if principal in executed or principal in waits or not is_small(request.command):
            waits.add(principal)
            left.append(request)
        else:
            executed.add(principal)
            last.append(request)
    left.sort(key=lambda request: request.principal.id in executed)
    return last, left


def cause_of(error: BaseException) -> str:
    """Return what identifies an internal error: its type, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} {where}".rstrip()


def drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error and of its causes.

    Their frames refer to the messages of the turn, and callers may keep the error. A frame with the
    error in a variable also forms a reference cycle, which Python frees late.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _numbers(sequence_numbers: Sequence[int]) -> Int64s:
    return np.asarray(sequence_numbers, np.int64)
