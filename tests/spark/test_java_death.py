"""When Spark's Java dies inside an application."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyspark.sql import SparkSession

from tests.spark.twins import QUEUE, Twins, until
from twinbus.errors import MessagingError
from twinbus.syphon.desk import Desk, Note, SyphonProgress
from twinbus.syphon.syphon import Syphon

_APPLICATION = """
import logging, os, sys
from pyspark import SparkContext
from twinbus.errors import InvalidOperationError
from twinbus.spark.session import BorrowedSession
from twinbus.syphon import syphon as module
from twinbus.syphon.syphon import Syphon, SyphonSettings
from datetime import timedelta

logging.basicConfig(stream=sys.stdout, level=logging.ERROR)
settings = SyphonSettings(
    primary=os.environ["PRIMARY"],
    secondary=os.environ["SECONDARY"],
    queues=tuple(os.environ["QUEUES"].split(",")),
    lease=timedelta(seconds=3),
)
with Syphon(settings) as syphon:
    syphon.wait_until_running()
    print("java", SparkContext._gateway.proc.pid, flush=True)
    failures = iter(range(int(os.environ["FAILURES"])))

    def start(*arguments):
        if next(failures, None) is not None:
            raise InvalidOperationError("Spark cannot be started: no memory")
        return BorrowedSession(*arguments)

    module.BorrowedSession = start
    sys.stdin.read()
"""
_OWN_SESSION = """
import os, sys
from prometheus_client import CollectorRegistry
from pyspark import SparkContext
from pyspark.sql import SparkSession
from twinbus import MessagingFactory, NamespaceManager, SendAvailabilityPairedNamespaceOptions
from twinbus.pairing.metrics import PairingCollector

SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
factory = MessagingFactory.from_connection_string(os.environ["PRIMARY"])
pairing = factory.pair_namespace(
    SendAvailabilityPairedNamespaceOptions(
        NamespaceManager.from_connection_string(os.environ["SECONDARY"]),
        MessagingFactory.from_connection_string(os.environ["SECONDARY"]),
        backlog_queue_count=3,
        enable_syphon=True,
    )
)
registry = CollectorRegistry()
registry.register(PairingCollector(pairing))


def show(event):
    running = registry.get_sample_value("twinbus_pairing_syphon_running")
    is_cause = event.cause == pairing.syphon_failure and "Spark has stopped" in event.cause
    print(type(event).__name__, running, is_cause, flush=True)


pairing.on_event(show)
running = registry.get_sample_value("twinbus_pairing_syphon_running")
print("java", SparkContext._gateway.proc.pid, running, flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def running(twins: Twins, program: str, failures: int = 0) -> Iterator["subprocess.Popen[str]"]:
    """Run an application, and end it."""
    environment = {
        **os.environ,
        "PRIMARY": twins.primary.connection,
        "SECONDARY": twins.secondary.connection,
        "QUEUES": ",".join(twins.queues),
        "FAILURES": str(failures),
        "PYSPARK_PYTHON": sys.executable,
    }
    application = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield application
    finally:
        application.kill()
        application.communicate()


def java_of(application: "subprocess.Popen[str]") -> int:
    """Return the process of Java that the application names."""
    assert application.stdout is not None
    line = application.stdout.readline().split()
    assert line[0] == "java", line
    return int(line[1])


def test_the_syphon_starts_spark_again_when_its_java_dies_even_if_a_start_fails(
    twins: Twins,
) -> None:
    twins.primary.queue()
    with running(twins, _APPLICATION, failures=2) as application:
        before = twins.divert_ids(["1", "2", "3"])
        java = java_of(application)
        until(lambda: twins.primary.count() == len(before), "the first are home")
        os.kill(java, signal.SIGKILL)
        after = twins.divert_ids(["4", "5", "6"])
        until(lambda: twins.primary.count() == len(before + after), "the others are home, too")
        assert twins.primary.ids(QUEUE) == before + after
        log, _ = application.communicate(timeout=60)
        assert application.returncode == 0
        assert log.count("Spark's JVM died, and the syphon restarts it") == 3
        assert "Spark cannot be started: no memory" in log


def test_a_pairing_announces_that_its_syphon_ended_with_the_java_of_the_application(
    twins: Twins,
) -> None:
    with running(twins, _OWN_SESSION) as application:
        os.kill(java_of(application), signal.SIGKILL)
        assert application.stdout is not None
        assert application.stdout.readline().split() == ["SyphonEnded", "0", "True"]


def test_an_error_of_the_watcher_does_not_count_as_the_death_of_java(
    spark: SparkSession,
    twins: Twins,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    twins.primary.queue()
    healthy = Desk.progress
    troubles = iter([OSError("the disk does not answer")] * 3)

    def progress(desk: Desk) -> tuple[SyphonProgress, list[Note]]:
        if threading.current_thread().name == "twinbus-syphon":
            for trouble in troubles:
                raise trouble
        return healthy(desk)

    with Syphon(twins.settings()) as syphon:
        syphon.wait_until_running()
        monkeypatch.setattr(Desk, "progress", progress)
        until(lambda: next(troubles, None) is None, "the troubles are over")
        sent = twins.divert_ids(["1", "2"])
        until(lambda: twins.primary.count() == len(sent), "the syphon goes on")
        assert not syphon.wait(0)
    assert "died" not in caplog.text
    assert spark.range(3).count() == 3


def test_a_syphon_whose_query_was_stopped_by_others_reports_it(
    spark: SparkSession, twins: Twins
) -> None:
    failures: list[str] = []
    with Syphon(twins.settings(), on_failure=failures.append) as syphon:
        syphon.wait_until_running()
        for query in spark.streams.active:
            query.stop()
        until(lambda: failures, "it is reported")
        with pytest.raises(MessagingError, match="stopped by another part of this application"):
            syphon.wait()
    assert len(failures) == 1
