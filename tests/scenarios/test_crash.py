"""A short run of the crash soak, with real processes and a real kill -9."""

import random

from tests.soak.crash import run


def test_nothing_acknowledged_is_lost_when_the_broker_is_killed_under_load() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"replay: python -m tests.soak.crash --kills 8 --seed {seed}")
    ledger = run(8, seed)
    assert ledger.lives == 8
    assert len(ledger.acknowledged) > 100
    assert len(ledger.done) > 10
