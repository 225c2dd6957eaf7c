"""Converts messages between AMQP and Twinbus, in both directions, without loss.

A message that arrives over AMQP becomes a native message. Native clients, filters, schedules,
sessions and duplicate detection use its fields. Its AMQP sections are kept byte for byte in
`BrokeredMessage.amqp`, so that an AMQP receiver gets the types, annotations and ids that the sender
wrote:

    +0   1  kind of the body: see BodyKind
    +1   8  fingerprint of the native fields that were made from the sections
    +9      the sections, without the body if the native body contains it

While the native fields match the fingerprint, the sections are delivered as they are; the broker
only replaces the header and adds its annotations. If a field was changed (by the action of a rule,
or by a native client that sends the message again), the field takes precedence over its section.

`write_sent` and `read_delivered` are the client's side: they encode a message as a Service Bus
client sends it, and decode a delivery.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
import xxhash

from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.encoder import write_binary
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_section
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Described, Int, Symbol, Timestamp
from twinbus.clock import MICROSECOND, from_us, moment_us
from twinbus.limits import NEVER_US
from twinbus.message import (
    APPLICATION_FIELDS,
    BrokeredMessage,
    MessageState,
    PropertyValue,
)
from twinbus.protocol.rows import encode_rows

BATCH_FORMAT: Final = 0x80013700  # a message whose data sections are messages
PARTITION_KEY: Final = "x-opt-partition-key"
SCHEDULED: Final = "x-opt-scheduled-enqueue-time"
_BESIDE: Final = (
    SectionKind.HEADER,
    SectionKind.DELIVERY_ANNOTATIONS,
    SectionKind.MESSAGE_ANNOTATIONS,
    SectionKind.PROPERTIES,
    SectionKind.APPLICATION_PROPERTIES,
    SectionKind.FOOTER,
)
_TIMESPAN: Final = Symbol("com.microsoft:timespan")  # in ticks of 100 ns, as .NET sends it
_DATETIME_OFFSET: Final = Symbol("com.microsoft:datetime-offset")  # in .NET ticks
_EPOCH_TICKS: Final = 621_355_968_000_000_000  # 1970 in .NET ticks
_MOST_TICKS: Final = 2**63 - 1  # of a time span: unlimited
_MOST_TTL_MS: Final = 2**32 - 1
_AMQP: Final = 13  # the index of the sections in a row
_HEAD = struct.Struct("<B8s")
_encode = msgspec.msgpack.Encoder().encode


class BodyKind(IntEnum):
    """What the body of an AMQP message is, and where it is stored."""

    DATA = 0  # a data section, stored as the native body
    TEXT = 1  # a text value, stored as the native body in UTF-8
    BINARY = 2  # a binary value, stored as the native body
    OTHER = 3  # anything else, stored among the sections; the native body is empty


# -- from AMQP ---------------------------------------------------------------------------------


def read_messages(payload: Buffer, message_format: int) -> list[BrokeredMessage]:
    """Return the messages of a transfer: a single one, or those of a batch."""
    message = AmqpMessage(payload)
    if message_format != BATCH_FORMAT:
        return [read_message(message)]
    return [read_message(AmqpMessage(bytes(section))) for section in message.data_sections]


def read_message(message: AmqpMessage) -> BrokeredMessage:
    """Return an AMQP message as a native message that keeps its sections."""
    properties = message.properties or Properties()
    annotations = message.message_annotations or {}
    kind, body = _read_body(message)
    application = message.application_properties or {}
    native = BrokeredMessage(
        body=body, **_native_fields(properties, annotations, message.header, application)
    )
    given = {}
    if properties.message_id is None:  # some SDKs fail without a message id
        given[SectionKind.PROPERTIES] = replace(properties, message_id=native.message_id).encode()
    if kind is BodyKind.OTHER:
        kept = [bytes(piece) for piece in message.spliced(given)]
    else:
        found = (given.get(section) or message.raw(section) for section in _BESIDE)
        kept = [section for section in found if section is not None]
    sections = _HEAD.pack(kind, fingerprint(native)) + b"".join(kept)
    # No other code has the message yet, so it may be changed; a copy would take 50 us.
    object.__setattr__(native, "amqp", sections)
    return native


def _native_fields(
    properties: Properties,
    annotations: Mapping[Any, Any],
    header: Header | None,
    application: Mapping[Any, Any],
) -> dict[str, Any]:
    """Return the fields of a native message, except its body."""
    return {
        "message_id": _text(properties.message_id) or uuid4().hex,
        "session_id": properties.group_id,
        "correlation_id": _text(properties.correlation_id),
        "content_type": properties.content_type,
        "subject": properties.subject,
        "to": properties.to,
        "reply_to": properties.reply_to,
        "reply_to_session_id": properties.reply_to_group_id,
        "partition_key": _text(annotations.get(PARTITION_KEY)),
        "time_to_live": _life(header),
        "scheduled_enqueue_time_utc": moment_of(annotations.get(SCHEDULED)),
        "application_properties": dict(_native_properties(application)),
    }


def _read_body(message: AmqpMessage) -> tuple[BodyKind, bytes]:
    if message.body_kind is SectionKind.DATA:
        sections = message.data_sections
        if len(sections) == 1:
            return BodyKind.DATA, bytes(sections[0])
    elif message.body_kind is SectionKind.VALUE:
        value = message.value
        if type(value) is str:
            return BodyKind.TEXT, value.encode()
        if type(value) is bytes:
            return BodyKind.BINARY, value
    return BodyKind.OTHER, b""


def _text(value: Any) -> str | None:
    """Return an id or key of any AMQP type as text."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _life(header: Header | None) -> timedelta | None:
    """Return a time to live; the largest value of AMQP means unlimited."""
    if header is None or header.ttl is None or header.ttl == _MOST_TTL_MS:
        return None
    return timedelta(milliseconds=max(header.ttl, 1))


def moment_of(ms: Any) -> datetime | None:
    """Return a timestamp; None if it is outside of the range of datetime."""
    if not isinstance(ms, int):
        return None
    try:
        return from_us(int(ms) * 1000)
    except (OverflowError, ValueError):
        return None


def _native_properties(application: Mapping[Any, Any]) -> Iterator[tuple[str, PropertyValue]]:
    """Yield the properties whose types native messages support."""
    for name, value in application.items():
        native = native_value(value)
        if native is not None and isinstance(name, str):
            yield str(name), native


def native_value(value: Any) -> PropertyValue | None:
    """Return a value in a type of native properties; None if there is no such type."""
    if isinstance(value, Timestamp):
        return moment_of(value)
    if isinstance(value, bool | bytes | UUID):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Described) and type(value.value) is int:
        try:
            if value.descriptor == _TIMESPAN:
                is_never = value.value >= _MOST_TICKS
                return timedelta(microseconds=NEVER_US if is_never else value.value // 10)
            if value.descriptor == _DATETIME_OFFSET:
                return from_us((value.value - _EPOCH_TICKS) // 10)
        except (OverflowError, ValueError):
            return None
    return None


def fingerprint(message: BrokeredMessage) -> bytes:
    """Return a hash of the native fields, which shows later whether any of them was changed."""
    [row], _ = encode_rows([message])
    fields = row[1:_AMQP]
    while fields and fields[-1] is None:
        fields.pop()
    return xxhash.xxh3_64_digest(_encode(fields))


# -- to AMQP -----------------------------------------------------------------------------------


def write_message(
    message: BrokeredMessage, *, is_browsed: bool = False, is_locked: bool = True
) -> list[Buffer]:
    """Return a delivered message in pieces, with the broker's annotations.

    Without `is_locked` they do not mention the lock: the message is deleted when it is written.
    """
    kind, sent = _sections_of(message)
    header = sent.header or Header(ttl=_ttl(message))
    pieces: list[Buffer] = [
        replace(header, delivery_count=message.delivery_count or 0).encode(),
        *_delivery_annotations(message.lock_token if is_locked else None, sent),
        sent.extended(
            SectionKind.MESSAGE_ANNOTATIONS,
            _annotations(message, is_browsed=is_browsed, is_locked=is_locked),
        ),
        sent.raw(SectionKind.PROPERTIES) or b"",
        *_application_properties(message, sent),
        *_body(message, kind, sent),
    ]
    footer = sent.raw(SectionKind.FOOTER)
    if footer is not None:
        pieces.append(footer)
    return pieces


def _sections_of(
    message: BrokeredMessage, *, is_exact: bool = False
) -> tuple[BodyKind, AmqpMessage]:
    """Return the sections that match the native fields; `is_exact` keeps microseconds."""
    if message.amqp is None:
        return BodyKind.DATA, AmqpMessage(_native_sections(message, AmqpMessage(b""), is_exact))
    kind, known = BodyKind.DATA, b""
    sent = AmqpMessage(b"")
    if len(message.amqp) >= _HEAD.size:
        try:
            number, known = _HEAD.unpack_from(message.amqp)
            kind, sent = BodyKind(number), AmqpMessage(message.amqp[_HEAD.size :])
        except (ValueError, AmqpError):  # a native client wrote other bytes there
            known = b""
    if known != fingerprint(message):
        sent = AmqpMessage(_native_sections(message, sent, is_exact))
    return kind, sent


def _native_sections(message: BrokeredMessage, sent: AmqpMessage, is_exact: bool) -> bytes:  # noqa: FBT001
    """Return sections made from native fields; `sent` provides what these cannot express."""
    before = sent.properties or Properties()
    properties = replace(
        before,
        message_id=_same_or(before.message_id, message.message_id),
        correlation_id=_same_or(before.correlation_id, message.correlation_id),
        to=message.to,
        subject=message.subject,
        reply_to=message.reply_to,
        content_type=message.content_type,
        group_id=message.session_id,
        reply_to_group_id=message.reply_to_session_id,
    )
    annotations = dict(sent.message_annotations or {})
    for name in (PARTITION_KEY, SCHEDULED):
        annotations.pop(name, None)
    if message.partition_key is not None:
        annotations[Symbol(PARTITION_KEY)] = message.partition_key
    if message.scheduled_enqueue_time_utc is not None:
        annotations[Symbol(SCHEDULED)] = timestamp_of(message.scheduled_enqueue_time_utc)
    application = sent.application_properties or {}
    own = {
        name: application[name]
        if name in application and native_value(application[name]) == value
        else amqp_value(value, is_exact=is_exact)
        for name, value in message.application_properties.items()
    }
    header = replace(sent.header or Header(), ttl=_ttl(message))
    kept = (SectionKind.DELIVERY_ANNOTATIONS, SectionKind.FOOTER)
    pieces: list[Buffer] = [header.encode(), properties.encode()]
    pieces += [section for name in kept if (section := sent.raw(name)) is not None]
    if annotations:
        pieces.append(encode_section(SectionKind.MESSAGE_ANNOTATIONS, annotations))
    if own:
        pieces.append(encode_section(SectionKind.APPLICATION_PROPERTIES, own))
    beside = dict.fromkeys(_BESIDE)
    pieces += sent.spliced(beside)
    return b"".join(pieces)


def _same_or(typed: Any, text: str | None) -> Any:
    """Return the id with the type of the sender, unless its text was changed."""
    return typed if _text(typed) == text else text


def amqp_value(value: PropertyValue, *, is_exact: bool = False) -> Any:
    """Return the value of a native property as an AMQP value; `is_exact` keeps microseconds."""
    if isinstance(value, datetime):
        us = moment_us(value)
        if is_exact and us % 1000:  # an AMQP timestamp has milliseconds only
            return Described(_DATETIME_OFFSET, us * 10 + _EPOCH_TICKS)
        return timestamp_of(value)
    if isinstance(value, timedelta):
        return Described(_TIMESPAN, max(-_MOST_TICKS, min(value // MICROSECOND * 10, _MOST_TICKS)))
    return value


def timestamp_of(moment: datetime) -> Timestamp:
    """Return a time as an AMQP timestamp."""
    return Timestamp(moment_us(moment) // 1000)


def _ttl(message: BrokeredMessage) -> int | None:
    if message.time_to_live is None:
        return None
    return min(max(message.time_to_live // timedelta(milliseconds=1), 1), _MOST_TTL_MS)


def _delivery_annotations(lock_token: UUID | None, sent: AmqpMessage) -> list[Buffer]:
    if lock_token is None:
        section = sent.raw(SectionKind.DELIVERY_ANNOTATIONS)
        return [] if section is None else [section]
    added = {"x-opt-lock-token": lock_token}
    return [sent.extended(SectionKind.DELIVERY_ANNOTATIONS, added)]


def _annotations(message: BrokeredMessage, *, is_browsed: bool, is_locked: bool) -> dict[str, Any]:
    """Return the annotations that the broker adds to a message."""
    added: dict[str, Any] = {}
    if message.sequence_number is not None:
        added["x-opt-sequence-number"] = message.sequence_number
    if message.enqueued_time_utc is not None:
        added["x-opt-enqueued-time"] = timestamp_of(message.enqueued_time_utc)
    if is_locked and message.locked_until_utc is not None:
        added["x-opt-locked-until"] = timestamp_of(message.locked_until_utc)
    if message.state is not None and (is_browsed or message.state is not MessageState.ACTIVE):
        added["x-opt-message-state"] = Int(message.state)
    if message.dead_letter_source is not None:
        added["x-opt-deadletter-source"] = message.dead_letter_source
    return added


def _application_properties(message: BrokeredMessage, sent: AmqpMessage) -> list[Buffer]:
    why = {
        "DeadLetterReason": message.dead_letter_reason,
        "DeadLetterErrorDescription": message.dead_letter_error_description,
    }
    added = {name: text for name, text in why.items() if text is not None}
    if added:
        return [sent.extended(SectionKind.APPLICATION_PROPERTIES, added)]
    section = sent.raw(SectionKind.APPLICATION_PROPERTIES)
    return [] if section is None else [section]


def _body(message: BrokeredMessage, kind: BodyKind, sent: AmqpMessage) -> list[Buffer]:
    if kind is BodyKind.OTHER and not message.body:
        return sent.spliced(dict.fromkeys(_BESIDE))
    if kind is BodyKind.TEXT:
        try:
            return [encode_section(SectionKind.VALUE, message.body.decode())]
        except UnicodeDecodeError:  # the body was replaced
            pass
    section = SectionKind.VALUE if kind is BodyKind.BINARY else SectionKind.DATA
    return [bytes((0x00, 0x53, section)), write_binary(message.body)]


# -- the client's side ---------------------------------------------------------------------------

_ADDED: Final = frozenset(  # annotations that the broker adds to a delivery
    (
        "x-opt-sequence-number",
        "x-opt-enqueued-time",
        "x-opt-enqueue-sequence-number",
        "x-opt-locked-until",
        "x-opt-message-state",
        "x-opt-deadletter-source",
        "x-opt-partition-id",
    )
)
_DEATH: Final = ("DeadLetterReason", "DeadLetterErrorDescription")
_NATIVE_ANNOTATIONS: Final = frozenset((PARTITION_KEY, SCHEDULED))
_NOT_NATIVE: Final = (  # properties without a native field
    "user_id",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "group_sequence",
)
_NATIVE_TYPES: Final = (str, int, float, bool, bytes, UUID, Timestamp, Described)


def write_sent(message: BrokeredMessage) -> bytes:
    """Return a message as a Service Bus client sends it."""
    kind, sent = _sections_of(message, is_exact=True)
    before = [section for name in _BESIDE[:-1] if (section := sent.raw(name)) is not None]
    footer = sent.raw(SectionKind.FOOTER) or b""
    return b"".join([*before, *_body(message, kind, sent), footer])


def read_delivered(payload: Buffer, *, is_dead: bool = False) -> BrokeredMessage:
    """Return a delivered message with the values that the broker added, except its lock token.

    `is_dead` says that the message comes from a dead-letter queue: the reason and the description
    are then not returned as application properties. The same holds for a forwarded dead letter,
    which has the source of its death.
    """
    delivered = AmqpMessage(payload)
    annotations = delivered.message_annotations or {}
    header = delivered.header or Header()
    properties = delivered.properties or Properties()
    application = delivered.application_properties or {}
    own = {key: value for key, value in annotations.items() if str(key) not in _ADDED}
    if _is_native(delivered, header, properties, own, application):
        native = _native_fields(properties, own, header, application)
        native["body"] = bytes(delivered.data_sections[0])
    else:
        sent = _as_sent(delivered, header, own)
        native = {name: getattr(sent, name) for name in APPLICATION_FIELDS}
    death: list[str | None] = [None, None]
    if is_dead or "x-opt-deadletter-source" in annotations:
        death = [_text(native["application_properties"].pop(name, None)) for name in _DEATH]
    enqueued = moment_of(annotations.get("x-opt-enqueued-time"))
    life = native["time_to_live"]
    return BrokeredMessage(
        **native,
        sequence_number=_integer(annotations.get("x-opt-sequence-number")),
        enqueued_time_utc=enqueued,
        expires_at_utc=None if enqueued is None or life is None else enqueued + life,
        delivery_count=int(header.delivery_count or 0),
        locked_until_utc=moment_of(annotations.get("x-opt-locked-until")),
        state=MessageState(int(annotations.get("x-opt-message-state") or 0)),
        dead_letter_reason=death[0],
        dead_letter_error_description=death[1],
        dead_letter_source=_text(annotations.get("x-opt-deadletter-source")),
    )


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _as_sent(delivered: AmqpMessage, header: Header, own: Mapping[Any, Any]) -> BrokeredMessage:
    """Return the message as its sender wrote it, with its sections."""
    annotations = encode_section(SectionKind.MESSAGE_ANNOTATIONS, own) if own else None
    sections = {
        SectionKind.HEADER: replace(header, delivery_count=0, first_acquirer=False).encode(),
        SectionKind.MESSAGE_ANNOTATIONS: annotations,
        SectionKind.DELIVERY_ANNOTATIONS: None,
    }
    return read_message(AmqpMessage(b"".join(delivered.spliced(sections))))


def _is_native(
    delivered: AmqpMessage,
    header: Header,
    properties: Properties,
    own: Mapping[Any, Any],
    application: Mapping[Any, Any],
) -> bool:
    """Return whether the native fields contain everything that the sender wrote."""
    return (
        not any(map(properties.__getattribute__, _NOT_NATIVE))
        and type(properties.message_id) is str
        and (properties.correlation_id is None or type(properties.correlation_id) is str)
        and not header.durable
        and header.priority in (None, 4)
        and all(str(key) in _NATIVE_ANNOTATIONS for key in own)
        and all(
            type(value) in _NATIVE_TYPES and native_value(value) is not None
            for value in application.values()
        )
        and delivered.body_kind is SectionKind.DATA
        and len(delivered.data_sections) == 1
        and not delivered.has(SectionKind.FOOTER)
    )
