"""Receives and settlements: peek-lock on top of unacknowledged deliveries.

A receive first fetches one message (basic.get); the reply also contains the number of messages in
the queue. For more messages, or to wait, it adds a consumer with a prefetch of the missing number,
and cancels it when the receive ends. So it takes no message from other consumers before a caller
asked for it, and no message is counted as delivered without being received.

A lock token is a random key of the channel and the delivery tag. The lock lasts as long as the
channel, because RabbitMQ has no lock duration. When a channel ends, its messages are requeued and
their tokens become invalid. A channel whose consumer was cancelled before its prefetch was used up
is not used again, because a late delivery may arrive on it. Such a channel is closed as soon as
none of its messages is locked; the late delivery is then requeued.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from os import urandom
from struct import Struct
from typing import Any

import pyarrow as pa
from pika import exceptions, spec

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
from twinbus.message import LOCK_TOKEN
from twinbus.namespace.rabbitmq.columns import Deliveries, delivered
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.framing import Content
from twinbus.namespace.rabbitmq.messages import Publication, dead_letter
from twinbus.namespace.rabbitmq.refusals import not_found, refusal_of
from twinbus.namespace.rabbitmq.topology import EntityType, find_entity
from twinbus.protocol.commands import Disposition, Receive, ReceiveMode, Settle

_TOKEN = Struct(">8sQ")  # the key of the channel, the delivery tag
_KEY_BYTES = 8
_REQUEUES = (Disposition.ABANDON, Disposition.RELEASE)


class LockKeeper:
    """Receives and settles messages over a connection on which nothing is published."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._locked: dict[bytes, _ReceivingChannel] = {}  # by key: channels with locked messages
        self._count = 0  # of locked messages
        self._bytes = 0  # size of the locked messages
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
            inlet.acknowledge(deliveries.tags)
            tokens = pa.nulls(len(deliveries), LOCK_TOKEN)
        else:
            tokens = self._lock(inlet, deliveries)
        self._put_back(inlet)
        try:
            return delivered(deliveries, tokens)
        except Exception:
            # A message is malformed: the bytes after it cannot be trusted. Closing the connection
            # requeues the messages, whose lock tokens no caller has.
            self._connection.drop()
            raise

    def _most(self, command: Receive) -> int:
        """Return how many messages a receive may fetch within all bounds."""
        room = RABBITMQ_LOCKS - self._count
        if room <= 0 or self._bytes >= RABBITMQ_LOCKED_BYTES:
            raise QuotaExceededError(
                f"{self._count} messages with {self._bytes} bytes are unsettled; at most "
                f"{RABBITMQ_LOCKS} and {RABBITMQ_LOCKED_BYTES} are allowed. Settle messages first"
            )
        average = max(self._sizes.get(command.path, 1.0), 1.0)
        by_size = max(int(command.max_bytes / average), 1)
        return min(command.max_messages, RABBITMQ_PREFETCH, room, by_size)

    async def _deliveries(
        self, inlet: "_ReceivingChannel", command: Receive, most: int
    ) -> Deliveries:
        deliveries = Deliveries()
        limit = command.max_bytes
        try:
            left = await inlet.fetch(deliveries)
            while left > 0 and 0 < min(left, most - len(deliveries)) <= RABBITMQ_FEW:
                if deliveries.size >= limit:
                    break
                left = await inlet.fetch(deliveries)
            wanted = min(most - len(deliveries), left) if deliveries else most
            wanted = min(wanted, _fitting(deliveries, limit))
            wait_s = 0.0 if deliveries else command.wait.total_seconds()
            if (wait_s or deliveries) and wanted > 0 and deliveries.size < limit:
                await inlet.consume(deliveries, wanted, wait_s, limit)
        except BaseException:
            inlet.give_back(deliveries.tags)
            raise
        if inlet.channel.ended is not None:  # RabbitMQ requeues all deliveries of a closed channel
            raise refusal_of(inlet.channel.ended, command.path)
        inlet.give_back(deliveries.remove_excess(limit))
        return deliveries

    async def _take_inlet(self, path: str) -> "_ReceivingChannel":
        inlet = self._free.pop(path, None)
        if inlet is not None and inlet.channel.is_open:
            return inlet
        if await find_entity(self._connection, path) is not EntityType.QUEUE:
            raise not_found(path)
        inlet = _ReceivingChannel(path, await self._connection.open_channel())
        ended = inlet
        inlet.channel.on_end(lambda _reason: self._forget(ended, list(ended.locked)))
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

    def _note_size(self, path: str, deliveries: Deliveries) -> None:
        if deliveries:
            average = deliveries.size / len(deliveries)
            self._sizes[path] = (self._sizes.pop(path, average) + average) / 2
            if len(self._sizes) > RABBITMQ_FREE_CHANNELS:
                del self._sizes[next(iter(self._sizes))]

    # -- locks ---------------------------------------------------------------------------------

    def _lock(self, inlet: "_ReceivingChannel", deliveries: Deliveries) -> pa.Array:
        """Return the lock tokens of deliveries."""
        key, pack = inlet.key, _TOKEN.pack
        contents = zip(deliveries.encoded, deliveries.bodies, strict=True)
        inlet.locked.update(zip(deliveries.tags, contents, strict=True))
        self._bytes += deliveries.size
        self._count += len(deliveries)
        self._locked[key] = inlet
        return pa.array([pack(key, tag) for tag in deliveries.tags], LOCK_TOKEN)

    def _forget(self, inlet: "_ReceivingChannel", tags: Iterable[int]) -> None:
        for tag in tags:
            encoded, body = inlet.locked.pop(tag)
            self._count -= 1
            self._bytes -= len(encoded) + len(body)
        if not inlet.locked:
            self._locked.pop(inlet.key, None)

    def _find(self, command: Settle) -> tuple[dict["_ReceivingChannel", list[int]], list[bytes]]:
        """Return the delivery tags of valid tokens by channel, and the tokens of lost locks."""
        found: dict[_ReceivingChannel, list[int]] = {}
        lost = []
        for token in dict.fromkeys(command.lock_tokens.to_pylist()):  # each token once
            key, tag = _TOKEN.unpack(token)
            inlet = self._locked.get(key)
            if inlet is None or tag not in inlet.locked or inlet.path != command.path:
                lost.append(token)
            else:
                found.setdefault(inlet, []).append(tag)
        return found, lost

    def copies(self, command: Settle) -> list[Publication]:
        """Return the messages of the valid tokens, as they are published as dead letters."""
        found, _ = self._find(command)
        path, reason, text = command.path, command.reason, command.description
        frame_bytes = self._connection.frame_bytes  # as on the connection that publishes
        return [
            dead_letter(*inlet.locked[tag], path, reason, text, frame_bytes)
            for inlet, tags in found.items()
            for tag in tags
        ]

    async def settle(self, command: Settle) -> None:
        """Settle messages, and wait until the broker has read that; raise if locks were lost.

        The other messages are settled anyway. DEAD_LETTER requires that a copy was published.
        """
        groups, lost = self._find(command)
        for inlet, tags in groups.items():
            self._forget(inlet, tags)
            if command.disposition in _REQUEUES:
                inlet.give_back(tags)
            else:
                inlet.acknowledge(tags)
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
        "channel ended, in which case RabbitMQ delivers them again. Receive again",
        lock_tokens=[token.hex() for token in tokens[:SHOWN_LOST]],
    )


def _fitting(deliveries: Deliveries, limit: int) -> int:
    """Return how many more messages of the same size fit; without messages, as many as allowed.

    A larger prefetch would be wrong: the broker sends that many, and counts a delivery even of
    messages that are requeued because they do not fit.
    """
    if not deliveries:
        return RABBITMQ_PREFETCH
    size = deliveries.size
    return max((limit - size) * len(deliveries) // max(size, 1), 1)


class _ReceivingChannel:
    """A channel that receives from a queue; one receive at a time uses it."""

    def __init__(self, path: str, channel: BrokerChannel) -> None:
        self.path = path
        self.channel = channel
        self.key = urandom(_KEY_BYTES)  # the beginning of its lock tokens
        self.locked: dict[int, tuple[bytes, bytes]] = {}  # delivery tag -> properties and body
        self.is_retired = False  # must not be used for another receive
        self._fetching: asyncio.Future[Content | None] | None = None
        self._consumer = b""  # tag of the current consumer
        self._on_delivery: Callable[[Content], None] = self._take_late
        self._open_tags: set[int] = set()  # unsettled deliveries
        self._prefetch = 0  # the current setting for the next consumer
        channel.read(self._arrived)
        channel.pika.add_callback(self._nothing, [spec.Basic.GetEmpty], one_shot=False)
        channel.pika.add_on_cancel_callback(self._cancelled)
        self._cancel: asyncio.Future[None] | None = None  # fails if the queue is deleted

    def _arrived(self, content: Content) -> None:
        if content.consumer is None:
            if self._fetching is not None and not self._fetching.done():
                self._fetching.set_result(content)
        elif content.consumer == self._consumer:
            self._on_delivery(content)
        else:
            self._take_late(content)

    def _take_late(self, content: Content) -> None:
        """Requeue a message that arrived after its receive had ended.

        If the channel is being closed, it accepts no commands, and RabbitMQ requeues the message.
        """
        if self.channel.is_open:
            self.channel.pika.basic_nack(content.tag)

    async def fetch(self, deliveries: Deliveries) -> int:
        """Fetch a message; return how many more there are, or -1 if there was none."""
        self._fetching = asyncio.get_running_loop().create_future()
        fetching = self._fetching
        try:
            self.channel.fetch(self.path)
            found: Content | None = await self.channel.answer_to(fetching)
        except exceptions.ChannelClosedByBroker as error:
            raise refusal_of(error, self.path) from error
        except asyncio.CancelledError:
            self.is_retired = True  # the message may still arrive: closing requeues it
            raise
        finally:
            self._fetching = None
        if found is None:
            return -1
        self._take(deliveries, found)
        return found.left

    def _nothing(self, _frame: Any) -> None:
        if self._fetching is not None and not self._fetching.done():
            self._fetching.set_result(None)

    def _take(self, deliveries: Deliveries, content: Content) -> None:
        _, tag, _, encoded, body = content
        self._open_tags.add(tag)
        deliveries.add(tag, encoded, body)

    async def consume(
        self, deliveries: Deliveries, wanted: int, wait_s: float, max_bytes: int
    ) -> None:
        """Receive up to `wanted` messages; wait for the first if there are none yet."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        full_at = len(deliveries) + wanted
        patience = RABBITMQ_KNOWN_GATHER_S if deliveries else RABBITMQ_GATHER_S

        def take(content: Content) -> None:
            self._take(deliveries, content)
            if len(deliveries.tags) in (1, full_at) or deliveries.size >= max_bytes:
                arrived.set()  # waking the receive for each message would cost more than reading it

        self._cancel = loop.create_future()
        tag: str | None = None
        try:
            if wanted != self._prefetch:
                await self.channel.call("basic_qos", prefetch_count=wanted)
                self._prefetch = wanted
            tag = self.channel.consume(self.path)
            self._consumer, self._on_delivery = tag.encode(), take
            if not deliveries:
                await self._arrival(arrived, wait_s)
            before = 0
            while before < len(deliveries) < full_at and deliveries.size < max_bytes:
                before = len(deliveries)
                arrived.clear()
                await self._arrival(arrived, patience)
            tag = await self._end_consumer(tag, is_full=len(deliveries) >= full_at)
        except exceptions.ChannelClosedByBroker as error:
            raise refusal_of(error, self.path) from error
        finally:
            self._consumer, self._on_delivery = b"", self._take_late
            if len(deliveries) < full_at:
                self.is_retired = True
            if tag is not None and self.channel.is_open and not self._cancel.done():
                self.channel.pika.basic_cancel(tag)
            if not self._cancel.cancel() and not self._cancel.cancelled():
                # The queue was deleted after the last delivery: mark the exception as retrieved.
                self._cancel.exception()

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

    async def _arrival(self, arrived: asyncio.Event, seconds: float) -> None:
        """Wait for deliveries; raise if the queue or channel ends."""
        assert self._cancel is not None
        waiting = asyncio.ensure_future(arrived.wait())
        ending = asyncio.ensure_future(self.channel.answer_to(self._cancel))
        try:
            await asyncio.wait(
                {waiting, ending}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if ending.done():
                ending.result()  # raises
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

    def acknowledge(self, tags: Sequence[int]) -> None:
        """Acknowledge messages."""
        self._answer(tags, "basic_ack")

    def give_back(self, tags: Sequence[int]) -> None:
        """Requeue messages."""
        self._answer(tags, "basic_nack")

    def _answer(self, tags: Sequence[int], method: str) -> None:
        """Settle deliveries: those before every other open delivery with one frame."""
        if not tags or not self.channel.is_open:
            return
        answer = getattr(self.channel.pika, method)
        self._open_tags.difference_update(tags)
        first_open = min(self._open_tags, default=max(tags) + 1)
        together = [tag for tag in tags if tag < first_open]
        if together:
            answer(max(together), multiple=True)
        for tag in sorted(tag for tag in tags if tag > first_open):
            answer(tag)

    async def wait_until_read(self) -> None:
        """Wait until the broker has read everything that was written to the channel."""
        try:
            self._prefetch = max(self._prefetch, 1)
            await self.channel.call("basic_qos", prefetch_count=self._prefetch)
        except exceptions.AMQPError as error:
            raise refusal_of(error, self.path) from error

    def close_if_unused(self) -> None:
        """Close a retired channel without locked messages."""
        if self.is_retired and not self.locked:
            self.channel.close()
