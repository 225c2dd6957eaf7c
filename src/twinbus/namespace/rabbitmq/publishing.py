"""Sends: persistent, mandatory and confirmed, with many in flight.

Each entity has its own channel (a route). A quorum queue without a majority confirms nothing, and
RabbitMQ then blocks the channel of its publisher. A channel for all entities would therefore block
every other entity. The window of a route, its maximum of unconfirmed messages, is smaller than the
number at which RabbitMQ stops reading the connection.

A send is complete when RabbitMQ has confirmed each of its messages. A confirm contains the number
of the publication on its channel. A message that cannot be routed is returned before it is
confirmed: it is found by the header x-twinbus-publication, which has the same number. Sends to one
entity are published in the order in which they were submitted. If a send fails, its error names the
rows that RabbitMQ has accepted.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pika import exceptions

from twinbus.errors import (
    MessageSizeExceededError,
    MessagingError,
    ServerBusyError,
    TransientError,
)
from twinbus.limits import (
    LOG_INTERVAL_US,
    RABBITMQ_BLOCKED_S,
    RABBITMQ_SEND_CHANNELS,
    RABBITMQ_WAITING_MESSAGES,
    RABBITMQ_WINDOW,
    RABBITMQ_WINDOW_BYTES,
    SECOND_US,
)
from twinbus.loglines import LineRate
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.framing import publish_method
from twinbus.namespace.rabbitmq.messages import PUBLICATION, Publication, check_frame
from twinbus.namespace.rabbitmq.refusals import (
    NOT_ACCEPTED,
    UNKNOWN,
    blocked,
    blocked_too_long,
    lost,
    not_found,
    refusal_of,
    refused,
)
from twinbus.namespace.rabbitmq.topology import EntityType, find_entity, get_entity
from twinbus.protocol.remainder import ACCEPTED

_log = logging.getLogger("twinbus.rabbitmq")
Encode = Callable[[bool], Sequence[Publication]]  # the argument: whether the entity is a topic
OnResult = Callable[[MessagingError | None], None]


class Dispatch:
    """A send in progress: its messages, how many are unconfirmed, and a callback for the result."""

    __slots__ = (
        "_on_result",
        "_rows",
        "accepted",
        "began_at",
        "count",
        "encode",
        "error",
        "is_done",
        "next",
        "on_end",
        "path",
        "publications",
        "returned",
        "unconfirmed",
    )

    def __init__(self, path: str, rows: Sequence[int], encode: Encode, on_result: OnResult) -> None:
        self.path = path
        self.count = len(rows)
        self._rows = rows  # of the publications in the caller's send
        self.encode = encode  # called when the kind of the entity is known
        self.publications: Sequence[Publication] | None = None
        self.next = 0  # index of the next publication
        self.unconfirmed = 0
        self.accepted: list[int] = []  # rows that the broker has accepted, even if others fail
        self.returned = False
        self.error: MessagingError | None = None  # the first error
        self.began_at = 0.0  # loop time of the first publication; 0: nothing was published
        self.is_done = False
        self.on_end: Callable[[Dispatch], None] = _do_nothing
        self._on_result = on_result

    @property
    def is_accepted(self) -> bool:
        """Whether the broker has accepted every message, so that the reply follows at once."""
        return len(self.accepted) == len(self._rows)

    @property
    def is_published(self) -> bool:
        """Whether every message was published."""
        return self.next == self.count

    def finish(self, error: MessagingError | None) -> None:
        """Report the result to the caller, once."""
        if self.is_done:
            return
        if error is not None and self.accepted:
            error = with_accepted(error, self.accepted)
        on_result = self._on_result
        self.abandon()
        on_result(error)

    def accept(self, index: int) -> None:
        """Note that the broker has accepted a publication."""
        self.accepted.append(self._rows[index])

    def abandon(self) -> None:
        """Stop reporting to the caller.

        `on_result` usually refers to the caller's job, and the job to this object. Such a cycle
        would keep the messages in memory until the garbage collector finds it.
        """
        self.is_done = True
        self.on_end(self)
        self._on_result = _ignore


def with_accepted(error: MessagingError, rows: Sequence[int]) -> MessagingError:
    """Return the error of a send of which the broker has accepted some rows."""
    facts = {**error.facts, "outcome": UNKNOWN, ACCEPTED: dict.fromkeys(rows, 0)}
    return type(error)(error.text, **facts)


def _do_nothing(_dispatch: Dispatch) -> None:
    """Do nothing: the `on_end` of a send that no publisher has started."""


def _ignore(_error: MessagingError | None) -> None:
    """Do nothing with the result of a send to which nobody listens any more."""


@dataclass(slots=True)
class _Unconfirmed:
    """A published message that the broker has not confirmed yet."""

    dispatch: Dispatch
    size: int
    index: int  # of the publication in its send
    is_returned: bool = False


class Publisher:
    """Publishes over a connection that is used for nothing else."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        # The least recently used route is first.
        self._routes: OrderedDict[str, _PublishingRoute] = OrderedDict()
        self.waiting = 0  # number of messages that are not yet published
        self.confirmed_at = 0.0  # loop time of the last confirm
        self._open: set[Dispatch] = set()
        self._all_done = asyncio.Event()
        connection.on_blocked = self._blocked

    def begin(self, dispatch: Dispatch) -> None:
        """Start a send; its caller gets the result when all messages are confirmed."""
        error = self._refusal(dispatch)
        if error is not None:
            dispatch.finish(error)
            return
        route = self._routes.get(dispatch.path)
        if route is None:
            self._close_idle()
            route = self._routes[dispatch.path] = _PublishingRoute(
                dispatch.path, self, self._connection
            )
        self._routes.move_to_end(dispatch.path)
        self.waiting += dispatch.count
        self._open.add(dispatch)
        dispatch.on_end = self._ended
        route.add(dispatch)

    def _ended(self, dispatch: Dispatch) -> None:
        self._open.discard(dispatch)
        if not self._open:
            self._all_done.set()

    def _refusal(self, dispatch: Dispatch) -> MessagingError | None:
        if self._connection.blocked_since is not None:
            return self._busy()
        if self.waiting and self.waiting + dispatch.count > RABBITMQ_WAITING_MESSAGES:
            return ServerBusyError(
                f"{self.waiting} messages wait to be published, the maximum is "
                f"{RABBITMQ_WAITING_MESSAGES}. Send more slowly",
                scope=dispatch.path,
                outcome=NOT_ACCEPTED,
            )
        return None

    def _busy(self) -> MessagingError:
        since = self._connection.blocked_since or 0.0
        seconds = asyncio.get_running_loop().time() - since
        if seconds >= RABBITMQ_BLOCKED_S:
            return blocked_too_long(self._connection.blocked_reason, seconds)
        return blocked(self._connection.blocked_reason)

    def _blocked(self) -> None:
        """Fail unpublished sends, because the broker reads nothing until its alarm is over."""
        for route in list(self._routes.values()):
            route.fail_waiting(self._busy())

    def withdraw(self, dispatch: Dispatch) -> None:
        """Stop a send whose caller has stopped waiting: publish no more of its messages.

        If the host has confirmed nothing since the send began, it may be cut off from its cluster:
        the next connection then uses another host.
        """
        dispatch.abandon()
        route = self._routes.get(dispatch.path)
        if route is not None:
            route.drop(dispatch)
        is_silent = dispatch.began_at > self.confirmed_at
        if dispatch.began_at and is_silent and self._connection.has_other_hosts:
            self._connection.leave_host()

    def forget(self, route: "_PublishingRoute") -> None:
        """Remove a route, so that the next send looks its entity up again."""
        if self._routes.get(route.path) is route:
            del self._routes[route.path]
        route.close()

    def renew(self, route: "_PublishingRoute") -> None:
        """Replace a route by one with a new channel, which publishes the waiting sends."""
        new = self._routes[route.path] = _PublishingRoute(route.path, self, self._connection)
        waiting = route.take_waiting()
        route.close()
        for dispatch in waiting:
            new.add(dispatch)

    def _close_idle(self) -> None:
        if len(self._routes) >= RABBITMQ_SEND_CHANNELS:
            idle = next((route for route in self._routes.values() if route.is_idle), None)
            if idle is not None:
                self.forget(idle)

    async def finish(self) -> None:
        """Wait until no send is in progress."""
        while self._open:
            self._all_done.clear()
            await self._all_done.wait()

    def fail_all(self, error: MessagingError) -> None:
        """Fail every send."""
        for route in list(self._routes.values()):
            route.fail_waiting(error)
            route.fail_unconfirmed(error)


class _PublishingRoute:
    """The channel of an entity, in confirm mode, with its waiting and unconfirmed messages."""

    def __init__(self, path: str, publisher: Publisher, connection: BrokerConnection) -> None:
        self.path = path
        self._publisher = publisher
        self._connection = connection
        self._channel: BrokerChannel | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._kind = EntityType.QUEUE
        self._waiting: deque[Dispatch] = deque()
        self._unconfirmed: dict[int, _Unconfirmed] = {}  # by publication number, in order
        self._bytes = 0  # size of the unconfirmed messages
        self._number = 0  # of the last publication on the channel
        self._method = b""  # the first frame of a publication to a queue
        self._is_refused = False  # the broker has refused a message: a new channel is needed
        self._explaining: set[asyncio.Task[None]] = set()
        self._unmatched = LineRate(LOG_INTERVAL_US)

    @property
    def is_idle(self) -> bool:
        """Whether no send is in progress."""
        return not (self._waiting or self._unconfirmed or self._preparing or self._explaining)

    def add(self, dispatch: Dispatch) -> None:
        """Publish a send after the earlier ones."""
        self._waiting.append(dispatch)
        self._pump()

    def take_waiting(self) -> list[Dispatch]:
        """Remove and return the sends that wait to be published."""
        waiting = [*self._waiting]
        self._waiting.clear()
        return waiting

    def drop(self, dispatch: Dispatch) -> None:
        """Publish no further messages of a send."""
        if dispatch in self._waiting:
            self._waiting.remove(dispatch)
            self._publisher.waiting -= dispatch.count - dispatch.next

    def _pump(self) -> None:
        """Publish as many messages as the window allows.

        After a refusal, a new channel publishes the next message. A channel remembers the state of
        a quorum queue: it may refuse messages for minutes after the leader of the queue died.
        """
        if self._is_refused:
            if not self._unconfirmed:
                self._publisher.renew(self)
            return
        channel = self._channel
        if channel is None or not channel.is_open:
            if self._preparing is None and self._waiting:
                self._preparing = asyncio.create_task(self._prepare())
            return
        while self._waiting and self._has_room():
            dispatch = self._waiting[0]
            try:
                self._publish_next(channel, dispatch)
            except (MessagingError, exceptions.AMQPError) as error:
                self.drop(dispatch)
                dispatch.finish(refusal_of(error, self.path))
                continue
            if dispatch.is_published:
                self._waiting.popleft()

    def _has_room(self) -> bool:
        return len(self._unconfirmed) < RABBITMQ_WINDOW and self._bytes < RABBITMQ_WINDOW_BYTES

    def _publish_next(self, channel: BrokerChannel, dispatch: Dispatch) -> None:
        is_topic = self._kind is EntityType.TOPIC
        if dispatch.publications is None:
            publications = dispatch.encode(is_topic)
            frame_bytes = self._connection.frame_bytes
            for publication in publications:
                check_frame(publication, frame_bytes)
            dispatch.publications = publications
        publication = dispatch.publications[dispatch.next]
        method = self._method
        if is_topic:
            method = publish_method(channel.number, self.path, publication.key)
        channel.publish(method, publication, self._number + 1)
        self._number += 1
        size = len(publication.body)
        self._unconfirmed[self._number] = _Unconfirmed(dispatch, size, dispatch.next)
        self._bytes += size
        if not dispatch.began_at:
            dispatch.began_at = asyncio.get_running_loop().time()
        dispatch.next += 1
        dispatch.unconfirmed += 1
        self._publisher.waiting -= 1

    async def _prepare(self) -> None:
        """Look up the entity and open a channel; on failure, fail the waiting sends."""
        try:
            kind = await get_entity(self._connection, self.path)
            channel = await self._connection.open_channel()
            channel.pika.add_on_return_callback(self._returned)
            await channel.confirm(self._confirmed)
        except Exception as error:  # noqa: BLE001 - pika raises many types; the callers get it
            self._preparing = None
            self.fail_waiting(refusal_of(error, self.path))
            return
        self._preparing = None
        self._kind, self._channel, self._number = kind, channel, 0
        self._method = publish_method(channel.number, "", self.path)
        channel.on_end(self._ended)
        self._pump()

    # -- called by pika ------------------------------------------------------------------------

    def _confirmed(self, tag: int, is_multiple: bool, is_ack: bool) -> None:  # noqa: FBT001
        self._publisher.confirmed_at = asyncio.get_running_loop().time()
        numbers = [tag]
        if is_multiple:
            numbers = []
            for number in self._unconfirmed:
                if number > tag:
                    break
                numbers.append(number)
        for number in numbers:
            entry = self._unconfirmed.pop(number, None)
            if entry is not None:
                self._bytes -= entry.size
                self._settle(entry, None if is_ack else self._refusal())
        self._is_refused = self._is_refused or not is_ack
        self._pump()

    def _refusal(self) -> MessagingError:
        """Return the error of a nack; some queues of a topic may have the message."""
        error = refused(self.path)
        if self._kind is EntityType.TOPIC:
            error.facts = {**error.facts, "outcome": UNKNOWN}
        return error

    def _settle(self, entry: _Unconfirmed, error: MessagingError | None) -> None:
        dispatch = entry.dispatch
        dispatch.unconfirmed -= 1
        if error is None and not entry.is_returned:
            dispatch.accept(entry.index)
        dispatch.returned = dispatch.returned or entry.is_returned
        dispatch.error = dispatch.error or error
        if dispatch.unconfirmed or not dispatch.is_published:
            return
        if dispatch.error is not None or not dispatch.returned:
            dispatch.finish(dispatch.error)
        elif self._kind is EntityType.TOPIC:
            self._note_unmatched()
            dispatch.finish(None)
        else:
            task = asyncio.create_task(self._explain(dispatch))
            self._explaining.add(task)
            task.add_done_callback(self._explaining.discard)

    def _returned(self, _channel: Any, _method: Any, properties: Any, _body: bytes) -> None:
        """Mark the publication that the broker could not route."""
        entry = self._unconfirmed.get(properties.headers[PUBLICATION])
        if entry is not None:
            entry.is_returned = True

    def _note_unmatched(self) -> None:
        now = int(asyncio.get_running_loop().time() * SECOND_US)
        if self._unmatched.admit("", now) is not None:
            _log.info("No subscription of %s selected a message; it was dropped", self.path)

    async def _explain(self, dispatch: Dispatch) -> None:
        """Report to the caller why the broker returned a message that was sent to a queue."""
        try:
            kind = await find_entity(self._connection, self.path)
            error: MessagingError = (
                not_found(self.path)
                if kind is None
                else TransientError(
                    f"RabbitMQ could not route a message to {self.path}: the queue did not exist "
                    "at that moment. Send again",
                    outcome=NOT_ACCEPTED,
                )
            )
        except Exception as problem:  # noqa: BLE001 - pika raises many types; the caller gets it
            error = refusal_of(problem, self.path)
        dispatch.finish(error)
        if not self._unconfirmed and not self._waiting:
            self._publisher.forget(self)

    def _ended(self, reason: BaseException) -> None:
        """Report unconfirmed messages as unknown; publish the others on a new channel."""
        self._channel = None
        error = refusal_of(reason, self.path)
        if isinstance(error, MessageSizeExceededError):
            self._fail_oversize(error)
            error = lost(reason, self.path)
        error.facts = {**error.facts, "outcome": UNKNOWN}
        self.fail_unconfirmed(error)
        self._pump()

    def _fail_oversize(self, error: MessageSizeExceededError) -> None:
        """Fail the messages whose size the broker names; the others only shared the channel.

        Other messages of the same send may be enqueued.
        """
        for number, entry in list(self._unconfirmed.items()):
            if f" {entry.size} " in error.text:
                del self._unconfirmed[number]
                self._bytes -= entry.size
                self.drop(entry.dispatch)
                outcome = UNKNOWN if entry.dispatch.next > 1 else NOT_ACCEPTED
                facts = {**error.facts, "outcome": outcome}
                entry.dispatch.finish(MessageSizeExceededError(error.text, **facts))

    # -- the end -------------------------------------------------------------------------------

    def fail_waiting(self, error: MessagingError) -> None:
        """Fail sends with messages that were not published."""
        waiting, self._waiting = self._waiting, deque()
        for dispatch in waiting:
            self._publisher.waiting -= dispatch.count - dispatch.next
            dispatch.error = dispatch.error or error
            dispatch.count = dispatch.next
            if not dispatch.unconfirmed:  # otherwise the last confirm reports the error
                dispatch.finish(dispatch.error)

    def fail_unconfirmed(self, error: MessagingError) -> None:
        """Fail the sends of messages that the broker has not confirmed."""
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        self._bytes = 0
        for entry in unconfirmed.values():
            self.drop(entry.dispatch)
            entry.dispatch.finish(error)

    def close(self) -> None:
        """Close the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
