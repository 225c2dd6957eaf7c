"""A server that is there and does not answer: stopped with SIGSTOP, then let go on."""

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path

import pytest

from tests.soak.server_process import ServerProcess
from twinbus import BrokeredMessage, MessagingFactory, OperationTimeoutError, RetryPolicy
from twinbus.connection import ConnectionString
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol import client_conversation
from twinbus.protocol.commands import Peek, Receive
from twinbus.testing.pausing import resume_process

QUEUE = "orders"
IMPATIENT = RetryPolicy.once(timedelta(seconds=0.5))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, f"[[queue]]\npath = '{QUEUE}'")
    process.start()
    yield process
    process.kill()


def test_a_send_to_a_hanging_server_ends_with_its_timeout(server: ServerProcess) -> None:
    with MessagingFactory.from_connection_string(
        server.connection_string, retry_policy=IMPATIENT
    ) as factory:
        sender = factory.create_message_sender(QUEUE)
        sender.send(BrokeredMessage(b"before"))
        server.freeze()
        with pytest.raises(OperationTimeoutError):
            sender.send(BrokeredMessage(b"small"))
        with pytest.raises(OperationTimeoutError):  # more than the connection can hold
            sender.send_batch([BrokeredMessage(bytes(200_000)) for _ in range(100)])
        resume_process(server.pid)
        sender.send(BrokeredMessage(b"after"))


def test_a_connection_that_is_not_open_in_time_is_a_timeout(server: ServerProcess) -> None:
    with (
        ServerNamespace(ConnectionString.parse(server.connection_string)) as namespace,
        pytest.raises(OperationTimeoutError),
    ):
        namespace.ask(Peek(QUEUE), 1e-6)


def test_a_long_poll_lives_on_while_the_server_answers(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_conversation, "QUIET_US", 50_000)
    got: list[bytes] = []
    with MessagingFactory.from_connection_string(server.connection_string) as factory:
        receiver = factory.create_message_receiver(QUEUE)

        def receive() -> None:
            message = receiver.receive(timedelta(minutes=1))
            assert message is not None
            got.append(message.body)

        waiting = threading.Thread(target=receive)
        waiting.start()
        waiting.join(0.5)  # ten times as long as a connection may be quiet
        assert waiting.is_alive()
        factory.create_message_sender(QUEUE).send(BrokeredMessage(b"tea"))
        waiting.join()
    assert got == [b"tea"]


def test_a_long_poll_notices_that_the_server_hangs(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_conversation, "QUIET_US", 100_000)
    patient = RetryPolicy.once(timedelta(minutes=1))
    with MessagingFactory.from_connection_string(
        server.connection_string, retry_policy=patient
    ) as factory:
        receiver = factory.create_message_receiver(QUEUE)
        assert receiver.receive(timedelta(0)) is None
        server.freeze()
        with pytest.raises(OperationTimeoutError):
            receiver.receive(timedelta(hours=1))


def test_a_long_poll_that_nobody_waits_at_notices_it_too(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_conversation, "QUIET_US", 300_000)
    with MessagingFactory.from_connection_string(server.connection_string) as factory:
        poll = factory.courier.namespace.submit(Receive(QUEUE, wait=timedelta(hours=1)))
        quiet = wait([poll], timeout=2)  # several times as long as a connection may be quiet
        assert not quiet.done
        server.freeze()
        assert isinstance(poll.exception(timeout=60), OperationTimeoutError)
        resume_process(server.pid)
