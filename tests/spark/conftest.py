"""One Spark on this machine for all of these tests, and two servers in this process for each."""

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


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    with Twins(tmp_path) as twins:
        yield twins
