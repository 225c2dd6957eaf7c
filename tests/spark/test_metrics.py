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


def reported(progress: Any) -> dict[str, Any]:
    """Return what the source of a query told in its last progress."""
    latest = progress.sources[0].latestOffset if progress is not None else None
    return dict(json.loads(latest)) if latest else {}


@pytest.mark.usefixtures("spark")
def test_the_progress_of_a_syphon_counts_messages(twins: Twins) -> None:
    twins.primary.queue()
    twins.divert_ids(numbered("m", 300))
    with Syphon(twins.settings()) as syphon:
        until(lambda: reported(syphon.query_progress).get("moved") == 300, "Spark tells it")
        told = reported(syphon.query_progress)
    assert (told["moved_bytes"], told["waiting"], told["dead_lettered"]) == (300, 0, 0)
    assert syphon.progress.moved == 300


def test_the_progress_of_a_stream_says_how_far_behind_it_is(
    spark: SparkSession, twins: Twins, tmp_path: Path
) -> None:
    twins.primary.queue()
    twins.primary.send(QUEUE, *(BrokeredMessage(b"x") for _ in range(250)))
    query = start(stream(spark, twins, maxRowsPerBatch=100), tmp_path, to_the_end=True)
    assert query.awaitTermination(int(DEADLINE_S))
    batches = [reported(progress) for progress in query.recentProgress if progress.numInputRows]
    assert [(told["messages"], told["waiting"]) for told in batches] == [
        (100, 150),
        (100, 50),
        (50, 0),
    ]
    assert all(told["oldest_age_s"] >= 0 for told in batches)
