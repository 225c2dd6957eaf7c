"""Operations as they are metered: their purpose and their size."""

from enum import Enum
from typing import Final, NamedTuple

from twinbus.errors import MessagingError

EMPTY: Final = "Empty"  # the outcome of a receive without messages
UNIT_BYTES: Final = 64 * 1024  # messages are billed in units of this size


class Purpose(Enum):
    """The purpose of an operation."""

    APPLICATION = "application"
    BACKLOG = "backlog"  # a diverted send
    PING = "ping"
    IDLE_POLL = "idle_poll"  # a poll of a backlog queue that found nothing
    SYPHON = "syphon"  # bringing home: reads of the backlog, sends to the primary
    MANAGEMENT = "management"

    __hash__ = object.__hash__  # Enum's is a slow Python function, and every operation is counted


class Load(NamedTuple):
    """The messages and bytes of an operation."""

    messages: int = 0
    size: int = 0
    units: int = 1  # an operation without messages counts as one


class Operation(NamedTuple):
    """Equal operations, counted when they are answered."""

    path: str
    kind: str
    purpose: Purpose
    outcome: str
    load: Load  # of all these operations together
    times: int = 1

    def refused(self, error: MessagingError) -> "Operation":
        """Return the same operation with the outcome of a refusal."""
        return self._replace(outcome=error.code, load=Load(units=self.times))
