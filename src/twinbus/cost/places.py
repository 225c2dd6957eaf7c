"""The places of messages: when each message was accepted, how it ended, and whether it is present.

A place is a queue, as packed in `facts`, and a sequence number. Ledgers list messages that ended,
and messages that are present, as intervals of numbers. Intervals are not expanded: their ends cut
the numbers of a queue into segments, and all places in a segment ended alike. A message is looked
up in the segments; numbers of a segment without an accepted message are only counted.

`decide` gets the rows of a bucket from scattering.py, and decides the status of every place in it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.cost.exchange import (
    HOME,
    SCHEMAS,
    Counts,
    Item,
    Kind,
    TaskTables,
    by_bucket,
    text_hashes,
)
from twinbus.cost.facts import (
    BEFORE,
    CURRENT,
    VOID,
    Facts,
    era_of,
    integers,
    is_backlog_queue,
    is_dead_letter_queue,
    ledger_of,
)
from twinbus.cost.outages import drained_in
from twinbus.cost.scattering import ENDS, PRESENT, ramps
from twinbus.ledger import DELETED
from twinbus.limits import BLOCK_BITS, DELAY_STEPS, FLOW_STEPS, LEAST_DELAY, REPORT_PARTITION_ROWS
from twinbus.message import Int64s

WAITING, OLDER, UNKNOWN, AGAIN = "waiting", "older", "unknown", "accepted again"
MISSING, PRESENT_AGAIN, UNEXPLAINED = "missing", "present again", "unexplained"
DOUBLED, NOT_HOME, LOST = "doubled", "not home", "lost"
COMPLETED = "completed"
STATUSES = (
    *ENDS, DELETED, WAITING, OLDER, UNKNOWN, AGAIN,
    MISSING, PRESENT_AGAIN, UNEXPLAINED, DOUBLED, NOT_HOME, LOST,
)  # fmt: skip
CODES = {status: code for code, status in enumerate(STATUSES)}
# A message with one of these statuses does not count as a duplicate of another one.
HAS_LEFT = ("activated", "forwarded", "dead_lettered", "cancelled", DELETED)
NOTHING = np.iinfo(np.int64).max  # where a record or time is missing
_NO_ENDING = 127
_NOT_COUNTED = -1  # a message of an earlier log or day
_LEFT_CODES = [CODES[status] for status in HAS_LEFT] + [_NOT_COUNTED]

# The roles of a message, as bits: identities.py compares the ids of messages with certain roles.
IS_HOME, IS_COPY, IS_LOST, IS_AGAIN, HAS_LEFT_BACKLOG, HAS_ARRIVED = (1 << bit for bit in range(6))


def decide(items: Iterable[Item], facts: Facts, buckets: int) -> Iterator[Item]:
    """Decide the status of every place of a bucket, and pass on messages that need more checks.

    The buckets of message ids check these messages by id (identities.py).
    """
    inbox = TaskTables(items)
    transfers = _once(inbox.take(Kind.TRANSFER))
    bucket = Bucket(inbox.take(Kind.ACCEPTED), inbox.take(Kind.INTERVAL), facts)
    tally = Counts()
    bucket.count(tally)
    count_transfers(transfers, facts, tally)
    yield 0, (Kind.TALLY, tally)
    for suspects in bucket.suspects():
        yield from by_bucket(Kind.SUSPECT, suspects, np.arange(len(suspects)) % buckets)
    yield from by_id(Kind.MESSAGE, bucket.with_roles(transfers), buckets)
    yield from by_id(Kind.TRANSFER, transfers, buckets)


def by_id(kind: Kind, table: pa.Table, buckets: int) -> Iterator[Item]:
    """Divide rows by their message ids."""
    hashes = text_hashes(one_chunk(table.column("message_id")))
    yield from by_bucket(kind, table, (hashes % np.uint64(buckets)).astype(np.int64))


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def _once(transfers: pa.Table) -> pa.Table:
    """Return each transfer once: after the kill of a worker, rows may be written twice."""
    if not transfers.num_rows:
        return transfers
    origin = one_chunk(transfers.column("origin")).dictionary_encode().indices
    keys = (
        origin.fill_null(-1).to_numpy(zero_copy_only=False),
        integers(transfers.column("queue")),
        integers(transfers.column("sequence_number")),
    )
    order = np.lexsort((integers(transfers.column("moved")), *keys))
    is_first = np.zeros(len(order), bool)
    is_first[0] = True
    for key in keys:
        is_first[1:] |= np.diff(key[order]) != 0
    return transfers.take(pa.array(order[is_first]))


def count_transfers(transfers: pa.Table, facts: Facts, tally: Counts) -> None:
    """Count transfers over time, and by their delay."""
    if facts.span is None or not transfers.num_rows:
        return
    begins, step = facts.span[0], facts.flow_step
    accepted, moved = (integers(transfers.column(name)) for name in ("accepted", "moved"))
    is_known = accepted >= 0

    def by_slot(times: Int64s) -> Int64s:
        slots = np.clip((times - begins) / step, 0, FLOW_STEPS - 1).astype(np.int64)
        return np.bincount(slots, minlength=FLOW_STEPS)

    tally.diverted += by_slot(accepted[is_known])
    tally.moved += by_slot(moved)
    is_moved = is_known & (integers(transfers.column("result")) == HOME)
    where = facts.lower[integers(transfers.column("path"))][is_moved]
    tally.drained = drained_in(
        facts.outages, facts.texts, where, accepted[is_moved], moved[is_moved]
    )
    delay = np.maximum((moved - accepted)[is_moved] / 1e6, 2.0**LEAST_DELAY)
    steps = np.clip(np.floor(np.log2(delay)) - LEAST_DELAY, 0, DELAY_STEPS - 1)
    tally.delays += np.bincount(steps.astype(np.int64), minlength=DELAY_STEPS)


@dataclass(slots=True)
class _Segments:
    """Segments of numbers that ended alike; a number is a key of `_PlaceKeys`."""

    start: Int64s
    length: Int64s
    ending: Int64s  # _NO_ENDING: they have not ended
    ended_record: Int64s
    ended: Int64s
    is_present: npt.NDArray[np.bool_]
    accepted: Int64s  # how many of its numbers were accepted

    @classmethod
    def of(cls, first: Int64s, end: Int64s, intervals: pa.Table) -> "_Segments":
        """Cut the numbers at the ends of all intervals."""
        cuts = np.unique(np.concatenate([first, end]))
        count = max(len(cuts) - 1, 0)
        low, high = np.searchsorted(cuts, first), np.searchsorted(cuts, end)
        which = np.repeat(np.arange(len(first)), high - low)
        segment = low[which] + ramps(high - low)
        ending = integers(intervals.column("ending")).astype(np.int64)
        found = cls(
            cuts[:count],
            np.diff(cuts),
            np.full(count, _NO_ENDING, np.int64),
            np.full(count, NOTHING),
            np.full(count, NOTHING),
            np.zeros(count, bool),
            np.zeros(count, np.int64),
        )
        is_end = ending[which] != PRESENT
        found.is_present[segment[~is_end]] = True
        which, segment = which[is_end], segment[is_end]
        np.minimum.at(found.ending, segment, ending[which])
        for column, name in ((found.ended, "at"), (found.ended_record, "record")):
            np.minimum.at(column, segment, integers(intervals.column(name))[which])
        return found

    @property
    def is_covered(self) -> npt.NDArray[np.bool_]:
        """Whether an interval contains the numbers of each segment."""
        found: npt.NDArray[np.bool_] = self.is_present | (self.ending != _NO_ENDING)
        return found


@dataclass(frozen=True, slots=True)
class _QueueColumns:
    """The facts about the queues of a bucket, one row each."""

    keys: Int64s
    is_void: npt.NDArray[np.bool_]
    is_current: npt.NDArray[np.bool_]
    is_before: npt.NDArray[np.bool_]
    is_counted: npt.NDArray[np.bool_]
    is_deleted: npt.NDArray[np.bool_]
    is_apart: npt.NDArray[np.bool_]  # may accept an id twice: backlog, dead letters, old, void
    is_backlog: npt.NDArray[np.bool_]
    first_accepted: Int64s
    first_record: Int64s
    gap_record: Int64s
    stock_record: Int64s
    paths: Int64s  # codes

    @classmethod
    def of(cls, keys: Int64s, facts: Facts) -> "_QueueColumns":
        """Collect the facts about some queues."""
        queues = [facts.queue(key) for key in keys.tolist()]
        accounts = [facts.account(key) for key in keys.tolist()]
        eras = np.array([era_of(key) for key in keys.tolist()], np.int64)
        is_backlog = np.array([is_backlog_queue(queue.path) for queue in queues], bool)
        is_dead = np.array([is_dead_letter_queue(queue.path) for queue in queues], bool)
        return cls(
            keys,
            eras == VOID,
            eras == CURRENT,
            eras == BEFORE,
            (eras == CURRENT) | (eras == VOID),
            np.array([queue.is_deleted for queue in queues], bool),
            is_backlog | is_dead | (eras != CURRENT),
            is_backlog & ~is_dead,
            _numbers((queue.first_accepted for queue in queues), NOTHING),
            _numbers((queue.first_record for queue in queues), NOTHING),
            _numbers((account.gap_record for account in accounts), -1),
            _numbers(
                (None if account.stock is None else account.stock[1] for account in accounts), -1
            ),
            np.array([facts.codes[queue.path] for queue in queues], np.int64),
        )


def _numbers(values: Iterable[int | None], missing: int) -> Int64s:
    return np.array([missing if value is None else value for value in values], np.int64)


@dataclass(frozen=True, slots=True)
class _PlaceKeys:
    """Packs queue and sequence number into one number, and keeps their order."""

    queues: Int64s
    queue_of_block: Int64s  # an index
    blocks: Int64s  # sequence number >> BLOCK_BITS

    @classmethod
    def of(cls, queues: Int64s, numbers: Int64s) -> "tuple[_PlaceKeys, Int64s]":
        """Return the keys of some places. Neighbours mostly have a block in common."""
        blocks = numbers >> BLOCK_BITS
        is_new = np.ones(len(queues), bool)
        is_new[1:] = (np.diff(queues) != 0) | (np.diff(blocks) != 0)
        starts = np.flatnonzero(is_new)
        known_queues, queue = np.unique(queues[starts], return_inverse=True)
        known_blocks, block = np.unique(blocks[starts], return_inverse=True)
        width = max(len(known_blocks), 1)
        pairs, pair = np.unique(queue * width + block, return_inverse=True)
        code = np.repeat(pair, np.diff([*starts, len(queues)]))
        keys = (code << BLOCK_BITS) | (numbers & ((1 << BLOCK_BITS) - 1))
        return cls(known_queues, pairs // width, known_blocks[pairs % width]), keys

    def queue(self, keys: Int64s) -> Int64s:
        """Return the indexes of queues."""
        found: Int64s = self.queue_of_block[keys >> BLOCK_BITS]
        return found

    def number(self, keys: Int64s) -> Int64s:
        """Return sequence numbers."""
        low = keys & ((1 << BLOCK_BITS) - 1)
        found: Int64s = (self.blocks[keys >> BLOCK_BITS] << BLOCK_BITS) | low
        return found


class Bucket:
    """The places of a bucket, with their statuses."""

    def __init__(self, accepted: pa.Table, intervals: pa.Table, facts: Facts) -> None:
        self._facts = facts
        queues, numbers = (
            np.concatenate([integers(accepted.column(name)), integers(intervals.column(other))])
            for name, other in (("queue", "queue"), ("sequence_number", "first"))
        )
        self._keys, keys = _PlaceKeys.of(queues, numbers)
        self._queues = _QueueColumns.of(self._keys.queues, facts)
        count = accepted.num_rows
        self._set_places(accepted, keys[:count])
        first = keys[count:]
        length = integers(intervals.column("last")) - integers(intervals.column("first")) + 1
        self._segments = _Segments.of(first, first + length, intervals)
        self._decide()
        self._count_unaccepted()

    def _set_places(self, accepted: pa.Table, keys: Int64s) -> None:
        """Group rows by place: a killed broker may write a row twice."""
        record, at = integers(accepted.column("record")), integers(accepted.column("at"))
        if (np.diff(keys) > 0).all():
            self._rows = accepted
        else:
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            starts = np.flatnonzero(np.diff(keys, prepend=-1))
            record = np.minimum.reduceat(record[order], starts)
            at = np.minimum.reduceat(at[order], starts)
            keys = keys[starts]
            self._rows = accepted.take(pa.array(order[starts]))
        self._places, self._record, self._at = keys, record, at
        self._queue = self._keys.queue(keys)

    def _decide(self) -> None:
        """Set the status of every accepted message."""
        queues, queue, segments = self._queues, self._queue, self._segments
        where = np.searchsorted(segments.start, self._places, side="right") - 1
        is_in = where >= 0
        is_in[is_in] = self._places[is_in] < (segments.start + segments.length)[where[is_in]]
        segments.accepted = np.bincount(where[is_in], minlength=len(segments.start))

        def of_segment(column: npt.NDArray[Any], missing: int) -> npt.NDArray[Any]:
            found = np.full(len(where), missing, column.dtype)
            found[is_in] = column[where[is_in]]
            return found

        ending = of_segment(segments.ending, _NO_ENDING)
        self._ended = of_segment(segments.ended, NOTHING)
        has_ended, is_present = ending != _NO_ENDING, of_segment(segments.is_present, missing=0)
        is_again = of_segment(segments.ended_record, NOTHING) <= queues.stock_record[queue]
        stock, is_deleted = queues.stock_record[queue], queues.is_deleted[queue]
        is_void = queues.is_void[queue]
        self._status = np.select(
            [
                ~queues.is_counted[queue],
                has_ended & is_present & is_again & ~is_void,
                has_ended,
                is_void & ~is_deleted,
                is_present & ~is_void,
                is_deleted,
                (stock < 0) | (self._record > stock),
                queues.gap_record[queue] >= self._record,
            ],
            [
                _NOT_COUNTED,
                CODES[PRESENT_AGAIN],
                ending,
                CODES[LOST],
                CODES[WAITING],
                CODES[DELETED],
                CODES[WAITING],
                CODES[UNKNOWN],
            ],
            CODES[MISSING],
        )

    def _count_unaccepted(self) -> None:
        """Count the numbers of each segment that were not accepted in the ledger, by status."""
        queues, segments = self._queues, self._segments
        queue = self._keys.queue(segments.start)
        is_counted = segments.is_covered & ~queues.is_void[queue]
        unaccepted = np.where(is_counted, segments.length - segments.accepted, 0)
        below = queues.first_accepted[queue] - self._keys.number(segments.start)
        is_older = queues.gap_record[queue] >= queues.first_record[queue]
        has_ended = segments.ending != _NO_ENDING
        is_again = has_ended & segments.is_present
        is_again &= segments.ended_record <= queues.stock_record[queue]
        self._again = np.where(is_again, unaccepted, 0)
        # All numbers below the first that was accepted are unaccepted.
        older = np.where(is_older | has_ended, unaccepted, np.clip(below, 0, unaccepted))
        self._older = np.where(is_again, 0, older)
        self._unexplained = unaccepted - self._again - self._older

    # -- results -----------------------------------------------------------------------------------

    def count(self, tally: Counts) -> None:
        """Count the places of each queue by status."""
        width = len(STATUSES)
        is_counted = self._status != _NOT_COUNTED
        places = np.bincount(
            self._queue[is_counted] * width + self._status[is_counted],
            minlength=width * len(self._queues.keys),
        )
        queue = self._keys.queue(self._segments.start) * width
        for status, counts in (
            (PRESENT_AGAIN, self._again),
            (OLDER, self._older),
            (UNEXPLAINED, self._unexplained),
        ):
            np.add.at(places, queue + CODES[status], counts)
        for place in np.flatnonzero(places).tolist():
            key = int(self._queues.keys[place // width])
            tally.statuses[key, place % width] += int(places[place])

    def suspects(self) -> Iterator[pa.Table]:
        """Yield the places that are wrong, except those whose ids must be looked up first."""
        has_id = self._ids.is_valid().to_numpy(zero_copy_only=False)
        is_wrong = np.isin(self._status, [CODES[MISSING], CODES[PRESENT_AGAIN]])
        is_wrong |= (self._status == CODES[LOST]) & ~has_id
        which = np.flatnonzero(is_wrong)
        if len(which):
            yield self._suspects(
                self._places[which],
                self._status[which],
                self._ids.take(pa.array(which)),
                pa.array(self._at[which]),
            )
        for status, counts in ((PRESENT_AGAIN, self._again), (UNEXPLAINED, self._unexplained)):
            for keys in self._unaccepted(counts):
                codes = np.full(len(keys), CODES[status])
                nothing = pa.nulls(len(keys), pa.string())
                yield self._suspects(keys, codes, nothing, pa.nulls(len(keys), pa.int64()))

    @property
    def _ids(self) -> pa.Array:
        return one_chunk(self._rows.column("message_id"))

    def _unaccepted(self, counts: Int64s) -> Iterator[Int64s]:
        """Yield, for each segment, the last numbers that were not accepted: `counts` of them.

        Segments are processed in groups: the numbers of all may not fit into memory.
        """
        segments = np.flatnonzero(counts)
        parts = np.cumsum(self._segments.length[segments]) // REPORT_PARTITION_ROWS
        for part in np.unique(parts).tolist():
            own = segments[parts == part]
            length = self._segments.length[own]
            keys = np.repeat(self._segments.start[own], length) + ramps(length)
            place = np.searchsorted(self._places, keys)
            is_free = np.ones(len(keys), bool)
            is_inside = place < len(self._places)
            is_free[is_inside] = self._places[place[is_inside]] != keys[is_inside]
            free = np.bincount(np.repeat(np.arange(len(own)), length)[is_free], minlength=len(own))
            yield keys[is_free][ramps(free) >= np.repeat(free - counts[own], free)]

    def _suspects(
        self, keys: Int64s, statuses: Int64s, ids: pa.Array, accepted: pa.Array
    ) -> pa.Table:
        queue = self._keys.queue(keys)
        ledgers = np.array([ledger_of(key) for key in self._queues.keys.tolist()], np.int32)
        columns = [
            pa.array(ledgers[queue]),
            pa.array(self._queues.paths[queue].astype(np.int32)),
            pa.array(self._keys.number(keys)),
            ids,
            pa.array(statuses.astype(np.int8)),
            accepted,
        ]
        return pa.table(columns, schema=SCHEMAS[Kind.SUSPECT])

    def with_roles(self, transfers: pa.Table) -> pa.Table:
        """Return the messages that have an id and at least one role."""
        facts, queues, queue = self._facts, self._queues, self._queue
        path = integers(self._rows.column("path"))
        is_copy = queues.is_counted & ~queues.is_apart
        roles = np.zeros(len(path), np.uint8)
        for bit, has_role in (
            (IS_HOME, facts.entities[path] >= 0),
            (IS_COPY, is_copy[queue] & ~np.isin(self._status, _LEFT_CODES)),
            (IS_LOST, self._status == CODES[LOST]),
            (IS_AGAIN, queues.is_current[queue] & facts.has_voids),
            (HAS_LEFT_BACKLOG, self._left(transfers)),
            (HAS_ARRIVED, (facts.destinations[path] >= 0) & ~queues.is_before[queue]),
        ):
            roles[has_role] |= bit
        has_id = self._ids.is_valid().to_numpy(zero_copy_only=False)
        columns = [
            pa.array(roles),
            pa.array(self._queues.keys[queue]),
            self._rows.column("sequence_number"),
            pa.array(self._record),
            pa.array(self._at),
            self._rows.column("path"),
            self._rows.column("message_id"),
        ]
        table = pa.table(columns, schema=SCHEMAS[Kind.MESSAGE])
        is_needed = (roles != 0) & has_id
        return table if is_needed.all() else table.filter(pa.array(is_needed))

    def _left(self, transfers: pa.Table) -> npt.NDArray[np.bool_]:
        """Return which messages left the backlog without a row of a transfer."""
        coverage = self._facts.total_coverage
        found: npt.NDArray[np.bool_] = self._queues.is_backlog[self._queue]
        found = found & (self._status == CODES[COMPLETED])
        if coverage is None or not found.any():
            return np.zeros(len(found), bool)
        found &= self._ended <= coverage.until
        if coverage.gap_end is not None:
            found &= self._at > coverage.gap_end
        paths = self._facts.lower[self._queues.paths]
        moved_from = integers(transfers.column("queue"))
        numbers = integers(transfers.column("sequence_number"))
        own = self._keys.number(self._places)
        for queue in np.unique(self._queue[found]).tolist():
            which = np.flatnonzero(found & (self._queue == queue))
            found[which] = ~np.isin(own[which], numbers[moved_from == paths[queue]])
        return found
