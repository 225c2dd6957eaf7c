"""The ledger of messages: a trail of every message."""

import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.words import (
    DEAD,
    QUEUE,
    TOPIC,
    abandon,
    bodies,
    complete,
    later,
    message,
    peek,
    queue,
    receive,
    receive_one,
    send,
    settle,
    subscription,
    take,
    topic,
)
from tests.scenarios.ledger_site import (
    LEDGER,
    MESSAGES,
    PADDING,
    MakeSite,
    closed,
    dead_letter,
    heal,
    is_well,
    number_of,
    peeked,
    places,
    read_trail,
    roll,
    rows_of,
)
from tests.scenarios.site import Site
from tests.unit.properties import replayed
from twinbus import ledger
from twinbus.errors import (
    InvalidArgumentError,
    StoreUnavailableError,
)
from twinbus.ledger import LedgerSettings
from twinbus.limits import PING_CONTENT_TYPE
from twinbus.protocol.commands import (
    CancelScheduled,
    DeleteEntity,
    Disposition,
    LeaseRange,
    Send,
    SettleRange,
)

# -- the trail -------------------------------------------------------------------------------------


def test_every_message_taken_is_reported_once_with_its_id(noted: Site) -> None:
    queue(noted)
    sent = [message("a", message_id=f"id {n}") for n in range(9)]
    numbers = send(noted, *sent[:4]) + send(noted, *sent[4:])
    roll(noted)
    found = closed(noted)
    item = number_of(noted)
    assert found.accepted == {(item, n): m.message_id for n, m in zip(numbers, sent, strict=True)}
    assert found.paths[item] == {QUEUE}
    assert all(count == 1 for (event, _), count in found.tellings.items() if event == "accepted")
    assert found.gaps == []


def test_what_was_refused_or_known_or_a_ping_is_not_reported(noted: Site) -> None:
    queue(noted, requires_duplicate_detection=True)
    send(noted, message("a", message_id="1"), message("again", message_id="1"))
    send(noted, message("again", message_id="1"), message("", content_type=PING_CONTENT_TYPE))
    with pytest.raises(InvalidArgumentError):
        noted.ask(Send(QUEUE, []))
    assert list(closed(noted).accepted.values()) == ["1"]


def test_completed_messages_are_reported_by_their_numbers(noted: Site) -> None:
    queue(noted)
    numbers = send(noted, *"abcdefgh")
    received = receive(noted)
    complete(noted, *received[:3], received[6])
    abandon(noted, received[4])
    found = closed(noted)
    assert found.by("completed") == places(noted, [*numbers[:3], numbers[6]])
    assert found.standing == places(noted, [*numbers[3:6], numbers[7]])


def test_receiving_and_deleting_completes(noted: Site) -> None:
    queue(noted)
    numbers = send(noted, "a", "b")
    take(noted)
    assert closed(noted).by("completed") == places(noted, numbers)


def test_a_dead_lettered_message_is_accepted_by_the_dead_letter_queue(noted: Site) -> None:
    queue(noted)
    send(noted, message("a", message_id="A"), message("b", message_id="B"))
    dead_letter(noted, 2)
    roll(noted)
    complete(noted, receive_one(noted, DEAD), path=DEAD)
    queue_number, dead_queue = number_of(noted), number_of(noted, DEAD)
    found = closed(noted)
    assert found.by("dead_lettered") == {(queue_number, 1), (queue_number, 2)}
    assert found.accepted == {
        (queue_number, 1): "A",
        (queue_number, 2): "B",
        (dead_queue, 1): "A",
        (dead_queue, 2): "B",
    }
    assert found.by("completed") == {(dead_queue, 1)}
    assert found.standing == {(dead_queue, 2)}
    assert found.paths == {queue_number: {QUEUE}, dead_queue: {DEAD}}


def test_too_many_deliveries_dead_letter(noted: Site) -> None:
    queue(noted, max_delivery_count=2)
    send(noted, "a")
    for _ in range(2):
        abandon(noted, receive_one(noted))
    assert closed(noted).by("dead_lettered") == places(noted, [1])


@pytest.mark.parametrize("dead_letters", [False, True])
def test_expired_messages_are_reported(noted: Site, dead_letters: bool) -> None:
    queue(noted, enable_dead_lettering_on_message_expiration=dead_letters)
    send(noted, message("a", message_id="A", time_to_live=timedelta(seconds=10)), "stays")
    noted.wait(seconds=11)
    queue_number, dead_queue = number_of(noted), number_of(noted, DEAD)
    found = closed(noted)
    assert found.by("expired") == {(queue_number, 1)}
    assert found.standing == (
        {(queue_number, 2), (dead_queue, 1)} if dead_letters else {(queue_number, 2)}
    )
    if dead_letters:
        assert found.accepted[dead_queue, 1] == "A"


def test_a_scheduled_message_is_accepted_then_activated_under_a_new_number(noted: Site) -> None:
    queue(noted)
    when = later(noted, hours=1)
    send(noted, message("a", message_id="A", scheduled_enqueue_time_utc=when))
    noted.wait(hours=1)
    queue_number = number_of(noted)
    assert take(noted) == ["a"]
    found = closed(noted)
    assert found.ended == {(queue_number, 1): "activated", (queue_number, 2): "completed"}
    assert found.accepted == {(queue_number, 1): "A", (queue_number, 2): "A"}


def test_a_cancelled_message_is_reported(noted: Site) -> None:
    queue(noted)
    when = later(noted, hours=1)
    numbers = send(noted, *[message(t, scheduled_enqueue_time_utc=when) for t in "ab"])
    noted.ask(CancelScheduled(QUEUE, numbers[:1]))
    found = closed(noted)
    assert found.by("cancelled") == places(noted, numbers[:1])
    assert found.standing == places(noted, numbers[1:])


def test_a_scheduled_message_was_accepted_when_it_came(noted: Site) -> None:
    queue(noted)
    send(noted, message("a", scheduled_enqueue_time_utc=later(noted, days=2)))
    now = noted.clock.now()
    noted.embedded.close()
    [row] = [row for row in rows_of(noted, MESSAGES) if row["event"] == ledger.ACCEPTED]
    assert row["at"] == now


def test_a_message_scheduled_far_ahead_removes_nothing(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(retention=timedelta(days=7)))
    queue(site)
    send(site, "a", "b", "c")
    roll(site)
    before = closed(site).accepted
    assert len(before) == 3
    site.open()
    send(site, message("a", scheduled_enqueue_time_utc=later(site, days=30)))
    assert before.items() <= closed(site).accepted.items()


def test_a_message_activated_long_after_it_was_due_is_reported(noted: Site) -> None:
    queue(noted)
    send(noted, message("a", scheduled_enqueue_time_utc=later(noted, hours=1)))
    noted.embedded.close()
    noted.clock.advance(timedelta(days=3))
    noted.open()
    noted.wait(seconds=1)
    assert bodies(peek(noted)) == ["a"]
    found = closed(noted)
    assert found.by("activated") == places(noted, [1])
    assert found.standing == places(noted, [2])


def test_forwarding_is_reported_from_queue_to_queue(noted: Site) -> None:
    queue(noted, "target", max_size_in_megabytes=1)
    queue(noted, forward_to="target")
    send(noted, message("a", message_id="A"))
    target = number_of(noted, "target")
    found = closed(noted)
    assert found.accepted == {(target, 1): "A"}
    assert found.standing == {(target, 1)}


def test_a_parked_message_is_forwarded_when_there_is_room(noted: Site) -> None:
    queue(noted, "target", max_size_in_megabytes=1)
    queue(noted, forward_to="target")
    send(noted, *["x" * 200_000] * 5, path="target")
    sent = [message("y" * 200_000, message_id=f"{n}") for n in range(3)]
    for item in sent:
        send(noted, item)
    parked = {place for place in peeked(noted, QUEUE) if place[0] == number_of(noted)}
    take(noted, "target")
    noted.wait(minutes=5)
    found = closed(noted)
    source, target = number_of(noted), number_of(noted, "target")
    assert parked
    assert found.by("forwarded") == parked
    arrived = [i for place, i in found.accepted.items() if place[0] == target and place[1] > 5]
    assert sorted(arrived) == ["0", "1", "2"]
    assert not [place for place in found.standing if place[0] == source]


def test_a_forwarded_dead_letter_is_recorded_in_each_queue(noted: Site) -> None:
    queue(noted, "target")
    queue(noted, forward_dead_lettered_messages_to="target")
    send(noted, message("a", message_id="A"))
    settle(noted, Disposition.DEAD_LETTER, receive_one(noted))
    source, target = number_of(noted), number_of(noted, "target")
    found = closed(noted)
    assert found.accepted == {(source, 1): "A", (source + 1, 1): "A", (target, 1): "A"}
    assert found.by("dead_lettered") == {(source, 1)}
    assert found.by("forwarded") == {(source + 1, 1)}
    assert found.standing == {(target, 1)}


def test_the_destination_of_each_copy_of_a_topic_is_reported(noted: Site) -> None:
    topic(noted)
    paths = [subscription(noted, name) for name in ("one", "two")]
    send(noted, message("a", message_id="A"), message("b", message_id="B"), path=TOPIC)
    complete(noted, receive_one(noted, paths[0]), path=paths[0])
    first, second = (number_of(noted, path) for path in paths)
    found = closed(noted)
    assert found.accepted == {(first, 1): "A", (first, 2): "B", (second, 1): "A", (second, 2): "B"}
    assert found.ended == {(first, 1): "completed"}
    assert found.paths == {first: {paths[0]}, second: {paths[1]}}


def test_messages_that_are_deleted_with_their_queue_are_reported(noted: Site) -> None:
    queue(noted)
    send(noted, "a", "b", "c")
    complete(noted, receive_one(noted))
    dead_letter(noted)
    queue_number, dead_queue = number_of(noted), number_of(noted, DEAD)
    noted.ask(DeleteEntity(QUEUE))
    queue(noted)
    send(noted, "new")
    found = closed(noted)
    assert found.by("deleted") == {(queue_number, 3), (dead_queue, 1)}
    assert found.standing == {(number_of(noted), 1)}
    assert number_of(noted) not in (queue_number, dead_queue)
    assert found.paths[queue_number] == {QUEUE}


def test_messages_that_are_deleted_with_their_topic_are_reported(noted: Site) -> None:
    topic(noted)
    path = subscription(noted, "one")
    send(noted, "a", path=TOPIC)
    item = number_of(noted, path)
    noted.ask(DeleteEntity(TOPIC))
    found = closed(noted)
    assert found.by("deleted") == {(item, 1)}
    assert found.paths[item] == {path}


def test_a_queue_deleted_for_being_idle_is_reported(noted: Site) -> None:
    queue(noted, auto_delete_on_idle=timedelta(minutes=10))
    send(noted, "a")
    queue_number = number_of(noted)
    noted.wait(minutes=11)
    assert closed(noted).by("deleted") == {(queue_number, 1)}


def test_the_trail_of_a_deleted_queue_has_its_path_after_a_crash(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    queue_number = number_of(noted)
    noted.ask(DeleteEntity(QUEUE))
    noted.crash()
    found = closed(noted)
    assert found.by("deleted") == {(queue_number, 1)}
    assert found.paths[queue_number] == {QUEUE}


def test_ranges_are_reported(noted: Site) -> None:
    queue(noted)
    numbers = send(noted, *"abcdef")
    lease = noted.ask(LeaseRange(QUEUE, "syphon", 5))
    noted.ask(SettleRange(QUEUE, lease.epoch, [(numbers[0], numbers[2])]))
    found = closed(noted)
    assert found.by("completed") == places(noted, numbers[:3])
    assert found.standing == places(noted, numbers[3:])


def test_inventories_at_the_beginning_and_the_end_say_what_peek_shows(noted: Site) -> None:
    queue(noted)
    send(noted, *"abcdefghij")
    send(noted, message("k", scheduled_enqueue_time_utc=later(noted, hours=1)))
    first, second, third, fourth, *_ = receive(noted, count=6)
    complete(noted, first)
    abandon(noted, second)
    settle(noted, Disposition.DEFER, third)
    settle(noted, Disposition.DEAD_LETTER, fourth)
    shown = set(peeked(noted))
    assert len(shown) == 10
    noted.embedded.close()
    assert read_trail(noted).inventories == [set(), shown]
    noted.open()
    noted.embedded.close()
    assert read_trail(noted).inventories == [set(), shown, shown, shown]


def test_an_inventory_is_taken_every_hour(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    for _ in range(181):
        noted.wait(minutes=1)
    assert len(read_trail(noted).inventories) == 4


def test_abandoning_and_deferring_alone_do_not_trouble_the_ledger(
    noted: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(noted)
    send(noted, "a", "b")
    roll(noted)
    first, second = receive(noted)
    abandon(noted, first)
    settle(noted, Disposition.DEFER, second)
    roll(noted)
    assert is_well(noted)
    assert caplog.records == []


def test_the_trail_goes_on_after_the_broker_healed_itself(noted: Site) -> None:
    queue(noted)
    send(noted, "a", "b")
    roll(noted)
    complete(noted, receive_one(noted))
    send(noted, "c")
    heal(noted)
    send(noted, "d")
    dead_letter(noted)
    shown = peeked(noted)
    found = closed(noted)
    assert found.by("completed") == places(noted, [1])
    assert found.by("dead_lettered") == places(noted, [2])
    assert found.standing == set(shown)
    assert found.gaps == []


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_storage_trouble_leaves_a_complete_trail(noted: Site, trouble: str) -> None:
    queue(noted)
    send(noted, "a", "b")
    stored = receive(noted)
    setattr(noted.disk, trouble, True)
    send(noted, message("c", message_id="C"))
    with suppress(StoreUnavailableError):  # a full disk has a reserve for it, a dead one has none
        complete(noted, stored[0])
    with pytest.raises(StoreUnavailableError):
        send(noted, message("d", scheduled_enqueue_time_utc=later(noted, hours=1)))
    setattr(noted.disk, trouble, False)
    noted.wait(seconds=5)
    shown = peeked(noted)
    found = closed(noted)
    assert found.by("completed") == places(noted, [1])
    assert {place: found.accepted[place] for place in found.standing} == shown
    assert "C" in shown.values()


def test_a_crash_does_not_change_when_a_message_was_completed(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    noted.wait(seconds=10)
    complete(noted, receive_one(noted))
    when = noted.clock.now()
    noted.clock.skip(timedelta(days=3))  # nobody is there to see it pass
    noted.crash()
    noted.embedded.close()
    [row] = [row for row in rows_of(noted, MESSAGES) if row["event"] == "completed"]
    assert row["at"] == when


def test_records_lost_by_damage_leave_a_gap(noted: Site) -> None:
    queue(noted)
    roll(noted)
    for number in range(4):
        send(noted, f"m{number}" + PADDING)
    noted.crash()  # before they are in a ledger
    site_log = noted.last_segment
    noted.embedded.crash()
    damaged = bytearray(site_log.read_bytes())
    damaged[damaged.index(b"m1xxx")] ^= 0xFF
    site_log.write_bytes(damaged)
    noted.open(accept_damage=True)
    found = closed(noted)
    assert len(found.accepted) == 3
    assert found.gaps


# -- a model ---------------------------------------------------------------------------------------


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *["send", "complete"] * 2,
                "dead",
                "take dead",
                "defer",
                "abandon",
                "schedule",
                "short",
                "wait",
                "roll",
                "reopen",
                "crash",
                "heal",
            ]
        ),
        st.integers(1, 4),
    ),
    max_size=30,
)


def step(site: Site, what: str, count: int, body: str) -> None:  # noqa: C901, PLR0912 - one line per step
    if what == "send":
        send(site, *[body] * count)
    elif what == "schedule":
        send(site, message("s", scheduled_enqueue_time_utc=later(site, seconds=count * 20)))
    elif what == "short":
        send(site, message("t", time_to_live=timedelta(seconds=count * 10)))
    elif what == "complete":
        complete(site, *receive(site, count=count))
    elif what == "dead":
        dead_letter(site, count)
    elif what == "take dead":
        complete(site, *receive(site, DEAD, count), path=DEAD)
    elif what == "defer":
        settle(site, Disposition.DEFER, *receive(site, count=count))
    elif what == "abandon":
        abandon(site, *receive(site, count=count))
    elif what == "wait":
        site.wait(seconds=count * 7)
    elif what == "roll":
        send(site, "so that there is something to tell")
        roll(site)
    elif what == "reopen":
        site.reopen()
    elif what == "crash":
        site.crash()
    elif what == "heal":
        heal(site)


# With 1500 examples of large messages, for which there is compaction, it finds what fails in
# test_a_crash_after_compaction_of_what_was_dead_lettered_leaves_a_complete_trail, and nothing else.
@pytest.mark.parametrize("body", ["small", "large" * 80])
@replayed
@given(steps=STEPS)
def test_what_was_accepted_and_has_not_ended_stands(
    body: str, steps: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "namespace", ledger=LEDGER, segment_bytes=4000)
        queue(site, enable_dead_lettering_on_message_expiration=True, max_delivery_count=3)
        for what, count in steps:
            step(site, what, count, body)
        shown = peeked(site)
        found = closed(site)
        assert {place: found.accepted[place] for place in found.standing} == shown
        assert set(found.ended) <= set(found.accepted)
        assert found.inventories[-1] == set(shown)
        assert found.gaps == []
