"""A disk after a power cut: what was synced is there, and anything of the rest may be."""

import os
from pathlib import Path

import pytest

from twinbus.testing import PowerCutStorage, PowerFailure, PowerSupply
from twinbus.testing.power_cut import BLOCK_BYTES

SEEDS = range(40)
OLD, NEW = b"o", b"n"


class Disk:
    """A directory on a disk, and what is left of it."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.directory = folder / "disk"
        self.directory.mkdir(parents=True)
        self._target = folder / "after"
        self._cuts = 0
        self.power = PowerSupply(seed)
        self.storage = PowerCutStorage(self.directory, self.power)

    def write(self, name: str, content: bytes, offset: int = 0) -> int:
        """Write to a file that need not be there; return its descriptor."""
        descriptor = self.storage.create(self.directory / name)
        self.storage.write(descriptor, offset, [memoryview(content)])
        return descriptor

    def make(self, name: str, content: bytes) -> int:
        """Make a durable file; return its descriptor."""
        descriptor = self.write(name, content)
        self.storage.sync(descriptor)
        self.storage.sync_directory(self.directory)
        return descriptor

    def cut(self, kept: float | None = None) -> dict[str, bytes]:
        """Return the files after a power cut."""
        self._cuts += 1
        target = self._target / str(self._cuts)
        self.storage.cut(target, kept)
        return {path.name: path.read_bytes() for path in target.iterdir()}


def states(folder: Path, name: str, content: bytes, changed: bytes) -> set[bytes | None]:
    """Return what many cuts leave of a durable file that was written over and not synced."""
    found = set()
    for seed in SEEDS:
        disk = Disk(folder / str(seed), seed)
        disk.make(name, content)
        disk.write(name, changed)
        found.add(disk.cut().get(name))
    return found


def test_data_that_was_synced_is_there(tmp_path: Path) -> None:
    for seed in SEEDS:
        disk = Disk(tmp_path / str(seed), seed)
        disk.make("a", b"content")
        assert disk.cut() == {"a": b"content"}


def test_readers_see_data_before_it_is_durable(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.write("a", b"content")
    assert (disk.directory / "a").read_bytes() == b"content"
    assert disk.cut(kept=0) == {}


def test_each_block_that_was_not_synced_is_old_or_new(tmp_path: Path) -> None:
    found = states(tmp_path, "a", OLD * 2 * BLOCK_BYTES, NEW * 2 * BLOCK_BYTES)
    assert found == {
        first * BLOCK_BYTES + second * BLOCK_BYTES for first in (OLD, NEW) for second in (OLD, NEW)
    }


def test_a_file_that_grew_has_its_old_size_its_new_one_or_one_between(tmp_path: Path) -> None:
    sizes = {len(content or b"") for content in states(tmp_path, "a", OLD * 10, NEW * 5000)}
    assert {10, 5000} < sizes
    assert all(10 <= size <= 5000 for size in sizes)


def test_a_truncated_file_may_have_its_old_end_until_it_is_synced(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    descriptor = disk.make("a", OLD * 3000)
    disk.storage.truncate(descriptor, 100)
    assert disk.cut(kept=0) == {"a": OLD * 3000}
    assert disk.cut(kept=1) == {"a": OLD * 100}
    disk.storage.sync(descriptor)
    assert disk.cut(kept=0) == {"a": OLD * 100}


def test_reserved_space_reads_as_zeros(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.storage.create(disk.directory / "a", 3000)
    assert disk.cut(kept=1) == {"a": bytes(3000)}


def test_a_sync_makes_no_name_durable(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.storage.sync(disk.write("a", b"content"))
    assert disk.cut(kept=0) == {}
    disk.storage.sync_directory(disk.directory)
    assert disk.cut(kept=0) == {"a": b"content"}


def test_a_sync_of_the_directory_makes_no_content_durable(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.write("a", b"content")
    disk.storage.sync_directory(disk.directory)
    assert disk.cut(kept=0) == {"a": b""}


def test_a_renamed_file_has_its_old_name_or_its_new_one(tmp_path: Path) -> None:
    found = set()
    for seed in SEEDS:
        disk = Disk(tmp_path / str(seed), seed)
        disk.make("a", b"content")
        disk.storage.rename(disk.directory / "a", disk.directory / "b")
        left = disk.cut()
        found.add(tuple(left))
        assert set(left.values()) == {b"content"}
    assert found == {("a",), ("b",)}


def test_a_removed_file_is_there_or_not(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.make("a", b"content")
    disk.storage.remove(disk.directory / "a")
    assert disk.cut(kept=0) == {"a": b"content"}
    assert disk.cut(kept=1) == {}


def test_no_file_disappears_because_another_took_the_name_it_had_left(tmp_path: Path) -> None:
    for seed in SEEDS:
        disk = Disk(tmp_path / str(seed), seed)
        disk.make("a", b"first")
        disk.make("b", b"second")
        disk.storage.rename(disk.directory / "a", disk.directory / "c")
        disk.storage.rename(disk.directory / "b", disk.directory / "a")
        assert set(disk.cut().values()) == {b"first", b"second"}


def test_a_later_sync_does_not_write_what_an_earlier_one_failed_to(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    descriptor = disk.make("a", OLD * 10)
    disk.write("a", NEW * 10)
    disk.storage.fails_sync = True
    with pytest.raises(OSError, match="Input/output"):
        disk.storage.sync(descriptor)
    disk.storage.heal()
    disk.storage.sync(descriptor)
    assert disk.cut(kept=0) == {"a": OLD * 10}
    disk.write("a", NEW * 10)
    disk.storage.sync(descriptor)
    assert disk.cut(kept=0) == {"a": NEW * 10}


def test_a_file_changed_without_the_storage_was_never_synced(tmp_path: Path) -> None:
    found = set()
    for seed in SEEDS:
        disk = Disk(tmp_path / str(seed), seed)
        (disk.directory / "LOCK").write_bytes(b"1234")
        found.add(disk.cut().get("LOCK"))
    assert {None, b"1234", bytes(4)} < found


@pytest.mark.parametrize("applies_last", [False, True])
def test_the_power_fails_before_or_after_an_operation_and_nothing_happens_afterwards(
    tmp_path: Path, applies_last: bool
) -> None:
    disk = Disk(tmp_path)
    descriptor = disk.make("a", OLD * 10)
    disk.power.fail_in(1, applies_last=applies_last)
    with pytest.raises(PowerFailure):
        disk.storage.write(descriptor, 0, [memoryview(NEW * 10)])
    disk.storage.sync(descriptor)
    assert disk.cut(kept=0) == {"a": OLD * 10}
    assert disk.cut(kept=1) == {"a": (NEW if applies_last else OLD) * 10}
    with pytest.raises(PowerFailure):
        disk.storage.create(disk.directory / "b")


def test_a_process_that_died_alone_leaves_its_files_and_what_is_not_durable(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    descriptor = disk.make("a", OLD * 10)
    disk.write("a", NEW * 10)
    disk.power.fail()
    disk.power.restore()
    os.close(descriptor)
    assert (disk.directory / "a").read_bytes() == NEW * 10
    assert disk.cut(kept=0) == {"a": OLD * 10}


def test_the_same_seed_leaves_the_same_disk(tmp_path: Path) -> None:
    left = []
    for run in ("one", "two"):
        disk = Disk(tmp_path / run, seed=7)
        for number in range(20):
            disk.write(f"{number % 3}", bytes([number]) * 700, offset=number * 300)
        left.append([disk.cut() for _ in range(10)])
    assert left[0] == left[1]
