"""With `preserve_order`: which diverted messages of an entity are not home yet. Pure.

With `preserve_order` all messages of an entity go to one backlog queue. After an outage the sends
of the entity stay diverted until every message that this factory diverted has left that queue. The
home watch looks into the queue, and `Diversions` decides what the result of a look means:

    HOME        no diverted message of the entity waits, and none was diverted since the look began
    CAUGHT_UP   messages leave the queue and only young or few of them wait: a short pause of the
                sends lets the last ones come home
    WAITING     messages of the entity wait, and the sends go on to the backlog
    MORE        messages of other entities are in front: look behind them

A receipt without a number is uncertain: the backlog queue may have stored the message where a look
cannot see it yet. The sequence numbers of a queue only grow. So the number of a later receipt is
higher than that of the uncertain message, and a look up to this number sees the message, too.

board.py calls this module under its lock.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa

from twinbus import compute as pc
from twinbus.clock import moment_us
from twinbus.limits import LOOK_MESSAGES, MAX_INT64
from twinbus.pairing.backlog import restored
from twinbus.protocol.commands import SendReceipt


class Finding(Enum):
    """What a look into a backlog queue means for its entity."""

    HOME = "home"
    CAUGHT_UP = "caught_up"
    WAITING = "waiting"
    MORE = "more"


@dataclass(frozen=True, slots=True)
class Look:
    """A look into the backlog queue of an entity, and what was diverted when it began."""

    path: str
    queue: int
    first: int  # sequence number to look from
    until: int  # the last sequence number that matters
    begun: int  # diversions that had begun when the look began
    is_quiet: bool  # all these diversions had ended


@dataclass(frozen=True, slots=True)
class LookResult:
    """What a look saw."""

    number: int | None  # of the first message of the entity up to `until`; None: there is none
    age_us: int = 0  # the age of that message
    is_small: bool = False  # the page was not full
    behind: int | None = (
        None  # more messages may follow from this number on; None: none that matter
    )


def result_of_look(page: pa.RecordBatch, look: Look, wall_us: int) -> LookResult:
    """Return what a page of a backlog queue shows; `page` begins at the first number of `look`."""
    if not page.num_rows:
        return LookResult(None, is_small=True)
    numbers = page.column("sequence_number").to_numpy()
    paths = pc.utf8_lower(restored(page).paths)
    is_own = pc.equal(paths, look.path.lower()).fill_null(False).to_numpy(zero_copy_only=False)
    own = np.flatnonzero(is_own & (numbers <= look.until))
    is_small = page.num_rows < LOOK_MESSAGES
    if len(own):
        at = int(own[0])
        enqueued = moment_us(page.column("enqueued_time_utc")[at].as_py())
        return LookResult(int(numbers[at]), wall_us - enqueued, is_small)
    last = int(numbers[-1])
    return LookResult(None, is_small=is_small, behind=last + 1 if last < look.until else None)


@dataclass(slots=True)
class Diversions:
    """What this factory diverted to one entity."""

    queue: int  # index of the backlog queue of the entity
    has_numbers: bool  # receipts of the secondary have sequence numbers
    begun: int = 0  # diversions that began
    home: int = 0  # value of `begun` when all of them were home
    in_flight: int = 0  # diversions that began and have not ended
    last: int = 0  # the highest number of a receipt
    doubt: int = 0  # diversions up to this one may have numbers above `last`; 0: none has
    first: int = 0  # no message of the entity waits in front of this number
    oldest: int | None = None  # first message of the entity that the last look saw

    @property
    def is_empty(self) -> bool:
        """Whether every diverted message is known to be home."""
        return self.begun == self.home

    def begin(self) -> int:
        """Record that a diversion begins; return its place among all diversions of the entity."""
        self.begun += 1
        self.in_flight += 1
        return self.begun

    def end(self, place: int, receipt: SendReceipt | None) -> None:
        """Record the end of a diversion; without a receipt, it may have stored its messages."""
        self.in_flight -= 1
        if not self.has_numbers:
            return
        numbers = receipt.sequence_numbers if receipt is not None else ()
        if not len(numbers) or min(numbers) <= 0:
            self.doubt = self.begun
            return
        self.last = max(self.last, *numbers)
        if place > self.doubt:
            self.doubt = 0

    def look(self, path: str) -> Look:
        """Return a look that can show whether everything is home."""
        until = self.last if self.has_numbers else MAX_INT64
        return Look(path, self.queue, self.first, until, self.begun, self.in_flight == 0)

    def finding(self, look: Look, result: LookResult, patience_us: int) -> Finding:
        """Return what a look means; `patience_us` is how long sends may pause at most."""
        oldest, number = self.oldest, result.number
        has_moved = oldest is not None and (number is None or number > oldest)
        if result.behind is not None:
            self.first = max(self.first, result.behind)
            return Finding.MORE
        if result.number is None:
            if self.doubt:
                return Finding.WAITING
            is_still = look.is_quiet and look.begun == self.begun
            return Finding.HOME if is_still else Finding.CAUGHT_UP
        self.first = max(self.first, result.number)
        self.oldest = result.number
        is_near = result.is_small or result.age_us <= patience_us
        return Finding.CAUGHT_UP if has_moved and is_near else Finding.WAITING

    def came_home(self) -> None:
        """Record that everything is home."""
        self.home, self.oldest, self.first = self.begun, None, 0
