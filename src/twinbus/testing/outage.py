"""An outage simulator: two namespaces, many paired clients and a syphon in one process.

    verdict = OutageSimulation(seed=7, hours=6).run()
    assert verdict.is_good, verdict

The simulation runs in one thread on a manual clock and draws chance from the seed, so that the same
seed gives the same run. Outages are drawn at random, or come from a script:

    script = [Outage(at=timedelta(minutes=5), lasts=timedelta(minutes=20), path="orders")]
    OutageSimulation(seed=7, hours=1, script=script).run()

The auditor records what was acknowledged and checks the guarantees G1 to G9.
"""

import heapq
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from twinbus.broker.store.storage import DiskStorage
from twinbus.broker.turn.engine import EngineSettings, Storages
from twinbus.client.factory import MessagingFactory
from twinbus.client.manager import NamespaceManager
from twinbus.client.retry import RetryPolicy
from twinbus.client.sender import MessageSender
from twinbus.client.state import FactoryState
from twinbus.clock import ManualClock, to_us
from twinbus.entities import QueueDescription, backlog_queue_path, subscription_path
from twinbus.errors import EntityNotFoundError, MessagingError, ServerBusyError
from twinbus.ledger import NO_LEDGER, LedgerSettings
from twinbus.limits import (
    DEFAULT_LEASE_DURATION,
    PARTNER_GRACE,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
)
from twinbus.message import BrokeredMessage
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.events import FailedOver, PairingEvent, Returned
from twinbus.pairing.health import HealthState
from twinbus.pairing.options import SendAvailabilityPairedNamespaceOptions
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.protocol.commands import Send
from twinbus.testing.auditor import Auditor, Verdict, Watched
from twinbus.testing.faults import FaultyNamespace
from twinbus.testing.mover import Mover
from twinbus.testing.schedule import (
    PRIMARY,
    QUEUES,
    SUBSCRIPTIONS,
    TOPIC,
    Outage,
    Setting,
    SkewedClock,
    Where,
    drawn_outages,
)

_LONGEST_STEP_S = 10  # the longest back-off: the clock moves so far at once while a send waits


class _QuickDisk(DiskStorage):
    """Files without syncs: an outage simulation has no power cuts."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class _Process:
    """A paired factory and its clients."""

    name: str
    clock: SkewedClock
    primary: MessagingFactory
    secondary: MessagingFactory
    pairing: SendAvailabilityPairing
    senders: list[MessageSender] = field(default_factory=list)
    scheduled: list[tuple[MessageSender, int, BrokeredMessage]] = field(default_factory=list)


class OutageSimulation:
    """One run, decided by its seed. Call `run` once."""

    def __init__(  # noqa: PLR0913 - keywords that a test sets one by one
        self,
        *,
        seed: int,
        hours: float = 2.0,
        script: Sequence[Outage] | None = None,
        setting: Setting | None = None,
        preserve_order: bool = False,  # also with a drawn setting
        report: Callable[[str], None] | None = None,  # called with each line of the run's log
        ledger: LedgerSettings = NO_LEDGER,
    ) -> None:
        self.seed = seed
        self._random = Random(seed)  # noqa: S311 - a run must repeat, so chance is seeded
        self.setting = setting or Setting.drawn(self._random)
        if preserve_order:
            self.setting = replace(self.setting, preserve_order=True)
        self._span_us = int(hours * 3600 * SECOND_US)
        self._script = script
        self._ledger = ledger
        self._report = report or (lambda _: None)
        self.clock = ManualClock()
        self._start_us = self.clock.now_us()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ends: list[tuple[int, Callable[[], None]]] = []  # when faults end, and what ends them
        self._stack = ExitStack()
        self.auditor = Auditor(self.clock, keeps_order=self.setting.preserve_order)
        self._moves: list[int] = []  # when the mover runs, even during a send; latest first
        self._down: Counter[str | None] = Counter()  # current faults of the primary, by path
        self._secondary_faults = 0  # current faults of the secondary
        self._disturbances = 0  # changes of the primary's faults and clock jumps so far

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> Verdict:
        """Simulate the hours, bring the backlog home, and return the verdict."""
        with self._stack:
            self._build()
            self._plan()
            self._work_off(self._start_us + self._span_us)
            self._recover()
            self._judge()
        return self.auditor.verdict

    def _build(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._namespaces = {where: self._namespace(folder / where.value) for where in Where}
        self._watched = {
            where: Watched(namespace, self.clock) for where, namespace in self._namespaces.items()
        }
        self._faulty = {where: FaultyNamespace(self._watched[where]) for where in Where}
        manager = NamespaceManager(self._namespaces[Where.PRIMARY], clock=self.clock)
        for path in QUEUES:
            manager.create_queue(QueueDescription(path=path, requires_session=path == QUEUES[-1]))
        manager.create_topic(TOPIC)
        for name in SUBSCRIPTIONS:
            manager.create_subscription(TOPIC, name)
        self._processes = [self._process(number) for number in range(self.setting.factories)]
        primary, secondary = (self._faulty[where] for where in Where)
        self._mover = Mover(primary, secondary)

    def _namespace(self, directory: Path) -> EmbeddedNamespace:
        settings = EngineSettings(directory=directory, segment_bytes=1 << 20, ledger=self._ledger)
        disks = Storages(_QuickDisk(), _QuickDisk())
        namespace = EmbeddedNamespace(settings, self.clock, disks, threaded=False)
        return self._stack.enter_context(namespace)

    def _process(self, number: int) -> _Process:
        setting = self.setting
        random = Random(f"{self.seed}/{number}")  # noqa: S311
        policy = RetryPolicy(operation_timeout=setting.operation_timeout)
        clock = SkewedClock(self.clock)
        primary, secondary = (
            MessagingFactory(
                _Unclosable(self._faulty[where]),
                name=name,
                retry_policy=policy,
                clock=clock,
                random=random,
            )
            for where, name in ((Where.PRIMARY, PRIMARY), (Where.SECONDARY, "backup"))
        )
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(_Unclosable(self._watched[Where.SECONDARY]), clock=clock),
            secondary,
            setting.backlog_queues,
            setting.failover_interval,
            enable_syphon=number == 0,
            syphon=lambda _: _Stoppable(),
            preserve_order=setting.preserve_order,
        )
        options.ping_primary_interval = setting.ping_interval
        pairing = primary.pair_namespace(options)
        process = _Process(f"process {number}", clock, primary, secondary, pairing)
        pairing.on_event(lambda event: self._on_event(process, event))
        for _ in range(setting.clients):
            path = random.choice([*QUEUES, TOPIC, QUEUES[0].upper()])
            process.senders.append(primary.create_message_sender(path))
        return process

    def _plan(self) -> None:
        for _ in range(self.setting.sends):
            self._at(self._random.randrange(self._span_us), self._act)
        script = self._script
        if script is None:
            span = timedelta(microseconds=self._span_us)
            script = drawn_outages(self._random, span, self.setting.backlog_queues)
        for outage in script:
            self._at(to_us(outage.at), self._beginning(outage))
        if self._script is None:
            for _ in range(self._random.choice([0, 0, 0, 1, 2])):
                self._at(self._random.randrange(self._span_us), self._jump)
        for at in range(0, self._span_us, to_us(self.setting.move_interval)):
            if self.setting.preserve_order:  # sends may wait for the mover
                self._moves.insert(0, self._start_us + at)
            else:
                self._at(at, self._move)
        self.clock.on_advance(self._faults_in_time)
        self.clock.on_advance(self._moves_in_time)

    # -- the agenda ----------------------------------------------------------------------------

    def _at(self, after_us: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._start_us + after_us, next(self._order), action))

    def _work_off(self, until: int) -> None:
        """Run the actions of the agenda at their times; later if a send took long."""
        while self._agenda and self._agenda[0][0] <= until:
            moment, _, action = heapq.heappop(self._agenda)
            self._advance_to(moment)
            action()
        self._advance_to(until)

    def _advance_to(self, moment: int) -> None:
        """Move the clock, with a stop at each time at which a pairing has something to do."""
        while (now := self.clock.now_us()) < moment:
            dues = [process.pairing.next_due_us for process in self._processes]
            stop = min([moment, *(due for due in dues if due > now)])
            self.clock.sleep_us(stop - now)

    def _say(self, text: str) -> None:
        since = timedelta(microseconds=self.clock.now_us() - self._start_us)
        self._report(f"{str(since).split('.')[0]:>9}  {text}")

    # -- actions -------------------------------------------------------------------------------

    def _beginning(self, outage: Outage) -> Callable[[], None]:
        """Return a function that starts an outage; the outage ends on time even during a send."""

        def begin() -> None:
            self._say(f"FAULT     {outage}")
            self.auditor.verdict.faults += 1
            end = self._faulty[outage.where].inject(outage.fault, outage.path, outage.times)
            if outage.where is Where.PRIMARY:
                self._down[outage.path and outage.path.lower()] += 1
                self._disturbances += 1
            else:
                self._secondary_faults += 1
            moment = self.clock.now_us() + to_us(outage.lasts)
            self._ends.append((moment, lambda: self._end(outage, end)))

        return begin

    def _end(self, outage: Outage, end: Callable[[], None]) -> None:
        end()
        self._say(f"healed    {outage.path or 'the ' + outage.where.value}")
        if outage.where is Where.PRIMARY:
            self._down[outage.path and outage.path.lower()] -= 1
            self._disturbances += 1
            self._expect_return()
        else:
            self._secondary_faults -= 1

    def _faults_in_time(self) -> None:
        now = self.clock.now_us()
        due = [entry for entry in self._ends if entry[0] <= now]
        self._ends = [entry for entry in self._ends if entry[0] > now]
        for _, end in due:
            end()

    def _moves_in_time(self) -> None:
        primary = self._watched[Where.PRIMARY]
        while self._moves and self._moves[-1] <= self.clock.now_us():
            self._moves.pop()
            sends = primary.sends
            self._move()
            primary.sends = sends  # G6 counts those of clients

    def _expect_return(self) -> None:
        """G5: one ping interval and one round trip after the last fault, every entity is back."""
        since = self._disturbances
        if any(self._down.values()):
            return
        grace = self._return_us
        self._at(self.clock.now_us() - self._start_us + grace, lambda: self._check_returned(since))

    @property
    def _return_us(self) -> int:
        """How long a return may take: a failover timer may still run out before the ping."""
        intervals = self.setting.failover_interval + self.setting.ping_interval
        return to_us(intervals) + (SERVER_BUSY_RETRY_S + 2 * _LONGEST_STEP_S) * SECOND_US

    def _check_returned(self, since: int) -> None:
        if self._disturbances != since:
            return
        for process in self._processes:
            for status in process.pairing.status():
                if status.state is HealthState.FAILED_OVER:
                    self.auditor.complain("G5", f"{status.path} has not returned in time")

    def _jump(self) -> None:
        process = self._random.choice(self._processes)
        seconds = self._random.choice([-7200, -60, 60, 7200])
        self._say(f"CLOCK     of {process.name} jumps by {seconds} s")
        process.clock.offset_us += seconds * SECOND_US
        self.auditor.forget_failures(process.name)
        self._disturbances += 1
        self.auditor.verdict.faults += 1

    def _move(self, *, in_peace: bool = False) -> None:
        """Run the mover; unless `in_peace`, sometimes kill it between send and settlement."""
        if not in_peace and self._random.random() < 0.05:
            self._mover.owner = f"mover {self._random.getrandbits(32):x}"
            self._watched[Where.SECONDARY].fails_next_settle = True
        for index in range(self.setting.backlog_queues):
            try:
                self._mover.move(backlog_queue_path(PRIMARY, index))
            except MessagingError:
                continue  # the next run tries again

    def _on_event(self, process: _Process, event: PairingEvent) -> None:
        self._say(f"event     {process.name}: {_text_of(event)}")
        if isinstance(event, FailedOver):
            self.auditor.check_failover(event)
        elif isinstance(event, Returned):
            self.auditor.forget_failures(process.name, event.path.lower())

    def _act(self) -> None:
        process = self._random.choice(self._processes)
        chance = self._random.random()
        if chance < 0.03:
            self._wrong_send(process)
        elif chance < 0.05:
            self._poison()
        elif chance < 0.08:
            path = self._random.choice(QUEUES)
            process.pairing.mark_path_healthy(path)
            self.auditor.forget_failures(process.name, path)
        elif chance < 0.14 and process.scheduled:
            self._cancel(process)
        else:
            self._send(process)

    def _is_calm(self, process: _Process) -> bool:
        """Whether the primary has no fault, and the process sees all entities as healthy."""
        statuses = process.pairing.status()
        is_healthy = all(status.state is HealthState.HEALTHY for status in statuses)
        return is_healthy and not any(self._down.values())

    def _send(self, process: _Process) -> None:
        random = self._random
        sender = random.choice(process.senders)
        count = random.choice([1, 1, 1, 2, 5])
        messages = [self._message(sender.path) for _ in range(count)]
        schedules = sender.path.lower() != TOPIC and random.random() < 0.1
        due = self.clock.now() + timedelta(hours=random.uniform(0.1, 48))
        if schedules:
            messages = [replace(m, scheduled_enqueue_time_utc=due) for m in messages]
        is_suspect = any(
            status.path.lower() == sender.path.lower() and status.state is HealthState.SUSPECT
            for status in process.pairing.status()
        )
        if random.random() < (0.5 if is_suspect else 0.05):  # late successes are rare otherwise
            self._watched[Where.PRIMARY].slow_for_s = random.randrange(1, 90)
        watch = self.auditor.begin_send(process.name, sender, messages)
        at_primary = self._watched[Where.PRIMARY].accepted[sender.path.lower()]
        there_before = len(at_primary)
        before = [self._watched[where].sends for where in Where]
        is_calm = self._is_calm(process)
        try:
            if schedules:
                numbers = sender.schedule(messages, due)
                process.scheduled += [
                    (sender, n, m) for n, m in zip(numbers, messages, strict=True)
                ]
            else:
                sender.send_batch(messages)
        except MessagingError as error:
            ails = self._secondary_faults or any(
                not queue.is_in_rotation for queue in process.pairing.backlog_queues()
            )
            interval = self.setting.failover_interval
            self.auditor.failed(watch, error, interval, backlog_ails=bool(ails))
            return
        finally:
            self.auditor.direct.update(at_primary[there_before:])
            self._watched[Where.PRIMARY].slow_for_s = 0
        self.auditor.acknowledged(watch)
        after = [self._watched[where].sends for where in Where]
        if is_calm and after != [before[0] + 1, before[1]]:
            self.auditor.complain("G6", f"a healthy send to {sender.path} cost {before} -> {after}")

    def _message(self, path: str) -> BrokeredMessage:
        random = self._random
        properties: dict[str, Any] = {}
        if random.random() < 0.3:
            properties = {"n": random.randrange(100), "t": timedelta(seconds=5), "x": 1.5}
        needs_session = path.lower() == QUEUES[-1]
        size = 100_000 if random.random() < 0.01 else random.randrange(40)  # of more than 64 KB
        return BrokeredMessage(
            random.randbytes(size),
            message_id=f"{random.getrandbits(96):024x}",
            session_id=random.choice("abc") if needs_session or random.random() < 0.3 else None,
            subject=random.choice([None, "a subject"]),
            time_to_live=timedelta(days=30) if random.random() < 0.2 else None,
            application_properties=properties,
        )

    def _wrong_send(self, process: _Process) -> None:
        """Send to a missing entity: the caller must get the error, and nothing may fail over."""
        sender = process.primary.create_message_sender("nowhere")
        was_calm = self._is_calm(process)
        try:
            sender.send(BrokeredMessage(b"", message_id=f"nowhere {next(self._order)}"))
        except EntityNotFoundError:
            return
        except MessagingError as error:
            self.auditor.maybe_poison += 1  # a backlog queue may have it if the reply was lost
            if was_calm and not isinstance(error, ServerBusyError):
                self.auditor.complain("G5", f"a send to a missing entity raised {error!r}")
        else:  # diverted while the primary could not say that the entity is missing
            self.auditor.verdict.poisoned += 1

    def _poison(self) -> None:
        """Put a message into the backlog that cannot be brought home."""
        queue = backlog_queue_path(PRIMARY, self._random.randrange(self.setting.backlog_queues))
        bad: list[dict[str, Any]] = [
            {},
            {"x-ms-path": 5},
            {"x-ms-path": "nowhere"},
            {"x-ms-path": QUEUES[0], "x-ms-timetolive": "soon"},
        ]
        message = BrokeredMessage(b"poison", application_properties=self._random.choice(bad))
        self._watched[Where.SECONDARY].ask(Send(queue, [message]))
        self.auditor.verdict.poisoned += 1

    def _cancel(self, process: _Process) -> None:
        at = self._random.randrange(len(process.scheduled))
        sender, number, message = process.scheduled.pop(at)
        try:
            sender.cancel_scheduled(number)
        except MessagingError as error:
            self.auditor.unsure.add(message.message_id)
            self._say(f"cancel    {number}: {error.code}")
        else:
            at_primary = self._watched[Where.PRIMARY].accepted[sender.path.lower()]
            # If the mover's send succeeded but its reply was lost, both namespaces have it.
            is_half_home = number < 0 and message.message_id in at_primary
            ids = self.auditor.unsure if is_half_home else self.auditor.cancelled
            ids.add(message.message_id)

    # -- the end -------------------------------------------------------------------------------

    def _recover(self) -> None:
        """End all faults, wait for the pings, and bring the backlog home."""
        for _, end in self._ends:
            end()
        self._ends = []
        self._agenda.clear()
        for faulty in self._faulty.values():
            faulty.heal()
        self._watched[Where.SECONDARY].fails_next_settle = False
        self._say("healed    everything")
        self._advance_to(self.clock.now_us() + self._return_us)
        for _ in range(3):
            # The leases of a killed mover must expire first.
            self._advance_to(self.clock.now_us() + to_us(DEFAULT_LEASE_DURATION))
            self._move(in_peace=True)
        self._advance_to(self.clock.now_us() + 2 * to_us(self.setting.ping_interval))
        for process in self._processes:
            for status in process.pairing.status():
                # A return may wait for one more send: a diverted message has no known number.
                if status.state.diverts and "sequence number" not in status.waits_for:
                    self.auditor.complain("G5", f"{status.path} never returned")

    def _judge(self) -> None:
        verdict = self.auditor.verdict
        verdict.simulated = timedelta(microseconds=self.clock.now_us() - self._start_us)
        primary, secondary = (self._watched[where] for where in Where)
        for where, watched in self._watched.items():
            self.auditor.audit_operations(watched, self._namespaces[where].snapshot().meter)
        targets: dict[str, Sequence[str]] = {path: [path] for path in QUEUES}
        targets[TOPIC] = [subscription_path(TOPIC, name) for name in SUBSCRIPTIONS]
        self.auditor.audit_primary(primary.inner, targets)
        queues = [backlog_queue_path(PRIMARY, i) for i in range(self.setting.backlog_queues)]
        self.auditor.audit_backlog(secondary, queues)
        verdict.moved = self._mover.moved
        for process in self._processes:
            for pair, count in process.pairing.signs.items():
                verdict.signs[pair] += count
            verdict.diverted += sum(status.diverted for status in process.pairing.status())
            self._part(process)

    def _part(self, process: _Process) -> None:
        """G8: end one of the two factories, and check the state of the other."""
        ends: list[tuple[Callable[[], None], FactoryState, FactoryState]] = [
            (process.primary.close, FactoryState.CLOSED, FactoryState.CLOSED)
        ]
        if process is self._processes[0]:  # it runs the syphon
            ends += [
                (lambda: process.primary.fault("x"), FactoryState.FAULTED, FactoryState.FAULTED),
                (lambda: process.secondary.fault("x"), FactoryState.FAULTED, FactoryState.FAULTED),
                (process.secondary.close, FactoryState.FAULTED, FactoryState.CLOSED),
            ]
        end, *expected = self._random.choice(ends)
        end()
        self.clock.advance(PARTNER_GRACE)
        states = [process.primary.state, process.secondary.state]
        if states != expected:
            self.auditor.complain("G8", f"{process.name} ended as {states}, not {expected}")


class _Unclosable:
    """Wraps a namespace so that the factories that share it cannot close it."""

    def __init__(self, inner: FaultyNamespace | Watched) -> None:
        self._inner = inner
        self.id = inner.id
        self.capabilities = inner.capabilities
        self.submit = inner.submit
        self.ask = inner.ask

    def close(self) -> None:
        """Do nothing: other factories use the namespace."""


class _Stoppable:
    """A syphon that does nothing: the agenda runs the mover instead."""

    def stop(self) -> None:
        """Do nothing."""


def _text_of(event: PairingEvent) -> str:
    what = getattr(event, "path", None) or getattr(event, "queue", "")
    return f"{type(event).__name__} {what}"
