"""Many idle connections on one server: their memory, and what they cost the busy ones.

    python bench/connections.py [--quick]

One `twinbus serve` process has 50 busy connections, which send single messages one after the other,
and 5,000 idle ones, which have presented a token and then say nothing. An idle connection is a raw
socket here, so that the client side stays cheap. The latency of the busy connections is measured in
turns without and with the idle ones. The memory is the resident memory of the server before and
after the first opening of the idle connections, while nobody sends; the kernel's own memory for
sockets is not in it.
"""

import resource
import socket
import statistics
import struct
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from client import QUEUE, started_process
from measure import Report, ratio
from senders import ProcessCrowd, SendersFailedError, TwinbusSender

from twinbus import NamespaceManager, QueueDescription
from twinbus.connection import ConnectionString, token_for
from twinbus.limits import MAX_SIZE_MEGABYTES, MAX_STRANGERS
from twinbus.protocol.client_conversation import ClientConversation

IDLE, BUSY_PROCESSES, BUSY_THREADS = 5_000, 5, 10
GROUP = MAX_STRANGERS // 2  # idle connections that present their tokens at the same time
SENDS = 100  # of each busy connection in one measurement
QUICK_ROUNDS, ROUNDS = 2, 7
TOKEN_LIFE_S = 3_600
ANSWER_S = 30.0
SETTLE_S = 20.0  # that the server may take to forget connections which were closed
KILOBYTE = 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # so that no port stays in TIME_WAIT


class IdleConnections:
    """Authenticated connections that send nothing."""

    def __init__(self, connection: ConnectionString) -> None:
        self._where = (connection.host, connection.port)
        self._token = token_for(connection, int(time.time()) + TOKEN_LIFE_S)
        self._namespace_id = connection.namespace_id
        self._open: list[socket.socket] = []
        self.errors = 0

    def open(self, count: int) -> None:
        """Open connections, some at a time: a server has room for few that show no token."""
        for first in range(0, count, GROUP):
            greeted = [self._greet() for _ in range(min(GROUP, count - first))]
            for idle, conversation in greeted:
                if self._is_welcome(idle, conversation):
                    self._open.append(idle)
                else:
                    self.errors += 1
                    idle.close()

    def _greet(self) -> tuple[socket.socket, ClientConversation]:
        conversation = ClientConversation(self._token, self._namespace_id)
        idle = socket.create_connection(self._where, timeout=ANSWER_S)
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        idle.sendall(b"".join(conversation.take_outgoing()))
        return idle, conversation

    @staticmethod
    def _is_welcome(idle: socket.socket, conversation: ClientConversation) -> bool:
        with suppress(OSError):
            while conversation.version is None and conversation.ended is None:
                conversation.receive(idle.recv(4096), 0)
        return conversation.version is not None

    def close(self) -> None:
        """Close all connections; count those that the server has ended or written to before."""
        for idle in self._open:
            idle.setblocking(False)
            try:
                idle.recv(1)
            except BlockingIOError:
                pass  # still open, and nothing came
            except OSError:
                self.errors += 1
            else:
                self.errors += 1
            idle.close()
        self._open.clear()


class ServerProcess:
    """What the system reports about the process of the server."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def resident_bytes(self) -> int:
        """Return the resident memory of the process."""
        for line in (self._folder / "status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * KILOBYTE
        raise RuntimeError("this system does not report VmRSS")

    def descriptors(self) -> int:
        """Return how many files and sockets the process has open."""
        return len(list((self._folder / "fd").iterdir()))

    def wait_for_descriptors(self, most: int) -> None:
        """Return when the process has closed the connections that are gone."""
        deadline = time.monotonic() + SETTLE_S
        while self.descriptors() > most:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server has not closed connections within {SETTLE_S:g} s")
            time.sleep(0.05)


def busy_latencies(crowd: ProcessCrowd) -> tuple[float, float]:
    """Send with all busy connections; return the median and the 99th percentile in seconds."""
    cuts = statistics.quantiles(crowd.send(SENDS), n=100)
    return cuts[49], cuts[98]


def main() -> None:
    """Measure, print the figures and the goals."""
    rounds = QUICK_ROUNDS if "--quick" in sys.argv else ROUNDS
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    report = Report("connections")
    alone: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    per_connection: list[float] = []
    failed_sends = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        serve = "from twinbus.cli import main; main()"
        command = [sys.executable, "-c", serve, "serve", folder / "ns", "--port", "0"]
        text, pid = stack.enter_context(started_process(command))
        server = ServerProcess(pid)
        with NamespaceManager.from_connection_string(text) as manager:
            manager.create_queue(
                QueueDescription(path=QUEUE, max_size_in_megabytes=MAX_SIZE_MEGABYTES)
            )
        crowd = stack.enter_context(ProcessCrowd(TwinbusSender, text, BUSY_PROCESSES, BUSY_THREADS))
        idle = IdleConnections(ConnectionString.parse(text))
        opening_s = []
        try:
            busy_latencies(crowd)  # warms up
            for _ in range(rounds):
                alone.append(busy_latencies(crowd))
                before, descriptors = server.resident_bytes(), server.descriptors()
                start = time.perf_counter()
                idle.open(IDLE)
                opening_s.append(time.perf_counter() - start)
                per_connection.append((server.resident_bytes() - before) / IDLE)
                beside.append(busy_latencies(crowd))
                idle.close()
                server.wait_for_descriptors(descriptors)
        except SendersFailedError as error:
            print(error)
            failed_sends += 1
    if not beside:
        sys.exit("the busy connections could not send; there is nothing to compare")
    show(alone, beside, statistics.median(opening_s))
    report.add(
        f"KB of server memory per idle connection, {IDLE:,} of them",
        per_connection[0] / KILOBYTE,
        32,
        at_most=True,
    )
    report.add("errors", idle.errors + failed_sends, 0, at_most=True)
    report.add(
        "p50 of busy connections, with idle ones / without",
        ratio([p50 for p50, _ in beside], [p50 for p50, _ in alone[: len(beside)]]),
        1.5,
        at_most=True,
    )
    report.finish()


def show(
    alone: list[tuple[float, float]], beside: list[tuple[float, float]], opening_s: float
) -> None:
    """Print the latencies, and how fast connections were opened."""
    busy = BUSY_PROCESSES * BUSY_THREADS
    print(f"{f'{busy} busy connections, latency in microseconds':<52} {'p50':>12} {'p99':>12}")
    for name, rows in (("alone", alone), (f"beside {IDLE:,} idle connections", beside)):
        p50, p99 = (statistics.median(column) * 1e6 for column in zip(*rows, strict=True))
        print(f"{name:<52} {p50:>12,.0f} {p99:>12,.0f}")
    print(f"{'idle connections opened a second':<52} {IDLE / opening_s:>12,.0f}")


if __name__ == "__main__":
    main()
