"""Encodes single messages as rows, without an Arrow batch.

A row is a list: the length of the body, then the other fields of the message in the order of
APPLICATION_FIELDS, without unset fields at the end. The bodies are concatenated in the body of the
frame. Times are integer microseconds. Properties are a map of names to values: text, numbers,
booleans and bytes directly, other types as a pair of the type's name and a plain value.

Rows become columns once per turn of the broker, all rows of the turn together.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from twinbus.clock import MICROSECOND, from_us, moment_us, to_us
from twinbus.errors import InvalidArgumentError
from twinbus.limits import ROWS_AS_ROWS
from twinbus.message import APPLICATION_FIELDS, BrokeredMessage, PropertyValue, application_values

_PLAIN_TYPES = (str, int, float, bool, bytes)
_LIFE, _SCHEDULE, _PROPERTIES = (
    APPLICATION_FIELDS.index(name)
    for name in ("time_to_live", "scheduled_enqueue_time_utc", "application_properties")
)
_WRAPPED: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    datetime: ("datetime", moment_us),
    timedelta: ("timedelta", lambda span: span // MICROSECOND),
    UUID: ("uuid", lambda value: value.bytes),
}
_UNWRAP: Mapping[str, Callable[[Any], PropertyValue]] = {
    "datetime": from_us,
    "timedelta": lambda us: timedelta(microseconds=us),
    "uuid": lambda value: UUID(bytes=value),
}


def encode_rows(messages: Sequence[BrokeredMessage]) -> tuple[list[list[Any]], list[bytes]]:
    """Return the rows of messages, and their bodies."""
    rows = []
    bodies = []
    for message in messages:
        values = list(application_values(message))
        body = values[0]
        bodies.append(body)
        values[0] = len(body)
        if values[_LIFE] is not None:
            values[_LIFE] = to_us(values[_LIFE])
        if values[_SCHEDULE] is not None:
            values[_SCHEDULE] = moment_us(values[_SCHEDULE])
        properties = values[_PROPERTIES]
        values[_PROPERTIES] = _encode_properties(properties) if properties else None
        while values[-1] is None:
            values.pop()
        rows.append(values)
    return rows, bodies


def _encode_properties(properties: Mapping[str, PropertyValue]) -> dict[str, Any]:
    return {name: _encode_property(value) for name, value in properties.items()}


def _encode_property(value: PropertyValue) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    name, plain = _WRAPPED[type(value)]
    return [name, plain(value)]


def decode_rows(rows: list[Any], body: memoryview) -> list[BrokeredMessage]:
    """Return the messages of rows; refuse an invalid row."""
    if len(rows) > ROWS_AS_ROWS:
        raise InvalidArgumentError(
            f"a send has {len(rows)} rows; more than {ROWS_AS_ROWS} must be sent as columns"
        )
    messages = []
    at = 0
    for row in rows:
        if type(row) is not list or not 1 <= len(row) <= len(APPLICATION_FIELDS):
            raise InvalidArgumentError("a row of a send is not a list of the fields of a message")
        size = row[0]
        if type(size) is not int or not 0 <= size <= len(body) - at:
            raise InvalidArgumentError("a row of a send refers to bytes outside of its frame")
        values = [bytes(body[at : at + size]), *(row[1:] or [None])]  # None: no message id
        at += size
        if len(values) > _LIFE:
            _decode_times(values)
        messages.append(BrokeredMessage(*values))
    return messages


def _decode_times(values: list[Any]) -> None:
    life = values[_LIFE]
    if life is not None:
        try:
            values[_LIFE] = timedelta(microseconds=life)
        except OverflowError:
            values[_LIFE] = timedelta.max  # too long for a column: unlimited
    if len(values) > _SCHEDULE and values[_SCHEDULE] is not None:
        values[_SCHEDULE] = from_us(values[_SCHEDULE])
    if len(values) > _PROPERTIES:
        properties = {} if values[_PROPERTIES] is None else values[_PROPERTIES]
        if type(properties) is not dict:
            raise InvalidArgumentError("the properties of a message are not a map")
        values[_PROPERTIES] = {name: _decode_property(v) for name, v in properties.items()}


def _decode_property(plain: Any) -> PropertyValue:
    if type(plain) is not list:
        return plain  # type: ignore[no-any-return]
    if len(plain) != 2 or type(plain[0]) is not str or plain[0] not in _UNWRAP:
        raise InvalidArgumentError("a property has a type that messages do not support")
    return _UNWRAP[plain[0]](plain[1])
