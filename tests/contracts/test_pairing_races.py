"""A pairing whose entities and queues change under many threads."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pairing_trouble import DEADLINE_S, RealPair, on_real_time
from tests.contracts.pairing_words import AT_ONCE, MINUTE, ORDERS, Pair, backlog, message
from tests.inside import board_of
from twinbus import MessagingError
from twinbus.clock import Clock, ManualClock, SystemClock
from twinbus.errors import BacklogUnavailableError
from twinbus.limits import SECOND_US
from twinbus.pairing.board import Board
from twinbus.pairing.events import Announcer, Returned
from twinbus.pairing.health import HealthState, Timing
from twinbus.protocol.commands import Command
from twinbus.testing import Fault, FaultyNamespace

DELAY_S = 0.02  # what waits for a lock is let go on without
LATER_US = 3600 * SECOND_US


@contextmanager
def at_look(clock: Clock, nth: int, deed: Callable[[], object]) -> Iterator[None]:
    """Let another thread do something when the clock is looked at for the nth time."""
    looks, real = itertools.count(1), clock.now_us
    other = threading.Thread(target=deed)

    def now_us() -> int:
        if next(looks) == nth:
            other.start()
            other.join(DELAY_S)
        return real()

    clock.now_us = now_us  # type: ignore[method-assign]
    try:
        yield
    finally:
        clock.now_us = real  # type: ignore[method-assign]
        if other.ident is not None:
            other.join(DEADLINE_S)


# -- races with mark_path_healthy ------------------------------------------------------------------


def assert_pings_go_on(pair: Pair) -> None:
    """An outage from here on is seen, pinged and over like any other."""
    pair.heal()
    pair.pass_time(MINUTE)
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.HEALTHY
    pair.fail_over(ORDERS, "again")
    pair.heal()
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.HEALTHY
    assert pair.announced(Returned)[-1].by == "ping"


@pytest.mark.parametrize("is_back", [False, True], ids=["down", "back"])
@pytest.mark.parametrize("nth", range(1, 17))
def test_a_path_marked_at_any_moment_of_a_ping_ends_no_pings(
    local: Pair, nth: int, is_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    if is_back:
        local.heal()
    with at_look(local.clock, nth, lambda: local.pairing.mark_path_healthy(ORDERS)):
        local.pass_time(MINUTE)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert_pings_go_on(local)


class Silence:
    """Takes pings, and lets a test answer them."""

    def __init__(self, pair: Pair) -> None:
        self.futures: list[Future[Any]] = []
        self._faults, self._submit = pair.primary.faults, pair.primary.faults.submit
        self._faults.submit = self.submit  # type: ignore[assignment, method-assign]

    def submit(self, _: Command[Any]) -> "Future[Any]":
        self.futures.append(Future())
        return self.futures[-1]

    def end(self) -> None:
        self._faults.submit = self._submit  # type: ignore[method-assign]


@pytest.mark.parametrize("refusal", [None, MessagingError("still down")], ids=["passed", "failed"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_a_path_marked_while_the_answer_of_a_ping_is_taken_in_ends_no_pings(
    local: Pair, nth: int, refusal: MessagingError | None, caplog: pytest.LogCaptureFixture
) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    silence = Silence(local)
    local.pass_time(MINUTE)
    (answer,) = silence.futures
    with at_look(local.clock, nth, lambda: local.pairing.mark_path_healthy(ORDERS)):
        answer.set_exception(refusal) if refusal else answer.set_result(None)
    silence.end()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert_pings_go_on(local)


def test_pings_answers_failures_and_marks_of_many_threads_leave_the_board_in_order() -> None:
    clock = ManualClock()
    board = Board(Timing(0, 1), clock, Announcer())
    board.open_backlog({0: backlog(0)})
    down = MessagingError("down")

    def fail() -> None:
        board.failed(ORDERS, down)

    def ping() -> None:
        for due in board.due_pings(clock.now_us() + LATER_US, lambda _: 0):
            board.pinged(due, down)
            board.pinged(due, None)

    def mark() -> None:
        board.mark_healthy(ORDERS)
        board.succeeded(ORDERS)

    def repeat(deed: Callable[[], None]) -> None:
        for _ in range(300):
            deed()

    threads = [threading.Thread(target=repeat, args=[deed]) for deed in (fail, ping, mark) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mark()
    assert [status.state for status in board.statuses()] == [HealthState.HEALTHY]


# -- another thread pulls a queue ------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 13))
def test_a_last_queue_pulled_by_another_thread_at_any_moment_takes_the_send_or_refuses_it(
    local: Pair, nth: int
) -> None:
    local.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    local.fail_over(ORDERS, "first")
    elsewhere = MessagingError("another thread's failure")
    is_refused = False
    with at_look(local.clock, nth, lambda: board_of(local.pairing).pull(0, elsewhere)):
        try:
            local.send("late")
        except BacklogUnavailableError:
            is_refused = True
    assert local.diverted() == (["first"] if is_refused else ["first", "late"])


def test_many_threads_that_pull_the_last_queue_raise_nothing_but_messaging_errors(
    tmp_path: Path,
) -> None:
    odd: list[BaseException] = []

    def work(pair: RealPair) -> None:
        for number in range(30):
            try:
                pair.primary.create_message_sender(ORDERS).send(message(str(number)))
            except BacklogUnavailableError:
                board_of(pair.pairing).bring_back(SystemClock().now_us() + LATER_US)
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                odd.append(error)

    with on_real_time(tmp_path) as pair:
        pair.faults.inject(Fault.UNAVAILABLE, ORDERS)
        pair.primary.create_message_sender(ORDERS).send(message("first"))
        broken = FaultyNamespace(pair.secondary.courier.namespace)
        broken.inject(Fault.UNAVAILABLE)
        pair.secondary.courier.namespace = broken
        threads = [threading.Thread(target=work, args=[pair]) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert odd == []
