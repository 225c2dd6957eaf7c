"""Which backlog queues a syphon visits that receives under lock, and when."""

import pytest

from twinbus.clock import to_us
from twinbus.limits import DEFAULT_LOCK_DURATION, MAX_VISIT_PAUSE, SECOND_US
from twinbus.syphon.carrier import INTERRUPTED, Carried, Failure, Range
from twinbus.syphon.destinations import Destinations
from twinbus.syphon.visits import Visit, Visits

DOWN = Failure("Communication", "down")
LOCK_US = to_us(DEFAULT_LOCK_DURATION)


def visits_of(*queues: str) -> Visits:
    return Visits(queues, Destinations(SECOND_US, 120 * SECOND_US), SECOND_US)


def outcome(queue: str, **facts: object) -> Carried:
    return Carried(queue, Range(0, 0, 0, ""), is_settled=True, **facts)  # type: ignore[arg-type]


def visit(visits: Visits, now: int = 0) -> list[Visit]:
    return visits.plan(visits.ready_queues, now)


def test_an_idle_queue_is_visited_when_a_message_arrived() -> None:
    visits = visits_of("a", "b")
    assert visits.idle == ["a", "b"]
    visits.ready("b")
    assert visit(visits) == [Visit("b", ())]
    assert visits.idle == ["a"]
    assert visit(visits) == []  # it is being visited


def test_a_queue_that_is_empty_is_idle_again() -> None:
    visits = visits_of("a")
    visits.ready("a")
    visit(visits)
    visits.absorb([outcome("a", moved={"orders": (3, 9)}, is_drained=True)], 0)
    assert visits.idle == ["a"]


def test_a_queue_with_more_is_visited_by_the_next_batch() -> None:
    visits = visits_of("a")
    visits.ready("a")
    visit(visits)
    visits.absorb([outcome("a", moved={"orders": (3, 9)})], 0)
    assert visits.ready_queues == ["a"]


def test_a_queue_of_a_failing_destination_is_visited_again_when_that_is_due() -> None:
    visits = visits_of("a")
    visits.ready("a")
    visit(visits)
    visits.absorb([outcome("a", kept={"orders": 5}, failures={"orders": DOWN}, is_drained=True)], 0)
    visits.wake(SECOND_US - 1)
    assert visits.ready_queues == []
    assert visits.next_due() == SECOND_US
    visits.wake(SECOND_US)
    assert visit(visits, SECOND_US) == [Visit("a", ())]  # the destination is on trial here


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_task_that_finds_nothing_does_not_hide_what_another_task_of_the_queue_keeps(
    is_reversed: bool,
) -> None:
    visits = visits_of("a")
    visits.ready("a")
    visit(visits)
    empty = outcome("a", is_drained=True)
    stuck = outcome("a", kept={"orders": 5}, failures={"orders": DOWN}, is_drained=True)
    visits.absorb([stuck, empty] if is_reversed else [empty, stuck], 0)
    assert visits.idle == []
    assert visits.kept() == {"orders": 5}
    assert visits.next_due() == SECOND_US


def test_a_queue_is_idle_when_all_its_tasks_found_it_empty() -> None:
    visits = visits_of("a")
    visits.see("a", 9)
    visits.ready("a")
    visit(visits)
    moved = outcome("a", moved={"orders": (5, 9)}, is_drained=True, oldest_us=7)
    more = outcome("a", moved={"orders": (3, 9)}, oldest_us=5)
    visits.absorb([moved, more], 0)
    assert visits.ready_queues == ["a"]
    assert (visits.waiting, visits.oldest_us) == (1, 5)
    visit(visits)
    visits.absorb([outcome("a", is_drained=True)] * 2, 0)
    assert visits.idle == ["a"]


def test_visits_in_vain_become_rarer_up_to_a_bound() -> None:
    visits = visits_of("a")
    now, pauses = 0, []
    for _ in range(8):
        visits.ready("a")
        visits.wake(now)
        visit(visits, now)
        visits.absorb([outcome("a", unread=DOWN)], now)
        due = visits.next_due()
        assert due is not None
        pauses.append((due - now) // SECOND_US)
        now = due
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert to_us(MAX_VISIT_PAUSE) == 30 * SECOND_US


def test_one_queue_tries_a_destination_for_all() -> None:
    visits = visits_of("a", "b")
    for queue in ("a", "b"):
        visits.ready(queue)
    visit(visits)
    kept = {"kept": {"orders": 1}, "failures": {"orders": DOWN}, "is_drained": True}
    visits.absorb([outcome("a", **kept), outcome("b", kept={"orders": 1}, is_drained=True)], 0)
    visits.wake(4 * SECOND_US)
    assert visit(visits, 4 * SECOND_US) == [Visit("a", ()), Visit("b", ("orders",))]


def test_a_queue_whose_visit_was_killed_is_left_alone_until_its_locks_have_expired() -> None:
    visits = visits_of("a")
    visits.ready("a")
    visit(visits)
    visits.absorb([outcome("a", unread=INTERRUPTED)], 0)
    visits.interrupt("a", LOCK_US)
    visits.wake(LOCK_US - 1)
    assert visits.ready_queues == []
    visits.wake(LOCK_US)
    assert visits.ready_queues == ["a"]


def test_destinations_that_begin_and_cease_to_fail_are_named_once() -> None:
    visits = visits_of("a")
    visits.ready("a")
    visit(visits)
    failing = outcome("a", kept={"orders": 1}, failures={"orders": DOWN})
    assert [
        new_trouble.destination for new_trouble in visits.absorb([failing], 0).new_troubles
    ] == ["orders"]
    assert visits.absorb([failing], 1).new_troubles == []
    flowing = outcome("a", moved={"orders": (1, 1)}, is_drained=True)
    assert visits.absorb([flowing], 2).ended_troubles == ["orders"]


def test_waiting_messages_are_those_seen_and_not_moved() -> None:
    visits = visits_of("a", "b")
    visits.see("a", 10)
    visits.see("b", 5)
    for queue in ("a", "b"):
        visits.ready(queue)
    visit(visits)
    visits.absorb([outcome("a", moved={"orders": (4, 4)}), outcome("b", is_drained=True)], 0)
    assert visits.waiting == 6
