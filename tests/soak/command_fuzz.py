"""Ask a broker for anything that can be asked, in any order, and see that it never fails itself.

    python -m tests.soak.command_fuzz --rounds 50 [--seed 7] [--turns 400]

Each round opens a namespace of its own and hands over commands of all kinds, several to a turn.
Their values lie at and beyond the edges; locks, epochs and numbers are real, stale or forged. In
between time passes, the wall clock is set, disks fail, and the broker restarts. After each
turn every command was answered or waits, no command met an internal error, the bookkeeping adds up
and the broker has not restarted by itself. What a broker holds when it is closed is there when it
is opened again.
"""

import argparse
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.inside import has_unwritten_settlements
from tests.scenarios.site import Site
from tests.soak.command_fuzz_values import PATHS, SUBSCRIPTIONS, TOPICS, Known, Maker
from twinbus.broker.accounts.throttle import Thresholds
from twinbus.broker.lifecycle import DURABLE, State
from twinbus.broker.turn.namespace import BrokerNamespace, NamespaceSettings
from twinbus.entities import (
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.errors import (
    BrokerRestartingError,
    CommandFailedError,
    InvalidArgumentError,
    MessagingError,
)
from twinbus.ledger import NO_LEDGER, LedgerSettings
from twinbus.message import DELIVERY_SCHEMA, to_messages
from twinbus.protocol import commands as c
from twinbus.protocol.frames import FrameKind, FrameReader
from twinbus.protocol.keys import Claim, SharedAccessKey
from twinbus.protocol.requests import BlockingRequest
from twinbus.protocol.rows import DeliveryRows
from twinbus.protocol.wire import (
    decode_command,
    decode_error,
    decode_value,
    encode_ask,
    encode_reply,
)

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
ROOT = SharedAccessKey(name="root", claims=(Claim.MANAGE,), primary="p" * 16, secondary="s" * 16)
QUEUES: dict[str, dict[str, Any]] = {
    "plain": {"max_delivery_count": 3},
    "duplicates": {"requires_duplicate_detection": True},
    "sessions": {
        "requires_session": True,
        "max_delivery_count": 2,
        "forward_dead_lettered_messages_to": "plain",
    },
    "expiring": {
        "default_message_time_to_live": MINUTE,
        "enable_dead_lettering_on_message_expiration": True,
    },
    "small": {"max_size_in_megabytes": 1},
    "idle": {"auto_delete_on_idle": timedelta(minutes=5)},
    "parted": {"enable_partitioning": True},
    "gate": {"forward_to": "plain"},
    "door": {"forward_to": "news"},
}


class FuzzError(AssertionError):
    """The broker did what it must never do."""


@dataclass
class Outcome:
    """What was asked in all rounds, and how it went."""

    answers: Counter[str] = field(default_factory=Counter)  # by command and outcome
    turns: int = 0
    restarts: int = 0  # that were asked for

    def commands(self) -> int:
        return sum(self.answers.values())


class Guest:
    """One who may do what it asks, and nothing more."""

    id = ":guest"

    def may(self, claim: Claim, path: str | None) -> bool:
        return claim is Claim.SEND and path is not None


class GuestCall(BlockingRequest):
    """A command of a guest."""

    def __init__(self, command: c.Command[Any]) -> None:
        super().__init__(command)
        self.principal = Guest()


class Round:
    """One namespace, and everything that happens to it."""

    def __init__(self, folder: Path, seed: int, outcome: Outcome) -> None:
        self.random = random.Random(seed)
        self.outcome = outcome
        ledger = self.random.choice([NO_LEDGER, LedgerSettings()])
        limits = Thresholds(operations_per_second=100, open_receives=10)
        settings = NamespaceSettings(thresholds=self.random.choice([limits, Thresholds()]))
        self.site = Site(folder, segment_bytes=200_000, ledger=ledger, namespace=settings)
        self.maker = Maker(self.random, Known())
        self.waiting: list[BlockingRequest] = []
        self.last: list[c.Command[Any]] = []  # of the turn that was last
        for description, rule in entities():
            self.site.ask(c.CreateEntity(description, rule))

    def run(self, turns: int) -> None:
        """Go through so many turns."""
        for _ in range(turns):
            event = self.random.random()
            if event < 0.7:
                self.ask()
            elif event < 0.93:
                self.pass_time()
            elif event < 0.96:
                self.set_clock()
            elif event < 0.98:
                self.trouble()
            elif event < 0.99:
                self.mend()
            else:
                self.restart()
            self.check()
            self.outcome.turns += 1
        self.repair()
        self.site.wait(minutes=5)
        self.check()
        if self.site.engine.health.spilling or self.site.engine.delayed.requests():
            raise FuzzError("the disks work again, but the broker does not use them")
        self.browse()
        self.site.embedded.close()

    # -- what happens ------------------------------------------------------------------------------

    def ask(self) -> None:
        self.maker.now = self.site.clock.now()
        commands = self.maker.several(self.maker.command, self.random.choice([1, 3, 12]), 1)
        self.last = [
            self.travelled(command) if self.random.random() < 0.5 else command
            for command in commands
        ]
        self.hand_over()

    def hand_over(self) -> None:
        guest = self.random.random() < 0.3
        calls = [GuestCall(command) if guest else BlockingRequest(command) for command in self.last]
        self.waiting += calls
        self.site.embedded.hand_over(calls)

    def travelled(self, command: c.Command[Any]) -> c.Command[Any]:
        """Return a command as a server gets it; one that cannot travel stays as it is."""
        try:
            pieces = encode_ask(1, command)
        except InvalidArgumentError:
            return command
        [(head, body)] = FrameReader().feed(b"".join(pieces))
        try:
            return decode_command(head, body)
        except MessagingError as error:
            if isinstance(command, c.Send) and isinstance(command.messages, pa.RecordBatch):
                return command  # columns of an application are checked where they arrive
            raise FuzzError(f"{command!r:.300} is refused after it travelled: {error}") from error

    def pass_time(self) -> None:
        self.last = []
        span = self.random.choices([0.000001, 1, 5, 61, 301, 3700], [6, 6, 6, 2, 1, 1])[0]
        self.site.wait(seconds=span * self.random.uniform(0.5, 1))

    def set_clock(self) -> None:
        self.last = []
        span = self.random.choice([timedelta(seconds=2), timedelta(hours=1), DAY, DAY * 3650])
        self.site.clock.set_wall(span * self.random.uniform(-1, 1))
        self.site.wait(seconds=self.random.choice([0, 0.5, 2]))

    def trouble(self) -> None:
        """Let a disk be full, slow or refuse to sync; more often, let all be well again."""
        self.last = []
        self.repair()
        disk = self.random.choice([self.site.disk, self.site.disk, self.site.spill_disk])
        kind = self.random.choice(["full", "fails_sync", "slow", "none", "none", "none"])
        disk.full, disk.fails_sync = kind == "full", kind == "fails_sync"
        disk.delay_us = 2_000_000 if kind == "slow" else 0

    def repair(self) -> None:
        for disk in (self.site.disk, self.site.spill_disk):
            disk.full = disk.fails_sync = False
            disk.delay_us = 0

    def mend(self) -> None:
        """Create the entities of the beginning again, those that are gone."""
        made = [c.CreateEntity(description, rule) for description, rule in entities()]
        self.last = self.random.sample(made, len(made))
        self.hand_over()

    def restart(self) -> None:
        self.last = []
        self.outcome.restarts += 1
        self.repair()
        self.site.wait(seconds=10)
        self.site.ask(c.PutKey(ROOT))  # a record, so that the log knows that the clock was set
        self.check()
        engine = self.site.engine
        settled = not engine.health.spilling
        before = standing(engine.namespace)
        if self.random.random() < 0.5:
            self.site.embedded.close()
        else:  # as a killed process: the requests that wait are never answered
            settled &= not has_unwritten_settlements(engine)
            self.site.embedded.crash()
            self.waiting = []
        self.site.open()
        after = standing(self.site.engine.namespace)
        for path in before.keys() | after.keys() if settled else ():
            if before.get(path) != after.get(path):
                raise FuzzError(
                    f"{path} held {before.get(path)!r:.2000} and holds {after.get(path)!r:.2000}"
                )
        self.site.wait(seconds=self.random.choice([0, 1]))

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        """Check the broker after a turn, and learn from its answers."""
        engine = self.site.engine
        if engine.restarts or engine.is_healing:
            raise FuzzError(f"the broker restarted: {engine.trouble} {self.asked()}")
        if engine.namespace.failures:
            raise FuzzError(f"internal errors: {engine.namespace.failures} {self.asked()}")
        faults = engine.namespace.faults()
        if faults:
            raise FuzzError(f"{faults} {self.asked()}")
        waiting = {id(request) for request in engine.waiting_requests()}
        waiting |= {id(request) for request in engine.delayed.requests()}
        for call in self.waiting:
            if call.done:
                self.learn(call)
            elif id(call) not in waiting:
                raise FuzzError(f"{call.command!r:.300} is neither answered nor waits")
        self.waiting = [call for call in self.waiting if not call.done]

    def learn(self, call: BlockingRequest) -> None:
        error, value = None, None
        try:
            value = call.result(0)
        except MessagingError as refusal:
            error = refusal
        kind = type(call.command).__name__
        self.outcome.answers[f"{kind} {type(error).__name__ if error else 'ok'}"] += 1
        if isinstance(error, CommandFailedError | BrokerRestartingError):
            raise FuzzError(f"{call.command!r:.500} met {error}")
        pieces = encode_reply(1, error if error is not None else value)
        [(head, body)] = FrameReader().feed(b"".join(pieces))
        if head[0] == FrameKind.REPLY:
            decode_value(head[2], body)
        else:
            decode_error(head[2:])
        if isinstance(value, pa.RecordBatch) and value.schema == DELIVERY_SCHEMA:
            value.validate(full=True)
            to_messages(value)
        if isinstance(value, DeliveryRows):
            value.messages()
        if error is None:
            self.maker.known.learn(call.command, value)

    def browse(self) -> None:
        """Read every message that is left."""
        for queue in self.site.engine.namespace.directory.queues():
            if queue.dead_letter is not None or queue.path.endswith("Queue"):
                to_messages(self.site.ask(c.Peek(queue.path, 0, 10_000)))

    def asked(self) -> str:
        return "; ".join(f"{command!r:.300}" for command in self.last)


def entities() -> list[tuple[Any, RuleDescription | None]]:
    """Return what each round begins with."""
    made: list[tuple[Any, RuleDescription | None]] = []
    for path in ("plain", *(path for path in QUEUES if "forward_to" not in QUEUES[path])):
        if path not in [entity.path for entity, _ in made]:
            made.append((QueueDescription(path=path, **QUEUES[path]), None))
    made += [(TopicDescription(path=path), None) for path in TOPICS]
    red = RuleDescription("red", SqlFilter("colour = 'red' OR n > 0"), SqlAction("SET n = n * n"))
    onward = dict(zip(TOPICS, [*TOPICS[1:], "plain"], strict=True))
    for path in reversed(TOPICS):
        for name in SUBSCRIPTIONS:
            described = SubscriptionDescription(
                topic_path=path,
                name=name,
                requires_session=name == "held",
                forward_to=onward[path] if name == "on" else None,
            )
            made.append((described, red if name == "red" else None))
    made += [(QueueDescription(path=path, **QUEUES[path]), None) for path in ("gate", "door")]
    assert {entity.path for entity, _ in made} >= {*PATHS, *TOPICS}
    return made


def standing(namespace: BrokerNamespace) -> dict[str, Any]:
    """Return what the log must hold: messages, leases, session states, rules and keys."""
    found: dict[str, Any] = {"keys": namespace.keys.all()}
    for entity in namespace.directory:
        path = entity.description.path
        found[f"{path} itself"] = entity.to_fact()
    for queue in namespace.directory.queues():
        waiting = queue.waiting
        at = waiting.all()
        columns = [waiting.get(name, at).tolist() for name in ("sequence", "failures", "enqueued")]
        states = [DURABLE[State(item)].name for item in waiting.get("state", at).tolist()]
        died = waiting.get("death", at).tolist()
        deaths = [namespace.shared.deaths[item] if item >= 0 else None for item in died]
        sizes = waiting.get("size", at).tolist()
        expires = waiting.get("expires", at).tolist()
        found[queue.path] = list(zip(*columns, states, deaths, sizes, expires, strict=True))
        found[f"{queue.path} sessions"] = queue.sessions.states
        found[f"{queue.path} leases"] = sorted(
            (lease.epoch, lease.owner, lease.until, tuple(lease.intervals))
            for lease in queue.leases
        )
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Let the broker say nothing of clocks that were set, full disks and rules that failed."""
    log = logging.getLogger("twinbus")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def run(rounds: int, seed: int, *, turns: int = 400, progress: bool = False) -> Outcome:
    """Go through so many rounds; return what was asked."""
    outcome = Outcome()
    for number in range(rounds):
        with quiet(), tempfile.TemporaryDirectory(prefix="twinbus-fuzz-") as folder:
            try:
                Round(Path(folder) / "namespace", seed + number, outcome).run(turns)
            except Exception as error:
                command = f"python -m tests.soak.command_fuzz --rounds 1 --seed {seed + number}"
                raise FuzzError(f"replay: {command} --turns {turns}: {error}") from error
        if progress:
            print(f"round {number + 1}: {outcome.commands():,} commands", flush=True)
    return outcome


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(
        f"seed {options.seed}: python -m tests.soak.command_fuzz --rounds {options.rounds} "
        f"--turns {options.turns} --seed {options.seed}",
        flush=True,
    )
    began = time.monotonic()
    outcome = run(options.rounds, options.seed, turns=options.turns, progress=True)
    for what, count in sorted(outcome.answers.items()):
        print(f"{count:>8,} {what}")
    print(
        f"{outcome.commands():,} commands in {outcome.turns:,} turns and {outcome.restarts} "
        f"restarts, {time.monotonic() - began:.0f} s: none met an internal error"
    )


if __name__ == "__main__":
    main()
