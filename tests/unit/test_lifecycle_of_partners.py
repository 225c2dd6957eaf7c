"""What becomes of a factory when its partner ends: the table, case by case."""

from itertools import combinations, product

import pytest

from twinbus.client.state import FactoryState
from twinbus.clock import to_us
from twinbus.limits import NEVER_US, PARTNER_GRACE
from twinbus.pairing.lifecycle import Partnership, Side, after_state, verdict

NOW = 1_000_000_000
GRACE = to_us(PARTNER_GRACE)
CLOSING, CLOSED, FAULTED = FactoryState.CLOSING, FactoryState.CLOSED, FactoryState.FAULTED
both_sides = pytest.mark.parametrize("side", Side)
Step = tuple[Side, FactoryState]


def after(*steps: Step, now: int = NOW) -> Partnership:
    """Return the partnership of two factories that went through these states."""
    partnership = Partnership()
    for side, state in steps:
        partnership = after_state(partnership, side, state, now)
    return partnership


def sentenced(partnership: Partnership, now: int) -> Side | None:
    """Return who is faulted when that time has come."""
    _, fault = verdict(partnership, now)
    return fault.side if fault else None


def interleavings(first: list[Step], second: list[Step]) -> list[list[Step]]:
    """Return every order in which two factories can do what each does in its own order."""
    count = len(first) + len(second)
    found = []
    for places in combinations(range(count), len(first)):
        items, remaining = iter(first), iter(second)
        found.append([next(items if at in places else remaining) for at in range(count)])
    return found


def closing(side: Side) -> list[Step]:
    return [(side, CLOSING), (side, CLOSED)]


# -- sides -----------------------------------------------------------------------------------------


@both_sides
def test_a_factory_is_the_partner_of_its_partner(side: Side) -> None:
    assert side.partner is not side
    assert side.partner.partner is side


# -- while both live -------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [0, NOW, NEVER_US])
def test_time_does_nothing_to_two_factories_that_live(now: int) -> None:
    assert verdict(Partnership(), now) == (Partnership(), None)
    assert not Partnership().is_over


@both_sides
def test_a_factory_that_begins_to_close_faults_nobody_however_long_it_takes(side: Side) -> None:
    begun = after((side, CLOSING))
    assert sentenced(begun, NOW + 100 * GRACE) is None
    assert (begun.is_over, begun.due) == (False, NEVER_US)


# -- one ends --------------------------------------------------------------------------------------


@both_sides
@pytest.mark.parametrize("how", [[CLOSING, CLOSED], [CLOSED], [FAULTED], [CLOSING, FAULTED]])
def test_when_a_factory_ends_its_partner_has_5_seconds(side: Side, how: list[FactoryState]) -> None:
    ended = after(*((side, state) for state in how))
    assert ended.due == NOW + 5_000_000
    assert sentenced(ended, NOW + GRACE - 1) is None
    assert sentenced(ended, NOW + GRACE) is side.partner


@both_sides
@pytest.mark.parametrize(("state", "word"), [(CLOSED, "was closed"), (FAULTED, "faulted")])
def test_the_sentence_says_how_one_ended_and_what_the_other_failed_to_do(
    side: Side, state: FactoryState, word: str
) -> None:
    _, fault = verdict(after((side, state)), NOW + GRACE)
    assert fault is not None
    assert fault.cause.startswith(word)
    assert "not closed within 5 seconds" in fault.cause


@both_sides
def test_a_factory_that_is_being_closed_when_its_partner_faults_is_left_alone(side: Side) -> None:
    ended = after((side.partner, CLOSING), (side, FAULTED))
    assert ended.is_over
    assert sentenced(ended, NOW + 100 * GRACE) is None


@both_sides
def test_the_5_seconds_begin_when_it_is_closed_and_not_when_that_begins(side: Side) -> None:
    begun = after((side, CLOSING))
    ended = after_state(begun, side, CLOSED, NOW + 10 * GRACE)
    assert ended.due == NOW + 11 * GRACE


@both_sides
def test_a_partner_is_sentenced_once(side: Side) -> None:
    partnership, _ = verdict(after(*closing(side)), NOW + GRACE)
    assert partnership.is_over
    assert verdict(partnership, NOW + 2 * GRACE) == (partnership, None)


@both_sides
@pytest.mark.parametrize("state", [CLOSING, CLOSED, FAULTED])
def test_a_partner_that_ends_or_begins_to_within_5_seconds_is_left_alone(
    side: Side, state: FactoryState
) -> None:
    partnership = after_state(after(*closing(side)), side.partner, state, NOW + GRACE - 1)
    assert partnership.is_over
    assert sentenced(partnership, NOW + 100 * GRACE) is None


@both_sides
def test_a_factory_that_is_faulted_after_the_5_seconds_faults_nobody(side: Side) -> None:
    partnership, _ = verdict(after(*closing(side)), NOW + GRACE)
    assert after_state(partnership, side.partner, FAULTED, NOW + GRACE).is_over


@both_sides
@pytest.mark.parametrize("state", [CLOSING, CLOSED, FAULTED])
def test_a_factory_that_has_ended_reports_nothing_more(side: Side, state: FactoryState) -> None:
    ended = after(*closing(side))
    assert after_state(ended, side, state, NOW + 1) == ended


# -- closing both ----------------------------------------------------------------------------------


@both_sides
def test_a_factory_whose_partner_is_being_closed_may_end_first(side: Side) -> None:
    ended = after((side.partner, CLOSING), (side, CLOSED))
    assert ended.is_over
    assert sentenced(ended, NOW + 100 * GRACE) is None


@pytest.mark.parametrize(
    "steps",
    interleavings(closing(Side.PRIMARY), closing(Side.SECONDARY)),
    ids=lambda steps: " ".join(f"{side.value[0]}-{state.value}" for side, state in steps),
)
def test_two_factories_that_are_closed_in_any_order_fault_nobody(steps: list[Step]) -> None:
    ended = after(*steps)
    assert ended.is_over
    assert sentenced(ended, NOW + 100 * GRACE) is None


@pytest.mark.parametrize("first", Side)
@pytest.mark.parametrize("second", Side)
def test_while_both_are_being_closed_neither_is_waited_for(first: Side, second: Side) -> None:
    begun = after((first, CLOSING), (first.partner, CLOSING))
    ended = after_state(begun, second, CLOSED, NOW)
    assert sentenced(ended, NOW + 100 * GRACE) is None


# -- every case ------------------------------------------------------------------------------------

BEFORE: dict[str, list[Step]] = {
    "nothing": [],
    "primary closing": [(Side.PRIMARY, CLOSING)],
    "secondary closing": [(Side.SECONDARY, CLOSING)],
    "both closing": [(Side.PRIMARY, CLOSING), (Side.SECONDARY, CLOSING)],
    "both closing, secondary first": [(Side.SECONDARY, CLOSING), (Side.PRIMARY, CLOSING)],
    "primary closed": closing(Side.PRIMARY),
    "secondary closed": closing(Side.SECONDARY),
    "primary faulted": [(Side.PRIMARY, FAULTED)],
    "secondary faulted": [(Side.SECONDARY, FAULTED)],
}


@pytest.mark.parametrize(
    ("before", "side", "state"), list(product(BEFORE, Side, [CLOSING, CLOSED, FAULTED]))
)
def test_whatever_happens_nobody_is_faulted_within_5_seconds_nor_after_it_has_ended(
    before: str, side: Side, state: FactoryState
) -> None:
    steps = [*BEFORE[before], (side, state)]
    partnership = after(*steps)
    assert sentenced(partnership, NOW + GRACE - 1) is None
    later = sentenced(partnership, NOW + GRACE)
    assert later not in {who for who, _ in steps}
