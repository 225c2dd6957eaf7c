"""The health of an entity: a closed table, a few intervals, and clocks that are set back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed_at_length
from twinbus.limits import NEVER_US
from twinbus.pairing.health import (
    TRANSITIONS,
    Health,
    HealthState,
    Sign,
    Timing,
    record,
    verdict,
)

HEALTHY, SUSPECT, FAILED_OVER = HealthState.HEALTHY, HealthState.SUSPECT, HealthState.FAILED_OVER
RETURNING, SWITCHING = HealthState.RETURNING, HealthState.SWITCHING
TIMING = Timing(failover_us=60, ping_us=10, switch_us=5)
AT_ONCE = Timing(failover_us=0, ping_us=10)
NOW = 1_000
PAIRS = list(itertools.product(HealthState, Sign))
# The specification's four sentences on sending, as what follows each state and sign.
LAW = {
    (HEALTHY, Sign.FAILURE): SUSPECT,
    (HEALTHY, Sign.MARKED): HEALTHY,
    (SUSPECT, Sign.SUCCESS): HEALTHY,
    (SUSPECT, Sign.FAILURE): SUSPECT,
    (SUSPECT, Sign.MARKED): HEALTHY,
    (SUSPECT, Sign.RAN_OUT): FAILED_OVER,
    (FAILED_OVER, Sign.SUCCESS): FAILED_OVER,
    (FAILED_OVER, Sign.FAILURE): FAILED_OVER,
    (FAILED_OVER, Sign.PASSED): HEALTHY,
    (FAILED_OVER, Sign.PING_SENT): FAILED_OVER,
    (FAILED_OVER, Sign.PING_FAILED): FAILED_OVER,
    (FAILED_OVER, Sign.PING_PASSED): HEALTHY,
    (FAILED_OVER, Sign.PING_ANSWERED): HEALTHY,
    (FAILED_OVER, Sign.MARKED): HEALTHY,
    # With `preserve_order`: nothing but the way home of the diverted messages ends the detour.
    (FAILED_OVER, Sign.REACHED): RETURNING,
    **{
        (state, sign): state
        for state in (RETURNING, SWITCHING)
        for sign in (Sign.SUCCESS, Sign.FAILURE, Sign.MARKED, Sign.LOOKED, Sign.LOOK_ON)
    },
    (RETURNING, Sign.CAUGHT_UP): SWITCHING,
    (SWITCHING, Sign.GAVE_UP): RETURNING,
    (RETURNING, Sign.HOME): HEALTHY,
    (SWITCHING, Sign.HOME): HEALTHY,
}


def entity(state: HealthState) -> Health:
    """Return an entity that came to a state just now."""
    due = {HEALTHY: NEVER_US, SUSPECT: NOW + 60}.get(state, NOW + 10)
    return Health(state, NOW, 0 if state is HEALTHY else 1, due)


# -- the table -------------------------------------------------------------------------------------


def test_the_table_is_the_law_and_nothing_else() -> None:
    assert TRANSITIONS == LAW


@pytest.mark.parametrize(("state", "sign"), PAIRS)
def test_a_sign_is_in_the_table_or_raises(state: HealthState, sign: Sign) -> None:
    if (state, sign) not in LAW:
        with pytest.raises(AssertionError, match=f"{state.value}.*{sign.value}"):
            record(entity(state), sign, NOW, TIMING)
        return
    assert record(entity(state), sign, NOW, TIMING).state is LAW[state, sign]


def test_every_sign_means_something_somewhere() -> None:
    assert {sign for _, sign in LAW} == set(Sign)


def test_an_entity_is_healthy_until_it_fails() -> None:
    assert Health().state is HEALTHY
    assert verdict(Health(), NOW, TIMING) == Health()


# -- the failover timer ----------------------------------------------------------------------------


def test_a_failure_starts_the_timer() -> None:
    assert record(Health(), Sign.FAILURE, NOW, TIMING) == Health(SUSPECT, NOW, 1, NOW + 60)


def test_the_timer_starts_once() -> None:
    first = record(Health(), Sign.FAILURE, NOW, TIMING)
    second = record(first, Sign.FAILURE, NOW + 30, TIMING)
    assert second == Health(SUSPECT, NOW, 2, NOW + 60)


@pytest.mark.parametrize(("after", "state"), [(59, SUSPECT), (60, FAILED_OVER), (99, FAILED_OVER)])
def test_the_timer_runs_out_after_the_failover_interval(after: int, state: HealthState) -> None:
    suspect = record(Health(), Sign.FAILURE, NOW, TIMING)
    assert verdict(suspect, NOW + after, TIMING).state is state


@pytest.mark.parametrize("sign", [Sign.SUCCESS, Sign.MARKED])
def test_one_success_clears_the_timer(sign: Sign) -> None:
    suspect = record(Health(), Sign.FAILURE, NOW, TIMING)
    cleared = record(suspect, sign, NOW + 59, TIMING)
    assert cleared == Health(HEALTHY, NOW + 59)
    again = record(cleared, Sign.FAILURE, NOW + 61, TIMING)
    assert again == Health(SUSPECT, NOW + 61, 1, NOW + 121)


@pytest.mark.parametrize("sign", [Sign.SUCCESS, Sign.FAILURE])
def test_a_success_after_the_timer_ran_out_comes_too_late(sign: Sign) -> None:
    suspect = record(Health(), Sign.FAILURE, NOW, TIMING)
    assert record(suspect, sign, NOW + 60, TIMING).state is FAILED_OVER


def test_with_an_interval_of_zero_the_first_failure_fails_over() -> None:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    assert failed == Health(FAILED_OVER, NOW, 1, NOW + 10)


# -- pings -----------------------------------------------------------------------------------------


def test_a_ping_is_due_one_ping_interval_after_the_failover() -> None:
    suspect = record(Health(), Sign.FAILURE, NOW, TIMING)
    failed = verdict(suspect, NOW + 60, TIMING)
    assert (failed.since, failed.due) == (NOW + 60, NOW + 70)


def test_the_next_ping_follows_one_interval_after_the_last_whatever_became_of_it() -> None:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    sent = record(failed, Sign.PING_SENT, NOW + 10, AT_ONCE)
    assert sent == Health(FAILED_OVER, NOW, 1, NOW + 20)
    assert record(sent, Sign.PING_FAILED, NOW + 15, AT_ONCE) == sent


@pytest.mark.parametrize("sign", [Sign.SUCCESS, Sign.FAILURE])
def test_sends_under_way_move_no_ping(sign: Sign) -> None:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    after = record(failed, sign, NOW + 5, AT_ONCE)
    assert (after.state, after.since, after.due) == (FAILED_OVER, NOW, NOW + 10)


@pytest.mark.parametrize("sign", [Sign.PING_PASSED, Sign.MARKED])
def test_a_return_forgets_the_failures(sign: Sign) -> None:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    assert record(failed, sign, NOW + 5, AT_ONCE) == Health(HEALTHY, NOW + 5)


def test_time_alone_never_heals() -> None:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    assert verdict(failed, NOW + 10**12, AT_ONCE).state is FAILED_OVER


# -- the return, with `preserve_order` -------------------------------------------------------------


def returning() -> Health:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    return record(failed, Sign.REACHED, NOW, TIMING)


def test_a_return_begins_with_a_look_at_once() -> None:
    assert returning() == Health(RETURNING, NOW, 1, NOW)


def test_looks_follow_each_other_by_a_ping_interval() -> None:
    assert record(returning(), Sign.LOOKED, NOW + 3, TIMING).due == NOW + 13


def test_a_look_past_messages_of_other_entities_goes_on_at_once() -> None:
    looked = record(returning(), Sign.LOOKED, NOW, TIMING)
    assert record(looked, Sign.LOOK_ON, NOW + 1, TIMING).due == NOW + 1


def test_a_switch_that_takes_too_long_is_given_up_for_a_ping_interval() -> None:
    switching = record(returning(), Sign.CAUGHT_UP, NOW, TIMING)
    assert switching == Health(SWITCHING, NOW, 1, NOW)
    assert verdict(switching, NOW + 4, TIMING).state is SWITCHING
    assert verdict(switching, NOW + 5, TIMING) == Health(RETURNING, NOW + 5, 1, NOW + 15)


def test_while_sends_wait_the_next_look_comes_no_later_than_the_end_of_the_wait() -> None:
    switching = record(returning(), Sign.CAUGHT_UP, NOW, TIMING)
    assert record(switching, Sign.LOOKED, NOW + 1, TIMING).due == NOW + 5


def test_a_switch_of_a_clock_that_was_set_back_lasts_no_longer_than_from_then() -> None:
    switching = record(returning(), Sign.CAUGHT_UP, NOW, TIMING)
    back = verdict(switching, NOW - 900, TIMING)
    assert back.state is SWITCHING
    assert verdict(back, NOW - 895, TIMING).state is RETURNING


# -- a clock that is set back ----------------------------------------------------------------------


def test_a_timer_of_a_clock_that_was_set_back_runs_one_interval_from_then() -> None:
    suspect = record(Health(), Sign.FAILURE, NOW, TIMING)
    back = verdict(suspect, NOW - 900, TIMING)
    assert (back.state, back.due) == (SUSPECT, NOW - 840)
    assert verdict(back, NOW - 840, TIMING).state is FAILED_OVER


def test_a_ping_of_a_clock_that_was_set_back_is_due_one_interval_from_then() -> None:
    failed = record(Health(), Sign.FAILURE, NOW, AT_ONCE)
    assert verdict(failed, NOW - 900, AT_ONCE).due == NOW - 890


def test_with_an_interval_of_zero_a_clock_set_back_still_fails_over_at_once() -> None:
    healthy = Health(HEALTHY, NOW)
    assert record(healthy, Sign.FAILURE, NOW - 900, AT_ONCE).state is FAILED_OVER


# -- any history -----------------------------------------------------------------------------------

signs = st.sampled_from(
    [
        *(Sign.SUCCESS, Sign.FAILURE, Sign.MARKED, Sign.PING_FAILED),
        *(Sign.REACHED, Sign.LOOKED, Sign.LOOK_ON, Sign.CAUGHT_UP, Sign.HOME),
    ]
)
histories = st.lists(st.tuples(signs, st.integers(-200, 200)), max_size=30)
timings = st.builds(Timing, failover_us=st.integers(0, 100), ping_us=st.integers(1, 100))


@replayed_at_length
@given(histories, timings)
def test_what_is_due_is_never_further_ahead_than_its_interval(
    history: list[tuple[Sign, int]], timing: Timing
) -> None:
    health, now = Health(), NOW
    for sign, passed in history:
        now += passed
        health = verdict(health, now, timing)
        if (health.state, sign) in LAW:
            health = record(health, sign, now, timing)
        if health.state is HEALTHY:
            assert (health.due, health.failures) == (NEVER_US, 0)
        else:
            is_suspect = health.state is SUSPECT
            assert health.due <= now + (timing.failover_us if is_suspect else timing.ping_us)
            assert health.failures >= 1


@replayed_at_length
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=30), timings)
def test_an_entity_fails_over_when_and_only_when_no_success_came_for_the_whole_interval(
    history: list[tuple[bool, int]], timing: Timing
) -> None:
    health, now = Health(), NOW
    first_failure: int | None = None
    has_failed_over = False
    for succeeds, passed in history:
        now += passed
        health = verdict(health, now, timing)
        sign = Sign.SUCCESS if succeeds else Sign.FAILURE
        if (health.state, sign) in LAW:  # a success of a healthy entity is no news
            health = record(health, sign, now, timing)
        ran_out = first_failure is not None and now - first_failure >= timing.failover_us
        has_failed_over = has_failed_over or ran_out
        if succeeds:
            first_failure = None
        elif first_failure is None:
            first_failure = now
            has_failed_over = has_failed_over or timing.failover_us == 0
        assert (health.state is FAILED_OVER) == has_failed_over


@replayed_at_length
@given(histories, timings, st.integers(-200, 200))
def test_looking_twice_sees_the_same(
    history: list[tuple[Sign, int]], timing: Timing, passed: int
) -> None:
    health, now = Health(), NOW
    for sign, span in history:
        now += span
        health = verdict(health, now, timing)
        if (health.state, sign) in LAW:
            health = record(health, sign, now, timing)
    once = verdict(health, now + passed, timing)
    assert verdict(once, now + passed, timing) == once
