"""The requests that wait at a queue, such as long polls, in order of arrival."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from twinbus.broker.queue.shared import QueueContext
from twinbus.limits import NEVER_US
from twinbus.protocol.commands import AcceptSession, LeaseRange, Receive
from twinbus.protocol.requests import Request

_Line = OrderedDict[int, "Waiter"]


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for messages or a session."""

    request: Request
    command: Receive | AcceptSession | LeaseRange
    deadline: int
    # Of a LeaseRange: the owner of the lease that was in its way when it began to wait. None: there
    # was no such lease, or a receiver had locked the messages.
    behind: str | None = None


class Waiters:
    """The waiting requests of a queue."""

    def __init__(self, entity: int, shared: QueueContext) -> None:
        self._entity = entity  # number of the queue
        self._shared = shared
        self.line: _Line = OrderedDict()  # in order of arrival, by `id()` of the request
        self._receives = 0  # number of receives in the line
        # The requests that the last call of `serve` tried, by `id()`, if the turn had no time for
        # the requests behind them.
        self._tried: set[int] = set()
        self.next_deadline = NEVER_US  # a lower bound: no request times out earlier

    def __len__(self) -> int:
        return len(self.line)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self.line.values())

    @property
    def has_receives(self) -> bool:
        """Whether a receive waits here: it gets messages before a receive that arrives later."""
        return self._receives > 0

    def add(self, waiter: Waiter) -> None:
        """Add a waiting request."""
        self.line[id(waiter.request)] = waiter
        self._count(waiter, 1)
        self._shared.undo.note(lambda: self.withdraw(waiter.request))
        self.next_deadline = min(self.next_deadline, waiter.deadline)

    def _count(self, waiter: Waiter, change: int) -> None:
        self._shared.open_receives += change
        self._receives += change * isinstance(waiter.command, Receive)
        if change > 0:
            self._shared.waits_at[id(waiter.request)] = self._entity
        else:
            del self._shared.waits_at[id(waiter.request)]
        principal = waiter.request.principal.id
        self._shared.waits[principal] += change
        if not self._shared.waits[principal]:
            del self._shared.waits[principal]

    def _undo_removal(self, line: _Line, gone: list[Waiter]) -> None:
        """Undo `_remove`: `line` is the line before it."""
        self.line = line
        for waiter in gone:
            self._count(waiter, 1)
        self.next_deadline = min(waiter.deadline for waiter in line.values())

    def shift(self, by: int) -> None:
        """Move every deadline, because the wall clock was set."""
        for identity, waiter in self.line.items():
            self.line[identity] = replace(waiter, deadline=waiter.deadline + by)
        self.next_deadline = min((waiter.deadline for waiter in self), default=NEVER_US)

    def serve(
        self, serve_one: Callable[[Waiter], bool | None], *, all_the_same: bool, goes_on: bool
    ) -> None:
        """Call `serve_one` for waiting requests, in order of arrival.

        `serve_one` returns whether it has served the request, or None if the turn has no time for
        it. None ends the call. Pass `goes_on` if the queue has not changed since the last call was
        ended by None: this call skips the requests that the last one tried, which could otherwise
        take all the time of every turn.

        With `all_the_same`, every request waits for any message. If a receive finds none, the
        requests behind it find none either, so the loop ends. It does not end at a request for a
        lease, which may wait for locked messages while a receive behind it can be served.
        """
        tried, self._tried = self._tried if goes_on else set(), set()
        left: list[Waiter] = []
        while self.line:
            identity, waiter = self.line.popitem(last=False)
            if identity in tried:
                left.append(waiter)
                continue
            is_served = serve_one(waiter)
            if is_served:
                self._count(waiter, -1)
                continue
            if is_served is None:
                self._tried = {id(tried_before.request) for tried_before in left}
            left.append(waiter)
            if is_served is None or (all_the_same and not isinstance(waiter.command, LeaseRange)):
                break
        for waiter in reversed(left):
            self.line[id(waiter.request)] = waiter
            self.line.move_to_end(id(waiter.request), last=False)

    def leave(self, now: int = NEVER_US) -> list[Waiter]:
        """Remove and return the requests whose deadline has passed; without `now`, all requests."""
        if now < self.next_deadline:
            return []
        return self._remove(lambda waiter: waiter.deadline <= now)

    def withdraw(self, request: Request) -> Waiter:
        """Remove and return a waiting request; `next_deadline` stays a lower bound."""
        waiter = self.line.pop(id(request))
        self._count(waiter, -1)
        return waiter

    def _remove(self, goes: Callable[[Waiter], bool]) -> list[Waiter]:
        """Remove and return the requests for which `goes` returns True."""
        gone = [waiter for waiter in self if goes(waiter)]
        if gone:
            before = self.line
            self._shared.undo.note(lambda: self._undo_removal(before, gone))
            self.line = OrderedDict(
                (identity, waiter) for identity, waiter in before.items() if not goes(waiter)
            )
            for waiter in gone:
                self._count(waiter, -1)
        self.next_deadline = min((waiter.deadline for waiter in self), default=NEVER_US)
        return gone
