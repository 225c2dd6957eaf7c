"""Both ends of a connection as state machines: bytes and `now` in, bytes and events out."""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conversation_ends import (
    EXPIRES_S,
    LOCKED,
    PEEK,
    SECRET,
    SEND,
    SOON,
    WAITING,
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
from tests.unit.properties import replayed
from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    NamespaceClosedError,
    ServerBusyError,
    error_of,
)
from twinbus.limits import (
    AUTHENTICATION_US,
    MAX_GREETING_BYTES,
    MAX_RECEIVE_BYTES,
    MAX_UNANSWERED_BYTES,
    MAX_UNREAD_BYTES,
    NEVER_US,
    QUIET_US,
    SECOND_US,
    TOKEN_GRACE_US,
    WIRE_VERSION,
)
from twinbus.message import DELIVERY_SCHEMA, BrokeredMessage
from twinbus.protocol import commands as c
from twinbus.protocol import server_conversation
from twinbus.protocol.frames import MAGIC, FrameKind
from twinbus.protocol.keys import Claim
from twinbus.protocol.server_conversation import (
    Phase,
)

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


# -- silence ---------------------------------------------------------------------------------------


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


# -- credit ----------------------------------------------------------------------------------------


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
    assert not conversation._open
    assert not conversation.has_deferred
    assert not conversation._unsent
    assert conversation.reply_bytes == conversation.request_bytes == 0


def test_a_reply_that_has_left_is_not_kept_while_later_ones_are_unread() -> None:
    server = Server()
    server.receive(asked(1, SOON) + asked(2, SOON))
    server.deliver(server.at_broker[0], LOCKED)
    server.deliver(server.at_broker[0], LOCKED)
    size = len(b"".join(server.conversation.take_outgoing()))
    server.conversation.note_buffered(size // 2 + 1)  # a byte of the first has not left
    assert len(server.conversation._unsent) == 2
    server.conversation.note_buffered(size // 2)
    assert [request.number for _, request, _ in server.conversation._unsent] == [2]
    server.apply(server.conversation.lose())
    assert [type(command) for command in server.undone] == [c.Settle]


def test_replies_that_hold_no_locks_are_not_kept() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, SEND))
    server.deliver(server.at_broker[0], LOCKED)
    server.deliver(server.at_broker[0], c.SendReceipt([1]))
    assert not server.conversation._unsent


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


# -- tokens and keys -------------------------------------------------------------------------------


def test_a_new_token_keeps_the_connection_open_for_requests() -> None:
    server, client = Server(), Client()
    client.conversation.present(token(expires_s=2 * EXPIRES_S))
    server.receive(client.written())
    server.now = EXPIRES_S * SECOND_US
    server.receive(asked(1, SEND))
    assert server.numbers == [1]


def test_a_request_with_an_expired_token_is_refused_and_the_connection_stays() -> None:
    server = Server()
    server.now = EXPIRES_S * SECOND_US
    server.receive(asked(1, SEND))
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "Unauthorized"]
    server.receive(packed(FrameKind.TOKEN, token(expires_s=2 * EXPIRES_S)) + asked(2, SEND))
    assert server.numbers == [2]


@pytest.mark.parametrize("bad", [token("another secret of 1 key"), "nonsense", 5, None])
def test_a_new_token_that_is_not_good_ends_the_connection(bad: Any) -> None:
    server = Server()
    server.receive(asked(1, WAITING))
    server.receive(packed(FrameKind.TOKEN, bad))
    assert server.conversation.phase is Phase.ENDED
    assert not server.at_broker


def test_a_request_that_waits_outlives_its_token_for_a_moment() -> None:
    server = Server()
    server.receive(asked(1, WAITING))
    server.now = EXPIRES_S * SECOND_US
    assert server.apply(server.conversation.check_admission(server.now)) == []
    server.now += TOKEN_GRACE_US - 1
    assert server.apply(server.conversation.check_admission(server.now)) == []
    server.now += 1
    server.apply(server.conversation.check_admission(server.now))
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "Unauthorized"]
    assert not server.at_broker
    assert [error.code for error in server.refusals] == ["Unauthorized"]


def test_a_token_that_is_renewed_within_the_grace_saves_requests_that_wait() -> None:
    server = Server()
    server.receive(asked(1, WAITING))
    server.now = EXPIRES_S * SECOND_US
    server.conversation.check_admission(server.now)
    server.receive(packed(FrameKind.TOKEN, token(expires_s=2 * EXPIRES_S)))
    server.now += 10 * TOKEN_GRACE_US
    assert server.conversation.check_admission(server.now) == []
    assert server.numbers == [1]


@pytest.mark.parametrize("claims", [(Claim.SEND,), None])
def test_requests_that_wait_end_at_once_when_their_key_is_revoked(
    claims: tuple[Claim, ...] | None,
) -> None:
    server = Server()
    server.receive(asked(1, WAITING) + asked(2, SOON))
    server.put_key(SECRET if claims else "another secret of 1 key", *(claims or ()))
    server.apply(server.conversation.check_admission(server.now))
    assert server.numbers == [2]
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "Unauthorized"]


def test_a_reply_to_a_wait_whose_key_was_revoked_is_refused_and_undone() -> None:
    server = Server()
    server.receive(asked(1, WAITING))
    server.put_key("another secret of 1 key")
    server.deliver(server.at_broker[0], LOCKED)
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "Unauthorized"]
    assert [type(command) for command in server.undone] == [c.Settle]


@pytest.mark.parametrize("claims", [(Claim.SEND,), None])
def test_a_request_that_waited_for_credit_is_refused_when_its_key_was_revoked(
    claims: tuple[Claim, ...] | None,
) -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, PEEK) + asked(3, SOON) + asked(4, SEND))
    assert server.numbers == [1, 2]
    server.put_key(SECRET if claims else "another secret of 1 key", *(claims or ()))
    server.deliver(server.at_broker[0], LOCKED)
    server.written()
    refused = [3] if claims else [3, 4]
    assert [head[:3] for head in heads(server.written())] == [
        [FrameKind.REFUSAL, number, "Unauthorized"] for number in refused
    ]
    assert server.numbers == ([2, 4] if claims else [2])
    assert len(server.refusals) == len(refused)
    server.deliver(server.at_broker[0], LOCKED)
    assert server.conversation.reply_bytes == server.conversation.unread_bytes


def test_a_request_that_waited_for_credit_is_refused_when_its_token_has_expired() -> None:
    server = Server()
    server.receive(asked(1, PEEK) + asked(2, PEEK) + asked(3, SOON))
    server.now = EXPIRES_S * SECOND_US
    server.deliver(server.at_broker[0], LOCKED)
    server.written()
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 3, "Unauthorized"]
    assert server.numbers == [2]
    assert server.conversation.request_bytes == server.at_broker[0].size


def test_a_command_beyond_the_claims_of_a_key_fails_alone() -> None:
    server = Server()
    server.receive(asked(1, c.ReadMeter()) + asked(2, SEND))
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "Unauthorized"]
    assert server.numbers == [2]


# -- any split of the bytes means the same ---------------------------------------------------------


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


CUTS = st.lists(st.integers(0, 2**16), max_size=12)
FRAMES_OF_CLIENT = st.lists(
    st.sampled_from(
        (
            *("ask", "ask", "wait", "wait", "withdraw", "withdraw last", "ping", "pong", "token"),
            *("unknown", "goodbye"),
        )
    ),
    max_size=12,
)


def stream_of_client(names: list[str]) -> bytes:
    frames: dict[str, Callable[[int], bytes]] = {
        "ask": lambda n: asked(n, SEND),
        "wait": lambda n: asked(n, WAITING),
        "unknown": lambda n: packed(FrameKind.ASK, n, "NoSuchCommand"),
        "withdraw": lambda _: packed(FrameKind.WITHDRAW, 1),
        "withdraw last": lambda n: packed(FrameKind.WITHDRAW, n),
        "ping": lambda _: packed(FrameKind.PING),
        "pong": lambda _: packed(FrameKind.PONG),
        "token": lambda _: packed(FrameKind.TOKEN, token(expires_s=2 * EXPIRES_S)),
        "goodbye": lambda _: packed(FrameKind.GOODBYE, "", "", {}),
    }
    data, number = hello(), 0
    for name in names:
        number += name in ("ask", "wait", "unknown")
        data += frames[name](number)
    return data


@replayed
@given(FRAMES_OF_CLIENT, CUTS)
def test_the_server_does_the_same_however_the_bytes_are_split(
    names: list[str], cuts: list[int]
) -> None:
    data = stream_of_client(names)
    unsplit, split = Server(is_greeted=False), Server(is_greeted=False)
    unsplit.receive(data)
    for piece in pieces_of(data, cuts):
        split.receive(piece)
    assert split.numbers == unsplit.numbers
    assert split.conversation.phase is unsplit.conversation.phase
    assert split.written() == unsplit.written()


@replayed
@given(st.permutations(range(6)), CUTS, st.booleans())
def test_the_client_does_the_same_however_the_bytes_are_split(
    order: list[int], cuts: list[int], ends: bool
) -> None:
    values = [LOCKED, c.SendReceipt([1, 2]), None, CommunicationError("x"), [1] * 99, "text"]
    data = packed(FrameKind.WELCOME, WIRE_VERSION, "namespace-1")
    for at in order:
        data += replied(at + 1, values[at]) + packed(FrameKind.PING if at % 2 else FrameKind.PONG)
    if ends:
        data += packed(FrameKind.GOODBYE, "Communication", "the server is stopping", {})
    seen = []
    for pieces in ([data], pieces_of(data, cuts)):
        client = Client()
        callers = [client.ask(SOON)[1] for _ in range(7)]
        client.written()
        for piece in pieces:
            client.receive(piece)
        outcomes = [[repr(outcome) for outcome in caller.outcomes] for caller in callers]
        seen.append((outcomes, client.written(), repr(client.conversation.ended)))
    assert seen[0] == seen[1]


@replayed
@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_make_a_conversation_raise(data: bytes, is_greeted: bool) -> None:
    server, client = Server(is_greeted=is_greeted), Client()
    client.ask(SOON)
    server.receive(data)
    client.receive(data or b"x")


@replayed
@given(st.lists(st.integers(0, 12) | st.text(max_size=3) | st.none(), min_size=1, max_size=6))
def test_no_frame_makes_a_conversation_raise(head: list[Any]) -> None:
    server, client, stranger = Server(), Client(), Server(is_greeted=False)
    _, caller = client.ask(SOON)
    server.receive(packed(*head))
    stranger.receive(MAGIC + packed(*head))
    client.receive(packed(*head))
    if client.conversation.ended is not None:
        assert len(caller.outcomes) == 1


def test_the_error_of_a_refusal_is_the_one_the_server_gave() -> None:
    client = Client()
    number, caller = client.ask(SOON)
    error = error_of("ServerBusy", "wait", {"retry_after_s": 10})
    client.receive(replied(number, error))
    assert isinstance(caller.outcomes[0], ServerBusyError)
    assert caller.outcomes[0].facts == {"retry_after_s": 10}


# -- defects that were found, each with its sentence ----------------------------------------------


def test_a_request_that_is_withdrawn_in_the_segment_it_came_with_never_reaches_the_broker() -> None:
    server = Server()
    server.receive(asked(1, WAITING) + packed(FrameKind.WITHDRAW, 1) + asked(2, WAITING))
    assert server.numbers == [2]
    (refusal,) = heads(server.written())
    assert refusal[:3] == [FrameKind.REFUSAL, 1, "Communication"]


def test_requests_that_are_withdrawn_in_one_read_are_withdrawn_together() -> None:
    server = Server()
    server.receive(asked(1, WAITING) + asked(2, WAITING) + asked(3, WAITING))
    [event] = server.receive(packed(FrameKind.WITHDRAW, 3) + packed(FrameKind.WITHDRAW, 1))
    assert [getattr(request, "number", 0) for request in event.requests] == [3, 1]
    assert server.numbers == [2]


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


@pytest.mark.parametrize("plain", [{"$": "deliveries", "at": 0, "size": 8}, {"$": "no such kind"}])
def test_a_reply_that_cannot_be_read_ends_its_own_request_too(plain: Any) -> None:
    client = Client()
    _, first = client.ask(SOON)
    _, second = client.ask(SOON)
    client.receive(packed(FrameKind.REPLY, 1, plain))
    assert codes(first) == codes(second) == ["Communication"]
    assert client.conversation.ended is not None


@pytest.mark.parametrize("fields", [[], [2], [2, 2], [2, 2, "token"]])
def test_a_hello_that_lacks_fields_is_refused(fields: list[Any]) -> None:
    server = Server(is_greeted=False)
    server.receive(MAGIC + packed(FrameKind.HELLO, *fields))
    (goodbye,) = heads(server.written())
    assert goodbye[:2] == [FrameKind.GOODBYE, "InvalidArgument"]


def test_a_reply_that_cannot_be_sent_is_answered_with_an_error() -> None:
    server = Server()
    server.receive(asked(1, SOON))
    server.deliver(server.at_broker[0], {"no value of the protocol": object()})
    assert heads(server.written())[0][:3] == [FrameKind.REFUSAL, 1, "InvalidArgument"]


def test_a_conversation_that_has_ended_counts_nothing() -> None:
    server = Server()
    server.receive(asked(1, SEND) + asked(2, PEEK) + asked(3, PEEK) + asked(4, PEEK))
    server.receive(b"")
    assert server.conversation.request_bytes == server.conversation.reply_bytes == 0
