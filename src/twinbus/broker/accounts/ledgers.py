"""The ledgers of a namespace: metered operations, and the trail of messages.

The thread with the turn counts operations and follows messages in memory. At intervals the result
is written, by a separate thread if there are threads. What cannot be written is kept for the next
time, and never blocks the broker.

A kill loses nothing of the trail: `covered` is the last record of the log whose trail was written,
and the records after it are followed again at the start. A kill loses counts that were not written
yet.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from twinbus.broker.accounts import trail
from twinbus.broker.accounts.trail import Step, Trail, beginning, gap, rows_in
from twinbus.broker.store.log_format import Part, Record
from twinbus.clock import to_us
from twinbus.ledger import (
    Ledger,
    LedgerEnd,
    LedgerFile,
    LedgerKind,
    LedgerSettings,
    LedgerSize,
    beyond_bound,
    newest_row,
)
from twinbus.limits import (
    DAY_US,
    INVENTORY_INTERVAL,
    LEDGER_BUFFERED_ROWS,
    LEDGER_FILE_ROWS,
    LEDGER_PATIENCE_US,
    LEDGER_PAUSE_US,
    NEVER_US,
    SECOND_US,
)
from twinbus.loglines import facts
from twinbus.message import Int64s
from twinbus.protocol.meter import Meter, MeterPeriod, meter_rows

Standing = Iterable[tuple[int, Int64s]]  # queue numbers, each with the numbers of its messages
FIXED_SETTINGS = ("is_on", "messages", "bucket")  # of LedgerSettings; they change only at a start
_log = logging.getLogger("twinbus.broker")


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identity of a log, and how much of it was lost."""

    id: str  # of the namespace, created with it
    last_record: int  # the last record found in the log
    lost_until: int  # the last record that it once had; equal: nothing is lost


@dataclass(frozen=True, slots=True)
class _LedgerWrite:
    """The rows to be written."""

    buckets: Sequence[MeterPeriod]
    steps: Sequence[Step]
    record: int  # the trail is complete up to this record
    now: int


class Ledgers:
    """Writes the ledgers of one namespace."""

    def __init__(
        self, directory: Path, settings: LedgerSettings, now: int, *, background: bool
    ) -> None:
        self.settings = settings
        self._operations = Ledger(directory, LedgerKind.OPERATIONS, settings.retention)
        self._messages = Ledger(directory, LedgerKind.MESSAGES, settings.retention)
        self._size = LedgerSize(directory)
        self.meter = Meter(to_us(settings.bucket), now)
        self.trail: Trail | None = None
        self._roll_us = to_us(settings.roll_interval)
        self._next_roll = now + self._roll_us
        self._next_stock = now
        self._thread = (
            ThreadPoolExecutor(1, "twinbus-ledger") if background and settings.is_on else None
        )
        self._writing: Future[None] | None = None
        self._writing_since = 0
        self._now = now
        self._buckets: list[MeterPeriod] = []  # this and the next are used by the thread only
        self._steps: list[Step] = []
        self._covered = self._messages.read_mark()
        self._log_id = self._messages.read_log()  # empty: written by an earlier version
        self._handed_over = self._covered
        self._is_sick = False

    def reconfigure(self, settings: LedgerSettings) -> None:
        """Apply new settings, except those that only change at a start."""
        fixed = {name: getattr(self.settings, name) for name in FIXED_SETTINGS}
        self.settings = replace(settings, **fixed)
        self._roll_us = to_us(settings.roll_interval)
        self._next_roll = min(self._next_roll, self._now + self._roll_us)
        for ledger in (self._operations, self._messages):
            ledger.retention = settings.retention

    # -- the trail -----------------------------------------------------------------------------

    @property
    def covered(self) -> int:
        """The last record of the log whose trail is written."""
        return self._covered

    @property
    def log_id(self) -> str:
        """The id of the log that the ledger is about; empty if unknown."""
        return self._log_id

    def knows(self, log: str) -> bool:
        """Return whether the ledger is about this log."""
        return self._log_id == log

    def may_forget(self, record: int) -> bool:
        """Return whether the log may drop a record; if it is too early, write the trail at once.

        A failing disk here must not make the log grow forever.
        """
        if self.trail is None or record <= self._covered or self._is_sick or self._hangs:
            return True
        if record > self._handed_over:
            self._next_roll = 0
        return False

    def begin_trail(
        self, begun: Trail, untold: Sequence[Record], lineage: Lineage, now: int
    ) -> None:
        """Begin with the records that the log still has, at a start or after self-healing."""
        if not (self.settings.is_on and self.settings.messages):
            return
        self.trail = begun
        last = lineage.last_record
        if lineage.lost_until > last:
            self._state(trail.restored(now, last + 1, lineage.lost_until), self._covered, lineage)
        elif self._covered > last or self._log_id not in ("", lineage.id):
            self._covered = self._handed_over = last
            self._state(beginning(now), last, lineage)
        self._log_id = lineage.id
        begun.last_record = min(self._covered, last)
        for record in untold:
            self.follow(record.number, [part for part, _ in record.parts], now)
        begun.last_record = max(begun.last_record, lineage.lost_until)

    def _state(self, step: Step, covered: int, lineage: Lineage) -> None:
        """Write at once which log the next rows are about: a kill must not mix up two logs."""
        try:
            self._messages.write(trail.table_of([step], lambda _: ""), step.at)
            self._messages.put_mark(covered, lineage.id)
        except OSError as error:
            _log.warning("The ledger in %s cannot be written: %s", self._messages.folder, error)

    def follow(self, record: int, parts: Iterable[Part], now: int) -> None:
        """Add a durable record to the trail; an error here must not disturb the broker."""
        if self.trail is None:
            return
        try:
            if record > self.trail.last_record + 1:  # records were dropped or damaged
                self.trail.note_gap(now, record - 1)
            self.trail.follow(record, parts, now)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("Record %d of the log cannot be followed in the ledger", record)
            self.trail.note_gap(now, record)
            self.trail.last_record = record

    # -- rolling -------------------------------------------------------------------------------

    @property
    def next_event(self) -> int:
        """The time at which `turn` has something to do."""
        return self._next_roll if self.settings.is_on else NEVER_US

    def shift(self, by: int) -> None:
        """Move the deadlines and begin a new bucket, because the wall clock was set."""
        self._next_roll += by
        self._next_stock += by
        self._writing_since += by
        self._now += by
        self.meter.shift(by)

    def begin_turn(self, now: int) -> None:
        """Count the following operations in the bucket of this time."""
        self._now = now
        if self.meter.turn_to(now) and not self.settings.is_on:
            self.meter.take()

    def is_due(self, now: int) -> bool:
        """Return whether there is something to do after a turn: it is time, or a file is full."""
        if now < self._next_roll and (self.trail is None or self.trail.rows < LEDGER_FILE_ROWS):
            return False
        return self.settings.is_on

    def end_turn(self, now: int, record: int, standing: Callable[[], Standing | None]) -> None:
        """Do what is due: `record` is the last record; `standing` returns the present messages."""
        if now >= self._next_stock:
            self.take_stock(now, record, standing())
        self._roll(now)

    def take_stock(self, now: int, record: int, standing: Standing | None) -> None:
        """Write an inventory of the broker's messages, if it is certain."""
        if self.trail is not None and standing is not None:
            self._next_stock = now + to_us(INVENTORY_INTERVAL)
            self.trail.take_stock(standing, now, record)

    @property
    def _hangs(self) -> bool:
        """Whether a write takes too long to wait for."""
        return self._is_writing and self._now - self._writing_since > LEDGER_PATIENCE_US

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _roll(self, now: int) -> None:
        if self._is_writing:  # rows that arrive meanwhile are written next time
            self._next_roll = now + LEDGER_PAUSE_US
            if self.trail is not None and self.trail.rows > LEDGER_BUFFERED_ROWS:
                self.trail.give_up(now)
            return
        self._next_roll, self._writing_since = now + self._roll_us, now
        steps = self.trail.take() if self.trail is not None else []
        self._handed_over = self.trail.last_record if self.trail is not None else 0
        job = _LedgerWrite(self.meter.take(), steps, self._handed_over, now)
        if not (job.buckets or job.steps or job.record > self._covered or self._is_sick):
            return
        if self._thread is None:
            self._write(job)
        else:
            self._writing = self._thread.submit(self._write, job)

    def close(self, now: int) -> None:
        """Write everything now."""
        self._wait()
        if self.settings.is_on:
            self._roll(now)
        self._wait()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _wait(self) -> None:
        """Wait for a write to end, for a limited time."""
        if self._writing is not None:
            wait([self._writing], LEDGER_PATIENCE_US / SECOND_US)

    # -- writing, in the writer thread ---------------------------------------------------------

    def _write(self, job: _LedgerWrite) -> None:
        self._buckets += job.buckets
        self._steps += job.steps
        try:
            if self._buckets:
                self._operations.write(meter_rows(self._buckets), job.now)
                self._buckets = []
            self._write_trail(job)
        except Exception as error:  # noqa: BLE001 - an error must not stop the broker
            self._note_sick(error, self._give_up_oldest(job.now))
            return
        if self._is_sick:
            self._is_sick = False
            _log.warning(
                "The ledger in %s can be written again",
                self._messages.folder.parent,
                extra=facts(event="ledger_trouble_ended"),
            )
        try:
            self._delete_oldest(job.now)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning(
                "Old files of the ledgers in %s cannot be deleted, so that they use more than "
                "max_bytes: %s. Delete them by hand",
                self._messages.folder.parent,
                error,
            )

    def _note_sick(self, error: Exception, lost: int) -> None:
        """Log a failure once until a write succeeds, and every loss of rows."""
        was_sick, self._is_sick = self._is_sick, True
        if lost or not was_sick:
            _log.warning(
                "The ledger in %s cannot be written and is tried again: %s%s",
                self._messages.folder.parent,
                error,
                f"; {lost} rows of it were dropped" if lost else "",
                extra=facts(event="ledger_trouble", reason=str(error), lost_rows=lost),
            )

    def _write_trail(self, job: _LedgerWrite) -> None:
        if self._steps and self.trail is not None:
            rows = trail.table_of(self._steps, self.trail.path)
            if rows.num_rows:
                self._messages.write(rows, job.now)
            self._steps = []
        if job.record > self._covered:
            self._messages.put_mark(job.record, self._log_id)
            self._covered = job.record

    def _delete_oldest(self, now: int) -> None:
        """Delete the oldest files beyond the size limit, and record in the trail what it covers.

        The trail first records a gap for the records of these files: otherwise a message whose end
        was in a deleted file would look lost after a kill.
        """
        deleted, self._messages.deleted = self._messages.deleted, None
        if deleted is not None:  # by retention: complete days
            self._note_deleted(LedgerEnd((deleted.at // DAY_US + 1) * DAY_US, deleted.record), now)
        max_bytes = self.settings.max_bytes
        if self._size.total() <= max_bytes:
            return
        messages = self._messages.files()
        files = beyond_bound([self._operations.files(), messages], max_bytes)
        of_messages = [file for file in messages if file in files]
        if of_messages:
            self._note_deleted(self._end_of(of_messages, now), now)
        for file in files:
            file.path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder still has other files of the day
                file.path.parent.rmdir()
        if files:
            self._log_deleted(files)

    def _end_of(self, files: Sequence[LedgerFile], now: int) -> LedgerEnd:
        """Return the newest row of files; a file that cannot be read may contain any row."""
        ends = [newest_row(file.path) for file in files]
        at = max((end.at for end in ends if end is not None), default=now)
        return LedgerEnd(at, max(self._covered if end is None else end.record for end in ends))

    def _note_deleted(self, end: LedgerEnd, now: int) -> None:
        self._messages.write(trail.table_of([gap(end.at, end.record)], lambda _: ""), now)

    def _log_deleted(self, files: Sequence[LedgerFile]) -> None:
        size, last = sum(file.size for file in files), files[-1].until
        _log.warning(
            "The ledgers in %s exceeded max_bytes (%d): the %d oldest files with %d bytes were "
            "deleted, with rows up to %s. Reports will not cover that time",
            self._messages.folder.parent,
            self.settings.max_bytes,
            len(files),
            size,
            last,
            extra=facts(
                event="ledger_deleted",
                directory=str(self._messages.folder.parent),
                files=len(files),
                bytes=size,
                until=last,
                max_bytes=self.settings.max_bytes,
            ),
        )

    def _give_up_oldest(self, now: int) -> int:
        """Keep rows in memory up to a bound; return how many were dropped."""
        too_many = sum(map(rows_in, self._steps)) - LEDGER_BUFFERED_ROWS
        given_up, record = 0, 0
        while given_up < too_many:
            step = self._steps.pop(0)
            given_up, record = given_up + rows_in(step), step.record
        if given_up:
            self._steps.insert(0, gap(now, record))
        return given_up
