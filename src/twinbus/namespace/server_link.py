"""A connection to a Twinbus server, from opening to its end, and the threads that use it.

The conversation (protocol/client_conversation.py) decides what is sent; this module moves the
bytes.

A caller writes its own frame. One of the waiting callers, the leader, reads the replies of all: a
single caller reads its own reply, and no thread is woken. When the leader has its reply, it passes
the lead to another waiting caller. A thread of the link leads for submitted commands, whose callers
do not wait. Sockets never block; everything except waiting for the socket happens under one lock.
"""

import itertools
import os
import select
import socket
import ssl
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from weakref import finalize

from twinbus.clock import Clock
from twinbus.connection import ConnectionString
from twinbus.errors import (
    NAMESPACE_CLOSED,
    InvalidOperationError,
    MessagingError,
    NamespaceClosedError,
)
from twinbus.limits import (
    GRACE_S,
    IDLE_CHECK_US,
    MAX_CLOSE_WAIT,
    NEVER_US,
    READ_BYTES,
    SECOND_US,
    WRITE_PIECES,
)
from twinbus.namespace.credentials import Credentials
from twinbus.namespace.server_socket import now_us, opened_socket, unreachable
from twinbus.protocol.client_conversation import ClientConversation, Outcome
from twinbus.protocol.commands import Command
from twinbus.protocol.frames import Buffers
from twinbus.protocol.requests import BlockingRequest, FutureRequest, complete_all

_FEW_PIECES, _SMALL_FRAME_BYTES = 4, 16 * 1024  # up to these, one copy is cheaper than sendmsg
_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Caller(BlockingRequest):
    """A caller that waits for its reply, or for the lead."""

    __slots__ = ()

    def pass_lead(self) -> None:
        """Wake the caller; if it has no reply, it tries to take the lead."""
        try:  # noqa: SIM105 - runs once per reply, and `suppress` would double its time
            self._answered.release()
        except RuntimeError:
            pass  # already woken

    def sleep(self, timeout_s: float | None) -> None:
        """Wait until the reply arrives, the lead is passed, or the time is over."""
        self._answered.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def answer(self, value: Any) -> None:
        """Set the reply and wake the caller."""
        if not self.done:
            self._value, self.done = value, True
            self.pass_lead()

    def fail(self, error: MessagingError) -> None:
        """Set the error and wake the caller."""
        if not self.done:
            self._error, self.done = error, True
            self.pass_lead()

    def outcome(self) -> Any:
        """Return the reply or raise the error; call it only when `done`."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # other callers may raise the same error
        return self._value


class ServerLink:
    """A connection, from opening to its end. A failed link is replaced by a new one."""

    def __init__(self, connection: ConnectionString, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._credentials = Credentials(connection, clock)
        self._conversation = ClientConversation(self._credentials.token(), connection.namespace_id)
        self._lock = threading.Lock()  # protects the conversation and the socket
        self._lead = threading.Lock()  # held by the thread that reads
        self._followers: deque[_Caller] = deque()
        self._socket: socket.socket | None = None
        self._has_tls = connection.tls
        self._unsent: deque[memoryview] = deque()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._poll = select.poll()
        self._polls_writes = False
        self._answered: deque[FutureRequest] = deque()
        self._completing: set[int] = set()  # threads that run callbacks of futures
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_number = self._wake_out.fileno()
        for end in (self._wake_out, self._wake_in):
            end.setblocking(False)
            finalize(self, end.close)  # for a namespace that is never closed
        self._thread: threading.Thread | None = None
        self._thread_wakeup = threading.Event()
        self._submitted = 0  # number of unanswered futures
        self._closing: NamespaceClosedError | None = None
        self._stop_listening = clock.on_advance(self._wake)

    @property
    def ended(self) -> MessagingError | None:
        """Why the link accepts no more requests; None while it does."""
        return self._conversation.ended

    def is_usable(self) -> bool:
        """Return whether a request may be sent; reads first, because an idle link has no reader."""
        conversation = self._conversation
        was_idle = now_us() - conversation.received_at > IDLE_CHECK_US
        if not was_idle and conversation.ended is None:
            return True
        if was_idle and self._socket is not None and not self._conversation.has_pending:
            with self._lock:
                self._read()
            complete_all(self._answered)
        if self.ended is not None:
            self._release_socket()  # the connection may have ended while nobody read
        return self.ended is None

    # -- asking --------------------------------------------------------------------------------

    def ask(self, command: Command[Any], timeout_s: float | None) -> Any:
        """Send a command and wait for its reply."""
        if self._completing and threading.get_ident() in self._completing:
            raise InvalidOperationError(
                "a callback of a future must not wait for another reply: it runs in the thread "
                "that reads replies. Submit the command without waiting, or wait in another thread"
            )
        caller = _Caller(command)
        now = now_us()
        deadline = NEVER_US if timeout_s is None else now + max(int(timeout_s * SECOND_US), 1)
        with self._lock:
            self._renew_token()
            self._conversation.ask(caller, now, deadline)
            self._write()
        try:
            while not caller.done:
                if self._lead.acquire(blocking=False):
                    self._lead_until(lambda: caller.done, deadline)
                else:
                    self._follow(caller, deadline)
        finally:
            self._pass_unused_lead()
        return caller.outcome()

    def submit(self, command: Command[Any]) -> "Future[Any]":
        """Send a command; the thread that reads the reply completes its future."""
        request = FutureRequest(command, self._answered)
        with self._lock:
            self._renew_token()
            self._conversation.ask(request, now_us())
            self._submitted += 1
            self._write()
            if self._thread is None:
                name = f"twinbus-link-{self._connection.address}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        self._thread_wakeup.set()
        return request.future

    def _follow(self, caller: _Caller, deadline: int) -> None:
        """Wait until the leader reads the reply or passes the lead."""
        self._followers.append(caller)
        if self._lead.acquire(blocking=False):  # the leader left before it saw this caller
            with suppress(ValueError):
                self._followers.remove(caller)
            self._lead_until(lambda: caller.done, deadline)
            return
        left = None if deadline == NEVER_US else (deadline - now_us()) / SECOND_US
        try:
            caller.sleep(left)
        finally:
            with suppress(ValueError):
                self._followers.remove(caller)
        if not caller.done:
            self._tick()
            self._wake()  # the tick may have answered the request of the leader, too

    def _serve(self) -> None:
        """Lead for submitted commands, whose callers do not wait. The link's thread runs this."""
        follower = _Caller(_NOTHING)
        while True:
            self._thread_wakeup.wait()
            self._thread_wakeup.clear()
            while self._submitted and self.ended is None:
                if self._lead.acquire(blocking=False):
                    self._lead_until(lambda: not self._submitted, NEVER_US)
                else:
                    self._follow(follower, NEVER_US)
            self._pass_unused_lead()
            complete_all(self._answered)
            if self.ended is not None:
                return

    # -- leading -------------------------------------------------------------------------------

    def _lead_until(self, is_done: Any, deadline: int) -> None:
        """Read replies of all callers until `is_done`, then pass the lead on."""
        try:
            while not is_done():
                try:
                    if self._socket is None:
                        self._connect(deadline)
                    self._wait_for_bytes()
                except MessagingError as error:  # first: some are also errors of the system
                    self._end(error)
                except OSError as error:
                    self._end(unreachable(self._connection, error))
                if self._answered:
                    self._complete()
                if self._conversation.ended is None and is_done():
                    break  # the next leader handles timeouts
                self._tick()
                self._complete()
                if self.ended is not None:
                    break
        finally:
            self._lead.release()
            if self.ended is not None:
                self._close_wakeup()
            self._pass_lead()

    def _pass_lead(self) -> None:
        """Pass the lead to a waiting caller, or to the link's thread."""
        while True:
            try:
                follower = self._followers.popleft()
            except IndexError:
                break
            if not follower.done:
                follower.pass_lead()
                return
        if self._submitted or self.ended is not None:
            self._thread_wakeup.set()

    def _pass_unused_lead(self) -> None:
        """Pass the lead on, if it was passed to this thread, which does not need it any more.

        That is so if a request was answered, or its time was over, while its thread was woken.
        """
        if self._followers and not self._lead.locked():
            self._pass_lead()

    def _wait_for_bytes(self) -> None:
        """Wait until the socket is ready, a timeout is due, or another thread wakes the leader."""
        conversation = self._conversation
        with self._lock:
            if self._unsent or conversation.has_outgoing:
                self._write()
            if conversation.ended is not None or (self._has_tls and self._read()):
                return  # TLS may have decrypted bytes that polling the socket does not show
            wants_write = bool(self._unsent)
            next_event = conversation.next_event
        timeout_s = None if next_event == NEVER_US else max(next_event - now_us(), 0) / SECOND_US
        renewal = self._credentials.renewal_in_s()
        if renewal is not None:
            timeout_s = renewal if timeout_s is None else min(renewal, timeout_s)
        self._sleep(timeout_s, wants_write=wants_write)
        with self._lock:
            self._read()

    def _sleep(self, timeout_s: float | None, *, wants_write: bool) -> None:
        """Wait until the socket is ready, another thread wakes the leader, or the time is over."""
        connected = self._socket
        if connected is None:
            return
        if wants_write != self._polls_writes:
            self._polls_writes = wants_write
            self._poll.modify(connected, select.POLLIN | (select.POLLOUT if wants_write else 0))
        ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000 + 1)
        if len(ready) > 1 or (ready and ready[0][0] == self._wake_number):
            with suppress(OSError):
                self._wake_out.recv(4096)

    def _wake(self) -> None:
        """Wake the leader, if there is one."""
        with suppress(OSError):
            self._wake_in.send(b"\0")

    def _tick(self) -> None:
        with self._lock:
            self._deliver(self._conversation.tick(now_us()))
            self._renew_token()
            self._write()
        if self.ended is not None:
            self._release_socket()

    def _complete(self) -> None:
        """Complete futures outside of the lock, because their callbacks may submit commands."""
        if not self._answered:
            return
        thread = threading.get_ident()
        self._completing.add(thread)
        try:
            complete_all(self._answered)
        finally:
            self._completing.discard(thread)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome.request, FutureRequest):
                self._submitted -= 1
            outcome.deliver()

    def _renew_token(self) -> None:
        """Send a new token before the old one expires; under the lock."""
        token = self._credentials.renewed()
        if token is not None:
            self._conversation.present(token)

    # -- the socket, under the lock ------------------------------------------------------------

    def _write(self) -> None:
        """Write what the socket accepts now; the leader writes the rest."""
        conversation, connected = self._conversation, self._socket
        if connected is None:
            return
        if conversation.has_outgoing:
            pieces = conversation.take_outgoing()
            if not self._unsent and self._has_written_all(connected, pieces):
                return
            self._unsent.extend([memoryview(piece) for piece in pieces if len(piece)])
        try:
            while self._unsent:
                self._note_sent(self._send_some(connected))
        except _NOT_READY:
            self._wake()  # the leader must wait until the socket is writable
        except OSError as error:
            self._read()  # the server may have sent the reason before it closed
            self._deliver(conversation.end(self._closing or unreachable(self._connection, error)))

    def _has_written_all(self, connected: socket.socket, pieces: Buffers) -> bool:
        """Write a small frame with one call; return whether the socket accepted any of it.

        Bytes that the socket did not accept are kept as unsent.
        """
        if len(pieces) > _FEW_PIECES or sum(map(len, pieces)) > _SMALL_FRAME_BYTES:
            return False
        content = b"".join(pieces)
        try:
            sent = connected.send(content)
        except (*_NOT_READY, OSError):
            return False  # the caller sends again and handles the error
        if sent < len(content):
            self._unsent.append(memoryview(content)[sent:])
            self._wake()  # the leader must wait until the socket is writable
        return True

    def _send_some(self, connected: socket.socket) -> int:
        """Write as much as the socket accepts with one call; return the number of bytes."""
        if len(self._unsent) == 1:
            return connected.send(self._unsent[0])
        pieces = list(itertools.islice(self._unsent, WRITE_PIECES))
        return connected.send(b"".join(pieces)) if self._has_tls else connected.sendmsg(pieces)

    def _note_sent(self, count: int) -> None:
        while count:
            first = self._unsent.popleft()
            if count < len(first):
                self._unsent.appendleft(first[count:])
                return
            count -= len(first)

    def _read(self) -> bool:
        """Read the bytes that have arrived; return whether there were any."""
        connected = self._socket
        has_read = False
        while connected is not None and self._conversation.ended is None:
            try:
                size = connected.recv_into(self._buffer)
            except _NOT_READY:
                return has_read
            except OSError as error:
                self._deliver(
                    self._conversation.end(self._closing or unreachable(self._connection, error))
                )
                return True
            has_read = True
            data = bytes(self._buffer[:size])
            if not data and self._closing is not None:
                self._deliver(self._conversation.end(self._closing))
            else:
                self._deliver(self._conversation.receive(data, now_us()))
            if size < READ_BYTES and not self._has_tls:
                return True
        return has_read

    def _connect(self, deadline: int) -> None:
        """Open the connection, within the time limit of the operation that needs it."""
        connected = opened_socket(self._connection, deadline)
        with self._lock:
            if self.ended is not None:
                connected.close()
                return
            self._socket = connected
            finalize(self, connected.close)  # for a namespace that is never closed
            self._poll.register(connected, select.POLLIN)
            self._poll.register(self._wake_out, select.POLLIN)
            self._write()

    # -- the end -------------------------------------------------------------------------------

    def _end(self, error: MessagingError) -> None:
        """Fail all pending requests, once."""
        with self._lock:
            self._deliver(self._conversation.end(self._closing or error))
        self._complete()
        self._release_socket()

    def _release_socket(self) -> None:
        """Close the socket, and wake all threads that wait for it."""
        self._stop_listening()
        self._stop_listening = _do_nothing
        with self._lock:
            connected, self._socket = self._socket, None
            self._unsent.clear()
        if connected is not None:
            connected.close()
        self._wake()
        self._thread_wakeup.set()
        self._close_wakeup()
        self._pass_lead()

    def _close_wakeup(self) -> None:
        """Close the sockets that wake the leader; a leader calls this again when it leaves.

        Garbage collection would be too late: an application that tries to reach a stopped server
        would use up its file descriptors.
        """
        if self._lead.acquire(blocking=False):  # so no thread polls these sockets
            for end in (self._wake_out, self._wake_in):
                end.close()
            self._lead.release()

    def close(self) -> None:
        """Wait for the replies to pending requests, then close the connection."""
        self._closing = NamespaceClosedError(NAMESPACE_CLOSED)
        deadline = now_us() + int((MAX_CLOSE_WAIT.total_seconds() - GRACE_S) * SECOND_US)
        with self._lock:
            self._conversation.say_goodbye()
            self._write()
        waiting = _Caller(_NOTHING)
        while self.ended is None and self._socket is not None and now_us() < deadline:
            if self._lead.acquire(blocking=False):
                self._read_until_closed(deadline)
            else:
                waiting.sleep(0.01)  # the leader detects the end of the connection
        self._end(self._closing)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(GRACE_S)

    def _read_until_closed(self, deadline: int) -> None:
        try:
            while self.ended is None and self._socket is not None and now_us() < deadline:
                with self._lock:
                    self._write()
                    self._read()
                self._complete()
                if self.ended is None and self._socket is not None:
                    left_s = (deadline - now_us()) / SECOND_US
                    self._sleep(max(left_s, 0), wants_write=bool(self._unsent))
        finally:
            self._lead.release()
            self._pass_lead()

    def forget(self) -> None:
        """Close this process's copy of the socket without sending anything."""
        for end in (self._wake_out, self._wake_in, self._socket):
            if end is not None:
                with suppress(OSError):
                    os.close(end.detach())


_NOTHING: Command[Any] = Command()


def _do_nothing() -> None:
    """Do nothing, in place of a function that must not run again."""
