"""A connection that goes silent, as behind a firewall or a NAT, is replaced by another one."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from tests.contracts.service_bus import DROPPED
from tests.inside import links_of
from tests.interop.azure_site import Site, site
from tests.interop.cutting_relay import CuttingRelay, cutting_relay
from tests.waiting import until
from twinbus import BrokeredMessage
from twinbus.amqp.conditions import AmqpError
from twinbus.errors import OperationTimeoutError, SessionLockLostError
from twinbus.message import to_messages
from twinbus.namespace import azure as azure_module
from twinbus.namespace import azure_links, azure_receiving, azure_sdk
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.azure_links import LinkKey, LinkPurpose
from twinbus.protocol.commands import (
    AcceptSession,
    CancelScheduled,
    Disposition,
    GetSessionState,
    Peek,
    Receive,
    ReceiveMode,
    RenewLocks,
    Send,
    Settle,
)

pytestmark = [pytest.mark.filterwarnings(dropped) for dropped in DROPPED]
HOUR = timedelta(hours=1)
SHORT_S = 0.5  # of a command that a silent connection swallows
ENOUGH_S = 20.0


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("azure")) as made:
        yield made


@pytest.fixture
def path(bus: Site) -> str:
    return bus.fresh_queue()


@contextmanager
def behind_relay(bus: Site) -> Iterator[tuple[AzureNamespace, CuttingRelay]]:
    with (
        cutting_relay(bus.connection.port) as relay,
        closing(AzureNamespace(replace(bus.connection, port=relay.port), bus.clock)) as azure,
    ):
        yield azure, relay


def single_send(path: str, **fields: Any) -> Send:
    return Send(path, [BrokeredMessage(b"a", **fields)])


def lost(azure: AzureNamespace, command: Any) -> None:
    with pytest.raises(OperationTimeoutError):
        azure.ask(command, SHORT_S)


def lost_submitted(azure: AzureNamespace, command: Any) -> None:
    """Lose a command; return when its thread has noticed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(azure_module, "AZURE_REQUEST_S", SHORT_S)
        patched.setattr(azure_module, "TRY_TIMEOUT", timedelta(seconds=SHORT_S))
        future = azure.submit(command)
    assert isinstance(future.exception(ENOUGH_S), OperationTimeoutError)


def bodies(bus: Site, path: str) -> list[bytes]:
    return [message.body for message in to_messages(bus.broker.ask(Peek(path, 0, 100)))]


def test_a_send_that_is_not_answered_is_the_last_of_its_connection(bus: Site, path: str) -> None:
    with behind_relay(bus) as (azure, relay):
        azure.ask(single_send(path), ENOUGH_S)
        relay.silence()
        lost(azure, single_send(path))
        azure.ask(single_send(path), ENOUGH_S)
        assert len(relay.first_words) == 2
    assert len(bodies(bus, path)) == 2


def test_a_submitted_send_that_is_not_answered_is_the_last_of_its_connection(
    bus: Site, path: str
) -> None:
    with behind_relay(bus) as (azure, relay):
        azure.ask(single_send(path), ENOUGH_S)
        relay.silence()
        lost_submitted(azure, single_send(path))
        azure.ask(single_send(path), ENOUGH_S)


def test_the_idle_connections_beside_a_silent_one_are_replaced_too(bus: Site, path: str) -> None:
    with behind_relay(bus) as (azure, relay):
        key = LinkKey(path, LinkPurpose.SEND)
        for link in [links_of(azure).take(key, 1) for _ in range(3)]:
            link.open(ENOUGH_S)
            links_of(azure).give_back(link)
        relay.silence()
        lost(azure, single_send(path))
        azure.ask(single_send(path), ENOUGH_S)


def test_a_timeout_that_the_service_reports_leaves_the_connection_in_use(
    bus: Site, path: str
) -> None:
    with behind_relay(bus) as (azure, relay):
        azure.ask(single_send(path), ENOUGH_S)
        bus.refuse(Send, AmqpError("it took too long", "com.microsoft:timeout"))
        for _ in range(2):
            with pytest.raises(OperationTimeoutError):
                azure.ask(single_send(path), ENOUGH_S)
        assert len(relay.first_words) == 1


@pytest.mark.parametrize("command", [Peek, CancelScheduled])
def test_a_request_that_is_not_answered_is_the_last_of_its_connection(
    bus: Site, path: str, command: type
) -> None:
    with behind_relay(bus) as (azure, relay):
        due = bus.clock.now() + HOUR
        numbers = azure.ask(
            single_send(path, scheduled_enqueue_time_utc=due), ENOUGH_S
        ).sequence_numbers
        asked = Peek(path, 0, 1) if command is Peek else CancelScheduled(path, list(numbers))
        azure.ask(Peek(path, 0, 1), ENOUGH_S)
        relay.silence()
        lost(azure, asked)
        azure.ask(asked, ENOUGH_S)


@pytest.mark.parametrize("mode", ReceiveMode)
def test_a_receive_whose_end_is_not_confirmed_closes_its_link(
    bus: Site, path: str, mode: ReceiveMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_receiving, "AZURE_DRAIN_S", 3.0)  # enough for the second try
    with behind_relay(bus) as (azure, relay):
        assert azure.ask(Receive(path, mode=mode), ENOUGH_S).num_rows == 0
        relay.silence()
        lost_one = azure.submit(Receive(path, mode=mode, wait=timedelta(milliseconds=1)))
        assert relay.swallowed.wait(ENOUGH_S)
        bus.clock.advance(timedelta(seconds=1))
        assert lost_one.result(ENOUGH_S).num_rows == 0  # on another connection
        bus.broker.ask(single_send(path))
        assert azure.ask(Receive(path, mode=mode), ENOUGH_S).num_rows == 1


def test_a_long_poll_receives_keep_alives_or_goes_on_with_another_connection(
    bus: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_sdk, "AZURE_KEEP_ALIVE_S", 1)
    monkeypatch.setattr(azure_sdk, "AZURE_SILENCE_S", 4.0)
    with behind_relay(bus) as (azure, relay):
        before = bus.broker.snapshot().open_receives
        waiting = azure.submit(Receive(path, wait=HOUR))
        until(lambda: bus.broker.snapshot().open_receives > before)
        relay.silence()
        until(lambda: len(relay.first_words) == 2)
        bus.broker.ask(single_send(path))
        bus.broker.ask(single_send(path))  # the silent connection has the first one
        assert waiting.result(ENOUGH_S).num_rows >= 1


def test_keep_alives_keep_a_long_poll_on_its_connection(
    bus: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_sdk, "AZURE_KEEP_ALIVE_S", 1)
    monkeypatch.setattr(azure_sdk, "AZURE_SILENCE_S", 8.0)
    with behind_relay(bus) as (azure, relay):
        waiting = azure.submit(Receive(path, wait=HOUR))
        until(lambda: relay.keep_alives >= 3)
        bus.broker.ask(single_send(path))
        assert waiting.result(ENOUGH_S).num_rows == 1
        assert len(relay.first_words) == 1


def test_messages_of_a_silent_connection_are_settled_and_renewed_on_another(
    bus: Site, path: str
) -> None:
    bus.broker.ask(Send(path, [BrokeredMessage(b"a"), BrokeredMessage(b"b")]))
    with behind_relay(bus) as (azure, relay):
        tokens = azure.ask(Receive(path, 10), ENOUGH_S).column("lock_token")
        relay.silence()
        lost_submitted(azure, RenewLocks(path, tokens))
        azure.ask(RenewLocks(path, tokens), ENOUGH_S)
        azure.ask(Settle(path, tokens, Disposition.COMPLETE), ENOUGH_S)
    assert bodies(bus, path) == []


def test_a_settlement_that_is_not_answered_closes_its_link(bus: Site, path: str) -> None:
    bus.broker.ask(Send(path, [BrokeredMessage(b"a"), BrokeredMessage(b"b")]))
    with behind_relay(bus) as (azure, relay):
        tokens = azure.ask(Receive(path, 10), ENOUGH_S).column("lock_token")
        relay.silence()
        lost_submitted(azure, Settle(path, tokens[:1], Disposition.COMPLETE))
        azure.ask(Settle(path, tokens, Disposition.COMPLETE), ENOUGH_S)
        assert azure.ask(Receive(path), ENOUGH_S).num_rows == 0
    assert bodies(bus, path) == []


def test_a_session_is_lost_when_its_connection_has_been_silent_for_long(
    bus: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bus.queue(f"sessions-{uuid4().hex}", requires_session=True)
    with behind_relay(bus) as (azure, relay):
        bus.broker.ask(single_send(path, session_id="s"))
        session = azure.ask(AcceptSession(path, "s"), ENOUGH_S).lock
        relay.silence()
        lost_submitted(azure, GetSessionState(path, session))
        monkeypatch.setattr(azure_links, "AZURE_SILENCE_S", SHORT_S)
        monkeypatch.setattr(azure_module, "AZURE_REQUEST_S", SHORT_S)
        future = azure.submit(GetSessionState(path, session))
        assert isinstance(future.exception(ENOUGH_S), SessionLockLostError)
