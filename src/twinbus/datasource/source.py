"""The `twinbus` data source of Spark: reading messages.

    spark.dataSource.register(TwinbusDataSource)
    spark.readStream.format("twinbus").option("connection", ...).option("queue", "orders").load()

A stream leases ranges and reads them as often as Spark wants, the same each time. They are
completed when Spark says that their batch is committed, which it does by asking for the next one;
so each message is in some batch at least once. `spark.read` browses what is there and changes
nothing.

    who calls            where                      what
    planner process      driver, one per query      initialOffset, latestOffset, partitions, commit
    reader task          executors                  read
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from twinbus.datasource.columns import BROKER_COLUMNS, MESSAGE_COLUMNS, READ_DDL, to_spark
from twinbus.datasource.options import SourceOptions
from twinbus.datasource.sink import MessageStreamWriter, MessageWriter
from twinbus.errors import (
    InvalidArgumentError,
    MessagingError,
    RangeUnavailableError,
    StaleEpochError,
)
from twinbus.limits import (
    BATCH_PATIENCE_S,
    MAX_LEASE_MESSAGES,
    MAX_RECEIVE_MESSAGES,
    OPERATION_TIMEOUT,
    SYPHON_POLL,
)
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import (
    NO_WAIT,
    LeaseRange,
    Peek,
    RangeLease,
    ReadRange,
    RenewRange,
    SettleRange,
)

FORMAT = "twinbus"
_log = logging.getLogger("twinbus.source")
_COLUMNS = (*MESSAGE_COLUMNS, *BROKER_COLUMNS)
_TIMEOUT_S = OPERATION_TIMEOUT.total_seconds()


class TwinbusDataSource(DataSource):
    """Queues, subscriptions, dead-letter queues and topics as tables and streams."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of a message."""
        return READ_DDL

    def reader(self, schema: StructType) -> "BrowsingReader":
        """Return what browses an entity."""
        return BrowsingReader(_readable(self.options))

    def streamReader(self, schema: StructType) -> "LeasingReader":
        """Return what consumes an entity."""
        return LeasingReader(_readable(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> MessageWriter:
        """Return what sends the rows of a DataFrame."""
        return MessageWriter(SourceOptions.of(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> MessageStreamWriter:
        """Return what sends the rows of a stream."""
        return MessageStreamWriter(SourceOptions.of(self.options), schema)


def _readable(given: Any) -> SourceOptions:
    options = SourceOptions.of(given)
    if not options.is_readable:
        raise InvalidArgumentError(
            f"{options.path} is a topic, which holds no messages; read one of its subscriptions: "
            "give the option subscription, too"
        )
    return options


@dataclass
class NumberPartition(InputPartition):
    """Messages from one sequence number to another, both included."""

    first: int
    last: int
    epoch: int = 0  # of the lease, where there is one


def _split(first: int, last: int, parts: int, epoch: int = 0) -> list[NumberPartition]:
    """Return a range in parts of about the same length."""
    parts = min(parts, last - first + 1)
    bounds = [first + (last + 1 - first) * part // parts for part in range(parts + 1)]
    return [NumberPartition(low, high - 1, epoch) for low, high in itertools.pairwise(bounds)]


# -- a snapshot ------------------------------------------------------------------------------------


class BrowsingReader(DataSourceReader):
    """Browses what an entity holds when the read begins."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Find the first and the last message, and share what is between them out."""
        namespace, path = self._options.namespace(), self._options.path
        first = _number_from(namespace, path, 0)
        if first is None:
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
        return list(_split(first, last, self._options.partitions))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Browse a part, page by page."""
        assert isinstance(partition, NumberPartition)
        namespace, at = self._options.namespace(), partition.first
        while at <= partition.last:
            page = namespace.ask(Peek(self._options.path, at, MAX_RECEIVE_MESSAGES), _TIMEOUT_S)
            if not page.num_rows:
                return
            at = int(page.column("sequence_number")[-1].as_py()) + 1
            if at > partition.last + 1:
                inside = pc.less_equal(page.column("sequence_number"), partition.last)
                page = page.filter(inside)
            if page.num_rows:
                yield to_spark(page, _COLUMNS)


def _number_from(namespace: Namespace, path: str, number: int) -> int | None:
    """Return the first sequence number that is not below this one."""
    page = namespace.ask(Peek(path, number, 1), _TIMEOUT_S)
    return int(page.column("sequence_number")[0].as_py()) if page.num_rows else None


# -- a stream --------------------------------------------------------------------------------------


class LeasingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Leases ranges, and completes them when their batch is committed.

    An offset names the range of its batch: {"batch", "first", "last", "count", "epoch", "owner"}.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._keeper: _Keeper | None = None  # in the planner's process only: it has a thread
        self._left: int | None = None  # rows that an AvailableNow query still takes
        self._is_bounded = False

    def _kept(self) -> "_Keeper":
        if self._keeper is None:
            self._keeper = _Keeper(self._options)
        return self._keeper

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch."""
        return {"batch": 0, "owner": f"spark {secrets.token_hex(8)}"}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much a batch takes."""
        return ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Take what is there at the beginning, and end."""
        self._is_bounded = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Complete what is committed, and lease the next range."""
        try:
            return self._next_offset(start, limit)
        except MessagingError as error:
            if not error.is_transient or self._is_bounded:
                raise
            _log.warning("%s cannot be read: %s; trying again", self._options.path, error)
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
        lease = keeper.lease(start["owner"], rows, size, wait=not self._is_bounded)
        if lease is None:
            return start
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

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the parts of a batch; one that is read again after a restart is leased again."""
        if "first" not in end:  # Spark begins with an empty batch when there is nothing
            return []
        epoch = self._kept().hold(end)
        if not epoch:  # nothing is left of it: it was completed before
            return []
        return list(_split(end["first"], end["last"], self._options.partitions, epoch))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a part, piece by piece."""
        assert isinstance(partition, NumberPartition)
        namespace, at = self._options.namespace(), partition.first
        while at <= partition.last:
            command = ReadRange(self._options.path, partition.epoch, at, partition.last)
            piece = namespace.ask(command, _TIMEOUT_S)
            if not piece.num_rows:
                return
            at = int(piece.column("sequence_number")[-1].as_py()) + 1
            yield to_spark(piece, _COLUMNS)

    def commit(self, end: dict[str, Any]) -> None:
        """Complete a batch that is committed."""
        self._kept().complete(end)

    def stop(self) -> None:
        """Stop renewing: what is not completed is others' when its lease lapses."""
        if self._keeper is not None:
            self._keeper.close()


class _Keeper:
    """Keeps the lease of the batch under way."""

    def __init__(self, options: SourceOptions) -> None:
        self._namespace = options.namespace()
        self._courier = options.courier()
        self._path = options.path
        self._duration = options.lease
        self._poll: Future[RangeLease | None] | None = None
        self._epochs: dict[int, int] = {}  # batch -> its lease
        self._completed = 0  # the last batch that is
        self._is_closed = threading.Event()
        threading.Thread(target=self._renew, name="twinbus-source-lease", daemon=True).start()

    def lease(self, owner: str, rows: int, size: int, *, wait: bool) -> RangeLease | None:
        """Return a lease, or None when nothing came for a while; the question stays asked."""
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
        try:
            lease = self._poll.result(BATCH_PATIENCE_S if wait else _TIMEOUT_S)
        except MessagingError:
            self._poll = None
            raise
        except TimeoutError:
            return None
        self._poll = None
        return lease

    def hold(self, end: dict[str, Any]) -> int:
        """Return the lease of a batch; one that is over is taken out again."""
        batch = end["batch"]
        try:
            self._ask(RenewRange(self._path, end["epoch"], self._duration))
            self._epochs[batch] = end["epoch"]
        except StaleEpochError:
            patience_s = 2 * self._duration.total_seconds()
            self._epochs[batch] = self._lease_again(end, patience_s)
        return self._epochs[batch]

    def _lease_again(self, end: dict[str, Any], patience_s: float) -> int:
        """Return a new lease of the range of a batch; 0: nothing is left of it."""
        first, last = end["first"], end["last"]
        count = min(last - first + 1, MAX_LEASE_MESSAGES)
        command = LeaseRange(self._path, end["owner"], count, first, last, duration=self._duration)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                lease = self._ask(command)
            except RangeUnavailableError:  # another reader has some of it, for a while
                if time.monotonic() > deadline:
                    raise
                time.sleep(BATCH_PATIENCE_S)
            else:
                return lease.epoch if lease is not None else 0

    def complete(self, offset: dict[str, Any]) -> None:
        """Complete the messages of a batch, once.

        When its lease is over, others may have them, and have them once more; unless nothing but
        this batch can be in its range, and nobody has it.
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

    def _renew(self) -> None:
        pause_s = self._duration.total_seconds() / 3
        while not self._is_closed.wait(pause_s):
            for epoch in list(self._epochs.values()):
                with suppress(MessagingError):
                    self._ask(RenewRange(self._path, epoch, self._duration))

    def close(self) -> None:
        """Stop renewing."""
        self._is_closed.set()
