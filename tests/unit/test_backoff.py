"""Back-off: pauses double up to a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.backoff import Backoff

BACKOFF = Backoff(first_us=100, longest_us=1000)
backoffs = st.tuples(st.integers(1, 10**9), st.integers(0, 10**9)).map(
    lambda drawn: Backoff(drawn[0], drawn[0] + drawn[1])
)


@pytest.mark.parametrize(
    ("failures", "pause_us"), [(0, 0), (1, 100), (2, 200), (4, 800), (5, 1000), (10**9, 1000)]
)
def test_pauses_double_up_to_the_longest(failures: int, pause_us: int) -> None:
    assert BACKOFF.pause_us(failures) == pause_us


@replayed
@given(backoffs, st.integers(0, 80))
def test_counting_failures_and_keeping_the_pause_come_to_the_same(
    backoff: Backoff, failures: int
) -> None:
    pause_us = 0
    for _ in range(failures):
        pause_us = backoff.longer_us(pause_us)
    assert backoff.pause_us(failures) == pause_us


@replayed
@given(backoffs, st.integers(1, 80), st.floats(0, 1))
def test_chance_takes_at_most_half_of_a_pause(
    backoff: Backoff, failures: int, chance: float
) -> None:
    pause_us = backoff.pause_us(failures)
    assert pause_us // 2 <= backoff.jittered_us(failures, chance) <= pause_us
