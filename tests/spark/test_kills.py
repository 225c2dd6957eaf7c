"""A short run of the syphon-kill soak: real processes, a Spark of its own, and a real kill -9."""

from tests.soak.syphon_kill import Victim, run

SEED = 1102
KILLS = 5


def test_no_kill_of_any_part_loses_doubles_or_reorders_a_diverted_message() -> None:
    print(f"replay: python -m tests.soak.syphon_kill --kills {KILLS} --seed {SEED}")
    outcome = run(KILLS, SEED)
    outcome.check()
    assert set(outcome.kills) == set(Victim)
    assert outcome.kills.total() == KILLS
    assert outcome.diverted > 100
