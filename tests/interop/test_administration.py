"""The unmodified administration client of the SDK manages entities of a server over HTTPS."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, in_seconds, named, take, take_one
from tests.waiting import until

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.exceptions import ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import FalseRuleFilter, ServiceBusAdministrationClient

MINUTE = timedelta(minutes=1)


QUEUE: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(days=1),
    "dead_lettering_on_message_expiration": True,
    "default_message_time_to_live": timedelta(hours=2, seconds=1.5),
    "duplicate_detection_history_time_window": 5 * MINUTE,
    "enable_batched_operations": False,
    "enable_partitioning": True,
    "lock_duration": timedelta(seconds=30),
    "max_delivery_count": 7,
    "enable_express": True,
    "max_size_in_megabytes": 2048,
    "requires_duplicate_detection": True,
    "requires_session": True,
    "user_metadata": "of <sales> & 'services' \u00e9",
    "status": "ReceiveDisabled",
}


QUEUE_UPDATE: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(days=2),
    "dead_lettering_on_message_expiration": False,
    "default_message_time_to_live": timedelta(days=14),
    "duplicate_detection_history_time_window": 10 * MINUTE,
    "enable_batched_operations": True,
    "lock_duration": MINUTE,
    "max_delivery_count": 10,
    "enable_express": False,
    "max_size_in_megabytes": 1024,
    "user_metadata": "changed",
    "status": "Active",
}


TOPIC: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(days=1),
    "default_message_time_to_live": timedelta(hours=3),
    "duplicate_detection_history_time_window": 5 * MINUTE,
    "enable_batched_operations": False,
    "enable_partitioning": True,
    "max_size_in_megabytes": 2048,
    "requires_duplicate_detection": True,
    "enable_express": True,
    "support_ordering": False,
    "filtering_messages_before_publishing": False,
    "user_metadata": "a topic",
    "status": "SendDisabled",
}


TOPIC_UPDATE: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(days=2),
    "default_message_time_to_live": timedelta(hours=4),
    "duplicate_detection_history_time_window": 6 * MINUTE,
    "enable_batched_operations": True,
    "enable_express": False,
    "support_ordering": True,
    "max_size_in_megabytes": 1024,
    "user_metadata": "changed",
    "status": "Active",
}


SUBSCRIPTION: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(days=1),
    "dead_lettering_on_message_expiration": True,
    "dead_lettering_on_filter_evaluation_exceptions": False,
    "default_message_time_to_live": timedelta(hours=3),
    "enable_batched_operations": False,
    "lock_duration": timedelta(seconds=20),
    "max_delivery_count": 3,
    "requires_session": True,
    "user_metadata": "a subscription",
    "status": "Disabled",
}


SUBSCRIPTION_UPDATE: dict[str, Any] = {
    "auto_delete_on_idle": timedelta(days=2),
    "dead_lettering_on_message_expiration": False,
    "dead_lettering_on_filter_evaluation_exceptions": True,
    "default_message_time_to_live": timedelta(hours=4),
    "enable_batched_operations": True,
    "lock_duration": MINUTE,
    "max_delivery_count": 4,
    "user_metadata": "changed",
    "status": "Active",
}


# -- queues, topics, subscriptions -----------------------------------------------------------------


def test_a_queue_has_every_property_that_it_was_created_with(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    made = admin.create_queue(path, **QUEUE)
    assert (made.name, named(made, QUEUE)) == (path, QUEUE)
    assert named(admin.get_queue(path), QUEUE) == QUEUE
    assert bus.manager.get_queue(path).lock_duration == timedelta(seconds=30)


def test_a_queue_has_every_property_that_it_was_updated_with(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    queue = admin.create_queue(path, **QUEUE)
    for name, value in QUEUE_UPDATE.items():
        setattr(queue, name, value)
    admin.update_queue(queue)
    assert named(admin.get_queue(path), QUEUE) == QUEUE | QUEUE_UPDATE
    admin.update_queue(queue, max_delivery_count=4)
    assert admin.get_queue(path).max_delivery_count == 4


def test_a_setting_that_an_update_leaves_out_gets_its_default(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    queue = admin.create_queue(path, user_metadata="some", lock_duration=timedelta(seconds=10))
    queue.user_metadata = queue.lock_duration = None
    admin.update_queue(queue)
    found = admin.get_queue(path)
    assert (found.user_metadata, found.lock_duration) == (None, MINUTE)


def test_defaults_are_those_of_service_bus(bus: Bus, admin: ServiceBusAdministrationClient) -> None:
    queue = admin.create_queue(bus.name())
    assert queue.default_message_time_to_live.days == 10675199  # type: ignore[union-attr]
    assert queue.auto_delete_on_idle.days == 10675199  # type: ignore[union-attr]
    assert (queue.max_delivery_count, queue.lock_duration) == (10, MINUTE)
    assert (queue.status, queue.availability_status) == ("Active", "Available")
    admin.update_queue(queue)  # the largest time comes back as it went
    assert admin.get_queue(queue.name).auto_delete_on_idle == queue.auto_delete_on_idle


def test_a_topic_has_every_property_that_it_was_given(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    made = admin.create_topic(path, **TOPIC)
    assert named(made, TOPIC) == named(admin.get_topic(path), TOPIC) == TOPIC
    assert made.availability_status == "Available"
    admin.update_topic(made, **TOPIC_UPDATE)
    assert named(admin.get_topic(path), TOPIC) == TOPIC | TOPIC_UPDATE


def test_a_subscription_has_every_property_that_it_was_given(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic = bus.name()
    admin.create_topic(topic)
    made = admin.create_subscription(topic, "sport", **SUBSCRIPTION)
    assert made.name == "sport"
    assert named(made, SUBSCRIPTION) == SUBSCRIPTION
    assert named(admin.get_subscription(topic, "sport"), SUBSCRIPTION) == SUBSCRIPTION
    assert made.availability_status == "Available"
    admin.update_subscription(topic, made, **SUBSCRIPTION_UPDATE)
    found = named(admin.get_subscription(topic, "sport"), SUBSCRIPTION)
    assert found == SUBSCRIPTION | SUBSCRIPTION_UPDATE


def test_a_subscription_forwards_until_it_is_updated(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic, target = bus.name(), bus.queue()
    admin.create_topic(topic)
    made = admin.create_subscription(topic, "relay", forward_to=target)
    assert (made.forward_to or "").endswith(target)
    found = admin.get_subscription(topic, "relay")
    assert found.forward_to == made.forward_to
    found.forward_to = None
    admin.update_subscription(topic, found)
    assert admin.get_subscription(topic, "relay").forward_to is None


def test_a_name_with_slashes_is_one_name(bus: Bus, admin: ServiceBusAdministrationClient) -> None:
    path = f"{bus.name()}/parts/of.it"
    admin.create_topic(path)
    admin.create_subscription(path, "all")
    assert admin.get_topic(path).name == path
    assert [item.name for item in admin.list_subscriptions(path)] == ["all"]
    bus.manager.get_subscription(path, "all")
    admin.delete_subscription(path, "all")
    admin.delete_topic(path)
    with pytest.raises(ResourceNotFoundError):
        admin.get_topic(path)


def test_an_entity_may_have_the_name_of_a_page(admin: ServiceBusAdministrationClient) -> None:
    for name in ("health", "metrics", "ready"):
        assert admin.create_queue(name).name == name
        assert admin.get_queue(name).name == name
        admin.delete_queue(name)


@pytest.mark.parametrize("version", ["2017-04", "2021-05", "2024-05"])
def test_every_version_of_the_api_is_served(bus: Bus, version: str) -> None:
    admin = bus.administration(api_version=version)
    queue = admin.create_queue(bus.name())
    size = None if version == "2017-04" else 256
    assert admin.get_queue(queue.name).max_message_size_in_kilobytes == size


def test_the_namespace_describes_itself(admin: ServiceBusAdministrationClient) -> None:
    found = admin.get_namespace_properties()
    assert (found.name, found.messaging_sku) == ("shop", "Standard")
    assert found.created_at_utc <= datetime.now(UTC)  # type: ignore[operator]


# -- lists -----------------------------------------------------------------------------------------


def test_lists_come_in_pages(bus: Bus, admin: ServiceBusAdministrationClient) -> None:
    topic = bus.name()
    admin.create_topic(topic)
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        admin.create_queue(f"{topic}-{name}")
        admin.create_topic(f"{topic}-{name}-topic")
        admin.create_subscription(topic, name)
        admin.create_rule(topic, "page-0", name, filter=FalseRuleFilter())
    assert [item.name for item in admin.list_subscriptions(topic, max_page_size=2)] == names
    rules = [rule.name for rule in admin.list_rules(topic, "page-0", max_page_size=2)]
    assert rules == ["$Default", *names]
    queues = [queue.name for queue in admin.list_queues(max_page_size=2)]
    assert [name for name in queues if name.startswith(topic)] == [f"{topic}-{n}" for n in names]
    assert queues == [queue.path for queue in bus.manager.list_queues()]
    topics = [topic.name for topic in admin.list_topics(max_page_size=2)]
    assert topics == [topic.path for topic in bus.manager.list_topics()]
    third = list(admin.list_subscriptions(topic, start_index=4, max_page_size=2))
    assert [item.name for item in third] == names[4:]
    counted = list(admin.list_subscriptions_runtime_properties(topic, max_page_size=2))
    assert [item.name for item in counted] == names
    assert list(admin.list_subscriptions(topic, start_index=100)) == []


def test_a_page_has_at_most_a_hundred_entries(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic = bus.name()
    bus.manager.create_topic(topic)
    for number in range(101):
        bus.manager.create_subscription(topic, f"s{number}")
    assert len(list(admin.list_subscriptions(topic, max_page_size=1000))) == 101


# -- what entities hold ----------------------------------------------------------------------------


def test_runtime_properties_count_messages(bus: Bus, admin: ServiceBusAdministrationClient) -> None:
    path = bus.queue()
    sender, receiver = bus.sender(path), bus.receiver(path)
    sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b"), ServiceBusMessage("c")])
    sender.schedule_messages(ServiceBusMessage("later"), in_seconds(600))
    receiver.dead_letter_message(take_one(receiver))
    until(lambda: admin.get_queue_runtime_properties(path).dead_letter_message_count == 1)
    found = admin.get_queue_runtime_properties(path)
    assert (found.active_message_count, found.scheduled_message_count) == (2, 1)
    assert (found.total_message_count, found.transfer_message_count) == (4, 0)
    assert found.size_in_bytes > 0  # type: ignore[operator]
    assert found.created_at_utc <= found.accessed_at_utc  # type: ignore[operator]
    [listed] = [o for o in admin.list_queues_runtime_properties() if o.name == path]
    assert listed.total_message_count == 4


def test_runtime_properties_of_topics_and_subscriptions(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic = bus.name()
    admin.create_topic(topic)
    admin.create_subscription(topic, "one")
    admin.create_subscription(topic, "two")
    sender = bus.keep(bus.sdk.get_topic_sender(topic))
    sender.send_messages(ServiceBusMessage("a"))
    sender.schedule_messages(ServiceBusMessage("b"), in_seconds(600))
    found = admin.get_topic_runtime_properties(topic)
    assert (found.subscription_count, found.scheduled_message_count) == (2, 1)
    counts = [o.active_message_count for o in admin.list_subscriptions_runtime_properties(topic)]
    assert counts == [1, 1]


# -- forwarding ------------------------------------------------------------------------------------


def test_a_queue_forwards_where_its_creator_may_send(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    target, path = bus.queue(), bus.name()
    queue = admin.create_queue(path, forward_to=target)
    assert (queue.forward_to or "").endswith(target)
    bus.sender(path).send_messages(ServiceBusMessage("a"))
    assert len(take(bus.receiver(target))) == 1
    queue.forward_to = None
    admin.update_queue(queue)
    assert admin.get_queue(path).forward_to is None


@pytest.mark.parametrize("setting", ["forward_to", "forward_dead_lettered_messages_to"])
def test_forwarding_to_nothing_is_refused(
    bus: Bus, admin: ServiceBusAdministrationClient, setting: str
) -> None:
    settings: dict[str, Any] = {setting: "nowhere"}
    with pytest.raises(ResourceNotFoundError, match="nowhere"):
        admin.create_queue(bus.name(), **settings)


def test_dead_letters_are_forwarded_where_the_creator_of_a_queue_may_send(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    target, other, path = bus.queue(), bus.queue(), bus.name()
    queue = admin.create_queue(path, forward_dead_lettered_messages_to=target)
    assert (queue.forward_dead_lettered_messages_to or "").endswith(target)

    def kill() -> None:
        bus.sender(path).send_messages(ServiceBusMessage("a", application_properties={"n": 1}))
        with bus.receiver(path) as receiver:
            (message,) = receiver.receive_messages(max_message_count=1, max_wait_time=10)
            receiver.dead_letter_message(message, "broken", "no such table")

    kill()
    (arrived,) = take(bus.receiver(target))
    assert (arrived.dead_letter_reason, arrived.dead_letter_source) == ("broken", path)
    assert arrived.dead_letter_error_description == "no such table"
    assert arrived.delivery_count == 0
    queue = admin.get_queue(path)
    queue.forward_dead_lettered_messages_to = other
    admin.update_queue(queue)
    kill()
    assert len(take(bus.receiver(other))) == 1
    queue.forward_dead_lettered_messages_to = None
    admin.update_queue(queue)
    assert admin.get_queue(path).forward_dead_lettered_messages_to is None
    kill()
    assert admin.get_queue_runtime_properties(path).dead_letter_message_count == 1


def test_a_subscription_forwards_its_dead_letters(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    target, topic = bus.queue(), bus.name()
    admin.create_topic(topic)
    made = admin.create_subscription(topic, "s", forward_dead_lettered_messages_to=target)
    found = admin.get_subscription(topic, "s")
    assert (found.forward_dead_lettered_messages_to or "").endswith(target)
    assert found.forward_dead_lettered_messages_to == made.forward_dead_lettered_messages_to


def test_administration_is_metered_like_that_of_other_clients(bus: Bus) -> None:
    path = bus.queue()
    bus.admin.get_queue(path)
    rows = bus.manager.read_meter().to_pylist()
    kinds = {row["operation"] for row in rows if row["path"] == path}
    assert {"GetEntity", "GetRuntimeProperties"} <= kinds
