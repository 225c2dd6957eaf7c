"""The raw attacks of the soak, each once against a real server: refused, and nobody is harmed."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.soak.hostile_attacks import (
    Hog,
    raw_huge_origins,
    raw_rules,
    raw_senders_beyond_64_bits,
    raw_settlements_of_many_intervals,
)
from tests.soak.hostile_neighbour import Street, metrics_of
from tests.soak.server_process import ServerProcess


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    folder: Path = tmp_path_factory.mktemp("raw")
    server = ServerProcess(folder)
    server.start()
    yield Street(server)
    server.kill()


@pytest.mark.parametrize(
    "attack",
    [
        raw_huge_origins,
        raw_rules,
        raw_senders_beyond_64_bits,
        raw_settlements_of_many_intervals,
    ],
    ids=lambda value: value.__name__,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_raw_attack_is_refused_and_restarts_nothing(
    street: Street, attack: Callable[[Hog], None], seed: int
) -> None:
    hog = Hog(street.hostile, random.Random(seed))
    attack(hog)
    assert hog.findings == []
    found = metrics_of(street.server)
    assert found == {"twinbus_restarts_total": 0, "twinbus_failed_commands_total": 0}
