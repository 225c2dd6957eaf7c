"""A disk that refuses an append: the failed append leaves nothing, and the next one goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.log_words import opened, opened_until_killed, read, saying
from twinbus.clock import ManualClock
from twinbus.errors import StoreUnavailableError
from twinbus.testing import FaultyStorage


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_a_failed_append_leaves_nothing_and_the_next_goes_to_a_new_segment(
    tmp_path: Path, trouble: str
) -> None:
    disk = FaultyStorage(ManualClock())
    with opened(tmp_path, disk) as (log, _):
        log.append(saying("a"))
        for _ in range(3):
            setattr(disk, trouble, True)
            with pytest.raises(StoreUnavailableError) as caught:
                log.append(saying("lost"))
            assert caught.value.directory == str(tmp_path)
        setattr(disk, trouble, False)
        log.append(saying("b"))
        assert len(log.segments) > 1
        log.append(saying("c"))
    assert read(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
@pytest.mark.parametrize("until", [opened, opened_until_killed])
def test_a_failed_append_leaves_nothing_for_a_restart_to_find(
    tmp_path: Path, trouble: str, until: Callable[..., Any]
) -> None:
    disk = FaultyStorage(ManualClock())
    with until(tmp_path, disk) as (log, _):
        log.append(saying("a"))
        setattr(disk, trouble, True)
        with pytest.raises(StoreUnavailableError):
            log.append(saying("lost"))
    assert read(tmp_path) == ["a"]


@pytest.mark.parametrize("trouble", ["full", "fails_sync"])
def test_a_log_whose_first_append_failed_begins_with_the_next_one(
    tmp_path: Path, trouble: str
) -> None:
    disk = FaultyStorage(ManualClock())
    with opened(tmp_path, disk) as (log, _):
        setattr(disk, trouble, True)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                log.append(saying("lost"))
        setattr(disk, trouble, False)
        log.append(saying("a"))
    assert read(tmp_path) == ["a"]
