"""The manager: entities, rules, the meter and keys."""

from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pytest

from tests.contracts.client_site import NEWS, NOW, ORDERS, SESSIONS, Site, got, message
from tests.namespaces import ROOT
from twinbus import (
    Claim,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.entities import EntityStatus
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidArgumentError,
    NamespaceClosedError,
)


def test_a_queue_is_created_described_listed_changed_and_deleted(site: Site) -> None:
    manager = site.manager
    assert manager.create_queue("a") == QueueDescription(path="a")
    asked = QueueDescription(path="b", lock_duration=timedelta(seconds=5), user_metadata="mine")
    assert manager.create_queue(asked) == asked
    assert manager.get_queue("B") == asked
    assert [queue.path for queue in manager.list_queues()] == ["a", "b", ORDERS, SESSIONS]
    changed = replace(asked, status=EntityStatus.SEND_DISABLED)
    assert manager.update_queue(changed) == manager.get_queue("b") == changed
    manager.delete_queue("b")
    assert (manager.queue_exists("a"), manager.queue_exists("b")) == (True, False)
    with pytest.raises(EntityNotFoundError):
        manager.get_queue("b")


def test_a_topic_is_created_described_listed_changed_and_deleted(site: Site) -> None:
    manager = site.manager
    assert manager.create_topic("a") == TopicDescription(path="a")
    asked = TopicDescription(path="b", max_size_in_megabytes=7)
    assert manager.create_topic(asked) == asked == manager.get_topic("b")
    assert [topic.path for topic in manager.list_topics()] == ["a", "b", NEWS]
    changed = replace(asked, user_metadata="changed")
    assert manager.update_topic(changed) == manager.get_topic("b") == changed
    manager.delete_topic("b")
    assert (manager.topic_exists("a"), manager.topic_exists("b")) == (True, False)
    with pytest.raises(EntityNotFoundError):
        manager.get_topic("b")


def test_a_subscription_is_created_described_listed_changed_and_deleted(site: Site) -> None:
    manager = site.manager
    asked = SubscriptionDescription(topic_path=NEWS, name="asia", max_delivery_count=3)
    assert manager.create_subscription(NEWS, asked) == asked
    assert manager.get_subscription(NEWS, "asia") == asked
    assert [subscription.name for subscription in manager.list_subscriptions(NEWS)] == [
        "asia",
        "eu",
    ]
    changed = replace(asked, max_delivery_count=4)
    assert manager.update_subscription(changed) == changed
    assert manager.get_subscription(NEWS, "asia") == changed
    manager.delete_subscription(NEWS, "asia")
    assert manager.subscription_exists(NEWS, "eu")
    assert not manager.subscription_exists(NEWS, "asia")
    with pytest.raises(EntityNotFoundError):
        manager.get_subscription(NEWS, "asia")


def test_rules_are_created_described_listed_and_deleted(site: Site) -> None:
    manager = site.manager
    rule = RuleDescription("sport", SqlFilter("kind = 'sport'"))
    manager.create_rule(NEWS, "eu", rule)
    assert manager.get_rule(NEWS, "eu", "SPORT") == rule
    assert [rule.name for rule in manager.list_rules(NEWS, "eu")] == ["$Default", "sport"]
    manager.delete_rule(NEWS, "eu", "$Default")
    assert manager.rule_exists(NEWS, "eu", "sport")
    assert not manager.rule_exists(NEWS, "eu", "$Default")
    with pytest.raises(EntityNotFoundError):
        manager.get_rule(NEWS, "eu", "$Default")
    with pytest.raises(EntityAlreadyExistsError):
        manager.create_rule(NEWS, "eu", rule)


def test_a_subscription_may_start_with_a_rule_in_place_of_the_catch_all(site: Site) -> None:
    rule = RuleDescription("sport", SqlFilter("kind = 'sport'"))
    site.manager.create_subscription(NEWS, "sport", rule)
    assert list(site.manager.list_rules(NEWS, "sport")) == [rule]


def test_an_entity_that_exists_cannot_be_created_again(site: Site) -> None:
    for create in (
        lambda: site.manager.create_queue("ORDERS"),
        lambda: site.manager.create_topic(NEWS),
        lambda: site.manager.create_topic(ORDERS),
        lambda: site.manager.create_subscription(NEWS, "eu"),
    ):
        with pytest.raises(EntityAlreadyExistsError):
            create()


def test_an_entity_of_another_kind_is_not_the_one_asked_for(site: Site) -> None:
    manager = site.manager
    assert not manager.queue_exists(NEWS)
    assert not manager.topic_exists(ORDERS)
    with pytest.raises(EntityNotFoundError):
        manager.delete_queue(NEWS)
    with pytest.raises(EntityNotFoundError):
        manager.delete_topic(ORDERS)
    assert manager.topic_exists(NEWS)
    assert manager.queue_exists(ORDERS)


def test_with_exist_ok_an_existing_entity_is_returned_as_it_is(site: Site) -> None:
    manager = site.manager
    queue = manager.create_queue(QueueDescription(path="bills", max_delivery_count=3))
    topic = manager.create_topic(TopicDescription(path="sport", user_metadata="ours"))
    reader = manager.create_subscription(
        "sport", SubscriptionDescription(topic_path="sport", name="all", max_delivery_count=4)
    )
    assert manager.create_queue("BILLS", exist_ok=True) == queue
    assert manager.create_topic("sport", exist_ok=True) == topic
    assert manager.create_subscription("sport", "all", exist_ok=True) == reader


def test_with_exist_ok_a_missing_entity_is_created(site: Site) -> None:
    manager = site.manager
    urgent = RuleDescription("urgent", SqlFilter("priority > 5"))
    wanted = QueueDescription(path="bills", max_delivery_count=3)
    assert manager.create_queue(wanted, exist_ok=True) == wanted
    assert manager.create_topic("sport", exist_ok=True).path == "sport"
    assert manager.create_subscription("sport", "all", urgent, exist_ok=True).name == "all"
    assert list(manager.list_rules("sport", "all")) == [urgent]


def test_with_exist_ok_an_entity_of_another_kind_is_still_an_error(site: Site) -> None:
    with pytest.raises(EntityAlreadyExistsError, match="news exists already, as a topic"):
        site.manager.create_queue(NEWS, exist_ok=True)
    with pytest.raises(EntityAlreadyExistsError, match="orders exists already, as a queue"):
        site.manager.create_topic(ORDERS, exist_ok=True)


def test_runtime_properties_count_what_an_entity_holds(site: Site) -> None:
    site.send("1", "2", "3")
    received = got(site.receiver().receive(NOW))
    received.dead_letter()
    later = site.clock.now() + timedelta(hours=1)
    site.factory.create_message_sender(ORDERS).schedule(message(), later)
    found = site.manager.get_runtime_properties(ORDERS)
    assert found.active_message_count == 2
    assert found.dead_letter_message_count == 1
    assert found.scheduled_message_count == 1
    assert site.manager.get_runtime_properties(NEWS).subscription_count == 1


def test_the_meter_counts_the_operations_by_kind(site: Site) -> None:
    site.send("1")
    meter = site.manager.read_meter()
    assert isinstance(meter, pa.RecordBatch)
    assert meter.num_rows > 0


def test_keys_are_made_found_listed_and_deleted(site: Site) -> None:
    manager = site.manager
    root = manager.create_key("root", [Claim.MANAGE])
    sender = manager.create_key("sender", [Claim.SEND], ORDERS)
    assert len({root.primary, root.secondary, sender.primary, sender.secondary}) == 4
    assert manager.get_key("ROOT") == root
    assert manager.get_key("sender", "Orders") == sender
    assert [key for key in manager.list_keys() if key.name != ROOT.name] == [root, sender]
    manager.delete_key("sender", ORDERS)
    with pytest.raises(EntityNotFoundError):
        manager.get_key("sender", ORDERS)
    with pytest.raises(EntityNotFoundError):
        manager.delete_key("sender", ORDERS)


def test_one_secret_of_a_key_is_made_anew_and_the_other_stays(site: Site) -> None:
    manager = site.manager
    old = manager.create_key("key", [Claim.SEND], ORDERS)
    first = manager.regenerate_key("key", "primary", ORDERS)
    assert (first.primary == old.primary, first.secondary == old.secondary) == (False, True)
    second = manager.regenerate_key("key", "secondary", ORDERS)
    assert (second.primary == first.primary, second.secondary == old.secondary) == (True, False)
    assert manager.get_key("key", ORDERS) == second


def test_a_secret_that_no_key_has_is_not_made_anew(site: Site) -> None:
    old = site.manager.create_key("key", [Claim.SEND])
    with pytest.raises(InvalidArgumentError):
        site.manager.regenerate_key("key", "Primary")  # type: ignore[arg-type]
    assert site.manager.get_key("key") == old


def test_a_closed_manager_refuses(site: Site) -> None:
    site.manager.close()
    site.manager.close()
    with pytest.raises(NamespaceClosedError):
        site.manager.list_queues()
