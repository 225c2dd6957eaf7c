"""Tokens and keys of a connection: renewed, expired, revoked."""

from typing import Any

import pytest

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
    heads,
    packed,
    token,
)
from twinbus.limits import SECOND_US, TOKEN_GRACE_US
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind
from twinbus.protocol.keys import Claim
from twinbus.protocol.server_conversation import Phase


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
