"""The format of a message in a backlog queue.

A diverted message must neither expire nor be scheduled in the backlog queue, and it may be for any
entity. So these fields travel as application properties:

    of the message                 property                        type
    session_id                     x-ms-sessionid                  str
    time_to_live                   x-ms-timetolive                 timedelta
    scheduled_enqueue_time_utc     x-ms-scheduledenqueuetimeutc    datetime
    (the entity's path)            x-ms-path                       str
    (sender and its number, if     x-twinbus-sender                str
     the primary was tried)        x-twinbus-number                int

With the last two the primary recognises a message that it accepted although its reply was lost. The
original fields are cleared; all others are unchanged. A few message objects are diverted as objects
(`diverted_messages`), because they travel as rows; all other messages are diverted as columns
(`diverted`). Both produce equal messages. All functions are pure: senders call `to_backlog` in any
thread, which chooses between the two, and the syphon calls `restored` on whole batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus import compute as pc
from twinbus.clock import from_us, moment_us, to_us
from twinbus.entities import SCHEDULE_PROPERTY
from twinbus.errors import (
    InvalidArgumentError,
    MessageSizeExceededError,
)
from twinbus.limits import (
    FEW_MESSAGES,
    MAX_BACKLOG_QUEUES,
    MAX_MESSAGE_BYTES,
    ROWS_AS_ROWS,
)
from twinbus.message import (
    APPLICATION_FIELDS,
    MESSAGE_SCHEMA,
    PROPERTIES_TYPE,
    PROPERTY_TYPES,
    BrokeredMessage,
    application_values,
    as_batch,
    byte_lengths,
    conform,
    map_offsets,
    property_entries,
    sizes,
)
from twinbus.protocol.commands import Origin
from twinbus.protocol.origins import sender_number

PATH = "x-ms-path"
SESSION = "x-ms-sessionid"
LIFE = "x-ms-timetolive"
SENDER = "x-twinbus-sender"
NUMBER = "x-twinbus-number"
ALIASES: Mapping[str, str] = {  # property name -> its type, a key of PROPERTY_TYPES
    PATH: "str",
    SESSION: "str",
    LIFE: "timedelta",
    SCHEDULE_PROPERTY: "datetime",
    SENDER: "str",
    NUMBER: "int",
}
ALIASED_COLUMNS = {
    "session_id": SESSION,
    "time_to_live": LIFE,
    "scheduled_enqueue_time_utc": SCHEDULE_PROPERTY,
}
_SEQUENCE_BITS = 50  # room for 10**15 messages in one backlog queue
UNKNOWN_QUEUE = MAX_BACKLOG_QUEUES  # in place of an index: the backlog queue is not known
Indices = npt.NDArray[np.int64]


# -- numbers that cancel ---------------------------------------------------------------------------


def number_in_backlog(index: int, sequence_number: int) -> int:
    """Return the number that a caller gets for a diverted message; it is always negative."""
    return -(index << _SEQUENCE_BITS | sequence_number)


def place_in_backlog(number: int) -> tuple[int, int]:
    """Return the index of the backlog queue and the sequence number; undoes number_in_backlog."""
    return -number >> _SEQUENCE_BITS, -number & ((1 << _SEQUENCE_BITS) - 1)


# -- diverting -------------------------------------------------------------------------------------


def to_backlog(
    messages: Sequence[BrokeredMessage] | pa.RecordBatch, path: str, origin: Origin | None = None
) -> Sequence[BrokeredMessage] | pa.RecordBatch:
    """Return messages in the format of a backlog queue; `origin` if the primary was tried.

    Up to ROWS_AS_ROWS objects stay objects, because they travel as rows; more become columns.
    """
    if isinstance(messages, pa.RecordBatch) or len(messages) > ROWS_AS_ROWS:
        return diverted(as_batch(messages), path, origin)
    return diverted_messages(messages, path, origin)


def diverted_messages(
    messages: Sequence[BrokeredMessage], path: str, origin: Origin | None = None
) -> list[BrokeredMessage]:
    """Return message objects in the format of a backlog queue, equal to those of `diverted`."""
    check_reserved(messages)
    found = []
    for row, message in enumerate(messages):
        values = list(application_values(message))
        properties = dict(values[_PROPERTIES_AT])
        for at, alias, stored in _ALIASED_FIELDS:
            if values[at] is not None:
                properties[alias] = stored(values[at])
                values[at] = None
        if origin is not None:
            properties[SENDER] = origin.source
            properties[NUMBER] = int(origin.numbers[row])
        properties[PATH] = path
        values[_PROPERTIES_AT] = properties
        found.append(BrokeredMessage(*values))
    return found


_PROPERTIES_AT = APPLICATION_FIELDS.index("application_properties")
_STORED: Mapping[str, Callable[[Any], Any]] = {  # type of an alias -> its value as columns store it
    "str": str,
    "timedelta": lambda life: timedelta(microseconds=to_us(life)),
    "datetime": lambda moment: from_us(moment_us(moment)),
}
_ALIASED_FIELDS = tuple(
    (APPLICATION_FIELDS.index(name), alias, _STORED[ALIASES[alias]])
    for name, alias in ALIASED_COLUMNS.items()
)


@dataclass(frozen=True, slots=True)
class _Additions:
    """One property to add to some rows of a batch."""

    name: str
    rows: Indices
    values: pa.Array  # one per row


def diverted(batch: pa.RecordBatch, path: str, origin: Origin | None = None) -> pa.RecordBatch:
    """Return messages in the format of a backlog queue; `origin` if the primary was tried."""
    count = batch.num_rows
    properties = batch.column(_AT["properties"])
    _refuse_reserved(properties)
    additions = []
    for column, alias in ALIASED_COLUMNS.items():
        original = batch.column(_AT[column])
        if original.null_count == count:
            continue
        rows = np.flatnonzero(original.is_valid().to_numpy(zero_copy_only=False))
        additions.append(_Additions(alias, rows, original.take(pa.array(rows))))
        batch = _replaced(batch, column, pa.nulls(count, original.type))
    if origin is not None:
        rows = np.arange(count)
        additions.append(_Additions(SENDER, rows, _texts(origin.source, count)))
        additions.append(_Additions(NUMBER, rows, pa.array(np.asarray(origin.numbers, np.int64))))
    if additions or not _is_empty(properties):
        additions.append(_Additions(PATH, np.arange(count), _texts(path, count)))
        properties = _with(properties, additions)
    else:
        only = _only_path if count <= FEW_MESSAGES else _only_path.__wrapped__
        properties = only(path, count)
    return _replaced(batch, "properties", properties)


def _texts(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


_AT = {name: at for at, name in enumerate(MESSAGE_SCHEMA.names)}


def _replaced(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(_AT[name], MESSAGE_SCHEMA.field(name), column)


def check_divertible(
    messages: Sequence[BrokeredMessage] | pa.RecordBatch, path: str, origin: Origin
) -> None:
    """Refuse messages that could not be diverted: too large, or with a reserved property."""
    grown = sizes(to_backlog(messages, path, origin))
    if len(grown) and grown.max() > MAX_MESSAGE_BYTES:
        raise no_head_room(int(grown.argmax()), int(grown.max()), MAX_MESSAGE_BYTES)


def no_head_room(row: int, size: int, limit: int) -> MessageSizeExceededError:
    """Return the error for a message that is too large for a backlog queue."""
    return MessageSizeExceededError(
        f"message {row} cannot be diverted to the backlog: it has {size} bytes with the properties "
        f"that diverting adds, and the limit is {limit}. Leave head-room for these properties: "
        f"make the message at least {size - limit} bytes smaller",
        size=size,
        limit=limit,
    )


def _is_empty(properties: pa.Array) -> bool:
    offsets = map_offsets(properties)
    return bool(offsets[0] == offsets[-1])


def _entries(properties: pa.Array) -> tuple[pa.Array, pa.Array, Indices]:
    """Return names, values and the row of each property."""
    offsets = map_offsets(properties)
    rows = np.repeat(np.arange(len(properties)), np.diff(offsets))
    return *property_entries(properties, offsets), rows


def check_reserved(messages: Sequence[BrokeredMessage] | pa.RecordBatch) -> None:
    """Refuse messages with properties of reserved names, so that all of them can be diverted."""
    if isinstance(messages, pa.RecordBatch):
        _refuse_reserved(conform(messages).column("properties"))
        return
    for row, message in enumerate(messages):
        properties = getattr(message, "application_properties", None)  # the client checks the type
        if properties and not _RESERVED.isdisjoint(properties):
            raise _reserved(row, next(name for name in properties if name in _RESERVED))


_RESERVED = frozenset(ALIASES)


def _reserved(row: int, name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"message {row} has an application property {name!r}; that name is reserved for diverted "
        "messages. Rename the property"
    )


def _refuse_reserved(properties: pa.Array) -> None:
    if _is_empty(properties):
        return
    names, _, rows = _entries(properties)
    taken = pc.is_in(names, value_set=_ALIAS_NAMES).to_numpy(zero_copy_only=False)
    if taken.any():
        at = int(np.flatnonzero(taken)[0])
        raise _reserved(int(rows[at]), names[at].as_py())


_ALIAS_NAMES = pa.array(list(ALIASES), pa.string())


@lru_cache(maxsize=4096)
def _only_path(path: str, count: int) -> pa.Array:
    """Return the properties of diverted messages that had none; cached, as most sends need it."""
    names, values = _texts(PATH, count), _values({"str": _texts(path, count)})
    return _map_of(names, values, np.arange(count), count)


def _with(properties: pa.Array, additions: Sequence[_Additions]) -> pa.Array:
    """Return the properties of each row with the additions behind them."""
    names, values, rows = _entries(properties)
    every_name = pa.concat_arrays([names, *(_texts(a.name, len(a.rows)) for a in additions)])
    every_row = np.concatenate([rows, *(a.rows for a in additions)])
    order = pa.array(np.argsort(every_row, kind="stable"))
    children = {}
    for at, (child, kind) in enumerate(PROPERTY_TYPES.items()):
        existing = values.field(at)
        is_added = any(ALIASES[a.name] == child for a in additions)
        if existing.null_count == len(existing) and not is_added:
            continue  # most children are empty, and sorting a column of nulls costs time
        pieces = [
            a.values if ALIASES[a.name] == child else pa.nulls(len(a.rows), kind) for a in additions
        ]
        children[child] = pa.concat_arrays([existing, *pieces]).take(order)
    return _map_of(every_name.take(order), _values(children), every_row, len(properties))


def _values(children: Mapping[str, pa.Array]) -> pa.Array:
    """Return a column of property values; children that are not given are null."""
    count = len(next(iter(children.values())))
    arrays = [
        children[name] if name in children else pa.nulls(count, kind)
        for name, kind in PROPERTY_TYPES.items()
    ]
    return pa.StructArray.from_arrays(arrays, fields=_VALUE_FIELDS)


_VALUE_FIELDS = list(PROPERTIES_TYPE.item_type)


def _map_of(names: pa.Array, values: pa.Array, rows: Indices, count: int) -> pa.Array:
    """Return a map column; the entries must be in the order of their rows."""
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return pa.MapArray.from_arrays(pa.array(offsets), names, values, type=PROPERTIES_TYPE)


# -- restoring -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """Messages of a backlog queue as they were sent, and the entity of each."""

    batch: pa.RecordBatch  # MESSAGE_SCHEMA; rows in `faults` are not fully restored
    paths: pa.Array  # text; null: the message has no path
    senders: pa.Array  # text; null: the primary was not tried
    numbers: pa.Array  # the number of each message at its sender; null as in `senders`
    faults: Mapping[int, str]  # row -> why the message cannot be brought home


def restored(batch: pa.RecordBatch) -> Restored:
    """Return diverted messages as they were sent."""
    count = batch.num_rows
    names, values, rows = _entries(batch.column("properties"))
    faults: dict[int, str] = {}
    aliases = {alias: _alias_column(alias, names, values, rows, count, faults) for alias in ALIASES}
    for row in np.flatnonzero(byte_lengths(aliases[PATH]) == 0).tolist():
        faults.setdefault(row, f"it has no property {PATH}, so its entity is unknown")
    _check_senders(aliases[SENDER], aliases[NUMBER], faults)
    columns: dict[str, Any] = {name: batch.column(name) for name in MESSAGE_SCHEMA.names}
    for column, alias in ALIASED_COLUMNS.items():
        if aliases[alias].null_count != count:
            columns[column] = pc.coalesce(aliases[alias], columns[column])
    is_own = pc.invert(pc.is_in(names, value_set=_ALIAS_NAMES))
    own_rows = rows[is_own.to_numpy(zero_copy_only=False).astype(bool)]
    columns["properties"] = _map_of(names.filter(is_own), values.filter(is_own), own_rows, count)
    messages = pa.RecordBatch.from_arrays(list(columns.values()), schema=MESSAGE_SCHEMA)
    return Restored(messages, aliases[PATH], aliases[SENDER], aliases[NUMBER], faults)


def _check_senders(senders: pa.Array, numbers: pa.Array, faults: dict[int, str]) -> None:
    """Add a fault for each row with an invalid sender, or with only one of sender and number."""
    if senders.null_count == len(senders) and numbers.null_count == len(numbers):
        return
    halves = pc.xor(senders.is_null(), numbers.is_null()).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(halves).tolist():
        faults.setdefault(row, f"it has only one of {SENDER} and {NUMBER}, which belong together")
    negative = pc.less(numbers, 0).fill_null(False).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(negative).tolist():
        faults.setdefault(row, f"its property {NUMBER} is negative")
    encoded = senders.dictionary_encode()
    unknown = [at for at, name in enumerate(encoded.dictionary.to_pylist()) if not _is_sender(name)]
    codes = encoded.indices.fill_null(-1).to_numpy()
    for row in np.flatnonzero(np.isin(codes, unknown)).tolist():
        faults.setdefault(row, f"its property {SENDER} is not a valid sender")


def _is_sender(name: str) -> bool:
    return sender_number(name) is not None


_NAMES = {alias: pa.scalar(alias, pa.string()) for alias in ALIASES}


def _alias_column(
    alias: str,
    names: pa.Array,
    values: pa.Array,
    rows: Indices,
    count: int,
    faults: dict[int, str],
) -> pa.Array:
    """Return an alias as a column; add a fault for each row where its type or count is wrong."""
    at = np.flatnonzero(pc.equal(names, _NAMES[alias]).to_numpy(zero_copy_only=False))
    if not len(at):
        return pa.nulls(count, PROPERTY_TYPES[ALIASES[alias]])
    found = values.field(ALIASES[alias]).take(pa.array(at))
    for row in rows[at][found.is_null().to_numpy(zero_copy_only=False)].tolist():
        faults.setdefault(row, f"its property {alias} must be of type {ALIASES[alias]}")
    times = np.bincount(rows[at], minlength=count)
    for row in np.flatnonzero(times > 1).tolist():
        faults.setdefault(row, f"it has the property {alias} {times[row]} times")
    where = np.full(count, -1, np.int64)
    where[rows[at]] = np.arange(len(at))
    return found.take(pa.array(where, mask=where < 0))
