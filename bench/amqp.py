"""SDKs of Azure Service Bus on a Twinbus server: rates, CPU and memory.

    python bench/amqp.py [--quick]

The unmodified Python SDK sends one by one, sends batches of 100, and receives and completes; in
turns on `twinbus serve` and on a server that speaks the same frames and stores nothing
(bare_amqp.py). The ratio tells what the broker costs a client. Twinbus flushes every send and every
completion to the disk; a second ratio has the time of as many flushes of 1 KB, taken in turns with
both, added to the server that stores nothing. The same sum shows the highest rate that a server
with durable messages can reach on this disk. 20 senders in 4 processes then send one by one to
Twinbus and, with pika and publisher confirms, to RabbitMQ. The CPU of the server is
that of its process. The memory of an idle link is that of a connection of its own with a receiver
that waits, as SDKs have.
"""

import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from client import QUEUE, Disk, started_process
from connections import ServerProcess
from measure import Report, processes, ratio, side_by_side
from peers import LOOPBACK, RabbitMQ
from senders import BODY, ProcessCrowd, RabbitSender, SdkReceiver, SdkSender, azure

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager, QueueDescription
from twinbus.amqp.connection import AmqpConnection
from twinbus.amqp.message import SectionKind, encode_message
from twinbus.amqp.options import ConnectionOptions, LinkOptions
from twinbus.amqp.performatives import Properties, Source, Target
from twinbus.amqp.sasl import SaslClient, SaslCredentials
from twinbus.connection import ConnectionString, sign_token
from twinbus.limits import MAX_SIZE_MEGABYTES

ONE_BY_ONE, BATCHES, BATCH, RECEIVED, AHEAD = 300, 20, 100, 300, 100
PROCESSES, THREADS, CROWD_SENDS = 4, 5, 60  # 20 senders, and what each sends in a round
IDLE_LINKS = 200
QUICK_ROUNDS, ROUNDS = 3, 9
GOAL = 0.7  # of what the SDK can do on a server that does nothing
MOST_IDLE_KB = 64.0


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has taken."""
    return processes()[pid][2]


@contextmanager
def twinbus_server(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a server with a queue; yield its native connection string and the id of its process."""
    command = [sys.executable, "-c", "from twinbus.cli import main; main()", "serve", folder]
    with started_process([*command, "--port", "0", "--admin-port", "0"]) as (connection, pid):
        with NamespaceManager.from_connection_string(connection) as manager:
            queue = QueueDescription(path=QUEUE, max_size_in_megabytes=MAX_SIZE_MEGABYTES)
            manager.create_queue(queue)
        yield connection, pid


def sdk_string(port: int, name: str = "any", key: str = "any") -> str:
    """Return a connection string for the SDK."""
    return (
        f"Endpoint=sb://localhost:{port};SharedAccessKeyName={name};SharedAccessKey={key};"
        "UseDevelopmentEmulator=true;"
    )


def against_bare(
    report: Report, stack: ExitStack, own: str, pid: int, disk: Disk, rounds: int
) -> None:
    """Measure one client on both servers, in turns."""
    bare_command = [sys.executable, Path(__file__).with_name("bare_amqp.py")]
    port, bare_pid = stack.enter_context(started_process(bare_command))
    bare = sdk_string(int(port))
    servers = {"Twinbus": own, "bare": bare}
    senders = {name: SdkSender(text) for name, text in servers.items()}
    receivers = {name: SdkReceiver(text, AHEAD) for name, text in servers.items()}
    for name in servers:
        stack.callback(senders[name].close)
        stack.callback(receivers[name].close)
    pids = {"Twinbus": pid, "bare": bare_pid}
    shapes: dict[str, tuple[int, int, Callable[[str], object]]] = {  # messages, flushes, work
        "one by one": (ONE_BY_ONE, ONE_BY_ONE, lambda name: senders[name].send(ONE_BY_ONE)),
        f"batches of {BATCH}": (
            BATCHES * BATCH,
            BATCHES,
            lambda name: senders[name].send_batches(BATCHES, BATCH),
        ),
        "receive and complete": (RECEIVED, RECEIVED, lambda name: receivers[name].take(RECEIVED)),
    }
    for shape, (count, flushes, work) in shapes.items():
        for name in servers:  # connect, and warm up
            work(name)
        before = {name: cpu_s(pids[name]) for name in servers}
        works: list[Callable[[], object]] = [partial(work, name) for name in servers]
        works.append(partial(disk.flush, flushes))
        *both, flush_s = side_by_side(works, rounds)
        seconds = dict(zip(servers, both, strict=True))
        for name in servers:
            cpu_us = (cpu_s(pids[name]) - before[name]) / (rounds * count) * 1e6
            rate = rounds * count / sum(seconds[name])
            print(f"{shape:<24} {name:<10} {rate:>9,.0f} /s   CPU of the server {cpu_us:>7.1f} us")
        figure = ratio(seconds["bare"], seconds["Twinbus"])
        report.add(f"SDK {shape}: Twinbus / a server that stores nothing", figure, GOAL)
        durable_s = [a + b for a, b in zip(seconds["bare"], flush_s, strict=True)]
        bound = ratio(seconds["bare"], durable_s)
        print(
            f"{shape:<24} a server that only flushes reaches {bound:.2f} of one that stores nothing"
        )
        figure = ratio(durable_s, seconds["Twinbus"])
        report.add(f"SDK {shape}: Twinbus / that server and as many flushes", figure, GOAL)


def against_rabbit(report: Report, stack: ExitStack, own: str, rounds: int) -> None:
    """Measure 20 senders in 4 processes on Twinbus and on RabbitMQ, in turns."""
    missing = RabbitMQ.missing()
    crowds = {"Twinbus": ProcessCrowd(SdkSender, own, PROCESSES, THREADS)}
    if missing is None:
        rabbit = stack.enter_context(RabbitMQ())
        crowds[rabbit.name] = ProcessCrowd(RabbitSender, rabbit.port, PROCESSES, THREADS)
    for crowd in crowds.values():
        stack.callback(crowd.close)
        crowd.send(5)
    works = [partial(crowd.send, CROWD_SENDS) for crowd in crowds.values()]
    seconds = side_by_side(works, rounds)
    for name, taken in zip(crowds, seconds, strict=True):
        rate = rounds * PROCESSES * THREADS * CROWD_SENDS / sum(taken)
        print(f"{PROCESSES * THREADS} senders in {PROCESSES} processes {name:<18} {rate:>9,.0f} /s")
    if missing is None:
        figure = ratio(seconds[1], seconds[0])
        report.add("20 SDK senders on Twinbus / 20 of pika on RabbitMQ", figure, 1.0)
    else:
        print(f"RabbitMQ is left out; it needs: {missing}")


class IdleReceiver:
    """A connection that has shown its token and waits for messages, as one of an SDK does."""

    def __init__(self, connection: ConnectionString) -> None:
        self._socket = socket.create_connection((LOOPBACK, connection.port), timeout=30)
        sasl = SaslClient(SaslCredentials("ANONYMOUS"))
        self._amqp = AmqpConnection(ConnectionOptions("idle"), 0, sasl=sasl, is_client=True)
        session = self._amqp.begin()
        answers = session.attach_receiver("from cbs", LinkOptions(source=Source(address="$cbs")))
        requests = session.attach_sender("to cbs", LinkOptions(target=Target(address="$cbs")))
        self._exchange(lambda: requests.may_send)
        audience = f"sb://localhost/{QUEUE}"
        token = sign_token(audience, connection.key_name, connection.key, int(time.time()) + 3600)
        request = {
            SectionKind.PROPERTIES: Properties(message_id="1"),
            SectionKind.APPLICATION_PROPERTIES: {"operation": "put-token", "name": audience},
            SectionKind.VALUE: token,
        }
        answers.grant(1)
        requests.send(encode_message(request), is_settled=True)
        self._exchange(lambda: not answers.credit)
        link = session.attach_receiver("orders", LinkOptions(source=Source(address=QUEUE)))
        self._exchange(lambda: link.peer is not None)
        link.grant(1)
        self._socket.sendall(b"".join(self._amqp.take_outgoing(0)))

    def _exchange(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self._amqp.has_outgoing:
                self._socket.sendall(b"".join(self._amqp.take_outgoing(0)))
            self._amqp.receive(self._socket.recv(65536), 0)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def memory_of_links(report: Report, folder: Path) -> None:
    """Measure the memory of receivers that wait."""
    with twinbus_server(folder) as (connection, pid), ExitStack() as stack:
        parsed = ConnectionString.parse(connection)
        server = ServerProcess(pid)
        stack.callback(IdleReceiver(parsed).close)  # what is loaded with the first
        time.sleep(0.5)
        before = server.resident_bytes()
        for _ in range(IDLE_LINKS):
            stack.callback(IdleReceiver(parsed).close)
        time.sleep(0.5)
        kilobytes = (server.resident_bytes() - before) / IDLE_LINKS / 1024
        print(f"an idle receiver with its connection takes {kilobytes:.1f} KB of the server")
        report.add(
            "KB of an idle receiver and its connection", kilobytes, MOST_IDLE_KB, at_most=True
        )


def main() -> None:
    """Measure, and print one line per figure."""
    if azure is None:
        sys.exit("this benchmark needs the SDK: pip install azure-servicebus")
    rounds = QUICK_ROUNDS if "--quick" in sys.argv else ROUNDS
    report = Report("SDKs of Azure Service Bus")
    with tempfile.TemporaryDirectory(prefix="twinbus-bench-") as place, ExitStack() as stack:
        memory_of_links(report, Path(place) / "memory")
        native, pid = stack.enter_context(twinbus_server(Path(place) / "shop"))
        parsed = ConnectionString.parse(native)
        twinbus = sdk_string(parsed.port, parsed.key_name, parsed.key)
        with MessagingFactory.from_connection_string(native) as factory:
            sender = factory.create_message_sender(QUEUE)
            sender.send_batch([BrokeredMessage(BODY) for _ in range((rounds + 2) * RECEIVED)])
        against_bare(report, stack, twinbus, pid, Disk(Path(place) / "disk"), rounds)
        against_rabbit(report, stack, twinbus, rounds)
    report.finish()


if __name__ == "__main__":
    main()
