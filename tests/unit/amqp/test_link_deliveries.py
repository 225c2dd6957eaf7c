"""Deliveries of AMQP links: in frames that the peer takes, within its window."""

from dataclasses import replace

import pytest

from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    Pair,
    RawPeer,
    accepts_everything,
    attach,
    flow,
    linked_sender,
    sender_options,
    transfer,
)
from twinbus.amqp.events import (
    AttachRequested,
    Delivery,
    DeliveryDropped,
    Event,
    OutcomeReported,
    WindowOpened,
)
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    RELEASED,
    OpenFrame,
    TransactionalState,
    TransferFrame,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.errors import InvalidArgumentError, MessageSizeExceededError


def test_a_delivery_brings_its_tag_format_and_state() -> None:
    pair = Pair()
    link, _ = linked_sender(pair)
    state = TransactionalState(txn_id=b"7", outcome=ACCEPTED)
    number = link.send(b"x", tag=b"mine", message_format=0x80013700, state=state)
    link.send([b"in ", memoryview(b"pieces")], is_settled=True)
    pair.run()
    first, second = pair.server.of(Delivery)
    assert first == Delivery(first.link, number, b"mine", b"x", 0x80013700, False, state)
    assert (second.payload, second.is_settled, second.number) == (b"in pieces", True, number + 1)
    assert second.tag == (number + 1).to_bytes(4)


@pytest.mark.parametrize("size", [0, 1, 450, 500, 512, 5000, 100_000])
@pytest.mark.parametrize("window", [1, 3, 2048])
def test_large_messages_travel_in_frames_that_the_peer_takes(size: int, window: int) -> None:
    pair = Pair(server={"max_frame_bytes": 512, "incoming_window": window})
    link, _ = linked_sender(pair)
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    link.send(payload)
    pair.run()
    (delivery,) = pair.server.of(Delivery)
    assert delivery.payload == payload
    assert pair.client.watch.transfers >= size // 512
    assert pair.server.connection.incomplete_bytes == 0


def test_a_delivery_that_waits_for_the_window_holds_back_the_others() -> None:
    peer = RawPeer(is_client=True)
    session = peer.connection.begin()
    link = session.attach_sender("a", sender_options())
    peer.send(OpenFrame(container_id="peer", max_frame_size=512))
    peer.send(replace(BEGIN, remote_channel=0, incoming_window=2))
    peer.send(attach("a", role=RECEIVER, initial_delivery_count=None))
    peer.send(flow(0, window=2, credit=5))
    peer.answers()
    link.send(bytes(2000))
    assert not link.may_send
    assert len(peer.answers()) == 2
    peer.events.clear()
    peer.send(flow(2, window=1, credit=5))
    assert len(peer.answers()) == 1
    assert peer.of(WindowOpened) == []
    peer.send(flow(3, window=9, credit=5))
    assert len(peer.answers()) == 2
    assert len(peer.of(WindowOpened)) == 1
    assert link.may_send


def test_a_delivery_that_waits_for_the_window_can_be_aborted() -> None:
    pair = Pair(server={"max_frame_bytes": 512, "incoming_window": 4}, on_server=accepts_everything)
    link, _ = linked_sender(pair)
    number = link.send(bytes(5000))
    assert link.abort(number)
    assert not link.abort(number)
    pair.run()
    after = link.send(b"the next")
    assert not link.abort(after)
    pair.run()
    assert [delivery.payload for delivery in pair.server.of(Delivery)] == [b"the next"]
    assert pair.server.connection.incomplete_bytes == 0
    assert list(link.unsettled) == [after]


def test_an_aborted_delivery_is_dropped() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach())
    peer.send(transfer(0, more=True), payload=b"half")
    assert peer.connection.incomplete_bytes == 4
    peer.send(transfer(None, delivery_tag=None, aborted=True), payload=b"ignored")
    assert peer.connection.incomplete_bytes == 0
    peer.send(transfer(1, aborted=True))
    peer.send(transfer(2), payload=b"whole")
    (delivery,) = peer.of(Delivery)
    assert delivery.payload == b"whole"
    assert delivery.link.delivery_count == 3


def test_a_delivery_that_does_not_arrive_is_reported_because_it_used_credit() -> None:
    peer = RawPeer(accepts=False, rejects_too_large=True)
    peer.send(OPEN, BEGIN, attach())
    [requested] = peer.of(AttachRequested)
    requested.link.accept(max_message_bytes=10)
    link = requested.link
    assert isinstance(link, ReceiverLink)
    link.grant(5)
    peer.send(transfer(0), payload=bytes(11))
    peer.send(transfer(1, more=True), payload=b"half")
    peer.send(transfer(None, delivery_tag=None, aborted=True))
    peer.send(transfer(2, resume=True), payload=b"old")
    peer.send(transfer(3, resume=True, more=True), payload=b"old")
    assert len(peer.of(DeliveryDropped)) == 3
    peer.send(transfer(3, resume=True), payload=b"old")
    assert [event.link for event in peer.of(DeliveryDropped)] == [link] * 4
    assert (peer.of(Delivery), link.credit) == ([], 1)


def test_a_delivery_may_be_settled_by_its_last_frame() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach())
    peer.send(transfer(0, more=True, settled=False), payload=b"a")
    peer.send(TransferFrame(handle=0, settled=True, state=RELEASED), payload=b"b")
    (delivery,) = peer.of(Delivery)
    assert (delivery.payload, delivery.is_settled, delivery.state) == (b"ab", True, RELEASED)


def test_the_last_frame_need_not_repeat_what_the_first_one_has() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach())
    peer.send(transfer(0, more=True, settled=True, message_format=0x80013700), payload=b"a")
    peer.send(TransferFrame(handle=0, delivery_id=0, delivery_tag=b"t"), payload=b"b")
    peer.send(transfer(1, more=True, message_format=0x80013700), payload=b"c")
    peer.send(transfer(1, message_format=None), payload=b"d")
    assert [
        (delivery.payload, delivery.message_format, delivery.is_settled)
        for delivery in peer.of(Delivery)
    ] == [(b"ab", 0x80013700, True), (b"cd", 0x80013700, False)]


def test_messages_that_the_receiver_does_not_take_are_not_sent() -> None:
    def accept(event: Event) -> None:
        if isinstance(event, AttachRequested) and isinstance(event.link, ReceiverLink):
            event.link.accept(max_message_bytes=10)
            event.link.grant(5)

    pair = Pair(on_server=accept)
    link, _ = linked_sender(pair)
    link.send(bytes(10))
    with pytest.raises(MessageSizeExceededError, match="11 bytes"):
        link.send(bytes(11))
    assert link.credit == 4


@pytest.mark.parametrize("tag", [b"", b"x" * 33])
def test_impossible_tags_are_a_mistake_of_the_program(tag: bytes) -> None:
    pair = Pair()
    link, _ = linked_sender(pair)
    with pytest.raises(InvalidArgumentError, match="delivery tag"):
        link.send(b"x", tag=tag)
    assert link.credit == 100


@pytest.mark.parametrize("message_format", [-1, 2**32])
def test_impossible_formats_are_a_mistake_of_the_program(message_format: int) -> None:
    pair = Pair()
    link, _ = linked_sender(pair)
    with pytest.raises(InvalidArgumentError, match="32 bits"):
        link.send(b"x", message_format=message_format)


def test_our_window_opens_again_while_transfers_arrive() -> None:
    pair = Pair(server={"incoming_window": 4}, on_server=accepts_everything)
    link, _ = linked_sender(pair)
    for _ in range(20):
        link.send(b"x", is_settled=True)
        pair.run()
    assert len(pair.server.of(Delivery)) == 20


@pytest.mark.parametrize("first_number", [2**32 - 1, 2**32 - 3, 2**31 - 2])
def test_counting_goes_on_when_the_numbers_wrap_around(first_number: int) -> None:
    options = {"first_number": first_number, "incoming_window": 4}
    pair = Pair(server=options, client=options)
    link, second = linked_sender(pair)
    for round_ in range(10):
        link.send(b"%d" % round_)
        pair.run()
        second.grant(3)
        pair.run()
        assert link.credit == 3
    deliveries = pair.server.of(Delivery)
    assert [delivery.payload for delivery in deliveries] == [b"%d" % n for n in range(10)]
    for delivery in deliveries:
        assert second.settle(delivery.number)
    pair.run()
    (report,) = pair.client.of(OutcomeReported)
    assert len(report.deliveries) == 10
    assert dict(link.unsettled) == {}
