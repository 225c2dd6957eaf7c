"""A machine that runs a broker, loses its power, and is checked by a model that knows the truth.

A boot opens the namespace on disks that remember what is durable. The power fails at an operation
that was drawn before, perhaps during the boot, or at a quiet moment. `cut` writes one of the states
the disks may be in, opens a copy of it on healthy disks and compares it with the model. The next
boot is on that state. A process can also die alone: then the files are as it left them, and a
power cut that comes later still decides which part of them was durable.
"""

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.inside import has_unwritten_settlements
from tests.soak.power_cut_model import BrokenPromiseError, Copy, Model
from twinbus.broker.entities.topic import Topic
from twinbus.broker.store.log import Log
from twinbus.broker.turn.engine import Engine, EngineSettings, Storages
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription, dead_letter_path
from twinbus.errors import MessagingError, StoreUnavailableError
from twinbus.ledger import NO_LEDGER
from twinbus.message import BrokeredMessage, to_messages
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    AcceptSession,
    Command,
    GetEntity,
    GetSessionState,
    ListKeys,
    Peek,
    ReadRange,
    ReleaseSession,
    Send,
    Settle,
)
from twinbus.protocol.requests import BlockingRequest
from twinbus.testing import PowerCutStorage, PowerFailure, PowerSupply

MANY = 1000
A_MOMENT = timedelta(milliseconds=1)
SOON = timedelta(seconds=2)  # by then the broker has tried its disk again
SEGMENT_BYTES = (2_000, 4_000, 8_000, 20_000, 64_000)


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what the model learns from its answer or from the lack of one."""

    command: Command[Any]
    done: Callable[[Any], None] = lambda _: None
    unknown: Callable[[], None] = lambda: None
    tolerates: tuple[type[MessagingError], ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """A locked message."""

    path: str
    copy: Copy
    message: BrokeredMessage


class Machine:
    """One namespace over many power cuts."""

    def __init__(self, folder: Path, generator: random.Random) -> None:
        self.random = generator
        self.clock = ManualClock()
        self.model = Model()
        self.cuts = 0
        self.trace: list[str] = []  # what was asked of the broker, for those who read a failure
        self._folder = folder
        self._segment_bytes = generator.choice(SEGMENT_BYTES)
        self._spill_segment_bytes = generator.choice((*SEGMENT_BYTES, 1_000_000))
        self._warnings = _Warnings()
        self.plug_in(folder / "0")

    # -- life ----------------------------------------------------------------------------------

    def plug_in(self, home: Path) -> None:
        """Use the disks of a directory, on which everything is durable."""
        self.home = home
        self.power = PowerSupply(self.random.randrange(2**32))
        self.log = PowerCutStorage(home / "log", self.power)
        self.spill = PowerCutStorage(home / "spill", self.power)

    def boot(self) -> bool:
        """Start the broker; return whether the power lasted."""
        self.trace.append(f"boot {self.home.name}")
        self.holds: list[Hold] = []
        try:
            self.namespace = self._open(self.home, self.clock, Storages(self.log, self.spill))
        except PowerFailure:
            return False
        return True

    def _open(self, home: Path, clock: ManualClock, storages: Storages) -> EmbeddedNamespace:
        settings = EngineSettings(
            directory=home, segment_bytes=self._segment_bytes, ledger=NO_LEDGER
        )
        small = partial(Log, segment_bytes=self._spill_segment_bytes)
        try:
            with mock.patch("twinbus.broker.store.spill.Log", small):
                return EmbeddedNamespace(settings, clock, storages, threaded=False)
        except (MessagingError, OSError) as error:
            raise BrokenPromiseError(f"the start fails: {error!r}") from error

    @property
    def engine(self) -> Engine:
        return self.namespace.engine

    @property
    def is_up(self) -> bool:
        return not self.power.is_out

    @property
    def now_us(self) -> int:
        return self.clock.wall_us()

    @property
    def is_troubled(self) -> bool:
        """Whether the broker may refuse what needs the disk."""
        return self.log.is_sick or self.spill.is_sick or self.engine.health.spilling

    @property
    def is_doubtful(self) -> bool:
        """Whether a record may be on the disk although the disk reported that it is not."""
        return self.log.is_sick and not self.log.full

    def heal_disks(self) -> None:
        """End every trouble."""
        self.log.heal()
        self.spill.heal()

    def die(self) -> None:
        """End the broker as kill -9 does, at whatever moment it is."""
        self.trace.append("die")
        if self.is_up:
            self.power.fail()
            self.namespace.crash()
        _release_locks(self.home)
        self.model.forget_memory()
        self.heal_disks()
        self.power.restore()

    def close(self) -> None:
        """End the broker in good order; the power may fail while it does."""
        self.trace.append("close")
        with suppress(PowerFailure):
            self.namespace.close()
        if self.is_up:
            self.model.written(self.engine.log.last_record)

    # -- asking --------------------------------------------------------------------------------

    def run(self, *steps: Step) -> None:
        """Execute commands in one turn, and update the model."""
        self.trace.append("; ".join(_brief(step.command) for step in steps))
        self.record = self.engine.log.last_record
        self.was_troubled = self.is_troubled
        calls = [BlockingRequest(step.command) for step in steps]
        self.namespace.hand_over(calls)
        for step, call in zip(steps, calls, strict=True):
            try:
                reply = call.result(0)
            except MessagingError as error:
                refused = isinstance(error, StoreUnavailableError)
                if self.power.is_out or (refused and (self.was_troubled or self.is_troubled)):
                    step.unknown()
                elif not isinstance(error, step.tolerates):
                    raise BrokenPromiseError(f"{step.command!r:.200}: {error!r}") from error
            else:
                step.done(reply)
        self.after_turn()

    def ask(self, command: Command[Any]) -> Any:
        """Return the reply to a command that changes nothing; None: there was no answer."""
        replies: list[Any] = [None]
        self.run(Step(command, replies.append))
        return replies[-1]

    def advance(self, span: timedelta) -> None:
        """Let time pass; locks and leases lapse."""
        self.trace.append(f"advance {span}")
        self.clock.advance(span)
        now = self.clock.now()
        self.holds = [
            hold
            for hold in self.holds
            if hold.message.locked_until_utc and hold.message.locked_until_utc > now
        ]
        leases = self.model.leases
        for epoch in [epoch for epoch in leases if leases[epoch].until_us <= self.now_us]:
            del leases[epoch]
        self.after_turn()

    def after_turn(self) -> None:
        """Tell the model what is durable by now."""
        if not self.is_up:
            return
        _check_health(self.engine)
        if not has_unwritten_settlements(self.engine):
            self.model.written(self.engine.log.last_record)

    # -- the cut -------------------------------------------------------------------------------

    def cut(self) -> None:
        """Cut the power, look at what is left, and plug in the disks again."""
        self.cuts += 1
        self.trace.append(f"cut {self.cuts}")
        target = self._folder / str(self.cuts)
        self.log.cut(target / "log")
        self.spill.cut(target / "spill")
        self.die()
        copy = self._folder / f"{self.cuts}-checked"
        shutil.copytree(target, copy)
        self._check(copy)
        shutil.rmtree(copy)
        if self.home != target:
            shutil.rmtree(self.home)
        self.plug_in(target)

    def _check(self, home: Path) -> None:
        """Start a broker on healthy disks, and compare what it has with the model."""
        clock, power = ManualClock(self.clock.now()), PowerSupply(0)
        disks = [PowerCutStorage(home / name, power) for name in ("log", "spill")]
        with self._warnings.watched():
            namespace = self._open(home, clock, Storages(*disks))
        inspection = Inspection(namespace, clock, self.model)
        inspection.check()
        if self.random.random() < 0.3:
            namespace.close()
            again = self._open(home, clock, Storages(*disks))
            Inspection(again, clock, self.model).check_messages()
            namespace = again
        inspection = Inspection(namespace, clock, self.model)
        inspection.check_goes_on(self.random)
        namespace.close()


class Inspection:
    """Compares a broker on healthy disks with the model."""

    def __init__(self, namespace: EmbeddedNamespace, clock: ManualClock, model: Model) -> None:
        self._namespace = namespace
        self._clock = clock
        self._model = model
        self._engine = namespace.engine

    def check(self) -> None:
        """Compare everything."""
        for path in self._paths():  # before a turn gives spilled messages their numbers
            _, queue = self._engine.namespace.directory.queue(path)
            for message in to_messages(queue.peek(Peek(queue.path, 0, MANY, 2**40))):
                self._check_number(path, message)
        self.check_messages()
        descriptions = {e.description.path: e.description for e in self._directory}
        asked = {path: self._namespace.ask(GetEntity(path)) for path in descriptions}
        self._model.entities.check("entity", asked)
        keys = {key.name: key for key in self._namespace.ask(ListKeys())}
        self._model.keys.check("key", keys)
        self._model.states.check("state of session", self._states())
        self._check_leases()

    def _check_number(self, path: str, message: BrokeredMessage) -> None:
        assert message.sequence_number is not None
        self._model.check_number(path, message.sequence_number, message.message_id)

    @property
    def _directory(self) -> Any:
        return self._engine.namespace.directory

    def _paths(self) -> list[str]:
        paths = [e.description.path for e in self._directory if not isinstance(e, Topic)]
        return [*paths, *map(dead_letter_path, paths)]

    def check_messages(self) -> None:
        """Compare the messages, when everything that was spilled has been moved."""
        for _ in range(20):
            self._clock.advance(SOON)
            if not len(self._engine.spill):
                break
        else:
            raise BrokenPromiseError("spilled messages do not get into the log")
        found = {path: self._peeked(path) for path in self._paths()}
        self._model.check(found, self._clock.wall_us())
        _check_health(self._engine)

    def _peeked(self, path: str) -> list[BrokeredMessage]:
        found: list[BrokeredMessage] = []
        first = 0
        while messages := to_messages(self._namespace.ask(Peek(path, first, MANY))):
            found += messages
            first = (messages[-1].sequence_number or 0) + 1
        return found

    def _states(self) -> dict[tuple[str, str], bytes]:
        found = {}
        for path, name in self._model.states.known():
            if self._directory.find(path) is None:
                continue
            lock = self._namespace.ask(AcceptSession(path, name)).lock
            found[path, name] = self._namespace.ask(GetSessionState(path, lock))
            self._namespace.ask(ReleaseSession(path, lock))
        return {key: state for key, state in found.items() if state is not None}

    def _check_leases(self) -> None:
        now_us = self._clock.wall_us()
        for lease in [lease for lease in self._model.leases.values() if lease.until_us > now_us]:
            first, last = min(lease.ids, default=0), max(lease.ids, default=0)
            read = self._namespace.ask(ReadRange(lease.path, lease.epoch, first, last))
            found = {m.sequence_number: m.message_id for m in to_messages(read)}
            if not lease.ids.items() <= found.items():
                raise BrokenPromiseError(
                    f"{lease.path}: lease {lease.epoch} has {found}, expected {lease.ids}"
                )

    def check_goes_on(self, generator: random.Random) -> None:
        """Check that new messages get new numbers, and that a repeated transfer is known."""
        for entity in self._directory:
            path = entity.description.path
            if not isinstance(entity.description, QueueDescription):
                continue
            new = BrokeredMessage(message_id="new", session_id="s")
            [number] = self._namespace.ask(Send(path, [new])).sequence_numbers
            if number <= self._model.highest(path):
                raise BrokenPromiseError(f"{path}: number {number} is given a second time")
        transfers = self._model.transfers
        for send in generator.sample(transfers, min(len(transfers), 5)):
            numbers = list(self._namespace.ask(send).sequence_numbers)
            if any(numbers):
                raise BrokenPromiseError(f"{send!r:.200} was taken twice, as {numbers}")
        for send in self._model.unanswered:
            self._namespace.ask(send)
            ids = [m.message_id for path in self._paths() for m in self._peeked(path)]
            for message in send.messages:
                copies = [
                    copy for (_, i), copy in self._model.copies.items() if i == message.message_id
                ]
                expected = sum(
                    copy.latest.name != "ABSENT" or not copy.is_enqueued for copy in copies
                )
                if ids.count(message.message_id) != expected:
                    raise BrokenPromiseError(
                        f"{message.message_id} of a repeated send is there "
                        f"{ids.count(message.message_id)} times, not {expected}"
                    )
        _check_health(self._engine)


def _brief(command: Command[Any]) -> str:
    """Return a command in few words."""
    reported = [type(command).__name__]
    for name in ("path", "max_messages", "origin", "disposition", "sequence_numbers", "epoch"):
        value = getattr(command, name, None)
        reported += [f"{getattr(value, 'name', value)}"] if value is not None else []
    reported += [m.message_id for m in command.messages] if isinstance(command, Send) else []
    if isinstance(command, Settle):
        numbers = [int.from_bytes(token[8:]) for token in command.lock_tokens.to_pylist()]
        reported.append(f"{numbers}")
    return " ".join(reported)


def _check_health(engine: Engine) -> None:
    if engine.restarts:
        raise BrokenPromiseError(f"the broker restarted itself: {engine.trouble}")
    if engine.namespace.failures:
        raise BrokenPromiseError(f"internal errors: {dict(engine.namespace.failures)}")
    faults = engine.namespace.faults()
    if faults:
        raise BrokenPromiseError(f"inconsistent: {faults}")


def _release_locks(home: Path) -> None:
    """Close what a dead process would have closed: a start that fails leaves its locks behind."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = Path(entry.readlink())
        except OSError:
            continue
        if target.name.startswith("LOCK") and target.is_relative_to(home):
            os.close(int(entry.name))


class _Warnings(logging.Handler):
    """Hears a broker say at its start that it misses records."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._texts.clear()
        logger = logging.getLogger("twinbus.broker")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
        for text in self._texts:
            if "had been written" in text:
                raise BrokenPromiseError(text)
