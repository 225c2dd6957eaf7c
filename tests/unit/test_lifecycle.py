"""The lifecycle: a closed table, and a step that is in it or raises."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.broker.lifecycle import DURABLE, FINAL, TABLE, Cause, IllegalStepError, State, step

PAIRS = list(itertools.product(State, Cause))


def test_the_table_speaks_of_nothing_but_states_and_causes() -> None:
    assert all(pair in PAIRS for pair in TABLE)
    assert all(isinstance(after, State) for after in TABLE.values())


def test_every_cause_happens_to_something() -> None:
    assert {cause for _, cause in TABLE} == set(Cause)


def test_every_state_is_reached_from_pending() -> None:
    reached = {State.PENDING}
    for _ in State:
        reached |= {after for (before, _), after in TABLE.items() if before in reached}
    assert reached == set(State)


def test_every_message_can_end() -> None:
    ending = {State.GONE}
    for _ in State:
        ending |= {before for (before, _), after in TABLE.items() if after in ending}
    assert ending == set(State)


def test_nothing_happens_to_a_message_that_is_gone() -> None:
    assert not [cause for state, cause in TABLE if state is State.GONE]


def test_nothing_becomes_pending_again() -> None:
    assert State.PENDING not in TABLE.values()


def test_a_final_cause_always_ends_a_message_and_no_other_does() -> None:
    for (_, cause), after in TABLE.items():
        assert (after is State.GONE) == (cause in FINAL)


def test_a_state_in_the_log_is_a_state_without_a_lock() -> None:
    assert set(DURABLE) == set(State) - {State.PENDING}
    locked = {State.LOCKED, State.DEFERRED_LOCKED, State.LEASED, State.PENDING}
    assert locked.isdisjoint(DURABLE.values())
    assert all(DURABLE[after] is after for after in DURABLE.values())


@pytest.mark.parametrize(("state", "cause"), PAIRS)
def test_a_step_is_in_the_table_or_raises(state: State, cause: Cause) -> None:
    states = np.array([state], np.uint8)
    if (state, cause) in TABLE:
        assert step(states, cause).tolist() == [TABLE[state, cause]]
        return
    with pytest.raises(
        IllegalStepError, match=f"state {state.name} cannot have the cause {cause.name}"
    ):
        step(states, cause)


@replayed
@given(st.lists(st.sampled_from(State)), st.sampled_from(Cause))
def test_stepping_a_vector_is_stepping_each_or_none(states: list[State], cause: Cause) -> None:
    vector = np.array(states, np.uint8)
    if all((state, cause) in TABLE for state in states):
        assert step(vector, cause).tolist() == [TABLE[state, cause] for state in states]
    else:
        with pytest.raises(IllegalStepError):
            step(vector, cause)
    assert vector.tolist() == states
