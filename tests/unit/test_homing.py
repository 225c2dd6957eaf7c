"""What is away of an entity with `preserve_order`, and when it is home."""

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus import BrokeredMessage
from twinbus.clock import ManualClock, moment_us
from twinbus.limits import MAX_INT64
from twinbus.message import DELIVERY_SCHEMA, to_batch
from twinbus.pairing.backlog import diverted
from twinbus.pairing.homing import Away, Finding, Look, Seen, seen_on
from twinbus.protocol.commands import SendReceipt

PATIENCE_US = 5_000_000
NOTHING = Seen(None, is_small=True)


def away(*numbers: int, has_numbers: bool = True) -> Away:
    """Return what is away after one diversion for each number; 0: the number is unknown."""
    known = Away(3, has_numbers)
    for number in numbers:
        known.end(known.begin(), SendReceipt([number]))
    return known


def judged(known: Away, seen: Seen) -> Finding:
    return known.judge(known.look("orders"), seen, PATIENCE_US)


def test_nothing_is_away_before_the_first_diversion() -> None:
    assert Away(0, has_numbers=True).is_empty
    assert not away(5).is_empty


def test_everything_is_home_when_no_message_up_to_the_last_number_waits() -> None:
    known = away(5, 9)
    assert known.look("orders") == Look("orders", 3, 0, 9, 2, is_quiet=True)
    assert judged(known, NOTHING) is Finding.HOME
    known.came_home()
    assert known.is_empty


def test_a_look_means_nothing_if_a_diversion_began_after_it() -> None:
    known = away(5)
    look = known.look("orders")
    known.end(known.begin(), SendReceipt([6]))
    assert known.judge(look, NOTHING, PATIENCE_US) is not Finding.HOME


def test_a_look_means_nothing_if_a_diversion_was_in_flight() -> None:
    known = away(5)
    place = known.begin()
    look = known.look("orders")
    known.end(place, SendReceipt([6]))
    assert known.judge(look, NOTHING, PATIENCE_US) is not Finding.HOME


def test_a_stale_look_means_nothing_after_a_return() -> None:
    known = away(5)
    stale = known.look("orders")
    known.came_home()
    known.end(known.begin(), SendReceipt([6]))
    assert known.judge(stale, NOTHING, PATIENCE_US) is not Finding.HOME


@pytest.mark.parametrize("receipt", [None, SendReceipt([0]), SendReceipt([]), SendReceipt([7, 0])])
def test_a_diversion_without_a_number_leaves_a_doubt(receipt: SendReceipt | None) -> None:
    known = away(5)
    known.end(known.begin(), receipt)
    assert judged(known, NOTHING) is Finding.WAITING
    known.end(known.begin(), SendReceipt([8]))
    assert judged(known, NOTHING) is Finding.HOME


def test_only_a_diversion_that_began_later_ends_the_doubt() -> None:
    known = away()
    unknown, beside = known.begin(), known.begin()
    known.end(unknown, None)
    known.end(beside, SendReceipt([8]))  # the unknown one may have got a higher number
    assert judged(known, NOTHING) is Finding.WAITING
    known.end(known.begin(), SendReceipt([9]))
    assert judged(known, NOTHING) is Finding.HOME


def test_without_receipt_numbers_every_message_of_the_entity_counts() -> None:
    known = away(0, 0, has_numbers=False)
    assert known.look("orders").until == MAX_INT64
    assert judged(known, NOTHING) is Finding.HOME


# -- whether sends may wait for the rest -----------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "finding"),
    [
        (Seen(5, age_us=1), Finding.WAITING),  # the same message as before: nothing moves
        (Seen(6, age_us=PATIENCE_US), Finding.CAUGHT_UP),  # young
        (Seen(6, age_us=PATIENCE_US + 1, is_small=True), Finding.CAUGHT_UP),  # few
        (Seen(6, age_us=PATIENCE_US + 1), Finding.WAITING),  # many and old
    ],
)
def test_sends_wait_only_for_messages_that_are_about_to_be_home(
    seen: Seen, finding: Finding
) -> None:
    known = away(5, 6, 7)
    assert judged(known, Seen(5, age_us=1)) is Finding.WAITING  # the first look has no evidence
    assert judged(known, seen) is finding


def test_messages_of_other_entities_are_passed_over_once() -> None:
    known = away(500)
    assert judged(known, Seen(None, behind=251)) is Finding.MORE
    assert known.look("orders").first == 251
    assert judged(known, Seen(500)) is Finding.WAITING
    assert known.look("orders").first == 500


# -- what a look sees ------------------------------------------------------------------------------


def page(*paths: str | None, first: int = 10) -> pa.RecordBatch:
    """Return a page of a backlog queue, numbered from `first` on."""
    parts = []
    for path in paths:
        batch = to_batch([BrokeredMessage(b"x")])
        parts.append(diverted(batch, path) if path is not None else batch)
    [batch] = pa.Table.from_batches(parts).combine_chunks().to_batches()
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns["sequence_number"] = pa.array(range(first, first + len(paths)), pa.int64())
    enqueued = DELIVERY_SCHEMA.field("enqueued_time_utc").type
    columns["enqueued_time_utc"] = pa.array([NOON] * len(paths), enqueued)
    return pa.RecordBatch.from_pydict(columns)


NOON = ManualClock().now()
WALL_US = moment_us(NOON + timedelta(seconds=2))


def look(until: int) -> Look:
    return Look("Orders", 0, 10, until, 1, is_quiet=True)


@pytest.mark.parametrize(
    ("paths", "until", "seen"),
    [
        (["orders"], 10, Seen(10, 2_000_000, is_small=True)),
        (["news", "ORDERS"], 20, Seen(11, 2_000_000, is_small=True)),
        (["news", None], 20, Seen(None, is_small=True, behind=12)),
        (["news", "orders"], 10, Seen(None, is_small=True)),  # another process diverted it
        (["news"], 10, Seen(None, is_small=True)),
    ],
)
def test_a_look_sees_the_first_message_of_its_entity(
    paths: list[str | None], until: int, seen: Seen
) -> None:
    assert seen_on(page(*paths), look(until), WALL_US) == seen


def test_a_look_into_an_empty_queue_sees_nothing() -> None:
    assert seen_on(page("news").slice(1), look(20), WALL_US) == NOTHING


# -- any history -----------------------------------------------------------------------------------

STEPS = st.lists(st.sampled_from(["begin", "end", "lose", "move", "look", "judge"]), max_size=60)


@given(STEPS)
def test_home_is_never_said_while_a_diverted_message_waits(steps: list[str]) -> None:
    """A queue of one entity against its model: numbers are given when a diversion ends."""
    known = Away(0, has_numbers=True)
    flying: list[int] = []
    waiting: list[int] = []  # numbers in the queue
    looks: list[tuple[Look, Seen]] = []
    number = 0
    for step in steps:
        if step == "begin":
            flying.append(known.begin())
        elif step in ("end", "lose") and flying:
            number += 1
            waiting.append(number)
            known.end(flying.pop(0), SendReceipt([number]) if step == "end" else None)
        elif step == "move":
            waiting = waiting[1:]
        elif step == "look":
            begun = known.look("orders")
            found = next(
                (message for message in waiting if begun.first <= message <= begun.until), None
            )
            looks.append((begun, Seen(found, is_small=True)))
        elif step == "judge" and looks:
            begun, seen = looks.pop()
            if known.judge(begun, seen, PATIENCE_US) is Finding.HOME:
                assert not waiting
                assert not flying
                known.came_home()
