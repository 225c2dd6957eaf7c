"""A pairing with a busy secondary or a busy primary, or a primary whose gate is closed."""

from datetime import timedelta

import pytest

from tests.contracts.pairing_trouble import FAULTED, FEW_QUEUES, MANY_QUEUES, SECOND, TRY, busy
from tests.contracts.pairing_words import (
    AT_ONCE,
    INVOICES,
    MINUTE,
    ORDERS,
    Pair,
    backlog,
    bodies,
    message,
)
from tests.inside import next_tick_us
from twinbus import MessagingError, MessagingFactory, RetryPolicy, ServerBusyError
from twinbus.errors import BacklogUnavailableError
from twinbus.limits import SECOND_US
from twinbus.pairing.events import BacklogQueueBack, BacklogQueuePulled, FailedOver
from twinbus.protocol.commands import Send
from twinbus.testing import Fault

# -- a busy secondary ------------------------------------------------------------------------------


def begin_with_time(pair: Pair, seconds: float, queues: int) -> None:
    """Pair, fail over, and give every operation so much time."""
    policy = RetryPolicy(operation_timeout=timedelta(seconds=seconds))
    for end in (pair.primary, pair.secondary):
        end.factory.courier.policy = policy
    pair.begin(
        backlog_queue_count=queues,
        failover_interval=AT_ONCE,
        ping_primary_interval=timedelta(minutes=30),
    )
    pair.fail_over(ORDERS, "first")


@pytest.mark.parametrize("queues", [1, FEW_QUEUES, MANY_QUEUES])
@pytest.mark.parametrize("seconds", [60, 11])
def test_a_busy_secondary_is_waited_for_and_loses_no_queue(
    local: Pair, seconds: float, queues: int
) -> None:
    begin_with_time(local, seconds, queues)
    began = local.clock.now()
    local.secondary.faults.inject(Fault.SERVER_BUSY, times=1)
    local.send("patient")
    assert sorted(local.diverted()) == ["first", "patient"]
    assert timedelta(seconds=10) <= local.clock.now() - began < timedelta(seconds=11)
    assert (local.in_rotation(), local.announced(BacklogQueuePulled)) == ([True] * queues, [])


@pytest.mark.parametrize("queues", [1, FEW_QUEUES, MANY_QUEUES])
@pytest.mark.parametrize("seconds", [1, 9, 10])
def test_without_time_to_wait_for_a_busy_secondary_the_error_names_both_causes_and_no_queue_is_lost(
    local: Pair, seconds: float, queues: int
) -> None:
    begin_with_time(local, seconds, queues)
    local.secondary.faults.inject(Fault.SERVER_BUSY, times=1)
    with pytest.raises(BacklogUnavailableError) as caught:
        local.send("hasty")
    assert isinstance(caught.value.backlog_cause, ServerBusyError)
    assert isinstance(caught.value.primary_cause, MessagingError)
    assert (local.in_rotation(), local.announced(BacklogQueuePulled)) == ([True] * queues, [])
    local.pass_time(seconds=10)
    local.send("later")
    assert sorted(local.diverted()) == ["first", "later"]


def test_a_secondary_that_stays_busy_is_given_up_in_time_and_loses_no_queue(local: Pair) -> None:
    begin_with_time(local, 60, MANY_QUEUES)
    began = local.clock.now()
    local.secondary.faults.inject(Fault.SERVER_BUSY)
    with pytest.raises(BacklogUnavailableError) as caught:
        local.send("hasty")
    assert isinstance(caught.value.backlog_cause, ServerBusyError)
    assert local.clock.now() - began <= MINUTE
    assert local.in_rotation() == [True] * MANY_QUEUES


def test_a_client_keeps_its_queue_while_the_secondary_is_busy(local: Pair) -> None:
    begin_with_time(local, 60, MANY_QUEUES)
    sender = local.sender()
    sender.send(message("a"))
    local.secondary.faults.inject(Fault.SERVER_BUSY, times=1)
    sender.send(message("b"))
    assert ["a", "b"] in [bodies(queue)[-2:] for queue in local.backlog_by_queue()]


# -- a primary whose gate is closed ----------------------------------------------------------------


def close_the_gate(pair: Pair) -> None:
    """Let the primary answer a ping that it is busy: it is left alone for 10 seconds."""
    pair.heal()
    pair.primary.tap.refuse(ServerBusyError("wait 10 s", retry_after_s=10))
    pair.pass_time(SECOND)


def test_a_queue_comes_back_on_time_while_the_primarys_gate_is_closed(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, ping_primary_interval=SECOND)
    local.fail_over()
    close_the_gate(local)
    local.secondary.faults.inject(Fault.UNAVAILABLE, backlog(0))
    local.send(*"abcdefgh")
    (pulled,) = local.announced(BacklogQueuePulled)
    assert next_tick_us(local.pairing) == local.pairing.next_due_us
    assert next_tick_us(local.pairing) <= local.clock.now_us() + SECOND_US
    for _ in range(10):
        local.pass_time(seconds=0.2)
    (back,) = local.announced(BacklogQueueBack)
    assert back.at - pulled.at == SECOND


def test_the_ticker_looks_again_for_the_queue_and_not_for_the_gate(local: Pair) -> None:
    local.begin(failover_interval=AT_ONCE, ping_primary_interval=SECOND)
    local.fail_over()
    local.break_backlog(0)
    local.send(*"abcdefgh")
    close_the_gate(local)
    gate_opens = local.primary.factory.courier.busy_until(ORDERS, local.clock.now_us())
    assert next_tick_us(local.pairing) == gate_opens
    local.secondary.faults.inject(Fault.UNAVAILABLE, backlog(0))
    local.send(*"abcdefgh")
    local.pass_time(seconds=0.5)
    assert next_tick_us(local.pairing) == local.clock.now_us() + SECOND_US // 2


def test_an_entity_fails_over_on_time_while_the_primarys_gate_is_closed(local: Pair) -> None:
    local.begin(failover_interval=timedelta(seconds=3), ping_primary_interval=SECOND)
    local.break_down(ORDERS)
    with pytest.raises(MessagingError):
        local.send()
    local.primary.factory.courier.note(ServerBusyError("wait 10 s", retry_after_s=10))
    began = local.clock.now()
    local.pass_time(SECOND)
    assert next_tick_us(local.pairing) == local.clock.now_us() + 2 * SECOND_US
    local.pass_time(seconds=2)
    assert local.announced(FailedOver)[0].at == began + timedelta(seconds=3)


def test_a_partner_is_faulted_on_time_while_the_primarys_gate_is_closed(local: Pair) -> None:
    local.begin_with_syphon(failover_interval=AT_ONCE, ping_primary_interval=SECOND)
    local.fail_over()
    close_the_gate(local)
    local.secondary.factory.close()
    local.pass_time(seconds=5)
    assert local.primary.factory.state is FAULTED


# -- busy ------------------------------------------------------------------------------------------


def test_a_busy_entity_holds_up_no_other(pair: Pair) -> None:
    pair.begin()
    pair.primary.tap.refuse(busy(ORDERS), Send, ORDERS)
    hasty = MessagingFactory(
        pair.primary.tap, clock=pair.clock, retry_policy=RetryPolicy(operation_timeout=TRY)
    )
    with pytest.raises(ServerBusyError, match="tried once in"):
        hasty.create_message_sender(ORDERS).send(message())
    began = pair.clock.now()
    hasty.create_message_sender(INVOICES).send(message("others go on"))
    assert hasty.create_message_receiver(INVOICES).receive(AT_ONCE) is not None
    assert pair.clock.now() == began
    asked = len(pair.primary.tap.asked)
    with pytest.raises(ServerBusyError, match="not tried"):
        hasty.create_message_sender(ORDERS.upper()).send(message())
    assert len(pair.primary.tap.asked) == asked


def test_a_busy_namespace_holds_up_all(pair: Pair) -> None:
    pair.begin()
    pair.primary.tap.refuse(busy(""), Send, ORDERS)
    hasty = MessagingFactory(
        pair.primary.tap, clock=pair.clock, retry_policy=RetryPolicy(operation_timeout=TRY)
    )
    for path in (ORDERS, INVOICES):
        with pytest.raises(ServerBusyError):
            hasty.create_message_sender(path).send(message())
