"""Kill -9 the primary of the demo again and again under load, and let the demo's audit judge.

    python -m tests.soak.demo_kills --kills 200 [--seed 7]

Each kill is the story of `twinbus demo` in short: a fleet of paired applications sends, the
primary is killed at a random moment and started again, the syphon brings the diverted orders home,
and the audit of the demo counts every order. Servers, consumer, syphon and Spark are shared by all
kills. In the end the report reconciles the ledgers, which is a second opinion: an order that the
audit misses and the ledgers account for is a false alarm.
"""

import argparse
import logging
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from twinbus import NamespaceManager
from twinbus.cost.prices import load_sheet
from twinbus.cost.report import ReportSettings, make_report
from twinbus.demo.audit import QueuedOrders, browse_queues, examine
from twinbus.demo.fleet import Consumer, Fleet, Recorder
from twinbus.demo.outage import LEDGERS, describe_queue, find_backlog, start_syphon, until
from twinbus.demo.page import Audit
from twinbus.demo.servers import QUEUE, DemoServer
from twinbus.spark.gateway import silence_py4j
from twinbus.spark.session import BorrowedSession

SHOP, BACKUP, APPLICATIONS = LEDGERS
PACE_S = 0.2  # of the fleet: the audit remembers every order of every kill
LOAD_S = (0.2, 1.0)  # how long the fleet sends before a kill
DOWN_S = (0.0, 0.5)  # how long the primary stays down after the first diverted order
CONFIG = '[ledger]\nroll_interval = "1s"\n'  # a kill loses what was metered since


@dataclass
class Outcome:
    """What the audits of all kills found."""

    kills: int = 0
    acknowledged: int = 0
    diverted: int = 0
    redelivered: int = 0
    raised: int = 0
    lost: set[str] = field(default_factory=set)
    doubled: set[str] = field(default_factory=set)
    alarms: dict[int, list[str]] = field(default_factory=dict)  # of audits that failed, by kill
    not_reconciled: int | None = None  # messages; None: nobody looked into the ledgers

    @property
    def false_alarms(self) -> int:
        """How many audits failed although the ledgers account for every message."""
        return 0 if self.not_reconciled else len(self.alarms)

    def add(self, audit: Audit) -> None:
        """Take the audit of a kill in."""
        self.kills += 1
        self.acknowledged += audit.findings.acknowledged
        self.diverted += audit.diverted
        self.redelivered = audit.findings.redelivered  # the consumer counts all kills
        self.raised += audit.raised
        self.lost.update(audit.findings.lost)
        self.doubled.update(audit.findings.doubled)
        if audit.problems:
            self.alarms[self.kills] = audit.problems

    def __str__(self) -> str:
        unknown = "not looked at" if self.not_reconciled is None else f"{self.not_reconciled}"
        return (
            f"{self.kills} kills, {self.acknowledged:,} acknowledged, {self.diverted:,} diverted, "
            f"{self.redelivered:,} redelivered, {self.raised} sends raised: lost {len(self.lost)}, "
            f"doubled {len(self.doubled)}, false alarms {self.false_alarms}, not reconciled "
            f"{unknown}"
        )

    def check(self) -> None:
        """Raise when an order was lost or doubled, or an audit failed for nothing."""
        assert not self.lost, f"lost {len(self.lost)}: {sorted(self.lost)[:5]}"
        assert not self.doubled, f"doubled {len(self.doubled)}: {sorted(self.doubled)[:5]}"
        assert not self.alarms, f"audits failed, by kill: {self.alarms}"
        assert not self.not_reconciled, f"{self.not_reconciled} messages are not accounted for"


class Stage:
    """Two servers, a consumer and a syphon; each kill has a fleet of its own."""

    def __init__(self, folder: Path, seed: int, stack: ExitStack) -> None:
        self._generator = random.Random(seed)
        self._ledger = folder / APPLICATIONS
        config = folder / "demo.toml"
        config.write_text(CONFIG, encoding="utf-8")
        self._primary = stack.enter_context(DemoServer(folder / SHOP, config))
        self._secondary = stack.enter_context(DemoServer(folder / BACKUP, config))
        with NamespaceManager.from_connection_string(self._primary.connection) as manager:
            manager.create_queue(describe_queue())
        self._fleet("first").close()  # its pairings create the backlog queues
        self._queues = find_backlog(self._primary.connection, self._secondary.connection)
        self._consumer = stack.enter_context(Consumer(self._primary.connection))
        self._syphon = stack.enter_context(
            start_syphon(
                self._primary.connection,
                self._secondary.connection,
                self._queues,
                self._ledger,
            )
        )

    def _fleet(self, name: str) -> Fleet:
        ends = self._primary.connection, self._secondary.connection
        return Fleet(*ends, self._ledger, Recorder(), name=f"{name}.app", pace_s=PACE_S)

    def kill(self, number: int) -> Audit:
        """Kill the primary under load, start it again, and count every order."""
        recorder = Recorder()
        moved_before = self._syphon.progress.moved
        with self._fleet(f"kill{number}") as fleet:
            time.sleep(self._generator.uniform(*LOAD_S))
            self._primary.kill()
            until(lambda: fleet.diverted > 0)
            time.sleep(self._generator.uniform(*DOWN_S))
            self._primary.start()
            until(lambda: fleet.is_healthy)
            until(lambda: self._syphon.progress.moved - moved_before >= fleet.diverted)
            fleet.stop()
            until(lambda: self._consumer.has_all(fleet.acknowledged))
            return Audit(
                recorder=recorder,
                findings=examine(fleet.acknowledged, self._consumer.handovers, self._queued()),
                raised=fleet.raised,
                diverted=fleet.diverted,
                moved=self._syphon.progress.moved - moved_before,
                longest_wait_s=fleet.longest_wait_s,
            )

    def _queued(self) -> QueuedOrders:
        return browse_queues(
            self._primary.connection, self._secondary.connection, QUEUE, self._queues
        )

    def close(self) -> None:
        """Stop everything in order; the ledgers are complete then."""
        self._consumer.stop()
        self._syphon.stop()
        self._primary.stop()
        self._secondary.stop()


def run(kills: int, seed: int, *, reconcile: bool = True, progress: bool = False) -> Outcome:
    """Kill so often; return what the audits found."""
    outcome = Outcome()
    with (
        tempfile.TemporaryDirectory(prefix="twinbus-demo-kills-") as place,
        BorrowedSession(None, {}) as spark,
    ):
        folder = Path(place)
        with ExitStack() as stack:
            stage = Stage(folder, seed, stack)
            began = time.monotonic()
            for number in range(1, kills + 1):
                audit = stage.kill(number)
                outcome.add(audit)
                if progress:
                    _print(number, audit, time.monotonic() - began)
            stage.close()
        if reconcile:
            ledgers = [folder / name for name in LEDGERS]
            report = make_report(spark.session, ReportSettings(ledgers, load_sheet("zero")))
            outcome.not_reconciled = report.suspect_count
    return outcome


def _print(number: int, audit: Audit, after_s: float) -> None:
    counts = f"{audit.findings.acknowledged:,} acknowledged, {audit.diverted:,} diverted"
    problems = ", ".join(audit.problems) or "all there once"
    print(f"{after_s:>7.1f} s kill {number:>4}: {counts}: {problems}", flush=True)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    again = f"python -m tests.soak.demo_kills --kills {options.kills} --seed {options.seed}"
    print(f"seed {options.seed}: {again}", flush=True)
    logging.getLogger("twinbus").setLevel(logging.CRITICAL)  # every kill is logged otherwise
    silence_py4j()
    began = time.monotonic()
    outcome = run(options.kills, options.seed, progress=True)
    print(f"{time.monotonic() - began:.0f} s, seed {options.seed}: {outcome}")
    for number, problems in outcome.alarms.items():
        print(f"kill {number}: {', '.join(problems)}")
    outcome.check()


if __name__ == "__main__":
    main()
