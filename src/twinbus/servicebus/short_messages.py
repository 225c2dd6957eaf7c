"""A fast path for messages of the usual form, which avoids decoding section by section.

Diverted messages and nearly all messages of SDKs have an optional header, properties, optional
application properties and one data section, in this order. Their id is text, and native messages
have the types of all their values. Such a message is read in one pass, and its sections are stored
as they are. Every other message takes the general path (`read_message`), an invalid one too: so its
error is that of the general path. `tests/unit/test_short_messages.py` compares both paths.
"""

import struct
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, cast
from uuid import UUID

from twinbus.amqp.composites import read_composite
from twinbus.amqp.conditions import AmqpError
from twinbus.amqp.decoder import Buffer, read_extent, read_value
from twinbus.amqp.message import AmqpMessage, SectionKind
from twinbus.amqp.performatives import Header, Properties
from twinbus.limits import MAX_AMQP_DEPTH
from twinbus.message import BrokeredMessage, PropertyValue
from twinbus.servicebus.messages import (
    STORED_HEAD,
    BodyKind,
    fingerprint,
    hash_of,
    life_of,
    native_value,
    read_message,
)

_HEADER: Final = bytes((0x00, 0x53, SectionKind.HEADER, 0xC0))
_PROPERTIES: Final = bytes((0x00, 0x53, SectionKind.PROPERTIES, 0xC0))
_APPLICATION: Final = bytes((0x00, 0x53, SectionKind.APPLICATION_PROPERTIES))
_SHORT_DATA: Final = bytes((0x00, 0x53, SectionKind.DATA, 0xA0))
_LONG_DATA: Final = bytes((0x00, 0x53, SectionKind.DATA, 0xB0))
_NULL: Final = 0x40
_TIMESTAMP: Final = 0x83
_SHORT_TEXT: Final = 0xA1
_SHORT_SYMBOL: Final = 0xA3
_MAPS: Final = (0xC1, 0xD1)
_FIELDS: Final = len(Properties.FIELDS)
_NULLS: Final = b"\x40" * (_FIELDS - 1)
_TEXTS: Final = {"symbol": (_SHORT_SYMBOL, "ascii"), "timestamp": (_TIMESTAMP, "")}
_NATIVE_NAMES: Final = {
    "message-id": "message_id",
    "to": "to",
    "subject": "subject",
    "reply-to": "reply_to",
    "correlation-id": "correlation_id",
    "content-type": "content_type",
    "group-id": "session_id",
    "reply-to-group-id": "reply_to_session_id",
}
_PLAN: Final = [  # of each field: its native name, and the constructor and encoding of its text
    (_NATIVE_NAMES.get(field.name), *_TEXTS.get(field.type_name, (_SHORT_TEXT, "utf-8")))
    for field in Properties.FIELDS
]
_AS_DECODED: Final = frozenset((str, int, float, bool, bytes, UUID))
_MOST_ITEMS: Final = 128  # of application properties; a map with more takes the general path
_MOST_MAP_BYTES: Final = 8192
_unpack_size: Final = struct.Struct(">I").unpack_from


def read_messages(encoded: Sequence[Buffer]) -> list[BrokeredMessage]:
    """Return decoded messages."""
    return [
        _read_usual(content) or read_message(AmqpMessage(content))
        for content in map(bytes, encoded)
    ]


def _read_usual(payload: bytes) -> BrokeredMessage | None:
    """Return a message of the usual form; None if it has another form or is invalid."""
    try:
        found = _read_sections(payload)
    except (IndexError, struct.error, UnicodeDecodeError, AmqpError):
        return None
    if found is None:
        return None
    fields, data_at, body = found
    message = BrokeredMessage(body, **fields)
    is_id_only = len(fields) == 1
    known = hash_of([message.message_id]) if is_id_only else fingerprint(message)
    # No other code has the message yet, so it may be changed; a copy would take 50 us.
    sections = STORED_HEAD.pack(BodyKind.DATA, known) + payload[:data_at]
    object.__setattr__(message, "amqp", sections)
    return message


def _read_sections(payload: bytes) -> tuple[dict[str, Any], int, bytes] | None:
    """Return the native fields of a message, the offset of its data section, and its body."""
    at, life = 0, None
    if payload[:4] == _HEADER:
        at = 5 + payload[4]
        life = _life(payload[:at])
    if payload[at : at + 4] != _PROPERTIES:
        return None
    begin, at = at + 5, at + 5 + payload[at + 4]
    fields = _read_properties(payload, begin, at)
    if fields is None:
        return None
    if life is not None:
        fields["time_to_live"] = life
    if payload[at : at + 3] == _APPLICATION:
        found = _read_application(payload, at + 3)
        if found is None:
            return None
        fields["application_properties"], at = found
    head = payload[at : at + 4]
    if head == _SHORT_DATA:
        begin, size = at + 5, payload[at + 4]
    elif head == _LONG_DATA:
        begin, size = at + 8, _unpack_size(payload, at + 4)[0]
    else:
        return None
    return (fields, at, payload[begin:]) if begin + size == len(payload) else None


@lru_cache(maxsize=256)  # of at most 260 bytes each; an application sends few different headers
def _life(section: bytes) -> timedelta | None:
    """Return the time to live of a header section."""
    return life_of(cast("Header", read_composite(section, 0)[0]))


def _read_properties(data: bytes, at: int, end: int) -> dict[str, Any] | None:
    """Return the native fields of the properties; None if there is any other field, or no id.

    The offset is that of the count. Times have no native field and are skipped, because SDKs send
    them with a time to live.
    """
    count = data[at]
    if data[at + 1] != _SHORT_TEXT or not data[at + 2] or not 0 < count <= _FIELDS:
        return None
    begin = at + 3
    at = begin + data[at + 2]
    fields = {"message_id": str(data[begin:at], "utf-8")}
    if end - at == count - 1 and data[at:end] == _NULLS[: count - 1]:
        return fields
    for name, constructor, encoding in _PLAN[1:count]:
        code = data[at]
        if code == _NULL:
            at += 1
        elif code != constructor:
            return None
        elif code == _TIMESTAMP:
            at += 9
        elif name is None:
            return None
        else:
            begin = at + 2
            at = begin + data[at + 1]
            fields[name] = str(data[begin:at], encoding)
    return fields if at == end else None


def _read_application(data: bytes, at: int) -> tuple[dict[str, PropertyValue], int] | None:
    """Return application properties and the offset after them; None if they are unusual.

    The offset is that of the constructor of the map. Every value has a native type.
    """
    if data[at] not in _MAPS:
        return None
    at, end, count = read_extent(data[at], data, at + 1)
    if count > _MOST_ITEMS or end - at > _MOST_MAP_BYTES:
        return None
    found: dict[str, PropertyValue] = {}
    while at < end:
        if data[at] != _SHORT_TEXT:
            return None
        begin = at + 2
        at = begin + data[at + 1]
        name = str(data[begin:at], "utf-8")
        value: Any
        if data[at] == _SHORT_TEXT:
            begin = at + 2
            at = begin + data[at + 1]
            value = str(data[begin:at], "utf-8")
        else:
            value, at = read_value(data, at, MAX_AMQP_DEPTH - 1)
            if type(value) not in _AS_DECODED:
                value = native_value(value)
                if value is None:
                    return None
        found[name] = value
    return (found, end) if at == end and len(found) * 2 == count else None
