"""Carries ranges of a backlog queue home: reads, restores and sends them, and returns the outcome.

    secondary --ReadRange--> restored --by destination--> Send with its origin --> primary

The carrier reads the next piece of a range while it sends the current one. It sends to several
destinations in parallel. A run is messages of one sender for one destination; the carrier sends
the runs of different senders in parallel, too. If a send to a destination fails, its later messages
stay in the backlog, so that the messages of a client arrive in order.

The carrier settles nothing. Spark may repeat a task, and the driver may settle a range twice or
never: the primary recognises by their origin the messages that it has already accepted. Workers
call the carrier, each from one thread; the simulations call it without Spark.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from twinbus import tracing
from twinbus.clock import to_us
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
    DEFAULT_LOCK_DURATION,
    DESTINATION_BUDGET_S,
    MAX_BATCH_MESSAGES,
    RUNS_AT_ONCE,
    TRIAL_MESSAGES,
    TRIAL_ROUND,
    TRIAL_TIMEOUT_S,
)
from twinbus.message import Int64s, body_bytes, byte_lengths
from twinbus.namespace.contract import Namespace
from twinbus.pairing.backlog import PATH, Restored, restored
from twinbus.protocol.commands import Origin, ReadRange, Send, SendReceipt
from twinbus.protocol.remainder import accepted_in
from twinbus.syphon.transfers import Passed, TransferLedger
from twinbus.tracing import UNKNOWN_PEER, TracedPeer

NOT_DIVERTED = f"messages without {PATH}"  # used as the name of their destination
CANNOT_GO_HOME = "CannotBeBroughtHome"  # the dead-letter reason of messages in a backlog queue
_OF_A_MESSAGE = (InvalidArgumentError, CommandFailedError)  # may be about one message of a batch
_REFUSED_FOR_GOOD = (EntityNotFoundError, InvalidOperationError, *_OF_A_MESSAGE)
_log = logging.getLogger("twinbus.syphon")
NO_TEXT = -1  # in a list of codes
_TIMEOUT_S = CARRY_TIMEOUT.total_seconds()
_monotonic_s: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Range:
    """Messages of a backlog queue, which are leased, or received under locks."""

    epoch: int
    first: int  # sequence numbers, both included
    last: int
    origin: str  # names the queue for the primary; empty: the queue does not number messages
    lock_us: int = 0  # how long the locks last under which it is received; 0: it is leased

    @property
    def is_locked(self) -> bool:
        """Whether the messages are received under locks; `Run.send_to` prefers sender numbers."""
        return self.lock_us > 0

    @classmethod
    def under_lock(cls, origin: str, lock_us: int = to_us(DEFAULT_LOCK_DURATION)) -> "Range":
        """Return the range of a visit (locked_carrier.py): all messages that it receives."""
        return cls(0, 0, 0, origin, lock_us)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a destination did not accept its messages this time."""

    code: str  # of the error
    text: str


OVERTAKING = Failure(
    "Overtaking", "the previous range of the queue was not read, and this one must not overtake it"
)
INTERRUPTED = Failure(
    "Interrupted",
    "a receive may have left messages locked; the syphon waits until the locks expire",
)


@dataclass(slots=True)
class Carried:
    """The outcome of carrying a range. Messages not listed here were no longer in the queue."""

    queue: str
    range: Range
    completed: list[tuple[int, int]] = field(default_factory=list)  # intervals durable at primary
    poison: list[tuple[int, str]] = field(default_factory=list)  # number, and the cause
    kept: dict[str, int] = field(default_factory=dict)  # destination -> messages that stay
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)  # -> messages, body bytes
    kept_at: list[tuple[int, int]] = field(default_factory=list)  # intervals; only with a transform
    failures: dict[str, Failure] = field(default_factory=dict)  # of destinations that were tried
    unread: Failure | None = None  # why the range could not be read completely, or not settled
    sends: int = 0  # operations on the primary
    reading_s: float = 0.0  # time spent waiting for the secondary
    sending_s: float = 0.0  # time spent waiting for the primary
    spent_s: dict[str, float] = field(default_factory=dict)  # destination -> time of its sends
    is_settled: bool = False  # the worker has settled it, because it had the messages locked
    is_drained: bool = False  # the worker received under lock until the queue was empty
    oldest_us: int | None = None  # messages left in the queue were diverted at this time or later

    def merge(self, other: "Carried") -> None:
        """Add the outcome of another worker for the same range."""
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
        """Count messages that the primary has accepted."""
        messages, total = self.moved.get(destination, (0, 0))
        self.moved[destination] = (messages + len(numbers), total + size)
        self.completed += runs(numbers)

    def note_spent(self, destination: str, seconds: float) -> bool:
        """Add the time of a send; return whether the destination has used up its time."""
        self.spent_s[destination] = self.spent_s.get(destination, 0.0) + seconds
        return self.spent_s[destination] > DESTINATION_BUDGET_S

    def note_kept(self, destination: str, count: int) -> None:
        """Count messages that stay in the backlog for now."""
        self.kept[destination] = self.kept.get(destination, 0) + count


def _stopwatch(reply: "Future[Any]") -> Callable[[], float]:
    """Return a function that returns how long a reply took, or has taken until now."""
    began = _monotonic_s()
    ends: list[float] = []
    reply.add_done_callback(lambda _: ends.append(_monotonic_s()))
    return lambda: (ends[0] if ends else _monotonic_s()) - began


def failure_of(error: MessagingError) -> Failure:
    """Return an error as a value that can be sent to another process."""
    return Failure(error.code, error.text)


def canonical(destination: str) -> str:
    """Return the name by which destinations are compared: paths are case-insensitive."""
    return destination.lower()


@dataclass(frozen=True, slots=True)
class Run:
    """Messages for one destination and of one sender, in order; one send carries them."""

    batch: pa.RecordBatch
    numbers: Int64s  # their sequence numbers in the backlog queue
    sender: str | None  # the client that tried the primary before diverting; None: no try
    sent_as: pa.Array  # the numbers that the sender gave them

    def __len__(self) -> int:
        return len(self.numbers)

    def slice(self, first: int, last: int) -> "Run":
        """Return the rows from `first` up to but not including `last`."""
        count = last - first
        batch = self.batch.slice(first, count)
        return Run(batch, self.numbers[first:last], self.sender, self.sent_as.slice(first, count))

    def take(self, rows: Sequence[int]) -> "Run":
        """Return some rows, in their order."""
        at = pa.array(rows, pa.int64())
        numbers = self.numbers[np.asarray(rows, np.int64)]
        return Run(self.batch.take(at), numbers, self.sender, self.sent_as.take(at))

    def send_to(self, destination: str, carried: Carried) -> Send:
        """Return the send to the destination; its origin makes the send idempotent.

        The origin is the backlog queue with its sequence numbers. For messages that were received
        under lock it is their sender with its own numbers, if that is known: an engine without
        ranges may store a message twice, and may start its sequence numbers again.
        """
        also = Origin(self.sender, self.sent_as.to_numpy()) if self.sender is not None else None
        if also is not None and carried.range.is_locked:
            source = f"{canonical(carried.queue)}#{also.source}"
            return Send(destination, self.batch, Origin(source, also.numbers, also))
        if not carried.range.origin:
            return Send(destination, self.batch)
        origin = Origin(carried.range.origin, _cheapest(self.numbers), also)
        return Send(destination, self.batch, origin)


def _cheapest(numbers: Int64s) -> range | Int64s:
    """Return consecutive numbers as a range, which needs less space on the wire."""
    if (np.diff(numbers) == 1).all():
        return range(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


class Trial(NamedTuple):
    """A try of a destination that failed before.

    Each trial sends half as many messages as the one before it. The last trial of a round sends a
    single message and waits for the reply as long as any send does. So a destination that accepts
    a message within that time leaves its trial, however slow it is. A destination that hangs delays
    the others for TRIAL_TIMEOUT_S in all other trials.
    """

    epoch: int  # of the range in which it is tried
    number: int  # of failures in a row before this trial

    @property
    def messages(self) -> int:
        """How many messages the trial sends."""
        return max(TRIAL_MESSAGES >> self._place, 1)

    @property
    def timeout_s(self) -> float:
        """How long the trial waits for the reply."""
        return _TIMEOUT_S if self._place == TRIAL_ROUND - 1 else TRIAL_TIMEOUT_S

    @property
    def _place(self) -> int:
        return (self.number - 1) % TRIAL_ROUND


NO_TRIALS: Mapping[str, Trial] = {}


@dataclass(frozen=True, slots=True)
class Trials:
    """Which destinations on trial a range tries; each is tried in only one range of one queue."""

    passed: frozenset[str] = frozenset()  # tried elsewhere: passed over here
    tried: Mapping[str, Trial] = field(default_factory=dict)  # tried here

    @classmethod
    def of(cls, on_trial: Mapping[str, Trial], epoch: int) -> "Trials":
        """Return which destinations on trial the range with this epoch tries and passes over."""
        tried = {name: trial for name, trial in on_trial.items() if trial.epoch == epoch}
        return cls(frozenset(on_trial) - set(tried), tried)


class Carrier:
    """Carries messages from one secondary to one primary. Not thread-safe."""

    def __init__(
        self,
        primary: Namespace,
        secondary: Namespace,
        transfers: TransferLedger | None = None,
        extra_queues: Iterable[str] = (),
        peer: TracedPeer = UNKNOWN_PEER,
    ) -> None:
        self._primary = primary
        self._peer = peer  # the primary, as spans name it
        self._secondary = secondary
        self.transfers = transfers or TransferLedger(None)
        self._extra_queues = {canonical(queue) for queue in extra_queues}

    def own_rows(self, batch: pa.RecordBatch, carried: Carried) -> pa.RecordBatch:
        """Return the messages that are carried: in an extra queue only the diverted ones.

        The other messages of an extra queue stay there. In any other backlog queue all messages are
        carried, and a message without a path is dead-lettered.
        """
        if canonical(carried.queue) not in self._extra_queues:
            return batch
        is_diverted = byte_lengths(restored(batch).paths) > 0
        foreign = int((~is_diverted).sum())
        if foreign:
            carried.note_kept(NOT_DIVERTED, foreign)
            text = (
                f"no pairing diverted them, so they stay in {carried.queue}. Receive or purge them "
                "there"
            )
            carried.failures[NOT_DIVERTED] = Failure("NotDiverted", text)
        return batch.filter(pa.array(is_diverted))

    def carry(
        self,
        queue: str,
        ranges: Sequence[Range],
        skipped: Iterable[str] = (),
        on_trial: Mapping[str, Trial] = NO_TRIALS,
    ) -> list[Carried]:
        """Carry ranges of a queue, in order.

        Destinations in `skipped` are skipped. Destinations in `on_trial` are skipped in every
        range but the one with the given epoch. A range behind one that could not be read is not
        carried, because it would overtake that one.
        """
        blocked = set(skipped)
        done: list[Carried] = []
        for leased in ranges:
            if done and done[-1].unread is not None:
                done.append(Carried(queue, leased, unread=OVERTAKING))
                continue
            done.append(self._carry(queue, leased, blocked, Trials.of(on_trial, leased.epoch)))
        self.write_transfers()  # before anything is settled
        return done

    def write_transfers(self) -> None:
        """Write the ledger of transfers."""
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
        """Yield a range in pieces; the next piece is requested while one is in use."""

        def read(first: int) -> "Future[pa.RecordBatch]":
            command = ReadRange(queue, leased.epoch, first, leased.last, CARRIED_BYTES)
            return self._secondary.submit(command)

        pending: Future[pa.RecordBatch] | None = read(leased.first)
        while pending is not None:
            batch = _reply_of(pending, _monotonic_s() + _TIMEOUT_S)
            if not batch.num_rows:
                return
            last = int(batch.column("sequence_number")[-1].as_py())
            pending = read(last + 1) if last < leased.last else None
            for at in range(0, batch.num_rows, MAX_BATCH_MESSAGES):  # small messages: many per read
                yield batch.slice(at, MAX_BATCH_MESSAGES)

    def deliver(
        self,
        found: Restored,
        numbers: Int64s,
        carried: Carried,
        blocked: set[str],
        trials: "Trials | None" = None,
    ) -> None:
        """Send messages to their destinations; add destinations that fail to `blocked`.

        Sends are made in rounds. A round ends when the slowest destination has replied. A
        destination on trial begins with a few messages and gets little time for them. A destination
        that does not fail, but has used up its time in this range, is blocked as well: the next
        batch carries its other messages.
        """
        trials = trials or Trials()
        passed_over = blocked | trials.passed
        carried.poison += [(int(numbers[row]), why) for row, why in sorted(found.faults.items())]
        waiting: dict[str, list[list[Run]]] = {}
        for destination, rows in _by_destination(found).items():
            if canonical(destination) in passed_over:
                carried.note_kept(destination, len(rows))
            else:
                waiting[destination] = _rounds(_runs_of(found, numbers, rows))
                trial = trials.tried.get(canonical(destination))
                if trial is not None:
                    waiting[destination] = _with_small_first(waiting[destination], trial.messages)
        first_round = True
        while waiting:
            sent = {
                destination: [
                    (run, self._primary.submit(run.send_to(destination, carried)))
                    for run in left[0]
                ]
                for destination, left in waiting.items()
            }
            now = _monotonic_s()
            replied = {
                destination: [_stopwatch(reply) for _, reply in sends]
                for destination, sends in sent.items()
            }
            for destination, sends in sent.items():
                trial = trials.tried.get(canonical(destination)) if first_round else None
                deadline = now + (_TIMEOUT_S if trial is None else trial.timeout_s)
                undone = 0
                for run, reply in sends:
                    done = self._finish(
                        destination, run, reply, carried, deadline, may_split=not undone
                    )
                    undone += len(run) - done
                left = waiting[destination][1:]
                spent_s = max(stopwatch() for stopwatch in replied[destination])
                if undone or carried.note_spent(destination, spent_s):
                    blocked.add(canonical(destination))
                    undone += sum(len(run) for runs in left for run in runs)
                    left = []
                if undone:
                    carried.note_kept(destination, undone)
                waiting[destination] = left
            waiting = {destination: left for destination, left in waiting.items() if left}
            first_round = False

    def _finish(
        self,
        destination: str,
        run: Run,
        reply: "Future[SendReceipt]",
        carried: Carried,
        deadline: float,
        *,
        may_split: bool = True,
    ) -> int:
        """Wait for a send; return how many of its messages are done: sent or dead-lettered.

        Fewer than all means that the destination failed. With `may_split`, a refused run is sent
        again in parts.
        """
        carried.sends += 1
        began = time.monotonic()
        try:
            self._await_send(destination, run, partial(_reply_of, reply, deadline), carried)
        except MessagingError as error:
            carried.sending_s += time.monotonic() - began
            rest = _without_accepted(destination, run, error, carried)
            done = len(run) - len(rest)
            return done + self._refused(destination, rest, error, carried, may_split=may_split)
        carried.sending_s += time.monotonic() - began
        carried.note_moved(destination, run.numbers, body_bytes(run.batch))
        return len(run)

    def _refused(
        self,
        destination: str,
        run: Run,
        error: MessagingError,
        carried: Carried,
        *,
        may_split: bool,
    ) -> int:
        """Handle a run that the primary did not accept; return how many messages are done."""
        can_split = may_split and len(run) > 1
        is_about_all = len(run) == 1 or not isinstance(error, _OF_A_MESSAGE)
        if isinstance(error, _REFUSED_FOR_GOOD) and (can_split or is_about_all):
            return self._put_aside(destination, run, error, carried)
        is_full = isinstance(error, QuotaExceededError)
        if is_full and can_split and not accepted_in(error):  # a part of the run may fit
            return self._send_halves(destination, run, carried)
        carried.failures[destination] = failure_of(error)
        return 0

    def _await_send(
        self, destination: str, run: Run, wait: Callable[[], SendReceipt], carried: Carried
    ) -> None:
        if tracing.hook is None:
            wait()
            return
        tracing.hook.relay("drain", self._peer, destination, run.batch, wait, lambda: carried.queue)

    def _put_aside(
        self, destination: str, run: Run, error: MessagingError, carried: Carried
    ) -> int:
        """Mark the refused messages as poison; halve the run to find them if need be."""
        is_about_destination = not isinstance(error, _OF_A_MESSAGE)
        if is_about_destination or len(run) == 1:
            why = f"{destination} on the primary refused it: {error.text}"
            carried.poison += [(number, why) for number in run.numbers.tolist()]
            return len(run)
        return self._send_halves(destination, run, carried)

    def _send_halves(self, destination: str, run: Run, carried: Carried) -> int:
        """Send a refused run in two parts; return how many of its messages are done."""
        middle = len(run) // 2
        done = 0
        for half in (run.slice(0, middle), run.slice(middle, len(run))):
            reply = self._primary.submit(half.send_to(destination, carried))
            deadline = _monotonic_s() + _TIMEOUT_S
            done += self._finish(destination, half, reply, carried, deadline)
            if done != middle and half.numbers[0] == run.numbers[0]:
                break  # the second half must not overtake the first
        return done


def write_transfers(transfers: TransferLedger) -> None:
    """Write the ledger of transfers; an error there must not stop the syphon."""
    try:
        transfers.write()
    except Exception as error:  # noqa: BLE001 - see above; the rows are kept for the next write
        _log.warning(
            "the ledger of transfers cannot be written: %s. The syphon goes on, and writes the "
            "rows with the next batch",
            error,
        )


def _reply_of(future: "Future[Any]", deadline: float) -> Any:
    try:
        return future.result(max(deadline - _monotonic_s(), 0.0))
    except MessagingError:
        raise
    except TimeoutError:
        raise OperationTimeoutError(
            "the namespace did not reply in time; it may or may not have executed the command. The "
            "syphon tries again"
        ) from None


def _without_accepted(destination: str, run: Run, error: MessagingError, carried: Carried) -> Run:
    """Count the messages that a failed send has delivered nevertheless; return the others."""
    accepted = accepted_in(error)
    if not accepted:
        return run
    done = run.take(sorted(accepted))
    carried.note_moved(destination, done.numbers, body_bytes(done.batch))
    return run.take([row for row in range(len(run)) if row not in accepted])


def _rounds(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs into rounds, in order; the runs of a round are sent at the same time.

    They are of different senders and have no sessions, so no order is promised between them.
    """
    rounds: list[list[Run]] = []
    senders: set[str] = set()  # of the last round, if runs may join it
    for run in runs:
        has_sessions = run.batch.column("session_id").null_count < len(run)
        name = None if has_sessions else run.sender
        if name is not None and name not in senders and 0 < len(senders) < RUNS_AT_ONCE:
            rounds[-1].append(run)
            senders.add(name)
        else:
            rounds.append([run])
            senders = set() if name is None else {name}
    return rounds


def _with_small_first(rounds: list[list[Run]], size: int) -> list[list[Run]]:
    """Return rounds; the first has a single run with at most `size` messages."""
    (first, *others), *later = rounds
    if len(first) > size:
        others = [first.slice(size, len(first)), *others]
        first = first.slice(0, size)
    return [[first], others, *later] if others else [[first], *later]


def _numbers(batch: pa.RecordBatch) -> Int64s:
    numbers: Int64s = batch.column("sequence_number").to_numpy()
    return numbers


def _by_destination(found: Restored) -> Mapping[str, Int64s]:
    """Return the rows of each destination, in order; rows with faults are left out."""
    encoded = found.paths.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    if found.faults:
        codes[list(found.faults)] = -1
    names: dict[str, str] = {}  # canonical name -> first spelling; messages may differ in case
    rows: dict[str, list[Int64s]] = {}
    for code, path in enumerate(encoded.dictionary.to_pylist()):
        name = names.setdefault(canonical(path), path)
        rows.setdefault(name, []).append(np.flatnonzero(codes == code))
    merged = {name: np.sort(np.concatenate(parts)) for name, parts in rows.items()}
    return {name: own_rows for name, own_rows in merged.items() if len(own_rows)}


def _runs_of(found: Restored, numbers: Int64s, rows: Int64s) -> Iterator[Run]:
    """Yield the rows of a destination, as runs of one sender each."""
    is_all = len(rows) == found.batch.num_rows
    at = pa.array(rows)
    batch = found.batch if is_all else found.batch.take(at)
    senders, sent_as = found.senders.take(at), found.numbers.take(at)
    everything = Run(batch, numbers[rows], None, sent_as)
    if senders.null_count == len(senders):
        yield everything
        return
    sessions = batch.column("session_id")
    if senders.null_count or sessions.null_count < len(senders):
        groups = rows_by_sender(_codes(senders), _codes(sessions))
    else:
        groups = rows_by_code(_codes(senders))
    for group in groups:
        run = everything if len(groups) == 1 else everything.take(group)
        yield Run(run.batch, run.numbers, senders[group[0]].as_py(), run.sent_as)


def _codes(texts: pa.Array) -> list[int]:
    """Return the same number for equal texts, and NO_TEXT for null."""
    codes: list[int] = texts.dictionary_encode().indices.fill_null(NO_TEXT).to_pylist()
    return codes


def rows_by_code(codes: Sequence[int]) -> list[list[int]]:
    """Group rows by code, in the order of the codes; the rows of a code keep their order."""
    numbers = np.asarray(codes)
    ends = np.cumsum(np.bincount(numbers))
    order: list[int] = np.argsort(numbers, kind="stable").tolist()
    return [order[first:end] for first, end in pairwise([0, *ends.tolist()])]


def rows_by_sender(senders: Sequence[int], sessions: Sequence[int]) -> list[list[int]]:
    """Group the rows of each sender into as few sends as the order allows.

    Rows of a sender keep their order, and so do the rows of a session, whose senders may differ.
    A row without a sender may be of any client: it stays behind all rows before it, and before all
    rows behind it.
    """
    groups: list[list[int]] = []
    by_sender: dict[int, int] = {}  # sender -> its last group
    by_session: dict[int, int] = {}  # session -> the group of its last row
    first_open = 0  # rows cannot join groups before this one
    for row, (sender, session) in enumerate(zip(senders, sessions, strict=True)):
        least = max(first_open, by_session.get(session, 0))
        if sender == NO_TEXT:
            least = max(len(groups) - 1, 0)
        at = by_sender.get(sender, -1)
        if at < least:
            at = by_sender[sender] = len(groups)
            groups.append([])
        groups[at].append(row)
        if session != NO_TEXT:
            by_session[session] = at
        if sender == NO_TEXT:
            first_open = at
    return groups
