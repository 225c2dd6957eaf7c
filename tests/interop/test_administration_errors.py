"""What the administration client of the SDK is refused, and with which errors."""

from datetime import timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, sdk_string

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.exceptions import (
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
    ServiceRequestError,
)
from azure.servicebus.management import ServiceBusAdministrationClient


def test_an_entity_that_exists_cannot_be_created_by_the_sdk(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic = bus.name()
    admin.create_topic(topic)
    admin.create_subscription(topic, "s")
    for create in (
        lambda: admin.create_topic(topic),
        lambda: admin.create_queue(topic.upper()),
        lambda: admin.create_subscription(topic, "S"),
        lambda: admin.create_rule(topic, "s", "$default"),
    ):
        with pytest.raises(ResourceExistsError):
            create()


def test_an_entity_that_does_not_exist_is_not_found(
    bus: Bus, admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    queue = admin.create_queue(bus.name())
    admin.delete_queue(queue.name)
    for use in (
        lambda: admin.get_queue("nothing"),
        lambda: admin.update_queue(queue),
        lambda: admin.delete_queue("nothing"),
        lambda: admin.get_topic_runtime_properties("nothing"),
        lambda: admin.create_subscription("nothing", "s"),
        lambda: admin.get_subscription(subscription, "nothing"),
        lambda: admin.delete_subscription(subscription, "nothing"),
        lambda: admin.get_rule(subscription, "rules", "nothing"),
        lambda: admin.delete_rule(subscription, "rules", "nothing"),
        lambda: list(admin.list_subscriptions("nothing")),
        lambda: list(admin.list_rules(subscription, "nothing")),
    ):
        with pytest.raises(ResourceNotFoundError):
            use()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lock_duration": timedelta(hours=1)}, "lock_duration"),
        ({"max_delivery_count": 0}, "max_delivery_count"),
        ({"max_size_in_megabytes": 10**9}, "max_size_in_megabytes"),
        ({"max_message_size_in_kilobytes": 1024}, "MaxMessageSizeInKilobytes"),
        ({"user_metadata": "x" * 1025}, "user_metadata"),
        ({"status": "Renaming"}, "Status"),
        ({"forward_dead_lettered_messages_to": "two words"}, "forward_dead_lettered_messages_to"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_value_is_refused_and_named(bus: Bus, settings: dict[str, Any], text: str) -> None:
    path = bus.name()
    with pytest.raises(HttpResponseError, match=text) as refused:
        bus.admin.create_queue(path, **settings)
    assert refused.value.status_code == 400
    assert not bus.manager.queue_exists(path)


@pytest.mark.parametrize("name", ["two words", "$odd", "a//b", "..", "x" * 261, "a/subscriptions"])
def test_a_bad_name_is_refused(bus: Bus, name: str) -> None:
    with pytest.raises(HttpResponseError):
        bus.admin.create_queue(name)


def test_a_setting_that_is_fixed_at_creation_cannot_be_updated(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    queue = admin.create_queue(bus.name())
    queue.requires_session = True
    with pytest.raises(HttpResponseError, match="fixed at creation"):
        admin.update_queue(queue)


def test_a_server_that_is_not_trusted_is_not_talked_to(bus: Bus) -> None:
    text = sdk_string(bus.server)
    with (
        ServiceBusAdministrationClient.from_connection_string(text, retry_total=0) as stranger,
        pytest.raises(ServiceRequestError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        stranger.get_queue("orders")
