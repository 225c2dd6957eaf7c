"""Leases of ranges of a queue: a syphon or a Spark reader reads and settles many messages at once.

A lease lists its messages as intervals and is stored in the log, so it survives a crash of the
broker. Its epoch is a fence: a command with the epoch of an ended lease is refused.

turn/queue_commands.py calls these functions, answers.py for requests that waited, and `Queue.tick`
for leases that have expired.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from twinbus.broker.accounts.throttle import busy_entity
from twinbus.broker.lifecycle import Cause, State
from twinbus.broker.queue.dead_letter import Death
from twinbus.broker.queue.ranges import Lease
from twinbus.broker.queue.waiting import Indices, once
from twinbus.broker.store.commit import Commit, Effect, Fact
from twinbus.clock import from_us, to_us
from twinbus.errors import RangeUnavailableError
from twinbus.intervals import runs
from twinbus.limits import MAX_LEASE_INTERVALS, MAX_LEASES, NEVER_US
from twinbus.protocol.commands import LeaseRange, RangeLease, ReadRange, SettleRange

if TYPE_CHECKING:
    from twinbus.broker.queue.queue import Queue


@dataclass(frozen=True, slots=True)
class _Leased(Effect):
    """A new lease whose record is not durable yet."""

    queue: "Queue"
    epoch: int
    commit: Commit

    def refused(self) -> None:
        """End the lease, because the log refused it; the next record contains its begin and end."""
        end_lease(self.queue, self.epoch, self.commit)


def lease_range(queue: "Queue", command: LeaseRange, now: int, commit: Commit) -> RangeLease | None:
    """Lease the next deliverable messages, or a given range; None if there are none."""
    if command.first is None or command.last is None:
        at = queue.waiting.deliverable(command.max_messages)
        if command.past is not None and len(at):
            barrier, _ = first_locked_or_leased(queue, command.past)
            at = at[queue.waiting.get("sequence", at) < barrier]
        if command.max_bytes is not None and len(at):
            at = queue.within(at, command.max_bytes)
    else:
        at = _claim(queue, command, command.first, command.last, commit)
    if not len(at):
        return None
    if len(queue.leases) >= MAX_LEASES:
        raise busy_entity(queue.path, "leases", MAX_LEASES)
    origin, at = queue.origin_at(at)
    get = queue.waiting.get
    numbers = get("sequence", at)
    intervals = runs(numbers)[:MAX_LEASE_INTERVALS]
    at = at[numbers <= intervals[-1][1]]
    numbers = get("sequence", at)
    epoch, until = queue.shared.locks.next(), now + to_us(command.duration)
    lease = Lease(command.owner, epoch, intervals, until)
    queue.waiting.step(at, Cause.LEASED)
    queue.waiting.put("lock", at, epoch)
    queue.leases.put(lease)
    _note(queue, lease, commit)
    commit.must_sync = True
    commit.effects.append(_Leased(queue, epoch, commit))
    return RangeLease(
        owner=command.owner,
        epoch=epoch,
        first=int(numbers[0]),
        last=int(numbers[-1]),
        message_count=len(at),
        size_in_bytes=int(get("size", at).sum(dtype=np.int64)),
        leased_until_utc=from_us(until),
        origin=origin,
        oldest_utc=from_us(int(get("enqueued", at).min())),
        left_behind=queue.waiting.count(State.ACTIVE),
        intervals=intervals,
    )


def first_locked_or_leased(queue: "Queue", past: Sequence[int]) -> tuple[int, str | None]:
    """Return the number of the first locked or leased message, and the owner of its lease.

    Messages of leases whose epoch is in `past` do not count. The owner is None for a message that a
    receiver has locked. If there is no such message, return NEVER_US and None.
    """
    waiting = queue.waiting
    candidates: list[tuple[int, str | None]] = [(NEVER_US, None)]
    if waiting.count(State.LEASED):
        at = waiting.first_in(State.LEASED, but=past)
        for number, epoch in zip(waiting.get("sequence", at), waiting.get("lock", at), strict=True):
            lease = queue.leases.find(int(epoch))
            candidates.append((int(number), lease.owner if lease is not None else None))
    if waiting.count(State.LOCKED):
        at = waiting.first_in(State.LOCKED)
        candidates.append((int(waiting.get("sequence", at)[0]), None))
    return min(candidates, key=lambda candidate: candidate[0])


def _note(queue: "Queue", lease: Lease, commit: Commit) -> None:
    commit.kept.facts.append(Fact("lease", f"{queue.entity}/{lease.epoch}", lease.to_fact()))


def _claim(queue: "Queue", command: LeaseRange, first: int, last: int, commit: Commit) -> Indices:
    """End older leases of the owner in a range; return the deliverable messages of the range.

    Raise if a receiver has locked, or another owner has leased, a message of the range.
    """
    at = queue.waiting.between(first, last)
    states = queue.waiting.get("state", at)
    epochs = np.unique(queue.waiting.get("lock", at[states == State.LEASED])).tolist()
    leases = [queue.leases.get(epoch) for epoch in epochs]
    foreign = [lease for lease in leases if lease.owner != command.owner]
    if foreign or (states == State.LOCKED).any():
        holder = (foreign[0].owner or "another client") if foreign else "a receiver"
        raise RangeUnavailableError(
            f"some of the messages {first} to {last} of {queue.path} are locked or leased by "
            f"{holder}; try again when the lock or lease has expired",
            path=queue.path,
            owner=holder,
        )
    end_leases(queue, epochs, commit)
    return queue.waiting.in_state(at, State.ACTIVE)[: command.max_messages]


def renew_range(queue: "Queue", epoch: int, until: int, commit: Commit) -> int:
    """Renew a lease; return when it expires."""
    lease = queue.leases.get(epoch)
    queue.leases.renew(lease, until)
    key = f"{queue.entity}/{epoch}"
    commit.kept.facts.append(Fact("leased until", key, lease.renewal()))
    return until


def read_range(queue: "Queue", command: ReadRange) -> pa.RecordBatch:
    """Return the unsettled messages of a lease with numbers from `first` to `last`."""
    queue.leases.get(command.epoch)
    at = _part(queue, command.epoch, command.first, command.last)
    return queue.browse(at, command.max_bytes)


def _part(queue: "Queue", epoch: int, first: int, last: int) -> Indices:
    at = queue.waiting.in_state(queue.waiting.between(first, last), State.LEASED)
    return queue.waiting.locked_by(at, epoch)


def _within(queue: "Queue", at: Indices, intervals: Sequence[Sequence[int]]) -> Indices:
    """Return the rows whose numbers are in one of the intervals, which may overlap."""
    if not intervals or not len(at):
        return at[:0]
    bounds = np.asarray(intervals, np.int64)
    bounds = bounds[bounds[:, 0] <= bounds[:, 1]]
    numbers = queue.waiting.get("sequence", at)
    depth = np.zeros(len(numbers) + 1, np.int64)  # number of intervals that cover a row
    np.add.at(depth, np.searchsorted(numbers, bounds[:, 0]), 1)
    np.add.at(depth, np.searchsorted(numbers, bounds[:, 1], side="right"), -1)
    return at[np.cumsum(depth)[:-1] > 0]


def settle_range(queue: "Queue", command: SettleRange, commit: Commit) -> int:
    """Complete and dead-letter parts of a leased range; return the number of messages."""
    queue.leases.get(command.epoch)
    at = _within(queue, _leased_rows(queue, command.epoch), command.completed)
    commit.kept.gone(queue.entity, queue.waiting.get("sequence", at), Cause.COMPLETED)
    queue.settle_gone(at, Cause.COMPLETED)
    settled = len(at)
    for part in command.dead_lettered:
        numbers = np.asarray(part.sequence_numbers, np.int64)
        at = queue.waiting.find(numbers)
        at = queue.waiting.in_state(once(at[at >= 0]), State.LEASED)
        at = queue.waiting.locked_by(at, command.epoch)
        death = Death(part.reason, part.description, queue.path)
        queue.bury(at, Cause.DEAD_LETTERED, death, commit, counted=True)
        settled += len(at)
    if command.release:
        end_lease(queue, command.epoch, commit)
    return settled


def end_lease(queue: "Queue", epoch: int, commit: Commit) -> None:
    """End a lease; its unsettled messages become deliverable."""
    end_leases(queue, [epoch], commit)


def end_leases(queue: "Queue", epochs: list[int], commit: Commit) -> None:
    """End leases in one pass over the messages; unsettled messages become deliverable."""
    if not epochs:
        return
    if len(epochs) == 1:
        at = _leased_rows(queue, epochs[0])
    else:
        at = queue.waiting.in_state(queue.waiting.all(), State.LEASED)
        at = at[np.isin(queue.waiting.get("lock", at), epochs)]
    queue.waiting.step(at, Cause.LAPSED)
    queue.touch()
    for epoch in epochs:
        queue.leases.remove(epoch)
        for kind in ("lease", "leased until"):
            commit.kept.facts.append(Fact(kind, f"{queue.entity}/{epoch}", None))


def _leased_rows(queue: "Queue", epoch: int) -> Indices:
    """Return the rows of the unsettled messages of a lease."""
    lease = queue.leases.find(epoch)
    if lease is None or not lease.intervals:
        return np.empty(0, np.intp)
    at = queue.waiting.between(lease.intervals[0][0], lease.intervals[-1][1])
    return queue.waiting.locked_by(queue.waiting.in_state(at, State.LEASED), epoch)
