"""Outages of a RabbitMQ or a Twinbus server under paired senders: nothing acknowledged is lost.

    python -m tests.soak.rabbitmq_outage --outages 3 [--pair rabbitmq-twinbus]

Senders of a paired factory send on while the primary is killed with -9, paused and started again.
Workers carry the backlog home meanwhile, and some of them die after they sent and before they
settled. At the end everything is received from the primary and compared, in the words of Jepsen:

    ok          the send returned
    lost        the send returned, and the message is nowhere: must be 0
    duplicated  the message is there more than once: into RabbitMQ only, and all copies must carry
                the same origin; into Twinbus 0
    recovered   the send raised an error, and the message is there all the same
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tests.soak.server_process import ServerProcess
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
)
from twinbus.connection import ConnectionString
from twinbus.entities import backlog_queue_path
from twinbus.errors import MessagingError
from twinbus.message import to_messages
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import Disposition, GetRuntimeProperties, Receive, Settle
from twinbus.syphon.carrier import Carrier, Range
from twinbus.syphon.locked_carrier import LockedCarrier, queue_origin
from twinbus.testing import Mover
from twinbus.testing.pausing import resume_process
from twinbus.testing.rabbitmq import RabbitBroker, missing

PAIRS = ("rabbitmq-twinbus", "twinbus-rabbitmq", "rabbitmq-rabbitmq")
PATIENCE = RetryPolicy(operation_timeout=timedelta(seconds=5), try_timeout=timedelta(seconds=1))
QUEUES = 2
SENDERS = 3
SYNC_S = 2  # RabbitMQ loses a quorum queue that was declared less than 0.5 s before a kill -9


class Engine(Protocol):
    """A broker process that the soak kills."""

    def where(self, name: str) -> str: ...

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def start(self) -> None: ...


class Rabbit:
    """A RabbitMQ of one node."""

    def __init__(self, stack: ExitStack) -> None:
        self._broker = stack.enter_context(RabbitBroker())
        self.kill, self.start = self._broker.node.kill, self._broker.node.start
        self.pause, self.resume = self._broker.node.pause, self._broker.node.resume

    def where(self, name: str) -> str:
        """Return its connection string."""
        return self._broker.connection_string(name=name)


class Twinbus:
    """A `twinbus serve`."""

    def __init__(self, stack: ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinbus-soak-")))
        self._server = self._make()
        self._server.start()
        stack.callback(self._server.stop)
        self.kill, self.start = self._server.kill, self._server.start
        self.pause = self._server.freeze

    def _make(self) -> ServerProcess:
        return ServerProcess(self.folder)

    def resume(self) -> None:
        """Let it go on."""
        resume_process(self._server.pid)

    def where(self, name: str) -> str:
        """Return its connection string."""
        given = ConnectionString.parse(self._server.connection_string)
        return replace(given, name=name).to_text()


ENGINES: dict[str, Callable[[ExitStack], Engine]] = {"rabbitmq": Rabbit, "twinbus": Twinbus}


@dataclass
class History:
    """What became of each send."""

    ok: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    successes: list[tuple[float, float]] = field(default_factory=list)  # when they began and ended
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, body: str, began: float, *, is_ok: bool) -> None:
        with self.lock:
            (self.ok if is_ok else self.failed).add(body)
            if is_ok:
                self.successes.append((began, time.monotonic()))

    def first_after(self, moment: float) -> float:
        """Return how long after a moment the first send ended that began after it."""
        with self.lock:
            ends = [ended for began, ended in self.successes if began >= moment]
        return min(ends, default=float("inf")) - moment


class Dying:
    """A namespace as a worker sees it that is killed at its first settlement."""

    def __init__(self, inner: Namespace) -> None:
        self._inner = inner
        self.id = inner.id
        self.capabilities = inner.capabilities
        self._worker = threading.current_thread()

    def submit(self, command: Any) -> Any:
        if not isinstance(command, Settle):
            return self._inner.submit(command)
        if threading.current_thread() is self._worker:
            raise KeyboardInterrupt
        return Future()  # a late reply: nobody is left to settle it

    def ask(self, command: Any, timeout_s: float | None = None) -> Any:
        return self._inner.ask(command, timeout_s)

    def close(self) -> None:
        self._inner.close()


class Run:
    """One pair of brokers, its senders and its workers."""

    engines: ClassVar[dict[str, Callable[[ExitStack], Engine]]] = ENGINES
    doubling: ClassVar[str] = "rabbitmq"  # a primary that may enqueue a message more than once
    ways: ClassVar[tuple[str, ...]] = ("killed", "paused")
    lengths_s: ClassVar[tuple[float, float]] = (1, 4)  # of an outage: from, to
    errors: ClassVar[tuple[type[Exception], ...]] = (MessagingError,)  # that a send may raise

    def __init__(self, stack: ExitStack, pair: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.history = History()
        self.is_over = threading.Event()
        self._stack = stack
        kinds = pair.split("-")
        self.primary_kind = kinds[0]
        self.primary, self.secondary = (self.engines[kind](self._stack) for kind in kinds)
        self.to_divert_s: dict[str, float] = {}  # the longest time to a success, by way
        self.shop, self.backup = self.primary.where("shop"), self.secondary.where("backup")
        with NamespaceManager.from_connection_string(self.shop) as manager:
            manager.create_queue("orders")
        self.pair()
        self.queues = [backlog_queue_path("shop", index) for index in range(QUEUES)]
        time.sleep(SYNC_S)

    def pair(self) -> None:
        """Pair both brokers."""
        factory = MessagingFactory.from_connection_string(self.shop, retry_policy=PATIENCE)
        self._stack.callback(factory.close)
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(self.backup, retry_policy=PATIENCE),
            MessagingFactory.from_connection_string(self.backup, retry_policy=PATIENCE),
            backlog_queue_count=QUEUES,
            failover_interval=timedelta(0),
        )
        options.ping_primary_interval = timedelta(seconds=1)
        factory.pair_namespace(options)
        self.factory = factory

    def sender(self) -> Callable[[str], None]:
        """Return what sends one message with this body."""
        sender = self.factory.create_message_sender("orders")
        return lambda body: sender.send(BrokeredMessage(body.encode()))

    @staticmethod
    def identity(message: BrokeredMessage) -> object:
        """Return what all copies of a message have in common."""
        return message.application_properties.get("x-twinbus-origin")

    def send(self, number: int) -> None:
        """Send until the run is over, one message after the other."""
        send = self.sender()
        at = 0
        while not self.is_over.is_set():
            body, began = f"{number}.{at}", time.monotonic()
            at += 1
            try:
                send(body)
            except self.errors:
                self.history.note(body, began, is_ok=False)
            else:
                self.history.note(body, began, is_ok=True)
            time.sleep(0.002)

    def carry(self, *, until_empty: bool = False) -> None:
        """Carry the backlog home; workers die now and then, unless it must become empty."""
        while not self.is_over.is_set() or until_empty:
            dies = not until_empty and self.random.random() < 0.2
            with ExitStack() as stack:
                primary, secondary = (
                    open_namespace(ConnectionString.parse(text))
                    for text in (self.shop, self.backup)
                )
                stack.callback(primary.close)
                stack.callback(secondary.close)
                try:
                    for queue in self.queues:
                        _visit(primary, Dying(secondary) if dies else secondary, queue)
                    left = [secondary.ask(GetRuntimeProperties(queue), 5) for queue in self.queues]
                except MessagingError:
                    time.sleep(0.2)
                    continue
                if until_empty and not sum(queue.active_message_count for queue in left):
                    return
            time.sleep(0.2)

    def outage(self, number: int) -> str:
        """Let the primary fail in one of the ways, for a while."""
        way = self.ways[number % len(self.ways)]
        length = self.random.uniform(*self.lengths_s)
        end, begin_again = (
            (self.primary.kill, self.primary.start)
            if way == "killed"
            else (self.primary.pause, self.primary.resume)
        )
        end()
        began = time.monotonic()
        time.sleep(length)
        waited_s = self.history.first_after(began)
        begin_again()
        self.to_divert_s[way] = max(self.to_divert_s.get(way, 0.0), waited_s)
        return f"{way} for {length:.1f} s"

    def received(self) -> list[BrokeredMessage]:
        """Receive and complete everything at the primary."""
        found: list[BrokeredMessage] = []
        namespace = open_namespace(ConnectionString.parse(self.shop))
        try:
            while True:
                batch = namespace.ask(Receive("orders", 1000, timedelta(seconds=2)), 30)
                if not batch.num_rows:
                    return found
                tokens = batch.column("lock_token")
                namespace.ask(Settle("orders", tokens, Disposition.COMPLETE), 30)
                found += to_messages(batch)
        finally:
            namespace.close()


def _visit(primary: Namespace, secondary: Any, queue: str) -> None:
    if Capability.RANGES in secondary.capabilities:
        Mover(primary, secondary).move(queue)
        return
    try:
        origin, _ = queue_origin(secondary, queue)
        LockedCarrier(Carrier(primary, secondary), secondary, 5000).carry(
            queue, [Range.under_lock(origin)]
        )
    except KeyboardInterrupt:
        return  # its worker died: closing the connection gives the messages back


@dataclass(frozen=True)
class Verdict:
    """What became of the sends of one pair."""

    pair: str
    ok: int
    lost: int
    duplicated: int
    unnamed: int  # duplicated, and its copies cannot be recognised as such
    recovered: int
    failed: int
    to_divert_s: dict[str, float]  # the longest, by way
    may_double: bool

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost or doubled against the promise."""
        return not self.lost and not self.unnamed and (self.may_double or not self.duplicated)


def play(kind: type[Run], pair: str, outages: int, seed: int) -> Verdict:
    """Play outages of one pair; return what became of the sends."""
    with ExitStack() as stack:
        run = kind(stack, pair, seed)
        stack.callback(run.is_over.set)
        threads = [threading.Thread(target=run.send, args=(n,)) for n in range(SENDERS)]
        threads.append(threading.Thread(target=run.carry))
        for thread in threads:
            thread.start()
        for number in range(outages):
            time.sleep(run.random.uniform(1, 3))
            print(f"{pair}: outage {number + 1}: {run.outage(number)}", flush=True)
            time.sleep(3)
        run.is_over.set()
        for thread in threads:
            thread.join()
        run.carry(until_empty=True)
        return _audit(pair, run)


def _audit(pair: str, run: Run) -> Verdict:
    came = run.received()
    counts = Counter(message.body.decode() for message in came)
    identities: dict[str, set[object]] = {}
    for message in came:
        identities.setdefault(message.body.decode(), set()).add(run.identity(message))
    lost = run.history.ok - set(counts)
    duplicated = {body for body, count in counts.items() if count > 1}
    unnamed = {body for body in duplicated if len(identities[body]) > 1}
    recovered = run.history.failed & set(counts)
    verdict = Verdict(
        pair=pair,
        ok=len(run.history.ok),
        lost=len(lost),
        duplicated=len(duplicated),
        unnamed=len(unnamed),
        recovered=len(recovered),
        failed=len(run.history.failed),
        to_divert_s=run.to_divert_s,
        may_double=run.primary_kind == run.doubling,
    )
    print(
        f"{pair}: {verdict.ok:,} ok, {verdict.lost} lost, {verdict.duplicated} duplicated "
        f"({verdict.unnamed} of them not recognisable), {verdict.recovered} recovered of "
        f"{verdict.failed} failed",
        flush=True,
    )
    return verdict


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--outages", type=int, default=3)
    parser.add_argument("--pair", choices=PAIRS, action="append")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    why = missing()
    if why is not None:
        sys.exit(why)
    print(
        f"replay: python -m tests.soak.rabbitmq_outage --outages {given.outages} "
        f"--seed {given.seed}"
    )
    found = [play(Run, pair, given.outages, given.seed) for pair in given.pair or PAIRS]
    sys.exit(0 if all(outcome.is_good and outcome.ok for outcome in found) else 1)


if __name__ == "__main__":
    main()
