"""Each refusal reaches the SDK as the exception that Service Bus raises."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.interop.bus import Bus, await_moment, bodies, in_seconds, take, take_one
from tests.waiting import until
from twinbus import BrokeredMessage, Claim, QueueDescription
from twinbus.connection import ConnectionString, sign_token
from twinbus.entities import EntityStatus

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.credentials import AzureSasCredential
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.servicebus.exceptions import (
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
)

Use = Callable[[Bus, ServiceBusClient, str], object]


def message() -> ServiceBusMessage:
    return ServiceBusMessage("a")


def send(bus: Bus, client: ServiceBusClient, path: str) -> object:
    bus.sender(path, client).send_messages(message())
    return None


def receive(bus: Bus, client: ServiceBusClient, path: str) -> object:
    return bus.receiver(path, client).receive_messages(max_wait_time=5)


def schedule(bus: Bus, client: ServiceBusClient, path: str) -> object:
    return bus.sender(path, client).schedule_messages(message(), in_seconds(600))


def browse(bus: Bus, client: ServiceBusClient, path: str) -> object:
    return bus.receiver(path, client).peek_messages()


BOTH = pytest.mark.parametrize("use", [send, receive])
ALL = pytest.mark.parametrize("use", [send, receive, schedule, browse])


@BOTH
def test_a_wrong_key_is_not_authenticated(bus: Bus, use: Use) -> None:
    path = bus.queue()
    with pytest.raises(ServiceBusAuthenticationError):
        use(bus, bus.client(key="wrong" * 8, retry_total=0), path)


@BOTH
def test_an_unknown_key_name_is_not_authenticated(bus: Bus, use: Use) -> None:
    path = bus.queue()
    with pytest.raises(ServiceBusAuthenticationError):
        use(bus, bus.client(key_name="nobody", retry_total=0), path)


@ALL
def test_an_entity_that_does_not_exist_is_not_found(bus: Bus, use: Use) -> None:
    with pytest.raises(MessagingEntityNotFoundError):
        use(bus, bus.sdk, "nothing")


def test_there_is_no_transfer_dead_letter_queue(bus: Bus) -> None:
    receiver = bus.receiver(
        bus.queue(), bus.hasty, sub_queue=ServiceBusSubQueue.TRANSFER_DEAD_LETTER
    )
    with pytest.raises(MessagingEntityNotFoundError):
        receiver.receive_messages(max_wait_time=10)


@ALL
def test_a_key_does_only_what_its_claims_say(bus: Bus, use: Use) -> None:
    path = bus.queue()
    wrong, right = (
        (Claim.LISTEN, Claim.SEND) if use in (send, schedule) else (Claim.SEND, Claim.LISTEN)
    )
    refused, allowed = (
        bus.manager.create_key(f"{path}-{claim.value}", [claim]) for claim in (wrong, right)
    )
    with pytest.raises(ServiceBusAuthorizationError):
        use(bus, bus.client(refused.name, refused.primary), path)
    use(bus, bus.client(allowed.name, allowed.secondary), path)


def test_a_key_of_a_queue_opens_that_queue_alone(bus: Bus) -> None:
    path, second = bus.queue(), bus.queue()
    key = bus.manager.create_key("own", [Claim.SEND], path)
    client = bus.client(key.name, key.primary, retry_total=0)
    send(bus, client, path)
    with pytest.raises((ServiceBusAuthorizationError, ServiceBusAuthenticationError)):
        send(bus, client, second)


@BOTH
def test_a_disabled_entity_says_so(bus: Bus, use: Use) -> None:
    path = bus.queue(status=EntityStatus.DISABLED)
    with pytest.raises(MessagingEntityDisabledError):
        use(bus, bus.hasty, path)


def test_an_entity_that_is_disabled_refuses_a_sender_that_is_open(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path, bus.hasty)
    sender.send_messages(message())
    description = bus.manager.get_queue(path)
    bus.manager.update_queue(replace(description, status=EntityStatus.SEND_DISABLED))
    with pytest.raises(MessagingEntityDisabledError):
        sender.send_messages(message())
    bus.manager.update_queue(replace(description, status=EntityStatus.ACTIVE))
    sender.send_messages(message())
    assert bus.active(path) == 2


def test_a_full_queue_takes_nothing_more(bus: Bus) -> None:
    path = bus.queue(max_size_in_megabytes=1)
    bus.factory.create_message_sender(path).send_batch([BrokeredMessage(bytes(200_000))] * 5)
    sender = bus.sender(path)
    with pytest.raises(ServiceBusQuotaExceededError):
        sender.send_messages(ServiceBusMessage(bytes(200_000)))


def test_a_deleted_queue_ends_its_receivers(bus: Bus) -> None:
    path = bus.queue()
    receiver = bus.receiver(path, bus.hasty)
    receiver.peek_messages()
    bus.manager.delete_queue(path)
    with pytest.raises(ServiceBusError):  # noqa: PT012 - it may take a moment
        for _ in range(3):
            receiver.receive_messages(max_wait_time=0.5)
    bus.manager.create_queue(QueueDescription(path=path))


def test_a_rotated_key_ends_its_links(bus: Bus) -> None:
    path = bus.queue()
    key = bus.manager.create_key(f"{path}-rotated", [Claim.SEND])
    sender = bus.sender(path, bus.client(key.name, key.primary, retry_total=0))
    sender.send_messages(message())
    bus.manager.regenerate_key(key.name, "primary")

    def is_refused() -> bool:
        try:
            sender.send_messages(message())
        except ServiceBusAuthenticationError:
            return True
        except (ServiceBusAuthorizationError, ServiceBusConnectionError):
            return False  # the end of the link, which the SDK may take for that of the connection
        return False

    until(is_refused)
    second = bus.sender(path, bus.client(key.name, key.secondary))
    second.send_messages(message())


def test_an_expired_token_ends_its_links(bus: Bus) -> None:
    path = bus.queue()
    native = ConnectionString.parse(bus.server.connection)
    host = f"localhost:{bus.server.port}"
    expires = int(time.time()) + 3
    token = sign_token(f"sb://{host}/{path}", native.key_name, native.key, expires)
    client = ServiceBusClient(host, AzureSasCredential(token), use_tls=False, retry_total=0)
    sender = bus.sender(path, client)
    sender.send_messages(message())
    await_moment(datetime.fromtimestamp(expires, UTC))
    with pytest.raises(ServiceBusError):
        sender.send_messages(message())
    assert bus.active(path) == 1
    with pytest.raises(ServiceBusAuthenticationError):
        sender.send_messages(message())


def test_an_error_of_one_message_leaves_the_link_open(bus: Bus) -> None:
    path = bus.queue()
    sender = bus.sender(path)
    with pytest.raises(ServiceBusError):
        sender.send_messages(
            AmqpAnnotatedMessage(
                data_body=b"a",
                properties=AmqpMessageProperties(group_id="a"),
                annotations={"x-opt-partition-key": "b"},
            )
        )
    sender.send_messages(ServiceBusMessage("b"))
    assert bodies(take(bus.receiver(path))) == [b"b"]


def test_the_sdk_shows_the_text_of_the_broker(bus: Bus) -> None:
    with pytest.raises(MessagingEntityNotFoundError, match="there is no entity nowhere"):
        take_one(bus.receiver("nowhere"))
