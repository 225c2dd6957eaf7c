"""Replies: each finds its request, in any order, until one side gives up or the connection ends."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from tests.unit.conversation_ends import (
    LOCKED,
    SEND,
    SOON,
    WAITING,
    Client,
    Server,
    asked,
    codes,
    heads,
    packed,
    replied,
)
from twinbus.errors import CommunicationError, NamespaceClosedError, ServerBusyError, error_of
from twinbus.limits import NEVER_US, SECOND_US
from twinbus.message import DELIVERY_SCHEMA
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind

# -- replies ---------------------------------------------------------------------------------------


def test_replies_find_their_requests_in_any_order() -> None:
    server, client = Server(), Client()
    callers = [client.ask(SOON)[1] for _ in range(3)]
    server.receive(client.written())
    for at, text in ((2, "c"), (0, "a"), (0, "b")):
        request = server.at_broker[at]
        server.deliver(request, CommunicationError(text))
    client.receive(server.written())
    assert [caller.outcomes[0].text for caller in callers] == ["a", "b", "c"]
    assert client.conversation.next_event == NEVER_US


def test_a_goodbye_of_the_server_ends_every_request_with_its_reason() -> None:
    server, client = Server(), Client()
    callers = [client.ask(SOON)[1] for _ in range(2)]
    server.apply(server.conversation.end(CommunicationError("the server is stopping")))
    client.receive(server.written())
    assert [caller.outcomes[0].text for caller in callers] == ["the server is stopping"] * 2


def test_a_server_that_hangs_up_ends_every_request() -> None:
    client = Client()
    _, caller = client.ask(SOON)
    client.receive(b"")
    client.receive(replied(1, LOCKED))
    assert codes(caller) == ["Communication"]


def test_the_error_of_a_refusal_is_the_one_the_server_gave() -> None:
    client = Client()
    number, caller = client.ask(SOON)
    error = error_of("ServerBusy", "wait", {"retry_after_s": 10})
    client.receive(replied(number, error))
    assert isinstance(caller.outcomes[0], ServerBusyError)
    assert caller.outcomes[0].facts == {"retry_after_s": 10}


@pytest.mark.parametrize("plain", [{"$": "deliveries", "at": 0, "size": 8}, {"$": "no such kind"}])
def test_a_reply_that_cannot_be_read_ends_its_own_request_too(plain: Any) -> None:
    client = Client()
    _, first = client.ask(SOON)
    _, second = client.ask(SOON)
    client.receive(packed(FrameKind.REPLY, 1, plain))
    assert codes(first) == codes(second) == ["Communication"]
    assert client.conversation.ended is not None


def test_a_reply_that_cannot_be_sent_is_answered_with_an_error() -> None:
    server = Server()
    server.receive(asked(1, SOON))
    server.deliver(server.at_broker[0], {"no value of the protocol": object()})
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "InvalidArgument"]


# -- deadlines and giving up -----------------------------------------------------------------------


def test_a_request_ends_at_its_deadline_and_others_go_on() -> None:
    client = Client()
    _, patient = client.ask(WAITING)
    client.now = 1
    client.receive(packed(FrameKind.PONG))
    client.now = 0
    _, hasty = client.ask(SOON, deadline=5 * SECOND_US)
    client.now = client.conversation.next_event
    client.tick()
    assert client.now == 5 * SECOND_US
    assert codes(hasty) == ["OperationTimeout"]
    assert not patient.outcomes
    client.receive(replied(2, LOCKED))
    assert len(hasty.outcomes) == 1


def test_a_server_that_says_nothing_until_a_deadline_is_given_up() -> None:
    client = Client()
    _, patient = client.ask(WAITING)
    _, hasty = client.ask(SOON, deadline=SECOND_US)
    client.now = SECOND_US
    client.tick()
    assert codes(hasty) == codes(patient) == ["OperationTimeout"]
    assert client.conversation.ended is not None


def test_giving_up_a_request_that_waits_withdraws_it() -> None:
    server, client = Server(), Client()
    number, caller = client.ask(WAITING)
    server.receive(client.written())
    client.conversation.give_up(number)
    client.conversation.give_up(number)
    assert not client.conversation.has_pending
    server.receive(client.written())
    assert not server.at_broker
    client.receive(server.written())
    assert not caller.outcomes
    assert client.conversation.next_event == NEVER_US


def test_giving_up_a_request_that_does_not_wait_sends_nothing() -> None:
    client = Client()
    number, _ = client.ask(SEND)
    client.written()
    client.conversation.give_up(number)
    assert not client.conversation.has_outgoing


MOMENT = datetime(2030, 1, 1, tzinfo=UTC)
SESSION = c.SessionLock("s", UUID(int=5))


@pytest.mark.parametrize(
    ("command", "value", "undo"),
    [
        (WAITING, LOCKED, c.Settle),
        (SOON, LOCKED, c.Settle),
        (c.AcceptSession("carts"), c.SessionGrant(SESSION, MOMENT), c.ReleaseSession),
        (c.LeaseRange("backlog", "me", 9), c.RangeLease("me", 7, 1, 2, 2, 20, MOMENT), None),
    ],
)
def test_locks_of_a_reply_that_comes_after_giving_up_are_given_back(
    command: c.Command[Any], value: Any, undo: type | None
) -> None:
    server, client = Server(), Client()
    number, caller = client.ask(command)
    client.conversation.give_up(number)
    client.written()
    client.receive(replied(number, value))
    assert not caller.outcomes
    server.receive(asked(1, command) + client.written())
    assert isinstance(server.at_broker[-1].command, undo or c.ReleaseRange)


@pytest.mark.parametrize(
    "value", [DELIVERY_SCHEMA.empty_table().to_batches(), CommunicationError("x")]
)
def test_a_late_reply_without_locks_is_dropped(value: Any) -> None:
    client = Client()
    number, _ = client.ask(WAITING)
    client.conversation.give_up(number)
    client.written()
    client.receive(replied(number, value))
    assert not client.conversation.has_outgoing


# -- a connection that ends at the server ----------------------------------------------------------


def test_locks_of_a_reply_that_has_not_left_are_given_back() -> None:
    server = Server()
    server.receive(asked(1, SOON))
    server.deliver(server.at_broker[0], LOCKED)
    server.receive(b"")
    assert [type(command) for command in server.undone] == [c.Settle]
    assert server.undone[0].disposition is c.Disposition.RELEASE


def test_locks_of_a_reply_that_has_left_stay_with_the_client() -> None:
    server = Server()
    server.receive(asked(1, SOON))
    server.deliver(server.at_broker[0], LOCKED)
    server.written()
    server.receive(b"")
    assert not server.undone


def test_a_reply_to_a_client_that_is_gone_is_undone_and_its_waits_are_withdrawn() -> None:
    server = Server()
    server.receive(asked(1, SOON) + asked(2, WAITING))
    server.receive(b"")
    assert server.numbers == [1]
    server.deliver(server.at_broker[0], LOCKED)
    assert [type(command) for command in server.undone] == [c.Settle]
    assert server.conversation.next_event == NEVER_US


def test_a_client_that_says_goodbye_gets_its_replies_and_its_waits_end() -> None:
    server, client = Server(), Client()
    _, sender = client.ask(SEND)
    _, waiter = client.ask(WAITING)
    client.conversation.say_goodbye()
    server.receive(client.written())
    assert server.numbers == [1]
    assert not server.conversation.is_done
    server.deliver(server.at_broker[0], c.SendReceipt([5]))
    client.receive(server.written())
    assert server.conversation.is_done
    assert sender.outcomes == [c.SendReceipt([5])]
    for outcome in client.conversation.end(NamespaceClosedError("closed")):
        outcome.deliver()
    assert codes(waiter) == ["NamespaceClosed"]
    assert server.receive(asked(3, SEND)) == []


def test_requests_that_are_withdrawn_in_one_read_are_withdrawn_together() -> None:
    server = Server()
    server.receive(asked(1, WAITING) + asked(2, WAITING) + asked(3, WAITING))
    [event] = server.receive(packed(FrameKind.WITHDRAW, 3) + packed(FrameKind.WITHDRAW, 1))
    assert [getattr(request, "number", 0) for request in event.requests] == [3, 1]
    assert server.numbers == [2]


def test_a_request_that_is_withdrawn_in_the_segment_it_came_with_never_reaches_the_broker() -> None:
    server = Server()
    server.receive(asked(1, WAITING) + packed(FrameKind.WITHDRAW, 1) + asked(2, WAITING))
    assert server.numbers == [2]
    (refusal,) = heads(server.written())
    assert refusal[:3] == [FrameKind.REFUSAL, 1, "Communication"]
