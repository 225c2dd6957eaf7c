"""What a connection reports to the program that drives it.

    Opened              the peer has opened the connection
    SessionBegun        a session is there, begun by either end
    AttachRequested     the peer wants a link: `accept` or `refuse` it, now or later
    Attached            the peer has accepted a link that we asked for
    Delivery            a message has arrived, whole
    DeliveriesSettled   the peer has settled deliveries that it sent
    OutcomeReported     the peer has reported what became of deliveries that we sent
    CreditGiven         the peer has changed how much a link may send
    WindowOpened        a session that could not send can send again
    Drained             the peer has used up or given back the credit, as `grant` asked it to
    LinkDetached        a link has ended, by either end; once for each link
    SessionEnded        a session has ended; its links have been reported before
    ConnectionClosed    the connection has ended, the last event; its sessions were reported before

Events of one `receive` are in order, but the machine is already behind all of them: a link of an
early event may have ended by a later one. Calls to a link that has ended do nothing.
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
    """A session is there."""

    session: "AmqpSession"


@dataclass(frozen=True, slots=True)
class AttachRequested:
    """The peer wants a link; `link.peer` says from where to where."""

    link: "SenderLink | ReceiverLink"


@dataclass(frozen=True, slots=True)
class Attached:
    """The peer has accepted a link that we asked for."""

    link: "SenderLink | ReceiverLink"


class Delivery(NamedTuple):
    """A message has arrived."""

    link: "ReceiverLink"
    number: int  # names the delivery to `settle`
    tag: bytes
    payload: bytes
    message_format: int
    is_settled: bool  # by the sender; it expects no outcome
    state: "DeliveryState | None"  # such as a transaction


@dataclass(frozen=True, slots=True)
class DeliveriesSettled:
    """The sender has settled deliveries whose outcome we had reported."""

    link: "ReceiverLink"
    numbers: list[int]


class OutcomeReported(NamedTuple):
    """The receiver has reported an outcome of deliveries, in order of their numbers.

    Unless it has settled them, it waits for `link.settle`.
    """

    link: "SenderLink"
    deliveries: list[tuple[int, bytes]]  # number and tag
    state: "DeliveryState | None"
    is_settled: bool


@dataclass(frozen=True, slots=True)
class CreditGiven:
    """The receiver has changed how much a link may send."""

    link: "SenderLink"
    credit: int
    is_draining: bool  # send what there is now, and then call `link.drained`


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """The peer takes transfers of this session again."""

    session: "AmqpSession"


@dataclass(frozen=True, slots=True)
class Drained:
    """The sender has no credit left, as `grant` asked it to."""

    link: "ReceiverLink"


@dataclass(frozen=True, slots=True)
class LinkDetached:
    """A link has ended."""

    link: "AmqpLink"
    error: "ErrorCondition | None"
    is_closed: bool  # false: the peer would like to resume it, which is not supported


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session has ended."""

    session: "AmqpSession"
    error: "ErrorCondition | None"


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection has ended."""

    error: "ErrorCondition | None"
    is_peers: bool  # the peer closed it; else we did, or it was lost


Event = (
    Opened
    | SessionBegun
    | AttachRequested
    | Attached
    | Delivery
    | DeliveriesSettled
    | OutcomeReported
    | CreditGiven
    | WindowOpened
    | Drained
    | LinkDetached
    | SessionEnded
    | ConnectionClosed
)
