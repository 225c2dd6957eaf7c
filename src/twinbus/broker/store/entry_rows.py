"""A few places of messages, or a few message ids, as a part of a record: rows instead of columns.

A place is a message of an entity: its sequence number, its state, and the row of the batch that has
its body (`PlaceRow`). Nearly every turn of a quiet broker adds one place. In the log and in the
ledger, Arrow columns for one place take fifty times as long as its eleven numbers. So the log
stores a few places as rows:

    +0   4  "FEWR", with which no Arrow record batch begins
    +4      MessagePack: a list of rows, each with the values of its kind's columns in their order

Places and ids of duplicate detection are stored this way; see log_format.py for the columns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

_MAGIC = b"FEWR"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class PlaceRow(NamedTuple):
    """Which entity has a message under which number, in which state: the columns of PLACES."""

    entity: int
    sequence: int
    state: int
    failures: int
    enqueued: int
    expires: int
    due: int
    size: int
    death: int
    batch: int
    row: int


class IdRow(NamedTuple):
    """A message id that duplicate detection remembers: the columns of HISTORY."""

    entity: int
    message_id: str
    time: int


class EntryRows:
    """A few entries of one kind, for the log or read from it."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self.rows = rows

    @property
    def num_rows(self) -> int:
        """The number of entries."""
        return len(self.rows)

    def serialize(self) -> bytes:
        """Return the encoded part."""
        return _MAGIC + _encode(self.rows)


def entry_rows_in(content: pa.Buffer) -> EntryRows | None:
    """Return the rows in a part of the log; None if it has columns."""
    view = memoryview(content)
    return EntryRows(_decode(view[len(_MAGIC) :])) if view[: len(_MAGIC)] == _MAGIC else None
