"""A short run of the server-kill soak, with real processes and a real kill -9."""

import random

from tests.soak.server_kill import run


def test_nothing_acknowledged_is_lost_when_the_server_is_killed_under_load() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"replay: python -m tests.soak.server_kill --kills 3 --seed {seed}")
    outcome = run(3, seed)
    outcome.check()
    assert outcome.kills == 3
    assert outcome.acknowledged > 100
    assert outcome.completed > 10
