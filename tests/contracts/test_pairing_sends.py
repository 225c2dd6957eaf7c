"""Sends of a paired factory: where they go, which failures count, what a backlog queue holds."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from tests.contracts.pairing_words import (
    ALIASES,
    AT_ONCE,
    HOUR,
    INVOICES,
    MINUTE,
    NEWS,
    ORDERS,
    PRIMARY,
    SESSIONS,
    SUBSCRIPTION,
    WAYS,
    Pair,
    backlog,
    bodies,
    columns,
    message,
    messages,
    opened,
)
from twinbus import (
    BacklogQueueBack,
    BacklogQueuePulled,
    BacklogUnavailableError,
    BrokeredMessage,
    BrokerRestartingError,
    Claim,
    CommunicationError,
    EntityDisabledError,
    EntityNotFoundError,
    EntityStatus,
    FailedOver,
    HealthState,
    InvalidArgumentError,
    MessageNotFoundError,
    MessageSender,
    MessageSizeExceededError,
    MessageState,
    MessagingError,
    MessagingFactory,
    OperationTimeoutError,
    QueueDescription,
    QuotaExceededError,
    Returned,
    ServerBusyError,
    StoreUnavailableError,
    TransientError,
    UnauthorizedError,
)
from twinbus.limits import MAX_MESSAGE_BYTES, OPERATION_TIMEOUT
from twinbus.message import to_batch
from twinbus.namespace.flight import FlightNamespace
from twinbus.testing import Fault

TICK = timedelta(microseconds=1)
OF_EVERY_TYPE: dict[str, Any] = {
    "str": "grüße",
    "int": -(2**63),
    "float": 0.1,
    "bool": True,
    "bytes": b"\x00\xff",
    "datetime": datetime(2031, 2, 3, 4, 5, 6, 7, tzinfo=UTC),
    "timedelta": timedelta(days=-1, microseconds=1),
    "uuid": UUID(int=2**127 + 1),
}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with opened(request.param, tmp_path) as pair:
        yield pair


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Pair]:
    with opened("embedded", tmp_path) as pair:
        yield pair


def pipelined(sender: MessageSender, *texts: str) -> None:
    """Send without waiting, then wait; raise the first error."""
    with sender.pipelined() as pipeline:
        futures = [pipeline.send(one) for one in messages(*texts)]
    for future in futures:
        future.result(timeout=0)


def one_by_one(sender: MessageSender, *texts: str) -> None:
    for one in messages(*texts):
        sender.send(one)


FORMS: dict[str, Callable[[MessageSender], None]] = {
    "single": lambda sender: one_by_one(sender, "a", "b"),
    "batch": lambda sender: sender.send_batch(messages("a", "b")),
    "columns": lambda sender: sender.send_batch(columns("a", "b")),
    "pipelined": lambda sender: pipelined(sender, "a", "b"),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


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
    for one in received:
        one.complete()
    pair.pass_time(minutes=30)


def test_a_healthy_pairing_makes_no_extra_operations_at_the_primary(
    pair: Pair, tmp_path: Path
) -> None:
    way = "embedded" if pair.primary.where is None else "flight"
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


# -- suspect ---------------------------------------------------------------------------------------


@forms
def test_until_the_timer_has_run_out_a_failure_is_the_callers_to_see(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError, match="unavailable"):
        form(pair.sender())
    assert pair.state() is HealthState.SUSPECT
    assert pair.diverted() == []


def test_until_the_timer_has_run_out_sends_still_go_to_the_primary(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(MINUTE - TICK)
    with pytest.raises(MessagingError):
        pair.send()
    assert len(pair.primary.tap.sends(ORDERS)) == 2
    assert pair.diverted() == []


def test_a_second_failure_does_not_start_the_timer_again(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    for _ in range(3):
        with pytest.raises(MessagingError):
            pair.send()
        pair.pass_time(seconds=20)
    pair.send("a minute after the first")
    assert pair.diverted() == ["a minute after the first"]


def test_one_success_clears_the_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(seconds=59)
    pair.heal()
    pair.send("success")
    assert pair.state() is HealthState.HEALTHY
    pair.pass_time(seconds=1)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send()
    pair.pass_time(seconds=59)
    assert pair.state() is HealthState.SUSPECT
    assert pair.primary.take() == ["success"]


def test_a_success_of_another_client_clears_the_timer_too(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    with pytest.raises(MessagingError):
        pair.sender("orders").send(message())
    pair.sender("ORDERS").send(message())
    pair.pass_time(hours=1)
    assert pair.state() is HealthState.HEALTHY


def test_a_success_of_another_entity_does_not_clear_the_timer(pair: Pair) -> None:
    pair.begin(failover_interval=MINUTE)
    pair.break_down(ORDERS)
    with pytest.raises(MessagingError):
        pair.send()
    pair.send(path=INVOICES)
    pair.pass_time(MINUTE)
    assert pair.state(ORDERS) is HealthState.FAILED_OVER


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
    (event,) = pair.heard(FailedOver)
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
    assert [one.application_properties["x-ms-path"] for one in pair.backlog()] == [ORDERS] * 2


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
    other.pair_namespace(local.options(backlog_queue_count=2))
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
    paths = {one.body: one.application_properties["x-ms-path"] for one in pair.backlog()}
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
        assert len(pair.heard(FailedOver)) == 1
        found = pair.primary.take() + pair.diverted()
        assert sorted(found) == sorted(f"{w}/{n}" for w in range(8) for n in range(40))


# -- which failures count --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.TRANSIENT, Fault.TIMEOUT])
def test_a_failure_that_outlives_the_retry_policy_counts(pair: Pair, fault: Fault) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, fault)
    began = pair.clock.now()
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]
    assert pair.clock.now() - began <= OPERATION_TIMEOUT


@pytest.mark.parametrize("fault", [Fault.TRANSIENT, Fault.TIMEOUT, Fault.REPLY_LOST])
def test_a_transient_failure_that_a_retry_overcomes_does_not_count(
    pair: Pair, fault: Fault
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.faults.inject(fault, ORDERS, times=2)
    pair.send("retried")
    assert pair.primary.take() == ["retried"]
    assert (pair.diverted(), pair.pairing.status()) == ([], [])


@pytest.mark.parametrize(
    "error",
    [
        OperationTimeoutError("nobody answered"),
        MessagingError("it does not work"),
        TransientError("it did not work"),
        CommunicationError("not reached"),
        StoreUnavailableError("the disk refuses"),
        BrokerRestartingError("it heals itself"),
        QuotaExceededError("the queue is full"),
        EntityDisabledError("switched off"),
    ],
    ids=lambda error: error.code,
)
def test_a_failure_of_the_primary_counts(local: Pair, error: MessagingError) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.primary.tap.refuse(error)
    local.send("diverted")
    assert local.state() is HealthState.FAILED_OVER
    assert local.diverted() == ["diverted"]


NEVER_COUNT = [
    UnauthorizedError("no Send"),
    EntityNotFoundError("no such queue"),
    MessageSizeExceededError("too large", size=2, limit=1),
    InvalidArgumentError("no such thing"),
    ServerBusyError("wait 10 s", retry_after_s=10),
]
never_count = pytest.mark.parametrize("error", NEVER_COUNT, ids=lambda error: error.code)


@never_count
@forms
def test_an_error_of_the_caller_and_a_busy_server_never_count_and_are_raised(
    local: Pair, error: MessagingError, form: Callable[[MessageSender], None]
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.primary.tap.refuse(error)
    with pytest.raises(type(error)):
        form(local.sender())
    assert (local.state(), local.diverted()) == (HealthState.HEALTHY, [])


@never_count
def test_an_error_of_the_caller_and_a_busy_server_start_no_timer(
    local: Pair, error: MessagingError
) -> None:
    local.begin(failover_interval=MINUTE)
    local.primary.tap.refuse(error)
    for _ in range(2):
        with pytest.raises(type(error)):
            local.send()
        local.pass_time(MINUTE)
    assert (local.pairing.status(), local.diverted()) == ([], [])


def test_sends_that_are_wrong_never_fail_over(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    with pytest.raises(EntityNotFoundError):
        pair.send(path="nowhere")
    with pytest.raises(MessageSizeExceededError):
        pair.sender().send(BrokeredMessage(bytes(MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(InvalidArgumentError):
        pair.send(path=SESSIONS)
    assert (pair.pairing.status(), pair.diverted()) == ([], [])


def test_a_key_that_may_not_send_never_fails_over(tmp_path: Path) -> None:
    with opened("flight", tmp_path) as pair:
        key = pair.primary.root.create_key("ears", [Claim.LISTEN])
        assert pair.primary.where is not None
        where = replace(pair.primary.where, key_name=key.name, key=key.primary)
        pair.begin(failover_interval=AT_ONCE)
        pair.primary.faults.inner = FlightNamespace(where, pair.clock)
        with pytest.raises(UnauthorizedError):
            pair.send()
        assert (pair.pairing.status(), pair.diverted()) == ([], [])
        pair.primary.faults.inner.close()


def test_a_full_queue_of_the_primary_fails_over(pair: Pair) -> None:
    pair.primary.root.create_queue(QueueDescription(path="small", max_size_in_megabytes=1))
    pair.begin(failover_interval=AT_ONCE)
    large = BrokeredMessage(bytes(200 * 1024))
    for _ in range(8):
        pair.sender("small").send(large)
    assert pair.state("small") is HealthState.FAILED_OVER
    assert len(pair.primary.peek("small")) + len(pair.backlog()) == 8


def test_an_entity_that_is_switched_off_fails_over(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    queue = pair.primary.root.get_queue(ORDERS)
    pair.primary.root.update_queue(replace(queue, status=EntityStatus.SEND_DISABLED))
    pair.send("diverted")
    assert pair.diverted() == ["diverted"]


def test_when_the_server_is_busy_a_send_waits_10_seconds_and_goes_again(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.faults.inject(Fault.SERVER_BUSY, ORDERS, times=1)
    began = pair.clock.now()
    pair.send("patient")
    assert pair.primary.take() == ["patient"]
    assert pair.clock.now() - began >= timedelta(seconds=10)
    assert pair.pairing.status() == []


def test_a_failure_that_does_not_count_does_not_clear_the_timer(local: Pair) -> None:
    local.begin(failover_interval=MINUTE)
    local.primary.faults.inject(Fault.UNAVAILABLE, ORDERS, times=1)
    with pytest.raises(MessagingError):
        local.send()
    local.primary.tap.refuse(UnauthorizedError("no"))
    with pytest.raises(UnauthorizedError):
        local.send()
    local.pass_time(MINUTE)
    assert local.state() is HealthState.FAILED_OVER


# -- back again ------------------------------------------------------------------------------------


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
    assert len(pair.heard(FailedOver)) == 2


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


# -- choosing a backlog queue ----------------------------------------------------------------------


def queue_of(pair: Pair, text: str) -> int:
    (index,) = [at for at, held in enumerate(pair.held()) if text in bodies(held)]
    return index


@pytest.mark.parametrize("kind", ["create_message_sender", "create_queue_client"])
def test_a_client_picks_a_backlog_queue_and_stays_with_it(pair: Pair, kind: str) -> None:
    pair.begin(backlog_queue_count=4, failover_interval=AT_ONCE)
    pair.break_down()
    client = getattr(pair.primary.factory, kind)(ORDERS)
    for number in range(20):
        client.send(message(str(number)))
    (used,) = [bodies(held) for held in pair.held() if held]
    assert used == [str(number) for number in range(20)]


def test_a_client_stays_with_its_queue_in_the_next_outage(local: Pair) -> None:
    local.begin(backlog_queue_count=5, failover_interval=AT_ONCE)
    client = local.sender()
    for outage in range(4):
        local.break_down()
        client.send(message(str(outage)))
        local.heal()
        local.pairing.mark_path_healthy(ORDERS)
    assert len([held for held in local.held() if held]) == 1


def test_clients_pick_their_backlog_queues_at_random(local: Pair) -> None:
    local.begin(backlog_queue_count=4, failover_interval=AT_ONCE)
    local.fail_over(ORDERS, *[str(number) for number in range(80)])
    assert all(5 <= len(held) <= 40 for held in local.held())


def test_a_pipelined_sender_keeps_to_the_queue_of_its_client(local: Pair) -> None:
    local.begin(backlog_queue_count=5, failover_interval=AT_ONCE)
    local.break_down()
    client = local.sender()
    client.send(message("one"))
    pipelined(client, "two", "three")
    (used,) = [bodies(held) for held in local.held() if held]
    assert used == ["one", "two", "three"]


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.TRANSIENT, Fault.TIMEOUT])
def test_if_a_send_to_its_queue_fails_the_client_picks_another(pair: Pair, fault: Fault) -> None:
    pair.begin(
        backlog_queue_count=2, failover_interval=AT_ONCE, ping_primary_interval=timedelta(minutes=5)
    )
    pair.break_down()
    client = pair.sender()
    client.send(message("a"))
    chosen = queue_of(pair, "a")
    pair.break_backlog(chosen, fault=fault)
    client.send(message("b"))
    assert queue_of(pair, "b") == 1 - chosen
    assert pair.in_rotation()[chosen] is False
    (pulled,) = pair.heard(BacklogQueuePulled)
    assert pulled.queue == backlog(chosen)


def test_a_queue_that_failed_leaves_the_rotation_for_all_senders(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0)
    clients = [pair.sender() for _ in range(10)]
    for client in clients:
        client.send(message("m"))
    assert len(pair.secondary.tap.sends(backlog(0))) == 1
    assert [len(held) for held in pair.held()] == [0, 10]


def test_clients_that_had_the_failed_queue_leave_it_untried(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    clients = [pair.sender() for _ in range(12)]
    for client in clients:
        client.send(message("before"))
    tried = len(pair.secondary.tap.sends(backlog(0)))
    pair.break_backlog(0)
    for client in clients:
        client.send(message("after"))
    assert len(pair.secondary.tap.sends(backlog(0))) == tried + 1
    assert bodies(pair.held()[1]).count("after") == 12


def test_a_backlog_queue_that_was_deleted_is_left_for_another(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.secondary.root.delete_queue(backlog(0))
    texts = [str(number) for number in range(10)]
    pair.fail_over(ORDERS, *texts)
    assert sorted(bodies(pair.secondary.peek(backlog(1)))) == sorted(texts)
    assert pair.in_rotation() == [False, True]


def test_a_backlog_queue_that_is_full_is_left_for_another(pair: Pair) -> None:
    small = QueueDescription(path=backlog(0), max_size_in_megabytes=1)
    pair.secondary.root.create_queue(small)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    large = BrokeredMessage(bytes(200 * 1024))
    for _ in range(20):
        pair.sender().send(large)
    assert len(pair.backlog()) == 20
    assert pair.in_rotation() == [False, True]


def test_a_queue_returns_to_the_rotation_after_one_ping_interval(pair: Pair) -> None:
    interval = timedelta(seconds=40)
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE, ping_primary_interval=interval)
    pair.fail_over(ORDERS, "a")
    pair.break_backlog(0)
    with pytest.raises(BacklogUnavailableError):
        pair.send("lost")
    pair.secondary.faults.heal()
    pair.pass_time(interval - TICK)
    assert pair.in_rotation() == [False]
    with pytest.raises(BacklogUnavailableError):
        pair.send("still")
    pair.pass_time(TICK)
    assert pair.in_rotation() == [True]
    pair.send("b")
    assert sorted(pair.diverted()) == ["a", "b"]
    (back,) = pair.heard(BacklogQueueBack)
    assert (back.queue, back.at) == (backlog(0), pair.clock.now())


def test_a_queue_that_fails_again_after_its_return_leaves_again(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0)
    for _ in range(3):
        with pytest.raises(BacklogUnavailableError):
            pair.send()
        pair.pass_time(MINUTE)
    assert len(pair.heard(BacklogQueuePulled)) == 3


def test_when_no_queue_is_left_the_send_fails_with_both_causes(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.tap.refuse(MessagingError("the primary burns"), path=ORDERS)
    pair.secondary.tap.refuse(QuotaExceededError("the backlog is full"))
    with pytest.raises(BacklogUnavailableError) as caught:
        pair.send()
    assert "the primary burns" in str(caught.value.primary_cause)
    assert "the backlog is full" in str(caught.value.backlog_cause)
    assert "the primary burns" in str(caught.value)
    assert "the backlog is full" in str(caught.value)
    assert caught.value.is_transient


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.TRANSIENT, Fault.SERVER_BUSY])
def test_a_send_ends_though_queues_come_back_while_others_are_tried(
    local: Pair, fault: Fault
) -> None:
    local.begin(backlog_queue_count=3, failover_interval=AT_ONCE)
    local.break_down()
    local.break_backlog(0, 1, 2, fault=fault)
    latest = local.clock.now() + timedelta(minutes=15)

    def watch(_: object) -> None:
        assert local.clock.now() < latest, "the send goes round and round"

    local.secondary.tap.refusal = watch
    with pytest.raises(BacklogUnavailableError):
        local.send()


def test_both_causes_are_told_of_an_entity_that_failed_over_before(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.tap.refuse(MessagingError("the primary burns"), path=ORDERS)
    pair.send()
    pair.secondary.tap.refuse(QuotaExceededError("the backlog is full"))
    for _ in range(2):
        with pytest.raises(BacklogUnavailableError) as caught:
            pair.send()
        assert "the primary burns" in str(caught.value.primary_cause)
        assert "the backlog is full" in str(caught.value.backlog_cause)


def test_while_no_queue_is_left_the_secondary_is_not_tried(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.break_down()
    local.break_backlog(0, 1)
    with pytest.raises(BacklogUnavailableError):
        local.send()
    tried = len(local.secondary.tap.asked)
    with pytest.raises(BacklogUnavailableError):
        local.send()
    assert len(local.secondary.tap.asked) == tried


@forms
def test_when_no_queue_is_left_nothing_is_diverted(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.break_backlog(0, 1)
    with pytest.raises(BacklogUnavailableError):
        form(pair.sender())
    assert pair.diverted() == []


def test_a_message_is_in_one_backlog_queue_though_the_reply_of_the_first_was_lost(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "first")
    pair.break_backlog(0, fault=Fault.REPLY_LOST)
    texts = [str(number) for number in range(6)]
    pair.send(*texts)
    pair.bring_home()
    assert sorted(pair.primary.take()) == sorted([*texts, "first"])


def test_an_empty_batch_is_refused_whether_its_entity_failed_over_or_not(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    with pytest.raises(InvalidArgumentError):
        local.sender().send_batch([])
    local.fail_over()
    with pytest.raises(InvalidArgumentError):
        local.sender().send_batch([])
    assert local.in_rotation() == [True, True]


# -- what a diverted message is like ---------------------------------------------------------------


def only(pair: Pair) -> BrokeredMessage:
    (found,) = pair.backlog()
    return found


def full_message(pair: Pair) -> BrokeredMessage:
    return BrokeredMessage(
        body=b"\x00body",
        message_id="id",
        session_id="session",
        correlation_id="correlation",
        content_type="text/plain",
        subject="subject",
        to="to",
        reply_to="reply",
        reply_to_session_id="reply session",
        time_to_live=timedelta(minutes=5),
        scheduled_enqueue_time_utc=pair.clock.now() + HOUR,
        application_properties=OF_EVERY_TYPE,
    )


def test_a_diverted_message_carries_its_aliases_with_their_types(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    original = full_message(pair)
    pair.sender("Orders").send(original)
    held = only(pair).application_properties
    expected = {
        "x-ms-sessionid": original.session_id,
        "x-ms-timetolive": original.time_to_live,
        "x-ms-scheduledenqueuetimeutc": original.scheduled_enqueue_time_utc,
        "x-ms-path": "Orders",
    }
    assert {name: held[name] for name in expected} == expected
    assert [type(held[name]) for name in expected] == [str, timedelta, datetime, str]


def test_the_originals_are_cleared(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.sender().send(full_message(pair))
    found = only(pair)
    assert found.session_id is None
    assert found.time_to_live is None
    assert found.scheduled_enqueue_time_utc is None
    assert found.state is MessageState.ACTIVE


def test_everything_else_stays_as_it_is(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    original = full_message(pair)
    pair.sender().send(original)
    found = only(pair)
    for name in (
        *("body", "message_id", "correlation_id", "content_type", "subject", "to"),
        *("reply_to", "reply_to_session_id", "partition_key"),
    ):
        assert getattr(found, name) == getattr(original, name)
    own = {name: found.application_properties[name] for name in OF_EVERY_TYPE}
    assert own == OF_EVERY_TYPE
    assert [type(value) for value in own.values()] == [type(v) for v in OF_EVERY_TYPE.values()]


def test_a_partition_key_stays_as_it_is(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.send("a", partition_key="k")
    assert only(pair).partition_key == "k"


def test_a_plain_message_gets_nothing_but_its_path(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "first")
    pair.send("plain", application_properties={"own": 1})
    (plain,) = [one for one in pair.backlog() if one.body == b"plain"]
    assert plain.application_properties == {"own": 1, "x-ms-path": ORDERS}


def test_a_message_that_was_tried_gets_no_alias_of_what_it_had_not(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.send("tried")
    names = set(only(pair).application_properties)
    assert names.intersection(ALIASES) == {"x-ms-path"}


def test_a_time_to_live_without_end_comes_home_without_end(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.send("a", time_to_live=timedelta.max)
    pair.bring_home()
    assert pair.primary.peek()[0].time_to_live == timedelta.max


def test_a_message_neither_expires_nor_waits_in_the_backlog(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.break_down()
    later = pair.clock.now() + timedelta(days=2)
    pair.send("a", time_to_live=timedelta(seconds=1), scheduled_enqueue_time_utc=later)
    pair.pass_time(days=1)
    assert pair.secondary.take(backlog(0)) == ["a"]


def test_messages_for_many_entities_share_one_queue(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    for path in (ORDERS, INVOICES, SESSIONS, NEWS):
        pair.fail_over(path, path)
    (held,) = pair.held()
    assert [one.application_properties["x-ms-path"] for one in held] == bodies(held)
    assert bodies(held) == [ORDERS, INVOICES, SESSIONS, NEWS]


@forms
def test_a_diverted_message_comes_home_as_it_was_sent(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    form(pair.sender())
    pair.bring_home()
    assert bodies(pair.primary.peek()) == ["a", "b"]
    assert all(one.application_properties == {} for one in pair.primary.peek())
    assert pair.diverted() == []


def test_columns_with_every_field_are_diverted_as_messages_are(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    original = full_message(pair)
    batch = to_batch([message("before"), original, message("after")]).slice(1, 1)
    pair.sender().send_batch(batch)
    pair.bring_home()
    (home,) = pair.primary.peek()
    for name in ("body", "session_id", "time_to_live", "scheduled_enqueue_time_utc"):
        assert getattr(home, name) == getattr(original, name)
    assert home.application_properties == OF_EVERY_TYPE


@pytest.mark.parametrize("name", ALIASES)
def test_a_property_with_the_name_of_an_alias_is_refused_when_diverted(
    pair: Pair, name: str
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    with pytest.raises(InvalidArgumentError, match=name):
        pair.send("mine", application_properties={name: "mine"})
    assert pair.in_rotation() == [True, True]
    assert pair.diverted() == ["first"]


# -- head-room -------------------------------------------------------------------------------------


def sized(size: int) -> BrokeredMessage:
    """Return a message of so many bytes."""
    empty = BrokeredMessage(message_id="id")
    return BrokeredMessage(body=bytes(size - empty.size), message_id="id")


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_a_message_that_grows_too_large_is_refused_with_an_error_that_says_so(
    pair: Pair, is_failed_over: bool
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    if is_failed_over:
        pair.send("first")
    with pytest.raises(MessageSizeExceededError, match=r"backlog.*head-room") as caught:
        pair.sender().send(sized(MAX_MESSAGE_BYTES))
    assert caught.value.limit == MAX_MESSAGE_BYTES
    assert pair.in_rotation() == [True, True]
    assert pair.diverted() == (["first"] if is_failed_over else [])


def test_a_batch_with_a_message_that_grows_too_large_is_refused_as_a_whole(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    with pytest.raises(MessageSizeExceededError, match="message 1 "):
        pair.sender().send_batch([message("small"), sized(MAX_MESSAGE_BYTES)])
    assert pair.diverted() == ["first"]


def test_of_pipelined_messages_only_the_one_that_grows_too_large_fails(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    with pair.sender().pipelined() as pipeline:
        before, after = pipeline.send(message("a")), None
        large = pipeline.send(sized(MAX_MESSAGE_BYTES))
        after = pipeline.send(message("b"))
    assert isinstance(large.exception(timeout=0), MessageSizeExceededError)
    assert (before.exception(timeout=0), after.exception(timeout=0)) == (None, None)
    assert sorted(pair.diverted()) == ["a", "b", "first"]


def test_head_room_is_not_asked_for_on_healthy_sends_by_default(pair: Pair) -> None:
    pair.begin()
    pair.sender().send(sized(MAX_MESSAGE_BYTES))
    assert len(pair.primary.peek()) == 1


def held_up(pair: Pair) -> threading.Event:
    """Hold the next send of the primary factory up until the event is set."""
    go_on = threading.Event()

    def refusal(_: object) -> None:
        pair.primary.tap.relent()
        assert go_on.wait(20)

    pair.primary.tap.refusal = refusal
    return go_on


def test_of_pipelined_messages_only_the_one_without_head_room_fails_the_check(pair: Pair) -> None:
    pair.begin(check_head_room=True)
    go_on = held_up(pair)
    with pair.sender().pipelined() as pipeline:
        sent = [pipeline.send(message("first"))]
        sent += [pipeline.send(message("a")), pipeline.send(sized(MAX_MESSAGE_BYTES))]
        sent += [pipeline.send(message("b"))]
        go_on.set()
    errors = [type(future.exception(timeout=0)) for future in sent]
    assert errors == [type(None), type(None), MessageSizeExceededError, type(None)]
    assert pair.primary.take() == ["first", "a", "b"]


def send_pipelined(sender: MessageSender, one: BrokeredMessage) -> None:
    with sender.pipelined() as pipeline:
        sent = pipeline.send(one)
    sent.result(timeout=0)


ONE: dict[str, Callable[[MessageSender, BrokeredMessage], object]] = {
    "single": lambda sender, one: sender.send(one),
    "batch": lambda sender, one: sender.send_batch([message("small"), one]),
    "columns": lambda sender, one: sender.send_batch(to_batch([message("small"), one])),
    "scheduled": lambda sender, one: sender.schedule(one, datetime(2031, 1, 1, tzinfo=UTC)),
    "pipelined": send_pipelined,
}


@pytest.mark.parametrize("form", ONE.values(), ids=ONE)
def test_a_paired_sender_can_be_asked_to_check_head_room_on_healthy_sends_too(
    pair: Pair, form: Callable[[MessageSender, BrokeredMessage], None]
) -> None:
    pair.begin(check_head_room=True)
    with pytest.raises(MessageSizeExceededError, match="head-room"):
        form(pair.sender(), sized(MAX_MESSAGE_BYTES))
    assert (pair.primary.peek(), pair.primary.tap.sends()) == ([], [])
    form(pair.sender(), sized(MAX_MESSAGE_BYTES - 500))
    assert len(pair.primary.peek()) >= 1


def largest(pair: Pair, fields: dict[str, Any]) -> BrokeredMessage:
    """Return the largest message that a check of head-room lets through."""
    low, high = 0, MAX_MESSAGE_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        try:
            pair.sender().send(BrokeredMessage(bytes(middle), message_id="id", **fields))
            low = middle
        except MessageSizeExceededError:
            high = middle - 1
    return BrokeredMessage(bytes(low), message_id="id", **fields)


@pytest.mark.parametrize("fields", [{}, {"session_id": "s" * 50, "time_to_live": MINUTE}], ids=str)
@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_what_passes_the_check_of_head_room_never_surprises_in_an_outage(
    local: Pair, fields: dict[str, Any], is_failed_over: bool
) -> None:
    local.begin(check_head_room=True, failover_interval=AT_ONCE)
    one = largest(local, fields)
    assert MAX_MESSAGE_BYTES - 300 < one.size < MAX_MESSAGE_BYTES
    local.break_down()
    if is_failed_over:
        local.send("first")
    local.sender().send(one)
    assert one.body in [held.body for held in local.backlog()]


def test_a_name_that_could_not_be_diverted_is_found_by_the_check_too(local: Pair) -> None:
    local.begin(check_head_room=True)
    with pytest.raises(InvalidArgumentError, match="x-ms-path"):
        local.send("a", application_properties={"x-ms-path": "mine"})
    assert local.primary.peek() == []


# -- scheduled messages ----------------------------------------------------------------------------


def test_a_scheduled_message_diverted_in_an_outage_appears_when_its_time_has_come(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.bring_home()
    assert pair.primary.peek()[0].state is MessageState.SCHEDULED
    assert pair.primary.take() == []
    pair.pass_time(HOUR)
    assert pair.primary.take() == ["later"]


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_a_scheduled_message_diverted_in_an_outage_can_be_cancelled(
    pair: Pair, is_failed_over: bool
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    if is_failed_over:
        pair.send("first")
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    pair.heal()
    sender.cancel_scheduled(number)
    assert "later" not in pair.diverted()
    assert pair.primary.peek() == []


def test_it_can_be_cancelled_while_the_primary_is_still_down(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.sender().cancel_scheduled(number)
    assert pair.diverted() == ["first"]


def test_the_send_that_failed_over_can_be_cancelled_while_the_primary_is_still_down(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    sender.cancel_scheduled(number)
    assert pair.diverted() == []


def test_one_of_several_diverted_messages_is_cancelled_alone(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    sender = pair.sender()
    one, two, three = sender.schedule(messages("1", "2", "3"), pair.clock.now() + HOUR)
    sender.cancel_scheduled([one, three])
    assert sorted(pair.diverted()) == ["2", "first"]
    sender.cancel_scheduled(two)
    assert pair.diverted() == ["first"]


def test_it_can_be_cancelled_after_it_has_gone_home(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    sender = pair.sender()
    one, two = sender.schedule(messages("1", "2"), pair.clock.now() + HOUR)
    pair.bring_home()
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    sender.cancel_scheduled(one)
    pair.pass_time(HOUR)
    assert sorted(pair.primary.take()) == ["2", "first"]
    with pytest.raises(MessageNotFoundError):
        sender.cancel_scheduled(two)


def test_cancelling_a_diverted_message_twice_is_refused(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.heal()
    pair.sender().cancel_scheduled(number)
    with pytest.raises(MessageNotFoundError):
        pair.sender().cancel_scheduled(number)


def test_a_number_of_another_entity_cancels_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    with pytest.raises(MessageNotFoundError):
        pair.sender(INVOICES).cancel_scheduled(number)
    assert sorted(pair.diverted()) == ["first", "later"]


def test_numbers_of_the_primary_and_of_the_backlog_are_cancelled_together(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    later = pair.clock.now() + HOUR
    before = sender.schedule(message("at the primary"), later)
    pair.fail_over()
    diverted = sender.schedule(message("diverted"), later)
    assert set(before).isdisjoint(diverted)
    pair.heal()
    sender.cancel_scheduled([*before, *diverted])
    assert (pair.primary.peek(), pair.diverted()) == ([], ["first"])


def test_cancelling_a_message_the_primary_took_though_its_reply_was_lost_cancels_both(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    assert (bodies(pair.primary.peek()), pair.diverted()) == (["later"], ["later"])
    pair.heal()
    sender.cancel_scheduled(number)
    assert (pair.primary.peek(), pair.diverted()) == ([], [])


def test_a_scheduled_batch_of_columns_can_be_cancelled_too(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(NEWS)
    client = pair.primary.factory.create_topic_client(NEWS)
    numbers = client.schedule(messages("1", "2"), pair.clock.now() + HOUR)
    client.cancel_scheduled(numbers)
    assert pair.diverted() == ["first"]


def test_cancelling_a_diverted_message_leaves_another_of_the_same_id_alone(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    later = pair.clock.now() + HOUR
    sender = pair.sender()
    sender.schedule(message("at the primary", message_id="same"), later)
    pair.fail_over()
    (number,) = sender.schedule(message("diverted", message_id="same"), later)
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    sender.cancel_scheduled(number)
    assert pair.diverted() == ["first"]
    assert bodies(pair.primary.peek()) == ["at the primary"]


def test_of_two_messages_of_one_id_that_went_home_the_right_one_is_cancelled(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(INVOICES)
    pair.break_down(ORDERS)
    two = [message("1", message_id="same"), message("2", message_id="same")]
    _, second = pair.sender().schedule(two, pair.clock.now() + HOUR)
    pair.bring_home()
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    pair.sender().cancel_scheduled(second)
    assert bodies(pair.primary.peek()) == ["1"]


def test_a_diverted_message_whose_reply_was_lost_can_be_cancelled(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.fail_over()
    pair.secondary.faults.inject(Fault.REPLY_LOST, backlog(0), times=1)
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    sender.cancel_scheduled(number)
    assert pair.diverted() == ["first"]


def test_a_diverted_message_can_be_cancelled_by_another_process(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    (number,) = local.sender().schedule(message("later"), local.clock.now() + HOUR)
    other = MessagingFactory(local.primary.connect(), name=PRIMARY, clock=local.clock)
    other.pair_namespace(local.options(backlog_queue_count=2))
    other.create_message_sender(ORDERS).cancel_scheduled(number)
    assert local.diverted() == ["first"]


# -- lost replies ----------------------------------------------------------------------------------


@forms
def test_a_send_whose_reply_was_lost_and_that_is_diverted_is_home_once(
    pair: Pair, form: Callable[[MessageSender], None]
) -> None:
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
    go_on = held_up(pair)
    with pair.sender().pipelined() as pipeline:
        pipeline.send(message("first"))
        pipeline.send(message("a"))
        pipeline.send(sized(MAX_MESSAGE_BYTES))
        pipeline.send(message("b"))
        pair.break_down(ORDERS, Fault.REPLY_LOST)
        go_on.set()
    pair.bring_home()
    found = [one for one in bodies(pair.primary.peek()) if len(one) < 10]
    assert sorted(found) == ["a", "b", "first"]


def test_a_scheduled_send_whose_reply_was_lost_is_home_once(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.bring_home()
    assert bodies(pair.primary.peek()) == ["later"]


def test_sends_of_the_same_client_after_a_lost_reply_are_not_mistaken_for_it(pair: Pair) -> None:
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
    (held,) = [queue.path for queue in pair.pairing.backlog_queues() if at_all(pair, queue.path)]
    away = pair.secondary.take(held) + pair.secondary.take(held) + pair.secondary.take(held)
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


# -- what is told ----------------------------------------------------------------------------------


def test_events_tell_what_happened_in_order(pair: Pair) -> None:
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


def test_an_observer_that_raises_keeps_nobody_from_sending_or_hearing(pair: Pair) -> None:
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


def test_an_observer_that_stopped_hears_nothing_more(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    heard: list[object] = []
    stop = local.pairing.on_event(heard.append)
    stop()
    local.fail_over()
    assert heard == []


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
            found.append([bodies(held) for held in pair.held()])
    assert found[0] == found[1]
