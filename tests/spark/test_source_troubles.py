"""Failures of the data source that were found once, each with its rule, on real Spark."""

from pathlib import Path
from shutil import rmtree

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.test_source import stream
from tests.spark.twins import QUEUE, Twins, numbered, until
from twinbus import BrokeredMessage


def start(rows: DataFrame, folder: Path, *, to_the_end: bool = False) -> StreamingQuery:
    """Start a query that does nothing with its rows."""
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(folder / "c"))
    return (writer.trigger(availableNow=True) if to_the_end else writer).start()


def run(rows: DataFrame, folder: Path) -> int:
    """Run a query to the end of what is there; return how many rows it had."""
    query = start(rows, folder, to_the_end=True)
    assert query.awaitTermination(60)
    return sum(progress.numInputRows for progress in query.recentProgress)


# -- reading ---------------------------------------------------------------------------------------


def test_a_stream_of_a_queue_that_is_empty_at_first_waits_and_then_reads(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    first = tmp_path / "c" / "commits" / "0"  # Spark begins with an empty batch
    query = start(stream(spark, twins), tmp_path)
    try:
        until(lambda: first.exists() or not query.isActive, "it had a look")
        assert query.isActive, query.exception()
        twins.primary.send(QUEUE, BrokeredMessage(b"x"))
        until(lambda: not twins.primary.count() or not query.isActive, "it was read")
        assert sum(progress.numInputRows for progress in query.recentProgress) == 1
    finally:
        query.stop()


def test_a_query_that_is_stopped_in_a_batch_releases_what_it_leased_ahead(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x") for _ in range(20)))
    # The lease is longer than `until` waits. The next range is leased while the first batch runs.
    rows = stream(spark, twins, maxRowsPerBatch=10, leaseSeconds=300)
    query = start(rows.selectExpr("reflect('java.lang.Thread', 'sleep', 600000L)"), tmp_path)
    try:
        until(
            lambda: twins.primary.metered("LeaseRange") == 2 or not query.isActive,
            "a batch runs, and the next range is leased",
        )
        assert query.isActive, query.exception()
    finally:
        query.stop()
    taken: list[int | None] = []

    def take() -> bool:
        taken.extend(message.sequence_number for message in twins.primary.take())
        return len(taken) >= 10

    until(take, "others may have what was leased ahead")
    assert sorted(filter(None, taken)) == list(range(11, 21))
    assert run(stream(spark, twins, maxRowsPerBatch=10), tmp_path) == 10  # the batch, repeated
    assert twins.primary.count() == 0


def test_a_run_to_the_end_of_an_empty_queue_ends(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    assert run(stream(spark, twins), tmp_path) == 0
    twins.primary.send(QUEUE, BrokeredMessage(b"x"))
    assert run(stream(spark, twins), tmp_path) == 1


def test_a_batch_of_which_nothing_is_left_is_repeated_without_failing(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x", message_id=n) for n in numbered("m", 20)))
    assert run(stream(spark, twins), tmp_path) == 20
    assert twins.primary.count() == 0
    for commit in (tmp_path / "c" / "commits").iterdir():  # as if it was killed before its commit
        commit.unlink()
    twins.primary.send(QUEUE, BrokeredMessage(b"x", message_id="new"))
    assert run(stream(spark, twins), tmp_path) == 1
    assert twins.primary.count() == 0


# -- writing ---------------------------------------------------------------------------------------


def test_a_repeated_batch_with_other_rows_doubles_but_loses_nothing(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    (tmp_path / "in").mkdir()
    for life, text in enumerate(("a\nb\n", "b\nc\nd\n")):
        (tmp_path / "in" / f"{life}.txt").write_text(text)
        source = spark.readStream.schema("body string").text(str(tmp_path / "in"))
        query = (
            source.writeStream.format("twinbus")
            .options(connection=twins.primary.connection, queue=QUEUE)
            .option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        for log in ("offsets", "commits", "sources"):  # its first batch comes again, as the same
            rmtree(tmp_path / "c" / log)
        (tmp_path / "in" / f"{life}.txt").unlink()
    assert sorted(message.body for message in twins.primary.take()) == [
        b"a",
        b"b",
        b"b",
        b"c",
        b"d",
    ]


def test_a_number_is_refused_as_a_time(spark: SparkSession, twins: Twins) -> None:
    twins.primary.queue()
    rows = spark.range(1).select(expr("'x'").alias("body"), expr("60").alias("time_to_live"))
    writer = rows.write.format("twinbus").mode("append")
    with pytest.raises(PySparkException, match="time_to_live is int32; it must be interval day"):
        writer.options(connection=twins.primary.connection, queue=QUEUE).save()
    assert twins.primary.count() == 0
