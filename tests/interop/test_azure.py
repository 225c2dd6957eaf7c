"""A namespace at `sb://`: what is particular about it, beside the contract that it fulfils."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.credentials import AccessToken
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender

from tests.inside import forget_links, links_of
from tests.interop.azure_site import QUEUE, Site, site
from tests.interop.bus import properties, take_one
from tests.interop.cutting_relay import cutting_relay
from tests.waiting import until
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString, token_for
from twinbus.errors import (
    InvalidArgumentError,
    MessagingError,
    MissingExtraError,
    NamespaceClosedError,
    OperationTimeoutError,
    UnsupportedCapabilityError,
)
from twinbus.limits import UNLIMITED
from twinbus.message import application_values, to_batch, to_messages
from twinbus.namespace import azure_links, azure_receiving, azure_sdk
from twinbus.namespace.azure import CAPABILITIES, AzureNamespace
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Disposition,
    GetEntity,
    GetRuntimeProperties,
    LeaseRange,
    ListKeys,
    Origin,
    Peek,
    ReadMeter,
    Receive,
    ReceiveMode,
    Send,
    Settle,
)
from twinbus.protocol.origins import ORIGIN_PROPERTY, message_id_of, sender_source
from twinbus.servicebus.messages import read_delivered
from twinbus.syphon.desk import Desk
from twinbus.syphon.locked_planner import LockedPlanner
from twinbus.syphon.planner import PlannerSettings

OF_EVERY_TYPE: dict[str, Any] = {
    "str": "grüße",
    "int": -(2**63),
    "float": 0.1,
    "bool": True,
    "bytes": b"\x00\xff",
    "datetime": datetime(2031, 2, 3, 4, 5, 6, 7, tzinfo=UTC),
    "timedelta": timedelta(days=-1, microseconds=1),
    "uuid": UUID(int=2**127 + 1),
}
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("azure")) as made:
        yield made


@pytest.fixture
def path(bus: Site) -> str:
    return bus.fresh_queue()


def sent(bus: Site, path: str) -> list[BrokeredMessage]:
    return to_messages(bus.broker.ask(Peek(path, 0, 1000)))


def started(bus: Site, command: Receive) -> "Future[Any]":
    """Begin to receive; return when the server has the receive."""
    before = bus.broker.snapshot().open_receives
    future = bus.azure.submit(command)
    until(lambda: bus.broker.snapshot().open_receives > before)
    return future


# -- sending ---------------------------------------------------------------------------------------


def test_a_send_fails_if_the_sdk_sent_the_message_without_its_content(
    bus: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_unchanged(session: object) -> None:
        del session

    monkeypatch.setattr(azure_sdk, "_transfer_payloads", leave_unchanged)
    with (
        closing(AzureNamespace(bus.connection, bus.clock)) as azure,
        pytest.raises(MessagingError, match="sent a message without its content") as raised,
    ):
        azure.ask(Send(path, [BrokeredMessage(b"two coffees")]), 10)
    assert not raised.value.is_transient


def test_every_type_of_property_survives_the_way_there_and_back(bus: Site, path: str) -> None:
    message = BrokeredMessage(b"a", application_properties=OF_EVERY_TYPE)
    bus.azure.ask(Send(path, [message]), 10)
    [received] = to_messages(bus.azure.ask(Receive(path), 10))
    assert application_values(received) == application_values(message)
    assert application_values(replace(sent(bus, path)[0], amqp=None)) == application_values(message)


def test_a_message_without_an_id_gets_the_same_one_each_time_it_is_sent(
    bus: Site, path: str
) -> None:
    batch = to_batch([BrokeredMessage(b"a"), BrokeredMessage(b"b")])
    at = batch.schema.get_field_index("message_id")
    batch = batch.set_column(at, batch.schema.field(at), pa.nulls(2, pa.string()))
    source = sender_source(7)
    for _ in range(2):
        bus.azure.ask(Send(path, batch, Origin(source, [3, 4])), 10)
    ids = [message_id_of(source, number) for number in (3, 4)]
    assert [message.message_id for message in sent(bus, path)] == ids * 2


def test_a_message_that_is_brought_home_carries_its_origin(bus: Site, path: str) -> None:
    origin = Origin("shop/x-servicebus-transfer/0#1.ab", [7])
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")], origin), 10)
    bus.azure.ask(Send(path, [BrokeredMessage(b"b")], Origin(sender_source(7), [7])), 10)
    home, ordinary = sent(bus, path)
    assert home.application_properties == {ORIGIN_PROPERTY: "shop/x-servicebus-transfer/0#1.ab:7"}
    assert ordinary.application_properties == {}


def test_a_repeated_send_is_enqueued_once_where_the_entity_detects_duplicates(bus: Site) -> None:
    path = bus.queue(f"once-{uuid4().hex}", requires_duplicate_detection=True)
    command = Send(path, [BrokeredMessage(b"a")], Origin(sender_source(7), [0]))
    for _ in range(2):
        bus.azure.ask(command, 10)
    assert len(sent(bus, path)) == 1


def test_a_batch_that_does_not_fit_one_of_amqp_goes_as_several_in_order(
    bus: Site, path: str
) -> None:
    bodies = [bytes([number]) * 100_000 for number in range(7)]
    bus.azure.ask(Send(path, [BrokeredMessage(body) for body in bodies]), 10)
    assert [message.body for message in sent(bus, path)] == bodies


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_the_batches_of_one_send_share_its_timeout(
    bus: Site, path: str, is_scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = bus.clock.now() + HOUR if is_scheduled else None
    large = BrokeredMessage(b"a" * 100_000, scheduled_enqueue_time_utc=due)
    timeouts: list[float] = []
    operate = ServiceBusSender._do_retryable_operation

    def spy(sender: Any, operation: Any, timeout: float | None = None, **options: Any) -> Any:
        timeouts.append(timeout or 0.0)
        return operate(sender, operation, timeout, **options)

    with closing(AzureNamespace(bus.connection, bus.clock)) as azure:
        azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
        monkeypatch.setattr(ServiceBusSender, "_do_retryable_operation", spy)
        azure.ask(Send(path, [large] * 7), 10)
    assert len(timeouts) > 2
    assert timeouts == sorted(timeouts, reverse=True)
    assert len(set(timeouts)) == len(timeouts)


def test_submitted_sends_to_one_entity_keep_their_order(bus: Site, path: str) -> None:
    futures = [
        bus.azure.submit(Send(path, [BrokeredMessage(str(number).encode())]))
        for number in range(100)
    ]
    for future in futures:
        future.result(10)
    assert [int(message.body) for message in sent(bus, path)] == list(range(100))


def test_a_message_of_sdk_code_keeps_its_types_when_it_is_sent_on(bus: Site, path: str) -> None:
    """As a syphon does that brings a message of SDK code home."""
    home = bus.queue(f"home-{uuid4().hex}")
    text = bus.connection.to_text().replace("CaFile", "X")
    with ServiceBusClient.from_connection_string(text) as client:
        with client.get_queue_sender(path) as sender:
            message = ServiceBusMessage("a", application_properties={"int": 7, "text": "seven"})
            sender.send_messages(message)
        [received] = to_messages(bus.azure.ask(Receive(path), 10))
        bus.azure.ask(Send(home, [received]), 10)
        with client.get_queue_receiver(home) as receiver:
            assert properties(take_one(receiver)) == {"int": 7, "text": "seven"}


# -- receiving -------------------------------------------------------------------------------------


def test_a_long_receive_holds_up_nothing_else(bus: Site, path: str) -> None:
    waiting = [started(bus, Receive(path, wait=HOUR)) for _ in range(3)]
    second = bus.queue(f"other-{uuid4().hex}")
    bus.azure.ask(Send(second, [BrokeredMessage(b"a")]), 10)
    assert bus.azure.ask(Receive(second), 10).num_rows == 1
    assert not any(message.done() for message in waiting)
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")] * 3), 10)
    assert sum(message.result(10).num_rows for message in waiting) == 3


def test_a_message_is_settled_while_another_receive_waits_on_its_link(bus: Site, path: str) -> None:
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    batch = bus.azure.ask(Receive(path), 10)
    waiting = started(bus, Receive(path, wait=HOUR))
    bus.azure.ask(Settle(path, batch.column("lock_token"), Disposition.COMPLETE), 5)
    assert sent(bus, path) == []
    bus.azure.ask(Send(path, [BrokeredMessage(b"b")]), 10)
    assert waiting.result(10).num_rows == 1


def test_a_receive_leaves_no_credit_behind(bus: Site, path: str) -> None:
    assert bus.azure.ask(Receive(path, 10), 10).num_rows == 0
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    assert bus.broker.ask(Receive(path, 10)).num_rows == 1


def test_messages_that_came_before_their_link_failed_are_delivered_and_can_be_settled(
    bus: Site, path: str
) -> None:
    bus.broker.ask(Send(path, [BrokeredMessage(b"a" * 20_000), BrokeredMessage(b"b" * 20_000)]))
    with (
        cutting_relay(bus.connection.port) as relay,
        closing(AzureNamespace(replace(bus.connection, port=relay.port), bus.clock)) as azure,
    ):
        azure.ask(Peek(path, 0, 1), 10)  # opens the connection
        relay.cut_after(40_000)
        batch = azure.ask(Receive(path, 10, wait=HOUR), 20)
        assert relay.cuts == 1
        assert [message.body[:1] for message in to_messages(batch)] == [b"a", b"b"]
        azure.ask(Settle(path, batch.column("lock_token"), Disposition.COMPLETE), 20)
    assert sent(bus, path) == []


def test_messages_are_delivered_even_if_their_link_fails_when_it_releases_others(
    bus: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(payload: Any, **options: Any) -> BrokeredMessage:
        message = read_delivered(payload, **options)
        if message.body.startswith(b"b"):
            raise InvalidArgumentError("as if another client had sent what Twinbus cannot read")
        return message

    monkeypatch.setattr(azure_receiving, "read_delivered", read)
    bus.broker.ask(Send(path, [BrokeredMessage(b"a" * 20_000), BrokeredMessage(b"b" * 20_000)]))
    with (
        cutting_relay(bus.connection.port) as relay,
        closing(AzureNamespace(replace(bus.connection, port=relay.port), bus.clock)) as azure,
    ):
        azure.ask(Peek(path, 0, 1), 10)
        relay.cut_after(40_000)
        batch = azure.ask(Receive(path, 2), 20)
        assert relay.cuts == 1
        azure.ask(Settle(path, batch.column("lock_token"), Disposition.COMPLETE), 20)
    assert [message.body[:1] for message in sent(bus, path)] == [b"b"]


def test_a_receive_that_nobody_waits_for_gives_its_messages_back(bus: Site, path: str) -> None:
    with pytest.raises(OperationTimeoutError):
        bus.azure.ask(Receive(path, wait=HOUR), 0.5)
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    until(lambda: bus.broker.ask(Receive(path)).num_rows == 1)


def test_a_waiting_receive_is_withdrawn_when_the_namespace_closes(bus: Site, path: str) -> None:
    azure = AzureNamespace(bus.connection, bus.clock)
    before = bus.broker.snapshot().open_receives
    waiting = azure.submit(Receive(path, wait=HOUR))
    until(lambda: bus.broker.snapshot().open_receives > before)
    azure.close()
    assert isinstance(waiting.exception(10), NamespaceClosedError)
    assert isinstance(azure.submit(Receive(path)).exception(1), NamespaceClosedError)
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    [message] = to_messages(bus.broker.ask(Receive(path)))
    assert message.delivery_count == 0


def test_a_stopped_syphon_locks_no_message_that_arrives_later(
    bus: Site, path: str, tmp_path: Path
) -> None:
    """Otherwise later messages would overtake it on their way home."""
    azure, desk = AzureNamespace(bus.connection, bus.clock), Desk(tmp_path)
    settings = PlannerSettings(owner="syphon", queues=(path,), retry_interval=timedelta(seconds=1))
    planner = LockedPlanner(azure, settings, desk, bus.clock)
    before = bus.broker.snapshot().open_receives
    assert planner.next_tasks(0.0) == []
    until(lambda: bus.broker.snapshot().open_receives > before)
    desk.ask_to_stop()
    assert planner.next_tasks(0.0) == []
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    assert bus.broker.ask(Receive(path)).num_rows == 1


def test_an_idle_link_is_closed(bus: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    azure = AzureNamespace(bus.connection, bus.clock)
    mode = ReceiveMode.RECEIVE_AND_DELETE
    azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    azure.ask(Receive(path, mode=mode), 10)
    assert links_of(azure).sweep() == 2
    monkeypatch.setattr(azure_links, "AZURE_IDLE_S", 0.0)
    assert links_of(azure).sweep() == 0
    azure.ask(Send(path, [BrokeredMessage(b"b")]), 10)
    azure.close()


# -- management ------------------------------------------------------------------------------------


def test_a_backlog_queue_is_made_exactly_as_specified(bus: Site) -> None:
    wanted = describe_backlog_queue(PrimaryIdentity("contoso", "contoso.example:5671"), 3)
    assert bus.azure.ask(CreateEntity(wanted), 10) == wanted
    made = bus.broker.ask(GetEntity(wanted.path))
    assert made == wanted
    assert isinstance(made, QueueDescription)
    assert made.max_size_in_megabytes == 5120
    assert made.max_delivery_count == 2**31 - 1
    assert made.default_message_time_to_live == made.auto_delete_on_idle == UNLIMITED
    assert made.lock_duration == timedelta(minutes=1)
    assert made.enable_dead_lettering_on_message_expiration


def test_a_queue_that_is_created_anew_has_another_birth(bus: Site) -> None:
    path = bus.queue(f"reborn-{uuid4().hex}")
    births = [bus.azure.ask(GetRuntimeProperties(path), 10).created_at_utc]
    bus.azure.ask(DeleteEntity(path), 10)
    bus.clock.advance(timedelta(minutes=1))
    bus.azure.ask(CreateEntity(QueueDescription(path=path)), 10)
    births.append(bus.azure.ask(GetRuntimeProperties(path), 10).created_at_utc)
    assert births[0] < births[1]


@pytest.mark.parametrize("command", [LeaseRange(QUEUE, "me", 1), ReadMeter(), ListKeys()])
def test_a_command_that_service_bus_cannot_execute_is_refused_by_name(
    bus: Site, command: Any
) -> None:
    with pytest.raises(UnsupportedCapabilityError) as caught:
        bus.azure.ask(command, 10)
    assert Capability[str(caught.value.capability)] not in CAPABILITIES


def test_factory_and_manager_are_reached_by_connection_string_alone(bus: Site, path: str) -> None:
    text = bus.connection.to_text()
    clock = bus.clock
    with (
        MessagingFactory.from_connection_string(text, clock=clock) as factory,
        NamespaceManager.from_connection_string(text, clock=clock) as manager,
    ):
        client = factory.create_queue_client(path)
        client.send(BrokeredMessage(b"a"))
        assert manager.get_runtime_properties(path).active_message_count == 1
        message = client.receive(timedelta(seconds=5))
        assert message is not None
        message.complete()
        assert manager.get_runtime_properties(path).active_message_count == 0


# -- ways in ---------------------------------------------------------------------------------------


def test_tls_with_an_authority_of_ones_own(bus: Site, path: str) -> None:
    connection = replace(bus.connection, tls=True)
    with AzureNamespace(connection, bus.clock) as azure:
        azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
        assert azure.ask(Receive(path, wait=timedelta(seconds=5)), 10).num_rows == 1


def passes(connection: ConnectionString, bus: Site, path: str) -> None:
    """Send, browse, receive and settle a message by a connection string."""
    with AzureNamespace(ConnectionString.parse(connection.to_text()), bus.clock) as azure:
        azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
        assert azure.ask(Peek(path), 10).num_rows == 1
        batch = azure.ask(Receive(path, wait=timedelta(seconds=5)), 10)
        azure.ask(Settle(path, batch.column("lock_token"), Disposition.COMPLETE), 10)
    assert not sent(bus, path)


@pytest.mark.parametrize(
    ("tls", "first"), [(False, b"GET /$servicebus/websocket"), (True, b"\x16")], ids=["ws", "wss"]
)
def test_websockets_by_the_transport_type(bus: Site, path: str, tls: bool, first: bytes) -> None:
    pytest.importorskip("websocket", reason="websocket-client is not installed")
    with cutting_relay(bus.connection.port) as relay:
        passes(replace(bus.connection, port=relay.port, tls=tls, uses_websockets=True), bus, path)
        assert relay.first_words
        assert all(word.startswith(first) for word in relay.first_words)


@pytest.mark.parametrize(
    ("by_websocket", "first"), [(False, b"AMQP"), (True, b"GET /")], ids=["amqp", "websocket"]
)
def test_a_custom_endpoint_is_a_gateway_to_the_namespace(
    bus: Site, path: str, by_websocket: bool, first: bytes
) -> None:
    pytest.importorskip("websocket", reason="websocket-client is not installed")
    with cutting_relay(bus.connection.port) as relay:
        gateway = f"localhost:{relay.port}"
        nowhere = replace(bus.connection, port=1, custom_endpoint=gateway)
        passes(replace(nowhere, uses_websockets=by_websocket), bus, path)
        assert relay.first_words
        assert all(word.startswith(first) for word in relay.first_words)


def test_a_proxy_of_the_environment_is_used_with_websockets(
    bus: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("websocket", reason="websocket-client is not installed")
    monkeypatch.setenv("no_proxy", "nowhere.example")  # otherwise local hosts need no proxy
    with cutting_relay(bus.connection.port, is_proxy=True) as relay:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{relay.port}")
        connection = replace(bus.connection, tls=True, uses_websockets=True)
        passes(connection, bus, path)
        by_amqp = len(relay.first_words)
        with AzureNamespace(connection, bus.clock) as azure:
            assert azure.ask(GetRuntimeProperties(path), 10).active_message_count == 0
        assert 0 < by_amqp < len(relay.first_words)
        assert all(word.startswith(b"CONNECT localhost:") for word in relay.first_words)


def test_a_token_in_place_of_the_key(bus: Site, path: str) -> None:
    from twinbus.connection import sign_token  # noqa: PLC0415 - of this test alone

    expires_s = bus.clock.wall_us() // 1_000_000 + 600
    host = f"sb://{bus.connection.address}/"
    token = sign_token(host, bus.connection.key_name, bus.connection.key, expires_s)
    connection = replace(bus.connection, key="", key_name="", token=token)
    with AzureNamespace(connection) as azure:
        azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
        assert azure.ask(GetRuntimeProperties(path), 10).active_message_count == 1


def test_an_identity_of_entra_needs_its_package(bus: Site) -> None:
    connection = replace(bus.connection, key="", key_name="", uses_entra=True)
    with pytest.raises(MissingExtraError, match="azure-identity"):
        AzureNamespace(connection)


class Identity:
    """An identity as azure-identity has it; a Twinbus server accepts only tokens of its keys."""

    key: ConnectionString

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        assert scopes == ("https://servicebus.azure.net//.default",)
        expires_s = int(time.time()) + 3600
        return AccessToken(token_for(self.key, expires_s), expires_s)


def test_an_identity_of_entra_sends_receives_and_settles(
    bus: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("azure.identity")
    package.DefaultAzureCredential = Identity  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "azure.identity", package)
    monkeypatch.setattr(Identity, "key", bus.connection, raising=False)
    passes(replace(bus.connection, key="", key_name="", uses_entra=True), bus, path)


def test_no_error_shows_the_key(bus: Site) -> None:
    connection = replace(bus.connection, port=1)
    with AzureNamespace(connection) as azure:
        began = time.monotonic()
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
            azure.ask(Send(QUEUE, [BrokeredMessage(b"a")]), 10)
        assert time.monotonic() - began < 10
    assert connection.key not in str(caught.value)
    assert connection.key not in repr(caught.value.__cause__)


def test_a_forked_process_has_links_of_its_own(bus: Site, path: str) -> None:
    bus.azure.ask(Send(path, [BrokeredMessage(b"a")]), 10)
    old = links_of(bus.azure)
    forget_links(bus.azure)
    assert links_of(bus.azure) is not old
    bus.azure.ask(Send(path, [BrokeredMessage(b"b")]), 10)
    for link in old.close():
        link.close()
    assert len(sent(bus, path)) == 2
