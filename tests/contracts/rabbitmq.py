"""A RabbitMQ broker as the contract suite sees it: every test leaves it empty."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from twinbus.connection import ConnectionString
from twinbus.entities import TopicDescription
from twinbus.errors import EntityNotFoundError
from twinbus.namespace.contract import Namespace
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command, CreateEntity, DeleteEntity
from twinbus.testing.rabbitmq import RabbitBroker


class Recorded:
    """A namespace that remembers the entities it was asked to create."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self.created: list[CreateEntity] = []

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self._inner.capabilities

    def submit(self, command: Command[Any]) -> "Future[Any]":
        self._note(command)
        return self._inner.submit(command)

    def ask(self, command: Command[Any], timeout_s: float | None = None) -> Any:
        self._note(command)
        return self._inner.ask(command, timeout_s)

    def _note(self, command: Command[Any]) -> None:
        if isinstance(command, CreateEntity):
            self.created.append(command)

    def close(self) -> None:
        self._inner.close()


@contextmanager
def rabbitmq(broker: RabbitBroker) -> Iterator[Namespace]:
    """Give a namespace on the broker, and delete what was created in it."""
    connection = ConnectionString.parse(broker.connection_string())
    with RabbitNamespace(connection) as inner:
        recorded = Recorded(inner)
        try:
            yield recorded
        finally:
            inner.close()  # messages that are still locked are requeued
            if recorded.created:
                with RabbitNamespace(connection) as cleaner:
                    _delete(cleaner, recorded.created)


def _delete(namespace: RabbitNamespace, created: list[CreateEntity]) -> None:
    """Delete entities, topics after their subscriptions."""
    paths = {
        command.description.path: isinstance(command.description, TopicDescription)
        for command in created
    }
    for path in sorted(paths, key=lambda path: paths[path]):
        with suppress(EntityNotFoundError):
            namespace.ask(DeleteEntity(path), 30)
