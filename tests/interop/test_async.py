"""The asynchronous clients of the unmodified SDK."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, bodies, body, in_seconds, sdk_string
from twinbus import Claim

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.aio import ServiceBusClient, ServiceBusSession
from azure.servicebus.exceptions import (
    MessageSizeExceededError,
    MessagingEntityNotFoundError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    SessionCannotBeLockedError,
)

Story = Callable[[ServiceBusClient], Awaitable[None]]


def play(bus: Bus, story: Story, key_name: str = "", key: str = "", **options: Any) -> None:
    """Run what a test does with a client."""

    async def run() -> None:
        text = sdk_string(bus.server, key_name, key)
        async with ServiceBusClient.from_connection_string(text, **options) as client:
            await story(client)

    asyncio.run(run())


def test_messages_are_sent_received_and_settled(bus: Bus) -> None:
    path = bus.queue(max_delivery_count=5)

    async def story(client: ServiceBusClient) -> None:
        sender, receiver = client.get_queue_sender(path), client.get_queue_receiver(path)
        await sender.send_messages(ServiceBusMessage("a"))
        batch = await sender.create_message_batch()
        for text in "bcd":
            batch.add_message(ServiceBusMessage(text))
        await sender.send_messages(batch)
        found = await receiver.receive_messages(4, max_wait_time=5)
        assert bodies(found) == [b"a", b"b", b"c", b"d"]
        first, second, third, fourth = found
        await receiver.complete_message(first)
        await receiver.abandon_message(second)
        await receiver.defer_message(third)
        await receiver.dead_letter_message(fourth, reason="bad")
        [again] = await receiver.receive_messages(1, max_wait_time=5)
        assert (body(again), again.delivery_count) == (b"b", 1)
        assert await receiver.renew_message_lock(again) == again.locked_until_utc
        await receiver.complete_message(again)
        assert third.sequence_number is not None
        [deferred] = await receiver.receive_deferred_messages(third.sequence_number)
        await receiver.complete_message(deferred)
        graveyard = client.get_queue_receiver(path, sub_queue="deadletter")
        [dead] = await graveyard.receive_messages(1, max_wait_time=5)
        assert dead.dead_letter_reason == "bad"
        await graveyard.complete_message(dead)

    play(bus, story)
    assert bus.active(path) == 0


def test_many_are_received_with_prefetch_and_deleted(bus: Bus) -> None:
    path = bus.queue()

    async def story(client: ServiceBusClient) -> None:
        await client.get_queue_sender(path).send_messages(
            [ServiceBusMessage(f"{n}") for n in range(100)]
        )
        receiver = client.get_queue_receiver(
            path, receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE, prefetch_count=20
        )
        found: list[bytes] = []
        while len(found) < 100:
            messages = await receiver.receive_messages(100, max_wait_time=5)
            assert messages
            found += bodies(messages)
        assert found == [str(n).encode() for n in range(100)]

    play(bus, story)
    assert bus.active(path) == 0


def test_schedules_and_browsing(bus: Bus) -> None:
    path = bus.queue()

    async def story(client: ServiceBusClient) -> None:
        sender, receiver = client.get_queue_sender(path), client.get_queue_receiver(path)
        messages = [ServiceBusMessage("a"), ServiceBusMessage("b")]
        numbers = await sender.schedule_messages(messages, in_seconds(600))
        await sender.cancel_scheduled_messages(numbers[0])
        assert bodies(await receiver.peek_messages(5)) == [b"b"]

    play(bus, story)


def test_sessions(bus: Bus) -> None:
    path = bus.queue(requires_session=True, lock_duration=timedelta(seconds=30))

    async def story(client: ServiceBusClient) -> None:
        await client.get_queue_sender(path).send_messages(ServiceBusMessage("1", session_id="a"))
        async with client.get_queue_receiver(path, session_id=NEXT_AVAILABLE_SESSION) as receiver:
            session = receiver.session
            assert isinstance(session, ServiceBusSession)
            [message] = await receiver.receive_messages(1, max_wait_time=5)
            assert (body(message), session.session_id) == (b"1", "a")
            await session.set_state(b"x")
            assert await session.get_state() == b"x"
            assert await session.renew_lock() == session.locked_until_utc
            with pytest.raises(SessionCannotBeLockedError):
                await client.get_queue_receiver(path, session_id="a").receive_messages(
                    1, max_wait_time=10
                )
        async with client.get_queue_receiver(path, session_id="a") as receiver:
            [message] = await receiver.receive_messages(1, max_wait_time=5)
            await receiver.complete_message(message)

    play(bus, story, retry_total=0)
    assert bus.active(path) == 0


def test_topics(bus: Bus) -> None:
    topic = bus.name()
    bus.manager.create_topic(topic)
    bus.manager.create_subscription(topic, "all")

    async def story(client: ServiceBusClient) -> None:
        await client.get_topic_sender(topic).send_messages(ServiceBusMessage("a"))
        receiver = client.get_subscription_receiver(topic, "all")
        assert bodies(await receiver.receive_messages(1, max_wait_time=5)) == [b"a"]

    play(bus, story)


def test_refusals(bus: Bus) -> None:
    path = bus.queue()
    key = bus.manager.create_key(f"{path}-listen", [Claim.LISTEN])

    async def send(client: ServiceBusClient) -> None:
        await client.get_queue_sender(path).send_messages(ServiceBusMessage("a"))

    async def refused(client: ServiceBusClient) -> None:
        with pytest.raises(MessageSizeExceededError):
            await client.get_queue_sender(path).send_messages(ServiceBusMessage(bytes(300_000)))
        with pytest.raises(MessagingEntityNotFoundError):
            await client.get_queue_receiver("nothing").receive_messages(1, max_wait_time=10)

    play(bus, refused)
    with pytest.raises(ServiceBusAuthorizationError):
        play(bus, send, key.name, key.primary)
    with pytest.raises(ServiceBusAuthenticationError):
        play(bus, send, key="wrong" * 8, retry_total=0)


def test_senders_side_by_side(bus: Bus) -> None:
    path = bus.queue()

    async def story(client: ServiceBusClient) -> None:
        async def send(name: int) -> None:
            sender = client.get_queue_sender(path)
            for n in range(10):
                await sender.send_messages(ServiceBusMessage(f"{name}-{n}"))

        await asyncio.gather(*(send(name) for name in range(8)))

    play(bus, story)
    assert bus.active(path) == 80
