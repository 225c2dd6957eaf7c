"""The asynchronous administration client of the unmodified SDK, over HTTPS."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, sdk_string
from twinbus import Claim

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.servicebus.aio.management import ServiceBusAdministrationClient
from azure.servicebus.management import CorrelationRuleFilter, SqlRuleAction, SqlRuleFilter

Story = Callable[[ServiceBusAdministrationClient], Awaitable[None]]


def play(bus: Bus, story: Story, key_name: str = "", key: str = "") -> None:
    """Run what a test does with a client."""

    async def run() -> None:
        text = sdk_string(bus.server, key_name, key)
        async with ServiceBusAdministrationClient.from_connection_string(
            text, connection_verify=bus.ca_file, retry_total=0
        ) as client:
            await story(client)

    asyncio.run(run())


async def names(items: Any) -> list[str]:
    return [item.name async for item in items]


def test_entities_are_created_read_updated_listed_and_deleted(bus: Bus) -> None:
    topic, path = bus.name(), bus.name()

    async def story(admin: ServiceBusAdministrationClient) -> None:
        queue = await admin.create_queue(path, lock_duration=timedelta(seconds=30))
        queue.max_delivery_count = 3
        await admin.update_queue(queue)
        found = await admin.get_queue(path)
        assert (found.lock_duration, found.max_delivery_count) == (timedelta(seconds=30), 3)
        assert (await admin.get_queue_runtime_properties(path)).total_message_count == 0
        await admin.create_topic(topic)
        for name in "abcde":
            await admin.create_subscription(topic, name)
        assert await names(admin.list_subscriptions(topic, max_page_size=2)) == list("abcde")
        assert path in await names(admin.list_queues(max_page_size=2))
        assert (await admin.get_topic_runtime_properties(topic)).subscription_count == 5
        assert (await admin.get_namespace_properties()).name == "shop"
        await admin.delete_subscription(topic, "a")
        await admin.delete_topic(topic)
        await admin.delete_queue(path)

    play(bus, story)
    assert not bus.manager.queue_exists(path)


def test_rules_are_created_read_updated_and_deleted(bus: Bus) -> None:
    topic = bus.name()

    async def story(admin: ServiceBusAdministrationClient) -> None:
        await admin.create_topic(topic)
        await admin.create_subscription(topic, "s")
        chosen = SqlRuleFilter("a = @a", {"@a": 1.5})
        await admin.create_rule(topic, "s", "one", filter=chosen, action=SqlRuleAction("SET b = 1"))
        rule = await admin.get_rule(topic, "s", "one")
        assert isinstance(rule.filter, SqlRuleFilter)
        assert rule.filter.parameters == {"@a": 1.5}
        await admin.update_rule(topic, "s", rule, filter=CorrelationRuleFilter(label="x"))
        changed = (await admin.get_rule(topic, "s", "one")).filter
        assert isinstance(changed, CorrelationRuleFilter)
        assert changed.label == "x"
        await admin.delete_rule(topic, "s", "$Default")
        assert await names(admin.list_rules(topic, "s")) == ["one"]

    play(bus, story)


def test_errors_are_those_of_service_bus(bus: Bus) -> None:
    path = bus.queue()

    async def story(admin: ServiceBusAdministrationClient) -> None:
        with pytest.raises(ResourceExistsError):
            await admin.create_queue(path)
        with pytest.raises(ResourceNotFoundError):
            await admin.get_queue("nothing")
        with pytest.raises(ResourceNotFoundError):
            await admin.delete_topic("nothing")
        with pytest.raises(HttpResponseError, match="lock_duration"):
            await admin.create_queue(bus.name(), lock_duration=timedelta(hours=1))

    play(bus, story)
    key = bus.manager.create_key(f"{path}-reader", [Claim.LISTEN])

    async def refused(admin: ServiceBusAdministrationClient) -> None:
        with pytest.raises(ClientAuthenticationError):
            await admin.get_queue(path)

    play(bus, refused, key.name, key.primary)
