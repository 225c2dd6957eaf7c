"""Health and metrics over HTTP, for people's monitoring: GET /health and GET /metrics."""

import json
import socket
import threading
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.server.flight import FlightDoor

_POLL_S = 0.05  # how long closing may wait for the listener
_COUNTS = {
    "active": "active_message_count",
    "dead_letter": "dead_letter_message_count",
    "scheduled": "scheduled_message_count",
    "transfer": "transfer_message_count",
}


class _Metrics(Collector):
    """What Prometheus is told, read at each scrape."""

    def __init__(self, namespace: EmbeddedNamespace, door: FlightDoor) -> None:
        self._namespace = namespace
        self._door = door

    def collect(self) -> Iterable[Metric]:
        """Give every metric."""
        snapshot = self._namespace.snapshot()
        labels = ["path", "operation", "outcome"]
        counted = {
            "count": CounterMetricFamily("twinbus_operations", "Operations", labels=labels),
            "messages": CounterMetricFamily("twinbus_messages", "Messages carried", labels=labels),
            "bytes": CounterMetricFamily("twinbus_bytes", "Bytes carried", labels=labels),
            "units": CounterMetricFamily("twinbus_units", "Units of 64 KB", labels=labels),
        }
        for row in snapshot.meter.to_pylist():
            for name, family in counted.items():
                family.add_metric([row[label] for label in labels], row[name])
        yield from counted.values()
        waiting = GaugeMetricFamily(
            "twinbus_waiting_messages", "Messages an entity holds", labels=["path", "state"]
        )
        size = GaugeMetricFamily("twinbus_entity_bytes", "Bytes an entity holds", labels=["path"])
        for entity in snapshot.entities:
            for state, name in _COUNTS.items():
                waiting.add_metric([entity.path, state], getattr(entity, name))
            size.add_metric([entity.path], entity.size_in_bytes)
        yield from (waiting, size)
        door = self._door
        yield CounterMetricFamily("twinbus_connections", "Connections accepted", door.accepted)
        yield CounterMetricFamily("twinbus_refused", "Connections and tokens refused", door.refused)
        yield CounterMetricFamily("twinbus_restarts", "Times it healed itself", snapshot.restarts)
        yield CounterMetricFamily(
            "twinbus_failed_commands",
            "Commands and timers that met an internal error, and failed alone",
            snapshot.failed_commands,
        )
        yield CounterMetricFamily(
            "twinbus_rule_failures",
            "Messages dead-lettered because a rule could not be evaluated",
            snapshot.rule_failures,
        )
        for name, text, value in (
            ("open_connections", "Connections open", door.connections),
            ("open_receives", "Receives that wait", snapshot.open_receives),
            ("storage_bytes", "Bytes of the log", snapshot.storage_bytes),
            ("spilling", "1 while the log's disk is in trouble", int(snapshot.is_spilling)),
            ("up", "1 while it takes commands", int(snapshot.is_open)),
        ):
            yield GaugeMetricFamily(f"twinbus_{name}", text, value)


class AdminDoor:
    """Serves health and metrics at an address until it is closed."""

    def __init__(
        self, namespace: EmbeddedNamespace, door: FlightDoor, *, name: str, host: str, port: int
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Metrics(namespace, door))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # a slow reader is hung up on

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._reply(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/health":
                    self._health()
                else:
                    text = b"there are /health and /metrics\n"
                    self._reply(HTTPStatus.NOT_FOUND, "text/plain", text)

            def _health(self) -> None:
                vitals = namespace.vitals()
                state = "ok" if vitals.is_open else "stopped"
                if vitals.is_open and vitals.is_healing:
                    state = "restarting"
                elif vitals.is_open and vitals.is_spilling:
                    state = "storage trouble: sends are spilled"
                found = {"status": state, "name": name, "restarts": vitals.restarts}
                if vitals.trouble:
                    found["trouble"] = vitals.trouble
                works = vitals.is_open and not vitals.is_healing
                status = HTTPStatus.OK if works else HTTPStatus.SERVICE_UNAVAILABLE
                self._reply(status, "application/json", json.dumps(found).encode() + b"\n")

            def _reply(self, status: HTTPStatus, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing: scrapes come every few seconds."""

        class Listener(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Listener((host, port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_S], daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
