"""Durable sends through a server, against the least a server can do, the disk, and peers.

    python bench/client.py [--quick]

All rows are measured in turns within one run. Bodies have 1 KB, and every server flushes a message
before it acknowledges it (the name of NATS says when it does not). "16 connections" is the number
of clients that send at the same time, each one message after the other: from 16 threads of one
process, and from 4 processes with 4 threads each. The disk's own row is fdatasync of 1 KB written
over a file that has its blocks already.

"without the hook" sends as if there were no traces in Twinbus: beside it stands what the hook costs
that is not set. "traced" records a span for each send, and drops it where an exporter would be.

A "rich" message has what most applications set: ids, a session, a time to live and properties. It
goes to a queue, to a queue with sessions and duplicate detection, and to a topic with three
subscriptions, which select it by a catch-all rule, a correlation filter and an SQL filter.
"""

import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from bare_socket import PreallocatedFile
from measure import Report, ratio, side_by_side
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from peers import PEERS, Nats, RabbitMQ
from senders import (
    BODY,
    BareSender,
    ProcessCrowd,
    RabbitSender,
    Sender,
    ThreadCrowd,
    TwinbusSender,
    timed_sends,
)

from twinbus import (
    BrokeredMessage,
    CorrelationFilter,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    TopicDescription,
    tracing,
)
from twinbus.client.route import Lane
from twinbus.entities import RuleFilter, TrueFilter
from twinbus.limits import MAX_SIZE_MEGABYTES
from twinbus.message import to_batch

BATCH = 1000
QUEUE = "orders"
RICH = {  # row of a rich message: its entity
    "rich, one by one": QUEUE,
    "rich, to a queue with sessions and duplicate detection": "customers",
    "rich, to a topic with three subscriptions": "news",
}
MOST_FOR_RICH = 1.3  # times a send of a body alone
CONNECTIONS, PROCESSES = 16, 4
FOLDER = Path(__file__).parent
SINGLES, CROWDED, MANY, BATCHED = 300, 1_600, 5_000, 20_000  # messages of a row in one round
ORDER = random.Random(7)
Works = dict[str, tuple[int, Callable[[], object]]]  # a row: messages, and what sends them


@contextmanager
def started_process(command: list[Any]) -> Iterator[tuple[str, int]]:
    """Start a process; yield the line that it prints when it is ready, and its id; end it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def started(command: list[Any]) -> Iterator[str]:
    """Start a process that prints a line when it is ready; end it afterwards."""
    with started_process(command) as (line, _):
        yield line


class DroppingExporter(SpanExporter):
    """Takes spans and does nothing with them."""

    def export(self, spans: Sequence[Any]) -> SpanExportResult:  # noqa: ARG002 - see above
        """Drop them."""
        return SpanExportResult.SUCCESS


def make_entities(manager: NamespaceManager) -> None:
    """Create the queues and the topic that no row fills."""
    plain = QueueDescription(path=QUEUE, max_size_in_megabytes=MAX_SIZE_MEGABYTES)
    manager.create_queue(plain)
    manager.create_queue(
        replace(plain, path="customers", requires_session=True, requires_duplicate_detection=True)
    )
    topic = TopicDescription(path="news", max_size_in_megabytes=MAX_SIZE_MEGABYTES)
    manager.create_topic(topic)
    rules: dict[str, RuleFilter] = {
        "every": TrueFilter(),
        "orders": CorrelationFilter(subject="order placed"),
        "north": SqlFilter("region = 'north' AND amount > 10"),
    }
    for name, rule in rules.items():
        manager.create_subscription("news", name, RuleDescription(name="only", filter=rule))


def rich_message() -> BrokeredMessage:
    """Return a message of 1 KB with what most applications set."""
    return BrokeredMessage(
        BODY,
        session_id="customer 7",
        correlation_id="basket 31",
        content_type="application/json",
        subject="order placed",
        time_to_live=timedelta(hours=1),
        application_properties={"region": "north", "amount": 17, "is_gift": True},
    )


class Twinbus:
    """A client of a server process."""

    def __init__(self, connection: str) -> None:
        with NamespaceManager.from_connection_string(connection) as manager:
            make_entities(manager)
        self._factory = MessagingFactory.from_connection_string(connection)
        self._sender = self._factory.create_message_sender(QUEUE)
        self._rich = {path: self._factory.create_message_sender(path) for path in RICH.values()}
        self._batch = to_batch([BrokeredMessage(BODY) for _ in range(BATCH)])
        self.latencies: list[float] = []  # seconds of each single send
        self._lane = Lane()
        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(DroppingExporter()))

    def send_without_hook(self, count: int) -> None:
        """Send messages one by one, by what a sender calls when it has looked at the hook."""
        courier, lane = self._factory.courier, self._lane
        for _ in range(count):
            courier.route.send(courier.new_send(QUEUE, [BrokeredMessage(BODY)]), lane)

    def send_traced(self, count: int) -> None:
        """Send messages one by one, with a span for each."""
        tracing.enable(self._provider)
        try:
            for _ in range(count):
                self._sender.send(BrokeredMessage(BODY))
        finally:
            tracing.disable()

    def send_one_by_one(self, count: int) -> None:
        """Send messages; each waits for the one before."""
        self.latencies += timed_sends(lambda: self._sender.send(BrokeredMessage(BODY)), count)

    def send_rich(self, path: str, count: int) -> None:
        """Send messages with properties one by one."""
        sender = self._rich[path]
        for _ in range(count):
            sender.send(rich_message())

    def send_pipelined(self, count: int) -> None:
        """Send messages one by one without waiting for each."""
        with self._sender.pipelined() as pipeline:
            sent = [pipeline.send(BrokeredMessage(BODY)) for _ in range(count)]
        for future in sent:
            future.result()

    def send_batches(self, count: int) -> None:
        """Send batches of columns; each waits for the one before."""
        for _ in range(count // BATCH):
            self._sender.send_batch(self._batch)

    def send_batches_of_messages(self, count: int) -> None:
        """Send batches of message objects, made and converted on the way."""
        for _ in range(count // BATCH):
            self._sender.send_batch([BrokeredMessage(BODY) for _ in range(BATCH)])

    def rows(self) -> Works:
        """Return what the benchmark measures."""
        return {
            "Twinbus, one by one": (SINGLES, partial(self.send_one_by_one, SINGLES)),
            "Twinbus without the hook, one by one": (
                SINGLES,
                partial(self.send_without_hook, SINGLES),
            ),
            "Twinbus, one by one, traced": (SINGLES, partial(self.send_traced, SINGLES)),
            **{
                f"Twinbus, {row}": (SINGLES, partial(self.send_rich, path, SINGLES))
                for row, path in RICH.items()
            },
            "Twinbus, pipelined": (MANY, partial(self.send_pipelined, MANY)),
            "Twinbus, batches": (BATCHED, partial(self.send_batches, BATCHED)),
            "Twinbus, batches of message objects": (
                BATCHED,
                partial(self.send_batches_of_messages, BATCHED),
            ),
        }

    def close(self) -> None:
        """Disconnect."""
        self._factory.close()
        self._provider.shutdown()


class Disk:
    """The disk alone: 1 KB written over an existing block, then flushed."""

    def __init__(self, path: Path) -> None:
        self._file = PreallocatedFile(path)
        self._payload = [memoryview(BODY)]
        self.latencies: list[float] = []  # seconds of each flush

    def flush(self, count: int) -> None:
        """Write and flush that many times."""
        self.latencies += timed_sends(lambda: self._file.append(self._payload), count)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def crowd_rows(stack: ExitStack, name: str, kind: Callable[[Any], Sender], address: Any) -> Works:
    """Connect 16 senders in one process and 16 in four; return a row for each."""
    threads = stack.enter_context(ThreadCrowd(kind, address, CONNECTIONS))
    processes = stack.enter_context(
        ProcessCrowd(kind, address, PROCESSES, CONNECTIONS // PROCESSES)
    )
    each = CROWDED // CONNECTIONS
    return {
        f"{name}, 16 connections in 16 threads": (CROWDED, partial(threads.send, each)),
        f"{name}, 16 connections in 4 processes": (CROWDED, partial(processes.send, each)),
    }


def bare_rows(stack: ExitStack, port: int) -> Works:
    """Connect to the bare socket server; return its rows."""
    bare = BareSender(port)
    stack.callback(bare.close)
    batch = to_batch([BrokeredMessage(BODY) for _ in range(BATCH)]).serialize().to_pybytes()
    return {
        "bare socket server, one by one": (SINGLES, partial(bare.send, SINGLES)),
        "bare socket server, batches": (BATCHED, partial(bare.send, BATCHED // BATCH, batch)),
    }


def peer_rows(peer: RabbitMQ | Nats) -> Works:
    """Return the rows of a peer on one connection."""
    return {
        f"{peer.name}, one by one": (SINGLES, partial(peer.send_one_by_one, SINGLES, BODY)),
        f"{peer.name}, pipelined": (MANY, partial(peer.send_pipelined, MANY, BODY)),
        f"{peer.name}, batches": (MANY, partial(peer.send_batches, MANY, BODY)),
    }


def start_peers(stack: ExitStack, folder: Path) -> list[RabbitMQ | Nats]:
    """Start the peers that are installed; print how to install the others."""
    found: list[RabbitMQ | Nats] = []
    for kind in PEERS:
        missing = kind.missing()
        if missing:
            print(f"{kind.__name__} is left out: {missing}")
            continue
        home = folder / kind.__name__
        home.mkdir()
        peer = kind(home)
        stack.enter_context(peer)
        found.append(peer)
    return found


def measure(works: Works, peers: Sequence[RabbitMQ | Nats], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per message of each row in each round; peers start a round empty.

    Each round has another order, so that no row always follows one that keeps the disk busy.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    rows = list(works.items())
    for _ in range(rounds):
        ORDER.shuffle(rows)
        taken = side_by_side([work for _, (_, work) in rows], 1)
        for (name, (messages, _)), (row_s,) in zip(rows, taken, strict=True):
            seconds[name].append(row_s / messages)
        for peer in peers:
            peer.purge()
    return seconds


def main() -> None:
    """Measure, print the rates and the goals."""
    rounds = 5 if "--quick" in sys.argv else 11
    report = Report("client")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        serve = "from twinbus.cli import main; main()"
        command = [sys.executable, "-c", serve, "serve", folder / "ns", "--port", "0"]
        connection = stack.enter_context(started(command))
        bare_command = [sys.executable, FOLDER / "bare_socket.py", folder / "bare"]
        port = int(stack.enter_context(started(bare_command)))
        twinbus, disk = Twinbus(connection), Disk(folder / "disk")
        stack.callback(twinbus.close)
        stack.callback(disk.close)
        peers = start_peers(stack, folder)
        works: Works = {"disk, fdatasync of 1 KB": (SINGLES, partial(disk.flush, SINGLES))}
        works |= bare_rows(stack, port) | twinbus.rows()
        for peer in peers:
            works |= peer_rows(peer)
        works |= crowd_rows(stack, "bare socket server", BareSender, port)
        works |= crowd_rows(stack, "Twinbus", TwinbusSender, connection)
        for peer in peers:
            if isinstance(peer, RabbitMQ):
                works |= crowd_rows(stack, peer.name, RabbitSender, peer.port)
        measure(works, peers, 1)  # warms up
        twinbus.latencies.clear()
        disk.latencies.clear()
        times = measure(works, peers, rounds)
    print(f"{'durable sends of 1 KB, batches of 1000':<64} {'messages/s':>12}")
    for name, per_message in times.items():
        print(f"{name:<64} {1 / statistics.median(per_message):>12,.0f}")
    print(f"\n{'latency in microseconds':<52} {'p50':>12} {'p99':>12}")
    show_latency("disk, fdatasync of 1 KB", disk.latencies)
    show_latency("Twinbus, one by one", twinbus.latencies)
    judge(report, times)
    report.finish()


def show_latency(name: str, seconds: Sequence[float]) -> None:
    """Print the median and the 99th percentile."""
    cuts = statistics.quantiles(seconds, n=100)
    print(f"{name:<52} {cuts[49] * 1e6:>12,.0f} {cuts[98] * 1e6:>12,.0f}")


def judge(report: Report, times: dict[str, list[float]]) -> None:
    """Compare rows with their goals."""
    disk, bare = times["disk, fdatasync of 1 KB"], "bare socket server"
    crowds = ("16 connections in 16 threads", "16 connections in 4 processes")

    def compare(row: str, second: str, goal: float) -> None:
        figure = ratio(times[f"{second}, {row}"], times[f"Twinbus, {row}"])
        report.add(f"{row}, times {second}", figure, goal)

    compare("one by one", bare, 0.4)
    compare("batches", bare, 0.5)
    for crowd in crowds:
        figure = ratio(disk, times[f"Twinbus, {crowd}"])
        report.add(f"{crowd}, times the disk's flushes", figure, 3)
    once = "Twinbus, one by one"
    plain = times["Twinbus without the hook, one by one"]
    report.add(
        "one by one, times without the hook of traces",
        ratio(times[once], plain),
        1.05,
        at_most=True,
    )
    traced = times[f"{once}, traced"]
    report.add(
        "one by one and traced, times untraced", ratio(traced, times[once]), 1.5, at_most=True
    )
    for row in RICH:
        figure = ratio(times[f"Twinbus, {row}"], times[once])
        report.add(f"{row}, times a body alone", figure, MOST_FOR_RICH, at_most=True)
    rabbits = {name.partition(",")[0] for name in times if name.startswith("RabbitMQ")}
    for rabbit in rabbits:
        compare("one by one", rabbit, 1)
        compare("pipelined", rabbit, 4.0)
        compare("batches", rabbit, 5)
        for crowd in crowds:
            compare(crowd, rabbit, 2)


if __name__ == "__main__":
    main()
