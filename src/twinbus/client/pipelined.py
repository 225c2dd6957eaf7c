"""Many single sends in flight: each message has its own future, and none waits for another.

Messages that wait at the same time travel in one send, a few such sends are under way at once. When
one of them is refused for what a message is, its messages are sent one by one, so that only those
at fault fail.
"""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from twinbus.broker.commands import Send, SendReceipt
from twinbus.client.courier import Courier
from twinbus.client.retry import is_worth_a_retry
from twinbus.clock import to_us
from twinbus.errors import (
    Fault,
    InvalidArgumentError,
    MessagingError,
    NamespaceClosedError,
    OperationTimeoutError,
)
from twinbus.lifetimes import Closable
from twinbus.limits import (
    PIPELINE_BACKLOG,
    PIPELINE_BYTES,
    PIPELINE_MESSAGES,
    PIPELINE_SENDS,
    SECOND_US,
)
from twinbus.message import BrokeredMessage


@dataclass(frozen=True, slots=True)
class _Entry:
    message: BrokeredMessage
    future: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Flight:
    entries: list[_Entry]
    command: Send
    reply: "Future[SendReceipt]"


class PipelinedSender(Closable):
    """Sends without waiting; as a context manager it waits at the end for all."""

    def __init__(self, courier: Courier, path: str) -> None:
        self.path = path
        self._courier = courier
        self._waiting: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._unanswered = 0
        self._closed = False
        self._flights: deque[_Flight] = deque()
        self._thread = threading.Thread(target=self._run, name="twinbus-pipeline", daemon=True)
        self._thread.start()

    def send(self, message: BrokeredMessage) -> "Future[None]":
        """Send a message; the future is done when it is durable, or holds the error.

        Blocks only while too many messages wait.
        """
        if not isinstance(message, BrokeredMessage):
            raise InvalidArgumentError(f"send takes a message, not {type(message).__name__}")
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # what was sent cannot be taken back
        with self._changed:
            self._changed.wait_for(self._may_send)
            if self._closed:
                raise NamespaceClosedError(f"this client of {self.path} was closed")
            self._waiting.append(_Entry(message, future))
            self._unanswered += 1
            if len(self._waiting) == 1:
                self._changed.notify_all()
        return future

    def _may_send(self) -> bool:
        own = threading.current_thread() is self._thread  # a callback: it would wait for itself
        return own or self._closed or len(self._waiting) < PIPELINE_BACKLOG

    def flush(self) -> None:
        """Return when everything sent so far has been answered."""
        with self._changed:
            self._changed.wait_for(lambda: self._unanswered == 0)

    def close(self) -> None:
        """Finish what was sent, then stop."""
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
            while self._waiting and len(self._flights) < PIPELINE_SENDS:
                self._take_off()
            if self._flights:
                flight = self._flights.popleft()
                self._answer(flight.entries, self._land(flight))

    def _take_off(self) -> None:
        entries: list[_Entry] = []
        size = 0
        with self._changed:
            while self._waiting and len(entries) < PIPELINE_MESSAGES and size < PIPELINE_BYTES:
                entries.append(self._waiting.popleft())
                size += len(entries[-1].message.body)
            self._changed.notify_all()
        try:
            self._courier.await_gate()
            self._courier.life.check()
            command = Send(self.path, [entry.message for entry in entries])
        except MessagingError as error:
            self._answer(entries, error)
            return
        self._flights.append(_Flight(entries, command, self._courier.submit(command)))

    def _land(self, flight: _Flight) -> MessagingError | None:
        """Wait for a reply; return what went wrong with those that are not answered yet."""
        error: MessagingError | None = None
        try:
            flight.reply.result(to_us(self._courier.policy.operation_timeout) / SECOND_US)
        except MessagingError as refusal:
            error = refusal
        except TimeoutError:
            error = OperationTimeoutError("no answer in time; whether the work was done is unknown")
        except Exception as trouble:  # noqa: BLE001 - the thread must live on for the others
            error = MessagingError(f"the send failed: {trouble!r}")
        if error is not None and is_worth_a_retry(error):
            self._courier.note(error)
            error = self._again(flight.command)
        if error is not None and error.fault is Fault.CALLER and len(flight.entries) > 1:
            while len(flight.entries) > 1:
                entry = flight.entries.pop(0)
                self._answer([entry], self._again(Send(self.path, [entry.message])))
            error = self._again(Send(self.path, [flight.entries[0].message]))
        return error

    def _again(self, command: Send) -> MessagingError | None:
        """Send under the retry policy; return what came of it."""
        try:
            self._courier.send(command)
        except MessagingError as error:
            return error
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
