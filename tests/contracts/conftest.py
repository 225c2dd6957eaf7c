"""The worlds the contract suite runs in: every way to reach a namespace is one."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from twinbus.broker.commands import Command
from twinbus.clock import ManualClock
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace


@dataclass
class World:
    """A namespace and the clock it lives by."""

    namespace: Namespace
    clock: ManualClock

    def ask(self, command: Command[Any]) -> Any:
        return self.namespace.submit(command).result(timeout=30)

    def wait(self, **span: float) -> None:
        self.clock.advance(timedelta(**span))


@pytest.fixture(params=["embedded"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    assert request.param == "embedded"
    clock = ManualClock()
    with EmbeddedNamespace(tmp_path / "namespace", clock) as namespace:
        yield World(namespace, clock)
