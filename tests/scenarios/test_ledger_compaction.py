"""Ledgers and the log: compaction, and ledgers that were switched off for a while."""

import shutil
from pathlib import Path

import pytest

from tests.contracts.words import (
    DEAD,
    MANY,
    QUEUE,
    accept,
    complete,
    message,
    queue,
    receive,
    receive_one,
    send,
)
from tests.inside import ledgers_of
from tests.scenarios.ledger_site import (
    LEDGER,
    OPERATIONS,
    PADDING,
    PASSING,
    SEGMENT_BYTES,
    MakeSite,
    added_up,
    closed,
    dead_letter,
    let_pass,
    metered,
    number_of,
    peeked,
    places,
    roll,
    rows_of,
    work,
)
from tests.scenarios.site import Site
from twinbus.ledger import NO_LEDGER, LedgerSettings
from twinbus.protocol.commands import ReadMeter, ReleaseSession, SetSessionState

# -- compaction ------------------------------------------------------------------------------------


def test_the_log_of_a_busy_queue_stays_within_a_few_segments_with_a_ledger(small: Site) -> None:
    send(small, "stays")
    largest = 0
    for _ in range(100):
        send(small, *[PADDING] * 10, path=PASSING)
        complete(small, *receive(small, PASSING), path=PASSING)
        largest = max(largest, small.log_bytes)
    assert largest < 8 * SEGMENT_BYTES


def test_space_comes_back_with_a_ledger_that_cannot_be_written(
    make_site: MakeSite, tmp_path: Path
) -> None:
    (tmp_path / "namespace-0").mkdir()
    (tmp_path / "namespace-0" / "ledger").write_text("in the way")
    site = make_site(ledger=LEDGER, segment_bytes=SEGMENT_BYTES)
    queue(site, PASSING)
    for _ in range(60):
        send(site, *[PADDING] * 10, path=PASSING)
        complete(site, *receive(site, PASSING), path=PASSING)
    assert site.log_bytes < 10 * SEGMENT_BYTES


def test_space_comes_back_where_no_message_moves(small: Site) -> None:
    queue(small, "talks", requires_session=True)
    for _ in range(100):
        lock = accept(small, "s", "talks")
        small.ask(SetSessionState("talks", lock, b"x" * 5000))
        small.ask(ReleaseSession("talks", lock))
        small.wait(milliseconds=1)
    roll(small)
    assert small.log_bytes < 10 * SEGMENT_BYTES


@pytest.mark.parametrize("end", ["close", "crash"])
def test_the_trail_is_complete_after_compaction(small: Site, end: str) -> None:
    numbers = send(small, *"abcd")
    complete(small, receive_one(small))
    dead_letter(small)
    let_pass(small)
    if end == "crash":
        small.crash()
    let_pass(small)
    if end == "crash":
        small.crash()
    shown = peeked(small, QUEUE, DEAD, PASSING)
    found = closed(small)
    assert found.by("completed") >= places(small, numbers[:1])
    assert found.by("dead_lettered") == places(small, numbers[1:2])
    assert {place: found.accepted[place] for place in found.standing} == shown
    assert len(found.by("completed")) == 301
    assert found.gaps == []


def test_a_crash_after_compaction_of_what_was_dead_lettered_leaves_a_complete_trail(
    small: Site,
) -> None:
    numbers = send(small, *[PADDING] * 18)
    for _ in range(2):
        send(small, *[PADDING] * 5, path=PASSING)
    roll(small)
    dead_letter(small, MANY)
    complete(small, *receive(small, DEAD), path=DEAD)
    small.wait(milliseconds=1)
    assert min(small.engine.log.segments) > 1
    small.crash()
    found = closed(small)
    assert found.by("dead_lettered") == places(small, numbers)
    assert found.gaps == []


def test_a_crash_after_compaction_gives_no_message_the_id_of_another(small: Site) -> None:
    for number in range(18):
        send(small, message("x" * 500, message_id=f"mine {number}"))
    for number in range(55):
        send(small, message("y" * 100, message_id=f"other {number}"), path=PASSING)
    roll(small)
    dead_queue = number_of(small, DEAD)
    dead_letter(small, MANY)
    complete(small, *receive(small, DEAD), path=DEAD)
    small.wait(milliseconds=1)
    assert min(small.engine.log.segments) > 1
    small.crash()
    found = {place: i for place, i in closed(small).accepted.items() if place[0] == dead_queue}
    assert found == {(dead_queue, number + 1): f"mine {number}" for number in range(18)}


# -- switched off ----------------------------------------------------------------------------------


def test_without_a_ledger_nothing_is_written(make_site: MakeSite) -> None:
    site = make_site(ledger=NO_LEDGER)
    queue(site)
    for _ in range(3):
        work(site)
        site.wait(hours=2)
    site.reopen()
    site.crash()
    site.embedded.close()
    assert not (site.directory / "ledger").exists()


def test_the_meter_counts_without_a_ledger(make_site: MakeSite) -> None:
    site = make_site(ledger=NO_LEDGER)
    queue(site)
    for _ in range(3):
        send(site, "a")
        site.wait(hours=2)
    [sent] = [row for row in site.ask(ReadMeter()).to_pylist() if row["operation"] == "Send"]
    assert sent["count"] == 3


def test_a_ledger_of_operations_alone_has_no_trail(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(messages=False))
    queue(site)
    work(site)
    site.embedded.close()
    assert added_up(rows_of(site, OPERATIONS)) == metered(site)
    assert not (site.directory / "ledger/messages").exists()


def test_records_still_in_the_log_are_reported_when_the_ledger_is_switched_on_again(
    noted: Site,
) -> None:
    queue(noted)
    send(noted, "a", "b")
    noted.reopen(ledger=NO_LEDGER)
    complete(noted, receive_one(noted))
    send(noted, "c")
    noted.reopen()
    found = closed(noted)
    assert found.by("completed") == places(noted, [1])
    assert found.standing == places(noted, [2, 3])
    assert found.gaps == []


def test_records_that_the_log_has_forgotten_meanwhile_leave_a_gap(small: Site) -> None:
    send(small, "stays")
    small.reopen(ledger=NO_LEDGER)
    covered = ledgers_of(small.engine).covered_record
    let_pass(small)
    small.reopen()
    shown = set(peeked(small))
    found = closed(small)
    [forgotten] = found.gaps
    assert forgotten > covered
    assert found.inventories[-1] == shown


@pytest.mark.parametrize("mark", ["never written", "damaged"])
def test_a_trail_that_begins_in_the_middle_of_the_log_says_so(small: Site, mark: str) -> None:
    small.reopen(ledger=NO_LEDGER)
    let_pass(small)
    send(small, PADDING, path=PASSING)
    small.embedded.close()
    covered = small.directory / "ledger/messages/.covered"
    if mark == "damaged":
        covered.write_text("")
    else:
        for path in sorted((small.directory / "ledger").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    small.open()
    found = closed(small)
    assert found.gaps


def test_the_mark_of_another_log_hides_nothing(noted: Site) -> None:
    queue(noted)
    for _ in range(9):
        send(noted, "a")
    noted.embedded.close()
    second = Site(noted.directory.with_name("other"))
    queue(second)
    second.embedded.close()
    shutil.rmtree(noted.directory / "log")
    shutil.move(second.directory / "log", noted.directory / "log")
    noted.open()
    send(noted, message("b", message_id="B"))
    noted.crash()
    found = closed(noted)
    assert "B" in found.accepted.values()
    assert found.begun == 1
