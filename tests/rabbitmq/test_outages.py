"""What goes wrong with a RabbitMQ, and what callers hear."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, RetryPolicy
from twinbus.connection import ConnectionString
from twinbus.entities import QueueDescription
from twinbus.errors import (
    CommunicationError,
    EntityNotFoundError,
    InvalidArgumentError,
    MessagingError,
    OperationTimeoutError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import to_messages
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import (
    Command,
    CreateEntity,
    Disposition,
    GetEntity,
    Receive,
    Send,
    Settle,
)
from twinbus.testing.rabbitmq import GUEST, RabbitBroker

PING = BrokeredMessage(content_type=PING_CONTENT_TYPE)
ONCE = RetryPolicy.once(timedelta(seconds=10))


@pytest.fixture
def namespace(fragile: RabbitBroker) -> Iterator[RabbitNamespace]:
    with RabbitNamespace(ConnectionString.parse(fragile.connection_string())) as namespace:
        yield namespace
        until(lambda: not drained(namespace))


def drained(namespace: RabbitNamespace) -> list[bytes]:
    """Return everything that waits, and complete it."""
    batch = namespace.ask(Receive("orders", 1000), 20)
    if batch.num_rows:
        namespace.ask(Settle("orders", batch.column("lock_token"), Disposition.COMPLETE), 20)
    return [message.body for message in to_messages(batch)]


def send(namespace: RabbitNamespace, body: bytes, timeout_s: float = 10) -> None:
    namespace.ask(Send("orders", [BrokeredMessage(body)]), timeout_s)


def works(namespace: RabbitNamespace, command: Command[Any]) -> bool:
    try:
        namespace.ask(command, 5)
    except MessagingError:
        return False
    return True


# -- the caller or its configuration is wrong ------------------------------------------------------


def test_a_wrong_password_is_not_authorized_and_is_not_shown(fragile: RabbitBroker) -> None:
    text = fragile.connection_string(password="open-sesame")  # noqa: S106 - wrong on purpose
    with (
        RabbitNamespace(ConnectionString.parse(text)) as namespace,
        pytest.raises(UnauthorizedError) as refusal,
    ):
        send(namespace, b"a")
    assert "open-sesame" not in str(refusal.value)


def test_a_password_may_come_from_a_file_that_changes(
    fragile: RabbitBroker, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text("wrong\n")
    text = fragile.connection_string().replace(f"Password={GUEST}", f"PasswordFile={secret}")
    with RabbitNamespace(ConnectionString.parse(text)) as namespace:
        with pytest.raises(UnauthorizedError):
            namespace.ask(GetEntity("orders"), 10)
        secret.write_text(f"{GUEST}\n")
        until(lambda: works(namespace, GetEntity("orders")))
    with (
        RabbitNamespace(ConnectionString.parse(text.replace("password", "missing"))) as namespace,
        pytest.raises(InvalidArgumentError, match="cannot be read"),
    ):
        namespace.ask(GetEntity("orders"), 10)


def test_a_virtual_host_that_does_not_exist_is_named(fragile: RabbitBroker) -> None:
    text = fragile.connection_string(vhost="nowhere")
    with (
        RabbitNamespace(ConnectionString.parse(text)) as namespace,
        pytest.raises(EntityNotFoundError, match="nowhere"),
    ):
        send(namespace, b"a")


def test_a_virtual_host_that_is_deleted_in_mid_traffic_is_not_found(
    fragile: RabbitBroker,
) -> None:
    fragile.node.evaluate(
        'rabbit_vhost:add(<<"gone">>, <<"test">>), rabbit_auth_backend_internal:set_permissions('
        '<<"guest">>, <<"gone">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>).'
    )
    text = fragile.connection_string(vhost="gone")
    with RabbitNamespace(ConnectionString.parse(text)) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")), 10)
        send(namespace, b"a")
        fragile.node.evaluate('rabbit_vhost:delete(<<"gone">>, <<"test">>).')

        def raised_kind() -> type[MessagingError]:
            with pytest.raises(MessagingError) as refusal:
                send(namespace, b"b")
            return type(refusal.value)

        until(lambda: raised_kind() is EntityNotFoundError)


# -- the broker is in trouble ----------------------------------------------------------------------


@contextmanager
def memory_alarm(broker: RabbitBroker) -> Iterator[None]:
    """Make the broker believe that it has no memory left."""
    broker.node.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.00001).")
    try:
        yield
    finally:
        broker.node.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.8).")


def test_a_memory_alarm_is_a_busy_broker_that_is_still_received_from(
    fragile: RabbitBroker, namespace: RabbitNamespace
) -> None:
    send(namespace, b"before")
    with memory_alarm(fragile):

        def is_busy() -> bool:
            try:
                send(namespace, b"during", 1)
            except ServerBusyError as busy:
                return busy.facts["scope"] == ""
            except OperationTimeoutError:
                return False
            return False

        until(is_busy)
        assert drained(namespace)[0] == b"before"
        with pytest.raises(MessagingError):
            namespace.ask(Send("orders", [PING]), 1)
    until(lambda: works(namespace, Send("orders", [BrokeredMessage(b"after")])))


def test_a_killed_broker_is_heard_of_at_once_and_used_again_when_it_is_back(
    fragile: RabbitBroker, namespace: RabbitNamespace
) -> None:
    send(namespace, b"before")
    fragile.node.kill()
    try:
        with pytest.raises(CommunicationError):
            send(namespace, b"lost", 30)
        with pytest.raises(CommunicationError) as refusal:
            send(namespace, b"during", 30)
        assert refusal.value.facts["outcome"] == "not accepted"
        with pytest.raises(CommunicationError):
            namespace.ask(Send("orders", [PING]), 30)
    finally:
        fragile.node.start()
    until(lambda: works(namespace, Send("orders", [PING])))
    until(lambda: works(namespace, Send("orders", [BrokeredMessage(b"after")])))
    bodies = until(lambda: drained(namespace))
    assert (bodies[0], bodies[-1]) == (b"before", b"after")


def test_a_paused_broker_costs_a_try_and_a_factory_rides_it_out(
    fragile: RabbitBroker, namespace: RabbitNamespace
) -> None:
    send(namespace, b"before")
    fragile.node.pause()
    try:
        with pytest.raises(OperationTimeoutError):
            send(namespace, b"ambiguous", 0.3)
    finally:
        fragile.node.resume()
    with MessagingFactory.from_connection_string(fragile.connection_string()) as factory:
        factory.create_message_sender("orders").send(BrokeredMessage(b"after"))
    found: list[bytes] = []

    def are_both_there() -> bool:
        found.extend(drained(namespace))
        return {b"before", b"after"} <= set(found)

    until(are_both_there)


def test_the_first_host_that_answers_is_used(fragile: RabbitBroker) -> None:
    text = fragile.connection_string()
    nobody = "127.0.0.1:1,127.0.0.1:2,"
    with NamespaceManager.from_connection_string(
        text.replace("amqp://", f"amqp://{nobody}"), retry_policy=ONCE
    ) as manager:
        assert manager.get_queue("orders").path == "orders"
    with (
        NamespaceManager.from_connection_string(
            "Endpoint=amqp://127.0.0.1:1,127.0.0.1:2;Name=nobody", retry_policy=ONCE
        ) as manager,
        pytest.raises(CommunicationError, match="cannot be reached"),
    ):
        manager.get_queue("orders")
