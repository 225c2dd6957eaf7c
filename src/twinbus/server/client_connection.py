"""What the connections of all protocols have in common: the door, the socket, and its manners."""

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
        "transport",
    )

    def __init__(
        self, door: "Door", address: str, *, refusal: MessagingError | None = None
    ) -> None:
        self._door = door
        self._refusal = refusal  # why nobody can be let in here
        self._incomplete = 0  # bytes of what is unfinished, as counted by the door
        self.address = address
        self.admitted: Admission | None = None  # under which the door counts the connection
        self.transport: asyncio.Transport
        self._is_full = False  # the socket takes no more for now
        self._is_aborted = False
        self._is_reading = True
        self._buffered = 0  # bytes that the socket had not taken at the last tick
        self._stalled_at = now_us()  # when the client last read some of them

    # -- what each protocol does ---------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """Take bytes of the client."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what there is, and hang up when all is done."""
        raise NotImplementedError

    def tick(self) -> None:
        """Do what time brings, and what changed keys do."""
        raise NotImplementedError

    def _answer(self, request: Any, value: Any) -> None:
        """Take a reply, in the loop's thread."""
        raise NotImplementedError

    def _close(self, error: MessagingError) -> None:
        """Have the conversation end, and say why."""
        raise NotImplementedError

    @property
    def _is_leaving(self) -> bool:
        """Whether nothing more will be said once everything is written."""
        raise NotImplementedError

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
        self._door.moved_bytes += nbytes
        self.take(bytes(self._door.read_buffer[:nbytes]))

    def eof_received(self) -> bool:
        """Let the connection go: the client hangs up."""
        return False

    def pause_writing(self) -> None:
        """Keep what is to be written: the client does not read."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Write what was kept."""
        self._is_full = False
        self.flush()

    # -- moving --------------------------------------------------------------------------------

    def _write(self, content: bytes | memoryview) -> None:
        self._door.moved_bytes += len(content)
        self.transport.write(content)

    def _note_incomplete(self, size: int) -> None:
        if self.admitted is None or size == self._incomplete:
            return
        change, self._incomplete = size - self._incomplete, size
        try:
            self._door.note_incomplete(self.admitted, change)
        except MessagingError as error:
            self._close(error)

    def _read_on(self, *, may_read: bool) -> None:
        """Read, or stop reading."""
        if may_read != self._is_reading and not self.transport.is_closing():
            self._is_reading = may_read
            (self.transport.resume_reading if may_read else self.transport.pause_reading)()

    def _deliver(self, request: Any, value: Any) -> None:
        """Take a reply, in whichever thread the turn was."""
        turns = self._door.turns
        if get_ident() == turns.thread:
            self._answer(request, value)
        else:
            turns.call_in_loop(partial(self._answer, request, value))

    def _check_reader(self, now: int) -> None:
        """Let a client go that reads nothing, or not soon why the connection ends.

        A client that has hung up is not waited for: the locks in what it did not read go back.
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
        """End the connection at once; what was not written is given back."""
        self._is_aborted = True
        self.transport.abort()

    def end(self, error: MessagingError) -> None:
        """Tell the client why the connection ends, and end it."""
        self._close(error)
        self.flush()
        if self._is_full:  # it does not read: it will not hear more either
            self.abort()


def now_us() -> int:
    """Return the moment that silence and patience are measured by."""
    return time.monotonic_ns() // 1000
