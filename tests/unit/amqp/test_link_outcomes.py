"""Outcomes of AMQP deliveries: reported, settled and forgotten."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    WHY,
    Pair,
    RawPeer,
    attach,
    flow,
    linked_receiver,
    linked_sender,
    sender_options,
)
from tests.unit.properties import replayed
from twinbus.amqp.events import (
    DeliveriesSettled,
    Delivery,
    LinkDetached,
    OutcomeReported,
    WindowOpened,
)
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    RELEASED,
    DispositionFrame,
    Modified,
    Received,
    ReceiverSettleMode,
    Rejected,
    SenderSettleMode,
)


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


OUTCOMES = st.sampled_from([None, ACCEPTED, RELEASED, Received(section_number=0, section_offset=0)])
REPORTS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 3), OUTCOMES, st.booleans(), st.booleans())
)
Report = tuple[int, int, Any, bool, bool]


def effects_of(reports: Sequence[Report], *, one_by_one: bool) -> tuple[Any, ...]:
    """Report outcomes of six deliveries; return what the sender learns and still remembers.

    A report is about `more` deliveries after the first, as a range or as one frame for each.
    """
    peer = RawPeer(is_client=True, max_unsettled=6)
    link = peer.connection.begin().attach_sender("a", sender_options())
    peer.send(OPEN, replace(BEGIN, remote_channel=0))
    peer.send(attach("a", role=RECEIVER, initial_delivery_count=None))
    peer.send(flow(0, window=50, credit=50))
    for _ in range(6):
        link.send(b"x")
    learned: list[Any] = []
    for first, more, state, settled, confirms in reports:
        known = len(peer.events)
        ends = [(n, n) for n in range(first, first + more + 1)]
        for begin, end in ends if one_by_one else [(first, first + more)]:
            peer.send(
                DispositionFrame(role=RECEIVER, first=begin, last=end, state=state, settled=settled)
            )
        found = peer.events[known:]
        outcomes = [event for event in found if isinstance(event, OutcomeReported)]
        pairs = [
            (pair, event.state, event.is_settled) for event in outcomes for pair in event.deliveries
        ]
        learned.append((pairs, any(isinstance(event, WindowOpened) for event in found)))
        if confirms:
            learned.append([link.settle(n) for n in range(first, first + more + 1)])
    return learned, link.unsettled, link.may_send


@given(REPORTS)
@replayed
def test_outcomes_reported_one_by_one_have_the_effect_of_a_range(reports: list[Report]) -> None:
    assert effects_of(reports, one_by_one=True) == effects_of(reports, one_by_one=False)
