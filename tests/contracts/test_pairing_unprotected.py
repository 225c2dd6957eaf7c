"""A pairing that does not wait for its secondary: sends are unprotected until it is reached."""

import pytest

from tests.contracts.pairing_words import AT_ONCE, HOUR, ORDERS, Pair, SyphonStandIn
from twinbus import MessagingError, SendAvailabilityPairing, UnauthorizedError
from twinbus.client.state import FactoryState
from twinbus.errors import CommunicationError
from twinbus.pairing.events import Protected, Returned, Unprotected
from twinbus.pairing.health import HealthState
from twinbus.protocol.commands import ListEntities


def test_an_application_can_start_while_the_secondary_is_down(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("not yet"), ListEntities)
    pairing = pair.begin(wait_for_secondary=False, failover_interval=AT_ONCE)
    assert "being prepared" in pair.wait_for(Unprotected).cause
    assert "not yet" in pair.wait_for(Unprotected, 2).cause
    assert not pairing.is_protected
    pair.send("healthy")
    assert pair.primary.take() == ["healthy"]
    pair.break_down()
    with pytest.raises(MessagingError, match="unavailable"):
        pair.send("lost if unprotected")
    pair.secondary.manager_tap.relent()
    pair.pass_time(seconds=30)
    assert pair.wait_for(Protected).queues == 2
    assert pairing.is_protected
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]
    assert len(pair.announced(Unprotected)) == 2


def test_an_unprotected_pairing_goes_on_trying_the_primary(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("not yet"), ListEntities)
    pair.begin(wait_for_secondary=False, failover_interval=AT_ONCE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send("a")
    pair.heal()
    pair.send("b")
    assert pair.primary.take() == ["b"]


def test_a_send_that_succeeds_without_a_backlog_ends_the_failover(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("not yet"), ListEntities)
    pair.begin(wait_for_secondary=False, failover_interval=AT_ONCE)
    pair.break_down()
    with pytest.raises(MessagingError) as caught:
        pair.send("a")
    assert caught.value.facts["namespace"] == "primary"
    assert any("no backlog queue yet" in note for note in caught.value.__notes__)
    assert pair.state() is HealthState.FAILED_OVER
    pair.heal()
    pair.send("b")
    assert pair.wait_for(Returned).by == "send"
    assert pair.state() is HealthState.HEALTHY


def test_the_same_cause_is_reported_once_however_often_it_was_tried(local: Pair) -> None:
    local.secondary.manager_tap.refuse(CommunicationError("nobody is there"), ListEntities)
    local.begin(wait_for_secondary=False)
    local.pass_time(HOUR)
    assert [event.cause for event in local.announced(Unprotected)] == [
        "the backlog is being prepared",
        "Communication: nobody is there",
    ]


def test_an_unprotected_pairing_with_a_syphon_ends_with_its_secondary(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("not yet"), ListEntities)
    pair.begin_with_syphon(wait_for_secondary=False)
    pair.secondary.factory.close()
    pair.pass_time(seconds=5)
    assert pair.primary.factory.state is FactoryState.FAULTED


def test_a_reachable_secondary_protects_at_once(pair: Pair) -> None:
    pair.begin(wait_for_secondary=False, failover_interval=AT_ONCE)
    assert pair.wait_for(Protected).queues == 2
    pair.fail_over(ORDERS, "a")
    assert pair.diverted() == ["a"]


def test_the_syphon_of_an_unprotected_pairing_starts_with_its_backlog(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("not yet"), ListEntities)
    pair.begin_with_syphon(wait_for_secondary=False)
    assert pair.syphon.pairing is None
    pair.secondary.manager_tap.relent()
    pair.pass_time(seconds=30)
    pair.wait_for(Protected)
    assert pair.syphon.pairing is pair.pairing
    pair.primary.factory.close()
    assert pair.syphon.stops == 1


def test_a_syphon_that_cannot_start_in_the_background_is_tried_again_and_sends_are_protected(
    local: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [MessagingError("no Spark"), MessagingError("no Spark")]

    def start(pairing: SendAvailabilityPairing) -> SyphonStandIn:
        if refusals:
            raise refusals.pop()
        return local.syphon(pairing)

    local.begin(
        wait_for_secondary=False, enable_syphon=True, syphon=start, failover_interval=AT_ONCE
    )
    local.fail_over(ORDERS, "diverted")
    local.pass_time(seconds=30)
    local.pass_time(seconds=30)
    assert local.syphon.pairing is local.pairing
    assert caplog.text.count("the syphon cannot start") == 1
    assert local.diverted() == ["diverted"]


def test_a_pairing_that_is_closed_while_unprotected_ends(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("not yet"), ListEntities)
    pair.begin(wait_for_secondary=False)
    pair.wait_for(Unprotected)
    pair.primary.factory.close()
    asked = len(pair.secondary.manager_tap.asked)
    pair.pass_time(HOUR)
    assert len(pair.secondary.manager_tap.asked) == asked
