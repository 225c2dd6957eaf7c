"""Which connections a server closes, what those of a key may use, how quickly they must read."""

import asyncio
from typing import Any

import pytest

from twinbus.connection import Token, sign_token
from twinbus.limits import MANAGE_RESERVE, SECOND_US
from twinbus.protocol.access import Admission
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.server import attendance
from twinbus.server.attendance import Attendance, ByteShares
from twinbus.server.client_connection import ReadingRate

SHARE, MOST = 100, 300
SECRET = "a secret of a key"  # noqa: S105 - of a test


def admission(name: str, *claims: Claim, path: str | None = None) -> Admission:
    options: dict[str, Any] = {"primary": SECRET, "secondary": SECRET, "entity_path": path}
    key = SharedAccessKey(name=name, claims=claims or (Claim.LISTEN,), **options)
    return Admission(Token.parse(sign_token("twinbus://here/", name, SECRET, 100)), key)


RED, ROOT = admission("red"), admission("root", Claim.MANAGE)


def test_the_connections_of_a_key_share_its_bytes() -> None:
    shares = ByteShares(SHARE, MOST)
    shares.note(RED, 60)
    assert shares.has_room(RED, 0, 0, 40)
    assert not shares.has_room(RED, 0, 0, 41)
    assert not shares.has_room(RED, 0, 10, 31)
    assert shares.has_room(admission("blue"), 0, 0, 41)


def test_what_a_connection_has_noted_is_not_counted_twice() -> None:
    shares = ByteShares(SHARE, MOST)
    shares.note(RED, 60)
    assert shares.has_room(RED, 60, 60, 40)
    assert shares.has_room(RED, 60, 20, 80)
    assert not shares.has_room(RED, 60, 61, 40)


def test_a_key_that_holds_nothing_may_always_begin() -> None:
    shares = ByteShares(SHARE, MOST)
    for number in range(6):
        shares.note(admission(f"key{number}"), SHARE)
    assert shares.has_room(RED, 0, 0, 10 * MOST)
    shares.note(RED, 1)
    assert not shares.has_room(RED, 0, 0, 1)


def test_keys_that_manage_the_namespace_have_a_reserve_of_bytes() -> None:
    shares = ByteShares(SHARE, MOST)
    for number in range(2):
        shares.note(admission(f"key{number}"), SHARE)
    local = admission("local", Claim.MANAGE, path="orders")
    for item in (RED, ROOT, local):
        shares.note(item, 1)
    reserve = int(MOST * MANAGE_RESERVE)
    left = MOST - reserve - shares.total
    for item in (RED, local):
        assert shares.has_room(item, 0, 0, left)
        assert not shares.has_room(item, 0, 0, left + 1)
    assert shares.has_room(ROOT, 0, 0, left + reserve)
    assert not shares.has_room(ROOT, 0, 0, left + reserve + 1)


def test_bytes_that_are_released_leave_nothing_behind() -> None:
    shares = ByteShares(SHARE, MOST)
    for change in (50, -20, -30):
        shares.note(RED, change)
    assert (shares.total, dict(shares.by_key)) == (0, {})


def test_a_client_that_reads_a_little_now_and_then_reads_too_slowly() -> None:
    rate = ReadingRate(0)
    pauses = [rate.pause_us(second * SECOND_US, second, 1000, 10) for second in range(1, 10)]
    assert pauses == [second * SECOND_US for second in range(1, 10)]


def test_a_client_that_reads_enough_at_once_has_made_no_pause() -> None:
    rate = ReadingRate(0)
    assert rate.pause_us(3, 9, 1000, 10) == 3
    assert rate.pause_us(4, 10, 1000, 10) == 0
    assert rate.pause_us(6, 19, 1000, 10) == 2


def test_a_client_that_has_read_everything_has_made_no_pause() -> None:
    rate = ReadingRate(0)
    assert rate.pause_us(5, 1, 0, 10) == 0
    assert rate.pause_us(7, 1, 1, 10) == 2


class _Line(asyncio.Transport):
    """A transport that records whether it was aborted."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_a_connection_that_was_closed_while_it_arrived_displaces_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attendance, "MAX_STRANGERS", 2)
    door = Attendance(10, lambda _: None)
    lines = [_Line() for _ in range(3)]

    async def arrive() -> None:
        tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in lines]
        for task in tasks:
            door.note_arrival(task, "127.0.0.1")  # type: ignore[arg-type]
        for task, line in zip(tasks, lines, strict=True):
            door.note_protocol(task, asyncio.Protocol(), line)  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()

    asyncio.run(arrive())
    assert [line.is_aborted for line in lines] == [True, False, False]


def test_the_oldest_stranger_is_closed_whenever_it_got_its_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attendance, "MAX_STRANGERS", 2)
    door = Attendance(10, lambda _: None)
    first, second, third = (_Line() for _ in range(3))

    async def arrive() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        door.note_arrival(task, "127.0.0.1")  # type: ignore[arg-type]
        door.note_stranger(asyncio.Protocol(), second, "127.0.0.1")
        door.note_protocol(task, asyncio.Protocol(), first)  # type: ignore[arg-type]
        door.note_stranger(asyncio.Protocol(), third, "127.0.0.1")
        task.cancel()

    asyncio.run(arrive())
    assert [line.is_aborted for line in (first, second, third)] == [True, False, False]


def test_a_stranger_does_not_become_younger_with_its_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attendance, "MAX_STRANGERS", 2)
    door = Attendance(10, lambda _: None)
    lines = [_Line() for _ in range(3)]
    unknown, known = asyncio.Protocol(), asyncio.Protocol()
    door.note_stranger(unknown, lines[0], "127.0.0.1")
    door.note_stranger(asyncio.Protocol(), lines[1], "127.0.0.1")
    door.hand_over(unknown, known)
    door.note_stranger(known, lines[0], "127.0.0.1")
    door.note_stranger(asyncio.Protocol(), lines[2], "127.0.0.1")
    assert [line.is_aborted for line in lines] == [True, False, False]
