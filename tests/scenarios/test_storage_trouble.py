"""Storage trouble: a full, slow, failing or dying disk loses nothing that was acknowledged."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
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
    start,
    subscription,
    take,
    tokens,
    topic,
)
from tests.scenarios.site import Site
from twinbus.errors import (
    EntityNotFoundError,
    LogDamagedError,
    MessageLockLostError,
    MessagingError,
    StoreUnavailableError,
)
from twinbus.limits import SLOW_COMMIT_US, SLOW_COMMITS_TO_SPILL, SPILL_DRAIN_SENDS
from twinbus.message import BrokeredMessage, MessageState, tokens_of
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import (
    DeleteEntity,
    Disposition,
    Origin,
    Peek,
    Receive,
    Send,
    Settle,
)
from twinbus.testing import PowerFailure

NOBODY = 65534
pytestmark = pytest.mark.timeout(5)  # a broker that tries again without a pause never ends


def mend(site: Site) -> None:
    """The disk works again, and the broker has had time to notice."""
    site.disk.full = site.disk.fails_sync = False
    site.wait(seconds=2)


# -- a full disk -------------------------------------------------------------------------------


def test_a_send_during_a_full_disk_is_acknowledged_without_a_number(site: Site) -> None:
    queue(site)
    site.disk.full = True
    assert send(site, "a", "b") == [0, 0]


def test_a_spilled_message_is_invisible_until_the_disk_is_back(site: Site) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a")
    assert peek(site) == []
    mend(site)
    assert take(site) == ["a"]


def test_spilled_messages_appear_in_the_order_they_were_sent(site: Site) -> None:
    queue(site)
    send(site, "a")
    site.disk.full = True
    send(site, "b")
    send(site, "c", "d")
    mend(site)
    send(site, "e")
    assert take(site) == ["a", "b", "c", "d", "e"]


def test_a_disk_that_stays_full_keeps_the_broker_trying_and_running(site: Site) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a")
    for _ in range(10):
        site.wait(seconds=1)
    assert site.engine.restarts == 0
    mend(site)
    assert take(site) == ["a"]


def test_a_receiver_that_waits_through_the_trouble_gets_the_spilled_message(site: Site) -> None:
    queue(site)
    waiting = start(site, Receive(QUEUE, wait=timedelta(hours=1)))
    site.disk.full = True
    send(site, "a")
    site.wait(seconds=5)
    mend(site)
    assert waiting.result(timeout=1).column("body").to_pylist() == [b"a"]


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
@pytest.mark.parametrize("ending", ["reopen", "crash"])
def test_a_spilled_message_appears_once_after_a_restart(
    site: Site, trouble: str, ending: str
) -> None:
    queue(site)
    setattr(site.disk, trouble, True)
    send(site, "a")
    getattr(site, ending)()
    site.wait(seconds=2)
    assert take(site) == ["a"]


def test_a_restart_between_moving_and_clearing_the_spill_doubles_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a", "b")

    def lose_power(_count: int) -> set[str]:
        raise PowerFailure

    monkeypatch.setattr(site.engine.spill, "moved", lose_power)
    site.expect_power_failure()
    site.disk.full = False
    site.wait(seconds=1)
    site.crash()
    site.wait(seconds=2)
    assert take(site) == ["a", "b"]


def test_messages_spilled_before_and_after_a_restart_at_the_same_instant_both_appear(
    site: Site,
) -> None:
    queue(site)
    for body in ("a", "b"):
        site.disk.full = True
        send(site, body)
        site.embedded.close()
        site.open()
    site.wait(seconds=2)
    assert take(site) == ["a", "b"]


def test_more_spilled_sends_than_one_turn_moves_all_appear(site: Site) -> None:
    queue(site)
    site.disk.full = True
    sent = [str(number) for number in range(3 * SPILL_DRAIN_SENDS + 1)]
    for body in sent:
        send(site, body)
    mend(site)
    assert take(site) == sent


def test_a_transferred_message_that_was_spilled_is_still_taken_once(site: Site) -> None:
    queue(site)
    site.disk.full = True
    for _ in range(2):
        site.ask(Send(QUEUE, [message("a")], Origin("backlog-7", [1])))
    mend(site)
    site.ask(Send(QUEUE, [message("a")], Origin("backlog-7", [1])))
    assert take(site) == ["a"]


def test_a_duplicate_of_a_spilled_message_is_still_ignored(site: Site) -> None:
    queue(site, requires_duplicate_detection=True)
    site.disk.full = True
    for _ in range(2):
        send(site, message("a", message_id="order-1"))
    mend(site)
    send(site, message("a", message_id="order-1"))
    assert take(site) == ["a"]


@pytest.mark.parametrize("message_id", ["x", ""])
def test_the_id_of_a_spilled_message_does_not_make_it_a_duplicate_of_itself(
    site: Site, message_id: str
) -> None:
    queue(site, requires_duplicate_detection=True)
    site.disk.full = True
    assert send(site, message("a", message_id=message_id)) == [0]
    mend(site)
    assert take(site) == ["a"]


@pytest.mark.parametrize("message_id", ["x", ""])
def test_an_id_is_recognised_after_a_crash(site: Site, message_id: str) -> None:
    queue(site, requires_duplicate_detection=True)
    send(site, message("a", message_id=message_id))
    site.crash()
    send(site, message("a again", message_id=message_id))
    assert take(site) == ["a"]


def test_a_send_that_would_be_refused_is_refused_during_the_trouble_too(site: Site) -> None:
    queue(site)
    site.disk.full = True
    with pytest.raises(EntityNotFoundError):
        send(site, "a", path="nowhere")


def test_without_any_disk_a_send_is_refused_and_nothing_of_it_remains(site: Site) -> None:
    queue(site)
    site.disk.full = site.spill_disk.full = True
    with pytest.raises(StoreUnavailableError):
        send(site, "a")
    site.reopen()
    site.wait(seconds=2)
    assert peek(site) == []


@pytest.mark.parametrize("ending", ["reopen", "crash"])
def test_a_send_refused_because_no_disk_syncs_is_not_there_after_a_restart(
    site: Site, ending: str
) -> None:
    queue(site)
    site.disk.fails_sync = site.spill_disk.fails_sync = True
    with pytest.raises(StoreUnavailableError):
        send(site, "a")
    getattr(site, ending)()
    site.wait(seconds=2)
    assert peek(site) == []


def test_a_refused_send_may_be_tried_again_and_is_there_once(site: Site) -> None:
    queue(site, requires_duplicate_detection=True)
    site.disk.full = site.spill_disk.full = True
    order = message("a", message_id="order-1")
    with pytest.raises(StoreUnavailableError):
        send(site, order)
    site.spill_disk.full = False
    mend(site)
    send(site, order)
    assert take(site) == ["a"]


def test_a_scheduled_send_is_refused_rather_than_spilled(site: Site) -> None:
    queue(site)
    site.disk.full = True
    with pytest.raises(StoreUnavailableError):
        send(site, message("a", scheduled_enqueue_time_utc=later(site, hours=1)))
    mend(site)
    assert peek(site) == []


def test_an_entity_created_during_a_full_disk_is_refused_and_is_not_there(site: Site) -> None:
    site.disk.full = True
    with pytest.raises(StoreUnavailableError):
        queue(site)
    mend(site)
    queue(site)


def metered(site: Site) -> dict[tuple[str, str], int]:
    """Return the operations by kind and outcome."""
    rows = site.engine.namespace.meter.table().to_pylist()
    return {(row["operation"], row["outcome"]): row["count"] for row in rows}


def test_an_operation_that_the_log_refuses_is_metered_as_refused(site: Site) -> None:
    queue(site)
    send(site, "a")
    site.disk.full = site.spill_disk.full = True
    with pytest.raises(StoreUnavailableError):
        take(site)
    with pytest.raises(StoreUnavailableError):
        send(site, "b")
    with pytest.raises(StoreUnavailableError):
        queue(site, path="other")
    counts = metered(site)
    for kind in ("Receive", "Send", "CreateEntity"):
        assert counts[kind, "StoreUnavailable"] == 1
    assert ("Receive", "ok") not in counts
    assert (counts["Send", "ok"], counts["CreateEntity", "ok"]) == (1, 1)
    site.spill_disk.full = False
    mend(site)
    assert take(site) == ["a"]
    assert metered(site)["Receive", "ok"] == 1


def test_a_message_completed_during_the_trouble_stays_completed(site: Site) -> None:
    queue(site)
    send(site, "a", "b")
    (first, second) = receive(site)
    site.disk.full = True
    complete(site, first)
    site.wait(minutes=2)
    assert bodies(peek(site)) == ["b"]
    assert second.delivery_count == 0
    mend(site)
    site.reopen()
    assert bodies(peek(site)) == ["b"]


def test_a_message_completed_during_the_trouble_is_delivered_again_after_a_crash_at_worst(
    site: Site,
) -> None:
    queue(site)
    send(site, "a")
    received = receive_one(site)
    site.disk.full = True
    complete(site, received)
    site.crash()
    assert set(bodies(peek(site))) <= {"a"}


def test_a_message_dead_lettered_during_the_trouble_is_in_one_place(site: Site) -> None:
    queue(site)
    send(site, "a")
    received = receive_one(site)
    site.disk.full = True
    with suppress(StoreUnavailableError):
        settle(site, Disposition.DEAD_LETTER, received)
    mend(site)
    site.reopen()
    assert sorted(bodies(peek(site)) + bodies(peek(site, DEAD))) == ["a"]


def test_a_dead_letter_that_is_forwarded_during_the_trouble_arrives_once_after_it(
    site: Site,
) -> None:
    queue(site, "graves")
    queue(site, forward_dead_lettered_messages_to="graves")
    send(site, "a")
    received = receive_one(site)
    site.disk.full = True
    with suppress(StoreUnavailableError):
        settle(site, Disposition.DEAD_LETTER, received)
    assert bodies(peek(site, "graves")) == []
    mend(site)
    assert bodies(peek(site, "graves")) == ["a"]
    site.reopen()
    assert bodies(peek(site)) + bodies(peek(site, DEAD)) == []
    assert bodies(peek(site, "graves")) == ["a"]


def test_a_spilled_message_that_dies_on_its_way_is_forwarded_once(site: Site) -> None:
    queue(site, "graves")
    queue(site, requires_session=True, forward_dead_lettered_messages_to="graves")
    queue(site, "door", forward_to=QUEUE)
    site.disk.fails_sync = True
    send(site, "a", path="door")
    site.wait(seconds=2)
    assert peek(site, "graves") == []
    mend(site)
    site.reopen()
    assert bodies(peek(site, "graves")) == ["a"]
    assert peek(site, DEAD) == []


def test_a_message_received_and_deleted_is_not_handed_out_unless_that_is_durable(
    site: Site,
) -> None:
    queue(site)
    send(site, "a")
    site.disk.full = True
    with pytest.raises(StoreUnavailableError):
        take(site)
    mend(site)
    assert take(site) == ["a"]


def test_messages_scheduled_to_a_topic_fall_due_during_the_trouble_and_arrive_after_it(
    site: Site,
) -> None:
    topic(site)
    news = subscription(site, "sport")
    send(site, message("goal", scheduled_enqueue_time_utc=later(site, minutes=1)), path=TOPIC)
    site.disk.full = True
    site.wait(minutes=2)
    mend(site)
    assert take(site, news) == ["goal"]


def test_a_lock_that_lapses_during_the_trouble_returns_the_message(site: Site) -> None:
    queue(site, lock_duration=timedelta(seconds=30))
    send(site, "a")
    receive_one(site)
    site.disk.full = True
    site.wait(minutes=1)
    mend(site)
    assert receive_one(site).delivery_count == 1


def test_spilled_messages_of_a_queue_deleted_meanwhile_go_with_it(site: Site) -> None:
    queue(site)
    site.disk.full = True
    send(site, "a")
    site.disk.full = False
    site.ask(DeleteEntity(QUEUE))
    queue(site, "another")
    site.wait(seconds=5)
    assert site.engine.restarts == 0
    assert len(site.engine.spill) == 0


def test_a_queue_made_anew_with_sessions_does_not_trip_over_what_was_spilled(site: Site) -> None:
    queue(site)
    site.disk.full = True
    send(site, "without a session")
    site.disk.full = False
    site.ask(DeleteEntity(QUEUE))
    queue(site, requires_session=True)
    site.wait(seconds=2)
    assert site.engine.restarts == 0


# -- a slow disk -------------------------------------------------------------------------------


def test_three_slow_commits_in_a_row_lead_to_spilling(site: Site) -> None:
    queue(site)
    site.disk.delay_us = SLOW_COMMIT_US
    numbers = [send(site, "slow") for _ in range(SLOW_COMMITS_TO_SPILL)]
    assert all(number > 0 for [number] in numbers)
    assert send(site, "spilled") == [0]
    site.disk.delay_us = 0
    site.wait(seconds=2)
    assert take(site) == ["slow"] * SLOW_COMMITS_TO_SPILL + ["spilled"]


def test_slow_commits_with_quick_ones_between_are_no_trouble(site: Site) -> None:
    queue(site)
    for _ in range(3 * SLOW_COMMITS_TO_SPILL):
        site.disk.delay_us = SLOW_COMMIT_US
        send(site, "slow")
        site.disk.delay_us = 0
        send(site, "quick")
    assert send(site, "last")[0] > 0


def test_a_scheduled_send_waits_for_the_slow_disk_rather_than_being_spilled(site: Site) -> None:
    queue(site)
    site.disk.delay_us = SLOW_COMMIT_US
    for _ in range(SLOW_COMMITS_TO_SPILL):
        send(site, "slow")
    [number] = send(site, message("a", scheduled_enqueue_time_utc=later(site, hours=1)))
    assert [m.sequence_number for m in peek(site) if m.state is MessageState.SCHEDULED] == [number]


def token_of(locked: BrokeredMessage) -> UUID:
    assert locked.lock_token is not None
    return locked.lock_token


def slow_down(site: Site) -> None:
    """Make the disk so slow that settlements wait."""
    site.disk.delay_us = SLOW_COMMIT_US
    for _ in range(SLOW_COMMITS_TO_SPILL):
        send(site, "slow")


def test_a_settlement_that_waits_for_a_slow_disk_is_answered_when_the_namespace_closes(
    site: Site,
) -> None:
    queue(site)
    send(site, "a")
    locked = tokens(*receive(site))
    slow_down(site)
    settled = start(site, Settle(QUEUE, locked, Disposition.COMPLETE))
    assert not settled.done()
    site.embedded.close()
    assert settled.result(timeout=0) is None
    site.open()
    assert "a" not in bodies(peek(site))


def test_a_settlement_in_part_is_reported_when_it_is_durable(site: Site) -> None:
    queue(site)
    send(site, "a")
    locked = tokens_of([token_of(receive_one(site)), uuid4()])
    slow_down(site)
    settled = start(site, Settle(QUEUE, locked, Disposition.COMPLETE))
    assert not settled.done()
    site.disk.delay_us = 0
    site.wait(seconds=2)
    with pytest.raises(MessageLockLostError, match="1 other message"):
        settled.result(timeout=0)
    site.crash()
    assert "a" not in bodies(peek(site))


def test_a_settlement_in_part_that_the_log_refuses_is_not_reported_as_done(site: Site) -> None:
    queue(site)
    send(site, "a")
    locked = tokens_of([token_of(receive_one(site)), uuid4()])
    site.disk.fails_sync = True
    with pytest.raises(StoreUnavailableError):
        site.ask(Settle(QUEUE, locked, Disposition.COMPLETE))
    site.crash()
    assert bodies(peek(site)) == ["a"]


# -- a disk that does not sync -----------------------------------------------------------------


def test_a_send_that_could_not_be_synced_is_spilled_and_appears_once(site: Site) -> None:
    queue(site)
    site.disk.fails_sync = True
    assert send(site, "a") == [0]
    mend(site)
    send(site, "b")
    assert take(site) == ["a", "b"]
    site.reopen()
    assert peek(site) == []


# -- a disk that cannot be used ----------------------------------------------------------------


def test_a_directory_under_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreUnavailableError, match=r"file/namespace.*must be a directory"):
        EmbeddedNamespace(file / "namespace")


def test_a_directory_this_user_cannot_write_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "namespace").mkdir(mode=0o555)
    script = f"""
        import os
        from twinbus.namespace.embedded import EmbeddedNamespace
        from twinbus.errors import StoreUnavailableError
        if os.getuid() == 0:
            os.setuid({NOBODY})
        try:
            EmbeddedNamespace({str(tmp_path / "namespace")!r})
        except StoreUnavailableError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "namespace") in done.stdout
    assert "this user can write to" in done.stdout


# -- power failure -----------------------------------------------------------------------------


@pytest.mark.parametrize("survived_bytes", range(0, 6000, 97))
def test_after_a_power_failure_all_that_was_acknowledged_is_there_and_no_half_of_the_rest(
    site: Site, survived_bytes: int
) -> None:
    queue(site)
    acknowledged: dict[int, str] = {}
    site.tear_after(survived_bytes)
    lost = "-1"
    for number in range(50):
        try:
            batch = [f"{number}-{part}" for part in "abc"]
            acknowledged |= zip(send(site, *batch), batch, strict=True)
        except MessagingError:
            lost = str(number)
            break
    site.crash()
    present = {m.sequence_number: m.body.decode() for m in peek(site) if m.sequence_number}
    assert acknowledged.items() <= present.items()
    assert len([body for body in present.values() if body.startswith(f"{lost}-")]) in (0, 3)
    assert send(site, "next")[0] > max(present, default=0)


def test_after_a_power_failure_the_namespace_says_that_it_stopped(site: Site) -> None:
    queue(site)
    site.tear_after(10)
    with pytest.raises(MessagingError, match="the namespace has stopped"):
        send(site, "a")
    with pytest.raises(MessagingError, match="the namespace has stopped"):
        site.ask(Peek(QUEUE))


@pytest.mark.parametrize("survived_bytes", range(0, 3000, 131))
def test_a_power_failure_while_segments_roll_loses_nothing_acknowledged(
    make_site: Callable[..., Site], survived_bytes: int
) -> None:
    site = make_site(segment_bytes=1500)
    queue(site)
    acknowledged = []
    site.tear_after(survived_bytes)
    for number in range(50):
        try:
            send(site, str(number))
        except MessagingError:
            break
        acknowledged.append(str(number))
    site.crash()
    assert take(site)[: len(acknowledged)] == acknowledged


# -- damage ------------------------------------------------------------------------------------


def spoil_the_record_holding(site: Site, body: bytes) -> None:
    """Flip a bit of a message's body in the log of a closed site."""
    for path in site.directory.glob("log/*.log"):
        content = bytearray(path.read_bytes())
        at = content.find(body)
        if at >= 0:
            content[at] ^= 1
            path.write_bytes(content)
            return
    pytest.fail("no segment holds the body")


def test_damage_is_refused_until_it_is_accepted_and_costs_the_damaged_records(site: Site) -> None:
    queue(site)
    for body in ("first", "second", "third"):
        send(site, body)
    site.embedded.close()
    spoil_the_record_holding(site, b"second")
    with pytest.raises(LogDamagedError):
        site.open()
    site.open(accept_damage=True)
    assert bodies(peek(site)) == ["first", "third"]


def test_damage_needs_to_be_accepted_once_only(site: Site) -> None:
    queue(site)
    for body in ("first", "second", "third"):
        send(site, body)
    site.embedded.close()
    spoil_the_record_holding(site, b"second")
    site.open(accept_damage=True)
    site.reopen()
    assert bodies(peek(site)) == ["first", "third"]


def test_accepted_damage_to_a_message_dead_lettered_since_costs_that_message(site: Site) -> None:
    queue(site)
    send(site, "doomed")
    send(site, "other")
    settle(site, Disposition.DEAD_LETTER, receive_one(site))
    send(site, "last")
    site.embedded.close()
    spoil_the_record_holding(site, b"doomed")
    site.open(accept_damage=True)
    assert bodies(peek(site)) == ["other", "last"]
    assert runtime(site).dead_letter_message_count == 0


def test_sequence_numbers_do_not_go_back_after_accepted_damage(site: Site) -> None:
    queue(site)
    numbers = [send(site, body)[0] for body in ("first", "second", "third")]
    site.embedded.close()
    spoil_the_record_holding(site, b"second")
    site.open(accept_damage=True)
    assert send(site, "fourth")[0] > numbers[-1]
