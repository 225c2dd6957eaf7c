"""Delivered messages as columns; `messages.py` says how a message is sent.

A receive becomes one Arrow batch without an object per message. Values are gathered by column, with
the rows that they belong to, because most columns have no value at all. Only malformed bytes raise.
Other values that another program has sent and that do not fit are left out, shortened or converted
to text.

Messages whose properties have the same layout are read together (`layouts.py`), others one by one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from twinbus.clock import moment_us, to_us
from twinbus.errors import InvalidArgumentError
from twinbus.limits import (
    MAX_ID_CHARACTERS,
    MAX_PROPERTY_NAME_CHARACTERS,
    RABBITMQ_ALIKE,
    RABBITMQ_CACHED_NAMES,
    SECOND_US,
)
from twinbus.message import (
    BOUNDED_TEXTS,
    DELIVERY_SCHEMA,
    LAST_MOMENT_US,
    PROPERTIES_TYPE,
    PROPERTY_TYPES,
    Int64s,
    MessageState,
    property_child,
    stored_property,
)
from twinbus.namespace.rabbitmq.layouts import Bytes, Layout, Value, column_of, layout_of
from twinbus.namespace.rabbitmq.messages import (
    ACTED_ON,
    AMQP,
    AS_HEADERS,
    BASIC,
    DELIVERIES,
    DESCRIPTION,
    ESCAPED,
    HEADER_OF,
    LIFE,
    OWN,
    REASON,
    SOURCE,
    SYSTEM,
    TYPES,
)
from twinbus.namespace.rabbitmq.properties import read_properties

Headers = Mapping[str, Any]
_REASONS = {
    "expired": "TTLExpiredException",
    "delivery_limit": "MaxDeliveryCountExceeded",
    "rejected": "Rejected",
    "maxlen": "QueueFull",
}
_MOST_DELIVERIES = 2**31 - 1
_DEATHS = "x-death"
_NOTHING: Headers = {}


class Deliveries:
    """Messages that the broker has delivered, in order, and that are not yet acknowledged.

    The values of a message are in lists at the same index: Python's garbage collector would look at
    an object per message again and again.
    """

    __slots__ = ("bodies", "encoded", "size", "tags")

    def __init__(self) -> None:
        self.tags: list[int] = []  # the delivery tags
        self.encoded: list[bytes] = []  # the properties
        self.bodies: list[bytes] = []
        self.size = 0  # in bytes, properties included

    def __len__(self) -> int:
        return len(self.tags)

    def add(self, tag: int, encoded: bytes, body: bytes) -> None:
        """Add a message."""
        self.tags.append(tag)
        self.encoded.append(encoded)
        self.bodies.append(body)
        self.size += len(encoded) + len(body)

    def remove_excess(self, max_bytes: int) -> list[int]:
        """Remove the messages beyond a number of bytes, but not the first; return their tags."""
        count = len(self.tags)
        while count > 1 and self.size > max_bytes:
            count -= 1
            self.size -= len(self.encoded[count]) + len(self.bodies[count])
        removed = self.tags[count:]
        del self.tags[count:], self.encoded[count:], self.bodies[count:]
        return removed


def delivered(deliveries: Deliveries, tokens: pa.Array) -> pa.RecordBatch:
    """Return deliveries as a batch of DELIVERY_SCHEMA; raise pika's error for a malformed one."""
    count = len(deliveries)
    cells, bags = _Cells(count), _Bags(count)
    for row in _add_alike(cells, bags, deliveries.encoded):
        properties = read_properties(deliveries.encoded[row])
        headers = properties.get("headers") or _NOTHING
        _add_fields(cells, row, properties, headers)
        if headers:
            bags.add(row, headers)
    columns = {
        "body": pa.array(deliveries.bodies, pa.binary()),
        "properties": bags.column(),
        "sequence_number": _repeated("sequence_number", 0, count),
        "delivery_count": cells.column("delivery_count").fill_null(0),
        "lock_token": tokens,
        "state": _repeated("state", int(MessageState.ACTIVE), count),
    }
    return pa.RecordBatch.from_arrays(
        [
            columns[name] if name in columns else cells.column(name)
            for name in DELIVERY_SCHEMA.names
        ],
        schema=DELIVERY_SCHEMA,
    )


def _repeated(name: str, value: int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, DELIVERY_SCHEMA.field(name).type), count)


_Chunk = tuple[Int64s, pa.Array]  # some rows of a column, and their values


def _spread(chunks: Sequence[_Chunk], count: int, kind: pa.DataType) -> pa.Array:
    """Return a column of `count` rows, with values in some of them, and null in the others."""
    if not chunks:
        return pa.nulls(count, kind)
    rows = np.concatenate([rows for rows, _ in chunks])
    column = pa.concat_arrays([values for _, values in chunks])
    order = np.arange(len(rows))
    if len(rows) == count and (rows == order).all():
        return column
    at = np.full(count, -1, np.int64)
    at[rows] = order
    return column.take(pa.array(at, mask=at < 0))


# -- messages with the same layout -----------------------------------------------------------------


def _add_alike(cells: "_Cells", bags: "_Bags", encoded: Sequence[bytes]) -> Sequence[int]:
    """Add messages that have their layout in common with many; return the rows of the others."""
    by_length: dict[int, list[int]] = {}
    for row, properties in enumerate(encoded):
        by_length.setdefault(len(properties), []).append(row)
    others: list[int] = []
    for length, rows in by_length.items():
        if len(rows) < RABBITMQ_ALIKE:
            others += rows
            continue
        data = b"".join([encoded[row] for row in rows])
        matrix = np.frombuffer(data, np.uint8).reshape(len(rows), length)
        left = np.asarray(rows)
        while len(left) >= RABBITMQ_ALIKE:
            layout = layout_of(encoded[int(left[0])])
            found = None if layout is None else layout.rows_of(matrix)
            if layout is None or found is None or len(found) < RABBITMQ_ALIKE:
                break
            if not _add_layout(cells, bags, layout, left[found], matrix[found]):
                break
            if len(found) == len(left):
                left = left[:0]
                break
            left, matrix = np.delete(left, found), np.delete(matrix, found, axis=0)
        others += left.tolist()
    return sorted(others)


def _add_layout(
    cells: "_Cells", bags: "_Bags", layout: Layout, rows: Int64s, matrix: Bytes
) -> bool:
    """Add messages of one layout; return False if they must be read one by one."""
    fields: list[tuple[str, pa.Array]] = []
    properties: list[tuple[str, pa.Array]] = []
    for value in layout.values:
        name = value.name
        if value.is_header:
            if name in _ONE_BY_ONE or name.startswith(ESCAPED):
                return False
            into, key = properties, _property_name(name)
        else:
            if name == "expiration" or (name == "message_id" and _is_long(value)):
                return False
            into, key = fields, _FIELD_OF_PROPERTY.get(name)
        if key is not None:
            try:
                into.append((key, column_of(value, matrix)))
            except pa.ArrowException:  # bytes that are no text
                return False
        elif name == "timestamp":
            seconds = column_of(value, matrix).to_numpy()
            if seconds.min() < 0 or seconds.max() > LAST_MOMENT_US // SECOND_US:
                return False
            enqueued = pa.array(
                seconds * SECOND_US, DELIVERY_SCHEMA.field("enqueued_time_utc").type
            )
            fields.append(("enqueued_time_utc", enqueued))
    for name, column in fields:
        cells.extend(name, rows, column)
    bags.extend(rows, properties)
    return True


def _is_long(value: Value) -> bool:
    return value.end - value.start > MAX_ID_CHARACTERS


# -- fields ----------------------------------------------------------------------------------------


class _Cells:
    """The values of columns in which many rows may have none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._single: dict[str, tuple[list[int], list[Any]]] = {}
        self._chunks: dict[str, list[_Chunk]] = {}

    def add(self, name: str, row: int, value: Any) -> None:
        """Set the value of a row, in place of an earlier one; rows come in order."""
        column = self._single.get(name)
        if column is None:
            column = self._single[name] = [], []
        rows, values = column
        if rows and rows[-1] == row:
            values[-1] = value
        else:
            rows.append(row)
            values.append(value)

    def extend(self, name: str, rows: Int64s, values: pa.Array) -> None:
        """Set the values of several rows."""
        self._chunks.setdefault(name, []).append((rows, values))

    def column(self, name: str) -> pa.Array:
        """Return a column of DELIVERY_SCHEMA."""
        kind = DELIVERY_SCHEMA.field(name).type
        chunks = self._chunks.get(name, [])
        if name in self._single:
            rows, values = self._single[name]
            chunks = [*chunks, (np.asarray(rows), pa.array(values, kind))]
        return _spread(chunks, self._count, kind)


_FIELD_OF_PROPERTY = {property_name: name for name, property_name in BASIC.items()}
_FIELD_OF_HEADER = {
    **{HEADER_OF[name]: name for name in (*BASIC, *AS_HEADERS)},
    REASON: "dead_letter_reason",
    DESCRIPTION: "dead_letter_error_description",
    SOURCE: "dead_letter_source",
}


def _add_fields(cells: _Cells, row: int, properties: Headers, headers: Headers) -> None:
    for name, value in properties.items():
        field = _FIELD_OF_PROPERTY.get(name)
        if field is not None:
            _add_text(cells, row, field, value)
    life = None
    if "expiration" in properties or LIFE in headers:
        life = _life_us(properties.get("expiration"), headers.get(LIFE))
        if life is not None:
            cells.add("time_to_live", row, life)
    seconds = properties.get("timestamp")
    if seconds is not None and seconds * SECOND_US <= LAST_MOMENT_US:
        enqueued = seconds * SECOND_US
        cells.add("enqueued_time_utc", row, enqueued)
        if life is not None and enqueued < LAST_MOMENT_US - life:
            cells.add("expires_at_utc", row, enqueued + life)
    if not _OF_FIELDS.isdisjoint(headers):
        _add_headers(cells, row, headers)


_OF_FIELDS = frozenset((*_FIELD_OF_HEADER, AMQP, DELIVERIES, _DEATHS))
_ONE_BY_ONE = _OF_FIELDS | {TYPES, LIFE}  # headers that are looked at row by row


def _add_headers(cells: _Cells, row: int, headers: Headers) -> None:
    """Set the fields that travel as headers, and those that the broker sets."""
    count = headers.get(DELIVERIES)
    if isinstance(count, int):
        cells.add("delivery_count", row, max(min(int(count), _MOST_DELIVERIES), 0))
    amqp = headers.get(AMQP)
    if isinstance(amqp, bytes):
        cells.add("amqp", row, amqp)
    deaths = headers.get(_DEATHS)
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        reason = str(deaths[0].get("reason"))
        cells.add("dead_letter_reason", row, _REASONS.get(reason, reason))
        cells.add("dead_letter_source", row, str(deaths[0].get("queue")))
    for header, field in _FIELD_OF_HEADER.items():  # the receiver's reason replaces the broker's
        _add_text(cells, row, field, headers.get(header))


def _add_text(cells: _Cells, row: int, field: str, text: object) -> None:
    if isinstance(text, str):
        is_long = len(text) > MAX_ID_CHARACTERS and field in BOUNDED_TEXTS
        cells.add(field, row, text[:MAX_ID_CHARACTERS] if is_long else text)


def _life_us(expiration: object, exact_us: object) -> int | None:
    try:
        if isinstance(exact_us, int):
            life = timedelta(microseconds=exact_us)
        elif isinstance(expiration, str):
            life = timedelta(milliseconds=int(expiration))
        else:
            return None
    except (OverflowError, ValueError):
        return None
    return to_us(life) if life > timedelta(0) else None


# -- properties ------------------------------------------------------------------------------------


class _Bags:
    """The application properties of all rows.

    The place of a property in the column is known only when all properties of all rows are counted.
    """

    def __init__(self, count: int) -> None:
        self._counts = np.zeros(count, np.int64)  # of properties, by row
        self._names: list[str] = []  # of the properties that are added one by one
        self._rows: list[int] = []  # the rows that have such properties
        # By type: the indexes of such properties in _names, and their values.
        self._children: dict[str, tuple[list[int], list[Any]]] = {}
        self._alike: list[tuple[Int64s, list[tuple[str, pa.Array]]]] = []

    def add(self, row: int, headers: Headers) -> None:
        """Add the properties of a row."""
        names = self._names
        before = len(names)
        types = _types_of(headers[TYPES]) if TYPES in headers else _NOTHING
        for header, value in headers.items():
            name = _property_name(header)
            if name is None or (name != header and _property_name(name) in headers):
                continue  # another header names the property without the prefix
            child = _PLAIN.get(type(value))
            if child is None or name in types:
                typed = _typed(value, types.get(name))
                if typed is None:
                    continue
                child, value = typed  # noqa: PLW2901 - in the form in which it is stored
            column = self._children.get(child)
            if column is None:
                column = self._children[child] = [], []
            column[0].append(len(names))
            column[1].append(value)
            names.append(name)
        self._counts[row] = len(names) - before
        self._rows.append(row)

    def extend(self, rows: Int64s, properties: list[tuple[str, pa.Array]]) -> None:
        """Add the properties of rows that have the same ones."""
        self._counts[rows] = len(properties)
        self._alike.append((rows, properties))

    def column(self) -> pa.Array:
        """Return the column `properties`."""
        offsets = np.zeros(len(self._counts) + 1, np.int64)
        np.cumsum(self._counts, out=offsets[1:])
        names: list[_Chunk] = []
        children: dict[str, list[_Chunk]] = {}
        if self._names:
            single = self._single_places(offsets)
            names.append((single, pa.array(self._names, pa.string())))
            for child, (at, values) in self._children.items():
                children[child] = [(single[at], pa.array(values, PROPERTY_TYPES[child]))]
        for rows, properties in self._alike:
            for index, (name, values) in enumerate(properties):
                places = offsets[rows] + index
                names.append((places, pa.repeat(pa.scalar(name, pa.string()), len(rows))))
                child = _CHILD_OF_COLUMN[values.type]
                children.setdefault(child, []).append((places, values))
        count = int(offsets[-1])
        columns = [
            _spread(children.get(child, ()), count, kind) for child, kind in PROPERTY_TYPES.items()
        ]
        return pa.MapArray.from_arrays(
            pa.array(offsets.astype(np.int32)),
            _spread(names, count, pa.string()),
            pa.StructArray.from_arrays(columns, fields=list(PROPERTIES_TYPE.item_type)),
            type=PROPERTIES_TYPE,
        )

    def _single_places(self, offsets: Int64s) -> Int64s:
        """Return the places of the properties that were added one by one."""
        rows = np.asarray(self._rows)
        counts = self._counts[rows]
        first = np.cumsum(counts) - counts
        places: Int64s = np.repeat(offsets[rows] - first, counts) + np.arange(counts.sum())
        return places


_CHILD_OF_COLUMN = {PROPERTY_TYPES[child]: child for child in ("str", "int", "bool", "bytes")}


@lru_cache(maxsize=RABBITMQ_CACHED_NAMES)
def _property_name(header: str) -> str | None:
    """Return the property that a header stands for; None if it stands for none."""
    lower = header.lower()
    if header in OWN or lower in ACTED_ON or lower.startswith(SYSTEM):
        return None
    name = header.removeprefix(ESCAPED)
    return name if 0 < len(name) <= MAX_PROPERTY_NAME_CHARACTERS else None


_PLAIN: Mapping[type, str] = {str: "str", int: "int", bool: "bool", bytes: "bytes", float: "float"}
_Reader = Callable[[str], Any]


def _duration_of(text: str) -> timedelta:
    sign = -1 if text.startswith("-") else 1
    seconds, _, part = text.removeprefix("-").removeprefix("PT").removesuffix("S").partition(".")
    return sign * timedelta(seconds=int(seconds), microseconds=int(part.ljust(6, "0") or 0))


_READERS: Mapping[str, _Reader] = {
    "float": float,
    "datetime": datetime.fromisoformat,
    "timedelta": _duration_of,
    "uuid": UUID,
}


def _types_of(text: object) -> Headers:
    try:
        types = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return _NOTHING
    return types if isinstance(types, dict) else _NOTHING


def _typed(value: Any, kind: object) -> tuple[str, Any] | None:
    """Return the child and the stored form of a header; None if it has no value.

    A type that properties do not support becomes text.
    """
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is not None and isinstance(value, str):
        try:
            typed = reader(value)
            child = property_child("value", typed)  # refuses a datetime without a time zone
            return child, stored_property(child, typed)
        except (OverflowError, ValueError, InvalidArgumentError):
            return "str", value
    if isinstance(value, datetime):
        return "datetime", moment_us(value)
    if value is None:
        return None
    if type(value) in _PLAIN:
        return _PLAIN[type(value)], value
    text = (
        json.dumps(value, default=str, skipkeys=True)
        if isinstance(value, dict | list)
        else str(value)
    )
    return "str", text
