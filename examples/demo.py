"""The whole story: a broker is killed with -9, and nobody loses an order.

    python examples/demo.py [--seconds 8] [--report outage.html]

Two servers, a fleet of paired applications that send orders, a consumer, and the syphon on Spark.
The primary is killed and stays down: sends are diverted to the secondary. It is started again:
pings find it, sends return, the syphon brings the diverted orders home. At the end every order is
counted, and the report of Twinbus, a job on Spark, tells from the ledgers what happened and cost.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from demo_display import Display
from demo_fleet import Consumer, Fleet, Recorder
from demo_report import Audit, stage_rows, write_page
from shop import QUEUE, Server

from twinbus import NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.pipeline.gateway import silence_py4j
from twinbus.pipeline.prices import load_sheet
from twinbus.pipeline.report import ReportSettings, make_report
from twinbus.pipeline.spark import BorrowedSession
from twinbus.pipeline.syphon import Syphon, SyphonSettings, find_backlog_queues

LEDGERS = ("shop", "backup", "applications")
PATIENCE_S = 60.0  # for anything here to happen: far longer than it takes


INTERRUPTED = 130  # the exit code of Ctrl-C, as shells report it


def main() -> None:
    """Tell the story, and say by the exit code how it ended."""
    try:
        _tell()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _tell() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="of each act")
    parser.add_argument("--report", type=Path, default=Path("build/outage.html"))
    options = parser.parse_args()
    logging.getLogger("twinbus").setLevel(logging.CRITICAL)  # the display tells the same
    silence_py4j()
    print("starting Spark ...", flush=True)
    with tempfile.TemporaryDirectory() as made, BorrowedSession(None, {}) as spark:
        folder = Path(made)
        with ExitStack() as stack:
            try:
                audit = _play(options.seconds, folder, stack)
            except KeyboardInterrupt:
                spark.abandon()  # first: the syphon would finish its batch
                raise
        print("the report is made from the ledgers ...")
        report = make_report(
            spark.session,
            ReportSettings([folder / name for name in LEDGERS], load_sheet("azure-standard")),
        )
    options.report.parent.mkdir(parents=True, exist_ok=True)
    write_page(audit, report, options.report)
    for name, value in [*audit.rows(), *stage_rows(report)]:
        print(f"{name:<42}{value:>16}")
    print(f"the whole report: {options.report}")
    print(f"lost {audit.lost}   doubled {audit.doubled}   not reconciled {report.suspect_count}")
    sys.exit(0 if audit.is_good and report.is_reconciled else 1)


def _play(seconds: float, folder: Path, stack: ExitStack) -> Audit:
    recorder = Recorder()
    display = stack.enter_context(Display(recorder))
    config = folder / "demo.toml"
    config.write_text('[ledger]\nroll_interval = "1s"\n', encoding="utf-8")  # a kill is to come
    primary = stack.enter_context(Server(folder / "shop", config))
    secondary = stack.enter_context(Server(folder / "backup", config))
    recorder.tell("two servers are up, a primary and a secondary")
    with NamespaceManager.from_connection_string(primary.connection) as manager:
        manager.create_queue(QueueDescription(path=QUEUE))
    ledger = folder / "applications"
    fleet = stack.enter_context(Fleet(primary.connection, secondary.connection, ledger, recorder))
    consumer = stack.enter_context(Consumer(primary.connection, recorder))
    display.watch(fleet, consumer)
    recorder.tell(f"{fleet.size} paired applications send, one consumer receives; Spark starts")
    syphon = stack.enter_context(_start_syphon(primary.connection, secondary.connection, ledger))
    display.watch(fleet, consumer, syphon)
    recorder.tell("the syphon is ready")
    time.sleep(seconds)

    primary.kill()
    recorder.tell("kill -9: the primary is down", "killed")
    time.sleep(seconds)
    primary.start()
    recorder.tell("the primary is started again", "started")
    _until(lambda: fleet.is_healthy)
    _until(lambda: syphon.progress.moved >= fleet.diverted)
    recorder.tell("every diverted order is home", "home")
    time.sleep(seconds)

    fleet.stop()
    _until(lambda: consumer.has_all(fleet.acknowledged))
    consumer.stop()
    syphon.stop()
    fleet.close()
    for server in (primary, secondary):
        server.stop()  # their ledgers are complete then
    return Audit.of(recorder, fleet, consumer, syphon.progress)


def _start_syphon(primary: str, secondary: str, ledger: Path) -> Syphon:
    with NamespaceManager.from_connection_string(secondary) as manager:
        queues = find_backlog_queues(manager, ConnectionString.parse(primary).name)
    settings = SyphonSettings(primary=primary, secondary=secondary, queues=queues, ledger=ledger)
    syphon = Syphon(settings)
    syphon.wait_until_running()
    return syphon


def _until(condition: Callable[[], bool]) -> None:
    """Wait for something; the audit says if it did not happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
