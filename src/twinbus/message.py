"""Messages: `BrokeredMessage` for applications, and Arrow batches inside Twinbus.

One module owns both views. `to_batch` and `to_messages` convert at the edge; between the edges
a batch stays a batch. A batch has the columns of MESSAGE_SCHEMA; what a broker delivers has
those of DELIVERY_SCHEMA, which adds what the broker knows.

Application properties keep their Python type. A value is a struct with one child per type, named
after it, and exactly one child is set:

    properties: map<string, struct<str, int, float, bool, bytes, datetime, timedelta, uuid>>

The size of a message is what the application put in: body, texts (UTF-8), 8 bytes per time, and
for each property its name and value (numbers and times 8, bool 1, UUID 16). Nothing else counts.
The sections of a message that came over AMQP count in addition: native clients can set them, too.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from os import register_at_fork, urandom
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus import compute as pc
from twinbus.clock import MICROSECOND, from_us, moment_us, to_us
from twinbus.errors import InvalidArgumentError
from twinbus.frozen import quick
from twinbus.limits import (
    DRAWN_IDS,
    FEW_MESSAGES,
    MAX_ID_CHARACTERS,
    MAX_PROPERTY_NAME_CHARACTERS,
    NEVER_US,
    PING_CONTENT_TYPE,
)
from twinbus.values import check_utf8, shown

PropertyValue = str | int | float | bool | bytes | datetime | timedelta | UUID
Int64s = npt.NDArray[np.int64]

FIRST_MOMENT_US = moment_us(datetime.min.replace(tzinfo=UTC))
LAST_MOMENT_US = moment_us(datetime.max.replace(tzinfo=UTC))
TIMESTAMP = pa.timestamp("us", "UTC")
DURATION = pa.duration("us")
LOCK_TOKEN = pa.binary(16)
TEXT_COLUMNS = (
    "message_id",
    "session_id",
    "correlation_id",
    "content_type",
    "subject",
    "to",
    "reply_to",
    "reply_to_session_id",
    "partition_key",
)
APPLICATION_FIELDS = (
    "body",
    *TEXT_COLUMNS,
    "time_to_live",
    "scheduled_enqueue_time_utc",
    "application_properties",
    "amqp",
)
application_values = attrgetter(*APPLICATION_FIELDS)
BOUNDED_TEXTS = ("message_id", "session_id", "partition_key", "reply_to_session_id")
PROPERTY_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
    "datetime": TIMESTAMP,
    "timedelta": DURATION,
    "uuid": pa.binary(16),
}
FIXED_PROPERTY_BYTES = {"int": 8, "float": 8, "bool": 1, "datetime": 8, "timedelta": 8, "uuid": 16}
PROPERTIES_TYPE = pa.map_(pa.string(), pa.struct(list(PROPERTY_TYPES.items())))

MESSAGE_SCHEMA = pa.schema(
    [
        pa.field("body", pa.binary(), nullable=False),
        *(pa.field(name, pa.string()) for name in TEXT_COLUMNS),
        pa.field("time_to_live", DURATION),
        pa.field("scheduled_enqueue_time_utc", TIMESTAMP),
        pa.field("properties", PROPERTIES_TYPE),
        pa.field("amqp", pa.binary()),
    ]
)
DELIVERY_SCHEMA = pa.schema(
    [
        *MESSAGE_SCHEMA,
        pa.field("sequence_number", pa.int64()),
        pa.field("enqueued_time_utc", TIMESTAMP),
        pa.field("expires_at_utc", TIMESTAMP),
        pa.field("delivery_count", pa.int32()),
        pa.field("lock_token", LOCK_TOKEN),
        pa.field("locked_until_utc", TIMESTAMP),
        pa.field("state", pa.int8()),
        pa.field("dead_letter_reason", pa.string()),
        pa.field("dead_letter_error_description", pa.string()),
        pa.field("dead_letter_source", pa.string()),
    ]
)
_NO_PROPERTIES = (pa.nulls(0, pa.string()), pa.nulls(0, PROPERTIES_TYPE.item_type))


_spare_ids: list[str] = []
_ID_DIGITS = 32


def _new_id() -> str:
    """Return a random id that no other message has."""
    try:
        return _spare_ids.pop()
    except IndexError:
        drawn = urandom(DRAWN_IDS * _ID_DIGITS // 2).hex()
        _spare_ids.extend(
            drawn[at : at + _ID_DIGITS] for at in range(_ID_DIGITS, len(drawn), _ID_DIGITS)
        )
        return drawn[:_ID_DIGITS]


register_at_fork(after_in_child=_spare_ids.clear)  # the parent uses the same spare ids


class MessageState(IntEnum):
    """The state of a message, as `peek` shows it."""

    ACTIVE = 0
    DEFERRED = 1
    SCHEDULED = 2


@quick
@dataclass(frozen=True, slots=True)
class BrokeredMessage:
    """One message. The first block is the application's, the second is filled in by the broker.

    Use `dataclasses.replace` to change one: a message is a value.
    """

    body: bytes = b""
    message_id: str = field(default_factory=_new_id)  # duplicate detection compares it
    session_id: str | None = None  # messages of one session are delivered in order
    correlation_id: str | None = None
    content_type: str | None = None
    subject: str | None = None  # also called label
    to: str | None = None
    reply_to: str | None = None
    reply_to_session_id: str | None = None
    partition_key: str | None = None  # equals session_id where both are set
    time_to_live: timedelta | None = None  # None: the entity's default
    scheduled_enqueue_time_utc: datetime | None = None  # None: now
    application_properties: Mapping[str, PropertyValue] = field(default_factory=dict)
    amqp: bytes | None = None  # how an AMQP client sent it, for AMQP receivers; leave it as it is

    sequence_number: int | None = None  # monotonic within its entity
    enqueued_time_utc: datetime | None = None
    expires_at_utc: datetime | None = None  # None: never
    delivery_count: int | None = None  # deliveries that failed before this one
    lock_token: UUID | None = None  # None: browsed, or received and deleted
    locked_until_utc: datetime | None = None
    state: MessageState | None = None
    dead_letter_reason: str | None = None
    dead_letter_error_description: str | None = None
    dead_letter_source: str | None = None  # path of the entity that dead-lettered it

    def __post_init__(self) -> None:
        if type(self.body) is not bytes:
            raise InvalidArgumentError(
                f"body must be bytes, not {type(self.body).__name__}; encode text first, "
                "for example body=text.encode()"
            )
        texts = _TEXTS(self)
        first = texts[0]
        is_plain = type(first) is str and len(first) <= MAX_ID_CHARACTERS and first.isascii()
        if not is_plain or texts[1:] != _NO_MORE_TEXTS:  # nearly all have an id and nothing more
            for name, text in zip(TEXT_COLUMNS, texts, strict=True):
                if text is not None:
                    _check_text(name, text)
        if type(self.application_properties) is not dict or self.application_properties:
            _check_bag(self.application_properties)
        if self.amqp is not None and type(self.amqp) is not bytes:
            raise InvalidArgumentError(f"amqp must be bytes, not {type(self.amqp).__name__}")
        if self.scheduled_enqueue_time_utc is not None:
            check_moment("scheduled_enqueue_time_utc", self.scheduled_enqueue_time_utc)
        if self.time_to_live is not None:
            _check_life(self.time_to_live)

    @property
    def size(self) -> int:
        """Bytes that count against the size limit and the quota."""
        total = len(self.body)
        for text in _TEXTS(self):
            if text is not None:
                total += len(text) if text.isascii() else _text_bytes(text)
        if self.amqp is not None:
            total += len(self.amqp)
        if self.time_to_live is not None:
            total += 8
        if self.scheduled_enqueue_time_utc is not None:
            total += 8
        if self.application_properties:
            for name, value in self.application_properties.items():
                total += _text_bytes(name) + _property_bytes(value)
        return total


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _property_bytes(value: PropertyValue) -> int:
    child = _CHILD_OF_TYPE[type(value)]
    if child in FIXED_PROPERTY_BYTES:
        return FIXED_PROPERTY_BYTES[child]
    return len(value) if isinstance(value, bytes) else _text_bytes(str(value))


_TEXTS = attrgetter(*TEXT_COLUMNS)
_NO_MORE_TEXTS = (None,) * (len(TEXT_COLUMNS) - 1)


def _check_bag(properties: object) -> None:
    if not isinstance(properties, Mapping):
        raise InvalidArgumentError(
            "application_properties must be a dict of names to values, not "
            f"{type(properties).__name__}"
        )
    for name, value in properties.items():
        property_child(name, value)


def too_long(name: str, characters: int) -> InvalidArgumentError:
    """Return the error for an identifier that is too long."""
    return InvalidArgumentError(
        f"{name} has {characters} characters; the limit is {MAX_ID_CHARACTERS}"
    )


def _check_text(name: str, text: object) -> None:
    if type(text) is not str:
        raise InvalidArgumentError(f"{name} must be text, not {type(text).__name__}")
    if len(text) > MAX_ID_CHARACTERS and name in BOUNDED_TEXTS:
        raise too_long(name, len(text))
    check_utf8(name, text)


def _check_life(life: object) -> None:
    if not isinstance(life, timedelta) or life <= timedelta(0):
        raise InvalidArgumentError(
            f"time_to_live is {shown(life)}; it must be a timedelta above zero"
        )


def check_moment(name: str, moment: object) -> None:
    """Refuse anything but an aware datetime that can be converted to UTC."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidArgumentError(
            f"{name} must be a datetime with a time zone, such as datetime.now(UTC)"
        )
    try:
        from_us(moment_us(moment))
    except OverflowError as error:
        raise InvalidArgumentError(
            f"{name} = {moment} is beyond the years 1 to 9999 in UTC"
        ) from error


def property_child(name: str, value: object) -> str:
    """Return the child of the property struct for this value; raise if it is not allowed."""
    if type(name) is not str or not 0 < len(name) <= MAX_PROPERTY_NAME_CHARACTERS:
        raise InvalidArgumentError(
            f"the property name {shown(name)} must be text of 1 to "
            f"{MAX_PROPERTY_NAME_CHARACTERS} characters"
        )
    check_utf8("a property's name", name)
    child = _CHILD_OF_TYPE.get(type(value))
    if child is None:
        raise InvalidArgumentError(
            f"property {name!r} is a {type(value).__name__}; use one of "
            "str, int, float, bool, bytes, datetime, timedelta, UUID"
        )
    if child == "str":
        check_utf8(f"property {name!r}", value)  # type: ignore[arg-type]
    if child == "int" and not -(2**63) <= value < 2**63:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"property {name!r} = {shown(value)} does not fit 64 bits. Send it as text"
        )
    if child == "timedelta" and abs(value // MICROSECOND) >= 2**63:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"property {name!r} = {value} does not fit 64 bits of µs. Send it as text"
        )
    if child == "datetime":
        check_moment(f"property {name!r}", value)
    return child


_CHILD_OF_TYPE: Mapping[type, str] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    bytes: "bytes",
    datetime: "datetime",
    timedelta: "timedelta",
    UUID: "uuid",
}


def stored_property(child: str, value: Any) -> Any:
    """Return a property value as its Arrow child stores it."""
    if child == "datetime":
        return moment_us(value)
    if child == "timedelta":
        return value // MICROSECOND
    return value.bytes if child == "uuid" else value


# -- messages to columns -------------------------------------------------------------------------


def to_batch(messages: Sequence[BrokeredMessage]) -> pa.RecordBatch:
    """Return the messages as one batch; broker-set fields are left behind."""
    return to_columns(messages)[0]


def to_columns(
    messages: Sequence[BrokeredMessage],
) -> tuple[pa.RecordBatch, Mapping[str, pa.Array]]:
    """Return the messages as one batch, and the columns of it in which some message has a value."""
    count = len(messages)
    if not count:
        return pa.RecordBatch.from_pylist([], MESSAGE_SCHEMA), {}
    columns = list(
        _empty_columns(count) if count <= FEW_MESSAGES else _empty_columns.__wrapped__(count)
    )
    in_use: dict[str, pa.Array] = {}
    try:
        for at, values in enumerate(zip(*map(application_values, messages), strict=True)):
            if at == _PROPERTIES:
                if any(values):
                    columns[at] = in_use["properties"] = to_properties_column(values)
            elif at == 0 or values.count(None) != count:
                column = _column(at, values)
                columns[at] = in_use[MESSAGE_SCHEMA.names[at]] = column
    except _UNFIT as error:
        raise _of_a_wrong_type(messages, error) from error
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA), in_use


def _of_a_wrong_type(messages: Sequence[BrokeredMessage], error: Exception) -> InvalidArgumentError:
    """Return the error for the first field that its column cannot store."""
    for row, message in enumerate(messages):
        for at, name in enumerate(MESSAGE_SCHEMA.names):
            value = getattr(message, APPLICATION_FIELDS[at], None)
            try:
                if at != _PROPERTIES and value is not None:
                    _column(at, [value])
            except _UNFIT as reason:
                return InvalidArgumentError(
                    f"{name} of message {row} is {shown(value)}, which cannot be stored as "
                    f"{_COLUMN_TYPES[at]}: {reason}. Set a value of that type"
                )
    return InvalidArgumentError(
        f"one of {len(messages)} messages has a value of the wrong type: {error}"
    )


def _column(at: int, values: Sequence[Any]) -> pa.Array:
    """Return the column at a place of the schema; some of its values are set."""
    kind = _COLUMN_TYPES[at]
    convert = to_us if kind == DURATION else moment_us if kind == TIMESTAMP else None
    if convert is not None:
        values = [None if value is None else convert(value) for value in values]
    return pa.array(values, kind)


_UNFIT = (pa.ArrowException, UnicodeEncodeError, TypeError, AttributeError)  # raised by _column
_COLUMN_TYPES = tuple(MESSAGE_SCHEMA.types)
_PROPERTIES = MESSAGE_SCHEMA.names.index("properties")


@lru_cache(maxsize=FEW_MESSAGES)
def _empty_columns(count: int) -> tuple[pa.Array, ...]:
    """Return null columns; cached for small batches, because most columns are unset."""
    offsets = pa.array(np.zeros(count + 1, np.int32))
    no_properties = pa.MapArray.from_arrays(offsets, *_NO_PROPERTIES, type=PROPERTIES_TYPE)
    columns = [pa.nulls(count, kind) for kind in _COLUMN_TYPES]
    columns[_PROPERTIES] = no_properties
    return tuple(columns)


def to_properties_column(bags: Sequence[Mapping[str, PropertyValue]]) -> pa.Array:
    """Return each message's properties as one column."""
    if not any(bags):
        return _empty_columns.__wrapped__(len(bags))[_PROPERTIES]
    offsets = np.zeros(len(bags) + 1, np.int32)
    names: list[str] = []
    values: dict[str, list[Any]] = {}
    for at, bag in enumerate(bags):
        for name, value in bag.items():
            child = property_child(name, value)
            column = values.setdefault(child, [])
            column.extend([None] * (len(names) - len(column)))
            column.append(stored_property(child, value))
            names.append(name)
        offsets[at + 1] = len(names)
    count = len(names)
    children = []
    for child, kind in PROPERTY_TYPES.items():
        content = values.get(child)
        if content is None:
            children.append(pa.nulls(count, kind))
        else:
            children.append(pa.array(content + [None] * (count - len(content)), kind))
    structs = pa.StructArray.from_arrays(children, fields=list(PROPERTIES_TYPE.item_type))
    keys = pa.array(names, pa.string())
    return pa.MapArray.from_arrays(pa.array(offsets), keys, structs, type=PROPERTIES_TYPE)


# -- columns to messages -------------------------------------------------------------------------


def to_messages(batch: pa.RecordBatch) -> list[BrokeredMessage]:
    """Return the rows of a batch as messages; broker columns are read where present."""
    return [BrokeredMessage(**fields) for fields in rows_of(batch)]


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Give the rows of a batch as the fields of messages."""
    columns = _fields_in_use(batch)
    names = tuple(columns)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(names, row, strict=True))


def values_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Give the rows of a batch as the values of APPLICATION_FIELDS."""
    columns = _fields_in_use(batch)
    nothing = [None] * batch.num_rows
    return zip(*(columns.get(name) or nothing for name in APPLICATION_FIELDS), strict=True)


def _fields_in_use(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    """Return the values of each field that some message has."""
    count = batch.num_rows
    columns: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "properties":
            columns["application_properties"] = properties_of(column)
        elif column.null_count != count:
            columns[name] = _decode(name, column)
    return columns


def _decode(name: str, column: pa.Array) -> list[Any]:
    decode = _DECODERS.get(name)
    if decode is None:
        return list(column.to_pylist())
    if column.type in (TIMESTAMP, DURATION):
        column = column.view(pa.int64())  # the same numbers, without a look at them
    return [None if value is None else decode(value) for value in column.to_pylist()]


def _span(us: int) -> timedelta:
    return timedelta.max if us == NEVER_US else timedelta(microseconds=us)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "time_to_live": _span,
    "scheduled_enqueue_time_utc": from_us,
    "enqueued_time_utc": from_us,
    "expires_at_utc": from_us,
    "locked_until_utc": from_us,
    "lock_token": lambda value: UUID(bytes=value),
    "state": MessageState,
}


def properties_of(column: pa.Array) -> list[Mapping[str, PropertyValue]]:
    """Return each row's properties as a dict with the types they were sent with."""
    count = len(column)
    if not count:
        return []
    offsets = map_offsets(column)
    first, last = int(offsets[0]), int(offsets[-1])
    if first == last:
        return [{} for _ in range(count)]
    names = column.keys.slice(first, last - first).to_pylist()
    items = column.items.slice(first, last - first)
    values: list[Any] = [None] * len(names)
    for child in PROPERTY_TYPES:
        content = items.field(child)
        if content.null_count == len(names):
            continue
        at = np.flatnonzero(content.is_valid().to_numpy(zero_copy_only=False))
        for index, value in zip(at.tolist(), property_values(child, content.take(at)), strict=True):
            values[index] = value
    bounds = (offsets - first).tolist()
    return [
        dict(zip(names[start:end], values[start:end], strict=True))
        for start, end in itertools.pairwise(bounds)
    ]


def property_values(child: str, column: pa.Array) -> list[Any]:
    """Return the values of one child, none of them null, as they were sent."""
    if child == "datetime":
        return [from_us(us) for us in column.cast(pa.int64()).to_pylist()]
    if child == "timedelta":
        return [timedelta(microseconds=us) for us in column.cast(pa.int64()).to_pylist()]
    values: list[Any] = column.to_pylist()
    return [UUID(bytes=value) for value in values] if child == "uuid" else values


# -- checks and sizes of a batch -----------------------------------------------------------------


def columns_in_use(batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
    """Return the columns in which some message has a value: most are empty in most batches."""
    count = batch.num_rows
    return {
        name: column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if column.null_count != count
    }


def sizes(messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> Int64s:
    """Return the size of each message, as the module docstring defines it."""
    if isinstance(messages, pa.RecordBatch):
        return sizes_of(columns_in_use(messages), messages.num_rows)
    return np.array([message.size for message in messages], np.int64)


def sizes_of(columns: Mapping[str, pa.Array], count: int) -> Int64s:
    """Return the size of each message, given the columns in use."""
    total = np.zeros(count, np.int64)
    for name, column in columns.items():
        if name in ("body", "amqp") or name in TEXT_COLUMNS:
            total += byte_lengths(column)
        elif name in ("time_to_live", "scheduled_enqueue_time_utc"):
            total += 8 * column.is_valid().to_numpy(zero_copy_only=False)
    properties = columns.get("properties")
    if properties is not None and count:
        offsets = map_offsets(properties)
        if offsets[0] != offsets[-1]:
            total += _property_sizes(properties, offsets)
    return total


def map_offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    """Return where each row's properties begin, and where the last one's end."""
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def body_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of all bodies: cheap, where `nbytes` looks into every column."""
    at = batch.schema.get_field_index("body")
    return int(getattr(batch.column(at), "total_values_length", 0)) if at >= 0 else 0


def content_bytes(batch: pa.RecordBatch) -> int:
    """Return the approximate bytes of all bodies, properties and AMQP sections."""
    total = body_bytes(batch)
    names = batch.schema.names
    if "properties" in names:
        properties = batch.column("properties")
        if isinstance(properties, pa.MapArray) and len(properties.values):
            total += properties.nbytes
    if "amqp" in names:
        total += int(getattr(batch.column("amqp"), "total_values_length", 0))
    return total


def byte_lengths(column: pa.Array) -> Int64s:
    """Return the byte length of each value; null counts as empty."""
    count = len(column)
    if not count:
        return np.zeros(0, np.int64)
    offsets = np.frombuffer(column.buffers()[1], np.int32, count + 1, 4 * column.offset)
    lengths = np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
    if column.null_count:
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return lengths


def property_entries(column: pa.Array, offsets: npt.NDArray[np.int32]) -> tuple[pa.Array, pa.Array]:
    """Return the names and values of all rows end to end."""
    first, last = int(offsets[0]), int(offsets[-1])
    names, values = column.keys, column.items
    if first or last != len(names):
        names, values = names.slice(first, last - first), values.slice(first, last - first)
    return names, values


def _property_sizes(properties: pa.Array, offsets: npt.NDArray[np.int32]) -> Int64s:
    names, values = property_entries(properties, offsets)
    total = byte_lengths(names)
    for at, child in enumerate(PROPERTY_TYPES):
        content = values.field(at)
        if content.null_count == len(content):
            continue
        if child in FIXED_PROPERTY_BYTES:
            present = content.is_valid().to_numpy(zero_copy_only=False)
            total = total + FIXED_PROPERTY_BYTES[child] * present
        else:
            total = total + byte_lengths(content)
    running = np.zeros(len(total) + 1, np.int64)
    np.cumsum(total, out=running[1:])
    first = offsets[0]
    return running[offsets[1:] - first] - running[offsets[:-1] - first]  # type: ignore[no-any-return]


_PING = pa.scalar(PING_CONTENT_TYPE, pa.string())  # pyarrow would convert a str on every call


def ping_rows(columns: Mapping[str, pa.Array]) -> npt.NDArray[np.bool_] | None:
    """Return which rows are pings, or None when none is, given the columns in use."""
    content_type = columns.get("content_type")
    if content_type is None:
        return None
    pings = pc.equal(content_type, _PING).fill_null(False)
    mask: npt.NDArray[np.bool_] = pings.to_numpy(zero_copy_only=False)
    return mask if mask.any() else None


def is_ping(messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> bool:
    """Whether all messages are pings. Other fields are not checked."""
    if isinstance(messages, pa.RecordBatch):
        at = messages.schema.get_field_index("content_type")
        if at < 0 or not messages.num_rows or messages.schema.field(at).type != pa.string():
            return False
        return bool(pc.all(pc.equal(messages.column(at), _PING).fill_null(False)).as_py())
    kinds = [message.content_type for message in messages]
    return bool(kinds) and all(kind == PING_CONTENT_TYPE for kind in kinds)


def has_values(messages: Sequence[BrokeredMessage] | pa.RecordBatch, field_name: str) -> bool:
    """Whether a message has a value in a field that is a column of the same name."""
    if isinstance(messages, pa.RecordBatch):
        return bool(messages.column(field_name).null_count < messages.num_rows)
    return any(getattr(message, field_name) is not None for message in messages)


def as_batch(messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> pa.RecordBatch:
    """Return messages in either form as one batch of MESSAGE_SCHEMA."""
    return conform(messages) if isinstance(messages, pa.RecordBatch) else to_batch(messages)


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with exactly the columns of MESSAGE_SCHEMA; raise if it has others."""
    try:
        if batch.column("body").null_count:
            raise InvalidArgumentError("a message of the batch has no body; use empty bytes")
        if batch.schema != MESSAGE_SCHEMA:
            if "amqp" not in batch.schema.names:  # from a client without that column
                batch = batch.append_column("amqp", pa.nulls(batch.num_rows, pa.binary()))
            batch = pa.RecordBatch.from_arrays(
                [
                    batch.column(name).cast(MESSAGE_SCHEMA.field(name).type)
                    for name in MESSAGE_SCHEMA.names
                ],
                schema=MESSAGE_SCHEMA,
            )
    except (KeyError, pa.ArrowException) as error:
        raise InvalidArgumentError(
            f"the batch does not have the columns of a message batch: {error}"
        ) from error
    return batch


def check_values(columns: Mapping[str, pa.Array]) -> None:
    """Refuse values that no message object could hold, given the columns in use."""
    for name in TEXT_COLUMNS:
        if name in columns:
            _check_readable(name, columns[name])
    schedule = columns.get("scheduled_enqueue_time_utc")
    if schedule is not None:
        _check_moments(lambda row: f"scheduled_enqueue_time_utc of message {row}", schedule)
    properties = columns.get("properties")
    if properties is not None and len(properties):
        offsets = map_offsets(properties)
        if offsets[0] != offsets[-1]:
            names, values = property_entries(properties, offsets)
            _check_readable("a property's name", names)
            _check_readable("a property", values)
            _check_properties(names, values, offsets)
            _check_names_differ(names, offsets)


def _check_readable(what: str, texts: pa.Array) -> None:
    """Refuse string columns that are not valid UTF-8."""
    try:
        texts.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidArgumentError(f"{what} of a message is not valid UTF-8: {error}") from error


def _check_moments(what_at: Callable[[int], str], column: pa.Array) -> None:
    """Refuse times that no datetime can hold."""
    moments = column.cast(pa.int64())
    bounds = pc.min_max(moments)
    if bounds["min"].as_py() < FIRST_MOMENT_US or bounds["max"].as_py() > LAST_MOMENT_US:
        beyond = pc.or_(pc.less(moments, FIRST_MOMENT_US), pc.greater(moments, LAST_MOMENT_US))
        at = first_row(beyond)
        raise InvalidArgumentError(
            f"{what_at(at)} is {moments[at]} µs from 1970, beyond the years 1 to 9999 in UTC. Send "
            "a time within them"
        )


def first_row(found: pa.Array) -> int:
    """Return the first row at which a column of booleans is true."""
    return int(pc.index(found, True).as_py())


def _check_properties(names: pa.Array, values: pa.Array, offsets: npt.NDArray[np.int32]) -> None:
    def what_at(at: int) -> str:
        row = int(np.searchsorted(offsets - offsets[0], at, side="right")) - 1
        return f"property {names[at].as_py()!r:.60} of message {row}"

    lengths = byte_lengths(names)
    longest = int(lengths.max())
    if longest > MAX_PROPERTY_NAME_CHARACTERS:  # no text has more characters than bytes
        longest = pc.max(pc.utf8_length(names)).as_py()
    if not lengths.all() or longest > MAX_PROPERTY_NAME_CHARACTERS:
        raise InvalidArgumentError(
            f"a property's name must have 1 to {MAX_PROPERTY_NAME_CHARACTERS} characters"
        )
    count = np.zeros(len(values), np.int64)
    for at, child in enumerate(PROPERTY_TYPES):
        content = values.field(at)
        nulls = content.null_count
        if nulls == len(content):
            continue
        count += content.is_valid().to_numpy(zero_copy_only=False) if nulls else 1
        if child == "datetime":
            _check_moments(what_at, content)
    if values.null_count:
        count[values.is_null().to_numpy(zero_copy_only=False)] = 0
    if (count != 1).any():
        at = int(np.flatnonzero(count != 1)[0])
        raise InvalidArgumentError(
            f"{what_at(at)} has {count[at]} values. Set exactly one child of its struct"
        )


def _check_names_differ(names: pa.Array, offsets: npt.NDArray[np.int32]) -> None:
    """Refuse a message with two properties of one name: which value applies is undefined."""
    widths = np.diff(offsets)
    widest = int(widths.max())
    if widest < 2:
        return
    codes = names.dictionary_encode().indices.to_numpy().astype(np.int64)
    if widest <= 8 and (widths == widest).all():  # as most batches are: compare column by column
        table = codes.reshape(-1, widest)
        alike = any(
            (table[:, left] == table[:, right]).any()
            for left, right in itertools.combinations(range(widest), 2)
        )
    else:
        rows = np.repeat(np.arange(len(widths)), widths)
        pairs = np.sort(rows * (codes.max() + 1) + codes)
        alike = bool((np.diff(pairs) == 0).any())
    if alike:
        raise InvalidArgumentError("a message has two properties of one name; give each name once")


def tokens_of(lock_tokens: Iterable[UUID]) -> pa.Array:
    """Return lock tokens as a column."""
    content = b"".join([token.bytes for token in lock_tokens])
    return pa.Array.from_buffers(LOCK_TOKEN, len(content) // 16, [None, pa.py_buffer(content)])


def column_of(kind: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    """Return a numpy array as an Arrow column of a type of its width, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)
