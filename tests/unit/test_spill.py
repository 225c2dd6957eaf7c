"""The spill store keeps sends in order, and its health decides from commits alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from twinbus.broker.store.spill import Spill, StoreHealth
from twinbus.clock import ManualClock
from twinbus.errors import StoreUnavailableError
from twinbus.limits import SLOW_COMMIT_US, SLOW_COMMITS_TO_SPILL, SPILL_RETRY_US
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import Origin
from twinbus.testing import FaultyStorage

NOON = 1_000_000


@contextmanager
def opened(directory: Path, disk: FaultyStorage | None = None) -> Iterator[Spill]:
    spill = Spill(directory, disk)
    try:
        yield spill
    finally:
        spill.close()


def put(spill: Spill, *bodies: bytes, origin: Origin | None = None) -> None:
    spill.append("orders", to_batch([BrokeredMessage(body=body) for body in bodies]), origin)


def spilled_bodies(spill: Spill) -> list[bytes]:
    return [m.body for spilled in spill.sends() for m in to_messages(spilled.send.messages)]


def origins(spill: Spill) -> list[tuple[str, int]]:
    """Return what makes the move of each message happen once."""
    return [
        (spilled.send.origin.source, int(number))
        for spilled in spill.sends()
        if spilled.send.origin is not None
        for number in spilled.send.origin.numbers
    ]


def test_spilled_sends_are_there_in_order_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a", b"b")
        put(spill, b"c")
    with opened(tmp_path) as spill:
        assert spilled_bodies(spill) == [b"a", b"b", b"c"]


def test_no_two_spilled_messages_share_an_origin_though_the_spill_is_opened_again(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a", b"b")
    with opened(tmp_path) as spill:
        put(spill, b"c")
        assert len(set(origins(spill))) == 3


def test_a_transfer_keeps_the_origin_it_came_with(tmp_path: Path) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a", b"b", origin=Origin("backlog-1", [7, 9]))
        assert origins(spill) == [("backlog-1", 7), ("backlog-1", 9)]


def test_moved_sends_are_gone_once_all_are_moved(tmp_path: Path) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a")
        put(spill, b"b")
        [(source, _), _] = origins(spill)
        assert spill.moved([0]) == set()
        assert spilled_bodies(spill) == [b"b"]
        assert spill.moved([0]) == {source}
    with opened(tmp_path) as spill:
        assert len(spill) == 0


def test_an_emptied_spill_takes_sends_again(tmp_path: Path) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a")
        spill.moved([0])
        put(spill, b"b")
    with opened(tmp_path) as spill:
        assert spilled_bodies(spill) == [b"b"]


def test_a_transfer_is_remembered_for_ever_though_it_was_spilled(tmp_path: Path) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a", origin=Origin("backlog-1", [1]))
        assert spill.moved([0]) == set()


def test_a_send_the_spill_refuses_is_not_in_it(tmp_path: Path) -> None:
    disk = FaultyStorage(ManualClock())
    with opened(tmp_path, disk=disk) as spill:
        disk.full = True
        with pytest.raises(StoreUnavailableError):
            put(spill, b"lost")
        disk.full = False
        put(spill, b"a")
        assert spilled_bodies(spill) == [b"a"]
    with opened(tmp_path) as spill:
        assert spilled_bodies(spill) == [b"a"]


def test_a_refused_commit_starts_spilling_and_sets_when_to_try_again() -> None:
    health = StoreHealth()
    health.refused(NOON)
    assert (health.spilling, health.retry_at) == (True, NOON + SPILL_RETRY_US)


def test_slow_commits_in_a_row_start_spilling_and_a_quick_one_breaks_the_row() -> None:
    health = StoreHealth()
    for _ in range(SLOW_COMMITS_TO_SPILL - 1):
        health.succeeded(SLOW_COMMIT_US, NOON)
    health.succeeded(SLOW_COMMIT_US - 1, NOON)
    for _ in range(SLOW_COMMITS_TO_SPILL - 1):
        health.succeeded(SLOW_COMMIT_US, NOON)
        assert not health.spilling
    health.succeeded(SLOW_COMMIT_US, NOON)
    assert health.spilling


def test_after_recovery_the_count_of_slow_commits_begins_anew() -> None:
    health = StoreHealth()
    for _ in range(SLOW_COMMITS_TO_SPILL):
        health.succeeded(SLOW_COMMIT_US, NOON)
    health.recovered()
    health.succeeded(SLOW_COMMIT_US, NOON)
    assert not health.spilling


def test_sends_of_a_paused_entity_stay_while_others_are_moved(tmp_path: Path) -> None:
    with opened(tmp_path) as spill:
        put(spill, b"a")
        spill.append("invoices", to_batch([BrokeredMessage(body=b"b")]), None)
        put(spill, b"c")
        movable = list(spill.sends(paused={"orders"}))
        assert [spilled.send.path for spilled in movable] == ["invoices"]
        assert spill.moved([movable[0].position]) == set()
        assert spilled_bodies(spill) == [b"a", b"c"]
    with opened(tmp_path) as spill:
        assert spilled_bodies(spill) == [
            b"a",
            b"b",
            b"c",
        ]  # the main log recognises what it took before
