"""A namespace of Azure Service Bus, through its official SDK.

The SDK blocks, so commands are carried out by threads: a crew that works, and a crew whose members
wait for messages and for sessions. A caller that sends with `ask` uses an open link in its own
thread. The SDK retries nothing: whoever asks does, under the retry policy of Twinbus. A link that
may have gone stale while it was idle is opened again once before its failure is reported.

Every message that is sent has an id. One without gets an id that follows from its origin, so that
an entity which detects duplicates drops a repeated send. A message that is brought home carries its
origin in the property `x-twinbus-origin` as well, so that consumers can recognise a repetition.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pyarrow as pa
from azure.servicebus._pyamqp.error import AMQPException

from twinbus.clock import Clock, SystemClock, to_us
from twinbus.connection import ConnectionString
from twinbus.errors import (
    EntityNotFoundError,
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
    SessionCannotBeLockedError,
    SessionLockLostError,
)
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import (
    AZURE_ACCEPT_GRACE_S,
    AZURE_ACCEPT_S,
    AZURE_ACCEPT_SLICE_S,
    AZURE_POLL_S,
    AZURE_REQUEST_S,
    AZURE_SWEEP_S,
    AZURE_WAITERS,
    AZURE_WORKERS,
    MAX_CLOSE_WAIT,
    TRY_TIMEOUT,
)
from twinbus.message import BrokeredMessage
from twinbus.namespace.azure_crew import Crew
from twinbus.namespace.azure_errors import mapped, to_messaging_error
from twinbus.namespace.azure_links import Link, LinkKey, LinkPool, Purpose
from twinbus.namespace.azure_management import Administration
from twinbus.namespace.azure_receiving import (
    HeldLocks,
    Reception,
    delete_messages,
    delivery_batch,
    list_sessions,
    peek,
    receive_deferred,
    renew,
    settle,
)
from twinbus.namespace.azure_sdk import new_linkless, new_receiver, open_client
from twinbus.namespace.azure_sending import send
from twinbus.protocol import commands as c
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.requests import unanswered
from twinbus.protocol.table import check_supported, row_of, undo_of, waits
from twinbus.wakeup import Wakeup

R = TypeVar("R")
CAPABILITIES = EVERY_CAPABILITY - {
    Capability.RANGES,
    Capability.REPEAT_MEMORY,
    Capability.TRANSFER_MEMORY,
    Capability.KEYS,
    Capability.METERING,
    Capability.RECEIPT_NUMBERS,  # but for scheduled messages
    Capability.WHOLE_BATCHES,  # but for those that fit one batch of AMQP
}


class Job:
    """A command that is being carried out, and who waits for it."""

    def __init__(self, command: c.Command[Any], timeout_s: float) -> None:
        self.command: Any = command
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # what was handed over cannot be taken back
        self.link: Link | None = None  # that it uses now
        self.is_abandoned = False
        self._deadline = time.monotonic() + timeout_s
        self._ends = threading.Lock()
        self._is_answered = False  # its future has a result, or is about to

    @property
    def left_s(self) -> float:
        """How much time it has left."""
        return max(self._deadline - time.monotonic(), 0.0)

    def abandon(self) -> bool:
        """Give up waiting; False: it has just been answered."""
        with self._ends:
            if self._is_answered:
                return False
            self.is_abandoned = True
        link = self.link
        if link is not None:
            link.abort()
        return True

    def answer(self, value: Any, error: MessagingError | None = None) -> bool:
        """Answer whoever waits; False: nobody does."""
        with self._ends:
            if self.is_abandoned:
                return False
            self._is_answered = True
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)
        return True


class AzureNamespace(Closable):
    """Reaches an Azure Service Bus; nothing is opened before the first command."""

    def __init__(self, connection: ConnectionString, clock: Clock | None = None) -> None:
        self._connection = connection
        self._clock = clock or SystemClock()
        self._begin()
        on_fork(self._begin)  # a forked process has connections of its own

    def _begin(self) -> None:
        self._client = open_client(self._connection, self._clock)
        self._administration = Administration(self._connection, self._clock)
        self._workers = Crew("twinbus-azure", AZURE_WORKERS)
        self._waiters = Crew("twinbus-azure-waiting", AZURE_WAITERS)
        self._closers = Crew("twinbus-azure-closing", AZURE_WORKERS)
        self._links = LinkPool(self._new_link, self._closers)
        self._held = HeldLocks()
        self._sessions: dict[UUID, Link] = {}
        self._jobs: set[Job] = set()
        self._lanes: dict[str, deque[Job]] = {}  # sends that wait for one to the same entity
        self._lock = threading.Lock()
        self._is_closed = False
        self._sweeper: threading.Thread | None = None
        self._sweep_now = Wakeup()

    @property
    def id(self) -> str:
        """The unique id, if the connection string has one; a Service Bus tells none."""
        return self._connection.namespace_id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What Service Bus can do."""
        return CAPABILITIES

    # -- commands ------------------------------------------------------------------------------

    def submit(self, command: c.Command[R]) -> "Future[R]":
        """Hand a command over; never blocks, never raises."""
        try:
            return self._start(command, _time_for(command)).future
        except MessagingError as error:
            refused: Future[R] = Future()
            refused.set_exception(error)
            return refused

    def ask(self, command: c.Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        left_s = _time_for(command) if timeout_s is None else timeout_s
        if type(command) is c.Send:
            began = time.monotonic()
            receipt: Any = self._send_here(command, left_s)
            if receipt is not None:
                return receipt  # type: ignore[no-any-return]
            left_s -= time.monotonic() - began
        job = self._start(command, left_s)
        try:
            return job.future.result(left_s)  # type: ignore[no-any-return]
        except MessagingError:
            raise
        except TimeoutError:
            if job.abandon():
                raise unanswered(left_s) from None
            return job.future.result()  # type: ignore[no-any-return]

    def _send_here(self, command: c.Send, timeout_s: float) -> c.SendReceipt | None:
        """Send in the caller's thread if a link is open; None: there is none, or it was stale."""
        link = None if self._is_closed else self._links.take_open(_sends_to(command.path))
        if link is None:
            return None
        try:
            with link.turn:
                receipt = send(link, command, timeout_s)
        except Exception as failure:
            row = mapped(failure)
            if row.is_stale:
                self._links.discard(link)
                return None
            self._links.give_back(link)
            raise to_messaging_error(failure, command.path) from failure
        self._links.give_back(link)
        return receipt

    def _start(self, command: c.Command[Any], timeout_s: float) -> Job:
        check_supported(command, "Azure Service Bus", self.capabilities)
        _check_path(command)
        job = Job(command, timeout_s)
        with self._lock:
            if self._is_closed:
                raise NamespaceClosedError("the namespace was closed")
            self._jobs.add(job)
            self._start_sweeper()
            if type(command) is c.Send and self._queue_send(job):
                return job
        crew = self._waiters if waits(command) else self._workers
        crew.submit(lambda: self._carry_out(job))
        return job

    def _queue_send(self, job: Job) -> bool:
        """Have sends to one entity carried out in order; under the lock. True: somebody does."""
        waiting = self._lanes.get(job.command.path)
        if waiting is not None:
            waiting.append(job)
            return True
        self._lanes[job.command.path] = deque()
        return False

    def _next_send(self, path: str) -> Job | None:
        with self._lock:
            waiting = self._lanes[path]
            if waiting:
                return waiting.popleft()
            del self._lanes[path]
            return None

    def _carry_out(self, job: Job) -> None:
        """Carry a command out; a send also those to the same entity that came meanwhile."""
        self._carry_out_one(job)
        if type(job.command) is c.Send:
            while (following := self._next_send(job.command.path)) is not None:
                self._carry_out_one(following)

    def _carry_out_one(self, job: Job) -> None:
        """Carry a command out and answer it; what nobody waits for is taken back."""
        value: Any = None
        error: MessagingError | None = None
        try:
            if job.is_abandoned:
                return
            value = self._handle(job)
            if self._is_closed and waits(job.command):
                self._take_back(job.command, value)
                value, error = None, NamespaceClosedError("the namespace was closed")
        except Exception as failure:  # noqa: BLE001 - whatever the SDK raises
            error = to_messaging_error(failure, row_of(job.command).path_of(job.command))
        finally:
            self._jobs.discard(job)
        if not job.answer(value, error) and error is None:
            self._take_back(job.command, value)

    def _take_back(self, command: c.Command[Any], value: Any) -> None:
        undo = undo_of(command, value)
        if undo is not None:
            with suppress(Exception):  # locks that cannot be given back lapse
                self._handle(Job(undo, AZURE_REQUEST_S))

    def _handle(self, job: Job) -> Any:
        handler = _HANDLERS.get(type(job.command))
        if handler is None:
            return self._administration.carry_out(job.command)
        return handler(self, job)

    # -- links ---------------------------------------------------------------------------------

    def _new_link(self, key: LinkKey) -> Link:
        if key.purpose is Purpose.SEND:
            return Link(key, self._client.get_queue_sender(key.path))
        if key.purpose is Purpose.MANAGE:
            return Link(key, new_linkless(self._client, key.path))
        deletes = key.purpose is Purpose.DELETE
        return Link(key, new_receiver(self._client, key.path, deletes=deletes))

    def _with_link(self, job: Job, key: LinkKey, use: Callable[[Link], R]) -> R:
        """Use a link; one that may have gone stale while it was idle is opened again, once."""
        for is_fresh in (False, True):
            link = self._links.take(key, job.left_s, is_fresh=is_fresh)
            was_open = link.is_open
            job.link = link
            try:
                value = use(link)
            except Exception as failure:
                row = mapped(failure)
                if row.is_stale or isinstance(failure, OperationTimeoutError):
                    self._forget(link)
                else:
                    self._links.give_back(link)
                if is_fresh or not was_open or not row.is_stale or not job.left_s:
                    raise
            else:
                self._links.give_back(link)
                return value
            finally:
                job.link = None
        raise AssertionError("a fresh link either works or raises")

    def _forget(self, link: Link) -> None:
        self._held.forget_link(link)
        self._links.discard(link)

    @contextmanager
    def _borrowed(self, path: str, timeout_s: float) -> Iterator[Link]:
        """Give a link of an entity for a request of management."""
        link = self._links.take(_manages(path), timeout_s)
        try:
            yield link
        except Exception as failure:
            if mapped(failure).is_stale:
                self._forget(link)
            else:
                self._links.give_back(link)
            raise
        self._links.give_back(link)

    # -- sending -------------------------------------------------------------------------------

    def _send(self, job: Job) -> c.SendReceipt:
        command: c.Send = job.command

        def use(link: Link) -> c.SendReceipt:
            with link.turn:
                link.open(job.left_s)
                return send(link, command, max(job.left_s, 0.001))

        return self._with_link(job, _sends_to(command.path), use)

    def _cancel(self, job: Job) -> None:
        command: c.CancelScheduled = job.command

        def use(link: Link) -> None:
            with link.turn:
                link.open(job.left_s)
                numbers = [int(number) for number in command.sequence_numbers]
                link.sdk.cancel_scheduled_messages(numbers, timeout=max(job.left_s, 0.001))

        self._with_link(job, _sends_to(command.path), use)

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self, job: Job) -> pa.RecordBatch:
        command: c.Receive = job.command
        deadline = self._clock.now_us() + to_us(command.wait) if command.wait else None

        def is_stopped() -> bool:
            return job.is_abandoned or self._is_closed

        def use(link: Link) -> list[BrokeredMessage]:
            reception = Reception(link, command, self._held, self._clock, is_stopped)
            return reception.run(deadline, job.left_s)

        if command.session is not None:
            return self._receive_of_session(job, command.session, use)
        while True:
            try:
                return delivery_batch(self._with_link(job, _receives(command), use))
            except Exception as failure:
                # Services end idle links. A receive that waits goes on with another one, unless
                # that cannot be opened.
                if deadline is None or is_stopped() or not _has_worked(failure):
                    raise
            time.sleep(AZURE_POLL_S)

    def _receive_of_session(
        self, job: Job, session: c.SessionLock, use: Callable[[Link], list[BrokeredMessage]]
    ) -> pa.RecordBatch:
        """Receive by the link that holds a session; it locks messages, so that they are settled."""
        found = delivery_batch(self._with_session(session, use))
        if job.command.mode is c.ReceiveMode.PEEK_LOCK or not found.num_rows:
            return found
        tokens = found.column("lock_token")
        complete = c.Settle(job.command.path, tokens, c.Disposition.COMPLETE)
        self._settle(Job(complete, AZURE_REQUEST_S))
        names = ("lock_token", "locked_until_utc")
        for name in names:
            at = found.schema.get_field_index(name)
            field = found.schema.field(at)
            found = found.set_column(at, field, pa.nulls(found.num_rows, field.type))
        return found

    def _receive_deferred(self, job: Job) -> pa.RecordBatch:
        command: c.ReceiveDeferred = job.command

        def use(link: Link) -> list[BrokeredMessage]:
            return receive_deferred(link, command, job.left_s)

        if command.session is not None:
            return delivery_batch(self._with_session(command.session, use))
        return delivery_batch(self._with_link(job, _manages(command.path), use))

    def _peek(self, job: Job) -> pa.RecordBatch:
        command: c.Peek = job.command
        found = self._with_link(
            job, _manages(command.path), lambda link: peek(link, command, job.left_s)
        )
        return delivery_batch(found)

    def _delete_messages(self, job: Job) -> int:
        command: c.DeleteMessages = job.command

        def use(link: Link) -> int:
            return delete_messages(link, command, job.left_s)

        if command.session is not None:
            return self._with_session(command.session, use)
        return self._with_link(job, _manages(command.path), use)

    def _list_sessions(self, job: Job) -> list[str]:
        command: c.ListSessions = job.command
        return self._with_link(
            job, _manages(command.path), lambda link: list_sessions(link, command, job.left_s)
        )

    def _settle(self, job: Job) -> None:
        command: c.Settle = job.command
        borrow = partial(self._borrowed, command.path, job.left_s)
        settle(command, self._held, borrow, self._clock, job.left_s)

    def _renew_locks(self, job: Job) -> Any:
        command: c.RenewLocks = job.command
        tokens = [UUID(bytes=token) for token in command.lock_tokens.to_pylist()]
        by_link = self._held.links(command.path, tokens)
        known = {token for found in by_link.values() for token in found}
        ends = [renew(link, found, job.left_s) for link, found in by_link.items()]
        others = [token for token in tokens if token not in known]
        if others:
            with self._borrowed(command.path, job.left_s) as link:
                ends.append(renew(link, others, job.left_s))
        until = min(ends)
        self._held.prolong(tokens, until)
        return until

    # -- sessions ------------------------------------------------------------------------------

    def _accept_session(self, job: Job) -> c.SessionGrant:
        command: c.AcceptSession = job.command
        deadline = self._clock.now_us() + to_us(command.wait)
        while True:
            try:
                return self._try_accept(job, command, deadline)
            except Exception as failure:
                error = to_messaging_error(failure, command.path)
                if not isinstance(error, SessionCannotBeLockedError | OperationTimeoutError):
                    raise
                is_over = self._clock.now_us() >= deadline
                if is_over or job.is_abandoned or self._is_closed:
                    raise _no_session(command) from failure
            time.sleep(AZURE_POLL_S)

    def _try_accept(self, job: Job, command: c.AcceptSession, deadline: int) -> c.SessionGrant:
        left_s = self._clock.seconds_until(deadline) or 0.0  # None: the clock is moved by hand
        wait_s = min(max(left_s, AZURE_ACCEPT_S), AZURE_ACCEPT_SLICE_S)
        sdk = new_receiver(
            self._client,
            command.path,
            session_id=command.session_id,
            next_session_s=wait_s if command.session_id is None else None,
        )
        link = job.link = Link(LinkKey(command.path, Purpose.LOCK), sdk)
        try:
            with link.turn:
                link.open(min(job.left_s, wait_s + AZURE_ACCEPT_GRACE_S))
        except BaseException:
            self._closers.submit(link.close)
            raise
        finally:
            job.link = None
        lock = c.SessionLock(str(sdk.session.session_id), uuid4())
        self._sessions[lock.lock_token] = link
        until = sdk.session.locked_until_utc
        assert until is not None
        return c.SessionGrant(lock, until)

    def _with_session(self, lock: c.SessionLock, use: Callable[[Link], R]) -> R:
        """Use the link that holds a session; it is never opened again: the session is lost."""
        link = self._sessions.get(lock.lock_token)
        is_other = link is not None and str(link.sdk.session.session_id) != lock.session_id
        if link is None or is_other or not link.is_open:
            raise SessionLockLostError(
                f"session {lock.session_id!r:.60} is not held here; accept it again",
                session_id=lock.session_id,
            )
        try:
            return use(link)
        except Exception as failure:
            if mapped(failure).is_stale or isinstance(
                to_messaging_error(failure, ""), SessionLockLostError
            ):
                self._release(lock)
                raise SessionLockLostError(
                    f"session {lock.session_id!r:.60} was lost: {failure}",
                    session_id=lock.session_id,
                ) from failure
            raise

    def _release(self, lock: c.SessionLock) -> None:
        link = self._sessions.pop(lock.lock_token, None)
        if link is not None:
            self._held.forget_link(link)
            link.close()

    def _release_session(self, job: Job) -> None:
        self._with_session(job.command.session, lambda _: None)
        self._release(job.command.session)

    def _on_session(self, job: Job, use: Callable[[Any], R]) -> R:
        def with_turn(link: Link) -> R:
            with link.turn:
                return use(link.sdk.session)

        return self._with_session(job.command.session, with_turn)

    def _renew_session(self, job: Job) -> Any:
        return self._on_session(job, lambda session: session.renew_lock(timeout=job.left_s))

    def _get_state(self, job: Job) -> bytes | None:
        state = self._on_session(job, lambda session: session.get_state(timeout=job.left_s))
        return None if state is None else bytes(state)

    def _set_state(self, job: Job) -> None:
        state = job.command.state
        self._on_session(job, lambda session: session.set_state(state, timeout=job.left_s))

    # -- the end -------------------------------------------------------------------------------

    def _start_sweeper(self) -> None:
        """Close idle links from now on; under the lock."""
        if self._sweeper is None:
            self._sweeper = threading.Thread(
                target=self._sweep, name="twinbus-azure-sweep", daemon=True
            )
            self._sweeper.start()

    def _sweep(self) -> None:
        while not self._sweep_now.wait(AZURE_SWEEP_S):
            self._links.sweep()

    def close(self) -> None:
        """Finish what was handed over, give back what waits, and hang up."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            jobs = list(self._jobs)
        for job in jobs:
            link = job.link
            if link is not None and waits(job.command):
                link.abort()
        self._sweep_now.send()
        deadline = time.monotonic() + MAX_CLOSE_WAIT.total_seconds()
        for job in jobs:
            with suppress(MessagingError, TimeoutError):
                job.future.exception(max(deadline - time.monotonic(), 0))
        for job in list(self._jobs):
            job.answer(None, NamespaceClosedError("the namespace was closed"))
            job.is_abandoned = True
        idle = [*self._links.close(), *self._sessions.values()]
        self._sessions = {}
        ended = [threading.Event() for _ in idle]
        for link, event in zip(idle, ended, strict=True):
            self._closers.submit(partial(_close, link, event))
        for event in ended:
            event.wait(max(deadline - time.monotonic(), 0))
        self._administration.close()


def _close(link: Link, ended: threading.Event) -> None:
    link.close()
    ended.set()


def _check_path(command: c.Command[Any]) -> None:
    """Refuse a path that the SDK would take for another one."""
    path = getattr(command, "path", None)
    if path is not None and (not path or path != path.strip("/") or set(path) & set("?#\\")):
        raise EntityNotFoundError(f"there is no entity {path!r:.60}; check the path", path=path)


def _has_worked(failure: BaseException) -> bool:
    """Whether a link that was open has ended for a reason that another one may not have."""
    return mapped(failure).is_stale and isinstance(failure, AMQPException)


def _no_session(command: c.AcceptSession) -> SessionCannotBeLockedError:
    """Return the error of a session that is not free, or did not become free."""
    what = f"session {command.session_id!r:.60} of {command.path} is locked by another receiver"
    end = ", which did not release it in time; try again or wait longer"
    if command.session_id is None:
        what = f"{command.path} has no session with messages that is not locked"
        end = ", and none came in time; try again or wait longer"
    text = what + (end if command.wait else "; try again, or wait for it")
    return SessionCannotBeLockedError(text, path=command.path, session_id=command.session_id)


def _time_for(command: c.Command[Any]) -> float:
    """Return how long a command may take where its caller sets no limit."""
    if type(command) is c.Send:
        return TRY_TIMEOUT.total_seconds()
    wait = getattr(command, "wait", None)
    return AZURE_REQUEST_S + (wait.total_seconds() if wait else 0.0)


def _sends_to(path: str) -> LinkKey:
    return LinkKey(path, Purpose.SEND)


def _manages(path: str) -> LinkKey:
    return LinkKey(path, Purpose.MANAGE)


def _receives(command: c.Receive) -> LinkKey:
    is_locking = command.mode is c.ReceiveMode.PEEK_LOCK
    return LinkKey(command.path, Purpose.LOCK if is_locking else Purpose.DELETE)


_HANDLERS: dict[type, Callable[[AzureNamespace, Job], Any]] = {
    c.Send: AzureNamespace._send,  # noqa: SLF001
    c.CancelScheduled: AzureNamespace._cancel,  # noqa: SLF001
    c.Receive: AzureNamespace._receive,  # noqa: SLF001
    c.ReceiveDeferred: AzureNamespace._receive_deferred,  # noqa: SLF001
    c.Peek: AzureNamespace._peek,  # noqa: SLF001
    c.DeleteMessages: AzureNamespace._delete_messages,  # noqa: SLF001
    c.ListSessions: AzureNamespace._list_sessions,  # noqa: SLF001
    c.Settle: AzureNamespace._settle,  # noqa: SLF001
    c.RenewLocks: AzureNamespace._renew_locks,  # noqa: SLF001
    c.AcceptSession: AzureNamespace._accept_session,  # noqa: SLF001
    c.RenewSession: AzureNamespace._renew_session,  # noqa: SLF001
    c.ReleaseSession: AzureNamespace._release_session,  # noqa: SLF001
    c.GetSessionState: AzureNamespace._get_state,  # noqa: SLF001
    c.SetSessionState: AzureNamespace._set_state,  # noqa: SLF001
}
