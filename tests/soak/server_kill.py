"""Kill -9 a server under load from many clients, start it again, and hold it to its word.

    python -m tests.soak.server_kill --kills 50 [--seed 7]

Clients are processes with senders (single, batch, pipelined) and receivers, and come back by
themselves under their retry policy. Nothing acknowledged is lost. A message that was completed may
come back only when a kill came right after: settlements ride on the next sync. A message may be
there twice only when a send of it was tried again.
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
FENCE_S = 0.5  # a completion this long before a kill was synced by other clients' sends


@dataclass
class Ledger:
    """What clients were told, over all lives of the server."""

    sent: Counter[str] = field(default_factory=Counter)  # acknowledged sends
    unknown: set[str] = field(default_factory=set)  # tried again: it may be there twice
    failed: set[str] = field(default_factory=set)  # given up: it may be there
    received: Counter[str] = field(default_factory=Counter)
    completed: dict[str, float] = field(default_factory=dict)  # when it was acknowledged
    complaints: list[str] = field(default_factory=list)

    def read(self, told: Path) -> None:
        """Take in what one client told."""
        for line in told.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "complaint":
                self.complaints.append(rest)
                continue
            when, *ids = rest.split()
            if word == "sent":
                self.sent.update(ids)
            elif word == "unknown":
                self.unknown.update(ids)
            elif word == "failed":
                self.failed.update(ids)
            elif word == "received":
                self.received.update(ids)
            elif word == "completed":
                self.completed.update(dict.fromkeys(ids, float(when)))


@dataclass
class Outcome:
    """What came of it."""

    kills: int = 0
    acknowledged: int = 0
    completed: int = 0
    lost: list[str] = field(default_factory=list)
    back_after_kill: int = 0  # completions that a kill undid: allowed
    came_back: list[str] = field(default_factory=list)  # completed long before any kill
    doubles: int = 0  # of sends that were tried again: allowed
    strange_doubles: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    exit_code: int | None = None
    stop_s: float = 0.0

    def check(self) -> None:
        """Raise when a promise was broken."""
        assert not self.complaints, f"clients failed: {self.complaints[:5]}"
        assert not self.lost, f"lost {len(self.lost)} acknowledged: {self.lost[:5]}"
        assert not self.came_back, f"{len(self.came_back)} came back: {self.came_back[:5]}"
        assert not self.strange_doubles, f"doubled: {self.strange_doubles[:5]}"
        assert self.exit_code == 0, f"the server ended with {self.exit_code}"


def _clients(folder: Path, server: ServerProcess, seed: int) -> "list[subprocess.Popen[str]]":
    started = []
    for number in range(CLIENTS):
        with (folder / f"told-{number}.txt").open("w") as told:
            client = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.server_kill_client", str(number), str(seed)],
                stdin=subprocess.PIPE,
                stdout=told,
                text=True,
            )
        assert client.stdin is not None
        client.stdin.write(server.connection_string + "\n")  # not an argument: it has a key
        client.stdin.flush()
        started.append(client)
    return started


def _drain(connection_string: str) -> list[tuple[str, int]]:
    """Take what is left, with how often it was delivered before."""
    left: list[tuple[str, int]] = []
    with MessagingFactory.from_connection_string(connection_string) as factory:
        receiver = factory.create_message_receiver(QUEUE)
        while messages := receiver.receive_batch(1000, timedelta(seconds=3)):  # locks may lapse
            receiver.complete(messages)
            left += [(m.message_id, m.delivery_count or 0) for m in messages]
    return left


def _judge(ledger: Ledger, left: list[tuple[str, int]], kills: list[float]) -> Outcome:
    outcome = Outcome(acknowledged=len(ledger.sent), completed=len(ledger.completed))
    held = Counter(message_id for message_id, _ in left)
    seen = ledger.received + held
    outcome.lost = sorted(one for one in ledger.sent if not seen[one])
    outcome.complaints = ledger.complaints
    for one in held:
        if one in ledger.completed and one not in ledger.unknown:
            near = any(0 <= kill - ledger.completed[one] < FENCE_S for kill in kills)
            if near:
                outcome.back_after_kill += 1
            else:
                outcome.came_back.append(one)
    for one, count in held.items():
        if count > 1 and one in ledger.unknown | ledger.failed:
            outcome.doubles += 1
        elif count > 1:
            outcome.strange_doubles.append(one)
    return outcome


def run(kills: int, seed: int, *, progress: bool = False) -> Outcome:
    """Kill so many servers; return what came of it."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="twinbus-server-kill-") as place:
        folder = Path(place)
        server = ServerProcess(folder)
        server.start()
        clients: list[subprocess.Popen[str]] = []
        killed: list[float] = []
        try:
            with NamespaceManager.from_connection_string(server.connection_string) as manager:
                lock = timedelta(seconds=2)  # what a killed server had locked is soon free
                manager.create_queue(QueueDescription(path=QUEUE, lock_duration=lock))
            clients = _clients(folder, server, seed)
            for kill in range(1, kills + 1):
                time.sleep(generator.uniform(0.3, 1.2))
                assert server.is_alive(), f"the server failed: {server.complaints()}"
                server.kill()
                killed.append(time.time())
                server.start()
                if progress and (kill % 10 == 0 or kill == kills):
                    print(f"{kill:>5} kills", flush=True)
            time.sleep(1)
            for client in clients:
                _finish(client)
            ledger = Ledger()
            for number in range(CLIENTS):
                ledger.read(folder / f"told-{number}.txt")
            outcome = _judge(ledger, _drain(server.connection_string), killed)
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
        f"{outcome.completed:,} completed, {outcome.back_after_kill} came back after a kill, "
        f"{len(outcome.came_back)} for no reason; {outcome.doubles} doubled by a retry, "
        f"{len(outcome.strange_doubles)} for no reason; "
        f"SIGTERM: exit {outcome.exit_code} after {outcome.stop_s:.2f} s"
    )
    outcome.check()


if __name__ == "__main__":
    main()
