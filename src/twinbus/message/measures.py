"""Sizes of messages in a batch, and which of them are pings.

The size of a message is defined in the docstring of the package. For a batch, these functions look
at whole columns, never at single messages.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus import compute as pc
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.message.brokered import BrokeredMessage
from twinbus.message.columns import columns_in_use
from twinbus.message.properties import map_offsets, property_entries
from twinbus.message.schema import (
    FIXED_PROPERTY_BYTES,
    PROPERTY_TYPES,
    TEXT_COLUMNS,
    Int64s,
)


def sizes(messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> Int64s:
    """Return the size of each message, as the docstring of the package defines it."""
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


def body_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of all bodies: cheap, while `nbytes` reads every column."""
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
    """Whether there are messages and all are pings, by the content type alone."""
    if isinstance(messages, pa.RecordBatch):
        at = messages.schema.get_field_index("content_type")
        if at < 0 or not messages.num_rows or messages.schema.field(at).type != pa.string():
            return False
        return bool(pc.all(pc.equal(messages.column(at), _PING).fill_null(False)).as_py())
    kinds = [message.content_type for message in messages]
    return bool(kinds) and all(kind == PING_CONTENT_TYPE for kind in kinds)


def has_values(messages: Sequence[BrokeredMessage] | pa.RecordBatch, field_name: str) -> bool:
    """Whether any of the messages has a value in a field; a batch has it as a column."""
    if isinstance(messages, pa.RecordBatch):
        return bool(messages.column(field_name).null_count < messages.num_rows)
    return any(getattr(message, field_name) is not None for message in messages)
