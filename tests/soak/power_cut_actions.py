"""Everything that applications do with a namespace, drawn at random, and what it promises them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from tests.soak.power_cut_machine import MANY, SOON, Hold, Machine, Step
from tests.soak.power_cut_model import BrokenPromiseError, Copy, Fate, Lease
from twinbus.clock import moment_us
from twinbus.entities import (
    DEAD_LETTER_SUFFIX,
    EntityDescription,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
    dead_letter_path,
)
from twinbus.errors import (
    EntityAlreadyExistsError,
    MessageNotFoundError,
    SessionCannotBeLockedError,
)
from twinbus.limits import MAX_LEASE_DURATION, SPILL_DRAIN_SENDS
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol.commands import (
    AcceptSession,
    CancelScheduled,
    CreateEntity,
    DeadLetterPart,
    DeleteEntity,
    DeleteKey,
    Disposition,
    LeaseRange,
    Origin,
    PutKey,
    ReadRange,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    ReleaseSession,
    Send,
    SendReceipt,
    SessionLock,
    SetSessionState,
    Settle,
    SettleRange,
    UpdateEntity,
)
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.origins import sender_source

PLAIN, PASSING, ONCE, TALKS, TOPIC = "orders", "passing", "once", "talks", "news"
SUBSCRIPTIONS = [SubscriptionDescription(topic_path=TOPIC, name=name) for name in ("sport", "art")]
OFTEN = 1000  # failed deliveries that no message of a short run reaches
ENTITIES: tuple[EntityDescription, ...] = (
    QueueDescription(path=PLAIN, max_delivery_count=OFTEN),
    QueueDescription(path=PASSING, max_delivery_count=OFTEN),
    QueueDescription(
        path=ONCE,
        max_delivery_count=OFTEN,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=timedelta(days=1),
    ),
    QueueDescription(path=TALKS, max_delivery_count=OFTEN, requires_session=True),
    TopicDescription(path=TOPIC),
    *(replace(subscription, max_delivery_count=OFTEN) for subscription in SUBSCRIPTIONS),
)
RECEIVED_FROM = (PLAIN, PASSING, ONCE, *(subscription.path for subscription in SUBSCRIPTIONS))
SESSIONS = ("s1", "s2", "s3")
FATES = {
    Disposition.COMPLETE: Fate.ABSENT,
    Disposition.DEFER: Fate.DEFERRED,
    Disposition.DEAD_LETTER: Fate.DEAD,
}


class Applications:
    """Senders, receivers, syphons and administrators of one machine."""

    def __init__(self, machine: Machine, *, sick_spill: bool) -> None:
        self._machine = machine
        self._sick_spill = sick_spill
        self._model = machine.model
        self._random: random.Random = machine.random
        self._serial = 0
        self._next: dict[str, int] = {}  # origin -> the number of its next message
        self._temporary: list[str] = []  # queues that may be deleted
        self._scheduled: list[tuple[Copy, int]] = []  # with their numbers
        self._deferred: dict[Copy, int] = {}
        # Commands that may share a turn, and how often each is drawn.
        self._single: list[tuple[Callable[[], Step | None], int]] = [
            (self._send, 30),
            (self._schedule, 4),
            (self._cancel, 3),
            (self._repeat_acknowledged, 4),
            (self._repeat_unanswered, 8),
            (self._send_duplicate, 4),
            (self._receive, 16),
            (self._receive_deferred, 5),
            (self._receive_and_delete, 5),
            (self._settle, 25),
            (self._settle_range, 8),
        ]
        self._flows: list[tuple[Callable[[], None], int]] = [
            (self._several, 60),
            (self._let_pass, 10),
            (self._talk, 6),
            (self._lease, 5),
            (self._administrate, 5),
            (self._wait, 10),
            (self._make_trouble, 8),
            (self._end_trouble, 8),
        ]

    # -- the course of a life ------------------------------------------------------------------

    def set_up(self) -> None:
        """Create the entities that are missing."""
        for description in ENTITIES:
            if not self._machine.is_up:
                return
            if self._machine.engine.namespace.directory.find(description.path) is None:
                self._machine.run(self._create(description))

    def act(self) -> None:
        """Do something."""
        flows, weights = zip(*self._flows, strict=True)
        self._random.choices(flows, weights)[0]()

    def _several(self) -> None:
        """Let several applications ask at once: one turn, one record."""
        drawn: list[Step] = []
        actions, weights = zip(*self._single, strict=True)
        for action in self._random.choices(
            actions, weights, k=self._random.choice((1, 1, 1, 2, 4))
        ):
            step = action()
            if step is not None:
                drawn.append(step)
        if drawn:
            self._machine.run(*drawn)

    def _wait(self) -> None:
        spans = (0.001, 0.001, 0.5, 2, 20, 70)
        self._machine.advance(timedelta(seconds=self._random.choice(spans)))

    def _make_trouble(self) -> None:
        disk = self._machine.log
        trouble = self._random.randrange(6 if self._sick_spill else 4)
        self._machine.trace.append(f"trouble {trouble}")
        if trouble == 0:
            disk.full = True
        elif trouble == 1:
            disk.fails_sync = True
        elif trouble == 2:
            disk.error_rate = self._random.choice((0.05, 0.3, 0.6))
        elif trouble == 3:
            disk.break_files()
        elif trouble == 4:
            self._machine.spill.error_rate = self._random.choice((0.05, 0.3))
        else:
            self._machine.spill.break_files()

    def _end_trouble(self) -> None:
        if not self._machine.is_troubled:
            return
        self._machine.heal_disks()
        for _ in range(2 + len(self._machine.engine.spill) // SPILL_DRAIN_SENDS):
            if self._machine.is_up:
                self._machine.advance(SOON)

    # -- sending -------------------------------------------------------------------------------

    def _message(self, path: str, **fields: Any) -> BrokeredMessage:
        self._serial += 1
        size = self._random.choice((0, 20, 100, 100, 600, 3000))
        return BrokeredMessage(
            body=self._random.randbytes(size),
            message_id=f"m{self._serial}",
            session_id=self._random.choice(SESSIONS) if path == TALKS else None,
            subject=self._random.choice((None, "subject")),
            application_properties={"serial": self._serial, "part": b"x" * (size % 7)},
            **fields,
        )

    def _send(self) -> Step:
        path = self._random.choice((PLAIN, PLAIN, PASSING, ONCE, TALKS, TOPIC, *self._temporary))
        count = self._random.choice((1, 1, 1, 2, 5, 9))
        messages = [self._message(path) for _ in range(count)]
        is_plain = path in self._temporary or self._random.random() < 0.5
        return self._sends(Send(path, messages, None if is_plain else self._origin(count)))

    def _origin(self, count: int) -> Origin:
        sender = Origin(*self._numbered(sender_source(self._random.randint(1, 3)), count))
        if self._random.random() < 0.6:
            return sender
        source, numbers = self._numbered(f"backlog-{self._random.randint(1, 2)}", 2 * count)
        chosen = self._random.sample(numbers, count)
        return Origin(source, chosen, sender if self._random.random() < 0.5 else None)

    def _numbered(self, source: str, count: int) -> tuple[str, range]:
        first = self._next.get(source, 0)
        self._next[source] = first + count
        return source, range(first, first + count)

    def _sends(self, send: Send) -> Step:
        targets = (
            [subscription.path for subscription in SUBSCRIPTIONS]
            if send.path == TOPIC
            else [send.path]
        )
        messages: Iterable[BrokeredMessage] = send.messages
        due = [m.scheduled_enqueue_time_utc for m in messages]
        copies = [
            self._model.add(message, target, moment_us(moment) if moment else 0)
            for target in targets
            for message, moment in zip(messages, due, strict=True)
        ]
        is_repeatable = send.origin is not None or send.path == ONCE

        def done(receipt: SendReceipt) -> None:
            self._check_receipt(send, copies, receipt.sequence_numbers)
            for copy in copies:
                self._model.taken_in(copy)
                copy.may_double |= self._machine.is_doubtful and not is_repeatable
            for copy, number in zip(copies, receipt.sequence_numbers, strict=False):
                if copy.due_us and number:
                    self._scheduled.append((copy, number))
            if send.origin is not None and send not in self._model.transfers:
                self._model.transfers.append(send)

        def unknown() -> None:
            for copy in copies:
                self._model.may_be_taken_in(copy)
            if is_repeatable and not all(copy.is_enqueued for copy in copies):
                self._model.unanswered.append(send)

        return Step(send, done, unknown)

    def _check_receipt(self, send: Send, copies: list[Copy], numbers: Iterable[int]) -> None:
        """Check the numbers that an acknowledged send gave its messages."""
        if send.path == TOPIC:
            return
        is_spilled = self._machine.was_troubled or self._machine.is_troubled
        for copy, number in zip(copies, numbers, strict=True):
            message_id = copy.message.message_id
            if number:
                self._model.check_number(send.path, number, message_id)
            if number and copy.is_enqueued:
                raise BrokenPromiseError(f"{send.path}: {message_id} was taken a second time")
            if not number and copy.is_enqueued is False and not is_spilled:
                raise BrokenPromiseError(f"{send.path}: {message_id} was taken for known")

    def _schedule(self) -> Step:
        path = self._random.choice((PLAIN, PASSING))
        due = self._machine.clock.now() + timedelta(seconds=self._random.choice((1, 30, 300)))
        messages = [self._message(path, scheduled_enqueue_time_utc=due) for _ in range(2)]
        origin = self._origin(2) if self._random.random() < 0.5 else None
        return self._sends(Send(path, messages, origin))

    def _cancel(self) -> Step | None:
        now = self._machine.now_us
        waiting = [(copy, n) for copy, n in self._scheduled if copy.due_us > now]
        self._scheduled = waiting
        sure = [(c, n) for c, n in waiting if c.is_sure and c.possible == {Fate.SCHEDULED}]
        if not sure:
            return None
        copy, number = self._random.choice(sure)
        self._scheduled.remove((copy, number))
        return Step(
            CancelScheduled(copy.path, [number]),
            lambda _: self._model.is_durable(copy, Fate.ABSENT),
            partial(self._model.may_be, copy, Fate.ABSENT),
        )

    def _repeat_acknowledged(self) -> Step | None:
        """Repeat a send whose answer came: nothing may be enqueued again."""
        if not self._model.transfers:
            return None
        return self._sends(self._random.choice(self._model.transfers))

    def _repeat_unanswered(self) -> Step | None:
        """Repeat a send whose answer never came, as a client does."""
        unanswered = self._model.unanswered
        if not unanswered:
            return None
        return self._sends(unanswered.pop(self._random.randrange(len(unanswered))))

    def _send_duplicate(self) -> Step | None:
        """Send a message again that duplicate detection knows."""
        sent = [copy for (path, _), copy in self._model.copies.items() if path == ONCE]
        if not sent:
            return None
        return self._sends(Send(ONCE, [self._random.choice(sent).message]))

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self) -> Step:
        path = self._random.choice((*RECEIVED_FROM, *self._temporary))
        if self._random.random() < 0.25:
            path = dead_letter_path(path)
        return self._receives(path, self._random.choice((1, 1, 3, 10)))

    def _receives(self, path: str, count: int, session: SessionLock | None = None) -> Step:
        return Step(Receive(path, count, session=session), partial(self._hold, path))

    def _hold(self, path: str, batch: Any) -> None:
        for message in to_messages(batch):
            copy = self._delivered(path, message)
            self._machine.holds.append(Hold(path, copy, message))

    def _delivered(self, path: str, message: BrokeredMessage) -> Copy:
        machine = self._machine
        return self._model.delivered(path, message, machine.record, machine.now_us)

    def _receive_deferred(self) -> Step | None:
        found = {hold.copy for hold in self._machine.holds}
        sure = [
            (copy, number)
            for copy, number in self._deferred.items()
            if copy.is_sure and copy.latest is Fate.DEFERRED and copy not in found
        ]
        if not sure:
            return None
        copy, number = self._random.choice(sure)
        del self._deferred[copy]

        def done(batch: Any) -> None:
            self._hold(copy.path, batch)
            self._deferred[copy] = number

        return Step(
            ReceiveDeferred(copy.path, [number]),
            done,
            tolerates=() if copy.possible == {Fate.DEFERRED} else (MessageNotFoundError,),
        )

    def _receive_and_delete(self) -> Step:
        path, count = self._random.choice(RECEIVED_FROM), self._random.choice((1, 3))

        def done(batch: Any) -> None:
            for message in to_messages(batch):
                self._model.is_durable(self._delivered(path, message), Fate.ABSENT)

        def unknown() -> None:
            self._model.loose[path] += count

        return Step(Receive(path, count, mode=ReceiveMode.RECEIVE_AND_DELETE), done, unknown)

    def _settle(self) -> Step | None:
        holds = self._machine.holds
        if not holds:
            return None
        path = self._random.choice(holds).path
        chosen = [hold for hold in holds if hold.path == path and self._random.random() < 0.7]
        choices = [*Disposition, Disposition.COMPLETE, Disposition.COMPLETE]
        if path.endswith(DEAD_LETTER_SUFFIX):
            choices = [Disposition.COMPLETE, Disposition.ABANDON]
        return self._settles(chosen, self._random.choice(choices)) if chosen else None

    def _settles(self, holds: list[Hold], disposition: Disposition) -> Step:
        self._machine.holds = [hold for hold in self._machine.holds if hold not in holds]
        for hold in holds:
            self._deferred.pop(hold.copy, None)
        fate = FATES.get(disposition)
        moved = [(hold, fate) for hold in holds if fate is not None]

        def done(_: None) -> None:
            for hold, fate in moved:
                self._model.moves(hold.copy, fate)
            for hold in holds:
                if hold.copy.latest is Fate.DEFERRED and hold.message.sequence_number is not None:
                    self._deferred[hold.copy] = hold.message.sequence_number

        def unknown() -> None:
            for hold, fate in moved:
                self._model.may_be(hold.copy, fate)

        tokens = tokens_of(h.message.lock_token for h in holds if h.message.lock_token is not None)
        return Step(Settle(holds[0].path, tokens, disposition, "reason"), done, unknown)

    def _let_pass(self) -> None:
        """Send and complete so much that segments are given up."""
        machine = self._machine
        messages = [self._message(PASSING) for _ in range(10)]
        machine.run(self._sends(Send(PASSING, messages)))
        if machine.is_up:
            machine.run(self._receives(PASSING, MANY))
        holds = [hold for hold in machine.holds if hold.path == PASSING]
        if machine.is_up and holds:
            machine.run(self._settles(holds, Disposition.COMPLETE))
        if machine.is_up:
            machine.advance(timedelta(milliseconds=1))

    # -- sessions and ranges -------------------------------------------------------------------

    def _talk(self) -> None:
        """Hold a session, change its state, and settle some of its messages."""
        machine, name = self._machine, self._random.choice(SESSIONS)
        locks: list[SessionLock] = []
        machine.run(
            Step(
                AcceptSession(TALKS, name),
                lambda grant: locks.append(grant.lock),
                tolerates=(SessionCannotBeLockedError,),
            )
        )
        if not locks:
            return
        state = self._random.choice((None, self._random.randbytes(30)))
        flow: list[Callable[[], None]] = [
            lambda: machine.run(
                Step(
                    SetSessionState(TALKS, locks[0], state),
                    lambda _: self._model.states.put((TALKS, name), state),
                    partial(self._model.states.may_be, (TALKS, name), state),
                )
            ),
            lambda: machine.run(self._receives(TALKS, 3, locks[0])),
            self._settle_talk,
            lambda: machine.run(Step(ReleaseSession(TALKS, locks[0]))),
        ]
        for part in flow:
            if machine.is_up:
                part()
        machine.holds = [hold for hold in machine.holds if hold.path != TALKS]

    def _settle_talk(self) -> None:
        holds = [hold for hold in self._machine.holds if hold.path == TALKS]
        choices = (Disposition.COMPLETE, Disposition.ABANDON, Disposition.DEAD_LETTER)
        if holds:
            self._machine.run(self._settles(holds, self._random.choice(choices)))

    def _lease(self) -> None:
        machine, path = self._machine, self._random.choice((PLAIN, PASSING))
        leases: list[Any] = []
        command = LeaseRange(path, "syphon", 10, duration=MAX_LEASE_DURATION)
        machine.run(Step(command, leases.append))
        lease = leases[0] if leases else None
        if lease is None or not machine.is_up:
            return

        def done(batch: Any) -> None:
            ids = {}
            for message in to_messages(batch):
                self._delivered(path, message)
                number = message.sequence_number
                assert number is not None
                ids[number] = message.message_id
                self._model.check_origin(lease.origin, number, message.message_id)
            until = moment_us(lease.leased_until_utc)
            self._model.leases[lease.epoch] = Lease(path, lease.epoch, until, ids)

        machine.run(Step(ReadRange(path, lease.epoch, lease.first, lease.last), done))

    def _settle_range(self) -> Step | None:
        leases = [lease for lease in self._model.leases.values() if lease.ids]
        if not leases:
            return None
        lease = self._random.choice(leases)
        numbers = sorted(lease.ids)
        first, middle, last = sorted(self._random.choices(numbers, k=3))
        dead = [number for number in numbers if middle < number <= last]
        fates = {number: Fate.ABSENT for number in numbers if first <= number <= middle}
        fates |= dict.fromkeys(dead, Fate.DEAD)
        copies = [(self._model.copies[lease.path, lease.ids.pop(n)], f) for n, f in fates.items()]
        is_released = self._random.random() < 0.3
        if is_released:
            del self._model.leases[lease.epoch]

        def done(_: None) -> None:
            for copy, fate in copies:
                self._model.moves(copy, fate)

        def unknown() -> None:
            for copy, fate in copies:
                self._model.may_be(copy, fate)

        parts = [DeadLetterPart(dead, "reason")] if dead else []
        done_with = [(n, n) for n, fate in fates.items() if fate is Fate.ABSENT]
        command = SettleRange(lease.path, lease.epoch, done_with, parts, is_released)
        return Step(command, done, unknown)

    # -- managing ------------------------------------------------------------------------------

    def _administrate(self) -> None:
        if self._machine.is_troubled:
            return
        choices: list[Callable[[], Step]] = [self._create_temporary, self._update, self._put_key]
        if self._temporary:
            choices.append(self._delete_temporary)
        if self._model.keys.latest():
            choices.append(self._delete_key)
        self._machine.run(self._random.choice(choices)())

    def _create(self, description: EntityDescription) -> Step:
        return Step(
            CreateEntity(description),
            partial(self._model.entities.put, description.path),
            partial(self._model.entities.may_be, description.path, description),
            (EntityAlreadyExistsError,),
        )

    def _create_temporary(self) -> Step:
        self._serial += 1
        step = self._create(
            QueueDescription(path=f"temporary-{self._serial}", max_delivery_count=OFTEN)
        )

        def done(description: QueueDescription) -> None:
            step.done(description)
            self._temporary.append(description.path)

        return replace(step, done=done)

    def _delete_temporary(self) -> Step:
        path = self._temporary.pop(self._random.randrange(len(self._temporary)))
        self._machine.holds = [h for h in self._machine.holds if not h.path.startswith(path)]
        self._deferred = {c: number for c, number in self._deferred.items() if c.path != path}
        copies = [copy for copy in self._model.copies.values() if copy.path == path]

        def done(_: None) -> None:
            self._model.entities.put(path, None)
            for copy in copies:
                self._model.is_durable(copy, Fate.ABSENT)

        def unknown() -> None:
            self._model.entities.may_be(path, None)
            for copy in copies:
                self._model.may_be(copy, Fate.ABSENT)

        return Step(DeleteEntity(path), done, unknown)

    def _update(self) -> Step:
        known = self._model.entities.latest()
        path = self._random.choice(sorted(known))
        self._serial += 1
        changed = replace(known[path], user_metadata=f"changed {self._serial}")
        return Step(
            UpdateEntity(changed),
            partial(self._model.entities.put, path),
            partial(self._model.entities.may_be, path, changed),
        )

    def _put_key(self) -> Step:
        name = self._random.choice(("one", "two"))
        secrets = [self._random.randbytes(16).hex() for _ in range(2)]
        key = SharedAccessKey(
            name=name, claims=(Claim.SEND,), primary=secrets[0], secondary=secrets[1]
        )
        return Step(
            PutKey(key),
            lambda _: self._model.keys.put(name, key),
            partial(self._model.keys.may_be, name, key),
        )

    def _delete_key(self) -> Step:
        name = self._random.choice(sorted(self._model.keys.latest()))
        return Step(
            DeleteKey(name),
            lambda _: self._model.keys.put(name, None),
            partial(self._model.keys.may_be, name, None),
        )
