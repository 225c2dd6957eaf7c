"""A namespace at `sb://` for tests: its server runs in this process and refuses what it is told."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.contracts.keys import ROOT
from tests.contracts.service_bus import Certificate, service_bus
from twinbus import QueueDescription
from twinbus.broker.turn.engine import EngineSettings
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString
from twinbus.errors import MessagingError
from twinbus.ledger import NO_LEDGER
from twinbus.namespace.azure import AzureNamespace
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import Command, CreateEntity, PutKey
from twinbus.protocol.requests import Request

QUEUE = "orders"


class RefusingNamespace(EmbeddedNamespace):
    """A broker that refuses commands of a kind, or never answers them; counts them."""

    refusals: dict[type, MessagingError | None]  # None: no answer
    counts: dict[type, int]

    def hand_over(
        self,
        requests: Sequence[Request],
        *,
        in_own_thread: bool = True,
        on_answers: Callable[[], None] | None = None,
    ) -> None:
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
        super().hand_over(passed, in_own_thread=in_own_thread, on_answers=on_answers)


class Site:
    """A server, what it refuses, and a client of it."""

    def __init__(
        self, broker: RefusingNamespace, connection: ConnectionString, clock: ManualClock
    ) -> None:
        self.broker = broker
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


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    clock = ManualClock(datetime.now(UTC))  # the SDK alone signs tokens by the time of day
    settings = EngineSettings(directory=folder / "namespace", ledger=NO_LEDGER)
    with RefusingNamespace(settings, clock) as broker:
        broker.refusals, broker.counts = {}, {}
        broker.ask(PutKey(ROOT))
        with service_bus(broker, clock, Certificate(folder)) as connection:
            made = Site(broker, connection, clock)
            try:
                yield made
            finally:
                made.azure.close()
