"""Completions of one message take a short way, which leads to the same place as the long one."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inside import row_states
from tests.namespaces import embedded
from tests.scenarios.site import Site
from tests.unit.properties import replayed
from twinbus.broker.accounts.trail import Changes, table_of
from twinbus.broker.lifecycle import Cause, State
from twinbus.broker.queue.waiting import Rows, Waiting
from twinbus.broker.store.change_rows import ChangeRow, ChangeRows
from twinbus.broker.store.commit import Commit
from twinbus.broker.store.log_format import PartKind
from twinbus.broker.store.storage import DiskStorage
from twinbus.broker.turn.engine import Storages
from twinbus.broker.undo import Undo
from twinbus.clock import ManualClock
from twinbus.entities import QueueDescription
from twinbus.errors import MessageLockLostError
from twinbus.message import BrokeredMessage
from twinbus.protocol.commands import (
    CreateEntity,
    Disposition,
    Peek,
    Receive,
    Send,
    Settle,
)
from twinbus.protocol.requests import Request

INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.builds(ChangeRow, INT32, INT64, st.integers(0, 255), INT32), min_size=1)


# -- the part in the log ---------------------------------------------------------------------------


@given(ROWS)
@replayed
def test_changes_without_columns_have_the_bytes_that_arrow_writes(rows: list[ChangeRow]) -> None:
    part = ChangeRows(rows)
    assert bytes(part.serialize()) == part.batch().serialize().to_pybytes()
    assert [tuple(row.values()) for row in part.batch().to_pylist()] == [*map(tuple, rows)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=5))
@replayed
def test_a_record_has_the_same_changes_in_either_form(gone: list[tuple[bool, int]]) -> None:
    mixed, arrays = Commit(1), Commit(1)
    for is_one, number in gone:
        if is_one:
            mixed.kept.completed_one(7, number)
        else:
            mixed.kept.gone(7, np.array([number]), Cause.COMPLETED)
        arrays.kept.gone(7, np.array([number]), Cause.COMPLETED)
    [found], [expected] = mixed.parts(5), arrays.parts(5)
    assert found.kind is expected.kind is PartKind.CHANGES
    assert bytes(found.columns.serialize()) == bytes(expected.columns.serialize())


@given(st.lists(st.tuples(st.booleans(), ROWS), min_size=1, max_size=4))
@replayed
def test_the_trail_is_the_same_in_either_form(records: list[tuple[bool, list[ChangeRow]]]) -> None:
    known = [
        (is_few, [row._replace(state=0, failures=Cause.COMPLETED.value) for row in rows])
        for is_few, rows in records
    ]
    either = [
        Changes(ChangeRows(rows) if is_few else ChangeRows(rows).batch(), 1, at)
        for at, (is_few, rows) in enumerate(known)
    ]
    columns = [Changes(ChangeRows(rows).batch(), 1, at) for at, (_, rows) in enumerate(known)]
    assert table_of(either, str).equals(table_of(columns, str))


# -- the queue -------------------------------------------------------------------------------------


def locked(count: int, undo: Undo) -> Waiting:
    waiting = Waiting(undo)
    numbers = np.arange(1, count + 1)
    waiting.add(Rows(numbers, 0, numbers * 3, numbers, 0, State.ACTIVE))
    at = waiting.deliverable(count)
    waiting.step(at, Cause.RECEIVED)
    waiting.put("lock", at, 9)
    return waiting


def state_of(waiting: Waiting) -> tuple[Any, ...]:
    return (
        row_states(waiting),
        waiting.counts.tolist(),
        waiting.live,
        waiting.size_in_bytes,
        waiting.faults(),
    )


@given(st.integers(1, 6), st.data())
@replayed
def test_one_completed_row_is_counted_like_many_and_can_be_put_back(
    count: int, data: st.DataObject
) -> None:
    undo = Undo()
    short, long = locked(count, undo), locked(count, Undo())
    row = data.draw(st.integers(0, count - 1))
    before = state_of(short)
    undo.begin()
    assert short.complete(row) == long.get("batch", np.array([row]))[0]
    long.step(np.array([row]), Cause.COMPLETED)
    assert state_of(short) == state_of(long)
    undo.roll_back()
    assert state_of(short) == before


ADDED = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans()), max_size=5)


@given(ADDED, ADDED, st.booleans())
@replayed
def test_rows_that_were_added_one_by_one_are_removed_like_others_when_a_command_fails(
    kept: list[tuple[int, int, bool]], undone: list[tuple[int, int, bool]], expire: bool
) -> None:
    states = []
    for is_short in (True, False):
        undo = Undo()
        waiting = locked(2, undo)
        number = 2
        for rows, keeps in ((kept, True), (undone, False)):
            if not keeps:
                before = state_of(waiting), waiting.next_due, waiting.next_expiry
            undo.begin()
            for size, moment, has_due in rows:
                number += 1
                more = {"expires": moment} if expire else {}
                more |= {"due": moment} if has_due else {}
                if is_short:
                    waiting.add_one(number, 0, size, number, **more)
                else:
                    waiting.add(Rows(np.array([number]), 0, size, number, 0, **more))
            if keeps:
                undo.end()
        undo.roll_back()
        assert (state_of(waiting), waiting.next_due, waiting.next_expiry) == before
        states.append(before)
    assert states[0] == states[1]


def completed(site: Site, tokens: Sequence[pa.Array]) -> list[str]:
    """Complete messages one by one; return what became of each."""
    found = []
    for token in tokens:
        try:
            site.ask(Settle("orders", token, Disposition.COMPLETE))
            found.append("completed")
        except MessageLockLostError as error:
            found.append(f"lost, settled {error.facts['settled']}")
    return found


@given(order=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8))
@settings(replayed, max_examples=15)
def test_single_completions_do_what_a_completion_of_several_does(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("settling")
    outcomes, left = [], []
    for name in ("short", "long"):
        site = Site(folder / name)
        site.ask(CreateEntity(QueueDescription(path="orders", lock_duration=timedelta(seconds=5))))
        site.ask(Send("orders", [BrokeredMessage(bytes([n])) for n in range(6)]))
        tokens = site.ask(Receive("orders", 6)).column("lock_token")
        answers = []
        for number, lapses in order:
            token = tokens.slice(number, 1)
            if name == "long":  # a token that is named twice settles once, on the long way
                token = pa.concat_arrays([token, token])
            answers += completed(site, [token])
            if lapses:
                site.clock.advance(timedelta(seconds=6))
        outcomes.append(answers)
        assert not site.engine.namespace.faults()
        site.reopen()  # what the log says
        left.append(site.ask(Peek("orders", 0, 10)).column("sequence_number").to_pylist())
        site.embedded.close()
    assert outcomes[0] == outcomes[1]
    assert left[0] == left[1]


# -- the time of the answer ------------------------------------------------------------------------


class WatchedStorage(DiskStorage):
    """Tells when the log is flushed."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def sync(self, descriptor: int) -> None:
        self._tell("flushed")
        super().sync(descriptor)


class Answered(Request):
    """Tells when it is answered."""

    __slots__ = ("_tell",)

    def __init__(self, command: Any, tell: Callable[[str], None]) -> None:
        super().__init__(command)
        self._tell = tell

    def answer(self, value: Any) -> None:  # noqa: ARG002
        self._tell("answered")


def test_a_completion_is_answered_when_it_is_durable(tmp_path: Path) -> None:
    events: list[str] = []
    storages = Storages(log=WatchedStorage(events.append))
    with embedded(tmp_path, ManualClock(), storages, threaded=False) as namespace:
        namespace.ask(CreateEntity(QueueDescription(path="orders")))
        namespace.ask(Send("orders", [BrokeredMessage()]))
        tokens = namespace.ask(Receive("orders", 1)).column("lock_token")
        events.clear()
        namespace.hand_over(
            [Answered(Settle("orders", tokens, Disposition.COMPLETE), events.append)]
        )
        assert events == ["flushed", "answered"]
