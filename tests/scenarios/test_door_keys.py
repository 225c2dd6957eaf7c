"""Requests that wait at a door end with their key, their claim or their token."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.scenarios.entrance import LARGE, QUEUE, Entrance, conversation_of, fill
from tests.soak.bad_bytes_tools import Exchange, framed, frames_of
from tests.waiting import until
from twinbus import BrokeredMessage, Claim, SharedAccessKey
from twinbus.errors import UnauthorizedError
from twinbus.limits import SECOND_US
from twinbus.protocol import server_conversation
from twinbus.protocol.commands import (
    DeleteKey,
    GetRuntimeProperties,
    Peek,
    PutKey,
    Receive,
    ReceiveMode,
    Send,
)
from twinbus.protocol.frames import FrameKind

pytestmark = pytest.mark.timeout(60)


LONG = timedelta(hours=1)
POLL = Receive(QUEUE, wait=LONG)


def parked(entrance: Entrance, key: SharedAccessKey, **options: Any) -> Exchange:
    """Return a connection whose receive waits at the broker."""
    before = entrance.namespace.snapshot().open_receives
    exchange = entrance.connect(key, **options)
    exchange.write(frames_of(POLL))
    until(lambda: entrance.namespace.snapshot().open_receives == before + 1)
    return exchange


def test_a_parked_receive_ends_when_its_key_is_deleted(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    exchange = parked(entrance, entrance.key("key", Claim.LISTEN))
    with entrance.client() as client:
        client.ask(DeleteKey("key"))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)
    assert entrance.namespace.snapshot().open_receives == 0


def test_a_parked_receive_ends_when_its_secret_is_replaced(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    exchange = parked(entrance, key)
    entrance.namespace.ask(PutKey(replace(key, primary="another secret for those who know")))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)


def test_a_parked_receive_ends_when_its_claim_is_taken_away(enter: Callable[..., Entrance]) -> None:
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN, Claim.SEND)
    exchange = parked(entrance, key)
    entrance.namespace.ask(PutKey(replace(key, claims=(Claim.SEND,))))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)


def test_a_parked_receive_ends_when_its_token_expires(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_conversation, "TOKEN_GRACE_US", SECOND_US // 10)
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    exchange = parked(entrance, key, token=entrance.token(key, lives_s=60))
    entrance.clock.advance(timedelta(seconds=61))
    number, error = exchange.reply()
    assert (number, type(error)) == (1, UnauthorizedError)
    assert entrance.namespace.snapshot().open_receives == 0


def test_a_parked_receive_goes_on_when_its_token_is_renewed(
    enter: Callable[..., Entrance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_conversation, "TOKEN_GRACE_US", SECOND_US // 10)
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    late = parked(entrance, key, token=entrance.token(key, lives_s=60))
    exchange = parked(entrance, key, token=entrance.token(key, lives_s=60))
    exchange.write(framed([FrameKind.TOKEN, entrance.token(key)]), framed([FrameKind.PING]))
    while exchange.frame()[0][0] != FrameKind.PONG:
        pass
    entrance.clock.advance(timedelta(seconds=61))
    assert isinstance(late.reply()[1], UnauthorizedError)  # its token was not renewed
    entrance.namespace.ask(Send(QUEUE, [BrokeredMessage(b"tea")]))
    number, batch = exchange.reply()
    assert (number, batch.num_rows) == (1, 1)


def test_requests_that_wait_for_credit_do_nothing_after_their_key_was_deleted(
    enter: Callable[..., Entrance],
) -> None:
    entrance = enter()
    key = entrance.key("key", Claim.LISTEN)
    fill(entrance)
    exchange = entrance.connect(key)
    assert exchange.frame()[0][0] == FrameKind.WELCOME
    take = Receive(LARGE, 1, mode=ReceiveMode.RECEIVE_AND_DELETE)
    exchange.write(frames_of(*[Peek(LARGE, 0, 1000)] * 20, *[take] * 5))
    conversation = conversation_of(entrance, key)
    until(lambda: 25 in [request.number for request in conversation.deferred_requests])
    entrance.namespace.ask(DeleteKey("key"))
    replies = dict(exchange.all_replies(25))
    assert {type(replies[number]) for number in range(20, 26)} == {UnauthorizedError}
    assert entrance.namespace.ask(GetRuntimeProperties(LARGE)).active_message_count == 48
