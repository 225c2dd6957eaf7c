"""AMQP connections: moves bytes between the socket of a Service Bus SDK and its conversation."""

from typing import TYPE_CHECKING, Any

from twinbus.entities import EntityDescription
from twinbus.errors import MessagingError
from twinbus.server.client_connection import ClientConnection, now_us, unwritten_bytes
from twinbus.servicebus.conversation import ServiceBusConversation
from twinbus.servicebus.work import LinkRequest

if TYPE_CHECKING:
    from twinbus.server.door import Door

AMQP_MAGIC = b"AMQP"


class ServiceBusConnection(ClientConnection):
    """A client that speaks AMQP, as SDKs of Azure Service Bus do."""

    __slots__ = ("conversation", "unprocessed")

    def __init__(
        self, door: "Door", address: str, *, refusal: MessagingError | None = None
    ) -> None:
        super().__init__(door, address, refusal=refusal)
        self.unprocessed = b""  # read from the socket, and processed in later rounds of the loop
        self.conversation = ServiceBusConversation(
            self, self._deliver, door.namespace.id, now_us(), door.namespace.max_message_bytes
        )

    def describe(self, path: str) -> EntityDescription | None:
        """Return the description of an entity, if there is one."""
        interceptor = self._door.turns.interceptor
        if interceptor is not None:
            interceptor.attaching(path)
        return self._door.namespace.describe(path)

    @property
    def share(self) -> str:
        """Whose time the connection uses: that of its key; without a token, of its address."""
        return self.address if self.admitted is None else self.admitted.id

    def take(self, data: bytes) -> None:
        """Process bytes that the client sent, now or in later rounds of the loop."""
        self._door.pacer.take(self, data)

    def process(self, data: bytes, *, may_turn: bool) -> None:
        """Process bytes that the client sent; see `Turns.add` about `may_turn`."""
        self.conversation.receive(data, now_us())
        self._follow_up(may_turn=may_turn)

    @property
    def is_unfinished(self) -> bool:
        """Whether a large batch is not read completely."""
        return self.conversation.is_unfinished

    def go_on(self) -> None:
        """Read some more messages of a large batch."""
        self.conversation.go_on(now_us())
        self._follow_up(may_turn=False)

    def _follow_up(self, *, may_turn: bool) -> None:
        """Hand over the requests that bytes of the client caused, and write what they caused."""
        conversation, amqp = self.conversation, self.conversation.amqp
        if self._is_counted or conversation.must_be_counted:
            self._note_usage(conversation.reply_bytes, conversation.request_bytes)
        if conversation.has_requests:
            self._hand_over(may_turn=may_turn)
        incomplete = amqp.incomplete_bytes
        if incomplete != self._incomplete:
            self._note_incomplete(incomplete)
        if amqp.has_outgoing or amqp.unread_bytes or amqp.is_done or not conversation.may_read:
            self.flush()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Release the locks of messages that the client did not receive."""
        self.unprocessed = b""
        self.conversation.lose()
        self._hand_over()
        self._note_incomplete(0)
        self._note_usage(0, 0)
        self._door.connection_ends(self)

    def _hand_over(self, *, may_turn: bool = False) -> None:
        arrived, withdrawn = self.conversation.take_requests()
        if withdrawn:
            self._door.turns.withdraw(withdrawn)
        if arrived:
            self._door.turns.add(arrived, may_turn=may_turn)

    def _answer(self, request: LinkRequest, value: Any) -> None:
        door, conversation, now = self._door, self.conversation, now_us()
        door.latencies.observe(request.command, now - request.read_at)
        if isinstance(value, MessagingError):
            value = door.presentable(value)
        conversation.answer(request, value, now)
        if conversation.has_requests:
            self._hand_over()
        door.has_replies(self)

    def flush(self) -> None:
        """Write pending bytes, and close the connection when the conversation has ended."""
        if self._is_aborted:
            return
        conversation, transport = self.conversation, self.transport
        amqp = conversation.amqp
        # Fewer buffered bytes may allow the conversation to write more.
        if conversation.waits_for_room:
            conversation.note_buffered(unwritten_bytes(transport))
        while amqp.has_outgoing and not self._is_full and not transport.is_closing():
            self._write(b"".join(amqp.take_outgoing(now_us())))
            left = unwritten_bytes(transport)
            if left or conversation.waits_for_room:
                conversation.note_buffered(left)
        if self._is_counted or conversation.must_be_counted:
            self._note_usage(conversation.reply_bytes, conversation.request_bytes)
        if conversation.has_requests:
            self._hand_over()
        if amqp.is_done and not amqp.has_outgoing:
            transport.close()
        else:
            self.adjust_reading()

    def adjust_reading(self) -> None:
        """Read from the socket if the conversation may, and all that was read is processed."""
        is_behind = self.unprocessed or self.is_unfinished
        self._read_on(may_read=self.conversation.may_read and not is_behind)

    def tick(self) -> None:
        """Apply timeouts and changes of keys."""
        now = now_us()
        self._check_reader(now)
        self.conversation.tick(now)
        self._hand_over()
        self.flush()

    def _close(self, error: MessagingError) -> None:
        self.conversation.end(error, now_us())
        self._hand_over()

    @property
    def _is_leaving(self) -> bool:
        return self.conversation.amqp.is_done
