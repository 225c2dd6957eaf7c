"""The state of a session, and how sessions are listed and browsed."""

from typing import Any

import pytest

from tests.contracts.conftest import World
from tests.contracts.session_words import HOUR, LOCK_LOST, of, sessions
from tests.contracts.words import (
    QUEUE,
    accept,
    bodies,
    complete,
    later,
    message,
    queue,
    receive_one,
    send,
)
from twinbus.errors import InvalidArgumentError, InvalidOperationError
from twinbus.limits import MAX_SESSION_STATE_BYTES
from twinbus.message import to_messages
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    GetSessionState,
    ListSessions,
    Peek,
    ReleaseSession,
    Send,
    SetSessionState,
)

NEEDS = Capability.SESSIONS  # of nearly every test here


# -- state -----------------------------------------------------------------------------------------


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
