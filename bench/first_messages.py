"""What happens between a started session of Spark and the first 10,000 messages at home.

python bench/first_messages.py [--quick]

Each run is a process of its own with a fresh Spark in local mode and two servers. The backlog is
filled before Spark starts. Three ways take turns: the syphon; the syphon with Spark's home as it is
installed (`twinbus.spark.home` says what is different in ours); and a query that has nothing of
Twinbus in it. Its Python data source hands out ten rows and its Python sink drops them, so that
what it takes in an installed home is Spark's own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from measure import Others, processes
from pairing import make_queues
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit
from syphon import BACKLOG_QUEUES, BATCH, BODY_BYTES, PRIMARY, served

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
from twinbus.entities import backlog_queue_path
from twinbus.message import to_batch
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Send
from twinbus.spark.session import local_master, start_session
from twinbus.syphon.syphon import Syphon, SyphonSettings

MESSAGES = 10_000
ROUNDS, QUICK_ROUNDS = 3, 1
LOOK_S = 0.01
SYPHON, PLAIN, BARE = "syphon", "syphon, Spark's home", "Spark alone"
STEPS = ("session", "query started", "first look", "first batch", "all home")


# -- a query without us ----------------------------------------------------------------------------


class TenRows(DataSource):
    """A source of ten rows in ten partitions, and a sink that drops what it gets."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ten_rows"

    def schema(self) -> str:
        """Return the columns."""
        return "queue string, first bigint"

    def streamReader(self, schema: Any) -> "TenRowsReader":
        """Return the source."""
        return TenRowsReader()

    def streamWriter(self, schema: Any, overwrite: bool) -> "DroppingWriter":
        """Return the sink."""
        return DroppingWriter()


class TenRowsReader(DataSourceStreamReader):
    """One batch of ten rows."""

    def initialOffset(self) -> dict[str, int]:
        """Return the offset before the batch."""
        return {"batch": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return the offset after the batch."""
        return {"batch": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Return a partition for each row."""
        return [InputPartition(number) for number in range(BACKLOG_QUEUES)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Hand out a row."""
        yield pa.RecordBatch.from_pydict({"queue": [""], "first": [partition.value]})


class DroppingWriter(DataSourceStreamArrowWriter):
    """Drops rows."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Read all rows."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


def run_bare(session: SparkSession, folder: Path) -> dict[str, float]:
    """Run a query that has nothing of ours in it, and return when each step ended."""
    session.dataSource.register(TenRows)
    writer = session.readStream.format("ten_rows").load().writeStream.format("ten_rows")
    query = writer.option("checkpointLocation", f"file://{folder}/checkpoint").start()
    moments = {"query started": time.monotonic()}
    while not any(reported.numInputRows for reported in query.recentProgress):
        time.sleep(LOOK_S)
    moments["all home"] = time.monotonic()
    query.stop()
    return moments


# -- the syphon ------------------------------------------------------------------------------------


def fill(primary: str, secondary: str) -> tuple[str, ...]:
    """Divert messages to ten backlog queues, and return their paths."""
    make_queues(primary, "orders")
    with ExitStack() as stack:
        manager = stack.enter_context(NamespaceManager.from_connection_string(secondary))
        factory = stack.enter_context(MessagingFactory.from_connection_string(secondary))
        for index in range(BACKLOG_QUEUES):
            manager.create_queue(describe_backlog_queue(PrimaryIdentity(PRIMARY), index))
        messages = [BrokeredMessage(os.urandom(BODY_BYTES)) for _ in range(BATCH)]
        batch = diverted(to_batch(messages), "orders")
        paths = tuple(backlog_queue_path(PRIMARY, index) for index in range(BACKLOG_QUEUES))
        for first in range(0, MESSAGES, BATCH):
            factory.courier.namespace.ask(Send(paths[first // BATCH % BACKLOG_QUEUES], batch))
    return paths


def run_syphon(settings: SyphonSettings) -> dict[str, float]:
    """Bring the backlog home, and return when each step ended."""
    with Syphon(settings) as syphon:
        moments = {"query started": time.monotonic()}
        while (progress := syphon.progress).moved < MESSAGES:
            if progress.at:
                moments.setdefault("first look", time.monotonic())
            if progress.batches:
                moments.setdefault("first batch", time.monotonic())
            syphon.wait(LOOK_S)
        moments["all home"] = time.monotonic()
    return moments


def run_here(way: str) -> None:
    """Make one run, and print what it took as JSON."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        primary, _ = stack.enter_context(served(folder, PRIMARY))
        secondary, _ = stack.enter_context(served(folder, "secondary"))
        queues = fill(primary, secondary)
        if way != SYPHON:
            os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
        background, began = Others(), time.monotonic()
        session = start_session(folder, local_master(2))
        stack.callback(session.stop)
        moments = {"session": time.monotonic()}
        cpu_before = cpu_seconds()
        if way == BARE:
            moments |= run_bare(session, folder)
        else:
            moments |= run_syphon(
                SyphonSettings(primary=primary, secondary=secondary, queues=queues)
            )
        cpu = {name: seconds - cpu_before[name] for name, seconds in cpu_seconds().items()}
        ends = {name: moments[name] - began for name in STEPS if name in moments}
        print(json.dumps({"ends": ends, "cpu": cpu, "others": background.share()}), flush=True)


def cpu_seconds() -> defaultdict[str, float]:
    """Return the processor seconds of Spark's Java and of the Pythons that it started."""
    table = processes()
    java = {pid for pid, row in table.items() if row[0] == os.getpid() and row[1] == "java"}
    pythons: set[int] = set()
    while more := {pid for pid, row in table.items() if row[0] in java | pythons} - pythons:
        pythons |= more
    found: defaultdict[str, float] = defaultdict(float)
    found["Java"] = sum(table[pid][2] for pid in java)
    found["Python"] = sum(table[pid][2] + table[pid][3] for pid in pythons)
    found["Python"] += sum(table[pid][3] for pid in java)
    return found


# -- what is printed -------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Make all runs, in turns."""
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        for way in (SYPHON, PLAIN, BARE):
            command = [sys.executable, __file__, "--here", way]
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(process.stdout.splitlines()[-1]))
    return found


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print the medians, and the seconds of every run."""
    print(f"{'seconds after the start of Spark':<34}" + "".join(f"{name:>15}" for name in STEPS))
    for way, runs in found.items():
        ends = {
            name: statistics.median(run["ends"][name] for run in runs)
            for name in STEPS
            if name in runs[0]["ends"]
        }
        cells = "".join(f"{ends[name]:>15.1f}" if name in ends else f"{'':>15}" for name in STEPS)
        print(f"{way:<34}{cells}")
    print("\nfrom the session to the last message, each run")
    for way, runs in found.items():
        for run in runs:
            seconds = run["ends"]["all home"] - run["ends"]["session"]
            cpu = ", ".join(f"{name} {value:.1f}" for name, value in run["cpu"].items())
            print(f"{way:<22} {seconds:>6.1f} s; CPU s: {cpu}; others {run['others']:.0%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(options.here)
        return
    show(measure(QUICK_ROUNDS if options.quick else ROUNDS))


if __name__ == "__main__":
    main()
