"""Writes the rows of a Spark data frame or stream as messages.

A piece of rows is identified by its position (query or job, partition, batch, row) and its content.
A task that runs again, or a batch that is repeated after a restart, sends the same pieces, and the
broker accepts each piece once. This also holds for a batch write that is identified by `txnAppId`
and `txnVersion`, if another job repeats it. If a repeated batch has other rows, or another order,
its pieces count as new: rows may then be duplicated, but none is lost.
"""

import secrets
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from twinbus.datasource.columns import check_writable, from_spark
from twinbus.datasource.options import SourceOptions
from twinbus.errors import InvalidArgumentError
from twinbus.limits import CARRIED_BYTES, SINK_BATCH_MESSAGES
from twinbus.message import body_bytes, sizes
from twinbus.namespace.metered import ClientLedger
from twinbus.protocol.commands import Origin, Send
from twinbus.protocol.origins import sink_source

_BATCH_ID = "streaming.sql.batchId"  # a property that Spark sets for the tasks of a query
_QUERY_ID = "sql.streaming.queryId"
_ROW_BITS = 36  # for the rows of a partition in a batch; leaves room for 100 million batches


class MessageWriter(DataSourceArrowWriter):
    """Sends the rows of a DataFrame."""

    def __init__(self, options: SourceOptions, schema: StructType, *, overwrite: bool) -> None:
        _check(options, schema)
        if overwrite:
            raise InvalidArgumentError("messages cannot be overwritten; use mode('append')")
        self._options = options
        if options.transaction is not None:
            application, self._version = options.transaction
            self._job = f"txn/{xxhash.xxh3_128_hexdigest(application.encode())}"
        else:  # chosen on the driver, so that a task that runs again uses the same name
            self._job, self._version = secrets.token_hex(8), 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a partition; runs in a worker."""
        return _send_all(self._options, iterator, self._job, self._version)


class MessageStreamWriter(DataSourceStreamArrowWriter):
    """Sends the rows of a stream, each once, even after restarts from the checkpoint."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        _check(options, schema)
        if options.transaction is not None:
            raise InvalidArgumentError(
                "txnAppId and txnVersion identify a batch write; a stream has its checkpoint. "
                "Remove them, or write inside foreachBatch"
            )
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a partition; runs in a worker."""
        task = TaskContext.get()
        assert task is not None
        query, batch = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise InvalidArgumentError(
                "Spark gives this write no query id and batch id, so it is not part of a streaming "
                "query. Start the query with df.writeStream, or write a table with df.write"
            )
        return _send_all(self._options, iterator, query, int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: the sent messages are durable."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: Spark repeats the batch, and the broker recognises sent messages."""


def _check(options: SourceOptions, schema: StructType) -> None:
    if not options.is_writable:
        raise InvalidArgumentError(
            f"{options.path} is a subscription or a dead-letter queue, which cannot be written. "
            "Write to its queue or topic"
        )
    check_writable({field.name: field.dataType.simpleString() for field in schema})


def _send_all(
    options: SourceOptions, batches: Iterator[pa.RecordBatch], run: str, batch: int
) -> WriterCommitMessage:
    """Send rows, numbered by their position."""
    task = TaskContext.get()
    assert task is not None
    place = f"{run}/{options.path.lower()}/{task.partitionId()}"
    number = batch << _ROW_BITS
    courier = options.courier()
    for rows in batches:
        for piece in _pieces(from_spark(rows)):
            numbers = range(number, number + piece.num_rows)
            named = _with_ids(piece, place, numbers)
            source = sink_source(f"{place}/{xxhash.xxh3_128_hexdigest(named.serialize())}")
            courier.ask(Send(options.path, named, Origin(source, numbers)))
            number += piece.num_rows
    ClientLedger.write_all()  # Spark kills its workers without notice
    return WriterCommitMessage()


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts of a suitable size for a send."""
    at = 0
    ends = np.cumsum(sizes(batch)) if body_bytes(batch) > CARRIED_BYTES else None
    while at < batch.num_rows:
        count = SINK_BATCH_MESSAGES
        if ends is not None:
            before = ends[at - 1] if at else 0
            count = max(int(np.searchsorted(ends, before + CARRIED_BYTES, side="right")) - at, 1)
        yield batch.slice(at, min(count, SINK_BATCH_MESSAGES))
        at += min(count, SINK_BATCH_MESSAGES)


def _with_ids(batch: pa.RecordBatch, place: str, numbers: range) -> pa.RecordBatch:
    """Add ids to messages without one; a message that is written again gets the same id."""
    at = batch.schema.get_field_index("message_id")
    column = batch.column(at)
    if not column.null_count:
        return batch
    prefix = xxhash.xxh3_64_hexdigest(place.encode())
    made = pa.array([f"{prefix}-{number}" for number in numbers], pa.string())
    return batch.set_column(at, batch.schema.field(at), pc.coalesce(column, made))
