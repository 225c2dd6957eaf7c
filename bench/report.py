"""How `twinbus report` grows with the ledgers, in time and memory, against DuckDB and PyArrow.

python bench/report.py [--quick]

First the operations ledgers of two namespaces, up to 100 M metered rows: 200 queues and 10 backlog
queues each, a row per minute, entity, operation, purpose and outcome, in files of 1 M rows. Spark
makes the whole report and writes its tables. The peers add the same rows up by the same keys, and
write that. Then the messages ledgers of two namespaces and the transfers of a syphon, which are
reconciled: what was accepted, less what was completed and what stands, which ids came twice, and
which messages left the backlog and are not home. DuckDB answers the same questions. Every answer is
compared, exactly, before a figure is printed.

Everybody has the machine in turn and a process of its own, so that its peak of memory is known: the
sum of what each process of its tree had at most. Files are in the page cache, they were just
written. Starting Spark is counted separately; what its first queries take to warm up is not,
because that is how a report is made: `again` is the same once more in the same process. `others` is
the part of the machine that other processes had meanwhile: rows that differ in it do not compare.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measure import Others, Report, processes

from twinbus.cost.prices import load_sheet
from twinbus.cost.report import ReportSettings, make_report
from twinbus.cost.stages import rule_of
from twinbus.entities import BACKLOG_INFIX, backlog_queue_path
from twinbus.ledger import FOLDER, SCHEMAS, Ledger, LedgerKind
from twinbus.limits import DAY_US
from twinbus.protocol.operations import Purpose
from twinbus.spark.session import start_session

SIZES, QUICK_SIZES = (1_000_000, 10_000_000, 100_000_000), (1_000_000, 3_000_000)
MESSAGES, QUICK_MESSAGES = (1_000_000, 10_000_000), (1_000_000,)
AGAIN_ROWS = 3_000_000  # at most, of what is made twice
MOST_BYTES = 8 * 10**9  # of ledgers on the disk at once
MEMORY_GOAL, TIME_GOAL = 1.5, 12.0  # times, for ten times the rows
PEER_GOAL = 5.0  # times DuckDB's time, for a reconciliation
NAMESPACES = ("primary", "secondary")
SYPHON = "syphon"  # the folder of its ledger
CORES = 2
DUCKDB: dict[str, str | int | float | list[str]] = {"threads": CORES, "memory_limit": "2GB"}
SHEET = load_sheet("azure-standard").with_completions(True)  # every stage is counted
SAMPLE_S = 0.2
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


# -- those who make answers, each in a process of its own ------------------------------------------


def tell(**values: object) -> None:
    """Print what came of a run, for the process that measures."""
    print(json.dumps(values), flush=True)


def files_of(ledgers: Path, kind: LedgerKind) -> dict[str, list[str]]:
    """Return the files of each namespace."""
    return {
        name: sorted(map(str, (ledgers / name / FOLDER / kind.value).glob("day=*/*.parquet")))
        for name in (*NAMESPACES, SYPHON)
    }


def spark_here(ledgers: Path, output: Path, runs: int) -> None:
    """Make the report."""
    folders = [path for name in (*NAMESPACES, SYPHON) if (path := ledgers / name).is_dir()]
    with tempfile.TemporaryDirectory(dir=output) as folder:
        began = time.perf_counter()
        session = start_session(Path(folder).resolve(), f"local[{CORES},4]")
        tell(session_s=time.perf_counter() - began)
        for _ in range(runs):
            steps: list[tuple[str, float]] = []

            def note(text: str, steps: list[tuple[str, float]] = steps) -> None:
                steps.append((text.removesuffix(" ..."), time.perf_counter()))

            began = time.perf_counter()
            made = make_report(session, ReportSettings(folders, SHEET), output, on_progress=note)
            ended = time.perf_counter()
            names = ["looking at the files", "first plans", *(text for text, _ in steps[1:])]
            moments = [began, *(moment for _, moment in steps), ended]
            tell(
                seconds=ended - began,
                parts=dict(zip(names, np.diff(moments).tolist(), strict=True)),
                span=[made.begins, made.ends],
                statuses=[list(astuple(row)) for row in made.statuses],
                suspects=made.suspect_count,
            )
        session.stop()


_COUNT = """
with metered as (
    select 'primary' as ledger, * from read_parquet($primary, hive_partitioning=false)
    union all
    select 'secondary' as ledger, * from read_parquet($secondary, hive_partitioning=false)
)
select ledger, cast(bucket as date) as day, path, operation, purpose, outcome,
    sum(count)::bigint as count, sum(messages)::bigint as messages, sum(bytes)::bigint as bytes,
    sum(units)::bigint as units, min(bucket) as begins, max(bucket) as ends
from metered
group by all
"""


def count_with_duckdb(ledgers: Path, output: Path) -> dict[str, object]:
    """Add operations up."""
    with duckdb.connect(config={**DUCKDB, "temp_directory": str(output)}) as connection:
        files = files_of(ledgers, LedgerKind.OPERATIONS)
        del files[SYPHON]
        connection.execute("set TimeZone = 'UTC'")
        counted = connection.sql(_COUNT, params=files).to_arrow_table()
    pq.write_table(counted, output / "counted.parquet")
    return {}


def count_with_pyarrow(ledgers: Path, output: Path) -> dict[str, object]:
    """Add operations up, a file at a time, and the sums once more."""
    sums = [(name, "sum") for name in ("count", "messages", "bytes", "units")]
    keys = ["ledger", "day", "path", *KEYS]
    parts = []
    for name, files in files_of(ledgers, LedgerKind.OPERATIONS).items():
        for file in files:
            rows = pq.read_table(file, read_dictionary=["path", *KEYS], partitioning=None)
            rows = rows.append_column("day", rows.column("bucket").cast(pa.date32()))
            found = rows.group_by(keys[1:]).aggregate([*sums, ("bucket", "min"), ("bucket", "max")])
            for text in ("path", *KEYS):
                at = found.schema.get_field_index(text)
                found = found.set_column(at, text, found.column(text).cast(pa.string()))
            parts.append(found.append_column("ledger", pa.repeat(name, found.num_rows)))
    merged = pa.concat_tables(parts)
    merged = merged.rename_columns([_plain(name) for name in merged.column_names])
    counted = merged.group_by(keys).aggregate([*sums, ("begins", "min"), ("ends", "max")])
    names = [name.removesuffix("_sum") for name in counted.column_names]
    counted = counted.rename_columns(
        [{"begins_min": "begins", "ends_max": "ends"}.get(name, name) for name in names]
    )
    pq.write_table(counted, output / "counted.parquet")
    return {}


def _plain(name: str) -> str:
    """Return the name of a column that PyArrow has aggregated."""
    moments = {"bucket_min": "begins", "bucket_max": "ends"}
    given = name.removesuffix("_sum")
    return moments.get(given, given)


_PLACES = """
create temp table places as
with trail as (
    select 'primary' as ledger, * from read_parquet($primary, hive_partitioning=false)
    union all
    select 'secondary' as ledger, * from read_parquet($secondary, hive_partitioning=false)
), stock as (
    select ledger, max(record) as stock from trail where event = 'inventory' group by ledger
), each as (
    select ledger, number, first as place, path, message_id, event, "at", record
    from trail where event = 'accepted'
    union all
    select ledger, number, unnest(range(first, last + 1)), path, null, event, "at", record
    from trail left join stock using (ledger)
    where event = 'completed' or (event = 'standing' and record = stock)
)
select ledger, number, place, max(path) as path, max(message_id) as message_id,
    min("at") filter (event = 'accepted') as accepted, max(stock) as stock,
    min(record) filter (event = 'accepted') as accepted_record,
    bool_or(event = 'completed') as is_completed, bool_or(event = 'standing') as stands,
    max("at") as until
from each left join stock using (ledger)
group by ledger, number, place
"""
_STATUSES = """
select ledger, path, case
        when is_completed and stands then 'stands again'
        when accepted_record is null then 'unexplained'
        when is_completed then 'completed'
        when stands or stock is null or accepted_record > stock then 'waiting'
        else 'missing' end as status,
    count(*) as messages
from places group by all order by all
"""
_DOUBLED = """
select count(*) from (
    select 1 from places
    where message_id is not null and accepted is not null and path not like $backlog
    group by ledger, path, message_id having count(distinct accepted_record) > 1
)
"""


_NOT_HOME = """
with moved as (
    select path, queue, sequence_number, message_id, moved
    from read_parquet($transfers, hive_partitioning=false) where result = 'moved'
), home as (
    select path, message_id, until from places
    where path not like $backlog and message_id is not null and accepted is not null
), covered as (
    select path, max(until) as until from home group by path
)
select count(*) from (
    select message_id from moved join covered using (path)
    where moved <= until and not exists (
        select 1 from home where home.path = moved.path and home.message_id = moved.message_id
    )
    union
    select message_id from places
    where path like $backlog and is_completed and message_id is not null
        and not exists (
            select 1 from moved
            where moved.queue = places.path and moved.sequence_number = places.place
        )
        and not exists (select 1 from home where home.message_id = places.message_id)
)
"""


def reconcile_with_duckdb(ledgers: Path, output: Path) -> dict[str, object]:
    """Reconcile messages."""
    files = files_of(ledgers, LedgerKind.MESSAGES)
    del files[SYPHON]
    transfers = files_of(ledgers, LedgerKind.TRANSFERS)[SYPHON]
    backlog = {"backlog": f"%{BACKLOG_INFIX}%"}
    with duckdb.connect(config={**DUCKDB, "temp_directory": str(output)}) as connection:
        connection.execute(_PLACES, files)
        statuses = [list(row) for row in connection.execute(_STATUSES).fetchall()]
        [[doubled]] = connection.execute(_DOUBLED, backlog).fetchall()
        asked = {"transfers": transfers, **backlog}
        [[not_home]] = connection.execute(_NOT_HOME, asked).fetchall()
    wrong = sum(row[3] for row in statuses if row[2] not in ("completed", "waiting"))
    return {"statuses": statuses, "suspects": wrong + doubled + not_home}


PEERS: dict[str, Callable[[Path, Path], dict[str, object]]] = {
    "DuckDB": count_with_duckdb,
    "PyArrow": count_with_pyarrow,
    "DuckDB, reconciling": reconcile_with_duckdb,
}


def peer_here(name: str, ledgers: Path, output: Path, runs: int) -> None:
    """Do what a peer does."""
    for _ in range(runs):
        began = time.perf_counter()
        values = PEERS[name](ledgers, output)
        tell(seconds=time.perf_counter() - began, **values)


# -- measuring -------------------------------------------------------------------------------------


class Tree:
    """Watches the memory of a process and of all that it starts."""

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._peaks: dict[int, int] = {}  # KB, by process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def peak_mb(self) -> float:
        """Return the sum of the peaks so far."""
        self._read(list(self._peaks))
        return sum(self._peaks.copy().values()) / 1024

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before: set[int] = set()
        while not self._over.wait(SAMPLE_S):
            table, tree_pids = processes(), {self._root}
            while more := {pid for pid, row in table.items() if row[0] in tree_pids} - tree_pids:
                tree_pids |= more
            # One seen once may be Java about to start a program: for a moment it is there twice.
            self._read((tree_pids & before) | {self._root})
            before = tree_pids

    def _read(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(OSError, IndexError):  # it ended just now
                status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                self._peaks[pid] = int(status.split("VmHWM:")[1].split()[0])


@dataclass(frozen=True, slots=True)
class Made:
    """What somebody made of a ledger."""

    name: str
    rows: int
    files: int
    session_s: float  # that Spark took to start
    seconds: list[float]  # of each run
    peak_mb: float  # until the end of the first run
    background: float  # part of the machine that others had meanwhile
    answer: dict[str, Any]  # of the first run

    @property
    def first_s(self) -> float:
        """How long it takes whoever begins."""
        return self.seconds[0]

    def __str__(self) -> str:
        again = f"{self.seconds[-1]:>9.2f}" if len(self.seconds) > 1 else " " * 9
        return (
            f"{self.name:<26} {self.rows:>12,} {self.files:>6,} {self.first_s:>9.2f} {again} "
            f"{self.rows / self.first_s:>12,.0f} {self.peak_mb:>9,.0f} {self.background:>7.0%}"
        )


HEAD = (
    f"{'':<26} {'rows':>12} {'files':>6} {'seconds':>9} {'again':>9} {'rows/s':>12} "
    f"{'peak MB':>9} {'others':>7}"
)


@dataclass(frozen=True, slots=True)
class Ground:
    """A ledger on the disk, and where answers go."""

    ledgers: Path
    output: Path
    rows: int
    files: int
    bytes: int

    def measure(self, name: str) -> Made:
        """Let somebody work, and look on."""
        runs = 2 if self.rows <= AGAIN_ROWS else 1
        own = (str(self.ledgers), str(self.output), str(runs))
        command = [sys.executable, __file__, "--here", name, *own]
        background = Others()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        tree = Tree(process.pid)
        assert process.stdout is not None
        try:
            session_s, peak_mb, share = 0.0, 0.0, 0.0
            seconds: list[float] = []
            reported: dict[str, Any] = {}
            for line in process.stdout:
                values = json.loads(line)
                if "session_s" in values:
                    session_s = values["session_s"]
                    continue
                if not reported:
                    reported, peak_mb, share = values, tree.peak_mb(), background.share()
                seconds.append(values["seconds"])
            assert process.wait() == 0, name
        finally:
            tree.close()
            process.kill()
            process.wait()
            process.stdout.close()
        made = Made(name, self.rows, self.files, session_s, seconds, peak_mb, share, reported)
        print(made, flush=True)
        return made


@contextmanager
def ground(write: Callable[[Path], None], expected: float) -> Iterator[Ground]:
    """Write a ledger that is expected to take so many bytes; remove it at the end."""
    free = shutil.disk_usage(".").free
    assert expected < min(MOST_BYTES, free / 2), f"{expected:,.0f} bytes of {free:,} free"
    with tempfile.TemporaryDirectory(dir=".", prefix="tmp-report-") as folder:
        ledgers, output = Path(folder).resolve() / "ledgers", Path(folder).resolve() / "output"
        output.mkdir()
        write(ledgers)
        files = list(ledgers.rglob("*.parquet"))
        rows = sum(pq.read_metadata(file).num_rows for file in files)
        yield Ground(ledgers, output, rows, len(files), sum(f.stat().st_size for f in files))


# -- whether all of them say the same --------------------------------------------------------------


def staged(counted: pa.Table) -> pa.Table:
    """Return the operations of each stage, as the report has them, from what a peer counted."""
    kinds = counted.select(list(KEYS)).group_by(list(KEYS)).aggregate([]).to_pylist()
    rules = []
    for kind in kinds:
        rule = rule_of(kind["operation"], Purpose(kind["purpose"]), kind["outcome"])
        if rule is not None and SHEET.bills(rule.stage):
            rules.append(kind | {"stage": rule.stage.value, "basis": rule.basis.value})
    rows = counted.join(pa.Table.from_pylist(rules), list(KEYS), join_type="inner")
    cases = [pc.equal(rows.column("basis"), name) for name in ("units", "messages", "count")]
    numbers = [rows.column(name) for name in ("units", "messages", "count")]
    condition = pc.make_struct(*cases, field_names=["units", "messages", "count"])
    rows = rows.append_column("operations", pc.case_when(condition, *numbers))
    keys, sums = ["day", "ledger", "path", "stage"], ["operations", "messages", "bytes"]
    table = rows.group_by(keys).aggregate([(name, "sum") for name in sums])
    table = table.rename_columns([name.removesuffix("_sum") for name in table.column_names])
    return in_order(table)


def in_order(table: pa.Table) -> pa.Table:
    """Return operations with their columns and rows in one order."""
    keys, sums = ["day", "ledger", "path", "stage"], ["operations", "messages", "bytes"]
    kinds = [pa.date32(), *[pa.string()] * 3, *[pa.int64()] * 3]
    schema = pa.schema(list(zip([*keys, *sums], kinds, strict=True)))
    table = table.select(schema.names).cast(schema)
    return table.sort_by([(key, "ascending") for key in keys]).combine_chunks()


def check_operations(here: Ground, spark: Made) -> None:
    """Make sure that the report's table of operations is what a peer's sums come to."""
    counted = pq.read_table(here.output / "counted.parquet")
    written = in_order(pq.read_table(here.output / "operations.parquet"))
    assert written.num_rows, "nothing was reported"
    assert staged(counted).equals(written), "the report and its peer count differently"
    span = [pc.min(counted.column("begins")), pc.max(counted.column("ends"))]
    assert [moment.cast(pa.int64()).as_py() / 1e6 for moment in span] == spark.answer["span"]


def check_reconciliation(messages: int, spark: Made, peer: Made) -> None:
    """Make sure that both found the same, and what there was to find."""
    assert sorted(spark.answer["statuses"]) == sorted(peer.answer["statuses"])
    assert spark.answer["suspects"] == peer.answer["suspects"] == WRONG * (messages // CHUNK)
    counts: dict[str, int] = {}
    diverted = 0
    for ledger, _, status, count in spark.answer["statuses"]:
        if ledger == NAMESPACES[1]:
            diverted += count
        else:
            counts[status] = counts.get(status, 0) + count
    assert diverted == messages // DIVERTED_OF_BATCHES
    waiting, missing = messages // STANDING_OF_BATCHES, messages // CHUNK
    assert counts == {
        "completed": messages - waiting - missing,
        "waiting": waiting,
        "missing": missing,
    }


# -- what is printed -------------------------------------------------------------------------------


def measure_operations(sizes: Sequence[int]) -> dict[str, list[Made]]:
    """Measure ledgers of operations of several sizes, by everybody."""
    names = ("Spark", "DuckDB", "PyArrow")
    found: dict[str, list[Made]] = {name: [] for name in names}
    print(f"operations of {len(NAMESPACES)} namespaces, metered by the minute\n{HEAD}", flush=True)
    per_row = 40.0  # bytes, until it is known
    for rows in sizes:
        with ground(partial(write_operations, rows=rows), per_row * rows) as at:
            per_row = at.bytes / at.rows
            for name in names:
                made = at.measure(name)
                found[name].append(made)
                if name != "Spark":
                    check_operations(at, found["Spark"][-1])
                    (at.output / "counted.parquet").unlink()
            print(f"{'':<26} {at.bytes:>12,} bytes, {per_row:.1f} a row", flush=True)
    print("\nthe smallest again, in the files that a broker writes: one each minute")
    rows = sizes[0]
    with ground(partial(write_operations, rows=rows, cut=FILES), per_row * rows) as at:
        spark = at.measure("Spark")
        for name in names[1:]:
            at.measure(name)
            check_operations(at, spark)
    show_parts(spark)
    return found


def measure_messages(sizes: Sequence[int]) -> float:
    """Measure ledgers of messages; return Spark's time of the largest, in times of DuckDB's."""
    print(f"\nmessages of a namespace and its backlog, reconciled\n{HEAD}", flush=True)
    for messages in sizes:
        with ground(partial(write_messages, messages=messages), 60 * messages) as at:
            spark, peer = at.measure("Spark"), at.measure("DuckDB, reconciling")
            check_reconciliation(messages, spark, peer)
        ratio = spark.first_s / peer.first_s
        print(f"{'':<26} Spark takes {ratio:.1f} times DuckDB's time")
    show_parts(spark)
    return ratio


def show_parts(made: Made) -> None:
    """Print where the time of a report went."""
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in made.answer["parts"].items())
    print(f"Spark's {made.rows:,} rows: {parts}; and to start {made.session_s:.1f} s", flush=True)


def marginal(smaller: Made, larger: Made) -> float:
    """Return the seconds of each further row."""
    return (larger.first_s - smaller.first_s) / (larger.rows - smaller.rows)


def _rate(seconds: float) -> str:
    """Return rows a second, if a row takes any time: small ledgers drown in the noise."""
    return f"{1 / seconds:,.0f}" if seconds > 0 else "(noise)"


def show_growth(found: dict[str, list[Made]]) -> None:
    """Print what more rows take."""
    print("\nfrom one size to the next")
    for name, mades in found.items():
        for first, second in pairwise(mades):
            print(
                f"  {name:<10} {first.rows:>12,} to {second.rows:>12,} rows: "
                f"{second.first_s / first.first_s:>6.2f} times the time, "
                f"{second.peak_mb / first.peak_mb:>5.2f} times the memory, "
                f"{_rate(marginal(first, second)):>12} further rows/s"
            )


def show_word(found: dict[str, list[Made]]) -> None:
    """Say what the figures come to."""
    spark, *peers = found.values()
    print()
    for peer in peers:
        name = peer[-1].name
        ratios = ", ".join(
            f"{mine.first_s / his.first_s:.1f} at {mine.rows:,}"
            for mine, his in zip(spark, peer, strict=True)
        )
        print(f"Spark's time, in times of {name}'s: {ratios}")
        mine, his = marginal(*spark[-2:]), marginal(*peer[-2:])
        ahead = [
            item.rows for item, two in zip(spark, peer, strict=True) if item.first_s < two.first_s
        ]
        if min(mine, his) <= 0:
            print("  these sizes are too small to say when it catches up")
        elif ahead:
            print(f"  it is ahead from {min(ahead):,} rows on")
        elif mine < his:
            rows = spark[-1].rows + (spark[-1].first_s - peer[-1].first_s) / (his - mine)
            print(f"  if both went on so, it would catch up at {rows:,.0f} rows; not measured")
        else:
            print(
                f"  it never catches up on {CORES} cores: a further row takes it "
                f"{mine / his:.1f} times as long"
            )
    print(
        "Spark's time is that of the whole report with its tables, the peers' that of its sums only"
        "\n(they are most of it when there are many rows)."
    )
    if all(
        item.first_s > his.first_s for peer in peers for item, his in zip(spark, peer, strict=True)
    ):
        print(
            "On one machine whose disk holds the ledgers, a peer is the faster tool at each size."
        )
    print(
        "What speaks for Spark is not measured here: the same job runs on a cluster where one "
        "machine\nis too small, and puts on the disk what does not fit into the memory it is given."
    )


def main() -> None:
    """Measure, print the figures and the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--here", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        name, ledgers, output, runs = options.here
        if name == "Spark":
            spark_here(Path(ledgers), Path(output), int(runs))
        else:
            peer_here(name, Path(ledgers), Path(output), int(runs))
        return
    found = measure_operations(QUICK_SIZES if options.quick else SIZES)
    show_parts(found["Spark"][-1])
    show_growth(found)
    ratio = measure_messages(QUICK_MESSAGES if options.quick else MESSAGES)
    show_word(found)
    report = Report("report")
    first, second = found["Spark"][-2:]
    step = f"{first.rows // 10**6} M to {second.rows // 10**6} M rows"
    memory, growth = second.peak_mb / first.peak_mb, second.first_s / first.first_s
    report.add(f"peak memory, {step}, times", memory, MEMORY_GOAL, at_most=True)
    report.add(f"time, {step}, times", growth, TIME_GOAL, at_most=True)
    report.add("reconciliation, times DuckDB's time", ratio, PEER_GOAL, at_most=True)
    report.finish()


if __name__ == "__main__":
    main()
