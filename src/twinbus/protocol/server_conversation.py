"""The server's end of a connection, without IO: bytes and `now` in, bytes and events out.

The driver (server/native.py, or a simulation) passes in the bytes that it has read, submits the
requests of `Arrived` events to the broker, passes in their replies with `answer`, writes the bytes
that `take_outgoing` returns, and calls `tick` at the time `next_event`.

    state      expected frames
    GREETING   HELLO within AUTHENTICATION_US, with a limited size
    OPEN       all
    LEAVING    none: the client said GOODBYE, and still gets the replies to its requests
    ENDED      none

Memory is bounded. A request waits here until there is room for its reply (credit), so a client that
does not read its replies gets no further ones. The driver stops reading from a client that sends
faster than the broker works (`may_read`). The connections of a key share further bounds for
replies and for requests (`has_reply_room`, `has_request_room` of the guard). If nothing arrives for
QUIET_US while a frame is incomplete, the conversation ends. A conversation keeps no reply that was
written. After its connection has ended, a conversation keeps nothing large, because it is part of a
reference cycle, which Python frees late.

A token is checked when it is presented, with every request, and again when a request that waited
for credit is submitted. While requests wait at the broker, their token is also checked when it
expires or its key changes. Locks in replies that the client did not get are released.
"""

from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum
from operator import itemgetter
from typing import Any, Protocol

from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    MessagingError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    AUTHENTICATION_US,
    COUNTED_STEP_BYTES,
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
from twinbus.protocol.access import Admission
from twinbus.protocol.frames import MAGIC, Buffers, Frame, FrameKind, FrameReader, frame
from twinbus.protocol.requests import Request
from twinbus.protocol.server_requests import (
    Arrived,
    Deliver,
    Event,
    ServerRequest,
    Withdrawn,
    undo_request,
    withdrawn,
)
from twinbus.protocol.wire import decode_command, encode_reply, plain_error


class ConnectionGuard(Protocol):
    """Decides which clients are admitted, and how much memory their connections may use."""

    def admit(self, token: str) -> Admission:
        """Verify a token; raise UnauthorizedError if it is not valid."""
        ...

    def recheck(self, admission: Admission) -> Admission:
        """Verify that an admission is still valid: tokens expire, keys are rotated and removed."""
        ...

    def enter(self, admission: Admission) -> None:
        """Admit the connection; raise ServerBusyError if there are too many."""
        ...

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Log the refusal of a request or a token."""
        ...

    def has_reply_room(self, used: int, more: int) -> bool:
        """Return whether replies of `more` bytes fit; this connection already uses `used` bytes.

        If not, the driver calls `balance` again when other connections have released some.
        """
        ...

    def has_request_room(self, used: int) -> bool:
        """Return whether more requests fit; this connection has `used` bytes of unanswered ones."""
        ...


class Phase(Enum):
    """The state of a conversation; see the module docstring."""

    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"
    ENDED = "ended"


_GREETING, _OPEN, _LEAVING, _ENDED = Phase  # globals are faster than attributes of the enum
_ASK = int(FrameKind.ASK)


class ServerConversation:
    """A connection, from its first byte to its end."""

    def __init__(
        self, guard: ConnectionGuard, deliver: Deliver, namespace_id: str, now: int
    ) -> None:
        self._deliver = deliver
        self.phase = Phase.GREETING
        self.admission: Admission | None = None
        self._buffered = 0  # bytes that the driver has fetched and not yet written
        self._guard = guard
        self._namespace_id = namespace_id
        self.reader = FrameReader(MAX_GREETING_BYTES, 0)
        self._magic = bytearray()
        self._last_number = 0
        self._submitted = 0  # the last request number of earlier reads
        self._dropped: set[int] = set()  # id() of requests withdrawn in the same read
        self._received_at = self._began_at = self._now = now
        self._expired_at: int | None = None  # when the expiry of the token was first noticed
        self._pinged_at: int | None = None
        self._open: dict[int, ServerRequest] = {}  # submitted to the broker, not yet answered
        self._deferred: dict[int, ServerRequest] = {}  # wait for credit, in order
        self._fetching = 0  # maximum size of the replies to open requests
        self._unanswered = 0  # size of open requests
        self._outgoing: Buffers = []
        self._outgoing_bytes = 0
        self._queued_bytes = 0  # total size of everything queued for writing so far
        # Replies with locks that are perhaps unwritten, each with `_queued_bytes` at its end.
        self._unsent: list[tuple[int, ServerRequest, Any]] = []

    # -- reading -------------------------------------------------------------------------------

    @property
    def may_read(self) -> bool:
        """Whether the driver may read more from this client."""
        return not self._is_behind and not self._is_choked and self.phase is not _ENDED

    @property
    def _is_behind(self) -> bool:
        """Whether this client, or all clients of its key together, have sent more than fits."""
        size = self._unanswered
        return size >= MAX_UNANSWERED_BYTES or (
            size >= COUNTED_STEP_BYTES and not self._guard.has_request_room(size)
        )

    @property
    def _is_ended(self) -> bool:
        return self.phase is _ENDED

    def receive(self, data: bytes, now: int) -> list[Event]:
        """Process bytes that have arrived; no bytes mean that the client closed the connection."""
        phase = self.phase
        if phase is _LEAVING or phase is _ENDED:
            return [] if data else self.lose()
        if not data:
            return self.lose()
        self._received_at = self._now = now
        self._pinged_at = None
        ready: list[Request] = []  # to be submitted to the broker
        events: list[Event] = []
        try:
            only = self.reader.single_frame(data) if phase is _OPEN else None
            if only is None:
                self._take_all(self.reader.feed(self._without_magic(data)), ready, events)
            elif only[0][0] == _ASK:
                self._ask(*only, ready)
            else:
                self._submitted = self._last_number
                self._take(*only, ready, events)
        except (MessagingError, IndexError, TypeError, ValueError) as error:
            # The bytes after an invalid frame cannot be decoded.
            events += self.end(_as_messaging_error(error))
        return [Arrived(ready), *events] if ready else events

    def received(self, count: int, now: int) -> list[Event]:
        """Process bytes that the driver has read into `reader.room`."""
        if self.phase is not _OPEN:
            return []
        self._received_at = self._now = now
        self._pinged_at = None
        ready: list[Request] = []  # to be submitted to the broker
        events: list[Event] = []
        try:
            self._take_all(self.reader.filled_in(count), ready, events)
        except (MessagingError, IndexError, TypeError, ValueError) as error:
            events += self.end(_as_messaging_error(error))
        return [Arrived(ready), *events] if ready else events

    def _take_all(self, frames: Iterable[Frame], ready: list[Request], events: list[Event]) -> None:
        self._submitted = self._last_number
        try:
            for head, body in frames:
                self._take(head, body, ready, events)
                if self.phase in (Phase.LEAVING, Phase.ENDED):
                    break
        finally:
            if self._dropped:
                ready[:] = [request for request in ready if id(request) not in self._dropped]
                self._dropped.clear()

    def _without_magic(self, data: bytes) -> bytes:
        if len(self._magic) == len(MAGIC):
            return data
        missing = len(MAGIC) - len(self._magic)
        self._magic += data[:missing]
        if not MAGIC.startswith(self._magic):
            raise InvalidArgumentError(
                f"the connection began with {bytes(self._magic)!r}; a client of the Twinbus "
                f"protocol sends {MAGIC!r} first"
            )
        return data[missing:]

    def _take(
        self, head: list[Any], body: memoryview, ready: list[Request], events: list[Event]
    ) -> None:
        kind = head[0]
        if self.phase is _GREETING:
            if kind != FrameKind.HELLO:
                raise InvalidArgumentError(
                    f"the first frame of a connection has the kind {kind!r:.20}; it must be HELLO"
                )
            self._greet(head)
        elif kind == _ASK:
            self._ask(head, body, ready)
        elif kind == FrameKind.TOKEN:
            self._renew(head)
        elif kind == FrameKind.WITHDRAW:
            self._withdraw(head[1], events)
        elif kind == FrameKind.PING:
            self._send([FrameKind.PONG])
        elif kind == FrameKind.GOODBYE:
            events += self._leave()
        elif kind != FrameKind.PONG:
            raise InvalidArgumentError(f"a client must not send a frame of kind {kind!r:.20}")

    def _greet(self, head: list[Any]) -> None:
        first, last, token, namespace_id = head[1:5]
        if type(first) is not int or type(last) is not int or not first <= last:
            raise InvalidArgumentError(
                f"HELLO has the versions {first!r:.20} and {last!r:.20}; they must be the first "
                "and the last version of the protocol that the client supports"
            )
        version = min(last, WIRE_VERSION)
        if version < max(first, FIRST_WIRE_VERSION):
            raise InvalidArgumentError(
                f"the client supports versions {first} to {last} of the protocol, this server "
                f"{FIRST_WIRE_VERSION} to {WIRE_VERSION}; upgrade the older of the two"
            )
        if type(token) is not str or not token:
            raise UnauthorizedError(
                "the connection has no token; set SharedAccessKeyName and SharedAccessKey in the "
                "connection string"
            )
        admission = self._guard.admit(token)
        if type(namespace_id) is str and namespace_id not in ("", self._namespace_id):
            raise UnauthorizedError(
                f"the connection string is for the namespace with the id {namespace_id:.40}, but "
                f"this server has the namespace {self._namespace_id}. Correct the Endpoint "
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
            raise UnauthorizedError(
                f"TOKEN has a {type(token).__name__}; it must have the new token as text"
            )
        admission = self._guard.admit(token)
        if self.admission is None or admission.id != self.admission.id:
            raise UnauthorizedError(
                "a new token must be signed with the same key as the first token of the connection"
            )
        self.admission, self._expired_at = admission, None

    def _ask(self, head: list[Any], body: memoryview, ready: list[Request]) -> None:
        number = head[1]
        if type(number) is not int or not self._last_number < number < 2**63:
            raise InvalidArgumentError(
                f"the request number {number!r:.20} is not above {self._last_number}, the previous "
                "one of the connection; request numbers must increase"
            )
        self._last_number = number
        try:
            command = decode_command(head, body)
        except MessagingError as error:
            self._queue(encode_reply(number, error))
            return
        assert self.admission is not None  # set by HELLO
        try:
            if len(self._open) + len(self._deferred) >= MAX_OPEN_REQUESTS:
                raise ServerBusyError(
                    f"the connection has {MAX_OPEN_REQUESTS} open requests, the maximum; wait for "
                    "replies before you send more",
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
        is_large = request.reply_bytes or request.waits
        if self._deferred or ((used or is_large) and not self._has_credit(request)):
            self._deferred[number] = request
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
    def reply_bytes(self) -> int:
        """How many bytes of replies are unread or expected."""
        return self._fetching + self._outgoing_bytes + self._buffered

    @property
    def request_bytes(self) -> int:
        """The size of the unanswered requests."""
        return self._unanswered

    @property
    def must_be_counted(self) -> bool:
        """Whether so many bytes are unread, expected or unanswered that the driver counts them."""
        size = self._fetching + self._unanswered + self._outgoing_bytes + self._buffered
        return size >= COUNTED_STEP_BYTES

    @property
    def has_deferred(self) -> bool:
        """Whether requests wait for credit."""
        return bool(self._deferred)

    @property
    def deferred_requests(self) -> "list[ServerRequest]":
        """The requests that wait for credit, in order."""
        return list(self._deferred.values())

    @property
    def open_requests(self) -> "list[ServerRequest]":
        """The requests that the broker has and has not answered."""
        return list(self._open.values())

    @property
    def unsent_requests(self) -> "list[ServerRequest]":
        """The answered requests whose replies contain locks and are not written yet."""
        return [request for _, request, _ in self._unsent]

    @property
    def is_pinged(self) -> bool:
        """Whether nothing has arrived since the last ping to the client."""
        return self._pinged_at is not None

    @property
    def _is_choked(self) -> bool:
        """Whether the client has left so many bytes of replies unread that it must read first."""
        return self.unread_bytes > MAX_UNREAD_BYTES

    def _hand_over(self, request: ServerRequest, ready: list[Request]) -> None:
        self._open[request.number] = request
        self._fetching += request.reply_bytes
        ready.append(request)

    def _has_credit(self, request: ServerRequest) -> bool:
        """Return whether there is room for the reply; one request is always allowed."""
        used, more = self.reply_bytes, request.reply_bytes
        if used and used + more > MAX_UNREAD_BYTES:
            return False
        return not (more or request.waits) or self._guard.has_reply_room(used, more)

    def balance(self, now: int) -> list[Event]:
        """Submit deferred requests for which there is credit, and refuse those no longer allowed.

        Requests that wait at the broker use no credit, so their replies have no bound. While the
        client does not read, such requests are withdrawn from the broker and wait here instead.
        """
        self._now = now
        if self._is_choked:
            return self._defer_waiting(now)
        ready: list[Request] = []
        while self._deferred and not self._is_ended:
            first = next(iter(self._deferred.values()))
            if not self._has_credit(first):
                break
            del self._deferred[first.number]
            error = self._revoked(first)
            if error is None:
                self._hand_over(first, ready)
            else:
                self._refuse_deferred(first, error)
        return [Arrived(ready)] if ready else []

    def _refuse_deferred(self, request: ServerRequest, error: MessagingError) -> None:
        self._unanswered -= request.size
        self._guard.refused(self.admission, error)
        self._queue(encode_reply(request.number, error))

    def _defer_waiting(self, now: int) -> list[Event]:
        waiting = [request for request in self._open.values() if request.waits]
        events = self._withdraw_all()
        for request in waiting:
            deferred = request.waiting_on(now)
            self._unanswered += deferred.size
            self._deferred[deferred.number] = deferred
        return events

    # -- replies -------------------------------------------------------------------------------

    def answer(self, request: ServerRequest, value: Any) -> Request | None:
        """Process a reply; return the request that releases its locks if it is not sent.

        The driver then checks for outgoing bytes.
        """
        number = request.number
        if self._open.get(number) is not request:  # withdrawn, or the client has gone
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
        if request.may_return_locks and not isinstance(value, MessagingError):
            self._unsent.append((self._queued_bytes, request, value))
        return None

    def _revoked(self, request: ServerRequest) -> MessagingError | None:
        """Return the error if the key or token of a request became invalid after it arrived.

        Only a request that waits at the broker may continue for a moment after its token expired.
        """
        assert self.admission is not None  # set by HELLO
        try:
            self.admission = self._guard.recheck(self.admission)
            self.admission.check(request.command)
        except UnauthorizedError as error:
            return None if request.waits and self._is_renewable(error) else error
        request.principal = self.admission
        return None

    def _is_renewable(self, error: UnauthorizedError) -> bool:
        """Return whether the client still has time to renew its token.

        Clients renew in time. But after the clock was set, or the machine was suspended, a token
        may have expired suddenly, and the client needs a moment to notice.
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
        """Whether there are bytes to write."""
        return bool(self._outgoing)

    def take_outgoing(self) -> Buffers:
        """Return the bytes to write, in order; the driver then calls `note_buffered`."""
        taken, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        return taken

    def note_buffered(self, size: int) -> None:
        """Record how many bytes the driver has fetched and not yet written."""
        self._buffered = size
        if self._unsent:
            written = self._queued_bytes - self._outgoing_bytes - size
            del self._unsent[: bisect_right(self._unsent, written, key=itemgetter(0))]

    @property
    def needs_flush(self) -> bool:
        """Whether the driver must write, close the connection, or stop reading."""
        return (
            bool(self._outgoing)
            or self.phase is not _OPEN
            or self._is_behind
            or self._buffered > MAX_UNREAD_BYTES
        )

    def is_calm(self, buffered: int) -> bool:
        """Record the unwritten bytes of the driver; return whether there is nothing left to do.

        That means: everything is written, no request waits for credit, and the driver reads on.
        """
        self.note_buffered(buffered)
        return not (buffered or self._deferred or self.needs_flush)

    # -- withdrawing and ending ----------------------------------------------------------------

    def _withdraw(self, number: Any, events: list[Event]) -> None:
        """End a waiting request that the client withdrew, and send the client a confirmation.

        All requests that are withdrawn in one read become one event.
        """
        if type(number) is not int:
            return
        request = self._deferred.get(number) or self._open.get(number)
        if request is None or not request.waits:
            return
        self._queue(encode_reply(number, withdrawn()))
        if number in self._deferred:
            self._unanswered -= self._deferred.pop(number).size
            return
        self._forget(request)
        if number > self._submitted:  # not submitted to the broker yet
            self._dropped.add(id(request))
        elif events and isinstance(events[-1], Withdrawn):
            events[-1].requests.append(request)
        else:
            events.append(Withdrawn([request]))

    def _forget(self, request: ServerRequest) -> None:
        del self._open[request.number]
        self._fetching -= request.reply_bytes
        self._unanswered -= request.size

    def _withdraw_all(self) -> list[Event]:
        waiting = [request for request in self._open.values() if request.waits]
        for request in waiting:
            self._forget(request)
        return [Withdrawn([*waiting])] if waiting else []

    def _revoke_waits(self, error: MessagingError) -> list[Event]:
        """End the waiting requests, because their token or key is no longer valid."""
        waiting = [request for request in self._open.values() if request.waits]
        events = self._withdraw_all()
        for request in waiting:
            self._queue(encode_reply(request.number, error))
        return events

    def _leave(self) -> list[Event]:
        self.phase = Phase.LEAVING
        self._deferred = {
            n: deferred for n, deferred in self._deferred.items() if not deferred.waits
        }
        for request in list(self._open.values()):
            if request.waits and request.number > self._submitted:  # not submitted to the broker
                self._dropped.add(id(request))
                self._forget(request)
        return self._withdraw_all()

    @property
    def is_done(self) -> bool:
        """Whether the driver must close the connection once everything is written."""
        if self.phase is Phase.LEAVING:
            return not self._open and not self._deferred
        return self.phase is Phase.ENDED

    def end(self, error: MessagingError) -> list[Event]:
        """End the conversation with an error; the driver writes it, then closes the connection."""
        if self._is_ended:
            return []
        if isinstance(error, UnauthorizedError | ServerBusyError):
            self._guard.refused(self.admission, error)
        self._send([FrameKind.GOODBYE, *plain_error(error)])
        return self._close()

    def lose(self) -> list[Event]:
        """Handle the loss of the connection; undo the locks in replies that were not written."""
        events = [] if self._is_ended else self._close()
        undos = [undo_request(request, value) for _, request, value in self._unsent]
        self._unsent.clear()
        self._outgoing, self._outgoing_bytes, self._buffered = [], 0, 0
        given_back = [undo for undo in undos if undo is not None]
        return [*events, Arrived(given_back)] if given_back else events

    def _close(self) -> list[Event]:
        self.phase = Phase.ENDED
        events = self._withdraw_all()
        self._deferred.clear()
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
        """The time at which `tick` has something to do."""
        if self.phase is Phase.ENDED:
            return NEVER_US
        if self.phase is Phase.GREETING:
            return self._began_at + AUTHENTICATION_US
        if self._open or self.reader.filled:
            since = self._received_at if self._pinged_at is None else self._pinged_at
            return since + QUIET_US
        return NEVER_US

    def tick(self, now: int) -> list[Event]:
        """Apply timeouts of connections without a token and of silent clients."""
        if now < self.next_event:
            return []
        if self.phase is Phase.GREETING:
            return self.end(
                UnauthorizedError(
                    f"no token arrived within {AUTHENTICATION_US // SECOND_US} s of connecting; "
                    "connect again and send HELLO with a token at once"
                )
            )
        if self._pinged_at is None and not self.reader.filled:
            self._pinged_at = now
            self._send([FrameKind.PING])
            return []
        seconds = (now - self._received_at) // SECOND_US
        return self.end(
            CommunicationError(
                f"nothing arrived from the client for {seconds} s, so the server closes the "
                "connection; connect again"
            )
        )

    def check_admission(self, now: int) -> list[Event]:
        """Check that the token is still valid for waiting requests; otherwise end them."""
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


def _as_messaging_error(error: Exception) -> MessagingError:
    if isinstance(error, MessagingError):
        return error
    return InvalidArgumentError(f"a frame has a missing or invalid part: {error!r:.200}")
