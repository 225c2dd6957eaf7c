"""The data source of Spark: `format("twinbus")`."""

from twinbus.extras import require

require("the data source twinbus", "spark")
