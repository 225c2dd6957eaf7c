"""What the connections of all protocols share: the door, the socket, and reading and writing."""

import asyncio
import time
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from twinbus.errors import MessagingError
from twinbus.limits import (
    COUNTED_STEP_BYTES,
    MIN_READ_BYTES,
    QUIET_US,
    SECOND_US,
    WRITE_BUFFER_BYTES,
)
from twinbus.protocol.access import Admission

if TYPE_CHECKING:
    from twinbus.server.door import Door


class ReadingRate:
    """Measures for how long a client has read too little of its replies. Pure."""

    __slots__ = ("_since", "_taken")

    def __init__(self, now: int) -> None:
        self._since = now  # when the client had last read enough
        self._taken = 0  # bytes that it had read by then

    def pause_us(self, now: int, taken: int, left: int, enough: int) -> int:
        """Return for how long the client has read too little of its replies.

        `taken` is the number of bytes that it has read so far, `left` the number of unread ones.
        The time starts again when the client has read `enough` bytes, or all.
        """
        if not left or taken - self._taken >= enough:
            self._since, self._taken = now, taken
        return now - self._since


class ClientConnection(asyncio.BufferedProtocol):
    """A connection of one client. Everything runs in the loop's thread, except `_deliver`."""

    __slots__ = (
        "_door",
        "_incomplete",
        "_is_aborted",
        "_is_counted",
        "_is_full",
        "_is_reading",
        "_reading",
        "_refusal",
        "_replies",
        "_requests",
        "_written",
        "address",
        "admitted",
        "is_crowded",
        "transport",
    )

    def __init__(
        self, door: "Door", address: str, *, refusal: MessagingError | None = None
    ) -> None:
        self._door = door
        self._refusal = refusal  # the error for every token on this connection, if any
        self._incomplete = 0  # bytes of unfinished frames, as counted by the door
        self._replies = 0  # bytes of unread and expected replies, as counted by the door
        self._requests = 0  # bytes of unanswered requests, as counted by the door
        self._is_counted = False  # one of these two counts is not 0
        self.is_crowded = False  # a request waits until other connections of the key release bytes
        self.address = address
        self.admitted: Admission | None = None  # the door counts the connection under this key
        self.transport: asyncio.Transport
        self._is_full = False  # the socket accepts no more bytes for now
        self._is_aborted = False
        self._is_reading = True
        self._written = 0  # bytes that were written to the transport so far
        self._reading = ReadingRate(now_us())

    # -- what each protocol implements ---------------------------------------------------------

    def take(self, data: bytes) -> None:
        """Process bytes that the client sent."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write pending bytes, and close the connection when the conversation has ended."""
        raise NotImplementedError

    def tick(self) -> None:
        """Apply timeouts and changes of keys."""
        raise NotImplementedError

    def _answer(self, request: Any, value: Any) -> None:
        """Accept a reply, in the loop's thread."""
        raise NotImplementedError

    def _close(self, error: MessagingError) -> None:
        """End the conversation, and send the client the reason."""
        raise NotImplementedError

    @property
    def _is_leaving(self) -> bool:
        """Whether the connection closes once everything is written."""
        raise NotImplementedError

    # -- called by the conversation: access ----------------------------------------------------

    def admit(self, token: str) -> Admission:
        """Verify a token."""
        if self._refusal is not None:
            raise self._refusal
        return self._door.admit(token)

    def recheck(self, admission: Admission) -> Admission:
        """Verify that an admission is still valid: its token may expire, its key may change."""
        return self._door.recheck(admission)

    def enter(self, admission: Admission) -> None:
        """Count the connection under its key, or refuse it."""
        self._door.enter(self, admission)
        self._note_incomplete(0)  # later unfinished bytes count for the key
        self.admitted = admission

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Log the refusal of a request or token."""
        self._door.note_refusal(admission, error)

    def has_reply_room(self, used: int, more: int) -> bool:
        """Return whether the key may have more bytes of replies; if not, wait for room."""
        assert self.admitted is not None  # requests come after a token
        attendance = self._door.attendance
        if attendance.replies.has_room(self.admitted, self._replies, used, more):
            return True
        self.is_crowded = True
        attendance.note_crowded(self, self.admitted)
        return False

    def has_request_room(self, used: int) -> bool:
        """Return whether the key may have more bytes of unanswered requests."""
        assert self.admitted is not None  # requests come after a token
        requests = self._door.attendance.requests
        return requests.has_room(self.admitted, self._requests, used, 0)

    # -- called by asyncio ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection as a stranger."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._door.attendance.note_stranger(self, self.transport, self.address)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return a buffer for the loop to read into; it is emptied before the next read."""
        return self._door.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Process bytes that the loop has read."""
        self._door.moved_bytes += nbytes
        self.take(bytes(self._door.read_buffer[:nbytes]))

    def eof_received(self) -> bool:
        """Close the connection, because the client closed its end."""
        return False

    def pause_writing(self) -> None:
        """Keep further bytes in memory, because the client does not read."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Write the bytes that were kept in memory."""
        self._is_full = False
        self.flush()

    # -- reading and writing -------------------------------------------------------------------

    def _write(self, content: bytes | memoryview) -> None:
        self._door.moved_bytes += len(content)
        self._written += len(content)
        self.transport.write(content)

    def _note_incomplete(self, size: int) -> None:
        if size == self._incomplete:
            return
        if self.admitted is None:
            self._incomplete = size
            self._door.attendance.note_stranger_bytes(self, size)
            return
        change, self._incomplete = size - self._incomplete, size
        try:
            self._door.attendance.note_incomplete(self.admitted, change)
        except MessagingError as error:
            self._close(error)

    def _note_usage(self, replies: int, requests: int) -> None:
        """Count the memory of the connection under its key, in multiples of COUNTED_STEP_BYTES."""
        replies -= replies % COUNTED_STEP_BYTES
        requests -= requests % COUNTED_STEP_BYTES
        if (replies == self._replies and requests == self._requests) or self.admitted is None:
            return
        door = self._door
        more, self._replies = replies - self._replies, replies
        door.attendance.replies.note(self.admitted, more)
        door.attendance.requests.note(self.admitted, requests - self._requests)
        self._requests = requests
        self._is_counted = replies > 0 or requests > 0
        if more < 0:
            door.wake_crowded(self.admitted.id)

    def _read_on(self, *, may_read: bool) -> None:
        """Start or stop reading from the socket."""
        if may_read != self._is_reading and not self.transport.is_closing():
            self._is_reading = may_read
            (self.transport.resume_reading if may_read else self.transport.pause_reading)()

    def _deliver(self, request: Any, value: Any) -> None:
        """Accept a reply; the thread that ran the turn calls this.

        If the reply cannot be accepted, the connection ends: its client would wait for ever.
        """
        door, answer = self._door, partial(self._answer, request, value)
        if get_ident() == door.turns.thread:
            door.isolated(self, answer)
        else:
            door.turns.call_in_loop(partial(door.isolated, self, answer))

    def _check_reader(self, now: int) -> None:
        """End a connection whose client reads too slowly.

        After an error was sent, the client must read everything within a second. After the client
        has closed its end, unread replies end the connection soon, which releases their locks.
        """
        left = unwritten_bytes(self.transport)
        hurries = self._is_leaving or self.transport.is_closing()
        patience_us = SECOND_US if hurries else QUIET_US
        enough = MIN_READ_BYTES * patience_us // QUIET_US
        if self._is_leaving:
            enough = self._written + 1  # more than there is: the client must read everything
        if self._reading.pause_us(now, self._written - left, left, enough) >= patience_us:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once; locks in unwritten replies are released."""
        self._is_aborted = True
        self.transport.abort()

    def end(self, error: MessagingError) -> None:
        """Send the client the reason why the connection ends, and close it."""
        self._close(error)
        self.flush()
        if self._is_full:  # the client does not read, so it would not read the reason either
            self.abort()


def unwritten_bytes(transport: asyncio.WriteTransport) -> int:
    """Return how many bytes a transport has not written; none after its connection was lost.

    asyncio's TLS transport raises AttributeError then, until it has called `connection_lost`.
    """
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0


def now_us() -> int:
    """Return the monotonic time, by which idle times and timeouts are measured."""
    return time.monotonic_ns() // 1000
