"""Links: attaching, credit, deliveries in frames, outcomes."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    Pair,
    RawPeer,
    accepts_everything,
    attach,
    linked_receiver,
    linked_sender,
    receiver_options,
    sender_options,
    transfer,
)
from twinbus.amqp.conditions import Condition
from twinbus.amqp.events import (
    Attached,
    AttachRequested,
    CreditGiven,
    DeliveriesSettled,
    Delivery,
    DeliveryDropped,
    Drained,
    Event,
    LinkDetached,
    OutcomeReported,
    WindowOpened,
)
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    RELEASED,
    SENDER,
    AttachFrame,
    Coordinator,
    DetachFrame,
    DispositionFrame,
    ErrorCondition,
    FlowFrame,
    Modified,
    OpenFrame,
    Received,
    ReceiverSettleMode,
    Rejected,
    SenderSettleMode,
    Source,
    Target,
    TransactionalState,
    TransferFrame,
)
from twinbus.amqp.receiver_link import ReceiverLink
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.types import Symbol
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessageSizeExceededError
from twinbus.limits import MAX_AMQP_DEPTH

WHY = ErrorCondition(condition="amqp:not-found", description="no such queue", info={})


def does_nothing(event: Event) -> None:
    del event


# -- attaching -------------------------------------------------------------------------------------


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
def test_either_end_detaches_and_both_hear_it_once(is_closed: bool) -> None:
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


# -- credit ----------------------------------------------------------------------------------------


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


# -- deliveries ------------------------------------------------------------------------------------


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


# -- outcomes --------------------------------------------------------------------------------------


def test_outcomes_that_follow_each_other_travel_in_one_frame() -> None:
    pair = Pair()
    link, second = linked_sender(pair)
    numbers = [link.send(b"x") for _ in range(6)]
    pair.run()
    for number in numbers[:3]:
        second.settle(number)
    second.settle(numbers[3], RELEASED)
    second.settle(numbers[5])
    pair.run()
    reports = pair.client.of(OutcomeReported)
    assert [(len(report.deliveries), report.state) for report in reports] == [
        (3, ACCEPTED),
        (1, RELEASED),
        (1, ACCEPTED),
    ]
    assert all(report.is_settled for report in reports)
    assert reports[0].deliveries == [(n, n.to_bytes(4)) for n in numbers[:3]]
    assert list(link.unsettled) == [numbers[4]]
    assert list(second.unsettled) == [numbers[4]]


def test_an_outcome_is_reported_before_its_link_is_detached() -> None:
    pair = Pair()
    link, second = linked_sender(pair)
    number = link.send(b"x")
    pair.run()
    assert second.settle(number)
    second.detach()
    pair.run()
    kinds = [type(event) for event in pair.client.events]
    assert kinds.index(OutcomeReported) < kinds.index(LinkDetached)


def test_a_receiver_that_settles_second_waits_for_the_sender() -> None:
    pair = Pair()
    link, second = linked_receiver(pair, rcv_settle_mode=ReceiverSettleMode.SECOND)
    link.grant(2)
    pair.run()
    number = second.send(b"x")
    pair.run()
    assert link.settle(number, Modified(delivery_failed=True))
    pair.run()
    (report,) = pair.server.of(OutcomeReported)
    assert (report.state, report.is_settled) == (Modified(delivery_failed=True), False)
    assert pair.client.of(DeliveriesSettled) == []
    assert second.settle(number, report.state)
    assert not second.settle(number, report.state)
    pair.run()
    assert pair.client.of(DeliveriesSettled) == [DeliveriesSettled(link, [number])]
    assert not link.settle(number)
    assert (dict(link.unsettled), dict(second.unsettled)) == ({}, {})


def test_a_receiver_may_settle_at_once_although_it_could_wait() -> None:
    pair = Pair()
    link, second = linked_sender(pair, rcv_settle_mode=ReceiverSettleMode.SECOND)
    number = link.send(b"x")
    pair.run()
    assert second.settle(number, is_settled=True)
    pair.run()
    (report,) = pair.client.of(OutcomeReported)
    assert report.is_settled


def test_an_outcome_that_is_repeated_is_reported_once() -> None:
    peer = RawPeer(is_client=True)
    link = peer.connection.begin().attach_sender("a", sender_options())
    peer.send(OPEN, replace(BEGIN, remote_channel=0))
    peer.send(attach("a", role=RECEIVER, initial_delivery_count=None), flow(0, window=9, credit=9))
    numbers = [link.send(b"x") for _ in range(3)]
    output = DispositionFrame(role=RECEIVER, first=0, last=2**31 - 1, settled=False, state=ACCEPTED)
    received = DispositionFrame(
        role=RECEIVER, first=0, last=2, state=Received(section_number=0, section_offset=0)
    )
    peer.send(received, output, output, received)
    assert [len(report.deliveries) for report in peer.of(OutcomeReported)] == [3]
    assert list(link.unsettled) == numbers
    settled = DispositionFrame(role=RECEIVER, first=1, last=2, settled=True, state=ACCEPTED)
    peer.send(settled, settled)
    last = peer.of(OutcomeReported)[-1]
    assert (last.deliveries, last.is_settled) == ([(n, n.to_bytes(4)) for n in (1, 2)], True)
    assert len(peer.of(OutcomeReported)) == 2
    assert link.settle(0)
    assert not link.settle(1)


def test_one_disposition_may_be_about_several_links() -> None:
    pair = Pair()
    session = pair.begin()
    links = [session.attach_sender(name, sender_options()) for name in ("a", "b")]
    pair.run()
    numbers = [link.send(b"x") for link in (*links, *links)]
    pair.run()
    for delivery in pair.server.of(Delivery):
        delivery.link.settle(delivery.number, Rejected(error=WHY))
    pair.run()
    reports = pair.client.of(OutcomeReported)
    assert {report.link: [n for n, _ in report.deliveries] for report in reports} == {
        links[0]: [numbers[0], numbers[2]],
        links[1]: [numbers[1], numbers[3]],
    }
    assert [report.state for report in reports] == [Rejected(error=WHY)] * 2


def test_deliveries_are_forgotten_with_their_link() -> None:
    pair = Pair()
    link, second = linked_receiver(pair, rcv_settle_mode=ReceiverSettleMode.SECOND)
    link.grant(3)
    pair.run()
    numbers = [second.send(b"x") for _ in range(3)]
    pair.run()
    link.settle(numbers[0])
    pair.run()
    pair.server.events.clear()
    link.detach()
    assert not link.settle(numbers[1])
    pair.run()
    assert pair.server.of(OutcomeReported) == []
    assert not second.settle(numbers[0])
    assert (dict(link.unsettled), dict(second.unsettled)) == ({}, {})


def test_a_settled_link_has_nothing_to_settle() -> None:
    pair = Pair()
    link, second = linked_receiver(pair, snd_settle_mode=SenderSettleMode.SETTLED)
    link.grant(1)
    pair.run()
    number = second.send(b"x", is_settled=False)
    pair.run()
    (delivery,) = pair.client.of(Delivery)
    assert delivery.is_settled
    assert not link.settle(number)
    assert dict(second.unsettled) == {}


def test_an_unsettled_link_settles_nothing_by_itself() -> None:
    pair = Pair()
    link, _ = linked_sender(pair, snd_settle_mode=SenderSettleMode.UNSETTLED)
    link.send(b"x", is_settled=True)
    pair.run()
    (delivery,) = pair.server.of(Delivery)
    assert not delivery.is_settled


def test_a_sender_stops_when_too_much_is_unsettled() -> None:
    pair = Pair(client={"max_unsettled": 2})
    link, second = linked_sender(pair)
    first = link.send(b"x")
    link.send(b"x")
    assert not link.may_send
    pair.run()
    second.settle(first)
    pair.run()
    assert link.may_send


def test_a_sender_may_settle_before_the_receiver_has_reported() -> None:
    pair = Pair()
    link, second = linked_sender(pair)
    number = link.send(b"x")
    pair.run()
    assert link.settle(number, None)
    pair.run()
    assert pair.server.of(DeliveriesSettled) == [DeliveriesSettled(second, [number])]
    assert not second.settle(number)


# -- numbers that wrap around ----------------------------------------------------------------------


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


def test_the_role_of_an_end_is_that_of_the_wire() -> None:
    pair = Pair()
    link, second = linked_sender(pair)
    assert (link.ROLE, second.ROLE) == (SENDER, RECEIVER)


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
