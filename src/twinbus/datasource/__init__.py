"""Spark's data source for messages: `format("twinbus")`."""

from twinbus.spark.version import require_spark

require_spark("the data source twinbus")
