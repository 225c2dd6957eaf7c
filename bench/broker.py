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
from twinbus.entities import QueueDescription
from twinbus.ledger import NO_LEDGER, LedgerSettings
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


def bench_group_commit(folder: Path, rounds: int, report: Report) -> None:
    """16 threads sending single messages against the syncs the disk does in a second."""
    namespace = open_queue(folder / "singles")
    descriptor = os.open(folder / "syncs", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    per_thread, syncs, threads = 250, 1000, 16
    body = os.urandom(BODY)

    def sync() -> None:
        for _ in range(syncs):
            os.write(descriptor, body)
            os.fdatasync(descriptor)

    def send_some() -> None:
        for _ in range(per_thread):
            namespace.ask(Send(QUEUE, (BrokeredMessage(body),)))

    def send() -> None:
        senders = [threading.Thread(target=send_some) for _ in range(threads)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    works = [sync, send, lambda: send_in_flight(namespace, body, threads * per_thread)]
    side_by_side(works, 1)
    sync_s, send_s, pipeline_s = side_by_side(works, rounds)
    namespace.close()
    os.close(descriptor)
    sync_rates = [syncs / seconds for seconds in sync_s]
    send_rates = [threads * per_thread / seconds for seconds in send_s]
    print(f"{'fdatasync of 1 KB':<40} {statistics.median(sync_rates):>12,.0f} a second")
    print(f"{'single sends, 16 threads':<40} {statistics.median(send_rates):>12,.0f} messages/s")
    flown = threads * per_thread / statistics.median(pipeline_s)
    print(f"{'single sends, 1 thread, 256 in flight':<40} {flown:>12,.0f} messages/s")
    report.add("16 threads of single sends / fsyncs of the disk", ratio(send_rates, sync_rates), 3)


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
        works = [partial(work, one) for one in (bare, metered, followed)]
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
    """Fill a queue in a fresh process; return its private bytes per waiting message."""
    batch = make_batch()
    with open_queue(folder) as namespace:
        namespace.ask(Send(QUEUE, batch))
        drain(namespace, BATCH)
        before = resident_bytes()
        for _ in range(waiting // BATCH):
            namespace.ask(Send(QUEUE, batch))
        return (resident_bytes() - before) / waiting


def bench_memory(folder: Path, waiting: int, report: Report) -> None:
    """Memory per waiting message, beyond the empty broker."""
    command = [sys.executable, __file__, "--measure-memory", str(waiting), "--folder", str(folder)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    held = float(told.stdout)
    print(f"{'memory per waiting message':<40} {held:>12.1f} bytes")
    report.add(f"bytes of memory per message at {waiting:,} waiting", held, 64, at_most=True)


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
        bench_group_commit(folder, rounds, report)
        bench_ledger(folder, rounds, report)
        bench_memory(folder, 1_000_000, report)
        bench_depth(folder, 1_000_000, rounds, report)
        bench_start(folder, rounds, report)
    finally:
        shutil.rmtree(folder)
    report.finish()


if __name__ == "__main__":
    main()
