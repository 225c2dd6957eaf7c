"""A message as AMQP 0-9-1 properties and headers; `columns.py` is the way back.

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
                              messages have no such header; pairing/backlog.py has properties for it
    application properties    a header of the same name, with a plain value
    (their types)             header x-twinbus-types, JSON: {"when": "datetime", ...}
    (number on the channel)   header x-twinbus-publication, to recognise a returned message

str, int, bool and bytes have a type in the header table. Other values are sent as text, and the
header x-twinbus-types names their type: float as Python prints it, datetime as ISO 8601 in UTC,
timedelta as ISO 8601 (PT90.5S), UUID as usual. A text that is too long for a property, or that
RabbitMQ would act on, is sent as header x-twinbus-<field>. A time to live with microseconds, or
longer than RabbitMQ supports, is also sent as such a header, in microseconds. A message whose time
to live is too long does not expire on RabbitMQ. Property names that RabbitMQ acts on (CC, BCC,
x-death ...) get the prefix x-twinbus-escaped-.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

from twinbus.clock import MICROSECOND
from twinbus.errors import InvalidArgumentError, MessageSizeExceededError
from twinbus.limits import (
    RABBITMQ_CACHED_NAMES,
    RABBITMQ_MAX_EXPIRATION_MS,
    RABBITMQ_MESSAGE_BYTES,
    RABBITMQ_NAME_BYTES,
    UNLIMITED,
)
from twinbus.message import APPLICATION_FIELDS, PropertyValue
from twinbus.namespace.rabbitmq.properties import FLAG_OF, without
from twinbus.protocol.origins import ORIGIN_PROPERTY

TYPES = "x-twinbus-types"
PUBLICATION = "x-twinbus-publication"
SUBJECT = "twinbus-subject"  # a headers exchange ignores names that begin with x-
REASON = "x-twinbus-dead-letter-reason"
DESCRIPTION = "x-twinbus-dead-letter-description"
SOURCE = "x-twinbus-dead-letter-source"
AMQP = "x-twinbus-amqp"
LIFE = "x-twinbus-time-to-live"
DELIVERIES = "x-delivery-count"  # the broker sets it; it starts at 0 again in another queue
ESCAPED = "x-twinbus-escaped-"
BASIC = {  # field -> property
    "message_id": "message_id",
    "correlation_id": "correlation_id",
    "content_type": "content_type",
    "reply_to": "reply_to",
    "subject": "type",
}
AS_HEADERS = ("to", "reply_to_session_id", "partition_key")
HEADER_OF = {name: "x-twinbus-" + name.replace("_", "-") for name in (*BASIC, *AS_HEADERS)}
OWN = frozenset(
    (*HEADER_OF.values(), TYPES, PUBLICATION, SUBJECT, REASON, DESCRIPTION, SOURCE, AMQP, LIFE)
)
ACTED_ON = ("cc", "bcc", "x-death", DELIVERIES, "x-delay", "x-stream-offset")
SYSTEM = ("x-first-death-", "x-last-death-")
_DIVERTED = "x-ms-path"  # the property that only messages in a backlog queue have
_DIRECT_REPLY = "amq.rabbitmq.reply-to"  # RabbitMQ would close the channel of the sender
_MILLISECOND = timedelta(milliseconds=1)
_PERSISTENT = b"\x02"
_FRAME_RESERVE = 128  # bytes for the header and the end of a frame, and for PUBLICATION
_FLAGS, _LENGTH, _SECONDS = Struct(">H"), Struct(">L"), Struct(">Q")
_BYTES_HEADER, _INT32_HEADER, _INT64_HEADER = Struct(">cL"), Struct(">ci"), Struct(">cq")


Plain = str | int | bytes | bool  # what has a type in the header table


class Publication(NamedTuple):
    """A message in the form in which it is published."""

    before: bytes  # the flags of its properties, and the properties before the headers
    headers: bytes  # without the size of their table: the publisher adds a header
    after: bytes  # the properties after the headers
    body: bytes
    key: str  # its routing key if it is published to a topic


# -- from a message --------------------------------------------------------------------------------


def published(
    values: Sequence[Any], message_id: str, origin: str | None, now_s: int, *, to_topic: bool
) -> Publication:
    """Convert a message for RabbitMQ, or raise an error that says what RabbitMQ cannot accept.

    The values are those of APPLICATION_FIELDS, except that the id is given apart.
    """
    body, _, _, correlation_id, content_type, subject, to, reply_to, *more = values
    reply_to_session_id, partition_key, life, _, properties, amqp = more
    if len(body) > RABBITMQ_MESSAGE_BYTES:
        raise MessageSizeExceededError(
            f"a message has {len(body)} bytes; RabbitMQ accepts at most "
            f"{RABBITMQ_MESSAGE_BYTES}. Send a smaller message",
            size=len(body),
            limit=RABBITMQ_MESSAGE_BYTES,
        )
    headers: list[bytes] = []
    if properties:
        _add_properties(properties, headers)
    if origin is not None and _DIVERTED not in properties:
        headers.append(_header(ORIGIN_PROPERTY, origin))
    encoded = message_id.encode()
    if values[_OPTIONAL] == _UNSET and amqp is None and len(encoded) <= RABBITMQ_NAME_BYTES:
        after = b"".join((_PERSISTENT, bytes((len(encoded),)), encoded, _SECONDS.pack(now_s)))
        return Publication(_USUAL_FLAGS, b"".join(headers), after, body, "")
    basic = {"delivery_mode": _PERSISTENT, "timestamp": _SECONDS.pack(now_s)}
    _add_texts((message_id, correlation_id, content_type, reply_to, subject), basic, headers)
    for name, value in zip(
        _AS_HEADERS, (to, reply_to_session_id, partition_key, amqp), strict=True
    ):
        if value is not None:
            headers.append(_header(name, value))
    if life is not None:
        _add_life(life, basic, headers)
    if to_topic and subject is not None:
        headers.append(_header(SUBJECT, subject))
    flags = FLAG_OF["headers"]
    for name in basic:
        flags |= FLAG_OF[name]
    before = _FLAGS.pack(flags) + basic.pop("content_type", b"")
    after = b"".join([basic[name] for name in _order(flags)])
    key = subject if subject is not None and "type" in basic else ""
    return Publication(before, b"".join(headers), after, body, key)


_OPTIONAL = slice(
    APPLICATION_FIELDS.index("correlation_id"), APPLICATION_FIELDS.index("time_to_live") + 1
)
_UNSET = (None,) * len(APPLICATION_FIELDS[_OPTIONAL])  # most messages have none of these
_USUAL = ("headers", "delivery_mode", "message_id", "timestamp")
_USUAL_FLAGS = _FLAGS.pack(sum(FLAG_OF[name] for name in _USUAL))
_BASIC = tuple(BASIC.items())
_AS_HEADERS = (*(HEADER_OF[name] for name in AS_HEADERS), AMQP)


def _add_texts(texts: Sequence[str | None], basic: dict[str, bytes], headers: list[bytes]) -> None:
    """Add the texts of BASIC; one that is too long, or that RabbitMQ acts on, becomes a header."""
    for (name, property_name), text in zip(_BASIC, texts, strict=True):
        if text is None:
            continue
        encoded = text.encode()
        is_acted_on = name == "reply_to" and text.startswith(_DIRECT_REPLY)
        if is_acted_on or len(encoded) > RABBITMQ_NAME_BYTES:
            headers.append(_header(HEADER_OF[name], text))
        else:
            basic[property_name] = bytes((len(encoded),)) + encoded


@lru_cache(maxsize=64)
def _order(flags: int) -> tuple[str, ...]:
    """Return the properties after the headers, in the order in which they are written."""
    return tuple(
        name for name, flag in FLAG_OF.items() if flag & flags and flag < FLAG_OF["headers"]
    )


def _add_life(life: timedelta, basic: dict[str, bytes], headers: list[bytes]) -> None:
    if life == UNLIMITED:
        return
    rounded_ms = -(-life // _MILLISECOND)  # rounded up, so that no message expires early
    if rounded_ms <= RABBITMQ_MAX_EXPIRATION_MS:
        text = str(rounded_ms).encode()
        basic["expiration"] = bytes((len(text),)) + text
    if rounded_ms > RABBITMQ_MAX_EXPIRATION_MS or life % _MILLISECOND:
        headers.append(_header(LIFE, life // MICROSECOND))


def _add_properties(properties: Mapping[str, PropertyValue], headers: list[bytes]) -> None:
    types: dict[str, str] = {}
    for name, value in properties.items():
        headers.append(_header(header_name_of(name), _plain(name, value, types)))
    if types:
        headers.append(_header(TYPES, json.dumps(types, separators=(",", ":"))))


@lru_cache(maxsize=RABBITMQ_CACHED_NAMES)
def header_name_of(name: str) -> str:
    """Return the header name of a property; escape names that RabbitMQ or Twinbus uses."""
    lower = name.lower()
    is_taken = lower in ACTED_ON or name in OWN or lower.startswith((ESCAPED, *SYSTEM))
    return ESCAPED + name if is_taken else name


def _header(name: str, value: Plain) -> bytes:
    """Return a header with its name, type and value."""
    start = _header_name(name)
    if isinstance(value, str):
        encoded = value.encode()
        return start + _BYTES_HEADER.pack(b"S", len(encoded)) + encoded
    if isinstance(value, bytes):
        return start + _BYTES_HEADER.pack(b"x", len(value)) + value
    if isinstance(value, bool):
        return start + (b"t\x01" if value else b"t\x00")
    if -(2**31) <= value < 2**31:
        return start + _INT32_HEADER.pack(b"I", value)
    return start + _INT64_HEADER.pack(b"l", value)


@lru_cache(maxsize=RABBITMQ_CACHED_NAMES)
def _header_name(name: str) -> bytes:
    encoded = name.encode()
    if len(encoded) > RABBITMQ_NAME_BYTES:
        raise InvalidArgumentError(
            f"the property name {name!r:.60} has {len(encoded)} bytes; RabbitMQ allows at most "
            f"{RABBITMQ_NAME_BYTES}. Use a shorter name"
        )
    return bytes((len(encoded),)) + encoded


def _plain(name: str, value: PropertyValue, types: dict[str, str]) -> Plain:
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


def check_frame(publication: Publication, frame_bytes: int) -> None:
    """Refuse headers that do not fit into a frame: RabbitMQ would close the connection."""
    size = len(publication.before) + len(publication.headers) + len(publication.after)
    limit = frame_bytes - _FRAME_RESERVE
    if size > limit:
        raise MessageSizeExceededError(
            f"the properties of a message have {size} bytes; RabbitMQ accepts at most {limit}. Put "
            "large values into the body",
            size=size,
            limit=limit,
        )


# -- from a delivered message ----------------------------------------------------------------------


def dead_letter(
    encoded: bytes,
    body: bytes,
    source: str,
    reason: str | None,
    text: str | None,
    frame_bytes: int,
) -> Publication:
    """Return a copy of a message with dead-letter reason and source, which does not expire.

    If the properties would not fit into a frame, the copy has no description, and if need be no
    reason: otherwise a message with large headers could not be dead-lettered.

    The copy has no header CC, or RabbitMQ would route it to further queues again, and no user_id,
    or RabbitMQ would refuse the copy of a message that another user sent.
    """
    given = {SOURCE: source, REASON: reason, DESCRIPTION: text}
    own = {name: _header(name, value) for name, value in given.items() if value is not None}
    left_out = {name.encode() for name in ("CC", "BCC", DELIVERIES, PUBLICATION, *own)}
    before, headers, after = without(encoded, ("expiration", "user_id"), left_out)
    room = frame_bytes - _FRAME_RESERVE - len(before) - len(headers) - len(after)
    for name in (DESCRIPTION, REASON):
        if sum(map(len, own.values())) > room:
            own.pop(name, None)
    return Publication(before, b"".join((headers, *own.values())), after, body, "")
