"""One client cannot harm another (G11): what a bad peer does at the Service Bus door."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import Attached, Delivery, Event, LinkDetached
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.options import ConnectionOptions, LinkOptions
from twinbus.amqp.performatives import Properties, Source, Target
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import SaslClient, SaslCredentials
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.session import AmqpSession
from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import SystemClock
from twinbus.connection import sign_token
from twinbus.entities import QueueDescription
from twinbus.errors import MessageSizeExceededError
from twinbus.ledger import NO_LEDGER
from twinbus.limits import MAX_UNREAD_BYTES, SERVICE_BUS_FETCH_BYTES
from twinbus.message import BrokeredMessage, to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import CreateEntity, PutKey, Receive, Send
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.server.amqp import ServiceBusConnection
from twinbus.server.door import Door

pytestmark = pytest.mark.timeout(60)
QUEUE, OTHER = "orders", "payments"
SECRET = "a secret of the tests only"  # noqa: S105
LARGE = 200_000
Kind = TypeVar("Kind", bound=Event)


@dataclass
class ServiceBusSite:
    """A server in this process with two queues, and a key of one of them."""

    namespace: EmbeddedNamespace
    door: Door

    @property
    def connection(self) -> ServiceBusConnection:
        """The server's end of the only connection."""
        [found] = [c for c in self.door._connections if isinstance(c, ServiceBusConnection)]
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ServiceBusSite]:
    with ExitStack() as stack:
        settings = EngineSettings(directory=tmp_path, ledger=NO_LEDGER)
        namespace = stack.enter_context(EmbeddedNamespace(settings))
        for path in (QUEUE, OTHER):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
        key = SharedAccessKey(
            name="app",
            claims=(Claim.SEND, Claim.LISTEN),
            primary=SECRET,
            secondary=SECRET,
            entity_path=QUEUE,
        )
        namespace.ask(PutKey(key))
        door = stack.enter_context(closing(Door(namespace, SystemClock())))
        yield ServiceBusSite(namespace, door)


class SocketPeer:
    """A client of AMQP on a socket, which does what its test says."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        sasl = SaslClient(SaslCredentials("ANONYMOUS"))
        options = ConnectionOptions("a peer", hostname="localhost", max_frame_bytes=1024 * 1024)
        self.amqp = AmqpConnection(options, 0, sasl=sasl, is_client=True)
        self.session: AmqpSession = self.amqp.begin()
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def write(self) -> None:
        """Send what there is."""
        self._socket.sendall(b"".join(self.amqp.take_outgoing(0)))

    def wait_for(self, kind: type[Kind], wanted: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """Exchange bytes until an event has come."""
        while True:
            for at, event in enumerate(self.events):
                if isinstance(event, kind) and wanted(event):
                    return self.events.pop(at)  # type: ignore[return-value]
            self.write()
            self.events += self.amqp.receive(self._socket.recv(65536), 0)

    def node(self, address: str) -> tuple[SenderLink, ReceiverLink]:
        """Attach a pair of links to a node; the client takes no answer yet."""
        receiver = self.session.attach_receiver(
            f"from {address}", LinkOptions(source=Source(address=address), target=Target())
        )
        sender = self.session.attach_sender(
            f"to {address}", LinkOptions(source=Source(), target=Target(address=address))
        )
        for link in (receiver, sender):
            self.wait_for(Attached, lambda event, link=link: event.link is link)  # type: ignore[misc]
        return sender, receiver

    def show_token(self, path: str, secret: str = SECRET) -> int:
        """Show a token; return the status of the answer."""
        sender, receiver = self.node("$cbs")
        receiver.grant(1)
        audience = f"sb://localhost/{path}"
        token = sign_token(audience, "app", secret, int(time.time()) + 600)
        properties = {"operation": "put-token", "type": "jwt", "name": audience}
        self._ask(sender, properties, token)
        answer = AmqpMessage(self.wait_for(Delivery).payload)
        return int((answer.application_properties or {})["status-code"])

    def _ask(self, sender: SenderLink, properties: dict[str, Any], body: Any) -> None:
        while not sender.may_send:
            self.write()
            self.events += self.amqp.receive(self._socket.recv(65536), 0)
        sections = {
            SectionKind.PROPERTIES: Properties(message_id="1"),
            SectionKind.APPLICATION_PROPERTIES: properties,
            SectionKind.VALUE: body,
        }
        sender.send(encode_message(sections), tag=b"1", is_settled=True)

    def peek(self, sender: SenderLink) -> None:
        """Ask for messages."""
        properties = {"operation": "com.microsoft:peek-message"}
        self._ask(sender, properties, {"from-sequence-number": 0, "message-count": 100})


def fill(site: ServiceBusSite, count: int) -> None:
    for _ in range(count):
        site.namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE)) for _ in range(10)]))


def settled(read: Callable[[], int]) -> int:
    """Return a figure that has stopped to change."""
    before = -1
    while (now := read()) != before:
        before = now
        time.sleep(0.2)
    return now


@pytest.mark.parametrize("address", [QUEUE, f"{QUEUE}/$management"])
def test_without_a_token_no_link_is_accepted(site: ServiceBusSite, address: str) -> None:
    with SocketPeer(site.door.port) as peer:
        peer.session.attach_receiver("link", LinkOptions(source=Source(address=address)))
        error = peer.wait_for(LinkDetached).error
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert site.door.connections == 0


def test_a_forged_token_is_refused(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE, "not the secret") == 401


def test_a_token_of_one_queue_opens_no_other(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        peer.session.attach_sender("link", LinkOptions(target=Target(address=OTHER)))
        error = peer.wait_for(LinkDetached).error
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"


def test_a_client_that_does_not_read_gets_no_more_than_a_bound(site: ServiceBusSite) -> None:
    fill(site, 30)
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.session.attach_receiver("greedy", LinkOptions(source=Source(address=QUEUE)))
        peer.wait_for(Attached, lambda event: event.link is link)
        link.grant(1_000_000)
        peer.write()  # and reads nothing more
        amqp = site.connection.conversation.amqp
        assert settled(lambda: amqp.unread_bytes) <= 2 * SERVICE_BUS_FETCH_BYTES
        with closing(SocketPeer(site.door.port)._socket):
            site.namespace.ask(Send(OTHER, [BrokeredMessage(b"goes on")]))
        assert site.namespace.ask(Receive(OTHER)).num_rows == 1


def test_a_client_that_asks_and_takes_no_answer_loses_its_link(site: ServiceBusSite) -> None:
    fill(site, 2)
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        sender, receiver = peer.node(f"{QUEUE}/$management")
        for _ in range(2 * MAX_UNREAD_BYTES // SERVICE_BUS_FETCH_BYTES):
            peer.peek(sender)
        ended = peer.wait_for(LinkDetached, lambda event: event.link is receiver)
        assert ended.error is not None
        assert ended.error.condition == "amqp:resource-limit-exceeded"


@pytest.mark.parametrize("convert", [list, to_batch], ids=["objects", "columns"])
def test_sections_hide_nothing_from_the_size_limit(
    site: ServiceBusSite, convert: Callable[[list[BrokeredMessage]], Any]
) -> None:
    large = {f"p{number}": "x" * LARGE for number in range(10)}
    message = BrokeredMessage(b"", application_properties=large, amqp=b"x")
    with pytest.raises(MessageSizeExceededError):
        site.namespace.ask(Send(QUEUE, convert([message])))
