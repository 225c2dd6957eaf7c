"""The wall clock of a server is set while it runs: nothing is lost, frozen or repeated."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.contracts.words import (
    DEAD,
    QUEUE,
    accept,
    bodies,
    complete,
    later,
    message,
    outcome,
    peek,
    queue,
    receive,
    receive_one,
    send,
    start,
    take,
)
from tests.scenarios.site import Site
from twinbus.entities import SubscriptionDescription, TopicDescription
from twinbus.errors import MessageLockLostError, SessionLockLostError, StaleEpochError
from twinbus.limits import MAX_LEASE_DURATION
from twinbus.message import tokens_of
from twinbus.protocol.commands import CreateEntity, LeaseRange, Receive, ReleaseRange, RenewLocks

STEPS = pytest.mark.parametrize(
    "step", [timedelta(hours=-1), timedelta(hours=1), timedelta(days=365), timedelta(days=-365)]
)
TICK = timedelta(seconds=2)


def set_clock(site: Site, step: timedelta) -> None:
    """Set the wall clock and let the broker notice."""
    site.clock.set_wall(step)
    site.clock.advance(TICK)


@STEPS
def test_a_lock_lasts_as_long_as_it_would_have(site: Site, step: timedelta) -> None:
    queue(site, lock_duration=timedelta(seconds=60))
    send(site, "a")
    found = receive_one(site)
    site.wait(seconds=30)
    set_clock(site, step)
    complete_later = tokens_of([found.lock_token]) if found.lock_token else None
    site.wait(seconds=20)
    assert receive(site) == []
    site.ask(RenewLocks(QUEUE, complete_later))
    site.wait(seconds=59)
    assert receive(site) == []
    site.wait(seconds=2)
    assert receive_one(site).delivery_count == 1
    with pytest.raises(MessageLockLostError):
        complete(site, found)


@STEPS
def test_a_wait_ends_when_it_would_have(site: Site, step: timedelta) -> None:
    queue(site)
    waiting = start(site, Receive(QUEUE, wait=timedelta(seconds=60)))
    set_clock(site, step)
    site.wait(seconds=57)
    assert not waiting.done()
    site.wait(seconds=2)
    assert outcome(waiting) == []


@STEPS
def test_a_message_lives_as_long_as_it_would_have(site: Site, step: timedelta) -> None:
    queue(site, enable_dead_lettering_on_message_expiration=True)
    send(site, message("a", time_to_live=timedelta(minutes=5)))
    set_clock(site, step)
    site.wait(minutes=4)
    assert bodies(peek(site)) == ["a"]
    site.wait(minutes=2)
    assert peek(site) == []
    assert bodies(peek(site, DEAD)) == ["a"]


@STEPS
@pytest.mark.parametrize("crashes", [False, True])
def test_a_message_lives_on_through_a_restart_after_the_step(
    site: Site, step: timedelta, crashes: bool
) -> None:
    queue(site)
    send(site, message("a", time_to_live=timedelta(minutes=5)))
    set_clock(site, step)
    send(site, message("b", time_to_live=timedelta(minutes=5)))
    site.crash() if crashes else site.reopen()
    site.wait(minutes=4)
    assert bodies(peek(site)) == ["a", "b"]
    site.wait(minutes=2)
    assert peek(site) == []


@STEPS
def test_a_schedule_follows_the_wall_clock(site: Site, step: timedelta) -> None:
    queue(site)
    due = later(site, hours=2)
    send(site, message("a", scheduled_enqueue_time_utc=due))
    set_clock(site, step)
    is_due = site.clock.now() >= due
    assert take(site) == (["a"] if is_due else [])
    if not is_due:
        site.clock.advance(due - site.clock.now())
        assert take(site) == ["a"]


@STEPS
@pytest.mark.parametrize("path", [QUEUE, "news"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_scheduled_message_lives_from_when_it_is_due(
    site: Site, step: timedelta, path: str, restarts: bool
) -> None:
    queue(site)
    site.ask(CreateEntity(TopicDescription(path="news")))
    onward = SubscriptionDescription(topic_path="news", name="all", forward_to=QUEUE)
    site.ask(CreateEntity(onward))
    due = later(site, hours=2)
    life = timedelta(minutes=5)
    send(site, message("a", scheduled_enqueue_time_utc=due, time_to_live=life), path=path)
    set_clock(site, step)
    if restarts:
        site.reopen()
    if site.clock.now() < due:
        site.clock.advance(due - site.clock.now())
    site.wait(minutes=4)
    assert bodies(peek(site)) == ["a"]
    site.wait(minutes=2)
    assert peek(site) == []


def test_a_moment_a_year_ahead_fires_and_loses_nothing(site: Site) -> None:
    queue(site)
    send(site, message("planned", scheduled_enqueue_time_utc=later(site, hours=2)))
    send(site, message("short", time_to_live=timedelta(minutes=5)))
    found = receive_one(site)
    site.clock.set_wall(timedelta(days=365))
    site.clock.set_wall(-timedelta(days=365))
    site.wait(seconds=10)
    complete(site, found)
    assert peek(site)[0].body == b"planned"
    site.wait(hours=2)
    assert take(site) == ["planned"]


@STEPS
def test_sessions_and_leases_last_as_long_as_they_would_have(site: Site, step: timedelta) -> None:
    queue(site, requires_session=True)
    queue(site, "plain")
    send(site, message("a", session_id="s"))
    send(site, "b", path="plain")
    lock = accept(site, "s")
    lease = site.ask(LeaseRange("plain", "me", 10, duration=timedelta(seconds=60)))
    set_clock(site, step)
    site.wait(seconds=50)
    assert bodies(receive(site, session=lock)) == ["a"]
    assert receive(site, "plain") == []
    site.wait(seconds=10)
    with pytest.raises(SessionLockLostError):
        receive(site, session=lock)
    with pytest.raises(StaleEpochError):
        site.ask(ReleaseRange("plain", lease.epoch))
    assert bodies(receive(site, "plain")) == ["b"]


@STEPS
def test_a_lease_outlives_a_restart_after_the_step_as_long_as_it_would_have(
    site: Site, step: timedelta
) -> None:
    queue(site)
    send(site, "a")
    site.ask(LeaseRange(QUEUE, "me", 10, duration=timedelta(minutes=10)))
    set_clock(site, step)
    send(site, "b")
    site.crash()
    assert bodies(receive(site)) == ["b"]
    site.wait(minutes=11)
    assert "a" in bodies(receive(site))


@STEPS
@pytest.mark.parametrize("crashes", [False, True])
def test_duplicates_are_known_within_their_window(
    site: Site, step: timedelta, crashes: bool
) -> None:
    window = timedelta(minutes=10)
    queue(site, requires_duplicate_detection=True, duplicate_detection_history_time_window=window)
    send(site, message("a", message_id="1"))
    set_clock(site, step)
    if crashes:
        send(site, message("b", message_id="2"))
        site.crash()
    site.wait(minutes=5)
    send(site, message("again", message_id="1"))
    assert "again" not in bodies(peek(site))
    site.wait(minutes=6)
    send(site, message("anew", message_id="1"))
    assert "anew" in bodies(peek(site))


@STEPS
def test_lock_tokens_of_before_a_restart_match_nothing_after_the_clock_was_set(
    site: Site, step: timedelta
) -> None:
    queue(site)
    send(site, "a")
    found = receive_one(site)
    site.clock.set_wall(step)
    site.crash()
    again = receive_one(site)
    assert again.lock_token != found.lock_token
    with pytest.raises(MessageLockLostError):
        complete(site, found)


@pytest.mark.parametrize("step", [timedelta(hours=-1), timedelta(hours=1)])
def test_ids_of_a_segment_that_is_dropped_after_the_step_are_known_after_a_restart(
    make_site: Callable[..., Site], step: timedelta
) -> None:
    site = make_site(segment_bytes=20_000)
    window = timedelta(hours=5)
    queue(
        site,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=window,
    )
    queue(site, "passing")
    send(site, message("a", message_id="1"))
    complete(site, receive_one(site))
    first = max(site.engine.log.segments)
    set_clock(site, step)
    for _ in range(15):
        send(site, *["x" * 1000] * 10, path="passing")
        complete(site, *receive(site, "passing", count=10), path="passing")
        site.wait(milliseconds=1)
    assert min(site.engine.log.segments) > first
    site.crash()
    assert send(site, message("again", message_id="1")) == [0]


def test_ids_leave_their_window_although_the_clock_was_set_back_while_the_broker_was_down(
    site: Site,
) -> None:
    window = timedelta(minutes=10)
    queue(
        site,
        requires_duplicate_detection=True,
        duplicate_detection_history_time_window=window,
    )
    send(site, message("a", message_id="x"))
    site.clock.set_wall(timedelta(hours=-1))
    site.crash()
    send(site, message("repeated", message_id="x"))
    send(site, message("b", message_id="y"))
    site.wait(minutes=11)
    send(site, message("a again", message_id="x"))
    send(site, message("b again", message_id="y"))
    assert take(site) == ["a", "b", "a again", "b again"]


def test_a_lease_ends_although_the_clock_was_set_back_while_the_broker_was_down(
    site: Site,
) -> None:
    queue(site)
    send(site, "a")
    site.ask(LeaseRange(QUEUE, "dead syphon", 10))
    site.clock.set_wall(timedelta(days=-1))
    site.crash()
    assert receive(site) == []
    site.clock.advance(MAX_LEASE_DURATION)
    assert receive_one(site).body == b"a"
