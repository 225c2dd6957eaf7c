"""Sends commands to a namespace under a retry policy. Every client uses a courier.

Each send carries the sender's name and consecutive numbers. The namespace uses them to recognise a
send that the courier repeats after the reply was lost, so that a retry enqueues nothing twice. If a
namespace says that it has accepted a part of a send, the courier repeats only the rest.

A factory has one courier, and its clients call it from any thread. The calling thread sleeps
between tries; the courier has no thread of its own.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Any, TypeVar

import pyarrow as pa

from twinbus.client.retry import (
    BusyGate,
    RetryPolicy,
    Tries,
    UnlimitedTries,
    exhausted,
    is_worth_a_retry,
)
from twinbus.client.route import Lane, Route, Wait
from twinbus.client.state import FactoryState, Life
from twinbus.clock import Clock, SystemClock, to_us
from twinbus.errors import MessagingError, OperationTimeoutError, ServerBusyError
from twinbus.forking import on_fork
from twinbus.lifetimes import Closable
from twinbus.limits import SECOND_US
from twinbus.loglines import facts
from twinbus.message import BrokeredMessage
from twinbus.namespace.contract import Namespace
from twinbus.protocol.commands import (
    NO_WAIT,
    CancelScheduled,
    Command,
    Origin,
    Send,
    SendReceipt,
)
from twinbus.protocol.origins import sender_source
from twinbus.protocol.remainder import ACCEPTED, Remainder
from twinbus.tracing import UNKNOWN_PEER

_log = logging.getLogger("twinbus.retries")
R = TypeVar("R")
_UNLIMITED = UnlimitedTries()


class _Numbers:
    """Numbers the messages to one entity.

    Each entity has its own numbers, so that failed sends to one leave no gaps in those of another.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._next = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> range:
        with self._lock:
            first = self._next
            self._next += count
        return range(first, first + count)


class Courier:
    """Sends commands and retries transient failures. Thread-safe."""

    def __init__(
        self, namespace: Namespace, clock: Clock, policy: RetryPolicy, life: Life, random: Random
    ) -> None:
        self.namespace = namespace
        self.clock = clock
        self.policy = policy
        self.life = life
        self.random = random
        self.peer = UNKNOWN_PEER  # the namespace, as spans name it
        self._gate = BusyGate()
        self._numbers: dict[str, _Numbers] = {}  # by path
        self.route: Route = _DirectRoute(self)  # all sends of clients go through it
        on_fork(self._after_fork)

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of every operation."""
        return self._policy

    @policy.setter
    def policy(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.timeout_us = to_us(policy.operation_timeout)  # for all tries of an operation together
        self.try_us = min(to_us(policy.try_timeout), self.timeout_us)

    def _after_fork(self) -> None:
        """Send under a new sender name in the child: the parent continues the old numbers."""
        self._gate = BusyGate()
        self._numbers = {}

    def new_send(self, path: str, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> Send:
        """Return a send with numbers, so that the namespace recognises a repetition."""
        count = len(messages) if isinstance(messages, list | tuple | pa.RecordBatch) else 0
        return Send(path, messages, self._origin(path, count))

    def new_cancel(self, path: str, sequence_numbers: Sequence[int]) -> CancelScheduled:
        """Return a cancel with a number, so that the namespace recognises a repetition."""
        return CancelScheduled(path, sequence_numbers, self._origin(path, 1))

    def _origin(self, path: str, count: int) -> Origin:
        numbers = self._numbers.get(path)
        if numbers is None:
            source = sender_source(self.random.getrandbits(64) or 1)
            numbers = self._numbers.setdefault(path, _Numbers(source))
        return Origin(numbers.source, numbers.take(count))

    def ask(
        self,
        command: Command[R],
        tries: Tries = _UNLIMITED,
        time_left_us: int | None = None,
        *,
        earlier: Sequence[MessagingError] = (),
        began: int | None = None,
    ) -> R:
        """Return the reply, or raise the last error when the policy is exhausted.

        `tries` may end the operation earlier. `time_left_us` replaces the operation timeout when
        part of the operation is already done: then `earlier` has the errors of the tries so far,
        and `began` is when the operation began.
        """
        clock = self.clock
        now = clock.now_us()
        began = now if began is None else began
        long_poll = getattr(command, "wait", NO_WAIT)  # added to the timeouts
        wait = to_us(long_poll) if long_poll else 0
        span = self.timeout_us + wait if time_left_us is None else time_left_us
        deadline = now + span
        history = [*earlier]
        untried: Any = command
        remainder: Remainder | None = None  # of a send that was accepted in part
        while True:
            self.life.check()
            if history or self._gate.may_be_closed:
                now = self._pass_gate(_path_of(command), began, deadline, history, tries)
            end = tries.end_at()
            if history and end <= now:  # the end came during the pause
                raise exhausted(history, (now - began) / SECOND_US)
            try_end = min(now + self.try_us + wait, deadline, end if end > now else deadline)
            try:
                reply: Any = self.namespace.ask(untried, max(try_end - now, 1) / SECOND_US)
                return reply if remainder is None else remainder.receipt(reply)  # type: ignore[return-value]
            except MessagingError as error:
                now = clock.now_us()
                self.note(error)
                if remainder is not None or ACCEPTED in error.facts:
                    remainder = remainder or Remainder(untried)
                    remainder.note(error)
                    untried = remainder.command
                if not is_worth_a_retry(error):
                    raise
                history.append(error)
                tries.failed(error)
                pause = self.policy.backoff_us(len(history), self.random.random())
                is_last = len(history) == self.policy.max_tries
                end = tries.end_at()
                if is_last or end <= now or now + min(pause, end - now) >= deadline:
                    raise exhausted(history, (now - began) / SECOND_US) from error
                left_s = (min(deadline, end) - now) / SECOND_US
                text = "%s. Trying again for up to %.0f s"
                _log.debug(text, error.text, left_s, extra=facts(left_s=left_s))
            clock.sleep_us(min(pause, end - now))

    def _pass_gate(
        self,
        path: str,
        began: int,
        deadline: int,
        history: list[MessagingError],
        tries: Tries = _UNLIMITED,
    ) -> int:
        """Wait until the gate is open and return the time; raise if there is no time to wait."""
        while True:
            now = self.clock.now_us()
            until, reason = self._gate.check(path, now)
            if reason is None:
                return now
            end = tries.end_at()
            if until >= deadline or end <= now or self.policy.max_tries == 1:
                raise exhausted(history, (now - began) / SECOND_US, reason)
            self.clock.sleep_us(min(until, end) - now)

    def note(self, error: MessagingError) -> None:
        """Close the gate for the scope of the error if it is a ServerBusyError."""
        self._gate.note(error, self.clock.now_us())

    def busy_until(self, path: str, now: int) -> int:
        """Return when the gate opens for an entity; `now` if it is open."""
        return self._gate.check(path, now)[0]

    def busy_error(self, path: str) -> ServerBusyError | None:
        """Return why nothing may be sent to an entity now; None if the gate is open."""
        return self._gate.check(path, self.clock.now_us())[1]

    def submit(self, command: Command[R]) -> "Future[R]":
        """Send a command without waiting for its reply; it is not retried."""
        return self.namespace.submit(command)

    def begin_send(self, command: Send, tries: Tries = _UNLIMITED) -> "Submitted":
        """Start a send without waiting for its reply; waits only while the gate is closed."""
        self.life.check()
        began = self.clock.now_us()
        sent_at = self._pass_gate(command.path, began, began + self.timeout_us, [], tries)
        return Submitted(self, command, self.namespace.submit(command), began, sent_at)


def _path_of(command: Command[Any]) -> str:
    """Return the path of a command's entity; empty for a command about the namespace."""
    path = getattr(command, "path", "")
    return path if isinstance(path, str) else ""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A send in flight."""

    courier: Courier
    command: Send
    reply: "Future[SendReceipt]"
    began: int
    sent_at: int  # when the first try began, after the gate had opened

    def wait(self, tries: Tries = _UNLIMITED) -> SendReceipt:
        """Return the receipt; if the first try fails, retry under the retry policy."""
        courier = self.courier
        end = self.sent_at + courier.try_us  # also if no further try may begin: it may be accepted
        try:
            return self.reply.result(max(end - courier.clock.now_us(), 0) / SECOND_US)
        except MessagingError as refusal:
            error = refusal
        except TimeoutError:
            error = OperationTimeoutError(
                f"the send to {self.command.path} got no reply in time, and its messages may or "
                "may not be enqueued. If you send them again, keep their message ids: an entity "
                "with duplicate detection then enqueues them once"
            )
        courier.note(error)
        if not is_worth_a_retry(error):
            raise error
        tries.failed(error)
        now, began = courier.clock.now_us(), self.began
        left = began + courier.timeout_us - now
        if left <= 0 or tries.end_at() <= now or courier.policy.max_tries == 1:
            raise exhausted([error], (now - began) / SECOND_US) from error
        remainder = Remainder(self.command)
        remainder.note(error)
        return remainder.send(
            lambda command: courier.ask(command, tries, left, earlier=[error], began=began)
        )


class _DirectRoute:
    """Sends to the courier's own namespace; the route of a factory that is not paired."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:  # noqa: ARG002 - all are alike
        """Send, and return when the messages are durable."""
        return self._courier.ask(command)

    def is_diverting(self, path: str) -> bool:  # noqa: ARG002
        """Return False: nothing is diverted."""
        return False

    def submit(self, command: Send, lane: Lane, *, divert: bool) -> Wait:  # noqa: ARG002
        """Start a send, and return a function that waits for its receipt."""
        return self._courier.begin_send(command).wait

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages."""
        self._courier.ask(command)


class NamespaceUser(Closable):
    """Base of factory and manager: owns a namespace, a courier to it and its state."""

    def __init__(
        self,
        namespace: Namespace,
        retry_policy: RetryPolicy | None,
        clock: Clock | None,
        *,
        address: str = "",
        random: Random | None = None,
    ) -> None:
        self.address = address  # of the namespace; empty: unknown
        self._life = Life()
        self._namespace = namespace
        self._courier = Courier(
            namespace,
            clock or SystemClock(),
            retry_policy or RetryPolicy(),
            self._life,
            random or SystemRandom(),
        )

    @property
    def courier(self) -> Courier:
        """The courier of this factory or manager; pairing and the syphon use it."""
        return self._courier

    def close(self) -> None:
        """Wait for operations in flight and close the namespace; may be called twice."""
        if self._life.enter(FactoryState.CLOSING):
            self._namespace.close()
            self._life.enter(FactoryState.CLOSED)
