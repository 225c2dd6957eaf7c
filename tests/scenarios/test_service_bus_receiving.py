"""What a link of the Service Bus door delivers, releases and deletes, frame by frame."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.inside import bytes_for_client
from tests.scenarios.service_bus_wire import QUEUE, TALKS, Wire, WirePeer
from tests.unit.amqp.ends import frames_of
from twinbus.amqp.events import Attached, Delivery, Drained
from twinbus.amqp.frames import frame
from twinbus.amqp.message import AmqpMessage
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import (
    RECEIVER,
    DeliveryState,
    DispositionFrame,
    ErrorCondition,
    Modified,
    ReceiverSettleMode,
    Rejected,
    SenderSettleMode,
    Source,
    Target,
    TransferFrame,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.types import Array, Described, Int, Symbol, UInt, ULong
from twinbus.errors import ServerBusyError
from twinbus.limits import (
    AUTHENTICATION_US,
    MAX_AMQP_UNSETTLED,
    MAX_BATCH_MESSAGES,
    MAX_RECEIVE_BYTES,
    MIN_AMQP_FRAME_BYTES,
    SERVICE_BUS_CREDIT,
)
from twinbus.message import BrokeredMessage, to_messages
from twinbus.protocol.commands import AcceptSession, Disposition, Receive, Send, Settle
from twinbus.protocol.table import size_of

pytestmark = pytest.mark.timeout(60)
DELETES: dict[str, Any] = {
    "snd_settle_mode": SenderSettleMode.SETTLED,
    "rcv_settle_mode": ReceiverSettleMode.FIRST,
}
LOCKS: dict[str, Any] = {
    "snd_settle_mode": SenderSettleMode.UNSETTLED,
    "rcv_settle_mode": ReceiverSettleMode.SECOND,
}
MODES = pytest.mark.parametrize("mode", [DELETES, LOCKS], ids=["deletes", "locks"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def wire(tmp_path: Path, stack: ExitStack) -> Wire:
    return Wire(tmp_path, stack)


@pytest.fixture
def peer(wire: Wire) -> WirePeer:
    made = WirePeer(wire)
    assert made.show_token("", name="root") == 202
    return made


def got(peer: WirePeer) -> list[bytes]:
    """Return the bodies of the deliveries that the client has got."""
    peer.write()
    data = b"".join(peer.amqp.take_outgoing(0))
    assert not data
    waiting = b"".join(peer.wire.conversation.amqp.take_outgoing(0))
    if waiting:
        peer.events += peer.amqp.receive(waiting, 0)
    found = [event for event in peer.events if isinstance(event, Delivery)]
    peer.events = [event for event in peer.events if not isinstance(event, Delivery)]
    return [b"".join(AmqpMessage(event.payload).data_sections) for event in found]


# -- credit that a client takes back ---------------------------------------------------------------


@MODES
def test_a_message_that_comes_after_the_credit_was_taken_back_stays(
    wire: Wire, peer: WirePeer, mode: dict[str, Any]
) -> None:
    receiver = peer.receiver(QUEUE, **mode)
    receiver.grant(1)
    peer.write()
    receiver.grant(0)
    peer.write()
    assert wire.namespace.snapshot().open_receives == 0
    wire.send(b"a")
    assert got(peer) == []
    assert wire.deliverable() == [b"a"]


@MODES
def test_a_message_that_comes_after_a_drain_stays(
    wire: Wire, peer: WirePeer, mode: dict[str, Any]
) -> None:
    receiver = peer.receiver(QUEUE, **mode)
    receiver.grant(5)
    peer.write()
    receiver.grant(5, drain=True)
    peer.wait_for(Drained)
    wire.send(b"a")
    assert got(peer) == []
    assert wire.deliverable() == [b"a"]


@MODES
def test_a_client_that_lowers_its_credit_gets_no_more_and_loses_nothing(
    wire: Wire, peer: WirePeer, mode: dict[str, Any]
) -> None:
    receiver = peer.receiver(QUEUE, **mode)
    receiver.grant(5)
    peer.write()
    receiver.grant(2)
    peer.write()
    wire.send(b"a", b"b", b"c", b"d", b"e")
    assert got(peer) == [b"a", b"b"]
    assert wire.deliverable() == [b"c", b"d", b"e"]
    if mode is DELETES:
        assert wire.stored() == [b"c", b"d", b"e"]


@MODES
@pytest.mark.parametrize("end", ["credit", "drain", "detach", "loss"])
def test_a_reply_that_comes_too_late_loses_nothing(
    wire: Wire, peer: WirePeer, mode: dict[str, Any], end: str
) -> None:
    receiver = peer.receiver(QUEUE, **mode)
    receiver.grant(5)
    peer.write()
    wire.hold_replies()  # the broker has locked them, and the client takes its credit back
    wire.send(b"a", b"b")
    if end == "detach":
        receiver.detach()
    elif end != "loss":
        receiver.grant(0, drain=end == "drain")
    peer.write()
    if end == "loss":
        wire.close()
    wire.let_arrive()
    if end != "loss":
        assert got(peer) == []
    assert wire.deliverable() == [b"a", b"b"]


def test_a_deleted_message_has_been_written_and_no_lock_is_mentioned(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **DELETES)
    receiver.grant(10)
    peer.write()
    wire.send(b"a")
    [delivery] = peer.take(receiver)
    message = AmqpMessage(delivery.payload)
    assert delivery.is_settled
    assert set(message.message_annotations or {}) == {
        "x-opt-sequence-number",
        "x-opt-enqueued-time",
    }
    assert not message.delivery_annotations
    assert wire.stored() == []


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_message_that_is_being_deleted_is_delivered_whatever_becomes_of_the_credit(
    wire: Wire, peer: WirePeer, is_draining: bool
) -> None:
    receiver = peer.receiver(QUEUE, **DELETES)
    receiver.grant(5)
    peer.write()
    wire.hold_replies()
    wire.send(b"a", b"b")
    wire.let_arrive(holds_next=True)  # the broker deletes them
    if is_draining:
        receiver.grant(receiver.credit, drain=True)
    else:  # as for transfers that were written before: the client must expect them
        peer.amqp.options = replace(peer.amqp.options, tolerates_overrun=True)
        receiver.grant(0)
    assert got(peer) == []
    assert not any(isinstance(event, Drained) for event in peer.events)
    wire.let_arrive()
    assert got(peer) == [b"a", b"b"]
    if is_draining:
        peer.wait_for(Drained)
    assert wire.stored() == []
    wire.send(b"c")
    assert got(peer) == []
    assert wire.deliverable() == [b"c"]


def test_only_as_many_messages_are_deleted_as_the_window_of_the_client_takes(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **DELETES)
    receiver.grant(10)
    peer.write()
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = 2
    wire.send(b"a", b"b", b"c")
    assert wire.stored() == [b"c"]
    receiver.detach()
    peer.write()
    assert wire.deliverable() == [b"c"]


def test_a_deletion_that_a_busy_broker_refuses_ends_the_link_and_loses_nothing(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **DELETES)
    receiver.grant(1)
    peer.write()
    wire.hold_replies()
    wire.send(b"a")
    wire.refuses = ServerBusyError("busy", retry_after_s=1)
    wire.let_arrive()
    assert peer.detached(receiver).condition == "com.microsoft:server-busy"
    assert got(peer) == []
    wire.refuses = None
    wire.tick()  # the release was refused, too, and is repeated
    assert wire.deliverable() == [b"a"]


def test_a_message_whose_lock_was_lost_before_its_deletion_is_not_delivered(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **DELETES)
    receiver.grant(2)
    peer.write()
    wire.hold_replies()
    wire.send(b"a")
    wire.clock.advance(timedelta(hours=1))
    wire.let_arrive()
    assert peer.detached(receiver).condition == "com.microsoft:message-lock-lost"
    assert got(peer) == []
    assert wire.stored() == [b"a"]


# -- messages that are too large for a client ------------------------------------------------------


@MODES
def test_a_message_that_is_too_large_for_the_client_ends_the_link_and_stays(
    wire: Wire, peer: WirePeer, mode: dict[str, Any]
) -> None:
    wire.send(b"a", bytes(5000), b"b")
    receiver = peer.receiver(QUEUE, **mode, max_message_bytes=2000)
    receiver.grant(10)
    error = peer.detached(receiver)
    assert error.condition == "amqp:link:message-size-exceeded"
    assert got(peer) == [b"a"]
    assert wire.deliverable() == [bytes(5000), b"b"]


def test_an_answer_that_is_too_large_deletes_nothing(wire: Wire, peer: WirePeer) -> None:
    large = bytes(200_000)
    wire.send(*[large] * 8)
    locked = wire.namespace.ask(Receive(QUEUE, 8))
    wire.namespace.ask(Settle(QUEUE, locked.column("lock_token"), Disposition.DEFER))
    numbers = tuple(locked.column("sequence_number").to_pylist())
    body = {"sequence-numbers": Array(int, numbers), "receiver-settle-mode": UInt(0)}
    reply = peer.manage(QUEUE, "receive-by-sequence-number", body)
    assert reply.condition == "amqp:link:message-size-exceeded"
    assert len(wire.stored()) == 8
    few = body | {"sequence-numbers": Array(int, numbers[:2])}
    found = peer.manage(QUEUE, "receive-by-sequence-number", few).body["messages"]
    assert [set(entry) for entry in found] == [{"message"}] * 2
    assert len(wire.stored()) == 6


# -- many unsettled deliveries ---------------------------------------------------------------------


@pytest.mark.parametrize("is_settled", [True, False])
def test_delivery_goes_on_when_a_client_with_the_most_deliveries_settles_some(
    wire: Wire, peer: WirePeer, is_settled: bool
) -> None:
    for _ in range(MAX_AMQP_UNSETTLED // MAX_BATCH_MESSAGES + 1):
        wire.namespace.ask(Send(QUEUE, [BrokeredMessage(b"") for _ in range(MAX_BATCH_MESSAGES)]))
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(2 * MAX_AMQP_UNSETTLED)
    deliveries = peer.take(receiver, MAX_AMQP_UNSETTLED)
    assert got(peer) == []
    for delivery in deliveries[:5]:
        receiver.settle(delivery.number, is_settled=is_settled)
    assert len(peer.take(receiver, 5)) == 5


# -- attaching to a session ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "wait_ms"),
    [
        ("s", None),
        (Described(Symbol("com.microsoft:session-filter"), "s"), None),
        (None, UInt(1000)),
        (None, ULong(2**64 - 1)),  # longer than any time of Python
        (None, ULong(0)),
        (None, "a text"),
    ],
    ids=["by name", "described", "with a time", "for ever", "for no time", "with nonsense"],
)
def test_a_session_is_granted_in_every_form_of_the_request(
    wire: Wire, peer: WirePeer, wanted: object, wait_ms: object
) -> None:
    wire.namespace.ask(Send(TALKS, [BrokeredMessage(b"x", session_id="s")]))
    filters = {Symbol("com.microsoft:session-filter"): wanted}
    properties = None if wait_ms is None else {Symbol("com.microsoft:timeout"): wait_ms}
    link = peer.session.attach_receiver(
        "talk",
        LinkOptions(source=Source(address=TALKS, filter=filters), properties=properties, **LOCKS),
    )
    peer.wait_for(Attached, lambda event: event.link is link)
    assert link.peer is not None
    assert isinstance(link.peer.source, Source)
    assert link.peer.source.filter == {"com.microsoft:session-filter": "s"}
    assert "com.microsoft:locked-until-utc" in (link.peer.properties or {})


# -- tokens that expire ----------------------------------------------------------------------------


def session_link(peer: WirePeer) -> ReceiverLink:
    filters = {Symbol("com.microsoft:session-filter"): "s"}
    link = peer.session.attach_receiver(
        "talk", LinkOptions(source=Source(address=TALKS, filter=filters), **LOCKS)
    )
    peer.write()
    peer.read()
    assert link.is_attached
    return link


@pytest.mark.parametrize("end", ["detach", "tick", "loss"])
def test_a_session_is_released_after_the_token_expired(
    wire: Wire, peer: WirePeer, end: str
) -> None:
    receiver = session_link(peer)
    wire.is_expired = True
    if end == "detach":
        receiver.detach()
        peer.write()
    elif end == "tick":
        wire.tick()
        assert peer.detached(receiver).condition == "amqp:unauthorized-access"
    else:
        wire.close()
    assert wire.namespace.ask(AcceptSession(TALKS, "s")).lock.session_id == "s"


def test_messages_that_wait_for_the_client_are_released_after_the_token_expired(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(5)
    peer.write()
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = 1
    wire.send(b"a", b"b", b"c")
    wire.is_expired = True
    wire.tick()
    assert got(peer) == [b"a"]
    assert wire.deliverable() == [b"b", b"c"]


# -- messages that wait for the client -------------------------------------------------------------


def test_messages_that_wait_for_the_client_count_as_replies_of_its_connection(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(5)
    peer.write()
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = 1
    wire.send(*[bytes(10_000)] * 3)
    assert len(got(peer)) == 1
    wire.conversation.note_buffered(0)
    assert 20_000 <= wire.conversation.reply_bytes < 21_000
    peer.session.say_flow()
    assert len(got(peer)) == 2
    wire.conversation.note_buffered(0)
    assert wire.conversation.reply_bytes == 0


@pytest.mark.parametrize("how", ["credit", "detach", "loss"])
def test_messages_that_no_longer_wait_for_the_client_count_no_more(
    wire: Wire, peer: WirePeer, how: str
) -> None:
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(5)
    peer.write()
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = 0
    wire.send(*[bytes(10_000)] * 3)
    assert bytes_for_client(wire.conversation) > 30_000
    if how == "credit":
        receiver.grant(0)
        peer.write()
    elif how == "detach":
        receiver.detach()
        peer.write()
    else:
        wire.close()
    assert bytes_for_client(wire.conversation) == 0
    assert len(wire.deliverable()) == 3


def test_messages_for_which_the_key_has_no_room_do_not_wait_for_the_client(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(5)
    peer.write()
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = 1
    wire.reply_room = MAX_RECEIVE_BYTES
    wire.send(b"a", b"b", b"c")
    assert got(peer) == [b"a"]
    assert wire.deliverable() == [b"b", b"c"]
    assert bytes_for_client(wire.conversation) == 0


def test_a_client_without_room_gets_its_messages_when_its_window_opens(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(5)
    peer.write()
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = 1
    wire.reply_room = MAX_RECEIVE_BYTES
    wire.send(b"a", b"b", b"c")
    assert got(peer) == [b"a"]
    peer.session.say_flow()
    assert got(peer) == [b"b", b"c"]


@MODES
def test_a_message_larger_than_the_window_does_not_wait_for_it_if_the_key_has_no_room(
    wire: Wire, peer: WirePeer, mode: dict[str, Any]
) -> None:
    receiver = peer.receiver(QUEUE, **mode)
    receiver.grant(5)
    peer.write()
    wire.reply_room = MAX_RECEIVE_BYTES - 1
    narrow(wire, 1)
    wire.send(bytes(10_000))
    assert got(peer) == []
    assert wire.deliverable() == [bytes(10_000)]
    assert bytes_for_client(wire.conversation) == wire.conversation.amqp.withheld_bytes == 0
    wire.send(bytes(20_000))
    receiver.grant(5)  # with a flow that opens the window, too
    assert got(peer) == [bytes(20_000)]


def narrow(wire: Wire, window: int) -> None:
    """Let the client accept only so many transfers, each in a small frame."""
    wire.conversation.amqp.peer_frame_bytes = MIN_AMQP_FRAME_BYTES
    [session] = wire.conversation.amqp.sessions
    session.transfers.peer_window = window


def test_a_message_that_waits_for_the_window_counts_as_a_reply_of_its_connection(
    wire: Wire, peer: WirePeer
) -> None:
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(1)
    peer.write()
    narrow(wire, 1)
    wire.send(bytes(10_000))
    assert got(peer) == []
    wire.conversation.note_buffered(0)
    assert 10_000 <= wire.conversation.reply_bytes < 11_000
    peer.session.say_flow()
    assert got(peer) == [bytes(10_000)]
    wire.conversation.note_buffered(0)
    assert wire.conversation.reply_bytes == 0


# -- answers that wait for the client --------------------------------------------------------------

PEEK = {"operation": "com.microsoft:peek-message"}
ALL = {"from-sequence-number": 0, "message-count": Int(100)}


def test_answers_that_wait_for_the_client_count_as_replies_of_its_connection(
    wire: Wire, peer: WirePeer
) -> None:
    wire.send(bytes(10_000))
    sender, receiver = peer.node(f"{QUEUE}/$management")
    for _ in range(3):
        peer.ask(sender, PEEK, ALL)
    peer.write()
    assert 30_000 <= bytes_for_client(wire.conversation) < 32_000
    receiver.grant(2)
    assert len(peer.take(receiver, 2)) == 2
    assert 10_000 <= bytes_for_client(wire.conversation) < 11_000
    receiver.detach()
    peer.write()
    assert bytes_for_client(wire.conversation) == 0


@pytest.mark.parametrize("lacks", ["credit", "window"])
def test_a_client_that_takes_no_answer_loses_its_link_if_the_key_has_no_room(
    wire: Wire, peer: WirePeer, lacks: str
) -> None:
    wire.send(bytes(10_000))
    sender, receiver = peer.node(f"{QUEUE}/$management")
    if lacks == "window":
        receiver.grant(5)
    while not sender.may_send:
        peer.read()
    peer.ask(sender, PEEK, ALL)
    peer.write()
    narrow(wire, 1)
    wire.reply_room = MAX_RECEIVE_BYTES - 1
    peer.ask(sender, PEEK, ALL)
    assert peer.detached(receiver).condition == "amqp:resource-limit-exceeded"
    assert bytes_for_client(wire.conversation) == wire.conversation.amqp.withheld_bytes == 0
    peer.ask(sender, PEEK, ALL)  # there is no link for its answer
    assert bytes_for_client(wire.conversation) == 0


# -- a server without room -------------------------------------------------------------------------


def test_a_full_server_accepts_tokens_and_refuses_links_as_busy(wire: Wire) -> None:
    wire.full = ServerBusyError("the server has 1 connections, its maximum", retry_after_s=1)
    peer = WirePeer(wire)
    assert peer.show_token("", name="root") == 202
    options = LinkOptions(target=Target(address=QUEUE))
    for address in (QUEUE, f"{QUEUE}/$management"):
        options = LinkOptions(target=Target(address=address))
        link = peer.session.attach_sender(f"to {address}", options)
        assert peer.detached(link).condition == "com.microsoft:server-busy"
    wire.full = None
    assert peer.sender(QUEUE).is_attached


def test_a_full_server_keeps_no_connection_that_waits_for_room(wire: Wire) -> None:
    wire.full = ServerBusyError("the server has 1 connections, its maximum", retry_after_s=1)
    peer = WirePeer(wire)
    assert peer.show_token("", name="root") == 202
    wire.now = AUTHENTICATION_US
    wire.tick()
    peer.read()
    assert peer.closed().condition == "com.microsoft:server-busy"


# -- settlements that change messages --------------------------------------------------------------

CHANGED = {Symbol("priority"): "high"}
CHANGING = {
    "abandon": Modified(delivery_failed=True, message_annotations=CHANGED),
    "defer": Modified(undeliverable_here=True, message_annotations=CHANGED),
    "dead-letter": Rejected(
        error=ErrorCondition(
            condition="com.microsoft:dead-letter", info={Symbol("DeadLetterReason"): "r", **CHANGED}
        )
    ),
}


@pytest.mark.parametrize("state", CHANGING.values(), ids=CHANGING)
def test_a_settlement_that_changes_the_message_is_refused_and_not_carried_out(
    wire: Wire, peer: WirePeer, state: DeliveryState
) -> None:
    wire.send(b"a")
    receiver = peer.receiver(QUEUE, **LOCKS)
    receiver.grant(1)
    [delivery] = peer.take(receiver)
    receiver.settle(delivery.number, state, is_settled=False)
    peer.write()
    [refusal] = [
        sent.state for _, sent, _ in frames_of(wire.recv(0)) if isinstance(sent, DispositionFrame)
    ]
    assert isinstance(refusal, Rejected)
    assert refusal.error is not None
    assert refusal.error.condition == "amqp:not-implemented"
    assert "priority" in str(refusal.error.description)
    assert wire.stored() == [b"a"]
    assert wire.deliverable() == []


def test_a_disposition_that_changes_the_message_is_refused(wire: Wire, peer: WirePeer) -> None:
    wire.send(b"a")
    [message] = to_messages(wire.namespace.ask(Receive(QUEUE)))
    assert message.lock_token is not None
    body: dict[str, Any] = {
        "disposition-status": "abandoned",
        "lock-tokens": Array(UUID, (message.lock_token,)),
        "properties-to-modify": {"priority": "high"},
    }
    reply = peer.manage(QUEUE, "update-disposition", body)
    assert (reply.status, reply.condition) == (400, "amqp:not-implemented")
    assert (
        peer.manage(QUEUE, "update-disposition", body | {"properties-to-modify": {}}).status == 200
    )


# -- links on which a client sends -----------------------------------------------------------------


def test_a_client_that_aborts_its_deliveries_gets_new_credit(wire: Wire, peer: WirePeer) -> None:
    sender = peer.sender(QUEUE)
    peer.write()
    while not sender.may_send:
        peer.read()
    for number in range(SERVICE_BUS_CREDIT + 1):
        wire.conversation.amqp.take_outgoing(0)
        half = TransferFrame(
            handle=sender.handle,
            delivery_id=100 + number,
            delivery_tag=b"t",
            message_format=0,
            more=True,
        )
        aborted = TransferFrame(handle=sender.handle, aborted=True)
        wire.sendall(frame(peer.session.channel, half.encode() + b"half"))
        wire.sendall(frame(peer.session.channel, aborted.encode()))
    link = wire.conversation.amqp.link_named(sender.name, RECEIVER)
    assert link is not None
    assert link.credit > 0


# -- the size of what waits ------------------------------------------------------------------------


def test_the_sections_of_a_message_count_for_what_waits() -> None:
    native, from_sdk = BrokeredMessage(b"123"), BrokeredMessage(b"123", amqp=bytes(1000))
    assert size_of(Send(QUEUE, [native])) < 1000
    assert size_of(Send(QUEUE, [from_sdk])) > 1000
    assert size_of(Send(QUEUE, [native, from_sdk])) > 1000
