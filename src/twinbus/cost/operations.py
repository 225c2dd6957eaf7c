"""Billable operations by day, ledger, entity and stage, from metered rows.

Tasks add up the rows of their pieces with numpy arrays, and return only sums. A task reads
consecutive days, so few keys have sums from several tasks; the driver adds those.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.cost.facts import integers, moments
from twinbus.cost.pieces import Piece, codes_of
from twinbus.cost.prices import PriceSheet
from twinbus.cost.stages import Basis, rule_of
from twinbus.limits import DAY_US, REPORT_PARTITION_ROWS
from twinbus.message import Int64s
from twinbus.protocol.operations import Purpose

OPERATION_COLUMNS = (
    "bucket", "path", "operation", "purpose", "outcome", "count", "messages", "bytes", "units",
)  # fmt: skip
KEYS, SUMS = ["day", "ledger", "path", "stage"], ["operations", "messages", "bytes"]
STAGED = pa.schema(
    [
        ("day", pa.date32()),
        *((name, pa.string()) for name in KEYS[1:]),
        *((name, pa.int64()) for name in SUMS),
    ]
)
_KIND = ("operation", "purpose", "outcome")
_BASES = tuple(Basis)


@dataclass(frozen=True, slots=True)
class MeteredSums:
    """What a task has added up."""

    staged: pa.Table
    begins: int | None  # of the metered time, in microseconds; None: there are no rows
    ends: int | None


def add_up(pieces: Iterable[Piece], sheet: PriceSheet, ledgers: Sequence[str]) -> MeteredSums:
    """Add up pieces of ledgers of operations, as a price sheet bills them."""
    pending: list[pa.Table] = []
    count, begins, ends = 0, None, None
    for piece in pieces:
        for table in piece.tables(OPERATION_COLUMNS):
            if not table.num_rows:
                continue
            bucket = moments(table.column("bucket"))
            low, high = int(bucket.min()), int(bucket.max())
            begins = low if begins is None else min(begins, low)
            ends = high if ends is None else max(ends, high)
            found = [*_staged(table, bucket, sheet, ledgers[piece.ledger])]
            pending += found
            count += sum(map(len, found))
            if count >= REPORT_PARTITION_ROWS:
                pending = [summed(pending)]
                count = len(pending[0])
    return MeteredSums(summed(pending), begins, ends)


def summed(tables: Sequence[pa.Table], keys: Sequence[str] = KEYS) -> pa.Table:
    """Return the sums of staged rows by some of their keys, in the order of the keys."""
    schema = pa.schema([STAGED.field(name) for name in (*keys, *SUMS)])
    rows = pa.concat_tables([schema.empty_table(), *(t.select(schema.names) for t in tables)])
    wanted = [(name, "sum") for name in SUMS]
    found = rows.combine_chunks().group_by([*keys], use_threads=False).aggregate(wanted)
    found = found.rename_columns([name.removesuffix("_sum") for name in found.column_names])
    return found.select(schema.names).sort_by([(key, "ascending") for key in keys])


def _staged(table: pa.Table, bucket: Int64s, sheet: PriceSheet, ledger: str) -> Iterator[pa.Table]:
    """Yield the operations of each day by entity and stage."""
    paths = sorted({"", *_texts(table, "path")})
    path = codes_of(table.column("path"), {text: at for at, text in enumerate(paths)})
    path = np.maximum(path, 0).astype(np.int64)
    basis, stage, stages = _rules_of(table, sheet)
    billed = np.select(
        [basis == at for at in range(len(_BASES))],
        [integers(table.column(base.value)) for base in _BASES],
    )
    days = bucket // DAY_US
    width = max(len(stages), 1)
    for day in np.unique(days).tolist():
        which = (stage >= 0) & (days == day)
        which_all = slice(None) if which.all() else which
        keys = (path * width + stage)[which_all]
        size = len(paths) * width
        rows = np.bincount(keys, minlength=size)
        sums = []
        for values in (billed, integers(table.column("messages")), integers(table.column("bytes"))):
            sums.append(np.zeros(size, np.int64))
            np.add.at(sums[-1], keys, values[which_all])
        found = np.flatnonzero(rows)
        yield pa.table(
            [
                pa.array(np.full(len(found), day, np.int32)).cast(pa.date32()),
                pa.repeat(ledger, len(found)),
                pa.array(paths).take(pa.array(found // width)),
                pa.array(stages, pa.string()).take(pa.array(found % width)),
                *(pa.array(values[found]) for values in sums),
            ],
            schema=STAGED,
        )


def _texts(table: pa.Table, name: str) -> list[str]:
    found = {text for chunk in table.column(name).chunks for text in chunk.dictionary.to_pylist()}
    return sorted(found)


def _rules_of(
    table: pa.Table, sheet: PriceSheet
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[str]]:
    """Return basis and stage of each row, as indexes, -1 without a stage; and the stages."""
    texts = [_texts(table, name) for name in _KIND]
    kinds = np.zeros(len(table), np.int64)
    for name, known in zip(_KIND, texts, strict=True):
        own = codes_of(table.column(name), {text: at for at, text in enumerate(known)})
        kinds = kinds * len(known) + own
    size = int(np.prod([len(known) for known in texts]))
    bases, places = np.full(size, -1), np.full(size, -1)
    stages: list[str] = []
    for kind in np.flatnonzero(np.bincount(kinds, minlength=size)).tolist():
        places_of_texts = np.unravel_index(kind, [len(known) for known in texts])
        operation, purpose, outcome = (
            known[int(at)] for known, at in zip(texts, places_of_texts, strict=True)
        )
        rule = rule_of(operation, Purpose(purpose), outcome)
        if rule is not None and sheet.bills(rule.stage):
            if rule.stage.value not in stages:
                stages.append(rule.stage.value)
            bases[kind] = _BASES.index(rule.basis)
            places[kind] = stages.index(rule.stage.value)
    return bases[kinds], places[kinds], stages


def rows_of(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table in Python."""
    yield from zip(*(column.to_pylist() for column in table.columns), strict=True)
