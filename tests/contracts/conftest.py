"""The worlds the contract suite runs in: every way to reach a namespace is one."""

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.client_site import site
from tests.contracts.doorway import clock, server
from tests.contracts.pairing_words import WAYS, Pair, opened
from tests.contracts.rabbitmq import rabbitmq
from tests.contracts.service_bus import DROPPED, Certificate, service_bus
from tests.namespaces import address_of, door_of, embedded
from tests.rabbitmq.conftest import broker, tls
from tests.waiting import until
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString
from twinbus.errors import CommunicationError, UnsupportedCapabilityError
from twinbus.namespace.azure import CAPABILITIES as AZURE_CAPABILITIES
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.opening import open_namespace
from twinbus.namespace.rabbitmq.runner import CAPABILITIES as RABBITMQ_CAPABILITIES
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command, CreateEntity

PARTIAL = {"RULES"}  # the SDK of Azure Service Bus cannot write UUIDs and bytes into a rule
__all__ = ["broker", "clock", "server", "site", "tls"]  # fixtures


@dataclass
class World:
    """A namespace and the clock it lives by."""

    namespace: Namespace
    clock: ManualClock
    broker: EmbeddedNamespace | None = None  # behind the namespace, where it is of another engine

    def ask(self, command: Command[Any]) -> Any:
        try:
            return self.namespace.submit(command).result(timeout=30)
        except UnsupportedCapabilityError as error:
            declared = {capability.name for capability in self.namespace.capabilities}
            if error.capability in declared - PARTIAL:
                pytest.fail(f"the namespace declares {error.capability}, and says: {error.text}")
            pytest.skip(f"needs {error.capability}")

    def need(self, capability: Capability) -> None:
        """Skip the test where the namespace lacks a capability."""
        if capability not in self.namespace.capabilities:
            pytest.skip(f"needs {capability.name}")

    def wait(self, **span: float) -> None:
        self.clock.advance(timedelta(**span))


class RabbitContractWorld(World):
    """A real RabbitMQ lives by the time of the machine, which no test moves."""

    def ask(self, command: Command[Any]) -> Any:
        if not isinstance(command, CreateEntity):
            return super().ask(command)
        return until(lambda: self._created(command), "the node has restarted its supervisor")

    def _created(self, command: CreateEntity) -> Any:
        """Create an entity; return None while the node cannot (see testing/rabbitmq.py)."""
        try:
            return super().ask(command)
        except CommunicationError as error:
            if "541" not in error.text:
                raise
            return None

    def wait(self, **span: float) -> None:
        pytest.skip(f"needs a clock that a test can move by {span}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and "[sb" in item.name:
            for pattern in DROPPED:
                item.add_marker(pytest.mark.filterwarnings(pattern))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["embedded", "server", "sb", "rabbitmq"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "rabbitmq":
        _check_needs(request, RABBITMQ_CAPABILITIES)
        with rabbitmq(request.getfixturevalue("broker")) as namespace:
            yield RabbitContractWorld(namespace, ManualClock())
        return
    if request.param == "sb":
        _check_needs(request, AZURE_CAPABILITIES)
    clock = ManualClock()
    with embedded(tmp_path / "namespace", clock) as namespace:
        if request.param == "embedded":
            yield World(namespace, clock)
            return
        if request.param == "sb":
            certificate: Certificate = request.getfixturevalue("certificate")
            with (
                service_bus(namespace, clock, certificate) as connection,
                closing(_counted(connection, clock, tmp_path / "ledger")) as azure,
            ):
                yield World(azure, clock, namespace)
            gc.collect(1)  # dropped sockets, while their warnings are expected
            return
        with (
            door_of(namespace, clock) as door,
            ServerNamespace(address_of(door), clock) as client,
        ):
            yield World(client, clock)


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    if request.param == "sb":
        _check_needs(request, AZURE_CAPABILITIES)
    with opened(request.param, tmp_path) as pair:
        yield pair
    if request.param == "sb":
        gc.collect(1)  # as above


def _counted(connection: ConnectionString, clock: ManualClock, ledger: Path) -> Namespace:
    """Open a namespace whose client counts: what is around it must fulfil the contract, too."""
    return open_namespace(replace(connection, ledger=ledger), clock)


def _check_needs(request: pytest.FixtureRequest, capabilities: frozenset[Capability]) -> None:
    """Skip the tests of a module that need what an engine cannot do, before anything starts."""
    needed = getattr(request.module, "NEEDS", None)
    if needed is not None and needed not in capabilities:
        pytest.skip(f"needs {needed.name}")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Pair]:
    with opened("embedded", tmp_path) as pair:
        yield pair


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Pair]:
    with opened("server", tmp_path) as pair:
        yield pair
