"""The native door: moves the bytes of one connection between a socket and its conversation."""

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from twinbus.errors import MessagingError
from twinbus.limits import QUIET_US, SECOND_US, WRITE_BUFFER_BYTES
from twinbus.protocol.access import Admission
from twinbus.protocol.server_conversation import (
    Arrived,
    Event,
    Phase,
    ServerConversation,
    ServerRequest,
)

if TYPE_CHECKING:
    from twinbus.server.door import Door


class NativeConnection(asyncio.BufferedProtocol):
    """One client. Everything happens in the loop's thread, but for replies of other turns."""

    __slots__ = (
        "_buffered",
        "_door",
        "_hangs_up",
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
        self._incomplete = 0  # bytes of an unfinished frame, as counted by the door
        self.address = address
        self.admitted: Admission | None = None  # under which the door counts the connection
        self.transport: asyncio.Transport
        self._is_full = False  # the socket takes no more for now
        self._hangs_up = False  # when everything is written
        self._is_aborted = False
        self._is_reading = True
        self._buffered = 0  # bytes that the socket had not taken at the last tick
        self._stalled_at = now_us()  # when the client last read some of them
        self.conversation = ServerConversation(self, self._deliver, door.namespace.id, now_us())

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
        conversation = self.conversation
        self._door.moved_bytes += len(data)
        events = conversation.receive(data, now_us())
        if events:
            self._apply(events)
        if conversation.incomplete_bytes != self._incomplete:
            self._note_incomplete(conversation.incomplete_bytes)
        if conversation.has_outgoing or conversation.is_done or not conversation.may_read:
            self.flush()

    def _note_incomplete(self, size: int) -> None:
        admission = self.admitted
        if admission is None:
            return
        change, self._incomplete = size - self._incomplete, size
        try:
            self._door.note_incomplete(admission, change)
        except MessagingError as error:
            self._apply(self.conversation.end(error))

    def eof_received(self) -> bool:
        """Let the connection go: the client hangs up."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Give back what the client never heard of."""
        if error is None and self._hangs_up and not self._is_aborted:
            self.conversation.note_buffered(0)  # everything was written before
        self._apply(self.conversation.lose())
        self._note_incomplete(0)
        self._door.connection_ends(self)

    def pause_writing(self) -> None:
        """Keep replies: the client does not read them."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Write what was kept."""
        self._is_full = False
        self.flush()

    # -- moving --------------------------------------------------------------------------------

    def _apply(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Arrived):
                self._door.turns.add(event.requests)
            else:
                self._door.turns.withdraw(event.requests)

    def _deliver(self, request: ServerRequest, value: Any) -> None:
        """Take a reply, in whichever thread the turn was."""
        turns = self._door.turns
        if turns.is_loop_thread:
            self._answer(request, value)
        else:
            turns.call_in_loop(partial(self._answer, request, value))

    def _answer(self, request: ServerRequest, value: Any) -> None:
        self._door.latencies.observe(request.command, now_us() - request.read_at)
        undo = self.conversation.answer(request, self._door.presentable(value))
        if undo is not None:
            self._door.turns.add([undo])
        self._door.has_replies(self)

    def flush(self) -> None:
        """Write what there is, hand over what has credit, and hang up when all is done."""
        if self._is_aborted:  # its buffer is gone, but not because the client has read it
            return
        conversation, transport = self.conversation, self.transport
        if conversation.has_outgoing and not self._is_full and not transport.is_closing():
            pieces = conversation.take_outgoing()
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._door.moved_bytes += len(data)
            transport.write(data)
        conversation.note_buffered(transport.get_write_buffer_size())
        self._apply(conversation.balance(now_us()))
        if conversation.is_done and not conversation.has_outgoing:
            self._hangs_up = True
            transport.close()
        elif conversation.may_read != self._is_reading and not transport.is_closing():
            self._is_reading = not self._is_reading
            (transport.resume_reading if self._is_reading else transport.pause_reading)()

    def tick(self) -> None:
        """Do what time brings, and what changed keys do."""
        conversation = self.conversation
        now = now_us()
        self._check_reader(now)
        if now >= conversation.next_event:
            self._apply(conversation.tick(now))
            self.flush()
        elif conversation.unread_bytes:  # asyncio does not report that the socket took them
            self.flush()
        events = conversation.check_admission(now)
        if events:
            self._apply(events)
            self.flush()

    def _check_reader(self, now: int) -> None:
        """Let a client go that reads nothing, or not soon why the connection ends."""
        size = self.transport.get_write_buffer_size()
        is_ended = self.conversation.phase is Phase.ENDED
        if size and (is_ended or size == self._buffered):
            patience_us = SECOND_US if is_ended else QUIET_US
            if now - self._stalled_at >= patience_us:
                self.abort()
        else:
            self._buffered, self._stalled_at = size, now

    def abort(self) -> None:
        """End the connection at once; what was not written is given back."""
        self._is_aborted = True
        self.transport.abort()

    def end(self, error: MessagingError) -> None:
        """Tell the client why the connection ends, and end it."""
        self._apply(self.conversation.end(error))
        self.flush()
        if self._is_full:  # it does not read: it will not hear more either
            self.abort()


def now_us() -> int:
    """Return the moment that silence and patience are measured by."""
    return time.monotonic_ns() // 1000
