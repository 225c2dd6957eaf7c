"""The route of a paired factory: to the primary while an entity is healthy, else to the backlog.

A batch goes as a whole to the primary or to one backlog queue. If that one accepts a part of it and
then fails, only the rest is sent to another queue. A message that was tried at the primary and then
diverted carries the sender's number of that try. When the syphon brings it home, the primary
recognises a message that it had accepted although the reply was lost. If the secondary has no
ranges, every diverted message carries its sender's number. Such a secondary may store a message
twice after a lost reply, and the syphon may deliver it twice: the primary recognises the second
copy by that number.

With `preserve_order` every entity has one backlog queue, and a send that this queue refuses raises:
in another queue its messages could overtake others or be overtaken. Sends stay diverted until the
diverted messages are home (`homing.py`).

Senders call the route from any thread; it keeps its state on the board.
"""

from collections.abc import Sequence
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
from twinbus.limits import NEVER_US, SWITCH_STEP_US
from twinbus.message import BrokeredMessage, has_values, sizes
from twinbus.pairing.backlog import check_divertible, check_reserved, no_head_room, to_backlog
from twinbus.pairing.board import Board, Permit
from twinbus.pairing.cancelling import Cancellations
from twinbus.pairing.failures import counts_at_once, says_unavailable
from twinbus.pairing.ticker import Ticker
from twinbus.protocol.capabilities import Capability, unsupported
from twinbus.protocol.commands import CancelScheduled, Send, SendReceipt
from twinbus.protocol.remainder import Remainder


@dataclass(frozen=True, slots=True)
class _Diversion:
    """A send that is being diverted."""

    path: str
    messages: Sequence[BrokeredMessage] | pa.RecordBatch  # in the format of a backlog queue
    remainder: Remainder  # the messages that no backlog queue has accepted yet
    deadline: int
    only: str  # the backlog queue of the entity, if the messages may not go to another

    def to(self, queue: str) -> Send:
        """Return the send to a queue; its origin lets the secondary recognise a repeated send."""
        left = self.remainder.command
        return Send(queue, left.messages, left.origin)


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
        preserve_order: bool,
    ) -> None:
        self.cancellations = Cancellations(primary, secondary, board)
        self._primary = primary
        self._secondary = secondary
        self._board = board
        self._ticker = ticker
        self._check_head_room = check_head_room
        self._keeps_order = preserve_order
        capabilities = secondary.namespace.capabilities
        self._always_numbers = Capability.RANGES not in capabilities

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:
        """Send, and return when the messages are durable at the primary or in the backlog."""
        path = command.path
        self._check(command)
        if self._board.is_diverting(path):
            return self._divert(command, lane, was_tried=was_tried)
        return self._send_to_primary(command, lane)

    def _send_to_primary(self, command: Send, lane: Lane) -> SendReceipt:
        try:
            receipt = self._primary.ask(command, _PrimaryTries(self, command.path))
        except MessagingError as error:
            return self._rescue(command, lane, error)
        self._board.succeeded(command.path)
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
        """Submit a send and return a function that waits for it; a diverted send runs in there.

        With `preserve_order` every send runs in there. The caller waits for its sends in their
        order, so only one is in flight: if it is lost, the primary has not accepted a later one.
        """
        if self._keeps_order:
            return partial(self.send, command, lane)
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
            check_divertible(command.messages, command.path, command.origin)
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
        remainder = Remainder(command)
        remainder.note(error)
        return remainder.send(partial(self._divert, lane=lane, was_tried=True))

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
        self._primary.life.check()
        permit = None
        if self._keeps_order:
            permit = self._await_permit(command.path)
            if permit is None:
                return self._send_to_primary(command, lane)
        if permit is None:
            diversion = self._diversion(command, was_tried=was_tried)
            receipt, queue = self._send_to_any_queue(diversion, lane)
        else:
            receipt = self._send_to_own_queue(command, permit, was_tried=was_tried)
            queue = lane.backlog_queue = permit.queue
        self._board.count_diverted(command.path, len(command.messages))
        return self.cancellations.remember(
            command.path, command.messages, queue, receipt, was_tried=was_tried
        )

    def _diversion(self, command: Send, *, was_tried: bool, only: str = "") -> _Diversion:
        is_numbered = was_tried or self._always_numbers
        origin = command.origin if is_numbered else None
        messages = to_backlog(command.messages, command.path, origin)
        self._check_supported(command.messages)
        deadline = self._primary.clock.now_us() + self._secondary.timeout_us
        remainder = Remainder(Send(command.path, messages, command.origin))
        return _Diversion(command.path, messages, remainder, deadline, only)

    def _send_to_any_queue(self, diversion: _Diversion, lane: Lane) -> tuple[SendReceipt, int]:
        """Send to the client's backlog queue; if that queue fails, to another one.

        All tries together share the timeout of one operation. If the secondary is busy, the send
        waits, as it does for a busy primary: a busy queue stays in rotation.
        """
        clock, remainder = self._primary.clock, diversion.remainder
        tried: set[int] = set()
        while True:
            chance = self._secondary.random.random()
            choice = self._board.choose_queue(lane.backlog_queue, chance, tried)
            if choice is None:
                raise self._unavailable(diversion, self._board.cause_of_last_pull)
            queue = lane.backlog_queue = choice.queue
            left = min(max(diversion.deadline - clock.now_us(), 0), self._secondary.timeout_us)
            try:
                receipt = self._secondary.ask(
                    diversion.to(self._board.queues[queue]),
                    _QueueTries(self._board, queue),
                    left // choice.usable,
                )
            except ServerBusyError as error:
                remainder.note(error)
                self._await_gate(self._board.queues[queue], diversion, error)
            except MessagingError as error:
                remainder.note(error)
                self._check_refusal(diversion, error)
                self._board.pull(queue, error)
                self._ticker.expect(self._board.next_due())
                tried.add(queue)
            else:
                return remainder.receipt(receipt), queue

    def _await_permit(self, path: str) -> Permit | None:
        """Return the permit to divert a send, or None if sends go to the primary again.

        Waits while the entity switches back to the primary: a few seconds at most.
        """
        while self._board.is_diverting(path):
            if not self._board.must_wait(path):
                permit = self._board.begin_diversion(path)
                if permit is not None:
                    return permit
            self._ticker.expect(self._board.next_due())
            self._primary.clock.sleep_us(SWITCH_STEP_US)
            self._primary.life.check()
        return None

    def _send_to_own_queue(self, command: Send, permit: Permit, *, was_tried: bool) -> SendReceipt:
        """Send to the backlog queue of the entity; if that queue fails, raise."""
        queue, clock = self._board.queues[permit.queue], self._primary.clock
        receipt: SendReceipt | None = None
        try:
            diversion = self._diversion(command, was_tried=was_tried, only=queue)
            while receipt is None:
                left = max(diversion.deadline - clock.now_us(), 0)
                try:
                    receipt = self._secondary.ask(diversion.to(queue), time_left_us=left)
                except ServerBusyError as error:
                    diversion.remainder.note(error)
                    self._await_gate(queue, diversion, error)
                except MessagingError as error:
                    diversion.remainder.note(error)
                    self._check_refusal(diversion, error)
                    raise self._unavailable(diversion, error) from error
            return diversion.remainder.receipt(receipt)
        finally:
            self._board.end_diversion(command.path, permit, receipt)

    def _check_supported(self, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> None:
        """Refuse messages that the primary could not accept when they are brought home."""
        capabilities = self._primary.namespace.capabilities
        for field_name, (capability, what) in _NEEDED.items():
            if capability not in capabilities and has_values(messages, field_name):
                raise self._about_primary(unsupported("the primary", capability, what))

    def _await_gate(self, queue: str, diversion: _Diversion, error: ServerBusyError) -> None:
        """Wait for a busy backlog queue, if the operation has time for that."""
        clock = self._primary.clock
        pause = self._secondary.busy_until(queue, clock.now_us()) - clock.now_us()
        if clock.now_us() + pause >= diversion.deadline:
            raise self._unavailable(diversion, error) from error
        clock.sleep_us(pause)

    def _check_refusal(self, diversion: _Diversion, error: MessagingError) -> None:
        """Raise the error of a refused send, unless the backlog queue itself is at fault."""
        if isinstance(error, MessageSizeExceededError):
            grown, limit = sizes(diversion.messages), error.facts.get("limit")
            if isinstance(limit, int) and grown.max() > limit:
                raise no_head_room(int(grown.argmax()), int(grown.max()), limit) from error
        if isinstance(error, InvalidArgumentError):
            raise error
        if self._secondary.life.state is not FactoryState.OPENED:
            raise self._unavailable(diversion, error) from error

    def _unavailable(
        self, diversion: _Diversion, backlog: MessagingError | None
    ) -> BacklogUnavailableError:
        """Return the error with the cause at the primary and the cause in the backlog."""
        path, only = diversion.path, diversion.only
        primary = self._board.cause_of(path)
        left, count = len(diversion.remainder.command.messages), len(diversion.messages)
        which = "the messages" if left == count else f"{left} of {count} messages"
        refused = "no backlog queue accepted the messages"
        if only:
            refused = (
                f"its backlog queue {only} did not accept the messages. With preserve_order they "
                "may not go to another queue"
            )
        error = BacklogUnavailableError(
            f"sends to {path} are diverted ({primary}), and {refused} ({backlog}). Neither "
            f"namespace acknowledged {which}. Send them again later",
            path=path,
            primary_cause=primary,
            backlog_cause=backlog,
            backlog_queue=only,
        )
        diversion.remainder.note(error)
        error.__cause__ = backlog
        return error


_NEEDED = {  # field of a message -> what a primary needs to accept it
    "session_id": (Capability.SESSIONS, "a message with a session_id"),
    "scheduled_enqueue_time_utc": (Capability.SCHEDULING, "a scheduled message"),
}
