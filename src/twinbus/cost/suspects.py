"""Sorts suspects, the messages that are not accounted for, even if one process cannot hold them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from twinbus.cost.exchange import Item, Kind, by_bucket, tables_of
from twinbus.cost.facts import Facts, integers
from twinbus.cost.identities import KeyedItem
from twinbus.message import Int64s

_SAMPLED = 100  # rows of each task


def in_order(suspects: pa.Table, facts: Facts) -> pa.Table:
    """Sort by the name of the ledger, the path and the number."""
    return suspects.take(pa.array(np.lexsort(_keys(suspects, facts))))


def _keys(suspects: pa.Table, facts: Facts) -> tuple[Int64s, ...]:
    """Return numbers that sort like the texts, the most significant last."""
    names = sorted(range(len(facts.ledgers)), key=lambda at: facts.ledgers[at])
    rank = np.argsort(np.array(names, np.int64))
    path = integers(suspects.column("path"))  # codes are in the order of paths
    number = integers(suspects.column("sequence_number"))
    return number, path, rank[integers(suspects.column("ledger"))]


def sample(ordered: pa.Table) -> pa.Table:
    """Return some rows at equal distances."""
    count = min(len(ordered), _SAMPLED)
    places = np.arange(count) * len(ordered) // max(count, 1)
    return ordered.take(pa.array(places, pa.int64()))


def range_bounds(samples: Sequence[pa.Table], ranges: int, facts: Facts) -> pa.Table:
    """Return rows that divide all suspects into ranges of about the same size."""
    found = in_order(pa.concat_tables(samples), facts)
    places = np.unique(np.arange(1, ranges) * len(found) // ranges)
    return found.take(pa.array(places, pa.int64()))


def by_range(items: Iterable[KeyedItem], bounds: pa.Table, facts: Facts) -> Iterator[Item]:
    """Select the suspects from the results of a task, and divide them by range."""
    contents = [content for _, (kind, content) in items if kind == Kind.SUSPECT]
    suspects = tables_of(contents, Kind.SUSPECT)
    order = np.lexsort(_keys(pa.concat_tables([bounds, suspects]), facts))
    ranges = np.empty(len(order), np.int64)
    ranges[order] = np.cumsum(order < len(bounds))
    yield from by_bucket(Kind.SUSPECT, suspects, ranges[len(bounds) :])


def suspects_of(items: Iterable[Item], facts: Facts) -> pa.Table:
    """Return the suspects of a range, in order."""
    contents = [content for _, (_, content) in items]
    return in_order(tables_of(contents, Kind.SUSPECT), facts)
