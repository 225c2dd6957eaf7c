"""The journal of transfers: nothing whole is lost, nothing torn is read, nobody is stopped."""

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


def told(folder: Path) -> list[str]:
    """Return the ids of the files, in the order of the queue."""
    rows = ds.dataset(folder / "ledger/transfers", format="parquet").to_table()
    return [f"m{n}" for n in sorted(rows.column("sequence_number").to_pylist())]


def journal(folder: Path) -> Path:
    return folder / "ledger/transfers" / JOURNAL


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
    assert told(tmp_path) == ["m1", "m2", "m3"]
    assert journal(tmp_path).stat().st_size == 0


@pytest.mark.parametrize("lost", [1, 4, 40, 200, 800])
def test_a_torn_end_costs_its_own_entry_only(
    tmp_path: Path, ledger: TransferLedger, lost: int
) -> None:
    for number in (1, 2):
        note(ledger, number)
    path = journal(tmp_path)
    os.truncate(path, path.stat().st_size - lost)
    for number in (3, 4):
        note(ledger, number)
    ledger.roll(at_once=True)
    assert told(tmp_path) == ["m1", "m3", "m4"]


def test_a_damaged_entry_ends_what_is_read(tmp_path: Path, ledger: TransferLedger) -> None:
    for number in (1, 2):
        note(ledger, number)
    path = journal(tmp_path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 0xFF
    path.write_bytes(bytes(content))
    ledger.roll(at_once=True)
    assert told(tmp_path) == ["m1"]


def test_what_another_worker_wrote_is_in_the_same_file(
    tmp_path: Path, ledger: TransferLedger, clock: ManualClock
) -> None:
    note(ledger, 1)
    note(TransferLedger(tmp_path, clock), 2)
    ledger.roll(at_once=True)
    assert told(tmp_path) == ["m1", "m2"]
    assert len(list(tmp_path.rglob("*.parquet"))) == 1


def test_lines_that_could_not_be_written_are_kept(tmp_path: Path, ledger: TransferLedger) -> None:
    journal(tmp_path).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        note(ledger, 1)
    journal(tmp_path).rmdir()
    note(ledger, 2)
    ledger.roll(at_once=True)
    assert told(tmp_path) == ["m1", "m2"]


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
    assert {one.path.relative_to(base).as_posix() for one in found.left_out} == {
        "tansfers",
        "transfers/.journal",
        "transfers/2026-01-01",
        "transfers/day=2026-01-01 (copy)",
        "transfers/day=2026-02-02",
        "transfers/loose.parquet",
    }
