"""The ticker: what is due is done when it is due, one tick at a time, whatever a tick does."""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from twinbus.clock import ManualClock, SystemClock
from twinbus.limits import NEVER_US, SECOND_US
from twinbus.pairing import ticker as module
from twinbus.pairing.ticker import Ticker

SECOND = timedelta(seconds=1)
DEADLINE_S = 20.0  # what has not happened by then never does
SOON_US = 1_000
LOGGER = "twinbus.pairing"


class Ticks:
    """Notes each tick, and does what a test says in it."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.threads: list[str] = []
        self.deed: Callable[[], object] = lambda: None
        self.next_due: Callable[[int], int] = lambda _: NEVER_US
        self.at_once = 0
        self.most_at_once = 0
        self._changed = threading.Condition()

    def __call__(self, now: int) -> int:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.times.append(now)
            self.threads.append(threading.current_thread().name)
            self.deed()
            return self.next_due(now)
        finally:
            self.at_once -= 1
            with self._changed:
                self._changed.notify_all()

    def come(self, count: int = 1) -> bool:
        """Whether so many come before the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.times) >= count, DEADLINE_S)


class Once:
    """Does something the first time it is called."""

    def __init__(self, deed: Callable[[], object]) -> None:
        self._deed: Callable[[], object] | None = deed

    def __call__(self) -> None:
        deed, self._deed = self._deed, None
        if deed is not None:
            deed()


def fail() -> None:
    raise ZeroDivisionError("a tick that fails")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "twinbus-pairing"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
def manual(clock: ManualClock, ticks: Ticks) -> Iterator[Ticker]:
    ticker = Ticker(clock, ticks)
    yield ticker
    ticker.close()


@pytest.fixture
def real(ticks: Ticks) -> Iterator[Ticker]:
    ticker = Ticker(SystemClock(), ticks)
    yield ticker
    ticker.close()
    assert threads() == []


def now() -> int:
    return SystemClock().now_us()


# -- on a manual clock -----------------------------------------------------------------------------


def test_a_manual_clock_ticks_when_it_is_moved(
    manual: Ticker, clock: ManualClock, ticks: Ticks
) -> None:
    manual.expect(clock.now_us() + SECOND_US)
    assert ticks.times == []
    clock.advance(SECOND)
    assert ticks.times == [clock.now_us()]


def test_a_manual_clock_needs_no_thread(manual: Ticker, clock: ManualClock) -> None:
    manual.expect(clock.now_us())
    manual.nudge()
    clock.advance(SECOND)
    assert threads() == []


def test_a_nudge_without_a_thread_ticks_at_once(manual: Ticker, ticks: Ticks) -> None:
    manual.nudge()
    assert ticks.threads == [threading.current_thread().name]


def test_a_tick_that_fails_is_reported_and_the_next_one_comes(
    manual: Ticker, clock: ManualClock, ticks: Ticks, caplog: pytest.LogCaptureFixture
) -> None:
    ticks.deed = Once(fail)
    with caplog.at_level(logging.ERROR, LOGGER):
        manual.nudge()
    clock.advance(SECOND)
    assert len(ticks.times) == 2
    assert "a tick of a pairing failed" in caplog.text


def test_a_tick_that_asks_for_another_gets_it_afterwards_and_not_within(
    manual: Ticker, ticks: Ticks
) -> None:
    ticks.deed = Once(manual.nudge)
    manual.nudge()
    assert (len(ticks.times), ticks.most_at_once) == (2, 1)


def test_a_tick_in_which_time_passes_is_followed_by_one_that_sees_it(
    manual: Ticker, clock: ManualClock, ticks: Ticks
) -> None:
    ticks.deed = Once(lambda: clock.advance(SECOND))
    manual.nudge()
    assert ticks.times == [clock.now_us() - SECOND_US, clock.now_us()]
    assert ticks.most_at_once == 1


def test_a_tick_that_fails_after_it_asked_for_another_gets_it(manual: Ticker, ticks: Ticks) -> None:
    def nudge_and_fail() -> None:
        manual.nudge()
        fail()

    ticks.deed = Once(nudge_and_fail)
    manual.nudge()
    assert len(ticks.times) == 2


def test_a_tick_may_close_its_ticker(manual: Ticker, clock: ManualClock, ticks: Ticks) -> None:
    ticks.deed = manual.close
    clock.advance(SECOND)
    clock.advance(SECOND)
    manual.nudge()
    assert len(ticks.times) == 1


def test_a_tick_that_asks_for_another_and_closes_is_the_last(manual: Ticker, ticks: Ticks) -> None:
    def ask_and_close() -> None:
        manual.nudge()
        manual.close()

    ticks.deed = ask_and_close
    manual.nudge()
    assert len(ticks.times) == 1


def test_a_closed_ticker_lets_go_of_its_clock(
    manual: Ticker, clock: ManualClock, ticks: Ticks
) -> None:
    manual.close()
    manual.close()
    manual.expect(clock.now_us())
    clock.advance(SECOND)
    assert ticks.times == []
    assert clock.listeners == 0


# -- on real time ----------------------------------------------------------------------------------


def test_on_real_time_there_is_no_thread_before_something_is_due(real: Ticker) -> None:
    real.expect(NEVER_US)
    assert threads() == []


def test_on_real_time_a_nudge_alone_starts_no_thread(real: Ticker, ticks: Ticks) -> None:
    real.nudge()
    assert ticks.threads == [threading.current_thread().name]
    assert threads() == []


def test_a_tick_on_real_time_runs_in_a_thread(real: Ticker, ticks: Ticks) -> None:
    due = now() + SOON_US
    real.expect(due)
    assert ticks.come()
    assert ticks.threads == ["twinbus-pairing"]
    assert ticks.times[0] >= due


def test_an_earlier_due_time_does_not_wait_for_a_later_one(real: Ticker, ticks: Ticks) -> None:
    real.expect(now() + 3600 * SECOND_US)
    real.expect(now() + SOON_US)
    assert ticks.come()


def test_a_later_due_time_does_not_postpone_an_earlier_one(real: Ticker, ticks: Ticks) -> None:
    real.expect(now() + 100 * SOON_US)
    real.expect(now() + 3600 * SECOND_US)
    assert ticks.come()


def test_a_tick_says_when_the_next_one_is_due(real: Ticker, ticks: Ticks) -> None:
    ticks.next_due = lambda now: now + SOON_US
    real.expect(now())
    assert ticks.come(5)
    assert set(ticks.threads) == {"twinbus-pairing"}


def test_a_nudge_wakes_a_thread_that_sleeps_for_long(real: Ticker, ticks: Ticks) -> None:
    real.expect(now() + 3600 * SECOND_US)
    real.nudge()
    assert ticks.come()
    assert ticks.threads == ["twinbus-pairing"]


def test_on_real_time_ticks_that_fail_do_not_end_the_thread(
    real: Ticker, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_RETRY_US", SOON_US)
    ticks.deed = fail
    real.expect(now())
    assert ticks.come(3)
    ticks.deed = lambda: None
    before = len(ticks.times)
    real.nudge()
    assert ticks.come(before + 1)
    assert len(threads()) == 1


def test_a_nudge_within_a_tick_of_the_thread_is_not_lost(real: Ticker, ticks: Ticks) -> None:
    ticks.deed = Once(real.nudge)
    real.expect(now())
    assert ticks.come(2)
    assert ticks.most_at_once == 1


def test_a_due_time_that_is_set_within_a_tick_is_not_lost(real: Ticker, ticks: Ticks) -> None:
    ticks.deed = Once(lambda: real.expect(now() + SOON_US))
    real.expect(now())
    assert ticks.come(2)


def test_however_many_nudge_there_is_one_tick_at_a_time(real: Ticker, ticks: Ticks) -> None:
    def nudge() -> None:
        for _ in range(200):
            real.nudge()
            real.expect(now())

    callers = [threading.Thread(target=nudge) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    before = len(ticks.times)
    real.nudge()
    assert ticks.come(before + 1)
    assert ticks.most_at_once == 1


def test_closing_waits_for_the_tick_under_way(real: Ticker, ticks: Ticks) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def last() -> None:
        begun.set()
        ended.append(may_end.wait(DEADLINE_S))

    ticks.deed = last
    real.expect(now())
    assert begun.wait(DEADLINE_S)
    closer = threading.Thread(target=real.close)
    closer.start()
    assert ended == []
    may_end.set()
    closer.join(DEADLINE_S)
    assert ended == [True]


def test_a_tick_of_the_thread_may_close_its_ticker(real: Ticker, ticks: Ticks) -> None:
    ticks.deed = real.close
    real.expect(now())
    assert ticks.come()
    for thread in threads():
        thread.join(DEADLINE_S)
    real.nudge()
    assert (len(ticks.times), threads()) == (1, [])


def test_closing_wakes_a_thread_that_sleeps_for_long(real: Ticker, ticks: Ticks) -> None:
    real.expect(now() + 3600 * SECOND_US)
    (thread,) = threads()
    real.close()
    assert not thread.is_alive()
    assert ticks.times == []
