"""A cluster of three real nodes: what happens when some of them die or hang.

The cluster takes half a minute to start, so one test plays the whole story, step by step. The
cluster says which node to kill: the leader of the queue, the host of the client, or neither.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rabbitmq.brokers import require_rabbitmq, watched_broker
from tests.rabbitmq.test_pairing import Maker, Site, embedded, maker
from tests.waiting import until
from twinbus import BrokeredMessage
from twinbus.connection import ConnectionString
from twinbus.entities import QueueDescription
from twinbus.errors import MessagingError, OperationTimeoutError
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.protocol.commands import CreateEntity, GetRuntimeProperties, Send
from twinbus.testing.rabbitmq import LOOPBACK, Node, RabbitBroker

__all__ = ["maker"]  # a fixture
PING = BrokeredMessage(content_type=PING_CONTENT_TYPE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RabbitBroker]:
    require_rabbitmq()
    with watched_broker(3) as cluster:
        with RabbitNamespace(ConnectionString.parse(cluster.connection_string())) as namespace:
            namespace.ask(CreateEntity(QueueDescription(path="orders")), 60)
        yield cluster


@pytest.mark.timeout(500)
def test_a_cluster_that_loses_nodes_loses_no_message(
    cluster: RabbitBroker, maker: Maker, tmp_path: Path
) -> None:
    leader = _leader_of_orders(cluster.nodes[0], cluster)
    others = [node for node in cluster.nodes if node is not leader]
    site = maker.site(_where(*others, leader), embedded(tmp_path / "backup"))
    sent = _send_while_a_follower_is_down(site, cluster)
    sent += _send_while_the_leader_is_down(site, cluster)
    sent += _send_after_the_host_of_the_client_was_killed(site, cluster)
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


def _where(*nodes: Node) -> str:
    """Return the connection string of a client that connects to the first of these nodes."""
    hosts = ",".join(f"{LOOPBACK}:{node.port}" for node in nodes)
    return f"Endpoint=amqp://{hosts}/;Name=shop"


def _leader_of_orders(asked: Node, cluster: RabbitBroker) -> Node:
    """Ask a node which one leads the queue."""
    for line in asked.control("--quiet", "list_queues", "name", "leader").splitlines():
        name, _, leader = line.partition("\t")
        if name == "orders":
            return next(node for node in cluster.nodes if node.name == leader)
    raise AssertionError("the queue has no leader")


def _host_of_the_sender(asked: Node, cluster: RabbitBroker) -> Node:
    """Ask a node to which one the client's connection for sends goes."""
    columns = ("port", "client_properties")
    for line in asked.control("--quiet", "list_connections", *columns).splitlines():
        port, _, properties = line.partition("\t")
        if "twinbus sends" in properties:
            return next(node for node in cluster.nodes if str(node.port) == port)
    raise AssertionError("the client has no connection for sends")


def _send_while_a_follower_is_down(site: Site, cluster: RabbitBroker) -> list[str]:
    """Kill a node that neither leads nor has the client: sends go on at the primary."""
    sent = _send(site, "all up")
    leader = _leader_of_orders(cluster.nodes[0], cluster)
    host = _host_of_the_sender(cluster.nodes[0], cluster)
    assert host is not leader
    (follower,) = (node for node in cluster.nodes if node not in (leader, host))
    follower.kill()
    sent += _send(site, *(f"follower down {n}" for n in range(20)))
    assert not site.is_diverting()
    follower.start()
    return sent


def _send_while_the_leader_is_down(site: Site, cluster: RabbitBroker) -> list[str]:
    """Kill the leader: another node is elected, and sends are at the primary again."""
    leader = _leader_of_orders(cluster.nodes[0], cluster)
    leader.kill()
    sent = _send(site, *(f"leader down {n}" for n in range(20)))
    sent += _send_until_at_the_primary(site, "new leader")
    left = next(node for node in cluster.nodes if node is not leader)
    assert _leader_of_orders(left, cluster) is not leader
    leader.start()
    return sent


def _send_after_the_host_of_the_client_was_killed(site: Site, cluster: RabbitBroker) -> list[str]:
    """Kill the node that the client is connected to: it goes to another one."""
    host = _host_of_the_sender(cluster.nodes[0], cluster)
    host.kill()
    sent = _send(site, *(f"host down {n}" for n in range(20)))
    sent += _send_until_at_the_primary(site, "new host")
    left = next(node for node in cluster.nodes if node is not host)
    assert _host_of_the_sender(left, cluster) is not host
    host.start()
    return sent


def _send_until_at_the_primary(site: Site, body: str) -> list[str]:
    """Send until a message is not diverted; a first failure diverts at once here."""
    sent: list[str] = []

    def is_at_the_primary() -> bool:
        until(lambda: not site.is_diverting(), patience_s=90)
        sent.extend(_send(site, f"{body} {len(sent)}"))
        return not site.is_diverting()

    until(is_at_the_primary, patience_s=90)
    return sent


def _send_without_a_majority(site: Site, cluster: RabbitBroker) -> list[str]:
    """Kill two nodes: no send is confirmed, no ping succeeds, and sends are diverted."""
    for node in cluster.nodes[1:]:
        node.kill()
    sent = _send(site, *(f"no majority {n}" for n in range(5)))
    assert site.is_diverting()
    with RabbitNamespace(ConnectionString.parse(_where(cluster.nodes[0]))) as namespace:
        until(lambda: _exists_but_does_not_answer(namespace))
    assert site.is_diverting()
    for node in cluster.nodes[1:]:
        node.launch()
    for node in cluster.nodes[1:]:
        node.wait()
    until(lambda: not site.is_diverting(), patience_s=90)
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
        until(lambda: not site.is_diverting(), patience_s=160)

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
