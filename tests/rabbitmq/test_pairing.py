"""Pairing across RabbitMQ and Twinbus: sends go on during an outage, and all come home."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.rabbitmq.test_outages import memory_alarm
from tests.waiting import until
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    tracing,
)
from twinbus.connection import ConnectionString
from twinbus.entities import QueueDescription, backlog_queue_path
from twinbus.errors import (
    EntityNotFoundError,
    InvalidOperationError,
    UnauthorizedError,
    UnsupportedCapabilityError,
)
from twinbus.message import to_messages
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.namespace.rabbitmq import publishing
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.pairing.health import HealthState
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Disposition,
    GetEntity,
    Receive,
    Settle,
)
from twinbus.syphon.carrier import Carrier, Range
from twinbus.syphon.locked_carrier import LockedCarrier
from twinbus.testing import Fault, FaultyNamespace, Mover
from twinbus.testing.rabbitmq import RabbitBroker

PATIENCE = RetryPolicy(operation_timeout=timedelta(seconds=20), try_timeout=timedelta(seconds=2))
SOON = timedelta(seconds=1)


@dataclass
class Site:
    """A paired factory, and the two namespaces behind it."""

    primary: Namespace
    secondary: Namespace
    factory: MessagingFactory
    pairing: Any
    queues: list[str] = field(default_factory=list)

    def send(self, *bodies: str, path: str = "orders", **fields: Any) -> None:
        sender = self.factory.create_message_sender(path)
        for body in bodies:
            sender.send(BrokeredMessage(body.encode(), **fields))

    def is_diverting(self, path: str = "orders") -> bool:
        return bool(self.factory.courier.route.is_diverting(path))

    def bring_home(self) -> None:
        """Carry the backlog home as a worker of the syphon does."""
        for queue in self.queues:
            if Capability.RANGES in self.secondary.capabilities:
                while Mover(self.primary, self.secondary).move(queue):
                    pass
                continue
            carrier = LockedCarrier(Carrier(self.primary, self.secondary), self.secondary, 10_000)
            [carried] = carrier.carry(queue, [Range.under_lock("")])
            assert not carried.failures
            assert not carried.unread

    def take(self, path: str = "orders") -> list[BrokeredMessage]:
        """Receive and complete everything at the primary."""
        found: list[BrokeredMessage] = []
        while True:
            batch = self.primary.ask(Receive(path, 1000), 20)
            if not batch.num_rows:
                return found
            self.primary.ask(Settle(path, batch.column("lock_token"), Disposition.COMPLETE), 20)
            found += to_messages(batch)


@dataclass
class Maker:
    """Makes sites, and cleans up after them."""

    stack: ExitStack

    def namespace(self, text: str) -> Namespace:
        connection = ConnectionString.parse(text)
        namespace = open_namespace(connection)
        self.stack.callback(namespace.close)
        return namespace

    def site(
        self, primary: str, secondary: str, front: Any = None, count: int = 2, **options: Any
    ) -> Site:
        """Pair two namespaces; `front` stands before the primary, and may fail."""
        where = ConnectionString.parse(primary)
        factory = MessagingFactory(
            front or open_namespace(where),
            name=where.name,
            address=where.address,
            retry_policy=PATIENCE,
        )
        self.stack.callback(factory.close)
        backup = MessagingFactory.from_connection_string(secondary, retry_policy=PATIENCE)
        manager = NamespaceManager.from_connection_string(secondary, retry_policy=PATIENCE)
        self.stack.callback(backup.close)
        self.stack.callback(manager.close)
        pairing = factory.pair_namespace(
            SendAvailabilityPairedNamespaceOptions(
                manager,
                backup,
                backlog_queue_count=count,
                failover_interval=timedelta(0),
                ping_primary_interval=SOON,
                **options,
            )
        )
        site = Site(self.namespace(primary), self.namespace(secondary), factory, pairing)
        site.queues = [backlog_queue_path(where.name, index) for index in range(count)]
        return site

    def forget(self, namespace: Namespace, queues: list[str]) -> None:
        for path in queues:
            namespace.ask(DeleteEntity(path), 30)


@pytest.fixture
def maker() -> Iterator[Maker]:
    with ExitStack() as stack:
        yield Maker(stack)


def embedded(folder: Path) -> str:
    with NamespaceManager.from_connection_string(f"Endpoint=embedded://{folder}") as manager:
        manager.create_queue("orders", exist_ok=True)
    return f"Endpoint=embedded://{folder}"


def names(messages: list[BrokeredMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


def outage(site: Site, broker: RabbitBroker) -> None:
    """Kill the primary's broker, send meanwhile, and start it again."""
    site.send("before")
    broker.node.kill()
    try:
        site.send("first", "second", "third")
        assert site.is_diverting()
    finally:
        broker.node.start()
    until(lambda: not site.is_diverting())
    site.send("after")


def test_sends_go_on_while_a_rabbitmq_primary_is_down(
    fragile: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    site = maker.site(fragile.connection_string(name="shop"), embedded(tmp_path / "backup"))
    outage(site, fragile)
    site.bring_home()
    came = site.take()
    assert Counter(names(came)) == Counter(["before", "first", "second", "third", "after"])


def test_a_rabbitmq_primary_keeps_the_order_with_preserve_order(
    broker: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    primary = broker.connection_string(name="shop")
    front = FaultyNamespace(maker.namespace(primary))
    front.ask(CreateEntity(QueueDescription(path="orders")), 30)
    try:
        site = maker.site(primary, embedded(tmp_path / "backup"), front, preserve_order=True)
        site.send("1")
        front.inject(Fault.UNAVAILABLE)
        site.send("2", "3")
        front.heal()
        until(lambda: site.pairing.status()[0].state is HealthState.RETURNING)
        site.send("4")
        site.bring_home()
        until(lambda: not site.is_diverting())
        site.send("5")
        assert names(site.take()) == ["1", "2", "3", "4", "5"]
    finally:
        front.ask(DeleteEntity("orders"), 30)


def test_a_rabbitmq_secondary_is_refused_with_preserve_order(
    broker: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    """Its count of messages leaves out those that a syphon has locked: they are not home."""
    with pytest.raises(UnsupportedCapabilityError, match="browsing"):
        maker.site(embedded(tmp_path / "shop"), broker.connection_string(), preserve_order=True)


def test_a_rabbitmq_is_the_backlog_of_another_rabbitmq(
    broker: RabbitBroker, fragile: RabbitBroker, maker: Maker
) -> None:
    site = maker.site(fragile.connection_string(name="shop"), broker.connection_string())
    try:
        outage(site, fragile)
        site.bring_home()
        came = site.take()
        assert Counter(names(came)) == Counter(["before", "first", "second", "third", "after"])
        for message in came:
            assert "x-ms-path" not in message.application_properties
            assert str(message.application_properties["x-twinbus-origin"]).startswith("sender/")
    finally:
        maker.forget(site.secondary, site.queues)


def test_a_message_diverted_to_a_rabbitmq_has_one_trace(
    broker: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    primary = embedded(tmp_path / "shop")
    front = FaultyNamespace(maker.namespace(primary))
    site = maker.site(primary, broker.connection_string(), front, count=1)
    tracing.enable(provider)
    try:
        front.inject(Fault.UNAVAILABLE)
        site.send("traced")
        front.heal()
        site.bring_home()
        orders = site.factory.create_queue_client("orders")
        received = orders.receive(wait=timedelta(seconds=5))
        assert received is not None
        received.complete()
    finally:
        tracing.disable()
        maker.forget(site.secondary, site.queues)
    found = [span for span in spans.get_finished_spans() if not span.name.startswith("ping")]
    steps = ["divert", "send", "drain", "receive", "complete"]
    assert [span.name for span in found] == [f"{step} orders" for step in steps]
    assert len({span.context.trace_id for span in found if span.context}) == 1
    assert found[0].attributes is not None
    assert found[0].attributes["messaging.system"] == "rabbitmq"


def test_the_copies_of_a_send_that_was_ambiguous_carry_the_same_origin(
    broker: RabbitBroker, fragile: RabbitBroker, maker: Maker
) -> None:
    site = maker.site(fragile.connection_string(name="shop"), broker.connection_string(), count=1)
    try:
        site.send("before")  # opens the channel
        fragile.node.pause()
        try:
            site.send("ambiguous")  # diverted, and on the way to the paused primary
        finally:
            fragile.node.resume()
        until(lambda: not site.is_diverting())
        site.bring_home()
        came = site.take()
        assert sorted(names(came)) == ["ambiguous", "ambiguous", "before"]
        origins = Counter(message.application_properties["x-twinbus-origin"] for message in came)
        assert sorted(origins.values()) == [1, 2]
    finally:
        maker.forget(site.secondary, site.queues)


def test_a_twinbus_primary_gets_each_message_once_from_a_rabbitmq_backlog(
    broker: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    primary = embedded(tmp_path / "shop")
    front = FaultyNamespace(maker.namespace(primary))
    site = maker.site(primary, broker.connection_string(), front, count=1)
    try:
        front.inject(Fault.UNAVAILABLE)
        site.send(*map(str, range(20)), application_properties={"ratio": 0.5})
        site.send("in a session", session_id="s")
        site.send("for an hour", time_to_live=timedelta(hours=1))
        front.heal()
        with RabbitNamespace(ConnectionString.parse(broker.connection_string())) as worker:
            for queue in site.queues:  # a worker that is killed after it sent
                site_of_worker = Site(site.primary, worker, site.factory, None, [queue])
                _carry_and_die(site_of_worker, queue)
        site.bring_home()
        came = site.take()
        assert sorted(names(came)) == sorted([*map(str, range(20)), "in a session", "for an hour"])
        by_name = {message.body.decode(): message for message in came}
        assert by_name["in a session"].session_id == "s"
        assert by_name["for an hour"].time_to_live == timedelta(hours=1)
        assert dict(by_name["3"].application_properties) == {"ratio": 0.5}
    finally:
        maker.forget(site.secondary, site.queues)


def _carry_and_die(site: Site, queue: str) -> None:
    """Send everything home, and lose the connection before anything is settled."""

    class Dying:
        capabilities = site.secondary.capabilities
        id = ""

        def submit(self, command: Any) -> Any:
            if isinstance(command, Settle):
                raise KeyboardInterrupt
            return site.secondary.submit(command)

        def ask(self, command: Any, timeout_s: float | None = None) -> Any:
            return site.secondary.ask(command, timeout_s)

        def close(self) -> None:
            """Leave the connection open: it is lost later."""

    carrier = LockedCarrier(Carrier(site.primary, Dying()), Dying(), 10_000)
    with pytest.raises(KeyboardInterrupt):
        carrier.carry(queue, [Range.under_lock("")])


def test_the_backlog_of_another_primary_is_refused(
    broker: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    first = embedded(tmp_path / "shop")
    site = maker.site(first, broker.connection_string(), count=1)
    try:
        owner = site.secondary.ask(GetEntity(site.queues[0]), 10).user_metadata
        assert "twinbus-primary Name=shop" in str(owner)
        other = embedded(tmp_path / "another" / "shop")
        with pytest.raises(InvalidOperationError, match="belongs to another primary"):
            maker.site(other, broker.connection_string(), count=1)
    finally:
        maker.forget(site.secondary, site.queues)


def test_a_long_memory_alarm_is_an_outage(
    fragile: RabbitBroker, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "RABBITMQ_BLOCKED_S", 0.1)
    site = maker.site(fragile.connection_string(name="shop"), embedded(tmp_path / "backup"))
    site.send("before")
    with memory_alarm(fragile):

        def is_diverting() -> bool:
            """Send; RabbitMQ blocks a connection at its first message after the alarm."""
            site.send("during")
            return site.is_diverting()

        until(is_diverting)
    until(lambda: not site.is_diverting())
    site.send("after")
    site.bring_home()
    assert {"before", "during", "after"} == set(names(site.take()))


def test_a_wrong_password_is_no_outage(fragile: RabbitBroker, maker: Maker, tmp_path: Path) -> None:
    primary = fragile.connection_string(name="shop", password="wrong")  # noqa: S106 - on purpose
    site = maker.site(primary, embedded(tmp_path / "backup"))
    with pytest.raises(UnauthorizedError):
        site.send("a")
    assert not site.is_diverting()


def test_a_queue_that_is_deleted_is_no_outage(
    fragile: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    site = maker.site(fragile.connection_string(name="shop"), embedded(tmp_path / "backup"))
    with pytest.raises(EntityNotFoundError):
        site.send("a", path="nowhere")
    assert not site.is_diverting("nowhere")


def test_a_full_queue_is_an_outage_of_that_queue(
    fragile: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    primary = fragile.connection_string(name="shop")
    with NamespaceManager.from_connection_string(primary) as manager:
        manager.create_queue(QueueDescription(path="small", max_size_in_megabytes=1))
        try:
            site = maker.site(primary, embedded(tmp_path / "backup"))
            half = "x" * 200_000

            def is_full() -> bool:
                site.send(half, path="small")
                return site.is_diverting("small")

            until(is_full)
            site.send("a")
            assert not site.is_diverting("orders")
            assert names(site.take()) == ["a"]
        finally:
            manager.delete_queue("small")
