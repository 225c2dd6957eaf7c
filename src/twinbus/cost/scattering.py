"""Rows for the buckets of places: reads ledgers, and divides their rows by bucket.

A bucket has the places of a path and of a block of 65,536 sequence numbers, so that a large queue
is in many buckets. `scatter` runs where ledgers are read; places.py gets the rows of each bucket.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from twinbus.cost.exchange import DEAD, HOME, SCHEMAS, Item, Kind, by_bucket, mixed
from twinbus.cost.facts import BEFORE, VOID, Facts, integers, moments, queue_keys
from twinbus.cost.pieces import Piece, codes_of
from twinbus.ledger import ACCEPTED, DEAD_LETTERED, ENDED, ENDINGS, MOVED, STANDING, LedgerKind
from twinbus.ledger import SCHEMAS as LEDGERS
from twinbus.limits import BLOCK_BITS, REPORT_PARTITION_ROWS
from twinbus.message import Int64s

ENDS = sorted((*ENDINGS, ENDED))  # an ending's code is its index; the lowest takes precedence
PRESENT = 100  # a code like those of endings: the message is present
_MESSAGE_COLUMNS = ("at", "event", "path", "number", "first", "last", "message_id", "record")
_ACCEPTED = -2
_EVENTS = {ACCEPTED: _ACCEPTED, STANDING: PRESENT} | {end: code for code, end in enumerate(ENDS)}
_TRANSFER_COLUMNS = tuple(LEDGERS[LedgerKind.TRANSFERS].names)
_RESULTS = {DEAD_LETTERED: DEAD, MOVED: HOME}


def scatter(pieces: Iterable[Piece], facts: Facts, buckets: int) -> Iterator[Item]:
    """Read pieces and divide their rows by the buckets of their places."""
    pending: dict[Kind, list[pa.Table]] = {
        kind: [] for kind in (Kind.TRANSFER, Kind.ACCEPTED, Kind.INTERVAL)
    }
    count = 0
    for piece in pieces:
        is_transfer = piece.kind is LedgerKind.TRANSFERS
        columns = _TRANSFER_COLUMNS if is_transfer else _MESSAGE_COLUMNS
        for table in piece.tables(columns):
            if is_transfer:
                pending[Kind.TRANSFER].append(_transfers(table, piece, facts))
            else:
                accepted, intervals = _trail(table, piece, facts)
                pending[Kind.ACCEPTED].append(accepted)
                pending[Kind.INTERVAL].append(intervals)
            count += table.num_rows
            if count >= REPORT_PARTITION_ROWS:
                yield from _divided(pending, facts, buckets)
                count = 0
    yield from _divided(pending, facts, buckets)


def _divided(pending: dict[Kind, list[pa.Table]], facts: Facts, buckets: int) -> Iterator[Item]:
    for kind, tables in pending.items():
        if tables:
            table = pa.concat_tables(tables).combine_chunks()
            tables.clear()
            queues = integers(table.column("queue"))
            place = "first" if kind is Kind.INTERVAL else "sequence_number"
            block = integers(table.column(place)) >> BLOCK_BITS
            if kind is not Kind.TRANSFER:
                queues = _path_codes(queues, facts)
            hashes = mixed(mixed(queues) ^ mixed(block))
            yield from by_bucket(kind, table, (hashes % np.uint64(buckets)).astype(np.int64))


def _path_codes(queues: Int64s, facts: Facts) -> Int64s:
    """Return the code of each queue's path in lower case, so that rows of a path share buckets.

    The path of an earlier log's or day's queue is not known. Such a queue has a code of its own.
    """
    known, which = _runs(queues)
    found = [
        int(facts.lower[facts.codes[path]]) if (path := facts.queue(key).path) else -key - 1
        for key in known.tolist()
    ]
    return np.array(found, np.int64)[which]


def _runs(values: Int64s) -> tuple[Int64s, Int64s]:
    """Return the sorted distinct values, and the index of each; fast if neighbours are equal."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    distinct, which = np.unique(values[starts], return_inverse=True)
    return distinct, np.repeat(which, np.diff([*starts, len(values)]))


def _trail(table: pa.Table, piece: Piece, facts: Facts) -> tuple[pa.Table, pa.Table]:
    """Return the accepted messages, and the intervals of what ended or is present."""
    account = facts.accounts[piece.ledger]
    at, record = moments(table.column("at")), integers(table.column("record"))
    eras = np.full(len(at), BEFORE, np.int8) if piece.is_before else account.eras(at, record)
    numbers = integers(table.column("number")).astype(np.int64)
    queues = queue_keys(piece.ledger, eras, numbers)
    events = codes_of(table.column("event"), _EVENTS)
    is_accepted = events == _ACCEPTED
    accepted = [
        pa.array(queues[is_accepted]),
        pa.array(integers(table.column("first"))[is_accepted]),
        pa.array(record[is_accepted]),
        pa.array(at[is_accepted]),
        pa.array(codes_of(table.column("path"), facts.codes)[is_accepted]),
        table.column("message_id").filter(pa.array(is_accepted)),
    ]
    is_counted = (events >= 0) & (eras <= VOID)
    if account.stock is None:
        is_counted &= events != PRESENT
    else:
        stock_at, stock_record = account.stock
        is_stock = (at == stock_at) & (record == stock_record)
        is_counted &= (events != PRESENT) | is_stock
    first, last = (integers(table.column(name))[is_counted] for name in ("first", "last"))
    which, first, last = _cut_at_blocks(first, last)
    which = np.flatnonzero(is_counted)[which]
    intervals = [
        queues[which],
        first,
        last,
        events[which].astype(np.int8),
        at[which],
        record[which],
    ]
    return (
        pa.table(accepted, schema=SCHEMAS[Kind.ACCEPTED]),
        pa.table([pa.array(column) for column in intervals], schema=SCHEMAS[Kind.INTERVAL]),
    )


def _cut_at_blocks(first: Int64s, last: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Divide intervals at the bounds of blocks; return the index of each part, and its ends."""
    blocks = (last >> BLOCK_BITS) - (first >> BLOCK_BITS) + 1
    which = np.repeat(np.arange(len(first)), np.maximum(blocks, 0))
    part = ramps(blocks)
    begin = ((first[which] >> BLOCK_BITS) + part) << BLOCK_BITS
    return (
        which,
        np.maximum(first[which], begin),
        np.minimum(last[which], begin + (1 << BLOCK_BITS) - 1),
    )


def ramps(counts: Int64s) -> Int64s:
    """Return the numbers 0 to count - 1 for each count, one sequence after the other."""
    counts = np.maximum(counts, 0)
    ends = np.cumsum(counts)
    found: Int64s = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return found


def _transfers(table: pa.Table, piece: Piece, facts: Facts) -> pa.Table:
    """Return transfers with the codes of their paths."""
    columns = {
        "ledger": pa.array(np.full(len(table), piece.ledger, np.int32)),
        "queue": pa.array(facts.lower[codes_of(table.column("queue"), facts.codes)]),
        "path": pa.array(codes_of(table.column("path"), facts.codes)),
        "origin": table.column("origin").cast(pa.string()),
        "sequence_number": table.column("sequence_number"),
        "message_id": table.column("message_id"),
        "accepted": table.column("accepted").cast(pa.int64()),
        "moved": table.column("moved").cast(pa.int64()),
        "bytes": table.column("bytes"),
        "result": pa.array(codes_of(table.column("result"), _RESULTS).astype(np.int8)),
    }
    schema = SCHEMAS[Kind.TRANSFER]
    return pa.table([columns[name] for name in schema.names], schema=schema)
