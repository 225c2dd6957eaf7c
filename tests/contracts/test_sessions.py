"""Sessions: held by one receiver at a time, in order, with a state of their own."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from tests.contracts.conftest import World
from tests.contracts.words import (
    DEAD,
    QUEUE,
    abandon,
    accept,
    bodies,
    complete,
    later,
    message,
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
    SessionLockLostError,
)
from twinbus.limits import MAX_SESSION_STATE_BYTES
from twinbus.message import BrokeredMessage, to_messages
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    AcceptSession,
    Disposition,
    GetSessionState,
    ListSessions,
    Peek,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    ReleaseSession,
    RenewSession,
    Send,
    SessionLock,
    SetSessionState,
)

NEEDS = Capability.SESSIONS  # of nearly every test here

HOUR = timedelta(hours=1)
HALF_A_MINUTE = timedelta(seconds=30)
LOCK_LOST = SessionLockLostError


def sessions(world: World, **settings: Any) -> None:
    queue(world, requires_session=True, **settings)


def of(session_id: str, body: str = "a", **fields: object) -> BrokeredMessage:
    return message(body, session_id=session_id, **fields)


# -- sending -----------------------------------------------------------------------------------


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


# -- accepting ---------------------------------------------------------------------------------


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


# -- receiving ---------------------------------------------------------------------------------


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


# -- the lock ----------------------------------------------------------------------------------


def test_a_session_lock_lapses_after_the_lock_duration(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.wait(seconds=61)
    with pytest.raises(LOCK_LOST):
        receive(world, session=lock)
    accept(world, "s")


def test_a_session_lock_holds_until_the_end_of_the_lock_duration(world: World) -> None:
    sessions(world)
    accept(world, "s")
    world.wait(seconds=59)
    with pytest.raises(SessionCannotBeLockedError):
        accept(world, "s")


def test_a_renewed_session_is_locked_for_another_lock_duration(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.wait(seconds=40)
    assert world.ask(RenewSession(QUEUE, lock)) == later(world, seconds=60)
    world.wait(seconds=40)
    assert receive(world, session=lock) == []


def test_renewing_a_session_keeps_its_messages_locked(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    lock = accept(world, "s")
    locked = receive_one(world, session=lock)
    world.wait(seconds=40)
    world.ask(RenewSession(QUEUE, lock))
    world.wait(seconds=40)
    assert receive(world, session=lock) == []
    complete(world, locked)


def test_a_lapsed_session_cannot_be_renewed(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.wait(seconds=61)
    with pytest.raises(LOCK_LOST):
        world.ask(RenewSession(QUEUE, lock))


def test_a_lapsed_session_gives_its_messages_to_the_next_holder(world: World) -> None:
    sessions(world)
    send(world, of("s", "a"), of("s", "b"))
    receive(world, session=accept(world, "s"))
    world.wait(seconds=61)
    assert bodies(receive(world, session=accept(world))) == ["a", "b"]


def test_a_message_of_a_lapsed_session_cannot_be_settled(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    locked = receive_one(world, session=accept(world, "s"))
    world.wait(seconds=61)
    with pytest.raises(MessagingError):
        complete(world, locked)
    assert bodies(peek(world)) == ["a"]


def test_a_released_session_can_be_accepted_at_once(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.ask(ReleaseSession(QUEUE, lock))
    accept(world, "s")


def test_a_released_session_gives_its_locked_messages_back(world: World) -> None:
    sessions(world)
    send(world, of("s", "a"), of("s", "b"))
    lock = accept(world, "s")
    found = receive_one(world, session=lock)
    world.ask(ReleaseSession(QUEUE, lock))
    with pytest.raises(MessagingError):
        complete(world, found)
    assert bodies(receive(world, session=accept(world, "s"))) == ["a", "b"]


def test_a_released_session_is_no_longer_locked(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    lock = accept(world, "s")
    world.ask(ReleaseSession(QUEUE, lock))
    with pytest.raises(LOCK_LOST):
        receive(world, session=lock)
    with pytest.raises(LOCK_LOST):
        world.ask(ReleaseSession(QUEUE, lock))


def test_the_old_lock_does_not_work_for_the_next_holder(world: World) -> None:
    sessions(world)
    send(world, of("s"))
    old = accept(world, "s")
    world.wait(seconds=61)
    new = accept(world, "s")
    with pytest.raises(LOCK_LOST):
        receive(world, session=old)
    assert bodies(receive(world, session=new)) == ["a"]


STRANGER = SessionLock("s", UUID(int=7))


@pytest.mark.parametrize(
    "command",
    [
        Receive(QUEUE, session=STRANGER),
        ReceiveDeferred(QUEUE, [1], session=STRANGER),
        RenewSession(QUEUE, STRANGER),
        ReleaseSession(QUEUE, STRANGER),
        GetSessionState(QUEUE, STRANGER),
        SetSessionState(QUEUE, STRANGER, b"x"),
    ],
    ids=lambda command: type(command).__name__,
)
def test_a_stranger_has_no_access_to_a_session(
    world: World, command: Receive | RenewSession
) -> None:
    sessions(world)
    send(world, of("s"))
    accept(world, "s")
    with pytest.raises(LOCK_LOST):
        world.ask(command)


def test_the_lock_of_one_session_does_not_open_another(world: World) -> None:
    sessions(world)
    send(world, of("red"), of("blue"))
    red = accept(world, "red")
    accept(world, "blue")
    with pytest.raises(LOCK_LOST):
        receive(world, session=SessionLock("blue", red.lock_token))


# -- state -------------------------------------------------------------------------------------


def test_a_new_session_has_no_state(world: World) -> None:
    sessions(world)
    assert world.ask(GetSessionState(QUEUE, accept(world, "s"))) is None


def test_the_state_of_a_session_is_kept(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.ask(SetSessionState(QUEUE, lock, b"\x00half way"))
    assert world.ask(GetSessionState(QUEUE, lock)) == b"\x00half way"


def test_the_state_of_a_session_outlives_its_holder(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.ask(SetSessionState(QUEUE, lock, b"half way"))
    world.wait(days=30)
    assert world.ask(GetSessionState(QUEUE, accept(world, "s"))) == b"half way"


def test_each_session_has_its_own_state(world: World) -> None:
    sessions(world)
    world.ask(SetSessionState(QUEUE, accept(world, "red"), b"red"))
    assert world.ask(GetSessionState(QUEUE, accept(world, "blue"))) is None


def test_state_none_removes_the_state(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.ask(SetSessionState(QUEUE, lock, b"half way"))
    world.ask(SetSessionState(QUEUE, lock, None))
    assert world.ask(GetSessionState(QUEUE, lock)) is None


def test_empty_state_is_a_state(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.ask(SetSessionState(QUEUE, lock, b""))
    assert world.ask(GetSessionState(QUEUE, lock)) == b""


def test_the_state_of_a_lapsed_session_cannot_be_set(world: World) -> None:
    sessions(world)
    lock = accept(world, "s")
    world.wait(seconds=61)
    with pytest.raises(LOCK_LOST):
        world.ask(SetSessionState(QUEUE, lock, b"late"))


def test_state_has_a_size_limit(world: World) -> None:
    world.need(Capability.WHOLE_BATCHES)
    sessions(world)
    lock = accept(world, "s")
    world.ask(SetSessionState(QUEUE, lock, b"x" * MAX_SESSION_STATE_BYTES))
    with pytest.raises(InvalidArgumentError):
        world.ask(SetSessionState(QUEUE, lock, b"x" * (MAX_SESSION_STATE_BYTES + 1)))


# -- elsewhere ---------------------------------------------------------------------------------


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


# -- listing and browsing --------------------------------------------------------------------------


def in_session(world: World, name: str, *bodies: str) -> None:
    send(world, *(of(name, body) for body in bodies))


def listed(world: World, **options: Any) -> list[str]:
    return list(world.ask(ListSessions(QUEUE, **options)))


def keep(world: World, name: str, state: bytes | None) -> None:
    lock = accept(world, name)
    world.ask(SetSessionState(QUEUE, lock, state))
    world.ask(ReleaseSession(QUEUE, lock))


def test_sessions_with_messages_or_a_state_are_listed(world: World) -> None:
    sessions(world)
    in_session(world, "a", "1", "2")
    in_session(world, "b", "3")
    keep(world, "b", b"state")
    keep(world, "c", b"state")
    keep(world, "d", None)
    lock = accept(world, "e")
    assert sorted(listed(world)) == ["a", "b", "c"]
    world.ask(ReleaseSession(QUEUE, lock))


def test_a_session_is_listed_until_its_last_message_is_gone(world: World) -> None:
    sessions(world)
    in_session(world, "a", "1")
    send(world, of("b", scheduled_enqueue_time_utc=later(world, hours=1)))
    lock = accept(world, "a")
    locked = receive_one(world, session=lock)
    assert listed(world) == ["a"]
    complete(world, locked)
    assert listed(world) == []
    world.wait(hours=1)
    assert listed(world) == ["b"]


def test_sessions_are_listed_in_pages(world: World) -> None:
    sessions(world)
    names = [f"s{number}" for number in range(7)]
    for name in names:
        in_session(world, name, "1")
    pages = [listed(world, skip=skip, max_sessions=3) for skip in (0, 3, 6, 9)]
    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert sorted(name for page in pages for name in page) == names


def test_sessions_are_listed_by_the_time_of_their_state(world: World) -> None:
    sessions(world)
    in_session(world, "a", "1")
    keep(world, "b", b"old")
    before = world.clock.now()
    world.wait(seconds=1)
    keep(world, "c", b"new")
    assert listed(world, state_updated_after_utc=before) == ["c"]
    assert listed(world, state_updated_after_utc=before - HOUR) == ["b", "c"]


def test_an_entity_without_sessions_lists_none(world: World) -> None:
    queue(world)
    with pytest.raises(InvalidOperationError, match="has no sessions"):
        listed(world)
    with pytest.raises(InvalidOperationError, match="has no sessions"):
        world.ask(Peek(QUEUE, session_id="a"))


def test_a_session_is_browsed_however_many_messages_others_have(world: World) -> None:
    sessions(world)
    world.ask(Send(QUEUE, [message(session_id="many") for _ in range(3000)]))
    in_session(world, "few", "1", "2", "3")
    world.ask(Send(QUEUE, [message(session_id="many") for _ in range(3000)]))
    found = to_messages(world.ask(Peek(QUEUE, 0, 2, session_id="few")))
    assert bodies(found) == ["1", "2"]
    assert found[-1].sequence_number is not None
    rest = Peek(QUEUE, found[-1].sequence_number + 1, 10, session_id="few")
    assert bodies(to_messages(world.ask(rest))) == ["3"]
    assert to_messages(world.ask(Peek(QUEUE, 0, 10, session_id="nobody"))) == []
