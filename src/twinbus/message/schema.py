"""The columns of messages: what applications set, and what brokers add at a delivery.

Every batch inside Twinbus has one of these two schemas. An application property keeps its Python
type: its value is a struct with one child per type, and exactly one child is set.
"""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.clock import moment_us

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
