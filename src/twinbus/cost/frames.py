"""Ledgers as Spark data frames: the rows of the surveyed files."""

from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from twinbus.cost.survey import Survey
from twinbus.ledger import SCHEMAS, LedgerKind
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
