"""Encodes messages for AMQP clients and brokers; messages.py says how they are stored.

While the native fields match the fingerprint, the sections of the sender are written as they are,
with the header and the annotations of the broker. Otherwise the sections are made from the fields.

Nearly every delivery is *plain*: active, locked, and without annotations of its sender. A fast path
writes the sections of a plain delivery without decoding or building any of them. It returns None
for all other messages. `tests/unit/test_short_messages.py` compares the bytes of both paths.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, cast
from uuid import UUID

from twinbus.amqp.composites import read_composite
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoder import Buffer
from twinbus.amqp.encoder import (
    write_binary,
    write_compound,
    write_long,
    write_string,
    write_symbol,
    write_timestamp,
)
from twinbus.amqp.message import AmqpMessage, SectionKind, encode_section
from twinbus.amqp.performatives import Header, Properties
from twinbus.amqp.types import Described, Int, Symbol, Timestamp
from twinbus.clock import MICROSECOND, moment_us
from twinbus.entities import SCHEDULE_PROPERTY
from twinbus.errors import InvalidArgumentError
from twinbus.message import BrokeredMessage, MessageState, PropertyValue
from twinbus.servicebus.messages import (
    DATETIME_OFFSET,
    EPOCH_TICKS,
    MOST_TICKS,
    MOST_TTL_MS,
    OTHER_SECTIONS,
    PARTITION_KEY,
    SCHEDULED,
    STORED_HEAD,
    TIMESPAN,
    BodyKind,
    fingerprint,
    native_value,
    text_of,
)


def write_message(
    message: BrokeredMessage, *, is_browsed: bool = False, is_locked: bool = True
) -> list[Buffer]:
    """Return a delivered message in pieces, with the broker's annotations.

    Without `is_locked`, the annotations contain no lock, because the receiver does not settle.
    Raise a MessagingError if AMQP cannot express the message.
    """
    try:
        plain = _write_plain(message) if is_locked and not is_browsed else None
        if plain is not None:
            return plain
        return _write_any(message, is_browsed=is_browsed, is_locked=is_locked)
    except (AmqpError, InvalidArgumentError):  # the broker cannot read or extend its sections
        native = replace(message, amqp=None)
        return _write_any(native, is_browsed=is_browsed, is_locked=is_locked)


def _write_any(message: BrokeredMessage, *, is_browsed: bool, is_locked: bool) -> list[Buffer]:
    """Write any message: the general path."""
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


# -- the fast path ---------------------------------------------------------------------------------

_SEQUENCE: Final = write_symbol("x-opt-sequence-number")
_ENQUEUED: Final = write_symbol("x-opt-enqueued-time")
_LOCKED_UNTIL: Final = write_symbol("x-opt-locked-until")
_TOKEN_BYTES: Final = 16
_LOCK: Final = encode_section(  # the section up to the bytes of the token
    SectionKind.DELIVERY_ANNOTATIONS, {"x-opt-lock-token": UUID(int=0)}
)[:-_TOKEN_BYTES]
_ANNOTATIONS: Final = bytes((0x00, 0x53, SectionKind.MESSAGE_ANNOTATIONS))
_PROPERTIES: Final = bytes((0x00, 0x53, SectionKind.PROPERTIES))
_DATA: Final = bytes((0x00, 0x53, SectionKind.DATA))
_FIELDS_BESIDE_ID: Final = attrgetter(
    "session_id",
    "correlation_id",
    "content_type",
    "subject",
    "to",
    "reply_to",
    "reply_to_session_id",
    "partition_key",
    "scheduled_enqueue_time_utc",
)
_UNSET: Final = (None,) * 9


def _write_plain(message: BrokeredMessage) -> list[Buffer] | None:
    """Write a plain delivery; None if the delivery is not plain."""
    token, until = message.lock_token, message.locked_until_utc
    number, enqueued = message.sequence_number, message.enqueued_time_utc
    if (
        token is None
        or until is None
        or number is None
        or enqueued is None
        or (message.state is not MessageState.ACTIVE and message.state is not None)
        or message.dead_letter_source is not None
        or message.dead_letter_reason is not None
        or message.dead_letter_error_description is not None
    ):
        return None
    sections = _plain_sections(message)
    if sections is None:
        return None
    header, properties, application, footer = sections
    annotations = b"%b%b%b%b%b%b" % (
        _SEQUENCE,
        write_long(number),
        _ENQUEUED,
        write_timestamp(moment_us(enqueued) // 1000),
        _LOCKED_UNTIL,
        write_timestamp(moment_us(until) // 1000),
    )
    return [
        _header(header, _ttl(message), message.delivery_count or 0),
        _LOCK,
        token.bytes,
        _ANNOTATIONS,
        write_compound(0xC1, 6, annotations),
        properties,
        application,
        _DATA,
        write_binary(message.body),
        footer,
    ]


def _plain_sections(message: BrokeredMessage) -> tuple[bytes | None, bytes, bytes, bytes] | None:
    """Return header, properties, application properties and footer; None if it is not plain."""
    stored = message.amqp
    if stored is None:
        if message.application_properties or _FIELDS_BESIDE_ID(message) != _UNSET:
            return None
        if not message.message_id:  # it may be None
            return None
        message_id = write_compound(0xC0, 1, write_string(message.message_id))
        return None, _PROPERTIES + message_id, b"", b""
    if len(stored) < STORED_HEAD.size or stored[0] != BodyKind.DATA:
        return None
    if stored[1 : STORED_HEAD.size] != fingerprint(message):
        return None
    try:
        sent = AmqpMessage(stored[STORED_HEAD.size :])
    except AmqpError:  # a native client wrote other bytes there
        return None
    raw = sent.raw
    if sent.has(SectionKind.DELIVERY_ANNOTATIONS) or sent.has(SectionKind.MESSAGE_ANNOTATIONS):
        return None
    return (
        raw(SectionKind.HEADER),
        raw(SectionKind.PROPERTIES) or b"",
        raw(SectionKind.APPLICATION_PROPERTIES) or b"",
        raw(SectionKind.FOOTER) or b"",
    )


def _write_simple(message: BrokeredMessage) -> bytes | None:
    """Write a message to be sent that has only an id and properties; None if it has more.

    Most diverted messages are of this form: their other fields became properties.
    """
    if (
        message.amqp is not None
        or not message.message_id
        or message.time_to_live is not None
        or _FIELDS_BESIDE_ID(message) != _UNSET
    ):
        return None
    application = {
        name: amqp_value(value, is_exact=name != SCHEDULE_PROPERTY)
        for name, value in message.application_properties.items()
    }
    return b"".join(
        (
            _PROPERTIES,
            write_compound(0xC0, 1, write_string(message.message_id)),
            encode_section(SectionKind.APPLICATION_PROPERTIES, application) if application else b"",
            _DATA,
            write_binary(message.body),
        )
    )


@lru_cache(maxsize=256)  # of few bytes each; most messages of an application have the same header
def _header(sent: bytes | None, ttl: int | None, delivery_count: int) -> bytes:
    """Return the header of a delivery, made from that of the sender."""
    header = Header(ttl=ttl)
    if sent is not None:
        header = cast("Header", read_composite(sent, 0)[0])
    return replace(header, delivery_count=delivery_count).encode()


# -- the general path ------------------------------------------------------------------------------


def _sections_of(
    message: BrokeredMessage, *, is_exact: bool = False
) -> tuple[BodyKind, AmqpMessage]:
    """Return the sections that match the native fields; `is_exact` keeps microseconds."""
    if message.amqp is None:
        return BodyKind.DATA, AmqpMessage(_native_sections(message, AmqpMessage(b""), is_exact))
    kind, known = BodyKind.DATA, b""
    sent = AmqpMessage(b"")
    if len(message.amqp) >= STORED_HEAD.size:
        try:
            number, known = STORED_HEAD.unpack_from(message.amqp)
            kind, sent = BodyKind(number), AmqpMessage(message.amqp[STORED_HEAD.size :])
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
        content_type=_content_type(message, is_exact=is_exact),
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
    # Native clients cannot see a property whose type they do not have, so they did not remove it.
    # The schedule of a diverted message is a timestamp, as the paired namespaces of .NET wrote it.
    own = {name: value for name, value in application.items() if native_value(value) is None}
    own |= {
        name: application[name]
        if name in application and native_value(application[name]) == value
        else amqp_value(value, is_exact=is_exact and name != SCHEDULE_PROPERTY)
        for name, value in message.application_properties.items()
    }
    header, ttl = sent.header, _ttl(message)
    if header is not None or ttl is not None:
        header = replace(header or Header(), ttl=ttl)
    kept = (SectionKind.DELIVERY_ANNOTATIONS, SectionKind.FOOTER)
    pieces: list[Buffer] = [] if header is None else [header.encode()]
    pieces.append(properties.encode())
    pieces += [section for name in kept if (section := sent.raw(name)) is not None]
    if annotations:
        pieces.append(encode_section(SectionKind.MESSAGE_ANNOTATIONS, annotations))
    if own:
        pieces.append(encode_section(SectionKind.APPLICATION_PROPERTIES, own))
    pieces += sent.spliced(dict.fromkeys(OTHER_SECTIONS))
    return b"".join(pieces)


def _content_type(message: BrokeredMessage, *, is_exact: bool) -> str | None:
    """Return the content type in ASCII, because it is a symbol; `is_exact` leaves it as it is.

    A delivery must not fail because of its content type: the broker would deliver the message again
    and again.
    """
    if message.content_type is None or is_exact:
        return message.content_type
    return message.content_type.encode("ascii", "backslashreplace").decode()


def _same_or(typed: Any, text: str | None) -> Any:
    """Return the id with the type of the sender, unless its text was changed."""
    return typed if text_of(typed) == text else text


def amqp_value(value: PropertyValue, *, is_exact: bool = False) -> Any:
    """Return the value of a native property as an AMQP value; `is_exact` keeps microseconds."""
    if isinstance(value, datetime):
        us = moment_us(value)
        if is_exact and us % 1000:  # an AMQP timestamp has milliseconds only
            return Described(DATETIME_OFFSET, us * 10 + EPOCH_TICKS)
        return timestamp_of(value)
    if isinstance(value, timedelta):
        return Described(TIMESPAN, max(-MOST_TICKS, min(value // MICROSECOND * 10, MOST_TICKS)))
    return value


def timestamp_of(moment: datetime) -> Timestamp:
    """Return a time as an AMQP timestamp."""
    return Timestamp(moment_us(moment) // 1000)


def _ttl(message: BrokeredMessage) -> int | None:
    if message.time_to_live is None:
        return None
    return min(max(message.time_to_live // timedelta(milliseconds=1), 1), MOST_TTL_MS)


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
        return sent.spliced(dict.fromkeys(OTHER_SECTIONS))
    if kind is BodyKind.TEXT:
        try:
            return [encode_section(SectionKind.VALUE, message.body.decode())]
        except UnicodeDecodeError:  # the body was replaced
            pass
    section = SectionKind.VALUE if kind is BodyKind.BINARY else SectionKind.DATA
    return [bytes((0x00, 0x53, section)), write_binary(message.body)]


def write_sent(message: BrokeredMessage) -> bytes:
    """Return a message as a Service Bus client sends it."""
    return _write_simple(message) or _write_sent(message)


def _write_sent(message: BrokeredMessage) -> bytes:
    """Write any message to be sent: the general path."""
    kind, sent = _sections_of(message, is_exact=True)
    before = [section for name in OTHER_SECTIONS[:-1] if (section := sent.raw(name)) is not None]
    footer = sent.raw(SectionKind.FOOTER) or b""
    return b"".join([*before, *_body(message, kind, sent), footer])
