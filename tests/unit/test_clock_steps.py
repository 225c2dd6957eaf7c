"""A wall clock that is set: durations go on, schedules follow, and a moment's error is ignored."""

from datetime import timedelta

from twinbus.clock import BrokerTime, ManualClock, stamp_of
from twinbus.limits import CLOCK_CONFIRM_US, NEVER_US

CONFIRM = timedelta(microseconds=CLOCK_CONFIRM_US)
HOUR, YEAR = timedelta(hours=1), timedelta(days=365)
HOUR_US = 3600 * 1_000_000


def test_a_clock_that_nobody_sets_moves_nothing() -> None:
    clock = ManualClock()
    time = BrokerTime(clock)
    clock.advance(HOUR)
    assert time.look() == 0
    assert time.now_us() == clock.wall_us()


def test_a_set_clock_is_followed_when_it_still_says_so_a_moment_later() -> None:
    for by in (-HOUR, HOUR, YEAR):
        clock = ManualClock()
        time = BrokerTime(clock)
        clock.set_wall(by)
        before = time.now_us()
        assert time.look() == 0
        assert time.now_us() == before
        clock.advance(CONFIRM)
        assert time.look() == by // timedelta(microseconds=1)
        assert time.now_us() == clock.wall_us()
        assert time.looks_again_at == NEVER_US


def test_a_clock_that_is_wrong_for_a_moment_is_not_believed() -> None:
    clock = ManualClock()
    time = BrokerTime(clock)
    clock.set_wall(YEAR)
    assert time.look() == 0
    clock.set_wall(-YEAR)
    assert time.look() == 0
    clock.advance(CONFIRM * 2)
    assert time.look() == 0
    assert time.now_us() == clock.wall_us()


def test_a_drift_is_followed_but_never_backwards() -> None:
    clock = ManualClock()
    time = BrokerTime(clock)
    clock.set_wall(timedelta(milliseconds=300))
    assert time.look() == 0
    assert time.now_us() == clock.wall_us()
    before = time.now_us()
    clock.set_wall(-timedelta(milliseconds=300))
    assert time.look() == 0
    assert time.now_us() == before


def test_a_moment_of_the_timeline_is_found_on_the_clock() -> None:
    clock = ManualClock()
    time = BrokerTime(clock)
    clock.set_wall(HOUR)
    time.look()
    clock.advance(CONFIRM)
    time.look()
    assert time.clock_moment(time.now_us() + 7) == clock.now_us() + 7
    assert time.clock_moment(NEVER_US) == NEVER_US


def test_stamps_show_the_wall_time_and_durations_do_not_move() -> None:
    clock = ManualClock()
    moment = clock.now_us()
    clock.set_wall(-HOUR)
    assert clock.now_us() == moment
    assert stamp_of(clock, moment) == clock.now()
    assert clock.wall_us() == moment - HOUR_US
