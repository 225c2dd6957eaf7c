"""The folder through which the parts of a syphon talk."""

import shutil
from pathlib import Path

from twinbus.syphon.carrier import NOT_DIVERTED, Failure
from twinbus.syphon.desk import Desk, SyphonProgress
from twinbus.syphon.destinations import Trouble
from twinbus.syphon.tally import Stock, Tally
from twinbus.testing import ManualClock


def test_before_the_first_batch_nothing_was_moved(tmp_path: Path) -> None:
    assert Desk(tmp_path).progress() == (SyphonProgress(), [])


def test_the_progress_that_was_seen_outlives_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "desk"
    folder.mkdir()
    planner, application = Desk(folder), Desk(folder)
    planner.put_progress(SyphonProgress(moved=12))
    assert application.progress()[0].moved == 12
    shutil.rmtree(folder)
    assert application.progress()[0].moved == 12


def test_messages_that_no_pairing_diverted_are_not_reported_as_a_failing_destination(
    tmp_path: Path,
) -> None:
    tally = Tally(Desk(tmp_path), ManualClock())
    failure = Failure("NotDiverted", "no pairing diverted them, so they stay in q/5")
    tally.note([Trouble(NOT_DIVERTED, failure, 0, 1, 0)], [], [])
    tally.publish(Stock())
    _, [note] = Desk(tmp_path).progress()
    assert note.text == "messages without x-ms-path: no pairing diverted them, so they stay in q/5"
