"""Credit of a connection: commands wait while replies are not read, and everything has a bound."""

import pytest

from tests.unit.conversation_ends import (
    LOCKED,
    PEEK,
    SEND,
    SOON,
    WAITING,
    Server,
    asked,
    heads,
    packed,
)
from twinbus.errors import CommunicationError
from twinbus.limits import MAX_RECEIVE_BYTES, MAX_UNANSWERED_BYTES, MAX_UNREAD_BYTES
from twinbus.message import BrokeredMessage
from twinbus.protocol import commands as c
from twinbus.protocol import server_conversation
from twinbus.protocol.frames import FrameKind


def test_commands_that_fetch_wait_while_replies_are_not_read() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, PEEK) + asked(3, PEEK) + asked(4, SEND))
    assert server.numbers == [1, 2]
    server.deliver(server.at_broker[0], LOCKED)
    server.conversation.note_buffered(MAX_RECEIVE_BYTES)  # the client does not read
    assert server.conversation.balance(server.now) == []
    server.written()
    assert server.numbers == [2, 3, 4]


def test_one_reply_may_be_under_way_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_conversation, "MAX_UNREAD_BYTES", 1)
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, PEEK))
    assert server.numbers == [1]
    server.deliver(server.at_broker[0], LOCKED)
    server.written()
    assert server.numbers == [2]


def test_a_client_that_does_not_read_its_replies_is_not_read() -> None:
    server = Server()
    server.conversation.note_buffered(MAX_UNREAD_BYTES)
    assert server.conversation.may_read
    server.conversation.note_buffered(MAX_UNREAD_BYTES + 1)
    assert not server.conversation.may_read
    server.conversation.note_buffered(0)
    assert server.conversation.may_read


def test_a_client_is_not_read_while_too_much_is_unanswered() -> None:
    server = Server()
    large = c.Send("orders", [BrokeredMessage(bytes(MAX_UNANSWERED_BYTES))])
    server.receive(asked(1, large) + asked(2, SEND))
    assert server.numbers == [1, 2]
    assert not server.conversation.may_read
    server.deliver(server.at_broker[0], c.SendReceipt([1]))
    assert server.conversation.may_read


def test_a_connection_has_a_bound_of_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_conversation, "MAX_OPEN_REQUESTS", 2)
    server = Server()
    server.receive(asked(1, WAITING))
    server.receive(asked(2, WAITING))
    server.receive(asked(3, SOON))
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 3, "ServerBusy"]


def test_the_bookkeeping_of_a_conversation_returns_to_zero() -> None:
    server = Server()
    server.receive(b"".join(asked(n, (PEEK, SEND, WAITING)[n % 3]) for n in range(1, 10)))
    while server.at_broker:
        server.deliver(server.at_broker[0], CommunicationError("x"))
        server.written()
    conversation = server.conversation
    assert not conversation.open_requests
    assert not conversation.has_deferred
    assert not conversation.unsent_requests
    assert conversation.reply_bytes == conversation.request_bytes == 0


def test_a_reply_that_has_left_is_not_kept_while_later_ones_are_unread() -> None:
    server = Server()
    server.receive(asked(1, SOON) + asked(2, SOON))
    server.deliver(server.at_broker[0], LOCKED)
    server.deliver(server.at_broker[0], LOCKED)
    size = len(b"".join(server.conversation.take_outgoing()))
    server.conversation.note_buffered(size // 2 + 1)  # a byte of the first has not left
    assert len(server.conversation.unsent_requests) == 2
    server.conversation.note_buffered(size // 2)
    assert [request.number for request in server.conversation.unsent_requests] == [2]
    server.apply(server.conversation.lose())
    assert [type(command) for command in server.undone] == [c.Settle]


def test_replies_that_hold_no_locks_are_not_kept() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, SEND))
    server.deliver(server.at_broker[0], LOCKED)
    server.deliver(server.at_broker[0], c.SendReceipt([1]))
    assert not server.conversation.unsent_requests


def test_a_conversation_without_a_connection_keeps_no_bytes() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, SEND)[:-1])
    server.deliver(server.at_broker[0], LOCKED)
    assert server.conversation.unread_bytes
    assert server.conversation.reader.filled
    server.conversation.lose()
    assert not server.conversation.unread_bytes
    assert not server.conversation.has_outgoing
    assert not server.conversation.reader.filled


def test_a_request_that_is_withdrawn_while_it_waits_for_credit_never_reaches_the_broker() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, PEEK) + asked(3, PEEK) + asked(4, WAITING))
    assert server.numbers == [1, 2]
    server.receive(packed(FrameKind.WITHDRAW, 4))
    server.deliver(server.at_broker[0], LOCKED)
    server.deliver(server.at_broker[0], LOCKED)
    server.written()
    assert server.numbers == [3]


def test_a_client_that_sent_goodbye_gets_the_replies_of_requests_that_waited_for_credit() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, PEEK) + asked(3, PEEK))
    server.receive(packed(FrameKind.GOODBYE, "", "", {}))
    while server.at_broker:
        assert not server.conversation.is_done
        server.deliver(server.at_broker[0], LOCKED)
        server.written()
    assert server.conversation.is_done


def test_a_conversation_that_has_ended_counts_nothing() -> None:
    server = Server()
    server.receive(asked(1, SEND) + asked(2, PEEK) + asked(3, PEEK) + asked(4, PEEK))
    server.receive(b"")
    assert server.conversation.request_bytes == server.conversation.reply_bytes == 0
