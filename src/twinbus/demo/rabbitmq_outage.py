"""The outage of a RabbitMQ primary.

The demo starts a RabbitMQ broker, kills it with -9 and starts it again, while applications that are
paired with a Twinbus server send orders. The syphon on Spark brings the diverted orders home.
RabbitMQ does not remember which messages it accepted, so an order whose confirm was lost may be
enqueued twice: all copies carry the same origin, and the consumer counts such an order once. At the
end every order is accounted for. RabbitMQ writes no ledgers, so there is no report here.
"""

import logging
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from twinbus import MessageReceiver, NamespaceManager
from twinbus.deduplicate import origin_of
from twinbus.demo.audit import Findings, QueuedOrders, examine
from twinbus.demo.display import Display
from twinbus.demo.fleet import Consumer, Fleet, Recorder
from twinbus.demo.outage import find_backlog, until
from twinbus.demo.servers import QUEUE, DemoServer
from twinbus.errors import InvalidOperationError
from twinbus.message import to_messages
from twinbus.protocol.commands import Disposition
from twinbus.spark.gateway import silence_py4j
from twinbus.spark.session import BorrowedSession
from twinbus.syphon.syphon import Syphon, SyphonSettings
from twinbus.testing.rabbitmq import RabbitBroker, missing

SYNC_S = 2.0  # RabbitMQ loses a quorum queue that was declared less than 0.5 s before a kill -9


class RabbitConsumer(Consumer):
    """Receives from RabbitMQ, which has no sequence numbers: an order's origin is its place."""

    def __init__(self, primary: str) -> None:
        self._places: dict[str, int] = {}
        super().__init__(primary)

    def _take(self, orders: MessageReceiver, batch: pa.RecordBatch) -> None:
        messages = to_messages(batch)
        origins = [origin_of(message) or message.message_id for message in messages]
        numbers = [self._places.setdefault(origin, len(self._places)) for origin in origins]
        self.handovers.add(numbers, [message.message_id for message in messages])
        orders.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)


def run_rabbitmq_demo(seconds: float) -> bool:
    """Run the demo; return whether it passed.

    Applications send for `seconds` before, during and after the outage.
    """
    why = missing()
    if why is not None:
        raise InvalidOperationError(f"this demo needs a RabbitMQ, and {why}")
    logging.getLogger("twinbus").setLevel(logging.CRITICAL)  # the display shows the same events
    silence_py4j()
    print("starting Spark ...", flush=True)
    with tempfile.TemporaryDirectory() as made, BorrowedSession(None, {}), ExitStack() as stack:
        findings, diverted, moved = _play(seconds, Path(made), stack)
    for name, value in (
        ("sent and acknowledged", findings.acknowledged),
        ("delivered", findings.delivered),
        ("diverted", diverted),
        ("brought home by the syphon", moved),
        ("repeats that carry the same origin", findings.redelivered),
    ):
        print(f"{name:<42}{value:>16,}")
    print(f"lost {len(findings.lost)}   doubled {len(findings.doubled)}")
    is_good = not findings.lost and not findings.doubled and bool(diverted)
    print("Nothing was lost." if is_good else "The audit failed.")
    return is_good


def _play(seconds: float, folder: Path, stack: ExitStack) -> tuple[Findings, int, int]:
    recorder = Recorder()
    display = stack.enter_context(Display(recorder))
    broker = stack.enter_context(RabbitBroker())
    primary = broker.connection_string(name="shop")
    secondary = stack.enter_context(DemoServer(folder / "backup"))
    recorder.record("a RabbitMQ is the primary, a Twinbus server the secondary")
    with NamespaceManager.from_connection_string(primary) as manager:
        manager.create_queue(QUEUE)
    time.sleep(SYNC_S)
    ledger = folder / "applications"
    fleet = stack.enter_context(Fleet(primary, secondary.connection, ledger, recorder))
    consumer = stack.enter_context(RabbitConsumer(primary))
    display.watch(fleet, consumer)
    queues = find_backlog(primary, secondary.connection)
    settings = SyphonSettings(
        primary=primary, secondary=secondary.connection, queues=queues, ledger=ledger
    )
    syphon = stack.enter_context(Syphon(settings))
    syphon.wait_until_running()
    display.watch(fleet, consumer, syphon)
    recorder.record(f"{fleet.size} paired applications send, one consumer receives")
    time.sleep(seconds)

    recorder.record("kill -9: RabbitMQ is down", "killed")  # before its effects
    broker.node.kill()
    time.sleep(seconds)
    broker.node.start()
    recorder.record("RabbitMQ is started again", "started")
    until(lambda: fleet.is_healthy)
    until(lambda: syphon.progress.moved >= fleet.diverted)
    recorder.record("every diverted order is home", "home")
    time.sleep(seconds)

    fleet.stop()
    until(lambda: consumer.has_all(fleet.acknowledged))
    consumer.stop()
    syphon.stop()
    fleet.close()
    findings = examine(fleet.acknowledged, consumer.handovers, QueuedOrders())
    return findings, fleet.diverted, syphon.progress.moved
