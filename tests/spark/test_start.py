"""How Spark is started: what its Python processes are made of."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from twinbus.errors import InvalidOperationError
from twinbus.spark.home import make_spark_home
from twinbus.spark.session import BorrowedSession, start_session


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPARK_REMOTE", "sc://host:15002/;token=secret"),
        ("SPARK_CONNECT_MODE_ENABLED", "1"),  # set by pyspark, in a process with such a session
        ("SPARK_API_MODE", "Connect"),
    ],
)
def test_a_session_of_spark_connect_is_not_started_and_its_token_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidOperationError, match=f"Unset {name}") as caught:
        start_session(tmp_path)
    assert "secret" not in str(caught.value)


def test_a_session_of_spark_connect_with_its_server_in_this_process_is_not_borrowed(
    spark: SparkSession,  # noqa: ARG001 - the server
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(InvalidOperationError, match="this process uses Spark Connect"):
        BorrowedSession(None, {})


@pytest.mark.parametrize(
    "program",
    [
        "import twinbus.datasource.source",
        "from twinbus.spark.session import check_installed; check_installed()",
    ],
)
@pytest.mark.parametrize("has_streaming", [True, False])
def test_an_older_spark_is_named_with_the_one_that_is_needed(
    tmp_path: Path, program: str, has_streaming: bool
) -> None:
    package = tmp_path / "pyspark"
    (package / "sql" / "streaming").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "4.0.1"')
    (package / "sql" / "__init__.py").touch()
    if has_streaming:
        (package / "sql" / "streaming" / "__init__.py").touch()
    else:
        (package / "sql" / "streaming").rmdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "needs Spark 4.3 or newer, and pyspark 4.0.1 is installed" in done.stderr
