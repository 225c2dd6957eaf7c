"""Connections and sessions: how they begin, go on and end."""

import pytest

from tests.unit.amqp.ends import (
    BEGIN,
    OPEN,
    Pair,
    RawPeer,
    attach,
    linked_receiver,
    linked_sender,
    sender_options,
)
from twinbus.amqp.conditions import Condition
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import (
    AttachRequested,
    ConnectionClosed,
    LinkDetached,
    Opened,
    SessionBegun,
    SessionEnded,
)
from twinbus.amqp.frames import AMQP_HEADER, HEARTBEAT, frame
from twinbus.amqp.options import ConnectionOptions
from twinbus.amqp.performatives import (
    RECEIVER,
    AttachFrame,
    BeginFrame,
    CloseFrame,
    DetachFrame,
    EndFrame,
    ErrorCondition,
    FlowFrame,
    OpenFrame,
)
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.limits import (
    AMQP_CLOSE_US,
    AMQP_IDLE_US,
    AMQP_WRITTEN_FRAME_BYTES,
    MAX_UNREAD_BYTES,
    NEVER_US,
    SECOND_US,
)

WHY = ErrorCondition(condition="amqp:not-allowed", description="because", info={})


# -- opening and closing ---------------------------------------------------------------------------


def test_each_end_reports_who_its_peer_is() -> None:
    pair = Pair(
        server={"properties": {"product": "twinbus"}, "max_frame_bytes": 4096},
        client={"offered_capabilities": ("a", "b"), "idle_timeout_us": 30 * SECOND_US},
    )
    pair.run()
    peer = pair.server.take(Opened).peer
    assert (peer.container_id, peer.hostname) == ("client", "here")
    assert peer.offered_capabilities == ("a", "b")
    assert peer.idle_time_out == 30_000
    here = pair.client.take(Opened).peer
    assert (here.container_id, here.max_frame_size) == ("server", 4096)
    assert here.properties == {"product": "twinbus"}


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_open_begin_and_attach_may_come_at_once_or_in_pieces(pieces: int) -> None:
    peer = RawPeer()
    data = b"".join(
        frame(channel, item.encode())
        for channel, item in ((0, OPEN), (5, BEGIN), (5, attach("a")), (5, attach("b", handle=3)))
    )
    step = pieces or len(data)
    for at in range(0, len(data), step):
        peer.send_bytes(data[at : at + step])
    kinds = [type(event) for event in peer.events]
    assert kinds == [Opened, SessionBegun, AttachRequested, AttachRequested]
    _, begun, first, *_ = peer.answers()
    assert begun == BeginFrame(
        remote_channel=5,
        next_outgoing_id=0,
        incoming_window=2048,
        outgoing_window=2048,
        handle_max=255,
    )
    assert isinstance(first, AttachFrame)
    assert (first.name, first.role) == ("a", RECEIVER)


@pytest.mark.parametrize("closes", ["client", "server"])
def test_either_end_closes_and_both_report_the_reason(closes: str) -> None:
    pair = Pair()
    linked_sender(pair)
    ends = {"client": pair.client, "server": pair.server}
    pair.client.events.clear()
    pair.server.events.clear()
    ends.pop(closes)
    (second,) = ends.values()
    mine = pair.client if closes == "client" else pair.server
    mine.connection.close(0, WHY)
    pair.run()
    for end in (mine, second):
        assert [type(event) for event in end.events] == [
            LinkDetached,
            SessionEnded,
            ConnectionClosed,
        ]
        assert end.connection.is_done
        assert end.connection.next_event == NEVER_US
    assert second.take(ConnectionClosed) == ConnectionClosed(WHY, is_peers=True)
    assert mine.take(ConnectionClosed) == ConnectionClosed(None, is_peers=False)


def test_a_connection_that_is_lost_reports_everything_once() -> None:
    pair = Pair()
    linked_sender(pair)
    pair.server.events.clear()
    events = pair.server.connection.receive(b"", 0)
    assert [type(event) for event in events] == [LinkDetached, SessionEnded, ConnectionClosed]
    assert pair.server.connection.lose() == []
    assert pair.server.connection.is_done
    assert not pair.server.connection.has_outgoing


def test_frames_after_our_close_are_dropped_until_the_peer_closes() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN)
    peer.events.clear()
    peer.connection.close(0)
    peer.send(attach())
    assert peer.events == []
    assert not peer.connection.is_done
    peer.send(CloseFrame())
    assert [type(event) for event in peer.events] == [SessionEnded, ConnectionClosed]
    assert peer.connection.is_done


def test_a_peer_that_does_not_answer_a_close_is_not_waited_for() -> None:
    peer = RawPeer()
    peer.send(OPEN)
    peer.connection.close(7)
    assert peer.connection.next_event == 7 + AMQP_CLOSE_US
    assert not peer.connection.is_done
    (closed,) = peer.connection.tick(7 + AMQP_CLOSE_US)
    assert isinstance(closed, ConnectionClosed)
    assert peer.connection.is_done


def test_a_server_that_closes_before_open_opens_first() -> None:
    peer = RawPeer()
    peer.answers()
    peer.connection.close(0, WHY)
    opened, closed = peer.answers()
    assert isinstance(opened, OpenFrame)
    assert closed == CloseFrame(error=WHY)
    peer.send(OPEN, CloseFrame())
    assert [type(event) for event in peer.events] == [ConnectionClosed]


def test_an_end_that_closes_before_the_header_only_hangs_up() -> None:
    connection = AmqpConnection(ConnectionOptions("server"), 0)
    connection.close(0, WHY)
    assert connection.is_done
    assert connection.take_outgoing(0) == []
    assert [type(event) for event in connection.take_events()] == [ConnectionClosed]


def test_an_error_that_does_not_fit_a_frame_of_the_peer_is_shortened() -> None:
    peer = RawPeer()
    peer.send(OpenFrame(container_id="peer", max_frame_size=512))
    peer.answers()
    peer.connection.close(0, ErrorCondition(condition="amqp:not-allowed", description="x" * 600))
    assert peer.answers() == [CloseFrame(error=ErrorCondition(condition="amqp:not-allowed"))]


def test_calls_after_the_end_raise_or_do_nothing() -> None:
    pair = Pair()
    link, _ = linked_sender(pair)
    pair.client.connection.close(0)
    with pytest.raises(InvalidOperationError, match="the connection is closed"):
        pair.begin()
    pair.run()
    with pytest.raises(InvalidOperationError, match="the session is ended"):
        link.session.attach_sender("other", sender_options())
    link.detach()
    link.session.end()
    pair.client.connection.close(0)
    assert not link.may_send
    assert not pair.client.connection.has_outgoing


def test_impossible_options_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least 512"):
        ConnectionOptions("a", max_frame_bytes=511)
    with pytest.raises(InvalidArgumentError, match="max_sessions"):
        ConnectionOptions("a", max_sessions=65537)


# -- time ------------------------------------------------------------------------------------------


def test_a_peer_that_wants_heartbeats_gets_them_at_half_its_time_out() -> None:
    peer = RawPeer(idle_timeout_us=0)
    peer.send(OpenFrame(container_id="peer", idle_time_out=10_000))
    peer.answers()
    connection = peer.connection
    assert connection.next_event == 5 * SECOND_US
    assert connection.tick(5 * SECOND_US - 1) == []
    assert not connection.has_outgoing
    connection.tick(5 * SECOND_US)
    assert connection.take_outgoing(5 * SECOND_US) == [HEARTBEAT]
    assert connection.next_event == 10 * SECOND_US


def test_frames_count_as_heartbeats_and_none_piles_up_for_a_peer_that_does_not_read() -> None:
    peer = RawPeer(idle_timeout_us=0)
    peer.send(OpenFrame(container_id="peer", idle_time_out=10_000), BEGIN)
    connection = peer.connection
    connection.take_outgoing(3 * SECOND_US)
    assert connection.next_event == 8 * SECOND_US
    connection.note_buffered(100)
    for second in range(8, 100, 5):
        connection.tick(second * SECOND_US)
    assert not connection.has_outgoing
    connection.note_buffered(0)
    for second in range(100, 200, 5):
        connection.tick(second * SECOND_US)
    assert connection.take_outgoing(200 * SECOND_US) == [HEARTBEAT]


def test_a_silent_peer_is_let_go_after_twice_the_time_that_our_open_says() -> None:
    peer = RawPeer()
    peer.send(OPEN)
    (opened,) = peer.answers()
    assert isinstance(opened, OpenFrame)
    assert opened.idle_time_out == AMQP_IDLE_US // 1000
    peer.send_bytes(HEARTBEAT, now=100)
    due = 100 + 2 * AMQP_IDLE_US
    assert peer.connection.next_event == due
    assert peer.connection.tick(due - 1) == []
    (closed,) = peer.connection.tick(due)
    assert isinstance(closed, ConnectionClosed)
    (answer,) = peer.answers()
    assert isinstance(answer, CloseFrame)
    assert answer.error is not None
    assert answer.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
    assert not peer.connection.is_done
    peer.connection.tick(due + AMQP_CLOSE_US)
    assert peer.connection.is_done


def test_nothing_is_due_where_neither_end_has_a_time_out() -> None:
    peer = RawPeer(idle_timeout_us=0)
    peer.send(OPEN)
    assert peer.connection.next_event == NEVER_US


# -- reading and writing ---------------------------------------------------------------------------


def test_a_peer_that_does_not_read_is_not_read_either() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN)
    connection = peer.connection
    connection.take_outgoing(0)
    assert connection.unread_bytes == 0
    asking = FlowFrame(incoming_window=9, next_outgoing_id=0, outgoing_window=9, echo=True)
    peer.send(asking)
    assert 0 < connection.unread_bytes < 100
    assert connection.may_read
    connection.note_buffered(MAX_UNREAD_BYTES)
    assert not connection.may_read
    connection.note_buffered(0)
    assert connection.may_read


def test_a_client_holds_frames_until_it_knows_how_large_they_may_be() -> None:
    pair = Pair()
    connection = pair.client.connection
    pair.begin()
    assert len(b"".join(connection.take_outgoing(0))) < 100
    connection.receive(AMQP_HEADER, 0)
    assert not connection.has_outgoing
    connection.receive(frame(0, OPEN.encode()), 0)
    assert connection.has_outgoing


def test_an_answer_that_does_not_fit_a_frame_of_the_peer_ends_the_connection() -> None:
    peer = RawPeer()
    peer.send(OpenFrame(container_id="peer", max_frame_size=512), BEGIN, attach("n" * 600))
    assert isinstance(peer.answers()[-1], CloseFrame)
    events = peer.events + peer.connection.take_events()
    assert [type(event) for event in events[-3:]] == [LinkDetached, SessionEnded, ConnectionClosed]
    (closed,) = [event for event in events if isinstance(event, ConnectionClosed)]
    assert closed.error is not None
    assert closed.error.condition == Condition.FRAME_SIZE_TOO_SMALL


def test_no_frame_is_larger_than_our_own_bound() -> None:
    pair = Pair(client={"max_frame_bytes": 2**32 - 1})
    link, second = linked_receiver(pair, max_message_bytes=0)
    link.grant(1)
    pair.run()
    assert pair.server.connection.peer_frame_bytes == AMQP_WRITTEN_FRAME_BYTES
    second.send(bytes(3 * AMQP_WRITTEN_FRAME_BYTES))
    pair.run()
    assert pair.server.watch.transfers == 4


# -- sessions --------------------------------------------------------------------------------------


def test_sessions_come_and_go_and_channels_are_used_again() -> None:
    pair = Pair()
    first, second = pair.begin(), pair.begin()
    pair.run()
    assert [event.session.channel for event in pair.client.of(SessionBegun)] == [0, 1]
    assert len(pair.server.of(SessionBegun)) == 2
    pair.client.events.clear()
    first.end(WHY)
    pair.run()
    assert pair.server.of(SessionEnded)[0].error == WHY
    assert pair.client.take(SessionEnded).session is first
    assert pair.begin().channel == 0
    pair.run()
    assert second.channel == 1
    assert len(list(pair.server.connection.sessions)) == 2


def test_the_server_ends_a_session_with_its_links() -> None:
    pair = Pair()
    link, _ = linked_sender(pair)
    pair.client.events.clear()
    (session,) = pair.server.connection.sessions
    session.end(WHY)
    pair.run()
    assert pair.client.events == [
        LinkDetached(link, WHY, is_closed=True),
        SessionEnded(link.session, WHY),
    ]
    assert [type(event) for event in pair.server.events[-2:]] == [LinkDetached, SessionEnded]


def test_a_session_that_ends_before_it_was_answered_ends_when_it_is() -> None:
    pair = Pair()
    session = pair.begin()
    session.attach_sender("a", sender_options())
    session.end()
    pair.run()
    assert [type(event) for event in pair.client.events] == [Opened, LinkDetached, SessionEnded]
    assert list(pair.client.connection.sessions) == []
    assert list(pair.server.connection.sessions) == []


def test_frames_on_a_channel_that_has_ended_are_dropped() -> None:
    # SDKs end their session before they detach its links.
    peer = RawPeer()
    peer.send(OPEN, BEGIN, attach(), EndFrame())
    peer.events.clear()
    peer.answers()
    peer.send(DetachFrame(handle=0, closed=True), EndFrame())
    assert peer.events == []
    assert peer.answers() == []
    peer.send(BEGIN)
    assert [type(event) for event in peer.events] == [SessionBegun]


def test_either_end_keeps_to_the_number_of_sessions_of_the_other() -> None:
    pair = Pair(server={"max_sessions": 2})
    pair.run()
    pair.begin()
    pair.begin()
    with pytest.raises(InvalidOperationError, match="the maximum"):
        pair.begin()
    pair.run()
    assert len(pair.server.of(SessionBegun)) == 2


def test_either_end_keeps_to_the_number_of_links_of_the_other() -> None:
    pair = Pair(server={"max_session_links": 2})
    session = pair.begin()
    pair.run()
    session.attach_sender("a", sender_options())
    session.attach_receiver("a", sender_options())
    with pytest.raises(InvalidOperationError, match="at most 2 links"):
        session.attach_sender("b", sender_options())
    with pytest.raises(InvalidOperationError, match="the connection has a link 'a'"):
        pair.begin().attach_sender("a", sender_options())


def test_a_flow_is_answered_when_the_peer_asks_for_it() -> None:
    peer = RawPeer()
    peer.send(OPEN, BEGIN)
    peer.answers()
    peer.send(FlowFrame(incoming_window=5, next_outgoing_id=0, outgoing_window=5, echo=True))
    assert peer.answers() == [
        FlowFrame(
            next_incoming_id=0, incoming_window=2048, next_outgoing_id=0, outgoing_window=2048
        )
    ]
