"""One Spark on this machine for all of these tests, and two servers in this process for each."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.twins import Twins
from twinbus.datasource.source import TwinbusDataSource
from twinbus.spark.session import start_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = start_session(tmp_path_factory.mktemp("spark"))
    session.dataSource.register(TwinbusDataSource)
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[None]:
    """Undo what a source does to SIGTERM in the process of its test: children would inherit it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(autouse=True)
def active_session(request: pytest.FixtureRequest) -> None:
    """Make the session that of this thread, as Spark's writers need it: a test may have lost it."""
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark").createDataFrame([], "nothing int")


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    with Twins(tmp_path) as twins:
        yield twins
