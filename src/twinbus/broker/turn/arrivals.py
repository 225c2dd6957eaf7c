"""Requests that wait for a turn, and which of them are executed in the next one.

Any thread adds requests. The thread with the turn removes them.
"""

from collections import deque

from twinbus.limits import MAX_BATCH_BYTES
from twinbus.protocol.requests import Request
from twinbus.protocol.table import CHANGES_DIRECTORY, size_of


class Arrivals(deque[Request]):
    """The requests of the turns to come, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._withdrawn: set[int] = set()  # identities of withdrawn requests
        self._changed_directory = False  # whether the last turn changed the directory

    def withdraw(self, gone: set[int]) -> None:
        """Skip requests with these identities."""
        self._withdrawn |= gone & set(map(id, list(self)))

    def next_group(self, *, is_careful: bool) -> list[Request]:
        """Remove and return the requests of the next turn, limited by the size of a batch.

        A change of the directory gets a separate turn, and so does every request after a restart
        of the broker, while it is careful.
        """
        if len(self) == 1 and not self._withdrawn:  # nearly always
            self._changed_directory = type(self[0].command) in CHANGES_DIRECTORY
            return [self.popleft()]
        while self._withdrawn and self and id(self[0]) in self._withdrawn:
            self._withdrawn.discard(id(self.popleft()))
        if self and type(self[0].command) in CHANGES_DIRECTORY:
            others = self._others() if self._changed_directory else []
            self._changed_directory = not others
            return others or [self.popleft()]
        self._changed_directory = False
        if self and is_careful:
            return [self.popleft()]
        group: list[Request] = []
        size = 0
        while self and type(self[0].command) not in CHANGES_DIRECTORY:
            size += size_of(self[0].command)
            if group and size > MAX_BATCH_BYTES:
                break
            request = self.popleft()
            if id(request) in self._withdrawn:
                self._withdrawn.discard(id(request))
            else:
                group.append(request)
        return group

    def _others(self) -> list[Request]:
        """Return requests of other keys, which a key with many directory changes must not block.

        The requests of each key stay in order.
        """
        waits: set[str] = set()  # principals with earlier changes that wait
        group: list[Request] = []
        size = 0
        for request in list(self):
            if type(request.command) in CHANGES_DIRECTORY:
                waits.add(request.principal.id)
            elif request.principal.id not in waits and id(request) not in self._withdrawn:
                size += size_of(request.command)
                if group and size > MAX_BATCH_BYTES:
                    break
                group.append(request)
        for request in group:
            self.remove(request)
        return group
