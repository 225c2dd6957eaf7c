"""Pings: they check the connection and the entity, and leave no message for consumers.

A ping is not sent as a message: even one with a time to live of zero would reach a waiting
consumer, or expire into the dead-letter queue. Instead, a ping has three steps:

1. Publish to the default exchange, without the mandatory flag, under a name that no queue has, and
   wait for the confirm. This shows that the node accepts publications (no memory or disk alarm) and
   that this user may publish.
2. A passive declare shows that the entity exists.
3. A consumer that may get no message (a credit of zero) is added to the queue and cancelled. A
   quorum queue does both by consensus of its members. Without a majority there is no answer, while
   a passive declare would still succeed.

A ping does not show that the queue has room, that its members can write a message to their disks
(they write only a small record for the consumer), or anything about the subscriptions of a topic.
For a user without the permission to read the queue, only steps 1 and 2 are made. If step 3 gets no
answer, the connection ends after a minute, so pings have their own connection.
"""

import asyncio
from typing import Any

from pika import BasicProperties, compat, exceptions

from twinbus.limits import PING_CONTENT_TYPE
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.refusals import refusal_of, refused
from twinbus.namespace.rabbitmq.topology import EntityType, get_entity

_NO_QUEUE = "twinbus.ping"  # a name that no queue has
_NO_MESSAGES = {"x-credit": {"credit": compat.long(0), "drain": False}}
_ACCESS_REFUSED = 403


class Prober:
    """Pings entities over its own connection.

    The connection is closed after a successful ping if no other is in progress. If a ping is not
    answered in time, the connection is closed as well, and the next one uses the next host.
    """

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._busy = 0  # number of pings in progress

    async def ping(self, path: str) -> None:
        """Return when the entity has answered; the caller sets the timeout."""
        self._busy += 1
        try:
            await self._publish_unroutable()
            if await get_entity(self._connection, path) is EntityType.QUEUE:
                await self._ask_members(path)
        except asyncio.CancelledError:
            self._connection.leave_host()
            raise
        finally:
            self._busy -= 1
        if not self._busy:
            self._connection.drop()

    async def _publish_unroutable(self) -> None:
        channel = await self._connection.open_channel()
        try:
            properties = BasicProperties(content_type=PING_CONTENT_TYPE)
            if not await channel.publish_confirmed(_NO_QUEUE, b"", properties):
                raise refused(_NO_QUEUE)
        finally:
            channel.close()

    async def _ask_members(self, path: str) -> None:
        channel = await self._connection.open_channel()
        try:
            await _consume_nothing(channel, path)
        except exceptions.ChannelClosedByBroker as error:
            if error.reply_code != _ACCESS_REFUSED:
                raise refusal_of(error, path) from error
        finally:
            channel.close()


async def _consume_nothing(channel: BrokerChannel, path: str) -> None:
    added = await channel.call("basic_consume", path, _refuse, arguments=_NO_MESSAGES)
    await channel.call("basic_cancel", added.method.consumer_tag)


def _refuse(channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
    """Requeue a message that the broker delivered without credit."""
    channel.basic_reject(method.delivery_tag, requeue=True)
