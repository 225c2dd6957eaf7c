"""The syphon's query, from Spark's side: ranges of backlog queues in, what became of them out.

    who calls            where                      what
    planner process      driver, one per query      initialOffset, latestOffset, reportLatestOffset,
                                                    partitions, stop
    reader task          executors                  read: hands the ranges of a task on as rows
    writer task          executors                  write: carries them home
    committer process    driver                     commit: settles, and tells the planner

Rows carry ranges, not messages: the bodies go from the secondary to the primary by way of the
writer's process alone. What the driver must remember is in the brokers (leases, and what was
taken), so a checkpoint of this query is of no value after it; an old one does no harm.

Where the secondary has no ranges, a row stands for a visit to a queue: its worker receives under
lock, sends and settles by itself (locked_carrier.py), and the committer only reports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
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
from twinbus.errors import MessagingError, StaleEpochError
from twinbus.limits import BATCH_PATIENCE_S, SETTLE_TIMEOUT_S
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import SettleRange
from twinbus.spark.connections import namespace_of
from twinbus.syphon.book import Task
from twinbus.syphon.carrier import Carried, Carrier, Range, failure_of, write_transfers
from twinbus.syphon.desk import Desk
from twinbus.syphon.locked_carrier import LockedCarrier
from twinbus.syphon.locked_planner import LockedPlanner
from twinbus.syphon.planner import Planner, PlannerSettings
from twinbus.syphon.settling import settlements
from twinbus.syphon.transfers import TransferLedger, transfers_of

SYPHON_FORMAT = "twinbus_syphon"
_RANGES = pa.schema(
    [
        ("queue", pa.string()),
        ("epoch", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("held_back", pa.list_(pa.string())),
        ("origin", pa.string()),
        ("on_trial", pa.map_(pa.string(), pa.int64())),
    ]
)
_FOLDERS = ("ledger", "spool")
REPORTED = ("moved", "dead_lettered", "waiting", "oldest_age_s", "rate", "sends", "batches")
RANGES_DDL = (
    "queue string, epoch bigint, first bigint, last bigint, held_back array<string>, "
    "origin string, on_trial map<string, bigint>"
)


@dataclass(frozen=True, slots=True)
class SyphonOptions:
    """The options of the query, as text and back."""

    primary: str = field(repr=False)  # connection strings
    secondary: str = field(repr=False)
    folder: Path  # of the desk
    settings: PlannerSettings
    ledger: Path | None = None  # reached by all workers
    spool: Path | None = None  # of the driver: lines come there with commits

    def to_options(self) -> dict[str, str]:
        """Return them as Spark carries options."""
        settings = self.settings
        return {
            "primary": self.primary,
            "secondary": self.secondary,
            "folder": str(self.folder),
            "ledger": str(self.ledger or ""),
            "spool": str(self.spool or ""),
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
        return cls(options["primary"], options["secondary"], folder, settings, ledger, spool)

    def carrier(self, *, on_driver: bool = False) -> Carrier:
        """Return what carries between the two, in whichever process."""
        primary, secondary = namespace_of(self.primary), namespace_of(self.secondary)
        transfers = self.transfers_on_driver() if on_driver else self._transfers_on_worker()
        return Carrier(primary, secondary, transfers, self.settings.extra_queues)

    def task_carrier(self) -> Carrier | LockedCarrier:
        """Return what carries out a task: by ranges where the secondary has them, or by locks."""
        secondary = namespace_of(self.secondary)
        if Capability.RANGES in secondary.capabilities:
            return self.carrier()
        return LockedCarrier(self.carrier(), secondary, self.settings.range_messages)

    def planner(self) -> Planner | LockedPlanner:
        """Return what plans the tasks, in the planner's process."""
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


class SyphonDataSource(DataSource):
    """Reads ranges of backlog queues, and writes by carrying them home."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return SYPHON_FORMAT

    def schema(self) -> str:
        """Return the columns of a range."""
        return RANGES_DDL

    def streamReader(self, schema: StructType) -> "RangeReader":
        """Return what plans and hands out ranges."""
        return RangeReader(SyphonOptions.of(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "RangeWriter":
        """Return what carries them."""
        return RangeWriter(SyphonOptions.of(self.options))


@dataclass
class TaskPartition(InputPartition):
    """A task on its way to a worker."""

    task: Task


class RangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The planner, as Spark calls it."""

    def __init__(self, options: SyphonOptions) -> None:
        self._options = options
        self._planner: Planner | LockedPlanner | None = (
            None  # in the planner's process only: it has threads
        )
        self._once = False

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch."""
        return {"batch": 0, "tasks": []}

    def prepareForTriggerAvailableNow(self) -> None:
        """End when nothing is left that can be moved."""
        self._once = True

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return that a batch takes what the planner gives it."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next batch; called when the last one is settled."""
        if self._planner is None:
            self._planner = self._options.planner()
        tasks = self._planner.next_tasks(BATCH_PATIENCE_S, once=self._once)
        if not tasks:
            return start
        return {"batch": start["batch"] + 1, "tasks": [task.to_json() for task in tasks]}

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the progress in messages: the rows that Spark counts are ranges.

        Spark shows it as `latestOffset` of the source, as of the planning of its batch.
        """
        told = Desk(self._options.folder).progress()[0]
        moved_bytes = sum(one.moved_bytes for one in told.destinations)
        figures = {name: getattr(told, name) for name in REPORTED}
        return {**figures, "moved_bytes": moved_bytes}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a batch; of an old one after a restart, whose leases are over."""
        return [TaskPartition(Task.from_json(value)) for value in end["tasks"]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Hand the ranges of a task on."""
        assert isinstance(partition, TaskPartition)
        task = partition.task
        rows = [
            {
                "queue": task.queue,
                "epoch": one.epoch,
                "first": one.first,
                "last": one.last,
                "held_back": list(task.held_back),
                "origin": one.origin,
                "on_trial": list(task.on_trial.items()),
            }
            for one in task.ranges
        ]
        yield pa.RecordBatch.from_pylist(rows, _RANGES)

    def stop(self) -> None:
        """Give the leases back."""
        if self._planner is not None:
            self._planner.close()


def is_repeated_task() -> bool:
    """Whether Spark runs this task again, because its worker was killed or failed."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


@dataclass
class CarriedMessage(WriterCommitMessage):
    """What a writer tells the committer."""

    carried: list[Carried]
    transfers: bytes = b""  # lines for the ledger, where workers cannot write it


class RangeWriter(DataSourceStreamArrowWriter):
    """Carries ranges, and settles them when all of a batch are done."""

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
                    Range(row["epoch"], row["first"], row["last"], row["origin"]) for row in rows
                ]
                task = rows[0]  # all are of one
                carried += carrier.carry(
                    task["queue"], ranges, task["held_back"], dict(task["on_trial"])
                )
        return CarriedMessage(carried, carrier.transfers.take())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Settle what a batch brought home, on the driver."""
        told = [message for message in messages if isinstance(message, CarriedMessage)]
        self._write_transfers(told)
        outcomes = [carried for message in told for carried in message.carried]
        for carried in outcomes:
            if not carried.is_settled:
                self._settle(carried)
        Desk(self._options.folder).put_outcome(batchId, outcomes)

    def _write_transfers(self, told: list[CarriedMessage]) -> None:
        """Write the lines that came with the messages of workers, before anything is settled."""
        transfers = self._options.transfers_on_driver()
        for message in told:
            transfers.add(message.transfers)
        write_transfers(transfers)

    def _settle(self, carried: Carried) -> None:
        """Settle a range; what cannot be settled now is carried again, and recognised."""
        release = not carried.kept and carried.unread is None
        try:
            for command in settlements(carried, release=release):
                self._ask(command)
        except StaleEpochError:
            pass  # whoever has it now carries it again
        except MessagingError as error:
            carried.unread = failure_of(error)

    def _ask(self, command: SettleRange) -> None:
        namespace_of(self._options.secondary).ask(command, SETTLE_TIMEOUT_S)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Leave everything as it is: the batch is carried again."""
