"""A pairing whose clock is set back or forth."""

from datetime import timedelta

import pytest

from tests.contracts.pairing_words import AT_ONCE, MINUTE, ORDERS, Pair
from twinbus import MessagingError
from twinbus.errors import BacklogUnavailableError
from twinbus.pairing.events import BacklogQueueBack, Returned
from twinbus.pairing.health import HealthState
from twinbus.testing import Fault


def test_a_clock_set_back_while_suspect_delays_the_failover_by_one_interval_at_most(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.set_back(hours=5)
    assert pair.state() is HealthState.SUSPECT
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.FAILED_OVER


def test_a_clock_set_back_while_suspect_still_lets_a_success_clear_the_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    with pytest.raises(MessagingError):
        pair.send()
    pair.set_back(days=1)
    pair.send("success")
    pair.pass_time(days=2)
    assert pair.state() is HealthState.HEALTHY


def test_a_clock_set_back_while_failed_over_delays_the_ping_by_one_interval_at_most(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.set_back(hours=5)
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    assert pair.state() is HealthState.HEALTHY


def test_a_clock_set_back_while_failed_over_keeps_the_messages_going_to_the_backlog(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(MINUTE)
    pair.set_back(hours=5)
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]


def test_a_clock_set_back_during_a_cool_down_delays_the_queue_by_one_interval_at_most(
    pair: Pair,
) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0)
    with pytest.raises(BacklogUnavailableError):
        pair.send()
    pair.secondary.faults.heal()
    pair.set_back(hours=5)
    assert pair.in_rotation() == [False]
    pair.pass_time(MINUTE)
    assert pair.in_rotation() == [True]
    assert len(pair.announced(BacklogQueueBack)) == 1


@pytest.mark.parametrize("hours", [-1, 1, 24 * 365])
def test_a_wall_clock_that_is_set_while_failed_over_moves_no_ping(pair: Pair, hours: int) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.clock.set_wall(timedelta(hours=hours))
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    assert pair.state() is HealthState.HEALTHY


def test_a_clock_set_back_changes_nothing_for_the_healthy(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.send("a")
    pair.set_back(hours=5)
    pair.send("b")
    assert pair.primary.take() == ["a", "b"]
    assert pair.pairing.status() == []
