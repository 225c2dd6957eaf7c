"""Ledgers as Spark data frames: the rows of the surveyed files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from twinbus.cost.survey import Survey
from twinbus.ledger import SCHEMAS, LedgerKind
from twinbus.lifetimes import Closable
from twinbus.limits import BROADCAST_ROWS, LOCAL_ROWS
from twinbus.locations import as_pattern

_DDL = {
    pa.string(): "string",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.timestamp("us", "UTC"): "timestamp",
}


def frame(session: SparkSession, surveyed: Survey, kind: LedgerKind) -> DataFrame:
    """Return the rows of a kind of ledger, with a column for the ledger's name."""
    ddl = ", ".join(f"`{column.name}` {_DDL[column.type]}" for column in SCHEMAS[kind])
    parts = [
        session.read.schema(ddl)
        .option("parquet.page.verify-checksum.enabled", "true")
        .parquet(*map(as_pattern, paths))
        .withColumn("ledger", f.lit(name))
        for name, paths in surveyed.files[kind].items()
        if paths
    ]
    if not parts:
        columns = [f.lit(None).cast(_DDL[c.type]).alias(c.name) for c in SCHEMAS[kind]]
        return session.range(0).select(*columns, f.lit("").alias("ledger"))
    return reduce(lambda first, second: first.unionByName(second), parts)


def local_frame(
    session: SparkSession, rows: Sequence[tuple[object, ...]], schema: pa.Schema
) -> DataFrame:
    """Return rows of the driver as a data frame."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
    return session.createDataFrame(pa.Table.from_arrays(arrays, schema=schema))


@dataclass(frozen=True, slots=True)
class Settled(Closable):
    """A data frame that Spark has evaluated; closing it frees what Spark has persisted."""

    rows: DataFrame
    count: int
    is_local: bool

    @classmethod
    def of(cls, rows: DataFrame) -> Self:
        """Evaluate a data frame once.

        Few rows become a local relation. Spark plans every frame that is derived from it in
        milliseconds. A frame that is only persisted keeps the plan that made it, and Spark analyses
        that plan again for every derived frame. Many rows are persisted: the driver has no space.
        """
        first = rows.limit(LOCAL_ROWS + 1).toArrow()
        if first.num_rows <= LOCAL_ROWS:
            return cls(rows.sparkSession.createDataFrame(first), first.num_rows, is_local=True)
        rows = rows.persist()
        return cls(rows, rows.count(), is_local=False)

    @property
    def broadcast(self) -> DataFrame:
        """The rows, to be sent to every task if they are few enough."""
        return f.broadcast(self.rows) if self.count <= BROADCAST_ROWS else self.rows

    def close(self) -> None:
        """Free what Spark has persisted."""
        if not self.is_local:
            self.rows.unpersist()
