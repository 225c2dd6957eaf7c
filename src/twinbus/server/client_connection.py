"""What the connections of all protocols share: the door, the socket, and reading and writing."""

import asyncio
import time
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from twinbus.errors import MessagingError
from twinbus.limits import QUIET_US, SECOND_US, WRITE_BUFFER_BYTES
from twinbus.protocol.access import Admission

if TYPE_CHECKING:
    from twinbus.server.door import Door


class ClientConnection(asyncio.BufferedProtocol):
    """A connection of one client. Everything runs in the loop's thread, except `_deliver`."""

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
        "transport",
    )

    def __init__(
        self, door: "Door", address: str, *, refusal: MessagingError | None = None
    ) -> None:
        self._door = door
        self._refusal = refusal  # the error for every token on this connection, if any
        self._incomplete = 0  # bytes of unfinished frames, as counted by the door
        self.address = address
        self.admitted: Admission | None = None  # the door counts the connection under this key
        self.transport: asyncio.Transport
        self._is_full = False  # the socket accepts no more bytes for now
        self._is_aborted = False
        self._is_reading = True
        self._buffered = 0  # bytes that the socket had not accepted at the last tick
        self._stalled_at = now_us()  # when the client last read some of these bytes

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
        """Verify that the key of an admission still exists and grants it."""
        return self._door.recheck(admission)

    def enter(self, admission: Admission) -> None:
        """Count the connection under its key, or refuse it."""
        self._door.enter(self, admission)
        self._note_incomplete(0)  # from now on they count for the key
        self.admitted = admission

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Log the refusal of a request or token."""
        self._door.note_refusal(admission, error)

    # -- called by asyncio ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._door.attendance.note_stranger(self, self.transport)

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

    def _read_on(self, *, may_read: bool) -> None:
        """Start or stop reading from the socket."""
        if may_read != self._is_reading and not self.transport.is_closing():
            self._is_reading = may_read
            (self.transport.resume_reading if may_read else self.transport.pause_reading)()

    def _deliver(self, request: Any, value: Any) -> None:
        """Accept a reply; the thread that ran the turn calls this."""
        turns = self._door.turns
        if get_ident() == turns.thread:
            self._answer(request, value)
        else:
            turns.call_in_loop(partial(self._answer, request, value))

    def _check_reader(self, now: int) -> None:
        """End a connection whose client reads nothing, or too slowly after an error was sent.

        After the client has closed its end, the connection ends at once: the locks of messages that
        the client did not read are released.
        """
        size = self.transport.get_write_buffer_size()
        if size and (self._is_leaving or size == self._buffered):
            hurries = self._is_leaving or self.transport.is_closing()
            patience_us = SECOND_US if hurries else QUIET_US
            if now - self._stalled_at >= patience_us:
                self.abort()
        else:
            self._buffered, self._stalled_at = size, now

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


def now_us() -> int:
    """Return the monotonic time, by which idle times and timeouts are measured."""
    return time.monotonic_ns() // 1000
