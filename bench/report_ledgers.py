"""Ledgers of any size for `bench/report.py`: what was metered, and what became of messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from twinbus.entities import backlog_queue_path
from twinbus.ledger import SCHEMAS, Ledger, LedgerKind
from twinbus.limits import DAY_US
from twinbus.protocol.operations import Purpose

NAMESPACES = ("primary", "secondary")
SYPHON = "syphon"  # the folder of its ledger
BEGINS = datetime(2026, 8, 1, tzinfo=UTC)
FOREVER = timedelta(days=36500)
ROWS, FILES = "rows", "files"  # how a ledger of operations is cut into files

# -- an operations ledger --------------------------------------------------------------------------

QUEUES, BACKLOG_QUEUES, MINUTES = 200, 10, 1440
QUIETEST = 0.6  # of the busiest queue's share of minutes
_OF_A_QUEUE = (  # operation, purpose, outcome, and in which share of minutes
    ("Send", Purpose.APPLICATION, "ok", 1.0),
    ("Receive", Purpose.APPLICATION, "ok", 1.0),
    ("Settle", Purpose.APPLICATION, "ok", 1.0),
    ("Receive", Purpose.APPLICATION, "Empty", 0.8),
    ("GetRuntimeProperties", Purpose.MANAGEMENT, "ok", 0.25),
    ("RenewLock", Purpose.APPLICATION, "ok", 0.2),
    ("Send", Purpose.SYPHON, "ok", 0.05),
    ("Send", Purpose.PING, "ok", 0.02),
    ("Send", Purpose.APPLICATION, "ServerBusy", 0.02),
    ("Settle", Purpose.APPLICATION, "MessageLockLost", 0.01),
)
_OF_A_BACKLOG_QUEUE = (
    ("LeaseRange", Purpose.IDLE_POLL, "Empty", 0.9),
    ("Send", Purpose.BACKLOG, "ok", 0.1),
    ("LeaseRange", Purpose.SYPHON, "ok", 0.1),
    ("ReadRange", Purpose.SYPHON, "ok", 0.1),
    ("SettleRange", Purpose.SYPHON, "ok", 0.1),
)
KEYS = ("operation", "purpose", "outcome")
Texts = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Combinations:
    """All that may be metered in a minute: of each, its texts and how often it is there."""

    texts: dict[str, Texts]
    share: npt.NDArray[np.float64]

    @classmethod
    def of(cls, primary: str) -> "Combinations":
        """Return those of a namespace that keeps the backlog of another."""
        queues = [f"area-{number % 7}/orders-{number:03}" for number in range(QUEUES)]
        backlog = [backlog_queue_path(primary, number) for number in range(BACKLOG_QUEUES)]
        activity = np.linspace(1.0, QUIETEST, QUEUES)
        found = [
            (path, operation, purpose.value, outcome, share * busy)
            for paths, kinds, busyness in (
                (queues, _OF_A_QUEUE, activity),
                (backlog, _OF_A_BACKLOG_QUEUE, np.ones(BACKLOG_QUEUES)),
            )
            for path, busy in zip(paths, busyness, strict=True)
            for operation, purpose, outcome, share in kinds
        ]
        *columns, shares = zip(*found, strict=True)
        names = ("path", *KEYS)
        texts = {name: np.array(column) for name, column in zip(names, columns, strict=True)}
        return cls(texts, np.array(shares))

    def day(self, day: int, rng: np.random.Generator, most: int) -> pa.Table:
        """Return what was metered on a day, minute by minute, of the first rows so many."""
        width = len(self.share)
        cells = np.flatnonzero(rng.random((MINUTES, width)) < self.share)[:most]
        minute, which = np.divmod(cells, width)
        columns: dict[str, Any] = {
            "bucket": pa.array(to_us_of_day(day) + minute * 60_000_000).cast(pa.timestamp("us"))
        }
        for name, texts in self.texts.items():
            known, codes = np.unique(texts, return_inverse=True)
            numbers = pa.array(codes.astype(np.int32)[which])
            columns[name] = pa.DictionaryArray.from_arrays(numbers, pa.array(known, pa.string()))
        count = rng.integers(1, 200, len(cells))
        carries = np.isin(self.texts["outcome"], ("ok",)) & np.isin(
            self.texts["operation"], ("Send", "Receive", "Settle", "ReadRange", "SettleRange")
        )
        messages = np.where(carries[which], count * rng.integers(1, 33, len(cells)), 0)
        columns["count"] = pa.array(count)
        columns["messages"] = pa.array(messages)
        columns["bytes"] = pa.array(messages * rng.integers(200, 4000, len(cells)))
        columns["units"] = pa.array(np.maximum(messages, count))
        columns["bucket"] = columns["bucket"].cast(pa.timestamp("us", "UTC"))
        return pa.table(columns)


def to_us_of_day(day: int) -> int:
    """Return the moment a day begins, in microseconds since 1970."""
    return int(BEGINS.timestamp()) * 1_000_000 + day * DAY_US


def write_operations(folder: Path, rows: int, cut: str = ROWS) -> None:
    """Write so many rows, half of them in each namespace."""
    for seed, (name, second) in enumerate(zip(NAMESPACES, reversed(NAMESPACES), strict=True)):
        rng, combinations = np.random.default_rng(seed), Combinations.of(second)
        ledger = Ledger(folder / name, LedgerKind.OPERATIONS, FOREVER)
        left, day = rows // len(NAMESPACES), 0
        while left:
            table = combinations.day(day, rng, left)
            for part in minutes_of(table) if cut == FILES else (table,):
                ledger.write(part, to_us_of_day(day))
            left -= table.num_rows
            day += 1


def minutes_of(table: pa.Table) -> Iterator[pa.Table]:
    """Give the rows of each minute."""
    buckets = table.column("bucket").cast(pa.int64()).to_numpy()
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(buckets)], strict=True):
        yield table.slice(start, end - start)


# -- a messages ledger -----------------------------------------------------------------------------

BATCH, TAKEN = 1000, 100  # messages of a send, and of a settle
CHUNK = 1_000_000  # messages of a day, and of a file
MESSAGE_QUEUES = 20
STANDING_OF_BATCHES = 100  # one of so many was not received yet
MISSING_AT, DOUBLED_AT = 500, 250  # the batch of each chunk, of which one message is wrong
DIVERTED_OF_BATCHES = 20  # one of so many came by way of the backlog
UNTOLD_BATCHES = 1  # of the diverted batches of a chunk: the ledger of transfers lacks them
BACKLOG = backlog_queue_path(NAMESPACES[0], 0)
WRONG = 4  # messages of a chunk: one missing, one doubled, two that are not home
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def random_ids(rng: np.random.Generator, count: int) -> pa.Array:
    """Return ids as a uuid4().hex gives them."""
    raw = np.frombuffer(rng.bytes(count * 16), np.uint8)
    letters = _HEX[np.stack([raw >> 4, raw & 15], axis=-1)]
    offsets = np.arange(count + 1, dtype=np.int32) * 32
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(letters))


def write_messages(folder: Path, messages: int) -> None:
    """Write what became of so many messages.

    Of each million, one is missing, one is doubled, and two left the backlog and are not home: one
    that the ledger of transfers has, and one that it lacks.
    """
    ledger = Ledger(folder / NAMESPACES[0], LedgerKind.MESSAGES, FOREVER)
    detour = Detour(folder)
    rng = np.random.default_rng(7)
    standing = []
    for day in range(messages // CHUNK):
        batch = np.arange(CHUNK // BATCH) + day * (CHUNK // BATCH)
        at = to_us_of_day(day) + (batch - batch[0]) * 80_000_000
        first = batch // MESSAGE_QUEUES * BATCH + 1
        queue = batch % MESSAGE_QUEUES
        ids = random_ids(rng, CHUNK).take(pa.array(_doubled_at(DOUBLED_AT * BATCH)))
        offset = np.tile(np.arange(BATCH), len(batch))
        each = np.repeat(first, BATCH) + offset
        accepted = _trail(
            "accepted",
            np.repeat(at, BATCH),
            np.repeat(queue, BATCH),
            (each, each),
            np.repeat(2 * batch + 1, BATCH),
            ids,
        )
        stands = batch % STANDING_OF_BATCHES == STANDING_OF_BATCHES - 1
        standing.append((queue[stands], first[stands]))
        runs = np.flatnonzero(~stands).repeat(BATCH // TAKEN)
        begins = first[runs] + np.tile(np.arange(0, BATCH, TAKEN), np.count_nonzero(~stands))
        ends = begins + TAKEN - 1
        begins[np.flatnonzero(runs == MISSING_AT)[0]] += 1
        completed = _trail(
            "completed", at[runs] + 1_000_000, queue[runs], (begins, ends), 2 * batch[runs] + 2
        )
        ledger.write(pa.concat_tables([accepted, completed]), to_us_of_day(day))
        detour.write(day, accepted, random_ids(rng, 2))
    queue, first = map(np.concatenate, zip(*standing, strict=True))
    at, record = np.full(len(queue), at[-1] + 2_000_000), np.full(len(queue), 2 * batch[-1] + 3)
    reported = _trail("standing", at, queue, (first, first + BATCH - 1), record)
    nothing = np.zeros(1, np.int64)
    stock = _trail("inventory", at[:1], nothing, (nothing, nothing), record[:1])
    ledger.write(pa.concat_tables([stock, reported]), int(at[0]))


class Detour:
    """The ledgers of messages that came by way of the backlog: of the secondary, of the syphon."""

    def __init__(self, folder: Path) -> None:
        self._messages = Ledger(folder / NAMESPACES[1], LedgerKind.MESSAGES, FOREVER)
        self._transfers = Ledger(folder / SYPHON, LedgerKind.TRANSFERS, FOREVER)

    def write(self, day: int, accepted: pa.Table, lost_ids: pa.Array) -> None:
        """Write the way of some messages of a chunk; two of them have ids that never came home."""
        batch = np.arange(CHUNK) // BATCH
        rows = accepted.filter(pa.array(batch % DIVERTED_OF_BATCHES == DIVERTED_OF_BATCHES - 1))
        count = rows.num_rows
        reported = count - UNTOLD_BATCHES * BATCH
        places = np.arange(count)
        ids = pa.concat_arrays(rows.column("message_id").chunks)
        where = pa.array((places == 0) | (places == reported))
        ids = pc.replace_with_mask(ids, where, lost_ids)
        numbers = np.arange(count) + day * count + 1
        at = rows.column("at").cast(pa.int64()).to_numpy() - 1_000
        record = np.full(count, 2 * day + 1)
        queue = np.zeros(count, np.int64)
        come = _trail("accepted", at, queue, (numbers, numbers), record, ids)
        ends = (numbers[:1], numbers[-1:])
        gone = _trail("completed", at[-1:], queue[:1], ends, record[:1] + 1)
        both = pa.concat_tables([come, gone])
        place = both.schema.get_field_index("path")
        both = both.set_column(place, "path", pa.repeat(BACKLOG, count + 1))
        self._messages.write(both, to_us_of_day(day))
        schema = SCHEMAS[LedgerKind.TRANSFERS]
        columns = {
            "moved": rows.column("at"),
            "accepted": come.column("at"),
            "message_id": ids,
            "path": rows.column("path"),
            "queue": pa.repeat(BACKLOG, count),
            "origin": pa.repeat(f"{BACKLOG}#1.a", count),
            "sequence_number": pa.array(numbers),
            "bytes": pa.repeat(100, count).cast(pa.int64()),
            "result": pa.repeat("moved", count),
            "reason": pa.nulls(count, pa.string()),
        }
        moved = pa.table([columns[name] for name in schema.names], schema=schema)
        self._transfers.write(moved.slice(0, reported), to_us_of_day(day))


def _doubled_at(place: int) -> npt.NDArray[np.int64]:
    """Return places in order, but for one of the queue's next send, which comes from this place."""
    places = np.arange(CHUNK)
    places[place + MESSAGE_QUEUES * BATCH] = place
    return places


def _trail(
    event: str,
    at: npt.NDArray[np.int64],
    queue: npt.NDArray[np.int64],
    numbers: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    record: npt.NDArray[np.int64],
    ids: pa.Array | None = None,
) -> pa.Table:
    paths = pa.array([f"orders-{number:02}" for number in range(MESSAGE_QUEUES)])
    columns = [
        pa.array(at).cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC")),
        pa.repeat(event, len(at)),
        paths.take(pa.array(queue)),
        pa.array((2 * queue + 1).astype(np.int32)),
        *map(pa.array, numbers),
        pa.nulls(len(at), pa.string()) if ids is None else ids,
        pa.array(record),
    ]
    return pa.table(columns, schema=SCHEMAS[LedgerKind.MESSAGES])
