"""The commands of a namespace. A command is a value; its type parameter is the type of its reply.

sending      Send, CancelScheduled
receiving    Receive, ReceiveDeferred, Peek, Settle, RenewLocks, DeleteMessages
sessions     AcceptSession, RenewSession, ReleaseSession, GetSessionState, SetSessionState,
             ListSessions
ranges       LeaseRange, RenewRange, ReadRange, SettleRange, ReleaseRange
managing     CreateEntity, UpdateEntity, DeleteEntity, GetEntity, ListEntities,
             GetRuntimeProperties, CreateRule, UpdateRule, DeleteRule, ListRules, ReadMeter
keys         PutKey, DeleteKey, ListKeys
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from types import NoneType
from typing import Generic, TypeVar, get_args
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.entities import EntityDescription, RuleDescription, RuntimeProperties
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    DEFAULT_LEASE_DURATION,
    MAX_ADDRESS_CHARACTERS,
    MAX_BATCH_MESSAGES,
    MAX_DEAD_LETTER_PARTS,
    MAX_ID_CHARACTERS,
    MAX_INT64,
    MAX_LEASE_DURATION,
    MAX_LEASE_MESSAGES,
    MAX_LISTED_SESSIONS,
    MAX_ORIGIN_DEPTH,
    MAX_OWNER_CHARACTERS,
    MAX_REASON_CHARACTERS,
    MAX_RECEIVE_BYTES,
    MAX_RECEIVE_MESSAGES,
    MAX_SESSION_STATE_BYTES,
    MAX_WAIT,
)
from twinbus.message import LOCK_TOKEN, BrokeredMessage, check_moment
from twinbus.protocol.keys import SharedAccessKey
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.values import check_optional_text, check_span, check_text, check_type, check_whole

R_co = TypeVar("R_co", covariant=True)
NO_WAIT = timedelta(0)


def _check_numbers(what: str, numbers: object, low: int = -(2**63)) -> None:
    """Refuse anything but 64-bit integers, and more of them than a batch may have messages."""
    if isinstance(numbers, range):
        count = numbers.stop - numbers.start  # `len` fails for very large ranges
        are_valid = numbers.step == 1 and low <= numbers.start <= numbers.stop <= 2**62
    elif type(numbers) is np.ndarray:
        count, are_valid = numbers.size, numbers.dtype == np.int64 and numbers.ndim == 1
        are_valid = are_valid and (not count or int(numbers.min()) >= low)
    else:
        are_valid = type(numbers) in (list, tuple) and all(
            type(number) is int and low <= number <= MAX_INT64
            for number in numbers  # type: ignore[attr-defined]
        )
        count = len(numbers) if are_valid else 0  # type: ignore[arg-type]
    if not are_valid:
        least = "64 bits" if low < 0 else f"{low} to 2**63 - 1"
        raise InvalidArgumentError(f"{what} must be a sequence of whole numbers of {least}")
    if count > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"{what} has {count} numbers; the limit is {MAX_BATCH_MESSAGES}. Use several commands"
        )


def _check_intervals(what: str, intervals: object) -> None:
    """Refuse anything but pairs of first and last, and more of them than a batch has messages."""
    check_type(what, intervals, list, tuple)
    assert isinstance(intervals, list | tuple)
    if len(intervals) > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"{what} has {len(intervals)} intervals; the limit is {MAX_BATCH_MESSAGES}. Settle in "
            "parts"
        )
    if not all(map(_is_interval, intervals)):
        raise InvalidArgumentError(f"{what} must contain pairs of first and last, of 64 bits each")


def _is_interval(pair: object) -> bool:
    return (
        type(pair) in (list, tuple)
        and len(pair) == 2  # type: ignore[arg-type]
        and all(type(number) is int and -MAX_INT64 <= number <= MAX_INT64 for number in pair)  # type: ignore[attr-defined]
    )


def _check_tokens(tokens: object) -> None:
    if not isinstance(tokens, pa.Array) or tokens.type != LOCK_TOKEN or tokens.null_count:
        raise InvalidArgumentError(
            "lock_tokens must be a column of lock tokens, none missing; see message.tokens_of"
        )
    if len(tokens) > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"lock_tokens has {len(tokens)} tokens; the limit is {MAX_BATCH_MESSAGES}. Settle in "
            "parts"
        )


def _check_lease(duration: object) -> None:
    check_span("duration", duration, timedelta(microseconds=1), MAX_LEASE_DURATION)


def _check_reason(reason: object, description: object) -> None:
    check_optional_text("reason", reason, MAX_REASON_CHARACTERS)
    check_optional_text("description", description, MAX_REASON_CHARACTERS)


class Command(Generic[R_co]):
    """A command whose reply has the type R_co."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EntityCommand(Command[R_co]):
    """A command for an entity."""

    path: str  # case-insensitive

    def __post_init__(self) -> None:
        path = self.path
        if type(path) is not str or len(path) > MAX_ADDRESS_CHARACTERS or not path.isprintable():
            check_text("path", path, MAX_ADDRESS_CHARACTERS)


class ReceiveMode(Enum):
    """What happens to a message at its delivery."""

    PEEK_LOCK = "peek_lock"  # it is locked until it is settled or the lock expires
    RECEIVE_AND_DELETE = "receive_and_delete"  # it is deleted: delivered at most once


class Disposition(Enum):
    """How a receiver settles a locked message."""

    COMPLETE = "complete"
    ABANDON = "abandon"
    DEFER = "defer"
    DEAD_LETTER = "dead_letter"
    RELEASE = "release"  # return it unread: does not count as a failed delivery


# -- sending -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of messages: the namespace enqueues each message of an origin once.

    `source` is a backlog queue, whose messages are remembered forever, or a sender (origins.py).
    `numbers` are the numbers of the messages in the source, one per message. A caller that repeats
    a send, because its reply was lost, uses the same origin.
    """

    source: str
    numbers: Sequence[int] | npt.NDArray[np.int64]  # a range is the cheapest form
    also: "Origin | None" = None  # a second origin of the same messages: one known is enough

    def __post_init__(self) -> None:
        if type(self.source) is not str:
            check_type("source", self.source, str)
        origin_kind(self.source)
        _check_numbers("numbers", self.numbers, low=0)
        if self.also is None:
            return
        check_type("also", self.also, Origin)
        if self.also.depth >= MAX_ORIGIN_DEPTH:
            raise InvalidArgumentError(
                f"an origin has more than {MAX_ORIGIN_DEPTH} sources, nested in `also`; use only "
                "the sources that numbered the messages"
            )

    @property
    def best_known(self) -> "Origin":
        """The sender that numbered the messages, if there is one; otherwise this origin.

        A message that a sender tried at the primary and then diverted has two origins. With the
        sender's, the copy that is brought home and the direct copy have the same origin.
        """
        named: Origin | None = self
        while named is not None:
            if origin_kind(named.source) is OriginKind.SENDER:
                return named
            named = named.also
        return self

    @property
    def depth(self) -> int:
        """The number of its sources."""
        return 1 + (self.also.depth if self.also is not None else 0)


@dataclass(frozen=True, slots=True)
class SendReceipt:
    """The reply to a send: the messages are durable."""

    sequence_numbers: Sequence[int]  # per message; 0: not enqueued (ping, duplicate, spilled ...)


@dataclass(frozen=True, slots=True)
class Send(EntityCommand[SendReceipt]):
    """Enqueue a batch, all or none. Messages are objects or columns."""

    messages: Sequence[BrokeredMessage] | pa.RecordBatch
    origin: Origin | None = None

    def __post_init__(self) -> None:
        path = self.path
        if type(path) is not str or len(path) > MAX_ADDRESS_CHARACTERS or not path.isprintable():
            EntityCommand.__post_init__(self)
        if type(self.origin) is not Origin:
            check_type("origin", self.origin, Origin, NoneType)
        messages = self.messages
        if type(messages) is not list:
            if isinstance(messages, pa.RecordBatch):
                return
            check_type("messages", messages, tuple, list)
        for message in messages:
            if type(message) is not BrokeredMessage:
                check_type("a message", message, BrokeredMessage)


@dataclass(frozen=True, slots=True)
class CancelScheduled(EntityCommand[None]):
    """Cancel scheduled messages by the sequence numbers of their receipt; all or none.

    `origin` is one number of a sender. A caller that repeats a cancel, because its reply was lost,
    uses the same origin, so that the broker recognises the repetition.
    """

    sequence_numbers: Sequence[int]
    origin: Origin | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("sequence_numbers", self.sequence_numbers)
        check_type("origin", self.origin, Origin, NoneType)
        origin = self.origin
        if origin is not None and (
            origin_kind(origin.source) is not OriginKind.SENDER
            or len(origin.numbers) != 1
            or origin.also is not None
        ):
            raise InvalidArgumentError("the origin of a cancel must be one number of one sender")


# -- receiving ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionLock:
    """Proof that a receiver has locked a session."""

    session_id: str
    lock_token: UUID

    def __post_init__(self) -> None:
        check_text("session_id", self.session_id, MAX_ID_CHARACTERS, may_have_nul=True)
        check_type("lock_token", self.lock_token, UUID)


@dataclass(frozen=True, slots=True)
class Receive(EntityCommand[pa.RecordBatch]):
    """Deliver up to `max_messages`, waiting for the first; the batch has DELIVERY_SCHEMA.

    A caller that sets `takes_rows` may get `protocol.rows.DeliveryRows` in place of the batch.
    """

    max_messages: int = 1
    wait: timedelta = NO_WAIT  # the reply is an empty batch when it is over
    mode: ReceiveMode = ReceiveMode.PEEK_LOCK
    session: SessionLock | None = None
    max_bytes: int = MAX_RECEIVE_BYTES  # the first message is delivered even if it is larger
    takes_rows: bool = False  # rows are cheaper for few messages

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_whole("max_messages", self.max_messages, 1, MAX_RECEIVE_MESSAGES)
        check_whole("max_bytes", self.max_bytes, -MAX_INT64, MAX_INT64)
        check_span("wait", self.wait, NO_WAIT, MAX_WAIT)
        check_type("mode", self.mode, ReceiveMode)
        check_type("session", self.session, SessionLock, NoneType)
        check_type("takes_rows", self.takes_rows, bool)


@dataclass(frozen=True, slots=True)
class ReceiveDeferred(EntityCommand[pa.RecordBatch]):
    """Deliver deferred messages by sequence number; all or none."""

    sequence_numbers: Sequence[int]
    mode: ReceiveMode = ReceiveMode.PEEK_LOCK
    session: SessionLock | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("sequence_numbers", self.sequence_numbers)
        check_type("mode", self.mode, ReceiveMode)
        check_type("session", self.session, SessionLock, NoneType)


@dataclass(frozen=True, slots=True)
class Peek(EntityCommand[pa.RecordBatch]):
    """Browse active, locked, deferred and scheduled messages by number, without locking them."""

    from_sequence_number: int = 0
    max_messages: int = 1
    max_bytes: int = MAX_RECEIVE_BYTES
    session_id: str | None = None  # only messages of this session; it need not be locked

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("from_sequence_number", [self.from_sequence_number])
        check_whole("max_messages", self.max_messages, 1, MAX_RECEIVE_MESSAGES)
        check_whole("max_bytes", self.max_bytes, -MAX_INT64, MAX_INT64)
        check_optional_text("session_id", self.session_id, MAX_ID_CHARACTERS, may_have_nul=True)


@dataclass(frozen=True, slots=True)
class Settle(EntityCommand[None]):
    """Settle locked messages. Lost locks raise, but the other messages are settled."""

    lock_tokens: pa.Array  # message.LOCK_TOKEN
    disposition: Disposition
    reason: str | None = None  # only with DEAD_LETTER
    description: str | None = None  # only with DEAD_LETTER

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_tokens(self.lock_tokens)
        check_type("disposition", self.disposition, Disposition)
        _check_reason(self.reason, self.description)


@dataclass(frozen=True, slots=True)
class RenewLocks(EntityCommand[datetime]):
    """Lock messages for another lock duration from now; returns when the locks expire."""

    lock_tokens: pa.Array

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_tokens(self.lock_tokens)


@dataclass(frozen=True, slots=True)
class DeleteMessages(EntityCommand[int]):
    """Delete deliverable messages, the oldest first; returns the number of deleted messages.

    Locked, deferred and scheduled messages are not deleted. An entity that requires sessions needs
    the lock of the session whose messages are to be deleted.
    """

    max_messages: int
    enqueued_before_utc: datetime | None = None  # None: of any time
    session: SessionLock | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_whole("max_messages", self.max_messages, 1, MAX_BATCH_MESSAGES)
        if self.enqueued_before_utc is not None:
            check_moment("enqueued_before_utc", self.enqueued_before_utc)
        check_type("session", self.session, SessionLock, NoneType)


# -- sessions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The reply to AcceptSession: the session is locked."""

    lock: SessionLock
    locked_until_utc: datetime


@dataclass(frozen=True, slots=True)
class AcceptSession(EntityCommand[SessionGrant]):
    """Lock a session: the named one, or the next one with messages (None)."""

    session_id: str | None = None
    wait: timedelta = NO_WAIT

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_optional_text("session_id", self.session_id, MAX_ID_CHARACTERS, may_have_nul=True)
        check_span("wait", self.wait, NO_WAIT, MAX_WAIT)


@dataclass(frozen=True, slots=True)
class SessionCommand(EntityCommand[R_co]):
    """A command for a locked session."""

    session: SessionLock

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_type("session", self.session, SessionLock)


@dataclass(frozen=True, slots=True)
class RenewSession(SessionCommand[datetime]):
    """Lock the session for another lock duration; returns when the lock expires."""


@dataclass(frozen=True, slots=True)
class ReleaseSession(SessionCommand[None]):
    """Release the session, with its locked messages."""


@dataclass(frozen=True, slots=True)
class GetSessionState(SessionCommand[bytes | None]):
    """Read the state stored with a session."""


@dataclass(frozen=True, slots=True)
class SetSessionState(SessionCommand[None]):
    """Store state with a session; None removes it."""

    state: bytes | None

    def __post_init__(self) -> None:
        SessionCommand.__post_init__(self)
        check_type("state", self.state, bytes, NoneType)
        size = len(self.state or b"")
        if size > MAX_SESSION_STATE_BYTES:
            raise InvalidArgumentError(
                f"the session state has {size} bytes; the limit is {MAX_SESSION_STATE_BYTES}. "
                "Store large content elsewhere and keep a reference"
            )


@dataclass(frozen=True, slots=True)
class ListSessions(EntityCommand[Sequence[str]]):
    """List the sessions that have messages or a state, or those whose state changed since a time.

    Scheduled messages do not count. If sessions change between two pages, an id may be missing or
    occur twice.
    """

    skip: int = 0
    max_sessions: int = 100
    state_updated_after_utc: datetime | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_whole("skip", self.skip, 0, MAX_INT64)
        check_whole("max_sessions", self.max_sessions, 1, MAX_LISTED_SESSIONS)
        if self.state_updated_after_utc is not None:
            check_moment("state_updated_after_utc", self.state_updated_after_utc)


# -- ranges ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeLease:
    """A range of a queue that its owner has leased until the lease expires."""

    owner: str
    epoch: int  # identifies the lease; a later lease of any of its messages makes it stale
    first: int  # sequence numbers, both included
    last: int
    message_count: int
    size_in_bytes: int
    leased_until_utc: datetime
    origin: str = ""  # the queue's name as origin of transfers; unique, even for the same path
    oldest_utc: datetime | None = None  # enqueued time of its oldest message
    left_behind: int = 0  # number of other deliverable messages in the queue
    waited_for: str | None = None  # the owner of a lease or lock that delayed this lease
    intervals: Sequence[tuple[int, int]] = ()  # of its messages, both ends included

    def __post_init__(self) -> None:
        _check_intervals("intervals", self.intervals)
        pairs = tuple((first, last) for first, last in self.intervals)  # the wire makes lists
        object.__setattr__(self, "intervals", pairs)


@dataclass(frozen=True, slots=True)
class LeaseRange(EntityCommand[RangeLease | None]):
    """Lease the next deliverable messages, or a given range; None if there is nothing to lease.

    With `first` and `last`, the same range can be leased again after a crash. This replaces an
    older lease of the same owner; a lease of another owner raises until it expires.
    """

    owner: str
    max_messages: int
    first: int | None = None
    last: int | None = None
    duration: timedelta = DEFAULT_LEASE_DURATION
    wait: timedelta = NO_WAIT  # how long to wait for messages if there is nothing to lease
    past: Sequence[int] | None = None  # in order: leases that may be skipped; None: any
    max_bytes: int | None = None  # the first message is leased even if it is larger

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_text("owner", self.owner, MAX_OWNER_CHARACTERS)
        check_whole("max_messages", self.max_messages, 1, MAX_LEASE_MESSAGES)
        _check_lease(self.duration)
        check_span("wait", self.wait, NO_WAIT, MAX_WAIT)
        if self.past is not None:
            _check_numbers("past", self.past)
        if self.max_bytes is not None:
            check_whole("max_bytes", self.max_bytes, 1, MAX_INT64)
        _check_numbers("first and last", [n for n in (self.first, self.last) if n is not None])
        if (self.first is None) != (self.last is None):
            raise InvalidArgumentError("give both first and last of the range, or neither")
        if self.first is not None and self.last is not None and self.first > self.last:
            raise InvalidArgumentError(
                f"the range {self.first} to {self.last} is empty; first must not be above last"
            )
        if self.wait and self.first is not None:
            raise InvalidArgumentError(
                "`wait` is for the next messages, not for a given range; leave out `wait`, or "
                "`first` and `last`"
            )


@dataclass(frozen=True, slots=True)
class RenewRange(EntityCommand[datetime]):
    """Renew a lease for another duration from now; returns when it expires."""

    epoch: int
    duration: timedelta = DEFAULT_LEASE_DURATION

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("epoch", [self.epoch])
        _check_lease(self.duration)


@dataclass(frozen=True, slots=True)
class ReadRange(EntityCommand[pa.RecordBatch]):
    """Read the unsettled messages of a lease; can be repeated with the same result."""

    epoch: int
    first: int
    last: int
    max_bytes: int = MAX_RECEIVE_BYTES

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("epoch, first and last", [self.epoch, self.first, self.last])
        check_whole("max_bytes", self.max_bytes, -MAX_INT64, MAX_INT64)


@dataclass(frozen=True, slots=True)
class DeadLetterPart:
    """Messages of a range to dead-letter, with the reason."""

    sequence_numbers: Sequence[int]
    reason: str
    description: str | None = None

    def __post_init__(self) -> None:
        _check_numbers("sequence_numbers", self.sequence_numbers)
        check_type("reason", self.reason, str)
        _check_reason(self.reason, self.description)


@dataclass(frozen=True, slots=True)
class SettleRange(EntityCommand[None]):
    """Complete intervals of a leased range and dead-letter others. It can be repeated safely."""

    epoch: int
    completed: Sequence[tuple[int, int]] = ()  # sequence numbers, both ends included
    dead_lettered: Sequence[DeadLetterPart] = ()
    release: bool = False  # also release the lease with its other messages

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("epoch", [self.epoch])
        check_type("release", self.release, bool)
        _check_intervals("completed", self.completed)
        check_type("dead_lettered", self.dead_lettered, list, tuple)
        if len(self.dead_lettered) > MAX_DEAD_LETTER_PARTS:
            raise InvalidArgumentError(
                f"dead_lettered has {len(self.dead_lettered)} parts; the limit is "
                f"{MAX_DEAD_LETTER_PARTS}. Settle in parts"
            )
        for part in self.dead_lettered:
            check_type("a part of dead_lettered", part, DeadLetterPart)
        if sum(len(part.sequence_numbers) for part in self.dead_lettered) > MAX_BATCH_MESSAGES:
            raise InvalidArgumentError(
                f"dead_lettered has more than {MAX_BATCH_MESSAGES} messages. Settle in parts"
            )


@dataclass(frozen=True, slots=True)
class ReleaseRange(EntityCommand[None]):
    """Release a lease; its unsettled messages become deliverable."""

    epoch: int

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_numbers("epoch", [self.epoch])


# -- managing ----------------------------------------------------------------------------------


class EntityKind(Enum):
    """The kinds of entities that can be listed."""

    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


@dataclass(frozen=True, slots=True)
class CreateEntity(Command[EntityDescription]):
    """Create a queue, topic or subscription."""

    description: EntityDescription
    rule: RuleDescription | None = None  # of a subscription, instead of the catch-all rule

    def __post_init__(self) -> None:
        check_type("description", self.description, *get_args(EntityDescription))
        check_type("rule", self.rule, RuleDescription, NoneType)


@dataclass(frozen=True, slots=True)
class UpdateEntity(Command[EntityDescription]):
    """Change the settings that are not fixed at creation."""

    description: EntityDescription

    def __post_init__(self) -> None:
        check_type("description", self.description, *get_args(EntityDescription))


@dataclass(frozen=True, slots=True)
class DeleteEntity(EntityCommand[None]):
    """Delete an entity with all its messages."""


@dataclass(frozen=True, slots=True)
class GetEntity(EntityCommand[EntityDescription]):
    """Return the description of an entity."""


@dataclass(frozen=True, slots=True)
class ListEntities(Command[Sequence[EntityDescription]]):
    """List entities of a kind, ordered by path."""

    kind: EntityKind
    topic_path: str | None = None  # for subscriptions

    def __post_init__(self) -> None:
        check_type("kind", self.kind, EntityKind)
        check_optional_text("topic_path", self.topic_path, MAX_ADDRESS_CHARACTERS)


@dataclass(frozen=True, slots=True)
class GetRuntimeProperties(EntityCommand[RuntimeProperties]):
    """Return the counts and sizes of an entity."""


@dataclass(frozen=True, slots=True)
class CreateRule(EntityCommand[None]):
    """Add a rule to a subscription."""

    rule: RuleDescription

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_type("rule", self.rule, RuleDescription)


@dataclass(frozen=True, slots=True)
class UpdateRule(EntityCommand[None]):
    """Replace the filter and the action of a subscription's rule."""

    rule: RuleDescription

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_type("rule", self.rule, RuleDescription)


@dataclass(frozen=True, slots=True)
class DeleteRule(EntityCommand[None]):
    """Remove a rule from a subscription."""

    name: str

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_text("name", self.name, MAX_ADDRESS_CHARACTERS)


@dataclass(frozen=True, slots=True)
class ListRules(EntityCommand[Sequence[RuleDescription]]):
    """List the rules of a subscription, ordered by name."""


@dataclass(frozen=True, slots=True)
class ReadMeter(Command[pa.RecordBatch]):
    """Read the operations metered since the start, one row per entity, kind and outcome."""


# -- keys --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutKey(Command[None]):
    """Add a key, or replace the key with its name."""

    key: SharedAccessKey

    def __post_init__(self) -> None:
        check_type("key", self.key, SharedAccessKey)


@dataclass(frozen=True, slots=True)
class DeleteKey(Command[None]):
    """Remove a key; its tokens become invalid."""

    name: str
    entity_path: str | None = None  # None: a key of the namespace

    def __post_init__(self) -> None:
        check_text("name", self.name, MAX_ID_CHARACTERS)
        check_optional_text("entity_path", self.entity_path, MAX_ADDRESS_CHARACTERS)


@dataclass(frozen=True, slots=True)
class ListKeys(Command[Sequence[SharedAccessKey]]):
    """List all keys with their secrets, those of the namespace first."""
