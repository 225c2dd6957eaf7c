"""The ledgers of a namespace: what it metered, and the trail of its messages.

Whoever has the turn counts and follows in memory. Now and then all of it is handed over and
written, by a thread of its own where there are threads. What cannot be written is kept for the next
time, and never keeps the broker from its work.

Of the trail nothing is lost by a kill: `covered` says up to which record of the log it was written,
and what the log says after that is followed again at the start. Of the counts a kill loses what was
not written yet.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from twinbus.broker.accounts import meter, trail
from twinbus.broker.accounts.meter import Bucket, Meter
from twinbus.broker.accounts.trail import Step, Trail, beginning, gap, rows_in
from twinbus.broker.store.log import Part, Record
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
    LEDGER_FILE_ROWS,
    LEDGER_HELD_ROWS,
    LEDGER_PATIENCE_US,
    LEDGER_PAUSE_US,
    NEVER_US,
    SECOND_US,
)
from twinbus.loglines import facts
from twinbus.message import Int64s

Standing = Iterable[tuple[int, Int64s]]  # queues by number, and the numbers of their messages
FIXED_SETTINGS = ("is_on", "messages", "bucket")  # of LedgerSettings, from start to start
_log = logging.getLogger("twinbus.broker")


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which log the trail is about, and how much of it is lost."""

    id: str  # of the namespace, from its birth
    last_record: int  # that the log was found with
    lost_until: int  # records after the last one that it once had; the same: none is lost


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be written."""

    buckets: Sequence[Bucket]
    steps: Sequence[Step]
    record: int  # the trail is complete up to here
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
        self._buckets: list[Bucket] = []  # these two are the thread's
        self._steps: list[Step] = []
        self._covered = self._messages.read_mark()
        self._log_id = self._messages.read_log()  # empty: an earlier version wrote the mark
        self._handed_over = self._covered
        self._is_sick = False

    def reconfigure(self, settings: LedgerSettings) -> None:
        """Take new settings, but for those that only apply at a start."""
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
        """The id of the log that the ledger is about; empty: it is not known."""
        return self._log_id

    def knows(self, log: str) -> bool:
        """Whether the ledger is about this log."""
        return self._log_id == log

    def may_forget(self, record: int) -> bool:
        """Whether the log may forget a record; if it is too early, the trail is written at once.

        A disk that is sick here must not make the log grow for ever.
        """
        if self.trail is None or record <= self._covered or self._is_sick or self._hangs:
            return True
        if record > self._handed_over:
            self._next_roll = 0
        return False

    def begin_trail(
        self, begun: Trail, untold: Sequence[Record], lineage: Lineage, now: int
    ) -> None:
        """Begin, at the start or after the broker healed itself, with what the log still has."""
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
        """Write at once which log the rows to come are about: a kill must not mix two up."""
        try:
            self._messages.write(trail.table_of([step], lambda _: ""), step.at)
            self._messages.put_mark(covered, lineage.id)
        except OSError as error:
            _log.warning("the ledger in %s cannot be written: %s", self._messages.folder, error)

    def follow(self, record: int, parts: Iterable[Part], now: int) -> None:
        """Note what a durable record says; whatever is wrong here is not the broker's trouble."""
        if self.trail is None:
            return
        try:
            if record > self.trail.last_record + 1:  # forgotten or damaged meanwhile
                self.trail.note_gap(now, record - 1)
            self.trail.follow(record, parts, now)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("record %d of the log cannot be followed in the ledger", record)
            self.trail.note_gap(now, record)
            self.trail.last_record = record

    # -- rolling -------------------------------------------------------------------------------

    @property
    def next_event(self) -> int:
        """When `turn` has something to do."""
        return self._next_roll if self.settings.is_on else NEVER_US

    def shift(self, by: int) -> None:
        """Move its deadlines, and count under the new time: the wall clock was set by so much."""
        self._next_roll += by
        self._next_stock += by
        self._writing_since += by
        self._now += by
        self.meter.shift(by)

    def begin_turn(self, now: int) -> None:
        """Count what comes under this moment."""
        self._now = now
        if self.meter.turn_to(now) and not self.settings.is_on:
            self.meter.take()

    def is_due(self, now: int) -> bool:
        """Whether a turn that ends has something to do here: it is time, or a file is full."""
        if now < self._next_roll and (self.trail is None or self.trail.rows < LEDGER_FILE_ROWS):
            return False
        return self.settings.is_on

    def end_turn(self, now: int, record: int, standing: Callable[[], Standing | None]) -> None:
        """Do what is due: `record` was the last one, `standing` tells what stands, if it can."""
        if now >= self._next_stock:
            self.take_stock(now, record, standing())
        self._roll(now)

    def take_stock(self, now: int, record: int, standing: Standing | None) -> None:
        """State what the broker holds, if that is known for sure."""
        if self.trail is not None and standing is not None:
            self._next_stock = now + to_us(INVENTORY_INTERVAL)
            self.trail.take_stock(standing, now, record)

    @property
    def _hangs(self) -> bool:
        """Whether a write takes so long that nobody can wait for it."""
        return self._is_writing and self._now - self._writing_since > LEDGER_PATIENCE_US

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _roll(self, now: int) -> None:
        if self._is_writing:  # what comes meanwhile goes with the next
            self._next_roll = now + LEDGER_PAUSE_US
            if self.trail is not None and self.trail.rows > LEDGER_HELD_ROWS:
                self.trail.give_up(now)
            return
        self._next_roll, self._writing_since = now + self._roll_us, now
        steps = self.trail.take() if self.trail is not None else []
        self._handed_over = self.trail.last_record if self.trail is not None else 0
        job = _Job(self.meter.take(), steps, self._handed_over, now)
        if not (job.buckets or job.steps or job.record > self._covered or self._is_sick):
            return
        if self._thread is None:
            self._write(job)
        else:
            self._writing = self._thread.submit(self._write, job)

    def close(self, now: int) -> None:
        """Write everything."""
        self._wait()
        if self.settings.is_on:
            self._roll(now)
        self._wait()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _wait(self) -> None:
        """Let a write come to its end, within reason."""
        if self._writing is not None:
            wait([self._writing], LEDGER_PATIENCE_US / SECOND_US)

    # -- writing, in the thread ----------------------------------------------------------------

    def _write(self, job: _Job) -> None:
        self._buckets += job.buckets
        self._steps += job.steps
        try:
            if self._buckets:
                self._operations.write(meter.table_of(self._buckets), job.now)
                self._buckets = []
            self._write_trail(job)
        except Exception as error:  # noqa: BLE001 - the broker must go on whatever it is
            self._note_sick(error, self._give_up_oldest(job.now))
            return
        if self._is_sick:
            self._is_sick = False
            _log.warning(
                "The ledger in %s is written again",
                self._messages.folder.parent,
                extra=facts(event="ledger_trouble_ended"),
            )
        try:
            self._delete_oldest(job.now)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning(
                "Old files of the ledgers in %s cannot be deleted, so that they take more than "
                "max_bytes: %s. Delete them by hand",
                self._messages.folder.parent,
                error,
            )

    def _note_sick(self, error: Exception, lost: int) -> None:
        """Log a failure once until a write works again, and every loss of rows."""
        was_sick, self._is_sick = self._is_sick, True
        if lost or not was_sick:
            _log.warning(
                "The ledger in %s cannot be written and is tried again: %s%s",
                self._messages.folder.parent,
                error,
                f"; {lost} rows of it were given up" if lost else "",
                extra=facts(event="ledger_trouble", reason=str(error), lost_rows=lost),
            )

    def _write_trail(self, job: _Job) -> None:
        if self._steps and self.trail is not None:
            rows = trail.table_of(self._steps, self.trail.path)
            if rows.num_rows:
                self._messages.write(rows, job.now)
            self._steps = []
        if job.record > self._covered:
            self._messages.put_mark(job.record, self._log_id)
            self._covered = job.record

    def _delete_oldest(self, now: int) -> None:
        """Delete the oldest files beyond the size bound, and say in the trail what it covers.

        The trail says first that it does not know the records of these files: a kill in between
        must not make a message look lost whose end was in a deleted file.
        """
        deleted, self._messages.deleted = self._messages.deleted, None
        if deleted is not None:  # by retention: whole days
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
            with suppress(OSError):  # other files of the day are left
                file.path.parent.rmdir()
        if files:
            self._log_deleted(files)

    def _end_of(self, files: Sequence[LedgerFile], now: int) -> LedgerEnd:
        """Return the newest row of files; one that cannot be read may hold any row."""
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
        """Keep what may stay in memory; return how many rows may not."""
        too_many = sum(map(rows_in, self._steps)) - LEDGER_HELD_ROWS
        given_up, record = 0, 0
        while given_up < too_many:
            step = self._steps.pop(0)
            given_up, record = given_up + rows_in(step), step.record
        if given_up:
            self._steps.insert(0, gap(now, record))
        return given_up
