"""Peers that break the rules: what ends is a link, a session or the connection, never more."""

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from tests.inside import link_names, unsettled_numbers
from tests.unit.amqp.ends import BEGIN, OPEN, RawPeer, attach, sender_options, transfer
from twinbus.amqp.composites import Composite
from twinbus.amqp.conditions import Condition
from twinbus.amqp.deliveries import UnsettledDeliveries
from twinbus.amqp.encoder import encode
from twinbus.amqp.events import (
    AttachRequested,
    ConnectionClosed,
    Delivery,
    LinkDetached,
    OutcomeReported,
    SessionBegun,
    SessionEnded,
)
from twinbus.amqp.frames import FrameType, frame
from twinbus.amqp.options import PeerBounds
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    SENDER,
    CloseFrame,
    DetachFrame,
    DispositionFrame,
    EndFrame,
    ErrorCondition,
    FlowFrame,
    Modified,
    OpenFrame,
    Rejected,
    SaslInit,
)
from twinbus.amqp.sender_link import SenderLink
from twinbus.amqp.types import Described, Symbol, ULong
from twinbus.limits import (
    AMQP_FRAME_BYTES,
    MAX_AMQP_KEPT_FRAME_BYTES,
    MAX_AMQP_KEPT_VALUES,
    MAX_AMQP_SESSION_LINKS,
    MAX_AMQP_SESSIONS,
    MAX_AMQP_STATE_BYTES,
)

FLOW = FlowFrame(next_incoming_id=0, incoming_window=9, next_outgoing_id=0, outgoing_window=9)


def linked(**options: Any) -> RawPeer:
    """Return a peer that has a link it sends on, with a credit of 100."""
    peer = RawPeer(**options)
    peer.send(OPEN, BEGIN, attach())
    peer.answers()
    peer.events.clear()
    return peer


def why(answer: Composite) -> str:
    """Return the condition of a close, end or detach."""
    error = getattr(answer, "error", None)
    assert isinstance(error, ErrorCondition)
    assert error.description
    assert error.info == {}  # some SDKs need all three fields
    return error.condition


# -- the connection ends ---------------------------------------------------------------------------


def raw(body: bytes, channel: int = 0) -> bytes:
    return frame(channel, body)


def of(*composites: Composite, channel: int = 0) -> bytes:
    return b"".join(frame(channel, composite.encode()) for composite in composites)


# Decoded, each empty list takes 64 times its byte.
MANY_VALUES: dict[Symbol, list[list[Any]]] = {
    Symbol("many"): [[] for _ in range(MAX_AMQP_KEPT_VALUES)]
}
LONG_STATE = Modified(message_annotations={Symbol("long"): "x" * MAX_AMQP_STATE_BYTES})
NESTED = b"\x45"
for _ in range(200):
    NESTED = b"\xd0" + (len(NESTED) + 4).to_bytes(4) + b"\0\0\0\1" + NESTED


@pytest.mark.parametrize(
    ("data", "condition"),
    [
        (b"\xff\xff\xff\xff\x02\0\0\0", Condition.FRAMING_ERROR),
        ((AMQP_FRAME_BYTES + 1).to_bytes(4) + b"\x02\0\0\0", Condition.FRAMING_ERROR),
        (b"\0\0\0\x07\x02\0\0\0", Condition.FRAMING_ERROR),
        (b"\0\0\0\x08\x01\0\0\0", Condition.FRAMING_ERROR),
        (frame(0, b"", FrameType.SASL), Condition.FRAMING_ERROR),
        (frame(0, SaslInit(mechanism="PLAIN").encode()), Condition.NOT_ALLOWED),
        (raw(b"\x40"), Condition.DECODE_ERROR),
        (raw(b"\x00"), Condition.DECODE_ERROR),
        (raw(OPEN.encode()[:-1]), Condition.DECODE_ERROR),
        (raw(CloseFrame().encode() + b"x"), Condition.DECODE_ERROR),
        (raw(encode(Described(ULong(0x99), []))), Condition.NOT_IMPLEMENTED),
        (raw(b"\x00\x53\x10" + NESTED), Condition.DECODE_ERROR),
        (raw(b"\x00\x53\x10\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x40"), Condition.DECODE_ERROR),
        (raw(b"\x00\x53\x18\xd0\x00\x00\x00\x05\xff\xff\xff\xff\x40"), Condition.DECODE_ERROR),
        (of(OPEN), Condition.ILLEGAL_STATE),
        (of(BEGIN), Condition.NOT_ALLOWED),
        (of(BEGIN, channel=MAX_AMQP_SESSIONS), Condition.FRAMING_ERROR),
        (of(replace(BEGIN, remote_channel=7), channel=1), Condition.NOT_ALLOWED),
        (of(replace(BEGIN, remote_channel=0), channel=1), Condition.NOT_ALLOWED),
        (of(EndFrame(), channel=9), Condition.NOT_ALLOWED),
        (of(transfer(), channel=9), Condition.NOT_ALLOWED),
        (of(FLOW, channel=9), Condition.NOT_ALLOWED),
        (of(attach("b", handle=MAX_AMQP_SESSION_LINKS)), Condition.FRAMING_ERROR),
        (of(attach("b" * MAX_AMQP_KEPT_FRAME_BYTES, handle=1)), Condition.RESOURCE_LIMIT_EXCEEDED),
        (of(attach("b", handle=1, properties=MANY_VALUES)), Condition.RESOURCE_LIMIT_EXCEEDED),
        (of(replace(BEGIN, properties=MANY_VALUES), channel=1), Condition.RESOURCE_LIMIT_EXCEEDED),
        (of(transfer(more=True, state=LONG_STATE)), Condition.RESOURCE_LIMIT_EXCEEDED),
        (of(ACCEPTED), Condition.NOT_ALLOWED),
    ],
)
def test_a_peer_that_cannot_be_understood_loses_its_connection(
    data: bytes, condition: Condition
) -> None:
    peer = linked()
    peer.send_bytes(data)
    (closed,) = peer.answers()
    assert isinstance(closed, CloseFrame)
    assert why(closed) == condition
    assert [type(event) for event in peer.events] == [LinkDetached, SessionEnded, ConnectionClosed]
    peer.send_bytes(b"anything" * 100)
    assert peer.connection.is_done
    assert peer.answers() == []
    assert len(peer.events) == 3


@pytest.mark.parametrize(
    ("first", "condition"),
    [
        (OpenFrame(container_id="peer", max_frame_size=511), Condition.INVALID_FIELD),
        (OpenFrame(container_id="peer", idle_time_out=999), Condition.INVALID_FIELD),
        (
            OpenFrame(container_id="p" * MAX_AMQP_KEPT_FRAME_BYTES),
            Condition.RESOURCE_LIMIT_EXCEEDED,
        ),
        (
            OpenFrame(container_id="p", properties=MANY_VALUES),
            Condition.RESOURCE_LIMIT_EXCEEDED,
        ),
        (BEGIN, Condition.ILLEGAL_STATE),
        (CloseFrame(), Condition.ILLEGAL_STATE),
        (transfer(), Condition.ILLEGAL_STATE),
    ],
)
def test_a_connection_begins_with_a_good_open(first: Composite, condition: Condition) -> None:
    peer = RawPeer()
    peer.send(first)
    opened, closed = peer.answers()
    assert isinstance(opened, OpenFrame)
    assert why(closed) == condition
    assert [type(event) for event in peer.events] == [ConnectionClosed]


def test_a_begin_cannot_answer_a_session_twice() -> None:
    peer = RawPeer(is_client=True)
    peer.connection.begin()
    peer.send(OPEN, replace(BEGIN, remote_channel=0))
    peer.send(replace(BEGIN, remote_channel=0), channel=1)
    assert why(peer.answers()[-1]) == Condition.NOT_ALLOWED


def test_frames_of_a_broken_peer_are_dropped_until_it_closes() -> None:
    peer = linked()
    peer.send(OPEN)
    peer.send(attach("b", handle=1), transfer(), FLOW)
    assert not peer.connection.is_done
    assert peer.of(AttachRequested) == []
    peer.send(CloseFrame())
    assert peer.connection.is_done


# -- the session ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "condition"),
    [
        (attach("b"), Condition.HANDLE_IN_USE),
        (transfer(handle=5), Condition.UNATTACHED_HANDLE),
        (DetachFrame(handle=5), Condition.UNATTACHED_HANDLE),
        (replace(FLOW, handle=5), Condition.UNATTACHED_HANDLE),
        (replace(FLOW, next_incoming_id=1), Condition.INVALID_FIELD),
        (DispositionFrame(role=RECEIVER, first=5, last=4), Condition.INVALID_FIELD),
        (DispositionFrame(role=RECEIVER, first=0, last=2**32 - 1), Condition.INVALID_FIELD),
    ],
)
def test_a_peer_that_confuses_a_session_loses_it(bad: Composite, condition: Condition) -> None:
    peer = linked()
    peer.send(BEGIN, channel=1)
    peer.answers()
    peer.events.clear()
    peer.send(bad)
    (ended,) = peer.answers()
    assert isinstance(ended, EndFrame)
    assert why(ended) == condition
    assert [type(event) for event in peer.events] == [LinkDetached]
    peer.send(bad, transfer(), DetachFrame(handle=0))  # it has not read that yet
    assert peer.answers() == []
    peer.send(EndFrame())
    assert [type(event) for event in peer.events] == [LinkDetached, SessionEnded]
    peer.send(attach("other"), channel=1)
    assert len(peer.of(AttachRequested)) == 1
    assert peer.connection.link_count == 1


def test_transfers_beyond_the_window_end_the_session() -> None:
    peer = linked(incoming_window=4)
    peer.send(*(transfer(number) for number in range(4)))
    (opened,) = peer.answers()  # the peer reads that the window is open again
    assert isinstance(opened, FlowFrame)
    assert (opened.next_incoming_id, opened.incoming_window) == (4, 4)
    peer.send(*(transfer(number) for number in range(4, 9)))  # it reads nothing meanwhile
    assert why(peer.answers()[-1]) == Condition.WINDOW_VIOLATION
    assert len(peer.of(Delivery)) == 8


def test_delivery_ids_must_ascend() -> None:
    for second in (7, 6, 7 + 2**31):
        peer = linked()
        peer.send(transfer(7), transfer(second))
        assert why(peer.answers()[0]) == Condition.INVALID_FIELD
        assert len(peer.of(Delivery)) == 1


def test_a_sender_that_waits_for_no_outcome_is_stopped() -> None:
    peer = linked(max_unsettled=3)
    peer.send(*(transfer(number) for number in range(4)))
    assert why(peer.answers()[0]) == Condition.RESOURCE_LIMIT_EXCEEDED
    assert len(peer.of(Delivery)) == 3


# -- the link ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "condition"),
    [
        ([transfer(None)], Condition.INVALID_FIELD),
        ([transfer(delivery_tag=None)], Condition.INVALID_FIELD),
        ([transfer(delivery_tag=b"")], Condition.INVALID_FIELD),
        ([transfer(more=True), transfer(1, delivery_tag=b"u")], Condition.INVALID_FIELD),
        ([transfer(more=True), transfer(delivery_tag=b"u")], Condition.INVALID_FIELD),
        ([transfer(more=True), transfer(message_format=5)], Condition.INVALID_FIELD),
    ],
)
def test_a_peer_that_confuses_a_link_loses_it(bad: list[Composite], condition: Condition) -> None:
    peer = linked()
    peer.send(attach("other", handle=1))
    peer.answers()
    peer.events.clear()
    peer.send(*bad, payload=b"x")
    (detached,) = peer.answers()
    assert isinstance(detached, DetachFrame)
    assert detached.closed
    assert why(detached) == condition
    assert [type(event) for event in peer.events] == [LinkDetached]
    peer.send(transfer(5), transfer(6, handle=1))  # it has not read that yet
    peer.send(DetachFrame(handle=0, closed=True))
    assert [event.link.name for event in peer.of(Delivery)] == ["other"]
    assert len(peer.of(LinkDetached)) == 1
    assert peer.connection.incomplete_bytes == 0


def test_deliveries_beyond_the_credit_end_the_link() -> None:
    peer = linked()
    link = next(iter(next(peer.connection.sessions).links))
    getattr(link, "grant")(1)  # noqa: B009 - of a receiver
    peer.answers()
    peer.send(transfer(0), transfer(1))
    assert why(peer.answers()[0]) == Condition.TRANSFER_LIMIT_EXCEEDED
    assert len(peer.of(Delivery)) == 1


def test_deliveries_beyond_the_credit_are_taken_where_that_is_tolerated() -> None:
    peer = RawPeer(tolerates_overrun=True, accepts=False)
    peer.send(OPEN, BEGIN, attach())
    peer.of(AttachRequested)[0].link.accept()
    peer.send(transfer(0), transfer(1))
    assert len(peer.of(Delivery)) == 2
    assert peer.of(AttachRequested)[0].link.credit == 0


def test_a_delivery_before_the_link_was_accepted_ends_it() -> None:
    peer = RawPeer(accepts=False, tolerates_overrun=True)
    peer.send(OPEN, BEGIN, attach())
    peer.answers()
    peer.send(transfer())
    attached, detached = peer.answers()
    assert getattr(attached, "target", 1) is None
    assert why(detached) == Condition.TRANSFER_LIMIT_EXCEEDED


def test_a_transfer_to_a_sender_ends_the_link() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach(role=RECEIVER))
    peer.answers()
    peer.send(transfer())
    assert why(peer.answers()[0]) == Condition.NOT_ALLOWED


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_messages_that_are_too_large_end_the_link_before_they_are_whole(frames: int) -> None:
    peer = RawPeer(accepts=False)
    peer.send(OPEN, BEGIN, attach())
    link = peer.of(AttachRequested)[0].link
    link.accept(max_message_bytes=1000)
    getattr(link, "grant")(5)  # noqa: B009 - of a receiver
    peer.answers()
    size = 1000 // frames + 1
    for number in range(frames):
        assert peer.answers() == []
        peer.send(transfer(more=number < frames - 1 or frames > 2), payload=bytes(size))
    assert why(peer.answers()[0]) == Condition.MESSAGE_SIZE_EXCEEDED
    assert peer.connection.incomplete_bytes == 0
    assert peer.of(Delivery) == []


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_messages_that_are_too_large_are_rejected_alone_where_that_is_chosen(frames: int) -> None:
    peer = RawPeer(accepts=False, rejects_too_large=True)
    peer.send(OPEN, BEGIN, attach())
    link = peer.of(AttachRequested)[0].link
    link.accept(max_message_bytes=1000)
    getattr(link, "grant")(5)  # noqa: B009 - of a receiver
    peer.answers()
    for number in range(frames):
        peer.send(transfer(more=number < frames - 1), payload=bytes(1001))
        assert peer.connection.incomplete_bytes == 0
    [rejected] = peer.answers()
    state = getattr(rejected, "state")  # noqa: B009 - of a disposition
    assert isinstance(state, Rejected)
    assert state.error is not None
    assert state.error.condition == Condition.MESSAGE_SIZE_EXCEEDED
    peer.send(transfer(1), payload=bytes(1000))
    assert len(peer.of(Delivery)) == 1


def test_unfinished_deliveries_of_all_links_are_bounded_together() -> None:
    peer = linked(bounds=PeerBounds(max_partial_bytes=100))
    peer.send(attach("b", handle=1))
    peer.answers()
    peer.send(transfer(0, more=True), payload=bytes(60))
    peer.send(transfer(1, handle=1, more=True), payload=bytes(60))
    detached = peer.answers()[-1]
    assert why(detached) == Condition.RESOURCE_LIMIT_EXCEEDED
    assert peer.connection.incomplete_bytes == 60
    peer.send(transfer(0), payload=bytes(40))
    (delivery,) = peer.of(Delivery)
    assert len(delivery.payload) == 100


# -- floods ----------------------------------------------------------------------------------------


def test_a_flood_of_sessions_is_bounded() -> None:
    peer = RawPeer(max_sessions=3)
    peer.send(OPEN)
    for channel in range(3):
        peer.send(BEGIN, channel=channel)
    assert len(peer.of(SessionBegun)) == 3
    peer.send(BEGIN, channel=3)
    assert why(peer.answers()[-1]) == Condition.FRAMING_ERROR


def test_a_peer_that_takes_fewer_channels_than_it_uses_is_refused() -> None:
    peer = RawPeer()
    peer.send(OpenFrame(container_id="peer", channel_max=0), BEGIN)
    peer.send(BEGIN, channel=1)
    assert why(peer.answers()[-1]) == Condition.RESOURCE_LIMIT_EXCEEDED


def test_a_flood_of_attaches_is_bounded() -> None:
    peer = RawPeer(bounds=PeerBounds(max_links=5), accepts=False)
    peer.send(OPEN, BEGIN)
    peer.send(BEGIN, channel=1)
    for number in range(5):
        peer.send(attach(f"a{number}", handle=number))
    peer.send(attach("b", handle=1), channel=1)
    assert why(peer.answers()[-1]) == Condition.RESOURCE_LIMIT_EXCEEDED
    assert len(peer.of(AttachRequested)) == 5
    assert peer.connection.link_count == 5
    peer.send(DetachFrame(handle=0))
    peer.send(EndFrame(), BEGIN, attach("b", handle=1), channel=1)
    assert len(peer.of(AttachRequested)) == 6


def test_the_size_of_attaches_is_bounded_for_all_links_together() -> None:
    peer = RawPeer(accepts=False)
    peer.send(OPEN, BEGIN)
    filler = "n" * (MAX_AMQP_KEPT_FRAME_BYTES - 200)
    handle = 0
    answers: list[Composite] = []
    while not any(isinstance(answer, EndFrame) for answer in answers):
        peer.send(attach(f"{handle}{filler}", handle=handle))
        answers += peer.answers()
        handle += 1
        assert handle < 200
    assert why(answers[-1]) == Condition.RESOURCE_LIMIT_EXCEEDED
    assert 100 < handle < 200
    peer.send(EndFrame())
    assert peer.connection.kept_bytes == peer.connection.link_count == 0


def test_links_that_come_and_go_leave_nothing_behind() -> None:
    peer = linked()
    for number in range(20):
        peer.send(attach(f"l{number}", handle=1), transfer(number, handle=1))
        peer.send(DetachFrame(handle=1, closed=True))
        peer.send(BEGIN, attach(f"s{number}"), EndFrame(), channel=1)
    assert peer.connection.link_count == 1
    assert link_names(peer.connection) == 1
    assert len(list(peer.connection.sessions)) == 1


def test_ranges_cost_what_they_find_and_not_their_length() -> None:
    peer = RawPeer(is_client=True, max_unsettled=100_000)
    link = peer.connection.begin().attach_sender("a", sender_options())
    peer.send(OPEN, replace(BEGIN, remote_channel=0, incoming_window=50_000))
    peer.send(attach("a", role=RECEIVER, initial_delivery_count=None))
    credit = replace(FLOW, handle=0, delivery_count=0, link_credit=50_000)
    peer.send(replace(credit, incoming_window=50_000))
    for _ in range(10_000):
        link.send(b"")
    steps = 0

    class Counting(UnsettledDeliveries[SenderLink]):
        def take_range(self, first: int, last: int) -> list[tuple[int, SenderLink]]:
            nonlocal steps
            steps += len(self._numbers) - len([n for n in self._numbers if not first <= n <= last])
            return super().take_range(first, last)

    outcomes = link.session.outcomes
    counting = Counting()
    # the steps are counted, because their time is not a matter of the clock
    counting._numbers, counting.owners = outcomes._sent._numbers, outcomes._sent.owners
    outcomes._sent = counting
    for _ in range(50):
        middle = DispositionFrame(role=RECEIVER, first=1000, last=8999, settled=True)
        peer.send(middle, DispositionFrame(role=RECEIVER, first=0, last=2**31 - 1, state=ACCEPTED))
    assert steps == 10_000
    assert sum(len(report.deliveries) for report in peer.of(OutcomeReported)) == 10_000


def test_numbers_taken_one_by_one_do_not_pile_up() -> None:
    unsettled: UnsettledDeliveries[str] = UnsettledDeliveries()
    for number in range(10_000):
        unsettled.add(number, "link")
        if number >= 10:
            assert unsettled.take(number - 10) == "link"
            assert unsettled.take(number - 10) is None
    assert len(unsettled) == 10
    assert len(unsettled_numbers(unsettled)) < 200
    assert unsettled.take_range(9_990, 9_994) == [(n, "link") for n in range(9_990, 9_995)]
    unsettled.add(9_992, "again")
    assert unsettled.take_range(0, 10**9)[0] == (9_992, "again")
    assert 9_992 not in unsettled


def test_dispositions_about_nothing_do_nothing() -> None:
    peer = linked()
    for role in (RECEIVER, SENDER):
        for settled in (True, False):
            peer.send(
                DispositionFrame(role=role, first=3, last=99, settled=settled, state=ACCEPTED)
            )
    assert peer.events == []
    assert peer.answers() == []


def test_empty_parts_of_a_delivery_take_no_memory() -> None:
    peer = linked(incoming_window=2**20)
    part = frame(0, transfer(more=True).encode())
    peer.send_bytes(part * 100)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(50):
            peer.send_bytes(part * 100)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    assert peer.connection.incomplete_bytes == 0
