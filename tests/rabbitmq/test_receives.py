"""Receives and settlements on a real RabbitMQ."""

import socket
import socketserver
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pika
import pyarrow as pa
import pytest

from tests.rabbitmq.conftest import RabbitWorld
from tests.rabbitmq.test_sends import make, received
from tests.waiting import until
from twinbus import BrokeredMessage
from twinbus.connection import ConnectionString
from twinbus.entities import dead_letter_path
from twinbus.errors import (
    CommunicationError,
    EntityNotFoundError,
    MessageLockLostError,
    NamespaceClosedError,
    OperationTimeoutError,
    UnsupportedCapabilityError,
)
from twinbus.message import to_messages, tokens_of
from twinbus.namespace.rabbitmq import runner
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import (
    Disposition,
    GetRuntimeProperties,
    Receive,
    ReceiveMode,
    Send,
    Settle,
)
from twinbus.testing.rabbitmq import RabbitBroker

HOUR = timedelta(hours=1)


def send(world: RabbitWorld, *bodies: str, path: str = "orders") -> None:
    world.ask(Send(path, [BrokeredMessage(body.encode()) for body in bodies]))


def settle(
    world: RabbitWorld, disposition: Disposition, *messages: BrokeredMessage, path: str = "orders"
) -> None:
    tokens = tokens_of(message.lock_token for message in messages if message.lock_token)
    world.ask(Settle(path, tokens, disposition))


def bodies(batch: pa.RecordBatch) -> list[bytes]:
    return [message.body for message in to_messages(batch)]


def waiting(world: RabbitWorld, path: str = "orders") -> int:
    return int(world.ask(GetRuntimeProperties(path)).active_message_count)


def poll(world: RabbitWorld, channel: Any, **settings: Any) -> "Future[pa.RecordBatch]":
    """Begin a receive that waits, and return when the broker knows about it."""
    reply = world.namespace.submit(Receive("orders", wait=HOUR, **settings))
    until(lambda: channel.queue_declare("orders", passive=True).method.consumer_count)
    return reply


def test_a_waiting_receive_ends_when_a_message_arrives(world: RabbitWorld, channel: Any) -> None:
    make(world)
    reply = poll(world, channel)
    send(world, "a")
    assert bodies(reply.result(10)) == [b"a"]


def test_a_waiting_receive_does_not_hold_up_other_commands(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    make(world, "others")
    reply = poll(world, channel)
    send(world, "a", path="others")
    assert [message.body for message in received(world, "others")] == [b"a"]
    assert not reply.done()


def test_a_receive_returns_empty_when_its_wait_is_over(world: RabbitWorld) -> None:
    make(world)
    assert bodies(world.ask(Receive("orders", wait=timedelta(milliseconds=50)))) == []


def test_a_receive_takes_nothing_that_it_did_not_ask_for(world: RabbitWorld, channel: Any) -> None:
    make(world)
    reply = poll(world, channel, max_messages=2)
    send(world, "a", "b", "c")
    first = bodies(reply.result(10))
    rest = [message.body for message in received(world)]
    assert first + rest == [b"a", b"b", b"c"]
    assert len(first) <= 2


def test_headers_count_towards_the_size_of_a_receive(world: RabbitWorld) -> None:
    make(world)
    large = {"large": "x" * 100_000}
    for _ in range(3):
        world.ask(Send("orders", [BrokeredMessage(b"a", application_properties=large)]))
    assert world.ask(Receive("orders", 10, max_bytes=150_000)).num_rows == 1
    assert world.ask(Receive("orders", 10)).num_rows == 2


def test_a_first_receive_asks_for_no_more_large_messages_than_it_may_return(
    world: RabbitWorld,
) -> None:
    make(world)
    for _ in range(4):
        world.ask(Send("orders", [BrokeredMessage(bytes(100_000)) for _ in range(10)]))
    first = world.ask(Receive("orders", 2000, max_bytes=500_000))
    assert 4 <= first.num_rows <= 5
    rest: list[BrokeredMessage] = []
    while len(rest) < 40 - first.num_rows:
        rest += received(world)
    assert [message.delivery_count for message in rest] == [0] * len(rest)


def test_a_waiting_receive_fails_when_its_queue_is_deleted(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    reply = poll(world, channel)
    channel.queue_delete("orders")
    with pytest.raises(EntityNotFoundError):
        reply.result(10)


def test_a_receive_whose_caller_gave_up_leaves_the_messages(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    with pytest.raises(OperationTimeoutError):
        world.namespace.ask(Receive("orders", wait=HOUR), 0.2)
    until(lambda: not channel.queue_declare("orders", passive=True).method.consumer_count)
    send(world, "a")
    (message,) = received(world)
    assert (message.body, message.delivery_count) == (b"a", 0)


def test_closing_ends_waiting_receives_and_gives_locked_messages_back(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    send(world, "a")
    with RabbitNamespace(ConnectionString.parse(world.connection_string)) as namespace:
        namespace.ask(Receive("orders"), 10)
        reply = namespace.submit(Receive("orders", wait=HOUR))
        until(lambda: channel.queue_declare("orders", passive=True).method.consumer_count)
    with pytest.raises(NamespaceClosedError):
        reply.result(0)
    until(lambda: waiting(world) == 1)


def test_a_lock_lasts_as_long_as_the_connection(world: RabbitWorld, broker: RabbitBroker) -> None:
    make(world)
    send(world, "a")
    (message,) = received(world)
    broker.node.evaluate(
        '[rabbit_networking:close_connection(P, "test") || P <- rabbit_networking:connections()].'
    )
    with pytest.raises(MessageLockLostError, match="delivers them again"):
        settle(world, Disposition.COMPLETE, message)
    (again,) = until(lambda: received(world))
    assert (again.body, again.delivery_count) == (b"a", 1)


def test_completed_messages_are_gone_although_the_connection_ends(world: RabbitWorld) -> None:
    make(world)
    send(world, *map(str, range(50)))
    with RabbitNamespace(ConnectionString.parse(world.connection_string)) as namespace:
        batch = namespace.ask(Receive("orders", 20), 10)
        assert batch.num_rows == 20
        tokens = batch.column("lock_token").slice(5, 10)
        namespace.ask(Settle("orders", tokens, Disposition.COMPLETE), 10)
    until(lambda: waiting(world) == 40)
    left = [message.body for message in received(world)]
    assert sorted(map(int, left)) == [*range(5), *range(15, 50)]


def test_too_many_failed_deliveries_dead_letter_a_message(world: RabbitWorld) -> None:
    make(world, max_delivery_count=2)
    send(world, "a")
    for count in range(2):
        (message,) = until(lambda: received(world))
        assert message.delivery_count == count
        settle(world, Disposition.ABANDON, message)
    (dead,) = until(lambda: received(world, dead_letter_path("orders")))
    assert (dead.body, dead.dead_letter_reason) == (b"a", "MaxDeliveryCountExceeded")
    assert dead.dead_letter_source == "orders"
    assert received(world) == []


def test_expired_messages_go_to_the_dead_letter_queue(world: RabbitWorld) -> None:
    make(world)
    world.ask(Send("orders", [BrokeredMessage(b"a", time_to_live=timedelta(milliseconds=10))]))
    (dead,) = until(lambda: received(world, dead_letter_path("orders")))
    assert (dead.body, dead.dead_letter_reason) == (b"a", "TTLExpiredException")


def test_a_message_of_a_foreign_queue_can_be_dead_lettered(
    world: RabbitWorld, channel: Any
) -> None:
    channel.queue_declare("classic", durable=True)
    try:
        send(world, "a", path="classic")
        (message,) = received(world, "classic")
        assert message.lock_token is not None
        world.ask(
            Settle("classic", tokens_of([message.lock_token]), Disposition.DEAD_LETTER, "bad")
        )
        (dead,) = received(world, dead_letter_path("classic"))
        assert (dead.body, dead.dead_letter_reason) == (b"a", "bad")
        assert received(world, "classic") == []
    finally:
        channel.queue_delete("classic")
        channel.queue_delete(dead_letter_path("classic"))


def test_an_existing_queue_for_dead_letters_is_used_as_it_is(
    world: RabbitWorld, channel: Any
) -> None:
    channel.queue_declare(dead_letter_path("orders"), durable=True)  # not a quorum queue
    make(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, *received(world))
    assert [message.body for message in received(world, dead_letter_path("orders"))] == [b"a"]


def test_a_foreign_message_without_an_id_stays_until_its_dead_letter_is_enqueued(
    world: RabbitWorld, channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead-letter queue is deleted between its declaration and the publication."""
    make(world)
    channel.basic_publish("", "orders", b"first")
    settle(world, Disposition.DEAD_LETTER, *until(lambda: received(world)))  # opens the channel

    async def delete_instead(_connection: Any, path: str) -> None:
        channel.queue_delete(dead_letter_path(path))

    monkeypatch.setattr(runner, "declare_dead_letters", delete_instead)
    channel.basic_publish("", "orders", b"second")
    (message,) = until(lambda: received(world))
    with pytest.raises(EntityNotFoundError):
        settle(world, Disposition.DEAD_LETTER, message)
    settle(world, Disposition.ABANDON, message)
    assert [message.body for message in received(world)] == [b"second"]


@pytest.mark.parametrize(("size", "kept"), [(120_000, "reason"), (130_500, None)])
def test_a_message_with_large_headers_is_dead_lettered_without_what_does_not_fit(
    world: RabbitWorld, size: int, kept: str | None
) -> None:
    make(world)
    large = BrokeredMessage(b"a", application_properties={"large": "x" * size})
    world.ask(Send("orders", [large]))
    (message,) = received(world)
    tokens = tokens_of([message.lock_token] if message.lock_token else [])
    reason = "reason" if kept else "r" * 4096
    world.ask(Settle("orders", tokens, Disposition.DEAD_LETTER, reason, "\u20ac" * 4096))
    (dead,) = received(world, dead_letter_path("orders"))
    assert (dead.body, dead.dead_letter_source) == (b"a", "orders")
    assert (dead.dead_letter_reason, dead.dead_letter_error_description) == (kept, None)


class MarkedProperties(pika.BasicProperties):  # type: ignore[misc]
    """Properties with the flags that stand for no property; RabbitMQ passes them on."""

    def encode(self) -> list[bytes]:
        return [b"\x00\x83\x01a"]


def test_flags_without_a_property_do_not_keep_a_message_from_its_receivers(
    world: RabbitWorld, channel: Any
) -> None:
    channel.queue_declare("classic", durable=True, arguments={"x-queue-type": "classic"})
    try:
        channel.basic_publish("", "classic", b"marked", MarkedProperties())
        (message,) = until(lambda: received(world, "classic"))
        assert (message.body, message.message_id) == (b"marked", "a")
    finally:
        channel.queue_delete("classic")


class EncodedProperties(pika.BasicProperties):  # type: ignore[misc]
    """Properties with headers that pika cannot write."""

    def __init__(self, headers: bytes) -> None:
        super().__init__()
        self._headers = headers

    def encode(self) -> list[bytes]:
        return [struct.pack(">HL", 0x2000, len(self._headers)), self._headers]


def table(content: bytes) -> bytes:
    return struct.pack(">cL", b"F", len(content)) + content


def test_any_value_of_another_program_is_received_and_dead_lettered(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    price = b"\x05price" + struct.pack(">cd", b"d", 1.5)
    late = b"\x04late" + struct.pack(">cQ", b"T", 1_800_000_000_000)  # milliseconds, by mistake
    deep = b"V"
    for _ in range(1_000):
        deep = table(b"\x01k" + deep)
    headers = price + late + b"\x03odd" + table(late + price) + b"\x04deep" + deep
    channel.basic_publish("", "orders", b"a", EncodedProperties(headers))
    (message,) = until(lambda: received(world))
    assert message.application_properties["price"] == 1.5
    assert message.application_properties["odd"] == '{"late": null, "price": 1.5}'
    settle(world, Disposition.DEAD_LETTER, message)
    (dead,) = received(world, dead_letter_path("orders"))
    assert dead.application_properties == message.application_properties


def test_a_dead_letter_goes_nowhere_else_and_may_be_the_message_of_another_user(
    world: RabbitWorld, broker: RabbitBroker, channel: Any
) -> None:
    make(world)
    channel.queue_declare("copies", durable=True)
    broker.node.control("add_user", "other", "secret")
    broker.node.control("set_permissions", "other", ".*", ".*", ".*")
    try:
        parameters = pika.ConnectionParameters(
            "127.0.0.1", broker.node.port, credentials=pika.PlainCredentials("other", "secret")
        )
        with pika.BlockingConnection(parameters) as connection:
            properties = pika.BasicProperties(headers={"CC": ["copies"]}, user_id="other")
            connection.channel().basic_publish("", "orders", b"a", properties)
        until(lambda: channel.basic_get("copies", auto_ack=True)[0])
        (message,) = until(lambda: received(world))
        settle(world, Disposition.DEAD_LETTER, message)
        (dead,) = received(world, dead_letter_path("orders"))
        assert dead.body == b"a"
        assert channel.basic_get("copies", auto_ack=True)[0] is None
    finally:
        channel.queue_delete("copies")
        broker.node.control("delete_user", "other")


def test_messages_received_and_deleted_are_gone(world: RabbitWorld) -> None:
    make(world)
    send(world, *map(str, range(20)))
    taken = world.ask(Receive("orders", 15, mode=ReceiveMode.RECEIVE_AND_DELETE))
    assert taken.num_rows == 15
    assert taken.column("lock_token").null_count == 15
    until(lambda: waiting(world) == 5)


def test_deferring_is_refused_by_its_name(world: RabbitWorld) -> None:
    make(world)
    send(world, "a")
    (message,) = received(world)
    with pytest.raises(UnsupportedCapabilityError, match="deferred messages"):
        settle(world, Disposition.DEFER, message)
    settle(world, Disposition.COMPLETE, message)


def test_many_waiting_receives_get_each_message_once(world: RabbitWorld) -> None:
    make(world)
    polls = [world.namespace.submit(Receive("orders", wait=HOUR)) for _ in range(30)]
    send(world, *map(str, range(30)))
    got = [int(body) for reply in polls for body in bodies(reply.result(20))]
    assert sorted(got) == list(range(30))


def test_a_client_of_the_factory_receives_and_settles(world: RabbitWorld) -> None:
    make(world)
    with world.factory() as factory:
        client = factory.create_queue_client("orders")
        client.send(BrokeredMessage(b"a"))
        message = client.receive(timedelta(seconds=10))
        assert message is not None
        message.complete()
        began = time.monotonic()
        assert client.receive(timedelta(milliseconds=100)) is None
        assert time.monotonic() - began < 60
    assert waiting(world) == 0


class DamagingRelay(socketserver.ThreadingTCPServer):
    """Relays connections to a broker, and replaces bytes of what the broker sends."""

    daemon_threads = True

    def __init__(self, port: int, old: bytes, new: bytes) -> None:
        super().__init__(("127.0.0.1", 0), DamagedConnection)
        self.port, self.old, self.new = port, old, new


class DamagedConnection(socketserver.BaseRequestHandler):
    server: DamagingRelay

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as remote:
            threading.Thread(target=self._forward, args=(remote,), daemon=True).start()
            while data := self.request.recv(65536):
                remote.sendall(data)
            remote.shutdown(socket.SHUT_RDWR)

    def _forward(self, remote: socket.socket) -> None:
        with suppress(OSError):
            while data := remote.recv(65536):
                self.request.sendall(data.replace(self.server.old, self.server.new))
            self.request.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x06marker", b"\x07marker"),  # a name of a header is longer than its table
        (b"marked body\xce", b"marked body\x00"),  # a frame without its end
    ],
)
def test_malformed_bytes_end_the_connection_and_the_broker_delivers_the_message_again(
    world: RabbitWorld, broker: RabbitBroker, old: bytes, new: bytes
) -> None:
    make(world)
    sent = BrokeredMessage(b"marked body", application_properties={"marker": 1})
    world.ask(Send("orders", [sent]))
    with DamagingRelay(broker.node.port, old, new) as relay:
        threading.Thread(target=relay.serve_forever, args=(0.01,), daemon=True).start()
        where = f"Endpoint=amqp://127.0.0.1:{relay.server_address[1]};Name=shop"
        with RabbitNamespace(ConnectionString.parse(where)) as namespace:
            with pytest.raises(CommunicationError, match="connection to RabbitMQ ended"):
                namespace.ask(Receive("orders", 10), 20)
            until(lambda: waiting(world) == 1)
            world.ask(Send("orders", [BrokeredMessage(b"well")]))
        relay.shutdown()
    assert bodies(world.ask(Receive("orders", 10, HOUR / 3600))) == [b"marked body", b"well"]
