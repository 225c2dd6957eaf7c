"""Many single sends in flight: each message has its own future, and none waits for another.

Messages that wait at the same time travel in one send, a few such sends are under way at once. When
one of them is refused for what a message is, its messages are sent one by one, so that only those
at fault fail.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from twinbus.client.courier import Courier
from twinbus.client.route import Lane, Wait
from twinbus.errors import Fault, InvalidArgumentError, MessagingError, NamespaceClosedError
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import (
    PIPELINE_BACKLOG,
    PIPELINE_BYTES,
    PIPELINE_MESSAGES,
    PIPELINE_SENDS,
)
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import Origin, Send, SendReceipt


@dataclass(frozen=True, slots=True)
class _Entry:
    message: BrokeredMessage
    future: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Flight:
    entries: list[_Entry]
    command: Send
    wait: Wait


class PipelinedSender(Closable):
    """Sends without waiting; as a context manager it waits at the end for all."""

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
        """Take no more messages: the thread that sends them is in the parent."""
        self._changed = threading.Condition()
        self._waiting.clear()
        self._unanswered = 0
        self._closed = True

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
            divert = self._courier.route.is_diverting(self.path)
            most = 1 if divert else PIPELINE_SENDS  # a send that fails must not be overtaken
            while self._waiting and len(self._flights) < most:
                self._take_off(divert=divert)
            if self._flights:
                flight = self._flights.popleft()
                self._answer(flight.entries, self._land(flight))

    def _take_off(self, *, divert: bool) -> None:
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

    def _land(self, flight: _Flight) -> MessagingError | None:
        """Wait for a reply; return what went wrong with those that are not answered yet."""
        error = _outcome(flight.wait)
        if error is None or error.fault is not Fault.CALLER or len(flight.entries) == 1:
            return error
        origin = flight.command.origin
        assert origin is not None  # new_send gave it
        for at, entry in enumerate(flight.entries):
            number = origin.numbers[at : at + 1]
            one = Send(self.path, [entry.message], Origin(origin.source, number))
            again = partial(self._courier.route.send, one, self._lane, was_tried=True)
            self._answer([entry], _outcome(again))
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
    """Send; return what went wrong."""
    try:
        send()
    except MessagingError as error:
        return error
    except Exception as trouble:  # noqa: BLE001 - the thread must live on for the others
        return MessagingError(f"the send failed: {trouble!r}")
    return None


def _refuse(error: MessagingError) -> SendReceipt:
    raise error
