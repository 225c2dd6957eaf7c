"""Encodes single messages as rows, without an Arrow batch.

A row is a list: the length of the body, then the other fields of the message in the order of
APPLICATION_FIELDS, without unset fields at the end. The bodies are concatenated in the body of the
frame. Times are integer microseconds. Properties are a map of names to values: text, numbers,
booleans and bytes directly, other types as a pair of the type's name and a plain value.

The broker converts the rows of all sends of a turn to columns together. If a turn has few messages,
the log stores them as rows. A receiver that takes rows gets them as they are stored, with the facts
that the broker adds to each message (`DeliveryRows`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import pyarrow as pa

from twinbus.clock import MICROSECOND, from_us, moment_us, to_us
from twinbus.errors import InvalidArgumentError
from twinbus.limits import ROWS_AS_ROWS
from twinbus.message import (
    APPLICATION_FIELDS,
    BrokeredMessage,
    MessageState,
    PropertyValue,
    application_values,
    to_messages,
    tokens_of,
)
from twinbus.values import shown

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
    return [BrokeredMessage(*_values(row, content)) for row, content in split_rows(rows, body)]


def split_rows(rows: list[Any], body: memoryview) -> Iterator[tuple[list[Any], memoryview]]:
    """Yield each row with its part of the concatenated bodies; refuse a row of another form."""
    at = 0
    for row in rows:
        if type(row) is not list or not 1 <= len(row) <= len(APPLICATION_FIELDS):
            raise InvalidArgumentError(
                f"a row is {shown(row)}; it must be a list of 1 to {len(APPLICATION_FIELDS)} "
                "fields of a message"
            )
        size = row[0]
        if type(size) is not int or not 0 <= size <= len(body) - at:
            raise InvalidArgumentError(
                f"a row has a body of {shown(size)} bytes, but only {len(body) - at} bytes of "
                "bodies are left in its frame"
            )
        yield row, body[at : at + size]
        at += size


def _values(row: list[Any], body: bytes | memoryview) -> list[Any]:
    """Return the fields of a row's message, as far as the row has them."""
    values = [bytes(body), *(row[1:] or [None])]  # None: no message id
    if len(values) > _LIFE:
        _decode_rest(values)
    return values


def _decode_rest(values: list[Any]) -> None:
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
            raise InvalidArgumentError(
                f"the properties of a message are {shown(properties)}; they must be a map"
            )
        values[_PROPERTIES] = {name: _decode_property(v) for name, v in properties.items()}


def _decode_property(plain: Any) -> PropertyValue:
    if type(plain) is not list:
        return plain  # type: ignore[no-any-return]
    if len(plain) != 2 or type(plain[0]) is not str or plain[0] not in _UNWRAP:
        raise InvalidArgumentError(
            f"a property is {shown(plain)}; a list must have a type name, which is one of "
            f"{', '.join(_UNWRAP)}, and a value"
        )
    return _UNWRAP[plain[0]](plain[1])


# -- deliveries ------------------------------------------------------------------------------------


class BrokerFacts(NamedTuple):
    """What the broker knows of a delivered message: times in microseconds, the token as bytes."""

    sequence_number: int
    enqueued: int
    expires: int | None
    delivery_count: int
    lock_token: bytes | None
    locked_until: int | None
    state: int
    dead_letter_reason: str | None = None
    dead_letter_error_description: str | None = None
    dead_letter_source: str | None = None


class DeliveredRow(NamedTuple):
    """A delivered message: its row, its body, and the facts that the broker adds."""

    row: list[Any]
    body: bytes | memoryview
    facts: BrokerFacts

    def fields(self, *more: Any) -> list[Any]:
        """Return all fields of a BrokeredMessage in order, then `more` fields of a subclass."""
        values = _values(self.row, self.body)
        values.extend(_UNSET[len(values) :])
        if len(self.row) <= _PROPERTIES:
            values[_PROPERTIES] = {}  # a new one: messages must not share a dict
        facts = self.facts
        expires, token, until = facts.expires, facts.lock_token, facts.locked_until
        values += (
            facts.sequence_number,
            from_us(facts.enqueued),
            None if expires is None else from_us(expires),
            facts.delivery_count,
            None if token is None else UUID(bytes=token),
            None if until is None else from_us(until),
            MessageState(facts.state),
            *facts[7:],
            *more,
        )
        return values


_UNSET = (None,) * len(APPLICATION_FIELDS)


class DeliveryRows:
    """The reply to a receive that takes rows: a few messages, at least one."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[DeliveredRow]) -> None:
        self.rows = rows

    def messages(self) -> list[BrokeredMessage]:
        """Return the messages."""
        return [BrokeredMessage(*delivered.fields()) for delivered in self.rows]

    def lock_tokens(self) -> pa.Array:
        """Return the lock tokens; every message must be locked."""
        tokens = [UUID(bytes=row.facts.lock_token) for row in self.rows]
        return tokens_of(tokens)


Deliveries: TypeAlias = Any  # the reply to a receive: DeliveryRows, or a pa.RecordBatch


def messages_in(deliveries: Deliveries) -> list[BrokeredMessage]:
    """Return delivered messages, from rows or from a batch."""
    if isinstance(deliveries, DeliveryRows):
        return deliveries.messages()
    return to_messages(deliveries)


def encode_deliveries(deliveries: DeliveryRows) -> tuple[list[list[Any]], list[bytes | memoryview]]:
    """Return pairs of row and facts for the head of a reply, and the bodies."""
    pairs = [[row, facts] for row, _, facts in deliveries.rows]
    return pairs, [delivered.body for delivered in deliveries.rows]


def decode_deliveries(pairs: list[Any], body: memoryview) -> DeliveryRows:
    """Return the deliveries in a reply."""
    rows = [row for row, _ in pairs]
    parts = split_rows(rows, body)
    return DeliveryRows(
        [
            DeliveredRow(row, content, BrokerFacts(*facts))
            for (row, content), (_, facts) in zip(parts, pairs, strict=True)
        ]
    )
