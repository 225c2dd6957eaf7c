"""What the parts of a Service Bus conversation share: requests to the broker, and rights.

A part asks the broker something and says what to do with the reply. The driver hands the request
over, and calls `then` in its own thread when the reply is there: with the value, or with the error.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from twinbus.entities import DEAD_LETTER_SUFFIX, EntityDescription
from twinbus.errors import (
    EntityDisabledError,
    EntityNotFoundError,
    MessagingError,
    QuotaExceededError,
    UnauthorizedError,
)
from twinbus.limits import (
    MAX_ADDRESS_CHARACTERS,
    MAX_AMQP_LINKS,
    MAX_OPEN_REQUESTS,
    MAX_UNANSWERED_BYTES,
    MAX_UNREAD_BYTES,
    SERVICE_BUS_FETCH_BYTES,
    SERVICE_BUS_HELD_REQUESTS,
)
from twinbus.protocol.access import Admission, Principal
from twinbus.protocol.commands import Command, Receive, Send, Settle
from twinbus.protocol.keys import Claim
from twinbus.protocol.requests import Request
from twinbus.protocol.table import largest_reply, size_of, undo_of, waits
from twinbus.values import check_text

_REPEATED: Final = (Send, Receive, Settle)
Then = Callable[[Any], None]
Deliver = Callable[["LinkRequest", Any], None]


class LinkRequest(Request):
    """A request of a link. The thread that has the turn answers it, which may be any."""

    __slots__ = ("_deliver", "is_open", "read_at", "reply_bytes", "size", "then", "waits")

    def __init__(
        self, deliver: Deliver, command: Command[Any], admission: Admission, then: Then, now: int
    ) -> None:
        super().__init__(command, admission)
        self._deliver = deliver
        self.then = then
        self.read_at = now
        self.size = size_of(command)
        self.waits = waits(command)
        self.reply_bytes = 0 if self.waits else largest_reply(command)
        self.is_open = True  # somebody still wants the reply

    def answer(self, value: Any) -> None:
        """Hand the reply to the driver."""
        self._deliver(self, value)

    def fail(self, error: MessagingError) -> None:
        """Hand the error to the driver."""
        self._deliver(self, error)


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

    def describe(self, path: str) -> EntityDescription | None:
        """Return the description of an entity, if there is one."""
        ...


class Work:
    """The requests of one connection, and the tokens that it has shown."""

    def __init__(
        self, guard: Guard, deliver: Deliver, now: int, unread_bytes: Callable[[], int]
    ) -> None:
        self._guard = guard
        self._unread_bytes = unread_bytes  # of what the client was sent
        self._deliver = deliver
        self._admissions: dict[str, Admission] = {}  # by the path of the token
        self._allowed: dict[tuple[type, str], Admission] = {}  # rights that were found
        self.now = now
        self.arrived: list[Request] = []  # for the broker
        self.withdrawn: list[Request] = []  # that nobody waits for any more
        self.is_stalled = False  # a link waits until the client has read what it was sent
        self._open = 0  # requests that the broker has not answered
        self._open_bytes = 0  # of their messages
        self._waiting = 0  # of them, those that may wait at a queue
        self._fetching = 0  # bytes that the replies to the others may have
        self._held: deque[LinkRequest] = deque()  # until there is room for their replies

    # -- rights --------------------------------------------------------------------------------

    @property
    def is_admitted(self) -> bool:
        """Whether the connection has shown a good token."""
        return bool(self._admissions)

    def show(self, token: str, path: str) -> None:
        """Take a token for a path; raise why it is not good."""
        check_text("the name of a token", path, MAX_ADDRESS_CHARACTERS)
        admission = self._guard.admit(token)
        if not admission.covers(path or None):
            raise UnauthorizedError(f"the token is not for {path or 'the namespace'}", path=path)
        if not self._admissions:
            self._guard.enter(admission)
        elif len(self._admissions) >= MAX_AMQP_LINKS and path.lower() not in self._admissions:
            raise QuotaExceededError(
                f"the connection has shown tokens for {MAX_AMQP_LINKS} entities; show one for the "
                "namespace, or use another connection",
            )
        self._admissions[path.lower()] = admission

    def admission_for(self, path: str) -> Admission:
        """Return the token that was shown for an entity, the nearest one; check that it holds."""
        wanted = path.lower()
        while True:
            found = self._admissions.get(wanted)
            if found is not None:
                held = self._admissions[wanted] = self._guard.recheck(found)
                return held
            if not wanted:
                raise UnauthorizedError(
                    f"the connection has shown no token for {path}; send one to $cbs first",
                    path=path,
                )
            wanted = wanted.rpartition("/")[0]

    def check_right(self, claim: Claim, path: str) -> None:
        """Raise why the client does not have a claim on an entity."""
        admission = self.admission_for(path)
        if not admission.may(claim, path):
            error = UnauthorizedError(
                f"key {admission.key.name} lacks the claim {claim.value} for {path}",
                claim=claim.value,
                path=path,
            )
            self._guard.refused(admission, error)
            raise error

    def entity_for(self, path: str, claim: Claim) -> EntityDescription:
        """Return the entity of a link; raise why the client may not use it so."""
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

    def ask(self, path: str, command: Command[Any], then: Then) -> LinkRequest | None:
        """Ask the broker something; None: the connection may not, and `then` got the error."""
        admission: Admission | None = None
        try:
            admission = self.admission_for(path)
            self._check(admission, path, command)
        except MessagingError as error:
            self._guard.refused(admission, error)
            then(error)
            return None
        request = LinkRequest(self._deliver, command, admission, then, self.now)
        self._count(request, 1)
        if self._held or not self._has_room(request):
            self._held.append(request)
        else:
            self._hand_over(request)
        return request

    # -- the size of replies -------------------------------------------------------------------

    @property
    def fetch_bytes(self) -> int:
        """How much a link may take from its queue at once: all links together have a bound."""
        return min(SERVICE_BUS_FETCH_BYTES, MAX_UNREAD_BYTES // (self._waiting + 1))

    def _has_room(self, request: LinkRequest) -> bool:
        """Whether what the client has not read, and replies to come, are within the bound."""
        if not request.reply_bytes:
            return True
        used = self._fetching + self._unread_bytes()
        return not used or used + request.reply_bytes <= MAX_UNREAD_BYTES

    def _hand_over(self, request: LinkRequest) -> None:
        self._fetching += request.reply_bytes
        self.arrived.append(request)

    def _settle_room(self, request: LinkRequest) -> None:
        """Give back the room that the reply to a request had."""
        self._fetching -= request.reply_bytes
        request.reply_bytes = 0
        self.release_held()

    def release_held(self) -> None:
        """Hand over requests for whose replies there is room again."""
        while self._held and self._has_room(self._held[0]):
            self._hand_over(self._held.popleft())

    def _check(self, admission: Admission, path: str, command: Command[Any]) -> None:
        """Check a right, unless it was found under the same admission before.

        Commands that links ask for again and again have nothing but their kind and path to check.
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
        """Whether the client asks faster than the broker works: it is read no further then."""
        return (
            self._open > MAX_OPEN_REQUESTS
            or self._open_bytes > MAX_UNANSWERED_BYTES
            or len(self._held) > SERVICE_BUS_HELD_REQUESTS
        )

    def drop(self, request: LinkRequest | None) -> None:
        """Let a request go whose reply nobody wants."""
        if request is None or not request.is_open:
            return
        request.is_open = False
        self._count(request, -1)
        if request in self._held:
            self._held.remove(request)
        else:
            self._settle_room(request)
            self.withdrawn.append(request)

    def answer(self, request: LinkRequest, value: Any) -> None:
        """Take a reply; locks that nobody wants any more are given back."""
        self._settle_room(request)
        if request.is_open:
            request.is_open = False
            self._count(request, -1)
            request.then(value)
        elif not isinstance(value, MessagingError):
            self._undo(request.command, value, request.principal)

    def give_back(self, path: str, command: Command[Any], value: Any) -> None:
        """Give back the locks of a reply that the client cannot be sent."""
        self._undo(command, value, self.admission_for(path))

    def _undo(self, command: Command[Any], value: Any, principal: Principal) -> None:
        undo = undo_of(command, value)
        if undo is not None:
            self.arrived.append(Request(undo, principal))


def _is_dead_letter(path: str) -> bool:
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())
