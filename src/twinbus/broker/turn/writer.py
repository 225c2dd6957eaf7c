"""The writers: one thread at a time runs a turn: it executes requests, commits and answers them.

This thread is called the thread with the turn, and only this thread changes the engine. Requests
that arrive during a turn wait for the next one, which executes all of them: group commit. If they
are more work than fits into a turn, each principal gets a share of the turn (arrivals.py).
`InlineWriter` has no thread: the caller runs the turn, and time passes when the clock is moved. It
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
from twinbus.broker.turn.engine import Engine, EngineSettings, Storages
from twinbus.broker.turn.namespace import NamespaceSettings
from twinbus.broker.turn.vitals import Flushes, Snapshot, Vitals
from twinbus.clock import Clock
from twinbus.entities import RuntimeProperties
from twinbus.errors import (
    NAMESPACE_CLOSED,
    MessagingError,
    NamespaceClosedError,
    NamespaceInUseError,
)
from twinbus.forking import on_fork
from twinbus.ledger import LedgerSettings
from twinbus.limits import CLOCK_LOOK_S, GATHER_S, NEVER_US, SNAPSHOT_ENTITIES
from twinbus.protocol.commands import Command
from twinbus.protocol.requests import BlockingRequest, FutureRequest, Request, complete_all
from twinbus.wakeup import Wakeup

R = TypeVar("R")
_log = logging.getLogger("twinbus.broker")


class Writer(ABC):
    """Passes requests of many threads to an engine: the common part of both writers."""

    _has_thread: ClassVar[bool]

    def __init__(
        self, settings: EngineSettings, clock: Clock, storages: Storages | None = None
    ) -> None:
        self.engine = Engine(settings, clock, storages or Storages(), threaded=self._has_thread)
        self._clock = clock
        self._arrivals = Arrivals()
        # Withdrawn requests; kept alive, so that their identities are not reused.
        self._leaving: deque[Request] = deque()
        self._answered: deque[FutureRequest] = deque()  # to be completed after a turn
        self._expected = 0  # number of requests for which the next turn waits; 0: it does not wait
        self._turn_lock = threading.Lock()
        self._turns = 0
        # The engine's `next_event` after the last turn: only the thread with the turn may use the
        # engine.
        self._next_event = self.engine.next_event
        self._end: MessagingError | None = None  # why no more commands are accepted
        self._stop_listening = clock.on_advance(self._on_advance)
        on_fork(self._after_fork)

    def _after_fork(self) -> None:
        """Refuse every command after a fork: the directory belongs to the parent process."""
        self._turn_lock = threading.Lock()
        self._arrivals.clear()
        self._end = NamespaceInUseError(
            "the embedded namespace was opened before this process was forked, and belongs to the "
            "parent. Open it after the fork, or run a server that both processes reach"
        )

    # -- different for the two writers ---------------------------------------------------------

    @abstractmethod
    def _serve_later(self) -> None:
        """Have waiting requests executed soon; a thread that calls this need not wait for them."""

    @abstractmethod
    def _take_turn(self) -> None:
        """Execute waiting requests, unless another thread has the turn and will execute them."""

    @abstractmethod
    def _on_advance(self) -> None:
        """Run the timers that are due, because the clock was moved."""

    @abstractmethod
    def _after_turn(self, group: Sequence[Request]) -> None:
        """Prepare the next turn."""

    @abstractmethod
    def _wake_if_needed(self) -> None:
        """Wake a thread that has something to do now."""

    def _is_ready(self) -> bool:
        """Return whether the next turn may begin."""
        return len(self._arrivals) > 0 or self._arrivals.queued > 0

    # -- requests ------------------------------------------------------------------------------

    def submit(self, command: Command[R]) -> "Future[R]":
        """Start a command; return the future of its reply."""
        request = FutureRequest(command, self._answered)
        self._arrive(request)
        if self._is_ready():
            self._serve_later()
        if self._end is not None:
            self._complete()
        return request.future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
        request = BlockingRequest(command)
        self._arrive(request)
        if self._is_ready():
            self._take_turn()
        return request.result(timeout_s)  # type: ignore[no-any-return]

    def hand_over(self, requests: Sequence[Request], *, in_own_thread: bool = True) -> None:
        """Execute requests whose callers do not wait here; the thread with the turn answers them.

        With `in_own_thread`, the calling thread runs the turn if no other thread does. Otherwise
        the thread of the writer runs it.
        """
        self._arrivals.extend(requests)
        if self._end is not None:  # checked last, see `_arrive`
            for request in requests:
                self._refuse_late(request, self._end)
        if in_own_thread and len(self._arrivals) >= (self._expected or 1):
            self._take_turn()
        elif requests:
            self._serve_later()

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Remove waiting requests, now or before the next turn; they get no reply."""
        self._leaving.extend(requests)
        if self._turn_lock.acquire(blocking=False):
            try:
                self._withdraw_leaving()
            finally:
                self._turn_lock.release()
        self._wake_if_needed()

    def _withdraw_leaving(self) -> None:
        """Remove withdrawn requests; the caller has the turn."""
        leaving: list[Request] = []
        while self._leaving:
            leaving.append(self._leaving.popleft())
        if leaving:
            self.engine.withdraw(leaving)
            self._arrivals.withdraw(leaving)

    def _arrive(self, request: Request) -> None:
        self._arrivals.append(request)
        # Checked after the request was added: otherwise `_stop` could run in between, and nothing
        # would answer the request.
        if self._end is not None:
            self._refuse_late(request, self._end)

    def _refuse_late(self, request: Request, reason: MessagingError) -> None:
        request.fail(reason)
        with suppress(ValueError):
            self._arrivals.remove(request)

    # -- called by other threads ---------------------------------------------------------------

    def reconfigure(self, namespace: NamespaceSettings, ledger: LedgerSettings) -> None:
        """Change the limits and the ledger settings between two turns."""
        with self._between_turns():
            self.engine.reconfigure(namespace, ledger)

    def snapshot(self) -> Snapshot:
        """Return counts and sizes for metrics; costs no operation.

        It reads a few entities at a time, so that thousands of them do not block the turns.
        """
        with self._between_turns():
            seen = self.engine.snapshot(is_open=self._end is None)
            entities = self.engine.entities()
        found: list[tuple[RuntimeProperties, float]] = []
        for first in range(0, len(entities), SNAPSHOT_ENTITIES):
            with self._between_turns():
                found += self.engine.look_at(entities[first : first + SNAPSHOT_ENTITIES])
        return replace(
            seen,
            entities=[properties for properties, _ in found],
            oldest_ages_s={properties.path: age for properties, age in found},
        )

    def vitals(self) -> Vitals:
        """Return whether the namespace works, without waiting, even while a turn hangs."""
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
        """How many times the log was flushed, and how long the last flush took."""
        return self.engine.flushes

    @contextmanager
    def _between_turns(self) -> Iterator[None]:
        """Wait until no turn runs, and prevent turns; requests that arrive meanwhile wait."""
        with self._turn_lock:
            yield
        self._wake_if_needed()

    # -- turns ---------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Complete the futures of answered requests."""
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
            self._withdraw_leaving()
        is_careful = self.engine.healing.restarts > 0 and self.engine.is_careful
        group = self._arrivals.next_group(is_careful=is_careful)
        self._turns += 1
        try:
            left = self.engine.turn(group)
            if left:
                self._arrivals.put_back(left)
        except (KeyboardInterrupt, SystemExit):
            raise  # the signal is for the caller that runs the turn; the engine has restarted
        except BaseException as error:  # noqa: BLE001 - the restart failed: the namespace must stop
            _log.exception("The namespace stops: the broker cannot restart from its log")
            reason = error.text if isinstance(error, MessagingError) else repr(error)
            stopped = MessagingError(
                f"the namespace has stopped: {reason}. Repair the cause, then open it again or "
                "restart the server"
            )
            stopped.__cause__ = error
            self._stop(stopped, group)
            self.engine.abandon()
        finally:
            self._next_event = self.engine.next_event
            self._after_turn(group)

    def _stop(self, reason: MessagingError, unanswered: Sequence[Request] = ()) -> None:
        """Accept no more commands, and fail all waiting requests."""
        self._end = reason
        self._stop_listening()
        waiting = self.engine.waiting_requests()
        arrived = self._arrivals.everything()
        for request in (*unanswered, *arrived, *self.engine.stranded, *waiting):
            request.fail(reason)
        self._arrivals.clear()

    # -- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the commands in progress, refuse later ones, and release the directory."""
        with self._turn_lock:
            while (self._arrivals or self._arrivals.queued) and self._end is None:
                self._turn()
            if self._end is None:
                self._stop(NamespaceClosedError(NAMESPACE_CLOSED))
                self.engine.close()
        self._complete()

    def crash(self) -> None:
        """End as a killed process does, at any moment: nothing is written, nobody is answered."""
        if self._end is None:
            self._end = NamespaceClosedError(NAMESPACE_CLOSED)
            self._stop_listening()
        self.engine.crash()


class InlineWriter(Writer):
    """The caller runs every turn; time passes when the clock is moved. For simulations."""

    _has_thread = False

    def _serve_later(self) -> None:
        self._take_turn()

    def _on_advance(self) -> None:
        self._take_turn()

    def _after_turn(self, group: Sequence[Request]) -> None:
        """Do nothing: no turn waits for callers."""

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
    """Serves many threads: if no turn is running, a caller runs the next turn in its own thread.

    This saves two thread switches. Callers that were answered together tend to call again together,
    so the next turn waits until the last of them has arrived, and that caller runs the turn for
    all. The writer's own thread runs the turn if a caller does not arrive; it also runs the timers,
    and serves callers that do not block.
    """

    _has_thread = True

    def __init__(
        self, settings: EngineSettings, clock: Clock, storages: Storages | None = None
    ) -> None:
        self._wakeup = Wakeup()  # of the writer's thread
        self._sleeps_until = NEVER_US  # NEVER_US also while it is awake
        # Whether the thread sleeps for at most GATHER_S, because a turn waits for callers.
        self._sleeps_briefly = False
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
        """Return whether all expected callers of the next turn have arrived."""
        return len(self._arrivals) >= (self._expected or 1) or self._arrivals.queued > 0

    def _serve_later(self) -> None:
        self._wakeup.send()

    def _on_advance(self) -> None:
        self._wakeup.send()

    def _run(self) -> None:
        """Run timers, and turns whose expected callers did not arrive, in the writer's thread."""
        while self._end is None:
            turns = self._turns
            self._sleep()
            with self._turn_lock:
                if self._turns == turns:
                    self._expected = 0
                if self._leaving:
                    self._withdraw_leaving()
                self._turn_while_due()
            self._complete()

    def _sleep(self) -> None:
        """Wait for a signal, for a timer, or until a turn has waited for its callers too long."""
        if self._is_ready():
            return
        self._sleeps_until = self._next_event
        self._sleeps_briefly = self._expected > 0
        timeout = self._clock.seconds_until(self._sleeps_until)
        if timeout is not None:
            timeout = min(timeout, CLOCK_LOOK_S)
        if self._sleeps_briefly:
            timeout = GATHER_S if timeout is None else min(timeout, GATHER_S)
        self._wakeup.wait(timeout)
        self._sleeps_until, self._sleeps_briefly = NEVER_US, False

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
        """Set for how many requests the next turn waits: the number of callers that block.

        Requests of a server do not block, so the turn does not wait for them.
        """
        if self._arrivals.queued or len(group) + len(self._arrivals) < 2:
            self._expected = 0
            return
        callers = sum([type(request) is BlockingRequest for request in (*group, *self._arrivals)])
        self._expected = callers if callers > 1 else 0

    def _wake_if_needed(self) -> None:
        """Wake the thread if it has something to do that no caller does."""
        if (
            len(self._arrivals) >= (self._expected or 1)  # this line and the next: `_is_ready`
            or self._arrivals.queued
            or self._leaving  # `withdraw` was called while another thread ran a turn
            or (self._expected and not self._sleeps_briefly)
            or self._next_event < self._sleeps_until
        ):
            self._wakeup.send()

    def close(self) -> None:
        """Close, and end the thread."""
        super().close()
        if self._thread is not None:
            self._wakeup.send()
            self._thread.join()
