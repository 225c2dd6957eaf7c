"""The route of a paired factory: to the primary while an entity is well, else to the backlog.

A batch goes whole to one place or the other. What was tried at the primary and is diverted after
all carries the number it was tried with, so that the primary can tell when it comes home that it
was there before.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
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
from twinbus.message import MessageState, conform, sizes, to_batch, to_messages
from twinbus.pairing.backlog import (
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

    message_id: str | None
    was_tried: bool  # at the primary, which may have it, too
    is_removed: bool = False  # from the backlog, by a cancellation that could not be finished


_UNKNOWN = _Schedule(None, was_tried=False)


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
        self._schedules: OrderedDict[int, _Schedule] = OrderedDict()  # by the caller's number

    # -- sending -------------------------------------------------------------------------------

    def send(self, command: Send, lane: Lane) -> SendReceipt:
        """Send, and return when the messages are durable at the primary or in the backlog."""
        path = command.path
        self._check(command)
        if self._board.is_failed_over(path):
            return self._divert(command, lane)
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
        return self._divert(command, lane, error)

    def _divert(
        self,
        command: Send,
        lane: Lane,
        primary_error: MessagingError | None = None,  # it was tried before
    ) -> SendReceipt:
        """Send to the client's backlog queue, or to another where that one fails."""
        self._primary.life.check()
        was_tried = primary_error is not None
        columns = _columns(command)
        batch = diverted(columns, command.path, command.origin if was_tried else None)
        tried: set[int] = set()
        while True:
            chance = self._secondary.random.random()
            queue = self._board.choose_queue(lane.backlog_queue, chance, tried)
            if queue is None:
                raise self._unavailable(command.path, primary_error)
            tried.add(queue)
            lane.backlog_queue = queue
            try:
                receipt = self._to_queue(queue, batch, command)
            except MessagingError as error:
                self._pull(queue, batch, error)
                continue
            return self._note_diverted(command, columns, queue, receipt, was_tried=was_tried)

    def _to_queue(self, queue: int, batch: pa.RecordBatch, command: Send) -> SendReceipt:
        """Send to a backlog queue; the secondary recognises what it took in any of them."""
        to_backlog = Send(self._board.queues[queue], batch, command.origin)
        return self._secondary.ask(to_backlog, lambda: self._board.is_pulled(queue))

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

    def _unavailable(
        self, path: str, primary_error: MessagingError | None
    ) -> BacklogUnavailableError:
        """Return the error that holds both causes."""
        primary = primary_error or self._board.cause_of(path)
        backlog = self._board.cause_of_last_pull
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
        numbers = [number_in_backlog(queue, number) for number in receipt.sequence_numbers]
        ids = columns.column("message_id").to_pylist()
        for number, message_id, due in zip(numbers, ids, schedule.is_valid(), strict=True):
            if due:
                self._schedules[number] = _Schedule(message_id, was_tried)
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
        """Cancel a message in the backlog, and at the primary where it may be as well.

        While its entity has failed over, a message that was never tried there is not looked for.
        """
        known = self._schedules.get(number, _UNKNOWN)
        if self._remove_from_backlog(path, number):
            known = replace(known, is_removed=True)
            self._schedules[number] = known
        may_be_home = known.was_tried or not self._board.is_failed_over(path)
        found = may_be_home and known.message_id and self._cancel_at_primary(path, known.message_id)
        if not found and not known.is_removed:
            raise MessageNotFoundError(
                f"scheduled message {number} is no longer in the backlog: it was cancelled, its "
                f"time has come, or it went home before this factory began. Then `peek` {path} on "
                "the primary for its message_id and cancel it by the number it has there",
                path=path,
                sequence_number=number,
            )
        self._schedules.pop(number, None)

    def _remove_from_backlog(self, path: str, number: int) -> bool:
        """Take a message out of its backlog queue; say whether it was there."""
        index, sequence = place_in_backlog(number)
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

    def _cancel_at_primary(self, path: str, message_id: str) -> bool:
        """Cancel a message that went home, or was there all along; say whether it was found."""
        start = 0
        while True:
            page = self._primary.ask(Peek(path, start, MAX_RECEIVE_MESSAGES))
            if not page.num_rows:
                return False
            for message in to_messages(page):
                assert message.sequence_number is not None
                is_scheduled = message.state is MessageState.SCHEDULED
                if message.message_id == message_id and is_scheduled:
                    self._primary.ask(CancelScheduled(path, [message.sequence_number]))
                    return True
                start = message.sequence_number + 1


def _columns(command: Send) -> pa.RecordBatch:
    messages = command.messages
    return conform(messages) if isinstance(messages, pa.RecordBatch) else to_batch(messages)
