"""A process that was forked shares nothing with its parent by mistake."""

import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.namespaces import address_of, door_of, embedded
from tests.waiting import until
from twinbus import BrokeredMessage, MessagingError, MessagingFactory, QueueDescription
from twinbus.errors import NamespaceInUseError
from twinbus.message import to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, Peek

QUEUE = "orders"


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[EmbeddedNamespace]:
    with embedded(tmp_path / "namespace") as namespace:
        namespace.ask(CreateEntity(QueueDescription(path=QUEUE)))
        yield namespace


def in_child(work: Callable[[], None]) -> int:
    """Do something in a forked process; return its exit code."""
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that hangs ends by itself
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # this is what is tested
def test_parent_and_child_send_through_one_factory_and_nothing_is_taken_for_a_repeat(
    namespace: EmbeddedNamespace,
) -> None:
    with (
        door_of(namespace) as door,
        MessagingFactory(ServerNamespace(address_of(door))) as factory,
    ):
        sender = factory.create_message_sender(QUEUE)
        sender.send(BrokeredMessage(b"before"))

        def send_in_child() -> None:
            for _ in range(3):
                sender.send(BrokeredMessage(b"child"))

        assert in_child(send_in_child) == 0
        for _ in range(3):
            sender.send(BrokeredMessage(b"parent"))
    bodies = [message.body for message in to_messages(namespace.ask(Peek(QUEUE, 0, 100)))]
    assert sorted(bodies) == sorted([b"before"] + [b"child"] * 3 + [b"parent"] * 3)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_an_embedded_namespace_says_that_it_belongs_to_the_parent(
    namespace: EmbeddedNamespace,
) -> None:
    def ask_in_child() -> None:
        with pytest.raises(NamespaceInUseError, match="before this process was forked"):
            namespace.ask(Peek(QUEUE))

    assert in_child(ask_in_child) == 0
    assert namespace.ask(Peek(QUEUE)).num_rows == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_pipelined_sender_of_the_parent_is_closed_in_the_child(
    namespace: EmbeddedNamespace,
) -> None:
    with MessagingFactory(namespace) as factory:
        pipeline = factory.create_message_sender(QUEUE).pipelined()

        def send_in_child() -> None:
            with pytest.raises(MessagingError, match="was closed"):
                pipeline.send(BrokeredMessage(b"child"))

        assert in_child(send_in_child) == 0
        pipeline.send(BrokeredMessage(b"parent")).result(20)
        pipeline.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_keeps_no_connection_open_that_has_sent_nothing_yet(
    namespace: EmbeddedNamespace,
) -> None:
    child_ends, child_stays = os.pipe()
    with (
        door_of(namespace, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as door,
        socket.create_connection(("127.0.0.1", door.port), timeout=20) as client,
    ):
        until(lambda: len(door.attendance))
        child = os.fork()
        if not child:
            signal.alarm(60)  # a child that hangs ends by itself
            os.close(child_stays)
            os.read(child_ends, 1)
            os._exit(0)
        door.close()
        try:
            assert client.recv(1) == b""
        finally:
            os.close(child_stays)
            os.close(child_ends)
            os.waitpid(child, 0)
