"""The syphon's book: which ranges a batch carries, on paper."""

import json
from datetime import UTC, datetime

from twinbus.limits import CROWDED_RANGES, MAX_LEASED_RANGES, SECOND_US
from twinbus.protocol.commands import RangeLease
from twinbus.syphon.book import Book, Task
from twinbus.syphon.carrier import OVERTAKING, Carried, Failure, Range
from twinbus.syphon.destinations import Destinations

DOWN = Failure("Communication", "it is down")
BUSY = Failure("ServerBusy", "wait")
STALE = Failure("StaleEpoch", "over")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lease(epoch: int, count: int = 10, behind: int = 0) -> RangeLease:
    first = epoch * 100
    last = first + count - 1
    return RangeLease("me", epoch, first, last, count, count, NOW, "q", NOW, behind)


def range_of(epoch: int, count: int = 10) -> Range:
    return Range(epoch, epoch * 100, epoch * 100 + count - 1, "q")


def book_of(*queues: str, retry_s: int = 1) -> Book:
    destinations = Destinations(retry_s * SECOND_US, 120 * SECOND_US)
    return Book(queues, destinations, retry_s * SECOND_US, 60 * SECOND_US)


def grant(book: Book, queue: str, *epochs: int) -> None:
    for epoch in epochs:
        book.grant(queue, lease(epoch), 0)


def kept(queue: str, epoch: int, destination: str, failure: Failure | None = None) -> Carried:
    carried = Carried(queue, range_of(epoch), kept={destination: 10})
    if failure is not None:
        carried.failures[destination] = failure
    return carried


def epochs(tasks: list[Task]) -> list[list[int]]:
    return [[item.epoch for item in task.ranges] for task in tasks]


def test_each_queue_with_something_at_hand_is_a_task() -> None:
    book = book_of("a", "b", "c")
    grant(book, "a", 1)
    grant(book, "c", 2)
    assert [(task.queue, task.skipped) for task in book.tasks(0)] == [("a", ()), ("c", ())]


def test_a_range_that_is_home_is_forgotten() -> None:
    book = book_of("a")
    grant(book, "a", 1)
    book.absorb([Carried("a", range_of(1), moved={"orders": (10, 99)})], 0)
    assert book.tasks(0) == []
    assert book.waiting == 0


def test_behind_a_destination_that_fails_the_queue_goes_on() -> None:
    book = book_of("a")
    grant(book, "a", 1)
    book.absorb([kept("a", 1, "Orders", DOWN)], 0)
    grant(book, "a", 2)
    [task] = book.tasks(0)
    assert (epochs([task]), task.skipped) == ([[2]], ("orders",))


def test_a_destination_is_tried_again_in_its_first_range_by_one_queue() -> None:
    book = book_of("a", "b")
    grant(book, "a", 1, 2)
    grant(book, "b", 3)
    late = [kept("a", 1, "orders", DOWN), kept("a", 2, "orders"), kept("b", 3, "orders")]
    book.absorb(late, 0)
    assert book.next_due(0) == SECOND_US
    assert book.tasks(SECOND_US - 1) == []
    [task] = book.tasks(SECOND_US)
    assert (task.queue, epochs([task]), task.on_trial) == ("a", [[1]], {"orders": (1, 1)})


def test_when_it_flows_again_all_go() -> None:
    book = book_of("a", "b")
    grant(book, "a", 1, 2)
    grant(book, "b", 3)
    late = [kept("a", 1, "orders", DOWN), kept("a", 2, "orders"), kept("b", 3, "orders")]
    book.absorb(late, 0)
    absorbed = book.absorb([Carried("a", range_of(1), moved={"orders": (10, 99)})], SECOND_US)
    assert absorbed.ended_troubles == ["orders"]
    assert epochs(book.tasks(SECOND_US)) == [[2], [3]]


def test_messages_that_could_not_be_read_are_not_overtaken() -> None:
    book = book_of("a")
    grant(book, "a", 1, 2)
    book.absorb([Carried("a", range_of(1), unread=DOWN), kept("a", 2, "x")], 0)
    assert book.tasks(0) == []
    assert epochs(book.tasks(SECOND_US)) == [[1, 2]]


def test_a_destination_is_not_tried_behind_a_range_that_may_have_its_messages() -> None:
    book = book_of("a")
    grant(book, "a", 1, 2)
    not_settled = Carried("a", range_of(1), kept={"orders": 10}, unread=DOWN)
    book.absorb([not_settled, kept("a", 2, "orders", DOWN)], 0)
    grant(book, "a", 3)
    [task] = book.tasks(SECOND_US)
    assert (epochs([task]), task.on_trial) == ([[1, 3]], {"orders": (1, 1)})


def test_ranges_behind_a_lost_lease_are_released() -> None:
    book = book_of("a")
    grant(book, "a", 1, 2, 3)
    lost = [Carried("a", range_of(2), unread=STALE), Carried("a", range_of(3), unread=OVERTAKING)]
    assert book.absorb(lost, 0).surplus == [("a", 3)]
    assert book.epochs("a") == [1]


def test_with_a_rival_about_only_a_share_is_kept() -> None:
    book = book_of("a", "b", "c", "d", "e")
    for epoch, queue in enumerate(book.queues):
        grant(book, queue, epoch)
    book.meet("another", 0)
    assert book.give_up_surplus(0) == [("e", 4), ("a", 0)]
    assert [task.queue for task in book.tasks(0)] == ["b", "c", "d"]


def test_a_rival_not_seen_for_long_is_forgotten() -> None:
    book = book_of("a", "b")
    grant(book, "a", 1)
    grant(book, "b", 2)
    book.meet("another", 0)
    assert book.give_up_surplus(61 * SECOND_US) == []


def test_queues_with_messages_that_wait_are_not_given_away() -> None:
    book = book_of("a", "b")
    grant(book, "a", 1)
    grant(book, "b", 2)
    book.absorb([kept("b", 2, "orders", DOWN)], 0)
    book.meet("another", 0)
    assert book.give_up_surplus(0) == [("a", 1)]


def test_a_queue_takes_no_more_ranges_than_may_be_leased() -> None:
    book = book_of("a")
    grant(book, "a", *range(MAX_LEASED_RANGES))
    assert not book.has_room("a")


def test_split_each_range_is_a_task() -> None:
    book = book_of("a")
    grant(book, "a", 1, 2)
    assert epochs(book.tasks(0, split=True)) == [[1], [2]]


def test_fresh_only_nothing_is_tried_twice() -> None:
    book = book_of("a")
    grant(book, "a", 1)
    book.absorb([kept("a", 1, "orders", DOWN)], 0)
    grant(book, "a", 2)
    assert epochs(book.tasks(99 * SECOND_US, fresh_only=True)) == [[2]]


def test_fresh_only_nothing_overtakes_what_stays_in_the_queue() -> None:
    book = book_of("a", "b")
    grant(book, "a", 1)
    grant(book, "b", 2)
    flowing_in_b = Carried("b", range_of(2), moved={"orders": (10, 99)})
    book.absorb([kept("a", 1, "orders", DOWN), flowing_in_b], 0)
    grant(book, "a", 3)
    [task] = book.tasks(SECOND_US, fresh_only=True)
    assert (epochs([task]), task.skipped) == ([[3]], ("orders",))


def test_fresh_only_nothing_overtakes_a_range_that_could_not_be_read() -> None:
    book = book_of("a")
    grant(book, "a", 1)
    book.absorb([Carried("a", range_of(1), unread=DOWN)], 0)
    grant(book, "a", 2)
    assert book.tasks(99 * SECOND_US, fresh_only=True) == []


def test_pauses_grow_to_sixteen_times_the_interval() -> None:
    destinations = Destinations(SECOND_US, 120 * SECOND_US)
    pauses = [destinations.failed("orders", DOWN, 0).due // SECOND_US for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 16, 16]


def test_pauses_are_never_longer_than_two_minutes_unless_asked_for() -> None:
    longest = Destinations(20 * SECOND_US, 120 * SECOND_US)
    assert [longest.failed("o", DOWN, 0).due // SECOND_US for _ in range(4)] == [20, 40, 80, 120]


def test_a_busy_destination_is_left_alone_for_ten_seconds() -> None:
    trouble = Destinations(SECOND_US, 120 * SECOND_US).failed("orders", BUSY, 5 * SECOND_US)
    assert trouble.due == 15 * SECOND_US


def test_the_oldest_message_and_what_waits_are_known() -> None:
    book = book_of("a", "b")
    book.grant("a", lease(1, behind=30), 700)
    book.grant("b", lease(2), 500)
    assert (book.waiting, book.oldest_us) == (50, 500)


def test_many_small_ranges_that_wait_become_one() -> None:
    book = book_of("a")
    for epoch in range(CROWDED_RANGES):
        grant(book, "a", epoch)
        book.absorb([kept("a", epoch, "orders", DOWN)], 0)
    [(queue, ranges)] = book.crowded()
    assert (queue, len(ranges)) == ("a", CROWDED_RANGES)
    book.merge(queue, ranges, lease(99, count=CROWDED_RANGES * 10))
    assert (book.epochs("a"), book.kept()["orders"]) == ([99], CROWDED_RANGES * 10)
    assert book.crowded() == []


def test_a_task_reaches_its_worker_with_the_duration_of_its_locks() -> None:
    task = Task("q", (Range.under_lock("q#created.1", 5_000_000),), ("orders",))
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert task.ranges[0].is_locked
