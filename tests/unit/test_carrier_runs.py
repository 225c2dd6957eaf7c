"""The syphon sends the messages of each sender together, as far as their order allows."""

from collections.abc import Callable
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from twinbus.syphon.carrier import NO_TEXT, rows_by_sender

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
