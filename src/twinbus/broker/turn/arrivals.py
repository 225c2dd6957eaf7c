"""Requests that wait for a turn, and which of them are executed in the next one.

Any thread appends requests. The thread that runs a turn removes the requests of this turn: its
group. If all requests fit into one turn, they are its group. Otherwise they are sorted into lines,
one for each principal, and each group takes one request of each line in rotation. So no principal
has to wait until all requests of another are executed. The requests of one principal stay in order.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from twinbus.limits import MAX_BATCH_BYTES, TURN_WORK
from twinbus.protocol.requests import Request
from twinbus.protocol.table import CHANGES_DIRECTORY, is_small, size_of, work_of


class Arrivals(deque[Request]):
    """The requests that arrived since the last turn, and earlier ones that did not fit into a turn.

    The deque itself contains the requests that arrived; the lines contain the others.
    """

    def __init__(self) -> None:
        super().__init__()
        # By principal, in the order of rotation: the requests in order, by their `id()`.
        self._lines: dict[str, OrderedDict[int, Request]] = {}
        self.queued = 0  # number of requests in the lines
        self._changed_directory = False  # whether the last turn changed the directory

    def clear(self) -> None:
        """Remove every request."""
        super().clear()
        self._lines.clear()
        self.queued = 0

    def everything(self) -> list[Request]:
        """Return every request."""
        return [*(request for line in self._lines.values() for request in line.values()), *self]

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Remove these requests if they wait here."""
        if self:
            self._sort([self.popleft() for _ in range(len(self))])
        for request in requests:
            line = self._lines.get(request.principal.id)
            if line is not None and line.pop(id(request), None) is not None:
                self._shorten(request.principal.id, line)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put back requests for which the last turn had no time; the next turn begins with them."""
        for request in reversed(requests):
            line = self._lines.setdefault(request.principal.id, OrderedDict())
            line[id(request)] = request
            line.move_to_end(id(request), last=False)
        first = dict.fromkeys([request.principal.id for request in requests])
        self._lines = {principal: self._lines[principal] for principal in [*first, *self._lines]}
        self.queued += len(requests)

    def next_group(self, *, is_careful: bool) -> list[Request]:
        """Remove and return the requests of the next turn.

        A change of the directory of entities gets a separate turn; if other requests wait, the next
        turn is for these. If `is_careful`, because the broker has just restarted itself, every
        request gets a separate turn.
        """
        if len(self) == 1 and not self.queued:  # nearly always
            self._changed_directory = type(self[0].command) in CHANGES_DIRECTORY
            return [self.popleft()]
        arrived = [self.popleft() for _ in range(len(self))]
        if not self.queued and not is_careful and _fits(arrived):
            self._changed_directory = False
            return arrived
        self._sort(arrived)
        if is_careful:
            return [self._take(next(iter(self._lines)))] if self._lines else []
        change = self._next_change()
        if change is not None and not self._changed_directory:
            self._changed_directory = True
            return [self._take(change)]
        group = self._fair_group()
        if not group and change is not None:
            return [self._take(change)]
        self._changed_directory = False
        return group

    def _sort(self, requests: Iterable[Request]) -> None:
        """Add requests to the ends of the lines."""
        lines = self._lines
        for request in requests:
            line = lines.get(request.principal.id)
            if line is None:
                line = lines[request.principal.id] = OrderedDict()
            line[id(request)] = request
            self.queued += 1

    def _shorten(self, principal: str, line: "OrderedDict[int, Request]") -> None:
        """Count the request that was removed from a line; remove the line if it is empty."""
        self.queued -= 1
        if not line:
            del self._lines[principal]

    def _take(self, principal: str) -> Request:
        """Remove and return the first request of a line, which becomes the last in rotation."""
        line = self._lines[principal] = self._lines.pop(principal)
        _, request = line.popitem(last=False)
        self._shorten(principal, line)
        return request

    def _next_change(self) -> str | None:
        """Return the first principal in rotation whose next request changes the directory."""
        for principal, line in self._lines.items():
            if type(next(iter(line.values())).command) in CHANGES_DIRECTORY:
                return principal
        return None

    def _fair_group(self) -> list[Request]:
        """Remove and return one request of each line in rotation, up to the work of a turn.

        The first request of a principal is part of the group, even beyond the work of a turn, if it
        is small. Principals whose large request does not fit are first in the next turn.
        """
        group: list[Request] = []
        served: set[str] = set()
        # Principals with requests for later turns; those without a request in this turn are first.
        passed: list[str] = []
        rotation = deque(self._lines)
        work = size = 0
        while rotation:
            principal = rotation.popleft()
            line = self._lines[principal]
            request = next(iter(line.values()))
            command = request.command
            if type(command) in CHANGES_DIRECTORY:
                passed.append(principal)
                continue
            own_work, own_size = work_of(command), size_of(command)
            is_beyond = work + own_work > TURN_WORK or size + own_size > MAX_BATCH_BYTES
            if group and is_beyond and (principal in served or not is_small(command)):
                passed.append(principal)
                continue
            work, size = work + own_work, size + own_size
            line.popitem(last=False)
            group.append(request)
            served.add(principal)
            if line:
                rotation.append(principal)
        self._lines = {principal: self._lines[principal] for principal in passed}
        self.queued -= len(group)
        return group


def _fits(requests: Sequence[Request]) -> bool:
    """Return whether requests can be executed together in one turn."""
    work = size = 0
    for request in requests:
        command = request.command
        if type(command) in CHANGES_DIRECTORY:
            return False
        work += work_of(command)
        size += size_of(command)
    return work <= TURN_WORK and size <= MAX_BATCH_BYTES
