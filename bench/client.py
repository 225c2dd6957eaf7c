"""Durable sends through a server, against the least a Flight server can do and against peers.

python bench/client.py [--quick]

Every row is measured in turns within one run. Bodies have 1 KB, everything is synced before it is
acknowledged (the installed NATS says in its name when it is not).
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from measure import Report, ratio, side_by_side
from peers import Nats, RabbitMQ
from pyarrow import flight

from twinbus import BrokeredMessage, MessagingFactory, NamespaceManager
from twinbus.message import MESSAGE_SCHEMA, to_batch

BODY = b"x" * 1024
BATCH = 1000
QUEUE = "orders"
FOLDER = Path(__file__).parent
Works = dict[str, tuple[int, Callable[[], object]]]  # a row: messages, and what sends them


@contextmanager
def started(command: list[Any]) -> Iterator[str]:
    """Start a process that prints a line when it is ready; end it afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Twinbus:
    """A server process and a client of it."""

    def __init__(self, connection: str) -> None:
        with NamespaceManager.from_connection_string(connection) as manager:
            manager.create_queue(QUEUE)
        self._factory = MessagingFactory.from_connection_string(connection)
        self._sender = self._factory.create_message_sender(QUEUE)
        self._batch = to_batch([BrokeredMessage(BODY) for _ in range(BATCH)])

    def send_one_by_one(self, count: int) -> None:
        """Send messages; each waits for the one before."""
        for _ in range(count):
            self._sender.send(BrokeredMessage(BODY))

    def send_pipelined(self, count: int) -> None:
        """Send messages one by one without waiting for each."""
        with self._sender.pipelined() as pipeline:
            sent = [pipeline.send(BrokeredMessage(BODY)) for _ in range(count)]
        for future in sent:
            future.result()

    def send_batches(self, count: int) -> None:
        """Send batches of columns; each waits for the one before."""
        for _ in range(count // BATCH):
            self._sender.send_batch(self._batch)

    def send_batches_of_messages(self, count: int) -> None:
        """Send batches of message objects, made and converted on the way."""
        for _ in range(count // BATCH):
            self._sender.send_batch([BrokeredMessage(BODY) for _ in range(BATCH)])

    def close(self) -> None:
        """Hang up."""
        self._factory.close()


class BareFlight:
    """A client of a Flight server that appends what it gets to a file, and nothing else."""

    def __init__(self, port: int) -> None:
        self._client = flight.connect(f"grpc+tcp://127.0.0.1:{port}")
        descriptor = flight.FlightDescriptor.for_path("bare")
        self._writer, self._reader = self._client.do_exchange(descriptor)
        self._writer.begin(MESSAGE_SCHEMA)
        self._put, self._acks = self._client.do_put(descriptor, MESSAGE_SCHEMA)
        self._one = to_batch([BrokeredMessage(BODY)])
        self._batch = to_batch([BrokeredMessage(BODY) for _ in range(BATCH)])

    def round_trips(self, count: int) -> None:
        """Send a ready-made batch of one message; wait for its acknowledgement."""
        for _ in range(count):
            self._writer.write_batch(self._one)
            self._reader.read_chunk()

    def put_batches(self, count: int) -> None:
        """Put batches; each waits for the acknowledgement of the one before."""
        for _ in range(count // BATCH):
            self._put.write_batch(self._batch)
            self._acks.read()

    def close(self) -> None:
        """Hang up."""
        for writer in (self._writer, self._put):
            writer.done_writing()
        self._client.close()


def peers(stack: ExitStack, folder: Path) -> list[Any]:
    """Start the peers that are installed; say how to install the others."""
    found = []
    for kind in (RabbitMQ, Nats):
        missing = kind.missing()
        if missing:
            print(f"{kind.__name__} is left out: {missing}")
            continue
        home = folder / kind.__name__
        home.mkdir()
        found.append(stack.enter_context(kind(home)))
    return found


def main() -> None:
    """Measure, print the rates and the goals."""
    quick = "--quick" in sys.argv
    rounds = 5 if quick else 11
    singles, many, batched = 300, 5_000, 20_000
    report = Report("client")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        serve = "from twinbus.cli import main; main()"
        command = [sys.executable, "-c", serve, "serve", folder / "ns", "--port", "0"]
        connection = stack.enter_context(started([*command, "--admin-port", "0"]))
        bare_command = [sys.executable, FOLDER / "bare_flight.py", folder / "bare"]
        port = stack.enter_context(started(bare_command))
        twinbus, bare = Twinbus(connection), BareFlight(int(port))
        stack.callback(twinbus.close)
        stack.callback(bare.close)
        others = peers(stack, folder)

        works: Works = {
            "bare Flight round trip + fdatasync": (singles, partial(bare.round_trips, singles)),
            "Twinbus, one by one": (singles, partial(twinbus.send_one_by_one, singles)),
            "Twinbus, pipelined": (many, partial(twinbus.send_pipelined, many)),
            "bare Flight put + fdatasync, batches": (batched, partial(bare.put_batches, batched)),
            "Twinbus, batches": (batched, partial(twinbus.send_batches, batched)),
            "Twinbus, batches of message objects": (
                batched,
                partial(twinbus.send_batches_of_messages, batched),
            ),
        }
        for peer in others:
            works |= _rows_of(peer, singles, many)
        seconds = dict(
            zip(works, side_by_side([work for _, work in works.values()], rounds + 1), strict=True)
        )
    per_message = {
        name: [taken / works[name][0] for taken in times[1:]] for name, times in seconds.items()
    }
    print(f"{'durable sends of 1 KB, batches of 1000':<52} {'messages/s':>12}")
    for name, times in per_message.items():
        print(f"{name:<52} {1 / statistics.median(times):>12,.0f}")
    _judge(report, per_message)
    report.finish()


def _rows_of(peer: Any, singles: int, many: int) -> Works:
    return {
        f"{peer.name}, one by one": (singles, partial(peer.send_one_by_one, singles, BODY)),
        f"{peer.name}, pipelined": (many, partial(peer.send_pipelined, many, BODY)),
        f"{peer.name}, batches": (many, partial(peer.send_batches, many, BODY)),
    }


def _judge(report: Report, times: dict[str, list[float]]) -> None:
    single, piped = times["Twinbus, one by one"], times["Twinbus, pipelined"]
    batches = times["Twinbus, batches"]
    bare, put = (
        times["bare Flight round trip + fdatasync"],
        times["bare Flight put + fdatasync, batches"],
    )
    report.add("one by one, times a bare round trip + sync", ratio(single, bare), 1.5, at_most=True)
    report.add("pipelined, times one by one", ratio(single, piped), 5)
    report.add("batches, part of bare put + sync", ratio(put, batches), 0.6)
    for row, ours, goal in (
        ("one by one", single, 1),
        ("pipelined", piped, 1),
        ("batches", batches, 5),
    ):
        for name, theirs in times.items():
            if name.startswith("RabbitMQ") and name.endswith(f", {row}"):
                report.add(f"{row}, times RabbitMQ", ratio(theirs, ours), goal)


if __name__ == "__main__":
    main()
