"""Where the requests of a server's connections meet the broker: one turn for all that arrived.

The event loop reads every socket that is ready and then has one turn: everything that arrived is
decided together, flushed once, and answered. That is group commit, and no thread is woken. While
flushes are slow, the broker's own thread has the turns instead, so that the loop goes on reading,
answering pings and health checks.
"""

import asyncio
import logging
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from twinbus.limits import QUICK_TURN_US, SLOW_TURN_US
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.requests import Request

_log = logging.getLogger("twinbus.server")


class CountingSelector(selectors.DefaultSelector):
    """A selector that knows how many sockets were ready when it last looked."""

    ready = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until some are ready."""
        found = super().select(timeout)
        self.ready = len(found)
        return found


class TurnPlace:
    """Decides whether the loop may have the turn, from how long flushes take. Pure.

    It follows a moving average. One slow flush is a hiccup, such as the beginning of a new segment
    of the log; two in a row are a slow disk.
    """

    def __init__(self) -> None:
        self.is_loop = True
        self._average_us = 0.0

    def observe(self, flush_us: int) -> None:
        """Note how long the last flush took."""
        self._average_us += (min(flush_us, 3 * SLOW_TURN_US) - self._average_us) / 4
        if self._average_us > SLOW_TURN_US:
            self.is_loop = False
        elif self._average_us < QUICK_TURN_US:
            self.is_loop = True


class Interceptor(Protocol):
    """Stands between the clients of a server and its broker, as fault injection does."""

    def arrived(self, requests: Iterable[Request]) -> list[Request]:
        """Take requests out; return those that are to be carried out."""
        ...

    def attaching(self, path: str) -> None:
        """Raise why a client of Service Bus may not attach a link to an entity."""
        ...


class Turns:
    """Collects what arrives in the loop, and has it carried out."""

    def __init__(
        self,
        namespace: EmbeddedNamespace,
        selector: CountingSelector,
        after_turn: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._selector = selector  # of the loop
        self._after_turn = after_turn  # called in the loop when replies may be there
        self._loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()  # of the loop
        self._arrivals: list[Request] = []
        self._is_due = False
        self._expected = 0  # requests of the last turn: as many may come back
        self._elsewhere: deque[Callable[[], None]] = deque()  # replies given in other threads
        self._flushes = namespace.flushes
        self.place = TurnPlace()
        self.interceptor: Interceptor | None = None

    def add(self, requests: Iterable[Request], *, may_turn: bool = False) -> None:
        """Have requests of clients carried out, together with others that arrive now.

        `may_turn` says that they come straight from a socket. If no other socket is ready, and
        nobody else was answered with the last turn, then nobody can share this turn: it begins at
        once, and saves a round of the loop.
        """
        if self.interceptor is not None:
            requests = self.interceptor.arrived(requests)
        self.carry_out(requests, may_turn=may_turn)

    def call_later(self, seconds: float, requests: Iterable[Request]) -> None:
        """Have requests carried out after some time."""
        self._loop.call_later(seconds, self.carry_out, requests)

    def carry_out(self, requests: Iterable[Request], *, may_turn: bool = False) -> None:
        """Have requests carried out, whoever asks; see `add`."""
        self._arrivals.extend(requests)
        if self._is_due:
            return
        if may_turn and self._selector.ready == 1 and self._expected <= 1:
            self._turn()
            return
        self._is_due = True
        self._loop.call_soon(self._gather, 0)

    def withdraw(self, requests: Iterable[Request]) -> None:
        """Let requests that wait go unanswered."""
        gone = set(map(id, requests))
        self._arrivals = [request for request in self._arrivals if id(request) not in gone]
        self._namespace.withdraw(requests)

    def _gather(self, seen: int) -> None:
        """Have the turn, unless those of the last turn are still coming back.

        Clients that were answered together ask again together. As long as each round of the loop
        brings more of them, they share a flush.
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
        if flushes.count != self._flushes.count:
            self._flushes = flushes
            self.place.observe(flushes.last_us)

    def call_in_loop(self, deliver: Callable[[], None]) -> None:
        """Call something in the loop, from another thread."""
        self._elsewhere.append(deliver)
        if len(self._elsewhere) == 1:
            self._call_soon(self._deliver_elsewhere)

    def _call_soon(self, callback: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop has ended, and its connections with it
            self._elsewhere.clear()

    def _deliver_elsewhere(self) -> None:
        while self._elsewhere:
            deliver = self._elsewhere.popleft()
            try:
                deliver()
            except Exception:  # noqa: BLE001 - one bad reply must not hold up the others
                _log.exception("a reply could not be delivered")
        self._look_at_flushes()
        self._after_turn()
