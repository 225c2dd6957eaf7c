"""Topics: a message reaches each subscription; a subscription behaves like a queue."""

from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    MANY,
    QUEUE,
    TOPIC,
    abandon,
    bodies,
    complete,
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
    tokens,
    topic,
)
from twinbus.entities import SubscriptionDescription, dead_letter_path
from twinbus.errors import (
    EntityAlreadyExistsError,
    EntityNotFoundError,
    MessageLockLostError,
    MessagingError,
    QuotaExceededError,
)
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Disposition,
    Peek,
    Receive,
    ReceiveDeferred,
    RenewLocks,
    Settle,
)


def test_a_message_reaches_every_subscription(world: World) -> None:
    topic(world)
    paths = [subscription(world, name) for name in ("sport", "weather", "all")]
    send(world, "a", path=TOPIC)
    assert [take(world, path) for path in paths] == [["a"]] * 3


def test_a_receipt_of_a_topic_has_no_numbers(world: World) -> None:
    topic(world)
    subscription(world, "sport")
    assert send(world, "a", "b", path=TOPIC) == [0, 0]


def test_a_message_to_a_topic_without_subscriptions_is_accepted(world: World) -> None:
    topic(world)
    assert send(world, "a", path=TOPIC) == [0]


def test_a_subscription_gets_only_what_is_sent_after_its_creation(world: World) -> None:
    topic(world)
    send(world, "before", path=TOPIC)
    sport = subscription(world, "sport")
    send(world, "after", path=TOPIC)
    assert take(world, sport) == ["after"]


def test_subscriptions_settle_independently(world: World) -> None:
    topic(world)
    sport, weather = subscription(world, "sport"), subscription(world, "weather")
    send(world, "a", path=TOPIC)
    complete(world, receive_one(world, sport), path=sport)
    assert peek(world, sport) == []
    assert bodies(peek(world, weather)) == ["a"]


def test_a_batch_reaches_a_subscription_in_order(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, "a", "b", "c", path=TOPIC)
    send(world, "d", path=TOPIC)
    assert take(world, sport) == ["a", "b", "c", "d"]


def test_a_subscription_numbers_its_messages_itself(world: World) -> None:
    topic(world)
    send(world, "before", path=TOPIC)
    sport = subscription(world, "sport")
    send(world, "a", "b", path=TOPIC)
    numbers = [m.sequence_number or 0 for m in peek(world, sport)]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > 0


def test_everything_a_message_has_reaches_the_subscription(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    sent = message("a", subject="s", correlation_id="c", application_properties={"n": 1.5})
    send(world, sent, path=TOPIC)
    got = receive_one(world, sport)
    assert (got.body, got.message_id, got.subject) == (sent.body, sent.message_id, "s")
    assert (got.correlation_id, got.application_properties) == ("c", {"n": 1.5})


def test_a_waiting_receive_on_a_subscription_ends_when_a_message_arrives(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    waiting = start(world, Receive(sport, wait=timedelta(hours=1)))
    send(world, "a", path=TOPIC)
    assert outcome(waiting) == ["a"]


def test_a_lapsed_lock_returns_the_message_to_the_subscription(world: World) -> None:
    world.need(Capability.LOCK_DURATION)
    topic(world)
    sport = subscription(world, "sport", lock_duration=timedelta(seconds=10))
    send(world, "a", path=TOPIC)
    assert receive_one(world, sport).locked_until_utc == later(world, seconds=10)
    world.wait(seconds=11)
    assert receive_one(world, sport).delivery_count == 1


def test_the_lock_of_a_subscription_is_renewed(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, "a", path=TOPIC)
    locked = receive_one(world, sport)
    world.wait(seconds=40)
    assert world.ask(RenewLocks(sport, tokens(locked))) == later(world, seconds=60)


def test_a_subscription_has_its_own_dead_letter_queue(world: World) -> None:
    topic(world)
    sport, weather = subscription(world, "sport"), subscription(world, "weather")
    send(world, "a", path=TOPIC)
    settle(world, Disposition.DEAD_LETTER, receive_one(world, sport), path=sport)
    assert receive(world, dead_letter_path(weather)) == []
    dead = receive_one(world, dead_letter_path(sport))
    assert (dead.body, dead.dead_letter_source) == (b"a", sport)


def test_a_subscription_has_its_own_max_delivery_count(world: World) -> None:
    world.need(Capability.PROMPT_DEAD_LETTERS)
    topic(world)
    strict = subscription(world, "strict", max_delivery_count=1)
    patient = subscription(world, "patient")
    send(world, "a", path=TOPIC)
    for path in (strict, patient):
        abandon(world, receive_one(world, path), path=path)
    assert receive(world, strict) == []
    assert take(world, dead_letter_path(strict)) == ["a"]
    assert take(world, patient) == ["a"]


def test_a_message_of_a_subscription_is_deferred_and_received_by_number(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, "a", path=TOPIC)
    locked = receive_one(world, sport)
    settle(world, Disposition.DEFER, locked, path=sport)
    assert world.ask(ReceiveDeferred(sport, [locked.sequence_number or 0])).num_rows == 1


def test_a_token_of_one_subscription_settles_nothing_in_another(world: World) -> None:
    topic(world)
    sport, weather = subscription(world, "sport"), subscription(world, "weather")
    send(world, "a", path=TOPIC)
    locked = receive_one(world, sport)
    receive_one(world, weather)
    with pytest.raises(MessageLockLostError):
        complete(world, locked, path=weather)


def test_the_path_of_a_subscription_is_case_insensitive(world: World) -> None:
    world.need(Capability.ANY_CASE)
    topic(world)
    subscription(world, "Sport")
    send(world, "a", path="NEWS")
    assert take(world, "News/subscriptions/SPORT") == ["a"]


# -- counts and quota --------------------------------------------------------------------------


def test_a_topic_counts_its_subscriptions(world: World) -> None:
    world.need(Capability.LISTING)
    topic(world)
    subscription(world, "sport")
    subscription(world, "weather")
    assert runtime(world, TOPIC).subscription_count == 2
    world.ask(DeleteEntity("news/Subscriptions/sport"))
    assert runtime(world, TOPIC).subscription_count == 1


def test_a_subscription_counts_its_messages(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, "a", "b", path=TOPIC)
    settle(world, Disposition.DEAD_LETTER, receive_one(world, sport), path=sport)
    assert runtime(world, sport).active_message_count == 1
    assert runtime(world, sport).dead_letter_message_count == 1


def test_a_full_topic_refuses_with_quota_exceeded(world: World) -> None:
    world.need(Capability.EXACT_QUOTA)
    topic(world, max_size_in_megabytes=1)
    sport = subscription(world, "sport")
    large = message("x" * 250 * 1024)
    for _ in range(4):
        send(world, large, path=TOPIC)
    with pytest.raises(QuotaExceededError):
        send(world, large, path=TOPIC)
    assert runtime(world, sport).active_message_count == 4


def test_a_full_topic_takes_messages_again_when_some_are_gone(world: World) -> None:
    topic(world, max_size_in_megabytes=1)
    sport = subscription(world, "sport")
    large = message("x" * 250 * 1024)
    send(world, *[large] * 4, path=TOPIC)
    take(world, sport)
    assert send(world, large, path=TOPIC) == [0]


# -- refusals ----------------------------------------------------------------------------------


def test_a_subscription_needs_its_topic(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        subscription(world, "sport")


def test_a_queue_cannot_be_subscribed_to(world: World) -> None:
    queue(world)
    wrong = SubscriptionDescription(topic_path=QUEUE, name="sport")
    with pytest.raises(MessagingError):
        world.ask(CreateEntity(wrong))


def test_a_subscription_of_a_name_exists_once(world: World) -> None:
    world.need(Capability.ANY_CASE)
    topic(world)
    subscription(world, "sport")
    with pytest.raises(EntityAlreadyExistsError):
        subscription(world, "SPORT")


def test_an_unknown_subscription_is_refused(world: World) -> None:
    topic(world)
    with pytest.raises(EntityNotFoundError):
        receive(world, "news/Subscriptions/sport")


def test_a_topic_holds_nothing_to_settle(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    send(world, "a", path=TOPIC)
    token = tokens(receive_one(world, sport))
    with pytest.raises(MessagingError):
        world.ask(Settle(TOPIC, token, Disposition.COMPLETE))


def test_a_deleted_subscription_gets_nothing(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    weather = subscription(world, "weather")
    world.ask(DeleteEntity(sport))
    send(world, "a", path=TOPIC)
    assert take(world, weather) == ["a"]
    with pytest.raises(EntityNotFoundError):
        receive(world, sport)


def test_a_deleted_topic_takes_its_subscriptions_with_it(world: World) -> None:
    world.need(Capability.LISTING)
    topic(world)
    sport = subscription(world, "sport")
    world.ask(DeleteEntity(TOPIC))
    with pytest.raises(EntityNotFoundError):
        world.ask(Peek(sport, 0, MANY))
    topic(world)
    assert runtime(world, TOPIC).subscription_count == 0
