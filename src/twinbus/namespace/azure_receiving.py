"""Receives and settles messages on links of the SDK.

A receive gives the service credit for the messages that it wants. When the first ones have arrived,
or its time is over, it withdraws the credit (a drain), so that no message is locked without a
receiver. It holds the `turn` of its link only while it reads, not while it waits for the socket, so
that settlements on the same link do not wait for a long poll.

A message is settled on the link that delivered it. If that link has ended, and for deferred
messages, a management request settles it, which any link of the entity can carry.
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
    AZURE_MESSAGE_LOCKS,
    AZURE_POLL_S,
    AZURE_RECEIVE_MESSAGES,
    AZURE_REQUEST_S,
    NEVER_US,
    SECOND_US,
    SHOWN_LOST,
)
from twinbus.message import DELIVERY_SCHEMA, LOCK_TOKEN, TIMESTAMP, BrokeredMessage, to_batch
from twinbus.namespace.azure_errors import to_messaging_error
from twinbus.namespace.azure_links import AzureLink, LinkPurpose
from twinbus.namespace.azure_sdk import (
    Inlet,
    SdkOperation,
    SettledState,
    int32,
    long,
    longs,
    request,
    settled_state,
    timestamp,
    uint,
    uuids,
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

_UPDATES = {  # the names of dispositions in management requests
    Disposition.COMPLETE: "completed",
    Disposition.ABANDON: "abandoned",
    Disposition.RELEASE: "abandoned",
    Disposition.DEFER: "defered",
    Disposition.DEAD_LETTER: "suspended",
}
_UNREADABLE = "TwinbusCannotRead"
_LAST_MS = 253_402_300_799_999  # the latest time that a request can express
_ANY_TIME_MS = 253_402_300_800_000  # the service then ignores when states were updated


@dataclass(slots=True)
class MessageLock:
    """A locked message, with what is needed to settle it."""

    path: str  # lower case
    link: AzureLink
    inlet: Inlet
    frame: Any
    until_us: int  # wall time

    def fits(self, path: str) -> bool:
        """Return whether it is of this entity and its link can still settle it."""
        return self.path == path.lower() and self.link.delivers(self.inlet)


class MessageLocks:
    """The messages that this process has received and not settled, by lock token; bounded.

    An unknown token is settled by a management request, so forgetting one costs only time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: OrderedDict[UUID, MessageLock] = OrderedDict()

    def add(self, token: UUID, lock: MessageLock) -> None:
        """Add a message; forget the oldest if there are too many."""
        with self._lock:
            self._locks[token] = lock
            if len(self._locks) > AZURE_MESSAGE_LOCKS:
                self._locks.popitem(last=False)

    def take(
        self, path: str, tokens: Iterable[UUID]
    ) -> tuple[dict[AzureLink, dict[UUID, MessageLock]], list[UUID]]:
        """Remove messages and return them by link; also return the tokens that are unknown."""
        found: dict[AzureLink, dict[UUID, MessageLock]] = {}
        unknown = []
        with self._lock:
            for token in tokens:
                lock = self._locks.get(token)
                if lock is not None and lock.fits(path):
                    found.setdefault(lock.link, {})[token] = self._locks.pop(token)
                else:
                    unknown.append(token)
        return found, unknown

    def links(self, path: str, tokens: Iterable[UUID]) -> dict[AzureLink, list[UUID]]:
        """Return the open links that delivered messages, with their lock tokens."""
        found: dict[AzureLink, list[UUID]] = {}
        with self._lock:
            for token in tokens:
                lock = self._locks.get(token)
                if lock is not None and lock.fits(path):
                    found.setdefault(lock.link, []).append(token)
        return found

    def prolong(self, tokens: Iterable[UUID], until: datetime) -> None:
        """Record that locks were renewed."""
        with self._lock:
            for token in tokens:
                if token in self._locks:
                    self._locks[token].until_us = moment_us(until)

    def forget_link(self, link: AzureLink) -> None:
        """Forget the messages of a closed link."""
        with self._lock:
            gone = [token for token, lock in self._locks.items() if lock.link is link]
            for token in gone:
                del self._locks[token]


class Reception:
    """A receive on a link."""

    def __init__(
        self,
        link: AzureLink,
        command: Receive,
        locks: MessageLocks,
        clock: Clock,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._link = link
        self._command = command
        self._locks = locks
        self._clock = clock
        self._is_stopped = is_stopped
        self._is_locking = link.key.purpose is LinkPurpose.LOCK
        self._is_late = False  # its time ended before messages arrived

    def run(self, deadline: int | None, open_timeout_s: float) -> list[BrokeredMessage]:
        """Return the received messages, none if none came in time; release unneeded ones.

        `deadline` is a time of the clock. Without it, only messages that are available now are
        returned.

        If the link fails after messages have arrived, they are returned anyway. The service keeps
        them locked, so if they were dropped, later messages would overtake them. The link is not
        used again, and management requests settle these messages.
        """
        link, wanted = self._link, min(self._command.max_messages, AZURE_RECEIVE_MESSAGES)
        with link.turn:
            link.open(open_timeout_s)
            inlet = link.inlet
            inlet.give_credit(wanted, drain=deadline is None)
        found: list[Any] = []
        try:
            self._until_first(inlet, deadline, found)
            self._take_credit_back(inlet, found)
        except Exception:
            with link.turn:
                found += inlet.take()
            if not found or self._command.session is not None:  # the session's lock is lost, too
                raise
            link.has_failed = True
        finally:
            inlet.stop()
        messages, back, unread = self._sorted(inlet, found)
        try:
            self._release(inlet, back, unread)
        except Exception:
            if not messages or self._command.session is not None:
                raise
            link.has_failed = True  # the service delivers the others again when their locks expire
        return messages

    def _until_first(self, inlet: Inlet, deadline: int | None, found: list[Any]) -> None:
        """Wait for the first messages; without a deadline, only for those available now."""
        began = time.monotonic()
        while True:
            self._is_late = deadline is not None and self._clock.now_us() >= deadline
            with self._link.turn:
                found += inlet.read()
            if found or inlet.is_drained or self._is_stopped() or self._is_late:
                return
            if deadline is None and time.monotonic() - began > AZURE_DRAIN_S:
                raise OperationTimeoutError(
                    f"the service did not report within {AZURE_DRAIN_S} s whether it has messages. "
                    "Try again"
                )
            left = AZURE_POLL_S
            if deadline is not None:
                until = self._clock.seconds_until(deadline)
                left = min(left, AZURE_POLL_S if until is None else until)
            inlet.wait(left)

    def _take_credit_back(self, inlet: Inlet, found: list[Any]) -> None:
        """Withdraw the credit, and accept the messages that arrive meanwhile.

        Messages may use up the credit. Then a service need not answer the drain.
        """
        with self._link.turn:
            is_due = inlet.drain()
        deadline = time.monotonic() + AZURE_DRAIN_S
        while is_due and inlet.has_credit:
            with self._link.turn:
                found += inlet.read()
            if inlet.has_credit and time.monotonic() >= deadline:
                raise CommunicationError(
                    f"the service did not confirm within {AZURE_DRAIN_S} s that a receive has "
                    "ended, so messages may stay locked until their locks expire. Receive again"
                )
            if inlet.has_credit:
                inlet.wait(AZURE_POLL_S)
        with self._link.turn:
            found += inlet.take()

    def _sorted(
        self, inlet: Inlet, deliveries: list[Any]
    ) -> tuple[list[BrokeredMessage], list[Any], list[Any]]:
        """Return messages up to the requested size, frames to release, and unreadable frames."""
        messages: list[BrokeredMessage] = []
        unread: list[Any] = []
        back: list[Any] = []
        size, is_dead = 0, _is_dead(self._command.path)
        can_give_back = self._is_locking and not self._link.has_failed
        for frame, payload in deliveries:
            if can_give_back and (back or self._is_late or self._is_stopped()):
                back.append(frame)
                continue
            try:
                message = read_delivered(payload, is_dead=is_dead)
            except MessagingError:
                unread.append(frame)
                continue
            size += message.size
            if can_give_back and messages and size > self._command.max_bytes:
                back.append(frame)
                continue
            messages.append(self._locked(inlet, frame, message) if self._is_locking else message)
        return messages, back, unread if can_give_back else []

    def _release(self, inlet: Inlet, back: list[Any], unread: list[Any]) -> None:
        """Release messages that are not needed, and dead-letter those that cannot be read."""
        with self._link.turn:
            if back:
                inlet.settle(back, settled_state(Disposition.RELEASE, None, None), AZURE_REQUEST_S)
            if unread:
                why = "the message is not valid AMQP, or has values that Twinbus does not support"
                state = settled_state(Disposition.DEAD_LETTER, _UNREADABLE, why)
                inlet.settle(unread, state, AZURE_REQUEST_S)

    def _locked(self, inlet: Inlet, frame: Any, message: BrokeredMessage) -> BrokeredMessage:
        token, until_us = UUID(bytes_le=bytes(frame[2])), NEVER_US
        if message.locked_until_utc is not None:
            until_us = moment_us(message.locked_until_utc)
            until = time.monotonic() + (until_us - self._clock.wall_us()) / SECOND_US
            self._link.locked_until = max(self._link.locked_until, until)
        path = self._command.path.lower()
        self._locks.add(token, MessageLock(path, self._link, inlet, frame, until_us))
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
    locks: MessageLocks,
    borrow: Callable[[], Any],
    clock: Clock,
    timeout_s: float,
) -> None:
    """Settle messages; raise if locks were lost, after the other messages are settled.

    `borrow` is a context manager that lends a link of the entity for management requests.
    """
    tokens = list(dict.fromkeys(UUID(bytes=token) for token in command.lock_tokens.to_pylist()))
    found, unknown = locks.take(command.path, tokens)
    state = settled_state(command.disposition, command.reason, command.description)
    lost: list[UUID] = []
    for link, messages in found.items():
        if command.disposition is Disposition.RELEASE:  # the service does not confirm a release
            now = clock.wall_us()
            lost += [token for token, lock in messages.items() if lock.until_us <= now]
        failed = _settle_on(link, messages, state, timeout_s)
        if failed is None:  # the link has ended
            unknown += messages
        else:
            lost += _lost_of(failed, command.path)
    if unknown:
        with borrow() as link:
            lost += _update(link, command, unknown, timeout_s)
    if lost:
        raise MessageLockLostError(
            f"{command.path}: {len(lost)} of {len(tokens)} locks were lost: they expired, or the "
            "messages were settled before. The service delivers unsettled messages again; receive "
            "again",
            path=command.path,
            lock_tokens=tuple(lost[:SHOWN_LOST]),
        )


def _settle_on(
    link: AzureLink, messages: dict[UUID, MessageLock], state: SettledState, timeout_s: float
) -> dict[UUID, Exception | None] | None:
    """Settle on the link that delivered the messages; None if it ended: the result is unknown."""
    frames = [lock.frame for lock in messages.values()]
    try:
        with link.turn:
            failures = next(iter(messages.values())).inlet.settle(frames, state, timeout_s)
    except OperationTimeoutError:
        link.suspect()
        raise
    except Exception:  # noqa: BLE001 - a management request then finds out the result
        return None
    return dict(zip(messages, failures, strict=True))


def _lost_of(failed: dict[UUID, Exception | None], path: str) -> list[UUID]:
    """Return the messages whose locks were lost; raise any other failure."""
    lost = []
    for token, failure in failed.items():
        if failure is None:
            continue
        error = to_messaging_error(failure, path)
        if not isinstance(error, MessageLockLostError):
            raise error
        lost.append(token)
    return lost


def _update(link: AzureLink, command: Settle, tokens: list[UUID], timeout_s: float) -> list[UUID]:
    """Settle by a management request; return the tokens of lost locks."""
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
    return [lost for token in tokens for lost in _update(link, command, [token], timeout_s)]


def _request_update(link: AzureLink, command: Settle, tokens: list[UUID], timeout_s: float) -> None:
    body: dict[str, Any] = {
        "disposition-status": _UPDATES[command.disposition],
        "lock-tokens": uuids(tokens),
    }
    if command.disposition is Disposition.DEAD_LETTER:
        body["deadletter-reason"] = command.reason or ""
        body["deadletter-description"] = command.description or ""
    request(link.sdk, SdkOperation.SETTLE, body, timeout_s)


def renew(link: AzureLink, tokens: Sequence[UUID], timeout_s: float) -> datetime:
    """Renew the locks of messages; return when they expire."""
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, SdkOperation.RENEW, {"lock-tokens": uuids(tokens)}, timeout_s)
    until = from_us(min(int(ms) for ms in values[b"expirations"]) * 1000)
    left_s = (moment_us(until) - time.time_ns() // 1000) / SECOND_US
    link.locked_until = max(link.locked_until, time.monotonic() + left_s)
    return until


# -- by sequence number ------------------------------------------------------------------------


def peek(link: AzureLink, command: Peek, timeout_s: float) -> list[BrokeredMessage]:
    """Return messages without locking them."""
    body: dict[str, Any] = {
        "from-sequence-number": long(max(command.from_sequence_number, 1)),
        "message-count": min(command.max_messages, AZURE_RECEIVE_MESSAGES),
    }
    if command.session_id is not None:
        body["session-id"] = command.session_id
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, SdkOperation.PEEK, body, timeout_s)
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
    link: AzureLink, command: ReceiveDeferred, timeout_s: float
) -> list[BrokeredMessage]:
    """Return deferred messages by their sequence numbers, all or none."""
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
        values = request(link.sdk, SdkOperation.RECEIVE_DEFERRED, body, timeout_s)
    is_dead = _is_dead(command.path)
    return [
        replace(
            read_delivered(entry[b"message"], is_dead=is_dead), lock_token=entry.get(b"lock-token")
        )
        for entry in ([] if values is None else values[b"messages"])
    ]


def delete_messages(link: AzureLink, command: DeleteMessages, timeout_s: float) -> int:
    """Delete the oldest messages; return how many were deleted."""
    before = command.enqueued_before_utc
    body: dict[str, Any] = {
        "message-count": int32(command.max_messages),
        "enqueued-time-utc": timestamp(_LAST_MS if before is None else moment_us(before) // 1000),
    }
    if command.session is not None:
        body["session-id"] = command.session.session_id
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, SdkOperation.DELETE, body, timeout_s)
    return 0 if values is None else int(values[b"message-count"])


def list_sessions(link: AzureLink, command: ListSessions, timeout_s: float) -> list[str]:
    """Return the ids of sessions that have messages or a state."""
    after = command.state_updated_after_utc
    body = {
        "last-updated-time": timestamp(_ANY_TIME_MS if after is None else moment_us(after) // 1000),
        "skip": int32(command.skip),
        "top": int32(command.max_sessions),
    }
    with link.turn:
        link.open(timeout_s)
        values = request(link.sdk, SdkOperation.LIST_SESSIONS, body, timeout_s)
    names = [] if values is None else values[b"sessions-ids"]
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def _is_dead(path: str) -> bool:
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())
