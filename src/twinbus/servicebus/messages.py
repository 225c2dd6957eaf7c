"""Converts messages from AMQP to Twinbus, without loss; encoding.py converts them back.

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

`read_delivered` is the client's side: it decodes a delivery.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
import xxhash

from twinbus.amqp.conditions import AmqpError, Condition
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_section
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Described, Symbol, Timestamp
from twinbus.clock import from_us
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_AMQP_ENTRIES, NEVER_US
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
OTHER_SECTIONS: Final = (  # all except those of the body
    SectionKind.HEADER,
    SectionKind.DELIVERY_ANNOTATIONS,
    SectionKind.MESSAGE_ANNOTATIONS,
    SectionKind.PROPERTIES,
    SectionKind.APPLICATION_PROPERTIES,
    SectionKind.FOOTER,
)
_EXTENDED: Final = (  # sections to which the broker adds entries
    SectionKind.DELIVERY_ANNOTATIONS,
    SectionKind.MESSAGE_ANNOTATIONS,
    SectionKind.APPLICATION_PROPERTIES,
)
TIMESPAN: Final = Symbol("com.microsoft:timespan")  # in ticks of 100 ns, as .NET sends it
DATETIME_OFFSET: Final = Symbol("com.microsoft:datetime-offset")  # in .NET ticks
EPOCH_TICKS: Final = 621_355_968_000_000_000  # 1970 in .NET ticks
MOST_TICKS: Final = 2**63 - 1  # of a time span: unlimited
MOST_TTL_MS: Final = 2**32 - 1
_AMQP: Final = 13  # the index of the sections in a row
STORED_HEAD = struct.Struct("<B8s")
_encode = msgspec.msgpack.Encoder().encode


class BodyKind(IntEnum):
    """What the body of an AMQP message is, and where it is stored."""

    DATA = 0  # a data section, stored as the native body
    TEXT = 1  # a text value, stored as the native body in UTF-8
    BINARY = 2  # a binary value, stored as the native body
    OTHER = 3  # anything else, stored among the sections; the native body is empty


# -- from AMQP ---------------------------------------------------------------------------------


def encoded_messages(payload: Buffer, message_format: int) -> Sequence[Buffer]:
    """Return the messages of a transfer, still encoded: a single one, or those of a batch."""
    if message_format != BATCH_FORMAT:
        return [payload]
    return AmqpMessage(payload).data_sections


def read_message(message: AmqpMessage) -> BrokeredMessage:
    """Return an AMQP message as a native message that keeps its sections.

    Raise AmqpError if a section cannot be decoded, or has no room for what the broker adds: no
    receiver could get the message.
    """
    _ = message.delivery_annotations, message.footer  # a check: only this line decodes them
    _check_room(message)
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
        found = (given.get(section) or message.raw(section) for section in OTHER_SECTIONS)
        kept = [section for section in found if section is not None]
    sections = STORED_HEAD.pack(kind, fingerprint(native)) + b"".join(kept)
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
        "message_id": text_of(properties.message_id) or uuid4().hex,
        "session_id": properties.group_id,
        "correlation_id": text_of(properties.correlation_id),
        "content_type": properties.content_type,
        "subject": properties.subject,
        "to": properties.to,
        "reply_to": properties.reply_to,
        "reply_to_session_id": properties.reply_to_group_id,
        "partition_key": text_of(annotations.get(PARTITION_KEY)),
        "time_to_live": life_of(header),
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
    elif message.body_kind is SectionKind.SEQUENCE:
        _ = message.sequences  # a check: only this line decodes them
    return BodyKind.OTHER, b""


def text_of(value: Any) -> str | None:
    """Return an id or key of any AMQP type as text."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def life_of(header: Header | None) -> timedelta | None:
    """Return a time to live; the largest value of AMQP means unlimited."""
    if header is None or header.ttl is None or header.ttl == MOST_TTL_MS:
        return None
    return timedelta(milliseconds=max(header.ttl, 1))


def moment_of(ms: Any) -> datetime | None:
    """Return a timestamp as a datetime; None if it is no number or beyond the range of datetime."""
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
            if value.descriptor == TIMESPAN:
                is_never = value.value >= MOST_TICKS
                return timedelta(microseconds=NEVER_US if is_never else value.value // 10)
            if value.descriptor == DATETIME_OFFSET:
                return from_us((value.value - EPOCH_TICKS) // 10)
        except (OverflowError, ValueError):
            return None
    return None


def fingerprint(message: BrokeredMessage) -> bytes:
    """Return a hash of the native fields, which shows later whether any of them was changed."""
    [row], _ = encode_rows([message])
    fields = row[1:_AMQP]
    while fields and fields[-1] is None:
        fields.pop()
    return hash_of(fields)


def hash_of(fields: list[Any]) -> bytes:
    """Return the fingerprint of a row's fields; see `fingerprint`."""
    return xxhash.xxh3_64_digest(_encode(fields))


def _check_room(message: AmqpMessage) -> None:
    """Refuse sections to which the broker cannot add its own entries when it delivers them."""
    for kind in _EXTENDED:
        count = message.entries_of(kind)
        if count > MAX_AMQP_ENTRIES:
            raise AmqpError(
                f"the section {kind.name} has {count} entries; at most {MAX_AMQP_ENTRIES} are "
                "allowed",
                Condition.RESOURCE_LIMIT_EXCEEDED,
            )


def check_sections(stored: bytes) -> None:
    """Raise an error if sections that a native client sends in `amqp` cannot be delivered."""
    try:
        number, _ = STORED_HEAD.unpack_from(stored)
        BodyKind(number)
        message = AmqpMessage(stored[STORED_HEAD.size :])
        message.decode_all()
        _check_room(message)
    except (struct.error, ValueError, AmqpError) as error:
        raise InvalidArgumentError(
            f"the field amqp of the message cannot be decoded: {error}. Send the message without it"
        ) from error


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
_STATES: Final = tuple(MessageState)
_NOT_NATIVE: Final = (  # properties without a native field
    "user_id",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "group_sequence",
)
_NATIVE_TYPES: Final = (str, int, float, bool, bytes, UUID, Timestamp, Described)


def read_delivered(payload: Buffer, *, is_dead: bool = False) -> BrokeredMessage:
    """Return a delivered message with the values that the broker added, except its lock token.

    `is_dead` says that the message comes from a dead-letter queue. Then the reason and the
    description are returned as fields, and not as application properties. The same applies to a
    dead letter that was forwarded to another queue: an annotation names its source.
    """
    delivered = AmqpMessage(payload)
    annotations = delivered.message_annotations or {}
    header = delivered.header or Header()
    properties = delivered.properties or Properties()
    application = delivered.application_properties or {}
    sender_annotations = {
        key: value for key, value in annotations.items() if str(key) not in _ADDED
    }
    if _is_native(delivered, header, properties, sender_annotations, application):
        native = _native_fields(properties, sender_annotations, header, application)
        native["body"] = bytes(delivered.data_sections[0])
    else:
        sent = _as_sent(delivered, header, sender_annotations)
        native = {name: getattr(sent, name) for name in APPLICATION_FIELDS}
    death: list[str | None] = [None, None]
    if is_dead or "x-opt-deadletter-source" in annotations:
        death = [text_of(native["application_properties"].pop(name, None)) for name in _DEATH]
    enqueued = moment_of(annotations.get("x-opt-enqueued-time"))
    life = native["time_to_live"]
    return BrokeredMessage(
        **native,
        sequence_number=_integer(annotations.get("x-opt-sequence-number")),
        enqueued_time_utc=enqueued,
        expires_at_utc=None if enqueued is None or life is None else enqueued + life,
        delivery_count=int(header.delivery_count or 0),
        locked_until_utc=moment_of(annotations.get("x-opt-locked-until")),
        state=_state_of(annotations.get("x-opt-message-state")),
        dead_letter_reason=death[0],
        dead_letter_error_description=death[1],
        dead_letter_source=text_of(annotations.get("x-opt-deadletter-source")),
    )


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _state_of(value: Any) -> MessageState:
    """Return a state; ACTIVE for any other value, which a sender may have written there."""
    return MessageState(value) if value in _STATES else MessageState.ACTIVE


def _as_sent(
    delivered: AmqpMessage, header: Header, sender_annotations: Mapping[Any, Any]
) -> BrokeredMessage:
    """Return the message as its sender wrote it, with its sections."""
    annotations = (
        encode_section(SectionKind.MESSAGE_ANNOTATIONS, sender_annotations)
        if sender_annotations
        else None
    )
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
    sender_annotations: Mapping[Any, Any],
    application: Mapping[Any, Any],
) -> bool:
    """Return whether the native fields contain everything that the sender wrote."""
    return (
        not any(map(properties.__getattribute__, _NOT_NATIVE))
        and type(properties.message_id) is str
        and (properties.correlation_id is None or type(properties.correlation_id) is str)
        and not header.durable
        and header.priority in (None, 4)
        and all(str(key) in _NATIVE_ANNOTATIONS for key in sender_annotations)
        and all(
            type(value) in _NATIVE_TYPES and native_value(value) is not None
            for value in application.values()
        )
        and delivered.body_kind is SectionKind.DATA
        and len(delivered.data_sections) == 1
        and not delivered.has(SectionKind.FOOTER)
    )
