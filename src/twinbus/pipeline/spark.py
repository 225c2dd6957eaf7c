"""Starts Spark quietly: on this machine unless told otherwise, on loopback, its log in a file.

An application that has a session already keeps it: then nothing here is set.
"""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from twinbus.errors import InvalidOperationError
from twinbus.pipeline.java import find_java, make_java_home

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_ALWAYS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.ui.showConsoleProgress": "false",
}
_TRIES = 4  # of a task, as on a cluster: a worker may be killed
_LOG_SETTINGS = """\
status = error
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""


def local_master(cores: int | None = None) -> str:
    """Return the master URL of this machine."""
    return f"local[{cores or os.cpu_count() or 2},{_TRIES}]"


def find_session() -> "SparkSession | None":
    """Return the session the application runs, if it does."""
    return _session_class().getActiveSession()


def _session_class() -> "type[SparkSession]":
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra that senders do not need
    except ImportError as error:
        raise InvalidOperationError(
            "the pipeline runs on Spark, which is not installed: pip install 'twinbus[spark]'"
        ) from error
    return SparkSession


def start_session(
    folder: Path, master: str | None = None, conf: Mapping[str, str] | None = None
) -> "SparkSession":
    """Start a session, with its log and its temporary files in a folder.

    Without a master: what `spark-submit` says, else this machine.
    """
    builder = _session_class().builder.appName("twinbus")
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which has set up the rest
    settings = dict(_ALWAYS) if submitted else _settings(folder, master)
    for name, value in {**settings, **(conf or {})}.items():
        builder = builder.config(name, value)
    with _own_interrupts(), nullcontext() if submitted else _environment(folder):
        return builder.getOrCreate()


@contextmanager
def _own_interrupts() -> "Iterator[None]":
    """Leave Ctrl-C to the application: Spark would take it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)


def _settings(folder: Path, master: str | None) -> dict[str, str]:
    """Return what a session of ours is set to."""
    log_settings = folder / "log4j2.properties"
    log_settings.write_text(_LOG_SETTINGS.format(log=folder / "spark.log"), encoding="utf-8")
    settings = {
        **_ALWAYS,
        "spark.master": master or local_master(),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log_settings}",
        "spark.local.dir": str(folder),
        "spark.ui.enabled": "false",
    }
    if settings["spark.master"].startswith("local"):
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    return settings


@contextmanager
def _environment(folder: Path) -> "Iterator[None]":
    """Let Spark find its Java, and its workers this Python, while it starts."""
    wanted = {"JAVA_HOME": str(make_java_home(folder / "java", find_java()))}
    wanted["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
