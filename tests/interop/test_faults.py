"""Every row of the table of errors, produced for real: faults of a server, and what the SDK raises.

The SDK chooses the exception by the condition, whether a message is rejected, a link is refused, an
operation fails, or a connection is closed.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from tests.interop.bus import Bus, bodies, body, take, take_one
from tests.namespaces import address_of, door_of, embedded
from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, RetryPolicy
from twinbus.amqp.conditions import AmqpError, Condition, Scope
from twinbus.errors import MessageLockLostError as LockLost
from twinbus.errors import MessagingError, NamespaceClosedError, QuotaExceededError, ServerBusyError
from twinbus.errors import OperationTimeoutError as TimedOut
from twinbus.protocol.commands import Peek, Receive, Send, Settle
from twinbus.testing.faults import Delay, Fault
from twinbus.testing.server_faults import FaultyServer

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import ServiceBusMessage
from azure.servicebus import exceptions as e

pytestmark = pytest.mark.timeout(90)
ONCE = RetryPolicy.once(timedelta(seconds=2))
TABLE: dict[str, type[Exception]] = {  # of rejected messages and refused links
    "amqp:link:message-size-exceeded": e.MessageSizeExceededError,
    "amqp:resource-limit-exceeded": e.ServiceBusQuotaExceededError,
    "amqp:unauthorized-access": e.ServiceBusAuthorizationError,
    "amqp:not-found": e.MessagingEntityNotFoundError,
    "amqp:not-allowed": e.ServiceBusError,
    "amqp:not-implemented": e.ServiceBusError,
    "amqp:resource-deleted": e.ServiceBusError,
    "amqp:illegal-state": e.ServiceBusError,
    "amqp:decode-error": e.ServiceBusError,
    "amqp:precondition-failed": e.ServiceBusError,
    "amqp:link:detach-forced": e.ServiceBusConnectionError,
    "amqp:internal-error": e.ServiceBusError,
    "amqp:connection:forced": e.ServiceBusError,
    "amqp:transaction:timeout": e.ServiceBusError,
    "unheard-of": e.ServiceBusError,
    "com.microsoft:container-close": e.ServiceBusError,
    "com.microsoft:store-lock-lost": e.ServiceBusError,
    "com.microsoft:operation-cancelled": e.ServiceBusError,
    "com.microsoft:message-waiting": e.ServiceBusError,
    "com.microsoft:server-busy": e.ServiceBusServerBusyError,
    "com.microsoft:timeout": e.OperationTimeoutError,
    "com.microsoft:entity-disabled": e.MessagingEntityDisabledError,
    "com.microsoft:message-lock-lost": e.MessageLockLostError,
    "com.microsoft:session-lock-lost": e.SessionLockLostError,
    "com.microsoft:session-cannot-be-locked": e.SessionCannotBeLockedError,
    "com.microsoft:message-not-found": e.MessageNotFoundError,
    "com.microsoft:auth-failed": e.ServiceBusAuthorizationError,
    "com.microsoft:entity-already-exists": e.MessagingEntityAlreadyExistsError,
    "com.microsoft:argument-error": e.ServiceBusError,
    "com.microsoft:argument-out-of-range": e.ServiceBusError,
    "com.microsoft:precondition-failed": e.ServiceBusError,
}


def error_of(condition: str) -> AmqpError:
    return AmqpError(f"made for a test: {condition}", condition, Scope.LINK)


@dataclass
class Local:
    """A server in this process, with its faults."""

    folder: Path
    connection: str
    port: int
    faults: FaultyServer

    def manager(self) -> NamespaceManager:
        return NamespaceManager.from_connection_string(self.connection)

    def factory(self) -> MessagingFactory:
        return MessagingFactory.from_connection_string(self.connection, retry_policy=ONCE)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("faulty")
    with embedded(folder) as namespace, door_of(namespace) as door:
        yield Local(folder, address_of(door).to_text(), door.port, FaultyServer(door))


@pytest.fixture(scope="module")
def bus(local: Local) -> Iterator[Bus]:
    made = Bus(local)
    yield made
    local.faults.heal()
    made.close()
    del made
    gc.collect()  # sockets that the SDK dropped, while their warnings are expected


@pytest.fixture
def faults(local: Local) -> Iterator[FaultyServer]:
    yield local.faults
    local.faults.heal()


# -- the table -------------------------------------------------------------------------------------


def send(bus: Bus, path: str) -> None:
    bus.sender(path, bus.hasty).send_messages(ServiceBusMessage("x"))


def receive(bus: Bus, path: str) -> None:
    bus.receiver(path, bus.hasty).receive_messages(max_wait_time=10)


def raised(
    bus: Bus, fails: Callable[[str, str], None], use: Callable[[Bus, str], None] = send
) -> dict[str, type[Exception]]:
    """Use a queue under each condition, side by side: the SDK needs a second after most of them."""

    def under(condition: str) -> type[Exception]:
        path = bus.queue()
        fails(path, condition)
        with pytest.raises(e.ServiceBusError, match=f"made for a test: {condition}") as caught:
            use(bus, path)
        return caught.type

    with ThreadPoolExecutor(16) as pool:
        return dict(zip(TABLE, pool.map(under, TABLE), strict=True))


def test_a_rejected_message_raises_by_its_condition(bus: Bus, faults: FaultyServer) -> None:
    def fails(path: str, condition: str) -> None:
        faults.inject(error_of(condition), path)

    assert raised(bus, fails) == TABLE


def test_a_refused_link_raises_by_its_condition(bus: Bus, faults: FaultyServer) -> None:
    def fails(path: str, condition: str) -> None:
        faults.refuse_links(error_of(condition), path)

    assert raised(bus, fails) == TABLE


def test_a_refused_receiver_raises_by_its_condition(bus: Bus, faults: FaultyServer) -> None:
    def fails(path: str, condition: str) -> None:
        faults.refuse_links(error_of(condition), path)

    assert raised(bus, fails, receive) == TABLE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LockLost("gone"), e.MessageLockLostError),
        (ServerBusyError("busy"), e.ServiceBusServerBusyError),
        (TimedOut("slow"), e.OperationTimeoutError),
    ],
    ids=["lock lost", "busy", "timeout"],
)
def test_a_settlement_that_fails_raises(
    bus: Bus, faults: FaultyServer, error: MessagingError, expected: type[Exception]
) -> None:
    path = bus.queue()
    bus.sender(path).send_messages(ServiceBusMessage("x"))
    receiver = bus.receiver(path, bus.hasty)
    message = take_one(receiver)
    faults.inject(error, path, kind=Settle)
    with pytest.raises(expected):
        receiver.complete_message(message)
    faults.heal()
    receiver.complete_message(message)
    assert bus.active(path) == 0


def test_an_operation_that_fails_raises(bus: Bus, faults: FaultyServer) -> None:
    path = bus.queue()
    receiver = bus.receiver(path, bus.hasty)
    faults.inject(QuotaExceededError("full"), path, kind=Peek)
    with pytest.raises(e.ServiceBusQuotaExceededError):
        receiver.peek_messages(1)


# -- more than errors ------------------------------------------------------------------------------


def test_a_passing_fault_is_retried_by_the_sdk(bus: Bus, faults: FaultyServer) -> None:
    path = bus.queue()
    client = bus.client(retry_backoff_factor=0.01)
    faults.inject(Fault.SERVER_BUSY, path, times=2, kind=Send)
    bus.sender(path, client).send_messages(ServiceBusMessage("x"))
    assert bus.active(path) == 1


def test_a_delayed_send_arrives_late(bus: Bus, faults: FaultyServer) -> None:
    path = bus.queue()
    faults.inject(Delay(0.3), path, times=1, kind=Send)
    bus.sender(path, bus.hasty).send_messages(ServiceBusMessage("x"))
    assert bus.active(path) == 1


@pytest.mark.parametrize(("fault", "arrived"), [(Fault.TIMEOUT, 0), (Fault.REPLY_LOST, 1)])
def test_an_unanswered_send_times_out(
    bus: Bus, faults: FaultyServer, fault: Fault, arrived: int
) -> None:
    path = bus.queue()
    sender = bus.sender(path, bus.hasty)
    faults.inject(fault, path, times=1, kind=Send)
    with pytest.raises(e.OperationTimeoutError):
        sender.send_messages(ServiceBusMessage("x"), timeout=1)
    assert bus.active(path) == arrived


def test_a_link_that_ends_is_attached_again(bus: Bus, faults: FaultyServer) -> None:
    path = bus.queue()
    client = bus.client(retry_backoff_factor=0.01)
    sender, receiver = bus.sender(path, client), bus.receiver(path, client)
    sender.send_messages(ServiceBusMessage("1"))
    receiver.complete_message(take_one(receiver))
    faults.end_links(path, error_of(Condition.DETACH_FORCED))
    sender.send_messages(ServiceBusMessage("2"))
    assert bodies(take(receiver)) == [b"2"]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_lost_connection_is_made_again(bus: Bus, faults: FaultyServer, how: str) -> None:
    path = bus.queue()
    client = bus.client(retry_backoff_factor=0.01)
    sender, receiver = bus.sender(path, client), bus.receiver(path, client)
    sender.send_messages(ServiceBusMessage("1"))
    receiver.complete_message(take_one(receiver))
    if how == "closed":
        faults.close_connections(NamespaceClosedError("made for a test"))
    else:
        faults.drop_connections()
    sender.send_messages(ServiceBusMessage("2"))
    assert body(take_one(receiver)) == b"2"


def test_a_closed_connection_raises_where_nothing_is_retried(
    bus: Bus, faults: FaultyServer
) -> None:
    path = bus.queue()
    sender = bus.sender(path, bus.hasty)
    sender.send_messages(ServiceBusMessage("1"))
    faults.close_connections(error_of("com.microsoft:server-busy"))
    with pytest.raises(e.ServiceBusConnectionError):
        sender.send_messages(ServiceBusMessage("2"))


def test_native_clients_meet_the_same_faults(bus: Bus, faults: FaultyServer) -> None:
    path = bus.queue()
    sender = bus.factory.create_message_sender(path)
    faults.inject(QuotaExceededError("full"), path, times=1)
    with pytest.raises(QuotaExceededError, match="full"):
        sender.send(BrokeredMessage(b"x"))
    faults.inject(Fault.REPLY_LOST, path, times=1, kind=Send)
    with pytest.raises(TimedOut):
        sender.send(BrokeredMessage(b"x"))
    faults.inject(Delay(0.2), path, times=1, kind=Receive)
    receiver = bus.factory.create_message_receiver(path)
    assert len(receiver.receive_batch(5)) == 1
