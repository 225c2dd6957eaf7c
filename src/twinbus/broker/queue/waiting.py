"""The waiting messages of one entity, in columns: one row per message, ordered by number.

    always    sequence int64 | state uint8 | failures int32 | enqueued int64 | size int32
              batch int64    | row int32                     (position of its body, see bodies.py)
    on first  expires int64  | due int64 | lock int64 | session int32 | death int32
    use       (37 bytes a message at rest, 53 once locked)

`due` is when a lock expires or a schedule is due; `lock` is the number of the lock or lease epoch.
Indices are positions in the columns; they are valid until `reclaim`, at the end of a turn.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinbus.broker.accounts.resources import ResourceCount
from twinbus.broker.lifecycle import FINAL, TABLE, Cause, State, step
from twinbus.broker.undo import Undo
from twinbus.limits import NEVER_US, SCAN_ROWS
from twinbus.message import Int64s

Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_ALWAYS: dict[str, type] = {
    "sequence": np.int64,
    "state": np.uint8,
    "failures": np.int32,
    "enqueued": np.int64,
    "size": np.int32,
    "batch": np.int64,
    "row": np.int32,
}
_ON_USE: dict[str, tuple[type, int]] = {
    "expires": (np.int64, NEVER_US),
    "due": (np.int64, NEVER_US),
    "lock": (np.int64, 0),
    "session": (np.int32, -1),
    "death": (np.int32, -1),
}
# Plain numbers: numpy is five times quicker with them than with enums.
_GONE, _PENDING, _ACTIVE = State.GONE.value, State.PENDING.value, State.ACTIVE.value
_AFTER = {cause: after.value for (before, cause), after in TABLE.items() if before is State.PENDING}
_STATES = len(State)
NO_ROWS: Indices = np.empty(0, np.intp)
_SMALLEST = 64
_LOCKED = (State.LOCKED.value, State.DEFERRED_LOCKED.value)
_TIMED = (State.LOCKED, State.DEFERRED_LOCKED, State.SCHEDULED)
_EXPIRING = (State.ACTIVE, State.DEFERRED, State.TRANSFERRING)


def once(at: Indices) -> Indices:
    """Return each row once, in order of first occurrence: a client may name a message twice."""
    if len(at) < 2 or (np.diff(at) > 0).all():
        return at
    return at[np.sort(np.unique(at, return_index=True)[1])]


def scheduled_shift(due: Int64s, by: int, now: int) -> Int64s:
    """Return by how much the expiry of scheduled messages moves when the clock is set to `now`.

    The time to live of a scheduled message begins when the message is due. So its expiry moves only
    if the clock was set forward beyond the due time. It moves by the time between the due time and
    `now`, at most by `by`.
    """
    late: Int64s = np.maximum(now - np.maximum(due, now - by), 0)
    return late


class Rows(NamedTuple):
    """New rows: per column an array, or one value for all rows."""

    sequence: Int64s
    enqueued: Any
    size: Any
    batch: Any
    row: Any
    state: Any = State.PENDING
    failures: Any = 0
    expires: Any = NEVER_US
    due: Any = NEVER_US
    lock: Any = 0
    session: Any = -1
    death: Any = -1


_NAMES = Rows._fields


class Waiting:
    """Columns of waiting messages; applies the lifecycle and maintains the counts."""

    def __init__(self, undo: Undo | None = None, resources: ResourceCount | None = None) -> None:
        self._undo = undo or Undo()
        self._resources = resources or ResourceCount()
        self._counted_bytes = 0  # the part of `_resources.memory_bytes` that these columns use
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.empty(_SMALLEST, kind) for name, kind in _ALWAYS.items()
        }
        self._width = sum(column.itemsize for column in self._columns.values())
        self._capacity = _SMALLEST
        self._end = 0
        self._is_in_time_order = True  # whether `enqueued` never decreases
        self._first_active = 0  # no deliverable row is before it
        self.counts = np.zeros(len(State), np.int64)
        self.live = 0  # number of rows that are not gone: the sum of the other counts
        self.size_in_bytes = 0
        self.next_due = NEVER_US  # a lower bound: nothing is due earlier
        self.next_expiry = NEVER_US  # a lower bound: nothing expires earlier

    def __len__(self) -> int:
        return self.live

    def count(self, *states: State) -> int:
        """Return the number of messages in these states."""
        return int(self.counts[list(states)].sum())

    def memory_bytes(self) -> int:
        """Return the memory of its rows in bytes."""
        return self._width * self._end

    def leave_count(self) -> None:
        """Subtract this memory from the namespace total: the entity is deleted."""
        self._resources.memory_bytes -= self._counted_bytes
        self._resources, self._counted_bytes = ResourceCount(), 0

    # -- undoing -------------------------------------------------------------------------------

    def _note_undo(
        self, name: str = "", at: Indices | None = None, before: npt.NDArray[Any] | None = None
    ) -> None:
        """Record how to undo a change: rows of a column, and what is derived from the columns."""
        counts, size, end, live = self.counts.copy(), self.size_in_bytes, self._end, self.live
        bounds = (self._first_active, self.next_due, self.next_expiry)

        def restore() -> None:
            if name:
                self._columns[name][at] = before
            self.counts[:] = counts
            self.size_in_bytes, self._end, self.live = size, end, live
            self._first_active, self.next_due, self.next_expiry = bounds

        self._undo.note(restore)

    # -- columns -------------------------------------------------------------------------------

    def get(self, name: str, at: Indices) -> npt.NDArray[Any]:
        """Return a column's values at these indices; an unused column has its default."""
        column = self._columns.get(name)
        if column is None:
            kind, default = _ON_USE[name]
            return np.full(len(at), default, kind)
        return column[at]

    def in_state(self, at: Indices, *states: State) -> Indices:
        """Return those of these rows that are in one of the states."""
        found = self._columns["state"][at]
        mask: Mask = found == states[0].value
        for state in states[1:]:
            mask |= found == state.value
        return at[mask]

    def locked_by(self, at: Indices, lock: int) -> Indices:
        """Return those of these rows whose lock or lease has this number."""
        mask: Mask = self.get("lock", at) == lock
        return at[mask]

    def put(self, name: str, at: Indices, values: Any) -> None:
        """Set a column's values at these indices."""
        column = self._columns.get(name)
        if column is None:
            column = self._make(name)
        if self._undo.is_on:
            self._note_undo(name, at, column[at])
        column[at] = values

    def _make(self, name: str) -> npt.NDArray[Any]:
        """Create a column that is made on first use."""
        kind, default = _ON_USE[name]
        # The system gives memory to rows beyond `_end` only when they are written.
        column: npt.NDArray[Any] = np.empty(self._capacity, kind)
        column[: self._end] = default
        self._columns[name] = column
        self._width += column.itemsize
        return column

    def all(self) -> Indices:
        """Return the indices of every row that is not gone, in order."""
        self._resources.looked_at += self._end
        return np.flatnonzero(self._columns["state"][: self._end] != _GONE)

    def deaths(self) -> set[int]:
        """Return the numbers of the dead-letter reasons of its messages."""
        if "death" not in self._columns:
            return set()
        return set(np.unique(self.get("death", self.all())).tolist())

    # -- adding --------------------------------------------------------------------------------

    def add(self, rows: Rows) -> int:
        """Append rows and return the index of the first; their numbers must be above all others."""
        count = len(rows.sequence)
        self._make_room(count)
        if self._undo.is_on:
            self._note_undo()
        columns, start, end = self._columns, self._end, self._end + count
        new = slice(start, end)
        for name, values in zip(_NAMES, rows, strict=True):
            column = columns.get(name)
            if column is None:
                default = _ON_USE[name][1]
                if values is default or not np.any(values != default):
                    continue
                column = self._make(name)
            column[new] = values
        if self._is_in_time_order:
            times = columns["enqueued"][max(start - 1, 0) : end]
            self._is_in_time_order = bool((times[1:] >= times[:-1]).all())
        self._end = end
        self.live += count
        # Most sends have one message, and numpy is slow with few numbers, so single values are
        # added without numpy.
        if isinstance(rows.state, int):
            self.counts[rows.state] += count
        else:
            self.counts += np.bincount(columns["state"][new], minlength=_STATES)
        if isinstance(rows.size, int) and count == 1:
            self.size_in_bytes += rows.size
        else:
            self.size_in_bytes += int(columns["size"][new].sum())
        if count and rows.due is not NEVER_US:
            self.next_due = min(self.next_due, int(np.min(rows.due)))
        if count and rows.expires is not NEVER_US:
            self.next_expiry = min(self.next_expiry, int(np.min(rows.expires)))
        self._first_active = min(self._first_active, start)
        return start

    def add_one(
        self, sequence: int, enqueued: int, size: int, batch: int, row: int = 0, **more: int
    ) -> int:
        """Append one row, with `more` values in the columns made on first use; return its index.

        It does the same as `add`, but several times faster: numpy is slow with few numbers.
        """
        start = self._end
        if start == self._capacity:
            self._make_room(1)
        if self._undo.is_on:
            bounds = (self._first_active, self.next_due, self.next_expiry)
            self._undo.note(partial(self._remove_last, size, bounds))
        columns = self._columns
        columns["sequence"][start] = sequence
        columns["state"][start] = _PENDING
        columns["failures"][start] = 0
        times = columns["enqueued"]
        times[start] = enqueued
        if start and enqueued < times[start - 1]:
            self._is_in_time_order = False
        columns["size"][start] = size
        columns["batch"][start] = batch
        columns["row"][start] = row
        for name in more:
            if name not in columns:
                self._make(name)
        if len(columns) > len(_ALWAYS):
            for name, (_, default) in _ON_USE.items():
                if name in columns:
                    columns[name][start] = more.get(name, default)
            self.next_due = min(self.next_due, more.get("due", NEVER_US))
            self.next_expiry = min(self.next_expiry, more.get("expires", NEVER_US))
        self._end = start + 1
        self.live += 1
        self.counts[_PENDING] += 1
        self.size_in_bytes += size
        self._first_active = min(self._first_active, start)
        return start

    def _remove_last(self, size: int, bounds: tuple[int, int, int]) -> None:
        """Undo `add_one`: `size` is that of the row, `bounds` are those before it."""
        self._end -= 1
        self.live -= 1
        self.counts[_PENDING] -= 1
        self.size_in_bytes -= size
        self._first_active, self.next_due, self.next_expiry = bounds

    def _make_room(self, count: int) -> None:
        if self._end + count <= self._capacity:
            return
        self._capacity = 2 * (self._end + count)
        for name, column in self._columns.items():
            grown = np.empty(self._capacity, column.dtype)
            grown[: self._end] = column[: self._end]
            self._columns[name] = grown

    # -- finding -------------------------------------------------------------------------------

    def find(self, sequence: Int64s) -> Indices:
        """Return the indices of these numbers; -1 for a number that is not here, or gone."""
        if not self._end:
            return np.full(len(sequence), -1, np.intp)
        numbers = self._columns["sequence"][: self._end]
        at = numbers.searchsorted(sequence)
        if len(at) == 1:  # as in most settlements; numpy is slow with few numbers
            row = int(at[0])
            if row == self._end or numbers[row] != sequence[0]:
                return np.full(1, -1, np.intp)
            return at if self._columns["state"][row] != _GONE else np.full(1, -1, np.intp)
        self._resources.looked_at += len(at)
        at[at == len(numbers)] = 0
        found = numbers[at] == sequence
        found &= self._columns["state"][at] != _GONE
        return np.where(found, at, -1)

    def locked(self, number: int, lock: int) -> Indices:
        """Return the index of a number if it has this lock; otherwise an empty array."""
        row = self.locked_row(number, lock)
        return NO_ROWS if row is None else np.full(1, row, np.intp)

    def locked_row(self, number: int, lock: int) -> int | None:
        """Return the index of a number if it has this lock; otherwise None."""
        columns, end = self._columns, self._end
        row = int(columns["sequence"][:end].searchsorted(number))
        if (
            row < end
            and columns["sequence"][row] == number
            and columns["state"][row] in _LOCKED
            and lock > 0
            and columns["lock"][row] == lock
        ):
            return row
        return None

    def first_in(self, state: State, but: Sequence[int] = ()) -> Indices:
        """Return the first row in a state whose lock or lease has none of the numbers in `but`."""
        position, width = 0, SCAN_ROWS
        while position < self._end:
            end = min(position + width, self._end)
            self._resources.looked_at += end - position
            at = np.flatnonzero(self._columns["state"][position:end] == state.value) + position
            if len(but):
                at = at[~np.isin(self.get("lock", at), list(but))]
            if len(at):
                return at[:1]
            position, width = end, width * 4
        return NO_ROWS

    def between(self, first: int, last: int) -> Indices:
        """Return the rows numbered first to last, both included, that are not gone."""
        numbers = self._columns["sequence"][: self._end]
        low = int(np.searchsorted(numbers, first))
        high = int(np.searchsorted(numbers, last, side="right"))
        self._resources.looked_at += high - low
        return np.flatnonzero(self._columns["state"][low:high] != _GONE) + low

    def in_batches(self, first: int, last: int) -> Indices:
        """Return the durable rows whose bodies are in these batches."""
        batch = self._columns["batch"][: self._end]
        mask = (batch >= first) & (batch <= last)
        mask &= self._columns["state"][: self._end] > _PENDING
        return np.flatnonzero(mask)

    def from_number(self, first: int, limit: int) -> Indices:
        """Return up to `limit` visible rows numbered `first` or above."""
        low = int(np.searchsorted(self._columns["sequence"][: self._end], first))
        return self._scan(low, limit, lambda states: states > _PENDING)[0]

    def deliverable(self, limit: int) -> Indices:
        """Return the first `limit` active rows, in order."""
        at, self._first_active = self._scan(
            self._first_active, limit, lambda states: states == _ACTIVE
        )
        return at

    def enqueued_before(self, moment: int, limit: int) -> Indices:
        """Return the first `limit` active rows that were enqueued before a time, in order."""
        times = self._columns["enqueued"][: self._end]
        if self._is_in_time_order:
            end = int(times.searchsorted(moment))
            at, first = self._scan(self._first_active, limit, lambda s: s == _ACTIVE, end)
            self._first_active = first if len(at) else max(self._first_active, end)
            return at
        at = self.in_state(self.all(), State.ACTIVE)
        return at[times[at] < moment][:limit]

    def _scan(
        self, start: int, limit: int, wanted: Any, stop: int | None = None
    ) -> tuple[Indices, int]:
        """Return up to `limit` wanted rows from index `start` on, and the index of the first.

        If there is no such row, the index is the number of all rows.
        """
        last = self._end if stop is None else stop
        found: list[Indices] = []
        states = self._columns["state"]
        missing = limit
        position, width = start, max(SCAN_ROWS, limit)
        while missing > 0 and position < last:
            end = min(position + width, last)
            self._resources.looked_at += end - position
            hits = np.flatnonzero(wanted(states[position:end]))[:missing] + position
            if len(hits):
                found.append(hits)
                missing -= len(hits)
            position, width = end, width * 4
        if not found:
            return np.empty(0, np.intp), self._end
        return (found[0] if len(found) == 1 else np.concatenate(found)), int(found[0][0])

    def unscheduled(self) -> Iterator[Indices]:
        """Yield the visible rows that are not scheduled, in parts that become larger."""
        position, width = 0, SCAN_ROWS
        while position < self._end:
            end = min(position + width, self._end)
            self._resources.looked_at += end - position
            states = self._columns["state"][position:end]
            wanted = (states > _PENDING) & (states != State.SCHEDULED.value)
            yield np.flatnonzero(wanted) + position
            position, width = end, width * 4

    def oldest_enqueued(self) -> int | None:
        """Return when the first visible, unscheduled message was enqueued; None if there is none.

        Rows are ordered by number, which is nearly the order of enqueueing.
        """
        if self.counts[_ACTIVE:].sum() == self.counts[State.SCHEDULED]:
            return None
        scheduled = State.SCHEDULED.value
        at, _ = self._scan(0, 1, lambda states: (states > _PENDING) & (states != scheduled))
        return int(self._columns["enqueued"][at[0]]) if len(at) else None

    def due(self, now: int) -> Indices:
        """Return rows whose lock expired or whose schedule is due, and update `next_due`."""
        if now < self.next_due:
            return np.empty(0, np.intp)
        state = self._columns["state"][: self._end]
        due = self._columns["due"][: self._end]
        timed = np.isin(state, _TIMED)
        ripe = timed & (due <= now)
        later = due[timed & ~ripe]
        self.next_due = int(later.min()) if len(later) else NEVER_US
        return np.flatnonzero(ripe)

    def expired(self, now: int) -> Indices:
        """Return rows that exceeded their time to live, and update `next_expiry`."""
        if now < self.next_expiry:
            return np.empty(0, np.intp)
        state = self._columns["state"][: self._end]
        expires = self._columns["expires"][: self._end]
        old = (expires <= now) & np.isin(state, _EXPIRING)
        # A row that is not durable yet cannot expire now: its time counts even if it has passed.
        later = expires[((expires > now) & (state != _GONE)) | (state == _PENDING)]
        self.next_expiry = int(later.min()) if len(later) else NEVER_US
        return np.flatnonzero(old)

    # -- changing states -----------------------------------------------------------------------

    def step(self, at: Indices, cause: Cause) -> None:
        """Change the states of these rows by a cause; nothing changes if one is not allowed."""
        if not len(at):
            return
        before = self._columns["state"][at]
        after = step(before, cause)
        if self._undo.is_on:
            self._note_undo("state", at, before)
        self._columns["state"][at] = after
        if len(at) == 1:
            self.counts[after[0]] += 1
            self.counts[before[0]] -= 1
        else:
            self.counts += np.bincount(after, minlength=_STATES)
            self.counts -= np.bincount(before, minlength=_STATES)
        if cause in FINAL:
            self.size_in_bytes -= int(self._columns["size"][at].sum())
            self.live -= len(at)
            return
        if (after == _ACTIVE).any():
            self._first_active = min(self._first_active, int(at.min()))
        if "expires" in self._columns:  # a message may have expired while it was locked
            self.next_expiry = min(self.next_expiry, int(self._columns["expires"][at].min()))

    def complete(self, row: int) -> int:
        """Remove a locked message, as `step` does with COMPLETED; return the batch of its body."""
        columns, before = self._columns, int(self._columns["state"][row])
        assert before in _LOCKED, before
        if self._undo.is_on:
            self._undo.note(partial(self._count_gone, row, before, -1))
        self._count_gone(row, before, 1)
        return int(columns["batch"][row])

    def _count_gone(self, row: int, before: int, sign: int) -> None:
        """Remove a row that was in state `before` (`sign` is 1), or undo that (-1)."""
        columns, counts = self._columns, self.counts
        columns["state"][row] = _GONE if sign > 0 else before
        counts[before] -= sign
        counts[_GONE] += sign
        self.size_in_bytes -= sign * int(columns["size"][row])
        self.live -= sign

    def admit(self, first: int, count: int, cause: Cause) -> None:
        """Change the states of rows that were just added: all are pending and consecutive."""
        after = _AFTER[cause]
        self._columns["state"][first : first + count] = after
        self.counts[after] += count
        self.counts[_PENDING] -= count
        if after == _ACTIVE and first < self._first_active:
            self._first_active = first

    def clear(self) -> None:
        """Remove every message."""
        self._columns["state"][: self._end] = _GONE
        self.counts[:] = 0
        self.counts[State.GONE] = self._end
        self.size_in_bytes = self.live = 0

    def set_due(self, at: Indices, due: int) -> None:
        """Set when the locks of these rows expire."""
        self.put("due", at, due)
        self.next_due = min(self.next_due, due)

    def forget_bounds(self) -> None:
        """Lower `next_due` and `next_expiry`, so that the next search checks every deadline."""
        if "due" in self._columns:
            self.next_due = 0
        if "expires" in self._columns:
            self.next_expiry = 0

    def shift(self, by: int, now: int) -> None:
        """Move all deadlines that are durations, because the wall clock was set to `now`.

        A schedule is a wall time and does not move.
        """
        rows = slice(self._end)
        if "due" in self._columns:
            state, due = self._columns["state"][rows], self._columns["due"][rows]
            moves = (state != State.SCHEDULED.value) & (due != NEVER_US)
            due[moves] += by
            self.next_due = min(int(due.min()), NEVER_US) if len(due) else NEVER_US
        if "expires" in self._columns:
            expires = self._columns["expires"][rows]
            moves = expires != NEVER_US
            if self.counts[State.SCHEDULED]:
                scheduled = self._columns["state"][rows] == State.SCHEDULED.value
                waits = scheduled & moves
                # A message that could not be forwarded has a later `due`, in memory only.
                due = self._columns["enqueued"][rows][waits]
                expires[waits] += scheduled_shift(due, by, now)
                moves &= ~scheduled
            expires[moves] += by
            self.next_expiry = int(expires.min()) if len(expires) else NEVER_US

    # -- space ---------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Remove the rows of messages that are gone, if they are at least a quarter of all rows.

        The remaining rows move up within the columns. Only a queue that has become much smaller
        gets smaller columns. Afterwards, add the memory in use to the total of the namespace. This
        is called at the end of a turn, so limits on memory see the rows of a turn in the next turn.
        """
        gone = int(self.counts[State.GONE])
        if gone >= _SMALLEST and 4 * gone >= self._end:
            self._drop_gone()
        used = self._width * self._end
        if used != self._counted_bytes:
            self._resources.memory_bytes += used - self._counted_bytes
            self._counted_bytes = used

    def _drop_gone(self) -> None:
        at = self.all()
        live = len(at)
        if self._capacity > 8 * max(live, _SMALLEST):
            self._capacity = 2 * max(live, _SMALLEST)
        for name, column in self._columns.items():
            kept = column[at]
            if len(column) != self._capacity:
                column = self._columns[name] = np.empty(self._capacity, column.dtype)  # noqa: PLW2901
            column[:live] = kept
        self._end = live
        self._first_active = 0
        self.counts[State.GONE] = 0
        times = self._columns["enqueued"][:live]
        self._is_in_time_order = bool((times[1:] >= times[:-1]).all())

    # -- invariants ----------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Return what is inconsistent: counts and sizes must agree with the columns."""
        found = []
        rows = slice(self._end)
        state = self._columns["state"][rows]
        if (np.bincount(state, minlength=_STATES) != self.counts).any():
            found.append(f"the counts {self.counts.tolist()} do not agree with the states")
        if self.live != np.count_nonzero(state != _GONE):
            found.append(f"{self.live} live messages are counted, which the states do not confirm")
        if (np.diff(self._columns["sequence"][rows]) <= 0).any():
            found.append("sequence numbers are not ascending")
        size = int(self._columns["size"][rows][state != _GONE].sum())
        if size != self.size_in_bytes:
            found.append(f"the total size is {self.size_in_bytes}, but the rows add up to {size}")
        active = np.flatnonzero(state == _ACTIVE)
        if len(active) and active[0] < self._first_active:
            found.append("a deliverable message is before the position where searches begin")
        return found
