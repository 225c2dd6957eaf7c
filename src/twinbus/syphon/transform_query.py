"""The syphon's query with a transform: rows contain complete messages.

A transform is a function from DataFrame to DataFrame. It gets every message as it was sent, with
these additional columns. Rows with messages are slower than rows with ranges.

    destination        the entity it is sent to; may be changed
    backlog_queue, origin, epoch, sequence_number, sender, sender_number, accepted
                       must not be changed

A row may be changed or removed, but not multiplied. If a row was removed, the syphon dead-letters
its message in the backlog queue, so that no message disappears without a trace.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from twinbus.datasource.columns import MESSAGE_COLUMNS, MESSAGE_DDL, from_spark, to_spark
from twinbus.errors import InvalidArgumentError, MessagingError
from twinbus.intervals import Intervals, runs
from twinbus.message import TIMESTAMP, sizes
from twinbus.namespace.metered import ClientLedger
from twinbus.pairing.backlog import Restored, restored
from twinbus.syphon.book import Task
from twinbus.syphon.carrier import Carried, Carrier, Range, Trials, canonical, failure_of
from twinbus.syphon.desk import Desk
from twinbus.syphon.settling import settlements
from twinbus.syphon.syphon_query import (
    OBSERVED,
    CarriedMessage,
    RangeReader,
    RangeWriter,
    SyphonDataSource,
    SyphonOptions,
    TaskPartition,
    age_s,
)
from twinbus.syphon.transfers import Passed

TRANSFORM_FORMAT = "twinbus_syphon_rows"
LEFT_OUT = "the transform removed the row of the message"
_PLACE = pa.schema(
    [
        ("destination", pa.string()),
        ("backlog_queue", pa.string()),
        ("origin", pa.string()),
        ("epoch", pa.int64()),
        ("sequence_number", pa.int64()),
        ("sender", pa.string()),
        ("sender_number", pa.int64()),
        ("accepted", TIMESTAMP),
    ]
)
_DDL = (
    f"{MESSAGE_DDL}, destination string, backlog_queue string, origin string, epoch bigint, "
    "sequence_number bigint, sender string, sender_number bigint, accepted timestamp"
)

Transform = Callable[[DataFrame], DataFrame]


def load_transform(name: str) -> Transform:
    """Return the function with the name `module:function`; the current folder is searched, too."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise InvalidArgumentError(f"transform is {name!r}; it must be module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        imported = import_module(module)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(
            f"transform {name!r} cannot be imported: {error}. Put its module where Python finds it"
        ) from error
    found = getattr(imported, function, None)
    if found is None:
        raise InvalidArgumentError(
            f"transform {name!r}: the module {module} has no function {function}. Correct the name"
        )
    if not callable(found):
        raise InvalidArgumentError(
            f"transform {name!r} is a {type(found).__name__}; it must be a function that takes a "
            "DataFrame and returns one"
        )
    transform: Transform = found
    return transform


class TransformDataSource(SyphonDataSource):
    """Reads the messages of ranges; its writer sends them home."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return TRANSFORM_FORMAT

    def schema(self) -> str:
        """Return the columns of the rows that a transform gets and returns."""
        return _DDL

    @classmethod
    def observed(cls, rows: DataFrame) -> DataFrame:
        """Add metrics of the messages to the batches, as they are before the transform."""
        return rows.observe(
            OBSERVED,
            f.count("*").alias("messages"),
            f.sum(f.octet_length("body")).alias("bytes"),
            age_s("accepted").alias("oldest_age_s"),
        )

    def streamReader(self, schema: StructType) -> "RowReader":
        """Return the reader, which plans ranges and reads their messages."""
        return RowReader(SyphonOptions.of(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> "RowWriter":
        """Return the writer, which sends messages home."""
        missing = sorted(set(_PLACE.names) - set(schema.names))
        if missing:
            raise InvalidArgumentError(
                f"the transform dropped {', '.join(missing)}, so the syphon cannot identify the "
                "message of a row. Keep all columns of the input, for example with df.withColumn"
            )
        return RowWriter(SyphonOptions.of(self.options))


class RowReader(RangeReader):
    """Like RangeReader, but its tasks read the messages."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task, except poison and those of skipped destinations."""
        assert isinstance(partition, TaskPartition)
        task = partition.task
        carrier = self._options.carrier()
        for leased in task.ranges:
            passed = Trials.of(task.on_trial, leased.epoch).passed
            for batch in carrier.pieces(task.queue, leased):
                rows = _rows(batch, task.queue, leased, {*task.skipped, *passed})
                if rows.num_rows:
                    yield rows


def _rows(batch: pa.RecordBatch, queue: str, leased: Range, blocked: set[str]) -> pa.RecordBatch:
    found = restored(batch)
    count = batch.num_rows
    place = pa.RecordBatch.from_arrays(
        [
            found.paths,
            pa.repeat(pa.scalar(queue, pa.string()), count),
            pa.repeat(pa.scalar(leased.origin, pa.string()), count),
            pa.array(np.full(count, leased.epoch, np.int64)),
            batch.column("sequence_number"),
            found.senders,
            found.numbers,
            batch.column("enqueued_time_utc"),
        ],
        schema=_PLACE,
    )
    messages = to_spark(found.batch, MESSAGE_COLUMNS)
    rows = pa.RecordBatch.from_arrays(
        [*messages.columns, *place.columns], schema=pa.schema([*messages.schema, *_PLACE])
    )
    skipped = pa.array(sorted(blocked), pa.string())
    can_go = pc.invert(pc.is_in(pc.utf8_lower(found.paths), value_set=skipped))
    mask = can_go.to_numpy(zero_copy_only=False).astype(bool)
    mask[list(found.faults)] = False
    return rows if mask.all() else rows.filter(pa.array(mask))


class RowWriter(RangeWriter):
    """Sends rows to their destinations, and accounts for every message of a batch."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> CarriedMessage:
        """Send rows home; runs in a worker."""
        carrier = self._options.carrier()
        carried: dict[tuple[str, int], Carried] = {}
        blocked: dict[str, set[str]] = {}
        for batch in iterator:
            for queue, epoch in _places(batch):
                rows = batch.filter(_is_at(batch, queue, epoch)).sort_by("sequence_number")
                origin = rows.column("origin")[0].as_py()
                outcome = carried.setdefault(
                    (queue, epoch), Carried(queue, Range(epoch, 0, 0, origin))
                )
                self._deliver(carrier, rows, outcome, blocked.setdefault(queue, set()))
        carrier.write_transfers()
        ClientLedger.write_all()  # Spark kills its workers without notice
        return CarriedMessage(list(carried.values()), carrier.transfers.take())

    def _deliver(
        self, carrier: Carrier, rows: pa.RecordBatch, carried: Carried, blocked: set[str]
    ) -> None:
        numbers = rows.column("sequence_number").to_numpy()
        has_body = rows.column("body").is_valid()
        for number in numbers[~has_body.to_numpy(zero_copy_only=False)].tolist():
            carried.poison.append((number, "the transform set its body to null"))
        rows = rows.filter(has_body)
        numbers = rows.column("sequence_number").to_numpy()
        found = Restored(
            from_spark(rows),
            rows.column("destination"),
            rows.column("sender"),
            rows.column("sender_number"),
            {},
        )
        carrier.deliver(found, numbers, carried, blocked)
        ids, size = rows.column("message_id"), sizes(found.batch)
        passed = Passed(numbers, rows.column("accepted"), ids, found.paths, size)
        carrier.transfers.note(carried, passed)
        done = Intervals(carried.completed)
        done_with = done.contains(numbers) | np.isin(numbers, [at for at, _ in carried.poison])
        carried.kept_at += runs(numbers[~done_with])

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Settle delivered messages, and find out what happened to the others."""
        reported: dict[tuple[str, int], list[Carried]] = {}
        reports = [message for message in messages if isinstance(message, CarriedMessage)]
        self._write_transfers(reports)
        for message in reports:
            for carried in message.carried:
                reported.setdefault((carried.queue, carried.range.epoch), []).append(carried)
        desk = Desk(self._options.folder)
        outcomes = [
            self._account(task, leased, reported.get((task.queue, leased.epoch), []))
            for task in desk.take_tasks()
            for leased in task.ranges
        ]
        desk.put_outcome(batchId, outcomes)

    def _settle_part(self, carried: Carried, *, release: bool) -> None:
        for command in settlements(carried, release=release):
            self._ask(command)

    def _account(self, task: Task, leased: Range, outcomes: list[Carried]) -> Carried:
        """Settle a range, and classify the messages that are left."""
        carried = Carried(task.queue, leased)
        for outcome in outcomes:
            carried.merge(outcome)
        passed_over = {*task.skipped, *task.on_trial}
        try:
            self._settle_part(carried, release=False)
            carrier = self._options.carrier(on_driver=True)
            for piece in carrier.pieces(task.queue, leased):
                batch = carrier.own_rows(piece, carried)
                _classify(batch, carried, passed_over)
                carrier.transfers.note(carried, Passed.of(batch, restored(batch)))
            carrier.write_transfers()
            self._settle_part(carried, release=not carried.kept)
        except MessagingError as error:
            carried.unread = failure_of(error)
        return carried


def _places(batch: pa.RecordBatch) -> list[tuple[str, int]]:
    """Return the ranges to which the rows belong, as (queue, epoch)."""
    pairs = pa.table([batch.column("backlog_queue"), batch.column("epoch")], names=["q", "e"])
    unique = pairs.group_by(["q", "e"], use_threads=False).aggregate([])
    return list(zip(unique.column("q").to_pylist(), unique.column("e").to_pylist(), strict=True))


def _is_at(batch: pa.RecordBatch, queue: str, epoch: int) -> pa.Array:
    return pc.and_(
        pc.equal(batch.column("backlog_queue"), pa.scalar(queue, pa.string())),
        pc.equal(batch.column("epoch"), pa.scalar(epoch, pa.int64())),
    )


def _classify(batch: pa.RecordBatch, carried: Carried, passed_over: set[str]) -> None:
    """Record whether each message that is left stays or is dead-lettered."""
    found = restored(batch)
    numbers = batch.column("sequence_number").to_numpy()
    tried = Intervals(carried.kept_at).contains(numbers)
    places = zip(numbers.tolist(), found.paths.to_pylist(), tried.tolist(), strict=True)
    for row, (number, path, was_tried) in enumerate(places):
        if row in found.faults:
            carried.poison.append((number, found.faults[row]))
        elif was_tried:
            continue  # it stays with the others of its destination
        elif canonical(path) in passed_over:
            carried.note_kept(path, 1)
        else:
            carried.poison.append((number, LEFT_OUT))
