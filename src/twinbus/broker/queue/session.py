"""The sessions of an entity: their messages, locks and states.

Until the lock of a session expires, only the receiver that locked it gets its messages, in order.
Each session has an id, which the application chose (here its *name*), and a small number, which
rows contain. A session without messages and without a lock uses no memory, except for its state.

A `Queue` has one `Sessions` object and calls it from the thread with the turn.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from twinbus.broker.lifecycle import State
from twinbus.broker.queue.waiting import Indices, Waiting
from twinbus.broker.undo import Undo
from twinbus.limits import NEVER_US, SCAN_ROWS
from twinbus.message import Int64s

_Wanted = Callable[[npt.NDArray[np.uint8]], Any]  # selects states
_FIRST_ROWS = 16  # rows that a search reads first: most searches end there


@dataclass(slots=True)
class GrantedLock:
    """The exclusive lock of a receiver on a session."""

    number: int  # the lock number, which is part of the token
    until: int  # when the lock expires


@dataclass(slots=True)
class _Session:
    name: str
    # Of its messages, in order; numbers of messages that are gone stay here until `_trim`.
    sequence_numbers: "array[int]" = field(default_factory=lambda: array("q"))
    expected: int = 0  # number of messages that are not durable yet
    trim_at: int = 0  # the length of `sequence_numbers` at which `_trim` is called


class Sessions:
    """The sessions of an entity, by name and by number."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self.by_number: dict[int, _Session] = {}
        self._numbers: dict[str, int] = {}  # by name
        self._free: list[int] = []  # numbers of removed sessions, to be used again
        self._locks: dict[str, GrantedLock] = {}  # by name
        self.next_due = NEVER_US  # a lower bound: no lock expires earlier
        # Numbers of unlocked sessions that may have deliverable messages, in the order in which the
        # sessions became candidates.
        self._candidates: dict[int, None] = {}
        self.states: dict[str, bytes] = {}  # by name
        self.updated: dict[str, int] = {}  # by name: when the state of the session was set
        self.state_bytes = 0  # size of all states and of the names of their sessions

    def number_of(self, name: str) -> int:
        """Return the number of a session; a session without one gets a new number."""
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[name] = number
            self.by_number[number] = _Session(name)
            self._undo.note(lambda: self.forget_idle([number]))
        return number

    def add(self, numbers: Iterable[int], sequence: Int64s) -> None:
        """Add visible messages: for each the number of its session, and its sequence number."""
        for number, sequence_number in zip(numbers, sequence.tolist(), strict=True):
            session = self.by_number[number]
            session.sequence_numbers.append(sequence_number)
            self._undo.note(session.sequence_numbers.pop)
            self._add_candidate(number)

    def expect(self, numbers: Iterable[int], change: int) -> None:
        """Change the number of messages of each session that are not durable yet.

        `change` is 1 when a message is staged, and -1 when the message is durable or was refused.
        """
        for number in numbers:
            self.by_number[number].expected += change
        if self._undo.is_on:
            changed = list(numbers)
            self._undo.note(lambda: self.expect(changed, -change))

    def _add_candidate(self, number: int) -> None:
        if self.by_number[number].name not in self._locks:
            self._candidates.setdefault(number)

    def note_deliverable(self, numbers: Iterable[int]) -> None:
        """Record that messages of these sessions may be deliverable again."""
        for number in numbers:
            if number in self.by_number:
                self._add_candidate(number)

    def keep_state(self, name: str, state: bytes | None, updated: int) -> None:
        """Set the state of a session and the time of this change; None removes the state."""
        before = self.states.pop(name, None)
        self.updated.pop(name, None)
        if before is not None:
            self.state_bytes -= len(name) + len(before)
        if state is not None:
            self.states[name] = state
            self.updated[name] = updated
            self.state_bytes += len(name) + len(state)

    def listed(self, waiting: Waiting, skip: int, most: int) -> list[str]:
        """Return a page of the names of sessions that have unscheduled messages or a state.

        Sessions with messages come first, in the order of their oldest unscheduled message. The
        search stops when the page is full.
        """
        if skip >= len(self.by_number) + len(self.states):
            return []
        has_messages = np.zeros(max(self.by_number, default=-1) + 1, np.bool_)
        active: list[int] = []
        for at in waiting.unscheduled():
            sessions = waiting.get("session", at)
            sessions = sessions[~has_messages[sessions]]
            firsts = np.sort(np.unique(sessions, return_index=True)[1])
            has_messages[sessions] = True
            active += sessions[firsts].tolist()
            if len(active) >= skip + most:
                break
        page = [self.by_number[session].name for session in active[skip : skip + most]]
        if len(page) < most:
            stated = (name for name in self.states if not self._is_among(name, has_messages))
            first = max(skip - len(active), 0)
            page += islice(stated, first, first + most - len(page))
        return page

    def _is_among(self, name: str, has_messages: npt.NDArray[np.bool_]) -> bool:
        """Return whether a session has messages; `has_messages` is indexed by session number."""
        number = self._numbers.get(name)
        return number is not None and number < len(has_messages) and bool(has_messages[number])

    def updated_after(self, moment: int) -> list[str]:
        """Return the sessions whose state was set after this time."""
        return [name for name, updated in self.updated.items() if updated > moment]

    # -- locks ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of sessions that have messages or a lock."""
        return len(self.by_number)

    @property
    def locked(self) -> int:
        """The number of locked sessions."""
        return len(self._locks)

    def renew(self, lock: GrantedLock, until: int) -> None:
        """Set when the lock of a session expires."""
        before = lock.until
        lock.until = until
        self._undo.note(lambda: setattr(lock, "until", before))

    def shift(self, by: int) -> None:
        """Move every deadline, because the wall clock was set."""
        for lock in self._locks.values():
            lock.until += by
        self.next_due = min((lock.until for lock in self._locks.values()), default=NEVER_US)

    def lock_of(self, name: str) -> GrantedLock | None:
        """Return the lock of a session; None if the session is not locked."""
        return self._locks.get(name)

    def grant(self, name: str, lock: int, until: int) -> None:
        """Lock an unlocked session; `lock` is the lock number."""
        self._candidates.pop(self.number_of(name), None)
        self._locks[name] = GrantedLock(lock, until)
        self.next_due = min(self.next_due, until)
        self._undo.note(lambda: self._withdraw(name))

    def _withdraw(self, name: str) -> None:
        """Undo `grant`."""
        del self._locks[name]
        self._candidates.setdefault(self._numbers[name])

    def release(self, name: str, waiting: Waiting) -> None:
        """Remove the lock of a session."""
        lock, number = self._locks.pop(name), self._numbers[name]
        session = self.by_number[number]
        sequence_numbers = session.sequence_numbers

        def restore() -> None:
            if name not in self._numbers:
                self._free.remove(number)
                self._numbers[name], self.by_number[number] = number, session
            session.sequence_numbers, self._locks[name] = sequence_numbers, lock
            self._candidates.pop(number, None)
            self.next_due = min(self.next_due, lock.until)

        self._undo.note(restore)
        self._candidates.setdefault(number)
        _trim(session, waiting)
        self.forget_idle([number])

    def expired(self, now: int) -> list[str]:
        """Return the names of sessions whose locks have expired, and update `next_due`."""
        if now < self.next_due:
            return []
        later = (lock.until for lock in self._locks.values() if lock.until > now)
        self.next_due = min(later, default=NEVER_US)
        return [name for name, lock in self._locks.items() if lock.until <= now]

    def available(self, waiting: Waiting) -> str | None:
        """Return the name of the first candidate with deliverable messages; None if there is none.

        Candidates without deliverable messages are removed.
        """
        while self._candidates:
            number = next(iter(self._candidates))
            session = self.by_number[number]
            if len(self.deliverable(session.name, 1, waiting)):
                return session.name
            del self._candidates[number]
            _trim(session, waiting)
            self.forget_idle([number])
        return None

    # -- messages ------------------------------------------------------------------------------

    def deliverable(self, name: str, limit: int, waiting: Waiting) -> Indices:
        """Return the first active messages of a session, in order."""
        session = self.by_number[self._numbers[name]]
        if len(session.sequence_numbers) >= session.trim_at:
            _trim(session, waiting)
        numbers = session.sequence_numbers
        return _found(numbers, 0, limit, waiting, lambda s: s == State.ACTIVE.value)

    def visible(self, name: str, first: int, limit: int, waiting: Waiting) -> Indices:
        """Return up to `limit` visible messages of a session, from sequence number `first` on."""
        number = self._numbers.get(name)
        if number is None:
            return np.empty(0, np.intp)
        numbers = self.by_number[number].sequence_numbers
        return _found(
            numbers, bisect_left(numbers, first), limit, waiting, lambda s: s > State.PENDING.value
        )

    def messages(self, name: str, waiting: Waiting) -> Indices:
        """Return every message of a session that is not gone, in order."""
        if name not in self._numbers:
            return np.empty(0, np.intp)
        numbers = np.array(self.by_number[self._numbers[name]].sequence_numbers, np.int64)
        at = waiting.find(numbers)
        return at[at >= 0]

    def forget_idle(self, numbers: Iterable[int]) -> None:
        """From these sessions, remove the ones without messages and without a lock."""
        for number in numbers:
            session = self.by_number.get(number)
            if session is None or session.name in self._locks:
                continue
            if not session.sequence_numbers and not session.expected:
                self._candidates.pop(number, None)
                del self.by_number[number], self._numbers[session.name]
                self._free.append(number)


def _found(
    numbers: "array[int]", start: int, limit: int, waiting: Waiting, wanted: _Wanted
) -> Indices:
    """Return the rows of up to `limit` messages in wanted states.

    The search begins at index `start` of `numbers`, the sequence numbers of a session.
    """
    found: list[Indices] = []
    missing, width = limit, max(_FIRST_ROWS, min(limit, SCAN_ROWS))
    while missing > 0 and start < len(numbers):
        at = waiting.find(np.array(numbers[start : start + width], np.int64))
        start, width = start + len(at), min(4 * width, SCAN_ROWS)
        at = at[at >= 0]
        at = at[wanted(waiting.get("state", at))][:missing]
        missing -= len(at)
        found.append(at)
    return np.concatenate(found) if found else np.empty(0, np.intp)


def _trim(session: _Session, waiting: Waiting) -> None:
    """Remove the sequence numbers of messages that are gone."""
    numbers = np.array(session.sequence_numbers, np.int64)
    session.sequence_numbers = array("q", numbers[waiting.find(numbers) >= 0].tolist())
    session.trim_at = 2 * len(session.sequence_numbers)
