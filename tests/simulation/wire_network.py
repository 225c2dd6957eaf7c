"""A simulated network, and the drivers that move bytes between it and the conversations.

Everything is decided by one seeded generator and one manual clock. A pipe is one direction of a
connection: it delays bytes, cuts them into other segments than were written, stalls, and loses the
rest when the connection is cut. It never reorders. The server's driver is the real one of
server/native.py on a simulated transport; the client's driver does what namespace/server.py does.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from threading import get_ident
from typing import Any, cast
from unittest.mock import patch

from tests.inside import pending_of, unsent_bytes, unsent_reply_bytes
from twinbus.clock import ManualClock
from twinbus.errors import CommunicationError, MessagingError, NamespaceClosedError
from twinbus.limits import MAX_CONNECTIONS, SECOND_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol import client_conversation, server_conversation, server_requests, table
from twinbus.protocol.access import Admission
from twinbus.protocol.client_conversation import ClientConversation, Outcome
from twinbus.protocol.requests import Request
from twinbus.protocol.server_conversation import Phase
from twinbus.protocol.server_requests import ServerRequest
from twinbus.server import client_connection, native
from twinbus.server.attendance import Attendance, ByteShares
from twinbus.server.latencies import Latencies

MILLISECOND_US = SECOND_US // 1000
WINDOW_BYTES = 4096  # that one direction takes before its reader reads them
READ_BYTES = 2048
GOODBYE_US = 3 * SECOND_US  # how long a client waits for the server to hang up


@contextmanager
def small_limits(clock: ManualClock) -> Iterator[None]:
    """Let the conversations have limits that small messages reach, and the time of the clock."""
    with ExitStack() as stack:
        for module, name, value in (
            (server_conversation, "MAX_UNREAD_BYTES", 8192),
            (server_conversation, "MAX_UNANSWERED_BYTES", 4096),
            (server_conversation, "MAX_OPEN_REQUESTS", 24),
            (server_conversation, "QUIET_US", 2 * SECOND_US),
            (client_conversation, "QUIET_US", 2 * SECOND_US),
            (table, "MAX_MESSAGE_BYTES", 1024),
            (client_connection, "COUNTED_STEP_BYTES", 256),
            (server_conversation, "COUNTED_STEP_BYTES", 256),
            (client_connection, "WRITE_BUFFER_BYTES", 1024),
            (client_connection, "now_us", clock.now_us),
            (native, "now_us", clock.now_us),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


# -- the network -----------------------------------------------------------------------------------


class Pipe:
    """One direction of a connection."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._segments: deque[tuple[int, bytes]] = deque()  # when each arrives, in order
        self._last_arrival = 0
        self.in_flight = 0
        self.bytes_read = 0
        self.stalled_until = 0
        self.is_cut = False  # what is written now reaches nobody
        self.ends_at: int | None = None  # when the reader learns that no more will come
        self.is_reset = False  # the reader learns it as an error

    def write(self, data: bytes, now: int) -> int:
        """Take bytes as far as there is room; return how many."""
        if self.is_cut:
            return len(data)
        taken = min(len(data), WINDOW_BYTES - self.in_flight)
        at = 0
        while at < taken:
            size = self._random.choice((1, 7, 64, 500, taken, taken))
            piece = data[at : min(at + size, taken)]
            at += len(piece)
            delay = int(self._random.expovariate(1 / (20 * MILLISECOND_US)))
            if self._random.random() < 0.01:
                delay += self._random.randrange(3 * SECOND_US)
            self._last_arrival = max(self._last_arrival, now + delay)
            self._segments.append((self._last_arrival, piece))
        self.in_flight += taken
        return taken

    def read(self, now: int) -> bytes | None:
        """Return bytes that have arrived; None: none yet; no bytes: the connection has ended."""
        if now < self.stalled_until:
            return None
        most = self._random.choice((3, 50, *[READ_BYTES] * 6))
        found = bytearray()
        while self._segments and self._segments[0][0] <= now and len(found) < most:
            arrived_at, piece = self._segments.popleft()
            room = most - len(found)
            found += piece[:room]
            if len(piece) > room:
                self._segments.appendleft((arrived_at, piece[room:]))
        self.in_flight -= len(found)
        self.bytes_read += len(found)
        if found:
            return bytes(found)
        has_ended = self.ends_at is not None and self.ends_at <= now and not self._segments
        return b"" if has_ended else None

    def finish(self, now: int) -> None:
        """End in good order: the reader gets what was written, and then the end."""
        if not self.is_cut:
            self.is_cut = True
            self.ends_at = max(self._last_arrival, now)

    def cut(self, ends_at: int, *, is_reset: bool = True) -> None:
        """Lose a part of what is in flight, in mid-frame, and all that is written from now on."""
        if self.ends_at is not None and self._segments:
            return  # the end was on its way before
        flat = b"".join(piece for _, piece in self._segments)
        kept = flat[: self._random.randint(0, len(flat))]
        arrives_at = self._segments[0][0] if self._segments else 0
        self._segments = deque([(arrives_at, kept)] if kept else [])
        self.in_flight = len(kept)
        self.is_cut, self.is_reset = True, is_reset
        self.ends_at = max(ends_at, arrives_at)


class Connection:
    """Two pipes, and the faults that befall them."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.to_server = Pipe(random)
        self.to_client = Pipe(random)

    def drop(self, now: int) -> None:
        """Lose the connection; each end learns of it in its own time."""
        latest = self._random.choice((1, SECOND_US, 100 * SECOND_US))
        for pipe in (self.to_server, self.to_client):
            pipe.cut(now + self._random.randrange(latest), is_reset=self._random.random() < 0.5)

    def stall(self, now: int) -> None:
        """Deliver nothing in one direction for a while: the connection is half open."""
        pipe = self._random.choice((self.to_server, self.to_client))
        longest = self._random.choice((1, 10, 100)) * SECOND_US
        pipe.stalled_until = now + self._random.randrange(longest)

    def heal(self) -> None:
        """Deliver again."""
        self.to_server.stalled_until = self.to_client.stalled_until = 0


# -- the server's driver ---------------------------------------------------------------------------


class SimulatedTransport(asyncio.Transport):
    """Behaves as a transport of asyncio: buffers what the pipe does not take."""

    def __init__(self, connection: Connection, clock: ManualClock) -> None:
        super().__init__()
        self._pipes = connection
        self._clock = clock
        self._buffer = bytearray()
        self._high, self._low = 64 * 1024, 16 * 1024
        self._is_closing = False
        self._is_paused = False
        self._is_reading = True
        self.is_lost = False
        self.bytes_taken = 0  # of the driver
        self.protocol: ObservedConnection

    @property
    def bytes_written(self) -> int:
        """How many bytes the network has taken."""
        return self.bytes_taken - len(self._buffer)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.bytes_taken += len(data)
        self._buffer += data
        self._write_buffer()
        if len(self._buffer) > self._high and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()

    def _write_buffer(self) -> None:
        taken = self._pipes.to_client.write(bytes(self._buffer), self._clock.now_us())
        del self._buffer[:taken]

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True
        self._drop_buffer()

    def _drop_buffer(self) -> None:
        self.bytes_taken -= len(self._buffer)
        self._buffer.clear()

    def move(self) -> None:
        """Write and read what can be, as one round of the event loop does."""
        if self._buffer:
            self._write_buffer()
            if self._is_paused and len(self._buffer) <= self._low:
                self._is_paused = False
                self.protocol.resume_writing()
        if self._is_closing:
            if not self._buffer:
                self._lose(None)
            return
        if not self._is_reading:
            return
        data = self._pipes.to_server.read(self._clock.now_us())
        if data:
            self.protocol.take(data)
        elif data is not None and self._pipes.to_server.is_reset:
            self._drop_buffer()
            self._lose(ConnectionResetError())
        elif data is not None:
            self.protocol.eof_received()
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            now = self._clock.now_us()
            self._pipes.to_client.finish(now)
            self._pipes.to_server.is_cut = True
            self.protocol.connection_lost(error)


class ObservedConnection(native.NativeConnection):
    """The real driver; remembers where in the stream each reply that holds locks ends."""

    def __init__(self, door: "SimulatedDoor", transport: SimulatedTransport) -> None:
        super().__init__(cast("Any", door), "simulated")
        self._observer = door
        self.simulated = transport
        self.ended_at = 0  # when its conversation was first seen to have ended
        self.locking_replies: list[tuple[int, ServerRequest, Any]] = []

    def _deliver(self, request: ServerRequest, value: Any) -> None:
        self._observer.on_reply(request, value)
        super()._deliver(request, value)

    def _answer(self, request: ServerRequest, value: Any) -> None:
        conversation = self.conversation
        has_ended = conversation.phase is Phase.ENDED
        super()._answer(request, value)
        undo = server_requests.undo_request(request, value)
        if undo is not None:
            # where in the stream the reply ends, which no peer knows before it has read it
            end = self.simulated.bytes_taken + unsent_reply_bytes(conversation)
            if has_ended:
                self._observer.orphaned.append((request, value))
            else:
                self.locking_replies.append((end, request, value))

    def connection_lost(self, error: Exception | None) -> None:
        """Note the replies that cannot have reached the client whole."""
        written = self.simulated.bytes_written
        self._observer.orphaned += [
            (request, value) for end, request, value in self.locking_replies if end > written
        ]
        super().connection_lost(error)


class SimulatedTurns:
    """Collects requests, and has them carried out when the simulation says so.

    Every fourth time that a connection may have the turn at once, it has: a server does so when
    only one socket is ready.
    """

    def __init__(self, namespace: EmbeddedNamespace, after_turn: Callable[[], None]) -> None:
        self._namespace = namespace
        self._after_turn = after_turn
        self.thread = get_ident()  # there is one
        self.arrivals: list[Request] = []
        self._chances = 0

    def add(self, requests: Iterable[Request], *, may_turn: bool = False) -> None:
        """Take requests for the next turn, or for one at once."""
        self.arrivals.extend(requests)
        self._chances += may_turn
        if may_turn and self._chances % 4 == 0:
            self.turn()
            self._after_turn()

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Let requests that wait go unanswered."""
        gone = set(map(id, requests))
        self.arrivals = [request for request in self.arrivals if id(request) not in gone]
        self._namespace.withdraw(requests)

    def turn(self) -> None:
        """Carry out what has arrived."""
        requests, self.arrivals = self.arrivals, []
        self._namespace.hand_over(requests)


class SimulatedDoor:
    """What a NativeConnection needs of a door."""

    def __init__(
        self,
        namespace: EmbeddedNamespace,
        clock: ManualClock,
        on_reply: Callable[[ServerRequest, Any], None],
    ) -> None:
        self.namespace = namespace
        self.clock = clock
        self.on_reply = on_reply
        self.turns = SimulatedTurns(namespace, self._after_turn)
        self.latencies = Latencies()
        self.orphaned: list[tuple[ServerRequest, Any]] = []  # locks that must be given back
        self.connections: list[ObservedConnection] = []
        self.refusals = 0
        self.attendance = Attendance(MAX_CONNECTIONS, self._refused)
        self.attendance.replies = ByteShares(12_288, 20_480)
        self.attendance.requests = ByteShares(6144, 10_240)
        self.moved_bytes = 0
        self._keys_version = namespace.keys.version
        self._replying: dict[ObservedConnection, None] = {}
        self._waking: dict[str, None] = {}
        self._next_tick = 0

    def accept(self, pipes: Connection) -> ObservedConnection:
        """Begin a connection."""
        transport = SimulatedTransport(pipes, self.clock)
        connection = transport.protocol = ObservedConnection(self, transport)
        self.connections.append(connection)
        connection.connection_made(transport)
        return connection

    def round(self, random: Random, *, has_turn: bool) -> None:
        """Do one round of the event loop."""
        connections = [*self.connections]
        random.shuffle(connections)
        for connection in connections:
            connection.simulated.move()
        if has_turn:
            self.turns.turn()
        self._after_turn()
        if self.clock.now_us() >= self._next_tick:
            self._next_tick = self.clock.now_us() + SECOND_US
            for connection in [*self.connections]:
                connection.tick()

    def _after_turn(self) -> None:
        if self.namespace.keys.version != self._keys_version:
            self._keys_version = self.namespace.keys.version
            for connection in [*self.connections]:
                connection.tick()
        replying, self._replying = self._replying, {}
        for connection in replying:
            connection.flush()
        waking, self._waking = self._waking, {}
        for key in waking:
            for crowded in self.attendance.crowded_of(key):
                crowded.flush()

    # -- called by the connections -------------------------------------------------------------

    def isolated(self, connection: ObservedConnection, work: Callable[[], object]) -> None:
        """Call `work`; unlike with a real door, its error fails the run."""
        del connection
        work()

    def has_replies(self, connection: ObservedConnection) -> None:
        self._replying[connection] = None

    def wake_crowded(self, key: str) -> None:
        self._waking[key] = None

    def connection_ends(self, connection: ObservedConnection) -> None:
        self._replying.pop(connection, None)
        self.connections.remove(connection)
        self.attendance.leave(connection)

    def admit(self, token: str) -> Admission:
        return self.namespace.keys.admit(token, self.clock.wall_us())

    def recheck(self, admission: Admission) -> Admission:
        return self.namespace.keys.recheck(admission, self.clock.wall_us())

    def enter(self, connection: ObservedConnection, admission: Admission) -> None:
        self.attendance.enter(connection, admission)

    def note_refusal(self, admission: Admission | None, error: MessagingError) -> None:  # noqa: ARG002
        self.refusals += 1

    def _refused(self, reason: str) -> None:
        raise AssertionError(f"the simulation has few connections, and one was closed: {reason}")

    def presentable(self, value: Any) -> Any:
        return value


# -- the client's driver ---------------------------------------------------------------------------


class ClientLink:
    """Moves bytes between a pipe and a client conversation, as namespace/server.py does."""

    def __init__(
        self, connection: Connection, server: ObservedConnection, token: str, clock: ManualClock
    ) -> None:
        self.connection = connection
        self.server = server  # the other end, for those who check invariants
        self.conversation = ClientConversation(token, "")
        self._clock = clock
        self._unsent = bytearray()
        self._bytes_taken = 0  # of the conversation
        self.reads_again_at = 0  # until then the client does not read
        self.closes_at: int | None = None  # after a goodbye
        self.withdrawn: list[tuple[int, int]] = []  # request id, and where its WITHDRAW ends
        self.given_up: set[int] = set()  # ids of requests that nobody waits for
        self.has_refused_undo = False  # the server did not take locks back, which lapse then

    @property
    def is_over(self) -> bool:
        """Whether another link is needed."""
        return self.conversation.ended is not None

    def give_up(self, number: int) -> None:
        """Stop waiting for a reply."""
        # the command of a request is asked before it is forgotten
        pending = pending_of(self.conversation).get(number)
        self.given_up.add(number)
        self.conversation.give_up(number)
        if pending is not None and table.waits(pending.command):
            self.withdrawn.append((number, self._bytes_asked))

    @property
    def _bytes_asked(self) -> int:
        return self._bytes_taken + unsent_bytes(self.conversation)

    def say_goodbye(self) -> None:
        """Let the server answer what it has, and hang up."""
        if self.closes_at is None:
            self.conversation.say_goodbye()
            self.closes_at = self._clock.now_us() + GOODBYE_US

    def move(self) -> list[Outcome]:
        """Write, read and tick once; return what became of requests."""
        if self.is_over:
            return []
        now = self._clock.now_us()
        outcomes: list[Outcome] = []
        self._write(now)
        if now >= self.reads_again_at:
            outcomes += self._read(now)
        outcomes += self.conversation.tick(now)
        if self.closes_at is not None and now >= self.closes_at:
            outcomes += self.conversation.end(NamespaceClosedError("the namespace was closed"))
        self._write(now)
        if self.is_over:
            self._close(now)
        self.has_refused_undo |= any(
            type(outcome.request) is Request and isinstance(outcome.value, MessagingError)
            for outcome in outcomes
        )
        return outcomes

    def _write(self, now: int) -> None:
        pieces = b"".join(self.conversation.take_outgoing())
        self._bytes_taken += len(pieces)
        self._unsent += pieces
        taken = self.connection.to_server.write(bytes(self._unsent), now)
        del self._unsent[:taken]

    def _read(self, now: int) -> list[Outcome]:
        pipe = self.connection.to_client
        data = pipe.read(now)
        if data is None:
            return []
        if not data and pipe.is_reset:
            return self.conversation.end(CommunicationError("the connection was reset"))
        return self.conversation.receive(data, now)

    def vanish(self) -> list[Outcome]:
        """Close the socket without a goodbye, as a process that ends does."""
        outcomes = self.conversation.end(CommunicationError("the client process ended"))
        self._close(self._clock.now_us())
        return outcomes

    def _close(self, now: int) -> None:
        self.connection.to_server.finish(now)
        self.connection.to_client.is_cut = True
