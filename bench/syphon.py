"""How fast the syphon brings a backlog home, against RabbitMQ Shovel and sourced NATS streams.

python bench/syphon.py [--quick]

Bodies have 1 KB, the backlog has 10 queues, all is synced before it is acknowledged (NATS says in
its name when it does not), everybody has this machine to himself in turn. Spark runs in local mode,
in a process of its own that serves both namespaces: it warms up with a small backlog, stops the
query, fills the backlog, and starts the query again. The rate counts from the first lease until the
syphon tells that the last message is home and settled. Starting Spark is told apart. `others` is
the part of the machine that others had meanwhile: rows that differ in it do not compare.

The syphon also drains a secondary at sb://, which has no ranges to lease: its workers receive under
lock through the official SDK, from a Twinbus server that speaks the Service Bus dialect. The server
flushes every settlement.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import Others, Report, processes
from movers import Mover, Shovel, Sources
from pairing import make_queues, server
from service_bus import service_bus

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
from twinbus.entities import backlog_queue_path
from twinbus.limits import CARRIED_BYTES
from twinbus.message import to_batch
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue, find_backlog_queues
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import sender_source
from twinbus.spark.session import start_session
from twinbus.syphon.desk import SyphonProgress
from twinbus.syphon.syphon import Syphon, SyphonSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BODY_BYTES = 1024
BATCH = 1000
BACKLOG_QUEUES = 10
PRIMARY = "primary"
CORES = os.cpu_count() or 2
WARM_UP = (10_000, 50_000)  # messages: a batch to start workers, a larger one for Java's compiler
MESSAGES, QUICK_MESSAGES = 500_000, 100_000
QUICK_SHOVEL_MESSAGES = 20_000
ROUNDS = 3  # of ours, whose median counts; a larger backlog is drained once
BACKLOGS = (100_000, MESSAGES, 2_000_000)
PARTITIONS, PARTITION_MESSAGES = (1, 2, 4), 200_000  # in flight
PICK_UPS, PICK_UP_GOAL_S = 5, 2.0  # of a message put into an idle backlog
RANGES, ROWS = "ranges", "rows"  # ways to carry messages: what Spark's rows hold
LOCKS = "locks"  # under lock, from a secondary at sb://
LOCKED_MESSAGES = 50_000
LOOK_S = 0.02
PLANNING_S = 0.1  # at most, from the first lease of a batch until its plan is told
PATIENCE_S = 600.0
NEAR = 0.5  # of the rate of NATS


# -- what a drain came to --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drain:
    """A backlog that was brought home."""

    messages: int
    partitions: int  # in flight
    seconds: float  # from the first lease to the last message settled
    starting_s: float  # from the query's start to its first lease, Spark being there
    batches: int
    batch_s: float  # as Spark tells it
    carrying_s: float  # of that, while tasks run: `addBatch`
    reading_s: float  # that workers waited for the secondary, all of them
    sending_s: float  # and for the primary
    cpu_s: dict[str, float]  # by process
    others: float  # part of the machine that others had meanwhile

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds


# -- processor time, as Linux tells it -------------------------------------------------------------


def processor_seconds(servers: dict[str, int]) -> dict[str, float]:
    """Return the seconds of the servers, of Spark's Java, and of the Pythons that it started."""
    table = processes()
    names = {pid: name for name, pid in servers.items()}

    def kind(pid: int) -> str | None:
        parent, name, _, _ = table[pid]
        if pid in names:
            return names[pid]
        if parent == os.getpid():
            return "Spark's Java" if name == "java" else None
        return "Spark's Python" if parent in table and kind(parent) else None

    seconds: defaultdict[str, float] = defaultdict(float)
    for pid, (_, _, own, dead) in table.items():
        whose = kind(pid)
        if whose is not None:
            seconds[whose] += own
            seconds["Spark's Python" if whose.startswith("Spark") else whose] += dead
    return seconds


# -- ours ------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path, name: str, *options: str) -> Iterator[tuple[str, int]]:
    """Serve a namespace; give its connection string and its process."""
    command = [*map(str, server(folder, name)), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class TwinbusPair:
    """Two servers, a session of Spark, and backlogs to bring home."""

    def __init__(self, stack: ExitStack, folder: Path, partitions: int, way: str) -> None:
        self._partitions = partitions
        self._way = way
        self._primary, primary_process = stack.enter_context(served(folder, PRIMARY))
        certificate = folder / "certificate"  # the SDK's administration client needs TLS
        options = ("--tls", str(certificate)) if way == LOCKS else ()
        secondary, secondary_process = stack.enter_context(served(folder, "secondary", *options))
        self._secondary = secondary
        if way == LOCKS:
            ca_file = certificate / "ca.pem"
            self._secondary = f"{service_bus(secondary, 'secondary')};CaFile={ca_file}"
        self._servers = {"primary": primary_process, "secondary": secondary_process}
        manager, factory = NamespaceManager, MessagingFactory
        self._home = stack.enter_context(manager.from_connection_string(self._primary))
        self._away = stack.enter_context(manager.from_connection_string(secondary))
        self._sender = stack.enter_context(factory.from_connection_string(secondary))
        for index in range(BACKLOG_QUEUES):
            self._away.create_queue(describe_backlog_queue(PrimaryIdentity(PRIMARY), index))
        found = find_backlog_queues(self._away, PrimaryIdentity(PRIMARY), BACKLOG_QUEUES)
        self._queues = tuple(found.paths.values())
        began = time.monotonic()
        self._session: SparkSession = start_session(folder, f"local[{partitions},4]")
        stack.callback(self._session.stop)
        self.session_s = time.monotonic() - began
        self._drained = 0

    def warm_up(self) -> float:
        """Bring small backlogs home; return how long a cold Spark takes for the first."""
        first, *remaining = WARM_UP
        self._fill(first)
        began = time.monotonic()
        with self._start() as syphon:
            _await_moved(syphon, first)
            cold_s = time.monotonic() - began
            for count in remaining:
                before = syphon.progress.moved
                self._fill(count)
                _await_moved(syphon, before + count)
        return cold_s

    def _fill(self, messages: int) -> str:
        """Divert messages to the backlog; return their destination, which is new."""
        self._drained += 1
        orders = f"orders-{self._drained}"
        make_queues(self._primary, orders)
        bodies = [BrokeredMessage(os.urandom(BODY_BYTES)) for _ in range(BATCH)]
        batch = to_batch(bodies)
        for first in range(0, messages, BATCH):
            path = backlog_queue_path(PRIMARY, first // BATCH % BACKLOG_QUEUES)
            part = batch.slice(0, messages - first)
            numbers = range(first, first + part.num_rows)
            # The pairing numbers every message that it diverts to a secondary without ranges.
            origin = Origin(sender_source(self._drained), numbers) if self._way == LOCKS else None
            self._sender.courier.namespace.ask(Send(path, diverted(part, orders, origin)))
        return orders

    def _start(self) -> Syphon:
        return Syphon(
            SyphonSettings(
                primary=self._primary,
                secondary=self._secondary,
                queues=self._queues,
                transform=_as_they_are if self._way == ROWS else None,
            )
        )

    def pick_up(self) -> float:
        """Return how long a message takes home out of an idle backlog: the longest of some."""
        took_s = []
        with self._start() as syphon:
            syphon.wait_until_running()
            for _ in range(PICK_UPS):
                time.sleep(1)  # it is idle
                began = time.monotonic()
                orders = self._fill(1)
                while not self._home.get_runtime_properties(orders).active_message_count:
                    time.sleep(LOOK_S)
                took_s.append(time.monotonic() - began)
        return max(took_s)

    def drain(self, messages: int) -> Drain:
        """Bring a backlog home."""
        orders = self._fill(messages)
        started_at = time.time()
        with self._start() as syphon:
            while not (progress := syphon.progress).batches:
                syphon.wait(LOOK_S)
            began_at = progress.at - PLANNING_S
            before, background = processor_seconds(self._servers), Others()
            progress = _await_moved(syphon, messages)
            settled_at = time.time()
            after, taken = processor_seconds(self._servers), background.share()
            (query,) = self._session.streams.active
            times = [
                reported.durationMs for reported in query.recentProgress if reported.numInputRows
            ]
        self._check(orders, messages)
        return Drain(
            messages,
            self._partitions,
            seconds=settled_at - began_at,
            starting_s=began_at - started_at,
            batches=len(times),
            batch_s=sum(spans["triggerExecution"] for spans in times) / 1000,
            carrying_s=sum(spans["addBatch"] for spans in times) / 1000,
            reading_s=progress.reading_s,
            sending_s=progress.sending_s,
            cpu_s={name: after[name] - before[name] for name in before},
            others=taken,
        )

    def _check(self, orders: str, messages: int) -> None:
        """Make sure that each message is home once, and none is left."""
        home = self._home.get_runtime_properties(orders)
        assert home.active_message_count == messages, home
        for queue in self._queues:
            left = self._away.get_runtime_properties(queue)
            assert not left.active_message_count, left
            assert not left.dead_letter_message_count, left


def _as_they_are(messages: "DataFrame") -> "DataFrame":
    return messages


def _await_moved(syphon: Syphon, messages: int) -> SyphonProgress:
    """Wait until a syphon has told that messages are home and settled."""
    deadline = time.monotonic() + PATIENCE_S
    while (progress := syphon.progress).moved < messages:
        assert time.monotonic() < deadline, progress
        syphon.wait(LOOK_S)  # raises when it failed
    return progress


# -- each session of Spark in a process of its own -------------------------------------------------


def drain_here(way: str, partitions: int, backlogs: Sequence[int]) -> None:
    """Bring backlogs home and print what came of each, as JSON."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        twinbus = TwinbusPair(stack, folder, partitions, way)
        print(json.dumps([twinbus.session_s, twinbus.warm_up(), twinbus.pick_up()]), flush=True)
        for messages in backlogs:
            print(json.dumps(asdict(twinbus.drain(messages))), flush=True)


def drains(
    partitions: int, backlogs: Sequence[int], way: str = RANGES
) -> tuple[list[float], dict[int, Drain]]:
    """Bring backlogs home in another process, each some times unless it is large.

    Returns what starting and picking up took, and the median drain of each backlog.
    """
    sizes = [size for size in backlogs for _ in range(ROUNDS if size <= MESSAGES else 1)]
    command = [sys.executable, __file__, "--drain", way, str(partitions), *map(str, sizes)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    start, *lines = (json.loads(line) for line in process.stdout.splitlines())
    found: defaultdict[int, list[Drain]] = defaultdict(list)
    for values in lines:
        found[values["messages"]].append(Drain(**values))
    medians = {
        messages: sorted(same, key=lambda drain: drain.seconds)[len(same) // 2]
        for messages, same in found.items()
    }
    return start, medians


# -- what is printed -------------------------------------------------------------------------------


def disk_seconds(messages: int) -> float:
    """Return how long the disk takes for the same bytes alone, with a sync for each send."""
    piece = os.urandom(CARRIED_BYTES)
    with tempfile.TemporaryFile(dir=".", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(-(-messages * BODY_BYTES // len(piece))):
            file.write(piece)
            os.fdatasync(file.fileno())
        return time.perf_counter() - began


def show_shares(drain: Drain, disk_s: float) -> None:
    """Print where the time went.

    Waits are those of all workers divided by how many run at once; what is left of the tasks is
    not measured but what remains. No server tells its seconds in the disk, so that is tried apart.
    """
    waited_s = (drain.reading_s + drain.sending_s) / drain.partitions
    total_s = drain.batch_s
    print(f"\nwhere {total_s:.2f} s of {drain.batches} batch(es) went")
    for name, seconds in (
        ("Spark around its tasks: plans, offsets, its log", total_s - drain.carrying_s),
        ("the rest of the tasks: Spark's and our work", drain.carrying_s - waited_s),
        ("waiting for the secondary", drain.reading_s / drain.partitions),
        ("waiting for the primary", drain.sending_s / drain.partitions),
    ):
        print(f"  {name:<56} {seconds:>8.2f} s {seconds / total_s:>8.0%}")
    print(f"apart, not in that sum: the disk takes {disk_s:.2f} s to write and sync those bytes")
    print(f"processor time, of {CORES} cores for {drain.seconds:.2f} s")
    for name, seconds in sorted(drain.cpu_s.items()):
        share = seconds / (CORES * drain.seconds)
        print(f"  {name:<56} {seconds:>8.2f} s {share:>8.0%}")


def show_growth(title: str, rows: Sequence[tuple[int, Drain]]) -> None:
    """Print how the rate grows."""
    names = f"{'messages':>12} {'seconds':>10} {'messages/s':>12} {'times':>8} {'others':>8}"
    print(f"\n{title:>20} {names}")
    for value, drain in rows:
        times = drain.rate / rows[0][1].rate
        print(
            f"{value:>20,} {drain.messages:>12,} {drain.seconds:>10.2f} {drain.rate:>12,.0f} "
            f"{times:>8.2f} {drain.others:>8.0%}"
        )


def measure_peers(works: Sequence[tuple[Mover, int]]) -> list[float | None]:
    """Measure the peers that are installed; say how to install the others."""
    rates: list[float | None] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for mover, messages in works:
            missing = mover.missing()
            if missing:
                print(f"{mover.name} is left out: {missing}")
                rates.append(None)
                continue
            moved = mover(messages, os.urandom(BODY_BYTES), Path(folder).resolve())
            rates.append(moved.rate)
            print(
                f"{f'{mover.name}, of {messages:,}':<64} {moved.rate:>12,.0f} {moved.others:>8.0%}",
                flush=True,
            )
    return rates


def main() -> None:
    """Measure, print the rates and the goals."""
    if "--drain" in sys.argv:
        partitions, *backlogs = map(int, sys.argv[3:])
        drain_here(sys.argv[2], partitions, backlogs)
        return
    quick = "--quick" in sys.argv
    messages = QUICK_MESSAGES if quick else MESSAGES
    report = Report("syphon")
    # The others come when Spark is warm, so that it is not the growth of that which is seen.
    wanted = [messages, *(() if quick else BACKLOGS)]
    (session_s, cold_s, pick_up_s), drained = drains(CORES, list(dict.fromkeys(wanted)))
    twinbus = drained[messages]
    print(f"{'messages of 1 KB home, out of 10 queues':<64} {'messages/s':>12} {'others':>8}")
    name = f"Twinbus syphon, Spark on {CORES} cores, of {messages:,}"
    print(f"{name:<64} {twinbus.rate:>12,.0f} {twinbus.others:>8.0%}", flush=True)
    rows = drains(CORES, [messages], ROWS)[1][messages]
    name = f"the same with messages in Spark's rows, of {messages:,}"
    print(f"{name:<64} {rows.rate:>12,.0f} {rows.others:>8.0%}", flush=True)
    locked = drains(CORES, [LOCKED_MESSAGES], LOCKS)[1][LOCKED_MESSAGES]
    name = f"the same from a secondary at sb://, of {LOCKED_MESSAGES:,}"
    print(f"{name:<64} {locked.rate:>12,.0f} {locked.others:>8.0%}", flush=True)
    shovelled = QUICK_SHOVEL_MESSAGES if quick else messages
    shovel, sources = measure_peers([(Shovel(), shovelled), (Sources(), messages)])
    print(
        f"\nnot counted: Spark's start {session_s:.1f} s, its first {WARM_UP[0]:,} messages "
        f"{cold_s:.1f} s, a query's start {twinbus.starting_s:.1f} s"
    )
    show_shares(twinbus, disk_seconds(messages))
    if not quick:
        show_growth("backlog", [(size, drained[size]) for size in BACKLOGS])
        size = PARTITION_MESSAGES
        runs = {count: drains(count, [size])[1][size] for count in PARTITIONS}
        show_growth("partitions in flight", [(count, runs[count]) for count in PARTITIONS])
    title = "a message out of an idle backlog is home, seconds"
    report.add(title, pick_up_s, PICK_UP_GOAL_S, at_most=True)
    if sources is not None:
        part = twinbus.rate / sources
        print(f"\npart of the rate of NATS: {part:.2f} ({'near' if part >= NEAR else 'not near'})")
    if shovel is not None:
        print(f"from a secondary at sb://, part of the rate of Shovel: {locked.rate / shovel:.2f}")
        report.add("messages home, times RabbitMQ Shovel", twinbus.rate / shovel, 5)
    report.finish()


if __name__ == "__main__":
    main()
