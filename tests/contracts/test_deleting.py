"""Deleting messages unread: deliverable ones only, the oldest first."""

from typing import Any

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    accept,
    bodies,
    later,
    message,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    settle,
    take,
)
from twinbus.errors import InvalidArgumentError, InvalidOperationError, SessionLockLostError
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import DeleteMessages, Disposition, ReleaseSession

NEEDS = Capability.BATCH_DELETING  # of nearly every test here


def delete(world: World, most: int = 100, path: str = QUEUE, **options: Any) -> int:
    deleted: int = world.ask(DeleteMessages(path, most, **options))
    return deleted


def test_messages_are_deleted_oldest_first(world: World) -> None:
    queue(world)
    send(world, *"abcd")
    assert delete(world, 3) == 3
    assert runtime(world).active_message_count == 1
    assert take(world) == ["d"]
    assert delete(world) == 0


def test_only_messages_enqueued_before_a_time_are_deleted(world: World) -> None:
    queue(world)
    send(world, "old")
    world.wait(seconds=1)
    noon = world.clock.now()
    send(world, "new")
    assert delete(world, enqueued_before_utc=noon) == 1
    assert take(world) == ["new"]


def test_locked_deferred_and_scheduled_messages_stay(world: World) -> None:
    queue(world)
    send(world, "deferred", "locked", "active")
    send(world, message("scheduled", scheduled_enqueue_time_utc=later(world, hours=1)))
    settle(world, Disposition.DEFER, receive_one(world))
    locked = receive_one(world)
    assert delete(world) == 1
    assert bodies(peek(world)) == ["deferred", "locked", "scheduled"]
    settle(world, Disposition.COMPLETE, locked)


def test_a_dead_letter_queue_is_emptied(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    settle(world, Disposition.DEAD_LETTER, *receive(world))
    assert delete(world, path=DEAD) == 2
    assert peek(world, DEAD) == []


def test_messages_of_a_session_are_deleted_by_its_holder(world: World) -> None:
    queue(world, requires_session=True)
    send(world, *(message(body, session_id=name) for name in "st" for body in "ab"))
    with pytest.raises(InvalidOperationError, match="requires sessions"):
        delete(world)
    lock = accept(world, "s")
    assert delete(world, session=lock) == 2
    assert [item.session_id for item in peek(world)] == ["t", "t"]
    world.ask(ReleaseSession(QUEUE, lock))
    with pytest.raises(SessionLockLostError):
        delete(world, session=lock)


def test_a_count_out_of_range_is_refused() -> None:
    for count in (0, -1, 100_001):
        with pytest.raises(InvalidArgumentError, match="max_messages"):
            DeleteMessages(QUEUE, count)
