"""One real broker for all tests here; each test leaves it empty."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pika
import pytest
import trustme

from tests.rabbitmq.brokers import require_rabbitmq, watched_broker
from twinbus import MessagingFactory, NamespaceManager
from twinbus.connection import ConnectionString
from twinbus.entities import QueueDescription, TopicDescription
from twinbus.errors import EntityNotFoundError
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import Command, CreateEntity, DeleteEntity
from twinbus.testing.rabbitmq import RabbitBroker, free_ports

SYNC_S = 2  # RabbitMQ loses a quorum queue that was declared less than 0.5 s before a kill -9


@dataclass(frozen=True)
class TlsDoor:
    """The TLS listener of the broker, and the authority that signed its certificate."""

    port: int
    ca_file: Path


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsDoor:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for number, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(str(folder / "cert.pem"), append=bool(number))
    (port,) = free_ports(1)
    return TlsDoor(port, folder / "ca.pem")


@pytest.fixture(scope="session")
def broker(tls: TlsDoor) -> Iterator[RabbitBroker]:
    require_rabbitmq()
    folder = tls.ca_file.parent
    settings = (
        f"listeners.ssl.1 = 127.0.0.1:{tls.port}",
        f"ssl_options.cacertfile = {folder / 'ca.pem'}",
        f"ssl_options.certfile = {folder / 'cert.pem'}",
        f"ssl_options.keyfile = {folder / 'key.pem'}",
    )
    with watched_broker(settings=settings) as broker:
        yield broker


@pytest.fixture(scope="session")
def fragile(broker: RabbitBroker) -> Iterator[RabbitBroker]:
    """Return a second broker, which tests kill; it has a queue `orders`."""
    del broker  # it says whether there is one at all
    with watched_broker() as fragile:
        with RabbitNamespace(ConnectionString.parse(fragile.connection_string())) as namespace:
            namespace.ask(CreateEntity(QueueDescription(path="orders")), 30)
        time.sleep(SYNC_S)  # nothing outside RabbitMQ tells when it has written the queue
        yield fragile


@dataclass
class RabbitWorld:
    """A namespace on the broker; the entities that a test creates are deleted after it."""

    namespace: RabbitNamespace
    connection_string: str
    created: list[CreateEntity] = field(default_factory=list)

    def ask(self, command: Command[Any]) -> Any:
        if isinstance(command, CreateEntity):
            self.created.append(command)
        return self.namespace.ask(command, 30)

    def factory(self, **settings: Any) -> MessagingFactory:
        return MessagingFactory.from_connection_string(self.connection_string, **settings)

    def manager(self, **settings: Any) -> NamespaceManager:
        return NamespaceManager.from_connection_string(self.connection_string, **settings)

    def clean(self) -> None:
        topics_last = sorted(
            self.created, key=lambda created: isinstance(created.description, TopicDescription)
        )
        for command in topics_last:
            try:
                self.namespace.ask(DeleteEntity(command.description.path), 30)
            except EntityNotFoundError:
                continue


@pytest.fixture
def world(broker: RabbitBroker) -> Iterator[RabbitWorld]:
    text = broker.connection_string()
    with RabbitNamespace(ConnectionString.parse(text)) as namespace:
        world = RabbitWorld(namespace, text)
        try:
            yield world
        finally:
            world.clean()


@pytest.fixture
def channel(broker: RabbitBroker) -> Iterator[Any]:
    """Return a channel of plain pika: how other programs see the broker."""
    where = pika.ConnectionParameters("127.0.0.1", broker.node.port)
    with closing(pika.BlockingConnection(where)) as connection:
        yield connection.channel()
