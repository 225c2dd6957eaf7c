"""What the parts of a Service Bus conversation share: requests to the broker, and rights.

A part asks the broker something and says what to do with the reply. The driver hands the request
over, and calls `then` in its own thread when the reply is there: with the value, or with the error.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

from twinbus.entities import DEAD_LETTER_SUFFIX, EntityDescription
from twinbus.errors import (
    EntityDisabledError,
    EntityNotFoundError,
    MessagingError,
    UnauthorizedError,
)
from twinbus.limits import MAX_AMQP_LINKS, MAX_OPEN_REQUESTS, MAX_UNANSWERED_BYTES
from twinbus.protocol.access import Admission
from twinbus.protocol.commands import Command, Receive, Send, Settle
from twinbus.protocol.keys import Claim
from twinbus.protocol.requests import Request
from twinbus.protocol.table import size_of, undo_of

_REPEATED: Final = (Send, Receive, Settle)
Then = Callable[[Any], None]
Deliver = Callable[["LinkRequest", Any], None]


class LinkRequest(Request):
    """A request of a link. The thread that has the turn answers it, which may be any."""

    __slots__ = ("_deliver", "is_open", "read_at", "size", "then")

    def __init__(
        self, deliver: Deliver, command: Command[Any], admission: Admission, then: Then, now: int
    ) -> None:
        super().__init__(command, admission)
        self._deliver = deliver
        self.then = then
        self.read_at = now
        self.size = size_of(command)
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

    def __init__(self, guard: Guard, deliver: Deliver, now: int) -> None:
        self._guard = guard
        self._deliver = deliver
        self._admissions: dict[str, Admission] = {}  # by the path of the token
        self._allowed: dict[tuple[type, str], Admission] = {}  # rights that were found
        self.now = now
        self.arrived: list[Request] = []  # for the broker
        self.withdrawn: list[Request] = []  # that nobody waits for any more
        self.is_stalled = False  # a link waits until the client has read what it was sent
        self._open = 0  # requests that the broker has not answered
        self._open_bytes = 0  # of their messages

    # -- rights --------------------------------------------------------------------------------

    @property
    def is_admitted(self) -> bool:
        """Whether the connection has shown a good token."""
        return bool(self._admissions)

    def show(self, token: str, path: str) -> None:
        """Take a token for a path; raise why it is not good."""
        admission = self._guard.admit(token)
        if not self._admissions:
            self._guard.enter(admission)
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
        self.arrived.append(request)
        return request

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

    @property
    def is_behind(self) -> bool:
        """Whether the client asks faster than the broker works: it is read no further then."""
        return self._open > MAX_OPEN_REQUESTS or self._open_bytes > MAX_UNANSWERED_BYTES

    def drop(self, request: LinkRequest | None) -> None:
        """Let a request go whose reply nobody wants."""
        if request is not None and request.is_open:
            request.is_open = False
            self._count(request, -1)
            self.withdrawn.append(request)

    def answer(self, request: LinkRequest, value: Any) -> None:
        """Take a reply; locks that nobody wants any more are given back."""
        if request.is_open:
            request.is_open = False
            self._count(request, -1)
            request.then(value)
        elif not isinstance(value, MessagingError):
            undo = undo_of(request.command, value)
            if undo is not None:
                self.arrived.append(Request(undo, request.principal))


def _is_dead_letter(path: str) -> bool:
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())
