"""The broker against the disk: durable sends, receives, group commit, memory, start, depth.

make bench NAME=broker [QUICK=1]
"""

import argparse
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pyarrow as pa
import xxhash
from measure import Report, ratio, side_by_side

from twinbus.broker.turn.engine import EngineSettings
from twinbus.client.factory import MessagingFactory
from twinbus.entities import QueueDescription
from twinbus.ledger import NO_LEDGER, LedgerSettings
from twinbus.limits import LEDGER_FILE_ROWS
from twinbus.message import BrokeredMessage, to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    Receive,
    Send,
    SendReceipt,
    Settle,
)

BATCH = 1000
BODY = 1024
QUEUE = "orders"


def make_batch() -> pa.RecordBatch:
    """Return 1000 messages of 1 KB."""
    return to_batch([BrokeredMessage(os.urandom(BODY)) for _ in range(BATCH)])


def open_queue(folder: Path, ledger: LedgerSettings | None = None) -> EmbeddedNamespace:
    """Return a namespace with one large queue."""
    settings = EngineSettings(directory=folder, ledger=ledger or LedgerSettings())
    namespace = EmbeddedNamespace(settings)
    namespace.ask(CreateEntity(QueueDescription(path=QUEUE, max_size_in_megabytes=81_920)))
    return namespace


def drain(namespace: EmbeddedNamespace, count: int) -> None:
    """Receive and complete that many messages in batches."""
    done = 0
    while done < count:
        batch = namespace.ask(Receive(QUEUE, BATCH))
        namespace.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE))
        done += batch.num_rows


class SqliteQueue:
    """The table anyone would begin with."""

    def __init__(self, folder: Path, batch: pa.RecordBatch) -> None:
        self._database = sqlite3.connect(folder / "queue.db")
        self._database.execute("pragma journal_mode=wal")
        self._database.execute("pragma synchronous=full")
        self._database.execute(
            "create table message (number integer primary key, id text, state int, body blob)"
        )
        ids, bodies = batch.column("message_id").to_pylist(), batch.column("body").to_pylist()
        self._rows = list(zip(ids, bodies, strict=True))

    def send(self) -> None:
        """Commit one batch."""
        with self._database:
            self._database.executemany(
                "insert into message (id, state, body) values (?, 0, ?)", self._rows
            )


def bench_batches(folder: Path, rounds: int, report: Report) -> None:
    """Batches of 1000 against raw append+fdatasync of the same bytes, and against SQLite."""
    batch = make_batch()
    content = batch.serialize()
    raw = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    namespace, sqlite = open_queue(folder / "batches"), SqliteQueue(folder, batch)
    per_round = 20

    def append_raw() -> None:
        for _ in range(per_round):
            os.write(raw, content)
            os.fdatasync(raw)

    def send() -> None:
        for _ in range(per_round):
            namespace.ask(Send(QUEUE, batch))

    def send_sqlite() -> None:
        for _ in range(per_round // 4):
            sqlite.send()

    def receive() -> None:
        drain(namespace, per_round * BATCH)

    works = [append_raw, send, send_sqlite, receive]
    side_by_side(works, 1)
    raw_s, send_s, sqlite_s, receive_s = side_by_side(works, rounds)
    namespace.close()
    os.close(raw)
    sqlite_s = [seconds * 4 for seconds in sqlite_s]
    rate = per_round * BATCH
    for name, seconds in (
        ("raw append+fdatasync", raw_s),
        ("durable batch send", send_s),
        ("SQLite WAL/FULL", sqlite_s),
        ("batch receive+complete", receive_s),
    ):
        print(f"{name:<40} {rate / statistics.median(seconds):>12,.0f} messages/s")
    report.add("batch send / raw append+fdatasync of the same bytes", ratio(raw_s, send_s), 0.5)
    report.add("batch send / SQLite WAL, synchronous=FULL", ratio(sqlite_s, send_s), 5)
    print(f"{'batch receive+complete / batch send':<40} {ratio(send_s, receive_s):>12.2f}")


def send_in_flight(namespace: EmbeddedNamespace, body: bytes, count: int) -> None:
    """Send single messages from one thread with 256 in flight."""
    flying: deque[Future[SendReceipt]] = deque()
    for _ in range(count):
        flying.append(namespace.submit(Send(QUEUE, (BrokeredMessage(body),))))
        if len(flying) == 256:
            flying.popleft().result()
    for future in flying:
        future.result()


class Singles:
    """Works on single messages, and the syncs of the disk that they are measured by."""

    threads = 16
    per_thread = 250
    syncs = 1000

    def __init__(self, folder: Path) -> None:
        self._namespace = open_queue(folder / "singles")
        self._factory = MessagingFactory(self._namespace)
        self._sender = self._factory.create_message_sender(QUEUE)
        self._receiver = self._factory.create_message_receiver(QUEUE)
        self._descriptor = os.open(folder / "syncs", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._body = os.urandom(BODY)

    def sync(self) -> None:
        """Write and flush what a message holds."""
        for _ in range(self.syncs):
            os.write(self._descriptor, self._body)
            os.fdatasync(self._descriptor)

    def send(self) -> None:
        """Send one by one."""
        for _ in range(self.syncs):
            self._sender.send(BrokeredMessage(self._body))

    def receive(self) -> None:
        """Receive and complete one by one."""
        for _ in range(self.syncs):
            message = self._receiver.receive()
            assert message is not None
            message.complete()

    def _send_some(self) -> None:
        for _ in range(self.per_thread):
            self._namespace.ask(Send(QUEUE, (BrokeredMessage(self._body),)))

    def send_from_threads(self) -> None:
        """Send one by one, from 16 threads at once."""
        senders = [threading.Thread(target=self._send_some) for _ in range(self.threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    def send_in_flight(self) -> None:
        """Send from one thread with 256 in flight."""
        send_in_flight(self._namespace, self._body, self.threads * self.per_thread)

    def close(self) -> None:
        """Let go of the files."""
        self._factory.close()
        os.close(self._descriptor)


def bench_singles(folder: Path, rounds: int, report: Report) -> None:
    """Single messages against the syncs the disk does in a second: 1 thread, 16, 256 in flight."""
    singles = Singles(folder)
    many = singles.threads * singles.per_thread
    works = {
        "fdatasync of 1 KB": (singles.sync, singles.syncs),
        "single sends, one by one": (singles.send, singles.syncs),
        "single receives and completes": (singles.receive, singles.syncs),
        "single sends, 16 threads": (singles.send_from_threads, many),
        "single sends, 1 thread, 256 in flight": (singles.send_in_flight, many),
    }
    side_by_side([work for work, _ in works.values()], 1)
    taken = side_by_side([work for work, _ in works.values()], rounds)
    singles.close()
    rates = [
        [count / seconds for seconds in part]
        for part, (_, count) in zip(taken, works.values(), strict=True)
    ]
    for name, part in zip(works, rates, strict=True):
        print(f"{name:<40} {statistics.median(part):>12,.0f} a second")
    syncs, single, _, from_threads, flown = rates
    report.add("single sends, one by one / fsyncs of the disk", ratio(single, syncs), 0.5)
    report.add("16 threads of single sends / fsyncs of the disk", ratio(from_threads, syncs), 3)
    report.add("256 in flight / fsyncs of the disk", ratio(flown, syncs), 3)


def bench_ledger(folder: Path, rounds: int, report: Report) -> None:
    """Measure what keeping the ledgers costs: with them and without, side by side."""
    batch, body = make_batch(), os.urandom(BODY)
    metered = open_queue(folder / "metered", LedgerSettings(messages=False))
    followed = open_queue(folder / "followed")
    bare = open_queue(folder / "bare", NO_LEDGER)

    def batches(namespace: EmbeddedNamespace) -> None:
        for _ in range(60):
            namespace.ask(Send(QUEUE, batch))
            drain(namespace, BATCH)

    def singles(namespace: EmbeddedNamespace) -> None:
        send_in_flight(namespace, body, 4000)
        drain(namespace, 4000)

    for name, work in (("batches", batches), ("single sends", singles)):
        works = [partial(work, item) for item in (bare, metered, followed)]
        side_by_side(works, 3)
        bare_s, metered_s, followed_s = side_by_side(works, 2 * rounds)
        report.add(f"{name}, operations metered / no ledger", ratio(bare_s, metered_s), 0.98)
        followed_ratio = ratio(bare_s, followed_s)
        report.add(f"{name}, messages followed, too / no ledger", followed_ratio, 0.98)
    for namespace in (metered, followed, bare):
        namespace.close()


def resident_bytes() -> int:
    """Return the private memory of this process: mapped files are the page cache's, not ours."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell RssAnon")


def measure_memory(folder: Path, waiting: int) -> float:
    """Fill a queue in a fresh process; return its private bytes per waiting message.

    What every broker needs once, such as the first write of the ledger, is not counted.
    """
    batch = make_batch()
    with open_queue(folder) as namespace:
        for _ in range(2 * LEDGER_FILE_ROWS // BATCH):
            namespace.ask(Send(QUEUE, batch))
            drain(namespace, BATCH)
        before = resident_bytes()
        for _ in range(waiting // BATCH):
            namespace.ask(Send(QUEUE, batch))
        return (resident_bytes() - before) / waiting


def bench_memory(folder: Path, waiting: int, report: Report) -> None:
    """Memory per waiting message, beyond the empty broker."""
    command = [sys.executable, __file__, "--measure-memory", str(waiting), "--folder", str(folder)]
    reported = subprocess.run(command, check=True, capture_output=True, text=True)
    found = float(reported.stdout)
    print(f"{'memory per waiting message':<40} {found:>12.1f} bytes")
    report.add(f"bytes of memory per message at {waiting:,} waiting", found, 64, at_most=True)


def bench_depth(folder: Path, waiting: int, rounds: int, report: Report) -> None:
    """Per-message cost at 10,000 waiting and at many."""
    batch = make_batch()
    shallow, deep = open_queue(folder / "shallow"), open_queue(folder / "deep")
    for _ in range(10):
        shallow.ask(Send(QUEUE, batch))
    per_round = 60  # about one segment, so that every round begins one

    def cycle(namespace: EmbeddedNamespace) -> None:
        for _ in range(per_round):
            namespace.ask(Send(QUEUE, batch))
            drain(namespace, BATCH)

    for _ in range(waiting // BATCH):
        deep.ask(Send(QUEUE, batch))
    works = [lambda: cycle(shallow), lambda: cycle(deep)]
    side_by_side(works, 3)  # until both write over files of dropped segments
    shallow_s, deep_s = side_by_side(works, rounds)
    shallow.close()
    deep.close()
    report.add(
        f"cost per message at {waiting:,} waiting / at 10,000",
        ratio(deep_s, shallow_s),
        1.5,
        at_most=True,
    )


def bench_start(folder: Path, rounds: int, report: Report) -> None:
    """Start on the deep log against reading it with checksums."""

    def read() -> None:
        for path in sorted((folder / "deep" / "log").glob("*.log")):
            xxhash.xxh3_64_intdigest(path.read_bytes())

    def start() -> None:
        EmbeddedNamespace(folder / "deep").close()

    side_by_side([read, start], 1)
    read_s, start_s = side_by_side([read, start], rounds)
    print(f"{'read with checksums':<40} {statistics.median(read_s):>12.2f} s")
    print(f"{'start':<40} {statistics.median(start_s):>12.2f} s")
    report.add("start / reading the log with checksums", ratio(start_s, read_s), 3, at_most=True)


def main() -> None:
    """Run everything in a folder that is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--measure-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        print(measure_memory(options.folder / "memory", options.measure_memory))
        return
    rounds = 7 if options.quick else 15
    report = Report("broker")
    folder = Path(tempfile.mkdtemp(prefix="twinbus-bench-", dir=options.folder))
    try:
        bench_batches(folder, rounds, report)
        bench_singles(folder, rounds, report)
        bench_ledger(folder, rounds, report)
        bench_memory(folder, 1_000_000, report)
        bench_depth(folder, 1_000_000, rounds, report)
        bench_start(folder, rounds, report)
    finally:
        shutil.rmtree(folder)
    report.finish()


if __name__ == "__main__":
    main()
