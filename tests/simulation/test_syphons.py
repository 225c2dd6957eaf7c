"""Several syphons on one backlog, on a simulated clock: killed, stalled, lied to, and never wrong.

The planner, the carrier and the settling are those that run on Spark; a seed decides which syphon
moves when, which dies in the middle, whose lease lapses while its worker goes on, and what fails.
"""

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from tests.simulation.syphon_words import CLIENTS, DESTINATIONS, QUEUES, World
from twinbus.entities import backlog_queue_path
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import CreateEntity, ReadMeter
from twinbus.syphon.desk import Desk
from twinbus.syphon.planner import Planner, PlannerSettings

pytestmark = pytest.mark.usefixtures("answered_at_once")


@pytest.mark.parametrize("seed", range(30))
def test_each_message_comes_home_once_and_in_the_order_of_its_client(
    seed: int, tmp_path: Path
) -> None:
    print(f"seed {seed}")
    world = World(seed, tmp_path)
    for _ in range(400):
        world.step()
    world.finish()
    for path in DESTINATIONS:
        home = world.home(path)
        assert not [key for key, count in Counter(home).items() if count > 1]
        for client in range(CLIENTS):
            mine = [item for item in home if item.startswith(f"{client}.")]
            assert mine == world.sent.get((client, path), [])


def test_an_idle_day_costs_forty_receives_an_hour_for_ten_queues(tmp_path: Path) -> None:
    world = World(0, tmp_path)
    queues = tuple(backlog_queue_path("contoso", index) for index in range(10))
    for index in range(3, 10):
        world.secondary.ask(CreateEntity(describe_backlog_queue(PrimaryIdentity("contoso"), index)))
    settings = PlannerSettings(owner="me", queues=queues, retry_interval=timedelta(seconds=1))
    (tmp_path / "desk").mkdir()
    planner = Planner(world.secondary, settings, Desk(tmp_path / "desk"), world.clock)
    for _ in range(24 * 60):
        assert planner.next_tasks(0.0) == []
        planner.keep_leases()
        world.clock.advance(timedelta(minutes=1))
    rows = world.secondary.ask(ReadMeter()).to_pylist()
    counted = {row["operation"]: 0 for row in rows}
    for row in rows:
        counted[row["operation"]] += row["count"]
    del counted["CreateEntity"]
    assert counted == {"LeaseRange": 24 * 40}


def test_a_queue_that_appears_while_the_syphon_runs_is_drained_and_polled_like_the_others(
    tmp_path: Path,
) -> None:
    world = World(0, tmp_path, syphons=1)
    syphon = world.new_syphon(QUEUES[:1])
    sent = world.divert_ids(["a", "b"], queue=2)
    world.run(5, syphon)
    assert world.browse("orders") == []
    syphon.desk.add_queues([QUEUES[1]])
    syphon.desk.add_queues([QUEUES[2]])
    world.run(5, syphon)
    assert world.browse("orders") == sent
    again = world.new_syphon(QUEUES[:1], syphon.desk.folder)  # Spark restarted the planner
    sent += world.divert_ids(["c"], queue=2)
    world.run(60, again)
    assert world.browse("orders") == sent
