"""Commands for ranges: a reader leases messages of a queue, and settles them together.

The reader can read the messages of its lease again, with the same result. A lease has an epoch. A
later lease of any of its messages makes the epoch stale, so a reader that lost its lease cannot
settle what another reader has leased.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import pyarrow as pa

from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    DEFAULT_LEASE_DURATION,
    MAX_BATCH_MESSAGES,
    MAX_DEAD_LETTER_PARTS,
    MAX_INT64,
    MAX_LEASE_DURATION,
    MAX_LEASE_MESSAGES,
    MAX_OWNER_CHARACTERS,
    MAX_RECEIVE_BYTES,
    MAX_WAIT,
)
from twinbus.protocol.commands.command import NO_WAIT, EntityCommand, check_numbers, check_reason
from twinbus.values import check_span, check_text, check_type, check_whole, shown


def _check_intervals(what: str, intervals: object) -> None:
    """Raise if a value is not a pair (first, last), or if there are more pairs than allowed."""
    check_type(what, intervals, list, tuple)
    assert isinstance(intervals, list | tuple)
    if len(intervals) > MAX_BATCH_MESSAGES:
        raise InvalidArgumentError(
            f"{what} has {len(intervals)} intervals; the limit is {MAX_BATCH_MESSAGES}. Settle in "
            "parts"
        )
    if not all(map(_is_interval, intervals)):
        wrong = next(pair for pair in intervals if not _is_interval(pair))
        raise InvalidArgumentError(
            f"{what} must contain pairs (first, last) of 64-bit integers, not {shown(wrong)}"
        )


def _is_interval(pair: object) -> bool:
    return (
        type(pair) in (list, tuple)
        and len(pair) == 2  # type: ignore[arg-type]
        and all(type(number) is int and -MAX_INT64 <= number <= MAX_INT64 for number in pair)  # type: ignore[attr-defined]
    )


def _check_lease(duration: object) -> None:
    check_span("duration", duration, timedelta(microseconds=1), MAX_LEASE_DURATION)


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
    origin: str = ""  # names the queue in transfers; a recreated queue has a new name
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

    With `first` and `last`, the same range can be leased again after a crash. This ends older
    leases of the same owner on these messages. If a receiver has locked or another owner has leased
    one of them, the command raises RangeUnavailableError until the lock or lease expires.

    With `past`, only messages before the first locked or leased message are leased, so that their
    order is kept. Leases with an epoch in `past` do not count.
    """

    owner: str
    max_messages: int
    first: int | None = None
    last: int | None = None
    duration: timedelta = DEFAULT_LEASE_DURATION
    wait: timedelta = NO_WAIT  # how long to wait for messages if there is nothing to lease
    past: Sequence[int] | None = None  # epochs; None: the order is not kept
    max_bytes: int | None = None  # the first message is leased even if it is larger

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_text("owner", self.owner, MAX_OWNER_CHARACTERS)
        check_whole("max_messages", self.max_messages, 1, MAX_LEASE_MESSAGES)
        _check_lease(self.duration)
        check_span("wait", self.wait, NO_WAIT, MAX_WAIT)
        if self.past is not None:
            check_numbers("past", self.past)
        if self.max_bytes is not None:
            check_whole("max_bytes", self.max_bytes, 1, MAX_INT64)
        check_numbers("first and last", [n for n in (self.first, self.last) if n is not None])
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
        check_numbers("epoch", [self.epoch])
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
        check_numbers("epoch, first and last", [self.epoch, self.first, self.last])
        check_whole("max_bytes", self.max_bytes, -MAX_INT64, MAX_INT64)


@dataclass(frozen=True, slots=True)
class DeadLetterPart:
    """Messages of a range to dead-letter, with the reason."""

    sequence_numbers: Sequence[int]
    reason: str
    description: str | None = None

    def __post_init__(self) -> None:
        check_numbers("sequence_numbers", self.sequence_numbers)
        check_type("reason", self.reason, str)
        check_reason(self.reason, self.description)


@dataclass(frozen=True, slots=True)
class SettleRange(EntityCommand[None]):
    """Complete intervals of a leased range and dead-letter others. It can be repeated safely."""

    epoch: int
    completed: Sequence[tuple[int, int]] = ()  # sequence numbers, both ends included
    dead_lettered: Sequence[DeadLetterPart] = ()
    release: bool = False  # also release the lease with its other messages

    def __post_init__(self) -> None:
        EntityCommand.__post_init__(self)
        check_numbers("epoch", [self.epoch])
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
        check_numbers("epoch", [self.epoch])
