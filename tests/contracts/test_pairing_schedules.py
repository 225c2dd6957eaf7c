"""Scheduled messages of a paired factory, and how they are cancelled wherever they are."""

from datetime import timedelta

import pytest
from azure.servicebus.amqp import AmqpAnnotatedMessage

from tests.contracts.pairing_words import (
    AT_ONCE,
    FORMS,
    HOUR,
    INVOICES,
    NEWS,
    OF_EVERY_TYPE,
    ORDERS,
    PRIMARY,
    SUBSCRIPTION,
    TICK,
    Pair,
    backlog,
    bodies,
    message,
    messages,
)
from twinbus import MessagingFactory
from twinbus.errors import MessageNotFoundError, UnsupportedCapabilityError
from twinbus.limits import OPERATION_TIMEOUT
from twinbus.message import MessageState
from twinbus.namespace.azure_messages import from_sdk
from twinbus.protocol.capabilities import Capability
from twinbus.protocol.commands import LeaseRange, RangeLease, ReleaseRange
from twinbus.testing import Fault, Mover

DAY = timedelta(days=1)

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


# -- scheduled messages ----------------------------------------------------------------------------


def test_a_scheduled_message_diverted_in_an_outage_appears_when_its_time_has_come(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.bring_home()
    assert pair.primary.peek()[0].state is MessageState.SCHEDULED
    assert pair.primary.take() == []
    pair.pass_time(HOUR)
    assert pair.primary.take() == ["later"]


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_a_scheduled_message_diverted_in_an_outage_can_be_cancelled(
    pair: Pair, is_failed_over: bool
) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    if is_failed_over:
        pair.send("first")
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    pair.heal()
    sender.cancel_scheduled(number)
    assert "later" not in pair.diverted()
    assert pair.primary.peek() == []


def test_it_can_be_cancelled_while_the_primary_is_still_down(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.sender().cancel_scheduled(number)
    assert pair.diverted() == ["first"]


def test_the_send_that_failed_over_can_be_cancelled_while_the_primary_is_still_down(
    pair: Pair,
) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    sender.cancel_scheduled(number)
    assert pair.diverted() == []


def test_one_of_several_diverted_messages_is_cancelled_alone(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    sender = pair.sender()
    first, two, three = sender.schedule(messages("1", "2", "3"), pair.clock.now() + HOUR)
    sender.cancel_scheduled([first, three])
    assert sorted(pair.diverted()) == ["2", "first"]
    sender.cancel_scheduled(two)
    assert pair.diverted() == ["first"]


def test_it_can_be_cancelled_after_it_has_gone_home(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    sender = pair.sender()
    first, two = sender.schedule(messages("1", "2"), pair.clock.now() + HOUR)
    pair.bring_home()
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    sender.cancel_scheduled(first)
    pair.pass_time(HOUR)
    assert sorted(pair.primary.take()) == ["2", "first"]
    with pytest.raises(MessageNotFoundError):
        sender.cancel_scheduled(two)


def test_a_message_to_a_topic_can_be_cancelled_after_it_has_gone_home(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(NEWS)
    sender = pair.sender(NEWS)
    first, _ = sender.schedule(messages("1", "2"), pair.clock.now() + HOUR)
    pair.bring_home()
    pair.heal()
    pair.pairing.mark_path_healthy(NEWS)
    sender.cancel_scheduled(first)
    pair.pass_time(HOUR)
    assert sorted(pair.primary.take(SUBSCRIPTION)) == ["2", "first"]


def test_cancelling_a_diverted_message_twice_is_refused(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.heal()
    pair.sender().cancel_scheduled(number)
    with pytest.raises(MessageNotFoundError):
        pair.sender().cancel_scheduled(number)


def test_a_number_of_another_entity_cancels_nothing(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    with pytest.raises(MessageNotFoundError):
        pair.sender(INVOICES).cancel_scheduled(number)
    assert sorted(pair.diverted()) == ["first", "later"]


def test_numbers_of_the_primary_and_of_the_backlog_are_cancelled_together(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    sender = pair.sender()
    later = pair.clock.now() + HOUR
    before = sender.schedule(message("at the primary"), later)
    pair.fail_over()
    diverted = sender.schedule(message("diverted"), later)
    assert set(before).isdisjoint(diverted)
    pair.heal()
    sender.cancel_scheduled([*before, *diverted])
    assert (pair.primary.peek(), pair.diverted()) == ([], ["first"])


def test_cancelling_a_message_the_primary_took_though_its_reply_was_lost_cancels_both(
    pair: Pair,
) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    assert (bodies(pair.primary.peek()), pair.diverted()) == (["later"], ["later"])
    pair.heal()
    sender.cancel_scheduled(number)
    assert (pair.primary.peek(), pair.diverted()) == ([], [])


def test_a_scheduled_batch_of_columns_can_be_cancelled_too(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(NEWS)
    client = pair.primary.factory.create_topic_client(NEWS)
    numbers = client.schedule(messages("1", "2"), pair.clock.now() + HOUR)
    client.cancel_scheduled(numbers)
    assert pair.diverted() == ["first"]


def test_cancelling_a_diverted_message_leaves_another_of_the_same_id_alone(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    later = pair.clock.now() + HOUR
    sender = pair.sender()
    sender.schedule(message("at the primary", message_id="same"), later)
    pair.fail_over()
    (number,) = sender.schedule(message("diverted", message_id="same"), later)
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    sender.cancel_scheduled(number)
    assert pair.diverted() == ["first"]
    assert bodies(pair.primary.peek()) == ["at the primary"]


def test_of_two_messages_of_one_id_that_went_home_the_right_one_is_cancelled(pair: Pair) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over(INVOICES)
    pair.break_down(ORDERS)
    two = [message("1", message_id="same"), message("2", message_id="same")]
    _, second = pair.sender().schedule(two, pair.clock.now() + HOUR)
    pair.bring_home()
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    pair.sender().cancel_scheduled(second)
    assert bodies(pair.primary.peek()) == ["1"]


def test_a_diverted_message_whose_reply_was_lost_can_be_cancelled(pair: Pair) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(backlog_queue_count=1, failover_interval=AT_ONCE)
    pair.fail_over()
    pair.secondary.faults.inject(Fault.REPLY_LOST, backlog(0), times=1)
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    sender.cancel_scheduled(number)
    assert pair.diverted() == ["first"]


def test_a_diverted_message_can_be_cancelled_by_another_process(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.fail_over()
    (number,) = local.sender().schedule(message("later"), local.clock.now() + HOUR)
    other = MessagingFactory(local.primary.connect(), name=PRIMARY, clock=local.clock)
    other.pair_namespace(local.further_options(backlog_queue_count=2))
    other.create_message_sender(ORDERS).cancel_scheduled(number)
    assert local.diverted() == ["first"]


# -- found at home, and secondaries that cannot remove a single message ----------------------------


def bring_home_meanwhile(pair: Pair) -> None:
    """Let a syphon run while a cancel pauses before its next try."""
    runs = [pair.bring_home]

    def run_once() -> None:
        if runs:
            runs.pop()()

    pair.clock.on_advance(run_once)


def test_it_is_found_at_home_whatever_the_engine_does_to_its_times_and_properties(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    rich = message("1", time_to_live=99 * DAY + TICK, application_properties=OF_EVERY_TYPE)
    (number,) = pair.sender().schedule(rich, pair.clock.now() + HOUR + 1234 * TICK)
    pair.bring_home()
    pair.heal()
    pair.sender().cancel_scheduled(number)
    assert bodies(pair.primary.peek()) == ["first"]


def test_a_message_with_amqp_sections_is_found_at_home(pair: Pair) -> None:
    """A Service Bus returns the sections in another encoding."""
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    due = pair.clock.now() + HOUR
    annotated = AmqpAnnotatedMessage(value_body={"a": 1}, annotations={"x-opt-own": 3})
    (number,) = pair.sender().schedule(from_sdk(annotated).scheduled(due), due)
    pair.bring_home()
    pair.heal()
    pair.sender().cancel_scheduled(number)
    assert bodies(pair.primary.peek()) == ["first"]


@pytest.mark.parametrize("is_failed_over", [False, True], ids=["at failover", "failed over"])
def test_a_cancel_waits_for_a_syphon_that_is_bringing_the_message_home(
    pair: Pair, is_failed_over: bool
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    if is_failed_over:
        pair.send("first")
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.heal()
    bring_home_meanwhile(pair)
    pair.sender().cancel_scheduled(number)
    assert "later" not in [*pair.diverted(), *bodies(pair.primary.peek())]
    with pytest.raises(MessageNotFoundError):
        pair.sender().cancel_scheduled(number)


def test_a_copy_that_the_primary_accepted_before_the_diversion_does_not_come_back(
    pair: Pair,
) -> None:
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down(ORDERS, Fault.REPLY_LOST)
    (number,) = pair.sender().schedule(message("later"), pair.clock.now() + HOUR)
    pair.heal()
    bring_home_meanwhile(pair)
    pair.sender().cancel_scheduled(number)
    pair.bring_home()
    assert (pair.diverted(), pair.primary.peek()) == ([], [])


def test_messages_that_no_syphon_brings_home_share_the_time_of_one_operation(pair: Pair) -> None:
    if Capability.RANGES in pair.secondary.inner.capabilities:
        pytest.skip("the secondary removes the messages")
    pair.begin(failover_interval=AT_ONCE)
    pair.fail_over()
    numbers = pair.sender().schedule(messages("1", "2", "3"), pair.clock.now() + HOUR)
    pair.heal()
    began = pair.clock.now()
    with pytest.raises(UnsupportedCapabilityError, match="brought it home"):
        pair.sender().cancel_scheduled(numbers)
    assert pair.clock.now() - began <= OPERATION_TIMEOUT
    assert sorted(pair.diverted()) == ["1", "2", "3", "first"]


# -- lost replies, and a syphon at work ------------------------------------------------------------


def test_a_cancel_whose_reply_was_lost_succeeds(pair: Pair) -> None:
    pair.primary.need(Capability.REPEAT_MEMORY)
    sender = pair.sender()
    first, second = sender.schedule(messages("a", "b"), pair.clock.now() + HOUR)
    pair.primary.faults.inject(Fault.REPLY_LOST, ORDERS, times=1)
    sender.cancel_scheduled(first)
    assert bodies(pair.primary.peek()) == ["b"]
    with pytest.raises(MessageNotFoundError):
        sender.cancel_scheduled(first)
    pair.primary.faults.inject(Fault.REPLY_LOST, ORDERS, times=2)
    sender.cancel_scheduled([second])
    assert pair.primary.peek() == []


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_cancelling_a_diverted_message_survives_a_lost_reply(pair: Pair, lost: int) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    sender = pair.sender()
    number, _ = sender.schedule(messages("a", "b"), pair.clock.now() + HOUR)
    for _ in range(lost - 1):
        pair.secondary.faults.inject(Fault.REPLY_LOST, backlog(0), times=1)
        pair.secondary.faults.inject(Fault.REPLY_LOST, backlog(1), times=1)
    sender.cancel_scheduled(number)
    assert pair.diverted() == ["b"]


def lease_backlog(pair: Pair) -> RangeLease:
    """Lease the backlog queue that holds something, as a syphon does."""
    (queue,) = (
        queue.path for queue in pair.pairing.backlog_queues() if pair.secondary.peek(queue.path)
    )
    lease = pair.secondary.inner.ask(
        LeaseRange(queue, "syphon 1", 10, duration=timedelta(seconds=20))
    )
    assert lease is not None
    return lease


def test_a_message_leased_by_a_syphon_that_dies_is_cancelled_when_its_lease_ends(
    pair: Pair,
) -> None:
    pair.secondary.need(Capability.RANGES)
    pair.begin(failover_interval=AT_ONCE)
    pair.break_down()
    sender = pair.sender()
    (number,) = sender.schedule(message("later"), pair.clock.now() + HOUR)
    lease_backlog(pair)
    sender.cancel_scheduled(number)
    assert pair.diverted() == []


def test_a_message_that_a_syphon_is_bringing_home_is_cancelled_there(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE)
    local.break_down()
    sender = local.sender()
    (number,) = sender.schedule(message("later"), local.clock.now() + HOUR)
    lease = lease_backlog(local)
    local.heal()

    def finish() -> None:
        for queue in local.pairing.backlog_queues():
            if local.secondary.peek(queue.path):
                local.secondary.inner.ask(ReleaseRange(queue.path, lease.epoch))
                Mover(local.primary.inner, local.secondary.inner).move(queue.path)

    local.clock.on_advance(finish)
    sender.cancel_scheduled(number)
    assert (local.diverted(), local.primary.peek()) == ([], [])
