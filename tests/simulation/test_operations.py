"""G9: metered operations equal the formula exactly, over random outages."""

import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from tests.simulation.outage_story import PRIMARY, SECOND, Story
from twinbus.cost.estimate import (
    Plan,
    diverted_operations,
    estimate,
    idle_polls,
    pings_until_return,
)
from twinbus.cost.prices import load_sheet
from twinbus.cost.stages import DIVERTED, Stage, stage_operations
from twinbus.syphon import planner
from twinbus.testing import Fault

HOUR = timedelta(hours=1)
KEYS = ("operation", "purpose", "outcome")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planner not wait for real: here everything is answered at once."""
    monkeypatch.setattr(planner, "POLL_GATHER_S", 0.0)


def metered(directory: Path) -> Counter[Stage]:
    """Return the operations of each stage in the ledger of a namespace."""
    found: Counter[Stage] = Counter()
    rows = ds.dataset(directory / "ledger" / "operations", format="parquet").to_table().to_pylist()
    for row in rows:
        found.update(stage_operations({tuple(row[key] for key in KEYS): row}))
    return found


def drawn_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    return Plan(
        processes=draw.randint(1, 3),
        entities=draw.randint(1, 3),
        size=draw.choice([0, 100, 70_000, 140_000]) + 1,
        queues=draw.randint(1, 4),
        outage=draw.randint(1, 60) * SECOND,
        failover_interval=draw.choice([0, 0, 1, 5, 20]) * SECOND,
        ping_interval=draw.choice([1, 2, 7, 20]) * SECOND,
    )


@pytest.mark.parametrize("seed", range(100))
def test_metered_operations_equal_the_formula(tmp_path: Path, seed: int) -> None:
    plan = drawn_plan(seed)
    clients = plan.processes * plan.entities
    before = random.Random(seed).choice([0, 1, 3]) * HOUR
    with Story(tmp_path, plan, messages=False).opened() as story:
        story.idle(before)
        story.outage(Fault.REPLY_LOST)
        story.receive_all()
    pings = pings_until_return(plan.outage, plan.failover_interval, plan.ping_interval)
    diverted = clients * (pings * plan.ping_interval // SECOND)
    due = diverted_operations(diverted, plan.size)
    at_primary, at_backup = metered(tmp_path / PRIMARY), metered(tmp_path / "backup")
    for stage in (Stage.SEND_TO_BACKLOG, Stage.RECEIVE_FROM_BACKLOG, Stage.COMPLETE_IN_BACKLOG):
        assert at_backup[stage] == due[stage]
    assert at_primary[Stage.SEND_TO_PRIMARY] == due[Stage.SEND_TO_PRIMARY]
    assert at_primary[Stage.PING] == clients * pings
    assert at_backup[Stage.IDLE_POLL] == idle_polls(plan.queues, before)


def test_a_diverted_message_costs_exactly_its_four_stages(tmp_path: Path) -> None:
    plan = Plan(
        queues=2, outage=10 * SECOND, failover_interval=0 * SECOND, ping_interval=10 * SECOND
    )
    with Story(tmp_path, plan, messages=False).opened() as story:
        story.outage()
        story.receive_all()
    assert len(story.received) == 10
    both = metered(tmp_path / PRIMARY) + metered(tmp_path / "backup")
    assert {stage: both[stage] for stage in DIVERTED} == dict.fromkeys(DIVERTED, 10)
    reported = estimate(
        Plan(
            rate=1,
            queues=2,
            outage=plan.outage,
            failover_interval=0 * SECOND,
            ping_interval=plan.ping_interval,
        ),
        load_sheet("zero"),
    )
    assert {stage: reported.operations[stage] for stage in DIVERTED} == dict.fromkeys(DIVERTED, 10)


def test_a_failed_over_entity_costs_one_ping_a_minute(tmp_path: Path) -> None:
    plan = Plan(rate=1, outage=30 * timedelta(minutes=1), failover_interval=0 * SECOND)
    with Story(tmp_path, plan, messages=False).opened() as story:
        heal = story.link.inject(Fault.REPLY_LOST)
        story.send()
        for _ in range(30):
            story.clock.advance(timedelta(minutes=1))
        heal()
    assert metered(tmp_path / PRIMARY)[Stage.PING] == 30
    assert estimate(plan, load_sheet("zero")).pings == 30


@pytest.mark.parametrize(("span", "polls"), [(1, 40), (24, 960), (30 * 24, 28_800)])
def test_ten_idle_queues_cost_forty_receives_an_hour(tmp_path: Path, span: int, polls: int) -> None:
    with Story(tmp_path, Plan(queues=10), messages=False).opened() as story:
        story.idle(span * HOUR)
    assert metered(tmp_path / "backup")[Stage.IDLE_POLL] == polls
    assert idle_polls(10, span * HOUR) == polls
