"""Duplicate detection: an id is new once within its window."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.broker.entities.duplicates import DuplicateHistory

WINDOW = 100
ids = st.sampled_from(["a", "b", "c", "d", None])


def fresh(history: DuplicateHistory, now: int, *message_ids: str | None) -> list[bool]:
    return history.fresh(message_ids, now)


def test_an_id_is_new_the_first_time_only() -> None:
    history = DuplicateHistory(WINDOW)
    assert fresh(history, 0, "a", "b") == [True, True]
    assert fresh(history, 1, "b", "c") == [False, True]


def test_an_id_repeated_within_one_batch_is_new_once() -> None:
    assert fresh(DuplicateHistory(WINDOW), 0, "a", "a", "b", "a") == [True, False, True, False]


def test_messages_without_an_id_are_always_new() -> None:
    history = DuplicateHistory(WINDOW)
    assert fresh(history, 0, None, None) == [True, True]
    assert len(history) == 0


def test_an_id_is_new_again_when_its_window_is_over() -> None:
    history = DuplicateHistory(WINDOW)
    fresh(history, 0, "a")
    assert fresh(history, WINDOW - 1, "a") == [False]
    assert fresh(history, WINDOW, "a") == [True]


def test_a_duplicate_does_not_make_the_window_longer() -> None:
    history = DuplicateHistory(WINDOW)
    fresh(history, 0, "a")
    fresh(history, WINDOW - 1, "a")
    assert fresh(history, WINDOW, "a") == [True]


def test_a_message_id_that_has_left_the_window_takes_no_space() -> None:
    history = DuplicateHistory(WINDOW)
    for now in range(10 * WINDOW):
        fresh(history, now, str(now))
    assert len(history) == WINDOW


def test_an_id_whose_message_was_refused_is_new_again() -> None:
    history = DuplicateHistory(WINDOW)
    fresh(history, 0, "a", "b")
    history.withdraw(["a", "never there"])
    assert fresh(history, 1, "a", "b") == [True, False]


def test_ids_are_found_by_the_time_they_were_first_seen() -> None:
    history = DuplicateHistory(WINDOW)
    for now, message_id in enumerate("abcd"):
        fresh(history, now, message_id)
    assert list(history.within(1, 2)) == [("b", 1), ("c", 2)]


def test_ids_read_from_the_log_are_remembered_until_their_window_is_over() -> None:
    history = DuplicateHistory(WINDOW)
    history.load({"late": 9, "early": 5})
    assert fresh(history, 10, "early", "late") == [False, False]
    assert fresh(history, 5 + WINDOW, "early", "late") == [True, False]
    assert fresh(history, 9 + WINDOW, "early", "late") == [False, True]


@replayed
@given(st.lists(st.tuples(st.integers(0, WINDOW), st.lists(ids, max_size=4))))
def test_the_history_agrees_with_a_plain_dict(sends: list[tuple[int, list[str | None]]]) -> None:
    history = DuplicateHistory(WINDOW)
    seen: dict[str, int] = {}
    now = 0
    for pause, batch in sends:
        now += pause
        expected = []
        for message_id in batch:
            new = message_id is None or seen.get(message_id, -WINDOW) <= now - WINDOW
            expected.append(new)
            if new and message_id is not None:
                seen[message_id] = now
        assert fresh(history, now, *batch) == expected
