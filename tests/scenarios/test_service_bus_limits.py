"""Throttling, rights, pings and metering are the same through the Service Bus door."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.service_bus_site import OTHER, QUEUE, Reply, ServiceBusSite, SocketPeer, key
from twinbus.amqp.options import LinkOptions
from twinbus.amqp.performatives import Accepted, Coordinator, Rejected, TransactionalState
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import ManualClock
from twinbus.entities import EntityStatus, QueueDescription
from twinbus.limits import MAX_WAIT, PING_CONTENT_TYPE
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol.commands import (
    Disposition,
    PutKey,
    ReadMeter,
    Receive,
    Send,
    Settle,
    UpdateEntity,
)
from twinbus.protocol.keys import Claim
from twinbus.protocol.operations import EMPTY

pytestmark = pytest.mark.timeout(60)
BUSY = "com.microsoft:server-busy"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def site(tmp_path: Path, stack: ExitStack) -> ServiceBusSite:
    return ServiceBusSite.open(tmp_path, stack)


def throttled(folder: Path, stack: ExitStack, **thresholds: Any) -> ServiceBusSite:
    settings = NamespaceSettings(thresholds=Thresholds(**thresholds))
    clock = ManualClock(datetime.now(UTC))  # so that no rate recovers meanwhile
    return ServiceBusSite.open(folder, stack, clock, namespace=settings)


def connect(site: ServiceBusSite, stack: ExitStack, name: str = "app") -> SocketPeer:
    peer = stack.enter_context(SocketPeer(site.door.port))
    assert peer.show_token(QUEUE, name=name) == 202
    return peer


def peek(peer: SocketPeer) -> Reply:
    """Browse; the server has then taken everything that the client sent before."""
    return peer.manage(QUEUE, "peek-message", {"from-sequence-number": 0, "message-count": 1})


def metered(site: ServiceBusSite, path: str) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the operations on an entity: how many, and their messages and units."""
    return {
        (row["operation"], row["outcome"]): (row["count"], row["messages"], row["units"])
        for row in site.namespace.ask(ReadMeter()).to_pylist()
        if row["path"] == path
    }


# -- throttling ------------------------------------------------------------------------------------


def test_a_busy_entity_refuses_sends_and_leaves_the_link_open(
    tmp_path: Path, stack: ExitStack
) -> None:
    site = throttled(tmp_path, stack, entity_operations_per_second=1)
    peer = connect(site, stack)
    link = peer.sender(QUEUE)
    assert isinstance(peer.send(link, b"passes"), Accepted)
    refused = peer.send(link, b"too soon")
    assert isinstance(refused, Rejected)
    assert refused.error is not None
    assert refused.error.condition == BUSY
    assert "entity_operations_per_second" in str(refused.error.description)
    assert isinstance(peer.send(link, b"again"), Rejected)
    assert metered(site, QUEUE)["Send", "ServerBusy"][0] == 2


def test_a_busy_entity_refuses_operations_and_ends_receivers(
    tmp_path: Path, stack: ExitStack
) -> None:
    site = throttled(tmp_path, stack, entity_operations_per_second=1)
    peer = connect(site, stack)
    assert isinstance(peer.send(peer.sender(QUEUE), b"uses up what there is"), Accepted)
    reply = peek(peer)
    assert (reply.status, reply.condition) == (503, BUSY)
    receiver = peer.receiver(QUEUE)
    receiver.grant(1)
    assert peer.detached(receiver).condition == BUSY


def test_waiting_receivers_of_sdks_count_like_all_others(tmp_path: Path, stack: ExitStack) -> None:
    site = throttled(tmp_path, stack, open_receives=8)  # a key of one queue may have two
    peer = connect(site, stack)
    for name in "ab":
        peer.receiver(QUEUE, name).grant(1)
    third = peer.receiver(QUEUE, "c")
    third.grant(1)
    error = peer.detached(third)
    assert (error.condition, "open_receives" in str(error.description)) == (BUSY, True)
    assert site.namespace.snapshot().open_receives == 2
    root = connect(site, stack, "root")
    root.receiver(QUEUE).grant(1)
    peek(root)
    assert site.namespace.snapshot().open_receives == 3


# -- a receive that waits for hours ----------------------------------------------------------------


def test_a_waiting_receiver_ends_when_its_queue_is_disabled(
    site: ServiceBusSite, stack: ExitStack
) -> None:
    peer = connect(site, stack)
    receiver = peer.receiver(QUEUE)
    receiver.grant(1)
    peer.write()
    disabled = QueueDescription(path=QUEUE, status=EntityStatus.RECEIVE_DISABLED)
    site.namespace.ask(UpdateEntity(disabled))
    assert peer.detached(receiver).condition == "com.microsoft:entity-disabled"


def test_a_waiting_receiver_ends_when_its_key_loses_the_claim(
    site: ServiceBusSite, stack: ExitStack
) -> None:
    peer = connect(site, stack)
    receiver, sender = peer.receiver(QUEUE), peer.sender(QUEUE)
    receiver.grant(1)
    peer.write()
    site.namespace.ask(PutKey(key("app", Claim.SEND, path=QUEUE)))
    assert peer.detached(receiver).condition == "amqp:unauthorized-access"
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x")]))
    assert site.namespace.ask(Receive(QUEUE)).num_rows == 1
    assert isinstance(peer.send(sender, b"y"), Accepted)


def test_a_waiting_receiver_asks_again_when_a_day_is_over(tmp_path: Path, stack: ExitStack) -> None:
    clock = ManualClock(datetime.now(UTC))
    site = ServiceBusSite.open(tmp_path, stack, clock)
    peer = stack.enter_context(SocketPeer(site.door.port))
    assert peer.show_token(QUEUE, seconds=10 * MAX_WAIT.total_seconds()) == 202
    receiver = peer.receiver(QUEUE)
    receiver.grant(1)
    for day in range(3):
        peek(peer)
        assert site.namespace.snapshot().open_receives == 1
        assert metered(site, QUEUE).get(("Receive", EMPTY), (0,))[0] == day
        clock.advance(MAX_WAIT)
        site.namespace.ask(Receive(OTHER))  # a turn
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x")]))
    peer.settle(peer.take(receiver)[0])


def test_messages_that_a_client_takes_its_credit_from_are_for_others(
    site: ServiceBusSite, stack: ExitStack
) -> None:
    peer = connect(site, stack)
    receiver = peer.receiver(QUEUE)
    receiver.grant(5)
    receiver.grant(2)
    peek(peer)
    site.namespace.ask(Send(QUEUE, [BrokeredMessage(b"x") for _ in range(5)]))
    peer.take(receiver, 2)
    remaining = site.namespace.ask(Receive(QUEUE, 5, timedelta(seconds=10)))
    assert remaining.num_rows == 3
    assert set(remaining.column("delivery_count").to_pylist()) == {0}


# -- pings and metering ----------------------------------------------------------------------------


def test_a_ping_is_accepted_and_not_stored(site: ServiceBusSite, stack: ExitStack) -> None:
    peer = connect(site, stack)
    link = peer.sender(QUEUE)
    assert isinstance(peer.send(link, b"", content_type=PING_CONTENT_TYPE), Accepted)
    assert isinstance(peer.send(link, b"real"), Accepted)
    bodies = site.namespace.ask(Receive(QUEUE, 10)).column("body").to_pylist()
    assert bodies == [b"real"]
    rows = site.namespace.ask(ReadMeter()).to_pylist()
    purposes = {row["purpose"]: row["count"] for row in rows if row["operation"] == "Send"}
    assert purposes == {"ping": 1, "application": 1}


def test_both_doors_meter_the_same(site: ServiceBusSite, stack: ExitStack) -> None:
    large = bytes(100_000)
    peer = connect(site, stack)
    link = peer.sender(QUEUE)
    peer.send(link, b"one")
    peer.send(link, *[b"x"] * 5)
    peer.send(link, large)
    receiver = peer.receiver(QUEUE)
    receiver.grant(7)
    for delivery in peer.take(receiver, 7):
        peer.settle(delivery)
    peek(peer)

    ask = site.namespace.ask
    for bodies in ([b"one"], [b"x"] * 5, [large]):
        ask(Send(OTHER, [BrokeredMessage(body, message_id="0" * 32) for body in bodies]))
    for message in to_messages(ask(Receive(OTHER, 7))):
        assert message.lock_token is not None
        ask(Settle(OTHER, tokens_of([message.lock_token]), Disposition.COMPLETE))
    by_sdk, natively = metered(site, QUEUE), metered(site, OTHER)
    assert by_sdk.pop(("Peek", "ok"))[0] == 1
    assert by_sdk == natively


# -- transactions ----------------------------------------------------------------------------------


def test_a_coordinator_is_refused(site: ServiceBusSite, stack: ExitStack) -> None:
    peer = connect(site, stack)
    link = peer.session.attach_sender("transactions", LinkOptions(target=Coordinator()))
    assert peer.detached(link).condition == "amqp:not-implemented"


def test_nothing_is_done_that_claims_to_be_part_of_a_transaction(
    site: ServiceBusSite, stack: ExitStack
) -> None:
    peer = connect(site, stack)
    link, receiver = peer.sender(QUEUE), peer.receiver(QUEUE)
    within = TransactionalState(txn_id=b"1", outcome=Accepted())
    refused = peer.send(link, b"x", state=within)
    assert isinstance(refused, Rejected)
    assert refused.error is not None
    assert refused.error.condition == "amqp:not-implemented"
    assert isinstance(peer.send(link, b"y"), Accepted)
    receiver.grant(1)
    peer.settle(peer.take(receiver)[0], within)
    peek(peer)
    assert site.namespace.snapshot().entities[0].active_message_count == 1
