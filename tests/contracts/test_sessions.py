"""Sessions: sent to, accepted by one receiver at a time, and received in order."""

from datetime import timedelta

import pytest

from tests.contracts.conftest import World
from tests.contracts.session_words import HOUR, LOCK_LOST, of, sessions
from tests.contracts.words import (
    DEAD,
    QUEUE,
    abandon,
    accept,
    bodies,
    complete,
    later,
    outcome,
    peek,
    queue,
    receive,
    receive_one,
    send,
    settle,
    start,
    subscription,
    take,
    topic,
)
from twinbus.errors import (
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    SessionCannotBeLockedError,
)
from twinbus.message import to_messages
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    AcceptSession,
    Disposition,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    ReleaseSession,
)

NEEDS = Capability.SESSIONS  # of nearly every test here
HALF_A_MINUTE = timedelta(seconds=30)


# -- sending ---------------------------------------------------------------------------------------


def test_a_session_queue_refuses_messages_without_session_id(world: World) -> None:
    sessions(world)
    with pytest.raises(InvalidArgumentError):
        send(world, "a")
    assert peek(world) == []


def test_a_batch_with_one_message_without_session_id_is_refused_whole(world: World) -> None:
    sessions(world)
    with pytest.raises(InvalidArgumentError):
        send(world, of("s"), "a")
    assert peek(world) == []


def test_a_plain_queue_takes_messages_with_session_id(world: World) -> None:
    queue(world)
    send(world, of("s"))
    assert receive_one(world).session_id == "s"


# -- accepting -------------------------------------------------------------------------------------


def test_a_named_session_is_accepted(world: World) -> None:
    sessions(world)
    send(world, of("red"), of("blue"))
    grant = world.ask(AcceptSession(QUEUE, "blue"))
    assert grant.lock.session_id == "blue"
    assert grant.locked_until_utc == later(world, seconds=60)


def test_a_named_session_without_messages_is_accepted(world: World) -> None:
    sessions(world)
    lock = accept(world, "empty")
    assert receive(world, session=lock) == []


def test_a_locked_session_cannot_be_accepted(world: World) -> None:
    sessions(world)
    accept(world, "s")
    with pytest.raises(SessionCannotBeLockedError):
        accept(world, "s")


def test_different_sessions_are_locked_at_the_same_time(world: World) -> None:
    sessions(world)
    send(world, of("red", "r"), of("blue", "b"))
    red, blue = accept(world, "red"), accept(world, "blue")
    assert receive_one(world, session=blue).body == b"b"
    assert receive_one(world, session=red).body == b"r"


def test_the_next_available_session_is_one_with_messages(world: World) -> None:
    sessions(world)
    accept(world, "empty")
    send(world, of("full"))
    assert accept(world).session_id == "full"


def test_the_next_available_session_is_not_locked(world: World) -> None:
    sessions(world)
    send(world, of("red"), of("blue"))
    assert {accept(world).session_id, accept(world).session_id} == {"red", "blue"}
    with pytest.raises(SessionCannotBeLockedError):
        accept(world)


def test_without_messages_there_is_no_next_session(world: World) -> None:
    sessions(world)
    with pytest.raises(SessionCannotBeLockedError):
        accept(world)


def test_the_wait_for_the_next_session_ends_when_a_message_arrives(world: World) -> None:
    sessions(world)
    waiting = start(world, AcceptSession(QUEUE, wait=HOUR))
    assert not waiting.done()
    send(world, of("s"))
    assert waiting.result(timeout=10).lock.session_id == "s"


def test_the_wait_for_the_next_session_fails_when_it_is_over(world: World) -> None:
    sessions(world)
    waiting = start(world, AcceptSession(QUEUE, wait=HOUR))
    world.wait(minutes=61)
    with pytest.raises(SessionCannotBeLockedError):
        waiting.result(timeout=10)


def test_the_wait_for_a_locked_session_ends_when_it_is_released(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    waiting = start(world, AcceptSession(QUEUE, "s", wait=HOUR))
    world.ask(ReleaseSession(QUEUE, lock))
    assert waiting.result(timeout=10).lock.lock_token != lock.lock_token


def test_the_wait_for_a_locked_session_ends_when_its_lock_lapses(world: World) -> None:
    sessions(world)
    accept(world, "s")
    waiting = start(world, AcceptSession(QUEUE, "s", wait=HOUR))
    world.wait(seconds=61)
    assert waiting.result(timeout=10).lock.session_id == "s"


def test_a_plain_queue_has_no_sessions_to_accept(world: World) -> None:
    queue(world)
    send(world, of("s"))
    with pytest.raises(InvalidOperationError):
        accept(world, "s")


def test_a_session_of_an_unknown_entity_cannot_be_accepted(world: World) -> None:
    with pytest.raises(EntityNotFoundError):
        accept(world, "s", path="nowhere")


# -- receiving -------------------------------------------------------------------------------------


def test_a_session_queue_delivers_only_to_holders_of_a_session(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    with pytest.raises(InvalidOperationError):
        receive(world)


def test_a_holder_gets_the_messages_of_its_session_only(world: World) -> None:
    sessions(world)
    send(world, of("red", "r1"), of("blue", "b1"), of("red", "r2"))
    assert bodies(receive(world, session=accept(world, "red"))) == ["r1", "r2"]


def test_messages_of_a_session_come_in_order(world: World) -> None:
    sessions(world)
    send(world, *(of("s", body) for body in "abcdef"))
    lock = accept(world, "s")
    assert [receive_one(world, session=lock).body.decode() for _ in "abcdef"] == list("abcdef")


def test_an_abandoned_message_comes_first_again(world: World) -> None:
    sessions(world)
    send(world, of("s", "a"), of("s", "b"))
    lock = accept(world, "s")
    abandon(world, receive_one(world, session=lock))
    again = receive(world, session=lock)
    assert bodies(again) == ["a", "b"]
    assert again[0].delivery_count == 1


def test_a_holder_completes_its_messages(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    lock = accept(world, "s")
    complete(world, receive_one(world, session=lock))
    assert peek(world) == []


def test_a_holder_receives_and_deletes(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    lock = accept(world, "s")
    mode = ReceiveMode.RECEIVE_AND_DELETE
    assert world.ask(Receive(QUEUE, mode=mode, session=lock)).num_rows == 1
    assert peek(world) == []


def test_a_holder_waits_for_messages_of_its_session(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    waiting = start(world, Receive(QUEUE, wait=timedelta(seconds=30), session=lock))
    send(world, of("other"))
    assert not waiting.done()
    send(world, of("s", "mine"))
    assert outcome(waiting) == ["mine"]


def test_the_wait_for_messages_of_a_session_comes_to_its_end(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    waiting = start(world, Receive(QUEUE, wait=timedelta(seconds=30), session=lock))
    world.wait(seconds=31)
    assert outcome(waiting) == []


def test_a_holder_gets_its_deferred_messages_by_number(world: World) -> None:
    sessions(world)
    numbers = send(world, of("s"))
    lock = accept(world, "s")
    settle(world, Disposition.DEFER, receive_one(world, session=lock))
    batch = world.ask(ReceiveDeferred(QUEUE, numbers, session=lock))
    assert bodies(to_messages(batch)) == ["a"]


def test_a_deferred_message_of_another_session_is_not_delivered(world: World) -> None:
    sessions(world)
    numbers = send(world, of("red"))
    settle(world, Disposition.DEFER, receive_one(world, session=accept(world, "red")))
    blue = accept(world, "blue")
    with pytest.raises(MessagingError):
        world.ask(ReceiveDeferred(QUEUE, numbers, session=blue))


def test_a_failed_message_of_a_session_is_dead_lettered(world: World) -> None:
    sessions(world, max_delivery_count=1)
    send(world, of("s", "bad"), of("s", "good"))
    lock = accept(world, "s")
    abandon(world, receive_one(world, session=lock))
    assert bodies(receive(world, session=lock)) == ["good"]
    assert take(world, DEAD) == ["bad"]


def test_the_dead_letter_queue_of_a_session_queue_needs_no_session(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    lock = accept(world, "s")
    settle(world, Disposition.DEAD_LETTER, receive_one(world, session=lock))
    dead = receive_one(world, DEAD)
    assert (dead.body, dead.session_id) == (b"a", "s")


def test_a_subscription_may_require_sessions(world: World) -> None:
    topic(world)
    path = subscription(world, "sport", requires_session=True)
    send(world, of("red", "r"), of("blue", "b"), path="news")
    lock = accept(world, "blue", path)
    assert bodies(receive(world, path, session=lock)) == ["b"]


def test_sessions_of_a_partitioned_queue_stay_in_order(world: World) -> None:
    sessions(world, enable_partitioning=True)
    for body in "abcd":
        send(world, *(of(str(n), body) for n in range(20)))
    for n in range(20):
        assert bodies(receive(world, session=accept(world, str(n)))) == list("abcd")


def test_the_wait_for_messages_ends_when_the_session_is_released(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    waiting = start(world, Receive(QUEUE, wait=HOUR, session=lock))
    world.ask(ReleaseSession(QUEUE, lock))
    with pytest.raises(LOCK_LOST):
        waiting.result(timeout=10)


def test_the_wait_for_messages_ends_when_the_session_lock_lapses(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    waiting = start(world, Receive(QUEUE, wait=HOUR, session=lock))
    world.wait(seconds=61)
    with pytest.raises(LOCK_LOST):
        waiting.result(timeout=10)


@pytest.mark.parametrize(
    ("session_id", "wait", "text"),
    [
        (
            "s",
            HALF_A_MINUTE,
            "session 's' of orders is locked by another receiver, which did not release",
        ),
        ("s", timedelta(0), "session 's' of orders is locked by another receiver; try again"),
        (
            None,
            HALF_A_MINUTE,
            "orders has no unlocked session with messages, and none appeared in",
        ),
        (None, timedelta(0), "orders has no unlocked session with messages; try again"),
    ],
)
def test_the_error_about_a_session_that_stays_locked_says_so(
    world: World, session_id: str | None, wait: timedelta, text: str
) -> None:
    queue(world, requires_session=True)
    world.ask(AcceptSession(QUEUE, "s"))
    refused = start(world, AcceptSession(QUEUE, session_id, wait=wait))
    world.wait(seconds=30)  # the lock lasts a minute
    with pytest.raises(SessionCannotBeLockedError) as caught:
        refused.result(timeout=30)
    assert text in str(caught.value)
    assert caught.value.is_transient
