"""The syphon of an application that has a namespace, or both, embedded in its own process.

Workers of Spark reach it through a private door. What is promised is the same as with servers.
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.inside import connection_strings
from tests.soak.syphon_kill import MARK, end_all
from tests.spark.twins import DEADLINE_S, PRIMARY, QUEUE, End, doubled, numbered, until
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.client.state import FactoryState
from twinbus.connection import ConnectionString
from twinbus.entities import EntityStatus, backlog_queue_path
from twinbus.errors import InvalidArgumentError
from twinbus.pairing.health import HealthState
from twinbus.syphon.syphon import Syphon, SyphonSettings

ROOT = Path(__file__).parents[2]
SECONDARY = "backup"
BACKLOG = backlog_queue_path(PRIMARY, 0)
MESSAGES = 20_000
PIECE = 500  # of them in one send


class LocalEnd(End):
    """A namespace in this process, and clients of it."""

    def start(self) -> None:
        """Open its directory."""
        self.connection = f"Endpoint=embedded://{self._folder};Name={self._name}"
        self.manager = self._opened.enter_context(
            NamespaceManager.from_connection_string(self.connection)
        )
        self.factory = self._opened.enter_context(
            MessagingFactory.from_connection_string(self.connection)
        )


def pair(primary: MessagingFactory, secondary: str) -> SendAvailabilityPairing:
    """Pair as an application does that diverts at the first failure, and has a syphon."""
    return primary.pair_namespace(
        SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(secondary),
            MessagingFactory.from_connection_string(secondary),
            backlog_queue_count=1,
            failover_interval=timedelta(0),
            enable_syphon=True,
            ping_primary_interval=timedelta(seconds=1),
        )
    )


def switch(manager: NamespaceManager, status: EntityStatus) -> None:
    """Break the destination, or mend it."""
    manager.update_queue(QueueDescription(path=QUEUE, status=status))


def strings_of(pairing: SendAvailabilityPairing) -> list[ConnectionString]:
    """Return the connection strings that the workers of a pairing's syphon got."""
    syphon = pairing.syphon
    assert isinstance(syphon, Syphon)
    return [ConnectionString.parse(text) for text in connection_strings(syphon)]


class Pair:
    """A primary and a secondary, each embedded or behind a server."""

    def __init__(self, folder: Path, primary: type[End], secondary: type[End]) -> None:
        with ExitStack() as opened:
            self.primary = opened.enter_context(primary(folder / "primary", PRIMARY))
            self.secondary = opened.enter_context(secondary(folder / "secondary", SECONDARY))
            self.application = opened.enter_context(
                MessagingFactory.from_connection_string(self.primary.connection)
            )
            self._opened = opened.pop_all()
        self.primary.queue()

    def close(self) -> None:
        self._opened.close()


MIXES = {
    "both embedded": (LocalEnd, LocalEnd),
    "an embedded secondary": (End, LocalEnd),
    "an embedded primary": (LocalEnd, End),
}


@pytest.fixture(params=MIXES)
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, *MIXES[request.param])
    yield pair
    pair.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, LocalEnd, LocalEnd)
    yield pair
    pair.close()


@pytest.mark.usefixtures("spark")
def test_what_is_diverted_comes_home_once_and_in_order_whichever_end_is_embedded(
    mixed: Pair,
) -> None:
    pairing = pair(mixed.application, mixed.secondary.connection)
    sender = mixed.application.create_message_sender(QUEUE)
    sender.send(BrokeredMessage(b"x", message_id="before"))
    switch(mixed.primary.manager, EntityStatus.DISABLED)
    for name in numbered("m", 50):
        sender.send(BrokeredMessage(b"x", message_id=name))
    assert mixed.secondary.count(BACKLOG) == 50
    assert pairing.status()[0].state is HealthState.FAILED_OVER
    switch(mixed.primary.manager, EntityStatus.ACTIVE)
    until(lambda: mixed.secondary.count(BACKLOG) == 0, "the backlog is empty")
    until(lambda: pairing.status()[0].state is HealthState.HEALTHY, "sends return")
    sender.send(BrokeredMessage(b"x", message_id="after"))
    ids = mixed.primary.ids()
    assert sorted(ids) == sorted(["before", *numbered("m", 50), "after"])
    assert [item for item in ids if item.startswith("m")] == numbered("m", 50)


@pytest.mark.usefixtures("spark")
def test_an_application_with_an_outbox_starts_and_sends_while_its_broker_is_down(
    tmp_path: Path,
) -> None:
    outbox = f"Endpoint=embedded://{tmp_path}/outbox"
    with End(tmp_path / "broker", PRIMARY) as broker:
        broker.queue()
        broker.stop()
        with MessagingFactory.from_connection_string(broker.connection) as application:
            pairing = pair(application, outbox)
            sender = application.create_message_sender(QUEUE)
            for name in numbered("m", 20):
                sender.send(BrokeredMessage(b"x", message_id=name))
            assert pairing.status()[0].diverted == 20
            broker.start()
            until(lambda: broker.count() == 20, "all is home")
        assert broker.ids() == numbered("m", 20)


@pytest.mark.usefixtures("spark")
def test_workers_get_no_more_rights_than_they_need(local: Pair) -> None:
    home, away = strings_of(pair(local.application, local.secondary.connection))
    assert home.socket != away.socket
    assert home.key != away.key
    assert (home.entity_path, away.entity_path) == (None, BACKLOG.removesuffix("/0"))


@pytest.mark.usefixtures("spark")
def test_closing_the_primary_closes_the_doors_and_frees_both_directories(
    local: Pair, tmp_path: Path
) -> None:
    pairing = pair(local.application, local.secondary.connection)
    sockets = [item.socket for item in strings_of(pairing)]
    assert all(socket is not None and socket.is_socket() for socket in sockets)
    local.application.close()
    assert pairing.secondary.state is FactoryState.CLOSED
    assert not any(socket is not None and socket.parent.exists() for socket in sockets)
    local.close()
    for name in ("primary", "secondary"):
        opened = subprocess.run(
            [sys.executable, "-c", OPENING, str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (opened.returncode, opened.stdout) == (0, "opened\n"), opened.stderr


OPENING = """
import sys
from twinbus.namespace.embedded import EmbeddedNamespace
with EmbeddedNamespace(sys.argv[1]):
    print("opened")
"""


def test_the_keys_of_the_doors_are_in_memory_and_nowhere_else(
    spark: SparkSession,
    local: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)  # py4j, too, would log every command it sends
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pairing = pair(local.application, local.secondary.connection)
    switch(local.primary.manager, EntityStatus.DISABLED)
    sender = local.application.create_message_sender(QUEUE)
    sender.send_batch([BrokeredMessage(b"x") for _ in range(100)])
    switch(local.primary.manager, EntityStatus.ACTIVE)
    until(lambda: local.secondary.count(BACKLOG) == 0, "the backlog is empty")
    of_spark = Path(spark.conf.get("spark.local.dir") or "")
    assert (of_spark / "spark.log").is_file()
    for secret in (item.key.encode() for item in strings_of(pairing)):
        assert holders(secret, [tmp_path, of_spark]) == []
        assert secret.decode() not in caplog.text
    assert "py4j" in caplog.text, "the rest of its log is there"


def holders(secret: bytes, folders: list[Path]) -> list[str]:
    """Return the files that hold a secret, and the processes that show it to others."""
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            files += [process / "cmdline", process / "environ"]
    found = []
    for file in files:
        with suppress(OSError):  # it has ended, or belongs to another user
            if secret in file.read_bytes():
                found.append(str(file))
    return found


@pytest.mark.usefixtures("spark")
def test_a_directory_that_no_process_has_open_can_be_drained(tmp_path: Path) -> None:
    """An application that is gone has left messages in its outbox."""
    ends = Pair(tmp_path, LocalEnd, LocalEnd)
    connections = ends.primary.connection, ends.secondary.connection
    pairing = pair(ends.application, ends.secondary.connection)
    switch(ends.primary.manager, EntityStatus.DISABLED)
    sender = ends.application.create_message_sender(QUEUE)
    sender.send_batch([BrokeredMessage(b"x", message_id=item) for item in numbered("m", 30)])
    assert pairing.syphon is not None
    ends.close()
    with LocalEnd(tmp_path / "primary", PRIMARY) as primary:
        switch(primary.manager, EntityStatus.ACTIVE)
    settings = SyphonSettings(primary=connections[0], secondary=connections[1], queues=(BACKLOG,))
    with Syphon(settings, once=True) as syphon:
        assert syphon.wait(DEADLINE_S)
    with LocalEnd(tmp_path / "primary", PRIMARY) as primary:
        assert primary.ids() == numbered("m", 30)


def test_the_command_does_not_wait_for_queues_that_only_its_own_process_could_create(
    tmp_path: Path,
) -> None:
    ends = {
        "TWINBUS_PRIMARY": f"Endpoint=twinbus://127.0.0.1:1;Name={PRIMARY}",
        "TWINBUS_SECONDARY": f"Endpoint=embedded://{tmp_path}/outbox",
    }
    (tmp_path / "outbox").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "from twinbus.cli import main; main()", "syphon"],
        env={**os.environ, **ends},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    start = f"there are no backlog queues of {PRIMARY} on the secondary: nothing to bring home. If"
    assert done.stdout.startswith(start)


def test_a_spark_on_other_machines_is_refused_for_an_embedded_namespace(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"spark://host:7077 .*`twinbus serve`"):
        SyphonSettings(
            primary="Endpoint=twinbus://shop:4617",
            secondary=f"Endpoint=embedded://{tmp_path}/outbox",
            queues=(BACKLOG,),
            master="spark://host:7077",
        )


# -- kill -9 ---------------------------------------------------------------------------------------


def application(folder: Path, *, is_first: bool) -> None:
    """Be an application with both namespaces and the syphon in one process.

    The first life diverts messages, mends their destination, and is killed when some of them have
    arrived. The next one finds the rest in its outbox.
    """
    home, away = LocalEnd(folder / "primary", PRIMARY), f"Endpoint=embedded://{folder}/secondary"
    if is_first:
        home.queue()
    pairing = pair(home.factory, away)
    manager = pairing.options.secondary_namespace_manager
    if is_first:
        switch(home.manager, EntityStatus.DISABLED)
        sender = home.factory.create_message_sender(QUEUE)
        ids = numbered("m", MESSAGES)
        for at in range(0, MESSAGES, PIECE):
            piece = ids[at : at + PIECE]
            sender.send_batch([BrokeredMessage(bytes(1000), message_id=item) for item in piece])
        switch(home.manager, EntityStatus.ACTIVE)
        until(home.count, "some are home")
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: not manager.get_runtime_properties(BACKLOG).active_message_count, "all are home")
    home.close()


def live(folder: Path, mark: str, *, is_first: bool) -> int:
    """Run one life of the application; return how it ended."""
    called = f"application(Path({str(folder)!r}), is_first={is_first})"
    program = f"from tests.spark.test_embedded_syphon import *\n{called}"
    environment = {**os.environ, MARK: mark, "TMPDIR": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode


@pytest.mark.timeout(600)  # it starts Spark twice, and waits for leases to lapse
def test_an_application_killed_while_its_outbox_empties_brings_all_home_once_in_its_next_life(
    tmp_path: Path,
) -> None:
    mark = secrets.token_hex(8)
    try:
        assert live(tmp_path, mark, is_first=True) == -signal.SIGKILL
        with (
            LocalEnd(tmp_path / "primary", PRIMARY) as primary,
            LocalEnd(tmp_path / "secondary", SECONDARY) as secondary,
        ):
            arrived, left = primary.count(), secondary.count(BACKLOG)
        print(f"killed when {arrived} messages had arrived and {left} were in the outbox")
        assert arrived > 0
        assert left > 0
        assert arrived + left >= MESSAGES
        assert live(tmp_path, mark, is_first=False) == 0
    finally:
        end_all(mark)
    with (
        LocalEnd(tmp_path / "primary", PRIMARY) as primary,
        LocalEnd(tmp_path / "secondary", SECONDARY) as secondary,
    ):
        ids = primary.ids()
        assert doubled(ids) == []
        assert ids == numbered("m", MESSAGES)
        assert secondary.count(BACKLOG) == 0
        assert secondary.dead(BACKLOG) == []
