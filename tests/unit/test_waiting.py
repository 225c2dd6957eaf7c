"""Waiting messages in columns behave like a list of dicts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.inside import spoil_first_active
from tests.unit.properties import replayed
from twinbus.broker.lifecycle import FINAL, TABLE, Cause, IllegalStepError, State
from twinbus.broker.queue.waiting import Indices, Rows, Waiting
from twinbus.limits import NEVER_US

TIMED = (State.LOCKED, State.DEFERRED_LOCKED, State.SCHEDULED)
EXPIRING = (State.ACTIVE, State.DEFERRED, State.TRANSFERRING)
times = st.integers(0, 20) | st.just(NEVER_US)
LARGE = 300  # rows added at once, so that columns grow and are reclaimed


def added(waiting: Waiting, rows: Rows) -> Indices:
    """Add rows; return where they are."""
    first = waiting.add(rows)
    return np.arange(first, first + len(rows.sequence))


class WaitingAgainstDicts(RuleBasedStateMachine):
    """Does everything twice and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting()
        self.model: list[dict[str, Any]] = []
        self.next_number = 1

    def live(self) -> list[dict[str, Any]]:
        return [row for row in self.model if row["state"] is not State.GONE]

    def numbers(self, at: Indices) -> list[int]:
        found: list[int] = self.waiting.get("sequence", at).tolist()
        return found

    def expected(self, wanted: Callable[[dict[str, Any]], Any]) -> list[int]:
        return [row["sequence"] for row in self.live() if wanted(row)]

    @rule(
        count=st.integers(1, 5) | st.just(LARGE),
        gap=st.integers(0, 3),
        state=st.sampled_from([State.PENDING, State.ACTIVE, State.DEFERRED, State.SCHEDULED]),
        expires=times,
        due=times,
        size=st.integers(0, 9),
    )
    def add(self, count: int, gap: int, state: State, expires: int, due: int, size: int) -> None:
        first = self.next_number + gap
        sequence = np.arange(first, first + count)
        self.next_number = first + count
        rows = Rows(sequence, 0, size, sequence * 2, 0, state, expires=expires, due=due)
        assert self.numbers(added(self.waiting, rows)) == sequence.tolist()
        for number in sequence.tolist():
            row = {"sequence": number, "state": state, "expires": expires, "due": due}
            self.model.append(row | {"size": size, "lock": 0})

    @rule(data=st.data(), cause=st.sampled_from(Cause), few=st.booleans())
    def step(self, data: st.DataObject, cause: Cause, *, few: bool) -> None:
        able = [row for row in self.live() if (row["state"], cause) in TABLE]
        chosen = data.draw(st.lists(st.sampled_from(able), unique_by=id)) if few and able else able
        at = self.waiting.find(np.array([r["sequence"] for r in chosen]))
        self.waiting.step(at, cause)
        due = {}
        if cause is Cause.RECEIVED:  # who receives says until when
            due = {"due": 9}
            self.waiting.set_due(at, 9)
        for row in chosen:
            row |= {"state": TABLE[row["state"], cause], **due}

    @rule(cause=st.sampled_from(Cause))
    def step_illegally(self, cause: Cause) -> None:
        if all((row["state"], cause) in TABLE for row in self.live()):
            return
        with pytest.raises(IllegalStepError):
            self.waiting.step(self.waiting.all(), cause)

    @rule(limit=st.integers(1, 10), due=st.integers(0, 20), lock=st.integers(1, 9))
    def receive(self, limit: int, due: int, lock: int) -> None:
        at = self.waiting.deliverable(limit)
        chosen = [row for row in self.live() if row["state"] is State.ACTIVE][:limit]
        assert self.numbers(at) == [row["sequence"] for row in chosen]
        self.waiting.step(at, Cause.RECEIVED)
        self.waiting.put("lock", at, lock)
        self.waiting.set_due(at, due)
        for row in chosen:
            row |= {"state": State.LOCKED, "due": due, "lock": lock}

    @precondition(lambda self: not self.waiting.count(State.PENDING))  # true when a turn begins
    @rule(now=st.integers(0, 25))
    def do_what_is_due(self, now: int) -> None:
        ripe = [r for r in self.live() if r["state"] in TIMED and r["due"] <= now]
        at = self.waiting.due(now)
        assert self.numbers(at) == [row["sequence"] for row in ripe]
        scheduled = self.waiting.in_state(at, State.SCHEDULED)
        self.waiting.step(scheduled, Cause.ACTIVATED)
        self.waiting.step(np.setdiff1d(at, scheduled), Cause.LAPSED)
        for row in ripe:
            cause = Cause.ACTIVATED if row["state"] is State.SCHEDULED else Cause.LAPSED
            row["state"] = TABLE[row["state"], cause]
        old = [r for r in self.live() if r["state"] in EXPIRING and r["expires"] <= now]
        at = self.waiting.expired(now)
        assert self.numbers(at) == [row["sequence"] for row in old]
        self.waiting.step(at, Cause.EXPIRED)
        for row in old:
            row["state"] = State.GONE

    @rule()
    def reclaim(self) -> None:
        self.waiting.reclaim()

    @rule(first=st.integers(0, 700), last=st.integers(0, 700))
    def find(self, first: int, last: int) -> None:
        asked = np.arange(first, min(last, first + 50))
        at = self.waiting.find(asked)
        live = set(self.expected(lambda _row: True))
        assert (at >= 0).tolist() == [number in live for number in asked.tolist()]
        assert self.numbers(at[at >= 0]) == [n for n in asked.tolist() if n in live]
        assert self.numbers(self.waiting.between(first, last)) == self.expected(
            lambda row: first <= row["sequence"] <= last
        )
        assert (
            self.numbers(self.waiting.from_number(first, 7))
            == self.expected(
                lambda row: row["sequence"] >= first and row["state"] is not State.PENDING
            )[:7]
        )
        assert self.numbers(self.waiting.in_batches(2 * first, 2 * last)) == self.expected(
            lambda row: first <= row["sequence"] <= last and row["state"] is not State.PENDING
        )

    @rule(lock=st.integers(0, 9))
    def find_by_lock(self, lock: int) -> None:
        found = self.waiting.in_state(self.waiting.all(), State.LOCKED, State.DEFERRED_LOCKED)
        assert self.numbers(self.waiting.locked_by(found, lock)) == self.expected(
            lambda row: (
                row["state"] in (State.LOCKED, State.DEFERRED_LOCKED) and row["lock"] == lock
            )
        )

    @invariant()
    def counts_agree(self) -> None:
        live = self.live()
        assert len(self.waiting) == len(live)
        for state in set(State) - {State.GONE}:
            assert self.waiting.count(state) == sum(row["state"] is state for row in live)
        assert self.waiting.size_in_bytes == sum(row["size"] for row in live)
        assert self.numbers(self.waiting.all()) == [row["sequence"] for row in live]
        assert self.waiting.faults() == []

    @invariant()
    def bounds_hold(self) -> None:
        due = [row["due"] for row in self.live() if row["state"] in TIMED]
        assert self.waiting.next_due <= min(due, default=NEVER_US)
        expires = [row["expires"] for row in self.live() if row["state"] in EXPIRING]
        assert self.waiting.next_expiry <= min(expires, default=NEVER_US)


TestWaitingAgainstDicts = WaitingAgainstDicts.TestCase
TestWaitingAgainstDicts.settings = settings(replayed, stateful_step_count=30)


def rows(count: int, state: State = State.ACTIVE) -> Rows:
    return Rows(np.arange(1, count + 1), 0, 1, 0, 0, state)


def test_nothing_changes_when_one_of_the_rows_may_not_step() -> None:
    waiting = Waiting()
    at = added(waiting, rows(3))
    waiting.step(at[1:2], Cause.RECEIVED)
    with pytest.raises(IllegalStepError):
        waiting.step(at, Cause.EXPIRED)
    assert waiting.get("state", at).tolist() == [State.ACTIVE, State.LOCKED, State.ACTIVE]
    assert waiting.faults() == []


def test_rows_of_messages_that_are_gone_give_their_memory_back() -> None:
    waiting = Waiting()
    at = added(waiting, rows(1000))
    full = waiting.memory_bytes()
    waiting.step(at[:900], Cause.EXPIRED)
    waiting.reclaim()
    assert waiting.memory_bytes() <= full // 5
    assert waiting.find(np.array([900, 901])).tolist() == [-1, 0]


def test_a_message_at_rest_takes_37_bytes_and_53_once_locked() -> None:
    waiting = Waiting()
    at = added(waiting, rows(100))
    assert waiting.memory_bytes() == 37 * 100
    waiting.put("lock", at, 7)
    waiting.set_due(at, 7)
    assert waiting.memory_bytes() == 53 * 100


def test_deaths_are_reported_without_repeating_them() -> None:
    waiting = Waiting()
    waiting.add(Rows(np.arange(1, 5), 0, 1, 0, 0, State.ACTIVE, death=np.array([4, 2, 4, 2])))
    assert waiting.deaths() == {2, 4}


@pytest.mark.parametrize("cause", sorted(FINAL))
def test_a_message_that_ends_takes_no_size(cause: Cause) -> None:
    before = next(state for (state, found) in TABLE if found is cause)
    waiting = Waiting()
    waiting.step(added(waiting, rows(2, before)), cause)
    assert (waiting.size_in_bytes, len(waiting)) == (0, 0)


@pytest.mark.parametrize("spoil", ["counts", "size_in_bytes", "sequence", "first_active"])
def test_counts_that_do_not_add_up_are_found(spoil: str) -> None:
    waiting = Waiting()
    at = added(waiting, rows(3))
    if spoil == "counts":
        waiting.counts[State.ACTIVE] += 1
    elif spoil == "size_in_bytes":
        waiting.size_in_bytes += 1
    elif spoil == "sequence":
        waiting.put("sequence", at[:1], 2)
    else:
        spoil_first_active(waiting)
    assert len(waiting.faults()) == 1


def test_rows_are_found_by_time_even_if_the_clock_was_set_back() -> None:
    waiting = Waiting()
    for number, enqueued in enumerate((100, 200, 50), 1):
        row = waiting.add_one(number, enqueued, 1, 1)
        waiting.admit(row, 1, Cause.ENQUEUED)
    assert waiting.enqueued_before(101, 10).tolist() == [0, 2]
    assert waiting.enqueued_before(101, 1).tolist() == [0]
