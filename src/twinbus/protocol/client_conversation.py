"""The client's end of a connection, without IO: bytes and `now` in, bytes and outcomes out.

The driver (namespace/server_link.py, or a simulation) passes in requests and the bytes that it has
read, writes the bytes that `take_outgoing` returns, calls `tick` at the time `next_event`, and
delivers the outcomes. `now` is in microseconds and never decreases.

    A request ends with the reply that has its number, at its deadline, or with the connection,
    whichever comes first. So no request stays pending for ever.
    A request that timed out is withdrawn at the server. If its reply arrives anyway, the locks in
    it are released.
    A server that is silent while a request waits is pinged; without an answer, the connection ends.
"""

import heapq
from dataclasses import dataclass
from typing import Any

from twinbus.errors import CommunicationError, InvalidArgumentError, MessagingError
from twinbus.limits import FIRST_WIRE_VERSION, NEVER_US, QUIET_US, SECOND_US, WIRE_VERSION
from twinbus.protocol.frames import MAGIC, Buffers, FrameKind, FrameReader, frame
from twinbus.protocol.requests import Request, unanswered
from twinbus.protocol.table import undo_of, waits
from twinbus.protocol.wire import decode_error, decode_value, encode_ask


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request: a value, or an error to raise."""

    request: Request
    value: Any

    def deliver(self) -> None:
        """Answer the request."""
        if isinstance(self.value, MessagingError):
            self.request.fail(self.value)
        else:
            self.request.answer(self.value)


@dataclass(slots=True)
class _Pending:
    request: Request | None  # None: nobody waits for the reply any more
    command: Any
    asked_at: int
    deadline: int


_REPLY = int(FrameKind.REPLY)


class ClientConversation:
    """A connection, from its first byte to its end. After the end it is not used again."""

    def __init__(self, token: str, namespace_id: str) -> None:
        self.ended: MessagingError | None = None  # why it accepts no more requests
        self.version: int | None = None  # of the protocol; None before the server's first frame
        self._reader = FrameReader()
        self._outgoing: Buffers = [MAGIC]
        self._pending: dict[int, _Pending] = {}
        self._deadlines: list[tuple[int, int]] = []  # (when, request id), a heap
        self._last_number = 0
        self.received_at = 0  # when the last bytes of the server arrived
        self._asked_at = 0  # since when a request has been waiting
        self._pinged_at: int | None = None
        self._send([FrameKind.HELLO, FIRST_WIRE_VERSION, WIRE_VERSION, token, namespace_id])

    # -- requests ------------------------------------------------------------------------------

    def ask(self, request: Request, now: int, deadline: int = NEVER_US) -> int:
        """Send a request and return its number; raise if it cannot be encoded."""
        if self.ended is not None:
            raise self.ended
        number = self._last_number + 1
        self._outgoing += encode_ask(number, request.command)
        self._last_number = number
        if not self._pending:
            self._asked_at = now
        self._pending[number] = _Pending(request, request.command, now, deadline)
        if deadline != NEVER_US:
            heapq.heappush(self._deadlines, (deadline, number))
        return number

    def give_up(self, number: int) -> None:
        """Stop waiting for a reply; locks in a late reply are released."""
        pending = self._pending.get(number)
        if pending is None or pending.request is None:
            return
        pending.request = None
        if waits(pending.command):
            self._send([FrameKind.WITHDRAW, number])

    def present(self, token: str) -> None:
        """Send a new token before the old one expires."""
        self._send([FrameKind.TOKEN, token])

    def say_goodbye(self) -> None:
        """Announce the end; the server answers pending requests and closes the connection."""
        self._send([FrameKind.GOODBYE, "", "", {}])

    @property
    def is_pinged(self) -> bool:
        """Whether the server owes an answer to a ping."""
        return self._pinged_at is not None

    @property
    def has_pending(self) -> bool:
        """Whether a request waits for a reply."""
        return any(pending.request is not None for pending in self._pending.values())

    # -- bytes ---------------------------------------------------------------------------------

    def _send(self, head: list[Any]) -> None:
        if self.ended is None:
            self._outgoing += frame(head)

    @property
    def has_outgoing(self) -> bool:
        """Whether there are bytes to write."""
        return bool(self._outgoing)

    def take_outgoing(self) -> Buffers:
        """Return and remove the bytes to write, in order."""
        taken, self._outgoing = self._outgoing, []
        return taken

    def receive(self, data: bytes, now: int) -> list[Outcome]:
        """Process bytes that have arrived; no bytes mean that the server closed the connection."""
        if self.ended is not None:
            return []
        if not data:
            return self.end(CommunicationError("the server closed the connection; try again"))
        self.received_at, self._pinged_at = now, None
        outcomes: list[Outcome] = []
        try:
            only = self._reader.single_frame(data)
            if only is not None:
                self._take(*only, outcomes, now)
                return outcomes
            for head, body in self._reader.feed(data):
                self._take(head, body, outcomes, now)
                if self.ended is not None:
                    break
        except (MessagingError, IndexError, TypeError) as error:
            outcomes += self.end(_nonsense(error))
        return outcomes

    def _take(self, head: list[Any], body: memoryview, outcomes: list[Outcome], now: int) -> None:
        kind = head[0]
        if kind == _REPLY:
            pending = self._pending_request(head[1])
            self._answered(head[1], pending, decode_value(head[2], body), outcomes, now)
        elif kind == FrameKind.REFUSAL:
            pending = self._pending_request(head[1])
            self._answered(head[1], pending, decode_error(head[2:]), outcomes, now)
        elif kind == FrameKind.PING:
            self._send([FrameKind.PONG])
        elif kind == FrameKind.WELCOME:
            self.version = head[1]
        elif kind == FrameKind.GOODBYE:
            outcomes += self.end(decode_error(head[1:]))
        elif kind != FrameKind.PONG:
            raise InvalidArgumentError(f"a server must not send a frame of kind {kind!r:.20}")

    def _pending_request(self, number: Any) -> _Pending:
        pending = self._pending.get(number)
        if pending is None:
            raise InvalidArgumentError(f"it answered request {number!r:.20}, which is not pending")
        return pending

    def _answered(
        self, number: int, pending: _Pending, reply: Any, outcomes: list[Outcome], now: int
    ) -> None:
        """Process a decoded reply; if decoding raises, `receive` ends the conversation instead."""
        del self._pending[number]
        if not self._pending:
            self._deadlines.clear()
        if pending.request is not None:
            outcomes.append(Outcome(pending.request, reply))
            return
        undo = undo_of(pending.command, reply)
        if undo is not None:
            self.ask(Request(undo), now)

    # -- time ----------------------------------------------------------------------------------

    @property
    def next_event(self) -> int:
        """The time at which `tick` has something to do."""
        if not self._pending or self.ended is not None:
            return NEVER_US
        quiet_since = self._pinged_at
        if quiet_since is None:
            quiet_since = max(self.received_at, self._asked_at)
        first = self._deadlines[0][0] if self._deadlines else NEVER_US
        return min(first, quiet_since + QUIET_US)

    def tick(self, now: int) -> list[Outcome]:
        """Apply timeouts: of requests, and of a silent server, which is pinged first."""
        if now < self.next_event:
            return []
        outcomes: list[Outcome] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            pending = self._pending.get(number)
            if pending is None or pending.request is None:
                continue
            waited_s = (now - pending.asked_at) / SECOND_US
            outcomes.append(Outcome(pending.request, unanswered(waited_s, pending.command)))
            self.give_up(number)
            if self.received_at <= pending.asked_at:  # no bytes arrived since the request
                return outcomes + self.end(unanswered(waited_s))
        return outcomes + self._check_silence(now)

    def _check_silence(self, now: int) -> list[Outcome]:
        if not self._pending or now < self.next_event:
            return []
        if self._pinged_at is None:
            self._pinged_at = now
            self._send([FrameKind.PING])
            return []
        return self.end(unanswered((now - max(self.received_at, self._asked_at)) / SECOND_US))

    def end(self, error: MessagingError) -> list[Outcome]:
        """End the conversation: every pending request gets the error."""
        if self.ended is not None:
            return []
        self.ended = error
        pending, self._pending = self._pending, {}
        self._deadlines.clear()
        return [Outcome(p.request, error) for p in pending.values() if p.request is not None]


def _nonsense(error: Exception) -> CommunicationError:
    text = error.text if isinstance(error, MessagingError) else repr(error)
    return CommunicationError(
        f"this client cannot decode what the server sent: {text}. Check that it is a Twinbus "
        "server of the same version"
    )
