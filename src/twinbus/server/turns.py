"""Hands the requests of a server's connections to the broker: one turn for all that arrived.

The event loop reads every socket that is ready and then runs one turn: the broker executes all
requests that arrived, flushes once, and answers. This is group commit without waking a thread.
While flushes are slow, the broker's own thread runs the turns instead, so that the loop keeps
reading and answers pings and health checks.
"""

import asyncio
import logging
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from twinbus.limits import DELIVERY_SLICE_S, QUICK_TURN_US, SLOW_TURN_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.requests import Request

_log = logging.getLogger("twinbus.server")


class CountingSelector(selectors.DefaultSelector):
    """A selector that counts its calls, and the sockets that were ready at the last call."""

    ready = 0
    rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until sockets are ready, and count them."""
        found = super().select(timeout)
        self.ready = len(found)
        self.rounds += 1
        return found


class TurnPlace:
    """Decides from the duration of flushes whether the loop may run the turns. Pure.

    It uses a moving average. One slow flush is an exception, such as the start of a new segment of
    the log; two in a row mean a slow disk.
    """

    def __init__(self) -> None:
        self.is_loop = True
        self._average_us = 0.0

    def observe(self, flush_us: int) -> None:
        """Record how long the last flush took."""
        self._average_us += (min(flush_us, 3 * SLOW_TURN_US) - self._average_us) / 4
        if self._average_us > SLOW_TURN_US:
            self.is_loop = False
        elif self._average_us < QUICK_TURN_US:
            self.is_loop = True


class Interceptor(Protocol):
    """Receives requests before the broker does, as fault injection needs."""

    def arrived(self, requests: Iterable[Request]) -> list[Request]:
        """Remove or delay requests; return those that the broker executes now."""
        ...

    def attaching(self, path: str) -> None:
        """Raise an error if a Service Bus client must not attach a link to the entity."""
        ...


class Turns:
    """Collects requests that arrive in the loop, and has the broker execute them."""

    def __init__(
        self,
        namespace: EmbeddedNamespace,
        selector: CountingSelector,
        after_turn: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._selector = selector  # the loop's
        self._after_turn = after_turn  # called in the loop when there may be replies
        self._loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()  # the loop's
        self._arrivals: list[Request] = []
        self._is_due = False
        self._expected = 0  # requests of the last turn: their clients may send as many again
        self._foreign_replies: deque[Callable[[], None]] = deque()  # replies from other threads
        self._flushes = namespace.flushes
        self.place = TurnPlace()
        self.interceptor: Interceptor | None = None

    def add(self, requests: Iterable[Request], *, may_turn: bool = False) -> None:
        """Execute requests of clients, together with others that arrive now.

        `may_turn` means that they come directly from a socket. If no other socket is ready, and the
        last turn answered no other client, then no other request can share this turn. So the turn
        starts at once, which saves a round of the loop.
        """
        if self.interceptor is not None:
            requests = self.interceptor.arrived(requests)
        self.carry_out(requests, may_turn=may_turn)

    def call_later(self, seconds: float, requests: Iterable[Request]) -> None:
        """Execute requests after a delay."""
        self._loop.call_later(seconds, self.carry_out, requests)

    def carry_out(self, requests: Iterable[Request], *, may_turn: bool = False) -> None:
        """Execute requests without passing them to the interceptor; see `add`."""
        self._arrivals.extend(requests)
        if self._is_due:
            return
        if may_turn and self._selector.ready == 1 and self._expected <= 1:
            self._turn()
            return
        self._is_due = True
        self._loop.call_soon(self._gather, 0)

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Remove waiting requests; they get no reply."""
        gone = set(map(id, requests))
        self._arrivals = [request for request in self._arrivals if id(request) not in gone]
        self._namespace.withdraw(requests)

    def _gather(self, seen: int) -> None:
        """Run the turn, unless clients of the last turn are still sending their next requests.

        Clients that were answered together tend to send again together. While each round of the
        loop brings more of their requests, the turn waits, so that they share a flush.
        """
        count = len(self._arrivals)
        if seen < count < self._expected:
            self._loop.call_soon(self._gather, count)
        else:
            self._turn()

    def _turn(self) -> None:
        self._is_due = False
        requests, self._arrivals = self._arrivals, []
        self._expected = len(requests)
        self._namespace.hand_over(requests, in_own_thread=self.place.is_loop)
        self._look_at_flushes()
        self._after_turn()

    def _look_at_flushes(self) -> None:
        flushes = self._namespace.flushes
        if flushes.total != self._flushes.total:
            self._flushes = flushes
            self.place.observe(flushes.last_us)

    def call_in_loop(self, deliver: Callable[[], None]) -> None:
        """Call a function in the loop, from another thread."""
        self._foreign_replies.append(deliver)
        if len(self._foreign_replies) == 1:
            self._call_soon(self._deliver_foreign_replies)

    def _call_soon(self, callback: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop has ended, and so have its connections
            self._foreign_replies.clear()

    def _deliver_foreign_replies(self) -> None:
        """Deliver replies for a short time; large ones must not keep the loop from reading."""
        until = self._loop.time() + DELIVERY_SLICE_S
        while self._foreign_replies:
            deliver = self._foreign_replies.popleft()
            try:
                deliver()
            except Exception:  # noqa: BLE001 - one bad reply must not stop the others
                _log.exception("A reply could not be delivered because of an internal error")
            if self._foreign_replies and self._loop.time() >= until:
                self._loop.call_soon(self._deliver_foreign_replies)
                break
        self._look_at_flushes()
        self._after_turn()
