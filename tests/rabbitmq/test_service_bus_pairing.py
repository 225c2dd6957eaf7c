"""Pairing across RabbitMQ and a service of the Service Bus protocol, in both directions."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("azure.servicebus")

from tests.contracts.service_bus import DROPPED, Certificate, service_bus
from tests.namespaces import embedded
from tests.rabbitmq.test_pairing import Maker, Site, maker, names
from tests.waiting import until
from twinbus.clock import SystemClock
from twinbus.entities import QueueDescription
from twinbus.protocol.commands import CreateEntity, DeleteEntity
from twinbus.testing import Fault, FaultyNamespace
from twinbus.testing.rabbitmq import RabbitBroker

__all__ = ["maker"]  # a fixture
pytestmark = [pytest.mark.filterwarnings(pattern) for pattern in DROPPED]


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """Give the connection string of a namespace with a queue `orders`."""
    clock = SystemClock()
    with (
        embedded(tmp_path / "bus", clock) as namespace,
        service_bus(namespace, clock, Certificate(tmp_path), "shop") as connection,
    ):
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        yield connection.to_text()
    gc.collect(1)  # dropped sockets, while their warnings are expected


def play_outage(site: Site, front: FaultyNamespace) -> None:
    """Send before, during and after an outage, and bring the diverted messages home."""
    site.send("before")
    front.inject(Fault.UNAVAILABLE)
    site.send("first", "second")
    assert site.is_diverting()
    front.heal()
    until(lambda: not site.is_diverting())
    site.send("after")
    site.bring_home()


def test_a_rabbitmq_is_the_backlog_of_a_service_bus(
    bus: str, broker: RabbitBroker, maker: Maker
) -> None:
    front = FaultyNamespace(maker.namespace(bus))
    site = maker.site(bus, broker.connection_string(), front, count=1)
    try:
        play_outage(site, front)
        came = site.take()
        assert sorted(names(came)) == ["after", "before", "first", "second"]
    finally:
        maker.forget(site.secondary, site.queues)


def test_a_service_bus_is_the_backlog_of_a_rabbitmq(
    bus: str, broker: RabbitBroker, maker: Maker
) -> None:
    primary = broker.connection_string(name="shop")
    front = FaultyNamespace(maker.namespace(primary))
    front.ask(CreateEntity(QueueDescription(path="orders")), 30)
    try:
        site = maker.site(primary, bus, front, count=1)
        play_outage(site, front)
        came = site.take()
        assert sorted(names(came)) == ["after", "before", "first", "second"]
        origins = {message.application_properties["x-twinbus-origin"] for message in came}
        assert len(origins) == 4
    finally:
        front.ask(DeleteEntity("orders"), 30)
