"""The end of a link that sends deliveries, as far as credit and the session's window go."""

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
    TransferFrame,
)
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessageSizeExceededError
from twinbus.limits import MAX_AMQP_TAG_BYTES

if TYPE_CHECKING:
    from twinbus.amqp.session import AmqpSession

_ACTIVE = EndpointState.ACTIVE


class SenderLink(AmqpLink):
    """The end that sends."""

    __slots__ = ("handle_bytes", "is_draining", "unsettled")

    ROLE = SENDER

    def __init__(self, session: "AmqpSession", name: str, handle: int) -> None:
        super().__init__(session, name, handle)
        self.handle_bytes = write_uint(handle)
        self.is_draining = False  # the receiver wants its credit used up or given back
        self.unsettled: dict[int, bytes] = {}  # tags by number

    @property
    def may_send(self) -> bool:
        """Whether `send` is allowed now: there is credit, and the session takes transfers."""
        return self.credit > 0 and self.state is _ACTIVE and self.session.may_send

    def send(
        self,
        payload: Buffer | list[Buffer],
        *,
        tag: bytes | None = None,
        is_settled: bool | None = None,
        message_format: int = 0,
        state: DeliveryState | None = None,
    ) -> int:
        """Send a message, given as bytes or as pieces of it; return the number of the delivery.

        The settle mode of the link decides whether it is settled; `is_settled` where both may be.
        """
        if not self.may_send:
            raise InvalidOperationError(
                f"the link {self.name!r} cannot send now: its state is {self.state.value}, its "
                f"credit {self.credit}, and its session "
                f"{'takes' if self.session.may_send else 'does not take'} transfers. "
                "Check may_send, and wait for CreditGiven or WindowOpened"
            )
        if tag is not None and not 0 < len(tag) <= MAX_AMQP_TAG_BYTES:
            raise InvalidArgumentError(
                f"a delivery tag has 1 to {MAX_AMQP_TAG_BYTES} bytes, not {len(tag)}"
            )
        if not 0 <= message_format <= MASK:
            raise InvalidArgumentError(f"a message format has 32 bits; {message_format} has more")
        size = len(payload) if type(payload) is not list else sum(map(len, payload))
        if 0 < self.max_message_bytes < size:
            raise MessageSizeExceededError(
                f"the message has {size} bytes; the receiver of the link {self.name!r} takes "
                f"{self.max_message_bytes}",
                size=size,
                limit=self.max_message_bytes,
            )
        if self.snd_settle_mode is not SenderSettleMode.MIXED:
            is_settled = self.snd_settle_mode is SenderSettleMode.SETTLED
        number = self.session.transfers.send(
            self, payload, size, tag, message_format, is_settled=bool(is_settled), state=state
        )
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & MASK
        return number

    def abort(self, number: int) -> bool:
        """Abort a delivery of which frames still wait for the window; return whether one was."""
        return self.session.transfers.abort(self, number)

    def settle(self, number: int, state: DeliveryState | None = ACCEPTED) -> bool:
        """Settle a delivery whose outcome the receiver has reported; false: it is gone."""
        if number not in self.unsettled:
            return False
        self.session.outcomes.report(SENDER, number, state, is_settled=True)
        del self.unsettled[number]
        self.session.outcomes.forget_sent(number)
        return True

    def drained(self) -> None:
        """Give the rest of the credit back, because there is nothing more to send."""
        if self.state is not _ACTIVE or not self.is_draining:
            return
        self.delivery_count = (self.delivery_count + self.credit) & MASK
        self.credit = 0
        self._say_flow(is_draining=True)
        self.is_draining = False

    def _say_flow(self, *, is_draining: bool = False) -> None:
        self.session.say_flow(
            handle=self.handle,
            delivery_count=self.delivery_count,
            link_credit=self.credit,
            drain=is_draining,
        )

    # -- what the session calls ----------------------------------------------------------------

    def leave(self) -> None:
        """Forget unsettled deliveries, and what still waits for the window."""
        super().leave()
        self.session.transfers.forget(self)
        for number in self.unsettled:
            self.session.outcomes.forget_sent(number)
        self.unsettled.clear()

    def note_peer(self, frame: AttachFrame) -> None:
        """Take over how large messages may be."""
        self.max_message_bytes = frame.max_message_size

    def take_flow(self, frame: FlowFrame) -> None:
        """Take credit."""
        if self.state not in {EndpointState.ACTIVE, EndpointState.OFFERED}:
            return
        if frame.link_credit is not None:
            first = self.session.connection.options.first_number
            counted = first if frame.delivery_count is None else frame.delivery_count
            credit = distance(counted, self.delivery_count) + frame.link_credit
            self.credit = max(0, min(credit, MAX_CREDIT))
        self.is_draining = frame.drain
        if self.state is _ACTIVE and frame.drain and not self.credit:
            self.drained()
        elif self.state is _ACTIVE and frame.echo:
            self._say_flow()
        self.session.connection.emit(CreditGiven(self, self.credit, self.is_draining))

    def take_transfer(self, frame: TransferFrame, payload: bytes) -> None:
        """Refuse a transfer: this end sends."""
        del frame, payload
        raise AmqpError(
            f"a transfer came to the sender of the link {self.name!r:.80}",
            Condition.NOT_ALLOWED,
            Scope.LINK,
        )
