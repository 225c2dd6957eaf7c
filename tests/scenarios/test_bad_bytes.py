"""A short run of the bad-bytes soak against a real server process."""

import random

import pytest

from tests.soak import bad_bytes_amqp, bad_bytes_attacks, bad_bytes_values
from tests.soak.bad_bytes import Attack, Outcome, run


def attack(*attacks: Attack) -> Outcome:
    seed = random.SystemRandom().randrange(2**32)
    only = attacks[0].__name__ if len(attacks) == 1 else attacks[0].__module__
    print(f"replay: python -m tests.soak.bad_bytes --rounds 1 --seed {seed} --only {only}")
    return run(1, seed, attacks=attacks)


def test_bad_bytes_get_the_right_error_and_harm_nobody() -> None:
    outcome = attack(*bad_bytes_attacks.ATTACKS)
    outcome.check()
    assert outcome.acknowledged > 10


def test_bad_frames_of_amqp_get_the_right_error_and_harm_nobody() -> None:
    outcome = attack(*bad_bytes_amqp.ATTACKS)
    outcome.check()
    assert outcome.acknowledged > 10


@pytest.mark.parametrize("odd", bad_bytes_values.ATTACKS, ids=lambda value: value.__name__)
def test_odd_values_are_refused_or_harmless(odd: Attack) -> None:
    attack(odd).check()
