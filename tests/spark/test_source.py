"""The `twinbus` data source: what any user of Spark can do with a queue."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pyspark import TaskContext
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import col, expr

from tests.spark.twins import QUEUE, Twins, numbered, until
from twinbus import BrokeredMessage, NamespaceManager, TopicDescription
from twinbus.limits import SINK_BATCH_MESSAGES

FULL = BrokeredMessage(
    b"\x00body\xff",
    message_id="m1",
    session_id="s",
    correlation_id="c",
    content_type="text/plain",
    subject="hello",
    to="you",
    reply_to="me",
    reply_to_session_id="rs",
    partition_key="s",
    time_to_live=timedelta(days=3, microseconds=7),
    application_properties={
        "str": "é",
        "int": -(2**63),
        "float": 2.5,
        "bool": True,
        "bytes": b"\x00\x01",
        "datetime": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "timedelta": timedelta(seconds=-1, microseconds=3),
        "uuid": UUID(int=2**127 + 5),
    },
)


def table(spark: SparkSession, twins: Twins, **options: Any) -> DataFrame:
    wanted = {"connection": twins.primary.connection, "queue": QUEUE} | options
    return spark.read.format("twinbus").options(**_given(wanted)).load()


def stream(spark: SparkSession, twins: Twins, **options: Any) -> DataFrame:
    wanted = {"connection": twins.primary.connection, "queue": QUEUE} | options
    return spark.readStream.format("twinbus").options(**_given(wanted)).load()


def _given(options: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items() if value is not None}


def consume(
    source: DataFrame, folder: Path, table: str = "found", spark: SparkSession | None = None
) -> list[Row]:
    """Run a stream to the end of what is there, into files; return all rows of the files."""
    query = (
        source.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / table))
    )
    assert query.awaitTermination(60)
    session = spark or source.sparkSession
    return session.read.parquet(str(folder / table)).collect()


# -- reading ---------------------------------------------------------------------------------------


def test_a_table_shows_every_field_with_its_type(spark: SparkSession, twins: Twins) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, FULL)
    [row] = table(spark, twins).collect()
    for name in ("message_id", "session_id", "subject", "to", "reply_to", "time_to_live"):
        assert row[name] == getattr(FULL, name), name
    assert bytes(row.body) == FULL.body
    assert (row.sequence_number, row.delivery_count, row.state) == (1, 0, "active")
    found = {name: value[name] for name, value in row.properties.items()}
    found["bytes"], found["uuid"] = bytes(found["bytes"]), UUID(bytes=bytes(found["uuid"]))
    found["datetime"] = found["datetime"].astimezone(UTC)
    assert found == FULL.application_properties
    assert all(sum(v is not None for v in value) == 1 for value in row.properties.values())


def test_browsing_changes_nothing_and_sees_each_message_once(
    spark: SparkSession, twins: Twins
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x", message_id=n) for n in numbered("m", 500)))
    twins.primary.factory.create_message_receiver(QUEUE).receive_batch(100)  # makes gaps of locks
    for partitions in (1, 7):
        found = table(spark, twins, partitions=partitions).select("message_id").collect()
        assert sorted(row.message_id for row in found) == sorted(numbered("m", 500))
    assert twins.primary.count() == 500


def test_an_empty_queue_is_an_empty_table(spark: SparkSession, twins: Twins) -> None:
    twins.primary.queue()
    assert table(spark, twins).count() == 0


def test_a_stream_completes_what_its_batches_committed(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x", message_id=n) for n in numbered("m", 250)))
    source = stream(spark, twins, maxRowsPerBatch=100)
    found = consume(source, tmp_path)
    assert sorted(row.message_id for row in found) == sorted(numbered("m", 250))
    assert twins.primary.count() == 0


def test_a_stream_goes_on_where_its_checkpoint_ends(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    for life in ("a", "b", "c"):
        twins.primary.send(QUEUE, BrokeredMessage(b"x", message_id=life))
        found = consume(stream(spark, twins), tmp_path)
    assert sorted(row.message_id for row in found) == ["a", "b", "c"]


def test_a_batch_that_failed_is_read_again_and_nothing_is_lost(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x", message_id=n) for n in numbered("m", 20)))
    failing = stream(spark, twins).withColumn("subject", expr("raise_error('no')"))
    with pytest.raises(StreamingQueryException):
        consume(failing, tmp_path)
    assert twins.primary.count() == 20
    found = consume(stream(spark, twins), tmp_path)
    assert sorted(row.message_id for row in found) == sorted(numbered("m", 20))
    assert twins.primary.count() == 0


@pytest.mark.parametrize("limit", [{"maxRowsPerBatch": 10}, {"maxBytesPerBatch": 10 * 1010}])
def test_a_batch_takes_no_more_than_it_may(
    spark: SparkSession, twins: Twins, tmp_path: Path, limit: dict[str, int]
) -> None:
    twins.primary.queue()
    messages = [BrokeredMessage(bytes(1000), message_id=f"{n:02}") for n in range(35)]
    twins.primary.send(QUEUE, *messages)
    query = (
        stream(spark, twins, **limit)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    sizes = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    assert sizes == [10, 10, 10, 5]


def test_subscriptions_and_dead_letter_queues_are_read_like_queues(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.manager.create_topic(TopicDescription(path="news"))
    twins.primary.manager.create_subscription("news", "all")
    twins.primary.send("news", BrokeredMessage(b"x", message_id="n1"))
    source = {"queue": None, "topic": "news", "subscription": "all"}
    [row] = table(spark, twins, **source).collect()
    assert row.message_id == "n1"
    with twins.primary.factory.create_subscription_client("news", "all") as client:
        message = client.receive()
        assert message is not None
        message.dead_letter("bad", "very")
    [row] = consume(stream(spark, twins, deadLetter="true", **source), tmp_path)
    assert (row.message_id, row.dead_letter_reason) == ("n1", "bad")


# -- writing ---------------------------------------------------------------------------------------


def test_rows_become_messages_and_keep_their_types(spark: SparkSession, twins: Twins) -> None:
    twins.primary.queue()
    twins.primary.queue("copies")
    twins.primary.send(QUEUE, FULL)
    columns = [name for name in table(spark, twins).columns if name != "sequence_number"]
    rows = table(spark, twins).select(*columns[: columns.index("properties") + 1])
    write = rows.write.format("twinbus").mode("append")
    write.options(connection=twins.primary.connection, queue="copies").save()
    [copy] = twins.primary.take("copies")
    for name in ("body", "message_id", "session_id", "time_to_live", "application_properties"):
        assert getattr(copy, name) == getattr(FULL, name), name


def test_only_a_body_is_needed_and_texts_will_do(spark: SparkSession, twins: Twins) -> None:
    twins.primary.queue()
    rows = spark.range(5).select(
        col("id").cast("string").alias("body"), expr("map('k', 'v')").alias("properties")
    )
    rows.write.format("twinbus").mode("append").options(
        connection=twins.primary.connection, queue=QUEUE
    ).save()
    found = twins.primary.take()
    assert sorted(message.body for message in found) == [b"0", b"1", b"2", b"3", b"4"]
    assert {tuple(message.application_properties.items()) for message in found} == {(("k", "v"),)}
    assert len({message.message_id for message in found}) == 5


def test_a_batch_that_is_repeated_from_the_checkpoint_is_sent_once(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text(f"{number}\n")

    def run() -> None:
        source = spark.readStream.schema("body string").text(str(tmp_path / "in"))
        query = (
            source.writeStream.format("twinbus")
            .options(connection=twins.primary.connection, queue=QUEUE)
            .option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    run()
    for commit in (tmp_path / "c" / "commits").iterdir():  # as if it was killed before its commit
        commit.unlink()
    run()
    assert sorted(message.body for message in twins.primary.take()) == [b"0", b"1", b"2"]


def test_a_task_of_a_write_that_is_repeated_sends_its_rows_once(
    spark: SparkSession, twins: Twins
) -> None:
    twins.primary.queue()
    connection, count = twins.primary.connection, 2 * SINK_BATCH_MESSAGES + 1

    def fail_once(_: Any) -> Iterator[tuple[str, str]]:
        """Yield all rows; in its first try, fail when a part of them was sent."""
        for number in range(count):
            yield "x", str(number)
        task = TaskContext.get()
        assert task is not None
        if not task.attemptNumber():
            with NamespaceManager.from_connection_string(connection) as manager:
                until(lambda: manager.get_runtime_properties(QUEUE).active_message_count, "sent")
            raise RuntimeError("the first try fails")

    parts = spark.sparkContext.parallelize([0], 1).mapPartitions(fail_once)
    rows = spark.createDataFrame(parts, "body string, message_id string")
    write = rows.write.format("twinbus").mode("append")
    write.options(connection=connection, queue=QUEUE).save()
    assert twins.primary.metered("Send") > count / SINK_BATCH_MESSAGES + 1, "nothing was repeated"
    assert sorted(twins.primary.ids(), key=int) == [str(number) for number in range(count)]


# -- bad input and secrets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"connection": None}, "the namespace is missing"),
        ({"connection": "nonsense"}, "Name=Value"),
        ({"connection": "Endpoint=embedded:///tmp/x"}, "twinbus serve"),
        ({"connection": None, "connectionFile": "/nowhere"}, "connectionFile"),
        ({"connection": None, "connectionEnv": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"queue": None}, "the entity is missing"),
        ({"queue": None, "topic": "news"}, "subscription"),
        ({"deadLetter": "maybe"}, "deadLetter is 'maybe'; it must be true or false"),
        ({"pushFilters": "maybe"}, "pushFilters is 'maybe'; it must be true or false"),
        ({"maxRowsPerBatch": "many"}, "whole number"),
        ({"partitions": "0"}, "whole number"),
        ({"colour": "red"}, "unknown option colour"),
    ],
)
def test_bad_options_are_reported(
    spark: SparkSession, twins: Twins, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(AnalysisException, match=text):
        table(spark, twins, **options).collect()


def test_columns_no_message_has_are_reported(spark: SparkSession, twins: Twins) -> None:
    twins.primary.queue()
    writer = spark.range(1).write.format("twinbus").mode("append")
    with pytest.raises(AnalysisException, match="no column id"):
        writer.options(connection=twins.primary.connection, queue=QUEUE).save()


def test_no_plan_and_no_progress_shows_a_key(
    spark: SparkSession, twins: Twins, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    twins.primary.queue()
    twins.primary.queue("copies")
    twins.primary.send(QUEUE, BrokeredMessage(b"x"))
    key = twins.primary.connection.partition("SharedAccessKey=")[2].partition(";")[0]
    assert key
    table(spark, twins).explain("extended")
    query = (
        stream(spark, twins)
        .select("body", "message_id")
        .writeStream.format("twinbus")
        .options(connection=twins.primary.connection, queue="copies")
        .option("checkpointLocation", str(tmp_path / "c"))
        .start()
    )
    query.processAllAvailable()
    query.explain(extended=True)
    reported = "".join(progress.json for progress in query.recentProgress)
    query.stop()
    shown = "".join(capfd.readouterr()) + reported
    kept = [path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert kept
    assert key not in shown
    assert not any(key.encode() in item for item in kept)
