"""A syphon and a foreachBatch job on a Spark cluster of two workers, while their parts are killed.

    python -m tests.soak.cluster --seconds 600 [--seed 7]

Messages are diverted all the time, for two destinations. The syphon brings them home on one worker,
with speculation on. The job on the other worker takes the orders as a stream and writes them to
another queue by name (`txnAppId`, `txnVersion`). Executors of both are killed with -9, the job is
killed in mid-batch and started again from its checkpoint, and one destination refuses messages for
seconds. In the end every message is where it belongs, once.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from tests.spark.test_cluster import Cluster
from tests.spark.twins import Twins, doubled, numbered, until
from twinbus.datasource.source import register
from twinbus.entities import EntityStatus

ORDERS, INVOICES, BILLS = "orders", "invoices", "bills"
QUEUES = 4
PACE_S = 0.5  # between two diverted batches
BATCH = 50  # messages of each destination
STRIKE_S = (5.0, 15.0)  # between two troubles
REFUSING_S = 5.0
_SYPHON = [sys.executable, "-c", "from twinbus.cli import main; main()", "syphon"]
_SPECULATION = {
    "spark.cores.max": "1",
    "spark.speculation": "true",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.5",
}


def job() -> None:
    """Write every order to the bills, batch by batch; runs until it is killed."""
    connection, folder = os.environ["TWINBUS_PRIMARY"], os.environ["TWINBUS_SOAK_FOLDER"]
    builder = SparkSession.builder.master(os.environ["TWINBUS_SOAK_MASTER"])
    for name, value in _SPECULATION.items():
        builder = builder.config(name, value)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    register(spark)

    def write(rows: DataFrame, batch: int) -> None:
        named = {"txnAppId": "bills", "txnVersion": str(batch)}
        (
            rows.select("body", "message_id")
            .write.format("twinbus")
            .options(connection=connection, queue=BILLS, **named)
            .mode("append")
            .save()
        )

    source = spark.readStream.format("twinbus")
    rows = source.options(connection=connection, queue=ORDERS, leaseSeconds="5").load()
    writer = rows.writeStream.foreachBatch(write)
    writer.option("checkpointLocation", f"file://{folder}/checkpoint").start().awaitTermination()


class Site:
    """Everything that runs."""

    def __init__(self, folder: Path, opened: ExitStack, seed: int) -> None:
        self._folder = folder
        self._opened = opened
        self._random = random.Random(seed)
        self.twins = opened.enter_context(Twins(folder, QUEUES))
        for queue in (ORDERS, INVOICES, BILLS):
            self.twins.primary.queue(queue)
        self.cluster = opened.enter_context(Cluster(folder / "cluster"))
        self.struck: dict[str, int] = {}
        self.sent: list[str] = []
        self._refusing_until = 0.0
        conf = [part for item in _SPECULATION.items() for part in ("--conf", "=".join(item))]
        self._start("syphon", [*_SYPHON, "--master", self.cluster.url, "--lease", "5s", *conf])
        self._start_job()

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            **self.cluster.environment,
            "TWINBUS_PRIMARY": self.twins.primary.connection,
            "TWINBUS_SECONDARY": self.twins.secondary.connection,
            "TWINBUS_SOAK_MASTER": self.cluster.url,
            "TWINBUS_SOAK_FOLDER": str(self._folder),
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._opened.callback(_end, process)
        return process

    def _start_job(self) -> None:
        self._job = self._start("job", [sys.executable, "-m", "tests.soak.cluster", "--job"])

    def divert(self) -> None:
        """Divert a batch for each destination."""
        for destination in (ORDERS, INVOICES):
            ids = numbered(f"{destination}.{len(self.sent)}", BATCH)
            queue = self._random.randrange(QUEUES)
            self.sent += self.twins.divert_ids(ids, destination, queue)

    def strike(self) -> None:
        """Make some trouble."""
        trouble = self._random.choice(("executor", "executor", "job", "refusal"))
        if trouble == "executor":
            executors = list(_executors())
            if executors:
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(executors), signal.SIGKILL)
        elif trouble == "job":
            _end(self._job)
            self._start_job()
        else:
            self._refuse(EntityStatus.SEND_DISABLED)
            self._refusing_until = time.monotonic() + REFUSING_S
        self.struck[trouble] = self.struck.get(trouble, 0) + 1

    def heal(self, *, at_once: bool = False) -> None:
        """Let the destination take messages again when its time has come."""
        if self._refusing_until and (at_once or time.monotonic() > self._refusing_until):
            self._refuse(EntityStatus.ACTIVE)
            self._refusing_until = 0.0

    def _refuse(self, status: EntityStatus) -> None:
        manager = self.twins.primary.manager
        manager.update_queue(replace(manager.get_queue(INVOICES), status=status))

    def run(self, seconds: float) -> None:
        """Divert and strike, then wait until all is where it belongs."""
        ends = time.monotonic() + seconds
        next_strike = time.monotonic() + STRIKE_S[1]
        while time.monotonic() < ends:
            self.divert()
            self.heal()
            if time.monotonic() > next_strike:
                self.strike()
                next_strike = time.monotonic() + self._random.uniform(*STRIKE_S)
            time.sleep(PACE_S)
        self.heal(at_once=True)
        primary, half = self.twins.primary, len(self.sent) // 2
        until(lambda: not self.twins.waiting(), "the backlog is empty")
        until(lambda: primary.count(BILLS) >= half and not primary.count(ORDERS), "all is billed")

    def check(self) -> None:
        """Count what arrived."""
        arrived = [*self.twins.primary.ids(BILLS), *self.twins.primary.ids(INVOICES)]
        lost, more = set(self.sent) - set(arrived), doubled(arrived)
        print(
            f"{len(self.sent):,} diverted, {self.struck}: lost {len(lost)}, doubled {len(more)}",
            flush=True,
        )
        assert not lost, sorted(lost)[:10]
        assert not more, sorted(more)[:10]


def _executors() -> Iterator[int]:
    """Give the processes of executors that this process has started, by way of its workers."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
            commands[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
    for pid, command in commands.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and "CoarseGrainedExecutorBackend" in command:
            yield pid


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run for a while, and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        job()
        return
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        site = Site(Path(folder), opened, given.seed)
        site.run(given.seconds)
        site.check()


if __name__ == "__main__":
    main()
