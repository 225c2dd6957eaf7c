"""The worlds the contract suite runs in: every way to reach a namespace is one."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.keys import ROOT
from tests.contracts.pairing_words import WAYS, Pair, opened
from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString, Place
from twinbus.ledger import NO_LEDGER
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import Command, PutKey
from twinbus.server.door import Door


@dataclass
class World:
    """A namespace and the clock it lives by."""

    namespace: Namespace
    clock: ManualClock

    def ask(self, command: Command[Any]) -> Any:
        return self.namespace.submit(command).result(timeout=30)

    def wait(self, **span: float) -> None:
        self.clock.advance(timedelta(**span))


@pytest.fixture(params=["embedded", "server"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clock = ManualClock()
    with EmbeddedNamespace(
        EngineSettings(directory=tmp_path / "namespace", ledger=NO_LEDGER), clock
    ) as namespace:
        if request.param == "embedded":
            yield World(namespace, clock)
            return
        namespace.ask(PutKey(ROOT))
        with closing(Door(namespace, clock)) as door:
            connection = ConnectionString(
                place=Place.SERVER,
                host="127.0.0.1",
                port=door.port,
                key_name=ROOT.name,
                key=ROOT.primary,
            )
            with ServerNamespace(connection, clock) as client:
                yield World(client, clock)


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with opened(request.param, tmp_path) as pair:
        yield pair


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Pair]:
    with opened("embedded", tmp_path) as pair:
        yield pair


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Pair]:
    with opened("server", tmp_path) as pair:
        yield pair
