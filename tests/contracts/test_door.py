"""The door of a server: who is let in, with which claims, for how long, and how many."""

from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.doorway import (
    LIST,
    LISTENING,
    LONG,
    MANAGING,
    ORDER,
    ORDERS,
    PAYMENTS,
    SENDING,
    Server,
    opened,
    refused,
)
from tests.namespaces import ROOT
from tests.waiting import until
from twinbus import Claim, MessagingFactory, NamespaceManager, ServerBusyError, UnauthorizedError
from twinbus.clock import ManualClock
from twinbus.connection import sign_token
from twinbus.limits import TOKEN_LIFE
from twinbus.protocol.commands import Command, DeleteKey, PutKey, Receive, Send

# -- who is let in ---------------------------------------------------------------------------------


def test_the_bearer_of_a_key_is_let_in(server: Server) -> None:
    assert len(server.client().ask(LIST)) == 3
    assert server.door.accepted == 1


def test_a_client_without_a_token_is_unauthorized(server: Server) -> None:
    assert isinstance(refused(server.client(None)), UnauthorizedError)
    assert server.door.accepted == 0


@pytest.mark.parametrize(
    "parts",
    [
        {"key": "not the key, but as long as it is"},
        {"key_name": "nobody"},
        {"key": "", "key_name": "", "token": "nonsense"},
        {"key": "", "key_name": "", "token": "SharedAccessSignature sr=a&sig=AAAA&se=1&skn=b"},
    ],
    ids=["wrong key", "unknown name", "nonsense", "expired long ago"],
)
def test_a_forged_token_is_unauthorized(server: Server, parts: dict[str, str]) -> None:
    error = refused(server.client(**parts))
    assert isinstance(error, UnauthorizedError)
    assert ROOT.primary not in str(error)


def test_a_token_that_was_changed_is_unauthorized(server: Server) -> None:
    honest = server.token(timedelta(minutes=5))
    expires = honest.partition("&se=")[2].partition("&")[0]
    forged = honest.replace(expires, str(int(expires) + 3600))
    error = refused(server.client(None, token=forged))
    assert isinstance(error, UnauthorizedError)


def test_a_token_for_a_resource_that_makes_no_sense_is_unauthorized(server: Server) -> None:
    token = sign_token("twinbus://[", ROOT.name, ROOT.primary, 2**40)
    assert isinstance(refused(server.client(None, token=token)), UnauthorizedError)


def test_an_expired_token_is_unauthorized(server: Server, clock: ManualClock) -> None:
    token = server.token(timedelta(minutes=5))
    clock.advance(timedelta(minutes=5))
    assert isinstance(refused(server.client(None, token=token)), UnauthorizedError)


def test_a_token_that_expires_while_connected_is_good_until_then(
    server: Server, clock: ManualClock
) -> None:
    client = server.client(None, token=server.token(timedelta(minutes=5)))
    client.ask(LIST)
    clock.advance(timedelta(minutes=4))
    client.ask(LIST)
    clock.advance(timedelta(minutes=1))
    assert isinstance(refused(client), UnauthorizedError)


def test_a_refusal_of_the_door_is_not_tried_again(server: Server, clock: ManualClock) -> None:
    began = clock.now()
    factory = MessagingFactory(server.client(None), clock=clock)
    with pytest.raises(UnauthorizedError):
        factory.create_message_sender(ORDERS).send(ORDER)
    assert clock.now() == began


def test_a_whole_connection_string_opens_the_door(server: Server, clock: ManualClock) -> None:
    text = server.connection(name="contoso").to_text()
    with (
        MessagingFactory.from_connection_string(text, clock=clock) as factory,
        NamespaceManager.from_connection_string(text, clock=clock) as manager,
    ):
        factory.create_message_sender(ORDERS).send(ORDER)
        assert manager.get_runtime_properties(ORDERS).active_message_count == 1
        assert factory.name == "contoso"


# -- claims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "allowed", "forbidden"),
    [
        (Claim.SEND, SENDING, [LISTENING, MANAGING]),
        (Claim.LISTEN, LISTENING, [SENDING, MANAGING]),
    ],
)
def test_a_key_without_the_claim_is_unauthorized_and_the_connection_goes_on(
    server: Server, claim: Claim, allowed: Command[Any], forbidden: list[Command[Any]]
) -> None:
    client = server.client(server.put(claim))
    for command in forbidden:
        assert isinstance(refused(client, command), UnauthorizedError)
        client.ask(allowed)
    assert server.door.accepted == 1


def test_managing_includes_sending_and_listening(server: Server) -> None:
    client = server.client(server.put(Claim.MANAGE))
    for command in (SENDING, LISTENING, MANAGING):
        client.ask(command)


def test_a_key_of_one_entity_opens_that_one_and_no_other(server: Server) -> None:
    client = server.client(server.put(Claim.MANAGE, path=ORDERS))
    client.ask(SENDING)
    client.ask(LISTENING)
    assert isinstance(refused(client, Send(PAYMENTS, [ORDER])), UnauthorizedError)
    assert isinstance(refused(client, MANAGING), UnauthorizedError)
    assert server.take(PAYMENTS) == []


def test_a_key_of_one_entity_is_unauthorized_without_its_path(server: Server) -> None:
    key = server.put(Claim.SEND, path=ORDERS)
    assert isinstance(refused(server.client(key, entity_path=None), SENDING), UnauthorizedError)


# -- for how long ----------------------------------------------------------------------------------


def test_a_client_renews_its_token_and_the_connection_stays(
    server: Server, clock: ManualClock
) -> None:
    client = server.client()
    for _ in range(50):
        client.ask(LIST)
        clock.advance(TOKEN_LIFE / 10)
    assert server.door.accepted == 1
    assert server.door.refused == 0


def test_a_client_that_was_quiet_for_longer_than_its_token_lives_goes_on(
    server: Server, clock: ManualClock
) -> None:
    client = server.client()
    client.ask(LIST)
    clock.advance(TOKEN_LIFE * 5)
    client.ask(LIST)
    assert server.door.accepted == 1


def test_a_receive_may_wait_for_longer_than_a_token_lives(
    server: Server, clock: ManualClock
) -> None:
    client = server.client()
    receiving = client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    clock.advance(TOKEN_LIFE * 5)
    server.namespace.ask(SENDING)
    assert receiving.result(timeout=20).num_rows == 1
    client.ask(LIST)


def test_replacing_one_secret_leaves_the_tokens_of_the_other_good(server: Server) -> None:
    key = server.put(Claim.MANAGE)
    first, second = server.client(key), server.client(key, key=key.secondary)
    for client in (first, second):
        client.ask(LIST)
    server.namespace.ask(PutKey(replace(key, primary="a new secret, for those who know")))
    assert isinstance(refused(first), UnauthorizedError)
    assert len(second.ask(LIST)) == 3
    assert isinstance(refused(server.client(key)), UnauthorizedError)


def test_the_tokens_of_a_deleted_key_are_no_longer_good(server: Server) -> None:
    key = server.put(Claim.LISTEN)
    client = server.client(key)
    client.ask(LISTENING)
    server.namespace.ask(DeleteKey(key.name))
    assert isinstance(refused(client, LISTENING), UnauthorizedError)


def test_a_claim_that_was_taken_away_is_missing_at_once(server: Server) -> None:
    key = server.put(Claim.SEND, Claim.LISTEN)
    client = server.client(key)
    client.ask(SENDING)
    server.namespace.ask(PutKey(replace(key, claims=(Claim.LISTEN,))))
    assert isinstance(refused(client, SENDING), UnauthorizedError)
    client.ask(LISTENING)


# -- how many --------------------------------------------------------------------------------------


def test_a_server_with_too_many_connections_is_busy(tmp_path: Path, clock: ManualClock) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", clock, max_connections=2)
        first, second = server.client(), server.client()
        first.ask(LIST)
        second.ask(LIST)
        error = refused(server.client())
        assert isinstance(error, ServerBusyError)
        assert error.retry_after_s == 10
        first.ask(LIST)


def test_a_connection_that_ended_makes_room_for_another(tmp_path: Path, clock: ManualClock) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", clock, max_connections=1)
        first, second = server.client(), server.client()
        first.ask(LIST)
        assert isinstance(refused(second), ServerBusyError)
        first.close()
        until(lambda: server.door.connections == 0)
        assert len(second.ask(LIST)) == 3
