"""Carries ranges of a backlog queue home: read, restore, send, and tell what became of them.

    secondary --ReadRange--> restored --by destination--> Send with its origin --> primary

The next piece is read while one is sent. Pieces go to their destinations side by side, but to one
destination one after the other: after a failure the rest of it stays, so that what one client sent
arrives in its order. Nothing is settled here. Whoever settles may do so twice, or never: the
primary recognises what it took before.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from twinbus.errors import (
    CommandFailedError,
    EntityNotFoundError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
    OperationTimeoutError,
    QuotaExceededError,
)
from twinbus.intervals import runs
from twinbus.limits import (
    CARRIED_BYTES,
    CARRY_TIMEOUT,
    MAX_BATCH_MESSAGES,
    TRIAL_MESSAGES,
    TRIAL_TIMEOUT_S,
)
from twinbus.message import Int64s, body_bytes, byte_lengths
from twinbus.namespace.contract import Namespace
from twinbus.pairing.backlog import PATH, Restored, restored
from twinbus.protocol.commands import Origin, ReadRange, Send, SendReceipt
from twinbus.syphon.transfers import Passed, TransferLedger

NOT_DIVERTED = f"messages without {PATH}"  # stands for their destination
CANNOT_GO_HOME = "CannotBeBroughtHome"  # why a message of a backlog queue is dead-lettered
_OF_A_MESSAGE = (InvalidArgumentError, CommandFailedError)  # a refusal of one of many, perhaps
_REFUSED_FOR_GOOD = (EntityNotFoundError, InvalidOperationError, *_OF_A_MESSAGE)
_log = logging.getLogger("twinbus.syphon")
NO_TRIALS: Mapping[str, int] = {}
_TIMEOUT_S = CARRY_TIMEOUT.total_seconds()


@dataclass(frozen=True, slots=True)
class Range:
    """Messages of a backlog queue under a lease."""

    epoch: int
    first: int  # sequence numbers, both included
    last: int
    origin: str  # of the queue: what the primary knows its messages by; empty: it numbers none


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a destination did not take its messages, for now."""

    code: str  # of the error
    text: str


OVERTAKING = Failure("Overtaking", "what lies before it could not be read")
INTERRUPTED = Failure("Interrupted", "its worker was killed; its locks must expire first")


@dataclass(slots=True)
class Carried:
    """What became of a range; what is not named here was not there any more."""

    queue: str
    range: Range
    completed: list[tuple[int, int]] = field(default_factory=list)  # intervals; home, durably
    poison: list[tuple[int, str]] = field(default_factory=list)  # number, and what is wrong
    kept: dict[str, int] = field(default_factory=dict)  # destination -> messages that stay
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)  # -> messages, body bytes
    kept_at: list[tuple[int, int]] = field(default_factory=list)  # where, if a transform is used
    failures: dict[str, Failure] = field(default_factory=dict)  # of destinations that were tried
    unread: Failure | None = None  # the secondary did not hand it out whole, or not settle it
    sends: int = 0  # operations on the primary
    reading_s: float = 0.0  # waited for the secondary
    sending_s: float = 0.0  # waited for the primary
    is_settled: bool = False  # by the worker, which had the messages locked
    is_drained: bool = False  # it was received under lock until nothing was left
    oldest_us: int | None = None  # what stays in the queue was diverted then or later

    def merge(self, other: "Carried") -> None:
        """Add what another worker says of the same range."""
        self.completed += other.completed
        self.poison += other.poison
        self.kept_at += other.kept_at
        self.failures |= other.failures
        self.sends += other.sends
        self.reading_s += other.reading_s
        self.sending_s += other.sending_s
        for name, count in other.kept.items():
            self.note_kept(name, count)
        for name, (messages, size) in other.moved.items():
            before = self.moved.get(name, (0, 0))
            self.moved[name] = (before[0] + messages, before[1] + size)

    def note_moved(self, destination: str, numbers: Int64s, size: int) -> None:
        """Count messages that are home."""
        messages, total = self.moved.get(destination, (0, 0))
        self.moved[destination] = (messages + len(numbers), total + size)
        self.completed += runs(numbers)

    def note_kept(self, destination: str, count: int) -> None:
        """Count messages that stay for now."""
        self.kept[destination] = self.kept.get(destination, 0) + count


def failure_of(error: MessagingError) -> Failure:
    """Return an error as a value that travels."""
    return Failure(error.code, error.text)


def canonical(destination: str) -> str:
    """Return the name destinations are compared by: case does not matter in a path."""
    return destination.lower()


@dataclass(frozen=True, slots=True)
class Run:
    """Messages of one destination, in order, that can go in one send."""

    batch: pa.RecordBatch
    numbers: Int64s  # in their backlog queue
    sender: str | None  # who tried the primary before
    sent_as: pa.Array  # the sender's numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def slice(self, first: int, last: int) -> "Run":
        """Return a part."""
        count = last - first
        batch = self.batch.slice(first, count)
        return Run(batch, self.numbers[first:last], self.sender, self.sent_as.slice(first, count))

    def send_to(self, destination: str, carried: Carried) -> Send:
        """Return the command that brings it home once, however often it is asked.

        Where the backlog queue does not number its messages, the numbers of their sender do.
        """
        also = Origin(self.sender, self.sent_as.to_numpy()) if self.sender is not None else None
        if carried.range.origin:
            numbered = Origin(carried.range.origin, _cheapest(self.numbers), also)
            return Send(destination, self.batch, numbered)
        if also is None:
            return Send(destination, self.batch)
        source = f"{canonical(carried.queue)}#{also.source}"
        return Send(destination, self.batch, Origin(source, also.numbers, also))


def _cheapest(numbers: Int64s) -> range | Int64s:
    """Return numbers without a gap as a range, which is nothing to carry."""
    if (np.diff(numbers) == 1).all():
        return range(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


@dataclass(frozen=True, slots=True)
class Trials:
    """Destinations that failed and are tried again, by one queue in one range."""

    passed: frozenset[str] = frozenset()  # tried elsewhere: passed over here
    tried: frozenset[str] = frozenset()  # tried here

    @classmethod
    def of(cls, on_trial: Mapping[str, int], epoch: int) -> "Trials":
        """Return what trials mean for the range of an epoch."""
        tried = frozenset(name for name, where in on_trial.items() if where == epoch)
        return cls(frozenset(on_trial) - tried, tried)


class Carrier:
    """Carries for one primary and one secondary; used by one thread."""

    def __init__(
        self,
        primary: Namespace,
        secondary: Namespace,
        transfers: TransferLedger | None = None,
        extra_queues: Iterable[str] = (),
    ) -> None:
        self._primary = primary
        self._secondary = secondary
        self.transfers = transfers or TransferLedger(None)
        self._extra_queues = {canonical(queue) for queue in extra_queues}

    def own_rows(self, batch: pa.RecordBatch, carried: Carried) -> pa.RecordBatch:
        """Return the messages that somebody diverted; in an extra queue the others are kept.

        A message without a path in any other backlog queue is dead-lettered.
        """
        if canonical(carried.queue) not in self._extra_queues:
            return batch
        is_own = byte_lengths(restored(batch).paths) > 0
        foreign = int((~is_own).sum())
        if foreign:
            carried.note_kept(NOT_DIVERTED, foreign)
            text = f"nobody diverted them; they stay in {carried.queue}"
            carried.failures[NOT_DIVERTED] = Failure("NotDiverted", text)
        return batch.filter(pa.array(is_own))

    def carry(
        self,
        queue: str,
        ranges: Sequence[Range],
        held_back: Iterable[str] = (),
        on_trial: Mapping[str, int] = NO_TRIALS,
    ) -> list[Carried]:
        """Carry ranges of a queue, in their order.

        Destinations held back are passed over; those on trial everywhere but in the range of one
        epoch. What cannot be read is not overtaken.
        """
        blocked = set(held_back)
        done: list[Carried] = []
        for one in ranges:
            if done and done[-1].unread is not None:
                done.append(Carried(queue, one, unread=OVERTAKING))
                continue
            done.append(self._carry(queue, one, blocked, Trials.of(on_trial, one.epoch)))
        self.write_transfers()  # before anything is settled
        return done

    def write_transfers(self) -> None:
        """Write down what became of messages."""
        write_transfers(self.transfers)

    def _carry(self, queue: str, leased: Range, blocked: set[str], trials: "Trials") -> Carried:
        carried = Carried(queue, leased)
        pieces = self.pieces(queue, leased)
        try:
            while True:
                began = time.monotonic()
                batch = next(pieces, None)
                carried.reading_s += time.monotonic() - began
                if batch is None:
                    break
                batch = self.own_rows(batch, carried)
                found = restored(batch)
                self.deliver(found, _numbers(batch), carried, blocked, trials)
                self.transfers.note(carried, Passed.of(batch, found))
        except MessagingError as error:
            carried.unread = failure_of(error)
        return carried

    def pieces(self, queue: str, leased: Range) -> Iterator[pa.RecordBatch]:
        """Read a range piece by piece; the next is under way while one is at work."""

        def read(first: int) -> "Future[pa.RecordBatch]":
            command = ReadRange(queue, leased.epoch, first, leased.last, CARRIED_BYTES)
            return self._secondary.submit(command)

        coming: Future[pa.RecordBatch] | None = read(leased.first)
        while coming is not None:
            batch = _reply_of(coming, time.monotonic() + _TIMEOUT_S)
            if not batch.num_rows:
                return
            last = int(batch.column("sequence_number")[-1].as_py())
            coming = read(last + 1) if last < leased.last else None
            for at in range(0, batch.num_rows, MAX_BATCH_MESSAGES):  # of small ones many fit
                yield batch.slice(at, MAX_BATCH_MESSAGES)

    def deliver(
        self,
        found: Restored,
        numbers: Int64s,
        carried: Carried,
        blocked: set[str],
        trials: "Trials | None" = None,
    ) -> None:
        """Send messages to their destinations; those that fail join the blocked ones.

        All destinations wait for the slowest. One on trial, which failed before, begins with a few
        messages and gets little time for them.
        """
        trials = trials or Trials()
        passed_over = blocked | trials.passed
        carried.poison += [(int(numbers[row]), why) for row, why in sorted(found.faults.items())]
        waiting = {}
        for destination, rows in _by_destination(found).items():
            if canonical(destination) in passed_over:
                carried.note_kept(destination, len(rows))
            else:
                waiting[destination] = list(_runs_of(found, numbers, rows))
                if canonical(destination) in trials.tried:
                    waiting[destination] = _with_small_first(waiting[destination])
        first_round = True
        while waiting:
            sent = {
                destination: (left[0], self._primary.submit(left[0].send_to(destination, carried)))
                for destination, left in waiting.items()
            }
            now = time.monotonic()
            for destination, (run, reply) in sent.items():
                on_trial = first_round and canonical(destination) in trials.tried
                deadline = now + (TRIAL_TIMEOUT_S if on_trial else _TIMEOUT_S)
                done = self._finish(destination, run, reply, carried, deadline)
                if done == len(run):
                    waiting[destination] = waiting[destination][1:]
                else:
                    blocked.add(canonical(destination))
                    carried.note_kept(destination, sum(map(len, waiting[destination])) - done)
                    waiting[destination] = []
            waiting = {destination: left for destination, left in waiting.items() if left}
            first_round = False

    def _finish(
        self,
        destination: str,
        run: Run,
        reply: "Future[SendReceipt]",
        carried: Carried,
        deadline: float,
    ) -> int:
        """Wait for a send; return how many messages are home or put aside: all, or it failed."""
        carried.sends += 1
        began = time.monotonic()
        try:
            _reply_of(reply, deadline)
        except _REFUSED_FOR_GOOD as error:
            return self._put_aside(destination, run, error, carried)
        except QuotaExceededError as error:
            if len(run) > 1:  # a part may fit
                return self._send_halves(destination, run, carried)
            carried.failures[destination] = failure_of(error)
            return 0
        except MessagingError as error:
            carried.failures[destination] = failure_of(error)
            return 0
        finally:
            carried.sending_s += time.monotonic() - began
        carried.note_moved(destination, run.numbers, body_bytes(run.batch))
        return len(run)

    def _put_aside(
        self, destination: str, run: Run, error: MessagingError, carried: Carried
    ) -> int:
        """Find out which messages a refusal means, by halves, and put those aside."""
        whole = not isinstance(error, _OF_A_MESSAGE)  # it is about the destination
        if whole or len(run) == 1:
            why = f"{destination} on the primary refused it: {error.text}"
            carried.poison += [(number, why) for number in run.numbers.tolist()]
            return len(run)
        return self._send_halves(destination, run, carried)

    def _send_halves(self, destination: str, run: Run, carried: Carried) -> int:
        """Send a run that was refused as a whole in two parts; return how many are done with."""
        middle = len(run) // 2
        done = 0
        for half in (run.slice(0, middle), run.slice(middle, len(run))):
            reply = self._primary.submit(half.send_to(destination, carried))
            deadline = time.monotonic() + _TIMEOUT_S
            done += self._finish(destination, half, reply, carried, deadline)
            if done != middle and half.numbers[0] == run.numbers[0]:
                break  # in order or not at all
        return done


def write_transfers(transfers: TransferLedger) -> None:
    """Write a ledger; whatever goes wrong there stops no syphon."""
    try:
        transfers.write()
    except Exception as error:  # noqa: BLE001 - see above; what was noted is kept for later
        _log.warning("the ledger of transfers cannot be written: %s", error)


def _reply_of(future: "Future[Any]", deadline: float) -> Any:
    try:
        return future.result(max(deadline - time.monotonic(), 0.0))
    except MessagingError:
        raise
    except TimeoutError:
        raise OperationTimeoutError(
            "no answer in time; whether the work was done is unknown"
        ) from None


def _with_small_first(runs: list[Run]) -> list[Run]:
    """Return runs of which the first is small."""
    first, *rest = runs
    if len(first) <= TRIAL_MESSAGES:
        return runs
    return [first.slice(0, TRIAL_MESSAGES), first.slice(TRIAL_MESSAGES, len(first)), *rest]


def _numbers(batch: pa.RecordBatch) -> Int64s:
    numbers: Int64s = batch.column("sequence_number").to_numpy()
    return numbers


def _by_destination(found: Restored) -> Mapping[str, Int64s]:
    """Return the rows of each destination, in order, without those that are faulty."""
    encoded = found.paths.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    if found.faults:
        codes[list(found.faults)] = -1
    names: dict[str, str] = {}  # one destination may be spelt in several ways
    rows: dict[str, list[Int64s]] = {}
    for code, path in enumerate(encoded.dictionary.to_pylist()):
        name = names.setdefault(canonical(path), path)
        rows.setdefault(name, []).append(np.flatnonzero(codes == code))
    merged = {name: np.sort(np.concatenate(held)) for name, held in rows.items()}
    return {name: held for name, held in merged.items() if len(held)}


def _runs_of(found: Restored, numbers: Int64s, rows: Int64s) -> Iterator[Run]:
    """Give the rows of a destination in order, in runs of one sender."""
    whole = len(rows) == found.batch.num_rows
    at = pa.array(rows)
    batch = found.batch if whole else found.batch.take(at)
    senders, sent_as = found.senders.take(at), found.numbers.take(at)
    run = Run(batch, numbers[rows], None, sent_as)
    if senders.null_count == len(senders):
        yield run
        return
    encoded = senders.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy()
    ends = [*(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(rows)]
    first = 0
    for last in ends:
        part = run.slice(first, last)
        yield Run(part.batch, part.numbers, senders[first].as_py(), part.sent_as)
        first = last
