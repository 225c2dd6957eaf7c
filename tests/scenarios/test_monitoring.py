"""Alerts and the dashboard ask for metrics, labels and values that a running server has."""

import json
import re
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.contracts.pairing_words import SyphonStandIn
from tests.scenarios.server_process import ORDERS, Server
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, RetryPolicy, errors
from twinbus import SendAvailabilityPairedNamespaceOptions as PairingOptions
from twinbus.entities import EntityStatus
from twinbus.limits import DEFAULT_PORT
from twinbus.pairing.metrics import PairingCollector

DEPLOY = Path(__file__).parents[2] / "deploy"
PING = "application/vnd.ms-servicebus-ping"
METRIC = re.compile(r"\b(twinbus_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=|!=)"((?:[^"\\]|\\.)*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")
ADDED_BY_PROMETHEUS = {"instance", "job"}
CODES = {
    kind.__name__.removesuffix("Error")
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.MessagingError)
}


def alerts() -> dict[str, str]:
    """Return the query of each alert."""
    groups = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def panels() -> dict[str, str]:
    """Return each query of the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return {
        f"{panel['title']}-{target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


QUERIES: dict[str, Any] = {**alerts(), **panels()}


def paired_metrics(folder: Path, server: Server) -> str:
    """Return what an application exports whose entity has failed over to the server."""
    primary = f"Endpoint=embedded://{folder / 'primary'}"
    once = RetryPolicy.once(timedelta(seconds=10))
    with NamespaceManager.from_connection_string(primary) as manager:
        queue = manager.create_queue("orders")
        manager.update_queue(replace(queue, status=EntityStatus.SEND_DISABLED))
    with MessagingFactory.from_connection_string(primary, retry_policy=once) as factory:
        options = PairingOptions(
            server.manager(),
            server.factory(),
            backlog_queue_count=1,
            failover_interval=timedelta(0),
            enable_syphon=True,
            syphon=SyphonStandIn(),
        )
        pairing = factory.pair_namespace(options)
        factory.create_queue_client("orders").send(BrokeredMessage(b"diverted"))
        registry = CollectorRegistry()
        registry.register(PairingCollector(pairing))
        return generate_latest(registry).decode()


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """What Prometheus reads from a server with a backlog, and from the application that made it."""
    folder = tmp_path_factory.mktemp("monitoring")
    server = Server(folder)
    server.start(ORDERS)
    try:
        server.send(b"one", b"two")
        server.take()
        with server.factory() as factory:
            factory.create_queue_client("orders").send(BrokeredMessage(b"", content_type=PING))
        pages = [paired_metrics(folder, server), server.get("/metrics")[2]]
    finally:
        server.stop()
    return [
        sample
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]


def matches(operator: str, wanted: str, value: str) -> bool:
    if operator == "=":
        return value == wanted
    return operator == "!=" or re.fullmatch(wanted, value) is not None


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_finds_its_metrics_labels_and_values(query: str, samples: list[Sample]) -> None:
    asked = METRIC.findall(query)
    assert asked, "it asks for no metric of Twinbus"
    known: set[str] = set(ADDED_BY_PROMETHEUS)
    for name, selector in asked:
        found = [sample for sample in samples if sample.name == name]
        assert found, f"{name} is no metric"
        known |= {label for sample in found for label in sample.labels}
        for label, operator, wanted in MATCHER.findall(selector):
            if label in ADDED_BY_PROMETHEUS or wanted in CODES:
                continue
            found = [s for s in found if matches(operator, wanted, s.labels[label])]
            assert found, f'{name}: no sample has {label}{operator}"{wanted}"'
    for labels in GROUPING.findall(query):
        assert {label.strip() for label in labels.split(",")} <= known


def test_every_selector_of_a_query_is_understood_by_this_test() -> None:
    for query in QUERIES.values():
        for selector in re.findall(r"\{([^}]*)\}", query):
            assert MATCHER.sub("", selector).strip(", ") == "", selector


def test_no_sample_is_exported_twice(samples: list[Sample]) -> None:
    named = Counter((sample.name, *sorted(sample.labels.items())) for sample in samples)
    assert [name for name, count in named.items() if count > 1] == []


def test_every_alert_says_what_is_wrong_and_how_urgent_it_is() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]
    page = (DEPLOY.parent / "docs" / "operations" / "monitor.md").read_text()
    assert [name for name in alerts() if f"`{name}`" not in page] == []


def test_the_configuration_of_the_page_names_the_port_and_the_rules() -> None:
    page = (DEPLOY.parent / "docs" / "operations" / "monitor.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = yaml.safe_load(block)
    assert shown["scrape_configs"][0]["static_configs"][0]["targets"] == [
        f"localhost:{DEFAULT_PORT}"
    ]
    assert all((DEPLOY / name).exists() for name in shown["rule_files"])
