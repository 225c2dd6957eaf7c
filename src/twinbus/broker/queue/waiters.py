"""The requests that wait at a queue, such as long polls, in order of arrival."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from twinbus.broker.queue.shared import Shared
from twinbus.limits import NEVER_US
from twinbus.protocol.commands import AcceptSession, LeaseRange, Receive
from twinbus.protocol.requests import Request


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for messages or a session."""

    request: Request
    command: Receive | AcceptSession | LeaseRange
    deadline: int
    behind: str | None = None  # who had locked or leased the messages when it began to wait


class Waiters:
    """The waiting requests of a queue."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.line: deque[Waiter] = deque()  # in order of arrival
        self.next_deadline = NEVER_US  # a lower bound: no request times out earlier

    def __len__(self) -> int:
        return len(self.line)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self.line)

    @property
    def has_receives(self) -> bool:
        """Whether a receive waits, which gets deliverable messages first."""
        return any(isinstance(waiter.command, Receive) for waiter in self.line)

    def add(self, waiter: Waiter) -> None:
        """Add a waiting request."""
        self.line.append(waiter)
        self._count(waiter, 1)
        self._shared.undo.note(lambda: self._let_go(lambda other: other is waiter))
        self.next_deadline = min(self.next_deadline, waiter.deadline)

    def _count(self, waiter: Waiter, change: int) -> None:
        self._shared.open_receives += change
        principal = waiter.request.principal.id
        self._shared.waits[principal] += change
        if not self._shared.waits[principal]:
            del self._shared.waits[principal]

    def _take_back(self, line: deque[Waiter], gone: list[Waiter]) -> None:
        """Undo a removal."""
        self.line = line
        for waiter in gone:
            self._count(waiter, 1)
        self.next_deadline = min(waiter.deadline for waiter in line)

    def shift(self, by: int) -> None:
        """Move every deadline, because the wall clock was set."""
        self.line = deque(replace(w, deadline=w.deadline + by) for w in self.line)
        self.next_deadline = min((waiter.deadline for waiter in self.line), default=NEVER_US)

    def serve(self, serve_one: Callable[[Waiter], bool], *, all_the_same: bool) -> None:
        """Serve the requests for which there are messages.

        If all want the same, none can be served when the first cannot. But a lease may wait for
        locked messages while a receive behind it can be served.
        """
        left: deque[Waiter] = deque()
        while self.line:
            waiter = self.line.popleft()
            if serve_one(waiter):
                self._count(waiter, -1)
                continue
            left.append(waiter)
            if all_the_same and not isinstance(waiter.command, LeaseRange):
                break
        left.extend(self.line)
        self.line = left

    def leave(self, now: int = NEVER_US) -> list[Waiter]:
        """Remove and return the requests whose time is over; without a time, all of them."""
        if now < self.next_deadline:
            return []
        return self._let_go(lambda waiter: waiter.deadline <= now)

    def withdraw(self, requests: set[int]) -> list[Waiter]:
        """Remove and return the requests with these identities."""
        return self._let_go(lambda waiter: id(waiter.request) in requests)

    def _let_go(self, goes: Callable[[Waiter], bool]) -> list[Waiter]:
        gone = [waiter for waiter in self.line if goes(waiter)]
        if gone:
            before = self.line
            self._shared.undo.note(lambda: self._take_back(before, gone))
            self.line = deque(waiter for waiter in self.line if not goes(waiter))
            for waiter in gone:
                self._count(waiter, -1)
        self.next_deadline = min((waiter.deadline for waiter in self.line), default=NEVER_US)
        return gone
