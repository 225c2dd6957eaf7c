"""Metrics of a pairing for Prometheus.

prometheus_client.REGISTRY.register(PairingCollector(pairing))

prometheus_client is an extra. `collect` imports it, so that `from twinbus import *` works without
it. A registry only calls `collect`, so at run time the class needs no base class of
prometheus_client; type checkers see one. The registry calls from the thread that serves a scrape.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from twinbus.extras import require
from twinbus.pairing.health import HealthState
from twinbus.pairing.pairing import SendAvailabilityPairing

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector
else:
    Collector = object


class PairingCollector(Collector):
    """Reads a pairing's status at each scrape."""

    def __init__(self, pairing: SendAvailabilityPairing) -> None:
        require("PairingCollector", "metrics")
        self._pairing = pairing

    def collect(self) -> "Iterable[Metric]":
        """Yield every metric; an entity that never failed has none."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        yield GaugeMetricFamily(
            "twinbus_pairing_protected",
            "1 while there are backlog queues, so that sends that fail are diverted",
            value=int(self._pairing.is_protected),
        )
        if self._pairing.options.enable_syphon:
            has_syphon = self._pairing.syphon is not None and not self._pairing.syphon_failure
            yield GaugeMetricFamily(
                "twinbus_pairing_syphon_running",
                "1 while the syphon of this process brings messages home",
                value=int(has_syphon),
            )
        labels = ["path"]
        failed_over = GaugeMetricFamily(
            "twinbus_pairing_failed_over", "1 while sends go to the backlog", labels=labels
        )
        returning = GaugeMetricFamily(
            "twinbus_pairing_returning",
            "1 while sends go to the backlog only because diverted messages are not home",
            labels=labels,
        )
        failures = GaugeMetricFamily(
            "twinbus_pairing_failures",
            "Failures of an entity since it was last healthy",
            labels=labels,
        )
        counted = {
            name: CounterMetricFamily(f"twinbus_pairing_{name}", text, labels=labels)
            for name, text in (
                ("failovers", "Times an entity failed over"),
                ("diverted", "Messages diverted to the backlog"),
                ("pings", "Pings sent to a failed-over entity"),
            )
        }
        for status in self._pairing.status():
            is_returning = status.state in (HealthState.RETURNING, HealthState.SWITCHING)
            failed_over.add_metric([status.path], int(status.state.diverts))
            returning.add_metric([status.path], int(is_returning))
            failures.add_metric([status.path], status.failures)
            for name, family in counted.items():
                family.add_metric([status.path], getattr(status, name))
        yield from (failed_over, returning, failures, *counted.values())
        signs = CounterMetricFamily(
            "twinbus_pairing_signs",
            "Observations of entities, by state and sign",
            labels=["state", "sign"],
        )
        for (state, sign), count in self._pairing.signs.items():
            signs.add_metric([state.value, sign.value], count)
        yield signs
        in_rotation = GaugeMetricFamily(
            "twinbus_pairing_queue_in_rotation",
            "1 while a backlog queue is in rotation",
            labels=labels,
        )
        for queue in self._pairing.backlog_queues():
            in_rotation.add_metric([queue.path], int(queue.is_in_rotation))
        yield in_rotation
