"""The lock of a session: it lapses, is renewed or released, and opens no other session."""

from uuid import UUID

import pytest

from tests.contracts.conftest import World
from tests.contracts.session_words import LOCK_LOST, of, sessions
from tests.contracts.words import (
    QUEUE,
    accept,
    bodies,
    complete,
    later,
    peek,
    receive,
    receive_one,
    send,
)
from twinbus.errors import MessagingError, SessionCannotBeLockedError
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    GetSessionState,
    Receive,
    ReceiveDeferred,
    ReleaseSession,
    RenewSession,
    SessionLock,
    SetSessionState,
)

NEEDS = Capability.SESSIONS  # of nearly every test here


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
