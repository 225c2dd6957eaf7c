"""The data pipeline on Spark: the `twinbus` data source and the syphon."""
