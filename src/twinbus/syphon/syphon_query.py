"""The syphon's query, as Spark calls it: reads ranges of backlog queues, writes their outcomes.

    who calls            where                      what
    planner process      driver, one per query      initialOffset, latestOffset, reportLatestOffset,
                                                    partitions, stop
    reader task          executors                  read: passes the ranges of a task on as rows
    writer task          executors                  write: carries them home
    committer process    driver                     commit: settles, and reports to the planner

Rows contain ranges, not messages: the bodies go from the secondary to the primary through the
writer's process only. The brokers store what must survive (leases, and which messages were
transferred). So a query needs no checkpoint of an earlier query, and an old checkpoint does no
harm.

If the secondary has no ranges, a row is a visit to a queue: the worker receives under lock, sends
and settles by itself (locked_carrier.py), and the committer only reports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from twinbus.clock import SystemClock
from twinbus.connection import ConnectionString
from twinbus.errors import MessagingError, StaleEpochError
from twinbus.limits import BATCH_PATIENCE_S, SETTLE_TIMEOUT_S
from twinbus.message import TIMESTAMP
from twinbus.namespace.metered import ClientLedger
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import SettleRange
from twinbus.spark.connections import namespace_of
from twinbus.spark.termination import exit_on_terminate, ignore_terminate
from twinbus.syphon.book import Task
from twinbus.syphon.carrier import Carried, Carrier, Range, Trial, failure_of, write_transfers
from twinbus.syphon.desk import Desk
from twinbus.syphon.locked_carrier import LockedCarrier
from twinbus.syphon.locked_planner import LockedPlanner
from twinbus.syphon.planner import Planner, PlannerSettings
from twinbus.syphon.settling import settlements
from twinbus.syphon.transfers import TransferLedger, transfers_of
from twinbus.tracing import TracedPeer, enable_in_worker, setup_name

SYPHON_FORMAT = "twinbus_syphon"
_RANGES = pa.schema(
    [
        ("queue", pa.string()),
        ("epoch", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("skipped", pa.list_(pa.string())),
        ("origin", pa.string()),
        ("lock_us", pa.int64()),
        ("on_trial", pa.map_(pa.string(), pa.list_(pa.int64()))),
        # How much the task carries, only in its first row. Spark's metrics are computed from it.
        ("messages", pa.int64()),
        ("bytes", pa.int64()),
        ("waiting", pa.int64()),
        ("oldest", TIMESTAMP),
    ]
)
_FOLDERS = ("ledger", "spool")
REPORTED = ("moved", "dead_lettered", "waiting", "oldest_age_s", "rate", "sends", "batches")
RANGES_DDL = (
    "queue string, epoch bigint, first bigint, last bigint, skipped array<string>, "
    "origin string, lock_us bigint, on_trial map<string, array<bigint>>, messages bigint, "
    "bytes bigint, waiting bigint, oldest timestamp"
)
OBSERVED = "twinbus"  # the name of the metrics of a batch, in Spark's `observedMetrics`


@dataclass(frozen=True, slots=True)
class SyphonOptions:
    """The options of the query, converted to text and back."""

    primary: str = field(repr=False)  # connection strings
    secondary: str = field(repr=False)
    folder: Path  # of the desk
    settings: PlannerSettings
    ledger: Path | None = None  # a folder that all workers reach
    spool: Path | None = None  # a folder of the driver; rows arrive there with commits
    tracing: str = field(default_factory=setup_name)  # the value of TWINBUS_TRACING

    def to_options(self) -> dict[str, str]:
        """Return the options as text for Spark."""
        settings = self.settings
        return {
            "primary": self.primary,
            "secondary": self.secondary,
            "folder": str(self.folder),
            "ledger": str(self.ledger or ""),
            "spool": str(self.spool or ""),
            "tracing": self.tracing,
            "owner": settings.owner,
            "queues": "\n".join(settings.queues),
            "extra_queues": "\n".join(settings.extra_queues),
            "retry_interval_s": str(settings.retry_interval.total_seconds()),
            "lease_s": str(settings.lease.total_seconds()),
            "range_messages": str(settings.range_messages),
            "ranges_per_queue": str(settings.ranges_per_queue),
        }

    @classmethod
    def of(cls, options: Any) -> "SyphonOptions":
        """Return the options of a data source."""
        settings = PlannerSettings(
            owner=options["owner"],
            queues=tuple(options["queues"].split("\n")),
            extra_queues=tuple(filter(None, options["extra_queues"].split("\n"))),
            retry_interval=timedelta(seconds=float(options["retry_interval_s"])),
            lease=timedelta(seconds=float(options["lease_s"])),
            range_messages=int(options["range_messages"]),
            ranges_per_queue=int(options["ranges_per_queue"]),
        )
        folder = Path(options["folder"])
        ledger, spool = (Path(options[name]) if options[name] else None for name in _FOLDERS)
        ends = options["primary"], options["secondary"]
        return cls(*ends, folder, settings, ledger, spool, options["tracing"])

    def carrier(self, *, on_driver: bool = False) -> Carrier:
        """Return the carrier between the two namespaces, in any process."""
        primary, secondary = namespace_of(self.primary), namespace_of(self.secondary)
        transfers = self.transfers_on_driver() if on_driver else self._transfers_on_worker()
        enable_in_worker(self.tracing)
        peer = TracedPeer.of(ConnectionString.parse(self.primary))
        return Carrier(primary, secondary, transfers, self.settings.extra_queues, peer)

    def task_carrier(self) -> Carrier | LockedCarrier:
        """Return the carrier of a task: by ranges if the secondary has them, or else by locks."""
        secondary = namespace_of(self.secondary)
        if Capability.RANGES in secondary.capabilities:
            return self.carrier()
        return LockedCarrier(self.carrier(), secondary, self.settings.range_messages)

    def planner(self) -> Planner | LockedPlanner:
        """Create the planner, in the planner's process; for ranges, start to renew their leases."""
        secondary, desk, clock = namespace_of(self.secondary), Desk(self.folder), SystemClock()
        if Capability.RANGES not in secondary.capabilities:
            return LockedPlanner(secondary, self.settings, desk, clock)
        planner = Planner(secondary, self.settings, desk, clock)
        planner.start_keeping()
        return planner

    def _transfers_on_worker(self) -> TransferLedger:
        if self.ledger is not None:
            return transfers_of(self.ledger)
        return TransferLedger(None, by_commit=self.spool is not None)

    def transfers_on_driver(self) -> TransferLedger:
        """Return the ledger that the committer writes to."""
        folder = self.ledger or self.spool
        return TransferLedger(None) if folder is None else transfers_of(folder)


def age_s(moment: str) -> Column:
    """Return the age of the oldest time in a column at the beginning of the batch."""
    return f.max(f.current_timestamp().cast("double") - f.col(moment).cast("double"))


class SyphonDataSource(DataSource):
    """Reads ranges of backlog queues; its writer carries them home."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return SYPHON_FORMAT

    def schema(self) -> str:
        """Return the columns of a range."""
        return RANGES_DDL

    @classmethod
    def observed(cls, rows: DataFrame) -> DataFrame:
        """Add metrics of messages to the batches: Spark itself counts rows, which are ranges."""
        return rows.observe(
            OBSERVED,
            *(f.sum(name).alias(name) for name in ("messages", "bytes", "waiting")),
            age_s("oldest").alias("oldest_age_s"),
        )

    def streamReader(self, schema: StructType) -> "RangeReader":
        """Return the reader, which plans and passes on ranges."""
        return RangeReader(SyphonOptions.of(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "RangeWriter":
        """Return the writer, which carries the ranges."""
        return RangeWriter(SyphonOptions.of(self.options))


@dataclass
class TaskPartition(InputPartition):
    """A task for a worker."""

    task: Task


class RangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planner in the form that Spark calls."""

    def __init__(self, options: SyphonOptions) -> None:
        self._options = options
        self._planner: Planner | LockedPlanner | None = (
            None  # only in the planner's process, because it has threads
        )
        self._once = False

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch."""
        return {"batch": 0, "tasks": []}

    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end when there is nothing left to move."""
        self._once = True

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return that a batch has no limit of its own: the planner decides what it contains."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next batch; Spark calls this after the previous batch was settled."""
        if self._planner is None:
            exit_on_terminate()  # so that Spark calls `stop`
            self._planner = self._options.planner()
        tasks = self._planner.next_tasks(BATCH_PATIENCE_S, once=self._once)
        if not tasks:
            return start
        return {"batch": start["batch"] + 1, "tasks": [task.to_json() for task in tasks]}

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the progress in messages: the rows that Spark counts are ranges.

        Spark shows it as `latestOffset` of the source. It is the progress at the time when the
        batch was planned.
        """
        progress = Desk(self._options.folder).progress()[0]
        moved_bytes = sum(destination.moved_bytes for destination in progress.destinations)
        figures = {name: getattr(progress, name) for name in REPORTED}
        return {**figures, "moved_bytes": moved_bytes}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a batch; after a restart, their leases may have expired."""
        return [TaskPartition(Task.from_json(value)) for value in end["tasks"]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Pass the ranges of a task on as rows."""
        assert isinstance(partition, TaskPartition)
        task = partition.task
        rows: list[dict[str, Any]] = [
            {
                "queue": task.queue,
                "epoch": leased.epoch,
                "first": leased.first,
                "last": leased.last,
                "skipped": list(task.skipped),
                "origin": leased.origin,
                "lock_us": leased.lock_us,
                "on_trial": list(task.on_trial.items()),
            }
            for leased in task.ranges
        ]
        if task.load is not None:
            rows[0] |= {
                "messages": task.load.messages,
                "bytes": task.load.bytes,
                "waiting": task.load.waiting,
                "oldest": task.load.oldest_us,
            }
        yield pa.RecordBatch.from_pylist(rows, _RANGES)

    def stop(self) -> None:
        """Release the leases."""
        ignore_terminate()
        if self._planner is not None:
            self._planner.close()
        ClientLedger.write_all()


def is_repeated_task() -> bool:
    """Return whether Spark repeats this task because its worker was killed or failed."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


@dataclass
class CarriedMessage(WriterCommitMessage):
    """A writer's report to the committer."""

    carried: list[Carried]
    transfers: bytes = b""  # ledger rows, if workers cannot write the ledger


class RangeWriter(DataSourceStreamArrowWriter):
    """Carries ranges, and settles them when all ranges of a batch are done."""

    def __init__(self, options: SyphonOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CarriedMessage:
        """Carry the ranges of a task home, in a worker."""
        carrier = self._options.task_carrier()
        if isinstance(carrier, LockedCarrier):
            carrier.is_repeated = is_repeated_task()
        carried: list[Carried] = []
        for batch in iterator:
            rows = batch.to_pylist()
            if rows:
                ranges = [
                    Range(row["epoch"], row["first"], row["last"], row["origin"], row["lock_us"])
                    for row in rows
                ]
                task = rows[0]  # all rows are of one task
                trials = {name: Trial(*trial) for name, trial in task["on_trial"]}
                carried += carrier.carry(task["queue"], ranges, task["skipped"], trials)
        ClientLedger.write_all()  # Spark kills its workers without notice
        return CarriedMessage(carried, carrier.transfers.take())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Settle the messages that a batch brought home; runs on the driver."""
        reports = [message for message in messages if isinstance(message, CarriedMessage)]
        self._write_transfers(reports)
        outcomes = [carried for message in reports for carried in message.carried]
        for carried in outcomes:
            if not carried.is_settled:
                self._settle(carried)
        Desk(self._options.folder).put_outcome(batchId, outcomes)

    def _write_transfers(self, reports: list[CarriedMessage]) -> None:
        """Write the ledger rows in the workers' reports, before anything is settled."""
        transfers = self._options.transfers_on_driver()
        for message in reports:
            transfers.add(message.transfers)
        write_transfers(transfers)

    def _settle(self, carried: Carried) -> None:
        """Settle a range; if that fails, a later batch carries it again.

        The primary recognises the messages that it has already accepted.
        """
        release = not carried.kept and carried.unread is None
        try:
            for command in settlements(carried, release=release):
                self._ask(command)
        except StaleEpochError:
            pass  # another syphon has leased the range, and carries it again
        except MessagingError as error:
            carried.unread = failure_of(error)

    def _ask(self, command: SettleRange) -> None:
        namespace_of(self._options.secondary).ask(command, SETTLE_TIMEOUT_S)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: Spark repeats the batch."""
