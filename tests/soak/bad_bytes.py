"""Throw at a server what no client would say, while a good client works, and look what gives.

    python -m tests.soak.bad_bytes --rounds 20 [--seed 7]

The good client never fails; every attack gets the error it deserves where the protocol lets the
server answer; the broker never has to heal itself; at the end the server is alive, has not grown
by more than GROWTH_KB since the warm-up, and holds what the good client was told is safe.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tests.soak import bad_bytes_amqp, bad_bytes_attacks, bad_bytes_values
from tests.soak.bad_bytes_tools import LARGE, ONCE, POISON, QUEUE, Target, batch_of
from tests.soak.server_process import Footprint, ServerProcess
from twinbus import BrokeredMessage, Claim, MessagingError, MessagingFactory, NamespaceManager
from twinbus.connection import ConnectionString, sign_token

# Objects of ended connections that Python's collector has not freed yet, and free memory of less
# than a burst, which a server returns once a minute: some 30 MB in all.
GROWTH_KB = 64 * 1024
WARM_UP_ROUNDS = 4  # until each attack has had its first time: caches and free lists are full
Attack = Callable[[Target], None]
ATTACKS: tuple[Attack, ...] = (
    *bad_bytes_attacks.ATTACKS,
    *bad_bytes_values.ATTACKS,
    *bad_bytes_amqp.ATTACKS,
)


@dataclass
class GoodClient:
    """Sends, receives and completes all the while, each with one try and no excuse."""

    connection_string: str
    acknowledged: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for work in (self._send, self._receive):
            thread = threading.Thread(target=self._insist, args=[work])
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _insist(self, work: Callable[[MessagingFactory], None]) -> None:
        while not self._stop.is_set():
            try:
                with MessagingFactory.from_connection_string(
                    self.connection_string, retry_policy=ONCE
                ) as factory:
                    work(factory)
            except MessagingError as error:
                self.failures.append(f"{work.__name__}: {error!r:.200}")
                self._stop.wait(0.1)

    def _send(self, factory: MessagingFactory) -> None:
        sender = factory.create_message_sender(QUEUE)
        while not self._stop.wait(0.002):
            count = len(self.acknowledged)
            size = 1 + count % 3
            ids = [f"{count}.{len(self.failures)}.{n}" for n in range(size)]
            began = time.monotonic()
            sender.send_batch([BrokeredMessage(b"good", message_id=item) for item in ids])
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.acknowledged.update(ids)

    def _receive(self, factory: MessagingFactory) -> None:
        receiver = factory.create_message_receiver(QUEUE)
        while not self._stop.is_set():
            messages = receiver.receive_batch(20, timedelta(seconds=0.2))
            if messages:
                receiver.complete(messages)
                self.completed.update(m.message_id for m in messages)

    def remaining(self) -> set[str]:
        """Take everything that is left in the queue."""
        left: set[str] = set()
        with MessagingFactory.from_connection_string(self.connection_string) as factory:
            receiver = factory.create_message_receiver(QUEUE)
            while messages := receiver.receive_batch(1000, timedelta(0)):
                receiver.complete(messages)
                left.update(m.message_id for m in messages)
        return left


@dataclass
class Outcome:
    """What came of it."""

    rounds: int = 0
    attacks: int = 0
    findings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the good client
    acknowledged: int = 0
    lost: int = 0
    slowest_s: float = 0.0
    warm: Footprint | None = None
    highest_kb: int = 0
    after: Footprint | None = None
    exit_code: int | None = None

    @property
    def growth_kb(self) -> int:
        assert self.warm is not None
        assert self.after is not None
        return self.after.memory_kb - self.warm.memory_kb

    def check(self) -> None:
        """Raise when the server did something wrong."""
        assert not self.failures, f"the good client failed: {self.failures[:5]}"
        assert not self.findings, "\n".join(["wrong answers:", *self.findings])
        assert self.lost == 0, f"lost {self.lost} acknowledged messages"
        assert self.growth_kb <= GROWTH_KB, f"grew by {self.growth_kb:,} KB"
        assert self.exit_code == 0, f"the server ended with {self.exit_code}"


def _prepare(server: ServerProcess, target: Target) -> None:
    """Make queues, keys of little power, and messages to browse."""
    target.renew(QUEUE, POISON, LARGE)
    with NamespaceManager.from_connection_string(server.connection_string) as manager:
        for name, claim in (("listener", Claim.LISTEN), ("sender", Claim.SEND)):
            key = manager.create_key(name, [claim])
            target.tokens[name] = sign_token("twinbus://x/", name, key.primary, 2**40)
    with MessagingFactory.from_connection_string(server.connection_string) as factory:
        factory.create_message_sender(LARGE).send_batch(batch_of(64, 128 * 1024))  # 8 MB


def _attack(target: Target, attacks: Sequence[Attack], outcome: Outcome) -> None:
    """Run attacks one after the other; see after each whether the server is well."""
    restarts = target.server.health()["restarts"]
    for attack in attacks:
        target.attack = attack.__name__
        try:
            attack(target)
        except Exception as error:  # noqa: BLE001 - the server may be gone, which is said below
            target.find(f"{type(error).__name__}: {error!s:.200}")
        outcome.attacks += 1
        assert target.server.is_alive(), (
            f"{attack.__name__} ended the server: {target.server.complaints()}"
        )
        outcome.highest_kb = max(outcome.highest_kb, target.server.footprint().memory_kb)
        health = target.server.health()
        assert health["status"] == "ok", f"{attack.__name__} stopped the namespace: {health}"
        now = health["restarts"]
        if now != restarts:
            target.find(f"the broker had to heal itself {now - restarts} times")
            restarts = now
        target.renew(POISON)


def run(
    rounds: int, seed: int, *, attacks: Sequence[Attack] = ATTACKS, progress: bool = False
) -> Outcome:
    """Attack a server for so many rounds; return what came of it."""
    outcome, generator = Outcome(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="twinbus-bad-bytes-") as folder:
        server = ServerProcess(Path(folder))
        server.start()
        try:
            connection = ConnectionString.parse(server.connection_string)
            target = Target(server, connection, generator, findings=outcome.findings)
            _prepare(server, target)
            good = GoodClient(server.connection_string, failures=outcome.failures)
            good.start()
            try:
                for _ in range(rounds):
                    _attack(target, generator.sample(attacks, len(attacks)), outcome)
                    outcome.rounds += 1
                    if outcome.rounds == min(WARM_UP_ROUNDS, rounds):
                        outcome.warm = target.let_go()
                    if progress:
                        print(f"{outcome.rounds:>4} rounds  {server.footprint()}", flush=True)
            finally:
                good.stop()
            outcome.after = target.let_go()
            outcome.acknowledged, outcome.slowest_s = len(good.acknowledged), good.slowest_s
            outcome.lost = len(good.acknowledged - good.completed - good.remaining())
            outcome.exit_code = server.stop()
        finally:
            server.kill()
    return outcome


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", default="", help="attacks whose module and name contain this")
    options = parser.parse_args()
    print(
        f"seed {options.seed}: python -m tests.soak.bad_bytes --rounds {options.rounds} "
        f"--seed {options.seed}",
        flush=True,
    )
    began = time.monotonic()
    attacks = [a for a in ATTACKS if options.only in f"{a.__module__}.{a.__name__}"]
    outcome = run(options.rounds, options.seed, attacks=attacks, progress=True)
    print(
        f"{outcome.attacks} attacks in {time.monotonic() - began:.0f} s; the good client had "
        f"{outcome.acknowledged:,} messages acknowledged, {outcome.lost} lost, "
        f"{len(outcome.failures)} failures, slowest send {outcome.slowest_s:.2f} s\n"
        f"server after warm-up: {outcome.warm}\nserver at the end:    {outcome.after}, "
        f"at most {outcome.highest_kb:,} KB after an attack; exit code {outcome.exit_code}"
    )
    outcome.check()


if __name__ == "__main__":
    main()
