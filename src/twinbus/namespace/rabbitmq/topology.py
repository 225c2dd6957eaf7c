"""Queues, exchanges and bindings, and the descriptions they were created with.

    entity           on RabbitMQ
    queue            a quorum queue of its path, and one for its dead letters (/$DeadLetterQueue)
    topic            a headers exchange of its path
    subscription     a quorum queue of its path, bound to the exchange; and its dead letters
    description      a stream of the path and /$Description, whose first record is the description

Existing entities are used as they are: nothing is declared again with other arguments. AMQP clients
can read only the length of a queue, so its description is kept in a stream. Reading a stream does
not consume it, and all readers see the same first record. If two programs create an entity at the
same time, both append a record: the first record counts, and the program that wrote the second gets
EntityAlreadyExistsError. The record is written before the queue is declared, so that every queue
that Twinbus created has a description.
"""

import asyncio
import logging
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from uuid import uuid4

import pika
from pika import exceptions

from twinbus.entities import (
    DEAD_LETTER_SUFFIX,
    DESCRIPTION_SUFFIX,
    SUBSCRIPTIONS,
    CorrelationFilter,
    EntityDescription,
    EntityStatus,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    RuntimeProperties,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
    dead_letter_path,
    from_json,
    to_json,
)
from twinbus.errors import (
    EntityAlreadyExistsError,
    InvalidArgumentError,
    InvalidOperationError,
    MessagingError,
)
from twinbus.limits import (
    MEGABYTE,
    RABBITMQ_MAX_DELIVERIES,
    RABBITMQ_MAX_EXPIRATION_MS,
    RABBITMQ_NAME_BYTES,
    RABBITMQ_RECORD_S,
    UNLIMITED,
)
from twinbus.namespace.rabbitmq.connections import BrokerChannel, BrokerConnection
from twinbus.namespace.rabbitmq.messages import SUBJECT, header_name_of
from twinbus.namespace.rabbitmq.refusals import not_found, refusal_of, refused
from twinbus.protocol.capabilities import Capability, unsupported

NAME = "RabbitMQ"
_NOT_FOUND = 404
_RECORD = "application/vnd.twinbus.description+json"
_NEVER = datetime.fromtimestamp(0, UTC)  # RabbitMQ does not record times
_log = logging.getLogger("twinbus.rabbitmq")


class EntityType(Enum):
    """The kind of an entity on the broker."""

    QUEUE = "queue"
    TOPIC = "exchange"


# -- lookup ----------------------------------------------------------------------------------------


async def find_queue(connection: BrokerConnection, path: str) -> int | None:
    """Return how many messages wait in a queue; None if it does not exist."""
    found = await _find(connection, "queue_declare", path)
    return None if found is None else int(found.method.message_count)


async def find_entity(connection: BrokerConnection, path: str) -> EntityType | None:
    """Return the kind of the entity at a path; None if there is none."""
    if await find_queue(connection, path) is not None:
        return EntityType.QUEUE
    if await _find(connection, "exchange_declare", path) is not None:
        return EntityType.TOPIC
    return None


async def get_entity(connection: BrokerConnection, path: str) -> EntityType:
    """Return the kind of the entity at a path; raise if there is none."""
    kind = await find_entity(connection, path)
    if kind is None:
        raise not_found(path)
    return kind


async def _find(connection: BrokerConnection, declare: str, name: str) -> Any:
    """Return the reply to a passive declare; None if nothing has this name.

    RabbitMQ closes the channel if nothing has the name, so each call opens a channel of its own.
    """
    if not name or len(name.encode()) > RABBITMQ_NAME_BYTES:
        return None
    channel = await connection.open_channel()
    try:
        return await channel.call(declare, name, passive=True)
    except exceptions.ChannelClosedByBroker as error:
        refusal = refusal_of(error, name)
        if error.reply_code == _NOT_FOUND and not refusal.is_transient:
            return None
        raise refusal from error
    finally:
        channel.close()


# -- managing --------------------------------------------------------------------------------------


class Topology:
    """Creates, describes and deletes entities over a connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection

    async def create(
        self, description: EntityDescription, rule: RuleDescription | None
    ) -> EntityDescription:
        """Create an entity with its description; raise if it exists."""
        path = description.path
        _check_supported(description)
        bindings = _bindings_of(description, rule)
        await self._check_free(description)
        channel = await self._connection.open_channel()
        try:
            await self._keep(channel, description)
            if isinstance(description, TopicDescription):
                await channel.call("exchange_declare", path, "headers", durable=True)
            else:
                await declare_dead_letters(self._connection, path)
                await channel.call(
                    "queue_declare", path, durable=True, arguments=_arguments_of(description)
                )
                for binding in bindings:
                    await channel.call(
                        "queue_bind", path, _topic_of(path), routing_key="", arguments=binding
                    )
        except exceptions.AMQPError as error:
            raise refusal_of(error, path) from error
        finally:
            channel.close()
        return description

    async def _check_free(self, description: EntityDescription) -> None:
        path = description.path
        if await find_entity(self._connection, path) is not None:
            raise _exists(path)
        if isinstance(description, SubscriptionDescription):
            found = await _find(self._connection, "exchange_declare", description.topic_path)
            if found is None:
                raise not_found(description.topic_path)

    async def _keep(self, channel: BrokerChannel, description: EntityDescription) -> None:
        """Append the description to its stream; raise if another program was first."""
        path = description.path
        stream = path + DESCRIPTION_SUFFIX
        record = to_json(description)
        await channel.call(
            "queue_declare", stream, durable=True, arguments={"x-queue-type": "stream"}
        )
        properties = pika.BasicProperties(
            content_type=_RECORD, delivery_mode=2, message_id=uuid4().hex
        )
        if not await channel.publish_confirmed(stream, record.encode(), properties):
            raise refused(stream)
        first = await self._read(path)
        if first is not None and first != record:
            raise EntityAlreadyExistsError(
                f"another program is creating {path} now, or was interrupted while it did; its "
                f"description is {first:.200}. Try again; if the queue does not appear, delete the "
                f"stream {stream}",
                path=path,
            )

    async def _read(self, path: str) -> str | None:
        """Return the first record of the stream that describes an entity; None if there is none."""
        channel = await self._connection.open_channel()
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def take(_channel: Any, _method: Any, _properties: Any, body: bytes) -> None:
            if not first.done():
                first.set_result(body)

        try:
            await channel.call("basic_qos", prefetch_count=1)
            await channel.call(
                "basic_consume",
                path + DESCRIPTION_SUFFIX,
                take,
                arguments={"x-stream-offset": "first"},
            )
            async with asyncio.timeout(RABBITMQ_RECORD_S):
                record: bytes = await channel.answer_to(first)
                return record.decode(errors="replace")
        except TimeoutError:
            return None  # the program that declared the stream wrote no record
        except exceptions.ChannelClosedByBroker as error:
            refusal = refusal_of(error, path)
            if error.reply_code == _NOT_FOUND and not refusal.is_transient:
                return None
            raise refusal from error
        finally:
            channel.close()

    async def describe(self, path: str) -> EntityDescription:
        """Return the description of an entity; one that Twinbus did not create has defaults."""
        kind = await find_entity(self._connection, path)
        if kind is None or path.endswith((DEAD_LETTER_SUFFIX, DESCRIPTION_SUFFIX)):
            raise not_found(path)
        record = await self._read(path)
        if record is not None:
            described = _described(record)
            if described is not None:
                return described
            _log.warning(
                "This version of Twinbus cannot read the description of %s, and reports default "
                "settings. Update Twinbus",
                path,
            )
        if SUBSCRIPTIONS in path:
            topic_path, _, name = path.partition(SUBSCRIPTIONS)
            return SubscriptionDescription(topic_path=topic_path, name=name)
        if kind is EntityType.TOPIC:
            return TopicDescription(path=path)
        return QueueDescription(path=path)

    async def count(self, path: str) -> RuntimeProperties:
        """Return the message count of a queue, without locked and expired messages."""
        waiting = await find_queue(self._connection, path)
        if waiting is None and await find_entity(self._connection, path) is None:
            raise not_found(path)
        dead = (
            await find_queue(self._connection, dead_letter_path(path)) if waiting is not None else 0
        )
        return RuntimeProperties(
            path=path,
            active_message_count=waiting or 0,
            dead_letter_message_count=dead or 0,
            scheduled_message_count=0,
            transfer_message_count=0,
            size_in_bytes=0,
            created_at_utc=_NEVER,
            updated_at_utc=_NEVER,
            accessed_at_utc=_NEVER,
        )

    async def delete(self, path: str) -> None:
        """Delete an entity, its dead letters and its description."""
        kind = await find_entity(self._connection, path)
        if kind is None:
            raise not_found(path)
        if path.endswith((DEAD_LETTER_SUFFIX, DESCRIPTION_SUFFIX)):
            raise InvalidOperationError(f"{path} belongs to another entity; delete that entity")
        channel = await self._connection.open_channel()
        try:
            if kind is EntityType.TOPIC:
                await channel.call("exchange_delete", path, if_unused=True)
            else:
                await channel.call("queue_delete", path)
                await channel.call("queue_delete", dead_letter_path(path))
            await channel.call("queue_delete", path + DESCRIPTION_SUFFIX)
        except exceptions.AMQPError as error:
            raise refusal_of(error, path) from error
        finally:
            channel.close()


async def declare_dead_letters(connection: BrokerConnection, path: str) -> None:
    """Declare the queue for the dead letters of a path, if it does not exist.

    An existing queue is used as it is: RabbitMQ refuses to declare it with other arguments.
    """
    queue = dead_letter_path(path)
    if await find_queue(connection, queue) is not None:
        return
    channel = await connection.open_channel()
    try:
        await channel.call(
            "queue_declare",
            queue,
            durable=True,
            arguments={"x-queue-type": "quorum", "x-overflow": "reject-publish"},
        )
    finally:
        channel.close()


def _described(record: str) -> EntityDescription | None:
    """Return the description in a record; None if this version cannot read it."""
    kinds = (QueueDescription, TopicDescription, SubscriptionDescription)
    try:
        described = from_json(record, object)
    except (MessagingError, ValueError, TypeError, KeyError):
        return None
    return described if isinstance(described, kinds) else None


def _exists(path: str) -> EntityAlreadyExistsError:
    return EntityAlreadyExistsError(
        f"{path} exists already. Choose another path, or delete it", path=path
    )


def _topic_of(path: str) -> str:
    return path.partition(SUBSCRIPTIONS)[0]


def _arguments_of(description: QueueDescription | SubscriptionDescription) -> dict[str, Any]:
    """Return the arguments of a queue for its description."""
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead_letter_path(description.path),
        "x-dead-letter-strategy": "at-least-once",
    }
    # Service Bus counts all deliveries that failed, RabbitMQ only the deliveries after the first. A
    # limit is always set: without one, RabbitMQ 3 requeues a released message behind all others,
    # and RabbitMQ 4 dead-letters a message after 20 deliveries.
    most = min(description.max_delivery_count, RABBITMQ_MAX_DELIVERIES)
    arguments["x-delivery-limit"] = most - 1
    if isinstance(description, QueueDescription):
        arguments["x-max-length-bytes"] = description.max_size_in_megabytes * MEGABYTE
    for argument, span in (
        ("x-message-ttl", description.default_message_time_to_live),
        ("x-expires", description.auto_delete_on_idle),
    ):
        if span != UNLIMITED:
            arguments[argument] = min(int(span.total_seconds() * 1000), RABBITMQ_MAX_EXPIRATION_MS)
    return arguments


_REFUSED_SETTINGS = {
    "requires_session": Capability.SESSIONS,
    "requires_duplicate_detection": Capability.DUPLICATE_DETECTION,
    "enable_partitioning": Capability.PARTITIONING,
    "forward_to": Capability.FORWARDING,
    "forward_dead_lettered_messages_to": Capability.FORWARDING,
}


def _check_supported(description: EntityDescription) -> None:
    """Refuse settings that a RabbitMQ queue cannot have."""
    path = description.path
    if len((path + DEAD_LETTER_SUFFIX).encode()) > RABBITMQ_NAME_BYTES:
        raise InvalidArgumentError(
            f"the path has {len(path)} characters; with {DEAD_LETTER_SUFFIX} it must fit into the "
            f"{RABBITMQ_NAME_BYTES} bytes of a RabbitMQ name. Use a shorter path"
        )
    for setting, capability in _REFUSED_SETTINGS.items():
        if getattr(description, setting, None):
            raise unsupported(NAME, capability, f"{setting} of {path}")
    if description.status is not EntityStatus.ACTIVE:
        status = description.status.value
        raise unsupported(NAME, Capability.DISABLING, f"the status {status} of {path}")


def _bindings_of(
    description: EntityDescription, rule: RuleDescription | None
) -> list[dict[str, Any]]:
    """Return the arguments of the bindings for a rule; none if it selects nothing."""
    if not isinstance(description, SubscriptionDescription):
        if rule is not None:
            raise InvalidArgumentError(
                f"{description.path} cannot have a rule: only a subscription can be created with a "
                "rule"
            )
        return []
    if rule is None or isinstance(rule.filter, TrueFilter):
        wanted: dict[str, Any] = {}
    elif isinstance(rule.filter, FalseFilter):
        return []
    else:
        wanted = _headers_of(rule.filter)
    if rule is not None and rule.action is not None:
        raise unsupported(NAME, Capability.RULES, "an action of a rule")
    return [{"x-match": "all", **wanted}]


def _headers_of(rule_filter: object) -> dict[str, Any]:
    """Return the headers that a correlation filter compares; refuse unsupported fields.

    A headers exchange ignores names that begin with x-, and escaped names begin with it.
    """
    if not isinstance(rule_filter, CorrelationFilter):
        raise unsupported(NAME, Capability.RULES, "a SQL filter")
    others = ("message_id", "session_id", "correlation_id", "content_type", "to", "reply_to")
    for name in (*others, "reply_to_session_id"):
        if getattr(rule_filter, name) is not None:
            raise unsupported(NAME, Capability.RULES, f"a correlation filter on {name}")
    for name, value in rule_filter.properties.items():
        is_compared = not name.lower().startswith("x-") and header_name_of(name) == name
        if not is_compared or not isinstance(value, str | int | bool):
            raise unsupported(
                NAME, Capability.RULES, f"a correlation filter on the property {name!r}"
            )
    subject = {} if rule_filter.subject is None else {SUBJECT: rule_filter.subject}
    headers = {**rule_filter.properties, **subject}
    if not headers:
        raise InvalidArgumentError("a correlation filter needs at least one field or property")
    return headers
