"""Who runs the event loop of a RabbitMQ namespace."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from selectors import DefaultSelector
from typing import Any

import pytest

from twinbus.connection import ConnectionString
from twinbus.errors import CommunicationError, OperationTimeoutError
from twinbus.message import BrokeredMessage
from twinbus.namespace.rabbitmq import connections, driving
from twinbus.namespace.rabbitmq.namespace import RabbitNamespace
from twinbus.namespace.rabbitmq.runner import CommandRunner
from twinbus.protocol.commands import Send

SEND = Send("orders", [BrokeredMessage(b"")])


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[RabbitNamespace]:
    """Return a namespace on a host that never answers; its thread runs only when it is needed."""
    monkeypatch.setattr(driving, "RABBITMQ_UNATTENDED_S", 3600)
    monkeypatch.setattr(connections, "RABBITMQ_CONNECT_S", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        where = f"Endpoint=amqp://127.0.0.1:{silent.getsockname()[1]};Name=silent"
        with RabbitNamespace(ConnectionString.parse(where)) as namespace:
            yield namespace


@pytest.fixture
def began_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the threads in which commands began."""
    threads: list[int] = []
    begin = CommandRunner.begin

    def record(self: CommandRunner, job: Any, timeout_s: float | None) -> None:
        threads.append(threading.get_ident())
        begin(self, job, timeout_s)

    monkeypatch.setattr(CommandRunner, "begin", record)
    return threads


def test_a_single_caller_runs_the_loop_itself(
    namespace: RabbitNamespace, began_in: list[int]
) -> None:
    with pytest.raises(OperationTimeoutError):
        namespace.ask(SEND, 0.05)
    assert began_in == [threading.get_ident()]


def test_a_caller_with_its_own_event_loop_leaves_the_loop_to_the_thread(
    namespace: RabbitNamespace, began_in: list[int]
) -> None:
    async def ask() -> None:
        namespace.ask(SEND, 0.05)

    with pytest.raises(OperationTimeoutError):
        asyncio.run(ask())
    assert threading.get_ident() not in began_in


def test_commands_go_on_when_the_caller_that_ran_the_loop_has_left(
    namespace: RabbitNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Future[Any]] = []
    begin = CommandRunner.begin

    def submit_another(self: CommandRunner, job: Any, timeout_s: float | None) -> None:
        begin(self, job, timeout_s)
        if not submitted:
            submitted.append(namespace.submit(SEND))

    monkeypatch.setattr(CommandRunner, "begin", submit_another)
    with pytest.raises(OperationTimeoutError):
        namespace.ask(SEND, 0.05)
    assert isinstance(submitted[0].exception(30), CommunicationError)


def test_an_interrupted_wait_loses_no_connection(
    namespace: RabbitNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([True])
    select = DefaultSelector.select

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if timeout != 0 and next(waits, False):
            raise KeyboardInterrupt
        return select(self, timeout)

    cuts: list[None] = []
    monkeypatch.setattr(DefaultSelector, "select", interrupted)
    monkeypatch.setattr(CommandRunner, "cut", lambda _self: cuts.append(None))
    with pytest.raises(KeyboardInterrupt):
        namespace.ask(SEND, 30)
    with pytest.raises(CommunicationError):  # the host is silent, and the loop still runs
        namespace.ask(SEND, 30)
    assert not cuts


@pytest.mark.parametrize("was_interrupted", [False, True], ids=["first", "after a wait"])
def test_an_interrupted_callback_closes_the_connections(
    namespace: RabbitNamespace,
    monkeypatch: pytest.MonkeyPatch,
    was_interrupted: bool,
) -> None:
    selector = "twinbus.namespace.rabbitmq.driving._Selector"
    monkeypatch.setattr(f"{selector}.is_waiting", was_interrupted)
    interrupts = iter([True])
    begin = CommandRunner.begin

    def interrupted(self: CommandRunner, job: Any, timeout_s: float | None) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt
        begin(self, job, timeout_s)

    cut = threading.Event()
    monkeypatch.setattr(CommandRunner, "begin", interrupted)
    monkeypatch.setattr(CommandRunner, "cut", lambda _self: cut.set())
    with pytest.raises(KeyboardInterrupt):
        namespace.ask(SEND, 30)
    with pytest.raises(CommunicationError):
        namespace.ask(SEND, 30)
    assert cut.wait(30)
