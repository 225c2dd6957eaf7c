"""The whole story: a broker is killed with -9, and nobody loses an order.

    python examples/demo.py [--seconds 8] [--report outage.html]

Two servers, a fleet of paired applications that send orders, a consumer, and the syphon on Spark.
The primary is killed and stays down: sends are diverted to the secondary. It is started again:
pings find it, sends return, the syphon brings the diverted orders home. At the end every order is
counted, and a page with charts of the run is written.
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
from demo_report import Audit, write_report
from shop import QUEUE, Server

from twinbus import NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.pipeline.syphon import Syphon, SyphonSettings, find_backlog_queues

PATIENCE_S = 60.0  # for anything here to happen: far longer than it takes


def main() -> None:
    """Tell the story, and say by the exit code how it ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8, help="of each act")
    parser.add_argument("--report", type=Path, default=Path("build/outage.html"))
    options = parser.parse_args()
    logging.getLogger("twinbus").setLevel(logging.CRITICAL)  # the display tells the same
    with ExitStack() as stack:
        audit = _play(options.seconds, stack)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    write_report(audit, options.report)
    for name, value in audit.rows():
        print(f"{name:<42}{value:>16}")
    print(f"charts of the run: {options.report}")
    print(f"lost {audit.lost}   doubled {audit.doubled}")
    sys.exit(0 if audit.is_good else 1)


def _play(seconds: float, stack: ExitStack) -> Audit:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    recorder = Recorder()
    display = stack.enter_context(Display(recorder))
    primary = stack.enter_context(Server(folder / "shop"))
    secondary = stack.enter_context(Server(folder / "backup"))
    recorder.tell("two servers are up, a primary and a secondary")
    with NamespaceManager.from_connection_string(primary.connection) as manager:
        manager.create_queue(QueueDescription(path=QUEUE))
    fleet = stack.enter_context(Fleet(primary.connection, secondary.connection, recorder))
    consumer = stack.enter_context(Consumer(primary.connection, recorder))
    display.watch(fleet, consumer)
    recorder.tell(f"{fleet.size} paired applications send, one consumer receives; Spark starts")
    syphon = stack.enter_context(_start_syphon(primary.connection, secondary.connection))
    display.watch(fleet, consumer, syphon)
    recorder.tell("the syphon is ready")
    time.sleep(seconds)

    recorder.meter(primary.connection, "primary")  # what it counts is in its memory
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
    recorder.meter(primary.connection, "primary")
    recorder.meter(secondary.connection, "secondary")
    return Audit.of(recorder, fleet, consumer, syphon.progress)


def _start_syphon(primary: str, secondary: str) -> Syphon:
    with NamespaceManager.from_connection_string(secondary) as manager:
        queues = find_backlog_queues(manager, ConnectionString.parse(primary).name)
    syphon = Syphon(SyphonSettings(primary=primary, secondary=secondary, queues=queues))
    syphon.wait_until_running()
    return syphon


def _until(condition: Callable[[], bool]) -> None:
    """Wait for something; the audit says if it did not happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
