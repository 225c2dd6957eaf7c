"""Restore a primary, a secondary or both from an older copy, with real processes, and count.

    python -m tests.soak.restore [--only secondary-during-running] [--no-report]

Two servers and a paired application. The copy is taken while the servers run: before, during or
after an outage. Then more messages come, one or both servers are killed and their log is replaced
by the copy, and the application goes on, running or restarted. In the end everything is brought
home. Lost is exactly what the copies had lost, nothing is there twice, and the report names every
lost message. The ledger is not restored: it is what knows of the messages that are lost.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from pyspark.sql import SparkSession

from tests.soak.server_process import ServerProcess
from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    SendAvailabilityPairing,
)
from twinbus.connection import ConnectionString
from twinbus.cost.prices import load_sheet
from twinbus.cost.report import ReportSettings, make_report
from twinbus.entities import backlog_queue_path
from twinbus.ledger import FOLDER
from twinbus.namespace.opening import open_namespace
from twinbus.pairing.health import HealthState
from twinbus.protocol.commands import Disposition
from twinbus.spark.session import start_session
from twinbus.syphon.transfers import TransferLedger
from twinbus.testing import Mover

ORDERS, PRIMARY = "orders", "namespace"  # a server calls itself after its directory
QUEUES = 2
DEADLINE_S = 60.0
LEDGER_S = 2.5  # the ledger is written every second
CONFIG = '[ledger]\nroll_interval = "1s"\n'
WHICH = {"primary": {"primary"}, "secondary": {"secondary"}, "both": {"primary", "secondary"}}
WHEN = ("before", "during", "after")
POLICY = RetryPolicy(
    operation_timeout=timedelta(seconds=2), max_backoff=timedelta(milliseconds=200)
)


def until(condition: Callable[[], object], what: str) -> None:
    """Return when a condition holds; fail when it does not in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    which: str
    when: str
    is_restarted: bool  # the application

    @property
    def name(self) -> str:
        return f"{self.which}-{self.when}-{'restarted' if self.is_restarted else 'running'}"


CASES = [Case(a, b, c) for a in WHICH for b in WHEN for c in (False, True)]


@dataclass
class Outcome:
    """What became of the messages of a case."""

    acknowledged: set[str]
    kept: set[
        str
    ]  # what the copies and the servers that were not restored had, and what came later
    received: Counter[str]
    ledgers: list[Path]
    named: set[str] = field(default_factory=set)  # by the report

    @property
    def lost(self) -> set[str]:
        return self.acknowledged - set(self.received)

    def check(self) -> None:
        """Fail if more was lost than the copies had lost, or something came twice."""
        assert self.lost == self.acknowledged - self.kept, sorted(self.kept - set(self.received))
        doubled = {one: count for one, count in self.received.items() if count > 1}
        assert not doubled, doubled


class Site:
    """Two servers, an application, and what brings messages home."""

    def __init__(self, folder: Path, life: ExitStack) -> None:
        self.folder = folder
        self.servers: dict[str, ServerProcess] = {}
        for name in ("primary", "secondary"):
            (folder / name).mkdir()
            server = ServerProcess(folder / name, CONFIG)
            self.servers[name] = server
            life.callback(server.kill)
            server.start()
        self.acknowledged: list[str] = []
        self._transfers = TransferLedger(folder / "syphon")
        self._application: ExitStack = life.enter_context(ExitStack())
        with self.manager("primary") as manager:
            manager.create_queue(QueueDescription(path=ORDERS))
        self.begin_application()

    def connection(self, name: str) -> str:
        return self.servers[name].connection_string

    @contextmanager
    def manager(self, name: str) -> Iterator[NamespaceManager]:
        with NamespaceManager.from_connection_string(self.connection(name)) as manager:
            yield manager

    def begin_application(self) -> None:
        """Start the application, or start it again."""
        self._application.close()
        away = self.connection("secondary")
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(away),
            MessagingFactory.from_connection_string(away),
            backlog_queue_count=QUEUES,
            failover_interval=timedelta(0),
        )
        options.ping_primary_interval = timedelta(seconds=1)
        factory = MessagingFactory.from_connection_string(
            self.connection("primary"), retry_policy=POLICY
        )
        self._application.enter_context(factory)
        self.pairing: SendAvailabilityPairing = factory.pair_namespace(options)
        self._sender = factory.create_message_sender(ORDERS)

    def send(self, phase: str, count: int) -> None:
        """Send; all of it is acknowledged, by the primary or by the backlog."""
        for number in range(count):
            one = f"{phase}{number}"
            self._sender.send(BrokeredMessage(one.encode(), message_id=one))
            self.acknowledged.append(one)

    def fail(self) -> None:
        """Kill the primary, and divert."""
        self.servers["primary"].kill()

    def mend(self) -> None:
        """Start the primary again, and wait for the pings to find out."""
        self.servers["primary"].start()
        until(self.is_healthy, "the entity is back")

    def is_healthy(self) -> bool:
        return all(one.state is HealthState.HEALTHY for one in self.pairing.status())

    def bring_home(self) -> None:
        """Move what lies in the backlog."""
        places = [ConnectionString.parse(self.connection(n)) for n in ("primary", "secondary")]
        with ExitStack() as opened:
            primary, secondary = (open_namespace(place) for place in places)
            opened.callback(primary.close)
            opened.callback(secondary.close)
            mover = Mover(primary, secondary, transfers=self._transfers)
            for index in range(QUEUES):
                queue = backlog_queue_path(PRIMARY, index)
                while mover.move(queue):
                    pass

    def ids(self, name: str) -> set[str]:
        """Return what a server holds: orders at home, diverted ones in the backlog."""
        paths = [ORDERS]
        if name == "secondary":
            paths = [backlog_queue_path(PRIMARY, index) for index in range(QUEUES)]
        found: set[str] = set()
        with MessagingFactory.from_connection_string(self.connection(name)) as factory:
            for path in paths:
                with factory.create_message_receiver(path) as receiver:
                    found |= {message.message_id for message in receiver.peek(0, 1000)}
        return found

    def copy(self) -> "Copies":
        """Copy both logs as a backup does, while the servers run if they do."""
        held: dict[str, set[str]] = {}
        for name, server in self.servers.items():
            if server.is_alive():
                held[name] = self.ids(name)
            for part in ("log", "spill"):
                source = self.folder / name / "namespace" / part
                target = self.folder / "copy" / name / part
                shutil.copytree(source, target, copy_function=shutil.copy)
        return Copies(held)

    def restore(self, which: set[str]) -> None:
        """Replace the logs of servers by their copies; the ledgers stay."""
        time.sleep(LEDGER_S)
        for name in which:
            self.servers[name].kill()
            for part in ("log", "spill"):
                place = self.folder / name / "namespace" / part
                shutil.rmtree(place)
                shutil.copytree(self.folder / "copy" / name / part, place)
            self.servers[name].start()

    def drain(self) -> Counter[str]:
        """Receive and complete everything that is home."""
        found: Counter[str] = Counter()
        with (
            MessagingFactory.from_connection_string(self.connection("primary")) as factory,
            factory.create_message_receiver(ORDERS) as receiver,
        ):
            while (batch := receiver.receive_columns(1000, timedelta(0))).num_rows:
                found.update(batch.column("message_id").to_pylist())
                receiver.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)
        return found


@dataclass
class Copies:
    """What the servers held when the copy was taken."""

    held: dict[str, set[str]]


def play(case: Case, folder: Path) -> Outcome:
    """Play one case."""
    with ExitStack() as life:
        site = Site(folder, life)
        copies: Copies | None = None
        site.send("a", 8)
        if case.when == "before":
            copies = site.copy()
        on_primary = site.ids("primary")
        site.fail()
        site.send("b", 6)
        if case.when == "during":
            copies = site.copy()
            copies.held["primary"] = on_primary  # it is down, and its directory rests
        site.send("c", 6)
        site.mend()
        site.bring_home()
        site.send("d", 4)
        if case.when == "after":
            copies = site.copy()
        assert copies is not None
        site.fail()
        site.send("e", 10)
        site.mend()  # and what was diverted stays in the backlog
        held = {name: site.ids(name) for name in site.servers}
        held |= {name: copies.held[name] for name in WHICH[case.which]}
        site.restore(WHICH[case.which])
        if case.is_restarted:
            site.begin_application()
        until(site.is_healthy, "the entity is back")
        later = len(site.acknowledged)
        site.send("f", 4)
        site.fail()
        site.send("g", 30)  # more than was lost: the numbers of the lost ones are given again
        site.mend()
        site.bring_home()
        assert not site.ids("secondary")
        time.sleep(LEDGER_S)
        received = site.drain()
        for server in site.servers.values():
            server.stop()
        kept = held["primary"] | held["secondary"] | set(site.acknowledged[later:])
        ledgers = [folder / name / "namespace" for name in site.servers]
        return Outcome(set(site.acknowledged), kept, received, [*ledgers, folder / "syphon"])


def report(spark: SparkSession, outcome: Outcome) -> None:
    """Let the report name what is lost; it names nothing else."""
    assert all((folder / FOLDER).is_dir() for folder in outcome.ledgers)
    made = make_report(spark, ReportSettings(outcome.ledgers, load_sheet("zero")))
    outcome.named = {row.message_id or "" for row in made.suspects}
    assert outcome.named == outcome.lost, (sorted(outcome.named), sorted(outcome.lost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one case, as they are printed")
    parser.add_argument("--no-report", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in (None, case.name)]
    if not cases:
        sys.exit(f"there is no case {options.only}; there are: {', '.join(c.name for c in CASES)}")
    with ExitStack() as life:
        spark = None
        if not options.no_report:
            spark = start_session(Path(life.enter_context(tempfile.TemporaryDirectory())))
            life.callback(spark.stop)
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                outcome = play(case, Path(folder))
                outcome.check()
                if spark is not None:
                    report(spark, outcome)
            print(
                f"{case.name:32} {len(outcome.acknowledged)} acknowledged, "
                f"{len(outcome.lost)} lost with the copy, {len(outcome.named)} named, 0 doubled, "
                "0 taken for known wrongly",
                flush=True,
            )


if __name__ == "__main__":
    main()
