"""preserve_order: all messages of an entity are diverted to one backlog queue."""

from contextlib import closing

import pytest

from tests.contracts.order_words import (
    QUEUES,
    RETURNING,
    await_state,
    begin,
    carry,
    look,
    own_queue,
)
from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    ORDERS,
    SESSIONS,
    Pair,
    bodies,
    message,
    sized,
)
from twinbus import SendAvailabilityPairedNamespaceOptions
from twinbus.errors import BacklogUnavailableError, MessageSizeExceededError, MessagingError
from twinbus.limits import MAX_MESSAGE_BYTES
from twinbus.pairing.events import ReturnWaits
from twinbus.pairing.health import HealthState
from twinbus.pairing.rotation import queue_of
from twinbus.protocol.capabilities import Capability
from twinbus.testing import Fault

# -- one backlog queue for each entity -------------------------------------------------------------


def test_all_clients_of_an_entity_divert_to_one_queue(pair: Pair) -> None:
    begin(pair)
    pair.break_down()
    for text in "abcdef":
        pair.send(text)
        pair.send(text.upper(), path=ORDERS.upper(), session_id=text)
    assert bodies(pair.secondary.peek(own_queue())) == list("aAbBcCdDeEfF")


def test_every_process_chooses_the_same_queue_also_if_it_lacks_others() -> None:
    paths = [f"entity {number}" for number in range(100)]
    chosen = [queue_of(path, range(10)) for path in paths]
    assert chosen == [queue_of(path.upper(), range(10)) for path in paths]
    assert set(chosen) == set(range(10))
    fewer = [queue for queue in range(10) if queue != 4]
    for path, queue in zip(paths, chosen, strict=True):
        assert queue == 4 or queue_of(path, fewer) == queue


def test_a_batch_of_many_sessions_stays_whole(pair: Pair) -> None:
    begin(pair)
    pair.break_down(SESSIONS)
    batch = [message(text, session_id=text) for text in "abcdef"]
    pair.sender(SESSIONS).send_batch(batch)
    [send] = pair.secondary.tap.sends()
    assert send.path == own_queue(SESSIONS)


def test_a_queue_that_fails_raises_instead_of_giving_way_to_another(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.break_backlog(queue_of(ORDERS, range(QUEUES)))
    with pytest.raises(BacklogUnavailableError, match=own_queue()) as raised:
        pair.send("b")
    assert raised.value.is_transient
    assert raised.value.facts["backlog_queue"] == own_queue()
    assert isinstance(raised.value.backlog_cause, MessagingError)
    assert pair.diverted() == ["a"]
    pair.secondary.faults.heal()
    pair.send("c")
    assert pair.diverted() == ["a", "c"]
    assert all(pair.in_rotation())


def test_a_busy_queue_is_waited_for_and_named_if_that_takes_too_long(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.secondary.faults.inject(Fault.SERVER_BUSY, own_queue(), times=1)
    pair.send("b")
    assert pair.diverted() == ["a", "b"]
    pair.secondary.faults.inject(Fault.SERVER_BUSY, own_queue())
    with pytest.raises(BacklogUnavailableError, match=own_queue()):
        pair.send("c")


def test_a_message_that_is_too_large_to_divert_is_refused_as_ever(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    with pytest.raises(MessageSizeExceededError, match="cannot be diverted"):
        pair.sender().send(sized(MAX_MESSAGE_BYTES))
    pair.send("b")
    assert pair.diverted() == ["a", "b"]


def test_a_queue_that_fails_for_a_moment_is_tried_again_under_the_retry_policy(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.secondary.faults.inject(Fault.TRANSIENT, own_queue(), times=2)
    pair.send("b")
    assert pair.diverted() == ["a", "b"]


def test_other_entities_go_on_while_the_queue_of_one_fails(pair: Pair) -> None:
    assert own_queue(ORDERS) != own_queue(INVOICES)
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.fail_over(INVOICES, "x")
    pair.break_backlog(queue_of(ORDERS, range(QUEUES)))
    pair.send("y", path=INVOICES)
    assert bodies(pair.secondary.peek(own_queue(INVOICES))) == ["x", "y"]


@pytest.mark.parametrize("count", [1, 2])
def test_two_processes_divert_an_entity_to_the_same_queue(pair: Pair, count: int) -> None:
    begin(pair, backlog_queue_count=count)
    pair.fail_over(ORDERS, "a")
    [first] = pair.secondary.tap.sends()
    end = type(pair.secondary)
    with (
        closing(end(pair.primary.name, pair.clock, pair.primary.connect, seed=8)) as primary,
        closing(end(pair.secondary.name, pair.clock, pair.secondary.connect, seed=9)) as secondary,
    ):
        options = SendAvailabilityPairedNamespaceOptions(
            secondary.manager, secondary.factory, count, AT_ONCE, preserve_order=True
        )
        primary.factory.pair_namespace(options)
        primary.faults.inject(Fault.UNAVAILABLE, ORDERS)
        primary.factory.create_message_sender(ORDERS).send(message("b"))
        [second] = secondary.tap.sends()
    assert first.path == second.path


# -- numbers that nobody knows ---------------------------------------------------------------------


def test_a_diverted_message_whose_number_is_unknown_may_not_be_overtaken(pair: Pair) -> None:
    """The secondary accepted it and its reply was lost: the retry gets no number."""
    pair.secondary.need(Capability.REPEAT_MEMORY)
    begin(pair)
    pair.break_down()
    pair.secondary.faults.inject(Fault.REPLY_LOST, own_queue(), times=1)
    pair.send("a")
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(ReturnWaits)
    assert carry(pair) == ["a"]
    look(pair)
    assert pair.state() is RETURNING
    [status] = pair.pairing.status()
    assert "did not report the sequence number" in status.waits_for
    pair.send("b")  # its number is above that of "a"
    assert carry(pair) == ["b"]
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    assert pair.primary.take() == ["a", "b"]
