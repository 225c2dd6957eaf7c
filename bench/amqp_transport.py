"""SDKs of Azure Service Bus through TLS and websockets, and a thousand entities over HTTPS.

    python bench/amqp_transport.py [--quick]

The unmodified Python SDK sends one by one and in batches of 100 to one server: on a plain socket,
through TLS, through a websocket, and through a websocket in TLS, in turns. The ratio to the plain
socket tells what a transport costs a client. Its administration client then creates, lists and
deletes entities; the CPU of the server is that of its process.

The SDK knows one port for AMQP with TLS, 5671. Here its connections to that port are led to the
port of the server.
"""

import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from amqp import cpu_s, sdk_string
from client import QUEUE, started_process
from measure import Report, ratio, side_by_side
from senders import BODY, azure

from twinbus import NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString
from twinbus.limits import MAX_SIZE_MEGABYTES

ONE_BY_ONE, BATCHES, BATCH = 200, 10, 100
QUICK_ROUNDS, ROUNDS = 3, 9
ENTITIES, QUICK_ENTITIES = 1000, 200
AMQPS_PORT = 5671
GOALS = {"TLS": 0.6, "websocket": 0.5, "websocket in TLS": 0.4}  # of the rate of a plain socket
MOST_CPU_MS = {"create": 6.0, "list": 2.0, "delete": 4.0}  # of the server, for one entity


@contextmanager
def led_to(port: int) -> Iterator[None]:
    """Lead connections to the port of AMQP with TLS to another one."""
    connect: Callable[..., socket.socket] = socket.create_connection

    def redirected(address: tuple[str, int], *args: Any, **options: Any) -> socket.socket:
        at = ("localhost", port) if address[1] == AMQPS_PORT else address
        return connect(at, *args, **options)

    setattr(socket, "create_connection", redirected)  # noqa: B010 - mypy knows it as a function
    try:
        yield
    finally:
        setattr(socket, "create_connection", connect)  # noqa: B010


class TransportSender:
    """A client of the SDK with a sender of its own."""

    def __init__(self, text: str, **options: Any) -> None:
        self._client = azure.ServiceBusClient.from_connection_string(text, **options)
        self._sender = self._client.get_queue_sender(QUEUE)

    def send(self) -> None:
        """Send messages one by one."""
        for _ in range(ONE_BY_ONE):
            self._sender.send_messages(azure.ServiceBusMessage(BODY))

    def send_batches(self) -> None:
        """Send batches, each after the acknowledgement of the one before."""
        for _ in range(BATCHES):
            batch = self._sender.create_message_batch()
            for _ in range(BATCH):
                batch.add_message(azure.ServiceBusMessage(BODY))
            self._sender.send_messages(batch)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def transports(report: Report, stack: ExitStack, text: str, ca: Path, rounds: int) -> None:
    """Measure sends through every transport, in turns."""
    port = text.partition(";")[0].rpartition(":")[2]
    through = {"custom_endpoint_address": f"sb://localhost:{port}"}
    encrypted = text.replace("UseDevelopmentEmulator=true;", "")
    trusted = ssl.create_default_context(cafile=ca)
    senders = {
        "plain": TransportSender(text),
        "TLS": TransportSender(encrypted, ssl_context=trusted),
        "websocket": TransportSender(text, **through),
        "websocket in TLS": TransportSender(encrypted, connection_verify=str(ca), **through),
    }
    for sender in senders.values():
        stack.callback(sender.close)
    shapes: dict[str, tuple[int, Callable[[TransportSender], None]]] = {
        "one by one": (ONE_BY_ONE, TransportSender.send),
        f"batches of {BATCH}": (BATCHES * BATCH, TransportSender.send_batches),
    }
    for shape, (count, work) in shapes.items():
        for sender in senders.values():  # connect, and warm up
            work(sender)
        works = [partial(work, sender) for sender in senders.values()]
        seconds = dict(zip(senders, side_by_side(works, rounds), strict=True))
        for name, taken in seconds.items():
            print(f"{shape:<16} {name:<18} {rounds * count / sum(taken):>9,.0f} /s")
        for name, goal in GOALS.items():
            figure = ratio(seconds["plain"], seconds[name])
            report.add(f"SDK {shape}: {name} / plain", figure, goal)


def entities(report: Report, text: str, ca: Path, pid: int, count: int) -> None:
    """Measure the administration client: create, list and delete so many queues."""
    from azure.servicebus.management import ServiceBusAdministrationClient  # noqa: PLC0415

    names = [f"entity-{number}" for number in range(count)]
    with ServiceBusAdministrationClient.from_connection_string(
        text, connection_verify=str(ca)
    ) as admin:
        steps: dict[str, Callable[[], object]] = {
            "create": lambda: [admin.create_queue(name) for name in names],
            "list": lambda: [queue.name for queue in admin.list_queues()],
            "delete": lambda: list(map(admin.delete_queue, names)),
        }
        for step, work in steps.items():
            before, began = cpu_s(pid), time.perf_counter()
            work()
            seconds, cpu_ms = time.perf_counter() - began, (cpu_s(pid) - before) / count * 1000
            print(
                f"{step:<8} {count} entities {count / seconds:>9,.0f} /s   "
                f"CPU of the server {cpu_ms:.2f} ms each"
            )
            name = f"administration, {step} one of {count}: ms of the server's CPU"
            report.add(name, cpu_ms, MOST_CPU_MS[step], at_most=True)


def main() -> None:
    """Measure, and print one line per figure."""
    if azure is None:
        sys.exit("this benchmark needs the SDK: pip install azure-servicebus websocket-client")
    is_quick = "--quick" in sys.argv
    report = Report("Transports of SDKs")
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-") as place, ExitStack() as stack:
        folder = Path(place)
        command = [sys.executable, "-c", "from twinbus.cli import main; main()", "serve"]
        command += [str(folder / "shop"), "--port", "0", "--tls", str(folder / "certificate")]
        native, pid = stack.enter_context(started_process(command))
        with NamespaceManager.from_connection_string(native) as manager:
            manager.create_queue(
                QueueDescription(path=QUEUE, max_size_in_megabytes=MAX_SIZE_MEGABYTES)
            )
        parsed = ConnectionString.parse(native)
        text = sdk_string(parsed.port, parsed.key_name, parsed.key)
        ca = folder / "certificate" / "ca.pem"
        stack.enter_context(led_to(parsed.port))
        transports(report, stack, text, ca, QUICK_ROUNDS if is_quick else ROUNDS)
        entities(report, text, ca, pid, QUICK_ENTITIES if is_quick else ENTITIES)
    report.finish()


if __name__ == "__main__":
    main()
