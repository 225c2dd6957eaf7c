"""The server's end of a connection, without IO: bytes and `now` in, bytes and events out.

The driver (server/native.py, or a simulation) hands in what it has read, hands the requests of
`Arrived` events over to the broker, reports their replies with `answer`, writes what
`take_outgoing` returns, and calls `tick` when `next_event` has come.

    state      what may come
    GREETING   HELLO within AUTHENTICATION_US, and nothing that takes memory
    OPEN       everything
    LEAVING    nothing: the client said goodbye, and gets the replies it is still owed
    ENDED      nothing

Memory is bounded: a client that does not read its replies gets no more (credit), one that sends
faster than the broker works is read no further (`may_read`), and an incomplete frame must go on.
A conversation keeps no reply that has left. When the connection is gone it keeps nothing large: it
is part of a reference cycle, which Python frees much later.
A token is checked when it is presented, with every request, and for requests that wait also when it
expires or its key changes. Locks that a client never heard of are given back.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from operator import itemgetter
from typing import Any, Protocol

from twinbus.clock import to_us
from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    MessagingError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    AUTHENTICATION_US,
    FIRST_WIRE_VERSION,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_HEAD_BYTES,
    MAX_OPEN_REQUESTS,
    MAX_UNANSWERED_BYTES,
    MAX_UNREAD_BYTES,
    NEVER_US,
    QUIET_US,
    SECOND_US,
    SERVER_BUSY_RETRY_S,
    TOKEN_GRACE_US,
    WIRE_VERSION,
)
from twinbus.protocol.access import Admission, Principal
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import Request
from twinbus.protocol.table import largest_reply, row_of, size_of, undo_of, waits
from twinbus.protocol.wire import (
    MAGIC,
    Buffers,
    Frame,
    FrameKind,
    FrameReader,
    decode_command,
    encode_reply,
    frame,
    plain_error,
)


class Guard(Protocol):
    """Decides who is let in."""

    def admit(self, token: str) -> Admission:
        """Check a token; raise UnauthorizedError for one that is not good."""
        ...

    def recheck(self, admission: Admission) -> Admission:
        """Check that an admission still holds: tokens expire, keys are rotated and removed."""
        ...

    def enter(self, admission: Admission) -> None:
        """Let the connection in; raise ServerBusyError when there are too many."""
        ...

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Note that a request or a token was refused."""
        ...


class ServerRequest(Request):
    """A request of a connection. The thread that has the turn answers it, which may be any."""

    __slots__ = ("_deliver", "may_hold_locks", "number", "read_at", "reply_bytes", "size", "waits")

    def __init__(
        self,
        deliver: "Deliver",
        number: int,
        command: Command[Any],
        principal: Principal,
        now: int,
        size: int = 0,  # of its frame; 0: it came some other way
    ) -> None:
        self.command, self.principal = command, principal
        self._deliver = deliver
        self.number = number
        self.read_at = now
        row = row_of(command)
        self.waits = row.may_wait and waits(command)
        # Requests that wait are small, and may be many; those beside them must be read on.
        self.size = 0 if self.waits else size or size_of(command)
        self.reply_bytes = largest_reply(command) if row.fetches and not self.waits else 0
        self.may_hold_locks = row.undo is not None  # its reply

    def waiting_on(self, now: int) -> "ServerRequest":
        """Return a request that waits for the rest of the time."""
        left_us = max(to_us(self.command.wait) - (now - self.read_at), 1)
        command = replace(self.command, wait=timedelta(microseconds=left_us))
        return ServerRequest(self._deliver, self.number, command, self.principal, now)

    def answer(self, value: Any) -> None:
        """Send the reply to the client."""
        self._deliver(self, value)

    def fail(self, error: MessagingError) -> None:
        """Send the error to the client."""
        self._deliver(self, error)


Deliver = Callable[[ServerRequest, Any], None]  # takes replies of the broker to `answer`


@dataclass(frozen=True, slots=True)
class Arrived:
    """Requests for the broker, in order."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Requests that wait at the broker and that nobody waits for any more."""

    requests: Sequence[Request]


Event = Arrived | Withdrawn


class Phase(Enum):
    """Where a conversation stands; see the module docstring."""

    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"
    ENDED = "ended"


_GREETING, _OPEN, _LEAVING, _ENDED = Phase  # Python finds them quicker here than in their class
_ASK = int(FrameKind.ASK)


class ServerConversation:
    """One connection, from its first byte to its end."""

    def __init__(self, guard: Guard, deliver: Deliver, namespace_id: str, now: int) -> None:
        self._deliver = deliver
        self.phase = Phase.GREETING
        self.admission: Admission | None = None
        self._buffered = 0  # bytes that the driver has taken and not yet written
        self._guard = guard
        self._namespace_id = namespace_id
        self.reader = FrameReader(MAX_GREETING_BYTES, 0)
        self._magic = bytearray()
        self._last_number = 0
        self._heard_at = self._began_at = self._now = now
        self._expired_at: int | None = None  # when the token was first seen to have expired
        self._pinged_at: int | None = None
        self._open: dict[int, ServerRequest] = {}  # at the broker
        self._held: dict[int, ServerRequest] = {}  # wait for credit, in order
        self._fetching = 0  # bytes that replies of open requests may bring
        self._unanswered = 0  # bytes that open requests brought
        self._outgoing: Buffers = []
        self._outgoing_bytes = 0
        self._queued_bytes = 0  # of everything that was to be written so far
        # Replies with locks that may not have left, each with `_queued_bytes` behind its last byte.
        self._unsent: list[tuple[int, ServerRequest, Any]] = []

    # -- reading -------------------------------------------------------------------------------

    @property
    def may_read(self) -> bool:
        """Whether the driver shall read more from this client."""
        return (
            self._unanswered < MAX_UNANSWERED_BYTES
            and not self._is_choked
            and self.phase is not _ENDED
        )

    @property
    def _is_ended(self) -> bool:
        return self.phase is _ENDED

    def receive(self, data: bytes, now: int) -> list[Event]:
        """Take bytes that have arrived; no bytes mean that the client has hung up."""
        phase = self.phase
        if phase is _LEAVING or phase is _ENDED:
            return [] if data else self.lose()
        if not data:
            return self.lose()
        self._heard_at = self._now = now
        self._pinged_at = None
        ready: list[Request] = []  # for the broker
        events: list[Event] = []
        try:
            only = self.reader.whole(data) if phase is _OPEN else None
            if only is None:
                self._take_all(self.reader.feed(self._without_magic(data)), ready, events)
            elif only[0][0] == _ASK:
                self._ask(*only, ready)
            else:
                self._take(*only, ready, events)
        except (MessagingError, IndexError, TypeError, ValueError) as error:
            # Nothing after it can be understood.
            events += self.end(_as_messaging_error(error))
        return [Arrived(ready), *events] if ready else events

    def received(self, count: int, now: int) -> list[Event]:
        """Take bytes that the driver has read to where `reader.room` said."""
        if self.phase is not _OPEN:
            return []
        self._heard_at = self._now = now
        self._pinged_at = None
        ready: list[Request] = []  # for the broker
        events: list[Event] = []
        try:
            self._take_all(self.reader.filled_in(count), ready, events)
        except (MessagingError, IndexError, TypeError, ValueError) as error:
            events += self.end(_as_messaging_error(error))
        return [Arrived(ready), *events] if ready else events

    def _take_all(self, frames: Iterable[Frame], ready: list[Request], events: list[Event]) -> None:
        for head, body in frames:
            self._take(head, body, ready, events)
            if self.phase in (Phase.LEAVING, Phase.ENDED):
                break

    def _without_magic(self, data: bytes) -> bytes:
        if len(self._magic) == len(MAGIC):
            return data
        missing = len(MAGIC) - len(self._magic)
        self._magic += data[:missing]
        if not MAGIC.startswith(self._magic):
            raise InvalidArgumentError("the client does not speak the protocol of Twinbus")
        return data[missing:]

    def _take(
        self, head: list[Any], body: memoryview, ready: list[Request], events: list[Event]
    ) -> None:
        kind = head[0]
        if self.phase is _GREETING:
            if kind != FrameKind.HELLO:
                raise InvalidArgumentError("a connection begins with HELLO")
            self._greet(head)
        elif kind == _ASK:
            self._ask(head, body, ready)
        elif kind == FrameKind.TOKEN:
            self._renew(head)
        elif kind == FrameKind.WITHDRAW:
            events += self._withdraw(head[1], ready)
        elif kind == FrameKind.PING:
            self._send([FrameKind.PONG])
        elif kind == FrameKind.GOODBYE:
            events += self._leave(ready)
        elif kind != FrameKind.PONG:
            raise InvalidArgumentError(f"a client sends no frame of kind {kind!r:.20}")

    def _greet(self, head: list[Any]) -> None:
        first, last, token, namespace_id = head[1:5]
        if type(first) is not int or type(last) is not int or not first <= last:
            raise InvalidArgumentError("HELLO names no versions of the protocol")
        version = min(last, WIRE_VERSION)
        if version < max(first, FIRST_WIRE_VERSION):
            raise InvalidArgumentError(
                f"the client speaks versions {first} to {last} of the protocol, and this server "
                f"{FIRST_WIRE_VERSION} to {WIRE_VERSION}; upgrade the older of the two"
            )
        if type(token) is not str or not token:
            raise UnauthorizedError(
                "the connection brings no token; give SharedAccessKeyName and SharedAccessKey in "
                "the connection string"
            )
        admission = self._guard.admit(token)
        if type(namespace_id) is str and namespace_id not in ("", self._namespace_id):
            raise UnauthorizedError(
                f"the connection string means the namespace with the id {namespace_id:.40}, and "
                f"this server has the one with the id {self._namespace_id}. Correct the Endpoint "
                "or NamespaceId"
            )
        self._guard.enter(admission)
        self.admission = admission
        self.phase = Phase.OPEN
        self.reader.max_head_bytes = MAX_HEAD_BYTES
        self.reader.max_body_bytes = MAX_FRAME_BYTES
        self._send([FrameKind.WELCOME, version, self._namespace_id])

    def _renew(self, head: list[Any]) -> None:
        token = head[1]
        if type(token) is not str:
            raise UnauthorizedError("a token is text")
        admission = self._guard.admit(token)
        if self.admission is None or admission.id != self.admission.id:
            raise UnauthorizedError(
                "a new token must be signed with the key that the connection began with"
            )
        self.admission, self._expired_at = admission, None

    def _ask(self, head: list[Any], body: memoryview, ready: list[Request]) -> None:
        number = head[1]
        if type(number) is not int or not self._last_number < number < 2**63:
            raise InvalidArgumentError("requests are numbered in ascending order")
        self._last_number = number
        try:
            command = decode_command(head, body)
        except MessagingError as error:
            self._queue(encode_reply(number, error))
            return
        assert self.admission is not None  # it was greeted
        try:
            if len(self._open) + len(self._held) >= MAX_OPEN_REQUESTS:
                raise ServerBusyError(
                    f"the connection has {MAX_OPEN_REQUESTS} open requests; wait for replies",
                    retry_after_s=SERVER_BUSY_RETRY_S,
                )
            self.admission = self._guard.recheck(self.admission)
            self.admission.check(command)
        except MessagingError as error:
            if isinstance(error, UnauthorizedError):
                self._guard.refused(self.admission, error)
            self._queue(encode_reply(number, error))
            return
        size = self.reader.frame_bytes
        request = ServerRequest(self._deliver, number, command, self.admission, self._now, size)
        self._unanswered += request.size
        used = self._fetching or self._outgoing_bytes or self._buffered
        if self._held or (used and not self._has_credit(request)):
            self._held[number] = request
        else:
            self._open[number] = request
            self._fetching += request.reply_bytes
            ready.append(request)

    # -- credit --------------------------------------------------------------------------------

    @property
    def unread_bytes(self) -> int:
        """How many bytes of replies the client has not read."""
        return self._outgoing_bytes + self._buffered

    @property
    def _is_choked(self) -> bool:
        return self.unread_bytes > MAX_UNREAD_BYTES

    def _hand_over(self, request: ServerRequest, ready: list[Request]) -> None:
        self._open[request.number] = request
        self._fetching += request.reply_bytes
        ready.append(request)

    def _has_credit(self, request: ServerRequest) -> bool:
        """Whether the reply of a request will find room; one may always be under way."""
        used = self._fetching + self.unread_bytes
        return not used or used + request.reply_bytes <= MAX_UNREAD_BYTES

    def balance(self, now: int) -> list[Event]:
        """Hand over held requests for which there is credit; hold waits while there is none.

        Requests that wait at the broker have no bound on their replies. While the client does not
        read, they wait here instead.
        """
        if self._is_choked:
            return self._hold_waits(now)
        ready: list[Request] = []
        while self._held and not self._is_ended:
            first = next(iter(self._held.values()))
            if not self._has_credit(first):
                break
            self._hand_over(self._held.pop(first.number), ready)
        return [Arrived(ready)] if ready else []

    def _hold_waits(self, now: int) -> list[Event]:
        waiting = [request for request in self._open.values() if request.waits]
        events = self._withdraw_all()
        for request in waiting:
            held = request.waiting_on(now)
            self._unanswered += held.size
            self._held[held.number] = held
        return events

    # -- replies -------------------------------------------------------------------------------

    def answer(self, request: ServerRequest, value: Any) -> Request | None:
        """Take a reply of the broker; return what gives its locks back if the client is gone.

        The driver looks for outgoing bytes afterwards.
        """
        number = request.number
        if self._open.get(number) is not request:  # withdrawn, or the client is gone
            return undo_request(request, value)
        del self._open[number]
        self._fetching -= request.reply_bytes
        self._unanswered -= request.size
        error = self._revoked(request) if request.waits else None
        if error is not None:
            self._queue(encode_reply(request.number, error))
            return undo_request(request, value)
        try:
            self._queue(encode_reply(request.number, value))
        except MessagingError as unsendable:
            self._queue(encode_reply(request.number, unsendable))
            return undo_request(request, value)
        if request.may_hold_locks and not isinstance(value, MessagingError):
            self._unsent.append((self._queued_bytes, request, value))
        return None

    def _revoked(self, request: ServerRequest) -> MessagingError | None:
        """Return why a request that waited must not be answered: its key or token has gone."""
        if self.admission is None:
            return None
        try:
            self.admission = self._guard.recheck(self.admission)
            self.admission.check(request.command)
        except UnauthorizedError as error:
            return None if self._is_renewable(error) else error
        return None

    def _is_renewable(self, error: UnauthorizedError) -> bool:
        """Whether the client still has time to renew its token.

        Clients renew in time. But when a clock is set, or the machine was asleep, a token expires
        from one moment to the next, and the client needs a moment to notice.
        """
        if not error.facts.get("expired"):
            return False
        if self._expired_at is None:
            self._expired_at = self._now
        return self._now - self._expired_at < TOKEN_GRACE_US

    def _send(self, head: list[Any]) -> None:
        self._queue(frame(head))

    def _queue(self, pieces: Buffers) -> None:
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        self._outgoing += pieces
        self._outgoing_bytes += size
        self._queued_bytes += size

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to write."""
        return bool(self._outgoing)

    def take_outgoing(self) -> Buffers:
        """Return what is to be written, in order; `note_buffered` says what became of it."""
        taken, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        return taken

    def note_buffered(self, size: int) -> None:
        """Note how many bytes the driver has taken and not yet written."""
        self._buffered = size
        if self._unsent:
            written = self._queued_bytes - self._outgoing_bytes - size
            del self._unsent[: bisect_right(self._unsent, written, key=itemgetter(0))]

    @property
    def needs_flush(self) -> bool:
        """Whether the driver has something to write, must hang up, or must stop reading."""
        return (
            bool(self._outgoing)
            or self.phase is not _OPEN
            or self._unanswered >= MAX_UNANSWERED_BYTES
            or self._buffered > MAX_UNREAD_BYTES
        )

    def is_calm(self, buffered: int) -> bool:
        """Note how many bytes the driver has yet to write; return whether that was all.

        Then everything was written, no request waits for credit, and the driver reads on.
        """
        self.note_buffered(buffered)
        return not (buffered or self._held or self.needs_flush)

    # -- withdrawing and ending ----------------------------------------------------------------

    def _withdraw(self, number: Any, ready: list[Request]) -> list[Event]:
        """Let a request that waits go: the client gave it up, and hears that it is gone."""
        if type(number) is not int:
            return []
        request = self._held.get(number) or self._open.get(number)
        if request is None or not request.waits:
            return []
        self._queue(encode_reply(number, withdrawn()))
        if number in self._held:
            self._unanswered -= self._held.pop(number).size
            return []
        self._forget(request)
        if request in ready:  # the broker has not heard of it yet
            ready.remove(request)
            return []
        return [Withdrawn([request])]

    def _forget(self, request: ServerRequest) -> None:
        del self._open[request.number]
        self._fetching -= request.reply_bytes
        self._unanswered -= request.size

    def _withdraw_all(self) -> list[Event]:
        waiting = [request for request in self._open.values() if request.waits]
        for request in waiting:
            self._forget(request)
        return [Withdrawn(waiting)] if waiting else []

    def _revoke_waits(self, error: MessagingError) -> list[Event]:
        """End the requests that wait: their token or key is no longer good."""
        waiting = [request for request in self._open.values() if request.waits]
        events = self._withdraw_all()
        for request in waiting:
            self._queue(encode_reply(request.number, error))
        return events

    def _leave(self, ready: list[Request]) -> list[Event]:
        self.phase = Phase.LEAVING
        self._held = {n: held for n, held in self._held.items() if not held.waits}
        for request in [request for request in self._open.values() if request.waits]:
            if request in ready:  # the broker has not heard of it yet
                ready.remove(request)
                self._forget(request)
        return self._withdraw_all()

    @property
    def is_done(self) -> bool:
        """Whether the driver shall hang up, once everything is written."""
        if self.phase is Phase.LEAVING:
            return not self._open and not self._held
        return self.phase is Phase.ENDED

    def end(self, error: MessagingError) -> list[Event]:
        """Tell the client why the connection ends, and end it when that is written."""
        if self._is_ended:
            return []
        if isinstance(error, UnauthorizedError | ServerBusyError):
            self._guard.refused(self.admission, error)
        self._send([FrameKind.GOODBYE, *plain_error(error)])
        return self._close()

    def lose(self) -> list[Event]:
        """Take note that the connection is gone; locks of replies that did not leave are undone."""
        events = [] if self._is_ended else self._close()
        undos = [undo_request(request, value) for _, request, value in self._unsent]
        self._unsent.clear()
        self._outgoing, self._outgoing_bytes, self._buffered = [], 0, 0
        given_back = [undo for undo in undos if undo is not None]
        return [*events, Arrived(given_back)] if given_back else events

    def _close(self) -> list[Event]:
        self.phase = Phase.ENDED
        events = self._withdraw_all()
        self._held.clear()
        self._open.clear()
        self.reader.discard()
        self._fetching = self._unanswered = 0
        return events

    # -- time ----------------------------------------------------------------------------------

    @property
    def _has_waits(self) -> bool:
        return any(request.waits for request in self._open.values())

    @property
    def next_event(self) -> int:
        """When `tick` has something to do."""
        if self.phase is Phase.ENDED:
            return NEVER_US
        if self.phase is Phase.GREETING:
            return self._began_at + AUTHENTICATION_US
        if self._open or self.reader.filled:
            since = self._heard_at if self._pinged_at is None else self._pinged_at
            return since + QUIET_US
        return NEVER_US

    def tick(self, now: int) -> list[Event]:
        """Do what time brings: strangers and clients that fell silent are let go."""
        if now < self.next_event:
            return []
        if self.phase is Phase.GREETING:
            return self.end(
                UnauthorizedError(
                    f"no token came within {AUTHENTICATION_US // SECOND_US} s of connecting"
                )
            )
        if self._pinged_at is None and not self.reader.filled:
            self._pinged_at = now
            self._send([FrameKind.PING])
            return []
        seconds = (now - self._heard_at) // SECOND_US
        return self.end(CommunicationError(f"nothing came from the client for {seconds} s"))

    def check_admission(self, now: int) -> list[Event]:
        """Check that the token still holds for requests that wait; else end these."""
        self._now = now
        if self.admission is None or not self._has_waits:
            return []
        try:
            self.admission = self._guard.recheck(self.admission)
            for request in self._open.values():
                if request.waits:
                    self.admission.check(request.command)
        except UnauthorizedError as error:
            if self._is_renewable(error):
                return []
            self._guard.refused(self.admission, error)
            return self._revoke_waits(error)
        return []


def undo_request(request: Request, value: Any) -> Request | None:
    """Return the request that gives back the locks of a reply that its client will not get."""
    if isinstance(value, MessagingError):
        return None
    undo = undo_of(request.command, value)
    return None if undo is None else Request(undo)


def withdrawn() -> MessagingError:
    """Return the answer to a request that its client withdrew."""
    return CommunicationError("the client withdrew the request")


def _as_messaging_error(error: Exception) -> MessagingError:
    if isinstance(error, MessagingError):
        return error
    return InvalidArgumentError(f"a frame lacks a part: {error}")
