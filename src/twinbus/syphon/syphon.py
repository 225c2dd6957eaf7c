"""The syphon: a Structured Streaming query that brings every diverted message home.

`Syphon` starts the query, watches it, restarts it after an error, and reports its progress. Spark's
processes do the work (syphon_query.py) and report through a folder that all share (desk.py).
"""

import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinbus.backoff import Backoff
from twinbus.client.manager import NamespaceManager
from twinbus.clock import to_us
from twinbus.connection import ConnectionString
from twinbus.entities import is_backlog_folder
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessagingError
from twinbus.lifetimes import Closable
from twinbus.limits import (
    DEFAULT_RETRY_INTERVAL,
    LAST_BATCH_S,
    LEDGER_LOOK_S,
    MAX_LEASE_DURATION,
    MAX_LEASE_MESSAGES,
    MAX_RANGES_PER_QUEUE,
    MAX_RESTART_PAUSE,
    MAX_RETRY_INTERVAL,
    MAX_SPARK_STARTS,
    MIN_RETRY_INTERVAL,
    MIN_SYPHON_LEASE,
    QUERY_LOOK_S,
    RANGE_MESSAGES,
    SECOND_US,
    SPARK_START_S,
    SYPHON_LEASE,
)
from twinbus.locations import HadoopPath, as_uri
from twinbus.namespace.opening import open_namespace
from twinbus.pairing.backlog_queues import BacklogQueues, find_backlog_queues
from twinbus.pairing.pairing import SendAvailabilityPairing
from twinbus.protocol.capabilities import Capability, unsupported
from twinbus.protocol.keys import Claim
from twinbus.server.private import Access
from twinbus.spark.gateway import unlogged_commands
from twinbus.spark.reasons import reason_of
from twinbus.spark.session import BorrowedSession, make_active
from twinbus.syphon.desk import Desk, SyphonProgress
from twinbus.syphon.doors import WorkerDoors, check_master
from twinbus.syphon.planner import PlannerSettings
from twinbus.syphon.queue_watch import QueueWatch
from twinbus.syphon.spool import LedgerSpool
from twinbus.syphon.transfers import TransferLedger
from twinbus.values import shown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from twinbus.syphon.transform_query import Transform

_log = logging.getLogger("twinbus.syphon")
_PRIMARY_ACCESS = Access((Claim.SEND, Claim.TRANSFER))  # on every entity
_RESTARTS = Backoff(SECOND_US, to_us(MAX_RESTART_PAUSE))  # of a failed query


@dataclass(frozen=True, slots=True, kw_only=True)
class SyphonSettings:
    """What a syphon brings home, and how."""

    primary: str = field(repr=False)  # connection strings
    secondary: str = field(repr=False)
    queues: tuple[str, ...]  # paths of the backlog queues
    extra_queues: tuple[str, ...] = ()  # a subset: only messages with x-ms-path are moved
    retry_interval: timedelta = DEFAULT_RETRY_INTERVAL  # of a destination that failed
    lease: timedelta = SYPHON_LEASE  # how long after a kill another syphon takes over
    range_messages: int = RANGE_MESSAGES  # per queue and batch
    ranges_per_queue: int = 1  # in parallel; with more than one, the order of a client is lost
    ledger: Path | str | None = None  # folder or URI of the ledger of transfers; None: no ledger
    transform: "str | Transform | None" = None  # module:function, or a function
    master: str | None = None  # Spark's master URL; None: this machine
    conf: Mapping[str, str] = field(default_factory=dict)  # Spark's configuration

    def __post_init__(self) -> None:
        _check_span("retry_interval", self.retry_interval, MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL)
        _check_span("lease", self.lease, MIN_SYPHON_LEASE, MAX_LEASE_DURATION)
        check_master(self.master or "local", self.primary, self.secondary)
        _check_count("ranges_per_queue", self.ranges_per_queue, MAX_RANGES_PER_QUEUE)
        _check_count("range_messages", self.range_messages, MAX_LEASE_MESSAGES)
        if not isinstance(self.queues, tuple) or len({q.lower() for q in self.queues}) != len(
            self.queues
        ):
            raise InvalidArgumentError(
                f"queues is {shown(self.queues)}; it must be a tuple of paths without duplicates"
            )
        if not self.queues:
            raise InvalidArgumentError(
                "there are no backlog queues. Pairing creates them. If an application has paired, "
                "use the same name of the primary as that application (Name=... in the connection "
                "string)"
            )

    @property
    def secondary_access(self) -> Access:
        """The workers' access to the secondary: read and settle the backlog."""
        folders = {queue.lower().rpartition("/")[0] for queue in self.queues}
        folder = folders.pop() if len(folders) == 1 else ""
        return Access((Claim.LISTEN,), folder if is_backlog_folder(folder) else None)

    def planner(self, owner: str) -> PlannerSettings:
        """Return the settings of the planner."""
        return PlannerSettings(
            owner=owner,
            queues=self.queues,
            retry_interval=self.retry_interval,
            lease=self.lease,
            range_messages=self.range_messages,
            ranges_per_queue=self.ranges_per_queue,
            extra_queues=self.extra_queues,
        )


def _check_span(name: str, span: timedelta, low: timedelta, high: timedelta) -> None:
    if not low <= span <= high:
        raise InvalidArgumentError(f"{name} is {span}; it must be from {low} to {high}")


def _check_transformable(secondary: str) -> None:
    """Raise if the secondary has no ranges; a transform needs them.

    Without ranges, each task receives, sends and settles its messages by itself.
    """
    connection = ConnectionString.parse(secondary)
    with closing(open_namespace(connection)) as namespace:
        if Capability.RANGES not in namespace.capabilities:
            raise unsupported(connection.name or "the secondary", Capability.RANGES, "A transform")


def _check_count(name: str, count: int, most: int) -> None:
    if type(count) is not int or not 1 <= count <= most:
        raise InvalidArgumentError(f"{name} is {count!r}; it must be from 1 to {most}")


def note_extra_queues(manager: NamespaceManager, queues: BacklogQueues) -> list[str]:
    """Return a warning for each extra backlog queue with messages: they are not brought home."""
    lines = []
    for path in queues.extra.values():
        count = manager.get_runtime_properties(path).active_message_count
        if count:
            lines.append(
                f"{path} has {count:,} message(s) and is not drained: its index is not below the "
                "number of backlog queues. `twinbus syphon --include-extra-queues` drains it"
            )
    return lines


class Syphon(Closable):
    """A running syphon; the end of a `with` block stops it after the current batch."""

    def __init__(
        self,
        settings: SyphonSettings,
        *,
        once: bool = False,
        watch: QueueWatch | None = None,
        on_failure: Callable[[str], None] | None = None,  # gets the reason if the syphon fails
    ) -> None:
        self._settings = settings
        self._once = once
        self._on_failure = on_failure
        self._folder = tempfile.TemporaryDirectory(
            prefix="twinbus-syphon-", ignore_cleanup_errors=True
        )
        self._desk = Desk(Path(self._folder.name))
        self._owner = f"syphon {secrets.token_hex(8)}"
        self._spool = LedgerSpool() if isinstance(settings.ledger, str) else None
        self._transfers = TransferLedger(self._ledger_folder)
        self._next_roll = 0.0
        self._noted = 0
        self._starts = 0  # restarts of Spark since the last batch
        self._batches_at_start = 0
        self._leaving = threading.Event()  # set when no query may start any more
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._last_progress: SyphonProgress | None = None
        self._query: StreamingQuery | None = None
        self._spark: BorrowedSession | None = None
        self._doors = WorkerDoors()
        try:
            self._spark = BorrowedSession(settings.master, settings.conf)
            self._open_doors(self._spark.session.sparkContext.master or "")
            self._query = self._start_query(self._spark.session)
        except BaseException as error:
            self._release_all()
            if isinstance(error, MessagingError) or not isinstance(error, Exception):
                raise
            raise MessagingError(
                f"Spark cannot run the syphon: {reason_of(error)}. Check the master and the "
                "settings of Spark, then start the syphon again"
            ) from error
        self._watcher = threading.Thread(target=self._watch, name="twinbus-syphon", daemon=True)
        self._watcher.start()
        if watch is not None and not watch.is_complete:
            threading.Thread(
                target=self._watch_queues, args=(watch,), name="twinbus-syphon-queues", daemon=True
            ).start()

    @property
    def _ledger_folder(self) -> Path | None:
        """The local folder of the ledger of transfers."""
        if self._spool is not None:
            return self._spool.folder
        ledger = self._settings.ledger
        return ledger.absolute() if isinstance(ledger, Path) else None

    def _open_doors(self, master: str) -> None:
        """Open private doors for the workers to namespaces that are embedded in this process."""
        settings, doors = self._settings, self._doors
        check_master(master, settings.primary, settings.secondary)
        self._primary = doors.connection_for(settings.primary, _PRIMARY_ACCESS)
        self._secondary = doors.connection_for(settings.secondary, settings.secondary_access)

    def _start_query(self, session: "SparkSession") -> "StreamingQuery":
        from twinbus.syphon import (  # noqa: PLC0415 - needs Spark, which has been checked by now
            syphon_query,
            transform_query,
        )

        settings, transform = self._settings, self._settings.transform
        if isinstance(transform, str):
            transform = transform_query.load_transform(transform)
        source = syphon_query.SyphonDataSource
        if transform is not None:
            _check_transformable(self._secondary)
            source = transform_query.TransformDataSource
        make_active(session)  # `start` uses the session of this thread
        session.dataSource.register(source)
        options = syphon_query.SyphonOptions(
            self._primary,
            self._secondary,
            self._desk.folder,
            settings.planner(self._owner),
            None if self._spool is not None else self._ledger_folder,
            self._spool.folder if self._spool is not None else None,
        ).to_options()
        with unlogged_commands():
            rows = source.observed(
                session.readStream.format(source.name()).options(**options).load()
            )
        if transform is not None:
            rows = transform(rows)
        checkpoint = self._desk.folder / f"checkpoint-{secrets.token_hex(4)}"
        with unlogged_commands():
            writer = rows.writeStream.format(source.name()).options(**options)
        writer = writer.queryName(self._owner).option("checkpointLocation", as_uri(checkpoint))
        if self._once:
            writer = writer.trigger(availableNow=True)
        return writer.start()

    # -- progress ----------------------------------------------------------------------------------

    @property
    def progress(self) -> SyphonProgress:
        """The current progress, or the final one."""
        return self._last_progress or self._desk.progress()[0]

    @property
    def query_progress(self) -> Any:
        """Spark's report of the last batch: a StreamingQueryProgress, or None."""
        return self._query.lastProgress if self._query is not None else None

    def wait_until_running(self) -> None:
        """Wait until the syphon has polled the backlog queues for the first time, or has ended."""
        deadline = SPARK_START_S
        while not self.progress.at:
            if self._ended.wait(QUERY_LOOK_S):
                self._raise()
                return
            deadline -= QUERY_LOOK_S
            if deadline <= 0:
                raise MessagingError(
                    f"Spark did not start within {SPARK_START_S:.0f} s. Look at the load of the "
                    "machine and at the log of Spark, then start the syphon again"
                )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; return whether the syphon has ended."""
        ended = self._ended.wait(timeout_s)
        if ended:
            self._raise()
        return ended

    def _raise(self) -> None:
        if self._error is not None:
            raise MessagingError(
                f"the syphon failed: {reason_of(self._error)}. Messages that are not home yet stay "
                "in the backlog until a syphon runs again"
            ) from self._error

    # -- running -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Log the notes of the planner, and restart the query or Spark after a failure."""
        logged = ""
        while True:
            try:
                self._watch_query()
                break
            except Exception as trouble:  # noqa: BLE001 - any error of Spark; `wait` raises it
                self._error = trouble
            if self._is_spark_alive():  # not an error of Spark: a file could not be read
                reason, self._error = reason_of(self._error), None
                if reason != logged:
                    _log.error(
                        "The syphon runs, but its progress cannot be read: %s. It tries again. "
                        "Check the disk with the folder for temporary files",
                        reason,
                    )
                logged = reason
            elif not self._start_spark_again():
                reason = (
                    f"Spark has stopped, and the syphon with it: {reason_of(self._error)}. Look at "
                    "the log of Spark"
                )
                self._error = InvalidOperationError(reason)
                _log.error("%s", reason)
                break
        with suppress(OSError):  # the last notes
            self._pass_notes_on()
        self._ended.set()
        if self._error is not None and self._on_failure is not None and not self._leaving.is_set():
            self._on_failure(reason_of(self._error))

    def _is_spark_alive(self) -> bool:
        assert self._spark is not None
        try:
            self._spark.check()
        except Exception:  # noqa: BLE001 - of py4j, when Java has died
            return False
        return True

    def _start_spark_again(self) -> bool:
        """Restart Spark after its JVM died; return False if the syphon must end instead.

        A session that the application started is not restarted. After MAX_SPARK_STARTS starts
        without a new batch, the syphon gives up. Messages that the dead query had leased wait until
        its leases expire; then this or another syphon leases them.
        """
        assert self._spark is not None
        if self._once or not self._spark.is_own:
            return False
        while True:
            with suppress(OSError):
                batches = self.progress.batches
                if batches != self._batches_at_start:
                    self._starts, self._batches_at_start = 0, batches
            self._starts += 1
            if self._starts > MAX_SPARK_STARTS:
                return False
            _log.error("Spark's JVM died, and the syphon restarts it: %s", reason_of(self._error))
            if self._leaving.wait(_RESTARTS.pause_us(self._starts) / SECOND_US):
                return False
            try:
                self._spark.abandon()
                self._spark = BorrowedSession(self._settings.master, self._settings.conf)
                self._query = self._start_query(self._spark.session)
            except Exception as trouble:  # noqa: BLE001 - as above
                self._error = trouble
            else:
                self._error = None
                return True

    def _watch_query(self) -> None:
        """Restart the query after errors until the syphon ends; raise if Spark has stopped."""
        failures, seen = 0, 0
        assert self._spark is not None
        while not self._stopping.wait(QUERY_LOOK_S):
            self._pass_notes_on()
            self._roll_ledger()
            if self._query is not None and self._query.isActive:
                continue
            error = self._query.exception() if self._query is not None else self._error
            if error is None and not self._once and not self._leaving.is_set():
                self._error = InvalidOperationError(
                    "its streaming query was stopped by another part of this application. Start "
                    "the syphon again, and stop it with its own stop()"
                )
                _log.error("The syphon ended: %s", self._error)
            if error is None:
                return
            self._error = error
            if self._once:
                return
            batches = self.progress.batches
            failures, seen = (failures + 1 if batches == seen else 1), batches
            _log.error("Spark stopped the query, and the syphon restarts it: %s", reason_of(error))
            if self._leaving.wait(_RESTARTS.pause_us(failures) / SECOND_US):
                return
            try:
                self._query = self._start_query(self._spark.session)
                self._error = None
            except Exception as trouble:  # noqa: BLE001 - Spark may have died again
                self._spark.check()
                self._query, self._error = None, trouble

    def _watch_queues(self, watch: QueueWatch) -> None:
        """Add backlog queues that are created while the syphon runs, until all exist."""
        while not watch.is_complete and not self._leaving.wait(QUERY_LOOK_S):
            try:
                found = watch.new_queues(time.monotonic())
                if found:
                    self._desk.add_queues(found)
                    _log.info("Further backlog queues were created: %s", ", ".join(found))
            except Exception as error:  # noqa: BLE001 - retried
                if not self._leaving.is_set():
                    _log.warning(
                        "The backlog queues cannot be listed; the syphon tries again: %s", error
                    )

    def _roll_ledger(self, *, at_once: bool = False) -> None:
        """Turn the workers' journals into ledger files; an error here does not stop the syphon."""
        if not at_once and time.monotonic() < self._next_roll:
            return
        self._next_roll = time.monotonic() + LEDGER_LOOK_S
        try:
            self._transfers.roll(at_once=at_once)
            if self._spool is not None and self._spark is not None:
                target = HadoopPath(self._spark.session, str(self._settings.ledger))
                self._spool.copy_to(target, datetime.now(UTC).date())
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning(
                "The ledger of transfers cannot be written: %s. The syphon continues to bring "
                "messages home, and tries to write the ledger again",
                reason_of(error),
            )

    def _pass_notes_on(self) -> None:
        for note in self._desk.progress()[1]:
            if note.number > self._noted:
                _log.log(note.level, "%s", note.text)
                self._noted = note.number

    def stop(self) -> None:
        """Finish the current batch, then end."""
        if self._stopping.is_set():
            return
        self._leaving.set()
        self._desk.ask_to_stop()
        waited_s = 0.0
        while not self.progress.is_stopped and waited_s < LAST_BATCH_S:
            if self._ended.wait(QUERY_LOOK_S):
                break
            waited_s += QUERY_LOOK_S
        self._stopping.set()
        self._watcher.join()
        self._release_all()

    close = stop

    def _release_all(self) -> None:
        with suppress(Exception):  # Spark may have stopped
            if self._query is not None:
                self._query.stop()
        self._roll_ledger(at_once=True)
        if self._spool is not None:
            self._spool.close()
        if self._spark is not None:
            self._spark.give_back()
        self._doors.close()
        self._last_progress = self.progress
        self._folder.cleanup()


def start_for(pairing: SendAvailabilityPairing) -> Syphon:
    """Start the syphon of a pairing in its application; `enable_syphon=True` calls this."""
    primary, secondary = pairing.primary.connection, pairing.secondary.connection
    if primary is None or secondary is None:
        raise InvalidOperationError(
            "the workers of the syphon need connection strings; create the factories with "
            "from_connection_string, or pass another syphon=..."
        )
    manager, options = pairing.options.secondary_namespace_manager, pairing.options
    wanted = options.wanted_backlog_queues

    def find() -> Iterable[str]:
        return find_backlog_queues(manager, pairing.identity, wanted).paths.values()

    found = find_backlog_queues(manager, pairing.identity, wanted)
    for line in note_extra_queues(manager, found):
        _log.warning("%s", line)
    syphon = Syphon(
        SyphonSettings(
            primary=primary.to_text(),
            secondary=secondary.to_text(),
            queues=tuple(found.paths.values()),
            ledger=options.ledger,
        ),
        watch=QueueWatch(found.paths.values(), wanted, find),
        on_failure=pairing.report_syphon_end,
    )
    try:
        syphon.wait_until_running()
    except BaseException:
        syphon.stop()
        raise
    return syphon
