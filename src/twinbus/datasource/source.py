"""Reads messages with Spark: the data source `twinbus`.

    register(spark)
    spark.readStream.format("twinbus").option("connection", ...).option("queue", "orders").load()

A stream leases ranges and can read them any number of times with the same result. It completes a
range when Spark reports that its batch is committed, which Spark does by asking for the next batch.
So each message is in a batch at least once. `spark.read` browses messages and changes nothing.

    who calls            where                      what
    planner process      driver, one per query      initialOffset, latestOffset, reportLatestOffset,
                                                    partitions, commit, stop
    reader task          executors                  read
"""

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from twinbus.client.courier import Courier
from twinbus.datasource.bounds import Bounds
from twinbus.datasource.columns import read_ddl, to_spark
from twinbus.datasource.keeper import LeaseKeeper
from twinbus.datasource.offsets import Pairs, StreamOffset, count_of, shares
from twinbus.datasource.options import SourceOptions
from twinbus.datasource.sink import MessageStreamWriter, MessageWriter
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessagingError
from twinbus.intervals import Intervals
from twinbus.limits import BATCH_PATIENCE_S, MAX_RECEIVE_MESSAGES, STREAM_PARTITIONS
from twinbus.namespace.metered import ClientLedger
from twinbus.protocol.commands import Peek, RangeLease, ReadRange
from twinbus.spark.termination import exit_on_terminate, ignore_terminate

FORMAT = "twinbus"
_log = logging.getLogger("twinbus.source")


class TwinbusDataSource(DataSource):
    """Queues, subscriptions, dead-letter queues and topics as tables and streams."""

    parallelism = STREAM_PARTITIONS  # least tasks of a read; `register` sets it for its cluster

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of a message."""
        return read_ddl(self._given().columns)

    def reader(self, schema: StructType) -> "BrowsingReader":
        """Return the reader that browses an entity."""
        options = self._readable()
        return (FilteringReader if options.push_filters else BrowsingReader)(options)

    def streamReader(self, schema: StructType) -> "LeasingReader":
        """Return the reader that consumes an entity as a stream."""
        return LeasingReader(self._readable())

    def writer(self, schema: StructType, overwrite: bool) -> MessageWriter:
        """Return the writer of a DataFrame's rows."""
        return MessageWriter(self._given(), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> MessageStreamWriter:
        """Return the writer of a stream's rows."""
        return MessageStreamWriter(self._given(), schema)

    def _given(self) -> SourceOptions:
        return SourceOptions.of(self.options, self.parallelism)

    def _readable(self) -> SourceOptions:
        options = self._given()
        if not options.is_readable:
            raise InvalidArgumentError(
                f"{options.path} is a topic, which has no messages of its own; set the option "
                "subscription as well"
            )
        return options


def register(session: SparkSession) -> None:
    """Register `twinbus` with a session, adapted to the size of its cluster.

    The processes that plan a read have no session, so the class has the size that they need.
    """
    if not hasattr(session, "_jvm"):
        raise InvalidOperationError(
            "this is a session of Spark Connect, whose driver is in another process. Run the "
            "program with spark-submit or a master URL, or register TwinbusDataSource in a server "
            "that has Twinbus installed"
        )
    facts = {"parallelism": max(session.sparkContext.defaultParallelism, 1)}
    session.dataSource.register(type("SessionDataSource", (TwinbusDataSource,), facts))


@dataclass
class NumberPartition(InputPartition):
    """Messages that a task reads."""

    intervals: Pairs
    epoch: int = 0  # of the lease, if there is one

    @property
    def first(self) -> int:
        """The first sequence number."""
        return self.intervals[0][0]

    @property
    def last(self) -> int:
        """The last sequence number."""
        return self.intervals[-1][1]

    def inside(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of a batch that belong to the partition."""
        numbers = batch.column("sequence_number").to_numpy()
        return batch.filter(pa.array(Intervals(self.intervals).contains(numbers)))


# -- a snapshot ------------------------------------------------------------------------------------


class BrowsingReader(DataSourceReader):
    """Browses the messages that are in an entity when the read begins."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        """Find the first and the last message, and divide the range between them."""
        courier, path, bounds = self._options.courier(), self._options.path, self._bounds
        first = _number_from(courier, path, bounds.first) if bounds.first <= bounds.last else None
        if first is None or first > bounds.last:
            return [NumberPartition(((0, -1),))]
        last, step = first, 1
        while (further := _number_from(courier, path, last + step)) is not None:
            last, step = further, step * 2
        while step:
            further = _number_from(courier, path, last + step)
            if further is None:
                step //= 2
            else:
                last = further
        last = min(last, bounds.last)
        tasks = self._options.tasks_for(last - first + 1)
        return [NumberPartition(part) for part in shares(((first, last),), tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Browse a partition, page by page."""
        assert isinstance(partition, NumberPartition)
        courier, at = self._options.courier(), partition.first
        while at <= partition.last:
            page = courier.ask(Peek(self._options.path, at, MAX_RECEIVE_MESSAGES))
            if not page.num_rows:
                break
            at = int(page.column("sequence_number")[-1].as_py()) + 1
            page = self._bounds.inside(partition.inside(page))
            if page.num_rows:
                yield to_spark(page, self._options.columns)
        ClientLedger.write_all()  # Spark kills its workers without notice


class FilteringReader(BrowsingReader):
    """Browses only messages that can match the conditions of a query.

    Spark 4.3 keeps the result of `pushFilters` with the DataFrame that was loaded. Another query of
    this DataFrame, or another part of the query, then gets only the messages of these conditions.
    So a DataFrame has this reader only if its option `pushFilters` asks for it.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use conditions as bounds; Spark evaluates all of them as well."""
        self._bounds = Bounds.of(filters)
        return filters


def _number_from(courier: Courier, path: str, number: int) -> int | None:
    """Return the first sequence number that is at least this one."""
    page = courier.ask(Peek(path, number, 1))
    return int(page.column("sequence_number")[0].as_py()) if page.num_rows else None


# -- a stream --------------------------------------------------------------------------------------


class LeasingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Leases ranges, and completes them when their batch is committed."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._keeper: LeaseKeeper | None = (
            None  # only in the process of the planner: it has a thread
        )
        self._left: int | None = None  # rows that an AvailableNow query may still read
        self._limits = (options.max_rows, options.max_bytes)  # of a batch
        self._report: dict[str, Any] | None = None  # how far behind the stream is
        self._is_bounded = False

    def _started_keeper(self) -> LeaseKeeper:
        if self._keeper is None:
            exit_on_terminate()  # so that Spark calls `stop`
            self._keeper = LeaseKeeper(self._options)
        return self._keeper

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch."""
        return StreamOffset(batch=0, owner=f"spark {secrets.token_hex(8)}").to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read only messages that exist at the beginning, then end."""
        self._is_bounded = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Complete the committed batch, and lease the next range."""
        try:
            return self._next_offset(start, limit)
        except MessagingError as error:
            if not error.is_transient or self._is_bounded:
                raise
            _log.warning("%s cannot be read; the stream tries again: %s", self._options.path, error)
            time.sleep(BATCH_PATIENCE_S)
            return start

    def _next_offset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        keeper, begin = self._started_keeper(), StreamOffset.of(start)
        keeper.complete(begin)
        rows, size = self._options.max_rows, self._options.max_bytes
        if isinstance(limit, ReadMaxRows):
            rows = min(rows, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            size = min(size, limit.max_bytes)
        if self._left is not None:
            rows = min(rows, self._left)
        self._limits = (rows, size)
        wait = not self._is_bounded
        lease = keeper.lease(begin.owner, rows, size, wait=wait) if rows else None
        self._report = _report_of(lease)
        if lease is None:
            return start
        if self._is_bounded:
            leased = lease.message_count
            self._left = lease.left_behind if self._left is None else self._left - leased
        tasks = self._options.tasks_for(lease.message_count)
        return begin.next(lease, self._options.path, tasks).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return how far behind the stream is; Spark shows it as the source's `latestOffset`."""
        return self._report

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the partitions of a batch; if its lease has expired, lease its range again."""
        batch = StreamOffset.of(end)
        if not batch.intervals:  # without messages, Spark begins with an empty batch
            return []
        epoch = self._started_keeper().lease_of(batch)
        if not epoch:  # its messages were completed before
            return []
        if not self._is_bounded:  # lease the next range while this batch runs
            self._started_keeper().ask(batch.owner, *self._limits)
        tasks = batch.partitions or self._options.tasks_for(count_of(batch.intervals))
        return [NumberPartition(part, epoch) for part in shares(batch.intervals, tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, piece by piece."""
        assert isinstance(partition, NumberPartition)
        courier, at = self._options.courier(), partition.first
        while at <= partition.last:
            command = ReadRange(self._options.path, partition.epoch, at, partition.last)
            piece = courier.ask(command)
            if not piece.num_rows:
                return
            at = int(piece.column("sequence_number")[-1].as_py()) + 1
            piece = partition.inside(piece)
            if piece.num_rows:
                yield to_spark(piece, self._options.columns)

    def commit(self, end: dict[str, Any]) -> None:
        """Complete the messages of a committed batch."""
        self._started_keeper().complete(StreamOffset.of(end))

    def stop(self) -> None:
        """Release what was leased ahead, so that others can read it."""
        ignore_terminate()
        if self._keeper is not None:
            self._keeper.close()


def _report_of(lease: RangeLease | None) -> dict[str, Any]:
    """Return how far behind a stream is with this range; None: nothing waits for the stream."""
    messages, waiting = (0, 0) if lease is None else (lease.message_count, lease.left_behind)
    oldest = None if lease is None else lease.oldest_utc
    return {
        "messages": messages,
        "bytes": 0 if lease is None else lease.size_in_bytes,
        "waiting": waiting,
        "lag": messages + waiting,
        "oldest_age_s": None if oldest is None else (datetime.now(UTC) - oldest).total_seconds(),
    }
