"""The syphon that receives under lock, on a manual clock, with faults and kills under a seed.

Planner, carrier and namespaces are the real ones; the secondary has ranges taken away. A kill is a
visit that ends before it settles, as when its worker dies.
"""

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.namespaces import embedded
from twinbus import BrokeredMessage, QueueDescription, dead_letter_path
from twinbus.clock import ManualClock
from twinbus.entities import backlog_queue_path
from twinbus.errors import QuotaExceededError
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import to_batch, to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    CreateEntity,
    DeleteEntity,
    Origin,
    Peek,
    ReadMeter,
    Receive,
    Send,
    SendReceipt,
    Settle,
)
from twinbus.protocol.origins import sender_source
from twinbus.protocol.remainder import ACCEPTED
from twinbus.syphon.carrier import Carrier
from twinbus.syphon.desk import Desk
from twinbus.syphon.locked_carrier import LockedCarrier
from twinbus.syphon.locked_planner import LockedPlanner
from twinbus.syphon.planner import PlannerSettings
from twinbus.testing import Fault, FaultyNamespace, LimitedNamespace

DESTINATIONS = ("orders", "bills", "news")
QUEUES = tuple(backlog_queue_path("contoso", index) for index in range(2))
FAULTS = (Fault.UNAVAILABLE, Fault.TRANSIENT, Fault.REPLY_LOST, Fault.SERVER_BUSY)
NUMBERED = frozenset({Capability.RANGES})
UNNUMBERED = NUMBERED | {Capability.SEQUENCE_NUMBERS}


class Killed(LimitedNamespace):
    """A secondary as one worker sees it: after the kill its settlements reach nobody."""

    is_dead = False

    def submit(self, command: Any) -> Any:
        if self.is_dead and isinstance(command, Settle):
            raise KeyboardInterrupt
        return super().submit(command)


class World:
    """Two namespaces, clients that divert, and a syphon without ranges."""

    def __init__(
        self, folder: Path, seed: int, without: frozenset[Capability], tasks_per_queue: int = 1
    ) -> None:
        self.tasks_per_queue = tasks_per_queue
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.folder = folder
        self.without = without
        self.primary = self._namespace("primary")
        self.secondary = self._namespace("secondary")
        for path in DESTINATIONS:
            self.primary.ask(CreateEntity(QueueDescription(path=path)))
        for index in range(len(QUEUES)):
            queue = describe_backlog_queue(PrimaryIdentity("contoso"), index)
            self.secondary.ask(CreateEntity(queue))
        self.way_home = FaultyNamespace(self.primary)
        self.worker = Killed(self.secondary, without)
        self.desk = Desk(folder)
        self.sent: dict[tuple[str, str], list[str]] = {}
        self.sources: dict[tuple[int, str], str] = {}  # of a client's messages to a destination
        self.numbers: Counter[tuple[int, str]] = Counter()
        self.batch = 0
        self.start()

    def _namespace(self, name: str) -> EmbeddedNamespace:
        return embedded(self.folder / name, self.clock, threaded=False)

    def start(self) -> None:
        """Start the planner, again after a kill."""
        settings = PlannerSettings(
            owner="syphon",
            queues=QUEUES,
            retry_interval=timedelta(seconds=1),
            range_messages=40,
            ranges_per_queue=self.tasks_per_queue,
        )
        limited = LimitedNamespace(self.secondary, self.without)
        self.planner = LockedPlanner(limited, settings, self.desk, self.clock)
        self.worker.is_dead = False

    def divert(self, client: int, destination: str, count: int) -> None:
        """Divert as a paired client does: to its own queue, numbered, in order."""
        first = self.numbers[client, destination]
        self.numbers[client, destination] += count
        ids = [f"{client}.{destination}.{first + n}" for n in range(count)]
        batch = to_batch([BrokeredMessage(b"x", message_id=item) for item in ids])
        fresh = sender_source(self.random.getrandbits(64))
        source = self.sources.setdefault((client, destination), fresh)
        origin = Origin(source, range(first, first + count))
        queue = QUEUES[client % len(QUEUES)]
        self.secondary.ask(Send(queue, diverted(batch, destination, origin)))
        self.sent.setdefault((f"{client}", destination), []).extend(ids)

    def carry(self, *, killed: bool = False) -> bool:
        """Play one batch; return whether there was anything to do."""
        tasks = self.planner.next_tasks(0.0)
        carrier = LockedCarrier(Carrier(self.way_home, self.worker), self.worker, 40)
        self.worker.is_dead = killed
        outcomes = []
        try:
            for task in tasks:
                outcomes += carrier.carry(task.queue, task.ranges, task.skipped, task.on_trial)
        except KeyboardInterrupt:
            self.start()
            return True
        if tasks:
            self.batch += 1
            self.desk.take_tasks()
            self.desk.put_outcome(self.batch, outcomes)
        return bool(tasks)

    def bring_home(self) -> None:
        """Heal everything, and let time pass until the backlog is empty."""
        self.way_home.heal()
        for _ in range(400):
            if not self.carry():
                self.clock.advance(timedelta(seconds=1))
            if not any(self.secondary.ask(Peek(queue)).num_rows for queue in QUEUES):
                return
        raise AssertionError("the backlog did not become empty")

    def home(self, destination: str) -> list[str]:
        found: list[str] = self.primary.ask(Peek(destination, 0, 10_000))["message_id"].to_pylist()
        return found

    def check(self) -> None:
        """Every message is home once, in the order of its client unless that was given up."""
        for destination in DESTINATIONS:
            home = self.home(destination)
            assert len(home) == len(set(home)), "doubled"
            for (client, path), ids in self.sent.items():
                if path == destination:
                    own = [item for item in home if item.startswith(f"{client}.")]
                    in_order = self.tasks_per_queue == 1
                    assert own == ids if in_order else sorted(own) == sorted(ids)

    def close(self) -> None:
        self.planner.close()
        self.primary.close()
        self.secondary.close()


@pytest.fixture(params=[NUMBERED, UNNUMBERED], ids=["numbered", "unnumbered"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, 7, request.param)
    yield world
    world.close()


def test_diverted_messages_come_home(world: World) -> None:
    world.divert(0, "orders", 100)
    world.divert(1, "bills", 3)
    world.bring_home()
    world.check()


def test_an_idle_queue_costs_one_poll(world: World) -> None:
    for _ in range(5):
        world.carry()
        world.clock.advance(timedelta(minutes=1))
    rows = world.secondary.ask(ReadMeter()).to_pylist()
    assert sum(row["count"] for row in rows if row["operation"] == "Receive") <= len(QUEUES)


def test_a_failing_destination_holds_up_no_other(world: World) -> None:
    world.way_home.inject(Fault.UNAVAILABLE, "orders")
    world.divert(0, "orders", 30)
    world.divert(0, "bills", 30)
    for _ in range(10):
        world.carry()
        world.clock.advance(timedelta(seconds=1))
    assert len(world.home("bills")) == 30
    assert world.home("orders") == []
    world.bring_home()
    world.check()


def test_a_message_that_cannot_go_home_is_put_aside_with_a_reason(world: World) -> None:
    world.divert(0, "nowhere", 2)
    world.divert(0, "orders", 2)
    world.bring_home()
    assert len(world.home("orders")) == 2
    dead = world.secondary.ask(Peek(dead_letter_path(QUEUES[0]), 0, 10))
    assert dead.num_rows == 2
    assert "nowhere" in dead["dead_letter_error_description"][0].as_py()


def test_interleaved_senders_of_a_queue_cost_one_send_each(world: World) -> None:
    clients = (0, 2, 4, 6)  # of the first queue
    for number in range(100):
        world.divert(clients[number % 4], "orders", 1)
    world.bring_home()
    world.check()
    rows = world.primary.ask(ReadMeter()).to_pylist()
    sends = [row for row in rows if (row["operation"], row["path"]) == ("Send", "orders")]
    assert sum(row["count"] for row in sends) == len(clients)


class PingKeeper(Killed):
    """A secondary that does not know pings, as Azure and RabbitMQ: it stores and delivers them."""

    def submit(self, command: Any) -> Any:
        if not isinstance(command, Receive):
            return super().submit(command)
        reply: Future[pa.RecordBatch] = Future()
        batch = super().submit(command).result()
        names = {"stored ping": PING_CONTENT_TYPE}
        types = [names.get(item, item) for item in batch[_TYPE].to_pylist()]
        at = batch.schema.get_field_index(_TYPE)
        column = pa.array(types, pa.string())
        reply.set_result(batch.set_column(at, batch.schema.field(at), column))
        return reply


_TYPE = "content_type"


def test_a_ping_that_the_engine_stored_is_removed(world: World) -> None:
    world.worker = PingKeeper(world.secondary, world.without)
    world.secondary.ask(Send(QUEUES[0], [BrokeredMessage(content_type="stored ping")]))
    world.divert(0, "orders", 1)
    world.bring_home()
    assert world.home("orders") == ["0.orders.0"]
    assert world.secondary.ask(Peek(dead_letter_path(QUEUES[0]))).num_rows == 0


def test_a_copy_that_the_secondary_stored_twice_is_enqueued_once(world: World) -> None:
    """An engine without a memory of repeats stores a message again when its reply was lost."""
    world.divert(0, "orders", 3)
    for queue in QUEUES:  # repeated there, and in another queue
        copies = [BrokeredMessage(b"x", message_id=f"0.orders.{n}") for n in range(3)]
        origin = Origin(world.sources[0, "orders"], range(3))
        world.secondary.ask(Send(queue, diverted(to_batch(copies), "orders", origin)))
    world.bring_home()
    world.check()


class CreatedAnew(Killed):
    """A secondary whose queue is deleted and created again between two receives of a visit."""

    received = 0

    def submit(self, command: Any) -> Any:
        if isinstance(command, Receive):
            self.received += 1
            if self.received == 2:
                self.between()
        return super().submit(command)

    def between(self) -> None:
        """Do nothing, unless a test says what."""


def test_a_queue_that_is_created_anew_during_a_visit_loses_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, 7, NUMBERED)
    worker = CreatedAnew(world.secondary, world.without)
    world.worker = worker
    world.divert(0, "orders", 10)

    def between() -> None:
        world.secondary.ask(DeleteEntity(QUEUES[0]))
        world.clock.advance(timedelta(seconds=1))
        world.secondary.ask(CreateEntity(describe_backlog_queue(PrimaryIdentity("contoso"), 0)))
        world.divert(0, "orders", 3)

    worker.between = between  # type: ignore[method-assign]
    world.bring_home()
    world.check()
    world.close()


def test_a_queue_that_was_created_anew_is_another_origin(tmp_path: Path) -> None:
    """Its numbers begin again, and the primary must not take its messages for known."""
    world = World(tmp_path, 7, NUMBERED)
    world.divert(0, "orders", 3)
    world.bring_home()
    world.secondary.ask(DeleteEntity(QUEUES[0]))
    world.clock.advance(timedelta(seconds=1))
    world.secondary.ask(CreateEntity(describe_backlog_queue(PrimaryIdentity("contoso"), 0)))
    world.divert(0, "orders", 3)
    world.bring_home()
    world.check()
    world.close()


class NearlyFull(LimitedNamespace):
    """A primary without memories and without whole batches, as RabbitMQ: it accepts what fits."""

    def __init__(self, inner: EmbeddedNamespace) -> None:
        super().__init__(inner, _UNLIKE_RABBITMQ)
        self.room = 0
        self.enqueued: list[str] = []

    def submit(self, command: Any) -> Any:
        if not isinstance(command, Send):
            return super().submit(command)
        messages = to_messages(command.messages)
        fitting = min(self.room, len(messages))
        self.room -= fitting
        self.enqueued += [message.message_id for message in messages[:fitting]]
        reply: Future[SendReceipt] = Future()
        if fitting == len(messages):
            reply.set_result(SendReceipt([0] * fitting))
        else:
            facts = {ACCEPTED: dict.fromkeys(range(fitting), 0)} if fitting else {}
            reply.set_exception(QuotaExceededError("orders is full", **facts))
        return reply


_UNLIKE_RABBITMQ = {
    Capability.WHOLE_BATCHES,
    Capability.REPEAT_MEMORY,
    Capability.TRANSFER_MEMORY,
}


def test_a_nearly_full_primary_gets_each_message_once(world: World) -> None:
    primary = NearlyFull(world.primary)
    world.way_home = FaultyNamespace(primary)
    world.divert(0, "orders", 100)
    for _ in range(30):
        primary.room = 20  # a consumer has made room
        world.carry()
        world.clock.advance(timedelta(seconds=10))
    assert primary.enqueued == world.sent["0", "orders"]
    assert world.secondary.ask(Peek(QUEUES[0])).num_rows == 0


@pytest.mark.parametrize("tasks_per_queue", [1, 3])
def test_a_queue_has_several_tasks_only_where_order_is_given_up(
    tmp_path: Path, tasks_per_queue: int
) -> None:
    world = World(tmp_path, 7, NUMBERED, tasks_per_queue)
    world.divert(0, "orders", 100)
    tasks = world.planner.next_tasks(0.0)
    assert [task.queue for task in tasks] == [QUEUES[0]] * tasks_per_queue
    world.close()


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_doubled_or_reordered_through_faults_and_kills(
    tmp_path: Path, seed: int
) -> None:
    tasks_per_queue = 3 if seed >= 25 else 1
    world = World(tmp_path, seed, NUMBERED if seed % 2 else UNNUMBERED, tasks_per_queue)
    for _ in range(60):
        draw = world.random.random()
        if draw < 0.4:
            client, count = world.random.randrange(4), world.random.choice([1, 3, 20])
            world.divert(client, world.random.choice(DESTINATIONS), count)
        elif draw < 0.75:
            world.carry()
        elif draw < 0.85:
            world.carry(killed=True)
        elif draw < 0.92:
            destination = world.random.choice(DESTINATIONS)
            times = world.random.choice([1, 3, None])
            world.way_home.inject(world.random.choice(FAULTS), destination, times=times)
        else:
            world.way_home.heal()
            world.clock.advance(timedelta(seconds=world.random.choice([1, 5, 70])))
    world.bring_home()
    world.check()
    world.close()
