"""The sessions of an entity: their messages, locks and states.

A session belongs to the receiver that locked it until the lock expires; its messages are delivered
in order. Sessions with neither messages nor a lock need no memory, except for their state.
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
_FIRST_ROWS = 16  # looked at first: most searches find what they want there


@dataclass(slots=True)
class SessionHold:
    """An exclusive lock on a session."""

    lock: int
    until: int


@dataclass(slots=True)
class _Session:
    name: str
    numbers: "array[int]" = field(default_factory=lambda: array("q"))  # of its messages, in order
    expected: int = 0  # number of messages that are not durable yet
    trim_at: int = 0  # the length of `numbers` at which removed messages are trimmed


class Sessions:
    """The sessions of an entity, by id and by the small number that rows contain."""

    def __init__(self, undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self.by_id: dict[int, _Session] = {}
        self._ids: dict[str, int] = {}
        self._free: list[int] = []
        self._holds: dict[str, SessionHold] = {}
        self.next_due = NEVER_US  # a lower bound: no lock expires earlier
        self._candidates: dict[int, None] = {}  # may have deliverable messages, oldest first
        self.states: dict[str, bytes] = {}
        self.updated: dict[str, int] = {}  # by session id: when its state was set
        self.state_bytes = 0  # size of all states and their ids

    def id(self, name: str) -> int:
        """Return the number of a session in rows."""
        known = self._ids.get(name)
        if known is None:
            known = self._free.pop() if self._free else len(self._ids)
            self._ids[name] = known
            self.by_id[known] = _Session(name)
            self._undo.note(lambda: self.forget_idle([known]))
        return known

    def add(self, ids: Iterable[int], numbers: Int64s) -> None:
        """Add messages of sessions."""
        for session_id, number in zip(ids, numbers.tolist(), strict=True):
            session = self.by_id[session_id]
            session.numbers.append(number)
            self._undo.note(session.numbers.pop)
            self._nominate(session_id)

    def expect(self, ids: Iterable[int], count: int) -> None:
        """Count messages of these sessions that are not durable yet, or (-1) no longer are."""
        for session_id in ids:
            self.by_id[session_id].expected += count
        if self._undo.is_on:
            session_ids = list(ids)
            self._undo.note(lambda: self.expect(session_ids, -count))

    def _nominate(self, session_id: int) -> None:
        if self.by_id[session_id].name not in self._holds:
            self._candidates.setdefault(session_id)

    def stir(self, ids: Iterable[int]) -> None:
        """Record that messages of these sessions may be deliverable again."""
        for session_id in ids:
            if session_id in self.by_id:
                self._nominate(session_id)

    def keep_state(self, name: str, state: bytes | None, updated: int) -> None:
        """Set the state of a session and its time; None removes it."""
        before = self.states.pop(name, None)
        self.updated.pop(name, None)
        if before is not None:
            self.state_bytes -= len(name) + len(before)
        if state is not None:
            self.states[name] = state
            self.updated[name] = updated
            self.state_bytes += len(name) + len(state)

    def listed(self, waiting: Waiting, skip: int, most: int) -> list[str]:
        """Return a page of the sessions that have messages, except scheduled ones, or a state.

        They are in the order of their oldest such messages; it looks at no more rows than needed.
        """
        if skip >= len(self.by_id) + len(self.states):
            return []
        has_messages = np.zeros(max(self.by_id, default=-1) + 1, np.bool_)
        active: list[int] = []
        for at in waiting.unscheduled():
            sessions = waiting.get("session", at)
            sessions = sessions[~has_messages[sessions]]
            firsts = np.sort(np.unique(sessions, return_index=True)[1])
            has_messages[sessions] = True
            active += sessions[firsts].tolist()
            if len(active) >= skip + most:
                break
        page = [self.by_id[session].name for session in active[skip : skip + most]]
        if len(page) < most:
            stated = (name for name in self.states if not self._is_among(name, has_messages))
            first = max(skip - len(active), 0)
            page += islice(stated, first, first + most - len(page))
        return page

    def _is_among(self, name: str, has_messages: npt.NDArray[np.bool_]) -> bool:
        known = self._ids.get(name)
        return known is not None and known < len(has_messages) and bool(has_messages[known])

    def updated_after(self, moment: int) -> list[str]:
        """Return the sessions whose state was set after this time."""
        return [name for name, updated in self.updated.items() if updated > moment]

    # -- locks ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of sessions that have messages or a lock."""
        return len(self.by_id)

    @property
    def locked(self) -> int:
        """The number of locked sessions."""
        return len(self._holds)

    def renew(self, hold: SessionHold, until: int) -> None:
        """Set when the lock of a session expires."""
        before = hold.until
        hold.until = until
        self._undo.note(lambda: setattr(hold, "until", before))

    def shift(self, by: int) -> None:
        """Move every deadline, because the wall clock was set."""
        for hold in self._holds.values():
            hold.until += by
        self.next_due = min((hold.until for hold in self._holds.values()), default=NEVER_US)

    def hold(self, name: str) -> SessionHold | None:
        """Return the lock of a session."""
        return self._holds.get(name)

    def grant(self, name: str, lock: int, until: int) -> None:
        """Lock an unlocked session."""
        self._candidates.pop(self.id(name), None)
        self._holds[name] = SessionHold(lock, until)
        self.next_due = min(self.next_due, until)
        self._undo.note(lambda: self._take_back(name))

    def _take_back(self, name: str) -> None:
        """Undo a grant."""
        del self._holds[name]
        self._candidates.setdefault(self._ids[name])

    def let_go(self, name: str, waiting: Waiting) -> None:
        """Remove the lock of a session."""
        hold, known = self._holds.pop(name), self._ids[name]
        session = self.by_id[known]
        numbers = session.numbers

        def give_again() -> None:
            if name not in self._ids:
                self._free.remove(known)
                self._ids[name], self.by_id[known] = known, session
            session.numbers, self._holds[name] = numbers, hold
            self._candidates.pop(known, None)
            self.next_due = min(self.next_due, hold.until)

        self._undo.note(give_again)
        self._candidates.setdefault(known)
        _trim(session, waiting)
        self.forget_idle([known])

    def lapsed(self, now: int) -> list[str]:
        """Return the sessions whose locks have expired, and update the bound."""
        if now < self.next_due:
            return []
        later = (hold.until for hold in self._holds.values() if hold.until > now)
        self.next_due = min(later, default=NEVER_US)
        return [name for name, hold in self._holds.items() if hold.until <= now]

    def available(self, waiting: Waiting) -> str | None:
        """Return the unlocked session whose deliverable messages have waited longest."""
        while self._candidates:
            session_id = next(iter(self._candidates))
            session = self.by_id[session_id]
            if len(self.deliverable(session.name, 1, waiting)):
                return session.name
            del self._candidates[session_id]
            _trim(session, waiting)
            self.forget_idle([session_id])
        return None

    # -- messages ------------------------------------------------------------------------------

    def deliverable(self, name: str, limit: int, waiting: Waiting) -> Indices:
        """Return the first active messages of a session, in order."""
        session = self.by_id[self._ids[name]]
        if len(session.numbers) >= session.trim_at:
            _trim(session, waiting)
        return _found(session.numbers, 0, limit, waiting, lambda s: s == State.ACTIVE.value)

    def visible(self, name: str, first: int, limit: int, waiting: Waiting) -> Indices:
        """Return up to `limit` visible messages of a session, numbered `first` or above."""
        known = self._ids.get(name)
        if known is None:
            return np.empty(0, np.intp)
        numbers = self.by_id[known].numbers
        return _found(
            numbers, bisect_left(numbers, first), limit, waiting, lambda s: s > State.PENDING.value
        )

    def messages(self, name: str, waiting: Waiting) -> Indices:
        """Return every message of a session that is not gone, in order."""
        if name not in self._ids:
            return np.empty(0, np.intp)
        numbers = np.array(self.by_id[self._ids[name]].numbers, np.int64)
        at = waiting.find(numbers)
        return at[at >= 0]

    def forget_idle(self, ids: Iterable[int]) -> None:
        """Remove those of these sessions that have neither messages nor a lock."""
        for session_id in ids:
            session = self.by_id.get(session_id)
            if session is None or session.name in self._holds:
                continue
            if not session.numbers and not session.expected:
                self._candidates.pop(session_id, None)
                del self.by_id[session_id], self._ids[session.name]
                self._free.append(session_id)


def _found(
    numbers: "array[int]", start: int, limit: int, waiting: Waiting, wanted: _Wanted
) -> Indices:
    """Return up to `limit` messages in wanted states, from a position in their numbers on."""
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
    """Remove the numbers of messages that are gone."""
    numbers = np.array(session.numbers, np.int64)
    session.numbers = array("q", numbers[waiting.find(numbers) >= 0].tolist())
    session.trim_at = 2 * len(session.numbers)
