"""Where turns run: in the loop while flushes are quick, else in the thread of the broker."""

import asyncio
from pathlib import Path

import pytest

from tests.namespaces import embedded
from twinbus.clock import ManualClock
from twinbus.limits import QUICK_TURN_US, SLOW_TURN_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.server import turns as turns_module
from twinbus.server.turns import CountingSelector, TurnPlace, Turns


def after(*flushes_us: int) -> bool:
    """Return whether the loop has the turn after flushes of these durations."""
    place = TurnPlace()
    for flush_us in flushes_us:
        place.observe(flush_us)
    return place.is_loop


def test_the_loop_has_the_turn_of_a_server_that_has_not_flushed_yet() -> None:
    assert after()


def test_quick_flushes_stay_in_the_loop() -> None:
    assert after(*[QUICK_TURN_US] * 100)


def test_slow_flushes_move_to_the_thread() -> None:
    assert not after(*[2 * SLOW_TURN_US] * 4)


def test_one_slow_flush_is_a_hiccup_and_two_in_a_row_are_a_slow_disk() -> None:
    hiccup = 100 * SLOW_TURN_US
    assert after(200, 200, hiccup, 200, 200)
    assert not after(200, 200, hiccup, hiccup)


def test_flushes_between_quick_and_slow_stay_where_they_are() -> None:
    between = (QUICK_TURN_US + SLOW_TURN_US) // 2
    assert after(*[between] * 50)
    assert not after(10 * SLOW_TURN_US, 10 * SLOW_TURN_US, *[between] * 50)


def test_the_loop_has_the_turn_again_when_the_disk_is_quick_again() -> None:
    assert after(*[10 * SLOW_TURN_US] * 5, *[100] * 30)


def test_the_loop_does_other_work_between_replies_that_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "DELIVERY_SLICE_S", 0.0)
    done: list[str] = []

    async def deliver_two(namespace: EmbeddedNamespace) -> None:
        loop = asyncio.get_running_loop()
        turns = Turns(namespace, CountingSelector(), lambda: None)
        finished = loop.create_future()

        def last() -> None:
            done.append("second reply")
            finished.set_result(None)

        turns.call_in_loop(lambda: done.append("first reply"))
        turns.call_in_loop(last)
        loop.call_soon(done.append, "other work")
        await finished

    with embedded(tmp_path, ManualClock(), threaded=False) as opened:
        asyncio.run(deliver_two(opened))
    assert done == ["first reply", "other work", "second reply"]
