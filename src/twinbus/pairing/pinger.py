"""Pings failed-over entities to find out whether the primary is available again.

The factory sends one ping per entity and interval, however many clients it has. The pinger submits
pings without waiting for their replies, so that an entity that does not answer delays neither other
pings nor its own next one. The ticker calls `tick`; replies arrive on other threads and are queued.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from random import Random

from twinbus import tracing
from twinbus.client.courier import Courier
from twinbus.errors import MessagingError, ServerBusyError, UnauthorizedError
from twinbus.limits import PING_CONTENT_TYPE, PING_TIME_TO_LIVE
from twinbus.message import BrokeredMessage
from twinbus.pairing.board import Board, DuePing
from twinbus.pairing.failures import says_unavailable
from twinbus.protocol.commands import Send, SendReceipt


def ping_message(random: Random) -> BrokeredMessage:
    """Return a ping; it has a new session id, so that entities with sessions accept it."""
    return BrokeredMessage(
        message_id=f"{random.getrandbits(128):032x}",
        content_type=PING_CONTENT_TYPE,
        time_to_live=PING_TIME_TO_LIVE,
        session_id=f"{random.getrandbits(128):032x}",
    )


class Pinger:
    """Sends the pings that the board reports as due."""

    def __init__(self, primary: Courier, board: Board, nudge: Callable[[], None]) -> None:
        self._primary = primary
        self._board = board
        self._nudge = nudge  # requests a tick
        self._ended: deque[tuple[DuePing, MessagingError | None]] = deque()

    def tick(self, now: int) -> None:
        """Record the pings that ended, and send the pings that are due."""
        while self._ended:
            ping, error = self._ended.popleft()
            if error is not None:
                self._primary.note(error)
            stays_failed_over = error is not None and _stays_failed_over(error)
            self._board.pinged(ping, error, stays_failed_over=stays_failed_over)
        busy_until = partial(self._primary.busy_until, now=now)
        for ping in self._board.due_pings(now, busy_until):
            probe = Send(ping.path, [ping_message(self._primary.random)])
            answer = self._primary.submit(probe)
            if tracing.hook is not None:
                tracing.hook.ping(self._primary.peer, ping.path, answer)
            answer.add_done_callback(lambda done, ping=ping: self._end(ping, done))  # type: ignore[misc]

    def next_due(self, now: int) -> int:
        """Return when the board is due next; a busy entity is not pinged while it is busy."""
        return self._board.next_due(partial(self._primary.busy_until, now=now))

    def _end(self, ping: DuePing, done: "Future[SendReceipt]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, MessagingError):
            error = MessagingError(f"the ping failed: {error!r}")
        self._ended.append((ping, error))
        self._nudge()


def _stays_failed_over(error: MessagingError) -> bool:
    """Whether the entity stays failed over after a ping failed with this error.

    It does if the entity is unavailable or busy, or if the key lacks the right to send. Any other
    error of the caller, such as an entity that does not exist, ends the failover, so that the next
    send gets that error from the primary.
    """
    return says_unavailable(error) or isinstance(error, ServerBusyError | UnauthorizedError)
