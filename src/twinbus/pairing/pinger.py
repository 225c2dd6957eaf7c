"""Pings: empty probes that find out whether a failed-over entity is back.

Each entity gets one per interval, however many the clients are. They are handed over without
waiting, so that an entity that does not answer holds up neither the others nor its next ping.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from random import Random

from twinbus.client.courier import Courier
from twinbus.errors import MessagingError, ServerBusyError, UnauthorizedError
from twinbus.limits import PING_CONTENT_TYPE, PING_TIME_TO_LIVE
from twinbus.message import BrokeredMessage
from twinbus.pairing.board import Board, DuePing
from twinbus.pairing.failures import says_unavailable
from twinbus.protocol.commands import Send, SendReceipt


def ping_message(random: Random) -> BrokeredMessage:
    """Return a probe; entities with sessions take it because it has one of its own."""
    return BrokeredMessage(
        message_id=f"{random.getrandbits(128):032x}",
        content_type=PING_CONTENT_TYPE,
        time_to_live=PING_TIME_TO_LIVE,
        session_id=f"{random.getrandbits(128):032x}",
    )


class Pinger:
    """Pings what a board says is due."""

    def __init__(self, primary: Courier, board: Board, nudge: Callable[[], None]) -> None:
        self._primary = primary
        self._board = board
        self._nudge = nudge  # calls for a tick
        self._ended: deque[tuple[DuePing, MessagingError | None]] = deque()

    def tick(self, now: int) -> int:
        """Take in the pings that ended and send those that are due; return when to look again."""
        while self._ended:
            ping, error = self._ended.popleft()
            if error is not None:
                self._primary.note(error)
            is_down = error is not None and _leaves_it_down(error)
            self._board.pinged(ping, error, leaves_it_down=is_down)
        held_until = partial(self._primary.busy_until, now=now)
        for ping in self._board.due_pings(now, held_until):
            probe = Send(ping.path, [ping_message(self._primary.random)])
            answer = self._primary.submit(probe)
            answer.add_done_callback(lambda done, ping=ping: self._end(ping, done))  # type: ignore[misc]
        return self._board.next_due(held_until)

    def _end(self, ping: DuePing, done: "Future[SendReceipt]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, MessagingError):
            error = MessagingError(f"the ping failed: {error!r}")
        self._ended.append((ping, error))
        self._nudge()


def _leaves_it_down(error: MessagingError) -> bool:
    """Whether a ping's refusal leaves its entity failed over.

    A busy entity, or a key that lacks the right, says nothing about the entity. Any other fault of
    the caller, such as an entity that does not exist, ends the failover: callers must hear it.
    """
    return says_unavailable(error) or isinstance(error, ServerBusyError | UnauthorizedError)
