"""The Service Bus door: moves bytes between the socket of an SDK and its conversation."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from twinbus.entities import EntityDescription
from twinbus.errors import MessagingError
from twinbus.limits import QUIET_US, SECOND_US, WRITE_BUFFER_BYTES
from twinbus.protocol.access import Admission
from twinbus.server.native import now_us
from twinbus.servicebus.conversation import ServiceBusConversation
from twinbus.servicebus.work import LinkRequest

if TYPE_CHECKING:
    from twinbus.server.door import Door

AMQP_MAGIC = b"AMQP"


class ServiceBusConnection(asyncio.BufferedProtocol):
    """One client. Everything happens in the loop's thread, but for replies of other turns."""

    __slots__ = (
        "_buffered",
        "_door",
        "_incomplete",
        "_is_aborted",
        "_is_full",
        "_is_reading",
        "_refusal",
        "_stalled_at",
        "address",
        "admitted",
        "conversation",
        "transport",
    )

    def __init__(
        self, door: "Door", address: str, *, refusal: MessagingError | None = None
    ) -> None:
        self._door = door
        self._refusal = refusal  # why nobody can be let in here
        self._incomplete = 0  # bytes of unfinished frames and deliveries, as counted by the door
        self.address = address
        self.admitted: Admission | None = None  # under which the door counts the connection
        self.transport: asyncio.Transport
        self._is_full = False  # the socket takes no more for now
        self._is_aborted = False
        self._is_reading = True
        self._buffered = 0  # bytes that the socket had not taken at the last tick
        self._stalled_at = now_us()  # when the client last read some of them
        self.conversation = ServiceBusConversation(
            self, self._deliver, door.namespace.id, now_us(), door.namespace.max_message_bytes
        )

    # -- of the conversation: who is let in ----------------------------------------------------

    def admit(self, token: str) -> Admission:
        """Check a token."""
        if self._refusal is not None:
            raise self._refusal
        return self._door.admit(token)

    def recheck(self, admission: Admission) -> Admission:
        """Check that an admission still holds."""
        return self._door.recheck(admission)

    def enter(self, admission: Admission) -> None:
        """Count the connection, or refuse it."""
        self._door.enter(self, admission)
        self.admitted = admission

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Log that a request or token was refused."""
        self._door.note_refusal(admission, error)

    def describe(self, path: str) -> EntityDescription | None:
        """Return the description of an entity, if there is one."""
        return self._door.namespace.describe(path)

    # -- of asyncio ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._door.connection_begins(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Give the loop a buffer to read into; it is used up before the next one is needed."""
        return self._door.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes of the client."""
        self.take(bytes(self._door.read_buffer[:nbytes]))

    def take(self, data: bytes) -> None:
        """Take bytes of the client."""
        self._door.moved_bytes += len(data)
        self.conversation.receive(data, now_us())
        self._hand_over()
        self._note_incomplete(self.conversation.amqp.incomplete_bytes)
        self.flush()

    def _note_incomplete(self, size: int) -> None:
        if self.admitted is None or size == self._incomplete:
            return
        change, self._incomplete = size - self._incomplete, size
        try:
            self._door.note_incomplete(self.admitted, change)
        except MessagingError as error:
            self.conversation.end(error, now_us())

    def eof_received(self) -> bool:
        """Let the connection go: the client hangs up."""
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Give back what the client never heard of."""
        self.conversation.lose()
        self._hand_over()
        self._note_incomplete(0)
        self._door.connection_ends(self)

    def pause_writing(self) -> None:
        """Keep what is to be written: the client does not read."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Write what was kept."""
        self._is_full = False
        self.flush()

    # -- moving --------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        arrived, withdrawn = self.conversation.take_requests()
        if withdrawn:
            self._door.turns.withdraw(withdrawn)
        if arrived:
            self._door.turns.add(arrived)

    def _deliver(self, request: LinkRequest, value: Any) -> None:
        """Take a reply, in whichever thread the turn was."""
        turns = self._door.turns
        if turns.is_loop_thread:
            self._answer(request, value)
        else:
            turns.call_in_loop(partial(self._answer, request, value))

    def _answer(self, request: LinkRequest, value: Any) -> None:
        self._door.latencies.observe(request.command, now_us() - request.read_at)
        self.conversation.answer(request, self._door.presentable(value), now_us())
        self._hand_over()
        self._door.has_replies(self)

    def flush(self) -> None:
        """Write what there is, and hang up when all is done."""
        if self._is_aborted:
            return
        amqp, transport = self.conversation.amqp, self.transport
        while amqp.has_outgoing and not self._is_full and not transport.is_closing():
            content = b"".join(amqp.take_outgoing(now_us()))
            self._door.moved_bytes += len(content)
            transport.write(content)
            self.conversation.note_buffered(transport.get_write_buffer_size())  # may bring more
        self.conversation.note_buffered(transport.get_write_buffer_size())
        self._hand_over()
        if amqp.is_done and not amqp.has_outgoing:
            transport.close()
        elif self.conversation.may_read != self._is_reading and not transport.is_closing():
            self._is_reading = not self._is_reading
            (transport.resume_reading if self._is_reading else transport.pause_reading)()

    def tick(self) -> None:
        """Do what time brings, and what changed keys do."""
        now = now_us()
        self._check_reader(now)
        self.conversation.tick(now)
        self._hand_over()
        self.flush()

    def _check_reader(self, now: int) -> None:
        """Let a client go that reads nothing."""
        size = self.transport.get_write_buffer_size()
        if size and size == self._buffered:
            patience_us = SECOND_US if self.conversation.amqp.is_done else QUIET_US
            if now - self._stalled_at >= patience_us:
                self.abort()
        else:
            self._buffered, self._stalled_at = size, now

    def abort(self) -> None:
        """End the connection at once."""
        self._is_aborted = True
        self.transport.abort()

    def end(self, error: MessagingError) -> None:
        """Tell the client why the connection ends, and end it."""
        self.conversation.end(error, now_us())
        self._hand_over()
        self.flush()
        if self._is_full:  # it does not read: it will not hear more either
            self.abort()
