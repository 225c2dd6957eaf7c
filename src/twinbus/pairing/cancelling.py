"""Cancelling scheduled messages that were diverted, wherever they are by now.

A diverted message is named by a number below zero, which says where in the backlog it is. It is
taken out there under a lease, so that no syphon moves it meanwhile. One that went home, or was
tried at the primary before, is found there by all its fields: an id need not be unique, and two
messages alike in everything are the same to whoever cancels one.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from twinbus.client.courier import Courier
from twinbus.client.retry import SingleTry
from twinbus.clock import moment_us, passes_by_itself
from twinbus.errors import (
    Fault,
    MessageNotFoundError,
    MessagingError,
    RangeUnavailableError,
    StaleEpochError,
    UnsupportedCapabilityError,
)
from twinbus.limits import MAX_RECEIVE_MESSAGES, REMEMBERED_SCHEDULES
from twinbus.message import APPLICATION_FIELDS, BrokeredMessage, MessageState, to_messages
from twinbus.pairing.backlog import NOWHERE_KNOWN, number_in_backlog, place_in_backlog, restored
from twinbus.pairing.board import Board
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CancelScheduled,
    Command,
    LeaseRange,
    Peek,
    RangeLease,
    ReadRange,
    ReleaseRange,
    SendReceipt,
    SettleRange,
)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A scheduled message that was diverted."""

    path: str
    message_id: str | None
    fingerprint: bytes  # of all its fields
    due: int
    was_tried: bool  # at the primary, which may have it, too

    def is_of(self, message: BrokeredMessage) -> bool:
        """Whether this is that message, as far as an application can tell."""
        same_id = message.message_id == self.message_id
        return same_id and _fingerprint(message) == self.fingerprint


class Cancellations:
    """Remembers diverted schedules; used from many threads."""

    def __init__(self, primary: Courier, secondary: Courier, board: Board) -> None:
        self._primary = primary
        self._secondary = secondary
        self._board = board
        self._unplaced = itertools.count(1)
        self._schedules: OrderedDict[int, _Schedule] = OrderedDict()  # by the caller's number
        self._owed: list[_Schedule] = []  # to be cancelled at the primary when it is back
        self._finishing = threading.Lock()
        self._can_remove = Capability.RANGES in secondary.namespace.capabilities

    def remember(
        self, path: str, batch: pa.RecordBatch, queue: int, receipt: SendReceipt, *, was_tried: bool
    ) -> SendReceipt:
        """Return the receipt of a diverted send with numbers that cancel what is scheduled."""
        if batch.column("scheduled_enqueue_time_utc").null_count == batch.num_rows:
            return receipt
        self._forget(self._primary.clock.wall_us())
        numbers = []
        for message, number in zip(to_messages(batch), receipt.sequence_numbers, strict=True):
            told = number_in_backlog(queue, number)
            if not number or not self._can_remove:  # the reply that said where was lost, or no use
                told = number_in_backlog(NOWHERE_KNOWN, next(self._unplaced))
            numbers.append(told)
            moment = message.scheduled_enqueue_time_utc
            if moment is not None:
                mark = _fingerprint(message)
                self._schedules[told] = _Schedule(
                    path, message.message_id, mark, moment_us(moment), was_tried
                )
        return SendReceipt(numbers)

    def _forget(self, now: int) -> None:
        """Let the oldest go whose time has come, and those that are too many."""
        while self._schedules:
            number, oldest = next(iter(self._schedules.items()))
            if oldest.due > now and len(self._schedules) < REMEMBERED_SCHEDULES:
                return
            self._schedules.pop(number, None)

    # -- cancelling ----------------------------------------------------------------------------

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages: at the primary together, in the backlog one by one."""
        at_primary = [number for number in command.sequence_numbers if number >= 0]
        if at_primary:
            self._primary.ask(CancelScheduled(command.path, at_primary, command.origin))
        for number in command.sequence_numbers:
            if number < 0:
                self._cancel_diverted(command.path, number)

    def _cancel_diverted(self, path: str, number: int) -> None:
        """Cancel a message in the backlog, or at the primary if it went home or was tried there.

        Where the primary may hold it and cannot be asked, that part waits for its return.
        """
        known = self._schedules.get(number)
        if known is not None and not _is_for(known.path, path):
            known = None
        index, sequence = place_in_backlog(number)
        if index == NOWHERE_KNOWN and known is not None and self._can_remove:
            index, sequence = self._find_in_backlog(known)
        is_gone = self._remove_from_backlog(path, index, sequence)  # waits while it is leased
        if known is not None and (known.was_tried or not is_gone):
            try:
                is_gone |= self._cancel_at_primary(known)
            except MessagingError:
                if not is_gone or len(self._owed) >= REMEMBERED_SCHEDULES:
                    raise
                self._owed.append(known)
        if not is_gone and not self._can_remove:
            raise UnsupportedCapabilityError(
                f"scheduled message {number} to {path} was diverted, and the secondary cannot "
                f"remove one message from a backlog queue: that needs {Capability.RANGES.value}. "
                "It can be cancelled again when the syphon has brought it home",
                path=path,
                sequence_number=number,
                capability=Capability.RANGES.name,
            )
        if not is_gone:
            raise MessageNotFoundError(
                f"scheduled message {number} is no longer in the backlog: it was cancelled, its "
                f"time has come, or it went home before this factory began. Then `peek` {path} on "
                "the primary for its message_id and cancel it by the number it has there",
                path=path,
                sequence_number=number,
            )
        self._schedules.pop(number, None)

    def _find_in_backlog(self, known: _Schedule) -> tuple[int, int]:
        """Return the backlog queue and the number of a message; zeros when it is in none."""
        for index, queue in self._board.queues.items():
            for page in pages(_once(self._secondary), queue):
                found = restored(page)
                for row, message in enumerate(to_messages(found.batch)):
                    if known.is_of(message) and _is_for(found.paths[row].as_py(), known.path):
                        return index, page.column("sequence_number")[row].as_py()
        return 0, 0

    def _remove_from_backlog(self, path: str, index: int, sequence: int) -> bool:
        """Take a message out of its backlog queue; return whether it was there.

        While a syphon has leased it, nobody else can take it out: the operation tries again under
        the retry policy. By then the syphon has brought it home, or released it.
        """
        queue = self._board.queues.get(index)
        if queue is None or not sequence or not self._can_remove:
            return False
        courier, clock = self._secondary, self._primary.clock
        removal = _Removal(courier, queue, sequence, path)
        deadline = clock.now_us() + courier.timeout_us
        for failures in itertools.count(1):
            try:
                return removal.try_once()
            except (RangeUnavailableError, StaleEpochError):
                pause = courier.policy.backoff_us(failures, courier.random.random())
                if failures == courier.policy.max_tries or clock.now_us() + pause >= deadline:
                    raise
                clock.sleep_us(pause)
        raise AssertionError("unreachable")

    def _cancel_at_primary(self, known: _Schedule) -> bool:
        """Cancel a message that went home, or was there all along; say whether it was found."""
        for page in pages(_once(self._primary), known.path):
            for message in to_messages(page):
                if message.state is MessageState.SCHEDULED and known.is_of(message):
                    assert message.sequence_number is not None
                    numbers = [message.sequence_number]
                    self._primary.ask(self._primary.new_cancel(known.path, numbers))
                    return True
        return False

    # -- what had to wait ----------------------------------------------------------------------

    @property
    def can_go_on(self) -> bool:
        """Whether something waits that need not wait any longer."""
        return any(not self._board.is_failed_over(owed.path) for owed in self._owed)

    def finish(self) -> None:
        """Cancel at the primary what had to wait for it; in a thread of its own, for it asks."""
        if not self.can_go_on or not self._finishing.acquire(blocking=False):
            return
        if passes_by_itself(self._primary.clock):
            threading.Thread(target=self._finish, name="twinbus-cancel", daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        try:
            for owed in list(self._owed):
                if self._board.is_failed_over(owed.path):
                    continue
                try:
                    self._cancel_at_primary(owed)
                except MessagingError as error:
                    if error.fault is not Fault.CALLER:  # an entity that is gone holds nothing
                        continue
                self._owed.remove(owed)
        finally:
            self._finishing.release()


class _Removal:
    """Takes one message out of a backlog queue, under a lease."""

    def __init__(self, secondary: Courier, queue: str, sequence: int, path: str) -> None:
        self._ask = secondary.ask
        self._owner = f"cancel/{secondary.random.getrandbits(64):016x}"
        self._queue = queue
        self._sequence = sequence
        self._path = path
        self._has_settled = False  # or its reply was lost

    def try_once(self) -> bool:
        """Return whether the message was there and is gone now; raise while it is leased."""
        queue, at = self._queue, self._sequence
        lease: RangeLease | None = self._ask(LeaseRange(queue, self._owner, 1, at, at))
        if lease is None:
            return self._has_settled
        found = restored(self._ask(ReadRange(queue, lease.epoch, at, at)))
        if not all(_is_for(where, self._path) for where in found.paths.to_pylist()):
            self._ask(ReleaseRange(queue, lease.epoch))
            return False
        self._has_settled = True
        self._ask(SettleRange(queue, lease.epoch, [(at, at)]))
        return True


def pages(ask: Callable[[Command[Any]], Any], path: str) -> Iterator[pa.RecordBatch]:
    """Give everything an entity holds, by number."""
    start = 0
    while (page := ask(Peek(path, start, MAX_RECEIVE_MESSAGES))).num_rows:
        yield page
        start = page.column("sequence_number")[-1].as_py() + 1


def _once(courier: Courier) -> Callable[[Command[Any]], Any]:
    """Ask without trying again: whoever cancels is not to wait for an outage."""
    return lambda command: courier.ask(command, SingleTry())


def _is_for(found: str | None, path: str) -> bool:
    return found is not None and found.lower() == path.lower()


def _fingerprint(message: BrokeredMessage) -> bytes:
    names = [name for name in APPLICATION_FIELDS if name != "application_properties"]
    fields = [getattr(message, name) for name in names]
    shown = repr((fields, sorted(message.application_properties.items(), key=str)))
    return xxhash.xxh3_128_digest(shown.encode())
