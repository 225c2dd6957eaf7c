"""One client cannot harm another (G11): what a bad peer does at the Service Bus door."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.inside import management_nodes
from tests.scenarios.service_bus_site import (
    OTHER,
    QUEUE,
    SECRET,
    Reply,
    ServiceBusSite,
    SocketPeer,
    encoded,
    key,
)
from tests.waiting import settled, until
from twinbus import MessagingFactory
from twinbus.amqp.events import (
    Attached,
    ConnectionClosed,
    Delivery,
    LinkDetached,
    OutcomeReported,
)
from twinbus.amqp.frames import HEARTBEAT
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_message, encode_section
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import Accepted, Rejected, SenderSettleMode, Source, Target
from twinbus.amqp.types import Array, Int, UInt
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString, sign_token
from twinbus.entities import QueueDescription
from twinbus.errors import InvalidArgumentError, MessageSizeExceededError, MessagingError
from twinbus.limits import (
    AMQP_MESSAGE_BYTES,
    CHECKED_SECTION_BYTES,
    MAX_AMQP_ITEMS,
    MAX_AMQP_LINKS,
    MAX_AMQP_SESSION_LINKS,
    MAX_UNREAD_BYTES,
    READ_STEP_MESSAGES,
    SERVICE_BUS_FETCH_BYTES,
)
from twinbus.message import BrokeredMessage, MessageState, to_batch, to_messages, tokens_of
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import (
    AcceptSession,
    CreateEntity,
    DeleteKey,
    Disposition,
    GetRuntimeProperties,
    GetSessionState,
    Peek,
    PutKey,
    Receive,
    ReceiveDeferred,
    Send,
    SetSessionState,
    Settle,
)
from twinbus.protocol.keys import Claim
from twinbus.protocol.requests import Request
from twinbus.protocol.table import largest_reply
from twinbus.server import door, native, pacing
from twinbus.servicebus import sending
from twinbus.servicebus.messages import BATCH_FORMAT, STORED_HEAD, fingerprint
from twinbus.servicebus.short_messages import read_messages

pytestmark = pytest.mark.timeout(60)
LARGE = 200_000
PEEK = {"operation": "com.microsoft:peek-message"}
SINGLE_PEEK = {"from-sequence-number": 0, "message-count": Int(1)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ServiceBusSite]:
    with ExitStack() as stack:
        yield ServiceBusSite.open(tmp_path, stack)


def fill(site: ServiceBusSite, count: int) -> None:
    for _ in range(count):
        site.namespace.ask(Send(QUEUE, [BrokeredMessage(bytes(LARGE)) for _ in range(10)]))


@pytest.mark.parametrize("address", [QUEUE, f"{QUEUE}/$management"])
def test_without_a_token_no_link_is_accepted(site: ServiceBusSite, address: str) -> None:
    with SocketPeer(site.door.port) as peer:
        peer.session.attach_receiver("link", LinkOptions(source=Source(address=address)))
        error = peer.wait_for(LinkDetached).error
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert site.door.connections == 0


def good_token(path: str = QUEUE, name: str = "app") -> str:
    return sign_token(f"sb://localhost/{path}", name, SECRET, int(time.time()) + 600)


FORGED = {
    "another secret": sign_token(f"sb://localhost/{QUEUE}", "app", "no secret", 2_000_000_000),
    "a later expiry": good_token().replace("se=", "se=9"),
    "another queue": good_token().replace(QUEUE, OTHER),
    "another key": good_token().replace("skn=app", "skn=nobody"),
    "no signature": good_token().replace("sig=", "gis="),
    "a cut signature": good_token().replace("%3D&", "&"),
    "a token of Entra": "eyJhbGciOiJub25lIn0.e30.",
    "nothing": "",
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_token_is_refused(site: ServiceBusSite, how: str) -> None:
    with SocketPeer(site.door.port) as peer:
        for path in (QUEUE, OTHER, ""):
            assert peer.show(f"sb://localhost/{path}", FORGED[how]) == 401
        link = peer.session.attach_receiver("link", LinkOptions(source=Source(address=QUEUE)))
        assert peer.detached(link).condition == "amqp:unauthorized-access"
        assert site.door.connections == 0


def test_a_token_is_good_for_what_it_names_and_no_more(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        of_root = good_token(QUEUE, "root")  # whose key may do everything
        for path in (OTHER, "", f"{QUEUE}-2", f"{OTHER}/$management"):
            assert peer.show(f"sb://localhost/{path}", of_root) == 401
        for path in (QUEUE, f"{QUEUE}/$management", f"{QUEUE}/$DeadLetterQueue"):
            assert peer.show(f"sb://localhost/{path}", of_root) == 202
        link = peer.session.attach_sender("link", LinkOptions(target=Target(address=OTHER)))
        assert peer.detached(link).condition == "amqp:unauthorized-access"


def test_an_expired_token_ends_links_and_refuses_operations(tmp_path: Path) -> None:
    clock = ManualClock(datetime.now(UTC))
    with ExitStack() as stack:
        site = ServiceBusSite.open(tmp_path, stack, clock)
        peer = stack.enter_context(SocketPeer(site.door.port))
        assert peer.show_token(QUEUE, seconds=-1) == 401
        assert peer.show_token(QUEUE, seconds=600) == 202
        sender, receiver = peer.sender(QUEUE), peer.receiver(QUEUE)
        receiver.grant(1)
        assert peer.manage(QUEUE, "peek-message", SINGLE_PEEK).status == 204
        clock.advance(timedelta(seconds=601))
        reply = peer.manage(QUEUE, "peek-message", SINGLE_PEEK)
        assert (reply.status, reply.condition) == (401, "amqp:unauthorized-access")
        refused = peer.detached(receiver), peer.detached(sender)
        assert {item.condition for item in refused} == {"amqp:unauthorized-access"}
        assert site.namespace.snapshot().open_receives == 0
        token = sign_token(
            f"sb://localhost/{QUEUE}", "app", SECRET, int(clock.now().timestamp()) + 600
        )
        assert peer.show(f"sb://localhost/{QUEUE}", token) == 202  # and the client goes on
        assert peer.manage(QUEUE, "peek-message", SINGLE_PEEK).status == 204


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
        with closing(SocketPeer(site.door.port).socket):
            site.namespace.ask(Send(OTHER, [BrokeredMessage(b"goes on")]))
        assert site.namespace.ask(Receive(OTHER)).num_rows == 1


def test_a_client_that_asks_and_takes_no_answer_loses_its_link(site: ServiceBusSite) -> None:
    fill(site, 2)
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        sender, receiver = peer.node(f"{QUEUE}/$management")
        for _ in range(3 * MAX_UNREAD_BYTES // AMQP_MESSAGE_BYTES):
            peer.ask(sender, PEEK, {"from-sequence-number": 0, "message-count": 100})
        ended = peer.wait_for(LinkDetached, lambda event: event.link is receiver)
        assert ended.error is not None
        assert ended.error.condition == "amqp:resource-limit-exceeded"


# -- what a client can make grow -------------------------------------------------------------------


class Watcher:
    """Measures what the requests that arrive together may bring."""

    def __init__(self) -> None:
        self.most = 0  # bytes of replies, of one turn
        self.requests = 0

    def arrived(self, requests: Iterable[Request]) -> list[Request]:
        found = list(requests)
        fetches = [item.command for item in found if isinstance(item.command, Peek | Receive)]
        self.most = max(self.most, sum(map(largest_reply, fetches)))
        self.requests += len(fetches)
        return found

    def attaching(self, path: str) -> None:
        """Let it."""


def test_a_flood_of_peeks_brings_a_bounded_number_of_bytes_at_once(site: ServiceBusSite) -> None:
    fill(site, 5)
    site.door.turns.interceptor = watcher = Watcher()
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        sender, receiver = peer.node(f"{QUEUE}/$management")
        receiver.grant(1_000_000)
        for _ in range(60):
            peer.ask(sender, PEEK, {"from-sequence-number": 0, "message-count": 100})
        peer.write()  # and reads nothing for a while
        amqp = site.connection.conversation.amqp
        unread = settled(lambda: amqp.unread_bytes)
        assert unread <= MAX_UNREAD_BYTES + AMQP_MESSAGE_BYTES
        for _ in range(60):
            peer.wait_for(Delivery, lambda event: event.link is receiver)
    assert watcher.requests == 60
    assert watcher.most <= MAX_UNREAD_BYTES


def test_operations_that_wait_for_room_are_refused_when_their_key_was_deleted(
    site: ServiceBusSite,
) -> None:
    fill(site, 5)
    site.namespace.ask(PutKey(key("short", Claim.LISTEN, path=QUEUE)))
    site.door.turns.interceptor = watcher = Watcher()
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE, name="short") == 202
        sender, receiver = peer.node(f"{QUEUE}/$management")
        receiver.grant(1_000_000)
        for _ in range(60):
            peer.ask(sender, PEEK, {"from-sequence-number": 0, "message-count": 100})
        peer.write()  # and reads nothing for a while
        settled(lambda: watcher.requests)
        site.namespace.ask(DeleteKey("short", QUEUE))
        done = watcher.requests
        answers = [AmqpMessage(item.payload) for item in peer.take(receiver, 60)]
    statuses = [(answer.application_properties or {})["statusCode"] for answer in answers]
    assert sorted(statuses) == [200] * done + [401] * (60 - done)  # refusals are quicker
    assert watcher.requests == done < 60


def test_many_receivers_share_a_bound(site: ServiceBusSite) -> None:
    site.door.turns.interceptor = watcher = Watcher()
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        for number in range(200):
            peer.receiver(QUEUE, f"link {number}").grant(1000)
        peer.manage(QUEUE, "peek-message", SINGLE_PEEK)
    assert watcher.requests == 201
    assert watcher.most <= 8 * MAX_UNREAD_BYTES  # one after the other: a harmonic sum


def test_tokens_for_many_entities_are_bounded(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        everything = good_token("", "root")
        statuses = [
            peer.show(f"sb://localhost/queue-{number}", everything)
            for number in range(MAX_AMQP_LINKS + 2)
        ]
        assert statuses == [202] * MAX_AMQP_LINKS + [403] * 2
        assert peer.show(f"sb://localhost/{'x' * 10_000}", everything) == 400
        assert peer.show("sb://localhost/queue-7", everything) == 202


def test_nodes_that_come_and_go_leave_nothing_behind(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token("", name="root") == 202
        for number in range(50):
            for link in peer.node(f"nothing-{number}/$management"):
                link.detach()
                peer.wait_for(LinkDetached, lambda event, link=link: event.link is link)  # type: ignore[misc]
        assert not management_nodes(site.connection.conversation)


def test_a_flood_of_attaches_ends_its_own_connection_alone(site: ServiceBusSite) -> None:
    with SocketPeer(site.door.port) as second, SocketPeer(site.door.port) as flood:
        for peer in (second, flood):
            assert peer.show_token(QUEUE) == 202
        sender = second.sender(QUEUE)
        assert flood.session.peer is not None
        ignored = replace(flood.session.peer, handle_max=2**32 - 1)  # how many links there may be
        flood.session.peer = ignored
        for number in range(MAX_AMQP_SESSION_LINKS + 1):
            options = LinkOptions(source=Source(address=QUEUE))
            flood.session.attach_receiver(f"link {number}", options)
        assert flood.wait_for(ConnectionClosed).error is not None
        assert isinstance(second.send(sender, b"goes on"), Accepted)


def test_a_flood_of_small_frames_lets_other_clients_in_between(
    site: ServiceBusSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "READ_SLICE_S", 1e-9)  # the first piece takes all of its time
    monkeypatch.setattr(pacing, "READ_PIECE_BYTES", 800)
    order: list[str] = []
    with SocketPeer(site.door.port) as flood:
        assert flood.show_token(QUEUE) == 202
        connection = site.connection
        receive = connection.conversation.receive

        def note(data: bytes, now: int) -> None:
            if not order:
                asyncio.get_running_loop().call_soon(order.append, "another client")
            order.append("flood")
            receive(data, now)

        monkeypatch.setattr(connection.conversation, "receive", note)
        flood.socket.sendall(HEARTBEAT * 400)
        until(lambda: len(order) == 5)
        assert order == ["flood", "another client", *["flood"] * 3]
        assert flood.manage(QUEUE, "peek-message", SINGLE_PEEK).status == 204


def test_a_large_batch_is_read_in_steps_and_later_sends_keep_their_order(
    site: ServiceBusSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "READ_SLICE_S", 1e-9)  # the first step takes all of its time
    order: list[str] = []

    def note(messages: Any) -> Any:
        if not order:
            asyncio.get_running_loop().call_soon(order.append, "another client")
        order.append(f"{len(messages)} messages")
        return read_messages(messages)

    monkeypatch.setattr(sending, "read_messages", note)
    with SocketPeer(site.door.port) as flood:
        assert flood.show_token(QUEUE) == 202
        link = flood.sender(QUEUE)
        while not link.may_send:
            flood.read()
        batch = tuple([encoded(b"first")] * (2 * READ_STEP_MESSAGES + 1))
        payload = encode_message({SectionKind.DATA: batch})
        link.send(payload, tag=b"1", message_format=BATCH_FORMAT, is_settled=False)
        link.send(encoded(b"last"), tag=b"2", is_settled=False)
        settled_numbers = 0
        while settled_numbers < 2:
            outcome = flood.wait_for(OutcomeReported)
            assert isinstance(outcome.state, Accepted)
            settled_numbers += len(outcome.deliveries)
    step = f"{READ_STEP_MESSAGES} messages"
    assert order == [step, "another client", step, "1 messages", "1 messages"]
    bodies = site.namespace.ask(Peek(QUEUE, 0, 1000)).column("body").to_pylist()
    assert bodies == [b"first"] * len(batch) + [b"last"]


def test_a_batch_whose_last_message_cannot_be_read_is_rejected_whole(site: ServiceBusSite) -> None:
    batch = [encoded(b"good")] * (2 * READ_STEP_MESSAGES)
    payload = encode_message({SectionKind.DATA: (*batch, b"bad")})
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.sender(QUEUE)
        while not link.may_send:
            peer.read()
        link.send(payload, tag=b"1", message_format=BATCH_FORMAT, is_settled=False)
        assert isinstance(peer.wait_for(OutcomeReported).state, Rejected)
        assert isinstance(peer.send(link, b"next"), Accepted)
    assert site.namespace.ask(Peek(QUEUE, 0, 1000)).column("body").to_pylist() == [b"next"]


# -- bytes that nobody should send -----------------------------------------------------------------

HEADER = b"AMQP\x00\x01\x00\x00"
BAD_BYTES = {
    "another version": b"AMQP\x00\x02\x00\x00",
    "a frame that is no performative": HEADER + b"\x00\x00\x00\x09\x02\x00\x00\x00\x45",
    "a huge frame": HEADER + b"\x7f\xff\xff\xff\x02\x00\x00\x00",
    "a frame shorter than its head": HEADER + b"\x00\x00\x00\x03\x02\x00\x00\x00",
    "noise": HEADER + bytes(range(256)) * 100,
}


@pytest.mark.parametrize("what", BAD_BYTES)
def test_bytes_that_make_no_sense_end_their_connection_alone(
    site: ServiceBusSite, what: str
) -> None:
    with SocketPeer(site.door.port) as second:
        assert second.show_token(QUEUE) == 202
        sender = second.sender(QUEUE)
        bad = socket.create_connection(("127.0.0.1", site.door.port), timeout=20)
        with closing(bad), suppress(ConnectionError):
            bad.sendall(BAD_BYTES[what])
            while bad.recv(65536):
                pass
        assert isinstance(second.send(sender, b"goes on"), Accepted)


def nested(depth: int) -> bytes:
    """Return a list in a list in a list, as a value of AMQP."""
    value = b"\x45"
    for _ in range(depth):
        value = b"\xd0" + (len(value) + 4).to_bytes(4) + (1).to_bytes(4) + value
    return value


HOSTILE_VALUES = {
    "deep nesting": nested(5000),
    "an endless array": b"\xf0\x00\x00\x00\x05\x7f\xff\xff\xff\x40",
    "a list that is longer than its message": b"\xd0\x7f\xff\xff\xff\x7f\xff\xff\xff",
    "a decimal": b"\x94" + bytes(16),
}


@pytest.mark.parametrize("what", HOSTILE_VALUES)
def test_a_message_that_cannot_be_decoded_is_rejected_alone(
    site: ServiceBusSite, what: str
) -> None:
    entries = b"\xa1\x01a" + HOSTILE_VALUES[what]
    section = b"\x00\x53\x74\xd1" + (len(entries) + 4).to_bytes(4) + (2).to_bytes(4) + entries
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.sender(QUEUE)
        peer.write()
        while not link.may_send:
            peer.read()
        link.send(section + encoded(b"body"), tag=b"1", is_settled=False)
        outcome = peer.wait_for(OutcomeReported).state
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition in ("amqp:decode-error", "amqp:not-implemented")
        assert isinstance(peer.send(link, b"good"), Accepted)


def test_a_native_client_cannot_store_sections_that_no_receiver_can_decode(
    site: ServiceBusSite,
) -> None:
    known = fingerprint(BrokeredMessage(b"x", message_id="1"))
    spoilt = STORED_HEAD.pack(0, known) + b"\x00\x53\x70\xc0\x03\x01\xa1\x00"
    connection = (
        f"Endpoint=twinbus://127.0.0.1:{site.door.port};SharedAccessKeyName=root;"
        f"SharedAccessKey={SECRET}"
    )
    with MessagingFactory.from_connection_string(connection) as factory:
        sender = factory.create_message_sender(QUEUE)
        message = BrokeredMessage(b"x", message_id="1", amqp=spoilt)
        with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
            sender.send(message)
        with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
            sender.send_batch([message] * 20)
        sender.send(BrokeredMessage(b"good"))
    assert site.namespace.ask(GetRuntimeProperties(QUEUE)).active_message_count == 1


CROWDED = {  # sections with so many entries that the broker cannot add its own
    "message annotations": SectionKind.MESSAGE_ANNOTATIONS,
    "delivery annotations": SectionKind.DELIVERY_ANNOTATIONS,
    "application properties": SectionKind.APPLICATION_PROPERTIES,
}


@pytest.mark.parametrize("what", CROWDED)
def test_a_message_to_which_the_broker_can_add_nothing_is_rejected_alone(
    site: ServiceBusSite, what: str
) -> None:
    names = [f"{number:04x}" for number in range(MAX_AMQP_ITEMS // 2)]
    crowded = encode_message({CROWDED[what]: dict.fromkeys(names), SectionKind.DATA: b"bad"})
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.sender(QUEUE)
        while not link.may_send:
            peer.write()
            peer.read()
        link.send(crowded, tag=b"1", is_settled=False)
        outcome = peer.wait_for(OutcomeReported).state
        assert isinstance(outcome, Rejected)
        assert isinstance(peer.send(link, b"good"), Accepted)


@pytest.mark.parametrize("mode", [SenderSettleMode.UNSETTLED, SenderSettleMode.SETTLED])
def test_a_message_that_amqp_cannot_express_is_set_aside(
    site: ServiceBusSite, mode: SenderSettleMode
) -> None:
    crowded = {f"{number:04x}": True for number in range(MAX_AMQP_ITEMS // 2 + 1)}
    bad = BrokeredMessage(b"bad", application_properties=crowded)
    site.namespace.ask(Send(QUEUE, [bad, BrokeredMessage(b"good")]))
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.receiver(QUEUE, snd_settle_mode=mode)
        link.grant(2)
        [good] = peer.take(link)
    assert [bytes(body) for body in AmqpMessage(good.payload).data_sections] == [b"good"]
    waiting = Receive(f"{QUEUE}/$deadletterqueue", wait=timedelta(seconds=10))
    [dead] = to_messages(site.namespace.ask(waiting))
    assert (dead.body, dead.dead_letter_reason) == (b"bad", "CannotBeEncoded")


def test_a_dead_letter_that_amqp_cannot_express_does_not_stop_the_receivers_of_its_queue(
    site: ServiceBusSite,
) -> None:
    crowded = {f"{number:04x}": True for number in range(MAX_AMQP_ITEMS // 2 + 1)}
    bad = BrokeredMessage(b"bad", application_properties=crowded)
    site.namespace.ask(Send(QUEUE, [bad, BrokeredMessage(b"good")]))
    tokens = site.namespace.ask(Receive(QUEUE, 2)).column("lock_token")
    site.namespace.ask(Settle(QUEUE, tokens, Disposition.DEAD_LETTER, "test"))
    dead_letters = f"{QUEUE}/$deadletterqueue"
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        link = peer.receiver(dead_letters)
        link.grant(2)
        [good] = peer.take(link)
    assert [bytes(body) for body in AmqpMessage(good.payload).data_sections] == [b"good"]

    def states() -> dict[bytes, MessageState | None]:
        found = to_messages(site.namespace.ask(Peek(dead_letters, 0, 10)))
        return {message.body: message.state for message in found}

    until(lambda: states()[b"bad"] is MessageState.DEFERRED)


def test_a_peek_of_a_message_that_amqp_cannot_express_fails_alone(site: ServiceBusSite) -> None:
    crowded = {f"{number:04x}": True for number in range(MAX_AMQP_ITEMS // 2 + 1)}
    bad = BrokeredMessage(b"bad", application_properties=crowded)
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"good"), bad]))
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        peek = {"from-sequence-number": 0, "message-count": Int(10)}
        assert peer.manage(QUEUE, "peek-message", peek).condition == "com.microsoft:argument-error"
        assert peer.manage(QUEUE, "peek-message", SINGLE_PEEK).status == 200


def test_a_deferred_message_that_amqp_cannot_express_is_not_left_locked(
    site: ServiceBusSite,
) -> None:
    crowded = {f"{number:04x}": True for number in range(MAX_AMQP_ITEMS // 2 + 1)}
    bad = BrokeredMessage(b"bad", application_properties=crowded)
    [number] = site.namespace.ask(Send(QUEUE, [bad])).sequence_numbers
    tokens = site.namespace.ask(Receive(QUEUE)).column("lock_token")
    site.namespace.ask(Settle(QUEUE, tokens, Disposition.DEFER))
    wanted = {"sequence-numbers": Array(int, (number,)), "receiver-settle-mode": UInt(1)}
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        reply = peer.manage(QUEUE, "receive-by-sequence-number", wanted)
        assert reply.condition == "com.microsoft:argument-error"

        def is_free() -> bool:
            with suppress(MessagingError):
                return bool(site.namespace.ask(ReceiveDeferred(QUEUE, [number])).num_rows)
            return False

        until(is_free)


def test_the_sections_of_a_large_native_send_do_not_hold_up_other_clients(
    site: ServiceBusSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def check(_: bytes) -> None:
        if not order:
            asyncio.get_running_loop().call_soon(order.append, "another client")
        order.append("check")

    monkeypatch.setattr(native, "check_sections", check)
    connection = (
        f"Endpoint=twinbus://127.0.0.1:{site.door.port};SharedAccessKeyName=root;"
        f"SharedAccessKey={SECRET}"
    )
    large = BrokeredMessage(b"", amqp=bytes(CHECKED_SECTION_BYTES // 2))
    with MessagingFactory.from_connection_string(connection) as factory:
        sender = factory.create_message_sender(QUEUE)
        sender.send_batch([large] * 8)
    assert order == [*["check"] * 3, "another client", *["check"] * 5]


def test_requests_behind_a_large_native_send_keep_their_order(site: ServiceBusSite) -> None:
    known = fingerprint(BrokeredMessage(b"", message_id="1"))
    footer = encode_section(SectionKind.FOOTER, {"large": bytes(CHECKED_SECTION_BYTES)})
    large = BrokeredMessage(b"", message_id="1", amqp=STORED_HEAD.pack(0, known) + footer)
    spoilt = replace(large, amqp=(large.amqp or b"") + b"\x00")
    connection = ConnectionString.parse(
        f"Endpoint=twinbus://127.0.0.1:{site.door.port};SharedAccessKeyName=root;"
        f"SharedAccessKey={SECRET}"
    )
    with ServerNamespace(connection) as client:
        sends = [
            client.submit(Send(QUEUE, messages))
            for messages in ([large] * 4, [spoilt], [BrokeredMessage(b"last")])
        ]
        poll = client.submit(Receive(QUEUE, 10))
        assert isinstance(sends[1].exception(30), InvalidArgumentError)
        first, last = (list(sends[at].result(30).sequence_numbers) for at in (0, 2))
        assert (len(first), len(last)) == (4, 1)
        assert first[-1] < last[0]
        assert poll.result(30).num_rows == 5


def test_the_refusal_of_a_large_native_send_waits_for_no_other_request(
    site: ServiceBusSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "DOOR_TICK_S", 3600.0)  # a tick would write the refusal, too
    footer = encode_section(SectionKind.FOOTER, {"large": bytes(CHECKED_SECTION_BYTES)})
    spoilt = BrokeredMessage(b"", amqp=STORED_HEAD.pack(0, bytes(8)) + footer + b"\x00")
    connection = ConnectionString.parse(
        f"Endpoint=twinbus://127.0.0.1:{site.door.port};SharedAccessKeyName=root;"
        f"SharedAccessKey={SECRET}"
    )
    with ServerNamespace(connection) as client:
        for _ in range(3):  # the tick before the first one was not prevented
            with pytest.raises(InvalidArgumentError):
                client.ask(Send(QUEUE, [spoilt]), 5.0)


@pytest.mark.parametrize("count", [1, 20])
def test_sections_that_are_larger_than_a_message_may_be_are_not_decoded(
    site: ServiceBusSite, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(AmqpMessage, "decode_all", None)
    large = BrokeredMessage(b"x", amqp=bytes(AMQP_MESSAGE_BYTES))
    connection = (
        f"Endpoint=twinbus://127.0.0.1:{site.door.port};SharedAccessKeyName=root;"
        f"SharedAccessKey={SECRET}"
    )
    with MessagingFactory.from_connection_string(connection) as factory:
        sender = factory.create_message_sender(QUEUE)
        with pytest.raises(MessageSizeExceededError):
            sender.send_batch([large] * count)


# -- what belongs to others ------------------------------------------------------------------------


def complete(peer: SocketPeer, path: str, token: UUID) -> Reply:
    """Complete a message by its lock token."""
    body = {"disposition-status": "completed", "lock-tokens": Array(UUID, (token,))}
    return peer.manage(path, "update-disposition", body)


def test_the_lock_of_another_queue_settles_nothing(site: ServiceBusSite) -> None:
    site.namespace.ask(PutKey(key("other", Claim.LISTEN, path=OTHER)))
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x")]))
    [message] = to_messages(site.namespace.ask(Receive(QUEUE)))
    assert message.lock_token is not None
    with SocketPeer(site.door.port) as thief:
        assert thief.show_token(OTHER, name="other") == 202
        reply = complete(thief, OTHER, message.lock_token)
        assert (reply.status, reply.condition) == (410, "com.microsoft:message-lock-lost")
        link = thief.session.attach_sender(
            "link", LinkOptions(target=Target(address=f"{QUEUE}/$management"))
        )
        assert thief.detached(link).condition == "amqp:unauthorized-access"
    site.namespace.ask(Settle(QUEUE, tokens_of([message.lock_token]), Disposition.COMPLETE))


def test_a_key_that_only_sends_neither_sees_nor_settles(site: ServiceBusSite) -> None:
    site.namespace.ask(PutKey(key("sends", Claim.SEND, path=QUEUE)))
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x")]))
    [message] = to_messages(site.namespace.ask(Receive(QUEUE)))
    assert message.lock_token is not None
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE, name="sends") == 202
        refused = [
            complete(peer, QUEUE, message.lock_token),
            peer.manage(QUEUE, "peek-message", SINGLE_PEEK),
            peer.manage(QUEUE, "batch-delete-messages", {"message-count": Int(10)}),
            peer.manage(QUEUE, "get-message-sessions", {"top": Int(10)}),
            peer.manage(QUEUE, "renew-lock", {"lock-tokens": Array(UUID, (message.lock_token,))}),
        ]
        assert {(item.status, item.condition) for item in refused} == {
            (401, "amqp:unauthorized-access")
        }
        link = peer.session.attach_receiver("link", LinkOptions(source=Source(address=QUEUE)))
        assert peer.detached(link).condition == "amqp:unauthorized-access"
        assert isinstance(peer.send(peer.sender(QUEUE), b"y"), Accepted)


def test_a_session_of_another_connection_cannot_be_used(site: ServiceBusSite) -> None:
    path = "talks"
    site.namespace.ask(CreateEntity(QueueDescription(path=path, requires_session=True)))
    lock = site.namespace.ask(AcceptSession(path, "s")).lock
    site.namespace.ask(SetSessionState(path, lock, b"secret"))
    with SocketPeer(site.door.port) as thief:
        assert thief.show_token(path, name="root") == 202
        for operation in ("get-session-state", "set-session-state", "renew-session-lock"):
            reply = thief.manage(path, operation, {"session-id": "s"})
            assert (reply.status, reply.condition) == (410, "com.microsoft:session-lock-lost")
    assert site.namespace.ask(GetSessionState(path, lock)) == b"secret"


def test_an_answer_that_a_link_cannot_take_is_an_error_and_locks_nothing(
    site: ServiceBusSite,
) -> None:
    fill(site, 1)
    numbers = []
    for message in to_messages(site.namespace.ask(Receive(QUEUE, 10))):
        assert message.lock_token is not None
        numbers.append(message.sequence_number)
        tokens = tokens_of([message.lock_token])
        site.namespace.ask(Settle(QUEUE, tokens, Disposition.DEFER))
    with SocketPeer(site.door.port) as peer:
        assert peer.show_token(QUEUE) == 202
        body = {"sequence-numbers": Array(int, tuple(numbers)), "receiver-settle-mode": UInt(1)}
        reply = peer.manage(QUEUE, "receive-by-sequence-number", body)  # 2 MB; it takes one
        assert (reply.status, reply.condition) == (400, "amqp:link:message-size-exceeded")
        peeked = peer.manage(QUEUE, "peek-message", SINGLE_PEEK | {"message-count": Int(10)})
        assert 1 < len(peeked.body["messages"]) < 10
        few = body | {"sequence-numbers": Array(int, tuple(numbers[:3]))}
        assert len(peer.manage(QUEUE, "receive-by-sequence-number", few).body["messages"]) == 3


@pytest.mark.parametrize("convert", [list, to_batch], ids=["objects", "columns"])
def test_sections_hide_nothing_from_the_size_limit(
    site: ServiceBusSite, convert: Callable[[list[BrokeredMessage]], Any]
) -> None:
    large = {f"p{number}": "x" * LARGE for number in range(10)}
    message = BrokeredMessage(b"", application_properties=large, amqp=b"x")
    with pytest.raises(MessageSizeExceededError):
        site.namespace.ask(Send(QUEUE, convert([message])))
