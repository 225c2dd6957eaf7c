"""Diverted messages of an entity with `preserve_order`, and when all of them are home."""

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
from twinbus.pairing.homing import Diversions, Finding, Look, LookResult, result_of_look
from twinbus.protocol.commands import SendReceipt

PATIENCE_US = 5_000_000
NOTHING = LookResult(None, is_small=True)


def diversions_of(*numbers: int, has_numbers: bool = True) -> Diversions:
    """Return the diversions after one diversion for each number; 0: the number is unknown."""
    known = Diversions(3, has_numbers)
    for number in numbers:
        known.end(known.begin(), SendReceipt([number]))
    return known


def judged(known: Diversions, result: LookResult) -> Finding:
    return known.finding(known.look("orders"), result, PATIENCE_US)


def test_nothing_is_diverted_before_the_first_diversion() -> None:
    assert Diversions(0, has_numbers=True).is_empty
    assert not diversions_of(5).is_empty


def test_everything_is_home_when_no_message_up_to_the_last_number_waits() -> None:
    known = diversions_of(5, 9)
    assert known.look("orders") == Look("orders", 3, 0, 9, 2, is_quiet=True)
    assert judged(known, NOTHING) is Finding.HOME
    known.came_home()
    assert known.is_empty


def test_a_look_means_nothing_if_a_diversion_began_after_it() -> None:
    known = diversions_of(5)
    look = known.look("orders")
    known.end(known.begin(), SendReceipt([6]))
    assert known.finding(look, NOTHING, PATIENCE_US) is not Finding.HOME


def test_a_look_means_nothing_if_a_diversion_was_in_flight() -> None:
    known = diversions_of(5)
    place = known.begin()
    look = known.look("orders")
    known.end(place, SendReceipt([6]))
    assert known.finding(look, NOTHING, PATIENCE_US) is not Finding.HOME


def test_a_stale_look_means_nothing_after_a_return() -> None:
    known = diversions_of(5)
    stale = known.look("orders")
    known.came_home()
    known.end(known.begin(), SendReceipt([6]))
    assert known.finding(stale, NOTHING, PATIENCE_US) is not Finding.HOME


@pytest.mark.parametrize("receipt", [None, SendReceipt([0]), SendReceipt([]), SendReceipt([7, 0])])
def test_a_diversion_without_a_number_leaves_a_doubt(receipt: SendReceipt | None) -> None:
    known = diversions_of(5)
    known.end(known.begin(), receipt)
    assert judged(known, NOTHING) is Finding.WAITING
    known.end(known.begin(), SendReceipt([8]))
    assert judged(known, NOTHING) is Finding.HOME


def test_only_a_diversion_that_began_later_ends_the_doubt() -> None:
    known = diversions_of()
    unknown, beside = known.begin(), known.begin()
    known.end(unknown, None)
    known.end(beside, SendReceipt([8]))  # the unknown one may have got a higher number
    assert judged(known, NOTHING) is Finding.WAITING
    known.end(known.begin(), SendReceipt([9]))
    assert judged(known, NOTHING) is Finding.HOME


def test_without_receipt_numbers_every_message_of_the_entity_counts() -> None:
    known = diversions_of(0, 0, has_numbers=False)
    assert known.look("orders").until == MAX_INT64
    assert judged(known, NOTHING) is Finding.HOME


# -- whether sends may wait for the rest -----------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "finding"),
    [
        (LookResult(5, age_us=1), Finding.WAITING),  # the same message as before: nothing moves
        (LookResult(6, age_us=PATIENCE_US), Finding.CAUGHT_UP),  # young
        (LookResult(6, age_us=PATIENCE_US + 1, is_small=True), Finding.CAUGHT_UP),  # few
        (LookResult(6, age_us=PATIENCE_US + 1), Finding.WAITING),  # many and old
    ],
)
def test_sends_wait_only_for_messages_that_are_about_to_be_home(
    result: LookResult, finding: Finding
) -> None:
    known = diversions_of(5, 6, 7)
    assert judged(known, LookResult(5, age_us=1)) is Finding.WAITING  # the first look
    assert judged(known, result) is finding


def test_messages_of_other_entities_are_passed_over_once() -> None:
    known = diversions_of(500)
    assert judged(known, LookResult(None, behind=251)) is Finding.MORE
    assert known.look("orders").first == 251
    assert judged(known, LookResult(500)) is Finding.WAITING
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
    ("paths", "until", "result"),
    [
        (["orders"], 10, LookResult(10, 2_000_000, is_small=True)),
        (["news", "ORDERS"], 20, LookResult(11, 2_000_000, is_small=True)),
        (["news", None], 20, LookResult(None, is_small=True, behind=12)),
        (["news", "orders"], 10, LookResult(None, is_small=True)),  # another process diverted it
        (["news"], 10, LookResult(None, is_small=True)),
    ],
)
def test_a_look_sees_the_first_message_of_its_entity(
    paths: list[str | None], until: int, result: LookResult
) -> None:
    assert result_of_look(page(*paths), look(until), WALL_US) == result


def test_a_look_into_an_empty_queue_sees_nothing() -> None:
    assert result_of_look(page("news").slice(1), look(20), WALL_US) == NOTHING


# -- any history -----------------------------------------------------------------------------------

STEPS = st.lists(st.sampled_from(["begin", "end", "lose", "move", "look", "finding"]), max_size=60)


@given(STEPS)
def test_home_is_never_said_while_a_diverted_message_waits(steps: list[str]) -> None:
    """A queue of one entity against its model: numbers are given when a diversion ends."""
    known = Diversions(0, has_numbers=True)
    flying: list[int] = []
    waiting: list[int] = []  # numbers in the queue
    looks: list[tuple[Look, LookResult]] = []
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
            looks.append((begun, LookResult(found, is_small=True)))
        elif step == "finding" and looks:
            begun, result = looks.pop()
            if known.finding(begun, result, PATIENCE_US) is Finding.HOME:
                assert not waiting
                assert not flying
                known.came_home()
