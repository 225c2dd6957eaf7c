"""Duplicate detection: within the window a second send of a message_id is taken and ignored."""

from datetime import timedelta
from typing import Any

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    bodies,
    complete,
    message,
    outcome,
    peek,
    queue,
    receive_one,
    runtime,
    send,
    start,
    subscription,
    take,
    topic,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import CancelScheduled, Receive

NEEDS = Capability.DUPLICATE_DETECTION  # of nearly every test here

WINDOW = timedelta(seconds=30)


def watched(world: World, **settings: Any) -> None:
    queue(
        world,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=WINDOW,
        **settings,
    )


def identified(body: str = "a", identity: str = "m-1", **fields: object) -> BrokeredMessage:
    return message(body, message_id=identity, **fields)


def test_a_duplicate_is_accepted_and_ignored(world: World) -> None:
    watched(world)
    assert send(world, identified())[0] > 0
    assert send(world, identified()) == [0]
    assert take(world) == ["a"]


def test_a_duplicate_is_known_by_its_message_id_alone(world: World) -> None:
    watched(world)
    send(world, identified("first"))
    send(world, identified("second", subject="other"))
    assert take(world) == ["first"]


def test_messages_of_different_ids_are_no_duplicates(world: World) -> None:
    watched(world)
    send(world, identified("same", "m-1"))
    send(world, identified("same", "m-2"))
    send(world, identified("same", "M-1"))
    assert len(take(world)) == 3


def test_a_duplicate_within_one_batch_is_ignored(world: World) -> None:
    watched(world)
    numbers = send(world, identified("a", "1"), identified("b", "2"), identified("c", "1"))
    assert [bool(n) for n in numbers] == [True, True, False]
    assert take(world) == ["a", "b"]


def test_the_others_of_a_batch_with_a_duplicate_are_enqueued(world: World) -> None:
    watched(world)
    send(world, identified("a", "1"))
    numbers = send(world, identified("a", "1"), identified("b", "2"))
    assert numbers[0] == 0
    assert numbers[1] > 0
    assert take(world) == ["a", "b"]


def test_a_completed_message_is_still_remembered(world: World) -> None:
    watched(world)
    send(world, identified())
    complete(world, receive_one(world))
    assert send(world, identified()) == [0]
    assert peek(world) == []


def test_a_duplicate_at_the_end_of_the_window_is_ignored(world: World) -> None:
    watched(world)
    send(world, identified())
    world.wait(seconds=29)
    assert send(world, identified()) == [0]


def test_after_the_window_the_same_id_is_a_new_message(world: World) -> None:
    watched(world)
    send(world, identified())
    world.wait(seconds=31)
    send(world, identified())
    assert take(world) == ["a", "a"]


def test_an_ignored_duplicate_does_not_lengthen_the_window(world: World) -> None:
    watched(world)
    send(world, identified())
    world.wait(seconds=20)
    send(world, identified())
    world.wait(seconds=20)
    assert send(world, identified())[0] > 0


def test_a_new_message_starts_a_new_window(world: World) -> None:
    watched(world)
    send(world, identified())
    world.wait(seconds=31)
    send(world, identified())
    world.wait(seconds=20)
    assert send(world, identified()) == [0]


def test_without_detection_the_same_id_is_enqueued_twice(world: World) -> None:
    queue(world)
    send(world, identified())
    send(world, identified())
    assert take(world) == ["a", "a"]


def test_each_queue_remembers_for_itself(world: World) -> None:
    queue(world, "one", requires_duplicate_detection=True)
    queue(world, "two", requires_duplicate_detection=True)
    send(world, identified(), path="one")
    assert send(world, identified(), path="two")[0] > 0


def test_a_duplicate_adds_nothing_to_the_counts(world: World) -> None:
    watched(world)
    send(world, identified())
    before = runtime(world)
    send(world, identified())
    assert runtime(world).active_message_count == before.active_message_count == 1
    assert runtime(world).size_in_bytes == before.size_in_bytes


def test_a_duplicate_wakes_no_receiver(world: World) -> None:
    watched(world)
    send(world, identified())
    take(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    send(world, identified())
    assert not waiting.done()
    send(world, identified("b", "m-2"))
    assert outcome(waiting) == ["b"]


def test_a_topic_ignores_duplicates_for_all_its_subscriptions(world: World) -> None:
    topic(world, requires_duplicate_detection=True)
    paths = [subscription(world, "sport"), subscription(world, "weather")]
    send(world, identified(), path="news")
    send(world, identified(), path="news")
    assert [take(world, path) for path in paths] == [["a"], ["a"]]


def test_a_duplicate_of_a_scheduled_message_is_ignored(world: World) -> None:
    watched(world)
    scheduled = identified(scheduled_enqueue_time_utc=world.clock.now() + timedelta(seconds=10))
    send(world, scheduled)
    assert send(world, identified()) == [0]
    world.wait(seconds=10)
    assert take(world) == ["a"]


def test_a_cancelled_message_leaves_the_window_alone(world: World) -> None:
    watched(world)
    scheduled = identified(scheduled_enqueue_time_utc=world.clock.now() + timedelta(seconds=10))
    world.ask(CancelScheduled(QUEUE, send(world, scheduled)))
    world.wait(seconds=31)
    assert send(world, identified())[0] > 0
    assert bodies(peek(world)) == ["a"]


def test_a_partitioned_queue_ignores_duplicates(world: World) -> None:
    watched(world, enable_partitioning=True)
    send(world, *(identified(str(n), str(n)) for n in range(20)))
    assert send(world, *(identified(str(n), str(n)) for n in range(20))) == [0] * 20
    assert len(take(world)) == 20
