"""The syphon on real Spark with namespaces that are not Twinbus's own: sb:// and amqp://.

There is no Azure here: sb:// is the door of a Twinbus server, reached through the official SDK.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.rabbitmq.brokers import require_rabbitmq, watched_broker
from tests.scenarios.server_process import Server
from tests.spark.twins import DEADLINE_S, PRIMARY, QUEUE, End, numbered, until
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.cli.main import INTERRUPTED
from twinbus.cli.root import root
from twinbus.connection import ConnectionString
from twinbus.cost.stages import DIVERTED, Stage
from twinbus.entities import backlog_queue_path, dead_letter_path
from twinbus.errors import UnsupportedCapabilityError
from twinbus.message import to_batch
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.health import HealthState
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import sender_source
from twinbus.syphon.syphon import Syphon, SyphonSettings

pytestmark = [
    pytest.mark.usefixtures("spark"),
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning"),  # of the SDK
]
BACKLOG = tuple(backlog_queue_path(PRIMARY, index) for index in range(2))


class ServiceBus:
    """A Twinbus server that is reached at sb:// by workers, and natively by tests."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.server = Server(folder)
        self.server.start("", "--tls", str(folder / "certificate"))
        native = ConnectionString.parse(self.server.connection)
        self.connection = (
            f"Endpoint=sb://localhost:{self.server.port};Name={PRIMARY};"
            f"SharedAccessKeyName={native.key_name};SharedAccessKey={native.key};"
            f"UseDevelopmentEmulator=true;CaFile={folder / 'certificate' / 'ca.pem'}"
        )
        self.manager = self.server.manager()
        self.factory = self.server.factory()

    def counted_in(self, ledger: Path) -> str:
        """Return its connection string for clients that count what they ask of it."""
        return f"{self.connection};Ledger={ledger}"

    def close(self) -> None:
        self.manager.close()
        self.factory.close()
        self.server.stop()


@pytest.fixture
def service_bus(tmp_path: Path) -> Iterator[ServiceBus]:
    bus = ServiceBus(tmp_path / "bus")
    yield bus
    bus.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[End]:
    with End(tmp_path / "home", PRIMARY) as end:
        end.queue()
        yield end


def divert(
    manager: NamespaceManager, factory: MessagingFactory, ids: list[str], path: str = QUEUE
) -> None:
    """Divert to the first backlog queue as a paired sender does; make the queues if need be."""
    for index, queue in enumerate(BACKLOG):
        if not manager.queue_exists(queue):
            manager.create_queue(describe_backlog_queue(PrimaryIdentity(PRIMARY), index))
    batch = to_batch([BrokeredMessage(b"x", message_id=item) for item in ids])
    origin = Origin(sender_source(7 + len(ids)), range(len(ids)))
    factory.courier.namespace.ask(Send(BACKLOG[0], diverted(batch, path, origin)))


def syphon(primary: str, secondary: str, *, once: bool = True) -> Syphon:
    settings = SyphonSettings(primary=primary, secondary=secondary, queues=BACKLOG)
    return Syphon(settings, once=once)


@contextmanager
def paired(here: str, peer: str, ledger: Path) -> Iterator[SendAvailabilityPairing]:
    """Pair two namespaces; the first failure of an entity diverts its sends."""
    options = SendAvailabilityPairedNamespaceOptions(
        NamespaceManager.from_connection_string(peer),
        MessagingFactory.from_connection_string(peer),
        len(BACKLOG),
        timedelta(0),
        ping_primary_interval=timedelta(seconds=1),
        ledger=ledger,
    )
    with MessagingFactory.from_connection_string(here) as factory:
        yield factory.pair_namespace(options)


def check_that_a_syphon_waits(primary: str, secondary: str, errors: Path) -> None:
    """Start `twinbus syphon` where nothing is paired, and interrupt it."""
    environment = {**os.environ, "TWINBUS_PRIMARY": primary, "TWINBUS_SECONDARY": secondary}
    with errors.open("wb") as reported:
        process = subprocess.Popen(
            [sys.executable, "-c", "from twinbus.cli import main; main()", "syphon"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=reported,
        )
    try:
        until(lambda: errors.read_text() or process.poll() is not None, "it waits or ends")
        assert "waiting for an application to pair" in errors.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == INTERRUPTED
    finally:
        process.kill()
        process.wait()


def is_healthy(pairing: SendAvailabilityPairing) -> bool:
    return all(item.state is HealthState.HEALTHY for item in pairing.status())


def test_messages_come_home_from_a_service_bus_once_and_in_order(
    service_bus: ServiceBus, home: End
) -> None:
    ids = numbered("a", 1200)
    divert(service_bus.manager, service_bus.factory, ids)
    divert(service_bus.manager, service_bus.factory, ["lost"], "nowhere")
    with syphon(home.connection, service_bus.connection) as running:
        assert running.wait(DEADLINE_S)
        progress = running.progress
    assert home.ids() == ids
    assert (progress.moved, progress.dead_lettered, progress.waiting) == (1200, 1, 0)
    with service_bus.factory.create_message_receiver(dead_letter_path(BACKLOG[0])) as receiver:
        [dead] = receiver.peek(0, 10)
    assert "nowhere" in str(dead.dead_letter_error_description)


def test_messages_come_home_to_a_service_bus(service_bus: ServiceBus, tmp_path: Path) -> None:
    service_bus.manager.create_queue(QUEUE)
    ids = numbered("a", 300)
    with End(tmp_path / "away", "away") as away:
        divert(away.manager, away.factory, ids)
        with syphon(service_bus.connection, away.connection) as running:
            assert running.wait(DEADLINE_S)
        assert away.count(BACKLOG[0]) == 0
    with service_bus.factory.create_message_receiver(QUEUE) as receiver:
        found = receiver.peek(0, 1000)
    assert [message.message_id for message in found] == ids
    assert all("x-twinbus-origin" in message.application_properties for message in found)


def test_a_message_that_reaches_an_idle_backlog_is_brought_home(
    service_bus: ServiceBus, home: End
) -> None:
    divert(service_bus.manager, service_bus.factory, ["first"])
    with syphon(home.connection, service_bus.connection, once=False) as running:
        running.wait_until_running()
        until(lambda: home.count() == 1, "the first is home")
        divert(service_bus.manager, service_bus.factory, ["second", "third"])
        until(lambda: home.count() == 3, "the others are home")
    assert home.ids() == ["first", "second", "third"]


def test_a_syphon_waits_for_the_first_pairing_with_a_service_bus(
    service_bus: ServiceBus, home: End, tmp_path: Path
) -> None:
    check_that_a_syphon_waits(home.connection, service_bus.connection, tmp_path / "errors")


def test_a_transform_of_messages_without_ranges_is_refused(
    service_bus: ServiceBus, home: End
) -> None:
    divert(service_bus.manager, service_bus.factory, ["a"])
    settings = SyphonSettings(
        primary=home.connection,
        secondary=service_bus.connection,
        queues=BACKLOG,
        transform=lambda messages: messages,
    )
    with pytest.raises(UnsupportedCapabilityError, match="leases of ranges"):
        Syphon(settings, once=True)


def test_an_outage_of_two_service_buses_is_reported_from_what_clients_counted(
    service_bus: ServiceBus, tmp_path: Path
) -> None:
    ledgers = [tmp_path / name for name in ("primary", "secondary", "pairing")]
    with closing(ServiceBus(tmp_path / "backup")) as backup:
        primary, secondary = service_bus.counted_in(ledgers[0]), backup.counted_in(ledgers[1])
        service_bus.manager.create_queue(QUEUE)
        with paired(primary, secondary, ledgers[2]) as pairing:
            sender = pairing.primary.create_message_sender(QUEUE)
            sender.send(BrokeredMessage(b"direct"))
            service_bus.server.stop(signal.SIGKILL)
            for _ in range(3):
                sender.send(BrokeredMessage(bytes(70_000)))
            service_bus.server.start("", *service_bus.server.options)
            until(lambda: is_healthy(pairing), "a ping got through")
            settings = SyphonSettings(
                primary=primary, secondary=secondary, queues=BACKLOG, ledger=ledgers[2]
            )
            with Syphon(settings, once=True) as running:
                assert running.wait(DEADLINE_S)
            with pairing.primary.create_message_receiver(QUEUE) as receiver:
                receiver.complete(receiver.receive_batch(10, timedelta(seconds=5)))
    tables, page = tmp_path / "tables", tmp_path / "page.html"
    options = ["--prices", "azure-standard", "--output", str(tables), "--page", str(page)]
    done = CliRunner().invoke(root, ["report", *map(str, ledgers), *options])
    assert done.exit_code == 0, done.output
    operations: Counter[str] = Counter()
    for row in pq.read_table(tables / "operations.parquet").to_pylist():
        operations[row["stage"]] += row["operations"]
    units = 3 * 2  # of 64 KB, of the diverted messages
    assert operations[Stage.SEND.value] == 1
    assert [operations[stage.value] for stage in DIVERTED] == [units, units, units, units + 1]
    assert operations[Stage.PING.value] >= 1
    assert operations[Stage.MANAGEMENT.value] > 0
    [outage] = pq.read_table(tables / "outages.parquet").to_pylist()
    assert (outage["path"], outage["diverted"]) == (QUEUE, 3)
    [moved] = pq.read_table(tables / "transfers.parquet").to_pylist()
    assert moved["moved"] == 3
    priced = pq.read_table(tables / "money.parquet").to_pylist()
    assert sum(row["operations"] for row in priced) == sum(operations.values())


# -- RabbitMQ --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rabbit() -> Iterator[str]:
    """Give the connection string of a real broker."""
    require_rabbitmq()
    with watched_broker() as broker:
        yield broker.connection_string()


@pytest.fixture
def rabbit_ends(rabbit: str) -> Iterator[tuple[NamespaceManager, MessagingFactory]]:
    with (
        NamespaceManager.from_connection_string(rabbit) as manager,
        MessagingFactory.from_connection_string(rabbit) as factory,
    ):
        yield manager, factory
        for path in (*BACKLOG, QUEUE):
            if manager.queue_exists(path):
                manager.delete_queue(path)


RabbitEnds = tuple[NamespaceManager, MessagingFactory]


def test_messages_come_home_from_a_rabbitmq_once_and_in_order(
    rabbit: str, rabbit_ends: RabbitEnds, home: End
) -> None:
    ids = numbered("a", 1200)
    divert(*rabbit_ends, ids)
    with syphon(home.connection, rabbit) as running:
        assert running.wait(DEADLINE_S)
        assert running.progress.moved == 1200
    assert home.ids() == ids
    divert(*rabbit_ends, ids)  # as after a kill: the same messages of the same sender again
    with syphon(home.connection, rabbit) as running:
        assert running.wait(DEADLINE_S)
    assert home.ids() == []


def test_a_syphon_waits_for_the_first_pairing_with_a_rabbitmq(
    rabbit: str, home: End, tmp_path: Path
) -> None:
    check_that_a_syphon_waits(home.connection, rabbit, tmp_path / "errors")


def test_messages_come_home_to_a_rabbitmq(
    rabbit: str, rabbit_ends: RabbitEnds, tmp_path: Path
) -> None:
    manager, factory = rabbit_ends
    manager.create_queue(QUEUE)
    ids = numbered("a", 300)
    with End(tmp_path / "away", "away") as away:
        divert(away.manager, away.factory, ids)
        with syphon(rabbit, away.connection) as running:
            assert running.wait(DEADLINE_S)
        assert away.count(BACKLOG[0]) == 0
    with factory.create_message_receiver(QUEUE) as receiver:
        found = receiver.receive_batch(1000, timedelta(seconds=5))
        while len(found) < len(ids):
            found += receiver.receive_batch(1000, timedelta(seconds=5))
        for message in found:
            message.complete()
    assert [message.message_id for message in found] == ids
