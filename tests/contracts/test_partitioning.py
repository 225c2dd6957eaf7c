"""Partitioned entities: several message stores, one queue to the application."""

from datetime import timedelta
from typing import Any

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    bodies,
    complete,
    later,
    message,
    outcome,
    peek,
    queue,
    receive,
    runtime,
    send,
    settle,
    start,
    subscription,
    take,
    topic,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CancelScheduled,
    Disposition,
    LeaseRange,
    Receive,
    ReceiveDeferred,
    SettleRange,
)

NEEDS = Capability.PARTITIONING  # of nearly every test here


def partitioned(world: World, **settings: Any) -> None:
    queue(world, enable_partitioning=True, **settings)


def spread(count: int = 40) -> list[BrokeredMessage]:
    """Messages of many partition keys."""
    return [message(str(n), partition_key=f"key-{n}") for n in range(count)]


def test_every_message_of_a_partitioned_queue_is_delivered_once(world: World) -> None:
    partitioned(world)
    send(world, *spread())
    send(world, *(str(n) for n in range(40, 80)))
    assert sorted(map(int, take(world))) == list(range(80))
    assert receive(world) == []


def test_sequence_numbers_of_a_partitioned_queue_are_unique(world: World) -> None:
    partitioned(world)
    numbers = send(world, *spread())
    assert len(set(numbers)) == 40
    assert {m.sequence_number for m in receive(world)} == set(numbers)


def test_messages_of_one_partition_key_stay_in_order(world: World) -> None:
    partitioned(world)
    for n in range(10):
        send(world, *(message(f"{key}{n}", partition_key=key) for key in "abc"))
    delivered = take(world)
    for key in "abc":
        assert [body for body in delivered if body[0] == key] == [f"{key}{n}" for n in range(10)]


def test_messages_of_a_partitioned_queue_are_settled(world: World) -> None:
    partitioned(world)
    send(world, *spread())
    complete(world, *receive(world))
    assert peek(world) == []
    assert runtime(world).active_message_count == runtime(world).size_in_bytes == 0


def test_a_partitioned_queue_is_browsed_by_sequence_number(world: World) -> None:
    partitioned(world)
    numbers = sorted(send(world, *spread()))
    browsed = [m.sequence_number for m in peek(world)]
    assert browsed == numbers
    assert [m.sequence_number for m in peek(world, start=numbers[20])] == numbers[20:]


def test_deferred_messages_of_a_partitioned_queue_are_received_by_number(world: World) -> None:
    partitioned(world)
    numbers = send(world, *spread(10))
    settle(world, Disposition.DEFER, *receive(world))
    assert world.ask(ReceiveDeferred(QUEUE, numbers)).num_rows == 10


def test_scheduled_messages_of_a_partitioned_queue_are_cancelled(world: World) -> None:
    partitioned(world)
    at = later(world, minutes=1)
    numbers = send(world, *(message(str(n), scheduled_enqueue_time_utc=at) for n in range(10)))
    world.ask(CancelScheduled(QUEUE, numbers[:5]))
    world.wait(minutes=1)
    assert sorted(take(world)) == ["5", "6", "7", "8", "9"]


def test_a_waiting_receive_gets_a_message_of_any_partition(world: World) -> None:
    partitioned(world)
    for item in spread(20):
        waiting = start(world, Receive(QUEUE, wait=timedelta(seconds=30)))
        send(world, item)
        assert outcome(waiting) == [item.body.decode()]


def test_dead_letters_of_all_partitions_are_in_one_queue(world: World) -> None:
    partitioned(world)
    send(world, *spread(20))
    settle(world, Disposition.DEAD_LETTER, *receive(world))
    assert runtime(world).dead_letter_message_count == 20
    assert len(bodies(receive(world, DEAD))) == 20


def test_a_partitioned_queue_holds_more_than_one_store_does(world: World) -> None:
    partitioned(world, max_size_in_megabytes=1)
    large = "x" * 250 * 1024
    for n in range(8):
        send(world, message(large, partition_key=f"key-{n}"))
    assert runtime(world).active_message_count == 8


def test_a_partitioned_queue_can_be_leased_from(world: World) -> None:
    partitioned(world)
    send(world, *spread())
    moved = 0
    while leased := world.ask(LeaseRange(QUEUE, "syphon", 7)):
        world.ask(SettleRange(QUEUE, leased.epoch, [(leased.first, leased.last)]))
        moved += leased.message_count
    assert moved == 40
    assert peek(world) == []


def test_a_partitioned_topic_reaches_its_subscriptions(world: World) -> None:
    topic(world, enable_partitioning=True)
    sport = subscription(world, "sport")
    send(world, *spread(), path=TOPIC)
    assert sorted(map(int, take(world, sport))) == list(range(40))


@pytest.mark.parametrize("count", [1, 3, 100])
def test_competing_consumers_empty_all_partitions(world: World, count: int) -> None:
    partitioned(world)
    send(world, *spread())
    seen: list[str] = []
    while share := receive(world, count=count):
        seen += bodies(share)
    assert sorted(map(int, seen)) == list(range(40))
