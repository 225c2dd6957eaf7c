"""A disk that loses power, and the states in which a power cut may leave it.

power = PowerSupply(seed)
log = PowerCutStorage(folder / "log", power)         # one storage per directory, one power supply
namespace = EmbeddedNamespace(folder, clock, Storages(log=log, spill=...))
power.fail_in(40, applies_last=True)                 # the power fails with the 40th operation
log.cut(target / "log")                              # write a state of the disk after a cut now

Operations change the real files at once, so that readers and memory maps see them. The storage also
keeps the durable content. `cut` draws one of the states that the contract of `Storage` allows:

    content   Each block of 512 bytes has its content of the last `sync`, or of any later write,
              independently of other blocks. The same holds for the size of the file.
    names     Each creation, rename or removal since the last `sync_directory` has happened or not,
              independently of others. A rename leaves the old name or the new one. `sync` makes
              no name durable, and `sync_directory` makes no content durable.
    failures  A failed `sync` may have written any of its blocks. As on Linux, a later `sync` does
              not write them again: their content is uncertain until a new write or `truncate`.
    others    Files that are changed without the storage (`LOCK`) were never synced. Directories
              inside the directory are left out.

The seed decides every choice, so a failure can be repeated with its seed.
"""

import errno
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from twinbus.broker.store.storage import DiskStorage
from twinbus.testing.storage import PowerFailure

BLOCK_BYTES = 512  # a disk writes a block completely or not at all
_ZEROS = bytes(BLOCK_BYTES)


class PowerSupply:
    """The power of one machine: it fails at a chosen operation of any of its disks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a failure must repeat, so it is seeded
        self.disks: list[PowerCutStorage] = []
        self.operations = 0
        self.is_out = False
        self._fails_at: int | None = None
        self._applies_last = False

    def fail_in(self, operations: int, *, applies_last: bool) -> None:
        """Fail with the n-th operation from now.

        With `applies_last`, that operation has its effect before the power fails.
        """
        self._fails_at = self.operations + operations
        self._applies_last = applies_last

    def fail(self) -> None:
        """Fail now: no later operation has an effect."""
        for disk in self.disks:
            disk.freeze()
        self.is_out = True

    def restore(self) -> None:
        """End the power failure without a cut: the files are as the process left them."""
        for disk in self.disks:
            disk.thaw()
        self.is_out = False
        self._fails_at = None

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Count an operation; raise PowerFailure before or after the chosen one."""
        self.operations += 1
        is_last = self.operations == self._fails_at
        if is_last and not self._applies_last:
            self.fail()
            raise PowerFailure
        try:
            yield
        finally:
            if is_last:
                self.fail()
                raise PowerFailure


@dataclass(eq=False, slots=True)
class _SimulatedFile:
    """The content of one file: the durable one, the visible one, and the writes in between."""

    durable: dict[int, bytes] = field(default_factory=dict)  # block number -> bytes; else zeros
    durable_size: int = 0
    seen: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    unsynced: dict[int, list[bytes]] = field(default_factory=dict)  # versions, oldest first
    unsynced_sizes: list[int] = field(default_factory=list)
    unwritten: set[int] = field(default_factory=set)  # blocks that a later sync does not write
    was_opened: bool = False  # by the storage; if not, only others changed the file
    is_broken: bool = False  # writes fail with EIO

    @classmethod
    def of(cls, content: bytes) -> "_SimulatedFile":
        """Return a file whose content is durable."""
        blocks = dict(enumerate(_blocks(content)))
        blocks = {number: block for number, block in blocks.items() if block != _ZEROS}
        return cls(blocks, len(content), dict(blocks), len(content))

    def resize(self, size: int) -> None:
        """Truncate the file, or extend it with zeros."""
        if size == self.size:
            return
        for number in [number for number in self.seen if (number + 1) * BLOCK_BYTES > size]:
            kept = max(0, size - number * BLOCK_BYTES)
            self._put(number, self.seen[number][:kept].ljust(BLOCK_BYTES, b"\0"))
        self.size = size
        self.unsynced_sizes.append(size)

    def write(self, offset: int, content: bytes) -> None:
        """Write bytes at an offset."""
        if not content:
            return
        first, start = divmod(offset, BLOCK_BYTES)
        before = self.seen.get(first, _ZEROS)[:start]
        last, end = divmod(offset + len(content), BLOCK_BYTES)
        after = self.seen.get(last, _ZEROS)[end:] if end else b""
        for number, block in enumerate(_blocks(before + content + after), first):
            self._put(number, block)
        if offset + len(content) > self.size:
            self.size = offset + len(content)
            self.unsynced_sizes.append(self.size)

    def _put(self, number: int, block: bytes) -> None:
        self.seen[number] = block
        self.unsynced.setdefault(number, []).append(block)
        self.unwritten.discard(number)

    def sync(self) -> None:
        """Make the visible content durable, without blocks that an earlier sync failed to write."""
        for number in list(self.unsynced):
            if number in self.unwritten and number * BLOCK_BYTES < self.size:
                continue
            self.durable[number] = self.seen.get(number, _ZEROS)
            del self.unsynced[number]
        self.durable_size = self.size
        self.unsynced_sizes.clear()
        self.unwritten &= self.unsynced.keys()

    def fail_to_sync(self) -> None:
        """Record a failed sync: each block may be written or not, and no later sync writes it."""
        self.unwritten.update(self.unsynced)

    def after_power_cut(self, generator: random.Random, kept: float | None) -> bytes:
        """Return one of the contents that the file may have after a power cut."""
        share = _share(generator) if kept is None else kept
        blocks = dict(self.durable)
        for number, versions in self.unsynced.items():
            if generator.random() < share:
                is_latest = share == 1.0 or generator.random() < 0.5
                blocks[number] = versions[-1] if is_latest else generator.choice(versions)
        size = self.durable_size
        if self.unsynced_sizes and generator.random() < share:
            sizes = [self.durable_size, *self.unsynced_sizes]
            between = generator.randint(min(sizes), max(sizes))
            size = sizes[-1] if share == 1.0 else generator.choice((*sizes, between))
        return _joined(blocks, size)

    @property
    def content(self) -> bytes:
        """The visible content."""
        return _joined(self.seen, self.size)


@dataclass(frozen=True, slots=True)
class _NameChange:
    """A creation, a removal or a rename of a file."""

    file: _SimulatedFile
    old_name: str | None  # None: created
    new_name: str | None  # None: removed


class PowerCutStorage(DiskStorage):
    """The files of one directory, with faults on demand, and their states after a power cut."""

    def __init__(self, directory: Path, power: PowerSupply) -> None:
        self.full = False  # writes fail with ENOSPC, except to a file whose space was reserved
        self.fails_sync = False
        self.error_rate = 0.0  # the share of operations that fail with EIO
        self._directory = directory
        self._power = power
        self._names = {
            path.name: _SimulatedFile.of(path.read_bytes()) for path in _files_in(directory)
        }
        self._durable_names = dict(self._names)
        self._changes: list[_NameChange] = []  # since the last `sync_directory`
        self._opened: dict[int, _SimulatedFile] = {}  # by descriptor
        self._reserved: set[int] = set()  # descriptors of files whose space was reserved
        self._foreign: dict[str, bytes] = {}  # files that bypass the storage, at the power failure
        power.disks.append(self)

    def break_files(self) -> None:
        """Make every change of the existing files fail with EIO; new files work."""
        for file in self._names.values():
            file.is_broken = True

    def heal(self) -> None:
        """End every fault."""
        self.full, self.fails_sync, self.error_rate = False, False, 0.0
        for file in self._names.values():
            file.is_broken = False

    @property
    def is_sick(self) -> bool:
        """Whether there is any fault."""
        is_broken = any(file.is_broken for file in self._names.values())
        return self.full or self.fails_sync or self.error_rate > 0 or is_broken

    # -- operations ----------------------------------------------------------------------------

    def create(self, path: Path, size: int = 0) -> int:
        """Open a file for writing, and reserve its space unless the disk is full."""
        if self._power.is_out:
            raise PowerFailure
        with self._power.operation():
            self._fail_if_faulty()
            descriptor = super().create(path, 0 if self.full else size)
            if path.name not in self._names:
                self._change_name(_SimulatedFile(), None, path.name)
            file = self._opened[descriptor] = self._names[path.name]
            file.was_opened = True
            file.resize(os.fstat(descriptor).st_size)
            self._reserved.discard(descriptor)
            if path.name == "reserve" and not size:
                self._reserved.add(descriptor)
            return descriptor

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes, or a part of them if there is a fault."""
        if self._power.is_out:
            return
        content = b"".join(buffers)
        with self._power.operation():
            fault = self._fault_number(descriptor)
            if fault:
                content = content[: int(self._power.random.random() * len(content))]
            super().write(descriptor, offset, [memoryview(content)] if content else [])
            self._opened[descriptor].write(offset, content)
            if fault:
                raise OSError(fault, os.strerror(fault))

    def sync(self, descriptor: int) -> None:
        """Make the content of a file durable, but not its name."""
        if self._power.is_out:
            return
        with self._power.operation():
            fault = self._fault_number(descriptor) or (errno.EIO if self.fails_sync else 0)
            if fault:
                self._opened[descriptor].fail_to_sync()
                raise OSError(fault, os.strerror(fault))
            self._opened[descriptor].sync()

    def truncate(self, descriptor: int, size: int) -> None:
        """Truncate a file to a size."""
        if self._power.is_out:
            return
        with self._power.operation():
            self._fail_if_faulty(self._opened[descriptor])
            super().truncate(descriptor, size)
            self._opened[descriptor].resize(size)

    def rename(self, path: Path, name: Path) -> None:
        """Rename a file."""
        if self._power.is_out:
            return
        with self._power.operation():
            self._fail_if_faulty()
            super().rename(path, name)
            self._change_name(self._names.pop(path.name), path.name, name.name)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        if self._power.is_out:
            return
        with self._power.operation():
            self._fail_if_faulty()
            super().remove(path)
            self._change_name(self._names.pop(path.name), path.name, None)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the directory durable, but not the content of the files."""
        assert path == self._directory
        if self._power.is_out:
            return
        with self._power.operation():
            self._fail_if_faulty()
            self._durable_names = dict(self._names)
            self._changes.clear()

    def _fault_number(self, descriptor: int) -> int:
        """Return the error number with which an operation on a file must fail; 0 for success."""
        if self.full and descriptor not in self._reserved:
            return errno.ENOSPC
        is_broken = self._opened[descriptor].is_broken
        return errno.EIO if is_broken or self._power.random.random() < self.error_rate else 0

    def _fail_if_faulty(self, file: _SimulatedFile | None = None) -> None:
        is_broken = file is not None and file.is_broken
        if is_broken or self._power.random.random() < self.error_rate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _change_name(
        self, file: _SimulatedFile, old_name: str | None, new_name: str | None
    ) -> None:
        self._changes.append(_NameChange(file, old_name, new_name))
        if new_name is not None:
            self._names[new_name] = file

    # -- the cut -------------------------------------------------------------------------------

    def cut(self, target: Path, kept: float | None = None) -> None:
        """Write to another directory a state that the disk may have if the power fails now.

        `kept` is the share of unsynced changes that are on the disk nevertheless: 0 for none, 1
        for all, None for a random share.
        """
        target.mkdir(parents=True, exist_ok=True)
        generator = self._power.random
        for name, file in self._names_after_power_cut(kept).items():
            (target / name).write_bytes(file.after_power_cut(generator, kept))
        foreign = self._foreign if self._power.is_out else self._find_foreign()
        for name, content in foreign.items():
            self._cut_foreign(target / name, content, kept)

    def freeze(self) -> None:
        """Record the files that bypass the storage: after a power cut nothing changes them."""
        if not self._power.is_out:
            self._foreign = self._find_foreign()

    def thaw(self) -> None:
        """Undo changes that bypassed the storage since the power failed."""
        if self._power.is_out:
            for name, content in self._foreign.items():
                (self._directory / name).write_bytes(content)

    def _find_foreign(self) -> dict[str, bytes]:
        found = {path.name: path.read_bytes() for path in _files_in(self._directory)}
        for name, file in self._names.items():
            if file.was_opened or found.get(name) == file.content:
                found.pop(name, None)
        return found

    def _names_after_power_cut(self, kept: float | None) -> dict[str, _SimulatedFile]:
        """Return the files that exist after a power cut, by name.

        If a change happened that gave a file the old name of an earlier change, the earlier change
        happened as well. So no file disappears that was not removed.
        """
        generator = self._power.random
        share = _share(generator) if kept is None else kept
        happened = [generator.random() < share for _ in self._changes]
        for later in reversed(range(len(happened))):
            reused = self._changes[later].new_name if happened[later] else None
            for earlier in range(later):
                if reused is not None and self._changes[earlier].old_name == reused:
                    happened[earlier] = True
        names = dict(self._durable_names)
        for change, did in zip(self._changes, happened, strict=True):
            if did:
                names = {name: file for name, file in names.items() if file is not change.file}
                if change.new_name is not None:
                    names[change.new_name] = change.file
        return names

    def _cut_foreign(self, target: Path, content: bytes, kept: float | None) -> None:
        """Write one of the contents that a file may have if it was changed but never synced."""
        before = self._durable_names.get(target.name)
        generator = self._power.random
        part = content[: int(generator.random() * (len(content) + 1))]  # the size is not durable
        fate = generator.randrange(5)
        if fate <= 1 and before is not None:
            target.write_bytes(before.after_power_cut(generator, kept))
        elif fate >= 1:
            target.write_bytes((content, content, part, bytes(len(content)))[fate - 1])


def _share(generator: random.Random) -> float:
    """Draw the share of unsynced changes that are kept: often none or all."""
    return generator.choice((0.0, 1.0, generator.random(), generator.random()))


def _files_in(directory: Path) -> list[Path]:
    found = directory.iterdir() if directory.exists() else ()
    return sorted(path for path in found if path.is_file())


def _joined(blocks: dict[int, bytes], size: int) -> bytes:
    count = -(-size // BLOCK_BYTES)
    return b"".join(blocks.get(number, _ZEROS) for number in range(count))[:size]


def _blocks(content: bytes) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks; zeros fill the last block."""
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
