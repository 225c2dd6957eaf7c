"""The sessions of an entity: their messages, locks and states.

A session belongs to the receiver that locked it until the lock expires; its messages are delivered
in order. Sessions with neither messages nor a lock need no memory, except for their state.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from twinbus.broker.lifecycle import State
from twinbus.broker.queue.waiting import Indices, Waiting
from twinbus.broker.undo import Undo
from twinbus.limits import NEVER_US, SCAN_ROWS
from twinbus.message import Int64s


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
            held = list(ids)
            self._undo.note(lambda: self.expect(held, -count))

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
        """Return a page of the sessions that have messages, except scheduled ones, or a state."""
        if skip >= len(self.by_id) + len(self.states):
            return []
        at = waiting.all()
        states = waiting.get("state", at)
        at = at[(states != State.PENDING) & (states != State.SCHEDULED)]
        has_messages = np.zeros(max(self.by_id, default=-1) + 1, np.bool_)
        has_messages[waiting.get("session", at)] = True
        active = np.flatnonzero(has_messages)
        page = [self.by_id[session].name for session in active[skip : skip + most].tolist()]
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
    def held(self) -> int:
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
        found: list[Indices] = []
        missing, start = limit, 0
        while missing > 0 and start < len(session.numbers):
            at = waiting.find(np.array(session.numbers[start : start + SCAN_ROWS], np.int64))
            start += len(at)
            at = waiting.in_state(at[at >= 0], State.ACTIVE)[:missing]
            missing -= len(at)
            found.append(at)
        return np.concatenate(found) if found else np.empty(0, np.intp)

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


def _trim(session: _Session, waiting: Waiting) -> None:
    """Remove the numbers of messages that are gone."""
    numbers = np.array(session.numbers, np.int64)
    session.numbers = array("q", numbers[waiting.find(numbers) >= 0].tolist())
    session.trim_at = 2 * len(session.numbers)
