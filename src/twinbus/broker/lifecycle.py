"""The life of a message in one entity: (state, cause) -> state.

    PENDING --ENQUEUED--> ACTIVE --RECEIVED--> LOCKED --COMPLETED--> GONE
       |--SCHEDULED--> SCHEDULED --ACTIVATED--> GONE (and ACTIVE under a new number)
       |--PARKED--> TRANSFERRING --FORWARDED--> GONE (and enqueued in the forward target)

This shows the usual ways; a pair that is not in TABLE is illegal. A dead-lettered message is
GONE here and ACTIVE in the dead-letter queue, in one commit. If dead letters are forwarded, it is
TRANSFERRING in the dead-letter queue until the end of the turn. States are small integers: a queue
stores one byte per message and changes the states of many messages with one array operation.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twinbus.errors import MessagingError

UInt8s = npt.NDArray[np.uint8]


class State(IntEnum):
    """The state of a message in an entity."""

    GONE = 0  # settled; its row and its space may be reclaimed
    PENDING = 1  # accepted, but not durable yet: it must not be visible
    ACTIVE = 2  # deliverable
    LOCKED = 3  # locked by a receiver
    DEFERRED = 4  # can only be received by its sequence number
    DEFERRED_LOCKED = 5  # locked by a receiver; becomes DEFERRED again when the lock ends
    SCHEDULED = 6  # waits for its scheduled time
    LEASED = 7  # part of a leased range
    TRANSFERRING = 8  # parked: waits to be forwarded


class Cause(IntEnum):
    """What happened to a message."""

    ENQUEUED = 0
    SCHEDULED = 1
    PARKED = 2
    REFUSED = 3  # the commit failed
    RECEIVED = 4
    COMPLETED = 5
    ABANDONED = 6
    DEFERRED = 7
    DEAD_LETTERED = 8
    LAPSED = 9  # the lock or lease expired or was released, or a deletion was refused by the log
    EXPIRED = 10
    ACTIVATED = 11
    CANCELLED = 12
    LEASED = 13
    FORWARDED = 14


TABLE: dict[tuple[State, Cause], State] = {
    (State.PENDING, Cause.ENQUEUED): State.ACTIVE,
    (State.PENDING, Cause.SCHEDULED): State.SCHEDULED,
    (State.PENDING, Cause.PARKED): State.TRANSFERRING,
    (State.PENDING, Cause.REFUSED): State.GONE,
    (State.ACTIVE, Cause.RECEIVED): State.LOCKED,
    (State.ACTIVE, Cause.EXPIRED): State.GONE,
    (State.ACTIVE, Cause.LEASED): State.LEASED,
    (State.LOCKED, Cause.COMPLETED): State.GONE,
    (State.LOCKED, Cause.ABANDONED): State.ACTIVE,
    (State.LOCKED, Cause.LAPSED): State.ACTIVE,
    (State.LOCKED, Cause.DEFERRED): State.DEFERRED,
    (State.LOCKED, Cause.DEAD_LETTERED): State.GONE,
    (State.DEFERRED, Cause.RECEIVED): State.DEFERRED_LOCKED,
    (State.DEFERRED, Cause.EXPIRED): State.GONE,
    (State.DEFERRED_LOCKED, Cause.COMPLETED): State.GONE,
    (State.DEFERRED_LOCKED, Cause.ABANDONED): State.DEFERRED,
    (State.DEFERRED_LOCKED, Cause.LAPSED): State.DEFERRED,
    (State.DEFERRED_LOCKED, Cause.DEFERRED): State.DEFERRED,
    (State.DEFERRED_LOCKED, Cause.DEAD_LETTERED): State.GONE,
    (State.SCHEDULED, Cause.ACTIVATED): State.GONE,
    (State.SCHEDULED, Cause.CANCELLED): State.GONE,
    (State.LEASED, Cause.COMPLETED): State.GONE,
    (State.LEASED, Cause.DEAD_LETTERED): State.GONE,
    (State.LEASED, Cause.LAPSED): State.ACTIVE,
    (State.TRANSFERRING, Cause.FORWARDED): State.GONE,
    (State.TRANSFERRING, Cause.ENQUEUED): State.ACTIVE,  # the message stays here
    (State.TRANSFERRING, Cause.EXPIRED): State.GONE,
}

# Causes after which a message is GONE, whatever its state was. The assertion checks this.
FINAL = frozenset(cause for (_, cause), after in TABLE.items() if after is State.GONE)
assert all(after is State.GONE for (_, cause), after in TABLE.items() if cause in FINAL)

# How the log stores a state: locks are not stored (a crash releases them), and leases are stored
# separately, by interval.
DURABLE: dict[State, State] = {
    State.GONE: State.GONE,
    State.ACTIVE: State.ACTIVE,
    State.LOCKED: State.ACTIVE,
    State.DEFERRED: State.DEFERRED,
    State.DEFERRED_LOCKED: State.DEFERRED,
    State.SCHEDULED: State.SCHEDULED,
    State.LEASED: State.ACTIVE,
    State.TRANSFERRING: State.TRANSFERRING,
}

LOST = 99  # logged in place of a cause if the body of a message is missing from the log

_ILLEGAL = 255
_STEPS = np.full((len(State), len(Cause)), _ILLEGAL, np.uint8)
for (_state, _cause), _next in TABLE.items():
    _STEPS[_state, _cause] = _next


class BrokenInvariantError(MessagingError):
    """The broker's own state is inconsistent; the caller is not at fault."""


class IllegalStepError(BrokenInvariantError):
    """A state change that the table does not allow."""


def step(states: UInt8s, cause: Cause) -> UInt8s:
    """Return the states after the cause; raise IllegalStepError if TABLE lacks a pair."""
    after: UInt8s = _STEPS[states, cause.value]
    if (after == _ILLEGAL).any():
        at = int(np.flatnonzero(after == _ILLEGAL)[0])
        raise IllegalStepError(
            f"a message in the state {State(states[at]).name} cannot have the cause "
            f"{cause.name}. This is a defect of the broker: report it with its log",
            state=State(states[at]).name,
            cause=cause.name,
        )
    return after
