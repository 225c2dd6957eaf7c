"""Directories that were restored, copied or lost a part: what is known stays known, no more."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.contracts.words import QUEUE, bodies, complete, message, peek, queue, receive, send
from tests.inside import remembered_starts
from tests.namespaces import ROOT
from tests.scenarios.site import Site
from twinbus.cli.root import root
from twinbus.errors import LogDamagedError
from twinbus.ledger import NO_LEDGER, RESTORED, LedgerSettings
from twinbus.message import conform
from twinbus.namespace.embedded import EmbeddedNamespace
from twinbus.protocol.commands import LeaseRange, Origin, PutKey, RangeLease, ReadRange, Send

BACKLOG = "contoso/x-servicebus-transfer/0"
MakeSite = Callable[..., Site]


@pytest.fixture
def away(make_site: MakeSite) -> Site:
    """A secondary with a backlog queue."""
    site = make_site()
    queue(site, BACKLOG)
    return site


@pytest.fixture
def home(make_site: MakeSite) -> Site:
    site = make_site()
    queue(site)
    return site


def copy_of(site: Site) -> Path:
    """Copy the directory of a running namespace, as a backup does."""
    copy = site.directory.with_name(f"{site.directory.name}-copy")
    shutil.copytree(site.directory, copy)
    return copy


def restore(site: Site, copy: Path) -> None:
    """Lose the directory, and go on with the copy."""
    site.crash()
    site.embedded.close()
    shutil.rmtree(site.directory)
    shutil.copytree(copy, site.directory)
    site.open()


def leased(site: Site) -> RangeLease:
    lease: RangeLease = site.ask(LeaseRange(BACKLOG, "syphon", 100))
    return lease


def bring_home(away: Site, home: Site) -> None:
    """Do what a syphon does, but settle nothing: the primary must recognise what comes again."""
    while lease := away.ask(LeaseRange(BACKLOG, "syphon", 100)):
        batch = away.ask(ReadRange(BACKLOG, lease.epoch, lease.first, lease.last))
        numbers = batch.column("sequence_number").to_pylist()
        home.ask(Send(QUEUE, conform(batch), Origin(lease.origin, numbers)))
    away.wait(minutes=2)  # the leases lapse


def test_new_messages_of_a_restored_secondary_are_not_taken_for_known(
    away: Site, home: Site
) -> None:
    send(away, "a", "b", path=BACKLOG)
    copy = copy_of(away)
    send(away, "c", "d", path=BACKLOG)
    bring_home(away, home)
    restore(away, copy)
    send(away, "e", "f", "g", path=BACKLOG)
    bring_home(away, home)
    assert bodies(peek(home)) == ["a", "b", "c", "d", "e", "f", "g"]


def test_a_secondary_restored_twice_from_one_copy_is_another_origin_each_time(
    away: Site, home: Site
) -> None:
    send(away, "a", path=BACKLOG)
    copy = copy_of(away)
    for body in "bcd":
        restore(away, copy)
        send(away, body, path=BACKLOG)
        bring_home(away, home)
    assert bodies(peek(home)) == ["a", "b", "c", "d"]


def test_messages_keep_the_names_they_had_through_restarts(away: Site, home: Site) -> None:
    for body in "abc":
        send(away, body, path=BACKLOG)
        bring_home(away, home)
        away.reopen()
        bring_home(away, home)
        away.crash()
    assert bodies(peek(home)) == ["a", "b", "c"]


def test_a_lease_ends_where_another_start_began_to_number(away: Site) -> None:
    send(away, "a", "b", path=BACKLOG)
    away.reopen()
    send(away, "c", path=BACKLOG)
    first, second = leased(away), leased(away)
    assert (first.first, first.last, second.first) == (1, 2, 3)
    assert first.origin != second.origin


def test_nobody_can_guess_the_name_of_a_queue(make_site: MakeSite) -> None:
    names = set()
    for _ in range(2):
        site = make_site()
        queue(site, BACKLOG)
        send(site, "a", path=BACKLOG)
        names.add(leased(site).origin)
    assert len(names) == 2


def test_starts_of_which_no_message_is_left_are_forgotten(make_site: MakeSite) -> None:
    site = make_site(segment_bytes=2000)
    queue(site, BACKLOG)
    for _ in range(20):
        send(site, *["x" * 500] * 5, path=BACKLOG)
        complete(site, *receive(site, BACKLOG), path=BACKLOG)
        site.reopen()
    assert remembered_starts(site.engine) <= 3


def test_a_log_that_is_older_than_its_ledger_says_so_and_voids_what_it_lost(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(ledger=LedgerSettings())
    queue(site)
    send(site, "a")
    copy = copy_of(site)
    send(site, message("lost", message_id="lost"))
    site.wait(minutes=2)
    site.embedded.close()
    shutil.rmtree(site.directory / "log")
    shutil.copytree(copy / "log", site.directory / "log")
    site.open()
    assert "restored from an older copy" in caplog.text
    lineage = site.embedded.lineage
    assert lineage.lost_until > lineage.last_record
    send(site, "b")
    assert bodies(peek(site)) == ["a", "b"]
    site.embedded.close()
    files = sorted(site.directory.glob("ledger/messages/*/*.parquet"))
    rows: list[dict[str, Any]] = [r for f in files for r in pq.ParquetFile(f).read().to_pylist()]
    [void] = [row for row in rows if row["event"] == RESTORED]
    assert (void["first"], void["last"]) == (lineage.last_record + 1, lineage.lost_until)
    late = [row["record"] for row in rows if row["event"] == "accepted" and row["first"] == 2]
    assert sorted(void["first"] <= record <= void["last"] for record in late) == [False, True]
    site.open()
    assert site.embedded.lineage.lost_until == site.embedded.lineage.last_record


@pytest.mark.parametrize("gone", [0, -1])
def test_a_log_without_its_oldest_or_newest_segment_does_not_start_but_can_be_repaired(
    make_site: MakeSite, gone: int
) -> None:
    site = make_site(segment_bytes=2000)
    queue(site)
    for number in range(30):
        send(site, f"{number:02}" * 100)
    site.embedded.close()
    segments = sorted(site.directory.glob("log/*.log"))
    segments[gone].unlink()
    with pytest.raises(LogDamagedError, match=f"{int(segments[gone].stem)}.*missing"):
        site.open()
    refused = CliRunner().invoke(root, ["restored", str(site.directory)])
    assert isinstance(refused.exception, LogDamagedError)
    repaired = CliRunner().invoke(root, ["restored", str(site.directory), "--accept-damage"])
    assert repaired.exit_code == 0, repaired.output
    assert "is in order" in repaired.output
    site.open()
    left = bodies(peek(site))
    assert 0 < len(left) < 30
    send(site, "anew")
    site.reopen()
    assert bodies(peek(site)) == [*left, "anew"]


def lose_every_segment(site: Site, *, empties: bool = False) -> None:
    for segment in site.directory.glob("log/*.log"):
        if empties:
            segment.write_bytes(b"")
        else:
            segment.unlink()


@pytest.mark.parametrize("empties", [False, True], ids=["deleted", "emptied"])
@pytest.mark.parametrize("witness", ["LOCK", "the ledger", "both"])
def test_a_log_without_its_only_segment_does_not_start_but_can_be_repaired(
    make_site: MakeSite, witness: str, empties: bool
) -> None:
    site = make_site(ledger=NO_LEDGER if witness == "LOCK" else LedgerSettings())
    queue(site)
    send(site, "a", "b")
    complete(site, *receive(site, count=1))
    site.embedded.close()
    lose_every_segment(site, empties=empties)
    if witness == "the ledger":
        (site.directory / "log" / "LOCK").unlink()
    for _ in range(2):
        with pytest.raises(LogDamagedError, match=r"every segment .* missing.*record 3 had been"):
            site.open()
    refused = CliRunner().invoke(root, ["restored", str(site.directory)])
    assert isinstance(refused.exception, LogDamagedError)
    repaired = CliRunner().invoke(root, ["restored", str(site.directory), "--accept-damage"])
    assert repaired.exit_code == 0, repaired.output
    assert "record 3 had been written" in repaired.output
    assert (f"{QUEUE}: 1 accepted messages are lost" in repaired.output) is (witness != "LOCK")
    site.open()
    queue(site)
    send(site, "new")
    site.reopen()
    assert bodies(peek(site)) == ["new"]
    assert site.engine.log.last_record > 3, "lost records keep their numbers"


def test_the_lock_of_a_killed_broker_shows_that_its_log_had_records(make_site: MakeSite) -> None:
    site = make_site()
    queue(site)
    copy = copy_of(site)  # what a kill would leave behind
    for segment in copy.glob("log/*.log"):
        segment.unlink()
    with pytest.raises(LogDamagedError, match="LOCK shows that record 1 had been written"):
        EmbeddedNamespace(copy)


def test_a_namespace_that_lost_its_log_keeps_the_id_that_its_ledger_knows(
    make_site: MakeSite,
) -> None:
    site = make_site(ledger=LedgerSettings())
    queue(site)
    known = site.embedded.id
    site.embedded.close()
    lose_every_segment(site)
    site.open(accept_damage=True)
    assert site.embedded.id == known
    site.reopen()
    assert site.embedded.id == known


def test_restored_says_what_the_ledger_knows_of_the_loss(make_site: MakeSite) -> None:
    site = make_site(ledger=LedgerSettings())
    queue(site)
    send(site, "a")
    copy = copy_of(site)
    send(site, "b", "c")
    site.embedded.close()
    shutil.rmtree(site.directory / "log")
    shutil.copytree(copy / "log", site.directory / "log")
    found = CliRunner().invoke(root, ["restored", str(site.directory)])
    assert found.exit_code == 0, found.output
    assert "1 messages" in found.output
    assert f"{QUEUE}: 2 accepted messages are lost" in found.output
    again = CliRunner().invoke(root, ["restored", str(site.directory)])
    assert "No record is known to be missing" in again.output


def test_a_bundle_shows_no_key_and_only_its_owner_can_read_it(site: Site) -> None:
    site.ask(PutKey(ROOT))
    secret = ROOT.primary

    def fail(*_: object) -> None:
        raise RuntimeError(f"an error that quotes {secret}")

    site.engine.namespace.reclaim = fail  # type: ignore[method-assign]
    queue(site)  # the turn fails after it has answered
    [bundle] = (site.directory / "diagnostics").iterdir()
    assert bundle.stat().st_mode & 0o777 == bundle.parent.stat().st_mode & 0o777 == 0o700
    for file in bundle.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
        assert secret not in file.read_text()
