"""The sentences the tests of pairing are written in: two namespaces and all between them."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, TypeVar
from uuid import UUID

import pytest

from tests.contracts.service_bus import Certificate, service_bus
from tests.namespaces import address_of, door_of, embedded
from twinbus import (
    BrokeredMessage,
    MessageSender,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    ReceiveMode,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.broker.store.storage import DiskStorage
from twinbus.broker.turn.engine import Storages
from twinbus.clock import ManualClock
from twinbus.connection import ConnectionString
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import to_batch, to_messages
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.pairing.events import PairingEvent
from twinbus.pairing.health import HealthState
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Command, Peek, Receive, Send
from twinbus.syphon.carrier import Carrier, Range
from twinbus.syphon.locked_carrier import LockedCarrier, queue_origin
from twinbus.testing import Fault, FaultyNamespace, Mover

R = TypeVar("R")
PRIMARY, SECONDARY = "contoso", "backup"
ORDERS, INVOICES, SESSIONS, NEWS = "orders", "invoices", "sessions", "news"
SUBSCRIPTION = f"{NEWS}/Subscriptions/eu"
AT_ONCE = timedelta(0)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
MANY = 1000
WAYS = ["embedded", "server", "sb"]
ALIASES = ("x-ms-path", "x-ms-sessionid", "x-ms-timetolive", "x-ms-scheduledenqueuetimeutc")


class Tap:
    """A namespace that remembers what it was asked and when, and refuses what a test says."""

    def __init__(self, inner: Namespace, clock: ManualClock) -> None:
        self.inner = inner
        self.asked: list[tuple[datetime, Command[Any]]] = []
        self.refusal: Callable[[Command[Any]], MessagingError | None] = lambda _: None
        self.is_closed = False
        self._clock = clock

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.inner.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        self.asked.append((self._clock.now(), command))
        error = self.refusal(command)
        if error is None:
            return self.inner.submit(command)
        refused: Future[R] = Future()
        refused.set_exception(error)
        return refused

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        self.asked.append((self._clock.now(), command))
        error = self.refusal(command)
        if error is not None:
            raise error
        return self.inner.ask(command, timeout_s)

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()

    def refuse(self, error: MessagingError, kind: type = Send, path: str | None = None) -> None:
        """Refuse every command of a kind, about one entity or any."""

        def refusal(command: Command[Any]) -> MessagingError | None:
            about = getattr(command, "path", None)
            is_meant = isinstance(command, kind) and path in (None, about)
            return error if is_meant else None

        self.refusal = refusal

    def relent(self) -> None:
        self.refusal = lambda _: None

    def sends(self, path: str | None = None) -> list[Send]:
        """Return the sends so far that carry messages of the application."""
        sent = [command for _, command in self.asked if isinstance(command, Send)]
        meant = [
            command for command in sent if path is None or command.path.lower() == path.lower()
        ]
        return [command for command in meant if not is_ping(command)]

    def pings(self, path: str | None = None) -> list[tuple[datetime, BrokeredMessage]]:
        """Return the pings so far, and when each was sent."""
        return [
            (at, sent(command)[0])
            for at, command in self.asked
            if is_ping(command)
            and (path is None or getattr(command, "path", "").lower() == path.lower())
        ]


def sent(command: Command[Any]) -> list[BrokeredMessage]:
    """Return the messages of a send."""
    assert isinstance(command, Send)
    found = command.messages
    return list(found) if isinstance(found, list | tuple) else to_messages(found)


def is_ping(command: Command[Any]) -> bool:
    if not isinstance(command, Send):
        return False
    return [message.content_type for message in sent(command)] == [PING_CONTENT_TYPE]


class _Kept:
    """A namespace that outlives those who close it."""

    def __init__(self, inner: Namespace) -> None:
        self.id = inner.id
        self.capabilities = inner.capabilities
        self.submit = inner.submit
        self.ask = inner.ask

    def close(self) -> None:
        pass


class _Memory(DiskStorage):
    """A disk that does not wait for its platters: no test of pairing cuts the power."""

    def sync(self, descriptor: int) -> None:
        pass


@dataclass
class End:
    """One of the two namespaces, with a factory, a manager, and ways to look behind them."""

    name: str
    clock: ManualClock
    connect: Callable[[], Namespace]
    where: ConnectionString | None = None  # of a server
    engine_id: str = ""  # of the namespace behind that server
    seed: int = 7
    faults: FaultyNamespace = field(init=False)  # between the factory and the namespace
    tap: Tap = field(init=False)  # what the factory asks
    manager_tap: Tap = field(init=False)
    factory: MessagingFactory = field(init=False)
    manager: NamespaceManager = field(init=False)
    inner: Namespace = field(init=False)  # straight to it
    root: NamespaceManager = field(init=False)

    def __post_init__(self) -> None:
        self.faults = FaultyNamespace(self.connect())
        self.tap = Tap(self.faults, self.clock)
        self.manager_tap = Tap(self.connect(), self.clock)
        self.factory = MessagingFactory(
            self.tap, name=self.name, clock=self.clock, random=Random(self.seed)
        )
        self.manager = NamespaceManager(self.manager_tap, clock=self.clock)
        self.inner = self.connect()
        self.root = NamespaceManager(self.connect(), clock=self.clock)

    def need(self, capability: Capability) -> None:
        """Skip the test where the namespace lacks a capability."""
        if capability not in self.inner.capabilities:
            pytest.skip(f"needs {capability.name}")

    def take(self, path: str = ORDERS) -> list[str]:
        """Receive and delete what is there now; return the bodies."""
        batch = self.inner.ask(Receive(path, MANY, mode=ReceiveMode.RECEIVE_AND_DELETE))
        return bodies(to_messages(batch))

    def peek(self, path: str = ORDERS) -> list[BrokeredMessage]:
        return to_messages(self.inner.ask(Peek(path, 0, MANY)))

    def meter(self) -> Mapping[tuple[str, str, str], tuple[int, int]]:
        """Return operations and messages by entity, kind and outcome."""
        self.need(Capability.METERING)
        rows = self.root.read_meter().to_pylist()
        return {
            (row["path"], row["operation"], row["outcome"]): (row["count"], row["messages"])
            for row in rows
            if row["operation"] != "ReadMeter"
        }

    def close(self) -> None:
        for part in (self.factory, self.manager, self.root, self.inner):
            part.close()


class SyphonStandIn:
    """What a syphon is to a pairing: it is started, and it stops."""

    def __init__(self) -> None:
        self.pairing: SendAvailabilityPairing | None = None
        self.stops = 0
        self.while_stopping: Callable[[], None] = lambda: None

    def __call__(self, pairing: SendAvailabilityPairing) -> "SyphonStandIn":
        self.pairing = pairing
        return self

    def stop(self) -> None:
        self.stops += 1
        self.while_stopping()


@dataclass
class Pair:
    """Two namespaces and what became of them."""

    clock: ManualClock
    primary: End
    secondary: End
    events: list[PairingEvent] = field(default_factory=list)
    pairing: SendAvailabilityPairing = field(init=False, repr=False)
    syphon: SyphonStandIn = field(default_factory=SyphonStandIn)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def options(self, **settings: Any) -> SendAvailabilityPairedNamespaceOptions:
        ping = settings.pop("ping_primary_interval", None)
        options = SendAvailabilityPairedNamespaceOptions(
            self.secondary.manager, self.secondary.factory, **settings
        )
        if ping is not None:
            options.ping_primary_interval = ping
        return options

    def further_options(self, **settings: Any) -> SendAvailabilityPairedNamespaceOptions:
        """Return options of a second pairing, which needs a secondary factory of its own."""
        return Pair(self.clock, self.primary, replace(self.secondary)).options(**settings)

    def begin(self, **settings: Any) -> SendAvailabilityPairing:
        """Pair; few queues by default, and the failover is that of the options."""
        settings = {"backlog_queue_count": 2} | settings
        self.pairing = self.primary.factory.pair_namespace(self.options(**settings))
        self.pairing.on_event(self.hear)
        return self.pairing

    def begin_with_syphon(self, **settings: Any) -> SendAvailabilityPairing:
        return self.begin(enable_syphon=True, syphon=self.syphon, **settings)

    def hear(self, event: PairingEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def announced(self, kind: type[PairingEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[PairingEvent], count: int = 1) -> Any:
        """Return the event when it has come: a server answers a ping from another thread."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.announced(kind)) >= count, timeout=20)
        return self.announced(kind)[count - 1]

    # -- what happens --------------------------------------------------------------------------

    def break_down(self, path: str | None = ORDERS, fault: Fault = Fault.UNAVAILABLE) -> None:
        """Let every request to an entity of the primary fail."""
        self.primary.faults.inject(fault, path)

    def heal(self) -> None:
        self.primary.faults.heal()
        self.primary.tap.relent()

    def fail_over(self, path: str = ORDERS, *texts: str) -> None:
        """Break an entity and send to it until it has failed over."""
        self.break_down(path)
        for text in texts or ("first",):
            self.sender(path).send(message(text, session_id="s"))
        assert self.state(path) is HealthState.FAILED_OVER

    def break_backlog(self, *indices: int, fault: Fault = Fault.UNAVAILABLE) -> None:
        for index in indices:
            self.secondary.faults.inject(fault, backlog(index))

    def pass_time(self, span: timedelta | None = None, **parts: float) -> None:
        self.clock.advance(span or timedelta(**parts))

    def set_back(self, **span: float) -> None:
        self.clock.advance(-timedelta(**span))

    def sender(self, path: str = ORDERS) -> MessageSender:
        return self.primary.factory.create_message_sender(path)

    def send(self, *texts: str, path: str = ORDERS, **fields: Any) -> None:
        """Send each by a new client."""
        for text in texts or ("order",):
            self.sender(path).send(message(text, **fields))

    # -- what can be seen ----------------------------------------------------------------------

    def state(self, path: str = ORDERS) -> HealthState:
        found = [
            status.state for status in self.pairing.status() if status.path.lower() == path.lower()
        ]
        assert len(found) <= 1
        return found[0] if found else HealthState.HEALTHY

    def backlog_by_queue(self) -> list[list[BrokeredMessage]]:
        """Return what each backlog queue of the primary holds."""
        return [
            self.secondary.peek(queue.path)
            for queue in self.secondary.root.list_queues()
            if queue.path.lower().startswith(f"{PRIMARY}/x-servicebus-transfer/")
        ]

    def backlog(self) -> list[BrokeredMessage]:
        """Return all diverted messages as they are."""
        return [message for queue in self.backlog_by_queue() for message in queue]

    def diverted(self) -> list[str]:
        return bodies(self.backlog())

    def in_rotation(self) -> list[bool]:
        return [queue.is_in_rotation for queue in self.pairing.backlog_queues()]

    def bring_home(self) -> None:
        """Do as a syphon does: deliver everything in the backlog, each message known by origin."""
        if Capability.RANGES not in self.secondary.inner.capabilities:
            self._bring_home_under_lock()
            return
        mover = Mover(self.primary.inner, self.secondary.inner)
        for queue in self.pairing.backlog_queues():
            while mover.move(queue.path):
                pass
        assert not mover.dead_lettered

    def _bring_home_under_lock(self) -> None:
        secondary = self.secondary.inner
        carrier = LockedCarrier(Carrier(self.primary.inner, secondary), secondary, MANY)
        for queue in self.pairing.backlog_queues():
            origin, _ = queue_origin(secondary, queue.path)
            [carried] = carrier.carry(queue.path, [Range.under_lock(origin)])
            assert not carried.failures
            assert not carried.poison


@contextmanager
def opened(way: str, directory: Path, *, threaded: bool = False) -> Iterator[Pair]:
    """Give two namespaces, reached in one of the WAYS."""
    clock = ManualClock()
    with ExitStack() as stack:
        ends = [
            stack.enter_context(closing(_end(way, name, directory / name, clock, stack, threaded)))
            for name in (PRIMARY, SECONDARY)
        ]
        primary, secondary = ends
        for path in (ORDERS, INVOICES):
            primary.root.create_queue(path)
        primary.root.create_queue(QueueDescription(path=SESSIONS, requires_session=True))
        primary.root.create_topic(NEWS)
        primary.root.create_subscription(NEWS, "eu")
        yield Pair(clock, primary, secondary)


def _end(
    way: str, name: str, directory: Path, clock: ManualClock, stack: ExitStack, threaded: bool
) -> End:
    is_server = way != "embedded"
    disks = Storages(log=_Memory(), spill=_Memory())
    namespace = stack.enter_context(
        embedded(directory, clock, disks, threaded=threaded or is_server)
    )
    if way == "embedded":
        return End(name, clock, lambda: _Kept(namespace))
    if way == "sb":
        address = stack.enter_context(service_bus(namespace, clock, _certificate(), name))
        return End(name, clock, lambda: open_namespace(address, clock), address)
    where = address_of(stack.enter_context(door_of(namespace, clock)))
    return End(name, clock, lambda: open_namespace(where, clock), where, namespace.id)


@cache
def _certificate() -> Certificate:
    return Certificate(Path(mkdtemp(prefix="twinbus-certificate-")))


def backlog(index: int, primary: str = PRIMARY) -> str:
    return f"{primary}/x-servicebus-transfer/{index}"


def message(text: str = "order", **fields: Any) -> BrokeredMessage:
    return BrokeredMessage(body=text.encode(), **fields)


def messages(*texts: str) -> list[BrokeredMessage]:
    return [message(text) for text in texts]


def columns(*texts: str) -> Any:
    return to_batch(messages(*texts))


def bodies(found: list[BrokeredMessage]) -> list[str]:
    return [message.body.decode() for message in found]


TICK = timedelta(microseconds=1)
OF_EVERY_TYPE: dict[str, Any] = {
    "str": "grüße",
    "int": -(2**63),
    "float": 0.1,
    "bool": True,
    "bytes": b"\x00\xff",
    "datetime": datetime(2031, 2, 3, 4, 5, 6, 7, tzinfo=UTC),
    "timedelta": timedelta(days=-1, microseconds=1),
    "uuid": UUID(int=2**127 + 1),
}


def pipelined(sender: MessageSender, *texts: str) -> None:
    send_pipelined(sender, *messages(*texts))


def send_pipelined(sender: MessageSender, *sent: BrokeredMessage) -> None:
    """Send without waiting, then wait; raise the first error."""
    with sender.pipelined() as pipeline:
        futures = [pipeline.send(message) for message in sent]
    for future in futures:
        future.result(timeout=0)


def one_by_one(sender: MessageSender, *texts: str) -> None:
    for message in messages(*texts):
        sender.send(message)


FORMS: dict[str, Callable[[MessageSender], None]] = {
    "single": lambda sender: one_by_one(sender, "a", "b"),
    "batch": lambda sender: sender.send_batch(messages("a", "b")),
    "columns": lambda sender: sender.send_batch(columns("a", "b")),
    "pipelined": lambda sender: pipelined(sender, "a", "b"),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def sized(size: int) -> BrokeredMessage:
    """Return a message of so many bytes."""
    empty = BrokeredMessage(message_id="id")
    return BrokeredMessage(body=bytes(size - empty.size), message_id="id")


def delayed(pair: Pair) -> threading.Event:
    """Hold the next send of the primary factory up until the event is set."""
    go_on = threading.Event()

    def refusal(_: object) -> None:
        pair.primary.tap.relent()
        assert go_on.wait(20)

    pair.primary.tap.refusal = refusal
    return go_on
