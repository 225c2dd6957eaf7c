"""Decides what depends on ids: which messages are doubled, lost or not home, or were diverted.

Runs in the buckets of message ids: all rows with one id are in one bucket. Hashes of ids select the
few rows whose ids must be compared; then each distinct id of these rows gets a code.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus.cost.exchange import (
    HOME,
    SCHEMAS,
    Content,
    Counts,
    Hashes,
    Item,
    Kind,
    TaskTables,
    mixed,
    text_hashes,
)
from twinbus.cost.facts import Facts, integers, ledger_of
from twinbus.cost.pieces import packed
from twinbus.cost.places import (
    AGAIN,
    CODES,
    DOUBLED,
    HAS_ARRIVED,
    HAS_LEFT_BACKLOG,
    IS_AGAIN,
    IS_COPY,
    IS_HOME,
    IS_LOST,
    LOST,
    NOT_HOME,
    one_chunk,
)
from twinbus.message import Int64s

# A key is the code of a destination, or -1 for transfers that name no destination. Keys from
# SPREAD_KEYS down are for suspects and counts, which belong to no destination.
SPREAD_KEYS = -2
KeyedItem = tuple[tuple[int, int], Content]  # sort key (destination, kind), and the finding


def look_up(items: Iterable[Item], facts: Facts) -> Iterator[KeyedItem]:
    """Yield the findings about the messages of a bucket, keyed by destination."""
    items = list(items)
    spread_key = SPREAD_KEYS - (items[0][0] if items else 0)  # differs by bucket
    inbox = TaskTables(items)
    rows, transfers = inbox.take(Kind.MESSAGE), inbox.take(Kind.TRANSFER)
    for kind, content in inbox.passed_on():
        yield (spread_key, kind), (kind, content)
    found = Messages(rows, transfers, facts)
    tally = Counts()
    for suspects in (found.doubled(), found.lost(tally), found.left(), found.not_home()):
        if suspects.num_rows:
            yield (spread_key, Kind.SUSPECT), (Kind.SUSPECT, packed(suspects))
    yield (spread_key, Kind.TALLY), (Kind.TALLY, tally)
    yield from found.deliveries()
    yield from found.arrivals()


class Messages:
    """The messages of a bucket of ids."""

    def __init__(self, rows: pa.Table, transfers: pa.Table, facts: Facts) -> None:
        self._facts = facts
        self._rows, self._transfers = rows, transfers
        roles = integers(rows.column("roles"))
        ids, own = one_chunk(rows.column("message_id")), one_chunk(transfers.column("message_id"))
        hashes = text_hashes(ids)
        wanted = np.concatenate(
            [
                text_hashes(own),
                hashes[(roles & (IS_LOST | HAS_LEFT_BACKLOG)) != 0],
                self._repeated(hashes, roles),
            ]
        )
        # The few rows that are compared.
        which = np.flatnonzero(_among(hashes, wanted))
        self._which = which
        self._roles = roles[which]
        self._queue = integers(rows.column("queue"))[which]
        self._path = integers(rows.column("path"))[which]
        both = pa.concat_arrays([ids.take(pa.array(which)), own]).dictionary_encode()
        codes = both.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        self._codes, self._transfer_codes = codes[: len(which)], codes[len(which) :]
        self._width = len(both.dictionary) + 1

    def _repeated(self, hashes: Hashes, roles: Int64s) -> Hashes:
        """Return the hashes of ids that a queue may have accepted twice."""
        is_copy = (roles & IS_COPY) != 0
        queues = integers(self._rows.column("queue"))
        places = (hashes ^ mixed(queues))[is_copy]
        ordered = np.sort(places)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        return hashes[is_copy][_among(places, twice)] if len(twice) else hashes[:0]

    def _has(self, bit: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (self._roles & bit) != 0
        return found

    def _column(self, name: str, which: Int64s) -> Int64s:
        return integers(self._rows.column(name).take(pa.array(self._which[which])))

    def doubled(self) -> pa.Table:
        """Return messages that an entity accepted more than once with the same id.

        Copies in one record do not count: a topic made them from one message.
        """
        which = np.flatnonzero(self._has(IS_COPY))
        _, queue = np.unique(self._queue[which], return_inverse=True)
        message = queue * self._width + self._codes[which]
        record = self._column("record", which)
        number, at = self._column("sequence_number", which), self._column("at", which)
        order = np.lexsort((number, record, message))
        starts = np.flatnonzero(np.diff(message[order], prepend=-1))
        if not len(starts):
            return SCHEMAS[Kind.SUSPECT].empty_table()
        is_more = np.maximum.reduceat(record[order], starts) > record[order][starts]
        last = np.maximum.reduceat(number[order], starts)[is_more]
        accepted = np.maximum.reduceat(at[order], starts)[is_more]
        return self._suspects(which[order[starts[is_more]]], DOUBLED, last, accepted)

    def lost(self, tally: Counts) -> pa.Table:
        """Return the messages that were lost with a log and were not accepted again."""
        is_lost, is_again = self._has(IS_LOST), self._has(IS_AGAIN)
        _, queue = np.unique(self._paths_of_queues(), return_inverse=True)
        message = queue * self._width + self._codes
        has_come = is_lost & np.isin(message, message[is_again])
        for key, count in zip(*np.unique(self._queue[has_come], return_counts=True), strict=True):
            tally.statuses[int(key), CODES[LOST]] -= int(count)
            tally.statuses[int(key), CODES[AGAIN]] += int(count)
        return self._suspects(np.flatnonzero(is_lost & ~has_come), LOST)

    def _paths_of_queues(self) -> Int64s:
        """Return ledger and path of the queue of each message, as one number."""
        keys, which = np.unique(self._queue, return_inverse=True)
        codes = self._facts.codes
        found = [
            (ledger_of(key) << 32) + codes[self._facts.queue(key).path] for key in keys.tolist()
        ]
        return np.array(found, np.int64)[which]

    def left(self) -> pa.Table:
        """Return messages that left the backlog without a transfer, and are not home.

        A message is home if any queue outside of the backlog has accepted its id.
        """
        home = self._codes[self._has(IS_HOME)]
        is_missing = self._has(HAS_LEFT_BACKLOG) & ~np.isin(self._codes, home)
        return self._suspects(np.flatnonzero(is_missing), NOT_HOME)

    def not_home(self) -> pa.Table:
        """Return transfers whose destination never accepted the message.

        Only entities that store messages are checked: a topic stores none, and passes a message to
        the subscriptions that select it. A message is checked only if it was moved before the
        primary's ledger ends, and diverted after the last gap in that ledger. The rows of other
        messages may be in files that were deleted.
        """
        facts, transfers = self._facts, self._transfers
        homes = facts.lower[integers(transfers.column("path"))].astype(np.int64)
        known, which = np.unique(homes, return_inverse=True)
        covered = [facts.coverage.get(home) for home in known.tolist()]
        until = np.array([-1 if own is None else own.until for own in covered], np.int64)
        gap_end = np.array(
            [-1 if own is None or own.gap_end is None else own.gap_end for own in covered], np.int64
        )
        is_due = (integers(transfers.column("result")) == HOME) & (self._transfer_codes >= 0)
        is_due &= integers(transfers.column("moved")) <= until[which]
        is_due &= (gap_end[which] < 0) | (integers(transfers.column("accepted")) > gap_end[which])
        is_home = self._has(IS_HOME)
        entity = facts.entities[self._path[is_home]].astype(np.int64)
        accepted = entity * self._width + self._codes[is_home]
        is_due &= ~np.isin(homes * self._width + self._transfer_codes, accepted)
        found = transfers.filter(pa.array(is_due))
        names = [name for name in SCHEMAS[Kind.SUSPECT].names if name != "status"]
        found = found.select(names).group_by(names, use_threads=False).aggregate([])
        status = pa.array(np.full(len(found), CODES[NOT_HOME], np.int8))
        found = found.append_column("status", status)
        return found.select(SCHEMAS[Kind.SUSPECT].names).cast(SCHEMAS[Kind.SUSPECT])

    def _suspects(
        self,
        which: Int64s,
        status: str,
        number: Int64s | None = None,
        accepted: Int64s | None = None,
    ) -> pa.Table:
        queue = self._queue[which].tolist()
        facts = self._facts
        rows = self._rows.take(pa.array(self._which[which]))
        columns = [
            pa.array([ledger_of(key) for key in queue], pa.int32()),
            pa.array([facts.codes[facts.queue(key).path] for key in queue], pa.int32()),
            rows.column("sequence_number") if number is None else pa.array(number),
            rows.column("message_id"),
            pa.array(np.full(len(which), CODES[status], np.int8)),
            rows.column("at") if accepted is None else pa.array(accepted),
        ]
        return pa.table(columns, schema=SCHEMAS[Kind.SUSPECT])

    # -- of transfers, by destination --------------------------------------------------------------

    def deliveries(self) -> Iterator[KeyedItem]:
        """Yield the transfers, without ids."""
        transfers = self._transfers
        moved, accepted = (integers(transfers.column(name)) for name in ("moved", "accepted"))
        path = integers(transfers.column("path"))
        delay = pa.array(moved - accepted, mask=accepted < 0)
        columns = [transfers.column(name) for name in ("path", "bytes", "result")]
        table = pa.table([*columns, delay], schema=SCHEMAS[Kind.DELIVERY])
        yield from _by_destination(Kind.DELIVERY, table, self._facts.lower[path])

    def arrivals(self) -> Iterator[KeyedItem]:
        """Yield what destinations of transfers accepted: diverted messages, and direct sends."""
        all_roles = integers(self._rows.column("roles"))
        all_paths = integers(self._rows.column("path"))
        destination = self._facts.destinations[all_paths].astype(np.int64)
        has_arrived = (all_roles & HAS_ARRIVED) != 0
        if not has_arrived.any():
            return
        transfers = self._transfers
        is_moved = (integers(transfers.column("result")) == HOME) & (self._transfer_codes >= 0)
        is_moved &= integers(transfers.column("accepted")) >= 0
        homes = self._facts.lower[integers(transfers.column("path"))].astype(np.int64)
        message = (homes * self._width + self._transfer_codes)[is_moved]
        known, group = np.unique(message, return_inverse=True)
        sent, backlog_number = (np.full(len(known), np.iinfo(np.int64).max) for _ in range(2))
        np.minimum.at(sent, group, integers(transfers.column("accepted"))[is_moved])
        np.minimum.at(
            backlog_number, group, integers(transfers.column("sequence_number"))[is_moved]
        )
        arrived = np.flatnonzero(self._has(HAS_ARRIVED))
        own = destination[self._which[arrived]] * self._width + self._codes[arrived]
        place = np.searchsorted(known, own)
        is_diverted = np.zeros(len(own), bool)
        is_inside = place < len(known)
        is_diverted[is_inside] = known[place[is_inside]] == own[is_inside]
        diverted, place = self._which[arrived[is_diverted]], place[is_diverted]
        has_arrived[diverted] = False
        at, first = (integers(self._rows.column(name)) for name in ("at", "sequence_number"))
        table = pa.table(
            [
                pa.array(c)
                for c in (at[diverted], first[diverted], sent[place], backlog_number[place])
            ],
            schema=SCHEMAS[Kind.DIVERTED],
        )
        yield from _by_destination(Kind.DIVERTED, table, destination[diverted])
        table = pa.table(
            [pa.array(at[has_arrived]), pa.array(first[has_arrived])], schema=SCHEMAS[Kind.DIRECT]
        )
        yield from _by_destination(Kind.DIRECT, table, destination[has_arrived])


def _among(values: Hashes, wanted: Hashes) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is in `wanted`, which is short."""
    ordered = np.unique(wanted)
    if not len(ordered):
        return np.zeros(len(values), bool)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    found: npt.NDArray[np.bool_] = ordered[place] == values
    return found


def _by_destination(
    kind: Kind, table: pa.Table, destinations: npt.NDArray[Any]
) -> Iterator[KeyedItem]:
    if not len(destinations):
        return
    order = np.argsort(destinations, kind="stable")
    ordered = table.take(pa.array(order))
    destinations = destinations[order]
    starts = np.flatnonzero(np.diff(destinations, prepend=destinations[0] - 1))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield (int(destinations[start]), kind), (kind, packed(ordered.slice(start, end - start)))
