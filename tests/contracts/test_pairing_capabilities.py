"""Pairing with a secondary whose engine can do less than a Twinbus namespace."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.contracts.pairing_words import (
    AT_ONCE,
    HOUR,
    ORDERS,
    PRIMARY,
    SECONDARY,
    End,
    Pair,
    backlog,
    bodies,
    message,
)
from twinbus import QueueDescription
from twinbus.errors import InvalidOperationError, UnsupportedCapabilityError
from twinbus.pairing.backlog import NUMBER, SENDER
from twinbus.pairing.backlog_queues import find_backlog_queues
from twinbus.protocol.capabilities import EVERY_CAPABILITY, Capability
from twinbus.testing import LimitedNamespace

BARE = EVERY_CAPABILITY - {Capability.MANAGEMENT}  # what RabbitMQ lacks


@dataclass
class Ends:
    """A pair whose secondary lacks everything but management, and the whole secondary behind it."""

    pair: Pair
    complete: End


@pytest.fixture
def ends(local: Pair) -> Iterator[Ends]:
    complete = local.secondary

    def connect() -> LimitedNamespace:
        return LimitedNamespace(complete.connect(), BARE)

    with closing(End(SECONDARY, local.clock, connect)) as limited:
        yield Ends(Pair(local.clock, local.primary, limited), complete)


def test_pairing_makes_the_missing_queues_of_a_secondary_that_cannot_list_them(ends: Ends) -> None:
    ends.complete.root.create_queue(QueueDescription(path=backlog(1), max_size_in_megabytes=1024))
    ends.pair.begin(backlog_queue_count=3)
    sizes = [ends.complete.root.get_queue(backlog(at)).max_size_in_megabytes for at in range(3)]
    assert sizes == [5120, 1024, 5120]


def test_another_primarys_queue_is_refused_there_as_well(ends: Ends) -> None:
    metadata = "twinbus-primary Name=contoso;Address=contoso.us.example:1;NamespaceId=another"
    ends.complete.root.create_queue(QueueDescription(path=backlog(0), user_metadata=metadata))
    with pytest.raises(InvalidOperationError, match="another"):
        ends.pair.begin()


def test_extra_queues_are_found_up_to_the_first_gap_without_a_list(ends: Ends) -> None:
    for index in (0, 1, 2, 3, 5):
        ends.complete.root.create_queue(backlog(index))
    identity = ends.pair.begin(backlog_queue_count=2).identity
    found = find_backlog_queues(ends.pair.secondary.manager, identity, 2)
    assert list(found.paths) == [0, 1]
    assert list(found.extra) == [2, 3]


def test_every_diverted_message_is_numbered_where_the_secondary_does_not_number_it(
    ends: Ends,
) -> None:
    ends.pair.begin(failover_interval=AT_ONCE, backlog_queue_count=1)
    ends.pair.fail_over(ORDERS, "tried", "diverted at once")
    for diverted in ends.complete.peek(backlog(0)):
        assert {SENDER, NUMBER} <= set(diverted.application_properties)


def test_a_diverted_schedule_that_cannot_be_removed_says_what_is_missing(ends: Ends) -> None:
    ends.pair.begin(failover_interval=AT_ONCE, backlog_queue_count=1)
    ends.pair.break_down()
    sender = ends.pair.sender()
    (number,) = sender.schedule(message("later"), ends.pair.clock.now() + HOUR)
    ends.pair.heal()
    with pytest.raises(UnsupportedCapabilityError, match="brought it home") as caught:
        sender.cancel_scheduled(number)
    assert caught.value.capability == Capability.RANGES.name
    assert bodies(ends.complete.peek(backlog(0))) == ["later"]


def test_a_diverted_schedule_is_cancelled_at_the_primary_once_it_is_home(ends: Ends) -> None:
    ends.pair.begin(failover_interval=AT_ONCE, backlog_queue_count=1)
    ends.pair.break_down()
    sender = ends.pair.sender()
    (number,) = sender.schedule(message("later"), ends.pair.clock.now() + HOUR)
    ends.pair.heal()
    complete = Pair(ends.pair.clock, ends.pair.primary, ends.complete)
    complete.pairing = ends.pair.pairing
    complete.bring_home()
    sender.cancel_scheduled(number)
    ends.pair.pass_time(HOUR)
    assert ends.pair.primary.take() == []


@pytest.mark.parametrize(
    ("fields", "capability"),
    [
        ({"session_id": "s"}, Capability.SESSIONS),
        ({"scheduled_enqueue_time_utc": datetime(2040, 1, 1, tzinfo=UTC)}, Capability.SCHEDULING),
    ],
)
def test_a_command_that_the_primary_cannot_execute_is_refused_while_its_sends_are_diverted(
    local: Pair, fields: dict[str, Any], capability: Capability
) -> None:
    """Otherwise the message would be dead-lettered when it is brought home."""

    def connect() -> LimitedNamespace:
        return LimitedNamespace(local.primary.connect(), {capability})

    with closing(End(PRIMARY, local.clock, connect)) as limited:
        pair = Pair(local.clock, limited, local.secondary)
        pair.begin(failover_interval=AT_ONCE)
        pair.break_down()
        pair.sender().send(message("plain"))
        with pytest.raises(UnsupportedCapabilityError, match="the primary does not support"):
            pair.sender().send(message("special", **fields))
        assert [bodies(queue) for queue in pair.backlog_by_queue() if queue] == [["plain"]]
