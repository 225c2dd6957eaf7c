"""One end of an AMQP connection, without IO: bytes and `now` in, bytes and events out.

The driver (a server, a client, or a simulation) passes in the bytes that it has read, acts on the
events, writes the bytes that `take_outgoing` returns, and calls `tick` at the time `next_event`.
This class serves both ends; the client is the end that sends first.

A connection begins with handshake.py, then both ends open it (lifecycle.py). After we have sent
close, everything but the peer's close is ignored.

An error of the peer never makes a call raise: the link, session or connection ends with an error,
and an event reports it. Memory is bounded: each structure that a peer can make grow has a limit in
limits.py, `unread_bytes` is the number of bytes that the peer has not read, and `may_read` says
whether the driver may read more from the peer.
"""

from collections.abc import Iterator

from twinbus.amqp.composites import Composite, count_values, read_composite
from twinbus.amqp.conditions import AmqpError, Condition, Scope, TruncatedError
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.events import ConnectionClosed, Event, Opened
from twinbus.amqp.frames import (
    FRAME_HEAD_BYTES,
    HEARTBEAT,
    AmqpFrameReader,
    FrameType,
    FrameView,
    frame,
)
from twinbus.amqp.handshake import Handshake
from twinbus.amqp.lifecycle import EndpointState, Saying, after
from twinbus.amqp.link import AmqpLink, error_condition
from twinbus.amqp.options import ConnectionOptions
from twinbus.amqp.performatives import (
    AttachFrame,
    BeginFrame,
    CloseFrame,
    ErrorCondition,
    OpenFrame,
)
from twinbus.amqp.sasl import SaslClient, SaslServer
from twinbus.amqp.session import AmqpSession
from twinbus.amqp.short_frames import (
    ReadDisposition,
    ReadTransfer,
    ReportedRange,
    read_short,
)
from twinbus.errors import InvalidOperationError
from twinbus.limits import (
    AMQP_CLOSE_US,
    AMQP_OPEN_US,
    AMQP_WRITTEN_FRAME_BYTES,
    MAX_AMQP_KEPT_FRAME_BYTES,
    MAX_AMQP_KEPT_VALUES,
    MAX_AMQP_STATE_BYTES,
    MIN_AMQP_FRAME_BYTES,
    MIN_AMQP_IDLE_US,
    NEVER_US,
    SECOND_US,
)


class AmqpConnection:
    """A connection, from its first byte to its end."""

    def __init__(
        self,
        options: ConnectionOptions,
        now: int,
        *,
        sasl: SaslServer | SaslClient | None = None,
        is_client: bool = False,
    ) -> None:
        self.options = options
        self.bounds = options.bounds  # the program may replace them at any time
        self._is_client = is_client
        self.state = EndpointState.NEW
        self.peer: OpenFrame | None = None
        self.peer_frame_bytes = MIN_AMQP_FRAME_BYTES  # the largest frame that the peer accepts
        self.link_count = 0
        self.kept_bytes = 0  # size of the peer's attach frames that are kept in memory
        self.withheld_bytes = 0  # of deliveries that wait for the window of their session
        self._sessions: dict[int, AmqpSession] = {}  # by our channel
        self._by_peer_channel: dict[int, AmqpSession] = {}
        self._ended_channels: set[int] = set()  # of the peer; SDKs may still send frames on them
        self._names: dict[tuple[str, bool], AmqpLink] = {}  # by name and our role
        self._reader = AmqpFrameReader(MIN_AMQP_FRAME_BYTES)  # the limit until SASL is complete
        self._events: list[Event] = []
        self._outgoing: list[Buffer] = []
        self._outgoing_bytes = 0
        self._unopened: list[tuple[int, bytes]] = []  # frames to be sent after the peer's open
        self._unflushed: dict[AmqpSession, None] = {}  # in order
        self.buffered_bytes = 0  # that the driver has fetched and not yet written
        self._partial_bytes = 0
        self._misfit: AmqpError | None = None  # one of our frames was too large for the peer
        self._is_reported = False
        self.is_done = False  # the driver must close the socket once everything is written
        self._now = self._began_at = self._received_at = self._sent_at = now
        self._closing_at: int | None = None
        self._heartbeat_us = 0  # how often the peer expects a frame; 0: never
        self._handshake: Handshake | None = Handshake(sasl, self._queue, is_client=is_client)
        if self._is_client and sasl is None:
            self._say_open()

    # -- reading -------------------------------------------------------------------------------

    def receive(self, data: bytes, now: int) -> list[Event]:
        """Process bytes that have arrived; no bytes mean that the peer closed the socket."""
        if not data:
            return self.lose()
        self._now = self._received_at = now
        if not self.is_done:
            self._reader.feed(data)
            try:
                self._take_frames()
            except AmqpError as error:
                self._fail(error)
        return self.take_events()

    def _take_frames(self) -> None:
        reader = self._reader
        if self._handshake is not None:
            if not self._handshake.take(reader):
                return
            self._handshake = None
            reader.max_frame_bytes = self.options.max_frame_bytes
            if self._is_client and self.state is EndpointState.NEW:
                self._say_open()
        while not self.is_done and (view := reader.take_frame()) is not None:
            self._take_frame(view)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, including those caused by our own calls."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        """Whether `take_events` has events to return."""
        return bool(self._events)

    @property
    def incomplete_bytes(self) -> int:
        """How many bytes of unfinished frames and deliveries are in memory."""
        return self._reader.incomplete_bytes + self._partial_bytes

    @property
    def may_read(self) -> bool:
        """Whether the driver may read more; false while the peer does not read our bytes."""
        return self.unread_bytes <= self.bounds.max_unread_bytes and not self.is_done

    # -- frames --------------------------------------------------------------------------------

    def _take_frame(self, view: FrameView) -> None:
        if view.type != FrameType.AMQP:
            raise AmqpError(f"a frame has the unknown type {view.type}", Condition.FRAMING_ERROR)
        if view.begin == view.end:
            return  # a heartbeat
        received, at = read_short(view.data, view.begin, view.end) or _decoded(view)
        if isinstance(received, ReadTransfer):
            if received.state is not None and at - view.begin > MAX_AMQP_STATE_BYTES:
                raise AmqpError(
                    f"a transfer with a delivery state has {at - view.begin} bytes before its "
                    f"message; at most {MAX_AMQP_STATE_BYTES} are allowed",
                    Condition.RESOURCE_LIMIT_EXCEEDED,
                )
            session = self._by_peer_channel.get(view.channel)
            if session is not None and self._closing_at is None:
                session.take_transfer(received, view.data[at : view.end])
                return
        elif isinstance(received, ReportedRange):
            session = self._by_peer_channel.get(view.channel)
            if session is not None and self._closing_at is None:
                session.take(received, view.end - view.begin)
                return
        elif at != view.end:
            raise AmqpError(f"{view.end - at} bytes follow {received.NAME} in its frame")
        self._take_performative(received, view)

    def _take_performative(
        self, received: Composite | ReadTransfer | ReadDisposition, view: FrameView
    ) -> None:
        size = view.end - view.begin
        if isinstance(received, OpenFrame | BeginFrame | AttachFrame):
            _check_kept(received, size)
        if self._closing_at is not None:
            if isinstance(received, CloseFrame):
                self._finish(received.error, is_peers=False)
            return
        if isinstance(received, OpenFrame):
            self._take_open(received)
        elif self.state is EndpointState.NEW or self.state is EndpointState.OPENING:
            raise AmqpError(f"{received.NAME} arrived before open", Condition.ILLEGAL_STATE)
        elif isinstance(received, CloseFrame):
            self._take_close(received)
        elif isinstance(received, BeginFrame):
            self._take_begin(received, view.channel)
        elif view.channel in self._by_peer_channel:
            self._by_peer_channel[view.channel].take(received, size)
        elif view.channel not in self._ended_channels:
            raise AmqpError(
                f"{received.NAME} arrived on the channel {view.channel}, which has no session",
                Condition.NOT_ALLOWED,
            )

    # -- open and close ------------------------------------------------------------------------

    def _say_open(self) -> None:
        options = self.options
        opening = OpenFrame(
            container_id=options.container_id,
            hostname=options.hostname,
            max_frame_size=options.max_frame_bytes,
            channel_max=options.max_sessions - 1,
            idle_time_out=options.idle_timeout_us // 1000 or None,
            offered_capabilities=options.offered_capabilities,
            desired_capabilities=options.desired_capabilities,
            properties=options.properties,
        )
        self.state = after(self.state, Saying.OUR_OPEN)
        self._queue(frame(0, opening.encode()))

    def _take_open(self, opening: OpenFrame) -> None:
        self.state = after(self.state, Saying.PEER_OPEN)
        self.peer = opening
        if opening.max_frame_size < MIN_AMQP_FRAME_BYTES:
            raise AmqpError(
                f"open has max-frame-size {opening.max_frame_size}; the minimum is "
                f"{MIN_AMQP_FRAME_BYTES}",
                Condition.INVALID_FIELD,
            )
        self.peer_frame_bytes = min(opening.max_frame_size, AMQP_WRITTEN_FRAME_BYTES)
        idle_us = (opening.idle_time_out or 0) * 1000
        if 0 < idle_us < MIN_AMQP_IDLE_US:
            raise AmqpError(
                f"open has idle-time-out {opening.idle_time_out} ms; the minimum is "
                f"{MIN_AMQP_IDLE_US // 1000} ms",
                Condition.INVALID_FIELD,
            )
        self._heartbeat_us = idle_us // 2
        if self.state is EndpointState.OFFERED:
            self._say_open()
        self._events.append(Opened(opening))
        waiting, self._unopened = self._unopened, []
        for channel, body in waiting:
            self.write_body(channel, body)

    def close(self, now: int, error: ErrorCondition | None = None) -> None:
        """Close the connection; ConnectionClosed follows when the peer has answered."""
        self._now = now
        if self._handshake is not None:
            self._finish(error, is_peers=False)
        elif self._closing_at is None:
            self._say_close(error)

    def _say_close(self, error: ErrorCondition | None) -> None:
        closing = CloseFrame(error=error).encode()  # may raise, so it comes before any change
        if self.state in {EndpointState.NEW, EndpointState.OFFERED}:
            self._say_open()
        for session in self.sessions:
            session.leave()
        self._unopened.clear()
        self._closing_at = self._now
        self.state = after(self.state, Saying.OUR_CLOSE)
        if error is not None and len(closing) + FRAME_HEAD_BYTES > self.peer_frame_bytes:
            closing = CloseFrame(error=ErrorCondition(condition=error.condition)).encode()
        self._queue(frame(0, closing))

    def _take_close(self, closing: CloseFrame) -> None:
        self.state = after(self.state, Saying.PEER_CLOSE)
        self._closing_at = self._now
        self.state = after(self.state, Saying.OUR_CLOSE)
        self._queue(frame(0, CloseFrame().encode()))
        self._finish(closing.error, is_peers=True)

    def _fail(self, error: AmqpError) -> None:
        """End the connection because the peer has violated a rule.

        What arrives before the peer's close is ignored. Closing the socket at once could lose our
        close frame.
        """
        if self._closing_at is not None or self._handshake is not None:
            self._finish(error_condition(error), is_peers=False)
            return
        condition = error_condition(error)
        self._say_close(condition)
        self._report(condition, is_peers=False)

    def lose(self) -> list[Event]:
        """Handle the loss of the connection."""
        self._finish(None, is_peers=False)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        return self.take_events()

    def _finish(self, error: ErrorCondition | None, *, is_peers: bool) -> None:
        self.is_done = True
        self._reader.clear()
        self._report(error, is_peers=is_peers)

    def _report(self, error: ErrorCondition | None, *, is_peers: bool) -> None:
        if self._is_reported:
            return
        self._is_reported = True
        for session in self.sessions:
            session.terminate(error)
        self._unflushed.clear()
        self._events.append(ConnectionClosed(error, is_peers))

    # -- sessions ------------------------------------------------------------------------------

    @property
    def sessions(self) -> Iterator[AmqpSession]:
        """The sessions that have not ended."""
        return iter(tuple(self._sessions.values()))

    def begin(self) -> AmqpSession:
        """Begin a session; SessionBegun follows. Links can be attached to it at once."""
        if self._closing_at is not None or self.is_done:
            raise InvalidOperationError("the connection is closed; open a new one")
        session = self._new_session()
        session.say_begin()
        return session

    def _new_session(self) -> AmqpSession:
        channel = 0
        while channel in self._sessions:
            channel += 1
        highest = self.options.max_sessions - 1
        if self.peer is not None:
            highest = min(highest, self.peer.channel_max)
        if channel > highest or len(self._sessions) >= self.bounds.max_sessions:
            raise InvalidOperationError(
                f"the connection has {len(self._sessions)} sessions, the maximum; end one first"
            )
        session = self._sessions[channel] = AmqpSession(self, channel)
        return session

    def _take_begin(self, beginning: BeginFrame, channel: int) -> None:
        if channel in self._by_peer_channel:
            raise AmqpError(
                f"begin arrived on the channel {channel}, which has a session already",
                Condition.NOT_ALLOWED,
            )
        if channel >= self.options.max_sessions:
            raise AmqpError(
                f"begin uses the channel {channel}; the maximum is {self.options.max_sessions - 1}",
                Condition.FRAMING_ERROR,
            )
        if beginning.remote_channel is None:
            try:
                session = self._new_session()
            except InvalidOperationError as error:
                raise AmqpError(error.text, Condition.RESOURCE_LIMIT_EXCEEDED) from error
        else:
            found = self._sessions.get(beginning.remote_channel)
            if found is None or found.peer is not None:
                raise AmqpError(
                    f"begin answers the channel {beginning.remote_channel}, on which no session "
                    "waits for an answer",
                    Condition.NOT_ALLOWED,
                )
            session = found
        self._by_peer_channel[channel] = session
        self._ended_channels.discard(channel)
        session.take_begin(beginning, channel)

    # -- called by sessions and links ----------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Report an event to the program."""
        self._events.append(event)

    def release(self, session: AmqpSession) -> None:
        """Free the channels of a session that has ended."""
        del self._sessions[session.channel]
        if session.peer_channel is not None:
            del self._by_peer_channel[session.peer_channel]
            self._ended_channels.add(session.peer_channel)

    def link_named(self, name: str, role: bool) -> AmqpLink | None:  # noqa: FBT001 - as on the wire
        """Return the link with this name at which we have this role."""
        return self._names.get((name, role))

    def take_name(self, link: AmqpLink) -> None:
        """Register the name of a link; raise if it is in use."""
        key = link.name, link.ROLE
        if key in self._names:
            raise InvalidOperationError(
                f"the connection has a link {link.name!r:.80} in this direction; use another name"
            )
        self._names[key] = link

    def free_name(self, link: AmqpLink) -> None:
        """Release the name of a link that ends."""
        key = link.name, link.ROLE
        if self._names.get(key) is link:
            del self._names[key]

    def add_partial_bytes(self, size: int) -> None:
        """Count bytes of incomplete deliveries."""
        if size > 0 and self._partial_bytes + size > self.bounds.max_partial_bytes:
            raise AmqpError(
                f"incomplete deliveries have more than {self.bounds.max_partial_bytes} bytes",
                Condition.RESOURCE_LIMIT_EXCEEDED,
                Scope.LINK,
            )
        self._partial_bytes += size

    def note_unflushed(self, session: AmqpSession) -> None:
        """Register a session that must write before the next bytes leave."""
        self._unflushed[session] = None

    # -- writing -------------------------------------------------------------------------------

    def write_body(self, channel: int, body: bytes) -> None:
        """Send an encoded frame, after the peer has opened the connection."""
        if self._closing_at is not None or self.is_done or self._misfit is not None:
            return
        if self.peer is None:
            self._unopened.append((channel, body))
            return
        size = len(body) + FRAME_HEAD_BYTES
        if size > self.peer_frame_bytes:
            self._misfit = AmqpError(
                f"a frame has {size} bytes; the peer accepts at most {self.peer_frame_bytes}",
                Condition.FRAME_SIZE_TOO_SMALL,
            )
            return
        self._queue(frame(channel, body))

    def write_buffers(self, head: bytes, payload: Buffer | list[Buffer], size: int) -> None:
        """Send a frame given in pieces."""
        if self._misfit is not None:
            return
        self._outgoing.append(head)
        if type(payload) is list:
            self._outgoing += payload
        else:
            self._outgoing.append(payload)  # type: ignore[arg-type]
        self._outgoing_bytes += size

    def _queue(self, data: bytes) -> None:
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)

    @property
    def has_outgoing(self) -> bool:
        """Whether there are bytes to write."""
        return bool(self._outgoing or self._unflushed or self._doom)

    @property
    def _doom(self) -> AmqpError | None:
        """The error with which the connection is closed when the next bytes leave."""
        return None if self.is_done or self._closing_at is not None else self._misfit

    @property
    def unread_bytes(self) -> int:
        """How many bytes the peer has not read: those queued here and those in the driver."""
        return self._outgoing_bytes + self.buffered_bytes

    def take_outgoing(self, now: int) -> list[Buffer]:
        """Return the bytes to write, in order; the driver then calls `note_buffered`."""
        self._now = now
        if self._unflushed:
            unflushed, self._unflushed = self._unflushed, {}
            for session in unflushed:
                session.flush()
        if self._doom is not None:
            self._fail(self._doom)
        if self._outgoing:
            self._sent_at = now
        taken, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        return taken

    def note_buffered(self, size: int) -> None:
        """Record how many bytes the driver has fetched and not yet written."""
        self.buffered_bytes = size

    # -- time ----------------------------------------------------------------------------------

    @property
    def next_event(self) -> int:
        """The time at which `tick` has something to do."""
        if self.is_done:
            return NEVER_US
        if self._closing_at is not None:
            return self._closing_at + AMQP_CLOSE_US
        if self.peer is None:
            return self._began_at + AMQP_OPEN_US
        due = NEVER_US
        if self.options.idle_timeout_us:
            due = self._silent_at
        if self._heartbeat_us:
            due = min(due, self._sent_at + self._heartbeat_us)
        return due

    @property
    def _silent_at(self) -> int:
        """When the peer has been silent for too long: twice the announced time, to be lenient."""
        return self._received_at + 2 * self.options.idle_timeout_us

    def tick(self, now: int) -> list[Event]:
        """Send heartbeats, and end the connection of a silent peer."""
        self._now = now
        if now < self.next_event:
            return self.take_events()
        if self._closing_at is not None:
            self._finish(None, is_peers=False)
        elif self.peer is None:
            self._give_up(f"open did not arrive within {AMQP_OPEN_US // SECOND_US} s")
        elif self.options.idle_timeout_us and now >= self._silent_at:
            self._give_up(
                f"nothing arrived for {(now - self._received_at) // SECOND_US} s; the "
                f"idle-time-out is {self.options.idle_timeout_us // SECOND_US} s. Send heartbeats"
            )
        else:
            self._sent_at = now
            if not self.unread_bytes:
                self._queue(HEARTBEAT)
        return self.take_events()

    def _give_up(self, text: str) -> None:
        self._fail(AmqpError(text, Condition.RESOURCE_LIMIT_EXCEEDED))


def _check_kept(received: OpenFrame | BeginFrame | AttachFrame, size: int) -> None:
    """Refuse a frame whose values, which are kept in memory, are too large or too many."""
    if size > MAX_AMQP_KEPT_FRAME_BYTES:
        raise AmqpError(
            f"{received.NAME} has {size} bytes; at most {MAX_AMQP_KEPT_FRAME_BYTES} are allowed",
            Condition.RESOURCE_LIMIT_EXCEEDED,
        )
    # Every value takes at least one byte.
    if size > MAX_AMQP_KEPT_VALUES and (count := count_values(received)) > MAX_AMQP_KEPT_VALUES:
        raise AmqpError(
            f"{received.NAME} has {count} values; at most {MAX_AMQP_KEPT_VALUES} are allowed",
            Condition.RESOURCE_LIMIT_EXCEEDED,
        )


def _decoded(view: FrameView) -> tuple[Composite, int]:
    """Return the performative of a frame, and the offset of its end."""
    try:
        received, at = read_composite(view.data, view.begin)
    except TruncatedError:
        at = view.end + 1
    if at > view.end:
        raise AmqpError("a frame ends in the middle of its performative")
    return received, at
