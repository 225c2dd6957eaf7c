"""Counts operations in the client, for brokers without a ledger: Service Bus and RabbitMQ.

Azure Service Bus and RabbitMQ write no operations ledger. If their connection string has `Ledger=`,
Twinbus wraps the namespace in a `MeteredNamespace`: every process that uses the connection string
counts its own operations when they are answered, and writes the counts to the folder that `Ledger=`
names, in the schema of a broker's ledger. `twinbus report` adds them up.

Any thread may call `ask`. A thread of the ledger writes once a minute, if something was counted;
the rest is written when the namespace is closed or the process ends. An error of the ledger is
logged and never reaches a caller. A process that is killed loses the counts that it has not written
yet.
"""

import atexit
import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from twinbus.clock import Clock, to_us
from twinbus.errors import EntityNotFoundError, MessagingError
from twinbus.forking import on_fork
from twinbus.ledger import Ledger, LedgerKind, LedgerSize, beyond_bound
from twinbus.lifetimes import Closable
from twinbus.limits import (
    CLIENT_LEDGER_BUCKETS,
    CLIENT_LEDGER_BYTES,
    LEDGER_BUCKET,
    LEDGER_RETENTION,
    LEDGER_ROLL_INTERVAL,
)
from twinbus.loglines import facts
from twinbus.namespace.contract import Namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command, Send
from twinbus.protocol.meter import (
    Meter,
    MeterPeriod,
    found_nothing,
    load_of_exchange,
    meter_rows,
    purpose_of,
    purpose_of_send,
)
from twinbus.protocol.operations import EMPTY, Load, Operation, Purpose
from twinbus.protocol.table import row_of

R = TypeVar("R")
_log = logging.getLogger("twinbus.client")
_UNCOUNTED = (
    "an operation could not be counted because of an internal error, so the ledger lacks it. The "
    "operation itself is not affected; report the error as a defect of Twinbus"
)


class ClientLedger:
    """The operations that one namespace object of this process counted, and their files."""

    _open: ClassVar["WeakSet[ClientLedger]"] = WeakSet()

    def __init__(self, folder: Path, clock: Clock, *, max_bytes: int = CLIENT_LEDGER_BYTES) -> None:
        self._folder = folder
        self._clock = clock
        self._max_bytes = max_bytes
        self._begin()
        on_fork(self._begin)  # a forked process counts its own operations, in its own files
        self._open.add(self)

    def _begin(self) -> None:
        self._ledger = Ledger(self._folder, LedgerKind.OPERATIONS, LEDGER_RETENTION)
        self._size = LedgerSize(self._folder)
        self._meter = Meter(to_us(LEDGER_BUCKET), self._clock.wall_us())
        self._counting = threading.Lock()
        self._writing = threading.Lock()
        self._unwritten: list[MeterPeriod] = []
        self._is_sick = False
        self._is_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def count(self, operation: Operation) -> None:
        """Count an operation that was answered."""
        with self._counting:
            self._meter.turn_to(self._clock.wall_us())
            self._meter.count(operation)
            if self._thread is None and not self._is_ended.is_set():
                self._thread = threading.Thread(
                    target=self._roll, name="twinbus-client-ledger", daemon=True
                )
                self._thread.start()

    def _roll(self) -> None:
        while not self._is_ended.wait(LEDGER_ROLL_INTERVAL.total_seconds()):
            self.write()

    def write(self) -> None:
        """Write the counts since the last write. On an error, keep them for the next write."""
        with self._writing:
            with self._counting:
                self._unwritten += self._meter.take()
            if not self._unwritten:
                return
            try:
                self._ledger.write(meter_rows(self._unwritten), self._clock.wall_us())
                self._unwritten = []
                self._delete_oldest()
            except Exception as error:  # noqa: BLE001 - no error of the ledger may stop a client
                self._note_sick(error)
            else:
                self._is_sick = False

    def _delete_oldest(self) -> None:
        """Delete the oldest files beyond the size bound."""
        if self._size.total() <= self._max_bytes:
            return
        for file in beyond_bound([self._ledger.files()], self._max_bytes):
            file.path.unlink(missing_ok=True)  # other processes write here, and delete, too
            with suppress(OSError):  # the folder of the day has other files
                file.path.parent.rmdir()

    def _note_sick(self, error: Exception) -> None:
        """Log a failure once until a write works again, and every loss of counts."""
        was_sick, self._is_sick = self._is_sick, True
        lost = self._unwritten[:-CLIENT_LEDGER_BUCKETS]
        self._unwritten = self._unwritten[-CLIENT_LEDGER_BUCKETS:]
        if lost or not was_sick:
            _log.warning(
                "The ledger of operations in %s cannot be written: %s. Twinbus tries again every "
                "minute; check the folder's permissions and free space%s",
                self._folder,
                error,
                f". The counts of {len(lost)} periods are lost" if lost else "",
                extra=facts(event="client_ledger_trouble", reason=str(error), lost=len(lost)),
            )

    def close(self) -> None:
        """Write everything, and end the thread."""
        self._is_ended.set()
        self.write()

    @classmethod
    def write_all(cls) -> None:
        """Write what this process has counted."""
        for ledger in list(cls._open):
            ledger.write()


atexit.register(ClientLedger.write_all)


class MeteredNamespace(Closable):
    """Wraps a namespace and counts its commands."""

    def __init__(self, namespace: Namespace, ledger: ClientLedger) -> None:
        self._namespace = namespace
        self._ledger = ledger

    @property
    def id(self) -> str:
        """The unique id of the namespace; empty where it is unknown."""
        return self._namespace.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of its engine; counting in the client adds none."""
        return self._namespace.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; its future is done after the command was counted."""
        counted: Future[R] = Future()
        counted.set_running_or_notify_cancel()  # a submitted command cannot be cancelled

        def complete(answered: "Future[R]") -> None:
            error = answered.exception()
            if error is None:
                reply = answered.result()
                self._count(command, reply)
                counted.set_result(reply)
            else:
                self._count_failure(command, error)
                counted.set_exception(error)

        self._namespace.submit(command).add_done_callback(complete)
        return counted

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        try:
            reply = self._namespace.ask(command, timeout_s)
        except MessagingError as error:
            self._count_failure(command, error)
            raise
        self._count(command, reply)
        return reply

    def _count(self, command: Command[Any], reply: object) -> None:
        try:
            self._ledger.count(_answered(command, reply))
        except Exception:  # noqa: BLE001 - the caller gets the reply even if counting fails
            _log.exception(_UNCOUNTED)

    def _count_failure(self, command: Command[Any], error: BaseException) -> None:
        if not isinstance(error, MessagingError):
            return
        try:
            self._ledger.count(_refused(command, error))
        except Exception:  # noqa: BLE001 - as above
            _log.exception(_UNCOUNTED)

    def close(self) -> None:
        """Close the namespace, then write the counts."""
        self._namespace.close()
        self._ledger.close()


def _answered(command: Command[Any], reply: object) -> Operation:
    is_idle = found_nothing(command, reply)
    path, kind, purpose = _described(command, is_idle=is_idle)
    return Operation(
        path, kind, purpose, EMPTY if is_idle else "ok", load_of_exchange(command, reply)
    )


def _refused(command: Command[Any], error: MessagingError) -> Operation:
    path, kind, purpose = _described(command)
    known = "" if isinstance(error, EntityNotFoundError) else path
    return Operation(known, kind, purpose, error.code, Load())


def _described(command: Command[Any], *, is_idle: bool = False) -> tuple[str, str, Purpose]:
    """Return the path, kind and purpose that a command is counted under."""
    row = row_of(command)
    path = row.path_of(command)
    if isinstance(command, Send):
        return path, row.kind, purpose_of_send(command)
    return path, row.kind, purpose_of(command, path, is_idle=is_idle)
