"""Whose backlog a queue is: what it says of its primary, and who may use it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus import (
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.connection import ConnectionString
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity

EU = PrimaryIdentity("contoso", "contoso.eu.example:4617")
US = PrimaryIdentity("contoso", "contoso.us.example:4617")


def named(text: str) -> PrimaryIdentity:
    return PrimaryIdentity.of_connection(ConnectionString.parse(text))


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["twinbus://10.0.0.1:4617", "twinbus://[::1]:4617"])
def test_an_ip_address_needs_a_name(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="Name=contoso"):
        named(f"Endpoint={endpoint}")
    assert named(f"Endpoint={endpoint};Name=contoso").name == "contoso"


def test_two_ip_addresses_do_not_share_a_first_label() -> None:
    names = {
        ConnectionString.parse(f"Endpoint=twinbus://10.0.0.{last}:4617").name for last in (1, 2)
    }
    assert names == {""}


@pytest.mark.parametrize(("directory", "usable"), [("my orders", "my-orders"), ("-", "contoso")])
def test_a_directory_that_cannot_begin_a_path_is_refused_with_a_name_to_type(
    directory: str, usable: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Name={usable}"):
        named(f"Endpoint=embedded:///var/lib/{directory}")


# -- what a queue says -----------------------------------------------------------------------------


@replayed
@given(
    st.builds(
        PrimaryIdentity,
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True),
        st.text(max_size=60),
        st.from_regex(r"[0-9a-f]{0,32}", fullmatch=True),
    )
)
def test_a_queue_names_its_primary_in_full(primary: PrimaryIdentity) -> None:
    queue = describe_backlog_queue(primary, 0)
    assert PrimaryIdentity.of_queue(queue) == primary
    primary.check_owns(queue)


def test_a_directory_too_long_for_the_metadata_is_left_to_the_namespace_id() -> None:
    primary = PrimaryIdentity("contoso", "/" + "d" * 2000, "5f0c")
    owner = PrimaryIdentity.of_queue(describe_backlog_queue(primary, 0))
    assert owner == PrimaryIdentity("contoso", "", "5f0c")


@pytest.mark.parametrize(
    "text", [None, "", "of team orders", "twinbus-primary ", "twinbus-primary Name=-"]
)
def test_a_queue_that_names_no_primary_is_anybodys(text: str | None) -> None:
    queue = QueueDescription(path="contoso/x-servicebus-transfer/0", user_metadata=text)
    assert PrimaryIdentity.of_queue(queue) is None
    EU.check_owns(queue)


# -- who is who ------------------------------------------------------------------------------------


def test_a_queue_of_another_primary_is_refused_with_both_names_and_a_way_out() -> None:
    with pytest.raises(InvalidOperationError) as caught:
        US.check_owns(describe_backlog_queue(EU, 3))
    text = str(caught.value)
    for part in (
        "contoso/x-servicebus-transfer/3",
        EU.address,
        US.address,
        "Name=",
        "user_metadata",
    ):
        assert part in text


def test_a_primary_with_an_id_is_to_be_named_by_it() -> None:
    queue = describe_backlog_queue(PrimaryIdentity("contoso", EU.address, "5f0c"), 0)
    with pytest.raises(InvalidOperationError, match="NamespaceId=5f0c"):
        US.check_owns(queue)


@pytest.mark.parametrize(
    ("endpoint", "is_same"),
    [
        ("r1,r2/shop", True),
        ("r1,r2,r3/shop", True),  # it grew
        ("r2:5672/shop", True),
        ("r3,r4/shop", False),
        ("R1,R2/shop", True),
        ("r1,r2/stock", False),  # another virtual host
        ("r1,r2/Shop", False),  # RabbitMQ distinguishes their case
        ("r1:5673,r2:5673/shop", False),
    ],
)
def test_a_rabbitmq_cluster_is_recognised_by_one_common_host(endpoint: str, is_same: bool) -> None:
    first = named("Endpoint=amqp://r1,r2/shop;Name=contoso")
    queue = describe_backlog_queue(first, 0)
    assert named(f"Endpoint=amqp://{endpoint};Name=contoso").owns(queue) is is_same


def test_the_refusal_of_a_cluster_without_a_common_host_says_how_to_be_recognised() -> None:
    queue = describe_backlog_queue(named("Endpoint=amqp://r1,r2/shop;Name=contoso"), 0)
    with pytest.raises(InvalidOperationError) as caught:
        named("Endpoint=amqp://r3,r4/shop;Name=contoso").check_owns(queue)
    assert "name one of the hosts of r1:5672,r2:5672/shop" in caught.value.text
    assert f"{queue.path}/$Description" in caught.value.text


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (("c", "a:1", "1"), ("c", "a:1", "1"), True),
        (("c", "a:1", "1"), ("c", "b:1", "1"), True),  # it moved
        (("c", "a:1", "1"), ("c", "a:1", "2"), False),  # another server at its address
        (("c", "a:1", "1"), ("c", "a:1", ""), True),
        (("c", "a:1", "1"), ("c", "b:1", ""), False),
        (("c", "a:1", ""), ("c", "A:1", ""), True),
        (("c", "a:1", ""), ("c", "a:2", ""), False),
        (("c", "", ""), ("c", "a:1", "1"), True),
        (("c", "/data/a,b", ""), ("c", "/data/b", ""), False),
        (("c", "/eu/shop", ""), ("c", "/EU/shop", ""), False),  # two directories
    ],
)
def test_the_namespace_id_decides_and_else_the_address(
    first: tuple[str, str, str], second: tuple[str, str, str], same: bool
) -> None:
    assert PrimaryIdentity(*first).is_same_as(PrimaryIdentity(*second)) is same
    assert PrimaryIdentity(*second).is_same_as(PrimaryIdentity(*first)) is same


def test_a_connection_string_carries_the_namespace_id() -> None:
    text = "Endpoint=twinbus://10.0.0.1:4617;Name=contoso;NamespaceId=5f0c"
    connection = ConnectionString.parse(text)
    assert connection.namespace_id == "5f0c"
    assert connection.to_text() == text
    with pytest.raises(InvalidArgumentError, match="NamespaceId"):
        ConnectionString.parse("Endpoint=twinbus://a;NamespaceId=a b")


def test_a_cluster_with_another_list_of_hosts_is_still_itself() -> None:
    pytest.importorskip("pika")
    first, second = "Endpoint=amqp://r1,r2/shop;Name=shop", "Endpoint=amqp://r2,r3/shop;Name=backup"
    with (
        MessagingFactory.from_connection_string(first) as factory,
        MessagingFactory.from_connection_string(second) as secondary,
        NamespaceManager.from_connection_string(second) as manager,
        pytest.raises(InvalidArgumentError, match="itself"),
    ):
        factory.pair_namespace(SendAvailabilityPairedNamespaceOptions(manager, secondary))
