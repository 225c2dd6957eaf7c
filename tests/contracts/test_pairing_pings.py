"""Pings: what is sent, how often, to which entities, and what their answers change."""

import threading
from concurrent.futures import Future
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_trouble import on_real_time
from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    NEWS,
    ORDERS,
    PRIMARY,
    SESSIONS,
    SUBSCRIPTION,
    TICK,
    Pair,
    is_ping,
    message,
)
from twinbus import (
    MessagingError,
    MessagingFactory,
    QueueDescription,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.pairing.events import PingRefused, Returned
from twinbus.pairing.health import HealthState
from twinbus.protocol.commands import Command, Send
from twinbus.testing import Fault


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
    other.pair_namespace(local.further_options(failover_interval=AT_ONCE, backlog_queue_count=2))
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


def test_a_full_entity_stays_failed_over_until_it_has_room(pair: Pair) -> None:
    pair.primary.root.create_queue(QueueDescription(path="small", max_size_in_megabytes=1))
    pair.begin(failover_interval=AT_ONCE)
    large = "x" * 250 * 1024
    for _ in range(5):  # the last one does not fit
        pair.send(large, path="small")
    pair.pass_time(MINUTE)
    pair.send("small", path="small")
    assert (len(pair.diverted()), pair.state("small")) == (2, HealthState.FAILED_OVER)
    pair.primary.take("small")
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)


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
        self.submit_to_primary = pair.primary.faults.submit
        self.futures: list[Future[Any]] = []
        pair.primary.faults.submit = self.submit  # type: ignore[method-assign]

    def submit(self, command: Command[Any]) -> "Future[Any]":
        if not is_ping(command):
            return self.submit_to_primary(command)
        self.futures.append(Future())
        return self.futures[-1]


def test_an_entity_that_does_not_answer_a_ping_holds_up_no_other(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over(ORDERS)
    silence = Silence(local)
    local.pass_time(MINUTE)
    assert len(silence.futures) == 1
    local.primary.faults.submit = silence.submit_to_primary  # type: ignore[method-assign]
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


def test_a_ping_refused_for_a_missing_right_leaves_the_entity_failed_over(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.primary.faults.heal()
    pair.primary.tap.refuse(UnauthorizedError("the key lacks Send"), Send, ORDERS)
    pair.pass_time(MINUTE)
    refused = pair.wait_for(PingRefused)
    assert (refused.path, "the key lacks Send" in refused.cause) == (ORDERS, True)
    for _ in range(3):
        pair.pass_time(MINUTE)
    assert pair.state() is HealthState.FAILED_OVER
    assert len(pair.announced(PingRefused)) == 1
    pair.primary.tap.relent()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)


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


def test_a_ping_that_finds_no_entity_ends_the_failover(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.primary.root.delete_queue(ORDERS)
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)


def test_a_ping_is_sent_once_though_the_clock_jumps_over_many_intervals(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.pass_time(hours=1)
    assert 1 <= len(pair.primary.tap.pings()) <= 60
    assert pair.state() is HealthState.FAILED_OVER


def test_on_real_time_an_entity_returns_by_itself(tmp_path: Path) -> None:
    with on_real_time(tmp_path, with_syphon=False) as pair:
        is_back = threading.Event()
        pair.pairing.on_event(lambda event: is_back.set() if isinstance(event, Returned) else None)
        pair.faults.inject(Fault.UNAVAILABLE, ORDERS)
        pair.primary.create_message_sender(ORDERS).send(message())
        pair.faults.heal()
        assert is_back.wait(20)
        pair.primary.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "twinbus-pairing"]
