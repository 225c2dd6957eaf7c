"""What a connection reports to the program that drives it.

    Opened              the peer has opened the connection
    SessionBegun        a session has begun, by either end
    AttachRequested     the peer requests a link: call `accept` or `refuse`, now or later
    Attached            the peer has accepted a link that we requested
    Delivery            a complete message has arrived
    DeliveryDropped     a delivery that used credit will not arrive
    DeliveriesSettled   the peer has settled deliveries that it sent
    OutcomeReported     the peer has reported the outcome of deliveries that we sent
    CreditGiven         the peer has changed the credit of a link on which we send
    WindowOpened        a session that could not send can send again
    Drained             the peer has used or returned all credit, as `grant` requested
    LinkDetached        a link has ended, by either end; once per link
    SessionEnded        a session has ended; the ends of its links were reported before
    ConnectionClosed    the last event: the connection has ended; the ends of its sessions were
                        reported before

The events that one call of `receive` returns are in order. The connection has already processed all
bytes of the call, so the link of an early event may have ended; a later event then reports the end.
Calls on a link that has ended do nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from twinbus.amqp.link import AmqpLink
    from twinbus.amqp.performatives import DeliveryState, ErrorCondition, OpenFrame
    from twinbus.amqp.receiver_link import ReceiverLink
    from twinbus.amqp.sender_link import SenderLink
    from twinbus.amqp.session import AmqpSession


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer has opened the connection."""

    peer: "OpenFrame"


@dataclass(frozen=True, slots=True)
class SessionBegun:
    """A session has begun."""

    session: "AmqpSession"


@dataclass(frozen=True, slots=True)
class AttachRequested:
    """The peer requests a link; `link.peer` has its source and target."""

    link: "SenderLink | ReceiverLink"


@dataclass(frozen=True, slots=True)
class Attached:
    """The peer has accepted a link that we requested."""

    link: "SenderLink | ReceiverLink"


class Delivery(NamedTuple):
    """A message has arrived."""

    link: "ReceiverLink"
    number: int  # identifies the delivery for `settle`
    tag: bytes
    payload: bytes
    message_format: int
    is_settled: bool  # the sender expects no outcome
    state: "DeliveryState | None"  # such as a transaction


@dataclass(frozen=True, slots=True)
class DeliveryDropped:
    """A delivery used a unit of credit and will not arrive: too large, aborted, or resumed."""

    link: "ReceiverLink"


@dataclass(frozen=True, slots=True)
class DeliveriesSettled:
    """The sender has settled deliveries whose outcome we had reported."""

    link: "ReceiverLink"
    numbers: list[int]


class OutcomeReported(NamedTuple):
    """The receiver has reported an outcome of deliveries, in order of their numbers.

    If the receiver has not settled them, it waits for `link.settle`.
    """

    link: "SenderLink"
    deliveries: list[tuple[int, bytes]]  # number and tag
    state: "DeliveryState | None"
    is_settled: bool


@dataclass(frozen=True, slots=True)
class CreditGiven:
    """The receiver has changed the credit of a link."""

    link: "SenderLink"
    credit: int
    is_draining: bool  # send the messages that are available now, then call `link.drained`


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """The session can send again: the peer accepts transfers, and not too many are unsettled."""

    session: "AmqpSession"


@dataclass(frozen=True, slots=True)
class Drained:
    """The sender has no credit left, as `grant` requested."""

    link: "ReceiverLink"


@dataclass(frozen=True, slots=True)
class LinkDetached:
    """A link has ended."""

    link: "AmqpLink"
    error: "ErrorCondition | None"
    is_closed: bool  # false: the peer wants to resume the link later, which is not supported


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session has ended."""

    session: "AmqpSession"
    error: "ErrorCondition | None"


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection has ended."""

    error: "ErrorCondition | None"
    is_peers: bool  # the peer closed it; otherwise we closed it or it was lost


Event = (
    Opened
    | SessionBegun
    | AttachRequested
    | Attached
    | Delivery
    | DeliveryDropped
    | DeliveriesSettled
    | OutcomeReported
    | CreditGiven
    | WindowOpened
    | Drained
    | LinkDetached
    | SessionEnded
    | ConnectionClosed
)
