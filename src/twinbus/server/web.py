"""HTTP: health, readiness and metrics for monitoring, and the administration API.

    /health    200 while the namespace works, with `status` "ok" or the problem; 503 while it
               restarts and after it has stopped
    /ready     200 while the namespace accepts every command; 503 with `reason` while it restarts,
               after it has stopped, and while the log refuses writes
    /metrics   for Prometheus; a page is at most METRICS_AGE_S old

HEAD answers like GET, without a body. Every client may read whether a server works. Reasons, and
metrics, which name every entity, need a client on the same machine or a token of a key that manages
the namespace. A request with an `api-version`, or with a path that begins with `/$`, goes to the
administration API (administration.py). All of this is an ASGI application behind uvicorn's
protocol.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from twinbus.broker.turn.vitals import Vitals
from twinbus.clock import from_us
from twinbus.errors import MessagingError, UnauthorizedError
from twinbus.files import tree_bytes
from twinbus.ledger import FOLDER, LedgerSize
from twinbus.limits import AUTHENTICATION_US, MAX_GREETING_BYTES, METRICS_AGE_S, SECOND_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.keys import Claim
from twinbus.server.addresses import is_loopback
from twinbus.server.administration import AdministrationApi
from twinbus.server.websocket import WebsocketConnection

if TYPE_CHECKING:
    from twinbus.server.door import Door

_COUNTS = {
    "active": "active_message_count",
    "dead_letter": "dead_letter_message_count",
    "scheduled": "scheduled_message_count",
    "transfer": "transfer_message_count",
}


class _Metrics(Collector):
    """The metrics for Prometheus, read at each scrape."""

    def __init__(self, namespace: EmbeddedNamespace, door: "Door") -> None:
        self._namespace = namespace
        self._door = door
        self._ledger = LedgerSize(namespace.directory)

    def collect(self) -> Iterable[Metric]:
        """Yield every metric."""
        snapshot = self._namespace.snapshot()
        labels = ["path", "operation", "outcome"]
        counted = {
            "count": CounterMetricFamily("twinbus_operations", "Operations", labels=labels),
            "messages": CounterMetricFamily(
                "twinbus_messages", "Messages of operations", labels=labels
            ),
            "bytes": CounterMetricFamily("twinbus_bytes", "Bytes of these messages", labels=labels),
            "units": CounterMetricFamily("twinbus_units", "Units of 64 KB", labels=labels),
        }
        rows = snapshot.meter.to_pylist()
        for name, family in counted.items():
            sums: Counter[tuple[str, ...]] = Counter()  # over all purposes; purpose is no label
            for row in rows:
                sums[tuple(row[label] for label in labels)] += row[name]
            for values, total in sums.items():
                family.add_metric(values, total)
        yield from counted.values()
        waiting = GaugeMetricFamily(
            "twinbus_waiting_messages", "Messages in an entity", labels=["path", "state"]
        )
        size = GaugeMetricFamily("twinbus_entity_bytes", "Bytes in an entity", labels=["path"])
        for entity in snapshot.entities:
            for state, name in _COUNTS.items():
                waiting.add_metric([entity.path, state], getattr(entity, name))
            size.add_metric([entity.path], entity.size_in_bytes)
        yield from (waiting, size)
        oldest = GaugeMetricFamily(
            "twinbus_oldest_message_seconds",
            "Age of the oldest message of an entity that is not scheduled; 0: it has none",
            labels=["path"],
        )
        for path, age_s in snapshot.oldest_ages_s.items():
            oldest.add_metric([path], age_s)
        yield oldest
        door = self._door
        latencies = HistogramMetricFamily(
            "twinbus_request_seconds",
            "Time from reading a request to its reply, by operation and whether it may wait",
            labels=["operation", "may_wait"],
        )
        for labels, buckets, total_s in door.latencies.histograms():
            latencies.add_metric(labels, buckets, total_s)
        yield latencies
        yield CounterMetricFamily("twinbus_connections", "Connections accepted", door.accepted)
        yield CounterMetricFamily("twinbus_refused", "Connections and tokens refused", door.refused)
        yield CounterMetricFamily(
            "twinbus_restarts", "Restarts after an internal error", snapshot.restarts
        )
        yield CounterMetricFamily(
            "twinbus_failed_commands",
            "Commands and timers that failed because of an internal error",
            snapshot.failed_commands,
        )
        yield CounterMetricFamily(
            "twinbus_rule_failures",
            "Messages dead-lettered because a rule could not be evaluated",
            snapshot.rule_failures,
        )
        degradation = self._namespace.vitals().degradation
        ledger_bytes = self._ledger.total()
        storage_bytes = ledger_bytes + _bytes_without_ledger(self._namespace)
        for name, text, value in (
            ("open_connections", "Connections open", door.connections),
            ("open_receives", "Receives that wait for messages", snapshot.open_receives),
            ("storage_bytes", "Bytes of all files of the namespace", storage_bytes),
            ("log_bytes", "Bytes of the records of the log", snapshot.storage_bytes),
            ("ledger_bytes", "Bytes of the ledgers", ledger_bytes),
            ("spilled_sends", "Sends that wait in the spill store", snapshot.spilled_sends),
            (
                "degraded",
                "1 while a spilled send has waited too long",
                int(degradation is not None),
            ),
            ("spilling", "1 while the log refuses writes", int(snapshot.is_spilling)),
            ("up", "1 while the namespace accepts commands", int(snapshot.is_open)),
        ):
            yield GaugeMetricFamily(f"twinbus_{name}", text, value)


def _bytes_without_ledger(namespace: EmbeddedNamespace) -> int:
    """Return the size of all files of a namespace without its ledgers."""
    directory, spill = namespace.directory, namespace.spill_directory
    total = tree_bytes(directory, leave_out=FOLDER)
    return total if _is_inside(spill, directory) else total + tree_bytes(spill)


def _is_inside(folder: Path, parent: Path) -> bool:
    return folder.absolute().is_relative_to(parent.absolute())


def _health(vitals: Vitals) -> tuple[bool, dict[str, Any]]:
    """Return whether a namespace works, and the content of /health."""
    state = "ok" if vitals.is_open else "stopped"
    if vitals.is_open and vitals.is_healing:
        state = "restarting"
    elif vitals.is_open and vitals.degradation is not None:
        state = "degraded"
    elif vitals.is_open and vitals.is_spilling:
        state = "storage trouble: sends are spilled"
    found: dict[str, Any] = {"status": state, "restarts": vitals.restarts}
    if vitals.trouble:
        found["trouble"] = vitals.trouble
    if vitals.degradation is not None:
        found["reason"] = vitals.degradation.reason
        found["since"] = from_us(vitals.degradation.since).isoformat()
    return vitals.is_open and not vitals.is_healing, found


def _readiness(vitals: Vitals) -> tuple[bool, dict[str, Any]]:
    """Return whether a namespace accepts every command, and the content of /ready."""
    reason = ""
    if not vitals.is_open:
        reason = f"the namespace has stopped: {vitals.trouble}"
    elif vitals.is_healing:
        reason = f"the broker is restarting from its log: {vitals.trouble}"
    elif vitals.refusal:
        reason = vitals.refusal
    return not reason, {"ready": False, "reason": reason} if reason else {"ready": True}


class _WebConnection(H11Protocol):
    """An HTTP connection. It counts as a stranger until it shows a token.

    Each request has the same time limit as a stranger's first bytes.
    """

    def __init__(
        self, door: "Door", address: str, config: Config, state: ServerState, loop: Any
    ) -> None:
        # The application finds its connection in the state of the request.
        super().__init__(config, state, {"connection": self}, loop)
        self._door = door
        self._address = address
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._door.attendance.note_stranger(self, transport, self._address)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        super().connection_lost(exc)
        self._door.attendance.forget(self)
        if self._timer is not None:
            self._timer.cancel()

    def on_response_complete(self) -> None:
        """Start the timeout of the next request."""
        super().on_response_complete()
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(AUTHENTICATION_US / SECOND_US, self.transport.abort)


class Web:
    """Serves health, readiness, metrics and administration to HTTP connections."""

    def __init__(self, namespace: EmbeddedNamespace, door: "Door", name: str) -> None:
        self._namespace = namespace
        self._door = door
        self._name = name
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Metrics(namespace, door))
        self._registry = registry
        self._page = b""  # the metrics as last rendered
        self._rendered_at = -METRICS_AGE_S
        self._rendering = asyncio.Lock()
        self._state = ServerState()
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self._pages = Starlette(routes=routes, exception_handlers={404: _not_found})
        self._administration = AdministrationApi(door, name)
        self._config = Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            h11_max_incomplete_event_size=MAX_GREETING_BYTES,
        )
        self._config.load()

    def websocket(self, address: str, refusal: MessagingError | None) -> asyncio.Protocol:
        """Return the protocol for a connection that requests a websocket."""
        return WebsocketConnection(self._door, address, refusal=refusal)

    def protocol(self, loop: asyncio.AbstractEventLoop, address: str) -> asyncio.Protocol:
        """Return the protocol for an HTTP connection."""
        return _WebConnection(self._door, address, self._config, self._state, loop)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to the administration API."""
        is_page = b"api-version=" not in scope["query_string"] and scope["path"][:2] != "/$"
        await (self._pages if is_page else self._administration)(scope, receive, send)

    async def close(self) -> None:
        """Close every connection."""
        for connection in list(self._state.connections):
            connection.shutdown()
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    # -- pages ---------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return self._state_page(request, *_health(self._namespace.vitals()))

    async def _ready(self, request: Request) -> Response:
        return self._state_page(request, *_readiness(self._namespace.vitals()))

    def _state_page(self, request: Request, is_well: bool, found: dict[str, Any]) -> Response:  # noqa: FBT001
        """Return the page of a state; only clients that may read metrics see the reason."""
        if not self._is_trusted(request):
            found = {name: value for name, value in found.items() if name in _PUBLIC}
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse(found | {"name": self._name}, status)

    async def _metrics(self, request: Request) -> Response:
        if not self._is_trusted(request):
            return PlainTextResponse(
                "Metrics name every entity. Read them from this machine under the name localhost "
                "or its loopback address, or send a token of a key that manages the namespace in "
                "the header Authorization.\n",
                HTTPStatus.UNAUTHORIZED,
            )
        async with self._rendering:
            now = time.monotonic()
            if now - self._rendered_at >= METRICS_AGE_S:
                self._page = await asyncio.to_thread(generate_latest, self._registry)
                self._rendered_at = now
        return Response(self._page, media_type=CONTENT_TYPE_LATEST)

    def _is_trusted(self, request: Request) -> bool:
        """Return whether the client may see names and reasons.

        A web page can reach the ports of this machine under another host name (DNS rebinding), so
        the Host header must name this machine.
        """
        token = request.headers.get("authorization", "")
        if token:
            try:
                admission = self._door.admit(token)
            except UnauthorizedError:
                return False
            self._door.attendance.note_reader(request.state.connection, admission)
            return admission.may(Claim.MANAGE, None)
        client = request.client
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:  # brackets that do not match
            return False
        return client is not None and is_loopback(client.host) and is_loopback(host)


_PUBLIC = ("status", "ready")


async def _not_found(_: Request, __: Exception) -> Response:
    return PlainTextResponse(
        "This port serves /health, /ready and /metrics.\n", HTTPStatus.NOT_FOUND
    )
