"""The route of a paired factory: to the primary while an entity is healthy, else to the backlog.

A batch goes as a whole to the primary or to one backlog queue. A message that was tried at the
primary and then diverted carries the sender's number of that try. When the syphon brings it home,
the primary recognises a message that it had accepted although the reply was lost. If the secondary
has no ranges, every diverted message carries its sender's number. Such a secondary may store a
message twice after a lost reply, and the syphon may deliver it twice: the primary recognises the
second copy by that number.

Senders call the route from any thread; it keeps its state on the board.
"""

from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from twinbus import tracing
from twinbus.client.courier import Courier, Submitted
from twinbus.client.retry import UnlimitedTries
from twinbus.client.route import Lane, Wait
from twinbus.client.state import FactoryState
from twinbus.errors import (
    BacklogUnavailableError,
    InvalidArgumentError,
    MessageSizeExceededError,
    MessagingError,
    ServerBusyError,
)
from twinbus.limits import NEVER_US
from twinbus.message import conform, sizes, to_batch
from twinbus.pairing.backlog import check_divertible, check_reserved, diverted, no_head_room
from twinbus.pairing.board import Board
from twinbus.pairing.cancelling import Cancellations
from twinbus.pairing.failures import counts_at_once, says_unavailable
from twinbus.pairing.ticker import Ticker
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import CancelScheduled, Send, SendReceipt


@dataclass(frozen=True, slots=True)
class _Diversion:
    """A send that is being diverted."""

    path: str
    columns: pa.RecordBatch  # the messages as they were sent
    batch: pa.RecordBatch  # the messages in the format of a backlog queue
    command: Send
    deadline: int

    def to(self, queue: str) -> Send:
        """Return the send to a queue; its origin lets the secondary recognise a repeated send."""
        return Send(queue, self.batch, self.command.origin)


class _PrimaryTries:
    """Limits the tries of one send at the primary: they end when its entity fails over."""

    __slots__ = ("_path", "_route")

    def __init__(self, route: "PairedRoute", path: str) -> None:
        self._route = route
        self._path = path

    def end_at(self) -> int:
        """Return when the entity fails over, as far as is known now."""
        return self._route.tries_end_at(self._path)

    def failed(self, error: MessagingError) -> None:
        """Count a try that timed out or could not reach the server."""
        if counts_at_once(error):
            self._route.note_failure(self._path, error)


class _QueueTries(UnlimitedTries):
    """Limits the tries at one backlog queue: they end when the queue leaves the rotation."""

    def __init__(self, board: Board, queue: int) -> None:
        self._board = board
        self._queue = queue

    def end_at(self) -> int:
        """Return a time that has passed once the queue has left the rotation."""
        return 0 if self._board.is_pulled(self._queue) else NEVER_US


class PairedRoute:
    """Routes the sends of all clients of a paired factory."""

    def __init__(
        self,
        primary: Courier,
        secondary: Courier,
        board: Board,
        ticker: Ticker,
        *,
        check_head_room: bool,
    ) -> None:
        self.cancellations = Cancellations(primary, secondary, board)
        self._primary = primary
        self._secondary = secondary
        self._board = board
        self._ticker = ticker
        self._check_head_room = check_head_room
        capabilities = secondary.namespace.capabilities
        self._always_numbers = Capability.RANGES not in capabilities

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:
        """Send, and return when the messages are durable at the primary or in the backlog."""
        path = command.path
        self._check(command)
        if self._board.is_diverting(path):
            return self._divert(command, lane, was_tried=was_tried)
        try:
            receipt = self._primary.ask(command, _PrimaryTries(self, path))
        except MessagingError as error:
            return self._rescue(command, lane, error)
        self._board.succeeded(path)
        return receipt

    def is_diverting(self, path: str) -> bool:
        """Whether sends to this entity go to the backlog now."""
        return self._board.is_diverting(path)

    def tries_end_at(self, path: str) -> int:
        """Return when tries of a send at the primary end."""
        return self._board.tries_end_at(path)

    def note_failure(self, path: str, error: MessagingError) -> None:
        """Count a failure of an entity that is unavailable."""
        self._board.failed(path, error)
        self._ticker.expect(self._board.next_due())

    def submit(self, command: Send, lane: Lane, *, divert: bool) -> Wait:
        """Submit a send; return a function that waits for its receipt.

        A send that is diverted starts when that function is called.
        """
        self._check(command)
        if divert:
            return partial(self._divert, command, lane, was_tried=False)
        try:
            begun = self._primary.begin_send(command, _PrimaryTries(self, command.path))
        except ServerBusyError as error:
            return partial(self._rescue, command, lane, error)
        return partial(self._conclude, command, lane, begun)

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages by the numbers in the receipt of their send."""
        self.cancellations.cancel(command)

    def _conclude(self, command: Send, lane: Lane, begun: Submitted) -> SendReceipt:
        try:
            receipt = begun.wait(_PrimaryTries(self, command.path))
        except MessagingError as error:
            return self._rescue(command, lane, error)
        self._board.succeeded(command.path)
        return receipt

    def _check(self, command: Send) -> None:
        """Refuse messages that could not be diverted; checked on healthy sends as well."""
        if self._check_head_room and command.origin is not None:
            check_divertible(_columns(command), command.path, command.origin)
        else:
            check_reserved(command.messages)

    def _rescue(self, command: Send, lane: Lane, error: MessagingError) -> SendReceipt:
        """Divert a send that the primary did not accept if its entity failed over; else raise."""
        if not says_unavailable(error) and not isinstance(error, ServerBusyError):
            raise self._about_primary(error)
        if says_unavailable(error) and not counts_at_once(error):  # else `_PrimaryTries` counted it
            self.note_failure(command.path, error)
        if not self._board.is_diverting(command.path):
            raise self._about_primary(error)
        return self._divert(command, lane, was_tried=True)

    def _about_primary(self, error: MessagingError) -> MessagingError:
        """Return the error with a note that it is about the primary namespace."""
        error.facts = {**error.facts, "namespace": "primary"}
        error.add_note("This error is about the primary namespace of the pairing.")
        if not self._board.queues:
            error.add_note("The message was not diverted: the pairing has no backlog queue yet.")
        return error

    # -- to the backlog ------------------------------------------------------------------------

    def _divert(self, command: Send, lane: Lane, *, was_tried: bool) -> SendReceipt:
        if tracing.hook is None:
            return self._send_to_backlog(command, lane, was_tried=was_tried)
        return tracing.hook.relay(
            "divert",
            self._secondary.peer,
            command.path,
            command.messages,
            partial(self._send_to_backlog, command, lane, was_tried=was_tried),
            lambda: "" if lane.backlog_queue is None else self._board.queues[lane.backlog_queue],
        )

    def _send_to_backlog(self, command: Send, lane: Lane, *, was_tried: bool) -> SendReceipt:
        """Send to the client's backlog queue; if that queue fails, to another one.

        All tries together share the timeout of one operation. If the secondary is busy, the send
        waits, as it does for a busy primary: a busy queue stays in rotation.
        """
        self._primary.life.check()
        columns, clock = _columns(command), self._primary.clock
        is_numbered = was_tried or self._always_numbers
        batch = diverted(columns, command.path, command.origin if is_numbered else None)
        deadline = clock.now_us() + self._secondary.timeout_us
        diversion = _Diversion(command.path, columns, batch, command, deadline)
        tried: set[int] = set()
        while True:
            chance = self._secondary.random.random()
            choice = self._board.choose_queue(lane.backlog_queue, chance, tried)
            if choice is None:
                raise self._unavailable(command.path, self._board.cause_of_last_pull)
            queue = lane.backlog_queue = choice.queue
            left = min(max(deadline - clock.now_us(), 0), self._secondary.timeout_us)
            try:
                receipt = self._secondary.ask(
                    diversion.to(self._board.queues[queue]),
                    _QueueTries(self._board, queue),
                    left // choice.usable,
                )
            except ServerBusyError as error:
                self._await_gate(self._board.queues[queue], diversion, error)
            except MessagingError as error:
                self._pull(queue, diversion, error)
                tried.add(queue)
            else:
                self._board.count_diverted(command.path, columns.num_rows)
                return self.cancellations.remember(
                    command.path, columns, queue, receipt, was_tried=was_tried
                )

    def _await_gate(self, queue: str, diversion: _Diversion, error: ServerBusyError) -> None:
        """Wait for a busy backlog queue, if the operation has time for that."""
        clock = self._primary.clock
        pause = self._secondary.busy_until(queue, clock.now_us()) - clock.now_us()
        if clock.now_us() + pause >= diversion.deadline:
            raise self._unavailable(diversion.path, error) from error
        clock.sleep_us(pause)

    def _pull(self, queue: int, diversion: _Diversion, error: MessagingError) -> None:
        """Take a failed queue out of rotation; raise if the queue is not the cause."""
        if isinstance(error, MessageSizeExceededError):
            grown, limit = sizes(diversion.batch), error.facts.get("limit")
            if isinstance(limit, int) and grown.max() > limit:
                raise no_head_room(int(grown.argmax()), int(grown.max()), limit) from error
        if isinstance(error, InvalidArgumentError):
            raise error
        if self._secondary.life.state is not FactoryState.OPENED:
            raise self._unavailable(diversion.path, error) from error
        self._board.pull(queue, error)
        self._ticker.expect(self._board.next_due())

    def _unavailable(self, path: str, backlog: MessagingError | None) -> BacklogUnavailableError:
        """Return the error with the cause at the primary and the cause in the backlog."""
        primary = self._board.cause_of(path)
        error = BacklogUnavailableError(
            f"{path} is unavailable ({primary}), and no backlog queue accepted its messages "
            f"({backlog}). Neither namespace acknowledged the messages. Send them again later",
            path=path,
            primary_cause=primary,
            backlog_cause=backlog,
        )
        error.__cause__ = backlog
        return error


def _columns(command: Send) -> pa.RecordBatch:
    messages = command.messages
    return conform(messages) if isinstance(messages, pa.RecordBatch) else to_batch(messages)
