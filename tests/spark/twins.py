"""Two namespaces behind real doors, and sentences about what is in them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import waiting
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    dead_letter_path,
)
from twinbus.entities import backlog_queue_path
from twinbus.lifetimes import Closable
from twinbus.message import to_batch
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Disposition, Origin, ReadMeter, Send
from twinbus.server.process import Server, ServerSettings
from twinbus.syphon.syphon import Syphon, SyphonSettings

PRIMARY = "contoso"
QUEUE = "orders"
DEADLINE_S = 240.0  # of every wait: far longer than anything here takes


def until(condition: Callable[[], object], what: str) -> None:
    """Return when a condition holds, with the patience that Spark needs."""
    waiting.until(condition, what, DEADLINE_S)


class End(Closable):
    """One namespace, and a client of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._port = 0
        self._opened = ExitStack()
        self.connection = ""
        self.start()

    def start(self) -> None:
        """Open its door, where it was before."""
        settings = ServerSettings(
            directory=self._folder, name=self._name, port=self._port, admin_port=0
        )
        self.server = self._opened.enter_context(Server(settings))
        self.connection = self.connection or self.server.connection_string
        self._port = self.server.door.port
        self.manager = self._opened.enter_context(
            NamespaceManager.from_connection_string(self.connection)
        )
        self.factory = self._opened.enter_context(
            MessagingFactory.from_connection_string(self.connection)
        )

    def stop(self) -> None:
        """Close its door; what it holds stays."""
        self._opened.close()
        self._opened = ExitStack()

    close = stop

    def queue(self, path: str = QUEUE, **settings: Any) -> None:
        self.manager.create_queue(QueueDescription(path=path, **settings))

    def send(self, path: str, *messages: BrokeredMessage) -> None:
        with self.factory.create_message_sender(path) as sender:
            sender.send_batch(list(messages))

    def take(self, path: str = QUEUE) -> list[BrokeredMessage]:
        """Receive and complete everything."""
        taken: list[BrokeredMessage] = []
        with self.factory.create_message_receiver(path) as receiver:
            while batch := receiver.receive_batch(1000, timedelta(0)):
                taken += batch
                for item in batch:
                    item.complete()
        return taken

    def ids(self, path: str = QUEUE) -> list[str]:
        """Take everything; return its message_ids in order."""
        found: list[str] = []
        with self.factory.create_message_receiver(path) as receiver:
            while (batch := receiver.receive_columns(10_000, timedelta(0))).num_rows:
                found += batch.column("message_id").to_pylist()
                receiver.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)
        return found

    def browse(self, path: str) -> list[BrokeredMessage]:
        with self.factory.create_message_receiver(path) as receiver:
            return receiver.peek(0, 1000)

    def count(self, path: str = QUEUE) -> int:
        """Return how many messages a queue holds, dead letters apart."""
        return self.manager.get_runtime_properties(path).active_message_count

    def dead(self, path: str = QUEUE) -> list[BrokeredMessage]:
        return self.browse(dead_letter_path(path))

    def metered(self, operation: str) -> int:
        rows = self.factory.courier.namespace.ask(ReadMeter()).to_pylist()
        return sum(row["count"] for row in rows if row["operation"] == operation)


class Twins(Closable):
    """A primary and a secondary with backlog queues."""

    def __init__(self, folder: Path, queues: int = 3) -> None:
        self.primary = End(folder / "primary", PRIMARY)
        self.secondary = End(folder / "secondary", "backup")
        self.queues = tuple(backlog_queue_path(PRIMARY, index) for index in range(queues))
        for index in range(queues):
            self.secondary.manager.create_queue(
                describe_backlog_queue(PrimaryIdentity(PRIMARY), index)
            )

    def divert(
        self,
        messages: Sequence[BrokeredMessage],
        destination: str = QUEUE,
        queue: int = 0,
        origin: Origin | None = None,
    ) -> None:
        """Put messages into a backlog queue, as a paired sender does."""
        batch = diverted(to_batch(messages), destination, origin)
        self.secondary.factory.courier.namespace.ask(Send(self.queues[queue], batch))

    def divert_ids(self, ids: Iterable[str], destination: str = QUEUE, queue: int = 0) -> list[str]:
        """Divert messages of these identifiers; return them."""
        wanted = list(ids)
        self.divert([BrokeredMessage(b"x", message_id=item) for item in wanted], destination, queue)
        return wanted

    def waiting(self) -> int:
        """Return how many messages the backlog holds."""
        return sum(self.secondary.count(queue) for queue in self.queues)

    def settings(self, **changes: Any) -> SyphonSettings:
        known: dict[str, Any] = {"queues": self.queues, "lease": timedelta(seconds=5)}
        return SyphonSettings(
            primary=self.primary.connection,
            secondary=self.secondary.connection,
            **known | changes,
        )

    def drain(self, **changes: Any) -> Syphon:
        """Run a syphon once, to its end."""
        with Syphon(self.settings(**changes), once=True) as syphon:
            assert syphon.wait(DEADLINE_S), "it did not end"
        return syphon

    def close(self) -> None:
        self.primary.close()
        self.secondary.close()


def numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


def doubled(ids: Iterable[str]) -> list[str]:
    return [key for key, count in Counter(ids).items() if count > 1]
