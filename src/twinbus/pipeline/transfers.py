"""What a syphon tells of the messages it moved: a line for each in the ledger of transfers.

A worker writes its lines before its batch is settled, so every message that left the backlog has
one. A message that was carried twice, because somebody was killed, has two that say the same.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from twinbus.broker.transfers import Intervals
from twinbus.clock import SystemClock
from twinbus.ledger import SCHEMAS, Ledger, LedgerKind
from twinbus.limits import LEDGER_RETENTION
from twinbus.message import Int64s, sizes
from twinbus.pairing.backlog import Restored

if TYPE_CHECKING:
    from twinbus.pipeline.carrier import Carried

MOVED, DEAD_LETTERED = "moved", "dead_lettered"
_SCHEMA = SCHEMAS[LedgerKind.TRANSFERS]


@dataclass(frozen=True, slots=True)
class Passed:
    """Messages of a backlog queue that somebody tried to bring home."""

    numbers: Int64s
    accepted: pa.Array  # when the queue took each
    ids: pa.Array
    paths: pa.Array
    sizes: Int64s

    @classmethod
    def of(cls, batch: pa.RecordBatch, found: Restored) -> "Passed":
        """Return messages as the backlog queue delivered them."""
        numbers, accepted = batch.column("sequence_number"), batch.column("enqueued_time_utc")
        ids = batch.column("message_id")
        return cls(numbers.to_numpy(), accepted, ids, found.paths, sizes(found.batch))


class TransferLedger:
    """Gathers lines and writes them; used by one thread. Without a folder it does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._ledger: Ledger | None = None
        if folder is not None:
            self._ledger = Ledger(folder, LedgerKind.TRANSFERS, LEDGER_RETENTION)
        self._clock = SystemClock()
        self._tables: list[pa.Table] = []

    def note(self, carried: "Carried", passed: Passed) -> None:
        """Note those messages that are home or put aside by now."""
        if self._ledger is None:
            return
        reasons = dict(carried.poison)
        is_home = Intervals(sorted(carried.completed)).contains(passed.numbers)
        is_dead = np.isin(passed.numbers, list(reasons))
        at = np.flatnonzero(is_home | is_dead)
        if not len(at):
            return
        rows = pa.array(at)
        dead = is_dead[at]
        numbers = passed.numbers[at]
        columns = [
            pa.array(np.full(len(at), self._clock.now_us()), _SCHEMA.field("moved").type),
            passed.accepted.take(rows).cast(_SCHEMA.field("accepted").type),
            passed.ids.take(rows),
            passed.paths.take(rows),
            pa.repeat(pa.scalar(carried.queue, pa.string()), len(at)),
            pa.repeat(pa.scalar(carried.range.origin, pa.string()), len(at)),
            pa.array(numbers),
            pa.array(passed.sizes[at].astype(np.int64)),
            pa.array(np.where(dead, DEAD_LETTERED, MOVED), pa.string()),
            pa.array([reasons[n] if d else None for n, d in zip(numbers, dead, strict=True)])
            if dead.any()
            else pa.nulls(len(at), pa.string()),
        ]
        self._tables.append(pa.table(columns, schema=_SCHEMA))

    def write(self) -> None:
        """Put what was noted on the disk."""
        if self._ledger is not None and self._tables:
            self._ledger.write(pa.concat_tables(self._tables), self._clock.now_us())
            self._tables = []
