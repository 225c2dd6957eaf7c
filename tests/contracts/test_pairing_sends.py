"""Sends of a paired factory: to the primary while it is healthy, else to a backlog queue."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    FORMS,
    HOUR,
    INVOICES,
    MINUTE,
    NEWS,
    ORDERS,
    PRIMARY,
    SUBSCRIPTION,
    TICK,
    Pair,
    backlog,
    bodies,
    columns,
    delayed,
    forms,
    message,
    messages,
    opened,
    pipelined,
    send_pipelined,
    sized,
)
from twinbus import (
    BrokeredMessage,
    MessageSender,
    MessagingError,
    MessagingFactory,
    QueueDescription,
)
from twinbus.entities import EntityStatus
from twinbus.errors import EntityDisabledError, EntityNotFoundError, InvalidArgumentError
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.message import to_batch
from twinbus.pairing.events import FailedOver
from twinbus.pairing.health import HealthState
from twinbus.protocol.capabilities import Capability
from twinbus.testing import Fault

WAYS_TO_SEND: dict[str, Callable[[MessageSender, BrokeredMessage], None]] = {
    "single": lambda sender, bad: sender.send(bad),
    "columns": lambda sender, bad: sender.send_batch(to_batch([bad])),
    "pipelined": send_pipelined,
}


# -- healthy ---------------------------------------------------------------------------------------


@forms
def test_sends_to_a_healthy_entity_go_to_the_primary(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin()
    form(pair.sender())
    assert pair.primary.take() == ["a", "b"]
    assert pair.diverted() == []


def work(pair: Pair) -> None:
    """Do what an application does on a good day."""
    sender = pair.sender()
    sender.send(message("1"))
    sender.send_batch(messages("2", "3"))
    sender.send_batch(columns("4"))
    (number,) = sender.schedule(message("5"), pair.clock.now() + HOUR)
    sender.cancel_scheduled(number)
    pair.primary.factory.create_topic_client(NEWS).send(message("6"))
    with pytest.raises(EntityNotFoundError):
        pair.sender("nowhere").send(message())
    received = pair.primary.factory.create_queue_client(ORDERS).receive_batch(9, AT_ONCE)
    for arrived in received:
        arrived.complete()
    pair.pass_time(minutes=30)


def test_a_healthy_pairing_makes_no_extra_operations_at_the_primary(
    pair: Pair, tmp_path: Path
) -> None:
    way = "embedded" if pair.primary.where is None else "server"
    pair.begin()
    work(pair)
    with opened(way, tmp_path / "unpaired") as unpaired:
        work(unpaired)
        assert pair.primary.meter() == unpaired.primary.meter()
        asked = [type(command) for _, command in unpaired.primary.tap.asked]
    assert [type(command) for _, command in pair.primary.tap.asked] == asked


def test_a_healthy_pairing_makes_no_operations_at_the_secondary(pair: Pair) -> None:
    pair.begin()
    before = pair.secondary.meter()
    work(pair)
    assert pair.secondary.meter() == before


def test_a_pairing_that_went_home_makes_no_operations_at_the_secondary(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    local.heal()
    local.pairing.mark_path_healthy(ORDERS)
    before = local.secondary.meter()
    work(local)
    assert local.secondary.meter() == before


def test_a_paired_entity_is_received_from_as_before(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.send("a", "b")
    client = pair.primary.factory.create_queue_client(ORDERS)
    assert bodies(list(client.receive_batch(9, AT_ONCE))) == ["a", "b"]


@pytest.mark.parametrize("name", ["x-ms-path", "x-ms-sessionid", "x-twinbus-sender"])
@pytest.mark.parametrize("way", WAYS_TO_SEND)
def test_a_reserved_property_is_refused_on_healthy_sends_too(
    local: Pair, name: str, way: str
) -> None:
    local.begin()
    bad = BrokeredMessage(body=b"a", application_properties={"mine": 1, name: "x"})
    with pytest.raises(InvalidArgumentError, match=name):
        WAYS_TO_SEND[way](local.sender(), bad)
    assert local.primary.take() == []


# -- failed over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [timedelta(seconds=1), MINUTE, timedelta(minutes=60)], ids=str)
def test_an_entity_fails_over_when_the_timer_runs_out(pair: Pair, interval: timedelta) -> None:
    pair.begin(failover_interval=interval)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(interval - TICK)
    assert pair.state() is HealthState.SUSPECT
    pair.pass_time(TICK)
    assert pair.state() is HealthState.FAILED_OVER


def test_a_failover_needs_no_further_send(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(MINUTE)
    (event,) = pair.announced(FailedOver)
    assert (event.path, event.at) == (ORDERS, pair.clock.now())
    assert "unavailable" in event.cause


@forms
def test_messages_of_a_failed_over_entity_go_to_a_backlog_queue(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(MINUTE)
    form(pair.sender())
    assert pair.diverted() == ["a", "b"]
    assert [message.application_properties["x-ms-path"] for message in pair.backlog()] == [
        ORDERS
    ] * 2


@forms
def test_sends_to_a_failed_over_entity_of_the_primary_stop(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    tried = len(pair.primary.tap.sends(ORDERS))
    pair.heal()
    form(pair.sender())
    assert len(pair.primary.tap.sends(ORDERS)) == tried
    assert pair.primary.peek() == []


@forms
def test_with_an_interval_of_zero_the_very_send_that_failed_succeeds(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    form(pair.sender())
    assert pair.state() is HealthState.FAILED_OVER
    assert pair.diverted() == ["a", "b"]
    assert pair.primary.peek() == []


def test_a_send_under_way_when_the_timer_runs_out_is_diverted(local: Pair) -> None:
    began = local.clock.now()
    local.begin(failover_interval=timedelta(seconds=10))
    local.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    with pytest.raises(MessagingError):
        local.send()
    local.break_down(ORDERS, Fault.TRANSIENT)
    local.pass_time(seconds=5)
    local.send("under way")
    assert local.diverted() == ["under way"]
    assert local.clock.now() - began < timedelta(seconds=10) + timedelta(seconds=10)


def test_other_entities_still_go_to_the_primary(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS)
    pair.send("fine", path=INVOICES)
    assert pair.primary.take(INVOICES) == ["fine"]
    assert pair.state(INVOICES) is HealthState.HEALTHY


@pytest.mark.parametrize("spelling", ["orders", "Orders", "ORDERS"])
def test_a_path_is_one_entity_whatever_its_case(pair: Pair, spelling: str) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "a")
    pair.heal()
    pair.send("b", path=spelling)
    assert sorted(pair.diverted()) == ["a", "b"]
    assert len(pair.pairing.status()) == 1


def test_health_is_shared_by_all_clients_of_the_factory(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    first, second = pair.sender(), pair.primary.factory.create_queue_client("Orders")
    with pytest.raises(MessagingError):
        first.send(message())
    pair.pass_time(MINUTE)
    second.send(message("by another client"))
    assert pair.diverted() == ["by another client"]


def test_health_is_not_shared_with_another_factory(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    other = MessagingFactory(local.primary.connect(), name=PRIMARY, clock=local.clock)
    other.pair_namespace(local.further_options(backlog_queue_count=2))
    other.create_message_sender(ORDERS).send(message("elsewhere"))
    assert local.primary.take() == ["elsewhere"]


def test_clients_made_before_pairing_go_through_the_pairing(pair: Pair) -> None:
    factory = pair.primary.factory
    made = [factory.create_message_sender(ORDERS), factory.create_queue_client(ORDERS)]
    topic = factory.create_topic_client(NEWS)
    with made[0].pipelined() as pipeline:
        pair.begin(failover_interval=AT_ONCE)
        pair.break_down(ORDERS)
        pair.break_down(NEWS)
        for client in [*made, topic]:
            client.send(message("m"))
        pipeline.send(message("p")).result(timeout=20)
    assert sorted(pair.diverted()) == ["m", "m", "m", "p"]


def test_every_kind_of_client_goes_through_the_pairing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    for path in (ORDERS, INVOICES, NEWS):
        pair.break_down(path)
    factory = pair.primary.factory
    factory.create_message_sender(ORDERS).send(message("sender"))
    factory.create_queue_client(INVOICES).send(message("queue"))
    factory.create_topic_client(NEWS).send(message("topic"))
    paths = {
        message.body: message.application_properties["x-ms-path"] for message in pair.backlog()
    }
    assert paths == {b"sender": ORDERS, b"queue": INVOICES, b"topic": NEWS}


def test_a_message_diverted_from_a_topic_reaches_its_subscriptions_in_the_end(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(NEWS, "a", "b")
    assert pair.primary.peek(SUBSCRIPTION) == []
    pair.bring_home()
    assert sorted(pair.primary.take(SUBSCRIPTION)) == ["a", "b"]


def test_many_threads_lose_and_double_nothing_while_an_entity_fails_over(tmp_path: Path) -> None:
    with opened("embedded", tmp_path, threaded=True) as pair:
        pair.begin(backlog_queue_count=3, failover_interval=AT_ONCE)
        start = threading.Barrier(8)
        broken = threading.Event()

        def send_many(worker: int) -> None:
            sender = pair.sender([ORDERS, "Orders"][worker % 2])
            start.wait(20)
            for number in range(40):
                sender.send(message(f"{worker}/{number}"))
                if number == 15 and not broken.is_set():
                    broken.set()
                    pair.break_down(ORDERS)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send_many, range(8)))
        pair.wait_for(FailedOver)
        assert len(pair.announced(FailedOver)) == 1
        found = pair.primary.take() + pair.diverted()
        assert sorted(found) == sorted(f"{w}/{n}" for w in range(8) for n in range(40))


@pytest.mark.parametrize("form", ["single", "batch", "columns"])
def test_diverted_messages_travel_in_the_form_of_their_send(local: Pair, form: str) -> None:
    """Few message objects travel as rows, which is what makes a single send cheap."""
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    sent_before = len(local.secondary.tap.sends())
    FORMS[form](local.sender())
    kinds = {type(send.messages) for send in local.secondary.tap.sends()[sent_before:]}
    assert kinds == {pa.RecordBatch if form == "columns" else list}


def test_a_disabled_entity_is_diverted_and_the_event_says_why(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.root.update_queue(QueueDescription(path=ORDERS, status=EntityStatus.DISABLED))
    pair.send("a")
    assert pair.diverted() == ["a"]
    (event,) = pair.announced(FailedOver)
    assert EntityDisabledError.__name__.removesuffix("Error") in event.cause
    assert "enable it" in event.cause


# -- lost replies ----------------------------------------------------------------------------------


@forms
def test_a_send_whose_reply_was_lost_and_that_is_diverted_is_home_once(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.primary.need(Capability.TRANSFER_MEMORY)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    form(pair.sender())
    assert "a" in bodies(pair.primary.peek())
    assert "a" in pair.diverted()
    pair.bring_home()
    assert sorted(pair.primary.take()) == ["a", "b"]


def test_pipelined_sends_that_are_diverted_one_by_one_after_a_lost_reply_are_home_once(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    go_on = delayed(pair)
    with pair.sender().pipelined() as pipeline:
        pipeline.send(message("first"))
        pipeline.send(message("a"))
        pipeline.send(sized(MAX_MESSAGE_BYTES))
        pipeline.send(message("b"))
        pair.break_down(ORDERS, Fault.REPLY_LOST)
        go_on.set()
    pair.bring_home()
    found = [body for body in bodies(pair.primary.peek()) if len(body) < 10]
    assert sorted(found) == ["a", "b", "first"]


def test_a_scheduled_send_whose_reply_was_lost_is_home_once(pair: Pair) -> None:
    pair.primary.need(Capability.TRANSFER_MEMORY)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.bring_home()
    assert bodies(pair.primary.peek()) == ["later"]


def test_sends_of_the_same_client_after_a_lost_reply_are_not_mistaken_for_it(pair: Pair) -> None:
    pair.primary.need(Capability.TRANSFER_MEMORY)
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    sender.send(message("before"))
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    sender.send(message("lost"))
    sender.send(message("diverted"))
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    sender.send(message("after"))
    pair.bring_home()
    assert sorted(pair.primary.take()) == ["after", "before", "diverted", "lost"]


# -- order -----------------------------------------------------------------------------------------


def test_messages_diverted_by_one_client_are_in_the_order_they_were_sent(pair: Pair) -> None:
    pair.begin(backlog_queue_count=4, failover_interval=AT_ONCE)
    pair.break_down()
    sender = pair.sender()
    for number in range(0, 30, 3):
        sender.send(message(str(number)))
        sender.send_batch(messages(str(number + 1), str(number + 2)))
    assert pair.diverted() == [str(number) for number in range(30)]


@pytest.mark.parametrize("at", [0, 1, 700, 2999])
def test_pipelined_sends_keep_their_order_while_failing_over(pair: Pair, at: int) -> None:
    pair.begin(backlog_queue_count=3, failover_interval=AT_ONCE)
    texts = [str(number) for number in range(3000)]
    futures = []
    with pair.sender().pipelined() as pipeline:
        for number, text in enumerate(texts):
            if number == at:
                pair.break_down()
            futures.append(pipeline.send(message(text)))
    assert all(future.exception(timeout=0) is None for future in futures)
    home = pair.primary.take() + pair.primary.take() + pair.primary.take()
    (used,) = [queue.path for queue in pair.pairing.backlog_queues() if at_all(pair, queue.path)]
    away = pair.secondary.take(used) + pair.secondary.take(used) + pair.secondary.take(used)
    assert home == sorted(home, key=int)
    assert away == sorted(away, key=int)
    assert sorted(home + away, key=int) == texts


def at_all(pair: Pair, path: str) -> bool:
    return pair.secondary.root.get_runtime_properties(path).active_message_count > 0


def test_pipelined_sends_that_meet_one_failure_do_not_overtake_each_other(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    texts = [str(number) for number in range(1500)]
    pipelined(pair.sender(), *texts)
    away = pair.secondary.take(backlog(0)) + pair.secondary.take(backlog(0))
    assert away == sorted(away, key=int)
    assert sorted(away + pair.primary.take(), key=int) == texts
