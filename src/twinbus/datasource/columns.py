"""Converts messages to the columns of the `twinbus` data source, and back.

Spark has no binary type of fixed length, and no map with values of several types. So a UUID is
binary, and a property is a struct with one field per type, of which exactly one is set:

    properties map<string, struct<str, int, float, bool, bytes, datetime, timedelta, uuid>>

A writer needs only the column `body`, which may be text. It may give properties as
map<string, string>.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from twinbus.errors import InvalidArgumentError
from twinbus.message import (
    DELIVERY_SCHEMA,
    DURATION,
    MESSAGE_SCHEMA,
    PROPERTIES_TYPE,
    PROPERTY_TYPES,
    TEXT_COLUMNS,
    TIMESTAMP,
    MessageState,
    map_offsets,
    property_entries,
)

_PROPERTY_DDL = {
    "str": "string",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "bytes": "binary",
    "datetime": "timestamp",
    "timedelta": "interval day to second",
    "uuid": "binary",
}
_STRUCT_DDL = ", ".join(f"`{name}`: {kind}" for name, kind in _PROPERTY_DDL.items())
_MESSAGE_DDL = {
    "body": "binary",
    **dict.fromkeys(TEXT_COLUMNS, "string"),
    "time_to_live": "interval day to second",
    "scheduled_enqueue_time_utc": "timestamp",
    "properties": f"map<string, struct<{_STRUCT_DDL}>>",
    "amqp": "binary",
}
_BROKER_DDL = {
    "sequence_number": "bigint",
    "enqueued_time_utc": "timestamp",
    "expires_at_utc": "timestamp",
    "delivery_count": "int",
    "state": "string",
    "dead_letter_reason": "string",
    "dead_letter_error_description": "string",
    "dead_letter_source": "string",
}
MESSAGE_COLUMNS = tuple(_MESSAGE_DDL)
BROKER_COLUMNS = tuple(_BROKER_DDL)


def _ddl(columns: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())


MESSAGE_DDL = _ddl(_MESSAGE_DDL)
_READ_DDL = {**_MESSAGE_DDL, **_BROKER_DDL}
READ_COLUMNS = tuple(_READ_DDL)


def read_ddl(names: Sequence[str]) -> str:
    """Return the DDL schema of some columns."""
    return _ddl({name: _READ_DDL[name] for name in names})


_SPARK_PROPERTIES = pa.map_(
    pa.string(),
    pa.struct(
        [(name, pa.binary() if name == "uuid" else kind) for name, kind in PROPERTY_TYPES.items()]
    ),
)
_SPARK_TYPES = {
    **{field.name: field.type for field in DELIVERY_SCHEMA},
    "state": pa.string(),
    "properties": _SPARK_PROPERTIES,
}
_STATES = pa.array([state.name.lower() for state in MessageState])


# -- to Spark --------------------------------------------------------------------------------------


def to_spark(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return these columns of a batch in Spark's types."""
    columns = [_to_spark(name, batch.column(name)) for name in names]
    schema = pa.schema([(name, _SPARK_TYPES[name]) for name in names])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _to_spark(name: str, column: pa.Array) -> pa.Array:
    if name == "state":
        return _STATES.take(column)
    if name == "properties":
        return _with_uuids(column, _SPARK_PROPERTIES)
    return column


def _with_uuids(column: pa.Array, kind: pa.MapType) -> pa.Array:
    """Return properties in the type `kind`, in which UUIDs have no fixed length."""
    offsets = map_offsets(column)
    names, values = property_entries(column, offsets)
    children = [values.field(child) for child in PROPERTY_TYPES]
    at = list(PROPERTY_TYPES).index("uuid")
    children[at] = _cast(children[at], kind.item_type.field("uuid").type)
    structs = pa.StructArray.from_arrays(children, fields=list(kind.item_type))
    return pa.MapArray.from_arrays(pa.array(offsets - offsets[0]), names, structs, type=kind)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.nulls(len(column), kind) if column.null_count == len(column) else column.cast(kind)


# -- from Spark ------------------------------------------------------------------------------------


def check_writable(columns: Mapping[str, str]) -> None:
    """Raise if messages do not have one of these columns, or if `body` is missing."""
    unknown = sorted(set(columns) - set(MESSAGE_COLUMNS))
    if unknown:
        raise InvalidArgumentError(
            f"a message has no column {', '.join(unknown)}; its columns are "
            f"{', '.join(MESSAGE_COLUMNS)}. Drop the others, or put them into the body or the "
            "properties"
        )
    if "body" not in columns:
        raise InvalidArgumentError(
            "a message needs a column `body`, binary or text: for example "
            "df.select(to_json(struct('*')).alias('body'))"
        )


def from_spark(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of Spark as a batch of messages; raise if a column has a wrong type."""
    columns = []
    for field in MESSAGE_SCHEMA:
        at = batch.schema.get_field_index(field.name)
        try:
            column = pa.nulls(batch.num_rows, field.type) if at < 0 else batch.column(at)
            columns.append(_from_spark(field, column))
        except pa.ArrowException as error:
            raise InvalidArgumentError(
                f"column {field.name} has a wrong type: {error}. Cast it to "
                f"{_MESSAGE_DDL[field.name]}"
            ) from error
    if columns[0].null_count:
        raise InvalidArgumentError(
            f"body is null in {columns[0].null_count} of {batch.num_rows} rows; write an empty "
            "body instead, for example with coalesce"
        )
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def _from_spark(field: pa.Field, column: pa.Array) -> pa.Array:
    if field.name == "properties":
        return _properties_from_spark(column)
    if field.type in (TIMESTAMP, DURATION):
        return _moments(field.name, column, field.type)
    return column.cast(field.type)


def _moments(name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return times unchanged; refuse numbers, because their unit is unknown."""
    if column.null_count != len(column) and not pa.types.is_temporal(column.type):
        wanted = "interval day to second" if kind == DURATION else "timestamp"
        raise InvalidArgumentError(f"{name} is {column.type}; it must be {wanted}")
    return _cast(column, kind)


def _properties_from_spark(column: pa.Array) -> pa.Array:
    count = len(column)
    if column.null_count == count or not pa.types.is_map(column.type):
        if column.null_count != count:
            raise InvalidArgumentError(
                f"properties is {column.type}; it must be a map of names to values"
            )
        offsets = pa.array(np.zeros(count + 1, np.int32))
        nothing = (pa.nulls(0, pa.string()), pa.nulls(0, PROPERTIES_TYPE.item_type))
        return pa.MapArray.from_arrays(offsets, *nothing, type=PROPERTIES_TYPE)
    if column.null_count:  # null means no properties
        lengths = np.diff(map_offsets(column))
        lengths[column.is_null().to_numpy(zero_copy_only=False)] = 0
        entries = column.filter(column.is_valid())
        keys, items = property_entries(entries, map_offsets(entries))
        offsets = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        column = pa.MapArray.from_arrays(pa.array(offsets), keys, items)
    offsets = map_offsets(column)
    names, values = property_entries(column, offsets)
    if pa.types.is_struct(values.type):
        children = [_child(values, child, kind) for child, kind in PROPERTY_TYPES.items()]
    else:
        children = [
            values.cast(kind) if child == "str" else pa.nulls(len(values), kind)
            for child, kind in PROPERTY_TYPES.items()
        ]
    structs = pa.StructArray.from_arrays(children, fields=list(PROPERTIES_TYPE.item_type))
    at = pa.array(offsets - offsets[0])
    return pa.MapArray.from_arrays(at, names.cast(pa.string()), structs, type=PROPERTIES_TYPE)


def _child(values: pa.Array, child: str, kind: pa.DataType) -> pa.Array:
    if values.type.get_field_index(child) < 0:
        return pa.nulls(len(values), kind)
    values_of_type = values.field(child)
    if child == "uuid" and values_of_type.null_count != len(values_of_type):
        lengths = pc.unique(pc.binary_length(values_of_type.drop_null())).to_pylist()
        if lengths != [16]:
            raise InvalidArgumentError(
                f"uuids in properties have lengths of {lengths} bytes; each must have 16 bytes"
            )
    if child in ("datetime", "timedelta"):
        return _moments(f"the {child} of a property", values_of_type, kind)
    return _cast(values_of_type, kind)
