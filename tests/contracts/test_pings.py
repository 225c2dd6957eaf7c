"""Pings: acknowledged, counted and metered like any send; never there for a receiver."""

from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    TOPIC,
    accept,
    message,
    outcome,
    peek,
    queue,
    receive,
    runtime,
    send,
    start,
    subscription,
    take,
    topic,
)
from twinbus.entities import EntityStatus
from twinbus.errors import (
    EntityDisabledError,
    EntityNotFoundError,
    QuotaExceededError,
    SessionCannotBeLockedError,
)
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import BrokeredMessage
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import LeaseRange, ReadMeter, Receive, ReceiveMode


def ping(**fields: object) -> BrokeredMessage:
    return message("", content_type=PING_CONTENT_TYPE, **fields)


def test_a_ping_is_acknowledged(world: World) -> None:
    queue(world)
    assert send(world, ping()) == [0]


def test_a_ping_is_never_delivered(world: World) -> None:
    queue(world)
    send(world, ping())
    assert receive(world) == []


def test_a_ping_is_never_browsed(world: World) -> None:
    queue(world)
    send(world, ping())
    assert peek(world) == []


def test_a_ping_is_never_leased(world: World) -> None:
    queue(world)
    send(world, ping())
    assert world.ask(LeaseRange(QUEUE, "syphon", 10)) is None


def test_a_ping_is_not_stored(world: World) -> None:
    queue(world)
    send(world, ping())
    now = runtime(world)
    assert (now.active_message_count, now.size_in_bytes) == (0, 0)


def test_a_ping_does_not_die(world: World) -> None:
    queue(world, enable_dead_lettering_on_message_expiration=True)
    send(world, ping(time_to_live=timedelta(seconds=1)))
    world.wait(seconds=5)
    assert runtime(world).dead_letter_message_count == 0


def test_a_ping_wakes_no_receiver(world: World) -> None:
    queue(world)
    waiting = start(world, Receive(QUEUE, wait=timedelta(hours=1)))
    send(world, ping())
    assert not waiting.done()
    send(world, "a")
    assert outcome(waiting) == ["a"]


def test_a_ping_reaches_no_subscription(world: World) -> None:
    topic(world)
    sport = subscription(world, "sport")
    assert send(world, ping(), path=TOPIC) == [0]
    assert peek(world, sport) == []


def test_a_ping_is_not_forwarded(world: World) -> None:
    queue(world, "home")
    queue(world, forward_to="home")
    assert send(world, ping()) == [0]
    assert peek(world, "home") == []


def test_a_scheduled_ping_never_comes(world: World) -> None:
    queue(world)
    send(world, ping(scheduled_enqueue_time_utc=world.clock.now() + timedelta(minutes=1)))
    world.wait(minutes=2)
    assert peek(world) == []


def test_a_session_queue_takes_a_ping_with_a_fresh_session(world: World) -> None:
    queue(world, requires_session=True)
    assert send(world, ping(session_id="fresh")) == [0]
    with pytest.raises(SessionCannotBeLockedError):
        accept(world)


def test_pings_and_messages_share_a_batch(world: World) -> None:
    world.need(Capability.SEQUENCE_NUMBERS)
    queue(world)
    numbers = send(world, ping(), "a", ping(), "b")
    assert [bool(n) for n in numbers] == [False, True, False, True]
    assert take(world) == ["a", "b"]


def test_a_ping_is_metered_like_any_send(world: World) -> None:
    queue(world)
    send(world, ping())
    send(world, "a")
    rows = [r for r in world.ask(ReadMeter()).to_pylist() if r["operation"] == "Send"]
    assert sum(row["count"] for row in rows if row["path"] == QUEUE) == 2
    assert sum(row["units"] for row in rows if row["path"] == QUEUE) == 2


def test_a_ping_to_an_unknown_entity_is_refused(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        send(world, ping())


@pytest.mark.parametrize("status", [EntityStatus.DISABLED, EntityStatus.SEND_DISABLED])
def test_a_ping_to_a_disabled_entity_is_refused(world: World, status: EntityStatus) -> None:
    queue(world, status=status)
    with pytest.raises(EntityDisabledError):
        send(world, ping())


def test_a_ping_to_a_full_entity_is_refused(world: World) -> None:
    world.need(Capability.EXACT_QUOTA)
    queue(world, max_size_in_megabytes=1)
    send(world, *[message("x" * 250 * 1024)] * 4)  # 24 KiB are left
    with pytest.raises(QuotaExceededError):
        send(world, ping())
    assert all(send(world, "small"))
    world.ask(Receive(QUEUE, mode=ReceiveMode.RECEIVE_AND_DELETE))
    assert send(world, ping()) == [0]


def test_a_ping_is_known_by_its_content_type_alone(world: World) -> None:
    world.need(Capability.SEQUENCE_NUMBERS)
    queue(world)
    assert send(world, message("with a body", content_type=PING_CONTENT_TYPE)) == [0]
    assert all(send(world, message("", content_type="text/plain")))


def test_a_ping_leaves_the_duplicate_window_alone(world: World) -> None:
    queue(world, requires_duplicate_detection=True)
    send(world, ping(message_id="m"))
    assert all(send(world, message("a", message_id="m")))
