"""The log and the spill store after a sync failed or a start was refused."""

import errno
import os
from pathlib import Path

import pytest

from tests.unit.test_log import heard, opened, saying
from twinbus.broker.store.log import Log
from twinbus.broker.store.spill import Spill
from twinbus.broker.store.storage import DiskStorage, Storage
from twinbus.errors import LogDamagedError, StoreUnavailableError


class ForgetfulStorage(DiskStorage):
    """A disk that cannot make names durable for a while."""

    forgets_names = False

    def sync_directory(self, path: Path) -> None:
        if self.forgets_names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)


def started(directory: Path, storage: Storage) -> Log:
    """Start a log whose every record begins a segment."""
    log = Log(directory, storage, segment_bytes=0)
    assert list(log.replay()) == []
    return log


def found_in(directory: Path) -> list[str]:
    with opened(directory) as (_, records):
        return heard(records)


def test_a_segment_begun_in_vain_needs_no_segment_that_is_given_up_later(tmp_path: Path) -> None:
    disk = ForgetfulStorage()
    log = started(tmp_path, disk)
    for text in ("a", "b", "c"):
        log.append(saying(text))
    disk.forgets_names = True
    with pytest.raises(StoreUnavailableError):
        log.append(saying("refused"))
    disk.forgets_names = False
    log.drop(1)
    log.crash()
    assert found_in(tmp_path) == ["b", "c"]


def test_a_start_that_is_refused_does_not_forget_how_far_the_log_went(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=0) as (log, _):
        for text in ("a", "b", "c"):
            log.append(saying(text))
    max(tmp_path.glob("*.log")).unlink()
    for _ in range(2):
        with pytest.raises(LogDamagedError), opened(tmp_path):
            pass
    with opened(tmp_path, accept_damage=True) as (log, _):
        assert log.seen_record == 3


def test_a_spill_store_that_cannot_be_read_can_be_opened_again(tmp_path: Path) -> None:
    bad = tmp_path / f"{1:020d}.log"
    bad.write_bytes(b"x" * 128)
    with pytest.raises(LogDamagedError):
        Spill(tmp_path, None)
    bad.unlink()
    Spill(tmp_path, None).close()
