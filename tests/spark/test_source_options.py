"""What the data source offers beyond reading everything: conditions, columns, transactions, SQL."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.spark.test_source import stream, table
from tests.spark.test_source_troubles import start
from tests.spark.twins import DEADLINE_S, QUEUE, Twins, numbered, until
from twinbus import BrokeredMessage
from twinbus.datasource.source import TwinbusDataSource, register
from twinbus.errors import InvalidOperationError

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
CONDITIONS = {  # of 3,000 messages, how many match, and how many Spark gets from the data source
    "sequence_number > 2990 and sequence_number <= 2995": (5, 5),
    "sequence_number <=> 7": (1, 1),
    "sequence_number in (5, 7, 12)": (3, 8),  # all from the first to the last
    "sequence_number < 4 and enqueued_time_utc > timestamp '2001-01-01'": (3, 3),
    "enqueued_time_utc < timestamp '2001-01-01'": (0, 0),
    "enqueued_time_utc in (timestamp '2001-01-01', timestamp '2002-01-01')": (0, 0),
    "enqueued_time_utc >= timestamp '2001-01-01'": (3000, 3000),
    "sequence_number = 7 or message_id = 'm.0'": (2, 3000),  # Spark passes no `or` on
}


def fill(twins: Twins, count: int, queue: str = QUEUE) -> list[str]:
    twins.primary.queue(queue)
    ids = numbered("m", count)
    twins.primary.send(queue, *(BrokeredMessage(b"x" * 100, message_id=item) for item in ids))
    return ids


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    """Yield a session that hands conditions to data sources."""
    spark.conf.set(PUSHDOWN, "true")
    yield spark
    spark.conf.unset(PUSHDOWN)


def counts(rows: DataFrame) -> tuple[int, int]:
    """Return how many rows a query has, and how many of them Spark got from the data source."""
    found = len(rows.collect())
    scan: Any = rows._jdf.queryExecution().executedPlan().collectLeaves().head()  # noqa: SLF001 - no other way to ask
    return found, scan.metrics().apply("numOutputRows").value()


def test_spark_gets_only_messages_that_can_match_conditions_on_number_and_time(
    pushing: SparkSession, twins: Twins
) -> None:
    fill(twins, 3000)
    counted = {
        condition: counts(table(pushing, twins, pushFilters="true").where(condition))
        for condition in CONDITIONS
    }
    assert counted == CONDITIONS


def test_messages_outside_of_the_wanted_numbers_are_not_browsed(
    pushing: SparkSession, twins: Twins
) -> None:
    fill(twins, 3000)
    rows = table(pushing, twins, partitions=1, pushFilters="true")
    assert rows.where("sequence_number > 2990").count() == 10
    narrow = twins.primary.metered("Peek")
    assert table(pushing, twins, partitions=1).count() == 3000
    assert narrow < twins.primary.metered("Peek") - narrow


def parts_of(rows: DataFrame) -> tuple[int, int, int]:
    """Count different parts of a table of 30 messages in one query, then all of it in another."""
    numbers = rows.select("sequence_number")
    first, last = numbers.where("sequence_number <= 4"), numbers.where("sequence_number > 28")
    others = numbers.join(first, "sequence_number", "left_anti")
    return first.union(last).count(), others.count(), rows.count()


def test_a_dataframe_can_be_used_with_different_conditions(
    pushing: SparkSession, twins: Twins
) -> None:
    fill(twins, 30)
    assert parts_of(table(pushing, twins)) == (6, 26, 30)


def test_spark_keeps_the_conditions_of_one_query_for_others_of_its_dataframe(
    pushing: SparkSession, twins: Twins
) -> None:
    """So `pushFilters` must be asked for; when this fails, it can be the default."""
    fill(twins, 30)
    assert parts_of(table(pushing, twins, pushFilters="true")) != (6, 26, 30)


def test_pushed_filters_need_a_setting_of_spark(spark: SparkSession, twins: Twins) -> None:
    fill(twins, 3)
    with pytest.raises(PySparkException, match=f"{PUSHDOWN}' is false. Set it to true"):
        table(spark, twins, pushFilters="true").collect()


def test_columns_that_are_not_wanted_are_left_out(spark: SparkSession, twins: Twins) -> None:
    fill(twins, 3)
    rows = table(spark, twins, columns="sequence_number, message_id")
    assert rows.columns == ["sequence_number", "message_id"]
    assert [tuple(row) for row in rows.collect()] == [(1, "m.0"), (2, "m.1"), (3, "m.2")]
    with pytest.raises(
        PySparkException, match="columns is 'bodies'; it must be a list of different column names"
    ):
        table(spark, twins, columns="bodies").collect()


def test_a_read_has_as_many_tasks_as_the_cluster_runs_at_once(
    spark: SparkSession, twins: Twins
) -> None:
    fill(twins, 100)
    register(spark)
    rows = table(spark, twins)
    assert rows.rdd.getNumPartitions() == spark.sparkContext.defaultParallelism
    assert rows.count() == 100


def test_a_named_write_is_made_once_however_often_the_job_is_started(
    spark: SparkSession, twins: Twins
) -> None:
    twins.primary.queue()
    rows = spark.range(1000).selectExpr("cast(id as string) as body")
    sink = {"connection": twins.primary.connection, "queue": QUEUE, "txnAppId": "orders"}
    for version in (1, 1, 2, 1, 2):
        named = {**sink, "txnVersion": str(version)}
        rows.write.format("twinbus").options(**named).mode("append").save()
    assert twins.primary.count() == 2000
    with pytest.raises(PySparkException, match="txnAppId and txnVersion must be set together"):
        rows.write.format("twinbus").options(**sink).mode("append").save()


def test_rows_that_foreach_batch_writes_come_once_across_a_restart_in_mid_batch(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    ids = fill(twins, 300)
    twins.primary.queue("bills")
    sink = {"connection": twins.primary.connection, "queue": "bills", "txnAppId": "bills"}
    failures = iter([True, False, True])

    def send(rows: DataFrame, batch: int) -> None:
        named = {**sink, "txnVersion": str(batch)}
        wanted = rows.select("body", "message_id")
        wanted.write.format("twinbus").options(**named).mode("append").save()
        if next(failures, False):
            raise RuntimeError("killed after the write and before the commit")

    for parallelism in (2, 5, 3, 7):  # the cluster has another size at each start
        sized = type("Sized", (TwinbusDataSource,), {"parallelism": parallelism})
        spark.dataSource.register(sized)
        source = stream(spark, twins, maxRowsPerBatch=100, leaseSeconds=1)
        query = (
            source.writeStream.foreachBatch(send)
            .option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .start()
        )
        with suppress(PySparkException):
            assert query.awaitTermination(int(DEADLINE_S))
    register(spark)
    assert sorted(twins.primary.ids("bills")) == sorted(ids)


def test_a_union_reads_one_queue_while_the_others_are_idle(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    for number in range(4):
        twins.primary.queue(f"idle-{number}")
    fill(twins, 500)
    sources = [stream(spark, twins, maxRowsPerBatch=100)]
    sources += [stream(spark, twins, queue=f"idle-{number}") for number in range(4)]
    union = sources[0]
    for source in sources[1:]:
        union = union.union(source)
    query = start(union, tmp_path)
    try:
        until(lambda: not twins.primary.count(), "all was read")
        assert sum(progress.numInputRows for progress in query.recentProgress) == 500
    finally:
        query.stop()


def test_sql_reads_a_queue_and_reads_it_anew(spark: SparkSession, twins: Twins) -> None:
    fill(twins, 2)
    view = (
        "create or replace temporary view orders using twinbus options "
        f"(connection '{twins.primary.connection}', queue '{QUEUE}')"
    )
    spark.sql(view)
    rows = table(spark, twins)
    assert (spark.table("orders").count(), rows.count()) == (2, 2)
    twins.primary.send(QUEUE, BrokeredMessage(b"one more"))
    assert (spark.table("orders").count(), rows.count()) == (2, 2)  # as at their first action
    spark.sql(view)
    assert len(spark.sql("select * from orders").collect()) == 3
    spark.sql("drop view orders")
    with pytest.raises(PySparkException, match="In SQL: CREATE TEMPORARY VIEW"):
        spark.sql("create temporary view orders using twinbus")


def test_spark_passes_options_of_a_select_on_to_no_python_source(
    spark: SparkSession, twins: Twins
) -> None:
    """The docs and the hint of the error say so; when this fails, they can say more."""
    fill(twins, 2)
    spark.sql(
        "create or replace temporary view orders using twinbus options "
        f"(connection '{twins.primary.connection}', queue '{QUEUE}')"
    )
    found = spark.sql("select * from orders with (queue = 'there-is-no-such-queue')").collect()
    assert len(found) == 2
    spark.sql("drop view orders")
    with pytest.raises(PySparkException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql("select * from twinbus with (connectionEnv = 'ORDERS', queue = 'orders')")
    with pytest.raises(PySparkException, match=r"SELECT .* WITH .* on to this data source"):
        spark.sql("create temporary view orders using twinbus")


def test_the_refusal_of_spark_connect_says_what_to_do() -> None:
    class Connected:
        """As pyspark's own: a session without a JVM in this process."""

    session: Any = Connected()
    with pytest.raises(InvalidOperationError, match="a session of Spark Connect"):
        register(session)
