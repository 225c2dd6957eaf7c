"""What one turn of the writer wants in the log, and what to do when it is there or was refused.

Two kinds of entries. *Kept* ones describe what already happened in memory (a message settled,
dead-lettered): if the commit is refused they wait for the next one. *Tentative* ones (new messages,
new entities) fall with the commit. An `Effect` says what memory does with them in either case.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from twinbus.broker.lifecycle import Cause, State
from twinbus.broker.store.log import SCHEMAS, Part, PartKind, Sent
from twinbus.broker.store.message_rows import MessageRows
from twinbus.errors import MessagingError
from twinbus.intervals import Intervals, pack
from twinbus.limits import MAX_FACTS_BYTES, NEVER_US
from twinbus.message import Int64s, column_of
from twinbus.protocol.operations import Operation
from twinbus.protocol.origins import sender_number
from twinbus.protocol.requests import Request

TAKEN = "taken"  # kind of a fact: numbers of an origin, packed; "transferred" had them as JSON


@dataclass(frozen=True, slots=True)
class Fact:
    """A keyed value; the last one in the log wins, None forgets it."""

    kind: str
    key: str
    value: bytes | None

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return len(self.kind) + len(self.key) + len(self.value or b"")

    @classmethod
    def of(cls, kind: str, key: object, value: object) -> "Fact":
        """Return a fact whose value is JSON."""
        return cls(kind, str(key), json.dumps(value, separators=(",", ":")).encode())


class Effect:
    """What a turn does to memory once its record is durable, or if the log refuses the record."""

    __slots__ = ()

    def durable(self) -> None:
        """Do what only a durable record allows."""

    def refused(self) -> None:
        """Take back what memory holds of the turn."""


class Whole(NamedTuple):
    """Where a batch goes that goes to one entity whole: no places need to be written."""

    entity: int
    first_sequence: int
    time: int


@dataclass(slots=True)
class Entries:
    """Facts, places and changes on their way to the log."""

    facts: list[Fact] = field(default_factory=list)
    places: list[dict[str, Any]] = field(default_factory=list)  # columns, or one value for all
    changes: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.facts or self.places or self.changes)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.facts) + len(self.places) + len(self.changes)

    def shift(self, by: int) -> None:
        """Move the expiry times of places: the wall clock was set by so much."""
        for columns in self.places:
            expires = np.asarray(columns["expires"])
            columns["expires"] = np.where(expires == NEVER_US, expires, expires + by)

    def change(self, entity: int, sequence: Int64s, state: Any, failures: Any = 0) -> None:
        """Note new states of messages."""
        if len(sequence):
            columns = {"entity": entity, "sequence": sequence, "state": state, "failures": failures}
            self.changes.append(columns)

    def gone(self, entity: int, sequence: Int64s, cause: Cause) -> None:
        """Note that messages left an entity, and why, in place of failures nobody needs now."""
        self.change(entity, sequence, State.GONE, cause.value)


class Transferred(NamedTuple):
    """Numbers of an origin that this turn takes."""

    source: str
    owner: str  # of a sender or sink that was not known before
    is_new: bool  # the log must know the owner
    intervals: Sequence[tuple[int, int]]


Savepoint = tuple[list[int], bool]  # how much a commit held at a moment; whether it had to sync


class Commit:
    """One turn's entries and replies."""

    def __init__(self, first_batch: int, kept: Entries | None = None) -> None:
        self.first_batch = first_batch
        self.kept = Entries() if kept is None else kept
        self._inherited = self.kept.count if kept else 0
        self.tentative = Entries()
        self.batches: list[Part] = []
        self.history: list[tuple[int, Sequence[str], Any]] = []  # entity, message ids, time(s)
        self.transferred: list[Transferred] = []  # in this turn
        # The same by source, with its owner; made when somebody asks.
        self._origins: dict[str, tuple[str, Intervals]] | None = None
        # Replies wait for the disk. Kept places were not written by an earlier turn: nobody may
        # see their new numbers before the log has them.
        self.must_sync = bool(self.kept.places)
        self.effects: list[Effect] = []  # in the order of what caused them
        self.replies: list[tuple[Request, Any]] = []
        self.refusals: list[tuple[Request, MessagingError]] = []
        # What the meter counts when the turn is answered: of replies and of refusals.
        self.operations: list[Operation] = []
        self.refused_operations: list[Operation] = []
        self._lists: tuple[list[Any], ...] = (
            *(self.kept.facts, self.kept.places, self.kept.changes),
            *(self.tentative.facts, self.tentative.places, self.tentative.changes),
            *(self.batches, self.history, self.transferred, self.effects),
            *(self.replies, self.refusals, self.operations, self.refused_operations),
        )

    def reply(self, request: Request, value: Any, operation: Operation | None = None) -> None:
        """Answer a request when the turn is over; the operations of sends are noted together."""
        self.replies.append((request, value))
        if operation is not None:
            self.operations.append(operation)

    def refuse(
        self, request: Request, error: MessagingError, operation: Operation | None = None
    ) -> None:
        """Refuse a request when the turn is over."""
        self.refusals.append((request, error))
        if operation is not None:
            self.refused_operations.append(operation)

    # -- transfers -----------------------------------------------------------------------------

    def staged(self, source: str) -> Intervals | None:
        """Return what this turn has taken of an origin so far."""
        found = self._by_source().get(source) if self.transferred else None
        return None if found is None else found[1]

    def staged_owner(self, source: str) -> str | None:
        """Return whom an origin belongs to that this turn was the first to use."""
        found = self._by_source().get(source) if self.transferred else None
        return None if found is None else found[0]

    def note_transferred(self, taken: Transferred) -> None:
        """Note numbers that this turn takes of an origin."""
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
        """Return what `roll_back` needs to forget all that comes after."""
        return list(map(len, self._lists)), self.must_sync

    def roll_back(self, savepoint: Savepoint) -> None:
        """Forget what was noted since; what memory holds of it is undone elsewhere (undo.py)."""
        lengths, self.must_sync = savepoint
        for entries, length in zip(self._lists, lengths, strict=True):
            del entries[length:]
        self._origins = None

    def forget_answers(self) -> None:
        """Let go of what was answered and counted."""
        for answered in (self.replies, self.refusals, self.operations, self.refused_operations):
            if answered:
                answered.clear()

    # -- the record ----------------------------------------------------------------------------

    @property
    def next_batch(self) -> int:
        """The number the next batch of this commit will have."""
        return self.first_batch + len(self.batches)

    def add_batch(self, batch: pa.RecordBatch | MessageRows, whole: "Whole | None" = None) -> int:
        """Take a message batch along; return its number."""
        number = self.next_batch
        where = (whole.entity, whole.first_sequence, whole.time) if whole else ()
        self.batches.append(Part(PartKind.MESSAGES, batch, number, *where))
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
        """Whether it holds nothing but what already happened and nobody relies on yet."""
        return not (self.must_sync or self.tentative or self.history or self.effects)

    @property
    def has_settled(self) -> bool:
        """Whether this turn changed something that already happened in memory."""
        return self.kept.count > self._inherited

    @property
    def brings_nothing(self) -> bool:
        """Whether it only settles or moves messages: what makes room, or takes next to none."""
        return not (self.batches or self.tentative or self.history or self.transferred)

    def parts(self, now: int, snapshot: Sequence[Fact] = ()) -> list[Part]:
        """Return the record of this moment: facts, messages, places, changes, history."""
        parts = []
        batches, transferred = self._transferred()
        facts = [*snapshot, *self.kept.facts, *self.tentative.facts, *transferred]
        for piece in _pieces(facts) if facts else ():
            columns = [[getattr(f, name) for f in piece] for name in ("kind", "key", "value")]
            parts.append(_part(PartKind.FACTS, columns, now))
        parts.extend(batches)
        for kind, entries in (
            (PartKind.PLACES, self.kept.places + self.tentative.places),
            (PartKind.CHANGES, self.kept.changes + self.tentative.changes),
        ):
            if entries:
                parts.append(_numbers_part(kind, entries, now))
        if self.history:
            parts.append(_part(PartKind.HISTORY, self._history_columns(), now))
        return parts

    def _transferred(self) -> tuple[list[Part], list[Fact]]:
        """Return the batches, and the facts that say what was transferred.

        Of one run of one sender, which is nearly every send, the head of a batch says it.
        """
        if not self.transferred:
            return self.batches, []
        facts = [
            owner_fact(taken.source, taken.owner) for taken in self.transferred if taken.is_new
        ]
        sent = self._only_run() if self.batches else None
        if sent is not None:
            first, *others = self.batches
            return [Part(*first[:-1], sent), *others], facts
        origins = self._by_source()
        facts += [transferred_fact(source, held) for source, (_, held) in origins.items()]
        return self.batches, facts

    def _only_run(self) -> Sent | None:
        """Return what was taken if it is one run of one sender."""
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

    def _history_columns(self) -> list[Any]:
        entities = [np.full(len(ids), entity, np.int32) for entity, ids, _ in self.history]
        times = [np.broadcast_to(np.int64(time), len(ids)) for _, ids, time in self.history]
        every_id = [message_id for _, ids, _ in self.history for message_id in ids]
        return [np.concatenate(entities), every_id, np.concatenate(times)]


def _add_to(origins: dict[str, tuple[str, Intervals]], taken: Transferred) -> None:
    _, held = origins.setdefault(taken.source, (taken.owner, Intervals()))
    for first, last in taken.intervals:
        held.add(first, last)


def transferred_fact(source: str, intervals: Iterable[Sequence[int]]) -> Fact:
    """Return the fact that says which numbers of an origin were taken."""
    return Fact(TAKEN, source, pack(intervals))


def owner_fact(source: str, owner: str) -> Fact:
    """Return the fact that says which key a sender or sink belongs to."""
    return Fact("owner", source, owner.encode())


def _pieces(facts: list[Fact]) -> Iterator[list[Fact]]:
    """Give facts in parts that an Arrow batch can hold."""
    first = size = 0
    for at, fact in enumerate(facts):
        size += fact.size
        if size > MAX_FACTS_BYTES and at > first:
            yield facts[first:at]
            first, size = at, fact.size
    if facts:
        yield facts[first:]


def _numbers_part(kind: PartKind, entries: list[dict[str, Any]], now: int) -> Part:
    """Return the columns of several entries end to end; all of them are numbers."""
    schema, columns = SCHEMAS[kind], []
    for name, dtype, type_ in _DTYPES[kind]:
        pieces = [_spread(entry[name], len(entry["sequence"]), dtype) for entry in entries]
        column = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        columns.append(column_of(type_, column))
    return Part(kind, pa.RecordBatch.from_arrays(columns, schema=schema), time=now)


def _spread(value: Any, count: int, dtype: Any) -> Any:
    """Return a column, made from one value for all where that is what the entry has."""
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
