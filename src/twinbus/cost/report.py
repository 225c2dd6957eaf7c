"""The report: a Spark job that turns ledgers into answers.

    operations       billable operations, messages and bytes per day, ledger, entity and stage
    money            the same per month and stage, under a price sheet
    outages          of each entity: when it failed, failed over, returned, and was drained
    transfers        diverted messages per entity: moved, dead-lettered, delay, reordering
    reconciliation   messages per ledger, entity and status
    suspects         the messages that are not accounted for, by name

Everything is aggregated by Spark; what reaches this process is as large as the answers, not as the
ledgers. Tables are written as one file each; a table whose ledger is not there is not written.
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

from twinbus.cost import reconciliation
from twinbus.cost.answers import (
    DayOperations,
    DelayStep,
    EntityOperations,
    EntityTransfers,
    FlowStep,
    LostLog,
    Outage,
    PulledQueue,
    Report,
    StageOperations,
    StatusCount,
    Suspect,
)
from twinbus.cost.frames import frame
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
_FILE = re.compile(r"[A-Za-z][\w+.-]+:/[^\s'\",\]]+\.parquet")  # as Spark names one
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _OperationKind:
    """What the stages tell operations apart by, and when there were some."""

    operation: str
    purpose: str
    outcome: str
    begins: float
    ends: float


@dataclass(frozen=True, slots=True)
class _Sum:
    """Operations added up by some of the first five columns; the others are None."""

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
    """What happened in one of the stretches that a flow is drawn in."""

    slot: int
    diverted: int
    moved: int


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """What to report on."""

    folders: Sequence[Path | str]  # local paths, and URIs of other file systems
    sheet: PriceSheet
    since: date | None = None  # days, both included
    until: date | None = None
    skip_bad_files: bool = False


def make_report(
    session: SparkSession,
    settings: ReportSettings,
    output: Path | str | None = None,
    table_format: str = "parquet",
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Read ledgers, write tables to a folder if there is one, and return the answers."""
    with _cause_shown():
        surveyed = survey(
            _locations(session, settings),
            settings.since,
            settings.until,
            skip_bad=settings.skip_bad_files,
        )
    told = ", ".join(f"{surveyed.count(kind):,} of {kind.value}" for kind in LedgerKind)
    tell(f"ledger files: {told}")
    session = session.newSession()  # with settings of its own
    session.conf.set("spark.sql.session.timeZone", "UTC")
    partitions = max(sum(surveyed.rows.values()) // REPORT_PARTITION_ROWS, 2)
    session.conf.set("spark.sql.shuffle.partitions", str(partitions))
    session.conf.set(
        "spark.sql.sources.parallelPartitionDiscovery.threshold", str(REPORT_LISTED_FILES)
    )
    while True:
        try:
            with _cause_shown():
                return _Job(session, settings, surveyed, output, table_format, tell).run()
        except _DamagedFileError as damage:
            if not settings.skip_bad_files or not surveyed.leave_out(damage.path, damage.why):
                raise LedgerDamagedError(
                    f"{damage.path} cannot be read: {damage.why}. Move it away or restore it; or "
                    "leave it out with --skip-bad-files, and the report names it"
                ) from damage
            tell(f"left out: {damage.path}: {damage.why}")


class _DamagedFileError(Exception):
    """Spark met a file that is whole at its end and damaged within."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


def _locations(session: SparkSession, settings: ReportSettings) -> list[Location]:
    """Return the folders of ledgers, on whichever file systems."""
    return [
        HadoopPath(session, folder) if isinstance(folder, str) else folder
        for folder in settings.folders
    ]


@contextmanager
def _cause_shown() -> Iterator[None]:
    """Say what happened where Spark fails, and find the file that it cannot read."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        named = _FILE.search(str(error))
        if named is None or "READ_FILE" not in str(error):
            raise MessagingError(f"Spark cannot make the report: {reason_of(error)}") from error
        why = "damaged: a part of it cannot be read, or fails its checksum"
        raise _DamagedFileError(str(folder_of(unquote(named[0]))), why) from error


class _Job:
    """One run over what was surveyed."""

    def __init__(
        self,
        session: SparkSession,
        settings: ReportSettings,
        surveyed: Survey,
        output: Path | str | None,
        table_format: str,
        tell: Callable[[str], None],
    ) -> None:
        self._session = session
        self._settings = settings
        self._survey = surveyed
        self._tables = None if output is None else TableFolder(session, output, table_format)
        self._tell = tell
        self._report = Report(settings.sheet, surveyed)

    def run(self) -> Report:
        """Do all of it."""
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
        """Return each transfer once: a killed worker's were told again."""
        keys = ("origin", "queue", "sequence_number")
        told = [name for name in transfers.columns if name not in (*keys, "moved")]
        return transfers.groupBy(*keys).agg(
            f.min("moved").alias("moved"), *(f.min_by(n, "moved").alias(n) for n in told)
        )

    def _write(self, name: str, table: DataFrame) -> None:
        if self._tables is not None:
            self._tables.write(name, table)

    # -- operations ----------------------------------------------------------------------------

    def _operations(self) -> None:
        self._tell("operations ...")
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
            known = _rows(kinds, _OperationKind)
            self._report.begins = min((kind.begins for kind in known), default=None)
            self._report.ends = max((kind.ends for kind in known), default=None)
            staged = self._staged(counted, keys, known)
            self._write("operations", staged.orderBy("day", "ledger", "path", "stage"))
            self._sum_up(staged)
        finally:
            counted.unpersist()

    def _sum_up(self, staged: DataFrame) -> None:
        """Add operations up in every way a person looks at them, at one go."""
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
        """Put each sum where it belongs, by the columns that it was added up by."""
        report = self._report
        months: dict[str, dict[str, Billed]] = {}
        for one in sums:
            carried = (one.operations, one.messages, one.bytes)
            match one:
                case _Sum(ledger=str(ledger), stage=str(stage)):
                    report.stages.append(StageOperations(ledger, stage, *carried))
                case _Sum(ledger=str(ledger), path=str(path)):
                    report.entities.append(EntityOperations(ledger, path, *carried))
                case _Sum(day=date() as day, stage=str(stage)):
                    report.days.append(DayOperations(day, stage, one.operations))
                case _Sum(month=str(month), stage=str(stage)):
                    months.setdefault(month, {})[stage] = Billed(one.operations, one.bytes)
        self._money(months)

    def _staged(
        self, counted: DataFrame, keys: tuple[str, ...], kinds: Sequence[_OperationKind]
    ) -> DataFrame:
        """Return the billable operations of each stage, by the rules of `stages`."""
        sheet = self._settings.sheet
        rules = []
        for one in kinds:
            rule = rule_of(one.operation, Purpose(one.purpose), one.outcome)
            if rule is not None and sheet.bills(rule.stage):
                key = f"{one.operation}\0{one.purpose}\0{one.outcome}"  # as `concat_ws` below
                rules.append((key, rule.stage.value, rule.basis.value))
        if not rules:
            rules.append(("", "", ""))  # a map cannot be empty
        kind = f.concat_ws("\0", *keys)
        stage, basis = (
            f.create_map(*(f.lit(text) for key, *named in rules for text in (key, named[at])))[kind]
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
        """Price each month as a whole: its tiers count the operations of all namespaces."""
        self._report.money = list(priced(months, self._settings.sheet))
        if self._tables is not None:
            rows = list(map(asdict, self._report.money))
            self._tables.write_arrow("money", pa.Table.from_pylist(rows, _MONEY))

    # -- outages -------------------------------------------------------------------------------

    def _outages(self, transfers: DataFrame) -> None:
        self._tell("outages ...")
        events = self._frame(LedgerKind.TRANSITIONS).distinct()
        order = Window.partitionBy("primary", "process", "path").orderBy("at")
        is_start = f.col("event") == "FailedOver"
        told = f.struct("event", "at", "cause", "diverted")
        known = events.where(f.col("event").isin("FailedOver", "Returned")).withColumns(
            {"before": f.lag("event").over(order), "after": f.lead(told).over(order)}
        )
        # One that returned without having failed over did that before the first day.
        is_whole = is_start | f.coalesce(f.col("before") != "FailedOver", f.lit(True))
        away = (
            known.where(is_whole)
            .withColumn("end", f.when(is_start, f.col("after")).otherwise(told))
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
        # What was diverted in an outage goes home during it or after it: its last message ends it.
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
                f.when(drain.isNotNull(), f.greatest(drain, f.lit(0.0))),  # it skips nulls
            )
            .orderBy("failed_over", "path", "process")
            .persist()
        )
        try:
            self._write("outages", table)
            self._report.outages = _rows(table.limit(1000), Outage)
        finally:
            table.unpersist()
        pulls = events.where(f.col("event") == "BacklogQueuePulled")
        self._report.pulled = _rows(
            pulls.groupBy("path").agg(f.count("*").alias("times")).orderBy("path").limit(1000),
            PulledQueue,
        )

    # -- transfers -----------------------------------------------------------------------------

    def _transfers(self, transfers: DataFrame, messages: DataFrame) -> None:
        self._tell("transfers ...")
        delay = f.col("moved").cast("double") - f.col("accepted").cast("double")
        is_moved = f.col("result") == MOVED
        known = transfers.withColumn("delay", f.when(is_moved, delay))
        points = [f.lit(point) for point in _PERCENTILES]
        percentiles = f.percentile_approx("delay", f.array(*points), f.lit(PERCENTILE_ACCURACY))
        by_path = known.groupBy(f.lower("path").alias("home")).agg(
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
            known.where(is_moved)
            .groupBy(f.pow(f.lit(2.0), step).alias("seconds"))
            .agg(f.count("*").alias("messages"))
            .orderBy("seconds"),
            DelayStep,
        )
        self._report.flow = self._flow(transfers)

    @staticmethod
    def _reordered(transfers: DataFrame, messages: DataFrame) -> DataFrame:
        """Return how far messages of each entity came out of the order they were accepted in.

        A message is behind by as many places as it arrived later than its turn was.
        """
        path = f.col("path")
        home = messages.where(
            (f.col("event") == "accepted") & ~is_backlog(path) & ~is_dead_letter(path)
        )
        home = home.groupBy("ledger", "number", "first").agg(
            f.max(f.lower("path")).alias("home"),
            f.min("at").alias("at"),
            f.max("message_id").alias("message_id"),
        )
        diverted = (
            transfers.where(f.col("result") == MOVED)
            .groupBy(f.lower("path").alias("home"), "message_id")
            .agg(f.min("accepted").alias("sent"), f.min("sequence_number").alias("turn"))
        )
        entities = diverted.select("home").distinct()
        arrived = home.join(f.broadcast(entities), "home", "left_semi").join(
            diverted, ["home", "message_id"], "left"
        )
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
            FlowStep(span["begins"] + (one.slot + 1) * step, one.diverted, one.moved)
            for one in _rows(slots, _Slot)
        ]

    # -- reconciliation ------------------------------------------------------------------------

    def _at_home(self, messages: DataFrame) -> DataFrame:
        """Return what messages are looked for in, to see whether they are home."""
        before = _read_before(_locations(self._session, self._settings), self._settings)
        return messages if before is None else frame(self._session, before, LedgerKind.MESSAGES)

    def _reconcile(self, messages: DataFrame, transfers: DataFrame | None) -> None:
        self._tell("reconciliation ...")
        self._report.lost_logs = _rows(reconciliation.lost_logs(messages), LostLog)
        with Reconciliation(messages, self._survey.ledgers) as found:
            counts = sorted(found.counts().items())
            self._report.statuses = [StatusCount(*key, count) for key, count in counts]
            if self._tables is not None:
                rows = list(map(asdict, self._report.statuses))
                table = pa.Table.from_pylist(rows, _RECONCILIATION)
                self._tables.write_arrow("reconciliation", table)
            self._name(found.suspects(transfers, self._at_home(messages)))

    def _name(self, suspects: DataFrame | None) -> None:
        """Name the messages that are not accounted for."""
        if suspects is None:
            suspects = self._session.range(0).selectExpr(*_NO_SUSPECTS)
        suspects = suspects.persist()
        try:
            self._report.suspect_count = suspects.count()
            ordered = suspects.orderBy("ledger", "path", "sequence_number")
            self._write("suspects", ordered)
            self._report.suspects = _rows(ordered.limit(100), Suspect)
        finally:
            suspects.unpersist()


def _read_before(folders: Sequence[Location], settings: ReportSettings) -> Survey | None:
    """Look at the day before the first, too: what came home then may have been told later."""
    if settings.since is None:
        return None
    return survey(
        folders,
        settings.since - timedelta(days=1),
        settings.until,
        skip_bad=True,  # it is named where it belongs
    )


def _rows(table: DataFrame, kind: Callable[..., R]) -> list[R]:
    """Collect a table; moments as seconds, because Spark's Python gives them in local time."""
    columns = [
        f.col(name).cast("double").alias(name) if kind == "timestamp" else f.col(name)
        for name, kind in table.dtypes
    ]
    return [kind(**row.asDict()) for row in table.select(*columns).collect()]


def _seconds(since: str, until: str) -> Column:
    return f.col(until).cast("double") - f.col(since).cast("double")


def _each_named(what: str, percentiles: Column) -> Iterator[Column]:
    """Give percentiles as columns of their own."""
    for at, point in enumerate(_PERCENTILES):
        yield percentiles[at].alias(f"{what}_p{point * 100:.0f}")
