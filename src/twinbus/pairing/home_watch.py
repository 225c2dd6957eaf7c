"""With `preserve_order`: looks into backlog queues, to find out whether their messages are home.

A look browses the backlog queue of an entity that waits for its return: once per ping interval, and
more often while sends wait for the last messages. The home watch submits looks without waiting
for their replies. The ticker calls `tick`; replies arrive on other threads and are queued.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pyarrow as pa

from twinbus.client.courier import Courier
from twinbus.errors import MessagingError
from twinbus.limits import LOOK_BYTES, LOOK_MESSAGES
from twinbus.pairing.board import Board
from twinbus.pairing.homing import Look, result_of_look
from twinbus.protocol.commands import Peek


class HomeWatch:
    """Makes the looks that the board reports as due."""

    def __init__(self, secondary: Courier, board: Board, nudge: Callable[[], None]) -> None:
        self._secondary = secondary
        self._board = board
        self._nudge = nudge  # requests a tick
        self._ended: deque[tuple[Look, pa.RecordBatch | MessagingError]] = deque()

    def tick(self, now: int) -> None:
        """Record the looks that ended, and begin those that are due."""
        while self._ended:
            look, reply = self._ended.popleft()
            if isinstance(reply, MessagingError):
                self._secondary.note(reply)
                self._board.looked(look, reply)
            else:
                wall_us = self._secondary.clock.wall_us()
                self._board.looked(look, result_of_look(reply, look, wall_us))
        for look in self._board.due_looks(now):
            queue = self._board.queues[look.queue]
            busy = self._secondary.busy_error(queue)
            if busy is not None:
                self._board.looked(look, busy)
                continue
            reply_of = self._secondary.submit(Peek(queue, look.first, LOOK_MESSAGES, LOOK_BYTES))
            reply_of.add_done_callback(partial(self._end, look))

    def _end(self, look: Look, done: "Future[pa.RecordBatch]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, MessagingError):
            error = MessagingError(f"the look into the backlog queue failed: {error!r}")
        self._ended.append((look, error if error is not None else done.result()))
        self._nudge()
