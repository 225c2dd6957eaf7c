"""How `twinbus report` grows with the ledgers, in time and memory, against DuckDB and PyArrow.

python bench/report.py [--quick]

First the operations ledgers of two namespaces, up to 100 M metered rows: 200 queues and 10 backlog
queues each, a row per minute, entity, operation, purpose and outcome, in files of 1 M rows. Spark
makes the whole report and writes its tables. The peers add the same rows up by the same keys, and
write that. Then the messages ledgers of two namespaces and the transfers of a syphon, which are
reconciled: what was accepted, less what was completed and what stands, which ids came twice, and
which messages left the backlog and are not home; and what was transferred, with which delay and how
much out of order. DuckDB answers the same questions. Every answer is compared, exactly, before a
figure is printed.

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measure import Others, Report, processes
from report_ledgers import (
    CHUNK,
    DIVERTED_OF_BATCHES,
    FILES,
    KEYS,
    NAMESPACES,
    STANDING_OF_BATCHES,
    SYPHON,
    WRONG,
    write_messages,
    write_operations,
)
from report_peers import CORES, PEERS

from twinbus.cost.prices import load_sheet
from twinbus.cost.report import ReportSettings, make_report
from twinbus.cost.stages import rule_of
from twinbus.protocol.operations import Purpose
from twinbus.spark.session import start_session

SIZES, QUICK_SIZES = (1_000_000, 10_000_000, 100_000_000), (1_000_000, 3_000_000)
MESSAGES, QUICK_MESSAGES = (1_000_000, 10_000_000), (1_000_000,)
AGAIN_ROWS = 3_000_000  # at most, of what is made twice
MOST_BYTES = 8 * 10**9  # of ledgers on the disk at once
MEMORY_GOAL, TIME_GOAL = 1.5, 12.0  # times, for ten times the rows
PEER_GOAL = 5.0  # times DuckDB's time, for a reconciliation
SHEET = load_sheet("azure-standard").with_completions(True)  # every stage is counted
SAMPLE_S = 0.2

# -- those who make answers, each in a process of its own ------------------------------------------


def tell(**values: object) -> None:
    """Print what came of a run, for the process that measures."""
    print(json.dumps(values), flush=True)


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
                transfers=[list(astuple(row)) for row in made.transfers],
                flow=[list(astuple(row)) for row in made.flow],
                delays=[list(astuple(row)) for row in made.delays],
            )
        session.stop()


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
    assert spark.answer["transfers"] == peer.answer["transfers"]
    assert spark.answer["delays"] == peer.answer["delays"]
    flow = [row[1:] for row in spark.answer["flow"]]
    assert flow == [row[1:] for row in peer.answer["flow"]]
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


def measure_messages(sizes: Sequence[int]) -> dict[str, list[Made]]:
    """Measure ledgers of messages of several sizes, by Spark and DuckDB."""
    found: dict[str, list[Made]] = {"Spark": [], "DuckDB, reconciling": []}
    print(f"\nmessages of a namespace and its backlog, reconciled\n{HEAD}", flush=True)
    for messages in sizes:
        with ground(partial(write_messages, messages=messages), 60 * messages) as at:
            for name, mades in found.items():
                mades.append(at.measure(name))
            spark, peer = (mades[-1] for mades in found.values())
            check_reconciliation(messages, spark, peer)
        print(f"{'':<26} Spark takes {spark.first_s / peer.first_s:.1f} times DuckDB's time")
    show_parts(spark)
    return found


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
                f"  {name:<20} {first.rows:>12,} to {second.rows:>12,} rows: "
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
    reconciled = measure_messages(QUICK_MESSAGES if options.quick else MESSAGES)
    if not options.quick:
        show_growth(reconciled)
    show_word(found)
    report = Report("report")
    first, second = found["Spark"][-2:]
    step = f"{first.rows // 10**6} M to {second.rows // 10**6} M rows"
    memory, growth = second.peak_mb / first.peak_mb, second.first_s / first.first_s
    report.add(f"peak memory, {step}, times", memory, MEMORY_GOAL, at_most=True)
    report.add(f"time, {step}, times", growth, TIME_GOAL, at_most=True)
    jobs, peers = reconciled.values()
    ratio = jobs[-1].first_s / peers[-1].first_s
    report.add("reconciliation, times DuckDB's time", ratio, PEER_GOAL, at_most=True)
    if not options.quick:
        memory = jobs[-1].peak_mb / jobs[-2].peak_mb
        report.add(
            "reconciliation, memory for ten times the rows", memory, MEMORY_GOAL, at_most=True
        )
    report.finish()


if __name__ == "__main__":
    main()
