"""The route of a paired factory: to the primary while an entity is well, else to the backlog.

A batch goes whole to one place or the other. What was tried at the primary and is diverted after
all carries the number it was tried with, so that the primary can tell when it comes home that it
was there before.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from twinbus.broker.commands import (
    CancelScheduled,
    LeaseRange,
    Peek,
    RangeLease,
    ReadRange,
    ReleaseRange,
    Send,
    SendReceipt,
    SettleRange,
)
from twinbus.client.courier import Courier, Submitted
from twinbus.client.route import Lane, Wait
from twinbus.errors import (
    BacklogUnavailableError,
    InvalidArgumentError,
    MessageNotFoundError,
    MessageSizeExceededError,
    MessagingError,
)
from twinbus.limits import MAX_RECEIVE_MESSAGES, REMEMBERED_SCHEDULES
from twinbus.message import (
    APPLICATION_FIELDS,
    BrokeredMessage,
    MessageState,
    conform,
    sizes,
    to_batch,
    to_messages,
)
from twinbus.pairing.backlog import (
    NOWHERE_KNOWN,
    check_divertible,
    diverted,
    no_head_room,
    number_in_backlog,
    place_in_backlog,
    restored,
)
from twinbus.pairing.board import Board
from twinbus.pairing.failures import counts
from twinbus.pairing.ticker import Ticker


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A scheduled message that was diverted."""

    message: BrokeredMessage
    was_tried: bool  # at the primary, which may have it, too


class PairedRoute:
    """Sends for all clients of a paired factory."""

    def __init__(
        self,
        primary: Courier,
        secondary: Courier,
        board: Board,
        ticker: Ticker,
        *,
        check_head_room: bool,
    ) -> None:
        self._primary = primary
        self._secondary = secondary
        self._board = board
        self._ticker = ticker
        self._check_head_room = check_head_room
        self._owed: list[tuple[str, BrokeredMessage]] = []  # cancellations, to the primary
        self._unplaced = itertools.count(1)
        self._schedules: OrderedDict[int, _Schedule] = OrderedDict()  # by the caller's number

    # -- sending -------------------------------------------------------------------------------

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:
        """Send, and return when the messages are durable at the primary or in the backlog."""
        path = command.path
        self._check(command)
        if self._board.is_failed_over(path):
            return self._divert(command, lane, was_tried=was_tried)
        try:
            receipt = self._primary.ask(command, lambda: self._board.is_failed_over(path))
        except MessagingError as error:
            return self._rescue(command, lane, error)
        self._board.succeeded(path)
        return receipt

    def is_diverting(self, path: str) -> bool:
        """Whether sends to this entity go to the backlog now."""
        return self._board.is_failed_over(path)

    def submit(self, command: Send, lane: Lane, *, divert: bool) -> Wait:
        """Begin to send; what is diverted is sent while it is waited for."""
        self._check(command)
        if divert:
            return partial(self._divert, command, lane)
        return partial(self._conclude, command, lane, self._primary.begin_send(command))

    def _conclude(self, command: Send, lane: Lane, begun: Submitted) -> SendReceipt:
        try:
            receipt = begun.wait(lambda: self._board.is_failed_over(command.path))
        except MessagingError as error:
            return self._rescue(command, lane, error)
        self._board.succeeded(command.path)
        return receipt

    def _check(self, command: Send) -> None:
        if self._check_head_room and command.origin is not None:
            check_divertible(_columns(command), command.path, command.origin)

    def _rescue(self, command: Send, lane: Lane, error: MessagingError) -> SendReceipt:
        """Divert what the primary did not take, if its entity has failed over; else raise."""
        if not counts(error):
            raise error
        has_failed_over = self._board.failed(command.path, error)
        self._ticker.expect(self._board.next_due())
        if not has_failed_over:
            raise error
        return self._divert(command, lane, was_tried=True)

    def _divert(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:
        """Send to the client's backlog queue, or to another where that one fails.

        The queues share the time an operation has.
        """
        self._primary.life.check()
        columns = _columns(command)
        batch = diverted(columns, command.path, command.origin if was_tried else None)
        clock, tried = self._primary.clock, set[int]()
        deadline = clock.now_us() + self._secondary.timeout_us
        while True:
            chance = self._secondary.random.random()
            queue = self._board.choose_queue(lane.backlog_queue, chance, tried)
            if queue is None:
                raise self._unavailable(command.path)
            lane.backlog_queue = queue
            share = (deadline - clock.now_us()) // self._board.count_usable(tried)
            tried.add(queue)
            try:
                receipt = self._to_queue(queue, batch, command, share)
            except MessagingError as error:
                self._pull(queue, batch, error)
                continue
            return self._note_diverted(command, columns, queue, receipt, was_tried=was_tried)

    def _to_queue(
        self, queue: int, batch: pa.RecordBatch, command: Send, time_left_us: int
    ) -> SendReceipt:
        """Send to a backlog queue; the secondary recognises what it took in any of them."""
        to_backlog = Send(self._board.queues[queue], batch, command.origin)
        time_left_us = min(max(time_left_us, 0), self._secondary.timeout_us)
        return self._secondary.ask(to_backlog, lambda: self._board.is_pulled(queue), time_left_us)

    def _pull(self, queue: int, batch: pa.RecordBatch, error: MessagingError) -> None:
        """Take a queue that failed out of rotation; raise where the messages are at fault."""
        if isinstance(error, MessageSizeExceededError):
            grown = sizes(batch)
            limit = error.facts.get("limit")
            assert isinstance(limit, int)
            if grown.max() > limit:
                raise no_head_room(int(grown.argmax()), int(grown.max()), limit) from error
            raise error
        if isinstance(error, InvalidArgumentError):
            raise error
        self._secondary.life.check()
        self._board.pull(queue, error)
        self._ticker.expect(self._board.next_due())

    def _unavailable(self, path: str) -> BacklogUnavailableError:
        """Return the error that holds both causes."""
        primary, backlog = self._board.cause_of(path), self._board.cause_of_last_pull
        error = BacklogUnavailableError(
            f"{path} is unavailable ({primary}), and no backlog queue took its messages either "
            f"({backlog}). Send again later",
            path=path,
            primary_cause=primary,
            backlog_cause=backlog,
        )
        error.__cause__ = backlog
        return error

    def _note_diverted(
        self,
        command: Send,
        columns: pa.RecordBatch,
        queue: int,
        receipt: SendReceipt,
        *,
        was_tried: bool,
    ) -> SendReceipt:
        """Count what was diverted; return numbers that cancel it where it is scheduled."""
        self._board.count_diverted(command.path, columns.num_rows)
        schedule = columns.column("scheduled_enqueue_time_utc")
        if schedule.null_count == columns.num_rows:
            return receipt
        numbers = []
        for message, number in zip(to_messages(columns), receipt.sequence_numbers, strict=True):
            told = number_in_backlog(queue, number)
            if not number:  # it was taken before, and the reply that told where got lost
                told = number_in_backlog(NOWHERE_KNOWN, next(self._unplaced))
            numbers.append(told)
            if message.scheduled_enqueue_time_utc is not None:
                self._schedules[told] = _Schedule(message, was_tried)
        while len(self._schedules) > REMEMBERED_SCHEDULES:
            self._schedules.popitem(last=False)
        return SendReceipt(numbers)

    # -- cancelling ----------------------------------------------------------------------------

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages: at the primary together, in the backlog one by one."""
        at_primary = [number for number in command.sequence_numbers if number >= 0]
        if at_primary:
            self._primary.ask(CancelScheduled(command.path, at_primary))
        for number in command.sequence_numbers:
            if number < 0:
                self._cancel_diverted(command.path, number)

    def _cancel_diverted(self, path: str, number: int) -> None:
        """Cancel a message in the backlog, or at the primary if it went home or was tried there.

        Where the primary may hold it and cannot be asked, that part waits for its return.
        """
        known = self._schedules.get(number)
        index, sequence = place_in_backlog(number)
        if index == NOWHERE_KNOWN and known is not None:
            index, sequence = self._find_in_backlog(path, known.message)
        is_removed = self._remove_from_backlog(path, index, sequence)
        if known is not None and (known.was_tried or not is_removed):
            try:
                is_removed |= self._cancel_at_primary(path, known.message)
            except MessagingError:
                if not is_removed:
                    raise
                self._owed.append((path, known.message))
        if not is_removed:
            raise MessageNotFoundError(
                f"scheduled message {number} is no longer in the backlog: it was cancelled, its "
                f"time has come, or it went home before this factory began. Then `peek` {path} on "
                "the primary for its message_id and cancel it by the number it has there",
                path=path,
                sequence_number=number,
            )
        self._schedules.pop(number, None)

    def finish_cancellations(self) -> bool:
        """Cancel what had to wait for the primary; say whether any is left that need not wait."""
        for path, message in list(self._owed):
            if self._board.is_failed_over(path):
                continue
            try:
                self._cancel_at_primary(path, message)
            except MessagingError:
                return True
            self._owed.remove((path, message))
        return False

    def _find_in_backlog(self, path: str, message: BrokeredMessage) -> tuple[int, int]:
        """Return the backlog queue and the number of a message; zeros when it is in none."""
        for index, queue in self._board.queues.items():
            for page in _pages(self._secondary, queue):
                found = restored(page)
                for row, one in enumerate(to_messages(found.batch)):
                    where = found.paths[row].as_py()
                    if _is_same(one, message) and where and where.lower() == path.lower():
                        return index, page.column("sequence_number")[row].as_py()
        return 0, 0

    def _remove_from_backlog(self, path: str, index: int, sequence: int) -> bool:
        """Take a message out of its backlog queue; say whether it was there."""
        queue = self._board.queues.get(index)
        if queue is None or not sequence:
            return False
        owner = f"cancel/{self._secondary.random.getrandbits(64):016x}"
        lease: RangeLease | None = self._secondary.ask(
            LeaseRange(queue, owner, 1, sequence, sequence)
        )
        if lease is None:
            return False
        found = restored(self._secondary.ask(ReadRange(queue, lease.epoch, sequence, sequence)))
        if [where and where.lower() for where in found.paths.to_pylist()] != [path.lower()]:
            self._secondary.ask(ReleaseRange(queue, lease.epoch))
            return False
        self._secondary.ask(SettleRange(queue, lease.epoch, [(sequence, sequence)]))
        return True

    def _cancel_at_primary(self, path: str, message: BrokeredMessage) -> bool:
        """Cancel a message that went home, or was there all along; say whether it was found."""
        for page in _pages(self._primary, path):
            for one in to_messages(page):
                if one.state is MessageState.SCHEDULED and _is_same(one, message):
                    assert one.sequence_number is not None
                    self._primary.ask(CancelScheduled(path, [one.sequence_number]))
                    return True
        return False


def _pages(courier: Courier, path: str) -> Iterator[pa.RecordBatch]:
    """Give everything an entity holds; one that does not answer is not asked again."""
    start = 0
    while (page := courier.ask(Peek(path, start, MAX_RECEIVE_MESSAGES), lambda: True)).num_rows:
        yield page
        start = page.column("sequence_number")[-1].as_py() + 1


def _is_same(one: BrokeredMessage, other: BrokeredMessage) -> bool:
    """Whether two messages are the same to an application: an id need not be unique."""
    return all(getattr(one, name) == getattr(other, name) for name in APPLICATION_FIELDS)


def _columns(command: Send) -> pa.RecordBatch:
    messages = command.messages
    return conform(messages) if isinstance(messages, pa.RecordBatch) else to_batch(messages)
