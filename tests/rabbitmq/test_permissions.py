"""A user of RabbitMQ with no more permissions than the page about RabbitMQ names."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rabbitmq.conftest import RabbitWorld
from tests.rabbitmq.test_pairing import Maker, embedded, maker, names
from tests.rabbitmq.test_sends import make
from twinbus import BrokeredMessage
from twinbus.connection import ConnectionString
from twinbus.entities import TopicDescription, dead_letter_path
from twinbus.errors import UnauthorizedError
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    Disposition,
    GetRuntimeProperties,
    Receive,
    Send,
    Settle,
)
from twinbus.testing import Fault, FaultyNamespace
from twinbus.testing.rabbitmq import RabbitBroker

__all__ = ["maker"]  # a fixture
DEFAULT_EXCHANGE = r"amq\.default"
NOTHING = "^$"
PING = BrokeredMessage(content_type=PING_CONTENT_TYPE)
Grant = Callable[[str, str, str], str]


@pytest.fixture(scope="module")
def grant(broker: RabbitBroker) -> Iterator[Grant]:
    """Return a function that gives a user permissions, and returns its connection string.

    All tests share the user: each command of RabbitMQ takes seconds.
    """
    broker.node.control("add_user", "app", "secret")

    def give(configure: str, write: str, read: str) -> str:
        patterns = (f"^({pattern})$" for pattern in (configure, write, read))
        broker.node.control("set_permissions", "app", *patterns)
        return broker.connection_string(user="app", password="secret")  # noqa: S106 - of a test

    yield give
    broker.node.control("delete_user", "app")


def ask(where: str, *commands: Command[Any]) -> Any:
    """Execute commands as a user, and return the last reply."""
    reply = None
    with RabbitNamespace(ConnectionString.parse(where)) as namespace:
        for command in commands:
            reply = namespace.ask(command, 20)
    return reply


def test_a_sender_to_a_queue_needs_to_write_to_the_default_exchange(
    world: RabbitWorld, grant: Grant
) -> None:
    make(world)
    order = Send("orders", [BrokeredMessage(b"a")])
    ask(grant(NOTHING, DEFAULT_EXCHANGE, NOTHING), order)
    with pytest.raises(UnauthorizedError):
        ask(grant(NOTHING, "orders", NOTHING), order)


def test_a_ping_of_a_user_who_may_not_read_the_queue_succeeds(
    world: RabbitWorld, grant: Grant
) -> None:
    make(world)
    ask(grant(NOTHING, DEFAULT_EXCHANGE, NOTHING), Send("orders", [PING]))


def test_a_sender_to_an_exchange_needs_the_default_exchange_for_pings_only(
    world: RabbitWorld, grant: Grant
) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    ask(grant(NOTHING, "news", NOTHING), Send("news", [BrokeredMessage(b"a")]))
    with pytest.raises(UnauthorizedError):
        ask(grant(NOTHING, "news", NOTHING), Send("news", [PING]))
    ask(grant(NOTHING, f"news|{DEFAULT_EXCHANGE}", NOTHING), Send("news", [PING]))


def test_a_receiver_needs_to_read_and_for_dead_letters_also_to_write(
    world: RabbitWorld, grant: Grant
) -> None:
    make(world)
    world.ask(Send("orders", [BrokeredMessage(b"a"), BrokeredMessage(b"b")]))

    def settle_next(where: str, disposition: Disposition) -> None:
        with RabbitNamespace(ConnectionString.parse(where)) as namespace:
            batch = namespace.ask(Receive("orders"), 20)
            namespace.ask(Settle("orders", batch.column("lock_token"), disposition), 20)

    settle_next(grant(NOTHING, NOTHING, "orders"), Disposition.COMPLETE)
    settle_next(grant(NOTHING, DEFAULT_EXCHANGE, "orders"), Disposition.DEAD_LETTER)
    dead = world.ask(GetRuntimeProperties(dead_letter_path("orders")))
    assert dead.active_message_count == 1


def test_a_pairing_needs_its_backlog_queues_and_the_default_exchange(
    world: RabbitWorld, grant: Grant, maker: Maker, tmp_path: Path
) -> None:
    queues = "shop/x-servicebus-transfer/.*"
    primary = embedded(tmp_path / "shop")
    front = FaultyNamespace(maker.namespace(primary))
    secondary = grant(queues, f"{queues}|{DEFAULT_EXCHANGE}", queues)
    site = maker.site(primary, secondary, front, count=1)
    try:
        front.inject(Fault.UNAVAILABLE)
        site.send("diverted")
        front.heal()
        site.bring_home()
        assert names(site.take()) == ["diverted"]
    finally:
        maker.forget(world.namespace, site.queues)
