"""Syphon and report on a Spark cluster: a master and two workers of their own, on loopback."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from tests.spark.twins import DEADLINE_S, Twins, doubled, numbered, until
from twinbus.lifetimes import Closable
from twinbus.spark.java import find_java, make_java_home

QUEUES = 4
CLIENT_MESSAGES = 500  # of each backlog queue
DESTINATIONS = ("orders", "invoices")
WORKERS = 2
_DEPLOY = "org.apache.spark.deploy"
_HERE = "127.0.0.1"
_TWINBUS = [sys.executable, "-c", "from twinbus.cli import main; main()"]


class Cluster(Closable):
    """A standalone Spark: every process with its log, and its files, in a folder."""

    def __init__(self, folder: Path, cores: int = 1, memory: str = "1g") -> None:
        """Start it, with so many cores for each worker; each worker is a host of its own."""
        folder.mkdir()
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(make_java_home(folder / "java", find_java())),
            "SPARK_LOCAL_IP": _HERE,
        }
        try:
            self._start("master", "master.Master", "--host", _HERE, "--port", "0")
            self.url = self._logged("master", rf"Starting Spark master at (spark://{_HERE}:\d+)")
            for number, name in enumerate(self._workers(), start=1):
                limits = ["--cores", str(cores), "--memory", memory]
                place = ["--host", f"127.0.0.{number}", "--work-dir", str(folder / name)]
                self._start(name, "worker.Worker", *limits, *place, self.url)
            for name in self._workers():
                self._logged(name, "(Successfully registered with master)")
        except BaseException:
            self.close()
            raise

    def _workers(self) -> list[str]:
        return [f"worker-{number}" for number in range(WORKERS)]

    def _start(self, name: str, role: str, *arguments: str) -> None:
        home = Path(pyspark.__file__).parent
        environment = {
            **self.environment,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_DIRS": str(self._folder),
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        }
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                [
                    home / "bin" / "spark-class",
                    f"{_DEPLOY}.{role}",
                    *arguments,
                    "--webui-port",
                    "0",
                ],
                env=environment,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,  # executors are ended with their worker
            )
        self._processes[name] = process

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _logged(self, name: str, pattern: str) -> str:
        """Wait until a process logs something; return it."""
        found: list[str] = []

        def is_logged() -> bool:
            log = self._log(name).read_text(errors="replace")
            assert self._processes[name].poll() is None, f"{name} ended: {log[-2000:]}"
            found[:] = re.findall(pattern, log)
            return bool(found)

        until(is_logged, f"{name} says {pattern}")
        return found[0]

    def tasks_of_workers(self) -> list[int]:
        """Return how many tasks the executors of each worker finished."""
        return [
            sum(
                len(re.findall(r"Finished task", log.read_text(errors="replace")))
                for log in (self._folder / name).glob("app-*/*/stderr")
            )
            for name in self._workers()
        ]

    def close(self) -> None:
        """End every process of it, and the executors."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            finally:
                _end_group(process.pid)
                process.wait()


def _end_group(leader: int) -> None:
    """End what is left of the processes that a process started."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    with Twins(tmp_path, QUEUES) as twins:
        yield twins


def run_on(cluster: Cluster, twins: Twins, *arguments: str | Path) -> str:
    """Run a command of Twinbus on a cluster; return what it printed."""
    every_worker = {
        "spark.cores.max": str(WORKERS),
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # begins when all are there
    }
    conf = [part for name, value in every_worker.items() for part in ("--conf", f"{name}={value}")]
    ends = {
        "TWINBUS_PRIMARY": twins.primary.connection,
        "TWINBUS_SECONDARY": twins.secondary.connection,
    }
    process = subprocess.Popen(
        [*_TWINBUS, *arguments, "--master", cluster.url, *conf],
        env={**cluster.environment, **ends},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        reported, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        _end_group(process.pid)
        process.wait()
    assert process.returncode == 0, reported
    return reported


def test_on_a_cluster_every_worker_takes_part_and_all_comes_home_once_in_order(
    twins: Twins, cluster: Cluster, tmp_path: Path
) -> None:
    for destination in DESTINATIONS:
        twins.primary.queue(destination)
    sent = {
        (destination, queue): twins.divert_ids(
            numbered(f"client{queue}.{destination}", CLIENT_MESSAGES), destination, queue
        )
        for queue in range(QUEUES)
        for destination in DESTINATIONS
    }
    reported = run_on(cluster, twins, "syphon", "--once", "--ledger", tmp_path / "transfers")
    assert twins.waiting() == 0, reported
    for destination in DESTINATIONS:
        home = twins.primary.ids(destination)
        assert len(home) == QUEUES * CLIENT_MESSAGES
        assert not doubled(home)
        for queue in range(QUEUES):
            ids = sent[destination, queue]
            assert [item for item in home if item in set(ids)] == ids
    syphon_tasks = cluster.tasks_of_workers()
    assert all(syphon_tasks), "a worker had nothing to do"

    twins.close()  # writes the ledgers
    ledgers = [tmp_path / name for name in ("primary", "secondary", "transfers")]
    places = ("--page", tmp_path / "report.html", "--output", tmp_path / "tables")
    run_on(cluster, twins, "report", *ledgers, *places)
    messages = QUEUES * CLIENT_MESSAGES
    moved = pq.read_table(tmp_path / "tables/transfers.parquet").select(["path", "moved"])
    assert sorted(moved.to_pylist(), key=str) == [
        {"path": destination, "moved": messages} for destination in sorted(DESTINATIONS)
    ]
    counted = pq.read_table(tmp_path / "tables/reconciliation.parquet").to_pylist()
    assert {row["status"] for row in counted} == {"completed"}
    assert sum(row["messages"] for row in counted) == 2 * len(DESTINATIONS) * messages
    assert sum(cluster.tasks_of_workers()) > sum(syphon_tasks), "the executors had nothing to do"
