"""Every class of failure in the table is raised by the real SDK, and is the error of its row.

The servers here refuse, hang up, fall silent or are full. Classes that only a race inside the SDK
raises are produced by leaving the SDK as the race does. `UNCAUSED` names those that nothing outside
of the SDK can cause.
"""

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core import exceptions as core
from azure.servicebus import exceptions as sdk
from azure.servicebus._pyamqp.error import AMQPException

from tests.inside import open_links
from tests.interop.azure_site import QUEUE, Site, site
from twinbus import BrokeredMessage, QueueDescription
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.events import Opened
from twinbus.amqp.options import ConnectionOptions
from twinbus.amqp.performatives import ErrorCondition
from twinbus.amqp.sasl import ANONYMOUS, SaslServer
from twinbus.errors import MessagingError
from twinbus.namespace import azure_sdk
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.azure_errors import TABLE, mapped, to_messaging_error
from twinbus.namespace.azure_links import AzureLink
from twinbus.namespace.azure_sending import send
from twinbus.protocol.commands import Command, CreateEntity, GetEntity, Receive, Send

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")  # of the SDK
SINGLE_SEND = Send(QUEUE, [BrokeredMessage(b"a")])
BY_CONDITION: dict[type[BaseException], str] = {
    sdk.MessageSizeExceededError: "amqp:link:message-size-exceeded",
    sdk.ServiceBusQuotaExceededError: "amqp:resource-limit-exceeded",
    sdk.ServiceBusAuthorizationError: "amqp:unauthorized-access",
    sdk.MessagingEntityDisabledError: "com.microsoft:entity-disabled",
    sdk.MessagingEntityAlreadyExistsError: "com.microsoft:entity-already-exists",
    sdk.MessageLockLostError: "com.microsoft:message-lock-lost",
    sdk.MessageNotFoundError: "com.microsoft:message-not-found",
    sdk.SessionLockLostError: "com.microsoft:session-lock-lost",
    sdk.SessionCannotBeLockedError: "com.microsoft:session-cannot-be-locked",
    sdk.ServiceBusServerBusyError: "com.microsoft:server-busy",
    sdk.ServiceBusConnectionError: "amqp:link:detach-forced",
}
NO_NAMESPACE = ErrorCondition(condition="amqp:not-found", description="no such namespace", info={})
UNCAUSED = {  # the SDK wraps those of its sockets; here they stand for races while a link ends
    TimeoutError,
    OSError,
    TypeError,
    KeyError,
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("azure")) as made:
        made.queue()
        yield made


@pytest.fixture
def bus(shared: Site) -> Iterator[Site]:
    shared.relent()
    yield shared
    gc.collect()  # sockets that the SDK dropped, while their warnings are expected


def raised(where: AzureNamespace, command: Command[Any] = SINGLE_SEND) -> BaseException:
    """Return what the SDK raised when a namespace was asked."""
    with pytest.raises(MessagingError) as caught:
        where.ask(command, 10)
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


def at(bus: Site, **changes: Any) -> "closing[AzureNamespace]":
    """Return a namespace at another place, or with another key."""
    return closing(AzureNamespace(replace(bus.connection, **changes)))


def broken(bus: Site, harm: Callable[[Any], object]) -> BaseException:
    """Return what the SDK raises for a send on a link that is harmed as by a race."""
    with at(bus) as azure:
        azure.ask(SINGLE_SEND, 10)
        [link] = open_links(azure)
        harm(link.sdk)
        return _send_error(link)


def _send_error(link: AzureLink) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the question
        send(link, SINGLE_SEND, 5)
    return caught.value


@contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection to a port of this machine; give the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def _unanswered(bus: Site) -> BaseException:
    """Send to a server that does not answer, on an open link."""
    with at(bus) as azure:
        azure.ask(SINGLE_SEND, 10)
        bus.refuse(Send, None)
        with pytest.raises(MessagingError) as caught:
            azure.ask(SINGLE_SEND, 0.5)
        assert caught.value.__cause__ is not None
        return caught.value.__cause__


def _closes_as_not_found(connection: socket.socket) -> None:
    """Open an AMQP connection, and close it: there is no such namespace."""
    options = ConnectionOptions("nobody", tolerates_overrun=True)
    amqp = AmqpConnection(options, 0, sasl=SaslServer((ANONYMOUS,), lambda _: True))
    while data := connection.recv(65_536):
        for event in amqp.receive(data, 0):
            if isinstance(event, Opened):
                amqp.close(0, NO_NAMESPACE)
        for part in amqp.take_outgoing(0):
            connection.sendall(part)


def _hangs_up(connection: socket.socket) -> None:
    connection.recv(8)


def _communication(bus: Site) -> BaseException:
    with peer(_closes_as_not_found) as port, at(bus, port=port) as azure:
        return raised(azure)


def _response(bus: Site) -> BaseException:
    with peer(_hangs_up) as port, at(bus, port=port) as azure:
        return raised(azure, GetEntity(QUEUE))


def _response_timeout(bus: Site) -> BaseException:
    with (
        pytest.MonkeyPatch.context() as patched,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        patched.setattr(azure_sdk, "AZURE_REQUEST_S", 0.5)
        with at(bus, port=silent.getsockname()[1]) as azure:
            return raised(azure, GetEntity(QUEUE))


def _request_timeout(bus: Site) -> BaseException:
    """Ask a port whose queue of connections is full: the system drops further ones."""
    with pytest.MonkeyPatch.context() as patched, socket.socket() as full:
        patched.setattr(azure_sdk, "AZURE_REQUEST_S", 0.5)
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for message in waiting:
            message.setblocking(False)
            message.connect_ex(full.getsockname())
        try:
            with at(bus, host="127.0.0.1", port=full.getsockname()[1]) as azure:
                return raised(azure, GetEntity(QUEUE))
        finally:
            for message in waiting:
                message.close()


def _request(bus: Site) -> BaseException:
    with at(bus, port=1) as azure:
        return raised(azure, GetEntity(QUEUE))


def _wrong_key(bus: Site, command: Command[Any]) -> BaseException:
    with at(bus, key="wrong" * 8) as azure:
        return raised(azure, command)


def _settled_twice(bus: Site) -> BaseException:
    bus.azure.ask(SINGLE_SEND, 10)
    client = azure_sdk.open_client(bus.connection, bus.clock)
    with client, client.get_queue_receiver(QUEUE) as receiver:
        [message] = receiver.receive_messages(1, max_wait_time=10)
        receiver.complete_message(message)
        with pytest.raises(sdk.MessageAlreadySettled) as caught:
            receiver.complete_message(message)
    return caught.value


def _of_amqp(bus: Site) -> BaseException:
    bus.refuse(Receive, AmqpError("refused", "amqp:link:detach-forced"))
    return raised(bus.azure, Receive(QUEUE))


def _without(name: str) -> Callable[[Any], None]:
    return lambda sender: setattr(sender, name, None)


RECIPES: dict[type[BaseException], Callable[[Site], BaseException]] = {
    sdk.ServiceBusAuthenticationError: lambda bus: _wrong_key(bus, SINGLE_SEND),
    sdk.MessagingEntityNotFoundError: lambda bus: raised(
        bus.azure, Send("no", SINGLE_SEND.messages)
    ),
    sdk.OperationTimeoutError: _unanswered,
    sdk.ServiceBusCommunicationError: _communication,
    sdk.MessageAlreadySettled: _settled_twice,
    sdk.ServiceBusError: lambda bus: broken(bus, _without("_handler")),
    AMQPException: _of_amqp,
    core.ClientAuthenticationError: lambda bus: _wrong_key(bus, GetEntity(QUEUE)),
    core.ResourceNotFoundError: lambda bus: raised(bus.azure, GetEntity("no")),
    core.ResourceExistsError: lambda bus: raised(
        bus.azure, CreateEntity(QueueDescription(path=QUEUE))
    ),
    core.ServiceResponseTimeoutError: _response_timeout,
    core.ServiceRequestTimeoutError: _request_timeout,
    core.ServiceRequestError: _request,
    core.ServiceResponseError: _response,
    AttributeError: lambda bus: broken(
        bus, lambda sender: _without("_connection")(sender._handler)
    ),
    ValueError: lambda bus: broken(bus, lambda sender: sender.close()),
}


def test_every_row_is_shown_here() -> None:
    assert {*BY_CONDITION, *RECIPES, *UNCAUSED} == set(TABLE)


@pytest.mark.parametrize("kind", BY_CONDITION)
def test_a_class_that_a_condition_causes_is_the_error_of_its_row(
    bus: Site, kind: type[BaseException]
) -> None:
    bus.refuse(Send, AmqpError("refused", BY_CONDITION[kind]))
    failure = raised(bus.azure)
    assert type(failure) is kind
    assert mapped(failure) == TABLE[kind]


@pytest.mark.parametrize("kind", RECIPES)
def test_a_class_that_a_peer_or_a_race_causes_is_the_error_of_its_row(
    bus: Site, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "azure.servicebus")  # it logs its own races as errors
    failure = RECIPES[kind](bus)
    assert next(row for row in TABLE if isinstance(failure, row)) is kind
    assert mapped(failure).kind is TABLE[kind].kind


@pytest.mark.parametrize("kind", UNCAUSED)
def test_a_class_that_nothing_outside_of_the_sdk_causes_is_the_error_of_its_row(
    kind: type[Exception],
) -> None:
    error = to_messaging_error(kind("as of a race"), QUEUE)
    assert type(error) is TABLE[kind].kind
    assert error.path == QUEUE


@pytest.mark.parametrize("quote", ["'", '"'])
def test_what_the_service_says_is_shown_as_text_and_not_as_bytes(quote: str) -> None:
    shown = f"Service request failed. b{quote}orders has no deferred message 8{quote}."
    error = to_messaging_error(
        sdk.MessageNotFoundError(message=f"{shown} Error condition: x. Status Code: 404."), QUEUE
    )
    assert error.text == "Service request failed. orders has no deferred message 8"
