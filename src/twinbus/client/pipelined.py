"""A sender that keeps many single sends in flight; each message has its own future.

One thread per sender combines the waiting messages into batches, and keeps a few batches in flight.
If the namespace refuses a batch because of a message in it, the thread sends the messages of that
batch one by one, so that only the messages at fault fail. While sends are diverted, only one batch
is in flight, so that a failed batch cannot be overtaken by the next.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from twinbus import tracing
from twinbus.client.courier import Courier
from twinbus.client.route import Lane, Wait
from twinbus.errors import FaultOwner, InvalidArgumentError, MessagingError, NamespaceClosedError
from twinbus.forking import on_fork
from twinbus.futures import RunningFuture
from twinbus.lifetimes import Closable
from twinbus.limits import (
    PIPELINE_BACKLOG,
    PIPELINE_BYTES,
    PIPELINE_MESSAGES,
    PIPELINE_SENDS,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Origin, Send, SendReceipt


class _Entry(NamedTuple):
    message: BrokeredMessage
    future: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Flight:
    entries: list[_Entry]
    command: Send
    wait: Wait


class PipelinedSender(Closable):
    """Sends without waiting. As a context manager it waits for all replies at the end."""

    def __init__(self, courier: Courier, path: str, lane: Lane) -> None:
        self.path = path
        self._courier = courier
        self._lane = lane
        self._waiting: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._unanswered = 0
        self._closed = False
        self._flights: deque[_Flight] = deque()
        self._thread = threading.Thread(target=self._run, name="twinbus-pipeline", daemon=True)
        self._thread.start()
        on_fork(self._after_fork)

    def _after_fork(self) -> None:
        """Close the sender in the child: the thread that sends exists only in the parent."""
        self._changed = threading.Condition()
        self._waiting.clear()
        self._unanswered = 0
        self._closed = True

    def send(self, message: BrokeredMessage) -> "Future[None]":
        """Send a message; the future is done when the message is durable, or has the error.

        Blocks only while too many messages wait.
        """
        if not isinstance(message, BrokeredMessage):
            raise InvalidArgumentError(
                f"send needs a BrokeredMessage, not {type(message).__name__}"
            )
        future: Future[None] = RunningFuture()
        with self._changed:
            if len(self._waiting) >= PIPELINE_BACKLOG:
                self._changed.wait_for(self._may_send)
            if self._closed:
                raise NamespaceClosedError(
                    f"this pipelined sender to {self.path} was closed. Create a new one"
                )
            if tracing.hook is not None:
                message, end = tracing.hook.begin_send(self._courier.peer, self.path, message)
                future.add_done_callback(end)
            self._waiting.append(_Entry(message, future))
            self._unanswered += 1
            if len(self._waiting) == 1:
                self._changed.notify_all()
        return future

    def _may_send(self) -> bool:
        # A callback of a future runs in our own thread: it would wait for itself.
        is_callback = threading.current_thread() is self._thread
        return is_callback or self._closed or len(self._waiting) < PIPELINE_BACKLOG

    def flush(self) -> None:
        """Return when every message sent so far has its reply."""
        with self._changed:
            self._changed.wait_for(lambda: self._unanswered == 0)

    def close(self) -> None:
        """Wait for the replies to everything sent, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._flights or self._closed)
                if not self._waiting and not self._flights:
                    return
            divert = self._courier.route.is_diverting(self.path)
            most = 1 if divert else PIPELINE_SENDS  # a send that fails must not be overtaken
            while self._waiting and len(self._flights) < most:
                self._submit_batch(divert=divert)
            if self._flights:
                flight = self._flights.popleft()
                self._answer(flight.entries, self._await_reply(flight))

    def _submit_batch(self, *, divert: bool) -> None:
        entries: list[_Entry] = []
        size = 0
        with self._changed:
            while self._waiting and len(entries) < PIPELINE_MESSAGES and size < PIPELINE_BYTES:
                entries.append(self._waiting.popleft())
                size += len(entries[-1].message.body)
            self._changed.notify_all()
        command = self._courier.new_send(self.path, [entry.message for entry in entries])
        try:
            wait = self._courier.route.submit(command, self._lane, divert=divert)
        except MessagingError as error:
            wait = partial(_refuse, error)
        self._flights.append(_Flight(entries, command, wait))

    def _await_reply(self, flight: _Flight) -> MessagingError | None:
        """Wait for the reply to a batch; return the error of the entries left in the flight."""
        error = _outcome(flight.wait)
        if error is None or error.fault is not FaultOwner.CALLER or len(flight.entries) == 1:
            return error
        origin = flight.command.origin
        assert origin is not None  # new_send sets it
        for at, entry in enumerate(flight.entries):
            number = origin.numbers[at : at + 1]
            single = Send(self.path, [entry.message], Origin(origin.source, number))
            resend = partial(self._courier.route.send, single, self._lane, was_tried=True)
            self._answer([entry], _outcome(resend))
        flight.entries.clear()
        return None

    def _answer(self, entries: list[_Entry], error: MessagingError | None) -> None:
        for entry in entries:
            if error is None:
                entry.future.set_result(None)
            else:
                entry.future.set_exception(error)
        with self._changed:
            self._unanswered -= len(entries)
            if not self._unanswered:
                self._changed.notify_all()


def _outcome(send: Callable[[], object]) -> MessagingError | None:
    """Call `send`; return its error, or None."""
    try:
        send()
    except MessagingError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the thread must go on with the other messages
        return MessagingError(f"the send failed with an unexpected error: {error!r}")
    return None


def _refuse(error: MessagingError) -> SendReceipt:
    raise error
