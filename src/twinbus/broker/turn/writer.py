"""The one writer: whoever holds the turn decides, commits and answers; nobody else touches state.

A caller that finds nobody at work takes the turn itself and saves two thread switches. What comes
during a turn waits for the next, which takes all of it together: that is group commit. Callers that
were answered together tend to come back together, so the next turn is held until the last of them
is there, and it takes the turn for all. A thread of the writer steps in when one stays away, does
what only time brings, and serves those who do not want to block. With `threaded=False` there is no
thread and time passes when the clock is moved: for simulations.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from twinbus.broker.turn.engine import Engine, EngineSettings, Flushes, Snapshot, Storages, Vitals
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.clock import Clock
from twinbus.entities import RuntimeProperties
from twinbus.errors import MessagingError, NamespaceClosedError, NamespaceInUseError
from twinbus.forking import on_fork
from twinbus.ledger import LedgerSettings
from twinbus.limits import CLOCK_LOOK_S, GATHER_S, MAX_BATCH_BYTES, NEVER_US, SNAPSHOT_ENTITIES
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest, FutureRequest, Request, complete_all
from twinbus.protocol.table import CHANGES_DIRECTORY, size_of
from twinbus.wakeup import Wakeup

R = TypeVar("R")
_log = logging.getLogger("twinbus.broker")


class Writer:
    """Feeds an engine from many threads."""

    def __init__(
        self,
        settings: EngineSettings,
        clock: Clock,
        storages: Storages | None = None,
        *,
        threaded: bool = True,
    ) -> None:
        self.engine = Engine(settings, clock, storages or Storages(), threaded=threaded)
        self._clock = clock
        self._arrivals: deque[Request] = deque()
        self._changed_directory = False  # in the last turn
        self._withdrawn: set[int] = set()  # identities of arrivals that no longer count
        # Requests that were withdrawn; kept, so that no other gets the identity of one of them.
        self._leaving: deque[Request] = deque()
        self._answered: deque[FutureRequest] = deque()  # to complete after a turn
        self._turn_lock = threading.Lock()
        self._expected = 0  # callers that the next turn is held for; 0: it is not held
        self._turns = 0
        self._wakeup = Wakeup()  # of the thread
        self._next_event = self.engine.next_event  # as of the last turn; the engine is its holder's
        self._sleeps_until = NEVER_US  # while awake it must be told of anything that is due
        self._guards = False  # whether it sleeps no longer than a turn may be held
        self._end: MessagingError | None = None  # why no more commands are taken
        self._thread: threading.Thread | None = None
        self._stop_listening = clock.on_advance(self._on_advance)
        if threaded:
            self._thread = threading.Thread(target=self._run, name="twinbus-writer", daemon=True)
            self._thread.start()
        on_fork(self._after_fork)

    def _after_fork(self) -> None:
        """Refuse every command: the directory belongs to the process that opened it."""
        self._turn_lock = threading.Lock()
        self._wakeup = Wakeup()
        self._thread = None
        self._arrivals.clear()
        self._end = NamespaceInUseError(
            "the embedded namespace was opened before this process was forked, and belongs to the "
            "parent. Open it after the fork, or run a server that both processes reach"
        )

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; the future holds its reply or its error."""
        request = FutureRequest(command, self._answered)
        self._arrive(request)
        if self._thread is None:
            self._take_turn()
        elif self._is_ready():
            self._wakeup.send()
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
        for request in requests:
            self._arrive(request)
        if in_own_thread and self._is_ready():
            self._take_turn()
        elif requests:
            self._wakeup.send()

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Let requests that wait go unanswered, in this turn or the next."""
        self._leaving.extend(requests)
        if self._turn_lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._turn_lock.release()
        self._see_to_the_next()

    def _let_go(self) -> None:
        """Forget requests that were withdrawn, with the turn in hand."""
        leaving: list[Request] = []
        while self._leaving:
            leaving.append(self._leaving.popleft())
        if leaving:
            gone = set(map(id, leaving))
            self.engine.withdraw(gone)
            self._withdrawn |= gone & {id(request) for request in list(self._arrivals)}

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
        """Keep everybody from taking the turn; what comes meanwhile is seen to afterwards."""
        with self._turn_lock:
            yield
        self._see_to_the_next()

    def _is_ready(self) -> bool:
        """Whether everyone the next turn is held for is there."""
        return len(self._arrivals) >= max(1, self._expected)

    def _arrive(self, request: Request) -> None:
        self._arrivals.append(request)
        if self._end is not None:  # looked at last, so that nobody slips in behind `_stop`
            request.fail(self._end)
            with suppress(ValueError):
                self._arrivals.remove(request)

    def _on_advance(self) -> None:
        if self._thread is None:
            self._take_turn()
        else:
            self._wakeup.send()

    # -- turns ---------------------------------------------------------------------------------

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
        """Do what waits, unless somebody is at it; what comes meanwhile is the next turn's."""
        if not self._turn_lock.acquire(blocking=False):
            return
        try:
            if self._thread is None:
                self._turn_while_due()
            elif self._end is None:
                self._turn()
        finally:
            self._turn_lock.release()
            self._see_to_the_next()
            self._complete()

    def _see_to_the_next(self) -> None:
        """Wake the thread if it has something to do: those who found the turn taken rely on it."""
        if self._thread is not None and (
            self._is_ready()
            or self._leaving  # somebody found the turn taken
            or (self._expected and not self._guards)
            or self._next_event < self._sleeps_until
        ):
            self._wakeup.send()

    def _complete(self) -> None:
        """Complete the futures that turns have answered."""
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
        group = self._next_group()
        self._turns += 1
        try:
            self.engine.turn(group)
        except (KeyboardInterrupt, SystemExit):
            raise  # of the caller that has the turn; the engine has healed
        except BaseException as error:  # noqa: BLE001 - healing failed: no more can be promised
            _log.exception("The namespace stops: the broker cannot restart from its log")
            stopped = MessagingError(f"the namespace stopped and must be opened anew: {error!r}")
            stopped.__cause__ = error
            self._stop(stopped, group)
            self.engine.abandon()
        finally:
            # Callers that block come back together; what a server hands over does not wait.
            callers = sum(type(request) is BlockingRequest for request in (*group, *self._arrivals))
            self._expected = callers if callers > 1 and self._thread is not None else 0
            self._next_event = self.engine.next_event

    def _stop(self, reason: MessagingError, unanswered: Sequence[Request] = ()) -> None:
        """Take no more commands, and tell everyone who still waits."""
        self._end = reason
        self._stop_listening()
        waiting = self.engine.waiting_requests()
        for request in (*unanswered, *self._arrivals, *self.engine.stranded, *waiting):
            request.fail(reason)
        self._arrivals.clear()

    def _next_group(self) -> list[Request]:
        """Return what goes into one turn: no more than a batch may carry.

        A change of the directory gets a turn of its own.
        """
        arrivals = self._arrivals
        while self._withdrawn and arrivals and id(arrivals[0]) in self._withdrawn:
            self._withdrawn.discard(id(arrivals.popleft()))
        if arrivals and type(arrivals[0].command) in CHANGES_DIRECTORY:
            others = self._others() if self._changed_directory else []
            self._changed_directory = not others
            return others or [arrivals.popleft()]
        self._changed_directory = False
        if arrivals and self.engine.is_careful:
            return [arrivals.popleft()]
        group: list[Request] = []
        size = 0
        while arrivals and type(arrivals[0].command) not in CHANGES_DIRECTORY:
            size += size_of(arrivals[0].command)
            if group and size > MAX_BATCH_BYTES:
                break
            request = arrivals.popleft()
            if id(request) in self._withdrawn:
                self._withdrawn.discard(id(request))
            else:
                group.append(request)
        return group

    def _others(self) -> list[Request]:
        """Take what other keys ask for, past a key that keeps changing the directory.

        What one key asked for stays in order.
        """
        waits: set[str] = set()  # principals whose changes come first
        group: list[Request] = []
        size = 0
        for request in list(self._arrivals):
            if type(request.command) in CHANGES_DIRECTORY:
                waits.add(request.principal.id)
            elif request.principal.id not in waits and id(request) not in self._withdrawn:
                size += size_of(request.command)
                if group and size > MAX_BATCH_BYTES:
                    break
                group.append(request)
        for request in group:
            self._arrivals.remove(request)
        return group

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
        if self._thread is not None:
            self._wakeup.send()
            self._thread.join()
