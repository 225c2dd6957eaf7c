"""The state that all clients of a paired factory share: each entity's health, and the rotation.

`health`, `rotation` and `homing` decide; the board keeps their results. Every change happens under
one lock. Events are posted under the lock and delivered to the application after the lock is
released. Senders, the ticker and status calls use the board from their own threads. A healthy send
reads the board without the lock.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from twinbus.clock import Clock, stamp_of
from twinbus.errors import EntityDisabledError, MessagingError, UnauthorizedError
from twinbus.limits import NEVER_US
from twinbus.pairing.events import (
    Announcer,
    BacklogQueueBack,
    BacklogQueuePulled,
    FailedOver,
    PingRefused,
    Returned,
    ReturnWaits,
)
from twinbus.pairing.health import (
    ENDS_FAILOVER,
    Health,
    HealthState,
    Sign,
    Timing,
    record,
    verdict,
)
from twinbus.pairing.homing import Diversions, Finding, Look, LookResult
from twinbus.pairing.rotation import Choice, Rotation, queue_of
from twinbus.protocol.commands import SendReceipt


@dataclass(frozen=True, slots=True)
class PathStatus:
    """One entity as its pairing sees it."""

    path: str
    state: HealthState
    since: datetime | None  # when it entered this state; None: it never failed
    failures: int  # failures that count, since it was last healthy
    last_failure: str  # the text of the last failure
    failovers: int  # since the pairing began
    diverted: int  # messages, since the pairing began
    pings: int  # since the pairing began
    next_ping_due: datetime | None
    waits_for: str  # what the return waits for, with `preserve_order`; empty: it does not wait


@dataclass(frozen=True, slots=True)
class BacklogQueueStatus:
    """One backlog queue as its pairing sees it."""

    path: str
    is_in_rotation: bool
    back_at: datetime | None  # when the queue returns to the rotation; None: it is in rotation


@dataclass(slots=True)
class _PairedEntity:
    path: str
    health: Health
    cause: MessagingError | None = None  # the last failure
    failovers: int = 0
    diverted: int = 0
    diverted_before: int = 0  # the value of `diverted` at the last failover
    pings: int = 0
    failed_over_at: int = 0
    diversions: Diversions | None = None  # with `preserve_order`, after the first diversion
    waits_for: str = ""

    @property
    def is_healthy(self) -> bool:
        return self.health.state is HealthState.HEALTHY

    @property
    def has_diverted_messages(self) -> bool:
        """Whether diverted messages may not be home yet; always false without `preserve_order`."""
        return self.diversions is not None and not self.diversions.is_empty


@dataclass(frozen=True, slots=True)
class DuePing:
    """An entity to ping."""

    path: str
    since: int  # when it failed over; an answer to a ping of an earlier failover is ignored


_UNKNOWN = Health()
_RETURNED_BY = {
    Sign.PING_PASSED: "ping",
    Sign.PING_ANSWERED: "refused ping",
    Sign.PASSED: "send",
    Sign.MARKED: "mark_path_healthy",
    Sign.HOME: "home",
}
_NOT_HOME = "diverted messages are on their way home"
_NO_NUMBER = (
    "the backlog queue did not report the sequence number of a diverted message, so the pairing "
    "cannot see whether that message is home. Send another message to this entity: it is diverted, "
    "and its sequence number lets the pairing continue"
)
_NOT_MOVING = (
    "its oldest diverted message has not left the backlog queue for a ping interval. Check that a "
    "syphon runs, and what it reports about this entity"
)


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to divert one send with `preserve_order`."""

    queue: int  # the backlog queue of the entity
    place: int  # in the order of the diversions of the entity


class Board:
    """The shared state of a pairing."""

    def __init__(
        self, timing: Timing, clock: Clock, announcer: Announcer, *, has_numbers: bool = True
    ) -> None:
        self._has_numbers = has_numbers  # receipts of the secondary have sequence numbers
        self.queues: dict[int, str] = {}  # paths by index; empty until the backlog is prepared
        self._timing = timing
        self._clock = clock
        self._announcer = announcer
        self._lock = threading.Lock()
        self._entities: dict[
            str, _PairedEntity
        ] = {}  # by path in lower case; entities that failed once
        self._rotation = Rotation([], timing.ping_us)
        self.cause_of_last_pull: MessagingError | None = None
        self.signs: Counter[tuple[HealthState, Sign]] = Counter()  # recorded, by state

    def open_backlog(self, queues: dict[int, str]) -> None:
        """Divert to these queues from now on."""
        with self._lock:
            self._rotation = Rotation(list(queues), self._timing.ping_us)
            self.queues = queues

    # -- entities ------------------------------------------------------------------------------

    def is_diverting(self, path: str) -> bool:
        """Whether sends to an entity do not go to the primary, and there is a backlog."""
        return self._state_of(path).diverts and bool(self.queues)

    def tries_end_at(self, path: str) -> int:
        """Return when tries at the primary must end: when the entity fails over.

        That is never if the entity is healthy or there is no backlog queue, and a time in the past
        if the entity has failed over.
        """
        entity = self._entities.get(path.lower()) if self._entities else None
        if entity is None or entity.is_healthy or not self.queues:
            return NEVER_US
        return entity.health.due if entity.health.state is HealthState.SUSPECT else 0

    def is_failed_over(self, path: str) -> bool:
        """Whether an entity has failed over, and no ping has shown that it is back."""
        return self._state_of(path) is HealthState.FAILED_OVER

    def _state_of(self, path: str) -> HealthState:
        entity = self._entities.get(path.lower())
        if entity is None or entity.is_healthy:
            return HealthState.HEALTHY
        if entity.health.state is HealthState.SUSPECT:
            self._apply(path, None)  # its timer may have run out
        return entity.health.state

    def succeeded(self, path: str) -> None:
        """Record that the primary accepted a send; takes no lock if the entity is healthy."""
        entity = self._entities.get(path.lower()) if self._entities else None
        if entity is None or entity.is_healthy:
            return
        with self._lock:
            if not entity.is_healthy:
                is_failed_over = entity.health.state is HealthState.FAILED_OVER
                sign = Sign.PASSED if is_failed_over and not self.queues else Sign.SUCCESS
                self._step(entity, sign, self._clock.now_us())
        self._announcer.deliver()

    def failed(self, path: str, error: MessagingError) -> bool:
        """Record a failure that counts; return whether sends are diverted now."""
        with self._lock:
            entity = self._entities.setdefault(path.lower(), _PairedEntity(path, _UNKNOWN))
            entity.cause = _without_frames(error)
        return self._apply(path, Sign.FAILURE).diverts

    def cause_of(self, path: str) -> MessagingError | None:
        """Return the last failure of an entity."""
        entity = self._entities.get(path.lower())
        return entity.cause if entity else None

    def mark_healthy(self, path: str) -> None:
        """Mark an entity as healthy."""
        if path.lower() in self._entities:
            self._apply(path, Sign.MARKED)

    def count_diverted(self, path: str, messages: int) -> None:
        """Count messages that a backlog queue accepted."""
        with self._lock:
            self._entities[path.lower()].diverted += messages

    def _apply(self, path: str, sign: Sign | None) -> HealthState:
        """Apply a sign, or only the current time, to an entity; deliver the resulting events."""
        with self._lock:
            state = self._step(self._entities[path.lower()], sign, self._clock.now_us())
        self._announcer.deliver()
        return state

    def _step(self, entity: _PairedEntity, sign: Sign | None, now: int) -> HealthState:
        """Apply a sign, or only the current time, to an entity. The caller must hold the lock."""
        before = entity.health
        if (
            sign in ENDS_FAILOVER
            and before.state is HealthState.FAILED_OVER
            and entity.has_diverted_messages
        ):
            sign = Sign.REACHED
        if sign is None:
            entity.health = verdict(before, now, self._timing)
        else:
            entity.health = record(before, sign, now, self._timing)
            self.signs[before.state, sign] += 1
        self._note_change(entity, before, sign, now)
        return entity.health.state

    def look(self, now: int) -> None:
        """Apply the current time to every entity: failover timers may have run out."""
        with self._lock:
            for entity in self._entities.values():
                self._step(entity, None, now)
        self._announcer.deliver()

    def _stamp(self, moment: int) -> datetime:
        """Return the wall time of a moment."""
        return stamp_of(self._clock, moment)

    def _note_change(
        self, entity: _PairedEntity, before: Health, sign: Sign | None, now: int
    ) -> None:
        after = entity.health.state
        if after is before.state:
            return
        at, since = self._stamp(now), self._stamp(before.since)
        if after is HealthState.FAILED_OVER:
            self.signs[HealthState.SUSPECT, Sign.RAN_OUT] += 1
            entity.failovers += 1
            entity.diverted_before = entity.diverted
            entity.failed_over_at = now
            failing = since if before.state is HealthState.SUSPECT else at
            cause = _text_of(entity.cause)
            if isinstance(entity.cause, EntityDisabledError):
                cause += ". The entity is disabled. Its messages are diverted until you enable it"
            self._announcer.post(FailedOver(at, entity.path, cause, failing))
        elif after is HealthState.RETURNING and before.state is HealthState.FAILED_OVER:
            self._note_wait(entity, _NOT_HOME, now)
        elif after is HealthState.RETURNING:
            self.signs[HealthState.SWITCHING, Sign.GAVE_UP] += 1
        elif after is HealthState.HEALTHY and before.state.diverts:
            by = _RETURNED_BY[sign] if sign else ""
            count = entity.diverted - entity.diverted_before
            entity.waits_for = ""
            since = self._stamp(entity.failed_over_at)
            self._announcer.post(Returned(at, entity.path, by, count, since))

    def _note_wait(self, entity: _PairedEntity, cause: str, now: int) -> None:
        """Post what the return of an entity waits for, unless the last event had that cause."""
        if entity.waits_for != cause and entity.diversions is not None:
            entity.waits_for = cause
            queue = self.queues[entity.diversions.queue]
            self._announcer.post(ReturnWaits(self._stamp(now), entity.path, queue, cause))

    def statuses(self) -> list[PathStatus]:
        """Return the status of every entity that failed at least once."""
        self.look(self._clock.now_us())
        with self._lock:
            return [self._status(entity) for entity in self._entities.values()]

    def _status(self, entity: _PairedEntity) -> PathStatus:
        health = entity.health
        is_failed_over = health.state is HealthState.FAILED_OVER
        return PathStatus(
            path=entity.path,
            state=health.state,
            since=self._stamp(health.since),
            failures=health.failures,
            last_failure=_text_of(entity.cause),
            failovers=entity.failovers,
            diverted=entity.diverted,
            pings=entity.pings,
            next_ping_due=self._stamp(health.due) if is_failed_over else None,
            waits_for=entity.waits_for,
        )

    # -- pings ---------------------------------------------------------------------------------

    def due_pings(self, now: int, busy_until: Callable[[str], int]) -> list[DuePing]:
        """Return the entities to ping now, and count a ping for each.

        `busy_until` returns the time before which a busy entity must not be asked.
        """
        self.look(now)
        found = []
        with self._lock:
            for entity in self._entities.values():
                health = entity.health
                is_due = health.state is HealthState.FAILED_OVER and health.due <= now
                if is_due and busy_until(entity.path) <= now:
                    self._step(entity, Sign.PING_SENT, now)
                    entity.pings += 1
                    found.append(DuePing(entity.path, health.since))
        return found

    def pinged(
        self, ping: DuePing, error: MessagingError | None, *, stays_failed_over: bool = True
    ) -> None:
        """Record the result of a ping; a ping refused for a missing right is reported once.

        A refusal with `stays_failed_over=False` ends the failover, so that the next send goes to
        the primary and its caller gets the same error.
        """
        sign = Sign.PING_PASSED
        if error is not None:
            sign = Sign.PING_FAILED if stays_failed_over else Sign.PING_ANSWERED
        now = self._clock.now_us()
        with self._lock:
            entity = self._entities[ping.path.lower()]
            health = entity.health
            if health.state is HealthState.FAILED_OVER and health.since == ping.since:
                was_refused = isinstance(entity.cause, UnauthorizedError)
                if isinstance(error, UnauthorizedError) and not was_refused:
                    event = PingRefused(self._stamp(now), entity.path, _text_of(error))
                    self._announcer.post(event)
                entity.cause = _without_frames(error) if error else entity.cause
                self._step(entity, sign, now)
        self._announcer.deliver()

    # -- the way home, with `preserve_order` ---------------------------------------------------

    def must_wait(self, path: str) -> bool:
        """Whether a send must wait a moment for the last diverted messages of its entity."""
        entity = self._entities[path.lower()]
        if entity.health.state is HealthState.SWITCHING:
            self._apply(path, None)  # the sends may have waited long enough
        return entity.health.state is HealthState.SWITCHING

    def begin_diversion(self, path: str) -> Permit | None:
        """Record that a diversion begins; return None if sends are not diverted now.

        The decision that everything is home is made under the same lock, so no diversion can begin
        unnoticed between a look and that decision.
        """
        with self._lock:
            entity = self._entities[path.lower()]
            state = entity.health.state
            if not state.diverts or state is HealthState.SWITCHING:
                return None
            if entity.diversions is None:
                entity.diversions = Diversions(queue_of(path, self.queues), self._has_numbers)
            return Permit(entity.diversions.queue, entity.diversions.begin())

    def end_diversion(self, path: str, permit: Permit, receipt: SendReceipt | None) -> None:
        """Record the end of a diversion; without a receipt, the diversion failed."""
        with self._lock:
            diversions = self._entities[path.lower()].diversions
            assert diversions is not None  # begin_diversion made it
            diversions.end(permit.place, receipt)

    def due_looks(self, now: int) -> list[Look]:
        """Return the looks into backlog queues that are due now."""
        self.look(now)
        found = []
        with self._lock:
            for entity in self._entities.values():
                if (
                    entity.diversions is not None
                    and _is_looking(entity)
                    and entity.health.due <= now
                ):
                    self._step(entity, Sign.LOOKED, now)
                    found.append(entity.diversions.look(entity.path))
        return found

    def looked(self, look: Look, result: LookResult | MessagingError) -> None:
        """Record what a look saw, or why it failed."""
        now = self._clock.now_us()
        with self._lock:
            entity = self._entities[look.path.lower()]
            self._step(entity, None, now)
            if entity.diversions is not None and _is_looking(entity):
                if isinstance(result, MessagingError):
                    cause = f"its backlog queue cannot be browsed ({_text_of(result)}); tried again"
                    self._note_wait(entity, cause, now)
                else:
                    self._apply_look(entity, entity.diversions, look, result, now)
        self._announcer.deliver()

    def _apply_look(
        self,
        entity: _PairedEntity,
        diversions: Diversions,
        look: Look,
        result: LookResult,
        now: int,
    ) -> None:
        is_switching = entity.health.state is HealthState.SWITCHING
        is_stuck = (
            result.number is not None and result.number == diversions.oldest and not is_switching
        )
        finding = diversions.finding(look, result, self._timing.switch_us)
        if finding is Finding.HOME:
            diversions.came_home()
            self._step(entity, Sign.HOME, now)
        elif finding is Finding.MORE:
            self._step(entity, Sign.LOOK_ON, now)
        elif not is_switching:
            is_unknown = bool(diversions.doubt) and result.number is None
            cause = _NOT_MOVING if is_stuck else _NO_NUMBER if is_unknown else _NOT_HOME
            self._note_wait(entity, cause, now)
            if finding is Finding.CAUGHT_UP:
                self._step(entity, Sign.CAUGHT_UP, now)

    # -- backlog queues ------------------------------------------------------------------------

    def choose_queue(
        self, current: int | None, chance: float, tried: Collection[int]
    ) -> Choice | None:
        """Return the backlog queue for a client: its current queue, if that is in rotation.

        A queue in `tried` is never chosen again for the same send, even if its cool-down is over.
        """
        self.bring_back(self._clock.now_us())
        with self._lock:
            return self._rotation.choose(current, chance, tried)

    def is_pulled(self, queue: int) -> bool:
        """Whether a backlog queue is out of rotation."""
        return self._rotation.is_pulled(queue)

    def pull(self, queue: int, error: MessagingError) -> None:
        """Take a backlog queue out of rotation for all clients of the factory."""
        now = self._clock.now_us()
        with self._lock:
            if self._rotation.pull(queue, now):
                path, cause = self.queues[queue], _text_of(error)
                self._announcer.post(BacklogQueuePulled(self._stamp(now), path, cause))
            self.cause_of_last_pull = _without_frames(error)
        self._announcer.deliver()

    def bring_back(self, now: int) -> None:
        """Return queues to the rotation whose cool-down is over."""
        with self._lock:
            for queue in self._rotation.bring_back(now):
                self._announcer.post(BacklogQueueBack(self._stamp(now), self.queues[queue]))
        self._announcer.deliver()

    def queue_statuses(self) -> list[BacklogQueueStatus]:
        """Return the status of every backlog queue."""
        self.bring_back(self._clock.now_us())
        pulled = self._rotation.pulled()
        return [
            BacklogQueueStatus(
                path, index not in pulled, self._stamp(pulled[index]) if index in pulled else None
            )
            for index, path in self.queues.items()
        ]

    # -- time ----------------------------------------------------------------------------------

    def next_due(self, busy_until: Callable[[str], int] = lambda _: 0) -> int:
        """Return the earliest time at which a timer runs out, or a ping, look or queue is due."""
        with self._lock:
            dues = [self._rotation.next_due(NEVER_US)]
            for entity in self._entities.values():
                health = entity.health
                is_ping = health.state is HealthState.FAILED_OVER
                dues.append(max(health.due, busy_until(entity.path)) if is_ping else health.due)
            return min(dues)


def _is_looking(entity: _PairedEntity) -> bool:
    return entity.health.state in (HealthState.RETURNING, HealthState.SWITCHING)


def _without_frames(error: MessagingError) -> MessagingError:
    """Return a copy without traceback and history, whose frames would keep messages in memory."""
    facts = {name: fact for name, fact in error.facts.items() if name != "history"}
    return type(error)(error.text, **facts)


def _text_of(error: MessagingError | None) -> str:
    return f"{error.code}: {error.text}" if error else ""
