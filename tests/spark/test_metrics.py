"""What Spark's own progress says of a syphon and of a stream: messages, not ranges."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.test_source import stream
from tests.spark.test_source_troubles import start
from tests.spark.twins import DEADLINE_S, QUEUE, Twins, numbered, until
from twinbus import BrokeredMessage
from twinbus.syphon.syphon import Syphon
from twinbus.syphon.transform_query import Transform


def reported(progress: Any) -> dict[str, Any]:
    """Return what the source of a query reported in its last progress."""
    latest = progress.sources[0].latestOffset if progress is not None else None
    return dict(json.loads(latest)) if latest else {}


def observed(spark: SparkSession) -> list[dict[str, Any]]:
    """Return the metrics of every batch that carried something, from Spark's own progress."""
    [query] = spark.streams.active
    rows = [found.observedMetrics.get("twinbus") for found in query.recentProgress]
    return [row.asDict() for row in rows if row is not None and row["messages"]]


@pytest.mark.usefixtures("spark")
def test_the_progress_of_a_syphon_counts_messages(twins: Twins) -> None:
    twins.primary.queue()
    twins.divert_ids(numbered("m", 300))
    with Syphon(twins.settings()) as syphon:
        until(lambda: reported(syphon.query_progress).get("moved") == 300, "Spark tells it")
        found = reported(syphon.query_progress)
    assert (found["moved_bytes"], found["waiting"], found["dead_lettered"]) == (300, 0, 0)
    assert syphon.progress.moved == 300


@pytest.mark.parametrize("transform", [None, lambda messages: messages])
def test_each_batch_of_a_syphon_reports_what_it_carried(
    spark: SparkSession, twins: Twins, transform: Transform | None
) -> None:
    twins.primary.queue()
    twins.divert_ids(numbered("m", 300))
    twins.divert_ids(numbered("n", 50), queue=1)
    with Syphon(twins.settings(transform=transform, range_messages=100)) as syphon:
        until(lambda: syphon.progress.moved == 350, "all is home")
        until(lambda: len(observed(spark)) == 3, "Spark tells of all batches")
        found = observed(spark)
    assert [batch["messages"] for batch in found] == [150, 100, 100]
    assert all(batch["bytes"] >= batch["messages"] for batch in found)
    assert all(batch["oldest_age_s"] > 0 for batch in found)
    if transform is None:
        assert [batch["waiting"] for batch in found] == [200, 100, 0]


def test_the_progress_of_a_stream_says_how_far_behind_it_is(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x") for _ in range(250)))
    query = start(stream(spark, twins, maxRowsPerBatch=100), tmp_path, to_the_end=True)
    assert query.awaitTermination(int(DEADLINE_S))
    batches = [reported(progress) for progress in query.recentProgress if progress.numInputRows]
    assert [(batch["messages"], batch["waiting"]) for batch in batches] == [
        (100, 150),
        (100, 50),
        (50, 0),
    ]
    assert all(batch["oldest_age_s"] >= 0 for batch in batches)


def test_a_source_of_a_union_that_has_read_everything_reports_no_lag(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    for queue, count in ((QUEUE, 250), ("returns", 50)):
        twins.primary.queue(queue)
        twins.primary.send(queue, *(BrokeredMessage(b"x") for _ in range(count)))
    sources = [
        stream(spark, twins, queue=queue, maxRowsPerBatch=100) for queue in (QUEUE, "returns")
    ]
    query = start(sources[0].union(sources[1]), tmp_path, to_the_end=True)
    assert query.awaitTermination(int(DEADLINE_S))
    lags = [
        [json.loads(source.latestOffset)["lag"] for source in progress.sources]
        for progress in query.recentProgress
        if progress.numInputRows
    ]
    assert lags == [[250, 50], [150, 0], [50, 0]]
