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

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
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

from twinbus.datasource.bounds import Bounds
from twinbus.datasource.columns import read_ddl, to_spark
from twinbus.datasource.options import SourceOptions
from twinbus.datasource.sink import MessageStreamWriter, MessageWriter
from twinbus.errors import (
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    RangeUnavailableError,
    StaleEpochError,
)
from twinbus.limits import (
    BATCH_PATIENCE_S,
    MAX_LEASE_MESSAGES,
    MAX_RECEIVE_MESSAGES,
    OPERATION_TIMEOUT,
    POLL_GATHER_S,
    POLL_GRACE_S,
    STREAM_PARTITIONS,
    SYPHON_POLL,
)
from twinbus.namespace.contract import Namespace
from twinbus.namespace.metered import ClientLedger
from twinbus.protocol.commands import (
    NO_WAIT,
    LeaseRange,
    Peek,
    RangeLease,
    ReadRange,
    ReleaseRange,
    RenewRange,
    SettleRange,
)
from twinbus.spark.termination import exit_on_terminate, ignore_terminate

FORMAT = "twinbus"
_log = logging.getLogger("twinbus.source")
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_Poll = Future[RangeLease | None]
_TIMEOUT_S = OPERATION_TIMEOUT.total_seconds()


class TwinbusDataSource(DataSource):
    """Queues, subscriptions, dead-letter queues and topics as tables and streams."""

    parallelism = STREAM_PARTITIONS  # tasks of a read; `register` sets that of the cluster
    takes_filters = False  # must equal a setting of the session, or Spark refuses the reader

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of a message."""
        return read_ddl(self._given().columns)

    def reader(self, schema: StructType) -> "BrowsingReader":
        """Return the reader that browses an entity."""
        return (FilteringReader if self.takes_filters else BrowsingReader)(self._readable())

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
    """Register `twinbus` with a session, adapted to its cluster and its settings.

    The processes that plan a read have no session, so what they need of it is in the class. Call
    this again after a change of `spark.sql.python.filterPushdown.enabled`.
    """
    if not hasattr(session, "_jvm"):
        raise InvalidOperationError(
            "this is a session of Spark Connect, whose driver is in another process. Run the "
            "program with spark-submit or a master URL, or register TwinbusDataSource in a server "
            "that has Twinbus installed"
        )
    facts = {
        "parallelism": max(session.sparkContext.defaultParallelism, 1),
        "takes_filters": session.conf.get(_PUSHDOWN, "false") == "true",
    }
    session.dataSource.register(type("SessionDataSource", (TwinbusDataSource,), facts))


@dataclass
class NumberPartition(InputPartition):
    """Messages from one sequence number to another, both included."""

    first: int
    last: int
    epoch: int = 0  # of the lease, if there is one


def _split(first: int, last: int, parts: int, epoch: int = 0) -> list[NumberPartition]:
    """Split a range into parts of about the same length."""
    parts = min(parts, last - first + 1)
    bounds = [first + (last + 1 - first) * part // parts for part in range(parts + 1)]
    return [NumberPartition(low, high - 1, epoch) for low, high in itertools.pairwise(bounds)]


# -- a snapshot ------------------------------------------------------------------------------------


class BrowsingReader(DataSourceReader):
    """Browses the messages that are in an entity when the read begins."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        """Find the first and the last message, and divide the range between them."""
        namespace, path = self._options.namespace(), self._options.path
        bounds = self._bounds
        first = _number_from(namespace, path, bounds.first) if bounds.first <= bounds.last else None
        if first is None or first > bounds.last:
            return [NumberPartition(0, -1)]
        last, step = first, 1
        while (further := _number_from(namespace, path, last + step)) is not None:
            last, step = further, step * 2
        while step:
            further = _number_from(namespace, path, last + step)
            if further is None:
                step //= 2
            else:
                last = further
        return list(_split(first, min(last, bounds.last), self._options.partitions))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Browse a partition, page by page."""
        assert isinstance(partition, NumberPartition)
        namespace, at = self._options.namespace(), partition.first
        while at <= partition.last:
            page = namespace.ask(Peek(self._options.path, at, MAX_RECEIVE_MESSAGES), _TIMEOUT_S)
            if not page.num_rows:
                break
            at = int(page.column("sequence_number")[-1].as_py()) + 1
            if at > partition.last + 1:
                inside = pc.less_equal(page.column("sequence_number"), partition.last)
                page = page.filter(inside)
            page = self._bounds.inside(page)
            if page.num_rows:
                yield to_spark(page, self._options.columns)
        ClientLedger.write_all()  # Spark kills its workers without notice


class FilteringReader(BrowsingReader):
    """Reads only messages that the conditions of a query can need."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use conditions as bounds; Spark evaluates all of them as well."""
        self._bounds = Bounds.of(filters)
        return filters


def _number_from(namespace: Namespace, path: str, number: int) -> int | None:
    """Return the first sequence number that is at least this one."""
    page = namespace.ask(Peek(path, number, 1), _TIMEOUT_S)
    return int(page.column("sequence_number")[0].as_py()) if page.num_rows else None


# -- a stream --------------------------------------------------------------------------------------


class LeasingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Leases ranges, and completes them when their batch is committed.

    An offset has the range of its batch: {"batch", "first", "last", "count", "epoch", "owner"}.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._keeper: _Keeper | None = None  # only in the planner's process, because of its thread
        self._left: int | None = None  # rows that an AvailableNow query may still read
        self._limits = (options.max_rows, options.max_bytes)  # of a batch
        self._report: dict[str, Any] | None = None  # of the last range: its messages, the waiting
        self._is_bounded = False

    def _kept(self) -> "_Keeper":
        if self._keeper is None:
            exit_on_terminate()  # so that Spark calls `stop`
            self._keeper = _Keeper(self._options)
        return self._keeper

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch."""
        return {"batch": 0, "owner": f"spark {secrets.token_hex(8)}"}

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
            _log.warning("%s cannot be read and is tried again: %s", self._options.path, error)
            time.sleep(BATCH_PATIENCE_S)
            return start

    def _next_offset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        keeper = self._kept()
        keeper.complete(start)
        rows, size = self._options.max_rows, self._options.max_bytes
        if isinstance(limit, ReadMaxRows):
            rows = min(rows, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            size = min(size, limit.max_bytes)
        if self._left is not None:
            rows = min(rows, self._left)
        if not rows:
            return start
        self._limits = (rows, size)
        lease = keeper.lease(start["owner"], rows, size, wait=not self._is_bounded)
        if lease is None:
            return start
        oldest = lease.oldest_utc
        self._report = {
            "messages": lease.message_count,
            "waiting": lease.left_behind,
            "oldest_age_s": None if oldest is None else _age_s(oldest),
        }
        if self._is_bounded:
            here = lease.message_count
            self._left = lease.left_behind if self._left is None else self._left - here
        return {
            "batch": start["batch"] + 1,
            "first": lease.first,
            "last": lease.last,
            "count": lease.message_count,
            "epoch": lease.epoch,
            "owner": lease.owner,
        }

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return how far behind the stream is; Spark shows it as the source's `latestOffset`."""
        return self._report

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the partitions of a batch; lease its range again if this is after a restart."""
        if "first" not in end:  # without messages, Spark begins with an empty batch
            return []
        epoch = self._kept().hold(end)
        if not epoch:  # its messages were completed before
            return []
        if not self._is_bounded:  # lease the next range while this batch runs
            self._kept().ask(end["owner"], *self._limits)
        return list(_split(end["first"], end["last"], self._options.partitions, epoch))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition, piece by piece."""
        assert isinstance(partition, NumberPartition)
        namespace, at = self._options.namespace(), partition.first
        while at <= partition.last:
            command = ReadRange(self._options.path, partition.epoch, at, partition.last)
            piece = namespace.ask(command, _TIMEOUT_S)
            if not piece.num_rows:
                return
            at = int(piece.column("sequence_number")[-1].as_py()) + 1
            yield to_spark(piece, self._options.columns)

    def commit(self, end: dict[str, Any]) -> None:
        """Complete the messages of a committed batch."""
        self._kept().complete(end)

    def stop(self) -> None:
        """Release the leases, so that others can read what is not completed."""
        ignore_terminate()
        if self._keeper is not None:
            self._keeper.close()


def _age_s(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


class _Keeper:
    """Keeps the leases of batches alive."""

    def __init__(self, options: SourceOptions) -> None:
        self._namespace = options.namespace()
        self._courier = options.courier()
        self._path = options.path
        self._duration = options.lease
        self._lock = threading.Lock()
        self._poll: _Poll | None = None
        self._fresh: int | None = None  # the epoch of a lease without a batch
        self._epochs: dict[int, int] = {}  # by batch: the epoch of its lease
        self._completed = 0  # the last completed batch
        self._is_closed = threading.Event()
        threading.Thread(target=self._renew, name="twinbus-source-lease", daemon=True).start()

    def ask(self, owner: str, rows: int, size: int, *, wait: bool = True) -> "_Poll":
        """Request the next range, unless a request is pending."""
        with self._lock:
            if self._poll is None:
                command = LeaseRange(
                    self._path,
                    owner,
                    rows,
                    duration=self._duration,
                    wait=SYPHON_POLL if wait else NO_WAIT,
                    max_bytes=size,
                )
                self._poll = self._namespace.submit(command)
            return self._poll

    def lease(self, owner: str, rows: int, size: int, *, wait: bool) -> RangeLease | None:
        """Return a lease, or None if there is none yet; the request then stays pending.

        Spark asks the sources of a union one after the other: an idle source must not block the
        others.
        """
        poll = self.ask(owner, rows, size, wait=wait)
        try:
            lease = poll.result(POLL_GATHER_S if wait else _TIMEOUT_S)
        except MessagingError:
            self._poll = None
            raise
        except TimeoutError:
            return None
        with self._lock:
            self._poll = None
            if lease is not None:
                self._fresh = lease.epoch  # until its batch begins
        return lease

    def hold(self, end: dict[str, Any]) -> int:
        """Return the lease of a batch; if it has expired, lease the range again."""
        batch = end["batch"]
        self._fresh = None
        try:
            self._ask(RenewRange(self._path, end["epoch"], self._duration))
            self._epochs[batch] = end["epoch"]
        except StaleEpochError:
            patience_s = 2 * self._duration.total_seconds()
            self._epochs[batch] = self._lease_again(end, patience_s)
        return self._epochs[batch]

    def _lease_again(self, end: dict[str, Any], patience_s: float) -> int:
        """Return a new lease of a batch's range; 0 if all of its messages are completed."""
        first, last = end["first"], end["last"]
        count = min(last - first + 1, MAX_LEASE_MESSAGES)
        command = LeaseRange(self._path, end["owner"], count, first, last, duration=self._duration)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                lease = self._ask(command)
            except RangeUnavailableError:  # another reader has leased a part of it for now
                if time.monotonic() > deadline:
                    raise
                time.sleep(BATCH_PATIENCE_S)
            else:
                return lease.epoch if lease is not None else 0

    def complete(self, offset: dict[str, Any]) -> None:
        """Complete the messages of a batch, once.

        If its lease has expired, others may have leased them: then they are delivered again. But if
        the range contains only this batch and nobody has leased it, it is completed anyway.
        """
        batch = offset["batch"]
        if batch <= self._completed:
            return
        done = [(offset["first"], offset["last"])]
        epoch = self._epochs.get(batch, offset["epoch"])
        is_dense = offset["count"] == offset["last"] - offset["first"] + 1
        try:
            self._ask(SettleRange(self._path, epoch, done, release=True))
        except StaleEpochError:
            with suppress(RangeUnavailableError, StaleEpochError):
                again = self._lease_again(offset, patience_s=0) if is_dense else 0
                if again:
                    self._ask(SettleRange(self._path, again, done, release=True))
        self._epochs.pop(batch, None)
        self._completed = batch

    def _ask(self, command: Any) -> Any:
        return self._courier.ask(command)

    def _leases(self) -> list[int]:
        """Return all leases: of batches, and of the pending request."""
        with self._lock:
            epochs = {*self._epochs.values()} | ({self._fresh} if self._fresh else set())
            if self._poll is not None and self._poll.done() and not self._poll.exception():
                granted = self._poll.result()
                epochs |= {granted.epoch} if granted is not None else set()
        return sorted(epochs - {0})

    def _renew(self) -> None:
        pause_s = self._duration.total_seconds() / 3
        while not self._is_closed.wait(pause_s):
            for epoch in self._leases():
                with suppress(MessagingError):
                    self._ask(RenewRange(self._path, epoch, self._duration))

    def close(self) -> None:
        """Release the leases; the end of the process withdraws the pending request."""
        self._is_closed.set()
        given_back = self._leases()
        self._release(given_back)
        if self._poll is not None:  # it may be granted what was given back just now
            wait([self._poll], POLL_GATHER_S)
            self._release([epoch for epoch in self._leases() if epoch not in given_back])

    def _release(self, epochs: list[int]) -> None:
        released = [self._namespace.submit(ReleaseRange(self._path, epoch)) for epoch in epochs]
        wait(released, POLL_GRACE_S)
