"""Where the message bodies are: the position of each batch in the log, and its number of places.

A place is a message of a queue that refers to a row of a batch. Copies of a topic are several
places of one row.

Batch numbers increase, and the oldest segments are dropped first, so the columns here are a window
over the numbers in use. A body is read as a view of the mapped file, without a copy in memory.
"""

import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import PartPosition
from twinbus.broker.store.message_rows import StoredRows
from twinbus.broker.undo import Undo
from twinbus.limits import OPEN_RECORDS, READ_AHEAD_BYTES, ROWS_AS_ROWS
from twinbus.message import Int64s, to_messages
from twinbus.protocol.rows import encode_rows

_COLUMNS = {
    "segment": np.int64,
    "offset": np.int64,
    "length": np.int64,
    "rows": np.int32,
    "live": np.int32,  # number of places that refer to a row of this batch and are not gone
}


class _Chunk(NamedTuple):
    """A few consecutive messages of a batch as rows."""

    batch: pa.RecordBatch
    first: int
    rows: list[list[Any]]
    bodies: list[bytes]


class Bodies:
    """The message batches of a log."""

    def __init__(self, log: Log, undo: Undo | None = None) -> None:
        self._log = log
        self._undo = undo or Undo()
        self._first = 1  # batch number of the first row of the columns
        self._count = 0
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(64, kind) for name, kind in _COLUMNS.items()
        }
        self.released = 0  # number of places that were released since the start
        self.live_bytes = 0.0  # approximate size of the messages that are not gone
        self._open: OrderedDict[int, pa.RecordBatch | StoredRows] = OrderedDict()
        self._chunk: _Chunk | None = None  # the one that was created last

    @property
    def next_number(self) -> int:
        """The number of the next batch."""
        return self._first + self._count

    def add(self, number: int, place: PartPosition, rows: int) -> None:
        """Register a durable batch."""
        if not self._count:
            self._first = number
        position = number - self._first
        if position >= len(self._columns["rows"]):
            for name, column in self._columns.items():
                grown = np.zeros(2 * position, column.dtype)
                grown[: len(column)] = column
                self._columns[name] = grown
        columns = self._columns
        if position > self._count:
            columns["segment"][self._count : position] = place.segment  # for lost batches
        columns["segment"][position], columns["offset"][position] = place.segment, place.offset
        columns["length"][position], columns["rows"][position] = place.length, rows
        columns["live"][position] = 0
        self._count = position + 1

    def contains(self, numbers: Int64s) -> npt.NDArray[np.bool_]:
        """Return which of these batches are in the log."""
        position = numbers - self._first
        inside = (position >= 0) & (position < self._count)
        rows = self._columns["rows"][np.where(inside, position, 0)]
        return inside & (rows > 0)

    def are_single(self, numbers: Int64s) -> bool:
        """Return whether each of these batches has one message."""
        return bool((self._columns["rows"][numbers - self._first] == 1).all())

    def retain(self, numbers: Int64s) -> None:
        """Add one place for each item; a batch number may occur several times."""
        self._count_places(numbers, 1)

    def retain_rows(self, number: int, count: int) -> None:
        """Add `count` places of one batch."""
        self._count_batch(number - self._first, count)

    def release(self, numbers: Int64s) -> None:
        """Remove one place for each item; a batch number may occur several times."""
        self._count_places(numbers, -1)
        self.released += len(numbers)
        self._undo.note(lambda: self._count_places(numbers, 1))

    def release_one(self, number: int) -> None:
        """Remove a place of one batch."""
        self._count_batch(number - self._first, -1)
        self.released += 1
        self._undo.note(lambda: self._count_batch(number - self._first, 1))

    def _count_places(self, numbers: Int64s, sign: int) -> None:
        if not len(numbers):
            return
        first, last = int(numbers.min()), int(numbers.max())
        if first == last:
            self._count_batch(first - self._first, sign * len(numbers))
            return
        if last - first <= 4 * len(numbers):  # dense, as the messages of one send are
            at = np.arange(first, last + 1) - self._first
            places = sign * np.bincount(numbers - first)
        else:
            unique, counts = np.unique(numbers, return_counts=True)
            at, places = unique - self._first, sign * counts
        rows, before = self._columns["rows"][at], self._columns["live"][at]
        after = self._columns["live"][at] = before + places
        # A topic uses a row repeatedly, so a batch may have more places than rows.
        present = np.minimum(after, rows) - np.minimum(before, rows)
        per_row = self._columns["length"][at] / np.maximum(rows, 1)
        self.live_bytes += float((present * per_row).sum())

    def _count_batch(self, at: int, places: int) -> None:
        """Change the places of one batch, as nearly every send and settlement does."""
        live, rows = self._columns["live"], int(self._columns["rows"][at])
        before = int(live[at])
        live[at] = before + places
        present = min(before + places, rows) - min(before, rows)
        self.live_bytes += present * int(self._columns["length"][at]) / max(rows, 1)

    def fetch(self, numbers: Int64s, rows: npt.NDArray[np.int32]) -> pa.RecordBatch:
        """Return these messages, in this order, as one batch."""
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        bounds = [0, *cuts.tolist(), len(numbers)]
        pieces = [
            _pick(self._batch(int(numbers[start])), rows[start:end])
            for start, end in itertools.pairwise(bounds)
        ]
        return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)

    def texts(self, name: str, numbers: Int64s, rows: npt.NDArray[np.int32]) -> list[str | None]:
        """Return a text field of these messages, without reading their bodies.

        The value is None for messages whose batch is no longer in the log.
        """
        present = self.contains(numbers)
        if not present.all():
            found = iter(self.texts(name, numbers[present], rows[present]) if present.any() else ())
            return [next(found) if is_present else None for is_present in present]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        bounds = [0, *cuts.tolist(), len(numbers)]
        texts: list[str | None] = []
        for start, end in itertools.pairwise(bounds):
            part = self._part(int(numbers[start]))
            if isinstance(part, StoredRows):
                named = part.texts(name)
                texts.extend(named[row] for row in rows[start:end].tolist())
            else:
                column = part.column(name)
                texts.extend(column.take(pa.array(rows[start:end])).to_pylist())
        return texts

    def start_at(self, number: int) -> None:
        """Begin with this batch number if the log has no batch."""
        if not self._count:
            self._first = max(self._first, number)

    def row(self, number: int, row: int) -> tuple[list[Any], bytes | memoryview]:
        """Return one message as a row, and its body."""
        part = self._part(number)
        if isinstance(part, StoredRows):
            return part.row(row)
        chunk = self._chunk
        if chunk is None or chunk.batch is not part or not 0 <= row - chunk.first < len(chunk.rows):
            # A receiver that takes one message at a time will ask for the next one soon, and to
            # convert several rows of columns takes hardly longer than one.
            count = max(1, min(ROWS_AS_ROWS, READ_AHEAD_BYTES * part.num_rows // part.nbytes))
            messages = to_messages(part.slice(row, count))
            chunk = self._chunk = _Chunk(part, row, *encode_rows(messages))
        return chunk.rows[row - chunk.first], chunk.bodies[row - chunk.first]

    def _batch(self, number: int) -> pa.RecordBatch:
        part = self._part(number)
        if isinstance(part, StoredRows):
            part = self._open[number] = part.batch()
        return part

    def _part(self, number: int) -> pa.RecordBatch | StoredRows:
        part = self._open.get(number)
        if part is None:
            position = number - self._first
            segment, offset, length = (
                int(self._columns[name][position]) for name in ("segment", "offset", "length")
            )
            part = self._log.read_stored(PartPosition(segment, offset, length))
            self._open[number] = part
            if len(self._open) > OPEN_RECORDS:
                self._open.popitem(last=False)
        return part

    # -- space ---------------------------------------------------------------------------------

    @property
    def places(self) -> int:
        """The number of places that are not gone; copies of a topic count separately."""
        return int(self._columns["live"][: self._count].sum())

    def numbers_in(self, segment: int) -> tuple[int, int]:
        """Return the first and last batch number of a segment; last < first: it has no batch."""
        segments = self._columns["segment"][: self._count]
        low = int(np.searchsorted(segments, segment))
        high = int(np.searchsorted(segments, segment, side="right"))
        return low + self._first, high - 1 + self._first

    def live_in(self, segment: int) -> int:
        """Return the number of places that refer to a segment."""
        first, last = self.numbers_in(segment)
        return int(self._columns["live"][first - self._first : last + 1 - self._first].sum())

    def live_bytes_in(self, segment: int) -> float:
        """Return the approximate size of the messages of a segment that are not gone."""
        first, last = self.numbers_in(segment)
        part = slice(first - self._first, last + 1 - self._first)
        rows, live = self._columns["rows"][part], self._columns["live"][part]
        per_row = self._columns["length"][part] / np.maximum(rows, 1)
        return float((np.minimum(live, rows) * per_row).sum())

    def stored_bytes(self, numbers: Int64s) -> float:
        """Return the approximate size of one message for each item; items are batch numbers."""
        at = numbers - self._first
        return float((self._columns["length"][at] / np.maximum(self._columns["rows"][at], 1)).sum())

    def forget(self, segment: int) -> None:
        """Forget the batches of a dropped segment, which are the oldest."""
        first, last = self.numbers_in(segment)
        self._chunk = None
        for number in [number for number in self._open if first <= number <= last]:
            del self._open[number]
        if last < first:
            return
        dropped = last - self._first + 1
        for name, column in self._columns.items():
            kept = column[dropped : self._count]
            self._columns[name] = np.concatenate([kept, np.zeros(64, column.dtype)])
        self._first += dropped
        self._count -= dropped


def _pick(batch: pa.RecordBatch, rows: npt.NDArray[np.int32]) -> pa.RecordBatch:
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and (count < 3 or (np.diff(rows) == 1).all()):
        return batch.slice(first, count)
    return batch.take(pa.array(rows))
