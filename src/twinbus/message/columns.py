"""Converts message objects to batches of columns, and batches to message objects.

Inside Twinbus messages stay in batches. Most columns of most batches are empty, so null columns are
cached for small batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any
from uuid import UUID

import numpy.typing as npt
import pyarrow as pa

from twinbus.clock import from_us, moment_us, to_us
from twinbus.errors import InvalidArgumentError
from twinbus.limits import FEW_MESSAGES, NEVER_US
from twinbus.message.brokered import BrokeredMessage, MessageState, application_values
from twinbus.message.properties import no_properties, properties_of, to_properties_column
from twinbus.message.schema import (
    APPLICATION_FIELDS,
    DURATION,
    LOCK_TOKEN,
    MESSAGE_SCHEMA,
    TIMESTAMP,
)
from twinbus.values import shown


def to_batch(messages: Sequence[BrokeredMessage]) -> pa.RecordBatch:
    """Return the messages as one batch, without the fields that the broker sets."""
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
    """Return the column with this index in the schema; at least one of the values is not None."""
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
    columns = [pa.nulls(count, kind) for kind in _COLUMN_TYPES]
    columns[_PROPERTIES] = no_properties(count)
    return tuple(columns)


def to_messages(batch: pa.RecordBatch) -> list[BrokeredMessage]:
    """Return the rows of a batch as messages; broker columns are read where present."""
    return [BrokeredMessage(**fields) for fields in rows_of(batch)]


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as the fields of messages."""
    columns = _fields_in_use(batch)
    names = tuple(columns)
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(names, row, strict=True))


def values_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a batch as the values of APPLICATION_FIELDS."""
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
        column = column.view(pa.int64())  # the same numbers, without a conversion
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


def as_batch(messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> pa.RecordBatch:
    """Return messages in either form as one batch of MESSAGE_SCHEMA."""
    return conform(messages) if isinstance(messages, pa.RecordBatch) else to_batch(messages)


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with exactly the columns of MESSAGE_SCHEMA; drop any others.

    Raise InvalidArgumentError if a column is missing or cannot be cast, or a body is null.
    """
    try:
        if batch.column("body").null_count:
            raise InvalidArgumentError(
                f"{batch.column('body').null_count} of {len(batch)} messages have no body; use "
                "empty bytes"
            )
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
            f"the batch does not have the columns of a message batch: {error}. Use the names and "
            f"types of twinbus.message.MESSAGE_SCHEMA"
        ) from error
    return batch


def columns_in_use(batch: pa.RecordBatch) -> Mapping[str, pa.Array]:
    """Return the columns in which some message has a value; the others are all null."""
    count = batch.num_rows
    return {
        name: column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if column.null_count != count
    }


def tokens_of(lock_tokens: Iterable[UUID]) -> pa.Array:
    """Return lock tokens as a column."""
    return token_column(b"".join([token.bytes for token in lock_tokens]))


def token_column(content: bytes) -> pa.Array:
    """Return a column of lock tokens, given as their concatenated bytes."""
    return pa.Array.from_buffers(LOCK_TOKEN, len(content) // 16, [None, pa.py_buffer(content)])


def column_of(kind: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    """Return a numpy array as an Arrow column, without a copy; both types have the same width."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)
