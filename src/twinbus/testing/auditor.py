"""The auditor of an outage simulation: records every send, and checks the guarantees at the end.

G1   no acknowledged message is lost
G2   no message is enqueued twice
G3   a backlog queue keeps the order of each client; with `preserve_order`, an entity gets all
     acknowledged messages of a process in the order in which they were sent
G4   every field is as it was sent
G5   failover and return happen in time, and never for errors of the caller
G6   a healthy send costs one operation
G7   poison is dead-lettered, the backlog is empty
G8   when one factory of a pairing ends, the other ends as it must (outage.py checks this)
G9   metered operations equal the formula
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import pyarrow as pa

from twinbus.client.sender import MessageSender
from twinbus.clock import ManualClock, to_us
from twinbus.cost.estimate import units_of
from twinbus.cost.stages import DIVERTED, Stage, stage_operations
from twinbus.entities import dead_letter_path, is_backlog_path
from twinbus.errors import BacklogUnavailableError, MessagingError, TransientError
from twinbus.limits import PING_CONTENT_TYPE, SECOND_US
from twinbus.message import (
    APPLICATION_FIELDS,
    BrokeredMessage,
    as_batch,
    sizes,
    to_messages,
)
from twinbus.namespace.contract import Namespace
from twinbus.pairing.cancelling import pages
from twinbus.pairing.events import FailedOver
from twinbus.pairing.failures import says_unavailable
from twinbus.pairing.health import HealthState, Sign
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import (
    Command,
    LeaseRange,
    ReadRange,
    Send,
    SendReceipt,
    SettleRange,
)

R = TypeVar("R")
_NEVER_A_CAUSE = (
    "ServerBusy",
    "Unauthorized",
    "EntityNotFound",
    "MessageSizeExceeded",
    "InvalidArgument",
)


@dataclass
class Verdict:
    """The result of a simulation."""

    violations: list[str] = field(default_factory=list)
    simulated: timedelta = timedelta(0)
    faults: int = 0
    sent: int = 0
    acknowledged: int = 0
    raised: int = 0  # sends that raised; their messages may have been enqueued even so
    diverted: int = 0
    moved: int = 0
    poisoned: int = 0
    reordered: int = 0  # messages enqueued before an earlier message of the same client
    reordered_in_sessions: int = 0  # by process, entity and session
    signs: "Counter[tuple[HealthState, Sign]]" = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        """Whether every guarantee held."""
        return not self.violations

    def __str__(self) -> str:
        hours = self.simulated / timedelta(hours=1)
        story = (
            f"{hours:.1f} hours, {self.faults} faults: {self.sent} messages sent, "
            f"{self.acknowledged} acknowledged, {self.diverted} diverted, {self.moved} brought "
            f"home, {self.raised} sends raised, {self.reordered} messages out of order, "
            f"{self.poisoned} poison set aside"
        )
        if self.is_good:
            return f"{story}. Lost 0, doubled 0: every guarantee held"
        return "\n".join([f"{story}. BROKEN:", *(f"  {text}" for text in self.violations)])


class Watched:
    """Wraps a namespace: records accepted sends, delays a send, or fails the mover's settlement."""

    def __init__(self, inner: Namespace, clock: ManualClock) -> None:
        self.inner = inner
        self._clock = clock
        self.sends = 0  # sends that reached the namespace, without pings
        self.slow_for_s = 0  # delay of the reply to the next send
        self.fails_next_settle = False
        self.accepted: defaultdict[str, list[str]] = defaultdict(list)  # ids in order, by path
        self.operations: Counter[Stage] = Counter()  # what the meter must show

    @property
    def id(self) -> str:
        """The unique id of the wrapped namespace."""
        return self.inner.id

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the wrapped namespace."""
        return self.inner.capabilities

    def submit(self, command: Command[R]) -> "Future[R]":
        """Pass a command on."""
        if isinstance(command, SettleRange) and self.fails_next_settle:
            self.fails_next_settle = False
            refused: Future[R] = Future()
            refused.set_exception(TransientError("the mover was killed here"))
            return refused
        future = self.inner.submit(command)
        if isinstance(command, Send):
            self._note(command, future)
        if future.exception() is None:
            self.operations.update(expected_operations(command, future.result()))
        return future

    def ask(self, command: Command[R], timeout_s: float | None = None) -> R:
        """Pass a command on and return its reply; in a simulation every reply comes at once."""
        reply = self.submit(command).result(timeout_s)
        if isinstance(command, Send) and self.slow_for_s:
            seconds, self.slow_for_s = self.slow_for_s, 0
            for _ in range(seconds):  # in steps, so that timers and faults run meanwhile
                self._clock.sleep_us(SECOND_US)
        return reply

    def close(self) -> None:
        """Close the wrapped namespace."""
        self.inner.close()

    def _note(self, command: Send, future: "Future[Any]") -> None:
        batch = as_batch(command.messages)
        if batch.column("content_type").to_pylist()[0] == PING_CONTENT_TYPE:
            return
        self.sends += 1
        if future.exception() is None:
            receipt: SendReceipt = future.result()
            ids = batch.column("message_id").to_pylist()
            numbered = zip(ids, receipt.sequence_numbers, strict=True)
            new = [message_id for message_id, number in numbered if number]
            self.accepted[command.path.lower()] += new


def expected_operations(command: Command[Any], reply: Any) -> dict[Stage, int]:
    """Return the operations that a request of a pairing or a syphon costs by the formulas."""
    if isinstance(command, Send):
        batch = as_batch(command.messages)
        stage = Stage.SEND
        if set(batch.column("content_type").to_pylist()) == {PING_CONTENT_TYPE}:
            stage = Stage.PING
        elif is_backlog_path(command.path):
            stage = Stage.SEND_TO_BACKLOG
        elif command.origin is not None and is_backlog_path(command.origin.source):
            stage = Stage.SEND_TO_PRIMARY
        return {stage: sum(map(units_of, sizes(batch).tolist()))}
    if not is_backlog_path(getattr(command, "path", "")):
        return {}
    if isinstance(command, ReadRange):
        return {Stage.RECEIVE_FROM_BACKLOG: sum(map(units_of, sizes(reply).tolist())) or 1}
    if isinstance(command, SettleRange):
        completed = sum(last - first + 1 for first, last in command.completed)
        dead = sum(len(part.sequence_numbers) for part in command.dead_lettered)
        return {Stage.COMPLETE_IN_BACKLOG: completed + dead}
    if isinstance(command, LeaseRange) and reply is None:
        return {Stage.IDLE_POLL: 1}
    return {}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A send of a simulated client."""

    process: str
    client: int
    path: str  # lower case
    messages: Sequence[BrokeredMessage]
    began: int


class Auditor:
    """Records every send, and compares the sends with the content of the namespaces."""

    def __init__(self, clock: ManualClock, *, keeps_order: bool = False) -> None:
        self.verdict = Verdict()
        self._keeps_order = keeps_order  # no acknowledged message may be overtaken
        self.cancelled: set[str] = set()
        self.unsure: set[str] = set()  # ids of messages that may or may not be enqueued
        self.maybe_poison = 0  # messages to a missing entity whose sends raised
        self.direct: set[str] = set()  # ids that the primary accepted from their client
        self._clock = clock
        self._sent: dict[str, Attempt] = {}  # by message id, in the order of sending
        self._acknowledged: set[str] = set()
        self._failing_since: dict[tuple[str, str], int] = {}  # process, path

    def complain(self, guarantee: str, text: str) -> None:
        """Record a broken guarantee."""
        self.verdict.violations.append(f"{guarantee}: {text}")

    # -- during the simulation -----------------------------------------------------------------

    def begin_send(
        self, process: str, sender: MessageSender, messages: Sequence[BrokeredMessage]
    ) -> Attempt:
        """Record a send before it is made."""
        attempt = Attempt(process, id(sender), sender.path.lower(), messages, self._clock.now_us())
        self._sent.update((message.message_id, attempt) for message in messages)
        self.verdict.sent += len(messages)
        return attempt

    def acknowledged(self, attempt: Attempt) -> None:
        """Record that a send returned."""
        self._acknowledged.update(message.message_id for message in attempt.messages)
        self.verdict.acknowledged += len(attempt.messages)
        self._failing_since.pop((attempt.process, attempt.path), None)

    def failed(
        self,
        attempt: Attempt,
        error: MessagingError,
        failover: timedelta,
        *,
        backlog_ails: bool,
    ) -> None:
        """Record that a send raised; if it should have been diverted, G5 is broken."""
        self.verdict.raised += 1
        if isinstance(error, BacklogUnavailableError):
            if not backlog_ails:
                self.complain("G5", f"no backlog queue had a fault, but a send raised {error!r}")
            return
        if not says_unavailable(error):
            return
        key = attempt.process, attempt.path
        since = self._failing_since.setdefault(key, self._clock.now_us())
        if not failover or attempt.began - since > to_us(failover):
            self.complain(
                "G5", f"{attempt.path} should have failed over, but a send raised {error!r}"
            )

    def forget_failures(self, process: str, path: str | None = None) -> None:
        """Forget since when sends of a process have failed, to an entity or to all of them.

        The simulation calls this when the clock of the process jumps, and when an entity returns or
        is marked healthy.
        """
        for key in [k for k in self._failing_since if k[0] == process and path in (None, k[1])]:
            del self._failing_since[key]

    def check_failover(self, event: FailedOver) -> None:
        """G5: errors of the caller and ServerBusy never cause a failover."""
        if event.cause.startswith(_NEVER_A_CAUSE):
            self.complain("G5", f"{event.path} failed over because of {event.cause}")

    # -- after the simulation ------------------------------------------------------------------

    def audit_operations(self, watched: Watched, meter: pa.RecordBatch) -> None:
        """G9: the meter equals the formulas, to the last operation."""
        keys = ("operation", "purpose", "outcome")
        metered: Counter[Stage] = Counter()
        for row in meter.to_pylist():
            metered.update(stage_operations({tuple(row[key] for key in keys): row}))
        for stage in (*DIVERTED[:3], Stage.COMPLETE_IN_BACKLOG, Stage.PING, Stage.IDLE_POLL):
            if metered[stage] != watched.operations[stage]:
                self.complain(
                    "G9",
                    f"{stage.value}: metered {metered[stage]}, not {watched.operations[stage]}",
                )

    def audit_primary(self, primary: Namespace, targets: dict[str, Sequence[str]]) -> None:
        """G1, G2, G4: compare the queues with the sends; `targets` maps a path to its queues."""
        self._places: dict[str, dict[str, int]] = {}  # by queue and message id: position
        for path, queues in targets.items():
            wanted = {sent_id: a for sent_id, a in self._sent.items() if a.path == path}
            for queue in queues:
                found = browse(primary, queue)
                copies = Counter(message.message_id for message in found)
                for message in found:
                    self._check_fidelity(message)
                for message_id in wanted:
                    self._check_count(queue, message_id, copies[message_id])
                for message_id in set(copies) - set(wanted):
                    self.complain("G2", f"{message_id} is in {queue}, but was not sent there")
                self._places[queue] = {
                    m.message_id: at
                    for at, m in enumerate(found)
                    if m.scheduled_enqueue_time_utc is None
                }
                self._count_reordered(wanted, self._places[queue])

    def _check_count(self, queue: str, message_id: str, count: int) -> None:
        if count > 1:
            self.complain("G2", f"{message_id} is {count} times in {queue}")
        elif message_id in self.cancelled:
            if count:
                self.complain("G1", f"{message_id} was cancelled, but is in {queue}")
        elif not count and message_id in self._acknowledged and message_id not in self.unsure:
            self.complain("G1", f"{message_id} was acknowledged, but is not in {queue}")

    def _check_fidelity(self, message: BrokeredMessage) -> None:
        attempt = self._sent.get(message.message_id)
        if attempt is None:
            return
        sent = next(m for m in attempt.messages if m.message_id == message.message_id)
        for name in APPLICATION_FIELDS:
            was, now = getattr(sent, name), getattr(message, name)
            if was != now:
                self.complain("G4", f"{name} of {message.message_id} was {was!r} and is {now!r}")

    def _count_reordered(self, wanted: dict[str, Attempt], places: dict[str, int]) -> None:
        """Count messages out of order, by client and by session, and report those that break G3.

        Messages whose send raised are counted, but do not break G3: their callers do not know
        whether they were enqueued.
        """
        verdict = self.verdict
        clients: dict[object, int] = {}
        sessions: dict[object, int] = {}
        acknowledged: dict[object, int] = {}  # by process: its clients share one order
        for message_id, attempt in wanted.items():
            place = places.get(message_id)
            if place is None:
                continue
            session = next(m for m in attempt.messages if m.message_id == message_id).session_id
            verdict.reordered += _has_overtaken(clients, attempt.client, place)
            if session is not None:
                key = attempt.process, session
                verdict.reordered_in_sessions += _has_overtaken(sessions, key, place)
            must_keep_order = self._keeps_order and message_id in self._acknowledged
            if must_keep_order and _has_overtaken(acknowledged, attempt.process, place):
                self.complain("G3", f"{message_id} to {attempt.path} overtook an earlier message")

    def audit_backlog(self, secondary: Watched, queues: Sequence[str]) -> None:
        """G3 and G7: order kept per backlog queue, no message left, poison dead-lettered."""
        aside = 0
        for queue in queues:
            left = browse(secondary.inner, queue)
            if left:
                self.complain("G7", f"{len(left)} messages are left in {queue}")
            dead = browse(secondary.inner, dead_letter_path(queue))
            aside += len(dead)
            for message in dead:
                if not message.dead_letter_error_description:
                    self.complain("G7", f"{message.message_id} was dead-lettered without a reason")
            for places in self._places.values():
                self._check_order(queue, secondary.accepted[queue.lower()], places)
        if not 0 <= aside - self.verdict.poisoned <= self.maybe_poison:
            self.complain("G7", f"{self.verdict.poisoned} were poison, {aside} were dead-lettered")

    def _check_order(self, queue: str, ids: Sequence[str], places: dict[str, int]) -> None:
        by_client: defaultdict[int, list[int]] = defaultdict(list)
        for message_id in ids:
            if message_id in places and message_id not in self.direct:
                by_client[self._sent[message_id].client].append(places[message_id])
        for order in by_client.values():
            if any(earlier > later for earlier, later in pairwise(order)):
                self.complain("G3", f"messages of one client in {queue} came home out of order")


def _has_overtaken(highest: dict[object, int], key: object, place: int) -> bool:
    """Return whether a message is in front of one that was sent before it; note its place."""
    before = highest.get(key, -1)
    highest[key] = max(place, before)
    return place < before


def browse(namespace: Namespace, path: str) -> list[BrokeredMessage]:
    """Return all messages of an entity, in the order of their sequence numbers."""
    return [message for page in pages(namespace.ask, path) for message in to_messages(page)]
