"""Compaction: space comes back while the broker runs, and nothing that lives is lost."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest

from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    accept,
    bodies,
    complete,
    later,
    message,
    peek,
    queue,
    receive,
    receive_one,
    runtime,
    send,
    settle,
    subscription,
    take,
    topic,
)
from tests.inside import begin_segment
from tests.scenarios.site import Site
from twinbus.broker.queue.dead_letter import Death
from twinbus.broker.store.commit import Entries
from twinbus.entities import RuleDescription, SqlAction, TrueFilter
from twinbus.errors import MessagingError, RangeUnavailableError
from twinbus.message import MessageState, to_messages, tokens_of
from twinbus.protocol.commands import (
    CancelScheduled,
    DeleteEntity,
    Disposition,
    GetSessionState,
    LeaseRange,
    Origin,
    ReadRange,
    ReceiveDeferred,
    Send,
    SetSessionState,
    Settle,
)

SEGMENT_BYTES = 20_000
PADDING = "x" * 1000
PASSING = "passing"


@pytest.fixture
def small(make_site: Callable[..., Site]) -> Site:
    """Return a site of small segments with two queues."""
    site = make_site(segment_bytes=SEGMENT_BYTES)
    queue(site)
    queue(site, PASSING)
    return site


def let_messages_pass(site: Site, rounds: int = 15) -> None:
    """Send and complete so much in another queue that every older segment is given up."""
    before = min(site.engine.log.segments)
    last = max(site.engine.log.segments)
    for _ in range(rounds):
        send(site, *[PADDING] * 10, path=PASSING)
        complete(site, *receive(site, PASSING), path=PASSING)
        site.wait(milliseconds=1)
    assert min(site.engine.log.segments) > last >= before


def compact_and_restart(site: Site) -> None:
    """Compact, restart, compact again and restart by accident."""
    let_messages_pass(site)
    site.reopen()
    let_messages_pass(site)
    site.crash()


def test_space_is_given_back_while_the_broker_runs(small: Site) -> None:
    for _ in range(20):
        send(small, *[PADDING] * 10)
    assert small.log_bytes > 10 * SEGMENT_BYTES
    complete(small, *receive(small))
    small.wait(milliseconds=1)
    assert small.log_bytes < 5 * SEGMENT_BYTES


def test_the_log_of_a_busy_queue_stays_within_a_few_segments(small: Site) -> None:
    send(small, "stays")
    largest = 0
    for _ in range(100):
        send(small, *[PADDING] * 10, path=PASSING)
        complete(small, *receive(small, PASSING), path=PASSING)
        largest = max(largest, small.log_bytes)
    assert largest < 8 * SEGMENT_BYTES


def test_waiting_messages_survive_compaction_under_their_numbers(small: Site) -> None:
    numbers = send(small, "a", "b", "c")
    complete(small, receive_one(small))
    compact_and_restart(small)
    assert [(m.sequence_number, m.body) for m in peek(small)] == [
        (numbers[1], b"b"),
        (numbers[2], b"c"),
    ]


def test_a_moved_message_keeps_all_it_has(small: Site) -> None:
    send(
        small,
        message(
            "a",
            session_id="s",
            time_to_live=timedelta(days=9),
            application_properties={"when": small.clock.now(), "count": 7, "good": True},
        ),
    )
    settle(small, Disposition.ABANDON, receive_one(small))
    [before] = peek(small)
    compact_and_restart(small)
    assert peek(small) == [before]
    assert before.delivery_count == 1


def test_deferred_messages_survive_compaction(small: Site) -> None:
    send(small, "a", "b")
    settle(small, Disposition.DEFER, *receive(small))
    compact_and_restart(small)
    numbers = [m.sequence_number for m in peek(small) if m.sequence_number is not None]
    assert {m.state for m in peek(small)} == {MessageState.DEFERRED}
    assert bodies(to_messages(small.ask(ReceiveDeferred(QUEUE, numbers)))) == ["a", "b"]


def test_scheduled_messages_survive_compaction_and_come_on_time(small: Site) -> None:
    when = later(small, hours=1)
    [number, doomed] = send(
        small,
        message("a", scheduled_enqueue_time_utc=when),
        message("b", scheduled_enqueue_time_utc=when),
    )
    compact_and_restart(small)
    small.ask(CancelScheduled(QUEUE, [doomed]))
    assert [m.sequence_number for m in peek(small)] == [number]
    assert take(small) == []
    small.wait(hours=1)
    assert take(small) == ["a"]


def test_dead_lettered_messages_survive_compaction_with_their_reason(small: Site) -> None:
    send(small, "a")
    received = receive_one(small)
    assert received.lock_token is not None
    token = tokens_of([received.lock_token])
    small.ask(Settle(QUEUE, token, Disposition.DEAD_LETTER, "bad", "very bad"))
    compact_and_restart(small)
    [dead] = peek(small, DEAD)
    assert (dead.dead_letter_reason, dead.dead_letter_error_description) == ("bad", "very bad")
    assert dead.dead_letter_source == QUEUE


def test_a_reason_is_not_lost_with_the_segment_of_an_earlier_message_with_this_reason(
    small: Site,
) -> None:
    def bury(text: str) -> None:
        send(small, text)
        settle(small, Disposition.DEAD_LETTER, receive_one(small))

    bury("earlier")
    complete(small, receive_one(small, DEAD), path=DEAD)
    while len(small.engine.log.segments) == 1:  # the second one begins with all reasons in use
        send(small, *[PADDING] * 10, path=PASSING)
    small.crash()
    bury("later")
    complete(small, *receive(small, PASSING), path=PASSING)
    assert list(small.engine.log.segments) == [2]
    small.crash()
    [dead] = peek(small, DEAD)
    assert (dead.body, dead.dead_letter_source) == (b"later", QUEUE)


def test_a_dead_letter_whose_reason_is_missing_in_the_log_can_be_received(small: Site) -> None:
    death = Death(None, None, QUEUE)
    small.engine.namespace.shared.deaths.number(death, Entries())  # these entries are not written
    send(small, "a")
    settle(small, Disposition.DEAD_LETTER, receive_one(small))
    small.crash()
    dead = receive_one(small, DEAD)
    assert (dead.body, dead.dead_letter_reason) == (b"a", "ReasonLost")


def test_session_states_and_session_order_survive_compaction(small: Site) -> None:
    queue(small, "talks", requires_session=True)
    send(small, message("1", session_id="s"), message("2", session_id="s"), path="talks")
    small.ask(SetSessionState("talks", accept(small, "s", "talks"), b"half done"))
    compact_and_restart(small)
    lock = accept(small, "s", "talks")
    assert small.ask(GetSessionState("talks", lock)) == b"half done"
    assert bodies(receive(small, "talks", session=lock)) == ["1", "2"]


def test_duplicate_history_survives_compaction_until_its_window_is_over(small: Site) -> None:
    window = timedelta(hours=1)
    queue(
        small,
        "once",
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=window,
    )
    send(small, message("a", message_id="1"), path="once")
    assert take(small, "once") == ["a"]
    compact_and_restart(small)
    assert send(small, message("again", message_id="1"), path="once") == [0]
    small.clock.advance(window)
    assert send(small, message("again", message_id="1"), path="once") != [0]


def test_the_memory_of_transfers_survives_compaction(small: Site) -> None:
    transfer = Send(QUEUE, [message("a"), message("b")], Origin("backlog-1", [4, 9]))
    small.ask(transfer)
    take(small)
    compact_and_restart(small)
    assert list(small.ask(transfer).sequence_numbers) == [0, 0]
    assert peek(small) == []


def test_leases_survive_compaction(small: Site) -> None:
    send(small, "a", "b", "c")
    lease = small.ask(LeaseRange(QUEUE, "syphon", 2, duration=timedelta(hours=1)))
    compact_and_restart(small)
    found = to_messages(small.ask(ReadRange(QUEUE, lease.epoch, lease.first, lease.last)))
    assert bodies(found) == ["a", "b"]
    assert take(small) == ["c"]
    with pytest.raises(RangeUnavailableError):
        small.ask(LeaseRange(QUEUE, "another", 2, lease.first, lease.last))


def test_a_locked_message_keeps_its_lock_through_compaction(small: Site) -> None:
    send(small, "a")
    received = receive_one(small)
    let_messages_pass(small)
    complete(small, received)
    small.reopen()
    assert peek(small) == []


def test_copies_of_a_topic_survive_compaction_with_the_changes_of_their_rules(small: Site) -> None:
    topic(small)
    change = RuleDescription("change", TrueFilter(), SqlAction("SET colour = 'red'"))
    paths = [subscription(small, "plain"), subscription(small, "changed", change)]
    send(small, message("a"), path=TOPIC)
    compact_and_restart(small)
    found = [peek(small, path)[0].application_properties for path in paths]
    assert found == [{}, {"colour": "red"}]


def test_sequence_numbers_go_on_after_everything_was_compacted_away(small: Site) -> None:
    [*_, last] = send(small, "a", "b", "c")
    take(small)
    compact_and_restart(small)
    assert send(small, "d") == [last + 1]


def test_deleted_entities_stay_deleted_through_compaction(small: Site) -> None:
    queue(small, "temporary")
    send(small, PADDING, path="temporary")
    small.ask(DeleteEntity("temporary"))
    compact_and_restart(small)
    queue(small, "temporary")
    assert peek(small, "temporary") == []


def test_counts_and_sizes_are_the_same_after_compaction_and_restart(small: Site) -> None:
    send(small, "a", "b", "c", "d")
    first, second, third = receive(small, count=3)
    settle(small, Disposition.DEFER, first)
    settle(small, Disposition.DEAD_LETTER, second)
    settle(small, Disposition.ABANDON, third)
    before = runtime(small)
    compact_and_restart(small)
    after = runtime(small)
    assert after.active_message_count == before.active_message_count == 3
    assert after.dead_letter_message_count == before.dead_letter_message_count == 1
    assert after.size_in_bytes == before.size_in_bytes
    assert small.engine.namespace.faults() == []


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_compaction_after_storage_trouble_forgets_no_entity(small: Site, trouble: str) -> None:
    send(small, "a")
    setattr(small.disk, trouble, True)
    send(small, "b")
    setattr(small.disk, trouble, False)
    small.wait(seconds=2)
    compact_and_restart(small)
    assert bodies(peek(small)) == ["a", "b"]


@pytest.mark.parametrize("survived_bytes", range(0, 60_000, 2_503))
def test_a_power_failure_during_compaction_loses_nothing(small: Site, survived_bytes: int) -> None:
    send(small, *[f"{n} {PADDING}" for n in range(20)])
    kept = bodies(peek(small))
    small.tear_after(survived_bytes)
    with suppress(MessagingError):
        let_messages_pass(small)
    small.crash()
    assert bodies(peek(small)) == kept
    let_messages_pass(small)
    small.reopen()
    assert bodies(peek(small)) == kept


def test_a_crash_between_a_segment_and_its_first_record_forgets_no_entity(small: Site) -> None:
    send(small, "a")
    complete(small, receive_one(small))
    first = min(small.engine.log.segments)
    begin_segment(small.engine)
    small.crash()
    send(small, "b", "c")
    complete(small, receive_one(small))
    small.wait(seconds=1)
    assert min(small.engine.log.segments) > first
    small.crash()
    assert bodies(peek(small)) == ["c"]
