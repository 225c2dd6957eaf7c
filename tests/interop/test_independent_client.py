"""What SDKs for .NET, Java and Go do on the wire, done by an independent client.

Those SDKs are not run here. Apache Qpid Proton plays their part: it implements AMQP by itself, and
Java's SDK is built on its sibling. SASL is written by hand, because Proton does not know .NET's
mechanism. Nothing of Twinbus is on this side but the connection string.
"""

import base64
import hashlib
import hmac
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any, Self
from urllib.parse import quote_plus

import pytest

from tests.interop.bus import Bus
from twinbus import BrokeredMessage, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.entities import TopicDescription

if "TWINBUS_NEEDS_PROTON" in os.environ:
    proton: Any = import_module("proton")
else:
    proton = pytest.importorskip(
        "proton", reason="python-qpid-proton is not installed; `make setup` needs a C compiler"
    )

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 20.0
SASL_HEADER, AMQP_HEADER = b"AMQP\x03\x01\x00\x00", b"AMQP\x00\x01\x00\x00"
HEARTBEAT = b"\x00\x00\x00\x08\x02\x00\x00\x00"
Link = Any  # of Proton, which has no types
_names = count(1)


def sasl_init(mechanism: str) -> bytes:
    """Return a frame with a sasl-init, byte for byte: a list of one symbol."""
    symbol = b"\xa3" + bytes([len(mechanism)]) + mechanism.encode()
    body = b"\x00\x53\x41\xc0" + bytes([len(symbol) + 1]) + b"\x01" + symbol
    return (8 + len(body)).to_bytes(4) + b"\x02\x01\x00\x00" + body


class ProtonClient:
    """A connection of Proton's engine over a socket, with SASL by hand."""

    def __init__(self, bus: Bus, mechanism: str = "MSSBCBS", idle_s: float = 0.0) -> None:
        self._native = ConnectionString.parse(bus.server.connection)
        self._socket = socket.create_connection(("localhost", bus.server.port), PATIENCE_S)
        self.mechanisms = self._authenticate(mechanism)
        self.connection = proton.Connection()
        self.connection.container = "independent"
        self.connection.hostname = "localhost"
        self.transport = proton.Transport()
        self.transport.max_frame_size = 65536
        if idle_s:
            self.transport.idle_timeout = 2 * idle_s  # Proton announces half of it
        self.transport.bind(self.connection)
        self.heartbeats = 0
        self.connection.open()
        self.session = self.new_session()
        self._nodes: dict[str, tuple[Link, Link]] = {}

    def _authenticate(self, mechanism: str) -> bytes:
        self._socket.sendall(SASL_HEADER + sasl_init(mechanism))
        assert self._exactly(8) == SASL_HEADER
        offered, outcome = self._frame(), self._frame()
        assert outcome.endswith(b"\x50\x00")  # the code `ok`
        return offered

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            assert piece, "the server hung up"
            data += piece
        return data

    def _frame(self) -> bytes:
        size = int.from_bytes(self._exactly(4))
        return self._exactly(size - 4)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    # -- bytes ---------------------------------------------------------------------------------

    def write(self) -> None:
        """Send what Proton has to say."""
        while (size := self.transport.pending()) > 0:
            data = bytes(self.transport.peek(size))
            self._socket.sendall(data)
            self.transport.pop(len(data))

    def read(self) -> None:
        """Wait for bytes of the server, and hand them to Proton."""
        data = self._socket.recv(65536)
        assert data, "the server hung up"
        self.heartbeats += data.count(HEARTBEAT)
        while data:
            room = self.transport.capacity()
            assert room > 0, str(self.transport.condition)
            self.transport.push(data[:room])
            data = data[room:]
        self.transport.tick(time.monotonic())

    def until(self, is_so: Callable[[], bool]) -> None:
        """Exchange bytes until something is so."""
        self.write()
        while not is_so():
            self.read()
            self.write()

    # -- links ---------------------------------------------------------------------------------

    def new_session(self) -> Any:
        session = self.connection.session()
        session.open()
        return session

    def sender(self, address: str, session: Any = None) -> Link:
        link = (session or self.session).sender(f"sender-{next(_names)}")
        link.target.address = address
        return self.open(link)

    def receiver(self, address: str, session: Any = None, reply_to: str = "") -> Link:
        """Attach a receiver in the mode peek-lock."""
        link = (session or self.session).receiver(f"receiver-{next(_names)}")
        link.source.address = address
        link.target.address = reply_to
        link.snd_settle_mode = proton.Link.SND_UNSETTLED
        link.rcv_settle_mode = proton.Link.RCV_SECOND
        return self.open(link)

    def open(self, link: Link) -> Link:
        link.open()
        self.until(lambda: bool(link.state & proton.Endpoint.REMOTE_ACTIVE))
        return link

    def refused(self, link: Link) -> str:
        """Wait until the server ends a link; return the condition."""
        self.until(lambda: bool(link.state & proton.Endpoint.REMOTE_CLOSED))
        return str(link.remote_condition.name)

    def send(self, link: Link, message: Any) -> Any:
        """Send a message, and wait until the server has settled it; return the delivery."""
        self.until(lambda: link.credit > 0)
        delivery = link.delivery(uuid.uuid4().hex)
        link.send(message.encode())
        link.advance()
        self.until(lambda: delivery.settled)
        return delivery

    def take(self, link: Link) -> tuple[Any, Any]:
        """Wait for a delivery; return it with its message."""
        self.until(lambda: link.current is not None and not link.current.partial)
        delivery = link.current
        message = proton.Message()
        message.decode(link.recv(delivery.pending))
        link.advance()
        return delivery, message

    # -- nodes ---------------------------------------------------------------------------------

    def token(self, path: str) -> str:
        """Sign a token as Microsoft documents it."""
        resource = quote_plus(f"sb://localhost/{path}")
        expires = str(int(time.time()) + 600)
        digest = hmac.new(
            self._native.key.encode(), f"{resource}\n{expires}".encode(), hashlib.sha256
        ).digest()
        signature = quote_plus(base64.b64encode(digest))
        name = self._native.key_name
        return f"SharedAccessSignature sr={resource}&sig={signature}&se={expires}&skn={name}"

    def show_token(self, path: str = "", message_id: Any = "1") -> Any:
        """Show a token to $cbs; return the answer."""
        properties = {
            "operation": "put-token",
            "type": "servicebus.windows.net:sastoken",
            "name": f"sb://localhost/{path}",
        }
        return self.ask("$cbs", properties, self.token(path), message_id)

    def ask(self, node: str, properties: dict[str, Any], body: Any, message_id: Any) -> Any:
        """Ask a node something; return the answer."""
        if node not in self._nodes:
            reply_to = f"reply-{next(_names)}"
            self._nodes[node] = self.sender(node), self.receiver(node, reply_to=reply_to)
        sender, receiver = self._nodes[node]
        receiver.flow(1)
        message = proton.Message(
            body=body, id=message_id, reply_to=receiver.target.address, properties=properties
        )
        assert self.send(sender, message).remote_state == proton.Delivery.ACCEPTED
        return self.take(receiver)[1]


@pytest.fixture
def client(bus: Bus) -> Iterator[ProtonClient]:
    """A client that has shown a token for the namespace."""
    with ProtonClient(bus) as made:
        assert made.show_token().properties["status-code"] == 202
        yield made


def text(body: str = "x", **properties: Any) -> Any:
    """Return a message with a body of data."""
    return proton.Message(body=body.encode(), inferred=True, **properties)


# -- before anything else --------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["MSSBCBS", "ANONYMOUS", "EXTERNAL"])
def test_every_mechanism_of_sdks_opens_a_connection(bus: Bus, mechanism: str) -> None:
    with ProtonClient(bus, mechanism) as client:
        assert mechanism.encode() in client.mechanisms
        assert client.show_token().properties["status-code"] == 202
        assert client.transport.remote_idle_timeout >= 120  # SDKs send every 30 s at best


@pytest.mark.parametrize(
    "message_id",
    ["text", proton.ulong(7), uuid.UUID(int=5), b"bytes"],
    ids=["string", "ulong", "uuid", "binary"],
)
def test_the_answer_to_a_token_has_its_id_with_the_same_type(bus: Bus, message_id: Any) -> None:
    with ProtonClient(bus) as client:
        answer = client.show_token(message_id=message_id)
        assert answer.properties["status-code"] == 202
        found = answer.correlation_id
        if isinstance(found, memoryview):  # how Proton reads binary
            found = bytes(found)
        assert found == message_id
        assert isinstance(found, bytes) == isinstance(message_id, bytes)


@pytest.mark.parametrize("idle_s", [1.0, 2.0])
def test_a_client_with_a_short_idle_time_out_gets_heartbeats(bus: Bus, idle_s: float) -> None:
    path = bus.queue()
    with ProtonClient(bus, idle_s=idle_s) as client:
        client.show_token()
        sender = client.sender(path)
        client.until(lambda: client.heartbeats >= 4)  # of which each comes after half the time
        assert client.transport.condition is None
        assert client.send(sender, text()).remote_state == proton.Delivery.ACCEPTED


# -- nodes -----------------------------------------------------------------------------------------


def test_pairs_of_management_links_in_one_session_get_their_own_answers(
    bus: Bus, client: ProtonClient
) -> None:
    path = bus.queue()
    bus.factory.create_message_sender(path).send(BrokeredMessage(b"x"))
    node = f"{path}/$management"
    pairs = [(client.sender(node), client.receiver(node, reply_to=f"r{n}")) for n in range(2)]
    body = {"from-sequence-number": 0, "message-count": proton.int32(1)}
    peek = {"operation": "com.microsoft:peek-message"}
    for _, receiver in pairs:
        receiver.flow(10)
    for number in (0, 1, 1, 0):
        sender, receiver = pairs[number]
        asked = proton.Message(
            body=body, id=proton.ulong(number), reply_to=f"r{number}", properties=peek
        )
        client.send(sender, asked)
        _, answer = client.take(receiver)
        assert (answer.correlation_id, answer.properties["statusCode"]) == (number, 200)
    assert [receiver.current for _, receiver in pairs] == [None, None]


# -- addresses -------------------------------------------------------------------------------------


def test_bare_addresses_in_any_case_reach_queues_topics_and_dead_letters(
    bus: Bus, client: ProtonClient
) -> None:
    queue, topic = bus.queue(), bus.name()
    bus.manager.create_topic(TopicDescription(path=topic))
    bus.manager.create_subscription(topic, "all")
    for target, source in (
        (queue, queue.upper()),
        (f"/{queue}", f"{queue}/"),
        (topic, f"{topic}/Subscriptions/all"),
        (topic.upper(), f"{topic}/subscriptions/ALL"),
    ):
        assert client.send(client.sender(target), text(target)).remote_state
        receiver = client.receiver(source)
        receiver.flow(1)
        delivery, message = client.take(receiver)
        assert message.body == target.encode()
        delivery.update(proton.Delivery.REJECTED)  # it becomes a dead letter
        client.until(lambda delivery=delivery: delivery.settled)  # type: ignore[misc]
        receiver.close()
    for source in (f"{queue}/$DeadLetterQueue", f"{topic}/Subscriptions/all/$deadletterqueue"):
        receiver = client.receiver(source)
        receiver.flow(1)
        assert client.take(receiver)[1].body


# -- credit ----------------------------------------------------------------------------------------


def test_a_drain_delivers_what_there_is_and_returns_the_rest(
    bus: Bus, client: ProtonClient
) -> None:
    path = bus.queue()
    receiver = client.receiver(path)
    receiver.drain(5)
    client.until(lambda: not receiver.draining())
    assert (receiver.credit, receiver.current) == (0, None)
    sender = client.sender(path)
    for _ in range(2):
        client.send(sender, text())
    receiver.drain(5)
    client.until(lambda: not receiver.draining() and receiver.queued == 2)
    assert receiver.credit == 2  # of Proton's: those it has received and not looked at
    for _ in range(2):
        client.take(receiver)
    assert receiver.credit == 0


def test_a_drain_of_credit_that_waits_is_answered_and_the_link_goes_on(
    bus: Bus, client: ProtonClient
) -> None:
    path = bus.queue()
    receiver = client.receiver(path)
    receiver.flow(3)
    sender = client.sender(path)  # the server has read the credit by then
    receiver.drain(0)
    client.until(lambda: not receiver.draining())
    assert receiver.credit == 0
    client.send(sender, text("later"))
    assert bus.active(path) == 1
    receiver.flow(1)
    assert client.take(receiver)[1].body == b"later"


# -- settlement ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ACCEPTED", "REJECTED", "RELEASED", "MODIFIED"])
def test_the_server_confirms_with_the_same_outcome(
    bus: Bus, client: ProtonClient, outcome: str
) -> None:
    path = bus.queue()
    client.send(client.sender(path), text())
    receiver = client.receiver(path)
    receiver.flow(1)
    delivery, _ = client.take(receiver)
    delivery.update(getattr(proton.Delivery, outcome))
    client.until(lambda: delivery.settled)
    assert delivery.remote_state == getattr(proton.Delivery, outcome)
    assert delivery.remote.condition is None
    delivery.settle()
    left = {"ACCEPTED": 0, "REJECTED": 0}.get(outcome, 1)
    assert bus.active(path) == left


# -- many links ------------------------------------------------------------------------------------


def test_many_links_on_one_connection_each_get_their_own_messages(
    bus: Bus, client: ProtonClient
) -> None:
    """As .NET, Java and Go do: one connection for all links, with one session or one each."""
    paths = [bus.queue() for _ in range(30)]
    shared = client.new_session()
    receivers = [client.receiver(path, shared) for path in paths]
    senders = [client.sender(path, client.new_session()) for path in paths]
    for receiver in receivers:
        receiver.flow(10)
    for number, sender in enumerate(senders):
        delivery = client.send(sender, text(f"for {number}"))
        assert delivery.remote_state == proton.Delivery.ACCEPTED
    for number, receiver in enumerate(receivers):
        delivery, message = client.take(receiver)
        assert message.body == f"for {number}".encode()
        delivery.update(proton.Delivery.ACCEPTED)
        client.until(lambda delivery=delivery: delivery.settled)  # type: ignore[misc]
    assert [bus.active(path) for path in paths] == [0] * len(paths)


def test_a_large_message_travels_in_frames_of_64_kb(bus: Bus, client: ProtonClient) -> None:
    path = bus.queue()
    body = bytes(range(256)) * 800
    sent = client.send(client.sender(path), proton.Message(body=body, inferred=True))
    assert sent.remote_state == proton.Delivery.ACCEPTED
    receiver = client.receiver(path)
    receiver.flow(1)
    assert client.take(receiver)[1].body == body


# -- sessions and transactions ---------------------------------------------------------------------


def test_a_session_is_granted_by_name_and_the_next_by_null(bus: Bus, client: ProtonClient) -> None:
    path = bus.name()
    bus.manager.create_queue(QueueDescription(path=path, requires_session=True))
    client.send(client.sender(path), text(group_id="blue"))
    for wanted in ("blue", None):
        link = client.session.receiver(f"receiver-{next(_names)}")
        link.source.address = path
        link.source.filter.put_dict({proton.symbol("com.microsoft:session-filter"): wanted})
        link.snd_settle_mode = proton.Link.SND_UNSETTLED
        link.rcv_settle_mode = proton.Link.RCV_SECOND
        client.open(link)
        link.remote_source.filter.rewind()
        link.remote_source.filter.next()
        granted = link.remote_source.filter.get_object()
        assert granted == {proton.symbol("com.microsoft:session-filter"): "blue"}
        assert proton.symbol("com.microsoft:locked-until-utc") in link.remote_properties
        link.flow(1)
        assert client.take(link)[1].group_id == "blue"
        link.close()
        client.until(lambda link=link: bool(link.state & proton.Endpoint.REMOTE_CLOSED))  # type: ignore[misc]


def test_a_coordinator_for_transactions_is_refused(client: ProtonClient) -> None:
    link = client.session.sender("transactions")
    link.target.type = proton.Terminus.COORDINATOR
    link.open()
    assert client.refused(link) == "amqp:not-implemented"
