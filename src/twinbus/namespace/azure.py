"""A namespace of Azure Service Bus, through its official SDK.

The SDK blocks, so threads execute the commands: one thread pool (crew) for short commands, and one
for receives and sessions that wait. A caller of `ask` that sends uses an open link in its own
thread. The SDK's own retries are off: the caller retries under the retry policy of Twinbus. A link
that may have become stale while it was idle is reopened once before its failure is reported.

Every message is sent with an id. A message without one gets an id derived from its origin, so that
an entity with duplicate detection drops a repeated send; without an origin, the id is random. A
message that is brought home also carries its origin in the property `x-twinbus-origin`, so that
consumers can detect duplicates.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
from azure.servicebus._pyamqp.error import AMQPException

from twinbus.clock import Clock, SystemClock, to_us
from twinbus.connection import ConnectionString
from twinbus.errors import (
    NAMESPACE_CLOSED,
    EntityNotFoundError,
    MessagingError,
    NamespaceClosedError,
)
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import (
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
from twinbus.namespace.azure_errors import MappedFailure, mapped, to_messaging_error
from twinbus.namespace.azure_jobs import AzureJob, SendLanes
from twinbus.namespace.azure_links import AzureLink, LinkKey, LinkPool, LinkPurpose
from twinbus.namespace.azure_management import AzureAdministration
from twinbus.namespace.azure_receiving import (
    MessageLocks,
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
from twinbus.namespace.azure_sessions import AzureSessions
from twinbus.protocol import commands as c
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.protocol.remainder import accepted_in
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
    Capability.RECEIPT_NUMBERS,  # only for scheduled messages
    Capability.WHOLE_BATCHES,  # only for messages that fit into one AMQP batch
}


class AzureNamespace(Closable):
    """Connects to an Azure Service Bus; opens nothing before the first command.

    `credential` is one that the SDK accepts; it replaces that of the connection string.
    `options` are further arguments of the SDK's client, which no connection string can express.
    """

    def __init__(
        self,
        connection: ConnectionString,
        clock: Clock | None = None,
        *,
        credential: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._credential = credential
        self._options = dict(options or {})
        self._clock = clock or SystemClock()
        self._begin()
        on_fork(self._begin)  # a forked process opens its own connections

    def _begin(self) -> None:
        arguments = (self._connection, self._clock, self._credential)
        self._client = open_client(*arguments, **self._options)
        self._administration = AzureAdministration(*arguments)
        self._workers = Crew("twinbus-azure", AZURE_WORKERS)
        self._waiters = Crew("twinbus-azure-waiting", AZURE_WAITERS)
        self._closers = Crew("twinbus-azure-closing", AZURE_WORKERS)
        self._links = LinkPool(self._new_link, self._closers)
        self._locks = MessageLocks()
        self._sessions = AzureSessions(self._client, self._clock, self._locks, self._closers)
        self._jobs: set[AzureJob] = set()
        self._lanes = SendLanes()
        self._lock = threading.Lock()
        self._is_closed = False
        self._sweeper: threading.Thread | None = None
        self._sweep_now = Wakeup()

    @property
    def id(self) -> str:
        """The unique id, if the connection string has one; Service Bus does not report one."""
        return self._connection.namespace_id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of Service Bus."""
        return CAPABILITIES

    # -- commands ------------------------------------------------------------------------------

    def submit(self, command: c.Command[R]) -> "Future[R]":
        """Start a command; never blocks, never raises."""
        try:
            return self._start(command, _time_for(command)).future
        except MessagingError as error:
            refused: Future[R] = Future()
            refused.set_exception(error)
            return refused

    def ask(self, command: c.Command[R], timeout_s: float | None = None) -> R:
        """Start a command and wait for its reply, or raise its error."""
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
                raise unanswered(left_s, command) from None
            return job.future.result()  # type: ignore[no-any-return]

    def _send_here(self, command: c.Send, timeout_s: float) -> c.SendReceipt | None:
        """Send in the caller's thread on an open link; None if there is none, or it was stale."""
        link = None if self._is_closed else self._links.take_open(_sends_to(command.path))
        if link is None:
            return None
        try:
            with link.turn:
                receipt = send(link, command, timeout_s)
        except Exception as failure:
            row = mapped(_cause_of(failure))
            self._return_link(link, row)
            if row.is_stale and not _is_partly_sent(failure):
                return None
            raise to_messaging_error(failure, command.path) from failure
        self._links.give_back(link)
        return receipt

    def _start(self, command: c.Command[Any], timeout_s: float) -> AzureJob:
        check_supported(command, "Azure Service Bus", self.capabilities)
        _check_path(command)
        job = AzureJob(command, timeout_s)
        with self._lock:
            if self._is_closed:
                raise NamespaceClosedError(NAMESPACE_CLOSED)
            self._jobs.add(job)
            self._start_sweeper()
            if type(command) is c.Send and self._lanes.queue(job):
                return job
        crew = self._waiters if waits(command) else self._workers
        crew.submit(lambda: self._execute_lane(job))
        return job

    def _execute_lane(self, job: AzureJob) -> None:
        """Execute a command; after a send, also the sends to its entity that arrived meanwhile."""
        self._execute(job)
        if type(job.command) is c.Send:
            while (following := self._next_send(job.command.path)) is not None:
                self._execute(following)

    def _next_send(self, path: str) -> AzureJob | None:
        with self._lock:
            return self._lanes.next(path)

    def _execute(self, job: AzureJob) -> None:
        """Execute a command and complete it; undo it if nobody waits any more."""
        value: Any = None
        error: MessagingError | None = None
        try:
            if job.is_abandoned:
                return
            value = self._handle(job)
            if self._is_closed and waits(job.command):
                self._take_back(job.command, value)
                value, error = None, NamespaceClosedError(NAMESPACE_CLOSED)
        except Exception as failure:  # noqa: BLE001 - the SDK may raise anything
            error = to_messaging_error(failure, row_of(job.command).path_of(job.command))
        finally:
            self._jobs.discard(job)
        if not job.answer(value, error) and error is None:
            self._take_back(job.command, value)

    def _take_back(self, command: c.Command[Any], value: Any) -> None:
        undo = undo_of(command, value)
        if undo is not None:
            with suppress(Exception):  # a lock that cannot be released expires
                self._handle(AzureJob(undo, AZURE_REQUEST_S))

    def _handle(self, job: AzureJob) -> Any:
        handler = _HANDLERS.get(type(job.command))
        if handler is None:
            return self._administration.carry_out(job.command)
        return handler(self, job)

    # -- links ---------------------------------------------------------------------------------

    def _new_link(self, key: LinkKey) -> AzureLink:
        if key.purpose is LinkPurpose.SEND:
            return AzureLink(key, self._client.get_queue_sender(key.path))
        if key.purpose is LinkPurpose.MANAGE:
            return AzureLink(key, new_linkless(self._client, key.path))
        deletes = key.purpose is LinkPurpose.DELETE
        return AzureLink(key, new_receiver(self._client, key.path, deletes=deletes))

    def _with_link(self, job: AzureJob, key: LinkKey, use: Callable[[AzureLink], R]) -> R:
        """Use a link; reopen it once if it may have become stale while it was idle."""
        for is_fresh in (False, True):
            link = self._links.take(key, job.left_s, is_fresh=is_fresh)
            was_open = link.is_open
            job.link = link
            try:
                value = use(link)
            except Exception as failure:
                row = mapped(_cause_of(failure))
                self._return_link(link, row)
                if is_fresh or not was_open or not row.is_stale or not job.left_s:
                    raise
                if _is_partly_sent(failure):  # the caller sends the rest
                    raise
            else:
                self._return_link(link)
                return value
            finally:
                job.link = None
        raise AssertionError("a fresh link either works or raises")

    def _return_link(self, link: AzureLink, failure: MappedFailure | None = None) -> None:
        """Return a link to the pool after its use, or close it if it cannot be used again."""
        if failure is not None and failure.is_silent:
            self._locks.forget_link(link)
            self._links.discard_silent(link)
        elif link.has_failed or (failure is not None and failure.is_stale):
            self._locks.forget_link(link)
            self._links.discard(link)
        else:
            self._links.give_back(link)

    @contextmanager
    def _borrowed(self, path: str, timeout_s: float) -> Iterator[AzureLink]:
        """Lend a link of an entity for a management request."""
        link = self._links.take(_manages(path), timeout_s)
        try:
            yield link
        except Exception as failure:
            self._return_link(link, mapped(failure))
            raise
        self._return_link(link)

    # -- sending -------------------------------------------------------------------------------

    def _send(self, job: AzureJob) -> c.SendReceipt:
        command: c.Send = job.command

        def use(link: AzureLink) -> c.SendReceipt:
            with link.turn:
                link.open(job.left_s)
                return send(link, command, max(job.left_s, 0.001))

        return self._with_link(job, _sends_to(command.path), use)

    def _cancel(self, job: AzureJob) -> None:
        command: c.CancelScheduled = job.command

        def use(link: AzureLink) -> None:
            with link.turn:
                link.open(job.left_s)
                numbers = [int(number) for number in command.sequence_numbers]
                link.sdk.cancel_scheduled_messages(numbers, timeout=max(job.left_s, 0.001))

        self._with_link(job, _sends_to(command.path), use)

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self, job: AzureJob) -> pa.RecordBatch:
        command: c.Receive = job.command
        deadline = self._clock.now_us() + to_us(command.wait) if command.wait else None

        def is_stopped() -> bool:
            return job.is_abandoned or self._is_closed

        def use(link: AzureLink) -> list[BrokeredMessage]:
            reception = Reception(link, command, self._locks, self._clock, is_stopped)
            return reception.run(deadline, job.left_s)

        if command.session is not None:
            return self._receive_of_session(job, command.session, use)
        while True:
            try:
                return delivery_batch(self._with_link(job, _receives(command), use))
            except Exception as failure:
                # The service ends idle links. A receive that waits continues on another link,
                # unless that cannot be opened.
                if deadline is None or is_stopped() or not _has_worked(failure):
                    raise
            time.sleep(AZURE_POLL_S)

    def _receive_of_session(
        self,
        job: AzureJob,
        session: c.SessionLock,
        use: Callable[[AzureLink], list[BrokeredMessage]],
    ) -> pa.RecordBatch:
        """Receive on the link that has locked the session.

        That link always locks messages. For RECEIVE_AND_DELETE they are completed at once.
        """
        found = delivery_batch(self._sessions.use(session, use))
        if job.command.mode is c.ReceiveMode.PEEK_LOCK or not found.num_rows:
            return found
        tokens = found.column("lock_token")
        complete = c.Settle(job.command.path, tokens, c.Disposition.COMPLETE)
        self._settle(AzureJob(complete, AZURE_REQUEST_S))
        names = ("lock_token", "locked_until_utc")
        for name in names:
            at = found.schema.get_field_index(name)
            field = found.schema.field(at)
            found = found.set_column(at, field, pa.nulls(found.num_rows, field.type))
        return found

    def _receive_deferred(self, job: AzureJob) -> pa.RecordBatch:
        command: c.ReceiveDeferred = job.command

        def use(link: AzureLink) -> list[BrokeredMessage]:
            return receive_deferred(link, command, job.left_s)

        if command.session is not None:
            return delivery_batch(self._sessions.use(command.session, use))
        return delivery_batch(self._with_link(job, _manages(command.path), use))

    def _peek(self, job: AzureJob) -> pa.RecordBatch:
        command: c.Peek = job.command
        found = self._with_link(
            job, _manages(command.path), lambda link: peek(link, command, job.left_s)
        )
        return delivery_batch(found)

    def _delete_messages(self, job: AzureJob) -> int:
        command: c.DeleteMessages = job.command

        def use(link: AzureLink) -> int:
            return delete_messages(link, command, job.left_s)

        if command.session is not None:
            return self._sessions.use(command.session, use)
        return self._with_link(job, _manages(command.path), use)

    def _list_sessions(self, job: AzureJob) -> list[str]:
        command: c.ListSessions = job.command
        return self._with_link(
            job, _manages(command.path), lambda link: list_sessions(link, command, job.left_s)
        )

    def _settle(self, job: AzureJob) -> None:
        command: c.Settle = job.command
        borrow = partial(self._borrowed, command.path, job.left_s)
        settle(command, self._locks, borrow, self._clock, job.left_s)

    def _renew_locks(self, job: AzureJob) -> Any:
        command: c.RenewLocks = job.command
        tokens = [UUID(bytes=token) for token in command.lock_tokens.to_pylist()]
        by_link = self._locks.links(command.path, tokens)
        known = {token for found in by_link.values() for token in found}
        ends = [self._renew_on(link, found, job.left_s) for link, found in by_link.items()]
        unknown = [token for token in tokens if token not in known]
        if unknown:
            with self._borrowed(command.path, job.left_s) as link:
                ends.append(renew(link, unknown, job.left_s))
        until = min(ends)
        self._locks.prolong(tokens, until)
        return until

    def _renew_on(self, link: AzureLink, tokens: list[UUID], timeout_s: float) -> Any:
        """Renew locks on the link that delivered the messages, which another thread may use."""
        try:
            return renew(link, tokens, timeout_s)
        except Exception as failure:
            if mapped(failure).is_silent:
                link.suspect()
            raise

    # -- sessions ------------------------------------------------------------------------------

    def _accept_session(self, job: AzureJob) -> c.SessionGrant:
        return self._sessions.accept(job, lambda: job.is_abandoned or self._is_closed)

    def _release_session(self, job: AzureJob) -> None:
        self._sessions.use(job.command.session, lambda _: None)
        self._sessions.release(job.command.session)

    def _renew_session(self, job: AzureJob) -> Any:
        return self._sessions.on_session(
            job.command.session, lambda session: session.renew_lock(timeout=job.left_s)
        )

    def _get_state(self, job: AzureJob) -> bytes | None:
        state = self._sessions.on_session(
            job.command.session, lambda session: session.get_state(timeout=job.left_s)
        )
        return None if state is None else bytes(state)

    def _set_state(self, job: AzureJob) -> None:
        state = job.command.state
        self._sessions.on_session(
            job.command.session, lambda session: session.set_state(state, timeout=job.left_s)
        )

    # -- the end -------------------------------------------------------------------------------

    def _start_sweeper(self) -> None:
        """Start the thread that closes idle links; under the lock."""
        if self._sweeper is None:
            self._sweeper = threading.Thread(
                target=self._sweep, name="twinbus-azure-sweep", daemon=True
            )
            self._sweeper.start()

    def _sweep(self) -> None:
        while not self._sweep_now.wait(AZURE_SWEEP_S):
            self._links.sweep()

    def close(self) -> None:
        """Finish running commands, withdraw waiting ones, and close all links."""
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
            job.answer(None, NamespaceClosedError(NAMESPACE_CLOSED))
            job.is_abandoned = True
        idle = [*self._links.close(), *self._sessions.close()]
        ended = [threading.Event() for _ in idle]
        for link, event in zip(idle, ended, strict=True):
            self._closers.submit(partial(_close, link, event))
        for event in ended:
            event.wait(max(deadline - time.monotonic(), 0))
        self._administration.close()


def _close(link: AzureLink, ended: threading.Event) -> None:
    link.close()
    ended.set()


def _check_path(command: c.Command[Any]) -> None:
    """Refuse a path that the SDK would change into another one."""
    path = getattr(command, "path", None)
    if path is not None and (not path or path != path.strip("/") or set(path) & set("?#\\")):
        raise EntityNotFoundError(f"there is no entity {path!r:.60}; check the path", path=path)


def _has_worked(failure: BaseException) -> bool:
    """Return whether an open link has ended, so that a receive can continue on a new link."""
    return mapped(failure).is_stale and isinstance(failure, AMQPException)


def _time_for(command: c.Command[Any]) -> float:
    """Return the time limit of a command whose caller sets none."""
    if type(command) is c.Send:
        return TRY_TIMEOUT.total_seconds()
    wait = getattr(command, "wait", None)
    return AZURE_REQUEST_S + (wait.total_seconds() if wait else 0.0)


def _sends_to(path: str) -> LinkKey:
    return LinkKey(path, LinkPurpose.SEND)


def _manages(path: str) -> LinkKey:
    return LinkKey(path, LinkPurpose.MANAGE)


def _receives(command: c.Receive) -> LinkKey:
    is_locking = command.mode is c.ReceiveMode.PEEK_LOCK
    return LinkKey(command.path, LinkPurpose.LOCK if is_locking else LinkPurpose.DELETE)


_HANDLERS: dict[type, Callable[[AzureNamespace, AzureJob], Any]] = {
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


def _is_partly_sent(failure: BaseException) -> bool:
    """Whether the service has accepted some messages of a send that failed."""
    return isinstance(failure, MessagingError) and bool(accepted_in(failure))


def _cause_of(failure: BaseException) -> BaseException:
    """Return the SDK's own failure, which says more about the link than our error."""
    return failure.__cause__ or failure if _is_partly_sent(failure) else failure
