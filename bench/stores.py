"""Why a columnar log: the same durable batches kept by the log, SQLite and RocksDB.

    make bench NAME=stores [QUICK=1]

Each keeps batches of 1000 messages of 1 KB and syncs before it goes on. Then each reads all of them
back, as a broker does when it starts or a pipeline when it drains.
"""

import argparse
import os
import shutil
import sqlite3
import statistics
import tempfile
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import rocksdict
from measure import Report, ratio, side_by_side

from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import Part, PartKind
from twinbus.message import BrokeredMessage, to_batch

BATCH = 1000


class Store(Protocol):
    """Keeps batches of messages."""

    def append(self) -> None:
        """Make one more batch durable."""
        ...

    def read(self) -> int:
        """Read everything back; return how many bytes of bodies there are."""
        ...


class LogStore:
    """The columnar log."""

    def __init__(self, folder: Path, batch: pa.RecordBatch) -> None:
        self._folder, self._batch, self._number = folder, batch, 0
        self._log = Log(folder)
        list(self._log.replay())

    def append(self) -> None:
        """Make one more batch durable."""
        self._number += 1
        self._log.append([Part(PartKind.MESSAGES, self._batch, self._number)])

    def read(self) -> int:
        """Read everything back."""
        self._log.close()
        self._log = Log(self._folder)
        parts = [part for record in self._log.replay() for part, _ in record.parts]
        return sum(part.columns.column("body").nbytes for part in parts)


class SqliteStore:
    """A table, WAL, synchronous=FULL."""

    def __init__(self, folder: Path, batch: pa.RecordBatch) -> None:
        folder.mkdir()
        self._database = sqlite3.connect(folder / "queue.db")
        self._database.execute("pragma journal_mode=wal")
        self._database.execute("pragma synchronous=full")
        self._database.execute("create table message (number integer primary key, id, body)")
        ids, bodies = batch.column("message_id").to_pylist(), batch.column("body").to_pylist()
        self._rows = list(zip(ids, bodies, strict=True))

    def append(self) -> None:
        """Make one more batch durable."""
        with self._database:
            self._database.executemany("insert into message (id, body) values (?, ?)", self._rows)

    def read(self) -> int:
        """Read everything back."""
        rows = self._database.execute("select number, id, body from message order by number")
        return sum(len(body) for _, _, body in rows)


class RocksStore:
    """A key per message, one synced write batch per batch."""

    def __init__(self, folder: Path, batch: pa.RecordBatch) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        self._database = rocksdict.Rdict(str(folder), options)
        self._write = rocksdict.WriteOptions()
        self._write.sync = True
        self._bodies = batch.column("body").to_pylist()
        self._number = 0

    def append(self) -> None:
        """Make one more batch durable."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for body in self._bodies:
            self._number += 1
            batch.put(self._number.to_bytes(8, "big"), body)
        self._database.write(batch, self._write)

    def read(self) -> int:
        """Read everything back."""
        return sum(len(body) for body in self._database.values())


def main() -> None:
    """Run everything in a folder that is removed at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    options = parser.parse_args()
    rounds, per_round = (5, 10) if options.quick else (15, 20)
    batch = to_batch([BrokeredMessage(os.urandom(1024)) for _ in range(BATCH)])
    folder = Path(tempfile.mkdtemp(prefix="twinbus-bench-"))
    report = Report("stores")
    try:
        stores: list[Store] = [
            LogStore(folder / "log", batch),
            SqliteStore(folder / "sqlite", batch),
            RocksStore(folder / "rocks", batch),
        ]

        def appends(store: Store) -> None:
            for _ in range(per_round):
                store.append()

        works = [lambda store=store: appends(store) for store in stores]
        side_by_side(works, 1)
        log_s, sqlite_s, rocks_s = side_by_side(works, rounds)
        reads = side_by_side([store.read for store in stores], 3)
    finally:
        shutil.rmtree(folder)
    kept = (rounds + 1) * per_round * BATCH
    for name, append_s, read_s in zip(
        ("columnar log", "SQLite", "RocksDB"), (log_s, sqlite_s, rocks_s), reads, strict=True
    ):
        append = per_round * BATCH / statistics.median(append_s)
        read = kept / statistics.median(read_s)
        print(f"{name:<14} append {append:>12,.0f} messages/s   read {read:>12,.0f} messages/s")
    report.add("durable batches: columnar log / SQLite", ratio(sqlite_s, log_s), 5)
    report.add("durable batches: columnar log / RocksDB", ratio(rocks_s, log_s), 1.5)
    report.add("reading back: columnar log / SQLite", ratio(reads[1], reads[0]), 2)
    report.add("reading back: columnar log / RocksDB", ratio(reads[2], reads[0]), 2)
    report.finish()


if __name__ == "__main__":
    main()
