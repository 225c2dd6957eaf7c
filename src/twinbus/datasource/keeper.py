"""Keeps the leases of a stream: takes the next range, renews, completes and releases.

    range leased ahead      released when the query stops
    batch under way         renewed; kept when the query stops, because Spark may have committed it
    batch committed         completed when Spark asks for the next batch, or at the next start

The lease of an offset may have expired. The offset may also be of another queue: the options of the
stream name another queue now, the queue was deleted and created again, or the server was restored
from a backup. The keeper completes messages only under the lease of their batch, or under a new
lease whose origin is that of the offset. It runs in the planner's process; a thread renews the
leases.
"""

import logging
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress

from twinbus.datasource.offsets import Pairs, StreamOffset
from twinbus.datasource.options import SourceOptions
from twinbus.errors import (
    InvalidOperationError,
    MessagingError,
    OperationTimeoutError,
    RangeUnavailableError,
    StaleEpochError,
)
from twinbus.limits import (
    BATCH_PATIENCE_S,
    MAX_LEASE_MESSAGES,
    OPERATION_TIMEOUT,
    POLL_GATHER_S,
    POLL_GRACE_S,
    SYPHON_POLL,
)
from twinbus.protocol.commands import (
    NO_WAIT,
    LeaseRange,
    RangeLease,
    ReleaseRange,
    RenewRange,
    SettleRange,
)

_log = logging.getLogger("twinbus.source")
_Poll = Future[RangeLease | None]
_TIMEOUT_S = OPERATION_TIMEOUT.total_seconds()


class LeaseKeeper:
    """The leases of one stream."""

    def __init__(self, options: SourceOptions) -> None:
        self._namespace = options.namespace()
        self._courier = options.courier()
        self._path = options.path
        self._duration = options.lease
        self._lock = threading.Lock()
        self._poll: _Poll | None = None
        self._fresh: int | None = None  # the epoch of a lease without a batch
        self._epochs: dict[int, int] = {}  # by batch: the epoch of its lease
        self._completed = 0  # the last completed batch
        self._is_closed = threading.Event()
        threading.Thread(target=self._renew, name="twinbus-source-lease", daemon=True).start()

    # -- the next range ----------------------------------------------------------------------------

    def ask(self, owner: str, rows: int, size: int, *, wait: bool = True) -> _Poll:
        """Request the next range, unless a request is pending."""
        with self._lock:
            if self._poll is None:
                command = LeaseRange(
                    self._path,
                    owner,
                    rows,
                    duration=self._duration,
                    wait=SYPHON_POLL if wait else NO_WAIT,
                    max_bytes=size,
                )
                self._poll = self._namespace.submit(command)
            return self._poll

    def lease(self, owner: str, rows: int, size: int, *, wait: bool) -> RangeLease | None:
        """Return a lease, or None if there is none yet; with `wait` the request stays pending.

        Spark asks the sources of a union one after the other: an idle source must not block the
        others. Without `wait`, None means that no message is there, so no reply is an error.
        """
        poll = self.ask(owner, rows, size, wait=wait)
        try:
            lease = poll.result(POLL_GATHER_S if wait else _TIMEOUT_S)
        except MessagingError:
            self._poll = None
            raise
        except TimeoutError:
            if wait:
                return None
            raise OperationTimeoutError(
                f"the server did not answer within {_TIMEOUT_S:.0f} s whether {self._path} has "
                "messages. Start the query again when the server answers"
            ) from None
        with self._lock:
            self._poll = None
            if lease is not None:
                self._fresh = lease.epoch  # until its batch begins
        return lease

    # -- a batch -----------------------------------------------------------------------------------

    def lease_of(self, end: StreamOffset) -> int:
        """Return the epoch of the lease of a batch; if it has expired, lease the range again.

        0 means that all messages of the batch are completed.
        """
        self._check_path(end)
        self._fresh = None
        try:
            self._courier.ask(RenewRange(self._path, end.epoch, self._duration))
            self._epochs[end.batch] = end.epoch
        except StaleEpochError:
            self._epochs[end.batch] = self._lease_batch_again(end)
        return self._epochs[end.batch]

    def _lease_batch_again(self, end: StreamOffset) -> int:
        deadline = time.monotonic() + 2 * self._duration.total_seconds()
        while True:
            try:
                lease = self._lease_again(end, end.intervals)
            except RangeUnavailableError:  # another reader has leased a part of it for now
                if time.monotonic() > deadline:
                    raise
                time.sleep(BATCH_PATIENCE_S)
            else:
                return lease.epoch if lease is not None else 0

    def _lease_again(self, end: StreamOffset, intervals: Pairs) -> RangeLease | None:
        """Return a new lease from the first to the last of these messages of a batch."""
        first, last = intervals[0][0], intervals[-1][1]
        count = min(last - first + 1, MAX_LEASE_MESSAGES)
        command = LeaseRange(self._path, end.owner, count, first, last, duration=self._duration)
        lease = self._courier.ask(command)
        if lease is not None and end.origin and lease.origin != end.origin:
            self._courier.ask(ReleaseRange(self._path, lease.epoch))
            raise _foreign(
                f"batch {end.batch} was read from {end.origin}, and the messages {first} to {last} "
                f"of {self._path} now belong to {lease.origin}: the queue was created again, the "
                "server was restored from a backup, or the connection leads to another server"
            )
        return lease

    def complete(self, end: StreamOffset) -> None:
        """Complete the messages of a committed batch, once.

        If its lease has expired, others may have leased some of them: these are delivered again.
        """
        if end.batch <= self._completed:
            return
        self._check_path(end)
        epoch = self._epochs.get(end.batch, end.epoch)
        try:
            self._settle(epoch, end.intervals)
        except StaleEpochError:
            if end.origin:
                self._complete_again(end, end.intervals)
            else:
                _log.warning(
                    "An earlier version of Twinbus wrote the checkpoint, which does not name the "
                    "queue of batch %d. The lease of the batch has expired, so its messages stay "
                    "in %s and are delivered again",
                    end.batch,
                    self._path,
                )
        self._epochs.pop(end.batch, None)
        self._completed = end.batch

    def _complete_again(self, end: StreamOffset, intervals: Pairs) -> None:
        """Lease messages of a batch again and complete them, except those that others lease."""
        try:
            lease = self._lease_again(end, intervals)
            if lease is None:
                return
            self._settle(lease.epoch, intervals)
        except StaleEpochError:
            return  # the broker ended the lease between the two commands
        except RangeUnavailableError:
            if len(intervals) > 1:
                half = len(intervals) // 2
                self._complete_again(end, intervals[:half])
                self._complete_again(end, intervals[half:])
            return
        rest = tuple(pair for pair in intervals if pair[1] > lease.last)
        if rest and len(rest) < len(intervals):  # a lease has at most MAX_LEASE_MESSAGES
            self._complete_again(end, rest)

    def _settle(self, epoch: int, intervals: Pairs) -> None:
        self._courier.ask(SettleRange(self._path, epoch, intervals, release=True))

    def _check_path(self, end: StreamOffset) -> None:
        if end.path and end.path.lower() != self._path.lower():
            raise _foreign(
                f"batch {end.batch} was read from {end.path}, and this stream reads {self._path}"
            )

    # -- renewing and releasing --------------------------------------------------------------------

    def _ahead(self) -> set[int]:
        """Return the leases of ranges that are in no batch yet."""
        with self._lock:
            epochs = {self._fresh} if self._fresh else set()
            if self._poll is not None and self._poll.done() and not self._poll.exception():
                granted = self._poll.result()
                epochs |= {granted.epoch} if granted is not None else set()
        return epochs

    def _renew(self) -> None:
        pause_s = self._duration.total_seconds() / 3
        while not self._is_closed.wait(pause_s):
            for epoch in sorted(({*self._epochs.values()} | self._ahead()) - {0}):
                with suppress(MessagingError):
                    self._courier.ask(RenewRange(self._path, epoch, self._duration))

    def close(self) -> None:
        """Release what was leased ahead; the end of the process withdraws the pending request.

        The leases of batches stay until they expire: Spark does not say whether it has committed
        the last batch, and the next start of the query completes or repeats it.
        """
        self._is_closed.set()
        released = self._ahead()
        self._release(released)
        if self._poll is not None:  # its reply may be a lease on the ranges that were just released
            wait([self._poll], POLL_GATHER_S)
            self._release(self._ahead() - released)

    def _release(self, epochs: set[int]) -> None:
        replies = [self._namespace.submit(ReleaseRange(self._path, epoch)) for epoch in epochs]
        wait(replies, POLL_GRACE_S)


def _foreign(what: str) -> MessagingError:
    return InvalidOperationError(
        f"this checkpoint belongs to another queue: {what}. Nothing was completed. Use another "
        "checkpointLocation for this queue"
    )
