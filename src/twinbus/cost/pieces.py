"""The pieces of ledgers that Spark's tasks read, and how tasks pass Arrow tables to each other.

A piece is read in a worker: pyarrow reads row groups of a local file, without Java. The workers do
not reach other file systems, so Spark's JVM reads those files and gives the workers Arrow batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from twinbus.ledger import SCHEMAS, LedgerKind
from twinbus.limits import FILE_WEIGHT

CANNOT_OPEN = "FAILED_READ_FILE.CANNOT_OPEN"


class LedgerFileError(Exception):
    """A worker cannot read a ledger file.

    The text has the form of the errors of Spark's JVM, so that the report recognises both.
    """

    def __init__(self, path: str, cause: Exception) -> None:
        is_closed = isinstance(cause, FileNotFoundError | PermissionError)
        condition = CANNOT_OPEN if is_closed else "FAILED_READ_FILE"
        super().__init__(f"[{condition}] file://{quote(path)} : {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RuntimeError, self.args


class Piece(Protocol):
    """Some rows of one ledger."""

    @property
    def kind(self) -> LedgerKind:
        """The kind of its rows."""

    @property
    def ledger(self) -> int:
        """The index of its ledger."""

    @property
    def is_before(self) -> bool:
        """Whether its rows are of the day before the first day of the report."""

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows in tables of one row group each."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Row groups of a file that workers can open."""

    kind: LedgerKind
    ledger: int
    is_before: bool
    path: str
    groups: tuple[int, ...]  # rows of each row group, or 0 for a group of another piece

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(self.groups)

    @property
    def weight(self) -> int:
        """The time to read the piece, as the number of rows that take as long."""
        return self.rows + FILE_WEIGHT

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows in tables of one row group each."""
        texts = [c.name for c in SCHEMAS[self.kind] if c.type == pa.string()]
        repeated = [name for name in texts if name != "message_id"]
        try:
            with pq.ParquetFile(
                self.path, page_checksum_verification=True, read_dictionary=repeated
            ) as file:
                for group, rows in enumerate(self.groups):
                    if rows:
                        yield file.read_row_group(group, [*columns], use_threads=False)
        except MemoryError:  # also Arrow's: the file is not damaged
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise LedgerFileError(self.path, error) from error


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """An Arrow batch that Spark's JVM has read."""

    kind: LedgerKind
    ledger: int
    is_before: bool
    columns: tuple[str, ...]  # the columns of the batch
    content: bytes

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows in a table."""
        kinds = SCHEMAS[self.kind]
        schema = pa.schema([kinds.field(name) for name in self.columns])
        batch = pa.ipc.read_record_batch(pa.py_buffer(self.content), schema)
        table = pa.Table.from_batches([batch]).select([*columns])
        for at, column in enumerate(table.schema):
            if column.type == pa.string() and column.name != "message_id":
                codes = table.column(at).dictionary_encode()
                table = table.set_column(at, column.name, codes)
        yield table


def cut(pieces: Sequence[FilePiece], tasks: int) -> list[list[FilePiece]]:
    """Divide pieces into lists that take about the same time."""
    bound = sum(piece.weight for piece in pieces) / tasks
    found: list[list[FilePiece]] = [[] for _ in range(tasks)]
    done = 0.0
    for piece in pieces:
        done += FILE_WEIGHT
        places = []
        for rows in piece.groups:
            places.append(min(int((done + rows / 2) / bound), tasks - 1))
            done += rows
        for task in sorted(set(places)):
            own = zip(piece.groups, places, strict=True)
            groups = tuple(rows if place == task else 0 for rows, place in own)
            found[task].append(replace(piece, groups=groups))
    return [task for task in found if task]


def packed(table: pa.Table) -> bytes:
    """Return a table as bytes, for another task.

    Spark copies the bytes of a row between processes several times, which takes longer than to
    compress them to a quarter.
    """
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1), use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    content: bytes = sink.getvalue().to_pybytes()
    return content


def unpacked(tables: Sequence[bytes], schema: pa.Schema) -> pa.Table:
    """Return several packed tables as one, in one chunk."""
    options = pa.ipc.IpcReadOptions(use_threads=False)
    found = [pa.ipc.open_stream(content, options=options).read_all() for content in tables]
    return pa.concat_tables([schema.empty_table(), *found]).combine_chunks()


def codes_of(column: pa.ChunkedArray, codes: Mapping[str, int]) -> Any:
    """Return the codes of the texts in a column as a numpy array; -1 for null and other texts."""
    parts = []
    for chunk in column.chunks:
        encoded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        known = [codes.get(text, -1) for text in encoded.dictionary.to_pylist()]
        own = np.array([*known, -1], np.int32)
        parts.append(own[encoded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)])
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
