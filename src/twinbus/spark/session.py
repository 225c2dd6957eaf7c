"""Starts Spark: by default on this machine, on loopback, with its log in a file.

If the application already has a session, that session is used and nothing is changed. A session
that we started is shared by all borrowers in this process, and stops with the last of them.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from twinbus.errors import InvalidOperationError
from twinbus.limits import TASK_TRIES
from twinbus.spark.gateway import GatewayLaunch, end_jvm
from twinbus.spark.home import make_spark_home
from twinbus.spark.java import find_java, make_java_home
from twinbus.spark.reasons import reason_of
from twinbus.spark.version import require_spark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

_ALWAYS = {
    # Spark's default is 15s, which is too short for Python to start on a busy machine.
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.ui.showConsoleProgress": "false",
}
# With these variables pyspark creates sessions of Spark Connect only. A value may contain a token.
_CONNECT = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
_API_MODE = "SPARK_API_MODE"  # has the same effect if its value is `connect`
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
    return f"local[{cores or os.cpu_count() or 2},{TASK_TRIES}]"


class BorrowedSession:
    """A borrowed session; a `with` block gives it back at its end, or abandons it after Ctrl-C."""

    _lock = threading.Lock()
    _own: "tuple[SparkSession, tempfile.TemporaryDirectory[str]] | None" = None
    _borrowers = 0

    def __init__(self, master: str | None, conf: Mapping[str, str]) -> None:
        cls = BorrowedSession
        with cls._lock:
            self._is_own = cls._own is not None or not _is_running()
            if not self._is_own:
                _refuse_connect()
                self.session = _session_class().builder.getOrCreate()
                return
            if cls._own is None:
                folder = tempfile.TemporaryDirectory(
                    prefix="twinbus-spark-", ignore_cleanup_errors=True
                )
                try:
                    session = start_session(Path(folder.name), master, conf)
                except BaseException:
                    folder.cleanup()
                    raise
                cls._own = session, folder
            self.session = cls._own[0]
            cls._borrowers += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self.abandon()
        else:
            self.give_back()

    @property
    def is_own(self) -> bool:
        """Whether we started the session, so that we may restart it."""
        return self._is_own

    def check(self) -> None:
        """Raise an error if Spark has stopped."""
        _ = self.session.sparkContext.defaultParallelism

    def give_back(self) -> None:
        """Give the session back; the last borrower stops it if Twinbus started it."""
        self._let_go(lambda session: session.stop(), for_all=False)

    def abandon(self) -> None:
        """After Ctrl-C, kill the JVM of a session that Twinbus started, even with other borrowers.

        The interrupted thread may have been in a call to the JVM, so it cannot make another call.
        """
        self._let_go(lambda _: end_jvm(), for_all=True)

    def _let_go(self, end: "Callable[[SparkSession], None]", *, for_all: bool) -> None:
        cls = BorrowedSession
        with cls._lock:
            is_own, self._is_own = self._is_own, False
            if not is_own or cls._own is None or cls._own[0] is not self.session:
                return  # Twinbus did not start it, or another borrower abandoned it
            cls._borrowers = 0 if for_all else cls._borrowers - 1
            if cls._borrowers:
                return
            session, folder = cls._own
            cls._own = None
        with suppress(Exception):  # Spark may have stopped
            end(session)
        folder.cleanup()


def _is_running() -> bool:
    """Return whether the application has a session, in any thread."""
    _session_class()
    from pyspark import SparkContext  # noqa: PLC0415 - as above

    return SparkContext._active_spark_context is not None  # noqa: SLF001 - no other way to ask


def check_installed() -> None:
    """Raise an error that says what to install if Spark cannot be started here."""
    require_spark("a Spark job")
    if not _is_submitted():
        find_java()


def _session_class() -> "type[SparkSession]":
    require_spark("a Spark job")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra that senders do not need

    return SparkSession


def start_session(
    folder: Path, master: str | None = None, conf: Mapping[str, str] | None = None
) -> "SparkSession":
    """Start a session, with its log and its temporary files in a folder.

    The default of the master is that of `spark-submit`, or else this machine.
    """
    _refuse_connect()
    builder = _session_class().builder.appName("twinbus")
    submitted = _is_submitted()
    settings = dict(_ALWAYS) if submitted else _settings(folder, master)
    for name, value in {**settings, **(conf or {})}.items():
        builder = builder.config(name, value)
    with GatewayLaunch(), nullcontext() if submitted else _environment(folder):
        try:
            return builder.getOrCreate()
        except Exception as error:  # noqa: BLE001 - from Spark, py4j or Java
            # No `from error`: to print an error of py4j needs the JVM, which is stopped here.
            raise InvalidOperationError(
                f"Spark cannot be started: {reason_of(error)}. Check JAVA_HOME, the master and the "
                "settings of Spark"
            ) from None


def _refuse_connect() -> None:
    """Raise an error if pyspark creates sessions of Spark Connect only, in this process."""
    names = [name for name in _CONNECT if name in os.environ]
    if os.environ.get(_API_MODE, "").lower() == "connect":
        names.append(_API_MODE)
    if not names:
        return
    variables = " and ".join(names)
    raise InvalidOperationError(
        f"this process uses Spark Connect, whose driver is in another process: {variables} is set, "
        "by the environment or by a session of Spark Connect. Twinbus needs the driver in its own "
        f"process. Unset {variables}, or run `twinbus syphon` or `twinbus report` in a process "
        "without Spark Connect, and give the master of the cluster, such as spark://host:7077"
    )


def make_active(session: "SparkSession") -> None:
    """Make a session the active one of this thread, as every `createDataFrame` does.

    A stream belongs to the active session of the thread that starts it. An empty `createDataFrame`
    would set that session as well, but would take a second in a fresh JVM.
    """
    kind = type(session)
    kind._activeSession = session  # noqa: SLF001 - pyspark has no other way
    java = kind._get_j_spark_session_class(session._jvm)  # noqa: SLF001 - as above
    java.setActiveSession(session._jsparkSession)  # noqa: SLF001 - as above


def _is_submitted() -> bool:
    """Return whether spark-submit runs this process: it has started and configured Spark."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _settings(folder: Path, master: str | None) -> dict[str, str]:
    """Return the settings of a session that Twinbus starts."""
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
        settings |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        }
    return settings


@contextmanager
def _environment(folder: Path) -> "Iterator[None]":
    """Set the variables for Spark: where its Java and home are, and which Python workers use."""
    wanted = {"JAVA_HOME": str(make_java_home(folder / "java", find_java()))}
    if "PYSPARK_PYTHON" not in os.environ:
        wanted["PYSPARK_PYTHON"] = sys.executable
        home = None if "SPARK_HOME" in os.environ else make_spark_home(folder / "spark")
        wanted |= {"SPARK_HOME": str(home)} if home is not None else {}
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
