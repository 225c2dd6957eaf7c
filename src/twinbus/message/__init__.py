"""Messages: `BrokeredMessage` for applications, and Arrow batches inside Twinbus.

This package owns both views. `to_batch` and `to_messages` convert where applications pass messages
in and get them. Inside Twinbus messages stay in batches; only a few messages at a time travel as
rows (protocol/rows.py). A batch has the columns of MESSAGE_SCHEMA; a delivered batch has those of
DELIVERY_SCHEMA, which adds the fields that the broker sets. The names below are the public names of
the package; other packages import nothing from its modules.

The size of a message is the sum of the values that the application set: body, texts (UTF-8), 8
bytes per time, and for each property its name and value (number or time 8 bytes, bool 1, UUID 16).
The sections of a message that came over AMQP count in addition, because native clients can set
them, too.
"""

from twinbus.message.brokered import (
    BrokeredMessage,
    MessageState,
    application_values,
    too_long,
)
from twinbus.message.checks import (
    check_values,
    first_row,
)
from twinbus.message.columns import (
    as_batch,
    column_of,
    columns_in_use,
    conform,
    rows_of,
    to_batch,
    to_columns,
    to_messages,
    token_column,
    tokens_of,
    values_of,
)
from twinbus.message.measures import (
    body_bytes,
    byte_lengths,
    content_bytes,
    has_values,
    is_ping,
    ping_rows,
    sizes,
    sizes_of,
)
from twinbus.message.properties import (
    check_moment,
    map_offsets,
    properties_of,
    property_child,
    property_entries,
    property_values,
    stored_property,
    to_properties_column,
)
from twinbus.message.schema import (
    APPLICATION_FIELDS,
    BOUNDED_TEXTS,
    DELIVERY_SCHEMA,
    DURATION,
    LAST_MOMENT_US,
    LOCK_TOKEN,
    MESSAGE_SCHEMA,
    PROPERTIES_TYPE,
    PROPERTY_TYPES,
    TEXT_COLUMNS,
    TIMESTAMP,
    Int64s,
    PropertyValue,
)

__all__ = [
    "APPLICATION_FIELDS",
    "BOUNDED_TEXTS",
    "DELIVERY_SCHEMA",
    "DURATION",
    "LAST_MOMENT_US",
    "LOCK_TOKEN",
    "MESSAGE_SCHEMA",
    "PROPERTIES_TYPE",
    "PROPERTY_TYPES",
    "TEXT_COLUMNS",
    "TIMESTAMP",
    "BrokeredMessage",
    "Int64s",
    "MessageState",
    "PropertyValue",
    "application_values",
    "as_batch",
    "body_bytes",
    "byte_lengths",
    "check_moment",
    "check_values",
    "column_of",
    "columns_in_use",
    "conform",
    "content_bytes",
    "first_row",
    "has_values",
    "is_ping",
    "map_offsets",
    "ping_rows",
    "properties_of",
    "property_child",
    "property_entries",
    "property_values",
    "rows_of",
    "sizes",
    "sizes_of",
    "stored_property",
    "to_batch",
    "to_columns",
    "to_messages",
    "to_properties_column",
    "token_column",
    "tokens_of",
    "too_long",
    "values_of",
]
