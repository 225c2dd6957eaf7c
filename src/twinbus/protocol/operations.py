"""What an operation was for, and what one may carry: the words of the meter and of its ledger."""

from enum import Enum
from typing import Final, NamedTuple

from twinbus.errors import MessagingError

EMPTY: Final = "Empty"  # the outcome of a receive that found nothing
UNIT_BYTES: Final = 64 * 1024  # what one billed operation may carry


class Purpose(Enum):
    """What an operation was for."""

    APPLICATION = "application"
    BACKLOG = "backlog"  # a send that was diverted
    PING = "ping"
    IDLE_POLL = "idle_poll"  # a look into a backlog queue that found nothing
    SYPHON = "syphon"  # bringing home: reading the backlog, sending to the primary
    MANAGEMENT = "management"

    __hash__ = object.__hash__  # that of Enum is a Python function, and every operation is counted


class Load(NamedTuple):
    """What one operation carried."""

    messages: int = 0
    size: int = 0
    units: int = 1  # an operation that carries nothing is still one


class Operation(NamedTuple):
    """Operations that are alike, to be counted when they are answered."""

    path: str
    kind: str
    purpose: Purpose
    outcome: str
    load: Load  # of all of them
    times: int = 1

    def refused(self, error: MessagingError) -> "Operation":
        """Return the same operation, refused instead."""
        return self._replace(outcome=error.code, load=Load(units=self.times))
