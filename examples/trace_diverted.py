"""Prints the trace of one diverted message, from its send to its settlement.

    python examples/trace_diverted.py

A paired application sends an order while its primary is killed. The primary starts again, the
syphon brings the order home, and the application receives and completes it. The spans come from
several processes: the application, and the workers of Spark.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from span_file import FILE_VARIABLE, read_spans

from twinbus import (
    BrokeredMessage,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
    SendAvailabilityPairedNamespaceOptions,
    tracing,
)
from twinbus.demo.servers import QUEUE, DemoServer

PATIENCE = RetryPolicy(operation_timeout=timedelta(seconds=30), try_timeout=timedelta(seconds=5))
STEPS = ("send", "divert", "drain", "receive", "complete")


def main() -> None:
    """Send, divert, bring home, receive, settle; print the trace of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[FILE_VARIABLE] = str(folder / "spans.jsonl")
        os.environ[tracing.SETUP_VARIABLE] = "span_file:record_spans"
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # workers import span_file, too
        tracing.enable_from_environment()
        run(folder)
        spans = read_spans(folder / "spans.jsonl")
    sys.exit(not print_trace(spans))


def run(folder: Path) -> None:
    """Let one order be diverted, brought home and consumed."""
    with ExitStack() as stack:
        shop = stack.enter_context(DemoServer(folder / "shop"))
        backup = stack.enter_context(DemoServer(folder / "backup"))
        with NamespaceManager.from_connection_string(shop.connection) as manager:
            manager.create_queue(QUEUE)
        factory = stack.enter_context(
            MessagingFactory.from_connection_string(shop.connection, retry_policy=PATIENCE)
        )
        options = SendAvailabilityPairedNamespaceOptions(
            NamespaceManager.from_connection_string(backup.connection),
            MessagingFactory.from_connection_string(backup.connection, retry_policy=PATIENCE),
            failover_interval=timedelta(0),
            enable_syphon=True,
        )
        options.ping_primary_interval = timedelta(seconds=1)
        factory.pair_namespace(options)
        orders = factory.create_queue_client(QUEUE)
        shop.kill()
        orders.send(BrokeredMessage(b"two coffees"))
        shop.start()
        message = orders.receive(wait=timedelta(minutes=1))
        assert message is not None
        message.complete()


def print_trace(spans: list[dict[str, Any]]) -> bool:
    """Print the trace of the send; return whether it has every step."""
    sent = next(span for span in spans if span["name"].startswith("send"))
    trace_id = sent["context"]["trace_id"]
    print(f"trace {trace_id}")
    began = datetime.fromisoformat(sent["start_time"])
    steps = [span for span in spans if span["context"]["trace_id"] == trace_id]
    steps.sort(key=_step)  # not by time: the receive waits while the order is brought home
    for span in steps:
        start, end = (datetime.fromisoformat(span[at]) for at in ("start_time", "end_time"))
        indent = "" if span is sent else "  "
        print(
            f"{_ms(start - began):>7} ms  {indent + span['name']:<18} {_ms(end - start):>6} ms  "
            f"{span['kind'].removeprefix('SpanKind.'):<9} process {span['pid']}"
        )
    return [_step(span) for span in steps] == list(range(len(STEPS)))


def _step(span: dict[str, Any]) -> int:
    return STEPS.index(span["name"].split()[0])


def _ms(span: timedelta) -> str:
    return f"{span / timedelta(milliseconds=1):,.0f}"


if __name__ == "__main__":
    main()
