"""Where turns run: in the loop while flushes are quick, else in the thread of the broker."""

from twinbus.limits import QUICK_TURN_US, SLOW_TURN_US
from twinbus.server.turns import TurnPlace


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
