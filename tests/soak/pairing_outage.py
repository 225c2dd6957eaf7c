"""Take a primary away under load in every way there is, and hold the pairing to its word.

    python -m tests.soak.pairing_outage --rounds 3 [--seed 7]

Two servers are processes; clients are paired factories, each with threads that send singles,
batches and pipelined. What was acknowledged is on the primary once when the backlog is home; what
raised is there at most once. Nothing waits for a time to pass, only for something to happen.
"""

import argparse
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.soak.server_process import ServerProcess
from twinbus import (
    BacklogQueuePulled,
    BacklogUnavailableError,
    BrokeredMessage,
    Claim,
    EntityStatus,
    FailedOver,
    HealthState,
    MessageSender,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    PairingEvent,
    RetryPolicy,
    Returned,
    SendAvailabilityPairedNamespaceOptions,
    ServerBusyError,
    SharedAccessKey,
    UnauthorizedError,
)
from twinbus.broker.commands import LeaseRange, Origin, PutKey, ReadRange, Send, SettleRange
from twinbus.connection import ConnectionString
from twinbus.pairing.backlog import restored

QUEUE = "orders"
PRIMARY = "primary"  # its name: backlog queues are called after it
BACKLOG_QUEUES = 3
CLIENTS = 2
DEADLINE_S = 60.0  # of every wait: far longer than anything here takes
PACE_S = 0.02  # between the sends of one thread
POLICY = RetryPolicy(
    operation_timeout=timedelta(seconds=1),
    min_backoff=timedelta(milliseconds=20),
    max_backoff=timedelta(milliseconds=200),
)
PATIENT = replace(POLICY, operation_timeout=timedelta(seconds=30))  # outwaits a busy server
AT_ONCE = timedelta(0)
PING_INTERVAL = timedelta(seconds=1)


def until(condition: Callable[[], object], what: str) -> None:
    """Return when a condition holds; fail when it does not in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s in vain until {what}"
        time.sleep(0.01)


# -- clients -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """A send that raised."""

    message_id: str
    began: float
    error: MessagingError


class Worker:
    """One thread that sends in its way, and keeps what it was told."""

    def __init__(self, name: str, sender: MessageSender, generator: random.Random) -> None:
        self.name = name
        self.sent: list[str] = []
        self.acknowledged: dict[str, float] = {}  # and when
        self.successes: list[float] = []  # when sends began that succeeded whole
        self.refused: list[Refusal] = []
        self.trouble = ""  # that is no MessagingError
        self._sender = sender
        self._generator = generator
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"a send of {self.name} does not end"

    def _run(self) -> None:
        try:
            while not self._stop.wait(PACE_S):
                began, refused = time.time(), len(self.refused)
                self._send(began)
                if len(self.refused) == refused:
                    self.successes.append(began)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
            self.trouble = f"{self.name}: {error!r:.300}"

    def _send(self, began: float) -> None:
        raise NotImplementedError

    def _next(self, count: int) -> list[BrokeredMessage]:
        first = len(self.sent)
        ids = [f"{self.name}.{first + n}" for n in range(count)]
        self.sent += ids
        body = bytes(self._generator.choice([10, 200, 2000]))
        return [BrokeredMessage(body, message_id=one) for one in ids]

    def _settle(self, ids: Sequence[str], began: float, send: Callable[[], object]) -> None:
        try:
            send()
        except MessagingError as error:
            self.refused += [Refusal(one, began, error) for one in ids]
        else:
            self.acknowledged.update(dict.fromkeys(ids, time.time()))


class SingleWorker(Worker):
    """Sends one message after the other."""

    def _send(self, began: float) -> None:
        (message,) = self._next(1)
        assert message.message_id is not None
        self._settle([message.message_id], began, lambda: self._sender.send(message))


class BatchWorker(Worker):
    """Sends batches: all or nothing."""

    def _send(self, began: float) -> None:
        batch = self._next(self._generator.randint(2, 20))
        ids = self.sent[-len(batch) :]
        self._settle(ids, began, lambda: self._sender.send_batch(batch))


class PipelinedWorker(Worker):
    """Keeps many sends in flight; each has its own answer."""

    def _run(self) -> None:
        with self._sender.pipelined() as self._pipeline:
            super()._run()

    def _send(self, began: float) -> None:
        batch = self._next(self._generator.randint(1, 20))
        answers: list[Future[None]] = [self._pipeline.send(message) for message in batch]
        for message_id, answer in zip(self.sent[-len(batch) :], answers, strict=True):
            self._settle([message_id], began, lambda a=answer: a.result(DEADLINE_S))  # type: ignore[misc]


class Client:
    """A paired factory and the threads that send through it."""

    def __init__(self, name: str, twins: "Twins", terms: "Terms", generator: random.Random) -> None:
        self.events: list[PairingEvent] = []
        self.factory = MessagingFactory.from_connection_string(
            terms.primary or twins.primary_string, retry_policy=terms.policy
        )
        secondary = twins.secondary.connection_string
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(secondary, retry_policy=terms.backlog_policy),
            MessagingFactory.from_connection_string(secondary, retry_policy=terms.backlog_policy),
            BACKLOG_QUEUES,
            terms.failover_interval,
        )
        options.ping_primary_interval = PING_INTERVAL
        self.pairing = self.factory.pair_namespace(options)
        self.pairing.on_event(self.events.append)
        kinds = (SingleWorker, BatchWorker, PipelinedWorker)
        self.workers: list[Worker] = [
            kind(
                f"{name}.{number}",
                self.factory.create_message_sender(QUEUE),
                random.Random(generator.random()),
            )
            for number, kind in enumerate(kinds)
        ]

    def happened(self, kind: type[PairingEvent]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def moment(self, kind: type[PairingEvent]) -> float:
        """When the first event of a kind was."""
        return next(e.at.timestamp() for e in self.events if isinstance(e, kind))

    def is_healthy(self) -> bool:
        return all(one.state is HealthState.HEALTHY for one in self.pairing.status())


@dataclass(frozen=True, slots=True)
class Terms:
    """How clients are paired."""

    failover_interval: timedelta = AT_ONCE
    policy: RetryPolicy = POLICY  # at the primary
    backlog_policy: RetryPolicy = POLICY
    primary: str = ""  # with which key; empty: that of everything


# -- two servers ---------------------------------------------------------------------------------


class Twins:
    """Two servers and the clients of the first."""

    def __init__(self, folder: Path, seed: int, limits: str = "") -> None:
        self.generator = random.Random(seed)
        self.clients: list[Client] = []
        for name in (PRIMARY, "secondary"):
            (folder / name).mkdir()
        config = f"{limits}\n[[queue]]\npath = '{QUEUE}'"
        self.primary = ServerProcess(folder / PRIMARY, config)
        self.secondary = ServerProcess(folder / "secondary")

    @property
    def primary_string(self) -> str:
        return named(self.primary.connection_string)

    @property
    def workers(self) -> list[Worker]:
        return [worker for client in self.clients for worker in client.workers]

    def join(self, terms: Terms) -> Client:
        """Let one more client begin to send."""
        client = Client(f"c{len(self.clients)}", self, terms, self.generator)
        self.clients.append(client)
        for worker in client.workers:
            worker.start()
        return client

    def await_sends(self, least: int = 1) -> None:
        """Return when so many sends of every thread succeeded that began after now."""
        now = time.time()
        until(
            lambda: all(sum(when > now for when in w.successes) >= least for w in self.workers),
            "every thread's sends succeed",
        )

    def await_some_sends(self) -> None:
        """Let every thread send for a while."""
        self.await_sends(self.generator.randint(1, 10))

    def await_refusals(self, kind: type[MessagingError]) -> None:
        """Return when every thread has met such an error."""
        until(
            lambda: all(any(isinstance(r.error, kind) for r in w.refused) for w in self.workers),
            f"every thread meets {kind.__name__}",
        )

    def await_event(self, kind: type[PairingEvent]) -> None:
        """Return when every client has seen an event."""
        until(lambda: all(c.happened(kind) for c in self.clients), f"{kind.__name__} everywhere")

    def stop_sending(self) -> None:
        """Let every thread finish its send."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.join()

    def close(self) -> None:
        """End everything, whatever state it is in."""
        for worker in self.workers:
            worker.stop()
        for server in (self.primary, self.secondary):
            if server.is_alive():
                os.kill(server.pid, signal.SIGCONT)  # a stopped one could not be talked to
        with ExitStack() as stack:
            for server in (self.primary, self.secondary):
                stack.callback(server.kill)
            for client in self.clients:
                stack.callback(client.factory.close)


def named(connection_string: str) -> str:
    """Return a connection string to the primary under its name."""
    return replace(ConnectionString.parse(connection_string), name=PRIMARY).to_text()


@contextmanager
def twins_at_work(seed: int, limits: str = "") -> Iterator[Twins]:
    """Start two servers; the caller adds the clients."""
    with tempfile.TemporaryDirectory(prefix="twinbus-pairing-outage-") as place:
        twins = Twins(Path(place), seed, limits)
        try:
            with ThreadPoolExecutor() as starters:
                list(starters.map(ServerProcess.start, [twins.primary, twins.secondary]))
            yield twins
        finally:
            twins.close()


# -- the way home --------------------------------------------------------------------------------


@dataclass
class Homecoming:
    """What the mover did."""

    moved: int = 0  # messages of the backlog
    recognised: int = 0  # of those that were tried before: the primary had them all along


def bring_home(twins: Twins) -> Homecoming:
    """Move every backlog queue to the primary, now and then twice, as a mover that was killed."""
    home = Homecoming()
    with (
        MessagingFactory.from_connection_string(twins.primary_string) as primary,
        MessagingFactory.from_connection_string(twins.secondary.connection_string) as secondary,
    ):
        for queue in twins.clients[0].pairing.backlog_queues():
            lease_next = LeaseRange(queue.path, "mover", 500)
            while lease := secondary.courier.ask(lease_next):
                first = lease.first
                while first <= lease.last:
                    page = secondary.courier.ask(
                        ReadRange(queue.path, lease.epoch, first, lease.last)
                    )
                    if not page.num_rows:
                        break
                    _deliver(page, queue.path, primary, home)
                    if not twins.generator.randrange(3):
                        _deliver(page, queue.path, primary, Homecoming())
                    last = page.column("sequence_number")[-1].as_py()
                    settled = SettleRange(queue.path, lease.epoch, [(first, last)])
                    secondary.courier.ask(settled)
                    first = last + 1
    return home


def _deliver(page: pa.RecordBatch, queue: str, primary: MessagingFactory, home: Homecoming) -> None:
    """Send messages of a backlog queue to their entities, each under its own origin."""
    found = restored(page)
    assert not found.faults, f"messages that cannot go home: {found.faults}"
    numbers = page.column("sequence_number").to_pylist()
    groups: dict[tuple[str, str | None], list[int]] = {}
    for row, (path, sender) in enumerate(
        zip(found.paths.to_pylist(), found.senders.to_pylist(), strict=True)
    ):
        groups.setdefault((path, sender), []).append(row)
    for (path, sender), rows in groups.items():
        if sender is None:
            origin = Origin(queue, [numbers[row] for row in rows])
        else:
            origin = Origin(sender, found.numbers.take(pa.array(rows)).to_pylist())
        receipt = primary.courier.ask(Send(path, found.batch.take(pa.array(rows)), origin))
        home.moved += len(rows)
        if sender is not None:
            home.recognised += int(np.count_nonzero(np.asarray(receipt.sequence_numbers) == 0))


def held_by_primary(twins: Twins) -> Counter[str]:
    """Count what the primary's queue holds, by message_id."""
    held: Counter[str] = Counter()
    with MessagingFactory.from_connection_string(twins.primary_string) as factory:
        receiver = factory.create_message_receiver(QUEUE)
        start = 0
        while page := receiver.peek(start, 1000):
            held.update(str(message.message_id) for message in page)
            assert page[-1].sequence_number is not None
            start = page[-1].sequence_number + 1
    return held


def left_in_backlog(twins: Twins) -> int:
    """Count what the backlog queues hold, dead letters too."""
    with NamespaceManager.from_connection_string(twins.secondary.connection_string) as manager:
        held = [manager.get_runtime_properties(queue.path) for queue in manager.list_queues()]
    return sum(one.active_message_count + one.dead_letter_message_count for one in held)


def sends_to_secondary(twins: Twins) -> list[dict[str, Any]]:
    """Return what the secondary metered of sends."""
    with NamespaceManager.from_connection_string(twins.secondary.connection_string) as manager:
        meter: list[dict[str, Any]] = manager.read_meter().to_pylist()
    return [row for row in meter if row["operation"] == "Send"]


# -- what came of it -----------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one scenario."""

    name: str
    acknowledged: int = 0
    raised: Counter[str] = field(default_factory=Counter)  # messages, by the kind of error
    raised_and_there: int = 0  # allowed: the outcome was unknown
    moved: int = 0
    recognised: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unheard_of: list[str] = field(default_factory=list)  # nobody sent them
    left: int = 0  # in the backlog, after all
    complaints: list[str] = field(default_factory=list)
    times_s: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        times = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self.times_s.items())
        raised = ", ".join(f"{count} {kind}" for kind, count in self.raised.items()) or "none"
        return (
            f"{self.name}: {self.acknowledged:,} acknowledged, {self.moved:,} by way of the "
            f"backlog ({self.recognised} of them known to the primary), {len(self.lost)} lost, "
            f"{len(self.doubled)} doubled; raised: {raised} ({self.raised_and_there} there all "
            f"the same); {times}"
        )

    def check(self) -> None:
        """Raise when a promise was broken."""
        assert not self.complaints, f"{self.name}: {self.complaints[:5]}"
        assert not self.lost, f"{self.name}: lost {len(self.lost)}: {self.lost[:5]}"
        assert not self.doubled, f"{self.name}: doubled {len(self.doubled)}: {self.doubled[:5]}"
        assert not self.unheard_of, f"{self.name}: nobody sent {self.unheard_of[:5]}"
        assert not self.left, f"{self.name}: {self.left} messages cannot leave the backlog"


def conclude(twins: Twins, outcome: Outcome) -> Outcome:
    """Stop sending, bring the backlog home, and compare what was promised with what is there."""
    twins.stop_sending()
    at_home = held_by_primary(twins)
    outcome.complaints += [
        f"{worker.name} still sends to the backlog"
        for worker in twins.workers
        if worker.acknowledged and list(worker.acknowledged)[-1] not in at_home
    ]
    began = time.monotonic()
    home = bring_home(twins)
    outcome.times_s["home after"] = time.monotonic() - began
    outcome.moved, outcome.recognised = home.moved, home.recognised
    held = held_by_primary(twins)
    acknowledged = {one for worker in twins.workers for one in worker.acknowledged}
    sent = {one for worker in twins.workers for one in worker.sent}
    refused = [refusal for worker in twins.workers for refusal in worker.refused]
    outcome.acknowledged = len(acknowledged)
    outcome.raised = Counter(type(refusal.error).__name__ for refusal in refused)
    outcome.raised_and_there = sum(refusal.message_id in held for refusal in refused)
    outcome.lost = sorted(acknowledged - set(held))
    outcome.doubled = sorted(one for one, count in held.items() if count > 1)
    outcome.unheard_of = sorted(set(held) - sent)
    outcome.left = left_in_backlog(twins)
    outcome.complaints += [worker.trouble for worker in twins.workers if worker.trouble]
    return outcome


def note_raised(twins: Twins, outcome: Outcome, *allowed: type[MessagingError]) -> None:
    """Complain of every error but those of a kind that this scenario is about."""
    outcome.complaints += [
        f"{refusal.message_id} raised {refusal.error!r:.200}"
        for worker in twins.workers
        for refusal in worker.refused
        if not isinstance(refusal.error, allowed)
    ]


def note_untouched(twins: Twins, outcome: Outcome, before: list[dict[str, Any]]) -> None:
    """Complain of everything a failover would leave."""
    for client in twins.clients:
        outcome.complaints += [f"there was {event}" for event in client.events]
        outcome.complaints += [f"{one.path} is known" for one in client.pairing.status()]
    after = sends_to_secondary(twins)
    outcome.complaints += [f"sent to the secondary: {row}" for row in after if row not in before]


# -- scenarios -----------------------------------------------------------------------------------

Blow = Callable[[ServerProcess], None]


def freeze(server: ServerProcess) -> None:
    """Let a server hang: it accepts connections and never answers."""
    os.kill(server.pid, signal.SIGSTOP)


def thaw(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGCONT)


def terminate(server: ServerProcess) -> None:
    """Stop a server in good order."""
    assert server.stop() == 0, f"the server ended badly: {server.complaints()}"


def outage(
    seed: int, interval: timedelta, strike: Blow = ServerProcess.kill, heal: Blow | None = None
) -> Outcome:
    """Take the primary away, and give it back."""
    seconds = interval.total_seconds()
    outcome = Outcome(f"{strike.__name__}, failover interval {seconds:g} s")
    with twins_at_work(seed) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms(interval))
        twins.await_some_sends()
        struck = time.time()
        strike(twins.primary)
        twins.await_event(FailedOver)
        twins.await_some_sends()
        healed = time.time()
        (heal or ServerProcess.start)(twins.primary)
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        _note_failover(twins, outcome, struck)
        return conclude(twins, outcome)


def _await_return(twins: Twins, outcome: Outcome, healed: float) -> None:
    """Wait until every client sends to the primary again."""
    twins.await_event(Returned)
    until(lambda: all(c.is_healthy() for c in twins.clients), "every client is back home")
    back = max(client.moment(Returned) for client in twins.clients)
    outcome.times_s["back after"] = back - healed


def _note_failover(twins: Twins, outcome: Outcome, struck: float) -> None:
    """Complain of sends that raised after the failover; at once means that none ever does."""
    firsts = []
    for client in twins.clients:
        over = client.moment(FailedOver)
        at_once = client.pairing.options.failover_interval == AT_ONCE
        outcome.complaints += [
            f"{refusal.message_id} raised after the failover: {refusal.error!r:.200}"
            for worker in client.workers
            for refusal in worker.refused
            if at_once or refusal.began > over
        ]
        acknowledged = [w for one in client.workers for w in one.acknowledged.values()]
        firsts.append(min(when for when in acknowledged if when > over))
    outcome.times_s["first diverted after"] = min(firsts) - struck
    outcome.times_s["every client's by"] = max(firsts) - struck


def claim_taken_away(seed: int) -> Outcome:
    """Take Send from the key of the application, and give it back."""
    outcome = Outcome("key without Send")
    with twins_at_work(seed) as twins:
        with NamespaceManager.from_connection_string(twins.primary_string) as manager:
            key = manager.create_key("application", [Claim.SEND])
            terms = Terms(primary=_with_key(twins.primary_string, key))
            for _ in range(CLIENTS):
                twins.join(terms)
            twins.await_some_sends()
            before = sends_to_secondary(twins)
            manager.courier.ask(PutKey(replace(key, claims=(Claim.LISTEN,))))
            twins.await_refusals(UnauthorizedError)
            note_untouched(twins, outcome, before)
            manager.courier.ask(PutKey(key))
            twins.await_some_sends()
        note_raised(twins, outcome, UnauthorizedError)
        note_untouched(twins, outcome, before)
        return conclude(twins, outcome)


def _with_key(connection_string: str, key: SharedAccessKey) -> str:
    parsed = ConnectionString.parse(connection_string)
    return replace(parsed, key_name=key.name, key=key.primary).to_text()


def throttled(seed: int) -> Outcome:
    """Send more than the primary takes: who has the time waits, who has not is told."""
    outcome = Outcome("busy primary")
    with twins_at_work(seed, "[limits]\nentity_operations_per_second = 40") as twins:
        hasty, patient = twins.join(Terms()), twins.join(Terms(policy=PATIENT))
        courier = patient.factory.courier
        now_us = courier.clock.now_us
        before = sends_to_secondary(twins)
        until(lambda: courier.busy_until(now_us()) > now_us(), "the patient client is told to wait")
        told = time.time()
        until(lambda: any(w.refused for w in hasty.workers), "a hasty send raises")
        twins.stop_sending()
        last = max(when for w in patient.workers for when in w.acknowledged.values())
        outcome.times_s["waited"] = last - told
        outcome.complaints += [
            f"{refusal.message_id} raised {refusal.error!r:.200}, and had the time to wait"
            for worker in patient.workers
            for refusal in worker.refused
        ]
        note_raised(twins, outcome, ServerBusyError)
        note_untouched(twins, outcome, before)
        return conclude(twins, outcome)


def backlog_queue_stopped(seed: int) -> Outcome:
    """Stop a backlog queue that is in use while the primary is away."""
    outcome = Outcome("backlog queue stopped")
    with twins_at_work(seed) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms())
        twins.await_some_sends()
        struck = time.time()
        twins.primary.kill()
        twins.await_event(FailedOver)
        twins.await_some_sends()
        secondary = twins.secondary.connection_string
        with NamespaceManager.from_connection_string(secondary) as manager:
            queues = {queue.path: queue for queue in manager.list_queues()}
            held = {p: manager.get_runtime_properties(p).active_message_count for p in queues}
            path = max(held, key=lambda one: held[one])
            stopped = time.time()
            manager.update_queue(replace(queues[path], status=EntityStatus.SEND_DISABLED))
            until(lambda: path in _pulled(twins), f"{path} leaves the rotation")
            twins.await_some_sends()
            manager.update_queue(queues[path])
        pulled = min(
            event.at.timestamp()
            for client in twins.clients
            for event in client.events
            if isinstance(event, BacklogQueuePulled)
        )
        outcome.times_s["pulled after"] = pulled - stopped
        twins.await_some_sends()
        healed = time.time()
        twins.primary.start()
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        _note_failover(twins, outcome, struck)
        return conclude(twins, outcome)


def _pulled(twins: Twins) -> set[str]:
    return {
        event.queue
        for client in twins.clients
        for event in client.events
        if isinstance(event, BacklogQueuePulled)
    }


def secondary_in_trouble(seed: int, strike: Blow, heal: Blow) -> Outcome:
    """Take the secondary away for a moment while the primary is away."""
    outcome = Outcome(f"secondary in trouble: {strike.__name__}")
    with twins_at_work(seed) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms())
        twins.await_some_sends()
        twins.primary.kill()
        twins.await_event(FailedOver)
        twins.await_some_sends()
        strike(twins.secondary)
        twins.await_event(BacklogQueuePulled)
        heal(twins.secondary)
        twins.await_some_sends()
        healed = time.time()
        twins.primary.start()
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        note_raised(twins, outcome, BacklogUnavailableError)
        return conclude(twins, outcome)


def both_killed(seed: int) -> Outcome:
    """Kill both; start the secondary again, then the primary."""
    outcome = Outcome("both killed")
    longer_than_a_cool_down = replace(POLICY, operation_timeout=PING_INTERVAL * 1.5)
    with twins_at_work(seed) as twins:
        for _ in range(CLIENTS):
            twins.join(Terms(backlog_policy=longer_than_a_cool_down))
        twins.await_some_sends()
        struck = time.time()
        twins.primary.kill()
        twins.secondary.kill()
        twins.await_refusals(BacklogUnavailableError)
        outcome.times_s["every thread was told by"] = time.time() - struck
        healed = time.time()
        twins.secondary.start()
        twins.await_sends()
        outcome.times_s["diverted again by"] = time.time() - healed
        healed = time.time()
        twins.primary.start()
        _await_return(twins, outcome, healed)
        twins.await_some_sends()
        note_raised(twins, outcome, BacklogUnavailableError)
        for worker in twins.workers:
            outcome.complaints += [
                f"{refusal.message_id} raised without both causes: {refusal.error.facts}"
                for refusal in worker.refused
                if not all(map(refusal.error.facts.get, ("primary_cause", "backlog_cause")))
            ]
        return conclude(twins, outcome)


def scenarios(long_interval: timedelta) -> dict[str, Callable[[int], Outcome]]:
    """Return every scenario by its name; each takes a seed."""
    return {
        "kill": lambda seed: outage(seed, AT_ONCE),
        "kill_with_interval": lambda seed: outage(seed, long_interval),
        "freeze": lambda seed: outage(seed, AT_ONCE, freeze, thaw),
        "freeze_with_interval": lambda seed: outage(seed, long_interval, freeze, thaw),
        "terminate": lambda seed: outage(seed, AT_ONCE, terminate),
        "claim_taken_away": claim_taken_away,
        "throttled": throttled,
        "backlog_queue_stopped": backlog_queue_stopped,
        "secondary_frozen": lambda seed: secondary_in_trouble(seed, freeze, thaw),
        "secondary_killed": lambda seed: secondary_in_trouble(
            seed, ServerProcess.kill, ServerProcess.start
        ),
        "both_killed": both_killed,
    }


def main() -> None:
    """Run from the command line."""
    known = scenarios(timedelta(seconds=5))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", choices=sorted(known), help="one scenario")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # failovers are what this is about
    chosen = [options.only] if options.only else list(known)
    failures = []
    for seed in range(options.seed, options.seed + options.rounds):
        print(f"seed {seed}: python -m tests.soak.pairing_outage --rounds 1 --seed {seed}")
        for name in chosen:
            try:
                outcome = known[name](seed)
                print(f"  {outcome}", flush=True)
                outcome.check()
            except (AssertionError, MessagingError) as error:
                failures.append(f"seed {seed}, {name}: {error!r}")
                print(f"  {name} FAILED: {error!r}", flush=True)
    assert not failures, "\n".join(failures)


if __name__ == "__main__":
    main()
