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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from twinbus.broker.access import OWNER
from twinbus.broker.commands import Command, size_of
from twinbus.broker.engine import Asker, Engine, EngineSettings, Snapshot, Storages, Vitals
from twinbus.broker.management import CHANGES_DIRECTORY
from twinbus.broker.namespace import NamespaceSettings
from twinbus.clock import Clock
from twinbus.errors import MessagingError, NamespaceClosedError, OperationTimeoutError
from twinbus.ledger import LedgerSettings
from twinbus.limits import CLOCK_LOOK_S, GATHER_S, MAX_BATCH_BYTES, NEVER_US
from twinbus.wakeup import Wakeup

R = TypeVar("R")
_log = logging.getLogger("twinbus.broker")


class _Promise:
    """A command whose reply goes to a future, once nobody holds the turn.

    The thread that completes a future runs its callbacks, and a callback may submit commands.
    """

    __slots__ = ("_completed", "_done", "command", "future")
    principal = OWNER

    def __init__(self, command: Command[Any], completed: "deque[Callable[[], None]]") -> None:
        self.command = command
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # what was handed over cannot be taken back
        self._completed = completed
        self._done = False

    def answer(self, value: Any) -> None:
        if not self._done:
            self._done = True
            self._completed.append(lambda: self.future.set_result(value))

    def fail(self, error: MessagingError) -> None:
        if not self._done:
            self._done = True
            self._completed.append(lambda: self.future.set_exception(error))


class Call:
    """A command whose caller blocks: a future with nothing but what blocking needs."""

    __slots__ = ("_answered", "_error", "_value", "command", "done")
    principal = OWNER

    def __init__(self, command: Command[Any]) -> None:
        self.command = command
        self.done = False
        self._value: Any = None
        self._error: MessagingError | None = None
        self._answered = threading.Lock()
        self._answered.acquire()

    def answer(self, value: Any) -> None:
        """Give the caller its reply."""
        if not self.done:
            self._value, self.done = value, True
            self._answered.release()

    def fail(self, error: MessagingError) -> None:
        """Give the caller an error to raise."""
        if not self.done:
            self._error, self.done = error, True
            self._answered.release()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer."""
        if not self._answered.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise OperationTimeoutError(
                f"no answer within {timeout_s:.3g} s; whether the work was done is unknown"
            )
        if self._error is not None:
            raise self._error.with_traceback(None)  # others may be raising it too
        return self._value


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
        self._arrivals: deque[Asker] = deque()
        self._changed_directory = False  # in the last turn
        self._withdrawn: set[int] = set()  # identities of arrivals that no longer count
        self._completed: deque[Callable[[], None]] = deque()  # futures to complete after a turn
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

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; the future holds its reply or its error."""
        promise = _Promise(command, self._completed)
        self._arrive(promise)
        if self._thread is None:
            self._take_turn()
        elif self._is_ready():
            self._wakeup.send()
        if self._end is not None:
            self._complete()
        return promise.future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        call = Call(command)
        self._arrive(call)
        if self._is_ready():
            self._take_turn()
        return call.result(timeout_s)  # type: ignore[no-any-return]

    def hand_over(self, askers: Sequence[Asker]) -> None:
        """Take commands of askers who do not wait here, with the caller's own thread if it can.

        An asker is answered within a turn, by whoever has it: it must neither block nor ask back.
        """
        for asker in askers:
            self._arrive(asker)
        if self._is_ready():
            self._take_turn()

    def withdraw(self, askers: Iterable[Asker]) -> None:
        """Let requests that wait go unanswered."""
        gone = {id(asker) for asker in askers}
        with self._turn_kept():
            self.engine.withdraw(gone)
            self._withdrawn |= gone & {id(asker) for asker in list(self._arrivals)}

    def reconfigure(self, namespace: NamespaceSettings, ledger: LedgerSettings) -> None:
        """Change the limits and the ledger settings, between two turns."""
        with self._turn_kept():
            self.engine.reconfigure(namespace, ledger)

    def snapshot(self) -> Snapshot:
        """Return what there is to see from outside; costs no operation."""
        with self._turn_kept():
            return self.engine.snapshot(is_open=self._end is None)

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

    @contextmanager
    def _turn_kept(self) -> Iterator[None]:
        """Keep everybody from taking the turn; what comes meanwhile is seen to afterwards."""
        with self._turn_lock:
            yield
        self._see_to_the_next()

    def _is_ready(self) -> bool:
        """Whether everyone the next turn is held for is there."""
        return len(self._arrivals) >= max(1, self._expected)

    def _arrive(self, asker: Asker) -> None:
        self._arrivals.append(asker)
        if self._end is not None:  # looked at last, so that nobody slips in behind `_stop`
            asker.fail(self._end)
            with suppress(ValueError):
                self._arrivals.remove(asker)

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
            or (self._expected and not self._guards)
            or self._next_event < self._sleeps_until
        ):
            self._wakeup.send()

    def _complete(self) -> None:
        """Complete the futures that turns have answered."""
        with suppress(IndexError):
            while True:
                self._completed.popleft()()

    def _turn_while_due(self) -> None:
        while self._end is None and (
            self._is_ready()
            or self._next_event <= self._clock.now_us()
            or self.engine.notices_clock()
        ):
            self._turn()

    def _turn(self) -> None:
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
            callers = len(group) + len(self._arrivals)
            self._expected = callers if callers > 1 and self._thread is not None else 0
            self._next_event = self.engine.next_event

    def _stop(self, reason: MessagingError, unanswered: Sequence[Asker] = ()) -> None:
        """Take no more commands, and tell everyone who still waits."""
        self._end = reason
        self._stop_listening()
        waiting = self.engine.waiting_tickets()
        for ticket in (*unanswered, *self._arrivals, *self.engine.stranded, *waiting):
            ticket.fail(reason)
        self._arrivals.clear()

    def _next_group(self) -> list[Asker]:
        """Return what goes into one turn: no more than a batch may carry.

        A change of the directory gets a turn of its own.
        """
        arrivals = self._arrivals
        while self._withdrawn and arrivals and id(arrivals[0]) in self._withdrawn:
            self._withdrawn.discard(id(arrivals.popleft()))
        if arrivals and isinstance(arrivals[0].command, CHANGES_DIRECTORY):
            others = self._others() if self._changed_directory else []
            self._changed_directory = not others
            return others or [arrivals.popleft()]
        self._changed_directory = False
        if arrivals and self.engine.is_careful:
            return [arrivals.popleft()]
        group: list[Asker] = []
        size = 0
        while arrivals and not isinstance(arrivals[0].command, CHANGES_DIRECTORY):
            size += size_of(arrivals[0].command)
            if group and size > MAX_BATCH_BYTES:
                break
            asker = arrivals.popleft()
            if id(asker) in self._withdrawn:
                self._withdrawn.discard(id(asker))
            else:
                group.append(asker)
        return group

    def _others(self) -> list[Asker]:
        """Take what other keys ask for, past a key that keeps changing the directory.

        What one key asked for stays in order.
        """
        waits: set[str] = set()  # principals whose changes come first
        group: list[Asker] = []
        size = 0
        for asker in list(self._arrivals):
            if isinstance(asker.command, CHANGES_DIRECTORY):
                waits.add(asker.principal.id)
            elif asker.principal.id not in waits and id(asker) not in self._withdrawn:
                size += size_of(asker.command)
                if group and size > MAX_BATCH_BYTES:
                    break
                group.append(asker)
        for asker in group:
            self._arrivals.remove(asker)
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
