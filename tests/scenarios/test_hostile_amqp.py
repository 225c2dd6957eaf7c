"""One client cannot harm another (G11): what a bad peer does at the Service Bus door."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.service_bus_site import OTHER, QUEUE, ServiceBusSite, SocketPeer
from twinbus.amqp.events import Attached, LinkDetached
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import Source, Target
from twinbus.errors import MessageSizeExceededError
from twinbus.limits import MAX_UNREAD_BYTES, SERVICE_BUS_FETCH_BYTES
from twinbus.message import BrokeredMessage, to_batch
from twinbus.protocol.commands import Receive, Send

pytestmark = pytest.mark.timeout(60)
LARGE = 200_000
PEEK = {"operation": "com.microsoft:peek-message"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ServiceBusSite]:
    with ExitStack() as stack:
        yield ServiceBusSite.open(tmp_path, stack)


def fill(site: ServiceBusSite, count: int) -> None:
    for _ in range(count):
        site.namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE)) for _ in range(10)]))


def settled(read: Callable[[], int]) -> int:
    """Return a figure that has stopped to change."""
    before = -1
    while (now := read()) != before:
        before = now
        time.sleep(0.2)
    return now


@pytest.mark.parametrize("address", [QUEUE, f"{QUEUE}/$management"])
def test_without_a_token_no_link_is_accepted(site: ServiceBusSite, address: str) -> None:
    with SocketPeer(site.door.port) as peer:
        peer.session.attach_receiver("link", LinkOptions(source=Source(address=address)))
        error = peer.wait_for(LinkDetached).error
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert site.door.connections == 0


def test_a_forged_token_is_refused(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE, "not the secret") == 401


def test_a_token_of_one_queue_opens_no_other(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        peer.session.attach_sender("link", LinkOptions(target=Target(address=OTHER)))
        error = peer.wait_for(LinkDetached).error
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"


def test_a_client_that_does_not_read_gets_no_more_than_a_bound(site: ServiceBusSite) -> None:
    fill(site, 30)
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.session.attach_receiver("greedy", LinkOptions(source=Source(address=QUEUE)))
        peer.wait_for(Attached, lambda event: event.link is link)
        link.grant(1_000_000)
        peer.write()  # and reads nothing more
        amqp = site.connection.conversation.amqp
        assert settled(lambda: amqp.unread_bytes) <= 2 * SERVICE_BUS_FETCH_BYTES
        with closing(SocketPeer(site.door.port)._socket):
            site.namespace.ask(Send(OTHER, [BrokeredMessage(b"goes on")]))
        assert site.namespace.ask(Receive(OTHER)).num_rows == 1


def test_a_client_that_asks_and_takes_no_answer_loses_its_link(site: ServiceBusSite) -> None:
    fill(site, 2)
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        sender, receiver = peer.node(f"{QUEUE}/$management")
        for _ in range(2 * MAX_UNREAD_BYTES // SERVICE_BUS_FETCH_BYTES):
            peer.ask(sender, PEEK, {"from-sequence-number": 0, "message-count": 100})
        ended = peer.wait_for(LinkDetached, lambda event: event.link is receiver)
        assert ended.error is not None
        assert ended.error.condition == "amqp:resource-limit-exceeded"


@pytest.mark.parametrize("convert", [list, to_batch], ids=["objects", "columns"])
def test_sections_hide_nothing_from_the_size_limit(
    site: ServiceBusSite, convert: Callable[[list[BrokeredMessage]], Any]
) -> None:
    large = {f"p{number}": "x" * LARGE for number in range(10)}
    message = BrokeredMessage(b"", application_properties=large, amqp=b"x")
    with pytest.raises(MessageSizeExceededError):
        site.namespace.ask(Send(QUEUE, convert([message])))
