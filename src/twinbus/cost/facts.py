"""What ledgers of messages and transfers state about themselves, their queues and their entities.

Tasks aggregate pieces to a few rows (`facts_in`). The driver derives the facts from these rows, and
sends them to every task of the reconciliation. Tasks need nothing else to decide what became of a
message.

The number of a queue is packed with its ledger and era:

    ledger    bits 34 to 62
    era       bits 32 and 33    CURRENT, VOID, STALE or BEFORE
    number    bits 0 to 31      of the entity; a new entity with the same path has a new number
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from twinbus import compute as pc
from twinbus.cost.answers import PulledQueue
from twinbus.cost.outages import ObservedOutage, outages_of, pulled_queues, transitions_in
from twinbus.cost.pieces import Piece
from twinbus.entities import BACKLOG_INFIX, DEAD_LETTER_SUFFIX
from twinbus.ledger import (
    ACCEPTED,
    BEGUN,
    DELETED,
    EXISTS,
    GAP,
    INVENTORY,
    MOVED,
    RESTORED,
    LedgerKind,
)
from twinbus.ledger import SCHEMAS as LEDGERS
from twinbus.limits import FLOW_STEPS
from twinbus.message import Int64s

# Eras of rows. VOID: their record was lost, STALE: of an earlier log, BEFORE: of an earlier day.
CURRENT, VOID, STALE, BEFORE = range(4)
ERA_SHIFT, LEDGER_SHIFT = 32, 34  # the lowest bits of the era and of the ledger in a key
STATED = (BEGUN, GAP, RESTORED, INVENTORY)
MESSAGE_COLUMNS = ("at", "event", "path", "number", "first", "last", "record")
TRANSFER_COLUMNS = ("moved", "accepted", "path", "queue", "result")
_KEYS = ["ledger", "era", "number", "path", "event"]
GROUPED = pa.schema(
    [
        ("ledger", pa.int32()),
        ("era", pa.int8()),
        ("number", pa.int32()),
        ("path", pa.string()),
        ("event", pa.string()),
        ("first", pa.int64()),  # the least
        ("record", pa.int64()),  # the least
        ("at", pa.int64()),  # the latest
    ]
)
STATEMENTS = pa.schema(
    [
        ("ledger", pa.int32()),
        ("event", pa.string()),
        ("at", pa.int64()),
        ("record", pa.int64()),
        ("first", pa.int64()),
        ("last", pa.int64()),
    ]
)
MOVES = pa.schema(
    [
        ("path", pa.string()),
        ("queue", pa.string()),
        ("result", pa.string()),
        ("accepted", pa.int64()),  # the earliest
        ("moved", pa.int64()),  # the latest
    ]
)


def is_backlog_queue(path: str) -> bool:
    """Return whether a path is that of a backlog queue or its dead-letter queue."""
    return BACKLOG_INFIX in path.lower()


def is_dead_letter_queue(path: str) -> bool:
    """Return whether a path is that of a dead-letter queue."""
    return path.lower().endswith(DEAD_LETTER_SUFFIX.lower())


def entity_of(path: str) -> str:
    """Return the entity of a queue or of its dead-letter queue, in lower case."""
    return path.lower().removesuffix(DEAD_LETTER_SUFFIX.lower())


@dataclass(slots=True)
class Account:
    """What a ledger states about itself."""

    begun: int | None = None  # when its log began, in microseconds; earlier rows are of another log
    gap_record: int | None = None  # the last record of a gap in the ledger
    stock: tuple[int, int] | None = None  # time and record of its last inventory
    voids: tuple[tuple[int, int], ...] = ()  # ranges of records that were lost with the log
    # Losses of its complete log: the time, and the number of the last lost record.
    losses: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether all rows of the ledger are about its current log, and none of them is void."""
        return self.begun is None and not self.voids

    def eras(self, at: Int64s, record: Int64s) -> npt.NDArray[np.int8]:
        """Return the era of each row.

        A restored log lacks the records that were written after its copy was made: the rows of
        these records are void. The new log reuses queue numbers, so void rows get separate queues.
        """
        eras = np.full(len(at), CURRENT, np.int8)
        for first, last in self.voids:
            eras[(record >= first) & (record <= last)] = VOID
        if self.begun is not None:
            eras[at < self.begun] = STALE
        return eras


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """The known facts about a queue."""

    path: str  # empty: it is not in the ledger
    is_deleted: bool
    first_accepted: int | None  # the lowest accepted number in the ledger
    first_record: int | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """The time in which the ledgers contain every message of an entity, in microseconds."""

    until: int
    gap_end: int | None

    def with_other(self, other: "Coverage") -> "Coverage":
        """Return the time that both cover."""
        gap_ends = [end for end in (self.gap_end, other.gap_end) if end is not None]
        return Coverage(min(self.until, other.until), max(gap_ends, default=None))


def moments(column: pa.ChunkedArray) -> Int64s:
    """Return times as microseconds since 1970."""
    return integers(column.cast(pa.int64()))


def integers(column: pa.ChunkedArray) -> Int64s:
    """Return a column of whole numbers that are not negative; -1 for null."""
    found: Int64s = (column.fill_null(-1) if column.null_count else column).to_numpy()
    return found


# -- in tasks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aggregates:
    """What a task has found in its pieces."""

    grouped: pa.Table
    statements: pa.Table
    moves: pa.Table
    transitions: pa.Table


def facts_in(pieces: Iterable[Piece], accounts: Sequence[Account]) -> Aggregates:
    """Aggregate pieces of messages, transfers and transitions."""
    grouped: list[pa.Table] = []
    statements: list[pa.Table] = []
    moves: list[pa.Table] = []
    transitions: list[pa.Table] = []
    for piece in pieces:
        if piece.kind is LedgerKind.TRANSITIONS:
            transitions += piece.tables(LEDGERS[LedgerKind.TRANSITIONS].names)
            continue
        if piece.kind is LedgerKind.TRANSFERS:
            moves += [_moves_in(table) for table in piece.tables(TRANSFER_COLUMNS)]
            continue
        for table in piece.tables(MESSAGE_COLUMNS):
            found = _with_era(table, piece, accounts[piece.ledger])
            grouped.append(_aggregated(found, _KEYS, GROUPED))
            if not piece.is_before:
                stated = found.filter(pc.is_in(found.column("event"), pa.array(STATED)))
                statements.append(stated.select(STATEMENTS.names).cast(STATEMENTS))
    return Aggregates(
        _aggregated(_joined(grouped, GROUPED), _KEYS, GROUPED),
        _joined(statements, STATEMENTS),
        _aggregated(_joined(moves, MOVES), ["path", "queue", "result"], MOVES),
        transitions_in(transitions),
    )


def _with_era(table: pa.Table, piece: Piece, account: Account) -> pa.Table:
    at = table.column("at").cast(pa.int64())
    if piece.is_before:
        eras = np.full(len(table), BEFORE, np.int8)
    else:
        eras = account.eras(integers(at), integers(table.column("record")))
    ledger = pa.array(np.full(len(table), piece.ledger, np.int32))
    return (
        table.set_column(0, "at", at)
        .append_column("ledger", ledger)
        .append_column("era", pa.array(eras))
    )


def _moves_in(table: pa.Table) -> pa.Table:
    for name in ("moved", "accepted"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table.column(name).cast(pa.int64()))
    return _aggregated(table, ["path", "queue", "result"], MOVES)


def _aggregated(table: pa.Table, keys: list[str], schema: pa.Schema) -> pa.Table:
    """Group rows; keep the highest value of `at` and `moved`, and the lowest of other columns."""
    latest = {"at", "moved"}
    wanted = [
        (name, "max" if name in latest else "min") for name in schema.names if name not in keys
    ]
    found = table.combine_chunks().group_by(keys, use_threads=False).aggregate(wanted)
    found = found.rename_columns(
        [name.removesuffix("_min").removesuffix("_max") for name in found.column_names]
    )
    return found.select(schema.names).cast(schema)


def _joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables])


# -- in the driver ---------------------------------------------------------------------------------


def accounts_of(statements: pa.Table, ledgers: int) -> list[Account]:
    """Return what each ledger states about itself."""
    found = [Account() for _ in range(ledgers)]
    for row in statements.to_pylist():
        account = found[row["ledger"]]
        match row["event"]:
            case "begun":
                account.begun = max(account.begun or 0, row["at"])
            case "gap":
                account.gap_record = max(account.gap_record or 0, row["record"])
            case "inventory":
                account.stock = max(account.stock or (0, 0), (row["at"], row["record"]))
            case _:
                account.voids = tuple({*account.voids, (row["first"], row["last"])})
                if row["first"] == 1:
                    account.losses |= {(row["at"], row["last"])}
    return found


@dataclass(frozen=True)
class Facts:
    """The facts from which tasks decide what became of each message; sent to every task."""

    ledgers: Sequence[str]
    accounts: Sequence[Account]
    queues: Mapping[int, QueueFacts]
    texts: Sequence[str]  # paths, also in lower case, and entities; an index is a code
    outages: Sequence[ObservedOutage]
    pulled: Sequence[PulledQueue]
    coverage: Mapping[int, Coverage]  # by the code of an entity
    moved_to: frozenset[int]  # codes of paths in lower case, to which messages were moved
    span: tuple[int, int] | None  # of all transfers: from the first acceptance to the last move

    @classmethod
    def of(
        cls,
        aggregates: Sequence[Aggregates],
        ledgers: Sequence[str],
        accounts: Sequence[Account],
    ) -> "Facts":
        """Derive the facts from what tasks have found with these accounts."""
        grouped = pa.concat_tables([aggregate.grouped for aggregate in aggregates])
        moves = pa.concat_tables([aggregate.moves for aggregate in aggregates])
        transitions = transitions_in([aggregate.transitions for aggregate in aggregates])
        rows = _aggregated(grouped, _KEYS, GROUPED).to_pylist()  # tasks have queues in common
        paths = {row["path"] for row in rows}
        for name in ("path", "queue"):
            paths |= set(moves.column(name).unique().to_pylist())
        paths = {path for path in paths if path is not None} | {""}
        known = paths | {path.lower() for path in paths} | {entity_of(path) for path in paths}
        texts = sorted(known)
        codes = {text: code for code, text in enumerate(texts)}
        moved = moves.filter(pc.equal(moves.column("result"), MOVED)).column("path")
        span = None
        if moves.num_rows:
            ends = pc.max(moves.column("moved")).as_py()
            begins = pc.min(moves.column("accepted")).as_py()  # None: no transfer has this time
            span = ends if begins is None else begins, ends
        return cls(
            ledgers,
            accounts,
            _queues_of(rows),
            texts,
            outages_of(transitions),
            pulled_queues(transitions),
            {codes[entity]: time for entity, time in _coverage_of(rows).items()},
            frozenset(codes[path.lower()] for path in set(moved.to_pylist()) - {None}),
            span,
        )

    @cached_property
    def codes(self) -> dict[str, int]:
        """The code of each text."""
        return {text: code for code, text in enumerate(self.texts)}

    @cached_property
    def lower(self) -> npt.NDArray[np.int32]:
        """The code of each text in lower case; last, -1 for the code -1: no text."""
        return np.array([*(self.codes[text.lower()] for text in self.texts), -1], np.int32)

    @cached_property
    def entities(self) -> npt.NDArray[np.int32]:
        """The code of the entity of each path; -1 for queues of the backlog, and for no path."""
        codes = self.codes
        found = [-1 if is_backlog_queue(t) else codes.get(entity_of(t), -1) for t in self.texts]
        return np.array([*found, -1], np.int32)

    @cached_property
    def destinations(self) -> npt.NDArray[np.int32]:
        """The code of each path in lower case if messages were moved to it; -1 for other paths."""
        found = self.lower.copy()
        found[~np.isin(found, [*self.moved_to])] = -1
        for code, text in enumerate(self.texts):
            if is_backlog_queue(text) or is_dead_letter_queue(text):
                found[code] = -1
        return found

    @property
    def has_voids(self) -> bool:
        """Whether a log was restored without some of its records."""
        return any(account.voids for account in self.accounts)

    @property
    def flow_step(self) -> float:
        """The length of a step of the flow chart, in microseconds."""
        begins, ends = self.span or (0, 0)
        return max((ends - begins) / (FLOW_STEPS - 1), 500_000.0)

    def queue(self, key: int) -> QueueFacts:
        """Return the facts about a queue."""
        return self.queues.get(key, NO_FACTS)

    def account(self, key: int) -> Account:
        """Return the account of the ledger of a queue."""
        return self.accounts[ledger_of(key)]

    @property
    def total_coverage(self) -> Coverage | None:
        """The time that the ledgers of all entities cover; None without an entity."""
        coverages = self.coverage.values()
        return reduce(Coverage.with_other, coverages) if coverages else None


NO_FACTS = QueueFacts("", is_deleted=False, first_accepted=None, first_record=None)


def ledger_of(key: int) -> int:
    """Return the index of the ledger of a queue."""
    return int(key) >> LEDGER_SHIFT


def era_of(key: int) -> int:
    """Return the era of the rows of a queue."""
    return int(key) >> ERA_SHIFT & 3


def queue_keys(ledger: int, eras: npt.NDArray[np.int8], numbers: Int64s) -> Int64s:
    """Return ledger, era and number of queues, packed."""
    return (ledger << LEDGER_SHIFT) + (eras.astype(np.int64) << ERA_SHIFT) + numbers


def _queues_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, QueueFacts]:
    """Return the facts about every queue of the current logs, and of their void records."""
    found: dict[int, QueueFacts] = {}
    for row in sorted(rows, key=lambda row: row["path"] or ""):
        if row["era"] not in (CURRENT, VOID):
            continue
        key = (row["ledger"] << LEDGER_SHIFT) + (row["era"] << ERA_SHIFT) + row["number"]
        before = found.get(key, NO_FACTS)
        is_accepted = row["event"] == ACCEPTED
        found[key] = QueueFacts(
            row["path"] or "",
            before.is_deleted or row["event"] == DELETED,
            _least(before.first_accepted, row["first"] if is_accepted else None),
            _least(before.first_record, row["record"] if is_accepted else None),
        )
    return found


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def _coverage_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Coverage]:
    """Return for each entity with messages the time that all ledgers of its messages cover."""
    ledgers: dict[int, Coverage] = {}
    entities: dict[str, set[int]] = {}
    for row in rows:
        ledger, path = row["ledger"], row["path"] or ""
        own = Coverage(row["at"], row["at"] if row["event"] == GAP else None)
        before = ledgers.get(ledger, own)
        gap_ends = [end for end in (before.gap_end, own.gap_end) if end is not None]
        ledgers[ledger] = Coverage(max(before.until, own.until), max(gap_ends, default=None))
        if row["event"] in (ACCEPTED, EXISTS) and not is_backlog_queue(path):
            entities.setdefault(entity_of(path), set()).add(ledger)
    return {
        entity: reduce(Coverage.with_other, (ledgers[ledger] for ledger in found_in))
        for entity, found_in in entities.items()
    }
