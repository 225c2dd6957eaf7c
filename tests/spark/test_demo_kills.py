"""A short run of the demo-kill soak: real servers, a real kill -9, and the demo's own audit."""

import pytest

from tests.soak.demo_kills import run

SEED = 20
KILLS = 2


@pytest.mark.usefixtures("spark")
def test_no_kill_of_the_primary_loses_or_doubles_an_order_or_raises_a_false_alarm() -> None:
    print(f"replay: python -m tests.soak.demo_kills --kills {KILLS} --seed {SEED}")
    outcome = run(KILLS, SEED, reconcile=False)
    outcome.check()
    assert outcome.kills == KILLS
    assert outcome.diverted > 0
