"""What an operation was for, and what one may carry: the words of the meter and of its ledger."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

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


@dataclass(frozen=True, slots=True)
class Load:
    """What one operation carried."""

    messages: int = 0
    size: int = 0
    units: int = 1  # an operation that carries nothing is still one


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation to be counted when it is answered."""

    path: str
    kind: str
    purpose: Purpose
    outcome: str
    load: Load

    def refused(self, error: MessagingError) -> "Operation":
        """Return the same operation, refused instead."""
        return Operation(self.path, self.kind, self.purpose, error.code, Load())
