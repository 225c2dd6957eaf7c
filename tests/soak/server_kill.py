"""Kill -9 a server under load from many clients, start it again, and hold it to its word.

    python -m tests.soak.server_kill --kills 50 [--seed 7]

Clients are processes with senders (single, batch, pipelined) and receivers, and come back by
themselves under their retry policy. Nothing acknowledged is lost, and no message comes back whose
completion was acknowledged. No message is there twice: a send that is tried again is recognised.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tests.soak.server_process import ServerProcess
from twinbus import MessagingFactory, NamespaceManager, QueueDescription

QUEUE = "orders"
CLIENTS = 3


@dataclass
class Ledger:
    """What clients reported, over all lives of the server. A copy is ID:NUMBER."""

    sent: set[str] = field(default_factory=set)  # acknowledged sends
    received: dict[str, float] = field(default_factory=dict)  # copies, when they came last
    completed: dict[str, float] = field(default_factory=dict)  # copies, when it was acknowledged
    complaints: list[str] = field(default_factory=list)

    def read(self, reported: Path) -> None:
        """Add what one client reported."""
        for line in reported.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "complaint":
                self.complaints.append(rest)
                continue
            when, *items = rest.split()
            if word == "sent":
                self.sent.update(items)
            elif word == "received":
                self.receive(items, float(when))
            elif word == "completed":
                self.completed.update(dict.fromkeys(items, float(when)))

    def receive(self, copies: list[str], when: float) -> None:
        """Note copies that came; clients report independently, so the latest time counts."""
        for copy in copies:
            self.received[copy] = max(when, self.received.get(copy, 0.0))

    def judge(self) -> "Outcome":
        """Compare what was promised with what came."""
        outcome = Outcome(acknowledged=len(self.sent), completed=len(self.completed))
        copies = Counter(copy.partition(":")[0] for copy in self.received)
        outcome.lost = sorted(message for message in self.sent if not copies[message])
        outcome.complaints = self.complaints
        for copy, when in self.completed.items():
            if self.received[copy] > when:
                outcome.came_back.append(copy)
        outcome.doubled = sorted(key for key, count in copies.items() if count > 1)
        return outcome


@dataclass
class Outcome:
    """What came of it."""

    kills: int = 0
    acknowledged: int = 0
    completed: int = 0
    lost: list[str] = field(default_factory=list)
    came_back: list[str] = field(default_factory=list)  # their completion was acknowledged before
    doubled: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    exit_code: int | None = None
    stop_s: float = 0.0

    def check(self) -> None:
        """Raise when a promise was broken."""
        assert not self.complaints, f"clients failed: {self.complaints[:5]}"
        assert not self.lost, f"lost {len(self.lost)} acknowledged: {self.lost[:5]}"
        assert not self.came_back, f"{len(self.came_back)} came back: {self.came_back[:5]}"
        assert not self.doubled, f"doubled {len(self.doubled)}: {self.doubled[:5]}"
        assert self.exit_code == 0, f"the server ended with {self.exit_code}"


def _clients(folder: Path, server: ServerProcess, seed: int) -> "list[subprocess.Popen[str]]":
    started = []
    for number in range(CLIENTS):
        with (folder / f"reported-{number}.txt").open("w") as reported:
            client = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.server_kill_client", str(number), str(seed)],
                stdin=subprocess.PIPE,
                stdout=reported,
                text=True,
            )
        assert client.stdin is not None
        client.stdin.write(server.connection_string + "\n")  # not an argument: it has a key
        client.stdin.flush()
        started.append(client)
    return started


def _drain(connection_string: str, ledger: Ledger) -> None:
    """Take what is left."""
    with MessagingFactory.from_connection_string(connection_string) as factory:
        receiver = factory.create_message_receiver(QUEUE)
        while messages := receiver.receive_batch(1000, timedelta(seconds=3)):  # locks may lapse
            receiver.complete(messages)
            ledger.receive([f"{m.message_id}:{m.sequence_number}" for m in messages], time.time())


def run(kills: int, seed: int, *, progress: bool = False) -> Outcome:
    """Kill so many servers; return what came of it."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="twinbus-server-kill-") as place:
        folder = Path(place)
        server = ServerProcess(folder)
        server.start()
        clients: list[subprocess.Popen[str]] = []
        try:
            with NamespaceManager.from_connection_string(server.connection_string) as manager:
                lock = timedelta(seconds=2)  # what a killed server had locked is soon free
                manager.create_queue(QueueDescription(path=QUEUE, lock_duration=lock))
            clients = _clients(folder, server, seed)
            for kill in range(1, kills + 1):
                time.sleep(generator.uniform(0.3, 1.2))
                assert server.is_alive(), f"the server failed: {server.complaints()}"
                server.kill()
                server.start()
                if progress and (kill % 10 == 0 or kill == kills):
                    print(f"{kill:>5} kills", flush=True)
            time.sleep(1)
            for client in clients:
                _finish(client)
            ledger = Ledger()
            for number in range(CLIENTS):
                ledger.read(folder / f"reported-{number}.txt")
            _drain(server.connection_string, ledger)
            outcome = ledger.judge()
            outcome.kills = kills
            began = time.monotonic()
            outcome.exit_code = server.stop()
            outcome.stop_s = time.monotonic() - began
        finally:
            for client in clients:
                client.kill()
                client.wait()
            server.kill()
    return outcome


def _finish(client: "subprocess.Popen[str]") -> None:
    """Tell a client to finish, and wait for it."""
    assert client.stdin is not None
    client.stdin.close()
    assert client.wait(timeout=60) == 0, "a client failed, see its traceback"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(
        f"seed {options.seed}: python -m tests.soak.server_kill --kills {options.kills} "
        f"--seed {options.seed}",
        flush=True,
    )
    began = time.monotonic()
    outcome = run(options.kills, options.seed, progress=True)
    print(
        f"{outcome.kills} kills in {time.monotonic() - began:.0f} s: "
        f"{outcome.acknowledged:,} messages acknowledged, {len(outcome.lost)} lost; "
        f"{outcome.completed:,} completed, "
        f"{len(outcome.came_back)} came back; {len(outcome.doubled)} doubled; "
        f"SIGTERM: exit {outcome.exit_code} after {outcome.stop_s:.2f} s"
    )
    outcome.check()


if __name__ == "__main__":
    main()
