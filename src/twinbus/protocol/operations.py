"""What an operation was for, and what one may carry: the words of the meter and of its ledger."""

from enum import Enum
from typing import Final

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
