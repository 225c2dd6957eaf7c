"""Silence on a connection: who pings whom, and who is given up."""

from tests.unit.conversation_ends import SEND, WAITING, Client, Server, asked, codes, heads, packed
from twinbus.limits import NEVER_US, QUIET_US
from twinbus.protocol.frames import FrameKind
from twinbus.protocol.server_conversation import Phase


def test_each_side_answers_a_ping() -> None:
    server, client = Server(), Client()
    server.receive(packed(FrameKind.PING))
    client.receive(packed(FrameKind.PING))
    assert heads(server.written()) == heads(client.written()) == [[FrameKind.PONG]]


def test_a_client_pings_a_silent_server_and_then_gives_it_up() -> None:
    client = Client()
    _, caller = client.ask(WAITING)
    client.written()
    client.now = client.conversation.next_event
    client.tick()
    assert client.now == QUIET_US
    assert heads(client.written()) == [[FrameKind.PING]]
    client.now = client.conversation.next_event - 1
    client.tick()
    assert not caller.outcomes
    client.now += 1
    client.tick()
    assert codes(caller) == ["OperationTimeout"]
    assert client.conversation.next_event == NEVER_US


def test_a_pong_keeps_a_waiting_client_connected() -> None:
    client = Client()
    _, caller = client.ask(WAITING)
    for _ in range(5):
        client.now = client.conversation.next_event
        client.tick()
        client.now += 1
        client.receive(packed(FrameKind.PONG))
    assert not caller.outcomes
    assert client.conversation.ended is None


def test_a_server_pings_a_silent_client_that_waits_and_then_lets_it_go() -> None:
    server = Server()
    assert server.conversation.next_event == NEVER_US
    server.receive(asked(1, WAITING))
    server.now = server.conversation.next_event
    server.tick()
    assert heads(server.written()) == [[FrameKind.PING]]
    server.now = server.conversation.next_event
    server.tick()
    assert server.conversation.phase is Phase.ENDED
    assert not server.at_broker


def test_a_client_that_answers_pings_may_wait_for_long() -> None:
    server, client = Server(), Client()
    client.ask(WAITING)
    server.receive(client.written())
    for _ in range(5):
        server.now = client.now = server.conversation.next_event
        server.tick()
        client.receive(server.written())
        server.now = client.now = server.now + 1
        server.receive(client.written())
    assert server.numbers == [1]


def test_a_client_must_finish_a_frame_that_it_has_begun() -> None:
    server = Server()
    server.receive(asked(1, SEND)[:20])
    assert server.conversation.reader.filled == 20
    server.now = server.conversation.next_event
    server.tick()
    assert server.now == QUIET_US
    assert server.conversation.phase is Phase.ENDED
