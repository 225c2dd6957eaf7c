"""Managing: create, describe, list, change and delete entities; what they hold and when."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    later,
    message,
    outcome,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    settle,
    start,
    subscription,
    take,
    topic,
)
from twinbus.entities import (
    EntityDescription,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    InvalidArgumentError,
    MessagingError,
)
from twinbus.limits import UNLIMITED
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Disposition,
    EntityKind,
    GetEntity,
    GetRuntimeProperties,
    ListEntities,
    Receive,
    ReceiveMode,
    UpdateEntity,
)

MINUTE = timedelta(minutes=1)
COMMON: dict[str, Any] = {
    "default_message_time_to_live": timedelta(days=2),
    "auto_delete_on_idle": timedelta(hours=3),
    "enable_batched_operations": False,
    "status": EntityStatus.SEND_DISABLED,
    "user_metadata": "owned by sales",
}
FULL_QUEUE = QueueDescription(
    path="contoso/x-servicebus-transfer/0",
    max_size_in_megabytes=5120,
    max_delivery_count=2147483647,
    lock_duration=timedelta(seconds=90),
    enable_dead_lettering_on_message_expiration=True,
    requires_session=True,
    requires_duplicate_detection=True,
    duplicate_detection_history_time_window=timedelta(minutes=3),
    enable_partitioning=True,
    **COMMON,
)
FULL_TOPIC = TopicDescription(
    path=TOPIC,
    max_size_in_megabytes=2048,
    requires_duplicate_detection=True,
    duplicate_detection_history_time_window=timedelta(minutes=3),
    enable_partitioning=True,
    **COMMON,
)
FULL_SUBSCRIPTION = SubscriptionDescription(
    topic_path=TOPIC,
    name="sport",
    max_delivery_count=3,
    lock_duration=timedelta(seconds=90),
    enable_dead_lettering_on_message_expiration=True,
    requires_session=True,
    **COMMON,
)


def paths(world: World, kind: EntityKind, topic_path: str | None = None) -> list[str]:
    return [entity.path for entity in world.ask(ListEntities(kind, topic_path))]


# -- create and describe -----------------------------------------------------------------------


@pytest.mark.parametrize("description", [FULL_QUEUE, FULL_TOPIC, FULL_SUBSCRIPTION], ids=type)
def test_an_entity_is_described_as_it_was_created(
    world: World, description: EntityDescription
) -> None:
    if isinstance(description, SubscriptionDescription):
        topic(world)
    assert world.ask(CreateEntity(description)) == description
    assert world.ask(GetEntity(description.path)) == description


def test_a_queue_has_defaults(world: World) -> None:
    made = queue(world)
    assert made == QueueDescription(path=QUEUE)
    assert made.max_delivery_count == 10
    assert made.lock_duration == timedelta(minutes=1)
    assert made.default_message_time_to_live == made.auto_delete_on_idle == UNLIMITED


def test_an_entity_is_found_whatever_the_case_of_its_path(world: World) -> None:
    world.need(Capability.ANY_CASE)
    queue(world, "Orders")
    assert world.ask(GetEntity("oRDERS")).path.lower() == "orders"


@pytest.mark.parametrize("path", ["orders", "ORDERS"])
def test_a_path_is_taken_once(world: World, path: str) -> None:
    if path != QUEUE:
        world.need(Capability.ANY_CASE)
    queue(world)
    with pytest.raises(EntityAlreadyExistsError):
        queue(world, path)


def test_queues_and_topics_share_their_paths(world: World) -> None:
    queue(world)
    with pytest.raises(EntityAlreadyExistsError):
        topic(world, QUEUE)


def test_only_a_subscription_is_created_with_a_rule(world: World) -> None:
    with pytest.raises(MessagingError):
        world.ask(CreateEntity(QueueDescription(path=QUEUE), RuleDescription("red")))


@pytest.mark.parametrize("command", [GetEntity, GetRuntimeProperties, DeleteEntity])
def test_an_unknown_entity_cannot_be_managed(world: World, command: type[GetEntity]) -> None:
    for path in ("nowhere", "nowhere/$DeadLetterQueue", "no/Subscriptions/one"):
        with pytest.raises(EntityNotFoundError):
            world.ask(command(path))


# -- list --------------------------------------------------------------------------------------


def test_an_empty_namespace_lists_nothing(world: World) -> None:
    assert [paths(world, kind) for kind in EntityKind] == [[], [], []]


def test_entities_are_listed_by_kind_and_path(world: World) -> None:
    for path in ("zebra", "ant", "mule/1"):
        queue(world, path)
    topic(world)
    assert paths(world, EntityKind.QUEUE) == ["ant", "mule/1", "zebra"]
    assert paths(world, EntityKind.TOPIC) == [TOPIC]


def test_subscriptions_are_listed_by_topic(world: World) -> None:
    topic(world)
    topic(world, "other")
    subscription(world, "weather")
    subscription(world, "sport")
    world.ask(CreateEntity(SubscriptionDescription(topic_path="other", name="all")))
    listed = paths(world, EntityKind.SUBSCRIPTION, "NEWS")
    assert [path.lower() for path in listed] == [
        "news/subscriptions/sport",
        "news/subscriptions/weather",
    ]


def test_subscriptions_of_an_unknown_topic_cannot_be_listed(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        world.ask(ListEntities(EntityKind.SUBSCRIPTION, "nowhere"))


def test_dead_letter_queues_are_not_listed(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    assert paths(world, EntityKind.QUEUE) == [QUEUE]


# -- change ------------------------------------------------------------------------------------


def test_a_changed_entity_is_described_as_changed(world: World) -> None:
    made = queue(world)
    changed = replace(made, max_delivery_count=3, user_metadata="new", lock_duration=2 * MINUTE)
    assert world.ask(UpdateEntity(changed)) == changed
    assert world.ask(GetEntity(QUEUE)) == changed


def test_a_new_lock_duration_holds_from_the_next_delivery(world: World) -> None:
    made = queue(world)
    send(world, "a")
    world.ask(UpdateEntity(replace(made, lock_duration=5 * MINUTE)))
    assert receive_one(world).locked_until_utc == later(world, minutes=5)


def test_changing_an_entity_keeps_its_messages(world: World) -> None:
    made = queue(world)
    send(world, "a")
    world.ask(UpdateEntity(replace(made, max_delivery_count=3)))
    assert take(world) == ["a"]


@pytest.mark.parametrize(
    "setting", ["requires_session", "requires_duplicate_detection", "enable_partitioning"]
)
def test_some_settings_are_fixed_at_creation(world: World, setting: str) -> None:
    made = queue(world)
    changed: dict[str, Any] = {setting: True}
    with pytest.raises(InvalidArgumentError):
        world.ask(UpdateEntity(replace(made, **changed)))
    assert world.ask(GetEntity(QUEUE)) == made


def test_a_subscription_can_be_changed(world: World) -> None:
    topic(world)
    made = world.ask(GetEntity(subscription(world, "sport")))
    changed = replace(made, max_delivery_count=3)
    assert world.ask(UpdateEntity(changed)) == changed


def test_a_topic_can_be_changed(world: World) -> None:
    changed = replace(topic(world), user_metadata="new")
    assert world.ask(UpdateEntity(changed)) == changed


def test_an_unknown_entity_cannot_be_changed(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        world.ask(UpdateEntity(QueueDescription(path="nowhere")))


def test_a_queue_cannot_be_changed_into_a_topic(world: World) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError, match="cannot be updated with a TopicDescription"):
        world.ask(UpdateEntity(TopicDescription(path=QUEUE)))
    assert isinstance(world.ask(GetEntity(QUEUE)), QueueDescription)


# -- delete ------------------------------------------------------------------------------------


def test_a_deleted_entity_is_gone(world: World) -> None:
    world.need(Capability.ANY_CASE)
    queue(world)
    world.ask(DeleteEntity("ORDERS"))
    with pytest.raises(EntityNotFoundError):
        send(world, "a")
    assert paths(world, EntityKind.QUEUE) == []


def test_a_deleted_entity_takes_its_messages_with_it(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    world.ask(DeleteEntity(QUEUE))
    queue(world)
    assert peek(world) == []
    assert peek(world, DEAD) == []
    assert runtime(world).dead_letter_message_count == 0


def test_a_path_is_free_again_after_deletion(world: World) -> None:
    queue(world)
    world.ask(DeleteEntity(QUEUE))
    topic(world, QUEUE)
    assert paths(world, EntityKind.TOPIC) == [QUEUE]


def test_a_dead_letter_queue_cannot_be_deleted_by_itself(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    with pytest.raises(MessagingError):
        world.ask(DeleteEntity(DEAD))
    assert take(world, DEAD) == ["a"]


# -- runtime properties ------------------------------------------------------------------------


def test_a_new_queue_holds_nothing(world: World) -> None:
    queue(world)
    now = runtime(world)
    assert now.path == QUEUE
    assert now.active_message_count == now.dead_letter_message_count == 0
    assert now.scheduled_message_count == now.transfer_message_count == now.size_in_bytes == 0


def test_deliverable_locked_and_deferred_messages_are_active(world: World) -> None:
    queue(world)
    send(world, "deferred", "locked", "deliverable")
    deferred, _locked = receive(world, count=2)
    settle(world, Disposition.DEFER, deferred)
    assert runtime(world).active_message_count == 3


def test_counts_follow_the_life_of_messages(world: World) -> None:
    queue(world)
    send(world, "complete", "dead", "stays")
    done, dead = receive(world, count=2)
    settle(world, Disposition.COMPLETE, done)
    settle(world, Disposition.DEAD_LETTER, dead)
    now = runtime(world)
    assert (now.active_message_count, now.dead_letter_message_count) == (1, 1)


def test_the_dead_letter_count_falls_when_dead_letters_are_completed(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    take(world, DEAD)
    assert runtime(world).dead_letter_message_count == 0


def test_the_size_of_a_queue_is_that_of_its_messages(world: World) -> None:
    world.need(Capability.METERING)
    queue(world)
    sent = [message("a" * 1000, subject="s"), message("b", application_properties={"n": 1})]
    send(world, *sent)
    assert runtime(world).size_in_bytes == sum(m.size for m in sent)


def test_dead_letters_do_not_count_in_the_size(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    assert runtime(world).size_in_bytes == 0


def test_scheduled_messages_count_in_the_size(world: World) -> None:
    world.need(Capability.METERING)
    queue(world)
    item = message("a", scheduled_enqueue_time_utc=later(world, hours=1))
    send(world, item)
    assert runtime(world).size_in_bytes == item.size


def test_an_entity_says_when_it_was_created_and_changed(world: World) -> None:
    made = queue(world)
    created = world.clock.now()
    world.wait(hours=1)
    world.ask(UpdateEntity(replace(made, max_delivery_count=3)))
    assert runtime(world).created_at_utc == created
    assert runtime(world).updated_at_utc == later(world, hours=0)


@pytest.mark.parametrize("use", [lambda world: send(world, "a"), receive], ids=["send", "receive"])
def test_an_entity_says_when_it_was_last_used(world: World, use: Any) -> None:
    queue(world)
    world.wait(hours=1)
    use(world)
    used = world.clock.now()
    world.wait(hours=1)
    assert runtime(world).accessed_at_utc == used


# -- auto delete on idle -----------------------------------------------------------------------

IDLE: dict[str, Any] = {"auto_delete_on_idle": timedelta(minutes=5)}


def test_an_idle_queue_is_deleted(world: World) -> None:
    queue(world, **IDLE)
    world.wait(minutes=6)
    with pytest.raises(EntityNotFoundError):
        world.ask(GetEntity(QUEUE))


def test_a_queue_is_not_deleted_before_its_idle_time_is_over(world: World) -> None:
    queue(world, **IDLE)
    world.wait(minutes=4)
    assert world.ask(GetEntity(QUEUE))


@pytest.mark.parametrize("use", [lambda world: send(world, "a"), receive], ids=["send", "receive"])
def test_a_queue_in_use_is_not_deleted(world: World, use: Any) -> None:
    queue(world, **IDLE)
    for _ in range(4):
        world.wait(minutes=4)
        use(world)
    assert world.ask(GetEntity(QUEUE))


def test_a_queue_with_a_waiting_receiver_is_not_idle(world: World) -> None:
    queue(world, **IDLE)
    mode = ReceiveMode.RECEIVE_AND_DELETE
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1), mode=mode))
    world.wait(minutes=30)
    send(world, "a")
    assert outcome(waiting) == ["a"]


def test_an_idle_queue_is_deleted_with_its_messages(world: World) -> None:
    queue(world, **IDLE)
    send(world, "a")
    world.wait(minutes=6)
    queue(world)
    assert peek(world) == []


def test_an_idle_subscription_is_deleted(world: World) -> None:
    topic(world)
    idle = subscription(world, "idle", **IDLE)
    subscription(world, "kept")
    world.wait(minutes=6)
    with pytest.raises(EntityNotFoundError):
        receive(world, idle)
    assert paths(world, EntityKind.SUBSCRIPTION, TOPIC) == ["news/Subscriptions/kept"]


def test_an_idle_topic_is_deleted(world: World) -> None:
    topic(world, **IDLE)
    world.wait(minutes=6)
    with pytest.raises(EntityNotFoundError):
        send(world, "a", path=TOPIC)


def test_an_unlimited_queue_is_never_deleted(world: World) -> None:
    queue(world)
    world.wait(days=10_000)
    assert world.ask(GetEntity(QUEUE))
