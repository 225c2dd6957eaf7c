"""A short run of the pairing outages: two real servers, and every way to lose one of them.

Clients reach them natively, and through the SDK of Azure Service Bus.
"""

import gc
import random
from datetime import timedelta
from importlib.util import find_spec

import pytest

from tests.soak.pairing_outage import Outcome, scenarios
from tests.soak.pairing_site import Way

AZURE = pytest.param(
    Way.AZURE,
    id="sb",
    marks=(
        pytest.mark.skipif(
            find_spec("azure.servicebus") is None,
            reason="the SDK azure-servicebus is not installed",
        ),
        pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning"),  # of the SDK
    ),
)
either_way = pytest.mark.parametrize("way", [pytest.param(Way.TWINBUS, id="twinbus"), AZURE])
SCENARIOS = {way: scenarios(timedelta(seconds=1), way) for way in Way}


def run(name: str, way: Way = Way.TWINBUS) -> Outcome:
    """Run a scenario, print what it measured, and return what came of it."""
    seed = random.SystemRandom().randrange(2**32)
    options = f"--rounds 1 --seed {seed} --way {way.value} --only {name}"
    print(f"replay: python -m tests.soak.pairing_outage {options}")
    outcome = SCENARIOS[way][name](seed)
    gc.collect()  # sockets that the SDK dropped, while their warnings are expected
    print(outcome)
    outcome.check()
    assert outcome.acknowledged > 0
    return outcome


@either_way
@pytest.mark.parametrize("name", ["kill", "freeze"])
def test_no_send_raises_when_the_primary_goes_and_the_failover_interval_is_zero(
    name: str, way: Way
) -> None:
    outcome = run(name, way)
    assert outcome.moved > 0
    assert not outcome.raised


def test_no_send_raises_when_the_primary_is_stopped_and_the_failover_interval_is_zero() -> None:
    outcome = run("terminate")
    assert outcome.moved > 0
    assert not outcome.raised


@pytest.mark.parametrize("name", ["kill_with_interval", "freeze_with_interval"])
def test_no_send_raises_once_the_failover_interval_is_over(name: str) -> None:
    assert run(name).moved > 0


def test_a_key_that_may_not_send_is_no_reason_to_fail_over() -> None:
    outcome = run("claim_taken_away")
    assert set(outcome.raised) == {"UnauthorizedError"}
    assert outcome.moved == 0


def test_a_busy_primary_is_waited_for() -> None:
    assert run("throttled").moved == 0


@either_way
def test_a_stopped_backlog_queue_leaves_the_rotation_and_no_send_raises(way: Way) -> None:
    outcome = run("backlog_queue_stopped", way)
    assert outcome.moved > 0
    assert not outcome.raised


@either_way
def test_sends_raise_both_causes_while_both_are_down_and_succeed_when_the_secondary_is_back(
    way: Way,
) -> None:
    outcome = run("both_killed", way)
    assert set(outcome.raised) == {"BacklogUnavailableError"}


@either_way
def test_with_preserve_order_nothing_is_overtaken_whatever_is_killed(way: Way) -> None:
    outcome = run("kept_in_order", way)
    assert outcome.moved > 0
    assert set(outcome.raised) == {"BacklogUnavailableError"}
