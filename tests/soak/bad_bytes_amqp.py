"""Attacks on a server's door for SDKs of Service Bus: frames of AMQP that no SDK would send."""

import contextlib
import struct

from tests.scenarios.service_bus_site import SocketPeer, encoded
from tests.soak.bad_bytes_tools import LARGE, POISON, QUEUE, Exchange, Target
from twinbus.amqp.composites import Composite
from twinbus.amqp.events import Attached, ConnectionClosed, LinkDetached, SessionEnded
from twinbus.amqp.frames import AMQP_HEADER, SASL_HEADER, FrameType, frame
from twinbus.amqp.message import SectionKind, encode_message
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import (
    RECEIVER,
    SENDER,
    AttachFrame,
    BeginFrame,
    DetachFrame,
    DispositionFrame,
    EndFrame,
    FlowFrame,
    Modified,
    OpenFrame,
    SaslInit,
    Source,
    TransferFrame,
)
from twinbus.amqp.performatives import Target as Terminus
from twinbus.amqp.types import Int, Symbol
from twinbus.servicebus.messages import BATCH_FORMAT

# During an attack: a key may keep 128 MB, and free memory is returned later.
MOST_GROWTH_KB = 320 * 1024
STRANGERS, SESSIONS = 20, 30
PAIRS, REQUESTS = 30, 12  # of links to a node, and requests on each; none of the answers is read
FLOODS, FRAMES = 20, 200  # of each kind
MANAGEMENT = f"{LARGE}/$management"
PEEK = {"operation": "com.microsoft:peek-message"}
LIMIT = "amqp:resource-limit-exceeded"


def client(target: Target, key: str, path: str) -> SocketPeer:
    """Return a client with a key of few claims."""
    peer = SocketPeer(target.connection.port)
    status = peer.show(f"sb://localhost/{path}", target.tokens[key])
    if status != 202:
        target.find(f"the token of {key} got {status}")
    return peer


def flow(**fields: int | bool) -> FlowFrame:
    windows = {"next_incoming_id": 0, "incoming_window": 1000, "next_outgoing_id": 9}
    return FlowFrame(**{**windows, "outgoing_window": 9, **fields})  # type: ignore[arg-type]


def grown_kb(target: Target, before: int) -> int:
    return target.server.footprint().memory_kb - before


def values_of_strangers(target: Target) -> None:
    """Have the server decode and keep as many values as fit, without a token."""
    nothing: list[None] = []
    many = {Symbol("a"): [nothing] * 15_000}
    windows = {"next_outgoing_id": 0, "incoming_window": 9, "outgoing_window": 9}
    begin = BeginFrame(**windows, properties=many).encode()  # type: ignore[arg-type]
    text = b"".join(
        (
            SASL_HEADER,
            frame(0, SaslInit(mechanism="ANONYMOUS").encode(), FrameType.SASL),
            AMQP_HEADER,
            frame(0, OpenFrame(container_id="a stranger").encode()),
            *(frame(channel, begin) for channel in range(SESSIONS)),
        )
    )
    before = target.server.footprint().memory_kb
    strangers = [Exchange(target.connection.port, "", greeting=text) for _ in range(STRANGERS)]
    for stranger in strangers:
        found = b""
        with contextlib.suppress(OSError):
            while LIMIT.encode() not in found and (data := stranger.line.recv(65536)):
                found += data
        if LIMIT.encode() not in found:
            target.find("a stranger kept thousands of values")
    if grown_kb(target, before) > MOST_GROWTH_KB:
        target.find("the values of strangers filled the memory")
    for stranger in strangers:
        stranger.cancel()


def answers_that_nobody_takes(target: Target) -> None:
    """Ask for large answers on many links, and give none of them credit."""
    before = target.server.footprint().memory_kb
    peer = client(target, "listener", LARGE)
    for number in range(PAIRS):
        session = peer.session if number == 0 else peer.amqp.begin()
        to_client = LinkOptions(
            source=Source(address=MANAGEMENT), target=Terminus(), max_message_bytes=0
        )
        to_server = LinkOptions(source=Source(), target=Terminus(address=MANAGEMENT))
        session.attach_receiver(f"from {number}", to_client)
        sender = session.attach_sender(f"to {number}", to_server)
        peer.wait_for(Attached, lambda event, link=sender: event.link is link)  # type: ignore[misc]
        for _ in range(REQUESTS):
            peer.ask(sender, PEEK, {"from-sequence-number": 0, "message-count": Int(100)})
    error = peer.wait_for(LinkDetached).error
    if error is None or error.condition != LIMIT:
        target.find(f"a link with many answers ended with {error}")
    if grown_kb(target, before) > MOST_GROWTH_KB:
        target.find("answers that nobody takes filled the memory")
    peer.socket.close()


def floods_of_small_frames(target: Target) -> None:
    """Send what costs the server much and the client little; the session survives it."""
    peer = client(target, "listener", POISON)
    link = peer.receiver(POISON)
    attach = AttachFrame(
        name="x", handle=9, role=RECEIVER, source=Source(address=POISON), target=Terminus()
    )
    begin = BeginFrame(next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    other = peer.session.channel + 7
    floods = {
        "echoes": frames(peer, flow(echo=True)),
        "credits": frames(
            peer,
            flow(handle=link.handle, delivery_count=0, link_credit=9),
            flow(handle=link.handle, delivery_count=0, link_credit=1),
        ),
        "links": frames(peer, attach, DetachFrame(handle=9, closed=True)),
        "sessions": frame(other, begin.encode()) + frame(other, EndFrame().encode()),
        "ranges": frames(
            peer,
            *(
                DispositionFrame(role=role, first=0, last=2**31 - 1, state=Modified(), settled=True)
                for role in (SENDER, RECEIVER)
            ),
        ),
    }
    for name, text in floods.items():
        for _ in range(FLOODS):
            peer.socket.sendall(text * FRAMES)
            peer.socket.sendall(frames(peer, flow(echo=True)))
            if not peer.socket.recv(262_144):
                target.find(f"a flood of {name} ended the connection")
                return
    peer.socket.close()


def frames(peer: SocketPeer, *sent: Composite) -> bytes:
    return b"".join(frame(peer.session.channel, composite.encode()) for composite in sent)


def batches_of_nothing(target: Target) -> None:
    """Send batches of so many empty messages that reading them takes long."""
    peer = client(target, "sender", POISON)
    link = peer.sender(POISON)
    payload = encode_message({SectionKind.DATA: (b"",) * 9_999})
    for number in range(4):
        while not link.may_send:
            peer.write()
            peer.read()
        link.send(payload, tag=struct.pack(">I", number), message_format=BATCH_FORMAT)
    if peer.send(link, encoded(b"after them")) is None:
        target.find("a send after batches of nothing got no outcome")
    peer.socket.close()


def endless_deliveries(target: Target) -> None:
    """Begin deliveries on many links and never end them, with states and without."""
    peer = client(target, "sender", POISON)
    link = peer.sender(POISON)
    head = TransferFrame(
        handle=link.handle, delivery_id=9, delivery_tag=b"t", message_format=0, more=True
    )
    more = TransferFrame(handle=link.handle, more=True)
    peer.socket.sendall(frames(peer, head, *[more] * 500))
    large = Modified(message_annotations={Symbol("a"): [[] for _ in range(9_000)]})
    peer.socket.sendall(frames(peer, TransferFrame(handle=link.handle, more=True, state=large)))
    if (error := peer.wait_for(ConnectionClosed).error) is None or error.condition != LIMIT:
        target.find(f"a long delivery state ended the connection with {error}")
    peer.socket.close()


def frames_for_nothing(target: Target) -> None:
    """Use handles that are not attached: the session ends, and says why."""
    for wrong in (
        DetachFrame(handle=99),
        flow(handle=99),
        TransferFrame(handle=99, delivery_id=9, delivery_tag=b"t"),
        DispositionFrame(role=RECEIVER, first=9, last=1, settled=True),
        flow(next_incoming_id=2**31 - 1),
    ):
        peer = client(target, "listener", QUEUE)
        peer.socket.sendall(frames(peer, wrong))
        if peer.wait_for(SessionEnded).error is None:
            target.find(f"{wrong.NAME} for nothing ended the session without an error")
        peer.socket.close()


ATTACKS = (
    values_of_strangers,
    answers_that_nobody_takes,
    floods_of_small_frames,
    batches_of_nothing,
    endless_deliveries,
    frames_for_nothing,
)
