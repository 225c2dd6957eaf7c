"""A cluster of three real nodes: what happens when some of them die or hang.

The cluster takes half a minute to start, so one test plays the whole story, step by step.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rabbitmq.brokers import require_rabbitmq, until
from tests.rabbitmq.test_pairing import Maker, Site, embedded, maker
from twinbus import BrokeredMessage
from twinbus.connection import ConnectionString
from twinbus.entities import QueueDescription
from twinbus.errors import MessagingError, OperationTimeoutError
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import CreateEntity, GetRuntimeProperties, Send
from twinbus.testing.rabbitmq import RabbitBroker

__all__ = ["maker"]  # a fixture
PING = BrokeredMessage(content_type=PING_CONTENT_TYPE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RabbitBroker]:
    require_rabbitmq()
    with RabbitBroker(3) as cluster:
        with RabbitNamespace(ConnectionString.parse(cluster.connection_string())) as namespace:
            namespace.ask(CreateEntity(QueueDescription(path="orders")), 60)
        yield cluster


@pytest.mark.timeout(250)
def test_a_cluster_that_loses_nodes_loses_no_message(
    cluster: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    site = maker.site(cluster.connection_string(name="shop"), embedded(tmp_path / "backup"))
    sent = _send_while_one_node_is_down(site, cluster)
    sent += _send_without_a_majority(site, cluster)
    site.bring_home()
    came = site.take()
    assert set(sent) == {message.body.decode() for message in came}  # nothing is lost
    origins: dict[str, set[object]] = {}
    for message in came:
        name = message.application_properties["x-twinbus-origin"]
        origins.setdefault(message.body.decode(), set()).add(name)
    doubled = Counter(message.body.decode() for message in came) - Counter(sent)
    assert all(len(origins[body]) == 1 for body in doubled)  # and repeats can be recognised


def _send(site: Site, *bodies: str) -> list[str]:
    site.send(*bodies)
    return list(bodies)


def _send_while_one_node_is_down(site: Site, cluster: RabbitBroker) -> list[str]:
    """Kill one node of three: a majority is left, and sends go on at the primary."""
    sent = _send(site, "all up")
    cluster.nodes[2].kill()
    sent += _send(site, *(f"one down {n}" for n in range(20)))
    assert not site.is_diverting()
    return sent


def _send_without_a_majority(site: Site, cluster: RabbitBroker) -> list[str]:
    """Kill the second node: no send is confirmed, no ping succeeds, and sends are diverted."""
    cluster.nodes[1].kill()
    sent = _send(site, *(f"no majority {n}" for n in range(5)))
    assert site.is_diverting()
    only = f"Endpoint=amqp://127.0.0.1:{cluster.nodes[0].port};Name=shop"
    with RabbitNamespace(ConnectionString.parse(only)) as namespace:
        until(lambda: _exists_but_does_not_answer(namespace))
    assert site.is_diverting()
    for node in cluster.nodes[1:]:
        node.launch()
    for node in cluster.nodes[1:]:
        node.wait()
    until(lambda: not site.is_diverting(), 90)
    return sent + _send(site, "all up again")


def _exists_but_does_not_answer(namespace: RabbitNamespace) -> bool:
    """Whether a ping gets no answer, although a passive declare finds the queue."""
    try:
        namespace.ask(GetRuntimeProperties("orders"), 3)
        namespace.ask(Send("orders", [PING]), 2)
    except OperationTimeoutError:
        return True
    except MessagingError:
        return False
    return False


@pytest.mark.timeout(300)
def test_a_node_that_hangs_is_left_for_another_one(
    cluster: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    site = maker.site(cluster.connection_string(name="shop"), embedded(tmp_path / "backup"))
    cluster.nodes[0].pause()
    try:
        site.send(*(f"paused {n}" for n in range(5)))
        until(lambda: not site.is_diverting(), 160)

        def goes_by_another_node() -> bool:
            """Send; while a new leader is elected, RabbitMQ may refuse a message once more."""
            site.send("by another node")
            return not site.is_diverting()

        until(goes_by_another_node)
        site.bring_home()
        bodies = {message.body.decode() for message in site.take()}
        assert bodies == {*(f"paused {n}" for n in range(5)), "by another node"}
    finally:
        cluster.nodes[0].resume()
