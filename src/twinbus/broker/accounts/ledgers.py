"""The ledgers of a namespace: metered operations, and the trail of messages.

The trail records when each message was accepted and how it ended. The thread with the turn counts
operations and collects the trail in memory. At each roll interval, a ledger thread writes both to
files; without threads (InlineWriter), the thread with the turn writes them. Rows of the trail that
cannot be written stay in memory, up to a bound, until the next roll. A write never blocks the
turns.

The trail survives a kill: `covered_record` is the last record of the log whose trail is written,
and the next start derives the trail of the later records from the log again. Operation counts that
were not written are lost.
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

PresentMessages = Iterable[
    tuple[int, Int64s]
]  # queue numbers, each with the numbers of its messages
FIXED_SETTINGS = ("is_on", "messages", "bucket")  # of LedgerSettings; they change only at a start
_log = logging.getLogger("twinbus.broker")


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identity of a log, and which records at its end are lost."""

    id: str  # the id of the namespace to which the log belongs
    last_record: int  # the last record found in the log
    lost_until: int  # the last record that the log ever had; equal to `last_record` if none is lost


@dataclass(frozen=True, slots=True)
class _LedgerWrite:
    """What one roll hands to the thread that writes."""

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
        self._next_inventory = now
        self._thread = (
            ThreadPoolExecutor(1, "twinbus-ledger") if background and settings.is_on else None
        )
        self._writing: Future[None] | None = None
        self._writing_since = 0
        self._now = now
        # Only the thread that writes uses these two.
        self._buckets: list[MeterPeriod] = []
        self._steps: list[Step] = []
        self._covered_record = self._messages.read_mark()
        self._log_id = self._messages.read_log()  # empty: written by an earlier version
        self._handed_over = self._covered_record
        self._is_failing = False

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
    def covered_record(self) -> int:
        """The last record of the log whose trail is in the ledger files."""
        return self._covered_record

    @property
    def log_id(self) -> str:
        """The id of the log that the ledger is about; empty if unknown."""
        return self._log_id

    def knows(self, log: str) -> bool:
        """Return whether the ledger is about this log."""
        return self._log_id == log

    def may_forget(self, record: int) -> bool:
        """Return whether the log may drop the records up to this one.

        It may if the ledger has their trail. If not, schedule a write and return False. But if the
        ledger cannot be written, return True: otherwise a failing disk of the ledger would make the
        log grow without bound.
        """
        if self.trail is None or record <= self._covered_record or self._is_failing or self._hangs:
            return True
        if record > self._handed_over:
            self._next_roll = 0
        return False

    def begin_trail(
        self, begun: Trail, uncovered_records: Sequence[Record], lineage: Lineage, now: int
    ) -> None:
        """Start the trail with the records of the log that the ledger does not cover.

        The recovery calls this at a start and after each self-healing restart.
        """
        if not (self.settings.is_on and self.settings.messages):
            return
        self.trail = begun
        last = lineage.last_record
        if lineage.lost_until > last:
            self._write_lineage(
                trail.restored(now, last + 1, lineage.lost_until), self._covered_record, lineage
            )
        elif self._covered_record > last or self._log_id not in ("", lineage.id):
            self._covered_record = self._handed_over = last
            self._write_lineage(beginning(now), last, lineage)
        self._log_id = lineage.id
        begun.last_record = min(self._covered_record, last)
        for record in uncovered_records:
            self.add_record(record.number, [part for part, _ in record.parts], now)
        begun.last_record = max(begun.last_record, lineage.lost_until)

    def _write_lineage(self, step: Step, covered_record: int, lineage: Lineage) -> None:
        """Record in the ledger, immediately, to which log the next rows belong.

        Without this write, a kill before the next roll could mix up the rows of two logs.
        """
        try:
            self._messages.write(trail.table_of([step], lambda _: ""), step.at)
            self._messages.put_mark(covered_record, lineage.id)
        except OSError as error:
            _log.warning(
                "The ledger in %s cannot be written: %s. If the broker is killed before a later "
                "write succeeds, reports may mix up the rows of two logs. Free space on the disk "
                "of the ledger or correct its permissions",
                self._messages.folder,
                error,
            )

    def add_record(self, record: int, parts: Iterable[Part], now: int) -> None:
        """Add a durable record to the trail; an error here must not disturb the broker."""
        if self.trail is None:
            return
        try:
            if record > self.trail.last_record + 1:  # records were dropped or damaged
                self.trail.note_gap(now, record - 1)
            self.trail.add_record(record, parts, now)
        except Exception:  # noqa: BLE001 - see above
            _log.exception(
                "Record %d of the log could not be added to the ledger of messages because of an "
                "internal error. Reports show a gap there. Report this error",
                record,
            )
            self.trail.note_gap(now, record)
            self.trail.last_record = record

    # -- rolling -------------------------------------------------------------------------------

    @property
    def next_event(self) -> int:
        """The time of the next roll."""
        return self._next_roll if self.settings.is_on else NEVER_US

    def shift(self, by: int) -> None:
        """Move the deadlines, and let the meter begin a new bucket: the wall clock was set."""
        self._next_roll += by
        self._next_inventory += by
        self._writing_since += by
        self._now += by
        self.meter.shift(by)

    def begin_turn(self, now: int) -> None:
        """Count the following operations in the bucket of this time."""
        self._now = now
        if self.meter.turn_to(now) and not self.settings.is_on:
            self.meter.take()

    def is_due(self, now: int) -> bool:
        """Return whether `end_turn` must be called: a roll is due, or the trail fills a file."""
        if now < self._next_roll and (self.trail is None or self.trail.rows < LEDGER_FILE_ROWS):
            return False
        return self.settings.is_on

    def end_turn(
        self, now: int, record: int, present_messages: Callable[[], PresentMessages | None]
    ) -> None:
        """Roll, and add an inventory if it is due.

        `record` is the last record of the log. `present_messages` returns None if memory is ahead
        of the log.
        """
        if now >= self._next_inventory:
            self.add_inventory(now, record, present_messages())
        self._roll(now)

    def add_inventory(
        self, now: int, record: int, present_messages: PresentMessages | None
    ) -> None:
        """Add an inventory to the trail; do nothing if `present_messages` is None."""
        if self.trail is not None and present_messages is not None:
            self._next_inventory = now + to_us(INVENTORY_INTERVAL)
            self.trail.add_inventory(present_messages, now, record)

    @property
    def _hangs(self) -> bool:
        """Whether the write in progress has exceeded LEDGER_PATIENCE_US."""
        return self._is_writing and self._now - self._writing_since > LEDGER_PATIENCE_US

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _roll(self, now: int) -> None:
        """Hand the collected rows to the ledger thread, or write them if there is none."""
        if self._is_writing:  # the next roll writes the rows that arrive meanwhile
            self._next_roll = now + LEDGER_PAUSE_US
            if self.trail is not None and self.trail.rows > LEDGER_BUFFERED_ROWS:
                self.trail.give_up(now)
            return
        self._next_roll, self._writing_since = now + self._roll_us, now
        steps = self.trail.take() if self.trail is not None else []
        self._handed_over = self.trail.last_record if self.trail is not None else 0
        job = _LedgerWrite(self.meter.take(), steps, self._handed_over, now)
        if not (job.buckets or job.steps or job.record > self._covered_record or self._is_failing):
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
        """Wait until the write in progress ends, at most LEDGER_PATIENCE_US."""
        if self._writing is not None:
            wait([self._writing], LEDGER_PATIENCE_US / SECOND_US)

    # -- writing, in the ledger thread ---------------------------------------------------------

    def _write(self, job: _LedgerWrite) -> None:
        self._buckets += job.buckets
        self._steps += job.steps
        try:
            if self._buckets:
                self._operations.write(meter_rows(self._buckets), job.now)
                self._buckets = []
            self._write_trail(job)
        except Exception as error:  # noqa: BLE001 - an error must not stop the broker
            self._note_failure(error, self._give_up_oldest(job.now))
            return
        if self._is_failing:
            self._is_failing = False
            _log.warning(
                "The ledger in %s can be written again",
                self._messages.folder.parent,
                extra=facts(event="ledger_trouble_ended"),
            )
        try:
            self._delete_oldest(job.now)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning(
                "The oldest files of the ledgers in %s cannot be deleted: %s. The ledgers may "
                "exceed max_bytes. Delete the oldest files by hand",
                self._messages.folder.parent,
                error,
            )

    def _note_failure(self, error: Exception, lost: int) -> None:
        """Log the first failure after a successful write, and every loss of rows."""
        was_failing, self._is_failing = self._is_failing, True
        if lost or not was_failing:
            _log.warning(
                "The ledger in %s cannot be written: %s. The broker keeps up to %d rows in memory "
                "and tries again%s. Free space on the disk of the ledger, or correct its "
                "permissions",
                self._messages.folder.parent,
                error,
                LEDGER_BUFFERED_ROWS,
                f". It has dropped the {lost} oldest rows" if lost else "",
                extra=facts(event="ledger_trouble", reason=str(error), lost_rows=lost),
            )

    def _write_trail(self, job: _LedgerWrite) -> None:
        if self._steps and self.trail is not None:
            rows = trail.table_of(self._steps, self.trail.path)
            if rows.num_rows:
                self._messages.write(rows, job.now)
            self._steps = []
        if job.record > self._covered_record:
            self._messages.put_mark(job.record, self._log_id)
            self._covered_record = job.record

    def _delete_oldest(self, now: int) -> None:
        """Delete the oldest files beyond the size limit.

        Before that, write a gap for the records of these files: otherwise, after a kill between the
        two steps, a message whose end was in a deleted file would look lost.
        """
        deleted, self._messages.deleted = self._messages.deleted, None
        if deleted is not None:  # complete days, older than the retention
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
        """Return the time and the record of the newest row of files.

        A file that cannot be read counts as if it contained all rows so far.
        """
        ends = [newest_row(file.path) for file in files]
        at = max((end.at for end in ends if end is not None), default=now)
        return LedgerEnd(
            at, max(self._covered_record if end is None else end.record for end in ends)
        )

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
        """Drop the oldest rows beyond LEDGER_BUFFERED_ROWS; return how many were dropped."""
        too_many = sum(map(rows_in, self._steps)) - LEDGER_BUFFERED_ROWS
        given_up, record = 0, 0
        while given_up < too_many:
            step = self._steps.pop(0)
            given_up, record = given_up + rows_in(step), step.record
        if given_up:
            self._steps.insert(0, gap(now, record))
        return given_up
