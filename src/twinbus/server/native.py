"""The native door: moves bytes between the socket of a Twinbus client and its conversation.

Sends may contain AMQP sections, which are decoded to check them. That can take a second for each
megabyte, so the sections of a large send are checked in several callbacks of the loop. The later
requests of its connection wait meanwhile, so that they stay in order.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from twinbus.errors import MessagingError
from twinbus.limits import CHECKED_SECTION_BYTES
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Send
from twinbus.protocol.requests import Request
from twinbus.protocol.server_conversation import Phase, ServerConversation
from twinbus.protocol.server_requests import Arrived, Event, ServerRequest
from twinbus.server.client_connection import ClientConnection, now_us, unwritten_bytes
from twinbus.servicebus.messages import check_sections

if TYPE_CHECKING:
    from twinbus.server.door import Door


class NativeConnection(ClientConnection):
    """A client that speaks the native protocol."""

    __slots__ = ("_hangs_up", "_is_checking", "_reads_frame", "_unchecked", "conversation")

    def __init__(
        self, door: "Door", address: str, *, refusal: MessagingError | None = None
    ) -> None:
        super().__init__(door, address, refusal=refusal)
        self._hangs_up = False  # close the connection when everything is written
        self._reads_frame = False  # the loop reads into the buffer of a large frame
        self._unchecked: deque[Request] = deque()  # requests that wait for the check of the first
        self._is_checking = False  # a callback of the loop continues the check
        self.conversation = ServerConversation(self, self._deliver, door.namespace.id, now_us())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return the buffer of an unfinished large frame, or else the shared buffer."""
        reader = self.conversation.reader
        self._reads_frame = reader.own is not None
        if not self._reads_frame:
            return self._door.read_buffer
        return reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Process bytes that the loop has read."""
        door, conversation = self._door, self.conversation
        door.moved_bytes += nbytes
        if self._reads_frame:
            events = conversation.received(nbytes, now_us())
        else:
            events = conversation.receive(bytes(door.read_buffer[:nbytes]), now_us())
        self._handle(events)

    def take(self, data: bytes) -> None:
        """Process bytes that the client sent."""
        self._handle(self.conversation.receive(data, now_us()))

    def _handle(self, events: list[Event]) -> None:
        """Act on the events that bytes of the client caused."""
        conversation = self.conversation
        if events:
            if self._is_counted or conversation.must_be_counted:
                self._note_usage(conversation.reply_bytes, conversation.request_bytes)
            self._apply(events, may_turn=True)
        incomplete = conversation.reader.filled
        if incomplete != self._incomplete:
            self._note_incomplete(incomplete)
        if conversation.needs_flush:
            self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Release the locks of messages that the client did not receive."""
        if error is None and self._hangs_up and not self._is_aborted:
            self.conversation.note_buffered(0)  # everything had been written
        self._apply(self.conversation.lose())
        self._note_incomplete(0)
        self._note_usage(0, 0)
        self._door.connection_ends(self)

    def _apply(self, events: list[Event], *, may_turn: bool = False) -> None:
        for event in events:
            if isinstance(event, Arrived):
                requests = [request for request in event.requests if self._is_ready(request)]
                if requests:
                    self._door.turns.add(requests, may_turn=may_turn)
            else:
                for request in event.requests if self._unchecked else ():
                    if request in self._unchecked:
                        self._unchecked.remove(request)
                self._door.turns.withdraw(event.requests)

    def _is_ready(self, request: Request) -> bool:
        """Return whether a request can be executed now; otherwise it is refused, or waits."""
        if not self._unchecked and _section_bytes(request) <= CHECKED_SECTION_BYTES:
            return not _is_refused(request, self._door.namespace.max_message_bytes)
        self._unchecked.append(request)
        if not self._is_checking:
            self._is_checking = True
            self._check_later(request, iter(_stored_sections(request.command)))
        return False

    def _check_later(self, request: Request, left: Iterator[object]) -> None:
        asyncio.get_running_loop().call_soon(self._check_on, request, left)

    def _check_on(self, request: Request, left: Iterator[object]) -> None:
        """Check some more sections of the first request that waits; go on in another callback."""
        if self._unchecked and self._unchecked[0] is request:  # otherwise it was withdrawn
            try:
                if not _check_some(left, self._door.namespace.max_message_bytes):
                    self._check_later(request, left)
                    return
                self._door.turns.add([request])
            except MessagingError as error:
                request.fail(error)
            self._unchecked.popleft()
        if self._unchecked:
            following = self._unchecked[0]
            self._check_later(following, iter(_stored_sections(following.command)))
        else:
            self._is_checking = False
        if self.conversation.needs_flush:
            self.flush()

    def _answer(self, request: ServerRequest, value: Any) -> None:
        door = self._door
        door.latencies.observe(request.command, now_us() - request.read_at)
        if isinstance(value, MessagingError):
            value = door.presentable(value)
        undo = self.conversation.answer(request, value)
        if undo is not None:
            door.turns.add([undo])
        door.has_replies(self)

    def flush(self) -> None:
        """Write pending bytes and replies within credit; close when the conversation has ended."""
        if self._is_aborted:  # the buffer was discarded: the client has not read the bytes
            return
        conversation, transport = self.conversation, self.transport
        self._write_outgoing()
        is_calm = conversation.is_calm(unwritten_bytes(transport))
        if self._is_counted or conversation.must_be_counted:
            self._note_usage(conversation.reply_bytes, conversation.request_bytes)
        if is_calm and self._is_reading:
            return
        events = conversation.balance(now_us())
        self._note_usage(conversation.reply_bytes, conversation.request_bytes)
        self._apply(events)
        if conversation.has_outgoing:  # the refusals of deferred requests
            self._write_outgoing()
            conversation.note_buffered(unwritten_bytes(transport))
        if conversation.is_done and not conversation.has_outgoing:
            self._hangs_up = True
            transport.close()
        else:
            self._read_on(may_read=conversation.may_read)

    def _write_outgoing(self) -> None:
        conversation, transport = self.conversation, self.transport
        if conversation.has_outgoing and not self._is_full and not transport.is_closing():
            pieces = conversation.take_outgoing()
            self._write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def tick(self) -> None:
        """Apply timeouts and changes of keys."""
        conversation = self.conversation
        now = now_us()
        self._check_reader(now)
        if now >= conversation.next_event:
            self._apply(conversation.tick(now))
            self.flush()
        elif conversation.unread_bytes or conversation.has_deferred or not self._is_reading:
            self.flush()  # asyncio does not report when the socket accepts bytes
        events = conversation.check_admission(now)
        if events:
            self._apply(events)
            self.flush()

    def _close(self, error: MessagingError) -> None:
        self._apply(self.conversation.end(error))

    @property
    def _is_leaving(self) -> bool:
        return self.conversation.phase is Phase.ENDED


def _is_refused(request: Request, most: int) -> bool:
    """Refuse a send of messages that no Service Bus client could decode, and return True."""
    try:
        for stored in _stored_sections(request.command):
            _check(stored, most)
    except MessagingError as error:
        request.fail(error)
        return True
    return False


def _check_some(left: Iterator[object], most: int) -> bool:
    """Check the next sections up to a number of bytes; return whether all are checked."""
    size = 0
    for stored in left:
        size += _check(stored, most)
        if size > CHECKED_SECTION_BYTES:
            return False
    return True


def _check(stored: object, most: int) -> int:
    """Check the sections of a message; return the size of what was decoded.

    Sections of more than `most` bytes are not decoded, which would take up to 60 times their size:
    the broker refuses the message because it is too large.
    """
    if type(stored) is not bytes:  # the broker refuses columns of another type
        return 0
    if len(stored) > most:
        return 0
    check_sections(stored)
    return len(stored)


def _section_bytes(request: Request) -> int:
    """Return the size of the AMQP sections of a send."""
    command = request.command
    if type(command) is not Send:
        return 0
    messages = command.messages
    if not isinstance(messages, pa.RecordBatch):
        return sum([len(message.amqp) for message in messages if message.amqp is not None])
    at = messages.schema.get_field_index("amqp")
    if at < 0 or messages.column(at).null_count == len(messages):
        return 0
    return int(messages.column(at).nbytes)


def _stored_sections(command: object) -> Iterable[object]:
    """Return the field `amqp` of each message of a send."""
    if type(command) is not Send:
        return ()
    messages: Sequence[BrokeredMessage] | pa.RecordBatch = command.messages
    if not isinstance(messages, pa.RecordBatch):
        return [message.amqp for message in messages]
    at = messages.schema.get_field_index("amqp")
    if at < 0 or messages.column(at).null_count == len(messages):
        return ()
    stored: list[object] = messages.column(at).to_pylist()
    return stored
