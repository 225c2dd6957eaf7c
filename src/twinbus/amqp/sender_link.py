"""The sending end of a link; it sends within the link's credit and the session's window."""

from typing import TYPE_CHECKING

from twinbus.amqp.conditions import AmqpError, Condition, Scope
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.deliveries import MASK, distance
from twinbus.amqp.encoder import write_uint
from twinbus.amqp.events import CreditGiven
from twinbus.amqp.lifecycle import EndpointState
from twinbus.amqp.link import MAX_CREDIT, AmqpLink
from twinbus.amqp.performatives import (
    ACCEPTED,
    SENDER,
    AttachFrame,
    DeliveryState,
    FlowFrame,
    SenderSettleMode,
)
from twinbus.amqp.short_frames import ReadTransfer
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessageSizeExceededError
from twinbus.limits import MAX_AMQP_TAG_BYTES

if TYPE_CHECKING:
    from twinbus.amqp.session import AmqpSession

_ACTIVE = EndpointState.ACTIVE


class SenderLink(AmqpLink):
    """The sending end of a link."""

    __slots__ = ("handle_bytes", "is_draining", "promised", "unsettled")

    ROLE = SENDER

    def __init__(self, session: "AmqpSession", name: str, handle: int) -> None:
        super().__init__(session, name, handle)
        self.handle_bytes = write_uint(handle)
        self.is_draining = False  # the receiver wants the credit to be used up or returned
        self.promised = 0  # deliveries with reserved credit
        self.unsettled: dict[int, bytes] = {}  # tags by number

    @property
    def may_send(self) -> bool:
        """Whether `send` is allowed now: the link has credit, and the session's window is open."""
        return self.credit > 0 and self.state is _ACTIVE and self.session.may_send

    @property
    def may_send_promised(self) -> bool:
        """Whether `send` is allowed now for a promised delivery."""
        return self.promised > 0 and self.state is _ACTIVE and self.session.may_send

    def promise(self, count: int) -> None:
        """Reserve credit for deliveries that will certainly be sent.

        They are sent even if the receiver lowers its credit meanwhile, as if they were on their way
        already. A drain is answered after them.
        """
        if not 0 <= count <= self.credit:
            raise InvalidArgumentError(f"{count} deliveries exceed the credit of {self.credit}")
        self.credit -= count
        self.promised += count

    def check_size(self, size: int) -> None:
        """Raise MessageSizeExceededError for a message that the receiver does not accept."""
        if 0 < self.max_message_bytes < size:
            raise MessageSizeExceededError(
                f"the message has {size} bytes; the receiver of the link {self.name!r} accepts "
                f"at most {self.max_message_bytes}",
                size=size,
                limit=self.max_message_bytes,
            )

    def send(
        self,
        payload: Buffer | list[Buffer],
        *,
        tag: bytes | None = None,
        is_settled: bool | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
        is_promised: bool = False,
    ) -> int:
        """Send a message, given as bytes or as pieces; return the number of the delivery.

        The settle mode of the link decides whether it is settled; in mixed mode, `is_settled` does.
        """
        if not (self.may_send_promised if is_promised else self.may_send):
            raise InvalidOperationError(
                f"the link {self.name!r} cannot send now: its state is {self.state.value}, its "
                f"credit {self.credit}, and its session "
                f"{'accepts' if self.session.may_send else 'does not accept'} transfers. "
                "Check may_send, and wait for CreditGiven or WindowOpened"
            )
        if tag is not None and not 0 < len(tag) <= MAX_AMQP_TAG_BYTES:
            raise InvalidArgumentError(
                f"a delivery tag must have 1 to {MAX_AMQP_TAG_BYTES} bytes, not {len(tag)}"
            )
        if not 0 <= message_format <= MASK:
            raise InvalidArgumentError(f"a message format must fit 32 bits, not {message_format}")
        size = len(payload) if type(payload) is not list else sum(map(len, payload))
        self.check_size(size)
        if self.snd_settle_mode is not SenderSettleMode.MIXED:
            is_settled = self.snd_settle_mode is SenderSettleMode.SETTLED
        number = self.session.transfers.send(
            self, payload, size, tag, message_format, is_settled=bool(is_settled), state=state
        )
        if is_promised:
            self.promised -= 1
        else:
            self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & MASK
        return number

    def abort(self, number: int) -> bool:
        """Abort a delivery if frames of it wait for the window; return whether it was aborted."""
        return self.session.transfers.abort(self, number)

    def settle(self, number: int, state: DeliveryState | None = ACCEPTED) -> bool:
        """Settle a delivery whose outcome was reported; return false if it is unknown."""
        if number not in self.unsettled:
            return False
        self.session.outcomes.report(SENDER, number, state, is_settled=True)
        del self.unsettled[number]
        self.session.outcomes.forget_sent(number)
        return True

    def drained(self) -> None:
        """Give the remaining credit back to the receiver, because nothing is left to send."""
        if self.state is not _ACTIVE or not self.is_draining or self.promised:
            return
        self.delivery_count = (self.delivery_count + self.credit) & MASK
        self.credit = 0
        self._say_flow(is_draining=True)
        self.is_draining = False

    def _say_flow(self, *, is_draining: bool = False) -> None:
        self.session.say_flow(
            handle=self.handle,
            delivery_count=self.delivery_count,
            link_credit=self.credit + self.promised,
            drain=is_draining,
        )

    # -- called by the session -----------------------------------------------------------------

    def leave(self) -> None:
        """Forget unsettled deliveries, and frames that wait for the window."""
        super().leave()
        self.session.transfers.forget(self)
        for number in self.unsettled:
            self.session.outcomes.forget_sent(number)
        self.unsettled.clear()

    def note_peer(self, frame: AttachFrame) -> None:
        """Adopt the receiver's maximum message size."""
        self.max_message_bytes = frame.max_message_size

    def take_flow(self, frame: FlowFrame) -> None:
        """Process the receiver's credit."""
        if self.state not in {EndpointState.ACTIVE, EndpointState.OFFERED}:
            return
        if frame.link_credit is not None:
            first = self.session.connection.options.first_number
            counted = first if frame.delivery_count is None else frame.delivery_count
            credit = distance(counted, self.delivery_count) + frame.link_credit
            self.credit = max(0, min(credit - self.promised, MAX_CREDIT))
        self.is_draining = frame.drain
        if self.state is _ACTIVE and frame.drain and not self.credit:
            self.drained()
        elif self.state is _ACTIVE and frame.echo:
            self._say_flow()
        self.session.connection.emit(CreditGiven(self, self.credit, self.is_draining))

    def take_transfer(self, frame: ReadTransfer, payload: bytes) -> None:
        """Refuse a transfer: this end sends."""
        del frame, payload
        raise AmqpError(
            f"a transfer arrived at the sending end of the link {self.name!r:.80}",
            Condition.NOT_ALLOWED,
            Scope.LINK,
        )
