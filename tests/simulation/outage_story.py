"""An outage as the estimator sees it, lived through on a manual clock, with all its ledgers.

Applications cannot reach the primary for a while; the syphon can, so every diverted message goes
home once, and an application of the other side receives it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random

from tests.namespaces import embedded
from tests.simulation.syphon_words import Syphon
from twinbus import (
    BrokeredMessage,
    MessageSender,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.broker.store.storage import DiskStorage
from twinbus.broker.turn.engine import EngineSettings, Storages
from twinbus.client.retry import RetryPolicy
from twinbus.clock import ManualClock
from twinbus.cost.estimate import Plan, time_away
from twinbus.entities import backlog_queue_path
from twinbus.errors import MessagingError
from twinbus.ledger import LedgerSettings
from twinbus.limits import SYPHON_POLL
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import Disposition, Receive, Settle
from twinbus.syphon.carrier import Carrier
from twinbus.syphon.desk import Desk
from twinbus.syphon.planner import Planner, PlannerSettings
from twinbus.syphon.transfers import TransferLedger
from twinbus.testing import Fault, FaultyNamespace

PRIMARY = "contoso"
SECOND = timedelta(seconds=1)


class _NoSync(DiskStorage):
    def sync(self, descriptor: int) -> None:
        """Nobody pulls the plug."""


class _Open:
    """A namespace that outlives the factories which use it."""

    def __init__(self, inner: FaultyNamespace | EmbeddedNamespace) -> None:
        self.id, self.submit, self.ask = inner.id, inner.submit, inner.ask
        self.capabilities = inner.capabilities

    def close(self) -> None:
        """It is closed with the story."""


@dataclass
class Story:
    """Two namespaces, paired applications, a syphon and a receiver."""

    folder: Path
    plan: Plan
    messages: bool = True  # whether the trail of each is kept
    clock: ManualClock = field(default_factory=ManualClock)
    sent: dict[str, list[str]] = field(default_factory=dict)  # ids that were acknowledged, by path
    received: list[str] = field(default_factory=list)
    refused: int = 0

    @property
    def paths(self) -> list[str]:
        return [f"orders-{number}" for number in range(self.plan.entities)]

    @property
    def ledgers(self) -> list[Path]:
        return [self.folder / name for name in (PRIMARY, "backup", "application")]

    @contextmanager
    def opened(self) -> Iterator["Story"]:
        """Set everything up; when it ends the ledgers are complete."""
        with ExitStack() as stack:
            settings = LedgerSettings(roll_interval=timedelta(days=1), messages=self.messages)
            self.primary, self.secondary = (
                stack.enter_context(
                    embedded(
                        EngineSettings(directory=self.folder / name, ledger=settings),
                        self.clock,
                        Storages(_NoSync(), _NoSync()),
                        threaded=False,
                    )
                )
                for name in (PRIMARY, "backup")
            )
            self.link = FaultyNamespace(self.primary)  # of the applications
            manager = NamespaceManager(self.primary, clock=self.clock)
            for path in self.paths:
                manager.create_queue(QueueDescription(path=path))
            self.senders = [
                sender
                for number in range(self.plan.processes)
                for sender in self._pair(stack, number)
            ]
            self.syphon = self._new_syphon()
            yield self
            self.syphon.carrier.transfers.roll(at_once=True)

    def _pair(self, stack: ExitStack, number: int) -> list[MessageSender]:
        random = Random(number)
        primary, secondary = (
            MessagingFactory(
                _Open(item),
                name=name,
                retry_policy=RetryPolicy.once(),
                clock=self.clock,
                random=random,
            )
            for item, name in ((self.link, PRIMARY), (self.secondary, "backup"))
        )
        stack.callback(primary.close)
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager(_Open(self.secondary), clock=self.clock),
            secondary,
            self.plan.queues,
            self.plan.failover_interval,
            ledger=self.folder / "application",
        )
        options.ping_primary_interval = self.plan.ping_interval
        primary.pair_namespace(options)
        return [primary.create_message_sender(path) for path in self.paths]

    def _new_syphon(self) -> Syphon:
        desk = Desk(self.folder / "desk")
        desk.folder.mkdir()
        queues = tuple(backlog_queue_path(PRIMARY, index) for index in range(self.plan.queues))
        planner = Planner(
            self.secondary,
            PlannerSettings(owner="syphon", queues=queues, retry_interval=SECOND),
            desk,
            self.clock,
        )
        transfers = TransferLedger(self.folder / "application", self.clock)
        carrier = Carrier(self.primary, self.secondary, transfers)
        return Syphon(planner, desk, carrier, FaultyNamespace(self.secondary))

    # -- what happens ----------------------------------------------------------------------------

    def send(self, body: bytes = b"") -> None:
        """Let every application send one message to every entity."""
        for sender in self.senders:
            message = BrokeredMessage(body)
            try:
                sender.send(message)
            except MessagingError:
                self.refused += 1
            else:
                self.sent.setdefault(sender.path, []).append(message.message_id)

    def outage(self, fault: Fault = Fault.UNAVAILABLE) -> None:
        """Cut the applications off from the primary, and go on sending until they are back."""
        heal = self.link.inject(fault)
        plan, body = self.plan, bytes(self.plan.size)
        away = time_away(plan.outage, plan.failover_interval, plan.ping_interval)
        for second in range(max(plan.failover_interval + away, plan.outage) // SECOND):
            self.send(body)
            if (second + 1) * SECOND == plan.outage:
                heal()
            self.clock.advance(SECOND)
        self.drain()

    def idle(self, span: timedelta) -> None:
        """Let time pass in which nothing is sent; the syphon polls."""
        self.drain()
        for _ in range(span // SYPHON_POLL):
            self.clock.advance(SYPHON_POLL)
            self.drain()

    def drain(self) -> None:
        while self.syphon.batch_of():
            pass

    def receive_all(self) -> None:
        """Let the other side receive and complete what is there."""
        for path in self.paths:
            while (batch := self.primary.ask(Receive(path, 100))).num_rows:
                self.primary.ask(Settle(path, batch.column("lock_token"), Disposition.COMPLETE))
                self.received += batch.column("message_id").to_pylist()
