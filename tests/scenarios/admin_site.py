"""Health, readiness and metrics of a site, asked over HTTP."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from prometheus_client.parser import text_string_to_metric_families

from tests.scenarios.site import Site
from twinbus.server import web
from twinbus.server.door import Door


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """What the door answered."""

    status: int
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass(frozen=True, slots=True)
class AdminSite:
    """Asks the door of a site over HTTP."""

    port: int

    def ask(self, path: str, method: str = "GET") -> AdminAnswer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return AdminAnswer(answer.status, answer.read())

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of the one sample with these labels."""
        families = text_string_to_metric_families(self.ask("/metrics").body.decode())
        [value] = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return value


@contextmanager
def admin_of(site: Site) -> Iterator[AdminSite]:
    """Open the door of a site; metrics are rendered for each reader."""
    with (
        mock.patch.object(web, "METRICS_AGE_S", 0.0),
        closing(Door(site.embedded, site.clock, name="shop")) as door,
    ):
        yield AdminSite(door.admin_port)
