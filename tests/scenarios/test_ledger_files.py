"""The files of ledgers: whole, private, bounded, and written again when they could not be."""

import os
import stat
import threading
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.contracts.words import complete, message, queue, receive, receive_one, send, take
from tests.inside import postpone_roll
from tests.namespaces import embedded
from tests.scenarios.ledger_site import (
    LEDGER,
    MESSAGES,
    OPERATIONS,
    MakeSite,
    added_up,
    closed,
    files,
    is_well,
    let_pass,
    metered,
    peeked,
    places,
    read_trail,
    roll,
    rows_of,
    work,
)
from tests.scenarios.site import Site
from twinbus.clock import ManualClock
from twinbus.ledger import LedgerSettings

# -- files -----------------------------------------------------------------------------------------


def test_a_reader_meets_whole_files_only_while_the_broker_rolls(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(roll_interval=timedelta(seconds=1)))
    queue(site)
    stop = threading.Event()
    troubles: list[Exception] = []
    seen: set[Path] = set()

    def read_all() -> None:
        while not stop.is_set():
            for path in site.directory.glob("ledger/*/day=*/*.parquet"):
                if path.name.startswith("."):  # as Spark, DuckDB and pyarrow do
                    continue
                try:
                    assert pq.ParquetFile(path).read().num_rows
                except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                    troubles.append(error)
                seen.add(path)

    reader = threading.Thread(target=read_all)
    reader.start()
    for _ in range(60):
        send(site, *["a"] * 50)
        complete(site, *receive(site))
        site.wait(seconds=1)
    stop.set()
    reader.join()
    assert troubles == []
    assert len(seen) > 50


def test_a_real_writer_thread_writes_everything(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ledger": LedgerSettings(roll_interval=timedelta(seconds=1))}
    site = Site.__new__(Site)
    site.directory, site.settings, site.clock = tmp_path / "namespace", settings, ManualClock()
    Site.open(site)
    site.embedded.close()
    site.namespace = site.embedded = embedded(site.embedded.engine.settings, site.clock)
    queue(site)
    for _ in range(20):
        send(site, "a", "b")
        complete(site, receive_one(site))
        site.wait(seconds=1)
    shown = peeked(site)
    site.embedded.close()
    found = read_trail(site)
    assert found.standing == set(shown)
    assert len(found.by("completed")) == 20
    assert added_up(rows_of(site, OPERATIONS)) == metered(site)


def test_all_files_of_the_ledgers_are_their_owners_only(noted: Site) -> None:
    queue(noted)
    send(noted, "a")
    noted.embedded.close()
    found = [path for path in (noted.directory / "ledger").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert len(found) == 3  # operations, messages and the mark
    assert [path.name for path in found if path.name.startswith(".")] == [".covered"]


def test_old_days_go_whole_and_the_others_stay(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(retention=timedelta(days=2)))
    queue(site)
    for _ in range(6):
        send(site, "a")
        send(site, "b")
        site.wait(minutes=1)
        site.wait(days=1)
    for kind in (OPERATIONS, MESSAGES):
        kept = sorted({date.fromisoformat(path.parent.name[4:]) for path in files(site, kind)})
        assert kept[-1] >= date(2030, 1, 6)
        assert kept == [kept[-1] - timedelta(days=ago) for ago in (2, 1, 0)]


def ledger_bytes(site: Site) -> int:
    return sum(path.stat().st_size for path in files(site, OPERATIONS) + files(site, MESSAGES))


def fill(site: Site, rolls: int) -> None:
    """Send and receive messages with long ids, and write a file after each batch."""
    for _ in range(rolls):
        send(site, *(message("a", message_id=os.urandom(60).hex()) for _ in range(100)))
        take(site)
        roll(site)


def test_the_oldest_files_are_deleted_when_the_ledgers_exceed_their_bound(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(ledger=LedgerSettings(max_bytes=200_000))
    queue(site)
    send(site, "stays")
    assert receive(site)  # locked: it stands when its row is gone
    fill(site, 30)
    assert 100_000 < ledger_bytes(site) <= 200_000
    lines = [line.facts for line in caplog.records if hasattr(line, "facts")]
    assert {line["event"] for line in lines} == {"ledger_deleted"}
    assert 0 < len(lines) < 30
    assert sum(line["files"] for line in lines) > 0
    assert "Reports will not cover that time" in caplog.text
    kept = files(site, OPERATIONS) + files(site, MESSAGES)
    until = datetime.fromisoformat(lines[-1]["until"])
    assert min(path.name for path in kept) >= f"{until:%Y%m%dT%H%M%S}"
    found = closed(site)
    assert found.gaps == [max(found.gaps)]
    accepted_records = [
        row["record"] for row in rows_of(site, MESSAGES) if row["event"] == "accepted"
    ]
    assert min(accepted_records) > max(found.gaps)


def test_files_within_the_bound_stay(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(ledger=LedgerSettings(max_bytes=2_000_000))
    queue(site)
    fill(site, 10)
    assert len(files(site, MESSAGES)) >= 10
    assert caplog.records == []


def test_a_day_that_retention_deletes_leaves_a_gap_in_the_trail(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings(retention=timedelta(days=2)))
    queue(site)
    for _ in range(5):
        send(site, "a")
        take(site)
        roll(site)
        site.wait(days=1)
    found = closed(site)
    assert found.gaps
    first = min(row["record"] for row in rows_of(site, MESSAGES) if row["event"] == "accepted")
    assert max(found.gaps) < first


def test_a_ledger_that_cannot_be_written_is_logged_once_and_when_it_is_mended(
    blocked: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(blocked)
    for _ in range(5):
        work(blocked)
        roll(blocked)
    unblock(blocked)
    roll(blocked)
    lines = [getattr(line, "facts", {}).get("event") for line in caplog.records]
    assert [line for line in lines if line] == ["ledger_trouble", "ledger_trouble_ended"]


def test_an_idle_broker_writes_next_to_nothing(noted: Site) -> None:
    queue(noted)
    roll(noted)
    before = len(files(noted, OPERATIONS) + files(noted, MESSAGES))
    for _ in range(59):
        roll(noted)
    assert len(files(noted, OPERATIONS) + files(noted, MESSAGES)) <= before + 1


# -- a folder that cannot be written ---------------------------------------------------------------


@pytest.fixture
def blocked(make_site: MakeSite, tmp_path: Path) -> Site:
    """Return a site with a file in place of its ledger folder."""
    (tmp_path / "namespace-0").mkdir()
    (tmp_path / "namespace-0" / "ledger").write_text("in the way")
    return make_site(ledger=LEDGER)


def unblock(site: Site) -> None:
    (site.directory / "ledger").unlink()


def test_a_ledger_that_cannot_be_written_never_disturbs_the_broker(
    blocked: Site, caplog: pytest.LogCaptureFixture
) -> None:
    queue(blocked)
    for _ in range(3):
        work(blocked)
        roll(blocked)
    assert "rows in memory and tries again" in caplog.text
    assert blocked.engine.restarts == 0
    blocked.reopen()
    work(blocked)
    blocked.embedded.close()
    assert (blocked.directory / "ledger").read_text() == "in the way"


def test_buffered_rows_are_written_when_the_folder_is_mended(blocked: Site) -> None:
    queue(blocked)
    for _ in range(3):
        work(blocked)
        roll(blocked)
    unblock(blocked)
    roll(blocked)
    work(blocked)
    shown = peeked(blocked)
    found = closed(blocked)
    assert found.standing == set(shown)
    assert len(found.accepted) == 12
    assert found.gaps == []
    assert is_well(blocked)
    assert added_up(rows_of(blocked, OPERATIONS)) == metered(blocked)


def test_a_trail_that_could_not_be_written_is_reported_after_a_crash(blocked: Site) -> None:
    queue(blocked)
    work(blocked)
    roll(blocked)
    blocked.crash()
    unblock(blocked)
    found = closed(blocked)
    assert len(found.accepted) == 3
    assert len(found.ended) == 3


def test_a_folder_that_breaks_and_is_mended_counts_nothing_twice(noted: Site) -> None:
    queue(noted)
    work(noted)
    roll(noted)
    aside = noted.directory / "aside"
    (noted.directory / "ledger").rename(aside)
    (noted.directory / "ledger").write_text("in the way")
    for _ in range(3):
        work(noted)
        roll(noted)
    unblock(noted)
    aside.rename(noted.directory / "ledger")
    found = closed(noted)
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)
    assert len(found.ended) == len(found.accepted) == 12
    assert all(count == 1 for (event, _), count in found.tellings.items() if event != "standing")


def test_a_day_that_is_written_is_not_written_again_for_another_that_is_not(noted: Site) -> None:
    noted.wait(hours=23, minutes=59, seconds=30)
    queue(noted)
    send(noted, "a")
    in_the_way = noted.directory / "ledger/operations/day=2030-01-02"
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("in the way")
    postpone_roll(noted.engine, 3_600_000_000)  # so that one roll has both days
    noted.wait(seconds=40)
    send(noted, "b")
    send(noted, "c")
    noted.wait(hours=2)
    roll(noted)
    in_the_way.unlink()
    roll(noted)
    noted.embedded.close()
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def test_an_old_day_that_cannot_be_removed_makes_nothing_count_twice(noted: Site) -> None:
    queue(noted)
    roll(noted)
    (noted.directory / "ledger/operations/day=2020-01-01/somebody's").mkdir(parents=True)
    noted.wait(days=1)
    send(noted, "a")
    roll(noted)
    noted.embedded.close()
    assert added_up(rows_of(noted, OPERATIONS)) == metered(noted)


def test_records_that_a_sick_ledger_let_the_log_forget_leave_a_gap_after_a_crash(
    small: Site,
) -> None:
    send(small, "stays")
    roll(small)
    aside = small.directory / "aside"
    (small.directory / "ledger").rename(aside)
    (small.directory / "ledger").write_text("in the way")
    let_pass(small)
    unblock(small)
    aside.rename(small.directory / "ledger")
    small.crash()
    shown = set(peeked(small))
    found = closed(small)
    assert found.gaps
    assert found.inventories[-1] == shown


def test_rows_that_memory_cannot_hold_are_dropped_with_a_gap(
    blocked: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.broker.accounts.ledgers.LEDGER_BUFFERED_ROWS", 10)
    queue(blocked)
    for _ in range(6):
        send(blocked, *"abcd")
        roll(blocked)
    unblock(blocked)
    roll(blocked)
    found = closed(blocked)
    assert found.gaps
    assert 4 <= len(found.accepted) <= 12
    assert found.inventories[-1] == places(blocked, range(1, 25))
    assert added_up(rows_of(blocked, OPERATIONS)) == metered(blocked)
