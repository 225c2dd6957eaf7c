"""The client's end of a connection, without IO: bytes and `now` in, bytes and outcomes out.

The driver (namespace/server.py, or a simulation) hands in requests and what it has read, writes
what `take_outgoing` returns, calls `tick` when `next_event` has come, and delivers the outcomes.
`now` is in microseconds and never goes back.

    a request is answered by the reply with its number, by its deadline, or by the end of the
    connection, whichever comes first: it never stays pending
    a request that was given up is withdrawn at the server; if its reply comes all the same, the
    locks in it are given back
    a server that is silent while somebody waits is pinged, and then given up
"""

import heapq
from dataclasses import dataclass
from typing import Any

from twinbus.errors import CommunicationError, InvalidArgumentError, MessagingError
from twinbus.limits import FIRST_WIRE_VERSION, NEVER_US, QUIET_US, SECOND_US, WIRE_VERSION
from twinbus.protocol.requests import Request, unanswered
from twinbus.protocol.table import undo_of, waits
from twinbus.protocol.wire import (
    MAGIC,
    Buffers,
    FrameKind,
    FrameReader,
    decode_error,
    decode_value,
    encode_ask,
    frame,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request: a value, or an error to be raised."""

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
    request: Request | None  # None: nobody waits any more
    command: Any
    asked_at: int
    deadline: int


_REPLY = int(FrameKind.REPLY)


class ClientConversation:
    """One connection, from its first byte to its end. One that has ended is not used again."""

    def __init__(self, token: str, namespace_id: str) -> None:
        self.ended: MessagingError | None = None  # why no more requests are taken
        self.version: int | None = None  # of the protocol; None: the server has not answered yet
        self._reader = FrameReader()
        self._outgoing: Buffers = [MAGIC]
        self._pending: dict[int, _Pending] = {}
        self._deadlines: list[tuple[int, int]] = []  # (when, request id), a heap
        self._last_number = 0
        self.heard_at = 0  # when the server was last heard of
        self._asked_at = 0  # since when somebody waits
        self._pinged_at: int | None = None
        self._send([FrameKind.HELLO, FIRST_WIRE_VERSION, WIRE_VERSION, token, namespace_id])

    # -- asking --------------------------------------------------------------------------------

    def ask(self, request: Request, now: int, deadline: int = NEVER_US) -> int:
        """Send a request and return its number; what cannot be sent raises."""
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
        """Stop waiting for a reply; locks that come with it are given back."""
        pending = self._pending.get(number)
        if pending is None or pending.request is None:
            return
        pending.request = None
        if waits(pending.command):
            self._send([FrameKind.WITHDRAW, number])

    def present(self, token: str) -> None:
        """Send a new token in place of the one that expires."""
        self._send([FrameKind.TOKEN, token])

    def say_goodbye(self) -> None:
        """Tell the server that no more will come; it answers what it has and hangs up."""
        self._send([FrameKind.GOODBYE, "", "", {}])

    @property
    def has_pending(self) -> bool:
        """Whether somebody waits for a reply."""
        return any(pending.request is not None for pending in self._pending.values())

    # -- bytes ---------------------------------------------------------------------------------

    def _send(self, head: list[Any]) -> None:
        if self.ended is None:
            self._outgoing += frame(head)

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to write."""
        return bool(self._outgoing)

    def take_outgoing(self) -> Buffers:
        """Return what is to be written, in order, and forget it."""
        taken, self._outgoing = self._outgoing, []
        return taken

    def receive(self, data: bytes, now: int) -> list[Outcome]:
        """Take bytes that have arrived; no bytes mean that the server has hung up."""
        if self.ended is not None:
            return []
        if not data:
            return self.end(CommunicationError("the server ended the connection; try again"))
        self.heard_at, self._pinged_at = now, None
        outcomes: list[Outcome] = []
        try:
            only = self._reader.whole(data)
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
            raise InvalidArgumentError(f"a server sends no frame of kind {kind!r:.20}")

    def _pending_request(self, number: Any) -> _Pending:
        pending = self._pending.get(number)
        if pending is None:
            raise InvalidArgumentError(f"request {number!r:.20} is not pending")
        return pending

    def _answered(
        self, number: int, pending: _Pending, reply: Any, outcomes: list[Outcome], now: int
    ) -> None:
        """Take a reply; one that made no sense has ended the conversation, and this request."""
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
        """When `tick` has something to do."""
        if not self._pending or self.ended is not None:
            return NEVER_US
        quiet_since = self._pinged_at
        if quiet_since is None:
            quiet_since = max(self.heard_at, self._asked_at)
        first = self._deadlines[0][0] if self._deadlines else NEVER_US
        return min(first, quiet_since + QUIET_US)

    def tick(self, now: int) -> list[Outcome]:
        """Do what time brings: requests time out, a silent server is pinged and given up."""
        if now < self.next_event:
            return []
        outcomes: list[Outcome] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            pending = self._pending.get(number)
            if pending is None or pending.request is None:
                continue
            error = unanswered((now - pending.asked_at) / SECOND_US)
            outcomes.append(Outcome(pending.request, error))
            self.give_up(number)
            if self.heard_at <= pending.asked_at:  # nothing at all came in that time
                return outcomes + self.end(error)
        return outcomes + self._check_silence(now)

    def _check_silence(self, now: int) -> list[Outcome]:
        if not self._pending or now < self.next_event:
            return []
        if self._pinged_at is None:
            self._pinged_at = now
            self._send([FrameKind.PING])
            return []
        return self.end(unanswered((now - max(self.heard_at, self._asked_at)) / SECOND_US))

    def end(self, error: MessagingError) -> list[Outcome]:
        """End the conversation: everyone who waits gets the error."""
        if self.ended is not None:
            return []
        self.ended = error
        pending, self._pending = self._pending, {}
        self._deadlines.clear()
        return [Outcome(p.request, error) for p in pending.values() if p.request is not None]


def _nonsense(error: Exception) -> CommunicationError:
    text = error.text if isinstance(error, MessagingError) else repr(error)
    return CommunicationError(
        f"the server sent something that this client does not understand: {text}. Is it a Twinbus "
        "server of the same version?"
    )
