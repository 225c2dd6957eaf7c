"""Words about syphons on a simulated clock: a world of two namespaces, clients and syphons.

The planner, the carrier and the settling are those that run on Spark.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.namespaces import embedded
from twinbus import BrokeredMessage, dead_letter_path
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription, backlog_queue_path
from twinbus.errors import MessagingError
from twinbus.message import to_batch
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import CreateEntity, Disposition, Peek, Receive, Send, Settle
from twinbus.syphon.book import Task
from twinbus.syphon.carrier import Carried, Carrier, failure_of
from twinbus.syphon.desk import Desk
from twinbus.syphon.planner import Planner, PlannerSettings
from twinbus.syphon.settling import settlements
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

    def plan(self, *, once: bool = False) -> None:
        if not self.under_way:
            self.under_way = self.planner.next_tasks(0.0, once=once)

    def batch_of(self, *, once: bool = False) -> set[str]:
        """Plan a batch and carry it to its end; return the queues it had something of."""
        self.plan(once=once)
        queues = {task.queue for task in self.under_way}
        while self.under_way:
            self.carry()
        return queues

    def carry(self) -> None:
        task = self.under_way.pop()
        self.done += self.carrier.carry(task.queue, task.ranges, task.skipped, task.on_trial)
        if not self.under_way:
            self.settle()

    def settle(self) -> None:
        for carried in self.done:
            release = not carried.kept and carried.unread is None
            try:
                for command in settlements(carried, release=release):
                    self.secondary.ask(command)
            except MessagingError as error:
                if error.code != "StaleEpoch":
                    carried.unread = failure_of(error)
        self.batch += 1
        self.desk.put_outcome(self.batch, self.done)
        self.done = []


class World:
    """Two namespaces, clients that divert, and syphons."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        range_messages: int | None = None,
        syphons: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.clock = ManualClock()
        self.primary = self._new_namespace("primary")
        self.secondary = self.new_secondary("secondary")
        self.way_home = FaultyNamespace(self.primary)
        for path in DESTINATIONS:
            self.primary.ask(CreateEntity(QueueDescription(path=path)))
        self.range_messages = range_messages or self.random.choice([3, 10, 1000])
        self.sent: dict[tuple[int, str], list[str]] = {}
        self.syphons = [self.new_syphon() for _ in range(syphons or self.random.randint(1, 3))]

    def _new_namespace(self, name: str) -> EmbeddedNamespace:
        return embedded(self.folder / name, self.clock, threaded=False)

    def new_secondary(self, name: str) -> EmbeddedNamespace:
        made = self._new_namespace(name)
        for index in range(len(QUEUES)):
            made.ask(CreateEntity(describe_backlog_queue(PrimaryIdentity("contoso"), index)))
        return made

    def new_syphon(
        self,
        queues: tuple[str, ...] = QUEUES,
        folder: Path | None = None,
        link: FaultyNamespace | None = None,
    ) -> Syphon:
        """Return a syphon with a desk of its own, or with the one in a folder."""
        name = f"{self.random.getrandbits(64):x}"
        desk = Desk(folder or self.folder / name)
        desk.folder.mkdir(exist_ok=True)
        link = link or FaultyNamespace(self.secondary)
        settings = PlannerSettings(
            owner=name,
            queues=queues,
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

    def divert_ids(
        self, ids: Iterable[str], path: str = "orders", queue: int = 0, **fields: Any
    ) -> list[str]:
        """Divert messages of these identifiers; return them."""
        wanted = list(ids)
        messages = [BrokeredMessage(b"x", message_id=item, **fields) for item in wanted]
        self.secondary.ask(Send(QUEUES[queue], diverted(to_batch(messages), path)))
        return wanted

    def put_in(self, message_id: str, properties: dict[str, Any]) -> None:
        """Put a message into the first backlog queue as no client would."""
        odd = BrokeredMessage(b"x", message_id=message_id, application_properties=properties)
        self.secondary.ask(Send(QUEUES[0], to_batch([odd])))

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

    def run(self, seconds: int, syphon: Syphon | None = None) -> list[set[str]]:
        """Let a syphon work, a batch a second; return the queues that each batch had."""
        item = syphon or self.syphons[0]
        batches = []
        for _ in range(seconds):
            batches.append(item.batch_of())
            item.planner.keep_leases()
            self.clock.advance(timedelta(seconds=1))
        return batches

    def left(self) -> int:
        kept = self.secondary.snapshot().entities
        return sum(item.active_message_count for item in kept)

    def home(self, path: str) -> list[str]:
        found: list[str] = []
        while (batch := self.primary.ask(Receive(path, 1000))).num_rows:
            found += batch.column("message_id").to_pylist()
            tokens = batch.column("lock_token")
            self.primary.ask(Settle(path, tokens, Disposition.COMPLETE))
        return found

    def browse(self, path: str) -> list[str]:
        found: list[str] = self.primary.ask(Peek(path, 0, 1000)).column("message_id").to_pylist()
        return found

    def dead(self) -> dict[str, str]:
        """Return what the first backlog queue put aside, and why."""
        found = self.secondary.ask(Peek(dead_letter_path(QUEUES[0]), 0, 1000))
        why = found.column("dead_letter_error_description").to_pylist()
        return dict(zip(found.column("message_id").to_pylist(), why, strict=True))
