"""A future that makes its lock late does all that a future of the standard library does."""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, as_completed, wait

import pytest

from twinbus.futures import RunningFuture

Finish = Callable[["Future[int]"], None]


def succeed(future: "Future[int]") -> None:
    future.set_result(7)


def fail(future: "Future[int]") -> None:
    future.set_exception(ValueError("seven"))


FINISHES = pytest.mark.parametrize("finish", [succeed, fail])


def outcome(future: "Future[int]") -> object:
    try:
        return future.result(10)
    except ValueError as error:
        return str(error)


@FINISHES
@pytest.mark.parametrize("was_looked_at", [False, True])
def test_an_outcome_is_there_for_everyone(finish: Finish, was_looked_at: bool) -> None:
    future: Future[int] = RunningFuture()
    if was_looked_at:
        assert future.running()
    assert not future.done()
    finish(future)
    assert future.done()
    assert not future.running()
    assert [outcome(future) for _ in range(2)] == [outcome(future)] * 2
    assert (future.exception() is None) is (finish is succeed)


@FINISHES
def test_it_is_finished_once(finish: Finish) -> None:
    for was_looked_at in (False, True):
        future: Future[int] = RunningFuture()
        if was_looked_at:
            assert future.running()
        succeed(future)
        with pytest.raises(InvalidStateError):
            finish(future)
        assert future.result() == 7


def test_it_cannot_be_cancelled() -> None:
    future: Future[int] = RunningFuture()
    assert not future.cancel()
    assert not future.cancelled()
    succeed(future)
    assert not future.cancel()


def test_a_wait_ends_in_time() -> None:
    future: Future[int] = RunningFuture()
    with pytest.raises(TimeoutError):
        future.result(0)


@FINISHES
@pytest.mark.parametrize("is_late", [False, True])
def test_a_callback_is_called_once(finish: Finish, is_late: bool) -> None:
    future: Future[int] = RunningFuture()
    called: list[Future[int]] = []
    if is_late:
        finish(future)
    future.add_done_callback(called.append)
    if not is_late:
        finish(future)
    assert called == [future]


@FINISHES
def test_many_can_be_waited_for(finish: Finish) -> None:
    futures: list[Future[int]] = [RunningFuture() for _ in range(4)]
    finish(futures[0])
    assert wait(futures, 10, FIRST_COMPLETED).done == {futures[0]}
    rest = threading.Thread(target=lambda: list(map(finish, futures[1:])))
    rest.start()
    assert set(as_completed(futures, 10)) == set(futures)
    rest.join()


@FINISHES
def test_whoever_begins_to_wait_at_the_same_time_is_woken(finish: Finish) -> None:
    for _ in range(2_000):
        future: Future[int] = RunningFuture()
        found: list[object] = []
        start = threading.Barrier(2)

        def look(future: "Future[int]" = future, start: threading.Barrier = start) -> None:
            start.wait()
            future.add_done_callback(found.append)  # noqa: B023 - of this round
            found.append(outcome(future))  # noqa: B023

        waiter = threading.Thread(target=look)
        waiter.start()
        start.wait()
        finish(future)
        waiter.join(10)
        assert not waiter.is_alive()
        assert len(found) == 2


def test_it_has_no_attributes_that_a_future_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = RunningFuture().colour
