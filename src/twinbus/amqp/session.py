"""A session: its links share flow windows, delivery numbers and dispositions.

Windows count transfer frames. Our incoming window is renewed only when bytes leave for the peer, so
a peer that sends without reading uses it up. Apart from that, link credit limits a sender.
transfers.py keeps to the peer's window; outcomes.py tracks unsettled deliveries.

A frame that refers to an unknown link or delivery, or exceeds the window, ends the session with an
error. After we have ended a session, frames are ignored until the peer answers.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from twinbus.amqp.conditions import AmqpError, Condition, Scope
from twinbus.amqp.deliveries import MASK
from twinbus.amqp.events import SessionBegun, SessionEnded, WindowOpened
from twinbus.amqp.lifecycle import EndpointState, Saying, after
from twinbus.amqp.link import AmqpLink, error_condition
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.outcomes import Outcomes
from twinbus.amqp.performatives import (
    RECEIVER,
    AttachFrame,
    BeginFrame,
    DetachFrame,
    EndFrame,
    ErrorCondition,
    FlowFrame,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.short_frames import ReadDisposition, ReadTransfer
from twinbus.amqp.transfers import OutgoingTransfers
from twinbus.errors import InvalidOperationError
from twinbus.limits import AMQP_OUTGOING_WINDOW

if TYPE_CHECKING:
    from twinbus.amqp.composites import Composite
    from twinbus.amqp.connection import AmqpConnection

_ACTIVE = EndpointState.ACTIVE


class AmqpSession:
    """A session of a connection."""

    __slots__ = (
        "_by_peer_handle",
        "_incoming_window",
        "_links",
        "_next_incoming_id",
        "channel",
        "connection",
        "outcomes",
        "peer",
        "peer_channel",
        "state",
        "transfers",
    )

    def __init__(self, connection: "AmqpConnection", channel: int) -> None:
        self.connection = connection
        self.channel = channel
        self.peer: BeginFrame | None = None
        self.peer_channel: int | None = None
        self.state = EndpointState.NEW
        self._links: dict[int, AmqpLink] = {}  # by our handle
        self._by_peer_handle: dict[int, AmqpLink] = {}
        self._incoming_window = connection.options.incoming_window
        self._next_incoming_id = 0
        self.transfers = OutgoingTransfers(connection, channel)
        self.outcomes = Outcomes(self)

    # -- called by programs --------------------------------------------------------------------

    @property
    def links(self) -> Iterator[AmqpLink]:
        """The links that have not ended."""
        return iter(tuple(self._links.values()))

    @property
    def may_send(self) -> bool:
        """Whether the session can send a transfer now."""
        return self.transfers.may_send and self.outcomes.has_room

    def attach_sender(self, name: str, options: LinkOptions) -> SenderLink:
        """Request a link on which we send; Attached or LinkDetached follows."""
        link = SenderLink(self, name, self._free_handle())
        self._add(link)
        link.say_attach(options)
        return link

    def attach_receiver(self, name: str, options: LinkOptions) -> ReceiverLink:
        """Request a link on which we receive; Attached or LinkDetached follows."""
        link = ReceiverLink(self, name, self._free_handle())
        self._add(link)
        link.say_attach(options)
        return link

    def end(self, error: ErrorCondition | None = None) -> None:
        """End the session; SessionEnded follows when the peer has confirmed."""
        if self.state in {EndpointState.ACTIVE, EndpointState.OPENING}:
            body = EndFrame(error=error).encode()  # may raise, so it comes before any change
            self.leave()
            self.state = after(self.state, Saying.OUR_CLOSE)
            self.write_body(body)

    # -- beginning and ending ------------------------------------------------------------------

    def say_begin(self) -> None:
        """Send our begin, as a request or as an answer."""
        self.state = after(self.state, Saying.OUR_OPEN)
        self.write(
            BeginFrame(
                remote_channel=self.peer_channel,
                next_outgoing_id=self.transfers.next_id,
                incoming_window=self._incoming_window,
                outgoing_window=AMQP_OUTGOING_WINDOW,
                handle_max=self.connection.options.max_session_links - 1,
            )
        )

    def take_begin(self, frame: BeginFrame, channel: int) -> None:
        """Process the peer's begin, a request or an answer."""
        self.state = after(self.state, Saying.PEER_OPEN)
        self.peer, self.peer_channel = frame, channel
        self._next_incoming_id = frame.next_outgoing_id
        self.transfers.open_window(frame.incoming_window)
        if self.state is EndpointState.OFFERED:
            self.say_begin()
        if self.state is _ACTIVE:
            self.connection.emit(SessionBegun(self))

    def leave(self) -> None:
        """Write pending frames and forget the deliveries, before the end is sent."""
        self.outcomes.flush()
        for link in self.links:
            link.leave()

    def _take_end(self, frame: EndFrame) -> None:
        self.state = after(self.state, Saying.PEER_CLOSE)
        if self.state is EndpointState.CLOSED:
            self.outcomes.flush()
            self.state = after(self.state, Saying.OUR_CLOSE)
            self.write(EndFrame())
        self.terminate(frame.error)

    def _fail(self, error: AmqpError) -> None:
        """End the session because the peer has violated a rule."""
        self.end(error_condition(error))
        for link in self.links:
            link.end(error_condition(error))

    def terminate(self, error: ErrorCondition | None) -> None:
        """Finish the session: both ends have ended it, or its connection has ended."""
        self.state = EndpointState.ENDED
        for link in self.links:
            link.end(error)
            self.release(link)
        self.connection.release(self)
        self.connection.emit(SessionEnded(self, error))

    # -- links ---------------------------------------------------------------------------------

    def _free_handle(self) -> int:
        if self.state not in {EndpointState.ACTIVE, EndpointState.OPENING}:
            raise InvalidOperationError(
                f"the session is {self.state.value}; begin a new session for new links"
            )
        handle = 0
        while handle in self._links:
            handle += 1
        if self.peer is not None and handle > self.peer.handle_max:
            raise InvalidOperationError(
                f"the peer allows at most {self.peer.handle_max + 1} links in a session; begin "
                "a new session"
            )
        return handle

    def _add(self, link: AmqpLink) -> None:
        self.connection.take_name(link)
        self.connection.link_count += 1
        self._links[link.handle] = link

    def _take_attach(self, frame: AttachFrame, size: int) -> None:
        highest = self.connection.options.max_session_links - 1
        if frame.handle > highest:
            raise AmqpError(
                f"attach uses the handle {frame.handle}; the maximum is {highest}",
                Condition.FRAMING_ERROR,
            )
        if frame.handle in self._by_peer_handle:
            raise AmqpError(
                f"attach uses the handle {frame.handle}, which is in use",
                Condition.HANDLE_IN_USE,
                Scope.SESSION,
            )
        link = self.connection.link_named(frame.name, not frame.role)
        if link is not None and (link.session is not self or link.peer is not None):
            text = f"the link {frame.name!r:.80} was attached again, which ends the earlier one"
            link.fail(AmqpError(text, Condition.STOLEN, Scope.LINK))
            self.connection.free_name(link)
            link = None
        if link is None:
            link = self._offered(frame, size)
        self._by_peer_handle[frame.handle] = link
        self.connection.kept_bytes += size
        link.take_attach(frame, size)

    def _offered(self, frame: AttachFrame, size: int) -> AmqpLink:
        """Return a new link that the peer requests."""
        connection = self.connection
        if (
            connection.link_count >= connection.bounds.max_links
            or connection.kept_bytes + size > connection.bounds.max_kept_bytes
        ):
            raise AmqpError(
                f"the connection has {connection.link_count} links with {connection.kept_bytes} "
                f"bytes of attach frames; at most {connection.bounds.max_links} links with "
                f"{connection.bounds.max_kept_bytes} bytes are allowed. Detach some",
                Condition.RESOURCE_LIMIT_EXCEEDED,
                Scope.SESSION,
            )
        try:
            handle = self._free_handle()
        except InvalidOperationError as error:
            raise AmqpError(error.text, Condition.RESOURCE_LIMIT_EXCEEDED, Scope.SESSION) from error
        kind = SenderLink if frame.role is RECEIVER else ReceiverLink
        link = kind(self, frame.name, handle)
        self._add(link)
        return link

    def release(self, link: AmqpLink) -> None:
        """Release the handles of a link that has ended."""
        if self._links.pop(link.handle, None) is None:
            return
        self.connection.free_name(link)
        self.connection.link_count -= 1
        if link.peer_handle is not None:
            del self._by_peer_handle[link.peer_handle]
            self.connection.kept_bytes -= link.kept_bytes

    # -- frames of the peer --------------------------------------------------------------------

    def take(self, frame: "Composite | ReadTransfer | ReadDisposition", size: int) -> None:
        """Process a frame without a message."""
        if isinstance(frame, EndFrame):
            self._take_end(frame)
            return
        if self.state is not _ACTIVE:
            return  # we have ended the session, and the peer had not read it yet
        try:
            if isinstance(frame, ReadDisposition):
                self.outcomes.take(frame)
            elif isinstance(frame, FlowFrame):
                self._take_flow(frame)
            elif isinstance(frame, AttachFrame):
                self._take_attach(frame, size)
            elif isinstance(frame, DetachFrame):
                self._linked(frame.handle).take_detach(frame)
            else:
                _refuse(frame)
        except AmqpError as error:
            if error.scope is Scope.CONNECTION:
                raise
            self._fail(error)

    def take_transfer(self, frame: ReadTransfer, payload: bytes) -> None:
        """Process a frame with a message, or a part of it."""
        if self.state is not _ACTIVE:
            return  # we have ended the session, and the peer had not read it yet
        link: AmqpLink | None = None
        try:
            self._use_window()
            link = self._linked(frame.handle)
            link.take_transfer(frame, payload)
        except AmqpError as error:
            if error.scope is Scope.CONNECTION:
                raise
            if error.scope is Scope.SESSION or link is None:
                self._fail(error)
                return
            link.fail(error)
        if self._is_window_low:
            self.connection.note_unflushed(self)

    @property
    def _is_window_low(self) -> bool:
        return self._incoming_window * 2 <= self.connection.options.incoming_window

    def flush(self) -> None:
        """Write frames that were deferred until bytes leave: a disposition, an opened window."""
        self.outcomes.flush()
        if self._is_window_low and self.state is _ACTIVE:
            self._incoming_window = self.connection.options.incoming_window
            self.say_flow()

    def _use_window(self) -> None:
        if not self._incoming_window:
            raise AmqpError(
                "a transfer arrived when the incoming window was 0; wait for a flow that opens it",
                Condition.WINDOW_VIOLATION,
                Scope.SESSION,
            )
        self._incoming_window -= 1
        self._next_incoming_id = (self._next_incoming_id + 1) & MASK

    def _linked(self, handle: int) -> AmqpLink:
        link = self._by_peer_handle.get(handle)
        if link is None:
            raise AmqpError(
                f"no link has the handle {handle}", Condition.UNATTACHED_HANDLE, Scope.SESSION
            )
        return link

    # -- flow ----------------------------------------------------------------------------------

    def say_flow(self, **link_fields: Any) -> None:
        """Send the windows of the session; with fields of a link, also its credit."""
        self.write(
            FlowFrame(
                next_incoming_id=self._next_incoming_id,
                incoming_window=self._incoming_window,
                next_outgoing_id=self.transfers.next_id,
                outgoing_window=AMQP_OUTGOING_WINDOW,
                **link_fields,
            )
        )

    def _take_flow(self, frame: FlowFrame) -> None:
        transfers = self.transfers
        could_send = transfers.may_send
        expected_next = frame.next_incoming_id
        if expected_next is None:  # the peer had not read our begin yet
            expected_next = self.connection.options.first_number
        unsent = transfers.open_window(frame.incoming_window, expected_next)
        if unsent:
            raise AmqpError(
                f"flow acknowledges {unsent} transfers that were not sent",
                Condition.INVALID_FIELD,
                Scope.SESSION,
            )
        self._next_incoming_id = frame.next_outgoing_id
        if frame.handle is not None:
            self._linked(frame.handle).take_flow(frame)
        elif frame.echo:
            self.say_flow()
        if transfers.may_send and not could_send:
            self.connection.emit(WindowOpened(self))

    def write(self, frame: "Composite") -> None:
        """Send a frame on the channel of this session."""
        self.connection.write_body(self.channel, frame.encode())

    def write_body(self, body: bytes) -> None:
        """Send an encoded frame on the channel of this session."""
        self.connection.write_body(self.channel, body)


def _refuse(frame: "Composite | ReadTransfer | ReadDisposition") -> None:
    raise AmqpError(f"{frame.NAME} is not allowed on a session's channel", Condition.NOT_ALLOWED)
