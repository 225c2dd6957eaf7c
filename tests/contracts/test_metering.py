"""Metering: every operation is counted by entity, kind and outcome, in units of 64 KB."""

from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    TOPIC,
    complete,
    message,
    outcome,
    queue,
    receive,
    receive_one,
    send,
    start,
    subscription,
    take,
    topic,
)
from twinbus.errors import EntityNotFoundError, InvalidArgumentError, SessionCannotBeLockedError
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import AcceptSession, Peek, ReadMeter, Receive

NEEDS = Capability.METERING  # of every test here

UNIT = 64 * 1024


def metered(world: World, operation: str, path: str = QUEUE) -> dict[str, dict[str, int]]:
    """Return what was metered for one operation of one entity, by outcome."""
    rows = world.ask(ReadMeter()).to_pylist()
    wanted = [r for r in rows if (r["path"], r["operation"]) == (path, operation)]
    assert len({r["outcome"] for r in wanted}) == len(wanted)
    return {r["outcome"]: r for r in wanted}


def test_a_send_is_one_operation(world: World) -> None:
    queue(world)
    item = message("a")
    send(world, item)
    row = metered(world, "Send")["ok"]
    assert (row["count"], row["messages"], row["units"]) == (1, 1, 1)
    assert row["bytes"] == item.size


def test_operations_add_up(world: World) -> None:
    queue(world)
    for _ in range(3):
        send(world, "a", "b")
    row = metered(world, "Send")["ok"]
    assert (row["count"], row["messages"]) == (3, 6)


@pytest.mark.parametrize("wait", [timedelta(0), timedelta(seconds=30)], ids=str)
@pytest.mark.parametrize("session_id", ["s", None])
def test_a_session_that_cannot_be_locked_is_metered_with_the_error_of_its_caller(
    world: World, wait: timedelta, session_id: str | None
) -> None:
    queue(world, requires_session=True)
    world.ask(AcceptSession(QUEUE, "s"))
    refused = start(world, AcceptSession(QUEUE, session_id, wait=wait))
    world.wait(seconds=30)  # the lock lasts a minute
    with pytest.raises(SessionCannotBeLockedError):
        refused.result(timeout=30)
    counted = {outcome: row["count"] for outcome, row in metered(world, "AcceptSession").items()}
    assert counted == {"ok": 1, "SessionCannotBeLocked": 1}


def test_each_kind_of_operation_is_metered_apart(world: World) -> None:
    queue(world)
    send(world, "a")
    complete(world, receive_one(world))
    world.ask(Peek(QUEUE))
    for operation in ("Send", "Receive", "Settle", "Peek"):
        assert metered(world, operation)["ok"]["count"] == 1


def test_each_entity_is_metered_apart(world: World) -> None:
    queue(world, "one")
    queue(world, "two")
    send(world, "a", path="one")
    send(world, "a", path="two")
    send(world, "a", path="two")
    assert metered(world, "Send", "one")["ok"]["count"] == 1
    assert metered(world, "Send", "two")["ok"]["count"] == 2


@pytest.mark.parametrize(("size", "units"), [(1, 1), (UNIT, 1), (UNIT + 1, 2), (3 * UNIT, 3)])
def test_a_message_is_metered_in_units_of_64_kilobytes(world: World, size: int, units: int) -> None:
    queue(world)
    item = message("x" * (size - 1), message_id="m")
    assert item.size == size
    send(world, item)
    receive(world)
    assert metered(world, "Send")["ok"]["units"] == units
    assert metered(world, "Receive")["ok"]["units"] == units


def test_a_receive_meters_what_it_delivers(world: World) -> None:
    queue(world)
    sent = [message("a"), message("bb")]
    send(world, *sent)
    take(world)
    row = metered(world, "Receive")["ok"]
    assert (row["count"], row["messages"]) == (1, 2)
    assert row["bytes"] == sum(m.size for m in sent)


def test_a_long_poll_costs_one_operation(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=12)))
    world.wait(hours=6)
    world.wait(hours=7)
    assert outcome(waiting) == []
    rows = metered(world, "Receive")
    assert sum(row["count"] for row in rows.values()) == 1
    assert sum(row["units"] for row in rows.values()) == 1


def test_a_long_poll_that_ends_with_a_message_costs_one_operation(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=12)))
    send(world, "a")
    assert outcome(waiting) == ["a"]
    assert sum(row["count"] for row in metered(world, "Receive").values()) == 1


def test_a_refused_operation_is_metered_under_its_error(world: World) -> None:
    queue(world)
    topic(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Receive(TOPIC))
    with pytest.raises(EntityNotFoundError):
        receive(world, "nowhere")
    assert metered(world, "Receive", TOPIC)["InvalidArgument"]["count"] == 1
    assert metered(world, "Receive", "")["EntityNotFound"]["count"] == 1


def test_a_path_is_metered_once_whatever_its_case(world: World) -> None:
    queue(world)
    send(world, "a", path="ORDERS")
    send(world, "a", path="orders")
    counts = [
        row["count"]
        for row in world.ask(ReadMeter()).to_pylist()
        if (row["path"].lower(), row["operation"]) == (QUEUE, "Send")
    ]
    assert counts == [2]


def test_a_send_to_a_topic_is_metered_once_whatever_its_subscriptions(world: World) -> None:
    topic(world)
    for name in ("sport", "weather"):
        subscription(world, name)
    send(world, "a", path="news")
    rows = [r for r in world.ask(ReadMeter()).to_pylist() if r["operation"] == "Send"]
    assert [(r["path"], r["count"]) for r in rows] == [("news", 1)]


def test_reading_the_meter_changes_no_count_of_an_entity(world: World) -> None:
    queue(world)
    send(world, "a")
    first = metered(world, "Send")
    assert metered(world, "Send") == first
