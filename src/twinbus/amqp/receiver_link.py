"""The receiving end of a link; a delivery arrives in one frame or in several."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinbus.amqp.conditions import AmqpError, Condition, Scope
from twinbus.amqp.deliveries import MASK, distance
from twinbus.amqp.events import Delivery, DeliveryDropped, Drained
from twinbus.amqp.lifecycle import EndpointState
from twinbus.amqp.link import MAX_CREDIT, AmqpLink
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    AttachFrame,
    DeliveryState,
    ErrorCondition,
    FlowFrame,
    ReceiverSettleMode,
    Rejected,
    SenderSettleMode,
)
from twinbus.amqp.short_frames import ReadTransfer
from twinbus.errors import InvalidArgumentError

if TYPE_CHECKING:
    from twinbus.amqp.session import AmqpSession

_ACTIVE = EndpointState.ACTIVE


@dataclass(slots=True)
class PartialDelivery:
    """A delivery whose last frame has not arrived yet."""

    number: int
    tag: bytes
    message_format: int
    is_settled: bool
    state: DeliveryState | None
    is_resumed: bool
    content: bytearray
    size: int = 0  # of all frames, including those whose content was dropped


class ReceiverLink(AmqpLink):
    """The receiving end of a link."""

    __slots__ = ("_is_draining", "_partial", "available", "unsettled")

    ROLE = RECEIVER

    def __init__(self, session: "AmqpSession", name: str, handle: int) -> None:
        super().__init__(session, name, handle)
        self._is_draining = False
        self._partial: PartialDelivery | None = None
        self.available: int | None = None  # number of messages, as the sender reports it
        self.unsettled: dict[int, bool] = {}  # by number: whether the receiver settles first

    def grant(self, credit: int, *, drain: bool = False) -> None:
        """Set the number of deliveries that the sender may send from now on; zero stops it.

        With `drain`, the sender returns the credit that it cannot use now, and Drained follows.
        """
        if not 0 <= credit <= MAX_CREDIT:
            raise InvalidArgumentError(f"credit must be 0 to {MAX_CREDIT}, not {credit}")
        if self.state is not _ACTIVE:
            return
        self.credit = credit
        self._is_draining = drain
        self._say_flow()

    def _say_flow(self) -> None:
        self.session.say_flow(
            handle=self.handle,
            delivery_count=self.delivery_count,
            link_credit=self.credit,
            drain=self._is_draining,
        )

    def settle(
        self,
        number: int,
        state: DeliveryState | None = ACCEPTED,
        *,
        is_settled: bool | None = None,
    ) -> bool:
        """Report the outcome of a delivery; return whether it was still unsettled.

        If the receiver settles first, or with `is_settled`, the report also settles it. Otherwise
        DeliveriesSettled follows when the sender has settled it. Equal outcomes of consecutive
        deliveries are sent in one frame.
        """
        settles_first = self.unsettled.get(number)
        if settles_first is None:
            return False
        if is_settled is None:
            is_settled = settles_first
        self.session.outcomes.report(RECEIVER, number, state, is_settled=is_settled)
        if is_settled:
            del self.unsettled[number]
            self.session.outcomes.forget_received(number)
        return True

    # -- called by the session -----------------------------------------------------------------

    def leave(self) -> None:
        """Forget unsettled deliveries and an incomplete one."""
        super().leave()
        self._drop_partial()
        for number in self.unsettled:
            self.session.outcomes.forget_received(number)
        self.unsettled.clear()

    def note_peer(self, frame: AttachFrame) -> None:
        """Adopt the sender's initial delivery count."""
        self.delivery_count = frame.initial_delivery_count or 0

    def take_flow(self, frame: FlowFrame) -> None:
        """Process credit that the sender returned."""
        if frame.delivery_count is not None:
            given_back = distance(frame.delivery_count, self.delivery_count)
            if given_back > 0:
                self.delivery_count = frame.delivery_count
                self.credit = max(0, self.credit - given_back)
        self.available = frame.available
        if self.state is not _ACTIVE:
            return
        self._check_drained()
        if frame.echo:
            self._say_flow()

    def _check_drained(self) -> None:
        if self._is_draining and not self.credit and self._partial is None:
            self._is_draining = False
            self.session.connection.emit(Drained(self))

    def take_transfer(self, frame: ReadTransfer, payload: bytes) -> None:
        """Process a delivery, or a part of it."""
        if self.state is not _ACTIVE:
            if self.state is EndpointState.OFFERED:
                raise self._overrun()
            return  # we have detached, and the peer had not read it yet
        partial = self._partial
        if partial is None:
            number = self._begin(frame)
            if not frame.more and not frame.aborted:
                if not frame.resume:
                    self._deliver(
                        number,
                        frame.delivery_tag or b"",
                        payload,
                        frame.message_format or 0,
                        is_settled=bool(frame.settled),
                        state=frame.state,
                        mode=frame.rcv_settle_mode,
                    )
                else:
                    self._drop()
                return
            partial = self._partial = PartialDelivery(
                number=number,
                tag=frame.delivery_tag or b"",
                message_format=frame.message_format or 0,
                is_settled=bool(frame.settled),
                state=frame.state,
                is_resumed=frame.resume,
                content=bytearray(),
            )
        else:
            self._check_continues(partial, frame)
        self._add(partial, frame, payload)

    def _begin(self, frame: ReadTransfer) -> int:
        """Check the first frame of a delivery; return its number."""
        if frame.delivery_id is None or not frame.delivery_tag:
            raise AmqpError(
                f"the first transfer of a delivery on the link {self.name!r:.80} must have a "
                "delivery-id and a delivery-tag",
                Condition.INVALID_FIELD,
                Scope.LINK,
            )
        number = self.session.outcomes.number_received(frame.delivery_id)
        if self.credit > 0:
            self.credit -= 1
        elif not self.session.connection.options.tolerates_overrun:
            raise self._overrun()
        self.delivery_count = (self.delivery_count + 1) & MASK
        return number

    def _overrun(self) -> AmqpError:
        return AmqpError(
            f"a delivery arrived on the link {self.name!r:.80}, which has no credit",
            Condition.TRANSFER_LIMIT_EXCEEDED,
            Scope.LINK,
        )

    def _check_continues(self, partial: PartialDelivery, frame: ReadTransfer) -> None:
        if (
            (frame.delivery_id is not None and frame.delivery_id != partial.number & MASK)
            or (frame.delivery_tag is not None and frame.delivery_tag != partial.tag)
            or (frame.message_format not in {None, partial.message_format})
        ):
            raise AmqpError(
                f"a transfer on the link {self.name!r:.80} does not continue the incomplete "
                f"delivery {partial.number & MASK}; complete or abort that one first",
                Condition.INVALID_FIELD,
                Scope.LINK,
            )
        if frame.settled:
            partial.is_settled = True
        if frame.state is not None:
            partial.state = frame.state

    def _add(self, partial: PartialDelivery, frame: ReadTransfer, payload: bytes) -> None:
        if frame.aborted:
            self._drop_partial()
            self._drop()
            return
        partial.size += len(payload)
        if self._is_too_large(partial.size, is_settled=partial.is_settled):
            self.session.connection.add_partial_bytes(-len(partial.content))
            partial.content.clear()
        elif not partial.is_resumed:
            self.session.connection.add_partial_bytes(len(payload))
            partial.content += payload
        if frame.more:
            return
        content = bytes(partial.content)
        self._drop_partial()
        if self._is_too_large(partial.size, is_settled=partial.is_settled):
            self._reject_too_large(partial.number, partial.size)
        elif not partial.is_resumed:
            self._deliver(
                partial.number,
                partial.tag,
                content,
                partial.message_format,
                is_settled=partial.is_settled,
                state=partial.state,
                mode=frame.rcv_settle_mode,
            )
        else:
            self._drop()

    def _drop(self) -> None:
        """Report a delivery that does not arrive."""
        self.session.connection.emit(DeliveryDropped(self))
        self._check_drained()

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self.session.connection.add_partial_bytes(-len(self._partial.content))
            self._partial = None

    def _is_too_large(self, size: int, *, is_settled: bool) -> bool:
        """Return whether to reject a delivery because of its size; raise if that ends the link."""
        if not 0 < self.max_message_bytes < size:
            return False
        if self.session.connection.options.rejects_too_large and not is_settled:
            return True
        raise AmqpError(self._too_large(size), Condition.MESSAGE_SIZE_EXCEEDED, Scope.LINK)

    def _too_large(self, size: int) -> str:
        return (
            f"a message on the link {self.name!r:.80} has at least {size} bytes; at most "
            f"{self.max_message_bytes} are allowed"
        )

    def _reject_too_large(self, number: int, size: int) -> None:
        error = ErrorCondition(
            condition=Condition.MESSAGE_SIZE_EXCEEDED, description=self._too_large(size), info={}
        )
        outcome = Rejected(error=error)
        self.session.outcomes.report(RECEIVER, number, outcome, is_settled=True)
        self._drop()

    def _deliver(  # noqa: PLR0913 - the parts of a delivery, in the hot path
        self,
        number: int,
        tag: bytes,
        payload: bytes,
        message_format: int,
        *,
        is_settled: bool,
        state: DeliveryState | None,
        mode: ReceiverSettleMode | None,
    ) -> None:
        if self._is_too_large(len(payload), is_settled=is_settled):
            self._reject_too_large(number, len(payload))
            return
        if self.snd_settle_mode is SenderSettleMode.SETTLED:
            is_settled = True
        session = self.session
        if not is_settled:
            session.outcomes.add_received(number, self)
            mode = self.rcv_settle_mode if mode is None else mode
            self.unsettled[number] = mode is ReceiverSettleMode.FIRST
        session.connection.emit(
            Delivery(self, number, tag, payload, message_format, is_settled, state)
        )
        if self._is_draining:
            self._check_drained()
