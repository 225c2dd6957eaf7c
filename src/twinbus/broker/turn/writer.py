"""The one writer: the thread that has the turn decides, commits and answers. No other does.

What arrives during a turn waits for the next one, which takes all of it together: group commit.
`InlineWriter` has no thread: the caller has the turn, and time passes when the clock is moved. It
is for simulations. `ThreadedWriter` is for everything else.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar, TypeVar

from twinbus.broker.turn.arrivals import Arrivals
from twinbus.broker.turn.engine import Engine, EngineSettings, Flushes, Snapshot, Storages, Vitals
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import Clock
from twinbus.entities import RuntimeProperties
from twinbus.errors import MessagingError, NamespaceClosedError, NamespaceInUseError
from twinbus.forking import on_fork
from twinbus.ledger import LedgerSettings
from twinbus.limits import CLOCK_LOOK_S, GATHER_S, NEVER_US, SNAPSHOT_ENTITIES
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest, FutureRequest, Request, complete_all
from twinbus.wakeup import Wakeup

R = TypeVar("R")
_log = logging.getLogger("twinbus.broker")


class Writer(ABC):
    """Feeds an engine from many threads: what both kinds of writers share."""

    _has_thread: ClassVar[bool]

    def __init__(
        self, settings: EngineSettings, clock: Clock, storages: Storages | None = None
    ) -> None:
        self.engine = Engine(settings, clock, storages or Storages(), threaded=self._has_thread)
        self._clock = clock
        self._arrivals = Arrivals()
        # Requests that were withdrawn; kept, so that no other gets the identity of one of them.
        self._leaving: deque[Request] = deque()
        self._answered: deque[FutureRequest] = deque()  # to complete after a turn
        self._expected = 0  # callers that the next turn is held for; 0: it is not held
        self._turn_lock = threading.Lock()
        self._turns = 0
        self._next_event = self.engine.next_event  # as of the last turn; the engine is its holder's
        self._end: MessagingError | None = None  # why no more commands are taken
        self._stop_listening = clock.on_advance(self._on_advance)
        on_fork(self._after_fork)

    def _after_fork(self) -> None:
        """Refuse every command: the directory belongs to the process that opened it."""
        self._turn_lock = threading.Lock()
        self._arrivals.clear()
        self._end = NamespaceInUseError(
            "the embedded namespace was opened before this process was forked, and belongs to the "
            "parent. Open it after the fork, or run a server that both processes reach"
        )

    # -- what the kinds do in their own way ----------------------------------------------------

    @abstractmethod
    def _serve_later(self) -> None:
        """Have requests served whose callers do not block, without waiting for a turn."""

    @abstractmethod
    def _take_turn(self) -> None:
        """Do what waits, unless another thread has the turn; it does the rest in its next turn."""

    @abstractmethod
    def _on_advance(self) -> None:
        """Do what became due: the clock was moved."""

    @abstractmethod
    def _after_turn(self, group: Sequence[Request]) -> None:
        """Prepare for the turn that follows this one."""

    @abstractmethod
    def _wake_if_needed(self) -> None:
        """Wake a thread that has something to do now."""

    def _is_ready(self) -> bool:
        """Whether the next turn may begin."""
        return len(self._arrivals) > 0

    # -- requests ------------------------------------------------------------------------------

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; the future holds its reply or its error."""
        request = FutureRequest(command, self._answered)
        self._arrive(request)
        if self._is_ready():
            self._serve_later()
        if self._end is not None:
            self._complete()
        return request.future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        request = BlockingRequest(command)
        self._arrive(request)
        if self._is_ready():
            self._take_turn()
        return request.result(timeout_s)  # type: ignore[no-any-return]

    def hand_over(self, requests: Sequence[Request], *, in_own_thread: bool = True) -> None:
        """Take requests whose callers do not wait here.

        The calling thread has the turn if nobody else has it, or leaves it to the writer's thread.
        The thread that has the turn answers the request.
        """
        self._arrivals.extend(requests)
        if self._end is not None:  # looked at last, see `_arrive`
            for request in requests:
                self._turn_away(request, self._end)
        if in_own_thread and len(self._arrivals) >= (self._expected or 1):
            self._take_turn()
        elif requests:
            self._serve_later()

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Let requests that wait go unanswered, in this turn or the next."""
        self._leaving.extend(requests)
        if self._turn_lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._turn_lock.release()
        self._wake_if_needed()

    def _let_go(self) -> None:
        """Forget requests that were withdrawn, with the turn in hand."""
        leaving: list[Request] = []
        while self._leaving:
            leaving.append(self._leaving.popleft())
        if leaving:
            gone = set(map(id, leaving))
            self.engine.withdraw(gone)
            self._arrivals.withdraw(gone)

    def _arrive(self, request: Request) -> None:
        self._arrivals.append(request)
        if self._end is not None:  # looked at last, so that nobody slips in behind `_stop`
            self._turn_away(request, self._end)

    def _turn_away(self, request: Request, reason: MessagingError) -> None:
        request.fail(reason)
        with suppress(ValueError):
            self._arrivals.remove(request)

    # -- a look from outside -------------------------------------------------------------------

    def reconfigure(self, namespace: NamespaceSettings, ledger: LedgerSettings) -> None:
        """Change the limits and the ledger settings, between two turns."""
        with self._turn_kept():
            self.engine.reconfigure(namespace, ledger)

    def snapshot(self) -> Snapshot:
        """Return what there is to see from outside; costs no operation.

        It looks at a few entities at a time, so that thousands of them hold up nobody.
        """
        with self._turn_kept():
            seen = self.engine.snapshot(is_open=self._end is None)
            entities = self.engine.entities()
        found: list[tuple[RuntimeProperties, float]] = []
        for first in range(0, len(entities), SNAPSHOT_ENTITIES):
            with self._turn_kept():
                found += self.engine.look_at(entities[first : first + SNAPSHOT_ENTITIES])
        return replace(
            seen,
            entities=[properties for properties, _ in found],
            oldest_ages_s={properties.path: age for properties, age in found},
        )

    def vitals(self) -> Vitals:
        """Return whether it works; waits for nobody, so that it answers while a turn hangs."""
        engine, end = self.engine, self._end
        trouble = engine.trouble or (end.text if end is not None else "")
        health = None if engine.is_healing else engine.health
        return Vitals(
            is_open=end is None,
            is_healing=engine.is_healing,
            is_spilling=health is not None and health.spilling,
            restarts=engine.restarts,
            trouble=trouble,
            refusal=engine.watch.refusal,
            degradation=engine.watch.degradation,
        )

    @property
    def flushes(self) -> Flushes:
        """How often the log was flushed, and how long the last time took."""
        return self.engine.flushes

    @contextmanager
    def _turn_kept(self) -> Iterator[None]:
        """Keep everybody from taking the turn; what arrives meanwhile is served afterwards."""
        with self._turn_lock:
            yield
        self._wake_if_needed()

    # -- turns ---------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Complete the futures that turns have answered."""
        if self._answered:
            complete_all(self._answered)

    def _turn_while_due(self) -> None:
        while self._end is None and (
            self._is_ready()
            or self._next_event <= self._clock.now_us()
            or self.engine.notices_clock()
        ):
            self._turn()

    def _turn(self) -> None:
        if self._leaving:
            self._let_go()
        is_careful = self.engine.healing.restarts > 0 and self.engine.is_careful
        group = self._arrivals.next_group(is_careful=is_careful)
        self._turns += 1
        try:
            self.engine.turn(group)
        except (KeyboardInterrupt, SystemExit):
            raise  # of the caller that has the turn; the engine has healed
        except BaseException as error:  # noqa: BLE001 - healing failed: no more can be promised
            _log.exception("The namespace stops: the broker cannot restart from its log")
            stopped = MessagingError(f"the namespace stopped and must be opened again: {error!r}")
            stopped.__cause__ = error
            self._stop(stopped, group)
            self.engine.abandon()
        finally:
            self._next_event = self.engine.next_event
            self._after_turn(group)

    def _stop(self, reason: MessagingError, unanswered: Sequence[Request] = ()) -> None:
        """Take no more commands, and tell everyone who still waits."""
        self._end = reason
        self._stop_listening()
        waiting = self.engine.waiting_requests()
        for request in (*unanswered, *self._arrivals, *self.engine.stranded, *waiting):
            request.fail(reason)
        self._arrivals.clear()

    # -- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what was handed over, refuse what comes later, let go of the directory."""
        with self._turn_lock:
            while self._arrivals and self._end is None:
                self._turn()
            if self._end is None:
                self._stop(NamespaceClosedError("the namespace was closed"))
                self.engine.close()
        self._complete()


class InlineWriter(Writer):
    """The caller has every turn; time passes when the clock is moved. For simulations."""

    _has_thread = False

    def _serve_later(self) -> None:
        self._take_turn()

    def _on_advance(self) -> None:
        self._take_turn()

    def _after_turn(self, group: Sequence[Request]) -> None:
        """Do nothing: no turn is held for anybody."""

    def _wake_if_needed(self) -> None:
        """Do nothing: there is no thread."""

    def _take_turn(self) -> None:
        if not self._turn_lock.acquire(blocking=False):
            return
        try:
            self._turn_while_due()
        finally:
            self._turn_lock.release()
            self._complete()


class ThreadedWriter(Writer):
    """A caller that finds nobody at work has the turn itself, which saves two thread switches.

    Callers that were answered together tend to come back together, so the next turn is held until
    the last of them is there, and that caller has the turn for all. A thread of the writer steps in
    when one stays away, does what only time brings, and serves those who do not want to block.
    """

    _has_thread = True

    def __init__(
        self, settings: EngineSettings, clock: Clock, storages: Storages | None = None
    ) -> None:
        self._wakeup = Wakeup()  # of the thread
        self._sleeps_until = NEVER_US  # while awake it must be woken for anything that is due
        self._guards = False  # whether it sleeps no longer than a turn may be held
        super().__init__(settings, clock, storages)
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="twinbus-writer", daemon=True
        )
        self._thread.start()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._wakeup = Wakeup()
        self._thread = None

    def _is_ready(self) -> bool:
        """Whether everyone the next turn is held for is there."""
        return len(self._arrivals) >= (self._expected or 1)

    def _serve_later(self) -> None:
        self._wakeup.send()

    def _on_advance(self) -> None:
        self._wakeup.send()

    def _run(self) -> None:
        """Be the writer's thread: do what is due, and what was held in vain."""
        while self._end is None:
            turns = self._turns
            self._sleep()
            with self._turn_lock:
                if self._turns == turns:
                    self._expected = 0
                if self._leaving:
                    self._let_go()
                self._turn_while_due()
            self._complete()

    def _sleep(self) -> None:
        """Wait for a signal, for something to be due, or for a held turn to be held too long."""
        if self._is_ready():
            return
        self._sleeps_until = self._next_event
        self._guards = self._expected > 0
        timeout = self._clock.seconds_until(self._sleeps_until)
        if timeout is not None:
            timeout = min(timeout, CLOCK_LOOK_S)
        if self._guards:
            timeout = GATHER_S if timeout is None else min(timeout, GATHER_S)
        self._wakeup.wait(timeout)
        self._sleeps_until, self._guards = NEVER_US, False

    def _take_turn(self) -> None:
        if not self._turn_lock.acquire(blocking=False):
            return
        try:
            if self._end is None:
                self._turn()
        finally:
            self._turn_lock.release()
            self._wake_if_needed()
            if self._answered:
                self._complete()

    def _after_turn(self, group: Sequence[Request]) -> None:
        """Hold the next turn for callers that block; what a server hands over does not wait."""
        if len(group) + len(self._arrivals) < 2:
            self._expected = 0
            return
        callers = sum([type(request) is BlockingRequest for request in (*group, *self._arrivals)])
        self._expected = callers if callers > 1 else 0

    def _wake_if_needed(self) -> None:
        """Wake the thread if it has something to do: those who found the turn taken rely on it."""
        if (
            len(self._arrivals) >= (self._expected or 1)  # as `_is_ready` says
            or self._leaving  # somebody found the turn taken
            or (self._expected and not self._guards)
            or self._next_event < self._sleeps_until
        ):
            self._wakeup.send()

    def close(self) -> None:
        """Close, and end the thread."""
        super().close()
        if self._thread is not None:
            self._wakeup.send()
            self._thread.join()
