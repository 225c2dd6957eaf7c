"""Carries messages of a backlog queue home under lock, where the secondary has no ranges.

    secondary --Receive--> restored --by destination--> Send with its origin --> primary
              <--Settle--- complete what is home, dead-letter poison, release the rest

One visit receives until the queue is empty or a bound is reached. The next messages are received
while some are sent. A message leaves the queue only after the primary has it. Messages of a failing
destination stay locked until the visit ends, so that those behind them are reached; then the visit
releases them in their order.

A visit that is killed leaves its messages locked. The queue delivers them again when the locks have
expired, and the planner waits for that, or later messages would overtake them. A Twinbus primary
recognises those that it took before by their origin: the creation of the backlog queue and their
sequence numbers, or the numbers of their sender where the queue has none. Any other primary may
enqueue them twice.
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
    MAX_VISIT_HELD,
    PING_CONTENT_TYPE,
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
    canonical,
    failure_of,
)
from twinbus.syphon.transfers import Passed

_log = logging.getLogger("twinbus.syphon")
_TIMEOUT_S = CARRY_TIMEOUT.total_seconds()


def queue_origin(secondary: Namespace, queue: str) -> tuple[str, int]:
    """Return the name of a backlog queue as an origin, and how many messages it has.

    The creation time tells a queue from a later one of the same path, which numbers its messages
    from the start again. The name is empty where the engine does not number messages.
    """
    seen = secondary.ask(GetRuntimeProperties(queue), SETTLE_TIMEOUT_S)
    if Capability.SEQUENCE_NUMBERS not in secondary.capabilities:
        return "", seen.active_message_count
    born = moment_us(seen.created_at_utc)
    return f"{canonical(queue)}#created.{born}", seen.active_message_count


class LockedCarrier:
    """Visits backlog queues; used by one thread."""

    def __init__(self, carrier: Carrier, secondary: Namespace, max_messages: int) -> None:
        self._carrier = carrier
        self._secondary = secondary
        self._max_messages = max_messages  # of one visit
        self.is_repeated = False  # an earlier run of the task may have left messages locked
        self.transfers = carrier.transfers

    def carry(
        self,
        queue: str,
        ranges: Sequence[Range],
        held_back: Iterable[str] = (),
        on_trial: Mapping[str, int] = NO_TRIALS,  # noqa: ARG002 - the planner holds those back
    ) -> list[Carried]:
        """Visit a queue; the one range says only what the queue is called as an origin."""
        [visited] = ranges
        if self.is_repeated:
            return [Carried(queue, visited, is_settled=True, unread=INTERRUPTED)]
        visit = _LockedVisit(self._carrier, self._secondary, queue, visited, set(held_back))
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
        self._blocked = blocked  # destinations that are passed over
        self._held: list[pa.Array] = []  # lock tokens of messages that stay
        self._settling: list[Future[None]] = []
        self._received = 0

    def run(self, max_messages: int) -> None:
        """Receive, send and settle until the queue is empty or a bound is reached."""
        deadline = time.monotonic() + VISIT_S
        coming: Future[pa.RecordBatch] | None = self._receive()
        try:
            while coming is not None:
                batch = self._reply(coming)
                coming = None
                if not batch.num_rows:
                    self.carried.is_drained = True
                    break
                if not self._received:
                    self._check_origin(batch)
                self._received += batch.num_rows
                is_over = self._received >= max_messages or time.monotonic() > deadline
                if not is_over and sum(map(len, self._held)) < MAX_VISIT_HELD:
                    coming = self._receive()
                self._deliver(batch)
        except MessagingError as error:
            self.carried.unread = failure_of(error)
        finally:
            if coming is not None:
                coming.add_done_callback(self._give_back)
            for tokens in self._held:
                self._settle(tokens, Disposition.RELEASE)
            self._await_settlements()

    def _receive(self) -> "Future[pa.RecordBatch]":
        command = Receive(self._queue, VISIT_RECEIVE_MESSAGES, max_bytes=CARRIED_BYTES)
        return self._secondary.submit(command)

    def _reply(self, coming: "Future[pa.RecordBatch]") -> pa.RecordBatch:
        began = time.monotonic()
        try:
            return coming.result(_TIMEOUT_S)
        except TimeoutError:
            coming.add_done_callback(self._give_back)
            raise OperationTimeoutError(
                f"{self._queue} did not answer a receive within {_TIMEOUT_S:.0f} s"
            ) from None
        finally:
            self.carried.reading_s += time.monotonic() - began

    def _check_origin(self, batch: pa.RecordBatch) -> None:
        """Refuse messages of a queue that was deleted and created anew since the planner looked."""
        if not self.carried.range.origin:
            return
        origin, _ = queue_origin(self._secondary, self._queue)
        if origin != self.carried.range.origin:
            self._held.append(batch.column("lock_token"))
            raise StaleEpochError(f"{self._queue} was deleted and created anew")

    # -- messages ----------------------------------------------------------------------------------

    def _deliver(self, batch: pa.RecordBatch) -> None:
        """Send messages home, and settle them."""
        is_ping = pc.equal(batch.column("content_type"), PING_CONTENT_TYPE).fill_null(False)
        if pc.any(is_ping).as_py():  # the engine did not know what a ping is
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
        """Return a number for each message: its own, or its position in the visit."""
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
        self._carrier.deliver(found, numbers, piece, self._blocked)
        if self.carried.range.origin:
            self._carrier.transfers.note(piece, Passed.of(own, found))
            self._carrier.write_transfers()  # before anything is settled

    def _settle_piece(self, batch: pa.RecordBatch, numbers: Int64s, piece: Carried) -> None:
        """Complete what is home, put poison aside, and keep the rest locked."""
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
            self._held.append(tokens.filter(pa.array(stays)))

    def _note_oldest(self, enqueued: pa.Array) -> None:
        """Note since when messages wait: those that stay, or those behind the last received."""
        oldest = pc.min(enqueued).as_py()
        if oldest is not None and not (self._held and self.carried.oldest_us is not None):
            self.carried.oldest_us = moment_us(oldest)

    # -- settling ----------------------------------------------------------------------------------

    def _settle(
        self, tokens: pa.Array, disposition: Disposition, description: str | None = None
    ) -> None:
        reason = CANNOT_GO_HOME if disposition is Disposition.DEAD_LETTER else None
        command = Settle(self._queue, tokens, disposition, reason, description)
        self._settling.append(self._secondary.submit(command))

    def _await_settlements(self) -> None:
        """Wait for settlements; messages whose settlement fails are delivered again."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        for settling in self._settling:
            try:
                settling.result(max(deadline - time.monotonic(), 0.0))
            except (MessagingError, TimeoutError) as error:
                _log.warning(
                    "messages of %s could not be settled and will be delivered again: %s",
                    self._queue,
                    str(error) or "no answer in time",
                )

    def _give_back(self, received: "Future[pa.RecordBatch]") -> None:
        """Release messages that came after the visit had given up; comes in any thread."""
        with suppress(Exception):  # the receive failed: nothing is locked
            batch = received.result()
            if batch.num_rows:
                tokens = batch.column("lock_token")
                self._secondary.submit(Settle(self._queue, tokens, Disposition.RELEASE))
