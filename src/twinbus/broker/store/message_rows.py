"""A few messages as a part of a record: as rows instead of columns.

Nearly every turn of a quiet broker has one message. Columns of one message take ten times as long
to create as a row, and twice the space of the message. So the log stores a few messages as rows:

    +0   4  "ROWS", with which no Arrow record batch begins
    +4   4  length of the rows
    +8      the rows as MessagePack, then the bodies: as on the wire (protocol/rows.py)

Columns are created when a message is read as part of a batch. Replay and the ledger need none.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from twinbus.message import APPLICATION_FIELDS, BrokeredMessage, Int64s, sizes, to_batch
from twinbus.protocol.rows import decode_rows, encode_rows, split_rows

_MAGIC = b"ROWS"
_HEAD = struct.Struct("<4sI")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class MessageRows:
    """A few messages for the log.

    The constructor encodes them, so that an encoding error fails their send and not the turn.
    """

    __slots__ = ("_content", "_messages")

    def __init__(self, messages: Sequence[BrokeredMessage]) -> None:
        self._messages = messages
        rows, bodies = encode_rows(messages)
        head = _encode(rows)
        self._content = b"".join((_HEAD.pack(_MAGIC, len(head)), head, *bodies))

    @property
    def messages(self) -> Sequence[BrokeredMessage]:
        """The messages."""
        return self._messages

    @property
    def num_rows(self) -> int:
        """The number of messages."""
        return len(self._messages)

    def serialize(self) -> bytes:
        """Return the encoded part."""
        return self._content

    def ids(self) -> tuple[str | None, ...]:
        """Return the ids of the messages."""
        if len(self._messages) == 1:
            return (self._messages[0].message_id,)
        return tuple([message.message_id for message in self._messages])

    def sizes(self) -> Int64s:
        """Return the sizes of the messages."""
        return sizes(self.messages)

    def batch(self) -> pa.RecordBatch:
        """Return the messages as columns."""
        return to_batch(self.messages)


class StoredRows(MessageRows):
    """Rows read from the log: a view of the file until the messages are needed."""

    __slots__ = ("_bodies", "_rows", "_split")

    def __init__(self, content: memoryview) -> None:
        _, length = _HEAD.unpack_from(content)
        end = _HEAD.size + length
        self._rows, self._bodies = content[_HEAD.size : end], content[end:]
        self._split: list[tuple[list[Any], memoryview]] | None = None

    @property
    def messages(self) -> Sequence[BrokeredMessage]:
        """The messages, decoded each time: at a start they may not fit into memory."""
        return decode_rows(_decode(self._rows), self._bodies)

    @property
    def num_rows(self) -> int:
        """The number of messages."""
        return len(_decode(self._rows))

    def ids(self) -> tuple[str | None, ...]:
        """Return the ids of the messages."""
        return tuple(self.texts("message_id"))

    def texts(self, name: str) -> list[str | None]:
        """Return a text field of the messages."""
        at = APPLICATION_FIELDS.index(name)
        return [row[at] if len(row) > at else None for row in _decode(self._rows)]

    def row(self, number: int) -> tuple[list[Any], memoryview]:
        """Return a row as it is stored, and its body as a view of the file."""
        if self._split is None:
            self._split = list(split_rows(_decode(self._rows), self._bodies))
        return self._split[number]


def rows_in(content: pa.Buffer) -> StoredRows | None:
    """Return the rows in a part of the log; None if it has columns."""
    view = memoryview(content)
    return StoredRows(view) if view[: len(_MAGIC)] == _MAGIC else None
