"""Simulated applications: they send, receive and settle over one link after another.

`Truth` keeps the replies that they got, together with what the broker did.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any, Protocol

from tests.simulation.wire_network import ClientLink
from twinbus.client.retry import is_worth_a_retry
from twinbus.clock import ManualClock
from twinbus.connection import sign_token
from twinbus.errors import (
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
    UnauthorizedError,
)
from twinbus.limits import NEVER_US, SECOND_US
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol import commands as c
from twinbus.protocol.origins import sender_source
from twinbus.protocol.requests import Request

PLAIN, SESSIONS, RANGES = "orders", "carts", "backlog"
QUEUES = (PLAIN, SESSIONS, RANGES)
LOCK = timedelta(seconds=10)
LOCK_US = 10 * SECOND_US
TOKEN_LIFE_S = 40
TRY_US = 5 * SECOND_US
MESSAGE_BYTES = (10, 10, 100, 900)
RETRIED = (
    UnauthorizedError,
    NamespaceClosedError,
)  # by a client that has renewed its token or link


class ViolationError(AssertionError):
    """An invariant is broken."""


class ClientRequest(Request):
    """A request of a client; counts its outcomes."""

    __slots__ = ("_on_outcome", "deadline", "is_given_up", "link", "number", "outcomes")

    def __init__(
        self, command: c.Command[Any], deadline: int, on_outcome: Callable[[Any], None]
    ) -> None:
        super().__init__(command)
        self.deadline = deadline
        self.outcomes = 0
        self.is_given_up = False
        self.number = 0
        self.link: ClientLink
        self._on_outcome = on_outcome

    def answer(self, value: Any) -> None:
        """Take the reply."""
        self.outcomes += 1
        if self.outcomes == 1 and not self.is_given_up:
            self._on_outcome(value)

    def fail(self, error: MessagingError) -> None:
        """Take the error."""
        self.answer(error)
        if isinstance(error, OperationTimeoutError):
            self.link.given_up.add(self.number)

    @property
    def is_pending(self) -> bool:
        """Whether the outcome is still to come."""
        return not self.outcomes and not self.is_given_up


@dataclass
class Truth:
    """What the broker did, and what clients know of it."""

    acknowledged: set[str] = field(default_factory=set)  # bodies whose receipt reached the client
    completing: set[str] = field(default_factory=set)  # a client asked to complete these
    completed: set[str] = field(default_factory=set)  # and got the reply that says so
    deleted: set[str] = field(default_factory=set)  # delivered by a receive that deletes
    enqueued: Counter[str] = field(default_factory=Counter)
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)  # path and body -> number
    counts: Counter[str] = field(default_factory=Counter)  # what has happened in the run


class Surroundings(Protocol):
    """What a simulated client needs of its world."""

    random: Random
    clock: ManualClock
    truth: Truth
    secrets: dict[str, str]
    leaving: list[ClientLink]
    later: list[Callable[[], object]]

    def connect(self, token: str) -> ClientLink:
        """Open a connection."""
        ...


class SimulatedClient:
    """An application: sends, receives and settles over one link after another."""

    def __init__(self, world: Surroundings, index: int) -> None:
        self._world = world
        self._random = world.random
        self.name = f"client{index}"
        self._key_name = world.random.choice(("red", "blue"))
        self._sources = {path: sender_source(16 * index + at + 1) for at, path in enumerate(QUEUES)}
        self._next_number = dict.fromkeys(QUEUES, 0)
        self.link: ClientLink | None = None
        self.requests: list[ClientRequest] = []
        self.retries: list[tuple[int, c.Send, int]] = []  # when, what, how many failures before
        self._renew_at = 0
        self._locked: list[tuple[str, list[BrokeredMessage]]] = []  # path, and what is locked
        self._grants: list[c.SessionLock] = []
        self._leases: list[c.RangeLease] = []

    # -- the link ------------------------------------------------------------------------------

    def _token(self) -> str:
        now = self._world.clock.wall_us()
        life_s = self._random.choice((TOKEN_LIFE_S // 4, TOKEN_LIFE_S))
        # Some clients renew their token too late, by more or less than the server's grace.
        late = self._random.choice((-5, -5, -5, 1, 4))
        self._renew_at = now + (life_s + late) * SECOND_US
        secret = self._world.secrets[self._key_name]
        return sign_token("twinbus://simulated/", self._key_name, secret, now // SECOND_US + life_s)

    def current_link(self) -> ClientLink:
        """Return the link, or a new one if the last has ended."""
        if self.link is None or self.link.is_over or self.link.closes_at is not None:
            if self.link is not None and not self.link.is_over:
                self._world.leaving.append(self.link)
            self.link = self._world.connect(self._token())
        return self.link

    def move(self) -> None:
        """Let bytes and time pass."""
        link = self.link
        if link is None:
            return
        if self._world.clock.now_us() >= self._renew_at and not link.is_over:
            link.conversation.present(self._token())
            self._world.truth.counts["tokens renewed"] += 1
        for outcome in link.move():
            outcome.deliver()

    def ask(
        self,
        command: c.Command[Any],
        on_outcome: Callable[[Any], None] = lambda _: None,
        patience_us: int = TRY_US,
    ) -> ClientRequest:
        """Send a command; `on_outcome` gets the reply or the error."""
        link = self.current_link()
        now = self._world.clock.now_us()
        deadline = NEVER_US
        if self._random.random() < 0.8:
            deadline = now + patience_us + int(getattr(command, "wait", c.NO_WAIT) / LOCK * LOCK_US)
        request = ClientRequest(command, deadline, on_outcome)
        request.link = link
        request.number = link.conversation.ask(request, now, deadline)
        self.requests.append(request)
        self._world.truth.counts["requests"] += 1
        return request

    # -- sending -------------------------------------------------------------------------------

    def send(self) -> None:
        """Send a few numbered messages."""
        path = self._random.choice((PLAIN, PLAIN, SESSIONS, RANGES))
        count = self._random.choice((1, 1, 2, 20))
        first = self._next_number[path]
        self._next_number[path] += count
        messages = []
        for number in range(first, first + count):
            body = f"{self.name}.{path}.{number}."
            size = self._random.choice(MESSAGE_BYTES)
            session_id = f"s{self._random.randrange(4)}" if path == SESSIONS else None
            message = BrokeredMessage(
                body.ljust(size, "x").encode(), message_id=body, session_id=session_id
            )
            messages.append(message)
        origin = c.Origin(self._sources[path], range(first, first + count))
        self.try_send(c.Send(path, messages, origin), 0)

    def try_send(self, send: c.Send, failures: int) -> None:
        """Send; try the same again after a failure that may have lost only the reply."""

        def note(value: Any) -> None:
            truth = self._world.truth
            if not isinstance(value, MessagingError):
                truth.acknowledged |= {message.message_id for message in send.messages}
            elif is_worth_a_retry(value) or isinstance(value, RETRIED):
                pause = self._random.randrange(SECOND_US << min(failures, 4))
                due = self._world.clock.now_us() + pause
                self.retries.append((due, send, failures + 1))
                truth.counts["sends retried"] += 1
            else:
                raise ViolationError(f"a send was refused: {value!r}")

        self.ask(send, note)

    def retry(self) -> None:
        """Try the sends again whose pause is over."""
        now = self._world.clock.now_us()
        due = [retry for retry in self.retries if retry[0] <= now]
        self.retries = [retry for retry in self.retries if retry[0] > now]
        for _, send, failures in due:
            self.try_send(send, failures)

    # -- receiving -----------------------------------------------------------------------------

    def _wait(self) -> timedelta:
        return timedelta(seconds=self._random.choice((0, 0, 1, 20, 60)))

    def receive(self) -> None:
        """Receive from the queue without sessions, or browse it."""
        count, size = self._random.choice((1, 5, 50)), self._random.choice((1024, 2048, 6000))
        if self._random.random() < 0.1:
            self.ask(c.Peek(PLAIN, 0, count, size))
            return
        mode = c.ReceiveMode.PEEK_LOCK
        if self._random.random() < 0.15:
            mode = c.ReceiveMode.RECEIVE_AND_DELETE
        command = c.Receive(PLAIN, count, self._wait(), mode, max_bytes=size)
        self.ask(command, lambda value: self._take_batch(PLAIN, value, mode))

    def _take_batch(self, path: str, value: Any, mode: c.ReceiveMode) -> None:
        if isinstance(value, MessagingError) or mode is c.ReceiveMode.RECEIVE_AND_DELETE:
            return
        if value.num_rows:
            self._locked.append((path, to_messages(value)))

    def settle(self) -> None:
        """Settle a batch that was received, or forget it."""
        if not self._locked:
            return
        path, messages = self._locked.pop(self._random.randrange(len(self._locked)))
        disposition = self._random.choice((*[c.Disposition.COMPLETE] * 4, *c.Disposition, None))
        if disposition is None:
            return
        bodies = {message.message_id for message in messages}
        truth = self._world.truth
        if disposition is c.Disposition.COMPLETE:
            truth.completing |= bodies
        tokens = tokens_of(m.lock_token for m in messages if m.lock_token is not None)

        def note(value: Any) -> None:
            if value is None and disposition is c.Disposition.COMPLETE:
                truth.completed |= bodies

        self.ask(c.Settle(path, tokens, disposition), note)

    def use_session(self) -> None:
        """Accept a session, receive from one, renew or release it."""
        if not self._grants or self._random.random() < 0.3:
            name = self._random.choice((None, None, "s1"))
            self.ask(c.AcceptSession(SESSIONS, name, self._wait()), self._take_grant)
            return
        lock = self._random.choice(self._grants)
        choice = self._random.random()
        if choice < 0.5:
            command = c.Receive(
                SESSIONS, 5, timedelta(seconds=self._random.choice((0, 2))), session=lock
            )
            self.ask(
                command, lambda value: self._take_batch(SESSIONS, value, c.ReceiveMode.PEEK_LOCK)
            )
        elif choice < 0.6:
            self.ask(c.SetSessionState(SESSIONS, lock, b"here"))
        elif choice < 0.7:
            self.ask(c.RenewSession(SESSIONS, lock))
        else:
            self._grants.remove(lock)
            if self._random.random() < 0.7:
                self.ask(c.ReleaseSession(SESSIONS, lock))

    def _take_grant(self, value: Any) -> None:
        if isinstance(value, c.SessionGrant):
            self._grants.append(value.lock)

    def use_range(self) -> None:
        """Lease a range, read and settle it, or release it."""
        if not self._leases or self._random.random() < 0.3:
            count = self._random.choice((3, 30))
            lease_next = c.LeaseRange(RANGES, self.name, count, duration=LOCK, wait=self._wait())
            self.ask(lease_next, self._take_lease)
            return
        lease = self._random.choice(self._leases)
        choice = self._random.random()
        if choice < 0.6:
            read = c.ReadRange(RANGES, lease.epoch, lease.first, lease.last, 4096)
            self.ask(read, lambda value: self._settle_range(lease, value))
        elif choice < 0.7:
            self.ask(c.RenewRange(RANGES, lease.epoch, LOCK))
        else:
            self._leases.remove(lease)
            if choice < 0.9:
                self.ask(c.ReleaseRange(RANGES, lease.epoch))

    def _take_lease(self, value: Any) -> None:
        if isinstance(value, c.RangeLease):
            self._leases.append(value)

    def _settle_range(self, lease: c.RangeLease, value: Any) -> None:
        if isinstance(value, MessagingError) or not value.num_rows:
            return
        truth, messages = self._world.truth, to_messages(value)
        bodies = {message.message_id for message in messages}
        numbers = [m.sequence_number for m in messages if m.sequence_number is not None]
        truth.completing |= bodies

        def note(value: Any) -> None:
            if value is None:
                truth.completed |= bodies

        completed = [(number, number) for number in numbers]
        release = self._random.random() < 0.5
        # The outcome of a request comes while the driver moves bytes: ask when it is done.
        self._world.later.append(
            lambda: self.ask(
                c.SettleRange(RANGES, lease.epoch, completed=completed, release=release), note
            )
        )

    # -- being a difficult client --------------------------------------------------------------

    def give_up(self) -> None:
        """Stop waiting for the reply of a request."""
        pending = [request for request in self.requests if request.is_pending]
        if pending:
            request = self._random.choice(pending)
            # A send that is given up would have to be tried again: it counts as not sent.
            request.is_given_up = True
            request.link.give_up(request.number)
            self._world.truth.counts["requests given up"] += 1

    def stop_reading(self) -> None:
        """Read nothing for a while."""
        if self.link is not None:
            seconds = self._random.choice((1, 5, 40, 150))
            self.link.reads_again_at = self._world.clock.now_us() + seconds * SECOND_US
            self._world.truth.counts["pauses of a reader"] += 1

    def leave(self) -> None:
        """End the link: mostly with a goodbye, sometimes without."""
        if self.link is None or self.link.is_over:
            return
        if self._random.random() < 0.6:
            self.link.say_goodbye()
            self._world.truth.counts["goodbyes"] += 1
        else:
            for outcome in self.link.vanish():
                outcome.deliver()

    def act(self) -> None:
        """Do something that an application may do."""
        if sum(request.is_pending for request in self.requests) > 40:
            return
        action = self._random.choices(
            (
                *(self.send, self.receive, self.settle, self.use_session, self.use_range),
                *(self.give_up, self.stop_reading, self.leave),
            ),
            (30, 25, 25, 20, 15, 5, 2, 2),
        )[0]
        action()
