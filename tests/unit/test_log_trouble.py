"""The log and the spill store after a sync failed or a start was refused."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.log_words import opened, saying, texts_of
from twinbus.broker.store.log import Log
from twinbus.broker.store.spill import Spill
from twinbus.broker.store.storage import DiskStorage, Storage
from twinbus.clock import ManualClock
from twinbus.errors import LogDamagedError, StoreUnavailableError
from twinbus.testing import FaultyStorage, PowerCutStorage, PowerFailure, PowerSupply


class ForgetfulStorage(DiskStorage):
    """A disk that cannot make names durable for a while."""

    forgets_names = False

    def sync_directory(self, path: Path) -> None:
        if self.forgets_names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)


class StubbornStorage(DiskStorage):
    """A disk whose first file accepts one more write, and then no change and no sync."""

    keeps_first_file = False

    def __init__(self) -> None:
        self._first: int | None = None
        self._writes_left = 1

    def create(self, path: Path, size: int = 0) -> int:
        descriptor = super().create(path, size)
        if self._first is None:
            self._first = descriptor
        return descriptor

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._refuses(descriptor):
            self._writes_left -= 1
            if self._writes_left < 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write(descriptor, offset, buffers)

    def sync(self, descriptor: int) -> None:
        if self._refuses(descriptor):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        if self._refuses(descriptor):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(descriptor, size)

    def _refuses(self, descriptor: int) -> bool:
        return self.keeps_first_file and descriptor == self._first


def started(directory: Path, storage: Storage) -> Log:
    """Start a log whose every record begins a segment."""
    log = Log(directory, storage, segment_bytes=0)
    assert list(log.replay()) == []
    return log


def found_in(directory: Path) -> list[str]:
    with opened(directory) as (_, records):
        return texts_of(records)


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


class ForgetfulFullStorage(FaultyStorage):
    """A disk that may be full, and that cannot make names durable for a while."""

    forgets_names = False

    def sync_directory(self, path: Path) -> None:
        if self.forgets_names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)


def test_records_in_the_reserve_are_read_although_a_segment_was_begun_in_vain_before_them(
    tmp_path: Path,
) -> None:
    disk = ForgetfulFullStorage(ManualClock())
    log = Log(tmp_path, disk, segment_bytes=64 * 1024, keeps_reserve=True)
    assert list(log.replay()) == []
    log.append(saying("a"))
    disk.full = True
    with pytest.raises(StoreUnavailableError):
        log.append(saying("refused"))
    log.append(saying("settled"), frees_space=True)
    assert log.is_on_reserve
    disk.full, disk.forgets_names = False, True
    with pytest.raises(StoreUnavailableError):
        log.append(saying("refused, too"))
    disk.full, disk.forgets_names = True, False
    log.append(saying("settled, too"), frees_space=True)
    log.crash()
    assert found_in(tmp_path) == ["a", "settled", "settled, too"]


def test_a_record_that_was_taken_back_but_not_removed_is_ignored(tmp_path: Path) -> None:
    disk = StubbornStorage()
    log = Log(tmp_path, disk)
    assert list(log.replay()) == []
    log.append(saying("a"))
    disk.keeps_first_file = True
    with pytest.raises(StoreUnavailableError):
        log.append(saying("taken back"))
    log.append(saying("b"))
    log.crash()
    assert b"taken back" in (tmp_path / f"{1:020d}.log").read_bytes()
    assert found_in(tmp_path) == ["a", "b"]


def test_a_record_that_a_dead_process_did_not_sync_is_durable_after_the_next_start(
    tmp_path: Path,
) -> None:
    home, after = tmp_path / "home", tmp_path / "after"
    power = PowerSupply(1)
    disk = PowerCutStorage(home, power)
    log = Log(home, disk)
    assert list(log.replay()) == []
    log.append(saying("a"))
    disk.fails_sync = True
    power.fail_in(3, applies_last=False)  # after the write and its sync, before anything is removed
    with pytest.raises(PowerFailure):
        log.append(saying("b"))
    log.crash()
    disk.heal()
    power.restore()
    again = Log(home, disk)
    assert texts_of(list(again.replay())) == ["a", "b"]
    again.crash()
    disk.cut(after, kept=0)
    assert found_in(after) == ["a", "b"]


def test_the_name_of_a_segment_that_a_dead_process_began_is_durable_after_the_next_start(
    tmp_path: Path,
) -> None:
    home, after = tmp_path / "home", tmp_path / "after"
    power = PowerSupply(1)
    disk = PowerCutStorage(home, power)
    log = started(home, disk)
    log.append(saying("a"))
    power.fail_in(5, applies_last=False)  # create, write, sync, rename, and no sync of the name
    with pytest.raises(PowerFailure):
        log.append(saying("not written"))
    log.crash()
    power.restore()
    again = Log(home, disk)
    assert texts_of(list(again.replay())) == ["a"]
    again.append(saying("b"))
    again.crash()
    disk.cut(after, kept=0)
    assert found_in(after) == ["a", "b"]


def test_a_start_whose_last_record_cannot_be_made_durable_is_refused(tmp_path: Path) -> None:
    disk = PowerCutStorage(tmp_path, PowerSupply(1))
    log = Log(tmp_path, disk)
    assert list(log.replay()) == []
    for text in ("a", "b"):
        log.append(saying(text))
    log.crash()
    disk.fails_sync = True
    for _ in range(2):
        refused = Log(tmp_path, disk)
        with pytest.raises(StoreUnavailableError, match="could lose it"):
            list(refused.replay())
        refused.close()
    disk.heal()
    assert found_in(tmp_path) == ["a", "b"]


def test_a_log_that_was_closed_is_read_again_from_a_disk_that_accepts_nothing(
    tmp_path: Path,
) -> None:
    disk = FaultyStorage(ManualClock())
    log = Log(tmp_path, disk)
    assert list(log.replay()) == []
    for text in ("a", "b"):
        log.append(saying(text))
    log.close()
    disk.full = disk.fails_sync = True
    again = Log(tmp_path, disk)
    assert texts_of(list(again.replay())) == ["a", "b"]
    again.close()


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
