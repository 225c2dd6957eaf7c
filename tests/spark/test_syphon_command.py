"""`twinbus syphon` as a process, which may start before anything is paired."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.twins import DEADLINE_S, QUEUE, Twins, numbered, until
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.cli.context import ExitCode
from twinbus.connection import ConnectionString
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity

_SYPHON = [sys.executable, "-c", "from twinbus.cli import main; main()", "syphon"]


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Twins]:
    """Give two namespaces that nobody has paired."""
    with Twins(tmp_path, queues=0) as twins:
        yield twins


def start(twins: Twins, errors: Path, *options: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TWINBUS_PRIMARY": twins.primary.connection,
        "TWINBUS_SECONDARY": twins.secondary.connection,
    }
    with errors.open("wb") as reported:
        return subprocess.Popen(
            [*_SYPHON, *options], stdout=subprocess.DEVNULL, stderr=reported, env=environment
        )


def end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(DEADLINE_S)


def test_a_syphon_that_starts_before_the_first_pairing_waits_for_it(
    bare: Twins, tmp_path: Path
) -> None:
    errors = tmp_path / "errors"
    process = start(bare, errors)
    try:
        until(lambda: "waiting for an application to pair" in errors.read_text(), "it waits")
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(bare.secondary.connection),
            MessagingFactory.from_connection_string(bare.secondary.connection),
        )
        with MessagingFactory.from_connection_string(bare.primary.connection) as primary:
            pairing = primary.pair_namespace(options)
            bare.queues = tuple(queue.path for queue in pairing.backlog_queues())
            bare.primary.queue()
            sent = bare.divert_ids(numbered("m", 10))
            until(lambda: bare.primary.count(QUEUE) == len(sent), "all is home")
        assert end(process) == 0
    finally:
        process.kill()
        process.wait()
    assert bare.primary.ids() == sent


def test_a_syphon_that_caught_a_pairing_half_way_drains_the_queues_that_come_later(
    bare: Twins, tmp_path: Path
) -> None:
    errors = tmp_path / "errors"
    secondary = NamespaceManager.from_connection_string(bare.secondary.connection)
    identity = PrimaryIdentity.of_connection(ConnectionString.parse(bare.primary.connection))
    secondary.create_queue(describe_backlog_queue(identity, 0))
    process = start(bare, errors)
    try:
        until(lambda: "1 of 10 backlog queues" in errors.read_text(), "it starts with one queue")
        options = SendAvailabilityPairedNamespaceOptions(
            secondary, MessagingFactory.from_connection_string(bare.secondary.connection)
        )
        with MessagingFactory.from_connection_string(bare.primary.connection) as primary:
            pairing = primary.pair_namespace(options)
            bare.queues = tuple(queue.path for queue in pairing.backlog_queues())
            assert len(bare.queues) == 10
            bare.primary.queue()
            sent = bare.divert_ids(numbered("m", 10), queue=5)
            until(lambda: bare.primary.count(QUEUE) == len(sent), "all is home")
        assert end(process) == 0
    finally:
        process.kill()
        process.wait()
    assert bare.primary.ids() == sent


@pytest.mark.parametrize(
    ("options", "code"), [(["--once"], 0), ([], 130)], ids=["once", "interrupted"]
)
def test_a_syphon_without_backlog_queues_ends_in_good_order(
    bare: Twins, tmp_path: Path, options: list[str], code: int
) -> None:
    errors = tmp_path / "errors"
    process = start(bare, errors, *options)
    try:
        if not options:
            until(lambda: "waiting for an application to pair" in errors.read_text(), "it waits")
            process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == code
    finally:
        process.kill()
        process.wait()


def test_messages_that_stay_in_an_extra_queue_are_to_be_received_or_purged(
    twins: Twins, tmp_path: Path
) -> None:
    twins.secondary.send(twins.queues[2], BrokeredMessage(b"x"))
    errors = tmp_path / "errors"
    process = start(twins, errors, "--once", "--include-extra-queues", "--backlog-queue-count", "2")
    try:
        assert process.wait(DEADLINE_S) == ExitCode.TRY_AGAIN
    finally:
        process.kill()
        process.wait()
    reported = errors.read_text()
    assert f"they stay in {twins.queues[2]}. Receive or purge them there" in reported
    assert "does not accept its messages" not in reported
    assert "1 message(s) are left in the backlog. They have no x-ms-path" in reported


def test_what_waits_is_shown_before_spark_has_started(twins: Twins, tmp_path: Path) -> None:
    twins.divert_ids(numbered("m", 40))
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(  # a Java that never starts Spark
        "#!/bin/sh\n"
        """[ "$1" = -version ] && echo 'openjdk version "17"' >&2 && exit\n"""
        "exec sleep 600\n"
    )
    java.chmod(0o700)
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.parents[1]),
        "TWINBUS_PRIMARY": twins.primary.connection,
        "TWINBUS_SECONDARY": twins.secondary.connection,
    }
    with subprocess.Popen(_SYPHON, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"moved 0   waiting 40   not running yet\n"
            assert end(process) == 130
        finally:
            process.kill()
