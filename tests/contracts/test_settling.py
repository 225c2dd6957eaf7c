"""Settling: complete, abandon, defer, dead-letter, release, renew; deferred by number."""

from datetime import timedelta
from uuid import UUID

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    abandon,
    bodies,
    complete,
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
    tokens,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    MessageLockLostError,
    MessageNotFoundError,
)
from twinbus.limits import UNLIMITED
from twinbus.message import BrokeredMessage, to_messages, tokens_of
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    Disposition,
    ReceiveDeferred,
    ReceiveMode,
    RenewLocks,
    Settle,
)

NOBODYS = tokens_of([UUID(int=1)])


def deferred(world: World, *numbers: int) -> list[BrokeredMessage]:
    return to_messages(world.ask(ReceiveDeferred(QUEUE, numbers)))


def defer_one(world: World) -> int:
    """Send a message, put it off and return its number."""
    (number,) = send(world, "a")
    settle(world, Disposition.DEFER, receive_one(world))
    return number


# -- complete ----------------------------------------------------------------------------------


def test_a_completed_message_is_gone(world: World) -> None:
    queue(world)
    send(world, "a")
    complete(world, receive_one(world))
    world.wait(minutes=5)
    assert receive(world) == []
    assert peek(world) == []


def test_many_messages_are_completed_at_once(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    complete(world, *receive(world, count=2))
    assert bodies(peek(world)) == ["c"]


def test_messages_are_completed_in_any_order(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    first, second, third = receive(world)
    complete(world, third)
    complete(world, first)
    assert bodies(peek(world)) == ["b"]
    complete(world, second)


# -- abandon and release -----------------------------------------------------------------------


def test_an_abandoned_message_is_delivered_again_at_once(world: World) -> None:
    queue(world)
    send(world, "a")
    abandon(world, receive_one(world))
    assert receive_one(world).body == b"a"


def test_each_abandonment_counts_as_a_failed_delivery(world: World) -> None:
    queue(world)
    send(world, "a")
    for expected in range(3):
        locked = receive_one(world)
        assert locked.delivery_count == expected
        abandon(world, locked)


def test_a_released_message_is_delivered_again_at_once(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.RELEASE, receive_one(world))
    assert receive_one(world).body == b"a"


def test_a_release_is_no_failed_delivery(world: World) -> None:
    world.need(Capability.UNCOUNTED_RELEASE)
    queue(world, max_delivery_count=1)
    send(world, "a")
    for _ in range(3):
        locked = receive_one(world)
        assert locked.delivery_count == 0
        settle(world, Disposition.RELEASE, locked)


# -- max delivery count ------------------------------------------------------------------------


def test_too_many_failed_deliveries_dead_letter_a_message(world: World) -> None:
    world.need(Capability.PROMPT_DEAD_LETTERS)
    queue(world, max_delivery_count=2)
    send(world, "a")
    abandon(world, receive_one(world))
    abandon(world, receive_one(world))
    assert receive(world) == []
    assert bodies(receive(world, DEAD)) == ["a"]


def test_too_many_lapsed_locks_dead_letter_a_message(world: World) -> None:
    queue(world, max_delivery_count=2)
    send(world, "a")
    for _ in range(2):
        receive_one(world)
        world.wait(seconds=61)
    assert receive(world) == []
    assert bodies(receive(world, DEAD)) == ["a"]


def test_a_message_that_failed_too_often_says_so(world: World) -> None:
    world.need(Capability.PROMPT_DEAD_LETTERS)
    queue(world, max_delivery_count=1)
    send(world, "a")
    abandon(world, receive_one(world))
    dead = receive_one(world, DEAD)
    assert dead.dead_letter_reason == "MaxDeliveryCountExceeded"
    assert dead.dead_letter_source == QUEUE


def test_a_message_may_fail_ten_deliveries_by_default(world: World) -> None:
    world.need(Capability.PROMPT_DEAD_LETTERS)
    queue(world)
    send(world, "a")
    for _ in range(9):
        abandon(world, receive_one(world))
    abandon(world, receive_one(world))
    assert receive(world) == []
    assert runtime(world).dead_letter_message_count == 1


def test_a_dead_message_is_not_killed_again_by_failed_deliveries(world: World) -> None:
    world.need(Capability.PROMPT_DEAD_LETTERS)
    queue(world, max_delivery_count=1)
    send(world, "a")
    abandon(world, receive_one(world))
    for _ in range(5):
        abandon(world, receive_one(world, DEAD), path=DEAD)
    assert take(world, DEAD) == ["a"]


# -- dead-letter -------------------------------------------------------------------------------


def test_a_dead_lettered_message_moves_to_the_dead_letter_queue(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    assert peek(world) == []
    assert take(world, DEAD) == ["a"]


def test_a_dead_lettered_message_keeps_reason_description_and_source(world: World) -> None:
    queue(world)
    send(world, "a")
    token = tokens(receive_one(world))
    world.ask(Settle(QUEUE, token, Disposition.DEAD_LETTER, "bad", "no address"))
    dead = receive_one(world, DEAD)
    assert dead.dead_letter_reason == "bad"
    assert dead.dead_letter_error_description == "no address"
    assert dead.dead_letter_source == QUEUE


def test_a_dead_lettered_message_keeps_all_it_was_sent_with(world: World) -> None:
    queue(world)
    sent = message("a", subject="s", session_id="x", application_properties={"n": 1})
    send(world, sent)
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    dead = receive_one(world, DEAD)
    assert (dead.body, dead.message_id, dead.subject) == (sent.body, sent.message_id, "s")
    assert (dead.session_id, dead.application_properties) == ("x", {"n": 1})


def test_many_messages_are_dead_lettered_in_order(world: World) -> None:
    queue(world)
    send(world, "a", "b", "c")
    settle(world, Disposition.DEAD_LETTER, *receive(world))
    assert bodies(receive(world, DEAD)) == ["a", "b", "c"]


def test_a_dead_letter_queue_is_read_like_a_queue(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    settle(world, Disposition.DEAD_LETTER, *receive(world))
    first, second = receive(world, DEAD)
    complete(world, first, path=DEAD)
    abandon(world, second, path=DEAD)
    assert bodies(receive(world, DEAD)) == ["b"]


def test_a_dead_letter_can_be_deferred_and_received_by_number(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    dead = receive_one(world, DEAD)
    settle(world, Disposition.DEFER, dead, path=DEAD)
    assert receive(world, DEAD) == []
    assert world.ask(ReceiveDeferred(DEAD, [dead.sequence_number or 0])).num_rows == 1


def test_a_dead_letter_never_expires(world: World) -> None:
    queue(world)
    send(world, message("a", time_to_live=timedelta(seconds=10)))
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    world.wait(days=30)
    assert take(world, DEAD) == ["a"]


def test_a_lapsed_lock_of_a_dead_letter_returns_it(world: World) -> None:
    queue(world)
    send(world, "a")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    receive_one(world, DEAD)
    world.wait(seconds=61)
    assert receive_one(world, DEAD).body == b"a"


# -- defer -------------------------------------------------------------------------------------


def test_a_deferred_message_is_not_delivered(world: World) -> None:
    queue(world)
    defer_one(world)
    world.wait(minutes=5)
    assert receive(world) == []


def test_a_deferred_message_is_received_by_its_number(world: World) -> None:
    queue(world)
    number = defer_one(world)
    (received,) = deferred(world, number)
    assert received.body == b"a"
    complete(world, received)
    assert peek(world) == []


def test_a_deferral_is_no_failed_delivery(world: World) -> None:
    queue(world, max_delivery_count=1)
    number = defer_one(world)
    for _ in range(3):
        (received,) = deferred(world, number)
        assert received.delivery_count == 0
        settle(world, Disposition.DEFER, received)


def test_deferred_messages_are_received_all_or_nothing(world: World) -> None:
    queue(world)
    number = defer_one(world)
    with pytest.raises(MessageNotFoundError):
        deferred(world, number, number + 1000)
    assert bodies(deferred(world, number)) == ["a"]


def test_a_message_that_was_not_deferred_is_not_received_by_number(world: World) -> None:
    queue(world)
    (number,) = send(world, "a")
    with pytest.raises(MessageNotFoundError):
        deferred(world, number)
    assert receive_one(world).delivery_count == 0


def test_a_deferred_message_can_be_received_and_deleted(world: World) -> None:
    queue(world)
    number = defer_one(world)
    mode = ReceiveMode.RECEIVE_AND_DELETE
    assert world.ask(ReceiveDeferred(QUEUE, [number], mode)).num_rows == 1
    assert peek(world) == []


def test_a_deferred_message_that_is_locked_cannot_be_received_again(world: World) -> None:
    queue(world)
    number = defer_one(world)
    deferred(world, number)
    with pytest.raises(MessageNotFoundError):
        deferred(world, number)


def test_an_abandoned_deferred_message_stays_deferred(world: World) -> None:
    queue(world)
    number = defer_one(world)
    abandon(world, *deferred(world, number))
    assert receive(world) == []
    assert bodies(deferred(world, number)) == ["a"]


def test_a_deferred_message_whose_lock_lapsed_stays_deferred(world: World) -> None:
    queue(world)
    number = defer_one(world)
    deferred(world, number)
    world.wait(seconds=61)
    assert receive(world) == []
    assert bodies(deferred(world, number)) == ["a"]


def test_a_deferred_message_can_be_dead_lettered(world: World) -> None:
    queue(world)
    number = defer_one(world)
    settle(world, Disposition.DEAD_LETTER, *deferred(world, number))
    assert take(world, DEAD) == ["a"]


def test_a_deferred_message_can_be_deferred_again(world: World) -> None:
    queue(world)
    number = defer_one(world)
    settle(world, Disposition.DEFER, *deferred(world, number))
    assert bodies(deferred(world, number)) == ["a"]


# -- renew -------------------------------------------------------------------------------------


def test_a_renewed_lock_lasts_another_lock_duration_from_now(world: World) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    world.wait(seconds=40)
    assert world.ask(RenewLocks(QUEUE, tokens(locked))) == later(world, seconds=60)
    world.wait(seconds=40)
    complete(world, locked)


def test_a_renewed_lock_lapses_in_its_turn(world: World) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    world.ask(RenewLocks(QUEUE, tokens(locked)))
    world.wait(seconds=61)
    assert receive_one(world).body == b"a"


def test_a_lapsed_lock_cannot_be_renewed(world: World) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    world.wait(seconds=61)
    with pytest.raises(MessageLockLostError):
        world.ask(RenewLocks(QUEUE, tokens(locked)))


def test_a_settled_message_cannot_be_renewed(world: World) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    complete(world, locked)
    with pytest.raises(MessageLockLostError):
        world.ask(RenewLocks(QUEUE, tokens(locked)))


def test_an_unknown_token_cannot_be_renewed(world: World) -> None:
    queue(world)
    with pytest.raises(MessageLockLostError):
        world.ask(RenewLocks(QUEUE, NOBODYS))


# -- lost locks --------------------------------------------------------------------------------


@pytest.mark.parametrize("disposition", Disposition)
def test_a_lapsed_lock_settles_nothing(world: World, disposition: Disposition) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    world.wait(seconds=61)
    with pytest.raises(MessageLockLostError):
        settle(world, disposition, locked)
    assert receive_one(world).delivery_count == 1


@pytest.mark.parametrize("disposition", Disposition)
def test_an_unknown_token_settles_nothing(world: World, disposition: Disposition) -> None:
    queue(world)
    send(world, "a")
    with pytest.raises(MessageLockLostError):
        world.ask(Settle(QUEUE, NOBODYS, disposition))
    assert bodies(peek(world)) == ["a"]


@pytest.mark.parametrize("disposition", Disposition)
def test_a_message_is_settled_only_once(world: World, disposition: Disposition) -> None:
    queue(world)
    send(world, "a")
    locked = receive_one(world)
    settle(world, disposition, locked)
    with pytest.raises(MessageLockLostError):
        complete(world, locked)


def test_a_lapsed_token_does_not_settle_the_next_delivery(world: World) -> None:
    queue(world)
    send(world, "a")
    first = receive_one(world)
    world.wait(seconds=61)
    second = receive_one(world)
    with pytest.raises(MessageLockLostError):
        complete(world, first)
    complete(world, second)


def test_lost_locks_do_not_keep_the_others_from_being_settled(world: World) -> None:
    queue(world)
    send(world, "a", "b")
    first, second = receive(world)
    complete(world, first)
    with pytest.raises(MessageLockLostError):
        complete(world, first, second)
    assert peek(world) == []


def test_a_token_of_another_queue_settles_nothing(world: World) -> None:
    queue(world, "one")
    queue(world, "two")
    send(world, "a", path="one")
    locked = receive_one(world, "one")
    with pytest.raises(MessageLockLostError):
        complete(world, locked, path="two")
    complete(world, locked, path="one")


def test_a_token_of_the_queue_settles_nothing_in_its_dead_letter_queue(world: World) -> None:
    queue(world)
    send(world, "dead", "alive")
    settle(world, Disposition.DEAD_LETTER, receive_one(world))
    locked = receive_one(world)
    with pytest.raises(MessageLockLostError):
        complete(world, locked, path=DEAD)
    complete(world, locked)


def test_settling_in_an_unknown_entity_is_refused(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        world.ask(Settle("nowhere", NOBODYS, Disposition.COMPLETE))


@pytest.mark.parametrize("bad", [None, "token", [b"short"], [7]])
def test_something_that_is_no_column_of_tokens_is_refused(world: World, bad: object) -> None:
    queue(world)
    with pytest.raises(InvalidArgumentError):
        world.ask(Settle(QUEUE, bad, Disposition.COMPLETE))


def test_an_unlimited_queue_never_gives_up(world: World) -> None:
    queue(
        world,
        max_delivery_count=2147483647,
        default_message_time_to_live=UNLIMITED,
        enable_dead_lettering_on_message_expiration=True,
    )
    send(world, "a")
    for _ in range(20):
        abandon(world, receive_one(world))
    assert receive_one(world).delivery_count == 20
