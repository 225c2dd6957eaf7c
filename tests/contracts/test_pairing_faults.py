"""A factory that faults or closes alone: what becomes of its partner, with and without a syphon."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.contracts.pairing_trouble import CLOSED, FAULTED, OPENED, on_real_time, states
from tests.contracts.pairing_words import (
    AT_ONCE,
    NEWS,
    ORDERS,
    PRIMARY,
    SECONDARY,
    SESSIONS,
    TICK,
    Pair,
    message,
    messages,
)
from tests.waiting import until
from twinbus import MessagingError, MessagingFactory
from twinbus.client.state import FactoryState
from twinbus.errors import FactoryFaultedError
from twinbus.pairing.health import HealthState
from twinbus.testing import Fault

GRACE = timedelta(seconds=5)


# -- where no syphon runs --------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "fault"])
def test_without_a_syphon_the_primary_outlives_the_secondary(pair: Pair, end: str) -> None:
    pair.begin()
    if end == "close":
        pair.secondary.factory.close()
    else:
        pair.secondary.factory.fault("trouble")
    pair.pass_time(minutes=1)
    pair.send("a")
    assert pair.primary.take() == ["a"]
    assert pair.primary.factory.state is OPENED


def test_without_a_syphon_a_lost_secondary_is_reported_when_it_is_needed(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.secondary.factory.fault("trouble")
    pair.break_down()
    with pytest.raises(MessagingError, match=r"trouble|unavailable"):
        pair.send()
    assert pair.primary.factory.state is OPENED


def test_a_primary_that_faults_without_a_syphon_stops_its_pings(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.primary.factory.fault("trouble")
    sent = len(pair.primary.tap.pings())
    pair.pass_time(hours=1)
    assert len(pair.primary.tap.pings()) == sent


# -- where a syphon runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["primary", "secondary"])
def test_when_one_factory_faults_the_other_has_5_seconds_to_be_closed(
    pair: Pair, first: str
) -> None:
    pair.begin_with_syphon()
    other = pair.secondary if first == "primary" else pair.primary
    getattr(pair, first).factory.fault("the disk is gone")
    pair.pass_time(GRACE - TICK)
    assert other.factory.state is OPENED
    pair.pass_time(TICK)
    assert states(pair) == (FAULTED, FAULTED)


@pytest.mark.parametrize("first", ["primary", "secondary"])
def test_a_factory_that_is_closed_within_5_seconds_of_a_fault_is_not_faulted(
    pair: Pair, first: str
) -> None:
    pair.begin_with_syphon()
    other = pair.secondary if first == "primary" else pair.primary
    getattr(pair, first).factory.fault("the disk is gone")
    pair.pass_time(GRACE - TICK)
    other.factory.close()
    pair.pass_time(hours=1)
    assert other.factory.state is CLOSED
    assert pair.syphon.stops == 1


@pytest.mark.parametrize(
    ("first", "other", "partner"),
    [("primary", "secondary", PRIMARY), ("secondary", "primary", SECONDARY)],
)
def test_a_faulted_factory_refuses_work_with_an_error_that_names_partner_and_cause(
    pair: Pair, first: str, other: str, partner: str
) -> None:
    pair.begin_with_syphon()
    getattr(pair, first).factory.fault("the disk is gone")
    pair.pass_time(GRACE)
    with pytest.raises(FactoryFaultedError, match=partner) as caught:
        getattr(pair, other).factory.create_message_sender(ORDERS).send(message())
    assert "the disk is gone" in str(caught.value)


WORK: dict[str, Callable[[MessagingFactory], object]] = {
    "sender": lambda factory: factory.create_message_sender(ORDERS),
    "receiver": lambda factory: factory.create_message_receiver(ORDERS),
    "queue": lambda factory: factory.create_queue_client(ORDERS),
    "topic": lambda factory: factory.create_topic_client(NEWS),
    "subscription": lambda factory: factory.create_subscription_client(NEWS, "eu"),
    "session": lambda factory: factory.accept_message_session(SESSIONS, wait=AT_ONCE),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_faulted_factory_refuses_every_kind_of_work(
    local: Pair, work: Callable[[MessagingFactory], object]
) -> None:
    local.begin_with_syphon()
    local.secondary.factory.fault("the disk is gone")
    local.pass_time(GRACE)
    with pytest.raises(FactoryFaultedError, match=f"{SECONDARY}.*the disk is gone"):
        work(local.primary.factory)


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["healthy", "failed over"])
def test_clients_of_a_faulted_factory_send_nothing_anywhere(
    pair: Pair, is_failed_over: bool
) -> None:
    pair.begin_with_syphon(failover_interval=AT_ONCE)
    client = pair.primary.factory.create_queue_client(ORDERS)
    if is_failed_over:
        pair.fail_over()
    pair.secondary.factory.fault("the disk is gone")
    pair.pass_time(GRACE)
    with pytest.raises(FactoryFaultedError, match="the disk is gone"):
        client.send(message("late"))
    with pytest.raises(FactoryFaultedError, match="the disk is gone"):
        client.send_batch(messages("late"))
    with pytest.raises(FactoryFaultedError, match="the disk is gone"):
        client.receive(AT_ONCE)
    assert "late" not in pair.diverted()


@pytest.mark.parametrize("first", ["primary", "secondary"])
def test_a_fault_stops_the_pings_and_the_syphon(pair: Pair, first: str) -> None:
    pair.begin_with_syphon(failover_interval=AT_ONCE)
    pair.fail_over()
    getattr(pair, first).factory.fault("the disk is gone")
    pair.pass_time(GRACE)
    sent = len(pair.primary.tap.pings())
    pair.pass_time(hours=1)
    assert len(pair.primary.tap.pings()) == sent
    assert pair.syphon.stops == 1


def test_when_the_secondary_is_closed_and_the_primary_is_not_in_5_seconds_it_is_faulted(
    pair: Pair,
) -> None:
    pair.begin_with_syphon()
    sender = pair.sender()
    pair.secondary.factory.close()
    pair.pass_time(GRACE - TICK)
    sender.send(message("in time"))
    assert pair.primary.factory.state is OPENED
    pair.pass_time(TICK)
    assert pair.primary.factory.state is FAULTED
    with pytest.raises(FactoryFaultedError, match=f"{SECONDARY}.*closed"):
        sender.send(message("too late"))
    assert pair.primary.take() == ["in time"]


@pytest.mark.parametrize("after", [AT_ONCE, GRACE - TICK], ids=str)
def test_a_primary_that_is_closed_within_5_seconds_of_the_secondary_is_not_faulted(
    pair: Pair, after: timedelta
) -> None:
    pair.begin_with_syphon()
    pair.secondary.factory.close()
    pair.pass_time(after)
    pair.primary.factory.close()
    pair.pass_time(hours=1)
    assert states(pair) == (CLOSED, CLOSED)


def test_when_the_primary_is_closed_the_secondary_is_closed_and_not_faulted(pair: Pair) -> None:
    pair.begin_with_syphon()
    seen: list[FactoryState] = []
    pair.secondary.factory.on_state_change(seen.append)
    pair.primary.factory.close()
    pair.pass_time(hours=1)
    assert seen == [FactoryState.CLOSING, CLOSED]


def test_a_fault_within_the_5_seconds_faults_nobody_twice(pair: Pair) -> None:
    pair.begin_with_syphon()
    pair.secondary.factory.close()
    pair.primary.factory.fault("its own trouble")
    pair.pass_time(hours=1)
    assert states(pair) == (FAULTED, CLOSED)
    with pytest.raises(FactoryFaultedError, match="its own trouble"):
        pair.sender()


def test_a_fault_after_the_5_seconds_stops_the_syphon(pair: Pair) -> None:
    pair.begin_with_syphon()
    pair.secondary.factory.close()
    pair.pass_time(GRACE)
    assert pair.syphon.stops == 1


@pytest.mark.parametrize("first", ["primary", "secondary"])
def test_on_real_time_a_fault_leaves_no_thread_behind(tmp_path: Path, first: str) -> None:
    with on_real_time(tmp_path) as pair:
        pair.faults.inject(Fault.UNAVAILABLE, ORDERS)
        pair.primary.create_message_sender(ORDERS).send(message())
        assert pair.pairing.status()[0].state is HealthState.FAILED_OVER
        {"primary": pair.primary, "secondary": pair.secondary}[first].fault("trouble")
        until(lambda: (pair.primary.state, pair.secondary.state) == (FAULTED, FAULTED))
        for thread in threading.enumerate():
            if thread.name == "twinbus-pairing":
                thread.join(60)
        assert not [thread for thread in threading.enumerate() if thread.name == "twinbus-pairing"]
