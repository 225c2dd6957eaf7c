"""Receives from one queue, subscription or dead-letter queue, and settles received messages.

A receiver may fetch messages ahead (prefetch) and renew their locks (`auto_renew_for`). Closing it
releases the prefetched messages.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pyarrow as pa

from twinbus import tracing
from twinbus.client.courier import Courier
from twinbus.client.renewal import LockRenewer
from twinbus.client.sender import EntityClient
from twinbus.clock import moment_us
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessagingError
from twinbus.limits import DEFAULT_WAIT, MAX_REASON_CHARACTERS, MAX_RECEIVE_MESSAGES
from twinbus.message import BrokeredMessage, rows_of, to_messages, tokens_of
from twinbus.protocol.commands import (
    NO_WAIT,
    DeleteMessages,
    Disposition,
    GetSessionState,
    Peek,
    Receive,
    ReceiveDeferred,
    ReceiveMode,
    ReleaseSession,
    RenewLocks,
    RenewSession,
    SessionGrant,
    SessionLock,
    SetSessionState,
    Settle,
)
from twinbus.protocol.rows import Deliveries, DeliveryRows


@dataclass(frozen=True, slots=True)
class ReceivedMessage(BrokeredMessage):
    """A received message. Its methods settle it through its receiver."""

    receiver: "MessageReceiver | None" = field(default=None, repr=False, compare=False)
    _settled_as: Disposition | None = field(default=None, repr=False, compare=False)

    def complete(self) -> None:
        """Complete the message: the broker deletes it and does not deliver it again."""
        self._receiver_or_raise().complete([self])

    def abandon(self) -> None:
        """Release the message for redelivery; this delivery counts as failed."""
        self._receiver_or_raise().abandon([self])

    def defer(self) -> None:
        """Set the message aside; only `receive_deferred` with its sequence number returns it."""
        self._receiver_or_raise().defer([self])

    def dead_letter(self, reason: str | None = None, description: str | None = None) -> None:
        """Move the message to the dead-letter queue."""
        self._receiver_or_raise().dead_letter([self], reason, description)

    def renew_lock(self) -> datetime:
        """Renew the lock for another lock duration; return when it expires."""
        return self._receiver_or_raise().renew_locks([self])

    def _receiver_or_raise(self) -> "MessageReceiver":
        if self.receiver is None:
            raise InvalidOperationError(
                f"message {self.sequence_number} has no receiver, so it cannot be settled. Settle "
                "the message that a receiver returned"
            )
        return self.receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """The options of a receiver."""

    mode: ReceiveMode = ReceiveMode.PEEK_LOCK
    prefetch_count: int = 0  # messages fetched ahead; they stay locked until they are received
    auto_renew_for: timedelta | None = None  # how long locks are renewed; None: not at all

    def __post_init__(self) -> None:
        if not isinstance(self.mode, ReceiveMode):
            raise InvalidArgumentError(f"mode is {self.mode!r}; it must be a ReceiveMode")
        if type(self.prefetch_count) is not int or not (
            0 <= self.prefetch_count <= MAX_RECEIVE_MESSAGES
        ):
            raise InvalidArgumentError(
                f"prefetch_count is {self.prefetch_count!r}; it must be from 0 to "
                f"{MAX_RECEIVE_MESSAGES}"
            )
        span = self.auto_renew_for
        if span is not None and (not isinstance(span, timedelta) or span <= timedelta(0)):
            raise InvalidArgumentError(
                f"auto_renew_for is {span!r}; it must be a timedelta above zero, or None"
            )
        if self.mode is ReceiveMode.RECEIVE_AND_DELETE and (
            self.prefetch_count or self.auto_renew_for
        ):
            raise InvalidArgumentError(
                "prefetch_count and auto_renew_for cannot be combined with receive-and-delete, "
                "which has no locks: prefetched messages would be lost with the process. Leave out "
                "both, or use ReceiveMode.PEEK_LOCK"
            )


class MessageReceiver(EntityClient):
    """Receives from a queue, a subscription or a dead-letter queue."""

    def __init__(
        self,
        courier: Courier,
        path: str,
        options: ReceiveOptions | None = None,
        session: SessionLock | None = None,
    ) -> None:
        super().__init__(courier, path)
        self._options = options or ReceiveOptions()
        self._session = session
        count = self._options.prefetch_count
        self._ahead = _Prefetch(self, courier, count) if count else None
        self._renewer: LockRenewer | None = None
        if self._options.auto_renew_for is not None:
            self._renewer = LockRenewer(courier, self._options.auto_renew_for)

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, wait: timedelta = DEFAULT_WAIT) -> ReceivedMessage | None:
        """Return the next message, or None if none arrived within `wait`."""
        return next(iter(self.receive_batch(1, wait)), None)

    def receive_batch(
        self, max_messages: int, wait: timedelta = DEFAULT_WAIT
    ) -> list[ReceivedMessage]:
        """Wait for the first message; return it with others that are ready, up to the maximum."""
        self._check()
        if type(max_messages) is not int or not 1 <= max_messages <= MAX_RECEIVE_MESSAGES:
            raise InvalidArgumentError(
                f"max_messages is {max_messages!r}; it must be from 1 to {MAX_RECEIVE_MESSAGES}"
            )
        if self._ahead is not None:
            take = partial(self._ahead.take, max_messages, wait)
            return self._to_received(self._traced(take))
        if tracing.hook is not None:
            return self._to_received(self.receive_columns(max_messages, wait))
        request = self.request(max_messages, wait, takes_rows=True)
        return self._to_received(self._courier.ask(request))

    def receive_columns(self, max_messages: int, wait: timedelta = DEFAULT_WAIT) -> pa.RecordBatch:
        """Receive as an Arrow batch of DELIVERY_SCHEMA; settle by its `lock_token` column."""
        self._check()
        request = self.request(max_messages, wait)
        if tracing.hook is None:
            return self._courier.ask(request)
        return self._traced(partial(self._courier.ask, request))

    def _traced(self, receive: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
        if tracing.hook is None:
            return receive()
        return tracing.hook.receive(self._courier.peer, self.path, receive)

    def request(self, max_messages: int, wait: timedelta, *, takes_rows: bool = False) -> Receive:
        """Return the command that receives from this entity."""
        mode, session = self._options.mode, self._session
        return Receive(self.path, max_messages, wait, mode, session, takes_rows=takes_rows)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages as they arrive, until the receiver is closed."""
        while not self._closed:
            yield from self.receive_batch(1)

    def peek(self, from_sequence_number: int = 0, max_messages: int = 1) -> list[BrokeredMessage]:
        """Browse messages without locking them, including deferred and scheduled ones.

        In a session, browse only the messages of that session.
        """
        self._check()
        session_id = None if self._session is None else self._session.session_id
        command = Peek(self.path, from_sequence_number, max_messages, session_id=session_id)
        return to_messages(self._courier.ask(command))

    def delete_messages(
        self, max_messages: int, enqueued_before_utc: datetime | None = None
    ) -> int:
        """Delete deliverable messages unread, the oldest first; return how many.

        Locked, deferred and scheduled messages stay. When a reply is lost, the repeated request
        deletes up to `max_messages` others, and only those are counted.
        """
        self._check()
        command = DeleteMessages(self.path, max_messages, enqueued_before_utc, self._session)
        return self._courier.ask(command)

    def receive_deferred(self, sequence_numbers: int | Sequence[int]) -> list[ReceivedMessage]:
        """Receive deferred messages by sequence number, all or none."""
        self._check()
        numbers = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        command = ReceiveDeferred(self.path, numbers, self._options.mode, self._session)
        return self._to_received(self._traced(partial(self._courier.ask, command)))

    def _to_received(self, deliveries: Deliveries) -> list[ReceivedMessage]:
        """Return the rows as messages, and have their locks renewed if the options say so."""
        if isinstance(deliveries, DeliveryRows):
            messages = [ReceivedMessage(*row.fields(self)) for row in deliveries.rows]
        else:
            messages = [ReceivedMessage(**fields, receiver=self) for fields in rows_of(deliveries)]
        if self._renewer is not None and self._session is None:
            for message in messages:
                if message.lock_token is not None and message.locked_until_utc is not None:
                    self._renewer.add(
                        message.lock_token,
                        RenewLocks(self.path, tokens_of([message.lock_token])),
                        message.locked_until_utc,
                    )
        return messages

    # -- settling ------------------------------------------------------------------------------

    def complete(self, messages: Sequence[BrokeredMessage]) -> None:
        """Complete several messages in one operation."""
        self._settle(messages, Disposition.COMPLETE)

    def abandon(self, messages: Sequence[BrokeredMessage]) -> None:
        """Release several messages for redelivery in one operation; counts as failed delivery."""
        self._settle(messages, Disposition.ABANDON)

    def defer(self, messages: Sequence[BrokeredMessage]) -> None:
        """Defer several messages in one operation."""
        self._settle(messages, Disposition.DEFER)

    def dead_letter(
        self,
        messages: Sequence[BrokeredMessage],
        reason: str | None = None,
        description: str | None = None,
    ) -> None:
        """Move several messages to the dead-letter queue in one operation.

        Reasons and descriptions are cut to 4096 characters, as a traceback may be longer.
        """
        most = MAX_REASON_CHARACTERS
        cut = (text and text[:most] for text in (reason, description))
        self._settle(messages, Disposition.DEAD_LETTER, *cut)

    def release(self, messages: Sequence[BrokeredMessage]) -> None:
        """Release several messages in one operation; does not count as a failed delivery."""
        self._settle(messages, Disposition.RELEASE)

    def renew_locks(self, messages: Sequence[BrokeredMessage]) -> datetime:
        """Renew the locks for another lock duration; return when they expire."""
        return self._courier.ask(RenewLocks(self.path, tokens_of(_tokens(messages))))

    def settle_columns(self, lock_tokens: pa.Array, disposition: Disposition) -> None:
        """Settle messages received as columns."""
        self._ask_to_settle(Settle(self.path, lock_tokens, disposition), ())

    def _ask_to_settle(self, command: Settle, messages: Sequence[BrokeredMessage]) -> None:
        if tracing.hook is None:
            self._courier.ask(command)
            return
        ask = partial(self._courier.ask, command)
        operation = command.disposition.name.lower()
        tracing.hook.settle(self._courier.peer, self.path, operation, messages, ask)

    def _settle(
        self,
        messages: Sequence[BrokeredMessage],
        disposition: Disposition,
        reason: str | None = None,
        description: str | None = None,
    ) -> None:
        tokens = _tokens(messages)
        if self._renewer is not None:
            self._renewer.remove(tokens)
        if tokens:
            command = Settle(self.path, tokens_of(tokens), disposition, reason, description)
            self._ask_to_settle(command, messages)
            for message in messages:
                if isinstance(message, ReceivedMessage):
                    object.__setattr__(message, "_settled_as", disposition)

    def close(self) -> None:
        """Release the prefetched messages, and stop renewing locks."""
        if self._closed:
            return
        super().close()
        if self._renewer is not None:
            self._renewer.close()
        if self._ahead is not None:
            self._ahead.close()


_SETTLED = {
    Disposition.COMPLETE: "completed",
    Disposition.ABANDON: "abandoned",
    Disposition.DEFER: "deferred",
    Disposition.DEAD_LETTER: "dead-lettered",
    Disposition.RELEASE: "released",
}


def _tokens(messages: Sequence[BrokeredMessage]) -> list[UUID]:
    """Return the lock tokens of messages; raise if one is already settled or was never locked."""
    for message in messages:
        settled_as = getattr(message, "_settled_as", None)
        if settled_as is not None:
            raise InvalidOperationError(
                f"message {message.sequence_number} was already {_SETTLED[settled_as]}, and a "
                "message can be settled only once"
            )
    tokens = [message.lock_token for message in messages]
    if None in tokens:
        number = messages[tokens.index(None)].sequence_number
        raise InvalidOperationError(
            f"message {number} has no lock, so it cannot be settled: it was browsed, or received "
            "in the mode receive-and-delete. Receive it with ReceiveMode.PEEK_LOCK"
        )
    return [token for token in tokens if token is not None]


class _Prefetch:
    """Fetches messages ahead, so that the next ones arrive while the application works."""

    def __init__(self, receiver: MessageReceiver, courier: Courier, count: int) -> None:
        self._receiver = receiver
        self._courier = courier
        self._count = count
        self._ready: deque[pa.RecordBatch] = deque()
        self._pending: Future[pa.RecordBatch] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def take(self, max_messages: int, wait: timedelta) -> pa.RecordBatch:
        """Return fetched messages; if there are none, wait for some."""
        with self._lock:
            self._collect(block=False)
            batch = self._next(max_messages)
            if batch is None:
                self._collect(block=True)
                batch = self._next(max_messages)
        if batch is None:
            batch = self._courier.ask(self._receiver.request(max(max_messages, self._count), wait))
            with self._lock:
                self._ready.append(batch)
                batch = self._next(max_messages) or batch
                if self._closed:
                    self._release_all()
        self._fetch()
        return batch

    def _next(self, max_messages: int) -> pa.RecordBatch | None:
        """Return fetched messages whose locks have not expired; None if there are none."""
        while self._ready:
            batch = self._ready.popleft()
            if not batch.num_rows or self._has_expired(batch):
                continue
            if batch.num_rows > max_messages:
                self._ready.appendleft(batch.slice(max_messages))
                batch = batch.slice(0, max_messages)
            return batch
        return None

    def _has_expired(self, batch: pa.RecordBatch) -> bool:
        until = batch.column("locked_until_utc")[0].as_py()
        return until is not None and moment_us(until) <= self._courier.clock.wall_us()

    def _fetch(self) -> None:
        """Request more messages when at most half are left, unless the entity is busy."""
        now = self._courier.clock.now_us()
        if self._courier.busy_until(self._receiver.path, now) > now:
            return
        with self._lock:
            left = sum(batch.num_rows for batch in self._ready)
            if self._pending is None and not self._closed and left * 2 <= self._count:
                request = self._receiver.request(self._count - left, NO_WAIT)
                self._pending = self._courier.submit(request)

    def _collect(self, *, block: bool) -> None:
        if self._pending is None or not (block or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        timeout_s = self._courier.policy.operation_timeout.total_seconds()
        try:
            self._ready.append(pending.result(timeout_s))
        except MessagingError as error:
            self._courier.note(error)  # the next receive gets the same error, and is retried
        except TimeoutError:
            pending.add_done_callback(self._release_late)

    def _release_late(self, pending: "Future[pa.RecordBatch]") -> None:
        """Release messages that arrived after the timeout."""
        if pending.exception() is None:
            self._release(pending.result())

    def close(self) -> None:
        """Release all fetched messages."""
        with self._lock:
            self._closed = True
            self._collect(block=True)
            self._release_all()

    def _release_all(self) -> None:
        while self._ready:
            self._release(self._ready.popleft())

    def _release(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows and not self._has_expired(batch):
            tokens = batch.column("lock_token")
            self._courier.submit(Settle(self._receiver.path, tokens, Disposition.RELEASE))


class MessageSession(MessageReceiver):
    """A session under an exclusive lock: receives its messages in order, and has its state."""

    def __init__(
        self,
        courier: Courier,
        path: str,
        grant: SessionGrant,
        options: ReceiveOptions | None = None,
    ) -> None:
        super().__init__(courier, path, options, grant.lock)
        self._lock = grant.lock
        self.locked_until_utc = grant.locked_until_utc
        if self._renewer is not None:
            token, command = grant.lock.lock_token, RenewSession(path, grant.lock)
            self._renewer.add(token, command, grant.locked_until_utc)

    @property
    def session_id(self) -> str:
        """The id of the session."""
        return self._lock.session_id

    def renew_lock(self) -> datetime:
        """Renew the session lock for another lock duration; return when it expires."""
        self.locked_until_utc = self._courier.ask(RenewSession(self.path, self._lock))
        return self.locked_until_utc

    def get_state(self) -> bytes | None:
        """Return the state stored with the session."""
        return self._courier.ask(GetSessionState(self.path, self._lock))

    def set_state(self, state: bytes | None) -> None:
        """Store state with the session; None removes it."""
        self._courier.ask(SetSessionState(self.path, self._lock, state))

    def close(self) -> None:
        """Release the session; a lock that has expired is not an error."""
        if self._closed:
            return
        super().close()
        release: Future[Any] = self._courier.submit(ReleaseSession(self.path, self._lock))
        with suppress(TimeoutError):  # then the lock expires
            release.exception(timeout=self._courier.policy.operation_timeout.total_seconds())
