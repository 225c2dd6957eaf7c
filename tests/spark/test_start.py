"""How Spark is started: what its Python processes are made of."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from twinbus.spark.home import make_spark_home


def test_workers_use_the_compiled_files_of_pyspark(spark: SparkSession) -> None:
    def look(_: object) -> list[str]:
        return [str(module.__cached__) for module in map(import_module, ("pyspark", "py4j"))]

    [cached] = spark.sparkContext.parallelize([0], 1).map(look).collect()
    assert all(Path(file).is_file() for file in cached), cached


def test_a_pyspark_without_a_spark_of_its_own_keeps_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "elsewhere" / "pyspark"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "pyspark")
    monkeypatch.syspath_prepend(str(package.parent))
    assert make_spark_home(tmp_path / "home") is None
