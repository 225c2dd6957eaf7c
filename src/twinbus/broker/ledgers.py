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
from dataclasses import dataclass
from pathlib import Path

from twinbus.broker import meter, trail
from twinbus.broker.log import Part, Record
from twinbus.broker.meter import Bucket, Meter
from twinbus.broker.trail import Step, Trail, beginning, gap, rows_in
from twinbus.clock import to_us
from twinbus.ledger import Ledger, LedgerKind, LedgerSettings
from twinbus.limits import (
    INVENTORY_INTERVAL,
    LEDGER_FILE_ROWS,
    LEDGER_HELD_ROWS,
    LEDGER_PATIENCE_US,
    LEDGER_PAUSE_US,
    NEVER_US,
    SECOND_US,
)
from twinbus.message import Int64s

Standing = Iterable[tuple[int, Int64s]]  # queues by number, and the numbers of their messages
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
        self._settings = settings
        self._operations = Ledger(directory, LedgerKind.OPERATIONS, settings.retention)
        self._messages = Ledger(directory, LedgerKind.MESSAGES, settings.retention)
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

    # -- the trail -----------------------------------------------------------------------------

    @property
    def covered(self) -> int:
        """The last record of the log whose trail is written."""
        return self._covered

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
        if not (self._settings.is_on and self._settings.messages):
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
        return self._next_roll if self._settings.is_on else NEVER_US

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
        if self.meter.turn_to(now) and not self._settings.is_on:
            self.meter.take()

    def end_turn(self, now: int, record: int, standing: Callable[[], Standing | None]) -> None:
        """Do what is due: `record` was the last one, `standing` tells what stands, if it can."""
        if not self._settings.is_on:
            return
        many = self.trail is not None and self.trail.rows >= LEDGER_FILE_ROWS
        if now >= self._next_roll or many:
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
        if self._settings.is_on:
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
            self._is_sick = False
        except Exception as error:  # noqa: BLE001 - the broker must go on whatever it is
            self._is_sick = True
            lost = self._give_up_oldest(job.now)
            _log.warning(
                "the ledger in %s cannot be written and is tried again: %s%s",
                self._messages.folder.parent,
                error,
                f"; {lost} rows of it were given up" if lost else "",
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
