"""Pairing two namespaces: what exists when it returns, and what becomes of a failed attempt."""

import asyncio
import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_trouble import assert_nothing_is_half_made, backlog_paths
from tests.contracts.pairing_words import (
    AT_ONCE,
    ORDERS,
    PRIMARY,
    SECONDARY,
    End,
    Pair,
    SyphonStandIn,
    backlog,
    message,
    opened,
)
from twinbus import (
    Claim,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
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
    FactoryFaultedError,
    InvalidArgumentError,
    InvalidOperationError,
    NamespaceClosedError,
    QuotaExceededError,
)
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, ListEntities, Send

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
            assert [queue.path for queue in pairing.backlog_queues()] == [backlog(0), backlog(1)]

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


def test_a_secondary_factory_is_of_one_pairing(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    other = MessagingFactory(local.primary.connect(), name=PRIMARY, clock=local.clock)
    with pytest.raises(InvalidOperationError, match="factory of backup is already paired"):
        other.pair_namespace(local.options())
    other.close()
    local.fail_over(ORDERS, "a")
    assert local.diverted() == ["a"]


def test_a_secondary_factory_is_not_paired_itself(local: Pair) -> None:
    local.begin()
    options = SendAvailabilityPairedNamespaceOptions(local.primary.manager, local.primary.factory)
    with pytest.raises(InvalidOperationError, match="factory of backup is already paired"):
        local.secondary.factory.pair_namespace(options)


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
        assert (
            len([outcome for outcome in outcomes if isinstance(outcome, SendAvailabilityPairing)])
            == 1
        )
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


def keyed(servers: Pair, access_key: SharedAccessKey | None = None, **changes: Any) -> End:
    """Return the secondary as one with another key sees it."""
    where = servers.secondary.where
    assert where is not None
    if access_key is not None:
        changes |= {"key_name": access_key.name, "key": access_key.primary}
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


def test_full_backlog_queues_keep_no_factory_from_being_paired(pair: Pair) -> None:
    pair.secondary.tap.refuse(QuotaExceededError("full"), Send)
    pair.begin(failover_interval=AT_ONCE)
    pair.secondary.tap.relent()
    pair.fail_over(ORDERS, "a")
    assert pair.diverted() == ["a"]


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


def test_an_error_of_the_set_up_says_which_namespace_it_is_about(pair: Pair) -> None:
    pair.secondary.manager_tap.refuse(UnauthorizedError("no claim"), ListEntities)
    with pytest.raises(UnauthorizedError, match=r"the secondary namespace backup.*no claim"):
        pair.begin()
