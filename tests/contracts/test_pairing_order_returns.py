"""preserve_order: an entity returns when its diverted messages are home, and says why it waits."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.contracts.order_words import (
    RETURNING,
    SWITCHING,
    await_looks,
    await_state,
    begin,
    carry,
    come_back,
    look,
    looks,
    own_queue,
)
from tests.contracts.pairing_trouble import SECOND, busy
from tests.contracts.pairing_words import INVOICES, MINUTE, ORDERS, Pair, backlog, bodies, messages
from twinbus.errors import MessagingError
from twinbus.limits import LOOK_MESSAGES, MAX_RECEIVE_MESSAGES, SWITCH_PAUSE
from twinbus.pairing.events import Returned, ReturnWaits
from twinbus.pairing.health import HealthState
from twinbus.protocol.commands import Disposition, Peek, Receive, Send, Settle

# -- the return ------------------------------------------------------------------------------------


def test_sends_stay_diverted_until_the_diverted_messages_are_home(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    pair.send("b")
    assert pair.primary.peek() == []
    assert carry(pair) == ["a", "b"]
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    pair.send("c")
    assert pair.primary.take() == ["a", "b", "c"]


def test_without_it_the_same_messages_overtake_each_other(pair: Pair) -> None:
    begin(pair, preserve_order=False, backlog_queue_count=1)
    pair.fail_over(ORDERS, "a")
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    pair.send("b")
    assert pair.primary.take() == ["b"]


def test_messages_that_a_syphon_has_locked_are_not_home(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.secondary.inner.ask(Receive(own_queue(), 1))
    come_back(pair)
    look(pair)
    pair.send("b")
    assert pair.primary.peek() == []


def test_a_return_without_diverted_messages_does_not_wait(pair: Pair) -> None:
    begin(pair, failover_interval=MINUTE)
    pair.break_down()
    with pytest.raises(MessagingError):
        pair.send("a")
    pair.pass_time(MINUTE)
    assert pair.state() is HealthState.FAILED_OVER
    pair.heal()
    pair.pass_time(MINUTE)
    pair.wait_for(Returned)
    assert not pair.announced(ReturnWaits)
    assert looks(pair) == 0


def test_mark_path_healthy_does_not_break_the_order(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.heal()
    pair.pairing.mark_path_healthy(ORDERS)
    await_looks(pair)
    pair.send("b")
    assert pair.diverted() == ["a", "b"]
    pair.pairing.mark_path_healthy(ORDERS)
    pair.send("c")
    assert pair.diverted() == ["a", "b", "c"]


def test_a_second_outage_during_the_return_changes_nothing(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    pair.break_down()
    pair.send("b")
    look(pair)
    pair.heal()
    assert carry(pair) == ["a", "b"]
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    pair.send("c")
    assert pair.primary.take() == ["a", "b", "c"]


def test_messages_of_other_entities_in_front_do_not_hold_a_return_up(pair: Pair) -> None:
    begin(pair, backlog_queue_count=1)
    pair.break_down(INVOICES)
    pair.sender(INVOICES).send_batch(messages(*map(str, range(LOOK_MESSAGES + 10))))
    pair.fail_over(ORDERS, "a")
    pair.primary.faults.heal(ORDERS)
    pair.pass_time(MINUTE)
    waits = pair.wait_for(ReturnWaits)
    assert waits.path == ORDERS
    await_looks(pair)
    assert pair.state() is RETURNING
    queue = backlog(0)
    batch = pair.secondary.inner.ask(Receive(queue, MAX_RECEIVE_MESSAGES))
    tokens = batch.column("lock_token")
    pair.secondary.inner.ask(Settle(queue, tokens[-1:], Disposition.COMPLETE))  # only "a" left
    look(pair)
    await_state(pair, HealthState.HEALTHY)
    assert pair.state(INVOICES) is HealthState.FAILED_OVER


def test_a_message_that_is_set_aside_does_not_hold_a_return_up(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    batch = pair.secondary.inner.ask(Receive(own_queue(), 1))
    tokens = batch.column("lock_token")
    pair.secondary.inner.ask(Settle(own_queue(), tokens, Disposition.DEAD_LETTER, "reason"))
    look(pair)
    await_state(pair, HealthState.HEALTHY)


def test_one_look_per_ping_interval_and_none_per_send(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    before = looks(pair)
    for _ in range(10):
        pair.send("b")
        pair.pass_time(seconds=1)
    assert looks(pair) == before
    pair.pass_time(MINUTE)
    await_looks(pair)
    assert looks(pair) == before + 1


# -- sends that go on during the return ------------------------------------------------------------


def come_back_but_for_the_last(pair: Pair) -> None:
    """Bring the first of two diverted messages home: the next send waits for the second."""
    begin(pair)
    pair.fail_over(ORDERS, "a")
    pair.send("b")
    come_back(pair)
    assert carry(pair, at_most=1) == ["a"]
    look(pair)
    await_state(pair, SWITCHING)


def carry_while_waiting(pair: Pair) -> Callable[[], None]:
    """Let a syphon run whenever the clock moves; return how to stop it."""

    def run() -> None:
        carry(pair)
        await_looks(pair)

    return pair.clock.on_advance(run)


def test_a_client_whose_next_message_is_always_on_its_way_returns_as_well(pair: Pair) -> None:
    """Its sends wait a moment, so that the last diverted one comes home."""
    come_back_but_for_the_last(pair)
    stop = carry_while_waiting(pair)
    pair.send("c")
    stop()
    assert pair.state() is HealthState.HEALTHY
    assert pair.primary.take() == ["a", "b", "c"]
    assert pair.secondary.tap.sends()[-1].path == own_queue()  # that was "b"
    assert len(pair.secondary.tap.sends()) == 2


def test_a_switch_that_does_not_succeed_diverts_again(pair: Pair) -> None:
    come_back_but_for_the_last(pair)
    began = pair.clock.now()
    pair.send("c")
    assert pair.clock.now() - began <= SWITCH_PAUSE + timedelta(seconds=1)
    assert bodies(pair.secondary.peek(own_queue())) == ["b", "c"]
    assert pair.state() is RETURNING


def test_a_diversion_in_flight_is_not_overtaken_when_everything_else_is_home(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    carry(pair)
    is_asked, go_on = threading.Event(), threading.Event()
    is_late = threading.Event()

    def hold_up(command: object) -> None:
        if isinstance(command, Send) and not is_late.is_set():
            is_late.set()
            is_asked.set()
            assert go_on.wait(20)

    pair.secondary.tap.refusal = hold_up
    late = threading.Thread(target=pair.send, args=("b",))
    late.start()
    assert is_asked.wait(20)
    look(pair)  # nothing is in the queue, but "b" is on its way there
    assert pair.state() is not HealthState.HEALTHY
    go_on.set()
    late.join(20)
    pair.pass_time(SWITCH_PAUSE)
    await_looks(pair)
    pair.send("c")
    assert carry(pair)[:1] == ["b"]
    look(pair)
    assert pair.primary.take() == ["a", "b", "c"]


# -- events and status -----------------------------------------------------------------------------


def test_an_event_says_that_the_return_waits_and_another_that_it_is_over(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    [waits] = pair.announced(ReturnWaits)
    assert (waits.path, waits.queue) == (ORDERS, own_queue())
    assert not pair.announced(Returned)
    carry(pair)
    look(pair)
    returned = pair.wait_for(Returned)
    assert (returned.path, returned.by, returned.diverted) == (ORDERS, "home", 1)
    assert pair.pairing.status()[0].waits_for == ""


def test_without_a_syphon_an_event_and_the_status_say_what_is_missing(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    look(pair)
    stuck = pair.wait_for(ReturnWaits, 2)
    assert "Check that a syphon runs" in stuck.cause
    [status] = pair.pairing.status()
    assert (status.state, status.waits_for) == (RETURNING, stuck.cause)
    look(pair)
    assert len(pair.announced(ReturnWaits)) == 2


def test_a_look_that_fails_is_reported_once_and_made_again(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    pair.secondary.tap.refuse(MessagingError("no eyes"), Peek)
    look(pair)
    look(pair)
    assert [event.cause for event in pair.announced(ReturnWaits)[1:]] == [
        "its backlog queue cannot be browsed (Messaging: no eyes); tried again"
    ]
    pair.secondary.tap.relent()
    carry(pair)
    look(pair)
    await_state(pair, HealthState.HEALTHY)


def test_a_busy_backlog_queue_is_not_looked_into(pair: Pair) -> None:
    begin(pair)
    pair.fail_over(ORDERS, "a")
    come_back(pair)
    before = looks(pair)
    pair.pass_time(MINUTE - SECOND)
    pair.secondary.factory.courier.note(busy(own_queue()))
    pair.pass_time(SECOND)
    assert looks(pair) == before
    assert "ServerBusy" in pair.announced(ReturnWaits)[-1].cause
    carry(pair)
    pair.pass_time(MINUTE)
    await_state(pair, HealthState.HEALTHY)
