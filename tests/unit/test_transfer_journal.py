"""The journal of transfers: nothing whole is lost, nothing torn is read, nobody is stopped."""

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from twinbus.clock import ManualClock
from twinbus.cost.survey import survey
from twinbus.ledger import JOURNAL
from twinbus.limits import LEDGER_ROLL_INTERVAL
from twinbus.syphon.carrier import Carried, Range
from twinbus.syphon.transfers import Passed, TransferLedger

QUEUE = "contoso/x-servicebus-transfer/0"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: ManualClock) -> TransferLedger:
    return TransferLedger(tmp_path, clock)


def note(ledger: TransferLedger, number: int) -> None:
    carried = Carried(QUEUE, Range(1, number, number, f"{QUEUE}#1.1"))
    carried.completed.append((number, number))
    at = pa.array([0], pa.timestamp("us", "UTC"))
    ids, paths = pa.array([f"m{number}"]), pa.array(["orders"])
    ledger.note(carried, Passed(np.array([number]), at, ids, paths, np.array([7])))
    ledger.write()


def message_ids(folder: Path) -> list[str]:
    """Return the ids of the files, in the order of the queue."""
    rows = ds.dataset(folder / "ledger/transfers", format="parquet").to_table()
    return [f"m{n}" for n in sorted(rows.column("sequence_number").to_pylist())]


def journals(folder: Path) -> list[Path]:
    return list((folder / "ledger/transfers").glob(f"*{JOURNAL}"))


def test_lines_become_a_file_when_the_journal_is_old(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    for number in (1, 2, 3):
        note(ledger, number)
    assert not list(tmp_path.rglob("*.parquet"))
    clock.advance(LEDGER_ROLL_INTERVAL - timedelta(microseconds=1))
    ledger.roll()
    assert not list(tmp_path.rglob("*.parquet"))
    clock.advance(timedelta(microseconds=1))
    ledger.roll()
    assert message_ids(tmp_path) == ["m1", "m2", "m3"]
    assert not journals(tmp_path)


def test_the_process_that_writes_makes_a_file_of_its_old_journal_itself(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    note(ledger, 1)
    clock.advance(LEDGER_ROLL_INTERVAL)
    note(ledger, 2)
    note(ledger, 3)
    assert message_ids(tmp_path) == ["m1", "m2"]
    assert len(journals(tmp_path)) == 1


@pytest.mark.parametrize("lost", [1, 4, 40, 200, 800])
def test_a_torn_end_costs_its_own_entry_only(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock, lost: int
) -> None:
    for number in (1, 2):
        note(ledger, number)
    [path] = journals(tmp_path)
    os.truncate(path, path.stat().st_size - lost)  # its process was killed
    second = TransferLedger(tmp_path, clock)
    for number in (3, 4):
        note(second, number)
    second.roll(at_once=True)
    assert message_ids(tmp_path) == ["m1", "m3", "m4"]


def test_a_damaged_entry_ends_what_is_read(tmp_path: Path, ledger: TransferLedger) -> None:
    for number in (1, 2):
        note(ledger, number)
    [path] = journals(tmp_path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 0xFF
    path.write_bytes(bytes(content))
    ledger.roll(at_once=True)
    assert message_ids(tmp_path) == ["m1"]


def test_each_process_has_its_journal_and_one_file_is_made_of_all(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    note(ledger, 1)
    note(TransferLedger(tmp_path, clock), 2)
    assert len(journals(tmp_path)) == 2
    ledger.roll(at_once=True)
    assert message_ids(tmp_path) == ["m1", "m2"]
    assert len(list(tmp_path.rglob("*.parquet"))) == 1


def test_who_writes_after_its_journal_was_taken_over_begins_another(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    note(ledger, 1)
    TransferLedger(tmp_path, clock).roll(at_once=True)
    note(ledger, 2)
    ledger.roll(at_once=True)
    assert message_ids(tmp_path) == ["m1", "m2"]


def test_a_journal_that_a_killed_process_had_taken_over_is_not_forgotten(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    note(ledger, 1)
    [path] = journals(tmp_path)
    path.rename(path.with_name(f".1-0.taken{JOURNAL}"))
    TransferLedger(tmp_path, clock).roll()  # the manual clock is far from that of the disk
    assert message_ids(tmp_path) == ["m1"]


def _write_many(folder: Path, first: int, count: int) -> None:
    ledger = TransferLedger(folder)
    for number in range(first, first + count):
        note(ledger, number)


def test_no_line_is_lost_while_processes_write_and_another_makes_files(tmp_path: Path) -> None:
    each = 60
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_many, args=(tmp_path, number * each, each))
        for number in range(3)
    ]
    for writer in writers:
        writer.start()
    ledger = TransferLedger(tmp_path)
    while any(writer.is_alive() for writer in writers):
        ledger.roll(at_once=True)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    ledger.roll(at_once=True)
    rows = ds.dataset(tmp_path / "ledger/transfers", format="parquet").to_table()
    assert set(rows.column("sequence_number").to_pylist()) == set(range(3 * each))
    assert not journals(tmp_path)


def test_lines_travel_to_a_process_that_can_write_them(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    worker = TransferLedger(None, clock, by_commit=True)
    note(worker, 1)
    ledger.add(worker.take())
    ledger.add(worker.take())  # nothing more
    ledger.write()
    ledger.roll(at_once=True)
    assert message_ids(tmp_path) == ["m1"]


def test_lines_that_could_not_be_written_are_kept(tmp_path: Path, ledger: TransferLedger) -> None:
    (tmp_path / "ledger").write_text("in the way")
    with pytest.raises(OSError, match="ledger"):
        note(ledger, 1)
    (tmp_path / "ledger").unlink()
    note(ledger, 2)
    ledger.roll(at_once=True)
    assert message_ids(tmp_path) == ["m1", "m2"]


def test_the_survey_names_a_journal_and_whatever_lies_in_the_wrong_place(
    tmp_path: Path, ledger: TransferLedger
) -> None:
    note(ledger, 1)
    base = tmp_path / "ledger"
    for odd in ("transfers/2026-01-01", "transfers/day=2026-01-01 (copy)", "tansfers"):
        (base / odd).mkdir(parents=True)
    (base / "transfers/day=2026-02-02").write_text("a file")
    (base / "transfers/loose.parquet").write_text("loose")
    found = survey([tmp_path], skip_bad=True)
    [path] = journals(tmp_path)
    assert {str(entity.path) for entity in found.left_out} == {
        str(path),
        *(
            str(base / name)
            for name in (
                "tansfers",
                "transfers/2026-01-01",
                "transfers/day=2026-01-01 (copy)",
                "transfers/day=2026-02-02",
                "transfers/loose.parquet",
            )
        ),
    }
