"""A namespace at `sb://` for tests: its server is in this process and refuses what a test names."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.contracts.service_bus import Certificate, service_bus_door
from tests.namespaces import engine_settings
from twinbus import QueueDescription
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString
from twinbus.errors import MessagingError
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import Command, CreateEntity
from twinbus.protocol.requests import Request
from twinbus.testing.server_faults import FaultyServer

QUEUE = "orders"


class RefusingNamespace(EmbeddedNamespace):
    """A broker that refuses commands of a kind, or never answers them; counts them."""

    refusals: dict[type, MessagingError | None]  # None: no answer
    counts: dict[type, int]

    def hand_over(self, requests: Sequence[Request], *, in_own_thread: bool = True) -> None:
        passed = []
        for request in requests:
            kind = type(request.command)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if kind not in self.refusals:
                passed.append(request)
                continue
            error = self.refusals[kind]
            if error is not None:
                request.fail(error)
        super().hand_over(passed, in_own_thread=in_own_thread)


class Site:
    """A server, what it refuses, how it fails its connections, and a client of it."""

    def __init__(
        self,
        broker: RefusingNamespace,
        faults: FaultyServer,
        connection: ConnectionString,
        clock: ManualClock,
    ) -> None:
        self.broker = broker
        self.faults = faults
        self.connection = connection
        self.clock = clock
        self.azure = AzureNamespace(connection, clock)

    def refuse(self, kind: type[Command[Any]], error: MessagingError | None) -> None:
        self.broker.refusals[kind] = error

    def relent(self) -> None:
        self.broker.refusals.clear()
        self.broker.counts.clear()

    def count(self, kind: type[Command[Any]]) -> int:
        return self.broker.counts.get(kind, 0)

    def queue(self, path: str = QUEUE, **settings: Any) -> str:
        self.broker.ask(CreateEntity(QueueDescription(path=path, **settings)))
        return path

    def fresh_queue(self) -> str:
        """Make a queue for one test, and refuse nothing."""
        self.relent()
        return self.queue(f"queue-{uuid4().hex}")


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    clock = ManualClock(datetime.now(UTC))  # the SDK alone signs tokens by the time of day
    with RefusingNamespace(engine_settings(folder / "namespace"), clock) as broker:
        broker.refusals, broker.counts = {}, {}
        with service_bus_door(broker, clock, Certificate(folder)) as (door, connection):
            made = Site(broker, FaultyServer(door), connection, clock)
            try:
                yield made
            finally:
                made.azure.close()
    gc.collect()  # the SDK drops the sockets of lost connections
