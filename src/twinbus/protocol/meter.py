"""Meters operations: their number, messages, bytes and 64 KB units, by entity.

Each operation has a purpose, so that reports can separate the price of pairing from the price of
the application's own operations. An operation is counted when it is answered, with the outcome that
the caller gets: if the log refuses the record of a successful command, the outcome is that error. A
broker counts the operations that it executes; a client counts its operations on a namespace that
does not write a ledger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from twinbus.entities import is_backlog_path
from twinbus.ledger import SCHEMAS, LedgerKind
from twinbus.message import DELIVERY_SCHEMA, Int64s, is_ping, sizes
from twinbus.protocol import commands as c
from twinbus.protocol.operations import UNIT_BYTES, Load, Operation, Purpose
from twinbus.protocol.origins import OriginKind, origin_kind
from twinbus.protocol.table import row_of

_FOR_MESSAGES = (c.Receive, c.LeaseRange)
SEND = c.Send.__name__  # the operation kind of sends
METER_SCHEMA = pa.schema(list(SCHEMAS[LedgerKind.OPERATIONS])[1:])  # without `bucket`: all periods


def found_nothing(command: c.Command[object], reply: object) -> bool:
    """Return whether a request for messages returned none."""
    if not isinstance(command, _FOR_MESSAGES):
        return False
    return reply is None or (isinstance(reply, pa.RecordBatch) and not reply.num_rows)


def purpose_of(command: c.Command[object], path: str, *, is_idle: bool = False) -> Purpose:
    """Return the purpose of a request; for sends see `purpose_of_send`."""
    if row_of(command).is_managing:
        return Purpose.MANAGEMENT
    if not is_backlog_path(path):
        return Purpose.APPLICATION
    return Purpose.IDLE_POLL if is_idle else Purpose.SYPHON


def purpose_of_send(send: c.Send) -> Purpose:
    """Return the purpose of a send."""
    if is_ping(send.messages):
        return Purpose.PING
    [purpose] = purposes_of_sends(send.path, [send.origin])
    return purpose


def purposes_of_sends(path: str, origins: Sequence[c.Origin | None]) -> list[Purpose]:
    """Return the purposes of sends to one entity, none of which is a ping."""
    if is_backlog_path(path):
        return [Purpose.BACKLOG] * len(origins)
    return [
        Purpose.SYPHON
        if origin is not None and origin_kind(origin.source) is OriginKind.TRANSFER
        else Purpose.APPLICATION
        for origin in origins
    ]


class Metered(NamedTuple):
    """A reply with its load, which the handler of the command has computed."""

    reply: Any
    load: Load


def load_of_settled(messages: int) -> Load:
    """Return the load of a request about messages: each message counts as an operation."""
    return Load(messages, 0, max(messages, 1))


def load_of(value: object) -> Load:
    """Return the load of a reply."""
    if not isinstance(value, pa.RecordBatch) or value.schema != DELIVERY_SCHEMA:
        return Load()
    return load_of_sizes(sizes(value))


def load_of_exchange(command: c.Command[Any], reply: object) -> Load:
    """Return the load of a command and its reply, for a client."""
    if isinstance(command, c.Send):
        return load_of_sizes(sizes(command.messages))
    if isinstance(command, c.Settle | c.RenewLocks):
        return load_of_settled(len(command.lock_tokens))
    if isinstance(command, c.CancelScheduled):
        return load_of_settled(len(command.sequence_numbers))
    if isinstance(command, c.DeleteMessages):
        return load_of_settled(int(reply)) if isinstance(reply, int) else Load()
    return load_of(reply)


def units_of(sizes: Iterable[int]) -> int:
    """Return the number of 64 KB units of messages with these sizes."""
    return sum(-(-size // UNIT_BYTES) or 1 for size in sizes)


def load_of_sizes(size: Int64s) -> Load:
    """Return the load of messages of these sizes."""
    units, total = len(size), int(size.sum())
    if total > UNIT_BYTES and int(size.max()) > UNIT_BYTES:
        units = int(np.maximum(-(-size // UNIT_BYTES), 1).sum())
    return Load(len(size), total, max(units, 1))


_Key = tuple[str, str, Purpose, str]
_Totals = dict[_Key, list[int]]


@dataclass(frozen=True, slots=True)
class MeterPeriod:
    """The counts of a period of time."""

    began: int
    totals: _Totals


class Meter:
    """Counts operations by period.

    Only one thread at a time may use it. In a broker, that is the thread that executes the turn.
    """

    def __init__(self, period_us: int, now: int) -> None:
        self._period_us = period_us
        self._before: _Totals = {}  # of the periods that have ended
        self._closed: list[MeterPeriod] = []
        self._begin(now)

    def _begin(self, now: int) -> None:
        self._began = now - now % self._period_us
        self._totals: _Totals = {}

    def count(self, done: Operation) -> None:
        """Count an answered operation."""
        totals = self._totals.setdefault(done[:4], [0, 0, 0, 0])
        totals[0] += done.times
        totals[1] += done.load.messages
        totals[2] += done.load.size
        totals[3] += done.load.units

    def shift(self, by: int) -> None:
        """Begin a new period, because the wall clock was moved `by` microseconds."""
        self._close()
        self._begin(self._began + by)

    def turn_to(self, now: int) -> bool:
        """Begin a new period if the current one has ended; return whether a period began."""
        if now < self._began + self._period_us:
            return False
        self._close()
        self._begin(now)
        return True

    def _close(self) -> None:
        if self._totals:
            self._closed.append(MeterPeriod(self._began, self._totals))
            _add(self._before, self._totals)
            self._totals = {}

    def take(self) -> list[MeterPeriod]:
        """Return and remove the counts since the last call."""
        self._close()
        taken, self._closed = self._closed, []
        return taken

    def table(self) -> pa.RecordBatch:
        """Return all counts since the start, by entity, operation, purpose and outcome."""
        totals: _Totals = {}
        _add(totals, self._before)
        _add(totals, self._totals)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(column, kind.type)
                for column, kind in zip(_columns(totals), METER_SCHEMA, strict=True)
            ],
            schema=METER_SCHEMA,
        )


def _add(totals: _Totals, more: _Totals) -> None:
    for key, counted in more.items():
        sums = totals.setdefault(key, [0, 0, 0, 0])
        for at, value in enumerate(counted):
            sums[at] += value


def _columns(totals: _Totals) -> Iterable[Sequence[object]]:
    rows = sorted(
        (path, operation, purpose.value, outcome, *counted)
        for (path, operation, purpose, outcome), counted in totals.items()
    )
    return zip(*rows, strict=True) if rows else [()] * len(METER_SCHEMA)


def meter_rows(periods: Sequence[MeterPeriod]) -> pa.Table:
    """Return the counts of periods as rows of the ledger."""
    schema = SCHEMAS[LedgerKind.OPERATIONS]
    pieces = []
    for period in periods:
        count = len(period.totals)
        columns = [[period.began] * count, *_columns(period.totals)]
        pieces.append(
            pa.table(
                [pa.array(column, kind.type) for column, kind in zip(columns, schema, strict=True)],
                schema=schema,
            )
        )
    return pa.concat_tables(pieces)
