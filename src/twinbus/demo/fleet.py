"""The participants of the demo: paired applications that send, a consumer, and a recorder."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from twinbus import (
    BrokeredMessage,
    MessageReceiver,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.demo.audit import Handovers
from twinbus.demo.servers import QUEUE
from twinbus.lifetimes import Closable
from twinbus.pairing.events import PairingEvent
from twinbus.pairing.health import HealthState
from twinbus.protocol.commands import Disposition

Orders = dict[str, bytes]  # bodies by message id
APPLICATIONS = 4
BACKLOG_QUEUES = 10
BATCH = 20  # orders per send
PACE_S = 0.05  # between the sends of one application
QUICK = RetryPolicy(operation_timeout=timedelta(seconds=1))  # how long a send may try the primary


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An event of the demo."""

    at: float  # seconds since the start
    text: str
    mark: str | None = None  # its label on charts


@dataclass(frozen=True, slots=True)
class Sample:
    """The totals at a time."""

    at: float
    acknowledged: int
    diverted: int
    delivered: int
    moved: int


@dataclass(slots=True)
class Recorder:
    """Records the timeline and the samples of a run."""

    began: float = field(default_factory=time.monotonic)
    timeline: list[TimelineEntry] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def record(self, text: str, mark: str | None = None) -> None:
        """Add an event to the timeline."""
        self.timeline.append(TimelineEntry(self.now, text, mark))

    def at(self, mark: str) -> float:
        """Return the time of the event with a mark; the current time if there is none."""
        return next((entry.at for entry in self.timeline if entry.mark == mark), self.now)


class Fleet(Closable):
    """Applications that send at a steady pace, each with its own paired factory."""

    size = APPLICATIONS
    pace_s = PACE_S
    refusals: tuple[type[Exception], ...] = (MessagingError,)  # the errors that a send may raise

    def __init__(
        self,
        primary: str,
        secondary: str,
        ledger: Path,
        recorder: Recorder,
        *,
        name: str = "app",
        pace_s: float | None = None,
    ) -> None:
        self._pace_s = pace_s or self.pace_s
        self.acknowledged: list[str] = []
        self.longest_wait_s = 0.0
        self.raised = 0
        self._recorder = recorder
        self._stop = threading.Event()
        opened = [self.open(primary, secondary, ledger) for _ in range(APPLICATIONS)]
        self._applications = [application for application, _ in opened]
        self._pairings = [pairing for _, pairing in opened]
        self._pairings[0].on_event(self._on_event)  # the other pairings report the same
        self._threads = [
            threading.Thread(target=self._send, args=(f"{name}{at}", application), daemon=True)
            for at, application in enumerate(self._applications)
        ]
        for thread in self._threads:
            thread.start()

    def open(
        self, primary: str, secondary: str, ledger: Path
    ) -> tuple[Any, SendAvailabilityPairing]:
        """Open an application; return it with its pairing."""
        factory = MessagingFactory.from_connection_string(primary, retry_policy=QUICK)
        return factory, factory.pair_namespace(_options(secondary, ledger))

    @contextmanager
    def sending(self, application: Any) -> Iterator[Callable[[Orders], None]]:
        """Yield a function that sends orders of an application."""
        with application.create_message_sender(QUEUE) as orders:
            yield lambda batch: orders.send_batch(
                [BrokeredMessage(body, message_id=name) for name, body in batch.items()]
            )

    def _on_event(self, event: PairingEvent) -> None:
        name = type(event).__name__
        entries = {
            "FailedOver": ("sends are diverted to the backlog", "diverted"),
            "Returned": ("a ping got through: sends go to the primary again", "returned"),
        }
        if name in entries:
            self._recorder.record(*entries[name])

    def _send(self, name: str, application: Any) -> None:
        with self.sending(application) as send:
            number = 0
            while not self._stop.wait(self._pace_s):
                batch = {f"{name}.{number + at}": os.urandom(1024) for at in range(BATCH)}
                number += BATCH
                began = time.monotonic()
                try:
                    send(batch)
                except self.refusals:
                    self.raised += 1
                    continue
                finally:
                    self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)
                self.acknowledged += batch

    @property
    def diverted(self) -> int:
        """How many orders were diverted to the backlog."""
        return sum(status.diverted for pairing in self._pairings for status in pairing.status())

    @property
    def is_healthy(self) -> bool:
        """Whether every application sends to the primary."""
        states = [status.state for pairing in self._pairings for status in pairing.status()]
        return all(state is HealthState.HEALTHY for state in states)

    def stop(self) -> None:
        """Stop sending; wait until every application has finished its last send."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Stop, and close the factories."""
        self.stop()
        for application in self._applications:
            application.close()


def _options(secondary: str, ledger: Path) -> SendAvailabilityPairedNamespaceOptions:
    options = SendAvailabilityPairedNamespaceOptions(
        NamespaceManager.from_connection_string(secondary),
        MessagingFactory.from_connection_string(secondary),
        backlog_queue_count=BACKLOG_QUEUES,
        failover_interval=timedelta(0),
        ledger=ledger,
    )
    options.ping_primary_interval = timedelta(seconds=1)
    return options


class Consumer(Closable):
    """Receives from the primary, and continues after every error."""

    def __init__(self, primary: str) -> None:
        self.handovers = Handovers()
        self._stop = threading.Event()
        self._factory = MessagingFactory.from_connection_string(primary, retry_policy=QUICK)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        with self._factory.create_message_receiver(QUEUE) as orders:
            while not self._stop.is_set():
                try:
                    batch = orders.receive_columns(1000, timedelta(seconds=0.5))
                    if batch.num_rows:
                        self._take(orders, batch)
                except MessagingError:
                    time.sleep(0.2)

    def _take(self, orders: MessageReceiver, batch: pa.RecordBatch) -> None:
        """Count a batch before completing it: a completion may succeed while its reply is lost."""
        self.handovers.add(
            batch.column("sequence_number").to_pylist(), batch.column("message_id").to_pylist()
        )
        orders.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)

    def has_all(self, acknowledged: list[str]) -> bool:
        """Whether every acknowledged order was delivered."""
        return all(order in self.handovers.places for order in acknowledged)

    def stop(self) -> None:
        """Wait for the current receive, then stop."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Stop, and close the factory."""
        self.stop()
        self._factory.close()
