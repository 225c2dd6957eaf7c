"""Sends to a real RabbitMQ: durable, confirmed, and refused with the right error."""

import logging
import os
import threading
from concurrent.futures import Future, wait
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.rabbitmq.conftest import RabbitWorld, TlsDoor
from tests.waiting import until
from twinbus import BrokeredMessage, RetryPolicy
from twinbus.connection import ConnectionString
from twinbus.entities import (
    CorrelationFilter,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import (
    CommunicationError,
    EntityNotFoundError,
    MessageSizeExceededError,
    MessagingError,
    OperationTimeoutError,
    QuotaExceededError,
    UnsupportedCapabilityError,
)
from twinbus.message import to_messages
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    GetRuntimeProperties,
    Origin,
    Receive,
    Send,
)
from twinbus.protocol.origins import message_id_of, sender_source
from twinbus.testing.rabbitmq import RabbitBroker

SENDER = sender_source(7)


def make(world: RabbitWorld, path: str = "orders", **settings: Any) -> str:
    world.ask(CreateEntity(QueueDescription(path=path, **settings)))
    return path


def received(world: RabbitWorld, path: str = "orders", count: int = 100) -> list[BrokeredMessage]:
    return to_messages(world.ask(Receive(path, count)))


def drained(world: RabbitWorld) -> list[BrokeredMessage]:
    """Receive until the queue is empty: a receive need not return all messages."""
    messages: list[BrokeredMessage] = []
    while batch := received(world):
        messages += batch
    return messages


def test_messages_are_persistent_and_other_programs_read_them(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    sent = BrokeredMessage(b"order", message_id="m1", application_properties={"count": 7})
    world.ask(Send("orders", [sent], Origin(SENDER, [3])))
    _, properties, body = channel.basic_get("orders", auto_ack=True)
    assert (body, properties.message_id, properties.delivery_mode) == (b"order", "m1", 2)
    assert properties.headers["count"] == 7
    assert properties.headers["x-twinbus-origin"] == f"{SENDER}:3"


def test_messages_of_other_programs_are_received(world: RabbitWorld, channel: Any) -> None:
    make(world)
    channel.basic_publish("", "orders", b"plain")
    (came,) = until(lambda: received(world))
    assert came.body == b"plain"


def test_queues_of_other_programs_are_used_as_they_are(world: RabbitWorld, channel: Any) -> None:
    channel.queue_declare("classic", durable=True)
    try:
        world.ask(Send("classic", [BrokeredMessage(b"a")]))
        assert [message.body for message in received(world, "classic")] == [b"a"]
    finally:
        channel.queue_delete("classic")


def test_a_message_without_an_id_gets_one_by_its_origin(world: RabbitWorld) -> None:
    make(world)
    (message,) = to_messages(_batch_without_id())
    batch = _batch_without_id()
    world.ask(Send("orders", batch, Origin(SENDER, [3])))
    world.ask(Send("orders", batch, Origin(SENDER, [3])))
    first, second = received(world)
    assert first.message_id == second.message_id == message_id_of(SENDER, 3)
    assert first.body == message.body


def _batch_without_id() -> Any:
    import pyarrow as pa  # noqa: PLC0415

    from twinbus.message import MESSAGE_SCHEMA  # noqa: PLC0415

    row = {"body": b"a", "properties": []}
    return pa.RecordBatch.from_pylist([row], MESSAGE_SCHEMA)


def test_a_message_that_is_brought_home_carries_the_name_of_its_first_sender(
    world: RabbitWorld,
) -> None:
    make(world)
    home = Origin("backlog/x-servicebus-transfer/0#1.ab", [5], Origin(SENDER, [9]))
    world.ask(Send("orders", [BrokeredMessage(b"a")], home))
    unknown = Origin("backlog/x-servicebus-transfer/0#1.ab", [6])
    world.ask(Send("orders", [BrokeredMessage(b"b")], unknown))
    names = [message.application_properties["x-twinbus-origin"] for message in received(world)]
    assert names == [f"{SENDER}:9", "backlog/x-servicebus-transfer/0#1.ab:6"]


def test_every_field_survives_the_broker(world: RabbitWorld) -> None:
    make(world)
    sent = BrokeredMessage(
        b"\0\xff",
        correlation_id="c" * 300,
        content_type="application/json",
        subject="s",
        to="t",
        reply_to="amq.rabbitmq.reply-to",
        reply_to_session_id="r",
        partition_key="p",
        time_to_live=timedelta(hours=1, microseconds=1),
        application_properties={
            "CC": "x",
            "when": datetime(2026, 1, 1, tzinfo=UTC),
            "key": UUID(int=3),
            "ratio": float("inf"),
        },
    )
    world.ask(Send("orders", [sent]))
    (came,) = received(world)
    for name in (
        "body",
        "message_id",
        "correlation_id",
        "content_type",
        "subject",
        "to",
        "reply_to",
        "reply_to_session_id",
        "partition_key",
        "time_to_live",
        "application_properties",
    ):
        assert getattr(came, name) == getattr(sent, name), name


@pytest.mark.parametrize(
    "fields",
    [{"session_id": "s"}, {"scheduled_enqueue_time_utc": datetime(2030, 1, 1, tzinfo=UTC)}],
)
def test_what_rabbitmq_cannot_do_is_refused_by_its_name(
    world: RabbitWorld, fields: dict[str, Any]
) -> None:
    make(world)
    with pytest.raises(UnsupportedCapabilityError, match="RabbitMQ does not support"):
        world.ask(Send("orders", [BrokeredMessage(b"a", **fields)]))


def test_many_sends_are_in_flight_at_once_and_arrive_in_order(world: RabbitWorld) -> None:
    make(world)
    replies = [
        world.namespace.submit(Send("orders", [BrokeredMessage(str(n).encode())]))
        for n in range(600)
    ]
    wait(replies, timeout=30)
    assert all(reply.exception() is None for reply in replies)
    bodies = [message.body for message in received(world, count=600)]
    assert bodies == [str(n).encode() for n in range(600)]


def test_a_full_queue_refuses_with_quota_exceeded(world: RabbitWorld) -> None:
    make(world, max_size_in_megabytes=1)
    half = BrokeredMessage(bytes(600_000))

    def is_refused() -> bool:
        try:
            world.ask(Send("orders", [half]))
        except QuotaExceededError:
            return True
        return False

    until(is_refused)  # the limit of a quorum queue is noticed a message late
    enqueued = world.ask(GetRuntimeProperties("orders")).active_message_count
    with pytest.raises(QuotaExceededError):
        world.ask(Send("orders", [half]))
    assert world.ask(GetRuntimeProperties("orders")).active_message_count == enqueued


def test_a_batch_that_is_accepted_in_part_says_so(world: RabbitWorld) -> None:
    make(world, max_size_in_megabytes=1)
    batch = [BrokeredMessage(bytes(100_000)) for _ in range(200)]
    with pytest.raises(QuotaExceededError) as refused:
        world.ask(Send("orders", batch))
    enqueued = world.ask(GetRuntimeProperties("orders")).active_message_count
    assert 0 < enqueued < 200
    accepted = refused.value.facts["accepted"]
    assert isinstance(accepted, dict)
    assert refused.value.facts["outcome"] == "unknown"
    assert [message.message_id for message in drained(world)] == [
        batch[row].message_id for row in sorted(accepted)
    ]


def test_a_message_with_a_long_id_that_cannot_be_routed_is_not_acknowledged(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    long = "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 128  # more than 255 bytes
    world.ask(Send("orders", [BrokeredMessage(b"a", message_id=long)]))
    (came,) = received(world)
    assert came.message_id == long
    channel.queue_delete("orders")
    with pytest.raises(EntityNotFoundError):
        world.ask(Send("orders", [BrokeredMessage(b"b", message_id=long)]))


def test_a_queue_that_is_deleted_in_mid_traffic_is_not_found(
    world: RabbitWorld, channel: Any
) -> None:
    make(world)
    world.ask(Send("orders", [BrokeredMessage(b"a")]))
    channel.queue_delete("orders")
    with pytest.raises(EntityNotFoundError):
        world.ask(Send("orders", [BrokeredMessage(b"b")]))
    channel.queue_declare("orders", durable=True)
    world.ask(Send("orders", [BrokeredMessage(b"c")]))
    assert [message.body for message in received(world)] == [b"c"]


def test_a_topic_that_is_deleted_in_mid_traffic_is_not_found(
    world: RabbitWorld, channel: Any
) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    world.ask(Send("news", [BrokeredMessage(b"a")]))
    channel.exchange_delete("news")
    with pytest.raises(EntityNotFoundError):
        world.ask(Send("news", [BrokeredMessage(b"b")]))


def test_deleting_one_queue_under_load_disturbs_no_other(world: RabbitWorld, channel: Any) -> None:
    make(world)
    make(world, "others")
    outcomes: dict[str, list[BaseException | None]] = {"orders": [], "others": []}

    def send(path: str) -> None:
        client = factory.create_message_sender(path)
        for n in range(200):
            try:
                client.send(BrokeredMessage(str(n).encode()))
            except MessagingError as error:
                outcomes[path].append(error)
            else:
                outcomes[path].append(None)

    with world.factory() as factory:
        threads = [threading.Thread(target=send, args=(path,)) for path in outcomes]
        for thread in threads:
            thread.start()
        until(lambda: len(outcomes["orders"]) > 20)
        channel.queue_delete("orders")
        for thread in threads:
            thread.join()
    assert outcomes["others"] == [None] * 200
    assert {type(error) for error in outcomes["orders"]} == {type(None), EntityNotFoundError}
    came = {message.body for message in received(world, "others", 1000)}
    assert came == {str(n).encode() for n in range(200)}


def test_a_message_that_the_broker_finds_too_large_is_named(
    world: RabbitWorld, broker: RabbitBroker
) -> None:
    make(world)
    broker.node.evaluate("application:set_env(rabbit, max_message_size, 1000).")
    try:
        with RabbitNamespace(ConnectionString.parse(world.connection_string)) as namespace:
            with pytest.raises(MessageSizeExceededError):
                namespace.ask(Send("orders", [BrokeredMessage(bytes(2000))]), 10)
            namespace.ask(Send("orders", [BrokeredMessage(bytes(500))]), 10)
    finally:
        broker.node.evaluate("application:set_env(rabbit, max_message_size, 134217728).")


def test_a_batch_with_a_message_that_the_broker_finds_too_large_may_be_there_in_part(
    world: RabbitWorld, broker: RabbitBroker
) -> None:
    make(world)
    broker.node.evaluate("application:set_env(rabbit, max_message_size, 1000).")
    try:
        with RabbitNamespace(ConnectionString.parse(world.connection_string)) as namespace:
            batch = [BrokeredMessage(bytes(size)) for size in (10, 10, 2000)]
            with pytest.raises(MessageSizeExceededError) as refused:
                namespace.ask(Send("orders", batch), 10)
    finally:
        broker.node.evaluate("application:set_env(rabbit, max_message_size, 134217728).")
    assert refused.value.facts["outcome"] == "unknown"
    assert world.ask(GetRuntimeProperties("orders")).active_message_count == 2


def test_a_message_that_one_subscription_refused_may_be_in_the_others(
    world: RabbitWorld, channel: Any
) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    large = SubscriptionDescription(topic_path="news", name="large")
    world.ask(CreateEntity(large))
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    channel.queue_declare("small", durable=True, arguments=full)
    try:
        channel.queue_bind("small", "news", arguments={"x-match": "all"})
        world.ask(Send("news", [BrokeredMessage(b"a")]))
        with pytest.raises(QuotaExceededError) as refused:
            world.ask(Send("news", [BrokeredMessage(b"b")]))
    finally:
        channel.queue_delete("small")
    assert refused.value.facts["outcome"] == "unknown"
    assert [message.body for message in received(world, large.path)] == [b"a", b"b"]


def test_properties_that_fit_no_frame_are_refused_and_hurt_nobody(world: RabbitWorld) -> None:
    make(world)
    large = BrokeredMessage(b"", application_properties={"large": "x" * 200_000})
    with pytest.raises(MessageSizeExceededError, match="into the body"):
        world.ask(Send("orders", [large]))
    world.ask(Send("orders", [BrokeredMessage(b"a")]))


def test_a_filter_on_subject_and_properties_selects_messages(world: RabbitWorld) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    chosen = CorrelationFilter(subject="sport", properties={"country": "fi", "size": 3})
    finnish = SubscriptionDescription(topic_path="news", name="finnish")
    world.ask(CreateEntity(finnish, RuleDescription("chosen", chosen)))
    matching: dict[str, Any] = {"country": "fi", "size": 3}
    for subject, properties in (
        ("sport", matching),
        ("sport", {**matching, "country": "se"}),
        ("music", matching),
    ):
        sent = BrokeredMessage(b"a", subject=subject, application_properties=properties)
        world.ask(Send("news", [sent]))
    (came,) = received(world, finnish.path)
    assert (came.subject, dict(came.application_properties)) == ("sport", matching)


def test_an_exchange_of_another_program_routes_by_the_subject(
    world: RabbitWorld, channel: Any
) -> None:
    channel.exchange_declare("weather", "topic", durable=True)
    channel.queue_declare("finnish", durable=True)
    try:
        channel.queue_bind("finnish", "weather", "weather.fi.*")
        for subject in ("weather.se.stockholm", "weather.fi.oulu"):
            world.ask(Send("weather", [BrokeredMessage(b"a", subject=subject)]))
        assert [message.subject for message in received(world, "finnish")] == ["weather.fi.oulu"]
    finally:
        channel.queue_delete("finnish")
        channel.exchange_delete("weather")


def test_messages_that_no_subscription_selects_are_dropped_with_one_log_line(
    world: RabbitWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "twinbus.rabbitmq")
    world.ask(CreateEntity(TopicDescription(path="news")))
    for _ in range(3):
        world.ask(Send("news", [BrokeredMessage(b"a")]))
    assert caplog.messages == ["No subscription of news selected a message; it was dropped"]


@pytest.mark.parametrize(
    "rule",
    [
        SqlFilter("a = 1"),
        CorrelationFilter(message_id="m"),
        CorrelationFilter(properties={"ratio": 0.5}),
        CorrelationFilter(properties={"x-country": "fi"}),
        CorrelationFilter(properties={"CC": "fi"}),  # such a header has another name on the way
        CorrelationFilter(properties={"twinbus-subject": "sport"}),
    ],
)
def test_filters_that_headers_cannot_express_are_refused(world: RabbitWorld, rule: Any) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    description = SubscriptionDescription(topic_path="news", name="chosen")
    with pytest.raises(UnsupportedCapabilityError, match="RabbitMQ does not support"):
        world.namespace.ask(CreateEntity(description, RuleDescription("r", rule)), 10)


def test_a_send_whose_caller_gave_up_is_never_published_later(
    world: RabbitWorld, broker: RabbitBroker
) -> None:
    make(world)
    with RabbitNamespace(ConnectionString.parse(world.connection_string)) as namespace:
        namespace.ask(Send("orders", [BrokeredMessage(b"first")]), 10)
        broker.node.pause()
        try:
            given_up = [
                namespace.submit(Send("orders", [BrokeredMessage(b"x" * 10_000)]))
                for _ in range(300)  # more than the window
            ]
            with pytest.raises(OperationTimeoutError):
                namespace.ask(Send("orders", [BrokeredMessage(b"late")]), 0.2)
            until(lambda: all(reply.done() for reply in given_up))
        finally:
            broker.node.resume()
        namespace.ask(Send("orders", [BrokeredMessage(b"last")]), 30)
    bodies = [message.body for message in received(world, count=1000)]
    assert b"late" not in bodies
    assert (bodies[0], bodies[-1]) == (b"first", b"last")


def test_the_pipelined_sender_of_a_factory_works(world: RabbitWorld) -> None:
    make(world)
    with world.factory() as factory:
        with factory.create_message_sender("orders").pipelined() as sender:
            sends: list[Future[None]] = [
                sender.send(BrokeredMessage(str(n).encode())) for n in range(1000)
            ]
        assert all(send.exception() is None for send in sends)
    assert len(received(world, count=1000)) == 1000


def test_an_entity_that_does_not_exist_is_named_with_the_next_step(world: RabbitWorld) -> None:
    with (
        world.factory(retry_policy=RetryPolicy.once()) as factory,
        pytest.raises(EntityNotFoundError, match="Create it first"),
    ):
        factory.create_message_sender("nowhere").send(BrokeredMessage(b"a"))


def test_deleting_a_topic_with_subscriptions_is_refused(world: RabbitWorld) -> None:
    world.ask(CreateEntity(TopicDescription(path="news")))
    world.ask(CreateEntity(SubscriptionDescription(topic_path="news", name="all")))
    with pytest.raises(MessagingError, match="delete the subscriptions"):
        world.ask(DeleteEntity("news"))


def test_a_broker_is_reached_through_tls(world: RabbitWorld, tls: TlsDoor) -> None:
    make(world)
    text = f"Endpoint=amqps://localhost:{tls.port}/;Name=shop;CaFile={tls.ca_file}"
    with RabbitNamespace(ConnectionString.parse(text)) as namespace:
        namespace.ask(Send("orders", [BrokeredMessage(b"a")]), 20)
    assert [message.body for message in received(world)] == [b"a"]


def test_a_certificate_of_a_stranger_is_refused(world: RabbitWorld, tls: TlsDoor) -> None:
    make(world)
    text = f"Endpoint=amqps://localhost:{tls.port}/;Name=shop"
    with (
        RabbitNamespace(ConnectionString.parse(text)) as namespace,
        pytest.raises(CommunicationError, match=r"(?i)certificate"),
    ):
        namespace.ask(Send("orders", [BrokeredMessage(b"a")]), 20)


def test_a_forked_process_has_connections_of_its_own(world: RabbitWorld) -> None:
    make(world)
    with RabbitNamespace(ConnectionString.parse(world.connection_string)) as namespace:
        namespace.ask(Send("orders", [BrokeredMessage(b"before")]), 20)
        child = os.fork()
        if not child:
            try:
                namespace.ask(Send("orders", [BrokeredMessage(b"child")]), 20)
            except BaseException:  # noqa: BLE001 - told by the exit code
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        namespace.ask(Send("orders", [BrokeredMessage(b"parent")]), 20)
    assert status == 0
    assert [message.body for message in received(world)] == [b"before", b"child", b"parent"]
