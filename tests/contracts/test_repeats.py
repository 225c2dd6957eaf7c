"""A message named twice in one request is one message: nothing is counted or settled twice."""

from tests.contracts.conftest import World
from tests.contracts.words import (
    QUEUE,
    bodies,
    later,
    message,
    peek,
    queue,
    receive_one,
    runtime,
    send,
    settle,
)
from twinbus.entities import dead_letter_path
from twinbus.message import tokens_of
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CancelScheduled,
    DeadLetterPart,
    Disposition,
    LeaseRange,
    ReceiveDeferred,
    Settle,
    SettleRange,
)


def test_a_lock_token_given_twice_settles_once(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    token = receive_one(world).lock_token
    assert token is not None
    world.ask(Settle(QUEUE, tokens_of([token, token]), Disposition.COMPLETE))
    assert runtime(world).active_message_count == 1
    world.need(Capability.METERING)
    assert runtime(world).size_in_bytes == peek(world)[0].size


def test_a_deferred_message_asked_for_twice_comes_once(world: World) -> None:
    queue(world)
    [number] = send(world, "a")
    settle(world, Disposition.DEFER, receive_one(world))
    assert world.ask(ReceiveDeferred(QUEUE, [number, number])).num_rows == 1
    assert runtime(world).active_message_count == 1


def test_a_scheduled_message_cancelled_twice_at_once_is_cancelled_once(world: World) -> None:
    queue(world)
    [number] = send(world, message("a", scheduled_enqueue_time_utc=later(world, hours=1)))
    send(world, message("b", scheduled_enqueue_time_utc=later(world, hours=1)))
    world.ask(CancelScheduled(QUEUE, [number, number]))
    assert runtime(world).scheduled_message_count == 1


def test_a_message_of_a_range_put_aside_twice_dies_once(world: World) -> None:
    queue(world)
    numbers = send(world, "a", "b")
    lease = world.ask(LeaseRange(QUEUE, "me", 2))
    twice = DeadLetterPart([numbers[0], numbers[0]], "bad")
    world.ask(SettleRange(QUEUE, lease.epoch, (), [twice, twice]))
    assert bodies(peek(world, dead_letter_path(QUEUE))) == ["a"]
    assert runtime(world).active_message_count == 1
