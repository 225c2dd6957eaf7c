"""Health, readiness and metrics over HTTP, for monitoring: /health, /ready and /metrics.

    /health    200 while the namespace works, with `status` "ok" or what is wrong; 503 while it
               restarts and after it has stopped
    /ready     200 while the namespace takes every command; 503 with `reason` while it restarts,
               after it has stopped, and while the log refuses records
    /metrics   for Prometheus, read at each scrape

HEAD answers like GET, without a body. The door needs no key, and reveals none.
"""

import json
import socket
import threading
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from twinbus.broker.engine import Vitals
from twinbus.clock import from_us
from twinbus.files import tree_bytes
from twinbus.ledger import FOLDER, LedgerSize
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
        self._ledger = LedgerSize(namespace.directory)

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
        oldest = GaugeMetricFamily(
            "twinbus_oldest_message_seconds",
            "Age of the oldest message of an entity that is not scheduled; 0: it holds none",
            labels=["path"],
        )
        for path, age_s in snapshot.oldest_ages_s.items():
            oldest.add_metric([path], age_s)
        yield oldest
        door = self._door
        latencies = HistogramMetricFamily(
            "twinbus_request_seconds",
            "Time from reading a request to its reply, by operation; apart if it may wait",
            labels=["operation", "may_wait"],
        )
        for labels, buckets, total_s in door.latencies().histograms():
            latencies.add_metric(labels, buckets, total_s)
        yield latencies
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
        degradation = self._namespace.vitals().degradation
        ledger_bytes = self._ledger.total()
        storage_bytes = ledger_bytes + _bytes_without_ledger(self._namespace)
        for name, text, value in (
            ("open_connections", "Connections open", door.connections),
            ("open_receives", "Receives that wait", snapshot.open_receives),
            ("storage_bytes", "Bytes of all files of the namespace", storage_bytes),
            ("log_bytes", "Bytes of the records of the log", snapshot.storage_bytes),
            ("ledger_bytes", "Bytes of the ledgers", ledger_bytes),
            ("spilled_sends", "Sends that wait in the spill store", snapshot.spilled_sends),
            ("degraded", "1 while sends wait there for too long", int(degradation is not None)),
            ("spilling", "1 while the log's disk is in trouble", int(snapshot.is_spilling)),
            ("up", "1 while it takes commands", int(snapshot.is_open)),
        ):
            yield GaugeMetricFamily(f"twinbus_{name}", text, value)


def _bytes_without_ledger(namespace: EmbeddedNamespace) -> int:
    """Return the size of all files of a namespace but its ledgers."""
    directory, spill = namespace.directory, namespace.spill_directory
    total = tree_bytes(directory, leave_out=FOLDER)
    return total if _is_inside(spill, directory) else total + tree_bytes(spill)


def _is_inside(folder: Path, other: Path) -> bool:
    return folder.absolute().is_relative_to(other.absolute())


def _health(vitals: Vitals) -> tuple[bool, dict[str, Any]]:
    """Return whether a namespace works, and what /health says about it."""
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
    """Return whether a namespace takes every command, and why it does not."""
    reason = ""
    if not vitals.is_open:
        reason = f"the namespace has stopped: {vitals.trouble}"
    elif vitals.is_healing:
        reason = f"the broker restarts from its log: {vitals.trouble}"
    elif vitals.refusal:
        reason = vitals.refusal
    return not reason, {"ready": False, "reason": reason} if reason else {"ready": True}


class AdminDoor:
    """Serves health, readiness and metrics at an address until it is closed."""

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
                    self._tell(*_health(namespace.vitals()))
                elif self.path == "/ready":
                    self._tell(*_readiness(namespace.vitals()))
                else:
                    text = b"This port serves /health, /ready and /metrics.\n"
                    self._reply(HTTPStatus.NOT_FOUND, "text/plain", text)

            def do_HEAD(self) -> None:
                self.do_GET()  # `_reply` leaves the body out

            def _tell(self, is_well: bool, found: dict[str, Any]) -> None:  # noqa: FBT001
                status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
                body = json.dumps(found | {"name": name}).encode() + b"\n"
                self._reply(status, "application/json", body)

            def _reply(self, status: HTTPStatus, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
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
