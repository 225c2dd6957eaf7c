"""Ranges are read again and again, and settled once."""

from contextlib import suppress
from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.range_words import lease, read, settle_all
from tests.contracts.words import (
    DEAD,
    QUEUE,
    bodies,
    message,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
)
from twinbus.errors import InvalidArgumentError, StaleEpochError
from twinbus.message import DELIVERY_SCHEMA, to_messages
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import DeadLetterPart, ReadRange, SettleRange

NEEDS = Capability.RANGES  # of every test here


# -- reading ---------------------------------------------------------------------------------------


def test_a_range_reads_the_same_every_time(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    leased = lease(world)
    command = ReadRange(QUEUE, leased.epoch, leased.first, leased.last)
    first = world.ask(command)
    send(world, "d")
    assert world.ask(command).equals(first)
    assert first.schema == DELIVERY_SCHEMA


def test_part_of_a_range_can_be_read(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    batch = world.ask(ReadRange(QUEUE, leased.epoch, numbers[1], numbers[2]))
    assert bodies(to_messages(batch)) == ["b", "c"]


def test_reading_a_range_takes_no_more_bytes_than_asked(world: World) -> None:
    queue(world)
    send(world, *["x" * 1024] * 10)
    leased = lease(world)
    part = ReadRange(QUEUE, leased.epoch, leased.first, leased.last, max_bytes=3500)
    assert world.ask(part).num_rows == 3
    item = ReadRange(QUEUE, leased.epoch, leased.first, leased.last, max_bytes=1)
    assert world.ask(item).num_rows == 1


def test_settled_messages_are_not_read(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    world.ask(SettleRange(QUEUE, leased.epoch, [(numbers[0], numbers[1])]))
    assert read(world, leased) == ["c"]


def test_an_unknown_epoch_reads_nothing(world: World) -> None:
    queue(world)
    send(world, "a")
    leased = lease(world)
    with pytest.raises(StaleEpochError):
        world.ask(ReadRange(QUEUE, leased.epoch + 1, leased.first, leased.last))


# -- settling --------------------------------------------------------------------------------------


def test_a_completed_range_is_gone(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    settle_all(world, lease(world))
    assert peek(world) == []
    assert runtime(world).active_message_count == 0
    assert runtime(world).size_in_bytes == 0


def test_intervals_of_a_range_are_completed(world: World) -> None:
    queue(world)
    n = send(world, *"abcdef")
    leased = lease(world)
    world.ask(SettleRange(QUEUE, leased.epoch, [(n[0], n[1]), (n[4], n[4])]))
    assert read(world, leased) == ["c", "d", "f"]


def test_part_of_a_range_is_put_aside_with_a_reason(world: World) -> None:
    queue(world)
    numbers = send(world, "good", "bad", "good")
    leased = lease(world)
    parts = [DeadLetterPart([numbers[1]], "NoPath", "x-ms-path is missing")]
    intervals = [(numbers[0], numbers[0]), (numbers[2], numbers[2])]
    world.ask(SettleRange(QUEUE, leased.epoch, intervals, parts))
    dead = receive_one(world, DEAD)
    assert (dead.body, dead.dead_letter_reason) == (b"bad", "NoPath")
    assert dead.dead_letter_error_description == "x-ms-path is missing"
    assert dead.dead_letter_source == QUEUE
    assert peek(world) == []


def test_each_part_put_aside_has_its_own_reason(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world)
    parts = [DeadLetterPart([numbers[0], numbers[2]], "one"), DeadLetterPart([numbers[1]], "two")]
    world.ask(SettleRange(QUEUE, leased.epoch, dead_lettered=parts))
    reasons = {m.body.decode(): m.dead_letter_reason for m in receive(world, DEAD)}
    assert reasons == {"a": "one", "b": "two", "c": "one"}


def test_settling_a_range_again_is_harmless(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c", "d")
    leased = lease(world)
    parts = [DeadLetterPart([numbers[1]], "bad")]
    command = SettleRange(QUEUE, leased.epoch, [(numbers[0], numbers[0])], parts)
    for _ in range(3):
        world.ask(command)
    assert read(world, leased) == ["c", "d"]
    assert bodies(peek(world, DEAD)) == ["b"]


def test_settling_the_last_of_a_range_again_is_harmless(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    leased = lease(world)
    settle_all(world, leased)
    settle_all(world, leased)
    assert peek(world) == []


def test_nothing_outside_the_range_is_settled(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b", "c")
    leased = lease(world, count=2)
    with suppress(InvalidArgumentError):
        world.ask(SettleRange(QUEUE, leased.epoch, [(numbers[0], numbers[2])]))
    assert bodies(receive(world)) == ["c"]


def test_a_message_of_a_range_is_completed_past_its_time_to_live(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    send(world, message("a", time_to_live=timedelta(seconds=5)))
    leased = lease(world)
    world.wait(seconds=10)
    assert read(world, leased) == ["a"]
    settle_all(world, leased)
    assert peek(world, DEAD) == []
