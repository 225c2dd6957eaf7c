"""The folder through which the parts of a syphon talk."""

import shutil
from pathlib import Path

from twinbus.syphon.desk import Desk, SyphonProgress


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
