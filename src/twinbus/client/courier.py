"""Carries commands to a namespace under a retry policy: the one way clients reach it.

Every send is numbered, so that the namespace recognises one that comes again after its reply was
lost.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import TypeVar

import pyarrow as pa

from twinbus.broker.commands import (
    NO_WAIT,
    CancelScheduled,
    Command,
    Origin,
    Send,
    SendReceipt,
)
from twinbus.broker.origins import sender_source
from twinbus.client.retry import BusyGate, RetryPolicy, exhausted, is_worth_a_retry
from twinbus.client.route import Lane, Route, Wait
from twinbus.client.state import FactoryState, Life
from twinbus.clock import Clock, SystemClock, to_us
from twinbus.errors import MessagingError, OperationTimeoutError
from twinbus.lifetimes import Closable
from twinbus.limits import SECOND_US
from twinbus.message import BrokeredMessage
from twinbus.namespace.contract import Namespace

R = TypeVar("R")


class _Numbers:
    """Numbers the messages to one entity.

    Each entity has its own, so that one that is failing leaves no gaps in the others'.
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
    """Asks, and asks again where that may help. Used from many threads."""

    def __init__(
        self, namespace: Namespace, clock: Clock, policy: RetryPolicy, life: Life, random: Random
    ) -> None:
        self.namespace = namespace
        self.clock = clock
        self.policy = policy
        self.life = life
        self.random = random
        self._gate = BusyGate()
        self._numbers: dict[str, _Numbers] = {}  # by path
        self.route: Route = _DirectRoute(self)  # of the sends of clients

    def new_send(self, path: str, messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> Send:
        """Return a send that the namespace recognises when it comes again."""
        count = len(messages) if isinstance(messages, list | tuple | pa.RecordBatch) else 0
        numbers = self._numbers.get(path)
        if numbers is None:
            source = sender_source(self.random.getrandbits(64) or 1)
            numbers = self._numbers.setdefault(path, _Numbers(source))
        return Send(path, messages, Origin(numbers.source, numbers.take(count)))

    def ask(
        self,
        command: Command[R],
        is_hopeless: Callable[[], bool] = lambda: False,
        time_left_us: int | None = None,
    ) -> R:
        """Return the reply, or raise the last error when the policy is exhausted.

        `is_hopeless` is looked at after a failure: whether to leave it at that. `time_left_us`
        is given where the operation began before.
        """
        began = self.clock.now_us()
        wait = to_us(getattr(command, "wait", NO_WAIT))  # a long poll's own time comes on top
        span = self.timeout_us + wait if time_left_us is None else time_left_us
        deadline = began + span
        history: list[MessagingError] = []
        while True:
            self.life.check()
            if history and is_hopeless():  # it may have become so during the pause
                raise exhausted(history, (self.clock.now_us() - began) / SECOND_US)
            self._pass_gate(deadline, history)
            now = self.clock.now_us()
            try:
                return self.namespace.ask(command, max(deadline - now, 1) / SECOND_US)
            except MessagingError as error:
                now = self.clock.now_us()
                if now < began:  # the clock was set back: the time left must not grow with that
                    began, deadline = now, now + span
                self.note(error)
                if not is_worth_a_retry(error):
                    raise
                history.append(error)
                pause = self.policy.backoff_us(len(history), self.random.random())
                tired = len(history) == self.policy.max_tries
                if tired or now + pause >= deadline or is_hopeless():
                    raise exhausted(history, (now - began) / SECOND_US) from error
            self.clock.sleep_us(pause)

    def _pass_gate(self, deadline: int, history: list[MessagingError]) -> None:
        """Wait until the gate is open; raise when the operation has no time for that."""
        while True:
            now = self.clock.now_us()
            reason = self._gate.reason(now)
            if reason is None:
                return
            if self._gate.closed_until >= deadline or self.policy.max_tries == 1:
                history.append(reason)
                raise exhausted(history, 0.0)
            self.clock.sleep_us(self._gate.closed_until - now)

    def note(self, error: MessagingError) -> None:
        """Close the gate when the namespace said that it is busy."""
        self._gate.note(error, self.clock.now_us())

    @property
    def timeout_us(self) -> int:
        """How long an operation may take, all tries together."""
        return to_us(self.policy.operation_timeout)

    def busy_until(self, now: int) -> int:
        """Return until when nothing goes to the namespace; the past when something may."""
        return self._gate.closed_until if self._gate.reason(now) else now

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over once, without waiting and without trying again."""
        return self.namespace.submit(command)

    def begin_send(self, command: Send) -> "Submitted":
        """Hand a send over without waiting for its reply; waits only while the gate is closed."""
        self.life.check()
        began = self.clock.now_us()
        self._pass_gate(began + self.timeout_us, [])
        return Submitted(self, command, self.namespace.submit(command), began)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A send under way."""

    courier: Courier
    command: Send
    reply: "Future[SendReceipt]"
    began: int

    def wait(self, is_hopeless: Callable[[], bool] = lambda: False) -> SendReceipt:
        """Return the receipt; when the first try fails, go on under the retry policy."""
        try:
            return self.reply.result(self._time_left_us() / SECOND_US)
        except MessagingError as refusal:
            error = refusal
        except TimeoutError:
            error = OperationTimeoutError("no answer in time; whether the work was done is unknown")
        self.courier.note(error)
        if not is_worth_a_retry(error) or is_hopeless():
            raise error
        return self.courier.ask(self.command, is_hopeless, self._time_left_us())

    def _time_left_us(self) -> int:
        gone = max(self.courier.clock.now_us() - self.began, 0)  # it may have been set back
        return max(self.courier.timeout_us - gone, 0)


class _DirectRoute:
    """Straight to the courier's own namespace."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def send(self, command: Send, lane: Lane, *, was_tried: bool = False) -> SendReceipt:  # noqa: ARG002 - all are alike
        """Send, and return when the messages are durable."""
        return self._courier.ask(command)

    def is_diverting(self, path: str) -> bool:  # noqa: ARG002
        """Never."""
        return False

    def submit(self, command: Send, lane: Lane, *, divert: bool) -> Wait:  # noqa: ARG002
        """Begin to send."""
        return self._courier.begin_send(command).wait

    def cancel(self, command: CancelScheduled) -> None:
        """Cancel scheduled messages."""
        self._courier.ask(command)


class NamespaceUser(Closable):
    """What a factory and a manager are: a namespace, a courier to it, and a life that ends."""

    def __init__(
        self,
        namespace: Namespace,
        retry_policy: RetryPolicy | None,
        clock: Clock | None,
        *,
        address: str = "",
        random: Random | None = None,
    ) -> None:
        self.address = address  # where the namespace is; empty: nobody knows
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
        """What carries its commands; for those who build on it, as pairing does."""
        return self._courier

    def close(self) -> None:
        """Finish what is under way and let go of the namespace; closing twice is harmless."""
        if self._life.enter(FactoryState.CLOSING):
            self._namespace.close()
            self._life.enter(FactoryState.CLOSED)
