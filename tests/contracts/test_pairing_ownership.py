"""Whose backlog a backlog queue is: that of one primary, and of no other."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.pairing_words import ORDERS, PRIMARY, Pair, backlog
from twinbus import (
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
    UnauthorizedError,
)
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.namespace.server import ServerNamespace
from twinbus.pairing.backlog_queues import describe_backlog_queue, find_backlog_queues
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import CreateEntity, Peek

EU = PrimaryIdentity(PRIMARY, "contoso.eu.example:4617")


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


def test_two_namespaces_of_one_name_are_distinguished_while_both_are_down(pair: Pair) -> None:
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
        MessagingFactory.from_connection_string(f"Endpoint=twinbus://{primary}") as factory,
        MessagingFactory.from_connection_string(f"Endpoint=twinbus://{secondary}") as other,
        NamespaceManager.from_connection_string(f"Endpoint=twinbus://{secondary}") as manager,
        pytest.raises(InvalidArgumentError, match=r"itself(, \w+)?\. Give"),
    ):
        factory.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, other))


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
