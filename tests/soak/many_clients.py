"""Hold many connections with traffic for a while, and look for errors and leaks.

    python -m tests.soak.many_clients --seconds 60

200 clients in this process and 20 processes with 5 clients each send, receive and complete. After
a warm-up with as many clients, and again at the end, everyone hangs up; threads, descriptors and
memory of the server and of this process must be (about) what they were in between.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tests.soak.server_process import Footprint, ServerProcess, footprint
from twinbus import BrokeredMessage, MessagingError, MessagingFactory, NamespaceManager

QUEUES = 8
CLIENTS_PER_PROCESS = 5
PAUSE_S = 0.1  # between two messages of a client: it is connections that are tried here
MORE_THREADS = 10  # gRPC keeps some for a while
MORE_DESCRIPTORS = 20
MORE_KB = 60 * 1024  # allocators do not give everything back


@dataclass
class Tally:
    """What clients did."""

    messages: int = 0
    errors: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, messages: int, error: str | None = None) -> None:
        with self._lock:
            self.messages += messages
            if error is not None:
                self.errors.append(error)


def work(connection_string: str, number: int, until: float, tally: Tally) -> None:
    """Be one client: send, receive and complete until it is time."""
    messages = 0
    error: str | None = None
    try:
        with MessagingFactory.from_connection_string(connection_string) as factory:
            client = factory.create_queue_client(f"queue-{number % QUEUES}")
            while time.monotonic() < until:
                client.send(BrokeredMessage(b"x" * 500))
                received = client.receive_batch(1, timedelta(seconds=1))
                client.complete(received)
                messages += len(received)
                time.sleep(PAUSE_S)
    except MessagingError as trouble:
        error = f"client {number}: {trouble!r:.200}"
    tally.add(messages, error)


def work_together(connection_string: str, numbers: range, seconds: float) -> Tally:
    """Be many clients at once."""
    tally, until = Tally(), time.monotonic() + seconds
    threads = [
        threading.Thread(target=work, args=(connection_string, number, until, tally))
        for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is of everything."""

    clients: int = 200
    processes: int = 20
    seconds: float = 60.0

    @property
    def connections(self) -> int:
        return self.clients + self.processes * CLIENTS_PER_PROCESS


@dataclass
class Outcome:
    """What came of it; footprints of the server and of this process, with nobody connected."""

    messages: int = 0
    errors: list[str] = field(default_factory=list)
    most_connected: int = 0  # descriptors of the server under load
    before: tuple[Footprint, Footprint] | None = None
    during: tuple[Footprint, Footprint] | None = None
    after: tuple[Footprint, Footprint] | None = None
    exit_code: int | None = None

    def check(self) -> None:
        """Raise on errors and leaks."""
        assert not self.errors, f"{len(self.errors)} clients failed: {self.errors[:3]}"
        assert self.before is not None
        assert self.after is not None
        for who, before, after in zip(("server", "client"), self.before, self.after, strict=True):
            assert after.threads <= before.threads + MORE_THREADS, f"{who}: {before} -> {after}"
            assert after.descriptors <= before.descriptors + MORE_DESCRIPTORS, (
                f"{who}: {before} -> {after}"
            )
            assert after.memory_kb <= before.memory_kb + MORE_KB, f"{who}: {before} -> {after}"
        assert self.exit_code == 0, f"the server ended with {self.exit_code}"


def _load(server: ServerProcess, size: Size, seconds: float, outcome: Outcome) -> None:
    """Run everything once, and look at the footprints in the middle of it."""
    arguments = [sys.executable, "-m", "tests.soak.many_clients", "--seconds", str(seconds)]
    processes = []
    for _ in range(size.processes):
        process = subprocess.Popen(
            [*arguments, "--join"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(server.connection_string + "\n")  # not an argument: it has a key
        process.stdin.close()
        processes.append(process)
    looker = threading.Timer(seconds * 0.7, _look, [server, outcome])
    looker.start()
    tally = work_together(server.connection_string, range(size.clients), seconds)
    looker.join()
    outcome.messages += tally.messages
    outcome.errors += tally.errors
    for process in processes:
        assert process.stdout is not None
        reported = process.stdout.read().splitlines()
        process.stdout.close()
        code = process.wait(timeout=120)
        outcome.messages += int(reported[0]) if reported else 0
        outcome.errors += reported[1:]
        outcome.errors += [f"a process ended with {code}"] if code else []


def _look(server: ServerProcess, outcome: Outcome) -> None:
    outcome.during = (server.footprint(), footprint(os.getpid()))


def _rest(server: ServerProcess) -> tuple[Footprint, Footprint]:
    """Measure once nobody is connected: connections end a moment after their clients."""
    best = server.footprint()
    for _ in range(50):
        time.sleep(0.1)
        now = server.footprint()
        if now.descriptors >= best.descriptors and now.threads >= best.threads:
            return now, footprint(os.getpid())
        best = now
    return best, footprint(os.getpid())


def run(size: Size) -> Outcome:
    """Warm up, work, and measure."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="twinbus-many-clients-") as folder:
        server = ServerProcess(Path(folder))
        server.start()
        try:
            with NamespaceManager.from_connection_string(server.connection_string) as manager:
                for number in range(QUEUES):
                    manager.create_queue(f"queue-{number}")
            _load(server, size, min(10.0, size.seconds), outcome)
            outcome.before = _rest(server)
            outcome.messages = 0
            _load(server, size, size.seconds, outcome)
            outcome.after = _rest(server)
            outcome.exit_code = server.stop()
        finally:
            server.kill()
    return outcome


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--join", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    if options.join:
        numbers = range(CLIENTS_PER_PROCESS)
        tally = work_together(sys.stdin.readline().strip(), numbers, options.seconds)
        print(tally.messages, *tally.errors, sep="\n")
        return
    size = Size(options.clients, options.processes, options.seconds)
    outcome = run(size)
    print(
        f"{size.connections} connections from {size.processes + 1} processes for "
        f"{size.seconds:.0f} s: {outcome.messages / size.seconds:,.0f} messages/s, "
        f"{len(outcome.errors)} errors"
    )
    for when in ("before", "during", "after"):
        server, client = getattr(outcome, when) or ("?", "?")
        print(f"{when:>7}  server {server}; this process {client}")
    outcome.check()


if __name__ == "__main__":
    main()
