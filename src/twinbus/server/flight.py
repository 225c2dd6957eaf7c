"""The Flight door: carries the commands of many connections into one namespace.

A connection is one exchange (namespace/wire.py has the frames). The thread that reads a frame hands
its commands over and, when the turn is free, takes it: then it writes the replies itself. A reply
that becomes ready in another thread's turn is left in the outbox and written by the connection's
own writer, so that a client that does not read holds up nobody else.

Nothing is read before the token in the call's header was found good.
"""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
from pyarrow import flight

from twinbus.broker.access import OWNER, Admission, Principal, is_key_name
from twinbus.broker.commands import (
    WAITING,
    Command,
    Peek,
    ReadRange,
    Receive,
    ReceiveDeferred,
    undo_of,
)
from twinbus.clock import Clock
from twinbus.connection import Token
from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    MessagingError,
    NamespaceClosedError,
    ServerBusyError,
    UnauthorizedError,
)
from twinbus.limits import (
    GRACE_S,
    LOG_INTERVAL_US,
    LOGGED_KEY_NAMES,
    MAX_BATCH_BYTES,
    MAX_CONNECTIONS,
    MAX_FRAME_ASKS,
    MAX_FRAME_BYTES,
    SERVER_BUSY_RETRY_S,
)
from twinbus.loglines import LineRate, facts
from twinbus.message import DELIVERY_SCHEMA, MESSAGE_SCHEMA
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.namespace.wire import (
    HANG_UP,
    NAMESPACE_ID,
    PROTOCOL,
    Reply,
    decode_asks,
    encode_replies,
)
from twinbus.server.latencies import Latencies

_log = logging.getLogger("twinbus.server")


class _Request:
    """A command of a connection. Answered within a turn, by whoever has it."""

    __slots__ = ("_connection", "command", "number", "principal", "read_at")

    def __init__(
        self,
        connection: "_Connection",
        number: int,
        command: Command[Any],
        read_at: int,
        principal: Principal = OWNER,
    ) -> None:
        self._connection = connection
        self.read_at = read_at  # a moment of the clock
        self.number = number
        self.command = command
        self.principal = principal

    def answer(self, value: Any) -> None:
        self._connection.put(self, value)

    def fail(self, error: MessagingError) -> None:
        self._connection.put(self, error)


class _Orphan:
    """A command nobody waits for."""

    principal = OWNER

    def __init__(self, command: Command[Any]) -> None:
        self.command = command

    def answer(self, value: Any) -> None:
        """Nobody waits."""

    def fail(self, error: MessagingError) -> None:
        _log.debug("locks of a lost connection could not be released: %s", error)


class _Connection:
    """One client's exchange."""

    def __init__(self, door: "FlightDoor", admission: Admission, reader: Any, writer: Any) -> None:
        self._door = door
        self._namespace = door.namespace
        self._now_us = door.clock.now_us
        self.latencies = Latencies()  # changed under the lock
        self._admission = admission
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._outbox: deque[tuple[_Request, Any]] = deque()
        self._open: set[_Request] = set()  # not answered yet
        self._answered = threading.Condition(self._lock)
        self._pen = threading.Lock()
        self._gone = False  # the client; what is answered now is given back
        self._has_begun = False
        self._ended = False
        self._thread = threading.get_ident()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._helper: threading.Thread | None = None

    def run(self) -> None:
        """Serve the client until it hangs up."""
        try:
            self._begin()
            _check_schema(self._reader.schema)
            while self._take(self._reader.read_chunk()):
                pass
            self._finish()
        except StopIteration:
            self._finish()
        except MessagingError as error:  # what arrived makes no sense: nothing after it can
            raise _refused(error) from error
        except (pa.ArrowException, OSError) as error:
            _log.debug("a connection broke: %s", str(error).partition(". gRPC")[0])
        except Exception as error:
            _log.exception("a connection failed")
            raise _refused(MessagingError("the server failed; its log says why")) from error
        finally:
            self._leave()

    def _begin(self) -> None:
        with self._pen:
            self._writer.begin(DELIVERY_SCHEMA)
            self._has_begun = True
        if self._door.is_stopping:  # it may have tried to say so before there was a way to
            raise _stopping()

    def _take(self, chunk: Any) -> bool:
        """Do what a frame asks; say whether more will come."""
        read_at = self._now_us()
        frame = decode_asks(chunk.app_metadata, _checked(chunk.data))
        if frame.token is not None:
            self._admission = self._door.admit(frame.token)
        if not frame.asks and not frame.bye:
            with self._pen:
                self._write([])
        requests: list[_Request] = []
        for ask in frame.asks:
            command = ask.command
            if isinstance(command, MessagingError):
                self.put(_Request(self, ask.number, _NOTHING, read_at), command)
                continue
            try:
                self._admission = self._door.recheck(self._admission)
                self._admission.check(command)
            except MessagingError as error:
                if isinstance(error, UnauthorizedError):
                    self._door.note_refused_key(self._admission.key.name, error.text)
                self.put(_Request(self, ask.number, command, read_at), error)
                continue
            requests.append(_Request(self, ask.number, command, read_at, self._admission))
            if _fetches_now(command):  # one large reply after the other: a frame of them could
                self._hand_over(requests)  # fill the memory while the client does not read
                self._await_answer(requests[-1])
                requests = []
        self._hand_over(requests)
        return not frame.bye

    def _hand_over(self, requests: list[_Request]) -> None:
        with self._lock:
            self._open.update(requests)
        self._namespace.hand_over(requests)
        self._flush()

    def _await_answer(self, request: _Request) -> None:
        with self._lock:
            self._answered.wait_for(lambda: request not in self._open)
        self._flush()

    # -- replies -------------------------------------------------------------------------------

    def put(self, request: _Request, value: Any) -> None:
        """Leave a reply for the client, or undo it when the client is gone."""
        with self._lock:
            self._open.discard(request)
            self._answered.notify_all()
            if not self._gone:
                self._outbox.append((request, value))
                if request.command is not _NOTHING:
                    self.latencies.observe(request.command, self._now_us() - request.read_at)
        if self._gone:
            self._give_back(request, value)
        elif threading.get_ident() != self._thread:
            self._wake_helper()

    def _wake_helper(self) -> None:
        if self._helper is None:
            with self._lock:
                if self._helper is None:
                    self._helper = threading.Thread(target=self._help, daemon=True)
                    self._helper.start()
        self._wake.put(True)

    def _help(self) -> None:
        """Be the thread that writes what became ready elsewhere."""
        while self._wake.get():
            self._flush()

    def _flush(self) -> None:
        """Write what is in the outbox."""
        while self._outbox:
            with self._pen:
                taken: list[tuple[_Request, Any]] = []
                size = 0
                with suppress(IndexError):
                    while size < MAX_BATCH_BYTES and len(taken) < MAX_FRAME_ASKS:
                        taken.append(self._outbox.popleft())
                        value = taken[-1][1]
                        if isinstance(value, pa.RecordBatch):
                            size += value.get_total_buffer_size()
                if taken and not self._write(taken):
                    return

    def _write(self, taken: list[tuple[_Request, Any]]) -> bool:
        """Write one frame; what does not reach the client is given back."""
        frame = encode_replies([Reply(r.number, self._door.told(value)) for r, value in taken])
        try:
            if frame.batch is None:
                self._writer.write_metadata(frame.metadata)
            else:
                self._writer.write_with_metadata(frame.batch, frame.metadata)
        except (pa.ArrowException, OSError):
            for request, value in taken:
                self._give_back(request, value)
            return False
        return True

    def _give_back(self, request: _Request, value: Any) -> None:
        """Unlock what was locked for a client that never heard of it."""
        undo = undo_of(request.command, value)
        if undo is not None:
            self._namespace.hand_over([_Orphan(undo)])

    # -- the end -------------------------------------------------------------------------------

    def hang_up(self, reason: MessagingError) -> None:
        """Tell the client that this is the end; it hangs up then."""
        frame = encode_replies([Reply(HANG_UP, reason)])
        with self._pen, suppress(pa.ArrowException, OSError):
            if self._has_begun and not self._ended:
                self._writer.write_metadata(frame.metadata)

    def _withdraw(self) -> None:
        with self._lock:
            waiting = [r for r in self._open if isinstance(r.command, WAITING)]
        self._namespace.withdraw(waiting)
        with self._lock:
            self._open.difference_update(waiting)

    def _finish(self) -> None:
        """Answer what the client still has in flight; those who wait for messages go."""
        self._withdraw()
        with self._lock:
            self._answered.wait_for(lambda: not self._open, timeout=GRACE_S)
        self._flush()

    def _leave(self) -> None:
        with self._lock:
            self._gone = True
        self._withdraw()
        if self._helper is not None:
            self._wake.put(False)
            self._helper.join()
        while self._outbox:
            self._give_back(*self._outbox.popleft())
        with self._pen:  # the writer is gone with the call: nobody may touch it any more
            self._ended = True
        _give_memory_back()


def _give_memory_back() -> None:
    """Return what large frames took to the system; allocators would keep it for the next ones."""
    pa.default_memory_pool().release_unused()
    if _trim_heap is not None:
        _trim_heap(0)


_trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
_NOTHING: Command[Any] = Command()


def _fetches_now(command: Command[Any]) -> bool:
    """Whether a command is answered with messages, and without waiting for them."""
    if isinstance(command, Receive):
        return not command.wait
    return isinstance(command, ReceiveDeferred | Peek | ReadRange)


def _check_schema(schema: pa.Schema) -> None:
    if schema != MESSAGE_SCHEMA:
        raise InvalidArgumentError("the exchange does not have the schema of messages")


def _checked(batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
    """Refuse bytes that only look like a batch: reading them could crash the server."""
    if batch is None:
        return None
    size = batch.get_total_buffer_size()
    if size > MAX_FRAME_BYTES:
        raise InvalidArgumentError(
            f"a frame of {size} bytes is too large; a batch may have {MAX_BATCH_BYTES}"
        )
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidArgumentError(f"a frame holds a damaged batch: {error}") from error
    return batch


class _Headers(flight.ServerMiddleware):  # type: ignore[misc]
    """What a call brought along: the admission of its token."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission


class _Guard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Checks the token, and which namespace is meant, before anything else of a call is read."""

    def __init__(
        self,
        namespace_id: str,
        admit: Callable[[str], Admission],
        note_refused_key: Callable[[str, str], None],
    ) -> None:
        self._namespace_id = namespace_id
        self._admit = admit
        self._note_refused_key = note_refused_key

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> _Headers:  # noqa: ARG002
        """Admit or refuse a call."""
        tokens = headers.get("authorization", [])
        if len(tokens) != 1 or not isinstance(tokens[0], str):
            self._note_refused_key("(no token)", "the call brings no token")
            raise flight.FlightUnauthenticatedError(
                "the call brings no token; give SharedAccessKeyName and SharedAccessKey in the "
                "connection string"
            )
        try:
            admission = self._admit(tokens[0])
        except UnauthorizedError as error:
            raise flight.FlightUnauthenticatedError(error.text) from error
        meant = headers.get(NAMESPACE_ID, [self._namespace_id])[0]
        if meant != self._namespace_id:
            raise flight.FlightUnauthenticatedError(
                f"the connection string means the namespace with the id {meant}, and this server "
                f"has the one with the id {self._namespace_id}. Correct the Endpoint or NamespaceId"
            )
        return _Headers(admission)


class FlightDoor(flight.FlightServerBase):  # type: ignore[misc]
    """Serves a namespace at an address until it is closed."""

    def __init__(
        self,
        namespace: EmbeddedNamespace,
        clock: Clock,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[bytes, bytes] | None = None,  # certificate and key, PEM
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.namespace = namespace
        self.clock = clock
        self.max_connections = max_connections
        self._ended_latencies = Latencies()  # of connections that have ended
        self._refused_keys = LineRate(LOG_INTERVAL_US, LOGGED_KEY_NAMES)
        self._refused_connections = LineRate(LOG_INTERVAL_US)
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self.accepted = 0  # connections since the start
        self.refused = 0
        scheme = "grpc+tls" if tls else "grpc+tcp"
        at = f"[{host}]" if ":" in host else host
        super().__init__(
            f"{scheme}://{at}:{port}",
            tls_certificates=[tls] if tls else None,
            middleware={"guard": _Guard(namespace.id, self.admit, self.note_refused_key)},
        )

    def admit(self, token: str) -> Admission:
        """Check a token."""
        try:
            return self.namespace.keys.admit(token, self.clock.wall_us())
        except UnauthorizedError as error:
            self.refused += 1
            self.note_refused_key(_presented_name(token), error.text)
            raise

    def note_refused_key(self, name: str, reason: str) -> None:
        """Log that a key or token was refused; one line per name and LOG_INTERVAL_US."""
        suppressed = self._refused_keys.admit(name, self.clock.now_us())
        if suppressed is not None:
            _log.warning(
                "A request with key %s was refused: %s. %d earlier refusals of this key were not "
                "logged",
                name,
                reason,
                suppressed,
                extra=facts(event="refused_key", key=name, reason=reason, suppressed=suppressed),
            )

    def latencies(self) -> Latencies:
        """Return how long the requests of all connections took."""
        found = Latencies()
        with self._lock:
            found.add(self._ended_latencies)
            for connection in self._connections:
                found.add(connection.latencies)
        return found

    def recheck(self, admission: Admission) -> Admission:
        """Check that an admission still holds."""
        return self.namespace.keys.recheck(admission, self.clock.wall_us())

    def told(self, value: Any) -> Any:
        """Return a reply as clients shall see it: that this server stops is not their fault."""
        if isinstance(value, NamespaceClosedError):
            return _stopping()
        return value

    @property
    def is_stopping(self) -> bool:
        """Whether it takes no more connections."""
        return self._stopping

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Serve one connection."""
        admission = context.get_middleware("guard").admission
        connection = _Connection(self, admission, reader, writer)
        with self._lock:
            refusal = self._refusal(descriptor)
            if refusal is None:
                self._connections.add(connection)
                self.accepted += 1
        if refusal is not None:
            self.refused += 1
            self._note_refused_connection(refusal)
            raise _refused(refusal)
        _log.debug("a connection of key %s begins", admission.key.name)
        try:
            connection.run()
        finally:
            _log.debug("a connection of key %s ends", admission.key.name)
            with self._lock:
                self._connections.discard(connection)
                self._ended_latencies.add(connection.latencies)

    def _note_refused_connection(self, refusal: MessagingError) -> None:
        suppressed = self._refused_connections.admit("", self.clock.now_us())
        if suppressed is not None:
            _log.warning(
                "A connection was refused: %s. %d earlier refusals were not logged",
                refusal.text,
                suppressed,
                extra=facts(event="refused_connection", reason=refusal.text, suppressed=suppressed),
            )

    def _refusal(self, descriptor: Any) -> MessagingError | None:
        if descriptor.command != PROTOCOL:
            return InvalidArgumentError(f"this server speaks {PROTOCOL.decode()} and nothing else")
        if self._stopping:
            return _stopping()
        if len(self._connections) >= self.max_connections:
            return ServerBusyError(
                f"the server has {self.max_connections} connections and takes no more; wait "
                f"{SERVER_BUSY_RETRY_S} s",
                retry_after_s=SERVER_BUSY_RETRY_S,
            )
        return None

    def close(self) -> None:
        """Take no more, let every client know, and stop; the namespace stays open."""
        with self._lock:
            self._stopping = True
            connections = list(self._connections)
        for connection in connections:
            threading.Thread(
                target=connection.hang_up, args=[_stopping()], daemon=True
            ).start()  # one that does not read must not hold up the others
        stopper = threading.Thread(target=self.shutdown, daemon=True)
        stopper.start()
        stopper.join(GRACE_S)  # a client that does not hang up is left to the end of the process


def _presented_name(token: str) -> str:
    """Return the key name of a refused token for the log.

    A text that cannot be the name of a key is not shown: it may be a secret in the wrong place.
    """
    try:
        name = Token.parse(token).key_name
    except UnauthorizedError:
        return "(malformed token)"
    return name if is_key_name(name) else "(not a key name)"


def _refused(error: MessagingError) -> flight.FlightUnavailableError:
    """Return what ends a call and tells the client why."""
    told = encode_replies([Reply(HANG_UP, error)]).metadata
    return flight.FlightUnavailableError(error.text, extra_info=told)


def _stopping() -> CommunicationError:
    return CommunicationError("the server is stopping; try again when it is back")
