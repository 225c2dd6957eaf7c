"""A conversation of the Service Bus door without a socket: its test decides when replies arrive."""

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.namespaces import embedded
from tests.scenarios.service_bus_site import SocketPeer, key
from twinbus.clock import ManualClock
from twinbus.connection import Token
from twinbus.entities import EntityDescription, QueueDescription
from twinbus.errors import MessagingError, UnauthorizedError
from twinbus.limits import MAX_KEY_REPLY_BYTES
from twinbus.message import BrokeredMessage
from twinbus.protocol.access import Admission
from twinbus.protocol.commands import CreateEntity, Peek, Receive, Send
from twinbus.protocol.keys import Claim
from twinbus.servicebus.conversation import ServiceBusConversation
from twinbus.servicebus.work import LinkRequest

QUEUE, TALKS = "orders", "talks"


class Wire:
    """A namespace, the conversation with one client, and the guard that admits it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.clock = ManualClock(datetime.now(UTC))
        self.namespace = stack.enter_context(embedded(folder, self.clock, threaded=False))
        for description in (
            QueueDescription(path=QUEUE),
            QueueDescription(path=TALKS, requires_session=True),
        ):
            self.namespace.ask(CreateEntity(description))
        self.reply_room = MAX_KEY_REPLY_BYTES  # that the key has
        self.full: MessagingError | None = None  # why no connection is admitted
        self.refuses: MessagingError | None = None  # why the broker carries out nothing
        self.is_expired = False  # the client's token
        self.late: list[tuple[LinkRequest, Any]] | None = None  # replies that do not arrive yet
        self.now = 0
        self.conversation = ServiceBusConversation(
            self, self._deliver, self.namespace.id, 0, self.namespace.max_message_bytes
        )

    # -- the guard -----------------------------------------------------------------------------

    def admit(self, token: str) -> Admission:
        return Admission(Token.parse(token), key("root", Claim.MANAGE))

    def recheck(self, admission: Admission) -> Admission:
        if self.is_expired:
            raise UnauthorizedError("the token has expired")
        return admission

    def enter(self, _: Admission) -> None:
        if self.full is not None:
            raise self.full

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Ignore a refusal."""

    def has_reply_room(self, used: int, more: int) -> bool:  # noqa: ARG002 - no other connection
        return more <= self.reply_room

    def has_request_room(self, used: int) -> bool:  # noqa: ARG002 - as above
        return True

    def describe(self, path: str) -> EntityDescription | None:
        return self.namespace.describe(path)

    # -- the driver ----------------------------------------------------------------------------

    def sendall(self, data: bytes) -> None:
        if data:
            self.conversation.receive(data, self.now)
        while self.conversation.is_unfinished:
            self.conversation.go_on(self.now)
        self.turn()

    def recv(self, _: int) -> bytes:
        self.conversation.note_buffered(0)
        self.turn()
        data = b"".join(self.conversation.amqp.take_outgoing(self.now))
        assert data, "the server has nothing to say"
        return data

    def close(self) -> None:
        self.conversation.lose()
        self.turn()

    def tick(self) -> None:
        self.conversation.tick(self.now)
        self.turn()

    def turn(self) -> None:
        """Have the broker carry out what the conversation asks for."""
        while self.conversation.has_requests:
            arrived, withdrawn = self.conversation.take_requests()
            self.namespace.withdraw(withdrawn)
            if self.refuses is None:
                self.namespace.hand_over(arrived)
                continue
            for request in arrived:
                request.fail(self.refuses)

    def _deliver(self, request: LinkRequest, value: Any) -> None:
        if self.late is None:
            self.conversation.answer(request, value, self.now)
        else:
            self.late.append((request, value))

    def hold_replies(self) -> None:
        """Keep replies back until `let_arrive`."""
        self.late = []

    def let_arrive(self, *, holds_next: bool = False) -> None:
        """Deliver the replies that were kept back; keep those that they lead to, if wanted."""
        late, self.late = self.late or [], [] if holds_next else None
        for request, value in late:
            self.conversation.answer(request, value, self.now)
        self.turn()

    # -- the queues ----------------------------------------------------------------------------

    def send(self, *bodies: bytes, path: str = QUEUE, session_id: str | None = None) -> None:
        messages = [BrokeredMessage(body, session_id=session_id) for body in bodies]
        self.namespace.ask(Send(path, messages))
        self.turn()

    def stored(self, path: str = QUEUE) -> list[bytes]:
        """Return the messages of a queue, locked ones as well."""
        bodies: list[bytes] = self.namespace.ask(Peek(path, 0, 100)).column("body").to_pylist()
        return bodies

    def deliverable(self, path: str = QUEUE) -> list[bytes]:
        """Return the messages that another receiver gets, without failed deliveries."""
        found = self.namespace.ask(Receive(path, 100))
        assert set(found.column("delivery_count").to_pylist()) <= {0}
        bodies: list[bytes] = found.column("body").to_pylist()
        return bodies


class WirePeer(SocketPeer):
    """A client at the other end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        super().__init__(0)

    def _connect(self, port: int) -> Wire:  # noqa: ARG002
        return self.wire
