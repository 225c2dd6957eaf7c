"""The unsettled deliveries of a session, in both directions, and the outcomes still to be sent.

A delivery that we sent is in `sent` until the receiver reports an outcome, then in `reported` until
either end settles it. A repeated disposition therefore has no effect. Equal outcomes of consecutive
deliveries that we report are combined into one frame, which is written when the next bytes leave.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinbus.amqp.conditions import AmqpError, Condition, Scope
from twinbus.amqp.deliveries import MASK, UnsettledDeliveries, distance, unwrapped
from twinbus.amqp.encoder import write_boolean, write_compound, write_uint
from twinbus.amqp.events import DeliveriesSettled, OutcomeReported, WindowOpened
from twinbus.amqp.performatives import RECEIVER, DeliveryState, Received
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.short_frames import ReadDisposition
from twinbus.amqp.transfers import state_bytes

if TYPE_CHECKING:
    from twinbus.amqp.session import AmqpSession


@dataclass(slots=True)
class GatheredOutcome:
    """A disposition frame that may still grow."""

    role: bool
    first: int
    last: int
    is_settled: bool
    state: bytes  # encoded


class Outcomes:
    """The unsettled deliveries of a session, in both directions."""

    __slots__ = (
        "_gathered",
        "_last_received",
        "_max_unsettled",
        "_received",
        "_reported",
        "_sent",
        "_session",
    )

    def __init__(self, session: "AmqpSession") -> None:
        self._session = session
        self._max_unsettled = session.connection.options.max_unsettled
        self._received: UnsettledDeliveries[ReceiverLink] = UnsettledDeliveries()
        self._last_received: int | None = None
        self._sent: UnsettledDeliveries[SenderLink] = UnsettledDeliveries()
        self._reported: UnsettledDeliveries[SenderLink] = UnsettledDeliveries()
        self._gathered: GatheredOutcome | None = None

    # -- called by links -----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another delivery may be sent unsettled."""
        return len(self._sent.owners) + len(self._reported.owners) < self._max_unsettled

    def add_sent(self, number: int, link: SenderLink) -> None:
        """Add a delivery that is sent unsettled."""
        self._sent.add(number, link)

    def forget_sent(self, number: int) -> None:
        """Forget a delivery that we sent."""
        if self._reported.take(number) is not None or self._sent.take(number) is not None:
            self._note_room(1)

    def _note_room(self, settled: int) -> None:
        """Report that deliveries can be sent again, if `max_unsettled` prevented that until now.

        `settled` is the number of deliveries that were settled just now.
        """
        room = self._max_unsettled - len(self._sent.owners) - len(self._reported.owners)
        if 0 < room <= settled and self._session.may_send:
            self._session.connection.emit(WindowOpened(self._session))

    def number_received(self, delivery_id: int) -> int:
        """Return the delivery-id of a new delivery without its wraparound; ids must increase."""
        last = self._last_received
        number = delivery_id if last is None else unwrapped(delivery_id, last)
        if last is not None and number <= last:
            raise AmqpError(
                f"the delivery-id {delivery_id} is not above {last & MASK}, the previous one of "
                "the session; delivery-ids must increase",
                Condition.INVALID_FIELD,
                Scope.SESSION,
            )
        self._last_received = number
        return number

    def add_received(self, number: int, link: ReceiverLink) -> None:
        """Add a delivery that has arrived unsettled."""
        if len(self._received) >= self._max_unsettled:
            raise AmqpError(
                f"{len(self._received)} deliveries of the session are unsettled, the maximum; wait "
                "for outcomes",
                Condition.RESOURCE_LIMIT_EXCEEDED,
                Scope.SESSION,
            )
        self._received.add(number, link)

    def forget_received(self, number: int) -> None:
        """Forget a delivery that we received."""
        self._received.take(number)

    def report(
        self,
        role: bool,  # noqa: FBT001 - as on the wire
        number: int,
        state: DeliveryState | None,
        *,
        is_settled: bool,
    ) -> None:
        """Report the state of a delivery; equal consecutive states are sent in one frame."""
        encoded = b"\x40" if state is None else state_bytes(state)
        gathered = self._gathered
        if gathered is not None:
            if (
                number == gathered.last + 1
                and role is gathered.role
                and is_settled is gathered.is_settled
                and encoded == gathered.state
            ):
                gathered.last = number
                return
            self.flush()
        self._gathered = GatheredOutcome(role, number, number, is_settled, encoded)
        self._session.connection.note_unflushed(self._session)

    def flush(self) -> None:
        """Write the combined disposition."""
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return
        first = last = write_uint(gathered.first & MASK)
        if gathered.last != gathered.first:
            last = write_uint(gathered.last & MASK)
        role, is_settled = write_boolean(gathered.role), write_boolean(gathered.is_settled)
        content = b"%b%b%b%b%b" % (role, first, last, is_settled, gathered.state)
        body = b"\x00\x53\x15" + write_compound(0xC0, 5, content)
        self._session.connection.write_body(self._session.channel, body)

    # -- frames of the peer --------------------------------------------------------------------

    def take(self, frame: ReadDisposition) -> None:
        """Process a disposition of the peer."""
        first = frame.first
        length = 0 if frame.last is None else distance(frame.last, first)
        if length < 0:
            raise AmqpError(
                f"the range of a disposition ends before it begins: {first} to {frame.last}",
                Condition.INVALID_FIELD,
                Scope.SESSION,
            )
        if frame.role is RECEIVER:
            number = unwrapped(first, self._session.transfers.next_number)
            if frame.settled or not (frame.state is None or isinstance(frame.state, Received)):
                if length:
                    self._take_outcomes(frame, number, number + length)
                else:
                    self._take_outcome(frame, number)
        elif frame.settled and self._last_received is not None:
            number = unwrapped(first, self._last_received)
            self._take_settled(number, number + length)

    def _take_outcome(self, frame: ReadDisposition, number: int) -> None:
        """Process the outcome of one delivery that we sent, as `_take_outcomes` does."""
        is_settled = frame.settled
        link = self._sent.take(number)
        if link is None and is_settled:
            link = self._reported.take(number)
        if link is None:
            return
        if is_settled:
            tag = link.unsettled.pop(number)
        else:
            self._reported.add(number, link)
            tag = link.unsettled[number]
        event = OutcomeReported(link, [(number, tag)], frame.state, is_settled)
        self._session.connection.emit(event)
        if is_settled:
            self._note_room(1)

    def _take_outcomes(self, frame: ReadDisposition, first: int, last: int) -> None:
        """Process the outcome of a range of deliveries that we sent."""
        state, is_settled = frame.state, frame.settled
        found = self._sent.take_range(first, last)
        if is_settled:
            found += self._reported.take_range(first, last)
            found.sort(key=lambda pair: pair[0])
        else:
            for number, link in found:
                self._reported.add(number, link)
        for link, numbers in _by_link(found).items():
            tags = link.unsettled
            deliveries = [
                (number, tags.pop(number) if is_settled else tags[number]) for number in numbers
            ]
            self._session.connection.emit(OutcomeReported(link, deliveries, state, is_settled))
        if is_settled:
            self._note_room(len(found))

    def _take_settled(self, first: int, last: int) -> None:
        """Process a sender's disposition of deliveries that we received."""
        for link, numbers in _by_link(self._received.take_range(first, last)).items():
            for number in numbers:
                del link.unsettled[number]
            self._session.connection.emit(DeliveriesSettled(link, numbers))


def _by_link(found: list[tuple[int, Any]]) -> Mapping[Any, list[int]]:
    """Return the numbers of deliveries by link."""
    if len(found) == 1:
        return {found[0][1]: [found[0][0]]}
    grouped: dict[Any, list[int]] = {}
    for number, link in found:
        grouped.setdefault(link, []).append(number)
    return grouped
