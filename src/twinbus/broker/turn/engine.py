"""The engine: runs turns over the namespace of a directory. It has no thread of its own.

    turn:  tick (timers) -> execute (commands) -> serve (waiting requests)
           -> append and sync one record -> answer

Replies wait for the disk, unless the turn only read. When the log refuses a record, changes that
already happened in memory are kept for the next record, sends go to the spill store (spilling.py),
and all other requests of the record get the error. While the log is slow, settlements are
collected, and answered when they are written (delayed.py). When the engine finds its own state
inconsistent, it writes a diagnostic bundle and reads its log again (healing.py, recovery.py). A
command that raises does not cause this: only this command fails (isolation.py).

The writer (writer.py) calls the engine, from the thread that has the turn.
"""

import gc
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from twinbus.broker.accounts.ledgers import Ledgers, PresentMessages
from twinbus.broker.accounts.rule_failures import RuleFailures
from twinbus.broker.entities.entity import Entity
from twinbus.broker.store.commit import Commit, Entries, Fact
from twinbus.broker.store.log import Log
from twinbus.broker.store.spill import Spill, StoreHealth
from twinbus.broker.store.storage import Storage
from twinbus.broker.turn.delayed import DelayedAnswers
from twinbus.broker.turn.diagnostics import write_bundle
from twinbus.broker.turn.healing import Healing
from twinbus.broker.turn.isolation import cause_of, has_settled
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.broker.turn.recovery import LogRecovery, identity_fact, nonce
from twinbus.broker.turn.self_check import SelfCheck
from twinbus.broker.turn.spilling import Spilling
from twinbus.broker.turn.vitals import Flushes, Recovery, Snapshot
from twinbus.broker.turn.watch import StoreWatch
from twinbus.clock import BrokerTime, Clock
from twinbus.entities import RuntimeProperties
from twinbus.errors import (
    BrokerRestartingError,
    CommandFailedError,
    MessagingError,
    StoreUnavailableError,
)
from twinbus.ledger import LedgerSettings
from twinbus.limits import (
    NEVER_US,
    RECENT_COMMANDS,
    SECOND_US,
    SEGMENT_BYTES,
    SLOW_FLUSH_US,
)
from twinbus.loglines import facts as facts_of_line
from twinbus.protocol.commands import Send
from twinbus.protocol.meter import SEND
from twinbus.protocol.requests import Request

_log = logging.getLogger("twinbus.broker")


class GaveUpError(MessagingError):
    """The broker restarted too often for the same cause, and has stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The directories of a namespace, and how it is stored."""

    directory: Path
    spill_directory: Path | None = None  # best on another disk; default: inside `directory`
    segment_bytes: int = SEGMENT_BYTES
    accept_damage: bool = False  # start without damaged records and lose their content
    namespace: NamespaceSettings = field(default_factory=NamespaceSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)


@dataclass(frozen=True, slots=True)
class Storages:
    """The storages of the log and the spill store; None: files of the operating system."""

    log: Storage | None = None
    spill: Storage | None = None


class Engine:
    """Owns the log and the namespace of a directory."""

    def __init__(
        self, settings: EngineSettings, clock: Clock, storages: Storages, *, threaded: bool
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._storages = storages
        self._recent: deque[tuple[type, str]] = deque(maxlen=RECENT_COMMANDS)
        self._time = BrokerTime(clock)
        self._now = self._time.now_us()
        self.healing = Healing()
        self._reopens_at: int | None = None  # when it restarts from its log; None: it works
        self.trouble = ""  # why it restarts or has stopped; empty: it works
        self.stranded: list[Request] = []  # requests that wait for the restart
        self._spill_pauses: dict[str, int] = {}  # by path: when its spilled sends are tried again
        self.delayed = DelayedAnswers()
        self._rule_failures = RuleFailures(lambda: self._now)  # kept over restarts
        self.watch = StoreWatch(settings.directory)
        self.flushes = Flushes()
        self._ledgers = Ledgers(settings.directory, settings.ledger, self._now, background=threaded)
        self._recovery = LogRecovery(
            directory=settings.directory,
            ledgers=self._ledgers,
            rule_failures=self._rule_failures,
            start=nonce(),
            accept_damage=settings.accept_damage,
            path_of=self._path_of,
        )
        self._open()

    def _open(self) -> None:
        settings = self.settings
        began = self._clock.now_us()
        self.log = Log(
            settings.directory / "log",
            self._storages.log,
            segment_bytes=settings.segment_bytes,
            accept_damage=settings.accept_damage,
            keeps_reserve=True,
        )
        try:
            self.namespace = self._recovery.empty_namespace(self.log, settings.namespace)
            recovered = self._recovery.recover(self.log, self.namespace, self._now)
            self.spill = Spill(self.spill_folder, self._storages.spill, self._now)
        except BaseException:
            self.log.close()
            raise
        self.id, self.keys, self.lineage = recovered.id, self.namespace.keys, recovered.lineage
        self.clock_steps = recovered.clock_steps
        self._compaction = recovered.compaction
        self._kept, self._unwritten = recovered.kept, recovered.unwritten
        self._self_check = SelfCheck(self.namespace.directory, self._now)
        self.health = StoreHealth(spilling=len(self.spill) > 0, since=self._now)
        self._spilling = Spilling(
            self.namespace, self.spill, self.health, identity_fact(self.id), self._spill_pauses
        )
        self._reopens_at, self.trouble = None, ""
        if self.log.cut_bytes:
            _log.warning(
                "%s: the log ended with an incomplete record of %d bytes, as after a crash. It was "
                "never acknowledged. The broker moved these bytes to log/cut; nothing needs to be "
                "done",
                settings.directory,
                self.log.cut_bytes,
                extra=facts_of_line(event="torn_tail", cut_bytes=self.log.cut_bytes),
            )
        messages = sum(len(queue.waiting) for queue in self.namespace.directory.queues())
        seconds = (self._clock.now_us() - began) / SECOND_US
        self.recovery = Recovery(messages, recovered.records, seconds)
        if self.restarts:
            _log.info(
                "The broker of %s has restarted from its log: %d messages from %d records in "
                "%.2f s. It has restarted %d times since the process began",
                settings.directory,
                messages,
                recovered.records,
                seconds,
                self.restarts,
                extra=facts_of_line(
                    event="restarted",
                    messages=messages,
                    records=recovered.records,
                    seconds=seconds,
                    restarts=self.restarts,
                ),
            )

    @property
    def spill_folder(self) -> Path:
        """The directory of the spill store."""
        return self.settings.spill_directory or self.settings.directory / "spill"

    def _present_messages(self) -> PresentMessages | None:
        """Return the messages of all queues; None while memory is ahead of the log."""
        return None if self._kept else self.namespace.present_messages()

    def _path_of(self, number: int) -> str:
        queue = self.namespace.directory.queue_numbered(number)
        return queue.path if queue is not None else ""

    def _look_at_clock(self) -> int:
        """Return the current time; if the wall clock was set, move the timers first."""
        step = self._time.look()
        self._now = self._time.seen_us
        if step:
            self._shift(step)
        return self._now

    def _shift(self, by: int) -> None:
        """Move all deadlines that were set as durations: the wall clock was moved by `by`.

        The log has expiry times from before the step, so the step is written there as well.
        """
        _log.warning("The wall clock was moved by %.3f s. The broker adjusts its timers", by / 1e6)
        self.namespace.shift(by, self._now)
        self._spilling.shift(by)
        self.watch.shift(by)
        self.healing.shift(by)
        self._ledgers.shift(by)
        self._self_check.shift(by)
        self._compaction.shift(by)
        self._kept.shift(by)
        record = self.log.last_record
        steps = self.clock_steps[record] = [*self.clock_steps.get(record, ()), (by, self._now)]
        self._kept.facts.append(Fact.of("clock", record, steps))
        for queue in self.namespace.directory.queues():
            for lease in queue.leases:
                key = f"{queue.entity}/{lease.epoch}"
                self._kept.facts.append(Fact("leased until", key, lease.renewal()))

    def notices_clock(self) -> bool:
        """Return whether the wall clock was set, and no turn has noticed it yet."""
        return self._time.is_off and self._time.looks_again_at == NEVER_US

    @property
    def next_event(self) -> int:
        """The time at which a turn has something to do, apart from commands."""
        if self._reopens_at is not None:
            return self._time.clock_moment(self._reopens_at)
        if self.health.spilling:
            due = min(self.namespace.next_event, self.health.retry_at, self.watch.degrades_at + 1)
        elif self._kept or (
            len(self.log.segments) > 1 and not self.log.is_on_reserve and self._compaction.has_work
        ):
            due = 0
        else:
            due = min(self.namespace.next_event, self._self_check.due, self._ledgers.next_event)
        return self._time.deadline(due)

    @property
    def _is_compaction_paused(self) -> bool:
        """Whether compaction must not write: the log has trouble, or uses its reserve."""
        return self.health.spilling or self.log.is_on_reserve

    @property
    def restarts(self) -> int:
        """The number of self-healing restarts."""
        return self.healing.restarts

    @property
    def is_careful(self) -> bool:
        """Whether commands run one at a time, because of a recent restart."""
        return self.healing.restarts > 0 and self._now < self.healing.careful_until

    # -- a turn --------------------------------------------------------------------------------

    def turn(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Execute commands and timers.

        Return the requests that the turn had no time for: they were not executed. Every other
        request is answered or waits.
        """
        if self._reopens_at is not None and not self._reopen(requests):
            return ()
        for request in requests:
            self._recent.append((type(request.command), getattr(request.command, "path", "")))
        failure: BaseException | None = None
        left: Sequence[Request] = ()
        try:
            left = self._turn(requests)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001
            failure = error
        if failure is not None:
            self._heal(failure, requests)  # the log is correct, but memory may not be
            if not isinstance(failure, Exception):
                raise failure  # a signal for the thread that runs this turn
        return left

    def _turn(self, requests: Sequence[Request]) -> Sequence[Request]:
        now = self._look_at_clock()
        self._ledgers.begin_turn(now)
        commit = self._new_commit()
        self.namespace.overload.storage_bytes = self.log.size_in_bytes
        for path in self.spill.paths:
            self.namespace.keep_alive(path, now)  # an entity with spilled sends is not idle
        self.namespace.tick(now, commit)
        if commit.effects:  # the commands of this turn must see the results of the timers
            self._finish(commit, ())
            commit = self._new_commit()
        if self.health.spilling:
            requests = self._spilling.spill_sends(requests, now)
            if now >= self.health.retry_at:
                self._spilling.drain(now, commit, self._kept)
        left = self.namespace.execute(requests, now, commit)
        self.namespace.serve(now, commit)
        if (
            len(self.log.segments) > 1
            and not self._is_compaction_paused
            and self._compaction.has_work
        ):
            self._compaction.stage(commit)
        if now >= self._self_check.due:
            self._self_check.check_next(now)
        self._finish(commit, requests)
        while self.namespace.shared.parked:  # forwarding may dead-letter and park further messages
            commit = self._new_commit()
            self.namespace.forward_dead_letters(now, commit)
            self._finish(commit, ())
        while self.namespace.shared.changed_queues:  # messages became visible with this commit
            commit = self._new_commit()
            self.namespace.serve(now, commit)
            self._finish(commit, ())
        self._end_turn(now)
        return left

    def _end_turn(self, now: int) -> None:
        """Do maintenance for which nobody waits."""
        # Until kept entries are written, the log still refers to messages that are gone in memory.
        if self._is_compaction_paused and not self._kept:
            self._compaction.drop_empty()
            self._compact_full_disk()
        self.namespace.reclaim()
        if self._ledgers.is_due(now):
            self._ledgers.end_turn(now, self.log.last_record, self._present_messages)
        if not self.health.is_well or self.watch.has_news:
            self.watch.look(self.health, self.spill, now)

    def _compact_full_disk(self) -> None:
        """Empty the oldest segment if little is left in it, so that its space can be used again.

        A few messages, such as dead letters, may stay in the oldest segment for long. Segments are
        dropped in order, so no space would become free, however many messages are settled. The log
        writes these messages to its reserve.
        """
        log = self.log
        while log.is_full or log.is_on_reserve:
            if not self._compaction.may_empty_oldest(log.reserve_left):
                return
            commit = self._new_commit()
            commit.only_compacts = True
            self._compaction.stage(commit, log.reserve_left // 2)
            if not self._finish(commit, ()):
                return

    def _new_commit(self) -> Commit:
        kept, self._kept = self._kept, Entries()
        return Commit(self.namespace.shared.bodies.next_number, kept)

    def _finish(self, commit: Commit, requests: Sequence[Request]) -> bool:
        """Write a commit and answer its requests; return False if the log refused the commit."""
        if not (commit.must_sync or commit.has_settled):
            # The turn only read, so an error of the log cannot affect its replies.
            self._answer(commit)
        if self.health.is_slow and self._now < self.health.retry_at and commit.can_wait:
            self._kept = commit.kept  # a slow log gets no more load
            self.delayed.delay(commit)
            self._answer(commit)
            return True
        try:
            if not commit.is_empty:
                self._append(commit)
        except StoreUnavailableError as error:
            self._refuse(commit, requests, error)
            return False
        for effect in commit.effects:
            effect.durable()
        commit.effects.clear()  # they would keep the commit and deleted entities in memory
        self.delayed.add_to(commit)
        self._answer(commit)
        return True

    def _append(self, commit: Commit) -> None:
        frees_space = commit.frees_space
        try:
            self._append_once(commit, frees_space=frees_space)
        except StoreUnavailableError:
            if not frees_space or not self.log.has_reserve:
                raise
            self._append_once(commit, frees_space=True)  # uses the reserve

    def _append_once(self, commit: Commit, *, frees_space: bool) -> None:
        began = self._clock.now_us()
        facts = self._facts() if self.log.needs_facts(frees_space=frees_space) else self._unwritten
        parts = commit.parts(self._now, facts)
        places = self.log.append(parts, frees_space=frees_space)
        self._unwritten = []
        self._ledgers.add_record(self.log.last_record, parts, self._now)
        bodies = self.namespace.shared.bodies
        for part, place in zip(parts, places, strict=True):
            if part.number:
                bodies.add(part.number, place, part.columns.num_rows)
        for times in commit.history_times():
            self._compaction.note_history(places[0].segment, *times)
        duration = self._clock.now_us() - began
        self.flushes = Flushes(self.flushes.total + 1, duration)
        if duration < SLOW_FLUSH_US and self.health.is_well:
            return
        now = self._time.now_us()
        self.health.succeeded(duration, now, used_reserve=self.log.is_on_reserve)
        self.watch.flushed(duration, now)

    def _facts(self) -> list[Fact]:
        """Return all facts, so that a segment does not depend on earlier ones."""
        first = self.log.first_record
        self.clock_steps = {
            record: steps for record, steps in self.clock_steps.items() if record >= first
        }
        return [
            identity_fact(self.id),
            *(Fact.of("clock", record, steps) for record, steps in self.clock_steps.items()),
            *self.namespace.snapshot(),
        ]

    def _answer(self, commit: Commit) -> None:
        """Answer every request; a caller that cannot accept its reply does not affect others."""
        for request, value in commit.replies:
            try:
                request.answer(value)
            except Exception:  # noqa: BLE001 - see above
                _log.exception("A reply could not be delivered because of an internal error")
        for request, error in commit.refusals:
            try:
                request.fail(error)
            except Exception:  # noqa: BLE001 - see above
                _log.exception("A refusal could not be delivered because of an internal error")
        for operations in (commit.operations, commit.refused_operations):
            for operation in operations:
                self._ledgers.meter.count(operation)
        commit.forget_answers()

    # -- storage trouble -----------------------------------------------------------------------

    def _refuse(
        self, commit: Commit, requests: Sequence[Request], error: StoreUnavailableError
    ) -> None:
        """Undo tentative entries, keep the others for the next record, and spill the sends.

        Requests that are not spilled get the error of the log, unless they were refused for another
        reason.
        """
        _log.debug("A commit was refused: %s", error)
        for effect in reversed(commit.effects):
            effect.refused()
        commit.effects.clear()
        self._kept = commit.kept
        code = error.facts.get("errno")
        cause = os.strerror(code) if isinstance(code, int) else error.text
        self.health.refused(self._time.now_us(), f"the log cannot be written ({cause})")
        self.delayed.add_to(commit)
        for operation in commit.refused_operations:
            self._ledgers.meter.count(operation)
        for operation in commit.operations:
            if operation.kind != SEND:  # sends are counted one by one below
                self._ledgers.meter.count(operation.refused(error))
        promised = {id(request) for request, _ in commit.replies}
        sends = [
            request
            for request in requests
            if isinstance(request.command, Send) and id(request) in promised
        ]
        unspilled = {id(request) for request in self._spilling.spill_sends(sends, self._now)}
        for request in sends:
            if id(request) in unspilled and isinstance(request.command, Send):
                self.namespace.sends.meter_refused(request.command, error)
        spilled = {id(request) for request in sends} - unspilled
        for request, _ in commit.replies:
            if id(request) not in spilled:
                request.fail(error)
        for request, refusal in commit.refusals:
            request.fail(error if has_settled(refusal) else refusal)

    # -- self-healing --------------------------------------------------------------------------

    def _heal(self, error: BaseException, requests: Sequence[Request]) -> None:
        """Drop all state in memory, and restart from the log, at once or after a pause."""
        cause = cause_of(error)
        pause = self.healing.begin(cause, self._now)
        folder = self._report(error)
        bundle = (
            f"a diagnostic bundle is in {folder}" if folder else "no diagnostic bundle was written"
        )
        _log.error(
            "The broker found its state inconsistent and restarts from its log: %r; %s. No "
            "acknowledged message is lost. If it happens again, report it with the bundle",
            error,
            bundle,
            extra=facts_of_line(event="restarting", cause=cause, bundle=str(folder)),
        )
        error.__traceback__ = error.__context__ = error.__cause__ = None  # they refer to old state
        self.trouble = f"{cause}; {bundle}"
        restarting = BrokerRestartingError(
            f"the broker restarts after an internal error ({cause}); {bundle}. Try again",
            bundle=str(folder),
        )
        failed: MessagingError = restarting
        if len(requests) == 1 and isinstance(error, Exception):
            failed = CommandFailedError(
                f"the broker restarts because this command caused an internal error ({cause}); it "
                f"was not executed; {bundle}. Do not repeat the command, and report the error",
                bundle=str(folder),
            )
        waiting = [
            *self.namespace.waiting_requests(),
            *self.delayed.requests(),
        ]
        self.stranded = [*requests, *waiting]
        self.delayed.forget()
        self.abandon()
        del self.namespace, self._compaction, self.log, self.spill
        del self._self_check, self._spilling
        gc.collect()
        self._reopens_at = NEVER_US if pause is None else self._now + pause
        if pause is None:
            raise GaveUpError(
                f"the broker restarted too often for the same cause and stops: {self.trouble}. "
                "Report it with the newest folder in diagnostics/"
            )
        if not pause:
            self._open()
        for request in requests:
            request.fail(failed)
        for request in waiting:
            request.fail(restarting)
        self.stranded = []

    def _reopen(self, requests: Sequence[Request]) -> bool:
        """Read the log again if the pause is over; otherwise refuse the requests.

        Return whether the namespace is open.
        """
        self._time.look()
        self._now = self._time.now_us()
        assert self._reopens_at is not None
        if self._now >= self._reopens_at:
            self.stranded = list(requests)
            self._open()
            self.stranded = []
            return True
        for request in requests:
            request.fail(BrokerRestartingError(f"the broker restarts: {self.trouble}. Try again"))
        return False

    def _report(self, error: BaseException) -> Path | None:
        """Write a diagnostic bundle; a failure to do so must not stop the restart."""
        recent = [f"{kind.__name__} {path}" for kind, path in self._recent]
        directory = self.settings.directory / "diagnostics"
        try:
            return write_bundle(directory, error, self.namespace, self.log, recent, self._now)
        except Exception as trouble:  # noqa: BLE001 - the restart is more important
            _log.warning(
                "The diagnostic bundle could not be written, and the broker restarts without it: "
                "%s. Make %s writable, or free space on its disk",
                trouble,
                directory,
            )
            return None

    # -- called by the writer ------------------------------------------------------------------

    def reconfigure(self, namespace: NamespaceSettings, ledger: LedgerSettings) -> None:
        """Apply new limits and ledger settings; they also apply after self-healing restarts."""
        self._ledgers.reconfigure(ledger)
        self.settings = replace(self.settings, namespace=namespace, ledger=self._ledgers.settings)
        if not self.is_healing:
            self.namespace.reconfigure(namespace)

    @property
    def is_healing(self) -> bool:
        """Whether it waits to restart from its log."""
        return self._reopens_at is not None

    def waiting_requests(self) -> list[Request]:
        """Return all waiting requests."""
        return [] if self.is_healing else self.namespace.waiting_requests()

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Remove waiting requests; they get no reply."""
        if not self.is_healing:
            self.namespace.withdraw(requests)

    def snapshot(self, *, is_open: bool) -> Snapshot:
        """Return counts and sizes, without those of entities, which `look_at` returns."""
        meter = self._ledgers.meter.table()
        if self.is_healing:
            failures = self._rule_failures.total
            return Snapshot(is_open, False, self.restarts, 0, 0, [], meter, rule_failures=failures)
        namespace = self.namespace
        return Snapshot(
            is_open,
            self.health.spilling,
            self.restarts,
            namespace.shared.open_receives,
            self.log.size_in_bytes,
            [],
            meter,
            sum(namespace.failures.values()),
            self._rule_failures.total,
            len(self.spill),
        )

    def entities(self) -> list[Entity]:
        """Return all entities."""
        return [] if self.is_healing else list(self.namespace.directory)

    def look_at(self, entities: Sequence[Entity]) -> list[tuple[RuntimeProperties, float]]:
        """Return the counts of entities, and the ages of their oldest messages in seconds."""
        now, found = self._time.now_us(), []
        for entity in entities:
            oldest = entity.queue.waiting.oldest_enqueued()
            age = 0 if oldest is None else max(0, now - oldest)
            found.append((entity.runtime(), age / SECOND_US))
        return found

    def close(self) -> None:
        """Write pending settlements, answer them, and release the files."""
        if self.is_healing:
            return
        if self._kept:
            commit = self._new_commit()
            self.delayed.add_to(commit)
            try:
                self._append(commit)
            except StoreUnavailableError as error:
                _log.warning(
                    "Settlements could not be written before the namespace closed: %s. Their "
                    "messages are delivered again after the next start",
                    error,
                )
                for request, _ in [*commit.replies, *commit.refusals]:
                    request.fail(error)
            else:
                self._answer(commit)
        now = self._look_at_clock()
        self.namespace.meter_waiting()
        self._ledgers.add_inventory(now, self.log.last_record, self._present_messages())
        self._ledgers.close(now)
        self.abandon()

    def abandon(self) -> None:
        """Release the files without writing."""
        if not self.is_healing:
            self.spill.close()
            self.log.close()

    def crash(self) -> None:
        """Close the files as the system does for a killed process."""
        if not self.is_healing:
            self.spill.crash()
            self.log.crash()
