"""Closing clients, and the life of a factory."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.client_site import (
    NEWS,
    NOW,
    ORDERS,
    RENEWED,
    SESSIONS,
    Site,
    message,
)
from tests.namespaces import embedded
from twinbus import (
    MessagingFactory,
    NamespaceManager,
    PipelinedSender,
    QueueClient,
    RuleDescription,
)
from twinbus.client.receiver import ReceiveOptions
from twinbus.client.state import FactoryState
from twinbus.clock import ManualClock
from twinbus.errors import FactoryFaultedError, NamespaceClosedError, SessionLockLostError

# -- closing ---------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Any], Any]] = {
    "send": lambda queue: queue.send(message()),
    "send_batch": lambda queue: queue.send_batch([message()]),
    "schedule": lambda queue: queue.schedule(message(), datetime.fromisoformat("2031-01-01T00Z")),
    "cancel_scheduled": lambda queue: queue.cancel_scheduled(1),
    "pipelined": lambda queue: queue.pipelined(),
    "receive": lambda queue: queue.receive(NOW),
    "receive_batch": lambda queue: queue.receive_batch(1, NOW),
    "receive_columns": lambda queue: queue.receive_columns(1, NOW),
    "receive_deferred": lambda queue: queue.receive_deferred(1),
    "peek": lambda queue: queue.peek(),
    "accept_message_session": lambda queue: queue.accept_message_session("a", NOW),
}


def perform(call: str, queue: QueueClient) -> None:
    """Make a call of a client; a pipelined sender is used, too."""
    made = CALLS[call](queue)
    if isinstance(made, PipelinedSender):
        with made:
            made.send(message()).result(timeout=10)


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_client_refuses_while_its_factory_goes_on(site: Site, call: str) -> None:
    queue = site.factory.create_queue_client(ORDERS)
    queue.close()
    queue.close()
    with pytest.raises(NamespaceClosedError, match=ORDERS):
        CALLS[call](queue)
    site.send("still open")


def test_a_closed_subscription_client_keeps_no_rules(site: Site) -> None:
    client = site.factory.create_subscription_client(NEWS, "eu")
    client.close()
    for call in (
        client.get_rules,
        lambda: client.add_rule(RuleDescription("new")),
        lambda: client.remove_rule("$Default"),
    ):
        with pytest.raises(NamespaceClosedError):
            call()


def test_a_closed_session_refuses(site: Site) -> None:
    session = site.factory.accept_message_session(SESSIONS, "a", NOW)
    session.close()
    for call in (
        session.get_state,
        session.renew_lock,
        lambda: session.set_state(b""),
        lambda: session.receive(NOW),
    ):
        with pytest.raises((NamespaceClosedError, SessionLockLostError)):
            call()


def test_leaving_a_context_closes_the_client(site: Site) -> None:
    with site.factory.create_message_sender(ORDERS) as sender:
        pass
    with pytest.raises(NamespaceClosedError):
        sender.send(message())


def test_a_client_may_be_closed_after_its_factory(site: Site) -> None:
    site.send("1", "2", "3")
    site.send("1", path=SESSIONS, session_id="a")
    receiver = site.receiver(ReceiveOptions(prefetch_count=10, auto_renew_for=timedelta(hours=1)))
    receiver.receive(NOW)
    session = site.factory.accept_message_session(SESSIONS, "a", NOW, RENEWED)
    site.factory.close()
    receiver.close()
    session.close()


# -- the life of a factory -------------------------------------------------------------------------


def test_a_factory_is_opened_then_closing_then_closed(site: Site) -> None:
    assert site.factory.name == "contoso"
    seen = [site.factory.state]
    site.factory.on_state_change(seen.append)
    site.factory.close()
    site.factory.close()
    seen.append(site.factory.state)
    opened, closing_, closed = FactoryState.OPENED, FactoryState.CLOSING, FactoryState.CLOSED
    assert seen == [opened, closing_, closed, closed]


def test_leaving_its_context_closes_a_factory(site: Site) -> None:
    with site.factory as factory:
        assert factory is site.factory
    assert site.factory.state is FactoryState.CLOSED


@pytest.mark.parametrize("call", CALLS)
def test_the_clients_of_a_closed_factory_refuse(site: Site, call: str) -> None:
    queue = site.factory.create_queue_client(ORDERS)
    site.factory.close()
    with pytest.raises(NamespaceClosedError):
        perform(call, queue)


def test_a_closed_factory_makes_no_clients(site: Site) -> None:
    site.factory.close()
    for make in (
        lambda: site.factory.create_message_sender(ORDERS),
        lambda: site.factory.create_message_receiver(ORDERS),
        lambda: site.factory.create_queue_client(ORDERS),
        lambda: site.factory.create_topic_client(NEWS),
        lambda: site.factory.create_subscription_client(NEWS, "eu"),
        lambda: site.factory.accept_message_session(SESSIONS, "a", NOW),
    ):
        with pytest.raises(NamespaceClosedError):
            make()


def test_a_watcher_can_stop_watching(site: Site) -> None:
    seen: list[FactoryState] = []
    stop = site.factory.on_state_change(seen.append)
    stop()
    site.factory.close()
    assert seen == []


def test_a_watcher_sees_the_state_that_is_reported(site: Site) -> None:
    seen: list[bool] = []
    site.factory.on_state_change(lambda state: seen.append(site.factory.state is state))
    site.factory.close()
    assert seen == [True, True]


def test_a_watcher_may_stop_watching_when_it_is_called(site: Site) -> None:
    seen: list[FactoryState] = []

    def once(state: FactoryState) -> None:
        seen.append(state)
        stop()

    stop = site.factory.on_state_change(once)
    states = site.watch()
    site.factory.close()
    assert seen == [FactoryState.CLOSING]
    assert states == [FactoryState.CLOSING, FactoryState.CLOSED]


@pytest.mark.parametrize("call", CALLS)
def test_a_faulted_factory_refuses_every_call_with_its_cause(site: Site, call: str) -> None:
    queue = site.factory.create_queue_client(ORDERS)
    seen = site.watch()
    site.factory.fault("fabrikam is gone")
    assert seen == [FactoryState.FAULTED]
    with pytest.raises(FactoryFaultedError, match="fabrikam is gone") as caught:
        perform(call, queue)
    assert caught.value.cause == "fabrikam is gone"


def test_a_faulted_factory_stays_faulted(site: Site) -> None:
    seen = site.watch()
    site.factory.fault("first")
    site.factory.fault("second")
    site.factory.close()
    assert seen == [FactoryState.FAULTED]
    with pytest.raises(FactoryFaultedError, match="first"):
        site.factory.create_message_sender(ORDERS)


def test_a_closed_factory_cannot_be_faulted(site: Site) -> None:
    site.factory.close()
    site.factory.fault("too late")
    assert site.factory.state is FactoryState.CLOSED


def test_a_receive_that_waits_ends_when_its_factory_is_closed(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(site.receiver().receive, timedelta(hours=1))
        site.send("another path is used", path=SESSIONS, session_id="a")
        site.factory.close()
        site.manager.close()
        error = receiving.exception(timeout=20)
    assert error is None or isinstance(error, NamespaceClosedError)


def test_a_connection_string_decides_where_a_namespace_lives(tmp_path: Path) -> None:
    text = f"Endpoint=embedded://{tmp_path / 'here'};Name=contoso"
    clock = ManualClock()
    with (
        NamespaceManager.from_connection_string(text, clock=clock) as manager,
        MessagingFactory.from_connection_string(text, clock=clock) as factory,
    ):
        assert factory.name == "contoso"
        manager.create_queue(ORDERS)
        with factory.create_queue_client(ORDERS) as queue:
            queue.send(message())
            assert queue.receive(NOW)


def test_the_last_user_of_an_embedded_namespace_closes_it(tmp_path: Path) -> None:
    text = f"Endpoint=embedded://{tmp_path / 'here'}"
    clock = ManualClock()
    with NamespaceManager.from_connection_string(text, clock=clock) as manager:
        MessagingFactory.from_connection_string(text, clock=clock).close()
        manager.create_queue(ORDERS)
    with embedded(tmp_path / "here", clock) as alone:
        assert alone is not None
