"""Spark's data source for messages: `format("twinbus")`."""

from twinbus.extras import require

require("the data source twinbus", "spark")
