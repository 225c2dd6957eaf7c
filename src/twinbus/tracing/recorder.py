"""Records spans with OpenTelemetry, by its conventions for messaging.

    operation                       kind       type       parent
    send                            PRODUCER   send       the caller's span
    divert                          CLIENT     send       the span of the send
    ping                            CLIENT     (none)     (none)
    drain, by the syphon            CLIENT     send       the span of the send
    receive                         CONSUMER   receive    the caller's span, else that of the send
    complete, abandon, defer, ...   CLIENT     settle     the caller's span, else that of the send

A send puts its context into the properties of its messages as W3C Trace Context: `traceparent` and
`tracestate`, and `Diagnostic-Id` where SDKs of Service Bus may receive them. A message that has a
context keeps it. Diverting and bringing home leave properties as they are, so the context arrives.

A batch may contain messages of many traces. A receive or settlement is one span with links to all
of them. A divert or drain is one span in the trace of each message, so that each trace is complete.
`MAX_TRACED_CONTEXTS` limits the links and the spans of one batch. This is the only
module that imports OpenTelemetry. Any thread may call it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from twinbus import compute as pc
from twinbus.errors import MessagingError
from twinbus.limits import MAX_TRACED_CONTEXTS
from twinbus.message import (
    BrokeredMessage,
    PropertyValue,
    conform,
    map_offsets,
    properties_of,
    property_entries,
    to_properties_column,
)
from twinbus.tracing import TracedPeer

R = TypeVar("R")
Messages: TypeAlias = Sequence[BrokeredMessage] | pa.RecordBatch
Attributes = dict[str, str | int]
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
DIAGNOSTIC_ID = "Diagnostic-Id"  # what older SDKs of Service Bus call traceparent
_CARRIED = (TRACEPARENT, TRACESTATE, DIAGNOSTIC_ID)
_CARRIED_NAMES = pa.array(_CARRIED, pa.string())
_W3C = TraceContextTextMapPropagator()
_NOTHING = Context()
_SUBSCRIPTIONS = "/subscriptions/"


@dataclass(slots=True)
class _Traced:
    """Messages that have the same context."""

    context: Context
    span_context: SpanContext
    count: int = 1

    @property
    def is_sampled(self) -> bool:
        return self.span_context.trace_flags.sampled


class SpanRecorder:
    """Records the spans of all clients of a process."""

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("twinbus", tracer_provider=tracer_provider)

    # -- sending -------------------------------------------------------------------------------

    def send(
        self, peer: TracedPeer, path: str, messages: Messages, deliver: Callable[[Messages], R]
    ) -> R:
        """Send messages within a span, with its context in their properties."""
        if not isinstance(messages, list | tuple | pa.RecordBatch):
            return deliver(messages)  # the client refuses it
        with self._tracer.start_as_current_span(
            f"send {path}",
            kind=SpanKind.PRODUCER,
            attributes=_attributes(peer, "send", "send", path) | _described(messages),
            links=_links(_contexts(messages)),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return deliver(_with_context(messages, _carried(span, peer)))
            except Exception as error:
                _fail(span, error)
                raise

    def begin_send(
        self, peer: TracedPeer, path: str, message: BrokeredMessage
    ) -> tuple[BrokeredMessage, "Callable[[Future[None]], None]"]:
        """Start the span of a pipelined send.

        Return the message with the context, and a callback that ends the span.
        """
        span = self._tracer.start_span(
            f"send {path}",
            kind=SpanKind.PRODUCER,
            attributes=_attributes(peer, "send", "send", path) | _described([message]),
            links=_links(_contexts([message])),
        )

        sent = _with_context([message], _carried(span, peer))
        assert isinstance(sent, list)
        return sent[0], partial(_end, span)

    def relay(
        self,
        operation: str,
        peer: TracedPeer,
        path: str,
        messages: Messages,
        send: Callable[[], R],
        queue: Callable[[], str],
    ) -> R:
        """Call `send`, which diverts or drains messages, and record it.

        `queue` returns the backlog queue and is called after `send`. If the caller has a span, one
        child of it is recorded; otherwise one span in the trace of each message.
        """
        began = time.time_ns()
        failure: Exception | None = None
        try:
            return send()
        except Exception as error:
            failure = error
            raise
        finally:
            attributes = _attributes(peer, operation, "send", path)
            attributes["twinbus.backlog_queue"] = queue()
            for context, count in _parents(_contexts(messages)):
                counted: Attributes = {"messaging.batch.message_count": count} if count > 1 else {}
                span = self._tracer.start_span(
                    f"{operation} {path}",
                    context=context,
                    kind=SpanKind.CLIENT,
                    attributes=attributes | counted,
                    start_time=began,
                )
                if failure is not None:
                    _fail(span, failure)
                span.end()

    def ping(self, peer: TracedPeer, path: str, reply: "Future[Any]") -> None:
        """Record a ping, which ends with its reply; it belongs to no trace of a message."""
        span = self._tracer.start_span(
            f"ping {path}",
            context=_NOTHING,
            kind=SpanKind.CLIENT,
            attributes=_attributes(peer, "ping", None, path),
        )
        reply.add_done_callback(partial(_end, span))

    # -- receiving -----------------------------------------------------------------------------

    def receive(
        self, peer: TracedPeer, path: str, ask: Callable[[], pa.RecordBatch]
    ) -> pa.RecordBatch:
        """Receive, and record it if messages arrived or it failed: an idle poll has no span."""
        began = time.time_ns()
        attributes = _attributes(peer, "receive", "receive", path)
        name = f"receive {path}"
        try:
            batch = ask()
        except Exception as error:
            span = self._tracer.start_span(
                name, kind=SpanKind.CONSUMER, attributes=attributes, start_time=began
            )
            _fail(span, error)
            span.end()
            raise
        if batch.num_rows:
            contexts = _contexts(batch)
            self._tracer.start_span(
                name,
                context=_parent(contexts),
                kind=SpanKind.CONSUMER,
                attributes=attributes | _described(batch),
                links=_links(contexts),
                start_time=began,
            ).end()
        return batch

    def settle(
        self,
        peer: TracedPeer,
        path: str,
        operation: str,
        messages: Messages,
        settle: Callable[[], R],
    ) -> R:
        """Settle messages within a span."""
        contexts = _contexts(messages)
        with self._tracer.start_as_current_span(
            f"{operation} {path}",
            context=_parent(contexts),
            kind=SpanKind.CLIENT,
            attributes=_attributes(peer, operation, "settle", path) | _described(messages),
            links=_links(contexts),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return settle()
            except Exception as error:
                _fail(span, error)
                raise


# -- attributes ------------------------------------------------------------------------------------


def _attributes(peer: TracedPeer, operation: str, kind: str | None, path: str) -> Attributes:
    found: Attributes = {**peer.attributes, "messaging.operation.name": operation}
    if kind is not None:
        found["messaging.operation.type"] = kind
    at = path.lower().find(_SUBSCRIPTIONS)
    if at < 0:
        found["messaging.destination.name"] = path
    else:
        found["messaging.destination.name"] = path[:at]
        found["messaging.destination.subscription.name"] = path[at + len(_SUBSCRIPTIONS) :]
    return found


def _described(messages: Messages) -> Attributes:
    """Return how many messages there are, or the id of the only one."""
    count = len(messages)
    if count != 1:
        return {"messaging.batch.message_count": count} if count else {}
    if isinstance(messages, pa.RecordBatch):
        at = messages.schema.get_field_index("message_id")
        message_id = messages.column(at)[0].as_py() if at >= 0 else None
    else:
        message_id = getattr(messages[0], "message_id", None)
    return {"messaging.message.id": message_id} if isinstance(message_id, str) else {}


def _fail(span: Span, error: BaseException) -> None:
    code = error.code if isinstance(error, MessagingError) else type(error).__qualname__
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, str(error)))


def _end(span: Span, done: "Future[Any]") -> None:
    error = done.exception()
    if error is not None:
        _fail(span, error)
    span.end()


# -- contexts in messages --------------------------------------------------------------------------


def _carried(span: Span, peer: TracedPeer) -> Mapping[str, str]:
    """Return the properties that carry the context of a span; none if it has no context."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    if peer.has_sdk_readers and TRACEPARENT in carrier:
        carrier[DIAGNOSTIC_ID] = carrier[TRACEPARENT]
    return carrier


def _with_context(messages: Messages, carried: Mapping[str, str]) -> Messages:
    """Return messages with a context in their properties; those that have one keep it."""
    if not carried:
        return messages
    if isinstance(messages, pa.RecordBatch):
        batch = conform(messages)
        at = batch.schema.get_field_index("properties")
        bags = [_with_properties(bag, carried) for bag in properties_of(batch.column(at))]
        return batch.set_column(at, batch.schema.field(at), to_properties_column(bags))
    return [
        replace(
            message,
            application_properties=_with_properties(message.application_properties, carried),
        )
        if isinstance(message, BrokeredMessage)
        else message  # the client refuses it
        for message in messages
    ]


def _with_properties(
    properties: Mapping[str, PropertyValue], carried: Mapping[str, str]
) -> Mapping[str, PropertyValue]:
    has_context = TRACEPARENT in properties or DIAGNOSTIC_ID in properties
    return properties if has_context else {**properties, **carried}


def _contexts(messages: Messages) -> list[_Traced]:
    """Return the contexts of messages, each once, in order."""
    found: dict[str, _Traced] = {}
    for carrier in _carriers(messages):
        parent = carrier.get(TRACEPARENT) or carrier.get(DIAGNOSTIC_ID)
        if not isinstance(parent, str):
            continue
        if parent in found:
            found[parent].count += 1
            continue
        state = carrier.get(TRACESTATE)
        texts = {TRACEPARENT: parent} | ({TRACESTATE: state} if isinstance(state, str) else {})
        context = _W3C.extract(texts, _NOTHING)
        span_context = trace.get_current_span(context).get_span_context()
        if span_context.is_valid:
            found[parent] = _Traced(context, span_context)
    return list(found.values())


def _carriers(messages: Messages) -> Iterable[Mapping[str, Any]]:
    """Return the properties of messages, or at least those that carry a context."""
    if not isinstance(messages, pa.RecordBatch):
        return [getattr(message, "application_properties", None) or {} for message in messages]
    at = messages.schema.get_field_index("properties")
    if at < 0 or not messages.num_rows:
        return []
    column = messages.column(at)
    offsets = map_offsets(column)
    names, values = property_entries(column, offsets)
    is_carried = pc.is_in(names, value_set=_CARRIED_NAMES).to_numpy(zero_copy_only=False)
    chosen = np.flatnonzero(is_carried)
    rows = np.repeat(np.arange(len(column)), np.diff(offsets))[chosen].tolist()
    texts = values.field("str").take(pa.array(chosen)).to_pylist()
    bags: dict[int, dict[str, Any]] = {}
    for row, name, text in zip(rows, names.take(pa.array(chosen)).to_pylist(), texts, strict=True):
        bags.setdefault(row, {})[name] = text
    return bags.values()


def _links(contexts: Sequence[_Traced]) -> list[Link]:
    return [Link(traced.span_context) for traced in contexts[:MAX_TRACED_CONTEXTS]]


def _parent(contexts: Sequence[_Traced]) -> Context | None:
    """Return the parent of a span: the caller's span, else the context that all messages have."""
    is_within = trace.get_current_span().get_span_context().is_valid
    return None if is_within or len(contexts) != 1 else contexts[0].context


def _parents(contexts: Sequence[_Traced]) -> list[tuple[Context | None, int]]:
    """Return the parents of a relay's spans, each with its number of messages.

    The only parent is the caller's span; without one, every sampled context is a parent.
    """
    if trace.get_current_span().get_span_context().is_valid:
        return [(None, sum(traced.count for traced in contexts))]
    sampled = [(traced.context, traced.count) for traced in contexts if traced.is_sampled]
    return [*sampled[:MAX_TRACED_CONTEXTS]]
