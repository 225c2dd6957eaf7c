"""Two ends of an AMQP connection on plain bytes, and a watch that checks every frame they send."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from twinbus.amqp.composites import Composite, read_composite
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.deliveries import distance
from twinbus.amqp.events import AttachRequested, Event
from twinbus.amqp.frames import AMQP_HEADER, AmqpFrameReader, FrameType, frame
from twinbus.amqp.options import ConnectionOptions, LinkOptions
from twinbus.amqp.performatives import (
    SENDER,
    AttachFrame,
    BeginFrame,
    DetachFrame,
    ErrorCondition,
    FlowFrame,
    OpenFrame,
    Source,
    Target,
    TransferFrame,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.session import AmqpSession

Kind = TypeVar("Kind")
WHY = ErrorCondition(condition="amqp:not-found", description="no such queue", info={})


def frames_of(data: bytes, *, has_header: bool = False) -> list[tuple[int, Composite, bytes]]:
    """Return the frames of some bytes: channel, performative and payload."""
    reader = AmqpFrameReader(2**32)
    reader.feed(data)
    if has_header:
        reader.take_header()
    found = []
    while (view := reader.take_frame()) is not None:
        if view.begin < view.end and view.type == FrameType.AMQP:
            received, at = read_composite(view.data, view.begin)
            found.append((view.channel, received, view.data[at : view.end]))
    return found


@dataclass
class Watch:
    """Checks that an end keeps to the windows and to the credit that it knows of.

    It has read nothing of the code under test but the decoder: it sees the frames that an end sends
    and those that have been delivered to it.
    """

    peer_frame_bytes: int = 512
    windows: dict[int, int] = field(default_factory=dict)  # by our channel: ids we may use
    offered_windows: dict[int, int] = field(default_factory=dict)  # by channel of the peer
    sent_ids: dict[int, int] = field(default_factory=dict)
    channels: dict[int, int] = field(default_factory=dict)  # of the peer: ours
    limits: dict[tuple[int, str], int] = field(default_factory=dict)  # deliveries we may count
    counts: dict[tuple[int, str], int] = field(default_factory=dict)
    names: dict[tuple[int, int], str] = field(default_factory=dict)  # of our senders, by handle
    peer_names: dict[tuple[int, int], str] = field(default_factory=dict)
    unfinished: set[tuple[int, int]] = field(default_factory=set)
    transfers: int = 0

    def sends(self, channel: int, sent: Composite, size: int) -> None:
        """Check a frame that the end sends."""
        assert size <= self.peer_frame_bytes or isinstance(sent, OpenFrame)
        if isinstance(sent, BeginFrame):
            self.sent_ids[channel] = sent.next_outgoing_id
            if sent.remote_channel is not None:
                self.channels[sent.remote_channel] = channel
                window = self.offered_windows[sent.remote_channel]
                self.windows[channel] = (sent.next_outgoing_id + window) % 2**32
        elif isinstance(sent, AttachFrame) and sent.role is SENDER:
            self.names[channel, sent.handle] = sent.name
            assert sent.initial_delivery_count is not None
            self.counts[channel, sent.name] = sent.initial_delivery_count
            self.limits.setdefault((channel, sent.name), sent.initial_delivery_count)
        elif isinstance(sent, DetachFrame):
            self.unfinished.discard((channel, sent.handle))
        elif isinstance(sent, FlowFrame) and (channel, sent.handle) in self.names:
            assert sent.handle is not None
            assert sent.delivery_count is not None
            self.counts[channel, self.names[channel, sent.handle]] = sent.delivery_count
        elif isinstance(sent, TransferFrame):
            self._sends_transfer(channel, sent)

    def _sends_transfer(self, channel: int, sent: TransferFrame) -> None:
        self.transfers += 1
        assert distance(self.windows[channel], self.sent_ids[channel]) > 0, "beyond the window"
        self.sent_ids[channel] = (self.sent_ids[channel] + 1) % 2**32
        link = channel, self.names[channel, sent.handle]
        if (channel, sent.handle) not in self.unfinished:
            assert distance(self.limits[link], self.counts[link]) > 0, "beyond the credit"
            self.counts[link] = (self.counts[link] + 1) % 2**32
        if sent.more and not sent.aborted:
            self.unfinished.add((channel, sent.handle))
        else:
            self.unfinished.discard((channel, sent.handle))

    def reads(self, channel: int, received: Composite) -> None:
        """Take note of a frame that has been delivered to the end."""
        if isinstance(received, OpenFrame):
            self.peer_frame_bytes = received.max_frame_size
        elif isinstance(received, BeginFrame):
            self.offered_windows[channel] = received.incoming_window
            own_channel = received.remote_channel
            if own_channel is not None:
                self.channels[channel] = own_channel
                self.windows[own_channel] = (
                    self.sent_ids[own_channel] + received.incoming_window
                ) % 2**32
        elif isinstance(received, AttachFrame):
            self.peer_names[channel, received.handle] = received.name
        elif isinstance(received, FlowFrame):
            own_channel = self.channels[channel]
            seen = received.next_incoming_id
            if seen is not None:
                self.windows[own_channel] = (seen + received.incoming_window) % 2**32
            name = self.peer_names.get(
                (channel, -1 if received.handle is None else received.handle)
            )
            if name is not None and received.link_credit is not None:
                counted = received.delivery_count or 0
                self.limits[own_channel, name] = (counted + received.link_credit) % 2**32


@dataclass
class End:
    """One end, with everything that it has reported."""

    connection: AmqpConnection
    events: list[Event] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
    to_read: bytearray = field(default_factory=bytearray)  # what travels to it
    reader: AmqpFrameReader = field(default_factory=lambda: AmqpFrameReader(2**32))
    has_header: bool = False

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def take(self, kind: type[Kind]) -> Kind:
        """Return the one event of a kind since the last time."""
        (found,) = self.of(kind)
        self.events.clear()
        return found


class Pair:
    """A client and a server with a wire between them, on a manual clock."""

    def __init__(
        self,
        server: dict[str, Any] | None = None,
        client: dict[str, Any] | None = None,
        on_server: Callable[[Event], None] | None = None,
    ) -> None:
        self.now = 0
        server_options = ConnectionOptions("server", **(server or {}))
        client_options = ConnectionOptions("client", hostname="here", **(client or {}))
        self.server = End(AmqpConnection(server_options, 0))
        self.client = End(AmqpConnection(client_options, 0, is_client=True))
        self.on_server = on_server or accepts_everything
        self.random = random.Random(0)
        self.pieces = 0  # bytes at most in one read; 0: everything at once

    def begin(self) -> AmqpSession:
        """Begin a session."""
        return self.client.connection.begin()

    def run(self) -> None:
        """Let bytes travel until nothing is left to say."""
        while self.write() | self.read(self.server) | self.read(self.client):
            pass

    def write(self) -> bool:
        """Put on the wire what the ends want to write; return whether it was something."""
        return self._write(self.client, self.server) | self._write(self.server, self.client)

    def _write(self, end: End, second: End) -> bool:
        data = b"".join(end.connection.take_outgoing(self.now))
        assert not end.connection.has_outgoing
        rest = data
        if data.startswith(AMQP_HEADER):
            rest = data[8:]
        for channel, sent, payload in frames_of(rest):
            end.watch.sends(channel, sent, len(sent.encode()) + len(payload) + 8)
        second.to_read += data
        return bool(data)

    def read(self, end: End) -> bool:
        """Deliver bytes of the wire to an end; return whether there were any."""
        if not end.to_read:
            return False
        # What it has said before it reads must be judged by what it knew then.
        self._write(end, self.client if end is self.server else self.server)
        size = self.random.randint(1, self.pieces) if self.pieces else len(end.to_read)
        data = bytes(end.to_read[:size])
        del end.to_read[:size]
        for channel, received in self._whole_frames(end, data):
            end.watch.reads(channel, received)
        events = end.connection.receive(data, self.now)
        end.events += events
        if end is self.server:
            for event in events:
                self.on_server(event)
        return True

    @staticmethod
    def _whole_frames(end: End, data: bytes) -> Iterator[tuple[int, Composite]]:
        end.reader.feed(data)
        if not end.has_header:
            if end.reader.take_header() is None:
                return
            end.has_header = True
        while (view := end.reader.take_frame()) is not None:
            if view.begin < view.end:
                yield view.channel, read_composite(view.data, view.begin)[0]


def accepts_everything(event: Event) -> None:
    """Accept every link, and give senders credit."""
    if isinstance(event, AttachRequested):
        event.link.accept()
        if isinstance(event.link, ReceiverLink):
            event.link.grant(100)


def sender_options(**changes: Any) -> LinkOptions:
    """Return the options of a link that a client sends on."""
    return LinkOptions(source=Source(address="here"), target=Target(address="orders"), **changes)


receiver_options = sender_options


def linked_sender(pair: Pair, **options: Any) -> tuple[SenderLink, ReceiverLink]:
    """Attach a link that the client sends on; return both ends of it."""
    link = pair.begin().attach_sender("to-orders", sender_options(**options))
    pair.run()
    second = pair.server.of(AttachRequested)[-1].link
    assert isinstance(second, ReceiverLink)
    return link, second


def linked_receiver(pair: Pair, **options: Any) -> tuple[ReceiverLink, SenderLink]:
    """Attach a link that the client receives on; return both ends of it."""
    link = pair.begin().attach_receiver("from-orders", receiver_options(**options))
    pair.run()
    second = pair.server.of(AttachRequested)[-1].link
    assert isinstance(second, SenderLink)
    return link, second


class RawPeer:
    """A peer that sends whatever frames a test wants, to a server or to a client."""

    def __init__(self, *, is_client: bool = False, accepts: bool = True, **options: Any) -> None:
        self._accepts = accepts
        made = ConnectionOptions("under-test", **options)
        self.connection = AmqpConnection(made, 0, is_client=is_client)
        self.events: list[Event] = []
        self.connection.take_outgoing(0)
        self.send_bytes(AMQP_HEADER)

    def send_bytes(self, data: bytes, now: int = 0) -> None:
        """Send bytes."""
        events = self.connection.receive(data, now)
        self.events += events
        for event in events:
            if self._accepts:
                accepts_everything(event)

    def send(self, *sent: Composite, channel: int = 0, payload: bytes = b"") -> None:
        """Send frames."""
        for message in sent:
            self.send_bytes(frame(channel, message.encode() + payload))

    def answers(self) -> list[Composite]:
        """Return the performatives that came back, but for the header."""
        data = b"".join(self.connection.take_outgoing(0))
        if data.startswith(AMQP_HEADER):
            data = data[8:]
        return [received for _, received, _ in frames_of(data)]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


OPEN = OpenFrame(container_id="peer")
BEGIN = BeginFrame(next_outgoing_id=0, incoming_window=100, outgoing_window=100)


def attach(name: str = "link", handle: int = 0, **changes: Any) -> AttachFrame:
    """Return the attach of a peer that sends, unless `role` says otherwise."""
    fields: dict[str, Any] = {
        "role": SENDER,
        "source": Source(address="here"),
        "target": Target(address="orders"),
        "initial_delivery_count": 0,
    }
    return AttachFrame(name=name, handle=handle, **(fields | changes))


def transfer(delivery_id: int | None = 0, **changes: Any) -> TransferFrame:
    """Return a transfer on the handle 0."""
    fields: dict[str, Any] = {"handle": 0, "delivery_tag": b"t", "message_format": 0}
    return TransferFrame(delivery_id=delivery_id, **(fields | changes))


def flow(seen: int, *, window: int, credit: int, **changes: Any) -> FlowFrame:
    """Return a flow of a receiver on the handle 0."""
    fields: dict[str, Any] = {"handle": 0, "delivery_count": 0, "link_credit": credit}
    return FlowFrame(
        next_incoming_id=seen,
        incoming_window=window,
        next_outgoing_id=0,
        outgoing_window=9,
        **(fields | changes),
    )
