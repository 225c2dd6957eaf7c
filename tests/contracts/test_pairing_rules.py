"""The rules of pairing to the letter: whose backlog, how soon, and what is reported."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    HOUR,
    INVOICES,
    MINUTE,
    ORDERS,
    PRIMARY,
    TICK,
    Pair,
    SyphonStandIn,
    backlog,
    columns,
    message,
    pipelined,
)
from twinbus import (
    BrokeredMessage,
    MessageSender,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    OperationTimeoutError,
    PairedNamespaceOptions,
    QueueDescription,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.client.state import FactoryState
from twinbus.entities import EntityStatus
from twinbus.errors import (
    CommunicationError,
    EntityDisabledError,
    InvalidArgumentError,
    InvalidOperationError,
)
from twinbus.message import to_batch
from twinbus.namespace.contract import Namespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.pairing.backlog_queues import describe_backlog_queue, find_backlog_queues
from twinbus.pairing.events import (
    BacklogIncomplete,
    FailedOver,
    PingRefused,
    Protected,
    Returned,
    Unprotected,
)
from twinbus.pairing.health import HealthState
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import CreateEntity, ListEntities, Peek, Send
from twinbus.testing import Fault

README = Path(__file__).parents[2] / "README.md"
TRY = timedelta(seconds=5)
EU = PrimaryIdentity(PRIMARY, "contoso.eu.example:4617")


def silent(pair: Pair, path: str = ORDERS) -> None:
    """Let the primary take every try's whole time and never answer."""
    tap = pair.primary.tap
    ask = tap.ask

    def wait(command: object, timeout_s: float | None = None) -> object:
        if isinstance(command, Send) and command.path == path:
            assert timeout_s is not None
            tap.asked.append((pair.clock.now(), command))
            pair.clock.advance(timedelta(seconds=timeout_s))
            raise OperationTimeoutError("no answer in time")
        return ask(command, timeout_s)  # type: ignore[arg-type]

    tap.ask = wait  # type: ignore[assignment, method-assign]


# -- whose backlog it is ---------------------------------------------------------------------------


def test_a_backlog_queue_of_another_primary_is_refused(pair: Pair) -> None:
    pair.secondary.root.create_queue(describe_backlog_queue(EU, 1))
    with MessagingFactory.from_connection_string(
        "Endpoint=twinbus://contoso.us.example:4617", clock=pair.clock
    ) as primary:
        with pytest.raises(
            InvalidOperationError, match=r"contoso\.eu\.example.*contoso\.us\.example"
        ):
            primary.pair_namespace(pair.options(backlog_queue_count=2))
        identity = PrimaryIdentity.of_factory(primary)
        with pytest.raises(InvalidOperationError, match="belongs to another primary"):
            find_backlog_queues(pair.secondary.root, identity, 2)
    assert [queue.path for queue in pair.secondary.root.list_queues()] == [backlog(1)]


def test_a_backlog_queue_that_another_primary_makes_meanwhile_is_refused(local: Pair) -> None:
    def steal(command: object) -> MessagingError | None:
        if isinstance(command, CreateEntity) and not local.secondary.root.list_queues():
            local.secondary.root.create_queue(describe_backlog_queue(EU, 0))
        return None

    local.secondary.manager_tap.refusal = steal
    with (
        MessagingFactory.from_connection_string(
            "Endpoint=twinbus://contoso.us.example:4617", clock=local.clock
        ) as primary,
        pytest.raises(InvalidOperationError, match="belongs to another primary"),
    ):
        primary.pair_namespace(local.options(backlog_queue_count=1))


def test_two_namespaces_of_one_name_are_told_apart_while_both_are_down(pair: Pair) -> None:
    """The id in the connection string is enough: nobody has to be asked."""
    texts = [
        f"Endpoint=twinbus://10.0.0.{last}:4617;Name=contoso;NamespaceId={last}" for last in (1, 2)
    ]
    with MessagingFactory.from_connection_string(texts[0], clock=pair.clock) as first:
        first.pair_namespace(pair.options(backlog_queue_count=1))
    with (
        MessagingFactory.from_connection_string(texts[1], clock=pair.clock) as second,
        NamespaceManager(pair.secondary.connect(), clock=pair.clock) as manager,
        MessagingFactory(pair.secondary.connect(), clock=pair.clock) as factory,
        pytest.raises(InvalidOperationError, match="belongs to another primary"),
    ):
        second.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, factory))


def test_a_primary_that_moved_keeps_its_backlog(pair: Pair) -> None:
    pair.secondary.root.create_queue(
        describe_backlog_queue(PrimaryIdentity(PRIMARY, "10.0.0.1:4617", "5f0c"), 0)
    )
    text = "Endpoint=twinbus://10.0.0.2:4617;Name=contoso;NamespaceId=5f0c"
    with MessagingFactory.from_connection_string(text, clock=pair.clock) as primary:
        primary.pair_namespace(pair.options(backlog_queue_count=1))


@pytest.mark.parametrize("host", ["10.0.0.1", "[::1]"])
def test_a_primary_without_a_usable_name_is_refused(local: Pair, host: str) -> None:
    with (
        MessagingFactory.from_connection_string(
            f"Endpoint=twinbus://{host}:4617", clock=local.clock
        ) as primary,
        pytest.raises(InvalidArgumentError, match=r"Put Name=\.\.\. into its connection string"),
    ):
        primary.pair_namespace(local.options())
    assert not local.secondary.root.list_queues()


def test_a_directory_with_a_blank_is_refused_with_what_to_type(local: Pair, tmp_path: Path) -> None:
    text = f"Endpoint=embedded://{tmp_path / 'my orders'}"
    with (
        MessagingFactory.from_connection_string(text, clock=local.clock) as primary,
        pytest.raises(InvalidArgumentError, match="Name=my-orders"),
    ):
        primary.pair_namespace(local.options())
    text += ";Name=my-orders"
    with MessagingFactory.from_connection_string(text, clock=local.clock) as primary:
        primary.pair_namespace(local.options(backlog_queue_count=1))


def test_extra_queues_are_found_apart(pair: Pair) -> None:
    pair.begin(backlog_queue_count=2)
    for index in (2, 11):
        pair.secondary.root.create_queue(backlog(index))
    for name in ("02", "x", "1/a"):
        pair.secondary.root.create_queue(f"{PRIMARY}/x-servicebus-transfer/{name}")
    found = find_backlog_queues(pair.secondary.root, pair.pairing.identity, 2)
    assert list(found.paths.values()) == [backlog(0), backlog(1)]
    assert list(found.extra.values()) == [backlog(2), backlog(11)]


def test_extra_queues_of_another_primary_are_no_concern_of_this_one(pair: Pair) -> None:
    pair.begin(backlog_queue_count=2)
    pair.secondary.root.create_queue(describe_backlog_queue(PrimaryIdentity("contoso", "", "x"), 5))
    identity = PrimaryIdentity(PRIMARY, "", "y")
    found = find_backlog_queues(pair.secondary.root, replace(identity, namespace_id=""), 2)
    assert list(found.extra.values()) == [backlog(5)]
    for index in (0, 1):
        pair.secondary.root.delete_queue(backlog(index))
    assert not find_backlog_queues(pair.secondary.root, identity, 2).extra


@pytest.mark.parametrize("text", [None, "", "owned by team 7", "twinbus-primary garbage"])
def test_a_queue_that_names_nobody_belongs_to_the_first_that_pairs(
    pair: Pair, text: str | None
) -> None:
    pair.secondary.root.create_queue(QueueDescription(path=backlog(0), user_metadata=text))
    texts = [
        f"Endpoint=twinbus://10.0.0.{last}:4617;Name=contoso;NamespaceId={last}" for last in (1, 2)
    ]
    with MessagingFactory.from_connection_string(texts[0], clock=pair.clock) as first:
        first.pair_namespace(pair.options(backlog_queue_count=1))
    adopted = pair.secondary.root.get_queue(backlog(0))
    assert PrimaryIdentity.of_queue(adopted) == PrimaryIdentity("contoso", "10.0.0.1:4617", "1")
    assert "team 7" not in (text or "") or "team 7" in (adopted.user_metadata or "")
    with (
        MessagingFactory.from_connection_string(texts[1], clock=pair.clock) as second,
        NamespaceManager(pair.secondary.connect(), clock=pair.clock) as manager,
        MessagingFactory(pair.secondary.connect(), clock=pair.clock) as factory,
        pytest.raises(InvalidOperationError, match="belongs to another primary"),
    ):
        second.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, factory, 1))


@pytest.mark.parametrize(
    ("primary", "secondary"),
    [
        ("localhost:4617", "127.0.0.1:4617"),
        ("[::1]:4617", "localhost:4617"),
        ("one.example:4617;NamespaceId=7", "other.example:4617;NamespaceId=7"),
    ],
)
def test_a_namespace_is_not_paired_with_itself_by_another_name(
    primary: str, secondary: str
) -> None:
    with (
        MessagingFactory.from_connection_string(f"Endpoint=twinbus://{primary}") as one,
        MessagingFactory.from_connection_string(f"Endpoint=twinbus://{secondary}") as other,
        NamespaceManager.from_connection_string(f"Endpoint=twinbus://{secondary}") as manager,
        pytest.raises(InvalidArgumentError, match="itself"),
    ):
        one.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, other))


def test_a_server_refuses_clients_that_mean_another_namespace(servers: Pair) -> None:
    pair, where = servers, servers.primary.where
    assert where is not None
    for namespace_id in (pair.primary.engine_id, ""):
        with ServerNamespace(replace(where, namespace_id=namespace_id), pair.clock) as right:
            right.ask(Peek(ORDERS), 20)
    with (
        ServerNamespace(replace(where, namespace_id="0" * 32), pair.clock) as wrong,
        pytest.raises(UnauthorizedError, match="Correct the Endpoint or NamespaceId"),
    ):
        wrong.ask(Peek(ORDERS), 20)


# -- how soon --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["single", "batch", "pipelined"])
def test_with_no_interval_a_silent_primary_costs_one_try(local: Pair, way: str) -> None:
    local.begin(failover_interval=AT_ONCE)
    silent(local)
    began = local.clock.now()
    if way == "single":
        local.send("a")
    elif way == "batch":
        local.sender().send_batch(columns("a"))
    else:
        local.primary.faults.inject(Fault.TIMEOUT, ORDERS)
        pipelined(local.sender(), "a")
    assert local.diverted() == ["a"]
    assert local.clock.now() - began <= TRY


def test_with_no_interval_a_primary_that_nobody_reaches_costs_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.tap.refuse(CommunicationError("nobody is there"))
    began = pair.clock.now()
    pair.send("a")
    assert pair.diverted() == ["a"]
    assert pair.clock.now() == began
    assert len(pair.primary.tap.sends(ORDERS)) == 1


@pytest.mark.parametrize("seconds", [0, 1, 7, 30, 54])
def test_the_first_diverted_send_returns_within_the_interval_and_one_try(
    local: Pair, seconds: int
) -> None:
    interval = timedelta(seconds=seconds)
    local.begin(failover_interval=interval)
    silent(local)
    began = local.clock.now()
    local.send("a")
    assert local.diverted() == ["a"]
    assert interval <= local.clock.now() - began <= interval + TRY


def test_with_the_defaults_the_first_diverted_send_returns_within_65_seconds(local: Pair) -> None:
    local.begin(failover_interval=MINUTE)
    silent(local)
    began, raised = local.clock.now(), 0
    while not local.diverted():
        try:
            local.send("a")
        except OperationTimeoutError:
            raised += 1
    assert local.clock.now() - began <= MINUTE + TRY
    assert raised == 1


def test_the_values_of_the_readme_divert_within_the_time_that_it_promises(local: Pair) -> None:
    page = README.read_text()
    shown = {
        name: timedelta(seconds=int(value))
        for name, value in re.findall(r"(\w+)=timedelta\(seconds=(\d+)\)", page)
    }
    promised = re.search(r"returns after at most (\d+) seconds", page)
    assert promised
    local.primary.factory.courier.policy = RetryPolicy(
        operation_timeout=shown["operation_timeout"], try_timeout=shown["try_timeout"]
    )
    local.begin(failover_interval=shown["failover_interval"])
    silent(local)
    began = local.clock.now()
    local.send("first")
    assert local.clock.now() - began <= timedelta(seconds=int(promised[1]))
    began = local.clock.now()
    local.send("later")
    assert local.clock.now() == began, "later sends are diverted without a delay"
    assert sorted(local.diverted()) == ["first", "later"]


def test_a_send_that_begins_while_the_timer_runs_is_diverted_when_it_runs_out(local: Pair) -> None:
    local.begin(failover_interval=timedelta(seconds=20))
    silent(local)
    impatient = local.primary.factory.courier
    impatient.policy = RetryPolicy.once()
    began = local.clock.now()
    with pytest.raises(OperationTimeoutError):
        local.send("raised")
    impatient.policy = RetryPolicy()
    local.pass_time(seconds=18)
    local.send("diverted")
    assert local.diverted() == ["diverted"]
    assert local.clock.now() - began == TRY + timedelta(seconds=20)


def test_a_send_that_waits_for_a_busy_primary_is_diverted_when_the_timer_runs_out(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=timedelta(seconds=5))
    pair.primary.faults.inject(Fault.TIMEOUT, ORDERS, times=1)
    pair.primary.tap.refusal = lambda command: (
        busy(ORDERS) if isinstance(command, Send) and len(pair.primary.tap.sends()) > 1 else None
    )
    began = pair.clock.now()
    pair.send("a")
    assert pair.diverted() == ["a"]
    assert pair.clock.now() - began <= timedelta(seconds=5) + TRY


def test_a_pipelined_send_has_its_whole_try_after_it_waited_for_a_busy_primary(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.faults.inject(Fault.SERVER_BUSY, times=1)
    pair.send("first")
    pair.primary.factory.courier.note(busy(""))
    pipelined(pair.sender(), "second")
    assert pair.primary.take() == ["first", "second"]
    assert pair.diverted() == []


# -- pings -----------------------------------------------------------------------------------------


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
    assert len(pair.heard(PingRefused)) == 1
    pair.primary.tap.relent()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)


def test_a_ping_that_hears_of_no_entity_ends_the_failover(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    pair.heal()
    pair.primary.root.delete_queue(ORDERS)
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)


# -- busy ------------------------------------------------------------------------------------------


def busy(scope: str) -> ServerBusyError:
    return ServerBusyError("wait", scope=scope)


def test_a_busy_entity_holds_up_no_other(pair: Pair) -> None:
    pair.begin()
    pair.primary.tap.refuse(busy(ORDERS), Send, ORDERS)
    hasty = MessagingFactory(
        pair.primary.tap, clock=pair.clock, retry_policy=RetryPolicy(operation_timeout=TRY)
    )
    with pytest.raises(ServerBusyError, match="tried once in"):
        hasty.create_message_sender(ORDERS).send(message())
    began = pair.clock.now()
    hasty.create_message_sender(INVOICES).send(message("others go on"))
    assert hasty.create_message_receiver(INVOICES).receive(AT_ONCE) is not None
    assert pair.clock.now() == began
    asked = len(pair.primary.tap.asked)
    with pytest.raises(ServerBusyError, match="not tried"):
        hasty.create_message_sender(ORDERS.upper()).send(message())
    assert len(pair.primary.tap.asked) == asked


def test_a_busy_namespace_holds_up_all(pair: Pair) -> None:
    pair.begin()
    pair.primary.tap.refuse(busy(""), Send, ORDERS)
    hasty = MessagingFactory(
        pair.primary.tap, clock=pair.clock, retry_policy=RetryPolicy(operation_timeout=TRY)
    )
    for path in (ORDERS, INVOICES):
        with pytest.raises(ServerBusyError):
            hasty.create_message_sender(path).send(message())


# -- the set-up ------------------------------------------------------------------------------------


def test_missing_backlog_queues_are_counted_and_reported(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.secondary.manager_tap.refuse(MessagingError("no room"), CreateEntity)
    pair.secondary.root.create_queue(backlog(0))
    options = pair.options(backlog_queue_count=3)
    pair.pairing = pair.primary.factory.pair_namespace(options)
    assert options.backlog_queue_count == 1
    pair.pairing.on_event(pair._hear)
    (event,) = pair.heard(BacklogIncomplete)
    assert (event.queues, event.wanted, "no room" in event.cause) == (1, 3, True)
    assert "BacklogIncomplete" in caplog.text


def test_the_options_are_named_as_specified(local: Pair) -> None:
    options = SendAvailabilityPairedNamespaceOptions(
        secondary_namespace_manager=local.secondary.manager,
        messaging_factory=local.secondary.factory,
        backlog_queue_count=3,
        failover_interval=HOUR,
        enable_syphon=False,
        ping_primary_interval=timedelta(seconds=2),
    )
    assert options.ping_primary_interval == timedelta(seconds=2)
    assert options.backlog_queue_count == 3
    assert "failover_interval" in vars(PairedNamespaceOptions)
    for interval in (timedelta(milliseconds=999), timedelta(minutes=30) + TICK):
        with pytest.raises(InvalidArgumentError, match="ping_primary_interval"):
            SendAvailabilityPairedNamespaceOptions(
                local.secondary.manager, local.secondary.factory, ping_primary_interval=interval
            )


def test_an_error_of_the_set_up_says_which_namespace_it_is_about(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("no claim"), ListEntities)
    with pytest.raises(UnauthorizedError, match=r"the secondary namespace backup.*no claim"):
        pair.begin()


class TogetherClosing:
    """A namespace whose close returns when two others are being closed as well."""

    def __init__(self, inner: Namespace, meeting: threading.Barrier) -> None:
        self.id, self.submit, self.ask = inner.id, inner.submit, inner.ask
        self.capabilities = inner.capabilities
        self._meeting = meeting

    def close(self) -> None:
        self._meeting.wait(20)


def test_connections_are_closed_side_by_side(tmp_path: Path) -> None:
    """Each may wait for a server that hangs, and all of it must not take longer than one."""
    meeting = threading.Barrier(3)
    with EmbeddedNamespace(tmp_path / "a") as one, EmbeddedNamespace(tmp_path / "b") as two:
        primary = MessagingFactory(TogetherClosing(one, meeting), name=PRIMARY)
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(TogetherClosing(two, meeting)),
            MessagingFactory(TogetherClosing(two, meeting)),
            1,
        )
        primary.pair_namespace(options)
        primary.close()
        assert not meeting.broken
        assert options.messaging_factory.state is FactoryState.CLOSED


def test_options_are_of_one_pairing_whoever_is_first(local: Pair) -> None:
    options = local.options(backlog_queue_count=1)
    local.primary.factory.pair_namespace(options)
    other = MessagingFactory(local.primary.connect(), name="fabrikam", clock=local.clock)
    with pytest.raises(InvalidOperationError, match="Create new options"):
        other.pair_namespace(options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"wait_for_secondary": "no"},
        {"enable_syphon": "yes"},
        {"check_head_room": None},
        {"syphon": 3},
        {"ledger": 3},
        {"ledger": "s3a://bucket/events"},
        {"ledger": Path("s3a://bucket/events")},
    ],
    ids=str,
)
def test_options_of_another_type_are_refused(local: Pair, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        local.options(**wrong)


# -- without waiting for the secondary -------------------------------------------------------------


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
    assert len(pair.heard(Unprotected)) == 2


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
    assert [event.cause for event in local.heard(Unprotected)] == [
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


# -- what is refused and reported ------------------------------------------------------------------


def send_pipelined(sender: MessageSender, bad: BrokeredMessage) -> None:
    with sender.pipelined() as pipeline:
        future = pipeline.send(bad)
    future.result(timeout=0)


WAYS_TO_SEND: dict[str, Callable[[MessageSender, BrokeredMessage], None]] = {
    "single": lambda sender, bad: sender.send(bad),
    "columns": lambda sender, bad: sender.send_batch(to_batch([bad])),
    "pipelined": send_pipelined,
}


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


def test_a_disabled_entity_is_diverted_and_the_event_says_why(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.primary.root.update_queue(QueueDescription(path=ORDERS, status=EntityStatus.DISABLED))
    pair.send("a")
    assert pair.diverted() == ["a"]
    (event,) = pair.heard(FailedOver)
    assert EntityDisabledError.__name__.removesuffix("Error") in event.cause
    assert "enable it" in event.cause


def test_errors_are_also_what_python_calls_them() -> None:
    assert isinstance(OperationTimeoutError("late"), TimeoutError)
    assert isinstance(UnauthorizedError("no claim", path="orders"), PermissionError)
    assert str(UnauthorizedError("no claim", path="orders")) == "no claim"
    assert UnauthorizedError("no claim", path="orders").facts == {"path": "orders"}
