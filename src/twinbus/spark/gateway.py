"""Starts Spark's JVM; an interrupted or failed start leaves no process behind.

pyspark starts the JVM with `Popen` and returns the process when the JVM has connected, seconds
later. An exception during these seconds, such as KeyboardInterrupt after Ctrl-C, loses the process:
the JVM continues, cannot find the file that it must write, and prints a stack trace. Therefore
`GatewayLaunch` records the process at its start, puts it into its own process group, and kills that
group if the start does not succeed.

SIGINT still calls the handler of the application. If this handler raises, the JVM is killed first,
because pyspark removes the JVM's file while it handles the exception.
"""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, cast


class _NoRecordsOfPy4j(logging.Filter):
    """Drops what py4j logs through the root logger: a stack trace for every Ctrl-C."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "py4j" not in Path(record.pathname).parts


_SILENCE = _NoRecordsOfPy4j()


def silence_py4j() -> None:
    """Stop py4j's logging. Only commands and demos call this: applications keep their log."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_SILENCE)


class _NoCommandsOfPy4j(logging.Filter):
    """Drops the commands that py4j logs at DEBUG before it sends them to the JVM."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG


@contextmanager
def unlogged_commands() -> Iterator[None]:
    """Keep py4j from logging what it sends meanwhile: options with connection strings."""
    quiet = _NoCommandsOfPy4j()
    loggers = [logging.getLogger(f"py4j.{name}") for name in ("clientserver", "java_gateway")]
    for logger in loggers:
        logger.addFilter(quiet)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(quiet)


class GatewayLaunch:
    """A context manager around the start of a session; after an error it kills the JVM."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_forking = False  # the process may exist but is not recorded yet
        self._is_interrupt_due = False
        self._interrupt: BaseException | None = None
        self._handler_before: Any = None
        self._silenced = ExitStack()

    def __enter__(self) -> Self:
        self._module = cast("Any", import_module("pyspark.java_gateway"))  # an extra
        self._popen_before = self._module.Popen
        self._module.Popen = self._popen
        if threading.current_thread() is threading.main_thread():
            self._handler_before = signal.getsignal(signal.SIGINT)
            if callable(self._handler_before):
                signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._module.Popen = self._popen_before
        if error is not None:
            self._abandon()
        self._silenced.close()
        if self._handler_before is not None:  # pyspark has replaced the handler
            signal.signal(signal.SIGINT, self._handler_before)
        if self._interrupt is not None and error is not self._interrupt:
            raise self._interrupt from None  # pyspark failed while it cleaned up

    def _popen(self, *arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        """Start the JVM in place of pyspark."""
        self._is_forking = True
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command comes from pyspark
                *arguments, **options, process_group=0
            )
        finally:
            self._is_forking = False
        if self._is_interrupt_due:
            self._on_interrupt(signal.SIGINT, None)
        return self._process

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_forking:
            self._is_interrupt_due = True
            return
        try:
            self._handler_before(number, frame)
        except BaseException as error:
            self._interrupt = error
            if _SILENCE not in logging.getLogger().filters:
                logging.getLogger().addFilter(_SILENCE)
                self._silenced.callback(logging.getLogger().removeFilter, _SILENCE)
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._process is not None:
            _end(self._process)


def end_jvm() -> None:
    """Kill the JVM that pyspark started in this process, if there is one, and wait for its end.

    This never calls the JVM. A thread that was interrupted during a call cannot make another: its
    next call would read the reply of the interrupted call.
    """
    from pyspark import SparkContext  # noqa: PLC0415 - an extra that senders do not need

    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - no other way to ask
    if process is not None:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    from pyspark import SparkContext  # noqa: PLC0415 - as above
    from pyspark.sql import SparkSession  # noqa: PLC0415

    context = SparkContext._active_spark_context  # noqa: SLF001 - as above
    accumulators: Any = getattr(context, "_accumulatorServer", None)
    if accumulators is not None:  # it would print a stack trace when the JVM disconnects
        accumulators.handle_error = lambda *_: None
    if process.poll() is None:  # its id cannot be reused before this wait
        with suppress(ProcessLookupError):  # it has just ended
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    # Remove what would disturb the next start in this process.
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
    SparkContext._active_spark_context = None  # noqa: SLF001
    SparkSession._instantiatedSession = None  # noqa: SLF001
