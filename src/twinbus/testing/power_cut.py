"""A disk that loses power, and the states it may be in afterwards.

power = PowerSupply(seed)
log = PowerCutStorage(folder / "log", power)         # one storage per directory, one power supply
namespace = EmbeddedNamespace(folder, clock, Storages(log=log, spill=...))
power.fail_in(40, applies_last=True)                 # the 40th operation from now on is the last
log.cut(target / "log")                              # what is on the disk if the power fails now

Operations change the real files at once, so that readers and memory maps see them. Beside them the
storage keeps what is durable. `cut` draws one of the states that the contract of `Storage` allows:

    content   Each block of 512 bytes is as it was at the last `sync` of its file, or as some write
              since then left it, whatever the other blocks are. So is the size of the file.
    names     A name that was made, changed or removed since the last `sync_directory` is there or
              not, whatever the others are. A rename leaves the old name or the new one. `sync`
              makes no name durable, and `sync_directory` no content.
    failures  A `sync` that failed may have written any of its blocks. A later `sync` does not write
              them again, as on Linux: only a new write or a `truncate` makes their content certain.
    others    Files that are changed without the storage (`LOCK`) were never synced. Directories
              inside the directory are left out.

The seed decides everything, so a seed that led to a failure leads to it again.
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

BLOCK_BYTES = 512  # what a disk writes whole or not at all
_ZEROS = bytes(BLOCK_BYTES)


class PowerSupply:
    """The power of one machine: it fails at a chosen operation of any of its disks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a seeded generator is the point
        self.disks: list[PowerCutStorage] = []
        self.operations = 0
        self.is_out = False
        self._fails_at: int | None = None
        self._applies_last = False

    def fail_in(self, operations: int, *, applies_last: bool) -> None:
        """Fail at an operation from now on, before or after that operation has its effect."""
        self._fails_at = self.operations + operations
        self._applies_last = applies_last

    def fail(self) -> None:
        """Fail now: no operation after this one has an effect."""
        for disk in self.disks:
            disk.freeze()
        self.is_out = True

    def restore(self) -> None:
        """Let operations through again: only the process died; the files are as it left them."""
        for disk in self.disks:
            disk.thaw()
        self.is_out = False
        self._fails_at = None

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Count an operation; raise PowerFailure before or after the one that is the last."""
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
class _File:
    """The content of one file: what is durable, what readers see, and what was written between."""

    durable: dict[int, bytes] = field(default_factory=dict)  # block number -> bytes; else zeros
    durable_size: int = 0
    seen: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    unsynced: dict[int, list[bytes]] = field(default_factory=dict)  # versions, oldest first
    unsynced_sizes: list[int] = field(default_factory=list)
    unwritten: set[int] = field(default_factory=set)  # blocks that a later sync does not write
    was_opened: bool = False  # else a change of the real file did not come through the storage
    is_broken: bool = False  # writing it fails

    @classmethod
    def of(cls, content: bytes) -> "_File":
        """Return a file whose content is durable."""
        blocks = dict(enumerate(_blocks(content)))
        blocks = {number: block for number, block in blocks.items() if block != _ZEROS}
        return cls(blocks, len(content), dict(blocks), len(content))

    def resize(self, size: int) -> None:
        """Cut the file off, or let zeros follow."""
        if size == self.size:
            return
        for number in [number for number in self.seen if (number + 1) * BLOCK_BYTES > size]:
            kept = max(0, size - number * BLOCK_BYTES)
            self._put(number, self.seen[number][:kept].ljust(BLOCK_BYTES, b"\0"))
        self.size = size
        self.unsynced_sizes.append(size)

    def write(self, offset: int, content: bytes) -> None:
        """Change bytes from an offset on."""
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
        """Make what readers see durable, but for blocks that an earlier sync failed to write."""
        for number in list(self.unsynced):
            if number in self.unwritten and number * BLOCK_BYTES < self.size:
                continue
            self.durable[number] = self.seen.get(number, _ZEROS)
            del self.unsynced[number]
        self.durable_size = self.size
        self.unsynced_sizes.clear()
        self.unwritten &= self.unsynced.keys()

    def fail_to_sync(self) -> None:
        """Note that each block may have been written or not, and is not written by a later sync."""
        self.unwritten.update(self.unsynced)

    def after_power_cut(self, generator: random.Random, kept: float | None) -> bytes:
        """Return one of the contents that the file may have."""
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
        """What readers see."""
        return _joined(self.seen, self.size)


@dataclass(frozen=True, slots=True)
class _NameChange:
    """A file got a name, lost one, or both."""

    file: _File
    left: str | None
    taken: str | None


class PowerCutStorage(DiskStorage):
    """The files of one directory, with troubles on demand, and what a power cut leaves of them."""

    def __init__(self, directory: Path, power: PowerSupply) -> None:
        self.full = False  # writes fail with ENOSPC, but for a file whose space was reserved
        self.fails_sync = False
        self.error_rate = 0.0  # of any operation, with EIO
        self._directory = directory
        self._power = power
        self._names = {path.name: _File.of(path.read_bytes()) for path in _files_in(directory)}
        self._durable_names = dict(self._names)
        self._changes: list[_NameChange] = []  # of names, since the last `sync_directory`
        self._opened: dict[int, _File] = {}  # by descriptor
        self._reserved: set[int] = set()  # descriptors of files whose space was reserved
        self._foreign: dict[str, bytes] = {}  # when the power failed
        power.disks.append(self)

    def break_files(self) -> None:
        """Let every change of the files that are there now fail with EIO; new files work."""
        for file in self._names.values():
            file.is_broken = True

    def heal(self) -> None:
        """End every trouble."""
        self.full, self.fails_sync, self.error_rate = False, False, 0.0
        for file in self._names.values():
            file.is_broken = False

    @property
    def is_sick(self) -> bool:
        """Whether there is any trouble."""
        is_broken = any(file.is_broken for file in self._names.values())
        return self.full or self.fails_sync or self.error_rate > 0 or is_broken

    # -- operations ----------------------------------------------------------------------------

    def create(self, path: Path, size: int = 0) -> int:
        """Open a file for writing; a full disk reserves nothing."""
        if self._power.is_out:
            raise PowerFailure
        with self._power.operation():
            self._meet_trouble()
            descriptor = super().create(path, 0 if self.full else size)
            if path.name not in self._names:
                self._change_name(_File(), None, path.name)
            file = self._opened[descriptor] = self._names[path.name]
            file.was_opened = True
            file.resize(os.fstat(descriptor).st_size)
            self._reserved.discard(descriptor)
            if path.name == "reserve" and not size:
                self._reserved.add(descriptor)
            return descriptor

    def write(self, descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all bytes, or what the trouble lets through."""
        if self._power.is_out:
            return
        whole = b"".join(buffers)
        with self._power.operation():
            trouble = self._trouble(descriptor)
            if trouble:
                whole = whole[: int(self._power.random.random() * len(whole))]
            super().write(descriptor, offset, [memoryview(whole)] if whole else [])
            self._opened[descriptor].write(offset, whole)
            if trouble:
                raise OSError(trouble, os.strerror(trouble))

    def sync(self, descriptor: int) -> None:
        """Make the content of a file durable, but not its name."""
        if self._power.is_out:
            return
        with self._power.operation():
            trouble = self._trouble(descriptor) or (errno.EIO if self.fails_sync else 0)
            if trouble:
                self._opened[descriptor].fail_to_sync()
                raise OSError(trouble, os.strerror(trouble))
            self._opened[descriptor].sync()

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file off at a size."""
        if self._power.is_out:
            return
        with self._power.operation():
            self._meet_trouble(self._opened[descriptor])
            super().truncate(descriptor, size)
            self._opened[descriptor].resize(size)

    def rename(self, path: Path, name: Path) -> None:
        """Give a file another name."""
        if self._power.is_out:
            return
        with self._power.operation():
            self._meet_trouble()
            super().rename(path, name)
            self._change_name(self._names.pop(path.name), path.name, name.name)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        if self._power.is_out:
            return
        with self._power.operation():
            self._meet_trouble()
            super().remove(path)
            self._change_name(self._names.pop(path.name), path.name, None)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the directory durable, but not what the files hold."""
        assert path == self._directory
        if self._power.is_out:
            return
        with self._power.operation():
            self._meet_trouble()
            self._durable_names = dict(self._names)
            self._changes.clear()

    def _trouble(self, descriptor: int) -> int:
        """Return the error number that an operation on a file must fail with; 0: it works."""
        if self.full and descriptor not in self._reserved:
            return errno.ENOSPC
        is_broken = self._opened[descriptor].is_broken
        return errno.EIO if is_broken or self._power.random.random() < self.error_rate else 0

    def _meet_trouble(self, file: _File | None = None) -> None:
        is_broken = file is not None and file.is_broken
        if is_broken or self._power.random.random() < self.error_rate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _change_name(self, file: _File, left: str | None, taken: str | None) -> None:
        self._changes.append(_NameChange(file, left, taken))
        if taken is not None:
            self._names[taken] = file

    # -- the cut -------------------------------------------------------------------------------

    def cut(self, target: Path, kept: float | None = None) -> None:
        """Write a state that the disk may be in, if the power fails now, to another directory.

        `kept` is the share of what was not synced that is on the disk all the same: 0 for nothing,
        1 for everything, None for one that is drawn.
        """
        target.mkdir(parents=True, exist_ok=True)
        generator = self._power.random
        for name, file in self._names_after_power_cut(kept).items():
            (target / name).write_bytes(file.after_power_cut(generator, kept))
        foreign = self._foreign if self._power.is_out else self._find_foreign()
        for name, content in foreign.items():
            self._cut_foreign(target / name, content, kept)

    def freeze(self) -> None:
        """Note the files that are changed without the storage: a dead process changes none."""
        if not self._power.is_out:
            self._foreign = self._find_foreign()

    def thaw(self) -> None:
        """Undo what was changed without the storage since the power failed."""
        if self._power.is_out:
            for name, content in self._foreign.items():
                (self._directory / name).write_bytes(content)

    def _find_foreign(self) -> dict[str, bytes]:
        found = {path.name: path.read_bytes() for path in _files_in(self._directory)}
        for name, file in self._names.items():
            if file.was_opened or found.get(name) == file.content:
                found.pop(name, None)
        return found

    def _names_after_power_cut(self, kept: float | None) -> dict[str, _File]:
        """Return the files that are there, by name.

        Where a change took a name that another had left, the other one happened, too: no file that
        nobody removed disappears.
        """
        generator = self._power.random
        share = _share(generator) if kept is None else kept
        happened = [generator.random() < share for _ in self._changes]
        for later in reversed(range(len(happened))):
            taken = self._changes[later].taken if happened[later] else None
            for earlier in range(later):
                if taken is not None and self._changes[earlier].left == taken:
                    happened[earlier] = True
        names = dict(self._durable_names)
        for change, did in zip(self._changes, happened, strict=True):
            if did:
                names = {name: file for name, file in names.items() if file is not change.file}
                if change.taken is not None:
                    names[change.taken] = change.file
        return names

    def _cut_foreign(self, target: Path, content: bytes, kept: float | None) -> None:
        """Leave of a file that was changed without the storage whatever an unsynced one may be."""
        before = self._durable_names.get(target.name)
        generator = self._power.random
        part = content[: int(generator.random() * (len(content) + 1))]  # its length may vary
        fate = generator.randrange(5)
        if fate <= 1 and before is not None:
            target.write_bytes(before.after_power_cut(generator, kept))
        elif fate >= 1:
            target.write_bytes((content, content, part, bytes(len(content)))[fate - 1])


def _share(generator: random.Random) -> float:
    """Draw how much of what was not synced is kept: often nothing or everything."""
    return generator.choice((0.0, 1.0, generator.random(), generator.random()))


def _files_in(directory: Path) -> list[Path]:
    found = directory.iterdir() if directory.exists() else ()
    return sorted(path for path in found if path.is_file())


def _joined(blocks: dict[int, bytes], size: int) -> bytes:
    count = -(-size // BLOCK_BYTES)
    return b"".join(blocks.get(number, _ZEROS) for number in range(count))[:size]


def _blocks(content: bytes) -> Iterator[bytes]:
    """Give the bytes of a file block by block; zeros fill up the last."""
    for start in range(0, len(content), BLOCK_BYTES):
        yield content[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
