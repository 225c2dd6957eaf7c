"""What the docs show of Spark is run."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.twins import QUEUE, Twins
from tests.unit.test_docs import blocks_of
from twinbus import BrokeredMessage


@pytest.mark.parametrize("block", blocks_of("python spark"))
def test_what_the_docs_show_of_spark_works(
    block: str,
    spark: SparkSession,  # noqa: ARG001 - `getOrCreate` finds it
    twins: Twins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twins.primary.queue()
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
    exec(compile(block, "docs", "exec"), {})  # noqa: S102 - our own pages
