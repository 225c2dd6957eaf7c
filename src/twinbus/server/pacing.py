"""Divides the time in which the door reads among the keys of its clients.

The event loop reads up to 128 KB from a socket at once. In small frames these bytes can keep the
loop busy for a fifth of a second, and so can one large batch, while other clients wait. So bytes
are processed in pieces, large batches are read in steps, and each key has READ_SLICE_S in one round
of the loop. When its time is over, its connections keep their bytes, are not read, and continue in
the next round, the longest waiting connection first. The connections of an address that have no
token yet count as one key.

Everything here runs in the loop of the door.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from twinbus.limits import READ_PIECE_BYTES, READ_SLICE_S


class PacedConnection(Protocol):
    """A connection whose bytes are processed in pieces."""

    unprocessed: bytes  # read from the socket, and kept for a later round

    @property
    def is_unfinished(self) -> bool:
        """Whether `go_on` must be called before further bytes are processed."""
        ...

    @property
    def share(self) -> str:
        """Whose time the connection uses: that of a key, or of an address."""
        ...

    def process(self, data: bytes, *, may_turn: bool) -> None:
        """Process some bytes; `may_turn`: they are all that was read."""
        ...

    def go_on(self) -> None:
        """Continue the work of the bytes that were processed last."""
        ...

    def adjust_reading(self) -> None:
        """Stop reading while there is something left to process, and read again afterwards."""
        ...


class Pacer:
    """Decides which connection processes its bytes now, and which in a later round."""

    def __init__(
        self,
        rounds: Callable[[], int],
        call_soon: Callable[[Callable[[], None]], object],
        isolated: Callable[[Any, Callable[[], None]], None],
        time_s: Callable[[], float],
    ) -> None:
        self._rounds = rounds  # how many rounds the loop has begun
        self._call_soon = call_soon  # calls a function in the next round
        self._isolated = isolated  # calls a function; if it raises, only the connection ends
        self._time_s = time_s
        self._round = -1
        self._spent_s: dict[str, float] = {}  # in this round, by share
        self._waiting: dict[str, deque[PacedConnection]] = {}  # by share, the oldest first
        self._is_due = False  # _go_on will be called in the next round

    def take(self, connection: PacedConnection, data: bytes) -> None:
        """Process bytes that were read, as far as the share of the connection has time."""
        if connection.unprocessed or connection.is_unfinished:  # read before reading stopped
            connection.unprocessed += data
        elif connection.share in self._waiting:
            self._keep(connection, data)
        else:
            self._process(connection, data, is_new=True)

    def _has_time(self, share: str) -> bool:
        if self._round != self._rounds():
            self._round = self._rounds()
            self._spent_s.clear()
        return self._spent_s.get(share, 0.0) < READ_SLICE_S

    def _process(self, connection: PacedConnection, data: bytes, *, is_new: bool = False) -> None:
        size, at = len(data), 0
        while at < size or connection.is_unfinished:
            share, began = connection.share, self._time_s()
            if not self._has_time(share):
                self._keep(connection, data[at:])
                return
            if connection.is_unfinished:
                connection.go_on()
            else:
                piece = data if size <= READ_PIECE_BYTES else data[at : at + READ_PIECE_BYTES]
                connection.process(piece, may_turn=is_new and piece is data)
                at += len(piece)
            self._spent_s[share] = self._spent_s.get(share, 0.0) + self._time_s() - began

    def _keep(self, connection: PacedConnection, data: bytes) -> None:
        connection.unprocessed = data
        connection.adjust_reading()
        self._waiting.setdefault(connection.share, deque()).append(connection)
        self._go_on_later()

    def _go_on_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._go_on)

    def _go_on(self) -> None:
        """Process bytes that wait, as far as each share has time in this round."""
        self._is_due = False
        for share, connections in [*self._waiting.items()]:
            while connections and self._has_time(share):
                connection = connections.popleft()
                self._isolated(connection, partial(self._continue, connection))
            if not connections:
                del self._waiting[share]
        if self._waiting:
            self._go_on_later()

    def _continue(self, connection: PacedConnection) -> None:
        data, connection.unprocessed = connection.unprocessed, b""
        self._process(connection, data)  # nothing, if the connection has ended
        connection.adjust_reading()
