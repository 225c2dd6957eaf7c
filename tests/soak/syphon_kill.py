"""Kill -9 everything a syphon is made of and talks to, while messages are diverted all the time.

    python -m tests.soak.syphon_kill --kills 40 [--seed 7] [--primary sb] [--secondary sb]

Two servers and a `twinbus syphon` with its own Spark are processes; clients divert into backlog
queues, each into one, and number what they send. The dead are started again, as by a supervisor.
In the end every message is on the primary once, in the order its client sent it, and the backlog
is empty. What runs is found by a mark in its environment: all of it ends with this process.

With `sb`, the syphon and the clients reach a server by its Service Bus door, through the official
SDK. A Service Bus remembers no senders, so every diverted message has its sender's number, as the
pairing gives it. A primary at `sb://` may enqueue a message twice. From a secondary at `sb://`,
messages that a dead syphon left locked come home after those behind them. Both are only counted.
"""

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path

from tests.soak.pairing_site import PRIMARY, named
from tests.soak.server_process import ServerProcess
from tests.waiting import until
from twinbus import (
    BrokeredMessage,
    MessageSender,
    MessagingError,
    MessagingFactory,
    NamespaceManager,
    RetryPolicy,
)
from twinbus.connection import ConnectionString
from twinbus.entities import backlog_queue_path
from twinbus.message import to_batch
from twinbus.pairing.backlog import diverted
from twinbus.pairing.backlog_queues import describe_backlog_queue
from twinbus.pairing.cancelling import pages
from twinbus.pairing.identity import PrimaryIdentity
from twinbus.protocol.commands import Origin
from twinbus.protocol.origins import sender_source

DESTINATIONS = ("orders", "invoices", "returns")
QUEUES = tuple(backlog_queue_path(PRIMARY, index) for index in range(4))
CLIENTS = 8  # two for each backlog queue
PACE_S = 0.25  # between the sends of one client
BATCHES = (1, 1, 5, 20, 50)  # messages of a send
DEADLINE_S = 120.0  # of every wait: far longer than anything here takes
FINDING_OUT_S = 30.0  # that the command gets to see that its Spark is dead
TRIES_FIRST = 0.3  # of the sends, those that the primary was tried for before
MOSTLY = 0.8  # how often messages come home between two kills; else it strikes while others heal
MARK = "TWINBUS_SOAK"
_SYPHON = [sys.executable, "-c", "from twinbus.cli import main; main()", "syphon"]
_GUARD = [sys.executable, "-c", "from tests.soak.syphon_kill import guard; guard()"]
_PATIENT = RetryPolicy(  # outlasts a server that is killed and started again
    operation_timeout=timedelta(seconds=DEADLINE_S),
    min_backoff=timedelta(milliseconds=20),
    max_backoff=timedelta(milliseconds=200),
)


class Victim(StrEnum):
    """What is killed."""

    WORKER = "worker"  # a Python process of Spark: it plans, carries or settles
    PRIMARY = "primary"
    SECONDARY = "secondary"
    DRIVER = "driver"  # the command alone, or with its Spark and all workers
    JVM = "jvm"  # Spark; the command finds out by itself


class Door(StrEnum):
    """How the syphon and the clients reach a server."""

    TWINBUS = "twinbus"
    SERVICE_BUS = "sb"


@dataclass(frozen=True, slots=True)
class Doors:
    """The doors of both servers."""

    primary: Door = Door.TWINBUS
    secondary: Door = Door.TWINBUS


WEIGHTS = {  # the last two cost a start of Spark
    Victim.WORKER: 9,
    Victim.PRIMARY: 5,
    Victim.SECONDARY: 5,
    Victim.DRIVER: 2,
    Victim.JVM: 1,
}


def plan(kills: int, generator: random.Random) -> list[Victim]:
    """Choose the victims: each kind once, then by weight."""
    once = generator.sample(list(WEIGHTS), len(WEIGHTS))
    more = generator.choices(list(WEIGHTS), list(WEIGHTS.values()), k=max(kills - len(once), 0))
    return [*once, *more][:kills]


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """One that carries our mark."""

    pid: int
    command: tuple[str, ...]

    @property
    def is_jvm(self) -> bool:
        return bool(self.command) and self.command[0].endswith("java")

    @property
    def is_worker(self) -> bool:
        return any(part.startswith("pyspark.") for part in self.command)

    @property
    def name(self) -> str:
        """What it is, for people: of a worker, the modules it runs."""
        modules = [part.removeprefix("pyspark.") for part in self.command if "pyspark." in part]
        return " ".join(modules) if self.is_worker else Path(self.command[0]).name

    def kill(self) -> None:
        """End it with no warning."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def marked(mark: str) -> list[Process]:
    """Return the processes whose mark begins so, the youngest last."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it ended, or it is none of ours
                variables = (folder / "environ").read_bytes().split(b"\0")
                if any(variable.startswith(wanted) for variable in variables):
                    command = (folder / "cmdline").read_text().rstrip("\0").split("\0")
                    found.append(Process(int(folder.name), tuple(command)))
    return sorted(found, key=lambda process: process.pid)


def end_all(mark: str) -> None:
    """Kill every process whose mark begins so, and those they start meanwhile."""
    while found := marked(mark):
        for process in found:
            process.kill()
        time.sleep(0.05)


def guard() -> None:
    """Wait for the end of the process that started this one, then end what it left."""
    mark = sys.stdin.readline().strip()
    sys.stdin.read()
    end_all(mark)


@contextmanager
def marking() -> Iterator[str]:
    """Mark every process that is started within; none of them outlives it, however it ends."""
    mark = secrets.token_hex(8)
    guardian = subprocess.Popen(_GUARD, stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert guardian.stdin is not None
    guardian.stdin.write(f"{mark}\n")
    guardian.stdin.flush()
    os.environ[MARK] = f"{mark}.server"
    try:
        yield mark
    finally:
        del os.environ[MARK]
        end_all(mark)
        guardian.stdin.close()
        guardian.wait()


class SyphonProcess:
    """A `twinbus syphon`, over its lives."""

    def __init__(self, folder: Path, mark: str, primary: str, secondary: str) -> None:
        self._log = folder / "syphon.txt"
        self._mark = mark
        self._environment = {
            **os.environ,
            "TWINBUS_PRIMARY": primary,
            "TWINBUS_SECONDARY": secondary,
            "TMPDIR": str(folder),  # what it leaves when it is killed goes with the rest
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self.start()

    def start(self) -> None:
        """Start the next life."""
        self.lives += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_SYPHON, "--lease", "5s", "--json"],
                env={**self._environment, MARK: self._mark_of(self.lives)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _mark_of(self, life: int) -> str:
        return f"{self._mark}.life{life}."

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How this life ended; None: it goes on."""
        assert self._process is not None
        return self._process.poll()

    def jvms(self) -> list[Process]:
        return [part for part in self._parts() if part.is_jvm]

    def workers(self) -> list[Process]:
        return [part for part in self._parts() if part.is_worker]

    def _parts(self) -> list[Process]:
        return marked(self._mark_of(self.lives))

    def remains(self) -> list[Process]:
        """Return what is left of lives that are over."""
        over = range(1, self.lives + (self.exit_code is not None))
        return [item for life in over for item in marked(self._mark_of(life))]

    def kill(self) -> None:
        """Kill the command alone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def kill_all(self) -> None:
        """Kill the command and everything it started, as a machine that dies."""
        end_all(self._mark_of(self.lives))
        assert self._process is not None
        self._process.wait()

    def stop(self) -> int:
        """Ask it to stop; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(DEADLINE_S)

    def complaints(self) -> str:
        """Return the end of what it wrote."""
        return self._log.read_text(errors="replace")[-3000:]


# -- clients ---------------------------------------------------------------------------------------


class Client:
    """A thread that diverts into one backlog queue, as a paired sender does."""

    def __init__(
        self, number: int, sender: MessageSender, seed: float, *, tries_first: float
    ) -> None:
        self._tries_first = tries_first  # the share of sends that the primary did not take
        self.sent: dict[str, list[str]] = {destination: [] for destination in DESTINATIONS}
        self.trouble = ""
        self._name = f"client{number}"
        self._sender = sender
        self._generator = random.Random(seed)
        self._source = sender_source(self._generator.getrandbits(64))
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._generator.uniform(0, 2 * PACE_S)):
                self._divert(self._generator.choice(DESTINATIONS), self._generator.choice(BATCHES))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported to the parent
            self.trouble = f"{self._name}: {error!r:.300}"

    def _divert(self, destination: str, count: int) -> None:
        numbers = range(self._number, self._number + count)
        self._number += count
        ids = [f"{self._name}.{number}" for number in numbers]
        body = bytes(self._generator.choice([10, 200, 2000]))
        messages = to_batch([BrokeredMessage(body, message_id=item) for item in ids])
        was_tried = self._generator.random() < self._tries_first
        origin = Origin(self._source, numbers) if was_tried else None
        self._sender.send_batch(diverted(messages, destination, origin))
        self.sent[destination] += ids

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"a send of {self._name} does not end"


# -- what came of it -------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of it."""

    kills: Counter[Victim] = field(default_factory=Counter)
    lives: int = 0  # of the syphon
    diverted: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unheard_of: list[str] = field(default_factory=list)  # nobody sent them
    out_of_order: list[str] = field(default_factory=list)  # the first of a client that is
    dead_lettered: int = 0
    exit_code: int | None = None  # of the syphon, asked to stop
    may_double: bool = False  # the primary enqueues at least once
    may_reorder: bool = False  # messages of the secondary stay locked when a syphon dies
    complaints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {victim}" for victim, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kills}), {self.lives} lives of the syphon: "
            f"{self.diverted:,} diverted, {len(self.lost)} lost, {len(self.doubled)} doubled, "
            f"{len(self.out_of_order)} out of order, {self.dead_lettered} dead-lettered; "
            f"SIGTERM: exit {self.exit_code}; {len(self.complaints)} complaint(s)"
        )

    def compare(self, sent: dict[str, list[str]], home: list[str], destination: str) -> None:
        """Compare what clients diverted to a destination with what it holds, in order."""
        count = Counter(home)
        every = {item for ids in sent.values() for item in ids}
        self.diverted += len(every)
        self.lost += sorted(every - set(count))
        self.doubled += sorted(key for key, times in count.items() if times > 1)
        self.unheard_of += sorted(set(count) - every)
        came: defaultdict[str, list[str]] = defaultdict(list)
        for message_id in dict.fromkeys(home):
            came[message_id.partition(".")[0]].append(message_id)
        for client, ids in sent.items():
            wanted = [item for item in ids if item in count]
            wrong = [a for a, b in zip(came[client], wanted, strict=False) if a != b]
            self.out_of_order += [f"{item} at {destination}" for item in wrong[:1]]

    def check(self) -> None:
        """Raise when a promise was broken."""
        assert not self.lost, f"lost {len(self.lost)}: {self.lost[:5]}"
        assert self.may_double or not self.doubled, (
            f"doubled {len(self.doubled)}: {self.doubled[:5]}"
        )
        assert not self.unheard_of, f"nobody sent {self.unheard_of[:5]}"
        assert self.may_reorder or not self.out_of_order, f"out of order: {self.out_of_order[:5]}"
        assert not self.dead_lettered, f"{self.dead_lettered} messages were dead-lettered"
        assert self.exit_code == 0, f"the syphon ended with {self.exit_code}"
        assert not self.complaints, "\n".join(self.complaints)


# -- the site --------------------------------------------------------------------------------------


def _server(folder: Path, config: str, door: Door) -> ServerProcess:
    """Return a server; the SDK's administration client needs TLS."""
    options = ("--tls", str(folder / "certificate")) if door is Door.SERVICE_BUS else ()
    return ServerProcess(folder, config, *options)


def _at_service_bus(server: ServerProcess, folder: Path, name: str) -> str:
    """Return the connection string of a server's Service Bus door."""
    native = ConnectionString.parse(server.connection_string)
    return (
        f"Endpoint=sb://localhost:{server.port};Name={name};SharedAccessKeyName={native.key_name};"
        f"SharedAccessKey={native.key};UseDevelopmentEmulator=true;"
        f"CaFile={folder / 'certificate' / 'ca.pem'}"
    )


class Site:
    """Two servers, a syphon and clients; kills, and sees to it that the dead come back."""

    def __init__(
        self, folder: Path, mark: str, generator: random.Random, stack: ExitStack, doors: Doors
    ) -> None:
        self._generator = generator
        self.outcome = Outcome(
            may_double=doors.primary is Door.SERVICE_BUS,
            may_reorder=doors.secondary is Door.SERVICE_BUS,
        )
        for name in (PRIMARY, "secondary"):
            (folder / name).mkdir()
        queues = "\n".join(f"[[queue]]\npath = '{path}'" for path in DESTINATIONS)
        self._primary = _server(folder / PRIMARY, queues, doors.primary)
        self._secondary = _server(folder / "secondary", "", doors.secondary)
        for server in (self._primary, self._secondary):
            stack.callback(server.kill)
            server.start()
        home, away = named(self._primary.connection_string), self._secondary.connection_string
        self._home, self._away = (
            stack.enter_context(
                NamespaceManager.from_connection_string(item, retry_policy=_PATIENT)
            )
            for item in (home, away)
        )
        for index in range(len(QUEUES)):
            self._away.create_queue(describe_backlog_queue(PrimaryIdentity(PRIMARY), index))
        if doors.primary is Door.SERVICE_BUS:
            home = _at_service_bus(self._primary, folder / PRIMARY, PRIMARY)
        if doors.secondary is Door.SERVICE_BUS:
            away = _at_service_bus(self._secondary, folder / "secondary", "secondary")
        self._syphon = SyphonProcess(folder, mark, home, away)
        self._proven = 0  # the last life of it that brought something home
        stack.callback(self._syphon.kill_all)
        factory = MessagingFactory.from_connection_string(away, retry_policy=_PATIENT)
        stack.enter_context(factory)
        tries_first = 1.0 if doors.secondary is Door.SERVICE_BUS else TRIES_FIRST
        self._clients = []
        for number in range(CLIENTS):
            sender = factory.create_message_sender(QUEUES[number % len(QUEUES)])
            seed = generator.random()
            self._clients.append(Client(number, sender, seed, tries_first=tries_first))
        stack.callback(self._stop_clients)

    def _stop_clients(self) -> None:
        for client in self._clients:
            client.stop()

    # -- looking -------------------------------------------------------------------------------

    def home(self) -> int:
        """Count what is on the primary."""
        runtime = [self._home.get_runtime_properties(path) for path in DESTINATIONS]
        return sum(item.active_message_count for item in runtime)

    def waiting(self) -> int:
        """Count what is in the backlog."""
        runtime = [self._away.get_runtime_properties(path) for path in QUEUES]
        return sum(item.active_message_count for item in runtime)

    def _has_shrunk(self, before: int) -> bool:
        return self.waiting() < before

    def _supervise(self) -> None:
        """Start the syphon again if it ended; it may do so by itself only while Spark starts."""
        if self._syphon.exit_code is not None:
            if self._proven == self._syphon.lives:
                self._complain(f"the syphon gave up, with exit code {self._syphon.exit_code}")
            self._syphon.start()

    def _until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that the syphon brings about."""

        def holds() -> object:
            self._supervise()
            return condition()

        try:
            until(holds, what, DEADLINE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; the syphon: {self._syphon.complaints()}") from None

    def await_progress(self) -> None:
        """Return when the syphon brought messages home after now, and none of its former lives."""
        self._until(lambda: not self._syphon.remains(), "what a dead syphon started has ended")
        before = self.home()
        self._until(lambda: self.home() > before, "messages come home again")
        self._proven = self._syphon.lives

    # -- killing -------------------------------------------------------------------------------

    def kill(self, victim: Victim) -> str:
        """Kill; return what it was that died."""
        time.sleep(self._generator.uniform(0.1, 1.5))
        self._supervise()
        blows = {
            Victim.WORKER: self._kill_worker,
            Victim.PRIMARY: lambda: self._kill_server(self._primary),
            Victim.SECONDARY: lambda: self._kill_server(self._secondary),
            Victim.DRIVER: self._kill_driver,
            Victim.JVM: self._kill_jvm,
        }
        died = blows[victim]()
        self.outcome.kills[victim] += 1
        if self._generator.random() < MOSTLY:
            self.await_progress()
        return died

    def _kill_worker(self) -> str:
        found: list[Process] = []

        def found_some() -> bool:
            found[:] = self._syphon.workers()
            return bool(found)

        self._until(found_some, "Spark has workers")
        worker = self._generator.choice(found)
        worker.kill()
        return f"{worker.name} ({worker.pid})"

    def _kill_server(self, server: ServerProcess) -> str:
        assert server.is_alive(), f"the server failed: {server.complaints()}"
        server.kill()
        pause_s = self._generator.choice([0.0, self._generator.uniform(0, 2)])
        time.sleep(pause_s)
        server.start()
        return f"down for {pause_s:.1f} s"

    def _kill_driver(self) -> str:
        life, how = self._syphon.lives, "alone"
        if self._generator.random() < 0.5:
            how = "with its machine"
            self._syphon.kill_all()
        else:
            self._syphon.kill()
        self._syphon.start()  # while the rest of the old one may still be there
        return f"life {life}, {how}"

    def _kill_jvm(self) -> str:
        self._until(self._syphon.jvms, "Spark is there")
        life, dead = self._syphon.lives, self._syphon.jvms()
        for jvm in dead:
            jvm.kill()

        def found_out() -> bool:
            """Whether it ended, to be started again, or started another Spark."""
            return self._syphon.exit_code is not None or not set(self._syphon.jvms()) <= set(dead)

        what = f"the syphon finds out that its Spark ({dead[0].pid}) is dead"
        try:
            until(found_out, what, FINDING_OUT_S)
        except AssertionError as error:
            self._complain(str(error))
            self._syphon.kill_all()
        if self._syphon.exit_code is not None:
            self._syphon.start()
        return f"life {life}"

    def _complain(self, text: str) -> None:
        self.outcome.complaints.append(text)
        print(f"{text}; its log ends: {self._syphon.complaints()}", flush=True)

    # -- the end -------------------------------------------------------------------------------

    def conclude(self) -> Outcome:
        """Let everything come home, and compare."""
        outcome = self.outcome
        for client in self._clients:
            client.stop()
        for client in self._clients:
            client.join()
        outcome.complaints += [client.trouble for client in self._clients if client.trouble]
        while waiting := self.waiting():
            self._until(partial(self._has_shrunk, waiting), "messages leave the backlog")
        outcome.exit_code = self._syphon.stop()
        outcome.lives = self._syphon.lives
        try:
            until(
                lambda: not self._syphon.remains(), "what the syphon started has ended", DEADLINE_S
            )
        except AssertionError as error:
            left = [part.name for part in self._syphon.remains()]
            self._complain(f"{error}: {left}")
        for path in DESTINATIONS:
            ask = self._home.courier.ask
            found = [item for page in pages(ask, path) for item in page.column("message_id")]
            sent = {f"client{n}": client.sent[path] for n, client in enumerate(self._clients)}
            outcome.compare(sent, [item.as_py() for item in found], path)
        runtime = [self._away.get_runtime_properties(path) for path in QUEUES]
        outcome.dead_lettered = sum(item.dead_letter_message_count for item in runtime)
        return outcome


def run(kills: int, seed: int, *, doors: Doors | None = None, progress: bool = False) -> Outcome:
    """Kill so often; return what came of it."""
    generator = random.Random(seed)
    victims = plan(kills, generator)
    with (
        tempfile.TemporaryDirectory(
            prefix="twinbus-syphon-kill-", ignore_cleanup_errors=True
        ) as place,
        marking() as mark,
        ExitStack() as stack,
    ):
        site = Site(Path(place), mark, generator, stack, doors or Doors())
        site.await_progress()
        began = time.monotonic()
        for number, victim in enumerate(victims, 1):
            died = site.kill(victim)
            if progress:
                counts = f"{site.home():,} home, {site.waiting():,} waiting"
                after_s = time.monotonic() - began
                print(
                    f"{after_s:>6.1f} s kill {number:>4}: {victim:<9} {died}; {counts}", flush=True
                )
        return site.conclude()


def _exit(*_: object) -> None:
    sys.exit(1)  # by way of every `finally`


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--primary", type=Door, choices=list(Door), default=Door.TWINBUS)
    parser.add_argument("--secondary", type=Door, choices=list(Door), default=Door.TWINBUS)
    options = parser.parse_args()
    doors = Doors(options.primary, options.secondary)
    print(
        f"seed {options.seed}: python -m tests.soak.syphon_kill --kills {options.kills} "
        f"--seed {options.seed} --primary {doors.primary} --secondary {doors.secondary}",
        flush=True,
    )
    signal.signal(signal.SIGTERM, _exit)
    began = time.monotonic()
    try:
        outcome = run(options.kills, options.seed, doors=doors, progress=True)
    except MessagingError as error:
        sys.exit(f"seed {options.seed}: a server is gone: {error}")
    print(f"{time.monotonic() - began:.0f} s, seed {options.seed}: {outcome}")
    outcome.check()


if __name__ == "__main__":
    main()
