"""Summarises transfers by destination: counts, delays, and how much the order changed.

Runs in the buckets of destinations. A diverted message is behind by the number of later messages
that arrived before it. A task has in memory the diverted messages of a destination, and
about REPORT_PARTITION_ROWS of its other messages: Spark sorts the diverted ones first.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.cost.answers import EntityTransfers
from twinbus.cost.exchange import DEAD, HOME, SCHEMAS, Content, Counts, Kind, tables_of
from twinbus.cost.facts import Facts, integers
from twinbus.cost.identities import SPREAD_KEYS, KeyedItem
from twinbus.cost.suspects import in_order, sample
from twinbus.limits import REPORT_PARTITION_ROWS
from twinbus.message import Int64s

POINTS = (0.5, 0.9, 0.99)
_DIRECT_BYTES = 16  # of a row


@dataclass(slots=True)
class TaskFindings:
    """What a task of the last stage has found."""

    tally: Counts = field(default_factory=Counts)
    transfers: list[EntityTransfers] = field(default_factory=list)
    suspects: pa.Table = field(default_factory=SCHEMAS[Kind.SUSPECT].empty_table)
    suspect_count: int = 0  # of all suspects; `suspects` has only the first ones
    sample: pa.Table = field(default_factory=SCHEMAS[Kind.SUSPECT].empty_table)


def answer(items: Iterable[KeyedItem], facts: Facts, most: int) -> TaskFindings:
    """Return the findings of a task, from items that are sorted by destination and kind."""
    found = TaskFindings()
    suspects = []
    for destination, own in itertools.groupby(items, key=lambda item: item[0][0]):
        contents = (item[1] for item in own)
        if destination > SPREAD_KEYS:
            summary = _summary(contents, facts)
            if summary is not None:
                found.transfers.append(summary)
            continue
        for _, content in contents:
            if isinstance(content, Counts):
                found.tally.add(content)
            else:
                suspects.append(content)
    table = in_order(tables_of(suspects, Kind.SUSPECT), facts)
    found.suspects, found.suspect_count = table.slice(0, most), table.num_rows
    found.sample = sample(table)
    return found


def _summary(items: Iterator[Content], facts: Facts) -> EntityTransfers | None:
    """Return a summary of the transfers to a destination; None if there are none.

    If a transform redirects a message differently after the kill of a worker, the message has two
    rows, and only the earlier one counts. The destination of the later row may
    then have no transfers.
    """
    parts: dict[int, list[bytes | Counts]] = {Kind.DELIVERY: [], Kind.DIVERTED: []}
    direct: list[Content] = []
    for item in items:
        if item[0] == Kind.DIRECT:
            direct.append(item)
            break
        parts[item[0]].append(item[1])
    deliveries = tables_of(parts[Kind.DELIVERY], Kind.DELIVERY)
    if not deliveries.num_rows:
        return None
    diverted = tables_of(parts[Kind.DIVERTED], Kind.DIVERTED)
    contents = (content for _, content in itertools.chain(direct, items))
    behind = _behind(diverted, contents)
    result = integers(deliveries.column("result"))
    delay = deliveries.column("delay").filter(pa.array(result == HOME)).drop_null()
    delays = np.sort(delay.to_numpy()) / 1e6
    path = int(integers(deliveries.column("path")).min())  # it may have several spellings
    late = np.sort(np.maximum(behind, 0))
    return EntityTransfers(
        None if path < 0 else facts.texts[path],
        int(np.count_nonzero(result == HOME)),
        int(np.count_nonzero(result == DEAD)),
        int(integers(deliveries.column("bytes")).sum()),
        *(map(float, _percentiles(delays)) if len(delays) else [None] * 4),
        *([int((behind > 0).sum()), *map(int, _percentiles(late))] if len(late) else [None] * 5),
    )


def _percentiles(ordered: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the percentiles and the maximum of sorted values, without interpolation."""
    ranks = [*(math.ceil(point * len(ordered)) - 1 for point in POINTS), -1]
    found: npt.NDArray[Any] = ordered[ranks]
    return found


def _behind(diverted: pa.Table, direct: Iterable[bytes | Counts]) -> Int64s:
    """Return how many later messages arrived before each diverted message."""
    at, first, sent, backlog_number = (integers(column) for column in diverted.columns)
    by_arrival, by_sending = np.lexsort((first, at)), np.lexsort((backlog_number, sent))
    behind = np.empty(len(at), np.int64)
    behind[by_arrival] = np.arange(len(at))
    behind[by_sending] -= np.arange(len(at))
    if len(at):
        for others in _chunks(direct):
            times = np.concatenate([at, sent, integers(others.column("at"))])
            numbers = np.concatenate([first, backlog_number, integers(others.column("first"))])
            order = np.lexsort((numbers, times))
            below = np.empty(len(order), np.int64)
            below[order] = np.cumsum(order >= 2 * len(at))
            behind += below[: len(at)] - below[len(at) : 2 * len(at)]
    return behind


def _chunks(direct: Iterable[bytes | Counts]) -> Iterator[pa.Table]:
    """Yield the rows in tables of limited size."""
    pending: list[bytes | Counts] = []
    size = 0
    for content in direct:
        pending.append(content)
        size += len(content) if isinstance(content, bytes) else 0
        if size >= REPORT_PARTITION_ROWS * _DIRECT_BYTES:
            yield tables_of(pending, Kind.DIRECT)
            pending, size = [], 0
    if pending:
        yield tables_of(pending, Kind.DIRECT)
