"""Receiving and settling through links of the SDK.

A receive gives the service credit for the messages that it wants. When the first ones are there, or
its time is over, it takes the credit back (a drain), so that no message is locked for nobody. It
holds the turn of its link only while it reads, and waits for the socket without it: settlements on
the same link do not wait for a long poll.

A message is settled on the link that it came by. Where that link is gone, and for deferred
messages, the settlement is a request of management, which any link of the entity can carry.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import pyarrow as pa

from twinbus.clock import Clock, from_us, moment_us
from twinbus.entities import DEAD_LETTER_SUFFIX
from twinbus.errors import (
    CommunicationError,
    InvalidArgumentError,
    MessageLockLostError,
    MessagingError,
    OperationTimeoutError,
)
from twinbus.limits import (
    AZURE_DRAIN_S,
    AZURE_HELD_LOCKS,
    AZURE_POLL_S,
    AZURE_RECEIVE_MESSAGES,
    AZURE_REQUEST_S,
    NEVER_US,
    SECOND_US,
    SHOWN_LOST,
)
from twinbus.message import DELIVERY_SCHEMA, LOCK_TOKEN, TIMESTAMP, BrokeredMessage, to_batch
from twinbus.namespace.azure_errors import to_messaging_error
from twinbus.namespace.azure_links import Link, Purpose
from twinbus.namespace.azure_sdk import (
    Inlet,
    Operation,
    SettledState,
    long,
    longs,
    request,
    settled_state,
    timestamp,
    uint,
    uuids,
    whole,
)
from twinbus.protocol.commands import (
    DeleteMessages,
    Disposition,
    ListSessions,
    Peek,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    Settle,
)
from twinbus.servicebus.messages import read_delivered

_UPDATES = {  # how management names a disposition
    Disposition.COMPLETE: "completed",
    Disposition.ABANDON: "abandoned",
    Disposition.RELEASE: "abandoned",
    Disposition.DEFER: "defered",
    Disposition.DEAD_LETTER: "suspended",
}
_UNREADABLE = "TwinbusCannotRead"
_LAST_MS = 253_402_300_799_999  # the last moment that a request can name
_ANY_TIME_MS = 253_402_300_800_000  # with which the service lists sessions whatever their time


@dataclass(slots=True)
class HeldLock:
    """A locked message, and what settles it."""

    path: str  # lower case
    link: Link
    inlet: Inlet
    frame: Any
    until_us: int  # wall time

    def fits(self, path: str) -> bool:
        """Whether the message is one of an entity, and can be settled on its link."""
        return self.path == path.lower() and self.link.delivers(self.inlet)


class HeldLocks:
    """The messages that this process has received and not settled, by lock token; bounded.

    A token that is not here is settled by management: forgetting one costs time and nothing else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[UUID, HeldLock] = OrderedDict()

    def add(self, token: UUID, held: HeldLock) -> None:
        """Remember a message; the oldest is forgotten when there are too many."""
        with self._lock:
            self._held[token] = held
            if len(self._held) > AZURE_HELD_LOCKS:
                self._held.popitem(last=False)

    def take(
        self, path: str, tokens: Iterable[UUID]
    ) -> tuple[dict[Link, dict[UUID, HeldLock]], list[UUID]]:
        """Return messages by link, and forget them; and the tokens that need management."""
        found: dict[Link, dict[UUID, HeldLock]] = {}
        others = []
        with self._lock:
            for token in tokens:
                held = self._held.get(token)
                if held is not None and held.fits(path):
                    found.setdefault(held.link, {})[token] = self._held.pop(token)
                else:
                    others.append(token)
        return found, others

    def links(self, path: str, tokens: Iterable[UUID]) -> dict[Link, list[UUID]]:
        """Return the links that messages came by, as far as they are open."""
        found: dict[Link, list[UUID]] = {}
        with self._lock:
            for token in tokens:
                held = self._held.get(token)
                if held is not None and held.fits(path):
                    found.setdefault(held.link, []).append(token)
        return found

    def prolong(self, tokens: Iterable[UUID], until: datetime) -> None:
        """Note that locks last longer."""
        with self._lock:
            for token in tokens:
                if token in self._held:
                    self._held[token].until_us = moment_us(until)

    def forget_link(self, link: Link) -> None:
        """Forget the messages of a link that is closed."""
        with self._lock:
            gone = [token for token, held in self._held.items() if held.link is link]
            for token in gone:
                del self._held[token]


class Reception:
    """One receive on one link."""

    def __init__(
        self,
        link: Link,
        command: Receive,
        held: HeldLocks,
        clock: Clock,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._link = link
        self._command = command
        self._held = held
        self._clock = clock
        self._is_stopped = is_stopped
        self._is_locking = link.key.purpose is Purpose.LOCK
        self._is_late = False  # its time was over before messages came

    def run(self, deadline: int | None, open_timeout_s: float) -> list[BrokeredMessage]:
        """Return messages, none if none came in time; give back what nobody waits for.

        Without a deadline, a moment of the clock, it returns what is there now.
        """
        link, wanted = self._link, min(self._command.max_messages, AZURE_RECEIVE_MESSAGES)
        with link.turn:
            link.open(open_timeout_s)
            inlet = link.inlet
            inlet.give_credit(wanted, drain=deadline is None)
        try:
            found = self._until_first(inlet, deadline)
            found += self._rest(inlet)
        finally:
            inlet.stop()
        return self._kept(inlet, found)

    def _until_first(self, inlet: Inlet, deadline: int | None) -> list[Any]:
        """Return the first messages; without a deadline, those that are there now."""
        began = time.monotonic()
        while True:
            self._is_late = deadline is not None and self._clock.now_us() >= deadline
            with self._link.turn:
                found = inlet.read()
            if found or inlet.is_drained or self._is_stopped() or self._is_late:
                return found
            if deadline is None and time.monotonic() - began > AZURE_DRAIN_S:
                raise OperationTimeoutError("the service did not say what it has; try again")
            left = AZURE_POLL_S
            if deadline is not None:
                until = self._clock.seconds_until(deadline)
                left = min(left, AZURE_POLL_S if until is None else until)
            inlet.wait(left)

    def _rest(self, inlet: Inlet) -> list[Any]:
        """Take the credit back; return what came meanwhile."""
        found: list[Any] = []
        with self._link.turn:
            is_due = inlet.drain()
        deadline = time.monotonic() + AZURE_DRAIN_S
        while is_due and not inlet.is_drained:
            with self._link.turn:
                found += inlet.read()
            if time.monotonic() >= deadline:
                raise CommunicationError("the service did not take back the credit of a receive")
            if not inlet.is_drained:
                inlet.wait(AZURE_POLL_S)
        with self._link.turn:
            found += inlet.take()
        return found

    def _kept(self, inlet: Inlet, deliveries: list[Any]) -> list[BrokeredMessage]:
        """Return deliveries as messages, up to the size that was asked for."""
        messages: list[BrokeredMessage] = []
        unread: list[Any] = []
        back: list[Any] = []
        size, is_dead = 0, _is_dead(self._command.path)
        for frame, payload in deliveries:
            if self._is_locking and (back or self._is_late or self._is_stopped()):
                back.append(frame)
                continue
            try:
                message = read_delivered(payload, is_dead=is_dead)
            except MessagingError:
                unread.append(frame)
                continue
            size += message.size
            if self._is_locking and messages and size > self._command.max_bytes:
                back.append(frame)
                continue
            messages.append(self._locked(inlet, frame, message) if self._is_locking else message)
        with self._link.turn:
            if back:
                inlet.settle(back, settled_state(Disposition.RELEASE, None, None), AZURE_REQUEST_S)
            if unread and self._is_locking:
                why = "the message is not valid AMQP, or has values that Twinbus cannot hold"
                state = settled_state(Disposition.DEAD_LETTER, _UNREADABLE, why)
                inlet.settle(unread, state, AZURE_REQUEST_S)
        return messages

    def _locked(self, inlet: Inlet, frame: Any, message: BrokeredMessage) -> BrokeredMessage:
        token, until_us = UUID(bytes_le=bytes(frame[2])), NEVER_US
        if message.locked_until_utc is not None:
            until_us = moment_us(message.locked_until_utc)
            until = time.monotonic() + (until_us - self._clock.wall_us()) / SECOND_US
            self._link.held_until = max(self._link.held_until, until)
        path = self._command.path.lower()
        self._held.add(token, HeldLock(path, self._link, inlet, frame, until_us))
        return replace(message, lock_token=token)


def delivery_batch(messages: Sequence[BrokeredMessage]) -> pa.RecordBatch:
    """Return delivered messages as columns."""
    columns = list(to_batch(messages).columns)
    for field in list(DELIVERY_SCHEMA)[len(columns) :]:
        values = [getattr(message, field.name) for message in messages]
        columns.append(pa.array([_plain(field.type, value) for value in values], field.type))
    return pa.RecordBatch.from_arrays(columns, schema=DELIVERY_SCHEMA)


def _plain(kind: pa.DataType, value: Any) -> Any:
    if value is None:
        return None
    if kind == LOCK_TOKEN:
        return value.bytes
    return moment_us(value) if kind == TIMESTAMP else value


# -- settling ----------------------------------------------------------------------------------


def settle(
    command: Settle,
    held: HeldLocks,
    borrow: Callable[[], Any],
    clock: Clock,
    timeout_s: float,
) -> None:
    """Carry a decision out; raise when locks were lost, after the others are settled.

    `borrow` gives a link of the entity in a `with` statement, for requests of management.
    """
    tokens = list(dict.fromkeys(UUID(bytes=one) for one in command.lock_tokens.to_pylist()))
    found, others = held.take(command.path, tokens)
    state = settled_state(command.disposition, command.reason, command.description)
    lost: list[UUID] = []
    for link, messages in found.items():
        if command.disposition is Disposition.RELEASE:  # the service does not answer that
            now = clock.wall_us()
            lost += [token for token, one in messages.items() if one.until_us <= now]
        failed = _settle_on(link, messages, state, timeout_s)
        if failed is None:  # the link ended meanwhile
            others += messages
        else:
            lost += _lost_of(failed, command.path)
    if others:
        with borrow() as link:
            lost += _update(link, command, others, timeout_s)
    if lost:
        raise MessageLockLostError(
            f"{command.path}: {len(lost)} of {len(tokens)} locks are lost; their messages will be "
            "delivered again",
            path=command.path,
            lock_tokens=tuple(lost[:SHOWN_LOST]),
        )


def _settle_on(
    link: Link, messages: dict[UUID, HeldLock], state: SettledState, timeout_s: float
) -> dict[UUID, Exception | None] | None:
    """Settle on the link that messages came by; None: it has ended, and nobody knows."""
    frames = [one.frame for one in messages.values()]
    try:
        with link.turn:
            failures = next(iter(messages.values())).inlet.settle(frames, state, timeout_s)
    except OperationTimeoutError:
        raise
    except Exception:  # noqa: BLE001 - whatever it was, management knows what became of them
        return None
    return dict(zip(messages, failures, strict=True))


def _lost_of(failed: dict[UUID, Exception | None], path: str) -> list[UUID]:
    """Return the messages whose locks are lost; raise another failure."""
    lost = []
    for token, failure in failed.items():
        if failure is None:
            continue
        error = to_messaging_error(failure, path)
        if not isinstance(error, MessageLockLostError):
            raise error
        lost.append(token)
    return lost


def _update(link: Link, command: Settle, tokens: list[UUID], timeout_s: float) -> list[UUID]:
    """Settle by management; return the tokens of lost locks."""
    with link.turn:
        link.open(timeout_s)
        try:
            _request_update(link, command, tokens, timeout_s)
        except Exception as failure:
            error = to_messaging_error(failure, command.path)
            if not isinstance(error, MessageLockLostError | InvalidArgumentError):
                raise
            if len(tokens) == 1:
                return tokens
        else:
            return []
    return [one for token in tokens for one in _update(link, command, [token], timeout_s)]


def _request_update(link: Link, command: Settle, tokens: list[UUID], timeout_s: float) -> None:
    body: dict[str, Any] = {
        "disposition-status": _UPDATES[command.disposition],
        "lock-tokens": uuids(tokens),
    }
    if command.disposition is Disposition.DEAD_LETTER:
        body["deadletter-reason"] = command.reason or ""
        body["deadletter-description"] = command.description or ""
    request(link.sdk, Operation.SETTLE, body, timeout_s)


def renew(link: Link, tokens: Sequence[UUID], timeout_s: float) -> datetime:
    """Lock messages for another lock duration; return until when."""
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, Operation.RENEW, {"lock-tokens": uuids(tokens)}, timeout_s)
    until = from_us(min(int(ms) for ms in values[b"expirations"]) * 1000)
    left_s = (moment_us(until) - time.time_ns() // 1000) / SECOND_US
    link.held_until = max(link.held_until, time.monotonic() + left_s)
    return until


# -- by sequence number ------------------------------------------------------------------------


def peek(link: Link, command: Peek, timeout_s: float) -> list[BrokeredMessage]:
    """Return messages without locking them."""
    body: dict[str, Any] = {
        "from-sequence-number": long(max(command.from_sequence_number, 1)),
        "message-count": min(command.max_messages, AZURE_RECEIVE_MESSAGES),
    }
    if command.session_id is not None:
        body["session-id"] = command.session_id
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, Operation.PEEK, body, timeout_s)
    is_dead, size = _is_dead(command.path), 0
    found: list[BrokeredMessage] = []
    for entry in [] if values is None else values[b"messages"]:
        message = read_delivered(entry[b"message"], is_dead=is_dead)
        size += message.size
        if found and size > command.max_bytes:
            break
        found.append(message)
    return found


def receive_deferred(
    link: Link, command: ReceiveDeferred, timeout_s: float
) -> list[BrokeredMessage]:
    """Return deferred messages by their numbers, all or none."""
    is_locking = command.mode is ReceiveMode.PEEK_LOCK
    numbers = [int(number) for number in command.sequence_numbers]
    body: dict[str, Any] = {
        "sequence-numbers": longs(numbers),
        "receiver-settle-mode": uint(1 if is_locking else 0),
    }
    if command.session is not None:
        body["session-id"] = command.session.session_id
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, Operation.RECEIVE_DEFERRED, body, timeout_s)
    is_dead = _is_dead(command.path)
    return [
        replace(
            read_delivered(entry[b"message"], is_dead=is_dead), lock_token=entry.get(b"lock-token")
        )
        for entry in ([] if values is None else values[b"messages"])
    ]


def delete_messages(link: Link, command: DeleteMessages, timeout_s: float) -> int:
    """Delete the oldest messages; return how many."""
    before = command.enqueued_before_utc
    body: dict[str, Any] = {
        "message-count": whole(command.max_messages),
        "enqueued-time-utc": timestamp(_LAST_MS if before is None else moment_us(before) // 1000),
    }
    if command.session is not None:
        body["session-id"] = command.session.session_id
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, Operation.DELETE, body, timeout_s)
    return 0 if values is None else int(values[b"message-count"])


def list_sessions(link: Link, command: ListSessions, timeout_s: float) -> list[str]:
    """Return names of sessions that have messages or a state."""
    after = command.state_updated_after_utc
    body = {
        "last-updated-time": timestamp(_ANY_TIME_MS if after is None else moment_us(after) // 1000),
        "skip": whole(command.skip),
        "top": whole(command.max_sessions),
    }
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, Operation.LIST_SESSIONS, body, timeout_s)
    names = [] if values is None else values[b"sessions-ids"]
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def _is_dead(path: str) -> bool:
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())
