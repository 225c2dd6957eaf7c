"""Carries commands to a namespace under a retry policy: the one way clients reach it."""

from concurrent.futures import Future
from random import Random, SystemRandom
from typing import TypeVar

from twinbus.broker.commands import NO_WAIT, Command, Send, SendReceipt
from twinbus.client.retry import BusyGate, RetryPolicy, exhausted, is_worth_a_retry
from twinbus.client.state import FactoryState, Life
from twinbus.clock import Clock, SystemClock, to_us
from twinbus.errors import MessagingError
from twinbus.lifetimes import Closable
from twinbus.limits import SECOND_US
from twinbus.namespace.contract import Namespace

R = TypeVar("R")


class Courier:
    """Asks, and asks again where that may help. Used from many threads."""

    def __init__(
        self, namespace: Namespace, clock: Clock, policy: RetryPolicy, life: Life, random: Random
    ) -> None:
        self.namespace = namespace
        self.clock = clock
        self.policy = policy
        self.life = life
        self._random = random
        self._gate = BusyGate()

    def ask(self, command: Command[R]) -> R:
        """Return the reply, or raise the last error when the policy is exhausted."""
        began = self.clock.now_us()
        wait = to_us(getattr(command, "wait", NO_WAIT))  # a long poll's own time comes on top
        deadline = began + to_us(self.policy.operation_timeout) + wait
        history: list[MessagingError] = []
        while True:
            self.life.check()
            self._pass_gate(deadline, history)
            now = self.clock.now_us()
            try:
                return self.namespace.ask(command, max(deadline - now, 1) / SECOND_US)
            except MessagingError as error:
                now = self.clock.now_us()
                self.note(error)
                if not is_worth_a_retry(error):
                    raise
                history.append(error)
                pause = self.policy.backoff_us(len(history), self._random.random())
                tired = len(history) == self.policy.max_tries
                if tired or now + pause >= deadline:
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

    def await_gate(self) -> None:
        """Wait until the gate is open."""
        while True:
            now = self.clock.now_us()
            if self._gate.reason(now) is None:
                return
            self.clock.sleep_us(self._gate.closed_until - now)

    def submit(self, command: Command[R]) -> "Future[R]":
        """Hand a command over once, without waiting and without trying again."""
        return self.namespace.submit(command)

    def send(self, command: Send) -> SendReceipt:
        """Send; what pairing puts itself in front of."""
        return self.ask(command)


class NamespaceUser(Closable):
    """What a factory and a manager are: a namespace, a courier to it, and a life that ends."""

    def __init__(
        self, namespace: Namespace, retry_policy: RetryPolicy | None, clock: Clock | None
    ) -> None:
        self._life = Life()
        self._namespace = namespace
        self._courier = Courier(
            namespace,
            clock or SystemClock(),
            retry_policy or RetryPolicy(),
            self._life,
            SystemRandom(),
        )

    def close(self) -> None:
        """Finish what is under way and let go of the namespace; closing twice is harmless."""
        if self._life.enter(FactoryState.CLOSING):
            self._namespace.close()
            self._life.enter(FactoryState.CLOSED)
