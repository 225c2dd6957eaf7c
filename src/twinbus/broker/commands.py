"""Everything a namespace can be asked. A command is a value; its type says what comes back.

sending      Send, CancelScheduled
receiving    Receive, ReceiveDeferred, Peek, Settle, RenewLocks
sessions     AcceptSession, RenewSession, ReleaseSession, GetSessionState, SetSessionState
ranges       LeaseRange, RenewRange, ReadRange, SettleRange, ReleaseRange
managing     CreateEntity, UpdateEntity, DeleteEntity, GetEntity, ListEntities,
             GetRuntimeProperties, CreateRule, DeleteRule, ListRules, ReadMeter
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Generic, TypeVar
from uuid import UUID

import pyarrow as pa

from twinbus.entities import EntityDescription, RuleDescription, RuntimeProperties
from twinbus.limits import DEFAULT_LEASE_DURATION, MAX_RECEIVE_BYTES
from twinbus.message import BrokeredMessage

R_co = TypeVar("R_co", covariant=True)
NO_WAIT = timedelta(0)


class Command(Generic[R_co]):
    """A request whose reply is an R_co."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EntityCommand(Command[R_co]):
    """A request about one entity."""

    path: str


class ReceiveMode(Enum):
    """What happens to a message when it is delivered."""

    PEEK_LOCK = "peek_lock"  # locked until settled or lapsed
    RECEIVE_AND_DELETE = "receive_and_delete"  # gone: delivered at most once


class Disposition(Enum):
    """What a receiver decides about a locked message."""

    COMPLETE = "complete"
    ABANDON = "abandon"
    DEFER = "defer"
    DEAD_LETTER = "dead_letter"
    RELEASE = "release"  # give back unread: does not count as a failed delivery


# -- sending -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """Where transferred messages come from; each is enqueued once, for ever.

    `source` names a backlog queue or a sender; `numbers` number its messages, one per row.
    """

    source: str
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class SendReceipt:
    """The messages are durable."""

    sequence_numbers: Sequence[int]  # one per message; 0: nothing was enqueued (ping, duplicate)


@dataclass(frozen=True, slots=True)
class Send(EntityCommand[SendReceipt]):
    """Take a batch, all or nothing. Messages may be objects or columns."""

    messages: Sequence[BrokeredMessage] | pa.RecordBatch
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class CancelScheduled(EntityCommand[None]):
    """Cancel scheduled messages by the numbers their receipt gave; all or nothing."""

    sequence_numbers: Sequence[int]


# -- receiving ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionLock:
    """Proof of holding a session."""

    session_id: str
    lock_token: UUID


@dataclass(frozen=True, slots=True)
class Receive(EntityCommand[pa.RecordBatch]):
    """Deliver up to `max_messages`, waiting for the first; the batch has DELIVERY_SCHEMA."""

    max_messages: int = 1
    wait: timedelta = NO_WAIT  # an empty batch comes back when it is over
    mode: ReceiveMode = ReceiveMode.PEEK_LOCK
    session: SessionLock | None = None
    max_bytes: int = MAX_RECEIVE_BYTES  # at least one message comes whatever its size


@dataclass(frozen=True, slots=True)
class ReceiveDeferred(EntityCommand[pa.RecordBatch]):
    """Deliver deferred messages by number; all or nothing."""

    sequence_numbers: Sequence[int]
    mode: ReceiveMode = ReceiveMode.PEEK_LOCK
    session: SessionLock | None = None


@dataclass(frozen=True, slots=True)
class Peek(EntityCommand[pa.RecordBatch]):
    """Browse without locking: active, locked, deferred and scheduled messages by number."""

    from_sequence_number: int = 0
    max_messages: int = 1
    max_bytes: int = MAX_RECEIVE_BYTES


@dataclass(frozen=True, slots=True)
class Settle(EntityCommand[None]):
    """Decide about locked messages. Lost locks raise; the others are settled all the same."""

    lock_tokens: pa.Array  # message.LOCK_TOKEN
    disposition: Disposition
    reason: str | None = None  # with DEAD_LETTER
    description: str | None = None  # with DEAD_LETTER


@dataclass(frozen=True, slots=True)
class RenewLocks(EntityCommand[datetime]):
    """Lock these messages for another lock duration from now; returns until when."""

    lock_tokens: pa.Array


# -- sessions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """A session is held."""

    lock: SessionLock
    locked_until_utc: datetime


@dataclass(frozen=True, slots=True)
class AcceptSession(EntityCommand[SessionGrant]):
    """Hold a session exclusively: the named one, or the next with messages (None)."""

    session_id: str | None = None
    wait: timedelta = NO_WAIT


@dataclass(frozen=True, slots=True)
class RenewSession(EntityCommand[datetime]):
    """Hold the session for another lock duration; returns until when."""

    session: SessionLock


@dataclass(frozen=True, slots=True)
class ReleaseSession(EntityCommand[None]):
    """Give the session back, and its locked messages with it."""

    session: SessionLock


@dataclass(frozen=True, slots=True)
class GetSessionState(EntityCommand[bytes | None]):
    """Read the state stored with a session."""

    session: SessionLock


@dataclass(frozen=True, slots=True)
class SetSessionState(EntityCommand[None]):
    """Store state with a session; None removes it."""

    session: SessionLock
    state: bytes | None


# -- ranges ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeLease:
    """A range of a queue is this owner's until the lease lapses."""

    owner: str
    epoch: int  # names the lease; a later lease of any of its messages makes it stale
    first: int  # sequence numbers, both included
    last: int
    message_count: int
    size_in_bytes: int
    leased_until_utc: datetime


@dataclass(frozen=True, slots=True)
class LeaseRange(EntityCommand[RangeLease | None]):
    """Lease the next deliverable messages, or a given range; None: nothing to lease.

    With `first` and `last` the same range can be taken again after a crash: an older lease of
    the same owner gives way, one of another owner raises until it lapses.
    """

    owner: str
    max_messages: int
    first: int | None = None
    last: int | None = None
    duration: timedelta = DEFAULT_LEASE_DURATION


@dataclass(frozen=True, slots=True)
class RenewRange(EntityCommand[datetime]):
    """Keep a lease for another duration from now; returns until when."""

    epoch: int
    duration: timedelta = DEFAULT_LEASE_DURATION


@dataclass(frozen=True, slots=True)
class ReadRange(EntityCommand[pa.RecordBatch]):
    """Read leased messages that are not settled, as often as you like: the same every time."""

    epoch: int
    first: int
    last: int
    max_bytes: int = MAX_RECEIVE_BYTES


@dataclass(frozen=True, slots=True)
class DeadLetterPart:
    """Messages of a range to put aside, and why."""

    sequence_numbers: Sequence[int]
    reason: str
    description: str | None = None


@dataclass(frozen=True, slots=True)
class SettleRange(EntityCommand[None]):
    """Complete intervals of a leased range and dead-letter others. Repeating it is harmless."""

    epoch: int
    completed: Sequence[tuple[int, int]] = ()  # sequence numbers, both included
    dead_lettered: Sequence[DeadLetterPart] = ()


@dataclass(frozen=True, slots=True)
class ReleaseRange(EntityCommand[None]):
    """Give a lease back; what is not settled becomes deliverable."""

    epoch: int


# -- managing ----------------------------------------------------------------------------------


class EntityKind(Enum):
    """What can be listed."""

    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


@dataclass(frozen=True, slots=True)
class CreateEntity(Command[EntityDescription]):
    """Create a queue, topic or subscription."""

    description: EntityDescription
    rule: RuleDescription | None = None  # of a subscription, in place of the catch-all


@dataclass(frozen=True, slots=True)
class UpdateEntity(Command[EntityDescription]):
    """Change the settings that are not fixed at creation."""

    description: EntityDescription


@dataclass(frozen=True, slots=True)
class DeleteEntity(EntityCommand[None]):
    """Delete an entity and all it holds."""


@dataclass(frozen=True, slots=True)
class GetEntity(EntityCommand[EntityDescription]):
    """Describe an entity."""


@dataclass(frozen=True, slots=True)
class ListEntities(Command[Sequence[EntityDescription]]):
    """List entities of a kind, ordered by path."""

    kind: EntityKind
    topic_path: str | None = None  # for subscriptions


@dataclass(frozen=True, slots=True)
class GetRuntimeProperties(EntityCommand[RuntimeProperties]):
    """Tell what an entity holds."""


@dataclass(frozen=True, slots=True)
class CreateRule(EntityCommand[None]):
    """Add a rule to a subscription."""

    rule: RuleDescription


@dataclass(frozen=True, slots=True)
class DeleteRule(EntityCommand[None]):
    """Remove a rule from a subscription."""

    name: str


@dataclass(frozen=True, slots=True)
class ListRules(EntityCommand[Sequence[RuleDescription]]):
    """List the rules of a subscription, ordered by name."""


@dataclass(frozen=True, slots=True)
class ReadMeter(Command[pa.RecordBatch]):
    """Read the operations metered since the start, one row per entity, kind and outcome."""


def kind_of(command: Command[object]) -> str:
    """Return the name a command is metered and reported under."""
    return type(command).__name__
