"""Offsets of a stream: Spark stores them as JSON, and a repeated batch is divided alike."""

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.datasource.offsets import Pairs, StreamOffset, count_of, shares

LENGTHS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=30)


def intervals_of(lengths: list[tuple[int, int]]) -> Pairs:
    """Return intervals from gaps and lengths."""
    pairs, at = [], 0
    for gap, length in lengths:
        pairs.append((at + gap, at + gap + length - 1))
        at += gap + length
    return tuple(pairs)


def numbers_in(intervals: Pairs) -> list[int]:
    return list(chain.from_iterable(range(first, last + 1) for first, last in intervals))


@replayed
@given(lengths=LENGTHS)
def test_an_offset_comes_back_equal_from_the_checkpoint(lengths: list[tuple[int, int]]) -> None:
    offset = StreamOffset(
        batch=7,
        owner="spark",
        path="orders",
        origin="orders#1.a",
        epoch=9,
        partitions=3,
        intervals=intervals_of(lengths),
    )
    assert StreamOffset.of(json.loads(json.dumps(offset.to_json()))) == offset


def test_the_offset_before_the_first_batch_has_no_messages() -> None:
    offset = StreamOffset(batch=0, owner="spark")
    assert StreamOffset.of(offset.to_json()) == offset
    assert offset.to_json() == {"batch": 0, "owner": "spark"}


@replayed
@given(lengths=LENGTHS, parts=st.integers(1, 40))
def test_tasks_share_all_messages_evenly_and_in_order(
    lengths: list[tuple[int, int]], parts: int
) -> None:
    intervals = intervals_of(lengths)
    divided = shares(intervals, parts)
    assert [n for part in divided for n in numbers_in(part)] == numbers_in(intervals)
    sizes = [count_of(part) for part in divided]
    assert len(divided) == min(parts, count_of(intervals))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [1, 10_000])
def test_an_offset_of_the_most_intervals_is_small(count: int) -> None:
    intervals = tuple((10**9 + 2 * n, 10**9 + 2 * n) for n in range(count))
    offset = StreamOffset(batch=1, owner="spark", path="q", origin="q#1", intervals=intervals)
    assert len(json.dumps(offset.to_json())) < 200 + 6 * count
