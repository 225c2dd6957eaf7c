"""Receives and settlements: peek-lock on top of unacknowledged deliveries.

A receive first fetches one message (basic.get); the reply also contains the number of messages in
the queue. For more messages, or to wait, it adds a consumer with a prefetch of the missing number,
and cancels it when the receive ends. So it takes no message from other consumers before a caller
asked for it, and no message is counted as delivered without being received.

A lock token is random and refers to a channel and a delivery tag. The lock lasts as long as the
channel, because RabbitMQ has no lock duration. When a channel ends, its messages are requeued and
their tokens become invalid. A channel whose consumer was cancelled before its prefetch was used up
is not used again, because a late delivery may arrive on it. Such a channel is closed as soon as
none of its messages is locked; the late delivery is then requeued.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Any

import pyarrow as pa
from pika import exceptions, spec

from twinbus.clock import moment_us
from twinbus.errors import (
    EntityNotFoundError,
    MessageLockLostError,
    QuotaExceededError,
)
from twinbus.limits import (
    RABBITMQ_FEW,
    RABBITMQ_FREE_CHANNELS,
    RABBITMQ_GATHER_S,
    RABBITMQ_KNOWN_GATHER_S,
    RABBITMQ_LOCKED_BYTES,
    RABBITMQ_LOCKS,
    RABBITMQ_PREFETCH,
    SHOWN_LOST,
)
from twinbus.message import DELIVERY_SCHEMA, MESSAGE_SCHEMA, MessageState, to_batch
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.messages import Publication, dead_letter, received
from twinbus.namespace.rabbitmq.refusals import not_found, refusal_of
from twinbus.namespace.rabbitmq.topology import EntityType, find_entity
from twinbus.protocol.commands import Disposition, Receive, ReceiveMode, Settle

TOKEN_BYTES = 16
_REQUEUES = (Disposition.ABANDON, Disposition.RELEASE)


@dataclass(frozen=True, slots=True)
class RabbitDelivery:
    """A message that the broker has delivered and that is not yet acknowledged."""

    tag: int
    properties: Any  # BasicProperties
    body: bytes


@dataclass(frozen=True, slots=True)
class _Lock:
    """The channel and the delivery of a lock token."""

    inlet: "_ReceivingChannel"
    delivery: RabbitDelivery


class LockKeeper:
    """Receives and settles messages over a connection on which nothing is published."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._locks: dict[bytes, _Lock] = {}
        self._bytes = 0  # size of the locked bodies
        self._free: dict[str, _ReceivingChannel] = {}  # by path: an open channel without a receive
        self._sizes: dict[str, float] = {}  # by path: average size of recent messages

    # -- receiving -----------------------------------------------------------------------------

    async def receive(self, command: Receive) -> pa.RecordBatch:
        """Return available messages, or the first ones that arrive in time."""
        most = self._most(command)
        inlet = await self._take_inlet(command.path)
        try:
            deliveries = await self._deliveries(inlet, command, most)
        except BaseException:
            self._put_back(inlet)
            raise
        self._note_size(command.path, deliveries)
        if command.mode is ReceiveMode.RECEIVE_AND_DELETE:
            inlet.acknowledge(deliveries)
            tokens: list[bytes | None] = [None] * len(deliveries)
        else:
            tokens = [self._lock(inlet, delivery) for delivery in deliveries]
        self._put_back(inlet)
        return delivered(deliveries, tokens)

    def _most(self, command: Receive) -> int:
        """Return how many messages a receive may fetch within all bounds."""
        room = RABBITMQ_LOCKS - len(self._locks)
        if room <= 0 or self._bytes >= RABBITMQ_LOCKED_BYTES:
            raise QuotaExceededError(
                f"{len(self._locks)} messages with {self._bytes} bytes are unsettled; at most "
                f"{RABBITMQ_LOCKS} and {RABBITMQ_LOCKED_BYTES} are allowed. Settle messages first"
            )
        average = max(self._sizes.get(command.path, 1.0), 1.0)
        by_size = max(int(command.max_bytes / average), 1)
        return min(command.max_messages, RABBITMQ_PREFETCH, room, by_size)

    async def _deliveries(
        self, inlet: "_ReceivingChannel", command: Receive, most: int
    ) -> list[RabbitDelivery]:
        deliveries: list[RabbitDelivery] = []
        limit = command.max_bytes
        try:
            left = await inlet.fetch(deliveries)
            while left > 0 and 0 < min(left, most - len(deliveries)) <= RABBITMQ_FEW:
                if not _has_room(deliveries, limit):
                    break
                left = await inlet.fetch(deliveries)
            wanted = min(most - len(deliveries), left) if deliveries else most
            wait_s = 0.0 if deliveries else command.wait.total_seconds()
            if (wait_s or deliveries) and wanted > 0 and _has_room(deliveries, limit):
                await inlet.consume(deliveries, wanted, wait_s, limit)
        except BaseException:
            inlet.give_back(deliveries)
            raise
        excess = _excess(deliveries, limit)
        inlet.give_back(excess)
        return deliveries[: len(deliveries) - len(excess)]

    async def _take_inlet(self, path: str) -> "_ReceivingChannel":
        inlet = self._free.pop(path, None)
        if inlet is not None and inlet.channel.is_open:
            return inlet
        if await find_entity(self._connection, path) is not EntityType.QUEUE:
            raise not_found(path)
        inlet = _ReceivingChannel(path, await self._connection.open_channel())
        ended = inlet
        inlet.channel.on_end(lambda _reason: self._forget(ended.tokens))
        return inlet

    def _put_back(self, inlet: "_ReceivingChannel") -> None:
        """Keep one open channel per path for the next receive; close others."""
        if not inlet.is_retired and inlet.channel.is_open and inlet.path not in self._free:
            self._free[inlet.path] = inlet
            if len(self._free) <= RABBITMQ_FREE_CHANNELS:
                return
            inlet = self._free.pop(next(iter(self._free)))
        inlet.is_retired = True
        inlet.close_if_unused()

    def _note_size(self, path: str, deliveries: Sequence[RabbitDelivery]) -> None:
        if deliveries:
            average = sum(len(delivery.body) for delivery in deliveries) / len(deliveries)
            self._sizes[path] = (self._sizes.pop(path, average) + average) / 2
            if len(self._sizes) > RABBITMQ_FREE_CHANNELS:
                del self._sizes[next(iter(self._sizes))]

    # -- locks ---------------------------------------------------------------------------------

    def _lock(self, inlet: "_ReceivingChannel", delivery: RabbitDelivery) -> bytes:
        token = urandom(TOKEN_BYTES)
        self._locks[token] = _Lock(inlet, delivery)
        self._bytes += len(delivery.body)
        inlet.tokens[token] = delivery.tag
        return token

    def _forget(self, tokens: Iterable[bytes]) -> None:
        for token in list(tokens):
            lock = self._locks.pop(token, None)
            if lock is not None:
                self._bytes -= len(lock.delivery.body)
                lock.inlet.tokens.pop(token, None)

    def locked(self, command: Settle) -> dict[bytes, Publication]:
        """Return the messages of the valid tokens, in a form that can be published again."""
        found = {}
        for token in command.lock_tokens.to_pylist():
            lock = self._locks.get(token)
            if lock is not None and lock.inlet.path == command.path:
                publication = Publication(lock.delivery.properties, lock.delivery.body)
                dead_letter(publication, command.path, command.reason, command.description)
                found[token] = publication
        return found

    async def settle(self, command: Settle) -> None:
        """Settle messages, and wait until the broker has read it; raise if locks were lost.

        The other messages are settled anyway. DEAD_LETTER requires that a copy was published.
        """
        tokens = dict.fromkeys(command.lock_tokens.to_pylist())  # the same one twice settles once
        groups: dict[_ReceivingChannel, list[RabbitDelivery]] = {}
        lost = []
        for token in tokens:
            lock = self._locks.get(token)
            if lock is None or lock.inlet.path != command.path:
                lost.append(token)
            else:
                self._forget([token])
                groups.setdefault(lock.inlet, []).append(lock.delivery)
        for inlet, deliveries in groups.items():
            if command.disposition in _REQUEUES:
                inlet.give_back(deliveries)
            else:
                inlet.acknowledge(deliveries)
        for inlet in groups:
            await inlet.wait_until_read()
            inlet.close_if_unused()
        if not lost:
            return
        if not groups and await find_entity(self._connection, command.path) is None:
            raise not_found(command.path)
        raise _lost(lost, command.path)


def _lost(tokens: Sequence[bytes], path: str) -> MessageLockLostError:
    return MessageLockLostError(
        f"{len(tokens)} locks of {path} were lost: the messages were settled before, or their "
        "channel ended, in which case RabbitMQ delivers them again",
        lock_tokens=[token.hex() for token in tokens[:SHOWN_LOST]],
    )


def _has_room(deliveries: Sequence[RabbitDelivery], limit: int) -> bool:
    return sum(len(delivery.body) for delivery in deliveries) < limit


def _excess(deliveries: Sequence[RabbitDelivery], limit: int) -> Sequence[RabbitDelivery]:
    """Return the last deliveries beyond a number of bytes; the first is never among them."""
    total = 0
    for at, delivery in enumerate(deliveries):
        total += len(delivery.body)
        if at and total > limit:
            return deliveries[at:]
    return ()


class _ReceivingChannel:
    """A channel that receives from a queue; one receive at a time uses it."""

    def __init__(self, path: str, channel: BrokerChannel) -> None:
        self.path = path
        self.channel = channel
        self.tokens: dict[bytes, int] = {}  # locks on the channel: token to delivery tag
        self.is_retired = False  # must not be used for another receive
        self._fetching: asyncio.Future[Any] | None = None
        self._open_tags: set[int] = set()  # unsettled deliveries
        self._prefetch = 0  # the current setting for the next consumer
        channel.pika.add_callback(self._nothing, [spec.Basic.GetEmpty], one_shot=False)
        channel.pika.add_on_cancel_callback(self._cancelled)
        self._cancel: asyncio.Future[None] | None = None  # fails if the broker cancels

    async def fetch(self, deliveries: list[RabbitDelivery]) -> int:
        """Fetch a message; return how many more there are, or -1 if there was none."""
        self._fetching = asyncio.get_running_loop().create_future()
        fetching = self._fetching
        try:
            self.channel.pika.basic_get(self.path, self._got)
            found = await self.channel.answer_to(fetching)
        except exceptions.ChannelClosedByBroker as error:
            raise refusal_of(error, self.path) from error
        except asyncio.CancelledError:
            self.is_retired = True  # the message may still arrive: closing requeues it
            raise
        finally:
            self._fetching = None
        if found is None:
            return -1
        method, properties, body = found
        self._take(deliveries, method.delivery_tag, properties, body)
        return int(method.message_count)

    def _got(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        if self._fetching is not None and not self._fetching.done():
            self._fetching.set_result((method, properties, body))

    def _nothing(self, _frame: Any) -> None:
        if self._fetching is not None and not self._fetching.done():
            self._fetching.set_result(None)

    def _take(
        self, deliveries: list[RabbitDelivery], tag: int, properties: Any, body: bytes
    ) -> None:
        self._open_tags.add(tag)
        deliveries.append(RabbitDelivery(tag, properties, body))

    async def consume(
        self, deliveries: list[RabbitDelivery], wanted: int, wait_s: float, max_bytes: int
    ) -> None:
        """Receive up to `count` messages; wait for the first if there are none yet."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        full_at = len(deliveries) + wanted
        patience = RABBITMQ_KNOWN_GATHER_S if deliveries else RABBITMQ_GATHER_S
        size = sum(len(delivery.body) for delivery in deliveries)

        def take(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal size
            size += len(body)
            self._take(deliveries, method.delivery_tag, properties, body)
            arrived.set()

        self._cancel = loop.create_future()
        tag: str | None = None
        try:
            if wanted != self._prefetch:
                await self.channel.call("basic_qos", prefetch_count=wanted)
                self._prefetch = wanted
            tag = self.channel.pika.basic_consume(self.path, take)
            if not deliveries:
                await self._arrival(arrived, wait_s)
            while deliveries and len(deliveries) < full_at and size < max_bytes:
                arrived.clear()
                if not await self._arrival(arrived, patience):
                    break
            tag = await self._end_consumer(tag, is_full=len(deliveries) >= full_at)
        except exceptions.ChannelClosedByBroker as error:
            raise refusal_of(error, self.path) from error
        finally:
            if len(deliveries) < full_at:
                self.is_retired = True
            if tag is not None and self.channel.is_open and not self._cancel.done():
                self.channel.pika.basic_cancel(tag)
            if not self._cancel.cancel() and not self._cancel.cancelled():
                self._cancel.exception()  # the queue was deleted after the last delivery

    async def _end_consumer(self, tag: str, *, is_full: bool) -> str | None:
        """Cancel a consumer that may still get messages, and wait for the confirmation.

        Messages in flight belong to this receive. Otherwise they would be locked without a
        receiver, and the next receive would overtake them. A consumer whose prefetch is used up
        gets no more: its tag is returned, to be cancelled without waiting.
        """
        if is_full:
            return tag
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(_frame: Any) -> None:
            if not ended.done():
                ended.set_result(None)

        self.channel.pika.basic_cancel(tag, callback=end)
        await self.channel.answer_to(ended)
        return None

    async def _arrival(self, arrived: asyncio.Event, seconds: float) -> bool:
        """Wait for a delivery; return whether one arrived. Raise if the queue or channel ends."""
        assert self._cancel is not None
        waiting = asyncio.ensure_future(arrived.wait())
        ending = asyncio.ensure_future(self.channel.answer_to(self._cancel))
        try:
            await asyncio.wait(
                {waiting, ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if ending.done():
                ending.result()  # raises
            return arrived.is_set()
        finally:
            waiting.cancel()
            if not ending.done():
                ending.cancel()
                self._cancel = asyncio.get_running_loop().create_future()

    def _cancelled(self, _frame: Any) -> None:
        """Fail the receive: the broker cancels a consumer when the queue is deleted."""
        if self._cancel is not None and not self._cancel.done():
            self._cancel.set_exception(
                EntityNotFoundError(
                    f"the queue {self.path} was deleted. Create it again", path=self.path
                )
            )

    # -- settling ------------------------------------------------------------------------------

    def acknowledge(self, deliveries: Sequence[RabbitDelivery]) -> None:
        """Acknowledge messages."""
        self._answer(deliveries, "basic_ack")

    def give_back(self, deliveries: Sequence[RabbitDelivery]) -> None:
        """Requeue messages."""
        self._answer(deliveries, "basic_nack")

    def _answer(self, deliveries: Sequence[RabbitDelivery], method: str) -> None:
        """Settle deliveries: with one frame if no other delivery before the last is open."""
        if not deliveries or not self.channel.is_open:
            return
        answer = getattr(self.channel.pika, method)
        tags = {delivery.tag for delivery in deliveries}
        last = max(tags)
        if len(tags) > 1 and not any(tag <= last for tag in self._open_tags - tags):
            answer(last, multiple=True)
        else:
            for tag in sorted(tags):
                answer(tag)
        self._open_tags -= tags

    async def wait_until_read(self) -> None:
        """Wait until the broker has read everything that was written to the channel."""
        try:
            self._prefetch = max(self._prefetch, 1)
            await self.channel.call("basic_qos", prefetch_count=self._prefetch)
        except exceptions.AMQPError as error:
            raise refusal_of(error, self.path) from error

    def close_if_unused(self) -> None:
        """Close a retired channel without locked messages."""
        if self.is_retired and not self.tokens:
            self.channel.close()


# -- as columns ------------------------------------------------------------------------------------


def delivered(
    deliveries: Sequence[RabbitDelivery], tokens: Sequence[bytes | None]
) -> pa.RecordBatch:
    """Return deliveries as a batch of DELIVERY_SCHEMA."""
    messages = [received(delivery.properties, delivery.body) for delivery in deliveries]
    batch = to_batch(messages)
    count = len(messages)
    extra = {
        "sequence_number": [0] * count,
        "enqueued_time_utc": [_us(message.enqueued_time_utc) for message in messages],
        "expires_at_utc": [_us(message.expires_at_utc) for message in messages],
        "delivery_count": [message.delivery_count for message in messages],
        "lock_token": list(tokens),
        "locked_until_utc": [None] * count,
        "state": [int(MessageState.ACTIVE)] * count,
        "dead_letter_reason": [message.dead_letter_reason for message in messages],
        "dead_letter_error_description": [
            message.dead_letter_error_description for message in messages
        ],
        "dead_letter_source": [message.dead_letter_source for message in messages],
    }
    columns = [batch.column(name) for name in MESSAGE_SCHEMA.names]
    columns += [pa.array(extra[name], DELIVERY_SCHEMA.field(name).type) for name in extra]
    return pa.RecordBatch.from_arrays(columns, schema=DELIVERY_SCHEMA)


def _us(moment: Any) -> int | None:
    return None if moment is None else moment_us(moment)
