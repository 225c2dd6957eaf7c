"""One bad key attacks a real server for minutes, and a victim with its own key goes on.

    python -m tests.soak.hostile_neighbour --seconds 120 [--seed 7]

The hog has Send and Listen on a junk queue, and Manage on a junk topic. It claims origins, fills
queues and dead-letter queues, writes long reasons, leases and settles in tiny intervals, parks
receives, makes rules that blow messages up, guesses tokens and asks for what it has no right to.
The victim sends, receives, completes and manages. The broker must not restart, no command may fail
inside it, the victim must get every message exactly once, and memory and log must stay bounded.
"""

import argparse
import http.client
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import numpy as np

from tests.soak.server_process import ServerProcess
from twinbus import (
    BrokeredMessage,
    Claim,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    QueueDescription,
    TopicDescription,
)
from twinbus.broker import commands as c
from twinbus.broker.origins import sender_source
from twinbus.connection import ConnectionString
from twinbus.entities import RuleDescription, SqlAction, SqlFilter, TrueFilter, dead_letter_path
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message import to_batch, tokens_of
from twinbus.namespace.contract import Namespace
from twinbus.namespace.opening import open_namespace

JUNK, NEWS, SPORT, VICTIM = "junk", "news", "news/Subscriptions/sport", "orders"
HOGS = 2
PACE_S = 0.002
LOG_BYTES = 1024**3  # with junk queues of 32 MB each, many times what they may hold
MEMORY_GROWTH = 1.5
SQL = ("a=a+a+a+a", "a=b->c", "price > -'1'", "NOT " * 40 + "a=1", "a LIKE '%_%_%'", "1=1")
Attack = Callable[[random.Random, Namespace], object]


def _batch(count: int, size: int = 10, **fields: object) -> list[BrokeredMessage]:
    return [BrokeredMessage(bytes(size), **fields) for _ in range(count)]  # type: ignore[arg-type]


def claim_origins(rng: random.Random, junk: Namespace) -> object:
    count = rng.choice([1, 100, 900])
    pings = to_batch(_batch(count, content_type=PING_CONTENT_TYPE))
    start = rng.randrange(2**40)
    numbers = np.arange(count) * rng.choice([1, 2]) + start
    source = rng.choice([sender_source(rng.getrandbits(64)), "orders#1.abc", "spill/" + "0" * 32])
    return junk.ask(c.Send(JUNK, pings, c.Origin(source, numbers)), 10)


def fill(rng: random.Random, junk: Namespace) -> object:
    batch = to_batch(_batch(rng.choice([1, 1000, 20_000]), rng.choice([0, 100])))
    return junk.ask(c.Send(JUNK, batch), 10)


def bury(rng: random.Random, junk: Namespace) -> object:
    found = junk.ask(c.Receive(JUNK, rng.choice([1, 500])), 10)
    reason = "x" * rng.choice([0, 4000]) + str(rng.random())
    settle = c.Settle(JUNK, found.column("lock_token"), c.Disposition.DEAD_LETTER, reason)
    return junk.ask(settle, 10) if found.num_rows else None


def delete(rng: random.Random, junk: Namespace) -> object:
    path = rng.choice([JUNK, dead_letter_path(JUNK)])
    mode = c.ReceiveMode.RECEIVE_AND_DELETE
    return junk.ask(c.Receive(path, 5000, mode=mode), 10)


def lease(rng: random.Random, junk: Namespace) -> object:
    held = junk.ask(c.LeaseRange(JUNK, "hog", 10_000, duration=timedelta(seconds=2)), 10)
    if held is None:
        return None
    intervals = [(n, n) for n in range(held.first, held.last, 2)]
    release = rng.random() < 0.5
    return junk.ask(c.SettleRange(JUNK, held.epoch, intervals, release=release), 10)


def park(rng: random.Random, junk: Namespace) -> object:
    wait = timedelta(seconds=rng.random())
    return [junk.submit(c.Receive(dead_letter_path(JUNK), wait=wait)) for _ in range(50)]


def guess(rng: random.Random, junk: Namespace) -> object:
    tokens = tokens_of(UUID(int=rng.getrandbits(128)) for _ in range(100))
    return junk.ask(c.Settle(JUNK, tokens, rng.choice(list(c.Disposition))), 10)


def trespass(rng: random.Random, junk: Namespace) -> object:
    command = rng.choice(
        [
            c.Peek(VICTIM),
            c.Send(VICTIM, _batch(1)),
            c.DeleteEntity(VICTIM),
            c.ListKeys(),
            c.UpdateEntity(QueueDescription(path=JUNK, forward_to=VICTIM)),
        ]
    )
    return junk.ask(command, 10)


def rule(rng: random.Random, news: Namespace) -> object:
    action = SqlAction("SET a=a+a;" * rng.choice([1, 12, 40]))
    made = RuleDescription(f"r{rng.randrange(5)}", TrueFilter(), action)
    if rng.random() < 0.5:
        made = RuleDescription(made.name, SqlFilter(rng.choice(SQL)))
    with suppress(MessagingError):
        news.ask(c.DeleteRule(SPORT, made.name), 10)
    return news.ask(c.CreateRule(SPORT, made), 10)


def publish(rng: random.Random, news: Namespace) -> object:
    text = "x" * rng.choice([1, 1000, 100_000])
    batch = to_batch(_batch(rng.choice([1, 50]), application_properties={"a": text}))
    mode = c.ReceiveMode.RECEIVE_AND_DELETE
    for path in (SPORT, dead_letter_path(SPORT)):
        news.ask(c.Receive(path, 5000, mode=mode), 10)
    return news.ask(c.Send(NEWS, batch), 10)


ON_JUNK: tuple[Attack, ...] = (*(claim_origins, fill, bury, delete, lease, park, guess, trespass),)
ON_NEWS: tuple[Attack, ...] = (rule, publish)


class Hog(threading.Thread):
    """Attacks until it is stopped."""

    def __init__(self, seed: int, where: str, attacks: tuple[Attack, ...]) -> None:
        super().__init__(daemon=True)
        self.outcomes: Counter[str] = Counter()
        self.trouble = ""
        self.stopped = threading.Event()
        self._rng = random.Random(seed)
        self._where = where
        self._attacks = attacks

    def run(self) -> None:
        namespace = open_namespace(ConnectionString.parse(self._where))
        while not self.stopped.wait(PACE_S):
            attack = self._rng.choice(self._attacks)
            try:
                attack(self._rng, namespace)
                self.outcomes[f"{attack.__name__} taken"] += 1
            except MessagingError as error:
                self.outcomes[f"{attack.__name__} {error.code}"] += 1
            except Exception as error:  # noqa: BLE001 - the attacker itself must not be broken
                self.trouble = repr(error)
                return
        namespace.close()


def work(where: str, seconds: float) -> tuple[list[float], int]:
    """Be the victim: send, receive, complete and look; return how long each round took."""
    took: list[float] = []
    deadline = time.monotonic() + seconds
    with MessagingFactory.from_connection_string(where) as factory:
        sender = factory.create_message_sender(VICTIM)
        receiver = factory.create_message_receiver(VICTIM)
        while time.monotonic() < deadline:
            one, began = f"{len(took)}", time.monotonic()
            sender.send(BrokeredMessage(b"honest", message_id=one))
            found = receiver.receive(timedelta(seconds=10))
            assert found is not None and found.message_id == one, (one, found)  # noqa: PT018
            found.complete()
            took.append(time.monotonic() - began)
        left = len(receiver.peek(0, 10))
    return took, left


def metric(server: ServerProcess, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.admin_port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))


def log_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "namespace" / "log").glob("*"))


def set_up(server: ServerProcess) -> dict[str, str]:
    """Make the entities and keys; return the connection strings of the keys by path."""
    found = {}
    with NamespaceManager.from_connection_string(server.connection_string) as manager:
        manager.create_queue(QueueDescription(path=JUNK, max_size_in_megabytes=32))
        manager.create_queue(QueueDescription(path=VICTIM))
        manager.create_topic(TopicDescription(path=NEWS, max_size_in_megabytes=32))
        manager.create_subscription(NEWS, "sport")
        both = [Claim.SEND, Claim.LISTEN]
        for path, claims in ((JUNK, both), (VICTIM, both), (NEWS, [Claim.MANAGE])):
            key = manager.create_key("hog" if path != VICTIM else "victim", claims, path)
            bare = server.connection_string.partition(";SharedAccess")[0]
            found[path] = (
                f"{bare};SharedAccessKeyName={key.name};SharedAccessKey={key.primary};"
                f"EntityPath={path}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with ExitStack() as life:
        folder = Path(life.enter_context(tempfile.TemporaryDirectory()))
        server = ServerProcess(folder, "")
        life.callback(server.kill)
        server.start()
        where = set_up(server)
        hogs = [Hog(options.seed + at, where[JUNK], ON_JUNK) for at in range(HOGS)]
        hogs.append(Hog(options.seed - 1, where[NEWS], ON_NEWS))
        for hog in hogs:
            hog.start()
        took, left = work(where[VICTIM], options.seconds / 3)
        early = server.footprint()
        more, left = work(where[VICTIM], options.seconds * 2 / 3)
        took += more
        for hog in hogs:
            hog.stopped.set()
        for hog in hogs:
            hog.join(60)
        late, size = server.footprint(), log_bytes(folder)
        restarts = metric(server, "twinbus_restarts_total")
        failed = metric(server, "twinbus_failed_commands_total")
        with NamespaceManager.from_connection_string(server.connection_string) as manager:
            assert len(manager.list_queues()) == 2
        outcomes: Counter[str] = sum((hog.outcomes for hog in hogs), Counter())
    for name, count in sorted(outcomes.items()):
        print(f"  {count:>7,}  {name}")
    ordered = sorted(took)
    print(
        f"victim: {len(took):,} rounds, median {statistics.median(took) * 1000:.0f} ms, p99 "
        f"{ordered[int(len(ordered) * 0.99)] * 1000:.0f} ms, max {ordered[-1] * 1000:.0f} ms\n"
        f"server: {early} -> {late}; log {size:,} bytes; {restarts:.0f} restarts, {failed:.0f} "
        "commands failed inside"
    )
    assert not restarts, "the broker restarted"
    assert not failed, "a command failed inside the broker"
    assert not left, f"{left} messages of the victim are there twice"
    assert not any(hog.trouble for hog in hogs), [hog.trouble for hog in hogs]
    assert late.memory_kb < MEMORY_GROWTH * early.memory_kb, "memory grows"
    assert size < LOG_BYTES, "the log grows"


if __name__ == "__main__":
    main()
