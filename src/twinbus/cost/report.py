"""The report: a Spark job that summarises ledgers.

    operations       billable operations, messages and bytes by day, ledger, entity and stage
    money            their prices by month and stage, under a price sheet
    outages          by entity: when it failed, failed over, returned, and was drained
    transfers        diverted messages by entity: moved, dead-lettered, delay, reordering
    reconciliation   messages by ledger, entity and status
    suspects         the messages that are not accounted for, with their ids

Spark aggregates everything; this process gets only results. Each table is written as one file. A
table is not written if there is no ledger for it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from twinbus.cost.answers import (
    DayOperations,
    DelayStep,
    EntityOperations,
    EntityOutage,
    EntityTransfers,
    FlowStep,
    LostLog,
    PulledQueue,
    Report,
    StageOperations,
    StatusCount,
    Suspect,
)
from twinbus.cost.frames import Settled, frame
from twinbus.cost.prices import Billed, PriceSheet, priced
from twinbus.cost.reconciliation import Reconciliation, is_backlog, is_dead_letter
from twinbus.cost.stages import Basis, rule_of
from twinbus.cost.survey import Survey, survey
from twinbus.cost.tables import TableFolder
from twinbus.errors import LedgerDamagedError, MessagingError
from twinbus.ledger import DEAD_LETTERED, MOVED, LedgerKind
from twinbus.limits import (
    PERCENTILE_ACCURACY,
    REPORT_ENTITIES,
    REPORT_LISTED_FILES,
    REPORT_PARTITION_ROWS,
    REPORT_TRIES,
)
from twinbus.locations import HadoopPath, Location, folder_of
from twinbus.protocol.operations import Purpose
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
_NO_SUSPECTS = [
    "'' as ledger",
    "'' as path",
    "id as sequence_number",
    "'' as message_id",
    "'' as status",
    "cast(null as timestamp) as accepted",
]
_PERCENTILES = (0.5, 0.9, 0.99)
_GROUPS = ("ledger", "path", "day", "month", "stage")
_UNREADABLE = ("READ_FILE", "PATH_NOT_FOUND")  # in Spark's errors about a file
_FILE = re.compile(r"[A-Za-z][\w+.-]+:/[^\s'\",\]]+\.parquet")  # a file name in an error of Spark
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _OperationKind:
    """The attributes by which stages distinguish operations, and the times of such operations."""

    operation: str
    purpose: str
    outcome: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class _Sum:
    """Sums of operations, grouped by some of the first five columns; the others are None."""

    ledger: str | None
    path: str | None
    day: date | None
    month: str | None
    stage: str | None
    operations: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """What happened in one interval of the flow chart."""

    slot: int
    diverted: int
    moved: int


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
    session = session.newSession()  # its settings do not affect the caller's session
    session.conf.set("spark.sql.session.timeZone", "UTC")
    partitions = max(sum(surveyed.rows.values()) // REPORT_PARTITION_ROWS, 2)
    session.conf.set("spark.sql.shuffle.partitions", str(partitions))
    session.conf.set(
        "spark.sql.sources.parallelPartitionDiscovery.threshold", str(REPORT_LISTED_FILES)
    )
    session.conf.set("spark.sql.files.ignoreMissingFiles", "false")  # rows would be missing
    tries = 0
    while True:
        try:
            with _cause_shown():
                return _ReportJob(
                    session, settings, surveyed, output, table_format, on_progress
                ).run()
        except _DamagedFileError as damage:
            tries += 1
            if tries < REPORT_TRIES and not _location(session, damage.path).exists():
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
    """Spark found a file with a valid footer and damaged content, or a file is gone."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


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
            raise MessagingError(f"Spark cannot create the report: {reason_of(error)}") from error
        why = "damaged: a part of it cannot be read, or fails its checksum"
        raise _DamagedFileError(folder_of(unquote(named[0])), why) from error


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
        transfers = self._once(self._frame(LedgerKind.TRANSFERS)).persist()
        messages = self._frame(LedgerKind.MESSAGES)
        has_transfers = bool(self._survey.count(LedgerKind.TRANSFERS))
        try:
            if self._survey.count(LedgerKind.OPERATIONS):
                self._operations()
            if self._survey.count(LedgerKind.TRANSITIONS):
                self._outages(transfers)
            if has_transfers:
                self._transfers(transfers, messages)
            if self._survey.count(LedgerKind.MESSAGES):
                self._reconcile(messages, transfers if has_transfers else None)
        finally:
            transfers.unpersist()
        return self._report

    def _frame(self, kind: LedgerKind) -> DataFrame:
        return frame(self._session, self._survey, kind)

    @staticmethod
    def _once(transfers: DataFrame) -> DataFrame:
        """Return each transfer once: after the kill of a worker, rows may be written twice."""
        keys = ("origin", "queue", "sequence_number")
        names = [name for name in transfers.columns if name not in (*keys, "moved")]
        return transfers.groupBy(*keys).agg(
            f.min("moved").alias("moved"), *(f.min_by(n, "moved").alias(n) for n in names)
        )

    def _write(self, name: str, table: DataFrame) -> None:
        if self._tables is not None:
            self._tables.write(name, table)

    # -- operations ----------------------------------------------------------------------------

    def _operations(self) -> None:
        self._on_progress("operations ...")
        rows = self._frame(LedgerKind.OPERATIONS)
        keys = ("operation", "purpose", "outcome")
        counted = (
            rows.groupBy("ledger", f.to_date("bucket").alias("day"), "path", *keys)
            .agg(
                *(f.sum(name).alias(name) for name in ("count", "messages", "bytes", "units")),
                f.min("bucket").alias("begins"),
                f.max("bucket").alias("ends"),
            )
            .persist()
        )
        try:
            kinds = counted.groupBy(*keys).agg(
                f.min("begins").alias("begins"), f.max("ends").alias("ends")
            )
            found = _rows(kinds, _OperationKind)
            self._report.begins = min((kind.begins for kind in found), default=None)
            self._report.ends = max((kind.ends for kind in found), default=None)
            staged = self._staged(counted, keys, found)
            self._write("operations", staged.orderBy("day", "ledger", "path", "stage"))
            self._sum_up(staged)
        finally:
            counted.unpersist()

    def _sum_up(self, staged: DataFrame) -> None:
        """Compute all sums of operations in one pass."""
        staged = staged.withColumn("month", f.date_format("day", "yyyy-MM"))
        columns = [f.col(name) for name in _GROUPS]
        ledger, path, day, month, stage = columns
        summed = staged.groupingSets(
            [[ledger, stage], [day, stage], [month, stage], [ledger, path]], *columns
        ).agg(
            *(f.sum(name).alias(name) for name in ("operations", "messages", "bytes")),
            f.grouping_id().alias("grouping"),
        )
        busiest = Window.partitionBy("grouping").orderBy(f.desc("operations"))
        is_busy = (f.col("place") <= REPORT_ENTITIES) & (path != "")
        sums = _rows(
            summed.withColumn("place", f.row_number().over(busiest))
            .where(path.isNull() | is_busy)
            .drop("grouping", "place"),
            _Sum,
        )
        self._sort(sums)

    def _sort(self, sums: Sequence[_Sum]) -> None:
        """Assign each sum to its list, by the columns that it is grouped by."""
        report = self._report
        months: dict[str, dict[str, Billed]] = {}
        for total in sums:
            carried = (total.operations, total.messages, total.bytes)
            match total:
                case _Sum(ledger=str(ledger), stage=str(stage)):
                    report.stages.append(StageOperations(ledger, stage, *carried))
                case _Sum(ledger=str(ledger), path=str(path)):
                    report.entities.append(EntityOperations(ledger, path, *carried))
                case _Sum(day=date() as day, stage=str(stage)):
                    report.days.append(DayOperations(day, stage, total.operations))
                case _Sum(month=str(month), stage=str(stage)):
                    months.setdefault(month, {})[stage] = Billed(total.operations, total.bytes)
        self._money(months)

    def _staged(
        self, counted: DataFrame, keys: tuple[str, ...], kinds: Sequence[_OperationKind]
    ) -> DataFrame:
        """Return the billable operations of each stage, by the rules in `stages`."""
        sheet = self._settings.sheet
        rules = []
        for kind in kinds:
            rule = rule_of(kind.operation, Purpose(kind.purpose), kind.outcome)
            if rule is not None and sheet.bills(rule.stage):
                key = f"{kind.operation}\0{kind.purpose}\0{kind.outcome}"  # as `concat_ws` below
                rules.append((key, rule.stage.value, rule.basis.value))
        if not rules:
            rules.append(("", "", ""))  # a map cannot be empty
        joined = f.concat_ws("\0", *keys)
        stage, basis = (
            f.create_map(*(f.lit(text) for key, *named in rules for text in (key, named[at])))[
                joined
            ]
            for at in (0, 1)
        )
        billed = (
            f.when(basis == Basis.UNITS.value, f.col("units"))
            .when(basis == Basis.MESSAGES.value, f.col("messages"))
            .otherwise(f.col("count"))
        )
        return (
            counted.withColumns({"stage": stage, "operations": billed})
            .where(f.col("stage").isNotNull())
            .groupBy("day", "ledger", "path", "stage")
            .agg(*(f.sum(name).alias(name) for name in ("operations", "messages", "bytes")))
        )

    def _money(self, months: Mapping[str, Mapping[str, Billed]]) -> None:
        """Price each month in total: its tiers count the operations of all namespaces."""
        self._report.money = list(priced(months, self._settings.sheet))
        if self._tables is not None:
            rows = list(map(asdict, self._report.money))
            self._tables.write_arrow("money", pa.Table.from_pylist(rows, _MONEY))

    # -- outages -------------------------------------------------------------------------------

    def _outages(self, transfers: DataFrame) -> None:
        self._on_progress("outages ...")
        events = self._frame(LedgerKind.TRANSITIONS).distinct()
        order = Window.partitionBy("primary", "process", "path").orderBy("at")
        is_start = f.col("event") == "FailedOver"
        end_columns = f.struct("event", "at", "cause", "diverted")
        failovers = events.where(f.col("event").isin("FailedOver", "Returned")).withColumns(
            {"before": f.lag("event").over(order), "after": f.lead(end_columns).over(order)}
        )
        # An entity that returned without a failover has failed over before the first day.
        is_complete = is_start | f.coalesce(f.col("before") != "FailedOver", f.lit(True))
        away = (
            failovers.where(is_complete)
            .withColumn("end", f.when(is_start, f.col("after")).otherwise(end_columns))
            .withColumn("is_back", f.coalesce(f.col("end.event") == "Returned", f.lit(False)))
            .select(
                "primary",
                "process",
                "path",
                f.coalesce("since", "at").alias("failing"),
                f.when(is_start, f.col("at")).otherwise(f.col("since")).alias("failed_over"),
                f.when(is_start, f.col("cause")).alias("cause"),
                f.when(f.col("is_back"), f.col("end.at")).alias("returned"),
                f.when(f.col("is_back"), f.col("end.cause")).alias("returned_by"),
                f.when(f.col("is_back"), f.col("end.diverted")).alias("diverted"),
                f.col("end.at").alias("until"),
            )
        )
        drained = transfers.where(f.col("result") == MOVED).select(
            f.lower("path").alias("home"), "moved", "accepted"
        )
        # Messages diverted in an outage arrive during it or after it; the last one ends its drain.
        during = away.join(
            drained,
            (f.lower(away["path"]) == drained["home"])
            & (drained["accepted"] >= away["failed_over"])
            & (away["until"].isNull() | (drained["accepted"] <= away["until"])),
            "left",
        )
        names = [name for name in away.columns if name != "until"]
        table = during.groupBy(*names).agg(f.max("moved").alias("drained"))
        drain = _seconds("returned", "drained")
        table = (
            table.withColumn("seconds_to_fail_over", _seconds("failing", "failed_over"))
            .withColumn("seconds_away", _seconds("failed_over", "returned"))
            .withColumn(
                "seconds_to_drain",
                f.when(drain.isNotNull(), f.greatest(drain, f.lit(0.0))),  # greatest ignores nulls
            )
            .orderBy("failed_over", "path", "process")
            .persist()
        )
        try:
            self._write("outages", table)
            self._report.outages = _rows(table.limit(1000), EntityOutage)
        finally:
            table.unpersist()
        pulls = events.where(f.col("event") == "BacklogQueuePulled")
        self._report.pulled = _rows(
            pulls.groupBy("path").agg(f.count("*").alias("times")).orderBy("path").limit(1000),
            PulledQueue,
        )

    # -- transfers -----------------------------------------------------------------------------

    def _transfers(self, transfers: DataFrame, messages: DataFrame) -> None:
        self._on_progress("transfers ...")
        delay = f.col("moved").cast("double") - f.col("accepted").cast("double")
        is_moved = f.col("result") == MOVED
        delayed = transfers.withColumn("delay", f.when(is_moved, delay))
        points = [f.lit(point) for point in _PERCENTILES]
        percentiles = f.percentile_approx("delay", f.array(*points), f.lit(PERCENTILE_ACCURACY))
        by_path = delayed.groupBy(f.lower("path").alias("home")).agg(
            f.first("path").alias("path"),
            f.count_if(is_moved).alias("moved"),
            f.count_if(f.col("result") == DEAD_LETTERED).alias("dead_lettered"),
            f.sum("bytes").alias("bytes"),
            *_each_named("delay", percentiles),
            f.max("delay").alias("delay_max"),
        )
        table = (
            by_path.join(self._reordered(transfers, messages), "home", "left")
            .drop("home")
            .orderBy("path")
            .persist()
        )
        try:
            self._write("transfers", table)
            self._report.transfers = _rows(table.limit(1000), EntityTransfers)
        finally:
            table.unpersist()
        step = f.floor(f.log2(f.greatest(f.col("delay"), f.lit(1e-3))))
        self._report.delays = _rows(
            delayed.where(is_moved)
            .groupBy(f.pow(f.lit(2.0), step).alias("seconds"))
            .agg(f.count("*").alias("messages"))
            .orderBy("seconds"),
            DelayStep,
        )
        self._report.flow = self._flow(transfers)

    @staticmethod
    def _reordered(transfers: DataFrame, messages: DataFrame) -> DataFrame:
        """Return how much the order of arrival differs from the order of acceptance, by entity.

        A message is behind by the number of later messages that arrived before it.
        """
        path = f.col("path")
        home = messages.where(
            (f.col("event") == "accepted") & ~is_backlog(path) & ~is_dead_letter(path)
        )
        moved = transfers.where(f.col("result") == MOVED).withColumn("home", f.lower("path"))
        # Before anything is grouped: most entities of a ledger got nothing from the backlog.
        home = (
            home.withColumn("home", f.lower("path"))
            .join(f.broadcast(moved.select("home").distinct()), "home", "left_semi")
            .groupBy("home", "ledger", "number", "first")
            .agg(f.min("at").alias("at"), f.max("message_id").alias("message_id"))
        )
        diverted = moved.groupBy("home", "message_id").agg(
            f.min("accepted").alias("sent"), f.min("sequence_number").alias("turn")
        )
        arrived = home.join(diverted, ["home", "message_id"], "left")
        by_arrival = Window.partitionBy("home").orderBy("at", "first")
        by_sending = Window.partitionBy("home").orderBy(
            f.coalesce("sent", "at"), f.coalesce("turn", "first")
        )
        behind = arrived.select(
            "home",
            "sent",
            (f.row_number().over(by_arrival) - f.row_number().over(by_sending)).alias("behind"),
        )
        points = f.array(*(f.lit(point) for point in _PERCENTILES))
        late = f.greatest(f.col("behind"), f.lit(0))
        percentiles = f.percentile_approx(late, points, f.lit(PERCENTILE_ACCURACY))
        return (
            behind.where(f.col("sent").isNotNull())
            .groupBy("home")
            .agg(
                f.count_if(f.col("behind") > 0).alias("reordered"),
                *_each_named("behind", percentiles),
                f.max(late).alias("behind_max"),
            )
        )

    @staticmethod
    def _flow(transfers: DataFrame) -> list[FlowStep]:
        """Return how many messages were diverted and brought home, over time."""
        span = transfers.agg(
            f.min("accepted").cast("double").alias("begins"),
            f.max("moved").cast("double").alias("ends"),
        ).first()
        assert span is not None
        step = max((span["ends"] - span["begins"]) / 100, 0.5)
        slot = f.floor(((f.col("at").cast("double")) - f.lit(span["begins"])) / f.lit(step))
        moments = transfers.select(f.col("accepted").alias("at"), f.lit(1).alias("diverted"))
        moments = moments.withColumn("moved", f.lit(0)).unionByName(
            transfers.select(f.col("moved").alias("at"), f.lit(0).alias("diverted")).withColumn(
                "moved", f.lit(1)
            )
        )
        slots = (
            moments.groupBy(slot.alias("slot"))
            .agg(f.sum("diverted").alias("diverted"), f.sum("moved").alias("moved"))
            .orderBy("slot")
        )
        return [
            FlowStep(span["begins"] + (row.slot + 1) * step, row.diverted, row.moved)
            for row in _rows(slots, _Slot)
        ]

    # -- reconciliation ------------------------------------------------------------------------

    def _at_home(self, messages: DataFrame) -> DataFrame:
        """Return the rows in which to search for messages that were brought home."""
        before = _read_before(_locations(self._session, self._settings), self._settings)
        return messages if before is None else frame(self._session, before, LedgerKind.MESSAGES)

    def _reconcile(self, messages: DataFrame, transfers: DataFrame | None) -> None:
        self._on_progress("reconciliation ...")
        with Reconciliation(messages, self._survey.ledgers) as found:
            self._report.lost_logs = [
                LostLog(ledger, at / 1e6, last) for ledger, at, last in found.lost_logs()
            ]
            counts = sorted(found.counts().items())
            self._report.statuses = [StatusCount(*key, count) for key, count in counts]
            if self._tables is not None:
                rows = list(map(asdict, self._report.statuses))
                table = pa.Table.from_pylist(rows, _RECONCILIATION)
                self._tables.write_arrow("reconciliation", table)
            self._name(found.suspects(transfers, self._at_home(messages)))

    def _name(self, suspects: DataFrame | None) -> None:
        """Collect the messages that are not accounted for."""
        if suspects is None:
            suspects = self._session.range(0).selectExpr(*_NO_SUSPECTS)
        with Settled.of(suspects) as settled:
            self._report.suspect_count = settled.count
            ordered = settled.rows.orderBy("ledger", "path", "sequence_number")
            self._write("suspects", ordered)
            self._report.suspects = _rows(ordered.limit(100), Suspect)


def _read_before(folders: Sequence[Location], settings: ReportSettings) -> Survey | None:
    """Survey the day before the first day, too: its transfers may have been recorded later."""
    if settings.since is None:
        return None
    return survey(
        folders,
        settings.since - timedelta(days=1),
        settings.until,
        skip_bad=True,  # the survey of that day reports bad files
    )


def _rows(table: DataFrame, kind: Callable[..., R]) -> list[R]:
    """Collect a table; times as seconds, because PySpark would convert them to local time."""
    columns = [
        f.col(name).cast("double").alias(name) if kind == "timestamp" else f.col(name)
        for name, kind in table.dtypes
    ]
    return [kind(**row.asDict()) for row in table.select(*columns).collect()]


def _seconds(since: str, until: str) -> Column:
    return f.col(until).cast("double") - f.col(since).cast("double")


def _each_named(what: str, percentiles: Column) -> Iterator[Column]:
    """Yield percentiles as separate columns."""
    for at, point in enumerate(_PERCENTILES):
        yield percentiles[at].alias(f"{what}_p{point * 100:.0f}")
