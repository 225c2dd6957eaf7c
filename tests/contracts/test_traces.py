"""Traces: the spans of every operation, and one trace for a message that was diverted."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.contracts.pairing_words import AT_ONCE, INVOICES, MINUTE, ORDERS, Pair, message
from twinbus import BrokeredMessage, MessageReceiver, aio, tracing
from twinbus.client.receiver import ReceiveOptions
from twinbus.errors import EntityNotFoundError
from twinbus.limits import MAX_TRACED_CONTEXTS
from twinbus.message import to_batch
from twinbus.pairing.health import HealthState
from twinbus.tracing import TracedPeer

NOW = timedelta(0)
ELSEWHERE = "00-11111111111111111111111111111111-2222222222222222-01"


class Traces:
    """The spans of a test."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    def spans(self, operation: str = "") -> list[ReadableSpan]:
        found = self._exporter.get_finished_spans()
        return [span for span in found if span.name.startswith(operation)]

    def span(self, operation: str) -> ReadableSpan:
        (only,) = self.spans(operation)
        return only


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    tracing.enable(traces.provider)
    yield traces
    tracing.disable()


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{trace_id(span):032x}-{span_id(span):016x}-{span.context.trace_flags:02x}"


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def receiver(pair: Pair, path: str = ORDERS) -> MessageReceiver:
    return pair.primary.factory.create_message_receiver(path)


def test_a_diverted_message_has_one_trace_from_its_send_to_its_settlement(
    pair: Pair, traces: Traces
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS)
    pair.heal()
    pair.bring_home()
    with receiver(pair) as orders:
        received = orders.receive(NOW)
        assert received is not None
        received.complete()
    send = traces.span("send")
    assert [span.name for span in traces.spans() if not span.name.startswith("ping")] == [
        f"divert {ORDERS}",
        f"send {ORDERS}",
        f"drain {ORDERS}",
        f"receive {ORDERS}",
        f"complete {ORDERS}",
    ]
    for operation in ("divert", "drain", "receive", "complete"):
        span = traces.span(operation)
        assert (trace_id(span), parent_id(span)) == (trace_id(send), span_id(send)), span.name
    assert received.application_properties["traceparent"] == traceparent(send)


def test_spans_have_the_kinds_and_attributes_of_the_messaging_conventions(
    servers: Pair, traces: Traces
) -> None:
    assert servers.primary.where is not None
    servers.primary.factory.courier.peer = TracedPeer.of(servers.primary.where)
    servers.send("tea", message_id="m1")
    with receiver(servers) as orders:
        (received,) = orders.receive_batch(5, NOW)
        orders.dead_letter([received], "cold")
    port = servers.primary.where.port
    peer = {"messaging.system": "twinbus", "server.address": "127.0.0.1", "server.port": port}
    about = {"messaging.destination.name": ORDERS, "messaging.message.id": "m1"}
    expected = {
        "send": (SpanKind.PRODUCER, "send"),
        "receive": (SpanKind.CONSUMER, "receive"),
        "dead_letter": (SpanKind.CLIENT, "settle"),
    }
    assert len(traces.spans()) == len(expected)
    for operation, (kind, of_type) in expected.items():
        named = {"messaging.operation.name": operation, "messaging.operation.type": of_type}
        span = traces.span(operation)
        assert span.kind is kind
        assert dict(span.attributes or {}) == {**peer, **about, **named}


def test_a_divert_and_a_drain_name_the_backlog_queue(local: Pair, traces: Traces) -> None:
    local.begin(failover_interval=AT_ONCE, backlog_queue_count=1)
    local.fail_over(ORDERS)
    bring_home_to_healed(local)
    for operation in ("divert", "drain"):
        span = traces.span(operation)
        assert span.kind is SpanKind.CLIENT
        assert span.attributes is not None
        assert span.attributes["twinbus.backlog_queue"] == "contoso/x-servicebus-transfer/0"
        assert span.attributes["messaging.destination.name"] == ORDERS


def bring_home_to_healed(pair: Pair) -> None:
    pair.heal()
    pair.bring_home()


def test_pings_have_spans_outside_the_traces_of_messages(local: Pair, traces: Traces) -> None:
    local.begin(failover_interval=AT_ONCE, ping_primary_interval=MINUTE)
    local.fail_over(ORDERS)
    local.heal()
    local.pass_time(MINUTE)
    assert local.state(ORDERS) is HealthState.HEALTHY
    *failed, last = traces.spans("ping")
    assert (last.kind, last.parent, last.status.status_code) == (
        SpanKind.CLIENT,
        None,
        StatusCode.UNSET,
    )
    assert all(span.status.status_code is StatusCode.ERROR for span in failed)
    assert trace_id(last) != trace_id(traces.span("send"))


def test_a_failed_send_has_an_error_with_its_type(local: Pair, traces: Traces) -> None:
    with pytest.raises(EntityNotFoundError):
        local.send(path="nowhere")
    span = traces.span("send")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "EntityNotFound"


def test_a_failed_receive_has_an_error_and_an_idle_one_has_no_span(
    local: Pair, traces: Traces
) -> None:
    with receiver(local) as orders:
        assert orders.receive(NOW) is None
    assert traces.spans() == []
    with receiver(local, "nowhere") as nowhere, pytest.raises(EntityNotFoundError):
        nowhere.receive(NOW)
    assert traces.span("receive").status.status_code is StatusCode.ERROR


def test_a_message_keeps_the_context_that_its_application_gave_it(
    local: Pair, traces: Traces
) -> None:
    local.send(application_properties={"traceparent": ELSEWHERE})
    with receiver(local) as orders:
        received = orders.receive(NOW)
    assert received is not None
    assert received.application_properties == {"traceparent": ELSEWHERE}
    assert linked(traces.span("send")) == {0x2222222222222222}
    assert trace_id(traces.span("receive")) == int("1" * 32, 16)


def test_the_context_of_an_older_service_bus_sdk_is_understood(local: Pair, traces: Traces) -> None:
    local.send(application_properties={"Diagnostic-Id": ELSEWHERE})
    with receiver(local) as orders:
        orders.receive(NOW)
    assert parent_id(traces.span("receive")) == 0x2222222222222222


def test_sdks_of_service_bus_find_the_context_under_their_name(pair: Pair, traces: Traces) -> None:
    if pair.primary.where is not None:
        pair.primary.factory.courier.peer = TracedPeer.of(pair.primary.where)
    pair.send()
    with receiver(pair) as orders:
        received = orders.receive(NOW)
    assert received is not None
    found = received.application_properties.get("Diagnostic-Id")
    assert found == (traceparent(traces.span("send")) if pair.primary.where else None)


def test_a_context_that_is_none_is_ignored(local: Pair, traces: Traces) -> None:
    local.send(application_properties={"traceparent": "nonsense"})
    local.send(application_properties={"traceparent": 7})
    with receiver(local) as orders:
        assert len(orders.receive_batch(5, NOW)) == 2
    assert traces.span("receive").links == ()


def test_a_span_of_the_application_is_the_parent_and_messages_are_linked(
    local: Pair, traces: Traces
) -> None:
    local.send("a")
    local.send("b")
    sent = {span_id(span) for span in traces.spans("send")}
    with receiver(local) as orders, traces.tracer.start_as_current_span("work") as work:
        orders.complete(orders.receive_batch(5, NOW))
    for operation in ("receive", "complete"):
        span = traces.span(operation)
        assert parent_id(span) == work.get_span_context().span_id
        assert linked(span) == sent
        assert span.attributes is not None
        assert span.attributes["messaging.batch.message_count"] == 2


def test_every_trace_of_a_drained_batch_has_a_drain_up_to_a_bound(
    local: Pair, traces: Traces
) -> None:
    local.begin(failover_interval=AT_ONCE, backlog_queue_count=1)
    local.fail_over(ORDERS)
    contexts = [f"00-{at:032x}-{at:016x}-01" for at in range(1, MAX_TRACED_CONTEXTS + 2)]
    unsampled = "00-33333333333333333333333333333333-4444444444444444-00"
    batch = [
        message(application_properties={"traceparent": item}) for item in [unsampled, *contexts]
    ]
    local.sender().send_batch(batch)
    bring_home_to_healed(local)
    drained = {trace_id(span) for span in traces.spans("drain")}
    first = trace_id(traces.spans("send")[0])  # it goes home in a send of its own
    assert drained == {first, *range(1, MAX_TRACED_CONTEXTS + 1)}


def test_columns_carry_the_context_of_their_send_beside_their_properties(
    local: Pair, traces: Traces
) -> None:
    own = {"table": 7}
    batch = [message(application_properties=own), message(), message(application_properties=own)]
    local.sender().send_batch(to_batch(batch))
    carried = {"traceparent": traceparent(traces.span("send"))}
    with receiver(local) as orders:
        found = [dict(item.application_properties) for item in orders.receive_batch(5, NOW)]
    assert found == [own | carried, carried, own | carried]


def test_each_pipelined_send_has_its_own_trace_and_so_has_its_divert(
    local: Pair, traces: Traces
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over(INVOICES)
    with local.sender(INVOICES).pipelined() as pipeline:
        for _ in range(3):
            pipeline.send(message())
    sent = {trace_id(span) for span in traces.spans("send")}
    assert len(sent) == 4
    assert {trace_id(span) for span in traces.spans("divert")} == sent


def test_a_pipelined_send_that_fails_has_an_error(local: Pair, traces: Traces) -> None:
    with local.sender("nowhere").pipelined() as pipeline:
        failed = pipeline.send(message())
    assert isinstance(failed.exception(), EntityNotFoundError)
    assert traces.span("send").status.status_code is StatusCode.ERROR


def test_prefetched_messages_have_a_span_when_the_application_receives_them(
    local: Pair, traces: Traces
) -> None:
    local.send("a")
    local.send("b")
    options = ReceiveOptions(prefetch_count=10)
    with local.primary.factory.create_message_receiver(ORDERS, options) as orders:
        orders.receive(NOW)
        assert len(traces.spans("receive")) == 1
        orders.receive(NOW)
    first, second = traces.spans("receive")
    assert [trace_id(first), trace_id(second)] == [trace_id(span) for span in traces.spans("send")]


def test_a_subscription_is_named_beside_its_topic(local: Pair, traces: Traces) -> None:
    local.send(path="news")
    local.primary.factory.create_subscription_client("news", "eu").receive(NOW)
    attributes = traces.span("receive").attributes
    assert attributes is not None
    assert attributes["messaging.destination.name"] == "news"
    assert attributes["messaging.destination.subscription.name"] == "eu"


def test_asyncio_has_the_span_of_its_task_as_the_parent(local: Pair, traces: Traces) -> None:
    async def send() -> int:
        factory = aio.MessagingFactory(local.primary.factory)
        with traces.tracer.start_as_current_span("work") as work:
            await factory.create_message_sender(ORDERS).send(BrokeredMessage(b"tea"))
        return work.get_span_context().span_id

    assert asyncio.run(send()) == parent_id(traces.span("send"))


def test_without_a_tracer_provider_messages_are_as_they_were(local: Pair) -> None:
    tracing.enable(trace.NoOpTracerProvider())
    try:
        local.send()
    finally:
        tracing.disable()
    assert [item.application_properties for item in local.primary.peek()] == [{}]
