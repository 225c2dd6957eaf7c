"""Two servers, paired clients that send at a steady rate, and what becomes of what they sent."""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from tests.soak.server_process import ServerProcess
from tests.waiting import until
from twinbus import (
    BrokeredMessage,
    MessageSender,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.connection import ConnectionString
from twinbus.limits import MIN_SYPHON_LEASE
from twinbus.namespace.contract import Namespace
from twinbus.pairing.cancelling import pages
from twinbus.pairing.events import PairingEvent
from twinbus.pairing.health import HealthState
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command
from twinbus.testing import Mover
from twinbus.testing.pausing import resume_process

QUEUE = "orders"
PRIMARY = "primary"  # its name: backlog queues are called after it
BACKLOG_QUEUES = 3
CLIENTS = 2
DEADLINE_S = 60.0  # of every wait: far longer than anything here takes
PACE_S = 0.02  # between the sends of one thread
POLICY = RetryPolicy(
    operation_timeout=timedelta(seconds=1),
    min_backoff=timedelta(milliseconds=20),
    max_backoff=timedelta(milliseconds=200),
)
PATIENT = replace(  # outwaits a busy server
    POLICY, operation_timeout=timedelta(seconds=30), try_timeout=timedelta(seconds=30)
)
HASTY = replace(  # gives up on ServerBusy, which lasts 10 seconds, but not on a busy machine
    POLICY, operation_timeout=timedelta(seconds=8), try_timeout=timedelta(seconds=8)
)
AT_ONCE = timedelta(0)
PING_INTERVAL = timedelta(seconds=1)
R = TypeVar("R")


# -- clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """A send that raised."""

    message_id: str
    began: float
    error: MessagingError


class Worker:
    """One thread that sends in its way, and keeps the answers."""

    def __init__(self, name: str, sender: MessageSender, generator: random.Random) -> None:
        self.name = name
        self.sent: list[str] = []
        self.acknowledged: dict[str, float] = {}  # and when
        self.successes: list[float] = []  # when sends began that succeeded whole
        self.refused: list[Refusal] = []
        self.trouble = ""  # that is no MessagingError
        self._sender = sender
        self._generator = generator
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"a send of {self.name} does not end"

    def _run(self) -> None:
        try:
            while not self._stop.wait(PACE_S):
                began, refused = time.time(), len(self.refused)
                self._send(began)
                if len(self.refused) == refused:
                    self.successes.append(began)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported to the parent
            self.trouble = f"{self.name}: {error!r:.300}"

    def _send(self, began: float) -> None:
        raise NotImplementedError

    def _next(self, count: int) -> list[BrokeredMessage]:
        first = len(self.sent)
        ids = [f"{self.name}.{first + n}" for n in range(count)]
        self.sent += ids
        body = bytes(self._generator.choice([10, 200, 2000]))
        return [BrokeredMessage(body, message_id=message_id) for message_id in ids]

    def _settle(self, ids: Sequence[str], began: float, send: Callable[[], object]) -> None:
        try:
            send()
        except MessagingError as error:
            self.refused += [Refusal(message_id, began, error) for message_id in ids]
        else:
            self.acknowledged.update(dict.fromkeys(ids, time.time()))


class SingleWorker(Worker):
    """Sends one message after the other."""

    def _send(self, began: float) -> None:
        (message,) = self._next(1)
        assert message.message_id is not None
        self._settle([message.message_id], began, lambda: self._sender.send(message))


class BatchWorker(Worker):
    """Sends batches: all or nothing."""

    def _send(self, began: float) -> None:
        batch = self._next(self._generator.randint(2, 20))
        ids = self.sent[-len(batch) :]
        self._settle(ids, began, lambda: self._sender.send_batch(batch))


class PipelinedWorker(Worker):
    """Keeps many sends in flight; each has its own answer."""

    def _run(self) -> None:
        with self._sender.pipelined() as self._pipeline:
            super()._run()

    def _send(self, began: float) -> None:
        batch = self._next(self._generator.randint(1, 20))
        answers: list[Future[None]] = [self._pipeline.send(message) for message in batch]
        for message_id, answer in zip(self.sent[-len(batch) :], answers, strict=True):
            self._settle([message_id], began, lambda a=answer: a.result(DEADLINE_S))  # type: ignore[misc]


class Client:
    """A paired factory and the threads that send through it."""

    def __init__(self, name: str, twins: "Twins", terms: "Terms", generator: random.Random) -> None:
        self.events: list[PairingEvent] = []
        self.factory = MessagingFactory.from_connection_string(
            terms.primary or twins.reached(twins.primary), retry_policy=terms.policy
        )
        secondary = twins.reached(twins.secondary)
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(secondary, retry_policy=terms.backlog_policy),
            MessagingFactory.from_connection_string(secondary, retry_policy=terms.backlog_policy),
            BACKLOG_QUEUES,
            terms.failover_interval,
            preserve_order=terms.preserve_order,
        )
        options.ping_primary_interval = PING_INTERVAL
        self.pairing = self.factory.pair_namespace(options)
        self.pairing.on_event(self.events.append)
        kinds = (SingleWorker, BatchWorker, PipelinedWorker)
        self.workers: list[Worker] = [
            kind(
                f"{name}.{number}",
                self.factory.create_message_sender(QUEUE),
                random.Random(generator.random()),
            )
            for number, kind in enumerate(kinds)
        ]

    def happened(self, kind: type[PairingEvent]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def moment(self, kind: type[PairingEvent]) -> float:
        """When the first event of a kind was."""
        return next(e.at.timestamp() for e in self.events if isinstance(e, kind))

    def is_healthy(self) -> bool:
        return all(status.state is HealthState.HEALTHY for status in self.pairing.status())


@dataclass(frozen=True, slots=True)
class Terms:
    """How clients are paired."""

    failover_interval: timedelta = AT_ONCE
    policy: RetryPolicy = POLICY  # at the primary
    backlog_policy: RetryPolicy = POLICY
    primary: str = ""  # with which key; empty: that of everything
    preserve_order: bool = False


# -- two servers -----------------------------------------------------------------------------------


class Way(Enum):
    """How clients reach the servers."""

    TWINBUS = "twinbus"  # natively
    AZURE = "sb"  # through the SDK of Azure Service Bus


class Twins:
    """Two servers and the clients of the first."""

    def __init__(
        self, folder: Path, seed: int, limits: str = "", queue: str = "", way: Way = Way.TWINBUS
    ) -> None:
        self.generator = random.Random(seed)
        self.clients: list[Client] = []
        self._way = way
        self._folder = folder
        for name in (PRIMARY, "secondary"):
            (folder / name).mkdir()
        config = f"{limits}\n[[queue]]\npath = '{QUEUE}'\n{queue}"
        self.primary = self._server(PRIMARY, config)
        self.secondary = self._server("secondary")

    @property
    def primary_string(self) -> str:
        return named(self.primary.connection_string)

    def _server(self, name: str, config: str = "") -> ServerProcess:
        folder = self._folder / name
        tls = ["--tls", str(folder / "certificate")] if self._way is Way.AZURE else []
        return ServerProcess(folder, config, *tls)

    def reached(self, server: ServerProcess) -> str:
        """Return the connection string with which clients reach a server."""
        is_primary = server is self.primary
        if self._way is Way.TWINBUS:
            return self.primary_string if is_primary else server.connection_string
        native = ConnectionString.parse(server.connection_string)
        name = PRIMARY if is_primary else "secondary"
        return (
            f"Endpoint=sb://localhost:{server.port};Name={name};"
            f"SharedAccessKeyName={native.key_name};SharedAccessKey={native.key};"
            f"UseDevelopmentEmulator=true;CaFile={self._folder / name / 'certificate' / 'ca.pem'}"
        )

    @property
    def workers(self) -> list[Worker]:
        return [worker for client in self.clients for worker in client.workers]

    def join(self, terms: Terms) -> Client:
        """Let one more client begin to send."""
        client = Client(f"c{len(self.clients)}", self, terms, self.generator)
        self.clients.append(client)
        for worker in client.workers:
            worker.start()
        return client

    def await_sends(self, least: int = 1) -> None:
        """Return when so many sends of every thread succeeded that began after now."""
        now = time.time()
        until(
            lambda: all(sum(when > now for when in w.successes) >= least for w in self.workers),
            "every thread's sends succeed",
        )

    def await_some_sends(self) -> None:
        """Let every thread send for a while."""
        self.await_sends(self.generator.randint(1, 10))

    def await_refusals(self, kind: type[MessagingError]) -> None:
        """Return when every thread has met such an error."""
        until(
            lambda: all(any(isinstance(r.error, kind) for r in w.refused) for w in self.workers),
            f"every thread meets {kind.__name__}",
        )

    def await_event(self, kind: type[PairingEvent]) -> None:
        """Return when every client has seen an event."""
        until(lambda: all(c.happened(kind) for c in self.clients), f"{kind.__name__} everywhere")

    def stop_sending(self) -> None:
        """Let every thread finish its send."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.join()

    def close(self) -> None:
        """End everything, whatever state it is in."""
        for worker in self.workers:
            worker.stop()
        for server in (self.primary, self.secondary):
            if server.is_alive():
                resume_process(server.pid)  # a stopped one could not be talked to
        with ExitStack() as stack:
            for server in (self.primary, self.secondary):
                stack.callback(server.kill)
            for client in self.clients:
                stack.callback(client.factory.close)


def named(connection_string: str) -> str:
    """Return a connection string to the primary under its name."""
    return replace(ConnectionString.parse(connection_string), name=PRIMARY).to_text()


@contextmanager
def twins_at_work(
    seed: int, limits: str = "", queue: str = "", way: Way = Way.TWINBUS
) -> Iterator[Twins]:
    """Start two servers; the caller adds the clients."""
    with tempfile.TemporaryDirectory(prefix="twinbus-pairing-outage-") as place:
        twins = Twins(Path(place), seed, limits, queue, way)
        try:
            with ThreadPoolExecutor() as starters:
                list(starters.map(ServerProcess.start, [twins.primary, twins.secondary]))
            yield twins
        finally:
            twins.close()


# -- the way home ----------------------------------------------------------------------------------


@dataclass
class Homecoming:
    """What the mover did."""

    moved: int = 0  # messages of the backlog
    recognised: int = 0  # of those: the primary had them all along


@dataclass
class Repeating:
    """A primary that gets sends twice now and then, as from one killed before it settled."""

    primary: Namespace
    generator: random.Random

    @property
    def id(self) -> str:
        return self.primary.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.primary.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        if not self.generator.randrange(3):
            self.primary.submit(command).result()
        return self.primary.submit(command)

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        return self.submit(command).result(timeout_s)

    def close(self) -> None:
        self.primary.close()


def bring_home(twins: Twins) -> Homecoming:
    """Move every backlog queue to the primary."""
    had = arrived_at_primary(twins)
    with (
        MessagingFactory.from_connection_string(twins.primary_string) as primary,
        MessagingFactory.from_connection_string(twins.secondary.connection_string) as secondary,
    ):
        queues = [queue.path for queue in twins.clients[0].pairing.backlog_queues()]
        ask = secondary.courier.namespace.ask
        diverted = [page for queue in queues for page in pages(ask, queue)]
        repeating = Repeating(primary.courier.namespace, twins.generator)
        mover = Mover(repeating, secondary.courier.namespace)
        for queue in queues:
            while mover.move(queue):
                pass
    assert not mover.dead_lettered, "messages that cannot go home"
    ids = [message_id for page in diverted for message_id in page.column("message_id").to_pylist()]
    return Homecoming(mover.moved, sum(message_id in had for message_id in ids))


@contextmanager
def syphon_at_work(twins: Twins) -> Iterator[Homecoming]:
    """Bring home what is diverted while the block runs, whatever happens to the servers."""
    home, is_over = Homecoming(), threading.Event()
    with (
        MessagingFactory.from_connection_string(twins.primary_string) as primary,
        MessagingFactory.from_connection_string(twins.secondary.connection_string) as secondary,
    ):
        repeating = Repeating(primary.courier.namespace, twins.generator)
        mover = Mover(repeating, secondary.courier.namespace, lease=MIN_SYPHON_LEASE)
        queues = [queue.path for queue in twins.clients[0].pairing.backlog_queues()]

        def run() -> None:
            while not is_over.wait(PACE_S):
                for queue in queues:
                    with suppress(MessagingError, TimeoutError):
                        mover.move(queue)

        thread = threading.Thread(target=run, name="syphon", daemon=True)
        thread.start()
        try:
            yield home
        finally:
            is_over.set()
            thread.join(DEADLINE_S)
            home.moved = mover.moved
    assert not thread.is_alive(), "the syphon does not end"


def arrived_at_primary(twins: Twins) -> Counter[str]:
    """Count what the primary's queue holds, by message_id; in the order of their first place."""
    arrived: Counter[str] = Counter()
    with MessagingFactory.from_connection_string(twins.primary_string) as factory:
        receiver = factory.create_message_receiver(QUEUE)
        start = 0
        while page := receiver.peek(start, 1000):
            arrived.update(str(message.message_id) for message in page)
            assert page[-1].sequence_number is not None
            start = page[-1].sequence_number + 1
    return arrived


def left_in_backlog(twins: Twins) -> int:
    """Count what the backlog queues hold, dead letters too."""
    with NamespaceManager.from_connection_string(twins.secondary.connection_string) as manager:
        found = [manager.get_runtime_properties(queue.path) for queue in manager.list_queues()]
    return sum(
        properties.active_message_count + properties.dead_letter_message_count
        for properties in found
    )


def sends_to_secondary(twins: Twins) -> list[dict[str, Any]]:
    """Return what the secondary metered of sends."""
    with NamespaceManager.from_connection_string(twins.secondary.connection_string) as manager:
        meter: list[dict[str, Any]] = manager.read_meter().to_pylist()
    return [row for row in meter if row["operation"] == "Send"]
