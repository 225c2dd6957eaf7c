"""Links of AMQP: attaching, refusing and detaching."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    WHY,
    Pair,
    RawPeer,
    attach,
    linked_sender,
    receiver_options,
    sender_options,
    transfer,
)
from twinbus.amqp.conditions import Condition
from twinbus.amqp.events import Attached, AttachRequested, Delivery, Event, LinkDetached
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    SENDER,
    AttachFrame,
    Coordinator,
    DetachFrame,
    DispositionFrame,
    ErrorCondition,
    FlowFrame,
    ReceiverSettleMode,
    Rejected,
    SenderSettleMode,
    Source,
    Target,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.types import Symbol
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_DEPTH


def does_nothing(event: Event) -> None:
    del event


def test_the_peer_says_where_from_and_where_to_and_finds_it_again_in_the_answer() -> None:
    pair = Pair()
    source = Source(
        address="orders", filter={Symbol("com.example:filter"): "x"}, capabilities=("a",)
    )
    options = LinkOptions(
        source=source,
        target=Target(address="here"),
        snd_settle_mode=SenderSettleMode.SETTLED,
        rcv_settle_mode=ReceiverSettleMode.SECOND,
        properties={"name": "me"},
    )
    link = pair.begin().attach_receiver("from-orders", options)
    pair.run()
    wanted = pair.server.of(AttachRequested)[0].link.peer
    assert wanted is not None
    assert (wanted.name, wanted.role, wanted.source) == ("from-orders", RECEIVER, source)
    assert wanted.properties == {"name": "me"}
    assert pair.client.of(Attached)[0].link is link
    assert link.is_attached
    assert link.peer is not None
    assert link.peer.source == source
    assert link.snd_settle_mode is SenderSettleMode.SETTLED
    assert link.rcv_settle_mode is ReceiverSettleMode.SECOND


def test_a_link_is_accepted_with_other_termini_properties_and_limits() -> None:
    def accept(event: Event) -> None:
        if isinstance(event, AttachRequested):
            event.link.accept(
                source=Source(address="made-up"), max_message_bytes=77, properties={"until": 5}
            )

    pair = Pair(on_server=accept)
    link, second = linked_sender(pair)
    assert link.peer is not None
    assert link.peer.source == Source(address="made-up")
    assert link.peer.target == Target(address="orders")
    assert link.peer.properties == {"until": 5}
    assert (link.max_message_bytes, second.max_message_bytes) == (77, 77)


@pytest.mark.parametrize("direction", ["attach_sender", "attach_receiver"])
def test_a_refused_link_is_attached_without_termini_and_detached_with_the_reason(
    direction: str,
) -> None:
    def refuse(event: Event) -> None:
        if isinstance(event, AttachRequested):
            event.link.refuse(WHY)

    pair = Pair(on_server=refuse)
    link = getattr(pair.begin(), direction)("a", sender_options())
    pair.run()
    assert pair.client.of(Attached) == []
    assert pair.client.of(LinkDetached) == [LinkDetached(link, WHY, is_closed=True)]
    assert len(pair.server.of(LinkDetached)) == 1
    assert link.peer.source is None
    assert link.peer.target is None
    assert pair.server.connection.link_count == pair.client.connection.link_count == 0


def test_a_link_may_be_accepted_later() -> None:
    pair = Pair(on_server=does_nothing)
    link = pair.begin().attach_receiver("a", receiver_options())
    pair.run()
    assert not link.is_attached
    second = pair.server.of(AttachRequested)[0].link
    assert second.accept()
    pair.run()
    assert link.is_attached
    assert not second.accept()


def test_a_peer_that_leaves_before_its_link_was_accepted_is_answered() -> None:
    peer = RawPeer(accepts=False)
    peer.send(OPEN, BEGIN, attach())
    peer.answers()
    peer.send(DetachFrame(handle=0, closed=True))
    attached, detached = peer.answers()
    assert isinstance(attached, AttachFrame)
    assert attached.target is None
    assert detached == DetachFrame(handle=0, closed=True)
    (detachment,) = peer.of(LinkDetached)
    link = peer.of(AttachRequested)[0].link
    assert detachment.link is link
    assert not link.accept()
    link.refuse(WHY)
    assert peer.answers() == []


@pytest.mark.parametrize("is_closed", [True, False])
def test_either_end_detaches_and_both_report_it_once(is_closed: bool) -> None:
    for side in ("client", "server"):
        pair = Pair()
        link, peer_link = linked_sender(pair)
        pair.client.events.clear()
        pair.server.events.clear()
        (link if side == "client" else peer_link).detach(WHY, is_closed=is_closed)
        pair.run()
        first, second = pair.client.take(LinkDetached), pair.server.take(LinkDetached)
        received, output = (second, first) if side == "client" else (first, second)
        assert (received.error, received.is_closed) == (WHY, is_closed)
        assert output.error is None
        assert pair.server.connection.link_count == pair.client.connection.link_count == 0


def test_both_ends_may_detach_at_the_same_time() -> None:
    pair = Pair()
    link, second = linked_sender(pair)
    link.detach()
    second.detach(WHY)
    pair.run()
    assert len(pair.client.of(LinkDetached)) == len(pair.server.of(LinkDetached)) == 1


def test_a_link_that_is_detached_before_it_was_answered_ends_when_it_is() -> None:
    pair = Pair()
    link = pair.begin().attach_sender("a", sender_options())
    link.detach()
    pair.run()
    assert pair.client.of(Attached) == []
    assert len(pair.client.of(LinkDetached)) == 1
    assert pair.client.connection.link_count == 0


def test_a_name_is_free_again_when_its_link_is_detached() -> None:
    pair = Pair()
    link, _ = linked_sender(pair)
    link.detach()
    again = link.session.attach_sender(link.name, sender_options())
    pair.run()
    assert again.is_attached
    assert len(pair.server.of(AttachRequested)) == 2


def test_a_link_of_the_same_name_takes_the_place_of_the_older_one() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN)
    peer.send(BEGIN, channel=1)
    peer.send(attach("same"))
    peer.answers()
    peer.send(attach("same"), channel=1)
    detached, attached, _ = peer.answers()
    assert isinstance(detached, DetachFrame)
    assert detached.error is not None
    assert detached.error.condition == Condition.STOLEN
    assert isinstance(attached, AttachFrame)
    peer.send(attach("same", handle=1, role=RECEIVER), channel=1)  # the other direction
    assert len(peer.of(LinkDetached)) == 1
    peer.send(DetachFrame(handle=0, closed=True))
    assert len(peer.of(LinkDetached)) == 1
    assert peer.connection.link_count == 2


def test_a_coordinator_is_offered_like_any_target() -> None:
    peer = RawPeer(accepts=False)
    peer.send(OPEN, BEGIN, attach(target=Coordinator(capabilities=("amqp:local-transactions",))))
    wanted = peer.of(AttachRequested)[0].link.peer
    assert wanted is not None
    assert isinstance(wanted.target, Coordinator)


def test_links_are_not_resumed() -> None:
    peer = RawPeer()
    unsettled = {b"tag": ACCEPTED, b"other": None}
    peer.send(OPEN, BEGIN, attach(unsettled=unsettled, incomplete_unsettled=True))
    attached = peer.answers()[2]
    assert isinstance(attached, AttachFrame)
    assert attached.unsettled is None
    peer.send(transfer(0, delivery_tag=b"tag", resume=True), payload=b"old")
    peer.send(transfer(1, delivery_tag=b"other", resume=True, more=True), payload=b"old")
    peer.send(transfer(1, delivery_tag=b"other", resume=True), payload=b"old")
    peer.send(transfer(2), payload=b"new")
    assert [delivery.payload for delivery in peer.of(Delivery)] == [b"new"]
    assert peer.connection.incomplete_bytes == 0


def test_frames_of_a_peer_can_always_be_encoded_again() -> None:
    deep: Any = []
    for _ in range(MAX_AMQP_DEPTH - 1):
        deep = [deep]
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach(source=Source(address="a", filter={"deep": deep})))
    answer = peer.answers()[2]
    assert isinstance(answer, AttachFrame)
    assert answer.source == Source(address="a", filter={"deep": deep})


def test_a_value_that_cannot_be_sent_changes_nothing() -> None:
    peer = RawPeer(accepts=False)
    peer.send(OPEN, BEGIN, attach())
    link = peer.of(AttachRequested)[0].link
    assert isinstance(link, ReceiverLink)
    bad = ErrorCondition(condition="é", description="no symbol")
    peer.answers()
    for attempt in (
        lambda: link.accept(properties={"a": object()}),
        lambda: link.refuse(bad),
        lambda: link.detach(bad),
        lambda: link.session.end(bad),
        lambda: peer.connection.close(0, bad),
    ):
        with pytest.raises(InvalidArgumentError):
            attempt()
    assert peer.answers() == []
    assert link.accept()
    link.grant(1)
    peer.send(transfer())
    with pytest.raises(InvalidArgumentError):
        link.settle(0, Rejected(error=bad))
    with pytest.raises(InvalidArgumentError):
        link.detach(bad)
    assert link.settle(0)
    assert [type(answer) for answer in peer.answers()] == [AttachFrame, FlowFrame, DispositionFrame]


def test_each_end_decides_about_its_own_settle_mode() -> None:
    peer = RawPeer(is_client=True)
    session = peer.connection.begin()
    settled = {"snd_settle_mode": SenderSettleMode.SETTLED}
    sender = session.attach_sender("a", sender_options(**settled))
    receiver = session.attach_receiver(
        "b", receiver_options(rcv_settle_mode=ReceiverSettleMode.SECOND)
    )
    peer.send(OPEN, replace(BEGIN, remote_channel=0))
    second = ReceiverSettleMode.SECOND
    peer.send(attach("a", role=RECEIVER, rcv_settle_mode=second), attach("b", 1, **settled))
    assert sender.snd_settle_mode is SenderSettleMode.SETTLED
    assert sender.rcv_settle_mode is second
    assert receiver.snd_settle_mode is SenderSettleMode.SETTLED
    assert receiver.rcv_settle_mode is second


def test_the_role_of_an_end_is_that_of_the_wire() -> None:
    pair = Pair()
    link, second = linked_sender(pair)
    assert (link.ROLE, second.ROLE) == (SENDER, RECEIVER)
