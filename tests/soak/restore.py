"""Restore a primary, a secondary or both from an older copy, with real processes, and count.

    python -m tests.soak.restore [--only secondary-during-running] [--no-report]

Two servers and a paired application. The copy is taken while the servers run: before, during or
after an outage. Then more messages come, one or both servers are killed and their log is replaced
by the copy, and the application goes on, running or restarted. In the end everything is brought
home. Lost is exactly what the copies had lost, nothing is there twice, and the report names every
lost message. The ledger is not restored: it is what knows of the messages that are lost.

Other cases replace the whole directory, with its ledger, as many people do. Nothing else is lost or
doubled then, either. The report names only what the other namespace knows: messages that had come
home to a primary that lost them.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from tests.soak.server_process import ServerProcess
from tests.waiting import until
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
LEDGER_S = 2.5  # the ledger is written every second
CONFIG = '[ledger]\nroll_interval = "1s"\n'
WHICH = {"primary": {"primary"}, "secondary": {"secondary"}, "both": {"primary", "secondary"}}
WHEN = ("before", "during", "after")
POLICY = RetryPolicy(
    operation_timeout=timedelta(seconds=2), max_backoff=timedelta(milliseconds=200)
)


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    which: str
    when: str
    is_restarted: bool  # the application
    is_whole: bool = False  # the ledger is restored, too

    @property
    def name(self) -> str:
        application = "restarted" if self.is_restarted else "running"
        return f"{self.which}-{self.when}-{application}{'-whole' if self.is_whole else ''}"


CASES = [Case(a, b, c) for a in WHICH for b in WHEN for c in (False, True)]
CASES += [Case(which, when, is_restarted=False, is_whole=True) for which in WHICH for when in WHEN]


@dataclass
class Outcome:
    """What became of the messages of a case."""

    acknowledged: set[str]
    kept: set[
        str
    ]  # what the copies and the servers that were not restored had, and what came later
    received: Counter[str]
    ledgers: list[Path]
    known: set[str]  # lost messages that the ledgers know of
    named: set[str] = field(default_factory=set)  # by the report

    @property
    def lost(self) -> set[str]:
        return self.acknowledged - set(self.received)

    def check(self) -> None:
        """Fail if more was lost than the copies had lost, or something came twice."""
        assert self.lost == self.acknowledged - self.kept, sorted(self.kept - set(self.received))
        doubled = {key: count for key, count in self.received.items() if count > 1}
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
            item = f"{phase}{number}"
            self._sender.send(BrokeredMessage(item.encode(), message_id=item))
            self.acknowledged.append(item)

    def fail(self) -> None:
        """Kill the primary, and divert."""
        self.servers["primary"].kill()

    def mend(self) -> None:
        """Start the primary again, and wait for the pings to find out."""
        self.servers["primary"].start()
        until(self.is_healthy, "the entity is back")

    def is_healthy(self) -> bool:
        return all(item.state is HealthState.HEALTHY for item in self.pairing.status())

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
        """Copy both directories as a backup does, while the servers run if they do."""
        found: dict[str, set[str]] = {}
        for name, server in self.servers.items():
            if server.is_alive():
                found[name] = self.ids(name)
            until(partial(self._try_to_copy, name), "a directory is copied")
        return Copies(found)

    def _try_to_copy(self, name: str) -> bool:
        """Copy a directory; return False if the server renamed a file meanwhile."""
        target = self.folder / "copy" / name
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(self.folder / name / "namespace", target, copy_function=shutil.copy)
        except shutil.Error:
            return False
        return True

    def restore(self, which: set[str], *, is_whole: bool) -> None:
        """Replace the logs of servers by their copies, or their whole directories."""
        time.sleep(LEDGER_S)
        for name in which:
            self.servers[name].kill()
            for part in ("",) if is_whole else ("log", "spill"):
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

    message_ids: dict[str, set[str]]


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
            copies.message_ids["primary"] = on_primary  # it is down, and its directory rests
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
        found = {name: site.ids(name) for name in site.servers}
        found |= {name: copies.message_ids[name] for name in WHICH[case.which]}
        site.restore(WHICH[case.which], is_whole=case.is_whole)
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
        kept = found["primary"] | found["secondary"] | set(site.acknowledged[later:])
        ledgers = [folder / name / "namespace" for name in site.servers]
        known = set(site.acknowledged) - set(received)
        if case.is_whole:  # those of the first outage had come home
            known = (
                {each for each in known if each[0] in "bc"} if case.which == "primary" else set()
            )
        return Outcome(set(site.acknowledged), kept, received, [*ledgers, folder / "syphon"], known)


def report(spark: SparkSession, outcome: Outcome) -> None:
    """Let the report name every lost message that a ledger knows of; it names nothing else."""
    assert all((folder / FOLDER).is_dir() for folder in outcome.ledgers)
    made = make_report(spark, ReportSettings(outcome.ledgers, load_sheet("zero")))
    outcome.named = {row.message_id or "" for row in made.suspects}
    assert outcome.named == outcome.known, (sorted(outcome.named), sorted(outcome.known))


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
