"""The namespace in memory: executes the commands of a turn, and shares the turn's work fairly.

`BrokerNamespace` is pure: it gets commands, `now` and a commit, changes memory, and adds to the
commit what must be written to the log. It does not read a clock or write to a disk; it only reads
message bodies. It counts the work of a turn, and leaves commands beyond a bound to the next turn.
Three parts execute the commands: sends.py, queue_commands.py and entities/management.py. Each
command fails alone (isolation.py).

The engine (engine.py) calls it from the thread with the turn: tick, execute, serve, commit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from twinbus.backoff import Backoff
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.entities.directory import Directory
from twinbus.broker.entities.entity import Entity
from twinbus.broker.entities.management import Management, key_fact
from twinbus.broker.entities.topic import Topic
from twinbus.broker.lifecycle import State
from twinbus.broker.queue.answers import answer, operation_of
from twinbus.broker.queue.queue import Queue
from twinbus.broker.queue.shared import QueueContext
from twinbus.broker.queue.waiters import Waiter
from twinbus.broker.sending.intake import Intake, SendRequest
from twinbus.broker.sending.routing import Router
from twinbus.broker.sending.transfers import Transfers
from twinbus.broker.store.commit import Commit, Effect, Fact, owner_fact, transferred_fact
from twinbus.broker.turn.alarms import Alarms
from twinbus.broker.turn.isolation import Isolation
from twinbus.broker.turn.overload import OverloadGuard
from twinbus.broker.turn.queue_commands import PARKED, QueueCommands
from twinbus.broker.turn.sends import Sends
from twinbus.broker.turn.starts import Starts
from twinbus.limits import (
    MAX_MESSAGE_BYTES,
    MAX_PAUSE_US,
    NEVER_US,
    SECOND_US,
    SERVING_WORK,
    TURN_WORK,
    WORK_OPERATORS,
    WORK_ROWS,
    WORK_RULE_BYTES,
)
from twinbus.message import Int64s
from twinbus.protocol import commands as c
from twinbus.protocol.access import AccessKeys
from twinbus.protocol.keys import Claim
from twinbus.protocol.meter import (
    Metered,
    found_nothing,
    load_of,
    purpose_of,
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

_TIMER_BACKOFF = Backoff(SECOND_US, MAX_PAUSE_US)
_Handler = Callable[[Any, Request, int, Commit], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSettings:
    """The limits of a namespace."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True, slots=True)
class _DeletedIdle(Effect):
    """An entity that is deleted because it was idle."""

    entity: Entity
    now: int

    def refused(self) -> None:
        """Keep the entity for another idle period."""
        self.entity.note_use(self.now)


class BrokerNamespace:
    """The entities, and the commands for them."""

    def __init__(self, shared: QueueContext, settings: NamespaceSettings) -> None:
        self.shared = shared
        self.directory = Directory(shared)
        self.transfers = Transfers()
        self.meter = shared.meter
        router = Router(self.directory, shared, settings.max_message_bytes)
        self._router = router
        self._intake = Intake(router, self.transfers, settings.max_message_bytes)
        self.isolation = Isolation(shared.undo)
        self.failures = self.isolation.failures  # faults of commands and timers, by cause
        self.overload = OverloadGuard(self.directory, shared, settings.thresholds)
        self.sends = Sends(
            self.directory, self._intake, self.overload, self.isolation, shared.meter
        )
        self.keys = AccessKeys()
        self.starts = Starts()
        self._management = Management(
            self.directory, self.keys, self.meter, self.adopt, shared.nonce
        )
        self._alarms = Alarms()
        self._to_reclaim: dict[int, Queue] = {}  # queues that changed in this turn
        self._work = 0  # the work of this turn, as a number of ordinary commands
        self._serving_work = 0  # the part of this work that served waiting requests
        # Queues with waiting requests for which this turn had no time: the next turn serves them.
        self._unserved: dict[int, Queue] = {}
        self._resumed: dict[int, Queue] = {}  # queues left unserved by the last turn
        owners: dict[Claim, object] = {
            Claim.SEND: self.sends,
            Claim.LISTEN: QueueCommands(self.directory, self.overload),
            Claim.MANAGE: self._management,
        }
        self._handlers: dict[type, _Handler] = {
            row.command: getattr(owners[row.claim], row.handler)
            for row in ROWS
            if row.codec is Codec.FIELDS  # sends are executed together
        }

    def reconfigure(self, settings: NamespaceSettings) -> None:
        """Apply new limits to the following commands."""
        self._router.max_message_bytes = settings.max_message_bytes
        self._intake.reconfigure(settings.max_message_bytes)
        self.overload.reconfigure(settings.thresholds)

    # -- a turn --------------------------------------------------------------------------------

    def tick(self, now: int, commit: Commit) -> None:
        """Run the timers that are due.

        A queue whose timers fail is paused, longer each time; the other queues are not affected.
        """
        while self._alarms.next_at <= now:
            queue = self.directory.queue_numbered(self._alarms.pop())
            if queue is None:
                continue
            retry_at, idle_at = queue.retry_at, queue.idle_at
            failure = self.isolation.attempt(partial(self._tick_one, queue, now, commit), commit)
            if failure is None:
                queue.pause = 0
                continue
            self.isolation.report(failure, f"the timers of {queue.path}")
            queue.retry_at, queue.idle_at = retry_at, idle_at
            queue.forget_bounds()
            queue.pause = _TIMER_BACKOFF.longer_us(queue.pause)
            self._alarms.arm(queue, now + queue.pause)

    def _tick_one(self, queue: Queue, now: int, commit: Commit) -> None:
        queue.tick(now, commit)
        queue.touch()
        if queue.idle_at <= now:
            self._delete_idle(queue, now, commit)

    def execute(self, requests: Sequence[Request], now: int, commit: Commit) -> Sequence[Request]:
        """Execute commands; sends are executed last, together. Replies are put into the commit.

        Return the requests for which the turn has no time. After the work of the turn has reached
        its bound, the turn still executes one small request of each principal that had none.
        """
        self._work = self._serving_work = 0
        if self._unserved:
            # Queues that the last turn left unserved are served first; the queue that used up the
            # time of the last turn is the last of these.
            self._resumed, self._unserved = dict(reversed(self._unserved.items())), {}
        if len(requests) == 1 and type(requests[0].command) is c.Send:
            self.sends.execute([requests[0]], now, commit)
            return ()
        sends: dict[str, list[SendRequest]] = {}
        left: Sequence[Request] = ()
        done = self._execute_others(requests, sends, now, commit)
        if done < len(requests):
            last, left = _late(requests, done)
            self._execute_others(last, sends, now, commit, most=NEVER_US)
        for group in sends.values():
            self.sends.execute(group, now, commit)
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
        """Execute commands until the work of the turn reaches `most`; gather the sends by entity.

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
        """Count the work of rules for a send to a topic.

        All sends of a turn to one topic are evaluated together. So the work that does not depend on
        their size counts once, for the first of them (`is_first`).
        """
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
        failure = self.isolation.attempt(work, commit)
        self._work += work_of(command) + (self.shared.resources.looked_at - looked_at) // WORK_ROWS
        if failure is not None:
            kind = row_of(command).kind
            error = self.isolation.report(failure, kind)
            purpose = purpose_of(command, path)
            operation = Operation(
                self.directory.metered_path(path), kind, purpose, error.code, Load()
            )
            commit.refuse(request, error, operation)

    def _carry_out(
        self, request: Request, command: c.Command[Any], path: str, now: int, commit: Commit
    ) -> None:
        self.overload.check_rate(path, request.principal, now)
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
        operation = Operation(
            self.directory.metered_path(path), row_of(command).kind, purpose, outcome, load
        )
        commit.reply(request, value, operation)

    def serve(self, now: int, commit: Commit) -> None:
        """Serve waiting requests with deliverable messages, and set the alarms.

        Requests that are beyond the work of a turn are served in the next turn. A part of each turn
        is reserved for waiting requests, so that commands cannot use all of it.
        """
        changed, self.shared.changed_queues = self.shared.changed_queues, {}
        queues, self._resumed = self._resumed | changed, {}
        self._to_reclaim.update(queues)
        for number, queue in queues.items():
            if queue.waiters.line:
                serve_one = partial(self._serve_one, queue, now, commit)
                all_the_same = not queue.settings.requires_session
                queue.waiters.serve(
                    serve_one, all_the_same=all_the_same, goes_on=number not in changed
                )
            self._alarms.arm(queue)

    def _serve_one(self, queue: Queue, now: int, commit: Commit, waiter: Waiter) -> bool | None:
        """Serve a waiting request; return whether it was served; None: the turn has no time."""
        if self._work >= TURN_WORK and self._serving_work >= SERVING_WORK:
            self._unserved[queue.entity] = queue
            return None
        served: list[bool] = []

        def work() -> None:
            served.append(answer(queue, waiter, now, commit))

        looked_at, replies = self.shared.resources.looked_at, len(commit.operations)
        failure = self.isolation.attempt(work, commit)
        done = (self.shared.resources.looked_at - looked_at) // WORK_ROWS
        for operation in commit.operations[replies:]:
            done += 1 + work_of_load(operation.load)
        self._work += done
        self._serving_work += done
        if failure is None:
            return served[0]
        error = self.isolation.report(failure, row_of(waiter.command).kind)
        commit.refuse(
            waiter.request, error, operation_of(queue, waiter.command, Load(), error.code)
        )
        return True

    def forward_dead_letters(self, now: int, commit: Commit) -> None:
        """Forward the messages that this turn has put into dead-letter queues that forward.

        If that fails, the messages stay in the dead-letter queue and can be received from it.
        """
        parked, self.shared.parked = self.shared.parked, {}
        for queue in parked.values():
            if self.directory.queue_numbered(queue.entity) is not queue:
                continue  # the entity was deleted in this turn
            failure = self.isolation.attempt(partial(queue.resend_parked, now, commit), commit)
            if failure is not None:
                self.isolation.report(failure, f"forwarding messages of {queue.path}")
                queue.keep_parked(queue.parked(), commit)
            queue.touch()

    def count_memory(self) -> None:
        """Count the memory of all queues, after they were read from the log."""
        for queue in self.directory.queues():
            queue.waiting.reclaim()

    def reclaim(self) -> None:
        """Release the rows of messages that are gone, and count the memory; called after a turn."""
        for queue in self._to_reclaim.values():
            queue.waiting.reclaim()
        self._to_reclaim.clear()

    @property
    def next_event(self) -> int:
        """The time at which the next turn has something to do, apart from commands."""
        if self._unserved:
            return 0
        return self._alarms.next_at

    def shift(self, by: int, now: int) -> None:
        """Move all deadlines that are durations, because the wall clock was set to `now`."""
        for queue in self.directory.queues():
            queue.shift(by, now)
            queue.pause = 0
        for entity in self.directory:
            if entity.history is not None:
                entity.history.shift(by)
        self.overload.shift(by)
        self._alarms.clear()
        for queue in self.directory.queues():
            self._alarms.arm(queue)

    def adopt(self, entity: Entity) -> None:
        """Register an entity that is new or has new settings."""
        entity.queue.resend = None
        if isinstance(entity, Topic) or entity.forward_to is not None:
            entity.queue.resend = partial(self._router.resend, entity)
        if entity.queue.dead_letter is not None:
            forwards = entity.forward_dead_letters_to is not None
            resend = partial(self._router.resend_dead_letters, entity) if forwards else None
            entity.queue.dead_letter.resend = resend
        entity.note_use(max(entity.accessed_us, entity.updated_us))
        for queue in entity.queues:
            if queue.waiting.count(State.TRANSFERRING):
                queue.retry_at = entity.accessed_us
            self.name_origins(queue, entity.birth)
            queue.touch()
            self._alarms.arm(queue)

    def name_origins(self, queue: Queue, birth: str) -> None:
        """Set the names that identify a queue in transfers, one for each start of the broker."""
        starts = [(0, ""), *self.starts.of(queue.entity)]
        queue.origins = [
            (first, queue_source(queue.path, queue.entity, birth, start)) for first, start in starts
        ]

    def _delete_idle(self, queue: Queue, now: int, commit: Commit) -> None:
        entity = self.directory.entity(queue.path)
        if any(queue.waiters for queue in entity.queues):
            entity.note_use(now)  # a waiting request is a use
        else:
            queue.idle_at = NEVER_US
            self._management.delete(entity, commit)
            commit.effects.append(_DeletedIdle(entity, now))

    def keep_alive(self, path: str, now: int) -> None:
        """Record a use of the entity of a path, if it exists."""
        entity = self.directory.find(path)
        if entity is not None:
            entity.note_use(now)

    # -- for the engine ------------------------------------------------------------------------

    def used_deaths(self) -> set[int]:
        """Return the numbers of the dead-letter reasons of all messages."""
        return set().union(*(queue.waiting.deaths() for queue in self.directory.queues()))

    def snapshot(self) -> list[Fact]:
        """Return all facts, so that a segment does not depend on earlier ones."""
        self.shared.deaths.keep(self.used_deaths())
        queues = self.directory.queues()
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

    def present_messages(self) -> Iterable[tuple[int, Int64s]]:
        """Yield the sequence numbers of the durable messages of each queue, by queue number.

        A topic stores only scheduled messages, so its queue is left out if it is empty.
        """
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
                self.meter.count(
                    operation_of(queue, waiter.command, Load(), "Withdrawn", is_idle=True)
                )

    def meter_waiting(self) -> None:
        """Meter the waiting requests as withdrawn, because the namespace closes."""
        for queue in self.directory.queues():
            for waiter in queue.waiters:
                self.meter.count(
                    operation_of(queue, waiter.command, Load(), "Withdrawn", is_idle=True)
                )

    def faults(self) -> list[str]:
        """Return all inconsistencies between counters and columns."""
        queues = self.directory.queues()
        found = [f"{q.path}: {fault}" for q in queues for fault in q.waiting.faults()]
        present = sum(len(q.waiting) - q.waiting.count(State.PENDING) for q in queues)
        if present != self.shared.bodies.places:
            found.append(f"{present} messages exist, but {self.shared.bodies.places} are counted")
        return found


def _late(requests: Sequence[Request], first: int) -> tuple[list[Request], list[Request]]:
    """Split the requests from `first` on, after the work of the turn has reached its bound.

    The first list has the requests that the turn still executes: one small request of each
    principal of which this turn has executed none. The second list has the other requests, which
    wait for the next turn. It begins with principals of which this turn executes no request.
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
