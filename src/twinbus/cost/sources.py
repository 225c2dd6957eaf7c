"""Divides the rows of surveyed ledgers into pieces for Spark's tasks.

All tasks of a job have about the same number of rows. Workers open local files themselves. Files of
other file systems are read by Spark's JVM, which divides them into partitions on its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa
from pyspark import RDD
from pyspark.serializers import NoOpSerializer
from pyspark.sql import SparkSession

from twinbus.cost.pieces import BatchPiece, FilePiece, Piece, cut
from twinbus.cost.survey import Survey
from twinbus.ledger import SCHEMAS, LedgerKind
from twinbus.limits import (
    LEDGER_FILE_ROWS,
    REPORT_LISTED_FILES,
    REPORT_PARTITION_ROWS,
    REPORT_TASK_ROWS,
)
from twinbus.locations import HadoopPath, Location, as_pattern

Columns = Mapping[LedgerKind, Sequence[str]]  # the columns to read, by kind of ledger
_TYPES = {
    pa.string(): "string",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.timestamp("us", "UTC"): "timestamp",
}

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(LEDGER_FILE_ROWS),
    "spark.sql.sources.parallelPartitionDiscovery.threshold": str(REPORT_LISTED_FILES),
    "spark.sql.files.ignoreMissingFiles": "false",  # else the report would lack rows
}


def task_count(session: SparkSession, rows: int) -> int:
    """Return into how many tasks to divide rows; a task takes some time to start."""
    cores = session.sparkContext.defaultParallelism
    return max(min(cores, rows // REPORT_TASK_ROWS), rows // REPORT_PARTITION_ROWS, 1)


def pieces_of(
    session: SparkSession, surveyed: Survey, columns: Columns, before: Survey | None = None
) -> RDD[Piece]:
    """Return the rows of the ledgers of the kinds in `columns`.

    With `before`, a survey of the day before the report, also return the messages of that day.
    """
    local: list[FilePiece] = []
    others: list[RDD[Piece]] = []
    for found, kind, ledger, paths in _files(surveyed, columns, before):
        is_before = found is before
        local += [
            FilePiece(kind, ledger, is_before, str(path.absolute()), found.groups[path])
            for path in paths
            if isinstance(path, Path)
        ]
        remote = [path for path in paths if isinstance(path, HadoopPath)]
        if remote:
            names = tuple(columns[kind])
            make = partial(BatchPiece, kind, ledger, is_before, names)
            others.append(_batches(session, kind, remote, names).map(make))
    tasks = cut(local, task_count(session, sum(piece.weight for piece in local)))
    context = session.sparkContext
    own: list[RDD[Piece]] = []
    if tasks or not others:
        own = [context.parallelize(tasks, max(len(tasks), 1)).mapPartitions(chain.from_iterable)]
    found_rows = [*own, *others]
    return found_rows[0] if len(found_rows) == 1 else context.union(found_rows)


def _files(
    surveyed: Survey, columns: Columns, before: Survey | None
) -> Iterator[tuple[Survey, LedgerKind, int, Sequence[Location]]]:
    """Yield survey, kind, index of the ledger and its files, in the order of their days."""
    parts = [(surveyed, kind) for kind in columns]
    if before is not None:
        parts.append((before, LedgerKind.MESSAGES))
    for found, kind in parts:
        for ledger, name in enumerate(found.ledgers):
            yield found, kind, ledger, found.files[kind].get(name, [])


def _batches(
    session: SparkSession, kind: LedgerKind, paths: Sequence[HadoopPath], names: Sequence[str]
) -> RDD[bytes]:
    """Return the rows of files as Arrow batches that Spark's JVM makes."""
    session = session.newSession()  # its settings do not affect the caller's session
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    ddl = ", ".join(f"`{column.name}` {_TYPES[column.type]}" for column in SCHEMAS[kind])
    rows = (
        session.read.schema(ddl)
        .option("parquet.page.verify-checksum.enabled", "true")
        .parquet(*map(as_pattern, paths))
        .select(*names)
    )
    batches = rows._jdf.toArrowBatchRdd().toJavaRDD()  # noqa: SLF001 - pyspark has no other way without pandas
    return RDD(batches, session.sparkContext, NoOpSerializer())
