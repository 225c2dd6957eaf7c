"""What the drop-in costs code on the SDK of Azure Service Bus: healthy sends, and diverted ones.

python bench/service_bus.py [--quick]

(A script `azure.py` here would hide the SDK's package `azure` from all benchmarks.)

The official SDK sends to a Twinbus server over AMQP, bare and through the paired drop-in, one
message of 1 KB after the other, in turns within one run. A diverted send is compared with a bare
send to the secondary's server, which is where it goes. Then the messages per second of a namespace
at sb:// in batches, which is what a syphon moves.
"""

import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender
from client import started_process
from measure import Report, ratio, side_by_side
from pairing import server

from twinbus import NamespaceManager
from twinbus.azure import PairedServiceBusClient, PairedWith
from twinbus.connection import ConnectionString
from twinbus.message import BrokeredMessage
from twinbus.namespace.azure import AzureNamespace
from twinbus.protocol.commands import Disposition, Receive, Send, Settle

BODY = b"x" * 1024
QUEUE = "orders"
TURN = 100  # messages
BATCH = 1000


def service_bus(text: str, name: str = "shop") -> str:
    """Return the connection string of a server for the SDK, which names the namespace."""
    native = ConnectionString.parse(text)
    return (
        f"Endpoint=sb://localhost:{native.port};Name={name};SharedAccessKeyName={native.key_name};"
        f"SharedAccessKey={native.key};UseDevelopmentEmulator=true"
    )


def bare_client(stack: ExitStack, text: str) -> ServiceBusSender:
    """Return a sender of the SDK alone."""
    plain = ";".join(part for part in service_bus(text).split(";") if not part.startswith("Name="))
    client = stack.enter_context(ServiceBusClient.from_connection_string(plain))
    return stack.enter_context(client.get_queue_sender(QUEUE))


def send_many(sender: ServiceBusSender) -> None:
    """Send the messages of a turn, one by one."""
    for _ in range(TURN):
        sender.send_messages(ServiceBusMessage(BODY))


def show(what: str, bare: list[float], paired: list[float]) -> float:
    """Print both rates; return how many times as long the paired sends took."""
    found = ratio(paired, bare)
    rates = [TURN / sorted(seconds)[len(seconds) // 2] for seconds in (bare, paired)]
    print(f"{what:<28} {rates[0]:>10,.0f} {rates[1]:>10,.0f} {found:>10.3f}")
    return found


def measure_batches(text: str) -> None:
    """Print how many messages per second a namespace at sb:// sends, receives and completes."""
    with AzureNamespace(ConnectionString.parse(service_bus(text))) as azure:
        messages = [BrokeredMessage(BODY) for _ in range(BATCH)]
        azure.ask(Send(QUEUE, messages), 60)

        def send() -> None:
            azure.ask(Send(QUEUE, messages), 60)

        def take() -> None:
            batch = azure.ask(Receive(QUEUE, BATCH, timedelta(seconds=10)), 60)
            azure.ask(Settle(QUEUE, batch.column("lock_token"), Disposition.COMPLETE), 60)

        sent, taken = (sorted(item) for item in side_by_side([send, take], 7))
        print(f"batches of {BATCH}: {BATCH / sent[3]:,.0f} sent/s, {BATCH / taken[3]:,.0f} taken/s")


def main() -> None:
    """Measure, and say which goals were met."""
    rounds = 5 if "--quick" in sys.argv else 21
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (primary, pid), (secondary, _) = (
            stack.enter_context(started_process(server(folder, name)))
            for name in ("shop", "backup")
        )
        for text in (primary, secondary):
            with NamespaceManager.from_connection_string(text) as manager:
                manager.create_queue(QUEUE)
        pair = PairedWith(secondary, failover_interval=timedelta(0))
        client = stack.enter_context(
            PairedServiceBusClient.from_connection_string(service_bus(primary), paired_with=pair)
        )
        paired = stack.enter_context(client.get_queue_sender(QUEUE))
        bare = bare_client(stack, primary)
        elsewhere = bare_client(stack, secondary)
        print(f"{'messages per second':<28} {'bare SDK':>10} {'drop-in':>10} {'times':>10}")
        works = [lambda: send_many(bare), lambda: send_many(paired)]
        healthy = show("healthy", *(item[1:] for item in side_by_side(works, rounds + 1)))
        os.kill(pid, signal.SIGKILL)
        works = [lambda: send_many(elsewhere), lambda: send_many(paired)]
        diverted = show("diverted", *(item[1:] for item in side_by_side(works, rounds + 1)))
        measure_batches(secondary)
    report = Report("service_bus")
    report.add("healthy drop-in, times the bare SDK", healthy, 1.05, at_most=True)
    report.add("diverted drop-in, times the bare SDK", diverted, 1.3, at_most=True)
    report.finish()


if __name__ == "__main__":
    main()
