"""The memory of transfers: a set of numbers that stays small while they come in order."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.broker.queue.ranges import Lease
from twinbus.broker.sending.transfers import ANY_KEY, Transfers
from twinbus.errors import InvalidArgumentError
from twinbus.intervals import Intervals, pack, runs, unpack
from twinbus.limits import (
    KNOWN_GAPS,
    KNOWN_INTERVALS,
    KNOWN_SENDERS,
    KNOWN_SENDERS_IN_ALL,
    MAX_ORIGIN_CHARACTERS,
)
from twinbus.protocol.origins import origin_kind, sender_number, sender_source, sink_source

spans = st.tuples(st.integers(-30, 30), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1]))
EVERYTHING = np.arange(-50, 50)
LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def numbers_of(intervals: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in intervals for number in range(first, last + 1)}


@replayed
@given(st.lists(spans))
def test_intervals_hold_the_same_numbers_as_a_set(added: list[tuple[int, int]]) -> None:
    intervals = Intervals(added)
    expected = numbers_of(added)
    assert numbers_of(list(intervals)) == expected
    assert set(EVERYTHING[intervals.contains(EVERYTHING)].tolist()) == expected


@replayed
@given(st.lists(spans))
def test_intervals_are_in_order_with_gaps_between_them(added: list[tuple[int, int]]) -> None:
    found = list(Intervals(added))
    assert all(first <= last for first, last in found)
    assert all(end + 1 < start for (_, end), (start, _) in pairwise(found))
    assert len(Intervals(added)) == len(found)


@replayed
@given(st.sets(st.integers(-30, 30)))
def test_runs_are_the_shortest_way_to_say_a_set(numbers: set[int]) -> None:
    found = runs(np.array(sorted(numbers), np.int64))
    assert numbers_of(found) == numbers
    assert found == list(Intervals(found))


def test_numbers_that_come_in_order_stay_one_interval() -> None:
    intervals = Intervals()
    for first in range(0, 10_000, 10):
        intervals.add(first, first + 9)
    assert list(intervals) == [(0, 9_999)]


def test_numbers_that_come_twice_or_late_fill_the_gap() -> None:
    assert list(Intervals([(1, 3), (7, 9), (1, 3), (4, 6)])) == [(1, 9)]


def test_the_edges_of_64_bits_are_numbers_like_others() -> None:
    intervals = Intervals([(LARGEST, LARGEST), (SMALLEST, SMALLEST)])
    asked = np.array([SMALLEST, SMALLEST + 1, 0, LARGEST - 1, LARGEST])
    assert intervals.contains(asked).tolist() == [True, False, False, False, True]
    assert runs(np.array([SMALLEST, LARGEST])) == [(SMALLEST, SMALLEST), (LARGEST, LARGEST)]


@replayed
@given(st.lists(st.tuples(st.integers(SMALLEST, LARGEST), st.integers(SMALLEST, LARGEST))))
def test_packed_intervals_are_the_same_when_they_are_unpacked(pairs: list[tuple[int, int]]) -> None:
    assert unpack(pack(pairs)) == unpack(memoryview(pack(pairs))) == pairs
    lease = Lease("me", 7, pairs, LARGEST)
    assert Lease.of(lease.to_fact()) == lease


def test_origins_do_not_know_of_each_other() -> None:
    transfers = Transfers()
    transfers.take("one", [(1, 5)])
    assert transfers.taken("one", np.array([5, 6])).tolist() == [True, False]
    assert transfers.taken("other", np.array([5, 6])).tolist() == [False, False]


def test_a_forgotten_origin_may_hand_over_again() -> None:
    transfers = Transfers()
    transfers.take("one", [(1, 5)])
    transfers.forget("one")
    transfers.forget("one")
    assert not transfers.taken("one", np.array([1])).any()
    assert list(transfers.origins()) == []


@replayed
@given(st.lists(st.tuples(st.sampled_from("ab"), spans)))
def test_the_facts_of_origins_restore_them(
    taken: list[tuple[str, tuple[int, int]]],
) -> None:
    transfers, restored = Transfers(), Transfers()
    for origin, span in taken:
        transfers.take(origin, [span])
    for origin, owner, intervals in transfers.origins():
        restored.take(origin, intervals, owner)
    assert list(restored.origins()) == list(transfers.origins())


def test_a_sender_is_known_by_a_number_of_64_bits() -> None:
    assert sender_number(sender_source(2**64 - 1)) == 2**64 - 1
    for second in ("backlog/0", "sender/", "sender/1", "sender/zz", "Sender/0000000000000001"):
        assert sender_number(second) is None


def test_the_latest_senders_are_known() -> None:
    transfers = Transfers()
    for number in range(1, KNOWN_SENDERS + 1):
        transfers.take(sender_source(number), [(0, 9)])
    transfers.take(sender_source(1), [(10, 19)])  # a repeat
    transfers.take(sender_source(KNOWN_SENDERS + 1), [(0, 9)])
    asked = np.array([5])
    assert transfers.taken(sender_source(1), asked).all()
    assert not transfers.taken(sender_source(2), asked).any()
    assert len(list(transfers.origins())) == KNOWN_SENDERS


def test_of_a_sender_with_many_gaps_the_latest_numbers_are_known() -> None:
    transfers = Transfers()
    for number in range(0, 4 * KNOWN_GAPS, 2):
        transfers.take(sender_source(1), [(number, number)])
    [(_, _, found)] = transfers.origins()
    assert len(found) == KNOWN_GAPS
    assert found[-1] == (4 * KNOWN_GAPS - 2, 4 * KNOWN_GAPS - 2)


def test_a_backlog_queue_is_never_forgotten() -> None:
    transfers = Transfers()
    for number in range(0, 4 * KNOWN_GAPS, 2):
        transfers.take("contoso/x-servicebus-transfer/0", [(number, number)])
    for number in range(1, KNOWN_SENDERS + 10):
        transfers.take(sender_source(number), [(0, 9)])
    asked = np.arange(0, 4 * KNOWN_GAPS, 2)
    assert transfers.taken("contoso/x-servicebus-transfer/0", asked).all()


def test_a_key_cannot_make_the_broker_forget_the_senders_of_another() -> None:
    transfers = Transfers()
    for number in range(100):
        transfers.take(sender_source(number + 1), [(0, 9)], "victim")
    for number in range(2 * KNOWN_SENDERS):
        transfers.take(sender_source(2**32 + number), [(0, 9)], "stranger")
    asked = np.array([5])
    assert all(transfers.taken(sender_source(n + 1), asked).all() for n in range(100))
    assert len(list(transfers.origins())) == KNOWN_SENDERS + 100


def test_many_keys_together_have_a_bound_and_the_largest_gives_way() -> None:
    transfers = Transfers()
    transfers.take(sender_source(1), [(0, 9)], "victim")
    for key in range(KNOWN_SENDERS_IN_ALL // KNOWN_SENDERS + 1):
        for number in range(KNOWN_SENDERS):
            source = sender_source((key + 1) << 32 | number)
            transfers.take(source, [(0, 9)], f"stranger {key}")
    assert len(list(transfers.origins())) == KNOWN_SENDERS_IN_ALL
    assert transfers.taken(sender_source(1), np.array([5])).all()


def test_the_gaps_of_all_senders_of_a_key_have_a_bound() -> None:
    transfers = Transfers()
    gaps = [(number, number) for number in range(0, 2 * KNOWN_GAPS, 2)]
    for number in range(2 * KNOWN_INTERVALS // KNOWN_GAPS):
        transfers.take(sender_source(number + 1), gaps, "stranger")
    found = sum(len(intervals) for _, _, intervals in transfers.origins())
    assert found <= KNOWN_INTERVALS


def test_a_sender_belongs_to_the_key_that_used_it_first() -> None:
    transfers = Transfers()
    transfers.take(sender_source(1), [(0, 9)], "first")
    transfers.take(sender_source(1), [(10, 19)], "second")
    transfers.take(sink_source("of Spark"), [(0, 9)], ANY_KEY)
    assert transfers.owner(sender_source(1)) == "first"
    assert transfers.owner(sink_source("of Spark")) == ANY_KEY
    assert transfers.owner("a backlog queue") is None


@pytest.mark.parametrize(
    "source",
    [
        "",
        "sender/",
        "sender/1",
        "sender/-000000000000001",
        f"sender/{2**64:x}",
        "sender/000000000000000G",
        "half \ud800",
        "with \0",
        "x" * (MAX_ORIGIN_CHARACTERS + 1),
    ],
)
def test_a_name_that_is_no_origin_is_refused(source: str) -> None:
    with pytest.raises(InvalidArgumentError):
        origin_kind(source)
