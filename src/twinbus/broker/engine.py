"""The engine: one turn after another over the namespace of a directory. No thread of its own.

    turn:  tick (what time brings) -> execute (commands) -> serve (those who wait)
           -> append and sync one record -> answer

Replies wait for the disk whenever the turn wrote something a caller relies on; settlements alone
are answered first and ride the sync that follows. When the log refuses a record, what already
happened in memory is kept for the next one and sends go to the spill store. When the engine finds
itself inconsistent it writes a diagnostic bundle and reads its log anew.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from twinbus.broker.bodies import Bodies
from twinbus.broker.commands import Command, Send, SendReceipt, size_of
from twinbus.broker.commit import Commit, Entries, Fact, Ticket
from twinbus.broker.compaction import Compaction
from twinbus.broker.dead_letter import Deaths
from twinbus.broker.diagnostics import write_bundle
from twinbus.broker.ledgers import Ledgers, Standing
from twinbus.broker.log import Log
from twinbus.broker.namespace import Namespace, NamespaceSettings
from twinbus.broker.replay import Replay, restore
from twinbus.broker.shared import Shared
from twinbus.broker.spill import Spill, StoreHealth
from twinbus.broker.storage import Storage
from twinbus.broker.tokens import LockNumbers
from twinbus.broker.trail import Trail
from twinbus.clock import Clock
from twinbus.entities import RuntimeProperties
from twinbus.errors import BrokerRestartingError, MessagingError, StoreUnavailableError
from twinbus.ledger import LedgerSettings
from twinbus.limits import (
    MAX_BATCH_BYTES,
    RECENT_COMMANDS,
    SEGMENT_BYTES,
    SELF_CHECK_INTERVAL_US,
    SPILL_DRAIN_SENDS,
)

_log = logging.getLogger("twinbus.broker")


class InvariantError(MessagingError):
    """The broker's own bookkeeping does not add up."""


class Asker(Ticket, Protocol):
    """A caller and its command."""

    command: Command[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Where a namespace lives and how it is kept."""

    directory: Path
    spill_directory: Path | None = None  # best on another disk; default: inside `directory`
    segment_bytes: int = SEGMENT_BYTES
    accept_damage: bool = False  # start without damaged records and lose what they held
    namespace: NamespaceSettings = field(default_factory=NamespaceSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A namespace as seen from outside, at one moment."""

    is_open: bool  # False: it was closed, or stopped for good
    is_spilling: bool  # the log's disk is in trouble; sends go to the spill store
    restarts: int  # times it healed itself
    open_receives: int
    storage_bytes: int
    entities: Sequence[RuntimeProperties]
    meter: pa.RecordBatch  # METER_SCHEMA


@dataclass(frozen=True, slots=True)
class Storages:
    """The disks under the log and the spill store; None: the operating system's files."""

    log: Storage | None = None
    spill: Storage | None = None


class Engine:
    """Owns the log and the namespace of a directory."""

    def __init__(
        self, settings: EngineSettings, clock: Clock, storages: Storages, *, threaded: bool
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._storages = storages
        self._recent: deque[tuple[type, str]] = deque(maxlen=RECENT_COMMANDS)
        self._now = clock.now_us()
        self._turn_time = self._now  # what is new in a record happened then
        self.restarts = 0  # times it healed itself
        self.stranded: list[Ticket] = []  # who waits while it heals
        self._ledgers = Ledgers(settings.directory, settings.ledger, self._now, background=threaded)
        self._open()

    def _open(self) -> None:
        settings = self._settings
        self.log = Log(
            settings.directory / "log",
            self._storages.log,
            segment_bytes=settings.segment_bytes,
            accept_damage=settings.accept_damage,
        )
        try:
            self._restore()
            folder = settings.spill_directory or settings.directory / "spill"
            self.spill = Spill(folder, self._storages.spill)
        except BaseException:
            self.log.close()
            raise
        self.health = StoreHealth(spilling=len(self.spill) > 0)
        if self.log.cut_bytes:
            _log.warning(
                "%s: cut a torn tail of %d bytes that was never acknowledged; kept in log/cut",
                settings.directory,
                self.log.cut_bytes,
            )

    def _restore(self) -> None:
        bodies = Bodies(self.log)
        replay = Replay(self._ledgers.covered)
        replay.read(self.log, bodies)
        bodies.start_at(replay.number("next", "batch", 1))
        # Lock numbers begin above every lease epoch in the log, above what the last segment knew,
        # and, as time passes between starts, above every lock given before.
        known = max(replay.highest_epoch, replay.number("next", "lock", 0))
        locks = LockNumbers(max(self._time(), known))
        self.namespace = Namespace(
            Shared(bodies, Deaths(), locks, self._ledgers.meter), self._settings.namespace
        )
        restore(self.namespace, replay, self._now, accept_damage=self._settings.accept_damage)
        self._compaction = Compaction(self.log, self.namespace, self._ledgers.may_forget)
        for segment, first, last in replay.history_spans:
            self._compaction.note_history(segment, first, last)
        trail = Trail(self._path_of, partial(bodies.texts, "message_id"))
        self._ledgers.begin_trail(trail, replay.untold, self.log.last_record, self._now)
        self._kept = Entries()
        self._ledgers.take_stock(self._now, self.log.last_record, self._standing())
        self._next_check = self._now + SELF_CHECK_INTERVAL_US
        self._to_check: list[int] = []

    def _standing(self) -> Standing | None:
        """Return what stands, or None while memory is ahead of the log."""
        return None if self._kept else self.namespace.standing()

    def _path_of(self, number: int) -> str:
        queue = self.namespace.directory.queue_numbered(number)
        return queue.path if queue is not None else ""

    def _time(self) -> int:
        """Return now; the broker's time never goes back."""
        self._now = max(self._now, self._clock.now_us())
        return self._now

    @property
    def next_event(self) -> int:
        """When a turn has something to do, commands apart."""
        if self.health.spilling:
            return min(self.namespace.next_event, self.health.retry_at)
        if self._kept or self._compaction.has_work:
            return 0
        return min(self.namespace.next_event, self._next_check, self._ledgers.next_event)

    # -- a turn --------------------------------------------------------------------------------

    def turn(self, askers: Sequence[Asker]) -> None:
        """Carry out commands and whatever time brings; every asker is answered or waits."""
        self._recent.extend(
            (type(asker.command), getattr(asker.command, "path", "")) for asker in askers
        )
        try:
            self._turn(askers)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self._heal(error, askers)  # whatever it is, the log is right and memory is not
            if not isinstance(error, Exception):
                raise  # it was meant for the caller whose thread this is

    def _turn(self, askers: Sequence[Asker]) -> None:
        now = self._turn_time = self._time()
        self._ledgers.begin_turn(now)
        commit = self._new_commit()
        self.namespace.storage_bytes = self.log.size_in_bytes
        for path in self.spill.paths:
            self.namespace.keep_alive(path, now)  # it has messages, though it cannot see them
        self.namespace.tick(now, commit)
        if commit.on_durable:  # the commands of this turn shall see what time has brought
            self._finish(commit, ())
            commit = self._new_commit()
        if self.health.spilling:
            askers = self._spill_sends(askers)
            if now >= self.health.retry_at:
                self._drain_spill(now, commit)
        self.namespace.execute([(asker, asker.command) for asker in askers], now, commit)
        self.namespace.serve(now, commit)
        if not self.health.spilling and self._compaction.has_work:
            self._compaction.stage(commit)
        if now >= self._next_check:
            self._check_one(now)
        self._finish(commit, askers)
        while self.namespace.has_more_to_serve:  # what became visible with this commit
            commit = self._new_commit()
            self.namespace.serve(now, commit)
            self._finish(commit, ())
        self.namespace.reclaim()
        self._ledgers.end_turn(now, self.log.last_record, self._standing)

    def _new_commit(self) -> Commit:
        kept, self._kept = self._kept, Entries()
        return Commit(self.namespace.shared.bodies.next_number, kept)

    def _finish(self, commit: Commit, askers: Sequence[Asker]) -> None:
        if not commit.must_sync:
            self._answer(commit)
        if self.health.spilling and self._now < self.health.retry_at and commit.can_wait:
            self._kept = commit.kept  # rather than make the sick log sicker
            return
        try:
            if not commit.is_empty:
                self._append(commit)
        except StoreUnavailableError as error:
            self._refuse(commit, askers, error)
            return
        for hook in commit.on_durable:
            hook()
        self._answer(commit)

    def _append(self, commit: Commit) -> None:
        began = self._clock.now_us()
        snapshot = self.namespace.snapshot() if self.log.begins_segment else []
        parts = commit.parts(self._turn_time, snapshot)
        places = self.log.append(parts)
        self._ledgers.follow(self.log.last_record, parts, self._now)
        bodies = self.namespace.shared.bodies
        for part, place in zip(parts, places, strict=True):
            if part.number:
                bodies.add(part.number, place, part.columns.num_rows)
        for _, _, times in commit.history:
            self._compaction.note_history(places[0].segment, int(np.min(times)), int(np.max(times)))
        self.health.succeeded(self._clock.now_us() - began, self._time())

    def _answer(self, commit: Commit) -> None:
        for ticket, value in commit.replies:
            ticket.answer(value)
        for ticket, error in commit.refusals:
            ticket.fail(error)
        commit.replies.clear()
        commit.refusals.clear()

    # -- storage trouble -----------------------------------------------------------------------

    def _refuse(
        self, commit: Commit, askers: Sequence[Asker], error: StoreUnavailableError
    ) -> None:
        """Undo what was tentative, keep the rest for the next record, spill the sends."""
        _log.warning("%s", error)
        for hook in reversed(commit.on_refused):
            hook()
        self._kept = commit.kept
        self.health.refused(self._time())
        promised = {id(ticket) for ticket, _ in commit.replies}
        sends = [a for a in askers if isinstance(a.command, Send) and id(a) in promised]
        left = {id(asker) for asker in self._spill_sends(sends)}
        spilled = {id(asker) for asker in sends} - left
        for ticket, _ in commit.replies:
            if id(ticket) not in spilled:
                ticket.fail(error)
        for ticket, refusal in commit.refusals:
            ticket.fail(refusal)

    def _spill_sends(self, askers: Sequence[Asker]) -> list[Asker]:
        """Spill the sends that can be, and answer them; return the other askers."""
        left = []
        for asker in askers:
            command = asker.command
            if not isinstance(command, Send):
                left.append(asker)
                continue
            try:
                batch = self.namespace.check_send(command)
                if batch.column("scheduled_enqueue_time_utc").null_count != batch.num_rows:
                    left.append(asker)  # its number, needed to cancel it, is not known here
                    continue
                self.spill.append(command.path, batch, command.origin)
            except MessagingError as error:
                asker.fail(error)
            else:
                self.namespace.meter_spilled(command, batch)
                asker.answer(SendReceipt([0] * batch.num_rows))
        return left

    def _drain_spill(self, now: int, commit: Commit) -> None:
        """Move the oldest spilled sends into the log, as part of this turn."""
        sends: list[Send] = []
        size = 0
        for send in self.spill.sends():
            size += size_of(send)
            if sends and (size > MAX_BATCH_BYTES or len(sends) == SPILL_DRAIN_SENDS):
                break
            sends.append(send)
        if not sends:
            self.health.recovered()
            return
        self.health.retry_at = now
        for send in sends:
            self.namespace.take_spilled(send, now, commit)
        commit.must_sync = True

        def moved() -> None:
            done = self.spill.moved(len(sends))
            if done:
                for source in done:
                    self.namespace.transfers.forget(source)
                    self._kept.facts.append(Fact("transferred", source, None))
                self.health.recovered()

        commit.on_durable.append(moved)

    # -- self-healing --------------------------------------------------------------------------

    def _check_one(self, now: int) -> None:
        """Check the bookkeeping of one queue; each gets its turn."""
        self._next_check = now + SELF_CHECK_INTERVAL_US
        if not self._to_check:
            self._to_check = [queue.entity for queue in self.namespace.directory.queues()]
        queue = (
            self.namespace.directory.queue_numbered(self._to_check.pop())
            if self._to_check
            else None
        )
        faults = queue.waiting.faults() if queue is not None else []
        if queue is not None and faults:
            raise InvariantError(f"{queue.path}: {'; '.join(faults)}", path=queue.path)

    def _heal(self, error: BaseException, askers: Sequence[Asker]) -> None:
        self.restarts += 1
        folder = self._report(error)
        _log.error("restarting from the log after %r; see %s", error, folder)
        restarting = BrokerRestartingError(
            f"the broker restarts after an internal error; a report is in {folder}. Try again",
            bundle=str(folder),
        )
        self.stranded = [*askers, *self.namespace.waiting_tickets()]
        self.abandon()
        self._open()
        for ticket in self.stranded:
            ticket.fail(restarting)
        self.stranded = []

    def _report(self, error: BaseException) -> Path | None:
        """Write a diagnostic bundle; that it cannot be written must not stop the healing."""
        recent = [f"{kind.__name__} {path}" for kind, path in self._recent]
        directory = self._settings.directory / "diagnostics"
        try:
            return write_bundle(directory, error, self.namespace, self.log, recent, self._time())
        except Exception as trouble:  # noqa: BLE001 - whatever it is, healing matters more
            _log.warning("no diagnostic bundle could be written: %s", trouble)
            return None

    def snapshot(self, *, is_open: bool) -> Snapshot:
        """Return what there is to see from outside."""
        namespace = self.namespace
        return Snapshot(
            is_open,
            self.health.spilling,
            self.restarts,
            namespace.shared.open_receives,
            self.log.size_in_bytes,
            [entity.runtime() for entity in namespace.directory],
            namespace.meter.table(),
        )

    def close(self) -> None:
        """Write what rides, and let go of the files."""
        if self._kept:
            try:
                self._append(self._new_commit())
            except StoreUnavailableError as error:
                _log.warning("settlements were not written: %s", error)
        now = self._time()
        self.namespace.meter_waiting()
        self._ledgers.take_stock(now, self.log.last_record, self._standing())
        self._ledgers.close(now)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the files as they are."""
        self.spill.close()
        self.log.close()
