"""What a pairing reports: events, its status, and metrics."""

from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    ORDERS,
    Pair,
    backlog,
    bodies,
    messages,
    opened,
)
from twinbus.pairing.events import BacklogQueuePulled, FailedOver, Returned
from twinbus.pairing.health import HealthState
from twinbus.pairing.metrics import PairingCollector

# -- events and status -----------------------------------------------------------------------------


def test_events_report_what_happened_in_order(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "1", "2")
    pair.sender().send_batch(messages("3", "4"))
    pair.pairing.mark_path_healthy(ORDERS)
    failed_over, returned = pair.events
    assert isinstance(failed_over, FailedOver)
    assert isinstance(returned, Returned)
    assert (returned.path, returned.by, returned.diverted) == (ORDERS, "mark_path_healthy", 4)


def test_a_return_by_ping_says_so(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.pass_time(MINUTE)
    returned = pair.wait_for(Returned)
    assert (returned.by, returned.diverted) == ("ping", 1)


def test_an_observer_that_raises_does_not_disturb_senders_or_other_observers(pair: Pair) -> None:
    def fail(event: object) -> None:
        raise RuntimeError(f"no {event}")

    pair.begin(failover_interval=AT_ONCE)
    pair.pairing.on_event(fail)
    late: list[object] = []
    pair.pairing.on_event(late.append)
    pair.break_backlog(0)
    pair.fail_over(ORDERS, *[str(number) for number in range(8)])
    assert len(pair.diverted()) == 8
    assert late == pair.events
    assert {type(event) for event in late} == {FailedOver, BacklogQueuePulled}


def test_an_observer_may_ask_and_mark_and_send(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    states: list[HealthState] = []

    def look(event: object) -> None:
        if isinstance(event, FailedOver):
            states.append(local.state(event.path))
            local.send("alarm", path=INVOICES)

    local.pairing.on_event(look)
    local.fail_over()
    assert states == [HealthState.FAILED_OVER]
    assert local.primary.take(INVOICES) == ["alarm"]


def test_an_observer_that_stopped_gets_no_more_events(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    announced: list[object] = []
    stop = local.pairing.on_event(announced.append)
    stop()
    local.fail_over()
    assert announced == []


def test_the_status_counts_what_happened(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "1", "2", "3")
    (status,) = pair.pairing.status()
    assert (status.path, status.failovers, status.diverted) == (ORDERS, 1, 3)
    assert (status.failures, status.since) == (1, pair.clock.now())
    assert "unavailable" in status.last_failure


def test_seeded_chance_replays_the_same_choices(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        with opened("embedded", tmp_path / name) as pair:
            pair.secondary.factory.courier.random = Random(3)
            pair.begin(backlog_queue_count=4, failover_interval=AT_ONCE)
            pair.fail_over(ORDERS, *[str(number) for number in range(12)])
            found.append([bodies(queue) for queue in pair.backlog_by_queue()])
    assert found[0] == found[1]


# -- numbers ---------------------------------------------------------------------------------------


def test_the_collector_gives_prometheus_the_numbers_of_the_status(pair: Pair) -> None:
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


def test_the_status_says_when_the_next_ping_is_due(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (status,) = pair.pairing.status()
    assert status.next_ping_due is not None
    assert status.next_ping_due - pair.clock.now() <= MINUTE
    assert status.state is HealthState.FAILED_OVER
