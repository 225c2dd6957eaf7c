"""What pairing costs: healthy sends, diverted sends, its clients, and a thousand failing over.

python bench/pairing.py [--quick]

Paired and plain sends take turns of a few milliseconds, each turn plain, paired, paired, plain, so
that neither gains from coming first; the median of the turns' ratios counts. Two plain factories
compared in the same way show how far the machine is to be believed. Bodies have 1 KB.
"""

import logging
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from client import started
from measure import Report, ratio, side_by_side

from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.connection import ConnectionString
from twinbus.limits import MAX_SIZE_MEGABYTES, PING_CONTENT_TYPE
from twinbus.message import to_batch
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.pairing.events import FailedOver, PairingEvent
from twinbus.protocol.commands import Command, Send
from twinbus.testing import Fault, FaultyNamespace

R = TypeVar("R")
BODY = b"x" * 1024
BATCH = 1000
QUEUE = "orders"
NAME = "primary"  # of the primary, whatever its address
BACKLOG_QUEUES = 10
TURN = {"one by one": 50, "rich, one by one": 50, "batches": 2_000, "pipelined": 2_000}  # messages
SENDERS = 10_000  # whose memory is measured
STORM_CLIENTS = 1000
STORM_ENTITIES = 10
STORM_SENDS = 5  # per client: the one that fails over, and those behind it
PING_S = 1.0
OUTAGE_S = 4.5 * PING_S


# -- two namespaces --------------------------------------------------------------------------------


def server(folder: Path, name: str) -> list[object]:
    """Return the command that serves a namespace."""
    serve = "from twinbus.cli import main; main()"
    command = [sys.executable, "-c", serve, "serve", folder / name, "--name", name]
    return [*command, "--port", "0", "--admin-port", "0"]


def make_queues(connection: str, *names: str) -> None:
    """Make queues that no benchmark fills."""
    with NamespaceManager.from_connection_string(connection) as manager:
        for name in names:
            manager.create_queue(
                QueueDescription(path=name, max_size_in_megabytes=MAX_SIZE_MEGABYTES)
            )


open_factory = MessagingFactory.from_connection_string


def options(
    secondary: str, ping_interval: timedelta = timedelta(minutes=1)
) -> SendAvailabilityPairedNamespaceOptions:
    """Return the options of a pairing that fails over at the first failure."""
    found = SendAvailabilityPairedNamespaceOptions(
        NamespaceManager.from_connection_string(secondary),
        open_factory(secondary),
        backlog_queue_count=BACKLOG_QUEUES,
        failover_interval=timedelta(0),
    )
    found.ping_primary_interval = ping_interval
    return found


# -- sends, in turns -------------------------------------------------------------------------------


class Client:
    """A sender, and the ways to send with it."""

    def __init__(self, factory: MessagingFactory) -> None:
        self._sender = factory.create_message_sender(QUEUE)
        self._batch = to_batch([BrokeredMessage(BODY) for _ in range(BATCH)])
        self._ways: dict[str, Callable[[int], None]] = {
            "one by one": self._send_one_by_one,
            "rich, one by one": self._send_rich,
            "batches": self._send_batches,
            "pipelined": self._send_pipelined,
        }

    def send(self, way: str) -> None:
        """Send a turn's messages."""
        self._ways[way](TURN[way])

    def _send_one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._sender.send(BrokeredMessage(BODY))

    def _send_rich(self, count: int) -> None:
        """Send messages with everything that the backlog must not act on, and a property."""
        for _ in range(count):
            self._sender.send(
                BrokeredMessage(
                    BODY,
                    session_id="customer 7",
                    time_to_live=timedelta(hours=1),
                    application_properties={"region": "north"},
                )
            )

    def _send_batches(self, count: int) -> None:
        for _ in range(count // BATCH):
            self._sender.send_batch(self._batch)

    def _send_pipelined(self, count: int) -> None:
        with self._sender.pipelined() as pipeline:
            sent = [pipeline.send(BrokeredMessage(BODY)) for _ in range(count)]
        for future in sent:
            future.result()


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds of each turn, of two who took turns."""

    plain: list[float]
    other: list[float]

    def ratio(self) -> float:
        """Return the median of how much longer the other took."""
        return ratio(self.other, self.plain)


def take_turns(factory: MessagingFactory, other: MessagingFactory, way: str, rounds: int) -> Turns:
    """Send with both: one, other, other, one, and so on."""
    first, second = Client(factory), Client(other)
    works = [partial(client.send, way) for client in (first, second, second, first)]
    seconds = [times[1:] for times in side_by_side(works, rounds + 1)]  # the first warms up
    return Turns(
        [a + b for a, b in zip(seconds[0], seconds[3], strict=True)],
        [a + b for a, b in zip(seconds[1], seconds[2], strict=True)],
    )


def show(what: str, way: str, turns: Turns) -> None:
    """Print what both did."""
    rates = [2 * TURN[way] / statistics.median(seconds) for seconds in (turns.plain, turns.other)]
    print(f"{f'{what}, {way}':<40} {rates[0]:>12,.0f} {rates[1]:>12,.0f} {turns.ratio():>10.3f}")


def measure_healthy(report: Report, where: str, primary: str, secondary: str, rounds: int) -> None:
    """Compare sends of a paired factory whose primary is well."""
    with (
        open_factory(primary) as first,
        open_factory(primary) as same,
        open_factory(primary) as two,
    ):
        first.create_message_sender(QUEUE).send(BrokeredMessage(BODY))
        two.pair_namespace(options(secondary))
        for way in ("one by one", "batches"):
            show(f"{where}: plain against plain", way, take_turns(first, same, way, rounds))
            turns = take_turns(first, two, way, rounds)
            show(f"{where}: paired, healthy", way, turns)
            report.add(f"{where}: healthy, {way}, times plain", turns.ratio(), 1.03, at_most=True)


def measure_numbers(report: Report, namespace: str, rounds: int) -> None:
    """Compare numbered sends, which every factory makes, with sends that have no number."""
    with open_factory(namespace) as first, open_factory(namespace) as two:
        first.courier.new_send = Send  # type: ignore[method-assign]
        for way in ("one by one", "batches"):
            turns = take_turns(first, two, way, rounds)
            show("embedded: numbered", way, turns)
            report.add(f"numbered, {way}, times unnumbered", turns.ratio(), 1.1, at_most=True)


def measure_diverted(report: Report, folder: Path, secondary: str, rounds: int) -> None:
    """Compare sends to the backlog with sends to a queue of the same server.

    The primary is a process that was killed.
    """
    with ExitStack() as stack:
        process = stack.enter_context(ExitStack())
        primary = process.enter_context(started(server(folder, "doomed")))
        make_queues(primary, QUEUE)
        first = stack.enter_context(open_factory(secondary))
        two = stack.enter_context(open_factory(primary, retry_policy=RetryPolicy.once()))
        pairing = two.pair_namespace(options(secondary))
        two.create_message_sender(QUEUE).send(BrokeredMessage(BODY))
        process.close()  # kills it
        two.create_message_sender(QUEUE).send(BrokeredMessage(BODY))
        for way in TURN:
            turns = take_turns(first, two, way, rounds)
            show("diverted", way, turns)
            report.add(f"diverted, {way}, times plain", turns.ratio(), 1.3, at_most=True)
        assert [status.failovers for status in pairing.status()] == [1]


# -- what a client holds ---------------------------------------------------------------------------


def bytes_per_sender(factory: MessagingFactory) -> float:
    """Return the memory of one of many senders."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        senders = [factory.create_message_sender(QUEUE) for _ in range(SENDERS)]
        return (tracemalloc.get_traced_memory()[0] - before) / len(senders)
    finally:
        tracemalloc.stop()


def measure_clients(report: Report, primary: str, secondary: str) -> None:
    """Count the memory and the threads of a healthy pairing, those of connections apart."""
    with open_factory(primary) as first, open_factory(primary) as two:
        chosen = options(secondary)
        chosen.secondary_namespace_manager.list_queues()
        for factory in (first, two, chosen.messaging_factory):
            factory.create_message_sender(QUEUE).send(BrokeredMessage(BODY))
        before = threading.active_count()
        pairing = two.pair_namespace(chosen)
        for _ in range(100):
            two.create_message_sender(QUEUE).send(BrokeredMessage(BODY))
        threads = threading.active_count() - before
        assert not pairing.status()
        sizes = [bytes_per_sender(factory) for factory in (first, two)]
    print(f"\n{'memory of a sender':<40} {sizes[0]:>12,.0f} {sizes[1]:>12,.0f} bytes")
    report.add("paired sender, bytes more than a plain one", sizes[1] - sizes[0], 16, at_most=True)
    report.add("threads that a healthy pairing adds", threads, 0, at_most=True)


# -- a thousand clients fail over ------------------------------------------------------------------


class Outage(FaultyNamespace):
    """A primary that is down, and refuses nobody before every client has sent to it."""

    def __init__(self, inner: Namespace, clients: int) -> None:
        super().__init__(inner)
        self.inject(Fault.UNAVAILABLE)
        self.tries: Counter[str] = Counter()
        self.pings: Counter[str] = Counter()
        self.fell_at = 0.0
        self._counting = threading.Lock()
        self._clients = clients
        self._together = threading.Barrier(clients, action=self._fall, timeout=60)

    def _fall(self) -> None:
        self.fell_at = time.perf_counter()

    def submit(self, command: Command[R]) -> "Future[R]":
        """Refuse it; the first sends, all at once."""
        if isinstance(command, Send):
            message = command.messages[0]
            is_ping = message.content_type == PING_CONTENT_TYPE
            with self._counting:
                (self.pings if is_ping else self.tries)[command.path] += 1
                is_first = not is_ping and self.tries.total() <= self._clients
            if is_first:
                self._together.wait()
        return super().submit(command)


def backlog_meter(manager: NamespaceManager) -> dict[str, Counter[str]]:
    """Return operations and messages of each backlog queue."""
    found: dict[str, Counter[str]] = {}
    for row in manager.read_meter().to_pylist():
        if row["path"].lower().startswith(f"{NAME}/x-servicebus-transfer/"):
            counts = {"operations": row["count"], "messages": row["messages"]}
            found.setdefault(row["path"], Counter()).update(counts)
    return found


def send_from_all(factory: MessagingFactory, clients: int) -> float:
    """Send with many clients at once, each in its own thread; return when the last was done."""
    senders = [
        factory.create_message_sender(f"{QUEUE}-{at % STORM_ENTITIES}") for at in range(clients)
    ]
    begin = threading.Barrier(clients)

    def send(at: int) -> None:
        begin.wait()
        for _ in range(STORM_SENDS):
            senders[at].send(BrokeredMessage(BODY))

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(send, range(clients)))
    return time.perf_counter()


def measure_storm(report: Report, primary: str, secondary: str, clients: int) -> None:
    """Let all clients of a factory fail over in the same moment; count what came of it."""
    names = [f"{QUEUE}-{at}" for at in range(STORM_ENTITIES)]
    make_queues(secondary, *names)
    with open_factory(secondary) as first:
        start = time.perf_counter()
        plain_s = send_from_all(first, clients) - start
    events: list[PairingEvent] = []
    with ExitStack() as stack:
        manager = stack.enter_context(NamespaceManager.from_connection_string(secondary))
        outage = Outage(open_namespace(ConnectionString.parse(primary)), clients)
        factory = stack.enter_context(MessagingFactory(outage, name=NAME))
        pairing = factory.pair_namespace(options(secondary, timedelta(seconds=PING_S)))
        pairing.on_event(events.append)
        before = backlog_meter(manager)
        storm_s = send_from_all(factory, clients) - outage.fell_at
        time.sleep(max(0.0, OUTAGE_S - storm_s))
        elapsed_s = time.perf_counter() - outage.fell_at
        pings, statuses = Counter(outage.pings), pairing.status()
        after = backlog_meter(manager)
    sent = clients * STORM_SENDS
    spread = {path: after[path] - before.get(path, Counter()) for path in after}
    per_queue = [counts["operations"] for counts in spread.values()]
    print(f"\nstorm: {clients:,} clients, {STORM_ENTITIES} entities, {sent:,} messages")
    print(f"  as plain clients {plain_s:.2f} s, failing over {storm_s:.2f} s")
    print(f"  sends to each of {len(per_queue)} backlog queues: {sorted(per_queue)}")
    print(f"  pings to each entity in {elapsed_s:.1f} s: {sorted(pings.values())}")
    times = Counter(event.path for event in events if isinstance(event, FailedOver))
    assert sorted(times) == sorted(status.path for status in statuses) == sorted(names)
    assert sum(status.diverted for status in statuses) == sent
    assert sum(counts["messages"] for counts in spread.values()) == sent
    add = partial(report.add, at_most=True)
    add("storm: most FailedOver events of an entity", max(times.values()), 1)
    add("storm: tries at the primary, per client", outage.tries.total() / clients, 1)
    add("storm: sends to the backlog, per message", sum(per_queue) / sent, 1)
    add(
        "storm: fullest backlog queue, times an even share",
        max(per_queue) * BACKLOG_QUEUES / sent,
        1.5,
    )
    add("storm: most pings to an entity, per interval", max(pings.values()) * PING_S / elapsed_s, 1)
    counted = sum(status.pings for status in statuses)
    add("storm: pings in the status, less those seen", abs(counted - pings.total()), 0)


def main() -> None:
    """Measure, print the rates and the goals."""
    quick = "--quick" in sys.argv
    rounds = 40 if quick else 120
    report = Report("pairing")
    logging.getLogger("twinbus.pairing").setLevel(logging.ERROR)  # that it fails over is the point
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        primary = stack.enter_context(started(server(folder, NAME)))
        secondary = stack.enter_context(started(server(folder, "secondary")))
        embedded = [f"Endpoint=embedded://{folder}/embedded-{name}" for name in (NAME, "other")]
        for connection in (primary, secondary, embedded[0]):
            make_queues(connection, QUEUE)
        print(
            f"{'messages/s of 1 KB, batches of 1000':<40} {'plain':>12} {'other':>12} {'time':>10}"
        )
        measure_healthy(report, "server", primary, secondary, rounds)
        measure_healthy(report, "embedded", embedded[0], embedded[1], rounds)
        measure_numbers(report, embedded[0], rounds)
        measure_diverted(report, folder, secondary, rounds)
        measure_clients(report, primary, secondary)
        measure_storm(report, primary, secondary, STORM_CLIENTS)
    report.finish()


if __name__ == "__main__":
    main()
