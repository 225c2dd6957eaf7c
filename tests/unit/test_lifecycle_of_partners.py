"""What becomes of a factory when its partner ends: the table, case by case."""

from itertools import combinations, product

import pytest

from twinbus.client.state import FactoryState
from twinbus.clock import to_us
from twinbus.limits import NEVER_US, PARTNER_GRACE
from twinbus.pairing.lifecycle import Partnership, Sentence, Side, hear, verdict

NOW = 1_000_000_000
GRACE = to_us(PARTNER_GRACE)
CLOSING, CLOSED, FAULTED = FactoryState.CLOSING, FactoryState.CLOSED, FactoryState.FAULTED
both_sides = pytest.mark.parametrize("side", Side)
Step = tuple[Side, FactoryState]


def after(*steps: Step, now: int = NOW) -> Partnership:
    """Return what two factories that did this are to each other; nobody is sentenced by it."""
    partnership = Partnership()
    for side, state in steps:
        partnership, sentence = hear(partnership, side, state, now)
        assert sentence is None
    return partnership


def sentenced(partnership: Partnership, now: int) -> Side | None:
    """Return who is faulted when that time has come."""
    _, sentence = verdict(partnership, now)
    return sentence.side if sentence else None


def interleavings(first: list[Step], second: list[Step]) -> list[list[Step]]:
    """Return every order in which two factories can do what each does in its own order."""
    count = len(first) + len(second)
    found = []
    for places in combinations(range(count), len(first)):
        ones, others = iter(first), iter(second)
        found.append([next(ones if at in places else others) for at in range(count)])
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


# -- faults ----------------------------------------------------------------------------------------


@both_sides
def test_when_a_factory_faults_its_partner_is_faulted_at_once(side: Side) -> None:
    partnership, sentence = hear(Partnership(), side, FAULTED, NOW)
    assert sentence == Sentence(side.partner, "faulted")
    assert partnership.is_over


@both_sides
@pytest.mark.parametrize("who", Side)
def test_a_fault_while_somebody_closes_faults_the_partner_all_the_same(
    side: Side, who: Side
) -> None:
    partnership, sentence = hear(after((who, CLOSING)), side, FAULTED, NOW)
    assert sentence is not None
    assert sentence.side is side.partner
    assert partnership.is_over


@both_sides
def test_a_partner_that_is_faulted_in_turn_faults_nobody(side: Side) -> None:
    partnership, _ = hear(Partnership(), side, FAULTED, NOW)
    again, sentence = hear(partnership, side.partner, FAULTED, NOW)
    assert sentence is None
    assert again.is_over


# -- closing one -----------------------------------------------------------------------------------


@both_sides
@pytest.mark.parametrize("announced", [True, False], ids=["closing first", "closed at once"])
def test_when_a_factory_is_closed_its_partner_has_5_seconds(side: Side, announced: bool) -> None:
    ended = after(*closing(side)) if announced else after((side, CLOSED))
    assert ended.due == NOW + 5_000_000
    assert sentenced(ended, NOW + GRACE - 1) is None
    assert sentenced(ended, NOW + GRACE) is side.partner


@both_sides
def test_the_5_seconds_begin_when_it_is_closed_and_not_when_that_begins(side: Side) -> None:
    begun = after((side, CLOSING))
    ended, _ = hear(begun, side, CLOSED, NOW + 10 * GRACE)
    assert ended.due == NOW + 11 * GRACE


@both_sides
def test_the_sentence_says_what_the_partner_failed_to_do(side: Side) -> None:
    _, sentence = verdict(after(*closing(side)), NOW + GRACE)
    assert sentence is not None
    assert "was closed" in sentence.cause
    assert "5 seconds" in sentence.cause


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
    partnership, sentence = hear(after(*closing(side)), side.partner, state, NOW + GRACE - 1)
    assert sentence is None
    assert partnership.is_over
    assert sentenced(partnership, NOW + 100 * GRACE) is None


@both_sides
def test_a_factory_that_is_faulted_after_the_5_seconds_faults_nobody(side: Side) -> None:
    partnership, _ = verdict(after(*closing(side)), NOW + GRACE)
    again, sentence = hear(partnership, side.partner, FAULTED, NOW + GRACE)
    assert sentence is None
    assert again.is_over


@both_sides
@pytest.mark.parametrize("state", [CLOSING, CLOSED, FAULTED])
def test_nothing_more_is_heard_from_a_factory_that_has_ended(
    side: Side, state: FactoryState
) -> None:
    ended = after(*closing(side))
    assert hear(ended, side, state, NOW + 1) == (ended, None)


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
    ended, sentence = hear(begun, second, CLOSED, NOW)
    assert sentence is None
    assert sentenced(ended, NOW + 100 * GRACE) is None


# -- a clock that is set back ----------------------------------------------------------------------


@both_sides
@pytest.mark.parametrize("back", [1, GRACE, 1000 * GRACE])
def test_a_clock_set_back_gives_a_partner_5_seconds_more_at_most(side: Side, back: int) -> None:
    then = NOW - back
    partnership, sentence = verdict(after(*closing(side)), then)
    assert sentence is None
    assert partnership.due <= then + GRACE
    assert sentenced(partnership, then + GRACE) is side.partner


@both_sides
def test_a_clock_set_back_leaves_time_to_be_closed(side: Side) -> None:
    partnership, _ = verdict(after(*closing(side)), 0)
    again, sentence = hear(partnership, side.partner, CLOSING, GRACE - 1)
    assert sentence is None
    assert again.is_over


# -- every case ------------------------------------------------------------------------------------

BEFORE: dict[str, list[Step]] = {
    "nothing": [],
    "primary closing": [(Side.PRIMARY, CLOSING)],
    "secondary closing": [(Side.SECONDARY, CLOSING)],
    "both closing": [(Side.PRIMARY, CLOSING), (Side.SECONDARY, CLOSING)],
    "both closing, secondary first": [(Side.SECONDARY, CLOSING), (Side.PRIMARY, CLOSING)],
    "primary closed": closing(Side.PRIMARY),
    "secondary closed": closing(Side.SECONDARY),
}


@pytest.mark.parametrize(
    ("before", "side", "state"), list(product(BEFORE, Side, [CLOSING, CLOSED, FAULTED]))
)
def test_whatever_is_heard_only_a_fault_sentences_at_once_and_never_who_has_ended(
    before: str, side: Side, state: FactoryState
) -> None:
    known = after(*BEFORE[before])
    _, sentence = hear(known, side, state, NOW)
    is_first_fault = state is FAULTED and known.ended is None
    assert (sentence is not None) == is_first_fault
    assert sentence is None or sentence.side is side.partner
