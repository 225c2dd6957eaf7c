"""The stages of a reconciliation against a ten-line model, on small random ledgers.

The stages are functions of tables, so they run in this process; a dictionary takes the place of
Spark's shuffle. `tests/spark/test_reconciliation.py` runs the same stages on Spark.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbus.cost.answers import EntityTransfers
from twinbus.cost.detours import answer
from twinbus.cost.exchange import Counts, Kind
from twinbus.cost.facts import Account, Facts, accounts_of, facts_in, ledger_of
from twinbus.cost.identities import look_up
from twinbus.cost.pieces import FilePiece, cut
from twinbus.cost.places import STATUSES, decide
from twinbus.cost.scattering import scatter
from twinbus.ledger import (
    ACCEPTED,
    BEGUN,
    DEAD_LETTERED,
    DELETED,
    ENDED,
    ENDINGS,
    EXISTS,
    GAP,
    INVENTORY,
    MOVED,
    RESTORED,
    SCHEMAS,
    STANDING,
    LedgerKind,
)

MINUTE = 60_000_000
BACKLOG = "contoso/x-servicebus-transfer/0"
HOME, AWAY, SYPHON = range(3)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Rows:
    """Rows of a ledger in this process."""

    kind: LedgerKind
    ledger: int
    rows: list[dict[str, Any]]
    is_before: bool = False

    def tables(self, columns: Iterable[str]) -> Iterator[pa.Table]:
        table = pa.Table.from_pylist(self.rows, SCHEMAS[self.kind]).select([*columns])
        for at, column in enumerate(table.schema):
            if column.type == pa.string() and column.name != "message_id":
                table = table.set_column(at, column.name, table.column(at).dictionary_encode())
        yield table


def message(event: str, first: int, at: int, record: int, **row: Any) -> dict[str, Any]:
    given = {"path": "orders", "number": 1, "last": first, "message_id": None, **row}
    return {"at": at, "event": event, "first": first, "record": record, **given}


def transfer(
    number: int, message_id: str, accepted: int | None, moved: int, path: str = "orders"
) -> dict[str, Any]:
    return {
        "moved": moved,
        "accepted": accepted,
        "message_id": message_id,
        "path": path,
        "queue": BACKLOG,
        "origin": f"{BACKLOG}#1",
        "sequence_number": number,
        "bytes": 10,
        "result": "moved",
    }


@dataclass
class Result:
    """What the stages have found."""

    statuses: Counter[tuple[int, str]]
    suspects: set[tuple[str | None, int, str]]
    transfers: list[EntityTransfers]


def shuffled(
    items: Iterable[tuple[Any, Item]], buckets: int, bucket: Callable[[Any], int]
) -> list[list[tuple[Any, Item]]]:
    found: list[list[tuple[Any, Item]]] = [[] for _ in range(buckets)]
    for key, item in items:
        found[bucket(key) % buckets].append((key, item))
    return found


def reconciled(pieces: list[Rows], buckets: int) -> Result:
    """Run all stages."""
    names = ["home", "away", "syphon"]
    accounts = [Account() for _ in names]
    aggregates = [facts_in([piece], accounts) for piece in pieces]
    stated = accounts_of(
        pa.concat_tables([aggregate.statements for aggregate in aggregates]), len(names)
    )
    facts = Facts.of([facts_in(pieces, stated)], names, stated)
    read = [item for piece in pieces for item in scatter([piece], facts, buckets)]
    decided = [item for own in shuffled(read, buckets, int) for item in decide(own, facts, buckets)]
    found = [item for own in shuffled(decided, buckets, int) for item in look_up(own, facts)]
    answers = [
        answer(sorted(own, key=lambda item: item[0]), facts, 10**6)
        for own in shuffled(found, buckets, lambda key: int(key[0]))
    ]
    tally = Counts()
    for task in answers:
        tally.add(task.tally)
    statuses: Counter[tuple[int, str]] = Counter()
    for (queue, status), count in tally.statuses.items():
        statuses[ledger_of(queue), STATUSES[status]] += count
    rows = [row for task in answers for row in task.suspects.to_pylist()]
    return Result(
        +statuses,
        {(row["message_id"], row["sequence_number"], STATUSES[row["status"]]) for row in rows},
        [own for task in answers for own in task.transfers],
    )


# -- the model -------------------------------------------------------------------------------------

NUMBERS = st.integers(1, 12)
IDS = st.sampled_from(["a", "b", "c", "d", "e", "f" * 9, "g" * 40, ""])


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what a queue accepted, ended and has, and what a syphon moved to it."""
    accepted = draw(st.dictionaries(NUMBERS, IDS))
    return {
        "accepted": accepted,
        "ended": draw(st.lists(st.tuples(NUMBERS, st.integers(0, 5)), max_size=4)),
        "present": draw(st.lists(st.tuples(NUMBERS, st.integers(0, 5)), max_size=3)),
        "moved": draw(st.dictionaries(NUMBERS, IDS)),
        "left": draw(st.dictionaries(st.integers(20, 30), IDS)),
        "twice": draw(st.booleans()),
        "shift": draw(st.sampled_from([0, 2**16 - 6, 2**40])),
        "buckets": draw(st.integers(1, 3)),
    }


def model(history: dict[str, Any]) -> tuple[Counter[tuple[int, str]], set[tuple[Any, int, str]]]:
    """Return the statuses and suspects that a reader of the ledgers expects."""
    shift, ids = history["shift"], history["accepted"]
    ended = {n for first, more in history["ended"] for n in range(first, first + more + 1)}
    present = {n for first, more in history["present"] for n in range(first, first + more + 1)}
    statuses: Counter[tuple[int, str]] = Counter()
    suspects: set[tuple[Any, int, str]] = set()
    for number in ids.keys() | ended | present:
        is_older = number not in ids and number < min(ids, default=99)
        status = {
            (True, True): "present again",
            (True, False): "completed" if number in ids else "older",
            (False, True): "waiting" if number in ids else "older" if is_older else "unexplained",
            (False, False): "missing",
        }[number in ended, number in present]
        statuses[HOME, status] += 1
        if status in ("present again", "unexplained", "missing"):
            suspects.add((ids.get(number), number + shift, status))
    for message_id in set(ids.values()):
        own = [number for number in ids if ids[number] == message_id]
        if len(own) > 1:
            suspects.add((message_id, max(own) + shift, "doubled"))
    if ids:
        for number, message_id in (history["moved"] | history["left"]).items():
            if message_id not in ids.values():
                suspects.add((message_id, number, "not home"))
    statuses[AWAY, "completed"] += len(history["left"])
    return +statuses, suspects


def ledgers_of(history: dict[str, Any]) -> list[Rows]:
    shift = history["shift"]
    rows = [
        message("accepted", number + shift, MINUTE + number, number, message_id=message_id)
        for number, message_id in history["accepted"].items()
    ]
    for event, record in (("ended", 50), ("present", 99)):
        name = "completed" if event == "ended" else "standing"
        rows += [
            message(name, first + shift, record * MINUTE, record, last=first + more + shift)
            for first, more in history[event]
        ]
    rows.append(message("inventory", 0, 99 * MINUTE, 99, path="", number=0))
    away = [
        message(event, number, MINUTE, number, path=BACKLOG, message_id=message_id)
        for number, message_id in history["left"].items()
        for event in ("accepted", "completed")
    ]
    moved = [
        transfer(number, message_id, MINUTE, 2 * MINUTE)
        for number, message_id in history["moved"].items()
    ]
    times = 2 if history["twice"] else 1
    return [
        Rows(LedgerKind.MESSAGES, HOME, rows * times),
        Rows(LedgerKind.MESSAGES, AWAY, away * times),
        Rows(LedgerKind.TRANSFERS, SYPHON, moved * times),
    ]


@settings(max_examples=150)
@given(histories())
def test_a_reconciliation_finds_what_a_model_finds(history: dict[str, Any]) -> None:
    found = reconciled(ledgers_of(history), history["buckets"])
    statuses, suspects = model(history)
    assert found.statuses == statuses
    assert found.suspects == suspects
    assert sum(row.moved for row in found.transfers) == len(history["moved"])


PATHS = st.sampled_from(["orders", "Orders", "bills", BACKLOG, f"{BACKLOG}/$DeadLetterQueue", None])
EVENTS = st.sampled_from(
    [ACCEPTED, STANDING, INVENTORY, BEGUN, GAP, RESTORED, DELETED, EXISTS, ENDED, *sorted(ENDINGS)]
)


@st.composite
def odd_rows(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a row of a ledger of messages that need not fit to the others."""
    first = draw(NUMBERS) + draw(st.sampled_from([0, 2**16 - 6]))
    return message(
        draw(EVENTS),
        first,
        draw(NUMBERS) * MINUTE,
        draw(NUMBERS),
        path=draw(PATHS),
        number=draw(st.integers(1, 3)),
        last=first + draw(st.integers(0, 4)),
        message_id=draw(st.none() | IDS),
    )


@st.composite
def odd_transfers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a row of a ledger of transfers that need not fit to the others."""
    accepted = draw(st.none() | NUMBERS.map(lambda at: at * MINUTE))
    row = transfer(draw(NUMBERS), draw(IDS), accepted, draw(NUMBERS) * MINUTE)
    changes = {
        "path": draw(PATHS),
        "message_id": draw(st.none() | IDS),
        "result": draw(st.sampled_from([MOVED, DEAD_LETTERED])),
    }
    return row | changes


@settings(max_examples=100)
@given(
    st.lists(odd_rows(), max_size=20),
    st.lists(odd_rows(), max_size=20),
    st.lists(odd_rows(), max_size=5),
    st.lists(odd_transfers(), max_size=8),
)
def test_the_number_of_buckets_changes_nothing_whatever_the_ledgers_state(
    home: list[dict[str, Any]],
    away: list[dict[str, Any]],
    before: list[dict[str, Any]],
    moved: list[dict[str, Any]],
) -> None:
    pieces = [
        Rows(LedgerKind.MESSAGES, HOME, home),
        Rows(LedgerKind.MESSAGES, AWAY, away),
        Rows(LedgerKind.MESSAGES, HOME, before, is_before=True),
        Rows(LedgerKind.TRANSFERS, SYPHON, moved),
    ]
    alone, divided = reconciled(pieces, 1), reconciled(pieces, 3)
    assert divided.statuses == alone.statuses
    assert divided.suspects == alone.suspects
    assert sorted(divided.transfers, key=str) == sorted(alone.transfers, key=str)


def test_a_queue_with_almost_all_messages_is_in_all_buckets() -> None:
    count, buckets = 40 * 2**16, 4
    firsts = range(1, count, 2**15)
    piece = Rows(LedgerKind.MESSAGES, HOME, [message("accepted", n, n, n) for n in firsts])
    accounts = [Account()]
    facts = Facts.of([facts_in([piece], accounts)], ["home"], accounts)
    sizes = Counter(bucket for bucket, _ in scatter([piece], facts, buckets))
    assert set(sizes) == set(range(buckets))
    found = reconciled([piece], buckets)
    assert found.statuses == {(HOME, "waiting"): len(firsts)}


def test_a_long_interval_is_counted_in_every_block_and_not_expanded() -> None:
    rows = [
        message("accepted", 10**9, MINUTE, 2, message_id="last"),
        message("standing", 1, MINUTE, 3, last=10**9),
        message("inventory", 0, MINUTE, 3, path="", number=0),
    ]
    found = reconciled([Rows(LedgerKind.MESSAGES, HOME, rows)], 3)
    assert found.statuses == {(HOME, "older"): 10**9 - 1, (HOME, "waiting"): 1}
    assert not found.suspects


def facts_of(piece: Rows) -> Facts:
    accounts = accounts_of(facts_in([piece], [Account()]).statements, 1)
    return Facts.of([facts_in([piece], accounts)], ["home"], accounts)


def test_queues_of_the_day_before_are_in_all_buckets() -> None:
    rows = [message("accepted", 1, MINUTE, 1, number=queue) for queue in range(1, 41)]
    piece = Rows(LedgerKind.MESSAGES, HOME, rows, is_before=True)
    read = scatter([piece], facts_of(piece), 4)
    assert {bucket for bucket, _ in read} == {0, 1, 2, 3}


def test_unexplained_messages_of_many_intervals_are_one_table_for_each_bucket() -> None:
    intervals, buckets = 1000, 3
    rows = [
        message("accepted", 1, MINUTE, 1, message_id="first"),
        *(message("standing", 10 * at, MINUTE, 2, last=10 * at + 2) for at in range(intervals)),
        message("inventory", 0, MINUTE, 2, path="", number=0),
    ]
    piece = Rows(LedgerKind.MESSAGES, HOME, rows)
    facts = facts_of(piece)
    read = list(scatter([piece], facts, buckets))
    decided = [
        kind for own in shuffled(read, buckets, int) for _, (kind, _) in decide(own, facts, buckets)
    ]
    assert decided.count(Kind.SUSPECT) <= buckets
    found = reconciled([piece], buckets)
    assert found.statuses == {
        (HOME, "older"): 1,
        (HOME, "waiting"): 1,
        (HOME, "unexplained"): 3 * intervals - 2,
    }
    assert len(found.suspects) == 3 * intervals - 2


def test_a_destination_whose_only_transfer_was_made_before_to_another_has_no_row() -> None:
    moved = [
        transfer(1, "a", MINUTE, 2 * MINUTE),
        transfer(1, "a", MINUTE, 3 * MINUTE, path="bills"),
    ]
    home = [
        message("accepted", 1, MINUTE, 1, message_id="a"),
        message("accepted", 1, MINUTE, 2, message_id="direct", path="bills", number=2),
    ]
    pieces = [Rows(LedgerKind.MESSAGES, HOME, home), Rows(LedgerKind.TRANSFERS, SYPHON, moved)]
    assert [(own.path, own.moved) for own in reconciled(pieces, 2).transfers] == [("orders", 1)]


def test_transfers_are_counted_if_no_message_has_a_time_of_acceptance() -> None:
    moved = [transfer(number, f"m{number}", None, number * MINUTE) for number in (1, 2)]
    [found] = reconciled([Rows(LedgerKind.TRANSFERS, SYPHON, moved)], 2).transfers
    assert (found.moved, found.delay_max) == (2, None)


def test_a_worker_without_memory_does_not_call_a_file_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(pq, "ParquetFile", fail)
    piece = FilePiece(LedgerKind.MESSAGES, 0, is_before=False, path="file", groups=(1,))
    with pytest.raises(pa.ArrowMemoryError):
        list(piece.tables(["at"]))


def test_files_are_divided_into_tasks_by_their_row_groups() -> None:
    files = [
        FilePiece(LedgerKind.MESSAGES, 0, False, f"{at}", groups)
        for at, groups in enumerate([(100_000,) * 7, (), (5,), (100_000, 30)])
    ]
    tasks = cut(files, 3)
    assert len(tasks) == 3
    read = Counter(
        (piece.path, group) for task in tasks for piece in task
        for group, rows in enumerate(piece.groups) if rows
    )  # fmt: skip
    assert read == {(f.path, group): 1 for f in files for group in range(len(f.groups))}
    sizes = [sum(piece.rows for piece in task) for task in tasks]
    assert max(sizes) <= 2 * min(sizes)
