"""What one turn writes to the log, and what changes in memory when the log has it or refuses it.

There are two kinds of entries. *Kept* entries describe what already happened in memory (a message
was settled or dead-lettered): if the log refuses the commit, they are written with the next one.
*Tentative* entries (new messages, new entities) are dropped with a refused commit. An `Effect` is
the change in memory in either case.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from twinbus.broker.lifecycle import Cause, State
from twinbus.broker.store.change_rows import ChangeRow, ChangeRows
from twinbus.broker.store.entry_rows import EntryRows, IdRow, PlaceRow
from twinbus.broker.store.log_format import SCHEMAS, Part, PartKind, Sent
from twinbus.broker.store.message_rows import MessageRows
from twinbus.errors import MessagingError
from twinbus.intervals import Intervals, pack
from twinbus.limits import ENTRIES_AS_ROWS, MAX_FACTS_BYTES, NEVER_US
from twinbus.message import Int64s, column_of
from twinbus.protocol.operations import Operation
from twinbus.protocol.origins import sender_number
from twinbus.protocol.requests import Request

_GONE, _COMPLETED = State.GONE.value, Cause.COMPLETED.value
TAKEN = "taken"  # a fact with packed numbers of an origin; older logs have "transferred", in JSON


@dataclass(frozen=True, slots=True)
class Fact:
    """A keyed value: the last value of a key in the log is valid, and None deletes the key."""

    kind: str
    key: str
    value: bytes | None

    @property
    def size(self) -> int:
        """Its approximate size in bytes."""
        return len(self.kind) + len(self.key) + len(self.value or b"")

    @classmethod
    def of(cls, kind: str, key: object, value: object) -> "Fact":
        """Return a fact whose value is JSON."""
        return cls(kind, str(key), json.dumps(value, separators=(",", ":")).encode())


class Effect:
    """What a turn does in memory when its record is durable, or when the log refuses it."""

    __slots__ = ()

    def durable(self) -> None:
        """Apply what requires a durable record."""

    def refused(self) -> None:
        """Undo what the turn changed in memory."""


class BatchTarget(NamedTuple):
    """The entity that gets all rows of a batch: no places need to be written for such a batch."""

    entity: int
    first_sequence: int
    time: int


@dataclass(slots=True)
class Entries:
    """Facts, places and changes to be written to the log."""

    facts: list[Fact] = field(default_factory=list)
    # Each item is about one message, or has the columns of several messages: an array for each
    # column, or one value for all rows.
    places: list[PlaceRow | dict[str, Any]] = field(default_factory=list)
    changes: list[ChangeRow | dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.facts or self.places or self.changes)

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self.facts) + len(self.places) + len(self.changes)

    def shift(self, by: int) -> None:
        """Move the expiry times of places, because the wall clock was set."""
        for at, place in enumerate(self.places):
            if isinstance(place, PlaceRow):
                if place.expires != NEVER_US:
                    self.places[at] = place._replace(expires=place.expires + by)
                continue
            expires = np.asarray(place["expires"])
            place["expires"] = np.where(expires == NEVER_US, expires, expires + by)

    def change(self, entity: int, sequence: Int64s, state: Any, failures: Any = 0) -> None:
        """Add new states of messages."""
        if len(sequence):
            columns = {"entity": entity, "sequence": sequence, "state": state, "failures": failures}
            self.changes.append(columns)

    def gone(self, entity: int, sequence: Int64s, cause: Cause) -> None:
        """Add that messages left an entity, with the cause in the column of failures."""
        self.change(entity, sequence, State.GONE, cause.value)

    def completed_one(self, entity: int, sequence: int) -> None:
        """Add that one message was completed, as `gone` does, but without arrays."""
        self.changes.append(ChangeRow(entity, sequence, _GONE, _COMPLETED))


class Transferred(NamedTuple):
    """Numbers of an origin that this turn accepts."""

    source: str
    owner: str  # the key that the origin belongs to or counts for; empty: none
    is_new: bool  # whether the owner must be written to the log
    intervals: Sequence[tuple[int, int]]


Savepoint = tuple[list[int], bool]  # the lengths of a commit's lists; its `must_sync`


class Commit:
    """The entries and replies of one turn."""

    def __init__(self, first_batch: int, kept: Entries | None = None) -> None:
        self.first_batch = first_batch
        self.kept = Entries() if kept is None else kept
        self._inherited = self.kept.count if kept else 0
        self.tentative = Entries()
        self.batches: list[Part] = []
        self.history: list[tuple[int, Sequence[str], Any]] = []  # entity, message ids, time(s)
        self.transferred: list[Transferred] = []  # in this turn
        # `transferred` by source: owner and numbers; None until it is first needed.
        self._origins: dict[str, tuple[str, Intervals]] | None = None
        # Whether replies must wait for the disk. Kept places were refused by the log in an earlier
        # turn: their new numbers must not be visible before the log has them.
        self.must_sync = bool(self.kept.places)
        self.only_compacts = False  # whether it only moves data, so that a segment can be dropped
        self.effects: list[Effect] = []  # in the order in which the turn added them
        self.replies: list[tuple[Request, Any]] = []
        self.refusals: list[tuple[Request, MessagingError]] = []
        # Operations that the meter counts when the turn is answered: of replies and of refusals.
        self.operations: list[Operation] = []
        self.refused_operations: list[Operation] = []
        self._lists: tuple[list[Any], ...] = (
            *(self.kept.facts, self.kept.places, self.kept.changes),
            *(self.tentative.facts, self.tentative.places, self.tentative.changes),
            *(self.batches, self.history, self.transferred, self.effects),
            *(self.replies, self.refusals, self.operations, self.refused_operations),
        )

    def reply(self, request: Request, value: Any, operation: Operation | None = None) -> None:
        """Answer a request after the turn.

        Sends pass no `operation`: the operations of several sends are added together.
        """
        self.replies.append((request, value))
        if operation is not None:
            self.operations.append(operation)

    def refuse(
        self, request: Request, error: MessagingError, operation: Operation | None = None
    ) -> None:
        """Refuse a request after the turn."""
        self.refusals.append((request, error))
        if operation is not None:
            self.refused_operations.append(operation)

    # -- transfers -----------------------------------------------------------------------------

    def staged(self, source: str) -> Intervals | None:
        """Return the numbers of an origin that this turn has accepted so far."""
        found = self._by_source().get(source) if self.transferred else None
        return None if found is None else found[1]

    def staged_owner(self, source: str) -> str | None:
        """Return the owner of an origin that this turn uses; None if it does not use the origin."""
        found = self._by_source().get(source) if self.transferred else None
        return None if found is None else found[0]

    def note_transferred(self, taken: Transferred) -> None:
        """Record numbers of an origin that this turn accepts."""
        self.transferred.append(taken)
        if self._origins is not None:
            _add_to(self._origins, taken)

    def _by_source(self) -> dict[str, tuple[str, Intervals]]:
        if self._origins is None:
            self._origins = {}
            for taken in self.transferred:
                _add_to(self._origins, taken)
        return self._origins

    # -- savepoints ----------------------------------------------------------------------------

    def savepoint(self) -> Savepoint:
        """Return the state that `roll_back` restores."""
        return list(map(len, self._lists)), self.must_sync

    def roll_back(self, savepoint: Savepoint) -> None:
        """Remove everything that was added since a savepoint; undo.py restores the memory."""
        lengths, self.must_sync = savepoint
        for entries, length in zip(self._lists, lengths, strict=True):
            del entries[length:]
        self._origins = None

    def forget_answers(self) -> None:
        """Drop the replies, refusals and operations, because they were answered and counted."""
        for answered in (self.replies, self.refusals, self.operations, self.refused_operations):
            if answered:
                answered.clear()

    # -- the record ----------------------------------------------------------------------------

    @property
    def next_batch(self) -> int:
        """The number of the next batch of this commit."""
        return self.first_batch + len(self.batches)

    def add_batch(
        self, batch: pa.RecordBatch | MessageRows, target: "BatchTarget | None" = None
    ) -> int:
        """Add a message batch; return its number."""
        number = self.next_batch
        place = (target.entity, target.first_sequence, target.time) if target else ()
        self.batches.append(Part(PartKind.MESSAGES, batch, number, *place))
        self.must_sync = True
        return number

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (
            self.must_sync or self.kept or self.tentative or self.history or self.transferred
        )

    @property
    def can_wait(self) -> bool:
        """Whether it may stay in memory: nothing in it must be durable before the replies."""
        return not (self.must_sync or self.tentative or self.history or self.effects)

    @property
    def has_settled(self) -> bool:
        """Whether this turn, and not only earlier ones, has added kept entries."""
        return self.kept.count > self._inherited

    @property
    def frees_space(self) -> bool:
        """Whether it only settles, moves or compacts messages: this needs little space.

        On a full disk, the log may write such a record to its reserve.
        """
        brings = self.batches or self.tentative or self.history or self.transferred
        return self.only_compacts or not brings

    def parts(self, now: int, snapshot: Sequence[Fact] = ()) -> list[Part]:
        """Return the parts of the record: facts, messages, places, changes, history.

        `snapshot` contains further facts, which come first.
        """
        parts = []
        batches, transferred = self._transferred()
        facts = [*snapshot, *self.kept.facts, *self.tentative.facts, *transferred]
        for piece in _pieces(facts) if facts else ():
            columns = [[getattr(f, name) for f in piece] for name in ("kind", "key", "value")]
            parts.append(_part(PartKind.FACTS, columns, now))
        parts.extend(batches)
        places = self.kept.places + self.tentative.places
        if places:
            parts.append(_places_part(places, now))
        changes = self.kept.changes + self.tentative.changes
        if changes:
            parts.append(_changes_part(changes, now))
        if self.history:
            parts.append(self._history_part(now))
        return parts

    def _transferred(self) -> tuple[list[Part], list[Fact]]:
        """Return the batches, and the facts about transferred numbers.

        If the numbers are one run of one sender, as in nearly every send, the header of the first
        batch contains them instead of a fact.
        """
        if not self.transferred:
            return self.batches, []
        facts = [
            owner_fact(taken.source, taken.owner) for taken in self.transferred if taken.is_new
        ]
        sent = self._only_run() if self.batches else None
        if sent is not None:
            first, *more = self.batches
            return [Part(*first[:-1], sent), *more], facts
        origins = self._by_source()
        facts += [transferred_fact(source, numbers) for source, (_, numbers) in origins.items()]
        return self.batches, facts

    def _only_run(self) -> Sent | None:
        """Return the transferred numbers if they are one run of one sender; otherwise None."""
        taken = self.transferred[0]
        if len(self.transferred) == 1:
            runs = taken.intervals
        else:
            origins = self._by_source()
            runs = list(origins[taken.source][1]) if len(origins) == 1 else ()
        sender = sender_number(taken.source)
        if not sender or len(runs) != 1:
            return None
        ((first, last),) = runs
        return Sent(sender, first, last - first + 1)

    def history_times(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last times of the message ids of each entity."""
        for _, _, times in self.history:
            yield (times, times) if type(times) is int else (int(times.min()), int(times.max()))

    def _history_part(self, now: int) -> Part:
        if sum(len(ids) for _, ids, _ in self.history) > ENTRIES_AS_ROWS:
            return _part(PartKind.HISTORY, self._history_columns(), now)
        rows = [
            IdRow(entity, message_id, time)
            for entity, ids, times in self.history
            for message_id, time in zip(ids, _column_values(times, len(ids)), strict=True)
        ]
        return Part(PartKind.HISTORY, EntryRows(rows), time=now)

    def _history_columns(self) -> list[Any]:
        entities = [np.full(len(ids), entity, np.int32) for entity, ids, _ in self.history]
        times = [np.broadcast_to(np.int64(time), len(ids)) for _, ids, time in self.history]
        every_id = [message_id for _, ids, _ in self.history for message_id in ids]
        return [np.concatenate(entities), every_id, np.concatenate(times)]


def _add_to(origins: dict[str, tuple[str, Intervals]], taken: Transferred) -> None:
    _, numbers = origins.setdefault(taken.source, (taken.owner, Intervals()))
    for first, last in taken.intervals:
        numbers.add(first, last)


def transferred_fact(source: str, intervals: Iterable[Sequence[int]]) -> Fact:
    """Return the fact with the accepted numbers of an origin."""
    return Fact(TAKEN, source, pack(intervals))


def owner_fact(source: str, owner: str) -> Fact:
    """Return the fact with the access key that an origin belongs to or counts for."""
    return Fact("owner", source, owner.encode())


def _pieces(facts: list[Fact]) -> Iterator[list[Fact]]:
    """Split facts into parts that fit into an Arrow batch."""
    first = size = 0
    for at, fact in enumerate(facts):
        size += fact.size
        if size > MAX_FACTS_BYTES and at > first:
            yield facts[first:at]
            first, size = at, fact.size
    if facts:
        yield facts[first:]


def _places_part(entries: Sequence[PlaceRow | dict[str, Any]], now: int) -> Part:
    """Return places as rows if they are few, otherwise as columns."""
    count = sum(1 if isinstance(entry, PlaceRow) else len(entry["sequence"]) for entry in entries)
    if count <= ENTRIES_AS_ROWS:
        rows = [row for entry in entries for row in _rows_of(entry)]
        return Part(PartKind.PLACES, EntryRows(rows), time=now)
    columns: list[dict[str, Any]] = []
    for are_rows, group in groupby(entries, key=lambda entry: isinstance(entry, PlaceRow)):
        if are_rows:
            values = map(np.array, zip(*group, strict=True))
            columns.append(dict(zip(PlaceRow._fields, values, strict=True)))
        else:
            columns += group  # type: ignore[arg-type]
    return _numbers_part(PartKind.PLACES, columns, now)


def _rows_of(entry: PlaceRow | dict[str, Any]) -> Iterable[Sequence[int]]:
    if isinstance(entry, PlaceRow):
        return (entry,)
    count = len(entry["sequence"])
    return zip(*(_column_values(entry[name], count) for name in PlaceRow._fields), strict=True)


def _column_values(value: Any, count: int) -> list[int]:
    """Return the numbers of a column; a single value is repeated for all rows."""
    return value.tolist() if isinstance(value, np.ndarray) else [int(value)] * count


def _changes_part(changes: list[dict[str, Any] | ChangeRow], now: int) -> Part:
    rows = [change for change in changes if type(change) is ChangeRow]
    if len(rows) == len(changes):
        return Part(PartKind.CHANGES, ChangeRows(rows), time=now)
    columns = [change if isinstance(change, dict) else _columns_of(change) for change in changes]
    return _numbers_part(PartKind.CHANGES, columns, now)


def _columns_of(row: ChangeRow) -> dict[str, Any]:
    return row._asdict() | {"sequence": np.array([row.sequence], np.int64)}


def _numbers_part(kind: PartKind, entries: list[dict[str, Any]], now: int) -> Part:
    """Return the concatenated columns of several entries; all of them are numbers."""
    schema, columns = SCHEMAS[kind], []
    for name, dtype, type_ in _DTYPES[kind]:
        pieces = [_spread(entry[name], len(entry["sequence"]), dtype) for entry in entries]
        column = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        columns.append(column_of(type_, column))
    return Part(kind, pa.RecordBatch.from_arrays(columns, schema=schema), time=now)


def _spread(value: Any, count: int, dtype: Any) -> Any:
    """Return a column; a single value is repeated for all rows."""
    if isinstance(value, np.ndarray):
        return value if value.dtype == dtype else value.astype(dtype)
    return np.full(count, value, dtype)


def _part(kind: PartKind, columns: Sequence[Any], now: int) -> Part:
    schema = SCHEMAS[kind]
    arrays = [pa.array(column, type_) for column, type_ in zip(columns, schema.types, strict=True)]
    return Part(kind, pa.RecordBatch.from_arrays(arrays, schema=schema), time=now)


_DTYPES = {
    kind: [
        (column.name, np.dtype(column.type.to_pandas_dtype()), column.type)
        for column in SCHEMAS[kind]
    ]
    for kind in (PartKind.PLACES, PartKind.CHANGES)
}
