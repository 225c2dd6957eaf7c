"""Commands for the messages of a queue or subscription: deliver, browse, settle, renew, delete."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from types import NoneType

import pyarrow as pa

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_BATCH_MESSAGES,
    MAX_ID_CHARACTERS,
    MAX_INT64,
    MAX_RECEIVE_BYTES,
    MAX_RECEIVE_MESSAGES,
    MAX_WAIT,
)
from twinbus.message import LOCK_TOKEN, check_moment
from twinbus.protocol.commands.command import NO_WAIT, EntityCommand, check_numbers, check_reason
from twinbus.protocol.commands.sessions import SessionLock
from twinbus.values import check_optional_text, check_span, check_type, check_whole


def _check_tokens(tokens: object) -> None:
    if not isinstance(tokens, pa.Array) or tokens.type != LOCK_TOKEN or tokens.null_count:
        kind = type(tokens).__name__
        if isinstance(tokens, pa.Array):
            kind = f"an array of {tokens.type} with {tokens.null_count} nulls"
        raise InvalidArgumentError(
            f"lock_tokens is {kind}; it must be an Arrow array of {LOCK_TOKEN} without nulls. Make "
            "one with message.tokens_of"
        )
    if len(tokens) > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"lock_tokens has {len(tokens)} tokens; the limit is {MAX_BATCH_MESSAGES}. Settle in "
            "parts"
        )


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
    RELEASE = "release"  # unlock it; this does not count as a failed delivery


@dataclass(frozen=True, slots=True)
class Receive(EntityCommand[pa.RecordBatch]):
    """Deliver up to `max_messages`, waiting for the first; the batch has DELIVERY_SCHEMA.

    A caller that sets `takes_rows` may get `protocol.rows.DeliveryRows` in place of the batch.
    """

    max_messages: int = 1
    wait: timedelta = NO_WAIT  # for the first message; without one, the reply is an empty batch
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
        check_numbers("sequence_numbers", self.sequence_numbers)
        check_type("mode", self.mode, ReceiveMode)
        check_type("session", self.session, SessionLock, NoneType)


@dataclass(frozen=True, slots=True)
class Peek(EntityCommand[pa.RecordBatch]):
    """Browse messages from a sequence number on, without locking them.

    Active, locked, deferred and scheduled messages are returned.
    """

    from_sequence_number: int = 0
    max_messages: int = 1
    max_bytes: int = MAX_RECEIVE_BYTES
    session_id: str | None = None  # only messages of this session; it need not be locked

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_numbers("from_sequence_number", [self.from_sequence_number])
        check_whole("max_messages", self.max_messages, 1, MAX_RECEIVE_MESSAGES)
        check_whole("max_bytes", self.max_bytes, -MAX_INT64, MAX_INT64)
        check_optional_text("session_id", self.session_id, MAX_ID_CHARACTERS, may_have_nul=True)


@dataclass(frozen=True, slots=True)
class Settle(EntityCommand[None]):
    """Settle locked messages. If some locks are lost, settle the other messages, then raise."""

    lock_tokens: pa.Array  # message.LOCK_TOKEN
    disposition: Disposition
    reason: str | None = None  # only with DEAD_LETTER
    description: str | None = None  # only with DEAD_LETTER

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        _check_tokens(self.lock_tokens)
        if type(self.disposition) is not Disposition:
            check_type("disposition", self.disposition, Disposition)
        if self.reason is not None or self.description is not None:
            check_reason(self.reason, self.description)


@dataclass(frozen=True, slots=True)
class RenewLocks(EntityCommand[datetime]):
    """Lock messages for another lock duration; the reply is the time when the locks expire."""

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
    enqueued_before_utc: datetime | None = None  # None: enqueued at any time
    session: SessionLock | None = None

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_whole("max_messages", self.max_messages, 1, MAX_BATCH_MESSAGES)
        if self.enqueued_before_utc is not None:
            check_moment("enqueued_before_utc", self.enqueued_before_utc)
        check_type("session", self.session, SessionLock, NoneType)
