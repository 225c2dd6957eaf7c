"""Cancels scheduled messages that were diverted, in the backlog or at the primary.

The receipt of a diverted send contains a negative number per message, which encodes the backlog
queue and the sequence number. `Cancellations` removes such a message from its backlog queue under a
lease, so that no syphon moves it at the same time. If the syphon has brought the message home, or
the primary was tried before the message was diverted, it is searched at the primary by all fields
that every engine returns unchanged, because a message id need not be unique. Of two equal messages,
either may be cancelled. A secondary without ranges cannot remove a single message: there the cancel
waits for a syphon to bring the message home, for as long as one operation may take.

A cancellation that the primary cannot execute during the outage is executed after its return.
Senders call from any thread; the ticker calls `finish`.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from twinbus.client.courier import Courier
from twinbus.client.retry import SingleTry
from twinbus.clock import moment_us, passes_by_itself
from twinbus.errors import (
    FaultOwner,
    MessageNotFoundError,
    MessagingError,
    RangeUnavailableError,
    StaleEpochError,
    UnsupportedCapabilityError,
)
from twinbus.limits import MAX_RECEIVE_MESSAGES, REMEMBERED_SCHEDULES
from twinbus.message import (
    TEXT_COLUMNS,
    BrokeredMessage,
    MessageState,
    as_batch,
    has_values,
    to_messages,
)
from twinbus.pairing.backlog import UNKNOWN_QUEUE, number_in_backlog, place_in_backlog, restored
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
from twinbus.protocol.origins import ORIGIN_PROPERTY


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A scheduled message that was diverted."""

    path: str
    message_id: str | None
    fingerprint: bytes  # hash of the fields that every engine returns unchanged
    due: int  # its scheduled time, in microseconds
    was_tried: bool  # the primary was tried first, and may have accepted the message as well

    def is_of(self, message: BrokeredMessage) -> bool:
        """Whether `message` equals the diverted message in every compared field."""
        same_id = message.message_id == self.message_id
        return same_id and _fingerprint(message) == self.fingerprint


_UNKNOWN_PLACE = (UNKNOWN_QUEUE, 1)  # the place of a message in a backlog that cannot be browsed


class Cancellations:
    """Keeps the diverted scheduled messages of a factory and cancels them; thread-safe."""

    def __init__(self, primary: Courier, secondary: Courier, board: Board) -> None:
        self._primary = primary
        self._secondary = secondary
        self._board = board
        self._unplaced = itertools.count(1)
        self._schedules: OrderedDict[int, _Schedule] = OrderedDict()  # by the caller's number
        self._postponed: list[_Schedule] = []  # to be cancelled at the primary after its return
        self._finishing = threading.Lock()
        self._can_remove = Capability.RANGES in secondary.namespace.capabilities

    def remember(
        self,
        path: str,
        messages: Sequence[BrokeredMessage] | pa.RecordBatch,
        queue: int,
        receipt: SendReceipt,
        *,
        was_tried: bool,
    ) -> SendReceipt:
        """Return the receipt of a diverted send, with the numbers that cancel its messages."""
        if not has_values(messages, "scheduled_enqueue_time_utc"):
            return receipt
        batch = as_batch(messages)  # fingerprints need the values as columns store them
        self._forget(self._primary.clock.wall_us())
        numbers = []
        for message, number in zip(to_messages(batch), receipt.sequence_numbers, strict=True):
            cancel_number = number_in_backlog(queue, number)
            if not number or not self._can_remove:  # the place is unknown, or cannot be used
                cancel_number = number_in_backlog(UNKNOWN_QUEUE, next(self._unplaced))
            numbers.append(cancel_number)
            moment = message.scheduled_enqueue_time_utc
            if moment is not None:
                fingerprint = _fingerprint(message)
                self._schedules[cancel_number] = _Schedule(
                    path, message.message_id, fingerprint, moment_us(moment), was_tried
                )
        return SendReceipt(numbers)

    def _forget(self, now: int) -> None:
        """Forget the oldest entries whose scheduled time has passed, and any above the limit."""
        while self._schedules:
            number, oldest = next(iter(self._schedules.items()))
            if oldest.due > now and len(self._schedules) < REMEMBERED_SCHEDULES:
                return
            self._schedules.pop(number, None)

    # -- cancelling ----------------------------------------------------------------------------

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages: with one command at the primary, singly in the backlog."""
        at_primary = [number for number in command.sequence_numbers if number >= 0]
        if at_primary:
            self._primary.ask(CancelScheduled(command.path, at_primary, command.origin))
        deadline = self._primary.clock.now_us() + self._secondary.timeout_us
        for number in command.sequence_numbers:
            if number < 0:
                self._cancel_diverted(command.path, number, deadline)

    def _cancel_diverted(self, path: str, number: int, deadline: int) -> None:
        """Cancel a message in the backlog, and at the primary if it may be there.

        If the primary may have the message and cannot be asked, its part is postponed. `deadline`
        bounds the wait for messages that a syphon must bring home first, all of them together.
        """
        known = self._schedules.get(number)
        if known is not None and not _is_for(known.path, path):
            known = None
        index, sequence = place_in_backlog(number)
        if index == UNKNOWN_QUEUE and known is not None and self._can_remove:
            index, sequence = self._find_in_backlog(known)
        is_gone = self._remove_from_backlog(path, index, sequence)  # retries while it is leased
        if known is not None and (known.was_tried or not is_gone):
            try:
                if self._can_remove:
                    is_gone |= self._cancel_at_primary(known)
                else:
                    is_gone = self._cancel_when_home(known, number, deadline)
            except MessagingError:
                if not is_gone or len(self._postponed) >= REMEMBERED_SCHEDULES:
                    raise
                self._postponed.append(known)
        if not is_gone:
            raise MessageNotFoundError(
                f"scheduled message {number} to {path} is no longer in the backlog: it was already "
                "cancelled, its scheduled time has passed, or a syphon brought it home before this "
                f"factory was created. If it was brought home, `peek` {path} on the primary, find "
                "it by its message_id and cancel it by its sequence number there",
                path=path,
                sequence_number=number,
            )
        self._schedules.pop(number, None)

    def _cancel_when_home(self, known: _Schedule, number: int, deadline: int) -> bool:
        """Cancel a message that only a syphon can take out of the backlog; return whether it was.

        Each try looks into the backlog before the primary: a message that leaves the backlog
        between the two looks is at the primary already. If the primary accepted the message before
        it was diverted, the copy in the backlog must not arrive after the cancel. A primary that
        remembers repeated sends drops that copy; with any other primary, the cancel waits for it.
        """
        remembers = Capability.REPEAT_MEMORY in self._primary.namespace.capabilities
        copy_is_harmless = remembers or not known.was_tried
        place: tuple[int, int] | None = None
        is_cancelled = False
        for failures in itertools.count(1):
            place = self._find_in_backlog(known) if place is None else self._still_at(place)
            is_cancelled |= self._cancel_at_primary(known)
            if not place[1] or (is_cancelled and copy_is_harmless):
                return is_cancelled
            if not self._pause(failures, deadline):
                break
        raise UnsupportedCapabilityError(
            f"scheduled message {number} to {known.path} cannot be cancelled now: it was diverted, "
            "and the secondary cannot remove a single message from a backlog queue (that needs "
            f"{Capability.RANGES.value}). Cancel it again when the syphon has brought it home",
            path=known.path,
            sequence_number=number,
            capability=Capability.RANGES.name,
        )

    def _still_at(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return the place of a message in the backlog if it is still there; zeros if not."""
        index, sequence = place
        if place == _UNKNOWN_PLACE:
            return place
        page = _once(self._secondary)(Peek(self._board.queues[index], sequence, 1))
        is_there = page.num_rows and page.column("sequence_number")[0].as_py() == sequence
        return place if is_there else (0, 0)

    def _pause(self, failures: int, deadline: int) -> bool:
        """Sleep before another try; return False if the retry policy allows none."""
        courier, clock = self._secondary, self._primary.clock
        pause = courier.policy.backoff_us(failures, courier.random.random())
        if failures == courier.policy.max_tries or clock.now_us() + pause >= deadline:
            return False
        clock.sleep_us(pause)
        return True

    def _find_in_backlog(self, known: _Schedule) -> tuple[int, int]:
        """Return the backlog queue and sequence number of a message; zeros if it is in none."""
        if Capability.BROWSING not in self._secondary.namespace.capabilities:
            return _UNKNOWN_PLACE
        for index, queue in self._board.queues.items():
            for page in pages(_once(self._secondary), queue):
                found = restored(page)
                for row, message in enumerate(to_messages(found.batch)):
                    if known.is_of(message) and _is_for(found.paths[row].as_py(), known.path):
                        return index, page.column("sequence_number")[row].as_py()
        return 0, 0

    def _remove_from_backlog(self, path: str, index: int, sequence: int) -> bool:
        """Remove a message from its backlog queue; return whether it was there.

        While a syphon has leased the message, the removal is retried under the retry policy, until
        the syphon has brought the message home or released it.
        """
        queue = self._board.queues.get(index)
        if queue is None or not sequence or not self._can_remove:
            return False
        removal = _Removal(self._secondary, queue, sequence, path)
        deadline = self._primary.clock.now_us() + self._secondary.timeout_us
        for failures in itertools.count(1):
            try:
                return removal.try_once()
            except (RangeUnavailableError, StaleEpochError):
                if not self._pause(failures, deadline):
                    raise
        raise AssertionError("unreachable")

    def _cancel_at_primary(self, known: _Schedule) -> bool:
        """Cancel a message at the primary; return whether it was found there."""
        for page in pages(_once(self._primary), known.path):
            for message in to_messages(page):
                if message.state is MessageState.SCHEDULED and known.is_of(message):
                    assert message.sequence_number is not None
                    numbers = [message.sequence_number]
                    self._primary.ask(self._primary.new_cancel(known.path, numbers))
                    return True
        return False

    # -- postponed cancellations ---------------------------------------------------------------

    @property
    def can_finish_any(self) -> bool:
        """Whether a postponed cancellation is for an entity that is available again."""
        return any(not self._board.is_failed_over(known.path) for known in self._postponed)

    def finish(self) -> None:
        """Execute the postponed cancellations, in a thread because it waits for the primary."""
        if not self.can_finish_any or not self._finishing.acquire(blocking=False):
            return
        if passes_by_itself(self._primary.clock):
            threading.Thread(target=self._finish, name="twinbus-cancel", daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        try:
            for known in list(self._postponed):
                if self._board.is_failed_over(known.path):
                    continue
                try:
                    self._cancel_at_primary(known)
                except MessagingError as error:
                    if error.fault is not FaultOwner.CALLER:  # else: the entity no longer exists
                        continue
                self._postponed.remove(known)
        finally:
            self._finishing.release()


class _Removal:
    """Removes one message from a backlog queue, under a lease."""

    def __init__(self, secondary: Courier, queue: str, sequence: int, path: str) -> None:
        self._ask = secondary.ask
        self._owner = f"cancel/{secondary.random.getrandbits(64):016x}"
        self._queue = queue
        self._sequence = sequence
        self._path = path
        self._has_settled = False  # SettleRange was sent; its reply may have been lost

    def try_once(self) -> bool:
        """Remove the message; return whether it was there. Raises while a syphon has leased it."""
        queue, at = self._queue, self._sequence
        lease: RangeLease | None = self._ask(LeaseRange(queue, self._owner, 1, at, at))
        if lease is None:
            return self._has_settled
        found = restored(self._ask(ReadRange(queue, lease.epoch, at, at)))
        if not all(_is_for(path, self._path) for path in found.paths.to_pylist()):
            self._ask(ReleaseRange(queue, lease.epoch))
            return False
        self._has_settled = True
        self._ask(SettleRange(queue, lease.epoch, [(at, at)]))
        return True


def pages(ask: Callable[[Command[Any]], Any], path: str) -> Iterator[pa.RecordBatch]:
    """Yield all messages of an entity in pages, in the order of their sequence numbers."""
    start = 0
    while (page := ask(Peek(path, start, MAX_RECEIVE_MESSAGES))).num_rows:
        yield page
        start = page.column("sequence_number")[-1].as_py() + 1


def _once(courier: Courier) -> Callable[[Command[Any]], Any]:
    """Return the `ask` of a courier without retries: a cancel must not wait for an outage's end."""
    return lambda command: courier.ask(command, SingleTry())


def _is_for(found: str | None, path: str) -> bool:
    return found is not None and found.lower() == path.lower()


def _fingerprint(message: BrokeredMessage) -> bytes:
    """Return a hash of the fields that every engine returns unchanged.

    A Service Bus limits a time to live, encodes the AMQP sections again, and keeps milliseconds of
    a schedule. Where the engine does not recognise repeated messages, the syphon adds their origin.
    """
    texts = [getattr(message, name) for name in TEXT_COLUMNS]
    due = message.scheduled_enqueue_time_utc
    due_ms = None if due is None else moment_us(due) // 1000
    properties = {
        name: value
        for name, value in message.application_properties.items()
        if name != ORIGIN_PROPERTY
    }
    shown = repr((message.body, texts, due_ms, sorted(properties.items(), key=str)))
    return xxhash.xxh3_128_digest(shown.encode())
