"""Entities and their descriptions on a real RabbitMQ."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from tests.rabbitmq.conftest import RabbitWorld
from tests.waiting import until
from twinbus import NamespaceManager
from twinbus.entities import EntityStatus, QueueDescription, TopicDescription
from twinbus.errors import (
    EntityAlreadyExistsError,
    InvalidOperationError,
    MessagingError,
    UnsupportedCapabilityError,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import CreateEntity, DeleteEntity, GetEntity, Send, UpdateEntity
from twinbus.testing.rabbitmq import RabbitBroker

# Has a dead-letter worker start for a queue that was deleted; returns when the supervisor ended.
END_DEAD_LETTER_WORKERS = """
Ended = monitor(process, rabbit_fifo_dlx_sup),
supervisor:start_child(rabbit_fifo_dlx_sup, [rabbit_misc:r(<<"/">>, queue, <<"deleted">>)]),
receive {'DOWN', Ended, process, _, _} -> ok end.
"""


def test_a_description_comes_back_as_it_was_created(world: RabbitWorld) -> None:
    wanted = QueueDescription(
        path="contoso/x-servicebus-transfer/0",
        max_delivery_count=7,
        lock_duration=timedelta(seconds=30),
        user_metadata="twinbus-primary Name=contoso;Address=contoso.example:5672/",
    )
    world.ask(CreateEntity(wanted))
    assert world.ask(GetEntity(wanted.path)) == wanted
    with world.manager() as another:
        assert another.get_queue(wanted.path) == wanted


def test_a_queue_is_a_quorum_queue_that_refuses_messages_when_full_and_dead_letters_safely(
    world: RabbitWorld, broker: RabbitBroker
) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders", max_delivery_count=3)))
    listed = broker.node.control("--quiet", "list_queues", "name", "type", "arguments")
    (orders,) = (line for line in listed.splitlines() if line.startswith("orders\t"))
    assert "\tquorum\t" in orders
    for argument in (
        '{"x-dead-letter-strategy","at-least-once"}',
        '{"x-dead-letter-routing-key","orders/$DeadLetterQueue"}',
        '{"x-overflow","reject-publish"}',
        '{"x-delivery-limit",2}',
    ):
        assert argument in orders


def test_a_queue_of_another_program_is_described_by_defaults(
    world: RabbitWorld, channel: Any
) -> None:
    channel.queue_declare("classic")
    channel.exchange_declare("events", "topic")
    try:
        assert world.ask(GetEntity("classic")) == QueueDescription(path="classic")
        assert world.ask(GetEntity("events")) == TopicDescription(path="events")
    finally:
        channel.queue_delete("classic")
        channel.exchange_delete("events")


def test_of_two_programs_that_create_a_queue_one_is_told_that_it_exists(
    world: RabbitWorld,
) -> None:
    outcomes: list[str] = []
    begin = threading.Barrier(4)

    def create(number: int) -> None:
        with world.manager() as manager, suppress(EntityAlreadyExistsError):
            begin.wait()
            description = QueueDescription(path="shared", user_metadata=f"of {number}")
            manager.create_queue(description)
            outcomes.append(f"of {number}")

    threads = [threading.Thread(target=create, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.created.append(CreateEntity(QueueDescription(path="shared")))
    assert [world.ask(GetEntity("shared")).user_metadata] == outcomes


def test_a_creation_that_was_interrupted_can_be_finished_by_the_same_program(
    world: RabbitWorld, channel: Any
) -> None:
    wanted = QueueDescription(path="orders", user_metadata="mine")
    world.ask(CreateEntity(wanted))
    channel.queue_delete("orders")  # as if the program had died before it declared the queue
    world.ask(CreateEntity(wanted))
    assert world.ask(GetEntity("orders")) == wanted


def test_a_creation_that_another_program_left_behind_is_not_taken_over(
    world: RabbitWorld, channel: Any
) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders", user_metadata="theirs")))
    channel.queue_delete("orders")
    with pytest.raises(EntityAlreadyExistsError, match="delete the stream orders/"):
        world.ask(CreateEntity(QueueDescription(path="orders", user_metadata="mine")))
    channel.queue_delete("orders/$Description")


def test_a_deleted_queue_leaves_nothing_behind(world: RabbitWorld, channel: Any) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders", user_metadata="first")))
    world.ask(DeleteEntity("orders"))
    world.ask(CreateEntity(QueueDescription(path="orders", user_metadata="second")))
    assert world.ask(GetEntity("orders")).user_metadata == "second"
    assert channel.queue_declare("orders/$DeadLetterQueue", passive=True).method.message_count == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"requires_session": True},
        {"requires_duplicate_detection": True},
        {"enable_partitioning": True},
        {"forward_to": "elsewhere"},
        {"forward_dead_lettered_messages_to": "elsewhere"},
        {"status": EntityStatus.DISABLED},
    ],
)
def test_settings_that_rabbitmq_does_not_have_are_refused(
    world: RabbitWorld, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOperationError, match="RabbitMQ does not support"):
        world.namespace.ask(CreateEntity(QueueDescription(path="orders", **settings)), 10)


def test_settings_cannot_be_changed(world: RabbitWorld) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders")))
    with pytest.raises(InvalidOperationError, match="after its creation"):
        world.ask(UpdateEntity(QueueDescription(path="orders", max_delivery_count=3)))


def _listing(manager: NamespaceManager) -> object:
    return manager.list_queues()


def _rules(manager: NamespaceManager) -> object:
    return manager.list_rules("news", "all")


@pytest.mark.parametrize("use", [_listing, _rules])
def test_commands_that_rabbitmq_lacks_name_the_capability(
    world: RabbitWorld, use: Callable[[NamespaceManager], object]
) -> None:
    with world.manager() as manager, pytest.raises(UnsupportedCapabilityError):
        use(manager)


def test_a_ping_leaves_nothing_for_a_consumer_that_waits(world: RabbitWorld, channel: Any) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders")))
    got: list[Any] = []
    channel.basic_consume("orders", lambda *delivery: got.append(delivery))
    ping = BrokeredMessage(content_type="application/vnd.ms-servicebus-ping", session_id="s")
    for _ in range(3):
        world.ask(Send("orders", [ping]))
    channel.connection.process_data_events(0.2)
    assert got == []
    for path in ("orders", "orders/$DeadLetterQueue"):
        assert channel.queue_declare(path, passive=True).method.message_count == 0


def test_a_ping_counts_no_delivery_of_messages_that_wait(world: RabbitWorld, channel: Any) -> None:
    world.ask(CreateEntity(QueueDescription(path="orders", max_delivery_count=1)))
    world.ask(Send("orders", [BrokeredMessage(b"a")]))
    ping = BrokeredMessage(content_type="application/vnd.ms-servicebus-ping")
    for _ in range(5):
        world.ask(Send("orders", [ping]))
    method, _, body = channel.basic_get("orders", auto_ack=True)
    assert (body, method.redelivered) == (b"a", False)


def test_a_ping_to_a_topic_reaches_nobody(world: RabbitWorld) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    ping = BrokeredMessage(content_type="application/vnd.ms-servicebus-ping")
    world.ask(Send("news", [ping]))
    with pytest.raises(MessagingError):
        world.ask(Send("nowhere", [ping]))


def test_a_node_of_these_tests_restarts_the_supervisor_of_its_dead_letter_workers(
    world: RabbitWorld, broker: RabbitBroker
) -> None:
    broker.node.evaluate(END_DEAD_LETTER_WORKERS)
    until(lambda: "undefined" not in broker.node.evaluate("whereis(rabbit_fifo_dlx_sup)."))
    world.ask(CreateEntity(QueueDescription(path="orders")))
