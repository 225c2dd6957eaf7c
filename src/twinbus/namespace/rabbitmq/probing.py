"""Pings: they prove the path and the entity, and leave nothing for consumers.

A ping never becomes a message in the queue: one with a time to live of zero reaches a consumer that
waits, or dies into the dead-letter queue. It consists of three steps in place of that:

1. A publication to the default exchange under a name that no queue has, not mandatory, is
   confirmed: the node takes publications (no memory or disk alarm), and this user may publish.
2. A passive declare: the entity exists.
3. A consumer that is allowed no message (a credit of zero) is added to the queue and cancelled. A
   quorum queue does both by consensus of its own members. Without a majority no answer comes,
   while a passive declare still succeeds.

What it does not prove: that the queue has room, that the members can write to their disks (a
consumer is a small record, too, but the size of a message is not tried), and for a topic anything
about the queues of its subscriptions. A user without the permission to read the queue gets step 1
and 2 only. Step 3 that gets no answer ends the whole connection after a minute, so pings have a
connection of their own.
"""

import asyncio
from typing import Any

from pika import BasicProperties, compat, exceptions

from twinbus.limits import PING_CONTENT_TYPE
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.refusals import refusal_of, refused
from twinbus.namespace.rabbitmq.topology import EntityType, get_entity

_NOWHERE = "twinbus.ping"  # no queue has this name
_NO_MESSAGES = {"x-credit": {"credit": compat.long(0), "drain": False}}
_ACCESS_REFUSED = 403


class Prober:
    """Pings entities over a connection that it gives up when one does not answer."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._busy = 0  # pings under way

    async def ping(self, path: str) -> None:
        """Return when the entity answers; the caller decides how long to wait."""
        self._busy += 1
        try:
            await self._publish_nowhere()
            if await get_entity(self._connection, path) is EntityType.QUEUE:
                await self._ask_members(path)
        except asyncio.CancelledError:
            self._connection.leave_host()
            raise
        finally:
            self._busy -= 1
        if not self._busy:
            self._connection.drop()

    async def _publish_nowhere(self) -> None:
        channel = await self._connection.open_channel()
        try:
            properties = BasicProperties(content_type=PING_CONTENT_TYPE)
            if not await channel.publish_confirmed(_NOWHERE, b"", properties):
                raise refused(_NOWHERE)
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
    """Give back what a broker delivers although it was allowed nothing."""
    channel.basic_reject(method.delivery_tag, requeue=True)
