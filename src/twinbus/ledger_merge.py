"""Merges the small files of a finished day of a ledger into one.

A quiet namespace writes a file a minute, and a reader spends more time on opening 1,440 small files
a day than on their rows. Files that are large already stay as they are, so that the rows of a busy
day are not written again.

The metadata of the merged file names the files that it replaces. It appears whole, and then these
files are deleted. A reader may find the merged file and the replaced ones, because it looked in
between or because the process was killed there. It ignores the replaced files, so no row counts
twice. Processes that share a folder take turns by a lock on the folder.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from twinbus.limits import LEDGER_FILE_ROWS, MERGED_FILES, SMALL_FILE_ROWS

REPLACES_KEY = "twinbus.ledger.replaces"


def replaced_by(metadata: Mapping[str, str]) -> frozenset[str]:
    """Return from the metadata of a file the names of the files that it replaces."""
    try:
        names = json.loads(metadata.get(REPLACES_KEY, "[]"))
    except ValueError:
        return frozenset()
    return frozenset(map(str, names)) if isinstance(names, list) else frozenset()


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Try to lock the folder for merging; yield whether it succeeded."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def small_files(files: Iterable[Path]) -> list[Path]:
    """Return the files worth merging: none if there is only one. Raise if a file is damaged."""
    small = [path for path in files if pq.read_metadata(path).num_rows < SMALL_FILE_ROWS]
    return small[:MERGED_FILES] if len(small) > 1 else []


def leftovers(files: Sequence[Path]) -> list[Path]:
    """Return the files that others replace: a process was killed before it deleted them."""
    replaced = {
        name for path in files for name in replaced_by(_texts(pq.read_metadata(path).metadata))
    }
    return [path for path in files if path.name in replaced]


def write_merged(
    files: Sequence[Path],
    schema: pa.Schema,
    layout: Mapping[str, Any],
    metadata: Mapping[str, str],
    target: BinaryIO,
) -> None:
    """Write the rows of files to one file; about one row group at a time is in memory."""
    names = json.dumps([path.name for path in files])
    with pq.ParquetWriter(target, schema, **layout) as writer:
        writer.add_key_value_metadata({**metadata, REPLACES_KEY: names})
        tables: list[pa.Table] = []
        count = 0
        for path in files:
            tables.append(pq.read_table(path, partitioning=None).cast(schema))
            count += tables[-1].num_rows
            if count >= LEDGER_FILE_ROWS:
                writer.write_table(pa.concat_tables(tables), LEDGER_FILE_ROWS)
                tables, count = [], 0
        if tables:
            writer.write_table(pa.concat_tables(tables), LEDGER_FILE_ROWS)


def _texts(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (metadata or {}).items()
    }
