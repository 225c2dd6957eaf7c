"""Clients that leave a server, and a server that leaves its clients."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.doorway import (
    LIST,
    LONG,
    ORDER,
    ORDERS,
    PAYMENTS,
    SENDING,
    SESSIONS,
    Server,
    opened,
    refused,
)
from tests.inside import socket_of_client
from tests.namespaces import ROOT
from tests.waiting import until
from twinbus import BrokeredMessage, MessagingError, MessagingFactory, RetryPolicy, TransientError
from twinbus.clock import SystemClock
from twinbus.errors import CommunicationError
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import AcceptSession, Receive, Send
from twinbus.server.door import Door

IMPATIENT = RetryPolicy(
    operation_timeout=timedelta(seconds=30),
    min_backoff=timedelta(milliseconds=10),
    max_backoff=timedelta(milliseconds=50),
)


# -- clients that leave ----------------------------------------------------------------------------


def hang_up(client: ServerNamespace) -> None:
    """Break the connection as a client does that dies."""
    socket_of_client(client).shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("leave", [ServerNamespace.close, hang_up])
def test_a_receive_of_a_client_that_left_takes_no_message(
    server: Server, leave: Callable[[ServerNamespace], None]
) -> None:
    client = server.client()
    receiving = client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    leave(client)
    until(lambda: server.door.connections == 0)
    server.namespace.ask(SENDING)
    assert server.take() == [b"order"]
    assert isinstance(receiving.exception(timeout=20), MessagingError | None)


@pytest.mark.parametrize("leave", [ServerNamespace.close, hang_up])
def test_a_client_that_left_while_it_waited_for_a_session_holds_none(
    server: Server, leave: Callable[[ServerNamespace], None]
) -> None:
    client = server.client()
    client.submit(AcceptSession(SESSIONS, None, LONG))
    client.ask(LIST)
    leave(client)
    until(lambda: server.door.connections == 0)
    server.namespace.ask(Send(SESSIONS, [replace(ORDER, session_id="a")]))
    assert server.namespace.ask(AcceptSession(SESSIONS, "a")).lock.session_id == "a"


def test_messages_that_could_not_be_delivered_are_given_back(server: Server) -> None:
    large = BrokeredMessage(body=bytes(MAX_MESSAGE_BYTES // 2))
    for _ in range(10):
        server.namespace.ask(Send(ORDERS, [large] * 40))
    client = server.client()
    client.ask(LIST)
    reading = threading.Event()
    client.submit(LIST).add_done_callback(lambda _: reading.wait(30))  # it reads no further
    client.submit(Receive(ORDERS, 400))
    until(lambda: server.operations("Receive") == 1)
    hang_up(client)
    reading.set()
    until(lambda: server.door.connections == 0 and server.operations("Settle") == 1)
    given_back = server.receive_all()
    assert len(given_back) == 400
    assert {message.delivery_count for message in given_back} == {0}


def test_others_are_served_while_one_client_does_not_read(server: Server) -> None:
    server.namespace.ask(Send(ORDERS, [BrokeredMessage(body=bytes(MAX_MESSAGE_BYTES // 2))] * 100))
    slow, quick = server.client(), server.client()
    slow.ask(LIST)
    reading = threading.Event()
    slow.submit(LIST).add_done_callback(lambda _: reading.wait(30))
    for _ in range(100):
        slow.submit(Receive(ORDERS, 1))
    for _ in range(20):
        quick.ask(Send(PAYMENTS, [ORDER]), 10)
    reading.set()
    assert len(server.take(PAYMENTS)) == 20


# -- a server that closes --------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_a_transient_error(server: Server) -> None:
    client = server.client()
    server.door.close()
    error = refused(client)
    assert isinstance(error, CommunicationError)
    assert error.is_transient
    assert ROOT.primary not in str(error)


def test_a_closing_server_gives_its_clients_a_transient_error(server: Server) -> None:
    client = server.client()
    receiving = client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    server.door.close()
    assert isinstance(receiving.exception(timeout=20), TransientError)
    assert isinstance(refused(client), TransientError)


def test_a_closing_server_takes_no_message_for_clients_that_wait(server: Server) -> None:
    client = server.client()
    client.submit(Receive(ORDERS, 1, LONG))
    client.ask(LIST)
    server.door.close()
    until(lambda: server.door.connections == 0)
    server.namespace.ask(SENDING)
    assert server.take() == [b"order"]


def test_a_client_reconnects_by_itself_to_a_new_door_at_the_same_address(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", SystemClock())
        factory = MessagingFactory(server.client(), retry_policy=IMPATIENT)
        sender = factory.create_message_sender(ORDERS)
        sender.send(ORDER)
        server.door.close()
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(sender.send, replace(ORDER, body=b"meanwhile"))
            again = Door(server.namespace, server.clock, port=server.door.port)
            stack.enter_context(closing(again))
            sending.result(timeout=30)
        assert set(server.take()) == {b"order", b"meanwhile"}
        assert again.accepted == 1


def test_a_receive_that_waits_goes_on_waiting_at_a_new_door(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = opened(stack, tmp_path / "namespace", SystemClock())
        factory = MessagingFactory(server.client(), retry_policy=IMPATIENT)
        receiver = factory.create_message_receiver(ORDERS)
        assert receiver.receive(timedelta(0)) is None
        with ThreadPoolExecutor() as pool:
            receiving = pool.submit(receiver.receive, timedelta(minutes=5))
            server.door.close()
            again = Door(server.namespace, server.clock, port=server.door.port)
            stack.enter_context(closing(again))
            until(lambda: again.connections == 1)
            server.namespace.ask(SENDING)
            received = receiving.result(timeout=30)
        assert received is not None
        received.complete()


def test_without_a_new_door_the_client_gives_up_with_its_history(server: Server) -> None:
    factory = MessagingFactory(server.client(), retry_policy=replace(IMPATIENT, max_tries=3))
    server.door.close()
    with pytest.raises(CommunicationError) as caught:
        factory.create_message_sender(ORDERS).send(ORDER)
    history: Any = caught.value.history
    assert len(history) == 3
