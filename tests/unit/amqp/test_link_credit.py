"""Credit of AMQP links: granted, used, drained and promised."""

import pytest

from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    Pair,
    RawPeer,
    accepts_everything,
    attach,
    flow,
    linked_receiver,
    linked_sender,
)
from twinbus.amqp.events import AttachRequested, CreditGiven, Delivery, Drained, Event
from twinbus.amqp.performatives import RECEIVER, FlowFrame, TransferFrame
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.errors import InvalidArgumentError, InvalidOperationError


def credit_of(link_credit: int, delivery_count: int = 0) -> FlowFrame:
    """Return the flow of a receiver."""
    return FlowFrame(
        next_incoming_id=delivery_count,
        incoming_window=100,
        next_outgoing_id=0,
        outgoing_window=100,
        handle=0,
        delivery_count=delivery_count,
        link_credit=link_credit,
    )


def test_a_sender_sends_as_much_as_it_has_credit_for() -> None:
    pair = Pair(on_server=accepts_link)
    link, second = linked_sender(pair)
    assert not link.may_send
    with pytest.raises(InvalidOperationError, match="its credit 0"):
        link.send(b"x")
    second.grant(2)
    pair.run()
    assert pair.client.of(CreditGiven)[-1] == CreditGiven(link, 2, is_draining=False)
    link.send(b"a")
    link.send(b"b")
    assert not link.may_send
    pair.run()
    assert second.credit == 0
    second.grant(5)
    second.grant(1)
    pair.run()
    assert link.credit == 1
    second.grant(0)
    pair.run()
    assert not link.may_send


def accepts_link(event: Event) -> None:
    if isinstance(event, AttachRequested):
        event.link.accept()


def test_credit_counts_deliveries_that_are_still_under_way() -> None:
    pair = Pair(on_server=accepts_link)
    link, second = linked_sender(pair)
    second.grant(3)
    pair.run()
    link.send(b"a")
    second.grant(3)  # before the delivery has arrived
    pair.run()
    assert link.credit == 2
    assert second.credit == 2


def test_a_drained_sender_gives_back_what_it_cannot_use() -> None:
    pair = Pair()
    link, second = linked_receiver(pair)
    link.grant(10, drain=True)
    pair.run()
    assert pair.server.of(CreditGiven)[-1] == CreditGiven(second, 10, is_draining=True)
    second.send(b"all there is", is_settled=True)
    second.drained()
    second.drained()
    pair.run()
    assert len(pair.client.of(Drained)) == 1
    assert (link.credit, second.credit) == (0, 0)
    assert link.delivery_count == second.delivery_count == 10
    link.grant(1)
    pair.run()
    assert second.may_send
    assert not second.is_draining


def test_a_sender_that_uses_up_its_credit_is_drained() -> None:
    pair = Pair()
    link, second = linked_receiver(pair)
    link.grant(1, drain=True)
    pair.run()
    second.send(b"x")
    pair.run()
    assert len(pair.client.of(Drained)) == 1
    second.drained()
    pair.run()
    assert len(pair.client.of(Drained)) == 1


def test_draining_without_credit_is_answered_at_once() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach(role=RECEIVER))
    peer.answers()
    peer.send(
        FlowFrame(
            next_incoming_id=0,
            incoming_window=9,
            next_outgoing_id=0,
            outgoing_window=9,
            handle=0,
            delivery_count=0,
            link_credit=0,
            drain=True,
        )
    )
    (answer,) = peer.answers()
    assert isinstance(answer, FlowFrame)
    assert (answer.handle, answer.link_credit, answer.drain) == (0, 0, True)


@pytest.mark.parametrize(
    ("delivery_count", "link_credit", "credit"),
    [
        (0, 5, 5),
        (None, 5, 5),
        (2**32 - 3, 5, 2),
        (2**32 - 3, 2, 0),
        (0, 2**32 - 1, 2**31 - 1),
        (2, 5, 7),
    ],
)
def test_credit_is_counted_from_the_deliveries_the_receiver_knows(
    delivery_count: int | None, link_credit: int, credit: int
) -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach(role=RECEIVER))
    peer.send(
        FlowFrame(
            incoming_window=9,
            next_outgoing_id=0,
            outgoing_window=9,
            handle=0,
            delivery_count=delivery_count,
            link_credit=link_credit,
        )
    )
    assert peer.of(CreditGiven)[-1].credit == credit


def test_a_receiver_answers_a_flow_that_asks_for_it() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach())
    peer.answers()
    peer.send(flow(0, window=9, credit=0, available=4, echo=True))
    (answer,) = peer.answers()
    assert isinstance(answer, FlowFrame)
    assert (answer.handle, answer.link_credit, answer.echo) == (0, 100, False)
    link = peer.of(AttachRequested)[0].link
    assert isinstance(link, ReceiverLink)
    assert link.available == 4


def test_credit_may_come_with_the_attach() -> None:
    peer = RawPeer(accepts=False)
    peer.send(OPEN, BEGIN, attach(role=RECEIVER), flow(0, window=9, credit=7))
    link = peer.of(AttachRequested)[0].link
    assert isinstance(link, SenderLink)
    assert not link.may_send
    link.accept()
    assert link.may_send
    assert link.credit == 7


@pytest.mark.parametrize("credit", [-1, 2**31])
def test_impossible_credit_is_a_mistake_of_the_program(credit: int) -> None:
    pair = Pair()
    link, _ = linked_receiver(pair)
    with pytest.raises(InvalidArgumentError):
        link.grant(credit)


def test_a_promised_delivery_is_sent_after_the_receiver_lowered_its_credit() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach(role=RECEIVER), credit_of(2))
    link = peer.of(AttachRequested)[0].link
    assert isinstance(link, SenderLink)
    link.promise(2)
    peer.send(credit_of(0))
    peer.answers()
    assert (link.may_send, link.may_send_promised) == (False, True)
    for _ in range(2):
        link.send(b"promised", is_promised=True)
    assert [type(answer) for answer in peer.answers()] == [TransferFrame] * 2
    with pytest.raises(InvalidOperationError):
        link.send(b"one more", is_promised=True)
    with pytest.raises(InvalidArgumentError):
        link.promise(1)
    peer.send(credit_of(3, delivery_count=2))
    assert link.credit == 3


def test_a_drain_is_answered_after_the_promised_deliveries() -> None:
    pair = Pair(on_server=accepts_everything)
    link, second = linked_sender(pair)
    link.promise(1)
    second.grant(5, drain=True)
    pair.run()
    link.drained()
    pair.run()
    assert pair.server.of(Drained) == []
    link.send(b"promised", is_promised=True)
    link.drained()
    pair.run()
    assert len(pair.server.of(Delivery)) == len(pair.server.of(Drained)) == 1
    assert (link.credit, second.credit) == (0, 0)
