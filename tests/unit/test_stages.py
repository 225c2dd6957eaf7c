"""The stages: what a metered operation counts towards, and what is billed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.properties import replayed
from twinbus.cost.stages import COMPLETIONS, DIVERTED, Stage, is_billed, rule_of
from twinbus.cost.stages import stage_operations as counted
from twinbus.protocol.operations import Purpose

Row = tuple[tuple[str, str, str], dict[str, int]]
KINDS = ("Send", "Receive", "Settle", "RenewLocks", "LeaseRange", "ReadRange", "CreateEntity")
REFUSALS = ("ServerBusy", "EntityNotFound", "QuotaExceeded", "InvalidArgument", "Unauthorized")


def row(key: str, messages: int = 0, units: int = 1, count: int = 1) -> Row:
    operation, purpose, outcome = key.split()
    numbers = {"count": count, "messages": messages, "bytes": units * 1000, "units": units}
    return (operation, purpose, outcome), numbers


def operations_of(key: str, messages: int = 0, units: int = 1, count: int = 1) -> dict[Stage, int]:
    return counted(dict([row(key, messages, units, count)]))


def way_home(units: int) -> dict[tuple[str, str, str], dict[str, int]]:
    return dict(
        [
            row("Send backlog ok", 1, units),
            row("LeaseRange syphon ok"),
            row("ReadRange syphon ok", 1, units),
            row("Send syphon ok", 1, units),
            row("SettleRange syphon ok", 1),
            row("Receive application ok", 1, units),
            row("Settle application ok", 1),
        ]
    )


@replayed
@given(st.integers(1, 4))
def test_a_diverted_message_costs_its_four_stages_and_two_completions(units: int) -> None:
    found = counted(way_home(units))
    assert found == dict.fromkeys(DIVERTED, units) | dict.fromkeys(COMPLETIONS, 1)


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        ("Send application ok", Stage.SEND),
        ("Send ping ok", Stage.PING),
        ("Receive idle_poll Empty", Stage.IDLE_POLL),
        ("LeaseRange idle_poll Empty", Stage.IDLE_POLL),
        ("Receive application Empty", Stage.OTHER),
        ("RenewLocks application ok", Stage.OTHER),
        ("RenewRange syphon ok", Stage.OTHER),
        ("Peek application ok", Stage.OTHER),
        ("CreateEntity management ok", Stage.MANAGEMENT),
    ],
)
def test_an_operation_belongs_to_a_stage_and_counts_one(key: str, stage: Stage) -> None:
    assert operations_of(key) == {stage: 1}
    assert operations_of(key, units=7, count=7) == {stage: 7}


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("operation", KINDS)
def test_what_was_refused_counts_nowhere(operation: str, purpose: Purpose) -> None:
    assert [rule_of(operation, purpose, outcome) for outcome in REFUSALS] == [None] * len(REFUSALS)


def test_a_batch_counts_for_each_of_its_messages() -> None:
    assert operations_of("Send application ok", 100, 100) == {Stage.SEND: 100}
    assert operations_of("Receive application ok", 3, 12) == {Stage.RECEIVE_FROM_PRIMARY: 12}
    both = [row("Receive application ok", 1), row("ReceiveDeferred application ok", 2, 2)]
    assert counted(dict(both)) == {Stage.RECEIVE_FROM_PRIMARY: 3}
    assert operations_of("Settle application ok", 100, 100) == {Stage.COMPLETE_IN_PRIMARY: 100}
    assert operations_of("SettleRange syphon ok", 100, 100) == {Stage.COMPLETE_IN_BACKLOG: 100}


@replayed
@given(st.sampled_from(Stage), st.booleans(), st.booleans())
def test_only_completions_and_management_have_a_switch(
    stage: Stage, completions: bool, management: bool
) -> None:
    expected = {
        Stage.COMPLETE_IN_BACKLOG: completions,
        Stage.COMPLETE_IN_PRIMARY: completions,
        Stage.MANAGEMENT: management,
    }.get(stage, True)
    assert is_billed(stage, completions=completions, management=management) is expected
