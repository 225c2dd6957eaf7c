"""A namespace on a server, over Arrow Flight.

One exchange carries everything, many commands in flight (wire.py has the frames). It is opened when
first needed, and anew after it broke. Two threads serve it: one reads replies, the other opens the
exchange and writes for those who do not wait. A caller that waits writes its command itself when
nobody else is writing, which saves a thread switch. Few frames are under way at once: what comes
meanwhile goes into the next one together, so that many callers share a sync of the server.
"""

import atexit
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import pyarrow as pa
from pyarrow import flight

from twinbus.broker.commands import Command, size_of, undo_of
from twinbus.broker.writer import Call
from twinbus.clock import Clock, SystemClock
from twinbus.connection import ConnectionString, token_for
from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
    UnauthorizedError,
)
from twinbus.lifetimes import Closable
from twinbus.limits import (
    FRAMES_IN_FLIGHT,
    GRACE_S,
    MAX_BATCH_BYTES,
    MAX_CLOSE_WAIT,
    MAX_FRAME_ASKS,
    QUIET_S,
    SECOND_US,
    TOKEN_LIFE,
    TOKEN_RENEWAL,
    WRITE_CHECK_S,
)
from twinbus.message import MESSAGE_SCHEMA
from twinbus.namespace.wire import (
    HANG_UP,
    NAMESPACE_ID,
    PROTOCOL,
    Frame,
    decode_replies,
    encode_asks,
    with_columns,
)
from twinbus.wakeup import Inbox

R = TypeVar("R")
_log = logging.getLogger("twinbus.client")
_CONNECT_S = 20.0  # how long gRPC tries to connect
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, and no back-off of others
    ("grpc.enable_http_proxy", 0),
]


class _Asker(Protocol):
    def answer(self, value: Any) -> None: ...
    def fail(self, error: MessagingError) -> None: ...


class _Promise:
    """An asker that does not wait."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # what was handed over cannot be taken back

    def answer(self, value: Any) -> None:
        self.future.set_result(value)

    def fail(self, error: MessagingError) -> None:
        self.future.set_exception(error)


class FlightNamespace(Closable):
    """Reaches a Twinbus server; nothing is opened before the first command."""

    def __init__(self, connection: ConnectionString, clock: Clock | None = None) -> None:
        self._connection = connection
        self._credentials = Credentials(connection, clock or SystemClock())
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._closed = False

    @property
    def id(self) -> str:
        """The unique id of the namespace, if the connection string has it."""
        return self._connection.namespace_id

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over; never blocks, never raises."""
        promise = _Promise()
        try:
            self._current().post(with_columns(command), promise)
        except MessagingError as error:
            promise.fail(error)
        return promise.future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Hand a command over and wait for its reply, or raise its error."""
        command = with_columns(command)
        call = Call(command)
        link = self._current(timeout_s)
        link.check_may_wait()
        number = link.post(command, call, QUIET_S if timeout_s is None else timeout_s)
        return link.wait(number, call, timeout_s)  # type: ignore[no-any-return]

    def _current(self, timeout_s: float | None = None) -> "_Link":
        link = self._link
        if link is not None and link.broken is None:
            return link
        with self._lock:
            if self._closed:
                raise NamespaceClosedError("the namespace was closed")
            if self._link is None or self._link.broken is not None:
                self._link = _Link(self._connection, self._credentials, timeout_s)
            return self._link

    def close(self) -> None:
        """Finish what was handed over and hang up."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()


class Credentials:
    """Signs tokens, and signs new ones before the old expire."""

    def __init__(self, connection: ConnectionString, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._renew_at = 0

    def token(self) -> str:
        """Return a token that is good for a while."""
        connection = self._connection
        if not connection.key:
            self._renew_at = 2**63
            return connection.token
        life = int(TOKEN_LIFE.total_seconds())
        self._renew_at = self._clock.now_us() + int(life * (1 - TOKEN_RENEWAL)) * SECOND_US
        return token_for(connection, self._clock.wall_us() // SECOND_US + life)

    def renewed(self) -> str | None:
        """Return a new token when it is time for one."""
        return self.token() if self._clock.now_us() >= self._renew_at else None


class _Undo:
    """An asker that gave up waiting: it gives back what comes all the same."""

    def __init__(self, link: "_Link", command: Command[Any]) -> None:
        self._link = link
        self._command = command

    def answer(self, value: Any) -> None:
        undo = undo_of(self._command, value)
        if undo is not None:
            self._link.post(undo, _Promise())

    def fail(self, error: MessagingError) -> None:
        """Nobody waits."""


class _Frame:
    """Asks that went together and are answered at once."""

    __slots__ = ("unanswered",)

    def __init__(self, unanswered: int) -> None:
        self.unanswered = unanswered


class _Nudge(Enum):
    """What the writer thread of a link is woken for."""

    WRITE = "write"  # something is pending
    PING = "ping"  # is the server there? A frame that asks nothing
    BYE = "bye"  # hang up


_links: "WeakSet[_Link]" = WeakSet()


@atexit.register
def _hang_up() -> None:
    """End the links nobody closed: a thread that is in Arrow when Python ends would abort it."""
    for link in list(_links):
        link.abandon(NamespaceClosedError("the process ends"))


class _Link:
    """One exchange, from opening to its end. A link that broke is not mended but replaced."""

    def __init__(
        self, connection: ConnectionString, credentials: Credentials, timeout_s: float | None
    ) -> None:
        self._connection = connection
        self._credentials = credentials
        self._timeout_s = timeout_s  # of the operation that opens it; None: gRPC's default
        self._numbers = itertools.count(HANG_UP + 1)
        self._askers: dict[int, _Asker] = {}
        self._pending: deque[tuple[int, Command[Any]]] = deque()
        self._frames: dict[int, _Frame] = {}  # of asks that are answered at once, by number
        self._in_flight: set[_Frame] = set()  # those not answered whole
        self._pen = threading.Lock()  # whoever holds it writes
        self._write_due: tuple[float, float] | None = (
            None  # until when a caller writes, of how long
        )
        self._nudges: Inbox[_Nudge] = Inbox()  # for the writer thread
        self._reader: Any = None
        self._writer: Any = None
        self._heard_at = self._asked_at = time.monotonic()  # asked: since when somebody waits
        self._pinged_at = 0.0
        self.broken: MessagingError | None = None
        self._closed: NamespaceClosedError | None = None  # what everyone is told after `close`
        self._ended = threading.Event()
        self._pen.acquire()  # until it is open
        where = f"{connection.host}:{connection.port}"
        self._threads = [
            threading.Thread(target=work, name=f"twinbus-{what}-{where}", daemon=True)
            for what, work in (("writer", self._write), ("reader", self._read))
        ]
        self._threads[0].start()
        _links.add(self)

    # -- asking --------------------------------------------------------------------------------

    def post(self, command: Command[Any], asker: _Asker, own_hand_s: float | None = None) -> int:
        """Send a command; a caller that waits anyway writes it itself, if it takes no longer."""
        number = next(self._numbers)
        if not self._askers:
            self._asked_at = time.monotonic()
        self._askers[number] = asker
        self._pending.append((number, command))
        if self.broken is not None:  # looked at last, so that nobody slips in behind `_end`
            self._fail(number, self.broken)
        elif not self._has_room():
            pass  # whoever reads the answer that makes room sees to it
        elif own_hand_s is not None and self._pen.acquire(blocking=False):
            self._write_due = (time.monotonic() + own_hand_s, own_hand_s)
            try:
                self._write_pending()
            finally:
                self._write_due = None
                self._pen.release()
                if self._pending and self._has_room():
                    self._nudges.put(_Nudge.WRITE)
        else:
            self._nudges.put(_Nudge.WRITE)
        return number

    def check_may_wait(self) -> None:
        """Refuse to wait in the thread that everybody waits for."""
        if threading.current_thread() is self._threads[1]:
            raise InvalidOperationError("what is called back must not wait for another reply")

    def wait(self, number: int, call: Call, timeout_s: float | None) -> Any:
        """Wait for a reply, and make sure meanwhile that the server is there."""
        began = time.monotonic()
        while True:
            left = QUIET_S if timeout_s is None else began + timeout_s - time.monotonic()
            try:
                return call.result(min(left, QUIET_S))
            except OperationTimeoutError:
                if call.done:
                    raise  # it is the reply
                now = time.monotonic()
                quiet_s = now - max(self._heard_at, began)
                if timeout_s is not None and now - began >= timeout_s:
                    self._askers[number] = _Undo(self, call.command)
                    if quiet_s >= timeout_s:
                        self._end(_unanswered(timeout_s))
                    raise _unanswered(timeout_s) from None
                if quiet_s >= 2 * QUIET_S:
                    self._end(_unanswered(quiet_s))
                elif quiet_s >= QUIET_S:
                    self._nudges.put(_Nudge.PING)

    def _has_room(self) -> bool:
        """Whether another frame may go."""
        return len(self._in_flight) < FRAMES_IN_FLIGHT

    def _fail(self, number: int, error: MessagingError) -> None:
        asker = self._askers.pop(number, None)
        if asker is not None:
            asker.fail(error)

    # -- writing -------------------------------------------------------------------------------

    def _write(self) -> None:
        """Be the thread that opens the exchange and writes for those who do not wait."""
        try:
            self._open()
        except (pa.ArrowException, OSError, MessagingError) as error:
            self._end(_told(error))
            self._pen.release()
            return
        self._threads[1].start()
        with suppress(pa.ArrowException, OSError):  # the reader learns why
            self._writer.begin(MESSAGE_SCHEMA)
        try:
            self._write_pending()
        finally:
            self._pen.release()
        while (nudge := self._next_nudge()) is not _Nudge.BYE:
            with self._patient_pen():
                self._write_pending(even_if_empty=nudge is _Nudge.PING)
        with self._patient_pen():  # half-closing would race with the reader inside Arrow
            self._write_pending(even_if_empty=True, bye=True)

    def _next_nudge(self) -> "_Nudge":
        """Wait for something to do."""
        while True:
            nudge = self._nudges.get(WRITE_CHECK_S)
            if nudge is not None:
                return nudge
            self._check_write()
            self._check_answers()

    @contextmanager
    def _patient_pen(self) -> Iterator[None]:
        """Take the pen when it is free."""
        while not self._pen.acquire(timeout=WRITE_CHECK_S):
            self._check_write()
        try:
            yield
        finally:
            self._pen.release()

    def _check_write(self) -> None:
        """End the link if a caller's own write takes longer than it would wait."""
        due = self._write_due
        if due is not None and time.monotonic() > due[0]:
            self._end(_unanswered(due[1]))

    def _check_answers(self) -> None:
        """Ask a silent server whether it is there, and end the link if it is not.

        Those who submitted do not look themselves, and may wait for hours.
        """
        if not self._askers:
            return
        now, since = time.monotonic(), max(self._heard_at, self._asked_at)
        if self._pinged_at < since:
            if now - since >= QUIET_S:
                self._pinged_at = now
                self._nudges.put(_Nudge.PING)
        elif now - self._pinged_at >= QUIET_S:
            self._end(_unanswered(now - since))

    def _open(self) -> None:
        connection = self._connection
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        scheme = "grpc+tls" if connection.tls else "grpc+tcp"
        options: dict[str, Any] = {"generic_options": [*_CHANNEL, *self._connect_within()]}
        if connection.tls:
            if connection.ca_file is not None:
                options["tls_root_certs"] = _read_file(connection.ca_file)
            if connection.tls_host_name:
                options["override_hostname"] = connection.tls_host_name
        self._client = flight.FlightClient(f"{scheme}://{host}:{connection.port}", **options)
        token = self._credentials.token()
        headers = [(b"authorization", token.encode())] if token else []
        if connection.namespace_id:
            headers.append((NAMESPACE_ID.encode(), connection.namespace_id.encode()))
        self._writer, self._reader = self._client.do_exchange(
            flight.FlightDescriptor.for_command(PROTOCOL),
            flight.FlightCallOptions(headers=headers),
        )

    def _connect_within(self) -> list[tuple[str, int]]:
        """Return the channel options that end an attempt to connect soon after the operation.

        Nothing else can end it: the writer thread would stay in Arrow, and closing the namespace
        would wait for that thread.
        """
        if self._timeout_s is None or self._timeout_s >= _CONNECT_S:
            return []
        patience_ms = int((self._timeout_s + WRITE_CHECK_S) * 1000)
        names = ("grpc.min_reconnect_backoff_ms", "grpc.initial_reconnect_backoff_ms")
        return [(name, patience_ms) for name in names]

    def _write_pending(self, *, even_if_empty: bool = False, bye: bool = False) -> None:
        """Write what waits, with the pen in hand."""
        if self.broken is not None:
            return
        try:
            while even_if_empty or (self._pending and (bye or self._has_room())):
                even_if_empty = False
                group = self._next_group()
                last = bye and not self._pending
                frame = self._encode(group, bye=last)
                if frame.batch is None:
                    self._writer.write_metadata(frame.metadata)
                else:
                    self._writer.write_with_metadata(frame.batch, frame.metadata)
        except (pa.ArrowException, OSError, StopIteration) as error:
            _log.debug("a frame was not written; the reader learns why: %s", error)

    def _encode(self, group: list[tuple[int, Command[Any]]], *, bye: bool) -> Frame:
        """Return a frame of those that can be sent; the others are told why not."""
        token = self._credentials.renewed()
        try:
            frame = encode_asks(group, token, bye=bye)
        except MessagingError:
            fit = [ask for ask in group if self._can_be_sent(*ask)]
            frame, group = encode_asks(fit, token, bye=bye), fit
        self._note(group)
        return frame

    def _can_be_sent(self, number: int, command: Command[Any]) -> bool:
        try:
            encode_asks([(number, command)])
        except MessagingError as error:
            self._fail(number, error)
            return False
        return True

    def _note(self, group: list[tuple[int, Command[Any]]]) -> None:
        """Remember which asks of a frame will be answered at once."""
        numbers = [number for number, command in group if not getattr(command, "wait", None)]
        if numbers:
            frame = _Frame(len(numbers))
            self._frames.update(dict.fromkeys(numbers, frame))
            self._in_flight.add(frame)

    def _next_group(self) -> list[tuple[int, Command[Any]]]:
        group: list[tuple[int, Command[Any]]] = []
        size = 0
        while self._pending and len(group) < MAX_FRAME_ASKS:
            size += size_of(self._pending[0][1])
            if group and size > MAX_BATCH_BYTES:
                break
            group.append(self._pending.popleft())
        return group

    # -- reading -------------------------------------------------------------------------------

    def _read(self) -> None:
        """Be the thread that reads replies, until the end."""
        error: MessagingError = CommunicationError("the server ended the connection; try again")
        try:
            while True:
                chunk = self._reader.read_chunk()
                self._heard_at = time.monotonic()
                for reply in decode_replies(chunk.app_metadata, chunk.data):
                    if reply.number == HANG_UP:
                        error = reply.value
                        return
                    self._tick_off(reply.number)
                    asker = self._askers.pop(reply.number, None)
                    if asker is None:
                        continue  # it gave up waiting
                    if isinstance(reply.value, MessagingError):
                        asker.fail(reply.value)
                    else:
                        asker.answer(reply.value)
        except StopIteration:
            pass
        except (pa.ArrowException, OSError, MessagingError) as trouble:
            error = _told(trouble)
        finally:
            self._end(error)
            self._let_go()

    def _tick_off(self, number: int) -> None:
        """Note an answer; when all of a frame are there, the next one may go."""
        frame = self._frames.pop(number, None)
        if frame is None:
            return
        frame.unanswered -= 1
        if not frame.unanswered:
            self._in_flight.discard(frame)
            if self._pending:  # looked at last: what comes later sees that there is room
                self._nudges.put(_Nudge.WRITE)

    def _end(self, error: MessagingError) -> None:
        """Fail everyone who waits, once."""
        if self.broken is None:
            self.broken = self._closed or error
        with suppress(pa.ArrowException, OSError):
            if self._reader is not None:
                self._reader.cancel()
        for number in list(self._askers):
            self._fail(number, self.broken)
        self._nudges.put(_Nudge.BYE)
        self._ended.set()

    def _let_go(self) -> None:
        """Close the exchange when nobody writes or reads: else Arrow would abort the process."""
        self._threads[0].join()
        with self._pen:
            for thing in (self._writer, self._client):
                with suppress(pa.ArrowException, OSError):
                    thing.close()

    def close(self) -> None:
        """Let the server answer what it has, then hang up."""
        self._closed = NamespaceClosedError("the namespace was closed")
        self._nudges.put(_Nudge.BYE)
        patience_s = 0.0 if self.broken else MAX_CLOSE_WAIT.total_seconds() - GRACE_S
        deadline = time.monotonic() + patience_s
        if self._threads[0] is not threading.current_thread():
            self._threads[0].join(max(deadline - time.monotonic(), 0))
        self._ended.wait(max(deadline - time.monotonic(), 0))
        self.abandon(self._closed)

    def abandon(self, reason: MessagingError) -> None:
        """Fail everyone who waits, and see the threads off."""
        self._end(reason)
        is_open = self._reader is not None  # else a thread connects, which nothing can interrupt
        deadline = time.monotonic() + (GRACE_S if is_open else 2 * WRITE_CHECK_S)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        _links.discard(self)  # the process need not wait for its threads a second time


def _read_file(path: Any) -> bytes:
    try:
        return bytes(path.read_bytes())
    except OSError as error:
        raise InvalidArgumentError(f"CaFile cannot be read: {error}") from error


def _unanswered(seconds: float) -> OperationTimeoutError:
    return OperationTimeoutError(
        f"no answer within {seconds:.3g} s; whether the work was done is unknown"
    )


def _told(error: BaseException) -> MessagingError:
    """Return an error of Flight as one of ours."""
    if isinstance(error, MessagingError):
        return error
    reason = getattr(error, "extra_info", b"")
    if reason:  # the server says why it ended the call
        with suppress(MessagingError, IndexError):
            told = decode_replies(pa.py_buffer(reason), None)[0].value
            if isinstance(told, MessagingError):
                return told
    text = str(error)
    text = text.partition("with message: ")[2] or text
    text = text.partition(". gRPC client debug context")[0]
    if isinstance(error, flight.FlightUnauthenticatedError):
        return UnauthorizedError(text)
    return CommunicationError(f"the server cannot be reached or hung up: {text}")
