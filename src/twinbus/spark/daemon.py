"""The process that Spark forks its Python workers from, with Twinbus imported before the first.

Spark starts a process each for the source, the tasks and the sink of a query. Each would import
pyarrow, numpy and Twinbus for itself, which takes longer than the first messages. A fork has them.
Set by `start_session` as `spark.python.daemon.module`; Spark runs it as a program.
"""

from contextlib import suppress
from importlib import import_module

_BEFORE_THE_FIRST_WORKER = (
    "twinbus.syphon.syphon_query",
    "twinbus.datasource.source",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
)


def main() -> None:
    """Import what workers need, and be Spark's daemon."""
    for name in _BEFORE_THE_FIRST_WORKER:
        with suppress(Exception):  # a worker that needs it raises the same, where it is seen
            import_module(name)
    import_module("pyspark.daemon").manager()


if __name__ == "__main__":
    main()
