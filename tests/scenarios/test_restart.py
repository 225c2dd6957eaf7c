"""What a restart, a compaction or both must not get wrong."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.contracts.words import (
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
    subscription,
    take,
    tokens,
    topic,
)
from tests.inside import write_old_facts
from tests.scenarios.site import Site
from twinbus.broker.store.commit import Fact
from twinbus.entities import EntityStatus, dead_letter_path
from twinbus.errors import EntityNotFoundError
from twinbus.limits import SECOND_US
from twinbus.message import BrokeredMessage, to_batch, to_messages
from twinbus.protocol.commands import (
    AcceptSession,
    DeleteEntity,
    DeleteMessages,
    Disposition,
    ListSessions,
    Origin,
    ReadMeter,
    ReadRange,
    Receive,
    Send,
    SetSessionState,
    Settle,
    UpdateEntity,
)
from twinbus.protocol.origins import sender_source
from twinbus.protocol.requests import BlockingRequest


def test_transfers_and_leases_of_a_log_of_an_earlier_version_are_known(site: Site) -> None:
    queue(site, QUEUE)
    send(site, "one", "two", "three")
    number, until = site.queue_of(QUEUE).entity, site.clock.now_us() + 60 * SECOND_US
    write_old_facts(
        site.engine,
        Fact.of("transferred", "elsewhere/7", [[1, 3], [8, 8]]),
        Fact.of("lease", f"{number}/5", ["me", 5, [[1, 1], [3, 3]], until]),
    )
    send(site, "four")
    site.crash()
    taken = site.engine.namespace.transfers.taken("elsewhere/7", np.array([3, 4, 8]))
    assert taken.tolist() == [True, False, True]
    assert bodies(to_messages(site.ask(ReadRange(QUEUE, 5, 1, 4)))) == ["one", "three"]
    assert bodies(receive(site)) == ["two", "four"]


def test_a_new_entity_inherits_nothing_of_one_deleted_before_a_restart(site: Site) -> None:
    queue(site, "kept")
    queue(site, "deleted")
    send(site, "old", path="deleted")
    site.ask(DeleteEntity("deleted"))
    site.reopen()
    queue(site, "new")
    send(site, "fresh", path="new")
    site.reopen()
    assert bodies(peek(site, "new")) == ["fresh"]


def test_deleting_an_entity_while_its_messages_are_moved_counts_each_once(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(segment_bytes=20_000)
    for path in ("deleted", "kept", "passing"):
        queue(site, path)
    send(site, *["x" * 2000] * 3, path="deleted")
    send(site, "kept", path="kept")
    for _ in range(20):
        send(site, "y" * 2000, path="passing")
    for item in receive(site, "passing", count=20):
        complete(site, item, path="passing")
    site.ask(DeleteEntity("deleted"))
    site.wait(seconds=1)
    assert site.engine.namespace.faults() == []
    site.crash()
    assert bodies(peek(site, "kept")) == ["kept"]


def test_the_same_death_twice_does_no_harm(make_site: Callable[..., Site]) -> None:
    site = make_site(segment_bytes=20_000)
    queue(site)
    for _ in range(3):
        send(site, "bad")
        settle(site, Disposition.DEAD_LETTER, receive_one(site))
        take(site, dead_letter_path(QUEUE))
        send(site, "z" * 15_000, "z" * 15_000)
        site.reopen()
    assert site.engine.restarts == 0


def test_parked_messages_go_on_after_a_restart(site: Site) -> None:
    home = queue(site, "home", status=EntityStatus.DISABLED)
    queue(site, "door", forward_to="home")
    send(site, "a", "b", path="door")
    site.reopen()
    site.ask(UpdateEntity(replace(home, status=EntityStatus.ACTIVE)))
    site.wait(seconds=2)
    assert take(site, "home") == ["a", "b"]


def test_parked_messages_have_arrived_when_forwarding_is_switched_off(site: Site) -> None:
    queue(site, "home", status=EntityStatus.DISABLED)
    door = queue(site, "door", forward_to="home")
    send(site, "a", "b", path="door")
    site.ask(UpdateEntity(replace(door, forward_to=None)))
    site.wait(seconds=2)
    site.reopen()
    assert take(site, "door") == ["a", "b"]


def test_forwarded_dead_letters_keep_their_reason_through_restarts_and_compaction(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(segment_bytes=20_000)
    queue(site, "graves")
    queue(site, forward_dead_lettered_messages_to="graves")
    send(site, "a")
    settle(site, Disposition.DEAD_LETTER, receive_one(site))
    for _ in range(5):
        send(site, "z" * 15_000, "z" * 15_000, path="graves")
        site.reopen()
    dead = peek(site, "graves")[0]
    assert (dead.body, dead.dead_letter_source) == (b"a", QUEUE)
    assert peek(site, dead_letter_path(QUEUE)) == []
    assert site.engine.restarts == 0


def test_a_dead_letter_is_forwarded_before_a_later_command_deletes_its_queue(site: Site) -> None:
    queue(site, "graves")
    queue(site, forward_dead_lettered_messages_to="graves")
    send(site, "a")
    token = tokens(receive_one(site))
    calls = [Settle(QUEUE, token, Disposition.DEAD_LETTER), DeleteEntity(QUEUE)]
    requests = [BlockingRequest(call) for call in calls]
    site.embedded.hand_over(requests)
    for request in requests:
        request.result(0)
    assert bodies(peek(site, "graves")) == ["a"]


def test_dead_letters_of_a_queue_that_is_idle_at_the_same_moment_go_with_it(site: Site) -> None:
    span = timedelta(minutes=5)
    queue(site, "graves")
    queue(
        site,
        forward_dead_lettered_messages_to="graves",
        default_message_time_to_live=span,
        enable_dead_lettering_on_message_expiration=True,
        auto_delete_on_idle=span,
    )
    send(site, "a")
    site.clock.advance(span)
    assert peek(site, "graves") == []
    with pytest.raises(EntityNotFoundError):
        runtime(site)
    assert site.engine.restarts == 0


def test_a_message_of_no_size_is_parked_when_the_target_is_gone(site: Site) -> None:
    queue(site, "home")
    queue(site, "door", forward_to="home")
    site.ask(DeleteEntity("home"))
    batch = to_batch([BrokeredMessage(b"")])
    empty = batch.set_column(1, "message_id", pa.nulls(1, pa.string()))
    site.ask(Send("door", empty))
    assert runtime(site, "door").transfer_message_count == 1


def test_messages_around_accepted_damage_survive_compaction(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(segment_bytes=100_000)
    queue(site)
    queue(site, "passing")
    for number in range(5):
        send(site, message(f"m{number}" + "x" * 5000))
    site.embedded.close()
    flip_body(site.last_segment, b"m2xxx")
    site.open(accept_damage=True)
    for _ in range(12):
        send(site, "y" * 30_000, path="passing")
        complete(site, *receive(site, "passing"), path="passing")
    assert min(site.engine.log.segments) > 1
    site.crash()
    assert [body[:2] for body in bodies(peek(site))] == ["m0", "m1", "m3", "m4"]


def flip_body(segment: Path, content: bytes) -> None:
    damaged = bytearray(segment.read_bytes())
    damaged[damaged.index(content)] ^= 0xFF
    segment.write_bytes(damaged)


@pytest.mark.timeout(20)
def test_facts_larger_than_a_segment_do_not_keep_the_broker_busy(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(segment_bytes=20_000)
    queue(site, requires_session=True)
    for number in range(10):
        grant = site.ask(AcceptSession(QUEUE, f"s{number}"))
        site.ask(SetSessionState(QUEUE, grant.lock, b"x" * 10_000))
    before = max(site.engine.log.segments)
    for _ in range(20):
        send(site, message("a", session_id="s0"))
    assert max(site.engine.log.segments) - before <= 2


def test_an_entity_that_is_fed_only_through_the_spill_is_in_use(site: Site) -> None:
    queue(site, auto_delete_on_idle=timedelta(minutes=5))
    site.wait(minutes=4)
    site.disk.full = True
    for _ in range(12):
        send(site, "a")
        site.wait(seconds=30)
    site.disk.full = False
    site.wait(seconds=2)
    site.wait(minutes=1)
    assert len(peek(site)) == 12


def test_a_session_whose_last_message_dies_as_a_new_one_comes_stays(site: Site) -> None:
    queue(site, requires_session=True)
    send(site, message("old", session_id="s", time_to_live=timedelta(seconds=30)))
    site.ask(AcceptSession(QUEUE, "s"))
    waiting = site.namespace.submit(AcceptSession(QUEUE, None, timedelta(hours=1)))
    site.clock.skip(timedelta(seconds=61))  # all of it comes in the turn of the next send
    send(site, message("new", session_id="s"))
    assert waiting.result(timeout=5).lock.session_id == "s"
    assert site.engine.restarts == 0


def test_a_view_of_a_message_stays_as_it_is_though_the_broker_is_opened_again(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(segment_bytes=20_000)
    queue(site)
    send(site, "A" * 10_000)
    found = site.ask(Receive(QUEUE))
    site.reopen()
    complete(site, receive_one(site))
    for _ in range(12):
        send(site, "Z" * 10_000)
        complete(site, receive_one(site))
    assert found.column("body")[0].as_py() == b"A" * 10_000


def test_many_large_sends_in_one_turn_are_all_taken(site: Site) -> None:
    queue(site, max_size_in_megabytes=5120)
    large = to_batch([message("x" * 200_000)]).take([0] * 300)
    commands = [Send(QUEUE, large) for _ in range(3)]
    promises = [site.namespace.submit(command) for command in commands]
    assert all(len(promise.result().sequence_numbers) == 300 for promise in promises)


def test_a_callback_of_a_future_may_ask_for_something(site: Site) -> None:
    queue(site)
    seen: list[int] = []
    site.namespace.submit(Send(QUEUE, [message("a")])).add_done_callback(
        lambda _: seen.append(len(peek(site)))
    )
    assert seen == [1]


def test_a_submitted_receive_cannot_be_cancelled(site: Site) -> None:
    queue(site)
    waiting = site.namespace.submit(Receive(QUEUE, wait=timedelta(minutes=1)))
    assert not waiting.cancel()
    send(site, "a")
    assert waiting.result(timeout=5).num_rows == 1


def test_settlements_acknowledged_while_the_disk_is_full_survive_a_crash(site: Site) -> None:
    queue(site)
    send(site, "a", "b")
    taken = receive(site, count=2)
    site.disk.full = True
    send(site, "spilled")
    for item in taken:
        complete(site, item)
    site.crash()
    site.wait(seconds=2)
    assert bodies(peek(site)) == ["spilled"]


def test_a_delivery_that_was_waited_for_is_metered_with_what_it_carried(site: Site) -> None:
    queue(site)
    waiting = site.namespace.submit(Receive(QUEUE, wait=timedelta(minutes=1)))
    send(site, "x" * 70_000)
    waiting.result(timeout=5)
    [row] = [r for r in site.ask(ReadMeter()).to_pylist() if r["operation"] == "Receive"]
    assert (row["count"], row["messages"], row["units"]) == (1, 1, 2)


@pytest.mark.parametrize("neighbours", [0, 1])
def test_a_send_that_comes_again_after_a_restart_is_enqueued_once(
    site: Site, neighbours: int
) -> None:
    queue(site)
    for number in range(3):
        asked = [
            site.namespace.submit(
                Send(
                    QUEUE, [message("a")], Origin(sender_source(sender), range(number, number + 1))
                )
            )
            for sender in range(1, 2 + neighbours)
        ]
        assert all(item.result().sequence_numbers[0] for item in asked)
    site.reopen()
    again = Send(QUEUE, [message("a")] * 3, Origin(sender_source(1), range(3)))
    assert site.ask(again).sequence_numbers == [0, 0, 0]
    site.reopen()
    assert len(peek(site)) == 3 * (1 + neighbours)


def test_when_the_state_of_a_session_was_set_outlives_restarts_and_compaction(site: Site) -> None:
    queue(site, requires_session=True)
    lock = site.ask(AcceptSession(QUEUE, "s")).lock
    site.ask(SetSessionState(QUEUE, lock, b"state"))
    after = site.clock.now()
    for _ in range(2):  # the second start reads what the first wrote anew
        site.wait(minutes=10)
        site.reopen()
        assert site.ask(ListSessions(QUEUE)) == ["s"]
        since = after - timedelta(seconds=1)
        assert site.ask(ListSessions(QUEUE, state_updated_after_utc=since)) == ["s"]
        assert site.ask(ListSessions(QUEUE, state_updated_after_utc=after)) == []


def test_deleted_messages_stay_deleted(site: Site) -> None:
    queue(site)
    send(site, "one", "two", "three")
    assert site.ask(DeleteMessages(QUEUE, 2)) == 2
    site.crash()
    assert bodies(peek(site)) == ["three"]


def test_a_message_that_comes_due_after_its_life_expires_beside_other_timers(
    make_site: Callable[..., Site],
) -> None:
    site = make_site()
    topic(site)
    path = subscription(site, "s", enable_dead_lettering_on_message_expiration=True)
    send(site, message("other", time_to_live=timedelta(seconds=6)), path=TOPIC)
    due = later(site, seconds=5)
    late = message("late", time_to_live=timedelta(seconds=1), scheduled_enqueue_time_utc=due)
    send(site, late, path=TOPIC)
    site.embedded.crash()
    site.clock.advance(timedelta(seconds=30))
    site.open()
    site.wait(seconds=1)
    assert receive(site, path) == []
    assert runtime(site, path).dead_letter_message_count == 2
