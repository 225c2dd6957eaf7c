"""The rotation of backlog queues: who takes which, who is out, and when it comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed_at_length
from twinbus.limits import NEVER_US
from twinbus.pairing.rotation import Choice, Rotation

COOL_DOWN = 60
NOW = 1_000
ALMOST_ONE = 1 - 2**-53


def rotation(*queues: int) -> Rotation:
    return Rotation(queues or (0, 1, 2), COOL_DOWN)


def chosen(queues: Rotation, current: int | None, chance: float) -> int | None:
    choice = queues.choose(current, chance)
    return choice.queue if choice else None


def test_a_client_without_a_queue_gets_one_by_chance() -> None:
    found = {chosen(rotation(), None, chance) for chance in (0.0, 0.3, 0.34, 0.6, 0.7, ALMOST_ONE)}
    assert found == {0, 1, 2}


@pytest.mark.parametrize("chance", [0.0, 0.5, ALMOST_ONE])
def test_a_client_stays_with_its_queue_whatever_chance_says(chance: float) -> None:
    assert chosen(rotation(), 1, chance) == 1


@pytest.mark.parametrize("chance", [0.0, 0.5, ALMOST_ONE])
def test_a_client_whose_queue_was_pulled_picks_another(chance: float) -> None:
    queues = rotation()
    queues.pull(1, NOW)
    assert chosen(queues, 1, chance) in (0, 2)


def test_a_pulled_queue_is_out_for_everyone() -> None:
    queues = rotation()
    queues.pull(1, NOW)
    assert {chosen(queues, None, step / 100) for step in range(100)} == {0, 2}
    assert [queues.is_pulled(queue) for queue in (0, 1, 2)] == [False, True, False]


def test_a_queue_that_was_tried_is_not_chosen_again() -> None:
    assert rotation().choose(1, 0.0, {1}) == Choice(0, 2)
    assert rotation().choose(1, 0.0, {0, 1, 2}) is None


def test_when_none_is_left_there_is_none_to_choose() -> None:
    queues = rotation(0, 4)
    queues.pull(0, NOW)
    queues.pull(4, NOW)
    assert chosen(queues, 0, 0.5) is None
    assert chosen(queues, None, 0.5) is None


def test_pulling_says_whether_the_queue_was_in_rotation() -> None:
    queues = rotation()
    assert queues.pull(1, NOW)
    assert not queues.pull(1, NOW)


def test_a_queue_returns_after_its_cool_down() -> None:
    queues = rotation()
    queues.pull(1, NOW)
    assert queues.bring_back(NOW + COOL_DOWN - 1) == []
    assert queues.is_pulled(1)
    assert queues.bring_back(NOW + COOL_DOWN) == [1]
    assert not queues.is_pulled(1)
    assert queues.bring_back(NOW + COOL_DOWN) == []


def test_each_queue_has_its_own_cool_down() -> None:
    queues = rotation()
    queues.pull(0, NOW)
    queues.pull(2, NOW + 10)
    assert queues.pulled() == {0: NOW + 60, 2: NOW + 70}
    assert queues.bring_back(NOW + 60) == [0]
    assert queues.pulled() == {2: NOW + 70}


def test_a_client_that_found_another_queue_stays_there_when_its_first_returns() -> None:
    queues = rotation()
    queues.pull(1, NOW)
    second = chosen(queues, 1, 0.9)
    queues.bring_back(NOW + COOL_DOWN)
    assert chosen(queues, second, 0.5) == second


def test_the_next_that_is_due_is_the_first_to_come_back() -> None:
    queues = rotation()
    assert queues.next_due(NEVER_US) == NEVER_US
    queues.pull(2, NOW + 5)
    queues.pull(1, NOW)
    assert queues.next_due(NEVER_US) == NOW + COOL_DOWN


def test_a_clock_set_back_lengthens_no_cool_down_beyond_one_from_then() -> None:
    queues = rotation()
    queues.pull(1, NOW)
    assert queues.bring_back(NOW - 900) == []
    assert queues.bring_back(NOW - 900 + COOL_DOWN) == [1]


@replayed_at_length
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=20),
    st.floats(0, ALMOST_ONE),
)
def test_the_rotation_does_as_its_model(
    count: int, pulls: list[tuple[int, int]], chance: float
) -> None:
    queues, back_at, now = Rotation(range(count), COOL_DOWN), dict[int, int](), NOW
    for queue, passed in pulls:
        now += passed
        came_back = {key for key, at in back_at.items() if at <= now}
        assert set(queues.bring_back(now)) == came_back
        back_at = {key: at for key, at in back_at.items() if key not in came_back}
        if queue < count:
            assert queues.pull(queue, now) == (queue not in back_at)
            back_at[queue] = now + COOL_DOWN
        usable = set(range(count)) - set(back_at)
        choice = queues.choose(None, chance)
        assert (choice.queue in usable and choice.usable == len(usable)) if choice else not usable
        assert all(chosen(queues, item, chance) == item for item in usable)
