"""Several syphons on one backlog, on a simulated clock: killed, stalled, lied to, and never wrong.

The planner, the carrier and the settling are those that run on Spark; a seed decides which syphon
moves when, which dies in the middle, whose lease lapses while its worker goes on, and what fails.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from twinbus import BrokeredMessage
from twinbus.broker.commands import CreateEntity, Disposition, ReadMeter, Receive, Send, Settle
from twinbus.broker.engine import EngineSettings
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription
from twinbus.errors import MessagingError
from twinbus.message import to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.backlog import backlog_queue_path, describe_backlog_queue, diverted
from twinbus.pipeline import planner as planning
from twinbus.pipeline.book import Task
from twinbus.pipeline.carrier import Carried, Carrier, failure_of
from twinbus.pipeline.desk import Desk
from twinbus.pipeline.planner import Planner, PlannerSettings
from twinbus.pipeline.settling import settlement
from twinbus.testing import Fault, FaultyNamespace

DESTINATIONS = ("orders", "bills", "news")
QUEUES = tuple(backlog_queue_path("contoso", index) for index in range(3))
CLIENTS = 6
FAULTS = (Fault.UNAVAILABLE, Fault.TRANSIENT, Fault.TIMEOUT, Fault.REPLY_LOST, Fault.SERVER_BUSY)


@dataclass
class Syphon:
    """A planner, its worker, and its link to the secondary."""

    planner: Planner
    desk: Desk
    carrier: Carrier
    secondary: FaultyNamespace
    under_way: list[Task] = field(default_factory=list)
    done: list[Carried] = field(default_factory=list)
    batch: int = 0

    def plan(self) -> None:
        if not self.under_way:
            self.under_way = self.planner.next_tasks(0.0)

    def carry(self) -> None:
        task = self.under_way.pop()
        self.done += self.carrier.carry(task.queue, task.ranges, task.held_back, task.on_trial)
        if not self.under_way:
            self.settle()

    def settle(self) -> None:
        for carried in self.done:
            release = not carried.kept and carried.unread is None
            try:
                self.secondary.ask(settlement(carried, release=release))
            except MessagingError as error:
                if error.code != "StaleEpoch":
                    carried.unread = failure_of(error)
        self.batch += 1
        self.desk.put_outcome(self.batch, self.done)
        self.done = []


class World:
    """Two namespaces, clients that divert, and syphons."""

    def __init__(self, seed: int, folder: Path, range_messages: int | None = None) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.clock = ManualClock()
        self.primary, self.secondary = (
            EmbeddedNamespace(EngineSettings(directory=folder / name), self.clock, threaded=False)
            for name in ("primary", "secondary")
        )
        self.way_home = FaultyNamespace(self.primary)
        for path in DESTINATIONS:
            self.primary.ask(CreateEntity(QueueDescription(path=path)))
        for index in range(len(QUEUES)):
            self.secondary.ask(CreateEntity(describe_backlog_queue("contoso", index)))
        self.range_messages = range_messages or self.random.choice([3, 10, 1000])
        self.sent: dict[tuple[int, str], list[str]] = {}
        self.syphons = [self.new_syphon() for _ in range(self.random.randint(1, 3))]

    def new_syphon(self) -> Syphon:
        name = f"{self.random.getrandbits(64):x}"
        desk = Desk(self.folder / name)
        desk.folder.mkdir()
        link = FaultyNamespace(self.secondary)
        settings = PlannerSettings(
            owner=name,
            queues=QUEUES,
            retry_interval=timedelta(seconds=1),
            range_messages=self.range_messages,
        )
        planner = Planner(link, settings, desk, self.clock)
        return Syphon(planner, desk, Carrier(self.way_home, link), link)

    def divert(self) -> None:
        """Let a client divert a few messages, to its queue."""
        client = self.random.randrange(CLIENTS)
        for _ in range(self.random.randint(1, 12)):
            path = self.random.choice(DESTINATIONS)
            ids = self.sent.setdefault((client, path), [])
            ids.append(f"{client}.{path}.{len(ids)}")
            message = BrokeredMessage(b"x", message_id=ids[-1])
            queue = QUEUES[client % len(QUEUES)]
            self.secondary.ask(Send(queue, diverted(to_batch([message]), path)))

    def step(self) -> None:
        syphon = self.random.choice(self.syphons)
        match self.random.choices(
            ("divert", "plan", "carry", "keep", "pass", "kill", "break", "heal"),
            (6, 12, 12, 3, 4, 0.6, 1.5, 2),
        )[0]:
            case "divert":
                self.divert()
            case "plan":
                syphon.plan()
            case "carry" if syphon.under_way:
                syphon.carry()
            case "keep":
                syphon.planner.keep_leases()
            case "pass":
                self.clock.advance(timedelta(seconds=self.random.choice([0.1, 1, 5, 40])))
            case "kill":
                self.syphons.remove(syphon)  # neither settles nor gives anything back
                self.syphons.append(self.new_syphon())
            case "break":
                where = self.random.choice([self.way_home, syphon.secondary])
                path = self.random.choice([None, *DESTINATIONS, *QUEUES])
                where.inject(self.random.choice(FAULTS), path, times=self.random.choice([None, 1]))
            case "heal":
                self.heal()

    def heal(self) -> None:
        self.way_home.heal()
        for syphon in self.syphons:
            syphon.secondary.heal()

    def finish(self) -> None:
        """Let everything come home."""
        self.heal()
        for _ in range(400):
            for syphon in self.syphons:
                syphon.plan()
                while syphon.under_way:
                    syphon.carry()
                syphon.planner.keep_leases()
            self.clock.advance(timedelta(seconds=5))
            if not self.left():
                return
        raise AssertionError(f"{self.left()} messages do not come home")

    def left(self) -> int:
        kept = self.secondary.snapshot().entities
        return sum(one.active_message_count for one in kept)

    def home(self, path: str) -> list[str]:
        found: list[str] = []
        while (batch := self.primary.ask(Receive(path, 1000))).num_rows:
            found += batch.column("message_id").to_pylist()
            tokens = batch.column("lock_token")
            self.primary.ask(Settle(path, tokens, Disposition.COMPLETE))
        return found


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_GATHER_S", 0.0)  # these namespaces answer at once or later


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
        assert not [one for one, count in Counter(home).items() if count > 1]
        for client in range(CLIENTS):
            mine = [one for one in home if one.startswith(f"{client}.")]
            assert mine == world.sent.get((client, path), [])


def test_an_idle_day_costs_forty_receives_an_hour_for_ten_queues(tmp_path: Path) -> None:
    world = World(0, tmp_path)
    queues = tuple(backlog_queue_path("contoso", index) for index in range(10))
    for index in range(3, 10):
        world.secondary.ask(CreateEntity(describe_backlog_queue("contoso", index)))
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
