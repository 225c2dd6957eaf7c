"""One server for all tests with the SDK of Azure Service Bus, and clients for each module."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.bus import Bus
from tests.scenarios.server_process import Server

if TYPE_CHECKING:
    from azure.servicebus.management import ServiceBusAdministrationClient

# The SDK drops the sockets of refused and of lost connections without closing them.
DROPPED = (
    "ignore:unclosed <socket.socket:ResourceWarning",
    "ignore:unclosed transport:ResourceWarning",
    "ignore:loop is closed:ResourceWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for pattern in DROPPED:
                item.add_marker(pytest.mark.filterwarnings(pattern))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("interop")
    made = Server(folder)
    made.start("", "--tls", str(folder / "certificate"))
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def bus(shared_server: Server) -> Iterator[Bus]:
    made = Bus(shared_server)
    yield made
    made.close()
    del made
    gc.collect()  # dropped sockets, while their warnings are expected


@pytest.fixture(scope="module")
def admin(bus: Bus) -> "ServiceBusAdministrationClient":
    return bus.admin


@pytest.fixture(scope="module")
def subscription(bus: Bus) -> str:
    topic = bus.name()
    bus.admin.create_topic(topic)
    bus.admin.create_subscription(topic, "rules")
    return topic


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of one test, which may kill it."""
    made = Server(tmp_path)
    made.start("[[queue]]\npath = 'orders'\n")
    yield made
    if made.process is not None:
        with made.process as process:
            process.kill()
    gc.collect()  # as above
