"""The report: a Spark job that summarises ledgers.

    operations       billable operations, messages and bytes by day, ledger, entity and stage
    money            their prices by month and stage, under a price sheet
    outages          by entity: when it failed, failed over, returned, and was drained
    transfers        diverted messages by entity: moved, dead-lettered, delay, reordering
    reconciliation   messages by ledger, entity and status
    suspects         the messages that are not accounted for, with their ids

Tasks of Spark aggregate everything; this process gets only results. Each table is written as one
file. A table is not written if there is no ledger for it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from twinbus.cost.answers import (
    DayOperations,
    DelayStep,
    EntityOperations,
    FlowStep,
    LostLog,
    Report,
    StageOperations,
    StatusCount,
    Suspect,
)
from twinbus.cost.operations import OPERATION_COLUMNS, add_up, rows_of, summed
from twinbus.cost.outages import OUTAGES
from twinbus.cost.pieces import CANNOT_OPEN
from twinbus.cost.prices import Billed, PriceSheet, priced
from twinbus.cost.reconciliation import SUSPECTS, Reconciliation
from twinbus.cost.sources import pieces_of
from twinbus.cost.survey import Survey, survey
from twinbus.cost.tables import TableFolder
from twinbus.errors import LedgerDamagedError, MessagingError
from twinbus.ledger import LedgerKind
from twinbus.limits import (
    LEAST_DELAY,
    REPORT_ENTITIES,
    REPORT_LISTED,
    REPORT_SUSPECTS,
    REPORT_TASKS,
    REPORT_TRIES,
)
from twinbus.locations import HadoopPath, Location, folder_of
from twinbus.spark.reasons import reason_of

TABLES = ("operations", "money", "outages", "transfers", "reconciliation", "suspects")
_MONEY = pa.schema(
    [
        ("month", pa.string()),
        ("stage", pa.string()),
        ("operations", pa.int64()),
        ("price", pa.decimal128(18, 6)),
        ("bytes", pa.int64()),
        ("bandwidth_price", pa.decimal128(18, 6)),
    ]
)
_RECONCILIATION = pa.schema(
    [
        ("ledger", pa.string()),
        ("path", pa.string()),
        ("status", pa.string()),
        ("messages", pa.int64()),
    ]
)
_TRANSFERS = pa.schema(
    [
        ("path", pa.string()),
        *((name, pa.int64()) for name in ("moved", "dead_lettered", "bytes")),
        *((f"delay_{point}", pa.float64()) for point in ("p50", "p90", "p99", "max")),
        ("reordered", pa.int64()),
        *((f"behind_{point}", pa.int64()) for point in ("p50", "p90", "p99", "max")),
    ]
)
_UNREADABLE = ("READ_FILE", "PATH_NOT_FOUND")  # in Spark's errors about a file
_FILE = re.compile(r"[A-Za-z][\w+.-]+:/[^\s'\",\]]+\.parquet")  # a file name in an error of Spark


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Which ledgers and days to report on."""

    folders: Sequence[Path | str]  # local paths, or URIs of other file systems
    sheet: PriceSheet
    since: date | None = None  # the first and the last day, both included
    until: date | None = None
    skip_bad_files: bool = False


def make_report(
    session: SparkSession,
    settings: ReportSettings,
    output: Path | str | None = None,
    table_format: str = "parquet",
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Read ledgers, write tables to the folder if one is given, and return the results."""
    surveyed = _surveyed(session, settings)
    counts = ", ".join(f"{surveyed.count(kind):,} of {kind.value}" for kind in LedgerKind)
    on_progress(f"ledger files: {counts}")
    tries = 0
    while True:
        try:
            with _cause_shown():
                return _ReportJob(
                    session, settings, surveyed, output, table_format, on_progress
                ).run()
        except _DamagedFileError as damage:
            tries += 1
            is_there = _location(session, damage.path).exists()
            if is_there and damage.is_out_of_reach:
                raise MessagingError(
                    f"{damage.path} exists, but a worker of Spark cannot open it. Every worker "
                    "must reach the folders of the ledgers at the same paths and may read them. "
                    "Share the folders, or copy them to a file system that Spark reaches and give "
                    "its URI"
                ) from damage
            if tries < REPORT_TRIES and not is_there:
                on_progress(
                    f"{damage.path} was merged or deleted meanwhile; the ledgers are read again"
                )
                surveyed = _surveyed(session, settings)
                continue
            if not settings.skip_bad_files or not surveyed.leave_out(str(damage.path), damage.why):
                raise LedgerDamagedError(
                    f"{damage.path} cannot be read: {damage.why}. Move it away or restore it, or "
                    "skip it with --skip-bad-files; the report then names it"
                ) from damage
            on_progress(f"left out: {damage.path}: {damage.why}")


class _DamagedFileError(Exception):
    """Spark found a file with a valid footer and damaged content, or cannot open a file."""

    def __init__(self, path: Path | str, why: str, *, is_out_of_reach: bool) -> None:
        super().__init__(why)
        self.path, self.why = path, why
        self.is_out_of_reach = is_out_of_reach  # of the worker that has tried to open it


def _surveyed(session: SparkSession, settings: ReportSettings) -> Survey:
    """Find and check the files of the ledgers."""
    with _cause_shown():
        return survey(
            _locations(session, settings),
            settings.since,
            settings.until,
            skip_bad=settings.skip_bad_files,
        )


def _locations(session: SparkSession, settings: ReportSettings) -> list[Location]:
    """Return the folders of ledgers, on any file system."""
    return [_location(session, folder) for folder in settings.folders]


def _location(session: SparkSession, path: Path | str) -> Location:
    return HadoopPath(session, path) if isinstance(path, str) else path


@contextmanager
def _cause_shown() -> Iterator[None]:
    """Raise readable errors for failures of Spark, and find the file that it cannot read."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        named = _FILE.search(str(error))
        if named is None or not any(code in str(error) for code in _UNREADABLE):
            raise MessagingError(
                f"Spark cannot create the report: {reason_of(error)}. Look into the log of "
                "Spark, remove the cause, and run the report again"
            ) from error
        why = "damaged: a part of it cannot be read, or fails its checksum"
        is_out_of_reach = CANNOT_OPEN in str(error)
        path = folder_of(unquote(named[0]))
        raise _DamagedFileError(path, why, is_out_of_reach=is_out_of_reach) from error


class _ReportJob:
    """One run over the surveyed files."""

    def __init__(
        self,
        session: SparkSession,
        settings: ReportSettings,
        surveyed: Survey,
        output: Path | str | None,
        table_format: str,
        on_progress: Callable[[str], None],
    ) -> None:
        self._session = session
        self._settings = settings
        self._survey = surveyed
        self._tables = None if output is None else TableFolder(session, output, table_format)
        self._on_progress = on_progress
        self._report = Report(settings.sheet, surveyed)

    def run(self) -> Report:
        """Create all parts of the report."""
        if self._survey.count(LedgerKind.OPERATIONS):
            self._on_progress("operations ...")
            self._operations()
        kinds = (LedgerKind.MESSAGES, LedgerKind.TRANSFERS, LedgerKind.TRANSITIONS)
        if any(map(self._survey.count, kinds)):
            self._on_progress("reconciliation ...")
            before = _read_before(_locations(self._session, self._settings), self._settings)
            found = Reconciliation(self._session, self._survey, before)
            if self._survey.count(LedgerKind.TRANSITIONS):
                self._outages(found)
            if self._survey.count(LedgerKind.TRANSFERS):
                self._transfers(found)
            if self._survey.count(LedgerKind.MESSAGES):
                self._reconcile(found)
        return self._report

    def _write(self, name: str, *parts: pa.Table) -> None:
        if self._tables is not None:
            self._tables.write(name, parts[0].schema, parts)

    # -- operations ----------------------------------------------------------------------------

    def _operations(self) -> None:
        """Add up the metered operations, in several jobs: the sums of one job fit into memory."""
        sheet, ledgers = self._settings.sheet, self._survey.ledgers
        columns = {LedgerKind.OPERATIONS: OPERATION_COLUMNS}
        metered = pieces_of(self._session, self._survey, columns).mapPartitions(
            lambda pieces: [add_up(pieces, sheet, ledgers)]
        )
        context = self._session.sparkContext
        count, step = metered.getNumPartitions(), max(context.defaultParallelism, REPORT_TASKS)
        staged = summed([])
        moments: list[int] = []
        for start in range(0, count, step):
            tasks = range(start, min(start + step, count))
            found = context.runJob(metered, list, tasks)
            staged = summed([staged, *(sums.staged for sums in found)])
            moments += [at for sums in found for at in (sums.begins, sums.ends) if at is not None]
        report = self._report
        report.begins = min(moments) / 1e6 if moments else None
        report.ends = max(moments) / 1e6 if moments else None
        self._write("operations", staged)
        self._sum_up(staged)

    def _sum_up(self, staged: pa.Table) -> None:
        """Add the operations up by the keys that are shown."""
        report = self._report
        stages, days, entities = (
            rows_of(summed([staged], keys))
            for keys in (("ledger", "stage"), ("day", "stage"), ("ledger", "path"))
        )
        report.stages = [StageOperations(*row) for row in stages]
        busiest = sorted((row for row in entities if row[1]), key=lambda row: -row[2])
        report.entities = [EntityOperations(*row) for row in busiest[:REPORT_ENTITIES]]
        months: dict[str, dict[str, Billed]] = {}
        for day, stage, operations, _, size in days:
            report.days.append(DayOperations(day, stage, operations))
            month = months.setdefault(f"{day:%Y-%m}", {})
            before = month.get(stage, Billed(0, 0))
            month[stage] = Billed(before.operations + operations, before.size + size)
        self._money(months)

    def _money(self, months: Mapping[str, Mapping[str, Billed]]) -> None:
        """Price whole months: the tiers of a price sheet count operations of all namespaces."""
        self._report.money = list(priced(months, self._settings.sheet))
        self._write("money", _table([row.rounded() for row in self._report.money], _MONEY))

    # -- outages and transfers -----------------------------------------------------------------

    def _outages(self, found: Reconciliation) -> None:
        outages = [*found.outages()]
        rows = [outage.row(drained) for outage, drained in outages]
        self._write("outages", pa.Table.from_pylist(rows, OUTAGES))
        self._report.outages = [
            outage.shown(drained) for outage, drained in outages[:REPORT_LISTED]
        ]
        self._report.pulled = [*found.pulled()[:REPORT_LISTED]]

    def _transfers(self, found: Reconciliation) -> None:
        transfers = found.transfers()
        self._write("transfers", _table(transfers, _TRANSFERS))
        self._report.transfers = transfers[:REPORT_LISTED]
        self._report.delays = [
            DelayStep(2.0 ** (step + LEAST_DELAY), int(messages))
            for step, messages in enumerate(found.tally.delays)
            if messages
        ]
        self._report.flow = [
            FlowStep(found.begins + (step + 1) * found.flow_step_s, int(diverted), int(moved))
            for step, (diverted, moved) in enumerate(
                zip(found.tally.diverted, found.tally.moved, strict=True)
            )
            if diverted or moved
        ]

    # -- reconciliation ------------------------------------------------------------------------

    def _reconcile(self, found: Reconciliation) -> None:
        report = self._report
        report.lost_logs = [
            LostLog(ledger, at / 1e6, last) for ledger, at, last in found.lost_logs()
        ]
        report.statuses = [
            StatusCount(*key, count) for key, count in sorted(found.counts().items())
        ]
        self._write("reconciliation", _table(report.statuses, _RECONCILIATION))
        report.suspect_count = found.suspect_count
        parts = found.suspects()
        first = _at_least(REPORT_SUSPECTS, parts)
        if self._tables is not None:
            self._tables.write("suspects", SUSPECTS, chain(first, parts))
        shown = pa.concat_tables(first).slice(0, REPORT_SUSPECTS)
        accepted = shown.column("accepted").cast(pa.int64()).to_pylist()
        report.suspects = [
            Suspect(**{**row, "accepted": None if at is None else at / 1e6})
            for row, at in zip(shown.drop("accepted").to_pylist(), accepted, strict=True)
        ]


def _at_least(rows: int, parts: Iterator[pa.Table]) -> list[pa.Table]:
    """Return the first parts of a table: as many as contain `rows` rows, or all parts."""
    found = [next(parts)]
    while sum(map(len, found)) < rows and (part := next(parts, None)) is not None:
        found.append(part)
    return found


def _table(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Return rows of the report as a table."""
    return pa.Table.from_pylist([*map(asdict, rows)], schema)


def _read_before(folders: Sequence[Location], settings: ReportSettings) -> Survey | None:
    """Survey the day before the first day: its transfers may be recorded on the first day."""
    if settings.since is None:
        return None
    day = settings.since - timedelta(days=1)
    return survey(folders, day, day, skip_bad=True)  # the report is not about this day
