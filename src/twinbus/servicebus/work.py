"""What the parts of a Service Bus conversation share: requests to the broker, and access rights.

A part passes a command to `Work.ask` with a function `then` for its reply. The driver submits the
request to the broker. When the reply arrives, it calls `answer` of the conversation in its own
thread, which calls `then` with the value or with the error.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from twinbus.amqp.connection import AmqpConnection
from twinbus.entities import DEAD_LETTER_SUFFIX, EntityDescription
from twinbus.errors import (
    EntityDisabledError,
    EntityNotFoundError,
    MessagingError,
    QuotaExceededError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    COUNTED_STEP_BYTES,
    MAX_ADDRESS_CHARACTERS,
    MAX_AMQP_LINKS,
    MAX_OPEN_REQUESTS,
    MAX_RECEIVE_BYTES,
    MAX_UNANSWERED_BYTES,
    MAX_UNREAD_BYTES,
    SERVICE_BUS_DEFERRED_REQUESTS,
    SERVICE_BUS_FETCH_BYTES,
)
from twinbus.protocol.access import Admission
from twinbus.protocol.commands import Command, Receive, Send, Settle
from twinbus.protocol.keys import Claim
from twinbus.protocol.requests import Request
from twinbus.protocol.table import largest_reply, row_of, size_of, undo_of, waits
from twinbus.values import check_text

_REPEATED: Final = (Send, Receive, Settle)
Then = Callable[[Any], None]
Deliver = Callable[["LinkRequest", Any], None]


class LinkRequest(Request):
    """A request of a link. Any thread that runs a turn may answer it."""

    __slots__ = (
        "_deliver",
        "claim",
        "is_open",
        "path",
        "read_at",
        "reply_bytes",
        "size",
        "then",
        "waits",
    )

    def __init__(
        self,
        deliver: Deliver,
        path: str,
        command: Command[Any],
        admission: Admission,
        then: Then,
        now: int,
    ) -> None:
        self.command, self.principal = command, admission  # inlined from Request.__init__
        row = row_of(command)
        self._deliver = deliver
        self.path = path  # of the entity; selects the token
        self.claim: Claim | None = None  # None: the claim that a native client needs
        self.then = then
        self.read_at = now
        self.size = size_of(command)
        self.waits = row.may_wait and waits(command)
        self.reply_bytes = largest_reply(command) if row.fetches and not self.waits else 0
        self.is_open = True  # the reply is still needed

    def answer(self, value: Any) -> None:
        """Pass the reply to the driver."""
        self._deliver(self, value)

    def fail(self, error: MessagingError) -> None:
        """Pass the error to the driver."""
        self._deliver(self, error)


class ServiceBusGuard(Protocol):
    """Decides which clients and requests are admitted."""

    def admit(self, token: str) -> Admission:
        """Verify a token; raise UnauthorizedError if it is not valid."""
        ...

    def recheck(self, admission: Admission) -> Admission:
        """Verify that an admission is still valid: tokens expire, keys are rotated and removed."""
        ...

    def enter(self, admission: Admission) -> None:
        """Admit the connection; raise ServerBusyError if the server has too many clients."""
        ...

    def refused(self, admission: Admission | None, error: MessagingError) -> None:
        """Log the refusal of a request or a token."""
        ...

    def has_reply_room(self, used: int, more: int) -> bool:
        """Return whether the client's key has room for more bytes of replies.

        `used` is how many bytes of them this connection has already.
        """
        ...

    def has_request_room(self, used: int) -> bool:
        """Return whether the client's key has room for more requests.

        `used` is how many bytes of unanswered requests this connection has.
        """
        ...

    def describe(self, path: str) -> EntityDescription | None:
        """Return the description of an entity, or None if it does not exist."""
        ...


class Work:
    """The requests of a connection, and the tokens that its client has sent."""

    def __init__(
        self,
        guard: ServiceBusGuard,
        deliver: Deliver,
        now: int,
        amqp: AmqpConnection,
        on_admitted: Callable[[], None],
    ) -> None:
        self._guard = guard
        self._on_admitted = on_admitted  # called when the connection counts as a client
        self.is_admitted = False  # the client has sent a valid token, and the server has room
        self._newest: Admission | None = None  # of the token that was sent last
        self._amqp = amqp
        self._deliver = deliver
        self._admissions: dict[str, Admission] = {}  # by the path of the token
        self._allowed: dict[tuple[type, str], Admission] = {}  # rights that were verified
        self.now = now
        self.arrived: list[Request] = []  # to be submitted to the broker
        self.withdrawn: list[Request] = []  # to be withdrawn from the broker
        self.is_stalled = False  # a link waits until the client has read more
        self._open = 0  # number of unanswered requests
        self._open_bytes = 0  # size of the messages in unanswered requests
        self._waiting = 0  # number of unanswered requests that may wait at a queue
        self.kept_bytes = 0  # of messages and answers that wait at links for the client
        self._fetching = 0  # maximum size of the replies to submitted requests that do not wait
        self._deferred: deque[LinkRequest] = deque()  # wait until there is room for their replies
        self._refused: list[tuple[str, Command[Any]]] = []  # by a busy broker; `finish` them later

    # -- rights --------------------------------------------------------------------------------

    def show(self, token: str, path: str) -> None:
        """Accept a token for a path; raise an error if it is not valid for this path.

        A full server accepts a token as well, because SDKs report every refused token as a wrong
        key. It refuses the links that follow, with ServerBusyError.
        """
        check_text("the name of a token", path, MAX_ADDRESS_CHARACTERS)
        admission = self._guard.admit(token)
        if not admission.covers(path or None):
            raise UnauthorizedError(
                f"the token is not for {path or 'the namespace'}. Sign a token with "
                "its address as sr",
                path=path,
            )
        if len(self._admissions) >= MAX_AMQP_LINKS and path.lower() not in self._admissions:
            raise QuotaExceededError(
                f"the connection has sent tokens for {MAX_AMQP_LINKS} entities, the maximum; send "
                "a token for the namespace, or use another connection",
            )
        self._admissions[path.lower()] = self._newest = admission
        with suppress(ServerBusyError):
            self.enter()

    def enter(self) -> None:
        """Count the connection as a client; raise ServerBusyError if there are too many."""
        if not self.is_admitted and self._newest is not None:
            self._guard.enter(self._newest)
            self.is_admitted = True
            self._on_admitted()

    def admission_for(self, path: str) -> Admission:
        """Return the admission of the most specific token that covers an entity; recheck it."""
        shown_for = self._shown_for(path)
        rechecked = self._admissions[shown_for] = self._guard.recheck(self._admissions[shown_for])
        return rechecked

    def _shown_for(self, path: str) -> str:
        """Return the path of the most specific token that covers an entity."""
        wanted = path.lower()
        while True:
            if wanted in self._admissions:
                return wanted
            if not wanted:
                raise UnauthorizedError(
                    f"the connection has sent no token for {path}; send one to $cbs first",
                    path=path,
                )
            wanted = wanted.rpartition("/")[0]

    def check_right(self, claim: Claim, path: str) -> None:
        """Raise an error if the client does not have a claim on an entity."""
        admission = self.admission_for(path)
        if not admission.may(claim, path):
            error = UnauthorizedError(
                f"key {admission.key.name} lacks the claim {claim.value} for {path}. Use a key "
                "that has it",
                claim=claim.value,
                path=path,
            )
            self._guard.refused(admission, error)
            raise error

    def entity_for(self, path: str, claim: Claim) -> EntityDescription:
        """Return the entity of a link; raise an error if the client may not use it this way."""
        self.check_right(claim, path)
        name = path[: -len(DEAD_LETTER_SUFFIX)] if _is_dead_letter(path) else path
        description = self._guard.describe(name)
        if description is None:
            raise EntityNotFoundError(f"there is no entity {path}; create it first", path=path)
        status = description.status
        is_open = status.allows_send if claim is Claim.SEND else status.allows_receive
        if not is_open and not _is_dead_letter(path):
            raise EntityDisabledError(f"{path} is {status.value}; update its status", path=path)
        return description

    # -- requests ------------------------------------------------------------------------------

    def ask(
        self, path: str, command: Command[Any], then: Then, claim: Claim | None = None
    ) -> LinkRequest | None:
        """Submit a command and return its request; `then` is called with the reply.

        If the client may not execute the command, call `then` with the error and return None.
        `claim` replaces the claim that a native client needs for the command.
        """
        try:
            admission = self._allow(path, command, claim)
        except MessagingError as error:
            then(error)
            return None
        request = LinkRequest(self._deliver, path, command, admission, then, self.now)
        request.claim = claim
        self._count(request, 1)
        if self._deferred or not self._has_room(request):
            self._deferred.append(request)
        else:
            self._hand_over(request)
        return request

    def finish(self, path: str, command: Command[Any]) -> None:
        """Submit a command that ends a lock of this connection, such as a settlement.

        It must succeed even after the token has expired or its key has changed: the rights were
        checked when the broker locked the message or session. If the broker is busy, the next
        `tick` submits the command again.
        """
        admission = self._admissions[self._shown_for(path)]
        then = partial(self._note_refused, path, command)
        request = LinkRequest(self._deliver, path, command, admission, then, self.now)
        self._count(request, 1)
        self._hand_over(request)

    def _note_refused(self, path: str, command: Command[Any], value: Any) -> None:
        if isinstance(value, ServerBusyError):
            self._refused.append((path, command))

    def tick(self, now: int) -> None:
        """Ask the broker again for what it has refused because it was busy."""
        self.now = now
        refused, self._refused = self._refused, []
        for path, command in refused:
            self.finish(path, command)

    # -- the size of replies -------------------------------------------------------------------

    @property
    def fetch_bytes(self) -> int:
        """How many bytes a link may receive at once; all links together keep MAX_UNREAD_BYTES."""
        return min(SERVICE_BUS_FETCH_BYTES, MAX_UNREAD_BYTES // (self._waiting + 1))

    @property
    def reply_bytes(self) -> int:
        """How many bytes of replies are unread or expected, or wait at links."""
        amqp = self._amqp
        return self._fetching + amqp.unread_bytes + amqp.withheld_bytes + self.kept_bytes

    def may_keep(self, size: int) -> bool:
        """Return whether `size` more bytes may wait at links until the client can get them.

        They may wait for long. So they may wait only if the key would still have room for the
        largest reply. A client without a token has only answers of `$cbs`, which are few.
        """
        if not self.is_admitted:
            return True
        return self._guard.has_reply_room(self.reply_bytes, size + MAX_RECEIVE_BYTES)

    @property
    def request_bytes(self) -> int:
        """The size of the messages in unanswered requests."""
        return self._open_bytes

    @property
    def must_be_counted(self) -> bool:
        """Whether replies or requests have so many bytes that they count under the client's key."""
        return self.reply_bytes >= COUNTED_STEP_BYTES or self._open_bytes >= COUNTED_STEP_BYTES

    def _has_room(self, request: LinkRequest) -> bool:
        """Return whether the reply to a request fits into the bounds of the connection and key."""
        more = request.reply_bytes
        if not more and not request.waits:
            return True
        used = self._fetching + self._amqp.unread_bytes
        if more and used and used + more > MAX_UNREAD_BYTES:
            return False
        return self._guard.has_reply_room(self.reply_bytes, more)

    def _hand_over(self, request: LinkRequest) -> None:
        self._fetching += request.reply_bytes
        self.arrived.append(request)

    def _release_room(self, request: LinkRequest) -> None:
        """Release the room that was reserved for the reply to a request."""
        self._fetching -= request.reply_bytes
        request.reply_bytes = 0
        self.submit_deferred()

    @property
    def has_deferred(self) -> bool:
        """Whether requests wait until there is room for their replies."""
        return bool(self._deferred)

    def submit_deferred(self) -> None:
        """Submit deferred requests while there is room for their replies.

        A request fails if its token has expired or its key has been removed meanwhile.
        """
        while self._deferred and self._has_room(self._deferred[0]):
            request = self._deferred.popleft()
            try:
                request.principal = self._allow(request.path, request.command, request.claim)
            except MessagingError as error:
                request.is_open = False
                self._count(request, -1)
                request.then(error)
            else:
                self._hand_over(request)

    def _allow(self, path: str, command: Command[Any], claim: Claim | None) -> Admission:
        """Return the admission that allows a command; log a refusal and raise it."""
        if claim is not None:
            self.check_right(claim, path)
            return self.admission_for(path)
        admission: Admission | None = None
        try:
            admission = self.admission_for(path)
            self._check(admission, path, command)
        except MessagingError as error:
            self._guard.refused(admission, error)
            raise
        return admission

    def _check(self, admission: Admission, path: str, command: Command[Any]) -> None:
        """Check a right, unless the same admission has passed the same check before.

        For the commands that links repeat, the result depends only on their class and path.
        """
        kind = type(command)
        if kind not in _REPEATED:
            admission.check(command)
        elif self._allowed.get((kind, path)) is not admission:
            admission.check(command)
            if len(self._allowed) >= MAX_AMQP_LINKS:
                self._allowed.clear()
            self._allowed[kind, path] = admission

    def _count(self, request: LinkRequest, change: int) -> None:
        self._open += change
        self._open_bytes += change * request.size
        self._waiting += change * request.waits

    @property
    def is_behind(self) -> bool:
        """Whether there are so many unanswered requests that reading from the client must stop."""
        size = self._open_bytes
        return (
            self._open > MAX_OPEN_REQUESTS
            or size > MAX_UNANSWERED_BYTES
            or (size >= COUNTED_STEP_BYTES and not self._guard.has_request_room(size))
            or len(self._deferred) > SERVICE_BUS_DEFERRED_REQUESTS
        )

    def drop(self, request: LinkRequest | None) -> None:
        """Withdraw a request whose reply is no longer needed."""
        if request is None or not request.is_open:
            return
        request.is_open = False
        self._count(request, -1)
        if request in self._deferred:
            self._deferred.remove(request)
        else:
            self._release_room(request)
            self.withdrawn.append(request)

    def answer(self, request: LinkRequest, value: Any) -> None:
        """Process a reply; if it is no longer needed, release its locks."""
        if request.reply_bytes or self._deferred:
            self._release_room(request)
        if request.is_open:
            request.is_open = False
            self._count(request, -1)
            request.then(value)
        elif not isinstance(value, MessagingError):
            self.give_back(request.command, value)

    def give_back(self, command: Command[Any], value: Any) -> None:
        """Release the locks in a reply that cannot be sent to the client."""
        undo = undo_of(command, value)
        if undo is not None:
            self.finish(row_of(command).path_of(command), undo)


def _is_dead_letter(path: str) -> bool:
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())
