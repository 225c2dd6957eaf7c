"""Attack a real server with ordinary keys for minutes, and look after a victim meanwhile (G11).

    python -m tests.soak.hostile_neighbour --seconds 120 --seed 1

Hostile keys, each with rights on its own junk entity only, make the attacks of hostile_attacks.py
in an order that the seed decides, from several threads of another process. A victim with a key of
its own sends, receives, completes and manages. The server must not restart or meet an internal
error, the victim must see no error and each of its messages once, and the server's memory and log
must stay within bounds. The latencies of the victim are printed.
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak.hostile_attacks import ATTACKS, IDS, JUNK, SESSIONS, TOPIC, VICTIM, Hog, attack
from tests.soak.server_process import ServerProcess
from twinbus import BrokeredMessage, MessagingError, MessagingFactory
from twinbus.connection import ConnectionString, Place
from twinbus.entities import QueueDescription, SubscriptionDescription, TopicDescription
from twinbus.namespace.server import ServerNamespace
from twinbus.protocol.commands import CreateEntity, GetRuntimeProperties, PutKey, UpdateEntity
from twinbus.protocol.keys import Claim, SharedAccessKey

HOGS = 3  # threads that attack: more than the server has cores
PAUSE_S = 0.05  # between two attacks of a thread
VICTIM_PAUSE_S = 0.02
WARM_UP = 0.15  # of the time, before memory is compared
MORE_MEMORY = 1.5  # how much higher the last third may be than the first, and
MORE_KB = 150 * 1024  # as much again: allocators keep some of what attacks took
MAX_MEMORY_KB = 1024 * 1024  # at any time: unread replies of four keys, and what attacks decode
MAX_LOG_BYTES = 2 * 1024**3  # quotas of 200 MB, written twice, facts, and spare segments
MAX_STDERR_BYTES = 5 * 1024**2
METRICS = ("twinbus_restarts_total", "twinbus_failed_commands_total")


@dataclass
class Raid:
    """What the hostile process did."""

    attacks: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)  # errors that ended an attack early
    findings: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What came of it."""

    raid: Raid = field(default_factory=Raid)
    latencies: dict[str, list[float]] = field(default_factory=dict)  # of the victim, in seconds
    errors: list[str] = field(default_factory=list)  # that the victim saw
    sent: int = 0
    received: Counter[bytes] = field(default_factory=Counter)
    memory_kb: list[int] = field(default_factory=list)
    log_bytes: int = 0  # at most
    metrics: dict[str, float] = field(default_factory=dict)
    stderr_bytes: int = 0
    exit_code: int | None = None

    def memory(self) -> tuple[int, int]:
        """Return what the server holds in the first and in the last third, between attacks."""
        found = self.memory_kb[int(len(self.memory_kb) * WARM_UP) :]
        third = max(len(found) // 3, 1)
        return _low(found[:third]), _low(found[-third:])

    def check(self) -> None:
        """Raise if anybody was harmed."""
        assert not self.raid.findings, f"what must be refused was not: {self.raid.findings[:5]}"
        assert self.metrics == dict.fromkeys(METRICS, 0.0), (
            f"the server met trouble: {self.metrics}"
        )
        assert not self.errors, f"the victim saw {len(self.errors)} errors: {self.errors[:3]}"
        wrong = {body: count for body, count in self.received.items() if count != 1}
        assert not wrong, f"messages came more than once: {list(wrong.items())[:3]}"
        assert len(self.received) == self.sent, f"{len(self.received)} of {self.sent} arrived"
        first, last = self.memory()
        assert last <= MORE_MEMORY * first + MORE_KB, f"memory grew: {first:,} KB -> {last:,} KB"
        most = max(self.memory_kb, default=0)
        assert most <= MAX_MEMORY_KB, f"the server took {most:,} KB of memory"
        assert self.log_bytes <= MAX_LOG_BYTES, f"the log took {self.log_bytes:,} bytes"
        assert self.stderr_bytes <= MAX_STDERR_BYTES, f"stderr took {self.stderr_bytes:,} bytes"
        assert self.exit_code == 0, f"the server ended with {self.exit_code}"


def _low(values: list[int]) -> int:
    """Return a low value: what is held between attacks, which are short."""
    return sorted(values)[len(values) // 4] if values else 0


class Street:
    """A server, its entities and the keys of everybody."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.root = ServerNamespace(ConnectionString.parse(server.connection_string))
        small: dict[str, Any] = {"max_size_in_megabytes": 64}
        for description in (
            QueueDescription(path=JUNK, lock_duration=timedelta(seconds=5), **small),
            QueueDescription(path=SESSIONS, requires_session=True, max_size_in_megabytes=32),
            QueueDescription(
                path=IDS,
                requires_duplicate_detection=True,
                duplicate_detection_history_time_window=timedelta(seconds=20),
                max_size_in_megabytes=32,
            ),
            TopicDescription(path=TOPIC, **small),
            SubscriptionDescription(topic_path=TOPIC, name="all"),
            QueueDescription(path=VICTIM, lock_duration=timedelta(minutes=5)),
        ):
            self.root.ask(CreateEntity(description))
        tenant = (Claim.SEND, Claim.LISTEN)
        self.hostile = {path: self._key(path, *tenant) for path in (JUNK, SESSIONS, IDS)}
        self.hostile[TOPIC] = self._key(TOPIC, Claim.MANAGE)
        self.victim = self._key(VICTIM, Claim.MANAGE)

    def _key(self, path: str, *claims: Claim) -> ConnectionString:
        secret = f"{path} has a key of its own"
        key = SharedAccessKey(
            name=path, claims=claims, primary=secret, secondary=secret, entity_path=path
        )
        self.root.ask(PutKey(key))
        return ConnectionString(
            place=Place.SERVER,
            host="127.0.0.1",
            port=self.server.port,
            key_name=path,
            key=secret,
            entity_path=path,
        )


class Victim:
    """An honest application with a queue of its own."""

    def __init__(self, street: Street, outcome: Outcome, stop: threading.Event) -> None:
        self._where = street.victim
        self._outcome = outcome
        self._stop = stop

    def _timed(self, what: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return work()
        except MessagingError as error:
            self._outcome.errors.append(f"{what}: {error!r:.200}")
            return None
        finally:
            self._outcome.latencies.setdefault(what, []).append(time.monotonic() - began)

    def exchange_messages(self) -> None:
        """Send, receive and complete until it is time; then take what is left."""
        with MessagingFactory.from_connection_string(self._where.to_text()) as factory:
            client = factory.create_queue_client(VICTIM)
            while not self._stop.is_set():
                body = str(self._outcome.sent).encode()
                self._timed("send", partial(client.send, BrokeredMessage(body)))
                self._outcome.sent += 1
                self._take(client)
                time.sleep(VICTIM_PAUSE_S)
            while self._take(client):
                pass

    def _take(self, client: Any) -> int:
        found = self._timed("receive", partial(client.receive_batch, 100, timedelta(0))) or []
        if found:
            self._timed("complete", partial(client.complete, found))
            self._outcome.received.update(message.body for message in found)
        return len(found)

    def manage(self) -> None:
        """Look at the queue, and describe it anew."""
        look = GetRuntimeProperties(VICTIM)
        update = UpdateEntity(QueueDescription(path=VICTIM, lock_duration=timedelta(minutes=5)))
        with ServerNamespace(self._where) as namespace:
            while not self._stop.is_set():
                self._timed("look", partial(namespace.ask, look, 60))
                self._timed("update", partial(namespace.ask, update, 60))
                time.sleep(10 * VICTIM_PAUSE_S)


def _attack(keys: dict[str, ConnectionString], seed: str, until: float, raid: Raid) -> None:
    """Be one of the threads that attack."""
    hog = Hog(keys, random.Random(seed))
    while time.monotonic() < until:
        chosen = hog.generator.choice(ATTACKS)
        ended = attack(hog, chosen)
        name = chosen.__name__.replace("_", " ")
        raid.attacks[name] += 1
        if ended:
            raid.endings[f"{name}: {ended}"] += 1
        time.sleep(PAUSE_S)
    hog.let_go()
    raid.findings += hog.findings


def be_hostile(keys: dict[str, ConnectionString], seed: int, seconds: float) -> Raid:
    """Attack from several threads."""
    raid, until = Raid(), time.monotonic() + seconds
    names = [f"{seed}/{number}" for number in range(HOGS)]
    for thread in _run_threads([partial(_attack, keys, name, until, raid) for name in names]):
        thread.join()
    return raid


def _start_raid(street: Street, seed: int, seconds: float) -> "subprocess.Popen[str]":
    """Start the hostile process; its keys are no arguments, which others could read."""
    arguments = ["--seconds", str(seconds), "--seed", str(seed), "--join"]
    raiders = subprocess.Popen(
        [sys.executable, "-m", "tests.soak.hostile_neighbour", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert raiders.stdin is not None
    raiders.stdin.write(json.dumps({path: key.to_text() for path, key in street.hostile.items()}))
    raiders.stdin.close()
    return raiders


def _end_raid(raiders: "subprocess.Popen[str]", seconds: float) -> Raid:
    """Wait for the hostile process; return what it did."""
    try:
        assert raiders.stdout is not None
        reported = raiders.stdout.read()
        code = raiders.wait(timeout=seconds)
    finally:
        raiders.kill()
        raiders.wait()
    assert code == 0, f"the hostile process ended with {code}"
    attacks, endings, findings = json.loads(reported)
    return Raid(Counter(attacks), Counter(endings), findings)


def _watch(server: ServerProcess, folder: Path, outcome: Outcome, stop: threading.Event) -> None:
    """Measure memory and log."""
    log = folder / "namespace" / "log"
    while not stop.wait(0.2) and server.is_alive():
        outcome.memory_kb.append(server.footprint().memory_kb)
        sizes = []
        for path in log.iterdir():
            try:
                sizes.append(path.stat().st_blocks * 512)
            except OSError:
                continue  # it was removed meanwhile
        outcome.log_bytes = max(outcome.log_bytes, sum(sizes))


def metrics_of(server: ServerProcess) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.admin_port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    found = (line.split() for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in found if name in METRICS}


def _run_threads(works: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def run(seconds: float, seed: int) -> Outcome:
    """Attack for some time, let everybody finish, and measure."""
    outcome, stop = Outcome(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="twinbus-hostile-") as folder:
        server = ServerProcess(Path(folder))
        server.start()
        try:
            street = Street(server)
            victim = Victim(street, outcome, stop)
            watch = partial(_watch, server, Path(folder), outcome, stop)
            honest = _run_threads([victim.exchange_messages, victim.manage, watch])
            outcome.raid = _end_raid(_start_raid(street, seed, seconds), seconds + 300)
            stop.set()
            for thread in honest:
                thread.join(120)
            outcome.metrics = metrics_of(server)
            street.root.close()
            outcome.exit_code = server.stop()
            outcome.stderr_bytes = (Path(folder) / "stderr.txt").stat().st_size
            if outcome.stderr_bytes:
                print(server.complaints(), file=sys.stderr)
        finally:
            server.kill()
    return outcome


def _show(outcome: Outcome) -> None:
    for name, count in sorted(outcome.raid.attacks.items()):
        print(f"{count:7,}  {name}")
    if outcome.raid.endings:
        print("ended early:", dict(outcome.raid.endings.most_common(8)))
    print(f"{'victim':>10} {'count':>8} {'median':>9} {'p99':>9} {'max':>9}   ms")
    for what, found in sorted(outcome.latencies.items()):
        ordered = [1000 * item for item in sorted(found)]
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        middle = ordered[len(ordered) // 2]
        print(f"{what:>10} {len(ordered):8,} {middle:9.1f} {p99:9.1f} {ordered[-1]:9.1f}")
    first, last = outcome.memory()
    most = max(outcome.memory_kb, default=0)
    print(
        f"memory {first:,} KB -> {last:,} KB, at most {most:,} KB; log {outcome.log_bytes:,} bytes"
    )
    print(f"{outcome.metrics}; {len(outcome.errors)} errors; {len(outcome.received):,} messages")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--join", action="store_true", help="be the hostile process")
    options = parser.parse_args()
    if options.join:
        found = json.loads(sys.stdin.read())
        keys = {path: ConnectionString.parse(text) for path, text in found.items()}
        raid = be_hostile(keys, options.seed, options.seconds)
        print(json.dumps([raid.attacks, raid.endings, raid.findings]))
        return
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}, {HOGS} hostile threads for {options.seconds:.0f} s", flush=True)
    outcome = run(options.seconds, seed)
    _show(outcome)
    outcome.check()


if __name__ == "__main__":
    main()
