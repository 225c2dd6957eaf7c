"""A syphon and a foreachBatch job on a Spark cluster of two workers, while their parts are killed.

    python -m tests.soak.cluster --seconds 600 [--seed 7]

Messages are diverted all the time, for two destinations. The syphon brings them home. The job takes
the orders as a stream and writes them to another queue by name (`txnAppId`, `txnVersion`). Both run
on both workers, which are different hosts, because Spark speculates on another host only. Executors
of both are killed with -9, the job is killed while a batch is open and started again from its
checkpoint, and one destination answers slowly or refuses messages for seconds. In the end every
message is where it belongs, once. The run fails if nothing was speculated, no send to the slow
destination was delayed, or no kill hit a batch of the job that had sent a part of its rows.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tests.spark.test_cluster import Cluster
from tests.spark.twins import Twins, doubled, numbered, until
from twinbus.datasource.source import register
from twinbus.entities import EntityStatus
from twinbus.protocol.commands import Command, Send
from twinbus.server.door import Door
from twinbus.testing.faults import Delay, Injectable
from twinbus.testing.server_faults import FaultyServer

ORDERS, INVOICES, BILLS = "orders", "invoices", "bills"
QUEUES = 4
PACE_S = 0.5  # between two diverted batches
BATCH = 50  # messages of each destination
IN_BATCH = "kills in an open batch"
STRIKE_S = (5.0, 15.0)  # between two troubles
TROUBLE_S = 8.0  # of a destination that is slow or refuses
SLOW_S = 2.0  # for each send to a slow destination
BILL_S = 0.3  # for each send to the bills: batches of the job stay open for a while
TROUBLES = ("executor", "executor", "job", "refusal", "delay")
OPEN_BATCH_S = 30.0  # to wait for a batch of the job, before it is killed between two of them
_SYPHON = [sys.executable, "-c", "from twinbus.cli import main; main()", "syphon"]
_SPECULATION = {
    "spark.cores.max": "2",  # one on each host
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.2",
    "spark.speculation.quantile": "0.25",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
}


def settings(folder: Path) -> dict[str, str]:
    """Return the settings of both applications."""
    return {**_SPECULATION, "spark.eventLog.dir": f"file://{folder}/events"}


def job() -> None:
    """Write every order to the bills, batch by batch; runs until it is killed."""
    connection, folder = os.environ["TWINBUS_PRIMARY"], os.environ["TWINBUS_SOAK_FOLDER"]
    builder = SparkSession.builder.master(os.environ["TWINBUS_SOAK_MASTER"])
    for name, value in settings(Path(folder)).items():
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


class SlowServer(FaultyServer):
    """Counts the delayed requests of each entity."""

    def __init__(self, door: Door) -> None:
        self.delayed: Counter[str] = Counter()
        super().__init__(door)

    def fault_for(self, command: Command[Any]) -> tuple[Injectable | None, str]:
        """Return the fault for a request and its entity, and count it."""
        fault, entity = super().fault_for(command)
        self.delayed[entity] += fault is not None
        return fault, entity


class Site:
    """Everything that runs."""

    def __init__(self, folder: Path, opened: ExitStack, seed: int) -> None:
        self._folder = folder
        self._opened = opened
        self._random = random.Random(seed)
        self.twins = opened.enter_context(Twins(folder, QUEUES))
        for queue in (ORDERS, INVOICES, BILLS):
            self.twins.primary.queue(queue)
        self._slow = SlowServer(self.twins.primary.server.door)
        self._slow.inject(Delay(BILL_S), BILLS, kind=Send)
        self.cluster = opened.enter_context(Cluster(folder / "cluster", cores=2, memory="2g"))
        self.struck: Counter[str] = Counter()
        self._troubles: list[str] = []
        self.sent: list[str] = []
        self._trouble_until = 0.0
        self._end_trouble: Callable[[], None] = _nothing
        (folder / "events").mkdir()
        conf = [part for item in settings(folder).items() for part in ("--conf", "=".join(item))]
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
        if not self._troubles:  # each of them, in another order each time
            self._troubles = self._random.sample(TROUBLES, len(TROUBLES))
        trouble = self._troubles.pop()
        if trouble in ("executor", "job"):
            is_open = self._await_open_batch()
            if trouble == "job":
                _end(self._job)
                self._start_job()
            elif not self._kill_executor():
                return  # what did not happen is not counted
            self.struck[IN_BATCH] += is_open
        else:
            self.heal(at_once=True)
            self._end_trouble = self._slow_down() if trouble == "delay" else self._refuse()
            self._trouble_until = time.monotonic() + TROUBLE_S
        self.struck[trouble] += 1

    def _kill_executor(self) -> bool:
        """Kill an executor of either application; return False if none runs."""
        executors = list(_executors())
        if not executors:
            return False
        try:
            os.kill(self._random.choice(executors), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _await_open_batch(self) -> bool:
        """Wait for a batch of the job that has sent bills and is not committed; return if it is."""
        ends = time.monotonic() + OPEN_BATCH_S
        next_divert = 0.0
        batch, sends = self._last("offsets"), self._slow.delayed[BILLS]
        while time.monotonic() < ends:
            sent, latest = self._slow.delayed[BILLS], self._last("offsets")
            if latest != batch or latest == self._last("commits"):
                batch, sends = latest, sent
            elif sent > sends:
                return True
            if time.monotonic() > next_divert:  # so that there is something to read
                self.divert()
                next_divert = time.monotonic() + PACE_S
            time.sleep(PACE_S / 50)
        return False

    def _last(self, log: str) -> int:
        """Return the last batch in a log of the job's checkpoint; -1 if there is none."""
        names = (path.name for path in (self._folder / "checkpoint" / log).glob("*"))
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def heal(self, *, at_once: bool = False) -> None:
        """End the trouble of a destination when its time has come."""
        if at_once or time.monotonic() > self._trouble_until:
            self._end_trouble()
            self._end_trouble = _nothing

    def _slow_down(self) -> Callable[[], None]:
        return self._slow.inject(Delay(SLOW_S), INVOICES, kind=Send)

    def _refuse(self) -> Callable[[], None]:
        manager = self.twins.primary.manager

        def become(status: EntityStatus) -> None:
            manager.update_queue(replace(manager.get_queue(INVOICES), status=status))

        become(EntityStatus.SEND_DISABLED)
        return lambda: become(EntityStatus.ACTIVE)

    def run(self, seconds: float) -> None:
        """Divert and strike, then wait until all is where it belongs."""
        ends = time.monotonic() + seconds
        next_strike = time.monotonic() + STRIKE_S[1]
        while time.monotonic() < ends or not self._was_all():
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

    def _was_all(self) -> bool:
        """Return whether each trouble was made, and a kill inside of an open batch."""
        is_struck = all(self.struck[name] for name in (*TROUBLES, IN_BATCH))
        return is_struck and self._slow.delayed[INVOICES] > 0

    def check(self) -> None:
        """Count what arrived."""
        arrived = [*self.twins.primary.ids(BILLS), *self.twins.primary.ids(INVOICES)]
        lost, more = set(self.sent) - set(arrived), doubled(arrived)
        self.struck["speculative tasks"] = _speculated(self._folder / "events")
        self.struck["delayed sends"] = self._slow.delayed[INVOICES]
        print(
            f"{len(self.sent):,} diverted, {dict(self.struck)}: lost {len(lost)}, doubled "
            f"{len(more)}",
            flush=True,
        )
        assert not lost, sorted(lost)[:10]
        assert not more, sorted(more)[:10]
        for needed in (IN_BATCH, "speculative tasks", "delayed sends"):
            assert self.struck[needed], f"the run had no {needed}; run it for longer"


def _nothing() -> None:
    pass


def _speculated(folder: Path) -> int:
    """Return how many speculative tasks the event logs of the applications have."""
    count = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as lines:
                starts = (line for line in lines if "SparkListenerTaskStart" in line)
                count += sum('"Speculative":true' in line for line in starts)
    return count


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
