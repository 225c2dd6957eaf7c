"""What both ends of a link have in common: attaching and detaching.

The states are those of lifecycle.py. A program calls `accept` or `refuse` for a link that the peer
requests, `AmqpSession.attach_sender` or `attach_receiver` to request one, and `detach` to end one.

Credit: the receiver grants it, and each delivery uses one unit. `delivery_count` counts deliveries
and returned credit, in 32 bits. Links are not resumed: no state outlives a link. When a peer
attaches and lists unsettled deliveries, our attach lists none of them. Deliveries that the peer
resumes are ignored, as the specification requires.
"""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.events import Attached, AttachRequested, LinkDetached
from twinbus.amqp.lifecycle import EndpointState, Saying, after
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import (
    SENDER,
    AttachFrame,
    Coordinator,
    DetachFrame,
    ErrorCondition,
    Fields,
    FlowFrame,
    ReceiverSettleMode,
    SenderSettleMode,
    Source,
    Target,
)
from twinbus.amqp.short_frames import ReadTransfer
from twinbus.amqp.types import Described
from twinbus.limits import AMQP_MESSAGE_BYTES

if TYPE_CHECKING:
    from twinbus.amqp.receiver_link import ReceiverLink
    from twinbus.amqp.sender_link import SenderLink
    from twinbus.amqp.session import AmqpSession

MAX_CREDIT = 2**31 - 1
_ACTIVE = EndpointState.ACTIVE


def error_condition(error: AmqpError) -> ErrorCondition:
    """Return an error in wire form; short, so that it fits into the smallest frame."""
    text = error.text.encode("ascii", "backslashreplace").decode()
    return ErrorCondition(condition=error.condition, description=text[:300], info={})


class AmqpLink:
    """The common part of both ends of a link."""

    __slots__ = (
        "_is_reported",
        "context",
        "credit",
        "delivery_count",
        "handle",
        "kept_bytes",
        "max_message_bytes",
        "name",
        "peer",
        "peer_handle",
        "rcv_settle_mode",
        "session",
        "snd_settle_mode",
        "state",
    )

    ROLE: ClassVar[bool]

    def __init__(self, session: "AmqpSession", name: str, handle: int) -> None:
        self.session = session
        self.name = name
        self.handle = handle
        self.peer: AttachFrame | None = None  # the peer's attach: source, target, properties ...
        self.peer_handle: int | None = None
        self.kept_bytes = 0  # size of the peer's attach
        self.state = EndpointState.NEW
        self.snd_settle_mode = SenderSettleMode.MIXED
        self.rcv_settle_mode = ReceiverSettleMode.FIRST
        self.max_message_bytes = 0  # the largest message on this link; 0: no limit
        self.credit = 0
        self.delivery_count = session.connection.options.first_number
        self.context: Any = None  # owned by the program that drives the connection
        self._is_reported = False

    @property
    def is_attached(self) -> bool:
        """Whether both ends have attached and neither has detached."""
        return self.state is _ACTIVE

    # -- called by programs --------------------------------------------------------------------

    def accept(
        self,
        *,
        source: Source | Described | None = None,
        target: Target | Coordinator | Described | None = None,
        max_message_bytes: int | None = None,
        properties: Fields | None = None,
    ) -> bool:
        """Answer an AttachRequested event; return whether the link is attached now.

        It is not attached if the peer has detached meanwhile. Source and target default to those of
        the peer, because peers compare them with their own.
        """
        if self.state is not EndpointState.OFFERED:
            return False
        assert self.peer is not None
        if max_message_bytes is None:
            max_message_bytes = 0 if self.ROLE is SENDER else AMQP_MESSAGE_BYTES
        options = LinkOptions(
            source=self.peer.source if source is None else source,
            target=self.peer.target if target is None else target,
            snd_settle_mode=self.peer.snd_settle_mode,
            rcv_settle_mode=self.peer.rcv_settle_mode,
            max_message_bytes=max_message_bytes,
            properties=properties,
        )
        self.say_attach(options)
        return self.is_attached

    def refuse(self, error: ErrorCondition) -> None:
        """Answer an AttachRequested event with an error: attach without termini, then detach."""
        if self.state is EndpointState.OFFERED:
            self._refuse(error)

    def detach(self, error: ErrorCondition | None = None, *, is_closed: bool = True) -> None:
        """End the link; LinkDetached follows when the peer has confirmed."""
        if self.state is EndpointState.OFFERED:
            self._refuse(error)
        elif self.state in {EndpointState.ACTIVE, EndpointState.OPENING}:
            self._say_detach(error, is_closed=is_closed)

    # -- called by the session -----------------------------------------------------------------

    def say_attach(self, options: LinkOptions) -> None:
        """Send our attach, as a request or as an answer."""
        attach = AttachFrame(
            name=self.name,
            handle=self.handle,
            role=self.ROLE,
            snd_settle_mode=options.snd_settle_mode,
            rcv_settle_mode=options.rcv_settle_mode,
            source=options.source,
            target=options.target,
            initial_delivery_count=self.delivery_count if self.ROLE is SENDER else None,
            max_message_size=options.max_message_bytes,
            desired_capabilities=options.desired_capabilities,
            properties=options.properties,
        )
        body = attach.encode()  # may raise, so it comes before any change
        self.state = after(self.state, Saying.OUR_OPEN)
        self.snd_settle_mode = options.snd_settle_mode
        self.rcv_settle_mode = options.rcv_settle_mode
        if self.ROLE is not SENDER:
            self.max_message_bytes = options.max_message_bytes
        self.session.write_body(body)

    def take_attach(self, frame: AttachFrame, size: int) -> None:
        """Process the peer's attach, a request or an answer."""
        self.state = after(self.state, Saying.PEER_OPEN)
        self.peer, self.peer_handle, self.kept_bytes = frame, frame.handle, size
        self.note_peer(frame)
        if self.state is EndpointState.OFFERED:
            self.session.connection.emit(AttachRequested(self._end()))
        elif self.state is _ACTIVE:
            if self.ROLE is SENDER:  # each end decides its own settle mode
                self.rcv_settle_mode = frame.rcv_settle_mode
            else:
                self.snd_settle_mode = frame.snd_settle_mode
            is_refused = (frame.target if self.ROLE is SENDER else frame.source) is None
            if not is_refused:  # if refused, a detach with the reason follows
                self.session.connection.emit(Attached(self._end()))

    def take_detach(self, frame: DetachFrame) -> None:
        """Process the peer's detach, and answer it."""
        self.state = after(self.state, Saying.PEER_CLOSE)
        if self.state is EndpointState.WITHDRAWN:
            self._say_empty_attach()
        if self.state is EndpointState.CLOSED:
            self._say_detach(None, is_closed=frame.closed)
        self._report(frame.error, is_closed=frame.closed)
        self.session.release(self)

    def fail(self, error: AmqpError) -> None:
        """End the link because the peer has violated a rule."""
        condition = error_condition(error)
        self.detach(condition)
        self._report(condition)

    def end(self, error: ErrorCondition | None) -> None:
        """End the link, because its session has ended."""
        self.state = EndpointState.ENDED
        self.leave()
        self._report(error)

    def _refuse(self, error: ErrorCondition | None) -> None:
        DetachFrame(handle=self.handle, error=error).encode()  # only to raise before any change
        self._say_empty_attach()
        self._say_detach(error)

    def _say_empty_attach(self) -> None:
        self.state = after(self.state, Saying.OUR_OPEN)
        self.session.write(
            AttachFrame(
                name=self.name,
                handle=self.handle,
                role=self.ROLE,
                initial_delivery_count=self.delivery_count if self.ROLE is SENDER else None,
            )
        )

    def _say_detach(self, error: ErrorCondition | None, *, is_closed: bool = True) -> None:
        body = DetachFrame(handle=self.handle, closed=is_closed, error=error).encode()
        self.session.outcomes.flush()
        self.leave()
        self.state = after(self.state, Saying.OUR_CLOSE)
        self.session.write_body(body)

    def _report(self, error: ErrorCondition | None, *, is_closed: bool = True) -> None:
        if not self._is_reported:
            self._is_reported = True
            self.session.connection.emit(LinkDetached(self, error, is_closed))

    def _end(self) -> "SenderLink | ReceiverLink":
        return cast("SenderLink | ReceiverLink", self)

    # -- different for sender and receiver -----------------------------------------------------

    def leave(self) -> None:
        """Forget the deliveries of a link that ends, and release its name.

        A link that the peer has not answered keeps its name until the answer arrives.
        """
        self.credit = 0
        if self.peer is not None:
            self.session.connection.free_name(self)

    def note_peer(self, frame: AttachFrame) -> None:
        """Adopt the delivery settings in the peer's attach."""
        raise NotImplementedError

    def take_flow(self, frame: FlowFrame) -> None:
        """Process the peer's flow for the link."""
        raise NotImplementedError

    def take_transfer(self, frame: ReadTransfer, payload: bytes) -> None:
        """Process a delivery, or a part of it."""
        raise NotImplementedError
