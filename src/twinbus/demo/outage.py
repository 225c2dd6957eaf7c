"""The outage of a Twinbus primary: it is killed with -9, and no order is lost.

The demo starts two servers, a fleet of paired applications that send orders, a consumer, and the
syphon on Spark. It kills the primary, and the applications divert their sends to the secondary. It
starts the primary again: a ping succeeds, sends go to the primary again, and the syphon brings the
diverted orders home. At the end the demo counts every order, and writes the report of Twinbus, a
Spark job that computes from the ledgers what happened and what it cost.
"""

import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from twinbus import NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.cost.prices import load_sheet
from twinbus.cost.report import ReportSettings, make_report
from twinbus.demo.audit import browse_queues, examine
from twinbus.demo.display import Display
from twinbus.demo.fleet import BACKLOG_QUEUES, Consumer, Fleet, Recorder
from twinbus.demo.page import Audit, DemoVerdict, demo_page, stage_rows
from twinbus.demo.servers import QUEUE, DemoServer
from twinbus.pairing.backlog_queues import find_backlog_queues
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.spark.gateway import silence_py4j
from twinbus.spark.session import BorrowedSession
from twinbus.syphon.syphon import Syphon, SyphonSettings

LEDGERS = ("shop", "backup", "applications")
LOCK = timedelta(seconds=10)  # much shorter than PATIENCE_S
PATIENCE_S = 240.0  # how long to wait for each condition; each takes seconds on an idle machine


def run_demo(seconds: float, page: Path, *, on_sdk: bool = False) -> bool:
    """Run the demo and write its page; return whether it passed.

    Applications send for `seconds` before, during and after the outage. `on_sdk` means that they
    use the SDK of Azure Service Bus.
    """
    logging.getLogger("twinbus").setLevel(logging.CRITICAL)  # the display shows the same events
    silence_py4j()
    print("starting Spark ...", flush=True)
    with tempfile.TemporaryDirectory() as made, BorrowedSession(None, {}) as spark:
        folder = Path(made)
        with ExitStack() as stack:
            try:
                audit = _play(seconds, folder, stack, on_sdk)
            except KeyboardInterrupt:
                spark.abandon()  # before the stack closes: the syphon would finish its batch
                raise
        print("the report is made from the ledgers ...")
        report = make_report(
            spark.session,
            ReportSettings([folder / name for name in LEDGERS], load_sheet("azure-standard")),
        )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(demo_page(audit, report), encoding="utf-8")
    for name, value in [*audit.rows(), *stage_rows(report)]:
        print(f"{name:<42}{value:>16}")
    print(f"the whole report: {page}")
    lost, doubled = len(audit.findings.lost), len(audit.findings.doubled)
    print(f"lost {lost}   doubled {doubled}   not reconciled {report.suspect_count}")
    verdict = DemoVerdict.of(audit, report.suspect_count)
    print(verdict.headline)
    return verdict.is_good


def describe_queue(*, detects_duplicates: bool = False) -> QueueDescription:
    """Return the queue of orders; its locks are short, as a lost reply leaves orders locked."""
    return QueueDescription(
        path=QUEUE, lock_duration=LOCK, requires_duplicate_detection=detects_duplicates
    )


def _clients(*, on_sdk: bool) -> tuple[type[Fleet], type[Any], Callable[[str], str]]:
    """Return the classes of senders and receivers, and a function of a connection string."""
    if not on_sdk:
        return Fleet, Consumer, str
    from twinbus.demo.service_bus import (  # noqa: PLC0415 - needs the extra `azure`
        ServiceBusConsumer,
        ServiceBusFleet,
        service_bus,
    )

    return ServiceBusFleet, ServiceBusConsumer, service_bus


def _play(seconds: float, folder: Path, stack: ExitStack, on_sdk: bool) -> Audit:  # noqa: FBT001
    recorder = Recorder()
    display = stack.enter_context(Display(recorder))
    config = folder / "demo.toml"
    # Ledger files every second: the kill then loses little of the ledger.
    config.write_text('[ledger]\nroll_interval = "1s"\n', encoding="utf-8")
    primary = stack.enter_context(DemoServer(folder / "shop", config))
    secondary = stack.enter_context(DemoServer(folder / "backup", config))
    recorder.record("two servers are up, a primary and a secondary")
    with NamespaceManager.from_connection_string(primary.connection) as manager:
        # The SDK does not number its sends, so the queue finds repeated sends by the message id.
        manager.create_queue(describe_queue(detects_duplicates=on_sdk))
    ledger = folder / "applications"
    senders, receivers, address_of = _clients(on_sdk=on_sdk)
    home = address_of(primary.connection)
    fleet = stack.enter_context(senders(home, secondary.connection, ledger, recorder))
    consumer = stack.enter_context(receivers(home))
    display.watch(fleet, consumer)
    recorder.record(
        f"{fleet.size} paired applications send, one consumer receives; the syphon starts"
    )
    queues = find_backlog(home, secondary.connection)
    syphon = stack.enter_context(start_syphon(home, secondary.connection, queues, ledger))
    display.watch(fleet, consumer, syphon)
    recorder.record("the syphon is ready")
    time.sleep(seconds)

    recorder.record("kill -9: the primary is down", "killed")  # before its effects
    primary.kill()
    time.sleep(seconds)
    primary.start()
    recorder.record("the primary is started again", "started")
    until(lambda: fleet.is_healthy)
    if until(lambda: syphon.progress.moved >= fleet.diverted):
        recorder.record("every diverted order is home", "home")
    else:
        recorder.record(f"diverted orders were not home after {PATIENCE_S:.0f} s")
    time.sleep(seconds)

    fleet.stop()
    until(lambda: consumer.has_all(fleet.acknowledged))
    consumer.stop()
    syphon.stop()
    fleet.close()
    left = browse_queues(home, secondary.connection, QUEUE, queues)
    for server in (primary, secondary):
        server.stop()  # completes its ledger
    return Audit(
        recorder=recorder,
        findings=examine(fleet.acknowledged, consumer.handovers, left),
        raised=fleet.raised,
        diverted=fleet.diverted,
        moved=syphon.progress.moved,
        longest_wait_s=fleet.longest_wait_s,
    )


def find_backlog(primary: str, secondary: str) -> tuple[str, ...]:
    """Return the backlog queues of the primary."""
    with NamespaceManager.from_connection_string(secondary) as manager:
        identity = PrimaryIdentity.of_connection(ConnectionString.parse(primary))
        return tuple(find_backlog_queues(manager, identity, BACKLOG_QUEUES).paths.values())


def start_syphon(primary: str, secondary: str, queues: tuple[str, ...], ledger: Path) -> Syphon:
    """Start a syphon, and return when it has looked at the backlog."""
    settings = SyphonSettings(primary=primary, secondary=secondary, queues=queues, ledger=ledger)
    syphon = Syphon(settings)
    syphon.wait_until_running()
    return syphon


def until(condition: Callable[[], bool]) -> bool:
    """Wait up to PATIENCE_S until a condition is true; return whether it is."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
