"""The trail: the history of each message, derived from the records of the log.

    accepted            a queue accepted a message: it is durable from then on
    completed, expired, dead_lettered, cancelled, activated, forwarded
                        a message left the queue, and why; if it was dead-lettered, activated or
                        forwarded, the same record contains its `accepted` row, with the other queue
                        or the new number
    ended               a message left the queue; the log of an earlier version does not say why
    deleted             the queue was deleted with all its messages
    inventory           a list of all present messages begins; `exists` and `standing` rows of the
                        same record follow
    exists              a queue that stores messages exists, with or without messages
    standing            messages of the queue that are present at the time of the inventory
    gap                 the ledger does not cover the records up to this one
    begun               another log begins: earlier rows are about messages of the previous log
    restored            the log is an older copy, or lost its end: it lacks the records `first` to
                        `last`, and all rows of these records are void

The trail of a record depends only on the record. If the broker was killed before it wrote rows to
the ledger, the next start derives these rows from the log. If a row is written twice, both copies
are equal.

`Trail.add_record` keeps the content of a record without message bodies, as steps. `table_of` later
creates the rows of many records at once. The ledgers (ledgers.py) call both.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.lifecycle import LOST, Cause, State
from twinbus.broker.store.change_rows import ChangeRows
from twinbus.broker.store.descriptions import description_of
from twinbus.broker.store.entry_rows import EntryRows, PlaceRow
from twinbus.broker.store.log_format import Part, PartKind
from twinbus.broker.store.message_rows import MessageRows
from twinbus.entities import dead_letter_path
from twinbus.ledger import (
    ACCEPTED,
    BEGUN,
    DELETED,
    ENDED,
    ENDINGS,
    EXISTS,
    GAP,
    INVENTORY,
    RESTORED,
    SCHEMAS,
    STANDING,
    LedgerKind,
)
from twinbus.limits import LEDGER_RUN
from twinbus.message import Int64s

_EVENT_OF_CAUSE = {
    Cause.COMPLETED: "completed",
    Cause.DEAD_LETTERED: "dead_lettered",
    Cause.EXPIRED: "expired",
    Cause.ACTIVATED: "activated",
    Cause.CANCELLED: "cancelled",
    Cause.FORWARDED: "forwarded",
}
EVENTS = (
    *(ACCEPTED, DELETED, STANDING, INVENTORY, EXISTS, GAP, BEGUN, RESTORED, ENDED),
    *ENDINGS,
)
_CODES = {event: code for code, event in enumerate(EVENTS)}
_CODE_OF_CAUSE = np.full(len(Cause), _CODES[ENDED], np.int32)
for _cause, _event in _EVENT_OF_CAUSE.items():
    _CODE_OF_CAUSE[_cause] = _CODES[_event]
_NO_IDS = pa.array([], pa.string())
_SCHEMA = SCHEMAS[LedgerKind.MESSAGES]
IdsOf = Callable[[Int64s, npt.NDArray[np.int32]], Sequence[str | None]]
_EVERYTHING = np.iinfo(np.int64).max


class AcceptedBatch(NamedTuple):
    """A batch that one queue accepted completely."""

    number: int  # of the queue
    first: int  # the first sequence number
    at: int  # time
    ids: pa.Array | tuple[str | None, ...]  # of the messages
    record: int


class Places(NamedTuple):
    """Places of messages that queues accepted, and the ids of these messages."""

    columns: pa.RecordBatch
    ids: pa.Array
    at: int
    record: int


class Changes(NamedTuple):
    """New states of messages."""

    columns: pa.RecordBatch | ChangeRows
    at: int
    record: int


class Runs(NamedTuple):
    """Intervals of sequence numbers with the same event."""

    event: str
    number: int  # of the queue; 0: the event is about the log
    first: Int64s
    last: Int64s
    at: int
    record: int


Step = AcceptedBatch | Places | Changes | Runs


def rows_in(step: Step) -> int:
    """Return the maximum number of rows of a step."""
    if isinstance(step, AcceptedBatch):
        return len(step.ids)
    return len(step.first) if isinstance(step, Runs) else int(step.columns.num_rows)


def gap(at: int, record: int) -> Runs:
    """Return the step for a gap up to a record."""
    return _of_the_log(GAP, at, record)


def beginning(at: int) -> Runs:
    """Return the step for the beginning of another log."""
    return _of_the_log(BEGUN, at, 0)


def restored(at: int, first: int, last: int) -> Runs:
    """Return the step for lost records."""
    return Runs(RESTORED, 0, np.array([first]), np.array([last]), at, last)


def _of_the_log(event: str, at: int, record: int) -> Runs:
    nothing = np.zeros(1, np.int64)
    return Runs(event, 0, nothing, nothing, at, record)


class Trail:
    """Collects the steps of records until they are written."""

    def __init__(self, path_of: Callable[[int], str], ids_of: IdsOf) -> None:
        self._path_of = path_of  # path by queue number; empty if the queue is gone
        self._ids_of = ids_of  # message ids by batch and row of the log
        self._paths: dict[int, str] = {0: ""}
        self._steps: list[Step] = []
        self.rows = 0
        self.last_record = 0

    def take(self) -> list[Step]:
        """Return and remove the collected steps."""
        steps, self._steps, self.rows = self._steps, [], 0
        return steps

    def _note(self, step: Step) -> None:
        self._steps.append(step)
        self.rows += rows_in(step)

    def path(self, number: int) -> str:
        """Return the path of a queue; empty if it is gone and its path was never recorded."""
        path = self._paths.get(number)
        if path is None:
            path = self._path_of(number)
            if path:
                self._paths[number] = path
        return path

    def add_record(self, record: int, parts: Iterable[Part], now: int) -> None:
        """Add the steps of a durable record."""
        ids: dict[int, pa.Array | tuple[str | None, ...]] = {}
        for part in parts:
            at = part.time or now  # older logs have no time
            if part.kind is PartKind.MESSAGES:
                ids_of_batch = ids[part.number] = _ids_in(part)
                if part.entity:
                    if part.entity not in self._paths:
                        self.path(part.entity)
                    first = part.first_sequence
                    step = AcceptedBatch(part.entity, first, at, ids_of_batch, record)
                    self._steps.append(step)
                    self.rows += len(ids_of_batch)
            elif part.kind is PartKind.PLACES and isinstance(part.columns, EntryRows):
                self._add_places(part, ids, at, record)
            elif part.kind is PartKind.PLACES:
                columns = _without_rewritten(part, ids)
                self._note(Places(columns, self._ids(columns, ids), at, record))
            elif part.kind is PartKind.CHANGES:
                self._note(Changes(part.columns, at, record))
            elif part.kind is PartKind.FACTS:
                self._add_deletions(part.columns, at, record)
        self.last_record = record

    def _add_places(
        self,
        part: Part,
        own: dict[int, pa.Array | tuple[str | None, ...]],
        at: int,
        record: int,
    ) -> None:
        """Add an accepted step for each of a few places.

        `own` contains the ids of the batches in this record, by batch number.
        """
        for values in part.columns.rows:
            place = PlaceRow(*values)
            ids = own.get(place.batch)
            if ids is None:
                older = np.array([place.batch]), np.array([place.row], np.int32)
                [message_id] = self._ids_of(*older)
            elif place.enqueued < part.time and place.state != State.SCHEDULED.value:
                continue  # compaction rewrote it, see `_without_rewritten`
            else:
                message_id = ids[place.row]
                if isinstance(message_id, pa.Scalar):
                    message_id = message_id.as_py()
            self.path(place.entity)
            self._note(AcceptedBatch(place.entity, place.sequence, at, (message_id,), record))

    def _ids(
        self, places: pa.RecordBatch, own: dict[int, pa.Array | tuple[str | None, ...]]
    ) -> pa.Array:
        """Return the message ids of these places.

        `own` contains the ids of the batches in this record. Ids of older batches are read from the
        log.
        """
        batch, row = (places.column(name).to_numpy() for name in ("batch", "row"))
        older = ~np.isin(batch, list(own))
        found = self._ids_of(batch[older], row[older]) if older.any() else []
        at = np.empty(len(batch), np.int64)
        at[older] = np.arange(len(found))
        begins = len(found)
        for number, ids in own.items():
            of_batch = batch == number
            at[of_batch] = begins + row[of_batch]
            begins += len(ids)
        all_ids = _joined([found, *own.values()]).combine_chunks()
        return all_ids.take(pa.array(at))

    def _add_deletions(self, facts: pa.RecordBatch, now: int, record: int) -> None:
        kinds = facts.column("kind").to_pylist()
        if "entity" not in kinds:
            return
        _, keys, values = facts.columns
        for kind, key, value in zip(kinds, keys.to_pylist(), values.to_pylist(), strict=True):
            if kind != "entity":
                continue
            number = int(key)
            if value is not None:
                if number not in self._paths:
                    self._remember_paths(number, json.loads(value))
                continue
            for gone in (number, number + 1):  # and its dead-letter queue
                self.path(gone)
                first, last = np.array([0]), np.array([_EVERYTHING])
                self._note(Runs(DELETED, gone, first, last, now, record))

    def _remember_paths(self, number: int, saved: dict[str, Any]) -> None:
        """Remember the paths of an entity: it may be deleted before the rows are written."""
        path = description_of(saved).path
        self._paths |= {number: path, number + 1: dead_letter_path(path)}

    def give_up(self, now: int) -> None:
        """Drop the collected steps, because there are too many, and add a gap instead."""
        self._steps, self.rows = [], 0
        self.note_gap(now, self.last_record)

    def note_gap(self, now: int, record: int) -> None:
        """Add a gap up to this record."""
        self._note(gap(now, record))

    def add_inventory(
        self, present_messages: Iterable[tuple[int, Int64s]], now: int, record: int
    ) -> None:
        """Add an inventory; each queue number comes with its sequence numbers in order."""
        self._note(_of_the_log(INVENTORY, now, record))
        for number, sequence in present_messages:
            nothing = np.zeros(1, np.int64)
            self._note(Runs(EXISTS, number, nothing, nothing, now, record))
            if not len(sequence):
                continue
            starts = _starts(sequence, [np.arange(len(sequence)) // LEDGER_RUN])
            first, last = sequence[starts], sequence[_ends(starts, len(sequence))]
            self._note(Runs(STANDING, number, first, last, now, record))


def _ids_in(part: Part) -> pa.Array | tuple[str | None, ...]:
    """Return the message ids of a part, copied: a slice would keep the whole batch in memory."""
    if isinstance(part.columns, MessageRows):
        return part.columns.ids()
    return pa.concat_arrays([part.columns.column("message_id"), _NO_IDS])


def _joined(ids: Iterable[pa.Array | Sequence[str | None]]) -> pa.ChunkedArray:
    """Return concatenated ids; ids in tuples are converted to Arrow together."""
    chunks: list[pa.Array] = []
    single: list[str | None] = []
    for part in ids:
        if isinstance(part, pa.Array):
            chunks += [pa.array(single, pa.string()), part]
            single = []
        else:
            single += part
    return pa.chunked_array([*chunks, pa.array(single, pa.string())])


def _without_rewritten(places: Part, own: Collection[int]) -> pa.RecordBatch:
    """Return places without messages that compaction copied: the trail has their rows already."""
    batch, state, enqueued = (
        places.columns.column(name).to_numpy() for name in ("batch", "state", "enqueued")
    )
    rewritten = np.isin(batch, list(own)) & (enqueued < places.time)
    rewritten &= state != State.SCHEDULED.value  # `enqueued` of a scheduled message is its due time
    return places.columns.filter(pa.array(~rewritten)) if rewritten.any() else places.columns


# -- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LedgerRows:
    """Columns of the ledger; `event` has indices into EVENTS."""

    at: Int64s
    event: npt.NDArray[np.int32]
    number: Int64s
    first: Int64s
    last: Int64s
    ids: pa.Array | pa.ChunkedArray | None
    record: Int64s


def table_of(steps: Sequence[Step], path_of: Callable[[int], str]) -> pa.Table:
    """Return steps as rows of the ledger."""
    pieces = [
        _of_batches([step for step in steps if isinstance(step, AcceptedBatch)]),
        *(_of_places(step) for step in steps if isinstance(step, Places)),
        _of_changes([step for step in steps if isinstance(step, Changes)]),
        _of_runs([step for step in steps if isinstance(step, Runs)]),
    ]
    tables = [_table(rows, path_of) for rows in pieces if rows is not None]
    return pa.concat_tables(tables) if tables else _SCHEMA.empty_table()


def _table(rows: _LedgerRows, path_of: Callable[[int], str]) -> pa.Table:
    numbers, codes = np.unique(rows.number, return_inverse=True)
    paths = [path_of(int(number)) for number in numbers]
    count = len(rows.first)
    columns = [
        pa.array(rows.at).cast(_SCHEMA.field("at").type),
        pa.array(EVENTS, pa.string()).take(pa.array(rows.event)),
        pa.array(paths, pa.string()).take(pa.array(codes)),
        pa.array(rows.number.astype(np.int32)),
        pa.array(rows.first),
        pa.array(rows.last),
        pa.nulls(count, pa.string()) if rows.ids is None else rows.ids,
        pa.array(rows.record),
    ]
    return pa.table(columns, schema=_SCHEMA)


def _of_batches(steps: Sequence[AcceptedBatch]) -> _LedgerRows | None:
    if not steps:
        return None
    counts = [len(step.ids) for step in steps]
    begins = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    first = np.repeat([step.first for step in steps], counts) + np.arange(sum(counts)) - begins
    return _LedgerRows(
        np.repeat([step.at for step in steps], counts),
        np.full(sum(counts), _CODES[ACCEPTED], np.int32),
        np.repeat([step.number for step in steps], counts),
        first,
        first,
        _joined([step.ids for step in steps]),
        np.repeat([step.record for step in steps], counts),
    )


def _of_places(step: Places) -> _LedgerRows:
    number, sequence = (step.columns.column(n).to_numpy() for n in ("entity", "sequence"))
    return _LedgerRows(
        np.full(len(number), step.at),
        np.full(len(number), _CODES[ACCEPTED], np.int32),
        number.astype(np.int64),
        sequence,
        sequence,
        step.ids,
        np.full(len(number), step.record),
    )


def _of_changes(steps: Sequence[Changes]) -> _LedgerRows | None:
    if not steps:
        return None
    counts = [step.columns.num_rows for step in steps]
    changes = pa.Table.from_batches(_change_batches(steps))
    number, sequence, state, cause = (column.to_numpy() for column in changes.columns)
    at = np.repeat([step.at for step in steps], counts)
    record = np.repeat([step.record for step in steps], counts)
    gone = np.flatnonzero((state == State.GONE) & (cause != LOST))  # lost messages have no rows
    gone = gone[np.lexsort((sequence[gone], record[gone], number[gone]))]
    if not len(gone):
        return None
    event = _CODE_OF_CAUSE[cause[gone]]
    starts = _starts(sequence[gone], (number[gone], event, record[gone]))
    ends = _ends(starts, len(gone))
    return _LedgerRows(
        at[gone][starts],
        event[starts],
        number[gone][starts].astype(np.int64),
        sequence[gone][starts],
        sequence[gone][ends],
        None,
        record[gone][starts],
    )


def _change_batches(steps: Sequence[Changes]) -> list[pa.RecordBatch]:
    """Return changes as columns; consecutive steps with few rows are converted together."""
    batches: list[pa.RecordBatch] = []
    for is_rows, group in groupby(steps, lambda step: isinstance(step.columns, ChangeRows)):
        if is_rows:
            batches.append(ChangeRows([row for step in group for row in step.columns.rows]).batch())
        else:
            batches += [step.columns for step in group]
    return batches


def _of_runs(steps: Sequence[Runs]) -> _LedgerRows | None:
    if not steps:
        return None
    counts = [len(step.first) for step in steps]
    return _LedgerRows(
        np.repeat([step.at for step in steps], counts),
        np.repeat(np.array([_CODES[step.event] for step in steps], np.int32), counts),
        np.repeat([step.number for step in steps], counts),
        np.concatenate([step.first for step in steps]),
        np.concatenate([step.last for step in steps]),
        None,
        np.repeat([step.record for step in steps], counts),
    )


def _starts(sequence: Int64s, alike: Iterable[npt.NDArray[np.generic]]) -> npt.NDArray[np.intp]:
    """Return the index of the first row of each run.

    A run has consecutive numbers, and equal values in the columns `alike`.
    """
    new = np.diff(sequence) != 1
    for column in alike:
        new |= column[1:] != column[:-1]
    return np.concatenate([[0], np.flatnonzero(new) + 1])


def _ends(starts: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.intp]:
    """Return the index of the last row of each run."""
    return np.append(starts[1:], count) - 1
