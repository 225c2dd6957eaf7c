"""Recovery: reads the log of a directory into a namespace, and checks that no record is missing.

A log can be incomplete: the directory was restored from an older copy, or segments were lost. The
LOCK file and the ledger show how many records had been written. If the whole log is missing, the
broker starts only if the operator accepts the damage. If records at the end are missing, the broker
starts, does not use their numbers again, and reports them as lost (`Lineage`).

The engine calls this when it opens the directory and at each self-healing restart, before the first
turn. The next restart drops the returned objects.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from twinbus.broker.accounts.ledgers import Ledgers, Lineage
from twinbus.broker.accounts.rule_failures import RuleFailures
from twinbus.broker.accounts.trail import Trail
from twinbus.broker.queue.dead_letter import Deaths
from twinbus.broker.queue.shared import QueueContext
from twinbus.broker.queue.tokens import LockNumbers
from twinbus.broker.store.bodies import Bodies
from twinbus.broker.store.commit import Entries, Fact
from twinbus.broker.store.log import Log
from twinbus.broker.turn.compaction import Compaction
from twinbus.broker.turn.namespace import BrokerNamespace, NamespaceSettings
from twinbus.broker.turn.replay import ClockStep, Replay, restore
from twinbus.broker.undo import Undo
from twinbus.errors import LogDamagedError
from twinbus.limits import NONCE_BYTES

_log = logging.getLogger("twinbus.broker")


@dataclass(frozen=True, slots=True)
class RecoveredBroker:
    """What the log contained, and what the next records must add to it."""

    id: str  # of the namespace
    compaction: Compaction
    lineage: Lineage
    records: int  # number of records in the log
    clock_steps: dict[int, list[ClockStep]]  # by the last record before them
    kept: Entries  # must be written soon: they cause a record
    unwritten: list[Fact]  # are written with the next record, but do not cause one


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecovery:
    """Reads the log of a directory; an engine uses the same object for all of its restarts."""

    directory: Path
    ledgers: Ledgers
    rule_failures: RuleFailures
    start: str  # identifies this start of the broker in origins
    accept_damage: bool  # start without damaged records and lose their content
    # The path of a queue by its number, or "". Not a method of the namespace: the ledger keeps this
    # function while the engine restarts, and would keep the old namespace in memory with it.
    path_of: Callable[[int], str]

    def empty_namespace(self, log: Log, settings: NamespaceSettings) -> BrokerNamespace:
        """Return a namespace without entities, whose message bodies are in this log."""
        undo = Undo()
        locks = LockNumbers(int.from_bytes(os.urandom(8), "little") >> 3)
        bodies, deaths, meter = Bodies(log, undo), Deaths(undo), self.ledgers.meter
        shared = QueueContext(bodies, deaths, locks, meter, undo, nonce, self.rule_failures)
        return BrokerNamespace(shared, settings)

    def recover(self, log: Log, namespace: BrokerNamespace, now: int) -> RecoveredBroker:
        """Read the log into an empty namespace."""
        ledgers, bodies = self.ledgers, namespace.shared.bodies
        replay = Replay(ledgers.covered_record)
        replay.read(log, bodies)
        bodies.start_at(replay.number("next", "batch", 1))
        kept, unwritten = Entries(), list[Fact]()
        known = replay.facts.get("namespace", {}).get("id")
        if known is not None:
            namespace_id = known.decode()
        elif self._is_log_lost(log):
            namespace_id = ledgers.log_id or nonce()
            kept.facts.append(identity_fact(namespace_id))
        else:
            namespace_id = nonce()
            unwritten.append(identity_fact(namespace_id))
        news = restore(namespace, replay, self.start, now, accept_damage=self.accept_damage)
        namespace.count_memory()
        unwritten += news.facts
        kept.changes += news.changes
        compaction = Compaction(log, namespace, ledgers.may_forget)
        for segment, _, times in replay.history(now):
            compaction.note_history(segment, int(times.min()), int(times.max()))
        trail = Trail(self.path_of, partial(bodies.texts, "message_id"))
        lineage = self._lineage(log, namespace_id, is_new=known is None)
        ledgers.begin_trail(trail, replay.uncovered_records, lineage, now)
        log.skip_to(lineage.lost_until)
        ledgers.add_inventory(now, log.last_record, None if kept else namespace.present_messages())
        return RecoveredBroker(
            namespace_id,
            compaction,
            lineage,
            replay.records,
            replay.clock_steps,
            kept,
            unwritten,
        )

    def _is_log_lost(self, log: Log) -> bool:
        """Return whether the log is empty although LOCK or the ledger shows earlier records.

        If it is and the operator does not accept the damage, raise. If the operator accepts the
        damage, the broker uses the namespace id in the ledger, so that clients and backlog queues
        recognise the namespace.
        """
        seen = max(log.seen_record, self.ledgers.covered_record)
        if log.last_record or not seen:
            return False
        if not self.accept_damage:
            witness = "LOCK" if log.seen_record == seen else "the ledger"
            raise LogDamagedError(
                f"every segment of the log in {log.directory} is missing: the log has no "
                f"record, but {witness} shows that record {seen} had been written. Restore the "
                "files NNNNNNNNNNNNNNNNNNNN.log from a backup, or run "
                f"`twinbus restored --accept-damage {self.directory}` and start with an empty "
                "namespace: its entities, keys and messages are lost",
                path=str(log.directory),
                record=seen,
            )
        return True

    def _lineage(self, log: Log, namespace_id: str, *, is_new: bool) -> Lineage:
        """Return the identity of the log, and whether records at its end are missing.

        If records are missing, the directory was restored from a backup, or the end of its log was
        lost. The numbers of the missing records are not used again, so that reports can say what
        these records contained.
        """
        last = log.last_record
        seen = log.seen_record
        if self.ledgers.knows(namespace_id) or not last:  # an empty log: see `_is_log_lost`
            seen = max(seen, self.ledgers.covered_record)
        if seen > last and not (is_new and last):
            _log.warning(
                "%s: the log ends with record %d, but record %d had been written: the directory "
                "was restored from an older copy, or the end of the log was lost. The records in "
                "between are lost. `twinbus report` lists what the ledger knows about them",
                self.directory,
                last,
                seen,
            )
            return Lineage(namespace_id, last, seen)
        return Lineage(namespace_id, last, last)


def identity_fact(namespace_id: str) -> Fact:
    """Return the fact with the id of the namespace."""
    return Fact("namespace", "id", namespace_id.encode())


def nonce() -> str:
    """Return a name that cannot be guessed."""
    return os.urandom(NONCE_BYTES).hex()
