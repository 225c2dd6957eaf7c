"""Spilling: sends go to the spill store while the log refuses records, and are moved back later.

A spilled send is durable and acknowledged, but not visible. When the log accepts records again,
the oldest spilled sends become part of each turn. They are removed from the spill store when the
record of the turn is durable. A spilled send that cannot be moved stays in the spill store, because
it was acknowledged. Later spilled sends to the same entity wait until it is moved, so that their
order is kept; sends to other entities are moved.

The engine calls this from the thread with the turn. store/spill.py has the files, and
`StoreHealth` decides when to spill.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from twinbus.broker.sending.intake import full
from twinbus.broker.sending.row_intake import counted
from twinbus.broker.store.commit import TAKEN, Commit, Effect, Entries, Fact
from twinbus.broker.store.spill import Spill, SpilledSend, StoreHealth
from twinbus.broker.turn.namespace import BrokerNamespace
from twinbus.errors import StoreUnavailableError
from twinbus.limits import (
    MAX_BATCH_BYTES,
    MAX_SPILL_BYTES,
    SPILL_DRAIN_SENDS,
    SPILL_FAILURE_PAUSE_US,
    SPILL_RETRY_US,
)
from twinbus.message import sizes
from twinbus.protocol.commands import Send, SendReceipt
from twinbus.protocol.requests import Request
from twinbus.protocol.table import size_of


@dataclass(frozen=True, slots=True)
class _SpillMoved(Effect):
    """Spilled sends that were moved to the log."""

    spilling: "Spilling"
    positions: Sequence[int]
    next_entries: Entries  # of the record after this one

    def durable(self) -> None:
        """Remove the sends from the spill store."""
        self.spilling.note_moved(self.positions, self.next_entries)


@dataclass(frozen=True, slots=True)
class _LogRecovered(Effect):
    """A record that shows whether the log accepts records again."""

    health: StoreHealth

    def durable(self) -> None:
        """End the storage trouble."""
        self.health.recovered()


class Spilling:
    """Stores sends in the spill store, and moves them into the log."""

    def __init__(
        self,
        namespace: BrokerNamespace,
        spill: Spill,
        health: StoreHealth,
        probe: Fact,
        pauses: dict[str, int],
    ) -> None:
        self._directory = namespace.directory
        self._transfers = namespace.transfers
        self._sends = namespace.sends
        self._isolation = namespace.isolation
        self._spill = spill
        self._health = health
        self._probe = probe  # what is written to find out whether the log accepts records
        # By lower-case path: when its spilled sends are tried again. The engine owns this dict, so
        # that it survives self-healing restarts.
        self._pauses = pauses

    def shift(self, by: int) -> None:
        """Move the times, because the wall clock was set."""
        self._health.shift(by)
        self._spill.shift(by)
        for path in self._pauses:
            self._pauses[path] += by

    # -- into the spill store ------------------------------------------------------------------

    def spill_sends(self, requests: Sequence[Request], now: int) -> list[Request]:
        """Spill the sends that can be spilled, and answer them; return the other requests."""
        left: list[Request] = []
        for request in requests:
            if not isinstance(request.command, Send):
                left.append(request)
                continue
            work = partial(self._spill_one, request, request.command, left, now)
            failure = self._isolation.attempt(work, Commit(0))
            if failure is not None:
                path = request.command.path
                error = self._isolation.report(failure, f"a send to {path}")
                request.fail(error)
                self._sends.meter_refused(request.command, error)
        return left

    def _spill_one(self, request: Request, command: Send, left: list[Request], now: int) -> None:
        batch = self._sends.check_send(command)
        if batch.column("scheduled_enqueue_time_utc").null_count != batch.num_rows:
            left.append(request)  # its sequence number, needed to cancel it, is not known here
            return
        self._check_room(command.path, batch)
        self._spill.append(command.path, batch, command.origin, request.principal.id, now)
        request.answer(SendReceipt([0] * batch.num_rows))
        self._sends.meter_spilled(command, batch)

    def _check_room(self, path: str, batch: pa.RecordBatch) -> None:
        """Raise if the entity of a send or the spill store has no room for it."""
        entity = self._directory.entity(path)
        if counted(sizes(batch)) > entity.room - self._spill.bytes[path.lower()]:
            raise full(entity)
        if self._spill.size_in_bytes >= MAX_SPILL_BYTES:
            raise StoreUnavailableError(
                f"the spill store is full ({self._spill.size_in_bytes} of {MAX_SPILL_BYTES} bytes) "
                "and the log still cannot be written, so the send was refused. Free space on the "
                "disk of the log, or repair the disk",
                path=path,
            )

    # -- into the log --------------------------------------------------------------------------

    def drain(self, now: int, commit: Commit, next_entries: Entries) -> None:
        """Add the oldest spilled sends to the commit of this turn.

        `next_entries` go into the record after this one.
        """
        if not len(self._spill):
            self._try_log(now, commit)
            return
        pauses = {path: due for path, due in self._pauses.items() if due > now}
        moved: list[int] = []
        for spilled in self._movable_sends(pauses):
            path = spilled.send.path
            if path.lower() in pauses:
                continue
            work = partial(self._sends.take_spilled, spilled.send, spilled.owner, now, commit)
            failure = self._isolation.attempt(work, commit)
            if failure is None:
                moved.append(spilled.position)
            else:
                self._isolation.report(failure, f"a spilled send to {path}")
                pauses[path.lower()] = now + SPILL_FAILURE_PAUSE_US
        self._pauses.clear()
        self._pauses.update(pauses)
        self._health.retry_at = now if moved else min(pauses.values())
        if not moved:
            return
        commit.must_sync = True
        commit.effects.append(_SpillMoved(self, moved, next_entries))

    def _movable_sends(self, paused: Container[str]) -> list[SpilledSend]:
        """Return the oldest spilled sends, as many as one turn moves."""
        sends: list[SpilledSend] = []
        size = 0
        for spilled in self._spill.sends(paused):
            size += size_of(spilled.send)
            if sends and (size > MAX_BATCH_BYTES or len(sends) == SPILL_DRAIN_SENDS):
                break
            sends.append(spilled)
        return sends

    def note_moved(self, positions: Sequence[int], next_entries: Entries) -> None:
        """Remove sends from the spill store that are now in the log.

        When the spill store is empty, the storage trouble ends, either here or in `_try_log`.
        """
        done = self._spill.moved(positions)
        if done:
            for source in done:
                self._transfers.forget(source)
                next_entries.facts.append(Fact(TAKEN, source, None))
            self._health.recovered()

    def _try_log(self, now: int, commit: Commit) -> None:
        """End the storage trouble, because the spill store is empty.

        If the log has refused a record and accepted none since, write a small record first: the
        trouble ends when this record is durable.
        """
        if not self._health.is_refusing:
            self._health.recovered()
            return
        self._health.retry_at = now + SPILL_RETRY_US
        commit.tentative.facts.append(self._probe)
        commit.must_sync = True
        commit.effects.append(_LogRecovered(self._health))
