"""Pairing two namespaces: its options, the backlog queues, and what becomes of a failed attempt."""

import asyncio
import socket
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    ORDERS,
    PRIMARY,
    SECONDARY,
    End,
    Pair,
    SyphonStandIn,
    Tap,
    backlog,
    message,
    opened,
)
from twinbus import (
    BrokeredMessage,
    Claim,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    PairedNamespaceOptions,
    QueueDescription,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
    SharedAccessKey,
    UnauthorizedError,
    aio,
)
from twinbus.client.state import FactoryState
from twinbus.connection import ConnectionString
from twinbus.entities import EntityStatus
from twinbus.errors import (
    CommunicationError,
    EntityAlreadyExistsError,
    FactoryFaultedError,
    InvalidArgumentError,
    InvalidOperationError,
    NamespaceClosedError,
)
from twinbus.limits import UNLIMITED
from twinbus.namespace.server import ServerNamespace
from twinbus.pairing.health import HealthState
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Command, CreateEntity, ListEntities

TICK = timedelta(microseconds=1)
REFUSED = MessagingError("the namespace makes no queues today")


def creations(end: End) -> list[tuple[datetime, str]]:
    """Return which queues were asked for, and when."""
    return [
        (at, command.description.path)
        for at, command in end.manager_tap.asked
        if isinstance(command, CreateEntity)
    ]


def refuse_to_make(tap: Tap, error: MessagingError, *indices: int, times: int = 99) -> None:
    """Let the creation of some backlog queues fail a number of times each."""
    left = {backlog(index): times for index in indices}

    def refusal(command: Command[Any]) -> MessagingError | None:
        if not isinstance(command, CreateEntity) or not left.get(command.description.path):
            return None
        left[command.description.path] -= 1
        return error

    tap.refusal = refusal


def backlog_paths(pair: Pair) -> list[str]:
    return [queue.path for queue in pair.secondary.root.list_queues()]


def assert_nothing_is_half_made(pair: Pair) -> None:
    """The factory sends as if nothing had happened, and can be paired afterwards."""
    assert pair.primary.factory.state is FactoryState.OPENED
    pair.send("after")
    assert pair.primary.take() == ["after"]
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send("fails")
    pair.heal()
    pair.secondary.manager_tap.relent()
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "diverted")
    assert pair.diverted() == ["diverted"]


# -- options ---------------------------------------------------------------------------------------


def test_the_options_have_the_defaults_of_the_specification(local: Pair) -> None:
    options = local.options()
    assert options.backlog_queue_count == 10
    assert options.failover_interval == timedelta(minutes=1)
    assert options.enable_syphon is False
    assert options.ping_primary_interval == timedelta(minutes=1)


def test_the_options_come_in_the_order_of_the_specification(local: Pair) -> None:
    manager, factory = local.secondary.manager, local.secondary.factory
    options = SendAvailabilityPairedNamespaceOptions(manager, factory, 3, AT_ONCE, True)
    assert (options.secondary_namespace_manager, options.messaging_factory) == (manager, factory)
    assert (options.backlog_queue_count, options.failover_interval) == (3, AT_ONCE)
    assert options.enable_syphon is True


def test_the_options_are_paired_namespace_options(local: Pair) -> None:
    assert isinstance(local.options(), PairedNamespaceOptions)


@pytest.mark.parametrize("interval", [timedelta(0), TICK, timedelta(minutes=60)])
def test_a_failover_interval_is_from_0_to_60_minutes(local: Pair, interval: timedelta) -> None:
    assert local.options(failover_interval=interval).failover_interval == interval


@pytest.mark.parametrize("interval", [timedelta(seconds=1), timedelta(minutes=30)])
def test_a_ping_interval_is_from_1_second_to_30_minutes(local: Pair, interval: timedelta) -> None:
    assert local.options(ping_primary_interval=interval).ping_primary_interval == interval


@pytest.mark.parametrize(
    "settings",
    [
        {"backlog_queue_count": 0},
        {"backlog_queue_count": -1},
        {"backlog_queue_count": 1.5},
        {"backlog_queue_count": "10"},
        {"backlog_queue_count": None},
        {"backlog_queue_count": True},
        {"failover_interval": -TICK},
        {"failover_interval": timedelta(minutes=60) + TICK},
        {"failover_interval": timedelta.max},
        {"failover_interval": 60},
        {"failover_interval": None},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_at_construction(
    local: Pair, settings: dict[str, Any]
) -> None:
    (name,) = settings
    with pytest.raises(InvalidArgumentError, match=name):
        local.options(**settings)


@pytest.mark.parametrize(
    "interval", [timedelta(seconds=1) - TICK, timedelta(minutes=30) + TICK, AT_ONCE, 60, None]
)
def test_a_ping_interval_out_of_range_is_refused(local: Pair, interval: Any) -> None:
    options = local.options()
    with pytest.raises(InvalidArgumentError, match="ping_primary_interval"):
        options.ping_primary_interval = interval
    assert options.ping_primary_interval == MINUTE


def test_what_is_no_manager_or_no_factory_is_refused_at_construction(local: Pair) -> None:
    manager, factory = local.secondary.manager, local.secondary.factory
    with pytest.raises(InvalidArgumentError, match="secondary_namespace_manager"):
        SendAvailabilityPairedNamespaceOptions(factory, factory)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="messaging_factory"):
        SendAvailabilityPairedNamespaceOptions(manager, manager)  # type: ignore[arg-type]


def test_options_in_use_are_not_used_for_a_second_pairing(local: Pair) -> None:
    options = local.options()
    local.primary.factory.pair_namespace(options)
    other = MessagingFactory(local.primary.connect(), name="other", clock=local.clock)
    with pytest.raises(InvalidOperationError):
        other.pair_namespace(options)


# -- when pairing returns --------------------------------------------------------------------------


def test_when_pairing_returns_the_queues_exist(pair: Pair) -> None:
    pair.begin(backlog_queue_count=3)
    assert backlog_paths(pair) == [backlog(0), backlog(1), backlog(2)]


def test_pairing_returns_the_pairing(pair: Pair) -> None:
    pairing = pair.begin()
    assert isinstance(pairing, SendAvailabilityPairing)
    assert pairing.status() == []
    assert [queue.is_in_rotation for queue in pairing.backlog_queues()] == [True, True]


def test_when_pairing_returns_the_syphon_runs_if_enabled(pair: Pair) -> None:
    pairing = pair.begin_with_syphon()
    assert pair.syphon.pairing is pairing
    assert pair.syphon.stops == 0


def test_the_queues_exist_before_the_syphon_is_started(pair: Pair) -> None:
    found: list[str] = []

    def start(pairing: SendAvailabilityPairing) -> SyphonStandIn:
        found.extend(queue.path for queue in pairing.backlog_queues())
        assert found == backlog_paths(pair)
        return pair.syphon

    pair.begin(enable_syphon=True, syphon=start)
    assert found == [backlog(0), backlog(1)]


def test_a_syphon_that_is_not_enabled_is_not_started(local: Pair) -> None:
    local.begin(syphon=local.syphon)
    assert local.syphon.pairing is None


def test_pairing_has_an_asyncio_form(servers: Pair) -> None:
    where = servers.primary.where
    assert where is not None
    text = replace(where, name=PRIMARY).to_text()
    clock = servers.clock

    async def main() -> None:
        async with aio.MessagingFactory.from_connection_string(text, clock=clock) as primary:
            pairing = await primary.pair_namespace(servers.options(backlog_queue_count=2))
            assert [one.path for one in pairing.backlog_queues()] == [backlog(0), backlog(1)]

    asyncio.run(asyncio.wait_for(main(), 30))
    assert backlog_paths(servers) == [backlog(0), backlog(1)]
    assert servers.secondary.factory.state is FactoryState.CLOSED


def test_sends_of_an_asyncio_factory_go_through_the_pairing(servers: Pair) -> None:
    where = servers.primary.where
    assert where is not None
    text, clock = replace(where, name=PRIMARY).to_text(), servers.clock
    orders = servers.primary.root.get_queue(ORDERS)
    servers.primary.root.update_queue(replace(orders, status=EntityStatus.SEND_DISABLED))

    async def main() -> None:
        async with aio.MessagingFactory.from_connection_string(text, clock=clock) as primary:
            await primary.pair_namespace(servers.options(failover_interval=AT_ONCE))
            await primary.create_message_sender(ORDERS).send(message("diverted"))

    asyncio.run(asyncio.wait_for(main(), 30))
    assert servers.diverted() == ["diverted"]


def test_a_failure_is_raised_from_the_asyncio_form_too(servers: Pair) -> None:
    where = servers.primary.where
    assert where is not None
    text, clock = replace(where, name=PRIMARY).to_text(), servers.clock
    servers.secondary.manager_tap.refuse(UnauthorizedError("no"), ListEntities)

    async def main() -> None:
        async with aio.MessagingFactory.from_connection_string(text, clock=clock) as primary:
            with pytest.raises(UnauthorizedError):
                await primary.pair_namespace(servers.options())

    asyncio.run(asyncio.wait_for(main(), 30))


# -- failures are raised from it, and nothing is half made -----------------------------------------


def test_a_factory_is_paired_at_most_once(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    with pytest.raises(InvalidOperationError, match="at most once"):
        pair.primary.factory.pair_namespace(pair.options())
    pair.fail_over(ORDERS, "by the first pairing")
    assert pair.diverted() == ["by the first pairing"]


def test_of_many_threads_that_pair_one_factory_one_succeeds(tmp_path: Path) -> None:
    with opened("embedded", tmp_path, threaded=True) as pair:
        begin = threading.Barrier(4)
        outcomes: list[object] = []

        def try_to_pair() -> None:
            options = pair.options(backlog_queue_count=3)
            begin.wait(10)
            try:
                outcomes.append(pair.primary.factory.pair_namespace(options))
            except InvalidOperationError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=try_to_pair) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len([one for one in outcomes if isinstance(one, SendAvailabilityPairing)]) == 1
        assert len(outcomes) == 4


def test_pairing_a_factory_with_itself_is_refused(pair: Pair) -> None:
    options = SendAvailabilityPairedNamespaceOptions(pair.primary.manager, pair.primary.factory)
    with pytest.raises(InvalidArgumentError, match="itself"):
        pair.primary.factory.pair_namespace(options)
    assert not [q for q in pair.primary.root.list_queues() if "transfer" in q.path]
    assert_nothing_is_half_made(pair)


def test_pairing_a_namespace_with_itself_is_refused(pair: Pair, tmp_path: Path) -> None:
    where = pair.primary.where
    own = f"Endpoint=embedded://{tmp_path / 'own'}" if where is None else where.to_text()
    with (
        MessagingFactory.from_connection_string(own, clock=pair.clock) as primary,
        MessagingFactory.from_connection_string(own, clock=pair.clock) as factory,
        NamespaceManager.from_connection_string(own, clock=pair.clock) as manager,
    ):
        with pytest.raises(InvalidArgumentError, match="itself"):
            primary.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, factory))
        assert not [q for q in manager.list_queues() if "transfer" in q.path]


def test_a_namespace_by_another_name_is_still_itself(tmp_path: Path) -> None:
    own = f"Endpoint=embedded://{tmp_path / 'own'}"
    with (
        MessagingFactory.from_connection_string(f"{own};Name=one") as primary,
        MessagingFactory.from_connection_string(f"{own}/../own;Name=other") as factory,
        NamespaceManager.from_connection_string(own) as manager,
        pytest.raises(InvalidArgumentError, match="itself"),
    ):
        primary.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, factory))


def test_a_manager_of_another_namespace_than_the_factory_is_refused(tmp_path: Path) -> None:
    with (
        MessagingFactory.from_connection_string(f"Endpoint=embedded://{tmp_path / 'a'}") as factory,
        NamespaceManager.from_connection_string(f"Endpoint=embedded://{tmp_path / 'b'}") as manager,
        pytest.raises(InvalidArgumentError, match="different namespaces"),
    ):
        SendAvailabilityPairedNamespaceOptions(manager, factory)


def keyed(servers: Pair, held: SharedAccessKey | None = None, **changes: Any) -> End:
    """Return the secondary as one with another key sees it."""
    where = servers.secondary.where
    assert where is not None
    if held is not None:
        changes |= {"key_name": held.name, "key": held.primary}
    other: ConnectionString = replace(where, **changes)
    return End(SECONDARY, servers.clock, lambda: ServerNamespace(other, servers.clock), other)


def assert_pairing_is_refused(servers: Pair, secondary: End, error: type[MessagingError]) -> None:
    options = SendAvailabilityPairedNamespaceOptions(secondary.manager, secondary.factory)
    began = servers.clock.now()
    with pytest.raises(error):
        servers.primary.factory.pair_namespace(options)
    if error is UnauthorizedError:
        assert servers.clock.now() == began
    assert_nothing_is_half_made(servers)
    secondary.close()


def test_a_secondary_without_the_manage_claim_fails_the_pairing_at_once(servers: Pair) -> None:
    key = servers.secondary.root.create_key("app", [Claim.SEND, Claim.LISTEN])
    assert_pairing_is_refused(servers, keyed(servers, key), UnauthorizedError)


def test_bad_credentials_of_the_secondary_fail_the_pairing(servers: Pair) -> None:
    assert_pairing_is_refused(servers, keyed(servers, key="wrong" * 8), UnauthorizedError)


def test_a_key_that_nobody_knows_fails_the_pairing(servers: Pair) -> None:
    assert_pairing_is_refused(servers, keyed(servers, key_name="nobody"), UnauthorizedError)


def test_a_secondary_factory_that_may_not_send_fails_the_pairing(servers: Pair) -> None:
    key = servers.secondary.root.create_key("ears", [Claim.LISTEN])
    deaf = keyed(servers, key)
    options = SendAvailabilityPairedNamespaceOptions(servers.secondary.manager, deaf.factory)
    with pytest.raises(UnauthorizedError):
        servers.primary.factory.pair_namespace(options)
    assert_nothing_is_half_made(servers)
    deaf.close()


def test_a_secondary_that_cannot_be_reached_fails_the_pairing(servers: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    where = servers.secondary.where
    assert where is not None
    nowhere = ServerNamespace(replace(where, port=port), servers.clock)
    once = RetryPolicy.once(timedelta(seconds=10))
    manager = NamespaceManager(nowhere, clock=servers.clock, retry_policy=once)
    factory = MessagingFactory(nowhere, clock=servers.clock, retry_policy=once)
    with pytest.raises(CommunicationError):
        servers.primary.factory.pair_namespace(
            SendAvailabilityPairedNamespaceOptions(manager, factory)
        )
    assert_nothing_is_half_made(servers)
    nowhere.close()


@pytest.mark.parametrize("kind", [ListEntities, CreateEntity])
def test_a_refusal_for_want_of_manage_is_raised_from_pairing(pair: Pair, kind: type) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("the key lacks the claim Manage"), kind)
    with pytest.raises(UnauthorizedError, match="lacks the claim Manage"):
        pair.begin()
    assert_nothing_is_half_made(pair)


def test_options_whose_pairing_failed_can_be_used_again(pair: Pair) -> None:
    options = pair.options(backlog_queue_count=2)
    pair.secondary.manager_tap.refuse(UnauthorizedError("no"), CreateEntity)
    with pytest.raises(UnauthorizedError):
        pair.primary.factory.pair_namespace(options)
    pair.secondary.manager_tap.relent()
    assert len(pair.primary.factory.pair_namespace(options).backlog_queues()) == 2


def test_a_failed_pairing_leaves_the_secondary_open(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("no"), CreateEntity)
    with pytest.raises(UnauthorizedError):
        pair.begin()
    assert pair.secondary.factory.state is FactoryState.OPENED
    assert not pair.secondary.manager_tap.is_closed


def test_a_syphon_that_does_not_start_fails_the_pairing(pair: Pair) -> None:
    def start(_: SendAvailabilityPairing) -> SyphonStandIn:
        raise MessagingError("no Spark here")

    with pytest.raises(MessagingError, match="no Spark here"):
        pair.begin(enable_syphon=True, syphon=start)
    assert_nothing_is_half_made(pair)


def test_the_fault_of_a_secondary_after_a_failed_pairing_is_not_the_primarys(local: Pair) -> None:
    def start(_: SendAvailabilityPairing) -> SyphonStandIn:
        raise MessagingError("no Spark here")

    with pytest.raises(MessagingError):
        local.begin(enable_syphon=True, syphon=start)
    local.secondary.factory.fault("its own trouble")
    assert local.primary.factory.state is FactoryState.OPENED


def test_a_factory_that_has_ended_is_not_paired(pair: Pair) -> None:
    pair.primary.factory.close()
    with pytest.raises(NamespaceClosedError):
        pair.begin()
    assert backlog_paths(pair) == []


def test_a_faulted_factory_is_not_paired(pair: Pair) -> None:
    pair.primary.factory.fault("trouble")
    with pytest.raises(FactoryFaultedError, match="trouble"):
        pair.begin()


def test_a_secondary_that_has_ended_fails_the_pairing(pair: Pair) -> None:
    pair.secondary.factory.close()
    with pytest.raises(NamespaceClosedError):
        pair.begin()
    pair.send("after")
    assert pair.primary.take() == ["after"]


@pytest.mark.parametrize("options", [None, "options", 10])
def test_what_are_no_options_is_refused(local: Pair, options: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="options"):
        local.primary.factory.pair_namespace(options)
    assert_nothing_is_half_made(local)


# -- names of backlog queues -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 10, 12])
def test_backlog_queues_are_named_after_the_primary_and_an_index(local: Pair, count: int) -> None:
    local.begin(backlog_queue_count=count)
    expected = {f"contoso/x-servicebus-transfer/{index}" for index in range(count)}
    assert set(backlog_paths(local)) == expected
    assert {one.path for one in local.pairing.backlog_queues()} == expected


@pytest.mark.parametrize(
    ("host", "label"),
    [("contoso.servicebus.example.com", "contoso"), ("contoso", "contoso")],
)
def test_the_name_of_the_primary_is_the_first_label_of_its_host_name(
    local: Pair, host: str, label: str
) -> None:
    text = f"Endpoint=twinbus://{host}:4617"
    with MessagingFactory.from_connection_string(text, clock=local.clock) as primary:
        primary.pair_namespace(local.options(backlog_queue_count=1))
        assert backlog_paths(local) == [f"{label}/x-servicebus-transfer/0"]


def test_two_primaries_on_one_secondary_have_queues_of_their_own(local: Pair) -> None:
    local.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    other = MessagingFactory(local.primary.connect(), name="fabrikam", clock=local.clock)
    other.pair_namespace(local.options(backlog_queue_count=1))
    assert backlog_paths(local) == [backlog(0), backlog(0, "fabrikam")]
    local.fail_over()
    assert local.secondary.peek(backlog(0, "fabrikam")) == []


def test_two_factories_of_one_primary_share_the_queues(local: Pair) -> None:
    local.begin(backlog_queue_count=2)
    made = len(creations(local.secondary))
    other = MessagingFactory(local.primary.connect(), name=PRIMARY, clock=local.clock)
    pairing = other.pair_namespace(local.options(backlog_queue_count=2))
    assert [one.path for one in pairing.backlog_queues()] == [backlog(0), backlog(1)]
    assert len(creations(local.secondary)) == made


def test_a_primary_without_a_name_is_refused(local: Pair) -> None:
    nameless = MessagingFactory(local.primary.connect(), clock=local.clock)
    with pytest.raises(InvalidArgumentError, match="name"):
        nameless.pair_namespace(local.options())
    assert backlog_paths(local) == []


# -- their properties ------------------------------------------------------------------------------


def test_a_backlog_queue_is_made_with_the_settings_of_the_specification(pair: Pair) -> None:
    pair.begin(backlog_queue_count=1)
    assert pair.secondary.root.get_queue(backlog(0)) == QueueDescription(
        path=backlog(0),
        max_size_in_megabytes=5120,
        max_delivery_count=2147483647,
        default_message_time_to_live=UNLIMITED,
        auto_delete_on_idle=UNLIMITED,
        lock_duration=timedelta(minutes=1),
        enable_dead_lettering_on_message_expiration=True,
        enable_batched_operations=True,
        user_metadata=PrimaryIdentity.of_factory(pair.primary.factory).to_metadata(),
    )


def test_existing_queues_are_listed_first_and_only_missing_ones_are_created(pair: Pair) -> None:
    pair.secondary.root.create_queue(backlog(1))
    pair.begin(backlog_queue_count=3)
    assert isinstance(pair.secondary.manager_tap.asked[0][1], ListEntities)
    assert [path for _, path in creations(pair.secondary)] == [backlog(0), backlog(2)]
    assert len(pair.pairing.backlog_queues()) == 3


def test_an_existing_queue_is_known_whatever_its_case(pair: Pair) -> None:
    pair.secondary.root.create_queue(backlog(0).upper())
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    assert creations(pair.secondary) == []
    pair.fail_over(ORDERS, "a")
    assert pair.diverted() == ["a"]


def test_a_queue_that_exists_with_other_settings_is_used_as_it_is(pair: Pair) -> None:
    existing = QueueDescription(
        path=backlog(0),
        max_size_in_megabytes=1,
        max_delivery_count=3,
        lock_duration=timedelta(seconds=7),
        user_metadata="made by hand",
    )
    pair.secondary.root.create_queue(existing)
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    metadata = pair.pairing.identity.to_metadata("made by hand")
    expected = replace(existing, user_metadata=metadata)
    assert pair.secondary.root.get_queue(backlog(0)) == expected
    pair.fail_over(ORDERS, "a")
    assert pair.diverted() == ["a"]


def test_extra_queues_are_left_alone_and_unused(pair: Pair) -> None:
    extra = QueueDescription(path=backlog(2), max_delivery_count=3)
    pair.secondary.root.create_queue(extra)
    pair.begin(backlog_queue_count=2, failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, *[str(number) for number in range(20)])
    assert pair.secondary.peek(backlog(2)) == []
    assert pair.secondary.root.get_queue(backlog(2)) == extra
    assert [one.path for one in pair.pairing.backlog_queues()] == [backlog(0), backlog(1)]


def test_a_queue_that_is_switched_off_does_not_keep_the_pairing_from_using_the_others(
    pair: Pair,
) -> None:
    off = QueueDescription(path=backlog(0), status=EntityStatus.SEND_DISABLED)
    pair.secondary.root.create_queue(off)
    pair.begin(backlog_queue_count=2, failover_interval=AT_ONCE)
    pair.fail_over(ORDERS, "a", "b")
    assert sorted(pair.diverted()) == ["a", "b"]


def test_a_topic_of_that_name_is_no_backlog_queue(pair: Pair) -> None:
    pair.secondary.root.create_topic(backlog(0))
    pair.begin(backlog_queue_count=2, failover_interval=AT_ONCE)
    texts = [str(number) for number in range(10)]
    pair.fail_over(ORDERS, *texts)
    assert sorted(pair.diverted()) == sorted(texts)
    assert [one.path for one in pair.pairing.backlog_queues()] == [backlog(1)]


def test_a_queue_that_requires_sessions_takes_no_diverted_messages(local: Pair) -> None:
    local.secondary.root.create_queue(QueueDescription(path=backlog(0), requires_session=True))
    options = local.options(backlog_queue_count=2)
    pairing = local.primary.factory.pair_namespace(options)
    assert [one.path for one in pairing.backlog_queues()] == [backlog(1)]
    assert options.backlog_queue_count == 1


# -- making them -----------------------------------------------------------------------------------


def test_the_creation_of_a_queue_is_tried_three_times_30_seconds_apart(local: Pair) -> None:
    began = local.clock.now()
    refuse_to_make(local.secondary.manager_tap, REFUSED, 1)
    local.begin(backlog_queue_count=2)
    tried = [at - began for at, path in creations(local.secondary) if path == backlog(1)]
    assert tried == [timedelta(seconds=seconds) for seconds in (0, 30, 60)]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_queue_that_is_made_at_a_later_try_is_used(local: Pair, failures: int) -> None:
    began = local.clock.now()
    refuse_to_make(local.secondary.manager_tap, REFUSED, 0, times=failures)
    local.begin(backlog_queue_count=1)
    assert backlog_paths(local) == [backlog(0)]
    assert local.clock.now() - began == failures * timedelta(seconds=30)


def test_queues_that_can_be_made_are_made_while_others_fail(local: Pair) -> None:
    refuse_to_make(local.secondary.manager_tap, REFUSED, 0, 2)
    local.begin(backlog_queue_count=4)
    assert backlog_paths(local) == [backlog(1), backlog(3)]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_authorization_error_ends_the_pairing_at_once(local: Pair, index: int) -> None:
    began = local.clock.now()
    refuse_to_make(local.secondary.manager_tap, UnauthorizedError("no Manage"), index)
    with pytest.raises(UnauthorizedError):
        local.begin(backlog_queue_count=3)
    assert local.clock.now() == began
    assert creations(local.secondary)[-1][1] == backlog(index)


def test_an_authorization_error_at_a_later_try_ends_the_pairing_too(local: Pair) -> None:
    errors = iter([REFUSED, UnauthorizedError("the key was taken away")])
    tap = local.secondary.manager_tap
    tap.refusal = lambda command: next(errors) if isinstance(command, CreateEntity) else None
    began = local.clock.now()
    with pytest.raises(UnauthorizedError, match="taken away"):
        local.begin(backlog_queue_count=1)
    assert local.clock.now() - began == timedelta(seconds=30)


def test_if_some_could_not_be_made_the_pairing_goes_on_with_those_available(pair: Pair) -> None:
    refuse_to_make(pair.secondary.manager_tap, REFUSED, 1)
    pair.begin(backlog_queue_count=3, failover_interval=AT_ONCE)
    assert [one.path for one in pair.pairing.backlog_queues()] == [backlog(0), backlog(2)]
    texts = [str(number) for number in range(12)]
    pair.fail_over(ORDERS, *texts)
    assert sorted(pair.diverted()) == sorted(texts)


@pytest.mark.parametrize("lacking", [0, 1, 3])
def test_backlog_queue_count_tells_how_many_there_are(local: Pair, lacking: int) -> None:
    refuse_to_make(local.secondary.manager_tap, REFUSED, *range(lacking))
    options = local.options(backlog_queue_count=4)
    local.primary.factory.pair_namespace(options)
    assert options.backlog_queue_count == 4 - lacking
    assert options.backlog_queue_count >= 1


def test_with_no_queue_at_all_the_pairing_fails(pair: Pair) -> None:
    refuse_to_make(pair.secondary.manager_tap, REFUSED, 0, 1)
    with pytest.raises(MessagingError, match="no queues today"):
        pair.begin(backlog_queue_count=2)
    assert_nothing_is_half_made(pair)


def test_a_queue_that_another_process_makes_meanwhile_is_used(local: Pair) -> None:
    def make_first(command: Command[Any]) -> MessagingError | None:
        if not isinstance(command, CreateEntity):
            return None
        local.secondary.root.create_queue(backlog(0))
        return EntityAlreadyExistsError("there is one already")

    local.secondary.manager_tap.refusal = make_first
    local.begin(backlog_queue_count=1)
    assert local.in_rotation() == [True]


def test_pairing_leaves_nothing_in_the_queues(pair: Pair) -> None:
    pair.begin(backlog_queue_count=2)
    assert pair.held() == [[], []]
    for index in (0, 1):
        found = pair.secondary.root.get_runtime_properties(backlog(index))
        assert (found.active_message_count, found.size_in_bytes) == (0, 0)


def test_messages_of_an_earlier_pairing_stay_where_they_are(pair: Pair) -> None:
    pair.secondary.root.create_queue(backlog(0))
    with MessagingFactory(pair.secondary.connect(), clock=pair.clock) as earlier:
        earlier.create_message_sender(backlog(0)).send(BrokeredMessage(b"from before"))
    pair.begin(backlog_queue_count=1)
    assert pair.diverted() == ["from before"]


def test_a_freshly_paired_entity_is_healthy(pair: Pair) -> None:
    pair.begin()
    assert pair.state(ORDERS) is HealthState.HEALTHY
    pair.sender(INVOICES).send(message())
    assert pair.pairing.status() == []
