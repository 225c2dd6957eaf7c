"""The sentences the tests of the log are written in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from twinbus.broker.store.log import Log
from twinbus.broker.store.log_format import ALIGNMENT, SCHEMAS, Part, PartKind, Record
from twinbus.broker.store.storage import Storage
from twinbus.message import BrokeredMessage, to_batch

RECORD_HEADER_BYTES = 32  # the rest of its 64 bytes is zeros that nothing depends on


def saying(text: str) -> list[Part]:
    """Return a record that holds a text."""
    columns = [["text"], [text], [None]]
    arrays = [
        pa.array(column, kind)
        for column, kind in zip(columns, SCHEMAS[PartKind.FACTS].types, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMAS[PartKind.FACTS])
    return [Part(PartKind.FACTS, batch)]


def carrying(body: bytes) -> list[Part]:
    """Return a record that holds a message."""
    return [Part(PartKind.MESSAGES, to_batch([BrokeredMessage(body=body)]), number=1)]


def texts_of(records: list[Record]) -> list[str]:
    """Return the texts of records; a message counts as one."""
    texts = []
    for record in records:
        part, _ = record.parts[0]
        texts.append(part.columns.column("key")[0].as_py() if part.kind == 1 else "message")
    return texts


@contextmanager
def opened(
    directory: Path, storage: Storage | None = None, **settings: Any
) -> Iterator[tuple[Log, list[Record]]]:
    log = Log(directory, storage, **settings)
    try:
        yield log, list(log.replay())
    finally:
        log.close()


@contextmanager
def opened_until_killed(
    directory: Path, storage: Storage | None = None
) -> Iterator[tuple[Log, list[Record]]]:
    log = Log(directory, storage)
    yield log, list(log.replay())
    log.crash()


def write(directory: Path, *texts: str, **settings: Any) -> None:
    with opened(directory, **settings) as (log, _):
        for text in texts:
            log.append(saying(text))


def read(directory: Path, **settings: Any) -> list[str]:
    with opened(directory, **settings) as (_, records):
        return texts_of(records)


def only_segment(directory: Path) -> Path:
    [path] = directory.glob("*.log")
    return path


def without_zeros(content: bytes) -> bytes:
    """Return bytes without the zeros at their end, which look like unwritten space."""
    return content.rstrip(b"\0")


def record_starts(directory: Path) -> list[int]:
    """Return where the records of the first segment start."""
    with opened(directory) as (_, records):
        headers = ALIGNMENT + ALIGNMENT  # of the record and of its one part
        return [record.parts[0][1].offset - headers for record in records]
