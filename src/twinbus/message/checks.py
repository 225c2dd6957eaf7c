"""Checks of batches from clients: columns can have values that no message object can have.

Text must be valid UTF-8, times must be within the years that a datetime has, and each property has
one name and exactly one value. The broker checks each batch before it stores it.
"""

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus import compute as pc
from twinbus.errors import InvalidArgumentError
from twinbus.limits import MAX_PROPERTY_NAME_CHARACTERS
from twinbus.message.measures import byte_lengths
from twinbus.message.properties import map_offsets, property_entries
from twinbus.message.schema import (
    FIRST_MOMENT_US,
    LAST_MOMENT_US,
    PROPERTY_TYPES,
    TEXT_COLUMNS,
)


def check_values(columns: Mapping[str, pa.Array]) -> None:
    """Refuse values that no message object can have, given the columns in use."""
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
    """Refuse times that no datetime can express."""
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
            f"the shortest name of a property has {int(lengths.min())} bytes, and the longest has "
            f"{longest} characters; a name must have 1 to {MAX_PROPERTY_NAME_CHARACTERS} characters"
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
    """Refuse messages with two properties of one name: it is undefined which of them counts."""
    widths = np.diff(offsets)
    widest = int(widths.max())
    if widest < 2:
        return
    codes = names.dictionary_encode().indices.to_numpy().astype(np.int64)
    if widest <= 8 and (widths == widest).all():  # true of most batches: compare by position
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
        raise InvalidArgumentError(
            "a message has two properties with the same name. Use each name once"
        )
