"""A server in this process with the Service Bus door, and a client of AMQP that obeys its test."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from uuid import uuid4

from tests.namespaces import embedded
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import (
    Attached,
    ConnectionClosed,
    DeliveriesSettled,
    Delivery,
    Event,
    LinkDetached,
    OutcomeReported,
)
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message
from twinbus.amqp.options import ConnectionOptions, LinkOptions
from twinbus.amqp.performatives import (
    ACCEPTED,
    DeliveryState,
    ErrorCondition,
    Properties,
    Source,
    Target,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sasl import SaslClient, SaslCredentials
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.session import AmqpSession
from twinbus.clock import Clock, SystemClock
from twinbus.connection import sign_token
from twinbus.entities import QueueDescription
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import CreateEntity, PutKey
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.server.amqp import ServiceBusConnection
from twinbus.server.door import Door
from twinbus.servicebus.messages import BATCH_FORMAT

QUEUE, OTHER = "orders", "payments"
SECRET = "a secret of the tests only"  # noqa: S105
Kind = TypeVar("Kind", bound=Event)


def key(name: str, *claims: Claim, path: str | None = None) -> SharedAccessKey:
    return SharedAccessKey(
        name=name, claims=claims, primary=SECRET, secondary=SECRET, entity_path=path
    )


def encoded(body: bytes, **properties: Any) -> bytes:
    """Return a message of one data section."""
    return encode_message(
        {SectionKind.PROPERTIES: Properties(**properties), SectionKind.DATA: body}
    )


@dataclass
class ServiceBusSite:
    """A server with two queues; `app` is a key of one of them, `root` may do everything."""

    namespace: EmbeddedNamespace
    door: Door

    @classmethod
    def open(
        cls, folder: Path, stack: ExitStack, clock: Clock | None = None, **settings: Any
    ) -> Self:
        """Start a server, which ends with the stack."""
        clock = clock or SystemClock()
        namespace = stack.enter_context(embedded(folder, clock, **settings))
        for path in (QUEUE, OTHER):
            namespace.ask(CreateEntity(QueueDescription(path=path)))
        namespace.ask(PutKey(key("root", Claim.MANAGE)))
        namespace.ask(PutKey(key("app", Claim.SEND, Claim.LISTEN, path=QUEUE)))
        return cls(namespace, stack.enter_context(closing(Door(namespace, clock))))

    @property
    def connection(self) -> ServiceBusConnection:
        """The server's end of the only connection."""
        [found] = [c for c in self.door.attendance.clients if isinstance(c, ServiceBusConnection)]
        return found


class Reply(NamedTuple):
    """The answer of a node."""

    status: int
    condition: str | None
    body: Any


class ByteStream(Protocol):
    """What a peer needs of a socket."""

    def sendall(self, data: bytes, /) -> object: ...

    def recv(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class SocketPeer:
    """A client of AMQP on a socket, which does what its test says."""

    def __init__(self, port: int) -> None:
        self.socket: ByteStream = self._connect(port)
        sasl = SaslClient(SaslCredentials("ANONYMOUS"))
        options = ConnectionOptions(
            "a peer", "localhost", max_frame_bytes=1024 * 1024, max_unsettled=1_000_000
        )
        self.amqp = AmqpConnection(options, 0, sasl=sasl, is_client=True)
        self.session: AmqpSession = self.amqp.begin()
        self.events: list[Event] = []
        self._nodes: dict[str, tuple[SenderLink, ReceiverLink]] = {}

    def _connect(self, port: int) -> "ByteStream":
        return socket.create_connection(("127.0.0.1", port), timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def write(self) -> None:
        """Send what there is."""
        self.socket.sendall(b"".join(self.amqp.take_outgoing(0)))

    def read(self) -> None:
        """Wait for bytes of the server, and take them."""
        self.events += self.amqp.receive(self.socket.recv(65536), 0)

    def wait_for(self, kind: type[Kind], wanted: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """Exchange bytes until an event has come."""
        while True:
            for at, event in enumerate(self.events):
                if isinstance(event, kind) and wanted(event):
                    return self.events.pop(at)  # type: ignore[return-value]
            self.write()
            self.read()

    # -- links ---------------------------------------------------------------------------------

    def sender(self, path: str, **options: Any) -> SenderLink:
        """Attach a link that sends, and wait for the answer."""
        link = self.session.attach_sender(
            f"to {path}", LinkOptions(target=Target(address=path), **options)
        )
        self.wait_for(Attached, lambda event: event.link is link)
        return link

    def receiver(self, path: str, name: str = "", **options: Any) -> ReceiverLink:
        """Attach a link that receives, and wait for the answer."""
        link = self.session.attach_receiver(
            name or f"from {path}", LinkOptions(source=Source(address=path), **options)
        )
        self.wait_for(Attached, lambda event: event.link is link)
        return link

    def send(
        self,
        link: SenderLink,
        *bodies: bytes,
        state: DeliveryState | None = None,
        **properties: Any,
    ) -> DeliveryState | None:
        """Send a message, or several as a batch; wait for the outcome, which is settled."""
        messages = [encoded(body, **properties) for body in bodies]
        payload, message_format = messages[0], 0
        if len(messages) > 1:
            payload = encode_message({SectionKind.DATA: tuple(messages)})
            message_format = BATCH_FORMAT
        while not link.may_send:
            self.write()
            self.read()
        tag = uuid4().bytes
        link.send(payload, tag=tag, message_format=message_format, state=state, is_settled=False)
        return self.wait_for(OutcomeReported, lambda event: event.link is link).state

    def take(self, link: ReceiverLink, count: int = 1) -> list[Delivery]:
        """Receive so many deliveries for which the link has credit."""
        wanted = range(count)
        return [self.wait_for(Delivery, lambda event: event.link is link) for _ in wanted]

    def settle(self, delivery: Delivery, state: DeliveryState = ACCEPTED) -> None:
        """Report an outcome, and wait until the server has settled it."""
        delivery.link.settle(delivery.number, state, is_settled=False)
        self.wait_for(DeliveriesSettled, lambda event: delivery.number in event.numbers)

    def detached(self, link: SenderLink | ReceiverLink) -> ErrorCondition:
        """Wait until the server ends a link; return why."""
        error = self.wait_for(LinkDetached, lambda event: event.link is link).error
        assert error is not None
        return error

    def closed(self) -> ErrorCondition:
        """Wait until the server closes the connection; return why."""
        error = self.wait_for(ConnectionClosed).error
        assert error is not None
        return error

    # -- nodes ---------------------------------------------------------------------------------

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

    def request(self, address: str, properties: dict[str, Any], body: Any) -> AmqpMessage:
        """Ask a node something, and wait for the answer."""
        if address not in self._nodes:
            self._nodes[address] = self.node(address)
        sender, receiver = self._nodes[address]
        receiver.grant(1)
        self.ask(sender, properties, body)
        return AmqpMessage(self.wait_for(Delivery, lambda event: event.link is receiver).payload)

    def show_token(
        self, path: str, secret: str = SECRET, *, name: str = "app", seconds: float = 600
    ) -> int:
        """Show a token; return the status of the answer."""
        audience = f"sb://localhost/{path}"
        token = sign_token(audience, name, secret, int(time.time() + seconds))
        return self.show(audience, token)

    def show(self, audience: str, token: str) -> int:
        """Show a token as it is."""
        properties = {"operation": "put-token", "type": "jwt", "name": audience}
        answer = self.request("$cbs", properties, token)
        return int((answer.application_properties or {})["status-code"])

    def manage(self, path: str, operation: str, body: dict[str, Any]) -> Reply:
        """Have an operation carried out on an entity."""
        properties = {"operation": f"com.microsoft:{operation}"}
        answer = self.request(f"{path}/$management", properties, body)
        found = answer.application_properties or {}
        condition = found.get("errorCondition")
        return Reply(
            int(found["statusCode"]), None if condition is None else str(condition), answer.value
        )

    def ask(self, sender: SenderLink, properties: dict[str, Any], body: Any) -> None:
        """Send a request, and do not wait for its answer."""
        while not sender.may_send:
            self.write()
            self.read()
        sections = {
            SectionKind.PROPERTIES: Properties(message_id="1"),
            SectionKind.APPLICATION_PROPERTIES: properties,
            SectionKind.VALUE: body,
        }
        sender.send(encode_message(sections), tag=b"1", is_settled=True)
