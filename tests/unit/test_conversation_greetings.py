"""How a connection begins, and which frames end it."""

from typing import Any

import pytest

from tests.unit.conversation_ends import (
    LOCKED,
    SOON,
    Client,
    Server,
    asked,
    codes,
    heads,
    hello,
    packed,
    replied,
    token,
)
from twinbus.errors import CommunicationError, InvalidArgumentError
from twinbus.limits import AUTHENTICATION_US, MAX_GREETING_BYTES, WIRE_VERSION
from twinbus.protocol import commands as c
from twinbus.protocol.frames import MAGIC, FrameKind
from twinbus.protocol.server_conversation import Phase

# -- greeting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [(1, 9), (2, 2), (WIRE_VERSION, 2**62)])
def test_the_highest_version_that_both_sides_speak_is_used(first: int, last: int) -> None:
    server, client = Server(is_greeted=False), Client()
    server.receive(hello(first, last))
    client.receive(server.written())
    assert client.conversation.version == WIRE_VERSION


@pytest.mark.parametrize(("first", "last"), [(0, 1), (WIRE_VERSION + 1, 99), (5, 3), ("2", "2")])
def test_a_client_without_a_common_version_is_refused(first: Any, last: Any) -> None:
    server, client = Server(is_greeted=False), Client()
    _, caller = client.ask(SOON)
    server.receive(hello(first, last) + asked(1, SOON))
    client.receive(server.written())
    assert codes(caller) == ["InvalidArgument"]
    assert server.conversation.is_done
    assert not server.at_broker


def test_bytes_that_do_not_begin_with_the_magic_are_refused() -> None:
    server = Server(is_greeted=False)
    server.receive(b"TWIN")
    server.receive(b"SBUS")
    assert heads(server.written())[0][:2] == [FrameKind.GOODBYE, "InvalidArgument"]


@pytest.mark.parametrize("bad", ["", "nonsense", 7, token("another secret of 1 key")])
def test_a_connection_without_a_good_token_is_refused_and_noted(bad: Any) -> None:
    server = Server(is_greeted=False)
    server.receive(MAGIC + packed(FrameKind.HELLO, WIRE_VERSION, WIRE_VERSION, bad, ""))
    assert heads(server.written())[0][:2] == [FrameKind.GOODBYE, "Unauthorized"]
    assert [error.code for error in server.refusals] == ["Unauthorized"]


def test_a_connection_that_means_another_namespace_is_refused() -> None:
    server = Server(is_greeted=False)
    server.receive(hello(namespace_id="namespace-2"))
    assert heads(server.written())[0][:2] == [FrameKind.GOODBYE, "Unauthorized"]


def test_a_connection_for_which_there_is_no_room_is_refused_with_the_reason() -> None:
    server = Server(is_greeted=False)
    server.is_full = True
    server.receive(hello())
    assert heads(server.written())[0][:2] == [FrameKind.GOODBYE, "ServerBusy"]


def test_a_stranger_that_says_nothing_is_let_go() -> None:
    server = Server(is_greeted=False)
    server.receive(MAGIC)
    server.now = server.conversation.next_event
    assert server.now == AUTHENTICATION_US
    server.tick()
    assert server.conversation.phase is Phase.ENDED


def test_a_stranger_may_not_make_the_server_keep_much() -> None:
    server = Server(is_greeted=False)
    server.receive(MAGIC + (MAX_GREETING_BYTES + 1).to_bytes(4, "little") + bytes(4))
    assert server.conversation.is_done


@pytest.mark.parametrize("kind", [FrameKind.ASK, FrameKind.PING, FrameKind.TOKEN])
def test_a_connection_begins_with_hello(kind: FrameKind) -> None:
    server = Server(is_greeted=False)
    server.receive(MAGIC + packed(kind, 1, "x"))
    assert server.conversation.is_done


@pytest.mark.parametrize("fields", [[], [2], [2, 2], [2, 2, "token"]])
def test_a_hello_that_lacks_fields_is_refused(fields: list[Any]) -> None:
    server = Server(is_greeted=False)
    server.receive(MAGIC + packed(FrameKind.HELLO, *fields))
    (goodbye,) = heads(server.written())
    assert goodbye[:2] == [FrameKind.GOODBYE, "InvalidArgument"]


# -- frames that must not come ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 11, 2**40, -1, FrameKind.WELCOME, FrameKind.REPLY])
def test_a_frame_that_no_client_sends_ends_the_connection_at_the_server(kind: int) -> None:
    server = Server()
    server.receive(packed(kind, 1, "x"))
    assert heads(server.written())[0][:2] == [FrameKind.GOODBYE, "InvalidArgument"]
    assert server.receive(asked(1, SOON)) == []


@pytest.mark.parametrize("kind", [0, 11, 2**40, -1, FrameKind.HELLO, FrameKind.ASK])
def test_a_frame_that_no_server_sends_ends_the_connection_at_the_client(kind: int) -> None:
    client = Client()
    _, caller = client.ask(SOON)
    client.receive(packed(kind, 1, "x"))
    assert codes(caller) == ["Communication"]
    with pytest.raises(CommunicationError):
        client.ask(SOON)


@pytest.mark.parametrize("number", [0, 1, -5, 2**63, "2", None, 1.5])
def test_request_ids_ascend(number: Any) -> None:
    server = Server()
    server.receive(asked(1, SOON))
    server.receive(packed(FrameKind.ASK, number, "ReadMeter"))
    assert server.conversation.is_done


def test_request_ids_may_leave_gaps() -> None:
    server = Server()
    server.receive(asked(7, SOON) + asked(2**62, SOON))
    assert server.numbers == [7, 2**62]


@pytest.mark.parametrize("number", [2, 0, "1", None, [1]])
def test_a_reply_to_no_request_ends_the_connection(number: Any) -> None:
    client = Client()
    _, caller = client.ask(SOON)
    client.receive(packed(FrameKind.REPLY, number, None))
    assert codes(caller) == ["Communication"]


def test_a_command_that_is_not_understood_fails_alone() -> None:
    server = Server()
    server.receive(packed(FrameKind.ASK, 1, "NoSuchCommand") + asked(2, SOON))
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "InvalidArgument"]
    assert server.numbers == [2]


def test_a_command_that_cannot_be_sent_harms_nobody_else() -> None:
    client = Client()
    with pytest.raises(InvalidArgumentError):
        client.ask(c.Command())
    number, caller = client.ask(SOON)
    client.receive(replied(number, LOCKED))
    assert number == 1
    assert len(caller.outcomes) == 1
