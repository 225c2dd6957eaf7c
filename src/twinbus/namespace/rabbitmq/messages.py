"""A message as AMQP 0-9-1 properties and headers, and back.

    field of the message      is sent as
    body                      the body
    message_id                property message_id
    correlation_id            property correlation_id
    content_type              property content_type
    reply_to                  property reply_to
    subject                   property type; to a topic, also header twinbus-subject for filters
    time_to_live              property expiration, in milliseconds
    (time of the send)        property timestamp, in seconds
    to                        header x-twinbus-to
    reply_to_session_id       header x-twinbus-reply-to-session-id
    partition_key             header x-twinbus-partition-key
    amqp                      header x-twinbus-amqp, bytes
    origin of the send        header x-twinbus-origin, which receivers see as a property. Diverted
                              messages have no such header, because they carry their sender's number
    application properties    a header of the same name, with a plain value
    (their types)             header x-twinbus-types, JSON: {"when": "datetime", ...}
    (number on the channel)   header x-twinbus-publication, to recognise a returned message

str, int, bool and bytes have a type in the header table. Other values are sent as text, and the
header x-twinbus-types names their type: float as Python prints it, datetime as ISO 8601 in UTC,
timedelta as ISO 8601 (PT90.5S), UUID as usual. A text that is too long for a property, or that
RabbitMQ would act on, is sent as header x-twinbus-<field>. A time to live with microseconds, or
longer than RabbitMQ supports, is also sent as such a header, in microseconds; the latter does not
expire on RabbitMQ. Property names that RabbitMQ acts on (CC, BCC, x-death ...) get the prefix
x-twinbus-escaped-.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from pika import BasicProperties

from twinbus.clock import MICROSECOND
from twinbus.errors import InvalidArgumentError, MessageSizeExceededError
from twinbus.limits import (
    MAX_ID_CHARACTERS,
    MAX_PROPERTY_NAME_CHARACTERS,
    RABBITMQ_MAX_EXPIRATION_MS,
    RABBITMQ_MESSAGE_BYTES,
    RABBITMQ_NAME_BYTES,
    UNLIMITED,
)
from twinbus.message import BOUNDED_TEXTS, BrokeredMessage, PropertyValue, property_child
from twinbus.protocol.origins import ORIGIN_PROPERTY

TYPES = "x-twinbus-types"
PUBLICATION = "x-twinbus-publication"
SUBJECT = "twinbus-subject"  # a headers exchange ignores names that begin with x-
REASON = "x-twinbus-dead-letter-reason"
DESCRIPTION = "x-twinbus-dead-letter-description"
SOURCE = "x-twinbus-dead-letter-source"
_FIELD = "x-twinbus-"
_DIVERTED = "x-ms-path"  # the property that only messages in a backlog queue have
_AMQP = "x-twinbus-amqp"
_LIFE = "x-twinbus-time-to-live"
_ESCAPED = "x-twinbus-escaped-"
_BASIC = {  # field -> property
    "message_id": "message_id",
    "correlation_id": "correlation_id",
    "content_type": "content_type",
    "reply_to": "reply_to",
    "subject": "type",
}
_AS_HEADERS = ("to", "reply_to_session_id", "partition_key")
_HEADER_OF = {name: _FIELD + name.replace("_", "-") for name in (*_BASIC, *_AS_HEADERS)}
_OWN = frozenset(
    (*_HEADER_OF.values(), TYPES, PUBLICATION, SUBJECT, REASON, DESCRIPTION, SOURCE, _AMQP, _LIFE)
)
_ACTED_ON = ("cc", "bcc", "x-death", "x-delivery-count", "x-delay", "x-stream-offset")
_SYSTEM = ("x-first-death-", "x-last-death-")
_DIRECT_REPLY = "amq.rabbitmq.reply-to"  # RabbitMQ would close the channel of the sender
_MILLISECOND = timedelta(milliseconds=1)
_PERSISTENT = 2
_REASONS = {
    "expired": "TTLExpiredException",
    "delivery_limit": "MaxDeliveryCountExceeded",
    "rejected": "Rejected",
    "maxlen": "QueueFull",
}


@dataclass(frozen=True, slots=True)
class Publication:
    """A message in the form in which it is published."""

    properties: Any  # BasicProperties; its headers are a dictionary, which the publisher adds to
    body: bytes


# -- to RabbitMQ -----------------------------------------------------------------------------------


def published(
    message: BrokeredMessage, message_id: str, origin: str | None, now_s: int, *, to_topic: bool
) -> Publication:
    """Convert a message for RabbitMQ, or raise an error that says what RabbitMQ cannot accept."""
    if len(message.body) > RABBITMQ_MESSAGE_BYTES:
        raise MessageSizeExceededError(
            f"a message has {len(message.body)} bytes; RabbitMQ accepts at most "
            f"{RABBITMQ_MESSAGE_BYTES}. Send a smaller message",
            size=len(message.body),
            limit=RABBITMQ_MESSAGE_BYTES,
        )
    headers: dict[str, Any] = {}
    basic: dict[str, Any] = {"delivery_mode": _PERSISTENT, "timestamp": now_s}
    _set_texts(message, message_id, basic, headers)
    if message.time_to_live is not None:
        _set_life(message.time_to_live, basic, headers)
    if message.amqp is not None:
        headers[_AMQP] = message.amqp
    if message.application_properties:
        _add_properties(message.application_properties, headers)
    if origin is not None and _DIVERTED not in headers:
        headers[ORIGIN_PROPERTY] = origin
    if to_topic and message.subject is not None:
        headers[SUBJECT] = message.subject
    return Publication(BasicProperties(**basic, headers=headers), message.body)


def _set_texts(
    message: BrokeredMessage, message_id: str, basic: dict[str, Any], headers: dict[str, Any]
) -> None:
    for name, property_name in _BASIC.items():
        text = message_id if name == "message_id" else getattr(message, name)
        if text is None:
            continue
        if (len(text) > 60 and len(text.encode()) > RABBITMQ_NAME_BYTES) or (
            name == "reply_to" and text.startswith(_DIRECT_REPLY)
        ):
            headers[_HEADER_OF[name]] = text
        else:
            basic[property_name] = text
    for name in _AS_HEADERS:
        text = getattr(message, name)
        if text is not None:
            headers[_HEADER_OF[name]] = text


def _set_life(life: timedelta, basic: dict[str, Any], headers: dict[str, Any]) -> None:
    if life == UNLIMITED:
        return
    rounded_ms = -(-life // _MILLISECOND)  # rounded up, so that no message expires early
    if rounded_ms <= RABBITMQ_MAX_EXPIRATION_MS:
        basic["expiration"] = str(rounded_ms)
    if rounded_ms > RABBITMQ_MAX_EXPIRATION_MS or life % _MILLISECOND:
        headers[_LIFE] = life // MICROSECOND


def _add_properties(properties: Mapping[str, PropertyValue], headers: dict[str, Any]) -> None:
    types: dict[str, str] = {}
    for name, value in properties.items():
        header = _escaped(name)
        headers[header] = _plain(name, value, types)
        if len(header) > 60 and len(header.encode()) > RABBITMQ_NAME_BYTES:
            raise InvalidArgumentError(
                f"the name of a property has {len(header.encode())} bytes; RabbitMQ allows at most "
                f"{RABBITMQ_NAME_BYTES}. Use a shorter name"
            )
    if types:
        headers[TYPES] = json.dumps(types, separators=(",", ":"))


def _escaped(name: str) -> str:
    """Return the header name of a property; escape names that RabbitMQ or Twinbus uses."""
    lower = name.lower()
    is_taken = lower in _ACTED_ON or name in _OWN or lower.startswith((_ESCAPED, *_SYSTEM))
    return _ESCAPED + name if is_taken else name


def _plain(name: str, value: PropertyValue, types: dict[str, str]) -> Any:
    """Return a property as a header value; record its type if the header does not keep it."""
    if isinstance(value, str | bool | int | bytes):
        return value
    if isinstance(value, float):
        types[name] = "float"
        return repr(value)
    if isinstance(value, datetime):
        types[name] = "datetime"
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    if isinstance(value, timedelta):
        types[name] = "timedelta"
        return _iso_duration(value)
    types[name] = "uuid"
    return str(value)


def _iso_duration(span: timedelta) -> str:
    sign = "-" if span < timedelta(0) else ""
    seconds, part = divmod(abs(span) // MICROSECOND, 1_000_000)
    return f"{sign}PT{seconds}" + (f".{part:06}".rstrip("0") if part else "") + "S"


def _duration_of(text: str) -> timedelta:
    sign = -1 if text.startswith("-") else 1
    seconds, _, part = text.removeprefix("-").removeprefix("PT").removesuffix("S").partition(".")
    return sign * timedelta(seconds=int(seconds), microseconds=int(part.ljust(6, "0") or 0))


_READERS: Mapping[str, Any] = {
    "float": float,
    "datetime": datetime.fromisoformat,
    "timedelta": _duration_of,
    "uuid": UUID,
}


def check_frame(publication: Publication, frame_bytes: int) -> None:
    """Refuse headers that do not fit into a frame: RabbitMQ would close the connection."""
    headers = publication.properties.headers
    if sum(len(str(value)) for value in headers.values()) < frame_bytes // 8:
        return
    size = sum(len(piece) for piece in publication.properties.encode())
    limit = frame_bytes - 128  # reserved for the frame's header and end, and for PUBLICATION
    if size > limit:
        raise MessageSizeExceededError(
            f"the properties of a message have {size} bytes; RabbitMQ accepts at most {limit}. Put "
            "large values into the body",
            size=size,
            limit=limit,
        )


def dead_letter(
    publication: Publication, source: str, reason: str | None, text: str | None
) -> None:
    """Add the dead-letter reason and source to a publication, and remove its expiration."""
    headers = dict(publication.properties.headers or {})
    headers.pop("x-delivery-count", None)
    headers[SOURCE] = source
    if reason is not None:
        headers[REASON] = reason
    if text is not None:
        headers[DESCRIPTION] = text
    publication.properties.headers = headers
    publication.properties.expiration = None


# -- from RabbitMQ ---------------------------------------------------------------------------------


def received(properties: Any, body: bytes) -> BrokeredMessage:
    """Convert a delivered message; never raises, whatever another program has sent."""
    headers: dict[str, Any] = properties.headers or {}
    fields: dict[str, Any] = {"message_id": None}
    for name, property_name in _BASIC.items():
        _take(fields, name, headers.get(_HEADER_OF[name], getattr(properties, property_name)))
    for name in _AS_HEADERS:
        _take(fields, name, headers.get(_HEADER_OF[name]))
    amqp = headers.get(_AMQP)
    life = _life_of(properties.expiration, headers.get(_LIFE))
    enqueued = _moment(properties.timestamp)
    fields["amqp"] = amqp if isinstance(amqp, bytes) else None
    fields["time_to_live"] = life
    fields["enqueued_time_utc"] = enqueued
    if life is not None and enqueued is not None and enqueued < _LATEST - life:
        fields["expires_at_utc"] = enqueued + life
    count = headers.get("x-delivery-count")
    fields["delivery_count"] = min(int(count), 2**31 - 1) if isinstance(count, int) else 0
    _take_death(fields, headers)
    return BrokeredMessage(body, application_properties=_properties_of(headers), **fields)


_LATEST = datetime.max.replace(tzinfo=UTC)


def _take(fields: dict[str, Any], name: str, text: object) -> None:
    if isinstance(text, str):
        fields[name] = text[:MAX_ID_CHARACTERS] if name in BOUNDED_TEXTS else text


def _life_of(expiration: object, exact_us: object) -> timedelta | None:
    try:
        if isinstance(exact_us, int):
            life = timedelta(microseconds=exact_us)
        elif isinstance(expiration, str):
            life = timedelta(milliseconds=int(expiration))
        else:
            return None
    except (OverflowError, ValueError):
        return None
    return life if life > timedelta(0) else None


def _moment(seconds: object) -> datetime | None:
    try:
        return None if not isinstance(seconds, int) else datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def _take_death(fields: dict[str, Any], headers: Mapping[str, Any]) -> None:
    """Set the dead-letter reason, from the receiver or from RabbitMQ."""
    deaths = headers.get("x-death")
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        reason = str(deaths[0].get("reason"))
        fields["dead_letter_reason"] = _REASONS.get(reason, reason)
        fields["dead_letter_source"] = str(deaths[0].get("queue"))
    for name, header in (
        ("dead_letter_reason", REASON),
        ("dead_letter_error_description", DESCRIPTION),
        ("dead_letter_source", SOURCE),
    ):
        text = headers.get(header)
        if isinstance(text, str):
            fields[name] = text


def _properties_of(headers: Mapping[str, Any]) -> dict[str, PropertyValue]:
    types = _types_of(headers.get(TYPES))
    found: dict[str, PropertyValue] = {}
    for header, value in headers.items():
        if header in _OWN or header.lower() in _ACTED_ON or header.lower().startswith(_SYSTEM):
            continue
        name = header.removeprefix(_ESCAPED)
        taken = _read(value, types.get(name))
        if taken is not None and 0 < len(name) <= MAX_PROPERTY_NAME_CHARACTERS:
            found[name] = taken
    return found


def _types_of(text: object) -> Mapping[str, object]:
    try:
        types = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return types if isinstance(types, dict) else {}


def _read(value: Any, kind: object) -> PropertyValue | None:
    """Return the value of a header; a type that properties do not support becomes text."""
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is not None and isinstance(value, str):
        try:
            typed: PropertyValue = reader(value)
            property_child("value", typed)  # refuses a datetime without a time zone, for example
        except (OverflowError, ValueError, InvalidArgumentError):
            return value
        return typed
    if isinstance(value, bool | str | bytes):
        return value
    if isinstance(value, int):
        return int(value)  # pika has its own type for long integers
    if isinstance(value, datetime):
        return value
    if value is None:
        return None
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
