"""The syphon sends the messages of each sender together, as far as their order allows."""

from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.errors import MessagingError, QuotaExceededError, TransientError
from twinbus.limits import RUNS_AT_ONCE
from twinbus.message import BrokeredMessage, to_batch
from twinbus.namespace.contract import Namespace
from twinbus.pairing.backlog import Restored
from twinbus.protocol.commands import Command
from twinbus.syphon.carrier import (
    NO_TEXT,
    Carried,
    Carrier,
    Range,
    Run,
    _rounds,
    _with_small_first,
    rows_by_code,
    rows_by_sender,
)

Key = Callable[[int], int]
_ROWS = st.lists(st.tuples(st.integers(NO_TEXT, 3), st.integers(NO_TEXT, 3)), max_size=40)


def grouped(rows: list[tuple[int, int]]) -> list[list[int]]:
    return rows_by_sender([sender for sender, _ in rows], [session for _, session in rows])


@given(_ROWS)
def test_every_row_is_in_one_group_and_a_group_has_one_sender(rows: list[tuple[int, int]]) -> None:
    groups = grouped(rows)
    assert sorted(chain(*groups)) == list(range(len(rows)))
    assert all(len({rows[row][0] for row in group}) == 1 for group in groups)


@given(_ROWS)
def test_senders_and_sessions_keep_their_order(rows: list[tuple[int, int]]) -> None:
    order = list(chain(*grouped(rows)))
    for column in (0, 1):
        for key in {row[column] for row in rows} - {NO_TEXT}:
            own = [row for row in order if rows[row][column] == key]
            assert own == sorted(own)


@given(_ROWS)
def test_no_row_passes_a_row_without_a_sender(rows: list[tuple[int, int]]) -> None:
    order = list(chain(*grouped(rows)))
    for place, row in enumerate(order):
        if rows[row][0] == NO_TEXT:
            assert sorted(order[:place]) == list(range(row))


def test_interleaved_senders_without_sessions_need_one_send_each() -> None:
    assert len(grouped([(row % 4, NO_TEXT) for row in range(500)])) == 4


def test_a_session_of_two_senders_needs_a_send_for_each_change_of_sender() -> None:
    assert grouped([(0, 0), (1, 0), (0, NO_TEXT), (0, 0)]) == [[0, 2], [1], [3]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_senders_without_sessions_are_grouped_alike_by_either_function(senders: list[int]) -> None:
    codes = list(dict.fromkeys(senders))  # as Arrow numbers them: by their first row
    numbered = [codes.index(sender) for sender in senders]
    assert rows_by_code(numbered) == rows_by_sender(numbered, [NO_TEXT] * len(senders))


def run(sender: str | None, session: str | None = None, *, count: int = 1) -> Run:
    batch = to_batch([BrokeredMessage(b"", session_id=session)] * count)
    return Run(batch, np.arange(count), sender, pa.nulls(count, pa.int64()))


def test_runs_of_different_senders_are_sent_at_the_same_time() -> None:
    runs = [run("a"), run("b"), run("c")]
    assert _rounds(runs) == [runs]


def test_a_run_waits_for_an_earlier_one_that_it_must_not_overtake() -> None:
    same = [run("a"), run("b"), run("a")]
    assert _rounds(same) == [same[:2], same[2:]]
    unknown = [run("a"), run(None), run("b"), run("c")]
    assert _rounds(unknown) == [unknown[:1], unknown[1:2], unknown[2:]]
    sessions = [run("a"), run("b", "s"), run("c", "s"), run("d")]
    assert _rounds(sessions) == [[each] for each in sessions]


def test_a_destination_gets_a_bounded_number_of_sends_at_the_same_time() -> None:
    runs = [run(f"sender {number}") for number in range(2 * RUNS_AT_ONCE + 1)]
    assert [len(sent) for sent in _rounds(runs)] == [RUNS_AT_ONCE, RUNS_AT_ONCE, 1]


def test_a_trial_begins_with_a_few_messages_of_one_sender() -> None:
    first, second, later = run("a", count=5), run("b", count=5), run("a", count=5)
    for size, expected in ((2, [[2], [3, 5], [5]]), (5, [[5], [5], [5]]), (9, [[5], [5], [5]])):
        rounds = _with_small_first([[first, second], [later]], size)
        assert [[len(each) for each in sent] for sent in rounds] == expected
    alone = _with_small_first([[first]], 2)
    assert [[each.numbers.tolist() for each in sent] for sent in alone] == [[[0, 1]], [[2, 3, 4]]]
    assert len(_with_small_first([[first]], 5)) == 1


class _RefusingPrimary:
    """Refuses every send with the same error, and counts them."""

    def __init__(self, error: MessagingError) -> None:
        self._error = error
        self.sends = 0

    def submit(self, _: Command[Any]) -> "Future[Any]":
        self.sends += 1
        reply: Future[Any] = Future()
        reply.set_exception(self._error)
        return reply


@pytest.mark.parametrize("error", [QuotaExceededError("full"), TransientError("down")])
def test_a_destination_that_fails_costs_further_senders_one_send_each(
    error: MessagingError,
) -> None:
    def sends_of(senders: int) -> tuple[int, dict[str, int]]:
        count = 64 * senders
        found = Restored(
            to_batch([BrokeredMessage(b"")] * count),
            pa.array(["orders"] * count),
            pa.array([f"sender {row % senders}" for row in range(count)]),
            pa.array(range(count), pa.int64()),
            {},
        )
        primary = _RefusingPrimary(error)
        carried = Carried("backlog", Range(1, 0, count, "origin"))
        carrier = Carrier(cast("Namespace", primary), cast("Namespace", None))
        carrier.deliver(found, np.arange(count), carried, set())
        return primary.sends, carried.kept

    alone, _ = sends_of(1)
    assert sends_of(RUNS_AT_ONCE) == (alone + RUNS_AT_ONCE - 1, {"orders": 64 * RUNS_AT_ONCE})
