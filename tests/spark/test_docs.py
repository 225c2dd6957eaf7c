"""What the docs show of Spark is run."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.twins import QUEUE, Twins, numbered, until
from tests.unit.test_docs import blocks_of
from twinbus import BrokeredMessage
from twinbus.syphon.syphon import Syphon


@pytest.mark.parametrize(
    "block", [block for block in blocks_of("python spark") if "Listener" not in block.values[0]]
)
def test_what_the_docs_show_of_spark_works(
    block: str,
    spark: SparkSession,  # noqa: ARG001 - `getOrCreate` finds it
    twins: Twins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twins.primary.queue()
    run(block, twins, tmp_path, monkeypatch)


def test_the_listener_of_the_docs_feeds_prometheus(
    spark: SparkSession, twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins.primary.queue()
    [shown] = [block for block in blocks_of("python spark") if "Listener" in block.values[0]]
    names = run(shown.values[0], twins, tmp_path, monkeypatch)

    def metric_of(name: str) -> float | None:
        by_query = {
            sample.labels["query"].partition(" ")[0]: sample.value
            for metric in names["registry"].collect()
            for sample in metric.samples
            if metric.name == f"twinbus_query_{name}"
        }
        return by_query.get("syphon")

    spark.streams.addListener(names["watch"])
    try:
        twins.divert_ids(numbered("m", 40))
        with Syphon(twins.settings()):
            until(lambda: metric_of("batch_messages") == 40, "the listener hears of the batch")
            twins.divert_ids(numbered("n", 7))
            until(lambda: metric_of("moved") == 40, "the next batch tells what was moved before")
            assert (metric_of("moved_bytes"), metric_of("waiting")) == (40, 7)
    finally:
        spark.streams.removeListener(names["watch"])


def run(
    block: str, twins: Twins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Run a block of the docs where one order waits; return the names that it has defined."""
    twins.primary.send(QUEUE, BrokeredMessage(b"x", application_properties={"table": 7}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWINBUS_PRIMARY", twins.primary.connection)
    monkeypatch.setenv("TWINBUS_SECONDARY", twins.secondary.connection)
    connection = tmp_path / "connection.txt"
    connection.write_text(twins.primary.connection)
    block = block.replace(
        '"connectionEnv": "TWINBUS_CONNECTION"', f'"connectionFile": "{connection}"'
    )
    block = block.replace(
        '"connectionEnv", "TWINBUS_CONNECTION"', f'"connectionFile", "{connection}"'
    )
    for folder in ('"checkpoint"', '"orders.parquet"'):  # Spark has a folder of its own
        block = block.replace(folder, f'"{tmp_path}/" + {folder}')
    names: dict[str, Any] = {}
    exec(compile(block, "docs", "exec"), names)  # noqa: S102 - our own pages
    return names
