"""What the drop-in costs code on the SDK of Azure Service Bus: healthy sends, and diverted ones.

python bench/service_bus.py [--quick]

(A script `azure.py` here would hide the SDK's package `azure` from all benchmarks.)

The official SDK sends to a Twinbus server over AMQP, bare and through the paired drop-in, one
message of 1 KB after the other, in turns within one run. A diverted send is compared with a bare
send to the secondary's server, which is where it goes. That server is the secondary of two
pairings: of one at sb://, as an Azure Service Bus is, and of one at twinbus://. Then the messages
per second of a namespace at sb:// in batches, which is what a syphon moves.
"""

import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

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


def paired_client(stack: ExitStack, primary: str, secondary: str) -> ServiceBusSender:
    """Return a sender of the drop-in, which diverts at the first failure."""
    pair = PairedWith(secondary, failover_interval=timedelta(0))
    client = stack.enter_context(
        PairedServiceBusClient.from_connection_string(service_bus(primary), paired_with=pair)
    )
    return stack.enter_context(client.get_queue_sender(QUEUE))


def bare_client(stack: ExitStack, text: str) -> ServiceBusSender:
    """Return a sender of the SDK alone."""
    plain = ";".join(part for part in service_bus(text).split(";") if not part.startswith("Name="))
    client = stack.enter_context(ServiceBusClient.from_connection_string(plain))
    return stack.enter_context(client.get_queue_sender(QUEUE))


def send_many(sender: ServiceBusSender) -> None:
    """Send the messages of a turn, one by one."""
    for _ in range(TURN):
        sender.send_messages(ServiceBusMessage(BODY))


def show(bare: ServiceBusSender, paired: dict[str, ServiceBusSender], rounds: int) -> list[float]:
    """Print the rates of senders; return how many times as long each paired one took."""
    senders = [bare, *paired.values()]
    works = [partial(send_many, sender) for sender in senders]
    first, *others = (item[1:] for item in side_by_side(works, rounds + 1))
    found = [ratio(seconds, first) for seconds in others]
    for what, seconds, times in zip(paired, others, found, strict=True):
        rates = [TURN / median(taken) for taken in (first, seconds)]
        print(f"{what:<28} {rates[0]:>10,.0f} {rates[1]:>10,.0f} {times:>10.3f}")
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
        certificate = folder / "certificate"  # the SDK's administration client needs TLS
        primary, pid = stack.enter_context(started_process(server(folder, "shop")))
        command = [*server(folder, "backup"), "--tls", certificate]
        secondary, _ = stack.enter_context(started_process(command))
        secondary = replace(ConnectionString.parse(secondary), tls=False, ca_file=None).to_text()
        for text in (primary, secondary):
            with NamespaceManager.from_connection_string(text) as manager:
                manager.create_queue(QUEUE)
        at_sb = f"{service_bus(secondary, 'backup')};CaFile={certificate / 'ca.pem'}"
        to_sb, to_twinbus = (paired_client(stack, primary, text) for text in (at_sb, secondary))
        bare, elsewhere = bare_client(stack, primary), bare_client(stack, secondary)
        print(f"{'messages per second':<28} {'bare SDK':>10} {'drop-in':>10} {'times':>10}")
        [healthy] = show(bare, {"healthy": to_sb}, rounds)
        os.kill(pid, signal.SIGKILL)
        places = {"diverted to sb://": to_sb, "diverted to twinbus://": to_twinbus}
        diverted = show(elsewhere, places, rounds)
        measure_batches(secondary)
    report = Report("service_bus")
    report.add("drop-in, healthy, times the bare SDK", healthy, 1.05, at_most=True)
    for place, times in zip(places, diverted, strict=True):
        report.add(f"drop-in, {place}, times the bare SDK", times, 1.3, at_most=True)
    report.finish()


if __name__ == "__main__":
    main()
