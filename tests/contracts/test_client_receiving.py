"""Receivers: receiving, settling, fetching ahead and renewing locks."""

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import pytest

from tests.contracts.client_site import (
    DELETE,
    NOW,
    ORDERS,
    RENEWED,
    SESSIONS,
    Site,
    bodies,
    got,
    message,
)
from twinbus import ReceivedMessage, ReceiveMode, dead_letter_path
from twinbus.client.receiver import ReceiveOptions
from twinbus.errors import InvalidArgumentError, InvalidOperationError, MessageLockLostError
from twinbus.message import MessageState, to_messages
from twinbus.protocol.commands import Disposition, RenewLocks, RenewSession

AHEAD = ReceiveOptions(prefetch_count=10)


# -- receiving -------------------------------------------------------------------------------------


def test_a_receiver_gets_the_next_message_or_none(site: Site) -> None:
    site.send("one")
    with site.receiver() as receiver:
        assert got(receiver.receive(NOW)).body == b"one"
        assert receiver.receive(NOW) is None


def test_a_receiver_takes_what_is_there_up_to_a_number(site: Site) -> None:
    site.send("1", "2", "3")
    receiver = site.receiver()
    assert bodies(receiver.receive_batch(2, NOW)) == ["1", "2"]
    assert bodies(receiver.receive_batch(2, NOW)) == ["3"]
    assert receiver.receive_batch(2, NOW) == []


@pytest.mark.parametrize("count", [0, -1])
@pytest.mark.parametrize("options", [None, AHEAD], ids=["plain", "prefetch"])
def test_a_receiver_is_asked_for_at_least_one_message(
    site: Site, count: int, options: ReceiveOptions | None
) -> None:
    site.send("1", "2", "3")
    with site.receiver(options) as receiver:
        receiver.receive(NOW)
        with pytest.raises(InvalidArgumentError):
            receiver.receive_batch(count, NOW)


def test_a_waiting_receiver_gets_what_is_sent_meanwhile(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(site.receiver().receive, timedelta(minutes=5))
        site.send("at last")
        assert got(receiving.result(timeout=20)).body == b"at last"


def test_a_waiting_receiver_gets_nothing_when_its_wait_is_over(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(site.receiver().receive, timedelta(minutes=5))
        while not wait([receiving], timeout=0.01).done:
            site.pass_time(minutes=5)
        assert receiving.result() is None


def test_a_message_that_is_received_and_deleted_is_gone_and_has_no_lock(site: Site) -> None:
    site.send("one")
    (received,) = site.receiver(DELETE).receive_batch(9, NOW)
    assert received.lock_token is None
    with pytest.raises(InvalidOperationError):
        received.complete()
    assert site.receiver().peek() == []


@pytest.mark.parametrize(
    "broken",
    [
        {"mode": "peek_lock"},
        {"prefetch_count": -1},
        {"prefetch_count": 10_001},
        {"prefetch_count": 1.5},
        {"auto_renew_for": 60},
        {"auto_renew_for": timedelta(seconds=-1)},
        {"mode": ReceiveMode.RECEIVE_AND_DELETE, "prefetch_count": 1},
        {"mode": ReceiveMode.RECEIVE_AND_DELETE, "auto_renew_for": timedelta(minutes=1)},
    ],
)
def test_options_that_break_a_rule_cannot_be_made(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ReceiveOptions(**broken)


def test_columns_are_received_and_settled_by_their_tokens(site: Site) -> None:
    site.send("1", "2")
    receiver = site.receiver()
    batch = receiver.receive_columns(9, NOW)
    assert bodies(to_messages(batch)) == ["1", "2"]
    receiver.settle_columns(batch.column("lock_token"), Disposition.COMPLETE)
    assert receiver.peek() == []


def test_browsing_shows_also_what_is_deferred_or_scheduled_and_locks_nothing(site: Site) -> None:
    site.send("active", "deferred")
    receiver = site.receiver()
    _, second = receiver.receive_batch(2, NOW)
    second.defer()
    site.factory.create_message_sender(ORDERS).schedule(
        message("scheduled"), site.clock.now() + timedelta(hours=1)
    )
    site.pass_time(minutes=2)
    found = receiver.peek(max_messages=9)
    assert {item.body.decode(): item.state for item in found} == {
        "active": MessageState.ACTIVE,
        "deferred": MessageState.DEFERRED,
        "scheduled": MessageState.SCHEDULED,
    }
    assert bodies(receiver.peek(from_sequence_number=(second.sequence_number or 0) + 1)) == [
        "scheduled"
    ]
    assert all(item.lock_token is None for item in found)


def test_iterating_gives_messages_as_they_come_until_the_receiver_is_closed(site: Site) -> None:
    site.send("1", "2", "3")
    receiver = site.receiver()
    seen = []
    for received in receiver:
        received.complete()
        seen.append(received.body.decode())
        if len(seen) == 3:
            receiver.close()
    assert seen == ["1", "2", "3"]


# -- settling --------------------------------------------------------------------------------------


def test_a_completed_message_is_not_delivered_again(site: Site) -> None:
    site.send("one")
    got(site.receiver().receive(NOW)).complete()
    site.pass_time(hours=1)
    assert site.take() == []


def test_an_abandoned_message_comes_back_and_counts_a_failed_delivery(site: Site) -> None:
    site.send("one")
    receiver = site.receiver()
    got(receiver.receive(NOW)).abandon()
    again = got(receiver.receive(NOW))
    assert (again.body, again.delivery_count) == (b"one", 1)


def test_a_deferred_message_comes_back_only_by_its_number(site: Site) -> None:
    site.send("1", "2", "3")
    receiver = site.receiver()
    deferred = receiver.receive_batch(3, NOW)
    deferred[0].defer()
    receiver.defer(deferred[1:])
    assert receiver.receive(NOW) is None
    numbers = [item.sequence_number or 0 for item in deferred]
    assert bodies(receiver.receive_deferred(numbers[0])) == ["1"]
    (second, third) = receiver.receive_deferred(numbers[1:])
    second.complete()
    third.complete()
    assert bodies(receiver.peek(max_messages=9)) == ["1"]


def test_a_dead_lettered_message_says_why_in_the_dead_letter_queue(site: Site) -> None:
    site.send("bad")
    got(site.receiver().receive(NOW)).dead_letter("unreadable", "no such product")
    dead = site.factory.create_message_receiver(dead_letter_path(ORDERS))
    found = got(dead.receive(NOW))
    assert found.dead_letter_reason == "unreadable"
    assert found.dead_letter_error_description == "no such product"
    found.complete()
    assert dead.peek() == []


def test_several_messages_are_settled_in_one_operation(site: Site) -> None:
    site.send(*"123456")
    receiver = site.receiver()
    first, second, third, fourth, fifth, sixth = receiver.receive_batch(9, NOW)
    receiver.complete([first, second])
    receiver.abandon([third])
    receiver.defer([fourth])
    receiver.dead_letter([fifth, sixth], "reason")
    receiver.complete([])
    assert bodies(receiver.peek(max_messages=9)) == ["3", "4"]
    assert site.take(dead_letter_path(ORDERS)) == ["5", "6"]


def test_a_lock_can_be_renewed_by_the_message_and_by_the_receiver(site: Site) -> None:
    site.send("one")
    receiver = site.receiver()
    received = got(receiver.receive(NOW))
    site.pass_time(seconds=50)
    assert received.renew_lock() == site.clock.now() + timedelta(minutes=1)
    site.pass_time(seconds=50)
    assert receiver.renew_locks([received]) == site.clock.now() + timedelta(minutes=1)
    site.pass_time(seconds=50)
    received.complete()
    assert receiver.peek() == []


def test_a_lapsed_lock_cannot_be_settled_or_renewed(site: Site) -> None:
    site.send("one")
    received = got(site.receiver().receive(NOW))
    site.pass_time(minutes=1)
    with pytest.raises(MessageLockLostError):
        received.complete()
    with pytest.raises(MessageLockLostError):
        received.renew_lock()


def test_a_message_cannot_be_settled_twice(site: Site) -> None:
    site.send("one")
    received = got(site.receiver().receive(NOW))
    received.complete()
    with pytest.raises(InvalidOperationError, match="already completed"):
        received.complete()
    with pytest.raises(InvalidOperationError, match="already completed"):
        received.abandon()


def test_a_message_that_was_browsed_or_never_received_cannot_be_settled(site: Site) -> None:
    site.send("one")
    receiver = site.receiver()
    with pytest.raises(InvalidOperationError):
        receiver.complete(receiver.peek())
    with pytest.raises(InvalidOperationError):
        receiver.renew_locks(receiver.peek())
    with pytest.raises(InvalidOperationError):
        ReceivedMessage(body=b"made by hand").complete()


# -- fetching ahead --------------------------------------------------------------------------------


def test_messages_fetched_ahead_come_in_order_and_can_be_settled(site: Site) -> None:
    texts = [str(number) for number in range(35)]
    site.send(*texts)
    seen = []
    with site.receiver(AHEAD) as receiver:
        for _ in texts:
            received = got(receiver.receive(NOW))
            received.complete()
            seen.append(received.body.decode())
        assert receiver.receive(NOW) is None
    assert seen == texts
    assert site.take() == []


def test_closing_gives_back_what_was_fetched_ahead_and_not_read(site: Site) -> None:
    site.send("1", "2", "3", "4", "5")
    with site.receiver(AHEAD) as receiver:
        got(receiver.receive(NOW)).complete()
    left = site.receiver().receive_batch(9, NOW)
    assert bodies(left) == ["2", "3", "4", "5"]
    assert [item.delivery_count for item in left] == [0] * 4


def test_an_iteration_that_is_broken_off_leaves_nothing_locked_but_what_was_read(
    site: Site,
) -> None:
    site.send("1", "2", "3", "4", "5")
    with site.receiver(AHEAD) as receiver:
        for received in receiver:
            received.complete()
            break
    assert bodies(site.receiver().receive_batch(9, NOW)) == ["2", "3", "4", "5"]


def test_an_iteration_over_messages_fetched_ahead_ends_when_the_receiver_is_closed(
    site: Site,
) -> None:
    site.send("1", "2", "3", "4", "5")
    receiver = site.receiver(AHEAD)
    seen = []
    for received in receiver:
        seen.append(received.body.decode())
        received.complete()
        receiver.close()
    assert seen == ["1"]


def test_messages_fetched_ahead_whose_locks_lapsed_are_not_handed_out(site: Site) -> None:
    site.send("1", "2", "3")
    with site.receiver(AHEAD) as receiver:
        got(receiver.receive(NOW)).complete()
        site.pass_time(minutes=2)
        second = got(receiver.receive(NOW))
        assert second.body == b"2"
        second.complete()
        third = got(receiver.receive(NOW))
        third.complete()
    assert site.take() == []


def test_messages_that_come_later_are_fetched_too(site: Site) -> None:
    with site.receiver(AHEAD) as receiver:
        assert receiver.receive(NOW) is None
        site.send("1", "2")
        found = [receiver.receive(NOW), receiver.receive(NOW)]
    assert bodies(filter(None, found)) == ["1", "2"]


def test_a_batch_can_be_received_from_what_was_fetched_ahead(site: Site) -> None:
    site.send(*"123456")
    with site.receiver(AHEAD) as receiver:
        assert bodies(receiver.receive_batch(2, NOW)) == ["1", "2"]
        assert bodies(receiver.receive_batch(3, NOW)) == ["3", "4", "5"]
    assert site.take() == ["6"]


# -- renewal ---------------------------------------------------------------------------------------


def test_a_lock_is_renewed_by_itself_while_the_application_works(site: Site) -> None:
    site.send("one")
    with site.receiver(RENEWED) as receiver:
        received = got(receiver.receive(NOW))
        for times in range(1, 6):
            site.pass_time(seconds=40)
            site.observed.wait_for(RenewLocks, times)
        received.complete()
    assert site.take() == []


def test_a_lock_is_renewed_no_longer_than_asked_for(site: Site) -> None:
    site.send("one")
    options = ReceiveOptions(auto_renew_for=timedelta(seconds=50))
    with site.receiver(options) as receiver:
        received = got(receiver.receive(NOW))
        site.pass_time(seconds=40)
        site.observed.wait_for(RenewLocks, 1)
        site.pass_time(seconds=40)
        site.pass_time(seconds=40)
        with pytest.raises(MessageLockLostError):
            received.complete()
    assert site.observed.count(RenewLocks) == 1


def test_a_settled_message_is_not_renewed(site: Site) -> None:
    site.send("done", "held")
    with site.receiver(RENEWED) as receiver:
        done, found = receiver.receive_batch(2, NOW)
        done.abandon()
        site.pass_time(seconds=40)
        site.observed.wait_for(RenewLocks, 1)
        site.pass_time(seconds=40)
        site.observed.wait_for(RenewLocks, 2)
        found.complete()
    assert site.observed.count(RenewLocks) == 2
    assert site.take() == ["done"]


def test_a_closed_receiver_renews_nothing(site: Site) -> None:
    site.send("one")
    with site.receiver(RENEWED) as receiver:
        receiver.receive(NOW)
    site.pass_time(seconds=61)
    assert site.take() == ["one"]
    assert site.observed.count(RenewLocks) == 0


def test_a_session_is_renewed_by_itself(site: Site) -> None:
    site.send("one", path=SESSIONS, session_id="s")
    with site.factory.accept_message_session(SESSIONS, "s", NOW, RENEWED) as session:
        received = got(session.receive(NOW))
        for times in range(1, 4):
            site.pass_time(seconds=40)
            site.observed.wait_for(RenewSession, times)
        received.complete()
        session.set_state(b"still held")
