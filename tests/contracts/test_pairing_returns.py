"""The return of an entity to the primary: by a ping, or by hand."""

from typing import Any

import pytest

from tests.contracts.pairing_words import AT_ONCE, MINUTE, ORDERS, Pair, message
from twinbus import MessagingError
from twinbus.errors import InvalidArgumentError
from twinbus.pairing.events import FailedOver, Returned
from twinbus.pairing.health import HealthState


def test_when_a_ping_gets_through_the_entity_is_healthy_at_once_for_all_clients(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    early = pair.sender()
    pair.fail_over()
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    early.send(message("early"))
    pair.send("late", path="ORDERS")
    assert pair.primary.take() == ["early", "late"]
    assert pair.state() is HealthState.HEALTHY


def test_mark_path_healthy_does_the_same_by_hand(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.pairing.mark_path_healthy("Orders")
    pair.send("home")
    assert pair.primary.take() == ["home"]


def test_marking_a_path_that_is_still_down_lets_it_fail_over_again(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "a")
    pair.pairing.mark_path_healthy(ORDERS)
    pair.send("b")
    assert sorted(pair.diverted()) == ["a", "b"]
    assert len(pair.announced(FailedOver)) == 2


def test_marking_a_suspect_path_clears_its_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pairing.mark_path_healthy(ORDERS)
    pair.pass_time(hours=1)
    assert pair.state() is HealthState.HEALTHY


def test_marking_a_path_nobody_knows_changes_nothing(pair: Pair) -> None:
    pair.begin()
    pair.pairing.mark_path_healthy("nowhere")
    assert pair.pairing.status() == []


@pytest.mark.parametrize("path", ["", None, 7])
def test_marking_takes_the_path_of_an_entity(local: Pair, path: Any) -> None:
    local.begin()
    with pytest.raises(InvalidArgumentError):
        local.pairing.mark_path_healthy(path)
