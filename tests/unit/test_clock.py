"""Clocks: time in whole microseconds, and a clock that stands still until it is moved."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.clock import ManualClock, SystemClock, from_us, moment_us, to_us
from twinbus.limits import NEVER_US

WINTER = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)


@replayed
@given(st.datetimes(timezones=st.just(UTC)))
def test_a_moment_survives_the_way_to_microseconds_and_back(moment: datetime) -> None:
    assert from_us(moment_us(moment)) == moment


def test_a_moment_is_the_same_in_every_time_zone() -> None:
    elsewhere = WINTER.astimezone(timezone(timedelta(hours=-7)))
    assert moment_us(elsewhere) == moment_us(WINTER)


@replayed
@given(st.timedeltas(timedelta(0), timedelta(microseconds=NEVER_US)))
def test_a_span_that_fits_is_exact(span: timedelta) -> None:
    assert timedelta(microseconds=to_us(span)) == span


def test_a_span_too_long_for_a_column_means_never() -> None:
    assert to_us(timedelta.max) == NEVER_US


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(WINTER)
    assert clock.now() == WINTER
    clock.advance(timedelta(seconds=1))
    assert clock.now() == WINTER + timedelta(seconds=1)
    assert clock.now_us() == moment_us(WINTER) + 1_000_000


def test_a_listener_is_called_after_each_move_until_it_stops() -> None:
    clock, reported = ManualClock(WINTER), list[datetime]()
    stop = clock.on_advance(lambda: reported.append(clock.now()))
    clock.advance(timedelta(seconds=1))
    clock.sleep_us(1_000_000)
    stop()
    clock.advance(timedelta(seconds=1))
    assert reported == [WINTER + timedelta(seconds=1), WINTER + timedelta(seconds=2)]


def test_a_listener_may_stop_listening_while_it_is_called() -> None:
    clock, reported = ManualClock(), list[int]()

    def listen_once() -> None:
        reported.append(1)
        stop()

    stop = clock.on_advance(listen_once)
    clock.on_advance(lambda: reported.append(2))
    clock.advance(timedelta(seconds=1))
    clock.advance(timedelta(seconds=1))
    assert reported == [1, 2, 2]


def test_a_wait_for_a_manual_clock_ends_when_the_clock_moves_unless_the_moment_has_come() -> None:
    clock = ManualClock(WINTER)
    assert clock.seconds_until(clock.now_us() + 1) is None
    assert clock.seconds_until(clock.now_us()) == 0.0


def test_one_never_waits_for_real_time_for_longer_than_an_hour_or_less_than_nothing() -> None:
    clock = SystemClock()
    assert clock.seconds_until(NEVER_US) == 3600.0
    assert clock.seconds_until(0) == 0.0


def test_real_time_calls_nobody_back() -> None:
    SystemClock().on_advance(lambda: None)()
