"""Carries messages of a backlog queue home under lock, for a secondary without ranges.

    secondary --Receive--> restored --by destination--> Send with its origin --> primary
              <--Settle--- complete what is home, dead-letter poison, release the rest

A visit receives until the queue is empty or a bound is reached. A message leaves the queue only
after the primary has accepted it. Messages of a failing destination stay locked until the visit
ends, so that the visit reaches the messages behind them. The visit renews the locks meanwhile, and
then releases the messages in order.

A killed visit leaves its messages locked. The planner visits the queue again only after
the locks have expired; otherwise later messages would overtake the locked ones. A Twinbus primary
recognises by their origin the messages that it has already accepted. The origin is the sender and
the sender's number. For a message without a sender, the origin is the backlog queue with its
creation time, and the sequence number. Any other primary may enqueue messages twice. One thread
runs a visit.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
import pyarrow as pa

from twinbus import compute as pc
from twinbus.clock import moment_us
from twinbus.errors import MessagingError, OperationTimeoutError, StaleEpochError
from twinbus.intervals import Intervals
from twinbus.limits import (
    CARRIED_BYTES,
    CARRY_TIMEOUT,
    MAX_REASON_CHARACTERS,
    MAX_VISIT_LOCKED,
    PING_CONTENT_TYPE,
    SECOND_US,
    SETTLE_TIMEOUT_S,
    VISIT_RECEIVE_MESSAGES,
    VISIT_S,
)
from twinbus.message import Int64s
from twinbus.namespace.contract import Namespace
from twinbus.pairing.backlog import restored
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Disposition, GetRuntimeProperties, Receive, Settle
from twinbus.syphon.carrier import (
    CANNOT_GO_HOME,
    INTERRUPTED,
    NO_TRIALS,
    Carried,
    Carrier,
    Range,
    Trial,
    canonical,
    failure_of,
)
from twinbus.syphon.lock_renewal import LockRenewal
from twinbus.syphon.transfers import Passed

_log = logging.getLogger("twinbus.syphon")
_TIMEOUT_S = CARRY_TIMEOUT.total_seconds()


def queue_origin(secondary: Namespace, queue: str) -> tuple[str, int]:
    """Return the origin name of a backlog queue, and how many messages the queue has.

    The name contains the creation time, because a queue that is deleted and created again starts
    its sequence numbers again. The name is empty if the engine does not number messages.
    """
    properties = secondary.ask(GetRuntimeProperties(queue), SETTLE_TIMEOUT_S)
    if Capability.SEQUENCE_NUMBERS not in secondary.capabilities:
        return "", properties.active_message_count
    created = moment_us(properties.created_at_utc)
    return f"{canonical(queue)}#created.{created}", properties.active_message_count


class LockedCarrier:
    """Visits backlog queues. Not thread-safe."""

    def __init__(self, carrier: Carrier, secondary: Namespace, max_messages: int) -> None:
        self._carrier = carrier
        self._secondary = secondary
        self._max_messages = max_messages  # per visit
        self.is_repeated = False  # True: an earlier run of the task may have left messages locked
        self.transfers = carrier.transfers

    def carry(
        self,
        queue: str,
        ranges: Sequence[Range],
        skipped: Iterable[str] = (),
        on_trial: Mapping[str, Trial] = NO_TRIALS,  # noqa: ARG002 - `skipped` covers them here
    ) -> list[Carried]:
        """Visit a queue; the single range has its origin, and how long its locks last."""
        (visited,) = ranges
        assert visited.is_locked
        if self.is_repeated:
            return [Carried(queue, visited, is_settled=True, unread=INTERRUPTED)]
        visit = _LockedVisit(self._carrier, self._secondary, queue, visited, set(skipped))
        visit.run(self._max_messages)
        return [visit.carried]


class _LockedVisit:
    """One visit to one queue."""

    def __init__(
        self,
        carrier: Carrier,
        secondary: Namespace,
        queue: str,
        visited: Range,
        blocked: set[str],
    ) -> None:
        self.carried = Carried(queue, visited, is_settled=True)
        self._carrier = carrier
        self._secondary = secondary
        self._queue = queue
        self._blocked = blocked  # destinations to skip
        self._locked: list[pa.Array] = []  # lock tokens of messages that stay in the queue
        self._settling: list[tuple[Future[None], Disposition]] = []
        self._received = 0
        self._renewal = LockRenewal(secondary, queue, visited.lock_us / SECOND_US)

    def run(self, max_messages: int) -> None:
        """Receive, send and settle until the queue is empty or a bound is reached."""
        deadline = time.monotonic() + VISIT_S
        pending: Future[pa.RecordBatch] | None = self._receive()
        try:
            while pending is not None:
                batch = self._reply(pending)  # after a timeout it stays pending
                pending = None
                if not batch.num_rows:
                    self.carried.is_drained = True
                    break
                self._received += batch.num_rows
                is_over = self._received >= max_messages or time.monotonic() > deadline
                if not is_over and sum(map(len, self._locked)) < MAX_VISIT_LOCKED:
                    pending = self._receive()
                self._deliver(batch)
        except MessagingError as error:
            self.carried.unread = failure_of(error)
        finally:
            if pending is not None:
                pending.add_done_callback(self._release_late)
                self.carried.unread = INTERRUPTED  # the receive may lock messages after the visit
            for tokens in self._locked:
                self._settle(tokens, Disposition.RELEASE)
            self._renewal.close()
            self._await_settlements()

    def _receive(self) -> "Future[pa.RecordBatch]":
        command = Receive(self._queue, VISIT_RECEIVE_MESSAGES, max_bytes=CARRIED_BYTES)
        received = self._secondary.submit(command)
        received.add_done_callback(self._renewal.add)
        return received

    def _reply(self, pending: "Future[pa.RecordBatch]") -> pa.RecordBatch:
        began = time.monotonic()
        try:
            return pending.result(_TIMEOUT_S)
        except TimeoutError:
            raise OperationTimeoutError(
                f"{self._queue} did not answer a receive within {_TIMEOUT_S:.0f} s. The syphon "
                "visits it again"
            ) from None
        finally:
            self.carried.reading_s += time.monotonic() - began

    def _check_origin(self) -> None:
        """Raise if the queue was deleted and created again after the planner read its origin."""
        if not self.carried.range.origin:
            return
        origin, _ = queue_origin(self._secondary, self._queue)
        if origin != self.carried.range.origin:
            raise StaleEpochError(
                f"the backlog queue {self._queue} was deleted and created again during the visit; "
                "the next visit carries its messages"
            )

    # -- messages ----------------------------------------------------------------------------------

    def _deliver(self, batch: pa.RecordBatch) -> None:
        """Send messages home, and settle them."""
        is_ping = pc.equal(batch.column("content_type"), PING_CONTENT_TYPE).fill_null(False)
        if pc.any(is_ping).as_py():  # the secondary does not recognise pings, and stores them
            self._settle(batch.filter(is_ping).column("lock_token"), Disposition.COMPLETE)
            batch = batch.filter(pc.invert(is_ping))
        if not batch.num_rows:
            return
        numbers = self._numbers(batch)
        piece = Carried(self._queue, self.carried.range)
        try:
            self._send(batch, numbers, piece)
        finally:
            self._settle_piece(batch, numbers, piece)
            self.carried.merge(piece)

    def _numbers(self, batch: pa.RecordBatch) -> Int64s:
        """Return a number for each message: its sequence number, or its position in the visit."""
        if self.carried.range.origin:
            numbers: Int64s = batch.column("sequence_number").to_numpy()
            return numbers
        return np.arange(self._received - batch.num_rows, self._received, dtype=np.int64)

    def _send(self, batch: pa.RecordBatch, numbers: Int64s, piece: Carried) -> None:
        own = self._carrier.own_rows(batch, piece)
        if own.num_rows != batch.num_rows:
            tokens = own.column("lock_token")
            is_own = pc.is_in(batch.column("lock_token"), value_set=tokens)
            numbers = numbers[is_own.to_numpy(zero_copy_only=False)]
        found = restored(own)
        if found.senders.null_count:  # only their sequence numbers tell these messages apart
            self._check_origin()
        self._carrier.deliver(found, numbers, piece, self._blocked)
        if self.carried.range.origin:
            self._carrier.transfers.note(piece, Passed.of(own, found))
            self._carrier.write_transfers()  # before anything is settled

    def _settle_piece(self, batch: pa.RecordBatch, numbers: Int64s, piece: Carried) -> None:
        """Complete accepted messages, dead-letter poison, and keep the rest locked."""
        tokens = batch.column("lock_token")
        is_home = Intervals(sorted(piece.completed)).contains(numbers)
        if is_home.any():
            self._settle(tokens.filter(pa.array(is_home)), Disposition.COMPLETE)
        reasons: dict[str, list[int]] = {}
        for number, why in piece.poison:
            reasons.setdefault(why[:MAX_REASON_CHARACTERS], []).append(number)
        for why, poison in reasons.items():
            is_poison = pa.array(np.isin(numbers, poison))
            self._settle(tokens.filter(is_poison), Disposition.DEAD_LETTER, why)
        stays = ~is_home & ~np.isin(numbers, [number for number, _ in piece.poison])
        enqueued = batch.column("enqueued_time_utc")
        oldest = enqueued.filter(pa.array(stays)) if stays.any() else enqueued
        self._note_oldest(oldest)
        if stays.any():
            self._locked.append(tokens.filter(pa.array(stays)))

    def _note_oldest(self, enqueued: pa.Array) -> None:
        """Record when the oldest waiting message was diverted.

        The time is that of the oldest message that stays in the queue. If none stays, it is the
        oldest time in the last batch, because the messages behind that batch are newer.
        """
        oldest = pc.min(enqueued).as_py()
        if oldest is not None and not (self._locked and self.carried.oldest_us is not None):
            self.carried.oldest_us = moment_us(oldest)

    # -- settling ----------------------------------------------------------------------------------

    def _settle(
        self, tokens: pa.Array, disposition: Disposition, description: str | None = None
    ) -> None:
        self._renewal.remove(tokens)
        reason = CANNOT_GO_HOME if disposition is Disposition.DEAD_LETTER else None
        command = Settle(self._queue, tokens, disposition, reason, description)
        self._settling.append((self._secondary.submit(command), disposition))

    def _await_settlements(self) -> None:
        """Wait for the settlements; if one fails, the queue delivers its messages again.

        Messages that could not be released stay locked, and later ones must not overtake them.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        for settling, disposition in self._settling:
            try:
                settling.result(max(deadline - time.monotonic(), 0.0))
            except (MessagingError, TimeoutError) as error:
                if disposition is Disposition.RELEASE:
                    self.carried.unread = INTERRUPTED
                _log.warning(
                    "messages of %s could not be settled, so the queue delivers them again: %s",
                    self._queue,
                    str(error) or "no reply in time",
                )

    def _release_late(self, received: "Future[pa.RecordBatch]") -> None:
        """Release messages that arrived after the visit had stopped; called in any thread."""
        with suppress(Exception):  # the receive failed: nothing is locked
            batch = received.result()
            if batch.num_rows:
                tokens = batch.column("lock_token")
                self._secondary.submit(Settle(self._queue, tokens, Disposition.RELEASE))
