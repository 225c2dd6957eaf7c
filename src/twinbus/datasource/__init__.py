"""The data source of Spark: `format("twinbus")`."""
