"""A power cut at any moment: what was acknowledged is there, and the start never fails."""

import pytest

from tests.soak.power_cut import run


@pytest.mark.parametrize("seed", [1, 1000, 2000])
def test_a_power_cut_loses_nothing_that_was_acknowledged(seed: int) -> None:
    assert run(cuts=8, seed=seed).cuts >= 8
