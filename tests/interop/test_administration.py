"""The unmodified administration client of the SDK manages a Twinbus server over HTTPS."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.interop.bus import Bus, in_seconds, sdk_string, take, take_one
from tests.waiting import until
from twinbus import Claim

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
    ServiceRequestError,
)
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusAuthorizationError
from azure.servicebus.management import (
    AccessRights,
    AuthorizationRule,
    CorrelationRuleFilter,
    FalseRuleFilter,
    ServiceBusAdministrationClient,
    SqlRuleAction,
    SqlRuleFilter,
    TrueRuleFilter,
)

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


def named(properties: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return those of the properties that have a wanted value."""
    return {name: getattr(properties, name) for name in wanted}


@pytest.fixture(scope="module")
def admin(bus: Bus) -> ServiceBusAdministrationClient:
    return bus.admin


# -- queues, topics, subscriptions ---------------------------------------------------------------


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


def test_what_an_update_leaves_out_gets_its_default(
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


# -- lists ---------------------------------------------------------------------------------------


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


# -- what entities hold --------------------------------------------------------------------------


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


# -- rules ---------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "text": "a <b> & c",
    "small": -3,
    "large": 2**40,
    "real": 2.5,
    "yes": True,
    "moment": datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC),
    "span": timedelta(hours=1, minutes=30),
}
CORRELATION: dict[str, Any] = {
    "correlation_id": "c",
    "message_id": "m",
    "to": "t",
    "reply_to": "r",
    "label": "l",
    "session_id": "s",
    "reply_to_session_id": "rs",
    "content_type": "text/plain",
}


@pytest.fixture(scope="module")
def subscription(bus: Bus) -> str:
    topic = bus.name()
    bus.admin.create_topic(topic)
    bus.admin.create_subscription(topic, "rules")
    return topic


def test_a_subscription_begins_with_a_rule_that_takes_everything(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    rule = admin.get_rule(subscription, "rules", "$Default")
    assert isinstance(rule.filter, TrueRuleFilter)
    assert rule.action is None
    assert rule.created_at_utc <= datetime.now(UTC)  # type: ignore[operator]


def test_a_sql_rule_keeps_its_parameters_and_their_types(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    parameters = {f"@{name}": value for name, value in VALUES.items()}
    chosen = SqlRuleFilter("a < @small AND b = @text", parameters)
    action = SqlRuleAction("SET c = @text", {"@text": "x"})
    admin.create_rule(subscription, "rules", "sql", filter=chosen, action=action)
    rule = admin.get_rule(subscription, "rules", "sql")
    assert isinstance(rule.filter, SqlRuleFilter)
    assert (rule.filter.sql_expression, rule.filter.parameters) == (
        chosen.sql_expression,
        parameters,
    )
    assert isinstance(rule.action, SqlRuleAction)
    assert (rule.action.sql_expression, rule.action.parameters) == ("SET c = @text", {"@text": "x"})


def test_a_correlation_rule_keeps_its_fields_and_properties(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    chosen = CorrelationRuleFilter(**CORRELATION, properties=VALUES)
    admin.create_rule(subscription, "rules", "correlation", filter=chosen)
    found = admin.get_rule(subscription, "rules", "correlation").filter
    assert isinstance(found, CorrelationRuleFilter)
    assert named(found, CORRELATION) == CORRELATION
    assert found.properties == VALUES


@pytest.mark.parametrize("kind", [TrueRuleFilter, FalseRuleFilter])
def test_true_and_false_rules(
    admin: ServiceBusAdministrationClient,
    subscription: str,
    kind: Callable[[], TrueRuleFilter | FalseRuleFilter],
) -> None:
    name = kind.__name__
    admin.create_rule(subscription, "rules", name, filter=kind())
    assert type(admin.get_rule(subscription, "rules", name).filter) is kind


def test_a_rule_that_is_updated_selects_other_messages(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    topic = bus.name()
    admin.create_topic(topic)
    admin.create_subscription(topic, "s")
    rule = admin.get_rule(topic, "s", "$Default")
    admin.update_rule(topic, "s", rule, filter=SqlRuleFilter("colour = 'red'"))
    sender = bus.keep(bus.sdk.get_topic_sender(topic))
    for colour in ("red", "blue"):
        message = ServiceBusMessage(colour, application_properties={"colour": colour})
        sender.send_messages(message)
    assert admin.get_subscription_runtime_properties(topic, "s").active_message_count == 1
    admin.delete_rule(topic, "s", "$Default")
    assert list(admin.list_rules(topic, "s")) == []
    with pytest.raises(ResourceNotFoundError):
        admin.update_rule(topic, "s", rule)


# -- keys ----------------------------------------------------------------------------------------


def rule_of(name: str, *rights: AccessRights, primary: str = "p" * 32) -> AuthorizationRule:
    return AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        claim_value="None",
        rights=list(rights),
        key_name=name,
        primary_key=primary,
        secondary_key="s" * 32,
    )


def test_authorization_rules_are_keys_of_the_entity(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    rules = [rule_of("writer", AccessRights.SEND), rule_of("reader", AccessRights.LISTEN)]
    queue = admin.create_queue(path, authorization_rules=rules)
    found = {rule.key_name: rule for rule in queue.authorization_rules or []}
    assert found["writer"].rights == ["Send"]
    assert found["reader"].primary_key == "p" * 32
    writer = bus.client("writer", "p" * 32, retry_total=0)
    bus.sender(path, writer).send_messages(ServiceBusMessage("a"))
    with pytest.raises(ServiceBusAuthorizationError):
        bus.receiver(path, writer).receive_messages(max_wait_time=1)
    assert len(take(bus.receiver(path, bus.client("reader", "s" * 32)))) == 1


def test_an_update_replaces_the_keys_of_an_entity(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    rules = [rule_of("old", AccessRights.SEND), rule_of("kept", AccessRights.LISTEN)]
    queue = admin.create_topic(path, authorization_rules=rules)
    queue.authorization_rules = [
        rule_of("kept", AccessRights.MANAGE, AccessRights.SEND, AccessRights.LISTEN),
        AuthorizationRule(key_name="drawn", rights=[AccessRights.SEND]),
    ]
    admin.update_topic(queue)
    keys = {key.name: key for key in bus.manager.list_keys() if key.entity_path == path}
    assert set(keys) == {"kept", "drawn"}
    assert keys["kept"].has(Claim.MANAGE)
    assert len(keys["drawn"].primary) > 30
    with pytest.raises((ServiceBusAuthenticationError, ServiceBusAuthorizationError)):
        bus.sender(path, bus.client("old", "p" * 32, retry_total=0)).send_messages(
            ServiceBusMessage("a")
        )
    queue = admin.get_topic(path)
    queue.authorization_rules = []
    admin.update_topic(queue)
    assert not any(key.entity_path == path for key in bus.manager.list_keys())


def test_an_entity_whose_keys_are_refused_is_not_created(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    path = bus.name()
    with pytest.raises(HttpResponseError, match="secret of key short"):
        admin.create_queue(
            path, authorization_rules=[rule_of("short", AccessRights.SEND, primary="x")]
        )
    assert not bus.manager.queue_exists(path)


# -- forwarding ----------------------------------------------------------------------------------


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


# -- errors --------------------------------------------------------------------------------------


def test_what_exists_cannot_be_created(bus: Bus, admin: ServiceBusAdministrationClient) -> None:
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


def test_what_does_not_exist_is_not_found(
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


def test_what_is_fixed_at_creation_cannot_be_updated(
    bus: Bus, admin: ServiceBusAdministrationClient
) -> None:
    queue = admin.create_queue(bus.name())
    queue.requires_session = True
    with pytest.raises(HttpResponseError, match="fixed at creation"):
        admin.update_queue(queue)


def test_bad_sql_is_refused_with_its_reason(
    admin: ServiceBusAdministrationClient, subscription: str
) -> None:
    with pytest.raises(HttpResponseError, match=r"(?i)sql") as refused:
        admin.create_rule(subscription, "rules", "bad", filter=SqlRuleFilter("colour = "))
    assert refused.value.status_code == 400


def test_a_key_without_the_claim_manages_nothing(bus: Bus) -> None:
    path = bus.queue()
    key = bus.manager.create_key(f"{path}-sender", [Claim.SEND, Claim.LISTEN])
    refused = bus.administration(key.name, key.primary)
    for use in (
        lambda: refused.get_queue(path),
        lambda: refused.create_queue(bus.name()),
        lambda: refused.delete_queue(path),
        lambda: list(refused.list_queues()),
        refused.get_namespace_properties,
    ):
        with pytest.raises(ClientAuthenticationError):
            use()
    with pytest.raises(ClientAuthenticationError):
        bus.administration(key="wrong" * 8).get_queue(path)
    assert bus.manager.queue_exists(path)


def test_a_server_that_is_not_trusted_is_not_talked_to(bus: Bus) -> None:
    text = sdk_string(bus.server)
    with (
        ServiceBusAdministrationClient.from_connection_string(text, retry_total=0) as stranger,
        pytest.raises(ServiceRequestError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        stranger.get_queue("orders")


def test_administration_is_metered_like_that_of_other_clients(bus: Bus) -> None:
    path = bus.queue()
    bus.admin.get_queue(path)
    rows = bus.manager.read_meter().to_pylist()
    kinds = {row["operation"] for row in rows if row["path"] == path}
    assert {"GetEntity", "GetRuntimeProperties"} <= kinds
