"""A short run of the pairing outages: two real servers, and every way to lose one of them."""

import random
from datetime import timedelta

import pytest

from tests.soak.pairing_outage import Outcome, scenarios

SCENARIOS = scenarios(long_interval=timedelta(seconds=1))


def run(name: str) -> Outcome:
    """Run a scenario, print what it measured, and return what came of it."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"replay: python -m tests.soak.pairing_outage --rounds 1 --seed {seed} --only {name}")
    outcome = SCENARIOS[name](seed)
    print(outcome)
    outcome.check()
    assert outcome.acknowledged > 0
    return outcome


@pytest.mark.parametrize("name", ["kill", "freeze", "terminate"])
def test_no_send_raises_when_the_primary_goes_and_the_failover_interval_is_zero(name: str) -> None:
    outcome = run(name)
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


def test_a_stopped_backlog_queue_leaves_the_rotation_and_no_send_raises() -> None:
    outcome = run("backlog_queue_stopped")
    assert outcome.moved > 0
    assert not outcome.raised


def test_sends_raise_both_causes_while_both_are_down_and_succeed_when_the_secondary_is_back() -> (
    None
):
    outcome = run("both_killed")
    assert set(outcome.raised) == {"BacklogUnavailableError"}


def test_with_preserve_order_nothing_is_overtaken_whatever_is_killed() -> None:
    outcome = run("kept_in_order")
    assert outcome.moved > 0
    assert set(outcome.raised) == {"BacklogUnavailableError"}
