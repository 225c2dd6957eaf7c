"""What a client of the Service Bus door may use of the server's memory before it shows a token."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.scenarios.service_bus_wire import QUEUE, Wire, WirePeer
from twinbus.amqp.events import Attached, OutcomeReported, SessionEnded
from twinbus.amqp.frames import frame
from twinbus.amqp.message import SectionKind, encode_message
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import (
    Accepted,
    Properties,
    Rejected,
    Source,
    Target,
    TransferFrame,
)
from twinbus.amqp.sender_link import SenderLink
from twinbus.limits import (
    MAX_TOKEN_ANSWERS,
    MAX_TOKEN_MESSAGE_BYTES,
    MIN_AMQP_FRAME_BYTES,
    STRANGER_AMQP_BYTES,
    STRANGER_AMQP_LINKS,
    STRANGER_AMQP_SESSIONS,
)

pytestmark = pytest.mark.timeout(60)
CBS = LinkOptions(source=Source(), target=Target(address="$cbs"))


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(tmp_path, stack)


def cbs(peer: WirePeer, name: str) -> SenderLink:
    link = peer.session.attach_sender(name, CBS)
    peer.wait_for(Attached, lambda event: event.link is link)
    return link


def send_half(wire: Wire, peer: WirePeer, link: SenderLink, number: int, size: int) -> None:
    """Send the beginning of a delivery, in frames that the server accepts."""
    for at in range(0, size, 32_000):
        half = TransferFrame(
            handle=link.handle, delivery_id=number, delivery_tag=b"t", message_format=0, more=True
        )
        part = bytes(min(32_000, size - at))
        wire.sendall(frame(peer.session.channel, half.encode() + part))


def test_unfinished_deliveries_of_a_stranger_are_few_bytes(wire: Wire) -> None:
    peer = WirePeer(wire)
    for number, link in enumerate([cbs(peer, f"link {number}") for number in range(8)]):
        send_half(wire, peer, link, number, MAX_TOKEN_MESSAGE_BYTES)
    assert wire.conversation.amqp.incomplete_bytes <= STRANGER_AMQP_BYTES


def test_a_message_to_cbs_is_small(wire: Wire) -> None:
    peer = WirePeer(wire)
    link = cbs(peer, "link")
    assert peer.session.peer is not None
    while not link.may_send:
        peer.read()
    assert link.max_message_bytes == MAX_TOKEN_MESSAGE_BYTES
    link.max_message_bytes = 0  # the client ignores it
    link.send(bytes(MAX_TOKEN_MESSAGE_BYTES + 1), tag=b"t", is_settled=False)
    outcome = peer.wait_for(OutcomeReported).state
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:link:message-size-exceeded"


def test_a_stranger_has_few_links(wire: Wire) -> None:
    peer = WirePeer(wire)
    for number in range(STRANGER_AMQP_LINKS):
        cbs(peer, f"link {number}")
    peer.session.attach_sender("one more", CBS)
    ended = peer.wait_for(SessionEnded).error
    assert ended is not None
    assert ended.condition == "amqp:resource-limit-exceeded"


def test_a_client_with_a_token_has_many_links_and_large_messages(wire: Wire) -> None:
    client = WirePeer(wire)
    assert client.show_token("", name="root") == 202
    for number in range(2 * STRANGER_AMQP_LINKS):
        cbs(client, f"link {number}")
    size = STRANGER_AMQP_BYTES + 1000
    assert isinstance(client.send(client.sender(QUEUE), bytes(size)), Accepted)


def test_a_stranger_has_few_sessions(wire: Wire) -> None:
    peer = WirePeer(wire)
    for _ in range(STRANGER_AMQP_SESSIONS):
        peer.amqp.begin()
    peer.write()
    peer.read()
    assert peer.closed().condition == "amqp:resource-limit-exceeded"


def test_answers_that_a_stranger_does_not_take_are_few(wire: Wire) -> None:
    peer = WirePeer(wire)
    sender, receiver = peer.node("$cbs")
    for _ in range(MAX_TOKEN_ANSWERS + 1):
        peer.ask(sender, {"operation": "put-token"}, "no token")
    assert peer.detached(receiver).condition == "amqp:resource-limit-exceeded"


def test_the_server_stops_reading_from_a_stranger_that_does_not_read(wire: Wire) -> None:
    peer = WirePeer(wire)
    sender, receiver = peer.node("$cbs")
    receiver.grant(1_000_000)
    sender.credit = 1_000_000  # so that it need not read
    while wire.conversation.may_read:
        peer.ask(sender, {"operation": "put-token"}, "no token")
        peer.write()
        unread = wire.conversation.amqp.unread_bytes
        assert unread <= STRANGER_AMQP_BYTES + 4 * MIN_AMQP_FRAME_BYTES


def test_a_request_with_an_endless_id_is_rejected(wire: Wire) -> None:
    peer = WirePeer(wire)
    sender, _ = peer.node("$cbs")
    while not sender.may_send:
        peer.read()
    sections = {
        SectionKind.PROPERTIES: Properties(message_id="x" * 10_000),
        SectionKind.APPLICATION_PROPERTIES: {"operation": "put-token"},
        SectionKind.VALUE: "a token",
    }
    sender.send(encode_message(sections), tag=b"1", is_settled=False)
    assert isinstance(peer.wait_for(OutcomeReported).state, Rejected)
