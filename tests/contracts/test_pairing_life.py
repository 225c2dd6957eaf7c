"""The life of a pairing: pings, clocks that are set back, and what closes or faults with it."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    NEWS,
    ORDERS,
    PRIMARY,
    SECONDARY,
    SESSIONS,
    SUBSCRIPTION,
    Pair,
    SyphonStandIn,
    backlog,
    is_ping,
    message,
    messages,
)
from tests.waiting import until
from twinbus import (
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    SendAvailabilityPairedNamespaceOptions,
    ServerBusyError,
)
from twinbus.client.state import FactoryState
from twinbus.errors import BacklogUnavailableError, FactoryFaultedError, NamespaceClosedError
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.events import BacklogQueueBack, FailedOver, Returned
from twinbus.pairing.health import HealthState
from twinbus.pairing.metrics import PairingCollector
from twinbus.protocol.commands import Command
from twinbus.testing import Fault, FaultyNamespace

TICK = timedelta(microseconds=1)
GRACE = timedelta(seconds=5)
OPENED, CLOSED, FAULTED = FactoryState.OPENED, FactoryState.CLOSED, FactoryState.FAULTED


def states(pair: Pair) -> tuple[FactoryState, FactoryState]:
    return pair.primary.factory.state, pair.secondary.factory.state


# -- pings -----------------------------------------------------------------------------------------


def test_a_ping_is_an_empty_message_of_the_ping_type_that_lives_one_second(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.pass_time(MINUTE)
    ((_, ping),) = pair.primary.tap.pings(ORDERS)
    assert ping.body == b""
    assert ping.content_type == "application/vnd.ms-servicebus-ping"
    assert ping.time_to_live == timedelta(seconds=1)
    assert ping.application_properties == {}
    assert ping.scheduled_enqueue_time_utc is None


def test_each_ping_has_a_fresh_session(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    for _ in range(5):
        pair.pass_time(MINUTE)
    sessions = [ping.session_id for _, ping in pair.primary.tap.pings(ORDERS)]
    assert all(sessions)
    assert len(set(sessions)) == len(sessions) >= 5


def test_entities_with_sessions_take_pings(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(SESSIONS)
    pair.heal()
    pair.pass_time(MINUTE)
    assert pair.wait_for(Returned).path == SESSIONS


def test_topics_take_pings(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(NEWS)
    pair.heal()
    pair.pass_time(MINUTE)
    assert pair.wait_for(Returned).path == NEWS
    assert pair.primary.peek(SUBSCRIPTION) == []


def test_pings_reach_no_receiver(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    assert (pair.primary.peek(), pair.primary.take()) == ([], [])


def test_pings_reach_no_backlog_queue(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.pass_time(minutes=5)
    assert pair.diverted() == ["first"]


def test_a_ping_is_metered_like_any_send(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    assert pair.primary.meter()[ORDERS, "Send", "ok"][0] == 1


@pytest.mark.parametrize("interval", [timedelta(seconds=1), MINUTE, timedelta(minutes=30)], ids=str)
def test_a_failed_over_entity_is_pinged_every_ping_primary_interval(
    pair: Pair, interval: timedelta
) -> None:
    pair.begin(failover_interval=AT_ONCE, ping_primary_interval=interval)
    pair.fail_over()
    for _ in range(60):
        pair.pass_time(interval / 10)
    times = [at for at, _ in pair.primary.tap.pings(ORDERS)]
    assert {after - before for before, after in pairwise(times)} == {interval}
    assert 5 <= len(times) <= 7


def test_the_ping_interval_is_one_minute_by_default(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    for _ in range(180):
        local.pass_time(seconds=1)
    times = [at for at, _ in local.primary.tap.pings(ORDERS)]
    assert {after - before for before, after in pairwise(times)} == {MINUTE}


def test_pings_start_when_the_timer_runs_out_and_no_earlier(pair: Pair) -> None:
    pair.begin(failover_interval=timedelta(minutes=10))
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(timedelta(minutes=10) - TICK)
    assert pair.primary.tap.pings() == []
    pair.pass_time(TICK)
    pair.pass_time(MINUTE)
    assert len(pair.primary.tap.pings(ORDERS)) >= 1


def test_an_entity_is_pinged_once_however_many_clients_it_has(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    for number in range(20):
        pair.send(path=["orders", "Orders", "ORDERS"][number % 3])
    before = len(pair.primary.tap.pings())
    pair.pass_time(MINUTE)
    assert len(pair.primary.tap.pings()) == before + 1


def test_every_failed_over_entity_is_pinged_and_no_other(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS)
    pair.fail_over(NEWS)
    pair.send("fine", path=INVOICES)
    pair.pass_time(MINUTE)
    assert len(pair.primary.tap.pings(ORDERS)) == len(pair.primary.tap.pings(NEWS)) == 1
    assert pair.primary.tap.pings(INVOICES) == []


def test_each_factory_pings_for_itself(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    other = MessagingFactory(local.primary.tap, name=PRIMARY, clock=local.clock)
    other.pair_namespace(local.options(failover_interval=AT_ONCE, backlog_queue_count=2))
    local.fail_over()
    other.create_message_sender(ORDERS).send(message())
    local.pass_time(MINUTE)
    assert len(local.primary.tap.pings(ORDERS)) == 2


def test_a_healthy_entity_is_not_pinged(pair: Pair) -> None:
    pair.begin()
    pair.send()
    pair.pass_time(hours=1)
    assert pair.primary.tap.pings() == []


@pytest.mark.parametrize("by_hand", [False, True], ids=["by ping", "by hand"])
def test_pings_stop_when_the_entity_is_back(pair: Pair, by_hand: bool) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    if by_hand:
        pair.pairing.mark_path_healthy(ORDERS)
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    sent = len(pair.primary.tap.pings())
    pair.pass_time(hours=2)
    assert len(pair.primary.tap.pings()) == sent


@pytest.mark.parametrize("fault", Fault)
def test_a_ping_that_fails_leaves_the_entity_failed_over(pair: Pair, fault: Fault) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.break_down(ORDERS, fault)
    pair.pass_time(MINUTE)
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.FAILED_OVER
    assert len(pair.primary.tap.pings()) >= 1


def test_after_failed_pings_one_that_gets_through_is_enough(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    for _ in range(3):
        pair.pass_time(MINUTE)
    pair.heal()
    pair.pass_time(MINUTE)
    returned = pair.wait_for(Returned)
    assert returned.at == pair.clock.now()
    pair.send("home")
    assert pair.primary.take() == ["home"]


def test_a_busy_server_is_left_alone_for_10_seconds_by_pings_too(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, ping_primary_interval=timedelta(seconds=1))
    local.fail_over()
    local.primary.tap.refuse(ServerBusyError("wait 10 s", retry_after_s=10))
    local.pass_time(seconds=1)
    pinged = len(local.primary.tap.pings())
    for _ in range(9):
        local.pass_time(seconds=1)
    assert len(local.primary.tap.pings()) == pinged
    local.pass_time(seconds=1)
    assert len(local.primary.tap.pings()) == pinged + 1


def test_an_entity_fails_over_and_returns_again_and_again(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    for outage in range(1, 4):
        pair.fail_over(ORDERS, str(outage))
        pair.heal()
        pair.pass_time(MINUTE)
        pair.wait_for(Returned, outage)
    assert sorted(pair.diverted()) == ["1", "2", "3"]
    (status,) = pair.pairing.status()
    assert (status.failovers, status.diverted, status.state) == (3, 3, HealthState.HEALTHY)


class Silence:
    """Takes pings and never answers them."""

    def __init__(self, pair: Pair) -> None:
        self._submit = pair.primary.faults.submit
        self.futures: list[Future[Any]] = []
        pair.primary.faults.submit = self.submit  # type: ignore[method-assign]

    def submit(self, command: Command[Any]) -> "Future[Any]":
        if not is_ping(command):
            return self._submit(command)
        self.futures.append(Future())
        return self.futures[-1]


def test_an_entity_that_does_not_answer_a_ping_holds_up_no_other(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over(ORDERS)
    silence = Silence(local)
    local.pass_time(MINUTE)
    assert len(silence.futures) == 1
    local.primary.faults.submit = silence._submit  # type: ignore[method-assign]
    local.fail_over(INVOICES)
    local.heal()
    local.pass_time(MINUTE)
    assert local.state(INVOICES) is HealthState.HEALTHY


def test_a_ping_that_nobody_answers_does_not_keep_the_next_from_being_sent(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over(ORDERS)
    Silence(local)
    for _ in range(5):
        local.pass_time(MINUTE)
    assert len(local.primary.tap.pings(ORDERS)) == 5


def test_an_answer_that_comes_after_the_return_means_nothing(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over(ORDERS)
    silence = Silence(local)
    local.pass_time(MINUTE)
    local.pairing.mark_path_healthy(ORDERS)
    local.pass_time(seconds=1)
    local.send("down again")
    silence.futures[0].set_result(None)
    assert local.state() is HealthState.FAILED_OVER


def test_a_ping_is_sent_once_though_the_clock_jumps_over_many_intervals(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.pass_time(hours=1)
    assert 1 <= len(pair.primary.tap.pings()) <= 60
    assert pair.state() is HealthState.FAILED_OVER


def test_on_real_time_an_entity_returns_by_itself(tmp_path: Path) -> None:
    with EmbeddedNamespace(tmp_path / "a") as first, EmbeddedNamespace(tmp_path / "b") as second:
        faults = FaultyNamespace(first)
        manager = NamespaceManager(second)
        NamespaceManager(first).create_queue(ORDERS)
        primary = MessagingFactory(faults, name=PRIMARY)
        options = SendAvailabilityPairedNamespaceOptions(
            manager, MessagingFactory(second), 1, AT_ONCE
        )
        options.ping_primary_interval = timedelta(seconds=1)
        pairing = primary.pair_namespace(options)
        is_back = threading.Event()
        pairing.on_event(lambda event: is_back.set() if isinstance(event, Returned) else None)
        faults.inject(Fault.UNAVAILABLE, ORDERS)
        primary.create_message_sender(ORDERS).send(message())
        faults.heal()
        assert is_back.wait(20)
        primary.close()
        assert not [one for one in threading.enumerate() if one.name == "twinbus-pairing"]


# -- a clock that is set back ----------------------------------------------------------------------


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
    assert len(pair.heard(BacklogQueueBack)) == 1


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


# -- closing ---------------------------------------------------------------------------------------


def test_closing_the_primary_factory_stops_the_pings(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.primary.factory.close()
    sent = len(pair.primary.tap.pings())
    pair.pass_time(hours=1)
    assert len(pair.primary.tap.pings()) == sent


def test_closing_the_primary_factory_stops_the_failover_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.primary.factory.close()
    pair.pass_time(hours=1)
    assert pair.heard(FailedOver) == []


def test_closing_the_primary_factory_closes_the_secondary(pair: Pair) -> None:
    pair.begin()
    pair.primary.factory.close()
    assert states(pair) == (CLOSED, CLOSED)
    assert pair.secondary.tap.is_closed
    assert pair.secondary.manager_tap.is_closed


def test_closing_the_primary_factory_stops_the_syphon(pair: Pair) -> None:
    pair.begin_with_syphon()
    pair.primary.factory.close()
    assert pair.syphon.stops == 1
    assert states(pair) == (CLOSED, CLOSED)


def test_the_syphon_stops_after_its_batch_and_before_the_namespaces_close(pair: Pair) -> None:
    def finish_the_batch() -> None:
        assert not pair.primary.tap.is_closed
        assert pair.secondary.factory.state is OPENED
        assert not pair.secondary.tap.is_closed
        pair.secondary.factory.create_message_receiver(backlog(0)).receive_batch(1, AT_ONCE)

    pair.begin_with_syphon()
    pair.syphon.while_stopping = finish_the_batch
    pair.primary.factory.close()
    assert states(pair) == (CLOSED, CLOSED)


def test_a_batch_that_takes_longer_than_5_seconds_faults_nobody(local: Pair) -> None:
    local.begin_with_syphon()
    local.syphon.while_stopping = lambda: local.pass_time(seconds=20)
    local.primary.factory.close()
    local.pass_time(hours=1)
    assert states(local) == (CLOSED, CLOSED)


def test_a_syphon_that_does_not_stop_in_good_order_keeps_nothing_from_closing(pair: Pair) -> None:
    def fail() -> None:
        raise RuntimeError("Spark is gone")

    pair.begin_with_syphon()
    pair.syphon.while_stopping = fail
    pair.primary.factory.close()
    assert states(pair) == (CLOSED, CLOSED)


def test_closing_twice_is_harmless(pair: Pair) -> None:
    pair.begin_with_syphon()
    pair.primary.factory.close()
    pair.primary.factory.close()
    assert pair.syphon.stops == 1


def test_a_closed_factory_diverts_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    pair.fail_over()
    pair.primary.factory.close()
    with pytest.raises(NamespaceClosedError):
        sender.send(message("late"))
    assert pair.diverted() == ["first"]


def test_a_closed_primary_that_was_healthy_diverts_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    pair.primary.factory.close()
    with pytest.raises(NamespaceClosedError):
        sender.send(message("late"))
    assert pair.diverted() == []


def test_what_was_diverted_outlives_the_pairing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "a")
    pair.primary.factory.close()
    assert pair.diverted() == ["a"]


def test_leaving_the_context_of_the_primary_closes_the_pairing(pair: Pair) -> None:
    with pair.primary.factory:
        pair.begin()
    assert states(pair) == (CLOSED, CLOSED)


@dataclass
class RealTimePair:
    """Two paired factories on a clock that runs by itself, where threads close the secondary."""

    primary: MessagingFactory
    secondary: MessagingFactory

    @classmethod
    def paired(cls, folder: Path, *, with_syphon: bool) -> "RealTimePair":
        first, second = EmbeddedNamespace(folder / "a"), EmbeddedNamespace(folder / "b")
        pair = cls(MessagingFactory(first, name=PRIMARY), MessagingFactory(second))
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(second),
            pair.secondary,
            1,
            AT_ONCE,
            enable_syphon=with_syphon,
            syphon=SyphonStandIn(),
        )
        pair.primary.pair_namespace(options)
        return pair

    def close_from_secondary(self, state: FactoryState) -> None:
        if state is CLOSED:
            self.primary.close()


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("with_syphon", [False, True], ids=["without syphon", "with syphon"])
def test_closing_a_pairing_on_real_time_logs_no_error_and_leaves_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_syphon: bool
) -> None:
    pair = RealTimePair.paired(tmp_path, with_syphon=with_syphon)
    pair.primary.close()
    assert (pair.primary.state, pair.secondary.state) == (CLOSED, CLOSED)
    assert errors_logged(caplog) == []
    assert not [one for one in threading.enumerate() if one.name.startswith("twinbus-pairing")]


def test_a_watcher_of_the_secondary_may_close_the_primary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = RealTimePair.paired(tmp_path, with_syphon=False)
    pair.secondary.on_state_change(pair.close_from_secondary)
    pair.primary.close()
    assert (pair.primary.state, pair.secondary.state) == (CLOSED, CLOSED)
    assert errors_logged(caplog) == []


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


def test_without_a_syphon_a_lost_secondary_is_told_when_it_is_needed(pair: Pair) -> None:
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
    with EmbeddedNamespace(tmp_path / "a") as one, EmbeddedNamespace(tmp_path / "b") as two:
        faults = FaultyNamespace(one)
        NamespaceManager(one).create_queue(ORDERS)
        primary = MessagingFactory(faults, name=PRIMARY)
        secondary = MessagingFactory(two, name=SECONDARY)
        pairing = primary.pair_namespace(
            SendAvailabilityPairedNamespaceOptions(
                NamespaceManager(two), secondary, 1, AT_ONCE, True, syphon=lambda _: Stopped()
            )
        )
        faults.inject(Fault.UNAVAILABLE, ORDERS)
        primary.create_message_sender(ORDERS).send(message())
        assert pairing.status()[0].state is HealthState.FAILED_OVER
        {"primary": primary, "secondary": secondary}[first].fault("trouble")
        until(lambda: (primary.state, secondary.state) == (FAULTED, FAULTED))
        for thread in threading.enumerate():
            if thread.name == "twinbus-pairing":
                thread.join(60)
        assert not [one for one in threading.enumerate() if one.name == "twinbus-pairing"]


class Stopped:
    """A syphon with nothing to do."""

    def stop(self) -> None:
        pass


# -- numbers ---------------------------------------------------------------------------------------


def test_the_collector_tells_prometheus_what_the_status_tells(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    registry = CollectorRegistry()
    registry.register(PairingCollector(pair.pairing))
    pair.fail_over(ORDERS, "1", "2")
    pair.pass_time(MINUTE)
    labels = {"path": ORDERS}
    expected = {"failed_over": 1, "failovers_total": 1, "diverted_total": 2, "pings_total": 1}
    for name, value in expected.items():
        assert registry.get_sample_value(f"twinbus_pairing_{name}", labels) == value
    queue = {"path": backlog(0)}
    assert registry.get_sample_value("twinbus_pairing_queue_in_rotation", queue) == 1


def test_a_pairing_that_never_failed_has_numbers_of_its_queues_only(local: Pair) -> None:
    local.begin()
    registry = CollectorRegistry()
    registry.register(PairingCollector(local.pairing))
    assert registry.get_sample_value("twinbus_pairing_failed_over", {"path": ORDERS}) is None
    queue = {"path": backlog(1)}
    assert registry.get_sample_value("twinbus_pairing_queue_in_rotation", queue) == 1


def test_the_status_tells_when_the_next_ping_is_due(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (status,) = pair.pairing.status()
    assert status.next_ping_due is not None
    assert status.next_ping_due - pair.clock.now() <= MINUTE
    assert status.state is HealthState.FAILED_OVER
