"""The outages of entities, from the transitions that pairings have recorded.

There are few transitions, so the driver derives the outages. Spark's tasks derive from the
transfers when the last diverted message of each outage was home (`drained_in`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from twinbus.cost.answers import EntityOutage, PulledQueue
from twinbus.ledger import SCHEMAS, LedgerKind
from twinbus.message import Int64s

_FAILED_OVER, _RETURNED, _PULLED = "FailedOver", "Returned", "BacklogQueuePulled"
OUTAGES = pa.schema(
    [
        *((name, pa.string()) for name in ("primary", "process", "path")),
        *((name, pa.timestamp("us", "UTC")) for name in ("failing", "failed_over")),
        ("cause", pa.string()),
        ("returned", pa.timestamp("us", "UTC")),
        ("returned_by", pa.string()),
        ("diverted", pa.int64()),
        ("drained", pa.timestamp("us", "UTC")),
        *((f"seconds_{what}", pa.float64()) for what in ("to_fail_over", "away", "to_drain")),
    ]
)


@dataclass(frozen=True, slots=True)
class ObservedOutage:
    """A failover of an entity, as one process observed it. Times are microseconds."""

    primary: str
    process: str
    path: str
    failing: int
    failed_over: int | None
    cause: str | None
    returned: int | None
    returned_by: str | None
    diverted: int | None
    until: int | None  # the next transition; None: there is none yet

    def row(self, drained: int | None) -> dict[str, Any]:
        """Return the outage as a table row; `drained` is when its last message was home."""
        to_drain = _seconds(self.returned, drained)
        return {
            **{name: getattr(self, name) for name in OUTAGES.names if hasattr(self, name)},
            "drained": drained,
            "seconds_to_fail_over": _seconds(self.failing, self.failed_over),
            "seconds_away": _seconds(self.failed_over, self.returned),
            "seconds_to_drain": None if to_drain is None else max(to_drain, 0.0),
        }

    def shown(self, drained: int | None) -> EntityOutage:
        """Return the outage with times in seconds."""
        row = self.row(drained)
        for column in OUTAGES:
            if pa.types.is_timestamp(column.type) and row[column.name] is not None:
                row[column.name] /= 1e6
        return EntityOutage(**row)


def _seconds(since: int | None, until: int | None) -> float | None:
    return None if since is None or until is None else (until - since) / 1e6


def transitions_in(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the distinct transitions; a process may have written some of them twice."""
    schema = SCHEMAS[LedgerKind.TRANSITIONS]
    found = pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])
    return found.group_by(schema.names, use_threads=False).aggregate([]).select(schema.names)


def outages_of(transitions: pa.Table) -> list[ObservedOutage]:
    """Return the outages of all entities, in the order of their time."""
    rows = sorted(
        (row for row in _rows(transitions) if row["event"] in (_FAILED_OVER, _RETURNED)),
        key=lambda row: (*_observer(row), row["at"]),
    )
    found = {outage for _, own in groupby(rows, _observer) for outage in _of_entity([*own])}
    return sorted(found, key=lambda outage: (outage.failed_over or 0, outage.path, outage.process))


def _rows(transitions: pa.Table) -> Iterator[dict[str, Any]]:
    for name in ("at", "since"):
        at = transitions.schema.get_field_index(name)
        numbers = transitions.column(name).cast(pa.int64())
        transitions = transitions.set_column(at, name, numbers)
    yield from transitions.to_pylist()


def _observer(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["primary"] or "", row["process"] or "", row["path"] or ""


def _of_entity(rows: Sequence[Mapping[str, Any]]) -> Iterator[ObservedOutage]:
    for before, row, after in zip([None, *rows], rows, [*rows[1:], None], strict=False):
        is_start = row["event"] == _FAILED_OVER
        # A return ends the failover before it. Without one, the failover was before the first day.
        if not is_start and before is not None and before["event"] == _FAILED_OVER:
            continue
        end = after if is_start else row
        back = end if end is not None and end["event"] == _RETURNED else {}
        yield ObservedOutage(
            *_observer(row),
            row["at"] if row["since"] is None else row["since"],
            row["at"] if is_start else row["since"],
            row["cause"] if is_start else None,
            back.get("at"),
            back.get("cause"),
            back.get("diverted"),
            None if end is None else end["at"],
        )


def pulled_queues(transitions: pa.Table) -> list[PulledQueue]:
    """Return how often each backlog queue was removed from the rotation."""
    paths = [row["path"] or "" for row in _rows(transitions) if row["event"] == _PULLED]
    return [PulledQueue(path, len([*own])) for path, own in groupby(sorted(paths))]


def drained_in(
    outages: Sequence[ObservedOutage],
    paths: Sequence[str],
    where: Int64s,
    accepted: Int64s,
    moved: Int64s,
) -> Int64s:
    """Return when the last message of each outage was home; -1: no message of it is home.

    A message belongs to an outage if the backlog accepted it between the failover and the next
    transition. Each of the given messages has the index of its destination in `paths`, in lower
    case, or -1.
    """
    found = np.full(len(outages), -1, np.int64)
    order = np.lexsort((accepted, where))
    where, accepted, moved = where[order], accepted[order], moved[order]
    places = {path: place for place, path in enumerate(paths)}
    for at, outage in enumerate(outages):
        place = places.get(outage.path.lower())
        if place is None or outage.failed_over is None:
            continue
        start, end = np.searchsorted(where, [place, place + 1])
        until = outage.until if outage.until is not None else np.iinfo(np.int64).max
        low = start + np.searchsorted(accepted[start:end], outage.failed_over)
        high = start + np.searchsorted(accepted[start:end], until, side="right")
        if low < high:
            found[at] = moved[low:high].max()
    return found
